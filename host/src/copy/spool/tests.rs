use std::fs;
use std::path::PathBuf;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use tempfile::TempDir;

use super::*;
use crate::position::row_ordinal;

const SMALL: SpoolOptions = SpoolOptions { segment_bytes: 2_000, limit_bytes: 1 << 30 };

fn head(table: u32, commit: u64, row: u64) -> FrameHead {
    let ordinal = row_ordinal(Lsn(row), 0);
    FrameHead { table, commit: Lsn(commit), committed_at: 17, xid: 5, row: Lsn(row), ordinal }
}

fn relation(spool: &Spool, table: u32, body: &str) {
    let head = FrameHead { ordinal: 0, ..head(table, 0, 0) };
    spool.append(head, FrameKind::Relation, body.as_bytes()).unwrap();
}

fn change(spool: &Spool, table: u32, commit: u64, row: u64, body: &str) {
    spool.append(head(table, commit, row), FrameKind::Change, body.as_bytes()).unwrap();
}

fn commit(spool: &Spool, commit: u64) {
    spool.commit(Lsn(commit), Lsn(commit + 8)).unwrap();
}

/// A whole transaction of one change to table 1 and one to table 2.
fn transaction(spool: &Spool, at: u64) {
    for table in [1, 2] {
        relation(spool, table, &format!("relation {table}"));
        change(spool, table, at, at - 16 + 8 * u64::from(table - 1), &format!("change {table} {at}"));
    }
    commit(spool, at);
}

fn drain(reader: &mut SpoolReader) -> Vec<Frame> {
    let mut all = Vec::new();
    loop {
        let frames = reader.read(100).unwrap();
        if frames.is_empty() {
            return all;
        }
        all.extend(frames);
    }
}

/// Bodies of a table's frames beyond `after`.
fn bodies(spool: &Spool, table: u32, after: Option<(Lsn, u64)>) -> Vec<String> {
    let frames = drain(&mut spool.reader(table, after));
    frames.iter().map(|frame| String::from_utf8_lossy(&frame.body).into_owned()).collect()
}

fn files(directory: &TempDir) -> Vec<PathBuf> {
    segment::list(directory.path()).unwrap().into_iter().map(|n| segment::path(directory.path(), n)).collect()
}

/// The file that is written to, and its length.
fn last_file(directory: &TempDir) -> (PathBuf, u64) {
    let file = files(directory).pop().unwrap();
    let length = fs::metadata(&file).unwrap().len();
    (file, length)
}

fn open(directory: &TempDir, options: SpoolOptions) -> Spool {
    Spool::open(directory.path(), options).unwrap()
}

#[test]
fn an_end_torn_at_any_byte_of_the_last_transaction_is_cut_behind_the_one_before() {
    let directory = TempDir::new().unwrap();
    let spool = open(&directory, SpoolOptions::default());
    transaction(&spool, 1000);
    spool.sync().unwrap();
    let before = spool.bytes();
    transaction(&spool, 2000);
    drop(spool);
    let whole = fs::read(&files(&directory)[0]).unwrap();
    for length in before as usize..whole.len() {
        let torn = TempDir::new().unwrap();
        fs::write(segment::path(torn.path(), 1), &whole[..length]).unwrap();
        let spool = open(&torn, SpoolOptions::default());
        assert_eq!(bodies(&spool, 1, None), ["relation 1", "change 1 1000"], "cut at {length}");
        assert_eq!(spool.end(2).map(|end| end.0), Some(Lsn(1000)));
        transaction(&spool, 3000);
        assert_eq!(bodies(&spool, 2, None), ["relation 2", "change 2 1000", "change 2 3000"]);
    }
    let spool = open(&directory, SpoolOptions::default());
    assert_eq!(bodies(&spool, 1, None).len(), 3);
}

#[test]
fn what_waits_is_counted_from_the_files_as_far_as_it_is_committed_and_counts() {
    let directory = TempDir::new().unwrap();
    let counted = |after: Option<(Lsn, u64)>, budget: u64| {
        let (counts, whole) = count(directory.path(), &[(1, after), (7, None)], budget).unwrap();
        assert_eq!(counts[1], Waiting::default(), "nobody else's");
        (counts[0].rows, counts[0].bytes, whole)
    };
    assert_eq!(counted(None, u64::MAX), (0, 0, true));
    let spool = open(&directory, SMALL);
    for at in 1..=100 {
        transaction(&spool, at * 1000);
    }
    change(&spool, 1, 200_000, 199_000, "of an open transaction");
    spool.sync().unwrap();
    assert!(files(&directory).len() > 3);
    let bytes = |from: u64| (from..=100).map(|at| format!("change 1 {}", at * 1000).len() as u64).sum::<u64>();
    assert_eq!(counted(None, u64::MAX), (100, bytes(1), true));
    assert_eq!(counted(Some((Lsn(40_000), u64::MAX)), u64::MAX), (60, bytes(41), true));
    let (rows, _, whole) = counted(None, 3_000);
    assert!(!whole && (1..100).contains(&rows), "{rows}");
    // What comes again counts once.
    spool.rewind(Lsn(91_000)).unwrap();
    spool.sync().unwrap();
    assert_eq!(counted(None, u64::MAX).0, 90);
    for at in 91..=100 {
        transaction(&spool, at * 1000);
    }
    spool.sync().unwrap();
    assert_eq!(counted(None, u64::MAX), (100, bytes(1), true));
}

#[test]
fn a_flipped_bit_in_what_was_synced_is_refused_with_file_and_offset() {
    let directory = TempDir::new().unwrap();
    let spool = open(&directory, SpoolOptions::default());
    transaction(&spool, 1000);
    let synced = spool.bytes() as usize;
    spool.sync().unwrap();
    drop(spool);
    let file = files(&directory).remove(0);
    let whole = fs::read(&file).unwrap();
    for at in 0..synced {
        let mut damaged = whole.clone();
        damaged[at] ^= 4;
        fs::write(&file, &damaged).unwrap();
        let error = Spool::open(directory.path(), SpoolOptions::default()).err().expect("refused");
        assert_eq!(error.code(), "spool.corrupt", "byte {at}");
        assert!(error.message().contains(file.to_str().unwrap()), "{error}");
    }
}

#[test]
fn a_flipped_bit_in_what_was_never_synced_is_a_torn_end() {
    let directory = TempDir::new().unwrap();
    let spool = open(&directory, SpoolOptions::default());
    transaction(&spool, 1000);
    spool.sync().unwrap();
    let synced = spool.bytes() as usize;
    transaction(&spool, 2000);
    transaction(&spool, 3000);
    drop(spool);
    let file = files(&directory).remove(0);
    let mut damaged = fs::read(&file).unwrap();
    damaged[synced + 60] ^= 1;
    fs::write(&file, &damaged).unwrap();
    let spool = open(&directory, SpoolOptions::default());
    assert_eq!(bodies(&spool, 1, None), ["relation 1", "change 1 1000"]);
}

#[test]
fn damage_in_a_file_that_is_not_the_last_is_refused() {
    let directory = TempDir::new().unwrap();
    let spool = open(&directory, SMALL);
    (1..40).for_each(|n| transaction(&spool, n * 1000));
    drop(spool);
    let file = files(&directory).remove(0);
    let length = fs::metadata(&file).unwrap().len();
    fs::OpenOptions::new().write(true).open(&file).unwrap().set_len(length - 1).unwrap();
    assert_eq!(Spool::open(directory.path(), SMALL).err().expect("refused").code(), "spool.corrupt");
}

#[test]
fn damage_met_while_reading_is_an_error_not_a_row() {
    let directory = TempDir::new().unwrap();
    let spool = open(&directory, SpoolOptions::default());
    transaction(&spool, 1000);
    spool.sync().unwrap();
    let file = files(&directory).remove(0);
    let mut bytes = fs::read(&file).unwrap();
    let at = bytes.windows(6).position(|window| window == b"change").unwrap();
    bytes[at] = b'C';
    fs::write(&file, bytes).unwrap();
    assert_eq!(spool.reader(1, None).read(1000).unwrap_err().code(), "spool.corrupt");
}

#[test]
fn frames_at_or_below_the_end_are_ignored_in_the_same_process_and_the_next() {
    let directory = TempDir::new().unwrap();
    let spool = open(&directory, SMALL);
    (1..20).for_each(|n| transaction(&spool, n * 1000));
    let bytes = spool.bytes();
    (1..20).for_each(|n| transaction(&spool, n * 1000));
    assert_eq!(spool.bytes(), bytes);
    drop(spool);
    let spool = open(&directory, SMALL);
    (1..21).for_each(|n| transaction(&spool, n * 1000));
    let expected: Vec<String> =
        std::iter::once("relation 1".to_owned()).chain((1..21).map(|n| format!("change 1 {}", n * 1000))).collect();
    assert_eq!(bodies(&spool, 1, None), expected);
}

#[test]
fn a_transaction_sent_again_with_fewer_rows_adds_only_what_is_beyond_the_end() {
    let directory = TempDir::new().unwrap();
    let spool = open(&directory, SMALL);
    relation(&spool, 1, "r");
    change(&spool, 1, 1000, 800, "a");
    change(&spool, 1, 1000, 900, "c");
    commit(&spool, 1000);
    change(&spool, 1, 1000, 808, "b");
    change(&spool, 1, 1000, 900, "c");
    change(&spool, 1, 1000, 908, "d");
    commit(&spool, 1000);
    assert_eq!(bodies(&spool, 1, None), ["r", "a", "c", "d"]);
}

#[test]
fn after_a_rewind_what_the_stream_sends_again_counts_and_what_was_there_does_not() {
    let directory = TempDir::new().unwrap();
    let spool = open(&directory, SMALL);
    for at in [100, 200, 300] {
        transaction(&spool, at);
    }
    // The next process begins at 200. Table 1 has more there than was spooled before:
    // the rest had been under way to a destination.
    drop(spool);
    let spool = open(&directory, SMALL);
    spool.rewind(Lsn(200)).unwrap();
    assert_eq!(bodies(&spool, 1, None), ["relation 1", "change 1 100"]);
    let mut reader = spool.reader(1, None);
    drain(&mut reader);
    assert_eq!(reader.position(), spool.end(1), "a reader at the end has met the table's end");
    relation(&spool, 1, "relation 1");
    change(&spool, 1, 200, 176, "under way");
    change(&spool, 1, 200, 184, "change 1 200");
    commit(&spool, 200);
    let expected = ["relation 1", "change 1 100", "under way", "change 1 200"];
    assert_eq!(bodies(&spool, 1, None), expected);
    assert_eq!(bodies(&spool, 2, None), ["relation 2", "change 2 100"]);
    spool.sync().unwrap();
    drop(spool);
    assert_eq!(bodies(&open(&directory, SMALL), 1, None), expected, "the next process sees the same");
}

#[test]
fn a_file_that_says_what_does_not_count_stays_as_long_as_the_files_before_it() {
    let directory = TempDir::new().unwrap();
    let spool = open(&directory, SMALL);
    for at in (100..1500).step_by(100) {
        transaction(&spool, at);
    }
    spool.rewind(Lsn(800)).unwrap();
    for at in (800..3000).step_by(100) {
        relation(&spool, 3, "relation 3");
        change(&spool, 3, at, at - 16, "change");
        commit(&spool, at);
    }
    spool.release(3, (Lsn(9000), 0)).unwrap();
    spool.release(2, (Lsn(9000), 0)).unwrap();
    spool.sync().unwrap();
    drop(spool);
    let left = bodies(&open(&directory, SMALL), 1, None);
    assert_eq!(left.last().map(String::as_str), Some("change 1 700"));
}

#[test]
fn a_schema_frame_and_the_row_at_its_place_are_both_kept_and_neither_twice() {
    let directory = TempDir::new().unwrap();
    let spool = open(&directory, SMALL);
    for _ in 0..2 {
        spool.append(head(1, 1000, 904), FrameKind::Schema, b"").unwrap();
        relation(&spool, 1, "r");
        change(&spool, 1, 1000, 904, "row");
        commit(&spool, 1000);
    }
    let kinds: Vec<FrameKind> = drain(&mut spool.reader(1, None)).iter().map(|frame| frame.kind).collect();
    assert_eq!(kinds, [FrameKind::Schema, FrameKind::Relation, FrameKind::Change]);
}

#[test]
fn a_change_without_its_relation_and_a_frame_of_another_transaction_are_refused() {
    let directory = TempDir::new().unwrap();
    let spool = open(&directory, SMALL);
    let error = spool.append(head(1, 1000, 904), FrameKind::Change, b"row").unwrap_err();
    assert_eq!(error.code(), "spool.no-relation");
    relation(&spool, 1, "r");
    change(&spool, 1, 1000, 904, "row");
    let error = spool.append(head(1, 2000, 1904), FrameKind::Change, b"row").unwrap_err();
    assert_eq!(error.code(), "spool.order");
    assert_eq!(spool.commit(Lsn(2000), Lsn(2008)).unwrap_err().code(), "spool.order");
    commit(&spool, 1000);
    assert_eq!(bodies(&spool, 1, None), ["r", "row"]);
}

#[test]
fn an_open_transaction_is_invisible_and_a_rollback_leaves_nothing_of_it() {
    let directory = TempDir::new().unwrap();
    let spool = open(&directory, SMALL);
    transaction(&spool, 1000);
    let bytes = spool.bytes();
    // Rows enough for several files, and a relation that was never in force.
    relation(&spool, 1, "relation of nothing");
    for row in 0..100 {
        change(&spool, 1, 50_000, 2_000 + 8 * row, "never");
    }
    assert_eq!(self::bodies(&spool, 1, None), ["relation 1", "change 1 1000"]);
    assert!(files(&directory).len() > 1);
    spool.rollback();
    assert_eq!(files(&directory).len(), 1);
    assert_eq!(spool.bytes(), bytes);
    change(&spool, 1, 60_000, 59_000, "after");
    commit(&spool, 60_000);
    assert_eq!(self::bodies(&spool, 1, None), ["relation 1", "change 1 1000", "after"]);
    drop(spool);
    assert_eq!(self::bodies(&open(&directory, SMALL), 1, None), ["relation 1", "change 1 1000", "after"]);
}

#[test]
fn an_open_transaction_over_several_files_is_gone_after_a_crash() {
    let directory = TempDir::new().unwrap();
    let spool = open(&directory, SMALL);
    transaction(&spool, 1000);
    for row in 0..100 {
        change(&spool, 1, 50_000, 2_000 + 8 * row, "never");
    }
    drop(spool);
    assert!(files(&directory).len() > 2);
    let spool = open(&directory, SMALL);
    assert_eq!(files(&directory).len(), 1);
    assert_eq!(bodies(&spool, 1, None), ["relation 1", "change 1 1000"]);
}

#[test]
fn every_file_begins_each_table_with_its_relation() {
    let directory = TempDir::new().unwrap();
    let spool = open(&directory, SMALL);
    relation(&spool, 1, "one");
    relation(&spool, 2, "two");
    for n in 1..100 {
        change(&spool, 1 + (n % 2) as u32, n * 1000, n * 1000 - 8, "row");
        commit(&spool, n * 1000);
    }
    assert!(files(&directory).len() > 3);
    for after in 2..98 {
        let table = 1 + ((after + 1) % 2) as u32;
        let place = (Lsn(after * 1000), u64::MAX);
        let bodies = bodies(&spool, table, Some(place));
        assert_eq!(bodies[0], if table == 1 { "one" } else { "two" });
        assert!(bodies[1..].iter().all(|body| body == "row"));
    }
    spool.release(1, (Lsn(60_000), 0)).unwrap();
    spool.release(2, (Lsn(60_000), 0)).unwrap();
    drop(spool);
    let spool = open(&directory, SMALL);
    assert_eq!(bodies(&spool, 1, Some((Lsn(90_000), u64::MAX)))[0], "one");
}

#[test]
fn the_reader_returns_the_relation_in_force_and_each_change_of_it_in_its_place() {
    let directory = TempDir::new().unwrap();
    let spool = open(&directory, SMALL);
    for n in 1..=6 {
        relation(&spool, 1, if n < 4 { "old" } else { "new" });
        change(&spool, 1, n * 1000, n * 1000 - 8, &n.to_string());
        commit(&spool, n * 1000);
    }
    assert_eq!(bodies(&spool, 1, None), ["old", "1", "2", "3", "new", "4", "5", "6"]);
    assert_eq!(bodies(&spool, 1, Some((Lsn(2000), u64::MAX))), ["old", "3", "new", "4", "5", "6"]);
    assert_eq!(bodies(&spool, 1, Some((Lsn(5000), u64::MAX))), ["new", "6"]);
    assert_eq!(bodies(&spool, 1, spool.end(1)), [""; 0]);
}

#[test]
fn released_files_go_and_the_tables_that_stay_keep_theirs() {
    let directory = TempDir::new().unwrap();
    let spool = open(&directory, SMALL);
    for n in 1..100 {
        relation(&spool, 1, "one");
        change(&spool, 1, n * 1000, n * 1000 - 8, &n.to_string());
        if n == 50 {
            relation(&spool, 2, "two");
            change(&spool, 2, n * 1000, n * 1000 - 4, "held");
        }
        commit(&spool, n * 1000);
    }
    let before = files(&directory).len();
    spool.release(1, (Lsn(99_000), u64::MAX)).unwrap();
    assert!(before > 4);
    assert_eq!(files(&directory).len(), 2, "the one that holds table 2, and the last");
    assert_eq!(spool.tables(), [2]);
    assert_eq!(bodies(&spool, 2, None), ["two", "held"]);
    assert_eq!(spool.end(1).map(|end| end.0), Some(Lsn(99_000)), "replayed frames are still known");
    spool.forget(2).unwrap();
    assert_eq!(spool.end(2), None);
    assert_eq!(spool.tables(), [0; 0]);
    assert_eq!(files(&directory).len(), 1);
}

#[test]
fn a_transaction_whose_commit_was_in_a_deleted_file_is_whole_after_the_next_open() {
    let directory = TempDir::new().unwrap();
    let spool = open(&directory, SMALL);
    relation(&spool, 1, "one");
    relation(&spool, 2, "two");
    change(&spool, 1, 90_000, 1000, "held");
    for row in 0..100 {
        change(&spool, 2, 90_000, 2000 + 8 * row, "many");
    }
    commit(&spool, 90_000);
    for n in 100..150 {
        change(&spool, 2, n * 1000, n * 1000 - 8, "later");
        commit(&spool, n * 1000);
    }
    let before = files(&directory).len();
    spool.release(2, (Lsn(149_000), u64::MAX)).unwrap();
    assert!(files(&directory).len() < before - 2);
    drop(spool);
    let spool = open(&directory, SMALL);
    assert_eq!(bodies(&spool, 1, None), ["one", "held"]);
}

#[test]
fn when_everything_is_released_a_file_that_grew_is_given_back() {
    let directory = TempDir::new().unwrap();
    let spool = open(&directory, SpoolOptions { segment_bytes: 8_000, ..SMALL });
    (1..20).for_each(|n| transaction(&spool, n * 1000));
    let end = (Lsn(19_000), u64::MAX);
    spool.release(1, end).unwrap();
    assert!(spool.bytes() > 2_000);
    spool.release(2, end).unwrap();
    assert_eq!(spool.bytes(), segment::HEADER);
    transaction(&spool, 20_000);
    assert_eq!(bodies(&spool, 1, None), ["relation 1", "change 1 20000"]);
}

#[test]
fn at_the_limit_appending_waits_for_a_release_and_can_be_tried_again() {
    let directory = TempDir::new().unwrap();
    let spool = open(&directory, SpoolOptions { segment_bytes: 1_000, limit_bytes: 4_000 });
    relation(&spool, 1, "r");
    let mut n = 0;
    let error = loop {
        n += 1;
        match spool.append(head(1, n * 1000, n * 1000 - 8), FrameKind::Change, b"row") {
            Ok(()) => commit(&spool, n * 1000),
            Err(error) => break error,
        }
    };
    assert_eq!(error.code(), "spool.limit");
    assert!(error.is_transient());
    spool.release(1, (Lsn((n - 1) * 1000), u64::MAX)).unwrap();
    change(&spool, 1, n * 1000, n * 1000 - 8, "row");
    commit(&spool, n * 1000);
    assert_eq!(bodies(&spool, 1, Some((Lsn((n - 1) * 1000), u64::MAX))), ["r", "row"]);
}

#[test]
fn a_row_of_forty_megabytes_is_spooled_and_read_once_there_is_room_for_it() {
    let directory = TempDir::new().unwrap();
    let spool = open(&directory, SpoolOptions { segment_bytes: 1 << 20, limit_bytes: 1 << 30 });
    let body: Vec<u8> = (0..40 << 20).map(|n: u32| (n / 7) as u8).collect();
    relation(&spool, 1, "r");
    change(&spool, 1, 1000, 900, "small");
    spool.append(head(1, 1000, 908), FrameKind::Change, &body).unwrap();
    change(&spool, 1, 1000, 916, "small");
    commit(&spool, 1000);
    drop(spool);
    let spool = open(&directory, SMALL);
    let mut reader = spool.reader(1, None);
    let before = drain(&mut reader);
    assert_eq!(before.len(), 2, "the relation, and what stands before it");
    assert!(reader.large().is_some_and(|bytes| bytes > body.len()));
    assert!(drain(&mut reader).is_empty());
    reader.make_room();
    let frames = drain(&mut reader);
    assert_eq!((frames.len(), reader.large()), (2, None));
    assert!(frames[0].body == body);
}

#[test]
fn a_reader_follows_the_writer_across_files_and_loses_and_doubles_nothing() {
    const LAST: u64 = 20_000;
    let directory = TempDir::new().unwrap();
    let spool = open(&directory, SpoolOptions { segment_bytes: 30_000, limit_bytes: 1 << 30 });
    let writer = std::thread::spawn({
        let spool = spool.clone();
        move || {
            for n in 1..=LAST {
                transaction(&spool, n * 1000);
                if n % 100 == 0 {
                    spool.sync().unwrap();
                }
            }
        }
    });
    let mut reader = spool.reader(2, None);
    let mut next = 1;
    while next <= LAST {
        for frame in reader.read(5_000).unwrap() {
            if frame.kind == FrameKind::Change {
                assert_eq!(frame.head.commit, Lsn(next * 1000));
                next += 1;
            }
        }
        let done = reader.position().unwrap_or_default();
        spool.release(2, done).unwrap();
        spool.release(1, done).unwrap();
    }
    writer.join().unwrap();
    assert!(files(&directory).len() <= 2);
}

/// What the spool should hold, as lists.
#[derive(Default)]
struct Model {
    /// Committed transactions: (table, commit, ordinal, relation, body).
    transactions: Vec<Vec<Row>>,
    open: Vec<Row>,
    synced: usize,
    relations: [u32; 3],
    /// As of the last commit.
    committed_relations: [u32; 3],
    released: [Option<(Lsn, u64)>; 3],
    clock: u64,
}

#[derive(Clone, Debug, PartialEq)]
struct Row {
    head: FrameHead,
    relation: String,
    body: Vec<u8>,
}

impl Model {
    fn append(&mut self, spool: &Spool, random: &mut StdRng, commit: u64) {
        let table = random.random_range(0..3);
        if random.random_ratio(1, 10) {
            self.relations[table] += 1;
        }
        let relation = format!("relation {table} {}", self.relations[table]);
        self::relation(spool, table as u32, &relation);
        self.clock += 8;
        let size = if random.random_ratio(1, 50) { 300_000 } else { random.random_range(0..200) };
        let body: Vec<u8> = (0..size).map(|_| random.random()).collect();
        let head = head(table as u32, commit, self.clock);
        spool.append(head, FrameKind::Change, &body).unwrap();
        self.open.push(Row { head, relation, body });
    }

    fn check(&self, spool: &Spool) {
        for table in 0..3 {
            let rows = self.transactions.iter().flatten().filter(|row| row.head.table == table as u32);
            let beyond = |row: &&Row| Some((row.head.commit, row.head.ordinal)) > self.released[table];
            let expected: Vec<&Row> = rows.filter(beyond).collect();
            let found = read_rows(spool, table as u32, self.released[table]);
            assert_eq!(found.len(), expected.len(), "table {table}");
            assert!(found.iter().zip(&expected).all(|(found, expected)| found == *expected), "table {table}");
        }
    }

    /// After a crash: whole transactions from the first one on, the synced ones at least.
    fn after_crash(&mut self, spool: &Spool) {
        let found = (0..3).filter_map(|table| spool.end(table)).map(|end| end.0).max();
        let synced = self.synced.checked_sub(1).map(|last| self.transactions[last][0].head.commit);
        self.transactions.retain(|rows| Some(rows[0].head.commit) <= found.max(synced));
        assert!(self.transactions.len() >= self.synced);
        self.forget_open();
    }

    fn forget_open(&mut self) {
        self.open.clear();
        self.relations = self.committed_relations;
    }
}

fn read_rows(spool: &Spool, table: u32, after: Option<(Lsn, u64)>) -> Vec<Row> {
    let mut relation = None;
    let mut rows = Vec::new();
    for frame in drain(&mut spool.reader(table, after)) {
        match frame.kind {
            FrameKind::Relation => relation = Some(String::from_utf8(frame.body.to_vec()).unwrap()),
            _ => rows.push(Row { head: frame.head, relation: relation.clone().unwrap(), body: frame.body.to_vec() }),
        }
    }
    rows
}

#[test]
fn a_random_life_with_crashes_keeps_whole_transactions_in_order_and_every_synced_one() {
    for seed in 0..12 {
        let mut random = StdRng::seed_from_u64(seed);
        let directory = TempDir::new().unwrap();
        let options = SpoolOptions { segment_bytes: random.random_range(500..20_000), limit_bytes: 1 << 30 };
        let mut spool = open(&directory, options);
        let mut model = Model { clock: 8, ..Model::default() };
        // The file that was last, and its length, at the last sync.
        let mut durable = last_file(&directory);
        for _ in 0..200 {
            match random.random_range(0..100) {
                0..70 => {
                    let rows = random.random_range(1..8);
                    let commit = model.clock + 8 * (rows + 1);
                    (0..rows).for_each(|_| model.append(&spool, &mut random, commit));
                    model.clock = commit;
                    if random.random_ratio(1, 8) {
                        spool.rollback();
                        model.forget_open();
                    } else {
                        self::commit(&spool, commit);
                        model.transactions.push(std::mem::take(&mut model.open));
                        model.committed_relations = model.relations;
                    }
                }
                70..80 => {
                    spool.sync().unwrap();
                    model.synced = model.transactions.len();
                    durable = last_file(&directory);
                }
                80..90 => {
                    let table = random.random_range(0..3);
                    let Some(end) = spool.end(table) else { continue };
                    let through = (Lsn(random.random_range(0..=end.0.0)), u64::MAX);
                    // Only what is durable elsewhere is released.
                    spool.sync().unwrap();
                    model.synced = model.transactions.len();
                    durable = last_file(&directory);
                    spool.release(table, through).unwrap();
                    let released = &mut model.released[table as usize];
                    *released = (*released).max(Some(through));
                }
                90..95 => model.check(&spool),
                _ => {
                    let crashes = random.random_ratio(1, 2);
                    if random.random_ratio(1, 2) {
                        model.append(&spool, &mut random, u64::MAX >> 1);
                    }
                    drop(spool);
                    let last = files(&directory).pop().unwrap();
                    if crashes {
                        let length = fs::metadata(&last).unwrap().len();
                        // A rollback may have cut the mark behind what was synced.
                        let least = if durable.0 == last { durable.1.min(length) } else { 0 };
                        let cut = random.random_range(least..=length);
                        fs::OpenOptions::new().write(true).open(&last).unwrap().set_len(cut).unwrap();
                    }
                    spool = open(&directory, options);
                    if crashes {
                        model.after_crash(&spool);
                    } else {
                        model.forget_open();
                    }
                    model.check(&spool);
                    model.synced = model.transactions.len();
                    durable = last_file(&directory);
                }
            }
        }
        model.check(&spool);
    }
}
