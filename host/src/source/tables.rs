//! The published tables and their schemas, from the catalog.

use std::collections::HashMap;

use serde_json::{Value, json};
use tokio_postgres::{Client, GenericClient, Row};

use super::errors::{self, sql_error};
use super::picture;
use crate::error::Result;
use crate::position::SnapshotId;
use crate::schema::table::{Origin, TableName, TableSchema};

/// A table that a publication publishes.
#[derive(Clone, Debug, PartialEq)]
pub struct PublishedTable {
    /// `pg_class.oid`.
    pub oid: u32,
    /// Its name.
    pub name: TableName,
    /// `pg_class.relkind`: `r`, or `p` for a partitioned root published as itself.
    pub kind: char,
    /// `pg_class.relpersistence`.
    pub persistence: char,
    /// Ordinals that the publication publishes, where it has a column list (15 and later)
    /// or publishes generated columns (18); none: all but generated ones. Not in order of
    /// anything.
    pub columns: Option<Vec<u16>>,
    /// The publication has a column list for it.
    pub listed: bool,
    /// Rows as of the last ANALYZE, leaves summed; 0 if never analysed.
    pub reltuples: f64,
    /// Pages as of the last VACUUM or ANALYZE, leaves summed.
    pub pages: i64,
    /// Oids of the leaf partitions of a root.
    pub leaves: Vec<u32>,
}

const PUBLISHED_TABLES: &str = concat!(include_str!("sql/published.sql"), include_str!("sql/published_tables.sql"));

/// The tables of a publication by name, as the caller's snapshot shows them; the
/// trigger's own are left out. Errors: `source.sql`, `source.connection-lost`.
pub async fn published_tables(client: &Client, publication: &str) -> Result<Vec<PublishedTable>> {
    let rows = client.query(PUBLISHED_TABLES, &[&publication]).await;
    let rows = rows.map_err(|error| sql_error(&error, "listing the published tables"))?;
    rows.iter().map(read_table).collect()
}

fn read_table(row: &Row) -> Result<PublishedTable> {
    let letter = |index: usize| row.get::<_, &str>(index).chars().next().unwrap_or(' ');
    let columns: Option<&str> = row.get(5);
    Ok(PublishedTable {
        oid: row.get(0),
        name: TableName::new(row.get::<_, &str>(1), row.get::<_, &str>(2)),
        kind: letter(3),
        persistence: letter(4),
        columns: columns.map(serde_json::from_str).transpose().map_err(errors::protocol)?.flatten(),
        listed: row.get(9),
        reltuples: row.get(6),
        pages: row.get(7),
        leaves: row.get(8),
    })
}

const ROW_FILTERS: &str = concat!(include_str!("sql/published.sql"), include_str!("sql/row_filters.sql"));

/// The publication's WHERE, as an expression, of those of these tables that have one. They
/// have to be locked: printing an expression opens its table, whoever holds it.
/// Errors: `source.sql`, `source.lock-timeout`, `source.connection-lost`.
pub async fn row_filters(
    client: &impl GenericClient,
    publication: &str,
    tables: &[u32],
) -> Result<HashMap<u32, String>> {
    let rows = client.query(ROW_FILTERS, &[&publication, &tables]).await;
    let rows = rows.map_err(|error| sql_error(&error, "reading the publication's row filters"))?;
    Ok(rows.iter().filter_map(|row| Some((row.get(0), row.get::<_, Option<String>>(1)?))).collect())
}

/// The picture as text.
const PICTURE_TEXT: &str = concat!("SELECT picture::text FROM (", include_str!("sql/picture.sql"), ") AS p(picture)");

/// A table's schema as the caller's snapshot and `publication` show it; None if it
/// does not exist or is not published. Errors: `source.sql`, `source.picture`.
pub async fn table_schema(
    client: &impl GenericClient,
    oid: u32,
    publication: &str,
    snapshot: SnapshotId,
    origin: Origin,
) -> Result<Option<TableSchema>> {
    let row = client.query_opt(PICTURE_TEXT, &[&oid]).await;
    let row = row.map_err(|error| sql_error(&error, &format!("reading the schema of table {oid}")))?;
    let Some(row) = row else { return Ok(None) };
    let json = serde_json::from_str(row.get(0)).map_err(errors::protocol)?;
    picture::schema_from_picture(&json, publication, snapshot, origin)
}

/// Many pictures in one query. What publishes the tables is left out: it would be looked
/// up in the whole publication for each of them.
fn pictures_sql() -> String {
    let picture = picture::PICTURE
        .replace("coalesce((SELECT list FROM publications), '[]')", "'[]'::jsonb")
        .replace("$1", "(wanted.oid)");
    format!("SELECT p.picture::text FROM unnest($1::oid[]) AS wanted(oid) CROSS JOIN LATERAL ({picture}) AS p(picture)")
}

/// The same for many tables of a publication at once, by oid; those that do not exist are
/// left out. `tables` has to be what the same snapshot shows.
pub async fn table_schemas(
    client: &impl GenericClient,
    tables: &[PublishedTable],
    publication: &str,
    snapshot: SnapshotId,
    origin: Origin,
) -> Result<HashMap<u32, TableSchema>> {
    let oids: Vec<u32> = tables.iter().map(|table| table.oid).collect();
    let failed = |error| sql_error(&error, "reading the schemas of tables");
    // For a few rows of each table every other plan reads all of pg_type, which has two rows
    // for each table.
    client.batch_execute("SET enable_hashjoin = off; SET enable_mergejoin = off").await.map_err(failed)?;
    let rows = client.query(&pictures_sql(), &[&oids]).await.map_err(failed)?;
    client.batch_execute("RESET enable_hashjoin; RESET enable_mergejoin").await.map_err(failed)?;
    let published: HashMap<u64, &PublishedTable> = tables.iter().map(|table| (u64::from(table.oid), table)).collect();
    let mut schemas = HashMap::with_capacity(rows.len());
    for row in &rows {
        let mut picture: Value = serde_json::from_str(row.get(0)).map_err(errors::protocol)?;
        let table = picture["oid"].as_u64().and_then(|oid| published.get(&oid));
        let columns = table.and_then(|table| table.columns.as_ref());
        let listed = table.is_some_and(|table| table.listed);
        picture["publications"] = json!([{ "name": publication, "columns": columns, "listed": listed }]);
        let schema = picture::schema_from_picture(&picture, publication, snapshot, origin)?;
        schemas.extend(schema.map(|schema| (schema.oid, schema)));
    }
    Ok(schemas)
}
