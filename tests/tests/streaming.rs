//! Transactions that the server sends before they end: what reaches the mirror is what
//! committed, whole.

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;

use tidegate::scratch::{Cluster, ClusterOptions};
use tidegate_tests::{Database, Pipeline, database, mirror, postgres_destination, wait_for};

/// A server that sends what is above 64 kB before it ends.
fn source() -> &'static Cluster {
    static SOURCE: OnceLock<Cluster> = OnceLock::new();
    SOURCE.get_or_init(|| {
        Cluster::start(&ClusterOptions::default().setting("logical_decoding_work_mem", "64kB")).unwrap()
    })
}

struct Bench {
    source: Database,
    mirror: Database,
    pipeline: Pipeline,
}

const TABLES: &str = "CREATE TABLE t (id bigint PRIMARY KEY, v text, n int DEFAULT 0);
    CREATE TABLE u (id bigint PRIMARY KEY, v text);
    CREATE PUBLICATION pub FOR ALL TABLES";

fn bench(test: &str) -> Bench {
    let source = database(source(), test);
    let mirror = database(mirror(), test);
    source.sql(TABLES);
    let pipeline = Pipeline::new(&source, &postgres_destination("mirror", &mirror));
    Bench { source, mirror, pipeline }
}

impl Bench {
    fn transactions(&self) -> PathBuf {
        self.pipeline.directory().join("state/transactions")
    }

    fn files(&self) -> usize {
        std::fs::read_dir(self.transactions()).map_or(0, |files| files.count())
    }

    /// Blocks that the server has sent of transactions that were open.
    fn blocks(&self) -> u64 {
        let sql = "SELECT coalesce(sum(stream_count), 0) FROM pg_stat_replication_slots WHERE slot_name = 'tidegate_' || current_database()";
        self.source.sql(sql).parse().unwrap()
    }

    /// A fingerprint of each table at both ends, once all has arrived.
    fn assert_equal(&mut self) {
        self.pipeline.wait_caught_up(&self.source);
        for table in ["t", "u"] {
            let sql = format!("SELECT count(*), sum(hashtextextended(x::text, 0)) FROM {table} x");
            assert_eq!(self.source.sql(&sql), self.mirror.sql(&sql), "{table}\n{}", self.pipeline.log());
        }
    }

    /// A session that stays open while others go on.
    fn session(&self) -> Session {
        let mut child = Command::new("psql")
            .args(["-X", "-q", "-A", "-t", "-v", "ON_ERROR_STOP=1", "-d", &self.source.url])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let input = child.stdin.take();
        Session { child, input }
    }
}

struct Session {
    child: Child,
    input: Option<std::process::ChildStdin>,
}

impl Session {
    fn say(&mut self, sql: &str) {
        use std::io::Write;
        let input = self.input.as_mut().unwrap();
        writeln!(input, "{sql};").unwrap();
        input.flush().unwrap();
    }

    fn end(mut self) {
        drop(self.input.take());
        assert!(self.child.wait().unwrap().success());
    }
}

fn rows(from: u64, to: u64) -> String {
    format!("INSERT INTO t SELECT n, md5(n::text) FROM generate_series({from}, {to}) n")
}

#[test]
fn half_a_million_rows_with_savepoints_are_equal_at_the_mirror() {
    let mut bench = bench("savepoints");
    bench.pipeline.start();
    bench.pipeline.wait_ready();
    let mut work = String::from("BEGIN;");
    for part in 0..10 {
        let at = part * 50_000;
        work += &format!("{}; SAVEPOINT s;", rows(at + 1, at + 50_000));
        work += &format!("{};", rows(1_000_000 + at, 1_000_000 + at + 20_000));
        work += &format!("UPDATE t SET n = n + 1 WHERE id % 10 = 0 AND id > {at}; DELETE FROM t WHERE id % 13 = 0;");
        work += if part % 2 == 0 { "ROLLBACK TO s;" } else { "RELEASE s;" };
    }
    work += "COMMIT";
    bench.source.sql(&work);
    bench.source.sql("UPDATE t SET v = 'after' WHERE id < 100");
    bench.assert_equal();
    assert!(bench.blocks() > 100, "the server has not streamed");
    assert_eq!(bench.files(), 0);
    assert_eq!(bench.pipeline.stop(), 0);
}

#[test]
fn open_transactions_wait_in_files_that_a_killed_host_leaves_and_the_next_one_deletes() {
    let mut bench = bench("leftover");
    bench.pipeline.start();
    bench.pipeline.wait_ready();
    let (mut one, mut other) = (bench.session(), bench.session());
    one.say(&format!("BEGIN; {}; SAVEPOINT s; {}", rows(1, 60_000), rows(60_001, 90_000)));
    other.say(&format!("BEGIN; {}", rows(200_001, 260_000)));
    wait_for("both transactions have files", || (bench.files() == 2).then_some(()));
    // What is committed meanwhile does not wait for them.
    bench.source.sql("INSERT INTO u VALUES (1, 'meanwhile'); INSERT INTO t VALUES (-1, 'meanwhile')");
    bench.pipeline.wait_caught_up(&bench.source);
    assert_eq!(bench.mirror.sql("SELECT v FROM u"), "meanwhile");
    assert_eq!(bench.mirror.sql("SELECT count(*) FROM t"), "1");
    bench.pipeline.kill();
    assert_eq!(bench.files(), 2);
    std::fs::write(bench.transactions().join("1"), "of a transaction that is long gone").unwrap();

    bench.pipeline.start();
    bench.pipeline.wait_ready();
    wait_for("both transactions are sent again", || (bench.files() == 2).then_some(()));
    one.say(&format!("ROLLBACK TO s; {}; COMMIT", rows(90_001, 90_100)));
    other.say("ROLLBACK");
    one.end();
    other.end();
    bench.source.sql("INSERT INTO u VALUES (2, 'after')");
    bench.assert_equal();
    assert_eq!(bench.source.sql("SELECT count(*) FROM t"), "60101");
    wait_for("no file is left", || (bench.files() == 0).then_some(()));
    assert_eq!(bench.pipeline.stop(), 0);
}

#[test]
fn a_schema_change_inside_a_large_transaction_comes_in_its_place_unless_it_was_taken_back() {
    let mut bench = bench("streamed_ddl");
    bench.pipeline.install_trigger();
    bench.pipeline.start();
    bench.pipeline.wait_ready();
    bench.source.sql(&format!(
        "BEGIN; {}; ALTER TABLE t ADD COLUMN a int DEFAULT 7; {};
         SAVEPOINT s; ALTER TABLE t DROP COLUMN v; ALTER TABLE t ADD COLUMN lost int; UPDATE t SET n = 1; ROLLBACK TO s;
         SAVEPOINT r; ALTER TABLE t RENAME COLUMN v TO w; {}; RELEASE r; UPDATE t SET w = w || '!' WHERE id % 2 = 0; COMMIT",
        rows(1, 5000),
        rows(5001, 10_000),
        rows(10_001, 15_000)
    ));
    bench.source.sql("INSERT INTO t VALUES (-1, 'after', 1, 1)");
    bench.assert_equal();
    assert!(bench.blocks() > 10, "the server has not streamed");
    let columns = "SELECT string_agg(attname, ' ' ORDER BY attnum) FROM pg_attribute
                   WHERE attrelid = 't'::regclass AND attnum > 0 AND NOT attisdropped";
    assert_eq!(bench.mirror.sql(columns), "id w n a");
}

#[test]
fn a_pipeline_that_is_told_not_to_stream_gets_transactions_at_their_commit() {
    let mut bench = bench("unstreamed");
    let config = bench.pipeline.directory().join("tidegate.toml");
    let text = std::fs::read_to_string(&config).unwrap();
    std::fs::write(&config, text.replace("publication = \"pub\"", "publication = \"pub\"\nstreaming = false")).unwrap();
    bench.pipeline.start();
    bench.pipeline.wait_ready();
    bench.source.sql(&rows(1, 20_000));
    bench.assert_equal();
    assert_eq!(bench.blocks(), 0);
}
