//! Source to mirror: the `postgres` plugin under the whole host.

use tidegate_tests::{Database, Pipeline, database, mirror, postgres_destination, source};

/// A source and a mirror with a pipeline between them.
struct Bench {
    source: Database,
    mirror: Database,
    pipeline: Pipeline,
}

fn bench(test: &str, schema: &str) -> Bench {
    let source = database(source(), test);
    let mirror = database(mirror(), test);
    source.sql(schema);
    source.sql("CREATE PUBLICATION pub FOR ALL TABLES");
    let pipeline = Pipeline::new(&source, &postgres_destination("mirror", &mirror));
    Bench { source, mirror, pipeline }
}

impl Bench {
    fn assert_equal(&mut self, tables: &[&str]) {
        self.pipeline.wait_caught_up(&self.source);
        for table in tables {
            assert_eq!(self.source.rows(table), self.mirror.rows(table), "{table}\n{}", self.pipeline.log());
        }
    }
}

#[test]
fn rows_that_were_there_and_rows_that_come_are_equal_at_the_mirror() {
    let mut bench = bench(
        "equal",
        "CREATE TABLE orders (id bigint PRIMARY KEY, note text, price numeric(12,2), at timestamptz DEFAULT now());
         INSERT INTO orders SELECT n, 'note ' || n, n * 1.5, now() FROM generate_series(1, 5000) n;
         CREATE TABLE empty (id int PRIMARY KEY, v text)",
    );
    bench.pipeline.start();
    bench.pipeline.wait_ready();
    bench.assert_equal(&["orders", "empty"]);

    bench.source.sql("INSERT INTO orders SELECT n, 'new', 0, now() FROM generate_series(5001, 6000) n");
    bench.source.sql("UPDATE orders SET note = note || '!' WHERE id % 3 = 0");
    bench.source.sql("DELETE FROM orders WHERE id % 7 = 0");
    bench.source.sql("UPDATE orders SET id = id + 100000 WHERE id % 11 = 0");
    bench.source.sql("BEGIN; INSERT INTO empty VALUES (1, 'a'), (2, 'b'); UPDATE empty SET v = 'c' WHERE id = 1; DELETE FROM empty WHERE id = 2; COMMIT");
    bench.assert_equal(&["orders", "empty"]);

    bench.source.sql("TRUNCATE orders");
    bench.source.sql("INSERT INTO orders VALUES (1, 'after the truncate', 1, now())");
    bench.assert_equal(&["orders", "empty"]);
    assert_eq!(bench.pipeline.stop(), 0);
}

#[test]
fn schema_changes_reach_the_mirror_in_their_place_between_the_rows() {
    let mut bench = bench(
        "schema",
        "CREATE TABLE t (id int PRIMARY KEY, a text, b int, c text);
         INSERT INTO t SELECT n, 'a' || n, n, 'c' FROM generate_series(1, 1000) n",
    );
    bench.pipeline.install_trigger();
    bench.pipeline.start();
    bench.pipeline.wait_ready();
    for (change, rows) in [
        ("ALTER TABLE t ADD COLUMN d int DEFAULT 5", "INSERT INTO t(id, a, c) VALUES (1001, 'with d', 'c')"),
        ("ALTER TABLE t DROP COLUMN b", "UPDATE t SET c = 'dropped' WHERE id % 2 = 0"),
        ("ALTER TABLE t RENAME COLUMN a TO renamed", "UPDATE t SET renamed = 'renamed' WHERE id % 3 = 0"),
        ("ALTER TABLE t ADD COLUMN b timestamptz", "UPDATE t SET b = '2026-01-01 00:00:00+00' WHERE id % 5 = 0"),
        (
            "ALTER TABLE t ALTER COLUMN c SET DEFAULT 'x', ALTER COLUMN c SET NOT NULL",
            "INSERT INTO t(id) VALUES (1002)",
        ),
        ("ALTER TABLE t ALTER COLUMN c DROP NOT NULL, ALTER COLUMN c DROP DEFAULT", "INSERT INTO t(id) VALUES (1003)"),
    ] {
        bench.source.sql(&format!("BEGIN; UPDATE t SET c = c || '.' WHERE id < 50; {change}; {rows}; COMMIT"));
    }
    // With no rows behind it.
    bench.source.sql("ALTER TABLE t RENAME COLUMN d TO e");
    bench.assert_equal(&["t"]);
    let columns = "SELECT string_agg(attname || ' ' || format_type(atttypid, atttypmod), ', ' ORDER BY attnum)
                   FROM pg_attribute WHERE attrelid = 't'::regclass AND attnum > 0 AND NOT attisdropped";
    assert_eq!(bench.source.sql(columns), bench.mirror.sql(columns));
}

#[test]
fn a_value_that_the_source_did_not_send_again_is_kept() {
    let mut bench = bench(
        "toast",
        "CREATE TABLE t (id int PRIMARY KEY, big text, n int);
         ALTER TABLE t ALTER COLUMN big SET STORAGE EXTERNAL;
         INSERT INTO t SELECT n, repeat(md5(n::text), 200), 0 FROM generate_series(1, 50) n",
    );
    bench.pipeline.start();
    bench.pipeline.wait_ready();
    bench.source.sql("UPDATE t SET n = n + 1");
    bench.source.sql("UPDATE t SET id = id + 1000 WHERE id % 2 = 0");
    bench.source.sql("BEGIN; INSERT INTO t VALUES (500, repeat('y', 5000), 1); UPDATE t SET n = 2 WHERE id = 500; UPDATE t SET id = 501 WHERE id = 500; COMMIT");
    bench.assert_equal(&["t"]);
}

#[test]
fn a_host_that_is_killed_again_and_again_ends_equal() {
    let mut bench = bench(
        "killed",
        "CREATE TABLE t (id bigserial PRIMARY KEY, v text, n int DEFAULT 0);
         INSERT INTO t(v) SELECT 'row ' || n FROM generate_series(1, 20000) n",
    );
    bench.pipeline.install_trigger();
    let work = "INSERT INTO t(v) SELECT 'more' FROM generate_series(1, 300);
                UPDATE t SET n = n + 1 WHERE id % 17 = 0;
                DELETE FROM t WHERE id % 101 = 0;
                UPDATE t SET id = -id WHERE id % 997 = 0";
    for round in 0..8_u64 {
        bench.pipeline.start();
        bench.source.sql(work);
        if round == 4 {
            bench.source.sql("ALTER TABLE t ADD COLUMN added text DEFAULT 'later'");
        }
        bench.source.sql(work);
        std::thread::sleep(std::time::Duration::from_millis(150 * round));
        bench.pipeline.kill();
    }
    bench.pipeline.start();
    bench.pipeline.wait_ready();
    bench.assert_equal(&["t"]);
}
