//! Whatever a guest does, its caller gets an answer, and the next instance works.

use std::time::{Duration, Instant};

use serde_json::json;

use super::*;

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
    assert!(message.contains("the guest's last words: a b") && message.contains("misbehave.rs:"), "{message}");
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
        assert!(turns.get() >= 2, "{what}: {}", turns.get());
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
    let usage = options.usage.snapshot();
    assert_eq!((usage.traps, usage.memory_peak_bytes), (1, instance.memory_peak() as u64));
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
async fn a_call_that_is_abandoned_leaves_an_instance_that_is_gone() {
    let (mut instance, _) = open(&options(Grants::default()), json!({"on": "tick", "do": "loop"})).await;
    let abandoned = tokio::time::timeout(Duration::from_millis(50), instance.tick()).await;
    assert!(abandoned.is_err());
    match instance.flush().await {
        Err(CallError::Host(error)) => assert_eq!(error.code(), "plugin.gone"),
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_trap_on_the_second_call_leaves_the_first_as_it_was() {
    let settings = json!({"on": "write-group", "do": "trap", "from": 2});
    let (mut instance, _) = open(&options(Grants::default()), settings).await;
    assert_eq!(instance.write_group(&group()).await.unwrap().durable, 3);
    trap_of(instance.write_group(&wire::Group { ticket: 4, ..group() }).await);
}

#[tokio::test]
async fn what_a_guest_hands_over_in_one_call_is_bounded() {
    let mut options = options(Grants::default());
    options.limits.hostcall_bytes = 1 << 20;
    open(&options, json!({"on": "open", "do": "emit-bytes", "bytes": 1 << 19})).await.1.unwrap();
    let message = trap_of(open(&options, json!({"on": "open", "do": "emit-bytes", "bytes": 1 << 21})).await.1);
    assert!(message.contains("too much data") || message.contains("fuel"), "{message}");
    // An answer counts as well.
    let message = trap_of(open(&options, json!({"on": "open", "do": "long-message"})).await.1);
    assert!(message.contains("`open` trapped"), "{message}");
}

#[tokio::test]
async fn files_that_are_open_at_a_time_are_bounded() {
    let directory = tempfile::tempdir().unwrap();
    let grant = FileGrant { path: directory.path().into(), guest: "/d".into(), write: true };
    let mut options = options(Grants { files: vec![grant], ..Grants::default() });
    options.limits.handles = 40;
    let before = open_files();
    let message = match open(&options, json!({"on": "open", "do": "open-files", "path": "/d"})).await.1 {
        Err(CallError::Failure(failure)) => failure.message,
        other => trap_of(other),
    };
    let made = std::fs::read_dir(directory.path()).unwrap().count();
    assert!((1..=40).contains(&made), "{made} files: {message}");
    // Other tests of this process open files too.
    wait_until(|| open_files() < before + made).await;
}

/// Files of this process.
fn open_files() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

async fn wait_until(condition: impl Fn() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < Duration::from_secs(10));
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test]
async fn a_plugin_that_asks_for_time_at_once_gets_it_a_little_later() {
    let (mut instance, _) = open(&options(Grants::default()), json!({"wake": 0})).await;
    assert_eq!(instance.write_group(&group()).await.unwrap().wake_after_ms, Some(10));
    assert_eq!(instance.tick().await.unwrap().wake_after_ms, Some(10));
}

#[tokio::test]
async fn what_a_plugin_used_is_counted() {
    let options = options(Grants::default());
    open(&options, json!({"on": "open", "do": "trap"})).await.1.unwrap_err();
    let (mut instance, _) = open(&options, json!({"on": "flush", "do": "ack-nothing"})).await;
    instance.write_group(&group()).await.unwrap();
    instance.flush().await.unwrap_err();
    let usage = options.usage.snapshot();
    assert_eq!((usage.traps, usage.failures, usage.restarts), (1, 1, 1));
    let calls: Vec<_> = usage.functions.iter().map(|(name, function)| (name.as_str(), function.calls)).collect();
    assert_eq!(calls, [("flush", 1), ("instantiate", 2), ("open", 2), ("write-group", 1)]);
    assert_eq!(usage.calls, 6);
    assert!(usage.seconds > 0.0);
}
