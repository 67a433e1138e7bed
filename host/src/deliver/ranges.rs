//! A destination's side of copies by ranges of the key: what is stored of each range, and
//! when, so that a restart goes on with those that are not done (P19).

use std::sync::Arc;

use crate::position::{Lsn, Position};
use crate::schema::table::TableSchema;
use crate::schema::wire::snapshot_to_wire;
use crate::store::{CopyRecord, RangeRecord, TableState};
use crate::wire;

use super::copies::CopyEnded;
use super::destination::{Destination, Run, Stop, now_us};
use super::ledger::{Copied, Entry, RangeEnd};
use super::resume::not_resumable;
use super::routes::Place;
use super::sending::Ended;

/// What a plugin answers that is to go on with a run it does not know.
const RUN_UNKNOWN: &str = "run-unknown";

/// A range of a copy that is durable.
pub(super) struct EndedRange {
    oid: u32,
    /// As the plugin knows it.
    run: Arc<str>,
    number: usize,
    floor: Lsn,
    rows: u64,
    bytes: u64,
}

impl Run {
    /// The id of the next batch: none of the run has it, in whichever attempt.
    pub(super) fn next_batch(&self) -> String {
        match self.name == self.id {
            true => self.batches.to_string(),
            false => format!("{}:{}", self.id, self.batches),
        }
    }
}

impl Destination {
    pub(super) fn place(&self, oid: u32) -> Place {
        Place { destination: self.parts.index, oid }
    }

    /// A copy that begins can be resumed, if it goes by ranges.
    pub(super) async fn record_ranges(&mut self, ranges: Option<CopyRecord>) -> Result<(), Stop> {
        let Some(mut copy) = ranges else { return Ok(()) };
        copy.destination = self.parts.config.name.clone();
        self.until_stored(async |store| store.save_copy(copy.clone()).await).await?;
        self.parts.resumes.put(self.place(copy.oid), copy);
        Ok(())
    }

    /// A run goes on: what of it is done stays. The bytes of that.
    pub(super) async fn resume_copy(
        &mut self,
        schema: &Arc<TableSchema>,
        run: &str,
        rows_total: u64,
    ) -> Result<u64, CopyEnded> {
        let oid = schema.oid;
        // What is under way of an earlier attempt counts as well.
        self.flush().await?;
        self.store_ranges().await?;
        let known = self.parts.resumes.get(self.place(oid)).filter(|copy| copy.run == run);
        let Some(table) = self.parts.tables.get_mut(&oid) else {
            return Err(self.cannot_resume(schema, "it is gone").await?);
        };
        let recorded = table.record.state == TableState::DataSync && table.record.run.as_deref() == Some(run);
        let Some(copy) = known.filter(|_| recorded) else {
            return Err(self.cannot_resume(schema, "another one was begun").await?);
        };
        let (rows, bytes) = copy.done();
        table.schema = Some(schema.clone());
        table.attached = false;
        table.run = None;
        table.record.rows_copied = rows;
        table.record.rows_total = Some(rows_total);
        if self.quarantine.count(oid) > 0 || self.doubts.suspect(oid) {
            return Err(self.cannot_resume(schema, "rows of it were refused").await?);
        }
        self.save_table(oid).await?;
        let done = copy.ranges.iter().filter(|range| range.floor.is_some()).count();
        tracing::info!(
            destination = %self.parts.config.name, table = %schema.name, rows,
            "the copy of the table goes on: {done} of {} ranges of its key are there", copy.ranges.len()
        );
        Ok(bytes)
    }

    /// Asks the plugin to begin a run, or to go on with it. The error is the copy's end;
    /// what the plugin says otherwise is the caller's.
    pub(super) async fn begin_run(
        &mut self,
        schema: &Arc<TableSchema>,
        table: &wire::Table,
        run: &str,
        goes_on: bool,
    ) -> Result<Result<(), Ended>, CopyEnded> {
        let mut table = table.clone();
        if goes_on {
            table.details.push(("resume".to_owned(), "true".to_owned()));
        }
        let begun = self.call(async |instance| instance.begin_copy(&table, run).await).await;
        match &begun {
            Err(Ended::Refused(failure)) if goes_on && failure.code == RUN_UNKNOWN => {
                Err(self.cannot_resume(schema, &failure.message).await?)
            }
            _ => Ok(begun),
        }
    }

    async fn cannot_resume(&mut self, schema: &TableSchema, why: &str) -> Result<CopyEnded, Stop> {
        self.forget_copy(schema.oid).await?;
        Ok(CopyEnded::Error(not_resumable(&schema.name, why)))
    }

    /// There is nothing to resume any more.
    pub(super) async fn forget_copy(&mut self, oid: u32) -> Result<(), Stop> {
        if self.parts.resumes.remove(self.place(oid)) {
            let name = self.parts.config.name.clone();
            self.until_stored(async |store| store.delete_copy(&name, oid).await).await?;
        }
        Ok(())
    }

    /// Rows that went from a range before it is copied again.
    pub(super) fn delete_entry(&mut self, oid: u32, id: Arc<str>, deletes: wire::MergeRows) -> Option<Entry> {
        let table = self.parts.tables.get_mut(&oid)?;
        table.run.as_ref().filter(|run| run.id == id)?;
        let mut entry = Entry::new();
        entry.copied = Some(Copied { oid, run: id, range: None, rows: 0, source_bytes: 0 });
        let snapshot = snapshot_to_wire(table.schema.as_ref()?.snapshot);
        let content = wire::Content::Merge(deletes);
        entry.group.batches.push(wire::Batch { table_id: oid, snapshot, through: None, content });
        Some(entry)
    }

    /// The rows of a range begin, which is on disk before the first of them is sent; or they
    /// ended.
    pub(super) async fn mark_range(&mut self, oid: u32, id: Arc<str>, number: usize, ended: bool) -> Result<(), Stop> {
        let run = self.parts.tables.get_mut(&oid).and_then(|table| table.run.as_mut()).filter(|run| run.id == id);
        let Some(run) = run else { return Ok(()) };
        if ended {
            let settled = self.ledger.range_ended(RangeEnd { oid, run: id, number });
            self.settle(settled);
            return self.store_ranges().await;
        }
        let (name, floor) = (run.name.clone(), run.floor);
        let mut begins = false;
        let range = self.parts.resumes.update(self.place(oid), &name, number, |range| {
            begins = range.since.is_none();
            range.since.get_or_insert(floor);
        });
        if let Some(range) = range.filter(|_| begins) {
            self.save_ranges(oid, vec![(number, range)]).await?;
            crate::failpoint::reached("copy.range-started");
        }
        Ok(())
    }

    /// All rows of a range are durable.
    pub(super) fn range_durable(&mut self, end: &RangeEnd) {
        let run = self.parts.tables.get_mut(&end.oid).and_then(|table| table.run.as_mut());
        let Some(run) = run.filter(|run| run.id == end.run) else { return };
        let counted = run.ranges.as_mut().and_then(|ranges| ranges.remove(&end.number));
        let (rows, bytes) = counted.unwrap_or_default();
        let (run, floor) = (run.name.clone(), run.floor);
        self.ended.push(EndedRange { oid: end.oid, run, number: end.number, floor, rows, bytes });
    }

    /// Stores the ranges that have become durable. Until then they would be copied again.
    pub(super) async fn store_ranges(&mut self) -> Result<(), Stop> {
        for EndedRange { oid, run, number, floor, rows, bytes } in std::mem::take(&mut self.ended) {
            let range = self.parts.resumes.update(self.place(oid), &run, number, |range| {
                *range = RangeRecord { since: range.since, floor: Some(floor), rows, bytes };
            });
            if let Some(range) = range {
                self.save_ranges(oid, vec![(number, range)]).await?;
                crate::failpoint::reached("copy.range-done");
            }
        }
        Ok(())
    }

    async fn save_ranges(&mut self, oid: u32, ranges: Vec<(usize, RangeRecord)>) -> Result<(), Stop> {
        let name = self.parts.config.name.clone();
        self.until_stored(async |store| store.save_ranges(&name, oid, ranges.clone()).await).await
    }

    /// The position that a copy under way has in the end; none while a range is not done.
    pub(super) fn floor_of(&self, oid: u32, run: &Run) -> Option<Lsn> {
        match run.ranges {
            Some(_) => self.parts.resumes.bounds(self.place(oid)).map(|(least, _)| least),
            None => Some(run.floor),
        }
    }

    /// Tables that are beyond the floors of their ranges: they go by their position alone,
    /// once that is stored.
    pub(super) async fn forget_floors(&mut self) -> Result<(), Stop> {
        for oid in std::mem::take(&mut self.beyond) {
            let Some(position) = self.parts.tables.get(&oid).map(|table| table.record.position) else { continue };
            let place = self.place(oid);
            if self.parts.resumes.bounds(place).is_some() && !self.parts.resumes.is_below(place, position) {
                self.save_table(oid).await?;
                self.forget_copy(oid).await?;
            }
        }
        Ok(())
    }

    /// Adds that the table is at a position, without rows.
    pub(super) fn add_passed(&mut self, entry: &mut Entry, oid: u32, position: Position) {
        let transactional = self.parts.lane.can("transactional");
        let Some(table) = self.parts.tables.get_mut(&oid).filter(|table| table.takes_changes()) else { return };
        table.passed = table.passed.max(Some(position));
        // Said also where more was sent: what is acknowledged is known to be stored there.
        let through = table.sent.map_or(position, |sent| sent.max(position));
        let Some(applied) = table.schema.as_ref().map(|schema| snapshot_to_wire(schema.snapshot)) else { return };
        match transactional {
            true => self.add_content(entry, oid, applied, through, no_rows(position.epoch), 64),
            false => self.passed(entry, oid, through),
        }
    }
}

/// Rows of a snapshot, some of which may be there already.
pub(super) fn upserts(as_of: Position, rows: wire::Rows) -> wire::MergeRows {
    let count = rows.count as usize;
    wire::MergeRows {
        sequence: wire::Sequence {
            epoch: as_of.epoch,
            commit: vec![as_of.commit.0; count],
            ordinal: vec![as_of.ordinal; count],
            committed_at: vec![now_us(); count],
            xid: vec![0; count],
        },
        upserts: rows,
        moved_index: Vec::new(),
        moved_from: none(),
        deletes: none(),
    }
}

/// A batch that says no more than how far its table is.
fn no_rows(epoch: u32) -> wire::Content {
    wire::Content::Merge(upserts(Position { epoch, ..Position::default() }, none()))
}

fn none() -> wire::Rows {
    wire::Rows { count: 0, columns: Vec::new() }
}
