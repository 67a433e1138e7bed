//! Which files are plugins, and what is compiled when.

use super::*;

/// `bytes` with one text in place of another of the same length.
fn patched(bytes: &[u8], from: &str, to: &str) -> Vec<u8> {
    assert_eq!(from.len(), to.len());
    let mut out = bytes.to_vec();
    let mut count = 0;
    for at in 0..out.len().saturating_sub(from.len()) {
        if out[at..].starts_with(from.as_bytes()) {
            out[at..at + from.len()].copy_from_slice(to.as_bytes());
            count += 1;
        }
    }
    assert!(count > 0, "{from} is not in the file");
    out
}

/// The error of loading a file with this content.
async fn refused(content: &[u8]) -> crate::error::Error {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("odd.wasm");
    std::fs::write(&file, content).unwrap();
    let error = engine().load(&file).await.map(drop).unwrap_err();
    assert!(error.message().contains("odd.wasm"), "{}", error.report());
    assert!(error.next_step().is_some());
    error
}

#[tokio::test]
async fn a_file_that_is_no_plugin_is_refused_with_what_is_wrong() {
    hostile().await;
    let good = std::fs::read(hostile_file()).unwrap();
    for (what, content, code) in [
        ("text", b"hello".to_vec(), "plugin.not-a-component"),
        ("empty", Vec::new(), "plugin.not-a-component"),
        ("core module", b"\0asm\x01\0\0\0".to_vec(), "plugin.not-a-component"),
        ("empty component", b"\0asm\x0d\0\x01\0".to_vec(), "plugin.missing-export"),
        ("cut short", good[..good.len() / 2].to_vec(), "plugin.damaged"),
        (
            "another version",
            patched(&good, "tidegate:destination/plugin@0.1.0", "tidegate:destination/plugin@0.9.0"),
            "plugin.version",
        ),
        (
            "another world",
            patched(&good, "tidegate:destination/plugin@0.1.0", "somebody:destination/plugin@0.1.0"),
            "plugin.missing-export",
        ),
        ("sockets", patched(&good, "wasi:cli/environment@", "wasi:sockets/network@"), "plugin.extra-import"),
    ] {
        let error = refused(&content).await;
        assert_eq!(error.code(), code, "{what}: {}", error.report());
    }
    let dir = tempfile::tempdir().unwrap();
    let error = engine().load(&dir.path().join("none.wasm")).await.map(drop).unwrap_err();
    assert_eq!(error.code(), "plugin.file");
}

#[tokio::test]
async fn a_component_that_is_too_large_is_not_read() {
    let dir = tempfile::tempdir().unwrap();
    let options = EngineOptions {
        limits: EngineLimits { component_bytes: 1 << 20, ..EngineLimits::default() },
        ..EngineOptions::new(dir.path().join("code"))
    };
    let engine = PluginEngine::new(options).unwrap();
    let file = dir.path().join("large.wasm");
    std::fs::File::create(&file).unwrap().set_len(10 << 30).unwrap();
    assert_eq!(engine.load(&file).await.map(drop).unwrap_err().code(), "plugin.too-large");
}

#[tokio::test]
async fn a_component_that_takes_too_long_to_compile_is_given_up() {
    let dir = tempfile::tempdir().unwrap();
    hostile().await;
    let limits = EngineLimits { compile: std::time::Duration::from_millis(1), ..EngineLimits::default() };
    let engine = PluginEngine::new(EngineOptions { limits, ..EngineOptions::new(dir.path().join("code")) }).unwrap();
    let error = engine.load(hostile_file()).await.map(drop).unwrap_err();
    assert_eq!(error.code(), "plugin.compile-time");
    assert!(error.message().contains("0.001 s"), "{}", error.report());
    assert_eq!(engine.stats().compiled, 0);
}

#[tokio::test]
async fn a_second_load_compiles_nothing_and_a_damaged_entry_is_compiled_again() {
    let dir = tempfile::tempdir().unwrap();
    hostile().await;
    let file = dir.path().join("copy.wasm");
    std::fs::copy(hostile_file(), &file).unwrap();
    let cache = dir.path().join("code");
    let start = || PluginEngine::new(EngineOptions::new(&cache)).unwrap();

    let engine = start();
    let first = engine.load(&file).await.unwrap();
    assert_eq!(engine.stats(), EngineStats { compiled: 1, cached: 0 });
    let again = engine.load(&file).await.unwrap();
    assert!(Arc::ptr_eq(&first, &again));
    drop((first, again));

    let engine = start();
    let cached = engine.load(&file).await.unwrap();
    assert_eq!(engine.stats(), EngineStats { compiled: 0, cached: 1 });
    assert_eq!((cached.name.as_str(), cached.manifest.description.as_str()), ("copy", "misbehaves on request"));
    let mut instance = cached.instantiate(&options(Grants::default())).await.unwrap();
    instance.open(&session(serde_json::json!({}))).await.unwrap();

    let entry = std::fs::read_dir(&cache).unwrap().next().unwrap().unwrap().path();
    let mut bytes = std::fs::read(&entry).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 0xff;
    std::fs::write(&entry, bytes).unwrap();
    let engine = start();
    engine.load(&file).await.unwrap();
    assert_eq!(engine.stats(), EngineStats { compiled: 1, cached: 0 });
    let engine = start();
    engine.load(&file).await.unwrap();
    assert_eq!(engine.stats(), EngineStats { compiled: 0, cached: 1 });
}

#[tokio::test]
async fn a_file_with_another_content_is_another_plugin() {
    hostile().await;
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("p.wasm");
    std::fs::copy(hostile_file(), &file).unwrap();
    let first = engine().load(&file).await.unwrap();
    let other = patched(&std::fs::read(hostile_file()).unwrap(), "misbehaves on request", "MISBEHAVES on request");
    std::fs::write(&file, other).unwrap();
    let second = engine().load(&file).await.unwrap();
    assert_ne!(first.sha256, second.sha256);
    assert_eq!(second.manifest.description, "MISBEHAVES on request");
}
