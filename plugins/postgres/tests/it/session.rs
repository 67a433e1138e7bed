//! Connecting, logging in, fencing, preflight.

use tidegate_sdk::model::{FailureClass, FailureScope};

use crate::support::rows::*;
use crate::support::{database, native, open, server, settings, try_open};

#[test]
fn the_session_does_not_depend_on_the_settings_of_database_and_role() {
    let db = database("pins");
    server().sql("postgres", "CREATE ROLE odd LOGIN SUPERUSER PASSWORD 'odd'");
    server().sql("postgres", "ALTER DATABASE pins SET datestyle = 'SQL, DMY'; ALTER DATABASE pins SET lock_timeout = 1; ALTER DATABASE pins SET default_transaction_read_only = on");
    server().sql("postgres", "ALTER ROLE odd SET standard_conforming_strings = off; ALTER ROLE odd SET timezone = 'Asia/Tokyo'; ALTER ROLE odd SET search_path = nowhere");
    let native = native();
    *native.password.borrow_mut() = "odd".to_owned();
    let settings = postgres::settings::Settings { user: "odd".to_owned(), ..settings(&db) };
    let mut mirror = try_open(native, settings, 1).unwrap();
    let t = table(1, "t", &[1], &["id:int4", "at:timestamptz?", "note:text?"]);
    mirror.begin_copy(&t, "r").unwrap();
    mirror.write_group(&group(1, vec![copied(&t, "r", "b", &[&[V("1"), V("1000000"), V("a\\b'c")]])])).unwrap();
    mirror.finish_copy(&t, "r", at(1_000, 0)).unwrap();
    mirror
        .write_group(&group(2, vec![merged(&t, Some(at(1_001, 0)), &[&[V("2"), V("2000000"), V("\\'")]], &[], &[])]))
        .unwrap();
    assert_eq!(
        server().sql(&db, "SET timezone = 'UTC'; SET datestyle = 'ISO'; SELECT * FROM t ORDER BY 1"),
        "1|1970-01-01 00:00:01+00|a\\b'c\n2|1970-01-01 00:00:02+00|\\'"
    );
}

#[test]
fn no_timeout_of_database_or_role_ends_a_long_transaction() {
    let db = database("timeouts");
    let t = table(1, "t", &[1], &["id:int4"]);
    let (mut made, _) = open(&db, 1);
    made.begin_copy(&t, "r").unwrap();
    made.finish_copy(&t, "r", at(1_000, 0)).unwrap();
    drop(made);
    let slow = "CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN PERFORM pg_sleep(1.2); RETURN NEW; END';
        CREATE TRIGGER slow BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION slow(); ALTER TABLE t ENABLE ALWAYS TRIGGER slow";
    server().sql(&db, slow);
    let names = "'statement_timeout', 'idle_in_transaction_session_timeout', 'transaction_timeout'";
    let known = server().sql(&db, &format!("SELECT name FROM pg_settings WHERE name IN ({names})"));
    for name in known.lines() {
        server().sql(&db, &format!("ALTER DATABASE timeouts SET {name} = '500ms'; ALTER ROLE admin IN DATABASE timeouts SET {name} = '500ms'"));
    }
    let (mut mirror, _) = open(&db, 2);
    mirror.attach_table(&t).unwrap();
    mirror.write_group(&group(1, vec![merged(&t, Some(at(1_001, 0)), &[&[V("1")]], &[], &[])])).unwrap();
    assert_eq!(server().sql(&db, "SELECT count(*) FROM t"), "1");
}

#[test]
fn a_wrong_password_is_permanent_and_is_not_shown() {
    let db = database("wrong_password");
    let native = native();
    *native.password.borrow_mut() = "hunter2".to_owned();
    let failure = try_open(native, settings(&db), 1).err().unwrap();
    assert_eq!((failure.code.as_str(), failure.class), ("postgres.authentication", FailureClass::Permanent));
    assert!(!failure.message.contains("hunter2"), "{}", failure.message);
}

#[test]
fn a_role_with_an_md5_password_can_log_in() {
    let db = database("md5_login");
    server().sql("postgres", "SET password_encryption = md5; CREATE ROLE old LOGIN SUPERUSER PASSWORD 'old'");
    let data = server().sql("postgres", "SHOW hba_file");
    let hba = std::fs::read_to_string(&data).unwrap();
    std::fs::write(&data, format!("host md5_login old 127.0.0.1/32 md5\n{hba}")).unwrap();
    server().sql("postgres", "SELECT pg_reload_conf()");
    let native = native();
    *native.password.borrow_mut() = "old".to_owned();
    let settings = postgres::settings::Settings { user: "old".to_owned(), ..settings(&db) };
    // The server reads its file again when it gets to it; that is bounded here.
    let end = std::time::Instant::now() + std::time::Duration::from_secs(10);
    while let Err(failure) = try_open(native.clone(), settings.clone(), 1) {
        assert!(std::time::Instant::now() < end, "{}", failure.message);
    }
}

#[test]
fn a_database_that_does_not_exist_is_named() {
    let failure = try_open(native(), settings("no_such_database"), 1).err().unwrap();
    assert_eq!(failure.code, "postgres.no-database");
    assert!(failure.message.contains("no_such_database"), "{}", failure.message);
}

#[test]
fn a_server_that_is_away_is_transient() {
    let settings = postgres::settings::Settings { port: 1, ..settings("postgres") };
    let failure = try_open(native(), settings, 1).err().unwrap();
    assert_eq!((failure.code.as_str(), failure.class), ("postgres.connection", FailureClass::Transient));
}

#[test]
fn a_server_without_tls_is_refused_unless_told_otherwise() {
    let settings =
        postgres::settings::Settings { sslmode: postgres::settings::SslMode::VerifyFull, ..settings("postgres") };
    let failure = try_open(native(), settings, 1).err().unwrap();
    assert_eq!((failure.code.as_str(), failure.class), ("postgres.tls", FailureClass::Permanent));
    assert!(failure.message.contains("does not speak TLS"), "{}", failure.message);
}

#[test]
fn two_lanes_that_open_at_once_both_find_the_metadata() {
    let db = database("two_lanes");
    let open = |lane: u32| {
        let db = db.clone();
        std::thread::spawn(move || {
            let identity = postgres::mirror::Identity { lane, ..crate::support::identity(1) };
            postgres::mirror::Mirror::open(native(), settings(&db), &identity)
                .map(|_| ())
                .map_err(|failure| failure.message)
        })
    };
    let lanes: Vec<_> = (0..6).map(open).collect();
    for lane in lanes {
        lane.join().unwrap().unwrap();
    }
    assert_eq!(server().sql(&db, "SELECT count(*) FROM tidegate.lane"), "6");
}

#[test]
fn an_earlier_generation_cannot_open_and_cannot_write() {
    let db = database("fencing");
    let t = table(1, "t", &[1], &["id:int4"]);
    let (mut old, _) = open(&db, 5);
    old.begin_copy(&t, "r").unwrap();
    old.finish_copy(&t, "r", at(1_000, 0)).unwrap();
    let (mut new, _) = open(&db, 6);
    assert_eq!(new.attach_table(&t).unwrap(), Some(at(1_000, 0)));
    let batch = || vec![merged(&t, Some(at(1_001, 0)), &[&[V("1")]], &[], &[])];
    assert_eq!(old.write_group(&group(1, batch())).unwrap_err().code, "fenced");
    assert_eq!(server().sql(&db, "SELECT count(*) FROM t"), "0");
    assert_eq!(try_open(native(), settings(&db), 5).err().unwrap().code, "fenced");
    new.write_group(&group(1, batch())).unwrap();
    assert_eq!(server().sql(&db, "SELECT count(*) FROM t"), "1");
}

#[test]
fn a_table_that_another_lane_attached_since_is_not_written() {
    let db = database("lane_change");
    let t = table(1, "t", &[1], &["id:int4"]);
    let (mut first, _) = open(&db, 5);
    first.begin_copy(&t, "r").unwrap();
    first.finish_copy(&t, "r", at(1_000, 0)).unwrap();
    let identity = postgres::mirror::Identity { lane: 1, ..crate::support::identity(1) };
    let mut second = postgres::mirror::Mirror::open(native(), settings(&db), &identity).unwrap();
    second.attach_table(&t).unwrap();
    let failure =
        first.write_group(&group(1, vec![merged(&t, Some(at(1_001, 0)), &[&[V("1")]], &[], &[])])).unwrap_err();
    assert_eq!((failure.code.as_str(), failure.scope), ("fenced", FailureScope::Table));
}

#[test]
fn what_an_earlier_instance_left_open_is_ended_by_its_successor() {
    let db = database("left_open");
    let t = table(1, "t", &[1], &["id:int4"]);
    let (mut old, faults) = open(&db, 1);
    old.begin_copy(&t, "r").unwrap();
    old.finish_copy(&t, "r", at(1_000, 0)).unwrap();
    // It blocks on a lock in the middle of its transaction, with its lane's row locked.
    let blocker = std::thread::spawn({
        let db = db.clone();
        move || server().sql(&db, "BEGIN; LOCK TABLE t; SELECT pg_sleep(4); COMMIT")
    });
    while server().sql(
        &db,
        "SELECT count(*) FROM pg_locks WHERE relation = 't'::regclass AND granted AND mode = 'AccessExclusiveLock'",
    ) == "0"
    {
        std::thread::yield_now();
    }
    drop(faults);
    let successor = std::thread::spawn({
        let db = db.clone();
        move || {
            while server().sql(&db, "SELECT count(*) FROM pg_locks WHERE relation = 't'::regclass AND NOT granted")
                == "0"
            {
                std::thread::yield_now();
            }
            try_open(native(), settings(&db), 2).map(|_| ()).map_err(|failure| failure.message)
        }
    });
    let failure = old.write_group(&group(1, vec![merged(&t, Some(at(1_001, 0)), &[&[V("1")]], &[], &[])])).unwrap_err();
    assert_eq!(failure.class, FailureClass::Transient, "{}", failure.message);
    successor.join().unwrap().unwrap();
    blocker.join().unwrap();
    assert_eq!(server().sql(&db, "SELECT count(*) FROM t"), "0");
}

#[test]
fn a_role_without_superuser_mirrors_too() {
    let db = database("plain_role");
    server().sql("postgres", "CREATE ROLE plain LOGIN PASSWORD 'plain'; GRANT CREATE ON DATABASE plain_role TO plain");
    let native = native();
    *native.password.borrow_mut() = "plain".to_owned();
    let plain =
        postgres::settings::Settings { user: "plain".to_owned(), schema: Some("mirror".to_owned()), ..settings(&db) };
    let mut mirror = try_open(native.clone(), plain.clone(), 1).unwrap();
    let t = table(1, "t", &[1], &["id:int4"]);
    assert_eq!(mirror.preflight(std::slice::from_ref(&t)).unwrap(), []);
    mirror.begin_copy(&t, "r").unwrap();
    mirror.finish_copy(&t, "r", at(1, 0)).unwrap();
    let many: Vec<[C; 1]> = ["1", "2", "3"].map(|id| [V(id)]).to_vec();
    let many: Vec<&[C]> = many.iter().map(|row| &row[..]).collect();
    mirror.write_group(&group(1, vec![merged(&t, Some(at(2, 0)), &many, &[], &[])])).unwrap();
    assert_eq!(server().sql(&db, "SELECT count(*) FROM mirror.t"), "3");
    let required = postgres::settings::Settings { replica_role: postgres::settings::ReplicaRole::Require, ..plain };
    let failure = try_open(native, required, 2).err().unwrap();
    assert!(failure.message.contains("replica_role"), "{}", failure.message);
}

#[test]
fn preflight_names_what_would_not_work() {
    let db = database("preflight");
    server().sql(&db, "CREATE TABLE taken (id int PRIMARY KEY, other text); CREATE TABLE full_one (id int PRIMARY KEY); INSERT INTO full_one VALUES (1); CREATE VIEW seen AS SELECT 1 AS id");
    let (mut mirror, _) = open(&db, 1);
    let mut elsewhere = table(7, "elsewhere", &[1], &["id:int4"]);
    elsewhere.target.name = "fine".to_owned();
    let changes = tidegate_sdk::model::Table { mode: "changes".to_owned(), ..table(8, "log", &[1], &["id:int4"]) };
    let tables = [
        table(1, "taken", &[1], &["id:int4", "note:text?"]),
        table(2, "full_one", &[1], &["id:int4"]),
        table(3, "seen", &[1], &["id:int4"]),
        table(4, "keyless", &[], &["id:int4"]),
        table(5, "fine", &[1], &["id:int4"]),
        table(6, "moods", &[1], &["id:int4", "mood:enum?"]),
        elsewhere,
        changes,
    ];
    let notices = mirror.preflight(&tables).unwrap();
    let short: Vec<(&str, u32, &str)> =
        notices.iter().map(|notice| (notice.level.as_str(), notice.table_id.unwrap(), notice.code.as_str())).collect();
    assert_eq!(
        short,
        [
            ("error", 1, "postgres.foreign-table"),
            ("error", 2, "postgres.foreign-table"),
            ("error", 3, "postgres.not-a-table"),
            ("error", 4, "postgres.no-key"),
            ("info", 6, "postgres.kept-as-text"),
            ("error", 7, "name-collision"),
            ("error", 8, "unsupported"),
        ]
    );
    assert!(
        notices[0].message.contains("other text") && notices[0].message.contains("note text"),
        "{}",
        notices[0].message
    );
}
