//! Some rows of a batch that is on its way to a plugin: which of them only cross
//! together, and the same batch with fewer.
//!
//! Rows are counted as a refusal counts them: as in `sequence`, or as in the rows of a copy.

use std::collections::HashMap;

use super::change::take_sequence;
use super::fold::encode;
use super::gather::{find, is_missing, take_rows};
use crate::wire;

/// How many rows a refusal can name; none of a truncation or of messages.
pub fn refusable(content: &wire::Content) -> u32 {
    match content {
        wire::Content::Copy(copy) => copy.rows.count,
        wire::Content::Changes(changes) => changes.ops.len() as u32,
        wire::Content::Merge(merge) => merge.upserts.count + merge.deletes.count,
        wire::Content::Truncate(_) | wire::Content::Messages(_) => 0,
    }
}

/// The same content with some of its rows only, which are in ascending order.
pub fn pick(content: &wire::Content, rows: &[u32]) -> wire::Content {
    match content {
        wire::Content::Copy(copy) => wire::Content::Copy(wire::CopyRows {
            run: copy.run.clone(),
            batch_id: copy.batch_id.clone(),
            as_of: copy.as_of,
            rows: take_rows(&copy.rows, rows),
        }),
        wire::Content::Changes(changes) => wire::Content::Changes(pick_changes(changes, rows)),
        wire::Content::Merge(merge) => wire::Content::Merge(pick_merge(merge, rows)),
        wire::Content::Truncate(_) | wire::Content::Messages(_) => content.clone(),
    }
}

fn pick_changes(changes: &wire::ChangeRows, rows: &[u32]) -> wire::ChangeRows {
    let (mut old_index, mut old) = (Vec::new(), Vec::new());
    for (at, row) in (0..).zip(rows) {
        if let Ok(found) = changes.old_index.binary_search(row) {
            old_index.push(at);
            old.push(found as u32);
        }
    }
    wire::ChangeRows {
        sequence: take_sequence(&changes.sequence, rows),
        ops: rows.iter().filter_map(|row| changes.ops.get(*row as usize).copied()).collect(),
        rows: take_rows(&changes.rows, rows),
        old_index,
        old_rows: take_rows(&changes.old_rows, &old),
    }
}

pub(super) fn pick_merge(merge: &wire::MergeRows, rows: &[u32]) -> wire::MergeRows {
    let (upserts, deletes) = rows.split_at(rows.partition_point(|row| *row < merge.upserts.count));
    let deletes: Vec<u32> = deletes.iter().map(|row| row - merge.upserts.count).collect();
    let (mut moved_index, mut moved) = (Vec::new(), Vec::new());
    for (at, row) in (0..).zip(upserts) {
        if let Ok(found) = merge.moved_index.binary_search(row) {
            moved_index.push(at);
            moved.push(found as u32);
        }
    }
    wire::MergeRows {
        sequence: take_sequence(&merge.sequence, rows),
        upserts: take_rows(&merge.upserts, upserts),
        moved_index,
        moved_from: take_rows(&merge.moved_from, &moved),
        deletes: take_rows(&merge.deletes, &deletes),
    }
}

/// The rows in an order in which they can be sent one group of rows after the other:
/// deletes come first, as within a batch, and a row that takes cells from another key
/// comes with whatever becomes of that key (P31). `columns` are those of the table.
pub fn units(content: &wire::Content, columns: usize) -> Vec<Vec<u32>> {
    let count = refusable(content);
    let wire::Content::Merge(merge) = content else { return (0..count).map(|row| vec![row]).collect() };
    let order = (merge.upserts.count..count).chain(0..merge.upserts.count);
    let links = links(merge, columns);
    if links.is_empty() {
        return order.map(|row| vec![row]).collect();
    }
    let mut unit_of: Vec<u32> = (0..count).collect();
    for (a, b) in links {
        let (a, b) = (root(&unit_of, a), root(&unit_of, b));
        unit_of[a as usize] = b;
    }
    let mut units: HashMap<u32, Vec<u32>> = HashMap::new();
    let mut ends: Vec<(u32, u32)> = Vec::new();
    for (at, row) in (0..).zip(order) {
        let unit = root(&unit_of, row);
        units.entry(unit).or_default().push(row);
        ends.push((unit, at));
    }
    // A unit stands where its last row does.
    let last: HashMap<u32, u32> = ends.iter().copied().collect();
    ends.retain(|(unit, at)| last.get(unit) == Some(at));
    ends.into_iter()
        .filter_map(|(unit, _)| units.remove(&unit))
        .map(|mut rows| {
            rows.sort_unstable();
            rows
        })
        .collect()
}

fn root(unit_of: &[u32], mut row: u32) -> u32 {
    while unit_of[row as usize] != row {
        row = unit_of[row as usize];
    }
    row
}

/// Pairs of rows: one takes missing cells from the key that the other is about.
fn links(merge: &wire::MergeRows, columns: usize) -> Vec<(u32, u32)> {
    let missing = |row: u32| !is_whole(&merge.upserts, row, columns);
    let takers: Vec<(u32, u32)> =
        (0..).zip(&merge.moved_index).filter(|(_, row)| missing(**row)).map(|(from, row)| (from, *row)).collect();
    if takers.is_empty() {
        return Vec::new();
    }
    let key: Vec<u16> = merge.moved_from.columns.iter().map(|column| column.ordinal).collect();
    let bytes = |rows: &wire::Rows, row: u32| {
        let mut bytes = Vec::new();
        let whole = key.iter().all(|ordinal| find(rows, *ordinal).is_some_and(|cells| encode(cells, row, &mut bytes)));
        whole.then_some(bytes)
    };
    let mut at: HashMap<Vec<u8>, u32> = HashMap::new();
    for row in 0..merge.upserts.count {
        at.extend(bytes(&merge.upserts, row).map(|key| (key, row)));
    }
    for row in 0..merge.deletes.count {
        at.extend(bytes(&merge.deletes, row).map(|key| (key, merge.upserts.count + row)));
    }
    takers
        .into_iter()
        .filter_map(|(from, row)| Some((row, *at.get(&bytes(&merge.moved_from, from)?)?)))
        .filter(|(row, other)| row != other)
        .collect()
}

/// Whether every column of a row was sent.
pub fn is_whole(rows: &wire::Rows, row: u32, columns: usize) -> bool {
    rows.columns.len() == columns && !rows.columns.iter().any(|column| is_missing(column, row))
}

#[cfg(test)]
mod tests {
    use super::super::testing::{Sent, at, column, key_column, old, schema, text, tuple, whole_map};
    use super::super::{ChangeBuilder, fold};
    use super::*;
    use crate::schema::table::ReplicaIdentity;

    fn numbers(rows: &wire::Rows, ordinal: u16) -> Vec<i32> {
        match find(rows, ordinal).map(|column| &column.data) {
            Some(wire::ColumnData::Plain(wire::Cells::Int32(values))) => values.clone(),
            _ => Vec::new(),
        }
    }

    fn merged(build: impl FnOnce(&mut ChangeBuilder, &super::super::RelationMap)) -> wire::Content {
        let schema = schema(ReplicaIdentity::Default, vec![key_column(1, "int4", 1), column(2, "text")]);
        let mut builder = ChangeBuilder::new(schema.clone());
        build(&mut builder, &whole_map(&schema));
        wire::Content::Merge(fold(&builder.finish(), 0).unwrap())
    }

    #[test]
    fn a_batch_is_cut_with_its_deletes_first() {
        let content = merged(|builder, map| {
            builder.insert(map, &tuple(&[text(1), text("a")]), at(0)).unwrap();
            builder.delete(map, &old(false, &[text(2), Sent::Null]), at(1)).unwrap();
            builder.insert(map, &tuple(&[text(3), text("c")]), at(2)).unwrap();
        });
        assert_eq!(refusable(&content), 3);
        assert_eq!(units(&content, 2), [vec![2], vec![0], vec![1]]);
        let wire::Content::Merge(part) = pick(&content, &[1, 2]) else { panic!("still a merge") };
        assert_eq!((numbers(&part.upserts, 1), numbers(&part.deletes, 1)), (vec![3], vec![2]));
        assert_eq!(part.sequence.ordinal, [2, 1]);
    }

    #[test]
    fn a_row_that_takes_cells_from_another_key_stays_with_it() {
        let moved = |builder: &mut ChangeBuilder, map: &super::super::RelationMap, from: i32, to: i32, row| {
            let before = old(false, &[text(from), Sent::Null]);
            builder.update(map, Some(&before), &tuple(&[text(to), Sent::Unchanged]), at(row)).unwrap();
        };
        let content = merged(|builder, map| {
            builder.insert(map, &tuple(&[text(9), text("new")]), at(0)).unwrap();
            moved(builder, map, 1, 2, 1);
            builder.delete(map, &old(false, &[text(7), Sent::Null]), at(2)).unwrap();
        });
        // Also where no row at all was sent the column.
        let alone = merged(|builder, map| moved(builder, map, 1, 2, 0));
        assert_eq!(units(&alone, 2), [vec![0, 1]]);
        // Upserts 9 and 2, deletes 7 and 1.
        let wire::Content::Merge(whole) = &content else { panic!("a merge") };
        assert_eq!((numbers(&whole.upserts, 1), numbers(&whole.deletes, 1)), (vec![9, 2], vec![7, 1]));
        assert_eq!(units(&content, 2), [vec![2], vec![0], vec![1, 3]]);
        let wire::Content::Merge(part) = pick(&content, &[1, 3]) else { panic!("still a merge") };
        assert_eq!((part.moved_index.clone(), numbers(&part.moved_from, 1)), (vec![0], vec![1]));
        let wire::Content::Merge(part) = pick(&content, &[0]) else { panic!("still a merge") };
        assert!(part.moved_index.is_empty() && part.moved_from.columns.is_empty());
    }

    #[test]
    fn changes_keep_their_old_rows() {
        let schema = schema(ReplicaIdentity::Full, vec![key_column(1, "int4", 1), column(2, "text")]);
        let map = whole_map(&schema);
        let mut builder = ChangeBuilder::new(schema);
        builder.insert(&map, &tuple(&[text(1), text("a")]), at(0)).unwrap();
        for (row, key) in [(1, 2), (2, 3)] {
            let before = old(true, &[text(key), text("before")]);
            builder.update(&map, Some(&before), &tuple(&[text(key), text("b")]), at(row)).unwrap();
        }
        let content = wire::Content::Changes(builder.finish().rows);
        let wire::Content::Changes(part) = pick(&content, &[0, 2]) else { panic!("still changes") };
        assert_eq!((part.ops.as_slice(), part.old_index.as_slice()), (&[0, 1][..], &[1][..]));
        assert_eq!((numbers(&part.rows, 1), numbers(&part.old_rows, 1)), (vec![1, 3], vec![3]));
    }
}
