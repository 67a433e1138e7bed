//! The table that the suite works with, the versions it goes through, and rows of it.

use crate::batch::ColumnBuilder;
use crate::position::{Lsn, SnapshotId};
use crate::schema::table::{Column, Literal, Origin, ReplicaIdentity, TableName, TableSchema};
use crate::wire;

const EPOCH: u32 = 0;
/// 2023-11-14, in microseconds.
const COMMITTED_AT: i64 = 1_700_000_000_000_000;
const XID: u32 = 700;

fn column(ordinal: u16, name: &str, base: &str, type_oid: u32) -> Column {
    Column {
        ordinal,
        name: name.to_owned(),
        declared: declared(base).to_owned(),
        base: base.to_owned(),
        element: None,
        delimiter: None,
        type_oid,
        typmod: -1,
        base_typmod: -1,
        nullable: true,
        key_position: None,
        identity: false,
        default_expression: None,
        default_literal: None,
        generated: false,
        enum_labels: Vec::new(),
        within: None,
    }
}

fn declared(base: &str) -> &str {
    match base {
        "int4" => "integer",
        "int8" => "bigint",
        other => other,
    }
}

/// A key, a number that is never null, and a text that may be.
pub(super) fn table(mode: &str) -> TableSchema {
    let key = Column { nullable: false, key_position: Some(1), identity: true, ..column(1, "id", "int4", 23) };
    TableSchema {
        oid: 16_384,
        name: TableName::new("public", format!("tidegate_test_{mode}")),
        snapshot: SnapshotId { commit: Lsn(100), message: Lsn(100) },
        origin: Origin::Message,
        replica_identity: ReplicaIdentity::Full,
        columns: vec![key, column(2, "note", "text", 25), column(3, "n", "int4", 23)],
        highest: 3,
        listed: false,
        rewritten: false,
        committed_at: None,
    }
}

/// One step of a schema change: its kind, and what it makes of the table.
pub(super) type Step = (&'static str, fn(&mut TableSchema));

/// All kinds of steps, in an order in which each can follow those before it.
pub(super) const STEPS: [Step; 10] = [
    ("add-column", |table| {
        table.highest += 1;
        table.columns.push(column(table.highest, "extra", "text", 25));
    }),
    ("rename-column", |table| change(table, "extra", |column| column.name = "more".to_owned())),
    ("set-default", |table| {
        change(table, "note", |column| {
            column.default_expression = Some("'none'::text".to_owned());
            column.default_literal = Some(Literal { kind: "string".to_owned(), text: "none".to_owned() });
        });
    }),
    ("drop-default", |table| {
        change(table, "note", |column| (column.default_expression, column.default_literal) = (None, None));
    }),
    ("alter-type", |table| {
        change(table, "n", |column| {
            (column.base, column.declared, column.type_oid) = ("int8".to_owned(), "bigint".to_owned(), 20);
        });
    }),
    ("set-not-null", |table| change(table, "n", |column| column.nullable = false)),
    ("drop-not-null", |table| change(table, "n", |column| column.nullable = true)),
    ("drop-column", |table| table.columns.retain(|column| column.ordinal <= 3)),
    ("change-key", |table| {
        change(table, "n", |column| {
            (column.nullable, column.key_position, column.identity) = (false, Some(2), true);
        });
    }),
    ("rename-table", |table| table.name.name.push_str("_renamed")),
];

fn change(table: &mut TableSchema, name: &str, change: impl FnOnce(&mut Column)) {
    if let Some(column) = table.columns.iter_mut().find(|column| column.name == name) {
        change(column);
    }
}

/// Which cells of a row are sent.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Cells {
    /// All; of every third row the text is null.
    All,
    /// All but the text.
    NoText,
    /// Those of the key; columns beside it are left out.
    Key,
}

/// Rows with these ids. `turn` makes other values of them.
pub(super) fn rows(table: &TableSchema, ids: &[i32], turn: u64, cells: Cells) -> wire::Rows {
    let key = table.merge_key();
    let columns = table.columns.iter().filter(|column| cells != Cells::Key || key.contains(&column.ordinal));
    let mut built = Vec::new();
    for column in columns {
        let mut builder = ColumnBuilder::new(column);
        for (index, id) in ids.iter().enumerate() {
            match column.base.as_str() {
                "text" if cells == Cells::NoText => builder.append_missing(),
                "text" if index % 3 == 2 => builder.append_null(),
                "text" => builder.append(format!("row {id} of {turn}: é").as_bytes()),
                // Never changed, so that it can be of the key.
                _ => builder.append(id.to_string().as_bytes()),
            };
        }
        built.extend(builder.finish());
    }
    wire::Rows { count: count(ids.len()), columns: built }
}

/// No rows.
pub(super) fn none() -> wire::Rows {
    wire::Rows { count: 0, columns: Vec::new() }
}

/// So many rows, one behind the other, in one transaction.
pub(super) fn sequence(commit: u64, rows: usize) -> wire::Sequence {
    wire::Sequence {
        epoch: EPOCH,
        commit: vec![commit; rows],
        ordinal: (1..=rows as u64).collect(),
        committed_at: vec![COMMITTED_AT; rows],
        xid: vec![XID; rows],
    }
}

/// Behind the last of so many rows.
pub(super) fn position(commit: u64, rows: usize) -> wire::Position {
    wire::Position { epoch: EPOCH, commit, ordinal: rows as u64 }
}

/// The suite's batches are small.
fn count(rows: usize) -> u32 {
    u32::try_from(rows).unwrap_or(u32::MAX)
}
