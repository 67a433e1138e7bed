//! Copies that a restart does not begin again: by ranges of the key, while the table is
//! written to (P19).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tidegate::position::Lsn;
use tidegate::store::{CopyRecord, Store};
use tidegate_tests::{Database, Pipeline, database, mirror, postgres_destination, source, wait_for};

const ROWS: u64 = 30_000;

/// Every tenth row has a value that an update does not send again.
fn setup(source: &Database) {
    source.sql(&format!(
        "CREATE TABLE t (id bigint PRIMARY KEY, big text, v text, n int DEFAULT 0);
         ALTER TABLE t ALTER big SET STORAGE EXTERNAL;
         INSERT INTO t SELECT i, CASE WHEN i % 10 = 0 THEN repeat(md5(i::text), 100) END, repeat(md5(i::text), 6)
             FROM generate_series(1, {ROWS}) i;
         ANALYZE t; CREATE PUBLICATION pub FOR ALL TABLES"
    ));
}

/// A source, a mirror and a pipeline between them.
struct Bench {
    source: Database,
    mirror: Database,
    pipeline: Pipeline,
}

fn bench(test: &str) -> Bench {
    let source = database(source(), test);
    let mirror = database(mirror(), test);
    setup(&source);
    let pipeline = Pipeline::new(&source, &postgres_destination("mirror", &mirror));
    let bench = Bench { source, mirror, pipeline };
    bench.configure("publication = \"pub\"", "publication = \"pub\"\ncopy_resume_bytes = 1");
    bench
}

impl Bench {
    fn configure(&self, before: &str, after: &str) {
        let file = self.pipeline.directory().join("tidegate.toml");
        let text = std::fs::read_to_string(&file).unwrap();
        assert!(text.contains(before));
        std::fs::write(&file, text.replace(before, after)).unwrap();
    }

    /// Runs until it dies at a place.
    fn die_at(&mut self, place: &str) {
        self.pipeline.start_with(&[("TIDEGATE_FAILPOINT", place)]);
        // By SIGKILL, which is no exit code.
        assert_eq!(self.pipeline.wait_end(), -1, "{place}:\n{}", self.pipeline.log());
    }

    /// What is stored of a destination's copy while nobody runs.
    fn copy(&self, destination: &str) -> Option<CopyRecord> {
        let store = Store::open_read_only(&self.pipeline.directory().join("state")).unwrap();
        store.load().unwrap().copies.into_iter().find(|copy| copy.destination == destination)
    }

    fn assert_equal(&mut self) {
        self.pipeline.wait_ready();
        self.pipeline.wait_caught_up(&self.source);
        let (expected, found) = (self.source.rows("t"), self.mirror.rows("t"));
        let odd: Vec<_> = expected.iter().zip(&found).filter(|(expected, found)| expected != found).take(3).collect();
        let shortened = |row: &str| row.chars().take(60).collect::<String>();
        let odd: Vec<_> = odd.iter().map(|(expected, found)| (shortened(expected), shortened(found))).collect();
        assert!(
            expected == found,
            "{} rows, and {} at the mirror: {odd:#?}\n{}",
            expected.len(),
            found.len(),
            self.pipeline.log()
        );
    }

    fn times_logged(&self, what: &str) -> usize {
        self.pipeline.log().matches(what).count()
    }

    /// Rows of the table that were read by its index so far, by whoever has ended.
    fn read_by_index(&self) -> u64 {
        let sessions =
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()";
        wait_for("all sessions have ended, and said what they read", || {
            (self.source.sql(sessions) == "0").then_some(())
        });
        self.source.sql("SELECT coalesce(sum(idx_tup_fetch), 0) FROM pg_stat_user_tables").parse().unwrap()
    }
}

fn floors(copy: &CopyRecord) -> Vec<Option<Lsn>> {
    copy.ranges.iter().map(|range| range.floor).collect()
}

/// Changes in every range: rows that come and go, values that are not sent again, and keys
/// that move, all of their rows being sent. By sequential scans.
fn work(source: &Database, round: u64) {
    let (id, rest) = (1_000_000 * (round + 1), round % 90);
    source.sql(&format!(
        "SET enable_indexscan = off; SET enable_bitmapscan = off;
         INSERT INTO t SELECT {id} + i, repeat('new', 1000), 'new' FROM generate_series(1, 50) i;
         INSERT INTO t SELECT -{id} - i, NULL, 'new' FROM generate_series(1, 50) i;
         UPDATE t SET n = n + 1 WHERE id % 97 = {rest};
         DELETE FROM t WHERE id % 211 = {rest};
         UPDATE t SET id = -1000000000000 - id * 1000 - {round}, big = repeat('moved', 500) WHERE id > 0 AND id % 307 = {rest};
         BEGIN; UPDATE t SET id = id + {ROWS} * 2, v = 'moved' WHERE id > 0 AND id % 509 = {rest} AND big IS NULL;
         UPDATE t SET n = n + 1 WHERE v = 'moved'; COMMIT"
    ));
}

/// The same again and again, until it is dropped.
struct Load {
    ended: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<u64>>,
}

impl Load {
    fn start(source: &Database) -> Load {
        let source = source.clone();
        let ended = Arc::new(AtomicBool::new(false));
        let ending = ended.clone();
        let thread = std::thread::spawn(move || {
            let mut round = 20;
            while !ending.load(Ordering::SeqCst) {
                work(&source, round);
                round += 1;
            }
            round - 20
        });
        Load { ended, thread: Some(thread) }
    }

    /// How often it was done.
    fn end(mut self) -> u64 {
        self.ended.store(true, Ordering::SeqCst);
        self.thread.take().unwrap().join().unwrap()
    }
}

#[test]
fn a_host_that_is_killed_again_and_again_goes_on_with_the_copy_and_ends_equal() {
    let mut bench = bench("goes_on");
    let load = Load::start(&bench.source);
    let mut before: Option<CopyRecord> = None;
    let places = [
        "copy.range-started:3",
        "copy.range-started:7",
        "copy.rows:20",
        "copy.range-done:15",
        "group.written:25",
        "copy.range-done:20",
        "copy.flushed",
        "copy.finished",
        "copy.caught",
    ];
    for place in places {
        bench.die_at(place);
        let copy = bench.copy("mirror").unwrap_or_else(|| panic!("{place}: no copy is stored"));
        if let Some(before) = &before {
            assert_eq!(copy.run, before.run, "{place}: it is the same copy\n{}", bench.pipeline.log());
            for (before, now) in floors(before).iter().zip(floors(&copy)).filter(|(before, _)| before.is_some()) {
                assert_eq!(*before, now, "{place}: a range that was there is not read again");
            }
        }
        before = Some(copy);
    }
    let done = before.unwrap();
    let (least, most) = done.floors().expect("all ranges are done");
    assert!(least < most, "they were read in several snapshots");
    for place in ["drain.read", "drain.passed", "drain.live"] {
        bench.die_at(place);
    }
    assert!(load.end() > 3);
    bench.pipeline.start();
    bench.assert_equal();
    assert_eq!(bench.times_logged("is copied by"), 1, "one copy\n{}", bench.pipeline.log());
    assert_eq!(bench.times_logged("is copied again"), 0);
    // The stored floors go once the table is beyond them.
    bench.pipeline.stop();
    assert_eq!(bench.copy("mirror"), None);
}

#[test]
fn what_was_copied_is_not_read_again_and_status_goes_on_counting() {
    let mut bench = bench("not_again");
    let mut copied = 0;
    for _ in 0..4 {
        bench.die_at("copy.range-done:20");
        let copy = bench.copy("mirror").unwrap();
        let (rows, _) = copy.done();
        assert!(rows > copied, "{rows} rows, {copied} before");
        copied = rows;
    }
    let before = bench.read_by_index();
    bench.pipeline.start();
    let status = bench.pipeline.wait_ready();
    let table = &status.destinations[0].tables[0];
    assert_eq!(table.rows_copied, ROWS, "{table:?}");
    assert_eq!((table.percent, table.bytes_copied), (Some(100.0), table.bytes_total.unwrap()), "{table:?}");
    bench.assert_equal();
    assert_eq!(bench.pipeline.stop(), 0);
    let (read, left) = (bench.read_by_index() - before, ROWS - copied);
    // The planner looks at the ends of an index, once for each statement at most.
    assert!((left..=left + 100).contains(&read), "{left} rows were left, {read} were read");
}

#[test]
fn a_table_that_was_truncated_or_altered_in_between_is_copied_from_its_beginning() {
    const ALTERED: &str = "begins again: the table was altered";
    for (name, change, said) in [
        ("truncated", "TRUNCATE t; INSERT INTO t SELECT i, NULL, 'after' FROM generate_series(1, 100) i", ALTERED),
        ("altered", "ALTER TABLE t ADD COLUMN added int DEFAULT 7; UPDATE t SET added = 8 WHERE id % 2 = 0", ALTERED),
        ("published", "ALTER PUBLICATION pub SET (publish_via_partition_root)", "all tables are copied again"),
    ] {
        let mut bench = bench(name);
        bench.die_at("copy.range-done:20");
        bench.source.sql(change);
        work(&bench.source, 1);
        bench.pipeline.start();
        bench.assert_equal();
        let log = bench.pipeline.log();
        assert_eq!(bench.times_logged("is copied by"), 2, "{name}\n{log}");
        assert_eq!(bench.times_logged(said), 1, "{name}\n{log}");
    }
}

#[test]
fn a_row_that_moves_into_a_finished_range_without_all_of_it_makes_the_copy_begin_again() {
    let mut bench = bench("moves");
    bench.die_at("copy.range-done:20");
    let copy = bench.copy("mirror").unwrap();
    assert!(copy.ranges[0].floor.is_some() && copy.ranges[copy.ranges.len() - 1].floor.is_none());
    bench.source.sql(&format!("UPDATE t SET id = -id WHERE id = {ROWS}"));
    bench.source.sql("UPDATE t SET n = 5 WHERE id < 0");
    bench.pipeline.start();
    wait_for("it begins again", || (bench.times_logged("not all of it was sent") == 1).then_some(()));
    bench.assert_equal();
    assert_eq!(bench.times_logged("is copied by"), 2, "{}", bench.pipeline.log());
}

#[test]
fn a_destination_that_lost_what_was_copied_gets_all_of_it() {
    let mut bench = bench("lost");
    bench.die_at("copy.range-done:20");
    bench.mirror.sql("DROP TABLE t");
    bench.pipeline.start();
    bench.assert_equal();
    assert_eq!(bench.times_logged("cannot be resumed"), 1, "{}", bench.pipeline.log());
}

#[test]
fn of_two_destinations_each_goes_on_with_its_own() {
    let mut bench = bench("two");
    let second = database(mirror(), "two_second");
    let third = database(mirror(), "two_third");
    let file = bench.pipeline.directory().join("tidegate.toml");
    let add = |name: &str, mirror: &Database| {
        let text = std::fs::read_to_string(&file).unwrap();
        std::fs::write(&file, format!("{text}\n{}", postgres_destination(name, mirror))).unwrap();
    };
    add("second", &second);
    bench.die_at("copy.range-done:30");
    let (one, other) = (bench.copy("mirror").unwrap(), bench.copy("second").unwrap());
    assert_eq!((&one.run, &one.keys), (&other.run, &other.keys), "one read for both");
    work(&bench.source, 1);
    // It has a run of its own.
    add("third", &third);
    bench.die_at("copy.range-done:30");
    let added = bench.copy("third").unwrap();
    for (name, before) in [("mirror", one), ("second", other)] {
        let now = bench.copy(name).unwrap();
        assert!(now.run == before.run && now.run != added.run);
        for (before, now) in floors(&before).iter().zip(floors(&now)).filter(|(before, _)| before.is_some()) {
            assert_eq!(*before, now, "{name}");
        }
    }
    work(&bench.source, 2);
    bench.pipeline.start();
    bench.assert_equal();
    for mirror in [&second, &third] {
        assert!(bench.source.rows("t") == mirror.rows("t"), "{}", bench.pipeline.log());
    }
    assert_eq!(bench.times_logged("is copied by"), 2, "{}", bench.pipeline.log());
}

#[test]
fn a_table_that_is_not_worth_it_or_cannot_be_cut_by_its_key_is_copied_as_ever() {
    let mut bench = bench("as_ever");
    bench.source.sql(
        "CREATE TABLE texts (id text PRIMARY KEY); INSERT INTO texts SELECT i FROM generate_series(1, 1000) i;
         CREATE TABLE fresh (id int PRIMARY KEY); INSERT INTO fresh SELECT i FROM generate_series(1, 1000) i;
         CREATE TABLE spread (id int PRIMARY KEY);
         INSERT INTO spread SELECT i FROM generate_series(1, 1000) i ORDER BY md5(i::text);
         ANALYZE texts; ANALYZE spread",
    );
    bench.configure("copy_resume_bytes = 1", &format!("copy_resume_bytes = {}", 1_u64 << 40));
    bench.pipeline.start();
    bench.assert_equal();
    assert_eq!(bench.times_logged("is copied by"), 0);
    assert_eq!(bench.pipeline.stop(), 0);
    bench.configure(&format!("copy_resume_bytes = {}", 1_u64 << 40), "copy_resume_bytes = 1");
    bench.pipeline.start();
    bench.pipeline.wait_ready();
    for table in ["texts", "fresh", "spread", "t"] {
        let output = bench.pipeline.command(&["resync", "mirror", &format!("public.{table}")]).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
    wait_for("the last is copied again", || (bench.times_logged("is copied by") > 0).then_some(()));
    bench.assert_equal();
    assert_eq!(bench.times_logged("is copied by"), 1, "t alone\n{}", bench.pipeline.log());
    for table in ["texts", "fresh", "spread"] {
        assert_eq!(bench.source.rows(table), bench.mirror.rows(table));
    }
}
