//! Tables that come, go and begin anew, at one destination.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::error::Error;
use crate::schema::barrier::DETACHED;
use crate::schema::table::{TableName, TableSchema};
use crate::store::{TableError, TableRecord, TableState};

use super::destination::{Destination, Live, Stop, Table};
use super::routes::Place;

impl Destination {
    pub(super) async fn change_membership(&mut self, change: Live) -> Result<(), Stop> {
        match change {
            Live::Begin { oid, name, done } => {
                let record = TableRecord { state: TableState::Init, ..self.record(oid, name) };
                self.begin_anew(record, None).await?;
                self.beginning = self.beginning.next();
                if let Some(table) = self.parts.tables.get_mut(&oid) {
                    table.beginning = self.beginning;
                }
                // Whoever asked may have been stopped since.
                let _ = done.send(self.beginning);
            }
            Live::Stopped { oid, name, error } => {
                if !self.parts.tables.contains_key(&oid) {
                    let record = self.record(oid, name);
                    self.parts.tables.insert(oid, Table::new(record, None));
                }
                self.fail_table(oid, error.clone()).await?;
                self.replace_error(oid, error).await?;
            }
            Live::Detached(error) => {
                self.parts.detached.store(false, Ordering::SeqCst);
                let oids: Vec<u32> = self.parts.tables.keys().copied().collect();
                for oid in oids {
                    self.fail_table(oid, error.clone()).await?;
                }
            }
            Live::Forget { oid, done } => {
                let stopped = self.parts.tables.get(&oid).is_none_or(|table| table.record.state == TableState::Errored);
                if stopped {
                    self.forget_table(oid).await?;
                }
                let _ = done.send(stopped);
            }
            _ => {}
        }
        Ok(())
    }

    /// One that had stopped before stops for another reason now.
    async fn replace_error(&mut self, oid: u32, error: TableError) -> Result<(), Stop> {
        let Some(table) = self.parts.tables.get_mut(&oid) else { return Ok(()) };
        if table.record.error.as_ref() == Some(&error) {
            return Ok(());
        }
        tracing::warn!(destination = %self.parts.config.name, table = %table.record.name, code = %error.code, "{}", error.message);
        table.record.error = Some(error);
        self.save_table(oid).await
    }

    fn record(&self, oid: u32, name: TableName) -> TableRecord {
        TableRecord { destination: self.parts.config.name.clone(), oid, name, ..TableRecord::default() }
    }

    /// Nothing that was known of a table holds any more. What was under way of it is not
    /// sent again; it is stored as not copied before a checkpoint can pass that (P6).
    pub(super) async fn begin_anew(
        &mut self,
        record: TableRecord,
        schema: Option<Arc<TableSchema>>,
    ) -> Result<(), Stop> {
        let (oid, name) = (record.oid, record.name.clone());
        self.parts.resumes.remove(Place { destination: self.parts.index, oid });
        self.drop_barrier(oid).await?;
        self.let_go(oid);
        let beginning = self.parts.tables.get(&oid).map(|table| table.beginning).unwrap_or_default();
        let before = self.parts.tables.insert(oid, Table { beginning, ..Table::new(record, schema) });
        let has_position = before.as_ref().is_some_and(|before| before.record.position.is_some());
        let has_anything = has_position || self.quarantine.count(oid) > 0;
        if let Some(before) = before.filter(|before| before.record.name != name) {
            self.hide_table(&before.record.name);
        }
        self.ledger.remove_table(oid);
        let settled = self.ledger.drop_empty();
        // Of ten thousand tables that are copied for the first time nothing is stored.
        if has_anything {
            self.forget_position(oid).await?;
        }
        self.save_table(oid).await?;
        self.parts.cursors.add(&self.parts.config.name, oid, None);
        self.settle(settled);
        Ok(())
    }

    async fn forget_table(&mut self, oid: u32) -> Result<(), Stop> {
        if let Some(table) = self.parts.tables.remove(&oid) {
            self.hide_table(&table.record.name);
        }
        self.parts.rollout.forget(&self.parts.config.name, oid);
        self.forget_position(oid).await
    }

    fn hide_table(&self, name: &TableName) {
        let name = name.to_string();
        self.parts.board.update_destination(&self.parts.config.name, |status| {
            status.tables.retain(|table| table.table != name);
        });
    }
}

/// What waited for the destination was dropped.
pub(super) fn detached(destination: &str) -> Error {
    Error::permanent(
        DETACHED,
        format!(
            "destination `{destination}` did not keep up until the spool was full, and was detached: its tables stop"
        ),
    )
    .next("Mend it, then run `tidegate resync DEST TABLE` for each table.")
}

/// A table that has left the publication. Its state is kept, in case that was a mistake.
pub(super) fn unpublished(name: &TableName) -> Error {
    Error::permanent(UNPUBLISHED, format!("table {name} has left the publication"))
        .next("Add it to the publication again, and it is copied anew; or run `tidegate tables --forget DEST TABLE`.")
}

/// Code of [`unpublished`].
pub(super) const UNPUBLISHED: &str = "table.unpublished";

/// A table whose new name the destination does not take. Its state is kept, in case that was
/// not meant.
pub(super) fn renamed_away(before: &TableName, now: &TableName, destination: &str) -> Error {
    Error::permanent(
        RENAMED_AWAY,
        format!("table {before} is called {now} now, which `tables` of destination `{destination}` does not take"),
    )
    .next("Add the new name to `tables` of the destination and start `tidegate run` again, and it is copied anew; or run `tidegate tables --forget DEST TABLE`.")
}

/// Code of [`renamed_away`].
pub(super) const RENAMED_AWAY: &str = "table.renamed";
