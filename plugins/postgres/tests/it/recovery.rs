//! Runs, redelivery, and connections that go at the wrong moment.

use tidegate_sdk::model::{FailureClass, FailureScope};

use crate::support::rows::*;
use crate::support::{database, open, server};

#[test]
fn an_empty_table_exists_and_has_a_position_after_its_copy() {
    let db = database("empty_table");
    let (mut mirror, _) = open(&db, 1);
    let t = table(1, "t", &[1], &["id:int4"]);
    assert_eq!(mirror.inspect_table(&t).unwrap(), None);
    mirror.begin_copy(&t, "r").unwrap();
    assert_eq!(mirror.attach_table(&t).unwrap(), None, "a copy under way has no position");
    mirror.finish_copy(&t, "r", at(500, 0)).unwrap();
    mirror.finish_copy(&t, "r", at(500, 0)).unwrap();
    assert_eq!(mirror.attach_table(&t).unwrap(), Some(at(500, 0)));
    assert_eq!(server().sql(&db, "SELECT count(*) FROM public.t"), "0");
}

#[test]
fn the_same_group_again_changes_nothing() {
    let db = database("same_group");
    let (mut mirror, _) = open(&db, 1);
    let t = table(1, "t", &[1], &["id:int4", "v:text?"]);
    mirror.begin_copy(&t, "r").unwrap();
    let copy = group(1, vec![copied(&t, "r", "b1", &[&[V("1"), V("a")]]), copied(&t, "r", "b2", &[&[V("2"), V("b")]])]);
    for _ in 0..2 {
        assert_eq!(mirror.write_group(&copy).unwrap().durable, 1);
    }
    mirror.finish_copy(&t, "r", at(1_000, 0)).unwrap();
    assert_eq!(server().sql(&db, "SELECT count(*) FROM tidegate.copied"), "0");
    let moves = group(2, vec![merged(&t, Some(at(1_001, 3)), &[&[V("9"), M]], &[(0, &[V("1")])], &[&[V("1")]])]);
    for _ in 0..2 {
        assert_eq!(mirror.write_group(&moves).unwrap().durable, 2);
    }
    assert_eq!(server().sql(&db, "SELECT * FROM t ORDER BY id"), "2|b\n9|a");
    // Another instance is sent what it had not heard of as durable.
    let (mut next, _) = open(&db, 2);
    assert_eq!(next.attach_table(&t).unwrap(), Some(at(1_001, 3)));
    next.write_group(&group(1, moves.batches)).unwrap();
    assert_eq!(server().sql(&db, "SELECT * FROM t ORDER BY id"), "2|b\n9|a");
}

#[test]
fn equal_batches_of_one_copy_are_told_apart_by_their_ids() {
    let db = database("equal_batches");
    let (mut mirror, _) = open(&db, 1);
    let t = table(1, "t", &[1], &["id:int4"]);
    mirror.begin_copy(&t, "r").unwrap();
    mirror.write_group(&group(1, vec![copied(&t, "r", "b1", &[&[V("1")]])])).unwrap();
    // Not a redelivery: the rows collide, which the destination says.
    let failure = mirror.write_group(&group(2, vec![copied(&t, "r", "b2", &[&[V("1")]])])).unwrap_err();
    assert_eq!(failure.code, "postgres.constraint");
    mirror.write_group(&group(2, vec![copied(&t, "r", "b1", &[&[V("1")]])])).unwrap();
}

#[test]
fn a_run_goes_on_only_where_all_that_was_made_durable_of_it_is_there() {
    let db = database("goes_on");
    let (mut mirror, _) = open(&db, 1);
    let t = table(1, "t", &[1], &["id:int4"]);
    let mut going_on = t.clone();
    going_on.details.push(("resume".to_owned(), "true".to_owned()));
    assert_eq!(mirror.begin_copy(&going_on, "r1").unwrap_err().code, "run-unknown");
    mirror.begin_copy(&t, "r1").unwrap();
    mirror.write_group(&group(1, vec![copied(&t, "r1", "a", &[&[V("1")]])])).unwrap();
    let (mut mirror, _) = open(&db, 2);
    mirror.begin_copy(&going_on, "r1").unwrap();
    mirror
        .write_group(&group(1, vec![copied(&t, "r1", "a", &[&[V("1")]]), copied(&t, "r1", "b", &[&[V("2")]])]))
        .unwrap();
    assert_eq!(server().sql(&db, "SELECT count(*) FROM t"), "2");
    assert_eq!(mirror.begin_copy(&going_on, "r2").unwrap_err().code, "run-unknown");
    assert_eq!(server().sql(&db, "SELECT count(*) FROM t"), "2", "nothing is emptied for it");
    mirror.finish_copy(&t, "r1", at(5, 0)).unwrap();
    // The host may have died before it knew.
    mirror.begin_copy(&going_on, "r1").unwrap();
    mirror.finish_copy(&t, "r1", at(5, 0)).unwrap();
    server().sql(&db, "DROP TABLE t");
    assert_eq!(mirror.begin_copy(&going_on, "r1").unwrap_err().code, "run-unknown");
    mirror.begin_copy(&t, "r2").unwrap();
    assert_eq!(server().sql(&db, "SELECT count(*) FROM t"), "0");
}

#[test]
fn a_new_run_begins_empty_and_rows_of_the_old_one_are_refused() {
    let db = database("new_run");
    let (mut mirror, _) = open(&db, 1);
    let t = table(1, "t", &[1], &["id:int4"]);
    mirror.begin_copy(&t, "r1").unwrap();
    mirror.write_group(&group(1, vec![copied(&t, "r1", "b", &[&[V("1")]])])).unwrap();
    mirror.begin_copy(&t, "r1").unwrap();
    assert_eq!(server().sql(&db, "SELECT count(*) FROM t"), "1", "a run that is known goes on");
    mirror.begin_copy(&t, "r2").unwrap();
    assert_eq!(server().sql(&db, "SELECT count(*) FROM t"), "0");
    let failure = mirror.write_group(&group(2, vec![copied(&t, "r1", "c", &[&[V("2")]])])).unwrap_err();
    assert_eq!(
        (failure.code.as_str(), failure.scope, failure.table_id),
        ("postgres.wrong-run", FailureScope::Table, Some(1))
    );
    assert_eq!(mirror.finish_copy(&t, "r1", at(1, 0)).unwrap_err().code, "postgres.wrong-run");
    // The batch id of the old run is another one's.
    mirror.write_group(&group(3, vec![copied(&t, "r2", "b", &[&[V("3")]])])).unwrap();
    mirror.finish_copy(&t, "r2", at(1, 0)).unwrap();
    assert_eq!(
        mirror.write_group(&group(4, vec![copied(&t, "r2", "d", &[&[V("4")]])])).unwrap_err().code,
        "postgres.run-finished"
    );
    assert_eq!(server().sql(&db, "SELECT id FROM t"), "3");
}

#[test]
fn a_resync_removes_the_position_and_takes_a_changed_shape() {
    let db = database("resync");
    let (mut mirror, _) = open(&db, 1);
    let t = table(1, "t", &[1], &["id:int4", "v:text?"]);
    mirror.begin_copy(&t, "r1").unwrap();
    mirror.finish_copy(&t, "r1", at(1, 0)).unwrap();
    let wider = table(1, "t", &[1], &["id:int8", "v:text?", "w:text?"]);
    mirror.begin_copy(&wider, "r2").unwrap();
    assert_eq!(mirror.attach_table(&wider).unwrap(), None);
    assert_eq!(mirror.inspect_table(&wider).unwrap(), Some(mirror.render_table(&wider).unwrap()));
}

#[test]
fn a_table_made_anew_at_the_source_takes_the_place_of_the_old_one() {
    let db = database("made_anew");
    let (mut mirror, _) = open(&db, 1);
    let old = table(1, "t", &[1], &["id:int4"]);
    mirror.begin_copy(&old, "r1").unwrap();
    mirror.write_group(&group(1, vec![copied(&old, "r1", "b", &[&[V("1")]])])).unwrap();
    mirror.finish_copy(&old, "r1", at(1, 0)).unwrap();
    let new = table(2, "t", &[1], &["id:int4"]);
    mirror.begin_copy(&new, "r2").unwrap();
    assert_eq!(server().sql(&db, "SELECT count(*) FROM t"), "0");
    let late = merged(&old, Some(at(2, 0)), &[&[V("5")]], &[], &[]);
    assert_eq!(mirror.write_group(&group(2, vec![late])).unwrap_err().code, "resync-needed");
    assert_eq!(mirror.attach_table(&old).unwrap(), None);
}

#[test]
fn a_table_that_somebody_else_made_is_taken_only_if_it_is_the_same_and_empty() {
    let db = database("foreign_table");
    let (mut mirror, _) = open(&db, 1);
    server().sql(&db, "CREATE TABLE same (id int NOT NULL, v text, PRIMARY KEY (id)); CREATE TABLE rows_in (LIKE same INCLUDING ALL); INSERT INTO rows_in VALUES (1, 'mine')");
    server().sql(&db, "CREATE TABLE other (id int PRIMARY KEY, w int); CREATE TABLE keyless (id int NOT NULL, v text)");
    for (id, name) in [(1, "rows_in"), (2, "other"), (3, "keyless")] {
        let failure = mirror.begin_copy(&table(id, name, &[1], &["id:int4", "v:text?"]), "r").unwrap_err();
        assert_eq!(
            (failure.code.as_str(), failure.scope, failure.table_id),
            ("postgres.foreign-table", FailureScope::Table, Some(id)),
            "{name}"
        );
        if name == "other" {
            assert!(failure.message.contains("w integer") && failure.message.contains("v text"), "{}", failure.message);
        }
    }
    assert_eq!(server().sql(&db, "SELECT * FROM rows_in"), "1|mine");
    mirror.begin_copy(&table(4, "same", &[1], &["id:int4", "v:text?"]), "r").unwrap();
}

#[test]
fn a_table_that_was_dropped_at_the_destination_has_no_position() {
    let db = database("dropped_there");
    let (mut mirror, _) = open(&db, 1);
    let t = table(1, "t", &[1], &["id:int4"]);
    mirror.begin_copy(&t, "r").unwrap();
    mirror.finish_copy(&t, "r", at(1, 0)).unwrap();
    server().sql(&db, "DROP TABLE t");
    assert_eq!(mirror.attach_table(&t).unwrap(), None);
    let failure = mirror.write_group(&group(1, vec![merged(&t, Some(at(2, 0)), &[&[V("1")]], &[], &[])])).unwrap_err();
    assert_eq!(
        (failure.class, failure.scope, failure.table_id),
        (FailureClass::Permanent, FailureScope::Table, Some(1))
    );
}

#[test]
fn a_connection_cut_before_commit_leaves_nothing_and_the_group_is_written_again() {
    let db = database("cut_before");
    let (mut mirror, faults) = open(&db, 1);
    let t = table(1, "t", &[1], &["id:int4", "v:text?"]);
    mirror.begin_copy(&t, "r").unwrap();
    mirror.finish_copy(&t, "r", at(1_000, 0)).unwrap();
    let rows: Vec<[C; 2]> = (0..80).map(|id: u32| [V(Box::leak(id.to_string().into_boxed_str())), V("x")]).collect();
    let rows: Vec<&[C]> = rows.iter().map(|row| &row[..]).collect();
    let group = group(1, vec![merged(&t, Some(at(1_001, 0)), &rows, &[], &[])]);
    faults.borrow_mut().cut_before = Some("COMMIT\0");
    let failure = mirror.write_group(&group).unwrap_err();
    assert_eq!(
        (failure.class, failure.scope, failure.code.as_str()),
        (FailureClass::Transient, FailureScope::Destination, "postgres.connection")
    );
    assert_eq!(server().sql(&db, "SELECT count(*) FROM t"), "0");
    assert_eq!(mirror.write_group(&group).unwrap().durable, 1);
    assert_eq!(server().sql(&db, "SELECT count(*) FROM t"), "80");
    assert_eq!(faults.borrow().dialled, 2);
}

#[test]
fn a_connection_cut_behind_commit_does_not_write_the_group_twice() {
    let db = database("cut_after");
    let (mut mirror, faults) = open(&db, 1);
    let t = table(1, "t", &[1], &["id:int4", "v:text?"]);
    mirror.begin_copy(&t, "r").unwrap();
    let copy = group(1, vec![copied(&t, "r", "b", &[&[V("1"), V("a")], &[V("2"), V("b")]])]);
    faults.borrow_mut().cut_after = Some("COMMIT\0");
    mirror.write_group(&copy).unwrap_err();
    assert_eq!(server().sql(&db, "SELECT count(*) FROM t"), "2", "it was committed");
    mirror.write_group(&copy).unwrap();
    mirror.finish_copy(&t, "r", at(1_000, 0)).unwrap();
    // A move cannot be repeated: its old row is gone.
    let moves = group(2, vec![merged(&t, Some(at(1_001, 0)), &[&[V("3"), M]], &[(0, &[V("1")])], &[&[V("1")]])]);
    faults.borrow_mut().cut_after = Some("COMMIT\0");
    mirror.write_group(&moves).unwrap_err();
    mirror.write_group(&moves).unwrap();
    assert_eq!(server().sql(&db, "SELECT * FROM t ORDER BY id"), "2|b\n3|a");
}

#[test]
fn a_connection_that_went_while_idle_is_made_again_within_the_call() {
    let db = database("idle_cut");
    let (mut mirror, faults) = open(&db, 1);
    let t = table(1, "t", &[1], &["id:int4"]);
    mirror.begin_copy(&t, "r").unwrap();
    mirror.finish_copy(&t, "r", at(1, 0)).unwrap();
    server().sql(
        "postgres",
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = 'idle_cut' AND pid <> pg_backend_pid()",
    );
    while server().sql("postgres", "SELECT count(*) FROM pg_stat_activity WHERE datname = 'idle_cut'") != "0" {
        std::thread::yield_now();
    }
    mirror.write_group(&group(1, vec![merged(&t, Some(at(2, 0)), &[&[V("1")]], &[], &[])])).unwrap();
    assert_eq!(faults.borrow().dialled, 2);
    assert_eq!(server().sql(&db, "SELECT count(*) FROM t"), "1");
}

#[test]
fn a_lock_that_is_not_given_is_transient() {
    let db = database("locked");
    let native = crate::support::native();
    let settings = postgres::settings::Settings { lock_timeout_ms: 50, ..crate::support::settings(&db) };
    let mut mirror = crate::support::try_open(native, settings, 1).unwrap();
    let t = table(1, "t", &[1], &["id:int4"]);
    mirror.begin_copy(&t, "r").unwrap();
    mirror.finish_copy(&t, "r", at(1, 0)).unwrap();
    let blocker = std::thread::spawn({
        let db = db.clone();
        move || server().sql(&db, "BEGIN; LOCK TABLE t; SELECT pg_sleep(1.5); COMMIT")
    });
    while server()
        .sql(&db, "SELECT count(*) FROM pg_locks WHERE relation = 't'::regclass AND mode = 'AccessExclusiveLock'")
        == "0"
    {
        std::thread::yield_now();
    }
    let write = group(1, vec![merged(&t, Some(at(2, 0)), &[&[V("1")]], &[], &[])]);
    let failure = mirror.write_group(&write).unwrap_err();
    assert_eq!((failure.class, failure.code.as_str()), (FailureClass::Transient, "postgres.lock-timeout"));
    blocker.join().unwrap();
    mirror.write_group(&write).unwrap();
}

#[test]
fn a_table_that_was_not_attached_or_not_copied_is_refused() {
    let db = database("not_attached");
    let (mut mirror, _) = open(&db, 1);
    let t = table(1, "t", &[1], &["id:int4"]);
    let write = || group(1, vec![merged(&t, Some(at(2, 0)), &[&[V("1")]], &[], &[])]);
    assert_eq!(mirror.write_group(&write()).unwrap_err().code, "postgres.contract");
    assert_eq!(mirror.attach_table(&t).unwrap(), None);
    assert_eq!(mirror.write_group(&write()).unwrap_err().code, "resync-needed");
}

#[test]
fn rows_out_of_quarantine_are_written_and_move_no_position() {
    let db = database("out_of_quarantine");
    let (mut mirror, _) = open(&db, 1);
    let t = table(1, "t", &[1], &["id:int4"]);
    mirror.begin_copy(&t, "r").unwrap();
    mirror.finish_copy(&t, "r", at(5, 0)).unwrap();
    mirror.write_group(&group(1, vec![merged(&t, None, &[&[V("1")]], &[], &[])])).unwrap();
    assert_eq!(server().sql(&db, "SELECT id FROM t"), "1");
    assert_eq!(mirror.attach_table(&t).unwrap(), Some(at(5, 0)));
}

#[test]
fn only_a_table_of_ours_is_dropped() {
    let db = database("dropping");
    let (mut mirror, _) = open(&db, 1);
    let t = table(1, "t", &[1], &["id:int4"]);
    mirror.begin_copy(&t, "r").unwrap();
    mirror.drop_table(&t).unwrap();
    mirror.drop_table(&t).unwrap();
    assert_eq!(server().sql(&db, "SELECT to_regclass('t') IS NULL, (SELECT count(*) FROM tidegate.position)"), "t|0");
    server().sql(&db, "CREATE TABLE t (id int)");
    mirror.drop_table(&t).unwrap();
    assert_eq!(server().sql(&db, "SELECT to_regclass('t') IS NOT NULL"), "t");
}
