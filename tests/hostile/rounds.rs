//! Instances that end badly, a thousand times: no file and no memory stays behind.

use std::sync::Arc;

use serde_json::json;
use tidegate::plugin::{
    EngineOptions, FileGrant, Grants, InstanceOptions, MemoryState, NetworkGrant, Plugin, PluginEngine,
};
use tidegate::wire;

use crate::load::fixture;
use crate::{Outcome, Result};

const ROUNDS: u64 = 1000;
/// What allocators keep.
const SLACK_BYTES: usize = 24 << 20;

pub fn run() -> Result<Outcome> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    runtime.block_on(rounds())
}

async fn rounds() -> Result<Outcome> {
    let directory = tempfile::tempdir()?;
    let engine =
        PluginEngine::new(EngineOptions::new(directory.path().join("code"))).map_err(|error| error.report())?;
    let plugin = engine.load(&fixture("hostile")?).await.map_err(|error| error.report())?;
    let files = directory.path().join("files");
    std::fs::create_dir(&files)?;
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    let port = listener.local_addr()?.port();
    // Whoever connects is left at once.
    tokio::spawn(async move { while listener.accept().await.is_ok() {} });
    let grants = Grants {
        network: vec![NetworkGrant::parse(&format!("127.0.0.1:{port}")).map_err(|error| error.report())?],
        files: vec![FileGrant { path: files, guest: "/d".into(), write: true }],
        ..Grants::default()
    };
    let mut options = InstanceOptions::new("rounds", Arc::new(grants), Arc::new(MemoryState::default()));
    options.limits.handles = 30;
    for number in 0..100 {
        round(&plugin, number, &options, port).await?;
    }
    let before = (open_files()?, resident()?);
    for number in 0..ROUNDS {
        round(&plugin, number, &options, port).await?;
    }
    let after = (open_files()?, resident()?);
    if after.0 > before.0 + 2 || after.1 > before.1 + SLACK_BYTES {
        return Err(format!("files and bytes were {before:?} and are {after:?}").into());
    }
    let cost = format!("{} files open before and {} after", before.0, after.0);
    let memory = format!("{} MiB resident before and {} after", before.1 >> 20, after.1 >> 20);
    Ok(Outcome { host: format!("{} restarts", options.usage.snapshot().restarts), cost, lost: memory })
}

async fn round(plugin: &Arc<Plugin>, number: u64, options: &InstanceOptions, port: u16) -> Result<()> {
    let settings = match number % 4 {
        0 => json!({"on": "open", "do": "trap"}),
        1 => json!({"on": "open", "do": "panic", "words": "x"}),
        2 => json!({"on": "open", "do": "dial", "host": "127.0.0.1", "port": port, "wait_ms": 0}),
        _ => json!({"on": "open", "do": "open-files", "path": "/d"}),
    };
    let session = wire::Session {
        pipeline: "shop".into(),
        destination: "rounds".into(),
        settings: settings.to_string(),
        lane: 0,
        lanes: 1,
        generation: number + 1,
        details: Vec::new(),
    };
    let mut instance = plugin.instantiate(options).await?;
    match instance.open(&session).await {
        Ok(_) => Err(format!("round {number} went well").into()),
        Err(_) => Ok(()),
    }
}

fn open_files() -> Result<usize> {
    Ok(std::fs::read_dir("/proc/self/fd")?.count())
}

fn resident() -> Result<usize> {
    let pages = std::fs::read_to_string("/proc/self/statm")?;
    Ok(pages.split(' ').nth(1).ok_or("statm has one number")?.parse::<usize>()? * 4096)
}
