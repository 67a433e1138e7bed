//! The state in an SQLite file: WAL mode, every commit synced.

use std::path::Path;
use std::time::Duration;

use rusqlite::{Connection, ErrorCode, OpenFlags, OptionalExtension, Row, TransactionBehavior, params};

use super::backend::Backend;
use super::barriers::{self, BarrierRecord, Verdict};
use super::copies::{self, CopyRecord, StretchRecord};
use super::history;
use super::limits::{check_total, check_value, other_pipeline, unknown_destination};
use super::quarantine;
use super::records::{
    DestinationRecord, Loaded, Mark, Progress, QuarantineKey, QuarantineSelection, QuarantinedRow, RefusedWhy,
    SlotRecord, SourceRecord, TableError, TableRecord,
};
use super::rows::{count, hex, lsn, source_record, stored_error, table_record, unreadable};
use crate::error::{Error, Result};
use crate::position::{Lsn, Position, SnapshotId};
use crate::schema::table::TableSchema;
use crate::schema::tombstone::Tombstone;

const FILE: &str = "state.db";

/// Applied in order; `PRAGMA user_version` counts how many were. Never edited once
/// released: the next change of the schema is the next file.
const MIGRATIONS: &[&str] = &[
    include_str!("migrations/0001_first.sql"),
    include_str!("migrations/0002_quarantine.sql"),
    include_str!("migrations/0003_members.sql"),
    include_str!("migrations/0004_copies.sql"),
    include_str!("migrations/0005_barriers.sql"),
    include_str!("migrations/0006_history.sql"),
    include_str!("migrations/0007_stretches.sql"),
];

/// Only a reader (`status`) or a backup tool can make us wait, and not for long.
const BUSY_TIMEOUT: Duration = Duration::from_secs(5);

pub(super) struct Sqlite {
    connection: Connection,
    directory: String,
}

impl Sqlite {
    /// Opens for writing, makes or migrates the tables, and claims the state for
    /// `pipeline`. The caller holds the lock.
    pub(super) fn open(directory: &Path, pipeline: &str) -> Result<Sqlite> {
        Self::open_with(directory, pipeline, MIGRATIONS)
    }

    fn open_with(directory: &Path, pipeline: &str, migrations: &[&str]) -> Result<Sqlite> {
        let at = directory.display().to_string();
        let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_CREATE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
        let mut connection = connect(directory, flags).map_err(failed(&at))?;
        check_version(&connection, &at, migrations.len())?;
        migrate(&mut connection, migrations).map_err(failed(&at))?;
        let mut store = Sqlite { connection, directory: at };
        store.claim(pipeline)?;
        Ok(store)
    }

    /// Opens without the right to write, beside a process that does.
    pub(super) fn open_read_only(directory: &Path) -> Result<Sqlite> {
        let at = directory.display().to_string();
        let missing = || {
            Error::usage("state.missing", format!("there is no state in {at}"))
                .next("Check `pipeline.state` in the configuration; `tidegate run` makes the state at its first start.")
        };
        if !directory.join(FILE).exists() {
            return Err(missing());
        }
        let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
        let connection = connect(directory, flags).map_err(failed(&at))?;
        match check_version(&connection, &at, MIGRATIONS.len())? {
            0 => Err(missing()),
            version if version < MIGRATIONS.len() => Err(Error::usage(
                "state.older",
                format!(
                    "the state in {at} is of an older version of tidegate, and only `tidegate run` brings it up to date"
                ),
            )
            .next("Start `tidegate run` once with this version.")),
            _ => Ok(Sqlite { connection, directory: at }),
        }
    }

    /// A state belongs to one pipeline for good: its checkpoints mean that
    /// pipeline's slot.
    fn claim(&mut self, pipeline: &str) -> Result<()> {
        let owner: String = self.transaction(|tx| {
            tx.execute("INSERT INTO meta (key, value) VALUES ('pipeline', ?1) ON CONFLICT DO NOTHING", [pipeline])?;
            Ok(tx.query_row("SELECT value FROM meta WHERE key = 'pipeline'", [], |row| row.get(0))?)
        })?;
        if owner == pipeline {
            return Ok(());
        }
        Err(other_pipeline(&self.directory, &owner, pipeline))
    }

    /// Why something could not be read.
    fn unread(&self, error: rusqlite::Error) -> Error {
        match error.sqlite_error_code() {
            Some(_) => failed(&self.directory)(error),
            None => corrupt(&self.directory, error),
        }
    }

    fn transaction<T>(&mut self, work: impl FnOnce(&rusqlite::Transaction<'_>) -> Result<T, Failure>) -> Result<T> {
        let directory = self.directory.as_str();
        // Dropped without a commit, it is rolled back.
        let tx =
            self.connection.transaction_with_behavior(TransactionBehavior::Immediate).map_err(failed(directory))?;
        let value = work(&tx).map_err(|failure| failure.into_error(directory))?;
        tx.commit().map_err(failed(directory))?;
        Ok(value)
    }
}

/// SQLite's error, or ours from within a transaction.
enum Failure {
    Sqlite(rusqlite::Error),
    Ours(Error),
}

impl From<rusqlite::Error> for Failure {
    fn from(error: rusqlite::Error) -> Failure {
        Failure::Sqlite(error)
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        Failure::Ours(error)
    }
}

impl Failure {
    fn into_error(self, directory: &str) -> Error {
        match self {
            Failure::Sqlite(error) => failed(directory)(error),
            Failure::Ours(error) => error,
        }
    }
}

fn connect(directory: &Path, flags: OpenFlags) -> rusqlite::Result<Connection> {
    let connection = Connection::open_with_flags(directory.join(FILE), flags)?;
    connection.busy_timeout(BUSY_TIMEOUT)?;
    if !flags.contains(OpenFlags::SQLITE_OPEN_READ_ONLY) {
        connection.pragma_update(None, "journal_mode", "WAL")?;
        // WAL syncs only at checkpoints under NORMAL; our promises need each commit.
        connection.pragma_update(None, "synchronous", "FULL")?;
        connection.pragma_update(None, "journal_size_limit", 16 * 1024 * 1024)?;
    }
    connection.pragma_update(None, "foreign_keys", true)?;
    Ok(connection)
}

/// The number of migrations that were applied; refuses more than are known.
fn check_version(connection: &Connection, directory: &str, known: usize) -> Result<usize> {
    let version: i64 =
        connection.pragma_query_value(None, "user_version", |row| row.get(0)).map_err(failed(directory))?;
    match usize::try_from(version) {
        Ok(version) if version <= known => Ok(version),
        _ => Err(Error::usage(
            "state.newer",
            format!("the state in {directory} has version {version}, this tidegate knows versions up to {known}"),
        )
        .next("Use the version of tidegate that wrote it, or a later one.")),
    }
}

fn migrate(connection: &mut Connection, migrations: &[&str]) -> rusqlite::Result<()> {
    let tx = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    let applied: i64 = tx.pragma_query_value(None, "user_version", |row| row.get(0))?;
    for (version, sql) in (1_i64..).zip(migrations).filter(|(version, _)| *version > applied) {
        tx.execute_batch(sql)?;
        tx.pragma_update(None, "user_version", version)?;
    }
    tx.commit()
}

/// What SQLite's errors mean to whoever runs the pipeline.
fn failed(directory: &str) -> impl Fn(rusqlite::Error) -> Error {
    move |error| match error.sqlite_error_code() {
        Some(ErrorCode::DiskFull | ErrorCode::SystemIoFailure | ErrorCode::CannotOpen | ErrorCode::OutOfMemory) => {
            Error::transient("state.write", format!("the state in {directory} cannot be written: {error}"))
                .next("Free space on its disk, or see the system's log for what ails it; nothing is lost meanwhile.")
        }
        Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked) => {
            Error::transient("state.busy", format!("the state in {directory} is locked by another program: {error}"))
                .next("Stop what holds the file state.db open for writing, such as a backup or an SQLite shell.")
        }
        Some(ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase) => corrupt(directory, error),
        Some(ErrorCode::ReadOnly | ErrorCode::PermissionDenied) => {
            Error::permanent("state.read-only", format!("the state in {directory} may not be written: {error}"))
                .next("Give the process the right to write the directory and the files in it.")
        }
        _ => Error::permanent("state.failed", format!("the state in {directory} refused an operation: {error}"))
            .next("This is a fault in tidegate: report it with this message."),
    }
}

fn corrupt(directory: &str, what: impl std::fmt::Display) -> Error {
    Error::permanent("state.corrupt", format!("the state in {directory} cannot be read: {what}"))
        .next("Restore the directory from a backup, or move it away, drop the slot and copy everything anew.")
}

/// A table's position only grows, by epoch, commit, ordinal; `reset_table` is the one
/// way back.
const SAVE_TABLE: &str = "
    INSERT INTO tables (destination, oid, schema_name, table_name, state, floor, run,
        position_epoch, position_commit, position_ordinal,
        applied, applying_from, applying_to, applying_step, needs_resync, rows_copied, rows_total,
        error_code, error_message, error_next)
    VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15, ?16, ?17, ?18, ?19, ?20)
    ON CONFLICT (destination, oid) DO UPDATE SET
        schema_name = excluded.schema_name, table_name = excluded.table_name,
        state = excluded.state, floor = excluded.floor, run = excluded.run,
        applied = excluded.applied, applying_from = excluded.applying_from,
        applying_to = excluded.applying_to, applying_step = excluded.applying_step,
        needs_resync = excluded.needs_resync,
        rows_copied = excluded.rows_copied, rows_total = excluded.rows_total,
        error_code = excluded.error_code, error_message = excluded.error_message,
        error_next = excluded.error_next";

/// A table that is not begun has no position: one that comes now was sent before it
/// was reset.
const MOVE_POSITION: &str = "
    UPDATE tables SET position_epoch = ?3, position_commit = ?4, position_ordinal = ?5
    WHERE destination = ?1 AND oid = ?2 AND state <> 'init'
      AND (position_epoch IS NULL
           OR (position_epoch, position_commit, position_ordinal) < (?3, ?4, ?5))";

const MOVE_CHECKPOINT: &str = "UPDATE destinations SET checkpoint = ?2 WHERE name = ?1 AND checkpoint < ?2";

fn save_table(tx: &rusqlite::Transaction<'_>, table: &TableRecord) -> Result<(), Failure> {
    let TableRecord { position, applying, error, .. } = table;
    tx.prepare_cached(SAVE_TABLE)?.execute(params![
        table.destination,
        table.oid,
        table.name.schema,
        table.name.name,
        table.state.as_str(),
        table.floor.map(|floor| hex(floor.0)),
        table.run,
        position.map(|position| position.epoch),
        position.map(|position| hex(position.commit.0)),
        position.map(|position| hex(position.ordinal)),
        table.applied.map(|applied| applied.to_string()),
        applying.map(|applying| applying.from.to_string()),
        applying.map(|applying| applying.to.to_string()),
        applying.map(|applying| applying.step),
        table.needs_resync,
        count(table.rows_copied),
        table.rows_total.map(count),
        error.as_ref().map(|error| &error.code),
        error.as_ref().map(|error| &error.message),
        error.as_ref().and_then(|error| error.next.as_ref()),
    ])?;
    if let Some(position) = position {
        move_position(tx, &table.destination, table.oid, *position)?;
    }
    Ok(history::put_applied(tx, table)?)
}

fn move_position(
    tx: &rusqlite::Transaction<'_>,
    destination: &str,
    oid: u32,
    position: Position,
) -> Result<(), Failure> {
    let Position { epoch, commit, ordinal } = position;
    tx.prepare_cached(MOVE_POSITION)?.execute(params![destination, oid, epoch, hex(commit.0), hex(ordinal)])?;
    Ok(())
}

fn known_destination(tx: &rusqlite::Transaction<'_>, destination: &str) -> Result<(), Failure> {
    let known = tx.prepare_cached("SELECT 1 FROM destinations WHERE name = ?1")?.exists([destination])?;
    if known { Ok(()) } else { Err(unknown_destination(destination).into()) }
}

fn save_progress(tx: &rusqlite::Transaction<'_>, progress: &Progress) -> Result<(), Failure> {
    known_destination(tx, &progress.destination)?;
    if let Some(checkpoint) = progress.checkpoint {
        tx.prepare_cached(MOVE_CHECKPOINT)?.execute(params![progress.destination, hex(checkpoint.0)])?;
    }
    for (oid, position) in &progress.positions {
        move_position(tx, &progress.destination, *oid, *position)?;
    }
    Ok(())
}

fn append_history(tx: &rusqlite::Transaction<'_>, schema: &TableSchema, directory: &str) -> Result<(), Failure> {
    let id = schema.snapshot;
    let shape = schema.shape();
    let json = serde_json::to_string(schema).map_err(|error| corrupt(directory, error))?;
    let origin = serde_json::to_value(schema.origin).map_err(|error| corrupt(directory, error))?;
    let added = tx
        .prepare_cached(
            "INSERT INTO history (oid, commit_lsn, message_lsn, origin, shape, table_schema)
             VALUES (?1, ?2, ?3, ?4, ?5, ?6) ON CONFLICT DO NOTHING",
        )?
        .execute(params![
            schema.oid,
            hex(id.commit.0),
            hex(id.message.0),
            origin.as_str().unwrap_or_default(),
            shape,
            json
        ])?;
    if added == 0 {
        let stored: String = tx.query_row(
            "SELECT shape FROM history WHERE oid = ?1 AND commit_lsn = ?2 AND message_lsn = ?3",
            params![schema.oid, hex(id.commit.0), hex(id.message.0)],
            |row| row.get(0),
        )?;
        if stored != shape {
            // An odd entry does not stop the stream (design, section 4).
            tracing::warn!(
                table = %schema.name, snapshot = %id,
                "a schema version came again with another shape: the first is kept"
            );
        }
    }
    Ok(())
}

impl Backend for Sqlite {
    fn load(&mut self) -> Result<Loaded> {
        let directory = self.directory.clone();
        let mut loaded = Loaded::default();
        // A read transaction: one moment, also beside a process that writes.
        let tx = self.connection.transaction().map_err(failed(&directory))?;
        let mut read = || -> rusqlite::Result<()> {
            loaded.source = tx.query_row("SELECT * FROM source", [], source_record).optional()?;
            let mut destinations = tx.prepare("SELECT * FROM destinations ORDER BY name")?;
            let mut rows = destinations.query([])?;
            while let Some(row) = rows.next()? {
                let name: String = row.get("name")?;
                if let Some(error) = stored_error(row)? {
                    loaded.destination_errors.insert(name.clone(), error);
                }
                let checkpoint = lsn(row, "checkpoint")?.unwrap_or_default();
                loaded.destinations.push(DestinationRecord { name, plugin: row.get("plugin")?, checkpoint });
            }
            let mut tables = tx.prepare("SELECT * FROM tables ORDER BY destination, oid")?;
            loaded.tables = tables.query_map([], table_record)?.collect::<rusqlite::Result<_>>()?;
            loaded.copies = copies::load(&tx)?;
            loaded.barriers = barriers::load(&tx)?;
            let mut members = tx.prepare("SELECT oid, key FROM members")?;
            loaded.members =
                members.query_map([], |row| Ok((row.get(0)?, row.get(1)?)))?.collect::<rusqlite::Result<_>>()?;
            let mut versions = tx.prepare("SELECT table_schema FROM history ORDER BY oid, commit_lsn, message_lsn")?;
            let schema = |row: &Row<'_>| serde_json::from_str(row.get_ref(0)?.as_str()?).map_err(unreadable);
            loaded.history = versions.query_map([], schema)?.collect::<rusqlite::Result<_>>()?;
            loaded.ended = history::ends(&tx)?;
            loaded.removed = history::removed(&tx)?;
            loaded.applied = history::applied(&tx)?;
            loaded.quarantined = quarantine::counts(&tx)?;
            Ok(())
        };
        match read() {
            Ok(()) => Ok(loaded),
            Err(error) if error.sqlite_error_code().is_none() => Err(corrupt(&directory, error)),
            Err(error) => Err(failed(&directory)(error)),
        }
    }

    fn save_source(&mut self, source: &SourceRecord) -> Result<()> {
        self.transaction(|tx| {
            tx.execute(
                "INSERT OR REPLACE INTO source (id, system, timeline, slot, publication, publication_oid, plugin,
                     epoch, slot_created_at)
                 VALUES (1, ?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)",
                params![
                    source.system,
                    source.timeline,
                    source.slot,
                    source.publication,
                    source.publication_oid,
                    source.plugin,
                    source.epoch,
                    match source.slot_state {
                        SlotRecord::Intended => None,
                        SlotRecord::Created { at } => Some(hex(at.0)),
                    },
                ],
            )?;
            Ok(())
        })
    }

    fn save_destination(&mut self, destination: &DestinationRecord) -> Result<()> {
        self.transaction(|tx| {
            tx.execute(
                "INSERT INTO destinations (name, plugin, checkpoint) VALUES (?1, ?2, ?3)
                 ON CONFLICT (name) DO UPDATE SET plugin = excluded.plugin,
                     checkpoint = max(checkpoint, excluded.checkpoint)",
                params![destination.name, destination.plugin, hex(destination.checkpoint.0)],
            )?;
            Ok(())
        })
    }

    fn save_destination_error(&mut self, destination: &str, error: Option<&TableError>) -> Result<()> {
        self.transaction(|tx| {
            known_destination(tx, destination)?;
            tx.execute(
                "UPDATE destinations SET error_code = ?2, error_message = ?3, error_next = ?4 WHERE name = ?1",
                params![
                    destination,
                    error.map(|error| &error.code),
                    error.map(|error| &error.message),
                    error.and_then(|error| error.next.as_ref())
                ],
            )?;
            Ok(())
        })
    }

    fn append_history(&mut self, schema: &TableSchema) -> Result<()> {
        let directory = self.directory.clone();
        self.transaction(|tx| append_history(tx, schema, &directory))
    }

    fn append_end(&mut self, tombstone: &Tombstone) -> Result<()> {
        self.transaction(|tx| Ok(history::put_end(tx, tombstone)?))
    }

    fn remove_versions(&mut self, oid: u32, versions: &[SnapshotId]) -> Result<Vec<SnapshotId>> {
        self.transaction(|tx| Ok(history::remove(tx, oid, versions)?))
    }

    fn forget_history(&mut self, oid: u32) -> Result<bool> {
        self.transaction(|tx| Ok(history::forget(tx, oid)?))
    }

    fn save_tables(&mut self, tables: &[TableRecord]) -> Result<()> {
        self.transaction(|tx| {
            let mut checked = None;
            for table in tables {
                if checked != Some(&table.destination) {
                    known_destination(tx, &table.destination)?;
                    checked = Some(&table.destination);
                }
                save_table(tx, table)?;
            }
            Ok(())
        })
    }

    fn save_copy(&mut self, copy: &CopyRecord) -> Result<()> {
        self.transaction(|tx| Ok(copies::put(tx, copy)?))
    }

    fn save_stretch(&mut self, destination: &str, oid: u32, number: usize, stretch: StretchRecord) -> Result<()> {
        self.transaction(|tx| Ok(copies::put_stretches(tx, destination, oid, &[(number, stretch)])?))
    }

    fn save_cleaned(&mut self, destination: &str, oid: u32, cleaned: Lsn) -> Result<()> {
        self.transaction(|tx| Ok(copies::put_cleaned(tx, destination, oid, cleaned)?))
    }

    fn delete_copy(&mut self, destination: &str, oid: u32) -> Result<()> {
        self.transaction(|tx| Ok(copies::delete(tx, destination, oid)?))
    }

    fn stop_tables(&mut self, destination: &str, error: &TableError) -> Result<()> {
        self.transaction(|tx| {
            tx.execute(
                "UPDATE tables SET state = 'errored', needs_resync = 1, run = NULL,
                     error_code = ?2, error_message = ?3, error_next = ?4
                 WHERE destination = ?1 AND state <> 'errored'",
                params![destination, error.code, error.message, error.next],
            )?;
            Ok(barriers::delete_all(tx, destination)?)
        })
    }

    fn save_barrier(&mut self, barrier: &BarrierRecord) -> Result<()> {
        self.transaction(|tx| Ok(barriers::put(tx, barrier)?))
    }

    fn decide_barrier(&mut self, destination: &str, oid: u32, to: SnapshotId, verdict: Verdict) -> Result<bool> {
        self.transaction(|tx| Ok(barriers::decide(tx, destination, oid, to, verdict)?))
    }

    fn delete_barrier(&mut self, destination: &str, oid: u32) -> Result<()> {
        self.transaction(|tx| Ok(barriers::delete(tx, destination, oid)?))
    }

    fn barriers(&mut self) -> Result<Vec<BarrierRecord>> {
        barriers::load(&self.connection).map_err(|error| self.unread(error))
    }

    fn save_members(&mut self, members: &[(u32, String)]) -> Result<()> {
        self.transaction(|tx| {
            let mut put = tx.prepare("INSERT OR REPLACE INTO members (oid, key) VALUES (?1, ?2)")?;
            for (oid, key) in members {
                put.execute(params![oid, key])?;
            }
            Ok(())
        })
    }

    fn delete_table(&mut self, destination: &str, oid: u32) -> Result<()> {
        self.transaction(|tx| {
            tx.execute("DELETE FROM tables WHERE destination = ?1 AND oid = ?2", params![destination, oid])?;
            copies::delete(tx, destination, oid)?;
            barriers::delete(tx, destination, oid)?;
            Ok(quarantine::clear(tx, destination, oid)?)
        })
    }

    fn reset_table(&mut self, destination: &str, oid: u32) -> Result<()> {
        self.transaction(|tx| {
            tx.execute(
                "UPDATE tables SET state = 'init', floor = NULL, run = NULL,
                     position_epoch = NULL, position_commit = NULL, position_ordinal = NULL,
                     applied = NULL, applying_from = NULL, applying_to = NULL, applying_step = NULL,
                     needs_resync = 0, rows_copied = 0, rows_total = NULL,
                     error_code = NULL, error_message = NULL, error_next = NULL
                 WHERE destination = ?1 AND oid = ?2",
                params![destination, oid],
            )?;
            copies::delete(tx, destination, oid)?;
            barriers::delete(tx, destination, oid)?;
            Ok(quarantine::clear(tx, destination, oid)?)
        })
    }

    fn save_progress(&mut self, progress: &[Progress]) -> Result<()> {
        self.transaction(|tx| progress.iter().try_for_each(|one| save_progress(tx, one)))
    }

    fn next_generation(&mut self, destination: &str, lane: u32) -> Result<u64> {
        let generation: i64 = self.transaction(|tx| {
            Ok(tx.query_row(
                "INSERT INTO generations (destination, lane, generation) VALUES (?1, ?2, 1)
                 ON CONFLICT (destination, lane) DO UPDATE SET generation = generation + 1
                 RETURNING generation",
                params![destination, lane],
                |row| row.get(0),
            )?)
        })?;
        Ok(generation.cast_unsigned())
    }

    fn get_state(&mut self, destination: &str, key: &str) -> Result<Option<Vec<u8>>> {
        self.connection
            .query_row(
                "SELECT value FROM plugin_state WHERE destination = ?1 AND key = ?2",
                params![destination, key],
                |row| row.get(0),
            )
            .optional()
            .map_err(failed(&self.directory))
    }

    fn set_state(&mut self, destination: &str, key: &str, value: Option<&[u8]>) -> Result<()> {
        let Some(value) = value else {
            return self.transaction(|tx| {
                tx.execute("DELETE FROM plugin_state WHERE destination = ?1 AND key = ?2", params![destination, key])?;
                Ok(())
            });
        };
        check_value(destination, key, value)?;
        self.transaction(|tx| {
            let (keys, bytes): (i64, i64) = tx.query_row(
                "SELECT count(*), coalesce(sum(length(value)), 0) FROM plugin_state
                 WHERE destination = ?1 AND key <> ?2",
                params![destination, key],
                |row| Ok((row.get(0)?, row.get(1)?)),
            )?;
            check_total(destination, keys, bytes, value)?;
            tx.execute(
                "INSERT INTO plugin_state (destination, key, value) VALUES (?1, ?2, ?3)
                 ON CONFLICT (destination, key) DO UPDATE SET value = excluded.value",
                params![destination, key, value],
            )?;
            Ok(())
        })
    }

    fn put_quarantined(&mut self, rows: &[QuarantinedRow]) -> Result<()> {
        self.transaction(|tx| Ok(rows.iter().try_for_each(|row| quarantine::put(tx, row))?))
    }

    fn explain_quarantined(
        &mut self,
        destination: &str,
        oid: u32,
        rows: &[(String, Position, RefusedWhy)],
    ) -> Result<()> {
        self.transaction(|tx| Ok(rows.iter().try_for_each(|row| quarantine::explain(tx, destination, oid, row))?))
    }

    fn quarantine_index(&mut self, destination: &str) -> Result<Vec<QuarantineKey>> {
        quarantine::index(&self.connection, destination).map_err(|error| self.unread(error))
    }

    fn get_quarantined(&mut self, destination: &str, oid: u32, idents: &[String]) -> Result<Vec<QuarantinedRow>> {
        quarantine::get(&self.connection, destination, oid, idents).map_err(|error| self.unread(error))
    }

    fn list_quarantined(&mut self, selection: &QuarantineSelection, most: u32) -> Result<Vec<QuarantinedRow>> {
        quarantine::list(&self.connection, selection, most).map_err(|error| self.unread(error))
    }

    fn remove_quarantined(&mut self, destination: &str, oid: u32, rows: &[(String, Position)]) -> Result<()> {
        self.transaction(|tx| Ok(quarantine::remove(tx, destination, oid, rows)?))
    }

    fn mark_quarantined(&mut self, selection: &QuarantineSelection, mark: Mark) -> Result<u64> {
        self.transaction(|tx| Ok(quarantine::mark(tx, selection, mark)?))
    }

    fn drop_marked(&mut self, destination: &str) -> Result<()> {
        self.transaction(|tx| Ok(quarantine::drop_marked(tx, destination)?))
    }
}

#[cfg(test)]
mod tests {
    use super::super::records::TableState;
    use super::*;

    #[test]
    fn migrations_run_once_and_later_ones_run_on_an_older_state() {
        let directory = tempfile::tempdir().unwrap();
        let later =
            [MIGRATIONS[0], MIGRATIONS[1], "CREATE TABLE added (id INTEGER) STRICT; INSERT INTO added VALUES (1);"];
        for migrations in [&later[..1], &later[..2], &later, &later] {
            let store =
                Sqlite::open_with(directory.path(), "shop", migrations).unwrap_or_else(|error| panic!("{error}"));
            let version: i64 = store.connection.pragma_query_value(None, "user_version", |row| row.get(0)).unwrap();
            assert_eq!(version, migrations.len() as i64);
        }
        let refused = Sqlite::open_with(directory.path(), "shop", &later[..1]).err().unwrap();
        assert_eq!(refused.code(), "state.newer");
    }

    #[test]
    fn a_migration_that_fails_leaves_the_state_as_it_was() {
        let directory = tempfile::tempdir().unwrap();
        let first = &MIGRATIONS[..1];
        drop(Sqlite::open_with(directory.path(), "shop", first).unwrap_or_else(|error| panic!("{error}")));
        let broken = [MIGRATIONS[0], "CREATE TABLE added (id INTEGER) STRICT; CREATE TABLE meta (x TEXT);"];
        assert!(Sqlite::open_with(directory.path(), "shop", &broken).is_err());
        drop(Sqlite::open_with(directory.path(), "shop", MIGRATIONS).unwrap_or_else(|error| panic!("{error}")));
    }

    #[test]
    fn copies_by_ranges_of_an_older_version_begin_again() {
        use TableState::{Errored, Init, Ready};
        let directory = tempfile::tempdir().unwrap();
        let older =
            Sqlite::open_with(directory.path(), "shop", &MIGRATIONS[..6]).unwrap_or_else(|error| panic!("{error}"));
        let setup = "INSERT INTO destinations (name, plugin, checkpoint) VALUES ('d', 'p', '0000000000000001');";
        older.connection.execute_batch(setup).unwrap();
        for (oid, state) in [(1, "data-sync"), (2, "ready"), (3, "errored"), (4, "ready")] {
            older
                .connection
                .execute(
                    "INSERT INTO tables (destination, oid, schema_name, table_name, state, run, needs_resync, rows_copied)
                     VALUES ('d', ?1, 's', 't', ?2, 'run', 0, 7)",
                    params![oid, state],
                )
                .unwrap();
        }
        for oid in 1..4 {
            let sql = "INSERT INTO copies VALUES ('d', ?1, 'run', '1:2', 'o', 'id', 'integer', '[]')";
            older.connection.execute(sql, params![oid]).unwrap();
        }
        drop(older);
        let mut store = Sqlite::open(directory.path(), "shop").unwrap_or_else(|error| panic!("{error}"));
        let loaded = store.load().unwrap();
        assert_eq!(loaded.copies, []);
        let states: Vec<(u32, TableState, u64)> =
            loaded.tables.iter().map(|table| (table.oid, table.state, table.rows_copied)).collect();
        assert_eq!(states, [(1, Init, 0), (2, Init, 0), (3, Errored, 7), (4, Ready, 7)]);
    }

    #[test]
    fn commits_are_synced_and_foreign_keys_hold() {
        let directory = tempfile::tempdir().unwrap();
        let store = Sqlite::open(directory.path(), "shop").unwrap_or_else(|error| panic!("{error}"));
        let pragma = |name: &str| {
            let value = |row: &Row<'_>| row.get::<_, rusqlite::types::Value>(0);
            format!("{:?}", store.connection.pragma_query_value(None, name, value).unwrap())
        };
        assert_eq!(pragma("journal_mode"), "Text(\"wal\")");
        assert_eq!(pragma("synchronous"), "Integer(2)");
        assert_eq!(pragma("foreign_keys"), "Integer(1)");
    }

    #[test]
    fn a_full_disk_and_a_failing_one_are_transient() {
        for code in [rusqlite::ffi::SQLITE_FULL, rusqlite::ffi::SQLITE_IOERR_FSYNC] {
            let error = failed("state")(rusqlite::Error::SqliteFailure(rusqlite::ffi::Error::new(code), None));
            assert_eq!(error.code(), "state.write");
            assert!(error.is_transient());
            assert!(error.next_step().is_some());
        }
    }

    #[test]
    fn a_full_disk_fails_the_transaction_whole_and_the_next_may_succeed() {
        let directory = tempfile::tempdir().unwrap();
        let mut store = Sqlite::open(directory.path(), "shop").unwrap_or_else(|error| panic!("{error}"));
        store.connection.pragma_update(None, "max_page_count", 1).unwrap();
        let error = store.set_state("d", "k", Some(&vec![1; 200_000])).unwrap_err();
        assert_eq!(error.code(), "state.write");
        store.connection.pragma_update(None, "max_page_count", 1_000_000).unwrap();
        store.set_state("d", "k", Some(&[1])).unwrap();
        assert_eq!(store.get_state("d", "k").unwrap().as_deref(), Some(&[1_u8][..]));
    }
}
