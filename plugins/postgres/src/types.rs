//! Which type a column has at the destination: from the base type and its modifiers
//! alone, spelled as `format_type` prints it, so that rendering needs no server.

use tidegate_sdk::model::Column;

/// Built-in types that every supported server knows and that read back what they print,
/// by `pg_type.typname`, with the name `format_type` gives them. Types with modifiers are
/// in `spelled`; whatever is in neither is text.
const PLAIN: &[(&str, &str)] = &[
    ("bool", "boolean"),
    ("int2", "smallint"),
    ("int4", "integer"),
    ("int8", "bigint"),
    ("float4", "real"),
    ("float8", "double precision"),
    ("text", "text"),
    // These hold so many bytes, and cut off without a word what has more in the
    // destination's encoding, or is printed longer by a later version.
    ("name", "text"),
    ("char", "text"),
    ("bytea", "bytea"),
    ("date", "date"),
    ("uuid", "uuid"),
    ("json", "json"),
    ("jsonb", "jsonb"),
    ("jsonpath", "jsonpath"),
    ("inet", "inet"),
    ("cidr", "cidr"),
    ("macaddr", "macaddr"),
    ("macaddr8", "macaddr8"),
    ("money", "money"),
    ("oid", "oid"),
    ("xid8", "xid8"),
    ("pg_lsn", "pg_lsn"),
    ("point", "point"),
    ("line", "line"),
    ("lseg", "lseg"),
    ("box", "box"),
    ("path", "path"),
    ("polygon", "polygon"),
    ("circle", "circle"),
    ("tsvector", "tsvector"),
    ("tsquery", "tsquery"),
    ("int4range", "int4range"),
    ("int8range", "int8range"),
    ("numrange", "numrange"),
    ("tsrange", "tsrange"),
    ("tstzrange", "tstzrange"),
    ("daterange", "daterange"),
    ("int4multirange", "int4multirange"),
    ("int8multirange", "int8multirange"),
    ("nummultirange", "nummultirange"),
    ("tsmultirange", "tsmultirange"),
    ("tstzmultirange", "tstzmultirange"),
    ("datemultirange", "datemultirange"),
];

/// The column's type at the destination.
pub fn physical(column: &Column) -> String {
    if column.base != "array" {
        return spelled(&column.base, column).unwrap_or_else(|| "text".to_owned());
    }
    let element = column.element.as_deref().unwrap_or("");
    match spelled(element, column) {
        Some(element) => format!("{element}[]"),
        // Their arrays are written with commas, as those of text are. An extension's
        // type may have another delimiter: that array is one text.
        None if element == "enum" || element == "composite" => "text[]".to_owned(),
        None => "text".to_owned(),
    }
}

/// Whether the destination keeps the column's own type, not its text.
pub fn is_native(column: &Column) -> bool {
    let base = if column.base == "array" { column.element.as_deref().unwrap_or("") } else { &column.base };
    spelled(base, column).is_some()
}

/// The type of this name with the column's modifiers; none if it is not a built-in one.
fn spelled(base: &str, column: &Column) -> Option<String> {
    let length = |name: &str, bare: &str| column.length.map_or(bare.to_owned(), |length| format!("{name}({length})"));
    let seconds = |name: &str, zone: &str| match column.precision {
        Some(digits) => format!("{name}({digits}){zone}"),
        None => format!("{name}{zone}"),
    };
    Some(match base {
        "varchar" => length("character varying", "character varying"),
        "bpchar" => length("character", "bpchar"),
        "bit" => length("bit", "bit varying"),
        "varbit" => length("bit varying", "bit varying"),
        "numeric" => numeric(column),
        "time" => seconds("time", " without time zone"),
        "timetz" => seconds("time", " with time zone"),
        "timestamp" => seconds("timestamp", " without time zone"),
        "timestamptz" => seconds("timestamp", " with time zone"),
        // Without its fields and digits: it takes every value of those that have them.
        "interval" => "interval".to_owned(),
        _ => PLAIN.iter().find(|(name, _)| *name == base)?.1.to_owned(),
    })
}

fn numeric(column: &Column) -> String {
    match (column.precision, column.scale) {
        // A scale below zero or above the precision came with version 15.
        (Some(precision), Some(scale)) if scale >= 0 && scale.unsigned_abs() <= precision => {
            format!("numeric({precision},{scale})")
        }
        (Some(precision), None) => format!("numeric({precision},0)"),
        _ => "numeric".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn column(base: &str, element: Option<&str>) -> Column {
        Column {
            ordinal: 1,
            name: "c".to_owned(),
            declared: "whatever".to_owned(),
            base: base.to_owned(),
            element: element.map(str::to_owned),
            length: None,
            precision: None,
            scale: None,
            type_oid: 0,
            nullable: true,
            key_position: None,
            identity: false,
            default_expression: None,
            default_literal: None,
            details: Vec::new(),
        }
    }

    #[test]
    fn built_in_types_keep_their_type_and_modifiers() {
        assert_eq!(physical(&column("int8", None)), "bigint");
        assert_eq!(
            physical(&Column { precision: Some(12), scale: Some(4), ..column("numeric", None) }),
            "numeric(12,4)"
        );
        assert_eq!(physical(&Column { precision: Some(2), scale: Some(-3), ..column("numeric", None) }), "numeric");
        assert_eq!(physical(&Column { length: Some(5), ..column("bpchar", None) }), "character(5)");
        assert_eq!(
            physical(&Column { precision: Some(3), ..column("timestamptz", None) }),
            "timestamp(3) with time zone"
        );
        assert_eq!(physical(&column("array", Some("int4"))), "integer[]");
    }

    #[test]
    fn types_the_destination_may_not_know_or_would_cut_off_are_text() {
        for base in ["enum", "composite", "hstore", "geometry", "regclass", "xml", "name", "char"] {
            assert_eq!(physical(&column(base, None)), "text", "{base}");
        }
        assert_eq!(physical(&column("array", Some("enum"))), "text[]");
        assert_eq!(physical(&column("array", Some("name"))), "text[]");
        assert_eq!(physical(&column("array", Some("geometry"))), "text");
    }
}
