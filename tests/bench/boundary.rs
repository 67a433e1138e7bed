//! What it costs that a plugin is a guest: a batch goes from the host's columns into its
//! memory and every cell is read there, against the same function called natively.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Instant;

use serde_json::json;
use tidegate::plugin::{EngineOptions, Grants, InstanceOptions, MemoryState, PluginEngine};
use tidegate::wire as model;

use crate::report::Figure;
use crate::{Options, Result};

#[path = "boundary_rows.rs"]
mod boundary_rows;

/// Batches of one measurement.
const ROUNDS: u64 = 500;

/// Nanoseconds a cell: in all, and of these what the hand-over alone takes.
pub fn measure(options: &Options) -> Result<Vec<Figure>> {
    let cache = tempfile::tempdir()?;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let (mut beyond, mut handed) = (Vec::new(), Vec::new());
    for run in 1..=options.runs {
        let native = native()?;
        let hand_over = runtime.block_on(guest(cache.path(), false))?;
        let guest = runtime.block_on(guest(cache.path(), true))?;
        eprintln!(
            "boundary: run {run} of {}: natively {native:.2}, guest {guest:.2}, of which hand-over {hand_over:.2} ns a cell",
            options.runs
        );
        beyond.push(guest - native);
        handed.push(hand_over);
    }
    Ok(vec![
        Figure::at_most("boundary: guest reads every cell, beyond native", "ns", 10.0, beyond),
        Figure::at_most("boundary: of which hand-over, a cell", "ns", 10.0, handed),
    ])
}

/// The function itself: the fixture's example.
fn native() -> Result<f64> {
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| PathBuf::from("target"), PathBuf::from);
    let program = target.join("release/examples/native");
    let output = Command::new(&program).output();
    let output = output.map_err(|error| format!("{}: {error}: `make bench` builds it", program.display()))?;
    let text = String::from_utf8(output.stdout)?;
    let first = text.split_whitespace().next().ok_or("the native function says nothing")?;
    Ok(first.parse()?)
}

/// The same rows as batches of a copy; `read`: the guest reads every cell.
async fn guest(cache: &Path, read: bool) -> Result<f64> {
    let engine = PluginEngine::new(EngineOptions::new(cache))?;
    let plugin = engine.load(&tidegate_tests::fixtures().join("count.wasm")).await?;
    let options = InstanceOptions::new("boundary", Arc::new(Grants::default()), Arc::new(MemoryState::default()));
    let mut instance = plugin.instantiate(&options).await?;
    let session = model::Session {
        pipeline: "bench".to_owned(),
        destination: "boundary".to_owned(),
        settings: json!({ "checksum": read }).to_string(),
        lane: 0,
        lanes: 1,
        generation: 1,
        details: Vec::new(),
    };
    instance.open(&session).await?;
    let mut group = group();
    let mut begun = Instant::now();
    for round in 0..=ROUNDS {
        if round == 1 {
            // The first one made the guest's memory grow.
            begun = Instant::now();
        }
        group.ticket = round + 1;
        instance.write_group(&group).await?;
    }
    let seconds = begun.elapsed().as_secs_f64();
    instance.close().await?;
    let cells = ROUNDS * u64::from(boundary_rows::ROWS * boundary_rows::COLUMNS);
    Ok(seconds * 1e9 / cells as f64)
}

fn group() -> model::Group {
    let as_of = model::Position { epoch: 0, commit: 1, ordinal: 0 };
    let rows = boundary_rows::rows();
    let copy = model::CopyRows { run: "run".to_owned(), batch_id: "0".to_owned(), as_of, rows };
    let batch = model::Batch {
        table_id: 1,
        snapshot: model::SnapshotId { commit: 1, message: 0 },
        through: None,
        content: model::Content::Copy(copy),
    };
    model::Group { ticket: 1, whole: true, batches: vec![batch], details: Vec::new() }
}
