//! Schemas that tests are made of.

use super::table::{Column, Origin, ReplicaIdentity, TableName, TableSchema};
use crate::position::{Lsn, SnapshotId};

/// A nullable column without a default, outside the key.
pub(crate) fn column(ordinal: u16, name: &str, base: &str) -> Column {
    Column {
        ordinal,
        name: name.to_owned(),
        declared: base.to_owned(),
        base: base.to_owned(),
        element: None,
        delimiter: None,
        type_oid: match base {
            "int4" => 23,
            "int8" => 20,
            "numeric" => 1700,
            "varchar" => 1043,
            _ => 25,
        },
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

/// `public.t` with these columns.
pub(crate) fn table(columns: Vec<Column>) -> TableSchema {
    TableSchema {
        oid: 7,
        name: TableName::new("public", "t"),
        snapshot: SnapshotId::default(),
        origin: Origin::Message,
        replica_identity: ReplicaIdentity::Default,
        highest: columns.iter().map(|column| column.ordinal).max().unwrap_or_default(),
        listed: false,
        rewritten: false,
        committed_at: None,
        columns,
    }
}

/// The same table at another version.
pub(crate) fn at(schema: &TableSchema, commit: u64, message: u64) -> TableSchema {
    TableSchema { snapshot: SnapshotId { commit: Lsn(commit), message: Lsn(message) }, ..schema.clone() }
}
