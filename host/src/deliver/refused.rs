//! Rows that a destination refuses: found, kept in quarantine before their ticket counts
//! as durable (P6), followed by what comes later for their keys, and sent again (P32).

use std::collections::BTreeMap;

use crate::batch::{content_bytes, pick, refusable};
use crate::config::Mode;
use crate::position::Position;
use crate::schema::table::TableSchema;
use crate::schema::wire::snapshot_to_wire;
use crate::store::{QuarantinedRow, RefusedWhy, RowOp, TableError};
use crate::wire;

use super::destination::{Destination, Stop, Table, now_us};
use super::isolate::{Isolated, RowAt};
use super::ledger::{Clearing, Clears, Entry};
use super::quarantine::{self, Maker, Quarantine};
use super::sending::RESYNC;

/// Rows that may be blamed for a trap or time-out one after the other, with nothing that
/// succeeds in between: beyond that it is not the rows.
const VERDICTS: u32 = 3;

impl Destination {
    /// Reads what is in quarantine; again after an operator has marked rows.
    pub(super) async fn load_quarantine(&mut self) -> Result<(), Stop> {
        let before: Vec<u32> = self.quarantine.tables().collect();
        let name = self.parts.config.name.clone();
        let keys = self.until_stored(async |store| store.quarantine_index(&name).await).await?;
        self.quarantine = Quarantine::new(keys);
        for oid in self.quarantine.tables().chain(before).collect::<Vec<u32>>() {
            self.show_quarantined(oid);
        }
        Ok(())
    }

    /// An operator has marked rows: they are forgotten or sent again.
    pub(super) async fn take_marks(&mut self) -> Result<(), Stop> {
        let name = self.parts.config.name.clone();
        self.until_stored(async |store| store.drop_marked(&name).await).await?;
        self.load_quarantine().await?;
        self.send_marked().await
    }

    /// Finds the rows at fault in the next unsent group: those that are named, or the one
    /// that is left after halving.
    pub(super) async fn isolate(&mut self, why: &RefusedWhy, named: &[wire::Refusal]) -> Result<(), Stop> {
        let ticket = self.ledger.unsent().map(|entry| entry.group.ticket);
        let named: BTreeMap<RowAt, RefusedWhy> = named
            .iter()
            .filter(|refusal| Some(refusal.ticket) == ticket)
            .map(|refusal| (at(refusal), said(refusal)))
            .collect();
        let rows: Vec<RowAt> = named.keys().copied().collect();
        match self.ledger.isolate(&rows) {
            Isolated::Nothing => Ok(()),
            Isolated::Split => {
                self.backoff.ease();
                Ok(())
            }
            Isolated::Table(oid) => self.fail_table(oid, stopped(why)).await,
            Isolated::Rows(rows) => {
                let Some(index) = self.ledger.next_unsent() else { return Ok(()) };
                let rows = rows.into_iter().map(|row| (row, named.get(&row).unwrap_or(why).clone())).collect();
                self.backoff.ease();
                self.refuse(index, &rows).await
            }
        }
    }

    /// The instance trapped or took too long over a group for the third time. A row is
    /// blamed only by a plugin that takes others.
    pub(super) async fn isolate_fault(&mut self, why: &RefusedWhy) -> Result<(), Stop> {
        let Some(index) = self.ledger.next_unsent() else { return Ok(()) };
        let Some(entry) = self.ledger.get_mut(index) else { return Ok(()) };
        if super::isolate::divisible(entry) {
            return self.isolate(why, &[]).await;
        }
        if !self.proven || self.verdicts >= VERDICTS {
            return Ok(());
        }
        self.verdicts += 1;
        self.isolate(why, &[]).await
    }

    /// Rows of a group were refused: they are kept, with what is behind them for the same
    /// keys, and taken out of what has yet to be sent.
    pub(super) async fn refuse(&mut self, index: usize, rows: &BTreeMap<RowAt, RefusedWhy>) -> Result<(), Stop> {
        let mut out: BTreeMap<usize, Vec<RowAt>> = BTreeMap::new();
        let mut batches: Vec<u32> = rows.keys().map(|at| at.batch).collect();
        batches.dedup();
        for batch in batches {
            let of_batch: Vec<(u32, &RefusedWhy)> =
                rows.iter().filter(|(at, _)| at.batch == batch).map(|(at, why)| (at.row, why)).collect();
            out.entry(index).or_default().extend(of_batch.iter().map(|(row, _)| RowAt { batch, row: *row }));
            let Some((oid, made)) = self.made(index, batch, &of_batch) else { continue };
            // A truncation behind it takes the row away whatever it is.
            let emptied = |batch: &wire::Batch| matches!(batch.content, wire::Content::Truncate(_));
            if self.is_merge() && self.ledger.behind(index, batch, oid).any(|(.., batch)| emptied(batch)) {
                continue;
            }
            // A table that stops is out of the ledger already, and what is behind it has
            // another place there.
            if !self.keep(oid, made).await? {
                return Ok(());
            }
            if self.is_merge() && !self.follow(index, batch, oid, &mut out).await? {
                return Ok(());
            }
        }
        let keep_empty = self.parts.lane.can("transactional");
        for (index, rows) in out {
            self.ledger.remove_rows(index, &rows, keep_empty);
        }
        Ok(())
    }

    /// Rows that an answer refuses, of groups that were accepted.
    pub(super) async fn refused(&mut self, refusals: &[wire::Refusal]) -> Result<(), Stop> {
        let mut groups: BTreeMap<u64, BTreeMap<RowAt, RefusedWhy>> = BTreeMap::new();
        for refusal in refusals {
            groups.entry(refusal.ticket).or_default().insert(at(refusal), said(refusal));
        }
        for (ticket, mut rows) in groups {
            let Some(index) = self.ledger.find(ticket) else {
                tracing::warn!(destination = %self.parts.config.name, ticket, "the plugin refuses rows of a group that is not under way");
                continue;
            };
            if let Some(entry) = self.ledger.get_mut(index) {
                rows.retain(|at, _| {
                    let batch = entry.group.batches.get(at.batch as usize);
                    batch.is_some_and(|batch| at.row < refusable(&batch.content))
                });
                if entry.accepted.is_some() {
                    entry.refused.extend(rows.keys().copied());
                }
            }
            self.refuse(index, &rows).await?;
        }
        Ok(())
    }

    /// Rows of a copy that were not even sent. False if the table stops over it.
    pub(super) async fn keep_of(
        &mut self,
        oid: u32,
        entry: &Entry,
        rows: &BTreeMap<RowAt, RefusedWhy>,
    ) -> Result<bool, Stop> {
        let merge = self.is_merge();
        let Some(schema) = self.parts.tables.get(&oid).and_then(|table| table.schema.clone()) else { return Ok(false) };
        let Some(batch) = entry.group.batches.first() else { return Ok(true) };
        let maker = maker(&self.parts.config.name, &schema, merge, self.quarantine.count(oid));
        let made = maker.rows(&batch.content, rows.iter().map(|(at, why)| (at.row, why)));
        self.keep(oid, made).await
    }

    /// What is kept of rows of a batch.
    fn made(&mut self, index: usize, batch: u32, rows: &[(u32, &RefusedWhy)]) -> Option<(u32, Vec<QuarantinedRow>)> {
        let merge = self.is_merge();
        let batch = self.ledger.get_mut(index)?.group.batches.get(batch as usize)?;
        let oid = batch.table_id;
        let schema = self.parts.tables.get(&oid)?.schema.clone()?;
        let maker = maker(&self.parts.config.name, &schema, merge, self.quarantine.count(oid));
        Some((oid, maker.rows(&batch.content, rows.iter().copied())))
    }

    /// Later changes of keys that went into quarantine just now, as far as they are under
    /// way already: they join, and what has yet to be sent is not sent any more. False if
    /// the table stops over it.
    async fn follow(
        &mut self,
        index: usize,
        batch: u32,
        oid: u32,
        out: &mut BTreeMap<usize, Vec<RowAt>>,
    ) -> Result<bool, Stop> {
        let behind: Vec<(usize, u32)> =
            self.ledger.behind(index, batch, oid).map(|(at, batch, _)| (at, batch)).collect();
        for (index, batch) in behind {
            let Some(schema) = self.parts.tables.get(&oid).and_then(|table| table.schema.clone()) else { break };
            let Some(table) = self.quarantine.table(oid) else { break };
            let Some(entry) = self.ledger.get_mut(index) else { break };
            let Some(content) = entry.group.batches.get(batch as usize).map(|batch| &batch.content) else { continue };
            let rows = quarantine::affected(table, content, &schema);
            if rows.is_empty() {
                continue;
            }
            let joined = joins();
            let maker = maker(&self.parts.config.name, &schema, true, 0);
            let changes = maker.rows(content, rows.iter().map(|row| (*row, &joined)));
            if entry.accepted.is_some() {
                entry.clears = if entry.clears == Clears::All { Clears::All } else { Clears::Whole };
            } else {
                out.entry(index).or_default().extend(rows.iter().map(|row| RowAt { batch, row: *row }));
            }
            if !self.join(oid, changes).await? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Takes the changes of quarantined keys out of a batch that is about to be sent: they
    /// join what is there. None if nothing is left to send.
    pub(super) async fn divert(&mut self, oid: u32, content: wire::Content) -> Result<Option<wire::Content>, Stop> {
        let Some(table) = self.quarantine.table(oid).filter(|_| self.is_merge()) else { return Ok(Some(content)) };
        let Some(schema) = self.parts.tables.get(&oid).and_then(|table| table.schema.clone()) else {
            return Ok(Some(content));
        };
        let rows = quarantine::affected(table, &content, &schema);
        if rows.is_empty() {
            return Ok(Some(content));
        }
        let joined = joins();
        let maker = maker(&self.parts.config.name, &schema, true, 0);
        let changes = maker.rows(&content, rows.iter().map(|row| (*row, &joined)));
        if !self.join(oid, changes).await? {
            return Ok(None);
        }
        let kept: Vec<u32> = (0..refusable(&content)).filter(|row| rows.binary_search(row).is_err()).collect();
        if kept.is_empty() && !self.parts.lane.can("transactional") {
            return Ok(None);
        }
        Ok(Some(pick(&content, &kept)))
    }

    /// The table is emptied at a position, and with it what waits for its keys. Before the
    /// truncation is sent: if that has to be sent again, there is nothing to forget any more.
    pub(super) async fn truncated(&mut self, oid: u32, position: Position) -> Result<(), Stop> {
        let is_new = |table: &Table| table.takes_changes() && table.sent.is_none_or(|sent| position > sent);
        if !self.is_merge() || !self.parts.tables.get(&oid).is_some_and(is_new) {
            return Ok(());
        }
        let rows = self.quarantine.remove_through(oid, position);
        if !rows.is_empty() {
            let name = self.parts.config.name.clone();
            self.until_stored(async |store| store.remove_quarantined(&name, oid, rows.clone()).await).await?;
            self.show_quarantined(oid);
        }
        Ok(())
    }

    /// Folds changes into what is in quarantine. False if the table stops over it.
    async fn join(&mut self, oid: u32, changes: Vec<QuarantinedRow>) -> Result<bool, Stop> {
        let Some(schema) = self.parts.tables.get(&oid).and_then(|table| table.schema.clone()) else { return Ok(false) };
        let mut idents: Vec<String> =
            changes.iter().flat_map(|row| [Some(&row.ident), row.needs.as_ref()]).flatten().cloned().collect();
        let mut there = self.fetch(oid, &idents).await?;
        // What those need that are there may be set free.
        idents = there.iter().filter_map(|row| row.needs.clone()).filter(|needed| !idents.contains(needed)).collect();
        if !idents.is_empty() {
            there.extend(self.fetch(oid, &idents).await?);
        }
        let mut known = Vec::with_capacity(there.len());
        for row in there {
            let asks = |change: &&QuarantinedRow| change.needs.as_ref().unwrap_or(&change.ident) == &row.ident;
            let part = |change: &QuarantinedRow| change.op != RowOp::Delete && !change.row.is_whole(&schema);
            let needed = changes.iter().filter(asks).any(part);
            match self.under_current(&schema, row.clone()) {
                Ok(row) => known.push(row),
                Err(_) if !needed => known.push(row),
                Err(error) => {
                    self.fail_table(oid, TableError { next: Some(RESYNC.to_owned()), ..TableError::from(&error) })
                        .await?;
                    return Ok(false);
                }
            }
        }
        let patches = self.parts.lane.can("transactional");
        let joined = quarantine::join(&known, changes, &schema, patches);
        self.keep(oid, joined).await
    }

    async fn fetch(&mut self, oid: u32, idents: &[String]) -> Result<Vec<QuarantinedRow>, Stop> {
        let name = self.parts.config.name.clone();
        self.until_stored(async |store| store.get_quarantined(&name, oid, idents.to_vec()).await).await
    }

    fn under_current(
        &self,
        schema: &std::sync::Arc<TableSchema>,
        row: QuarantinedRow,
    ) -> crate::error::Result<QuarantinedRow> {
        if row.snapshot == schema.snapshot {
            return Ok(row);
        }
        let from = self.parts.history.read().get(row.oid, row.snapshot);
        let from = from.ok_or_else(|| {
            crate::error::Error::permanent(
                "schema.history-lost",
                format!(
                    "the version {} that a quarantined row of {} is of is not in the history",
                    row.snapshot, row.table
                ),
            )
        })?;
        quarantine::under(row, &from, schema)
    }

    /// Stores rows, durable on return. False if there would be too many, which stops the
    /// table.
    async fn keep(&mut self, oid: u32, rows: Vec<QuarantinedRow>) -> Result<bool, Stop> {
        let Some(first) = rows.first() else { return Ok(true) };
        let (rows_before, bytes_before) = self.quarantine.size_with(oid, &[]);
        let (count, bytes) = self.quarantine.size_with(oid, &rows);
        let limits = self.parts.config.quarantine;
        let most = |grown: u64, before: u64, most: u64| grown > before && grown > most;
        if most(count, rows_before, limits.max_rows) || most(bytes, bytes_before, limits.max_bytes) {
            self.fail_table(oid, full(&first.reason, count, bytes)).await?;
            return Ok(false);
        }
        if count > rows_before {
            tracing::warn!(
                destination = %self.parts.config.name, table = %first.table, rows = rows.len(), row = %first.ident,
                code = %first.reason.code, "refused, and kept in quarantine: {}", first.reason.message
            );
        }
        let name = self.parts.config.name.clone();
        let known = self.quarantine.table(oid);
        // Sent again, and refused again.
        let is_old = |row: &QuarantinedRow| {
            row.mark.is_none()
                && known.and_then(|table| table.position(&row.ident)).is_some_and(|at| at >= row.position)
        };
        let (old, new): (Vec<QuarantinedRow>, Vec<QuarantinedRow>) = rows.into_iter().partition(is_old);
        if !old.is_empty() {
            let why: Vec<_> = old.into_iter().map(|row| (row.ident, row.position, row.reason)).collect();
            self.until_stored(async |store| store.explain_quarantined(&name, oid, why.clone()).await).await?;
        }
        if !new.is_empty() {
            self.until_stored(async |store| store.put_quarantined(new.clone()).await).await?;
            new.iter().for_each(|row| self.quarantine.put(row));
            self.show_quarantined(oid);
        }
        Ok(true)
    }

    /// Sends the rows again that are to be, each table's alone.
    pub(super) async fn send_marked(&mut self) -> Result<(), Stop> {
        let ready = |oid: &u32| {
            let table = self.parts.tables.get(oid);
            table.is_some_and(|table| table.takes_changes() && table.record.applying.is_none())
        };
        let pace = self.pace();
        let bytes = pace.group_bytes as u64;
        for oid in self.quarantine.tables().filter(ready).collect::<Vec<u32>>() {
            loop {
                let idents = self.quarantine.take_marked(oid, bytes);
                if idents.is_empty() {
                    break;
                }
                let rows = self.fetch(oid, &idents).await?;
                self.send_again(oid, rows).await?;
                self.pump().await?;
                if self.ledger.accepted_bytes() >= pace.settle_bytes {
                    self.flush().await?;
                }
            }
        }
        Ok(())
    }

    async fn send_again(&mut self, oid: u32, rows: Vec<QuarantinedRow>) -> Result<(), Stop> {
        let Some(schema) = self.parts.tables.get(&oid).and_then(|table| table.schema.clone()) else { return Ok(()) };
        let mut by_epoch: BTreeMap<u32, Vec<QuarantinedRow>> = BTreeMap::new();
        let mut lost = Vec::new();
        for row in rows {
            let (ident, position) = (row.ident.clone(), row.position);
            match self.under_current(&schema, row) {
                Ok(row) => by_epoch.entry(position.epoch).or_default().push(row),
                Err(error) => {
                    let why =
                        RefusedWhy { code: error.code().to_owned(), message: error.message().to_owned(), column: None };
                    lost.push((ident, position, why));
                }
            }
        }
        if !lost.is_empty() {
            let name = self.parts.config.name.clone();
            self.until_stored(async |store| store.explain_quarantined(&name, oid, lost.clone()).await).await?;
        }
        for rows in by_epoch.into_values() {
            let content = match quarantine::content(&rows, &schema, self.is_merge()) {
                Ok(content) => content,
                Err(error) => return self.fail_table(oid, TableError::from(&error)).await,
            };
            let mut entry = Entry::new();
            entry.clears = Clears::All;
            entry.bytes = content_bytes(&content);
            entry.taken.push(self.parts.live.take_now(entry.bytes));
            entry.columns.push((oid, schema.columns.len()));
            let snapshot = snapshot_to_wire(schema.snapshot);
            entry.group.batches.push(wire::Batch { table_id: oid, snapshot, through: None, content });
            self.ledger.push(entry);
        }
        Ok(())
    }

    /// Groups are durable that supersede what is in quarantine, or come from there.
    pub(super) async fn clear_quarantined(&mut self, clearing: Vec<Clearing>) -> Result<(), Stop> {
        let mut gone: BTreeMap<u32, Vec<_>> = BTreeMap::new();
        for Clearing { batches, all, refused } in clearing {
            for (index, batch) in (0..).zip(&batches) {
                let oid = batch.table_id;
                let Some(schema) = self.parts.tables.get(&oid).and_then(|table| table.schema.clone()) else { continue };
                let refused: Vec<u32> = refused.iter().filter(|at| at.batch == index).map(|at| at.row).collect();
                let mut taken = quarantine::taken(&batch.content, &schema, &refused, all);
                taken.retain(|(ident, position)| self.quarantine.remove(oid, ident, *position));
                gone.entry(oid).or_default().extend(taken);
            }
        }
        gone.retain(|_, rows| !rows.is_empty());
        let name = self.parts.config.name.clone();
        for (oid, rows) in gone {
            self.until_stored(async |store| store.remove_quarantined(&name, oid, rows.clone()).await).await?;
            self.show_quarantined(oid);
        }
        Ok(())
    }

    pub(super) fn show_quarantined(&self, oid: u32) {
        let Some(table) = self.parts.tables.get(&oid) else { return };
        let count = self.quarantine.count(oid);
        self.parts.board.update_table(&self.parts.config.name, &table.record.name, |status| status.quarantined = count);
    }

    fn is_merge(&self) -> bool {
        self.parts.config.mode == Mode::Merge
    }
}

fn maker<'a>(destination: &'a str, schema: &'a TableSchema, merge: bool, count: u64) -> Maker<'a> {
    Maker { destination, schema, merge, count, now: now_us() }
}

fn at(refusal: &wire::Refusal) -> RowAt {
    RowAt { batch: refusal.batch, row: refusal.row }
}

fn said(refusal: &wire::Refusal) -> RefusedWhy {
    RefusedWhy { code: refusal.code.clone(), message: refusal.message.clone(), column: refusal.column }
}

/// Why a row joins that was not refused itself: what another needs, or takes.
fn joins() -> RefusedWhy {
    RefusedWhy {
        code: "quarantine.joined".to_owned(),
        message: "waits with a refused row that cells move to or from".to_owned(),
        column: None,
    }
}

fn stopped(why: &RefusedWhy) -> TableError {
    TableError { code: why.code.clone(), message: why.message.clone(), next: Some(RESYNC.to_owned()) }
}

fn full(why: &RefusedWhy, rows: u64, bytes: u64) -> TableError {
    TableError {
        code: "quarantine.full".to_owned(),
        message: format!(
            "{rows} rows of {bytes} bytes would be in quarantine, more than [destination.quarantine] allows; the last was refused with {}: {}",
            why.code, why.message
        ),
        next: Some(
            "Mend the cause, then run `tidegate resync DEST TABLE`; or allow more in [destination.quarantine]."
                .to_owned(),
        ),
    }
}
