//! The rows of a copy, at one destination: a run begins empty, its rows are not sent
//! twice, and a run that is cut off is lost whole.

use std::sync::Arc;

use tokio::sync::oneshot;

use crate::error::{Error, Result};
use crate::position::{Lsn, Position};
use crate::schema::table::TableSchema;
use crate::store::{TableError, TableRecord, TableState};
use crate::wire;

use super::destination::{Copying, Destination, Run, Stop, Table, to_wire_position, to_wire_snapshot};
use super::inbox::Held;
use super::ledger::Entry;
use super::sending::{Ended, RESYNC, failure_to_table_error};

impl Destination {
    pub(super) async fn take_copying(&mut self, held: Held<Copying>) -> Result<(), Stop> {
        match held.item {
            Copying::Begin { schema, run, floor, rows_total, done } => {
                let begun = self.begin_copy(schema, run, floor, rows_total).await;
                answer(done, begun)
            }
            Copying::Rows { oid, run, rows } => {
                let bytes = crate::batch::rows_bytes(&rows);
                let Some(mut entry) = self.copy_entry(oid, &run, rows, bytes) else { return Ok(()) };
                entry.permits.extend(held.permit);
                self.submit(entry).await
            }
            Copying::Finish { oid, run, done } => {
                let finished = self.finish_copy(oid, &run).await;
                answer(done, finished)
            }
        }
    }

    async fn begin_copy(
        &mut self,
        schema: Arc<TableSchema>,
        run: Arc<str>,
        floor: Lsn,
        rows_total: Option<u64>,
    ) -> Result<(), CopyEnded> {
        let oid = schema.oid;
        let record = TableRecord {
            destination: self.parts.config.name.clone(),
            oid,
            name: schema.name.clone(),
            state: TableState::DataSync,
            floor: Some(floor),
            run: Some(run.to_string()),
            rows_total,
            ..TableRecord::default()
        };
        let before = self.parts.tables.insert(oid, Table::new(record, Some(schema.clone())));
        if let Some(before) = before.filter(|before| before.record.name != schema.name) {
            let name = before.record.name.to_string();
            self.parts.board.update_destination(&self.parts.config.name, |status| {
                status.tables.retain(|table| table.table != name);
            });
        }
        self.forget_position(oid).await?;
        self.save_table(oid).await?;
        self.parts.cursors.add(&self.parts.config.name, oid, None);
        let wire = self.wire_table(&schema);
        let tables = [wire.clone()];
        let notices = self.call(async |instance| instance.preflight(&tables).await).await;
        let notices = self.copy_answer(oid, notices).await?;
        if let Some(refused) = self.refused_by(&notices, oid) {
            self.fail_table(oid, TableError::from(&refused)).await?;
            return Err(CopyEnded::Error(refused));
        }
        let begun = self.call(async |instance| instance.begin_copy(&wire, &run).await).await;
        self.copy_answer(oid, begun).await?;
        if let Some(table) = self.parts.tables.get_mut(&oid) {
            table.wire = Some(wire);
            table.run = Some(Run { id: run, floor, batches: 0 });
        }
        Ok(())
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

    fn copy_entry(&mut self, oid: u32, id: &Arc<str>, rows: wire::Rows, bytes: usize) -> Option<Entry> {
        let table = self.parts.tables.get_mut(&oid)?;
        let run = table.run.as_mut().filter(|run| run.id == *id)?;
        run.batches += 1;
        let mut entry = Entry::new();
        entry.copied = Some((oid, u64::from(rows.count)));
        entry.bytes = bytes;
        entry.group.batches.push(wire::Batch {
            table_id: oid,
            snapshot: to_wire_snapshot(table.schema.as_ref()?),
            through: None,
            content: wire::Content::Copy(wire::CopyRows {
                run: id.to_string(),
                batch_id: run.batches.to_string(),
                as_of: to_wire_position(Position::of_copy(self.parts.epoch, run.floor)),
                rows,
            }),
        });
        Some(entry)
    }

    async fn finish_copy(&mut self, oid: u32, id: &Arc<str>) -> Result<(), CopyEnded> {
        self.flush().await?;
        let found = self.parts.tables.get(&oid).and_then(|table| {
            let run = table.run.as_ref().filter(|run| run.id == *id)?;
            Some((table.wire.clone()?, run.floor))
        });
        let Some((wire, floor)) = found else { return Err(CopyEnded::Error(interrupted(oid))) };
        let as_of = Position::of_copy(self.parts.epoch, floor);
        let finished = self.call(async |instance| instance.finish_copy(&wire, id, to_wire_position(as_of)).await).await;
        self.copy_answer(oid, finished).await?;
        if let Some(table) = self.parts.tables.get_mut(&oid) {
            table.run = None;
            table.attached = false;
            table.sent = Some(as_of);
            table.record.state = TableState::CatchUp;
            table.record.position = Some(as_of);
            table.record.run = None;
            table.record.applied = table.schema.as_ref().map(|schema| schema.snapshot);
        }
        self.save_table(oid).await?;
        self.parts.cursors.add(&self.parts.config.name, oid, Some(as_of));
        match self.attach_one(oid).await {
            Ok(()) | Err(Ended::Restarted) => Ok(()),
            Err(ended) => self.copy_answer(oid, Err::<(), Ended>(ended)).await,
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

enum CopyEnded {
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

fn interrupted(oid: u32) -> Error {
    Error::transient("copy.interrupted", format!("the copy of table {oid} was cut off by a restart of the plugin"))
}
