//! What only a state on a server has to survive.

use std::io::{Read, Write};
use std::net::{Shutdown as Side, TcpListener, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::time::{Duration, Instant};

use super::super::records::{RowOp, SlotRecord, TableState};
use super::super::test_places::{Place, Server};
use super::super::{Store, tests as shared};
use super::*;
use crate::error::Exit;
use crate::position::Lsn;
use crate::scratch::{Cluster, ClusterOptions, Shutdown};

/// Longer than anything here takes on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// Waits until a query says `t`.
fn wait_for(server: &Server, what: &str, sql: &str) {
    let begun = Instant::now();
    while server.sql(sql) != "t" {
        assert!(begun.elapsed() < PATIENCE, "waiting until {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

const HELD: &str = "SELECT count(*) > 0 FROM pg_locks l JOIN pg_database d ON d.oid = l.database
    WHERE locktype = 'advisory' AND datname = current_database()";
const FREE: &str = "SELECT count(*) = 0 FROM pg_locks l JOIN pg_database d ON d.oid = l.database
    WHERE locktype = 'advisory' AND datname = current_database()";
const TERMINATE: &str =
    "SELECT count(pg_terminate_backend(l.pid)) FROM pg_locks l JOIN pg_database d ON d.oid = l.database
    WHERE locktype = 'advisory' AND datname = current_database()";

fn server(place: &Place) -> &Server {
    place.server.as_ref().unwrap()
}

/// Another machine with a copy of the state directory: the lock of ours does not reach it.
fn copy_of(place: &Place) -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    std::fs::copy(place.path().join("directory-id"), directory.path().join("directory-id")).unwrap();
    directory
}

fn open_in(place: &Place, directory: &Path) -> Result<Store> {
    Store::open_on_server(&server(place).of("shop"), directory, "shop")
}

#[test]
fn migrations_run_once_and_later_ones_run_on_an_older_state() {
    let place = Place::postgres();
    let at = server(&place).of("shop");
    let directory = Directory::identify(place.path(), "shop").unwrap();
    let later = [MIGRATIONS, &["CREATE TABLE added (id integer); INSERT INTO added VALUES (1)"]].concat();
    for migrations in [&later[..1], &later, &later] {
        drop(Postgres::open_with(at.clone(), "shop", &directory, migrations).unwrap_or_else(|error| panic!("{error}")));
        let version = server(&place).sql("SELECT value FROM tidegate_shop.meta WHERE key = 'version'");
        assert_eq!(version, migrations.len().to_string());
    }
    assert_eq!(server(&place).sql("SELECT count(*) FROM tidegate_shop.added"), "1");
    assert_eq!(Postgres::open(at.clone(), "shop", &directory).err().unwrap().code(), "state.newer");
    server(&place).sql("UPDATE tidegate_shop.meta SET value = '0' WHERE key = 'version'");
    assert_eq!(Postgres::open_read_only(at).err().unwrap().code(), "state.missing");
}

#[test]
fn a_migration_that_fails_leaves_the_state_as_it_was() {
    let place = Place::postgres();
    let at = server(&place).of("shop");
    let directory = Directory::identify(place.path(), "shop").unwrap();
    let broken = [MIGRATIONS, &["CREATE TABLE added (id integer); CREATE TABLE meta (x text)"]].concat();
    assert!(Postgres::open_with(at.clone(), "shop", &directory, &broken).is_err());
    assert_eq!(server(&place).sql("SELECT count(*) FROM pg_namespace WHERE nspname = 'tidegate_shop'"), "0");
    drop(Postgres::open(at.clone(), "shop", &directory).unwrap_or_else(|error| panic!("{error}")));
    assert!(Postgres::open_with(at.clone(), "shop", &directory, &broken).is_err());
    drop(Postgres::open(at, "shop", &directory).unwrap_or_else(|error| panic!("{error}")));
}

#[tokio::test]
async fn pipelines_in_one_database_do_not_disturb_each_other() {
    let (place, other) = (Place::postgres(), tempfile::tempdir().unwrap());
    let one = shared::store_with_table(&place).await;
    let two = Store::open_on_server(&server(&place).of("shop_2"), other.path(), "shop_2").unwrap();
    assert!(two.load().unwrap().destinations.is_empty());
    two.save_destination(shared::destination("e")).await.unwrap();
    assert_eq!(two.next_generation("d", 0).await.unwrap(), 1);
    assert_eq!(one.next_generation("d", 0).await.unwrap(), 1);
    assert_eq!(one.load().unwrap().destinations, [shared::destination("d")]);
    server(&place).sql("DROP SCHEMA tidegate_shop_2 CASCADE");
    one.save_destination(shared::destination("f")).await.unwrap();
}

#[tokio::test]
async fn a_writer_on_another_machine_is_refused_and_told_who_writes() {
    let place = Place::postgres();
    let store = shared::store_with_table(&place).await;
    let elsewhere = copy_of(&place);
    let refused = open_in(&place, elsewhere.path()).err().unwrap();
    assert_eq!((refused.code(), refused.exit_code()), ("state.in-use", Exit::Usage));
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
    let holder = format!("process {} on {} (server process", std::process::id(), host.trim());
    assert!(refused.message().contains(&holder), "{refused}");
    // It held nothing that the one who writes could miss.
    store.save_table(shared::ready_table(8)).await.unwrap();
    drop(store);
    open_in(&place, elsewhere.path()).unwrap();
}

#[tokio::test]
async fn a_directory_without_the_spool_is_refused_and_told_where_that_is() {
    let place = Place::postgres();
    drop(shared::store_with_table(&place).await);
    let other = tempfile::tempdir().unwrap();
    let refused = open_in(&place, other.path()).err().unwrap();
    assert_eq!((refused.code(), refused.exit_code()), ("state.other-directory", Exit::Usage));
    assert!(refused.message().contains(&place.path().canonicalize().unwrap().display().to_string()), "{refused}");
    assert!(refused.next_step().unwrap().contains("tidegate_shop"));
    assert_eq!(place.open().unwrap().load().unwrap().tables.len(), 1);
}

#[tokio::test]
async fn who_was_taken_over_writes_nothing_more_and_says_so() {
    let place = Place::postgres();
    let old = shared::store_with_table(&place).await;
    server(&place).sql(TERMINATE);
    wait_for(server(&place), "the lock is free", FREE);
    let elsewhere = copy_of(&place);
    let new = open_in(&place, elsewhere.path()).unwrap();
    new.save_progress(shared::progress(Some(50), vec![])).await.unwrap();

    let refused = old.save_progress(shared::progress(Some(99), vec![])).await.unwrap_err();
    assert_eq!((refused.code(), refused.is_transient()), ("state.lost", false));
    assert!(refused.message().contains(&format!("process {}", std::process::id())), "{refused}");
    assert_eq!(old.lost().await.code(), "state.lost");
    drop(new);
    // For good: also once the other has ended.
    assert_eq!(old.next_generation("d", 0).await.unwrap_err().code(), "state.lost");
    assert_eq!(old.load().unwrap_err().code(), "state.lost");
    assert_eq!(place.read().unwrap().load().unwrap().destinations[0].checkpoint, Lsn(50));
}

#[tokio::test]
async fn a_number_that_was_raised_behind_a_living_connection_stops_the_writer() {
    let place = Place::postgres();
    let store = shared::store_with_table(&place).await;
    server(&place).sql("UPDATE tidegate_shop.writer SET fence = fence + 1, host = 'elsewhere', pid = 7");
    let refused = store.save_progress(shared::progress(Some(99), vec![])).await.unwrap_err();
    assert_eq!(refused.code(), "state.lost");
    assert!(refused.message().contains("process 7 on elsewhere"), "{refused}");
    assert_eq!(place.read().unwrap().load().unwrap().destinations[0].checkpoint, Lsn(10));
}

#[test]
fn a_transaction_under_way_ends_before_another_writer_begins() {
    let place = Place::postgres();
    let at = server(&place).of("shop");
    let directory = Directory::identify(place.path(), "shop").unwrap();
    let elsewhere = copy_of(&place);
    let runtime = runtime().unwrap();
    let link = runtime.block_on(async {
        let link = Link::open(&at, false).await.unwrap();
        let claim = Claim::take(&link, &at, "shop", &directory, MIGRATIONS).await.unwrap();
        link.batch("BEGIN").await.unwrap();
        claim.check(&link).await.unwrap();
        // As if the server had given its connection up: the lock is gone first.
        link.batch("SELECT pg_advisory_unlock_all()").await.unwrap();
        link
    });
    std::thread::scope(|scope| {
        let opening = scope.spawn(|| open_in(&place, elsewhere.path()).map(drop));
        let waits = "SELECT count(*) > 0 FROM pg_stat_activity
             WHERE datname = current_database() AND wait_event_type = 'Lock'";
        wait_for(server(&place), "the new writer waits for the row", waits);
        assert!(!opening.is_finished());
        runtime.block_on(link.batch("COMMIT")).unwrap();
        opening.join().unwrap().unwrap();
    });
}

#[tokio::test]
async fn an_operation_whose_connection_is_killed_is_done_again() {
    let place = Place::postgres();
    let store = shared::store_with_table(&place).await;
    let at = server(&place).of("shop");
    // On another thread: this one's runtime is the test's.
    let (release, released) = std::sync::mpsc::channel::<()>();
    let (tell, locked) = std::sync::mpsc::channel();
    let holder = std::thread::spawn(move || {
        let runtime = runtime().unwrap();
        let link = runtime.block_on(Link::open(&at, false)).unwrap();
        runtime.block_on(link.batch("BEGIN; LOCK TABLE generations")).unwrap();
        tell.send(()).unwrap();
        let _ = released.recv();
        runtime.block_on(link.batch("COMMIT")).unwrap();
    });
    locked.recv().unwrap();
    let saving = tokio::spawn({
        let store = store.clone();
        async move { store.next_generation("d", 0).await }
    });
    tokio::task::yield_now().await;
    let waits =
        "SELECT count(*) > 0 FROM pg_locks WHERE NOT granted AND relation = 'tidegate_shop.generations'::regclass";
    wait_for(server(&place), "the operation waits", waits);
    server(&place).sql(TERMINATE);
    drop(release);
    holder.join().unwrap();
    assert_eq!(saving.await.unwrap().unwrap(), 1);
    assert_eq!(server(&place).sql("SELECT generation FROM tidegate_shop.generations"), "1");
    wait_for(server(&place), "the lock is held again", HELD);
}

/// What a proxy does to the next commit.
const PASS: u8 = 0;
const BEFORE: u8 = 1;
const AFTER: u8 = 2;

/// Stands between store and server, and cuts the connection at a commit: before the server
/// gets it, or before the store gets its answer.
struct Proxy {
    port: u16,
    cut: Arc<AtomicU8>,
}

impl Proxy {
    fn to(port: u16) -> Proxy {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let proxy = Proxy { port: listener.local_addr().unwrap().port(), cut: Arc::default() };
        let cut = proxy.cut.clone();
        std::thread::spawn(move || {
            for client in listener.incoming().map_while(std::result::Result::ok) {
                let Ok(server) = TcpStream::connect(("127.0.0.1", port)) else { return };
                let swallow = Arc::new(AtomicBool::new(false));
                let (up, down) = (client.try_clone().unwrap(), server.try_clone().unwrap());
                let (cut, swallowing) = (cut.clone(), swallow.clone());
                std::thread::spawn(move || requests(up, server, &cut, &swallowing));
                std::thread::spawn(move || answers(down, client, &swallow));
            }
        });
        proxy
    }

    /// Whether what was armed has come to pass.
    fn has_cut(&self) -> bool {
        self.cut.load(Ordering::SeqCst) == PASS
    }
}

fn requests(mut from: TcpStream, mut to: TcpStream, cut: &AtomicU8, swallow: &AtomicBool) {
    let mut buffer = vec![0; 1 << 16];
    while let Ok(read @ 1..) = from.read(&mut buffer) {
        let some = &buffer[..read];
        if some.windows(8).any(|bytes| bytes == b"; COMMIT") {
            match cut.swap(PASS, Ordering::SeqCst) {
                BEFORE => break,
                AFTER => swallow.store(true, Ordering::SeqCst),
                _ => {}
            }
        }
        if to.write_all(some).is_err() {
            break;
        }
    }
    let _ = (from.shutdown(Side::Both), to.shutdown(Side::Both));
}

fn answers(mut from: TcpStream, mut to: TcpStream, swallow: &AtomicBool) {
    let mut buffer = vec![0; 1 << 16];
    while let Ok(read @ 1..) = from.read(&mut buffer) {
        if swallow.load(Ordering::SeqCst) || to.write_all(&buffer[..read]).is_err() {
            break;
        }
    }
    let _ = (from.shutdown(Side::Both), to.shutdown(Side::Both));
}

/// Every operation that writes, each after `before`; what is there at the end.
async fn every_operation(store: &Store, before: impl Fn(&str)) -> (Loaded, Vec<QuarantinedRow>, Option<Vec<u8>>) {
    let why = |code: &str| RefusedWhy { code: code.to_owned(), message: String::new(), column: Some(1) };
    let error = TableError { code: "a.b".to_owned(), message: "m".to_owned(), next: None };
    before("save_source");
    let created = SlotRecord::Created { at: Lsn(9) };
    store.save_source(SourceRecord { slot_state: created, ..shared::source() }).await.unwrap();
    before("save_destination");
    store.save_destination(shared::destination("d")).await.unwrap();
    before("save_destination_error");
    store.save_destination_error("d", Some(error.clone())).await.unwrap();
    before("append_history");
    store.append_history(shared::schema(7, 9, 10, "a")).await.unwrap();
    before("save_tables");
    let at = |commit| Some(shared::position(commit, 1));
    let tables = (7..12).map(|oid| TableRecord { position: at(5), ..shared::ready_table(oid) });
    store.save_tables(tables.collect()).await.unwrap();
    before("save_progress");
    store.save_progress(shared::progress(Some(70), vec![(7, shared::position(60, 2))])).await.unwrap();
    before("save_members");
    store.save_members(vec![(7, "x".to_owned()), (8, "y".to_owned())]).await.unwrap();
    before("set_state");
    store.set_state("d", "k", Some(vec![0])).await.unwrap();
    before("put_quarantined");
    let needs = QuarantinedRow { needs: Some("b".to_owned()), ..shared::quarantined(7, "c", 3) };
    let rows =
        vec![shared::quarantined(7, "a", 1), shared::quarantined(7, "b", 2), needs, shared::quarantined(8, "z", 1)];
    store.put_quarantined(rows).await.unwrap();
    before("mark_quarantined");
    let table = Some("public.t".to_owned());
    let selection = QuarantineSelection { table, ..QuarantineSelection::default() };
    assert_eq!(store.mark_quarantined(selection, Mark::Retry).await.unwrap(), 4);
    before("explain_quarantined");
    let rows = vec![("a".to_owned(), shared::position(20, 1), why("c.d"))];
    store.explain_quarantined("d", 7, rows).await.unwrap();
    before("remove_quarantined");
    store.remove_quarantined("d", 7, vec![("a".to_owned(), shared::position(20, 1))]).await.unwrap();
    let row = store.get_quarantined("d", 7, vec!["c".to_owned()]).await.unwrap();
    let ids = vec![row[0].id];
    before("mark_quarantined");
    let one = QuarantineSelection { ids, ..QuarantineSelection::default() };
    assert_eq!(store.mark_quarantined(one, Mark::Drop).await.unwrap(), 1);
    before("drop_marked");
    store.drop_marked("d").await.unwrap();
    before("reset_table");
    store.reset_table("d", 8).await.unwrap();
    before("delete_table");
    store.delete_table("d", 9).await.unwrap();
    before("stop_tables");
    store.stop_tables("d", error).await.unwrap();
    let rows = store.list_quarantined(QuarantineSelection::default(), 100).unwrap();
    // Ids may skip numbers.
    let rows = rows.into_iter().map(|row| QuarantinedRow { id: 0, ..row }).collect();
    (store.load().unwrap(), rows, store.get_state("d", "k").await.unwrap())
}

#[tokio::test]
async fn a_commit_whose_answer_is_lost_and_one_that_never_came_leave_the_same() {
    let undisturbed = Place::postgres();
    let expected = every_operation(&undisturbed.open().unwrap(), |_| {}).await;
    assert_eq!(expected.0.tables.len(), 4);
    assert_eq!(expected.1.iter().map(|row| (row.ident.as_str(), row.op)).collect::<Vec<_>>(), [("b", RowOp::Upsert)]);
    assert!(expected.0.tables.iter().all(|table| table.state == TableState::Errored));
    for cut in [BEFORE, AFTER] {
        let place = Place::postgres();
        let proxy = Proxy::to(server(&place).cluster.port());
        let through =
            server(&place).url().replace(&format!(":{}/", server(&place).cluster.port()), &format!(":{}/", proxy.port));
        let at = StoreServer::parse(&through, None, "shop").unwrap();
        let store = Store::open_on_server(&at, place.path(), "shop").unwrap();
        let arm = |operation: &str| {
            assert!(proxy.has_cut(), "before {operation} no commit was cut");
            proxy.cut.store(cut, Ordering::SeqCst);
        };
        let found = every_operation(&store, arm).await;
        assert!(proxy.has_cut());
        assert_eq!(found, expected, "cut {cut}");
        let mut last = 0;
        for _ in 0..3 {
            proxy.cut.store(cut, Ordering::SeqCst);
            let next = store.next_generation("d", 0).await.unwrap();
            assert!(proxy.has_cut() && next > last, "{next} after {last}, cut {cut}");
            last = next;
        }
    }
}

#[tokio::test]
async fn a_server_that_is_away_is_waited_for_and_its_return_is_noticed() {
    let mut cluster = Cluster::start(&ClusterOptions::default()).unwrap();
    let at = StoreServer::parse(&cluster.url("postgres"), None, "shop").unwrap();
    let directory = tempfile::tempdir().unwrap();
    let store = Store::open_on_server(&at, directory.path(), "shop").unwrap();
    store.save_destination(shared::destination("d")).await.unwrap();
    for how in [Shutdown::Fast, Shutdown::Immediate] {
        cluster.halt(how).unwrap();
        let away = store.save_progress(shared::progress(Some(99), vec![])).await.unwrap_err();
        assert_eq!((away.code(), away.is_transient()), ("state.unreachable", true));
        assert_eq!(Store::open_read_only_on_server(&at).err().unwrap().code(), "state.unreachable");
        cluster.resume().unwrap();
        let begun = Instant::now();
        while let Err(error) = store.save_progress(shared::progress(Some(100), vec![])).await {
            assert!(error.is_transient() && begun.elapsed() < PATIENCE, "{error}");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
    assert_eq!(store.load().unwrap().destinations[0].checkpoint, Lsn(100));
    // A restart between two operations is not even noticed.
    cluster.halt(Shutdown::Fast).unwrap();
    cluster.resume().unwrap();
    store.save_progress(shared::progress(Some(101), vec![])).await.unwrap();
}

#[tokio::test]
async fn commits_are_durable_whatever_the_role_says_and_a_server_without_fsync_is_warned_of() {
    let place = Place::postgres();
    let at = server(&place);
    at.sql(
        "CREATE ROLE lazy SUPERUSER LOGIN; ALTER ROLE lazy SET synchronous_commit = off;
            ALTER ROLE lazy SET statement_timeout = 1; ALTER ROLE lazy SET search_path = nowhere;
            CREATE ROLE eager SUPERUSER LOGIN; ALTER ROLE eager SET synchronous_commit = remote_apply",
    );
    for (role, expected) in [("lazy", "on"), ("eager", "remote_apply")] {
        let url = at.cluster.url_as(role, None, &at.database);
        let link = Link::open(&StoreServer::parse(&url, None, "shop").unwrap(), false).await.unwrap();
        let rows =
            link.query("SELECT current_setting('synchronous_commit'), current_setting('search_path')", &[]).await;
        let rows = rows.unwrap();
        assert_eq!((rows[0].get(0), rows[0].get(1)), (expected, "tidegate_shop"));
    }
    at.sql("DROP ROLE lazy, eager");
    let warning = Store::look_at_server(&at.of("shop")).await.unwrap().unwrap();
    assert_eq!(warning.code(), "state.fsync-off");
}

#[tokio::test]
async fn each_reason_that_keeps_us_out_has_its_own_code_and_way_out() {
    let place = Place::postgres();
    let at = server(&place);
    let refused = |url: &str| {
        let server = StoreServer::parse(url, None, "shop").unwrap();
        Store::open_on_server(&server, place.path(), "shop").err().unwrap()
    };
    let code = |url: &str| {
        let error = refused(url);
        assert!(error.next_step().is_some() && !error.report().contains("[source]"), "{}", error.report());
        error.code().to_owned()
    };
    assert_eq!(code("postgres://me@127.0.0.1:1/x?sslmode=disable"), "state.unreachable");
    assert_eq!(code(&at.cluster.url("nowhere")), "state.login");
    assert_eq!(code(&at.url().replace("disable", "require")), "state.login");
    at.sql("CREATE ROLE guest LOGIN");
    let guest = at.cluster.url_as("guest", None, &at.database);
    let error = refused(&guest);
    assert_eq!(error.code(), "state.privilege");
    assert_eq!(
        error.next_step().unwrap(),
        "Run as the database's owner: CREATE SCHEMA tidegate_shop AUTHORIZATION \"guest\";"
    );
    at.sql("CREATE SCHEMA tidegate_shop AUTHORIZATION \"guest\"");
    let server = StoreServer::parse(&guest, None, "shop").unwrap();
    drop(Store::open_on_server(&server, place.path(), "shop").unwrap());
    at.sql("DROP OWNED BY guest; DROP ROLE guest");
    let latin = format!("{}_latin", at.database);
    at.sql(&format!("CREATE DATABASE {latin} ENCODING 'LATIN1' TEMPLATE template0"));
    assert_eq!(code(&at.cluster.url(&latin)), "state.server");
}
