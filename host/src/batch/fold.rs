//! Changes folded to what the table must become: each key at most once (P30, P31).

use std::collections::HashMap;
use std::hash::{BuildHasher, BuildHasherDefault, Hasher, RandomState};

use super::change::{ChangeBatch, DELETE, INSERT, take_sequence};
use super::gather::{NO_ROW, Part, bit, bytes_of, find, gather, is_missing, is_null, items_of, odd_cell};
use crate::error::{Error, Result};
use crate::wire;

/// No entry.
const NOWHERE: u32 = u32::MAX;

/// Folds the changes of a batch from a row on.
///
/// The key is the schema's merge key, compared bytewise (numeric 1.0 and 1.00 are two
/// keys). Every key that the changes touch comes out once: as an upsert, with the cells
/// that are known, or as a delete, even if its row appeared and vanished within the
/// batch, because the destination may hold an older row of that key.
///
/// Cells stay missing only where the row was there before the batch and none of its
/// changes brought them; they are then to be found under the upsert's own key or, if it
/// has one, under its `moved-from`.
///
/// Errors: `batch.no-key` if the table has no merge key, `batch.key-missing` if a cell
/// of a key is null or was not sent.
pub fn fold(batch: &ChangeBatch, from_row: usize) -> Result<wire::MergeRows> {
    let key = batch.schema.merge_key();
    if key.is_empty() {
        return Err(Error::permanent(
            "batch.no-key",
            format!("{} has no key, so its changes cannot be merged", batch.schema.name),
        )
        .next("Give the table a primary key or an identity index, or use mode `changes`"));
    }
    let mut fold = Fold::new(batch, &key);
    let rows = batch.len();
    let mut old = batch.rows.old_index.partition_point(|row| (*row as usize) < from_row) as u32;
    for row in from_row.min(rows)..rows {
        let row = row as u32;
        let old_row = (batch.rows.old_index.get(old as usize) == Some(&row)).then_some(old);
        old += u32::from(old_row.is_some());
        fold.take(row, old_row)?;
    }
    Ok(fold.finish(&key))
}

/// What became of a key so far.
#[derive(Clone, Copy)]
enum State {
    /// Its row was not touched yet: it is what it was before the batch.
    Before,
    /// Its row was last changed by `last`.
    Live { last: u32, origin: Origin },
    /// There is no row. The key is in `at` of the changed rows, or of the old ones.
    Deleted { change: u32, at: u32, in_old: bool },
}

/// Where a live row was when the batch began.
#[derive(Clone, Copy)]
struct Origin {
    /// The key it had; `NOWHERE` if it was inserted since.
    entry: u32,
    /// The old row that has that key, if the row has moved since.
    old_row: u32,
}

/// One key.
struct Entry {
    /// Its bytes in `Keys::bytes`.
    start: usize,
    end: usize,
    /// Another key with the same hash.
    next: u32,
    state: State,
}

struct Fold<'a> {
    batch: &'a ChangeBatch,
    keys: Keys<'a>,
    /// By row: the row of the batch that changed the same table row before, if one did
    /// and its cells are inherited.
    before: Vec<u32>,
    /// By row: its key.
    entry_of: Vec<u32>,
}

impl<'a> Fold<'a> {
    fn new(batch: &'a ChangeBatch, key: &[u16]) -> Fold<'a> {
        Fold {
            batch,
            keys: Keys::new(batch, key),
            before: vec![NO_ROW; batch.len()],
            entry_of: vec![NOWHERE; batch.len()],
        }
    }

    fn take(&mut self, row: u32, old_row: Option<u32>) -> Result<()> {
        let here = self.keys.new_row(row)?;
        self.entry_of[row as usize] = here;
        match self.batch.rows.ops[row as usize] {
            INSERT => {
                let origin = Origin { entry: NOWHERE, old_row: NO_ROW };
                self.keys.entries[here as usize].state = State::Live { last: row, origin };
            }
            DELETE => {
                self.keys.entries[here as usize].state = State::Deleted { change: row, at: row, in_old: false };
            }
            _ => {
                let there = match old_row {
                    Some(old_row) => self.keys.old_row(old_row)?,
                    None => here,
                };
                self.update(row, here, there, old_row.unwrap_or(NO_ROW));
            }
        }
        Ok(())
    }

    /// The row of key `there` is now that of key `here`, which is mostly the same.
    fn update(&mut self, row: u32, here: u32, there: u32, old_row: u32) {
        let mut origin = match self.keys.entries[there as usize].state {
            State::Live { last, origin } => {
                self.before[row as usize] = last;
                origin
            }
            State::Before | State::Deleted { .. } => Origin { entry: there, old_row: NO_ROW },
        };
        if here != there {
            if origin.old_row == NO_ROW {
                origin.old_row = old_row;
            }
            self.keys.entries[there as usize].state = State::Deleted { change: row, at: old_row, in_old: true };
        }
        self.keys.entries[here as usize].state = State::Live { last: row, origin };
    }

    fn finish(self, key: &[u16]) -> wire::MergeRows {
        let (mut upserts, mut moved_index, mut moved_old) = (Vec::new(), Vec::new(), Vec::new());
        for (row, entry) in self.entry_of.iter().enumerate() {
            let row = row as u32;
            let Some(Entry { state: State::Live { last, origin }, .. }) = self.keys.entries.get(*entry as usize) else {
                continue;
            };
            if *last != row {
                continue;
            }
            // A row that went round and is back under its first key has not moved.
            if origin.entry != NOWHERE && origin.entry != *entry {
                moved_index.push(upserts.len() as u32);
                moved_old.push(origin.old_row);
            }
            upserts.push(row);
        }
        let (mut changes, mut deleted, mut deleted_old) = (upserts.clone(), Vec::new(), Vec::new());
        for in_old_rows in [false, true] {
            for entry in &self.keys.entries {
                if let State::Deleted { change, at, in_old } = entry.state
                    && in_old == in_old_rows
                {
                    changes.push(change);
                    if in_old { deleted_old.push(at) } else { deleted.push(at) }
                }
            }
        }
        let rows = &self.batch.rows;
        wire::MergeRows {
            sequence: take_sequence(&rows.sequence, &changes),
            upserts: self.upserts(&upserts),
            moved_index,
            moved_from: key_rows(key, &[(&rows.old_rows, &moved_old)]),
            deletes: key_rows(key, &[(&rows.rows, &deleted), (&rows.old_rows, &deleted_old)]),
        }
    }

    /// The upserted rows, each cell from the last change that brought it.
    fn upserts(&self, last: &[u32]) -> wire::Rows {
        let rows = &self.batch.rows.rows;
        let mut sources = Vec::new();
        let mut taken = Vec::new();
        let columns = rows.columns.iter().filter_map(|values| {
            if values.missing.is_none() {
                return gather(&[Part { values: Some(values), rows: last }]);
            }
            self.cell_sources(values, &mut sources);
            taken.clear();
            taken.extend(last.iter().map(|row| sources[*row as usize]));
            gather(&[Part { values: Some(values), rows: &taken }])
        });
        wire::Rows { count: last.len() as u32, columns: columns.collect() }
    }

    /// By row: the row that its cell of this column is taken from.
    fn cell_sources(&self, values: &wire::ColumnValues, sources: &mut Vec<u32>) {
        sources.clear();
        for row in 0..self.batch.len() as u32 {
            let source = match is_missing(values, row) {
                false => row,
                // Earlier, so already known.
                true => sources.get(self.before[row as usize] as usize).copied().unwrap_or(NO_ROW),
            };
            sources.push(source);
        }
    }
}

/// Key columns of rows of one or two sets, in ordinal order.
fn key_rows(key: &[u16], parts: &[(&wire::Rows, &[u32])]) -> wire::Rows {
    let mut ordinals = key.to_vec();
    ordinals.sort_unstable();
    let columns = ordinals.iter().filter_map(|ordinal| {
        let parts: Vec<Part<'_>> =
            parts.iter().map(|(rows, taken)| Part { values: find(rows, *ordinal), rows: taken }).collect();
        gather(&parts)
    });
    let count = parts.iter().map(|(_, taken)| taken.len() as u32).sum();
    wire::Rows { count, columns: columns.collect() }
}

/// The keys of a batch, found by the hash of their bytes. Nothing is allocated per row:
/// the bytes of all keys lie behind each other.
struct Keys<'a> {
    batch: &'a ChangeBatch,
    new: Vec<Option<&'a wire::ColumnValues>>,
    old: Vec<Option<&'a wire::ColumnValues>>,
    /// Keyed per process, so that no table's keys can be chosen to collide.
    hasher: RandomState,
    by_hash: HashMap<u64, u32, BuildHasherDefault<Hashed>>,
    entries: Vec<Entry>,
    bytes: Vec<u8>,
}

impl<'a> Keys<'a> {
    fn new(batch: &'a ChangeBatch, key: &[u16]) -> Keys<'a> {
        let columns = |rows: &'a wire::Rows| key.iter().map(|ordinal| find(rows, *ordinal)).collect();
        Keys {
            batch,
            new: columns(&batch.rows.rows),
            old: columns(&batch.rows.old_rows),
            hasher: RandomState::new(),
            by_hash: HashMap::default(),
            entries: Vec::new(),
            bytes: Vec::new(),
        }
    }

    fn new_row(&mut self, row: u32) -> Result<u32> {
        let start = self.bytes.len();
        let whole = self.new.iter().all(|column| column.is_some_and(|values| encode(values, row, &mut self.bytes)));
        self.entry(start, whole)
    }

    fn old_row(&mut self, row: u32) -> Result<u32> {
        let start = self.bytes.len();
        let whole = self.old.iter().all(|column| column.is_some_and(|values| encode(values, row, &mut self.bytes)));
        self.entry(start, whole)
    }

    /// The entry of the key whose bytes were just appended; they stay if it is new.
    fn entry(&mut self, start: usize, whole: bool) -> Result<u32> {
        if !whole {
            return Err(Error::permanent(
                "batch.key-missing",
                format!("a change of {} has a key with a cell that is null or was not sent", self.batch.schema.name),
            )
            .next("Resync the table: its replica identity is not that of its schema"));
        }
        let hash = self.hasher.hash_one(&self.bytes[start..]);
        let found = self.entries.len() as u32;
        let first = *self.by_hash.entry(hash).or_insert(found);
        let mut at = first;
        while let Some(entry) = self.entries.get(at as usize) {
            if self.bytes[entry.start..entry.end] == self.bytes[start..] {
                self.bytes.truncate(start);
                return Ok(at);
            }
            at = entry.next;
        }
        let mut next = NOWHERE;
        if let Some(entry) = self.entries.get_mut(first as usize) {
            next = std::mem::replace(&mut entry.next, found);
        }
        self.entries.push(Entry { start, end: self.bytes.len(), next, state: State::Before });
        Ok(found)
    }
}

/// The map's keys are hashes already.
#[derive(Default)]
struct Hashed(u64);

impl Hasher for Hashed {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = self.0.rotate_left(8) ^ u64::from(*byte);
        }
    }

    fn write_u64(&mut self, hash: u64) {
        self.0 = hash;
    }
}

/// Appends one cell of a key so that two keys have the same bytes only if they are the
/// same. False if the cell is null or missing.
pub(super) fn encode(values: &wire::ColumnValues, row: u32, out: &mut Vec<u8>) -> bool {
    if is_missing(values, row) || is_null(values, row) {
        return false;
    }
    if let Some(odd) = odd_cell(values, row) {
        // In the data it would look like zero.
        out.push(if odd.kind == "text" { 1 } else { 2 });
        encode_bytes(odd.text.as_bytes(), out);
        return true;
    }
    out.push(0);
    match &values.data {
        wire::ColumnData::Plain(cells) => encode_cell(cells, row, out),
        wire::ColumnData::Lists(lists) => {
            let items = items_of(lists, row);
            out.extend_from_slice(&(items.len() as u32).to_le_bytes());
            for item in items {
                out.push(u8::from(bit(&lists.item_validity, item, true)));
                encode_cell(&lists.items, item, out);
            }
            true
        }
    }
}

fn encode_cell(cells: &wire::Cells, row: u32, out: &mut Vec<u8>) -> bool {
    fn fixed<const N: usize>(bytes: Option<[u8; N]>, out: &mut Vec<u8>) -> bool {
        bytes.map(|bytes| out.extend_from_slice(&bytes)).is_some()
    }
    let at = row as usize;
    match cells {
        wire::Cells::Booleans(bits) => {
            out.push(bits.get(at / 8).map_or(0, |byte| byte >> (at % 8) & 1));
            true
        }
        wire::Cells::Int16(values) => fixed(values.get(at).map(|value| value.to_le_bytes()), out),
        wire::Cells::Int32(values) => fixed(values.get(at).map(|value| value.to_le_bytes()), out),
        wire::Cells::Int64(values) => fixed(values.get(at).map(|value| value.to_le_bytes()), out),
        wire::Cells::Float32(values) => fixed(values.get(at).map(|value| value.to_le_bytes()), out),
        wire::Cells::Float64(values) => fixed(values.get(at).map(|value| value.to_le_bytes()), out),
        wire::Cells::Fixed(array) => {
            let width = array.width as usize;
            array.data.get(at * width..(at + 1) * width).map(|bytes| out.extend_from_slice(bytes)).is_some()
        }
        wire::Cells::Utf8(array) | wire::Cells::Binary(array) => {
            encode_bytes(bytes_of(array, row), out);
            true
        }
    }
}

fn encode_bytes(bytes: &[u8], out: &mut Vec<u8>) {
    out.extend_from_slice(&(bytes.len() as u32).to_le_bytes());
    out.extend_from_slice(bytes);
}

#[cfg(test)]
#[path = "fold_tests.rs"]
mod tests;
