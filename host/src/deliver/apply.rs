//! Applying a schema change at a destination: recorded before, recorded after, and
//! recovered when it was cut off between (P26, P27).

use std::sync::Arc;

use crate::position::SnapshotId;
use crate::schema::change::{SchemaChange, state_after};
use crate::schema::moment::Moment;
use crate::schema::plan::plan;
use crate::schema::table::TableSchema;
use crate::store::{Application, Applying, How, TableError, Verdict};
use crate::wire;

use super::destination::{Destination, Stop, Table};
use super::lane::Lane;
use super::looked::{Looked, fits_neither};
use super::retry::Backoff;
use super::sending::{Ended, RESYNC, failure_to_table_error};

/// Inspections that have to agree before an interrupted step is believed, and how many
/// are tried (P27).
const AGREEING: u32 = 2;
const INSPECTIONS: u32 = 20;
/// How often the plugin may end during one step before its table is given up on, so that
/// the others go on.
const INTERRUPTIONS: u32 = 10;

impl Destination {
    /// The table as the plugin is told of it.
    pub(super) fn wire_table(&self, schema: &TableSchema) -> wire::Table {
        let config = &self.parts.config;
        schema.to_wire(&config.target(&schema.name), config.mode.as_str(), &config.table_settings(&schema.name))
    }

    /// Brings the destination's table to a newer version. Everything sent before is
    /// durable first: rows accepted before an added default would otherwise be sent
    /// again without it (P26).
    pub(super) async fn advance_schema(&mut self, to: Arc<TableSchema>) -> Result<(), Stop> {
        let oid = to.oid;
        let Some(before) = self.parts.tables.get(&oid).and_then(|table| table.schema.clone()) else {
            return Ok(());
        };
        let change = plan(before, to.clone());
        if let Some(version) = self.rewritten(&change) {
            return self.fail_table(oid, rewritten(&change, version)).await;
        }
        if change.steps.is_empty() {
            return self.record_applied(oid, to).await;
        }
        self.flush().await?;
        crate::failpoint::reached("schema.flushed");
        match self.attach_one(oid).await {
            // An instance that takes the place of one that ended is told of it as it opens.
            Ok(()) | Err(Ended::Restarted) => {}
            Err(ended) => return self.change_failed(oid, ended).await,
        }
        if !self.permit(&change).await? || !self.check_change(&change).await? {
            return Ok(());
        }
        self.run_steps(change, 0).await
    }

    /// Asks the plugin what the change would do. False if it refuses it: nothing has begun,
    /// and the table waits with the reason.
    pub(super) async fn check_change(&mut self, change: &SchemaChange) -> Result<bool, Stop> {
        let whole = self.wire_change(change, 0, change.steps.len());
        match self.call(async |instance| instance.check_schema(&whole).await).await {
            Ok(notices) => {
                for notice in notices {
                    tracing::info!(destination = %self.parts.config.name, table = %change.after.name, code = %notice.code, "{}", notice.message);
                }
                Ok(true)
            }
            Err(Ended::Restarted) => Ok(true),
            Err(Ended::Refused(failure)) => {
                self.hold_refused(change, failure_to_table_error(&failure)).await.map(|()| false)
            }
            Err(Ended::Stop) => Err(Stop),
        }
    }

    /// A version on the way with which rows may have got other values (P28).
    fn rewritten(&self, change: &SchemaChange) -> Option<SnapshotId> {
        let history = self.parts.history.read();
        let on_the_way = history
            .versions(change.after.oid)
            .iter()
            .filter(|version| version.snapshot > change.before.snapshot && version.snapshot <= change.after.snapshot);
        on_the_way.filter(|version| version.rewritten).map(|version| version.snapshot).next()
    }

    /// Runs the steps from `from` on, one by one, or at once where the plugin's own
    /// transaction makes them one.
    async fn run_steps(&mut self, change: SchemaChange, from: usize) -> Result<(), Stop> {
        let oid = change.after.oid;
        let stride = self.stride(&change);
        let mut interruptions = Backoff::transient();
        let mut step = from;
        while step < change.steps.len() {
            let end = (step + stride).min(change.steps.len());
            self.record_applying(oid, Some(applying(&change, step))).await?;
            crate::failpoint::reached("schema.applying");
            let wire = self.wire_change(&change, step, end);
            tracing::info!(
                destination = %self.parts.config.name, table = %change.after.name,
                from = %change.before.snapshot, to = %change.after.snapshot, step, "applying a schema change"
            );
            match self.call(async |instance| instance.apply_schema(&wire).await).await {
                Ok(_) => {
                    crate::failpoint::reached("schema.applied");
                    step = end;
                    interruptions.reset();
                }
                Err(Ended::Restarted) if interruptions.tries() < INTERRUPTIONS => {
                    self.sleep(interruptions.pause(None)).await?;
                    match self.recover_step(&change, step, end).await? {
                        Some(done) => step = done,
                        None => return Ok(()),
                    }
                }
                Err(ended) => return self.change_failed(oid, ended).await,
            }
        }
        self.record_applied(oid, change.after).await
    }

    /// Steps that are one call.
    fn stride(&self, change: &SchemaChange) -> usize {
        if self.parts.lane.can("atomic-ddl") { change.steps.len() } else { 1 }
    }

    /// At a start: changes that were begun and are not known to have ended.
    pub(super) async fn recover_schemas(&mut self) -> Result<(), Stop> {
        let is_interrupted = |table: &Table| table.takes_changes() && table.record.applying.is_some();
        let interrupted: Vec<u32> =
            self.parts.tables.iter().filter(|(_, table)| is_interrupted(table)).map(|(oid, _)| *oid).collect();
        for oid in interrupted {
            self.recover_schema(oid).await?;
        }
        Ok(())
    }

    /// Goes on with a change that was begun.
    pub(super) async fn recover_schema(&mut self, oid: u32) -> Result<(), Stop> {
        let Some(applying) = self.parts.tables.get(&oid).and_then(|table| table.record.applying) else {
            return Ok(());
        };
        let versions = {
            let history = self.parts.history.read();
            history.get(oid, applying.from).zip(history.get(oid, applying.to))
        };
        let Some((before, after)) = versions else {
            return self.fail_table(oid, lost_versions(&applying)).await;
        };
        let change = plan(before, after);
        let step = applying.step as usize;
        let end = (step + self.stride(&change)).min(change.steps.len());
        match self.recover_step(&change, step, end).await? {
            Some(done) => self.run_steps(change, done).await,
            None => Ok(()),
        }
    }

    /// How far an interrupted step got, with the table told to the new instance as it is:
    /// a destination refuses changes to a table that an earlier instance had.
    async fn recover_step(&mut self, change: &SchemaChange, step: usize, end: usize) -> Result<Option<usize>, Stop> {
        let oid = change.after.oid;
        for _ in 0..INTERRUPTIONS {
            let Some(done) = self.where_it_is(change, step, end).await? else { return Ok(None) };
            match self.attach_as(oid, self.state(change, done)).await {
                Ok(()) => return Ok(Some(done)),
                Err(Ended::Restarted) => {}
                Err(ended) => return self.change_failed(oid, ended).await.map(|()| None),
            }
        }
        self.change_failed(oid, Ended::Restarted).await.map(|()| None)
    }

    /// Looks at the destination: is the interrupted step done or not? None if the table
    /// is like neither, which ends it.
    async fn where_it_is(&mut self, change: &SchemaChange, step: usize, end: usize) -> Result<Option<usize>, Stop> {
        let (before, after) = (self.state(change, step), self.state(change, end));
        let mut seen: Option<(usize, u32)> = None;
        let mut last = None;
        for _ in 0..INSPECTIONS {
            let looked = match self.call(async |instance| Looked::at(instance, &before, &after).await).await {
                Ok(looked) => looked,
                Err(Ended::Restarted) => continue,
                Err(ended) => return self.change_failed(change.after.oid, ended).await.map(|()| None),
            };
            crate::failpoint::reached("schema.inspected");
            let has_version = end == change.steps.len() && looked.has_version(&change.after.snapshot);
            let found = looked.is_done(has_version).map(|done| if done { end } else { step });
            seen = match (found, seen) {
                (Some(found), Some((known, times))) if found == known => Some((found, times + 1)),
                (Some(found), _) => Some((found, 1)),
                (None, _) => None,
            };
            if let Some((found, times)) = seen
                && times >= AGREEING
            {
                return Ok(Some(found));
            }
            last = Some(looked);
            self.sleep(self.parts.lane.pace().settle).await?;
        }
        self.hold_interrupted(change.after.oid, fits_neither(change, last)).await.map(|()| None)
    }

    fn state(&self, change: &SchemaChange, step: usize) -> wire::Table {
        self.wire_table(&state_after(change, step))
    }

    fn wire_change(&self, change: &SchemaChange, from: usize, to: usize) -> wire::SchemaChange {
        change.steps_to_wire(from..to, |version| self.wire_table(version))
    }

    /// A change that has not begun stops its table; one that has waits for the operator's
    /// word.
    pub(super) async fn change_failed(&mut self, oid: u32, ended: Ended) -> Result<(), Stop> {
        match ended {
            Ended::Stop => Err(Stop),
            Ended::Refused(failure) => self.hold_interrupted(oid, failure_to_table_error(&failure)).await,
            Ended::Restarted => {
                let error = TableError {
                    code: "schema.interrupted".to_owned(),
                    message: "the plugin ended every time while the change was made".to_owned(),
                    next: Some(RESYNC.to_owned()),
                };
                self.hold_interrupted(oid, error).await
            }
        }
    }

    async fn record_applying(&mut self, oid: u32, applying: Option<Applying>) -> Result<(), Stop> {
        if let Some(table) = self.parts.tables.get_mut(&oid) {
            table.record.applying = applying;
        }
        self.save_table(oid).await
    }

    /// Applied: the plugin knows the table as `to` now.
    async fn record_applied(&mut self, oid: u32, to: Arc<TableSchema>) -> Result<(), Stop> {
        let wire = self.wire_table(&to);
        self.show_renamed(oid, &to);
        if let Some(table) = self.parts.tables.get_mut(&oid) {
            let approved = table.barrier.as_ref().is_some_and(|barrier| barrier.verdict == Some(Verdict::Approved));
            let how = if approved { How::Approved } else { How::Applied };
            table.record.applying = None;
            table.record.applied = Some(to.snapshot);
            table.record.application = Some(applied_now(how, &self.parts.lane));
            table.record.name = to.name.clone();
            table.attached = table.attached && table.wire.as_ref().is_some_and(|known| known.shape == wire.shape);
            table.wire = Some(wire);
            table.schema = Some(to);
        }
        self.save_table(oid).await?;
        crate::failpoint::reached("schema.recorded");
        self.drop_barrier(oid).await?;
        match self.attach_one(oid).await {
            Ok(()) | Err(Ended::Restarted) => Ok(()),
            Err(ended) => self.change_failed(oid, ended).await,
        }
    }
}

/// What is kept of who brought a table to a version: this lane's instance, now.
pub(super) fn applied_now(how: How, lane: &Lane) -> Application {
    Application { how, generation: lane.generation(), at: Moment::now() }
}

fn rewritten(change: &SchemaChange, version: SnapshotId) -> TableError {
    TableError {
        code: "schema.rewritten".to_owned(),
        message: format!(
            "rows of {} were rewritten with the version {version} (a type with USING, or among other statements): \
             their new values never come as changes",
            change.after.name
        ),
        next: Some(RESYNC.to_owned()),
    }
}

fn applying(change: &SchemaChange, step: usize) -> Applying {
    Applying { from: change.before.snapshot, to: change.after.snapshot, step: u32::try_from(step).unwrap_or(u32::MAX) }
}

pub(super) fn lost_versions(applying: &Applying) -> TableError {
    TableError {
        code: "schema.history-lost".to_owned(),
        message: format!(
            "the versions {} and {} of an interrupted change are not in the history",
            applying.from, applying.to
        ),
        next: Some(RESYNC.to_owned()),
    }
}
