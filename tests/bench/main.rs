//! `make bench`: how fast Tidegate is beside PostgreSQL's own tools on the same data, as
//! ratios taken in one run.
//!
//! Ours and the reference take turns (A B A B …), so that whatever else the machine does
//! meets both. The destination is the `count` fixture, which costs nothing: what is
//! measured is the way from the socket to the guest's memory.
//!
//! `WORK=memory` measures something else: what the process has resident at most when what
//! it is given is large or many (`WORK="memory row"` one of these).

mod boundary;
mod bounds;
mod copy;
mod host;
mod memory;
mod report;
mod source;
mod stream;

use std::error::Error;
use std::process::ExitCode;

use source::{Log, Source};

/// What fails here ends the benchmark; there is nobody to handle it.
type Result<T, E = Box<dyn Error>> = std::result::Result<T, E>;

/// What can be set, from the environment: `make bench ROWS=2000000 RUNS=5`.
struct Options {
    /// Rows of the table that is copied.
    rows: u64,
    /// Tables of a thousand rows that are copied.
    tables: u64,
    /// Rows inserted by the one transaction that is streamed.
    changes: u64,
    /// Transactions of one row each that are streamed.
    transactions: u64,
    /// Rows that are updated under REPLICA IDENTITY FULL.
    updates: u64,
    /// How long the source is written to at a steady rate.
    seconds: u64,
    /// How often each work is measured.
    runs: usize,
    /// The works whose name contains this.
    only: String,
    /// A file for the figures.
    json: Option<String>,
}

impl Options {
    fn from_environment() -> Result<Options> {
        Ok(Options {
            rows: number("ROWS", 1_000_000)?,
            tables: number("TABLES", 500)?,
            changes: number("CHANGES", 1_000_000)?,
            transactions: number("TRANSACTIONS", 100_000)?,
            updates: number("UPDATES", 100_000)?,
            seconds: number("SECONDS", 20)?,
            runs: usize::try_from(number("RUNS", 5)?)?.max(1),
            only: std::env::var("WORK").unwrap_or_default(),
            json: std::env::var("JSON").ok().filter(|path| !path.is_empty()),
        })
    }

    fn wants(&self, name: &str) -> bool {
        name.contains(&self.only)
    }
}

fn number(name: &str, default: u64) -> Result<u64> {
    match std::env::var(name) {
        Ok(text) if !text.is_empty() => {
            text.parse().map_err(|error| format!("{name} is `{text}`, which is no number: {error}").into())
        }
        _ => Ok(default),
    }
}

fn main() -> ExitCode {
    match bench() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench: {error}");
            ExitCode::FAILURE
        }
    }
}

fn bench() -> Result<()> {
    let options = Options::from_environment()?;
    let source = Source::start()?;
    if options.only.starts_with("memory") {
        return memory::measure(&source, &options);
    }
    let (mut works, mut figures) = (Vec::new(), Vec::new());
    if options.wants("copy one table, one connection") {
        works.push(copy::one_table(&source, &options, 1)?);
    }
    if options.wants("copy one table, four connections") {
        works.push(copy::one_table(&source, &options, 4)?);
    }
    if options.wants("copy many tables") {
        works.push(copy::many_tables(&source, &options)?);
    }
    if options.wants("stream one") {
        let name = format!("stream one transaction of {} inserts", options.changes);
        works.push(stream::log(&source, &options, &name, "one", Log::OneTransaction(options.changes))?);
    }
    if options.wants("stream many") {
        let name = format!("stream {} transactions of one insert", options.transactions);
        works.push(stream::log(&source, &options, &name, "many", Log::SingleRows(options.transactions))?);
    }
    if options.wants("stream full") {
        let name = format!("stream {} updates, identity FULL, TOAST", options.updates);
        works.push(stream::log(&source, &options, &name, "full", Log::FullUpdates(options.updates))?);
    }
    if options.wants("eight destinations") {
        let (work, figure) = stream::eight_destinations(&source, &options)?;
        works.push(work);
        figures.push(figure);
    }
    if options.wants("boundary") {
        figures.extend(boundary::measure(&options)?);
    }
    if options.wants("latency") {
        figures.extend(bounds::latency(&source, &options)?);
    }
    if options.wants("start to first row") {
        figures.extend(bounds::start(&source, &options)?);
    }
    figures.extend(bounds::copying(&works));
    report::print(&works, &figures);
    if let Some(path) = &options.json {
        report::write_json(&works, &figures, path)?;
    }
    Ok(())
}
