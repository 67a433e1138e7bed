//! What the files hold, read back.

use std::fs::{self, File};

use arrow_array::cast::AsArray;
use arrow_array::types::{
    Date32Type, Decimal128Type, Float64Type, Int16Type, Int32Type, Int64Type, Time64MicrosecondType,
    TimestampMicrosecondType, UInt64Type,
};
use arrow_array::{Array, RecordBatch};
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use parquet::basic::{LogicalType, TimeUnit};
use serde_json::{Value, json};
use tidegate_sdk::model::{Cells, ChangeRows, ColumnData, ColumnValues, FixedArray, ListArray, OddCell, Rows};
use tidegate_sdk::prelude::*;

use super::build::*;

/// A table with a column of each layout.
fn everything() -> Table {
    let mut amount = column(4, "amount", "numeric(10,2)", "numeric");
    (amount.precision, amount.scale) = (Some(10), Some(2));
    let mut tags = column(12, "tags", "text[]", "array");
    tags.element = Some("text".to_owned());
    let mut moments = column(13, "days", "date[]", "array");
    moments.element = Some("date".to_owned());
    let columns = vec![
        column(1, "id", "integer", "int4"),
        column(2, "small", "smallint", "int2"),
        column(3, "big", "bigint", "int8"),
        amount,
        column(5, "ratio", "double precision", "float8"),
        column(6, "on", "boolean", "bool"),
        column(7, "day", "date", "date"),
        column(8, "clock", "time", "time"),
        column(9, "seen", "timestamptz", "timestamptz"),
        column(10, "key", "uuid", "uuid"),
        column(11, "raw", "bytea", "bytea"),
        tags,
        moments,
        column(14, "any", "numeric", "numeric"),
    ];
    table(8, "everything", 10, columns)
}

/// Two rows; in the second everything but the key is null, or odd where a text says so.
fn everything_rows() -> Rows {
    let nullable = |ordinal, cells| ColumnValues { validity: Some(vec![0b01]), ..plain(ordinal, cells) };
    let odd = |values: ColumnValues, text: &str| ColumnValues {
        validity: None,
        odd: vec![OddCell { row: 1, kind: "text".to_owned(), text: text.to_owned() }],
        ..values
    };
    let lists = |ordinal, item_validity, items| ColumnValues {
        data: ColumnData::Lists(ListArray { offsets: vec![0, 2, 2], item_validity, items }),
        ..plain(ordinal, Cells::Int32(vec![]))
    };
    Rows {
        count: 2,
        columns: vec![
            plain(1, Cells::Int32(vec![1, 2])),
            nullable(2, Cells::Int16(vec![-5, 0])),
            nullable(3, Cells::Int64(vec![i64::MAX, 0])),
            plain(4, texts(&["-1234.50", "NaN"])),
            nullable(5, Cells::Float64(vec![1e17, 0.0])),
            nullable(6, Cells::Booleans(vec![0b01])),
            odd(plain(7, Cells::Int32(vec![-1, 0])), "infinity"),
            nullable(8, Cells::Int64(vec![3_723_000_001, 0])),
            nullable(9, Cells::Int64(vec![1_767_225_600_120_000, 0])),
            nullable(10, Cells::Fixed(FixedArray { width: 16, data: (0..32).collect() })),
            nullable(11, Cells::Binary(bytes(&[[0u8, 255], [0, 0]]))),
            lists(12, Some(vec![0b01]), texts(&["a b", ""])),
            odd(lists(13, None, Cells::Int32(vec![0, 1])), "{{2020-01-01},{2020-01-02}}"),
            nullable(14, texts(&["12345678901234567890.12345678901234567890", ""])),
        ],
    }
}

/// Writes groups' contents of one table and returns the lines of its files.
fn written(place: &Place, settings: &str, table: &Table, contents: Vec<Content>) -> Vec<String> {
    let mut files = place.open_with(1, settings).unwrap();
    files.attach_table(table).unwrap();
    files.write_group(group(1, table, contents)).unwrap();
    files.flush().unwrap();
    place.events("file").iter().map(|line| line["file"].as_str().unwrap().to_owned()).collect()
}

fn read_parquet(place: &Place, file: &str) -> RecordBatch {
    let file = File::open(place.path().join(file)).unwrap();
    let mut reader = ParquetRecordBatchReaderBuilder::try_new(file).unwrap().build().unwrap();
    let batch = reader.next().unwrap().unwrap();
    assert!(reader.next().is_none());
    batch
}

fn read_lines(place: &Place, file: &str) -> Vec<Value> {
    let text = fs::read_to_string(place.path().join(file)).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn names(batch: &RecordBatch, row: usize) -> Vec<String> {
    let lists = batch.column_by_name("_tg_missing").unwrap().as_list::<i32>();
    if lists.is_null(row) {
        return vec![];
    }
    lists.value(row).as_string::<i32>().iter().map(|name| name.unwrap().to_owned()).collect()
}

fn text_in(batch: &RecordBatch, column: &str, row: usize) -> Option<String> {
    let column = batch.column_by_name(column).unwrap().as_string::<i32>();
    (!column.is_null(row)).then(|| column.value(row).to_owned())
}

#[test]
fn parquet_holds_every_layout_exactly() {
    let place = Place::new();
    let table = everything();
    let files = written(&place, "", &table, vec![changes(20, &[0, 0], everything_rows())]);
    let batch = read_parquet(&place, &files[0]);
    let column = |name: &str| batch.column_by_name(name).unwrap();
    assert_eq!(column("id").as_primitive::<Int32Type>().values(), &[1, 2]);
    assert_eq!(column("small").as_primitive::<Int16Type>().value(0), -5);
    assert_eq!(column("big").as_primitive::<Int64Type>().value(0), i64::MAX);
    assert_eq!(column("amount").as_primitive::<Decimal128Type>().value(0), -123_450);
    assert_eq!(column("ratio").as_primitive::<Float64Type>().value(0), 1e17);
    assert!(column("on").as_boolean().value(0));
    assert_eq!(column("day").as_primitive::<Date32Type>().value(0), -1);
    assert_eq!(column("clock").as_primitive::<Time64MicrosecondType>().value(0), 3_723_000_001);
    assert_eq!(column("seen").as_primitive::<TimestampMicrosecondType>().value(0), 1_767_225_600_120_000);
    assert_eq!(column("key").as_fixed_size_binary().value(0), (0..16).collect::<Vec<u8>>());
    assert_eq!(column("raw").as_binary::<i32>().value(0), [0, 255]);
    let tags = column("tags").as_list::<i32>().value(0);
    assert_eq!((tags.as_string::<i32>().value(0), tags.is_null(1)), ("a b", true));
    assert_eq!(text_in(&batch, "any", 0).unwrap(), "12345678901234567890.12345678901234567890");
    for name in table.columns.iter().map(|column| column.name.as_str()).filter(|name| !["id", "tags"].contains(name)) {
        assert!(column(name).is_null(1), "{name}");
    }
    assert_eq!(column("tags").as_list::<i32>().value(1).len(), 0);
    let odd: Value = serde_json::from_str(&text_in(&batch, "_tg_odd", 1).unwrap()).unwrap();
    assert_eq!(odd, json!({"amount": "NaN", "day": "infinity", "days": "{{2020-01-01},{2020-01-02}}"}));
    assert_eq!(text_in(&batch, "_tg_odd", 0), None);
}

#[test]
fn parquet_says_what_its_columns_mean() {
    let place = Place::new();
    let files = written(&place, "", &everything(), vec![changes(20, &[0, 0], everything_rows())]);
    let file = File::open(place.path().join(&files[0])).unwrap();
    let builder = ParquetRecordBatchReaderBuilder::try_new(file).unwrap();
    let schema = builder.parquet_schema();
    let logical = |name: &str| {
        let index = (0..schema.num_columns()).find(|&index| schema.column(index).name() == name).unwrap();
        schema.column(index).logical_type_ref().cloned()
    };
    assert_eq!(logical("key"), Some(LogicalType::Uuid));
    assert_eq!(logical("seen"), Some(LogicalType::timestamp(true, TimeUnit::MICROS)));
    assert_eq!(logical("amount"), Some(LogicalType::decimal(2, 10)));
    assert_eq!(logical("any"), Some(LogicalType::String));
    assert_eq!(logical("_tg_ordinal"), Some(LogicalType::integer(64, false)));
}

#[test]
fn every_row_has_its_place_in_the_history() {
    let place = Place::new();
    let rows = order_rows(&[(1, "a"), (1, "b"), (1, "b")]);
    let contents = vec![changes(20, &[0, 1, 2], rows), truncate(21)];
    let files = written(&place, "", &orders(), contents);
    let batch = read_parquet(&place, &files[0]);
    let ops: Vec<_> = (0..4).map(|row| text_in(&batch, "_tg_op", row).unwrap()).collect();
    assert_eq!(ops, ["insert", "update", "delete", "truncate"]);
    let column = |name: &str| batch.column_by_name(name).unwrap();
    assert_eq!(column("_tg_commit").as_primitive::<Int64Type>().values(), &[20, 20, 20, 21]);
    assert_eq!(column("_tg_ordinal").as_primitive::<UInt64Type>().values(), &[1, 2, 3, 1]);
    assert_eq!(column("_tg_xid").as_primitive::<Int64Type>().value(0), 99);
    assert_eq!(column("_tg_committed_at").as_primitive::<TimestampMicrosecondType>().value(3), 1_767_225_600_500_000);
    assert!(column("id").is_null(3));
    assert_eq!(names(&batch, 3), [""; 0]);
}

/// An update of the key, an update that leaves it, and a delete by key; the note was
/// not sent in any but the first.
fn key_changes() -> Content {
    let mut rows = order_rows(&[(2, "new"), (3, ""), (4, "")]);
    rows.columns[1].missing = Some(vec![0b110]);
    let old_rows = Rows { count: 2, columns: vec![plain(1, Cells::Int32(vec![1, 3]))] };
    Content::Changes(ChangeRows {
        sequence: sequence(20, 3),
        ops: vec![1, 1, 2],
        rows,
        old_index: vec![0, 1],
        old_rows,
    })
}

#[test]
fn cells_that_were_not_sent_are_named_and_a_changed_key_is_kept() {
    let place = Place::new();
    let files = written(&place, "", &orders(), vec![key_changes()]);
    let batch = read_parquet(&place, &files[0]);
    assert_eq!(text_in(&batch, "_tg_old_key", 0).unwrap(), r#"{"id":"1"}"#);
    assert_eq!(text_in(&batch, "_tg_old_key", 1), None);
    assert_eq!((names(&batch, 0), names(&batch, 1)), (vec![], vec!["note".to_owned()]));
    assert_eq!(text_in(&batch, "note", 1), None);
}

#[test]
fn without_a_key_an_update_carries_its_whole_old_row() {
    let place = Place::new();
    let keyless = Table { key: vec![], ..orders() };
    let content = Content::Changes(ChangeRows {
        sequence: sequence(20, 1),
        ops: vec![1],
        rows: order_rows(&[(1, "same")]),
        old_index: vec![0],
        old_rows: order_rows(&[(1, "same")]),
    });
    let files = written(&place, "", &keyless, vec![content]);
    let batch = read_parquet(&place, &files[0]);
    assert_eq!(text_in(&batch, "_tg_old_key", 0).unwrap(), r#"{"id":"1","note":"same"}"#);
}

#[test]
fn ndjson_holds_numbers_where_json_does_and_text_elsewhere() {
    let place = Place::new();
    let files = written(&place, r#""format": "ndjson""#, &everything(), vec![changes(20, &[0, 0], everything_rows())]);
    let lines = read_lines(&place, &files[0]);
    let expected = json!({
        "id": 1, "small": -5, "big": "9223372036854775807", "amount": "-1234.50", "ratio": 1e17, "on": true,
        "day": "1969-12-31", "clock": "01:02:03.000001", "seen": "2026-01-01 00:00:00.12+00",
        "key": "00010203-0405-0607-0809-0a0b0c0d0e0f", "raw": "\\x00ff", "tags": ["a b", null],
        "days": ["1970-01-01", "1970-01-02"], "any": "12345678901234567890.12345678901234567890",
        "_tg_op": "insert", "_tg_epoch": 1, "_tg_commit": "20", "_tg_ordinal": "1",
        "_tg_committed_at": "2026-01-01 00:00:00.5+00", "_tg_xid": 99,
    });
    assert_eq!(lines[0], expected);
    assert_eq!(
        (&lines[1]["day"], &lines[1]["amount"], &lines[1]["on"]),
        (&json!("infinity"), &json!("NaN"), &Value::Null)
    );
    assert_eq!(lines[1]["days"], "{{2020-01-01},{2020-01-02}}");
}

#[test]
fn ndjson_leaves_out_what_was_not_sent() {
    let place = Place::new();
    let files = written(&place, r#""format": "ndjson""#, &orders(), vec![key_changes(), truncate(21)]);
    let lines = read_lines(&place, &files[0]);
    assert_eq!(lines[0]["_tg_old_key"], json!({"id": "1"}));
    assert_eq!((lines[1].get("note"), &lines[1]["_tg_missing"]), (None, &json!(["note"])));
    assert_eq!((&lines[3]["_tg_op"], lines[3].get("_tg_missing")), (&json!("truncate"), None));
}

#[test]
fn a_batch_that_breaks_the_contract_is_refused_whole() {
    let place = Place::new();
    let mut files = place.open(1);
    files.attach_table(&orders()).unwrap();
    let mut short = order_rows(&[(1, "a"), (2, "b")]);
    short.columns[0] = plain(1, Cells::Int32(vec![1]));
    let contents = vec![changes(20, &[0], order_rows(&[(1, "a")])), changes(21, &[0, 0], short)];
    let failure = files.write_group(group(1, &orders(), contents)).unwrap_err();
    assert_eq!((failure.code.as_str(), failure.table_id), ("files.bad-batch", Some(7)));
    files.flush().unwrap();
    assert!(place.events("file").is_empty());
}
