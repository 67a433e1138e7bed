//! Copies that a restart does not begin again: by stretches of pages, whatever the key is
//! and however the rows lie, while the table is written to (P19).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tidegate::copy::{Base, Stretch};
use tidegate::store::{CopyRecord, Store};
use tidegate_tests::{Database, Pipeline, database, mirror, postgres_destination, source, wait_for};

const ROWS: u64 = 30_000;

/// How a table's key is made.
#[derive(Clone, Copy)]
struct Shape {
    /// Each column of the key, its type, and its value in row `i`.
    key: &'static [(&'static str, &'static str, &'static str)],
    /// In which order the rows are written.
    order: &'static str,
    /// Behind the columns of the table, and commands that follow.
    more: &'static str,
}

const INTEGER: Shape = Shape { key: &[("id", "bigint", "{i}")], order: "i", more: "" };
const AT_RANDOM: Shape = Shape { order: "md5(i::text)", ..INTEGER };
const TEXT: Shape = Shape { key: &[("id", "text", "md5(({i})::text)")], order: "i", more: "" };
const UUID: Shape = Shape { key: &[("id", "uuid", "md5(({i})::text)::uuid")], order: "i", more: "" };
const COMPOSITE: Shape =
    Shape { key: &[("a", "int", "({i}) % 7"), ("b", "text", "md5(({i})::text)")], order: "i", more: "" };
const PARTITIONED: Shape = Shape {
    more: "PARTITION BY RANGE (id); CREATE TABLE low PARTITION OF t FOR VALUES FROM (MINVALUE) TO ('3');
        CREATE TABLE middle PARTITION OF t FOR VALUES FROM ('3') TO ('9');
        CREATE TABLE high PARTITION OF t FOR VALUES FROM ('9') TO (MAXVALUE)",
    ..TEXT
};

impl Shape {
    /// What the key's columns are set to in row `i`.
    fn values(&self, i: &str) -> String {
        let values: Vec<String> = self.key.iter().map(|(.., value)| value.replace("{i}", i)).collect();
        values.join(", ")
    }

    fn columns(&self) -> String {
        let columns: Vec<&str> = self.key.iter().map(|(name, ..)| *name).collect();
        columns.join(", ")
    }

    /// Every tenth row has a value that an update does not send again.
    fn setup(&self, source: &Database) {
        let types: Vec<String> = self.key.iter().map(|(name, kind, _)| format!("{name} {kind}")).collect();
        let (types, columns, values) = (types.join(", "), self.columns(), self.values("i"));
        source.sql(&format!(
            "CREATE TABLE t (i bigint, {types}, big text, v text, n int DEFAULT 0, PRIMARY KEY ({columns})) {more};
             ALTER TABLE t ALTER big SET STORAGE EXTERNAL;
             INSERT INTO t (i, {columns}, big, v)
                 SELECT i, {values}, CASE WHEN i % 10 = 0 THEN repeat(md5(i::text), 100) END, repeat(md5(i::text), 6)
                 FROM generate_series(1, {ROWS}) i ORDER BY {order};
             CREATE PUBLICATION pub FOR ALL TABLES WITH (publish_via_partition_root)",
            more = self.more,
            order = self.order,
        ));
    }

    /// Changes everywhere: rows that come and go, and come again under the same key, values
    /// that are not sent again, versions that move to other pages, and keys that change.
    fn work(&self, source: &Database, round: u64) {
        let (first, rest, columns) = (1_000_000 * (round + 1), round % 90, self.columns());
        let moved = format!("i + {}", 10_000_000_000 * (round + 1));
        source.sql(&format!(
            "INSERT INTO t (i, {columns}, big, v) SELECT i, {values}, repeat('new', 1000), 'new'
                 FROM generate_series({first} + 1, {first} + 50) i;
             COMMIT; UPDATE t SET n = n + 1 WHERE i % 97 = {rest};
             COMMIT; DELETE FROM t WHERE i % 211 = {rest};
             COMMIT; CREATE TEMP TABLE again AS SELECT * FROM t WHERE i % 103 = {rest};
             DELETE FROM t WHERE i % 103 = {rest};
             COMMIT; INSERT INTO t SELECT * FROM again; DROP TABLE again;
             COMMIT; UPDATE t SET ({columns}, i) = ROW({keys}, {moved}) WHERE i < 10000000000 AND i % 307 = {rest};
             COMMIT; BEGIN; SAVEPOINT a; UPDATE t SET v = 'inside' WHERE i % 509 = {rest}; SAVEPOINT b;
             DELETE FROM t WHERE i % 11 = 1; ROLLBACK TO b; UPDATE t SET n = n + 1 WHERE v = 'inside'; COMMIT",
            values = self.values("i"),
            keys = self.values(&format!("({moved})")),
        ));
    }
}

/// A source, a mirror and a pipeline between them.
struct Bench {
    shape: Shape,
    source: Database,
    mirror: Database,
    pipeline: Pipeline,
}

fn bench(test: &str, shape: Shape) -> Bench {
    let source = database(source(), test);
    let mirror = database(mirror(), test);
    shape.setup(&source);
    let pipeline = Pipeline::new(&source, &postgres_destination("mirror", &mirror));
    let bench = Bench { shape, source, mirror, pipeline };
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

    fn work(&self, round: u64) {
        self.shape.work(&self.source, round);
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

    /// Rows of the table that were written at the mirror so far, by whoever has ended.
    fn written(&self) -> u64 {
        wait_until_left(&self.mirror);
        let written = "SELECT coalesce(sum(n_tup_ins + n_tup_upd), 0) FROM pg_stat_user_tables WHERE relname = 't'";
        self.mirror.sql(written).parse().unwrap()
    }

    /// Makes room in most pages of the first stretch.
    fn make_room(&self) {
        // A snapshot of one who was killed would keep the dead rows.
        wait_until_left(&self.source);
        self.source.sql("DELETE FROM t WHERE ctid < '(20,0)'");
        self.source.sql("VACUUM t");
    }

    /// A row that is in the first stretch now.
    fn in_first_stretch(&self, condition: &str) -> u64 {
        let first = self.copy("mirror").unwrap().stretches[0].stretch.to.unwrap();
        let row = self.source.sql(&format!("SELECT min(i) FROM t WHERE ctid < '({first},0)' AND {condition}"));
        row.parse().unwrap_or_else(|_| panic!("no row with {condition} is in the first stretch"))
    }
}

/// A text that makes a row larger than what a full page has left.
const LARGE: &str = "(SELECT string_agg(md5(part::text), '') FROM generate_series(1, 55) part)";

/// Waits until nobody is connected, and all have said what they wrote.
fn wait_until_left(database: &Database) {
    let sessions =
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()";
    wait_for("all sessions have ended", || (database.sql(sessions) == "0").then_some(()));
}

fn bases(copy: &CopyRecord) -> Vec<Option<Base>> {
    copy.stretches.iter().map(|stretch| stretch.base).collect()
}

fn stretches(copy: &CopyRecord) -> Vec<Stretch> {
    copy.stretches.iter().map(|stretch| stretch.stretch).collect()
}

/// Nothing that was there is not there any more.
fn assert_goes_on(before: &CopyRecord, now: &CopyRecord, why: &str) {
    assert_eq!((&now.run, stretches(now)), (&before.run, stretches(before)), "{why}: it is the same copy");
    assert!(before.cleaned <= now.cleaned, "{why}");
    for (before, now) in bases(before).iter().zip(bases(now)).filter(|(before, _)| before.is_some()) {
        assert!(*before <= now, "{why}: a stretch that was there is there");
    }
}

/// Work again and again, until it is ended.
struct Load {
    ended: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<u64>>,
}

impl Load {
    fn start(bench: &Bench) -> Load {
        let (shape, source) = (bench.shape, bench.source.clone());
        let ended = Arc::new(AtomicBool::new(false));
        let ending = ended.clone();
        let thread = std::thread::spawn(move || {
            let mut round = 20;
            while !ending.load(Ordering::SeqCst) {
                shape.work(&source, round);
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

/// Kills the host in each step of a copy, while the table is written to; at the end the
/// mirror is equal, by one copy.
fn is_killed_again_and_again(test: &str, shape: Shape) {
    let mut bench = bench(test, shape);
    let load = Load::start(&bench);
    let mut before: Option<CopyRecord> = None;
    let places = [
        "copy.range-started:3",
        "copy.range-done:5",
        "copy.cleaned",
        "copy.range-started:7",
        "copy.rows:10",
        "copy.range-done:12",
        "group.written:15",
        "copy.flushed",
        "copy.finished",
    ];
    for place in places {
        bench.die_at(place);
        let copy = bench.copy("mirror").unwrap_or_else(|| panic!("{place}: no copy is stored"));
        if let Some(before) = &before {
            assert_goes_on(before, &copy, place);
            if place == "copy.finished" {
                assert_eq!(bases(before), bases(&copy), "what was complete is not read again");
            }
        }
        before = Some(copy);
    }
    assert!(before.unwrap().complete().is_some());
    for place in ["copy.caught", "drain.read", "drain.live"] {
        bench.die_at(place);
        assert_eq!(bench.copy("mirror"), None, "{place}: there is nothing to go on with");
    }
    assert!(load.end() > 3);
    bench.pipeline.start();
    bench.assert_equal();
    assert_eq!(bench.times_logged("is copied by"), 1, "one copy\n{}", bench.pipeline.log());
    assert_eq!(bench.pipeline.stop(), 0);
}

#[test]
fn a_host_that_is_killed_again_and_again_goes_on_with_the_copy_and_ends_equal() {
    is_killed_again_and_again("goes_on", INTEGER);
}

#[test]
fn so_it_is_with_rows_that_lie_at_random() {
    is_killed_again_and_again("at_random", AT_RANDOM);
}

#[test]
fn so_it_is_with_a_text_as_the_key() {
    is_killed_again_and_again("text", TEXT);
}

#[test]
fn so_it_is_with_a_uuid_as_the_key() {
    is_killed_again_and_again("uuid", UUID);
}

#[test]
fn so_it_is_with_a_key_of_two_columns() {
    is_killed_again_and_again("composite", COMPOSITE);
}

#[test]
fn so_it_is_with_a_partitioned_table_whose_rows_go_from_one_partition_to_another() {
    is_killed_again_and_again("partitioned", PARTITIONED);
}

#[test]
fn what_was_copied_is_not_sent_again_but_for_newer_rows_and_status_goes_on_counting() {
    let mut bench = bench("not_again", AT_RANDOM);
    let mut copied = 0;
    for _ in 0..3 {
        bench.die_at("copy.range-done:8");
        let (rows, _) = bench.copy("mirror").unwrap().done();
        assert!(rows > copied, "{rows} rows, {copied} before");
        copied = rows;
    }
    let left = ROWS - copied;
    assert!(left > 0 && copied > ROWS / 4, "{copied} rows of {ROWS}");
    bench.source.sql("UPDATE t SET n = 1 WHERE i <= 100");
    let before = bench.written();
    bench.pipeline.start();
    let status = bench.pipeline.wait_ready();
    let table = &status.destinations[0].tables[0];
    // Those that moved to the end are counted where they came from as well.
    assert!((ROWS..=ROWS + 100).contains(&table.rows_copied), "{table:?}");
    assert_eq!((table.percent, table.bytes_copied), (Some(100.0), table.bytes_total.unwrap()), "{table:?}");
    bench.assert_equal();
    assert_eq!(bench.pipeline.stop(), 0);
    let written = bench.written() - before;
    assert!((left..=left + 100).contains(&written), "{left} rows were left, {written} were written");
}

#[test]
fn a_table_that_was_truncated_rewritten_or_altered_in_between_is_copied_from_its_beginning() {
    const ALTERED: &str = "begins again: the table was altered";
    for (name, change, said) in [
        ("truncated", "TRUNCATE t; INSERT INTO t SELECT i, i, NULL, 'after' FROM generate_series(1, 100) i", ALTERED),
        ("rewritten", "VACUUM FULL t", ALTERED),
        ("altered", "ALTER TABLE t ADD COLUMN added int DEFAULT 7; UPDATE t SET added = 8 WHERE id % 2 = 0", ALTERED),
        ("published", "ALTER PUBLICATION pub SET (publish_via_partition_root = false)", "all tables are copied again"),
    ] {
        let mut bench = bench(name, INTEGER);
        bench.die_at("copy.range-done:10");
        bench.source.sql(change);
        if name != "altered" {
            bench.work(1);
        }
        bench.die_at("copy.range-done:1");
        bench.pipeline.start();
        bench.assert_equal();
        let log = bench.pipeline.log();
        assert_eq!(bench.times_logged("is copied by"), 2, "{name}\n{log}");
        assert_eq!(bench.times_logged(said), 1, "{name}\n{log}");
    }
}

#[test]
fn a_row_that_moves_into_a_stretch_that_is_done_is_there_with_what_no_change_sends() {
    let mut bench = bench("moves", INTEGER);
    bench.die_at("copy.range-done:10");
    let copy = bench.copy("mirror").unwrap();
    assert!(copy.stretches[0].base.is_some() && copy.stretches[copy.stretches.len() - 1].base.is_none());
    bench.make_room();
    // They lie in the last stretch, and have a value that their update does not send.
    let last = copy.stretches[copy.stretches.len() - 1].stretch.from;
    let moves = format!("i % 10 = 0 AND i > {} AND ctid >= '({last},0)'", ROWS - 300);
    bench.source.sql(&format!("UPDATE t SET n = 5, v = {LARGE} WHERE {moves}"));
    let row = bench.in_first_stretch("n = 5");
    bench.pipeline.start();
    bench.assert_equal();
    assert_eq!(bench.mirror.sql(&format!("SELECT n, length(big) FROM t WHERE i = {row}")), "5|3200");
    assert_eq!(bench.times_logged("is copied by"), 1, "{}", bench.pipeline.log());
}

#[test]
fn a_third_start_does_not_delete_what_the_second_has_copied() {
    let mut bench = bench("third", INTEGER);
    bench.die_at("copy.range-done:10");
    let before = bench.copy("mirror").unwrap();
    assert!(before.stretches[0].base.is_some());
    // Gone after the first snapshot, and back before the second.
    bench.make_room();
    bench.source.sql(&format!("INSERT INTO t SELECT i, i, {LARGE}, 'back' FROM generate_series(1, 30) i"));
    let row = bench.in_first_stretch("v = 'back'");
    // The second looks are last.
    bench.die_at("copy.range-done:29");
    let second = bench.copy("mirror").unwrap();
    assert!(before.stretches[0].base < second.stretches[0].base && second.complete().is_none());
    assert!(before.cleaned < second.cleaned);
    bench.pipeline.start();
    bench.assert_equal();
    assert_eq!(bench.mirror.sql(&format!("SELECT v FROM t WHERE id = {row}")), "back");
    assert_eq!(bench.times_logged("is copied by"), 1, "{}", bench.pipeline.log());
}

#[test]
fn a_destination_that_lost_what_was_copied_gets_all_of_it() {
    let mut bench = bench("lost", INTEGER);
    bench.die_at("copy.range-done:10");
    bench.mirror.sql("DROP TABLE t");
    bench.pipeline.start();
    bench.assert_equal();
    assert_eq!(bench.times_logged("cannot be resumed"), 1, "{}", bench.pipeline.log());
}

#[test]
fn of_two_destinations_each_goes_on_with_its_own() {
    let mut bench = bench("two", COMPOSITE);
    let second = database(mirror(), "two_second");
    let third = database(mirror(), "two_third");
    let file = bench.pipeline.directory().join("tidegate.toml");
    let add = |name: &str, mirror: &Database| {
        let text = std::fs::read_to_string(&file).unwrap();
        std::fs::write(&file, format!("{text}\n{}", postgres_destination(name, mirror))).unwrap();
    };
    add("second", &second);
    bench.die_at("copy.range-done:25");
    let (one, other) = (bench.copy("mirror").unwrap(), bench.copy("second").unwrap());
    assert_eq!((&one.run, stretches(&one)), (&other.run, stretches(&other)), "one read for both");
    assert!(one.complete().is_none() && other.complete().is_none());
    bench.work(1);
    // It has a run of its own.
    add("third", &third);
    bench.die_at("copy.range-done:30");
    let added = bench.copy("third").unwrap();
    for (name, before) in [("mirror", one), ("second", other)] {
        let now = bench.copy(name).unwrap();
        assert_ne!(now.run, added.run);
        assert_goes_on(&before, &now, name);
    }
    bench.work(2);
    bench.pipeline.start();
    bench.assert_equal();
    for mirror in [&second, &third] {
        assert!(bench.source.rows("t") == mirror.rows("t"), "{}", bench.pipeline.log());
    }
    assert_eq!(bench.times_logged("is copied by"), 2, "{}", bench.pipeline.log());
}

#[test]
fn a_table_that_is_not_worth_it_is_copied_as_ever() {
    let mut bench = bench("as_ever", INTEGER);
    bench.configure("copy_resume_bytes = 1", &format!("copy_resume_bytes = {}", 1_u64 << 40));
    bench.pipeline.start();
    bench.assert_equal();
    assert_eq!(bench.times_logged("is copied by"), 0);
    assert_eq!(bench.pipeline.stop(), 0);
    bench.configure(&format!("copy_resume_bytes = {}", 1_u64 << 40), "copy_resume_bytes = 1");
    bench.pipeline.start();
    bench.pipeline.wait_ready();
    let output = bench.pipeline.command(&["resync", "mirror", "public.t"]).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    wait_for("it is copied again", || (bench.times_logged("is copied by") == 1).then_some(()));
    bench.assert_equal();
}

#[test]
fn stretches_of_a_partitioned_table_are_of_its_partitions_and_meet() {
    let mut bench = bench("leaves", PARTITIONED);
    bench.die_at("copy.range-done:1");
    let mut leaves: BTreeMap<u32, Vec<Stretch>> = BTreeMap::new();
    for stretch in stretches(&bench.copy("mirror").unwrap()) {
        leaves.entry(stretch.leaf).or_default().push(stretch);
    }
    assert_eq!(leaves.len(), 3);
    for stretches in leaves.values() {
        assert!(stretches.len() > 1 && stretches[0].from == 0, "{stretches:?}");
        assert!(stretches.windows(2).all(|pair| pair[0].to == Some(pair[1].from)), "{stretches:?}");
        assert_eq!(stretches[stretches.len() - 1].to, None);
    }
}
