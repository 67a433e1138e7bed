//! One version of one table's schema, as far as it is replicated.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::position::SnapshotId;

/// Schema-qualified name of a table at the source, or where it goes.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct TableName {
    /// `pg_namespace.nspname`.
    pub schema: String,
    /// `pg_class.relname`.
    pub name: String,
}

impl TableName {
    /// A name from its two parts, unquoted.
    pub fn new(schema: impl Into<String>, name: impl Into<String>) -> TableName {
        TableName { schema: schema.into(), name: name.into() }
    }

    /// `"schema"."name"`, quoted for PostgreSQL.
    pub fn quoted(&self) -> String {
        format!("{}.{}", quote_identifier(&self.schema), quote_identifier(&self.name))
    }
}

impl fmt::Display for TableName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.schema, self.name)
    }
}

/// An identifier in double quotes, as PostgreSQL reads it back.
pub fn quote_identifier(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}

/// `pg_class.relreplident`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ReplicaIdentity {
    /// The primary key, if there is one.
    Default,
    /// Nothing: updates and deletes fail at the source.
    Nothing,
    /// All columns.
    Full,
    /// The columns of a unique index.
    Index,
}

/// Where a version of a schema was learnt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Origin {
    /// Read in the snapshot of a copy.
    Copy,
    /// A message of the DDL trigger.
    Message,
    /// A relation message, completed from the catalog of a later moment.
    Catalog,
}

/// A column default that is certainly a literal (see `schema::defaults`).
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Literal {
    /// Open set: string, numeric, boolean, date, time, timestamp, timestamptz, json, uuid.
    pub kind: String,
    /// The literal as PostgreSQL prints it, without quotes and casts.
    pub text: String,
}

/// A replicated column.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Column {
    /// `pg_attribute.attnum`: survives a rename, is never reused.
    pub ordinal: u16,
    /// `pg_attribute.attname`.
    pub name: String,
    /// The declared type as `format_type` prints it, e.g. `numeric(12,4)`.
    pub declared: String,
    /// `pg_type.typname` of the type under domains, e.g. `numeric`, `int4`; `array` for
    /// arrays, `enum` for enums, `composite` for row types.
    pub base: String,
    /// For arrays: the base type of the elements (domains resolved).
    pub element: Option<String>,
    /// `pg_attribute.atttypid`, as RELATION messages carry it.
    pub type_oid: u32,
    /// `pg_attribute.atttypmod`, as RELATION messages carry it.
    pub typmod: i32,
    /// Modifier of the base type, domains resolved; -1 if it has none.
    pub base_typmod: i32,
    /// Whether a null is allowed (`attnotnull`, and domains that forbid it).
    pub nullable: bool,
    /// 1-based position in the primary key.
    pub key_position: Option<u16>,
    /// Part of the replica identity.
    pub identity: bool,
    /// `pg_get_expr` of the default.
    pub default_expression: Option<String>,
    /// The literal that the default stands for, if it is one.
    pub default_literal: Option<Literal>,
    /// Labels of an enum in their order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub enum_labels: Vec<String>,
}

/// One version of one table's schema: the published columns in ordinal order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TableSchema {
    /// `pg_class.oid`: the table's id towards plugins too.
    pub oid: u32,
    /// The name at the source.
    pub name: TableName,
    /// The version.
    pub snapshot: SnapshotId,
    /// Where it was learnt.
    pub origin: Origin,
    /// The replica identity.
    pub replica_identity: ReplicaIdentity,
    /// Published columns, in ordinal order.
    pub columns: Vec<Column>,
}

impl TableSchema {
    /// The column with this ordinal, and its index among the columns.
    pub fn column(&self, ordinal: u16) -> Option<(usize, &Column)> {
        let index = self.columns.binary_search_by_key(&ordinal, |column| column.ordinal).ok()?;
        Some((index, &self.columns[index]))
    }

    /// Ordinals of the merge key (P30): the columns of the identity index under USING
    /// INDEX, the primary key (in its own order) under DEFAULT and FULL. Empty if
    /// there is none, or if a column of it is not published.
    pub fn merge_key(&self) -> Vec<u16> {
        match self.replica_identity {
            ReplicaIdentity::Nothing => Vec::new(),
            ReplicaIdentity::Index => {
                self.columns.iter().filter(|column| column.identity).map(|column| column.ordinal).collect()
            }
            ReplicaIdentity::Default | ReplicaIdentity::Full => self.primary_key(),
        }
    }

    /// Ordinals of the primary key in its own order; empty unless all of it is published.
    fn primary_key(&self) -> Vec<u16> {
        let mut key: Vec<(u16, u16)> =
            self.columns.iter().filter_map(|column| Some((column.key_position?, column.ordinal))).collect();
        key.sort_unstable();
        let whole = key.iter().enumerate().all(|(index, (position, _))| usize::from(*position) == index + 1);
        if whole { key.into_iter().map(|(_, ordinal)| ordinal).collect() } else { Vec::new() }
    }
}
