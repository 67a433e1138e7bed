//! The quarantine's rows in SQLite.

use std::collections::BTreeMap;

use rusqlite::{Connection, Row, Transaction, params};

use super::records::{Mark, QuarantineKey, QuarantineSelection, QuarantinedRow, RefusedWhy, RowOp};
use super::rows::{hex, lsn, parsed, unreadable};
use crate::position::Position;
use crate::schema::table::TableName;

/// The row that is there stays the first: its id and when it came.
const PUT: &str = "
    INSERT INTO quarantine (destination, oid, schema_name, table_name, ident, op, snapshot,
        position_epoch, position_commit, position_ordinal, committed_at, xid, new_row, old_row, needs,
        code, message, column_ordinal, changes, quarantined_at, mark)
    VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15, ?16, ?17, ?18, ?19, ?20, ?21)
    ON CONFLICT (destination, oid, ident) DO UPDATE SET
        schema_name = excluded.schema_name, table_name = excluded.table_name, op = excluded.op,
        snapshot = excluded.snapshot, position_epoch = excluded.position_epoch,
        position_commit = excluded.position_commit, position_ordinal = excluded.position_ordinal,
        committed_at = excluded.committed_at, xid = excluded.xid, new_row = excluded.new_row,
        old_row = excluded.old_row, needs = excluded.needs, code = excluded.code, message = excluded.message,
        column_ordinal = excluded.column_ordinal, changes = excluded.changes,
        mark = CASE mark WHEN 'drop' THEN mark ELSE excluded.mark END
    WHERE (excluded.position_epoch, excluded.position_commit, excluded.position_ordinal)
       >= (position_epoch, position_commit, position_ordinal)";

const EXPLAIN: &str = "
    UPDATE quarantine SET code = ?4, message = ?5, column_ordinal = ?6,
        mark = CASE WHEN mark = 'retry'
                 AND (position_epoch, position_commit, position_ordinal) <= (?7, ?8, ?9) THEN NULL ELSE mark END
    WHERE destination = ?1 AND oid = ?2 AND ident = ?3";

/// What `QuarantineSelection` selects, as parameters 1 to 3.
const SELECTED: &str = "(?1 IS NULL OR destination = ?1)
    AND (?2 IS NULL OR schema_name || '.' || table_name = ?2)
    AND (?3 = '[]' OR id IN (SELECT value FROM json_each(?3)))";

fn json(value: &impl serde::Serialize) -> rusqlite::Result<String> {
    serde_json::to_string(value).map_err(|error| rusqlite::Error::ToSqlConversionFailure(Box::new(error)))
}

pub(super) fn put(tx: &Transaction<'_>, row: &QuarantinedRow) -> rusqlite::Result<()> {
    let RefusedWhy { code, message, column } = &row.reason;
    tx.prepare_cached(PUT)?.execute(params![
        row.destination,
        row.oid,
        row.table.schema,
        row.table.name,
        row.ident,
        row.op.as_str(),
        row.snapshot.to_string(),
        row.position.epoch,
        hex(row.position.commit.0),
        hex(row.position.ordinal),
        row.committed_at,
        row.xid,
        json(&row.row)?,
        row.old.as_ref().map(json).transpose()?,
        row.needs,
        code,
        message,
        column,
        row.changes,
        row.quarantined_at,
        row.mark.map(Mark::as_str),
    ])?;
    Ok(())
}

pub(super) fn explain(
    tx: &Transaction<'_>,
    destination: &str,
    oid: u32,
    (ident, position, why): &(String, Position, RefusedWhy),
) -> rusqlite::Result<()> {
    let RefusedWhy { code, message, column } = why;
    let Position { epoch, commit, ordinal } = position;
    let place = (epoch, hex(commit.0), hex(*ordinal));
    tx.prepare_cached(EXPLAIN)?.execute(params![
        destination,
        oid,
        ident,
        code,
        message,
        column,
        place.0,
        place.1,
        place.2
    ])?;
    Ok(())
}

pub(super) fn index(connection: &Connection, destination: &str) -> rusqlite::Result<Vec<QuarantineKey>> {
    let mut rows = connection.prepare_cached(
        "SELECT oid, ident, position_epoch, position_commit, position_ordinal, needs, code, mark,
             length(CAST(ident AS BLOB)) + length(CAST(new_row AS BLOB)) + coalesce(length(CAST(old_row AS BLOB)), 0)
                 AS bytes
         FROM quarantine WHERE destination = ?1 ORDER BY id",
    )?;
    let key = |row: &Row<'_>| {
        Ok(QuarantineKey {
            oid: row.get("oid")?,
            ident: row.get("ident")?,
            position: position(row)?,
            bytes: row.get::<_, i64>("bytes")?.max(0).cast_unsigned(),
            needs: row.get("needs")?,
            code: row.get("code")?,
            mark: mark_of(row)?,
        })
    };
    rows.query_map([destination], key)?.collect()
}

pub(super) fn get(
    connection: &Connection,
    destination: &str,
    oid: u32,
    idents: &[String],
) -> rusqlite::Result<Vec<QuarantinedRow>> {
    let mut rows = connection.prepare_cached(
        "SELECT * FROM quarantine
         WHERE destination = ?1 AND oid = ?2 AND ident IN (SELECT value FROM json_each(?3)) ORDER BY id",
    )?;
    rows.query_map(params![destination, oid, json(&idents)?], quarantined)?.collect()
}

pub(super) fn list(
    connection: &Connection,
    selection: &QuarantineSelection,
    most: u32,
) -> rusqlite::Result<Vec<QuarantinedRow>> {
    let QuarantineSelection { destination, table, ids } = selection;
    let sql = format!("SELECT * FROM quarantine WHERE {SELECTED} ORDER BY id LIMIT ?4");
    connection.prepare_cached(&sql)?.query_map(params![destination, table, json(ids)?, most], quarantined)?.collect()
}

pub(super) fn counts(tx: &Transaction<'_>) -> rusqlite::Result<BTreeMap<(String, u32), u64>> {
    let mut rows = tx.prepare("SELECT destination, oid, count(*) FROM quarantine GROUP BY destination, oid")?;
    let counted = |row: &Row<'_>| Ok(((row.get(0)?, row.get(1)?), row.get::<_, i64>(2)?.max(0).cast_unsigned()));
    rows.query_map([], counted)?.collect()
}

pub(super) fn remove(
    tx: &Transaction<'_>,
    destination: &str,
    oid: u32,
    rows: &[(String, Position)],
) -> rusqlite::Result<()> {
    let mut delete = tx.prepare_cached(
        "DELETE FROM quarantine WHERE destination = ?1 AND oid = ?2 AND ident = ?3
             AND (position_epoch, position_commit, position_ordinal) <= (?4, ?5, ?6)",
    )?;
    for (ident, Position { epoch, commit, ordinal }) in rows {
        delete.execute(params![destination, oid, ident, epoch, hex(commit.0), hex(*ordinal)])?;
    }
    Ok(())
}

pub(super) fn clear(tx: &Transaction<'_>, destination: &str, oid: u32) -> rusqlite::Result<()> {
    tx.execute("DELETE FROM quarantine WHERE destination = ?1 AND oid = ?2", params![destination, oid])?;
    Ok(())
}

pub(super) fn mark(tx: &Transaction<'_>, selection: &QuarantineSelection, mark: Mark) -> rusqlite::Result<u64> {
    let QuarantineSelection { destination, table, ids } = selection;
    let sql = format!("UPDATE quarantine SET mark = ?4 WHERE {SELECTED}");
    let marked = tx.execute(&sql, params![destination, table, json(ids)?, mark.as_str()])?;
    Ok(marked as u64)
}

pub(super) fn drop_marked(tx: &Transaction<'_>, destination: &str) -> rusqlite::Result<()> {
    // What takes cells from a row that is forgotten cannot be made whole any more.
    let dependents = "UPDATE quarantine AS taker SET mark = 'drop'
         WHERE destination = ?1 AND mark IS NOT 'drop' AND EXISTS (
             SELECT 1 FROM quarantine AS needed
             WHERE needed.destination = taker.destination AND needed.oid = taker.oid
               AND needed.ident = taker.needs AND needed.mark = 'drop')";
    while tx.execute(dependents, [destination])? > 0 {}
    tx.execute(
        "UPDATE quarantine AS needed SET mark = 'retry'
         WHERE destination = ?1 AND mark IS NULL AND EXISTS (
             SELECT 1 FROM quarantine AS taker
             WHERE taker.destination = needed.destination AND taker.oid = needed.oid
               AND taker.needs = needed.ident AND taker.mark = 'drop')",
        [destination],
    )?;
    tx.execute("DELETE FROM quarantine WHERE destination = ?1 AND mark = 'drop'", [destination])?;
    Ok(())
}

fn position(row: &Row<'_>) -> rusqlite::Result<Position> {
    Ok(Position {
        epoch: row.get("position_epoch")?,
        commit: lsn(row, "position_commit")?.unwrap_or_default(),
        ordinal: lsn(row, "position_ordinal")?.unwrap_or_default().0,
    })
}

fn mark_of(row: &Row<'_>) -> rusqlite::Result<Option<Mark>> {
    Ok(row.get::<_, Option<String>>("mark")?.as_deref().and_then(Mark::parse))
}

fn quarantined(row: &Row<'_>) -> rusqlite::Result<QuarantinedRow> {
    let op: String = row.get("op")?;
    let cells = |column: &str| {
        let text: Option<String> = row.get(column)?;
        text.map(|text| serde_json::from_str(&text).map_err(unreadable)).transpose()
    };
    Ok(QuarantinedRow {
        id: row.get::<_, i64>("id")?.cast_unsigned(),
        destination: row.get("destination")?,
        oid: row.get("oid")?,
        table: TableName { schema: row.get("schema_name")?, name: row.get("table_name")? },
        ident: row.get("ident")?,
        op: RowOp::parse(&op)
            .ok_or_else(|| unreadable(std::io::Error::other(format!("`{op}` is nothing a row can do"))))?,
        snapshot: parsed(row, "snapshot")?.unwrap_or_default(),
        position: position(row)?,
        committed_at: row.get("committed_at")?,
        xid: row.get("xid")?,
        row: cells("new_row")?.unwrap_or_default(),
        old: cells("old_row")?,
        needs: row.get("needs")?,
        reason: RefusedWhy { code: row.get("code")?, message: row.get("message")?, column: row.get("column_ordinal")? },
        changes: row.get("changes")?,
        quarantined_at: row.get("quarantined_at")?,
        mark: mark_of(row)?,
    })
}
