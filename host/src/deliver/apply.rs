//! Applying a schema change at a destination: recorded before, recorded after, and
//! recovered when it was cut off between (P26, P27).

use std::sync::Arc;

use crate::schema::change::{SchemaChange, state_after};
use crate::schema::classify::classify;
use crate::schema::decide::{Decision, decide};
use crate::schema::plan::plan;
use crate::schema::table::TableSchema;
use crate::store::{Applying, TableError};
use crate::wire;

use super::destination::{Destination, Stop};
use super::sending::{Ended, RESYNC, failure_to_table_error};

/// Inspections that have to agree before an interrupted step is believed, and how many
/// are tried (P27).
const AGREEING: u32 = 2;
const INSPECTIONS: u32 = 20;

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
        if change.steps.is_empty() {
            return self.record_applied(oid, to).await;
        }
        self.flush().await?;
        match self.attach_one(oid).await {
            Ok(()) => {}
            Err(ended) => return self.change_failed(oid, ended).await,
        }
        if let Err(error) = self.permit(&change) {
            return self.fail_table(oid, error).await;
        }
        let whole = self.wire_change(&change, 0, change.steps.len());
        match self.call(async |instance| instance.check_schema(&whole).await).await {
            Ok(notices) => {
                for notice in notices {
                    tracing::info!(destination = %self.parts.config.name, table = %to.name, code = %notice.code, "{}", notice.message);
                }
            }
            Err(Ended::Restarted) => {}
            Err(ended) => return self.change_failed(oid, ended).await,
        }
        self.run_steps(change, 0).await
    }

    /// Whether the change may run here at all, decided before anything runs.
    fn permit(&self, change: &SchemaChange) -> Result<(), TableError> {
        for step in &change.steps {
            let kind = step.kind.as_str();
            if !self.parts.lane.can(kind) {
                return Err(TableError {
                    code: "schema.unsupported".to_owned(),
                    message: format!(
                        "the change from {} to {} needs `{kind}`, which the plugin `{}` does not support",
                        change.before.snapshot, change.after.snapshot, self.parts.config.plugin
                    ),
                    next: Some(RESYNC.to_owned()),
                });
            }
            let class = classify(step, &change.before);
            let decision = decide(class, self.parts.config.apply);
            if decision != Decision::AutoApply {
                return Err(TableError {
                    code: "schema.held".to_owned(),
                    message: format!(
                        "the change from {} to {} has a step `{kind}` of class {}, which `apply = \"{}\"` does not apply by itself",
                        change.before.snapshot,
                        change.after.snapshot,
                        class.as_str(),
                        self.parts.config.apply.as_str()
                    ),
                    next: Some(RESYNC.to_owned()),
                });
            }
        }
        Ok(())
    }

    /// Runs the steps from `from` on, one by one, or at once where the plugin's own
    /// transaction makes them one.
    async fn run_steps(&mut self, change: SchemaChange, from: usize) -> Result<(), Stop> {
        let oid = change.after.oid;
        let stride = self.stride(&change);
        let mut step = from;
        while step < change.steps.len() {
            let end = (step + stride).min(change.steps.len());
            self.record_applying(oid, Some(applying(&change, step))).await?;
            let wire = self.wire_change(&change, step, end);
            tracing::info!(
                destination = %self.parts.config.name, table = %change.after.name,
                from = %change.before.snapshot, to = %change.after.snapshot, step, "applying a schema change"
            );
            match self.call(async |instance| instance.apply_schema(&wire).await).await {
                Ok(_) => step = end,
                Err(Ended::Restarted) => match self.where_it_is(&change, step, end).await? {
                    Some(done) => step = done,
                    None => return Ok(()),
                },
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
        let interrupted: Vec<(u32, Applying)> = self
            .parts
            .tables
            .iter()
            .filter(|(_, table)| table.takes_changes())
            .filter_map(|(oid, table)| Some((*oid, table.record.applying?)))
            .collect();
        for (oid, applying) in interrupted {
            let versions = {
                let history = self.parts.history.read().unwrap_or_else(|poisoned| poisoned.into_inner());
                history.get(oid, applying.from).zip(history.get(oid, applying.to))
            };
            let Some((before, after)) = versions else {
                self.fail_table(oid, lost_versions(&applying)).await?;
                continue;
            };
            let change = plan(before, after);
            let step = applying.step as usize;
            let end = (step + self.stride(&change)).min(change.steps.len());
            if let Some(done) = self.where_it_is(&change, step, end).await? {
                self.run_steps(change, done).await?;
            }
        }
        Ok(())
    }

    /// Looks at the destination: is the interrupted step done or not? None if the table
    /// is like neither, which ends it.
    async fn where_it_is(&mut self, change: &SchemaChange, step: usize, end: usize) -> Result<Option<usize>, Stop> {
        let oid = change.after.oid;
        let (before, after) = (self.state(change, step), self.state(change, end));
        let mut seen: Option<(usize, u32)> = None;
        let mut last = None;
        for _ in 0..INSPECTIONS {
            let inspected = self
                .call(async |instance| {
                    let there = instance.inspect_table(&after).await?;
                    Ok((there, instance.render_table(&before).await?, instance.render_table(&after).await?))
                })
                .await;
            let (there, rendered_before, rendered_after) = match inspected {
                Ok(answers) => answers,
                Err(Ended::Restarted) => continue,
                Err(ended) => return self.change_failed(oid, ended).await.map(|()| None),
            };
            let found = match &there {
                Some(there) if recorded(there, change, end) => Some(end),
                Some(there) if same_columns(there, &rendered_after) => Some(end),
                Some(there) if same_columns(there, &rendered_before) => Some(step),
                _ => None,
            };
            // A step whose effect cannot be seen in the columns is done again.
            let found = if same_columns(&rendered_before, &rendered_after) { found.map(|_| step) } else { found };
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
            last = Some((there, rendered_before, rendered_after));
            self.sleep(self.parts.lane.pace().settle).await?;
        }
        self.fail_table(oid, fits_neither(change, last)).await.map(|()| None)
    }

    fn state(&self, change: &SchemaChange, step: usize) -> wire::Table {
        self.wire_table(&state_after(change, step))
    }

    fn wire_change(&self, change: &SchemaChange, from: usize, to: usize) -> wire::SchemaChange {
        let config = &self.parts.config;
        let name = &change.after.name;
        change.steps_to_wire(from..to, &config.target(name), config.mode.as_str(), &config.table_settings(name))
    }

    async fn change_failed(&mut self, oid: u32, ended: Ended) -> Result<(), Stop> {
        match ended {
            Ended::Stop => Err(Stop),
            Ended::Refused(failure) => self.fail_table(oid, failure_to_table_error(&failure)).await,
            Ended::Restarted => {
                let error = TableError {
                    code: "schema.interrupted".to_owned(),
                    message: "the plugin ended while the change was prepared".to_owned(),
                    next: Some(RESYNC.to_owned()),
                };
                self.fail_table(oid, error).await
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
        if let Some(table) = self.parts.tables.get_mut(&oid) {
            table.record.applying = None;
            table.record.applied = Some(to.snapshot);
            table.record.name = to.name.clone();
            table.attached = table.attached && table.wire.as_ref().is_some_and(|known| known.shape == wire.shape);
            table.wire = Some(wire);
            table.schema = Some(to);
        }
        self.save_table(oid).await?;
        match self.attach_one(oid).await {
            Ok(()) | Err(Ended::Restarted) => Ok(()),
            Err(ended) => self.change_failed(oid, ended).await,
        }
    }
}

fn applying(change: &SchemaChange, step: usize) -> Applying {
    Applying { from: change.before.snapshot, to: change.after.snapshot, step: u32::try_from(step).unwrap_or(u32::MAX) }
}

/// Whether the destination itself says that it has the version after the last step.
fn recorded(there: &wire::PhysicalTable, change: &SchemaChange, end: usize) -> bool {
    let after = &change.after.snapshot;
    end == change.steps.len()
        && there
            .snapshot
            .as_ref()
            .is_some_and(|stored| stored.commit == after.commit.0 && stored.message == after.message.0)
}

/// Same columns in the same spelling, in any order.
fn same_columns(a: &wire::PhysicalTable, b: &wire::PhysicalTable) -> bool {
    let sorted = |table: &wire::PhysicalTable| {
        let mut columns: Vec<(String, String, bool)> = table
            .columns
            .iter()
            .map(|column| (column.name.clone(), column.type_name.clone(), column.nullable))
            .collect();
        columns.sort();
        columns
    };
    sorted(a) == sorted(b)
}

fn lost_versions(applying: &Applying) -> TableError {
    TableError {
        code: "schema.history-lost".to_owned(),
        message: format!(
            "the versions {} and {} of an interrupted change are not in the history",
            applying.from, applying.to
        ),
        next: Some(RESYNC.to_owned()),
    }
}

type Looked = (Option<wire::PhysicalTable>, wire::PhysicalTable, wire::PhysicalTable);

fn fits_neither(change: &SchemaChange, last: Option<Looked>) -> TableError {
    let list = |table: &wire::PhysicalTable| {
        let columns: Vec<String> =
            table.columns.iter().map(|column| format!("{} {}", column.name, column.type_name)).collect();
        columns.join(", ")
    };
    let message = match last {
        Some((Some(there), before, after)) => format!(
            "after an interrupted change from {} to {} the table is ({}), neither ({}) nor ({})",
            change.before.snapshot,
            change.after.snapshot,
            list(&there),
            list(&before),
            list(&after)
        ),
        Some((None, ..)) => "after an interrupted change the table does not exist at the destination".to_owned(),
        None => "after an interrupted change the table could not be inspected".to_owned(),
    };
    TableError { code: "schema.fits-neither".to_owned(), message, next: Some(RESYNC.to_owned()) }
}
