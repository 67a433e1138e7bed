//! What only PostgreSQL 18 has.

use tidegate::store::TableState;

use crate::mirror::Bench;
use crate::servers::Servers;

const TABLE: &str = "
    CREATE TABLE g (id int PRIMARY KEY, n int, twice int GENERATED ALWAYS AS (n * 2) STORED,
                    half int GENERATED ALWAYS AS (n / 2) VIRTUAL);
    INSERT INTO g(id, n) SELECT n, n FROM generate_series(1, 50) n;";

/// `publish_generated_columns = stored`: they arrive as ordinary columns, virtual ones do
/// not.
pub fn published(servers: &Servers) {
    let publication = "CREATE PUBLICATION pub FOR ALL TABLES WITH (publish_generated_columns = stored)";
    let mut bench = Bench::new(servers, "generated", &format!("{TABLE} {publication}"));
    bench.tidegate(&["trigger", "install"]);
    bench.pipeline.start();
    bench.pipeline.wait_ready();
    let shown = "SELECT id, n, twice FROM g";
    bench.assert_equal("g", shown);
    bench.assert_columns("g", "id integer, n integer, twice integer");
    bench.source.sql(
        "UPDATE g SET n = n + 100 WHERE id % 3 = 0; INSERT INTO g(id, n) VALUES (100, 7); DELETE FROM g WHERE id = 1",
    );
    bench.assert_equal("g", shown);
    // An expression that changes, and a column that is there at once, rewrite rows without
    // changes of them (P28): the table waits for a resync instead of differing.
    for change in [
        "ALTER TABLE g ALTER COLUMN twice SET EXPRESSION AS (n * 3)",
        "ALTER TABLE g ADD COLUMN thrice int GENERATED ALWAYS AS (n * 3) STORED, ADD COLUMN quarter int GENERATED ALWAYS AS (n / 4) VIRTUAL",
    ] {
        bench.source.sql(change);
        let status = bench.pipeline.wait_status("the table stops", |status| {
            status.destinations[0].tables.iter().any(|table| table.state == TableState::Errored)
        });
        let error = status.destinations[0].tables[0].error.clone().unwrap();
        assert!(error.code.starts_with("schema.") && error.next.unwrap().contains("tidegate resync"), "{status:#?}");
        assert_eq!(bench.pipeline.stop(), 0);
        bench.tidegate(&["resync", "mirror", "public.g"]);
        bench.pipeline.start();
        bench.pipeline.wait_ready();
        bench.assert_equal("g", if change.contains("thrice") { "SELECT id, n, twice, thrice FROM g" } else { shown });
    }
    assert_eq!(bench.pipeline.stop(), 0);
}

/// A column list that names one, without the option.
pub fn listed(servers: &Servers) {
    let publication = "CREATE PUBLICATION pub FOR TABLE g (id, twice)";
    let mut bench = Bench::new(servers, "listed", &format!("{TABLE} {publication}"));
    bench.tidegate(&["trigger", "install"]);
    bench.pipeline.start();
    bench.pipeline.wait_ready();
    bench.source.sql("UPDATE g SET n = n + 100 WHERE id % 3 = 0; INSERT INTO g(id, n) VALUES (100, 7)");
    bench.assert_equal("g", "SELECT id, twice FROM g");
    bench.assert_columns("g", "id integer, twice integer");
    assert_eq!(bench.pipeline.stop(), 0);
}

/// NOT NULL … NOT VALID is set in `pg_attribute`, and old rows may break it.
pub fn not_valid(servers: &Servers) {
    let mut bench = Bench::new(
        servers,
        "not_valid",
        "CREATE TABLE t (id int PRIMARY KEY, a int, b int); INSERT INTO t VALUES (1, NULL, NULL);
         ALTER TABLE t ADD CONSTRAINT later NOT NULL a NOT VALID; CREATE PUBLICATION pub FOR ALL TABLES",
    );
    bench.tidegate(&["trigger", "install"]);
    bench.pipeline.start();
    bench.pipeline.wait_ready();
    bench.assert_equal("t", "SELECT * FROM t");
    bench.source.sql("ALTER TABLE t ADD CONSTRAINT late NOT NULL b NOT VALID; INSERT INTO t VALUES (2, 2, 2)");
    bench.assert_equal("t", "SELECT * FROM t");
    // Checked, it holds at the mirror too.
    bench.source.sql("UPDATE t SET a = 1, b = 1 WHERE id = 1; ALTER TABLE t VALIDATE CONSTRAINT later");
    bench.assert_equal("t", "SELECT * FROM t");
    let not_null = "SELECT string_agg(attname, ' ' ORDER BY attnum) FROM pg_attribute
                    WHERE attrelid = 't'::regclass AND attnum > 0 AND attnotnull";
    assert_eq!(bench.mirror.sql(not_null), "id a");
    assert_eq!(bench.pipeline.stop(), 0);
}
