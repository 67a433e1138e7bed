//! Copies, restarts, schema changes, and what is durable when.

use std::fs::{self, OpenOptions};
use std::io::Write;

use tidegate_sdk::prelude::*;

use super::build::*;

#[test]
fn nothing_is_durable_before_its_file_is_in_the_manifest() {
    let place = Place::new();
    let mut files = place.open(1);
    files.attach_table(&orders()).unwrap();
    let ack = files.write_group(group(1, &orders(), vec![changes(20, &[0], order_rows(&[(1, "a")]))])).unwrap();
    assert_eq!(ack.durable, 0);
    assert!(ack.wake_after_ms.is_some());
    assert!(place.events("file").is_empty());

    let ack =
        files.write_group(group(2, &orders(), vec![changes(21, &[0, 0], order_rows(&[(2, "b"), (3, "c")]))])).unwrap();
    assert_eq!(ack.durable, 0);
    let ack = files.flush().unwrap().unwrap();
    assert_eq!((ack.durable, ack.wake_after_ms), (2, None));

    let lines = place.events("file");
    assert_eq!(lines.len(), 1);
    assert_eq!(lines[0]["rows"], 3);
    assert_eq!(lines[0]["first"]["commit"], "20");
    assert_eq!((&lines[0]["last"]["commit"], &lines[0]["last"]["ordinal"]), (&"21".into(), &"2".into()));
    assert!(place.path().join(lines[0]["file"].as_str().unwrap()).is_file());
}

#[test]
fn a_group_that_comes_again_is_taken_once() {
    let place = Place::new();
    let mut files = place.open(1);
    files.attach_table(&orders()).unwrap();
    for _ in 0..2 {
        files.write_group(group(1, &orders(), vec![changes(20, &[0], order_rows(&[(1, "a")]))])).unwrap();
    }
    files.flush().unwrap();
    assert_eq!(place.events("file")[0]["rows"], 1);
}

#[test]
fn rows_that_could_not_be_written_are_written_later() {
    let place = Place::new();
    let mut files = place.open(1);
    files.attach_table(&orders()).unwrap();
    // A file stands where the table's directory must be.
    let obstacle = place.path().join("public.orders");
    fs::write(&obstacle, "").unwrap();
    files.write_group(group(1, &orders(), vec![changes(20, &[0], order_rows(&[(1, "a")]))])).unwrap();
    let failure = files.flush().unwrap_err();
    assert_eq!((failure.code.as_str(), failure.class), ("files.write", FailureClass::Transient));

    fs::remove_file(&obstacle).unwrap();
    assert_eq!(files.flush().unwrap().unwrap().durable, 1);
    assert_eq!(place.events("file")[0]["rows"], 1);
}

#[test]
fn pending_rows_beyond_the_limit_are_written_at_once() {
    let place = Place::new();
    let mut files = place.open_with(1, r#""roll_bytes": 65536"#).unwrap();
    files.attach_table(&orders()).unwrap();
    let long = "x".repeat(70_000);
    let ack = files.write_group(group(1, &orders(), vec![changes(20, &[0], order_rows(&[(1, &long)]))])).unwrap();
    assert_eq!(ack.durable, 1);
}

#[test]
fn a_new_run_discards_an_unfinished_one() {
    let place = Place::new();
    let mut files = place.open(1);
    files.begin_copy(&orders(), "r1").unwrap();
    files.write_group(group(1, &orders(), vec![copy("r1", "b1", order_rows(&[(1, "a")]))])).unwrap();
    files.flush().unwrap();
    files.write_group(group(2, &orders(), vec![copy("r1", "b2", order_rows(&[(2, "b")]))])).unwrap();

    files.begin_copy(&orders(), "r2").unwrap();
    assert_eq!(place.files("public.orders"), [""; 0]);
    let late = files.write_group(group(3, &orders(), vec![copy("r1", "b2", order_rows(&[(2, "b")]))])).unwrap_err();
    assert_eq!((late.code.as_str(), late.scope), ("fenced", FailureScope::Table));

    files.write_group(group(4, &orders(), vec![copy("r2", "b1", order_rows(&[(1, "a"), (2, "b")]))])).unwrap();
    assert_eq!(files.flush().unwrap().unwrap().durable, 4);
    files.finish_copy(&orders(), "r2", position(5)).unwrap();
    files.finish_copy(&orders(), "r2", position(5)).unwrap();
    assert_eq!(place.files("public.orders").len(), 1);
    assert_eq!(place.events("finish-copy").len(), 1);
    assert_eq!(place.events("finish-copy")[0]["as_of"]["commit"], "5");
}

#[test]
fn a_batch_of_a_copy_that_comes_again_is_left_out_across_restarts() {
    let place = Place::new();
    let mut files = place.open(1);
    files.begin_copy(&orders(), "r1").unwrap();
    files.write_group(group(1, &orders(), vec![copy("r1", "b1", order_rows(&[(1, "a")]))])).unwrap();
    files.write_group(group(2, &orders(), vec![copy("r1", "b1", order_rows(&[(1, "a")]))])).unwrap();
    files.flush().unwrap();
    drop(files);

    let mut files = place.open(2);
    files.attach_table(&orders()).unwrap();
    files.begin_copy(&orders(), "r1").unwrap();
    let again = vec![copy("r1", "b1", order_rows(&[(1, "a")])), copy("r1", "b2", order_rows(&[(2, "b")]))];
    files.write_group(group(1, &orders(), again)).unwrap();
    files.finish_copy(&orders(), "r1", position(5)).unwrap();
    let rows: Vec<_> = place.events("file").iter().map(|line| line["rows"].clone()).collect();
    assert_eq!(rows, [1, 1]);
    assert_eq!(place.events("begin-copy").len(), 1);
}

#[test]
fn a_restart_removes_what_was_not_finished_and_nothing_else() {
    let place = Place::new();
    let mut files = place.open(1);
    files.attach_table(&orders()).unwrap();
    files.write_group(group(1, &orders(), vec![changes(20, &[0], order_rows(&[(1, "a")]))])).unwrap();
    files.flush().unwrap();
    drop(files);
    let named = place.files("public.orders");
    let directory = place.path().join("public.orders");
    for name in ["0000000009-g1.parquet", "0000000009-g1.parquet.tmp", "README.txt", "notes.tmp"] {
        fs::write(directory.join(name), "x").unwrap();
    }
    let path = place.path().join("manifest.ndjson");
    let whole = fs::read(&path).unwrap();
    OpenOptions::new().append(true).open(&path).unwrap().write_all(br#"{"seq":3,"kind":"fi"#).unwrap();

    place.open(2);
    assert_eq!(place.files("public.orders"), [named[0].as_str(), "README.txt", "notes.tmp"]);
    assert_eq!(fs::read(&path).unwrap(), whole);
}

#[test]
fn a_directory_has_one_owner() {
    let place = Place::new();
    place.open(1);
    let path = place.path().join("manifest.ndjson");
    let text = fs::read_to_string(&path).unwrap();
    fs::write(&path, text.replace("lake", "pond")).unwrap();
    let failure = place.open_with(2, "").err().unwrap();
    assert_eq!(failure.code, "files.manifest");
    assert!(failure.message.contains("destination `pond` of pipeline `shop`"), "{}", failure.message);
}

#[test]
fn a_directory_that_does_not_exist_is_named() {
    let place = Place::new();
    fs::remove_dir_all(place.path()).unwrap();
    let failure = place.open_with(1, "").err().unwrap();
    assert_eq!((failure.code.as_str(), failure.class), ("files.no-directory", FailureClass::Permanent));
    fs::create_dir_all(place.path()).unwrap();
}

#[test]
fn what_is_there_equals_what_was_to_be_after_every_step() {
    let place = Place::new();
    let mut files = place.open(1);
    assert_eq!(files.inspect_table(&orders()).unwrap(), None);
    files.begin_copy(&orders(), "r1").unwrap();
    files.finish_copy(&orders(), "r1", position(5)).unwrap();

    let mut steps = vec![orders()];
    let mut columns = orders().columns;
    columns[1].name = "remark".to_owned();
    steps.push(table(7, "orders", 11, columns.clone()));
    columns.push(column(3, "paid", "boolean", "bool"));
    steps.push(table(7, "orders", 12, columns.clone()));
    columns[2] = with_default(columns[2].clone(), "false");
    steps.push(table(7, "orders", 13, columns.clone()));
    columns[2].nullable = false;
    steps.push(table(7, "orders", 14, columns.clone()));
    columns.remove(1);
    steps.push(table(7, "orders", 15, columns));

    for pair in steps.windows(2) {
        let [before, after] = pair else { unreachable!() };
        assert_ne!(files.render_table(before).unwrap().columns, files.render_table(after).unwrap().columns);
        let change = SchemaChange { before: before.clone(), after: after.clone(), steps: vec![] };
        files.apply_schema(&change).unwrap();
        files.apply_schema(&change).unwrap();
        assert_eq!(files.inspect_table(after).unwrap(), Some(files.render_table(after).unwrap()));
    }
    assert_eq!(place.events("schema").len(), steps.len());
    drop(files);
    let mut files = place.open(2);
    let last = steps.last().unwrap();
    assert_eq!(files.inspect_table(last).unwrap(), Some(files.render_table(last).unwrap()));
}

#[test]
fn a_schema_change_begins_a_new_file() {
    let place = Place::new();
    let mut files = place.open(1);
    files.attach_table(&orders()).unwrap();
    files.write_group(group(1, &orders(), vec![changes(20, &[0], order_rows(&[(1, "a")]))])).unwrap();
    let after = table(7, "orders", 25, vec![column(1, "id", "integer", "int4"), column(2, "remark", "text", "text")]);
    let change = SchemaChange { before: orders(), after: after.clone(), steps: vec![] };
    files.apply_schema(&change).unwrap();
    files.write_group(group(2, &after, vec![changes(30, &[0], order_rows(&[(2, "b")]))])).unwrap();
    files.flush().unwrap();
    let kinds: Vec<_> = place.manifest().iter().map(|line| line["kind"].as_str().unwrap().to_owned()).collect();
    assert_eq!(kinds, ["head", "schema", "file", "schema", "file"]);
    assert_eq!(place.events("file")[1]["snapshot"], "25:0");
}

/// The rename that makes `after` of `before`, as the host sends it.
fn renamed(before: &Table, after: &Table) -> SchemaChange {
    let step = SchemaStep { kind: "rename-table".to_owned(), before: None, after: None };
    SchemaChange { before: before.clone(), after: after.clone(), steps: vec![step] }
}

#[test]
fn a_renamed_table_begins_a_new_file_under_its_new_name_and_keeps_what_it_has() {
    let place = Place::new();
    let mut files = place.open(1);
    let (before, after) = (orders(), table(7, "sales", 25, orders().columns));
    files.begin_copy(&before, "r1").unwrap();
    files.write_group(group(1, &before, vec![copy("r1", "b1", order_rows(&[(1, "a")]))])).unwrap();
    files.finish_copy(&before, "r1", position(5)).unwrap();
    files.write_group(group(2, &before, vec![changes(20, &[0], order_rows(&[(2, "b")]))])).unwrap();
    files.check_schema(&renamed(&before, &after)).unwrap();
    assert!(files.inspect_table(&after).unwrap().is_none(), "asking does nothing");
    files.apply_schema(&renamed(&before, &after)).unwrap();
    assert_eq!(files.inspect_table(&before).unwrap(), None);
    assert_eq!(files.inspect_table(&after).unwrap(), Some(files.render_table(&after).unwrap()));
    // As after an interruption.
    drop(files);
    let mut files = place.open(2);
    files.apply_schema(&renamed(&before, &after)).unwrap();
    files.write_group(group(1, &after, vec![changes(30, &[0], order_rows(&[(3, "c")]))])).unwrap();
    files.flush().unwrap();
    let kinds: Vec<_> = place.manifest().iter().map(|line| line["kind"].as_str().unwrap().to_owned()).collect();
    assert_eq!(kinds, ["head", "schema", "begin-copy", "file", "finish-copy", "file", "rename", "schema", "file"]);
    assert_eq!(place.files("public.orders").len(), 2);
    assert_eq!(place.files("public.sales").len(), 1);

    // Another table of the old name has its files beside those of before, and each goes alone.
    let other = Table { id: 8, ..orders() };
    files.begin_copy(&other, "r2").unwrap();
    files.write_group(group(2, &other, vec![copy("r2", "b1", order_rows(&[(9, "z")]))])).unwrap();
    files.finish_copy(&other, "r2", position(35)).unwrap();
    assert_eq!(place.files("public.orders").len(), 3);
    let back = Table { snapshot: SnapshotId { commit: 40, message: 0 }, ..orders() };
    assert_eq!(files.check_schema(&renamed(&after, &back)).unwrap_err().code, "name-collision");
    assert_eq!(files.apply_schema(&renamed(&after, &back)).unwrap_err().code, "name-collision");
    files.drop_table(&after).unwrap();
    assert_eq!(place.files("public.orders").len(), 1);
    assert!(!place.path().join("public.sales").exists());
    files.drop_table(&other).unwrap();
    assert!(!place.path().join("public.orders").exists());
}

#[test]
fn another_key_is_another_schema_line_though_the_columns_are_the_same() {
    let place = Place::new();
    let mut files = place.open(1);
    files.begin_copy(&orders(), "r1").unwrap();
    files.finish_copy(&orders(), "r1", position(5)).unwrap();
    let after = Table { key: vec![2], ..orders() };
    let step = SchemaStep { kind: "change-key".to_owned(), before: None, after: None };
    let change = SchemaChange { before: orders(), after, steps: vec![step] };
    files.apply_schema(&change).unwrap();
    files.apply_schema(&change).unwrap();
    let keys: Vec<_> = place.events("schema").iter().map(|line| line["key"].clone()).collect();
    assert_eq!(keys, [serde_json::json!(["id"]), serde_json::json!([orders().columns[1].name])]);
}

#[test]
fn names_that_collide_are_refused() {
    let place = Place::new();
    let mut files = place.open(1);
    let own = table(8, "odd", 1, vec![column(1, "_tg_op", "text", "text")]);
    assert_eq!(files.begin_copy(&own, "r1").unwrap_err().code, "name-collision");
    let twin = Table { id: 9, ..orders() };
    let notices = files.preflight(&[orders(), own, twin]).unwrap();
    let found: Vec<_> = notices.iter().map(|notice| (notice.table_id, notice.code.as_str())).collect();
    assert_eq!(found, [(Some(8), "name-collision"), (Some(9), "name-collision")]);
}

#[test]
fn a_table_is_attached_before_it_is_written() {
    let place = Place::new();
    let mut files = place.open(1);
    let failure = files.write_group(group(1, &orders(), vec![truncate(20)])).unwrap_err();
    assert_eq!((failure.code.as_str(), failure.table_id), ("files.not-attached", Some(7)));
}

#[test]
fn a_dropped_table_is_gone_and_may_be_dropped_again() {
    let place = Place::new();
    let mut files = place.open(1);
    files.begin_copy(&orders(), "r1").unwrap();
    files.drop_table(&orders()).unwrap();
    files.drop_table(&orders()).unwrap();
    assert!(!place.path().join("public.orders").exists());
    assert_eq!(files.inspect_table(&orders()).unwrap(), None);
    assert_eq!(place.events("drop").len(), 1);
}
