//! A source table as this plugin keeps it.

use tidegate_sdk::NoSettings;
use tidegate_sdk::model::{Column, Failure, PhysicalColumn, PhysicalTable, SnapshotId, Table};
use tidegate_sdk::rows::Kind;

use crate::error::of_table;
use crate::settings::{MAX_IDENTIFIER, Settings};
use crate::{sql, types};

/// A column of the mirror.
#[derive(Clone, Debug)]
pub struct TargetColumn {
    pub ordinal: u16,
    pub name: String,
    /// The name in quotes.
    pub quoted: String,
    /// As `format_type` prints it.
    pub type_name: String,
    pub nullable: bool,
    /// The literal default's text, without quotes.
    pub default: Option<String>,
    /// What its cells mean.
    pub kind: Kind,
    /// The column at the source.
    pub source: Column,
}

impl TargetColumn {
    /// The mirror's column for one of the source.
    pub fn new(column: &Column) -> TargetColumn {
        TargetColumn {
            ordinal: column.ordinal,
            name: column.name.clone(),
            quoted: sql::ident(&column.name),
            type_name: types::physical(column),
            nullable: column.nullable,
            default: column.default_literal.as_ref().map(|literal| literal.text.clone()),
            kind: column.kind(),
            source: column.clone(),
        }
    }

    /// As CREATE and ALTER TABLE take it.
    pub fn definition(&self) -> String {
        let mut definition = format!("{} {}", self.quoted, self.type_name);
        if let Some(default) = &self.default {
            definition.push_str(" DEFAULT ");
            sql::push_literal(&mut definition, default);
        }
        if !self.nullable {
            definition.push_str(" NOT NULL");
        }
        definition
    }
}

/// A table of the mirror, as one version of the source's table makes it.
#[derive(Clone, Debug)]
pub struct Target {
    pub id: u32,
    pub schema: String,
    pub name: String,
    /// Schema and name in quotes.
    pub quoted: String,
    pub snapshot: SnapshotId,
    /// In ordinal order.
    pub columns: Vec<TargetColumn>,
    /// Indexes into `columns`, in the key's order.
    pub key: Vec<usize>,
}

impl Target {
    /// Names, types and key of the mirror of `table`. Fails for a table without a key, in
    /// another mode than `merge`, or with a name PostgreSQL would cut off.
    pub fn new(table: &Table, settings: &Settings) -> Result<Target, Failure> {
        let source = format!("{}.{}", table.source.schema, table.source.name);
        if table.mode != "merge" {
            let message =
                format!("table {source}: mode `{}` is not what this plugin writes. Set mode = \"merge\"", table.mode);
            return Err(of_table(table.id, "unsupported", message));
        }
        table.settings_as::<NoSettings>()?;
        let schema = settings.schema.clone().unwrap_or_else(|| table.target.schema.clone());
        let name = table.target.name.clone();
        for part in [&schema, &name] {
            if part.is_empty() || part.len() > MAX_IDENTIFIER || part.contains('\0') {
                let message = format!(
                    "table {source}: its target `{part}` is not a name of 1 to {MAX_IDENTIFIER} bytes. Map it to a shorter one"
                );
                return Err(of_table(table.id, "postgres.name", message));
            }
        }
        let mut key = Vec::with_capacity(table.key.len());
        for ordinal in &table.key {
            let Some(index) = table.columns.iter().position(|column| column.ordinal == *ordinal) else {
                return Err(of_table(
                    table.id,
                    "postgres.contract",
                    format!("table {source}: key column {ordinal} is not among its columns"),
                ));
            };
            key.push(index);
        }
        if key.is_empty() {
            let message =
                format!("table {source} has no key to merge by. Give it a primary key or REPLICA IDENTITY USING INDEX");
            return Err(of_table(table.id, "postgres.no-key", message));
        }
        let mut columns: Vec<TargetColumn> = table.columns.iter().map(TargetColumn::new).collect();
        for &index in &key {
            columns[index].nullable = false;
        }
        let quoted = format!("{}.{}", sql::ident(&schema), sql::ident(&name));
        Ok(Target { id: table.id, schema, name, quoted, snapshot: table.snapshot, columns, key })
    }

    /// `schema.name` for people.
    pub fn shown(&self) -> String {
        format!("{}.{}", self.schema, self.name)
    }

    /// What the table is to be at the destination.
    pub fn physical(&self) -> PhysicalTable {
        PhysicalTable {
            path: vec![self.schema.clone(), self.name.clone()],
            columns: self
                .columns
                .iter()
                .map(|column| physical_column(&column.name, &column.type_name, column.nullable))
                .collect(),
            snapshot: Some(self.snapshot),
        }
    }

    /// The statement that makes it.
    pub fn create(&self) -> String {
        let mut items: Vec<String> = self.columns.iter().map(TargetColumn::definition).collect();
        items.push(format!("PRIMARY KEY ({})", self.key_list("")));
        format!("CREATE TABLE {} ({})", self.quoted, items.join(", "))
    }

    /// All columns, quoted, with commas between.
    pub fn column_list(&self) -> String {
        self.columns.iter().map(|column| column.quoted.as_str()).collect::<Vec<_>>().join(", ")
    }

    /// The key's columns, each behind `prefix`.
    pub fn key_list(&self, prefix: &str) -> String {
        self.key.iter().map(|&index| format!("{prefix}{}", self.columns[index].quoted)).collect::<Vec<_>>().join(", ")
    }

    /// `ON CONFLICT` with every other column taken from the row that came.
    pub fn on_conflict(&self) -> String {
        let others = (0..self.columns.len()).filter(|index| !self.key.contains(index));
        let sets: Vec<String> = others.map(|index| format!("{0} = excluded.{0}", self.columns[index].quoted)).collect();
        let action = if sets.is_empty() { "NOTHING".to_owned() } else { format!("UPDATE SET {}", sets.join(", ")) };
        format!("ON CONFLICT ({}) DO {action}", self.key_list(""))
    }
}

/// A physical column without details.
pub fn physical_column(name: &str, type_name: &str, nullable: bool) -> PhysicalColumn {
    PhysicalColumn { name: name.to_owned(), type_name: type_name.to_owned(), nullable, details: Vec::new() }
}

/// `name type [NOT NULL], …` for people.
pub fn shape(columns: &[PhysicalColumn]) -> String {
    let shown = columns.iter().map(|column| {
        format!("{} {}{}", column.name, column.type_name, if column.nullable { "" } else { " NOT NULL" })
    });
    format!("({})", shown.collect::<Vec<_>>().join(", "))
}

/// Whether two lists name the same columns, in the same order, with the same types.
pub fn same_shape(left: &[PhysicalColumn], right: &[PhysicalColumn]) -> bool {
    let comparable = |column: &PhysicalColumn| (column.name.clone(), column.type_name.clone(), column.nullable);
    left.iter().map(comparable).eq(right.iter().map(comparable))
}
