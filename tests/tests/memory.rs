//! The memory budget: what is large passes within it, or is refused by name, and what it
//! belongs to stops alone.

use std::io::Write;
use std::process::{Child, Command, Stdio};

use tidegate::status::{StatusError, StatusReport, TableStatus};
use tidegate::store::TableState;
use tidegate_tests::{Database, Pipeline, database, mirror, postgres_destination, source, wait_for};

const MIB: usize = 1 << 20;
const BUDGET: usize = 128 * MIB;
/// What a row may have of it.
const ROW: usize = (BUDGET - 64 * MIB) / 8;
/// What the process has resident beside what counts for the budget, and the allocator with
/// it.
const MORE: usize = 64 * MIB;

struct Bench {
    source: Database,
    mirror: Database,
    pipeline: Pipeline,
}

/// A pipeline with a budget.
fn bench(test: &str, budget: usize, schema: &str) -> Bench {
    let source = database(source(), test);
    let mirror = database(mirror(), test);
    source.sql(&format!("{schema}; CREATE PUBLICATION pub FOR ALL TABLES"));
    let pipeline = Pipeline::new(&source, &postgres_destination("mirror", &mirror));
    let path = pipeline.directory().join("tidegate.toml");
    let config = std::fs::read_to_string(&path).unwrap();
    let budget = format!("state = \"state\"\nmemory_bytes = {budget}\n");
    std::fs::write(&path, config.replace("state = \"state\"\n", &budget)).unwrap();
    Bench { source, mirror, pipeline }
}

impl Bench {
    /// The most memory that the process has had resident.
    fn peak(&self) -> usize {
        let pid = self.pipeline.status().unwrap().pid.unwrap();
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")?.trim().strip_suffix(" kB")).unwrap();
        peak.trim().parse::<usize>().unwrap() * 1024
    }

    /// Both ends agree on every row.
    fn assert_equal(&mut self, tables: &[&str]) {
        self.pipeline.wait_caught_up(&self.source);
        for table in tables {
            let sql = format!("SELECT count(*), sum(hashtextextended(x::text, 0)) FROM {table} x");
            assert_eq!(self.source.sql(&sql), self.mirror.sql(&sql), "{table}\n{}", self.pipeline.log());
        }
    }

    /// Waits until a table has stopped, and says why.
    fn wait_stopped(&mut self, name: &str) -> StatusError {
        let status = self.pipeline.wait_status(&format!("{name} has stopped"), |status| {
            table(status, name).is_some_and(|table| table.state == TableState::Errored)
        });
        table(&status, name).and_then(|table| table.error.clone()).unwrap()
    }

    fn wait_table_ready(&mut self, name: &str) {
        self.pipeline.wait_status(&format!("{name} is ready"), |status| {
            table(status, name).is_some_and(|table| table.state == TableState::Ready)
        });
    }
}

fn table<'a>(status: &'a StatusReport, name: &str) -> Option<&'a TableStatus> {
    status.destinations.first()?.tables.iter().find(|table| table.table == name)
}

const TABLES: &str = "CREATE TABLE big (id int PRIMARY KEY, v text); CREATE TABLE small (id int PRIMARY KEY, v text)";

#[test]
fn a_row_that_does_not_fit_stops_its_table_by_name_and_the_others_go_on() {
    let mut bench = bench(
        "toolarge",
        BUDGET,
        &format!(
            "{TABLES}; CREATE TABLE had (id int PRIMARY KEY, v text); INSERT INTO had VALUES (1, ''), (42, repeat('x', 40 << 20))"
        ),
    );
    bench.pipeline.start();
    bench.wait_table_ready("public.big");
    // Met by its copy.
    let error = bench.wait_stopped("public.had");
    assert_eq!(error.code, "row.too-large");
    for part in ["public.had", "(42)", "41943", &ROW.to_string()] {
        assert!(error.message.contains(part), "`{part}` is not in: {}", error.message);
    }
    assert!(error.next.is_some_and(|next| next.contains("memory_bytes") && next.contains("resync")));
    // Met by the stream, with others in its transaction.
    bench.source.sql(
        "BEGIN; INSERT INTO big VALUES (1, 'before'); INSERT INTO big VALUES (7, repeat('y', 40 << 20));
         INSERT INTO big VALUES (8, 'after'); INSERT INTO small VALUES (1, 'in the same transaction'); COMMIT;
         INSERT INTO small VALUES (2, 'later')",
    );
    let error = bench.wait_stopped("public.big");
    assert_eq!(error.code, "row.too-large");
    assert!(error.message.contains("public.big") && error.message.contains("(7)"), "{}", error.message);
    bench.assert_equal(&["small"]);
    assert!(bench.peak() < BUDGET + MORE, "{} MiB", bench.peak() / MIB);
    // The way out.
    bench.source.sql("DELETE FROM big WHERE id = 7; UPDATE had SET v = '' WHERE id = 42");
    for table in ["public.big", "public.had"] {
        let resync = bench.pipeline.command(&["resync", "mirror", table]).output().unwrap();
        assert!(resync.status.success(), "{}", String::from_utf8_lossy(&resync.stderr));
        bench.wait_table_ready(table);
    }
    bench.assert_equal(&["big", "had", "small"]);
}

#[test]
fn a_row_that_is_too_large_waits_in_the_spool_for_a_table_that_is_being_copied_and_stops_it_then() {
    let mut bench = bench(
        "spooledlarge",
        BUDGET,
        "CREATE TABLE big (id int PRIMARY KEY, v text); INSERT INTO big SELECT n, repeat(md5(n::text), 30) FROM generate_series(1, 200000) n",
    );
    bench.pipeline.start();
    bench.pipeline.wait_status("the copy is under way", |status| {
        table(status, "public.big").is_some_and(|table| table.state == TableState::DataSync)
    });
    bench.source.sql("INSERT INTO big VALUES (-7, repeat('y', 40 << 20)); DELETE FROM big WHERE id = -7");
    let error = bench.wait_stopped("public.big");
    assert_eq!(error.code, "row.too-large");
    assert!(error.message.contains("(-7)"), "{}", error.message);
    assert!(bench.peak() < BUDGET + MORE, "{} MiB", bench.peak() / MIB);
}

#[test]
fn rows_of_seven_mib_arrive_by_copy_and_by_stream_within_128_mib() {
    let mut bench = bench(
        "large",
        BUDGET,
        &format!("{TABLES}; INSERT INTO big SELECT n, repeat(md5(n::text), 7 << 15) FROM generate_series(1, 5) n"),
    );
    bench.pipeline.start();
    bench.pipeline.wait_ready();
    bench.source.sql(
        "INSERT INTO big SELECT n, repeat(md5(n::text), 7 << 15) FROM generate_series(11, 15) n;
         UPDATE big SET v = 'small' || repeat(md5(id::text), 6 << 15) WHERE id % 2 = 0; DELETE FROM big WHERE id = 3;
         INSERT INTO small SELECT n, 'n' FROM generate_series(1, 1000) n",
    );
    bench.assert_equal(&["big", "small"]);
    assert!(bench.peak() < BUDGET + MORE, "{} MiB", bench.peak() / MIB);
}

#[test]
fn a_transaction_of_300_mb_passes_within_the_least_budget() {
    const LEAST: usize = 64 * MIB;
    let mut bench = bench("transaction", LEAST, TABLES);
    bench.pipeline.start();
    bench.pipeline.wait_ready();
    bench.source.sql("INSERT INTO big SELECT n, repeat(md5(n::text), 32) FROM generate_series(1, 300000) n");
    let status = bench.pipeline.status().unwrap();
    assert_eq!(status.memory.map(|memory| memory.limit_bytes), Some(LEAST as u64));
    bench.assert_equal(&["big"]);
    assert!(bench.peak() < LEAST + MORE, "{} MiB", bench.peak() / MIB);
}

#[test]
fn a_table_of_1600_columns_is_copied_and_followed() {
    let columns: Vec<String> = (2..=1600).map(|n| format!("c{n} int")).collect();
    let values = vec!["n"; 1600].join(", ");
    let mut bench = bench(
        "wide",
        BUDGET,
        &format!(
            "CREATE TABLE wide (id int PRIMARY KEY, {}); INSERT INTO wide SELECT {values} FROM generate_series(1, 500) n",
            columns.join(", ")
        ),
    );
    bench.pipeline.start();
    bench.pipeline.wait_ready();
    bench.source.sql("UPDATE wide SET c1600 = -1 WHERE id % 5 = 0; DELETE FROM wide WHERE id % 7 = 0");
    for id in 0..20 {
        bench.source.sql(&format!("UPDATE wide SET c2 = {id} WHERE id = {}", 8 + id * 14));
    }
    bench.assert_equal(&["wide"]);
    assert!(bench.peak() < BUDGET + MORE, "{} MiB", bench.peak() / MIB);
}

#[test]
fn five_hundred_tables_are_copied_and_followed_and_ready_again_after_a_restart() {
    const TABLES: usize = 500;
    let make = format!(
        "DO $$ BEGIN FOR n IN 1..{TABLES} LOOP
             EXECUTE format('CREATE TABLE many%s (id int PRIMARY KEY, v text)', n);
             EXECUTE format('INSERT INTO many%s VALUES (1, %L)', n, n);
         END LOOP; END $$"
    );
    let mut bench = bench("many", BUDGET, &make);
    bench.pipeline.start();
    bench.pipeline.wait_ready();
    bench.source.sql(&format!(
        "DO $$ BEGIN FOR n IN 1..{TABLES} LOOP EXECUTE format('INSERT INTO many%s VALUES (2, %L)', n, n); END LOOP; END $$"
    ));
    let all = |id: usize| {
        let one = |n: usize| format!("SELECT v FROM many{n} WHERE id = {id}");
        let tables: Vec<String> = (1..=TABLES).map(one).collect();
        format!("SELECT count(*), sum(v::int) FROM ({}) t", tables.join(" UNION ALL "))
    };
    let expected = format!("{TABLES}|{}", TABLES * (TABLES + 1) / 2);
    bench.pipeline.wait_caught_up(&bench.source);
    assert_eq!(bench.mirror.sql(&all(1)), expected);
    assert_eq!(bench.mirror.sql(&all(2)), expected);
    assert!(bench.peak() < BUDGET + MORE, "{} MiB", bench.peak() / MIB);
    bench.pipeline.kill();
    bench.source.sql("INSERT INTO many7 VALUES (3, '7')");
    bench.pipeline.start();
    bench.pipeline.wait_ready();
    wait_for("the table follows", || (bench.mirror.sql("SELECT count(*) FROM many7") == "3").then_some(()));
}

/// Keeps a table from whoever would write to it, until it is dropped.
struct Lock(Child);

impl Lock {
    fn take(database: &Database, table: &str) -> Lock {
        let mut session = Command::new("psql")
            .args(["-X", "-q", "-d", &database.url])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let said = format!("BEGIN; LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE;\n");
        session.stdin.as_mut().unwrap().write_all(said.as_bytes()).unwrap();
        let held = format!(
            "SELECT count(*) FROM pg_locks WHERE relation = '{table}'::regclass AND mode = 'AccessExclusiveLock' AND granted"
        );
        wait_for("the table is locked", || (database.sql(&held) == "1").then_some(()));
        Lock(session)
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

#[test]
fn a_destination_that_takes_nothing_fills_its_own_share_and_the_other_goes_on() {
    let mut bench = bench("shares", BUDGET, TABLES);
    let stuck = database(mirror(), "shares_stuck");
    let path = bench.pipeline.directory().join("tidegate.toml");
    let config = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, format!("{config}\n{}", postgres_destination("stuck", &stuck))).unwrap();
    bench.pipeline.start();
    bench.pipeline.wait_ready();
    let lock = Lock::take(&stuck, "big");
    // More than all shares together.
    for round in 0..10 {
        bench.source.sql(&format!(
            "INSERT INTO big SELECT n, repeat(md5(n::text), 32) FROM generate_series({round}0001, {round}9999) n"
        ));
    }
    wait_for("the other destination has everything", || {
        (bench.mirror.sql("SELECT count(*) FROM big") == "99990").then_some(())
    });
    assert!(bench.peak() < BUDGET + MORE, "{} MiB", bench.peak() / MIB);
    drop(lock);
    // Its checkpoint has passed what waits in the spool.
    wait_for("the one that was stuck has everything", || {
        (stuck.sql("SELECT count(*) FROM big") == "99990").then_some(())
    });
    bench.assert_equal(&["big"]);
    assert!(bench.peak() < BUDGET + MORE, "{} MiB", bench.peak() / MIB);
}

#[test]
fn a_budget_below_what_the_pipeline_needs_is_refused_by_name() {
    let bench = bench("toosmall", 64 * MIB - 1, TABLES);
    let output = bench.pipeline.command(&["run"]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("config.memory") && said.contains("memory_bytes"), "{said}");
}
