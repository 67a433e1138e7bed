//! Source to mirror, both of one major.

use tidegate_tests::{Database, Pipeline, database, postgres_destination};

use crate::servers::Servers;

/// Two databases with a pipeline between them.
pub struct Bench {
    pub source: Database,
    pub mirror: Database,
    pub pipeline: Pipeline,
}

impl Bench {
    pub fn new(servers: &Servers, test: &str, schema: &str) -> Bench {
        let source = database(&servers.source, test);
        source.sql(schema);
        Bench::between(source, database(&servers.mirror, test))
    }

    pub fn between(source: Database, mirror: Database) -> Bench {
        let pipeline = Pipeline::new(&source, &postgres_destination("mirror", &mirror));
        Bench { source, mirror, pipeline }
    }

    /// Runs a command that has to succeed, and returns what it prints.
    pub fn tidegate(&self, arguments: &[&str]) -> String {
        let output = self.pipeline.command(arguments).env("TIDEGATE_TEST_PASSWORD", "unused").output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{arguments:?}: {said}");
        said
    }

    /// The mirror's table has what a query says of the source.
    pub fn assert_equal(&mut self, table: &str, query: &str) {
        self.pipeline.wait_caught_up(&self.source);
        let of = |database: &Database, query: &str| database.rows(&format!("({query})"));
        let (from, to) = (of(&self.source, query), of(&self.mirror, &format!("SELECT * FROM {table}")));
        assert_eq!(from, to, "{table}\n{}", self.pipeline.log());
        assert!(!from.is_empty(), "{table}");
    }

    /// Names and types of a table's columns are these.
    pub fn assert_columns(&self, table: &str, expected: &str) {
        let columns = format!(
            "SELECT string_agg(attname || ' ' || format_type(atttypid, atttypmod), ', ' ORDER BY attnum)
             FROM pg_attribute WHERE attrelid = '{table}'::regclass AND attnum > 0 AND NOT attisdropped"
        );
        assert_eq!(self.mirror.sql(&columns), expected, "{table}");
    }
}

const TABLES: &str = "
    CREATE TABLE t (id int PRIMARY KEY, a text, b int, big text);
    ALTER TABLE t ALTER COLUMN big SET STORAGE EXTERNAL;
    INSERT INTO t SELECT n, 'a' || n, n, repeat(md5(n::text), 100) FROM generate_series(1, 300) n;
    CREATE TABLE root (id int, kind text, v text, PRIMARY KEY (id, kind)) PARTITION BY LIST (kind);
    CREATE TABLE leaf_a PARTITION OF root FOR VALUES IN ('a');
    CREATE TABLE leaf_b (v text, kind text NOT NULL, id int NOT NULL);
    ALTER TABLE root ATTACH PARTITION leaf_b FOR VALUES IN ('b');
    INSERT INTO root SELECT n, CASE n % 2 WHEN 0 THEN 'a' ELSE 'b' END, 'copied' FROM generate_series(1, 100) n;
    CREATE TABLE filtered (id int PRIMARY KEY, secret text, shown text);
    INSERT INTO filtered SELECT n, 'secret', 'shown ' || n FROM generate_series(1, 40) n;
    CREATE TABLE generated (id int PRIMARY KEY, n int, twice int GENERATED ALWAYS AS (n * 2) STORED);
    INSERT INTO generated(id, n) SELECT n, n FROM generate_series(1, 20) n;";

/// The first major with row filters and column lists.
const FILTERS_SINCE: u32 = 15;
/// The first major that can switch all event triggers off.
const SWITCH_SINCE: u32 = 17;
/// The first major with virtual generated columns.
const VIRTUAL_SINCE: u32 = 18;

/// Copy, stream, DDL, TRUNCATE, keys, TOAST, partitions, filters, and SIGKILL.
pub fn follows(servers: &Servers) {
    let mut bench = Bench::new(servers, "follows", TABLES);
    let has_filters = servers.major >= FILTERS_SINCE;
    if servers.major >= VIRTUAL_SINCE {
        bench.source.sql("ALTER TABLE generated ADD COLUMN half int GENERATED ALWAYS AS (n / 2) VIRTUAL");
    }
    let filtered = if has_filters { "filtered (id, shown) WHERE (id > 10)" } else { "filtered" };
    bench.source.sql(&format!(
        "CREATE PUBLICATION pub FOR TABLE t, root, generated, {filtered} WITH (publish_via_partition_root = true)"
    ));
    let filtered = if has_filters { "SELECT id, shown FROM filtered WHERE id > 10" } else { "SELECT * FROM filtered" };
    let all = [("t", "SELECT * FROM t"), ("root", "SELECT * FROM root"), ("filtered", filtered)];
    bench.tidegate(&["trigger", "install"]);
    bench.pipeline.start();
    bench.pipeline.wait_ready();
    for (table, query) in all {
        bench.assert_equal(table, query);
    }

    // Rows: moved keys with cells that were not sent, moved between partitions, in and
    // out of the filter.
    bench.source.sql("UPDATE t SET b = b + 1 WHERE id % 2 = 0; UPDATE t SET id = id + 1000 WHERE id % 3 = 0; DELETE FROM t WHERE id % 7 = 0");
    bench.source.sql("UPDATE root SET kind = 'b' WHERE id % 10 = 0; INSERT INTO root VALUES (200, 'a', 'streamed'); DELETE FROM root WHERE id = 3");
    bench.source.sql("UPDATE filtered SET id = id + 100 WHERE id < 5; UPDATE filtered SET id = id - 34 WHERE id = 35; DELETE FROM filtered WHERE id = 20; UPDATE filtered SET shown = 'new' WHERE id % 2 = 0");
    bench.source.sql("UPDATE generated SET n = n * 10 WHERE id % 2 = 0");
    for (table, query) in all {
        bench.assert_equal(table, query);
    }
    bench.assert_equal("generated", "SELECT id, n FROM generated");

    // Schema changes between rows of one transaction, under a root too, and with no rows
    // behind them.
    for (change, rows) in [
        ("ALTER TABLE t ADD COLUMN d int DEFAULT 5", "INSERT INTO t(id, a) VALUES (5001, 'with d')"),
        ("ALTER TABLE t DROP COLUMN b", "UPDATE t SET a = 'dropped' WHERE id % 2 = 0"),
        ("ALTER TABLE t RENAME COLUMN a TO renamed", "UPDATE t SET renamed = 'renamed' WHERE id % 5 = 0"),
        ("ALTER TABLE root ADD COLUMN w int DEFAULT 3", "INSERT INTO root VALUES (300, 'b', 'with w', 4)"),
        ("ALTER TABLE root RENAME COLUMN v TO moved", "UPDATE root SET moved = 'renamed' WHERE id % 4 = 0"),
    ] {
        bench.source.sql(&format!("BEGIN; UPDATE t SET id = -id WHERE id < 20; {change}; {rows}; COMMIT"));
    }
    bench.source.sql("ALTER TABLE generated DROP COLUMN twice; ALTER TABLE generated ADD COLUMN late text DEFAULT 'x'");
    for (table, query) in all {
        bench.assert_equal(table, query);
    }
    bench.assert_equal("generated", "SELECT id, n, late FROM generated");
    bench.assert_columns("t", "id integer, renamed text, big text, d integer");
    bench.assert_columns("root", "id integer, kind text, moved text, w integer");

    bench.source.sql("TRUNCATE t, root; INSERT INTO t(id, renamed) VALUES (1, 'after'); INSERT INTO root VALUES (1, 'a', 'after', 1)");
    for (table, query) in all {
        bench.assert_equal(table, query);
    }

    killed(&mut bench);
    for (table, query) in all {
        bench.assert_equal(table, query);
    }
    assert_eq!(bench.pipeline.stop(), 0);
}

/// SIGKILL while rows and a schema change are under way.
fn killed(bench: &mut Bench) {
    bench.pipeline.kill();
    for round in 1..=3 {
        bench.pipeline.start();
        bench.source.sql(&format!(
            "INSERT INTO t(id, big, renamed) SELECT {round} * 10000 + n, repeat('y', 3000), 'round' FROM generate_series(1, 400) n;
             UPDATE t SET d = d + 1 WHERE id % 3 = 0; UPDATE t SET id = -id WHERE id % 50 = 0;
             ALTER TABLE t ADD COLUMN round_{round} int DEFAULT {round};
             INSERT INTO root SELECT {round} * 10000 + n, 'b', 'round', {round} FROM generate_series(1, 200) n"
        ));
        std::thread::sleep(std::time::Duration::from_millis(150 * round));
        bench.pipeline.kill();
    }
    bench.pipeline.start();
    bench.pipeline.wait_ready();
}

/// The source as `check` sees it, with the trigger and without.
pub fn installs_and_uninstalls(servers: &Servers) {
    let bench = Bench::new(
        servers,
        "installs",
        "CREATE TABLE t (id int PRIMARY KEY, v text); CREATE PUBLICATION pub FOR ALL TABLES",
    );
    const OBJECTS: &str = "SELECT count(*) FROM (
        SELECT oid FROM pg_class UNION ALL SELECT oid FROM pg_proc UNION ALL SELECT oid FROM pg_namespace
        UNION ALL SELECT oid FROM pg_event_trigger UNION ALL SELECT oid FROM pg_type) o";
    let before = bench.source.sql(OBJECTS);
    let said = bench.tidegate(&["check"]);
    assert!(said.contains("trigger.missing"), "{said}");
    for _ in 0..2 {
        bench.tidegate(&["trigger", "install"]);
        let said = bench.tidegate(&["check"]);
        assert!(said.contains("DDL trigger: at work") && said.contains("all is there"), "{said}");
    }
    assert_eq!(bench.source.sql("SELECT count(*) FROM pg_publication_tables"), "1", "the key is not published");
    if servers.major >= SWITCH_SINCE {
        let set =
            |to: &str| bench.source.sql(&format!("ALTER DATABASE {} SET event_triggers = {to}", bench.source.name));
        set("off");
        let output = bench.pipeline.command(&["check"]).env("TIDEGATE_TEST_PASSWORD", "unused").output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.code() == Some(3) && said.contains("trigger.disabled"), "{said}");
        set("on");
    }
    bench.tidegate(&["trigger", "uninstall"]);
    assert_eq!(bench.source.sql(OBJECTS), before);
    assert!(bench.tidegate(&["check"]).contains("trigger.missing"));
}
