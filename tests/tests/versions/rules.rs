//! What the host relies on at the source, tried where it may differ: rules P1 and P13 to
//! P18, and what a check has to see.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tidegate::copy::snapshot::take;
use tidegate::copy::{Look, Reading, RowSink, Wave, WaveOptions, WaveTable};
use tidegate::error::Result;
use tidegate::position::{Lsn, Position, row_ordinal};
use tidegate::source::catalog::{TriggerState, check_source, published_tables};
use tidegate::source::pgoutput::{self, Cell, Message};
use tidegate::source::replication::SlotKind;
use tidegate::source::session::connect;
use tidegate::source::{ReplicationConnection, Session, SourceConfig, WalMessage, trigger};
use tidegate_tests::{Database, database};

use crate::servers::Servers;

/// How long a slot may wait for what other tests have open at the same server.
const SLOT_WAIT: Duration = Duration::from_secs(60);

/// A database, a session in it, and publication `p`.
struct Source {
    database: Database,
    config: SourceConfig,
    sql: Session,
}

impl Source {
    async fn new(servers: &Servers, test: &str, setup: &str) -> Source {
        let database = database(&servers.source, test);
        database.sql(setup);
        let config = SourceConfig::parse(&database.url, "p", &database.name).unwrap();
        let sql = connect(&config).await.unwrap();
        sql.batch_execute("SET search_path = public").await.unwrap();
        Source { database, config, sql }
    }

    async fn run(&self, sql: &str) {
        self.sql.batch_execute(sql).await.unwrap();
    }

    async fn another(&self) -> Session {
        let session = connect(&self.config).await.unwrap();
        session.batch_execute("SET search_path = public").await.unwrap();
        session
    }

    async fn number(&self, sql: &str) -> i64 {
        self.sql.query_one(sql, &[]).await.unwrap().get(0)
    }

    async fn take(&self, options: &WaveOptions) -> Result<Arc<Wave>> {
        let tables = published_tables(&self.sql, "p").await.unwrap();
        take(&self.config, &tables, options).await.map(Arc::new)
    }

    /// Makes a permanent slot and returns where it begins.
    async fn slot(&self) -> Lsn {
        let mut connection = ReplicationConnection::connect(&self.config).await.unwrap();
        let slot = connection.create_slot(&self.config.slot, SlotKind::Permanent, SLOT_WAIT).await.unwrap();
        slot.consistent_point
    }

    /// Row changes from `from` on, each with its position and the first cell of its new
    /// row; up to the insert of `last`.
    async fn rows(&self, from: Lsn, last: &str) -> Vec<(Position, String)> {
        let connection = ReplicationConnection::connect(&self.config).await.unwrap();
        let (mut reader, feedback) = connection.start(&self.config.slot, from, "p").await.unwrap();
        let mut rows = Vec::new();
        let (mut commit, mut before, mut index) = (Lsn::ZERO, (Lsn::ZERO, 0), 0);
        loop {
            let WalMessage::Data(data) = reader.next().await.unwrap() else { continue };
            let (oid, cell) = match pgoutput::decode(&data.body).unwrap() {
                Message::Begin(begin) => {
                    commit = begin.final_lsn;
                    continue;
                }
                Message::Insert { oid, new } | Message::Update { oid, new, .. } => {
                    let Cell::Text(text) = new.cells().next().unwrap().unwrap() else { panic!("no text") };
                    (oid, String::from_utf8(text.to_vec()).unwrap())
                }
                Message::Delete { oid, .. } => (oid, "deleted".to_owned()),
                _ => continue,
            };
            index = if before == (data.start, oid) { index + 1 } else { 0 };
            before = (data.start, oid);
            let at_the_end = cell == last;
            rows.push((Position { epoch: 0, commit, ordinal: row_ordinal(data.start, index) }, cell));
            if at_the_end {
                drop(feedback);
                reader.close().await;
                return rows;
            }
        }
    }
}

fn options() -> WaveOptions {
    WaveOptions { lock_timeout: Duration::from_millis(500), slot_timeout: SLOT_WAIT, ..WaveOptions::default() }
}

/// Keeps the lines that connections copy.
struct Lines(Arc<Mutex<Vec<u8>>>);

impl RowSink for Lines {
    fn push(&mut self, line: &[u8]) -> Result<bool> {
        self.0.lock().unwrap().extend_from_slice(line);
        Ok(false)
    }

    async fn hand_over(&mut self, _: u64) -> Result<()> {
        Ok(())
    }
}

/// What is copied of a table.
async fn lines(wave: &Arc<Wave>, table: &WaveTable) -> Result<Vec<String>> {
    let lines: Arc<Mutex<Vec<u8>>> = Arc::default();
    wave.copy_table(table, || Lines(lines.clone())).await?;
    let text = String::from_utf8(std::mem::take(&mut *lines.lock().unwrap())).unwrap();
    Ok(text.lines().map(str::to_owned).collect())
}

/// The first column of what is copied of the wave's only table.
async fn copied(wave: &Arc<Wave>) -> Result<Vec<String>> {
    let lines = lines(wave, &wave.tables[0]).await?;
    Ok(lines.iter().map(|line| line.split('\t').next().unwrap().to_owned()).collect())
}

/// P1: monotone, the same read whole and read again from the middle with a cold relation
/// cache, several rows of one record told apart.
pub async fn positions(servers: &'static Servers) {
    let source = Source::new(
        servers,
        "positions",
        "CREATE TABLE t (id int PRIMARY KEY, v text); CREATE TABLE u (id int PRIMARY KEY, v text);
         CREATE TABLE root (id int, v text) PARTITION BY RANGE (id);
         CREATE TABLE leaf PARTITION OF root FOR VALUES FROM (0) TO (1000000);
         CREATE PUBLICATION p FOR TABLE t, u, root WITH (publish_via_partition_root = true)",
    )
    .await;
    let begin = source.slot().await;
    let program = |table: &str, from: u32| format!("COPY {table}(id) FROM PROGRAM 'seq {from} {}'", from + 196);
    source
        .run(&format!("BEGIN; INSERT INTO t VALUES (1, 'a'); {}; {}; COMMIT", program("t", 100), program("root", 100)))
        .await;
    let middle: String = source.sql.query_one("SELECT pg_current_wal_insert_lsn()::text", &[]).await.unwrap().get(0);
    source
        .run(&format!(
            "BEGIN; INSERT INTO u VALUES (1, 'a'); INSERT INTO t VALUES (2, 'a'); UPDATE t SET v = 'b' WHERE id < 150;
             SAVEPOINT s; {}; ROLLBACK TO s; {}; UPDATE u SET id = 2 WHERE id = 1; DELETE FROM t WHERE id < 110; INSERT INTO root VALUES (7, 'x'); COMMIT",
            program("u", 500),
            program("u", 800)
        ))
        .await;
    source.run("INSERT INTO t VALUES (777777, 'last')").await;
    let whole = source.rows(begin, "777777").await;
    assert_eq!(whole.len(), 1 + 197 + 197 + 1 + 1 + 52 + 197 + 1 + 12 + 1 + 1, "{whole:?}");
    // One relation in one record may come in any number of messages, but each row has a
    // place of its own, and they grow.
    for pair in whole.windows(2) {
        assert!(pair[0].0 < pair[1].0, "{pair:?}");
    }
    assert_eq!(source.rows(begin, "777777").await, whole);
    let again = source.rows(middle.parse().unwrap(), "777777").await;
    assert!(again.len() < whole.len() && again.len() > 200, "{}", again.len());
    assert_eq!(again[..], whole[whole.len() - again.len()..]);
}

/// P14, with prepared and sub-transactions among the writers.
pub async fn visibility(servers: &'static Servers) {
    let source = Source::new(
        servers,
        "visibility",
        "CREATE TABLE t (id bigserial PRIMARY KEY, a text); CREATE PUBLICATION p FOR TABLE t",
    )
    .await;
    let begin = source.slot().await;
    let stop = Arc::new(AtomicBool::new(false));
    let mut writers = Vec::new();
    for _ in 0..3 {
        let (session, stop) = (source.another().await, stop.clone());
        writers.push(tokio::spawn(async move {
            while !stop.load(Ordering::Relaxed) {
                let transaction = "BEGIN; INSERT INTO t (a) VALUES ('a'); SAVEPOINT s; INSERT INTO t (a) VALUES ('b'); \
                    RELEASE s; SAVEPOINT s; INSERT INTO t (a) VALUES ('never'); ROLLBACK TO s; COMMIT";
                session.batch_execute(transaction).await.unwrap();
            }
        }));
    }
    let mut copies = Vec::new();
    for _ in 0..3 {
        let wave = source.take(&options()).await.unwrap();
        copies.push((wave.floor, copied(&wave).await.unwrap()));
    }
    stop.store(true, Ordering::Relaxed);
    for writer in writers {
        writer.await.unwrap();
    }
    let last = source.number("INSERT INTO t (a) VALUES ('last') RETURNING id").await.to_string();
    let rows = source.rows(begin, &last).await;
    let all: BTreeSet<String> = source.database.sql("SELECT id FROM t").lines().map(str::to_owned).collect();
    assert!(copies[2].1.len() > copies[0].1.len(), "rows were written meanwhile");
    for (floor, copied) in copies {
        let later = rows.iter().filter(|(position, _)| position.commit >= floor).map(|(_, id)| id.clone());
        let both: Vec<String> = copied.into_iter().chain(later).collect();
        let whole: BTreeSet<String> = both.iter().cloned().collect();
        assert_eq!(both.len(), whole.len(), "a row is in the copy and in the stream");
        assert!(whole == all, "a row is in neither");
    }
}

/// P19: of what a later snapshot shows and an earlier one did not, nothing is without an
/// `xmin` that tells, with sub-transactions and updates in place, frozen or not.
pub async fn second_look(servers: &'static Servers) {
    let source = Source::new(
        servers,
        "second_look",
        "CREATE TABLE t (id bigserial PRIMARY KEY, a text) WITH (fillfactor = 70, autovacuum_enabled = off);
         INSERT INTO t (a) SELECT 'old' FROM generate_series(1, 20000); CREATE PUBLICATION p FOR TABLE t",
    )
    .await;
    let (stop, written) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let mut writers = Vec::new();
    for writer in 0..3 {
        let (session, stop, written) = (source.another().await, stop.clone(), written.clone());
        writers.push(tokio::spawn(async move {
            while !stop.load(Ordering::Relaxed) {
                let n = written.fetch_add(1, Ordering::Relaxed);
                let (one, other) = (1 + (n * 97) % 5000 * 3 + writer, 1 + (n * 31) % 1000 * 3 + writer);
                let transaction = format!(
                    "BEGIN; UPDATE t SET a = 'top {n}' WHERE id = {one}; SAVEPOINT s; INSERT INTO t (a) VALUES ('sub {n}'); \
                     RELEASE s; SAVEPOINT s; UPDATE t SET a = 'never' WHERE id = {other}; ROLLBACK TO s; \
                     SAVEPOINT s; UPDATE t SET a = 'sub {n}' WHERE id = {other}; COMMIT"
                );
                session.batch_execute(&transaction).await.unwrap();
            }
        }));
    }
    let earlier = source.take(&options()).await.unwrap();
    let (base, stretches) = (earlier.base(), earlier.stretches(&earlier.tables[0], 1).unwrap());
    let before: BTreeSet<String> = lines(&earlier, &earlier.tables[0]).await.unwrap().into_iter().collect();
    drop(earlier);
    let enough = written.load(Ordering::Relaxed) + 200;
    while written.load(Ordering::Relaxed) < enough {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    stop.store(true, Ordering::Relaxed);
    for writer in writers {
        writer.await.unwrap();
    }
    let looks: Vec<Reading> = (0..stretches.len()).map(|number| Reading { number, look: Look::Newer(base) }).collect();
    for vacuum in ["", "VACUUM t", "VACUUM (FREEZE) t"] {
        source.run(vacuum).await;
        let later = source.take(&options()).await.unwrap();
        let all: BTreeSet<String> = lines(&later, &later.tables[0]).await.unwrap().into_iter().collect();
        let look = later.tables[0].by_stretches(&stretches, &looks).unwrap();
        let found: BTreeSet<String> = lines(&later, &look).await.unwrap().into_iter().collect();
        let missed: Vec<&String> = all.difference(&before).filter(|row| !found.contains(*row)).take(3).collect();
        assert!(missed.is_empty(), "{vacuum}: {missed:?}");
        assert!(
            found.is_subset(&all) && found.len() > 200 && found.len() < all.len() / 2,
            "{} of {}",
            found.len(),
            all.len()
        );
    }
}

/// P13, P15 and P16: who waits for whom.
pub async fn snapshots(servers: &'static Servers) {
    let source = Source::new(
        servers,
        "snapshots",
        "CREATE TABLE t (id int PRIMARY KEY); INSERT INTO t VALUES (1); CREATE PUBLICATION p",
    )
    .await;
    // Open since before the table joins, with a row that no slot of before would send.
    let (writer, elsewhere) = (source.another().await, database(&servers.source, "elsewhere"));
    writer.batch_execute("BEGIN; INSERT INTO t VALUES (2)").await.unwrap();
    let pid: i32 = writer.query_one("SELECT pg_backend_pid()", &[]).await.unwrap().get(0);
    source.run("ALTER PUBLICATION p ADD TABLE t").await;
    let brief = WaveOptions { slot_timeout: Duration::from_millis(300), ..options() };
    let error = source.take(&brief).await.unwrap_err();
    assert_eq!((error.code(), error.is_transient()), ("slot.blocked", true), "{}", error.report());
    assert!(error.message().contains(&format!("pid {pid} of postgres")), "{}", error.report());
    // A writer of another database is in the way as well.
    let config = SourceConfig::parse(&elsewhere.url, "p", "elsewhere").unwrap();
    let stranger = connect(&config).await.unwrap();
    stranger.batch_execute("BEGIN; CREATE TABLE public.other (id int)").await.unwrap();
    writer.batch_execute("COMMIT").await.unwrap();
    let error = source.take(&brief).await.unwrap_err();
    assert!(error.code() == "slot.blocked" && error.message().contains(&elsewhere.name), "{}", error.report());
    stranger.batch_execute("COMMIT").await.unwrap();

    let wave = source.take(&options()).await.unwrap();
    let own = "FROM pg_replication_slots WHERE database = current_database()";
    assert_eq!(source.number(&format!("SELECT count(*) {own}")).await, 0);
    assert_eq!(source.number("SELECT count(*) FROM pg_locks WHERE relation = 't'::regclass").await, 0);
    // The snapshot outlives its slot, is the same for all who enter it, and shows what was
    // there when it was taken.
    source.run("INSERT INTO t VALUES (3); DELETE FROM t WHERE id = 1").await;
    for _ in 0..2 {
        assert_eq!(copied(&wave).await.unwrap(), ["1", "2"]);
    }
}

/// P13: a change between snapshot and lock would give no rows and no error.
pub async fn changes(servers: &'static Servers) {
    let source = Source::new(servers, "changes", "CREATE SCHEMA other; CREATE PUBLICATION p").await;
    let mut changes = vec![
        "ALTER TABLE t ADD b int DEFAULT 5",
        "ALTER TABLE t ALTER id TYPE bigint",
        "ALTER TABLE t RENAME TO u",
        "ALTER TABLE t REPLICA IDENTITY FULL",
        "TRUNCATE t",
        "VACUUM FULL t",
        "ALTER PUBLICATION p DROP TABLE t; ALTER PUBLICATION p ADD TABLE t",
        "ALTER PUBLICATION p SET (publish = 'insert')",
    ];
    if servers.major >= 15 {
        changes.push("ALTER PUBLICATION p SET TABLE t WHERE (id > 1)");
    }
    if servers.major >= 18 {
        changes.push("ALTER PUBLICATION p SET (publish_generated_columns = stored)");
    }
    for change in changes {
        source.run("CREATE TABLE t (id int PRIMARY KEY, n int, twice int GENERATED ALWAYS AS (n * 2) STORED); INSERT INTO t VALUES (1), (2)").await;
        source.run("ALTER PUBLICATION p ADD TABLE t").await;
        let wave = source.take(&options()).await.unwrap();
        assert_eq!(copied(&wave).await.unwrap(), ["1", "2"]);
        for command in change.split("; ") {
            source.run(command).await;
        }
        let error = copied(&wave).await.unwrap_err();
        assert_eq!((error.code(), error.is_transient()), ("copy.changed", true), "{change}: {error}");
        drop(wave);
        source.run("DROP TABLE IF EXISTS t, u; DROP PUBLICATION p; CREATE PUBLICATION p").await;
    }
}

/// One thing after the other is missing.
pub async fn lacks(servers: &'static Servers) {
    let source =
        Source::new(servers, "lacks", "CREATE TABLE t (id int PRIMARY KEY); CREATE PUBLICATION q FOR TABLE t").await;
    let check = async || check_source(&source.sql, &source.config).await;
    let error = check().await.unwrap_err();
    assert_eq!(error.code(), "publication.missing");
    assert!(error.message().contains("there are q"), "{error}");
    source.run("CREATE PUBLICATION p FOR TABLE t").await;
    let facts = check().await.unwrap();
    assert_eq!((facts.version_num / 10_000, facts.trigger), (servers.major, TriggerState::Missing));
    let from = source.slot().await;
    let slot = check().await.unwrap().slot.unwrap();
    assert_eq!((slot.plugin.as_str(), slot.active_pid, slot.confirmed >= from), ("pgoutput", None, true));

    // A slot that is read, one that is not there, one whose publication is not there.
    let start = async |slot: &str, publication: &str| {
        let connection = ReplicationConnection::connect(&source.config).await.unwrap();
        connection.start(slot, Lsn::ZERO, publication).await
    };
    let (reader, feedback) = start(&source.config.slot, "p").await.unwrap();
    let error = start(&source.config.slot, "p").await.err().unwrap();
    assert_eq!((error.code(), error.is_transient()), ("slot.in-use", true), "{error}");
    drop(feedback);
    reader.close().await;
    let error = start("tidegate_none", "p").await.err().unwrap();
    assert_eq!((error.code(), error.is_transient()), ("slot.missing", false), "{error}");
    let (mut reader, _feedback) = start(&source.config.slot, "missing").await.unwrap();
    source.run("INSERT INTO t VALUES (1)").await;
    let error = loop {
        match tokio::time::timeout(SLOT_WAIT, reader.next()).await.unwrap() {
            Ok(_) => {}
            Err(error) => break error,
        }
    };
    assert_eq!((error.code(), error.is_transient()), ("publication.missing", false), "{error}");
}

/// P35: neither our look-ups nor the trigger in somebody's command wait for tables that
/// are not theirs.
pub async fn held(servers: &'static Servers) {
    let source = Source::new(
        servers,
        "held",
        "CREATE TABLE held (id int PRIMARY KEY); CREATE TABLE free (id int PRIMARY KEY); CREATE PUBLICATION p FOR ALL TABLES",
    )
    .await;
    trigger::install(&source.sql, "postgres").await.unwrap();
    source.run("SELECT pg_create_logical_replication_slot(current_database()::name, 'test_decoding')").await;
    let holder = source.another().await;
    holder.batch_execute("BEGIN; LOCK TABLE held IN ACCESS EXCLUSIVE MODE").await.unwrap();
    source.run("SET lock_timeout = '1s'").await;
    let tables = published_tables(&source.sql, "p").await.unwrap();
    assert_eq!(tables.len(), 2);
    check_source(&source.sql, &source.config).await.unwrap();
    source.run("ALTER TABLE free ADD COLUMN added int").await;
    holder.batch_execute("COMMIT").await.unwrap();
    let written = |what: &str| {
        format!(
            "SELECT count(*) FROM pg_logical_slot_peek_changes(current_database()::name, NULL, NULL) WHERE data LIKE '%tidegate_ddl%{what}%'"
        )
    };
    assert_eq!(source.number(&written("capture-failed")).await, 0);
    assert_eq!(source.number(&written("\"added\"")).await, 1);
    source.run("SELECT pg_drop_replication_slot(current_database()::name)").await;
}

/// P18: a copy and a stream last longer than any transaction of an application may.
pub async fn timeouts(servers: &'static Servers) {
    let source = Source::new(
        servers,
        "timeouts",
        "CREATE TABLE t (id int PRIMARY KEY); INSERT INTO t VALUES (1); CREATE PUBLICATION p FOR TABLE t",
    )
    .await;
    let mut settings = vec!["statement_timeout", "idle_in_transaction_session_timeout", "idle_session_timeout"];
    if servers.major >= 17 {
        settings.push("transaction_timeout");
    }
    for setting in &settings {
        source.run(&format!("ALTER DATABASE {} SET {setting} = '300ms'", source.database.name)).await;
    }
    let session = connect(&source.config).await.unwrap();
    for setting in settings {
        let row = session.query_one("SELECT current_setting($1)", &[&setting]).await.unwrap();
        assert_eq!(row.get::<_, &str>(0), "0", "{setting}");
    }
    // The slot's own transaction waits for this one, and the snapshot's is idle.
    let mut replication = ReplicationConnection::connect(&source.config).await.unwrap();
    source.run("BEGIN; INSERT INTO t VALUES (2)").await;
    let create = replication.create_slot("waits_long", SlotKind::TemporaryExported, SLOT_WAIT);
    let commit = async {
        tokio::time::sleep(Duration::from_millis(700)).await;
        source.run("COMMIT").await;
    };
    let (created, ()) = tokio::join!(create, commit);
    let snapshot = created.unwrap().snapshot.unwrap();
    tokio::time::sleep(Duration::from_millis(500)).await;
    let import = format!("BEGIN ISOLATION LEVEL REPEATABLE READ; SET TRANSACTION SNAPSHOT '{snapshot}'");
    session.batch_execute(&import).await.unwrap();
    tokio::time::sleep(Duration::from_millis(500)).await;
    let row = session.query_one("SELECT count(*) FROM public.t", &[]).await.unwrap();
    assert_eq!(row.get::<_, i64>(0), 2);
    replication.drop_slot("waits_long").await.unwrap();
}
