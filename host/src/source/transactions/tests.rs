//! Against a real server that sends everything above 64 kB before it ends.

use std::collections::HashMap;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use futures_util::FutureExt;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{sleep, timeout};

use super::*;
use crate::position::row_ordinal;
use crate::scratch::{Cluster, ClusterOptions};
use crate::source::config::SourceConfig;
use crate::source::pgoutput::{Message, Tuple};
use crate::source::replication::{ReplicationConnection, SlotKind};
use crate::source::session::{self, Session};
use crate::source::trigger::{self, DDL_PREFIX};
use crate::source::wal::{Feedback, WalMessage, WalReader};

/// Longer than anything here takes on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);
/// Bytes of a DDL message that says nothing.
const HMAC: usize = 64;

fn cluster() -> &'static Cluster {
    static CLUSTER: OnceLock<Cluster> = OnceLock::new();
    CLUSTER.get_or_init(|| {
        let options = ClusterOptions::default()
            .setting("logical_decoding_work_mem", "64kB")
            .setting("wal_sender_timeout", "3s")
            .setting("max_prepared_transactions", "10");
        Cluster::start(&options).unwrap()
    })
}

/// A database, and a slot of each protocol that see the same log.
struct Source {
    config: SourceConfig,
    session: Session,
    files: tempfile::TempDir,
}

async fn source(schema: &str) -> Source {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let name = format!("streamed{}", NEXT.fetch_add(1, Ordering::Relaxed));
    cluster().psql("postgres", &format!("CREATE DATABASE {name}")).unwrap();
    let config = SourceConfig::parse(&cluster().url(&name), "pub", &name).unwrap();
    let session = session::connect(&config).await.unwrap();
    session.batch_execute("SET search_path = public").await.unwrap();
    session.batch_execute(schema).await.unwrap();
    session.batch_execute("CREATE PUBLICATION pub FOR ALL TABLES").await.unwrap();
    Source { config, session, files: tempfile::tempdir().unwrap() }
}

impl Source {
    async fn run(&self, sql: &str) {
        self.session.batch_execute(sql).await.unwrap();
    }

    async fn another(&self) -> Session {
        let session = session::connect(&self.config).await.unwrap();
        session.batch_execute("SET search_path = public").await.unwrap();
        session
    }

    async fn number(&self, sql: &str) -> i64 {
        self.session.query_one(sql, &[]).await.unwrap().get(0)
    }

    fn slot(&self, which: &str) -> String {
        format!("{}_{which}", self.config.slot)
    }

    async fn make_slots(&self) {
        for which in ["whole", "streamed"] {
            let mut connection = ReplicationConnection::connect(&self.config).await.unwrap();
            connection.create_slot(&self.slot(which), SlotKind::Permanent, PATIENCE).await.unwrap();
        }
    }

    fn directory(&self) -> std::path::PathBuf {
        self.files.path().join("transactions")
    }

    fn transactions(&self, options: TransactionOptions) -> Transactions {
        Transactions::open(&self.directory(), options).unwrap()
    }

    async fn streamed(&self, transactions: &Transactions) -> (WalReader, Feedback) {
        start(&self.config, &self.slot("streamed"), Some(transactions)).await
    }

    /// How many blocks the server has sent of transactions that were open.
    async fn blocks(&self) -> i64 {
        let slot = self.slot("streamed");
        self.number(&format!(
            "SELECT coalesce(max(stream_count), 0) FROM pg_stat_replication_slots WHERE slot_name = '{slot}'"
        ))
        .await
    }

    /// Writes the end of what is compared.
    async fn end(&self) {
        self.run("SELECT pg_logical_emit_message(true, 'end', '')").await;
    }

    /// What the server tells of the same log by protocol 1.
    async fn whole(&self) -> Vec<Told> {
        let (mut reader, _feedback) = start(&self.config, &self.slot("whole"), None).await;
        told(&read_to_end(&mut reader).await)
    }

    /// What comes streamed is what comes whole; returns it.
    async fn assert_same(&self) -> Vec<Told> {
        let transactions = self.transactions(TransactionOptions::default());
        let (mut reader, _feedback) = self.streamed(&transactions).await;
        let streamed = told(&read_to_end(&mut reader).await);
        assert_same(&self.whole().await, &streamed);
        assert!(self.blocks().await > 3, "the server has not streamed");
        assert!(is_empty(&self.directory()));
        assert_eq!((transactions.bytes(), transactions.buffered()), (0, 0));
        streamed
    }
}

async fn start(config: &SourceConfig, slot: &str, transactions: Option<&Transactions>) -> (WalReader, Feedback) {
    let started = async {
        loop {
            let mut connection = ReplicationConnection::connect(config).await.unwrap();
            if let Some(transactions) = transactions {
                connection = connection.keeping(transactions);
            }
            match connection.start(slot, Lsn::ZERO, "pub").await {
                Ok(started) => return started,
                // The server notices a moment later that a connection was dropped.
                Err(error) if error.code() == "slot.in-use" => sleep(Duration::from_millis(20)).await,
                Err(error) => panic!("{}", error.report()),
            }
        }
    };
    timeout(PATIENCE, started).await.unwrap()
}

fn is_empty(directory: &Path) -> bool {
    std::fs::read_dir(directory).unwrap().next().is_none()
}

/// The next message. What a look ahead says is true.
async fn next(reader: &mut WalReader) -> Result<WalMessage> {
    if reader.has_buffered() {
        return reader.next().now_or_never().expect("there is a message at hand");
    }
    timeout(PATIENCE, reader.next()).await.unwrap()
}

/// Everything up to the commit of [`Source::end`].
async fn read_to_end(reader: &mut WalReader) -> Vec<XLogData> {
    let mut read = Vec::new();
    let mut last = false;
    loop {
        let WalMessage::Data(data) = next(reader).await.unwrap() else { continue };
        let message = pgoutput::decode(&data.body).unwrap();
        last |= matches!(&message, Message::Logical { prefix, .. } if prefix == "end");
        let ends = matches!(message, Message::Commit(_));
        read.push(data);
        if last && ends {
            return read;
        }
    }
}

/// A message as the router takes it: with its position, and the RELATION in force.
#[derive(Debug, PartialEq, Eq)]
struct Told {
    at: Option<Lsn>,
    ordinals: Vec<u64>,
    body: Bytes,
    relations: Vec<Option<Bytes>>,
}

impl Told {
    fn message(&self) -> Message {
        pgoutput::decode(&self.body).unwrap()
    }
}

/// Brings the messages of a stream into a form that can be compared: when a RELATION
/// is repeated is the server's affair, but not for whom it holds.
fn told(stream: &[XLogData]) -> Vec<Told> {
    let mut relations: HashMap<u32, Bytes> = HashMap::new();
    let mut counters: HashMap<u32, (Lsn, u64)> = HashMap::new();
    let mut told = Vec::new();
    let mut open = false;
    for data in stream {
        let message = pgoutput::decode(&data.body).unwrap();
        let oids = match &message {
            Message::Relation(relation) => {
                relations.insert(relation.oid, data.body.clone());
                continue;
            }
            Message::Type | Message::Origin => continue,
            // The empty one that closes a change takes the tie with a row (P3): either may be first.
            Message::Logical { prefix, content, .. } if prefix == DDL_PREFIX && content.len() == HMAC => continue,
            Message::Insert { oid, .. }
            | Message::Update { oid, .. }
            | Message::Delete { oid, .. }
            | Message::Oversized { oid, .. } => vec![*oid],
            Message::Truncate { oids, .. } => oids.clone(),
            Message::Begin(_) => {
                assert!(!open, "BEGIN inside a transaction");
                open = true;
                vec![]
            }
            Message::Commit(_) | Message::Logical { .. } => vec![],
        };
        assert!(open, "outside of any transaction: {message:?}");
        open = !matches!(message, Message::Commit(_));
        let ordinal = |oid: &u32| {
            let counter = counters.entry(*oid).or_default();
            *counter = if counter.0 == data.start { (data.start, counter.1 + 1) } else { (data.start, 0) };
            row_ordinal(data.start, counter.1)
        };
        told.push(Told {
            // Where a BEGIN stands is no position of anything.
            at: (!matches!(message, Message::Begin(_))).then_some(data.start),
            ordinals: oids.iter().map(ordinal).collect(),
            relations: oids.iter().map(|oid| relations.get(oid).cloned()).collect(),
            body: data.body.clone(),
        });
    }
    told
}

fn assert_same(whole: &[Told], streamed: &[Told]) {
    for (index, (whole, streamed)) in whole.iter().zip(streamed).enumerate() {
        assert_eq!(whole, streamed, "message {index}: {:?} / {:?}", whole.message(), streamed.message());
    }
    assert_eq!(whole.len(), streamed.len());
}

fn inserts(told: &[Told]) -> Vec<String> {
    let first = |tuple: &Tuple| match tuple.cells().next() {
        Some(Ok(pgoutput::Cell::Text(text))) => String::from_utf8(text.to_vec()).unwrap(),
        other => panic!("{other:?}"),
    };
    told.iter()
        .filter_map(|told| match told.message() {
            Message::Insert { new, .. } => Some(first(&new)),
            _ => None,
        })
        .collect()
}

const TABLES: &str = "CREATE TABLE t (id bigint PRIMARY KEY, v text, big text);
    ALTER TABLE t ALTER big SET STORAGE EXTERNAL;
    CREATE TABLE u (id bigint PRIMARY KEY, v text);
    CREATE TYPE mood AS ENUM ('good', 'bad');
    CREATE TABLE m (id bigint PRIMARY KEY, mood mood);
    CREATE TABLE part (id bigint PRIMARY KEY, v text) PARTITION BY RANGE (id);
    CREATE TABLE part_low PARTITION OF part FOR VALUES FROM (0) TO (1000);
    CREATE TABLE part_high PARTITION OF part FOR VALUES FROM (1000) TO (1000000)";

/// Rows of `t`: some 1 kB each.
fn rows(from: u32, to: u32) -> String {
    format!("INSERT INTO t SELECT n, repeat(md5(n::text), 30) FROM generate_series({from}, {to}) n;")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_row_that_is_too_large_to_be_read_is_told_in_its_place() {
    let source = source(TABLES).await;
    source.make_slots().await;
    let large = "INSERT INTO t VALUES (-7, 'large', repeat('x', 5000000));";
    source.run(&format!("BEGIN; {} {large} {} COMMIT", rows(1, 1000), rows(1001, 2000))).await;
    source.end().await;
    let transactions = source.transactions(TransactionOptions::default());
    let (mut reader, _feedback) = source.streamed(&transactions).await;
    reader.set_message_bytes(1 << 20);
    let (mut rows, mut found) = (0, None);
    for data in read_to_end(&mut reader).await {
        match pgoutput::decode(&data.body).unwrap() {
            Message::Insert { .. } => rows += 1,
            Message::Oversized { bytes, limit, beginning, .. } => {
                let pgoutput::Cell::Text(key) = beginning.cells().next().unwrap() else { panic!("no key") };
                found = Some((rows, bytes > 5_000_000, limit, key.to_vec()));
            }
            _ => {}
        }
    }
    assert_eq!((rows, found), (2000, Some((1000, true, 1 << 20, b"-7".to_vec()))));
    assert!(source.blocks().await > 3, "the server has not streamed");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_transaction_that_is_sent_before_it_ends_is_told_as_if_it_were_not() {
    let source = source(TABLES).await;
    source.make_slots().await;
    source.run("INSERT INTO t VALUES (-1, 'small', repeat('x', 5000)); INSERT INTO m VALUES (-1, 'good')").await;
    let work = format!(
        "BEGIN; {} UPDATE t SET v = 'short' WHERE id % 3 = 0; UPDATE t SET id = -id WHERE id % 5 = 0;
         UPDATE t SET v = 'kept' WHERE id = -1; DELETE FROM t WHERE id % 7 = 0;
         COPY u FROM PROGRAM 'seq 1 9000 | sed s/$/,copied/' WITH (FORMAT csv);
         INSERT INTO m SELECT n, 'bad' FROM generate_series(1, 3000) n;
         INSERT INTO part SELECT n, 'part' FROM generate_series(1, 3000) n;
         UPDATE part SET id = id + 3000 WHERE id % 2 = 0;
         SELECT pg_logical_emit_message(true, 'said', repeat('y', 100000));
         TRUNCATE u, m RESTART IDENTITY CASCADE; {}
         INSERT INTO t SELECT n, 'toast', repeat(md5(n::text), 1000) FROM generate_series(20001, 20200) n; COMMIT",
        rows(1, 4000),
        rows(10001, 12000)
    );
    source.run(&work).await;
    source.run("INSERT INTO t VALUES (-2, 'small again'); DELETE FROM t WHERE id > 0").await;
    source.run(&format!("{} PREPARE TRANSACTION 'kept'", format_args!("BEGIN; {}", rows(1, 500)))).await;
    source.run(&format!("{} PREPARE TRANSACTION 'lost'", format_args!("BEGIN; {}", rows(501, 999)))).await;
    for sql in ["INSERT INTO u VALUES (1, 'between')", "ROLLBACK PREPARED 'lost'", "COMMIT PREPARED 'kept'"] {
        source.run(sql).await;
    }
    source.end().await;
    let told = source.assert_same().await;
    assert!(told.iter().any(|told| matches!(told.message(), Message::Truncate { oids, .. } if oids.len() == 2)));
    assert_eq!(told.iter().filter(|told| matches!(told.message(), Message::Begin(_))).count(), 6);
}

#[tokio::test(flavor = "multi_thread")]
async fn savepoints_that_are_taken_back_leave_nothing_and_the_others_everything() {
    let source = source(TABLES).await;
    source.make_slots().await;
    let (long, short) = (1500, 40);
    let mut work = String::from("BEGIN;");
    let mut at = 0;
    // Both above and below what is kept in memory, and what is sent at once.
    for (size, goes) in [(short, true), (long, true), (short, false), (long, false)] {
        let mut insert = || {
            at += size;
            rows(at - size + 1, at)
        };
        work += &insert();
        work += &format!("SAVEPOINT a; {} ROLLBACK TO a; {}", insert(), insert());
        work += &format!("SAVEPOINT b; {} SAVEPOINT c; {} RELEASE c; {}", insert(), insert(), insert());
        work += &format!("SAVEPOINT d; {} RELEASE d; ROLLBACK TO b; {}", insert(), insert());
        work += &format!("SAVEPOINT e; {} SAVEPOINT f; {} ROLLBACK TO f; {} RELEASE e;", insert(), insert(), insert());
        work += &format!("SAVEPOINT g; {} TRUNCATE m; ROLLBACK TO g; {}", insert(), insert());
        work += if goes { "ROLLBACK TO a;" } else { "RELEASE b;" };
        work += &insert();
        work += "RELEASE a;";
    }
    work += "DO $$ BEGIN FOR n IN 100001..100400 LOOP
               BEGIN
                 INSERT INTO u VALUES (n, repeat('loop', 100));
                 IF n % 3 = 0 THEN RAISE EXCEPTION 'no'; END IF;
               EXCEPTION WHEN raise_exception THEN
                 INSERT INTO u VALUES (-n, 'instead');
               END;
             END LOOP; END $$; COMMIT";
    source.run(&work).await;
    source.run(&format!("BEGIN; {} SAVEPOINT s; {} ROLLBACK", rows(200001, 203000), rows(203001, 206000))).await;
    source.run("INSERT INTO t VALUES (-1, 'after')").await;
    source.end().await;
    let told = source.assert_same().await;
    let kept: i64 = source.number("SELECT (SELECT count(*) FROM t) + (SELECT count(*) FROM u)").await;
    assert_eq!(inserts(&told).len() as i64, kept);
    assert_eq!(told.iter().filter(|told| matches!(told.message(), Message::Begin(_))).count(), 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn transactions_that_are_open_together_are_told_one_after_the_other() {
    let source = source(TABLES).await;
    source.make_slots().await;
    let (one, other, lost) = (source.another().await, source.another().await, source.another().await);
    for session in [&one, &other, &lost] {
        session.batch_execute("BEGIN").await.unwrap();
    }
    for round in 0..12 {
        let at = |lane: u32| rows(lane * 100_000 + round * 300 + 1, lane * 100_000 + (round + 1) * 300);
        one.batch_execute(&at(1)).await.unwrap();
        other.batch_execute(&format!("SAVEPOINT s; {} ROLLBACK TO s; {}", at(2), at(3))).await.unwrap();
        lost.batch_execute(&at(4)).await.unwrap();
        source
            .run(&format!("INSERT INTO t VALUES ({round}, 'between'); INSERT INTO u VALUES ({round}, 'between')"))
            .await;
    }
    lost.batch_execute("ROLLBACK").await.unwrap();
    other.batch_execute("COMMIT").await.unwrap();
    source.run("UPDATE t SET v = 'between' WHERE id < 10").await;
    one.batch_execute("COMMIT").await.unwrap();
    source.run("UPDATE t SET v = 'behind' WHERE id < 10").await;
    source.end().await;
    source.assert_same().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn ddl_is_told_in_its_place() {
    let source = source("CREATE TABLE t (id bigint PRIMARY KEY, v text)").await;
    trigger::install(&source.session, "postgres").await.unwrap();
    source.make_slots().await;
    source.run("INSERT INTO t VALUES (-1, 'before')").await;
    let work = format!(
        "BEGIN; {} ALTER TABLE t ADD a int; {}
         SAVEPOINT r; ALTER TABLE t DROP a; {} RELEASE r; ALTER TABLE t RENAME v TO w; {}
         SAVEPOINT s; ALTER TABLE t ADD lost int; {} ROLLBACK TO s; {} COMMIT",
        rows(1, 300),
        rows(301, 600),
        rows(601, 900),
        rows(901, 1200),
        rows(1201, 1500),
        rows(1501, 1800),
    );
    source.run(&work).await;
    source.run("INSERT INTO t VALUES (-2, 'after')").await;
    source
        .run(&format!(
            "BEGIN; ALTER TABLE t ADD gone int; {} ROLLBACK; INSERT INTO t VALUES (-3, 'after')",
            rows(2001, 2400)
        ))
        .await;
    source.end().await;
    let (told, _) = assert_same_in_the_end(&source, Lsn::ZERO).await;
    let messages = |told: &&Told| matches!(told.message(), Message::Logical { prefix, .. } if prefix != "end");
    assert_eq!(told.iter().filter(messages).count(), 3);
    assert_eq!(inserts(&told).len(), 1503);
}

/// What is told in the end, over as many connections as it takes, is what the server
/// tells whole. How many it took.
async fn assert_same_in_the_end(source: &Source, from: Lsn) -> (Vec<Told>, usize) {
    let transactions = source.transactions(TransactionOptions::default());
    for connections in 1..4 {
        let connection = ReplicationConnection::connect(&source.config).await.unwrap().keeping(&transactions);
        let (mut reader, feedback) = connection.start(&source.slot("streamed"), from, "pub").await.unwrap();
        let mut seen = Vec::new();
        let ended = loop {
            match next(&mut reader).await {
                Ok(WalMessage::Data(data)) => {
                    let ends = seen.last().is_some_and(|last: &XLogData| is_end(last)) && data.body[0] == b'C';
                    seen.push(data);
                    if ends {
                        break None;
                    }
                }
                Ok(WalMessage::Keepalive { .. }) => {}
                Err(error) => break Some(error),
            }
        };
        reader.close().await;
        drop(feedback);
        match ended {
            Some(error) => assert_eq!(error.code(), "transactions.unclear", "{}", error.report()),
            None => {
                let told = told(&seen);
                assert_same(&source.whole().await, &told);
                return (told, connections);
            }
        }
    }
    panic!("it does not become clear");
}

fn is_end(data: &XLogData) -> bool {
    matches!(pgoutput::decode(&data.body), Ok(Message::Logical { prefix, .. }) if prefix == "end")
}

#[tokio::test(flavor = "multi_thread")]
async fn ddl_that_may_have_been_taken_back_is_left_to_the_server() {
    let large = "SELECT pg_logical_emit_message(true, 'large', repeat('y', 100000));";
    // The server says which subtransaction a row belongs to, but not which a message.
    for taken_back in
        [format!("ALTER TABLE t ADD lost int; {}", rows(1, 300)), format!("ALTER TABLE t ADD lost int; {large}")]
    {
        let source = source("CREATE TABLE t (id bigint PRIMARY KEY, v text)").await;
        trigger::install(&source.session, "postgres").await.unwrap();
        source.make_slots().await;
        source
            .run(&format!(
                "BEGIN; {} SAVEPOINT s; {taken_back} ROLLBACK TO s; {} COMMIT",
                rows(301, 600),
                rows(601, 900)
            ))
            .await;
        source.end().await;
        let (told, _) = assert_same_in_the_end(&source, Lsn::ZERO).await;
        assert_eq!(inserts(&told).len(), 600);
        assert!(!told.iter().any(|told| told.body.starts_with(b"M") && told.body.len() > 1000));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_subtransaction_that_the_server_forgets_to_take_back_is_not_told() {
    let source = source(TABLES).await;
    source.make_slots().await;
    let open = source.another().await;
    // What lies before the stream's start is spilled by the server: more changes than it reads back at once.
    open.batch_execute(&format!("BEGIN; {} SAVEPOINT s; {}", rows(1, 2000), rows(2001, 8000))).await.unwrap();
    let here: String = source.session.query_one("SELECT pg_current_wal_insert_lsn()::text", &[]).await.unwrap().get(0);
    let behind = format!("{} ROLLBACK TO s; {} COMMIT", rows(8001, 8080), rows(10_001, 10_500));
    open.batch_execute(&behind).await.unwrap();
    source.end().await;
    let (told, _) = assert_same_in_the_end(&source, here.parse().unwrap()).await;
    assert_eq!(inserts(&told).len(), 2500);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_server_said_meanwhile_is_in_force_again_after_the_commit() {
    let source = source("CREATE TABLE t (id bigint PRIMARY KEY, v text, w text)").await;
    source.run("ALTER PUBLICATION pub RENAME TO all_tables; CREATE PUBLICATION pub FOR TABLE t").await;
    source.make_slots().await;
    let transactions = source.transactions(TransactionOptions::default());
    let (mut reader, _feedback) = source.streamed(&transactions).await;
    let open = source.another().await;
    // Nothing is left for the last block, in which the server would say it again.
    let last = "SELECT pg_logical_emit_message(true, 'large', repeat('y', 100000))";
    open.batch_execute(&format!("BEGIN; {} {last}", rows(1, 1000))).await.unwrap();
    // Without a lock that would wait for the rows, and with a relation that differs.
    source.run("INSERT INTO t VALUES (-1, 'three', 'columns')").await;
    source.run("ALTER PUBLICATION pub SET TABLE t (id, v); INSERT INTO t VALUES (-2, 'two', 'lost')").await;
    open.batch_execute("COMMIT").await.unwrap();
    source.run("INSERT INTO t VALUES (-3, 'two', 'lost')").await;
    source.end().await;
    let told = told(&read_to_end(&mut reader).await);
    assert!(source.blocks().await > 3);
    assert_eq!(inserts(&told)[..2], ["-1", "-2"]);
    for told in &told {
        let Message::Insert { new, .. } = told.message() else { continue };
        let Some(Some(relation)) = told.relations.first() else { panic!("a row without a relation") };
        let Message::Relation(relation) = pgoutput::decode(relation).unwrap() else { panic!() };
        assert_eq!(usize::from(new.len()), relation.columns.len(), "{told:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_that_is_lost_anywhere_leaves_nothing_and_all_of_it_comes_again() {
    let source = source(TABLES).await;
    source.make_slots().await;
    let work = format!(
        "BEGIN; {} SAVEPOINT s; {} ROLLBACK TO s; {} COMMIT; INSERT INTO u VALUES (1, 'small');",
        rows(1, 2500),
        rows(2501, 4000),
        rows(4001, 4300)
    );
    source.run(&work).await;
    source.end().await;
    let whole = source.whole().await;
    let transactions = source.transactions(TransactionOptions::default());
    for cut in [20_000, 70_000, 1_000_000, 2_000_000, 3_000_000, 4_000_000, 4_300_000] {
        let config = cut_after(&source.config, cut).await;
        let (mut reader, _feedback) = start(&config, &source.slot("streamed"), Some(&transactions)).await;
        let mut seen = Vec::new();
        let error = loop {
            match next(&mut reader).await {
                Ok(WalMessage::Data(data)) => seen.push(data),
                Ok(WalMessage::Keepalive { .. }) => {}
                Err(error) => break error,
            }
        };
        assert!(error.is_transient(), "{}", error.report());
        drop(reader);
        // A transaction is told whole or not at all.
        let seen = told(&seen);
        assert_same(&whole[..seen.len()], &seen);
        assert!(seen.is_empty() || matches!(seen[seen.len() - 1].message(), Message::Commit(_)));
        assert!(is_empty(&source.directory()), "cut after {cut}");
        assert_eq!((transactions.bytes(), transactions.buffered()), (0, 0));
    }
    let (mut reader, _feedback) = source.streamed(&transactions).await;
    assert_same(&whole, &told(&read_to_end(&mut reader).await));
}

/// A way to the server that is cut once it has sent so much in one connection.
async fn cut_after(config: &SourceConfig, bytes: u64) -> SourceConfig {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mut cut = config.clone();
    let server = (config.host.clone(), config.port);
    cut.port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            let server = TcpStream::connect(server.clone()).await.unwrap();
            let (mut from_client, mut to_client) = client.into_split();
            let (from_server, mut to_server) = server.into_split();
            tokio::spawn(async move {
                let back = tokio::io::copy(&mut from_client, &mut to_server);
                let mut from_server = from_server.take(bytes);
                tokio::select! { _ = tokio::io::copy(&mut from_server, &mut to_client) => {}, _ = back => {} }
                let _closed = to_client.shutdown().await;
            });
        }
    });
    cut
}

#[tokio::test(flavor = "multi_thread")]
async fn a_confirmation_beyond_the_rows_of_an_open_transaction_loses_none_of_them() {
    let source = source(TABLES).await;
    source.make_slots().await;
    let transactions = source.transactions(TransactionOptions::default());
    let (mut reader, feedback) = source.streamed(&transactions).await;
    let open = source.another().await;
    open.batch_execute(&format!("BEGIN; {} SAVEPOINT s; {} ROLLBACK TO s;", rows(1, 2000), rows(2001, 3000)))
        .await
        .unwrap();
    let here: String = source.session.query_one("SELECT pg_current_wal_insert_lsn()::text", &[]).await.unwrap().get(0);
    let here: Lsn = here.parse().unwrap();
    // Nothing shows of it but that the server is behind it.
    let passed = loop {
        match next(&mut reader).await.unwrap() {
            WalMessage::Keepalive { end } if end >= here => break end,
            WalMessage::Keepalive { .. } => {}
            WalMessage::Data(data) => panic!("{:?}", pgoutput::decode(&data.body)),
        }
        // A record that the server has to go beyond, and a keepalive of it.
        source.run("SELECT txid_current()").await;
    };
    assert!(source.blocks().await > 3);
    feedback.confirm(passed);
    let confirmed = format!(
        "SELECT count(*) FROM pg_replication_slots WHERE slot_name = '{}' AND confirmed_flush_lsn >= '{passed}'",
        source.slot("streamed")
    );
    while source.number(&confirmed).await == 0 {
        sleep(Duration::from_millis(10)).await;
    }
    drop((reader, feedback));
    open.batch_execute(&format!("{} COMMIT", rows(3001, 3500))).await.unwrap();
    source.end().await;
    let (mut reader, _feedback) = source.streamed(&transactions).await;
    let again = told(&read_to_end(&mut reader).await);
    assert_eq!(inserts(&again).len(), 2500);
    let rows: Vec<&Told> = again.iter().filter(|told| !told.ordinals.is_empty()).collect();
    assert!(rows[0].at.unwrap() < passed, "the test has not confirmed beyond the rows");
    assert_same(&source.whole().await, &again);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_disk_is_waited_for_and_the_stream_goes_on() {
    let source = source(TABLES).await;
    source.make_slots().await;
    let transactions = source.transactions(TransactionOptions::default());
    let (mut reader, _feedback) = source.streamed(&transactions).await;
    source.run("BEGIN").await;
    let xid = source.number("SELECT pg_current_xact_id()::text::bigint").await;
    let file = source.directory().join(xid.to_string());
    symlink("/dev/full", &file).unwrap();
    source.run(&format!("{} COMMIT", rows(1, 6000))).await;
    source.end().await;
    // Long enough for more than one try, and for a server that hears nothing to give up.
    let waited = timeout(Duration::from_secs(5), read_to_end(&mut reader)).await;
    assert!(waited.is_err(), "it did not wait");
    assert!(transactions.buffered() <= BUFFERED);
    std::fs::remove_file(&file).unwrap();
    let streamed = told(&read_to_end(&mut reader).await);
    assert_same(&source.whole().await, &streamed);
    assert!(is_empty(&source.directory()));
}

/// Reads until an error, and says which.
async fn read_to_error(reader: &mut WalReader) -> Error {
    loop {
        match next(reader).await {
            Ok(WalMessage::Data(data)) => panic!("{:?}", pgoutput::decode(&data.body)),
            Ok(WalMessage::Keepalive { .. }) => {}
            Err(error) => return error,
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn files_that_find_no_room_give_way_to_the_server_for_one_connection() {
    let source = source(TABLES).await;
    source.make_slots().await;
    source.run(&format!("BEGIN; {} SAVEPOINT s; {} COMMIT", rows(1, 3000), rows(3001, 6000))).await;
    source.end().await;
    let whole = source.whole().await;
    let no_room = TransactionOptions { limit_bytes: 3 << 20, ..TransactionOptions::default() };
    let no_index = TransactionOptions { subtransactions: 0, ..TransactionOptions::default() };
    let no_patience = TransactionOptions { patience: Duration::ZERO, ..TransactionOptions::default() };
    for (options, code) in
        [(no_room, "transactions.limit"), (no_index, "transactions.limit"), (no_patience, "transactions.full-disk")]
    {
        let transactions = source.transactions(options);
        if code == "transactions.full-disk" {
            let xid = whole.iter().find_map(|told| match told.message() {
                Message::Begin(begin) => Some(begin.xid),
                _ => None,
            });
            symlink("/dev/full", source.directory().join(xid.unwrap().to_string())).unwrap();
        }
        let (mut reader, feedback) = source.streamed(&transactions).await;
        let error = read_to_error(&mut reader).await;
        assert_eq!(error.code(), code);
        assert!(error.is_transient());
        drop((reader, feedback));
        assert!(is_empty(&source.directory()));
        let (mut reader, feedback) = source.streamed(&transactions).await;
        let blocks = source.blocks().await;
        assert_same(&whole, &told(&read_to_end(&mut reader).await));
        assert_eq!(source.blocks().await, blocks, "the server has streamed");
        drop((reader, feedback));
        // The one after it tries again.
        let (mut reader, feedback) = source.streamed(&transactions).await;
        while let Ok(WalMessage::Keepalive { .. }) = next(&mut reader).await {}
        assert!(source.blocks().await > blocks);
        drop((reader, feedback));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_that_was_damaged_is_no_row() {
    let source = source(TABLES).await;
    source.make_slots().await;
    let transactions = source.transactions(TransactionOptions::default());
    let (mut reader, feedback) = source.streamed(&transactions).await;
    source.run("BEGIN").await;
    let xid = source.number("SELECT pg_current_xact_id()::text::bigint").await;
    source.run(&rows(1, 6000)).await;
    let file = source.directory().join(xid.to_string());
    let written = async {
        while std::fs::metadata(&file).is_err() {
            let _ = timeout(Duration::from_millis(50), reader.next()).await;
        }
    };
    timeout(PATIENCE, written).await.unwrap();
    let file = std::fs::OpenOptions::new().write(true).open(&file).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, b"!", 500_000).unwrap();
    source.run("COMMIT").await;
    source.end().await;
    let error = loop {
        match next(&mut reader).await {
            Ok(_) => {}
            Err(error) => break error,
        }
    };
    assert_eq!(error.code(), "transactions.corrupt");
    drop((reader, feedback));
    let (mut reader, _feedback) = source.streamed(&transactions).await;
    assert_same(&source.whole().await, &told(&read_to_end(&mut reader).await));
}

#[test]
fn what_an_earlier_process_left_is_deleted_at_the_start() {
    let files = tempfile::tempdir().unwrap();
    let directory = files.path().join("transactions");
    std::fs::create_dir(&directory).unwrap();
    std::fs::write(directory.join("771"), "left").unwrap();
    let transactions = Transactions::open(&directory, TransactionOptions::default()).unwrap();
    assert!(is_empty(&directory));
    assert_eq!(transactions.bytes(), 0);
}

/// A stream as the server sends it.
fn sent(body: &[&[u8]]) -> XLogData {
    XLogData { start: Lsn(8), end: Lsn(8), body: Bytes::from(body.concat()) }
}

fn insert(xid: u32, value: &[u8]) -> XLogData {
    let length = u32::try_from(value.len()).unwrap().to_be_bytes();
    sent(&[b"I", &xid.to_be_bytes(), &[0, 0, 0, 1], b"N", &[0, 1], b"t", &length, value])
}

fn begin_block(xid: u32, first: bool) -> XLogData {
    sent(&[b"S", &xid.to_be_bytes(), &[first.into()]])
}

fn commit(xid: u32) -> XLogData {
    sent(&[b"c", &xid.to_be_bytes(), &[0], &[0; 24]])
}

#[test]
fn transactions_of_hundreds_of_megabytes_take_no_more_memory_than_the_buffers_have() {
    let files = tempfile::tempdir().unwrap();
    let transactions = Transactions::open(&files.path().join("t"), TransactionOptions::default()).unwrap();
    let mut assembler = transactions.assembler(true).unwrap();
    let (lanes, rounds, row) = (40_u32, 80_u32, vec![b'x'; 1000]);
    let large = vec![b'y'; 3 << 20];
    for round in 0..rounds {
        for xid in 1..=lanes {
            assembler.take(&begin_block(xid, round == 0)).unwrap();
            for _ in 0..100 {
                assembler.take(&insert(xid, &row)).unwrap();
                assert!(transactions.buffered() <= BUFFERED);
            }
            assembler.take(&sent(&[b"E"])).unwrap();
        }
    }
    assembler.take(&begin_block(1, false)).unwrap();
    assembler.take(&insert(1, &large)).unwrap();
    assembler.take(&sent(&[b"E"])).unwrap();
    assert!(transactions.bytes() > 280 << 20);
    for xid in 1..=lanes {
        assembler.take(&commit(xid)).unwrap();
        let mut told = 0;
        while let Some(data) = assembler.told().unwrap() {
            told += usize::from(data.body[0] == b'I');
        }
        assert_eq!(told, (rounds * 100) as usize + usize::from(xid == 1));
    }
    assert_eq!((transactions.bytes(), transactions.buffered()), (0, 0));
}

#[test]
fn a_stream_that_is_out_of_order_is_an_error() {
    let files = tempfile::tempdir().unwrap();
    let transactions = Transactions::open(&files.path().join("t"), TransactionOptions::default()).unwrap();
    let refused = |messages: &[XLogData]| {
        let mut assembler = transactions.assembler(true).unwrap();
        let mut taken = messages.iter().map(|data| assembler.take(data));
        taken.find_map(|taken| taken.err()).map(|error| error.code().to_owned())
    };
    let stop = sent(&[b"E"]);
    let row = insert(1, b"x");
    let protocol = Some("source.protocol".to_owned());
    assert_eq!(refused(&[begin_block(1, true), row.clone(), stop.clone(), commit(1)]), None);
    assert_eq!(refused(&[begin_block(1, false)]), protocol);
    assert_eq!(refused(&[begin_block(1, true), begin_block(2, true)]), protocol);
    assert_eq!(refused(std::slice::from_ref(&stop)), protocol);
    assert_eq!(refused(&[commit(1)]), protocol);
    assert_eq!(refused(&[begin_block(1, true), commit(1)]), protocol);
    assert_eq!(refused(&[begin_block(1, true), sent(&[b"B", &[0; 20]])]), protocol);
    let abort = sent(&[b"A", &[0; 8]]);
    for message in [begin_block(1, true), commit(1), abort] {
        for cut in 1..message.body.len() {
            let body = message.body.slice(..cut);
            assert_eq!(refused(&[XLogData { body, ..message.clone() }]), protocol);
        }
    }
    for cut in 1..5 {
        let body = row.body.slice(..cut);
        assert_eq!(refused(&[begin_block(1, true), XLogData { body, ..row.clone() }]), protocol);
    }
}
