//! Cells and their texts, with PostgreSQL as the oracle.
//!
//! Each line of `postgres_text.tsv` is a type, a cell, and what PostgreSQL 15 answered
//! to `SELECT value::text` with the settings the host pins. Floats are given by their
//! bits (`float8send`), bytea and uuid as hex, dates and times as the number the
//! contract has, arrays as a JSON array of these, and an array's text as JSON. Among
//! the floats are neighbours of decimals that lie exactly between two values.

use serde_json::Value;
use tidegate_sdk::model::{BytesArray, Cells, ColumnData, ColumnValues, FixedArray, ListArray, Rows};
use tidegate_sdk::rows::Kind;

const CASES: &str = include_str!("postgres_text.tsv");

fn unhex(text: &str) -> Vec<u8> {
    (0..text.len()).step_by(2).map(|at| u8::from_str_radix(&text[at..at + 2], 16).unwrap()).collect()
}

fn bytes(values: Vec<Vec<u8>>) -> BytesArray {
    let mut array = BytesArray { offsets: vec![0], data: Vec::new() };
    for value in values {
        array.data.extend(value);
        array.offsets.push(array.data.len() as u32);
    }
    array
}

/// Cells of a type from their spelling in the cases.
fn cells(base: &str, values: &[&str]) -> Cells {
    let integers = || values.iter().map(|value| value.parse::<i64>().unwrap());
    let raw = || values.iter().map(|value| unhex(value));
    match base {
        "bool" => {
            let bits =
                values.iter().enumerate().map(|(index, value)| u8::from(matches!(*value, "1" | "true")) << index);
            Cells::Booleans(vec![bits.sum()])
        }
        "int4" | "date" => Cells::Int32(integers().map(|value| value as i32).collect()),
        "time" | "timestamp" | "timestamptz" => Cells::Int64(integers().collect()),
        "float4" => Cells::Float32(raw().map(|bits| f32::from_be_bytes(bits.try_into().unwrap())).collect()),
        "float8" => Cells::Float64(raw().map(|bits| f64::from_be_bytes(bits.try_into().unwrap())).collect()),
        "uuid" => Cells::Fixed(FixedArray { width: 16, data: raw().flatten().collect() }),
        "bytea" => Cells::Binary(bytes(raw().collect())),
        _ => Cells::Utf8(bytes(values.iter().map(|value| value.as_bytes().to_vec()).collect())),
    }
}

fn data(base: &str, element: bool, cell: &str) -> ColumnData {
    if !element {
        return ColumnData::Plain(cells(base, &[cell]));
    }
    let elements: Vec<Value> = serde_json::from_str(cell).unwrap();
    let texts: Vec<String> = elements
        .iter()
        .map(|element| match element {
            Value::String(text) => text.clone(),
            Value::Null => {
                if matches!(base, "int4" | "bool") {
                    "0".to_owned()
                } else {
                    String::new()
                }
            }
            other => other.to_string(),
        })
        .collect();
    let bits = elements.iter().enumerate().map(|(index, element)| u8::from(!element.is_null()) << index);
    let items = cells(base, &texts.iter().map(String::as_str).collect::<Vec<_>>());
    // More elements than bits in a byte have no null among them.
    let item_validity = elements.contains(&Value::Null).then(|| vec![bits.sum()]);
    ColumnData::Lists(ListArray { offsets: vec![0, elements.len() as u32], item_validity, items })
}

fn column(base: &str, element: bool) -> tidegate_sdk::model::Column {
    tidegate_sdk::model::Column {
        ordinal: 1,
        name: "value".to_owned(),
        declared: String::new(),
        base: if element { "array" } else { base }.to_owned(),
        element: element.then(|| base.to_owned()),
        length: None,
        precision: None,
        scale: None,
        type_oid: 0,
        nullable: true,
        key_position: None,
        identity: false,
        default_expression: None,
        default_literal: None,
        details: if base == "box" { vec![("delimiter".to_owned(), ";".to_owned())] } else { vec![] },
    }
}

#[test]
fn every_cell_has_the_text_postgresql_prints() {
    let mut wrong = Vec::new();
    let mut count = 0;
    for line in CASES.lines() {
        let fields: Vec<&str> = line.split('\t').collect();
        let [type_name, cell, expected] = fields[..] else { panic!("not a case: {line}") };
        let (base, element) = type_name.strip_suffix("[]").map_or((type_name, false), |base| (base, true));
        let expected = if element { serde_json::from_str(expected).unwrap() } else { expected.to_owned() };
        let values =
            ColumnValues { ordinal: 1, validity: None, missing: None, odd: vec![], data: data(base, element, cell) };
        let rows = Rows { count: 1, columns: vec![values] };
        let column = column(base, element);
        let mut text = String::new();
        assert!(rows.column(1).cell(0).write_as(&column, &mut text));
        if text != expected {
            wrong.push(format!("{type_name} {cell}: {text}, not {expected}"));
        }
        count += 1;
    }
    assert!(count > 3_000, "{count} cases");
    assert!(wrong.is_empty(), "{} of {count}:\n{}", wrong.len(), wrong[..wrong.len().min(20)].join("\n"));
}

#[test]
fn null_and_missing_have_no_text() {
    let mut text = String::new();
    assert!(!tidegate_sdk::rows::Cell::Null.write_text(Kind::Int4, &mut text));
    assert!(!tidegate_sdk::rows::Cell::Missing.write_text(Kind::Int4, &mut text));
    assert_eq!(text, "");
}
