//! Writing the rows of a batch.
//!
//! Order within a merge (P31): missing cells of moved rows are read from where those rows
//! were, then rows are deleted, then rows with missing cells are patched, then whole rows
//! are upserted. A few rows go as plain statements; more go by COPY into a staging
//! table of the session, and from there in one statement each.

use std::collections::BTreeMap;

use bytes::{BufMut, BytesMut};
use tidegate_sdk::model::{CopyRows, Failure, MergeRows};

use crate::cells::{Cells, State};
use crate::connect::Stream;
use crate::error::of_table;
use crate::target::Target;
use crate::transaction::{Origin, Transaction};

/// Up to so many upserts or deletes go as plain statements, and so many in one of them.
const FEW: u32 = 50;
/// A table of more columns has no staging table (PostgreSQL takes 1,600).
const MOST_STAGED_COLUMNS: usize = 1_500;
/// Staging tables of a session: COMMIT empties all of them, one by one.
const MOST_STAGES: usize = 64;

/// Number of a staged row's group: whole rows to upsert, rows to delete; above 0 are
/// groups of moved rows, below -1 groups of rows to patch.
const WHOLE: i32 = 0;
const DELETE: i32 = -1;

/// Writes the rows of a copy.
pub fn write_copy<S: Stream>(
    tx: &mut Transaction<'_, S>,
    target: &Target,
    origin: Origin,
    copy: &CopyRows,
) -> Result<(), Failure> {
    let cells = Cells::new(&copy.rows, target)?;
    if copy.rows.count == 0 {
        return Ok(());
    }
    let present: Vec<usize> = (0..target.columns.len()).filter(|index| cells.is_sent(*index)).collect();
    let names: Vec<&str> = present.iter().map(|&index| target.columns[index].quoted.as_str()).collect();
    let sql = format!("COPY {} ({}) FROM STDIN", target.quoted, names.join(", "));
    let mut row = 0;
    tx.copy(&sql, origin, |out| {
        for (position, &column) in present.iter().enumerate() {
            if position > 0 {
                out.put_u8(b'\t');
            }
            match cells.state(column, row) {
                State::Null => out.put_slice(b"\\N"),
                State::Value => cells.push_copy(out, column, row, origin, row)?,
                State::Missing => return Err(contract(target, "a row of a copy has a missing cell")),
            }
        }
        out.put_u8(b'\n');
        row += 1;
        Ok(row < copy.rows.count)
    })
}

/// Merges a batch.
pub fn write_merge<S: Stream>(
    tx: &mut Transaction<'_, S>,
    target: &Target,
    origin: Origin,
    merge: &MergeRows,
) -> Result<(), Failure> {
    let plan = Plan::new(target, origin, merge)?;
    let few = plan.upserts.count() <= FEW && plan.deletes.count() <= FEW;
    let wide = target.columns.len() > MOST_STAGED_COLUMNS;
    if plan.moved.is_empty() && (few || wide) {
        return plan.write_plainly(tx);
    }
    if wide {
        return Err(of_table(
            target.id,
            "unsupported",
            format!(
                "{}: a row changed its key without all of its cells, in a table of more than {MOST_STAGED_COLUMNS} columns. Set REPLICA IDENTITY FULL",
                target.shown()
            ),
        ));
    }
    plan.write_staged(tx)
}

/// Rows that came without the same columns.
#[derive(Debug)]
struct Group {
    number: i32,
    /// Indexes of the columns that are missing.
    missing: Vec<usize>,
    rows: Vec<u32>,
}

struct Plan<'a> {
    target: &'a Target,
    origin: Origin,
    upserts: Cells<'a>,
    deletes: Cells<'a>,
    from: Cells<'a>,
    /// Group of each upsert; empty if all are whole.
    group_of: Vec<i32>,
    /// Row of `from` of each upsert that has one.
    from_of: BTreeMap<u32, u32>,
    /// Groups of moved rows with missing cells, and of others with missing cells.
    moved: Vec<Group>,
    patched: Vec<Group>,
}

impl<'a> Plan<'a> {
    fn new(target: &'a Target, origin: Origin, merge: &'a MergeRows) -> Result<Plan<'a>, Failure> {
        let mut plan = Plan {
            target,
            origin,
            upserts: Cells::new(&merge.upserts, target)?,
            deletes: Cells::new(&merge.deletes, target)?,
            from: Cells::new(&merge.moved_from, target)?,
            group_of: Vec::new(),
            from_of: merge.moved_index.iter().copied().zip(0..).collect(),
            moved: Vec::new(),
            patched: Vec::new(),
        };
        if merge.moved_index.len() != merge.moved_from.count as usize
            || plan.from_of.keys().any(|row| *row >= merge.upserts.count)
        {
            return Err(contract(target, "moved rows and their old keys do not match"));
        }
        if plan.upserts.has_missing() {
            plan.group()?;
        }
        Ok(plan)
    }

    /// Groups the rows with missing cells by which these are.
    fn group(&mut self) -> Result<(), Failure> {
        let mut groups: BTreeMap<(bool, Vec<usize>), Vec<u32>> = BTreeMap::new();
        for row in 0..self.upserts.count() {
            let missing: Vec<usize> = (0..self.target.columns.len())
                .filter(|column| self.upserts.state(*column, row) == State::Missing)
                .collect();
            if missing.iter().any(|column| self.target.key.contains(column)) {
                return Err(contract(self.target, "a key cell is missing"));
            }
            if !missing.is_empty() {
                groups.entry((self.from_of.contains_key(&row), missing)).or_default().push(row);
            }
        }
        self.group_of = vec![WHOLE; self.upserts.count() as usize];
        for ((is_moved, missing), rows) in groups {
            let number = if is_moved { self.moved.len() as i32 + 1 } else { DELETE - 1 - self.patched.len() as i32 };
            for row in &rows {
                self.group_of[*row as usize] = number;
            }
            if is_moved { &mut self.moved } else { &mut self.patched }.push(Group { number, missing, rows });
        }
        Ok(())
    }

    fn group_of(&self, row: u32) -> i32 {
        self.group_of.get(row as usize).copied().unwrap_or(WHOLE)
    }

    /// Statements with the values in them. No row takes cells from another place.
    fn write_plainly<S: Stream>(&self, tx: &mut Transaction<'_, S>) -> Result<(), Failure> {
        let deletes: Vec<u32> = (0..self.deletes.count()).collect();
        for rows in deletes.chunks(FEW as usize) {
            self.delete_plainly(tx, rows)?;
        }
        for group in &self.patched {
            for row in &group.rows {
                self.patch_plainly(tx, group, *row)?;
            }
        }
        let whole: Vec<u32> = (0..self.upserts.count()).filter(|row| self.group_of(*row) == WHOLE).collect();
        for rows in whole.chunks(FEW as usize) {
            self.upsert_plainly(tx, rows)?;
        }
        Ok(())
    }

    fn delete_plainly<S: Stream>(&self, tx: &mut Transaction<'_, S>, rows: &[u32]) -> Result<(), Failure> {
        let single = self.target.key.len() == 1;
        let mut sql = format!("DELETE FROM {} WHERE ({}) IN (", self.target.quoted, self.target.key_list(""));
        for (position, &row) in rows.iter().enumerate() {
            sql.push_str(if position > 0 { ", " } else { "" });
            sql.push_str(if single { "" } else { "(" });
            for (position, &column) in self.target.key.iter().enumerate() {
                sql.push_str(if position > 0 { ", " } else { "" });
                self.deletes.push_literal(&mut sql, column, row, self.origin, self.upserts.count() + row)?;
            }
            sql.push_str(if single { "" } else { ")" });
        }
        sql.push(')');
        let row = (rows.len() == 1).then(|| self.upserts.count() + rows[0]);
        tx.add(&sql, Origin { row, ..self.origin })
    }

    fn patch_plainly<S: Stream>(&self, tx: &mut Transaction<'_, S>, group: &Group, row: u32) -> Result<(), Failure> {
        let mut sql = format!("UPDATE {} SET ", self.target.quoted);
        let sent = (0..self.target.columns.len()).filter(|column| !group.missing.contains(column));
        for (position, column) in sent.enumerate() {
            sql.push_str(if position > 0 { ", " } else { "" });
            sql.push_str(&self.target.columns[column].quoted);
            sql.push_str(" = ");
            self.upserts.push_literal(&mut sql, column, row, self.origin, row)?;
        }
        for (position, &column) in self.target.key.iter().enumerate() {
            sql.push_str(if position > 0 { " AND " } else { " WHERE " });
            sql.push_str(&self.target.columns[column].quoted);
            sql.push_str(" = ");
            self.upserts.push_literal(&mut sql, column, row, self.origin, row)?;
        }
        tx.add_finding(&sql, Origin { row: Some(row), ..self.origin }, vec![row])
    }

    fn upsert_plainly<S: Stream>(&self, tx: &mut Transaction<'_, S>, rows: &[u32]) -> Result<(), Failure> {
        let mut sql = format!("INSERT INTO {} ({}) VALUES ", self.target.quoted, self.target.column_list());
        for (position, &row) in rows.iter().enumerate() {
            sql.push_str(if position > 0 { ", (" } else { "(" });
            for column in 0..self.target.columns.len() {
                sql.push_str(if column > 0 { ", " } else { "" });
                self.upserts.push_literal(&mut sql, column, row, self.origin, row)?;
            }
            sql.push(')');
        }
        sql.push(' ');
        sql.push_str(&self.target.on_conflict());
        let row = (rows.len() == 1).then(|| rows[0]);
        tx.add(&sql, Origin { row, ..self.origin })
    }

    /// By way of the staging table: columns `r` (row), `g` (group), `o0…` (the key a moved
    /// row had), `c0…` (the table's own).
    fn write_staged<S: Stream>(&self, tx: &mut Transaction<'_, S>) -> Result<(), Failure> {
        let stage = stage_name(self.target.id);
        if !tx.is_staged(self.target.id) {
            if let Some(oldest) = tx.note_staged(self.target.id, MOST_STAGES) {
                tx.add(&drop_stage(oldest), self.origin)?;
            }
            tx.add(&create_stage(self.target), self.origin)?;
        }
        if tx.fills_again(self.target.id) {
            tx.add(&format!("TRUNCATE {stage}"), self.origin)?;
        }
        self.stage(tx, &stage)?;
        for group in &self.moved {
            let sets: Vec<String> = group
                .missing
                .iter()
                .map(|&column| format!("c{column} = t.{}", self.target.columns[column].quoted))
                .collect();
            let sql = format!(
                "UPDATE {stage} s SET {} FROM {} t WHERE s.g = {} AND {} RETURNING s.r",
                sets.join(", "),
                self.target.quoted,
                group.number,
                self.matching("o", true)
            );
            tx.add_finding(&sql, self.origin, group.rows.clone())?;
        }
        if self.deletes.count() > 0 {
            let sql = format!(
                "DELETE FROM {} t USING {stage} s WHERE s.g = {DELETE} AND {}",
                self.target.quoted,
                self.matching("c", false)
            );
            tx.add(&sql, self.origin)?;
        }
        for group in &self.patched {
            let sent = (0..self.target.columns.len()).filter(|column| !group.missing.contains(column));
            let sets: Vec<String> =
                sent.map(|column| format!("{} = s.c{column}", self.target.columns[column].quoted)).collect();
            let sql = format!(
                "UPDATE {} t SET {} FROM {stage} s WHERE s.g = {} AND {} RETURNING s.r",
                self.target.quoted,
                sets.join(", "),
                group.number,
                self.matching("c", false)
            );
            tx.add_finding(&sql, self.origin, group.rows.clone())?;
        }
        let staged: Vec<String> = (0..self.target.columns.len()).map(|column| format!("c{column}")).collect();
        let sql = format!(
            "INSERT INTO {} ({}) SELECT {} FROM {stage} WHERE g >= {WHOLE} {}",
            self.target.quoted,
            self.target.column_list(),
            staged.join(", "),
            self.target.on_conflict()
        );
        tx.add(&sql, self.origin)
    }

    /// `t.key = s.…` for the whole key; the old one is numbered by its place in the key.
    fn matching(&self, prefix: &str, old: bool) -> String {
        let pairs = self.target.key.iter().enumerate().map(|(place, &column)| {
            let number = if old { place } else { column };
            format!("t.{} = s.{prefix}{number}", self.target.columns[column].quoted)
        });
        pairs.collect::<Vec<_>>().join(" AND ")
    }

    /// COPY of all rows into the staging table; line n is the batch's row n.
    fn stage<S: Stream>(&self, tx: &mut Transaction<'_, S>, stage: &str) -> Result<(), Failure> {
        let mut names = vec!["r".to_owned(), "g".to_owned()];
        if !self.moved.is_empty() {
            names.extend((0..self.target.key.len()).map(|place| format!("o{place}")));
        }
        names.extend((0..self.target.columns.len()).map(|column| format!("c{column}")));
        let sql = format!("COPY {stage} ({}) FROM STDIN", names.join(", "));
        let (upserts, all) = (self.upserts.count(), self.upserts.count() + self.deletes.count());
        let mut row = 0;
        tx.copy(&sql, self.origin, |out| {
            if row < upserts {
                self.stage_row(out, row, self.group_of(row), &self.upserts, row)?;
            } else if row < all {
                self.stage_row(out, row, DELETE, &self.deletes, row - upserts)?;
            }
            row += 1;
            Ok(row < all)
        })
    }

    fn stage_row(
        &self,
        out: &mut BytesMut,
        number: u32,
        group: i32,
        cells: &Cells<'_>,
        row: u32,
    ) -> Result<(), Failure> {
        out.put_slice(format!("{number}\t{group}").as_bytes());
        if !self.moved.is_empty() {
            let from = if group > WHOLE { self.from_of.get(&number) } else { None };
            for &column in &self.target.key {
                out.put_u8(b'\t');
                match from {
                    Some(from) => self.from.push_copy(out, column, *from, self.origin, number)?,
                    None => out.put_slice(b"\\N"),
                }
            }
        }
        for column in 0..self.target.columns.len() {
            out.put_u8(b'\t');
            match cells.state(column, row) {
                State::Value => cells.push_copy(out, column, row, self.origin, number)?,
                State::Null | State::Missing => out.put_slice(b"\\N"),
            }
        }
        out.put_u8(b'\n');
        Ok(())
    }
}

/// Name of a table's staging table.
fn stage_name(table: u32) -> String {
    format!("pg_temp.tidegate_stage_{table}")
}

/// Drops a table's staging table, if it has one.
pub fn drop_stage(table: u32) -> String {
    format!("DROP TABLE IF EXISTS {}", stage_name(table))
}

/// With the types, modifiers and collations that the table has there.
fn create_stage(target: &Target) -> String {
    let mut columns = vec!["0 AS r".to_owned(), "0 AS g".to_owned()];
    columns.extend(
        target.key.iter().enumerate().map(|(place, &column)| format!("{} AS o{place}", target.columns[column].quoted)),
    );
    columns.extend(target.columns.iter().enumerate().map(|(column, named)| format!("{} AS c{column}", named.quoted)));
    format!(
        "CREATE TEMPORARY TABLE IF NOT EXISTS {} ON COMMIT DELETE ROWS AS SELECT {} FROM {} WITH NO DATA",
        stage_name(target.id),
        columns.join(", "),
        target.quoted
    )
}

fn contract(target: &Target, what: &str) -> Failure {
    of_table(target.id, "postgres.contract", format!("{}: {what}, which the contract rules out", target.shown()))
}
