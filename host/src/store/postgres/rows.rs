//! Rows of the tables as records, and values as the tables hold them.

use std::str::FromStr;

use tokio_postgres::Row;
use tokio_postgres::types::PgLsn;

use super::super::records::{
    Applying, DestinationRecord, SlotRecord, SourceRecord, TableError, TableRecord, TableState,
};
use super::link::Failure;
use crate::position::{Lsn, Position};
use crate::schema::table::TableName;

type Read<T> = Result<T, Failure>;

pub(super) fn pg_lsn(lsn: Lsn) -> PgLsn {
    PgLsn::from(lsn.0)
}

/// See the head of the first migration.
pub(super) fn ordinal(ordinal: u64) -> String {
    format!("{ordinal:016X}")
}

/// Counters of the source are unsigned, and none gets that far.
pub(super) fn count(rows: u64) -> i64 {
    i64::try_from(rows).unwrap_or(i64::MAX)
}

pub(super) fn unreadable(error: impl std::fmt::Display) -> Failure {
    Failure::Unreadable(error.to_string())
}

pub(super) fn lsn(row: &Row, column: &str) -> Read<Option<Lsn>> {
    Ok(row.try_get::<_, Option<PgLsn>>(column)?.map(|lsn| Lsn(lsn.into())))
}

pub(super) fn text(row: &Row, column: &str) -> Read<Option<String>> {
    row.try_get::<_, Option<Vec<u8>>>(column)?.map(|bytes| String::from_utf8(bytes).map_err(unreadable)).transpose()
}

pub(super) fn number<T: TryFrom<i64, Error: std::fmt::Display>>(row: &Row, column: &str) -> Read<T> {
    T::try_from(row.try_get::<_, i64>(column)?).map_err(unreadable)
}

pub(super) fn parsed<T: FromStr<Err: std::fmt::Display>>(row: &Row, column: &str) -> Read<Option<T>> {
    row.try_get::<_, Option<&str>>(column)?.map(|text| text.parse().map_err(unreadable)).transpose()
}

pub(super) fn position(row: &Row) -> Read<Option<Position>> {
    if row.try_get::<_, Option<i64>>("position_epoch")?.is_none() {
        return Ok(None);
    }
    let ordinal = row.try_get::<_, &str>("position_ordinal")?;
    Ok(Some(Position {
        epoch: number(row, "position_epoch")?,
        commit: lsn(row, "position_commit")?.unwrap_or_default(),
        ordinal: u64::from_str_radix(ordinal, 16).map_err(unreadable)?,
    }))
}

fn stored_error(row: &Row) -> Read<Option<TableError>> {
    let Some(code) = text(row, "error_code")? else { return Ok(None) };
    let message = text(row, "error_message")?.unwrap_or_default();
    Ok(Some(TableError { code, message, next: text(row, "error_next")? }))
}

pub(super) fn source_record(row: &Row) -> Read<SourceRecord> {
    Ok(SourceRecord {
        system: row.try_get("system")?,
        timeline: number(row, "timeline")?,
        slot: row.try_get("slot")?,
        publication: row.try_get("publication")?,
        publication_oid: row.try_get("publication_oid")?,
        plugin: row.try_get("plugin")?,
        epoch: number(row, "epoch")?,
        slot_state: match lsn(row, "slot_created_at")? {
            Some(at) => SlotRecord::Created { at },
            None => SlotRecord::Intended,
        },
    })
}

pub(super) fn destination_record(row: &Row) -> Read<(DestinationRecord, Option<TableError>)> {
    let record = DestinationRecord {
        name: row.try_get("name")?,
        plugin: row.try_get("plugin")?,
        checkpoint: lsn(row, "checkpoint")?.unwrap_or_default(),
    };
    Ok((record, stored_error(row)?))
}

pub(super) fn table_record(row: &Row) -> Read<TableRecord> {
    let applying = match (parsed(row, "applying_from")?, parsed(row, "applying_to")?) {
        (Some(from), Some(to)) => Some(Applying { from, to, step: number(row, "applying_step")? }),
        _ => None,
    };
    let state: &str = row.try_get("state")?;
    Ok(TableRecord {
        destination: row.try_get("destination")?,
        oid: row.try_get("oid")?,
        name: TableName { schema: row.try_get("schema_name")?, name: row.try_get("table_name")? },
        state: TableState::parse(state).ok_or_else(|| unreadable(format_args!("`{state}` is no state of a table")))?,
        floor: lsn(row, "floor")?,
        run: text(row, "run")?,
        position: position(row)?,
        applied: parsed(row, "applied")?,
        application: None,
        applying,
        needs_resync: row.try_get("needs_resync")?,
        rows_copied: number(row, "rows_copied")?,
        rows_total: match row.try_get::<_, Option<i64>>("rows_total")? {
            Some(_) => Some(number(row, "rows_total")?),
            None => None,
        },
        error: stored_error(row)?,
    })
}
