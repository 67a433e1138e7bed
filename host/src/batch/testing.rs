//! Schemas and tuples for the tests of this module.

use std::sync::Arc;

use bytes::{BufMut, Bytes, BytesMut};

use super::{RelationMap, RowPosition};
use crate::position::{Lsn, Position, SnapshotId};
use crate::schema::samples;
use crate::schema::table::{Column, Origin, ReplicaIdentity, TableName, TableSchema};
use crate::source::pgoutput::{OldTuple, Tuple};

pub(super) fn column(ordinal: u16, base: &str) -> Column {
    samples::column(ordinal, &format!("c{ordinal}"), base)
}

pub(super) fn array_column(ordinal: u16, element: &str) -> Column {
    Column { element: Some(element.to_owned()), ..column(ordinal, "array") }
}

/// A column of the primary key.
pub(super) fn key_column(ordinal: u16, base: &str, position: u16) -> Column {
    Column { key_position: Some(position), identity: true, nullable: false, ..column(ordinal, base) }
}

pub(super) fn schema(replica_identity: ReplicaIdentity, columns: Vec<Column>) -> Arc<TableSchema> {
    Arc::new(TableSchema {
        oid: 16_384,
        name: TableName::new("public", "t"),
        snapshot: SnapshotId::default(),
        origin: Origin::Copy,
        replica_identity,
        columns,
        highest: 0,
        listed: false,
        rewritten: false,
        committed_at: None,
    })
}

/// The map of a relation that has just the schema's columns.
pub(super) fn whole_map(schema: &TableSchema) -> RelationMap {
    RelationMap::new(schema.columns.iter().map(|column| Some(column.ordinal)).collect(), schema)
}

/// What a test sends for a cell.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Sent {
    Null,
    Unchanged,
    Text(String),
}

pub(super) fn text(text: impl ToString) -> Sent {
    Sent::Text(text.to_string())
}

pub(super) fn tuple(cells: &[Sent]) -> Tuple {
    let mut data = BytesMut::new();
    data.put_u16(cells.len() as u16);
    for cell in cells {
        match cell {
            Sent::Null => data.put_u8(b'n'),
            Sent::Unchanged => data.put_u8(b'u'),
            Sent::Text(text) => {
                data.put_u8(b't');
                data.put_u32(text.len() as u32);
                data.put_slice(text.as_bytes());
            }
        }
    }
    Tuple::new(data.freeze())
}

/// A tuple whose only value is cut short.
pub(super) fn cut_tuple(columns: u16) -> Tuple {
    let mut data = BytesMut::new();
    data.put_u16(columns);
    data.put_slice(b"t\0\0\0\x011");
    Tuple::new(Bytes::from(data))
}

pub(super) fn old(whole: bool, cells: &[Sent]) -> OldTuple {
    OldTuple { whole, tuple: tuple(cells) }
}

/// The n-th row of a history with one transaction of ten rows behind the other.
pub(super) fn at(row: u64) -> RowPosition {
    RowPosition {
        position: Position { epoch: 1, commit: Lsn(1_000 + row / 10), ordinal: row },
        committed_at: 1_700_000_000_000_000 + row as i64,
        xid: 700 + (row / 10) as u32,
    }
}
