use std::collections::BTreeSet;
use std::sync::atomic::AtomicBool;
use std::sync::{LazyLock, Weak};

use super::*;
use crate::schema::table::TableName;
use crate::scratch::{Cluster, ClusterOptions};
use crate::source::pgoutput::{self, Cell};
use crate::source::wal::WalMessage;

/// A database of its own on a cluster that all tests of this module share.
struct Source {
    config: SourceConfig,
    sql: Session,
    _cluster: Arc<Cluster>,
}

impl Source {
    /// Makes the database and runs `setup`, which creates publication `p`.
    async fn new(name: &str, setup: &str) -> Source {
        static CLUSTER: LazyLock<Mutex<Weak<Cluster>>> = LazyLock::new(Mutex::default);
        let cluster = {
            let mut shared = CLUSTER.lock().unwrap_or_else(PoisonError::into_inner);
            let cluster =
                shared.upgrade().unwrap_or_else(|| Arc::new(Cluster::start(&ClusterOptions::default()).unwrap()));
            *shared = Arc::downgrade(&cluster);
            cluster
        };
        cluster.psql("postgres", &format!("CREATE DATABASE {name}")).unwrap();
        let config = SourceConfig::parse(&cluster.url(name), "p", name).unwrap();
        let sql = session::connect(&config).await.unwrap();
        sql.batch_execute("SET search_path = public").await.unwrap();
        sql.batch_execute(setup).await.unwrap();
        Source { config, sql, _cluster: cluster }
    }

    async fn run(&self, sql: &str) {
        self.sql.batch_execute(sql).await.unwrap();
    }

    async fn another(&self) -> Session {
        let session = session::connect(&self.config).await.unwrap();
        session.batch_execute("SET search_path = public").await.unwrap();
        session
    }

    async fn published(&self) -> Vec<PublishedTable> {
        published_tables(&self.sql, "p").await.unwrap()
    }

    async fn take(&self) -> Wave {
        take(&self.config, &self.published().await, &options()).await.unwrap()
    }

    async fn number(&self, sql: &str) -> i64 {
        self.sql.query_one(sql, &[]).await.unwrap().get(0)
    }
}

fn options() -> WaveOptions {
    WaveOptions {
        lock_timeout: Duration::from_millis(500),
        give_way_after: Duration::from_millis(400),
        attempts: 2,
        ..WaveOptions::default()
    }
}

fn oid(wave: &Wave, name: &str) -> u32 {
    let table = wave.tables.iter().find(|table| table.table.name == TableName::new("public", name));
    table.unwrap_or_else(|| panic!("{name} is not in {wave:?}")).table.oid
}

/// The lines of a table's copy.
async fn copy(wave: &Wave, name: &str) -> Result<Vec<String>> {
    let (sink, mut rows) = mpsc::channel(2);
    let oid = oid(wave, name);
    let copy = async move { wave.copy_table(oid, &sink).await };
    let collect = async {
        let mut bytes = Vec::new();
        while let Some(buffer) = rows.recv().await {
            assert_eq!(buffer.last(), Some(&b'\n'), "whole lines");
            bytes.extend_from_slice(&buffer);
        }
        String::from_utf8(bytes).unwrap()
    };
    let (done, text) = tokio::join!(copy, collect);
    let lines: Vec<String> = text.lines().map(str::to_owned).collect();
    let done = done?;
    assert_eq!((done.rows, done.bytes), (lines.len() as u64, text.len() as u64));
    Ok(lines)
}

fn sorted(mut lines: Vec<String>) -> Vec<String> {
    lines.sort();
    lines
}

/// Ids of rows that the stream inserted, with the LSN of their commit, until the row
/// with id `last`.
async fn streamed(config: &SourceConfig, slot: &str, from: Lsn, last: i64) -> Vec<(Lsn, i64)> {
    let connection = ReplicationConnection::connect(config).await.unwrap();
    let (mut reader, _feedback) = connection.start(slot, from, "p").await.unwrap();
    let mut rows = Vec::new();
    let mut commit = Lsn::ZERO;
    loop {
        let WalMessage::Data(data) = reader.next().await.unwrap() else { continue };
        match pgoutput::decode(&data.body).unwrap() {
            pgoutput::Message::Begin(begin) => commit = begin.final_lsn,
            pgoutput::Message::Insert { new, .. } => {
                let Cell::Text(id) = new.cells().next().unwrap().unwrap() else { panic!("not text") };
                let id = std::str::from_utf8(id).unwrap().parse().unwrap();
                rows.push((commit, id));
                if id == last {
                    return rows;
                }
            }
            _ => {}
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_commit_is_in_the_copy_or_at_or_beyond_the_floor_and_never_both() {
    let source = Source::new(
        "visibility",
        "CREATE TABLE t (id bigserial PRIMARY KEY, a text); CREATE PUBLICATION p FOR TABLE t",
    )
    .await;
    let mut replication = ReplicationConnection::connect(&source.config).await.unwrap();
    let slot = replication.create_slot("visibility", SlotKind::Permanent, Duration::from_secs(30)).await.unwrap();
    let stop = Arc::new(AtomicBool::new(false));
    let mut writers = Vec::new();
    for _ in 0..4 {
        let session = source.another().await;
        let stop = stop.clone();
        writers.push(tokio::spawn(async move {
            while !stop.load(Ordering::Relaxed) {
                let transaction = "BEGIN; INSERT INTO t (a) VALUES ('a'); SAVEPOINT s; INSERT INTO t (a) VALUES ('b'); \
                    RELEASE s; SAVEPOINT s; INSERT INTO t (a) VALUES ('never'); ROLLBACK TO s; COMMIT";
                session.batch_execute(transaction).await.unwrap();
            }
        }));
    }
    let mut copies = Vec::new();
    for _ in 0..6 {
        let wave = source.take().await;
        let lines = copy(&wave, "t").await.unwrap();
        let ids: Vec<i64> = lines.iter().map(|line| line.split('\t').next().unwrap().parse().unwrap()).collect();
        copies.push((wave.floor, ids));
    }
    stop.store(true, Ordering::Relaxed);
    for writer in writers {
        writer.await.unwrap();
    }
    let last = source.number("INSERT INTO t (a) VALUES ('last') RETURNING id").await;
    let rows = streamed(&source.config, "visibility", slot.consistent_point, last).await;
    let all = source.sql.query("SELECT id FROM t", &[]).await.unwrap();
    let all: BTreeSet<i64> = all.iter().map(|row| row.get(0)).collect();
    assert!(copies[5].1.len() > copies[0].1.len(), "rows were written meanwhile");
    for (floor, copied) in copies {
        let later: Vec<i64> = rows.iter().filter(|(commit, _)| *commit >= floor).map(|(_, id)| *id).collect();
        assert!(!later.is_empty());
        let both: Vec<i64> = copied.iter().chain(&later).copied().collect();
        let whole: BTreeSet<i64> = both.iter().copied().collect();
        assert_eq!(both.len(), whole.len(), "a row is in the copy and in the stream");
        assert!(whole == all, "a row is in neither");
    }
    replication.drop_slot("visibility").await.unwrap();
}

#[tokio::test]
async fn a_wave_leaves_neither_slot_nor_lock_behind_while_it_waits() {
    let source = Source::new("leaves_nothing", "CREATE TABLE t (id int); CREATE PUBLICATION p FOR TABLE t").await;
    let wave = source.take().await;
    assert_eq!(source.number("SELECT count(*) FROM pg_replication_slots WHERE database = current_database()").await, 0);
    assert_eq!(source.number("SELECT count(*) FROM pg_locks WHERE relation = 't'::regclass").await, 0);
    source.run("ALTER TABLE t ADD b int").await;
    assert_eq!(wave.tables[0].schema.snapshot, SnapshotId { commit: wave.floor, message: Lsn::ZERO });
    assert_eq!(wave.tables[0].schema.origin, Origin::Copy);
}

#[tokio::test]
async fn names_that_need_quotes_and_every_awkward_table_are_copied() {
    let setup = r#"
        CREATE TABLE "Select ""x"".y" ("A b" int, "from" text, "ü" text);
        INSERT INTO "Select ""x"".y" VALUES (1, E'tab\tback\\slash', NULL), (2, '\N', E'line\nend');
        CREATE TABLE empty (id int PRIMARY KEY);
        CREATE TABLE no_columns ();
        INSERT INTO no_columns DEFAULT VALUES;
        CREATE TABLE generated (id int, twice int GENERATED ALWAYS AS (id * 2) STORED);
        INSERT INTO generated VALUES (4);
        CREATE TABLE parent (id int); CREATE TABLE child (more int) INHERITS (parent);
        INSERT INTO parent VALUES (1); INSERT INTO child VALUES (2, 3);
        CREATE PUBLICATION p FOR ALL TABLES"#;
    let source = Source::new("awkward", setup).await;
    let wave = source.take().await;
    assert!(wave.skipped.is_empty(), "{wave:?}");
    let quoted = copy(&wave, "Select \"x\".y").await.unwrap();
    assert_eq!(quoted, ["1\ttab\\tback\\\\slash\t\\N", "2\t\\\\N\tline\\nend"]);
    assert_eq!(copy(&wave, "empty").await.unwrap(), [""; 0]);
    assert_eq!(copy(&wave, "no_columns").await.unwrap(), [""]);
    assert_eq!(copy(&wave, "generated").await.unwrap(), ["4"]);
    assert_eq!(copy(&wave, "parent").await.unwrap(), ["1"], "a child is a table of its own");
    assert_eq!(copy(&wave, "child").await.unwrap(), ["2\t3"]);
}

#[tokio::test]
async fn settings_of_role_and_database_do_not_change_how_a_value_prints() {
    let setup = "CREATE TABLE t (at timestamptz, b bytea, f float8, i interval);
        INSERT INTO t VALUES ('2024-02-03 04:05:06+00', '\\x00ff', 0.1::float8 + 0.2, '1 day 2 hours');
        CREATE PUBLICATION p FOR TABLE t;
        ALTER DATABASE settings SET DateStyle = 'German'; ALTER DATABASE settings SET TimeZone = 'Asia/Tokyo';
        ALTER DATABASE settings SET bytea_output = 'escape'; ALTER DATABASE settings SET extra_float_digits = 0;
        ALTER DATABASE settings SET IntervalStyle = 'iso_8601'; ALTER DATABASE settings SET statement_timeout = 1";
    let source = Source::new("settings", setup).await;
    let wave = source.take().await;
    let lines = copy(&wave, "t").await.unwrap();
    assert_eq!(lines, ["2024-02-03 04:05:06+00\t\\\\x00ff\t0.30000000000000004\t1 day 02:00:00"]);
}

#[tokio::test]
async fn the_row_filter_and_the_column_list_hold_for_the_copy() {
    let setup = "CREATE TABLE t (id int PRIMARY KEY, secret text, \"Shown\" text);
        INSERT INTO t SELECT n, 'secret', 'shown ' || n FROM generate_series(1, 5) n;
        CREATE PUBLICATION p FOR TABLE t (id, \"Shown\") WHERE (id > 3 OR \"Shown\" IS NULL)";
    // The filter needs its columns in the replica identity for updates only.
    let source = Source::new("filtered", setup).await;
    let wave = source.take().await;
    assert_eq!(copy(&wave, "t").await.unwrap(), ["4\tshown 4", "5\tshown 5"]);
    let ordinals: Vec<u16> = wave.tables[0].schema.columns.iter().map(|column| column.ordinal).collect();
    assert_eq!(ordinals, [1, 3]);
}

const PARTITIONED: &str = "
    CREATE TABLE root (id int, kind text) PARTITION BY LIST (kind);
    CREATE TABLE leaf_a PARTITION OF root FOR VALUES IN ('a');
    CREATE TABLE middle PARTITION OF root FOR VALUES IN ('b', 'c') PARTITION BY LIST (kind);
    CREATE TABLE leaf_b PARTITION OF middle FOR VALUES IN ('b');
    CREATE TABLE leaf_c (kind text, dropped int, id int); ALTER TABLE leaf_c DROP dropped;
    ALTER TABLE middle ATTACH PARTITION leaf_c FOR VALUES IN ('c');
    INSERT INTO root VALUES (1, 'a'), (2, 'b'), (3, 'c'), (4, 'a');";

#[tokio::test]
async fn a_root_is_copied_leaf_by_leaf_with_its_own_filter() {
    let publish = "CREATE PUBLICATION p FOR TABLE root WHERE (id <> 4) WITH (publish_via_partition_root)";
    let source = Source::new("via_root", &format!("{PARTITIONED} {publish}")).await;
    let wave = source.take().await;
    assert_eq!(wave.tables.len(), 1);
    assert_eq!(sorted(copy(&wave, "root").await.unwrap()), ["1\ta", "2\tb", "3\tc"]);
}

#[tokio::test]
async fn without_the_root_each_leaf_is_a_table() {
    let source = Source::new("leaves", &format!("{PARTITIONED} CREATE PUBLICATION p FOR TABLE root")).await;
    let wave = source.take().await;
    assert_eq!(wave.tables.len(), 3);
    assert_eq!(copy(&wave, "leaf_a").await.unwrap(), ["1\ta", "4\ta"]);
    assert_eq!(copy(&wave, "leaf_c").await.unwrap(), ["c\t3"]);
}

#[tokio::test]
async fn a_table_that_is_no_longer_what_the_snapshot_shows_is_not_copied() {
    let changes = [
        "ALTER TABLE t ADD b int DEFAULT 5",
        "ALTER TABLE t ALTER id TYPE bigint",
        "ALTER TABLE t RENAME TO u",
        "ALTER TABLE t RENAME id TO other",
        "ALTER TABLE t REPLICA IDENTITY FULL",
        "ALTER TABLE t SET SCHEMA other",
        "TRUNCATE t",
        "VACUUM FULL t",
        "DROP TABLE t",
        "ALTER TABLE t RENAME TO u; CREATE TABLE t (id int)",
        "ALTER PUBLICATION p SET TABLE t WHERE (id > 1)",
        "ALTER PUBLICATION p DROP TABLE t",
        "ALTER PUBLICATION p DROP TABLE t; ALTER PUBLICATION p ADD TABLE t",
        "ALTER PUBLICATION p SET (publish = 'insert')",
    ];
    let source = Source::new("changed", "CREATE SCHEMA other; CREATE PUBLICATION p").await;
    for change in changes {
        source.run("CREATE TABLE t (id int PRIMARY KEY); INSERT INTO t VALUES (1), (2)").await;
        source.run("ALTER PUBLICATION p ADD TABLE t").await;
        let before = source.published().await;
        let waiting = source.take().await;
        let mut begun = Wave::begin(&source.config, &options()).await.unwrap();
        for command in change.split("; ") {
            source.run(command).await;
        }
        let error = copy(&waiting, "t").await.unwrap_err();
        assert_eq!((error.code(), error.is_transient()), ("copy.changed", true), "{change}: {error}");
        let changed = begun.examine(&before).await.unwrap();
        assert!(begun.tables.is_empty(), "{change}");
        assert_eq!(changed.len() + begun.skipped.len(), 1, "{change}");
        drop((waiting, begun));
        source.run("DROP TABLE IF EXISTS t, u, other.t; ALTER PUBLICATION p SET (publish = 'insert, update, delete, truncate')").await;
    }
}

#[tokio::test]
async fn a_partition_that_comes_or_goes_or_is_rewritten_makes_its_root_begin_again() {
    let publish = "CREATE PUBLICATION p FOR TABLE root WITH (publish_via_partition_root)";
    let source = Source::new("partitions_change", &format!("{PARTITIONED} {publish}")).await;
    for change in [
        "CREATE TABLE leaf_d PARTITION OF root FOR VALUES IN ('d')",
        "ALTER TABLE middle DETACH PARTITION leaf_b",
        "TRUNCATE leaf_c",
    ] {
        let wave = source.take().await;
        source.run(change).await;
        assert_eq!(copy(&wave, "root").await.unwrap_err().code(), "copy.changed", "{change}");
    }
    assert_eq!(sorted(copy(&source.take().await, "root").await.unwrap()), ["1\ta", "4\ta"]);
}

#[tokio::test]
async fn other_peoples_changes_do_not_disturb_a_copy() {
    let source = Source::new("undisturbed", "CREATE TABLE t (id int PRIMARY KEY); CREATE TABLE other (id int); INSERT INTO t VALUES (1); CREATE PUBLICATION p FOR TABLE t").await;
    let wave = source.take().await;
    source.run("INSERT INTO t VALUES (2); DELETE FROM t WHERE id = 1; ALTER TABLE other ADD b int; ALTER PUBLICATION p ADD TABLE other").await;
    source.run("ANALYZE t").await;
    source.run("VACUUM t").await;
    assert_eq!(copy(&wave, "t").await.unwrap(), ["1"]);
    assert_eq!(copy(&wave, "t").await.unwrap(), ["1"], "and again");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_table_that_is_altered_all_the_time_is_left_out_and_the_rest_is_copied() {
    let source = Source::new("restless", "CREATE TABLE t (id int); CREATE TABLE calm (id int); INSERT INTO calm VALUES (1); CREATE PUBLICATION p FOR TABLE t, calm").await;
    let tables = source.published().await;
    let session = source.another().await;
    let alters = tokio::spawn(async move {
        loop {
            session.batch_execute("ALTER TABLE t ADD b int").await.unwrap();
            session.batch_execute("ALTER TABLE t DROP b").await.unwrap();
        }
    });
    let wave = take(&source.config, &tables, &options()).await.unwrap();
    alters.abort();
    assert_eq!(wave.skipped.len(), 1);
    assert_eq!(wave.skipped[0].1.code(), "copy.changed");
    assert_eq!(copy(&wave, "calm").await.unwrap(), ["1"]);
}

#[tokio::test]
async fn who_holds_a_table_exclusively_is_named_and_the_other_tables_are_copied() {
    let source = Source::new(
        "held",
        "CREATE TABLE t (id int); CREATE TABLE free (id int); CREATE PUBLICATION p FOR TABLE t, free",
    )
    .await;
    let tables = source.published().await;
    let mut wave = Wave::begin(&source.config, &options()).await.unwrap();
    source.run("BEGIN; LOCK TABLE t IN ACCESS EXCLUSIVE MODE").await;
    let pid = source.sql.query_one("SELECT pg_backend_pid()", &[]).await.unwrap().get::<_, i32>(0);
    assert!(wave.examine(&tables).await.unwrap().is_empty());
    let (_, error) = &wave.skipped[0];
    assert_eq!((error.code(), error.is_transient()), ("copy.lock", true));
    assert!(error.message().contains(&format!("pid {pid} of postgres")), "{error}");
    assert_eq!(copy(&wave, "free").await.unwrap(), [""; 0]);
    source.run("ROLLBACK").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_copy_gives_way_to_who_waits_for_its_lock() {
    let setup = "CREATE TABLE t (a text); INSERT INTO t SELECT repeat('x', 1000) FROM generate_series(1, 20000); CREATE PUBLICATION p FOR TABLE t";
    let source = Source::new("gives_way", setup).await;
    let wave = source.take().await;
    let (sink, mut rows) = mpsc::channel(1);
    let (oid, session) = (oid(&wave, "t"), source.another().await);
    let copied = async {
        let copied = wave.copy_table(oid, &sink).await;
        drop(sink);
        copied
    };
    let altered = async {
        // The copy is under way, and nobody takes the rest.
        rows.recv().await.unwrap();
        session.batch_execute("ALTER TABLE t ADD b int").await.unwrap();
    };
    let (copied, ()) = tokio::join!(copied, altered);
    let error = copied.unwrap_err();
    assert_eq!((error.code(), error.is_transient()), ("copy.gave-way", true));
    assert!(error.message().contains("pid "), "{error}");
}

#[tokio::test]
async fn row_security_that_hides_rows_is_refused_by_name() {
    let setup = "CREATE TABLE t (id int); CREATE TABLE free (id int); INSERT INTO free VALUES (1); CREATE PUBLICATION p FOR TABLE t, free;
        DROP ROLE IF EXISTS restricted; CREATE ROLE restricted LOGIN REPLICATION; GRANT SELECT ON ALL TABLES IN SCHEMA public TO restricted;
        ALTER TABLE t ENABLE ROW LEVEL SECURITY; CREATE POLICY beyond_one ON t USING (id > 1)";
    let mut source = Source::new("row_security", setup).await;
    let url = source._cluster.url_as("restricted", None, "row_security");
    source.config = SourceConfig::parse(&url, "p", "row_security").unwrap();
    let wave = source.take().await;
    assert_eq!(wave.skipped.len(), 1);
    assert_eq!(wave.skipped[0].1.code(), "copy.row-security");
    assert!(wave.skipped[0].1.message().contains("public.t"));
    assert_eq!(copy(&wave, "free").await.unwrap(), ["1"]);
    drop(wave);
    source.run("REVOKE SELECT ON free FROM restricted").await;
    let wave = source.take().await;
    let codes: Vec<&str> = wave.skipped.iter().map(|(_, error)| error.code()).collect();
    assert_eq!(codes.len(), 2);
    assert!(codes.contains(&"source.privilege"), "{codes:?}");
    drop(wave);
    source.run("DROP OWNED BY restricted; DROP ROLE restricted").await;
}

#[tokio::test]
async fn a_table_that_left_the_publication_is_skipped() {
    let source = Source::new("has_left", "CREATE TABLE t (id int); CREATE PUBLICATION p FOR TABLE t").await;
    let tables = source.published().await;
    source.run("ALTER PUBLICATION p DROP TABLE t").await;
    let wave = take(&source.config, &tables, &options()).await.unwrap();
    assert_eq!(wave.skipped[0].1.code(), "copy.not-published");
}

#[tokio::test(flavor = "multi_thread")]
async fn more_tables_than_connections_are_copied_side_by_side_from_one_snapshot() {
    let mut setup = String::new();
    for n in 0..12 {
        setup += &format!(
            "CREATE TABLE t{n} (id int PRIMARY KEY, a text); INSERT INTO t{n} SELECT i, repeat('y', 200) FROM generate_series(1, {}) i;",
            n * 500
        );
    }
    let source = Source::new("many", &(setup + "ANALYZE; CREATE PUBLICATION p FOR ALL TABLES")).await;
    let wave = Arc::new(
        take(&source.config, &source.published().await, &WaveOptions { connections: 3, ..options() }).await.unwrap(),
    );
    source.run("DELETE FROM t3; DELETE FROM t11").await;
    let copies = (0..12).map(|n| {
        let wave = wave.clone();
        tokio::spawn(async move { copy(&wave, &format!("t{n}")).await.unwrap().len() })
    });
    for (n, copy) in copies.collect::<Vec<_>>().into_iter().enumerate() {
        assert_eq!(copy.await.unwrap(), n * 500);
    }
    assert!(wave.idle.lock().unwrap().len() <= 3);
    let t11 = wave.tables.iter().find(|table| table.table.name.name == "t11").unwrap();
    assert_eq!(t11.estimated_rows, Some(5500));
    assert_eq!(t11.progress.get().0, 5500);
}

#[tokio::test]
async fn a_copy_whose_rows_nobody_takes_ends_and_so_does_one_whose_snapshot_is_lost() {
    let source =
        Source::new("ends", "CREATE TABLE t (id int); INSERT INTO t VALUES (1); CREATE PUBLICATION p FOR TABLE t")
            .await;
    let wave = source.take().await;
    let (sink, rows) = mpsc::channel(1);
    drop(rows);
    assert_eq!(wave.copy_table(oid(&wave, "t"), &sink).await.unwrap_err().code(), "copy.stopped");
    let kill = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()";
    source.number(kill).await;
    while source.number("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND backend_type = 'client backend'").await > 1 {}
    let error = copy(&wave, "t").await.unwrap_err();
    assert_eq!((error.code(), error.is_transient()), ("copy.snapshot-lost", true), "{error}");
}
