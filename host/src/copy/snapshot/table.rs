//! One table of a wave: locking it, comparing it with the snapshot, and its COPY.

use std::time::Duration;

use bytes::{Bytes, BytesMut};
use futures_util::StreamExt;
use tokio::sync::mpsc;
use tokio_postgres::Client;
use tokio_postgres::error::SqlState;

use super::CopyProgress;
use crate::error::{Error, Result};
use crate::schema::table::{TableName, TableSchema, quote_identifier};
use crate::source::catalog::PublishedTable;
use crate::source::session::sql_error;

/// Rows are handed over in buffers of about this size: one allocation and one hop to
/// another task for some thousand rows.
const BUFFER: usize = 256 * 1024;
/// The first server whose publications may name schemas.
const SCHEMAS_SINCE: u32 = 150_000;

/// A table or leaf whose rows are copied by one statement.
#[derive(Clone, Debug)]
pub(super) struct Part {
    name: TableName,
    row_security: bool,
    /// A published column is generated: COPY of the table itself refuses it.
    generated: bool,
}

/// See `sql/digest.sql`.
pub(super) fn digest_sql(version_num: u32) -> String {
    let schemas = if version_num >= SCHEMAS_SINCE { include_str!("../sql/digest_schemas.sql") } else { "" };
    include_str!("../sql/digest.sql").replace("{schemas}", schemas)
}

/// The digest of a table as the caller's snapshot shows it.
pub(super) async fn digest(client: &Client, sql: &str, table: &PublishedTable, publication: &str) -> Result<String> {
    let row = client.query_one(sql, &[&table.oid, &publication]).await;
    row.map(|row| row.get(0)).map_err(|error| sql_error(&error, &format!("comparing table {}", table.name)))
}

/// Locks a table and its partitions ACCESS SHARE, inside the caller's transaction.
/// `observer` is another session.
pub(super) async fn lock(client: &Client, observer: &Client, table: &PublishedTable, timeout: Duration) -> Result<()> {
    let only = if table.kind == 'p' { "" } else { "ONLY " };
    let statement = format!(
        "SET LOCAL lock_timeout = {}; LOCK TABLE {only}{} IN ACCESS SHARE MODE",
        timeout.as_millis().clamp(1, i32::MAX as u128),
        table.name.quoted()
    );
    let Err(error) = client.batch_execute(&statement).await else { return Ok(()) };
    match error.code() {
        Some(&SqlState::LOCK_NOT_AVAILABLE) => Err(lock_failed(observer, table, timeout).await),
        // Renamed, moved or dropped since.
        Some(&SqlState::UNDEFINED_TABLE | &SqlState::INVALID_SCHEMA_NAME | &SqlState::WRONG_OBJECT_TYPE) => {
            Err(changed(table))
        }
        _ => Err(sql_error(&error, &format!("locking table {} for its copy", table.name))),
    }
}

async fn lock_failed(observer: &Client, table: &PublishedTable, timeout: Duration) -> Error {
    let holders = match observer.query(include_str!("../sql/holders.sql"), &[&table.oid]).await {
        Ok(rows) if rows.is_empty() => "a transaction that has ended by now".to_owned(),
        Ok(rows) => rows.iter().map(|row| row.get(0)).collect::<Vec<String>>().join(", "),
        Err(error) => format!("transactions that could not be listed ({error})"),
    };
    let message = format!(
        "table {} could not be locked for its copy within {} s, held by {holders}",
        table.name,
        timeout.as_secs_f32()
    );
    Error::transient("copy.lock", message)
        .next("Let the transactions end, or end them with pg_terminate_backend(pid); the copy begins again by itself.")
}

/// The table is no longer what the snapshot shows: no row, or wrong ones, would come.
pub(super) fn changed(table: &PublishedTable) -> Error {
    let message = format!("table {} was altered, rewritten or truncated after the snapshot of its copy", table.name);
    Error::transient("copy.changed", message).next("Nothing: its copy begins again with a new snapshot.")
}

/// What has to be copied for a table, in the snapshot of `client`.
///
/// # Errors
/// `copy.row-security`: rows would be hidden from us.
pub(super) async fn parts(client: &Client, table: &PublishedTable, schema: &TableSchema) -> Result<Vec<Part>> {
    let ordinals: Vec<i16> = schema.columns.iter().map(|column| column.ordinal as i16).collect();
    let rows = client.query(include_str!("../sql/parts.sql"), &[&table.oid, &ordinals]).await;
    let rows = rows.map_err(|error| sql_error(&error, &format!("listing the partitions of {}", table.name)))?;
    let parts: Vec<Part> = rows
        .iter()
        .map(|row| Part {
            name: TableName::new(row.get::<_, &str>(0), row.get::<_, &str>(1)),
            row_security: row.get(2),
            generated: row.get(3),
        })
        .collect();
    match parts.iter().find(|part| part.row_security) {
        Some(hidden) => Err(row_security(&hidden.name)),
        None => Ok(parts),
    }
}

fn row_security(name: &TableName) -> Error {
    let message = format!("row security of table {name} hides rows from us, a copy would not be whole");
    Error::no("copy.row-security", message)
        .next("Give the role BYPASSRLS (ALTER ROLE … BYPASSRLS), or take the table out of the publication.")
}

/// The COPY of a part. Column lists of the publication are in the schema already.
pub(super) fn statement(part: &Part, schema: &TableSchema, row_filter: Option<&str>) -> String {
    let columns: Vec<String> = schema.columns.iter().map(|column| quote_identifier(&column.name)).collect();
    let columns = columns.join(", ");
    let name = part.name.quoted();
    match row_filter {
        // Without a query around it COPY is faster.
        None if !columns.is_empty() && !part.generated => format!("COPY {name} ({columns}) TO STDOUT"),
        None => format!("COPY (SELECT {columns} FROM ONLY {name}) TO STDOUT"),
        Some(filter) => format!("COPY (SELECT {columns} FROM ONLY {name} WHERE ({filter})) TO STDOUT"),
    }
}

/// Runs a COPY and hands its rows over, whole lines, in order.
pub(super) async fn stream(
    client: &Client,
    statement: &str,
    sink: &mpsc::Sender<Bytes>,
    progress: &CopyProgress,
) -> Result<()> {
    let failed = |error: &tokio_postgres::Error| copy_error(error, statement);
    let rows = client.copy_out(statement).await.map_err(|error| failed(&error))?;
    let mut rows = std::pin::pin!(rows);
    let mut buffer = BytesMut::with_capacity(BUFFER);
    let mut count = 0;
    while let Some(row) = rows.next().await {
        let row = row.map_err(|error| failed(&error))?;
        if buffer.len() + row.len() > BUFFER && !buffer.is_empty() {
            let full = std::mem::replace(&mut buffer, BytesMut::with_capacity(BUFFER));
            hand_over(sink, full.freeze(), std::mem::take(&mut count), progress).await?;
        }
        if row.len() >= BUFFER {
            hand_over(sink, row, 1, progress).await?;
        } else {
            buffer.extend_from_slice(&row);
            count += 1;
        }
    }
    if buffer.is_empty() { Ok(()) } else { hand_over(sink, buffer.freeze(), count, progress).await }
}

async fn hand_over(sink: &mpsc::Sender<Bytes>, rows: Bytes, count: u64, progress: &CopyProgress) -> Result<()> {
    progress.add(count, rows.len() as u64);
    sink.send(rows).await.map_err(|_| {
        Error::transient("copy.stopped", "nobody takes the rows of this copy any more")
            .next("Look for the error of the destination; the copy begins again.")
    })
}

fn copy_error(error: &tokio_postgres::Error, statement: &str) -> Error {
    match error.code() {
        // Row security is told before; a policy may have come since.
        Some(&SqlState::INSUFFICIENT_PRIVILEGE) => sql_error(error, "copying rows")
            .context(format_args!("`{statement}`"))
            .next("Grant the role SELECT on the table, and BYPASSRLS if it has row security."),
        _ => sql_error(error, &format!("`{statement}`")),
    }
}
