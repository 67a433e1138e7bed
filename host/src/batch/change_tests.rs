use super::*;
use crate::batch::gather::{find, is_missing, is_null};
use crate::batch::layout::layout;
use crate::batch::render::render;
use crate::batch::testing::{Sent, at, column, cut_tuple, key_column, old, schema, text, tuple, whole_map};
use crate::schema::table::{Column, Literal, ReplicaIdentity};

/// Cells of one row as text; `-` for missing, `null` for null.
fn row(schema: &TableSchema, rows: &wire::Rows, row: u32) -> Vec<String> {
    let cell = |column: &Column| match find(rows, column.ordinal) {
        None => "-".to_owned(),
        Some(values) if is_missing(values, row) => "-".to_owned(),
        Some(values) if is_null(values, row) => "null".to_owned(),
        Some(values) => {
            let mut out = Vec::new();
            assert!(render(values, row, layout(column), &mut out));
            String::from_utf8(out).unwrap()
        }
    };
    schema.columns.iter().map(cell).collect()
}

fn key_and_document(identity: ReplicaIdentity) -> Arc<TableSchema> {
    schema(identity, vec![key_column(1, "int4", 1), column(2, "text"), column(3, "int4")])
}

#[test]
fn an_unchanged_toasted_cell_is_missing_and_not_null() {
    let schema = key_and_document(ReplicaIdentity::Default);
    let map = whole_map(&schema);
    let mut builder = ChangeBuilder::new(Arc::clone(&schema));
    builder.update(&map, None, &tuple(&[text(1), Sent::Unchanged, Sent::Null]), at(0)).unwrap();
    builder.update(&map, None, &tuple(&[text(1), text("x"), text(2)]), at(1)).unwrap();
    let batch = builder.finish();
    assert_eq!(row(&schema, &batch.rows.rows, 0), ["1", "-", "null"]);
    assert_eq!(row(&schema, &batch.rows.rows, 1), ["1", "x", "2"]);
    assert_eq!((batch.rows.ops.as_slice(), batch.rows.old_index.len()), ([UPDATE, UPDATE].as_slice(), 0));
    assert_eq!(batch.rows.old_rows.columns.len(), 0);
}

#[test]
fn under_full_identity_an_unchanged_cell_comes_from_the_old_row() {
    let schema = key_and_document(ReplicaIdentity::Full);
    let map = whole_map(&schema);
    let mut builder = ChangeBuilder::new(Arc::clone(&schema));
    let before = old(true, &[text(1), text("long"), Sent::Null]);
    builder.update(&map, Some(&before), &tuple(&[text(1), Sent::Unchanged, text(5)]), at(0)).unwrap();
    let batch = builder.finish();
    assert_eq!(row(&schema, &batch.rows.rows, 0), ["1", "long", "5"]);
    assert_eq!(row(&schema, &batch.rows.old_rows, 0), ["1", "long", "null"]);
    assert_eq!(batch.rows.old_index, [0]);
}

#[test]
fn an_unchanged_cell_of_the_key_comes_from_the_old_key() {
    let schema = key_and_document(ReplicaIdentity::Default);
    let map = whole_map(&schema);
    let mut builder = ChangeBuilder::new(Arc::clone(&schema));
    let before = old(false, &[text(1), Sent::Null, Sent::Null]);
    builder.update(&map, Some(&before), &tuple(&[Sent::Unchanged, Sent::Unchanged, text(5)]), at(0)).unwrap();
    let batch = builder.finish();
    assert_eq!(row(&schema, &batch.rows.rows, 0), ["1", "-", "5"]);
    assert_eq!(row(&schema, &batch.rows.old_rows, 0), ["1", "-", "-"]);
}

#[test]
fn a_delete_by_key_blanks_no_other_column_and_one_by_whole_row_has_them_all() {
    let schema = key_and_document(ReplicaIdentity::Default);
    let map = whole_map(&schema);
    let mut builder = ChangeBuilder::new(Arc::clone(&schema));
    builder.delete(&map, &old(false, &[text(7), Sent::Null, Sent::Null]), at(0)).unwrap();
    builder.delete(&map, &old(true, &[text(8), text("x"), Sent::Null]), at(1)).unwrap();
    let batch = builder.finish();
    assert_eq!(row(&schema, &batch.rows.rows, 0), ["7", "-", "-"]);
    assert_eq!(row(&schema, &batch.rows.rows, 1), ["8", "x", "null"]);
}

#[test]
fn columns_the_relation_lacks_are_the_default_in_new_rows_and_missing_in_others() {
    let default = Some(Literal { kind: "numeric".into(), text: "5".into() });
    let columns =
        vec![key_column(1, "int4", 1), Column { default_literal: default, ..column(4, "int4") }, column(5, "text")];
    let schema = schema(ReplicaIdentity::Default, columns);
    // The relation has a column 2 that was dropped since, and one nobody knows.
    let map = RelationMap::new(vec![Some(2), Some(1), None], &schema);
    let mut builder = ChangeBuilder::new(Arc::clone(&schema));
    let cells = [text("gone"), text(1), text("unknown")];
    builder.insert(&map, &tuple(&cells), at(0)).unwrap();
    builder.update(&map, None, &tuple(&cells), at(1)).unwrap();
    builder.delete(&map, &old(true, &cells), at(2)).unwrap();
    let rows = builder.finish().rows.rows;
    assert_eq!(row(&schema, &rows, 0), ["1", "5", "null"]);
    assert_eq!(row(&schema, &rows, 1), ["1", "-", "-"]);
    assert_eq!(row(&schema, &rows, 2), ["1", "-", "-"]);
}

#[test]
fn a_refused_row_leaves_nothing_behind() {
    let schema = key_and_document(ReplicaIdentity::Full);
    let map = whole_map(&schema);
    let mut builder = ChangeBuilder::new(Arc::clone(&schema));
    let good = tuple(&[text(1), text("a"), Sent::Null]);
    let before = old(true, &[text(0), text("b"), text(3)]);
    builder.update(&map, Some(&before), &good, at(0)).unwrap();
    assert!(builder.insert(&map, &cut_tuple(3), at(1)).is_err());
    let cut = OldTuple { whole: true, tuple: cut_tuple(3) };
    assert!(builder.update(&map, Some(&cut), &good, at(1)).is_err());
    assert_eq!(builder.insert(&map, &tuple(&[text(1)]), at(1)).unwrap_err().code(), "batch.tuple");
    let mut other = at(1);
    other.position.epoch += 1;
    assert_eq!(builder.update(&map, Some(&before), &good, other).unwrap_err().code(), "batch.epoch");
    builder.update(&map, Some(&before), &good, at(1)).unwrap();
    let batch = builder.finish();
    assert_eq!(batch.rows.old_index, [0, 1]);
    for at in [0, 1] {
        assert_eq!(row(&schema, &batch.rows.rows, at), ["1", "a", "null"]);
        assert_eq!(row(&schema, &batch.rows.old_rows, at), ["0", "b", "3"]);
    }
}

#[test]
fn an_open_batch_says_what_it_has_taken_for_rows_still_to_come() {
    let schema = key_and_document(ReplicaIdentity::Full);
    let map = whole_map(&schema);
    let mut builder = ChangeBuilder::new(Arc::clone(&schema));
    let row = || tuple(&[text(1), text("a text of some length"), text(1)]);
    builder.insert(&map, &row(), at(0)).unwrap();
    let small = builder.reserved();
    for n in 1..10_000 {
        builder.insert(&map, &row(), at(n)).unwrap();
    }
    let batch = builder.finish();
    builder.insert(&map, &row(), at(10_000)).unwrap();
    assert!(builder.reserved() > small + 10_000 * 20, "{} after a batch of {}", builder.reserved(), batch.bytes);
    assert!(builder.bytes() < 1000);
}

#[test]
fn a_batch_is_cut_where_a_position_is_already_there() {
    let schema = key_and_document(ReplicaIdentity::Full);
    let map = whole_map(&schema);
    let mut builder = ChangeBuilder::new(Arc::clone(&schema));
    for n in 0..25 {
        let before = old(true, &[text(n), text("old"), Sent::Null]);
        let sent = (n % 2 == 1).then_some(&before);
        builder.update(&map, sent, &tuple(&[text(n), text("new"), text(n)]), at(n)).unwrap();
    }
    let counted = builder.bytes() as f64;
    let batch = builder.finish();
    let columns = batch.rows.rows.columns.len() + batch.rows.old_rows.columns.len();
    let taken = (batch.bytes - columns * COLUMN_BYTES) as f64;
    assert!((counted / taken - 1.0).abs() < 0.2, "{counted} against {taken}");
    assert_eq!((builder.rows(), builder.bytes()), (0, 0));
    assert_eq!((batch.first(), batch.last()), (at(0).position, at(24).position));
    assert_eq!(batch.row_after(Position::default()), 0);
    assert_eq!(batch.row_after(at(24).position), 25);
    let after = batch.row_after(at(10).position);
    assert_eq!(after, 11);
    let rest = Arc::new(batch.clone()).changes_from(after);
    assert_eq!((rest.rows.count, rest.ops.len(), rest.sequence.ordinal[0]), (14, 14, 11));
    assert_eq!(rest.old_index, [0, 2, 4, 6, 8, 10, 12]);
    assert_eq!(row(&schema, &rest.rows, 3), ["14", "new", "14"]);
    assert_eq!(row(&schema, &rest.old_rows, 1), ["13", "old", "null"]);
    assert_eq!(Arc::new(batch).changes_from(25).rows.columns.len(), 0);
}
