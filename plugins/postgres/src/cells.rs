//! Cells of a batch, by the target's columns, as PostgreSQL's text: quoted in a
//! statement, or escaped in a line of COPY.

use std::cell::RefCell;

use bytes::{BufMut, BytesMut};
use tidegate_sdk::model::{Failure, Rows};
use tidegate_sdk::rows::{Cell, ColumnView};

use crate::error::{of_rows, of_table};
use crate::sql;
use crate::target::Target;
use crate::transaction::Origin;

/// What a cell is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// The source did not send it.
    Missing,
    /// NULL.
    Null,
    /// Something with a text.
    Value,
}

/// Rows, seen by the columns of a target.
pub struct Cells<'a> {
    target: &'a Target,
    /// One for each of the target's columns.
    columns: Vec<ColumnView<'a>>,
    count: u32,
    /// Text of the cell at hand, so that no cell allocates one.
    text: RefCell<String>,
}

impl<'a> Cells<'a> {
    /// Fails if there is a column that the target does not have.
    pub fn new(rows: &'a Rows, target: &'a Target) -> Result<Cells<'a>, Failure> {
        for values in &rows.columns {
            if !target.columns.iter().any(|column| column.ordinal == values.ordinal) {
                let message = format!(
                    "{}: rows with a column (ordinal {}) that the attached version does not have",
                    target.shown(),
                    values.ordinal
                );
                return Err(of_table(target.id, "postgres.contract", message));
            }
        }
        let columns = target.columns.iter().map(|column| rows.column(column.ordinal)).collect();
        Ok(Cells { target, columns, count: rows.count, text: RefCell::default() })
    }

    /// How many rows there are.
    pub fn count(&self) -> u32 {
        self.count
    }

    /// Whether any cell of the column was sent.
    pub fn is_sent(&self, column: usize) -> bool {
        self.columns[column].values().is_some()
    }

    /// Whether any cell at all is missing.
    pub fn has_missing(&self) -> bool {
        self.columns.iter().any(|column| column.missing() > 0)
    }

    /// What the cell is.
    pub fn state(&self, column: usize, row: u32) -> State {
        let view = &self.columns[column];
        if view.is_missing(row as usize) {
            State::Missing
        } else if view.is_null(row as usize) {
            State::Null
        } else {
            State::Value
        }
    }

    /// Appends the cell as COPY's text format has it. `number` names its row in a refusal.
    pub fn push_copy(
        &self,
        out: &mut BytesMut,
        column: usize,
        row: u32,
        origin: Origin,
        number: u32,
    ) -> Result<(), Failure> {
        self.with_text(column, row, origin, number, |text| match text {
            None => out.put_slice(b"\\N"),
            Some(text) => escape(out, text),
        })
    }

    /// Appends the cell as a constant.
    pub fn push_literal(
        &self,
        out: &mut String,
        column: usize,
        row: u32,
        origin: Origin,
        number: u32,
    ) -> Result<(), Failure> {
        self.with_text(column, row, origin, number, |text| match text {
            None => out.push_str("NULL"),
            Some(text) => sql::push_literal(out, text),
        })
    }

    fn with_text(
        &self,
        column: usize,
        row: u32,
        origin: Origin,
        number: u32,
        put: impl FnOnce(Option<&str>),
    ) -> Result<(), Failure> {
        let cell = self.columns[column].cell(row as usize);
        let named = &self.target.columns[column];
        match cell {
            Cell::Null => put(None),
            Cell::Text(text) => put(Some(text)),
            Cell::Missing => {
                let message =
                    format!("{}: column {} is missing in a row that must be whole", self.target.shown(), named.name);
                return Err(of_table(self.target.id, "postgres.contract", message));
            }
            Cell::Odd { kind: "text", text } => put(Some(text)),
            Cell::Odd { kind, .. } => {
                let message = format!(
                    "{}: column {} holds a value that UTF-8 cannot write (kind {kind})",
                    self.target.shown(),
                    named.name
                );
                let refusal = origin.refusal(number, Some(named.ordinal), "postgres.not-utf8", &message);
                return Err(of_rows("postgres.not-utf8", message, vec![refusal]));
            }
            cell => {
                let mut text = self.text.borrow_mut();
                text.clear();
                if named.source.delimiter() == ',' {
                    cell.write_text(named.kind, &mut text);
                } else {
                    cell.write_as(&named.source, &mut text);
                }
                put(Some(&text));
            }
        }
        Ok(())
    }
}

/// Appends text with what COPY takes for its own escaped.
fn escape(out: &mut BytesMut, text: &str) {
    let mut start = 0;
    for (index, byte) in text.bytes().enumerate() {
        let escaped: &[u8] = match byte {
            b'\\' => b"\\\\",
            b'\t' => b"\\t",
            b'\n' => b"\\n",
            b'\r' => b"\\r",
            _ => continue,
        };
        out.put_slice(&text.as_bytes()[start..index]);
        out.put_slice(escaped);
        start = index + 1;
    }
    out.put_slice(&text.as_bytes()[start..]);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copy_escapes_its_own_signs_only() {
        let mut out = BytesMut::new();
        escape(&mut out, "a\tb\\N\n\r\u{b}é");
        assert_eq!(&out[..], "a\\tb\\\\N\\n\\r\u{b}é".as_bytes());
    }
}
