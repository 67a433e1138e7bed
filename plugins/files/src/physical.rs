//! What a column of the source is in a file.

use std::sync::Arc;

use arrow_schema::extension::Uuid;
use arrow_schema::{DataType, Field, Schema, TimeUnit};
use tidegate_sdk::model::{Column, PhysicalColumn, PhysicalTable, SnapshotId, Table};
use tidegate_sdk::rows::Kind;

use crate::manifest::ColumnLine;

/// Columns of our own begin like this; a column of the source may not.
pub(crate) const OWN_PREFIX: &str = "_tg_";

/// Type of a column in a file. Follows from the declared type alone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Physical {
    Bool,
    Int16,
    Int32,
    Int64,
    UInt64,
    Float32,
    Float64,
    Date,
    Time,
    Timestamp { utc: bool },
    Uuid,
    Binary,
    Utf8,
    Decimal { precision: u8, scale: i8 },
    List(Box<Physical>),
}

impl Physical {
    /// Of a column of the source.
    pub(crate) fn of(column: &Column) -> Physical {
        if column.is_array() {
            // A NaN among decimals would have no place, so elements stay text.
            return Physical::List(Box::new(Physical::of_kind(column.kind())));
        }
        if column.base == "numeric"
            && let (Some(precision @ 1..=38), scale) = (column.precision, column.scale.unwrap_or(0))
            && (0..=precision as i32).contains(&scale)
        {
            return Physical::Decimal { precision: precision as u8, scale: scale as i8 };
        }
        Physical::of_kind(column.kind())
    }

    fn of_kind(kind: Kind) -> Physical {
        match kind {
            Kind::Bool => Physical::Bool,
            Kind::Int2 => Physical::Int16,
            Kind::Int4 => Physical::Int32,
            Kind::Int8 | Kind::Oid => Physical::Int64,
            Kind::Float4 => Physical::Float32,
            Kind::Float8 => Physical::Float64,
            Kind::Date => Physical::Date,
            Kind::Time => Physical::Time,
            Kind::Timestamp => Physical::Timestamp { utc: false },
            Kind::TimestampTz => Physical::Timestamp { utc: true },
            Kind::Uuid => Physical::Uuid,
            Kind::Bytea => Physical::Binary,
            Kind::Text => Physical::Utf8,
        }
    }

    /// As Arrow spells it.
    pub(crate) fn spelled(&self) -> String {
        match self {
            Physical::Bool => "bool".to_owned(),
            Physical::Int16 => "int16".to_owned(),
            Physical::Int32 => "int32".to_owned(),
            Physical::Int64 => "int64".to_owned(),
            Physical::UInt64 => "uint64".to_owned(),
            Physical::Float32 => "float".to_owned(),
            Physical::Float64 => "double".to_owned(),
            Physical::Date => "date32".to_owned(),
            Physical::Time => "time64[us]".to_owned(),
            Physical::Timestamp { utc: false } => "timestamp[us]".to_owned(),
            Physical::Timestamp { utc: true } => "timestamp[us, UTC]".to_owned(),
            Physical::Uuid => "uuid".to_owned(),
            Physical::Binary => "binary".to_owned(),
            Physical::Utf8 => "utf8".to_owned(),
            Physical::Decimal { precision, scale } => format!("decimal128({precision}, {scale})"),
            Physical::List(element) => format!("list<{}>", element.spelled()),
        }
    }

    /// Arrow's type.
    pub(crate) fn data_type(&self) -> DataType {
        match self {
            Physical::Bool => DataType::Boolean,
            Physical::Int16 => DataType::Int16,
            Physical::Int32 => DataType::Int32,
            Physical::Int64 => DataType::Int64,
            Physical::UInt64 => DataType::UInt64,
            Physical::Float32 => DataType::Float32,
            Physical::Float64 => DataType::Float64,
            Physical::Date => DataType::Date32,
            Physical::Time => DataType::Time64(TimeUnit::Microsecond),
            Physical::Timestamp { utc } => DataType::Timestamp(TimeUnit::Microsecond, utc.then(|| "UTC".into())),
            Physical::Uuid => DataType::FixedSizeBinary(16),
            Physical::Binary => DataType::Binary,
            Physical::Utf8 => DataType::Utf8,
            Physical::Decimal { precision, scale } => DataType::Decimal128(*precision, *scale),
            Physical::List(element) => DataType::List(element.item()),
        }
    }

    /// The field of a list's elements.
    pub(crate) fn item(&self) -> Arc<Field> {
        Arc::new(self.field("element"))
    }

    /// Everything may be null: a cell that was not sent is, in a delete most are.
    pub(crate) fn field(&self, name: &str) -> Field {
        let field = Field::new(name, self.data_type(), true);
        match self {
            Physical::Uuid => field.with_extension_type(Uuid),
            _ => field,
        }
    }
}

/// Our own columns, after the table's.
pub(crate) fn own_columns() -> [(&'static str, Physical); 9] {
    [
        ("_tg_op", Physical::Utf8),
        ("_tg_epoch", Physical::Int64),
        ("_tg_commit", Physical::Int64),
        ("_tg_ordinal", Physical::UInt64),
        ("_tg_committed_at", Physical::Timestamp { utc: true }),
        ("_tg_xid", Physical::Int64),
        ("_tg_missing", Physical::List(Box::new(Physical::Utf8))),
        ("_tg_old_key", Physical::Utf8),
        ("_tg_odd", Physical::Utf8),
    ]
}

/// One version of a table as it stands in files.
#[derive(Debug)]
pub(crate) struct Layout {
    /// The version of the source's table.
    pub table: Table,
    /// Type of each of its columns.
    pub types: Vec<Physical>,
    /// Arrow's schema, our own columns included.
    pub schema: Arc<Schema>,
}

impl Layout {
    pub(crate) fn new(table: &Table) -> Layout {
        let types: Vec<Physical> = table.columns.iter().map(Physical::of).collect();
        let theirs = table.columns.iter().zip(&types).map(|(column, physical)| physical.field(&column.name));
        let own = own_columns().into_iter().map(|(name, physical)| physical.field(name));
        let schema = Arc::new(Schema::new(theirs.chain(own).collect::<Vec<_>>()));
        Layout { table: table.clone(), types, schema }
    }

    /// As the manifest has it.
    pub(crate) fn lines(&self) -> Vec<ColumnLine> {
        let theirs = self.table.columns.iter().zip(&self.types).map(|(column, physical)| ColumnLine {
            name: column.name.clone(),
            type_name: physical.spelled(),
            nullable: column.nullable,
            ordinal: Some(column.ordinal),
            declared: Some(column.declared.clone()),
            default: column.default_literal.as_ref().map(|literal| literal.text.clone()),
        });
        let own = own_columns().into_iter().map(|(name, physical)| ColumnLine {
            name: name.to_owned(),
            type_name: physical.spelled(),
            nullable: true,
            ordinal: None,
            declared: None,
            default: None,
        });
        theirs.chain(own).collect()
    }
}

/// The table in the host's words; from what is to be and from what the manifest says
/// alike, so that the two can be compared.
pub(crate) fn physical_table(root: &str, directory: &str, lines: &[ColumnLine], snapshot: SnapshotId) -> PhysicalTable {
    let column = |line: &ColumnLine| {
        let ordinal = line.ordinal.map(|ordinal| ("ordinal".to_owned(), ordinal.to_string()));
        let default = line.default.as_ref().map(|text| ("default".to_owned(), text.clone()));
        PhysicalColumn {
            name: line.name.clone(),
            type_name: line.type_name.clone(),
            nullable: line.nullable,
            details: ordinal.into_iter().chain(default).collect(),
        }
    };
    PhysicalTable {
        path: vec![root.to_owned(), directory.to_owned()],
        columns: lines.iter().map(column).collect(),
        snapshot: Some(snapshot),
    }
}
