//! `make bench`: how fast Tidegate is beside PostgreSQL's own tools on the same data, as
//! ratios taken in one run.
//!
//! Ours and the reference take turns (A B A B …), so that whatever else the machine does
//! meets both. The destination is the `count` fixture, which costs nothing: what is
//! measured is the way from the socket to the guest's memory.

mod host;
mod report;
mod source;

use std::error::Error;
use std::process::ExitCode;

use host::{Host, Measured};
use report::{Run, Work};
use source::{Log, Source};

/// What fails here ends the benchmark; there is nobody to handle it.
type Result<T, E = Box<dyn Error>> = std::result::Result<T, E>;

/// The least share of the reference's rate that is wanted.
const GOAL: f64 = 0.95;

/// What can be set, from the environment: `make bench ROWS=2000000 RUNS=5`.
struct Options {
    /// Rows of the table that is copied.
    rows: u64,
    /// Rows inserted by the one transaction that is streamed.
    changes: u64,
    /// Transactions of one row each that are streamed.
    transactions: u64,
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
            changes: number("CHANGES", 1_000_000)?,
            transactions: number("TRANSACTIONS", 100_000)?,
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
    let mut works = Vec::new();
    if options.wants("copy") {
        works.push(copy(&source, &options)?);
    }
    if options.wants("stream one") {
        let name = format!("stream one transaction of {} inserts", options.changes);
        works.push(stream(&source, &options, &name, "one", Log::OneTransaction(options.changes))?);
    }
    if options.wants("stream many") {
        let name = format!("stream {} transactions of one insert", options.transactions);
        works.push(stream(&source, &options, &name, "many", Log::SingleRows(options.transactions))?);
    }
    report::print(&works);
    if let Some(path) = &options.json {
        report::write_json(&works, path)?;
    }
    Ok(())
}

/// The initial copy of one table: from the table's data-sync until its rows are durable.
fn copy(source: &Source, options: &Options) -> Result<Work> {
    let database = source.database("copied")?;
    eprintln!("copy: filling a table of {} rows", options.rows);
    database.fill(options.rows)?;
    // Both once unmeasured: the table is in memory, the plugin is compiled.
    database.psql_copy()?;
    copy_once(&database, options.rows)?;
    let mut runs = Vec::new();
    for run in 1..=options.runs {
        let ours = copy_once(&database, options.rows)?;
        let limit = database.psql_copy()?;
        eprintln!("copy: run {run} of {}: {:.2} s, psql {limit:.2} s", options.runs, ours.seconds);
        runs.push(Run { ours, limit });
    }
    Ok(Work {
        name: format!("copy one table of {} rows, one connection", options.rows),
        reference: "psql COPY",
        before: "until data-sync",
        items: options.rows,
        goal: GOAL,
        runs,
    })
}

fn copy_once(database: &source::Database<'_>, rows: u64) -> Result<Measured> {
    let mut host = Host::new(database, "copy")?;
    host.start()?;
    let measured = host.measure_copy("public.t", rows)?;
    host.stop()?;
    database.drop_slot(&host.slot())?;
    Ok(measured)
}

/// A log that is there when streaming starts, until the checkpoint is past its end.
fn stream(source: &Source, options: &Options, name: &str, short: &str, log: Log) -> Result<Work> {
    let database = source.database(short)?;
    // A slot can be read once, so each run has its own, all made at the same point.
    let mut hosts = Vec::new();
    for run in 0..=options.runs {
        let mut host = Host::new(&database, &format!("{short}_{run}"))?;
        host.start()?;
        host.wait_ready(source::TABLES)?;
        host.stop()?;
        database.create_slot(&reference_slot(run))?;
        hosts.push(host);
    }
    eprintln!("{name}: filling the log");
    let end = database.write_log(log)?;
    let mut runs = Vec::new();
    for (run, host) in hosts.iter_mut().enumerate() {
        host.start()?;
        let ours = host.measure_stream(end, log.changes())?;
        host.stop()?;
        database.drop_slot(&host.slot())?;
        let slot = reference_slot(run);
        let limit = database.recvlogical(&slot, end)?;
        database.drop_slot(&slot)?;
        // The first warms up.
        if run > 0 {
            eprintln!("{name}: run {run} of {}: {:.2} s, pg_recvlogical {limit:.2} s", options.runs, ours.seconds);
            runs.push(Run { ours, limit });
        }
    }
    Ok(Work {
        name: name.to_owned(),
        reference: "pg_recvlogical",
        before: "until streaming",
        items: log.changes(),
        goal: GOAL,
        runs,
    })
}

fn reference_slot(run: usize) -> String {
    format!("reference_{run}")
}
