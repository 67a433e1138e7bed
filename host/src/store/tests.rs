use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use super::test_places::{self, Place};
use super::*;
use crate::copy::{Base, Stretch};
use crate::error::Exit;
use crate::position::{Lsn, Position, SnapshotId};
use crate::schema::barrier::Gate;
use crate::schema::moment::Moment;
use crate::schema::table::{Column, Origin, ReplicaIdentity, TableName};
use crate::schema::tombstone::Ended;

/// The same tests for each place that a state can be in.
macro_rules! in_both_places {
    ($($test:ident,)*) => {
        mod in_sqlite {
            $(#[tokio::test] async fn $test() { super::$test(super::Place::sqlite()).await; })*
        }
        mod in_postgres {
            $(#[tokio::test] async fn $test() { super::$test(super::Place::postgres()).await; })*
        }
    };
}

in_both_places! {
    what_was_saved_is_loaded_after_a_reopen,
    a_version_that_comes_again_changes_nothing,
    checkpoints_and_positions_never_go_back,
    a_reset_table_begins_anew_and_late_progress_does_not_reach_it,
    nothing_is_saved_for_a_destination_that_is_not_stored,
    generations_grow_across_reopens_and_lanes_do_not_share_them,
    a_plugin_keeps_values_within_its_bounds,
    a_state_of_another_pipeline_is_refused,
    a_state_of_a_later_version_is_refused,
    a_reader_sees_what_a_running_process_saved_and_cannot_write,
    a_second_process_is_refused_and_told_who_holds_the_state_until_that_one_dies,
    what_was_durable_survives_a_killed_process,
    a_quarantined_row_is_kept_whole_and_replaced_only_by_what_is_newer,
    marks_are_told_and_taken_back_when_a_row_is_refused_again,
    a_dropped_row_takes_with_it_what_needs_it_and_frees_what_it_needs,
    a_table_that_begins_anew_has_nothing_in_quarantine,
    strings_of_plugins_may_hold_any_characters_and_any_length,
    what_is_known_of_the_stretches_of_a_copy_is_there_after_a_restart,
    a_table_that_begins_anew_has_no_copy_to_resume,
    who_brought_a_destination_to_a_version_is_kept_with_the_last_time,
    versions_that_something_names_are_never_removed,
    a_tombstone_stays_until_nothing_is_known_of_its_table,
    what_was_said_of_a_change_that_waits_is_said_of_that_one_alone_and_is_there_after_a_restart,
    a_table_that_begins_anew_or_stops_with_its_destination_waits_for_nothing,
}

pub(super) fn position(commit: u64, ordinal: u64) -> Position {
    Position { epoch: 1, commit: Lsn(commit), ordinal }
}

pub(super) fn schema(oid: u32, commit: u64, message: u64, column: &str) -> TableSchema {
    TableSchema {
        oid,
        name: TableName::new("public", "t"),
        snapshot: SnapshotId { commit: Lsn(commit), message: Lsn(message) },
        origin: Origin::Message,
        replica_identity: ReplicaIdentity::Default,
        columns: vec![Column {
            ordinal: 1,
            name: column.to_owned(),
            declared: "integer".to_owned(),
            base: "int4".to_owned(),
            element: None,
            delimiter: None,
            type_oid: 23,
            typmod: -1,
            base_typmod: -1,
            nullable: false,
            key_position: Some(1),
            identity: true,
            default_expression: None,
            default_literal: None,
            generated: false,
            enum_labels: Vec::new(),
            within: None,
        }],
        highest: 2,
        listed: true,
        rewritten: true,
        committed_at: Some(Moment(1_796_113_815_250_001)),
    }
}

pub(super) fn source() -> SourceRecord {
    SourceRecord {
        system: "7300000000000000000".to_owned(),
        timeline: 1,
        slot: "tidegate_shop".to_owned(),
        publication: "shop".to_owned(),
        publication_oid: 4_000_000_000,
        plugin: "pgoutput".to_owned(),
        epoch: 1,
        slot_state: SlotRecord::Intended,
    }
}

pub(super) fn destination(name: &str) -> DestinationRecord {
    DestinationRecord { name: name.to_owned(), plugin: "files".to_owned(), checkpoint: Lsn(10) }
}

pub(super) fn ready_table(oid: u32) -> TableRecord {
    TableRecord {
        destination: "d".to_owned(),
        oid,
        name: TableName::new("public", "t"),
        state: TableState::Ready,
        ..TableRecord::default()
    }
}

/// A copy by so many stretches of one leaf, none of which is done.
pub(super) fn copy(count: u64) -> CopyRecord {
    let stretch =
        |number: u64| Stretch { leaf: 70, from: number * 10, to: (number + 1 < count).then_some((number + 1) * 10) };
    CopyRecord {
        destination: "d".to_owned(),
        oid: 7,
        run: "0123".to_owned(),
        snapshot: SnapshotId { commit: Lsn(5), message: Lsn(6) },
        origin: "abc of 1/1".to_owned(),
        cleaned: Lsn(5),
        stretches: (0..count).map(stretch).map(StretchRecord::new).collect(),
    }
}

pub(super) fn base(floor: u64, xmin: u64) -> Base {
    Base { floor: Lsn(floor), xmin }
}

pub(super) fn progress(checkpoint: Option<u64>, positions: Vec<(u32, Position)>) -> Progress {
    Progress { destination: "d".to_owned(), checkpoint: checkpoint.map(Lsn), positions }
}

pub(super) async fn store_with_table(place: &Place) -> Store {
    with_table(place.open().unwrap()).await
}

async fn with_table(store: Store) -> Store {
    store.save_destination(destination("d")).await.unwrap();
    store.save_table(ready_table(7)).await.unwrap();
    store
}

async fn what_was_saved_is_loaded_after_a_reopen(place: Place) {
    let store = place.open().unwrap();
    assert_eq!(store.load().unwrap(), Loaded::default());

    let mut expected = Loaded {
        source: Some(SourceRecord { slot_state: SlotRecord::Created { at: Lsn(u64::MAX) }, ..source() }),
        destinations: vec![destination("d"), destination("e")],
        ..Loaded::default()
    };
    let error = TableError { code: "a.b".to_owned(), message: "m".to_owned(), next: Some("Do.".to_owned()) };
    expected.destination_errors.insert("e".to_owned(), error.clone());
    let table = TableRecord {
        floor: Some(Lsn(0x16_B374_D848)),
        run: Some("run".to_owned()),
        position: Some(Position { epoch: 3, commit: Lsn(u64::MAX - 1), ordinal: u64::MAX }),
        applied: Some("9:10".parse().unwrap()),
        applying: Some(Applying { from: "9:10".parse().unwrap(), to: "11:12".parse().unwrap(), step: 2 }),
        needs_resync: true,
        rows_copied: 5,
        rows_total: Some(6),
        error: Some(error.clone()),
        ..ready_table(4_000_000_000)
    };
    expected.tables = vec![ready_table(7), table];
    expected.history = vec![schema(7, 9, 10, "a"), schema(7, 10, 0, "b"), schema(8, 1, 0, "a")];

    store.save_source(source()).await.unwrap();
    store.save_source(expected.source.clone().unwrap()).await.unwrap();
    for one in expected.destinations.iter().rev() {
        store.save_destination(one.clone()).await.unwrap();
    }
    store.save_destination_error("e", Some(error)).await.unwrap();
    store.save_tables(expected.tables.clone()).await.unwrap();
    for one in expected.history.iter().rev() {
        store.append_history(one.clone()).await.unwrap();
    }
    assert_eq!(store.load().unwrap(), expected);
    drop(store);
    assert_eq!(place.open().unwrap().load().unwrap(), expected);
}

async fn a_version_that_comes_again_changes_nothing(place: Place) {
    let store = place.open().unwrap();
    store.append_history(schema(7, 9, 10, "a")).await.unwrap();
    store.append_history(schema(7, 9, 10, "odd")).await.unwrap();
    assert_eq!(store.load().unwrap().history, [schema(7, 9, 10, "a")]);
}

fn id(commit: u64) -> SnapshotId {
    SnapshotId { commit: Lsn(commit), message: Lsn(commit - 1) }
}

async fn who_brought_a_destination_to_a_version_is_kept_with_the_last_time(place: Place) {
    let store = store_with_table(&place).await;
    let application = |how: How, at: i64| Application { how, generation: 3, at: Moment(at) };
    let at_version = |commit: u64, application: Option<Application>| TableRecord {
        applied: Some(id(commit)),
        application,
        ..ready_table(7)
    };
    for (commit, how, at) in [(90, How::Copied, 1), (100, How::Applied, 2), (200, How::Approved, 3)] {
        store.save_table(at_version(commit, Some(application(how, at)))).await.unwrap();
    }
    store.save_table(at_version(200, None)).await.unwrap();
    store.reset_table("d", 7).await.unwrap();
    store.save_table(at_version(200, Some(application(How::Copied, 4)))).await.unwrap();
    store.delete_table("d", 7).await.unwrap();
    let loaded = place.open_again(store).load().unwrap();
    let kept: Vec<_> = loaded.applied.iter().map(|one| (one.snapshot, one.application)).collect();
    let expected = [(90, How::Copied, 1), (100, How::Applied, 2), (200, How::Copied, 4)];
    assert_eq!(kept, expected.map(|(commit, how, at)| (id(commit), application(how, at))));
    assert!(loaded.applied.iter().all(|one| one.destination == "d" && one.oid == 7));
}

async fn versions_that_something_names_are_never_removed(place: Place) {
    let store = store_with_table(&place).await;
    for commit in 1..=9 {
        store.append_history(schema(7, commit, commit - 1, "a")).await.unwrap();
    }
    let applying = Applying { from: id(2), to: id(3), step: 0 };
    store.save_table(TableRecord { applied: Some(id(2)), applying: Some(applying), ..ready_table(7) }).await.unwrap();
    store.save_copy(CopyRecord { snapshot: id(5), ..copy(1) }).await.unwrap();
    let row = QuarantinedRow { snapshot: id(6), ..quarantined(7, "a", 5) };
    store.put_quarantined(vec![row]).await.unwrap();
    store.save_barrier(BarrierRecord { from: id(2), to: id(8), ..barrier("8:9") }).await.unwrap();
    store.append_end(tombstone(1, 500)).await.unwrap();
    store.append_end(tombstone(4, 500)).await.unwrap();
    let asked: Vec<SnapshotId> = (1..=8).map(id).collect();
    // The second time is after an answer that was lost.
    for _ in 0..2 {
        let gone = store.remove_versions(7, asked.clone()).await.unwrap();
        assert_eq!(gone, [id(1), id(4), id(7)]);
    }
    let loaded = place.open_again(store).load().unwrap();
    let left: Vec<SnapshotId> = loaded.history.iter().map(|version| version.snapshot).collect();
    assert_eq!(left, [id(2), id(3), id(5), id(6), id(8), id(9)]);
    assert_eq!(loaded.ended, [tombstone(4, 500)], "an end before the first version goes");
    assert_eq!(loaded.removed.get(&7), Some(&3));
}

fn tombstone(commit: u64, message: u64) -> Tombstone {
    let snapshot = SnapshotId { commit: Lsn(commit), message: Lsn(message) };
    Tombstone { oid: 7, name: TableName::new("public", "t"), snapshot, why: Ended::Dropped, at: Some(Moment(-5)) }
}

async fn a_tombstone_stays_until_nothing_is_known_of_its_table(place: Place) {
    let store = store_with_table(&place).await;
    store.append_history(schema(7, 10, 9, "a")).await.unwrap();
    store.append_end(tombstone(20, 19)).await.unwrap();
    store.append_end(Tombstone { why: Ended::Unpublished, ..tombstone(20, 19) }).await.unwrap();
    let store = place.open_again(store);
    assert_eq!(store.load().unwrap().ended, [tombstone(20, 19)]);
    assert!(!store.forget_history(7).await.unwrap(), "a destination has the table");
    store.delete_table("d", 7).await.unwrap();
    assert!(store.forget_history(7).await.unwrap());
    let loaded = store.load().unwrap();
    assert_eq!((loaded.history, loaded.ended, loaded.applied), (vec![], vec![], vec![]));
}

async fn checkpoints_and_positions_never_go_back(place: Place) {
    let store = store_with_table(&place).await;
    let at = |store: &Store| {
        let loaded = store.load().unwrap();
        (loaded.destinations[0].checkpoint, loaded.tables[0].position)
    };

    store.save_progress(progress(Some(0x100), vec![(7, position(0x100, 9))])).await.unwrap();
    assert_eq!(at(&store), (Lsn(0x100), Some(position(0x100, 9))));
    // `9` is after `10` as text without leading zeros, and 0xA0 before 0x100 as a number.
    store.save_progress(progress(Some(0xA0), vec![(7, position(0xA0, 500))])).await.unwrap();
    store.save_progress(progress(None, vec![(7, position(0x100, 8))])).await.unwrap();
    store.save_destination(DestinationRecord { checkpoint: Lsn(1), ..destination("d") }).await.unwrap();
    store.save_table(TableRecord { position: None, ..ready_table(7) }).await.unwrap();
    store.save_table(TableRecord { position: Some(position(1, 1)), ..ready_table(7) }).await.unwrap();
    assert_eq!(at(&store), (Lsn(0x100), Some(position(0x100, 9))));

    store.save_progress(progress(Some(0x101), vec![(7, position(0x100, 10))])).await.unwrap();
    assert_eq!(at(&store), (Lsn(0x101), Some(position(0x100, 10))));
    let next_epoch = Position { epoch: 2, commit: Lsn(1), ordinal: 0 };
    store.save_progress(progress(None, vec![(7, next_epoch)])).await.unwrap();
    assert_eq!(at(&store).1, Some(next_epoch));
}

async fn a_reset_table_begins_anew_and_late_progress_does_not_reach_it(place: Place) {
    let store = store_with_table(&place).await;
    let full = TableRecord {
        floor: Some(Lsn(5)),
        run: Some("run".to_owned()),
        position: Some(position(50, 1)),
        applied: Some(SnapshotId::default()),
        needs_resync: true,
        rows_copied: 9,
        rows_total: Some(9),
        error: Some(TableError { code: "a.b".to_owned(), message: String::new(), next: None }),
        ..ready_table(7)
    };
    store.save_table(full).await.unwrap();
    store.reset_table("d", 7).await.unwrap();
    store.save_progress(progress(None, vec![(7, position(60, 1))])).await.unwrap();
    let fresh = TableRecord { state: TableState::Init, ..ready_table(7) };
    assert_eq!(store.load().unwrap().tables, [fresh]);

    store.delete_table("d", 7).await.unwrap();
    assert_eq!(store.load().unwrap().tables, []);
}

async fn nothing_is_saved_for_a_destination_that_is_not_stored(place: Place) {
    let store = place.open().unwrap();
    let refused = store.save_table(ready_table(7)).await.unwrap_err();
    assert_eq!(refused.code(), "state.unknown-destination");
    assert_eq!(store.save_progress(progress(Some(1), vec![])).await.unwrap_err().code(), "state.unknown-destination");
}

async fn generations_grow_across_reopens_and_lanes_do_not_share_them(place: Place) {
    let store = place.open().unwrap();
    assert_eq!(store.next_generation("d", 0).await.unwrap(), 1);
    assert_eq!(store.next_generation("d", 0).await.unwrap(), 2);
    assert_eq!(store.next_generation("d", 1).await.unwrap(), 1);
    drop(store);
    let store = place.open().unwrap();
    assert_eq!(store.next_generation("d", 0).await.unwrap(), 3);
}

async fn a_plugin_keeps_values_within_its_bounds(place: Place) {
    let store = place.open().unwrap();
    let limit = limits::MAX_VALUE;
    assert_eq!(store.get_state("d", "k").await.unwrap(), None);
    store.set_state("d", "k", Some(vec![0, 255])).await.unwrap();
    store.set_state("d", "k", Some(vec![1; limit])).await.unwrap();
    assert_eq!(store.get_state("d", "k").await.unwrap().unwrap().len(), limit);
    assert_eq!(store.get_state("e", "k").await.unwrap(), None);
    let long_key = "k".repeat(limits::MAX_KEY + 1);
    assert_eq!(store.set_state("d", &long_key, Some(vec![])).await.unwrap_err().code(), "state.too-large");
    assert_eq!(store.set_state("d", "k", Some(vec![0; limit + 1])).await.unwrap_err().code(), "state.too-large");
    for key in 1..64 {
        store.set_state("d", &key.to_string(), Some(vec![0; limit])).await.unwrap();
    }
    assert_eq!(store.set_state("d", "more", Some(vec![0])).await.unwrap_err().code(), "state.too-large");
    store.set_state("d", "k", None).await.unwrap();
    assert_eq!(store.get_state("d", "k").await.unwrap(), None);
    store.set_state("d", "more", Some(vec![0])).await.unwrap();
}

async fn a_state_of_another_pipeline_is_refused(place: Place) {
    drop(place.open().unwrap());
    let refused = place.open_as("shop2").err().unwrap();
    assert_eq!((refused.code(), refused.exit_code()), ("state.other-pipeline", Exit::Usage));
    assert!(refused.message().contains("`shop`"), "{refused}");
}

async fn a_state_of_a_later_version_is_refused(place: Place) {
    drop(place.open().unwrap());
    match &place.server {
        Some(server) => {
            server.sql("UPDATE tidegate_shop.meta SET value = '1000' WHERE key = 'version'");
        }
        None => {
            let connection = rusqlite::Connection::open(place.path().join("state.db")).unwrap();
            connection.pragma_update(None, "user_version", 1000).unwrap();
        }
    }
    let refused = place.open().err().unwrap();
    assert_eq!((refused.code(), refused.exit_code()), ("state.newer", Exit::Usage));
    assert_eq!(place.read().err().unwrap().code(), "state.newer");
}

#[test]
fn a_file_that_is_no_database_is_named_corrupt() {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("state.db"), "x".repeat(10_000)).unwrap();
    assert_eq!(Store::open(directory.path(), "shop").err().unwrap().code(), "state.corrupt");
}

#[test]
fn a_new_state_directory_is_closed_to_others() {
    use std::os::unix::fs::PermissionsExt;
    let directory = tempfile::tempdir().unwrap();
    let state = directory.path().join("a/b");
    let _store = Store::open(&state, "shop").unwrap();
    assert_eq!(std::fs::metadata(&state).unwrap().permissions().mode() & 0o777, 0o700);
}

async fn a_reader_sees_what_a_running_process_saved_and_cannot_write(place: Place) {
    assert_eq!(place.read().err().unwrap().code(), "state.missing");
    let store = store_with_table(&place).await;
    let reader = place.read().unwrap();
    assert_eq!(reader.load().unwrap(), store.load().unwrap());
    store.save_progress(progress(Some(77), vec![])).await.unwrap();
    assert_eq!(reader.load().unwrap().destinations[0].checkpoint, Lsn(77));
    assert_eq!(reader.save_source(source()).await.unwrap_err().code(), "state.read-only");
    drop((store, reader));
    let reader = place.read().unwrap();
    assert_eq!(reader.load().unwrap().tables.len(), 1);
}

/// Names the state directory to [`child_saves_progress_until_it_is_killed`], and the server
/// if there is one.
const CHILD: &str = "TIDEGATE_TEST_STATE";
const CHILD_SERVER: &str = "TIDEGATE_TEST_STATE_SERVER";

/// Not a test of its own: what the tests below run as another process. It prints each
/// checkpoint once it is durable.
#[tokio::test]
async fn child_saves_progress_until_it_is_killed() {
    let Some(directory) = std::env::var_os(CHILD) else { return };
    let url = std::env::var(CHILD_SERVER).ok();
    let store = with_table(test_places::open(Path::new(&directory), url.as_deref(), "shop").unwrap()).await;
    for checkpoint in 100.. {
        store.save_progress(progress(Some(checkpoint), vec![(7, position(checkpoint, 0))])).await.unwrap();
        let mut out = std::io::stdout().lock();
        writeln!(out, "durable {checkpoint}").unwrap();
        out.flush().unwrap();
    }
}

/// Starts the child and waits until it has saved `count` checkpoints.
fn start_child(place: &Place, count: usize) -> (Child, impl Iterator<Item = u64> + use<>) {
    let mut command = Command::new(std::env::current_exe().unwrap());
    if let Some(server) = &place.server {
        command.env(CHILD_SERVER, server.url());
    }
    let mut child = command
        .args(["--exact", "store::tests::child_saves_progress_until_it_is_killed", "--nocapture"])
        .env(CHILD, place.path())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut durable = lines.map_while(Result::ok).filter_map(|line| line.strip_prefix("durable ")?.parse().ok());
    assert_eq!(durable.by_ref().take(count).count(), count, "the child did not get that far");
    (child, durable)
}

async fn a_second_process_is_refused_and_told_who_holds_the_state_until_that_one_dies(place: Place) {
    let (mut child, _durable) = start_child(&place, 1);
    let refused = place.open().err().unwrap();
    assert_eq!((refused.code(), refused.exit_code()), ("state.in-use", Exit::Usage));
    assert!(refused.message().contains(&format!("process {}", child.id())), "{refused}");
    assert_eq!(place.read().unwrap().load().unwrap().tables.len(), 1);
    child.kill().unwrap();
    child.wait().unwrap();
    place.open().unwrap();
}

async fn what_was_durable_survives_a_killed_process(place: Place) {
    let (mut child, durable) = start_child(&place, 20);
    child.kill().unwrap();
    child.wait().unwrap();
    let last = durable.last().unwrap_or(119);
    // A reader comes first: it has to recover the log without writing the state.
    let seen = place.read().unwrap().load().unwrap();
    assert!(seen.destinations[0].checkpoint >= Lsn(last));
    let loaded = place.open().unwrap().load().unwrap();
    assert!(loaded.destinations[0].checkpoint >= Lsn(last));
    // One transaction: neither is ahead of the other.
    assert_eq!(loaded.tables[0].position.unwrap().commit, loaded.destinations[0].checkpoint);
}

pub(super) fn quarantined(oid: u32, key: &str, ordinal: u64) -> QuarantinedRow {
    QuarantinedRow {
        id: 0,
        destination: "d".to_owned(),
        oid,
        table: TableName::new("public", "t"),
        ident: key.to_owned(),
        op: RowOp::Upsert,
        snapshot: "9:10".parse().unwrap(),
        position: position(20, ordinal),
        committed_at: 7,
        xid: 3,
        row: serde_json::from_str(r#"{"1":"5","2":null,"3":{"hex":"ff"}}"#).unwrap(),
        old: Some(serde_json::from_str(r#"{"1":"4"}"#).unwrap()),
        needs: None,
        reason: RefusedWhy { code: "a.b".to_owned(), message: "no".to_owned(), column: Some(2) },
        changes: 1,
        quarantined_at: 100,
        mark: None,
    }
}

fn all(store: &Store) -> Vec<QuarantinedRow> {
    store.list_quarantined(QuarantineSelection::default(), u32::MAX).unwrap()
}

async fn a_quarantined_row_is_kept_whole_and_replaced_only_by_what_is_newer(place: Place) {
    let store = store_with_table(&place).await;
    let first = quarantined(7, "a", u64::MAX - 1);
    store.put_quarantined(vec![first.clone(), quarantined(7, "b", 2)]).await.unwrap();
    drop(store);
    let store = place.open().unwrap();
    assert_eq!(all(&store)[0], QuarantinedRow { id: 1, ..first.clone() });
    assert_eq!(store.load().unwrap().quarantined, [(("d".to_owned(), 7), 2)].into());

    let newer = QuarantinedRow { changes: 2, quarantined_at: 200, op: RowOp::Delete, ..quarantined(7, "a", u64::MAX) };
    let older = QuarantinedRow { changes: 9, ..quarantined(7, "a", 1) };
    store.put_quarantined(vec![newer.clone()]).await.unwrap();
    store.put_quarantined(vec![older]).await.unwrap();
    let kept = store.get_quarantined("d", 7, vec!["a".to_owned(), "z".to_owned()]).await.unwrap();
    // Who it is and when it came stay.
    assert_eq!(kept, [QuarantinedRow { id: 1, quarantined_at: 100, ..newer }]);

    store
        .remove_quarantined("d", 7, vec![("a".to_owned(), position(20, 1)), ("b".to_owned(), position(20, 2))])
        .await
        .unwrap();
    assert_eq!(all(&store).iter().map(|row| row.ident.as_str()).collect::<Vec<_>>(), ["a"]);
}

async fn marks_are_told_and_taken_back_when_a_row_is_refused_again(place: Place) {
    let store = store_with_table(&place).await;
    store.put_quarantined(vec![quarantined(7, "a", 1), quarantined(7, "b", 2), quarantined(8, "c", 3)]).await.unwrap();
    let mut marks = store.marks();
    let selection = QuarantineSelection { table: Some("public.t".to_owned()), ids: vec![1, 2], ..Default::default() };
    assert_eq!(store.mark_quarantined(selection, Mark::Retry).await.unwrap(), 2);
    assert!(marks.has_changed().unwrap());
    marks.mark_unchanged();
    let other = QuarantineSelection { destination: Some("e".to_owned()), ..Default::default() };
    assert_eq!(store.mark_quarantined(other, Mark::Drop).await.unwrap(), 0);

    let why = RefusedWhy { code: "c.d".to_owned(), message: "still no".to_owned(), column: None };
    // `b` has changed since it was sent: that is still to be sent.
    let again = vec![("a".to_owned(), position(20, 1), why.clone()), ("b".to_owned(), position(20, 1), why.clone())];
    store.explain_quarantined("d", 7, again).await.unwrap();
    let index = store.quarantine_index("d").await.unwrap();
    let marked: Vec<_> = index.iter().map(|key| (key.ident.as_str(), key.mark, key.code.as_str())).collect();
    assert_eq!(marked, [("a", None, "c.d"), ("b", Some(Mark::Retry), "c.d"), ("c", None, "a.b")]);
}

async fn a_dropped_row_takes_with_it_what_needs_it_and_frees_what_it_needs(place: Place) {
    let store = store_with_table(&place).await;
    let needs =
        |key: &str, needed: &str, at| QuarantinedRow { needs: Some(needed.to_owned()), ..quarantined(7, key, at) };
    store.put_quarantined(vec![quarantined(7, "a", 1), needs("b", "a", 2), needs("c", "b", 3)]).await.unwrap();
    store.mark_quarantined(QuarantineSelection { ids: vec![2], ..Default::default() }, Mark::Drop).await.unwrap();
    store.drop_marked("e").await.unwrap();
    assert_eq!(all(&store).len(), 3);
    store.drop_marked("d").await.unwrap();
    assert_eq!(
        all(&store).iter().map(|row| (row.ident.as_str(), row.mark)).collect::<Vec<_>>(),
        [("a", Some(Mark::Retry))]
    );
}

async fn a_table_that_begins_anew_has_nothing_in_quarantine(place: Place) {
    let store = store_with_table(&place).await;
    for oid in [7, 8, 10] {
        store.put_quarantined(vec![quarantined(oid, "a", 1)]).await.unwrap();
    }
    store.delete_table("d", 7).await.unwrap();
    store.reset_table("d", 8).await.unwrap();
    assert_eq!(all(&store).iter().map(|row| row.oid).collect::<Vec<_>>(), [10]);
}

async fn strings_of_plugins_may_hold_any_characters_and_any_length(place: Place) {
    let store = store_with_table(&place).await;
    let odd = "nul \0, \u{1}, \\0, '\"$1, \u{feff}, \u{10ffff}, \r\n";
    // Longer than an index of a server can hold, and nothing that could be compressed.
    let long: String = (0_u64..2000).map(|n| format!("{:x}", n.wrapping_mul(0x9E37_79B9_7F4A_7C15))).collect();
    let error = TableError { code: odd.to_owned(), message: odd.to_owned(), next: Some(odd.to_owned()) };
    store.save_destination_error("d", Some(error.clone())).await.unwrap();
    let table = TableRecord { run: Some(odd.to_owned()), error: Some(error.clone()), ..ready_table(7) };
    store.save_table(table.clone()).await.unwrap();
    let why = RefusedWhy { code: odd.to_owned(), message: odd.to_owned(), column: None };
    let first = QuarantinedRow { reason: why.clone(), ..quarantined(7, odd, 1) };
    let second = QuarantinedRow { needs: Some(odd.to_owned()), ..quarantined(7, &long, 2) };
    for _ in 0..2 {
        store.put_quarantined(vec![first.clone(), second.clone()]).await.unwrap();
    }
    store.set_state("d", "k\0", Some(vec![0, 1])).await.unwrap();
    store.set_state("d", "k", Some(odd.into())).await.unwrap();

    let loaded = store.load().unwrap();
    assert_eq!((&loaded.destination_errors["d"], &loaded.tables[0]), (&error, &table));
    assert_eq!(store.get_state("d", "k\0").await.unwrap().unwrap(), [0, 1]);
    assert_eq!(store.get_state("d", "k").await.unwrap().unwrap(), odd.as_bytes());
    let idents = vec![long.clone(), odd.to_owned()];
    let kept = store.get_quarantined("d", 7, idents).await.unwrap();
    assert_eq!(kept.len(), 2);
    assert_eq!(kept[0], QuarantinedRow { id: kept[0].id, ..first });
    assert_eq!(kept[1], QuarantinedRow { id: kept[1].id, ..second });
    store.explain_quarantined("d", 7, vec![(long.clone(), position(20, 2), why)]).await.unwrap();
    assert_eq!(store.quarantine_index("d").await.unwrap()[1].code, odd);
    store.remove_quarantined("d", 7, vec![(odd.to_owned(), position(20, 1))]).await.unwrap();
    assert_eq!(all(&store).iter().map(|row| row.ident.as_str()).collect::<Vec<_>>(), [long.as_str()]);
}

async fn what_is_known_of_the_stretches_of_a_copy_is_there_after_a_restart(place: Place) {
    let mut expected = copy(3);
    {
        let store = store_with_table(&place).await;
        store.save_copy(expected.clone()).await.unwrap();
        for (number, base) in [(1, base(6, 7)), (2, base(6, 7)), (2, base(u64::MAX, 8 << 32))] {
            let done = StretchRecord { base: Some(base), rows: 3, bytes: 4, ..expected.stretches[number] };
            store.save_stretch("d", 7, number, done).await.unwrap();
            expected.stretches[number] = done;
        }
        store.save_cleaned("d", 7, Lsn(9)).await.unwrap();
        expected.cleaned = Lsn(9);
    }
    let store = place.open().unwrap();
    assert_eq!(store.load().unwrap().copies, [expected.clone()]);
    // Another run of the table has nothing of it.
    let other = CopyRecord { run: "4567".to_owned(), ..copy(2) };
    store.save_copy(other.clone()).await.unwrap();
    assert_eq!(store.load().unwrap().copies, [other]);
    store.delete_copy("d", 7).await.unwrap();
    assert_eq!(store.load().unwrap().copies, []);
}

async fn a_table_that_begins_anew_has_no_copy_to_resume(place: Place) {
    let store = store_with_table(&place).await;
    for again in [true, false] {
        store.save_table(TableRecord { state: TableState::DataSync, ..ready_table(7) }).await.unwrap();
        store.save_copy(copy(2)).await.unwrap();
        match again {
            true => store.reset_table("d", 7).await.unwrap(),
            false => store.delete_table("d", 7).await.unwrap(),
        }
        assert_eq!(store.load().unwrap().copies, []);
    }
}

fn barrier(to: &str) -> BarrierRecord {
    BarrierRecord {
        destination: "d".to_owned(),
        oid: 7,
        from: "9:10".parse().unwrap(),
        to: to.parse().unwrap(),
        gates: vec![Gate::Capability { step: "rename-table".to_owned() }, Gate::Approval],
        why: TableError { code: "schema.held".to_owned(), message: "a \0 b".to_owned(), next: None },
        since: 5,
        verdict: None,
    }
}

async fn what_was_said_of_a_change_that_waits_is_said_of_that_one_alone_and_is_there_after_a_restart(place: Place) {
    let (first, second) = (barrier("11:12"), barrier("13:14"));
    {
        let store = store_with_table(&place).await;
        let told = store.marks();
        store.save_barrier(first.clone()).await.unwrap();
        assert!(!store.decide_barrier("d", 7, second.to, Verdict::Approved).await.unwrap());
        assert!(store.decide_barrier("d", 7, first.to, Verdict::Approved).await.unwrap());
        assert!(told.has_changed().unwrap());
        // The destination meets it again, and does not know yet what was said.
        store.save_barrier(BarrierRecord { since: 99, gates: vec![Gate::Release], ..first.clone() }).await.unwrap();
    }
    let store = place.open().unwrap();
    let kept = BarrierRecord { gates: vec![Gate::Release], verdict: Some(Verdict::Approved), ..first };
    assert_eq!(store.barriers().await.unwrap(), [kept]);
    store.save_barrier(second.clone()).await.unwrap();
    assert_eq!(store.load().unwrap().barriers, [second], "another change has none of it");
    store.delete_barrier("d", 7).await.unwrap();
    assert_eq!(store.load().unwrap().barriers, []);
}

async fn a_table_that_begins_anew_or_stops_with_its_destination_waits_for_nothing(place: Place) {
    let store = store_with_table(&place).await;
    let error = TableError { code: "a.b".to_owned(), message: "m".to_owned(), next: None };
    for way in 0..3 {
        store.save_table(ready_table(7)).await.unwrap();
        store.save_barrier(barrier("11:12")).await.unwrap();
        match way {
            0 => store.reset_table("d", 7).await.unwrap(),
            1 => store.delete_table("d", 7).await.unwrap(),
            _ => store.stop_tables("d", error.clone()).await.unwrap(),
        }
        assert_eq!(store.barriers().await.unwrap(), []);
    }
}
