//! A standby as the source, and what becomes of a pipeline when one is promoted.

use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU16, Ordering};

use tidegate::scratch::{Cluster, ClusterOptions, Shutdown};
use tidegate_tests::{Database, database, wait_for};

use crate::mirror::Bench;
use crate::servers::{Servers, binaries};

const TABLE: &str =
    "CREATE TABLE t (id int PRIMARY KEY, v text, big text); ALTER TABLE t ALTER COLUMN big SET STORAGE EXTERNAL;
                     INSERT INTO t SELECT n, 'copied', repeat(md5(n::text), 100) FROM generate_series(1, 200) n;
                     CREATE PUBLICATION pub FOR TABLE t";

/// A primary of the test's own, and a standby that follows it.
fn pair(major: u32, primary: &ClusterOptions, standby: &ClusterOptions) -> (Cluster, Cluster) {
    let mut primary = Cluster::start(&ClusterOptions { binaries: binaries(major), ..primary.clone() }).unwrap();
    let standby = primary.standby(standby).unwrap();
    (primary, standby)
}

/// The same database at the other server.
fn at(cluster: &Cluster, database: &Database) -> Database {
    Database { url: cluster.url(&database.name), port: cluster.port(), name: database.name.clone() }
}

fn wait_replayed(primary: &Database, standby: &Database) {
    let target = primary.sql("SELECT pg_current_wal_flush_lsn()");
    wait_for("the standby has replayed", || {
        (standby.sql(&format!("SELECT pg_last_wal_replay_lsn() >= '{target}'")) == "t").then_some(())
    });
}

/// Writes at a primary, and lets it log its open transactions, which a slot of a standby
/// waits for; until it is dropped.
struct Writing(Arc<AtomicBool>, Option<std::thread::JoinHandle<()>>);

impl Writing {
    fn of(primary: &Database) -> Writing {
        let stop = Arc::new(AtomicBool::new(false));
        let (told, primary) = (stop.clone(), Database { url: primary.url.clone(), name: String::new(), port: 0 });
        let thread = std::thread::spawn(move || {
            while !told.load(Ordering::Relaxed) {
                primary.sql("INSERT INTO t(id, v) SELECT max(id) + 1, 'meanwhile' FROM t; UPDATE t SET v = v || '.' WHERE id % 9 = 0");
                primary.sql("SELECT pg_log_standby_snapshot()");
            }
        });
        Writing(stop, Some(thread))
    }
}

impl Drop for Writing {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
        if let Some(thread) = self.1.take() {
            thread.join().unwrap();
        }
    }
}

/// Copies, streams and follows schema changes; the primary is asked for nothing.
pub fn is_a_source(servers: &Servers) {
    let (primary, standby) = pair(servers.major, &ClusterOptions::default(), &ClusterOptions::default());
    let main = database(&primary, "standby");
    main.sql(TABLE);
    let source = at(&standby, &main);
    wait_replayed(&main, &source);
    let mut bench = Bench::between(source, database(&servers.mirror, "standby"));
    // The trigger comes from the primary; at a standby that is said.
    let output = bench.pipeline.command(&["trigger", "install"]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(3) && said.contains("at the primary"), "{said}");
    let sql = bench.tidegate(&["trigger", "print"]);
    main.sql(&sql);
    wait_replayed(&main, &bench.source);
    let said = bench.tidegate(&["check"]);
    assert!(said.contains("DDL trigger: at work") && !said.contains("source.standby"), "{said}");

    let writing = Writing::of(&main);
    bench.pipeline.start();
    bench.pipeline.wait_ready();
    drop(writing);
    let slots = "SELECT count(*) FROM pg_replication_slots WHERE slot_type = 'logical'";
    assert_eq!((main.sql(slots), bench.source.sql(slots)), ("0".to_owned(), "1".to_owned()));
    let equal = |bench: &mut Bench| {
        let rows = main.rows("t");
        wait_for("the mirror is equal", || (bench.mirror.rows("t") == rows).then_some(()));
        assert!(!rows.is_empty());
    };
    main.sql("UPDATE t SET id = id + 100000 WHERE id % 3 = 0; DELETE FROM t WHERE id % 7 = 0");
    main.sql("BEGIN; ALTER TABLE t ADD COLUMN added int DEFAULT 5; INSERT INTO t(id, added) VALUES (5000, 6); COMMIT");
    equal(&mut bench);
    bench.pipeline.kill();
    main.sql("UPDATE t SET v = 'while it was dead' WHERE id % 2 = 0; ALTER TABLE t RENAME COLUMN v TO renamed");
    bench.pipeline.start();
    main.sql("INSERT INTO t(id, renamed) VALUES (5001, 'after')");
    equal(&mut bench);
    bench.assert_columns("t", "id integer, renamed text, big text, added integer");
    assert_eq!(bench.pipeline.stop(), 0);
}

/// Older ones do not decode on a standby.
pub fn is_refused(servers: &Servers) {
    let (primary, standby) = pair(servers.major, &ClusterOptions::default(), &ClusterOptions::default());
    let main = database(&primary, "refused");
    main.sql(TABLE);
    let source = at(&standby, &main);
    wait_replayed(&main, &source);
    let bench = Bench::between(source, database(&servers.mirror, "refused"));
    for command in ["run", "check"] {
        let output = bench.pipeline.command(&[command]).env("TIDEGATE_TEST_PASSWORD", "unused").output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(3), "{said}");
        assert!(said.contains("[source.standby]") && said.contains("Name the primary"), "{said}");
    }
}

/// An address that leads to another server when told so, as a name or an address of a
/// cluster does.
struct Switch {
    port: u16,
    target: Arc<AtomicU16>,
}

impl Switch {
    fn to(cluster: &Cluster) -> Switch {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let switch =
            Switch { port: listener.local_addr().unwrap().port(), target: Arc::new(AtomicU16::new(cluster.port())) };
        let target = switch.target.clone();
        // Ends with the process.
        std::thread::spawn(move || {
            for client in listener.incoming() {
                let client = client.unwrap();
                let Ok(server) = TcpStream::connect(("127.0.0.1", target.load(Ordering::Relaxed))) else { continue };
                for (mut from, mut to) in [(client.try_clone().unwrap(), server.try_clone().unwrap()), (server, client)]
                {
                    std::thread::spawn(move || {
                        // However it ends, both ends are told.
                        let _ = std::io::copy(&mut from, &mut to);
                        let _ = to.shutdown(std::net::Shutdown::Both);
                    });
                }
            }
        });
        switch
    }

    fn now_to(&self, cluster: &Cluster) {
        self.target.store(cluster.port(), Ordering::Relaxed);
    }

    fn source(&self, database: &Database) -> Database {
        let url = format!("postgres://postgres@127.0.0.1:{}/{}?sslmode=disable", self.port, database.name);
        Database { url, port: self.port, name: database.name.clone() }
    }
}

/// A pipeline from a primary that has a standby, through a switch.
struct Failover {
    primary: Cluster,
    standby: Cluster,
    switch: Switch,
    main: Database,
    bench: Bench,
}

impl Failover {
    fn new(servers: &Servers, test: &str, primary: &ClusterOptions, standby: &ClusterOptions) -> Failover {
        let (primary, standby) = pair(servers.major, primary, standby);
        let main = database(&primary, test);
        main.sql(TABLE);
        let switch = Switch::to(&primary);
        let mut bench = Bench::between(switch.source(&main), database(&servers.mirror, test));
        bench.tidegate(&["trigger", "install"]);
        bench.pipeline.start();
        bench.pipeline.wait_ready();
        Failover { primary, standby, switch, main, bench }
    }

    /// The primary is gone, the standby is the primary.
    fn promote(&mut self) {
        self.primary.halt(Shutdown::Immediate).unwrap();
        self.standby.psql("postgres", "SELECT pg_promote()").unwrap();
        self.switch.now_to(&self.standby);
        self.main = at(&self.standby, &self.main);
    }

    fn wait_synchronised(&self) {
        let slot = format!("tidegate_{}", self.main.name);
        let there = at(&self.standby, &self.main);
        // A slot is safe there once it has moved on here.
        wait_for("the slot is synchronised", || {
            self.main.sql("INSERT INTO t(id) SELECT max(id) + 1 FROM t");
            let synced = format!(
                "SELECT synced AND failover AND NOT temporary FROM pg_replication_slots WHERE slot_name = '{slot}'"
            );
            (there.sql(&synced) == "t").then_some(())
        });
    }

    fn wait_equal(&self) {
        let rows = self.main.rows("t");
        wait_for("the mirror is equal", || (self.bench.mirror.rows("t") == rows).then_some(()));
    }

    /// The host ends by itself and says this.
    fn assert_ends(&mut self, exit: i32, code: &str, named: &str) {
        assert_eq!(self.bench.pipeline.wait_end(), exit, "{}", self.bench.pipeline.log());
        let log = self.bench.pipeline.log();
        assert!(log.contains(code) && log.contains(named), "{log}");
    }
}

/// The slot is one that standbys take over, and the stream goes on at the one that is
/// promoted: nothing is lost, and nothing copied again.
pub fn is_followed(servers: &Servers) {
    let primary = ClusterOptions::default().setting("synchronized_standby_slots", "standby");
    let standby = ClusterOptions::default().setting("sync_replication_slots", "on");
    let mut failover = Failover::new(servers, "followed", &primary, &standby);
    failover.wait_synchronised();
    let there = at(&failover.standby, &failover.main);
    failover.main.sql("UPDATE t SET v = 'before' WHERE id % 2 = 0");
    wait_replayed(&failover.main, &there);
    failover.wait_equal();
    failover.promote();
    failover.main.sql("UPDATE t SET id = id + 10000 WHERE id % 3 = 0; ALTER TABLE t ADD COLUMN added int DEFAULT 7; INSERT INTO t(id) VALUES (-1)");
    failover.wait_equal();
    let log = failover.bench.pipeline.log();
    assert!(log.contains("promoted standby that has all"), "{log}");
    // From then on it is the source, after a restart too.
    failover.bench.pipeline.kill();
    failover.main.sql("DELETE FROM t WHERE id % 5 = 0");
    failover.bench.pipeline.start();
    failover.wait_equal();
    assert_eq!(failover.bench.pipeline.stop(), 0);
}

/// The host is down while its primary is lost: its next start finds the promoted standby
/// and goes on there, as a running one does.
pub fn is_followed_after_a_restart(servers: &Servers) {
    let primary = ClusterOptions::default().setting("synchronized_standby_slots", "standby");
    let standby = ClusterOptions::default().setting("sync_replication_slots", "on");
    let mut failover = Failover::new(servers, "followed_down", &primary, &standby);
    failover.wait_synchronised();
    failover.main.sql("UPDATE t SET v = 'before' WHERE id % 2 = 0");
    failover.wait_equal();
    failover.bench.pipeline.kill();
    failover.main.sql("UPDATE t SET v = 'never read there' WHERE id % 5 = 0");
    wait_replayed(&failover.main, &at(&failover.standby, &failover.main));
    failover.promote();
    failover.main.sql("UPDATE t SET id = id + 10000 WHERE id % 3 = 0; INSERT INTO t(id) VALUES (-1)");
    failover.bench.pipeline.start();
    failover.wait_equal();
    let log = failover.bench.pipeline.log();
    assert!(log.contains("promoted standby that has all") && !log.contains("copied again"), "{log}");
    assert_eq!(failover.bench.pipeline.stop(), 0);
    failover.main.sql("DELETE FROM t WHERE id % 5 = 0");
    failover.bench.pipeline.start();
    failover.wait_equal();
}

/// A start does not take up a promoted standby that lacks what the mirror has.
pub fn is_refused_at_a_start_where_it_lacks_changes(servers: &Servers) {
    let mut failover = Failover::new(servers, "behind_down", &ClusterOptions::default(), &ClusterOptions::default());
    failover.standby.halt(Shutdown::Fast).unwrap();
    failover.main.sql("UPDATE t SET v = 'lost' WHERE id % 2 = 0");
    failover.wait_equal();
    assert_eq!(failover.bench.pipeline.stop(), 0);
    failover.primary.halt(Shutdown::Immediate).unwrap();
    failover.standby.resume().unwrap();
    failover.promote();
    failover.main.sql("INSERT INTO t(id) VALUES (-1)");
    failover.bench.pipeline.start();
    failover.assert_ends(3, "source.promoted", "new state directory");
}

/// A slot that the standby does not have.
pub fn needs_the_slot(servers: &Servers) {
    let mut failover = Failover::new(servers, "no_slot", &ClusterOptions::default(), &ClusterOptions::default());
    let there = at(&failover.standby, &failover.main);
    failover.main.sql("UPDATE t SET v = 'before' WHERE id % 2 = 0");
    failover.wait_equal();
    // What comes after the last change moves the stream, too.
    wait_replayed(&failover.main, &there);
    failover.promote();
    failover.main.sql("INSERT INTO t(id) VALUES (-1)");
    failover.assert_ends(1, "slot.missing", "resync all tables");
}

/// A standby that was behind: the mirror has what the new primary never had.
pub fn is_refused_where_it_lacks_changes(servers: &Servers) {
    let mut failover = Failover::new(servers, "behind", &ClusterOptions::default(), &ClusterOptions::default());
    failover.standby.halt(Shutdown::Fast).unwrap();
    failover.main.sql("UPDATE t SET v = 'lost' WHERE id % 2 = 0");
    failover.wait_equal();
    failover.primary.halt(Shutdown::Immediate).unwrap();
    failover.standby.resume().unwrap();
    failover.promote();
    failover.main.sql("INSERT INTO t(id) VALUES (-1)");
    failover.assert_ends(3, "source.promoted", "new state directory");
    assert_eq!(failover.bench.mirror.sql("SELECT count(*) FROM t WHERE id = -1"), "0");
}
