//! Components that were written by hand: what no compiler of a guest makes.

use std::time::Duration;

use wasmtime::component::Component;

use super::*;
use crate::plugin::instance::{State, new_store};

/// Runs the function `run` of a component, if it has one, under these limits.
async fn run(text: &str, options: &InstanceOptions) -> Result<u32, String> {
    let engine = engine();
    let (engine, linker) = engine.parts();
    let component = Component::new(engine, wat::parse_str(text).unwrap()).map_err(|e| format!("{e:#}"))?;
    let (state, _) = State::new("by-hand", options).unwrap();
    let mut store = new_store(engine, state);
    let work = async {
        let instance = linker.instantiate_async(&mut store, &component).await?;
        match instance.get_typed_func::<(), (u32,)>(&mut store, "run") {
            Ok(run) => Ok(run.call_async(&mut store, ()).await?.0),
            Err(_) => Ok(0),
        }
    };
    match tokio::time::timeout(Duration::from_secs(2), work).await {
        Ok(done) => done.map_err(|e: wasmtime::Error| format!("{e:#}")),
        Err(_) => Err("it did not end by itself".to_owned()),
    }
}

fn component(core: &str) -> String {
    format!(
        "(component (core module $m {core}) (core instance $i (instantiate $m))
            (func (export \"run\") (result u32) (canon lift (core func $i \"run\"))))"
    )
}

/// What `table.grow` answers, after another table has taken `first`.
fn two_tables(first: u32, grow: u32) -> String {
    component(&format!(
        "(table {first} funcref) (table $t 0 funcref)
         (func (export \"run\") (result i32) (table.grow $t (ref.null func) (i32.const {grow})))"
    ))
}

#[tokio::test]
async fn the_elements_of_all_tables_together_are_bounded() {
    let options = options(Grants::default());
    assert_eq!(run(&two_tables(60_000, 40_000), &options).await, Ok(0));
    assert_eq!(run(&two_tables(60_000, 40_001), &options).await, Ok(u32::MAX), "it grows no more");
    let why = run(&two_tables(100_001, 0), &options).await.unwrap_err();
    assert!(why.contains("table minimum size"), "{why}");
}

#[tokio::test]
async fn tables_memories_and_instances_are_bounded() {
    let mut options = options(Grants::default());
    options.limits.tables = 3;
    options.limits.memories = 2;
    options.limits.core_instances = 4;
    let run_is = "(func (export \"run\") (result i32) (i32.const 7))";
    let many = |what: &str, count: usize| component(&format!("{} {run_is}", what.repeat(count)));
    assert_eq!(run(&many("(table 1 funcref)", 3), &options).await, Ok(7));
    let why = run(&many("(table 1 funcref)", 4), &options).await.unwrap_err();
    assert!(why.contains("table"), "{why}");
    // Of a component, for a module has one memory.
    let memories = |count: usize| {
        format!("(component (core module $m (memory 1)) {})", "(core instance (instantiate $m))".repeat(count))
    };
    assert_eq!(run(&memories(2), &options).await, Ok(0));
    let why = run(&memories(3), &options).await.unwrap_err();
    assert!(why.contains("memor"), "{why}");
    let instances =
        |count: usize| format!("(component (core module $m) {})", "(core instance (instantiate $m))".repeat(count));
    assert_eq!(run(&instances(4), &options).await, Ok(0));
    let why = run(&instances(5), &options).await.unwrap_err();
    assert!(why.contains("instance"), "{why}");
}

#[tokio::test]
async fn memory_that_is_asked_for_at_the_start_counts_as_well() {
    let mut options = options(Grants::default());
    options.limits.memory_bytes = 1 << 20;
    let with = |pages: u32| component(&format!("(memory {pages}) (func (export \"run\") (result i32) (i32.const 1))"));
    assert_eq!(run(&with(16), &options).await, Ok(1));
    let why = run(&with(17), &options).await.unwrap_err();
    assert!(why.contains("memory minimum size"), "{why}");
}

#[tokio::test]
async fn a_loop_at_the_start_gives_way_although_nothing_was_called_yet() {
    let text = "(component (core module $m (memory 1) (data (i32.const 0) \"a data segment\")
                    (func $loop (loop $l (br $l))) (start $loop)) (core instance (instantiate $m)))";
    let why = run(text, &options(Grants::default())).await.unwrap_err();
    assert_eq!(why, "it did not end by itself");
}

#[tokio::test]
async fn random_bytes_of_one_call_are_bounded() {
    // The guest has room for them: what it lacks is the permission.
    let random = |bytes: u32| {
        format!(
            "(component
                (import \"wasi:random/random@0.2.0\" (instance $r
                    (export \"get-random-bytes\" (func (param \"len\" u64) (result (list u8))))))
                (core module $room (memory (export \"m\") 8)
                    (func (export \"realloc\") (param i32 i32 i32 i32) (result i32) (i32.const 1024)))
                (core instance $room (instantiate $room))
                (core func $get (canon lower (func $r \"get-random-bytes\")
                    (memory (core memory $room \"m\")) (realloc (core func $room \"realloc\"))))
                (core module $m (import \"\" \"get\" (func $get (param i64 i32)))
                    (func (export \"run\") (result i32) (call $get (i64.const {bytes}) (i32.const 8)) (i32.const {bytes})))
                (core instance $i (instantiate $m (with \"\" (instance (export \"get\" (func $get))))))
                (func (export \"run\") (result u32) (canon lift (core func $i \"run\"))))"
        )
    };
    let options = options(Grants::default());
    assert_eq!(run(&random(65_536), &options).await, Ok(65_536));
    let why = run(&random(65_537), &options).await.unwrap_err();
    assert!(why.contains("random") || why.contains("65"), "{why}");
}

/// The outside of a plugin, and nothing behind it.
fn exporting(interface: &str, imports: &str) -> Vec<u8> {
    wat::parse_str(format!(
        "(component {imports} (core module $m (func (export \"close\"))) (core instance $i (instantiate $m))
            (func $close (canon lift (core func $i \"close\")))
            (instance $p (export \"close\" (func $close)))
            (export \"{interface}\" (instance $p)))"
    ))
    .unwrap()
}

#[tokio::test]
async fn the_version_is_read_before_anything_is_compiled() {
    let directory = tempfile::tempdir().unwrap();
    let engine = PluginEngine::new(EngineOptions::new(directory.path().join("code"))).unwrap();
    let file = directory.path().join("p.wasm");
    let host = |version: &str| format!("(import \"tidegate:destination/host@{version}\" (instance))");
    for (interface, imports, code, said) in [
        ("tidegate:destination/plugin@0.2.0", String::new(), "plugin.version", "version 0.2.0"),
        ("tidegate:destination/plugin@1.0.0", String::new(), "plugin.version", "version 1.0.0"),
        ("tidegate:destination/plugin@0.1.0", host("0.3.0"), "plugin.version", "version 0.3.0"),
        ("tidegate:destination/plugin", String::new(), "plugin.missing-export", "another world"),
        ("tidegate:source/plugin@0.1.0", String::new(), "plugin.missing-export", "tidegate:source/plugin@0.1.0"),
        (
            "tidegate:destination/plugin@0.1.0",
            "(import \"wasi:http/outgoing-handler@0.2.0\" (instance))".to_owned(),
            "plugin.extra-import",
            "wasi:http/outgoing-handler",
        ),
        (
            "tidegate:destination/plugin@0.1.0",
            "(import \"wasi:cli/environment@0.3.0\" (instance))".to_owned(),
            "plugin.extra-import",
            "wasi:cli/environment@0.3.0",
        ),
        (
            "tidegate:destination/plugin@0.1.0",
            "(import \"tidegate:destination/secrets@0.1.0\" (instance))".to_owned(),
            "plugin.extra-import",
            "tidegate:destination/secrets",
        ),
    ] {
        std::fs::write(&file, exporting(interface, &imports)).unwrap();
        let error = engine.load(&file).await.map(drop).unwrap_err();
        assert_eq!(error.code(), code, "{interface} {imports}: {}", error.report());
        assert!(error.message().contains(said), "{}", error.report());
        if code == "plugin.version" {
            assert!(error.message().contains("this host speaks 0.1.0"), "{}", error.report());
        }
    }
    assert_eq!(engine.stats(), EngineStats::default(), "nothing was compiled");
    // The right name, and not what belongs behind it.
    std::fs::write(&file, exporting("tidegate:destination/plugin@0.1.0", "")).unwrap();
    let error = engine.load(&file).await.map(drop).unwrap_err();
    assert_eq!(error.code(), "plugin.incompatible", "{}", error.report());
}
