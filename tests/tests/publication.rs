//! A publication that is renamed, or dropped and made again (P23), and what it shows of a
//! table's columns.

use tidegate::store::TableState;
use tidegate_tests::{Database, Pipeline, database, mirror, postgres_destination, source, wait_for};

const TABLES: &str = "CREATE TABLE t (id int PRIMARY KEY, v text);
    CREATE TABLE u (id int PRIMARY KEY, v text);
    CREATE TABLE other (id int, v text);
    INSERT INTO t SELECT n, 'copied' FROM generate_series(1, 1000) n;
    INSERT INTO u SELECT n, 'copied' FROM generate_series(1, 1000) n;";
const AGAIN: &str = "all its tables are copied again";

/// A source and a mirror with a pipeline between them.
struct Bench {
    source: Database,
    mirror: Database,
    pipeline: Pipeline,
}

fn bench(test: &str) -> Bench {
    bench_with(test, &format!("{TABLES} CREATE PUBLICATION pub FOR TABLE t, u"))
}

fn bench_with(test: &str, setup: &str) -> Bench {
    let source = database(source(), test);
    let mirror = database(mirror(), test);
    source.sql(setup);
    let mut pipeline = Pipeline::new(&source, &postgres_destination("mirror", &mirror));
    pipeline.start();
    pipeline.wait_ready();
    Bench { source, mirror, pipeline }
}

impl Bench {
    fn wait_equal(&mut self, tables: &[&str]) {
        for table in tables {
            let rows = self.source.rows(table);
            assert!(!rows.is_empty());
            let look = || (self.mirror.rows(table) == rows).then_some(());
            let equal =
                std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| wait_for("the mirror is equal", look)));
            assert!(equal.is_ok(), "{table} differs\n{}", self.pipeline.log());
        }
    }

    /// The host ends by itself, with this in its log.
    fn assert_ends(&mut self, exit: i32, named: &[&str]) {
        assert_eq!(self.pipeline.wait_end(), exit, "{}", self.pipeline.log());
        let log = self.pipeline.log();
        for name in named {
            assert!(log.contains(name), "{name} is not named\n{log}");
        }
    }

    /// Names another publication in the configuration.
    fn configure(&self, publication: &str) {
        let path = self.pipeline.directory().join("tidegate.toml");
        let config = std::fs::read_to_string(&path).unwrap();
        let line = config.lines().find(|line| line.starts_with("publication = ")).unwrap();
        std::fs::write(&path, config.replace(line, &format!("publication = \"{publication}\""))).unwrap();
    }

    /// Rows that were copied, over the whole of the log.
    fn copies(&self) -> usize {
        let log = self.pipeline.log();
        log.matches("is copied again").count() + log.matches(AGAIN).count()
    }

    fn change(&self, round: &str) {
        self.source.sql(&format!(
            "UPDATE t SET v = '{round}' WHERE id % 3 = 0; DELETE FROM u WHERE v = 'copied' AND id % 7 = 0;
             INSERT INTO u SELECT max(id) + 1, '{round}' FROM u; INSERT INTO other VALUES (1, '{round}')"
        ));
    }
}

#[test]
fn a_publication_that_is_renamed_while_it_runs_ends_the_host_and_goes_on_under_its_new_name() {
    let mut bench = bench("renamed_running");
    bench.change("before");
    bench.source.sql("ALTER PUBLICATION pub RENAME TO renamed");
    // Tables that are not published have changes around it as well.
    bench.change("behind");
    bench.assert_ends(1, &["publication.gap", "new name into `publication`"]);
    // Under the old name it does not start, and says what there is.
    bench.pipeline.start();
    bench.assert_ends(3, &["publication.missing", "there are renamed"]);
    bench.change("while it was down");
    bench.configure("renamed");
    bench.pipeline.start();
    bench.wait_equal(&["t", "u"]);
    bench.change("running again");
    bench.wait_equal(&["t", "u"]);
    assert!(bench.pipeline.log().contains("under the publication's new name `renamed`"), "{}", bench.pipeline.log());
    // And from then on.
    bench.pipeline.kill();
    bench.change("after a crash");
    bench.pipeline.start();
    bench.wait_equal(&["t", "u"]);
    bench.pipeline.wait_ready();
    assert_eq!(bench.copies(), 0, "{}", bench.pipeline.log());
}

#[test]
fn a_publication_that_is_renamed_while_nothing_comes_ends_the_host_too() {
    let mut bench = bench("renamed_idle");
    bench.change("before");
    bench.wait_equal(&["t", "u"]);
    bench.source.sql("ALTER PUBLICATION pub RENAME TO renamed");
    bench.assert_ends(1, &["publication.gap", "new name into `publication`"]);
    let tables = bench.pipeline.status().unwrap();
    let states = tables.destinations[0].tables.iter().map(|table| table.state).collect::<Vec<_>>();
    assert_eq!(states, [TableState::Ready, TableState::Ready], "no table has left");
    bench.configure("renamed");
    bench.pipeline.start();
    bench.change("behind");
    bench.wait_equal(&["t", "u"]);
    assert_eq!(bench.copies(), 0, "{}", bench.pipeline.log());
}

#[test]
fn a_publication_that_is_renamed_while_the_host_is_down_loses_nothing_on_either_side() {
    let mut bench = bench("renamed_down");
    bench.pipeline.install_trigger();
    bench.pipeline.kill();
    // A change of schema under the old name is read under it.
    bench.source.sql("ALTER TABLE t ADD COLUMN more int DEFAULT 5");
    bench.change("under the old name");
    bench.source.sql("INSERT INTO other SELECT n, 'unpublished' FROM generate_series(1, 100) n");
    bench.source.sql("ALTER PUBLICATION pub RENAME TO renamed");
    bench.source.sql("INSERT INTO other SELECT n, 'unpublished' FROM generate_series(1, 100) n");
    bench.source.sql("ALTER TABLE t ADD COLUMN last int DEFAULT 6; UPDATE t SET last = 7 WHERE id % 2 = 0");
    bench.change("under the new name");
    bench.configure("renamed");
    bench.pipeline.start();
    bench.wait_equal(&["t", "u"]);
    assert_eq!(bench.pipeline.stop(), 0);
    bench.change("while it was down");
    bench.pipeline.start();
    bench.wait_equal(&["t", "u"]);
    assert_eq!(bench.copies(), 0, "{}", bench.pipeline.log());
}

#[test]
fn a_transaction_that_lies_across_a_rename_is_named_and_never_left_out() {
    let mut bench = bench("renamed_across");
    bench.source.sql("CREATE EXTENSION dblink");
    bench.pipeline.kill();
    let dblink = format!(
        "SELECT dblink_exec('dbname={} user=postgres port={} host=127.0.0.1', 'ALTER PUBLICATION pub RENAME TO renamed')",
        bench.source.name, bench.source.port
    );
    bench.source.sql(&format!(
        "BEGIN; INSERT INTO t VALUES (-1, 'before'); {dblink}; INSERT INTO t VALUES (-2, 'behind'); COMMIT"
    ));
    bench.configure("renamed");
    bench.pipeline.start();
    let wait_or_end = wait_for("it ends or has both", || {
        let there = bench.mirror.sql("SELECT count(*) FROM t WHERE id < 0");
        (there == "2").then_some(None).or_else(|| bench.pipeline.ended().map(Some))
    });
    // A server may be able to read such a transaction under the new name; it must not be
    // read in part.
    if let Some(exit) = wait_or_end {
        assert_eq!(exit, 1, "{}", bench.pipeline.log());
        assert!(bench.pipeline.log().contains("publication.gap"), "{}", bench.pipeline.log());
        assert_eq!(bench.mirror.sql("SELECT count(*) FROM t WHERE id < 0"), "0");
    }
}

#[test]
fn a_publication_that_is_made_again_while_the_host_is_down_has_all_its_tables_copied_again() {
    let mut bench = bench("again_down");
    bench.pipeline.kill();
    bench.source.sql("DROP PUBLICATION pub");
    // Of this no stream will ever tell.
    bench.change("without a publication");
    bench.source.sql("CREATE PUBLICATION pub FOR TABLE t, u");
    bench.change("under the new one");
    bench.pipeline.start();
    bench.wait_equal(&["t", "u"]);
    bench.pipeline.wait_ready();
    assert!(bench.pipeline.log().contains("dropped and made again"), "{}", bench.pipeline.log());
    // Once.
    let copies = bench.copies();
    assert_eq!(bench.pipeline.stop(), 0);
    bench.change("later");
    bench.pipeline.start();
    bench.wait_equal(&["t", "u"]);
    bench.pipeline.wait_ready();
    assert_eq!(bench.copies(), copies, "{}", bench.pipeline.log());
}

#[test]
fn a_publication_that_is_made_again_while_it_runs_loses_nothing() {
    let mut bench = bench("again_running");
    bench.change("before");
    bench.source.sql("BEGIN; DROP PUBLICATION pub; CREATE PUBLICATION pub FOR TABLE t, u; COMMIT");
    bench.change("behind");
    wait_for("the tables are copied again", || bench.pipeline.log().contains(AGAIN).then_some(()));
    bench.wait_equal(&["t", "u"]);
    bench.pipeline.wait_ready();
    // It knows the new one.
    assert_eq!(bench.pipeline.stop(), 0);
    let copies = bench.copies();
    bench.change("while it was down");
    bench.pipeline.start();
    bench.wait_equal(&["t", "u"]);
    bench.pipeline.wait_ready();
    assert_eq!(bench.copies(), copies, "{}", bench.pipeline.log());
}

#[test]
fn a_publication_that_is_dropped_with_changes_before_it_is_made_again_ends_the_host_and_a_start_mends_it() {
    let mut bench = bench("dropped_running");
    bench.source.sql("DROP PUBLICATION pub");
    bench.change("without a publication");
    bench.assert_ends(1, &["publication.gap", "create it again"]);
    bench.pipeline.start();
    bench.assert_ends(3, &["publication.missing", "the database has none"]);
    bench.source.sql("CREATE PUBLICATION pub FOR TABLE t, u");
    bench.change("under the new one");
    bench.pipeline.start();
    bench.wait_equal(&["t", "u"]);
}

#[test]
fn another_publication_altogether_is_refused() {
    let mut bench = bench("another");
    assert_eq!(bench.pipeline.stop(), 0);
    bench.source.sql("CREATE PUBLICATION another FOR TABLE t");
    bench.configure("another");
    bench.pipeline.start();
    bench.assert_ends(3, &["source.changed", "another (oid"]);
}

#[test]
fn a_column_that_is_published_later_brings_its_values() {
    for (test, trigger) in [("published_later", true), ("published_no_trigger", false)] {
        let setup = "CREATE TABLE t (a int PRIMARY KEY, b text, c text);
            INSERT INTO t SELECT n, 'b', 'c ' || n FROM generate_series(1, 500) n; CREATE PUBLICATION pub FOR TABLE t (a, b)";
        let mut bench = bench_with(test, setup);
        if trigger {
            bench.pipeline.install_trigger();
            assert_eq!(bench.pipeline.stop(), 0);
            bench.pipeline.start();
            bench.pipeline.wait_ready();
        }
        bench.source.sql("ALTER PUBLICATION pub SET TABLE t (a, b, c); UPDATE t SET b = 'after' WHERE a % 2 = 0");
        bench.wait_equal(&["t"]);
    }
}

#[test]
fn a_generated_column_that_becomes_a_plain_one_stops_the_table_instead_of_turning_null() {
    let setup = "CREATE TABLE t (id int PRIMARY KEY, n int, twice int GENERATED ALWAYS AS (n * 2) STORED);
        INSERT INTO t SELECT n, n FROM generate_series(1, 100) n; CREATE PUBLICATION pub FOR TABLE t";
    let mut bench = bench_with("no_more_generated", setup);
    bench.pipeline.install_trigger();
    assert_eq!(bench.pipeline.stop(), 0);
    bench.pipeline.start();
    bench.pipeline.wait_ready();
    bench.source.sql("ALTER TABLE t ALTER COLUMN twice DROP EXPRESSION; UPDATE t SET n = 0 WHERE id = 1");
    let status = bench.pipeline.wait_status("the table stops", |status| {
        status.destinations[0].tables.iter().any(|table| table.state == TableState::Errored)
    });
    assert_eq!(status.destinations[0].tables[0].error.as_ref().unwrap().code, "schema.needs-copy");
    let output = bench.pipeline.command(&["resync", "mirror", "public.t"]).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    bench.wait_equal(&["t"]);
}

#[test]
fn run_and_status_say_what_is_wrong_with_the_trigger_and_when_it_changes() {
    let mut bench = bench("trigger_watch");
    let code = |bench: &Bench| bench.pipeline.status().unwrap().trigger.map(|error| error.code);
    assert!(bench.pipeline.log().contains("trigger.missing"), "{}", bench.pipeline.log());
    assert_eq!(code(&bench).as_deref(), Some("trigger.missing"));
    bench.pipeline.install_trigger();
    bench.pipeline.wait_status("it is told to be started again", |status| {
        status.trigger.as_ref().is_some_and(|error| error.code == "trigger.unused")
    });
    assert_eq!(bench.pipeline.stop(), 0);
    bench.pipeline.start();
    bench.pipeline.wait_status("the trigger is at work", |status| status.trigger.is_none());
    // Not ENABLE ALWAYS is as bad.
    bench.source.sql("ALTER EVENT TRIGGER tidegate_ddl ENABLE");
    bench.pipeline.wait_status("it is disabled", |status| {
        status.trigger.as_ref().is_some_and(|error| error.code == "trigger.disabled")
    });
    assert!(bench.pipeline.log().contains("trigger.disabled"), "{}", bench.pipeline.log());
    let text = bench.pipeline.command(&["status"]).output().unwrap();
    assert!(String::from_utf8_lossy(&text.stdout).contains("source: error[trigger.disabled]"), "{text:?}");
    bench.source.sql("ALTER EVENT TRIGGER tidegate_ddl ENABLE ALWAYS");
    bench.pipeline.wait_status("the trigger is at work again", |status| status.trigger.is_none());
}
