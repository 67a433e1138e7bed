use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use super::*;
use crate::error::Exit;
use crate::position::{Lsn, Position, SnapshotId};
use crate::schema::table::{Column, Origin, ReplicaIdentity, TableName};

fn position(commit: u64, ordinal: u64) -> Position {
    Position { epoch: 1, commit: Lsn(commit), ordinal }
}

fn schema(oid: u32, commit: u64, message: u64, column: &str) -> TableSchema {
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
            type_oid: 23,
            typmod: -1,
            base_typmod: -1,
            nullable: false,
            key_position: Some(1),
            identity: true,
            default_expression: None,
            default_literal: None,
            enum_labels: Vec::new(),
        }],
    }
}

fn source() -> SourceRecord {
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

fn destination(name: &str) -> DestinationRecord {
    DestinationRecord { name: name.to_owned(), plugin: "files".to_owned(), checkpoint: Lsn(10) }
}

fn ready_table(oid: u32) -> TableRecord {
    TableRecord {
        destination: "d".to_owned(),
        oid,
        name: TableName::new("public", "t"),
        state: TableState::Ready,
        ..TableRecord::default()
    }
}

fn progress(checkpoint: Option<u64>, positions: Vec<(u32, Position)>) -> Progress {
    Progress { destination: "d".to_owned(), checkpoint: checkpoint.map(Lsn), positions }
}

async fn store_with_table(directory: &Path) -> Store {
    let store = Store::open(directory, "shop").unwrap();
    store.save_destination(destination("d")).await.unwrap();
    store.save_table(ready_table(7)).await.unwrap();
    store
}

#[tokio::test]
async fn what_was_saved_is_loaded_after_a_reopen() {
    let directory = tempfile::tempdir().unwrap();
    let store = Store::open(directory.path(), "shop").unwrap();
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
    assert_eq!(Store::open(directory.path(), "shop").unwrap().load().unwrap(), expected);
}

#[tokio::test]
async fn a_version_that_comes_again_changes_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let store = Store::open(directory.path(), "shop").unwrap();
    store.append_history(schema(7, 9, 10, "a")).await.unwrap();
    store.append_history(schema(7, 9, 10, "odd")).await.unwrap();
    assert_eq!(store.load().unwrap().history, [schema(7, 9, 10, "a")]);
}

#[tokio::test]
async fn checkpoints_and_positions_never_go_back() {
    let directory = tempfile::tempdir().unwrap();
    let store = store_with_table(directory.path()).await;
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

#[tokio::test]
async fn a_reset_table_begins_anew_and_late_progress_does_not_reach_it() {
    let directory = tempfile::tempdir().unwrap();
    let store = store_with_table(directory.path()).await;
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

#[tokio::test]
async fn nothing_is_saved_for_a_destination_that_is_not_stored() {
    let directory = tempfile::tempdir().unwrap();
    let store = Store::open(directory.path(), "shop").unwrap();
    let refused = store.save_table(ready_table(7)).await.unwrap_err();
    assert_eq!(refused.code(), "state.unknown-destination");
    assert_eq!(store.save_progress(progress(Some(1), vec![])).await.unwrap_err().code(), "state.unknown-destination");
}

#[tokio::test]
async fn generations_grow_across_reopens_and_lanes_do_not_share_them() {
    let directory = tempfile::tempdir().unwrap();
    let store = Store::open(directory.path(), "shop").unwrap();
    assert_eq!(store.next_generation("d", 0).await.unwrap(), 1);
    assert_eq!(store.next_generation("d", 0).await.unwrap(), 2);
    assert_eq!(store.next_generation("d", 1).await.unwrap(), 1);
    drop(store);
    let store = Store::open(directory.path(), "shop").unwrap();
    assert_eq!(store.next_generation("d", 0).await.unwrap(), 3);
}

#[tokio::test]
async fn a_plugin_keeps_values_within_its_bounds() {
    let directory = tempfile::tempdir().unwrap();
    let store = Store::open(directory.path(), "shop").unwrap();
    let limit = sqlite::MAX_VALUE;
    assert_eq!(store.get_state("d", "k").await.unwrap(), None);
    store.set_state("d", "k", Some(vec![0, 255])).await.unwrap();
    store.set_state("d", "k", Some(vec![1; limit])).await.unwrap();
    assert_eq!(store.get_state("d", "k").await.unwrap().unwrap().len(), limit);
    assert_eq!(store.get_state("e", "k").await.unwrap(), None);
    let long_key = "k".repeat(sqlite::MAX_KEY + 1);
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

#[test]
fn a_state_of_another_pipeline_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    drop(Store::open(directory.path(), "shop").unwrap());
    let refused = Store::open(directory.path(), "shop2").err().unwrap();
    assert_eq!((refused.code(), refused.exit_code()), ("state.other-pipeline", Exit::Usage));
    assert!(refused.message().contains("`shop`"), "{refused}");
}

#[test]
fn a_state_of_a_later_version_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    drop(Store::open(directory.path(), "shop").unwrap());
    let connection = rusqlite::Connection::open(directory.path().join("state.db")).unwrap();
    connection.pragma_update(None, "user_version", 1000).unwrap();
    drop(connection);
    let refused = Store::open(directory.path(), "shop").err().unwrap();
    assert_eq!((refused.code(), refused.exit_code()), ("state.newer", Exit::Usage));
    assert_eq!(Store::open_read_only(directory.path()).err().unwrap().code(), "state.newer");
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

#[tokio::test]
async fn a_reader_sees_what_a_running_process_saved_and_cannot_write() {
    let directory = tempfile::tempdir().unwrap();
    assert_eq!(Store::open_read_only(directory.path()).err().unwrap().code(), "state.missing");
    let store = store_with_table(directory.path()).await;
    let reader = Store::open_read_only(directory.path()).unwrap();
    assert_eq!(reader.load().unwrap(), store.load().unwrap());
    store.save_progress(progress(Some(77), vec![])).await.unwrap();
    assert_eq!(reader.load().unwrap().destinations[0].checkpoint, Lsn(77));
    assert_eq!(reader.save_source(source()).await.unwrap_err().code(), "state.read-only");
    drop((store, reader));
    let reader = Store::open_read_only(directory.path()).unwrap();
    assert_eq!(reader.load().unwrap().tables.len(), 1);
}

/// Names the state directory to [`child_saves_progress_until_it_is_killed`].
const CHILD: &str = "TIDEGATE_TEST_STATE";

/// Not a test of its own: what the tests below run as another process. It prints each
/// checkpoint once it is durable.
#[tokio::test]
async fn child_saves_progress_until_it_is_killed() {
    let Some(directory) = std::env::var_os(CHILD) else { return };
    let store = store_with_table(Path::new(&directory)).await;
    for checkpoint in 100.. {
        store.save_progress(progress(Some(checkpoint), vec![(7, position(checkpoint, 0))])).await.unwrap();
        let mut out = std::io::stdout().lock();
        writeln!(out, "durable {checkpoint}").unwrap();
        out.flush().unwrap();
    }
}

/// Starts the child and waits until it has saved `count` checkpoints.
fn start_child(directory: &Path, count: usize) -> (Child, impl Iterator<Item = u64> + use<>) {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "store::tests::child_saves_progress_until_it_is_killed", "--nocapture"])
        .env(CHILD, directory)
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut durable = lines.map_while(Result::ok).filter_map(|line| line.strip_prefix("durable ")?.parse().ok());
    assert_eq!(durable.by_ref().take(count).count(), count, "the child did not get that far");
    (child, durable)
}

#[test]
fn a_second_process_is_refused_and_told_who_holds_the_state_until_that_one_dies() {
    let directory = tempfile::tempdir().unwrap();
    let (mut child, _durable) = start_child(directory.path(), 1);
    let refused = Store::open(directory.path(), "shop").err().unwrap();
    assert_eq!((refused.code(), refused.exit_code()), ("state.in-use", Exit::Usage));
    assert!(refused.message().contains(&format!("process {}", child.id())), "{refused}");
    assert_eq!(Store::open_read_only(directory.path()).unwrap().load().unwrap().tables.len(), 1);
    child.kill().unwrap();
    child.wait().unwrap();
    Store::open(directory.path(), "shop").unwrap();
}

#[test]
fn what_was_durable_survives_a_killed_process() {
    let directory = tempfile::tempdir().unwrap();
    let (mut child, durable) = start_child(directory.path(), 20);
    child.kill().unwrap();
    child.wait().unwrap();
    let last = durable.last().unwrap_or(119);
    // A reader comes first: it has to recover the log without writing the state.
    let seen = Store::open_read_only(directory.path()).unwrap().load().unwrap();
    assert!(seen.destinations[0].checkpoint >= Lsn(last));
    let loaded = Store::open(directory.path(), "shop").unwrap().load().unwrap();
    assert!(loaded.destinations[0].checkpoint >= Lsn(last));
    // One transaction: neither is ahead of the other.
    assert_eq!(loaded.tables[0].position.unwrap().commit, loaded.destinations[0].checkpoint);
}
