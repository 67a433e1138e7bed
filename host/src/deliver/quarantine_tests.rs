use super::*;
use crate::batch::{ChangeBuilder, RelationMap, RowPosition, fold};
use crate::schema::samples;
use crate::source::pgoutput::{OldTuple, Tuple};

/// `t (id int4 PRIMARY KEY, note text, big text)`.
fn schema() -> Arc<TableSchema> {
    let mut id = samples::column(1, "id", "int4");
    (id.key_position, id.identity, id.nullable) = (Some(1), true, false);
    Arc::new(samples::table(vec![id, samples::column(2, "note", "text"), samples::column(3, "big", "text")]))
}

/// Cells of a tuple: `~` was not sent, `-` is null.
fn tuple(cells: &[&str]) -> Tuple {
    let mut data = (cells.len() as u16).to_be_bytes().to_vec();
    for cell in cells {
        match *cell {
            "~" => data.push(b'u'),
            "-" => data.push(b'n'),
            text => {
                data.push(b't');
                data.extend((text.len() as u32).to_be_bytes());
                data.extend(text.as_bytes());
            }
        }
    }
    Tuple::new(data.into())
}

fn position(ordinal: u64) -> Position {
    Position { epoch: 1, commit: Lsn(100), ordinal }
}

/// A folded batch; positions count from `first`.
fn batch(first: u64, build: &[(&str, &[&str], &[&str])]) -> wire::Content {
    let schema = schema();
    let map = RelationMap::new(vec![Some(1), Some(2), Some(3)], &schema);
    let mut builder = ChangeBuilder::new(schema);
    for (at, (op, old, new)) in (first..).zip(build) {
        let at = RowPosition { position: position(at), committed_at: 0, xid: 1 };
        let before = OldTuple { whole: false, tuple: tuple(if old.is_empty() { new } else { old }) };
        match *op {
            "insert" => builder.insert(&map, &tuple(new), at).unwrap(),
            "delete" => builder.delete(&map, &before, at).unwrap(),
            _ => builder.update(&map, (!old.is_empty()).then_some(&before), &tuple(new), at).unwrap(),
        }
    }
    wire::Content::Merge(fold(&builder.finish(), 0).unwrap())
}

fn why(code: &str) -> RefusedWhy {
    RefusedWhy { code: code.to_owned(), message: "no".to_owned(), column: None }
}

fn made(content: &wire::Content, code: &str) -> Vec<QuarantinedRow> {
    let schema = schema();
    let maker = Maker { destination: "d", schema: &schema, merge: true, count: 0, now: 5 };
    let why = why(code);
    maker.rows(content, (0..crate::batch::refusable(content)).map(|row| (row, &why)))
}

/// The quarantine after these refusals, as it is remembered and as it is stored.
#[derive(Default)]
struct Kept {
    memory: Quarantine,
    stored: Vec<QuarantinedRow>,
}

impl Kept {
    fn put(&mut self, rows: Vec<QuarantinedRow>) {
        for row in rows {
            self.memory.put(&row);
            self.stored.retain(|known| known.ident != row.ident);
            self.stored.push(row);
        }
    }

    /// The rows of a batch that go on, and what joins is kept.
    fn take(&mut self, content: &wire::Content, patches: bool) -> Vec<u32> {
        let affected = self.memory.table(7).map(|table| affected(table, content, &schema())).unwrap_or_default();
        let joins = made(content, "quarantine.joined");
        let joins = affected.iter().map(|row| joins[*row as usize].clone()).collect();
        let joined = join(&self.stored, joins, &schema(), patches);
        self.put(joined);
        (0..crate::batch::refusable(content)).filter(|row| !affected.contains(row)).collect()
    }

    fn row(&self, key: &str) -> &QuarantinedRow {
        let ident = format!("[\"{key}\"]");
        self.stored.iter().find(|row| row.ident == ident).unwrap_or_else(|| panic!("{key}: {:#?}", self.stored))
    }

    fn cells(&self, key: &str) -> String {
        serde_json::to_string(&self.row(key).row).unwrap()
    }
}

/// `id` 5 was refused when it was inserted.
fn refused() -> Kept {
    let mut kept = Kept::default();
    kept.put(made(&batch(1, &[("insert", &[], &["5", "bad", "long"])]), "a.b"));
    kept
}

#[test]
fn later_changes_of_a_refused_key_join_it_and_all_others_go_on() {
    let mut kept = refused();
    let later = batch(
        10,
        &[("update", &[], &["5", "better", "~"]), ("insert", &[], &["6", "x", "y"]), ("update", &[], &["7", "z", "~"])],
    );
    assert_eq!(kept.take(&later, false), [1, 2]);
    assert_eq!(kept.cells("5"), r#"{"1":"5","2":"better","3":"long"}"#);
    let row = kept.row("5");
    assert_eq!((row.position, row.changes, row.reason.code.as_str()), (position(10), 2, "a.b"));
    assert_eq!(row.mark, Some(Mark::Retry), "it is whole: it may be taken now");
}

#[test]
fn a_change_that_is_replayed_does_not_join_again() {
    let mut kept = refused();
    kept.take(&batch(10, &[("update", &[], &["5", "new", "~"])]), true);
    kept.take(&batch(1, &[("insert", &[], &["5", "bad", "long"])]), true);
    assert_eq!(kept.cells("5"), r#"{"1":"5","2":"new","3":"long"}"#);
    assert_eq!(kept.row("5").changes, 2);
}

#[test]
fn a_delete_joins_as_a_delete_and_a_new_row_as_what_it_is() {
    let mut kept = refused();
    kept.take(&batch(10, &[("delete", &["5", "-", "-"], &[])]), false);
    assert_eq!((kept.row("5").op, kept.row("5").mark), (RowOp::Delete, Some(Mark::Retry)));
    kept.take(&batch(20, &[("insert", &[], &["5", "again", "-"])]), false);
    assert_eq!((kept.row("5").op, kept.cells("5").as_str()), (RowOp::Upsert, r#"{"1":"5","2":"again","3":null}"#));
}

#[test]
fn a_row_that_is_not_whole_is_tried_only_where_it_would_be_refused_without_the_rest() {
    for (patches, mark) in [(true, Some(Mark::Retry)), (false, None)] {
        let mut kept = Kept::default();
        kept.put(made(&batch(1, &[("update", &[], &["5", "bad", "~"])]), "a.b"));
        kept.take(&batch(10, &[("update", &[], &["5", "good", "~"])]), patches);
        assert_eq!((kept.cells("5").as_str(), kept.row("5").mark), (r#"{"1":"5","2":"good"}"#, mark));
    }
}

#[test]
fn a_row_that_ends_the_plugin_is_not_tried_by_itself() {
    let mut kept = Kept::default();
    kept.put(made(&batch(1, &[("insert", &[], &["5", "bad", "long"])]), "plugin.trap"));
    kept.take(&batch(10, &[("insert", &[], &["5", "x", "y"])]), true);
    assert_eq!(kept.row("5").mark, None);
}

#[test]
fn a_row_that_moves_away_from_a_refused_key_takes_its_cells_from_quarantine() {
    let mut kept = refused();
    let moves = batch(10, &[("update", &["5", "-", "-"], &["6", "moved", "~"])]);
    assert_eq!(kept.take(&moves, true), Vec::<u32>::new());
    assert_eq!(kept.cells("6"), r#"{"1":"6","2":"moved","3":"long"}"#);
    assert_eq!((kept.row("6").needs.clone(), kept.row("6").mark), (None, Some(Mark::Retry)));
    assert_eq!(kept.row("5").op, RowOp::Delete);
}

#[test]
fn what_a_refused_row_takes_its_cells_from_waits_with_it_until_it_is_whole() {
    let mut kept = Kept::default();
    let moves = batch(1, &[("update", &["5", "-", "-"], &["6", "bad", "~"]), ("insert", &[], &["9", "x", "y"])]);
    let units = units(&moves, 3);
    let refused = units.iter().find(|unit| unit.len() == 2).expect("the row and what becomes of its old key");
    let rows = made(&moves, "a.b");
    kept.put(refused.iter().map(|row| rows[*row as usize].clone()).collect());
    assert_eq!(kept.row("6").needs.as_deref(), Some("[\"5\"]"));
    // Its old key is used again, and it moves on: the rest is still where it was.
    kept.take(&batch(10, &[("insert", &[], &["5", "new", "new"])]), true);
    kept.take(&batch(20, &[("update", &["6", "-", "-"], &["7", "~", "~"])]), true);
    assert_eq!((kept.cells("7").as_str(), kept.row("7").needs.as_deref()), (r#"{"1":"7","2":"bad"}"#, Some("[\"5\"]")));
    assert_eq!(kept.memory.take_marked(7, 1), ["[\"5\"]", "[\"7\"]"]);
    let rows: Vec<QuarantinedRow> = kept.stored.clone();
    let wire::Content::Merge(again) = content(&rows, &schema(), true).unwrap() else { panic!("a merge") };
    assert_eq!(
        (again.upserts.count, again.deletes.count, again.moved_index.len(), again.moved_from.count),
        (2, 1, 1, 1)
    );
    // Now it is whole: nothing has to wait any more.
    kept.take(&batch(30, &[("update", &[], &["7", "a", "b"])]), true);
    assert_eq!((kept.row("7").needs.clone(), kept.row("5").mark), (None, Some(Mark::Retry)));
}

#[test]
fn rows_are_given_out_once_with_all_that_has_to_go_with_them() {
    let key = |ident: &str, needs: Option<&str>, mark| QuarantineKey {
        oid: 7,
        ident: ident.to_owned(),
        position: position(1),
        bytes: 10,
        needs: needs.map(str::to_owned),
        code: "a.b".to_owned(),
        mark,
    };
    let due = Some(Mark::Retry);
    let mut memory = Quarantine::new(vec![key("a", None, None), key("b", Some("a"), due), key("c", None, due)]);
    assert_eq!(memory.take_marked(7, 1), ["a", "b"]);
    assert_eq!(memory.take_marked(7, 1), ["c"]);
    assert!(memory.take_marked(7, 1).is_empty());
}

#[test]
fn a_row_is_removed_only_as_far_as_it_was_taken() {
    let mut kept = refused();
    kept.take(&batch(10, &[("update", &[], &["5", "new", "~"])]), true);
    assert!(!kept.memory.remove(7, "[\"5\"]", position(1)));
    assert_eq!(kept.memory.count(7), 1);
    assert!(kept.memory.remove(7, "[\"5\"]", position(10)));
    assert_eq!(kept.memory.table(7).map(|_| ()), None);
}

#[test]
fn a_truncation_takes_what_came_before_it() {
    let mut kept = refused();
    kept.put(made(&batch(10, &[("insert", &[], &["6", "bad", "long"])]), "a.b"));
    assert_eq!(kept.memory.remove_through(7, position(5)), [("[\"5\"]".to_owned(), position(5))]);
    assert_eq!(kept.memory.count(7), 1);
}

#[test]
fn the_size_counts_a_row_that_is_replaced_once() {
    let mut kept = refused();
    let (rows, bytes) = kept.memory.size_with(7, &[]);
    let again = made(&batch(10, &[("insert", &[], &["5", "bad", "long"])]), "a.b");
    assert_eq!(kept.memory.size_with(7, &again), (rows, bytes));
    let other = made(&batch(11, &[("insert", &[], &["6", "bad", "long"])]), "a.b");
    assert_eq!(kept.memory.size_with(7, &other), (2, 2 * bytes));
    kept.put(other);
    assert_eq!(kept.memory.size_with(7, &[]), (2, 2 * bytes));
}

#[test]
fn rows_sent_again_are_the_rows_that_were_refused() {
    let content_before = batch(1, &[("insert", &[], &["5", "a", "-"]), ("update", &[], &["6", "b", "~"])]);
    let rows = made(&content_before, "a.b");
    let again = content(&rows, &schema(), true).unwrap();
    assert_eq!(format!("{again:?}"), format!("{content_before:?}"));
}

#[test]
fn a_log_keeps_each_refused_change_by_its_place() {
    let schema = schema();
    let map = RelationMap::new(vec![Some(1), Some(2), Some(3)], &schema);
    let mut builder = ChangeBuilder::new(schema.clone());
    for at in [1, 2] {
        let at = RowPosition { position: position(at), committed_at: 9, xid: 1 };
        builder.update(&map, None, &tuple(&["5", "x", "~"]), at).unwrap();
    }
    let changes = wire::Content::Changes(builder.finish().rows);
    let maker = Maker { destination: "d", schema: &schema, merge: false, count: 0, now: 5 };
    let why = why("a.b");
    let rows = maker.rows(&changes, [(0, &why), (1, &why)]);
    assert_ne!(rows[0].ident, rows[1].ident);
    assert_eq!(format!("{:?}", content(&rows, &schema, false).unwrap()), format!("{changes:?}"));
    let idents: Vec<String> = rows.iter().map(|row| row.ident.clone()).collect();
    let sent: Vec<String> = taken(&changes, &schema, &[], true).into_iter().map(|(ident, _)| ident).collect();
    assert_eq!(sent, idents);
}

#[test]
fn rows_of_a_copy_have_a_place_of_their_own_in_a_log() {
    let schema = schema();
    let copy = |values: &[i32]| {
        let data = wire::ColumnData::Plain(wire::Cells::Int32(values.to_vec()));
        wire::Content::Copy(wire::CopyRows {
            run: "r".to_owned(),
            batch_id: "1".to_owned(),
            as_of: wire::Position { epoch: 1, commit: 50, ordinal: 0 },
            rows: wire::Rows {
                count: values.len() as u32,
                columns: vec![wire::ColumnValues { ordinal: 1, validity: None, missing: None, odd: Vec::new(), data }],
            },
        })
    };
    let why = why("a.b");
    let of = |merge, count| {
        let maker = Maker { destination: "d", schema: &schema, merge, count, now: 5 };
        maker.rows(&copy(&[4, 5]), [(0, &why), (1, &why)])
    };
    let idents = |rows: Vec<QuarantinedRow>| rows.into_iter().map(|row| row.ident).collect::<Vec<_>>();
    assert_eq!(idents(of(true, 0)), ["[\"4\"]", "[\"5\"]"]);
    let log: BTreeSet<String> = idents(of(false, 0)).into_iter().chain(idents(of(false, 2))).collect();
    assert_eq!(log.len(), 4);
    assert_eq!(of(false, 0)[0].op, RowOp::Insert);
}

#[test]
fn what_a_durable_group_says_in_full_is_told_from_what_it_says_in_part() {
    let content = batch(
        1,
        &[("insert", &[], &["5", "a", "b"]), ("update", &[], &["6", "b", "~"]), ("delete", &["7", "-", "-"], &[])],
    );
    let idents = |refused: &[u32], all| {
        taken(&content, &schema(), refused, all).into_iter().map(|(ident, _)| ident).collect::<Vec<_>>()
    };
    assert_eq!(idents(&[], false), ["[\"5\"]", "[\"7\"]"]);
    assert_eq!(idents(&[], true).len(), 3);
    assert_eq!(idents(&[0], false), ["[\"7\"]"]);
}
