//! Copies and merges: what the rows become.

use tidegate_sdk::model::{FailureScope, Table};

use crate::support::rows::*;
use crate::support::{Native, database, open, server};
use postgres::mirror::Mirror;

/// A mirror with the table copied: rows 1 to `rows`, `v<id>` and `big<id>`.
fn copied_table(db: &str, rows: u32) -> (Mirror<Native>, Table) {
    let (mut mirror, _) = open(db, 1);
    let t = table(1, "t", &[1], &["id:int4", "v:text?", "big:text?"]);
    mirror.begin_copy(&t, "r").unwrap();
    server().sql(db, &format!("INSERT INTO t SELECT n, 'v' || n, 'big' || n FROM generate_series(1, {rows}) n"));
    mirror.finish_copy(&t, "r", at(1_000, 0)).unwrap();
    (mirror, t)
}

fn content(db: &str) -> String {
    server().sql(db, "SELECT id, coalesce(v, 'null'), coalesce(big, 'null') FROM t ORDER BY id")
}

/// Runs a case with few rows, and again with so many others that it goes by the
/// staging table. The others have ids from 1,000 on.
fn both_ways(name: &str, rows: u32, case: impl Fn(&mut Mirror<Native>, &Table, &[&[C]])) -> String {
    let filler: Vec<[C; 3]> =
        (1_000..1_100).map(|id: u32| [V(Box::leak(id.to_string().into_boxed_str())), V("f"), N]).collect();
    let filler: Vec<&[C]> = filler.iter().map(|row| &row[..]).collect();
    let mut found = Vec::new();
    for (way, extra) in [("few", &[][..]), ("many", &filler[..])] {
        let db = database(&format!("{name}_{way}"));
        let (mut mirror, t) = copied_table(&db, rows);
        case(&mut mirror, &t, extra);
        assert_eq!(server().sql(&db, "SELECT count(*) FROM t WHERE id >= 1000"), extra.len().to_string());
        found.push(
            server()
                .sql(&db, "SELECT id, coalesce(v, 'null'), coalesce(big, 'null') FROM t WHERE id < 1000 ORDER BY id"),
        );
    }
    assert_eq!(found[0], found[1]);
    found.remove(0)
}

fn write(
    mirror: &mut Mirror<Native>,
    t: &Table,
    upserts: &[&[C]],
    extra: &[&[C]],
    moved: &[(u32, &[C])],
    deletes: &[&[C]],
) {
    let upserts: Vec<&[C]> = upserts.iter().chain(extra).copied().collect();
    let ack = mirror.write_group(&group(1, vec![merged(t, Some(at(2_000, 0)), &upserts, moved, deletes)])).unwrap();
    assert_eq!((ack.durable, ack.refused.len()), (1, 0));
}

#[test]
fn inserts_updates_and_deletes_end_as_the_batch_says() {
    let after = both_ways("every_op", 3, |mirror, t, extra| {
        write(mirror, t, &[&[V("2"), V("new"), N], &[V("4"), N, V("b")]], extra, &[], &[&[V("1")], &[V("77")]]);
    });
    assert_eq!(after, "2|new|null\n3|v3|big3\n4|null|b");
}

#[test]
fn a_missing_cell_keeps_its_value() {
    let after = both_ways("missing", 2, |mirror, t, extra| {
        write(mirror, t, &[&[V("1"), V("x"), M], &[V("2"), M, N]], extra, &[], &[]);
    });
    assert_eq!(after, "1|x|big1\n2|v2|null");
}

#[test]
fn a_row_of_which_only_the_key_was_sent_stays() {
    let after = both_ways("key_only", 1, |mirror, t, extra| write(mirror, t, &[&[V("1"), M, M]], extra, &[], &[]));
    assert_eq!(after, "1|v1|big1");
}

#[test]
fn a_moved_row_takes_its_missing_cells_along() {
    let after = both_ways("moved", 2, |mirror, t, extra| {
        write(mirror, t, &[&[V("9"), V("m"), M]], extra, &[(0, &[V("1")])], &[&[V("1")]]);
    });
    assert_eq!(after, "2|v2|big2\n9|m|big1");
}

#[test]
fn two_rows_that_swap_their_keys_swap_their_missing_cells() {
    let after = both_ways("swap", 2, |mirror, t, extra| {
        write(
            mirror,
            t,
            &[&[V("2"), V("one"), M], &[V("1"), V("two"), M]],
            extra,
            &[(0, &[V("1")]), (1, &[V("2")])],
            &[],
        );
    });
    assert_eq!(after, "1|two|big2\n2|one|big1");
}

#[test]
fn a_chain_of_key_changes_reads_every_row_where_it_was() {
    let after = both_ways("chain", 3, |mirror, t, extra| {
        let moved: &[(u32, &[C])] = &[(0, &[V("1")]), (1, &[V("2")]), (2, &[V("3")])];
        write(mirror, t, &[&[V("2"), M, M], &[V("3"), V("x"), M], &[V("4"), M, N]], extra, moved, &[&[V("1")]]);
    });
    assert_eq!(after, "2|v1|big1\n3|x|big2\n4|v3|null");
}

#[test]
fn a_new_row_under_a_key_that_moved_away_inherits_nothing() {
    let after = both_ways("not_inherited", 1, |mirror, t, extra| {
        write(mirror, t, &[&[V("1"), V("fresh"), N], &[V("2"), M, M]], extra, &[(1, &[V("1")])], &[]);
    });
    assert_eq!(after, "1|fresh|null\n2|v1|big1");
}

#[test]
fn a_missing_cell_without_its_row_is_refused_with_the_row_named() {
    for (name, extra) in [("row_missing_few", 0), ("row_missing_many", 100)] {
        let db = database(name);
        let (mut mirror, t) = copied_table(&db, 2);
        let mut upserts: Vec<[C; 3]> = vec![[V("1"), V("x"), M], [V("50"), V("y"), M]];
        upserts.extend((0..extra).map(|id: u32| [V(Box::leak((id + 1_000).to_string().into_boxed_str())), N, N]));
        let upserts: Vec<&[C]> = upserts.iter().map(|row| &row[..]).collect();
        let failure =
            mirror.write_group(&group(7, vec![merged(&t, Some(at(2_000, 0)), &upserts, &[], &[])])).unwrap_err();
        assert_eq!((failure.code.as_str(), failure.scope), ("row-missing", FailureScope::Row));
        let named: Vec<(u64, u32, u32)> = failure.rows.iter().map(|row| (row.ticket, row.batch, row.row)).collect();
        assert_eq!(named, [(7, 0, 1)]);
        assert_eq!(content(&db), "1|v1|big1\n2|v2|big2", "nothing of a failed group is written");
        // Without the culprit it goes through.
        let rest: Vec<&[C]> =
            upserts.iter().enumerate().filter(|(index, _)| *index != 1).map(|(_, row)| *row).collect();
        mirror.write_group(&group(7, vec![merged(&t, Some(at(2_000, 0)), &rest, &[], &[])])).unwrap();
    }
}

#[test]
fn a_moved_row_whose_old_row_is_gone_is_refused_with_the_row_named() {
    let db = database("moved_gone");
    let (mut mirror, t) = copied_table(&db, 2);
    let upserts: &[&[C]] = &[&[V("8"), V("x"), M], &[V("9"), V("y"), M]];
    let moved: &[(u32, &[C])] = &[(0, &[V("1")]), (1, &[V("50")])];
    let failure = mirror.write_group(&group(1, vec![merged(&t, None, upserts, moved, &[&[V("1")]])])).unwrap_err();
    assert_eq!(failure.code, "row-missing");
    assert_eq!(failure.rows.iter().map(|row| row.row).collect::<Vec<_>>(), [1]);
}

#[test]
fn a_key_of_two_columns_names_rows() {
    for (name, extra) in [("two_keys_few", 0), ("two_keys_many", 60)] {
        let db = database(name);
        let (mut mirror, _) = open(&db, 1);
        let t = table(1, "t", &[3, 1], &["a:int4", "v:text?", "b:text"]);
        mirror.begin_copy(&t, "r").unwrap();
        server().sql(&db, "INSERT INTO t VALUES (1, 'x', 'p'), (1, 'y', 'q'), (2, 'z', 'p')");
        mirror.finish_copy(&t, "r", at(1, 0)).unwrap();
        let mut upserts: Vec<[C; 3]> = vec![[V("1"), V("new"), V("q")], [V("3"), M, V("p")]];
        upserts.extend((0..extra).map(|id: u32| [V(Box::leak((id + 100).to_string().into_boxed_str())), N, V("f")]));
        let upserts: Vec<&[C]> = upserts.iter().map(|row| &row[..]).collect();
        let batch =
            merged(&t, Some(at(2, 0)), &upserts, &[(1, &[V("2"), V("p")])], &[&[V("2"), V("p")], &[V("1"), V("p")]]);
        mirror.write_group(&group(1, vec![batch])).unwrap();
        assert_eq!(server().sql(&db, "SELECT a, v, b FROM t WHERE b <> 'f' ORDER BY b, a"), "3|z|p\n1|new|q");
        assert_eq!(
            server().sql(&db, "SELECT pg_get_constraintdef(oid) FROM pg_constraint WHERE conrelid = 't'::regclass"),
            "PRIMARY KEY (b, a)"
        );
    }
}

#[test]
fn a_table_of_key_columns_only_takes_a_row_that_is_there() {
    let db = database("key_columns_only");
    let (mut mirror, _) = open(&db, 1);
    let t = table(1, "t", &[1], &["id:int4"]);
    mirror.begin_copy(&t, "r").unwrap();
    mirror.finish_copy(&t, "r", at(1, 0)).unwrap();
    mirror.write_group(&group(1, vec![merged(&t, Some(at(2, 0)), &[&[V("1")]], &[], &[])])).unwrap();
    mirror.write_group(&group(2, vec![merged(&t, Some(at(3, 0)), &[&[V("1")], &[V("2")]], &[], &[])])).unwrap();
    assert_eq!(server().sql(&db, "SELECT count(*) FROM t"), "2");
}

#[test]
fn a_truncation_stands_between_the_rows_before_and_after_it() {
    let db = database("truncation");
    let (mut mirror, t) = copied_table(&db, 3);
    let batches = vec![
        merged(&t, Some(at(1_001, 0)), &[&[V("4"), N, N]], &[], &[]),
        truncated(&t, at(1_002, 0)),
        merged(&t, Some(at(1_003, 0)), &[&[V("5"), N, N]], &[], &[]),
    ];
    mirror.write_group(&group(1, batches)).unwrap();
    assert_eq!(content(&db), "5|null|null");
    assert_eq!(mirror.attach_table(&t).unwrap(), Some(at(1_003, 0)));
}

#[test]
fn two_staged_batches_of_a_table_in_one_group_do_not_mix() {
    let db = database("two_staged");
    let (mut mirror, t) = copied_table(&db, 0);
    let ids = |from: u32| {
        (from..from + 60).map(|id| [V(Box::leak(id.to_string().into_boxed_str())), N, N]).collect::<Vec<[C; 3]>>()
    };
    let (first, second) = (ids(0), ids(100));
    let first: Vec<&[C]> = first.iter().map(|row| &row[..]).collect();
    let second: Vec<&[C]> = second.iter().map(|row| &row[..]).collect();
    let gone: Vec<&[C]> = first.iter().map(|row| &row[..1]).collect();
    let batches =
        vec![merged(&t, Some(at(1_001, 0)), &first, &[], &[]), merged(&t, Some(at(1_002, 0)), &second, &[], &gone)];
    mirror.write_group(&group(1, batches)).unwrap();
    assert_eq!(server().sql(&db, "SELECT count(*), min(id) FROM t"), "60|100");
    // And once more in the next transaction, with the staging table that is there now.
    mirror.write_group(&group(2, vec![merged(&t, Some(at(1_003, 0)), &first, &[], &[])])).unwrap();
    assert_eq!(server().sql(&db, "SELECT count(*) FROM t"), "120");
}

#[test]
fn a_group_writes_its_tables_together_or_not_at_all() {
    let db = database("together");
    let (mut mirror, t) = copied_table(&db, 1);
    let u = table(2, "u", &[1], &["id:int4", "small:int2?"]);
    mirror.begin_copy(&u, "r").unwrap();
    mirror.finish_copy(&u, "r", at(1, 0)).unwrap();
    server().sql(&db, "ALTER TABLE u ADD CHECK (small < 10)");
    let batches = |small| {
        vec![
            merged(&t, Some(at(2_000, 0)), &[&[V("2"), N, N]], &[], &[]),
            merged(&u, Some(at(2_000, 1)), &[&[V("1"), V(small)]], &[], &[]),
        ]
    };
    let failure = mirror.write_group(&group(1, batches("10"))).unwrap_err();
    assert_eq!((failure.code.as_str(), failure.scope), ("postgres.constraint", FailureScope::Row));
    assert_eq!(failure.rows.iter().map(|row| (row.batch, row.row)).collect::<Vec<_>>(), [(1, 0)]);
    assert_eq!(content(&db), "1|v1|big1");
    assert_eq!(mirror.attach_table(&t).unwrap(), Some(at(1_000, 0)));
    mirror.write_group(&group(1, batches("9"))).unwrap();
    assert_eq!(server().sql(&db, "SELECT (SELECT count(*) FROM t), (SELECT count(*) FROM u)"), "2|1");
}

#[test]
fn a_line_of_a_copy_that_the_destination_refuses_is_named() {
    let db = database("copy_line");
    let (mut mirror, _) = open(&db, 1);
    let t = table(1, "t", &[1], &["id:int4", "n:numeric?"]);
    mirror.begin_copy(&t, "r").unwrap();
    server().sql(&db, "ALTER TABLE t ALTER n TYPE numeric(3,1)");
    let batch = copied(&t, "r", "b", &[&[V("1"), V("1.5")], &[V("2"), V("1234.5")]]);
    let failure = mirror.write_group(&group(3, vec![batch])).unwrap_err();
    assert_eq!((failure.code.as_str(), failure.scope), ("postgres.value", FailureScope::Row));
    assert_eq!(failure.rows.iter().map(|row| (row.ticket, row.batch, row.row)).collect::<Vec<_>>(), [(3, 0, 1)]);
    assert_eq!(server().sql(&db, "SELECT count(*) FROM t"), "0");
}
