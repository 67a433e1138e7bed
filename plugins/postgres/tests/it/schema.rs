//! Schema changes, step by step and after an interruption.

use postgres::mirror::Mirror;
use tidegate_sdk::model::{Column, FailureScope, SchemaChange, SchemaStep, SnapshotId, Table};

use crate::support::rows::*;
use crate::support::{Native, database, open, server};

/// The table with other columns, one version later.
fn later(before: &Table, columns: Vec<Column>) -> Table {
    Table { columns, snapshot: SnapshotId { commit: before.snapshot.commit + 1, message: 5 }, ..before.clone() }
}

fn step(kind: &str, before: Option<&Column>, after: Option<&Column>) -> SchemaStep {
    SchemaStep { kind: kind.to_owned(), before: before.cloned(), after: after.cloned() }
}

fn start(db: &str) -> (Mirror<Native>, Table) {
    let (mut mirror, _) = open(db, 1);
    let t = table(1, "t", &[1], &["id:int4", "a:text?", "b:int4?"]);
    mirror.begin_copy(&t, "r").unwrap();
    mirror.finish_copy(&t, "r", at(1_000, 0)).unwrap();
    let rows: Vec<[C; 3]> =
        (0..60).map(|id: u32| [V(Box::leak(id.to_string().into_boxed_str())), V("x"), V("7")]).collect();
    let rows: Vec<&[C]> = rows.iter().map(|row| &row[..]).collect();
    mirror.write_group(&group(1, vec![merged(&t, Some(at(1_001, 0)), &rows, &[], &[])])).unwrap();
    (mirror, t)
}

fn agree(mirror: &mut Mirror<Native>, t: &Table) {
    assert_eq!(mirror.inspect_table(t).unwrap(), Some(mirror.render_table(t).unwrap()));
}

fn column_of(db: &str, name: &str) -> String {
    server().sql(
        db,
        &format!(
            "SELECT format_type(a.atttypid, a.atttypmod), a.attnotnull, coalesce(pg_get_expr(d.adbin, d.adrelid), '') FROM pg_attribute a \
             LEFT JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum WHERE a.attrelid = 't'::regclass AND a.attname = '{name}'"
        ),
    )
}

#[test]
fn each_step_does_what_it_says_and_the_catalog_agrees() {
    let db = database("each_step");
    let (mut mirror, mut t) = start(&db);
    let (a, b) = (t.columns[1].clone(), t.columns[2].clone());
    let c = Column { nullable: false, ..with_default(column(4, "c:text"), "it's") };
    let renamed = Column { name: "A b".to_owned(), ..a.clone() };
    let wide = Column { base: "int8".to_owned(), ..b.clone() };
    let with = with_default(wide.clone(), "5");
    let strict = Column { nullable: false, ..with.clone() };
    let mut run = |steps: Vec<SchemaStep>, columns: Vec<Column>| {
        let after = later(&t, columns);
        let change = SchemaChange { before: t.clone(), after: after.clone(), steps };
        mirror.check_schema(&change).unwrap();
        mirror.apply_schema(&change).unwrap();
        agree(&mut mirror, &after);
        t = after;
    };
    let id = table(1, "t", &[1], &["id:int4"]).columns[0].clone();
    run(vec![step("add-column", None, Some(&c))], vec![id.clone(), a.clone(), b.clone(), c.clone()]);
    assert_eq!(column_of(&db, "c"), "text|t|'it''s'::text");
    assert_eq!(server().sql(&db, "SELECT DISTINCT c FROM t"), "it's");
    run(vec![step("rename-column", Some(&a), Some(&renamed))], vec![id.clone(), renamed.clone(), b.clone(), c.clone()]);
    run(vec![step("drop-column", Some(&c), None)], vec![id.clone(), renamed.clone(), b.clone()]);
    run(vec![step("alter-type", Some(&b), Some(&wide))], vec![id.clone(), renamed.clone(), wide.clone()]);
    assert_eq!(column_of(&db, "b"), "bigint|f|");
    run(vec![step("set-default", Some(&wide), Some(&with))], vec![id.clone(), renamed.clone(), with.clone()]);
    assert_eq!(column_of(&db, "b"), "bigint|f|'5'::bigint");
    run(vec![step("set-not-null", Some(&with), Some(&strict))], vec![id.clone(), renamed.clone(), strict.clone()]);
    assert_eq!(column_of(&db, "b"), "bigint|t|'5'::bigint");
    run(vec![step("drop-not-null", Some(&strict), Some(&with))], vec![id.clone(), renamed.clone(), with.clone()]);
    run(vec![step("drop-default", Some(&with), Some(&wide))], vec![id, renamed, wide]);
    assert_eq!(column_of(&db, "b"), "bigint|f|");
    assert_eq!(server().sql(&db, "SELECT count(*), sum(b) FROM t"), "60|420");
}

#[test]
fn rows_of_the_new_version_follow_without_another_attach() {
    let db = database("rows_follow");
    let (mut mirror, t) = start(&db);
    let added = column(4, "c:text?");
    let after = later(&t, vec![t.columns[0].clone(), t.columns[2].clone(), added.clone()]);
    let steps = vec![step("drop-column", Some(&t.columns[1]), None), step("add-column", None, Some(&added))];
    mirror.apply_schema(&SchemaChange { before: t.clone(), after: after.clone(), steps }).unwrap();
    // Enough rows for the staging table, which had the old columns.
    let rows: Vec<[C; 3]> =
        (0..60).map(|id: u32| [V(Box::leak(id.to_string().into_boxed_str())), V("1"), V("new")]).collect();
    let rows: Vec<&[C]> = rows.iter().map(|row| &row[..]).collect();
    mirror.write_group(&group(2, vec![merged(&after, Some(at(1_002, 0)), &rows, &[], &[])])).unwrap();
    assert_eq!(server().sql(&db, "SELECT count(*), sum(b), min(c) FROM t"), "60|60|new");
    // A column that the version does not have is not left out silently.
    let old = merged(&t, Some(at(1_003, 0)), &[&[V("1"), V("x"), V("7")]], &[], &[]);
    assert_eq!(mirror.write_group(&group(3, vec![old])).unwrap_err().code, "postgres.contract");
}

#[test]
fn two_columns_that_swap_names_end_swapped() {
    let db = database("swap_names");
    let (mut mirror, t) = start(&db);
    let named = |column: &Column, name: &str| Column { name: name.to_owned(), ..column.clone() };
    let (a, b) = (&t.columns[1], &t.columns[2]);
    let (free, a2, b2) = (named(a, "tidegate_swap"), named(a, "b"), named(b, "a"));
    let after = later(&t, vec![t.columns[0].clone(), a2.clone(), b2.clone()]);
    let steps = vec![
        step("rename-column", Some(a), Some(&free)),
        step("rename-column", Some(b), Some(&b2)),
        step("rename-column", Some(&free), Some(&a2)),
    ];
    mirror.apply_schema(&SchemaChange { before: t, after: after.clone(), steps }).unwrap();
    agree(&mut mirror, &after);
    assert_eq!(column_of(&db, "a"), "integer|f|");
}

#[test]
fn a_change_cut_before_commit_is_not_done_and_one_cut_behind_it_is_done_once() {
    for (name, before_commit) in [("ddl_before", true), ("ddl_after", false)] {
        let db = database(name);
        let (mut mirror, faults) = open(&db, 1);
        let t = table(1, "t", &[1], &["id:int4", "a:text?"]);
        mirror.begin_copy(&t, "r").unwrap();
        mirror.finish_copy(&t, "r", at(1, 0)).unwrap();
        let renamed = Column { name: "b".to_owned(), ..t.columns[1].clone() };
        let added = column(3, "a:int4?");
        let after = later(&t, vec![t.columns[0].clone(), renamed.clone(), added.clone()]);
        let steps =
            vec![step("rename-column", Some(&t.columns[1]), Some(&renamed)), step("add-column", None, Some(&added))];
        let change = SchemaChange { before: t.clone(), after: after.clone(), steps };
        if before_commit {
            faults.borrow_mut().cut_before = Some("COMMIT\0");
        } else {
            faults.borrow_mut().cut_after = Some("COMMIT\0");
        }
        mirror.apply_schema(&change).unwrap_err();
        let there = mirror.inspect_table(&t).unwrap().unwrap();
        let expected = mirror.render_table(if before_commit { &t } else { &after }).unwrap();
        assert_eq!(there, expected, "the snapshot tells which of the two it is");
        mirror.apply_schema(&change).unwrap();
        agree(&mut mirror, &after);
    }
}

#[test]
fn steps_that_are_done_already_are_success() {
    let db = database("done_already");
    let (mut mirror, t) = start(&db);
    server().sql(&db, "ALTER TABLE t ADD c text; ALTER TABLE t DROP a; ALTER TABLE t RENAME b TO bb");
    let renamed = Column { name: "bb".to_owned(), ..t.columns[2].clone() };
    let added = column(4, "c:text?");
    let after = later(&t, vec![t.columns[0].clone(), renamed.clone(), added.clone()]);
    let steps = vec![
        step("drop-column", Some(&t.columns[1]), None),
        step("rename-column", Some(&t.columns[2]), Some(&renamed)),
        step("add-column", None, Some(&added)),
    ];
    mirror.apply_schema(&SchemaChange { before: t, after: after.clone(), steps }).unwrap();
    agree(&mut mirror, &after);
}

#[test]
fn a_change_that_fails_half_way_leaves_the_table_as_it_was() {
    let db = database("half_way");
    let (mut mirror, t) = start(&db);
    server().sql(&db, "UPDATE t SET b = NULL WHERE id = 3");
    let added = column(4, "c:text?");
    let strict = Column { nullable: false, ..t.columns[2].clone() };
    let after = later(&t, vec![t.columns[0].clone(), t.columns[1].clone(), strict.clone(), added.clone()]);
    let steps = vec![step("add-column", None, Some(&added)), step("set-not-null", Some(&t.columns[2]), Some(&strict))];
    let failure = mirror.apply_schema(&SchemaChange { before: t.clone(), after, steps }).unwrap_err();
    assert_eq!((failure.scope, failure.table_id), (FailureScope::Table, Some(1)), "{}", failure.message);
    assert!(failure.message.contains("set-not-null b"), "{}", failure.message);
    agree(&mut mirror, &t);
    mirror
        .write_group(&group(2, vec![merged(&t, Some(at(1_002, 0)), &[&[V("1"), V("y"), V("8")]], &[], &[])]))
        .unwrap();
}

#[test]
fn a_column_of_the_same_name_and_another_type_is_not_taken_for_ours() {
    let db = database("collision");
    let (mut mirror, t) = start(&db);
    server().sql(&db, "ALTER TABLE t ADD c int");
    let added = column(4, "c:text?");
    let after = later(&t, [t.columns.clone(), vec![added.clone()]].concat());
    let change = SchemaChange { before: t, after, steps: vec![step("add-column", None, Some(&added))] };
    assert_eq!(mirror.check_schema(&change).unwrap_err().code, "name-collision");
    assert_eq!(mirror.apply_schema(&change).unwrap_err().code, "name-collision");
}

#[test]
fn a_step_that_is_not_known_is_refused_by_name() {
    let db = database("unknown_step");
    let (mut mirror, t) = start(&db);
    let after = later(&t, t.columns.clone());
    let change = SchemaChange { before: t, after, steps: vec![step("change-key", None, None)] };
    let failure = mirror.check_schema(&change).unwrap_err();
    assert_eq!(failure.code, "unsupported");
    assert!(failure.message.contains("change-key"), "{}", failure.message);
}

#[test]
fn what_cannot_be_cast_by_the_server_is_cast_through_its_text() {
    let db = database("through_text");
    let (mut mirror, _) = open(&db, 1);
    let t = table(1, "t", &[1], &["id:int4", "a:enum?"]);
    mirror.begin_copy(&t, "r").unwrap();
    mirror.write_group(&group(1, vec![copied(&t, "r", "b", &[&[V("1"), V("42")]])])).unwrap();
    mirror.finish_copy(&t, "r", at(1, 0)).unwrap();
    let number = Column { base: "int4".to_owned(), ..t.columns[1].clone() };
    let after = later(&t, vec![t.columns[0].clone(), number.clone()]);
    let steps = vec![step("alter-type", Some(&t.columns[1]), Some(&number))];
    mirror.apply_schema(&SchemaChange { before: t, after: after.clone(), steps }).unwrap();
    agree(&mut mirror, &after);
    assert_eq!(server().sql(&db, "SELECT a + 1 FROM t"), "43");
}
