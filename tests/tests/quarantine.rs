//! Rows that a destination refuses are found, kept and sent again; all others arrive.

use std::path::PathBuf;
use std::process::Output;

use serde_json::Value;
use tidegate::status::{StatusReport, TableStatus};
use tidegate::store::TableState;
use tidegate_tests::{Database, Pipeline, database, mirror, plugins, postgres_destination, source, wait_for};

/// A source and a mirror with a pipeline between them.
struct Bench {
    from: Database,
    to: Database,
    pipeline: Pipeline,
}

impl Bench {
    /// With a table `t (id, v, note)` of this many rows on both sides.
    fn new(test: &str, rows: u32) -> Bench {
        Bench::with(
            test,
            &format!(
                "CREATE TABLE t (id int PRIMARY KEY, v int, note text);
                 INSERT INTO t SELECT n, n, 'copied' FROM generate_series(1, {rows}) n"
            ),
        )
    }

    fn with(test: &str, schema: &str) -> Bench {
        let (from, to) = (database(source(), test), database(mirror(), test));
        from.sql(schema);
        from.sql("CREATE PUBLICATION pub FOR ALL TABLES");
        let pipeline = Pipeline::new(&from, &postgres_destination("mirror", &to));
        Bench { from, to, pipeline }
    }

    fn start(&mut self) {
        self.pipeline.start();
        self.pipeline.wait_ready();
    }

    fn quarantined(&self) -> Vec<Value> {
        list(&self.pipeline)
    }

    /// Waits until the mirror has what the source has, rows with these ids left out.
    fn assert_equal_but_for(&mut self, ids: &str) {
        self.pipeline.wait_caught_up(&self.from);
        let rows = format!("SELECT string_agg(t::text, ' ' ORDER BY id) FROM t WHERE id NOT IN ({ids})");
        assert_eq!(self.from.sql(&rows), self.to.sql(&rows), "{}", self.pipeline.log());
        assert_eq!(self.to.sql(&format!("SELECT count(*) FROM t WHERE id IN ({ids})")), "0");
    }

    fn assert_equal(&mut self) {
        self.pipeline.wait_caught_up(&self.from);
        assert_eq!(self.from.rows("t"), self.to.rows("t"), "{}", self.pipeline.log());
    }
}

fn answer(output: &Output) -> Value {
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

fn quarantine(pipeline: &Pipeline, arguments: &[&str]) -> Value {
    let arguments: Vec<&str> = ["quarantine"].iter().chain(arguments).chain(&["--json"]).copied().collect();
    answer(&pipeline.command(&arguments).output().unwrap())
}

fn list(pipeline: &Pipeline) -> Vec<Value> {
    quarantine(pipeline, &["list"]).as_array().unwrap().clone()
}

/// Waits until so many rows are in quarantine.
fn wait_quarantined(pipeline: &Pipeline, rows: usize) -> Vec<Value> {
    wait_for(&format!("{rows} rows are in quarantine\n{}", pipeline.log()), || {
        let there = list(pipeline);
        (there.len() == rows).then_some(there)
    })
}

fn table<'a>(status: &'a StatusReport, name: &str) -> &'a TableStatus {
    status.destinations[0].tables.iter().find(|known| known.table == name).unwrap()
}

#[test]
fn a_row_that_a_check_refuses_is_kept_followed_and_sent_again_in_its_newest_state() {
    let mut bench = Bench::new("check", 10);
    bench.start();
    bench.to.sql("ALTER TABLE t ADD CONSTRAINT no_5000 CHECK (v IS DISTINCT FROM 5000)");
    bench.from.sql("INSERT INTO t SELECT n, n, 'streamed' FROM generate_series(11, 10010) n");
    bench.assert_equal_but_for("5000");
    let rows = bench.quarantined();
    assert_eq!(rows.len(), 1, "{rows:#?}");
    let row = &rows[0];
    assert_eq!(
        (&row["key"], &row["op"], &row["changes"]),
        (&serde_json::json!({"id": "5000"}), &"upsert".into(), &1.into())
    );
    assert_eq!(
        (&row["destination"], &row["table"], &row["code"]),
        (&"mirror".into(), &"public.t".into(), &"postgres.23514".into())
    );
    assert!(row["message"].as_str().unwrap().contains("no_5000"), "{row:#}");
    let id = row["id"].to_string();
    let shown = quarantine(&bench.pipeline, &["show", &id]);
    assert_eq!(shown["row"], serde_json::json!({"id": "5000", "v": "5000", "note": "streamed"}));
    let status = bench.pipeline.wait_status("it is counted", |status| table(status, "public.t").quarantined == 1);
    assert_eq!((table(&status, "public.t").state, &table(&status, "public.t").error), (TableState::Ready, &None));

    // Later changes of the key join it; the row is still refused, and nothing else suffers.
    bench.from.sql("UPDATE t SET note = 'later' WHERE id = 5000");
    bench.from.sql("UPDATE t SET note = 'later still' WHERE id IN (4999, 5000, 5001)");
    bench.assert_equal_but_for("5000");
    wait_for("both changes have joined, and are refused", || {
        let shown = quarantine(&bench.pipeline, &["show", &id]);
        (shown["row"]["note"] == "later still" && shown.get("mark").is_none()).then_some(())
    });
    let rows = bench.quarantined();
    assert_eq!((rows.len(), &rows[0]["code"]), (1, &"postgres.23514".into()));
    assert!(rows[0]["changes"].as_u64() > Some(1), "{rows:#?}");
    let refused = quarantine(&bench.pipeline, &["retry", &id]);
    assert_eq!(
        (&refused["done"], &refused["marked"], refused["left"].as_array().unwrap().len()),
        (&true.into(), &1.into(), 1)
    );

    bench.to.sql("ALTER TABLE t DROP CONSTRAINT no_5000");
    let taken = quarantine(&bench.pipeline, &["retry", "--destination", "mirror", "--table", "public.t"]);
    assert_eq!((&taken["done"], taken["left"].as_array().unwrap().len()), (&true.into(), 0), "{taken:#}");
    bench.assert_equal();
    bench.pipeline.wait_status("nothing is counted", |status| table(status, "public.t").quarantined == 0);
    bench.from.sql("UPDATE t SET note = 'free again' WHERE id = 5000");
    bench.assert_equal();
    assert_eq!(bench.pipeline.stop(), 0);
}

#[test]
fn a_whole_change_or_a_delete_that_is_taken_clears_the_row_by_itself() {
    let mut bench = Bench::new("clears", 10);
    bench.start();
    bench.to.sql("ALTER TABLE t ADD CONSTRAINT low CHECK (v < 100)");
    bench.from.sql("INSERT INTO t VALUES (20, 200, 'refused'), (21, 210, 'refused'), (22, 22, 'taken')");
    bench.assert_equal_but_for("20, 21");
    assert_eq!(bench.quarantined().len(), 2);
    bench.from.sql("UPDATE t SET v = 20 WHERE id = 20; DELETE FROM t WHERE id = 21");
    wait_quarantined(&bench.pipeline, 0);
    bench.assert_equal();
    // A row that was there before is there as it was, until it can be changed.
    bench.from.sql("UPDATE t SET v = 300, note = 'refused' WHERE id = 3");
    wait_quarantined(&bench.pipeline, 1);
    assert_eq!(bench.to.sql("SELECT t::text FROM t WHERE id = 3"), "(3,3,copied)");
    bench.from.sql("TRUNCATE t");
    bench.assert_equal();
    assert_eq!(bench.quarantined().len(), 0);
    assert_eq!(bench.pipeline.stop(), 0);
}

#[test]
fn a_value_that_was_not_sent_again_is_not_lost_in_quarantine() {
    let mut bench = Bench::with(
        "toast",
        "CREATE TABLE t (id int PRIMARY KEY, v int, big text);
         ALTER TABLE t ALTER COLUMN big SET STORAGE EXTERNAL;
         INSERT INTO t SELECT n, n, repeat(md5(n::text), 200) FROM generate_series(1, 20) n",
    );
    bench.start();
    bench.to.sql("ALTER TABLE t ADD CONSTRAINT low CHECK (v < 100)");
    // Whole in quarantine; in part; and in part, moved to another key.
    bench.from.sql("INSERT INTO t VALUES (30, 300, repeat('x', 9000))");
    bench.from.sql("UPDATE t SET v = 310 WHERE id = 1; UPDATE t SET id = 40, v = 320 WHERE id = 2");
    wait_quarantined(&bench.pipeline, 4);
    bench.from.sql("UPDATE t SET v = 301 WHERE id = 30; UPDATE t SET v = 311 WHERE id = 1");
    bench.from.sql("UPDATE t SET id = 41, v = 321 WHERE id = 40; INSERT INTO t VALUES (2, 2, 'another')");
    bench.pipeline.wait_caught_up(&bench.from);
    assert_eq!(bench.to.sql("SELECT count(*) FROM t"), "20");
    bench.to.sql("ALTER TABLE t DROP CONSTRAINT low");
    quarantine(&bench.pipeline, &["retry", "--all"]);
    wait_quarantined(&bench.pipeline, 0);
    bench.assert_equal();
    assert_eq!(bench.pipeline.stop(), 0);
}

#[test]
fn a_dropped_row_is_forgotten_and_its_key_is_free() {
    let mut bench = Bench::new("dropped", 10);
    bench.start();
    bench.to.sql("ALTER TABLE t ALTER COLUMN note SET NOT NULL; ALTER TABLE t ALTER COLUMN v TYPE smallint");
    bench.from.sql(
        "INSERT INTO t VALUES (20, 1, NULL), (21, 100000, 'too large'), (22, 1, 'good'), (23, 99999, 'too large')",
    );
    bench.assert_equal_but_for("20, 21, 23");
    let rows = bench.quarantined();
    let codes: Vec<&str> = rows.iter().map(|row| row["code"].as_str().unwrap()).collect();
    assert!(codes.contains(&"postgres.23502") && codes.iter().any(|code| *code != "postgres.23502"), "{rows:#?}");
    let id = |key: &str| rows.iter().find(|row| row["key"]["id"] == key).unwrap()["id"].to_string();
    quarantine(&bench.pipeline, &["drop", &id("20"), &id("21")]);
    assert_eq!(wait_quarantined(&bench.pipeline, 1)[0]["key"]["id"], "23");
    bench.assert_equal_but_for("20, 21, 23");
    bench.from.sql("UPDATE t SET v = 5, note = 'good now' WHERE id IN (20, 21)");
    bench.assert_equal_but_for("23");
    // Ids that nobody has.
    let output = bench.pipeline.command(&["quarantine", "retry", "999999"]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("quarantine.unknown-row"));
    // Without the pipeline it goes as well: the state is all there is.
    assert_eq!(bench.pipeline.stop(), 0);
    assert_eq!(bench.quarantined().len(), 1);
    assert_eq!(table(&bench.pipeline.status().unwrap(), "public.t").quarantined, 1);
    quarantine(&bench.pipeline, &["drop", "--all"]);
    assert_eq!(bench.quarantined().len(), 0);
    bench.start();
    bench.assert_equal_but_for("23");
}

#[test]
fn a_row_that_is_marked_while_nothing_runs_is_sent_at_the_next_start() {
    let mut bench = Bench::new("at_rest", 10);
    bench.start();
    bench.to.sql("ALTER TABLE t ADD CONSTRAINT low CHECK (v < 100)");
    bench.from.sql("INSERT INTO t VALUES (20, 200, 'refused')");
    wait_quarantined(&bench.pipeline, 1);
    bench.pipeline.kill();
    bench.to.sql("ALTER TABLE t DROP CONSTRAINT low");
    let acted = quarantine(&bench.pipeline, &["retry", "--destination", "mirror"]);
    assert_eq!((&acted["marked"], &acted["done"]), (&1.into(), &false.into()));
    assert_eq!(bench.quarantined()[0]["mark"], "retry");
    bench.start();
    wait_quarantined(&bench.pipeline, 0);
    bench.assert_equal();
}

#[test]
fn a_row_that_is_refused_in_the_copy_is_kept_and_its_table_goes_live() {
    let mut bench = Bench::new("copied", 3000);
    // The plugin takes an empty table that looks like its own.
    bench.to.sql("CREATE TABLE t (id int PRIMARY KEY, v int, note text, CONSTRAINT no_77 CHECK (v NOT IN (77, 2999)))");
    bench.start();
    bench.assert_equal_but_for("77, 2999");
    let rows = bench.quarantined();
    assert_eq!(rows.len(), 2, "{rows:#?}");
    assert_eq!(table(&bench.pipeline.status().unwrap(), "public.t").rows_copied, 2998);
    bench.from.sql("UPDATE t SET note = 'changed since' WHERE id IN (77, 78)");
    bench.assert_equal_but_for("77, 2999");
    bench.to.sql("ALTER TABLE t DROP CONSTRAINT no_77");
    quarantine(&bench.pipeline, &["retry", "--all"]);
    wait_quarantined(&bench.pipeline, 0);
    bench.assert_equal();
    // A copy of the table begins with nothing in quarantine.
    bench.to.sql("ALTER TABLE t ADD CONSTRAINT no_5 CHECK (id <> 5) NOT VALID");
    bench.from.sql("UPDATE t SET v = 6 WHERE id = 5");
    wait_quarantined(&bench.pipeline, 1);
    assert_eq!(bench.pipeline.stop(), 0);
    bench.to.sql("ALTER TABLE t DROP CONSTRAINT no_5");
    assert!(bench.pipeline.command(&["resync", "mirror", "public.t"]).output().unwrap().status.success());
    assert_eq!(bench.quarantined().len(), 0);
    bench.start();
    bench.assert_equal();
}

#[test]
fn a_table_that_is_dropped_at_the_destination_stops_alone() {
    let mut bench = Bench::new("gone", 10);
    bench.from.sql("CREATE TABLE other (id int PRIMARY KEY, v text)");
    bench.start();
    bench.to.sql("DROP TABLE other");
    bench.from.sql("BEGIN; INSERT INTO t VALUES (20, 20, 'with it'); INSERT INTO other VALUES (1, 'x'); INSERT INTO t VALUES (21, 21, 'after it'); COMMIT");
    let status = bench
        .pipeline
        .wait_status("the table has stopped", |status| table(status, "public.other").state == TableState::Errored);
    assert!(table(&status, "public.other").error.is_some());
    bench.assert_equal();
    bench.from.sql("INSERT INTO other VALUES (2, 'y'); INSERT INTO t VALUES (22, 22, 'later')");
    bench.assert_equal();
    assert_eq!(bench.quarantined().len(), 0);
    assert_eq!(table(&bench.pipeline.status().unwrap(), "public.t").state, TableState::Ready);
    assert_eq!(bench.pipeline.stop(), 0);
}

#[test]
fn a_host_that_is_killed_while_rows_are_refused_loses_none() {
    let mut bench = Bench::new("killed", 100);
    bench.start();
    bench.to.sql("ALTER TABLE t ADD CONSTRAINT odd CHECK (v < 500 OR v % 500 <> 7)");
    for round in 0..6_u32 {
        let (first, last) = (1000 + round * 2000, 1000 + round * 2000 + 1999);
        let log = bench.pipeline.log().len();
        bench.from.sql(&format!("INSERT INTO t SELECT n, n, 'round {round}' FROM generate_series({first}, {last}) n"));
        bench.from.sql(&format!("UPDATE t SET note = note || '!' WHERE v % 500 = 7 OR id % 100 = {round}"));
        bench.from.sql(&format!("DELETE FROM t WHERE v % 500 = 7 AND id % 3 = {}", round % 3));
        wait_for("rows are refused", || bench.pipeline.log()[log..].contains("kept in quarantine").then_some(()));
        bench.pipeline.kill();
        bench.pipeline.start();
    }
    bench.pipeline.wait_ready();
    let bad = bench.from.sql("SELECT string_agg(id::text, ', ' ORDER BY id) FROM t WHERE v > 500 AND v % 500 = 7");
    bench.assert_equal_but_for(&bad);
    let expected = bad.split(", ").count();
    let rows = wait_quarantined(&bench.pipeline, expected);
    let upserts = rows.iter().all(|row| row["op"] == "upsert");
    assert!(upserts && expected > 2, "{rows:#?}");
    bench.to.sql("ALTER TABLE t DROP CONSTRAINT odd");
    quarantine(&bench.pipeline, &["retry", "--all"]);
    wait_quarantined(&bench.pipeline, 0);
    bench.assert_equal();
    assert_eq!(bench.pipeline.stop(), 0);
}

#[test]
fn more_refused_rows_than_are_allowed_stop_the_table() {
    let mut bench = Bench::new("full", 10);
    let file = bench.pipeline.directory().join("tidegate.toml");
    let config = std::fs::read_to_string(&file).unwrap();
    std::fs::write(&file, config + "[destination.quarantine]\nmax_rows = 3\n").unwrap();
    bench.from.sql("CREATE TABLE other (id int PRIMARY KEY, v text)");
    bench.start();
    bench.to.sql("ALTER TABLE t ADD CONSTRAINT low CHECK (v < 100)");
    bench.from.sql("INSERT INTO t SELECT n, n, 'refused' FROM generate_series(101, 103) n");
    wait_quarantined(&bench.pipeline, 3);
    bench.from.sql("INSERT INTO t SELECT n, n, 'refused' FROM generate_series(104, 110) n");
    let status = bench
        .pipeline
        .wait_status("the table has stopped", |status| table(status, "public.t").state == TableState::Errored);
    assert_eq!(table(&status, "public.t").error.as_ref().unwrap().code, "quarantine.full");
    bench.from.sql("INSERT INTO other VALUES (1, 'goes on')");
    bench.pipeline.wait_caught_up(&bench.from);
    assert_eq!(bench.from.rows("other"), bench.to.rows("other"));
    assert_eq!(bench.quarantined().len(), 3);
    assert_eq!(bench.pipeline.stop(), 0);
}

/// A pipeline into the fixture `picky`, which keeps `t (id int, v text)` as JSON.
struct Picky {
    from: Database,
    pipeline: Pipeline,
}

impl Picky {
    fn new(test: &str, rules: &str) -> Picky {
        Picky::with(test, "SELECT n, 'copied' FROM generate_series(1, 5) n", rules)
    }

    fn with(test: &str, rows: &str, rules: &str) -> Picky {
        let from = database(source(), test);
        from.sql(&format!("CREATE TABLE t (id int PRIMARY KEY, v text); INSERT INTO t {rows}"));
        from.sql("CREATE PUBLICATION pub FOR ALL TABLES");
        let destination = "[[destination]]\nname = \"picky\"\nplugin = \"picky\"\nmode = \"merge\"\n\
                           [destination.settings]\npath = \"{dir}/picky\"\n\
                           [destination.grant]\nfiles = [{ path = \"{dir}/picky\", mode = \"read-write\" }]\n\
                           [destination.limits]\nsettle_ms = 50\n";
        let pipeline = Pipeline::new(&from, destination);
        let own = pipeline.directory().join("plugins");
        std::fs::create_dir(&own).unwrap();
        std::fs::create_dir(pipeline.directory().join("picky")).unwrap();
        std::fs::copy(fixtures().join("picky.wasm"), own.join("picky.wasm")).unwrap();
        let file = pipeline.directory().join("tidegate.toml");
        let config = std::fs::read_to_string(&file).unwrap();
        std::fs::write(&file, config.replace(&plugins().display().to_string(), &own.display().to_string())).unwrap();
        let mut picky = Picky { from, pipeline };
        picky.rules(rules);
        picky.pipeline.start();
        picky.pipeline.wait_ready();
        picky
    }

    fn rules(&self, rules: &str) {
        std::fs::write(self.pipeline.directory().join("picky/rules.json"), rules).unwrap();
    }

    fn assert_equal_but_for(&mut self, ids: &str) {
        self.pipeline.wait_caught_up(&self.from);
        let rows = self.from.sql(&format!(
            "SELECT json_object_agg(id::text, json_build_array(id::text, v)) FROM t WHERE id NOT IN ({ids})"
        ));
        let there = std::fs::read_to_string(self.pipeline.directory().join("picky/rows.json")).unwrap();
        let (rows, there): (Value, Value) =
            (serde_json::from_str(&rows).unwrap(), serde_json::from_str(&there).unwrap());
        assert_eq!(there, rows, "{}", self.pipeline.log());
    }
}

/// The directory of fixtures: `TIDEGATE_FIXTURES`, or what `make fixtures` fills.
fn fixtures() -> PathBuf {
    let directory = std::env::var_os("TIDEGATE_FIXTURES")
        .map_or_else(|| std::env::current_exe().unwrap().ancestors().nth(3).unwrap().join("fixtures"), PathBuf::from);
    assert!(
        directory.join("picky.wasm").exists(),
        "{} lacks picky.wasm: run `make fixtures` first",
        directory.display()
    );
    directory
}

#[test]
fn rows_that_an_answer_refuses_are_kept_followed_and_sent_again() {
    for (test, rules) in [("picky", r#"{"refuse": "bad"}"#), ("picky_late", r#"{"refuse": "bad", "late": true}"#)] {
        let mut picky = Picky::new(test, rules);
        picky.from.sql(
            "INSERT INTO t SELECT n, CASE n % 40 WHEN 7 THEN 'bad' ELSE 'good' END FROM generate_series(100, 299) n",
        );
        picky.assert_equal_but_for("127, 167, 207, 247, 287");
        let rows = wait_quarantined(&picky.pipeline, 5);
        assert!(rows.iter().all(|row| row["code"] == "picky.refused" && row["column"] == "v"), "{rows:#?}");
        // One is mended at the source, one goes, one changes its key: by themselves.
        picky.from.sql("UPDATE t SET v = 'mended' WHERE id = 127; DELETE FROM t WHERE id = 167; UPDATE t SET id = 1207, v = 'moved' WHERE id = 207");
        wait_quarantined(&picky.pipeline, 2);
        picky.assert_equal_but_for("247, 287");
        picky.rules(&rules.replace("bad", "worse"));
        quarantine(&picky.pipeline, &["retry", "--all"]);
        wait_quarantined(&picky.pipeline, 0);
        picky.assert_equal_but_for("0");
        assert_eq!(picky.pipeline.stop(), 0);
    }
}

#[test]
fn a_row_that_ends_the_plugin_is_found_and_all_others_arrive() {
    let mut picky = Picky::new("traps", r#"{"trap": "poison"}"#);
    picky
        .from
        .sql("INSERT INTO t SELECT n, CASE n WHEN 163 THEN 'poison' ELSE 'good' END FROM generate_series(100, 299) n");
    picky.assert_equal_but_for("163");
    let rows = wait_quarantined(&picky.pipeline, 1);
    assert_eq!((&rows[0]["key"]["id"], &rows[0]["code"]), (&"163".into(), &"plugin.trap".into()), "{rows:#?}");
    assert!(rows[0]["message"].as_str().unwrap().contains("cannot stand poison"), "{rows:#?}");
    // A change of it waits: it could end the plugin again.
    let trapped = picky.pipeline.log().matches("code=plugin.trap").count();
    picky.from.sql("UPDATE t SET v = 'harmless' WHERE id IN (162, 163)");
    picky.assert_equal_but_for("163");
    assert_eq!(picky.pipeline.log().matches("code=plugin.trap").count(), trapped);
    quarantine(&picky.pipeline, &["retry", "--all"]);
    wait_quarantined(&picky.pipeline, 0);
    picky.assert_equal_but_for("0");
    assert_eq!(picky.pipeline.stop(), 0);
}

#[test]
fn cells_that_a_change_of_key_left_out_are_read_at_the_source_for_a_plugin_that_is_not_transactional() {
    // Out of line: the source does not send them again.
    let rows = "SELECT n, repeat(md5(n::text), 200) FROM generate_series(1, 20) n";
    let mut picky = Picky::with(
        "moved",
        &format!("SELECT 0, ''; ALTER TABLE t ALTER v SET STORAGE EXTERNAL; INSERT INTO t {rows}"),
        "{}",
    );
    picky.from.sql("UPDATE t SET id = id + 1000 WHERE id BETWEEN 1 AND 5");
    picky.from.sql("BEGIN; UPDATE t SET id = -1 WHERE id = 6; UPDATE t SET id = 6 WHERE id = 7; UPDATE t SET id = 7 WHERE id = -1; COMMIT");
    // One that is gone by the time that it is looked for, and one that moves on.
    picky.from.sql("BEGIN; UPDATE t SET id = 2000 WHERE id = 8; DELETE FROM t WHERE id = 2000; UPDATE t SET id = 2001 WHERE id = 9; COMMIT; UPDATE t SET id = 2002 WHERE id = 2001");
    picky.assert_equal_but_for("-7");
    assert_eq!(picky.pipeline.stop(), 0);
}

#[test]
fn a_row_that_ends_the_plugin_as_it_settles_several_groups_of_a_copy_is_found() {
    // Several megabytes: groups of one each, accepted one after the other.
    let rows = "SELECT n, CASE n WHEN 3777 THEN 'poison' ELSE repeat('x', 1000) END FROM generate_series(1, 6000) n";
    let mut picky = Picky::with("trap_flush", rows, r#"{"trap": "poison", "late": true}"#);
    picky.assert_equal_but_for("3777");
    let rows = wait_quarantined(&picky.pipeline, 1);
    assert_eq!((&rows[0]["key"]["id"], &rows[0]["code"]), (&"3777".into(), &"plugin.trap".into()), "{rows:#?}");
    assert_eq!(picky.pipeline.stop(), 0);
}

#[test]
fn a_row_that_ends_the_plugin_in_the_copy_is_found_from_one_run_to_the_next() {
    let rows = "SELECT n, CASE n WHEN 777 THEN 'poison' ELSE 'copied' END FROM generate_series(1, 2000) n";
    let mut picky = Picky::with("trap_copy", rows, r#"{"trap": "poison"}"#);
    picky.assert_equal_but_for("777");
    let rows = wait_quarantined(&picky.pipeline, 1);
    assert_eq!((&rows[0]["key"]["id"], &rows[0]["code"]), (&"777".into(), &"plugin.trap".into()), "{rows:#?}");
    picky.rules("{}");
    quarantine(&picky.pipeline, &["retry", "--all"]);
    wait_quarantined(&picky.pipeline, 0);
    picky.assert_equal_but_for("0");
    assert_eq!(picky.pipeline.stop(), 0);
}
