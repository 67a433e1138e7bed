use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::*;
use crate::batch::ChangeBuilder;
use crate::batch::layout::layout;
use crate::batch::render::render;
use crate::batch::testing::{Sent, at, column, key_column, old, schema, text, tuple, whole_map};
use crate::schema::table::{Column, ReplicaIdentity, TableSchema};

/// A cell as text: `-` for missing, `null` for null.
fn cell(schema: &TableSchema, rows: &wire::Rows, ordinal: u16, row: u32) -> String {
    match find(rows, ordinal) {
        None => "-".to_owned(),
        Some(values) if is_missing(values, row) => "-".to_owned(),
        Some(values) if is_null(values, row) => "null".to_owned(),
        Some(values) => {
            let mut out = Vec::new();
            assert!(render(values, row, layout(schema.column(ordinal).unwrap().1), &mut out));
            String::from_utf8(out).unwrap()
        }
    }
}

fn cells(schema: &TableSchema, rows: &wire::Rows, ordinals: &[u16]) -> Vec<Vec<String>> {
    (0..rows.count).map(|row| ordinals.iter().map(|ordinal| cell(schema, rows, *ordinal, row)).collect()).collect()
}

/// A change as pgoutput sends it.
#[derive(Clone, Debug)]
enum Event {
    Insert(Vec<Sent>),
    Update(Option<Vec<Sent>>, Vec<Sent>),
    Delete(Vec<Sent>),
}

fn batch(schema: &Arc<TableSchema>, events: &[Event], first: u64) -> ChangeBatch {
    let whole = schema.replica_identity == ReplicaIdentity::Full;
    let map = whole_map(schema);
    let mut builder = ChangeBuilder::new(Arc::clone(schema));
    for (event, n) in events.iter().zip(first..) {
        match event {
            Event::Insert(new) => builder.insert(&map, &tuple(new), at(n)),
            Event::Update(None, new) => builder.update(&map, None, &tuple(new), at(n)),
            Event::Update(Some(before), new) => builder.update(&map, Some(&old(whole, before)), &tuple(new), at(n)),
            Event::Delete(before) => builder.delete(&map, &old(whole, before), at(n)),
        }
        .unwrap();
    }
    builder.finish()
}

fn key_and_value() -> Arc<TableSchema> {
    schema(ReplicaIdentity::Default, vec![key_column(1, "text", 1), column(2, "text")])
}

fn insert(key: &str, value: &str) -> Event {
    Event::Insert(vec![text(key), text(value)])
}

fn update(key: &str, value: Sent) -> Event {
    Event::Update(None, vec![text(key), value])
}

fn moved(from: &str, to: &str, value: Sent) -> Event {
    Event::Update(Some(vec![text(from), Sent::Null]), vec![text(to), value])
}

fn delete(key: &str) -> Event {
    Event::Delete(vec![text(key), Sent::Null])
}

/// Upserts, `moved-from` of those that have one, deletes.
type Folded = (Vec<Vec<String>>, Vec<(u32, String)>, Vec<String>);

fn folded(events: &[Event]) -> Folded {
    let schema = key_and_value();
    let merge = fold(&batch(&schema, events, 0), 0).unwrap();
    let from = (0..merge.moved_from.count).map(|row| cell(&schema, &merge.moved_from, 1, row));
    let moved = merge.moved_index.iter().copied().zip(from).collect();
    let deletes = (0..merge.deletes.count).map(|row| cell(&schema, &merge.deletes, 1, row)).collect();
    (cells(&schema, &merge.upserts, &[1, 2]), moved, deletes)
}

fn rows(rows: &[[&str; 2]]) -> Vec<Vec<String>> {
    rows.iter().map(|row| row.map(str::to_owned).to_vec()).collect()
}

#[test]
fn an_unsent_cell_keeps_the_value_of_an_earlier_change_in_the_batch() {
    let (upserts, moved, deletes) =
        folded(&[insert("a", "1"), update("a", Sent::Unchanged), update("b", Sent::Unchanged)]);
    assert_eq!(upserts, rows(&[["a", "1"], ["b", "-"]]));
    assert!(moved.is_empty() && deletes.is_empty());
}

#[test]
fn a_changed_key_deletes_the_old_row_and_says_where_unsent_cells_are() {
    let (upserts, from, deletes) = folded(&[moved("a", "b", Sent::Unchanged)]);
    assert_eq!(upserts, rows(&[["b", "-"]]));
    assert_eq!(from, [(0, "a".to_owned())]);
    assert_eq!(deletes, ["a"]);
}

#[test]
fn a_chain_of_keys_carries_the_first_one() {
    let (upserts, from, mut deletes) =
        folded(&[update("a", Sent::Unchanged), moved("a", "b", Sent::Unchanged), moved("b", "c", Sent::Unchanged)]);
    deletes.sort();
    assert_eq!((upserts, from), (rows(&[["c", "-"]]), vec![(0, "a".to_owned())]));
    assert_eq!(deletes, ["a", "b"]);
}

#[test]
fn a_row_that_is_back_under_its_key_has_not_moved() {
    let (upserts, from, deletes) = folded(&[moved("a", "b", Sent::Unchanged), moved("b", "a", Sent::Unchanged)]);
    assert_eq!((upserts, deletes), (rows(&[["a", "-"]]), vec!["b".to_owned()]));
    assert!(from.is_empty());
}

#[test]
fn two_rows_that_swap_their_keys_each_carry_the_other_one() {
    let (upserts, from, deletes) = folded(&[
        moved("a", "tmp", Sent::Unchanged),
        moved("b", "a", Sent::Unchanged),
        moved("tmp", "b", Sent::Unchanged),
    ]);
    assert_eq!(upserts, rows(&[["a", "-"], ["b", "-"]]));
    assert_eq!(from, [(0, "b".to_owned()), (1, "a".to_owned())]);
    assert_eq!(deletes, ["tmp"]);
}

#[test]
fn a_row_that_was_inserted_in_the_batch_carries_no_key_when_it_moves() {
    let (upserts, from, deletes) = folded(&[insert("a", "1"), moved("a", "b", Sent::Unchanged)]);
    assert_eq!((upserts, deletes), (rows(&[["b", "1"]]), vec!["a".to_owned()]));
    assert!(from.is_empty());
}

#[test]
fn a_row_that_was_deleted_and_inserted_again_inherits_nothing() {
    let (upserts, _, deletes) =
        folded(&[update("a", text("old")), delete("a"), insert("a", "new"), update("a", Sent::Unchanged)]);
    assert_eq!(upserts, rows(&[["a", "new"]]));
    assert!(deletes.is_empty());
}

#[test]
fn a_row_that_appears_and_vanishes_in_the_batch_is_still_deleted() {
    let (upserts, _, deletes) = folded(&[insert("a", "1"), delete("a")]);
    assert!(upserts.is_empty());
    assert_eq!(deletes, ["a"]);
}

#[test]
fn numbers_that_are_equal_but_printed_otherwise_are_two_keys() {
    let schema = schema(ReplicaIdentity::Default, vec![key_column(1, "numeric", 1), column(2, "text")]);
    let merge = fold(&batch(&schema, &[moved("1.0", "1.00", Sent::Unchanged)], 0), 0).unwrap();
    assert_eq!(cells(&schema, &merge.upserts, &[1]), [["1.00"]]);
    assert_eq!(cells(&schema, &merge.deletes, &[1]), [["1.0"]]);
}

#[test]
fn odd_keys_are_not_taken_for_the_zero_in_their_place() {
    let schema = schema(ReplicaIdentity::Default, vec![key_column(1, "date", 1), column(2, "text")]);
    let events = [
        insert("infinity", "1"),
        insert("1970-01-01", "2"),
        insert("-infinity", "3"),
        update("infinity", text("4")),
        delete("-infinity"),
    ];
    let merge = fold(&batch(&schema, &events, 0), 0).unwrap();
    assert_eq!(cells(&schema, &merge.upserts, &[1, 2]), [["1970-01-01", "2"], ["infinity", "4"]]);
    assert_eq!(cells(&schema, &merge.deletes, &[1, 2]), [["-infinity", "-"]]);
    assert_eq!(merge.deletes.columns[0].odd[0].row, 0);
}

#[test]
fn texts_of_a_key_of_two_columns_do_not_run_into_each_other() {
    let columns = vec![key_column(1, "text", 2), column(2, "int4"), key_column(3, "text", 1)];
    let schema = schema(ReplicaIdentity::Default, columns);
    let row = |a: &str, b: &str| Event::Insert(vec![text(a), text(1), text(b)]);
    let merge = fold(&batch(&schema, &[row("a", "bc"), row("ab", "c"), row("a", "bc")], 0), 0).unwrap();
    assert_eq!(merge.upserts.count, 2);
    let gone = Event::Delete(vec![text("ab"), Sent::Null, text("c")]);
    let merge = fold(&batch(&schema, &[gone], 0), 0).unwrap();
    assert_eq!(cells(&schema, &merge.deletes, &[1, 3]), [["ab", "c"]]);
    assert_eq!(merge.deletes.columns.len(), 2);
}

#[test]
fn the_key_under_an_identity_index_is_its_columns_and_not_the_primary_key() {
    let identity = Column { identity: true, nullable: false, ..column(2, "text") };
    let primary = Column { identity: false, ..key_column(1, "int4", 1) };
    let schema = schema(ReplicaIdentity::Index, vec![primary, identity]);
    let events = [Event::Insert(vec![text(1), text("x")]), Event::Update(None, vec![text(2), text("x")])];
    let merge = fold(&batch(&schema, &events, 0), 0).unwrap();
    assert_eq!(cells(&schema, &merge.upserts, &[1, 2]), [["2", "x"]]);
}

#[test]
fn a_table_without_a_key_and_a_key_without_a_cell_are_named_errors() {
    let keyless = schema(ReplicaIdentity::Full, vec![column(1, "int4")]);
    let error = fold(&batch(&keyless, &[Event::Insert(vec![text(1)])], 0), 0).unwrap_err();
    assert_eq!(error.code(), "batch.no-key");
    let error = fold(&batch(&key_and_value(), &[update_without_key()], 0), 0).unwrap_err();
    assert_eq!(error.code(), "batch.key-missing");
}

fn update_without_key() -> Event {
    Event::Update(None, vec![Sent::Unchanged, text("x")])
}

/// A row at the source or the destination: its cells behind the key.
type Row = [Option<String>; 2];
type Table = BTreeMap<String, Row>;

/// A source that changes a small table at random and keeps what pgoutput would send.
struct Source {
    random: StdRng,
    full: bool,
    table: Table,
    events: Vec<Event>,
    /// The table after each event.
    after: Vec<Table>,
    values: u32,
}

fn sent(value: &Option<String>) -> Sent {
    value.as_ref().map_or(Sent::Null, text)
}

impl Source {
    fn key(&mut self, used: bool) -> Option<String> {
        let keys: Vec<String> =
            (0..6).map(|key| format!("k{key}")).filter(|key| self.table.contains_key(key) == used).collect();
        (!keys.is_empty()).then(|| keys[self.random.random_range(0..keys.len())].clone())
    }

    fn value(&mut self) -> Option<String> {
        self.values += 1;
        self.random.random_bool(0.8).then(|| format!("v{}", self.values))
    }

    fn old_image(&self, key: &str, row: &Row) -> Vec<Sent> {
        let cells = row.iter().map(|value| if self.full { sent(value) } else { Sent::Null });
        std::iter::once(text(key)).chain(cells).collect()
    }

    fn insert(&mut self) {
        let Some(key) = self.key(false) else { return };
        let row = [self.value(), self.value()];
        let cells = std::iter::once(text(&key)).chain(row.iter().map(sent)).collect();
        self.table.insert(key, row);
        self.done(Event::Insert(cells));
    }

    /// Changes cells, or leaves them: sent all the same, or not sent.
    fn update(&mut self, from: &str, to: &str) {
        let before = self.table.remove(from).unwrap();
        let mut row = before.clone();
        let mut cells = vec![text(to)];
        for value in &mut row {
            cells.push(match self.random.random_range(0..4) {
                0 => {
                    *value = self.value();
                    sent(value)
                }
                1 => sent(value),
                // A null is never TOASTed.
                _ if value.is_none() => Sent::Null,
                _ => Sent::Unchanged,
            });
        }
        let image = (self.full || from != to).then(|| self.old_image(from, &before));
        self.table.insert(to.to_owned(), row);
        self.done(Event::Update(image, cells));
    }

    fn delete(&mut self) {
        let Some(key) = self.key(true) else { return };
        let row = self.table.remove(&key).unwrap();
        let image = self.old_image(&key, &row);
        self.done(Event::Delete(image));
    }

    fn swap(&mut self) {
        if let (Some(a), Some(b), Some(free)) = (self.key(true), self.key(true), self.key(false))
            && a != b
        {
            self.update(&a, &free);
            self.update(&b, &a);
            self.update(&free, &b);
        }
    }

    fn done(&mut self, event: Event) {
        self.events.push(event);
        self.after.push(self.table.clone());
    }

    fn step(&mut self) {
        match self.random.random_range(0..10) {
            0..3 => self.insert(),
            3..6 => {
                if let Some(key) = self.key(true) {
                    self.update(&key, &key);
                }
            }
            6..8 => {
                if let (Some(from), Some(to)) = (self.key(true), self.key(false)) {
                    self.update(&from, &to);
                }
            }
            8 => self.swap(),
            _ => self.delete(),
        }
    }
}

/// What a transactional destination does with merge rows.
fn apply(schema: &TableSchema, merge: &wire::MergeRows, table: &mut Table) {
    let before = table.clone();
    let mut touched = BTreeSet::new();
    for row in 0..merge.deletes.count {
        let key = cell(schema, &merge.deletes, 1, row);
        table.remove(&key);
        assert!(touched.insert(key), "a key comes twice");
    }
    for row in 0..merge.upserts.count {
        let key = cell(schema, &merge.upserts, 1, row);
        let moved = merge.moved_index.iter().position(|index| *index == row);
        let from = moved.map_or(key.clone(), |at| cell(schema, &merge.moved_from, 1, at as u32));
        let value = |at: usize| match cell(schema, &merge.upserts, at as u16 + 2, row).as_str() {
            "-" => before.get(&from).expect("a missing cell of a row that was not there")[at].clone(),
            "null" => None,
            text => Some(text.to_owned()),
        };
        table.insert(key.clone(), [value(0), value(1)]);
        assert!(touched.insert(key), "a key comes twice");
    }
    assert_eq!(merge.sequence.ordinal.len(), touched.len());
    assert_eq!(merge.moved_index.len() as u32, merge.moved_from.count);
}

/// The last event that names each key, in the order of upserts and deletes.
fn check_sequence(schema: &TableSchema, merge: &wire::MergeRows, events: &[Event], first: u64) {
    let name = |cells: &[Sent]| match &cells[0] {
        Sent::Text(key) => key.clone(),
        other => panic!("{other:?}"),
    };
    let mut last = BTreeMap::new();
    for (event, n) in events.iter().zip(first..) {
        match event {
            Event::Insert(new) => _ = last.insert(name(new), n),
            Event::Delete(before) => _ = last.insert(name(before), n),
            Event::Update(before, new) => {
                before.iter().for_each(|before| _ = last.insert(name(before), n));
                last.insert(name(new), n);
            }
        }
    }
    let upserts = (0..merge.upserts.count).map(|row| cell(schema, &merge.upserts, 1, row));
    let deletes = (0..merge.deletes.count).map(|row| cell(schema, &merge.deletes, 1, row));
    let keys: Vec<String> = upserts.chain(deletes).collect();
    let expected: Vec<u64> = keys.iter().map(|key| last[key]).collect();
    assert_eq!(merge.sequence.ordinal, expected);
    assert_eq!(keys.len(), last.len());
}

#[test]
fn folded_batches_leave_what_the_changes_leave_one_by_one() {
    for seed in 0..4_000u64 {
        let replay = || {
            let mut random = StdRng::seed_from_u64(seed);
            let full = random.random_bool(0.3);
            let identity = if full { ReplicaIdentity::Full } else { ReplicaIdentity::Default };
            let schema = schema(identity, vec![key_column(1, "text", 1), column(2, "text"), column(3, "text")]);
            let mut source =
                Source { random, full, table: Table::new(), events: Vec::new(), after: Vec::new(), values: 0 };
            (0..40).for_each(|_| source.step());
            let mut destination = Table::new();
            let mut done = 0;
            while done < source.events.len() {
                let end = source.random.random_range(done + 1..=source.events.len());
                // Rows that are there already may stand before those to fold.
                let start = source.random.random_range(0..=done);
                let batch = batch(&schema, &source.events[start..end], start as u64);
                let merge = fold(&batch, done - start).unwrap();
                check_sequence(&schema, &merge, &source.events[done..end], done as u64);
                apply(&schema, &merge, &mut destination);
                assert_eq!(destination, source.after[end - 1]);
                done = end;
            }
        };
        if let Err(panic) = std::panic::catch_unwind(replay) {
            eprintln!("the seed was {seed}");
            std::panic::resume_unwind(panic);
        }
    }
}
