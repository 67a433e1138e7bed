//! A batch as JSON lines.
//!
//! int2, int4 and finite floats are JSON numbers, bool is JSON's; all else is the text
//! PostgreSQL prints, for many readers hold a number in 53 bits. Arrays are arrays of
//! the same. A cell that was not sent is left out.

use std::io::Write;

use serde_json::{Map, Value, json};
use tidegate_sdk::model::Column;
use tidegate_sdk::rows::{Cell, ColumnView, Kind};
use tidegate_sdk::text;

use crate::changes::Changes;
use crate::physical::Layout;

/// Appends one line for each row. An error says how the batch breaks the contract.
pub(crate) fn lines(changes: &Changes, layout: &Layout) -> Result<Vec<u8>, String> {
    changes.check()?;
    let columns: Vec<(&Column, Kind, ColumnView<'_>)> = layout
        .table
        .columns
        .iter()
        .map(|column| (column, column.kind(), changes.rows.column(column.ordinal)))
        .collect();
    let mut line = Line { out: Vec::with_capacity(changes.rows.bytes() * 2), scratch: String::new(), first: true };
    for row in 0..changes.len() {
        line.begin();
        let mut missing = Vec::new();
        let mut odd = Map::new();
        for (column, kind, view) in &columns {
            match view.cell(row) {
                Cell::Missing => missing.push(column.name.as_str()),
                Cell::Odd { kind: "text", text } => line.member(&column.name, text),
                Cell::Odd { kind, text } => {
                    line.name(&column.name);
                    line.out.extend_from_slice(b"null");
                    odd.insert(column.name.clone(), json!({ kind: text }));
                }
                cell => {
                    line.name(&column.name);
                    line.cell(cell, *kind);
                }
            }
        }
        let missing = if changes.lists_missing() { missing } else { Vec::new() };
        own_members(changes, row, missing, odd, &mut line);
        line.end();
    }
    Ok(line.out)
}

fn own_members(changes: &Changes, row: usize, missing: Vec<&str>, odd: Map<String, Value>, line: &mut Line) {
    line.member("_tg_op", changes.ops.of(row));
    line.json("_tg_epoch", &json!(changes.epoch));
    line.member("_tg_commit", &changes.commit[row].to_string());
    line.member("_tg_ordinal", &changes.ordinal[row].to_string());
    if let Some((times, xids)) = &changes.origin {
        let mut time = String::new();
        text::timestamp(times[row], "+00", &mut time);
        line.member("_tg_committed_at", &time);
        line.json("_tg_xid", &json!(xids[row]));
    }
    if !missing.is_empty() {
        line.json("_tg_missing", &json!(missing));
    }
    if let Some(key) = changes.old_keys.get(&row) {
        line.name("_tg_old_key");
        line.out.extend_from_slice(key.as_bytes());
    }
    if !odd.is_empty() {
        line.json("_tg_odd", &Value::Object(odd));
    }
}

struct Line {
    out: Vec<u8>,
    scratch: String,
    first: bool,
}

/// Writing to a `Vec` cannot fail.
impl Line {
    fn begin(&mut self) {
        self.out.push(b'{');
        self.first = true;
    }

    fn end(&mut self) {
        self.out.extend_from_slice(b"}\n");
    }

    fn string(&mut self, text: &str) {
        let _ = serde_json::to_writer(&mut self.out, text);
    }

    fn name(&mut self, name: &str) {
        if !std::mem::replace(&mut self.first, false) {
            self.out.push(b',');
        }
        self.string(name);
        self.out.push(b':');
    }

    fn member(&mut self, name: &str, text: &str) {
        self.name(name);
        self.string(text);
    }

    fn json(&mut self, name: &str, value: &Value) {
        self.name(name);
        let _ = write!(self.out, "{value}");
    }

    fn cell(&mut self, cell: Cell<'_>, kind: Kind) {
        match cell {
            Cell::Null | Cell::Missing => self.out.extend_from_slice(b"null"),
            Cell::Bool(value) => self.out.extend_from_slice(if value { b"true" } else { b"false" }),
            Cell::Int16(_) => self.text(cell, kind, false),
            Cell::Int32(_) => self.text(cell, kind, kind != Kind::Int4),
            Cell::Float32(value) => self.text(cell, kind, !value.is_finite()),
            Cell::Float64(value) => self.text(cell, kind, !value.is_finite()),
            Cell::Text(text) => self.string(text),
            Cell::List(list) => {
                self.out.push(b'[');
                for (index, element) in list.cells().enumerate() {
                    if index > 0 {
                        self.out.push(b',');
                    }
                    self.cell(element, kind);
                }
                self.out.push(b']');
            }
            other => self.text(other, kind, true),
        }
    }

    fn text(&mut self, cell: Cell<'_>, kind: Kind, quoted: bool) {
        let mut text = std::mem::take(&mut self.scratch);
        text.clear();
        cell.write_text(kind, &mut text);
        if quoted {
            self.string(&text);
        } else {
            self.out.extend_from_slice(text.as_bytes());
        }
        self.scratch = text;
    }
}
