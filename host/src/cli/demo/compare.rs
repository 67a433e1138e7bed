//! Source against destination, by query.

use std::collections::BTreeMap;

use serde::Serialize;
use tokio_postgres::Client;

use super::shop::sql_error;
use crate::error::Result;
use crate::schema::table::{TableName, quote_identifier};

/// Keys shown of the rows that differ.
const MOST_SHOWN: usize = 5;

/// A table's columns as the catalog shows them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Column {
    pub(super) name: String,
    /// As `format_type` prints it.
    pub(super) declared: String,
    /// Part of the primary key.
    pub(super) key: bool,
}

/// A table in one database.
pub(super) struct Side<'a> {
    pub(super) client: &'a Client,
    pub(super) table: TableName,
}

/// What came of comparing a table with its copy elsewhere.
#[derive(Debug, Serialize)]
pub(super) struct Outcome {
    /// Rows there.
    pub(super) rows: u64,
    /// What differs; empty if nothing does.
    pub(super) differences: Vec<String>,
}

/// Count and hash of a table's rows, in whatever order they are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Fingerprint {
    pub(super) rows: u64,
    hash: String,
}

impl Side<'_> {
    /// Its columns in their order; empty if there is no such table.
    pub(super) async fn columns(&self) -> Result<Vec<Column>> {
        const QUERY: &str = "
            SELECT a.attname::text, format_type(a.atttypid, a.atttypmod), coalesce(a.attnum = ANY (i.indkey), false)
            FROM pg_attribute a
            LEFT JOIN pg_index i ON i.indrelid = a.attrelid AND i.indisprimary
            WHERE a.attrelid = to_regclass($1::text) AND a.attnum > 0 AND NOT a.attisdropped
            ORDER BY a.attnum";
        let rows = self.client.query(QUERY, &[&self.table.quoted()]).await;
        let rows = rows.map_err(|error| sql_error("list columns", &error))?;
        Ok(rows.iter().map(|row| Column { name: row.get(0), declared: row.get(1), key: row.get(2) }).collect())
    }

    /// Of the columns that are named, in that order.
    pub(super) async fn fingerprint(&self, columns: &[Column]) -> Result<Fingerprint> {
        // Sums, for they need no order and no memory; equal rows count as often as they
        // are there.
        let sql = format!(
            "SELECT count(*), coalesce(sum(('x' || left(h, 16))::bit(64)::bigint::numeric), 0)::text || ' ' ||
                    coalesce(sum(('x' || right(h, 16))::bit(64)::bigint::numeric), 0)::text
             FROM (SELECT md5({}) AS h FROM {}) AS hashed",
            row_text(columns),
            self.table.quoted()
        );
        let row = self.client.query_one(&sql, &[]).await.map_err(|error| sql_error("hash the rows", &error))?;
        Ok(Fingerprint { rows: row.get::<_, i64>(0).unsigned_abs(), hash: row.get(1) })
    }

    /// A hash of every row by its key.
    async fn hashes(&self, columns: &[Column]) -> Result<BTreeMap<String, String>> {
        let key: Vec<Column> = columns.iter().filter(|column| column.key).cloned().collect();
        let sql = format!("SELECT {}, md5({}) FROM {}", row_text(&key), row_text(columns), self.table.quoted());
        let rows = self.client.query(&sql, &[]).await.map_err(|error| sql_error("hash the rows", &error))?;
        Ok(rows.iter().map(|row| (row.get(0), row.get(1))).collect())
    }
}

/// A row's text, columns by name: at the other end they may stand in another order.
fn row_text(columns: &[Column]) -> String {
    let names: Vec<String> = columns.iter().map(|column| quote_identifier(&column.name)).collect();
    format!("ROW({})::text", names.join(", "))
}

/// Compares a copy with its source, whose columns and fingerprint are known already.
pub(super) async fn compare(
    source: &Side<'_>,
    columns: &[Column],
    fingerprint: &Fingerprint,
    copy: &Side<'_>,
) -> Result<Outcome> {
    let theirs = copy.columns().await?;
    if theirs.is_empty() {
        return Ok(Outcome { rows: 0, differences: vec!["the table is missing".to_owned()] });
    }
    let mut differences = column_differences(columns, &theirs);
    if !differences.is_empty() {
        let rows = copy.fingerprint(&theirs).await?.rows;
        return Ok(Outcome { rows, differences });
    }
    let other = copy.fingerprint(columns).await?;
    if other != *fingerprint {
        let ours = source.hashes(columns).await?;
        let theirs = copy.hashes(columns).await?;
        differences = row_differences(&ours, &theirs);
        if differences.is_empty() {
            differences.push(format!("{} rows, {} at the source, with equal keys", other.rows, fingerprint.rows));
        }
    }
    Ok(Outcome { rows: other.rows, differences })
}

/// Columns by name, with their types.
fn column_differences(ours: &[Column], theirs: &[Column]) -> Vec<String> {
    let mut differences = Vec::new();
    for column in ours {
        match theirs.iter().find(|other| other.name == column.name) {
            None => differences.push(format!("column {} is missing", column.name)),
            Some(other) if other.declared != column.declared => {
                differences
                    .push(format!("column {} is {} instead of {}", column.name, other.declared, column.declared));
            }
            Some(_) => {}
        }
    }
    let extra = theirs.iter().filter(|other| !ours.iter().any(|column| column.name == other.name));
    differences.extend(extra.map(|column| format!("column {} is one too many", column.name)));
    differences
}

fn row_differences(ours: &BTreeMap<String, String>, theirs: &BTreeMap<String, String>) -> Vec<String> {
    let missing: Vec<&str> = ours.keys().filter(|key| !theirs.contains_key(*key)).map(String::as_str).collect();
    let extra: Vec<&str> = theirs.keys().filter(|key| !ours.contains_key(*key)).map(String::as_str).collect();
    let changed: Vec<&str> = ours
        .iter()
        .filter(|(key, hash)| theirs.get(*key).is_some_and(|other| other != *hash))
        .map(|(key, _)| key.as_str())
        .collect();
    [("missing", missing), ("too many", extra), ("different", changed)]
        .into_iter()
        .filter(|(_, keys)| !keys.is_empty())
        .map(|(what, keys)| {
            let more = if keys.len() > MOST_SHOWN { ", …" } else { "" };
            format!("{} {what}: {}{more}", keys.len(), keys[..keys.len().min(MOST_SHOWN)].join(", "))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn differences_are_named() {
        let column = |name: &str, declared: &str| Column { name: name.into(), declared: declared.into(), key: false };
        let ours = [column("a", "integer"), column("b", "text"), column("c", "text")];
        let theirs = [column("c", "text"), column("a", "bigint"), column("d", "text")];
        assert_eq!(
            column_differences(&ours, &theirs),
            ["column a is bigint instead of integer", "column b is missing", "column d is one too many"]
        );
        let rows = |rows: &[(&str, &str)]| rows.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
        let found = row_differences(&rows(&[("(1)", "a"), ("(2)", "b")]), &rows(&[("(2)", "c"), ("(3)", "d")]));
        assert_eq!(found, ["1 missing: (1)", "1 too many: (3)", "1 different: (2)"]);
    }
}
