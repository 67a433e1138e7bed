//! The rows of a copy, at one destination: a run begins empty, its rows are not sent
//! twice, and a run that is cut off is lost whole.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::oneshot;

use crate::error::{Error, Result};
use crate::position::{Lsn, Position};
use crate::schema::table::TableSchema;
use crate::schema::wire::snapshot_to_wire;
use crate::status::TableStatus;
use crate::store::{How, TableError, TableRecord, TableState};
use crate::wire;

use super::apply::applied_now;
use super::destination::{CopiedRows, CopyBegin, Copying, Destination, Run, Stop, to_wire_position};
use super::inbox::Held;
use super::ledger::{Copied, Entry};
use super::sending::{Ended, RESYNC, failure_to_table_error};
use super::stretches::upserts;

impl Destination {
    pub(super) async fn take_copying(&mut self, held: Held<Copying>) -> Result<(), Stop> {
        match held.item {
            Copying::Begin { begin, done } => {
                let begun = self.begin_copy(begin).await;
                answer(done, begun)
            }
            Copying::Rows { oid, run, rows } => {
                let bytes = crate::batch::rows_weight(&rows.rows);
                let schema = self.parts.tables.get(&oid).and_then(|table| table.schema.clone());
                if let Some(Err(error)) = schema.map(|schema| self.fits(&schema, &rows.rows, bytes)) {
                    return self.fail_table(oid, TableError::from(&error)).await;
                }
                let Some(mut entry) = self.copy_entry(oid, run, rows) else { return Ok(()) };
                entry.bytes = bytes;
                entry.taken.extend(held.taken);
                crate::failpoint::reached("copy.rows");
                self.submit_copy(entry).await
            }
            Copying::Deletes { oid, run, deletes } => {
                let bytes = crate::batch::rows_weight(&deletes.deletes);
                let Some(mut entry) = self.delete_entry(oid, run, deletes) else { return Ok(()) };
                entry.bytes = bytes;
                entry.taken.extend(held.taken);
                self.submit_copy(entry).await
            }
            Copying::Cleaned { oid, run, through } => self.cleaned(oid, run, through).await,
            Copying::Stretch { oid, run, reading, ended } => self.mark_stretch(oid, run, reading, ended).await,
            Copying::Finish { oid, run, done } => {
                let finished = self.finish_copy(oid, &run).await;
                answer(done, finished)
            }
            Copying::Failed { oid, error } => self.fail_table(oid, error).await,
        }
    }

    async fn begin_copy(&mut self, begin: CopyBegin) -> Result<(), CopyEnded> {
        let CopyBegin { schema, beginning, run, copy, base, rows_total, source_bytes, alive } = begin;
        let oid = schema.oid;
        let name: Arc<str> = copy.as_ref().map_or_else(|| run.clone(), |copy| copy.run.as_str().into());
        let goes_on = name != run;
        // It was given up on since the copy was asked for, and is not spooled any more.
        if self.parts.tables.get(&oid).is_some_and(|table| table.record.state == TableState::Errored) {
            return Err(CopyEnded::Error(given_up(&schema)));
        }
        // What is spooled for it now begins behind this copy's snapshot.
        if self.parts.tables.get(&oid).is_some_and(|table| beginning < table.beginning) {
            return Err(CopyEnded::Error(superseded(&schema)));
        }
        let by_stretches = copy.is_some();
        let copied_bytes = match copy {
            Some(_) if goes_on => self.resume_copy(&schema, &name, rows_total).await?,
            copy => {
                self.record_run(&schema, &run, base.floor, rows_total).await?;
                self.record_copy(copy).await?;
                0
            }
        };
        self.parts.board.update_table(&self.parts.config.name, &schema.name, |status| {
            status.show_copy(copied_bytes, source_bytes, Duration::ZERO);
        });
        crate::failpoint::reached("copy.recorded");
        let wire = self.wire_table(&schema);
        let tables = [wire.clone()];
        let notices = self.call(async |instance| instance.preflight(&tables).await).await;
        let notices = self.copy_answer(oid, notices).await?;
        if let Some(refused) = self.refused_by(&notices, oid) {
            self.fail_table(oid, TableError::from(&refused)).await?;
            return Err(CopyEnded::Error(refused));
        }
        let begun = self.begin_run(&schema, &wire, &name, goes_on).await?;
        self.copy_answer(oid, begun).await?;
        crate::failpoint::reached("copy.begun");
        if let Some(table) = self.parts.tables.get_mut(&oid) {
            table.wire = Some(wire);
            table.run = Some(Run {
                id: run,
                name,
                stretches: by_stretches.then(HashMap::new),
                base,
                batches: 0,
                began: Instant::now(),
                source_bytes,
                copied_bytes,
                _alive: alive,
            });
        }
        Ok(())
    }

    /// Nothing that was known of the table holds: it is copied from nothing.
    async fn record_run(
        &mut self,
        schema: &Arc<TableSchema>,
        run: &str,
        floor: Lsn,
        rows_total: u64,
    ) -> Result<(), Stop> {
        let record = TableRecord {
            destination: self.parts.config.name.clone(),
            oid: schema.oid,
            name: schema.name.clone(),
            state: TableState::DataSync,
            floor: Some(floor),
            run: Some(run.to_owned()),
            rows_total: Some(rows_total),
            ..TableRecord::default()
        };
        self.begin_anew(record, Some(schema.clone())).await
    }

    /// What a preflight says against a table; the rest is said to the operator.
    fn refused_by(&self, notices: &[wire::Notice], oid: u32) -> Option<Error> {
        let about = |notice: &&wire::Notice| notice.table_id.is_none_or(|id| id == oid);
        for notice in notices.iter().filter(|notice| notice.level != "error") {
            tracing::info!(destination = %self.parts.config.name, code = %notice.code, "{}", notice.message);
        }
        let against = notices.iter().filter(|notice| notice.level == "error").find(about)?;
        Some(Error::permanent(against.code.clone(), against.message.clone()).next(RESYNC))
    }

    fn copy_entry(&mut self, oid: u32, id: Arc<str>, copied: CopiedRows) -> Option<Entry> {
        let table = self.parts.tables.get_mut(&oid)?;
        let run = table.run.as_mut().filter(|run| run.id == id)?;
        run.batches += 1;
        let CopiedRows { rows, source_bytes, reading, again } = copied;
        let mut entry = Entry::new();
        entry.copied = Some(Copied { oid, run: id, reading, rows: u64::from(rows.count), source_bytes });
        let as_of = Position::of_copy(self.parts.epoch, run.base.floor);
        let content = match again {
            true => wire::Content::Merge(upserts(as_of, rows)),
            false => wire::Content::Copy(wire::CopyRows {
                run: run.name.to_string(),
                batch_id: run.next_batch(),
                as_of: to_wire_position(as_of),
                rows,
            }),
        };
        let snapshot = snapshot_to_wire(table.schema.as_ref()?.snapshot);
        entry.group.batches.push(wire::Batch { table_id: oid, snapshot, through: None, content });
        Some(entry)
    }

    async fn finish_copy(&mut self, oid: u32, id: &Arc<str>) -> Result<(), CopyEnded> {
        self.flush().await?;
        crate::failpoint::reached("copy.flushed");
        // Before the plugin is told: what is not stored as done would be copied again then.
        self.store_stretches().await?;
        let found = self.parts.tables.get(&oid).and_then(|table| {
            let run = table.run.as_ref().filter(|run| run.id == *id)?;
            Some((table.wire.clone()?, run.name.clone(), self.floor_of(oid, run)))
        });
        let Some((wire, run, floor)) = found else { return Err(CopyEnded::Error(self.why_lost(oid))) };
        let Some(floor) = floor else { return Err(CopyEnded::Error(interrupted(oid))) };
        let as_of = Position::of_copy(self.parts.epoch, floor);
        let finished =
            self.call(async |instance| instance.finish_copy(&wire, &run, to_wire_position(as_of)).await).await;
        self.copy_answer(oid, finished).await?;
        crate::failpoint::reached("copy.finished");
        if let Some(table) = self.parts.tables.get_mut(&oid) {
            table.run = None;
            table.attached = false;
            table.sent = Some(as_of);
            table.record.floor = Some(floor);
            table.record.state = TableState::CatchUp;
            table.record.position = Some(as_of);
            table.record.run = None;
            table.record.applied = table.schema.as_ref().map(|schema| schema.snapshot);
            table.record.application = Some(applied_now(How::Copied, &self.parts.lane));
        }
        self.save_table(oid).await?;
        self.forget_copy(oid).await?;
        if let Some(name) = self.parts.tables.get(&oid).map(|table| table.record.name.clone()) {
            self.parts.board.update_table(&self.parts.config.name, &name, TableStatus::show_copied);
        }
        self.parts.cursors.add(&self.parts.config.name, oid, Some(as_of));
        crate::failpoint::reached("copy.caught");
        // What the copy has is not drained, and so would not be let go of before the next change.
        self.parts.cursors.release(oid);
        match self.attach_one(oid).await {
            Ok(()) | Err(Ended::Restarted) => Ok(()),
            Err(ended) => self.copy_answer(oid, Err::<(), Ended>(ended)).await,
        }
    }

    /// A run that is not there any more: cut off, or ended with the table, which must not
    /// be copied again by itself.
    fn why_lost(&self, oid: u32) -> Error {
        let recorded = self.parts.tables.get(&oid).map(|table| &table.record);
        match recorded.filter(|record| record.state == TableState::Errored).and_then(|record| record.error.as_ref()) {
            Some(error) => Error::permanent(error.code.clone(), error.message.clone()).next(RESYNC),
            None => interrupted(oid),
        }
    }

    /// An answer to a call about a copy; a table that is refused for good stops.
    async fn copy_answer<T>(&mut self, oid: u32, called: Result<T, Ended>) -> Result<T, CopyEnded> {
        match called {
            Ok(answer) => Ok(answer),
            Err(Ended::Stop) => Err(CopyEnded::Stop),
            Err(Ended::Restarted) => Err(CopyEnded::Error(interrupted(oid))),
            Err(Ended::Refused(failure)) => {
                let error = Error::permanent(failure.code.clone(), failure.message.clone());
                self.fail_table(oid, failure_to_table_error(&failure)).await?;
                Err(CopyEnded::Error(error))
            }
        }
    }
}

pub(super) enum CopyEnded {
    Stop,
    Error(Error),
}

impl From<Stop> for CopyEnded {
    fn from(_: Stop) -> Self {
        CopyEnded::Stop
    }
}

/// Tells the copier; it may have ended meanwhile.
fn answer(done: oneshot::Sender<Result<()>>, ended: Result<(), CopyEnded>) -> Result<(), Stop> {
    match ended {
        Ok(()) => drop(done.send(Ok(()))),
        Err(CopyEnded::Error(error)) => drop(done.send(Err(error))),
        Err(CopyEnded::Stop) => return Err(Stop),
    }
    Ok(())
}

fn given_up(schema: &TableSchema) -> Error {
    Error::permanent("copy.given-up", format!("table {} stopped before its copy began", schema.name)).next(RESYNC)
}

fn superseded(schema: &TableSchema) -> Error {
    let message = format!("table {} was asked for anew before this copy of it began", schema.name);
    Error::permanent("copy.superseded", message).next("Nothing: the later copy is under way.")
}

pub(super) fn interrupted(oid: u32) -> Error {
    Error::transient("copy.interrupted", format!("the copy of table {oid} was cut off by a restart of the plugin"))
}
