//! A log that is there when streaming starts, until every checkpoint is past its end.

use crate::host::{Host, Measured, Setup};
use crate::report::{Figure, Run, Work};
use crate::source::{self, Database, Log, Source};
use crate::{Options, Result};

/// Ours and `pg_recvlogical` on the same log.
pub fn log(source: &Source, options: &Options, name: &str, short: &str, log: Log) -> Result<Work> {
    let database = source.database(short)?;
    database.prepare(log)?;
    // A slot can be read once, so each run has its own, all made at the same point.
    let mut hosts = Vec::new();
    for run in 0..=options.runs {
        hosts.push(waiting(&database, &format!("{short}_{run}"), &Setup::default())?);
        database.create_slot(&reference_slot(run))?;
    }
    eprintln!("{name}: filling the log");
    let end = database.write_log(log)?;
    let mut runs = Vec::new();
    for (run, host) in hosts.iter_mut().enumerate() {
        let ours = take(host, &database, end, log.changes())?.0;
        let slot = reference_slot(run);
        let limit = database.recvlogical(&slot, end)?;
        database.drop_slot(&slot)?;
        // The first warms up.
        if run > 0 {
            eprintln!("{name}: run {run} of {}: {:.2} s, pg_recvlogical {limit:.2} s", options.runs, ours.seconds);
            runs.push(Run { ours, limit });
        }
    }
    drop(hosts);
    database.remove()?;
    Ok(Work {
        name: name.to_owned(),
        reference: "pg_recvlogical",
        before: "until streaming",
        items: log.changes(),
        goal: 0.95,
        runs,
    })
}

/// Eight destinations beside one, and what the server's process spends on them.
pub fn eight_destinations(source: &Source, options: &Options) -> Result<(Work, Figure)> {
    let name = format!("eight destinations, {} inserts", options.changes);
    let database = source.database("eight")?;
    let eight =
        Setup { destinations: (1..=8).map(|n| Setup::count(&format!("count{n}"))).collect(), ..Setup::default() };
    let mut hosts = Vec::new();
    for run in 0..=options.runs {
        let one = waiting(&database, &format!("one_{run}"), &Setup::default())?;
        hosts.push((waiting(&database, &format!("eight_{run}"), &eight)?, one));
    }
    eprintln!("{name}: filling the log");
    let log = Log::OneTransaction(options.changes);
    let end = database.write_log(log)?;
    let (mut runs, mut cpu) = (Vec::new(), Vec::new());
    for (run, (eight, one)) in hosts.iter_mut().enumerate() {
        let (ours, of_eight) = take(eight, &database, end, log.changes())?;
        let (limit, of_one) = take(one, &database, end, log.changes())?;
        if run > 0 {
            eprintln!("{name}: run {run} of {}: {:.2} s, one {:.2} s", options.runs, ours.seconds, limit.seconds);
            runs.push(Run { ours, limit: limit.seconds });
            cpu.push(of_eight / of_one);
        }
    }
    drop(hosts);
    database.remove()?;
    let figure = Figure::at_most("CPU of the source, eight destinations by one", "", 1.05, cpu);
    let work =
        Work { name, reference: "one destination", before: "until streaming", items: log.changes(), goal: 0.8, runs };
    Ok((work, figure))
}

/// A pipeline that has copied what is there, and has a slot from there on.
fn waiting(database: &Database<'_>, name: &str, setup: &Setup) -> Result<Host> {
    let mut host = Host::with(database, name, setup)?;
    host.start()?;
    host.wait_ready(source::TABLES)?;
    host.stop()?;
    Ok(host)
}

/// Takes the log; with the CPU seconds of the server's process.
fn take(
    host: &mut Host,
    database: &Database<'_>,
    end: tidegate::position::Lsn,
    changes: u64,
) -> Result<(Measured, f64)> {
    host.start()?;
    let measured = host.measure_stream(end, changes)?;
    let cpu = database.walsender_cpu(&host.slot())?;
    host.stop()?;
    database.drop_slot(&host.slot())?;
    Ok((measured, cpu))
}

fn reference_slot(run: usize) -> String {
    format!("reference_{run}")
}
