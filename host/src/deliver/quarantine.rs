//! What a destination keeps in quarantine, and what later changes make of it (P32).
//!
//! Under `merge` there is one row for each key: while it is there, every change of the
//! key is folded into it before it counts as taken, and what can be sent of the fold is
//! sent again at once. Under `changes` each refused change is a row of its own, for a log
//! has no key to fold by.
//!
//! Pure; `refused` does it.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use crate::batch::{TextRow, is_whole, key_text, rows_of_text, units};
use crate::error::{Error, Result};
use crate::position::{Lsn, Position};
use crate::schema::table::TableSchema;
use crate::store::{Mark, QuarantineKey, QuarantinedRow, RefusedWhy, RowOp};
use crate::wire;

/// Codes of rows that end the instance: these are sent again only when an operator says so.
const DEADLY: [&str; 2] = ["plugin.trap", "plugin.timeout"];
/// Rows that are sent again in one group.
const AT_ONCE: usize = 1000;

/// What is remembered of a row.
#[derive(Clone, Debug)]
struct Kept {
    position: Position,
    bytes: u64,
    needs: Option<String>,
}

/// The rows of one table, by ident.
#[derive(Debug, Default)]
pub(super) struct Table {
    rows: BTreeMap<String, Kept>,
    /// Those that are to be sent again.
    marked: BTreeSet<String>,
    bytes: u64,
}

/// All rows of a destination.
#[derive(Debug, Default)]
pub(super) struct Quarantine {
    tables: HashMap<u32, Table>,
}

impl Quarantine {
    /// What is stored.
    pub fn new(keys: Vec<QuarantineKey>) -> Quarantine {
        let mut quarantine = Quarantine::default();
        for key in keys {
            let marked = key.mark == Some(Mark::Retry);
            quarantine.tables.entry(key.oid).or_default().put(key.ident, key.position, key.bytes, key.needs, marked);
        }
        quarantine
    }

    /// A table's rows, if it has any.
    pub fn table(&self, oid: u32) -> Option<&Table> {
        self.tables.get(&oid).filter(|table| !table.rows.is_empty())
    }

    /// How many rows a table has.
    pub fn count(&self, oid: u32) -> u64 {
        self.tables.get(&oid).map_or(0, |table| table.rows.len() as u64)
    }

    /// Tables that have rows.
    pub fn tables(&self) -> impl Iterator<Item = u32> {
        self.tables.iter().filter(|(_, table)| !table.rows.is_empty()).map(|(oid, _)| *oid)
    }

    /// How many rows and bytes a table would have with these.
    pub fn size_with(&self, oid: u32, rows: &[QuarantinedRow]) -> (u64, u64) {
        let known = self.tables.get(&oid);
        let (mut count, mut bytes) = known.map_or((0, 0), |table| (table.rows.len() as u64, table.bytes));
        for row in rows {
            let before = known.and_then(|table| table.rows.get(&row.ident));
            count += u64::from(before.is_none());
            bytes = (bytes + bytes_of(row)).saturating_sub(before.map_or(0, |kept| kept.bytes));
        }
        (count, bytes)
    }

    /// Takes over what was stored. A row that is behind the one that is there leaves it.
    pub fn put(&mut self, row: &QuarantinedRow) {
        let table = self.tables.entry(row.oid).or_default();
        if table.rows.get(&row.ident).is_some_and(|kept| kept.position > row.position) {
            return;
        }
        let marked = row.mark == Some(Mark::Retry);
        table.put(row.ident.clone(), row.position, bytes_of(row), row.needs.clone(), marked);
    }

    /// Forgets a row, unless it has changes beyond `position`. Whether it was there.
    pub fn remove(&mut self, oid: u32, ident: &str, position: Position) -> bool {
        let Some(table) = self.tables.get_mut(&oid) else { return false };
        match table.rows.get(ident) {
            Some(kept) if kept.position <= position => {
                table.bytes = table.bytes.saturating_sub(kept.bytes);
                table.marked.remove(ident);
                table.rows.remove(ident).is_some()
            }
            _ => false,
        }
    }

    /// Forgets the rows of a table that have no changes beyond `position`, and says which.
    pub fn remove_through(&mut self, oid: u32, position: Position) -> Vec<(String, Position)> {
        let rows = self.tables.get(&oid).into_iter().flat_map(|table| &table.rows);
        let gone = rows.filter(|(_, kept)| kept.position <= position).map(|(ident, _)| (ident.clone(), position));
        let gone: Vec<(String, Position)> = gone.collect();
        for (ident, _) in &gone {
            self.remove(oid, ident, position);
        }
        gone
    }

    /// Forgets all rows of a table.
    pub fn clear(&mut self, oid: u32) {
        self.tables.remove(&oid);
    }

    /// The next rows of a table that are to be sent again, about so many bytes of them,
    /// with all that have to go with them; they are not given out a second time.
    pub fn take_marked(&mut self, oid: u32, bytes: u64) -> Vec<String> {
        let Some(table) = self.tables.get_mut(&oid) else { return Vec::new() };
        let mut taken: BTreeSet<String> = BTreeSet::new();
        let mut size = 0;
        while size < bytes
            && taken.len() < AT_ONCE
            && let Some(ident) = table.marked.first().cloned()
        {
            size += table.take_with_kin(ident, &mut taken);
        }
        taken.into_iter().collect()
    }
}

impl Table {
    fn put(&mut self, ident: String, position: Position, bytes: u64, needs: Option<String>, marked: bool) {
        if marked {
            self.marked.insert(ident.clone())
        } else {
            self.marked.remove(&ident)
        };
        let kept = Kept { position, bytes, needs };
        let before = self.rows.insert(ident, kept).map_or(0, |kept| kept.bytes);
        self.bytes = (self.bytes + bytes).saturating_sub(before);
    }

    /// Whether there is a row of this ident.
    pub fn has(&self, ident: &str) -> bool {
        self.rows.contains_key(ident)
    }

    /// Up to where the changes of a key are in quarantine.
    pub fn position(&self, ident: &str) -> Option<Position> {
        self.rows.get(ident).map(|kept| kept.position)
    }

    /// A row that takes cells from another's key goes with it, and the other way round.
    /// How many bytes they have together.
    fn take_with_kin(&mut self, ident: String, taken: &mut BTreeSet<String>) -> u64 {
        let (mut next, mut bytes) = (vec![ident], 0);
        while let Some(ident) = next.pop() {
            self.marked.remove(&ident);
            let Some(kept) = self.rows.get(&ident).filter(|_| !taken.contains(&ident)) else { continue };
            bytes += kept.bytes;
            next.extend(kept.needs.clone());
            let takers = self.rows.iter().filter(|(_, kept)| kept.needs.as_ref() == Some(&ident));
            next.extend(takers.map(|(taker, _)| taker.clone()));
            taken.insert(ident);
        }
        bytes
    }
}

fn bytes_of(row: &QuarantinedRow) -> u64 {
    let length = |row: &TextRow| serde_json::to_string(row).map_or(0, |json| json.len());
    (row.ident.len() + length(&row.row) + row.old.as_ref().map_or(0, length)) as u64
}

/// What rows are made with.
pub(super) struct Maker<'a> {
    pub destination: &'a str,
    pub schema: &'a TableSchema,
    /// Whether there is one row for each key.
    pub merge: bool,
    /// How many rows of the table there are already.
    pub count: u64,
    /// Microseconds since 1970-01-01 UTC.
    pub now: i64,
}

impl Maker<'_> {
    /// The rows of a content, one for each of `rows`.
    pub fn rows<'a>(
        &self,
        content: &wire::Content,
        rows: impl IntoIterator<Item = (u32, &'a RefusedWhy)>,
    ) -> Vec<QuarantinedRow> {
        let numbered = (self.count..).zip(rows);
        numbered.filter_map(|(number, (row, why))| self.row(content, row, number, why)).collect()
    }

    fn row(&self, content: &wire::Content, row: u32, number: u64, why: &RefusedWhy) -> Option<QuarantinedRow> {
        let schema = self.schema;
        match content {
            wire::Content::Merge(merge) => Some(self.merge_row(merge, row, why)),
            wire::Content::Changes(changes) => {
                let op = match changes.ops.get(row as usize)? {
                    0 => RowOp::Insert,
                    1 => RowOp::Update,
                    _ => RowOp::Delete,
                };
                let old = changes.old_index.binary_search(&row).ok();
                let mut made = self.blank(op, &changes.sequence, row, why);
                made.row = TextRow::take(&changes.rows, row, schema);
                made.old = old.map(|at| TextRow::take(&changes.old_rows, at as u32, schema));
                made.ident = place(made.position);
                Some(made)
            }
            wire::Content::Copy(copy) => {
                let wire::Position { epoch, commit, ordinal } = copy.as_of;
                // In a log each has a place of its own: behind the copy's, before any change's.
                let ordinal = if self.merge { ordinal } else { ordinal.saturating_add(number) };
                let sequence = wire::Sequence {
                    epoch,
                    commit: vec![commit],
                    ordinal: vec![ordinal],
                    committed_at: vec![0],
                    xid: vec![0],
                };
                let op = if self.merge { RowOp::Upsert } else { RowOp::Insert };
                let mut made = self.blank(op, &sequence, 0, why);
                made.row = TextRow::take(&copy.rows, row, schema);
                made.ident = if self.merge { made.row.key(&schema.merge_key()) } else { place(made.position) };
                Some(made)
            }
            wire::Content::Truncate(_) | wire::Content::Messages(_) => None,
        }
    }

    fn merge_row(&self, merge: &wire::MergeRows, row: u32, why: &RefusedWhy) -> QuarantinedRow {
        let (schema, key) = (self.schema, self.schema.merge_key());
        if let Some(row_of_deletes) = row.checked_sub(merge.upserts.count) {
            let mut made = self.blank(RowOp::Delete, &merge.sequence, row, why);
            made.row = TextRow::take(&merge.deletes, row_of_deletes, schema);
            made.ident = made.row.key(&key);
            return made;
        }
        let mut made = self.blank(RowOp::Upsert, &merge.sequence, row, why);
        made.row = TextRow::take(&merge.upserts, row, schema);
        made.ident = made.row.key(&key);
        if !made.row.is_whole(schema)
            && let Ok(at) = merge.moved_index.binary_search(&row)
        {
            let from = TextRow::take(&merge.moved_from, at as u32, schema);
            made.needs = Some(from.key(&key));
            made.old = Some(from);
        }
        made
    }

    fn blank(&self, op: RowOp, sequence: &wire::Sequence, row: u32, why: &RefusedWhy) -> QuarantinedRow {
        let at = row as usize;
        QuarantinedRow {
            id: 0,
            destination: self.destination.to_owned(),
            oid: self.schema.oid,
            table: self.schema.name.clone(),
            ident: String::new(),
            op,
            snapshot: self.schema.snapshot,
            position: position_at(sequence, row),
            committed_at: sequence.committed_at.get(at).copied().unwrap_or_default(),
            xid: sequence.xid.get(at).copied().unwrap_or_default(),
            row: TextRow::default(),
            old: None,
            needs: None,
            reason: why.clone(),
            changes: 1,
            quarantined_at: self.now,
            mark: None,
        }
    }
}

/// Ident of a change in a log.
fn place(position: Position) -> String {
    format!("{}:{:016X}:{:016X}", position.epoch, position.commit.0, position.ordinal)
}

fn position_at(sequence: &wire::Sequence, row: u32) -> Position {
    let at = row as usize;
    Position {
        epoch: sequence.epoch,
        commit: Lsn(sequence.commit.get(at).copied().unwrap_or_default()),
        ordinal: sequence.ordinal.get(at).copied().unwrap_or_default(),
    }
}

/// The rows of a batch whose keys are in quarantine, with what only crosses together
/// with them.
pub(super) fn affected(table: &Table, content: &wire::Content, schema: &TableSchema) -> Vec<u32> {
    let wire::Content::Merge(merge) = content else { return Vec::new() };
    let mut found = idents(merge, schema).filter(|(_, ident)| table.has(ident)).map(|(row, _)| row).peekable();
    if found.peek().is_none() {
        return Vec::new();
    }
    let found: BTreeSet<u32> = found.collect();
    let units =
        units(content, schema.columns.len()).into_iter().filter(|unit| unit.iter().any(|row| found.contains(row)));
    let mut rows: Vec<u32> = units.flatten().collect();
    rows.sort_unstable();
    rows
}

fn idents<'a>(merge: &'a wire::MergeRows, schema: &'a TableSchema) -> impl Iterator<Item = (u32, String)> + 'a {
    let key = schema.merge_key();
    let deletes = key.clone();
    let upserted = (0..merge.upserts.count).map(move |row| (row, key_text(&merge.upserts, row, &key, schema)));
    let deleted = (0..merge.deletes.count)
        .map(move |row| (merge.upserts.count + row, key_text(&merge.deletes, row, &deletes, schema)));
    upserted.chain(deleted)
}

/// The idents and positions of a content's rows, `refused` left out. Under `merge` those
/// that say all of their row, or all if `all`.
pub(super) fn taken(
    content: &wire::Content,
    schema: &TableSchema,
    refused: &[u32],
    all: bool,
) -> Vec<(String, Position)> {
    let is_taken = |row: &u32| !refused.contains(row);
    match content {
        wire::Content::Merge(merge) => {
            let columns = schema.columns.len();
            let says_all = |row: u32| row >= merge.upserts.count || is_whole(&merge.upserts, row, columns);
            idents(merge, schema)
                .filter(|(row, _)| is_taken(row) && (all || says_all(*row)))
                .map(|(row, ident)| (ident, position_at(&merge.sequence, row)))
                .collect()
        }
        wire::Content::Changes(changes) => (0..changes.ops.len() as u32)
            .filter(is_taken)
            .map(|row| position_at(&changes.sequence, row))
            .map(|position| (place(position), position))
            .collect(),
        _ => Vec::new(),
    }
}

/// Whether what was refused like this may be tried without being asked.
pub(super) fn is_deadly(code: &str) -> bool {
    DEADLY.contains(&code)
}

/// Folds changes of quarantined keys into what is there. `there` are the rows of all keys
/// concerned, under the schema of the changes; `patches` says whether the destination
/// refuses a partial row that it has nothing of, so that it can be tried.
pub(super) fn join(
    there: &[QuarantinedRow],
    changes: Vec<QuarantinedRow>,
    schema: &TableSchema,
    patches: bool,
) -> Vec<QuarantinedRow> {
    let known = |ident: &str| there.iter().find(|row| row.ident == ident);
    let mut joined: Vec<QuarantinedRow> = Vec::new();
    for change in changes {
        let before = known(&change.ident);
        // Replayed after a restart: it is in there already.
        if before.is_some_and(|before| before.position >= change.position) {
            continue;
        }
        // What it takes its missing cells from: the key it had, else its own.
        let base = match &change.needs {
            Some(from) => known(from),
            None => before,
        };
        let mut row = change;
        let reason = before.or(base);
        if let Some(base) = base.filter(|base| base.op == RowOp::Upsert && row.op == RowOp::Upsert)
            && !row.row.is_whole(schema)
        {
            row.row = base.row.clone().patched(row.row);
            // Of a row that is itself not whole, the rest is where that has it from, or
            // still under its key.
            if base.needs.is_some() || row.needs.is_none() {
                (row.needs, row.old) = (base.needs.clone(), base.old.clone());
            }
        }
        if row.op == RowOp::Delete || row.row.is_whole(schema) {
            (row.needs, row.old) = (None, None);
        }
        row.changes = before.map_or(0, |before| before.changes).saturating_add(row.changes);
        if let Some(reason) = reason {
            row.reason = reason.reason.clone();
        }
        let can_be_tried = patches || row.op == RowOp::Delete || row.row.is_whole(schema);
        row.mark = (can_be_tried && !is_deadly(&row.reason.code)).then_some(Mark::Retry);
        joined.push(row);
    }
    free(there, &mut joined);
    joined
}

/// A row that another needed, and which that does not need any more, can be sent.
fn free(there: &[QuarantinedRow], joined: &mut Vec<QuarantinedRow>) {
    let still: Vec<&String> = joined.iter().filter_map(|row| row.needs.as_ref()).collect();
    let freed =
        there.iter().filter(|row| joined.iter().any(|new| new.ident == row.ident)).filter_map(|row| row.needs.as_ref());
    let freed: BTreeSet<&String> = freed.filter(|needed| !still.contains(needed)).collect();
    let mut again: Vec<QuarantinedRow> = there
        .iter()
        .filter(|row| freed.contains(&row.ident) && !joined.iter().any(|new| new.ident == row.ident))
        .cloned()
        .collect();
    for row in &mut again {
        row.mark = (!is_deadly(&row.reason.code)).then_some(Mark::Retry);
    }
    joined.extend(again);
}

/// A row under the version of the table that the destination has now.
pub(super) fn under(
    mut row: QuarantinedRow,
    from: &Arc<TableSchema>,
    onto: &Arc<TableSchema>,
) -> Result<QuarantinedRow> {
    row.row = row.row.project(from, onto)?;
    row.old = row.old.map(|old| old.project(from, onto)).transpose()?;
    row.snapshot = onto.snapshot;
    row.table = onto.name.clone();
    Ok(row)
}

/// The rows of a table as they cross to the plugin again.
pub(super) fn content(rows: &[QuarantinedRow], schema: &TableSchema, merge: bool) -> Result<wire::Content> {
    let mut rows: Vec<&QuarantinedRow> = rows.iter().collect();
    rows.sort_by_key(|row| row.position);
    if merge { merge_content(&rows, schema) } else { Ok(changes_content(&rows, schema)) }
}

fn merge_content(rows: &[&QuarantinedRow], schema: &TableSchema) -> Result<wire::Content> {
    let key = schema.merge_key();
    if key.is_empty() {
        return Err(Error::permanent(
            "table.no-key",
            format!("table {} has no key that `merge` could go by", schema.name),
        )
        .next("Give it a primary key, set REPLICA IDENTITY USING INDEX, or use `mode = \"changes\"`."));
    }
    let (deletes, upserts): (Vec<&QuarantinedRow>, Vec<&QuarantinedRow>) =
        rows.iter().copied().partition(|row| row.op == RowOp::Delete);
    let cells = |rows: &[&QuarantinedRow]| rows_of_text(schema, &rows.iter().map(|row| &row.row).collect::<Vec<_>>());
    let keys: Vec<TextRow> = deletes.iter().map(|row| row.row.only(&key)).collect();
    let moved = || {
        (0_u32..).zip(&upserts).filter_map(|(at, row)| Some((at, row.old.as_ref().filter(|_| row.needs.is_some())?)))
    };
    let ordered: Vec<&QuarantinedRow> = upserts.iter().chain(&deletes).copied().collect();
    Ok(wire::Content::Merge(wire::MergeRows {
        sequence: sequence(&ordered),
        upserts: cells(&upserts),
        moved_index: moved().map(|(at, _)| at).collect(),
        moved_from: rows_of_text(schema, &moved().map(|(_, from)| from).collect::<Vec<_>>()),
        deletes: rows_of_text(schema, &keys.iter().collect::<Vec<_>>()),
    }))
}

fn changes_content(rows: &[&QuarantinedRow], schema: &TableSchema) -> wire::Content {
    let old: Vec<(u32, &TextRow)> = (0..).zip(rows).filter_map(|(at, row)| Some((at, row.old.as_ref()?))).collect();
    let op = |row: &&QuarantinedRow| match row.op {
        RowOp::Insert | RowOp::Upsert => 0,
        RowOp::Update => 1,
        RowOp::Delete => 2,
    };
    wire::Content::Changes(wire::ChangeRows {
        sequence: sequence(rows),
        ops: rows.iter().map(op).collect(),
        rows: rows_of_text(schema, &rows.iter().map(|row| &row.row).collect::<Vec<_>>()),
        old_index: old.iter().map(|(at, _)| *at).collect(),
        old_rows: rows_of_text(schema, &old.iter().map(|(_, row)| *row).collect::<Vec<_>>()),
    })
}

fn sequence(rows: &[&QuarantinedRow]) -> wire::Sequence {
    wire::Sequence {
        epoch: rows.first().map_or(0, |row| row.position.epoch),
        commit: rows.iter().map(|row| row.position.commit.0).collect(),
        ordinal: rows.iter().map(|row| row.position.ordinal).collect(),
        committed_at: rows.iter().map(|row| row.committed_at).collect(),
        xid: rows.iter().map(|row| row.xid).collect(),
    }
}

#[cfg(test)]
#[path = "quarantine_tests.rs"]
mod tests;
