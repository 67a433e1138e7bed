//! A destination that does not keep up harms neither the others nor the source (P9).

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use tidegate::position::Lsn;
use tidegate_tests::{Database, Pipeline, database, mirror, postgres_destination, source, wait_for};

/// Stands before a server, and can take it away.
struct Gate {
    port: u16,
    open: Arc<AtomicBool>,
    connections: Arc<Mutex<Vec<TcpStream>>>,
}

impl Gate {
    fn before(server: u16) -> Gate {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let (open, connections) = (Arc::new(AtomicBool::new(true)), Arc::new(Mutex::new(Vec::new())));
        let gate = Gate { port, open: open.clone(), connections: connections.clone() };
        std::thread::spawn(move || {
            for client in listener.incoming().flatten() {
                if !open.load(Ordering::SeqCst) {
                    continue;
                }
                let Ok(there) = TcpStream::connect(("127.0.0.1", server)) else { continue };
                let both = [client.try_clone().unwrap(), there.try_clone().unwrap()];
                connections.lock().unwrap().extend(both);
                pass(client.try_clone().unwrap(), there.try_clone().unwrap());
                pass(there, client);
            }
        });
        gate
    }

    fn close(&self) {
        self.open.store(false, Ordering::SeqCst);
        for connection in self.connections.lock().unwrap().drain(..) {
            let _ = connection.shutdown(Shutdown::Both);
        }
    }

    fn open(&self) {
        self.open.store(true, Ordering::SeqCst);
    }
}

fn pass(mut from: TcpStream, mut to: TcpStream) {
    std::thread::spawn(move || {
        let mut buffer = vec![0; 65536];
        while let Ok(read) = from.read(&mut buffer) {
            if read == 0 || to.write_all(&buffer[..read]).is_err() {
                break;
            }
        }
        let _ = to.shutdown(Shutdown::Both);
    });
}

struct Bench {
    source: Database,
    gate: Gate,
    mirrors: Vec<(&'static str, Database)>,
    pipeline: Pipeline,
}

/// Destinations `good`, where wanted, and `gated`, which is behind a gate.
fn bench(test: &str, good: bool) -> Bench {
    bench_with(test, good, "", "")
}

/// The same with lines for `[pipeline]` and for `gated`.
fn bench_with(test: &str, good: bool, pipeline_lines: &str, gated_lines: &str) -> Bench {
    let source = database(source(), test);
    source.sql(
        "CREATE TABLE t (id int PRIMARY KEY, v text); CREATE TABLE small (id int PRIMARY KEY, v text);
         INSERT INTO t SELECT n, 'old' FROM generate_series(1, 1000) n; CREATE PUBLICATION pub FOR ALL TABLES",
    );
    let gated = database(mirror(), &format!("{test}_gated"));
    let gate = Gate::before(gated.port);
    let through = Database { url: gated.url.clone(), port: gate.port, name: gated.name.clone() };
    let mut destinations = postgres_destination("gated", &through)
        .replace("mode = \"merge\"\n", &format!("mode = \"merge\"\n{gated_lines}\n"));
    let mut mirrors = vec![("gated", gated)];
    if good {
        let mirror = database(mirror(), &format!("{test}_good"));
        destinations.push_str(&postgres_destination("good", &mirror));
        mirrors.push(("good", mirror));
    }
    let mut pipeline = Pipeline::new(&source, &destinations);
    let path = pipeline.directory().join("tidegate.toml");
    let config = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, config.replace("state = \"state\"\n", &format!("state = \"state\"\n{pipeline_lines}\n")))
        .unwrap();
    pipeline.start();
    pipeline.wait_ready();
    Bench { source, gate, mirrors, pipeline }
}

impl Bench {
    /// About 20 MB of changes in four transactions.
    fn write(&self) {
        for round in 0..4 {
            self.source.sql(&format!(
                "INSERT INTO t SELECT n, repeat(md5(n::text || '{round}'), 30) FROM generate_series(1, 5000) n
                 ON CONFLICT (id) DO UPDATE SET v = excluded.v;
                 INSERT INTO small SELECT coalesce(max(id), 0) + 1, 'round {round}' FROM small"
            ));
        }
    }

    fn end(&self) -> Lsn {
        self.source.sql("SELECT pg_current_wal_insert_lsn()").parse().unwrap()
    }

    fn confirmed(&self) -> Lsn {
        let sql = format!(
            "SELECT confirmed_flush_lsn FROM pg_replication_slots WHERE slot_name = 'tidegate_{}'",
            self.source.name
        );
        self.source.sql(&sql).parse().unwrap()
    }

    fn wait_confirmed(&self, at: Lsn) {
        wait_for("the slot is confirmed", || {
            // Nothing is written otherwise, and an idle checkpoint waits for its turn.
            self.source.sql("SELECT pg_logical_emit_message(true, 'tidegate-test', repeat('x', 100000))");
            (self.confirmed() >= at).then_some(())
        });
    }

    fn assert_equal(&mut self) {
        self.pipeline.wait_caught_up(&self.source);
        for (name, mirror) in &self.mirrors {
            for table in ["t", "small"] {
                // A checkpoint passes what is in the spool.
                let what = format!("{table} of {name} is equal");
                wait_for(&what, || (self.source.rows(table) == mirror.rows(table)).then_some(()));
            }
        }
    }
}

#[test]
fn a_destination_that_is_away_is_spooled_and_neither_the_other_nor_the_slot_waits() {
    let mut bench = bench("away", true);
    bench.gate.close();
    // Far more than its queue holds.
    for _ in 0..6 {
        bench.write();
    }
    let end = bench.end();
    wait_for("the other one has everything", || {
        (bench.source.rows("small") == bench.mirrors[1].1.rows("small")).then_some(())
    });
    bench.wait_confirmed(end);
    assert!(bench.mirrors[0].1.rows("small") != bench.source.rows("small"));
    bench.gate.open();
    bench.assert_equal();
    assert!(bench.pipeline.log().contains("its changes are spooled"), "{}", bench.pipeline.log());
    bench.write();
    bench.assert_equal();
}

#[test]
fn a_host_killed_while_its_only_destination_is_away_loses_nothing_of_what_the_source_forgot() {
    let mut bench = bench("awaykill", false);
    bench.gate.close();
    for _ in 0..6 {
        bench.write();
    }
    bench.wait_confirmed(bench.end());
    bench.pipeline.kill();
    bench.write();
    bench.pipeline.start();
    bench.write();
    bench.gate.open();
    bench.assert_equal();
    assert_eq!(bench.pipeline.stop(), 0);
}

#[test]
fn at_the_spools_limit_all_wait_and_are_told_for_whom_and_go_on_by_themselves() {
    let mut bench = bench_with("full", true, "spool_bytes = 67108864", "");
    bench.gate.close();
    for _ in 0..6 {
        bench.write();
    }
    let status = bench.pipeline.wait_status("the stream waits for room", |status| {
        status.spool.as_ref().is_some_and(|spool| spool.waiting.is_some())
    });
    let spool = status.spool.unwrap();
    assert!(spool.bytes <= spool.limit_bytes + (8 << 20), "{spool:?}");
    let waiting = spool.waiting.unwrap();
    assert!(waiting.contains("gated") && !waiting.contains("good"), "{waiting}");
    for mark in ["50 %", "80 %"] {
        wait_for("it is told how full it is", || {
            bench.pipeline.log().contains(&format!("filled to more than {mark}")).then_some(())
        });
    }
    bench.gate.open();
    bench.assert_equal();
    assert_eq!(bench.pipeline.stop(), 0);
}

#[test]
fn a_destination_that_agreed_to_it_is_detached_at_the_spools_limit_and_the_others_go_on() {
    let mut bench = bench_with("detach", true, "spool_bytes = 67108864", "spool_full = \"detach\"");
    bench.gate.close();
    for _ in 0..6 {
        bench.write();
    }
    wait_for("the other one has everything", || {
        (bench.source.rows("small") == bench.mirrors[1].1.rows("small")).then_some(())
    });
    bench.wait_confirmed(bench.end());
    // What it is told survives a crash, although it is away.
    bench.pipeline.kill();
    bench.pipeline.start();
    let status = bench.pipeline.wait_status("its tables have stopped", |status| {
        let gated = status.destinations.iter().find(|known| known.name == "gated");
        gated.is_some_and(|gated| !gated.tables.is_empty() && gated.tables.iter().all(|table| table.error.is_some()))
    });
    let gated = status.destinations.iter().find(|known| known.name == "gated").unwrap();
    assert_eq!(gated.tables[0].error.as_ref().unwrap().code, "destination.detached");
    bench.gate.open();
    for table in ["public.t", "public.small"] {
        let output = bench.pipeline.command(&["resync", "gated", table]).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
    bench.pipeline.wait_ready();
    bench.write();
    bench.assert_equal();
}
