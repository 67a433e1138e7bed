//! A change that a destination does not apply by itself holds its table there, and
//! nothing else: the rows behind it wait in the spool until somebody decides, or the
//! quorum is there, whatever dies in between.

use std::path::PathBuf;
use std::process::Output;

use serde_json::Value;
use tidegate::position::Lsn;
use tidegate::status::{SchemaState, StatusReport, TableStatus};
use tidegate::store::TableState;
use tidegate_tests::{Database, Pipeline, Traffic, database, mirror, plugins, postgres_destination, source, wait_for};

struct Bench {
    source: Database,
    mirrors: Vec<(&'static str, Database)>,
    pipeline: Pipeline,
}

/// Destinations by name, each with lines for its `[destination.schema]`.
fn bench(test: &str, destinations: &[(&'static str, &str)]) -> Bench {
    let source = database(source(), test);
    source.sql(
        "CREATE TABLE t (id int PRIMARY KEY, key int NOT NULL UNIQUE, v int);
         CREATE TABLE other (id int PRIMARY KEY, v int);
         INSERT INTO t SELECT n, -n, n FROM generate_series(1, 100) n; CREATE PUBLICATION pub FOR ALL TABLES",
    );
    let mut mirrors = Vec::new();
    let mut config = String::new();
    for (name, lines) in destinations {
        let to = database(mirror(), &format!("{test}_{name}"));
        config.push_str(&postgres_destination(name, &to));
        config.push_str(&format!("[destination.schema]\n{lines}\n[destination.limits]\nsettle_ms = 20\n"));
        mirrors.push((*name, to));
    }
    let mut pipeline = Pipeline::new(&source, &config);
    pipeline.install_trigger();
    pipeline.start();
    pipeline.wait_ready();
    Bench { source, mirrors, pipeline }
}

const REVIEW: &str = "apply = \"manual-review\"";

impl Bench {
    fn mirror(&self, name: &str) -> Database {
        self.mirrors.iter().find(|(known, _)| *known == name).unwrap().1.clone()
    }

    fn run(&self, arguments: &[&str]) -> Output {
        self.pipeline.command(arguments).output().unwrap()
    }

    /// A command that has to succeed, and what it says.
    fn says(&self, arguments: &[&str]) -> String {
        let output = self.run(arguments);
        assert!(output.status.success(), "{arguments:?}: {output:?}\n{}", self.pipeline.log());
        String::from_utf8(output.stdout).unwrap()
    }

    /// A command whose answer is no.
    fn refused(&self, arguments: &[&str], code: &str) {
        let output = self.run(arguments);
        assert_eq!(output.status.code(), Some(3), "{arguments:?}: {output:?}");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(said.contains(&format!("error[{code}]")) && said.contains("next:"), "{said}");
    }

    fn approve(&self, destination: &str) {
        self.says(&["schema", "approve", destination, "public.t"]);
    }

    fn barriers(&self) -> Vec<Value> {
        serde_json::from_str(&self.says(&["schema", "barriers", "--json"])).unwrap()
    }

    fn wait_held(&mut self, destination: &str) -> TableStatus {
        let status = self.pipeline.wait_status("the table waits", |status| {
            of(status, destination).is_some_and(|table| table.schema == SchemaState::Held)
        });
        of(&status, destination).unwrap().clone()
    }

    /// Waits until `public.t` is there as it is at the source.
    fn wait_equal(&mut self, destination: &str) {
        self.wait_equal_table(destination, "t");
    }

    fn wait_equal_table(&mut self, destination: &str, table: &str) {
        let (source, mirror) = (self.source.clone(), self.mirror(destination));
        let pipeline = &mut self.pipeline;
        wait_for(&format!("{table} of {destination} is equal"), || {
            assert_eq!(pipeline.ended(), None, "{}", pipeline.log());
            (columns(&source, table) == columns(&mirror, table) && source.rows(table) == mirror.rows(table))
                .then_some(())
        });
    }

    /// From here on the mirror writes down each change that is applied to `t`.
    fn watch(&self, destination: &str) {
        self.mirror(destination).sql(
            "CREATE TABLE seen (id int, v int);
             CREATE FUNCTION see() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN INSERT INTO public.seen VALUES (NEW.id, NEW.v); RETURN NULL; END $$;
             CREATE TRIGGER see AFTER INSERT OR UPDATE ON t FOR EACH ROW EXECUTE FUNCTION see()",
        );
    }

    fn assert_nothing_twice(&self, destination: &str) {
        let twice = self.mirror(destination).sql("SELECT id, v FROM seen GROUP BY id, v HAVING count(*) > 1");
        assert_eq!(twice, "", "{}", self.pipeline.log());
    }
}

fn of<'a>(status: &'a StatusReport, destination: &str) -> Option<&'a TableStatus> {
    let found = status.destinations.iter().find(|known| known.name == destination)?;
    found.tables.iter().find(|table| table.table == "public.t")
}

fn columns(database: &Database, table: &str) -> String {
    database.sql(&format!(
        "SELECT string_agg(attname || ' ' || format_type(atttypid, atttypmod), ', ' ORDER BY attname)
         FROM pg_attribute WHERE attrelid = '{table}'::regclass AND attnum > 0 AND NOT attisdropped"
    ))
}

#[test]
fn rows_behind_a_change_that_waits_wait_and_other_tables_and_destinations_go_on() {
    let mut bench = bench("held", &[("careful", REVIEW), ("free", "apply = \"auto-safe\"")]);
    bench.watch("careful");
    let before = bench.mirror("careful").rows("t");
    bench.source.sql(
        "ALTER TABLE t ADD COLUMN added int; INSERT INTO t VALUES (1000, 1000, 1, 7); INSERT INTO other VALUES (1, 1)",
    );
    let table = bench.wait_held("careful");
    let error = table.error.unwrap();
    assert_eq!((table.state, error.code.as_str()), (TableState::CatchUp, "schema.held"));
    assert!(error.next.unwrap().contains("tidegate schema approve"), "{}", error.message);
    bench.source.sql("UPDATE t SET v = -1 WHERE id = 3; INSERT INTO other VALUES (2, 2); DELETE FROM t WHERE id = 5");
    bench.wait_equal_table("careful", "other");
    bench.wait_equal("free");
    assert_eq!(bench.mirror("careful").rows("t"), before, "a row passed the change");
    // What waits is in the spool, so the source may forget it.
    bench.pipeline.wait_caught_up(&bench.source.clone());
    let [barrier] = &bench.barriers()[..] else { panic!("{:?}", bench.barriers()) };
    assert_eq!((&barrier["destination"], &barrier["table"]), (&"careful".into(), &"public.t".into()));
    assert_eq!(barrier["steps"][0]["step"], "add-column");
    assert_eq!(barrier["decision"], "manual-review");
    assert_eq!(
        barrier["gates"],
        serde_json::json!([{"gate": "approval", "open": false, "blocked_by": ["the operator"]}])
    );
    assert!(bench.says(&["schema", "barriers"]).contains("blocked by the operator"));

    // The insert, the update, the delete; and as many when nobody runs.
    assert_eq!((&barrier["held"]["rows"], &barrier["held"]["at_least"]), (&3.into(), &false.into()));
    assert!(barrier["held"]["bytes"].as_u64().unwrap() > 0);
    assert!(bench.says(&["schema", "barriers"]).contains("3 rows"));

    let to = barrier["to"].as_str().unwrap();
    bench.refused(&["schema", "approve", "careful", "public.t", "--to", "1:1"], "schema.other-version");
    bench.refused(&["schema", "approve", "free", "public.t"], "schema.nothing-waits");
    bench.refused(&["schema", "approve", "careful", "public.no"], "schema.not-there");
    bench.refused(&["schema", "accept", "careful", "public.t", "--as", "to"], "schema.nothing-to-settle");
    bench.says(&["schema", "approve", "careful", "public.t", "--to", to]);
    bench.wait_equal("careful");
    bench.pipeline.wait_ready();
    bench.source.sql("UPDATE t SET v = -2 WHERE id = 4");
    bench.wait_equal("careful");
    bench.assert_nothing_twice("careful");
    assert_eq!(bench.barriers(), [Value::Null; 0]);
    assert_eq!(bench.pipeline.stop(), 0);
}

#[test]
fn a_host_that_is_killed_at_each_step_of_a_hold_and_of_its_release_loses_nothing_and_does_nothing_twice() {
    let mut bench = bench("held_kill", &[("careful", REVIEW)]);
    bench.watch("careful");
    assert_eq!(bench.pipeline.stop(), 0);
    let points = ["recorded", "routed", "answered", "released"];
    for (index, point) in points.into_iter().enumerate() {
        bench.pipeline.start_with(&[("TIDEGATE_FAILPOINT", &format!("hold.{point}"))]);
        bench.pipeline.wait_ready();
        let (first, second) = (1000 + 2 * index, 1001 + 2 * index);
        bench.source.sql(&format!(
            "ALTER TABLE t ADD COLUMN {point} int; INSERT INTO t (id, key, {point}) VALUES ({first}, {first}, 7)"
        ));
        if point == "released" {
            bench.wait_held("careful");
            // The process may be dead before it has answered: the word is stored before.
            let _ = bench.run(&["schema", "approve", "careful", "public.t"]);
        }
        assert_eq!(bench.pipeline.wait_end(), -1, "{}", bench.pipeline.log());
        bench.source.sql(&format!("INSERT INTO t (id, key, {point}) VALUES ({second}, {second}, 8); UPDATE t SET v = {index} + 500 WHERE id = 1"));
        bench.pipeline.start();
        if point != "released" {
            bench.wait_held("careful");
            // And once more while it waits, with what the source has forgotten by then.
            bench.pipeline.wait_caught_up(&bench.source.clone());
            bench.pipeline.kill();
            bench.pipeline.start();
            bench.wait_held("careful");
            bench.approve("careful");
        }
        bench.wait_equal("careful");
        assert_eq!(bench.pipeline.stop(), 0);
    }
    bench.assert_nothing_twice("careful");
}

#[test]
fn a_change_with_no_rows_behind_it_waits_too_and_is_approved_on_the_state_alone() {
    let mut bench = bench("held_silent", &[("careful", REVIEW)]);
    bench.source.sql("ALTER TABLE t ADD COLUMN added int");
    bench.wait_held("careful");
    assert_eq!(bench.pipeline.stop(), 0);
    let at_rest = bench.pipeline.status().unwrap();
    assert_eq!(of(&at_rest, "careful").unwrap().schema, SchemaState::Held);
    assert!(bench.says(&["schema", "approve", "careful", "public.t"]).contains("next start"));
    bench.pipeline.start();
    bench.wait_equal("careful");
    // The same for a refusal.
    bench.source.sql("ALTER TABLE t ADD COLUMN more int");
    bench.wait_held("careful");
    assert_eq!(bench.pipeline.stop(), 0);
    bench.says(&["schema", "refuse", "careful", "public.t"]);
    bench.pipeline.start();
    bench.pipeline.wait_status("the table stops", |status| {
        of(status, "careful")
            .is_some_and(|table| table.error.as_ref().is_some_and(|error| error.code == "schema.refused"))
    });
    assert_eq!(bench.pipeline.stop(), 0);
}

#[test]
fn an_approval_is_for_one_change_and_the_next_asks_anew() {
    let mut bench = bench("held_two", &[("careful", REVIEW)]);
    let without = columns(&bench.source, "t");
    bench.source.sql("ALTER TABLE t ADD COLUMN one int; INSERT INTO t (id, key, one) VALUES (1000, 1000, 1)");
    let one = columns(&bench.source, "t");
    bench.source.sql("ALTER TABLE t ADD COLUMN two int; INSERT INTO t (id, key, two) VALUES (1001, 1001, 2)");
    bench.wait_held("careful");
    bench.pipeline.wait_caught_up(&bench.source.clone());
    let first = bench.barriers()[0]["to"].as_str().unwrap().to_owned();
    let mirror = bench.mirror("careful");
    assert_eq!(columns(&mirror, "t"), without);
    bench.says(&["schema", "approve", "careful", "public.t", "--to", &first]);
    wait_for("the second change waits", || {
        bench.barriers().first().is_some_and(|barrier| barrier["to"] != first.as_str()).then_some(())
    });
    assert_eq!(columns(&mirror, "t"), one, "no more than what was approved");
    assert_eq!(mirror.sql("SELECT max(id) FROM t"), "1000");
    bench.refused(&["schema", "approve", "careful", "public.t", "--to", &first], "schema.other-version");
    bench.approve("careful");
    bench.wait_equal("careful");
    assert_eq!(bench.pipeline.stop(), 0);
}

#[test]
fn a_table_that_waits_is_refused_or_copied_again_under_traffic_and_ends_equal() {
    let mut bench = bench("held_traffic", &[("careful", REVIEW)]);
    let traffic = Traffic::start(&bench.source, |n| {
        format!(
            "INSERT INTO t VALUES ({id}, {id}, {n}) ON CONFLICT (id) DO UPDATE SET v = excluded.v; UPDATE t SET v = v + 1 WHERE id = {n} % 90",
            id = 5000 + n % 500
        )
    });
    // A wider type; and another key, which the plugin cannot make.
    for change in [
        "ALTER TABLE t ALTER v TYPE bigint",
        "ALTER TABLE t DROP CONSTRAINT t_pkey, ADD PRIMARY KEY (key), ADD UNIQUE (id)",
    ] {
        traffic.wait_for(20);
        bench.source.sql(change);
        traffic.wait_for(20);
        bench.wait_held("careful");
        bench.says(&["resync", "careful", "public.t"]);
        bench.pipeline.wait_ready();
        traffic.wait_for(20);
        assert_eq!(bench.barriers(), [Value::Null; 0]);
    }
    bench.source.sql("ALTER TABLE t ADD COLUMN added int");
    bench.wait_held("careful");
    bench.says(&["schema", "refuse", "careful", "public.t"]);
    let status = bench.pipeline.wait_status("the table stops", |status| {
        of(status, "careful").is_some_and(|table| table.state == TableState::Errored)
    });
    let error = of(&status, "careful").unwrap().error.clone().unwrap();
    assert_eq!(error.code, "schema.refused");
    bench.refused(&["schema", "approve", "careful", "public.t"], "schema.nothing-waits");
    bench.says(&["resync", "careful", "public.t"]);
    bench.pipeline.wait_ready();
    traffic.stop();
    bench.wait_equal("careful");
    assert_eq!(bench.pipeline.stop(), 0);
}

#[test]
fn a_quorum_of_all_of_a_number_or_of_names_releases_a_change_once_they_have_it() {
    let staged = |quorum: &str| format!("apply = \"staged-rollout\"\nquorum = {quorum}");
    let (all, two, named) = (staged("\"all\""), staged("2"), staged("[\"first\"]"));
    let mut bench = bench("quorum", &[("first", REVIEW), ("named", &named), ("two", &two), ("all", &all)]);
    bench.source.sql("ALTER TABLE t ADD COLUMN added int; INSERT INTO t VALUES (1000, 1000, 1, 7)");
    for name in ["first", "named", "two", "all"] {
        bench.wait_held(name);
    }
    let blocked = |bench: &Bench, name: &str| {
        let barriers = bench.barriers();
        let barrier = barriers.iter().find(|barrier| barrier["destination"] == name).unwrap();
        assert_eq!(barrier["gates"][0]["gate"], "release");
        let by: Vec<String> = serde_json::from_value(barrier["gates"][0]["blocked_by"].clone()).unwrap();
        by.iter().map(|blocker| blocker.split(':').next().unwrap().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(blocked(&bench, "named"), ["first"]);
    assert_eq!(blocked(&bench, "all"), ["first", "named", "two"]);
    assert_eq!(blocked(&bench, "two").len(), 3);
    // Nobody has forgotten anything behind a restart.
    assert_eq!(bench.pipeline.stop(), 0);
    bench.pipeline.start();
    for name in ["first", "named", "two", "all"] {
        bench.wait_held(name);
    }
    bench.approve("first");
    for name in ["first", "named", "two", "all"] {
        bench.wait_equal(name);
    }
    // Without it the operator's word does as well.
    bench.source.sql("ALTER TABLE t ADD COLUMN more int");
    bench.wait_held("named");
    bench.approve("named");
    bench.wait_equal("named");
    bench.wait_held("first");
    assert_eq!(bench.pipeline.stop(), 0);
}

#[test]
fn a_change_that_the_configuration_forbids_waits_for_another_configuration_and_no_approval_helps() {
    let mut bench = bench("held_policy", &[("careful", "apply = \"block-destructive\"")]);
    bench.source.sql("ALTER TABLE t DROP COLUMN v; INSERT INTO t VALUES (1000, 1000)");
    bench.wait_held("careful");
    assert_eq!(bench.barriers()[0]["gates"][0]["gate"], "policy");
    bench.refused(&["schema", "approve", "careful", "public.t"], "schema.blocked");
    assert_eq!(bench.pipeline.stop(), 0);
    let path = bench.pipeline.directory().join("tidegate.toml");
    let config = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, config.replace("block-destructive", "auto-safe")).unwrap();
    bench.pipeline.start();
    bench.wait_equal("careful");
    assert_eq!(bench.pipeline.stop(), 0);
}

#[test]
fn a_table_that_is_renamed_and_gets_another_key_follows_once_each_is_approved() {
    let mut bench = bench("held_table", &[("mirror", "apply = \"auto-safe\"")]);
    bench.watch("mirror");
    bench.source.sql(
        "ALTER TABLE t DROP CONSTRAINT t_pkey, ADD PRIMARY KEY (key), ADD UNIQUE (id); UPDATE t SET id = 2000 WHERE key = -2;
         ALTER TABLE t RENAME TO renamed; UPDATE renamed SET key = 3000 WHERE key = -3; DELETE FROM renamed WHERE key = -4",
    );
    let table = bench.wait_held("mirror");
    assert_eq!(table.error.unwrap().code, "schema.held");
    assert_eq!(bench.barriers()[0]["steps"][0]["step"], "change-key");
    bench.approve("mirror");
    let steps = |barriers: &[Value]| barriers.first().map(|barrier| barrier["steps"][0]["step"].clone());
    wait_for("the rename waits", || (steps(&bench.barriers()) == Some("rename-table".into())).then_some(()));
    assert_eq!(bench.mirror("mirror").sql("SELECT id FROM t WHERE key = -2"), "2000");
    bench.approve("mirror");
    let moved = "SELECT to_regclass('t') IS NULL AND to_regclass('renamed') IS NOT NULL";
    wait_for("it is renamed", || (bench.mirror("mirror").sql(moved) == "t").then_some(()));
    bench.wait_equal_table("mirror", "renamed");
    let key =
        "SELECT pg_get_constraintdef(oid) FROM pg_constraint WHERE conrelid = 'renamed'::regclass AND contype = 'p'";
    assert_eq!(bench.mirror("mirror").sql(key), "PRIMARY KEY (key)");
    bench.pipeline.wait_ready();
    bench.source.sql("INSERT INTO renamed VALUES (5000, 5000, 5)");
    bench.wait_equal_table("mirror", "renamed");
    bench.assert_nothing_twice("mirror");
    assert_eq!(bench.pipeline.stop(), 0);
    let at_rest = bench.pipeline.status().unwrap();
    let names: Vec<&str> = at_rest.destinations[0].tables.iter().map(|table| table.table.as_str()).collect();
    assert_eq!(names, ["public.other", "public.renamed"]);
}

#[test]
fn a_change_that_the_plugin_refuses_waits_with_its_reason_and_is_asked_about_again() {
    let mut bench = bench("held_check", &[("mirror", "apply = \"auto-safe\"")]);
    bench.mirror("mirror").sql("ALTER TABLE t ADD COLUMN added text");
    bench.source.sql(
        "ALTER TABLE t ADD COLUMN added int; INSERT INTO t VALUES (1000, 1000, 1, 7); INSERT INTO other VALUES (1, 1)",
    );
    let error = bench.wait_held("mirror").error.unwrap();
    assert_eq!(error.code, "name-collision");
    assert!(
        error.message.contains("of this name") && error.next.unwrap().contains("schema approve"),
        "{}",
        error.message
    );
    bench.wait_equal_table("mirror", "other");
    let gates = bench.barriers()[0]["gates"].clone();
    assert_eq!((&gates[0]["gate"], &gates[0]["open"]), (&"check".into(), &false.into()));
    assert!(gates[0]["blocked_by"][0].as_str().unwrap().contains("name-collision"), "{gates}");

    // Nothing is mended: it waits on.
    let since = bench.barriers()[0]["verdict"].clone();
    bench.approve("mirror");
    wait_for("it is asked again", || (bench.pipeline.log().matches("refuses it").count() >= 2).then_some(()));
    assert_eq!((bench.wait_held("mirror").error.unwrap().code.as_str(), since), ("name-collision", Value::Null));
    bench.mirror("mirror").sql("ALTER TABLE t DROP COLUMN added");
    bench.approve("mirror");
    bench.wait_equal("mirror");
    assert_eq!(bench.barriers(), [Value::Null; 0]);
    assert_eq!(bench.pipeline.stop(), 0);
}

/// Interrupts a change, and leaves a table that is neither as before nor as behind it.
fn fits_neither(test: &str) -> Bench {
    let mut bench = bench(test, &[("mirror", "apply = \"auto-safe\"")]);
    assert_eq!(bench.pipeline.stop(), 0);
    bench.pipeline.start_with(&[("TIDEGATE_FAILPOINT", "schema.applying")]);
    bench.pipeline.wait_ready();
    bench.source.sql("ALTER TABLE t ADD COLUMN added int; INSERT INTO t VALUES (1000, 1000, 1, 7)");
    assert_eq!(bench.pipeline.wait_end(), -1, "{}", bench.pipeline.log());
    bench.mirror("mirror").sql("ALTER TABLE t DROP COLUMN v");
    bench.pipeline.start();
    let table = bench.wait_held("mirror");
    assert_eq!(table.error.unwrap().code, "schema.fits-neither");
    assert_eq!(bench.barriers()[0]["gates"][0]["gate"], "settle");
    bench.source.sql("INSERT INTO t VALUES (1001, 1001, 2, 8); INSERT INTO other VALUES (1, 1)");
    bench.wait_equal_table("mirror", "other");
    bench
}

#[test]
fn an_operator_says_which_version_an_interrupted_change_left_and_the_rows_follow() {
    let mut bench = fits_neither("accept_to");
    bench
        .mirror("mirror")
        .sql("ALTER TABLE t ADD COLUMN v int; ALTER TABLE t ADD COLUMN added int; UPDATE t SET v = id");
    bench.says(&["schema", "accept", "mirror", "public.t", "--as", "to"]);
    bench.wait_equal_values();
    assert_eq!(bench.pipeline.stop(), 0);

    let mut bench = fits_neither("accept_from");
    bench.mirror("mirror").sql("ALTER TABLE t ADD COLUMN v int; UPDATE t SET v = id");
    // The word is stored, and taken once more if what came of it is not known.
    assert_eq!(bench.pipeline.stop(), 0);
    bench.says(&["schema", "accept", "mirror", "public.t", "--as", "from"]);
    bench.pipeline.start_with(&[("TIDEGATE_FAILPOINT", "table.recorded")]);
    assert_eq!(bench.pipeline.wait_end(), -1, "{}", bench.pipeline.log());
    bench.pipeline.start();
    bench.wait_equal_values();
    assert_eq!(bench.pipeline.stop(), 0);
}

#[test]
fn an_interrupted_change_is_tried_again_when_the_operator_has_mended_the_table() {
    let mut bench = fits_neither("try_again");
    bench.mirror("mirror").sql("ALTER TABLE t ADD COLUMN v int; UPDATE t SET v = id");
    bench.approve("mirror");
    bench.wait_equal_values();
    assert_eq!(bench.pipeline.stop(), 0);
}

impl Bench {
    /// As [`Bench::wait_equal`], whatever the order of the columns.
    fn wait_equal_values(&mut self) {
        let (source, mirror) = (self.source.clone(), self.mirror("mirror"));
        let rows = |database: &Database| database.sql("SELECT id, key, v, added FROM t ORDER BY id");
        let pipeline = &mut self.pipeline;
        wait_for("the values are equal", || {
            assert_eq!(pipeline.ended(), None, "{}", pipeline.log());
            (columns(&source, "t") == columns(&mirror, "t") && rows(&source) == rows(&mirror)).then_some(())
        });
    }
}

#[test]
fn a_table_that_waits_until_the_spool_is_full_is_given_up_only_where_that_was_agreed() {
    let source = database(source(), "held_full");
    source.sql("CREATE TABLE t (id int PRIMARY KEY, v text); CREATE PUBLICATION pub FOR ALL TABLES");
    let (careful, free) = (database(mirror(), "held_full_careful"), database(mirror(), "held_full_free"));
    let config = postgres_destination("careful", &careful)
        .replace("mode = \"merge\"\n", "mode = \"merge\"\nspool_full = \"detach\"\n")
        + "[destination.schema]\napply = \"manual-review\"\n"
        + &postgres_destination("free", &free);
    let mut pipeline = Pipeline::new(&source, &config);
    let path = pipeline.directory().join("tidegate.toml");
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, text.replace("state = \"state\"\n", "state = \"state\"\nspool_bytes = 67108864\n")).unwrap();
    pipeline.install_trigger();
    pipeline.start();
    pipeline.wait_ready();
    source.sql("ALTER TABLE t ADD COLUMN added int");
    pipeline.wait_status("the table waits", |status| {
        of(status, "careful").is_some_and(|table| table.schema == SchemaState::Held)
    });
    for round in 0..8 {
        source.sql(&format!(
            "INSERT INTO t SELECT n, repeat(md5(n::text || '{round}'), 100) FROM generate_series(1, 3000) n
             ON CONFLICT (id) DO UPDATE SET v = excluded.v"
        ));
    }
    let status = pipeline.wait_status("the destination is detached", |status| {
        of(status, "careful").is_some_and(|table| table.state == TableState::Errored)
    });
    assert_eq!(of(&status, "careful").unwrap().error.as_ref().unwrap().code, "destination.detached");
    wait_for("the other one has everything", || (source.rows("t") == free.rows("t")).then_some(()));
    let end: Lsn = source.sql("SELECT pg_current_wal_insert_lsn()").parse().unwrap();
    source.sql("SELECT pg_logical_emit_message(true, 'tidegate-test', 'mark')");
    pipeline.wait_status("the slot goes on", |status| status.slot.confirmed >= Some(end));
    assert_eq!(pipeline.stop(), 0);
}

/// The directory of fixtures: `TIDEGATE_FIXTURES`, or what `make fixtures` fills.
fn fixtures() -> PathBuf {
    let directory = std::env::var_os("TIDEGATE_FIXTURES")
        .map_or_else(|| std::env::current_exe().unwrap().ancestors().nth(3).unwrap().join("fixtures"), PathBuf::from);
    assert!(directory.join("picky.wasm").exists(), "{} lacks picky.wasm: run `make fixtures`", directory.display());
    directory
}

#[test]
fn a_change_that_the_plugin_cannot_make_waits_for_one_that_can() {
    let source = database(source(), "capable");
    source.sql("CREATE TABLE t (id int PRIMARY KEY, v text); CREATE PUBLICATION pub FOR ALL TABLES");
    let destination = "[[destination]]\nname = \"one\"\nplugin = \"picky\"\nmode = \"merge\"\n\
                       [destination.settings]\npath = \"{dir}/picky\"\n\
                       [destination.grant]\nfiles = [{ path = \"{dir}/picky\", mode = \"read-write\" }]\n";
    let mut pipeline = Pipeline::new(&source, destination);
    std::fs::create_dir(pipeline.directory().join("picky")).unwrap();
    let path = pipeline.directory().join("tidegate.toml");
    let config = std::fs::read_to_string(&path).unwrap();
    let config = config.replace(&plugins().display().to_string(), &fixtures().display().to_string());
    std::fs::write(&path, &config).unwrap();
    pipeline.install_trigger();
    pipeline.start();
    pipeline.wait_ready();
    source.sql("ALTER TABLE t ADD COLUMN added int");
    source.sql("INSERT INTO t VALUES (1, 'behind', 7)");
    let status = pipeline.wait_status("the table waits", |status| {
        of(status, "one").is_some_and(|table| table.schema == SchemaState::Held)
    });
    let table = of(&status, "one").unwrap();
    assert_eq!(table.error.as_ref().unwrap().code, "schema.unsupported");
    let before = table.snapshot;
    let output = pipeline.command(&["schema", "approve", "one", "public.t"]).output().unwrap();
    assert_eq!(output.status.code(), Some(3), "{output:?}");
    // The row is nowhere but in the spool by now.
    pipeline.wait_caught_up(&source);
    assert_eq!(pipeline.stop(), 0);
    // `count` can make every change.
    let capable =
        config.split("[destination.settings]").next().unwrap().replace("plugin = \"picky\"", "plugin = \"count\"");
    std::fs::write(&path, capable).unwrap();
    pipeline.start();
    let status = pipeline.wait_status("the change is made and the row behind it taken", |status| {
        status.all_ready() && status.destinations[0].changes > 0
    });
    let table = of(&status, "one").unwrap();
    assert!(table.schema == SchemaState::Applied && table.snapshot > before && table.error.is_none(), "{table:?}");
    assert_eq!(pipeline.stop(), 0);
}
