//! Tables, batches and instances for tests.

use std::fs;
use std::path::Path;

use serde_json::Value;
use tidegate_sdk::model::{
    BytesArray, Cells, ChangeRows, Column, ColumnData, ColumnValues, CopyRows, Literal, Rows, Sequence, Truncation,
};
use tidegate_sdk::prelude::*;

use crate::Files;

/// A directory of its own, and settings that write into it.
pub(super) struct Place(pub tempfile::TempDir);

impl Place {
    pub(super) fn new() -> Place {
        Place(tempfile::tempdir().unwrap())
    }

    pub(super) fn path(&self) -> &Path {
        self.0.path()
    }

    /// An instance with more settings: `"format": "ndjson"`.
    pub(super) fn open_with(&self, generation: u64, settings: &str) -> Result<Files, Failure> {
        let path = self.path().to_str().unwrap();
        let comma = if settings.is_empty() { "" } else { "," };
        let json = format!(r#"{{"path": "{path}", "roll_seconds": 3600 {comma} {settings}}}"#);
        let session = Session {
            pipeline: "shop".to_owned(),
            destination: "lake".to_owned(),
            settings: tidegate_sdk::settings::parse(&json).unwrap(),
            lane: 0,
            lanes: 1,
            generation,
            details: vec![],
        };
        Files::open(session).map(|(files, _)| files)
    }

    pub(super) fn open(&self, generation: u64) -> Files {
        self.open_with(generation, "").unwrap()
    }

    /// The manifest's lines.
    pub(super) fn manifest(&self) -> Vec<Value> {
        let text = fs::read_to_string(self.path().join("manifest.ndjson")).unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    /// Lines of one kind.
    pub(super) fn events(&self, kind: &str) -> Vec<Value> {
        self.manifest().into_iter().filter(|line| line["kind"] == kind).collect()
    }

    /// Names of the files in a table's directory, sorted.
    pub(super) fn files(&self, table: &str) -> Vec<String> {
        let entries = fs::read_dir(self.path().join(table)).unwrap();
        let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }
}

pub(super) fn column(ordinal: u16, name: &str, declared: &str, base: &str) -> Column {
    Column {
        ordinal,
        name: name.to_owned(),
        declared: declared.to_owned(),
        base: base.to_owned(),
        element: None,
        length: None,
        precision: None,
        scale: None,
        type_oid: 0,
        nullable: true,
        key_position: None,
        identity: false,
        default_expression: None,
        default_literal: None,
        details: vec![],
    }
}

pub(super) fn with_default(column: Column, text: &str) -> Column {
    let literal = Literal { kind: "string".to_owned(), text: text.to_owned() };
    Column { default_literal: Some(literal), ..column }
}

/// `public.<name>`; the key is the column with ordinal 1.
pub(super) fn table(id: u32, name: &str, snapshot: u64, columns: Vec<Column>) -> Table {
    let name = TableName { schema: "public".to_owned(), name: name.to_owned() };
    Table {
        id,
        source: name.clone(),
        target: name,
        snapshot: SnapshotId { commit: snapshot, message: 0 },
        shape: String::new(),
        mode: "changes".to_owned(),
        key: vec![1],
        columns,
        settings: "{}".to_owned(),
        details: vec![],
    }
}

/// `public.orders (id int4, note text)`.
pub(super) fn orders() -> Table {
    table(7, "orders", 10, vec![column(1, "id", "integer", "int4"), column(2, "note", "text", "text")])
}

pub(super) fn plain(ordinal: u16, cells: Cells) -> ColumnValues {
    ColumnValues { ordinal, validity: None, missing: None, odd: vec![], data: ColumnData::Plain(cells) }
}

pub(super) fn bytes<T: AsRef<[u8]>>(values: &[T]) -> BytesArray {
    let mut array = BytesArray { offsets: vec![0], data: Vec::new() };
    for value in values {
        array.data.extend_from_slice(value.as_ref());
        array.offsets.push(array.data.len() as u32);
    }
    array
}

pub(super) fn texts(values: &[&str]) -> Cells {
    Cells::Utf8(bytes(values))
}

/// Rows of `orders`.
pub(super) fn order_rows(rows: &[(i32, &str)]) -> Rows {
    let ids = rows.iter().map(|row| row.0).collect();
    let notes: Vec<&str> = rows.iter().map(|row| row.1).collect();
    Rows { count: rows.len() as u32, columns: vec![plain(1, Cells::Int32(ids)), plain(2, texts(&notes))] }
}

pub(super) fn no_rows() -> Rows {
    Rows { count: 0, columns: vec![] }
}

pub(super) fn position(commit: u64) -> Position {
    Position { epoch: 1, commit, ordinal: 0 }
}

/// One transaction: its rows have ordinals 1, 2, …
pub(super) fn sequence(commit: u64, count: usize) -> Sequence {
    Sequence {
        epoch: 1,
        commit: vec![commit; count],
        ordinal: (1..=count as u64).collect(),
        committed_at: vec![1_767_225_600_500_000; count],
        xid: vec![99; count],
    }
}

pub(super) fn changes(commit: u64, ops: &[u8], rows: Rows) -> Content {
    let sequence = sequence(commit, ops.len());
    Content::Changes(ChangeRows { sequence, ops: ops.to_vec(), rows, old_index: vec![], old_rows: no_rows() })
}

pub(super) fn copy(run: &str, batch_id: &str, rows: Rows) -> Content {
    Content::Copy(CopyRows { run: run.to_owned(), batch_id: batch_id.to_owned(), as_of: position(5), rows })
}

pub(super) fn truncate(commit: u64) -> Content {
    Content::Truncate(Truncation { sequence: sequence(commit, 1), cascade: false, restart_identity: false })
}

/// A group of batches of one table.
pub(super) fn group(ticket: u64, table: &Table, contents: Vec<Content>) -> Group {
    let batch = |content| Batch { table_id: table.id, snapshot: table.snapshot, through: None, content };
    Group { ticket, whole: true, batches: contents.into_iter().map(batch).collect(), details: vec![] }
}
