//! Which rows of a group are at fault: those that the plugin names, or else the group is
//! halved until one row is left. Pure; the ledger holds the parts.

use crate::batch::{pick, refusable, units};
use crate::wire;

use super::ledger::Entry;

/// A row of a group, as a refusal names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct RowAt {
    /// Index of the batch in its group.
    pub batch: u32,
    /// As in the batch's sequence, or as in the rows of a copy.
    pub row: u32,
}

/// Where the fault of a group is.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Isolated {
    /// In one of two halves, which are tried one after the other.
    Split,
    /// In these rows.
    Rows(Vec<RowAt>),
    /// In no row, but in what is done to this table.
    Table(u32),
    /// There is no such group.
    Nothing,
}

/// What is sent together or not at all: rows of one batch; no rows are a batch that has
/// none.
type Piece = (u32, Vec<u32>);

fn pieces(entry: &Entry) -> Vec<Piece> {
    let of_batch = |(index, batch): (u32, &wire::Batch)| {
        let columns = entry.columns.iter().find(|(oid, _)| *oid == batch.table_id).map_or(0, |(_, columns)| *columns);
        let units = units(&batch.content, columns);
        let empty = units.is_empty().then(Vec::new);
        units.into_iter().chain(empty).map(move |rows| (index, rows))
    };
    (0..).zip(&entry.group.batches).flat_map(of_batch).collect()
}

/// Whether there is more than one piece.
pub(super) fn divisible(entry: &Entry) -> bool {
    pieces(entry).len() > 1
}

/// The rows that go with those that are named, themselves included; names that no row
/// has are left out.
pub(super) fn with_their_like(entry: &Entry, named: &[RowAt]) -> Vec<RowAt> {
    let mut named = named.to_vec();
    named.sort_unstable();
    let is_named = |batch: u32, row: u32| named.binary_search(&RowAt { batch, row }).is_ok();
    let mut rows = Vec::new();
    for (batch, unit) in pieces(entry) {
        if unit.iter().any(|row| is_named(batch, *row)) {
            rows.extend(unit.into_iter().map(|row| RowAt { batch, row }));
        }
    }
    rows
}

/// What is at fault in a group that is one piece.
pub(super) fn only_piece(entry: &Entry) -> Isolated {
    match pieces(entry).into_iter().next() {
        None => Isolated::Nothing,
        Some((batch, rows)) if rows.is_empty() => {
            entry.group.batches.get(batch as usize).map_or(Isolated::Nothing, |batch| Isolated::Table(batch.table_id))
        }
        Some((batch, rows)) => Isolated::Rows(rows.into_iter().map(|row| RowAt { batch, row }).collect()),
    }
}

/// The group in two halves, or as it was if it is one piece.
///
/// The first half of a batch that is cut says nothing about how far its table is, so that
/// the table counts as being where it was before the batch until the last part of it is
/// taken (P32). What counts only once all is taken, the source's progress and the memory,
/// is the second half's.
pub(super) fn halve(mut entry: Entry) -> Result<[Entry; 2], Box<Entry>> {
    let mut first = pieces(&entry);
    if first.len() < 2 {
        return Err(Box::new(entry));
    }
    let second = first.split_off(first.len() / 2);
    let cut = first.last().map(|(batch, _)| *batch).filter(|batch| second.iter().any(|(other, _)| other == batch));
    let (mut halves, total) = ([half_of(&entry), half_of(&entry)], rows(&entry.group).max(1));
    for (half, pieces) in halves.iter_mut().zip([first, second]) {
        half.group.batches = batches(&mut entry.group.batches, pieces, cut);
    }
    let [one, two] = &mut halves;
    if let Some(batch) = cut.and_then(|_| one.group.batches.last_mut()) {
        batch.through = None;
    }
    let later: Vec<u32> = two.group.batches.iter().map(|batch| batch.table_id).collect();
    (two.positions, one.positions) = entry.positions.iter().copied().partition(|(oid, _)| later.contains(oid));
    two.group.whole = entry.group.whole;
    two.progress = entry.progress;
    two.ended = std::mem::take(&mut entry.ended);
    two.taken = std::mem::take(&mut entry.taken);
    for half in &mut halves {
        let share = rows(&half.group);
        half.bytes = (entry.bytes as u64 * share / total) as usize;
        half.changes = entry.changes * share / total;
        half.copied = entry.copied.as_ref().map(|copied| copied.some(share));
    }
    Ok(halves)
}

fn half_of(entry: &Entry) -> Entry {
    let mut half = Entry::new();
    half.committed_at = entry.committed_at;
    half.suspect = entry.suspect;
    half.clears = entry.clears;
    half.columns = entry.columns.clone();
    half
}

/// The batches of these pieces. Only the batch that is cut is copied.
fn batches(from: &mut [wire::Batch], pieces: Vec<Piece>, cut: Option<u32>) -> Vec<wire::Batch> {
    let mut taken: Vec<(u32, Vec<u32>)> = Vec::new();
    for (batch, rows) in pieces {
        match taken.last_mut().filter(|(last, _)| *last == batch) {
            Some((_, known)) => known.extend(rows),
            None => taken.push((batch, rows)),
        }
    }
    let mut batches = Vec::with_capacity(taken.len());
    for (index, mut rows) in taken {
        let Some(batch) = from.get_mut(index as usize) else { continue };
        rows.sort_unstable();
        let content = match cut == Some(index) {
            true => pick(&batch.content, &rows),
            false => std::mem::replace(&mut batch.content, nothing()),
        };
        let wire::Batch { table_id, snapshot, through, .. } = *batch;
        batches.push(wire::Batch { table_id, snapshot, through, content });
    }
    batches
}

/// Some rows of a group of a copy as a group of its own, which a trap is expected of.
pub(super) fn part_of_copy(entry: &Entry, rows: &[u32]) -> Entry {
    let mut part = half_of(entry);
    part.suspect = true;
    part.copied = entry.copied.as_ref().map(|copied| copied.some(rows.len() as u64));
    for batch in &entry.group.batches {
        let mut content = pick(&batch.content, rows);
        if let (wire::Content::Copy(copy), Some(first)) = (&mut content, rows.first()) {
            // Other rows, another id.
            copy.batch_id = format!("{}.{first}+{}", copy.batch_id, rows.len());
        }
        let wire::Batch { table_id, snapshot, through, .. } = *batch;
        part.group.batches.push(wire::Batch { table_id, snapshot, through, content });
    }
    part
}

/// What is left where a content was taken out.
fn nothing() -> wire::Content {
    let sequence =
        wire::Sequence { epoch: 0, commit: Vec::new(), ordinal: Vec::new(), committed_at: Vec::new(), xid: Vec::new() };
    let none = || wire::BytesArray { offsets: vec![0], data: Vec::new() };
    wire::Content::Messages(wire::MessageRows { sequence, prefixes: none(), contents: none() })
}

/// Rows that a refusal could name.
pub(super) fn rows(group: &wire::Group) -> u64 {
    group.batches.iter().map(|batch| u64::from(refusable(&batch.content))).sum()
}

/// Takes rows out. Where the destination stores how far a table is (`keep_empty`), a
/// batch without a row left still says so; otherwise it goes.
pub(super) fn remove_rows(entry: &mut Entry, out: &[RowAt], keep_empty: bool) {
    let mut index = 0;
    entry.group.batches.retain_mut(|batch| {
        let gone: Vec<u32> = out.iter().filter(|at| at.batch == index).map(|at| at.row).collect();
        index += 1;
        if gone.is_empty() {
            return true;
        }
        let kept: Vec<u32> = (0..refusable(&batch.content)).filter(|row| !gone.contains(row)).collect();
        batch.content = pick(&batch.content, &kept);
        !kept.is_empty() || (keep_empty && batch.through.is_some())
    });
    if let Some(copied) = &mut entry.copied {
        copied.rows = rows(&entry.group);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::position::{Lsn, Position};

    fn numbers(values: &[i32]) -> wire::Rows {
        let data = wire::ColumnData::Plain(wire::Cells::Int32(values.to_vec()));
        let column = wire::ColumnValues { ordinal: 1, validity: None, missing: None, odd: Vec::new(), data };
        wire::Rows { count: values.len() as u32, columns: vec![column] }
    }

    fn values(group: &wire::Group) -> Vec<i32> {
        let of_batch = |batch: &wire::Batch| match &batch.content {
            wire::Content::Changes(changes) => changes.rows.columns.iter().find_map(|column| match &column.data {
                wire::ColumnData::Plain(wire::Cells::Int32(values)) => Some(values.clone()),
                _ => None,
            }),
            _ => None,
        };
        group.batches.iter().filter_map(of_batch).flatten().collect()
    }

    fn batch(table_id: u32, values: &[i32]) -> wire::Batch {
        let count = values.len();
        let ordinals: Vec<u64> = values.iter().map(|value| *value as u64).collect();
        wire::Batch {
            table_id,
            snapshot: wire::SnapshotId { commit: 0, message: 0 },
            through: Some(wire::Position { epoch: 1, commit: 10, ordinal: *ordinals.last().unwrap_or(&0) }),
            content: wire::Content::Changes(wire::ChangeRows {
                sequence: wire::Sequence {
                    epoch: 1,
                    commit: vec![10; count],
                    ordinal: ordinals,
                    committed_at: vec![0; count],
                    xid: vec![0; count],
                },
                ops: vec![0; count],
                rows: numbers(values),
                old_index: Vec::new(),
                old_rows: wire::Rows { count: 0, columns: Vec::new() },
            }),
        }
    }

    fn entry(batches: Vec<wire::Batch>) -> Entry {
        let mut entry = Entry::new();
        entry.positions =
            batches.iter().map(|batch| (batch.table_id, Position { epoch: 1, commit: Lsn(10), ordinal: 9 })).collect();
        entry.group.batches = batches;
        entry.progress = Some(Lsn(20));
        entry
    }

    #[test]
    fn only_the_last_part_of_a_batch_says_how_far_its_table_is() {
        let Ok([one, two]) = halve(entry(vec![batch(7, &[1, 2, 3, 4, 5])])) else { panic!("two halves") };
        assert_eq!((values(&one.group), values(&two.group)), (vec![1, 2], vec![3, 4, 5]));
        assert!(one.group.batches[0].through.is_none());
        assert_eq!((one.progress, one.positions.len()), (None, 0));
        assert_eq!(two.group.batches[0].through.map(|through| through.ordinal), Some(5));
        assert_eq!((two.progress, two.positions.len()), (Some(Lsn(20)), 1));
    }

    #[test]
    fn a_batch_that_is_not_cut_keeps_its_place() {
        let Ok([one, two]) = halve(entry(vec![batch(7, &[1, 2]), batch(8, &[3, 4])])) else { panic!("two halves") };
        assert_eq!((values(&one.group), values(&two.group)), (vec![1, 2], vec![3, 4]));
        assert!(one.group.batches[0].through.is_some() && two.group.batches[0].through.is_some());
        assert_eq!((one.positions[0].0, two.positions[0].0), (7, 8));
    }

    #[test]
    fn halving_ends_at_the_one_row_that_is_refused_and_sends_all_others_once() {
        for culprit in 1..=37 {
            let all: Vec<i32> = (1..=37).collect();
            let mut left = vec![entry(vec![batch(7, &all[..20]), batch(8, &all[20..])])];
            let (mut taken, mut calls, mut found) = (Vec::new(), 0, None);
            while let Some(entry) = left.pop() {
                calls += 1;
                if !values(&entry.group).contains(&culprit) {
                    taken.extend(values(&entry.group));
                    continue;
                }
                match halve(entry) {
                    Ok([one, two]) => left.extend([two, one]),
                    Err(entry) => {
                        assert!(matches!(only_piece(&entry), Isolated::Rows(rows) if rows.len() == 1));
                        found = Some(values(&entry.group));
                    }
                }
            }
            assert_eq!(found, Some(vec![culprit]));
            assert!(calls <= 13, "{calls} calls for 37 rows");
            let others: Vec<i32> = all.into_iter().filter(|value| *value != culprit).collect();
            assert_eq!(taken, others);
        }
    }

    #[test]
    fn a_batch_without_rows_is_kept_only_where_its_place_is_stored() {
        for (keep, batches) in [(true, 2), (false, 1)] {
            let mut entry = entry(vec![batch(7, &[1, 2]), batch(8, &[3])]);
            remove_rows(&mut entry, &[RowAt { batch: 1, row: 0 }, RowAt { batch: 0, row: 1 }], keep);
            assert_eq!((values(&entry.group), entry.group.batches.len()), (vec![1], batches));
            assert_eq!(entry.positions.len(), 2);
        }
    }

    #[test]
    fn names_that_no_row_has_are_ignored() {
        let entry = entry(vec![batch(7, &[1, 2])]);
        let named = [RowAt { batch: 0, row: 1 }, RowAt { batch: 0, row: 2 }, RowAt { batch: 9, row: 0 }];
        assert_eq!(with_their_like(&entry, &named), [RowAt { batch: 0, row: 1 }]);
    }
}
