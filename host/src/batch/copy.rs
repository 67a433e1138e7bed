//! Rows of `COPY … TO STDOUT` in text format, read straight into columns.

use std::sync::Arc;

use super::change::finish_rows;
use super::column::ColumnBuilder;
use crate::error::{Error, Result};
use crate::schema::table::{TableSchema, quote_identifier};
use crate::wire;

/// As for batches of changes: what a line adds beyond this still fits 32 bits.
const FULL_BYTES: usize = 1 << 30;

/// The published columns, quoted, as they have to stand in the COPY command or its
/// SELECT: `"id", "Name"`.
pub fn column_list(schema: &TableSchema) -> String {
    let names: Vec<String> = schema.columns.iter().map(|column| quote_identifier(&column.name)).collect();
    names.join(", ")
}

/// Builds rows of a copy.
///
/// A line that is refused with an error leaves nothing behind; the lines before it stay.
pub struct CopyBuilder {
    schema: Arc<TableSchema>,
    columns: Vec<ColumnBuilder>,
    rows: u32,
    bytes: usize,
    scratch: Vec<u8>,
}

impl CopyBuilder {
    /// An empty builder; lines have the columns of [`column_list`].
    pub fn new(schema: Arc<TableSchema>) -> CopyBuilder {
        let columns = schema.columns.iter().map(ColumnBuilder::new).collect();
        CopyBuilder { columns, rows: 0, bytes: 0, scratch: Vec::new(), schema }
    }

    /// Bytes that the rows so far take in memory, about.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Rows so far.
    pub fn rows(&self) -> u32 {
        self.rows
    }

    /// Whether it must be finished before another line.
    pub fn is_full(&self) -> bool {
        self.bytes >= FULL_BYTES || self.rows >= i32::MAX as u32
    }

    /// Appends whole lines, with their newlines: any number in one call.
    ///
    /// Errors: `copy.columns` and `copy.partial-line` for what is not a line of this
    /// table, `batch.full`.
    pub fn push(&mut self, lines: &[u8]) -> Result<()> {
        if self.is_full() {
            return Err(Error::permanent(
                "batch.full",
                format!("the open copy batch of {} has {} bytes and takes no more rows", self.schema.name, self.bytes),
            )
            .next("Report this as a bug: a batch has to be closed before it is full"));
        }
        if self.rows == 0 {
            self.columns.iter_mut().for_each(ColumnBuilder::reserve_as_last_time);
        }
        let pushed = self.read_lines(lines);
        if pushed.is_err() {
            let rows = self.rows as usize;
            self.columns.iter_mut().for_each(|column| column.truncate(rows));
        }
        pushed
    }

    fn read_lines(&mut self, lines: &[u8]) -> Result<()> {
        let (mut start, mut column, mut escaped, mut behind_escape) = (0, 0, false, 0);
        for at in memchr::memchr3_iter(b'\t', b'\n', b'\\', lines) {
            // The byte behind a backslash is part of the escape, whatever it is.
            if at < behind_escape {
                continue;
            }
            if lines[at] == b'\\' {
                (escaped, behind_escape) = (true, at + 2);
                continue;
            }
            let field = &lines[start..at];
            let ends_line = lines[at] == b'\n';
            start = at + 1;
            if column == 0 && ends_line && (field == b"\\." || (field.is_empty() && self.columns.is_empty())) {
                // The end mark of protocol 2, or a row of a table without columns.
                self.rows += u32::from(field.is_empty());
                escaped = false;
                continue;
            }
            let Some(builder) = self.columns.get_mut(column) else { return Err(self.other_columns(column + 1)) };
            self.bytes += append_field(builder, field, escaped, &mut self.scratch);
            (column, escaped) = (column + 1, false);
            if ends_line {
                if column != self.columns.len() {
                    return Err(self.other_columns(column));
                }
                self.rows += 1;
                column = 0;
            }
        }
        if start == lines.len() && column == 0 {
            return Ok(());
        }
        Err(Error::transient(
            "copy.partial-line",
            format!("the server sent a part of a line while {} was copied", self.schema.name),
        )
        .next("Report this as a bug if it comes again"))
    }

    #[cold]
    fn other_columns(&self, columns: usize) -> Error {
        Error::permanent(
            "copy.columns",
            format!(
                "a line of the copy of {} has {columns} columns or more, its schema {}",
                self.schema.name,
                self.schema.columns.len()
            ),
        )
        .next("Begin the copy of this table again: its columns have changed")
    }

    /// The rows, and an empty builder again, which will start at the size this one had.
    pub fn finish(&mut self) -> wire::Rows {
        self.bytes = 0;
        let count = std::mem::take(&mut self.rows);
        finish_rows(&mut self.columns, count)
    }
}

/// The key of the row that a line begins with, if the whole of it is in the beginning.
pub fn key_of_line(schema: &TableSchema, beginning: &[u8]) -> Option<String> {
    let mut fields: Vec<&[u8]> = beginning.split(|byte| *byte == b'\t').collect();
    // It is cut off somewhere.
    fields.pop();
    let mut scratch = Vec::new();
    key_text_of(schema, |index| {
        unescape(fields.get(index)?, &mut scratch);
        Some(String::from_utf8_lossy(&scratch).into_owned())
    })
}

/// The cells of a table's key, for a person; none if one of them is not known.
pub(super) fn key_text_of(schema: &TableSchema, mut cell: impl FnMut(usize) -> Option<String>) -> Option<String> {
    const MOST_CHARS: usize = 100;
    let key = schema.merge_key();
    let cells = key.iter().map(|ordinal| {
        let (index, _) = schema.column(*ordinal)?;
        let text = cell(index)?;
        Some(match text.char_indices().nth(MOST_CHARS) {
            Some((end, _)) => format!("{}…", &text[..end]),
            None => text,
        })
    });
    let cells: Vec<String> = cells.collect::<Option<_>>()?;
    (!cells.is_empty()).then(|| format!("({})", cells.join(", ")))
}

#[inline]
fn append_field(builder: &mut ColumnBuilder, field: &[u8], escaped: bool, scratch: &mut Vec<u8>) -> usize {
    if !escaped {
        return builder.append(field);
    }
    match field {
        b"\\N" => builder.append_null(),
        // bytea in hex is the common case of a backslash: no copy for it.
        [b'\\', b'\\', rest @ ..] if memchr::memchr(b'\\', rest).is_none() => builder.append(&field[1..]),
        _ => {
            unescape(field, scratch);
            builder.append(scratch)
        }
    }
}

/// Takes the backslashes out of a field (COPY, "Text Format").
fn unescape(field: &[u8], out: &mut Vec<u8>) {
    out.clear();
    let mut rest = field;
    while let Some(at) = memchr::memchr(b'\\', rest) {
        out.extend_from_slice(&rest[..at]);
        let (byte, length) = escape(&rest[at + 1..]);
        out.push(byte);
        rest = rest.get(at + 1 + length..).unwrap_or_default();
    }
    out.extend_from_slice(rest);
}

/// The byte that an escape stands for, and how long it is behind its backslash.
fn escape(text: &[u8]) -> (u8, usize) {
    let digits = |from: &[u8], radix: u32, most: usize| {
        let digit = |byte: &u8| char::from(*byte).to_digit(radix);
        let digits = from.iter().take(most).map_while(digit);
        let (value, length) = digits.fold((0u32, 0), |(value, length), digit| (value * radix + digit, length + 1));
        // Only the low byte counts, as in the server.
        (value as u8, length)
    };
    match text {
        [b'b', ..] => (8, 1),
        [b't', ..] => (b'\t', 1),
        [b'n', ..] => (b'\n', 1),
        [b'v', ..] => (11, 1),
        [b'f', ..] => (12, 1),
        [b'r', ..] => (b'\r', 1),
        [b'0'..=b'7', ..] => digits(text, 8, 3),
        [b'x', hex @ ..] => match digits(hex, 16, 2) {
            (_, 0) => (b'x', 1),
            (value, length) => (value, length + 1),
        },
        [byte, ..] => (*byte, 1),
        // The server never ends a field so; a lone backslash is itself.
        [] => (b'\\', 0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::batch::gather::rows_bytes;
    use crate::batch::testing::{column, schema};
    use crate::schema::table::{Column, ReplicaIdentity};

    fn builder(bases: &[&str]) -> CopyBuilder {
        let columns = bases.iter().enumerate().map(|(index, base)| column(index as u16 + 1, base)).collect();
        CopyBuilder::new(schema(ReplicaIdentity::Default, columns))
    }

    fn texts(rows: &wire::Rows, column: usize) -> Vec<Option<Vec<u8>>> {
        let values = &rows.columns[column];
        let wire::ColumnData::Plain(wire::Cells::Utf8(array) | wire::Cells::Binary(array)) = &values.data else {
            panic!("neither text nor binary")
        };
        let cell = |row| {
            (!crate::batch::gather::is_null(values, row)).then(|| crate::batch::gather::bytes_of(array, row).to_vec())
        };
        (0..rows.count).map(cell).collect()
    }

    #[test]
    fn a_backslash_n_alone_is_null_and_escaped_it_is_a_text() {
        let mut copy = builder(&["text", "text"]);
        copy.push(b"\\N\t\\\\N\n\t\\\\\\\\N\n").unwrap();
        copy.push(b"N\tx\n").unwrap();
        let rows = copy.finish();
        assert_eq!(texts(&rows, 0), [None, Some(b"".to_vec()), Some(b"N".to_vec())]);
        assert_eq!(texts(&rows, 1), [Some(b"\\N".to_vec()), Some(b"\\\\N".to_vec()), Some(b"x".to_vec())]);
    }

    #[test]
    fn every_escape_of_the_text_format_is_read() {
        let mut copy = builder(&["text"]);
        copy.push(b"\\b\\f\\n\\r\\t\\v\\\\|\\q\\101\\x41\\7\\x\n").unwrap();
        copy.push(b"a\\tb\\\\\\nc\n").unwrap();
        copy.push(b"a\\\tb\\\nc\n").unwrap();
        let rows = copy.finish();
        assert_eq!(texts(&rows, 0)[0], Some(b"\x08\x0c\n\r\t\x0b\\|qAA\x07x".to_vec()));
        assert_eq!(texts(&rows, 0)[1], Some(b"a\tb\\\nc".to_vec()));
        assert_eq!(texts(&rows, 0)[2], Some(b"a\tb\nc".to_vec()));
    }

    #[test]
    fn bytea_is_read_behind_its_escaped_backslash() {
        let mut copy = builder(&["bytea", "int4"]);
        copy.push(b"\\\\x00ff0a\t1\n\\\\x\t\\N\n").unwrap();
        let rows = copy.finish();
        assert_eq!(texts(&rows, 0), [Some(vec![0, 255, 10]), Some(vec![])]);
    }

    #[test]
    fn the_end_mark_is_no_row_and_an_escaped_one_is_a_text() {
        let mut copy = builder(&["text"]);
        copy.push(b"\\\\.\n\\.\n").unwrap();
        let rows = copy.finish();
        assert_eq!(texts(&rows, 0), [Some(b"\\.".to_vec())]);
    }

    #[test]
    fn a_table_without_columns_still_has_rows() {
        let mut copy = builder(&[]);
        copy.push(b"\n\n").unwrap();
        let rows = copy.finish();
        assert_eq!((rows.count, rows.columns.len()), (2, 0));
    }

    #[test]
    fn a_line_of_other_columns_is_an_error_and_leaves_no_cell_behind() {
        let mut copy = builder(&["int4", "int4"]);
        copy.push(b"1\t2\n").unwrap();
        assert_eq!(copy.push(b"3\n").unwrap_err().code(), "copy.columns");
        assert_eq!(copy.push(b"3\t4\t5\n").unwrap_err().code(), "copy.columns");
        assert_eq!(copy.push(b"3\t4").unwrap_err().code(), "copy.partial-line");
        assert_eq!(copy.push(b"3\t4\\\n").unwrap_err().code(), "copy.partial-line");
        copy.push(b"5\t6\n").unwrap();
        let rows = copy.finish();
        assert_eq!(rows.count, 2);
        for (values, expected) in rows.columns.iter().zip([[1, 5], [2, 6]]) {
            assert!(matches!(&values.data, wire::ColumnData::Plain(wire::Cells::Int32(cells)) if *cells == expected));
        }
    }

    #[test]
    fn bytes_are_about_what_the_rows_take_when_finished() {
        let mut copy = builder(&["int8", "text", "uuid"]);
        for row in 0..1_000 {
            copy.push(format!("{row}\tsome text of row {row}\t00112233-4455-6677-8899-aabbccddeeff\n").as_bytes())
                .unwrap();
        }
        let counted = copy.bytes() as f64;
        let taken = rows_bytes(&copy.finish()) as f64;
        assert!((counted / taken - 1.0).abs() < 0.01, "{counted} against {taken}");
        assert_eq!((copy.bytes(), copy.rows()), (0, 0));
    }

    #[test]
    fn the_key_of_a_line_is_known_if_it_stands_in_what_was_read_of_it() {
        let mut columns = vec![column(1, "int4"), column(2, "text"), column(3, "text")];
        columns[1].key_position = Some(1);
        columns[1].identity = true;
        let schema = schema(ReplicaIdentity::Default, columns);
        assert_eq!(key_of_line(&schema, b"1\ta\\tb\txxxx").as_deref(), Some("(a\tb)"));
        assert_eq!(key_of_line(&schema, b"1\tab"), None, "it may go on");
    }

    #[test]
    fn the_column_list_quotes_every_name() {
        let names = ["id", "Two Words", "a\"b"];
        let columns = names.iter().enumerate();
        let columns = columns.map(|(at, name)| Column { name: (*name).to_owned(), ..column(at as u16 + 1, "int4") });
        let schema = schema(ReplicaIdentity::Default, columns.collect());
        assert_eq!(column_list(&schema), r#""id", "Two Words", "a""b""#);
    }
}
