//! Changes decoded under one version of a schema, as rows of another (P26).
//!
//! Columns are the same if their ordinals are. What ALTER TYPE made of a value is known
//! only for the casts listed in [`cast`]; for another the table needs a resync, for a
//! USING clause could have made anything of it.

use std::sync::Arc;

use super::change::{ChangeBatch, INSERT};
use super::column::ColumnBuilder;
use super::gather::{find, is_missing, is_null};
use super::layout::layout;
use super::render::render;
use crate::error::{Error, Result};
use crate::schema::table::{Column, TableSchema};
use crate::wire;

impl ChangeBatch {
    /// The same changes as rows of another version of the table.
    ///
    /// Columns that `onto` does not have are discarded. For those that these rows do not
    /// have yet an inserted row gets the literal default, else null; in other rows they
    /// are missing. A column of another type is cast where that is certain.
    ///
    /// Errors: `schema.projection` where it is not; the way out is a resync.
    pub fn project(&self, onto: &Arc<TableSchema>) -> Result<ChangeBatch> {
        let rows = wire::ChangeRows {
            sequence: self.rows.sequence.clone(),
            ops: self.rows.ops.clone(),
            rows: self.project_rows(&self.rows.rows, onto, Some(&self.rows.ops))?,
            old_index: self.rows.old_index.clone(),
            old_rows: self.project_rows(&self.rows.old_rows, onto, None)?,
        };
        Ok(ChangeBatch::new(Arc::clone(onto), rows))
    }

    /// Whether these changes name their rows as `onto` does. What must be merged by another key
    /// cannot be: an update that moves a row under it does not say from where.
    ///
    /// Errors: `schema.projection`; the way out is a resync.
    pub fn is_named_as(&self, onto: &TableSchema) -> Result<()> {
        if self.schema.merge_key() == onto.merge_key() {
            return Ok(());
        }
        let message = format!(
            "{}: rows of the version {} have another key than the version {} that the destination has",
            onto.name, self.schema.snapshot, onto.snapshot
        );
        Err(Error::permanent("schema.projection", message).next("Run `tidegate resync DEST TABLE`."))
    }

    /// `ops` of the new rows; old rows have none.
    fn project_rows(&self, rows: &wire::Rows, onto: &TableSchema, ops: Option<&[u8]>) -> Result<wire::Rows> {
        let mut columns = Vec::with_capacity(onto.columns.len());
        for to in &onto.columns {
            let projected = match (self.schema.column(to.ordinal), find(rows, to.ordinal)) {
                (Some((_, from)), Some(values)) => Some(self.project_column(values, rows.count, from, to)?),
                // Known to that version, but no row was sent it.
                (Some(_), None) => None,
                (None, _) => ops.and_then(|ops| added(to, ops)),
            };
            columns.extend(projected);
        }
        Ok(wire::Rows { count: rows.count, columns })
    }

    fn project_column(
        &self,
        values: &wire::ColumnValues,
        count: u32,
        from: &Column,
        to: &Column,
    ) -> Result<wire::ColumnValues> {
        let refused = |what: &str| {
            Error::permanent(
                "schema.projection",
                format!(
                    "rows of {} were written when column {} was {}, and {what} {}",
                    self.schema.name, to.name, from.declared, to.declared
                ),
            )
            .next("Resync the table")
        };
        let Some(cast) = cast(from, to) else { return Err(refused("there is no certain cast to")) };
        if let Cast::Same = cast {
            return Ok(values.clone());
        }
        let mut builder = ColumnBuilder::new(to);
        let mut text = Vec::new();
        for row in 0..count {
            if is_missing(values, row) {
                builder.append_missing();
                continue;
            }
            if is_null(values, row) {
                builder.append_null();
                continue;
            }
            text.clear();
            if !render_cast(values, row, from, cast, &mut text) {
                return Err(refused("one of them is no text to cast to"));
            }
            builder.append(&text);
        }
        if builder.odd_cells() > values.odd.len() {
            return Err(refused("one of them does not fit"));
        }
        builder.finish().ok_or_else(|| refused("not one has a cell for"))
    }
}

/// How values of a column become values of its later type.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Cast {
    /// Nothing to do.
    Same,
    /// Through the text that PostgreSQL prints.
    Text,
    /// `t` and `f` are printed, `true` and `false` cast.
    Bool,
    /// Trailing blanks go.
    Trim,
    /// float4 → float8 keeps the value, not its shortest text.
    Widen,
    /// A date is its midnight.
    Midnight,
}

/// Types whose cast to text is what they print. Others have a cast of their own (inet
/// prints `10.0.0.1` and casts to `10.0.0.1/32`), or may have: extensions' types.
const CAST_AS_PRINTED: [&str; 42] = [
    "int2",
    "int4",
    "int8",
    "oid",
    "float4",
    "float8",
    "numeric",
    "money",
    "date",
    "time",
    "timetz",
    "timestamp",
    "timestamptz",
    "interval",
    "uuid",
    "bytea",
    "json",
    "jsonb",
    "jsonpath",
    "name",
    "bit",
    "varbit",
    "macaddr",
    "macaddr8",
    "pg_lsn",
    "xid",
    "xid8",
    "point",
    "line",
    "lseg",
    "box",
    "path",
    "polygon",
    "circle",
    "tsvector",
    "tsquery",
    "int4range",
    "int8range",
    "numrange",
    "daterange",
    "tsrange",
    "tstzrange",
];

/// The casts whose result does not depend on a session or on a USING clause.
pub(super) fn cast(from: &Column, to: &Column) -> Option<Cast> {
    if (&from.base, &from.element) == (&to.base, &to.element) {
        return Some(Cast::Same);
    }
    let to_text = matches!(to.base.as_str(), "text" | "varchar");
    if from.base == "array" || to.base == "array" {
        let element = |column: &Column| column.element.clone().unwrap_or_default();
        return match to_text {
            true => Some(Cast::Text),
            false if from.base == to.base && widens(&element(from), &element(to)) => Some(Cast::Text),
            false => None,
        };
    }
    match (from.base.as_str(), to.base.as_str()) {
        ("bool", _) if to_text => Some(Cast::Bool),
        ("bpchar", _) if to_text => Some(Cast::Trim),
        ("text" | "varchar", _) if to_text => Some(Cast::Same),
        ("enum" | "composite", _) if to_text => Some(Cast::Text),
        (from, _) if to_text && CAST_AS_PRINTED.contains(&from) => Some(Cast::Text),
        ("float4", "float8") => Some(Cast::Widen),
        ("date", "timestamp") => Some(Cast::Midnight),
        (from, to) if widens(from, to) => Some(Cast::Text),
        _ => None,
    }
}

/// Whether every integer of one type is printed alike by the other.
fn widens(from: &str, to: &str) -> bool {
    matches!(
        (from, to),
        ("int2", "int4" | "int8" | "numeric" | "float8")
            | ("int4", "int8" | "numeric" | "float8")
            | ("int8", "numeric")
    )
}

fn render_cast(values: &wire::ColumnValues, row: u32, from: &Column, cast: Cast, out: &mut Vec<u8>) -> bool {
    let odd = values.odd.iter().any(|odd| odd.row == row);
    if let (Cast::Widen, wire::ColumnData::Plain(wire::Cells::Float32(cells)), false) = (cast, &values.data, odd) {
        let wide = f64::from(cells.get(row as usize).copied().unwrap_or_default());
        out.extend_from_slice(wide.to_string().as_bytes());
        return true;
    }
    if !render(values, row, layout(from), out) {
        return false;
    }
    match cast {
        Cast::Bool => *out = if out == b"t" { b"true".to_vec() } else { b"false".to_vec() },
        Cast::Trim => out.truncate(out.iter().rposition(|byte| *byte != b' ').map_or(0, |last| last + 1)),
        Cast::Midnight if !odd => {
            let era = if out.ends_with(b" BC") { out.split_off(out.len() - 3) } else { Vec::new() };
            out.extend_from_slice(b" 00:00:00");
            out.extend(era);
        }
        _ => {}
    }
    true
}

/// A column that came later.
fn added(column: &Column, ops: &[u8]) -> Option<wire::ColumnValues> {
    let mut builder = ColumnBuilder::new(column);
    for op in ops {
        match (&column.default_literal, *op) {
            (Some(literal), INSERT) => builder.append(literal.text.as_bytes()),
            (None, INSERT) => builder.append_null(),
            _ => builder.append_missing(),
        };
    }
    builder.finish()
}

#[cfg(test)]
#[path = "project_tests.rs"]
mod tests;
