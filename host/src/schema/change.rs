//! A schema change: two versions of a table, and the steps that lead from one to the
//! other.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use super::table::{Column, Origin, TableSchema};
use super::wire::column_to_wire;
use crate::wire;

/// Two versions of a table, and how one becomes the other.
#[derive(Clone, Debug, PartialEq)]
pub struct SchemaChange {
    /// The version before.
    pub before: Arc<TableSchema>,
    /// The version after. What its origin does not carry is taken from before.
    pub after: Arc<TableSchema>,
    /// In order, each safe alone. Empty: nothing that a destination would see.
    pub steps: Vec<Step>,
}

/// What a step does; [`StepKind::as_str`] is its name in the contract.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum StepKind {
    /// Adds a column, with its default and nullability.
    AddColumn,
    /// Drops a column.
    DropColumn,
    /// Renames a column and nothing else.
    RenameColumn,
    /// Changes a column's type or its modifiers.
    AlterType,
    /// Sets or replaces a literal default.
    SetDefault,
    /// Removes a default, or one that stopped being a literal.
    DropDefault,
    /// Allows nulls.
    DropNotNull,
    /// Forbids nulls.
    SetNotNull,
    /// Renames the table or moves it to another schema.
    RenameTable,
    /// Changes which columns name a row, or their order.
    ChangeKey,
}

impl StepKind {
    /// The name in the contract, and of the capability that a plugin needs for it.
    pub fn as_str(self) -> &'static str {
        match self {
            StepKind::AddColumn => "add-column",
            StepKind::DropColumn => "drop-column",
            StepKind::RenameColumn => "rename-column",
            StepKind::AlterType => "alter-type",
            StepKind::SetDefault => "set-default",
            StepKind::DropDefault => "drop-default",
            StepKind::DropNotNull => "drop-not-null",
            StepKind::SetNotNull => "set-not-null",
            StepKind::RenameTable => "rename-table",
            StepKind::ChangeKey => "change-key",
        }
    }
}

impl fmt::Display for StepKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// One step, of a column or, without columns, of the table as a whole.
#[derive(Clone, Debug, PartialEq)]
pub struct Step {
    /// What it does.
    pub kind: StepKind,
    /// The column before the step; none when it is added.
    pub before: Option<Column>,
    /// The column after the step; none when it is dropped.
    pub after: Option<Column>,
}

impl SchemaChange {
    /// Some of the steps as a change of its own, from the table before the first of
    /// them to the table after the last: one step of a plan that is run step by step,
    /// or what an interruption left. Steps beyond the last are not there. `table`: a
    /// version as the plugin is told of it, which a rename may take to another place.
    pub fn steps_to_wire(
        &self,
        steps: Range<usize>,
        table: impl Fn(&TableSchema) -> wire::Table,
    ) -> wire::SchemaChange {
        let end = steps.end.min(self.steps.len());
        let start = steps.start.min(end);
        wire::SchemaChange {
            before: table(&state_after(self, start)),
            after: table(&state_after(self, end)),
            steps: self.steps[start..end].iter().map(step_to_wire).collect(),
        }
    }
}

fn step_to_wire(step: &Step) -> wire::SchemaStep {
    wire::SchemaStep {
        kind: step.kind.as_str().to_owned(),
        before: step.before.as_ref().map(column_to_wire),
        after: step.after.as_ref().map(column_to_wire),
    }
}

/// The table after the first `k` steps: `before` itself at 0, `after` itself once all
/// are done, and between them the version of `before` with other columns (P27).
pub fn state_after(change: &SchemaChange, k: usize) -> TableSchema {
    if k == 0 {
        return TableSchema::clone(&change.before);
    }
    if k >= change.steps.len() {
        return TableSchema::clone(&change.after);
    }
    let mut state = TableSchema::clone(&change.before);
    for step in &change.steps[..k] {
        apply(&mut state, step, &change.after);
    }
    state
}

fn apply(state: &mut TableSchema, step: &Step, after: &TableSchema) {
    match (&step.before, &step.after) {
        (Some(dropped), None) => state.columns.retain(|column| column.ordinal != dropped.ordinal),
        (_, Some(column)) => match state.columns.binary_search_by_key(&column.ordinal, |column| column.ordinal) {
            Ok(index) => state.columns[index] = column.clone(),
            Err(index) => state.columns.insert(index, column.clone()),
        },
        (None, None) if step.kind == StepKind::RenameTable => state.name = after.name.clone(),
        // The key: its columns, and what their order is.
        (None, None) => {
            state.replica_identity = after.replica_identity;
            for column in &mut state.columns {
                if let Some((_, other)) = after.column(column.ordinal) {
                    column.key_position = other.key_position;
                    column.identity = other.identity;
                }
            }
        }
    }
}

/// `after` with what its origin does not carry taken from the version before it.
///
/// A relation carries neither defaults nor nullability; completed from the catalog of
/// a later moment, it must not clear what is known. Nor must it forbid nulls: rows
/// between it and that moment may have some. Only a primary key has none for certain.
pub(super) fn carry_over(before: &TableSchema, mut after: TableSchema) -> TableSchema {
    if after.origin != Origin::Catalog {
        return after;
    }
    for column in &mut after.columns {
        let Some((_, known)) = before.column(column.ordinal) else { continue };
        if column.key_position.is_none() {
            column.nullable = known.nullable;
        }
        if column.default_expression.is_none() {
            column.default_expression.clone_from(&known.default_expression);
            column.default_literal.clone_from(&known.default_literal);
        }
    }
    after
}
