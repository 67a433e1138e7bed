//! What has a bound and no reference: delays, memory, and the time to start.

use std::time::{Duration, Instant};

use tokio::time::{MissedTickBehavior, interval};

use crate::host::{Host, Setup};
use crate::report::{Figure, Work};
use crate::source::{Database, Source};
use crate::{Options, Result};

/// Transactions a second.
const RATE: u64 = 500;

/// From commit to durable, of transactions of one row at a steady rate; and what an idle
/// process has resident.
pub fn latency(source: &Source, options: &Options) -> Result<Vec<Figure>> {
    let (mut median, mut p99, mut mirrored, mut idle) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for run in 1..=options.runs {
        let database = source.database("latency")?;
        let mut host = Host::with(&database, "latency", &Setup::default())?;
        host.start()?;
        host.wait_ready(crate::source::TABLES)?;
        idle.push(host.resident()?);
        steady(&database, options.seconds)?;
        let delay = host.delay(RATE * options.seconds)?;
        median.push(delay.median);
        p99.push(delay.p99);
        end(host, database)?;

        let database = source.database("latency")?;
        let mirror = source.empty("mirror")?;
        let setup = Setup { destinations: Setup::postgres("mirror", &mirror), ..Setup::default() };
        let mut host = Host::with(&database, "latency", &setup)?;
        host.start()?;
        host.wait_ready(crate::source::TABLES)?;
        steady(&database, options.seconds)?;
        mirrored.push(host.delay(RATE * options.seconds)?.p99);
        end(host, database)?;
        mirror.remove()?;
        eprintln!("latency: run {run} of {}", options.runs);
    }
    Ok(vec![
        Figure::at_most("commit to durable, 500/s, count, median", "ms", 3.0, median),
        Figure::at_most("commit to durable, 500/s, count, p99", "ms", 15.0, p99),
        Figure::at_most("commit to durable, 500/s, postgres, p99", "ms", 30.0, mirrored),
        Figure::at_most("resident, idle, one destination", "MiB", 48.0, idle),
    ])
}

/// Inserts a row a transaction, at [`RATE`].
fn steady(database: &Database<'_>, seconds: u64) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    runtime.block_on(async {
        let (client, connection) = tokio_postgres::connect(&database.url(), tokio_postgres::NoTls).await?;
        tokio::spawn(connection);
        let insert =
            client.prepare("INSERT INTO t (id, number, name) VALUES ($1, 1, 'a row of a steady stream')").await?;
        let mut pace = interval(Duration::from_micros(1_000_000 / RATE));
        pace.set_missed_tick_behavior(MissedTickBehavior::Burst);
        for id in 0..i64::try_from(RATE * seconds)? {
            pace.tick().await;
            client.execute(&insert, &[&id]).await?;
        }
        Ok(())
    })
}

/// From the start of the process to the first row that is durable, with 100 tables and the
/// plugin compiled already.
pub fn start(source: &Source, options: &Options) -> Result<Vec<Figure>> {
    const TABLES: u64 = 100;
    let database = source.empty("starting")?;
    database.fill_many(TABLES, 1000)?;
    let mut first = Vec::new();
    for run in 0..=options.runs {
        let mut host = Host::with(&database, "starting", &Setup::default())?;
        let begun = Instant::now();
        host.start()?;
        let at = host.wait_first_row()?;
        // The first compiles the plugin.
        if run > 0 {
            first.push((at - begun).as_secs_f64() * 1e3);
        }
        host.stop()?;
        database.drop_slot(&host.slot())?;
    }
    database.remove()?;
    Ok(vec![Figure::at_most("start to first row, 100 tables", "ms", 300.0, first)])
}

/// What the copies of one table had resident at most.
pub fn copying(works: &[Work]) -> Option<Figure> {
    let peaks: Vec<f64> = works
        .iter()
        .filter(|work| work.name.starts_with("copy one table"))
        .flat_map(|work| work.runs.iter().map(|run| run.ours.peak))
        .collect();
    (!peaks.is_empty()).then(|| Figure::at_most("resident at most, copying", "MiB", 192.0, peaks))
}

fn end(mut host: Host, database: Database<'_>) -> Result<()> {
    host.stop()?;
    database.drop_slot(&host.slot())?;
    database.remove()
}
