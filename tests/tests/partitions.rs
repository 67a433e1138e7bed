//! Partitions that come, go and are emptied, under a root that is published as itself (P22)
//! and as tables of their own.

use tidegate::store::TableState;
use tidegate_tests::{Database, Pipeline, Traffic, database, mirror, postgres_destination, source, wait_for};

const ROOT: &str = "
    CREATE TABLE root (id int, kind text, v text, PRIMARY KEY (id, kind)) PARTITION BY LIST (kind);
    CREATE TABLE leaf_a PARTITION OF root FOR VALUES IN ('a');
    CREATE TABLE leaf_b PARTITION OF root FOR VALUES IN ('b');
    CREATE TABLE leaf_c (LIKE root INCLUDING ALL);
    INSERT INTO root SELECT n, CASE n % 2 WHEN 0 THEN 'a' ELSE 'b' END, 'first' FROM generate_series(1, 3000) n;
    INSERT INTO leaf_c SELECT n, 'c', 'from before' FROM generate_series(1, 500) n;";
const ATTACH: &str = "ALTER TABLE root ATTACH PARTITION leaf_c FOR VALUES IN ('c')";

/// A source with a root and a mirror, with a pipeline between them.
struct Bench {
    source: Database,
    mirror: Database,
    pipeline: Pipeline,
}

fn bench(test: &str, via_root: bool) -> Bench {
    let source = database(source(), test);
    let mirror = database(mirror(), test);
    source.sql(ROOT);
    source.sql(&format!("CREATE PUBLICATION pub FOR TABLE root WITH (publish_via_partition_root = {via_root})"));
    let mut pipeline = Pipeline::new(&source, &postgres_destination("mirror", &mirror));
    pipeline.start();
    pipeline.wait_ready();
    Bench { source, mirror, pipeline }
}

impl Bench {
    /// Waits until the ends are equal, whatever it takes to get there.
    fn wait_equal(&mut self, table: &str) {
        let rows = self.source.rows(table);
        assert!(!rows.is_empty());
        let look = || {
            self.mark();
            (self.mirror.rows(table) == rows).then_some(())
        };
        let log = || self.pipeline.log();
        let equal = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| wait_for("the mirror is equal", look)));
        assert!(equal.is_ok(), "{table} differs\n{}", log());
    }

    /// A commit behind everything, so that nothing here depends on keepalives.
    fn mark(&self) {
        self.source.sql("SELECT pg_logical_emit_message(true, 'tidegate-test', 'mark')");
    }

    /// How often the root was found to differ, and copied again.
    fn again(&self) -> usize {
        self.pipeline.log().matches("and the table is copied again").count()
    }

    fn wait_again(&self, times: usize) {
        wait_for("the root is copied again", || (self.again() == times).then_some(()));
    }

    /// Looks that come after this have the whole of what was done before it: a table that
    /// joins is noticed by one.
    fn wait_for_a_look(&mut self, name: &str) {
        self.source.sql(&format!("CREATE TABLE {name} (id int PRIMARY KEY); ALTER PUBLICATION pub ADD TABLE {name}"));
        let table = format!("public.{name}");
        let source = self.source.clone();
        self.pipeline.wait_status("the new table is ready", |status| {
            // So that nothing here depends on keepalives.
            source.sql("SELECT pg_logical_emit_message(true, 'tidegate-test', 'mark')");
            let mut tables = status.destinations.iter().flat_map(|destination| &destination.tables);
            tables.any(|known| known.table == table && known.state == TableState::Ready)
        });
    }
}

/// Transactions over the root.
fn traffic(source: &Database) -> Traffic {
    Traffic::start(source, |n| {
        format!(
            "BEGIN; INSERT INTO root VALUES (100000 + {n}, 'a', 'new'); UPDATE root SET v = v || '.' WHERE id = 1 + {n} % 500;
             DELETE FROM root WHERE id = 1000 + {n} % 2000 AND kind = 'a'; COMMIT"
        )
    })
}

/// A change of the partitions under traffic, after which the root is copied again once.
fn changes(test: &str, change: &str) -> Bench {
    let mut bench = bench(test, true);
    let traffic = traffic(&bench.source);
    traffic.wait_for(5);
    bench.source.sql(change);
    bench.wait_again(1);
    traffic.wait_for(5);
    traffic.stop();
    bench.wait_equal("root");
    assert_eq!(bench.again(), 1, "{}", bench.pipeline.log());
    assert!(bench.pipeline.log().contains("table.root-differs"), "{}", bench.pipeline.log());
    bench
}

#[test]
fn a_partition_that_is_attached_with_rows_brings_them_under_traffic() {
    let mut bench = changes("attach", ATTACH);
    bench.source.sql("UPDATE root SET v = 'changed' WHERE kind = 'c' AND id % 2 = 0; DELETE FROM root WHERE kind = 'c' AND id % 5 = 0");
    bench.wait_equal("root");
}

#[test]
fn a_branch_that_is_attached_with_rows_in_its_leaves_brings_them() {
    let branch = "CREATE TABLE branch (LIKE root INCLUDING ALL) PARTITION BY RANGE (id);
        CREATE TABLE twig PARTITION OF branch FOR VALUES FROM (0) TO (1000);
        INSERT INTO branch SELECT n, 'd', 'in a twig' FROM generate_series(1, 300) n;
        ALTER TABLE root ATTACH PARTITION branch FOR VALUES IN ('d')";
    changes("branch", branch);
}

#[test]
fn a_partition_that_is_made_filled_and_attached_in_one_transaction_brings_its_rows() {
    let made = "BEGIN; CREATE TABLE leaf_d (LIKE root INCLUDING ALL);
        INSERT INTO leaf_d SELECT n, 'd', 'at once' FROM generate_series(1, 300) n;
        ALTER TABLE root ATTACH PARTITION leaf_d FOR VALUES IN ('d'); COMMIT";
    changes("made_filled", made);
}

#[test]
fn a_partition_that_is_detached_takes_its_rows_with_it() {
    changes("detach", "ALTER TABLE root DETACH PARTITION leaf_b");
}

#[test]
fn a_partition_that_is_dropped_takes_its_rows_with_it() {
    changes("drop_leaf", "DROP TABLE leaf_b");
}

#[test]
fn a_partition_that_is_truncated_by_itself_is_empty_at_the_destination_too() {
    changes("truncate_leaf", "TRUNCATE leaf_b");
}

#[test]
fn a_partition_that_was_away_for_a_moment_between_two_looks_is_seen_to_have_been() {
    let away = "ALTER TABLE root DETACH PARTITION leaf_b; UPDATE leaf_b SET v = 'while it was away';
        DELETE FROM leaf_b WHERE id % 3 = 0; ALTER TABLE root ATTACH PARTITION leaf_b FOR VALUES IN ('b')";
    changes("away", away);
}

#[test]
fn what_happens_to_partitions_while_the_host_is_down_is_made_up_for() {
    for (test, change) in [
        ("down_attach", ATTACH),
        ("down_detach", "ALTER TABLE root DETACH PARTITION leaf_b"),
        ("down_truncate", "TRUNCATE leaf_a"),
    ] {
        let mut bench = bench(test, true);
        bench.pipeline.kill();
        bench.source.sql(&format!("{change}; UPDATE root SET v = 'meanwhile' WHERE id % 2 = 0"));
        bench.pipeline.start();
        bench.wait_again(1);
        bench.wait_equal("root");
        // Stored: the next start finds nothing.
        bench.pipeline.kill();
        bench.pipeline.start();
        bench.wait_for_a_look("marker");
        assert_eq!(bench.again(), 1, "{test}: {}", bench.pipeline.log());
    }
}

#[test]
fn what_the_stream_tells_does_not_make_a_root_be_copied_again() {
    let mut bench = bench("streamed", true);
    // Made in its place, and attached while it was empty.
    bench.source.sql(
        "CREATE TABLE leaf_d PARTITION OF root FOR VALUES IN ('d'); INSERT INTO root SELECT n, 'd', 'streamed' FROM generate_series(1, 100) n;
         CREATE TABLE leaf_e (LIKE root INCLUDING ALL); ALTER TABLE root ATTACH PARTITION leaf_e FOR VALUES IN ('e')",
    );
    bench.wait_for_a_look("marker_1");
    bench.source.sql("INSERT INTO root VALUES (1, 'e', 'streamed')");
    bench.wait_equal("root");
    // All partitions have another file then.
    bench.source.sql("TRUNCATE root; INSERT INTO root VALUES (7, 'a', 'after'), (7, 'd', 'after')");
    bench.wait_for_a_look("marker_2");
    bench.wait_equal("root");
    // While it is down, too: the stream tells it later.
    bench.pipeline.kill();
    bench.source.sql("TRUNCATE root; INSERT INTO root VALUES (8, 'b', 'after')");
    bench.pipeline.start();
    bench.wait_for_a_look("marker_3");
    bench.wait_equal("root");
    bench.wait_for_a_look("marker_4");
    assert_eq!(bench.again(), 0, "{}", bench.pipeline.log());
}

#[test]
fn a_root_that_differs_again_waits_its_turn_and_says_so() {
    let mut bench = bench("bounded", true);
    bench.source.sql("TRUNCATE leaf_b");
    bench.wait_again(1);
    bench.wait_equal("root");
    bench.source.sql("INSERT INTO root SELECT n, 'b', 'again' FROM generate_series(1, 100) n");
    bench.wait_equal("root");
    bench.source.sql("TRUNCATE leaf_b");
    bench.pipeline.wait_status("the root is shown to differ", |status| {
        let errors = status.destinations[0].tables.iter().filter_map(|table| table.error.as_ref());
        errors.into_iter().any(|error| error.code == "table.root-differs")
    });
    assert_eq!(bench.again(), 1, "{}", bench.pipeline.log());
    bench.wait_again(2);
    bench.wait_equal("root");
    let status = bench.pipeline.status().unwrap();
    assert!(status.destinations[0].tables.iter().all(|table| table.error.is_none()), "{status:#?}");
}

#[test]
fn with_the_trigger_an_attachment_is_seen_in_the_stream_and_not_at_the_next_look() {
    let mut bench = bench("trigger_attach", true);
    bench.pipeline.install_trigger();
    assert_eq!(bench.pipeline.stop(), 0);
    bench.pipeline.start();
    bench.pipeline.wait_ready();
    bench.source.sql(ATTACH);
    bench.wait_again(1);
    bench.wait_equal("root");
}

#[test]
fn leaves_that_are_published_themselves_join_and_leave_as_tables() {
    let mut bench = bench("leaves", false);
    bench.source.sql(&format!("{ATTACH}; UPDATE leaf_c SET v = 'joined' WHERE id % 2 = 0"));
    bench.wait_for_a_look("marker_1");
    bench.wait_equal("leaf_c");
    // Of a leaf that is published itself a TRUNCATE is sent.
    bench.source.sql("TRUNCATE leaf_a; INSERT INTO root VALUES (1, 'a', 'after')");
    bench.wait_equal("leaf_a");
    bench.source.sql("ALTER TABLE root DETACH PARTITION leaf_b");
    let left = bench.pipeline.wait_status("leaf_b has left", |status| {
        let mut tables = status.destinations.iter().flat_map(|destination| &destination.tables);
        tables.any(|table| table.table == "public.leaf_b" && table.state == TableState::Errored)
    });
    let leaf = left.destinations[0].tables.iter().find(|table| table.table == "public.leaf_b").unwrap();
    assert_eq!(leaf.error.as_ref().unwrap().code, "table.unpublished");
    // It comes back with what it became meanwhile.
    bench
        .source
        .sql("UPDATE leaf_b SET v = 'while it was away'; ALTER TABLE root ATTACH PARTITION leaf_b FOR VALUES IN ('b')");
    bench.wait_equal("leaf_b");
    bench.wait_equal("leaf_c");
    // While the host is down.
    bench.pipeline.kill();
    bench.source.sql("ALTER TABLE root DETACH PARTITION leaf_c; UPDATE leaf_c SET v = 'gone'; ALTER TABLE root ATTACH PARTITION leaf_c FOR VALUES IN ('c')");
    bench.pipeline.start();
    bench.wait_equal("leaf_c");
    assert_eq!(bench.again(), 0);
}
