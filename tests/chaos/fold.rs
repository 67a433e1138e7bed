//! The log that the plugin `files` writes, folded by the rules of its README and by nothing
//! of the host's: what the tables are, and which changes it has.
//!
//! It is read on from where it was read before, for a long run's log is long.

use std::collections::HashMap;
use std::fs::File;
use std::io::{BufRead, BufReader, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use crate::Result;
use crate::sql::Row;

/// What is joined is told apart by what no text of these tables holds.
const BETWEEN: &str = "\u{1f}";
const NOTHING: &str = "\u{1e}";

type Position = (u64, u64, u64);

/// A log, as far as it was read.
pub struct Log {
    directory: PathBuf,
    /// Bytes of the manifest that were read.
    read: u64,
    tables: HashMap<String, Table>,
}

#[derive(Clone)]
struct Column {
    name: String,
    ordinal: u64,
    default: Option<String>,
}

#[derive(Default)]
struct Table {
    columns: Vec<Column>,
    key: Vec<usize>,
    /// By key, or by all cells where there is none: then a row may be there several times.
    rows: HashMap<String, Vec<Row>>,
    position: Option<Position>,
    copy: Option<(String, HashMap<String, Vec<Row>>)>,
    /// Numbers of the changes since the last look, and whether a copy came in between.
    changes: Vec<i64>,
    copied: bool,
}

/// What a table's log had since the last look.
pub struct Seen {
    pub changes: Vec<i64>,
    /// A copy replaced the table: changes before it may be missing.
    pub copied: bool,
}

impl Log {
    pub fn new(directory: PathBuf) -> Log {
        Log { directory, read: 0, tables: HashMap::new() }
    }

    /// Reads what is new.
    pub fn advance(&mut self) -> Result<()> {
        let path = self.directory.join("manifest.ndjson");
        let mut manifest = File::open(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        manifest.seek(SeekFrom::Start(self.read))?;
        let mut lines = BufReader::new(manifest);
        let mut line = String::new();
        loop {
            line.clear();
            let length = lines.read_line(&mut line)?;
            if !line.ends_with('\n') {
                return Ok(());
            }
            self.event(&line).map_err(|error| format!("{}, line at {}: {error}\n{line}", path.display(), self.read))?;
            self.read += length as u64;
        }
    }

    /// Rows of a table with these columns, in any order.
    pub fn rows(&self, table: &str, columns: &[String]) -> Result<Vec<String>> {
        let table = self.tables.get(table).ok_or_else(|| format!("the log has no table {table}"))?;
        let places: Vec<usize> = columns
            .iter()
            .map(|name| table.columns.iter().position(|column| column.name == *name))
            .collect::<Option<_>>()
            .ok_or_else(|| {
                let there: Vec<&str> = table.columns.iter().map(|column| column.name.as_str()).collect();
                format!("the log has columns {there:?}, wanted are {columns:?}")
            })?;
        Ok(table.rows.values().flatten().map(|row| join(places.iter().map(|place| row[*place].as_deref()))).collect())
    }

    /// The changes of a table since the last look.
    pub fn take(&mut self, table: &str) -> Seen {
        let Some(table) = self.tables.get_mut(table) else { return Seen { changes: Vec::new(), copied: false } };
        Seen { changes: std::mem::take(&mut table.changes), copied: std::mem::take(&mut table.copied) }
    }

    fn event(&mut self, line: &str) -> Result<()> {
        let event: Value = serde_json::from_str(line)?;
        let text = |name: &str| event[name].as_str().unwrap_or_default().to_owned();
        let kind = text("kind");
        if kind == "head" {
            return Ok(());
        }
        let table = self.tables.entry(text("table")).or_default();
        match kind.as_str() {
            "schema" => table.change(&event),
            "begin-copy" => {
                table.copy = Some((text("run"), HashMap::new()));
                Ok(())
            }
            "finish-copy" => table.finish_copy(&text("run")),
            "file" => {
                let run = event["run"].as_str();
                let current = table.copy.as_ref().map(|(run, _)| run.as_str());
                // Of a copy that was begun again.
                if run.is_some() && run != current {
                    return Ok(());
                }
                let path = self.directory.join(text("file"));
                match File::open(&path) {
                    Ok(file) => table.file(&path, file),
                    Err(error) if run.is_some() && error.kind() == std::io::ErrorKind::NotFound => Ok(()),
                    Err(error) => Err(format!("{}: {error}", path.display()).into()),
                }
            }
            "drop" => {
                *table = Table::default();
                Ok(())
            }
            other => Err(format!("an event of kind {other}").into()),
        }
    }
}

impl Table {
    fn change(&mut self, event: &Value) -> Result<()> {
        let columns: Vec<Column> = (event["columns"].as_array().into_iter().flatten())
            .filter_map(|column| {
                Some(Column {
                    name: column["name"].as_str()?.to_owned(),
                    ordinal: column["ordinal"].as_u64()?,
                    default: column["default"].as_str().map(str::to_owned),
                })
            })
            .collect();
        let from: Vec<Option<usize>> = columns
            .iter()
            .map(|column| self.columns.iter().position(|before| before.ordinal == column.ordinal))
            .collect();
        let key: Option<Vec<usize>> = (event["key"].as_array().into_iter().flatten())
            .map(|name| columns.iter().position(|column| Some(column.name.as_str()) == name.as_str()))
            .collect();
        self.key = key.ok_or("a key column that is no column")?;
        let old = std::mem::take(&mut self.rows);
        let of_copy = self.copy.take();
        let moved = |rows: HashMap<String, Vec<Row>>| -> Vec<Row> {
            let cells = |row: &Row| -> Row {
                columns
                    .iter()
                    .zip(&from)
                    .map(|(column, from)| from.map_or_else(|| column.default.clone(), |from| row[from].clone()))
                    .collect()
            };
            rows.values().flatten().map(cells).collect()
        };
        let (rows, of_copy) = (moved(old), of_copy.map(|(run, rows)| (run, moved(rows))));
        self.columns = columns;
        self.rows = self.keyed(rows);
        self.copy = of_copy.map(|(run, rows)| (run, self.keyed(rows)));
        Ok(())
    }

    fn keyed(&self, rows: Vec<Row>) -> HashMap<String, Vec<Row>> {
        let mut keyed: HashMap<String, Vec<Row>> = HashMap::new();
        for row in rows {
            keyed.entry(self.key_of(&row)).or_default().push(row);
        }
        keyed
    }

    fn finish_copy(&mut self, run: &str) -> Result<()> {
        match self.copy.take() {
            Some((current, rows)) if current == run => {
                self.rows = rows;
                self.copied = true;
                self.changes.clear();
                Ok(())
            }
            _ => Err(format!("copy {run} is finished, but was not begun").into()),
        }
    }

    fn file(&mut self, path: &Path, file: File) -> Result<()> {
        for (number, line) in BufReader::new(file).lines().enumerate() {
            let row: Map<String, Value> = serde_json::from_str(&line?)?;
            self.apply(row).map_err(|error| format!("{}, line {}: {error}", path.display(), number + 1))?;
        }
        Ok(())
    }

    fn apply(&mut self, row: Map<String, Value>) -> Result<()> {
        let operation = row.get("_tg_op").and_then(Value::as_str).ok_or("a row without an operation")?.to_owned();
        if operation == "copy" {
            let cells = self.cells(&row, None)?;
            let key = self.key_of(&cells);
            let copy = &mut self.copy.as_mut().ok_or("a row of a copy that was not begun")?.1;
            let same = copy.entry(key).or_default();
            if !self.key.is_empty() && !same.is_empty() {
                return Err(format!("a copy has the key of {cells:?} twice").into());
            }
            same.push(cells);
            return Ok(());
        }
        let position = position(&row).ok_or("a row without a position")?;
        if self.position.is_some_and(|last| position <= last) {
            // It came twice, which this plugin may do.
            return Ok(());
        }
        self.position = Some(position);
        let old_key = row.get("_tg_old_key").filter(|old| !old.is_null());
        let old_key = match old_key {
            Some(Value::Object(old)) => Some(old.clone()),
            Some(Value::String(text)) => Some(serde_json::from_str(text)?),
            _ => None,
        };
        match operation.as_str() {
            "truncate" => self.rows.clear(),
            "delete" => {
                let key = self.named(&row)?;
                self.take(&key).ok_or_else(|| format!("a delete of a row that is not there: {row:?}"))?;
            }
            "insert" | "update" => {
                let before = match (operation.as_str(), &old_key) {
                    ("update", Some(old)) => self.take(&self.named(old)?),
                    ("update", None) => self.take(&self.named(&row)?),
                    _ => None,
                };
                if operation == "update" && before.is_none() {
                    return Err(format!("an update of a row that is not there: {row:?}").into());
                }
                let cells = self.cells(&row, before.as_ref())?;
                self.note_change(&cells, before.as_ref())?;
                let key = self.key_of(&cells);
                let same = self.rows.entry(key).or_default();
                if !self.key.is_empty() && !same.is_empty() {
                    return Err(format!("an {operation} of a key that is there already: {row:?}").into());
                }
                same.push(cells);
            }
            other => return Err(format!("an operation {other}").into()),
        }
        Ok(())
    }

    fn note_change(&mut self, cells: &Row, before: Option<&Row>) -> Result<()> {
        let place = self.columns.iter().position(|column| column.name == "change").ok_or("no column change")?;
        let number = |row: &Row| row[place].as_deref().and_then(|text| text.parse::<i64>().ok());
        let change = number(cells).ok_or("a change without a number")?;
        if before.and_then(number).is_some_and(|before| before >= change) {
            return Err(format!("change {change} came after {before:?}").into());
        }
        self.changes.push(change);
        Ok(())
    }

    fn take(&mut self, key: &str) -> Option<Row> {
        let same = self.rows.get_mut(key)?;
        let row = same.pop();
        if same.is_empty() {
            self.rows.remove(key);
        }
        row
    }

    fn cells(&self, row: &Map<String, Value>, before: Option<&Row>) -> Result<Row> {
        let cell = |(index, column): (usize, &Column)| -> Result<Option<String>> {
            match (row.get(&column.name), before) {
                (Some(value), _) => Ok(cell(value)),
                (None, Some(before)) => Ok(before[index].clone()),
                (None, None) => Err(format!("column {} was not sent: {row:?}", column.name).into()),
            }
        };
        self.columns.iter().enumerate().map(cell).collect()
    }

    fn key_of(&self, cells: &Row) -> String {
        match self.key.is_empty() {
            true => join(cells.iter().map(Option::as_deref)),
            false => join(self.key.iter().map(|&index| cells[index].as_deref())),
        }
    }

    /// The key that the columns of `row` have by name.
    fn named(&self, row: &Map<String, Value>) -> Result<String> {
        let all: Vec<usize> = (0..self.columns.len()).collect();
        let places = if self.key.is_empty() { &all } else { &self.key };
        let mut parts = Vec::with_capacity(places.len());
        for &index in places {
            let name = &self.columns[index].name;
            parts.push(cell(row.get(name).ok_or_else(|| format!("column {name} was not sent: {row:?}"))?));
        }
        Ok(join(parts.iter().map(Option::as_deref)))
    }
}

/// Cells as one text.
pub fn join<'a>(cells: impl Iterator<Item = Option<&'a str>>) -> String {
    cells.map(|cell| cell.unwrap_or(NOTHING)).collect::<Vec<_>>().join(BETWEEN)
}

fn position(row: &Map<String, Value>) -> Option<Position> {
    let number = |name: &str| match row.get(name)? {
        Value::String(text) => text.parse().ok(),
        other => other.as_u64(),
    };
    Some((number("_tg_epoch")?, number("_tg_commit")?, number("_tg_ordinal")?))
}

fn cell(value: &Value) -> Option<String> {
    match value {
        Value::Null => None,
        Value::String(text) => Some(text.clone()),
        other => Some(other.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SCHEMA: &str = r#"{"kind":"schema","table":"t","key":["id"],"columns":[{"name":"id","ordinal":1},{"name":"change","ordinal":2},{"name":"big","ordinal":3},{"name":"_tg_op"}]}"#;
    const COPY: [&str; 3] = [
        r#"{"kind":"begin-copy","table":"t","run":"r"}"#,
        r#"{"kind":"file","table":"t","file":"copy","run":"r"}"#,
        r#"{"kind":"finish-copy","table":"t","run":"r","as_of":{}}"#,
    ];
    const FILE: &str = r#"{"kind":"file","table":"t","file":"rows"}"#;

    fn log(rows: &[&str]) -> (tempfile::TempDir, Log) {
        let directory = tempfile::tempdir().unwrap();
        let lines = |lines: &[&str]| lines.iter().map(|line| format!("{line}\n")).collect::<String>();
        let write = |name: &str, text: String| std::fs::write(directory.path().join(name), text).unwrap();
        write("manifest.ndjson", lines(&[&[SCHEMA][..], &COPY, &[FILE]].concat()));
        write("copy", lines(&[r#"{"id":"1","change":"5","big":"large","_tg_op":"copy"}"#]));
        write("rows", lines(rows));
        let log = Log::new(directory.path().to_owned());
        (directory, log)
    }

    fn row(ordinal: u64, operation: &str, cells: &str) -> String {
        format!(r#"{{{cells},"_tg_op":"{operation}","_tg_epoch":0,"_tg_commit":"9","_tg_ordinal":"{ordinal}"}}"#)
    }

    #[test]
    fn a_key_moves_with_its_large_value_and_what_comes_twice_counts_once() {
        let moved = row(1, "update", r#""id":"2","change":"6","_tg_old_key":{"id":"1"}"#);
        let (_directory, mut log) = log(&[&moved, &moved, &row(2, "insert", r#""id":"1","change":"7","big":null"#)]);
        log.advance().unwrap();
        let mut rows = log.rows("t", &["id".to_owned(), "big".to_owned()]).unwrap();
        rows.sort();
        assert_eq!(rows, ["1\u{1f}\u{1e}", "2\u{1f}large"]);
        let seen = log.take("t");
        assert_eq!((seen.changes, seen.copied), (vec![6, 7], true));
    }

    #[test]
    fn what_does_not_follow_from_what_was_there_is_an_error() {
        for wrong in [
            row(1, "update", r#""id":"3","change":"6","big":"x""#),
            row(1, "delete", r#""id":"3""#),
            row(1, "insert", r#""id":"1","change":"6","big":"x""#),
            row(1, "update", r#""id":"1","change":"5""#),
        ] {
            let (_directory, mut log) = log(&[&wrong]);
            assert!(log.advance().is_err(), "{wrong}");
        }
    }
}
