//! The log that the plugin `files` wrote, folded to what the tables are now: what a
//! reader of the files would do. The format is in `plugins/files/README.md`.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};

use bytes::{Bytes, BytesMut};
use futures_util::SinkExt;
use serde::Deserialize;
use serde_json::{Map, Value};
use tokio_postgres::{Client, CopyInSink};

use super::compare::Column;
use super::shop::{run, sql_error};
use crate::error::{Error, Result};
use crate::schema::table::{TableName, quote_identifier};

/// Bytes of COPY data that are sent at a time.
const CHUNK: usize = 64 * 1024;

/// A line of the manifest, as far as folding needs it.
#[derive(Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
enum Event {
    Schema {
        table: String,
        key: Vec<String>,
        columns: Vec<LoggedColumn>,
    },
    BeginCopy {
        table: String,
        run: String,
    },
    FinishCopy {
        table: String,
        run: String,
        as_of: LoggedPosition,
    },
    File {
        table: String,
        file: String,
        run: Option<String>,
    },
    Drop {
        table: String,
    },
    #[serde(other)]
    Other,
}

#[derive(Clone, Deserialize)]
struct LoggedColumn {
    name: String,
    /// None for the log's own columns.
    ordinal: Option<u16>,
    default: Option<String>,
}

#[derive(Deserialize)]
struct LoggedPosition {
    epoch: u32,
    commit: String,
    ordinal: String,
}

type Position = (u32, u64, u64);
/// A row's cells as text, in the order of the table's columns.
type Row = Vec<Option<Box<str>>>;

/// A table as the log has told it so far.
#[derive(Default)]
struct Table {
    columns: Vec<LoggedColumn>,
    /// Indexes of the columns that name a row.
    key: Vec<usize>,
    rows: HashMap<String, Row>,
    /// Of the last change that was folded; what is not beyond it was sent twice.
    position: Option<Position>,
    /// A copy under way: it replaces everything once it is finished.
    copy: Option<(String, HashMap<String, Row>)>,
}

/// Folds the log in a directory and loads what comes of it into tables of these columns.
pub(super) async fn load(directory: &Path, client: &Client, columns: &BTreeMap<TableName, Vec<Column>>) -> Result<()> {
    let directory = directory.to_owned();
    let folded = tokio::task::spawn_blocking(move || fold(&directory));
    let folded = folded.await.map_err(|error| Error::permanent("demo.fold", format!("folding failed: {error}")))??;
    for (name, columns) in columns {
        let declared: Vec<String> =
            columns.iter().map(|column| format!("{} {}", quote_identifier(&column.name), column.declared)).collect();
        let sql = format!("CREATE TABLE {} ({})", name.quoted(), declared.join(", "));
        run(client, "create a table for the folded log", &sql).await?;
        // One that is not in the log stays empty, and differs.
        if let Some(table) = folded.get(&name.to_string()) {
            table.copy_into(client, name).await?;
        }
    }
    Ok(())
}

fn fold(directory: &Path) -> Result<BTreeMap<String, Table>> {
    let mut tables: BTreeMap<String, Table> = BTreeMap::new();
    let manifest = directory.join("manifest.ndjson");
    for_each_line(&manifest, |line| {
        let event: Event = serde_json::from_slice(line).map_err(|error| broken(&manifest, &error))?;
        match event {
            Event::Schema { table, key, columns } => {
                tables.entry(table).or_default().change(&key, columns).map_err(|why| broken(&manifest, &why))?;
            }
            Event::BeginCopy { table, run } => tables.entry(table).or_default().copy = Some((run, HashMap::new())),
            Event::FinishCopy { table, run, as_of } => {
                let as_of = as_of.position().ok_or_else(|| broken(&manifest, &"a position is no number"))?;
                tables.entry(table).or_default().finish_copy(&run, as_of).map_err(|why| broken(&manifest, &why))?;
            }
            Event::File { table, file, run } => {
                let path = directory.join(file);
                read_file(tables.entry(table).or_default(), &path, run.as_deref())?;
            }
            Event::Drop { table } => drop(tables.remove(&table)),
            Event::Other => {}
        }
        Ok(())
    })?;
    Ok(tables)
}

fn read_file(table: &mut Table, path: &PathBuf, run: Option<&str>) -> Result<()> {
    // Of a copy that was begun again: its files are gone, and nothing of it counts.
    if run.is_some() && !table.copy.as_ref().is_some_and(|(current, _)| Some(current.as_str()) == run) {
        return Ok(());
    }
    if run.is_some() && !path.exists() {
        return Ok(());
    }
    for_each_line(path, |line| {
        let row: Map<String, Value> = serde_json::from_slice(line).map_err(|error| broken(path, &error))?;
        table.apply(row).map_err(|why| broken(path, &why))
    })
}

fn for_each_line(path: &Path, mut each: impl FnMut(&[u8]) -> Result<()>) -> Result<()> {
    let unreadable =
        |error: std::io::Error| Error::permanent("demo.fold", format!("cannot read {}: {error}", path.display()));
    let mut reader = BufReader::new(File::open(path).map_err(unreadable)?);
    let mut line = Vec::new();
    loop {
        line.clear();
        reader.read_until(b'\n', &mut line).map_err(unreadable)?;
        // A line without its end is still being written: it does not count yet.
        if line.pop() != Some(b'\n') {
            return Ok(());
        }
        each(&line)?;
    }
}

fn broken(path: &Path, why: &dyn std::fmt::Display) -> Error {
    Error::permanent("demo.fold", format!("the log in {} cannot be folded: {why}", path.display()))
}

impl LoggedPosition {
    fn position(&self) -> Option<Position> {
        Some((self.epoch, self.commit.parse().ok()?, self.ordinal.parse().ok()?))
    }
}

impl Table {
    /// A new version: rows that are there keep their cells by ordinal and get the default
    /// of what is added.
    fn change(&mut self, key: &[String], columns: Vec<LoggedColumn>) -> Result<(), String> {
        let columns: Vec<LoggedColumn> = columns.into_iter().filter(|column| column.ordinal.is_some()).collect();
        let from: Vec<Option<usize>> = columns
            .iter()
            .map(|column| self.columns.iter().position(|before| before.ordinal == column.ordinal))
            .collect();
        let of_copy = self.copy.iter_mut().flat_map(|(_, rows)| rows.values_mut());
        for row in self.rows.values_mut().chain(of_copy) {
            *row = columns
                .iter()
                .zip(&from)
                .map(|(column, from)| match from {
                    Some(index) => row[*index].clone(),
                    None => column.default.as_deref().map(Box::from),
                })
                .collect();
        }
        let index = |name: &String| {
            columns.iter().position(|column| column.name == *name).ok_or_else(|| format!("no column {name}"))
        };
        self.key = key.iter().map(index).collect::<Result<_, _>>()?;
        self.columns = columns;
        Ok(())
    }

    fn finish_copy(&mut self, run: &str, as_of: Position) -> Result<(), String> {
        match self.copy.take() {
            Some((current, rows)) if current == run => {
                self.rows = rows;
                self.position = Some(as_of);
                Ok(())
            }
            _ => Err(format!("copy {run} is finished, but was not begun")),
        }
    }

    fn apply(&mut self, mut row: Map<String, Value>) -> Result<(), String> {
        let text = |name: &str| row.get(name).and_then(Value::as_str);
        let operation = text("_tg_op").ok_or("a row has no operation")?.to_owned();
        let position = row.get("_tg_epoch").and_then(Value::as_u64).and_then(|epoch| u32::try_from(epoch).ok());
        let number = |name| text(name).and_then(|text| text.parse::<u64>().ok());
        let position = position
            .zip(number("_tg_commit").zip(number("_tg_ordinal")))
            .map(|(epoch, (commit, ordinal))| (epoch, commit, ordinal))
            .ok_or("a row has no position")?;
        if operation == "copy" {
            let cells = self.cells(&mut row, None)?;
            let key = self.key_of(&cells);
            self.copy.as_mut().ok_or("rows of a copy that was not begun")?.1.insert(key, cells);
            return Ok(());
        }
        if self.position.is_some_and(|last| position <= last) {
            return Ok(());
        }
        self.position = Some(position);
        match operation.as_str() {
            "truncate" => self.rows.clear(),
            "delete" => {
                let key = self.named(&row)?;
                self.rows.remove(&key);
            }
            "insert" | "update" => {
                let old_key = match row.remove("_tg_old_key") {
                    Some(Value::Object(key)) => self.named(&key)?,
                    _ => self.named(&row)?,
                };
                let before = if operation == "update" { self.rows.remove(&old_key) } else { None };
                let cells = self.cells(&mut row, before)?;
                self.rows.insert(self.key_of(&cells), cells);
            }
            other => return Err(format!("an operation `{other}`")),
        }
        Ok(())
    }

    /// The row's cells; those that were not sent are taken from what it was before.
    fn cells(&self, row: &mut Map<String, Value>, before: Option<Row>) -> Result<Row, String> {
        let mut before = before.unwrap_or_default();
        let mut cells = Vec::with_capacity(self.columns.len());
        for (index, column) in self.columns.iter().enumerate() {
            cells.push(match row.remove(&column.name) {
                Some(value) => cell_text(&value),
                None => match before.get_mut(index) {
                    Some(cell) => cell.take(),
                    None => return Err(format!("column {} was not sent, and there is no row before", column.name)),
                },
            });
        }
        Ok(cells)
    }

    fn key_of(&self, cells: &Row) -> String {
        join(self.key.iter().map(|&index| cells[index].as_deref().unwrap_or_default()))
    }

    /// The key by the columns' names.
    fn named(&self, row: &Map<String, Value>) -> Result<String, String> {
        let mut parts = Vec::with_capacity(self.key.len());
        for &index in &self.key {
            let name = &self.columns[index].name;
            let value = row.get(name).ok_or_else(|| format!("key column {name} was not sent"))?;
            parts.push(cell_text(value).unwrap_or_default());
        }
        Ok(join(parts.iter().map(|part| &**part)))
    }

    async fn copy_into(&self, client: &Client, name: &TableName) -> Result<()> {
        let names: Vec<String> = self.columns.iter().map(|column| quote_identifier(&column.name)).collect();
        let sql = format!("COPY {} ({}) FROM STDIN", name.quoted(), names.join(", "));
        let failed = |error: tokio_postgres::Error| sql_error(&format!("load the folded log into {name}"), &error);
        let sink: CopyInSink<Bytes> = client.copy_in(&sql).await.map_err(failed)?;
        tokio::pin!(sink);
        let mut chunk = BytesMut::with_capacity(2 * CHUNK);
        for row in self.rows.values() {
            for (index, cell) in row.iter().enumerate() {
                if index > 0 {
                    chunk.extend_from_slice(b"\t");
                }
                match cell {
                    Some(text) => escape(text, &mut chunk),
                    None => chunk.extend_from_slice(b"\\N"),
                }
            }
            chunk.extend_from_slice(b"\n");
            if chunk.len() >= CHUNK {
                sink.send(chunk.split().freeze()).await.map_err(failed)?;
            }
        }
        if !chunk.is_empty() {
            sink.send(chunk.freeze()).await.map_err(failed)?;
        }
        sink.finish().await.map_err(failed)?;
        Ok(())
    }
}

fn join<'a>(parts: impl Iterator<Item = &'a str>) -> String {
    // No text of PostgreSQL holds a NUL.
    parts.collect::<Vec<_>>().join("\0")
}

/// A cell as PostgreSQL reads it.
fn cell_text(value: &Value) -> Option<Box<str>> {
    match value {
        Value::Null => None,
        Value::Bool(true) => Some("t".into()),
        Value::Bool(false) => Some("f".into()),
        Value::String(text) => Some(text.as_str().into()),
        Value::Array(items) => {
            let items: Vec<String> = items
                .iter()
                .map(|item| match cell_text(item) {
                    None => "NULL".to_owned(),
                    Some(text) => format!("\"{}\"", text.replace('\\', "\\\\").replace('"', "\\\"")),
                })
                .collect();
            Some(format!("{{{}}}", items.join(",")).into())
        }
        other => Some(other.to_string().into()),
    }
}

/// As COPY's text format wants it.
fn escape(text: &str, out: &mut BytesMut) {
    for byte in text.bytes() {
        match byte {
            b'\\' => out.extend_from_slice(b"\\\\"),
            b'\n' => out.extend_from_slice(b"\\n"),
            b'\r' => out.extend_from_slice(b"\\r"),
            b'\t' => out.extend_from_slice(b"\\t"),
            other => out.extend_from_slice(&[other]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(directory: &Path, name: &str, lines: &[&str]) {
        std::fs::write(directory.join(name), lines.iter().map(|line| format!("{line}\n")).collect::<String>()).unwrap();
    }

    const SCHEMA: &str = r#"{"seq":1,"kind":"schema","table":"public.t","source":["public","t"],"target":["public","t"],"snapshot":"1:0","key":["id"],"columns":[{"name":"id","type":"int32","nullable":false,"ordinal":1},{"name":"a","type":"utf8","nullable":true,"ordinal":2},{"name":"_tg_op","type":"utf8","nullable":true}]}"#;

    #[test]
    fn the_log_folds_to_what_the_table_is() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        write(
            path,
            "manifest.ndjson",
            &[
                r#"{"seq":0,"kind":"head","version":1,"pipeline":"p","destination":"d"}"#,
                SCHEMA,
                r#"{"seq":2,"kind":"begin-copy","table":"public.t","run":"r","snapshot":"1:0"}"#,
                r#"{"seq":3,"kind":"file","table":"public.t","file":"copy","format":"ndjson","rows":3,"snapshot":"1:0","first":{"epoch":0,"commit":"5","ordinal":"0"},"last":{"epoch":0,"commit":"5","ordinal":"0"},"run":"r","batches":["1"]}"#,
                r#"{"seq":4,"kind":"finish-copy","table":"public.t","run":"r","as_of":{"epoch":0,"commit":"5","ordinal":"0"}}"#,
                r#"{"seq":5,"kind":"file","table":"public.t","file":"one","format":"ndjson","rows":3,"snapshot":"1:0","first":{"epoch":0,"commit":"9","ordinal":"1"},"last":{"epoch":0,"commit":"9","ordinal":"4"}}"#,
                r#"{"seq":6,"kind":"schema","table":"public.t","source":["public","t"],"target":["public","t"],"snapshot":"2:1","key":["id"],"columns":[{"name":"id","type":"int32","nullable":false,"ordinal":1},{"name":"b","type":"utf8","nullable":true,"ordinal":2},{"name":"c","type":"int32","nullable":true,"ordinal":3,"default":"7"}]}"#,
                r#"{"seq":7,"kind":"file","table":"public.t","file":"two","format":"ndjson","rows":2,"snapshot":"2:1","first":{"epoch":0,"commit":"11","ordinal":"1"},"last":{"epoch":0,"commit":"11","ordinal":"2"}}"#,
            ],
        );
        write(
            path,
            "copy",
            &[
                r#"{"id":1,"a":"x","_tg_op":"copy","_tg_epoch":0,"_tg_commit":"5","_tg_ordinal":"0"}"#,
                r#"{"id":2,"a":null,"_tg_op":"copy","_tg_epoch":0,"_tg_commit":"5","_tg_ordinal":"0"}"#,
                r#"{"id":3,"a":"z","_tg_op":"copy","_tg_epoch":0,"_tg_commit":"5","_tg_ordinal":"0"}"#,
            ],
        );
        let moved = r#"{"id":10,"_tg_op":"update","_tg_epoch":0,"_tg_commit":"9","_tg_ordinal":"2","_tg_missing":["a"],"_tg_old_key":{"id":"1"}}"#;
        write(
            path,
            "one",
            &[
                r#"{"id":2,"_tg_op":"delete","_tg_epoch":0,"_tg_commit":"9","_tg_ordinal":"1","_tg_missing":["a"]}"#,
                moved,
                // Sent again after a crash.
                moved,
            ],
        );
        write(
            path,
            "two",
            &[r#"{"id":3,"b":"new","c":8,"_tg_op":"update","_tg_epoch":0,"_tg_commit":"11","_tg_ordinal":"1"}"#],
        );
        let tables = fold(path).unwrap();
        let mut rows: Vec<String> = tables["public.t"]
            .rows
            .values()
            .map(|row| row.iter().map(|cell| cell.as_deref().unwrap_or("NULL")).collect::<Vec<_>>().join("|"))
            .collect();
        rows.sort();
        assert_eq!(rows, ["10|x|7", "3|new|8"]);
    }

    #[test]
    fn cells_are_written_as_postgresql_reads_them() {
        let text = |json: &str| cell_text(&serde_json::from_str(json).unwrap()).map(String::from);
        assert_eq!(text("null"), None);
        assert_eq!(text("true").unwrap(), "t");
        assert_eq!(text("1.5").unwrap(), "1.5");
        assert_eq!(text(r#"["a \"b\"",null,"NULL",""]"#).unwrap(), r#"{"a \"b\"",NULL,"NULL",""}"#);
        let mut out = BytesMut::new();
        escape("a\\\n\t\r", &mut out);
        assert_eq!(&out[..], b"a\\\\\\n\\t\\r");
    }
}
