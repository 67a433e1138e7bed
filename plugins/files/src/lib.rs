//! Destination plugin `files`: the log of each table as Parquet or NDJSON files in a
//! granted directory, and a manifest that names them in order. `README.md` beside
//! this crate says what the files hold and how a reader folds them.

mod arrow;
mod changes;
mod config;
mod manifest;
mod naming;
mod ndjson;
mod pending;
mod physical;
mod store;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::time::Duration;

use tidegate_sdk::prelude::*;

use crate::config::{Compression, Format, Settings};
use crate::physical::{Layout, OWN_PREFIX};
use crate::store::{Options, Store};

/// The plugin.
struct Files {
    store: Store,
    /// As the settings spell it, for messages.
    path: String,
    /// When the first pending row is due.
    roll_after: Duration,
    /// The last group that was accepted: the same again is the same group.
    accepted: u64,
}

impl Files {
    /// What is durable now, and when to call again for the rest.
    fn ack(&self) -> Ack {
        let ack = Ack::durable(self.store.durable(self.accepted));
        match self.store.oldest() {
            Some(age) => ack.wake_after(self.roll_after.saturating_sub(age)),
            None => ack,
        }
    }

    fn rendered(&self, table: &Table) -> PhysicalTable {
        let lines = Layout::new(table).lines();
        physical::physical_table(&self.path, &naming::directory(&table.target), &lines, table.snapshot)
    }
}

impl Destination for Files {
    type Settings = Settings;
    type TableSettings = NoSettings;
    const NAME: &'static str = "files";
    const VERSION: &'static str = env!("CARGO_PKG_VERSION");
    const DESCRIPTION: &'static str = "The log of each table as Parquet or NDJSON files, named in order by a manifest";
    const PERMISSIONS: &'static [&'static str] = &["files:path"];

    fn capabilities() -> Vec<&'static str> {
        let steps = [
            "add-column",
            "drop-column",
            "rename-column",
            "alter-type",
            "set-default",
            "drop-default",
            "set-not-null",
            "drop-not-null",
            "rename-table",
            "change-key",
        ];
        capability::with_steps(&steps, &[capability::CHANGES, capability::ADD_DEFAULT_METADATA])
    }

    fn open(session: Session<Settings>) -> Result<(Self, Ready), Failure> {
        let settings = &session.settings;
        if settings.format == Format::Ndjson && settings.compression == Some(Compression::Snappy) {
            let message = "`compression` is for Parquet files: leave it out with `format = \"ndjson\"`";
            return Err(Failure::permanent("files.settings", message));
        }
        if session.lane > 0 {
            let message = "the plugin `files` has one lane, for it has one manifest";
            return Err(Failure::permanent("files.lanes", message));
        }
        let roll_bytes = settings.roll_bytes.min(memory(&session.details) / 4);
        let options = Options {
            format: settings.format,
            compression: settings.compression.unwrap_or(Compression::Snappy),
            generation: session.generation,
            roll_bytes: usize::try_from(roll_bytes).unwrap_or(usize::MAX),
        };
        let store = Store::open(settings.path.as_ref(), &session.pipeline, &session.destination, options)?;
        let ready = Ready::default()
            .limit("lanes", 1)
            .limit("settle-ms", settings.roll_seconds.saturating_mul(1000))
            .limit("settle-bytes", roll_bytes)
            .detail("path", &settings.path)
            .detail("format", settings.format.extension());
        let roll_after = Duration::from_secs(settings.roll_seconds);
        Ok((Files { store, path: settings.path.clone(), roll_after, accepted: 0 }, ready))
    }

    fn preflight(&mut self, tables: &[Table]) -> Result<Vec<Notice>, Failure> {
        let mut notices = Vec::new();
        let mut taken: BTreeMap<String, &Table> = BTreeMap::new();
        for table in tables {
            if let Some(other) = taken.insert(naming::directory(&table.target), table) {
                let message = format!("{} and {} both go to {}", other.source, table.source, table.target);
                notices.push(Notice::new("error", Some(table.id), "name-collision", message));
            }
            if let Err(failure) = check_names(table) {
                notices.push(Notice::new("error", Some(table.id), &failure.code, failure.message));
            }
        }
        Ok(notices)
    }

    fn render_table(&mut self, table: &Table) -> Result<PhysicalTable, Failure> {
        check_names(table)?;
        Ok(self.rendered(table))
    }

    fn inspect_table(&mut self, table: &Table) -> Result<Option<PhysicalTable>, Failure> {
        let directory = naming::directory(&table.target);
        let Some(known) = self.store.schema(&directory) else { return Ok(None) };
        let snapshot = known.snapshot.parse().or_permanent("files.manifest", "the manifest")?;
        Ok(Some(physical::physical_table(&self.path, &directory, &known.columns, snapshot)))
    }

    fn attach_table(&mut self, table: &Table) -> Result<Option<Position>, Failure> {
        check_names(table)?;
        self.store.attach(table)?;
        Ok(None)
    }

    fn begin_copy(&mut self, table: &Table, run: &str) -> Result<(), Failure> {
        check_names(table)?;
        self.store.begin_copy(table, run)
    }

    fn finish_copy(&mut self, table: &Table, run: &str, as_of: Position) -> Result<(), Failure> {
        self.store.finish_copy(table, run, as_of)
    }

    fn check_schema(&mut self, change: &SchemaChange) -> Result<Vec<Notice>, Failure> {
        check_names(&change.after)?;
        self.store.check_place(&change.before, &change.after)?;
        Ok(Vec::new())
    }

    fn apply_schema(&mut self, change: &SchemaChange) -> Result<Vec<Notice>, Failure> {
        check_names(&change.after)?;
        self.store.change_schema(&change.before, &change.after)?;
        Ok(Vec::new())
    }

    fn write_group(&mut self, group: Group) -> Result<Ack, Failure> {
        // Sent again because what follows had failed: its rows are here already.
        if group.ticket > self.accepted {
            let ticket = group.ticket;
            self.store.accept(group)?;
            self.accepted = ticket;
        }
        self.store.roll_over_limit()?;
        self.store.roll_older_than(self.roll_after)?;
        Ok(self.ack())
    }

    fn flush(&mut self) -> Result<Option<Ack>, Failure> {
        self.store.roll_older_than(Duration::ZERO)?;
        Ok(Some(self.ack()))
    }

    fn tick(&mut self) -> Result<Option<Ack>, Failure> {
        self.store.roll_older_than(self.roll_after)?;
        Ok(Some(self.ack()))
    }

    fn drop_table(&mut self, table: &Table) -> Result<(), Failure> {
        self.store.drop_table(table)
    }
}

/// Bytes of memory the plugin has. A file is made from rows in memory and takes about
/// as much again, so a part of this is what may wait.
fn memory(details: &[(String, String)]) -> u64 {
    let told = details.iter().find(|(name, _)| name == "memory-bytes");
    told.and_then(|(_, value)| value.parse().ok()).unwrap_or(u64::MAX)
}

/// Names of our own columns are taken.
fn check_names(table: &Table) -> Result<(), Failure> {
    match table.columns.iter().find(|column| column.name.starts_with(OWN_PREFIX)) {
        Some(column) => {
            let message = format!(
                "{} has a column {}: names that begin with {OWN_PREFIX} are the plugin's own",
                table.source, column.name
            );
            Err(Failure::permanent("name-collision", message).of_table(table.id))
        }
        None => Ok(()),
    }
}

tidegate_sdk::export!(Files);
