//! What becomes of a table's schema: its history, and changes that are cut off.

use std::process::Command;

use serde_json::Value;
use tidegate_tests::{
    Database, Pipeline, database, files_destination, fixtures, mirror, plugins, postgres_destination, source, wait_for,
};

/// What `schema history` says of a table; none while it knows nothing of it.
fn history(pipeline: &Pipeline, table: &str, more: &[&str]) -> Option<Value> {
    let output = pipeline.command(&[&["schema", "history", table, "--json"], more].concat()).output().unwrap();
    output.status.success().then(|| serde_json::from_slice(&output.stdout).unwrap())
}

fn versions(pipeline: &Pipeline, table: &str, more: &[&str]) -> Vec<Value> {
    let history = history(pipeline, table, more);
    history.and_then(|history| history["versions"].as_array().cloned()).unwrap_or_default()
}

/// The source's clock, as `schema history` shows moments.
fn clock(database: &Database) -> String {
    database.sql(r#"SELECT to_char(clock_timestamp() AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"')"#)
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

#[test]
fn a_history_says_when_each_version_came_and_who_has_it_since_when_and_replays_add_nothing() {
    let (from, to) = (database(source(), "history"), database(mirror(), "history"));
    from.sql("CREATE TABLE t (id int PRIMARY KEY, v text); CREATE PUBLICATION pub FOR TABLE t");
    let mut pipeline = Pipeline::new(&from, &postgres_destination("mirror", &to));
    pipeline.install_trigger();
    let mut clocks = vec![clock(&from)];
    pipeline.start();
    pipeline.wait_ready();
    clocks.push(clock(&from));
    // There and back again, and the second time no row comes behind it.
    from.sql("ALTER TABLE t RENAME v TO w");
    clocks.push(clock(&from));
    from.sql("INSERT INTO t VALUES (1, 'one')");
    let at = from.sql("SELECT pg_current_wal_insert_lsn()");
    from.sql("ALTER TABLE t RENAME w TO v");
    clocks.push(clock(&from));
    let have = |versions: &[Value]| versions.len() == 3 && versions[2]["destinations"][0]["state"] == "applied";
    let all = wait_for("the third version is at the mirror", || {
        let versions = versions(&pipeline, "public.t", &[]);
        have(&versions).then_some(versions)
    });
    for (index, version) in all.iter().enumerate() {
        let time = text(&version["time"]);
        assert!(*clocks[index] < *time && *time < *clocks[index + 1], "{index}: {clocks:?} {version:#}");
        let destination = &version["destinations"][0];
        assert_eq!(version["number"], index + 1);
        assert_eq!(destination["destination"], "mirror");
        assert_eq!(destination["how"], if index == 0 { "copied" } else { "applied" });
        assert_eq!(destination["state"], if index == 2 { "applied" } else { "passed" });
        assert_eq!(destination["instance"], 1);
        // Both clocks are this machine's.
        assert!(text(&destination["at"]) > time, "{version:#}");
    }
    let changes: Vec<&str> = all.iter().map(|version| text(&version["changes"][0]["what"])).collect();
    assert_eq!(changes, ["public.t", "v -> w", "w -> v"]);
    assert_eq!(all[0]["shape"], all[2]["shape"]);
    assert_ne!(all[0]["shape"], all[1]["shape"]);

    assert_eq!(versions(&pipeline, "public.t", &["--at", &at]), all[1..2]);
    assert_eq!(versions(&pipeline, "public.t", &["--at", &clocks[1]]), all[..1]);
    assert_eq!(versions(&pipeline, "public.t", &["--at", &clocks[2]]), all[1..2]);
    assert_eq!(versions(&pipeline, "public.t", &["--at", "9999-12-31"]), all[2..]);
    let early = pipeline.command(&["schema", "history", "public.t", "--at", &clocks[0]]).output().unwrap();
    assert_eq!(early.status.code(), Some(3));
    assert!(String::from_utf8_lossy(&early.stderr).contains("schema.before-history"));

    pipeline.kill();
    pipeline.start();
    pipeline.wait_ready();
    from.sql("INSERT INTO t VALUES (2, 'two')");
    pipeline.wait_caught_up(&from);
    assert_eq!(versions(&pipeline, "public.t", &[]), all, "{}", pipeline.log());
    assert_eq!(pipeline.stop(), 0);
}

#[test]
fn a_table_that_is_dropped_and_one_that_leaves_the_publication_leave_tombstones_that_say_which() {
    let (from, to) = (database(source(), "tombstones"), database(mirror(), "tombstones"));
    from.sql("CREATE TABLE dropped (id int PRIMARY KEY); CREATE TABLE taken_out (id int PRIMARY KEY)");
    from.sql("CREATE TABLE stays (id int PRIMARY KEY); CREATE PUBLICATION pub FOR TABLE dropped, taken_out, stays");
    let mut pipeline = Pipeline::new(&from, &postgres_destination("mirror", &to));
    pipeline.start();
    pipeline.wait_ready();
    from.sql("DROP TABLE dropped");
    // This one while nobody looks.
    assert_eq!(pipeline.stop(), 0);
    from.sql("ALTER PUBLICATION pub DROP TABLE taken_out");
    pipeline.start();
    let last = |pipeline: &Pipeline, table: &str| versions(pipeline, table, &[]).last().cloned().unwrap_or_default();
    for (table, why, step) in
        [("public.dropped", "dropped", "drop-table"), ("public.taken_out", "unpublished", "unpublish-table")]
    {
        let end = wait_for("the table has ended", || {
            let last = last(&pipeline, table);
            last["ended"].is_string().then_some(last)
        });
        assert_eq!((text(&end["ended"]), text(&end["changes"][0]["step"])), (why, step), "{end:#}");
    }
    // It comes back, as it was: a version behind its tombstone.
    from.sql("ALTER PUBLICATION pub ADD TABLE taken_out");
    wait_for("the table is there again", || (last(&pipeline, "public.taken_out")["number"] == 2).then_some(()));
    assert_eq!(versions(&pipeline, "public.taken_out", &[]).len(), 3);
    assert_eq!(versions(&pipeline, "public.stays", &[]).len(), 1);
    assert_eq!(pipeline.stop(), 0);
}

#[test]
fn versions_beyond_the_bound_go_when_nobody_needs_them_and_the_others_keep_their_numbers() {
    let (from, to) = (database(source(), "retention"), database(mirror(), "retention"));
    from.sql("CREATE TABLE t (id int PRIMARY KEY, n int); CREATE PUBLICATION pub FOR ALL TABLES");
    let mut pipeline = Pipeline::new(&from, &postgres_destination("mirror", &to));
    let file = pipeline.directory().join("tidegate.toml");
    let config = std::fs::read_to_string(&file).unwrap();
    std::fs::write(&file, config.replace("[pipeline]\n", "[pipeline]\nschema_versions = 10\n")).unwrap();
    pipeline.install_trigger();
    pipeline.start();
    pipeline.wait_ready();
    let alter = |default: u32| format!("ALTER TABLE t ALTER n SET DEFAULT {default};\n");
    from.script(&(1..=30).map(alter).collect::<String>());
    let left = wait_for("old versions are gone", || {
        // The slot's own place moves with these, and with what is confirmed.
        from.sql("CHECKPOINT");
        from.sql("INSERT INTO t SELECT coalesce(max(id), 0) + 1 FROM t");
        let history = history(&pipeline, "public.t", &[])?;
        (history["versions"].as_array()?.len() == 10).then_some(history)
    });
    assert_eq!(left["removed"], 21, "{left:#}");
    let numbers: Vec<u64> =
        left["versions"].as_array().unwrap().iter().filter_map(|one| one["number"].as_u64()).collect();
    assert_eq!(numbers, (22..=31).collect::<Vec<u64>>());
    // With what is left everything goes on, behind a restart too.
    pipeline.kill();
    from.sql("ALTER TABLE t ADD added int DEFAULT 7");
    from.sql("INSERT INTO t SELECT max(id) + 1 FROM t");
    pipeline.start();
    pipeline.wait_ready();
    pipeline.wait_caught_up(&from);
    assert_eq!(from.rows("t"), to.rows("t"), "{}", pipeline.log());
    assert_eq!(pipeline.stop(), 0);
}

/// A pipeline into the fixture `steps`, which keeps its tables as files in `{dir}/steps`.
fn into_steps(from: &Database) -> Pipeline {
    let destination = "[[destination]]\nname = \"files\"\nplugin = \"steps\"\nmode = \"merge\"\n\
                       [destination.settings]\npath = \"{dir}/steps\"\n\
                       [destination.grant]\nfiles = [{ path = \"{dir}/steps\", mode = \"read-write\" }]\n\
                       [destination.limits]\nsettle_ms = 10\n";
    let pipeline = Pipeline::new(from, destination);
    std::fs::create_dir(pipeline.directory().join("steps")).unwrap();
    let file = pipeline.directory().join("tidegate.toml");
    let config = std::fs::read_to_string(&file).unwrap();
    let (built, fixtures) = (plugins().display().to_string(), fixtures().display().to_string());
    std::fs::write(&file, config.replace(&built, &fixtures)).unwrap();
    pipeline
}

/// The host dies in a change, and meanwhile somebody changes the table at the destination.
fn somebody_meddles(from: &Database, mut pipeline: Pipeline, meddle: impl Fn(&Pipeline)) {
    from.sql("CREATE TABLE t (id int PRIMARY KEY, a int); CREATE TABLE other (id int PRIMARY KEY)");
    from.sql("CREATE PUBLICATION pub FOR ALL TABLES");
    pipeline.install_trigger();
    pipeline.start_with(&[("TIDEGATE_FAILPOINT", "schema.applying")]);
    pipeline.wait_ready();
    from.sql("ALTER TABLE t RENAME a TO b");
    assert_eq!(pipeline.wait_end(), -1, "{}", pipeline.log());
    meddle(&pipeline);
    pipeline.start();
    let told = wait_for("the change is given up", || {
        let log = pipeline.log();
        let line = log.lines().find(|line| line.contains("schema.fits-neither"))?;
        Some(line.to_owned())
    });
    let lists = ["(id integer, odd integer)", "neither (id integer, a integer) nor (id integer, b integer)"];
    for list in lists {
        assert!(told.contains(list), "`{list}` is not in {told}");
    }
    // The others go on.
    from.sql("INSERT INTO other VALUES (1)");
    pipeline.wait_caught_up(from);
    assert_eq!(pipeline.stop(), 0);
}

#[test]
fn a_mirror_that_is_neither_as_before_nor_as_after_is_named_with_both_lists() {
    let (from, to) = (database(source(), "neither"), database(mirror(), "neither"));
    let fast = format!("{}[destination.limits]\nsettle_ms = 10\n", postgres_destination("mirror", &to));
    somebody_meddles(&from, Pipeline::new(&from, &fast), |_| {
        to.sql("ALTER TABLE t RENAME a TO odd");
    });
    assert_eq!(to.rows("other"), ["(1)"]);
}

#[test]
fn a_table_without_transactions_that_is_neither_as_before_nor_as_after_is_named_with_both_lists() {
    let from = database(source(), "neither_steps");
    somebody_meddles(&from, into_steps(&from), |pipeline| {
        let file = pipeline.directory().join("steps/public.t.json");
        let text = std::fs::read_to_string(&file).unwrap();
        assert!(text.contains("\"a\""), "{text}");
        std::fs::write(&file, text.replace("\"a\"", "\"odd\"")).unwrap();
    });
}

/// Changes with rows before and behind them in one transaction, and where the host dies.
const KILLED: [(&str, &str, &str, &str); 5] = [
    ("schema.applied", "DROP COLUMN gone", "UPDATE t SET gone = 'x', n = n + 1", "UPDATE t SET n = n + 1"),
    ("schema.applied", "RENAME COLUMN old TO new", "UPDATE t SET old = old || '1'", "UPDATE t SET new = new || '2'"),
    ("schema.recorded", "ALTER COLUMN n TYPE bigint", "UPDATE t SET n = n + 1", "UPDATE t SET n = n + 5000000000"),
    ("schema.recorded", "DROP COLUMN late", "UPDATE t SET late = 1", "INSERT INTO t(id, new, n) VALUES (100, 'x', 1)"),
    (
        "schema.applying",
        "ADD COLUMN added int DEFAULT 3",
        "DELETE FROM t WHERE id = 5",
        "UPDATE t SET added = 4 WHERE id < 3",
    ),
];

/// Rows of before and behind each change come again, to tables that have it.
fn replayed(from: &Database, pipeline: &mut Pipeline) {
    from.sql(
        "CREATE TABLE t (id int PRIMARY KEY, gone text, old text, n int, late int);
         INSERT INTO t SELECT i, 'gone', 'old', i, i FROM generate_series(1, 9) i; CREATE PUBLICATION pub FOR ALL TABLES",
    );
    pipeline.install_trigger();
    pipeline.start();
    pipeline.wait_ready();
    assert_eq!(pipeline.stop(), 0);
    for (place, change, before, behind) in KILLED {
        pipeline.start_with(&[("TIDEGATE_FAILPOINT", place)]);
        pipeline.wait_ready();
        // As the statements of a transaction of their own: a change of type is one ALTER TABLE.
        from.script(&format!("BEGIN;\n{before};\nALTER TABLE t {change};\n{behind};\nCOMMIT;\n"));
        assert_eq!(pipeline.wait_end(), -1, "{place}: {change}\n{}", pipeline.log());
        pipeline.start();
        pipeline.wait_ready();
        pipeline.wait_caught_up(from);
        assert_eq!(pipeline.stop(), 0);
    }
}

#[test]
fn rows_of_before_a_drop_a_rename_and_a_wider_type_that_come_again_leave_a_mirror_equal() {
    let (from, to) = (database(source(), "replayed"), database(mirror(), "replayed"));
    let mut pipeline = Pipeline::new(&from, &postgres_destination("mirror", &to));
    replayed(&from, &mut pipeline);
    assert_eq!(from.rows("t"), to.rows("t"), "{}", pipeline.log());
}

#[test]
fn rows_of_before_a_drop_a_rename_and_a_wider_type_that_come_again_leave_files_equal() {
    let from = database(source(), "replayed_steps");
    let mut pipeline = into_steps(&from);
    replayed(&from, &mut pipeline);
    let text = std::fs::read_to_string(pipeline.directory().join("steps/public.t.json")).unwrap();
    let kept: Value = serde_json::from_str(&text).unwrap();
    let rows: Vec<&Value> = kept["rows"].as_object().unwrap().values().collect();
    let wanted = from.sql(
        "SELECT json_agg(json_build_object('id', id::text, 'new', new, 'n', n::text, 'added', added::text) ORDER BY id::text COLLATE \"C\") FROM t",
    );
    let wanted: Vec<Value> = serde_json::from_str(&wanted).unwrap();
    assert_eq!(rows, wanted.iter().collect::<Vec<_>>(), "{}", pipeline.log());
}

#[test]
fn rows_of_before_a_drop_a_rename_and_a_wider_type_that_come_again_leave_a_log_that_folds_to_the_source() {
    let from = database(source(), "replayed_log");
    let mut pipeline = Pipeline::new(&from, &files_destination("lake", "ndjson"));
    std::fs::create_dir(pipeline.directory().join("lake")).unwrap();
    replayed(&from, &mut pipeline);
    let venv = std::env::var_os("TIDEGATE_VENV").map_or_else(
        || std::path::Path::new(&std::env::var_os("HOME").unwrap()).join(".cache/tidegate/venv"),
        std::path::PathBuf::from,
    );
    let fold = Command::new(venv.join("bin/python"))
        .arg(std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("readers/fold.py"))
        .args(["fold", pipeline.directory().join("lake").to_str().unwrap(), "public.t"])
        .output()
        .unwrap();
    assert!(fold.status.success(), "{}", String::from_utf8_lossy(&fold.stderr));
    let mut folded: Vec<String> = String::from_utf8(fold.stdout).unwrap().lines().map(str::to_owned).collect();
    let mut wanted: Vec<String> = from.sql("COPY (SELECT * FROM t) TO STDOUT").lines().map(str::to_owned).collect();
    folded.sort();
    wanted.sort();
    assert_eq!(folded, wanted, "{}", pipeline.log());
}

/// The short run of a part of `make schema-matrix`.
fn matrix(part: &str, environment: &[(&str, &str)]) {
    let output = Command::new(env!("CARGO_BIN_EXE_schema-matrix"))
        .envs([("ONLY", part), ("MAJORS", "15"), ("CASE", "")])
        .envs(environment.iter().copied())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{said}\n{}", String::from_utf8_lossy(&output.stderr));
    println!("{said}");
}

#[test]
fn every_plan_of_random_pairs_runs_through_legal_tables_on_a_server_and_ends_where_it_should() {
    matrix("plan", &[("SEED", "1"), ("CASES", "60")]);
}

#[test]
fn changes_recover_wherever_the_host_or_the_plugin_is_killed() {
    matrix("apply", &[("SHORT", "1")]);
}
