//! Schema changes, step by step and after an interruption.

use postgres::mirror::Mirror;
use tidegate_sdk::model::{Column, FailureScope, SchemaChange, SchemaStep, SnapshotId, Table, TableName};

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
    let (after, id) = (later(&t, t.columns.clone()), t.columns[0].clone());
    let change = SchemaChange { before: t, after, steps: vec![step("fold-table", Some(&id), Some(&id))] };
    let failure = mirror.check_schema(&change).unwrap_err();
    assert_eq!(failure.code, "unsupported");
    assert!(failure.message.contains("fold-table"), "{}", failure.message);
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

fn at_place(t: &Table, schema: &str, name: &str) -> Table {
    let target = TableName { schema: schema.to_owned(), name: name.to_owned() };
    Table { source: target.clone(), target, ..later(t, t.columns.clone()) }
}

fn renamed(before: &Table, after: &Table) -> SchemaChange {
    SchemaChange { before: before.clone(), after: after.clone(), steps: vec![step("rename-table", None, None)] }
}

#[test]
fn a_renamed_table_goes_to_its_new_place_with_its_rows_and_its_position() {
    let db = database("renamed");
    let (mut mirror, mut t) = start(&db);
    // Another name, another schema that is not there yet, both at once.
    for (schema, name) in [("public", "t2"), ("moved", "t2"), ("public", "t \"3\"")] {
        let after = at_place(&t, schema, name);
        let change = renamed(&t, &after);
        assert!(!mirror.check_schema(&change).unwrap().is_empty());
        assert_eq!(mirror.inspect_table(&after).unwrap(), None, "asking does nothing");
        mirror.apply_schema(&change).unwrap();
        agree(&mut mirror, &after);
        assert_eq!(mirror.inspect_table(&t).unwrap(), None);
        mirror.apply_schema(&change).unwrap();
        assert_eq!(mirror.attach_table(&after).unwrap(), Some(at(1_001, 0)));
        t = after;
    }
    let rows = [[V("7"), V("y"), V("8")]];
    let rows: Vec<&[C]> = rows.iter().map(|row| &row[..]).collect();
    mirror.write_group(&group(2, vec![merged(&t, Some(at(1_002, 0)), &rows, &[], &[])])).unwrap();
    assert_eq!(server().sql(&db, "SELECT count(*), count(*) FILTER (WHERE a = 'y') FROM \"t \"\"3\"\"\""), "60|1");
}

#[test]
fn a_rename_that_the_mapping_hides_does_nothing_and_one_to_a_place_that_is_taken_is_refused() {
    let db = database("rename_taken");
    let (mut mirror, t) = start(&db);
    let hidden = Table { target: t.target.clone(), ..at_place(&t, "public", "elsewhere") };
    let change = renamed(&t, &hidden);
    assert_eq!(mirror.check_schema(&change).unwrap(), []);
    mirror.apply_schema(&change).unwrap();
    agree(&mut mirror, &hidden);
    server().sql(&db, "CREATE TABLE taken (id int)");
    let taken = at_place(&hidden, "public", "taken");
    let change = renamed(&hidden, &taken);
    for failure in [mirror.check_schema(&change).unwrap_err(), mirror.apply_schema(&change).unwrap_err()] {
        assert_eq!((failure.code.as_str(), failure.scope), ("name-collision", FailureScope::Table));
        assert!(failure.message.contains("public.taken"), "{}", failure.message);
    }
    agree(&mut mirror, &hidden);
}

#[test]
fn a_rename_that_is_cut_off_is_done_whole_or_not_at_all() {
    for before_commit in [true, false] {
        let db = database(if before_commit { "rename_cut_before" } else { "rename_cut_after" });
        let (mut mirror, faults) = open(&db, 1);
        let t = table(1, "t", &[1], &["id:int4", "a:text?"]);
        mirror.begin_copy(&t, "r").unwrap();
        mirror.finish_copy(&t, "r", at(1_000, 0)).unwrap();
        let after = at_place(&t, "other", "t2");
        let change = renamed(&t, &after);
        match before_commit {
            true => faults.borrow_mut().cut_before = Some("COMMIT\0"),
            false => faults.borrow_mut().cut_after = Some("COMMIT\0"),
        }
        mirror.apply_schema(&change).unwrap_err();
        let (is, is_not) = if before_commit { (&t, &after) } else { (&after, &t) };
        assert_eq!(mirror.inspect_table(is).unwrap(), Some(mirror.render_table(is).unwrap()));
        assert_eq!(mirror.inspect_table(is_not).unwrap(), None);
        mirror.apply_schema(&change).unwrap();
        agree(&mut mirror, &after);
    }
}

/// The columns of the primary key, and of other unique indexes.
fn keys(db: &str) -> String {
    server().sql(
        db,
        "SELECT string_agg(CASE WHEN indisprimary THEN '*' ELSE '' END || regexp_replace(pg_get_indexdef(indexrelid), '.*USING btree ', ''), ' ' ORDER BY indisprimary DESC)
         FROM pg_index WHERE indrelid = 't'::regclass AND indisunique",
    )
}

fn keyed_by(t: &Table, key: &[u16], columns: Vec<Column>) -> Table {
    Table { key: key.to_vec(), ..later(t, columns) }
}

#[test]
fn another_key_takes_the_place_of_the_one_that_merges_went_by() {
    let db = database("another_key");
    let (mut mirror, t) = start(&db);
    server().sql(&db, "UPDATE t SET a = 'a' || id");
    let change_key = || step("change-key", None, None);
    // The old key may be null from here on, the new one may not.
    let loose = Column { nullable: true, ..t.columns[0].clone() };
    let strict = Column { nullable: false, ..t.columns[1].clone() };
    let after = keyed_by(&t, &[2], vec![loose.clone(), strict.clone(), t.columns[2].clone()]);
    let steps = vec![
        step("drop-not-null", Some(&t.columns[0]), Some(&loose)),
        step("set-not-null", Some(&t.columns[1]), Some(&strict)),
        change_key(),
    ];
    let change = SchemaChange { before: t.clone(), after: after.clone(), steps };
    assert!(mirror.check_schema(&change).unwrap().iter().any(|notice| notice.code == "postgres.change-key"));
    mirror.apply_schema(&change).unwrap();
    agree(&mut mirror, &after);
    assert_eq!(keys(&db), "*(a)");
    let rows = [[N, V("a7"), V("70")], [N, V("new"), V("71")]];
    let rows: Vec<&[C]> = rows.iter().map(|row| &row[..]).collect();
    mirror.write_group(&group(2, vec![merged(&after, Some(at(1_002, 0)), &rows, &[], &[])])).unwrap();
    assert_eq!(
        server().sql(&db, "SELECT count(*), count(*) FILTER (WHERE id IS NULL), sum(b) FILTER (WHERE b >= 70) FROM t"),
        "61|2|141"
    );

    // A unique index that somebody made is used, and one on the same columns stays.
    server().sql(&db, "CREATE UNIQUE INDEX mine ON t (a, b)");
    let firm = Column { nullable: false, ..after.columns[2].clone() };
    let both = keyed_by(&after, &[3, 2], vec![loose, strict, firm.clone()]);
    let steps = vec![step("set-not-null", Some(&after.columns[2]), Some(&firm)), change_key()];
    mirror.apply_schema(&SchemaChange { before: after, after: both.clone(), steps }).unwrap();
    agree(&mut mirror, &both);
    assert_eq!(keys(&db), "(a, b)");
    let turned = keyed_by(&both, &[2, 3], both.columns.clone());
    mirror.apply_schema(&SchemaChange { before: both, after: turned.clone(), steps: vec![change_key()] }).unwrap();
    agree(&mut mirror, &turned);
    assert_eq!(keys(&db), "(a, b)");
}

#[test]
fn rows_that_a_key_cannot_name_are_refused_before_and_while_it_changes() {
    for (broken, what) in [("UPDATE t SET a = NULL WHERE id = 3", "null"), ("UPDATE t SET a = 'x'", "(x)")] {
        let db = database(if what == "null" { "null_in_a_key" } else { "twice_a_key" });
        let (mut mirror, t) = start(&db);
        server().sql(&db, &format!("UPDATE t SET a = 'a' || id; {broken}"));
        let after = keyed_by(&t, &[2], t.columns.clone());
        let change = SchemaChange { before: t.clone(), after, steps: vec![step("change-key", None, None)] };
        for failure in [mirror.check_schema(&change).unwrap_err(), mirror.apply_schema(&change).unwrap_err()] {
            assert_eq!((failure.code.as_str(), failure.scope), ("postgres.not-a-key", FailureScope::Table));
            assert!(failure.message.contains("\"a\""), "{what}: {}", failure.message);
        }
        agree(&mut mirror, &t);
        assert_eq!(keys(&db), "*(id)");
    }
}
