//! From two versions of a table to the steps between them.
//!
//! Columns are told apart by ordinal: missing is dropped, new is added, the same
//! ordinal is the same column whatever its name. So dropping a column and adding one
//! of the same name is never taken for a change of it, and a rename never for a drop.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use super::change::{SchemaChange, Step, StepKind, carry_over};
use super::table::{Column, TableSchema};

/// The steps from one version of a table to another: drops, renames, adds, alterations
/// of columns, the key, the table's name. No two columns share a name in between, nor,
/// if the destination folds case, two that fold to one, unless they do at one end.
///
/// Depends on nothing but the two versions: after a crash the same plan comes out.
pub fn plan(before: Arc<TableSchema>, after: Arc<TableSchema>) -> SchemaChange {
    let carried = carry_over(&before, TableSchema::clone(&after));
    let after = if carried == *after { after } else { Arc::new(carried) };
    let rekeyed = key(&before) != key(&after);

    let mut steps = Vec::new();
    let dropped = before.columns.iter().filter(|column| after.column(column.ordinal).is_none());
    steps.extend(dropped.map(|column| step(StepKind::DropColumn, Some(column), None)));

    let pairs: Vec<(&Column, &Column)> =
        before.columns.iter().filter_map(|column| Some((column, after.column(column.ordinal)?.1))).collect();
    rename(&before, &after, &pairs, &mut steps);

    let added = after.columns.iter().filter(|column| before.column(column.ordinal).is_none());
    steps.extend(added.map(|column| {
        let mut column = column.clone();
        if rekeyed {
            // It joins the key when the key changes, not before.
            (column.key_position, column.identity) = (None, false);
        }
        Step { kind: StepKind::AddColumn, before: None, after: Some(column) }
    }));

    for (old, new) in &pairs {
        alter(old, new, &mut steps);
    }
    if rekeyed {
        steps.push(step(StepKind::ChangeKey, None, None));
    }
    if before.name != after.name {
        steps.push(step(StepKind::RenameTable, None, None));
    }
    SchemaChange { before, after, steps }
}

/// Names that a destination which folds case cannot tell apart, two and two, as a
/// version has them.
pub fn folding_collisions(schema: &TableSchema) -> Vec<(String, String)> {
    let mut seen: HashMap<String, &str> = HashMap::new();
    let mut collisions = Vec::new();
    for column in &schema.columns {
        if let Some(other) = seen.insert(fold(&column.name), &column.name) {
            collisions.push((other.to_owned(), column.name.clone()));
        }
    }
    collisions
}

fn fold(name: &str) -> String {
    name.to_lowercase()
}

fn step(kind: StepKind, before: Option<&Column>, after: Option<&Column>) -> Step {
    Step { kind, before: before.cloned(), after: after.cloned() }
}

/// What names a row: the merge key, and the primary key beside it.
fn key(schema: &TableSchema) -> (Vec<u16>, Vec<(u16, u16)>) {
    let mut primary: Vec<(u16, u16)> =
        schema.columns.iter().filter_map(|column| Some((column.key_position?, column.ordinal))).collect();
    primary.sort_unstable();
    (schema.merge_key(), primary)
}

/// Renames, each to a name that no column has at that moment.
fn rename(before: &TableSchema, after: &TableSchema, pairs: &[(&Column, &Column)], steps: &mut Vec<Step>) {
    // Where an end cannot be had on a destination that folds, only exact names count.
    let folds = folding_collisions(before).is_empty() && folding_collisions(after).is_empty();
    let form = |name: &str| if folds { fold(name) } else { name.to_owned() };

    // Who has a name now, and who still wants another one.
    let mut holders: HashMap<String, u16> = pairs.iter().map(|(old, _)| (form(&old.name), old.ordinal)).collect();
    let mut waiting: BTreeMap<u16, (Column, &str)> = pairs
        .iter()
        .filter(|(old, new)| old.name != new.name)
        .map(|(old, new)| (old.ordinal, ((*old).clone(), new.name.as_str())))
        .collect();
    let mut temporary = 0;

    while let Some((&first, _)) = waiting.first_key_value() {
        let free = waiting.iter().find_map(|(ordinal, (_, wanted))| {
            let holder = holders.get(&form(wanted));
            holder.is_none_or(|holder| holder == ordinal).then_some(*ordinal)
        });
        // Nobody can move: cycles only. One column steps aside, and its cycle is a chain.
        let ordinal = free.unwrap_or(first);
        let Some((column, wanted)) = waiting.remove(&ordinal) else { break };
        let name = match free {
            Some(_) => wanted.to_owned(),
            None => temporary_name(before, after, &mut temporary),
        };
        holders.remove(&form(&column.name));
        holders.insert(form(&name), ordinal);
        let renamed = Column { name, ..column.clone() };
        if free.is_none() {
            waiting.insert(ordinal, (renamed.clone(), wanted));
        }
        steps.push(Step { kind: StepKind::RenameColumn, before: Some(column), after: Some(renamed) });
    }
}

/// A name that neither version has, however it is folded.
fn temporary_name(before: &TableSchema, after: &TableSchema, next: &mut u32) -> String {
    loop {
        let name = format!("tidegate_rename_{next}");
        *next += 1;
        let taken = |schema: &TableSchema| schema.columns.iter().any(|column| fold(&column.name) == name);
        if !taken(before) && !taken(after) {
            return name;
        }
    }
}

/// Everything of one column but its name. What stands in the way of the new type goes
/// before it, what needs the new type comes after it.
fn alter(old: &Column, new: &Column, steps: &mut Vec<Step>) {
    let retyped = type_of(old) != type_of(new) || regenerated(old, new);
    let redefaulted = old.default_literal != new.default_literal;
    let mut current = Column { name: new.name.clone(), ..old.clone() };
    let mut run = |kind: StepKind, change: &dyn Fn(&mut Column)| {
        let mut next = current.clone();
        change(&mut next);
        steps.push(step(kind, Some(&current), Some(&next)));
        current = next;
    };
    if redefaulted && old.default_literal.is_some() && (retyped || new.default_literal.is_none()) {
        run(StepKind::DropDefault, &|column| (column.default_expression, column.default_literal) = (None, None));
    }
    if !old.nullable && new.nullable {
        run(StepKind::DropNotNull, &|column| column.nullable = true);
    }
    if retyped {
        run(StepKind::AlterType, &|column| {
            *column = Column {
                nullable: column.nullable,
                key_position: column.key_position,
                identity: column.identity,
                default_expression: match new.generated {
                    true => new.default_expression.clone(),
                    false => column.default_expression.clone(),
                },
                default_literal: column.default_literal.clone(),
                ..new.clone()
            };
        });
    }
    if redefaulted && new.default_literal.is_some() {
        run(StepKind::SetDefault, &|column| {
            column.default_expression.clone_from(&new.default_expression);
            column.default_literal.clone_from(&new.default_literal);
        });
    }
    if old.nullable && !new.nullable {
        run(StepKind::SetNotNull, &|column| column.nullable = false);
    }
}

/// SET EXPRESSION rewrites the rows that are there without changes of them (P28), as a
/// change of type does.
fn regenerated(old: &Column, new: &Column) -> bool {
    old.generated && new.generated && old.default_expression != new.default_expression
}

/// What makes a type another type. A type that was only renamed keeps its oid, and
/// labels that an enum gains change no value that is there.
fn type_of(column: &Column) -> (u32, &str, Option<&str>, i32) {
    (column.type_oid, &column.base, column.element.as_deref(), column.base_typmod)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use rand::rngs::StdRng;
    use rand::seq::{IndexedRandom, SliceRandom};
    use rand::{Rng, SeedableRng};

    use super::*;
    use crate::schema::change::state_after;
    use crate::schema::samples::{column, table};
    use crate::schema::table::{Literal, Origin, ReplicaIdentity, TableName};

    fn planned(before: Vec<Column>, after: Vec<Column>) -> SchemaChange {
        plan(Arc::new(table(before)), Arc::new(table(after)))
    }

    /// `kind:before>after` of each step.
    fn outline(change: &SchemaChange) -> Vec<String> {
        let name = |column: &Option<Column>| column.as_ref().map_or("", |column| &column.name).to_owned();
        change.steps.iter().map(|step| format!("{} {}>{}", step.kind, name(&step.before), name(&step.after))).collect()
    }

    fn names(names: &[&str]) -> Vec<Column> {
        (1..).zip(names).map(|(ordinal, name)| column(ordinal, name, "int4")).collect()
    }

    fn with_default(column: Column, text: Option<&str>) -> Column {
        Column {
            default_expression: text.map(str::to_owned),
            default_literal: text.map(|text| Literal { kind: "numeric".to_owned(), text: text.to_owned() }),
            ..column
        }
    }

    #[test]
    fn equal_versions_need_no_step() {
        let mut other = column(1, "a", "int4");
        other.enum_labels = vec!["x".to_owned()];
        other.default_expression = Some("now()".to_owned());
        other.declared = "renamed_type".to_owned();
        let change = planned(names(&["a"]), vec![other.clone()]);
        assert_eq!(change.steps, []);
        assert_eq!(state_after(&change, 1).columns, [other]);
    }

    #[test]
    fn a_column_dropped_and_added_again_under_its_name_is_dropped_and_added() {
        let change = planned(vec![column(1, "a", "int4")], vec![column(2, "a", "int4")]);
        assert_eq!(outline(&change), ["drop-column a>", "add-column >a"]);
    }

    #[test]
    fn the_same_ordinal_under_another_name_is_a_rename() {
        assert_eq!(outline(&planned(names(&["a"]), names(&["b"]))), ["rename-column a>b"]);
    }

    #[test]
    fn a_chain_of_renames_begins_at_its_free_end() {
        let change = planned(names(&["a", "b", "c"]), names(&["b", "c", "d"]));
        assert_eq!(outline(&change), ["rename-column c>d", "rename-column b>c", "rename-column a>b"]);
    }

    #[test]
    fn two_columns_swap_their_names_through_one_temporary_name() {
        let change = planned(names(&["a", "b"]), names(&["b", "a"]));
        let expected = ["rename-column a>tidegate_rename_0", "rename-column b>a", "rename-column tidegate_rename_0>b"];
        assert_eq!(outline(&change), expected);
    }

    #[test]
    fn a_temporary_name_that_is_taken_is_not_used() {
        let before = names(&["a", "b", "Tidegate_rename_0"]);
        let change = planned(before, names(&["b", "a", "tidegate_rename_1"]));
        assert_eq!(outline(&change)[1], "rename-column a>tidegate_rename_2");
    }

    #[test]
    fn a_rename_to_the_name_of_a_dropped_column_comes_after_the_drop() {
        let change = planned(names(&["a", "b"]), vec![column(2, "a", "int4"), column(3, "b", "int4")]);
        assert_eq!(outline(&change), ["drop-column a>", "rename-column b>a", "add-column >b"]);
    }

    #[test]
    fn renames_do_not_meet_on_a_destination_that_folds_case() {
        let change = planned(names(&["a", "b"]), names(&["B", "c"]));
        assert_eq!(outline(&change), ["rename-column b>c", "rename-column a>B"]);
        assert_eq!(outline(&planned(names(&["a"]), names(&["A"]))), ["rename-column a>A"]);
        // An end that cannot be there does not stop the plan.
        let change = planned(names(&["a", "A"]), names(&["A", "a"]));
        assert_eq!(change.steps.len(), 3);
        assert_eq!(folding_collisions(&change.after), [("A".to_owned(), "a".to_owned())]);
    }

    #[test]
    fn alterations_of_one_column_come_together_and_the_old_default_leaves_before_the_type() {
        let before = with_default(Column { nullable: true, ..column(1, "a", "int4") }, Some("1"));
        let after = with_default(Column { nullable: false, ..column(1, "b", "text") }, Some("x"));
        let change = planned(vec![before], vec![after]);
        let expected =
            ["rename-column a>b", "drop-default b>b", "alter-type b>b", "set-default b>b", "set-not-null b>b"];
        assert_eq!(outline(&change), expected);
    }

    #[test]
    fn defaults_are_set_and_dropped_and_not_null_comes_and_goes() {
        let plain = column(1, "a", "int4");
        let defaulted = with_default(plain.clone(), Some("1"));
        let kinds = |before: &Column, after: &Column| {
            let change = planned(vec![before.clone()], vec![after.clone()]);
            change.steps.iter().map(|step| step.kind).collect::<Vec<_>>()
        };
        assert_eq!(kinds(&plain, &defaulted), [StepKind::SetDefault]);
        assert_eq!(kinds(&defaulted, &with_default(plain.clone(), Some("2"))), [StepKind::SetDefault]);
        assert_eq!(kinds(&defaulted, &plain), [StepKind::DropDefault]);
        // It stopped being a literal.
        let computed = Column { default_expression: Some("now()".to_owned()), ..plain.clone() };
        assert_eq!(kinds(&defaulted, &computed), [StepKind::DropDefault]);
        let required = Column { nullable: false, ..plain.clone() };
        assert_eq!(kinds(&plain, &required), [StepKind::SetNotNull]);
        assert_eq!(kinds(&required, &plain), [StepKind::DropNotNull]);
    }

    #[test]
    fn another_generation_expression_is_a_rewrite_and_its_end_is_none() {
        let generated = |expression: &str| Column {
            generated: true,
            default_expression: Some(expression.to_owned()),
            ..column(1, "a", "int4")
        };
        let change = planned(vec![generated("(n * 2)")], vec![generated("(n * 3)")]);
        assert_eq!(outline(&change), ["alter-type a>a"]);
        assert_eq!(change.steps[0].after, Some(generated("(n * 3)")));
        assert_eq!(planned(vec![generated("(n * 2)")], vec![generated("(n * 2)")]).steps, []);
        // DROP EXPRESSION: the values stay.
        assert_eq!(planned(vec![generated("(n * 2)")], vec![column(1, "a", "int4")]).steps, []);
    }

    #[test]
    fn a_relation_never_clears_what_it_does_not_carry() {
        let known = with_default(Column { nullable: false, ..column(1, "a", "int4") }, Some("1"));
        let before = Arc::new(table(vec![known.clone()]));
        let after = TableSchema { origin: Origin::Catalog, ..table(vec![column(1, "b", "int4")]) };
        let change = plan(before.clone(), Arc::new(after));
        assert_eq!(outline(&change), ["rename-column a>b"]);
        assert_eq!(state_after(&change, 1).columns, [Column { name: "b".to_owned(), ..known }]);
        // A message carries all of it.
        let change = plan(before, Arc::new(table(vec![column(1, "a", "int4")])));
        assert_eq!(outline(&change), ["drop-default a>a", "drop-not-null a>a"]);
    }

    #[test]
    fn a_relation_does_not_forbid_nulls_that_rows_before_the_catalog_was_read_may_have() {
        let required = Column { nullable: false, ..column(1, "a", "int4") };
        let after = TableSchema { origin: Origin::Catalog, ..table(vec![required]) };
        assert_eq!(plan(Arc::new(table(names(&["a"]))), Arc::new(after)).steps, []);
    }

    #[test]
    fn another_key_and_another_name_are_steps_of_the_table_at_the_end() {
        let keyed = |mut columns: Vec<Column>, key: &[u16]| {
            for (position, ordinal) in (1..).zip(key) {
                let column = columns.iter_mut().find(|column| column.ordinal == *ordinal).unwrap();
                (column.key_position, column.identity) = (Some(position), true);
            }
            columns
        };
        let before = table(keyed(names(&["a", "b"]), &[1]));
        let mut after = table(keyed(names(&["a", "b", "c"]), &[3, 1]));
        after.name = TableName::new("public", "t2");
        let change = plan(Arc::new(before.clone()), Arc::new(after.clone()));
        assert_eq!(outline(&change), ["add-column >c", "change-key >", "rename-table >"]);
        assert_eq!(state_after(&change, 1).merge_key(), [1]);
        assert_eq!(state_after(&change, 2).merge_key(), [3, 1]);
        assert_eq!(state_after(&change, 2).name, before.name);
        assert_eq!(state_after(&change, 3), after);

        // FULL without a change of key: rows are named as before.
        let mut full = before.clone();
        full.replica_identity = ReplicaIdentity::Full;
        full.columns.iter_mut().for_each(|column| column.identity = true);
        assert_eq!(plan(Arc::new(before), Arc::new(full)).steps, []);
    }

    #[test]
    fn a_part_of_a_change_leads_from_the_table_before_it_to_the_table_after_it() {
        let change = planned(names(&["a", "b"]), names(&["b", "a", "c"]));
        let wire = |schema: &TableSchema| schema.to_wire(&TableName::new("mirror", &schema.name.name), "merge", "{}");
        let part = change.steps_to_wire(1..3, wire);
        let columns =
            |table: &crate::wire::Table| table.columns.iter().map(|column| column.name.clone()).collect::<Vec<_>>();
        assert_eq!(columns(&part.before), ["tidegate_rename_0", "b"]);
        assert_eq!(columns(&part.after), ["b", "a"]);
        assert_eq!(part.steps.len(), 2);
        let whole = change.steps_to_wire(0..change.steps.len(), wire);
        assert_eq!(
            (columns(&whole.before), columns(&whole.after)),
            (vec!["a".into(), "b".into()], vec!["b".into(), "a".into(), "c".into()])
        );
        assert_eq!(whole.steps.last().unwrap().kind, "add-column");
        assert_eq!(change.steps_to_wire(9..12, wire).steps.len(), 0);
    }

    #[test]
    fn a_table_that_is_renamed_goes_from_its_place_of_before_to_that_of_its_new_name() {
        let before = table(names(&["a", "b"]));
        let mut after = table(names(&["a", "z"]));
        after.name = TableName::new("public", "renamed");
        let change = plan(Arc::new(before.clone()), Arc::new(after));
        let wire = |schema: &TableSchema| schema.to_wire(&schema.name, "merge", "{}");
        let places = |steps| {
            let part = change.steps_to_wire(steps, wire);
            [part.before, part.after].map(|table| (table.source.name.clone(), table.target.name.clone()))
        };
        let (old, new) = (before.name.name.as_str(), "renamed");
        let both = |name: &str| (name.to_owned(), name.to_owned());
        assert_eq!(places(0..1), [both(old), both(old)], "columns change where the table is");
        assert_eq!(places(1..2), [both(old), both(new)]);
    }

    /// A table that knows names and what was done to them, not plans.
    struct Model(Vec<Column>);

    impl Model {
        fn run(&mut self, step: &Step) {
            match (&step.before, &step.after) {
                (Some(before), Some(after)) => {
                    let index = self.index(before);
                    let mut allowed = after.clone();
                    match step.kind {
                        StepKind::RenameColumn => allowed.name.clone_from(&before.name),
                        StepKind::SetDefault | StepKind::DropDefault => {
                            assert_eq!(step.kind == StepKind::SetDefault, after.default_literal.is_some());
                            allowed.default_expression.clone_from(&before.default_expression);
                            allowed.default_literal.clone_from(&before.default_literal);
                        }
                        StepKind::SetNotNull | StepKind::DropNotNull => {
                            assert_eq!(step.kind == StepKind::DropNotNull, after.nullable);
                            allowed.nullable = before.nullable;
                        }
                        StepKind::AlterType => {
                            allowed.declared.clone_from(&before.declared);
                            allowed.base.clone_from(&before.base);
                            allowed.type_oid = before.type_oid;
                        }
                        other => panic!("{other} does not alter a column"),
                    }
                    assert_eq!(allowed, *before, "{} changed something else", step.kind);
                    assert_ne!(before, after);
                    self.0[index] = after.clone();
                }
                (Some(before), None) => drop(self.0.remove(self.index(before))),
                (None, Some(after)) => {
                    assert!(self.0.iter().all(|column| column.ordinal != after.ordinal));
                    self.0.push(after.clone());
                    self.0.sort_by_key(|column| column.ordinal);
                }
                (None, None) => panic!("no step of the table was to be planned"),
            }
        }

        fn index(&self, column: &Column) -> usize {
            self.0.iter().position(|other| other == column).expect("the step begins where the table is")
        }

        fn has_unique_names(&self, form: impl Fn(&str) -> String) -> bool {
            let names: HashSet<String> = self.0.iter().map(|column| form(&column.name)).collect();
            names.len() == self.0.len()
        }
    }

    const NAMES: [&str; 10] = ["a", "b", "c", "d", "e", "A", "B", "é", "É", "tidegate_rename_0"];

    fn random_column(random: &mut StdRng, ordinal: u16, name: &str) -> Column {
        let base = ["int4", "int8", "text"].choose(random).unwrap();
        let default = ["1", "2", ""].choose(random).filter(|text| !text.is_empty());
        let nullable = random.random();
        with_default(Column { nullable, ..column(ordinal, name, base) }, default.copied())
    }

    fn random_names(random: &mut StdRng, count: usize) -> Vec<&'static str> {
        let mut names = NAMES;
        names.shuffle(random);
        names[..count].to_vec()
    }

    fn random_pair(random: &mut StdRng) -> (Vec<Column>, Vec<Column>) {
        let count = random.random_range(1..=7);
        let before: Vec<Column> = (1..)
            .zip(random_names(random, count))
            .map(|(ordinal, name)| random_column(random, ordinal, name))
            .collect();
        let mut ordinals: Vec<u16> = before.iter().map(|column| column.ordinal).collect();
        ordinals.retain(|_| random.random_bool(0.8));
        ordinals.extend((0..random.random_range(0..3_u16)).map(|more| count as u16 + 1 + more));
        let shuffled = random.random_bool(0.5);
        let after = ordinals.iter().zip(random_names(random, ordinals.len())).map(|(ordinal, name)| {
            let old = before.iter().find(|column| column.ordinal == *ordinal);
            match old {
                // Only renamed: chains and cycles among few names.
                Some(old) if shuffled => Column { name: name.to_owned(), ..old.clone() },
                _ => random_column(random, *ordinal, name),
            }
        });
        let after = after.collect();
        (before, after)
    }

    fn phase(kind: StepKind) -> u8 {
        match kind {
            StepKind::DropColumn => 0,
            StepKind::RenameColumn => 1,
            StepKind::AddColumn => 2,
            _ => 3,
        }
    }

    #[test]
    fn every_plan_runs_step_by_step_through_legal_tables_and_ends_at_the_version_after() {
        let mut with_cycle = 0;
        for seed in 0..20_000 {
            let mut random = StdRng::seed_from_u64(seed);
            let (before, after) = random_pair(&mut random);
            let change = planned(before.clone(), after.clone());
            let folds = folding_collisions(&change.before).is_empty() && folding_collisions(&change.after).is_empty();
            let mut model = Model(before);
            assert_eq!(state_after(&change, 0).columns, model.0);
            let mut last = change.before.columns.clone();
            for (index, step) in change.steps.iter().enumerate() {
                model.run(step);
                assert!(model.has_unique_names(str::to_owned), "seed {seed}: {:?}", outline(&change));
                assert!(!folds || model.has_unique_names(fold), "seed {seed}: {:?}", outline(&change));
                let state = state_after(&change, index + 1).columns;
                assert_eq!(state, model.0, "seed {seed}: {:?}", outline(&change));
                assert_ne!(state, last, "seed {seed}: recovery could not tell step {index} from its beginning");
                last = state;
            }
            assert_eq!(model.0, after, "seed {seed}: {:?}", outline(&change));
            assert!(
                change.steps.iter().map(|step| phase(step.kind)).is_sorted(),
                "seed {seed}: {:?}",
                outline(&change)
            );
            with_cycle += usize::from(outline(&change).iter().any(|step| step.contains(">tidegate_rename_")));
        }
        assert!(with_cycle > 500, "only {with_cycle} plans had a cycle");
    }
}
