//! Against a real server.

use std::time::Duration;

use tokio::time::timeout;

use super::catalog::{check_source, published_tables, row_filters, table_schema, table_schemas};
use super::config::SourceConfig;
use super::pgoutput::{self, Cell, Message, Tuple};
use super::replication::{ReplicationConnection, SlotKind};
use super::session::{self, Session};
use super::test_server::Server;
use super::trigger::{self, DDL_PREFIX, DdlMessage, TriggerState};
use super::wal::{Feedback, WalMessage, WalReader};
use crate::error::Exit;
use crate::position::{Lsn, SnapshotId};
use crate::schema::table::{Origin, TableSchema};

/// Longer than anything here takes on a busy machine.
const PATIENCE: Duration = Duration::from_secs(30);
const SLOT_WAIT: Duration = Duration::from_secs(20);

/// Code of both kinds of connection, which have to agree.
async fn refused(config: &SourceConfig) -> String {
    let session = session::connect(config).await.err().expect("a session was let in");
    let replication = ReplicationConnection::connect(config).await.err().expect("replication was let in");
    assert_eq!(session.code(), replication.code(), "{} / {}", session.report(), replication.report());
    for error in [&session, &replication] {
        assert!(!error.report().contains("hunter"), "{}", error.report());
        assert!(error.next_step().is_some());
    }
    session.code().to_owned()
}

async fn let_in(config: &SourceConfig) {
    session::connect(config).await.unwrap().simple_query("SELECT 1").await.unwrap();
    ReplicationConnection::connect(config).await.unwrap().identify_system().await.unwrap();
}

async fn make_roles(server: &Server) {
    let (_, admin) = server.database().await;
    admin
        .batch_execute(
            "DO $$ BEGIN IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = 'scrammer') THEN
               CREATE ROLE scrammer LOGIN REPLICATION PASSWORD 'hunter:2/@';
               CREATE ROLE nobody LOGIN REPLICATION PASSWORD 'hunter2';
               CREATE ROLE clear LOGIN REPLICATION PASSWORD 'hunter2';
               CREATE ROLE plain LOGIN PASSWORD 'hunter2';
               SET LOCAL password_encryption = 'md5';
               CREATE ROLE md5er LOGIN REPLICATION PASSWORD 'hunter2';
             END IF; END $$",
        )
        .await
        .unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn each_way_to_log_in_works_and_each_refusal_has_its_own_code() {
    let server = Server::start(&["ssl=on", "wal_level=logical"]);
    make_roles(&server).await;
    let plain = "?sslmode=disable";
    for login in ["scrammer:hunter%3A2%2F%40", "md5er:hunter2", "clear:hunter2"] {
        let_in(&server.tcp(login, "127.0.0.1", plain)).await;
        // SCRAM-SHA-256-PLUS, bound to the channel.
        let_in(&server.tcp(login, "127.0.0.1", "?sslmode=require")).await;
    }
    for login in ["scrammer:hunter3", "md5er:hunter3", "clear:hunter3", "missing:hunter3", "nobody:hunter2", "scrammer"]
    {
        let config = server.tcp(login, "127.0.0.1", plain);
        assert_eq!(refused(&config).await, "source.password", "{login}");
        assert_eq!(session::connect(&config).await.err().unwrap().exit_code(), Exit::No);
    }
    let config = server.tcp("scrammer:hunter%3A2%2F%40", "127.0.0.1", "?sslmode=disable&dbname=nowhere");
    assert_eq!(refused(&config).await, "source.database-missing");
    let config = server.tcp("plain:hunter2", "127.0.0.1", plain);
    let error = ReplicationConnection::connect(&config).await.err().unwrap();
    assert_eq!(error.code(), "source.role-replication");
}

#[tokio::test(flavor = "multi_thread")]
async fn tls_checks_what_sslmode_asks_for_and_says_what_is_wrong() {
    let server = Server::start(&["ssl=on", "wal_level=logical"]);
    make_roles(&server).await;
    let login = "scrammer:hunter%3A2%2F%40";
    let ca = |name: &str| format!("sslrootcert={}", server.directory().join(name).display());
    let to = |host: &str, mode: &str, root: &str| server.tcp(login, host, &format!("?sslmode={mode}&{root}"));
    let (ours, other) = (ca("ca.pem"), ca("other.pem"));
    let_in(&to("localhost", "verify-full", &ours)).await;
    let_in(&to("127.0.0.1", "verify-ca", &ours)).await;
    let_in(&to("127.0.0.1", "require", "")).await;
    assert_eq!(refused(&to("127.0.0.1", "verify-full", &ours)).await, "source.tls-name");
    assert_eq!(refused(&to("localhost", "verify-full", &other)).await, "source.tls-authority");
    assert_eq!(refused(&to("localhost", "verify-ca", &other)).await, "source.tls-authority");
    assert_eq!(refused(&to("localhost", "require", &other)).await, "source.tls-authority");
    assert_eq!(refused(&to("localhost", "verify-full", &ca("none.pem"))).await, "source.tls-roots");
    assert_eq!(refused(&to("localhost", "verify-full", &ca("server.key"))).await, "source.tls-roots");
    let session = session::connect(&to("localhost", "verify-full", &ours)).await.unwrap();
    let row = session.query_one("SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()", &[]).await.unwrap();
    assert!(row.get::<_, bool>(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_without_tls_or_slots_or_senders_is_named_as_such() {
    let server = Server::start(&["ssl=off", "wal_level=logical", "max_replication_slots=1", "max_wal_senders=1"]);
    make_roles(&server).await;
    let login = "scrammer:hunter%3A2%2F%40";
    assert_eq!(refused(&server.tcp(login, "localhost", "?sslmode=verify-full")).await, "source.tls-missing");
    assert_eq!(refused(&server.tcp(login, "localhost", "?sslmode=require")).await, "source.tls-missing");
    let_in(&server.tcp(login, "localhost", "?sslmode=prefer")).await;

    let (config, session) = server.database().await;
    session.batch_execute(&format!("CREATE PUBLICATION {}", config.publication)).await.unwrap();
    let mut connection = retry_senders(&config).await;
    connection.create_slot("taken", SlotKind::Permanent, SLOT_WAIT).await.unwrap();
    let error = connection.create_slot("second", SlotKind::Permanent, SLOT_WAIT).await.unwrap_err();
    assert_eq!(error.code(), "slot.none-free");
    let error = check_source(&session, &config).await.unwrap_err();
    assert_eq!(error.code(), "slot.none-free");
    let error = ReplicationConnection::connect(&config).await.err().unwrap();
    assert_eq!(error.code(), "source.wal-senders");
    assert!(error.is_transient());
}

/// The server notices a closed connection a moment later.
async fn retry_senders(config: &SourceConfig) -> ReplicationConnection {
    let connect = async {
        loop {
            match ReplicationConnection::connect(config).await {
                Ok(connection) => return connection,
                Err(error) if error.is_transient() => tokio::task::yield_now().await,
                Err(error) => panic!("{}", error.report()),
            }
        }
    };
    timeout(PATIENCE, connect).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_is_not_there_is_transiently_unreachable() {
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let url = format!("postgres://me:hunter2@127.0.0.1:{free}/d");
    let config = SourceConfig::parse(&url, "p", "p").unwrap();
    assert_eq!(refused(&config).await, "source.unreachable");
    assert!(session::connect(&config).await.err().unwrap().is_transient());
}

#[tokio::test(flavor = "multi_thread")]
async fn settings_of_role_and_database_do_not_reach_our_sessions() {
    let (config, admin) = Server::shared().database().await;
    let hostile = [
        "DateStyle = 'German'",
        "IntervalStyle = 'iso_8601'",
        "TimeZone = 'Asia/Kolkata'",
        "bytea_output = 'escape'",
        "extra_float_digits = 0",
        "search_path = public",
        "statement_timeout = '1s'",
        "client_encoding = 'LATIN1'",
        "lc_monetary = 'POSIX'",
        "quote_all_identifiers = on",
        "standard_conforming_strings = off",
        "idle_session_timeout = '1s'",
        "default_transaction_isolation = 'serializable'",
        "default_transaction_deferrable = on",
        "default_transaction_read_only = on",
    ];
    for setting in hostile {
        admin.batch_execute(&format!("ALTER DATABASE {} SET {setting}", config.database)).await.unwrap();
    }
    let session = session::connect(&config).await.unwrap();
    for (name, value) in session::PINNED {
        let row = session.query_one("SELECT current_setting($1)", &[&name]).await.unwrap();
        let found: String = row.get(0);
        assert!(found.starts_with(value), "{name} is {found}");
    }
    let mut connection = ReplicationConnection::connect(&config).await.unwrap();
    assert_eq!(connection.identify_system().await.unwrap().database, config.database);
}

/// A stream of a new slot over `config.publication`.
async fn stream(config: &SourceConfig) -> (WalReader, Feedback) {
    let mut connection = ReplicationConnection::connect(config).await.unwrap();
    connection.create_slot(&config.slot, SlotKind::Permanent, SLOT_WAIT).await.unwrap();
    connection.start(&config.slot, Lsn::ZERO, &config.publication).await.unwrap()
}

/// The messages up to and including the `commits`th commit, each with its position.
async fn read(reader: &mut WalReader, commits: usize) -> Vec<(Lsn, Message)> {
    let mut messages = Vec::new();
    let mut left = commits;
    while left > 0 {
        if let WalMessage::Data(data) = timeout(PATIENCE, reader.next()).await.unwrap().unwrap() {
            let message = pgoutput::decode(&data.body).unwrap();
            left -= usize::from(matches!(message, Message::Commit(_)));
            messages.push((data.start, message));
        }
    }
    messages
}

fn text(tuple: &Tuple) -> String {
    let cell = |cell: Cell<'_>| match cell {
        Cell::Text(text) => String::from_utf8(text.to_vec()).unwrap(),
        Cell::Null => "null".to_owned(),
        Cell::Unchanged => "unchanged".to_owned(),
        Cell::Binary(_) => "binary".to_owned(),
    };
    tuple.cells().map(|found| cell(found.unwrap())).collect::<Vec<_>>().join(",")
}

#[tokio::test(flavor = "multi_thread")]
async fn the_stream_carries_inserts_updates_deletes_truncates_and_messages() {
    let (config, session) = Server::shared().database().await;
    session
        .batch_execute(&format!(
            "CREATE TABLE t (id int PRIMARY KEY, v text, big text);
             ALTER TABLE t ALTER big SET STORAGE EXTERNAL;
             CREATE PUBLICATION {} FOR TABLE t",
            config.publication
        ))
        .await
        .unwrap();
    let (mut reader, feedback) = stream(&config).await;
    for sql in [
        "INSERT INTO t VALUES (1, NULL, repeat('x', 10000))",
        "UPDATE t SET v = 'é'",
        "UPDATE t SET id = 2",
        "DELETE FROM t",
        "TRUNCATE t RESTART IDENTITY",
        "SELECT pg_logical_emit_message(true, 'hello', 'world')",
    ] {
        session.batch_execute(sql).await.unwrap();
    }
    let messages = read(&mut reader, 6).await;
    let mut seen = Vec::new();
    for (_, message) in &messages {
        match message {
            Message::Insert { new, .. } => seen.push(format!("insert {}", text(new).len())),
            Message::Update { old, new, .. } => {
                let old = old.as_ref().map_or(String::new(), |old| format!("{} {}", old.whole, text(&old.tuple)));
                seen.push(format!("update [{old}] {}", text(new)));
            }
            Message::Delete { old, .. } => seen.push(format!("delete {}", text(&old.tuple))),
            Message::Truncate { restart_identity, .. } => seen.push(format!("truncate {restart_identity}")),
            Message::Logical { prefix, content, .. } => seen.push(format!("{prefix:?} {content:?}")),
            _ => {}
        }
    }
    let expected = [
        "insert 10007",
        "update [] 1,é,unchanged",
        "update [false 1,null,null] 2,é,unchanged",
        "delete 2,null,null",
        "truncate true",
        "b\"hello\" b\"world\"",
    ];
    assert_eq!(seen, expected);
    drop(feedback);
    reader.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_confirmation_moves_the_slot_and_never_back() {
    let (config, session) = Server::shared().database().await;
    session
        .batch_execute(&format!("CREATE TABLE t (id int); CREATE PUBLICATION {} FOR TABLE t", config.publication))
        .await
        .unwrap();
    let (mut reader, feedback) = stream(&config).await;
    session.batch_execute("INSERT INTO t VALUES (1)").await.unwrap();
    let messages = read(&mut reader, 1).await;
    let Some((_, Message::Commit(commit))) = messages.last() else { panic!() };
    feedback.confirm(commit.end);
    feedback.confirm(commit.commit);
    let confirmed = async {
        loop {
            let slot = check_source(&session, &config).await.unwrap().slot.unwrap();
            if slot.confirmed >= commit.end {
                return slot;
            }
        }
    };
    let slot = timeout(PATIENCE, confirmed).await.unwrap();
    assert_eq!(slot.confirmed, commit.end);
    assert!(slot.active_pid.is_some());
    reader.close().await;
    // Let go of at once: the next start is not refused.
    let mut connection = ReplicationConnection::connect(&config).await.unwrap();
    connection.drop_slot(&config.slot).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn feedback_keeps_the_connection_alive_while_nobody_reads() {
    let server = Server::shared();
    let (config, session) = server.database().await;
    session
        .batch_execute(&format!(
            "CREATE TABLE t (id int, v text); CREATE PUBLICATION {} FOR TABLE t;
             ALTER DATABASE {} SET wal_sender_timeout = '2s'",
            config.publication, config.database
        ))
        .await
        .unwrap();
    let (mut reader, feedback) = stream(&config).await;
    // More than socket buffers hold: the sender is stuck in the middle of sending.
    session.batch_execute("INSERT INTO t SELECT i, repeat('x', 1000) FROM generate_series(1, 20000) i").await.unwrap();
    const QUERY: &str = "SELECT reply_time > $1::text::timestamptz FROM pg_stat_replication r JOIN pg_replication_slots s ON s.active_pid = r.pid WHERE slot_name = $2";
    let now: String = session.query_one("SELECT (now() + interval '7 s')::text", &[]).await.unwrap().get(0);
    let replied = async {
        loop {
            let row = session.query_opt(QUERY, &[&now, &config.slot]).await.unwrap();
            let row = row.expect("the sender has ended");
            if row.get::<_, Option<bool>>(0).unwrap_or(false) {
                return;
            }
        }
    };
    timeout(PATIENCE, replied).await.unwrap();
    let rows = read(&mut reader, 1).await;
    assert_eq!(rows.iter().filter(|(_, message)| matches!(message, Message::Insert { .. })).count(), 20000);
    assert!(!reader.has_buffered() || reader.next().await.is_ok());
    drop(feedback);
    reader.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn errors_of_a_slot_say_who_holds_it_what_is_missing_and_whether_it_passes() {
    let (config, session) = Server::shared().database().await;
    session.batch_execute(&format!("CREATE PUBLICATION {}", config.publication)).await.unwrap();
    let (reader, feedback) = stream(&config).await;
    let start = async |slot: &str, publication: &str| {
        let connection = ReplicationConnection::connect(&config).await.unwrap();
        connection.start(slot, Lsn::ZERO, publication).await
    };
    let error = start(&config.slot, &config.publication).await.err().unwrap();
    let pid = check_source(&session, &config).await.unwrap().slot.unwrap().active_pid.unwrap();
    assert_eq!(error.code(), "slot.in-use");
    assert!(error.is_transient() && error.message().contains(&format!("pid {pid}")), "{}", error.report());
    let mut connection = ReplicationConnection::connect(&config).await.unwrap();
    let error = connection.create_slot(&config.slot, SlotKind::Permanent, SLOT_WAIT).await.unwrap_err();
    assert_eq!(error.code(), "slot.exists");
    drop(feedback);
    reader.close().await;
    let error = start("tidegate_none", &config.publication).await.err().unwrap();
    assert_eq!((error.code(), error.is_transient()), ("slot.missing", false));
    let (mut reader, _feedback) = start(&config.slot, "no'such\"one").await.unwrap();
    session.batch_execute("CREATE TABLE t (id int); INSERT INTO t VALUES (1)").await.unwrap();
    let error = loop {
        match timeout(PATIENCE, reader.next()).await.unwrap() {
            Ok(_) => {}
            Err(error) => break error,
        }
    };
    assert_eq!((error.code(), error.is_transient()), ("publication.missing", false), "{}", error.report());
    let (mut reader, _feedback) = retry_start(&config).await;
    session
        .query(
            "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name = $1",
            &[&config.slot],
        )
        .await
        .unwrap();
    let error = loop {
        match timeout(PATIENCE, reader.next()).await.unwrap() {
            Ok(_) => {}
            Err(error) => break error,
        }
    };
    assert_eq!((error.code(), error.is_transient()), ("source.connection-lost", true), "{}", error.report());
}

async fn retry_start(config: &SourceConfig) -> (WalReader, Feedback) {
    let start = async {
        loop {
            let connection = ReplicationConnection::connect(config).await.unwrap();
            match connection.start(&config.slot, Lsn::ZERO, &config.publication).await {
                Ok(started) => return started,
                Err(error) => assert_eq!(error.code(), "slot.in-use", "{}", error.report()),
            }
        }
    };
    timeout(PATIENCE, start).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slot_that_waits_names_the_open_and_the_prepared_transaction_in_its_way() {
    let server = Server::start(&["ssl=off", "wal_level=logical"]);
    let (config, session) = server.database().await;
    session.batch_execute("CREATE TABLE t (id int)").await.unwrap();
    session.batch_execute("BEGIN; INSERT INTO t VALUES (1); PREPARE TRANSACTION 'parked'").await.unwrap();
    session.batch_execute("BEGIN; INSERT INTO t VALUES (2)").await.unwrap();
    let pid: i32 = session.query_one("SELECT pg_backend_pid()", &[]).await.unwrap().get(0);
    let mut connection = ReplicationConnection::connect(&config).await.unwrap();
    let error = connection.create_slot("waits", SlotKind::Permanent, Duration::from_millis(500)).await.unwrap_err();
    assert_eq!(error.code(), "slot.blocked", "{}", error.report());
    assert!(error.is_transient());
    assert!(
        error.message().contains(&format!("pid {pid}")) && error.message().contains("'parked'"),
        "{}",
        error.report()
    );
    session.batch_execute("COMMIT").await.unwrap();
    session.batch_execute("ROLLBACK PREPARED 'parked'").await.unwrap();
    // The same connection is still good, and nothing was left behind.
    let slot = connection.create_slot("waits", SlotKind::TemporaryExported, SLOT_WAIT).await.unwrap();
    let reader = session::connect(&config).await.unwrap();
    let import =
        format!("BEGIN ISOLATION LEVEL REPEATABLE READ; SET TRANSACTION SNAPSHOT '{}'", slot.snapshot.unwrap());
    reader.batch_execute(&import).await.unwrap();
    session.batch_execute("INSERT INTO t VALUES (3)").await.unwrap();
    let row = reader.query_one("SELECT count(*) FROM public.t", &[]).await.unwrap();
    assert_eq!(row.get::<_, i64>(0), 1);
    connection.drop_slot("waits").await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slot_whose_log_is_gone_is_lost_for_good() {
    let server = Server::start(&["ssl=off", "wal_level=logical", "max_slot_wal_keep_size=1MB"]);
    let (config, session) = server.database().await;
    session.batch_execute(&format!("CREATE PUBLICATION {}", config.publication)).await.unwrap();
    let mut connection = ReplicationConnection::connect(&config).await.unwrap();
    connection.create_slot(&config.slot, SlotKind::Permanent, SLOT_WAIT).await.unwrap();
    for _ in 0..4 {
        session.batch_execute("SELECT pg_logical_emit_message(false, '', repeat('x', 1000))").await.unwrap();
        session.batch_execute("SELECT pg_switch_wal()").await.unwrap();
    }
    session.batch_execute("CHECKPOINT").await.unwrap();
    assert_eq!(check_source(&session, &config).await.unwrap_err().code(), "slot.lost");
    let error = connection.start(&config.slot, Lsn::ZERO, &config.publication).await.err().unwrap();
    assert_eq!((error.code(), error.is_transient()), ("slot.lost", false), "{}", error.report());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_source_below_wal_level_logical_is_refused() {
    let server = Server::start(&["ssl=off", "wal_level=replica"]);
    let (config, session) = server.database().await;
    assert_eq!(check_source(&session, &config).await.unwrap_err().code(), "source.wal-level");
    let mut connection = ReplicationConnection::connect(&config).await.unwrap();
    let error = connection.create_slot("s", SlotKind::Permanent, SLOT_WAIT).await.unwrap_err();
    assert_eq!(error.code(), "source.wal-level");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_check_names_what_the_source_lacks() {
    let server = Server::start(&["ssl=off", "wal_level=logical"]);
    make_roles(&server).await;
    let (config, session) = server.database().await;
    session.batch_execute("CREATE PUBLICATION one; CREATE PUBLICATION two").await.unwrap();
    let error = check_source(&session, &config).await.unwrap_err();
    assert_eq!((error.code(), error.exit_code()), ("publication.missing", Exit::No));
    assert!(error.message().contains("one, two"));

    let publication = &config.publication;
    session
        .batch_execute(&format!(
            "CREATE TABLE a (id int PRIMARY KEY); CREATE TABLE \"b B\" (id int, hidden int);
             GRANT SELECT ON a TO scrammer; GRANT SELECT (id) ON \"b B\" TO scrammer;
             CREATE PUBLICATION {publication} FOR TABLE a, \"b B\" WITH (publish = 'insert')"
        ))
        .await
        .unwrap();
    let as_role = async |user: &str| {
        let config = server.config(user, &config.database, publication);
        check_source(&session::connect(&config).await.unwrap(), &config).await
    };
    assert_eq!(as_role("plain").await.unwrap_err().code(), "source.role-replication");
    let error = as_role("scrammer").await.unwrap_err();
    assert_eq!(error.code(), "source.select");
    assert!(error.message().contains("public.\"b B\"") && !error.message().contains("public.a"), "{}", error.message());
    // A column list asks for no more than its columns.
    session.batch_execute(&format!("ALTER PUBLICATION {publication} SET TABLE a, \"b B\" (id)")).await.unwrap();
    let facts = as_role("scrammer").await.unwrap();
    assert_eq!(facts.warnings[0].code(), "publication.publish");
    assert_eq!((facts.trigger, facts.slot), (TriggerState::Missing, None));

    session
        .batch_execute(&format!("SELECT pg_create_logical_replication_slot('{}', 'test_decoding')", config.slot))
        .await
        .unwrap();
    assert_eq!(check_source(&session, &config).await.unwrap_err().code(), "slot.foreign");
    session.batch_execute(&format!("SELECT pg_drop_replication_slot('{}')", config.slot)).await.unwrap();
    session.batch_execute("ALTER SYSTEM SET synchronous_standby_names = '*'").await.unwrap();
    session.batch_execute("SELECT pg_reload_conf()").await.unwrap();
    let refused = async {
        loop {
            let fresh = session::connect(&config).await.unwrap();
            if let Err(error) = check_source(&fresh, &config).await {
                return error;
            }
        }
    };
    assert_eq!(timeout(PATIENCE, refused).await.unwrap().code(), "source.synchronous");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_schema_is_read_through_the_publications_mask() {
    let (config, session) = Server::shared().database().await;
    let publication = &config.publication;
    session
        .batch_execute(&format!(
            "CREATE DOMAIN amount AS numeric(12,4); CREATE DOMAIN price AS amount NOT NULL;
             CREATE TYPE mood AS ENUM ('so', 'it''s');
             CREATE TYPE public.int4 AS RANGE (subtype = float8);
             CREATE TABLE t (gone int, id int, part int, price price, mood mood DEFAULT 'so', many amount[], fake public.int4,
                             twice int GENERATED ALWAYS AS (id * 2) STORED, at timestamp(3), PRIMARY KEY (part, id));
             ALTER TABLE t DROP COLUMN gone;
             CREATE TABLE late (id int PRIMARY KEY DEFERRABLE);
             CREATE TABLE root (id int PRIMARY KEY) PARTITION BY RANGE (id);
             CREATE TABLE leaf PARTITION OF root FOR VALUES FROM (0) TO (9);
             CREATE PUBLICATION {publication} FOR TABLE t, late, root WITH (publish_via_partition_root = true);
             CREATE PUBLICATION masked FOR TABLE t (id, part, mood) WHERE (id > 5)"
        ))
        .await
        .unwrap();
    let tables = published_tables(&session, publication).await.unwrap();
    let names: Vec<&str> = tables.iter().map(|table| table.name.name.as_str()).collect();
    assert_eq!(names, ["late", "root", "t"]);
    assert_eq!((tables[1].kind, tables[1].leaves.len(), tables[2].leaves.len()), ('p', 1, 0));
    let masked = published_tables(&session, "masked").await.unwrap();
    assert_eq!(masked[0].columns.clone(), Some(vec![2, 3, 5]));
    let oids: Vec<u32> = tables.iter().map(|table| table.oid).collect();
    let filters = row_filters(&*session as &tokio_postgres::Client, "masked", &oids).await.unwrap();
    assert_eq!(filters.into_iter().collect::<Vec<_>>(), [(masked[0].oid, "(id > 5)".to_owned())]);
    assert!(row_filters(&*session as &tokio_postgres::Client, publication, &oids).await.unwrap().is_empty());

    // As the host and the trigger look: types print qualified.
    let session = session::connect(&config).await.unwrap();
    let schema = async |oid: u32, publication: &str| -> Option<TableSchema> {
        table_schema(&*session as &tokio_postgres::Client, oid, publication, SnapshotId::default(), Origin::Copy)
            .await
            .unwrap()
    };
    let t = schema(tables[2].oid, publication).await.unwrap();
    let columns: Vec<String> = t
        .columns
        .iter()
        .map(|c| {
            format!(
                "{} {} {} {:?} {} {} {:?}",
                c.ordinal, c.name, c.base, c.element, c.base_typmod, c.nullable, c.key_position
            )
        })
        .collect();
    let expected = [
        "2 id int4 None -1 false Some(2)",
        "3 part int4 None -1 false Some(1)",
        "4 price numeric None 786440 false None",
        "5 mood enum None -1 true None",
        "6 many array Some(\"numeric\") 786440 true None",
        "7 fake public.int4 None -1 true None",
        "9 at timestamp None 3 true None",
    ];
    assert_eq!(columns, expected);
    assert_eq!(t.columns[3].enum_labels, ["so", "it's"]);
    assert_eq!(t.columns[3].default_expression.as_deref(), Some("'so'::public.mood"));
    assert_eq!(t.merge_key(), [3, 2]);
    let masked = schema(tables[2].oid, "masked").await.unwrap();
    assert_eq!(masked.columns.iter().map(|column| column.ordinal).collect::<Vec<_>>(), [2, 3, 5]);
    assert!(schema(tables[0].oid, publication).await.unwrap().merge_key().is_empty());
    assert!(schema(tables[0].oid, "masked").await.is_none());
    // Many at once are what each is alone.
    for publication in [publication.as_str(), "masked"] {
        let tables = published_tables(&session, publication).await.unwrap();
        let (snapshot, origin) = (SnapshotId::default(), Origin::Copy);
        let at_once = table_schemas(&*session as &tokio_postgres::Client, &tables, publication, snapshot, origin);
        let at_once = at_once.await.unwrap();
        assert_eq!(at_once.len(), tables.len());
        for table in &tables {
            assert_eq!(at_once.get(&table.oid), schema(table.oid, publication).await.as_ref());
        }
    }
    assert!(schema(1, publication).await.is_none());
}

/// A session, its database with the trigger, and a table that is published.
async fn captured() -> (SourceConfig, Session, Vec<u8>) {
    let (config, session) = Server::shared().database().await;
    trigger::install(&session, "postgres").await.unwrap();
    // Again: the key stays.
    let key = trigger::secret_key(&session).await.unwrap().unwrap();
    trigger::install(&session, "postgres").await.unwrap();
    assert_eq!(trigger::secret_key(&session).await.unwrap().as_ref(), Some(&key));
    assert_eq!(trigger::state(&session).await.unwrap(), TriggerState::Ready);
    let publication = &config.publication;
    session
        .batch_execute(&format!(
            "CREATE TABLE t (id int PRIMARY KEY, a text); CREATE TABLE other (id int);
             CREATE PUBLICATION {publication} FOR TABLE t"
        ))
        .await
        .unwrap();
    (config, session, key)
}

/// What comes as text: a letter per row, the columns of a picture.
fn outline(messages: &[(Lsn, Message)], key: &[u8], publication: &str) -> Vec<String> {
    let mut seen = Vec::new();
    for (_, message) in messages {
        match message {
            Message::Insert { new, .. } => seen.push(format!("row {}", new.len())),
            Message::Logical { prefix, content, .. } if prefix == DDL_PREFIX.as_bytes() => {
                match trigger::open_message(key, content) {
                    Ok(DdlMessage::Table { command, picture, .. }) => {
                        let id = SnapshotId::default();
                        let schema = super::catalog::schema_from_picture(&picture, publication, id, Origin::Message);
                        let names: Vec<String> = schema.unwrap().unwrap().columns.into_iter().map(|c| c.name).collect();
                        seen.push(format!("{command}: {}", names.join(" ")));
                    }
                    Ok(DdlMessage::Closing) => {}
                    Ok(other) => seen.push(format!("{other:?}")),
                    Err(error) => seen.push(error.code().to_owned()),
                }
            }
            _ => {}
        }
    }
    seen
}

#[tokio::test(flavor = "multi_thread")]
async fn a_ddl_message_comes_before_the_rows_behind_it_in_savepoints_too() {
    let (config, session, key) = captured().await;
    let (mut reader, _feedback) = stream(&config).await;
    // One row has no value for what may then not be null.
    session.batch_execute("INSERT INTO t VALUES (0); ALTER TABLE t ADD b int NOT NULL").await.unwrap_err();
    session.batch_execute("INSERT INTO t VALUES (1, 'x')").await.unwrap();
    let messages = read(&mut reader, 1).await;
    assert_eq!(outline(&messages, &key, &config.publication), ["row 2"], "the failed batch was rolled back");

    for round in 0..20 {
        session
            .batch_execute(&format!(
                "BEGIN; ALTER TABLE t ADD c{round} int; INSERT INTO t VALUES ({round}00 + 10);
                 SAVEPOINT s; ALTER TABLE t DROP c{round}; INSERT INTO t VALUES ({round}00 + 11);
                 SAVEPOINT r; ALTER TABLE t ADD lost int; INSERT INTO t VALUES ({round}00 + 12); ROLLBACK TO r;
                 ALTER TABLE t RENAME a TO b; RELEASE s; INSERT INTO t VALUES ({round}00 + 13);
                 ALTER TABLE t RENAME COLUMN b TO a; ALTER TABLE other ADD d{round} int; COMMIT"
            ))
            .await
            .unwrap();
        let messages = read(&mut reader, 1).await;
        let tag = "ALTER TABLE";
        let expected = [
            format!("{tag}: id a c{round}"),
            "row 3".to_owned(),
            format!("{tag}: id a"),
            "row 2".to_owned(),
            format!("{tag}: id b"),
            "row 2".to_owned(),
            format!("{tag}: id a"),
        ];
        assert_eq!(outline(&messages, &key, &config.publication), expected);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rewrite_is_told_unless_it_was_one_alter_table_without_using() {
    let (config, session, key) = captured().await;
    let (mut reader, _feedback) = stream(&config).await;
    for (sql, rewritten) in [
        ("ALTER TABLE t ALTER id TYPE bigint", false),
        ("ALTER TABLE t ALTER id TYPE bigint USING id * 2", true),
        ("ALTER TABLE t ADD added int DEFAULT 5", false),
        ("ALTER TABLE t ALTER a TYPE text USING upper(a), ADD more int", true),
        ("  alter table t ALTER a TYPE varchar(90);  ", false),
        ("BEGIN; ALTER TABLE t ALTER id TYPE numeric; COMMIT", true),
        ("DO $$ BEGIN ALTER TABLE t ALTER id TYPE bigint; END $$", true),
        ("ALTER TABLE t ADD last int", false),
        ("/* a comment */ ALTER TABLE t ALTER id TYPE numeric", true),
    ] {
        session.batch_execute(sql).await.unwrap();
        let told: Vec<bool> =
            read(&mut reader, 1).await.iter().filter_map(|(_, message)| tells(message, &key)).collect();
        assert_eq!(told, [rewritten], "{sql}");
    }
    // In a transaction each statement counts by itself, and one that is taken back not at all.
    for sql in [
        "BEGIN",
        "SAVEPOINT s",
        "ALTER TABLE t ALTER id TYPE bigint USING id * 2",
        "ROLLBACK TO s",
        "ALTER TABLE t ALTER id TYPE bigint",
        "COMMIT",
    ] {
        session.batch_execute(sql).await.unwrap();
    }
    let told: Vec<bool> = read(&mut reader, 1).await.iter().filter_map(|(_, message)| tells(message, &key)).collect();
    assert_eq!(told, [false]);
}

/// Whether a message of the trigger about a table tells a rewrite.
fn tells(message: &Message, key: &[u8]) -> Option<bool> {
    let Message::Logical { content, .. } = message else { return None };
    match trigger::open_message(key, content) {
        Ok(DdlMessage::Table { rewritten, .. }) => Some(rewritten),
        _ => None,
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_trigger_shows_a_table_as_the_catalog_does_whatever_the_user_has_set() {
    let (config, session, key) = captured().await;
    let (mut reader, _feedback) = stream(&config).await;
    session
        .batch_execute(
            "SET DateStyle = 'SQL, DMY'; SET IntervalStyle = sql_standard; SET TimeZone = 'Asia/Kathmandu'; SET bytea_output = escape;
             SET extra_float_digits = -15; SET quote_all_identifiers = on; SET standard_conforming_strings = off; SET lc_monetary = 'POSIX'",
        )
        .await
        .unwrap();
    session
        .batch_execute(
            r"CREATE TYPE pair AS (x int);
              ALTER TABLE t ADD d date DEFAULT '01/02/2020', ADD at timestamptz DEFAULT '01/02/2020 12:00', ADD i interval DEFAULT '-1 2:03',
                ADD f float8 DEFAULT 0.30000000000000004, ADD raw bytea DEFAULT E'\\x00ff', ADD back text DEFAULT E'a\\b', ADD p pair, ADD pt point",
        )
        .await
        .unwrap();
    let messages = read(&mut reader, 1).await;
    let captured = messages.iter().find_map(|(_, message)| match message {
        Message::Logical { prefix, content, .. } if prefix == DDL_PREFIX.as_bytes() => {
            match trigger::open_message(&key, content).unwrap() {
                DdlMessage::Table { picture, .. } => Some(picture),
                _ => None,
            }
        }
        _ => None,
    });
    let (id, publication) = (SnapshotId::default(), &config.publication);
    let captured =
        super::catalog::schema_from_picture(&captured.unwrap(), publication, id, Origin::Copy).unwrap().unwrap();
    let ours = session::connect(&config).await.unwrap();
    let looked_up = table_schema(&*ours as &tokio_postgres::Client, captured.oid, publication, id, Origin::Copy).await;
    assert_eq!(captured, looked_up.unwrap().unwrap());
    let literals: Vec<&str> =
        captured.columns.iter().filter_map(|column| Some(column.default_literal.as_ref()?.text.as_str())).collect();
    assert_eq!(literals[0], "2020-02-01");
    assert!(literals.contains(&r"a\b"), "{literals:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_forged_message_is_refused_and_skipped_commands_write_none() {
    let (config, session, key) = captured().await;
    let (mut reader, _feedback) = stream(&config).await;
    session
        .batch_execute(&format!("SELECT pg_logical_emit_message(true, '{DDL_PREFIX}', repeat('0', 64) || '{{}}')"))
        .await
        .unwrap();
    let messages = read(&mut reader, 1).await;
    assert_eq!(outline(&messages, &key, &config.publication), ["trigger.forged"]);
    session
        .batch_execute(
            "BEGIN; SET LOCAL tidegate.skip_ddl = on; ALTER TABLE t ADD c int; INSERT INTO t VALUES (1); COMMIT;
             BEGIN; CREATE TEMP TABLE t2 (id int); ALTER TABLE t2 ADD c int; CREATE UNLOGGED TABLE u (id int);
             ALTER TABLE u ADD c int; INSERT INTO t VALUES (2); COMMIT",
        )
        .await
        .unwrap();
    let messages = read(&mut reader, 2).await;
    let mut told = outline(&messages, &key, &config.publication);
    // An unlogged table is in no publication, and may just have become one.
    let left = told.iter().position(|line| line.starts_with("Left")).map(|at| told.remove(at));
    assert!(left.is_some());
    assert_eq!(told, ["row 3", "row 3"]);

    // Nobody but the owner signs, and nobody but the role reads the key.
    session
        .batch_execute("DO $$ BEGIN CREATE ROLE stranger LOGIN; EXCEPTION WHEN duplicate_object THEN END $$")
        .await
        .unwrap();
    let stranger = session::connect(&Server::shared().config("stranger", &config.database, "x")).await.unwrap();
    assert!(stranger.batch_execute("SELECT tidegate.emit('')").await.is_err());
    assert_eq!(trigger::secret_key(&stranger).await.unwrap_err().code(), "trigger.key-denied");
    assert_eq!(trigger::state(&stranger).await.unwrap(), TriggerState::KeyDenied);
    assert_eq!(trigger::uninstall(&stranger).await.unwrap_err().code(), "trigger.uninstall");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_command_of_the_user_never_fails_because_of_the_trigger() {
    let (config, session, key) = captured().await;
    session
        .batch_execute(
            "CREATE OR REPLACE FUNCTION tidegate.picture(oid) RETURNS jsonb LANGUAGE sql AS 'SELECT to_jsonb(1/0)'",
        )
        .await
        .unwrap();
    let (mut reader, _feedback) = stream(&config).await;
    session.batch_execute("ALTER TABLE t ADD c int").await.unwrap();
    let messages = read(&mut reader, 1).await;
    let seen = outline(&messages, &key, &config.publication);
    assert!(seen.len() == 1 && seen[0].starts_with("CaptureFailed"), "{seen:?}");
    session.batch_execute("DROP MATERIALIZED VIEW tidegate.ddl_key; ALTER TABLE t ADD d int").await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn neither_a_timeout_nor_a_locked_catalog_nor_a_lost_function_ends_a_command_and_both_are_told() {
    let (config, session, key) = captured().await;
    let holder = session::connect(&config).await.unwrap();
    let (mut reader, _feedback) = stream(&config).await;
    holder.batch_execute("BEGIN; LOCK TABLE pg_publication_rel IN ACCESS EXCLUSIVE MODE").await.unwrap();
    for sql in ["SET statement_timeout = '200ms'", "ALTER TABLE t ADD c int", "SET statement_timeout = 0"] {
        session.batch_execute(sql).await.unwrap();
    }
    session.batch_execute("ALTER TABLE t ADD d int").await.unwrap();
    holder.batch_execute("COMMIT").await.unwrap();
    session.batch_execute("ALTER TABLE t ADD e int").await.unwrap();
    let seen = outline(&read(&mut reader, 3).await, &key, &config.publication);
    assert!(seen[0].starts_with("CaptureFailed { oid: None") && seen[0].contains("statement timeout"), "{seen:?}");
    assert!(seen[1].starts_with("CaptureFailed { oid: None") && seen[1].contains("lock timeout"), "{seen:?}");
    assert_eq!(seen[2..], ["ALTER TABLE: id a c d e"]);
    session
        .batch_execute("DROP FUNCTION tidegate.tell(oid, text, boolean, boolean), tidegate.emit(text)")
        .await
        .unwrap();
    session
        .batch_execute("ALTER TABLE t ADD f int; ALTER TABLE t ALTER id TYPE bigint USING id * 2; DROP TABLE t")
        .await
        .unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_command_that_somebody_cancels_ends_also_inside_the_trigger() {
    let (config, session, _key) = captured().await;
    let holder = session::connect(&config).await.unwrap();
    holder.batch_execute("BEGIN; LOCK TABLE pg_publication_rel IN ACCESS EXCLUSIVE MODE").await.unwrap();
    session.batch_execute("SET statement_timeout = '1min'").await.unwrap();
    let pid: i32 = session.query_one("SELECT pg_backend_pid()", &[]).await.unwrap().get(0);
    let cancel = async {
        loop {
            let sql = "SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE pid = $1 AND wait_event_type = 'Lock'";
            if holder.query_opt(sql, &[&pid]).await.unwrap().is_some() {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    let (ended, ()) = tokio::join!(session.batch_execute("ALTER TABLE t ADD c int"), cancel);
    assert_eq!(ended.unwrap_err().code().unwrap().code(), "57014");
}

#[tokio::test(flavor = "multi_thread")]
async fn uninstalling_leaves_nothing_and_the_key_is_in_no_publication() {
    let (config, session) = Server::shared().database().await;
    const OBJECTS: &str = "SELECT count(*) FROM (
        SELECT oid FROM pg_class UNION ALL SELECT oid FROM pg_proc UNION ALL SELECT oid FROM pg_namespace
        UNION ALL SELECT oid FROM pg_event_trigger UNION ALL SELECT oid FROM pg_type) o";
    let count = async || session.query_one(OBJECTS, &[]).await.unwrap().get::<_, i64>(0);
    let before = count().await;
    assert_eq!(trigger::secret_key(&session).await.unwrap(), None);
    trigger::install(&session, "postgres").await.unwrap();
    session.batch_execute(&format!("CREATE PUBLICATION {} FOR ALL TABLES", config.publication)).await.unwrap();
    assert!(published_tables(&session, &config.publication).await.unwrap().is_empty());
    let row = session.query_one("SELECT count(*) FROM pg_publication_tables", &[]).await.unwrap();
    assert_eq!(row.get::<_, i64>(0), 0);
    trigger::uninstall(&session).await.unwrap();
    trigger::uninstall(&session).await.unwrap();
    assert_eq!(count().await, before);
    assert_eq!(trigger::state(&session).await.unwrap(), TriggerState::Missing);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_row_above_the_limit_is_not_read_but_told_with_its_table_its_key_and_its_size() {
    let (config, session) = Server::shared().database().await;
    session
        .batch_execute(&format!(
            "CREATE TABLE t (k text PRIMARY KEY, v text); CREATE PUBLICATION {} FOR TABLE t",
            config.publication
        ))
        .await
        .unwrap();
    let (mut reader, _feedback) = stream(&config).await;
    reader.set_message_bytes(1 << 20);
    session
        .batch_execute(
            "INSERT INTO t VALUES ('before', ''), ('large', repeat('x', 2 << 20)), ('after', '');
             UPDATE t SET v = repeat('y', 3 << 20) WHERE k = 'after'; DELETE FROM t WHERE k = 'large'",
        )
        .await
        .unwrap();
    let cell = |cell: Cell<'_>| match cell {
        Cell::Text(text) => String::from_utf8_lossy(text).into_owned(),
        other => format!("{other:?}"),
    };
    let mut told = Vec::new();
    while told.len() < 5 {
        let WalMessage::Data(data) = timeout(PATIENCE, reader.next()).await.unwrap().unwrap() else { continue };
        match pgoutput::decode(&data.body).unwrap() {
            Message::Insert { new, .. } => told.push(format!("insert {}", cell(new.cells().next().unwrap().unwrap()))),
            Message::Delete { old, .. } => {
                told.push(format!("delete {}", cell(old.tuple.cells().next().unwrap().unwrap())));
            }
            Message::Oversized { bytes, limit, beginning, .. } => {
                assert_eq!(limit, 1 << 20);
                told.push(format!("{} MiB of {}", bytes >> 20, cell(beginning.cells().next().unwrap())));
            }
            _ => {}
        }
    }
    assert_eq!(told, ["insert before", "2 MiB of large", "insert after", "3 MiB of after", "delete large"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_large_message_of_another_program_is_passed_over() {
    let (config, session) = Server::shared().database().await;
    session
        .batch_execute(&format!("CREATE TABLE t (v int); CREATE PUBLICATION {} FOR TABLE t", config.publication))
        .await
        .unwrap();
    let (mut reader, _feedback) = stream(&config).await;
    reader.set_message_bytes(1 << 20);
    session
        .batch_execute("SELECT pg_logical_emit_message(true, 'theirs', repeat('x', 5 << 20)); INSERT INTO t VALUES (1)")
        .await
        .unwrap();
    loop {
        let WalMessage::Data(data) = timeout(PATIENCE, reader.next()).await.unwrap().unwrap() else { continue };
        match pgoutput::decode(&data.body).unwrap() {
            Message::Insert { .. } => return,
            Message::Logical { .. } => panic!("it was read"),
            _ => {}
        }
    }
}
