//! One version of one table's schema, as far as it is replicated.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use super::moment::Moment;
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
    /// For arrays: what stands between the elements (`pg_type.typdelim`), if it is not
    /// the comma.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub delimiter: Option<char>,
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
    /// `pg_get_expr` of the default; of a generated column, of what it is generated from.
    pub default_expression: Option<String>,
    /// The literal that the default stands for, if it is one.
    pub default_literal: Option<Literal>,
    /// GENERATED ALWAYS AS: its values follow from other columns of the row.
    #[serde(default)]
    pub generated: bool,
    /// Labels of an enum in their order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub enum_labels: Vec<String>,
    /// What the text of its values is made of beside its type's own name; none if that is
    /// not known, as from an older trigger.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub within: Option<Within>,
}

/// The enums and row types that a column's type is or has in it, by oid: an enum's labels in
/// their order, a row type's attributes as ordinal and type oid.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Within(pub BTreeMap<String, Vec<String>>);

impl Within {
    /// Whether values that were there read differently after `after`, although no row was
    /// changed: a label was renamed, or a row type has other attributes (P28). Labels that
    /// were added change none.
    pub fn reads_differently(&self, after: &Within) -> bool {
        self.0.iter().any(|(oid, parts)| match after.0.get(oid) {
            Some(now) if oid.starts_with('e') => {
                let mut now = now.iter();
                !parts.iter().all(|label| now.any(|other| other == label))
            }
            Some(now) => now != parts,
            // Another type has its place, which is a change of the column's own type or of
            // the row type that it was in.
            None => false,
        })
    }
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
    /// The highest ordinal of the table's columns, published or not.
    #[serde(default)]
    pub highest: u16,
    /// The publication names its columns: another one does not come by being added.
    #[serde(default)]
    pub listed: bool,
    /// Rows that were there may have got other values with it, without a change of them
    /// (P28).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub rewritten: bool,
    /// When the transaction that it came with was committed at the source, or its copy's
    /// snapshot was taken. None of a version that was stored before times were kept.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub committed_at: Option<Moment>,
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

#[cfg(test)]
mod tests {
    use super::*;

    fn within(parts: &[(&str, &[&str])]) -> Within {
        let text = |part: &&str| (*part).to_owned();
        Within(parts.iter().map(|(oid, parts)| ((*oid).to_owned(), parts.iter().map(text).collect())).collect())
    }

    #[test]
    fn a_label_that_is_added_changes_no_value_and_one_that_is_renamed_does() {
        let before = within(&[("e1", &["low", "high"])]);
        assert!(!before.reads_differently(&before));
        assert!(!before.reads_differently(&within(&[("e1", &["none", "low", "mid", "high", "top"])])));
        assert!(before.reads_differently(&within(&[("e1", &["low", "highest"])])));
        assert!(before.reads_differently(&within(&[("e1", &["high", "low"])])));
        assert!(!before.reads_differently(&within(&[])));
    }

    #[test]
    fn a_row_type_with_other_attributes_makes_its_values_read_differently() {
        let before = within(&[("c1", &["1 23", "2 25"]), ("e2", &["a"])]);
        assert!(!before.reads_differently(&within(&[("c1", &["1 23", "2 25"]), ("e2", &["a", "b"]), ("c3", &[])])));
        assert!(before.reads_differently(&within(&[("c1", &["1 23", "2 25", "3 23"]), ("e2", &["a"])])));
        assert!(before.reads_differently(&within(&[("c1", &["1 23"]), ("e2", &["a"])])));
    }
}
