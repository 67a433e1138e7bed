use super::*;
use crate::batch::testing::{array_column, column};

fn built(column: &Column, cells: &[Option<&str>]) -> wire::ColumnValues {
    let mut builder = ColumnBuilder::new(column);
    for cell in cells {
        match cell {
            Some(text) => builder.append(text.as_bytes()),
            None => builder.append_null(),
        };
    }
    builder.finish().unwrap()
}

fn int32(values: &wire::ColumnValues) -> &[i32] {
    match &values.data {
        wire::ColumnData::Plain(wire::Cells::Int32(values)) => values,
        other => panic!("{other:?}"),
    }
}

#[test]
fn bitmaps_are_made_only_when_a_cell_needs_them() {
    let values = built(&column(1, "int4"), &[Some("1"), Some("-2")]);
    assert_eq!(int32(&values), [1, -2]);
    assert_eq!((values.validity, values.missing, values.odd.len()), (None, None, 0));

    let cells: Vec<_> = (0..20).map(|row| (row != 3).then_some("7")).collect();
    let values = built(&column(1, "int4"), &cells);
    assert_eq!(values.validity, Some(vec![0b1111_0111, 0xff, 0b0000_1111]));
    assert_eq!(int32(&values)[3], 0);
}

#[test]
fn a_missing_cell_is_not_a_null_one() {
    let mut builder = ColumnBuilder::new(&column(1, "text"));
    builder.append(b"a");
    builder.append_missing();
    builder.append_null();
    let values = builder.finish().unwrap();
    assert_eq!(values.missing, Some(vec![0b010]));
    assert_eq!(values.validity, Some(vec![0b011]));
}

#[test]
fn a_column_that_no_row_was_sent_is_left_out() {
    let mut builder = ColumnBuilder::new(&column(1, "text"));
    builder.append_missing();
    builder.append_missing();
    assert!(builder.finish().is_none());
    builder.append(b"x");
    assert!(builder.finish().is_some_and(|values| values.missing.is_none()));
}

#[test]
fn what_a_layout_cannot_hold_is_odd_and_zero_and_not_null() {
    let values = built(&column(1, "date"), &[Some("1970-01-02"), Some("infinity"), Some("-infinity")]);
    assert_eq!(int32(&values), [1, 0, 0]);
    assert_eq!(values.validity, None);
    let odd: Vec<_> = values.odd.iter().map(|odd| (odd.row, odd.kind.as_str(), odd.text.as_str())).collect();
    assert_eq!(odd, [(1, "text", "infinity"), (2, "text", "-infinity")]);
}

#[test]
fn bytes_that_are_not_utf8_are_an_odd_cell_in_hex() {
    let mut builder = ColumnBuilder::new(&column(1, "text"));
    builder.append(b"caf\xe9");
    let values = builder.finish().unwrap();
    assert_eq!((values.odd[0].kind.as_str(), values.odd[0].text.as_str()), ("hex", "636166e9"));
    let wire::ColumnData::Plain(wire::Cells::Utf8(texts)) = values.data else { panic!("not utf8") };
    assert_eq!((texts.offsets, texts.data.len()), (vec![0, 0], 0));
}

#[test]
fn booleans_are_bits() {
    let cells: Vec<_> = (0..9).map(|row| Some(if row % 2 == 0 { "t" } else { "f" })).collect();
    let wire::ColumnData::Plain(wire::Cells::Booleans(bits)) = built(&column(1, "bool"), &cells).data else {
        panic!("not booleans")
    };
    assert_eq!(bits, [0b0101_0101, 1]);
}

#[test]
fn an_array_is_a_list_with_validity_of_its_items() {
    let values = built(&array_column(1, "int2"), &[Some("{1,NULL,3}"), None, Some("{}"), Some("{4}")]);
    assert_eq!(values.validity, Some(vec![0b1101]));
    let wire::ColumnData::Lists(lists) = values.data else { panic!("no lists") };
    assert_eq!(lists.offsets, [0, 3, 3, 3, 4]);
    assert_eq!(lists.item_validity, Some(vec![0b1101]));
    assert!(matches!(lists.items, wire::Cells::Int16(items) if items == [1, 0, 3, 4]));
}

#[test]
fn an_array_with_one_odd_item_is_odd_as_a_whole_and_leaves_no_items_behind() {
    let values = built(
        &array_column(1, "date"),
        &[Some("{1970-01-02}"), Some("{NULL,1970-01-03,infinity}"), Some("{{1970-01-02}}"), Some("{1970-01-05}")],
    );
    assert_eq!(values.odd.len(), 2);
    assert_eq!(values.odd[0].text, "{NULL,1970-01-03,infinity}");
    let wire::ColumnData::Lists(lists) = values.data else { panic!("no lists") };
    assert_eq!((lists.offsets, lists.item_validity), (vec![0, 1, 1, 1, 2], None));
    assert!(matches!(lists.items, wire::Cells::Int32(items) if items == [1, 4]));
}

#[test]
fn taking_a_row_back_leaves_a_builder_as_if_it_had_never_come() {
    for column in [column(1, "int4"), column(1, "text"), column(1, "bool"), column(1, "uuid"), array_column(1, "int4")]
    {
        let cell: &[u8] = if column.element.is_some() { b"{1,NULL}" } else { b"1" };
        let mut never = ColumnBuilder::new(&column);
        let mut back = ColumnBuilder::new(&column);
        for builder in [&mut never, &mut back] {
            (0..9).for_each(|_| _ = builder.append(cell));
        }
        back.append_null();
        back.append_missing();
        back.append(cell);
        back.append(b"{\xff");
        back.truncate(9);
        for builder in [&mut never, &mut back] {
            builder.append(cell);
            builder.append_null();
        }
        assert_eq!(format!("{:?}", never.finish()), format!("{:?}", back.finish()));
    }
}
