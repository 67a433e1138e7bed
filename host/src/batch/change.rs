//! Changes of one table under construction, and closed.

use std::sync::Arc;

use super::column::ColumnBuilder;
use super::copy::key_text_of;
use super::gather::{COLUMN_BYTES, rows_weight, take_rows};
use crate::error::{Error, Result};
use crate::position::{Lsn, Position};
use crate::schema::table::TableSchema;
use crate::source::pgoutput::{Beginning, Cell, OldTuple, Tuple};
use crate::wire;

/// `ops` of the contract.
pub(super) const INSERT: u8 = 0;
/// `ops` of the contract.
pub(super) const UPDATE: u8 = 1;
/// `ops` of the contract.
pub(super) const DELETE: u8 = 2;

/// From here on a batch takes no more rows. Offsets are 32 bits and the contract says
/// under 2 GiB; a row is less than 1 GiB, because the server's message buffer is
/// (`MaxAllocSize`), so what one more row adds still fits.
const FULL_BYTES: usize = 1 << 30;

/// What a row takes beside its cells: operation, commit, ordinal, commit time, xid.
const ROW_BYTES: usize = 1 + 8 + 8 + 8 + 4;

/// Where the columns of a relation message are among those of a schema.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RelationMap {
    /// By position in the tuple: index in the schema's columns; none if the schema has
    /// it no more.
    columns: Vec<Option<usize>>,
    /// Indexes of the schema's columns that the relation does not carry.
    absent: Vec<usize>,
}

impl RelationMap {
    /// `columns`: for each column of the relation its ordinal, if it is known. Columns
    /// that the schema does not have are discarded (P26).
    pub fn new(columns: Vec<Option<u16>>, schema: &TableSchema) -> RelationMap {
        let index = |ordinal: Option<u16>| schema.column(ordinal?).map(|(index, _)| index);
        let columns: Vec<Option<usize>> = columns.into_iter().map(index).collect();
        let mut is_there = vec![false; schema.columns.len()];
        columns.iter().flatten().for_each(|index| is_there[*index] = true);
        let absent = (0..schema.columns.len()).filter(|index| !is_there[*index]).collect();
        RelationMap { columns, absent }
    }

    /// The key of a row that was not read, if the whole of it is in its first cells.
    pub fn key_of(&self, schema: &TableSchema, beginning: &Beginning) -> Option<String> {
        let cells: Vec<Cell<'_>> = beginning.cells().take(self.columns.len()).collect();
        key_text_of(schema, |wanted| {
            let place = self.columns.iter().position(|index| *index == Some(wanted))?;
            match cells.get(place)? {
                Cell::Text(text) => Some(String::from_utf8_lossy(text).into_owned()),
                _ => None,
            }
        })
    }
}

/// Where a row stands in the source's history.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowPosition {
    /// The row's position (P1). Rows of a batch come in its order and are of one epoch.
    pub position: Position,
    /// Commit time, microseconds since 1970-01-01 UTC.
    pub committed_at: i64,
    /// Transaction id.
    pub xid: u32,
}

/// Builds a batch of changes of one table and one schema version, straight from tuples.
///
/// A row that is refused with an error leaves nothing behind.
pub struct ChangeBuilder {
    schema: Arc<TableSchema>,
    sequence: wire::Sequence,
    ops: Vec<u8>,
    new: Vec<ColumnBuilder>,
    old_index: Vec<u32>,
    old: Vec<ColumnBuilder>,
    bytes: usize,
    /// Rows and old rows of the last batch.
    last: (usize, usize),
}

impl ChangeBuilder {
    /// An empty builder.
    pub fn new(schema: Arc<TableSchema>) -> ChangeBuilder {
        let columns = || schema.columns.iter().map(ColumnBuilder::new).collect();
        ChangeBuilder {
            sequence: empty_sequence(),
            ops: Vec::new(),
            new: columns(),
            old_index: Vec::new(),
            old: columns(),
            bytes: 0,
            last: (0, 0),
            schema,
        }
    }

    /// The schema version that the rows are decoded to.
    pub fn schema(&self) -> &Arc<TableSchema> {
        &self.schema
    }

    /// Bytes that the rows so far take in memory, about.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Bytes that were taken for rows still to come, and for the columns themselves.
    pub fn reserved(&self) -> usize {
        let columns = self.new.iter().chain(&self.old);
        columns.map(ColumnBuilder::reserved).sum::<usize>() + self.new.len() * COLUMN_BYTES
    }

    /// Rows so far.
    pub fn rows(&self) -> u32 {
        self.ops.len() as u32
    }

    /// Whether it must be finished before another row. Only a backstop against offsets
    /// that do not fit: batches are closed much smaller.
    pub fn is_full(&self) -> bool {
        self.bytes >= FULL_BYTES || self.ops.len() >= i32::MAX as usize
    }

    /// Appends an inserted row.
    ///
    /// A column that the relation does not carry gets the literal default that the
    /// schema has for it, else null (P26).
    ///
    /// Errors: `batch.full`, `batch.tuple`, and what the tuple's cells report.
    pub fn insert(&mut self, map: &RelationMap, new: &Tuple, at: RowPosition) -> Result<()> {
        self.begin(map, new, &at)?;
        let appended = self.append_inserted(map, new);
        self.end(INSERT, at, appended)
    }

    /// Appends an updated row, with its old row where one was sent.
    ///
    /// An unchanged TOASTed cell is taken from the old row if that has it: always under
    /// FULL, and for the columns of a key (P31). Else it is missing, and so is a column
    /// that the relation does not carry.
    ///
    /// Errors: as [`ChangeBuilder::insert`].
    pub fn update(&mut self, map: &RelationMap, old: Option<&OldTuple>, new: &Tuple, at: RowPosition) -> Result<()> {
        self.begin(map, new, &at)?;
        let appended = match old {
            Some(old) => check_tuple(&self.schema, map, &old.tuple)
                .and_then(|()| Ok(self.append_updated(map, old, new)? + append_old(&mut self.old, map, old)?)),
            None => self.append_patched(map, new),
        };
        if appended.is_ok() && old.is_some() {
            self.old_index.push(self.rows());
        }
        self.end(UPDATE, at, appended)
    }

    /// Appends a deleted row as far as it was sent: columns outside the key are missing.
    ///
    /// Errors: as [`ChangeBuilder::insert`].
    pub fn delete(&mut self, map: &RelationMap, old: &OldTuple, at: RowPosition) -> Result<()> {
        self.begin(map, &old.tuple, &at)?;
        let appended = append_old(&mut self.new, map, old);
        self.end(DELETE, at, appended)
    }

    fn begin(&mut self, map: &RelationMap, tuple: &Tuple, at: &RowPosition) -> Result<()> {
        if self.is_full() {
            return Err(Error::permanent(
                "batch.full",
                format!("the open batch of {} has {} bytes and takes no more rows", self.schema.name, self.bytes),
            )
            .next("Report this as a bug: a batch has to be closed before it is full"));
        }
        check_tuple(&self.schema, map, tuple)?;
        if self.ops.is_empty() {
            self.sequence.epoch = at.position.epoch;
            self.reserve_as_last_time();
        }
        Ok(())
    }

    fn reserve_as_last_time(&mut self) {
        let (rows, old_rows) = self.last;
        self.ops.reserve(rows);
        self.sequence.commit.reserve(rows);
        self.sequence.ordinal.reserve(rows);
        self.sequence.committed_at.reserve(rows);
        self.sequence.xid.reserve(rows);
        self.old_index.reserve(old_rows);
        self.new.iter_mut().for_each(ColumnBuilder::reserve_as_last_time);
        self.old.iter_mut().for_each(ColumnBuilder::reserve_as_last_time);
    }

    fn append_inserted(&mut self, map: &RelationMap, new: &Tuple) -> Result<usize> {
        let mut bytes = append_cells(&mut self.new, map, new)?;
        for &index in &map.absent {
            bytes += match &self.schema.columns[index].default_literal {
                Some(literal) => self.new[index].append(literal.text.as_bytes()),
                None => self.new[index].append_null(),
            };
        }
        Ok(bytes)
    }

    fn append_patched(&mut self, map: &RelationMap, new: &Tuple) -> Result<usize> {
        let bytes = append_cells(&mut self.new, map, new)?;
        Ok(bytes + append_absent(&mut self.new, map))
    }

    fn append_updated(&mut self, map: &RelationMap, old: &OldTuple, new: &Tuple) -> Result<usize> {
        let mut bytes = 0;
        for ((index, cell), old_cell) in map.columns.iter().zip(new.cells()).zip(old.tuple.cells()) {
            let Some(index) = *index else { continue };
            let cell = match (cell?, old_cell?) {
                // Under `K` a null only says that the column is outside the key.
                (Cell::Unchanged, sent @ Cell::Text(_)) => sent,
                (Cell::Unchanged, Cell::Null) if old.whole => Cell::Null,
                (cell, _) => cell,
            };
            bytes += append_cell(&mut self.new[index], cell)?;
        }
        Ok(bytes + append_absent(&mut self.new, map))
    }

    /// Takes the row in, or back.
    fn end(&mut self, op: u8, at: RowPosition, appended: Result<usize>) -> Result<()> {
        let appended = appended.and_then(|bytes| {
            if at.position.epoch == self.sequence.epoch { Ok(bytes) } else { Err(self.two_epochs(&at)) }
        });
        match appended {
            Ok(bytes) => {
                self.bytes += bytes + ROW_BYTES;
                self.ops.push(op);
                self.sequence.commit.push(at.position.commit.0);
                self.sequence.ordinal.push(at.position.ordinal);
                self.sequence.committed_at.push(at.committed_at);
                self.sequence.xid.push(at.xid);
                Ok(())
            }
            Err(error) => {
                let rows = self.ops.len();
                self.old_index.truncate(self.old_index.partition_point(|row| (*row as usize) < rows));
                self.new.iter_mut().for_each(|column| column.truncate(rows));
                let old_rows = self.old_index.len();
                self.old.iter_mut().for_each(|column| column.truncate(old_rows));
                Err(error.context(format_args!("{} at {}", self.schema.name, at.position.commit)))
            }
        }
    }

    fn two_epochs(&self, at: &RowPosition) -> Error {
        Error::permanent(
            "batch.epoch",
            format!("a row of epoch {} in a batch of epoch {}", at.position.epoch, self.sequence.epoch),
        )
        .next("Report this as a bug: a batch has to be closed where the epoch changes")
    }

    /// The batch, and an empty builder again, which will start at the size this one had.
    pub fn finish(&mut self) -> ChangeBatch {
        self.bytes = 0;
        self.last = (self.ops.len(), self.old_index.len());
        let count = self.rows();
        let old_count = self.old_index.len() as u32;
        let rows = wire::ChangeRows {
            sequence: std::mem::replace(&mut self.sequence, empty_sequence()),
            ops: std::mem::take(&mut self.ops),
            rows: finish_rows(&mut self.new, count),
            old_index: std::mem::take(&mut self.old_index),
            old_rows: finish_rows(&mut self.old, old_count),
        };
        ChangeBatch::new(Arc::clone(&self.schema), rows)
    }
}

pub(super) fn finish_rows(columns: &mut [ColumnBuilder], count: u32) -> wire::Rows {
    wire::Rows { count, columns: columns.iter_mut().filter_map(ColumnBuilder::finish).collect() }
}

fn empty_sequence() -> wire::Sequence {
    wire::Sequence { epoch: 0, commit: Vec::new(), ordinal: Vec::new(), committed_at: Vec::new(), xid: Vec::new() }
}

fn check_tuple(schema: &TableSchema, map: &RelationMap, tuple: &Tuple) -> Result<()> {
    if usize::from(tuple.len()) == map.columns.len() {
        return Ok(());
    }
    Err(Error::permanent(
        "batch.tuple",
        format!("a row of {} has {} columns, its relation message {}", schema.name, tuple.len(), map.columns.len()),
    )
    .next("Report this as a bug, with the version of the server"))
}

/// Appends the cells of a new row, in the relation's order.
fn append_cells(columns: &mut [ColumnBuilder], map: &RelationMap, tuple: &Tuple) -> Result<usize> {
    let mut bytes = 0;
    for (index, cell) in map.columns.iter().zip(tuple.cells()) {
        if let Some(index) = *index {
            bytes += append_cell(&mut columns[index], cell?)?;
        }
    }
    Ok(bytes)
}

/// Appends an old row: whole, or as far as it belongs to the key. No column of a replica
/// identity is ever null (neither a primary key nor an identity index allows it), so a
/// null of a `K` tuple is always a cell that was not sent.
fn append_old(columns: &mut [ColumnBuilder], map: &RelationMap, old: &OldTuple) -> Result<usize> {
    let mut bytes = 0;
    for (index, cell) in map.columns.iter().zip(old.tuple.cells()) {
        let Some(index) = *index else { continue };
        bytes += match cell? {
            Cell::Null if !old.whole => columns[index].append_missing(),
            cell => append_cell(&mut columns[index], cell)?,
        };
    }
    Ok(bytes + append_absent(columns, map))
}

fn append_absent(columns: &mut [ColumnBuilder], map: &RelationMap) -> usize {
    map.absent.iter().map(|index| columns[*index].append_missing()).sum()
}

#[inline]
fn append_cell(column: &mut ColumnBuilder, cell: Cell<'_>) -> Result<usize> {
    match cell {
        Cell::Text(text) => Ok(column.append(text)),
        Cell::Null => Ok(column.append_null()),
        Cell::Unchanged => Ok(column.append_missing()),
        Cell::Binary(_) => Err(Error::permanent(
            "batch.binary-cell",
            format!("the cell of column {} came in binary, which was not asked for", column.ordinal()),
        )
        .next("Report this as a bug, with the version of the server")),
    }
}

/// Changes of one table and one schema version, in source order.
#[derive(Clone, Debug)]
pub struct ChangeBatch {
    /// The version that the rows are decoded to.
    pub schema: Arc<TableSchema>,
    /// The changes.
    pub rows: wire::ChangeRows,
    /// Bytes they take in memory, about.
    pub bytes: usize,
}

impl ChangeBatch {
    pub(super) fn new(schema: Arc<TableSchema>, rows: wire::ChangeRows) -> ChangeBatch {
        let bytes = rows_weight(&rows.rows)
            + rows_weight(&rows.old_rows)
            + rows.ops.len() * ROW_BYTES
            + rows.old_index.len() * size_of::<u32>();
        ChangeBatch { schema, rows, bytes }
    }

    /// How many changes there are.
    pub fn len(&self) -> usize {
        self.rows.ops.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.rows.ops.is_empty()
    }

    /// Position of the first change; the zero position of a batch without any.
    pub fn first(&self) -> Position {
        self.position(0)
    }

    /// Position of the last change; the zero position of a batch without any.
    pub fn last(&self) -> Position {
        self.position(self.len().wrapping_sub(1))
    }

    fn position(&self, row: usize) -> Position {
        let sequence = &self.rows.sequence;
        match (sequence.commit.get(row), sequence.ordinal.get(row)) {
            (Some(commit), Some(ordinal)) => {
                Position { epoch: sequence.epoch, commit: Lsn(*commit), ordinal: *ordinal }
            }
            _ => Position::default(),
        }
    }

    /// The first change beyond `position`; [`ChangeBatch::len`] if all are at or below it.
    pub fn row_after(&self, position: Position) -> usize {
        let (mut low, mut high) = (0, self.len());
        while low < high {
            let middle = low + (high - low) / 2;
            if self.position(middle) <= position {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        low
    }

    /// The changes from a row on, as they cross to the plugin. All of them are moved, if
    /// nobody else has the batch.
    pub fn changes_from(self: Arc<Self>, row: usize) -> wire::ChangeRows {
        if row == 0 {
            return Arc::try_unwrap(self).map_or_else(|shared| shared.rows.clone(), |batch| batch.rows);
        }
        let row = row.min(self.len());
        let old = self.rows.old_index.partition_point(|index| (*index as usize) < row);
        let from = row as u32;
        let taken: Vec<u32> = (from..self.len() as u32).collect();
        let old_taken: Vec<u32> = (old as u32..self.rows.old_index.len() as u32).collect();
        wire::ChangeRows {
            sequence: take_sequence(&self.rows.sequence, &taken),
            ops: self.rows.ops[row..].to_vec(),
            rows: take_rows(&self.rows.rows, &taken),
            old_index: self.rows.old_index[old..].iter().map(|index| index - from).collect(),
            old_rows: take_rows(&self.rows.old_rows, &old_taken),
        }
    }
}

/// The sequence of some of the rows.
pub(super) fn take_sequence(sequence: &wire::Sequence, rows: &[u32]) -> wire::Sequence {
    fn take<T: Copy>(values: &[T], rows: &[u32]) -> Vec<T> {
        rows.iter().filter_map(|row| values.get(*row as usize).copied()).collect()
    }
    wire::Sequence {
        epoch: sequence.epoch,
        commit: take(&sequence.commit, rows),
        ordinal: take(&sequence.ordinal, rows),
        committed_at: take(&sequence.committed_at, rows),
        xid: take(&sequence.xid, rows),
    }
}

#[cfg(test)]
#[path = "change_tests.rs"]
mod tests;
