use std::collections::BTreeSet;
use std::sync::atomic::AtomicBool;
use std::sync::{LazyLock, Weak};

use tokio::sync::mpsc;

use super::*;
use crate::copy::stretches::{Look, Reading, Stretch};
use crate::position::SnapshotId;
use crate::schema::table::{Origin, TableName};
use crate::scratch::{Cluster, ClusterOptions};
use crate::source::catalog::published_tables;
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

    async fn take(&self) -> Arc<Wave> {
        self.take_with(&options()).await
    }

    async fn take_with(&self, options: &WaveOptions) -> Arc<Wave> {
        Arc::new(take(&self.config, &self.published().await, options).await.unwrap())
    }

    /// A wave whose tables are cut into ranges of so many bytes.
    async fn take_cut(&self, bytes: u64) -> Arc<Wave> {
        let mut wave = take(&self.config, &self.published().await, &options()).await.unwrap();
        for table in &mut wave.tables {
            table.ranges = ranges::cut_to(&table.parts, bytes).into();
        }
        Arc::new(wave)
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

fn table<'a>(wave: &'a Wave, name: &str) -> &'a WaveTable {
    let table = wave.tables.iter().find(|table| table.table.name == TableName::new("public", name));
    table.unwrap_or_else(|| panic!("{name} is not in {wave:?}"))
}

/// Sends what one connection copies.
struct Lines {
    to: mpsc::Sender<Vec<u8>>,
    lines: Vec<u8>,
    source_bytes: Arc<AtomicU64>,
}

impl RowSink for Lines {
    fn push(&mut self, line: &[u8]) -> Result<bool> {
        assert_eq!(line.last(), Some(&b'\n'), "whole lines");
        self.lines.extend_from_slice(line);
        Ok(self.lines.len() > 10_000)
    }

    async fn hand_over(&mut self, source_bytes: u64) -> Result<()> {
        self.source_bytes.fetch_add(source_bytes, Ordering::Relaxed);
        let lines = std::mem::take(&mut self.lines);
        self.to.send(lines).await.map_err(|_| Error::transient("test.gone", "nobody takes lines"))
    }
}

/// The lines of a table's copy.
async fn copy(wave: &Arc<Wave>, name: &str) -> Result<Vec<String>> {
    let (to, mut rows) = mpsc::channel(2);
    let table = table(wave, name);
    let source_bytes: Arc<AtomicU64> = Arc::default();
    let copy = async {
        let to = to;
        let sink = || Lines { to: to.clone(), lines: Vec::new(), source_bytes: source_bytes.clone() };
        wave.copy_table(table, sink).await
    };
    let collect = async {
        let mut bytes = Vec::new();
        while let Some(lines) = rows.recv().await {
            bytes.extend_from_slice(&lines);
        }
        String::from_utf8(bytes).unwrap()
    };
    let (done, text) = tokio::join!(copy, collect);
    let lines: Vec<String> = text.lines().map(str::to_owned).collect();
    let done = done?;
    assert_eq!((done.rows, done.bytes), (lines.len() as u64, text.len() as u64));
    assert_eq!(source_bytes.load(Ordering::Relaxed), table.source_bytes, "all of {name} was read");
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
    // The walsender of the stream may take a moment to let go.
    let started = Instant::now();
    while let Err(error) = replication.drop_slot("visibility").await {
        assert!(error.code() == "slot.in-use" && started.elapsed() < Duration::from_secs(30), "{error}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
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
    let wave = Arc::new(take(&source.config, &tables, &options()).await.unwrap());
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
    assert_eq!(copy(&Arc::new(wave), "free").await.unwrap(), [""; 0]);
    source.run("ROLLBACK").await;
}

#[tokio::test]
async fn a_locked_table_with_a_row_filter_is_left_out_alone() {
    let setup =
        "CREATE TABLE t (id int PRIMARY KEY); CREATE TABLE free (id int PRIMARY KEY); INSERT INTO free VALUES (1);
        CREATE PUBLICATION p FOR TABLE t WHERE (id > 3), free WHERE (id > 0)";
    let source = Source::new("held_filtered", setup).await;
    let holder = source.another().await;
    // The slot would wait for it.
    let mut wave = Wave::begin(&source.config, &options()).await.unwrap();
    holder.batch_execute("BEGIN; LOCK TABLE t IN ACCESS EXCLUSIVE MODE").await.unwrap();
    let began = Instant::now();
    // The list of what is published does not wait for it, either.
    let changed = wave.examine(&source.published().await).await.unwrap();
    assert!(changed.is_empty(), "{changed:?}");
    let wave = Arc::new(wave);
    assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
    let skipped: Vec<&str> = wave.skipped.iter().map(|(_, error)| error.code()).collect();
    assert_eq!(skipped, ["copy.lock"]);
    assert_eq!(copy(&wave, "free").await.unwrap(), ["1"]);
    holder.batch_execute("ROLLBACK").await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_copy_gives_way_to_who_waits_for_its_lock() {
    // A range is more than the buffers between the two ends hold: it is under way until
    // somebody takes it.
    let setup = "CREATE TABLE t (a text); INSERT INTO t SELECT repeat('x', 1000) FROM generate_series(1, 120000); CREATE PUBLICATION p FOR TABLE t";
    let source = Source::new("gives_way", setup).await;
    let wave = source.take_cut(24 << 20).await;
    let (to, mut rows) = mpsc::channel(1);
    let session = source.another().await;
    let copied = async {
        let to = to;
        let sink = || Lines { to: to.clone(), lines: Vec::new(), source_bytes: Arc::default() };
        wave.copy_table(table(&wave, "t"), sink).await
    };
    let altered = async {
        // The copy is under way, with all its connections, and nobody takes the rest.
        rows.recv().await.unwrap();
        let locks = "SELECT count(*) FROM pg_locks WHERE relation = 't'::regclass";
        while source.number(locks).await < options().connections.count as i64 {}
        session.batch_execute("ALTER TABLE t ADD b int").await.unwrap();
        std::future::pending().await
    };
    // A copy that ends before is an answer as well.
    let copied = tokio::select! {
        copied = copied => copied,
        () = altered => unreachable!(),
    };
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
    let wave = source.take_with(&WaveOptions { connections: Connections::new(3), ..options() }).await;
    source.run("DELETE FROM t3; DELETE FROM t11").await;
    let copies = (0..12).map(|n| {
        let wave = wave.clone();
        tokio::spawn(async move { copy(&wave, &format!("t{n}")).await.unwrap().len() })
    });
    for (n, copy) in copies.collect::<Vec<_>>().into_iter().enumerate() {
        assert_eq!(copy.await.unwrap(), n * 500);
    }
    assert!(wave.idle.lock().unwrap().len() <= 3);
    assert_eq!(wave.tables[0].table.name.name, "t11", "biggest first");
    assert_eq!((wave.tables[0].estimated_rows, wave.tables[0].progress.get().0), (5500, 5500));
}

#[tokio::test]
async fn a_copy_whose_rows_nobody_takes_ends_and_so_does_one_whose_snapshot_is_lost() {
    let source =
        Source::new("ends", "CREATE TABLE t (id int); INSERT INTO t VALUES (1); CREATE PUBLICATION p FOR TABLE t")
            .await;
    let wave = source.take().await;
    let (to, rows) = mpsc::channel(1);
    drop(rows);
    let sink = || Lines { to: to.clone(), lines: Vec::new(), source_bytes: Arc::default() };
    assert_eq!(wave.copy_table(table(&wave, "t"), sink).await.unwrap_err().code(), "test.gone");
    let kill = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()";
    source.number(kill).await;
    while source.number("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND backend_type = 'client backend'").await > 1 {}
    let error = copy(&wave, "t").await.unwrap_err();
    assert_eq!((error.code(), error.is_transient()), ("copy.snapshot-lost", true), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn many_ranges_have_each_row_of_the_snapshot_once_whatever_moves_meanwhile() {
    let setup = "CREATE TABLE t (id int PRIMARY KEY, n int, big text);
        ALTER TABLE t ALTER big SET STORAGE EXTERNAL;
        INSERT INTO t SELECT i, 0, repeat(md5(i::text), CASE WHEN i % 100 = 0 THEN 200 ELSE 3 END) FROM generate_series(1, 20000) i;
        DELETE FROM t WHERE id BETWEEN 5000 AND 12000; CREATE PUBLICATION p FOR TABLE t";
    let source = Source::new("many_ranges", setup).await;
    source.run("VACUUM t").await;
    let expected = source.sql.query("SELECT concat_ws(E'\\t', id, n, big) FROM t", &[]).await.unwrap();
    let expected: Vec<String> = expected.iter().map(|row| row.get(0)).collect();
    let wave = source.take_cut(64 << 10).await;
    assert!(table(&wave, "t").ranges.len() > 30, "{:?}", table(&wave, "t").ranges.len());
    // Rows move to pages of other ranges and beyond the last, and their old places are free.
    let burst = "UPDATE t SET n = n + 1 WHERE id % 3 = 0; UPDATE t SET big = repeat('y', 9000) WHERE id % 200 = 0;
        DELETE FROM t WHERE id % 7 = 0; INSERT INTO t SELECT i, 9, 'grown' FROM generate_series(20001, 30000) i";
    source.run(burst).await;
    source.run("VACUUM t").await;
    let session = source.another().await;
    let load = tokio::spawn(async move {
        loop {
            session.batch_execute("UPDATE t SET n = n + 1, id = -id WHERE id % 11 = 0").await.unwrap();
        }
    });
    let copied = copy(&wave, "t").await.unwrap();
    load.abort();
    assert!(sorted(copied) == sorted(expected));
    assert!(source.number("SELECT count(*) FROM t").await > 20_000, "the table has grown");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_root_with_a_filter_is_copied_by_ranges_of_its_leaves() {
    let setup =
        "CREATE TABLE root (id int, a text, twice int GENERATED ALWAYS AS (id * 2) STORED) PARTITION BY RANGE (id);
        CREATE TABLE big PARTITION OF root FOR VALUES FROM (0) TO (20000);
        CREATE TABLE small PARTITION OF root FOR VALUES FROM (20000) TO (20010);
        CREATE TABLE empty PARTITION OF root FOR VALUES FROM (20010) TO (20020);
        INSERT INTO root SELECT i, repeat('a', 100) FROM generate_series(0, 20009) i;
        CREATE PUBLICATION p FOR TABLE root (id) WHERE (id % 10 = 0) WITH (publish_via_partition_root)";
    let source = Source::new("root_ranges", setup).await;
    let wave = source.take_cut(256 << 10).await;
    let root = table(&wave, "root");
    assert!(root.ranges.len() > 8 && root.ranges.last().unwrap().len() == 2, "{:?}", root.ranges);
    let expected: Vec<String> = (0..=2000).map(|n| (n * 10).to_string()).collect();
    assert!(sorted(copy(&wave, "root").await.unwrap()) == sorted(expected));
}

/// Waits at its first rows until so many have come.
struct Meets {
    all: Arc<tokio::sync::Barrier>,
    met: bool,
}

impl RowSink for Meets {
    fn push(&mut self, _: &[u8]) -> Result<bool> {
        Ok(!self.met)
    }

    async fn hand_over(&mut self, _: u64) -> Result<()> {
        if !std::mem::replace(&mut self.met, true) {
            self.all.wait().await;
        }
        Ok(())
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn one_table_is_copied_by_as_many_connections_as_it_may_have() {
    let setup = "CREATE TABLE t (a text); INSERT INTO t SELECT repeat('x', 1000) FROM generate_series(1, 5000); CREATE PUBLICATION p FOR TABLE t";
    let source = Source::new("all_connections", setup).await;
    for (connections, connections_per_table, expected) in [(3, 3, 3), (4, 2, 2), (2, 4, 2)] {
        let connections = Connections::new(connections);
        let options = WaveOptions { connections, connections_per_table, ..options() };
        let mut wave = take(&source.config, &source.published().await, &options).await.unwrap();
        wave.tables[0].ranges = ranges::cut_to(&wave.tables[0].parts, 256 << 10).into();
        let wave = Arc::new(wave);
        let (all, sinks) = (Arc::new(tokio::sync::Barrier::new(expected)), AtomicU64::new(0));
        let sink = || {
            sinks.fetch_add(1, Ordering::Relaxed);
            Meets { all: all.clone(), met: false }
        };
        let copied = wave.copy_table(&wave.tables[0], sink);
        let done = tokio::time::timeout(Duration::from_secs(60), copied).await.expect("they meet").unwrap();
        assert_eq!((done.rows, sinks.into_inner()), (5000, expected as u64));
    }
}

/// Refuses the rows of a table somewhere in the middle.
struct Refuses(u32);

impl RowSink for Refuses {
    fn push(&mut self, _: &[u8]) -> Result<bool> {
        self.0 += 1;
        if self.0 > 2000 { Err(Error::permanent("test.refused", "no more")) } else { Ok(false) }
    }

    async fn hand_over(&mut self, _: u64) -> Result<()> {
        Ok(())
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_range_that_fails_ends_its_table_and_no_other() {
    let setup = "CREATE TABLE t (a text); INSERT INTO t SELECT repeat('x', 1000) FROM generate_series(1, 20000);
        CREATE TABLE other (id int, a text); INSERT INTO other SELECT i, repeat('y', 500) FROM generate_series(1, 9000) i;
        CREATE PUBLICATION p FOR TABLE t, other";
    let source = Source::new("one_fails", setup).await;
    let wave = source.take_cut(1 << 20).await;
    let (failed, copied) = tokio::join!(wave.copy_table(table(&wave, "t"), || Refuses(0)), copy(&wave, "other"));
    assert_eq!(failed.unwrap_err().code(), "test.refused");
    assert_eq!(copied.unwrap().len(), 9000);
    // All that copied it have let go of it.
    while source.number("SELECT count(*) FROM pg_locks WHERE relation = 't'::regclass").await > 0 {}
    assert_eq!(copy(&wave, "t").await.unwrap().len(), 20_000, "and the wave goes on");
}

#[tokio::test]
async fn partitions_that_no_log_follows_are_refused_by_name() {
    let setup = "CREATE FOREIGN DATA WRAPPER nothing; CREATE SERVER nowhere FOREIGN DATA WRAPPER nothing;
        CREATE TABLE far (id int) PARTITION BY LIST (id); CREATE TABLE near PARTITION OF far FOR VALUES IN (1);
        CREATE FOREIGN TABLE away PARTITION OF far FOR VALUES IN (2) SERVER nowhere;
        CREATE TABLE kept (id int) PARTITION BY LIST (id);
        CREATE UNLOGGED TABLE forgotten PARTITION OF kept FOR VALUES IN (1);
        CREATE TABLE was (id int); CREATE TABLE plain (id int); INSERT INTO plain VALUES (1);
        CREATE PUBLICATION p FOR ALL TABLES WITH (publish_via_partition_root)";
    let source = Source::new("no_log", setup).await;
    let tables = source.published().await;
    source.run("ALTER TABLE was SET UNLOGGED").await;
    let wave = Arc::new(take(&source.config, &tables, &options()).await.unwrap());
    assert_eq!(copy(&wave, "plain").await.unwrap(), ["1"]);
    let mut refused: Vec<String> =
        wave.skipped.iter().map(|(_, error)| format!("{}: {}", error.code(), error.message())).collect();
    refused.sort();
    let expected = [
        "copy.foreign: partition public.away of table public.far is a foreign table",
        "copy.unlogged: partition public.forgotten of table public.kept is unlogged",
        "copy.unlogged: table public.was is unlogged",
    ];
    assert_eq!(refused.len(), expected.len(), "{refused:?}");
    for (refused, expected) in refused.iter().zip(expected) {
        assert!(refused.starts_with(expected), "{refused}");
    }
}

#[tokio::test]
async fn a_table_that_was_never_analysed_has_a_total_all_the_same() {
    let setup = "CREATE TABLE t (id int8, a int8); INSERT INTO t SELECT i, i FROM generate_series(1, 10000) i;
        CREATE TABLE empty (id int); CREATE PUBLICATION p FOR TABLE t, empty";
    let source = Source::new("never_analysed", setup).await;
    let wave = source.take().await;
    let t = table(&wave, "t");
    assert!((8_000..12_500).contains(&t.estimated_rows), "{}", t.estimated_rows);
    assert!((300_000..800_000).contains(&t.source_bytes), "{}", t.source_bytes);
    assert_eq!((table(&wave, "empty").estimated_rows, table(&wave, "empty").source_bytes), (0, 0));
}

#[tokio::test]
async fn a_hundred_tables_are_looked_at_in_a_handful_of_statements() {
    let mut setup = String::new();
    for n in 0..100 {
        setup += &format!("CREATE TABLE t{n} (id int PRIMARY KEY); INSERT INTO t{n} VALUES ({n});");
    }
    let source = Source::new("hundred", &(setup + "CREATE PUBLICATION p FOR ALL TABLES")).await;
    let tables = source.published().await;
    let looks = "ALTER DATABASE hundred SET log_statement = 'all'";
    source.run(looks).await;
    let statements = || source._cluster.log().matches(" tidegate/hundred LOG:  ").count();
    let before = statements();
    let wave = Arc::new(take(&source.config, &tables, &options()).await.unwrap());
    assert_eq!(wave.tables.len(), 100);
    assert!(statements() - before < 40, "{}", statements() - before);
    assert_eq!(copy(&wave, "t77").await.unwrap(), ["77"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_table_that_waits_for_a_connection_is_not_locked() {
    let setup = "CREATE TABLE t (a text); INSERT INTO t VALUES ('x'), ('x'); CREATE TABLE u (a text); CREATE PUBLICATION p FOR TABLE t, u";
    let source = Source::new("not_locked", setup).await;
    let wave = source.take_with(&WaveOptions { connections: Connections::new(1), ..options() }).await;
    let all = Arc::new(tokio::sync::Barrier::new(2));
    let first = tokio::spawn({
        let (wave, all) = (wave.clone(), all.clone());
        async move { wave.copy_table(table(&wave, "t"), || Meets { all: all.clone(), met: false }).await }
    });
    let locks = |name: &str| format!("SELECT count(*) FROM pg_locks WHERE relation = '{name}'::regclass");
    while source.number(&locks("t")).await == 0 {}
    let second = tokio::spawn({
        let wave = wave.clone();
        async move { copy(&wave, "u").await }
    });
    while !wave.is_waited_for() {
        tokio::task::yield_now().await;
    }
    assert_eq!(source.number(&locks("u")).await, 0);
    source.run("ALTER TABLE u ADD b int").await;
    all.wait().await;
    assert_eq!(first.await.unwrap().unwrap().rows, 2);
    assert_eq!(second.await.unwrap().unwrap_err().code(), "copy.changed");
}

/// Rows by what they were read of, and the readings that ended.
#[derive(Default)]
struct Stretched {
    rows: Vec<(Reading, String)>,
    ended: Vec<Reading>,
}

/// Notes what one connection copies by stretches.
struct Notes {
    all: Arc<Mutex<Stretched>>,
    reading: Option<Reading>,
}

impl RowSink for Notes {
    fn push(&mut self, line: &[u8]) -> Result<bool> {
        let key = std::str::from_utf8(line).unwrap().split('\t').next().unwrap().trim_end().to_owned();
        self.all.lock().unwrap().rows.push((self.reading.expect("rows come in a stretch"), key));
        Ok(false)
    }

    async fn hand_over(&mut self, source_bytes: u64) -> Result<()> {
        let look = self.reading.map(|reading| reading.look);
        assert!(source_bytes == 0 || look == Some(Look::All), "what was counted is not counted again");
        Ok(())
    }

    async fn stretch_begins(&mut self, reading: Reading) -> Result<()> {
        assert_eq!(self.reading.replace(reading), None);
        Ok(())
    }

    async fn stretch_ends(&mut self, reading: Reading) -> Result<()> {
        assert_eq!(self.reading.take(), Some(reading));
        self.all.lock().unwrap().ended.push(reading);
        Ok(())
    }
}

/// The keys that each reading finds, in order.
async fn read(wave: &Arc<Wave>, stretches: &[Stretch], readings: &[Reading]) -> Vec<(Reading, String)> {
    let all: Arc<Mutex<Stretched>> = Arc::default();
    let wanted = wave.tables[0].by_stretches(stretches, readings).unwrap();
    let done = wave.copy_table(&wanted, || Notes { all: all.clone(), reading: None }).await.unwrap();
    let mut found = std::mem::take(&mut *all.lock().unwrap());
    assert_eq!(done.rows, found.rows.len() as u64);
    found.ended.sort_unstable();
    assert_eq!(found.ended, readings);
    found.rows.sort_unstable();
    found.rows
}

fn looks(count: usize, look: Look) -> Vec<Reading> {
    (0..count).map(|number| Reading { number, look }).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_table_is_read_by_the_stretches_that_are_wanted_each_row_in_one_of_them() {
    let setup = "CREATE TABLE t (id text PRIMARY KEY, a int);
        INSERT INTO t SELECT md5(i::text), i FROM generate_series(1, 20000) i;
        CREATE PUBLICATION p FOR TABLE t WHERE (a % 2 = 0)";
    let source = Source::new("by_stretches", setup).await;
    let wave = source.take().await;
    let stretches = wave.stretches(&wave.tables[0], 1).unwrap();
    assert_eq!(stretches.len(), 32, "eight for each connection");
    assert_eq!(wave.stretches(&wave.tables[0], u64::MAX).unwrap().len(), 1, "of 32 megabytes at least");
    // What is beyond the end is in the last one.
    source.run("INSERT INTO t SELECT md5(i::text), i FROM generate_series(20001, 22000) i").await;
    let wave = source.take().await;
    let all = read(&wave, &stretches, &looks(32, Look::All)).await;
    let mut keys: Vec<&str> = all.iter().map(|(_, key)| key.as_str()).collect();
    keys.sort_unstable();
    let expected = source.sql.query("SELECT id FROM t WHERE a % 2 = 0 ORDER BY id COLLATE \"C\"", &[]).await.unwrap();
    let expected: Vec<&str> = expected.iter().map(|row| row.get(0)).collect();
    assert!(keys == expected, "{} rows, not {}", keys.len(), expected.len());
    let some = [0, 7, 31].map(|number| Reading { number, look: Look::All });
    let of_some: Vec<_> = all.into_iter().filter(|(reading, _)| some.contains(reading)).collect();
    assert!(read(&wave, &stretches, &some).await == of_some);
    assert_eq!(read(&wave, &stretches, &[]).await, []);
    let strange = Stretch { leaf: 1, ..stretches[0] };
    assert!(wave.tables[0].by_stretches(&[strange], &looks(1, Look::All)).is_none());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_look_finds_what_moved_between_partitions_and_stretches_and_nothing_old() {
    let setup = "CREATE TABLE t (id int, a text) PARTITION BY RANGE (id);
        CREATE TABLE low PARTITION OF t FOR VALUES FROM (0) TO (5000);
        CREATE TABLE high PARTITION OF t FOR VALUES FROM (5000) TO (1000000);
        ALTER TABLE t ADD PRIMARY KEY (id);
        INSERT INTO t SELECT i, repeat('x', 100) FROM generate_series(1, 9999) i;
        CREATE PUBLICATION p FOR TABLE t WITH (publish_via_partition_root)";
    let source = Source::new("second_look", setup).await;
    let wave = source.take().await;
    let (base, stretches) = (wave.base(), wave.stretches(&wave.tables[0], 1).unwrap());
    drop(wave);
    source.run("UPDATE t SET a = 'newer' WHERE id % 1000 = 0; UPDATE t SET id = 10499 WHERE id = 4999").await;
    source.run("DELETE FROM t WHERE id % 1000 = 1; INSERT INTO t SELECT 3001, 'back'").await;
    source.run("VACUUM (FREEZE) t").await;
    let wave = source.take().await;
    let found = read(&wave, &stretches, &looks(stretches.len(), Look::Newer(base))).await;
    let mut found: Vec<&str> = found.iter().map(|(_, key)| key.as_str()).collect();
    found.sort_unstable();
    assert_eq!(found, ["1000", "10499", "2000", "3000", "3001", "4000", "5000", "6000", "7000", "8000", "9000"]);
    let nothing = read(&wave, &stretches, &looks(stretches.len(), Look::Newer(wave.base()))).await;
    assert_eq!(nothing, []);
}

#[tokio::test]
async fn what_is_no_heap_or_has_no_pages_at_all_has_no_stretches() {
    let setup = "CREATE TABLE t (id int PRIMARY KEY); CREATE PUBLICATION p FOR TABLE t";
    let source = Source::new("no_stretches", setup).await;
    let wave = source.take().await;
    let table = &wave.tables[0];
    assert_eq!(wave.stretches(table, 1).unwrap().len(), 1, "an empty table may be filled meanwhile");
    let other: Vec<ranges::Part> =
        table.parts.iter().map(|part| ranges::Part { by_page: false, ..part.clone() }).collect();
    assert_eq!(wave.stretches(&WaveTable { parts: other.into(), ..table.clone() }, 1), None);
    assert_eq!(wave.stretches(&WaveTable { parts: Vec::new().into(), ..table.clone() }, 1), None);
}
