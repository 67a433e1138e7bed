//! The state in a PostgreSQL server.

use tidegate::scratch::{Cluster, ClusterOptions, Shutdown};
use tidegate_tests::{Database, Pipeline, database, mirror, postgres_destination, source, tidegate, wait_for};

/// A source and a mirror with a pipeline between them, whose state is elsewhere.
struct Bench {
    source: Database,
    mirror: Database,
    pipeline: Pipeline,
}

fn bench(test: &str, store: &Cluster) -> Bench {
    let source = database(source(), test);
    let mirror = database(mirror(), test);
    source.sql(
        "CREATE TABLE t (id bigserial PRIMARY KEY, v text, n int DEFAULT 0);
         INSERT INTO t(v) SELECT 'row ' || n FROM generate_series(1, 20000) n",
    );
    source.sql("CREATE PUBLICATION pub FOR ALL TABLES");
    let pipeline = Pipeline::new(&source, &postgres_destination("mirror", &mirror));
    let file = pipeline.directory().join("tidegate.toml");
    let config = std::fs::read_to_string(&file).unwrap();
    let state = format!("state = \"state\"\nstore = \"{}\"", store.url("postgres"));
    std::fs::write(&file, config.replace("state = \"state\"", &state)).unwrap();
    Bench { source, mirror, pipeline }
}

const WORK: &str = "INSERT INTO t(v) SELECT 'more' FROM generate_series(1, 300);
    UPDATE t SET n = n + 1 WHERE id % 17 = 0;
    DELETE FROM t WHERE id % 101 = 0;
    UPDATE t SET id = -id WHERE id % 997 = 0";

impl Bench {
    fn assert_equal(&mut self) {
        self.pipeline.wait_caught_up(&self.source);
        assert_eq!(self.source.rows("t"), self.mirror.rows("t"), "{}", self.pipeline.log());
    }
}

fn store() -> Cluster {
    Cluster::start(&ClusterOptions::default()).unwrap()
}

#[test]
fn a_host_whose_state_is_on_a_server_is_killed_again_and_again_and_ends_equal() {
    let store = store();
    let mut bench = bench("store_killed", &store);
    for round in 0..8_u64 {
        bench.pipeline.start();
        bench.source.sql(WORK);
        if round == 4 {
            bench.source.sql("ALTER TABLE t ADD COLUMN added text DEFAULT 'later'");
        }
        bench.source.sql(WORK);
        // Different places to die at, not a condition that is waited for.
        std::thread::sleep(std::time::Duration::from_millis(200 * round));
        bench.pipeline.kill();
    }
    bench.pipeline.start();
    bench.pipeline.wait_ready();
    bench.assert_equal();
    let schema = format!("tidegate_{}", bench.source.name);
    let kept = format!("SELECT count(*) FROM {schema}.history WHERE table_schema LIKE '%added%'");
    assert_ne!(store.psql("postgres", &kept).unwrap(), "0");
    assert!(!bench.pipeline.directory().join("state/state.db").exists());
    assert_eq!(bench.pipeline.stop(), 0);
    // The state alone says where it left off.
    let status = bench.pipeline.status().unwrap();
    assert_eq!(status.pid, None);
    assert!(status.all_ready() && status.destinations[0].checkpoint.is_some(), "{status:#?}");
}

#[test]
fn a_state_whose_server_restarts_under_load_loses_nothing_and_the_host_waits_for_it() {
    let mut store = store();
    let mut bench = bench("store_restarted", &store);
    bench.pipeline.start();
    bench.pipeline.wait_ready();
    for how in [Shutdown::Fast, Shutdown::Immediate] {
        bench.source.sql(WORK);
        let before = bench.pipeline.log().len();
        store.halt(how).unwrap();
        bench.source.sql(WORK);
        wait_for("the host notices", || bench.pipeline.log()[before..].contains("state.unreachable").then_some(()));
        bench.source.sql(WORK);
        assert_eq!(bench.pipeline.ended(), None, "{}", bench.pipeline.log());
        store.resume().unwrap();
        bench.source.sql(WORK);
        bench.assert_equal();
    }
    assert_eq!(bench.pipeline.stop(), 0);
}

#[test]
fn a_host_that_another_takes_over_from_ends_and_the_ends_are_equal() {
    let store = store();
    let mut bench = bench("store_taken", &store);
    bench.pipeline.start();
    bench.pipeline.wait_ready();
    let schema = format!("tidegate_{}", bench.source.name);
    // What somebody does who takes over: the lock is lost, and the number raised.
    let locks = "SELECT count(pg_terminate_backend(pid)) FROM pg_locks WHERE locktype = 'advisory'";
    let taken =
        format!("BEGIN; UPDATE {schema}.writer SET fence = fence + 1, host = 'elsewhere', pid = 7; {locks}; COMMIT");
    store.psql("postgres", &taken).unwrap();
    bench.source.sql(WORK);
    assert_eq!(bench.pipeline.wait_end(), 1, "{}", bench.pipeline.log());
    let log = bench.pipeline.log();
    assert!(log.contains("error[state.lost]: process 7 on elsewhere"), "{log}");
    bench.pipeline.start();
    bench.assert_equal();
}

#[test]
fn a_second_host_is_refused_and_commands_beside_a_running_one_read_the_state() {
    let store = store();
    let mut bench = bench("store_second", &store);
    bench.pipeline.start();
    bench.pipeline.wait_ready();
    // As on another machine: another directory, the same state.
    let elsewhere = tempfile::tempdir().unwrap();
    let file = elsewhere.path().join("tidegate.toml");
    std::fs::copy(bench.pipeline.directory().join("tidegate.toml"), &file).unwrap();
    let run = |arguments: &[&str]| {
        let mut command = std::process::Command::new(tidegate());
        let output =
            command.args(arguments).arg("--config").arg(&file).env("TIDEGATE_TEST_PASSWORD", "unused").output();
        let output = output.unwrap();
        let both = [output.stdout, output.stderr].concat();
        (output.status.code(), String::from_utf8(both).unwrap())
    };
    let (code, said) = run(&["run"]);
    assert!(code == Some(2) && said.contains("error[state.in-use]") && said.contains("server process"), "{said}");
    let (code, said) = run(&["resync", "mirror", "public.t"]);
    assert!(code == Some(2) && said.contains("error[state.in-use]"), "{said}");
    let (code, said) = run(&["status"]);
    assert!(code == Some(0) && said.contains("public.t") && said.contains("ready"), "{said}");
    let (code, said) = run(&["quarantine", "list"]);
    assert!(code == Some(0) && said.contains("no rows are in quarantine"), "{said}");
    let (code, said) = run(&["check"]);
    assert!(code == Some(0) && said.contains("ok   state: server: schema tidegate_store_second"), "{said}");
    assert!(said.contains("[state.fsync-off]"), "{said}");
    bench.source.sql(WORK);
    bench.assert_equal();
    assert_eq!(bench.pipeline.stop(), 0);
    let (code, said) = run(&["run"]);
    assert!(code == Some(2) && said.contains("error[state.other-directory]"), "{said}");
}
