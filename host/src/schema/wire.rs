//! Table schemas as the contract describes them to a plugin.

use super::table::{Column, TableName, TableSchema};
use crate::position::SnapshotId;
use crate::wire;

impl TableSchema {
    /// This version as a plugin sees it: where it goes, which rows will come (`merge`
    /// or `changes`), and the table's settings (JSON).
    pub fn to_wire(&self, target: &TableName, mode: &str, settings: &str) -> wire::Table {
        wire::Table {
            id: self.oid,
            source: name_to_wire(&self.name),
            target: name_to_wire(target),
            snapshot: snapshot_to_wire(self.snapshot),
            shape: self.shape(),
            mode: mode.to_owned(),
            key: self.merge_key(),
            columns: self.columns.iter().map(column_to_wire).collect(),
            settings: settings.to_owned(),
            details: Vec::new(),
        }
    }
}

/// A name as the contract has it.
pub fn name_to_wire(name: &TableName) -> wire::TableName {
    wire::TableName { schema: name.schema.clone(), name: name.name.clone() }
}

/// A version as the contract has it.
pub fn snapshot_to_wire(snapshot: SnapshotId) -> wire::SnapshotId {
    wire::SnapshotId { commit: snapshot.commit.0, message: snapshot.message.0 }
}

/// A column as the contract has it.
pub fn column_to_wire(column: &Column) -> wire::Column {
    let Modifiers { length, precision, scale } = modifiers(column);
    wire::Column {
        ordinal: column.ordinal,
        name: column.name.clone(),
        declared: column.declared.clone(),
        base: column.base.clone(),
        element: column.element.clone(),
        length,
        precision,
        scale,
        type_oid: column.type_oid,
        nullable: column.nullable,
        key_position: column.key_position,
        identity: column.identity,
        default_expression: column.default_expression.clone(),
        default_literal: column
            .default_literal
            .as_ref()
            .map(|literal| wire::Literal { kind: literal.kind.clone(), text: literal.text.clone() }),
        details: details(column),
    }
}

fn details(column: &Column) -> Vec<(String, String)> {
    let labels = || serde_json::Value::from(column.enum_labels.clone()).to_string();
    let labels = (!column.enum_labels.is_empty()).then(|| ("enum-labels".to_owned(), labels()));
    let delimiter = column.delimiter.map(|delimiter| ("delimiter".to_owned(), delimiter.to_string()));
    labels.into_iter().chain(delimiter).collect()
}

#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Modifiers {
    pub(super) length: Option<u32>,
    pub(super) precision: Option<u32>,
    pub(super) scale: Option<i32>,
}

/// `VARHDRSZ`: what PostgreSQL adds to a length, and to numeric's modifier.
const HEADER: i32 = 4;

/// `INTERVAL_FULL_PRECISION`: an interval that names fields but no precision.
const FULL_PRECISION: i32 = 0xFFFF;

/// What `base_typmod` says, by the base type, or for arrays that of the elements
/// (`numeric_in`, `anychar_typmodout`, `intervaltypmodout` in PostgreSQL's sources).
pub(super) fn modifiers(column: &Column) -> Modifiers {
    let base = column.element.as_deref().unwrap_or(&column.base);
    let typmod = column.base_typmod;
    if typmod < 0 {
        return Modifiers::default();
    }
    match base {
        "varchar" | "bpchar" => Modifiers { length: above_header(typmod), ..Modifiers::default() },
        "bit" | "varbit" => Modifiers { length: Some(typmod.cast_unsigned()), ..Modifiers::default() },
        "numeric" => above_header(typmod).map_or_else(Modifiers::default, |packed| Modifiers {
            length: None,
            precision: Some(packed >> 16 & 0xFFFF),
            // Eleven bits with a sign since PostgreSQL 15; before, 0 to 1000.
            scale: Some(((packed & 0x7FF) as i32 ^ 0x400) - 0x400),
        }),
        "time" | "timetz" | "timestamp" | "timestamptz" => {
            Modifiers { precision: Some(typmod.cast_unsigned()), ..Modifiers::default() }
        }
        "interval" => match typmod & 0xFFFF {
            FULL_PRECISION => Modifiers::default(),
            precision => Modifiers { precision: Some(precision.cast_unsigned()), ..Modifiers::default() },
        },
        _ => Modifiers::default(),
    }
}

fn above_header(typmod: i32) -> Option<u32> {
    u32::try_from(typmod - HEADER).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schema::samples::{column, table};

    fn read(base: &str, base_typmod: i32) -> (Option<u32>, Option<u32>, Option<i32>) {
        let Modifiers { length, precision, scale } = modifiers(&Column { base_typmod, ..column(1, "c", base) });
        (length, precision, scale)
    }

    /// The modifiers are what `SELECT atttypmod` shows for these types.
    #[test]
    fn modifiers_are_read_as_the_base_type_packs_them() {
        assert_eq!(read("varchar", 14), (Some(10), None, None));
        assert_eq!(read("bpchar", 5), (Some(1), None, None));
        assert_eq!(read("varchar", -1), (None, None, None));
        assert_eq!(read("bit", 8), (Some(8), None, None));
        assert_eq!(read("varbit", 64), (Some(64), None, None));
        // numeric(12,4), numeric(5), numeric(3,-2), numeric(2,1000)
        assert_eq!(read("numeric", (12 << 16 | 4) + 4), (None, Some(12), Some(4)));
        assert_eq!(read("numeric", (5 << 16) + 4), (None, Some(5), Some(0)));
        assert_eq!(read("numeric", (3 << 16 | (-2 & 0x7FF)) + 4), (None, Some(3), Some(-2)));
        assert_eq!(read("numeric", (2 << 16 | 1000) + 4), (None, Some(2), Some(1000)));
        assert_eq!(read("timestamptz", 3), (None, Some(3), None));
        assert_eq!(read("time", 0), (None, Some(0), None));
        // interval(3), interval day to second, interval hour to second(2)
        assert_eq!(read("interval", 0x7FFF_0003), (None, Some(3), None));
        assert_eq!(read("interval", 0x1C08_FFFF), (None, None, None));
        assert_eq!(read("interval", 0x1C00_0002), (None, Some(2), None));
        assert_eq!(read("text", 14), (None, None, None));
    }

    #[test]
    fn an_array_has_the_modifiers_of_its_elements() {
        let array =
            Column { element: Some("numeric".to_owned()), base_typmod: (12 << 16 | 4) + 4, ..column(1, "c", "array") };
        assert_eq!(modifiers(&array), Modifiers { length: None, precision: Some(12), scale: Some(4) });
    }

    #[test]
    fn a_table_crosses_with_its_key_its_columns_and_where_it_goes() {
        let mut id = column(1, "id", "int4");
        (id.nullable, id.key_position, id.identity) = (false, Some(1), true);
        let mut mood = column(2, "mood", "enum");
        mood.enum_labels = vec!["a \"b\"".to_owned(), "c".to_owned()];
        let schema = table(vec![id, mood]);
        let wire = schema.to_wire(&TableName::new("mirror", "t2"), "merge", "{}");
        assert_eq!((wire.id, wire.mode.as_str(), wire.settings.as_str()), (7, "merge", "{}"));
        assert_eq!(
            (wire.source.name.as_str(), wire.target.schema.as_str(), wire.target.name.as_str()),
            ("t", "mirror", "t2")
        );
        assert_eq!(wire.key, [1]);
        assert_eq!(wire.shape, schema.shape());
        assert_eq!(wire.columns[0].key_position, Some(1));
        assert_eq!(wire.columns[1].details, [("enum-labels".to_owned(), r#"["a \"b\"","c"]"#.to_owned())]);
    }
}
