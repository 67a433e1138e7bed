//! Which layout a column's cells have: the base type alone decides, so no batch of a
//! snapshot differs from another (the comment of `cells` in the contract).

use crate::schema::table::Column;

/// How one value is laid out, and which text it is read from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// `bool`: bits.
    Bool,
    /// `int2`: int16.
    Int2,
    /// `int4`: int32.
    Int4,
    /// `int8`: int64.
    Int8,
    /// `oid`: int64, because it is unsigned.
    Oid,
    /// `float4`: float32.
    Float4,
    /// `float8`: float64.
    Float8,
    /// `date`: int32, days since 1970-01-01.
    Date,
    /// `time`: int64, microseconds since midnight.
    Time,
    /// `timestamp`: int64, microseconds since 1970-01-01.
    Timestamp,
    /// `timestamptz`: int64, microseconds since 1970-01-01 UTC.
    TimestampTz,
    /// `uuid`: 16 bytes.
    Uuid,
    /// `bytea`: binary.
    Bytea,
    /// Everything else: utf8, as PostgreSQL prints it.
    Text,
}

impl Layout {
    /// The layout of a base type's values.
    pub fn of(base: &str) -> Layout {
        match base {
            "bool" => Layout::Bool,
            "int2" => Layout::Int2,
            "int4" => Layout::Int4,
            "int8" => Layout::Int8,
            "oid" => Layout::Oid,
            "float4" => Layout::Float4,
            "float8" => Layout::Float8,
            "date" => Layout::Date,
            "time" => Layout::Time,
            "timestamp" => Layout::Timestamp,
            "timestamptz" => Layout::TimestampTz,
            "uuid" => Layout::Uuid,
            "bytea" => Layout::Bytea,
            _ => Layout::Text,
        }
    }
}

/// The layout of a column: plain values, or lists of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ColumnLayout {
    /// Of the values, or of the items.
    pub layout: Layout,
    /// For arrays, what stands between two items: `pg_type.typdelim` of the element.
    pub delimiter: Option<u8>,
}

/// The layout of a column's cells.
///
/// An array whose element type is not known is text, as any unknown type.
pub fn layout(column: &Column) -> ColumnLayout {
    match (column.base.as_str(), column.element.as_deref()) {
        ("array", Some(element)) => {
            let delimiter = column.delimiter.and_then(|delimiter| u8::try_from(delimiter).ok()).unwrap_or(b',');
            ColumnLayout { layout: Layout::of(element), delimiter: Some(delimiter) }
        }
        (base, _) => ColumnLayout { layout: Layout::of(base), delimiter: None },
    }
}
