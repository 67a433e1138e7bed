//! The engine against guests that misbehave, each built from source.

mod cache;
mod describe;
mod files;
mod host;
mod lies;
mod limits;
mod network;
mod outside;
mod rounds;

use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use serde_json::Value;

use super::bindings::wire;
use super::*;

/// The fixture `hostile`, built once.
fn hostile_file() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/plugins/hostile");
        let out = build::guest_target_dir().join("fixtures");
        build::build(&fixture, &out, &build::BuildOptions { quiet: true, ..Default::default() }).unwrap()
    })
}

/// The fixture with another mark: what it does at the start and in `describe`.
fn marked(mark: &Value) -> Vec<u8> {
    const PLACE: &[u8] = b"hostile-mark:{}";
    let mut bytes = std::fs::read(hostile_file()).unwrap();
    let at = bytes.windows(PLACE.len()).position(|part| part == PLACE).unwrap() + PLACE.len() - 2;
    let mark = mark.to_string();
    assert!(mark.len() < 2000, "the mark is too long");
    bytes[at..at + mark.len()].copy_from_slice(mark.as_bytes());
    bytes
}

/// Loads the fixture with another mark.
async fn load_marked(mark: Value) -> crate::error::Result<Arc<Plugin>> {
    let bytes = tokio::task::spawn_blocking(move || marked(&mark)).await.unwrap();
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("marked.wasm");
    std::fs::write(&file, bytes).unwrap();
    engine().load(&file).await
}

fn trap_of<T: std::fmt::Debug>(called: Called<T>) -> String {
    match called {
        Err(CallError::Trap { message }) => message,
        other => panic!("{other:?}"),
    }
}

fn lie_of<T: std::fmt::Debug>(called: Called<T>) -> String {
    match called {
        Err(CallError::Broken { message }) => message,
        other => panic!("{other:?}"),
    }
}

fn table() -> wire::Table {
    let name = || wire::TableName { schema: "public".into(), name: "t".into() };
    wire::Table {
        id: 1,
        source: name(),
        target: name(),
        snapshot: wire::SnapshotId { commit: 1, message: 0 },
        shape: String::new(),
        mode: "changes".into(),
        key: Vec::new(),
        columns: Vec::new(),
        settings: "{}".into(),
        details: Vec::new(),
    }
}

/// One engine and its cache for all tests of this process.
fn engine() -> PluginEngine {
    static ENGINE: OnceLock<(PluginEngine, tempfile::TempDir)> = OnceLock::new();
    let make = || {
        let cache = tempfile::tempdir().unwrap();
        (PluginEngine::new(EngineOptions::new(cache.path().join("code"))).unwrap(), cache)
    };
    ENGINE.get_or_init(make).0.clone()
}

async fn hostile() -> Arc<Plugin> {
    // Guests are built by a process that blocks.
    let file = tokio::task::spawn_blocking(hostile_file).await.unwrap();
    engine().load(file).await.unwrap()
}

fn options(grants: Grants) -> InstanceOptions {
    InstanceOptions::new("lake", Arc::new(grants), Arc::new(MemoryState::default()))
}

fn session(settings: Value) -> wire::Session {
    wire::Session {
        pipeline: "shop".into(),
        destination: "lake".into(),
        settings: settings.to_string(),
        lane: 0,
        lanes: 1,
        generation: 1,
        details: Vec::new(),
    }
}

fn group() -> wire::Group {
    wire::Group { ticket: 3, whole: true, batches: Vec::new(), details: Vec::new() }
}

/// Opens an instance with settings that say what to do.
async fn open(options: &InstanceOptions, settings: Value) -> (Instance, Called<wire::Ready>) {
    let mut instance = hostile().await.instantiate(options).await.unwrap();
    let ready = instance.open(&session(settings)).await;
    (instance, ready)
}

/// What the guest told by way of a failure: code and message.
async fn told(options: &InstanceOptions, settings: Value) -> (String, String) {
    match open(options, settings).await.1 {
        Err(CallError::Failure(failure)) => (failure.code, failure.message),
        other => panic!("{other:?}"),
    }
}
