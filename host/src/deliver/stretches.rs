//! A destination's side of copies by stretches of pages: what is stored of each, and when,
//! so that a restart goes on with those that are not done (P19).

use std::sync::Arc;

use crate::copy::{Base, Look, Reading};
use crate::position::{Lsn, Position};
use crate::schema::table::TableSchema;
use crate::schema::wire::snapshot_to_wire;
use crate::store::{CopyRecord, TableState};
use crate::wire;

use super::copies::CopyEnded;
use super::destination::{Destination, Run, Stop, now_us};
use super::ledger::{Copied, Entry, StretchEnd};
use super::resume::not_resumable;
use super::routes::Place;
use super::sending::Ended;

/// What a plugin answers that is to go on with a run it does not know.
const RUN_UNKNOWN: &str = "run-unknown";

/// A stretch of a copy of which all that was read is durable.
pub(super) struct EndedStretch {
    oid: u32,
    /// As the plugin knows it.
    run: Arc<str>,
    reading: Reading,
    base: Base,
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

    /// A copy that begins can be resumed, if it goes by stretches.
    pub(super) async fn record_copy(&mut self, copy: Option<CopyRecord>) -> Result<(), Stop> {
        let Some(mut copy) = copy else { return Ok(()) };
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
        self.store_stretches().await?;
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
        let done = copy.stretches.iter().filter(|stretch| stretch.base.is_some()).count();
        tracing::info!(
            destination = %self.parts.config.name, table = %schema.name, rows,
            "the copy of the table goes on: {done} of its {} stretches are there", copy.stretches.len()
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

    /// Rows that went from the table since the run began.
    pub(super) fn delete_entry(&mut self, oid: u32, id: Arc<str>, deletes: wire::MergeRows) -> Option<Entry> {
        let table = self.parts.tables.get_mut(&oid)?;
        table.run.as_ref().filter(|run| run.id == id)?;
        let mut entry = Entry::new();
        entry.copied = Some(Copied { oid, run: id, reading: None, rows: 0, source_bytes: 0 });
        let snapshot = snapshot_to_wire(table.schema.as_ref()?.snapshot);
        let content = wire::Content::Merge(deletes);
        entry.group.batches.push(wire::Batch { table_id: oid, snapshot, through: None, content });
        Some(entry)
    }

    /// All that went before `through` was deleted, which is on disk before any stretch is
    /// as of a later snapshot: told once more, a delete would take a row that has come back.
    pub(super) async fn cleaned(&mut self, oid: u32, id: Arc<str>, through: Lsn) -> Result<(), Stop> {
        self.flush().await?;
        // A run that was cut off may have lost some of the deletes.
        let run = self.parts.tables.get(&oid).and_then(|table| table.run.as_ref()).filter(|run| run.id == id);
        let Some(run) = run.map(|run| run.name.clone()) else { return Ok(()) };
        if self.parts.resumes.update(self.place(oid), &run, |copy| copy.cleaned = through).is_some() {
            let name = self.parts.config.name.clone();
            self.until_stored(async |store| store.save_cleaned(&name, oid, through).await).await?;
            crate::failpoint::reached("copy.cleaned");
        }
        Ok(())
    }

    /// What is read of a stretch begins, or has ended.
    pub(super) async fn mark_stretch(
        &mut self,
        oid: u32,
        id: Arc<str>,
        reading: Reading,
        ended: bool,
    ) -> Result<(), Stop> {
        let run = self.parts.tables.get_mut(&oid).and_then(|table| table.run.as_mut());
        if run.is_none_or(|run| run.id != id) {
            return Ok(());
        }
        if !ended {
            crate::failpoint::reached("copy.range-started");
            return Ok(());
        }
        let settled = self.ledger.stretch_ended(StretchEnd { oid, run: id, reading });
        self.settle(settled);
        self.store_stretches().await
    }

    /// All that was read of a stretch is durable.
    pub(super) fn stretch_durable(&mut self, end: &StretchEnd) {
        let run = self.parts.tables.get_mut(&end.oid).and_then(|table| table.run.as_mut());
        let Some(run) = run.filter(|run| run.id == end.run) else { return };
        let counted = run.stretches.as_mut().and_then(|stretches| stretches.remove(&end.reading.number));
        let (rows, bytes) = counted.unwrap_or_default();
        let (run, base) = (run.name.clone(), run.base);
        self.ended.push(EndedStretch { oid: end.oid, run, reading: end.reading, base, rows, bytes });
    }

    /// Stores the stretches that have become durable. Until then they would be read again.
    pub(super) async fn store_stretches(&mut self) -> Result<(), Stop> {
        for EndedStretch { oid, run, reading: Reading { number, look }, base, rows, bytes } in
            std::mem::take(&mut self.ended)
        {
            let stretch = self.parts.resumes.update_stretch(self.place(oid), &run, number, |stretch| {
                stretch.base = Some(base);
                // A second look is at rows that were counted, but for a few.
                if look == Look::All {
                    (stretch.rows, stretch.bytes) = (rows, bytes);
                }
            });
            if let Some(stretch) = stretch {
                let name = self.parts.config.name.clone();
                self.until_stored(async |store| store.save_stretch(&name, oid, number, stretch).await).await?;
                crate::failpoint::reached("copy.range-done");
            }
        }
        Ok(())
    }

    /// The position that a copy under way has in the end; none while a stretch is not done.
    pub(super) fn floor_of(&self, oid: u32, run: &Run) -> Option<Lsn> {
        match run.stretches {
            Some(_) => self.parts.resumes.get(self.place(oid))?.complete(),
            None => Some(run.base.floor),
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

fn none() -> wire::Rows {
    wire::Rows { count: 0, columns: Vec::new() }
}
