//! The quarantine's rows. Each operation says the same when it is done twice.

use std::collections::BTreeMap;

use tokio_postgres::Row;

use super::super::records::{Mark, QuarantineKey, QuarantineSelection, QuarantinedRow, RefusedWhy, RowOp};
use super::link::{Failure, Link};
use super::rows::{count, number, ordinal, parsed, pg_lsn, position, text, unreadable};
use crate::batch::TextRow;
use crate::position::Position;
use crate::schema::table::TableName;

/// The row that is there stays the first: its id and when it came.
const PUT: &str = "
    INSERT INTO quarantine AS known (destination, oid, schema_name, table_name, ident, op, snapshot,
        position_epoch, position_commit, position_ordinal, committed_at, xid, new_row, old_row, needs,
        code, message, column_ordinal, changes, quarantined_at, mark)
    VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18, $19, $20, $21)
    ON CONFLICT (destination, oid, sha256(ident)) DO UPDATE SET
        schema_name = excluded.schema_name, table_name = excluded.table_name, op = excluded.op,
        snapshot = excluded.snapshot, position_epoch = excluded.position_epoch,
        position_commit = excluded.position_commit, position_ordinal = excluded.position_ordinal,
        committed_at = excluded.committed_at, xid = excluded.xid, new_row = excluded.new_row,
        old_row = excluded.old_row, needs = excluded.needs, code = excluded.code, message = excluded.message,
        column_ordinal = excluded.column_ordinal, changes = excluded.changes,
        mark = CASE known.mark WHEN 'drop' THEN known.mark ELSE excluded.mark END
    WHERE (excluded.position_epoch, excluded.position_commit, excluded.position_ordinal)
       >= (known.position_epoch, known.position_commit, known.position_ordinal)";

const EXPLAIN: &str = "
    UPDATE quarantine SET code = $4, message = $5, column_ordinal = $6,
        mark = CASE WHEN mark = 'retry'
                 AND (position_epoch, position_commit, position_ordinal) <= ($7, $8, $9) THEN NULL ELSE mark END
    WHERE destination = $1 AND oid = $2 AND sha256(ident) = sha256($3)";

const REMOVE: &str = "
    DELETE FROM quarantine WHERE destination = $1 AND oid = $2 AND sha256(ident) = sha256($3)
        AND (position_epoch, position_commit, position_ordinal) <= ($4, $5, $6)";

const LIST: &str = "
    SELECT * FROM quarantine
    WHERE ($1::text IS NULL OR destination = $1)
      AND ($2::text IS NULL OR schema_name || '.' || table_name = $2)
      AND (cardinality($3::bigint[]) = 0 OR id = ANY ($3))
    ORDER BY id LIMIT $4";

const MARK: &str = "
    UPDATE quarantine SET mark = $4
    WHERE ($1::text IS NULL OR destination = $1)
      AND ($2::text IS NULL OR schema_name || '.' || table_name = $2)
      AND (cardinality($3::bigint[]) = 0 OR id = ANY ($3))";

const GET: &str = "
    SELECT quarantine.* FROM quarantine
    WHERE destination = $1 AND oid = $2 AND sha256(ident) IN (SELECT sha256(ident) FROM unnest($3::bytea[]) AS idents (ident))
    ORDER BY id";

const INDEX: &str = "
    SELECT oid, ident, position_epoch, position_commit, position_ordinal, needs, code, mark,
        octet_length(ident)::bigint + octet_length(new_row) + coalesce(octet_length(old_row), 0) AS bytes
    FROM quarantine WHERE destination = $1 ORDER BY id";

/// What takes cells from a row that is forgotten cannot be made whole any more.
const DROP_TAKERS: &str = "
    UPDATE quarantine AS taker SET mark = 'drop'
    WHERE destination = $1 AND mark IS DISTINCT FROM 'drop' AND EXISTS (
        SELECT 1 FROM quarantine AS needed
        WHERE needed.destination = taker.destination AND needed.oid = taker.oid
          AND sha256(needed.ident) = sha256(taker.needs) AND needed.mark = 'drop')";

const FREE_NEEDED: &str = "
    UPDATE quarantine AS needed SET mark = 'retry'
    WHERE destination = $1 AND mark IS NULL AND EXISTS (
        SELECT 1 FROM quarantine AS taker
        WHERE taker.destination = needed.destination AND taker.oid = needed.oid
          AND sha256(taker.needs) = sha256(needed.ident) AND taker.mark = 'drop')";

pub(super) async fn put(link: &Link, rows: &[QuarantinedRow]) -> Result<(), Failure> {
    link.each(PUT, rows, async |link, row| {
        let RefusedWhy { code, message, column } = &row.reason;
        link.execute(
            PUT,
            &[
                &row.destination,
                &row.oid,
                &row.table.schema,
                &row.table.name,
                &row.ident.as_bytes(),
                &row.op.as_str(),
                &row.snapshot.to_string(),
                &i64::from(row.position.epoch),
                &pg_lsn(row.position.commit),
                &ordinal(row.position.ordinal),
                &row.committed_at,
                &i64::from(row.xid),
                &json(&row.row)?,
                &row.old.as_ref().map(json).transpose()?,
                &row.needs.as_ref().map(|needs| needs.as_bytes()),
                &code.as_bytes(),
                &message.as_bytes(),
                &column.map(i32::from),
                &i64::from(row.changes),
                &row.quarantined_at,
                &row.mark.map(Mark::as_str),
            ],
        )
        .await
        .map(drop)
    })
    .await
}

pub(super) async fn explain(
    link: &Link,
    destination: &str,
    oid: u32,
    rows: &[(String, Position, RefusedWhy)],
) -> Result<(), Failure> {
    link.each(EXPLAIN, rows, async |link, (ident, at, why)| {
        link.execute(
            EXPLAIN,
            &[
                &destination,
                &oid,
                &ident.as_bytes(),
                &why.code.as_bytes(),
                &why.message.as_bytes(),
                &why.column.map(i32::from),
                &i64::from(at.epoch),
                &pg_lsn(at.commit),
                &ordinal(at.ordinal),
            ],
        )
        .await
        .map(drop)
    })
    .await
}

pub(super) async fn remove(
    link: &Link,
    destination: &str,
    oid: u32,
    rows: &[(String, Position)],
) -> Result<(), Failure> {
    link.each(REMOVE, rows, async |link, (ident, at)| {
        link.execute(
            REMOVE,
            &[&destination, &oid, &ident.as_bytes(), &i64::from(at.epoch), &pg_lsn(at.commit), &ordinal(at.ordinal)],
        )
        .await
        .map(drop)
    })
    .await
}

pub(super) async fn clear(link: &Link, destination: &str, oid: u32) -> Result<(), Failure> {
    link.execute("DELETE FROM quarantine WHERE destination = $1 AND oid = $2", &[&destination, &oid]).await.map(drop)
}

pub(super) async fn index(link: &Link, destination: &str) -> Result<Vec<QuarantineKey>, Failure> {
    let rows = link.query(INDEX, &[&destination]).await?;
    let key = |row: &Row| {
        Ok(QuarantineKey {
            oid: row.try_get("oid")?,
            ident: text(row, "ident")?.unwrap_or_default(),
            position: position(row)?.unwrap_or_default(),
            bytes: number(row, "bytes")?,
            needs: text(row, "needs")?,
            code: text(row, "code")?.unwrap_or_default(),
            mark: mark_of(row)?,
        })
    };
    rows.iter().map(key).collect()
}

pub(super) async fn get(
    link: &Link,
    destination: &str,
    oid: u32,
    idents: &[String],
) -> Result<Vec<QuarantinedRow>, Failure> {
    let idents: Vec<&[u8]> = idents.iter().map(String::as_bytes).collect();
    let rows = link.query(GET, &[&destination, &oid, &idents]).await?;
    rows.iter().map(quarantined).collect()
}

pub(super) async fn list(
    link: &Link,
    selection: &QuarantineSelection,
    most: u32,
) -> Result<Vec<QuarantinedRow>, Failure> {
    let QuarantineSelection { destination, table, .. } = selection;
    let rows = link.query(LIST, &[destination, table, &ids(selection), &i64::from(most)]).await?;
    rows.iter().map(quarantined).collect()
}

pub(super) async fn mark(link: &Link, selection: &QuarantineSelection, mark: Mark) -> Result<u64, Failure> {
    let QuarantineSelection { destination, table, .. } = selection;
    link.execute(MARK, &[destination, table, &ids(selection), &mark.as_str()]).await
}

pub(super) async fn drop_marked(link: &Link, destination: &str) -> Result<(), Failure> {
    while link.execute(DROP_TAKERS, &[&destination]).await? > 0 {}
    link.execute(FREE_NEEDED, &[&destination]).await?;
    link.execute("DELETE FROM quarantine WHERE destination = $1 AND mark = 'drop'", &[&destination]).await.map(drop)
}

pub(super) async fn counts(link: &Link) -> Result<BTreeMap<(String, u32), u64>, Failure> {
    let rows =
        link.query("SELECT destination, oid, count(*) AS rows FROM quarantine GROUP BY destination, oid", &[]).await?;
    rows.iter().map(|row| Ok(((row.try_get(0)?, row.try_get(1)?), number(row, "rows")?))).collect()
}

/// An id that no row can have selects none.
fn ids(selection: &QuarantineSelection) -> Vec<i64> {
    selection.ids.iter().map(|id| count(*id)).collect()
}

fn json(row: &TextRow) -> Result<String, Failure> {
    serde_json::to_string(row).map_err(unreadable)
}

fn mark_of(row: &Row) -> Result<Option<Mark>, Failure> {
    Ok(row.try_get::<_, Option<&str>>("mark")?.and_then(Mark::parse))
}

fn quarantined(row: &Row) -> Result<QuarantinedRow, Failure> {
    let op: &str = row.try_get("op")?;
    let cells = |column: &str| -> Result<Option<TextRow>, Failure> {
        let text: Option<&str> = row.try_get(column)?;
        text.map(|text| serde_json::from_str(text).map_err(unreadable)).transpose()
    };
    let column: Option<i32> = row.try_get("column_ordinal")?;
    Ok(QuarantinedRow {
        id: number(row, "id")?,
        destination: row.try_get("destination")?,
        oid: row.try_get("oid")?,
        table: TableName { schema: row.try_get("schema_name")?, name: row.try_get("table_name")? },
        ident: text(row, "ident")?.unwrap_or_default(),
        op: RowOp::parse(op).ok_or_else(|| unreadable(format_args!("`{op}` is nothing a row can do")))?,
        snapshot: parsed(row, "snapshot")?.unwrap_or_default(),
        position: position(row)?.unwrap_or_default(),
        committed_at: row.try_get("committed_at")?,
        xid: number(row, "xid")?,
        row: cells("new_row")?.unwrap_or_default(),
        old: cells("old_row")?,
        needs: text(row, "needs")?,
        reason: RefusedWhy {
            code: text(row, "code")?.unwrap_or_default(),
            message: text(row, "message")?.unwrap_or_default(),
            column: column.map(u16::try_from).transpose().map_err(unreadable)?,
        },
        changes: number(row, "changes")?,
        quarantined_at: row.try_get("quarantined_at")?,
        mark: mark_of(row)?,
    })
}
