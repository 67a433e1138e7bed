//! From the picture of a table (`sql/picture.sql`) to its schema in a publication.

use serde::Deserialize;
use serde_json::Value;

use super::errors;
use crate::error::{Error, Result};
use crate::position::SnapshotId;
use crate::schema::defaults::column_literal;
use crate::schema::table::{Column, Origin, ReplicaIdentity, TableName, TableSchema, Within};

/// The query behind every picture; `$1` is the oid.
pub(super) const PICTURE: &str = include_str!("sql/picture.sql");
/// The payload version that we write and read.
const VERSION: u64 = 1;

#[derive(Deserialize)]
struct Picture {
    oid: u32,
    schema: String,
    name: String,
    persistence: String,
    replica_identity: String,
    columns: Vec<PictureColumn>,
    publications: Vec<PicturePublication>,
}

#[derive(Deserialize)]
struct PictureColumn {
    ordinal: u16,
    name: String,
    declared: String,
    base: String,
    element: Option<String>,
    delimiter: Option<char>,
    type_oid: u32,
    typmod: i32,
    base_typmod: i32,
    not_null: bool,
    key_position: Option<u16>,
    identity_column: bool,
    default: Option<String>,
    generated: String,
    enum_labels: Option<Vec<String>>,
    #[serde(default)]
    within: Option<Within>,
}

#[derive(Deserialize)]
struct PicturePublication {
    name: String,
    columns: Option<Vec<u16>>,
    /// The columns are a list of the publication's own.
    #[serde(default)]
    listed: bool,
}

/// The schema of a table as `publication` shows it; None if it does not publish it.
///
/// Masked by what the publication says, which leaves generated columns out where
/// the server does not publish them. Errors: `source.picture`.
pub fn schema_from_picture(
    json: &Value,
    publication: &str,
    snapshot: SnapshotId,
    origin: Origin,
) -> Result<Option<TableSchema>> {
    let version = json.get("version").and_then(Value::as_u64);
    if version != Some(VERSION) {
        return Err(unreadable(&format!("version {version:?}")));
    }
    let picture = Picture::deserialize(json).map_err(|error| unreadable(&error.to_string()))?;
    let published = picture.publications.iter().find(|published| published.name == publication);
    let Some(published) = published.filter(|_| picture.persistence == "p") else { return Ok(None) };
    let shown = |column: &PictureColumn| match &published.columns {
        Some(ordinals) => ordinals.contains(&column.ordinal),
        // Without column lists the server publishes all but generated columns.
        None => column.generated.is_empty(),
    };
    let replica_identity = replica_identity(&picture.replica_identity)?;
    let highest = picture.columns.iter().map(|column| column.ordinal).max().unwrap_or_default();
    let listed = published.listed;
    let columns = picture.columns.into_iter().filter(shown).map(PictureColumn::into_column).collect();
    Ok(Some(TableSchema {
        oid: picture.oid,
        name: TableName::new(picture.schema, picture.name),
        snapshot,
        origin,
        replica_identity,
        columns,
        highest,
        listed,
        rewritten: false,
        committed_at: None,
    }))
}

impl PictureColumn {
    fn into_column(self) -> Column {
        let mut column = Column {
            ordinal: self.ordinal,
            name: self.name,
            declared: self.declared,
            base: self.base,
            element: self.element,
            delimiter: self.delimiter,
            type_oid: self.type_oid,
            typmod: self.typmod,
            base_typmod: self.base_typmod,
            nullable: !self.not_null,
            key_position: self.key_position,
            identity: self.identity_column,
            default_expression: self.default,
            default_literal: None,
            generated: !self.generated.is_empty(),
            enum_labels: self.enum_labels.unwrap_or_default(),
            within: self.within,
        };
        // A literal depends on the column's type: PostgreSQL leaves its cast out. What a
        // column is generated from is no default, even where it is a constant.
        let default = column.default_expression.as_deref().filter(|_| !column.generated);
        column.default_literal = default.and_then(|expression| column_literal(expression, &column));
        column
    }
}

/// `pg_class.relreplident`.
fn replica_identity(letter: &str) -> Result<ReplicaIdentity> {
    match letter {
        "d" => Ok(ReplicaIdentity::Default),
        "n" => Ok(ReplicaIdentity::Nothing),
        "f" => Ok(ReplicaIdentity::Full),
        "i" => Ok(ReplicaIdentity::Index),
        other => Err(errors::protocol(format_args!("replica identity `{other}`"))),
    }
}

fn unreadable(what: &str) -> Error {
    Error::permanent("source.picture", format!("the picture of a table cannot be read: {what}"))
        .next("Install the DDL trigger of this version: tidegate trigger install.")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_picture_of_another_version_is_refused() {
        let error =
            schema_from_picture(&serde_json::json!({"version": 2}), "p", SnapshotId::default(), Origin::Message);
        assert_eq!(error.unwrap_err().code(), "source.picture");
    }
}
