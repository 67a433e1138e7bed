//! A row on its own, every cell as the text that PostgreSQL prints: what can be kept,
//! shown, patched with a later change, and made into the same cells again.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::change::{ChangeBatch, INSERT, UPDATE};
use super::column::ColumnBuilder;
use super::gather::{find, is_missing, is_null, odd_cell, take_rows};
use super::layout::layout;
use super::pick::pick_merge;
use super::render::render;
use crate::error::Result;
use crate::schema::table::TableSchema;
use crate::wire;

/// One cell.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum TextCell {
    /// NULL.
    Null,
    /// As PostgreSQL prints it.
    Text(String),
    /// Bytes that are not UTF-8.
    Hex {
        /// Two digits for each byte.
        hex: String,
    },
}

impl TextCell {
    fn take(values: &wire::ColumnValues, row: u32, schema: &TableSchema) -> TextCell {
        if is_null(values, row) {
            return TextCell::Null;
        }
        if let Some(odd) = odd_cell(values, row).filter(|odd| odd.kind != "text") {
            return TextCell::Hex { hex: odd.text.clone() };
        }
        let mut text = Vec::new();
        if let Some((_, column)) = schema.column(values.ordinal) {
            render(values, row, layout(column), &mut text);
        }
        // What is not UTF-8 is an odd cell, so nothing is replaced here.
        TextCell::Text(String::from_utf8(text).unwrap_or_else(|e| String::from_utf8_lossy(e.as_bytes()).into_owned()))
    }

    fn append_to(&self, column: &mut ColumnBuilder) {
        match self {
            TextCell::Null => column.append_null(),
            TextCell::Text(text) => column.append(text.as_bytes()),
            TextCell::Hex { hex } => column.append(&unhex(hex)),
        };
    }
}

fn unhex(hex: &str) -> Vec<u8> {
    let digits: Vec<u8> = hex.chars().filter_map(|digit| digit.to_digit(16)).map(|digit| digit as u8).collect();
    digits.chunks_exact(2).map(|pair| pair[0] << 4 | pair[1]).collect()
}

/// The cells of one row by their columns' ordinals; a cell that is missing is left out.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct TextRow(BTreeMap<u16, TextCell>);

impl TextRow {
    /// A row of a set.
    pub fn take(rows: &wire::Rows, row: u32, schema: &TableSchema) -> TextRow {
        let sent = rows.columns.iter().filter(|values| !is_missing(values, row));
        TextRow(sent.map(|values| (values.ordinal, TextCell::take(values, row, schema))).collect())
    }

    /// The cells that are there, by ordinal.
    pub fn cells(&self) -> impl Iterator<Item = (u16, &TextCell)> {
        self.0.iter().map(|(ordinal, cell)| (*ordinal, cell))
    }

    /// Whether no cell is missing.
    pub fn is_whole(&self, schema: &TableSchema) -> bool {
        schema.columns.iter().all(|column| self.0.contains_key(&column.ordinal))
    }

    /// This row with what a later change brought.
    pub fn patched(mut self, by: TextRow) -> TextRow {
        self.0.extend(by.0);
        self
    }

    /// Only the cells of a key.
    pub fn only(&self, key: &[u16]) -> TextRow {
        TextRow(self.cells().filter(|(ordinal, _)| key.contains(ordinal)).map(|(o, cell)| (o, cell.clone())).collect())
    }

    /// The key's cells in the key's order, as JSON: what tells rows apart, bytewise (P30).
    pub fn key(&self, key: &[u16]) -> String {
        let cells: Vec<Option<&TextCell>> = key.iter().map(|ordinal| self.0.get(ordinal)).collect();
        serde_json::to_string(&cells).unwrap_or_default()
    }

    /// The same row under another version of its table (P26).
    ///
    /// # Errors
    /// `schema.projection`, where a column's new type is not certain to hold the old value.
    pub fn project(&self, from: &Arc<TableSchema>, onto: &Arc<TableSchema>) -> Result<TextRow> {
        if from.snapshot == onto.snapshot {
            return Ok(self.clone());
        }
        let op = if self.is_whole(from) { INSERT } else { UPDATE };
        let none = || wire::Rows { count: 0, columns: Vec::new() };
        let rows = wire::ChangeRows {
            sequence: wire::Sequence {
                epoch: 0,
                commit: vec![0],
                ordinal: vec![0],
                committed_at: vec![0],
                xid: vec![0],
            },
            ops: vec![op],
            rows: rows_of_text(from, &[self]),
            old_index: Vec::new(),
            old_rows: none(),
        };
        let projected = ChangeBatch::new(Arc::clone(from), rows).project(onto)?;
        Ok(TextRow::take(&projected.rows.rows, 0, onto))
    }
}

/// The rows as they cross to a plugin.
pub fn rows_of_text(schema: &TableSchema, rows: &[&TextRow]) -> wire::Rows {
    let columns = schema.columns.iter().filter_map(|column| {
        let mut builder = ColumnBuilder::new(column);
        for row in rows {
            match row.0.get(&column.ordinal) {
                Some(cell) => cell.append_to(&mut builder),
                None => {
                    builder.append_missing();
                }
            }
        }
        builder.finish()
    });
    wire::Rows { count: rows.len() as u32, columns: columns.collect() }
}

impl FromIterator<(u16, TextCell)> for TextRow {
    fn from_iter<I: IntoIterator<Item = (u16, TextCell)>>(cells: I) -> TextRow {
        TextRow(cells.into_iter().collect())
    }
}

/// A merge with the missing cells of some upserts, which need nothing of another key then;
/// without those of which there is nothing.
pub fn complete(
    merge: &wire::MergeRows,
    schema: &TableSchema,
    cells: &BTreeMap<u32, Option<TextRow>>,
) -> wire::MergeRows {
    let all = merge.upserts.count + merge.deletes.count;
    let kept: Vec<u32> = (0..all).filter(|row| !matches!(cells.get(row), Some(None))).collect();
    let mut made = pick_merge(merge, &kept);
    let cells_of = |at: u32| cells.get(kept.get(at as usize)?)?.as_ref();
    let rows: Vec<TextRow> = (0..made.upserts.count)
        .map(|at| {
            let cells = cells_of(at).cloned().unwrap_or_default();
            cells.patched(TextRow::take(&made.upserts, at, schema))
        })
        .collect();
    let moved: Vec<u32> =
        (0..).zip(&made.moved_index).filter(|(_, at)| cells_of(**at).is_none()).map(|(number, _)| number).collect();
    made.moved_index = moved.iter().filter_map(|number| made.moved_index.get(*number as usize).copied()).collect();
    made.moved_from = take_rows(&made.moved_from, &moved);
    made.upserts = rows_of_text(schema, &rows.iter().collect::<Vec<_>>());
    made
}

/// The key of a row of a set, as [`TextRow::key`] has it.
pub fn key_text(rows: &wire::Rows, row: u32, key: &[u16], schema: &TableSchema) -> String {
    let cells: Vec<Option<TextCell>> = key
        .iter()
        .map(|ordinal| find(rows, *ordinal).filter(|values| !is_missing(values, row)))
        .map(|values| Some(TextCell::take(values?, row, schema)))
        .collect();
    serde_json::to_string(&cells).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::super::testing::{array_column, column, key_column, schema};
    use super::*;
    use crate::schema::samples;
    use crate::schema::table::{Literal, ReplicaIdentity};

    fn sample() -> Arc<TableSchema> {
        schema(
            ReplicaIdentity::Default,
            vec![
                key_column(1, "int4", 1),
                column(2, "text"),
                column(3, "timestamptz"),
                column(4, "float8"),
                column(5, "bytea"),
                column(6, "numeric"),
                array_column(7, "int4"),
                column(8, "bool"),
                column(9, "date"),
                key_column(10, "uuid", 2),
            ],
        )
    }

    /// `NULL` is one, and `BYTES` stands for some that are not UTF-8.
    fn row(cells: &[(u16, &str)]) -> wire::Rows {
        let schema = sample();
        let columns = schema.columns.iter().filter_map(|column| {
            let mut builder = ColumnBuilder::new(column);
            match cells.iter().find(|(ordinal, _)| *ordinal == column.ordinal) {
                Some((_, "NULL")) => builder.append_null(),
                Some((_, "BYTES")) => builder.append(b"not \xff UTF-8"),
                Some((_, text)) => builder.append(text.as_bytes()),
                None => builder.append_missing(),
            };
            builder.finish()
        });
        wire::Rows { count: 1, columns: columns.collect() }
    }

    fn shown(rows: &wire::Rows) -> String {
        format!("{rows:?}")
    }

    #[test]
    fn a_row_comes_back_as_the_very_cells_it_was_taken_from() {
        let rows: [Vec<(u16, &str)>; 4] = [
            vec![
                (1, "-7"),
                (2, "caf\u{e9} \"x\"\n"),
                (3, "2026-01-02 03:04:05.6+00"),
                (4, "1e+300"),
                (5, "\\x00ff"),
                (6, "1.00"),
                (7, "{1,NULL,-3}"),
                (8, "t"),
                (9, "0044-03-15 BC"),
                (10, "00000000-0000-0000-0000-00000000000a"),
            ],
            // Odd ones, nulls and missing ones.
            vec![(1, "1"), (3, "infinity"), (4, "NaN"), (7, "[2:3]={1,2}"), (9, "infinity"), (2, "NULL")],
            vec![(2, "BYTES")],
            vec![(2, ""), (7, "{}"), (8, "f"), (6, "NaN")],
        ];
        for cells in rows {
            let wire = row(&cells);
            let taken = TextRow::take(&wire, 0, &sample());
            let kept: TextRow = serde_json::from_str(&serde_json::to_string(&taken).unwrap()).unwrap();
            assert_eq!(kept, taken);
            assert_eq!(shown(&rows_of_text(&sample(), &[&kept])), shown(&wire));
        }
    }

    #[test]
    fn a_key_is_told_apart_bytewise_and_in_its_own_order() {
        let key = [10, 6];
        let of = |number: &str| key_text(&row(&[(6, number), (10, "a-b")]), 0, &key, &sample());
        assert_eq!(of("1.0"), "[\"a-b\",\"1.0\"]");
        assert_ne!(of("1.0"), of("1.00"));
        assert_eq!(of("1.0"), TextRow::take(&row(&[(6, "1.0"), (10, "a-b")]), 0, &sample()).key(&key));
    }

    #[test]
    fn a_later_change_brings_its_cells_and_leaves_the_rest() {
        let whole = TextRow::take(&row(&[(1, "1"), (2, "before"), (4, "2")]), 0, &sample());
        let change = TextRow::take(&row(&[(1, "1"), (2, "NULL")]), 0, &sample());
        let patched = whole.patched(change);
        assert_eq!(serde_json::to_string(&patched).unwrap(), r#"{"1":"1","2":null,"4":"2"}"#);
        assert!(!patched.is_whole(&sample()));
    }

    #[test]
    fn a_row_of_an_older_version_becomes_one_of_the_newer() {
        let from = Arc::new(samples::table(vec![samples::column(1, "id", "int4"), samples::column(2, "gone", "text")]));
        let mut added = samples::column(3, "added", "int4");
        added.default_literal = Some(Literal { kind: "numeric".to_owned(), text: "5".to_owned() });
        let onto = Arc::new(samples::at(&samples::table(vec![samples::column(1, "id", "int8"), added]), 9, 0));
        let of = |json: &str| serde_json::from_str::<TextRow>(json).unwrap();
        assert_eq!(of(r#"{"1":"1","2":"x"}"#).project(&from, &onto).unwrap(), of(r#"{"1":"1","3":"5"}"#));
        // What was not sent of an older row is not known of the newer one either.
        assert_eq!(of(r#"{"1":"1"}"#).project(&from, &onto).unwrap(), of(r#"{"1":"1"}"#));
        let narrow = Arc::new(samples::at(&samples::table(vec![samples::column(1, "id", "uuid")]), 10, 0));
        assert_eq!(of(r#"{"1":"1"}"#).project(&from, &narrow).unwrap_err().code(), "schema.projection");
    }
}
