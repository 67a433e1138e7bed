//! The SQL about a table of a wave: locking it, comparing it with the snapshot, its parts,
//! and its COPY.

use std::collections::HashMap;
use std::time::Duration;

use tokio_postgres::{Client, Row, ToStatement};

use super::ranges::{Pages, Part, Piece, estimate_rows};
use crate::copy::stretches::{Look, Reading};
use crate::error::{Error, Result};
use crate::schema::table::{TableName, TableSchema, quote_identifier};
use crate::source::catalog::PublishedTable;
use crate::source::copy_out::Failed;
use crate::source::session::sql_error;

const LOCK_NOT_AVAILABLE: &str = "55P03";
const UNDEFINED_TABLE: &str = "42P01";
const INVALID_SCHEMA_NAME: &str = "3F000";
const WRONG_OBJECT_TYPE: &str = "42809";
const INSUFFICIENT_PRIVILEGE: &str = "42501";
/// The keeper has ended; its name is not a snapshot's; the same since PostgreSQL 17.
const SNAPSHOT_LOST: [&str; 3] = ["55000", "22023", "42704"];

/// The first server whose publications may name schemas.
const SCHEMAS_SINCE: u32 = 150_000;

/// See `sql/digest.sql`.
pub(super) fn digest_sql(version_num: u32) -> String {
    let schemas = if version_num >= SCHEMAS_SINCE { include_str!("../sql/digest_schemas.sql") } else { "" };
    include_str!("../sql/digest.sql").replace("{schemas}", schemas)
}

/// The digests of tables as the caller's snapshot shows them; none for one of which it
/// shows nothing.
pub(super) async fn digests(
    client: &Client,
    digest: &(impl ToStatement + ?Sized),
    tables: &[u32],
    publication: &str,
) -> Result<HashMap<u32, String>> {
    let rows = client.query(digest, &[&tables, &publication]).await;
    let rows = rows.map_err(|error| sql_error(&error, "comparing tables with the snapshot of their copy"))?;
    Ok(rows.iter().map(|row| (row.get(0), row.get(1))).collect())
}

/// Locks tables with their partitions ACCESS SHARE, inside the caller's transaction.
pub(super) fn lock_whole_sql(tables: &[PublishedTable], timeout: Duration) -> String {
    // A table that others inherit from is alone, a root comes with its partitions.
    let name = |table: &PublishedTable| match table.kind {
        'p' => table.name.quoted(),
        _ => format!("ONLY {}", table.name.quoted()),
    };
    lock_names(tables.iter().map(name), timeout)
}

/// The same of tables without partitions.
pub(super) fn lock_sql<'a>(names: impl Iterator<Item = &'a TableName>, timeout: Duration) -> String {
    lock_names(names.map(|name| format!("ONLY {}", name.quoted())), timeout)
}

fn lock_names(names: impl Iterator<Item = String>, timeout: Duration) -> String {
    let timeout = timeout.as_millis().clamp(1, i32::MAX as u128);
    let names: Vec<String> = names.collect();
    format!("SET LOCAL lock_timeout = {timeout}; LOCK TABLE {} IN ACCESS SHARE MODE", names.join(", "))
}

/// Why a lock was not had. `observer` is another session than the one that failed.
pub(super) async fn lock_error(failed: Failed, observer: &Client, table: &PublishedTable, timeout: Duration) -> Error {
    match failed.state.as_str() {
        LOCK_NOT_AVAILABLE => lock_failed(observer, table, timeout).await,
        // Renamed, moved or dropped since.
        UNDEFINED_TABLE | INVALID_SCHEMA_NAME | WRONG_OBJECT_TYPE => changed(table),
        _ => failed.error,
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

/// If this is what SET TRANSACTION SNAPSHOT says when the snapshot is gone.
pub(super) fn snapshot_lost(failed: &Failed) -> Option<Error> {
    SNAPSHOT_LOST.contains(&failed.state.as_str()).then(|| {
        let message = format!("the snapshot of this copy is gone: {}", failed.error.message());
        Error::transient("copy.snapshot-lost", message).next("Nothing: the copy begins again with a new one.")
    })
}

/// The table is no longer what the snapshot shows: no row, or wrong ones, would come.
pub(super) fn changed(table: &PublishedTable) -> Error {
    let message = format!("table {} was altered, rewritten or truncated after the snapshot of its copy", table.name);
    Error::transient("copy.changed", message).next("Nothing: its copy begins again with a new snapshot.")
}

/// What has to be copied for each table, in the snapshot of `client`.
///
/// # Errors
/// For one table: `copy.row-security`: rows would be hidden from us; `copy.unlogged` and
/// `copy.foreign`: changes would never come.
pub(super) async fn parts(
    client: &Client,
    tables: &[PublishedTable],
    schemas: &HashMap<u32, TableSchema>,
) -> Result<HashMap<u32, Result<Vec<Part>>>> {
    let oids: Vec<u32> = tables.iter().map(|table| table.oid).collect();
    let columns = |oid: &u32| -> Vec<&str> {
        let columns = schemas.get(oid).map(|schema| schema.columns.as_slice()).unwrap_or_default();
        columns.iter().map(|column| column.name.as_str()).collect()
    };
    let published: serde_json::Value = oids.iter().map(columns).collect();
    let rows = client.query(include_str!("../sql/parts.sql"), &[&oids, &published.to_string()]).await;
    let rows = rows.map_err(|error| sql_error(&error, "listing tables and their partitions"))?;
    let names: HashMap<u32, &TableName> = tables.iter().map(|table| (table.oid, &table.name)).collect();
    let mut parts: HashMap<u32, Result<Vec<Part>>> = HashMap::new();
    for row in &rows {
        let oid: u32 = row.get(0);
        let Some(name) = names.get(&oid) else { continue };
        let of_table = parts.entry(oid).or_insert_with(|| Ok(Vec::new()));
        if let Ok(known) = of_table {
            match read_part(row, name) {
                Ok(part) => known.push(part),
                Err(error) => *of_table = Err(error),
            }
        }
    }
    Ok(parts)
}

fn read_part(row: &Row, table: &TableName) -> Result<Part> {
    let name = TableName::new(row.get::<_, &str>(1), row.get::<_, &str>(2));
    match (row.get(3), row.get(4), row.get(5)) {
        ("f", ..) => return Err(foreign(&name, table)),
        (_, "u", _) => return Err(unlogged(&name, table)),
        (.., true) => return Err(row_security(&name)),
        _ => {}
    }
    let size = |index: usize| u64::try_from(row.get::<_, i64>(index)).unwrap_or_default();
    let block = size(13).max(1);
    let pages = size(8).div_ceil(block);
    Ok(Part {
        oid: row.get(14),
        name,
        generated: row.get(6),
        by_page: row.get(7),
        pages,
        bytes: size(9),
        rows: estimate_rows(pages, row.get(10), row.get(11), row.get(12), block),
    })
}

fn row_security(name: &TableName) -> Error {
    let message = format!("row security of table {name} hides rows from us, a copy would not be whole");
    Error::no("copy.row-security", message)
        .next("Give the role BYPASSRLS (ALTER ROLE … BYPASSRLS), or take the table out of the publication.")
}

/// A table, or a partition of one, whose changes are in no log.
pub(super) fn unlogged(name: &TableName, table: &TableName) -> Error {
    let message = format!("{} is unlogged: its changes are not in the log", which(name, table));
    Error::no("copy.unlogged", message)
        .next(format!("Run ALTER TABLE {} SET LOGGED, or take the table out of the publication.", name.quoted()))
}

/// A table, or a partition of one, that another server holds.
pub(super) fn foreign(name: &TableName, table: &TableName) -> Error {
    let message = format!("{} is a foreign table: another server holds its rows", which(name, table));
    Error::no("copy.foreign", message)
        .next("Publish it at the server that holds it; here, detach it or take the table out of the publication.")
}

fn which(name: &TableName, table: &TableName) -> String {
    if name == table { format!("table {name}") } else { format!("partition {name} of table {table}") }
}

/// The COPY of a part, or of a piece of it. Column lists of the publication are in the
/// schema already.
pub(super) fn copy_sql(part: &Part, piece: &Piece, schema: &TableSchema, row_filter: Option<&str>) -> String {
    let columns: Vec<String> = schema.columns.iter().map(|column| quote_identifier(&column.name)).collect();
    let columns = columns.join(", ");
    let name = part.name.quoted();
    let mut conditions = Vec::new();
    if let Some(Pages { from, to }) = piece.pages {
        conditions.push(format!("ctid >= '({from},0)'::tid"));
        conditions.extend(to.map(|to| format!("ctid < '({to},0)'::tid")));
    }
    if let Some(Reading { look: Look::Newer(base), .. }) = piece.reading {
        conditions.push(base.newer_sql());
    }
    conditions.extend(row_filter.map(|filter| format!("({filter})")));
    if conditions.is_empty() {
        // Without a query around it COPY is faster.
        return match columns.is_empty() || part.generated {
            false => format!("COPY {name} ({columns}) TO STDOUT"),
            true => format!("COPY (SELECT {columns} FROM ONLY {name}) TO STDOUT"),
        };
    }
    format!("COPY (SELECT {columns} FROM ONLY {name} WHERE {}) TO STDOUT", conditions.join(" AND "))
}

pub(super) fn copy_error(failed: Failed) -> Error {
    match failed.state.as_str() {
        // Row security is told before; a policy may have come since.
        INSUFFICIENT_PRIVILEGE => {
            failed.error.next("Grant the role SELECT on the table, and BYPASSRLS if it has row security.")
        }
        _ => failed.error,
    }
}
