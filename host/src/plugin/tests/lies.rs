//! Answers that cannot be true end the instance, with a code of their own.

use serde_json::json;

use super::*;

/// A group of one batch with so many rows.
fn rows(ticket: u64, count: u32) -> wire::Group {
    let data = wire::ColumnData::Plain(wire::Cells::Int32((0..count as i32).collect()));
    let column = wire::ColumnValues { ordinal: 1, validity: None, missing: None, odd: Vec::new(), data };
    let rows = wire::Rows { count, columns: vec![column] };
    let as_of = wire::Position { epoch: 0, commit: 1, ordinal: 0 };
    let copy = wire::CopyRows { run: "r".into(), batch_id: ticket.to_string(), as_of, rows };
    let batch = wire::Batch {
        table_id: 1,
        snapshot: wire::SnapshotId { commit: 1, message: 0 },
        through: None,
        content: wire::Content::Copy(copy),
    };
    wire::Group { ticket, whole: true, batches: vec![batch], details: Vec::new() }
}

#[tokio::test]
async fn an_answer_about_groups_or_rows_that_were_never_given_ends_the_instance() {
    for (lie, said) in [
        ("ack-ahead", "ticket 18446744073709551615 is durable; the last it was given is 5"),
        ("refuse-ticket", "a row of ticket 1005, which is not under way"),
        ("refuse-batch", "batch 4294967295 of ticket 5, which has 1"),
        ("refuse-row", "row 4294967295 of batch 0 of ticket 5, which has 3 rows"),
        ("refuse-twice", "row 0 of batch 0 of ticket 5 twice"),
        ("refuse-many", "row 3 of batch 0 of ticket 5, which has 3 rows"),
    ] {
        let options = options(Grants::default());
        let (mut instance, _) = open(&options, json!({"on": "write-group", "do": lie})).await;
        let called = instance.write_group(&rows(5, 3)).await;
        assert_eq!(called.as_ref().unwrap_err().code(), "plugin.broken-answer", "{lie}");
        let message = lie_of(called);
        assert!(message.starts_with("`write-group` broke the contract: ") && message.contains(said), "{message}");
        assert!(!instance.is_usable(), "{lie}");
        assert_eq!(options.usage.snapshot().broken_answers, 1, "{lie}");
    }
}

#[tokio::test]
async fn rows_may_be_refused_of_every_group_under_way_and_of_no_other() {
    let (mut instance, _) = open(&options(Grants::default()), json!({"late": true})).await;
    for ticket in 1..=3 {
        assert_eq!(instance.write_group(&rows(ticket, 3)).await.unwrap().durable, 0);
    }
    assert_eq!(instance.flush().await.unwrap().durable, 3);
    assert_eq!(instance.tick().await.unwrap().durable, 3);
}

#[tokio::test]
async fn rows_and_bytes_that_were_given_are_counted() {
    let options = options(Grants::default());
    let (mut instance, _) = open(&options, json!({})).await;
    instance.write_group(&rows(1, 300)).await.unwrap();
    let usage = options.usage.snapshot();
    assert_eq!(usage.rows, 300);
    assert!(usage.bytes >= 1200, "{usage:?}");
}

#[tokio::test]
async fn positions_of_another_number_of_tables_end_the_instance() {
    for (lie, said) in [("too-few", "0 positions for 1 tables"), ("too-many", "1000000 positions for 1 tables")] {
        let (mut instance, _) = open(&options(Grants::default()), json!({"on": "positions", "do": lie})).await;
        let message = lie_of(instance.attach_tables(&[table()]).await);
        assert!(message.contains(said), "{message}");
        assert!(!instance.is_usable());
    }
}

#[tokio::test]
async fn lists_and_names_that_nobody_can_use_end_the_instance() {
    let physical = |what: &str| json!({"physical": "render-table", "as": what});
    for (settings, said) in [
        (physical("many-columns"), "100000 columns"),
        (physical("long-name"), "4194304 bytes"),
        (physical("long-path"), "1000000 parts"),
    ] {
        let (mut instance, _) = open(&options(Grants::default()), settings).await;
        let message = lie_of(instance.render_table(&table()).await);
        assert!(message.contains(said), "{message}");
    }
    let (_, ready) = open(&options(Grants::default()), json!({"on": "ready", "do": "many"})).await;
    assert!(lie_of(ready).contains("1000000 limits"));
    let (mut instance, _) = open(&options(Grants::default()), json!({"on": "notices", "do": "many"})).await;
    assert!(lie_of(instance.preflight(&[table()]).await).contains("100000 notices"));
}

#[tokio::test]
async fn escape_codes_in_names_are_spelled_out() {
    let (mut instance, _) =
        open(&options(Grants::default()), json!({"physical": "inspect-table", "as": "escape-codes"})).await;
    let there = instance.inspect_table(&table()).await.unwrap().unwrap();
    assert_eq!(there.columns[0].name, "a\\u{1b}[2J\\u{a}b\\u{202e}");
}
