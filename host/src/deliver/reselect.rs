//! Cells that the source did not send of a row whose key changed, for a plugin that could
//! not take them from the row's old place a second time (P31): read at the source, by key.
//!
//! Such a value may be newer than its row; what made it newer comes in its turn.

use std::collections::BTreeMap;

use tokio_postgres::SimpleQueryMessage;

use crate::batch::{TextCell, TextRow, complete, is_whole};
use crate::error::Result;
use crate::schema::table::{TableSchema, quote_identifier};
use crate::source::config::SourceConfig;

use crate::source::session::{Session, connect, sql_error};
use crate::wire;

use super::destination::{Destination, Stop};
use super::retry::Backoff;

/// The table and its columns as they are called by now.
const NAMES: &str = "
    SELECT CASE WHEN c.relkind = 'p' THEN '' ELSE 'ONLY ' END || format('%I.%I', n.nspname, c.relname),
           a.attnum, a.attname::text
    FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
    JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
    WHERE c.oid = $1";

impl Destination {
    /// The content with all cells of rows that moved; rows that are not at the source any
    /// more are left out, for what became of them comes later.
    pub(super) async fn reselected(&mut self, oid: u32, content: wire::Content) -> Result<wire::Content, Stop> {
        let wire::Content::Merge(merge) = &content else { return Ok(content) };
        if merge.moved_index.is_empty() || self.parts.lane.can("transactional") {
            return Ok(content);
        }
        let schema = self.parts.tables.get(&oid).and_then(|table| table.schema.clone());
        let Some(schema) = schema else { return Ok(content) };
        let columns = schema.columns.len();
        let partial = merge.moved_index.iter().filter(|row| !is_whole(&merge.upserts, **row, columns));
        let rows: BTreeMap<u32, TextRow> =
            partial.map(|row| (*row, TextRow::take(&merge.upserts, *row, &schema))).collect();
        if rows.is_empty() {
            return Ok(content);
        }
        let mut backoff = Backoff::transient();
        loop {
            match cells_at(&self.parts.source, &schema, &rows).await {
                Ok(cells) => return Ok(wire::Content::Merge(complete(merge, &schema, &cells))),
                Err(error) => tracing::warn!(
                    destination = %self.parts.config.name, table = %schema.name, code = error.code(),
                    "cells that a change of key left out cannot be read at the source; trying again: {error}"
                ),
            }
            self.sleep(backoff.pause(None)).await?;
        }
    }
}

/// The rows as they are at the source; none for one that is not there any more.
async fn cells_at(
    source: &SourceConfig,
    schema: &TableSchema,
    rows: &BTreeMap<u32, TextRow>,
) -> Result<BTreeMap<u32, Option<TextRow>>> {
    let session = connect(source).await?;
    let found = session.query(NAMES, &[&schema.oid]).await;
    let found = found.map_err(|error| sql_error(&error, &format!("looking for table {}", schema.name)))?;
    let table: Option<String> = found.first().map(|row| row.get(0));
    let Some(table) = table else {
        return Ok(rows.keys().map(|row| (*row, None)).collect());
    };
    let names: BTreeMap<u16, String> =
        found.iter().map(|row| (row.get::<_, i16>(1).unsigned_abs(), row.get(2))).collect();
    let mut cells = BTreeMap::new();
    for (number, row) in rows {
        cells.insert(*number, read(&session, &table, &names, schema, row).await?);
    }
    Ok(cells)
}

async fn read(
    session: &Session,
    table: &str,
    names: &BTreeMap<u16, String>,
    schema: &TableSchema,
    row: &TextRow,
) -> Result<Option<TextRow>> {
    let Some(conditions) = conditions(names, schema, row) else { return Ok(None) };
    let there: Vec<(u16, &String)> =
        schema.columns.iter().filter_map(|column| Some((column.ordinal, names.get(&column.ordinal)?))).collect();
    let list: Vec<String> = there.iter().map(|(_, name)| quote_identifier(name)).collect();
    let sql = format!("SELECT {} FROM {table} WHERE {conditions}", list.join(", "));
    let answer = session.simple_query(&sql).await;
    let answer = answer.map_err(|error| sql_error(&error, &format!("reading a row of {}", schema.name)))?;
    let found = answer.into_iter().find_map(|message| match message {
        SimpleQueryMessage::Row(row) => Some(row),
        _ => None,
    });
    let Some(found) = found else { return Ok(None) };
    let cell = |index: usize| found.get(index).map_or(TextCell::Null, |text| TextCell::Text(text.to_owned()));
    let cells = there.iter().enumerate().map(|(index, (ordinal, _))| (*ordinal, cell(index)));
    // A column that was dropped since goes at the destination as well.
    let gone = schema.columns.iter().filter(|column| !names.contains_key(&column.ordinal));
    Ok(Some(cells.chain(gone.map(|column| (column.ordinal, TextCell::Null))).collect()))
}

/// What names the row; none if its key is not there any more.
fn conditions(names: &BTreeMap<u16, String>, schema: &TableSchema, row: &TextRow) -> Option<String> {
    let key = schema.merge_key();
    let conditions = key.iter().map(|ordinal| {
        let name = quote_identifier(names.get(ordinal)?);
        match row.cells().find(|(known, _)| known == ordinal)?.1 {
            // Of sessions of ours: standard_conforming_strings is on.
            TextCell::Text(text) => Some(format!("{name} = '{}'", text.replace('\'', "''"))),
            TextCell::Null | TextCell::Hex { .. } => None,
        }
    });
    let conditions: Vec<String> = conditions.collect::<Option<_>>()?;
    (!conditions.is_empty()).then(|| conditions.join(" AND "))
}
