//! Initial copies: from the first table's data-sync until the rows of all are durable.

use crate::host::{Host, Measured, Setup};
use crate::report::{Run, Work};
use crate::source::{Database, Source};
use crate::{Options, Result};

/// One table, by one connection or by several that share it.
pub fn one_table(source: &Source, options: &Options, connections: u64) -> Result<Work> {
    let database = source.database(&format!("copied_by_{connections}"))?;
    eprintln!("copy: filling a table of {} rows", options.rows);
    database.fill(options.rows)?;
    let work = Work {
        name: format!("copy one table of {} rows, {connections} at once", options.rows),
        reference: "psql COPY",
        before: "until data-sync",
        items: options.rows,
        goal: if connections == 1 { 0.95 } else { 0.9 },
        runs: turns(&database, options, connections, options.rows, 2, || database.psql_copy(connections))?,
    };
    database.remove()?;
    Ok(work)
}

/// Many small tables.
pub fn many_tables(source: &Source, options: &Options) -> Result<Work> {
    const ROWS: u64 = 1000;
    const CONNECTIONS: u64 = 4;
    let database = source.empty("many_tables")?;
    eprintln!("copy: filling {} tables of {ROWS} rows", options.tables);
    database.fill_many(options.tables, ROWS)?;
    let tables = usize::try_from(options.tables)?;
    let rows = options.tables * ROWS;
    let work = Work {
        name: format!("copy {tables} tables of {ROWS} rows, {CONNECTIONS} at once"),
        reference: "psql COPY",
        before: "until data-sync",
        items: rows,
        goal: 0.9,
        runs: turns(&database, options, CONNECTIONS, rows, tables, || {
            database.psql_copy_many(options.tables, CONNECTIONS)
        })?,
    };
    database.remove()?;
    Ok(work)
}

/// Ours and the reference in turns, both once unmeasured: the tables are in memory then, and
/// the plugin is compiled.
fn turns(
    database: &Database<'_>,
    options: &Options,
    connections: u64,
    rows: u64,
    tables: usize,
    reference: impl Fn() -> Result<f64>,
) -> Result<Vec<Run>> {
    let mut runs = Vec::new();
    for run in 0..=options.runs {
        let ours = once(database, connections, rows, tables)?;
        let limit = reference()?;
        if run > 0 {
            eprintln!("copy: run {run} of {}: {:.2} s, psql {limit:.2} s", options.runs, ours.seconds);
            runs.push(Run { ours, limit });
        }
    }
    Ok(runs)
}

fn once(database: &Database<'_>, connections: u64, rows: u64, tables: usize) -> Result<Measured> {
    let setup = Setup { source: format!("copy_connections = {connections}"), ..Setup::default() };
    let mut host = Host::with(database, "copy", &setup)?;
    host.start()?;
    let measured = host.measure_copy(tables, rows)?;
    host.stop()?;
    database.drop_slot(&host.slot())?;
    Ok(measured)
}
