//! Rows of the SQLite tables as records, and numbers as the tables hold them.

use std::str::FromStr;

use rusqlite::Row;

use super::records::{Applying, SlotRecord, SourceRecord, TableError, TableRecord, TableState};
use crate::position::{Lsn, Position, SnapshotId};
use crate::schema::table::TableName;

/// See the head of the first migration.
pub(super) fn hex(number: u64) -> String {
    format!("{number:016X}")
}

fn unhex(text: &str) -> Result<u64, rusqlite::Error> {
    u64::from_str_radix(text, 16).map_err(unreadable)
}

pub(super) fn unreadable(error: impl std::error::Error + Send + Sync + 'static) -> rusqlite::Error {
    rusqlite::Error::FromSqlConversionFailure(0, rusqlite::types::Type::Text, Box::new(error))
}

pub(super) fn lsn(row: &Row<'_>, column: &str) -> rusqlite::Result<Option<Lsn>> {
    row.get::<_, Option<String>>(column)?.map(|text| unhex(&text).map(Lsn)).transpose()
}

pub(super) fn parsed<T>(row: &Row<'_>, column: &str) -> rusqlite::Result<Option<T>>
where
    T: FromStr,
    T::Err: std::error::Error + Send + Sync + 'static,
{
    row.get::<_, Option<String>>(column)?.map(|text| text.parse().map_err(unreadable)).transpose()
}

pub(super) fn stored_error(row: &Row<'_>) -> rusqlite::Result<Option<TableError>> {
    let Some(code) = row.get("error_code")? else { return Ok(None) };
    let message = row.get::<_, Option<String>>("error_message")?.unwrap_or_default();
    Ok(Some(TableError { code, message, next: row.get("error_next")? }))
}

pub(super) fn source_record(row: &Row<'_>) -> rusqlite::Result<SourceRecord> {
    Ok(SourceRecord {
        system: row.get("system")?,
        timeline: row.get("timeline")?,
        slot: row.get("slot")?,
        publication: row.get("publication")?,
        publication_oid: row.get("publication_oid")?,
        plugin: row.get("plugin")?,
        epoch: row.get("epoch")?,
        slot_state: match lsn(row, "slot_created_at")? {
            Some(at) => SlotRecord::Created { at },
            None => SlotRecord::Intended,
        },
    })
}

pub(super) fn table_record(row: &Row<'_>) -> rusqlite::Result<TableRecord> {
    let position = match row.get::<_, Option<u32>>("position_epoch")? {
        Some(epoch) => Some(Position {
            epoch,
            commit: lsn(row, "position_commit")?.unwrap_or_default(),
            ordinal: lsn(row, "position_ordinal")?.unwrap_or_default().0,
        }),
        None => None,
    };
    let applying = match (parsed::<SnapshotId>(row, "applying_from")?, parsed(row, "applying_to")?) {
        (Some(from), Some(to)) => Some(Applying { from, to, step: row.get("applying_step")? }),
        _ => None,
    };
    let state: String = row.get("state")?;
    Ok(TableRecord {
        destination: row.get("destination")?,
        oid: row.get("oid")?,
        name: TableName { schema: row.get("schema_name")?, name: row.get("table_name")? },
        state: TableState::parse(&state)
            .ok_or_else(|| unreadable(std::io::Error::other(format!("`{state}` is no state of a table"))))?,
        floor: lsn(row, "floor")?,
        run: row.get("run")?,
        position,
        applied: parsed(row, "applied")?,
        application: None,
        applying,
        needs_resync: row.get("needs_resync")?,
        rows_copied: row.get::<_, i64>("rows_copied")?.max(0).cast_unsigned(),
        rows_total: row.get::<_, Option<i64>>("rows_total")?.map(|rows| rows.max(0).cast_unsigned()),
        error: stored_error(row)?,
    })
}

pub(super) fn count(rows: u64) -> i64 {
    i64::try_from(rows).unwrap_or(i64::MAX)
}
