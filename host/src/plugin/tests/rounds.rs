//! Instances that end badly, again and again: nothing of them stays.

use serde_json::json;
use tokio::net::TcpListener;

use super::*;

/// How often; `make hostile` does it more often.
const ROUNDS: usize = 1000;
/// What allocators keep.
const SLACK_BYTES: usize = 24 << 20;

fn files() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

fn resident() -> usize {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap();
    text.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * 4096
}

/// One instance that has a file and a connection open when it ends.
async fn round(plugin: &Arc<Plugin>, number: usize, options: &InstanceOptions, port: u16) {
    let settings = match number % 4 {
        0 => json!({"on": "open", "do": "trap"}),
        1 => json!({"on": "open", "do": "panic", "words": "x"}),
        2 => json!({"on": "open", "do": "dial", "host": "127.0.0.1", "port": port, "wait_ms": 0}),
        _ => json!({"on": "open", "do": "open-files", "path": "/d"}),
    };
    let mut instance = plugin.instantiate(options).await.unwrap();
    instance.open(&session(settings)).await.unwrap_err();
}

/// By itself in its process: it counts what belongs to the process.
#[test]
fn no_file_and_no_memory_stays_behind_a_thousand_instances() {
    const ALONE: &str = "TIDEGATE_TEST_ROUNDS_ALONE";
    if std::env::var_os(ALONE).is_none() {
        let name = "plugin::tests::rounds::no_file_and_no_memory_stays_behind_a_thousand_instances";
        let run = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", name, "--nocapture"])
            .env(ALONE, "1")
            .output()
            .unwrap();
        let said = format!("{}{}", String::from_utf8_lossy(&run.stdout), String::from_utf8_lossy(&run.stderr));
        assert!(run.status.success() && said.contains("1 passed"), "{said}");
        return;
    }
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap().block_on(rounds());
}

async fn rounds() {
    let directory = tempfile::tempdir().unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    // Whoever connects is left at once.
    tokio::spawn(async move { while listener.accept().await.is_ok() {} });
    let grants = Grants {
        network: vec![NetworkGrant::parse(&format!("127.0.0.1:{port}")).unwrap()],
        files: vec![FileGrant { path: directory.path().into(), guest: "/d".into(), write: true }],
        ..Grants::default()
    };
    let mut options = options(grants);
    options.limits.handles = 30;
    let plugin = hostile().await;
    for number in 0..100 {
        round(&plugin, number, &options, port).await;
    }
    let (files_before, memory_before) = (files(), resident());
    for number in 0..ROUNDS {
        round(&plugin, number, &options, port).await;
    }
    let (files, memory) = (files(), resident());
    println!("files {files_before} {files}, memory {memory_before} {memory}");
    assert!(files <= files_before + 2, "{files_before} files were open, {files} are");
    assert!(memory <= memory_before + SLACK_BYTES, "{memory_before} bytes were resident, {memory} are");
    assert_eq!(options.usage.snapshot().restarts, (ROUNDS + 100 - 1) as u64);
}
