//! Whatever a guest does, its caller gets an answer, and the next instance works.

use std::time::{Duration, Instant};

use serde_json::json;

use super::*;

fn trap_of<T: std::fmt::Debug>(called: Called<T>) -> String {
    match called {
        Err(CallError::Trap { message }) => message,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_guest_with_data_segments_starts_and_answers() {
    let plugin = hostile().await;
    assert_eq!((plugin.name.as_str(), plugin.manifest.name.as_str()), ("hostile", "hostile"));
    let (mut instance, ready) = open(&options(Grants::default()), json!({})).await;
    ready.unwrap();
    assert_eq!(instance.write_group(&group()).await.unwrap().durable, 3);
    assert!(instance.attach_tables(&[]).await.unwrap().is_empty());
    assert!(instance.memory_peak() > 64 * 1024);
    instance.close().await.unwrap();
    assert!(!instance.is_usable());
}

#[tokio::test]
async fn after_a_trap_the_instance_refuses_and_a_new_one_works() {
    let (mut instance, ready) = open(&options(Grants::default()), json!({"on": "write-group", "do": "trap"})).await;
    ready.unwrap();
    let message = trap_of(instance.write_group(&group()).await);
    assert!(message.contains("`write-group` trapped") && message.contains("unreachable"), "{message}");
    match instance.flush().await {
        Err(CallError::Host(error)) => assert_eq!(error.code(), "plugin.gone"),
        other => panic!("{other:?}"),
    }
    open(&options(Grants::default()), json!({})).await.1.unwrap();
}

#[tokio::test]
async fn a_panic_in_open_says_what_and_where_on_one_line() {
    let (_, ready) =
        open(&options(Grants::default()), json!({"on": "open", "do": "panic", "words": "a\nb\u{1b}[31m"})).await;
    let message = trap_of(ready);
    assert!(message.contains("the guest's last words: a b") && message.contains("lib.rs:"), "{message}");
    assert!(!message.chars().any(char::is_control), "{message:?}");
}

#[tokio::test]
async fn an_exit_is_told_with_its_code() {
    let (_, ready) = open(&options(Grants::default()), json!({"on": "open", "do": "exit"})).await;
    let message = trap_of(ready);
    assert!(message.contains("exit code"), "{message}");
}

#[tokio::test]
async fn an_endless_loop_ends_at_its_limit_and_lets_others_run() {
    for what in ["loop", "loop-in-host", "sleep"] {
        let mut options = options(Grants::default());
        options.limits.open = Duration::from_millis(300);
        let mut instance = hostile().await.instantiate(&options).await.unwrap();
        // One thread: the guest shares it with this counter, and gives way at each tick.
        let turns = std::cell::Cell::new(0_u32);
        let others = async {
            loop {
                turns.set(turns.get() + 1);
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        let start = Instant::now();
        let session = session(json!({"on": "open", "do": what}));
        let called = tokio::select! {
            called = instance.open(&session) => called,
            () = others => unreachable!(),
        };
        match called {
            Err(CallError::Timeout { function: "open", after }) => assert_eq!(after, options.limits.open),
            other => panic!("{what}: {other:?}"),
        }
        assert!(start.elapsed() < Duration::from_secs(5), "{what}: {:?}", start.elapsed());
        assert!(!instance.is_usable());
        assert!(turns.get() >= 5, "{what}: {}", turns.get());
    }
}

#[tokio::test]
async fn working_restarts_the_idle_limit_but_not_the_hard_one() {
    let mut options = options(Grants::default());
    options.limits.call_idle = Duration::from_millis(700);
    let busy = json!({"on": "tick", "do": "work"});
    let (mut instance, _) = open(&options, busy.clone()).await;
    instance.tick().await.unwrap();
    options.limits.call_hard = Duration::from_millis(1000);
    let (mut instance, _) = open(&options, busy).await;
    match instance.tick().await {
        Err(CallError::Timeout { function: "tick", after }) => assert_eq!(after, options.limits.call_hard),
        other => panic!("{other:?}"),
    }
    let (mut instance, _) = open(&options, json!({"on": "tick", "do": "sleep"})).await;
    match instance.tick().await {
        Err(CallError::Timeout { after, .. }) => assert_eq!(after, options.limits.call_idle),
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_memory_bomb_meets_its_limit() {
    let mut options = options(Grants::default());
    options.limits.memory_bytes = 64 << 20;
    let (instance, ready) = open(&options, json!({"on": "open", "do": "memory"})).await;
    let message = trap_of(ready);
    assert!(message.contains("memory limit of 64 MiB"), "{message}");
    assert!(instance.memory_peak() <= 64 << 20);
}

#[tokio::test]
async fn a_stack_overflow_is_a_trap() {
    let (_, ready) = open(&options(Grants::default()), json!({"on": "open", "do": "stack"})).await;
    trap_of(ready);
}

#[tokio::test]
async fn a_failure_of_4_mb_is_cut_and_its_code_cleaned() {
    let (code, message) = told(&options(Grants::default()), json!({"on": "open", "do": "long-message"})).await;
    assert!(message.len() < 9 * 1024);
    assert!(!code.chars().any(char::is_control), "{code:?}");
}

#[tokio::test]
async fn an_answer_that_the_contract_rules_out_ends_the_instance() {
    let (mut instance, _) = open(&options(Grants::default()), json!({"on": "attach-tables", "do": "lie"})).await;
    let table = wire::Table {
        id: 1,
        source: wire::TableName { schema: "public".into(), name: "t".into() },
        target: wire::TableName { schema: "public".into(), name: "t".into() },
        snapshot: wire::SnapshotId { commit: 1, message: 0 },
        shape: String::new(),
        mode: "changes".into(),
        key: Vec::new(),
        columns: Vec::new(),
        settings: "{}".into(),
        details: Vec::new(),
    };
    let message = trap_of(instance.attach_tables(&[table]).await);
    assert!(message.contains("0 positions for 1 tables"), "{message}");
    assert!(!instance.is_usable());
}

#[tokio::test]
async fn a_call_that_is_abandoned_leaves_an_instance_that_is_gone() {
    let (mut instance, _) = open(&options(Grants::default()), json!({"on": "tick", "do": "loop"})).await;
    let abandoned = tokio::time::timeout(Duration::from_millis(50), instance.tick()).await;
    assert!(abandoned.is_err());
    match instance.flush().await {
        Err(CallError::Host(error)) => assert_eq!(error.code(), "plugin.gone"),
        other => panic!("{other:?}"),
    }
}
