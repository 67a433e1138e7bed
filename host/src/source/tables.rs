//! The published tables and their schemas, from the catalog.

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
    /// The publication's WHERE, as an expression.
    pub row_filter: Option<String>,
    /// Ordinals that the publication publishes, where the server has column lists
    /// (15 and later). Not in order of anything.
    pub columns: Option<Vec<u16>>,
    /// Rows as of the last ANALYZE, leaves summed; 0 if never analysed.
    pub reltuples: f64,
    /// Pages as of the last VACUUM or ANALYZE, leaves summed.
    pub pages: i64,
    /// Oids of the leaf partitions of a root.
    pub leaves: Vec<u32>,
}

/// The tables of a publication by name, as the caller's snapshot shows them; the
/// trigger's own are left out. Errors: `source.sql`, `source.connection-lost`.
pub async fn published_tables(client: &Client, publication: &str) -> Result<Vec<PublishedTable>> {
    let rows = client.query(include_str!("sql/published_tables.sql"), &[&publication]).await;
    let rows = rows.map_err(|error| sql_error(&error, "listing the published tables"))?;
    rows.iter().map(read_table).collect()
}

fn read_table(row: &Row) -> Result<PublishedTable> {
    let letter = |index: usize| row.get::<_, &str>(index).chars().next().unwrap_or(' ');
    let columns: Option<&str> = row.get(6);
    Ok(PublishedTable {
        oid: row.get(0),
        name: TableName::new(row.get::<_, &str>(1), row.get::<_, &str>(2)),
        kind: letter(3),
        persistence: letter(4),
        row_filter: row.get(5),
        columns: columns.map(serde_json::from_str).transpose().map_err(errors::protocol)?.flatten(),
        reltuples: row.get(7),
        pages: row.get(8),
        leaves: row.get(9),
    })
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
