//! What a schema change means, whatever anybody configured: one table.

use serde::{Deserialize, Serialize};

use super::change::{SchemaChange, Step, StepKind};
use super::table::{Column, Origin};
use super::wire::modifiers;

/// What a change means for the rows that a destination has. Ordered from the
/// harmless to the hopeless.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Class {
    /// The destination equals the source after it.
    Compatible,
    /// It takes something away.
    DestructiveOrAmbiguous,
    /// What becomes of the rows that are there has to be said, or they are copied anew.
    RequiresMapping,
    /// There is no safe way to do it.
    BlockedByPolicy,
}

impl Class {
    /// As `status` and the documentation spell it.
    pub fn as_str(self) -> &'static str {
        match self {
            Class::Compatible => "compatible",
            Class::DestructiveOrAmbiguous => "destructive-or-ambiguous",
            Class::RequiresMapping => "requires-mapping",
            Class::BlockedByPolicy => "blocked-by-policy",
        }
    }
}

/// What a step does under the circumstances that decide what it means.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Change {
    /// A table is published.
    AddTable,
    /// A column that allows nulls, without a default.
    AddNullableColumn,
    /// A column with a default that is a literal.
    AddColumnWithLiteral,
    /// A column with any other default.
    AddColumnWithExpression,
    /// A column without a default that forbids nulls.
    AddRequiredColumn,
    /// A column that the table had, and the publication had not.
    PublishColumn,
    /// A column is gone.
    DropColumn,
    /// A column has another name.
    RenameColumn,
    /// The same type with a higher limit or none: `varchar`, `varbit`, `numeric`.
    LengthenType,
    /// A type that holds every value of the one before.
    WidenType,
    /// Either of them, by a statement that nobody saw.
    WidenTypeUnseen,
    /// Any other change of a type.
    ChangeType,
    /// A literal default.
    SetDefault,
    /// No default, or one that is no literal.
    DropDefault,
    /// Nulls are forbidden.
    SetNotNull,
    /// Nulls are allowed.
    DropNotNull,
    /// The table has another name or schema.
    RenameTable,
    /// Other columns name a row.
    ChangeKey,
    /// A table is gone.
    DropTable,
    /// A table is there, and not published any more.
    UnpublishTable,
    /// Nothing of the above: a step that lacks what its kind has.
    Unknown,
}

impl Change {
    /// All of them, in the order of the documentation.
    pub const ALL: [Change; 21] = [
        Change::AddTable,
        Change::AddNullableColumn,
        Change::AddColumnWithLiteral,
        Change::AddColumnWithExpression,
        Change::AddRequiredColumn,
        Change::PublishColumn,
        Change::DropColumn,
        Change::RenameColumn,
        Change::LengthenType,
        Change::WidenType,
        Change::WidenTypeUnseen,
        Change::ChangeType,
        Change::SetDefault,
        Change::DropDefault,
        Change::SetNotNull,
        Change::DropNotNull,
        Change::RenameTable,
        Change::ChangeKey,
        Change::DropTable,
        Change::UnpublishTable,
        Change::Unknown,
    ];

    /// As the documentation and `schema history` spell it.
    pub fn as_str(self) -> &'static str {
        match self {
            Change::AddTable => "add-table",
            Change::AddNullableColumn => "add-nullable-column",
            Change::AddColumnWithLiteral => "add-column-with-literal",
            Change::AddColumnWithExpression => "add-column-with-expression",
            Change::AddRequiredColumn => "add-required-column",
            Change::PublishColumn => "publish-column",
            Change::DropColumn => "drop-column",
            Change::RenameColumn => "rename-column",
            Change::LengthenType => "lengthen-type",
            Change::WidenType => "widen-type",
            Change::WidenTypeUnseen => "widen-type-unseen",
            Change::ChangeType => "change-type",
            Change::SetDefault => "set-default",
            Change::DropDefault => "drop-default",
            Change::SetNotNull => "set-not-null",
            Change::DropNotNull => "drop-not-null",
            Change::RenameTable => "rename-table",
            Change::ChangeKey => "change-key",
            Change::DropTable => "drop-table",
            Change::UnpublishTable => "unpublish-table",
            Change::Unknown => "unknown",
        }
    }

    /// The class, and the reason for it.
    pub fn class(self) -> (Class, &'static str) {
        match self {
            Change::AddTable => (Class::Compatible, "a new table is copied whole, and nothing was there before"),
            Change::AddNullableColumn => (Class::Compatible, "existing rows have null in it at both ends"),
            Change::AddColumnWithLiteral => (
                Class::Compatible,
                "existing rows have the literal at the source, and at the destination what its plugin declares",
            ),
            Change::AddColumnWithExpression => (
                Class::RequiresMapping,
                "existing rows were given values that never came as changes (P28): only a new copy brings them",
            ),
            // The source accepts it on an empty table, or fills the column itself
            // (GENERATED AS IDENTITY); which of them is not to be seen here.
            Change::AddRequiredColumn => (
                Class::RequiresMapping,
                "the source may have filled it in existing rows without a change (P28), and the destination cannot",
            ),
            Change::PublishColumn => (
                Class::RequiresMapping,
                "existing rows have values in it that never came as changes: only a new copy brings them",
            ),
            // Elsewhere ambiguous: without ordinals it may be half of a rename.
            Change::DropColumn => (Class::DestructiveOrAmbiguous, "its values are gone at the destination too"),
            // Elsewhere a mapping is required; here the ordinal proves it.
            Change::RenameColumn => (Class::Compatible, "the same ordinal is the same column, with the same values"),
            Change::LengthenType => (Class::Compatible, "no value changes"),
            // A rewrite by any other statement is a version that is marked as such.
            Change::WidenType => (Class::Compatible, "every value stays what it is, by one ALTER TABLE without USING"),
            Change::WidenTypeUnseen => (
                Class::RequiresMapping,
                "the trigger did not see the statement: it may have rewritten rows (USING) without changes of them (P28)",
            ),
            Change::ChangeType => {
                (Class::RequiresMapping, "values may not fit, or were rewritten without changes of them (P28)")
            }
            Change::SetDefault => (Class::Compatible, "rows carry the value: it matters to nobody else's rows"),
            Change::DropDefault => (Class::Compatible, "rows carry the value: it matters to nobody else's rows"),
            // Elsewhere destructive: there, rows come from more than one place.
            Change::SetNotNull => (Class::Compatible, "the source has checked every row, and rows come in its order"),
            Change::DropNotNull => (Class::Compatible, "what was allowed stays allowed"),
            Change::RenameTable => {
                (Class::RequiresMapping, "where the table goes is a matter of the destination's configuration")
            }
            Change::ChangeKey => (
                Class::RequiresMapping,
                "rows that are there are named by the old key, which later changes do not carry",
            ),
            // Elsewhere dropped there too: nothing in the stream says that it was no mistake.
            Change::DropTable => {
                (Class::DestructiveOrAmbiguous, "the table stops and stays at the destination, until it is forgotten")
            }
            Change::UnpublishTable => {
                (Class::DestructiveOrAmbiguous, "the table stops and stays at the destination, until it comes back")
            }
            Change::Unknown => (Class::BlockedByPolicy, "what is not understood is not done"),
        }
    }

    /// What a step of a change does.
    pub fn of(step: &Step, change: &SchemaChange) -> Change {
        match (step.kind, &step.before, &step.after) {
            (StepKind::AddColumn, _, Some(column)) => added(column, change),
            (StepKind::AddColumn, _, None) => Change::Unknown,
            (StepKind::DropColumn, ..) => Change::DropColumn,
            (StepKind::RenameColumn, ..) => Change::RenameColumn,
            (StepKind::AlterType, Some(old), Some(new)) if widens(old, new) => {
                match (change.after.origin, old.base == new.base) {
                    (Origin::Message, true) => Change::LengthenType,
                    (Origin::Message, false) => Change::WidenType,
                    _ => Change::WidenTypeUnseen,
                }
            }
            (StepKind::AlterType, Some(_), Some(_)) => Change::ChangeType,
            (StepKind::AlterType, ..) => Change::Unknown,
            (StepKind::SetDefault, ..) => Change::SetDefault,
            (StepKind::DropDefault, ..) => Change::DropDefault,
            (StepKind::SetNotNull, ..) => Change::SetNotNull,
            (StepKind::DropNotNull, ..) => Change::DropNotNull,
            (StepKind::RenameTable, ..) => Change::RenameTable,
            (StepKind::ChangeKey, ..) => Change::ChangeKey,
        }
    }
}

/// The class of a step of a change.
pub fn classify(step: &Step, change: &SchemaChange) -> Class {
    Change::of(step, change).class().0
}

/// The class of a whole change, that of its gravest step, and that step; none if it
/// has no steps.
pub fn gravest(change: &SchemaChange) -> Option<(Class, &Step)> {
    let mut gravest: Option<(Class, &Step)> = None;
    for step in &change.steps {
        let class = classify(step, change);
        if gravest.is_none_or(|(other, _)| class > other) {
            gravest = Some((class, step));
        }
    }
    gravest
}

/// The first step that is not among a plugin's capabilities: with one, nothing of the
/// change is begun.
pub fn unsupported<'a>(change: &'a SchemaChange, capabilities: &[String]) -> Option<&'a Step> {
    change.steps.iter().find(|step| !capabilities.iter().any(|capability| capability == step.kind.as_str()))
}

fn added(column: &Column, change: &SchemaChange) -> Change {
    let (before, after) = (&change.before, &change.after);
    // Ordinals only grow: one that is not the highest was there all along.
    let last = before.columns.last().map_or(0, |last| last.ordinal).max(before.highest);
    // To a list it is added by a command of its own, and rows may have come before that.
    let existed = column.ordinal <= last || before.listed || after.listed;
    match (&column.default_expression, &column.default_literal) {
        _ if existed => Change::PublishColumn,
        (_, Some(_)) => Change::AddColumnWithLiteral,
        (Some(expression), None) if !expression.eq_ignore_ascii_case("null") => Change::AddColumnWithExpression,
        _ if column.nullable => Change::AddNullableColumn,
        _ => Change::AddRequiredColumn,
    }
}

/// Whether the new type holds every value of the old one, unchanged.
fn widens(old: &Column, new: &Column) -> bool {
    if old.element.is_some() || new.element.is_some() {
        return false;
    }
    let (from, to) = (modifiers(old), modifiers(new));
    match (old.base.as_str(), new.base.as_str()) {
        ("int2", "int4" | "int8") | ("int4", "int8") | ("float4", "float8") => true,
        ("varchar", "text") => true,
        ("varchar", "varchar") | ("varbit", "varbit") => match (from.length, to.length) {
            (_, None) => true,
            (Some(from), Some(to)) => to >= from,
            (None, Some(_)) => false,
        },
        // Another scale would print values differently.
        ("numeric", "numeric") => from.scale == to.scale && from.precision <= to.precision,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::schema::decide::{ApplyMode, Decision, decide};
    use crate::schema::plan::plan;
    use crate::schema::samples::{column, table};
    use crate::schema::table::{Literal, TableName, TableSchema};

    fn changes(before: Vec<Column>, after: Vec<Column>) -> Vec<Change> {
        let change = plan(Arc::new(table(before)), Arc::new(table(after)));
        change.steps.iter().map(|step| Change::of(step, &change)).collect()
    }

    fn with_default(expression: &str, literal: Option<&str>, column: Column) -> Column {
        let literal = literal.map(|text| Literal { kind: "numeric".to_owned(), text: text.to_owned() });
        Column { default_expression: Some(expression.to_owned()), default_literal: literal, ..column }
    }

    fn altered(from: (&str, i32), to: (&str, i32)) -> Change {
        let of = |(base, base_typmod)| Column { base_typmod, ..column(1, "a", base) };
        let (from, to) = (of(from), of(to));
        changes(vec![from], vec![to])[0]
    }

    #[test]
    fn an_added_column_means_what_its_default_did_to_existing_rows() {
        let first = column(3, "a", "int4");
        let add = |column: Column| {
            let mut after = vec![first.clone(), column];
            after.sort_by_key(|column| column.ordinal);
            changes(vec![first.clone()], after)
        };
        let new = column(4, "b", "int4");
        let required = Column { nullable: false, ..new.clone() };
        assert_eq!(add(new.clone()), [Change::AddNullableColumn]);
        assert_eq!(add(with_default("NULL", None, new.clone())), [Change::AddNullableColumn]);
        assert_eq!(add(with_default("5", Some("5"), required.clone())), [Change::AddColumnWithLiteral]);
        assert_eq!(add(with_default("random()", None, new)), [Change::AddColumnWithExpression]);
        assert_eq!(add(required), [Change::AddRequiredColumn]);
        assert_eq!(add(column(2, "b", "int4")), [Change::PublishColumn]);
    }

    #[test]
    fn a_column_that_was_there_before_it_was_published_is_not_taken_for_a_new_one() {
        let of = |before: TableSchema, after: TableSchema| {
            let change = plan(Arc::new(before), Arc::new(after));
            change.steps.iter().map(|step| Change::of(step, &change)).collect::<Vec<_>>()
        };
        let two = || table(vec![column(1, "a", "int4"), column(2, "b", "int4")]);
        let three = || table(vec![column(1, "a", "int4"), column(2, "b", "int4"), column(3, "c", "text")]);
        assert_eq!(of(two(), three()), [Change::AddNullableColumn]);
        // A generated column, say, that is no more.
        assert_eq!(of(TableSchema { highest: 3, ..two() }, three()), [Change::PublishColumn]);
        assert_eq!(of(TableSchema { listed: true, ..two() }, three()), [Change::PublishColumn]);
        assert_eq!(of(two(), TableSchema { listed: true, ..three() }), [Change::PublishColumn]);
    }

    #[test]
    fn types_are_told_apart_by_whether_every_value_fits() {
        assert_eq!(altered(("int4", -1), ("int8", -1)), Change::WidenType);
        assert_eq!(altered(("int8", -1), ("int4", -1)), Change::ChangeType);
        assert_eq!(altered(("varchar", 14), ("varchar", 24)), Change::LengthenType);
        assert_eq!(altered(("varchar", 14), ("varchar", -1)), Change::LengthenType);
        assert_eq!(altered(("varchar", -1), ("varchar", 14)), Change::ChangeType);
        assert_eq!(altered(("varchar", 24), ("varchar", 14)), Change::ChangeType);
        assert_eq!(altered(("varchar", 14), ("text", -1)), Change::WidenType);
        let numeric = |precision: i32, scale: i32| ("numeric", (precision << 16 | scale) + 4);
        assert_eq!(altered(numeric(10, 2), numeric(12, 2)), Change::LengthenType);
        assert_eq!(altered(numeric(10, 2), numeric(12, 3)), Change::ChangeType);
        assert_eq!(altered(("numeric", -1), numeric(12, 3)), Change::ChangeType);
    }

    #[test]
    fn by_default_columns_and_their_properties_follow_the_source_and_the_rest_waits() {
        let applied = [
            Change::AddNullableColumn,
            Change::AddColumnWithLiteral,
            Change::DropColumn,
            Change::RenameColumn,
            Change::SetDefault,
            Change::DropDefault,
            Change::SetNotNull,
            Change::DropNotNull,
            Change::LengthenType,
            Change::WidenType,
        ];
        let held = [
            Change::AddColumnWithExpression,
            Change::AddRequiredColumn,
            Change::PublishColumn,
            Change::WidenTypeUnseen,
            Change::ChangeType,
            Change::RenameTable,
            Change::ChangeKey,
        ];
        for (changes, decision) in [(&applied[..], Decision::AutoApply), (&held[..], Decision::ManualReview)] {
            for change in changes {
                assert_eq!(decide(change.class().0, ApplyMode::AutoSafe), decision, "{change:?}");
            }
        }
        assert_eq!(decide(Change::DropColumn.class().0, ApplyMode::BlockDestructive), Decision::Block);
        assert_eq!(decide(Change::RenameColumn.class().0, ApplyMode::BlockDestructive), Decision::AutoApply);
    }

    #[test]
    fn a_change_is_as_grave_as_its_gravest_step() {
        let before = table(vec![column(1, "a", "int4"), column(2, "b", "int4")]);
        let mut after = table(vec![column(1, "c", "int4")]);
        let class = |after: &TableSchema| {
            let change = plan(Arc::new(before.clone()), Arc::new(after.clone()));
            gravest(&change).map(|(class, step)| (class, step.kind))
        };
        assert_eq!(class(&before), None);
        assert_eq!(class(&after), Some((Class::DestructiveOrAmbiguous, StepKind::DropColumn)));
        after.name = TableName::new("public", "t2");
        assert_eq!(class(&after), Some((Class::RequiresMapping, StepKind::RenameTable)));
    }

    #[test]
    fn one_step_that_a_plugin_cannot_do_is_found_before_any_runs() {
        let before = table(vec![column(1, "a", "int4"), column(2, "b", "int4")]);
        let change = plan(Arc::new(before), Arc::new(table(vec![column(1, "c", "int4")])));
        let mut capabilities = vec!["merge".to_owned(), "drop-column".to_owned()];
        assert_eq!(unsupported(&change, &capabilities).unwrap().kind, StepKind::RenameColumn);
        capabilities.push("rename-column".to_owned());
        assert_eq!(unsupported(&change, &capabilities), None);
    }
}
