use super::*;
use crate::batch::ChangeBuilder;
use crate::batch::testing::{Sent, array_column, at, column, key_column, old, schema, text, tuple, whole_map};
use crate::schema::table::{Literal, ReplicaIdentity};

/// One inserted and one updated row with a key and these columns.
fn batch(columns: Vec<Column>, cells: &[Sent]) -> ChangeBatch {
    let schema = schema(ReplicaIdentity::Full, columns);
    let map = whole_map(&schema);
    let mut builder = ChangeBuilder::new(schema);
    builder.insert(&map, &tuple(cells), at(0)).unwrap();
    builder.update(&map, Some(&old(true, cells)), &tuple(cells), at(1)).unwrap();
    builder.finish()
}

/// The text of the first cell after it was projected onto another type.
fn projected(from: Column, cell: &str, to: Column) -> Result<String> {
    let onto = schema(ReplicaIdentity::Full, vec![key_column(1, "int4", 1), to.clone()]);
    let batch = batch(vec![key_column(1, "int4", 1), from], &[text(1), text(cell)]).project(&onto)?;
    let mut out = Vec::new();
    assert!(render(find(&batch.rows.rows, to.ordinal).unwrap(), 0, layout(&to), &mut out));
    Ok(String::from_utf8(out).unwrap())
}

#[test]
fn columns_are_matched_by_ordinal_whatever_their_names() {
    let default = Some(Literal { kind: "numeric".into(), text: "5".into() });
    let onto = schema(
        ReplicaIdentity::Full,
        vec![
            key_column(1, "int4", 1),
            Column { name: "c2".into(), ..column(3, "text") },
            Column { default_literal: default, ..column(4, "int4") },
            column(5, "int4"),
        ],
    );
    let columns = vec![key_column(1, "int4", 1), column(2, "text"), column(3, "text")];
    let batch = batch(columns, &[text(1), text("dropped"), text("kept")]).project(&onto).unwrap();
    let ordinals: Vec<u16> = batch.rows.rows.columns.iter().map(|values| values.ordinal).collect();
    assert_eq!(ordinals, [1, 3, 4, 5]);
    let added = find(&batch.rows.rows, 4).unwrap();
    assert!(matches!(&added.data, wire::ColumnData::Plain(wire::Cells::Int32(cells)) if *cells == [5, 0]));
    assert_eq!((&added.validity, &added.missing), (&None, &Some(vec![0b10])));
    let null = find(&batch.rows.rows, 5).unwrap();
    assert_eq!((&null.validity, &null.missing), (&Some(vec![0b10]), &Some(vec![0b10])));
    // Of an old row nobody knows what it would have had there.
    let ordinals: Vec<u16> = batch.rows.old_rows.columns.iter().map(|values| values.ordinal).collect();
    assert_eq!(ordinals, [1, 3]);
    assert_eq!(batch.schema, onto);
}

#[test]
fn certain_casts_keep_the_value() {
    for (from, cell, to, expected) in [
        ("int2", "-7", "int8", "-7"),
        ("int4", "7", "numeric", "7"),
        ("float4", "0.1", "float8", "0.10000000149011612"),
        ("float4", "Infinity", "float8", "Infinity"),
        ("bool", "t", "text", "true"),
        ("bpchar", "a  ", "varchar", "a"),
        ("date", "0044-03-15 BC", "timestamp", "0044-03-15 00:00:00 BC"),
        ("date", "infinity", "timestamp", "infinity"),
        ("bytea", "\\x00ff", "text", "\\x00ff"),
        ("timestamptz", "2020-01-01 00:00:00.5+00", "text", "2020-01-01 00:00:00.5+00"),
        ("varchar", "x", "text", "x"),
    ] {
        let text = projected(column(2, from), cell, column(2, to)).unwrap();
        assert_eq!(text, expected, "{from} to {to}");
    }
    let widened = projected(array_column(2, "int2"), "{1,NULL}", array_column(2, "int8")).unwrap();
    assert_eq!(widened, "{1,NULL}");
}

#[test]
fn a_cast_that_depends_on_anything_else_is_refused_with_the_way_out() {
    for (from, cell, to) in [
        ("text", "1", "int4"),
        ("int8", "1", "int4"),
        ("timestamp", "2020-01-01 00:00:00", "timestamptz"),
        ("float8", "1", "numeric"),
        ("varchar", "1", "numeric"),
        ("numeric", "1", "int4"),
        ("inet", "10.0.0.1", "text"),
        ("xml", "<a/>", "text"),
        ("geometry", "0101", "text"),
    ] {
        let error = projected(column(2, from), cell, column(2, to)).unwrap_err();
        assert_eq!((error.code(), error.is_transient()), ("schema.projection", false), "{from} to {to}");
        assert_eq!(error.next_step(), Some("Resync the table"));
    }
}

#[test]
fn rows_of_another_key_are_not_merged_by_it() {
    let keyed = |key: u16| {
        let named = |ordinal| if ordinal == key { key_column(ordinal, "int4", 1) } else { column(ordinal, "int4") };
        vec![named(1), named(2)]
    };
    let rows = batch(keyed(1), &[text(1), text(2)]);
    rows.is_named_as(&schema(ReplicaIdentity::Default, keyed(1))).unwrap();
    let error = rows.is_named_as(&schema(ReplicaIdentity::Default, keyed(2))).unwrap_err();
    assert!(error.code() == "schema.projection" && error.next_step().is_some(), "{error}");
}
