//! What the process has resident at most under the default budget, and others where that
//! is said: one large transaction, one large row, many columns, many tables.

use std::time::Instant;

use crate::host::{Host, Setup};
use crate::source::{Database, Source};
use crate::{Options, Result, number};

/// What a work came to.
struct Outcome {
    name: String,
    /// What became of it, and how long parts of it took.
    what: String,
    seconds: f64,
    peak: f64,
}

pub fn measure(source: &Source, options: &Options) -> Result<()> {
    let mut outcomes = Vec::new();
    if options.wants_memory("transaction") {
        outcomes.push(transaction(source)?);
    }
    if options.wants_memory("row") {
        for budget in ["", "memory_bytes = 2147483648"] {
            outcomes.push(row(source, budget)?);
        }
    }
    if options.wants_memory("columns") {
        outcomes.push(columns(source)?);
    }
    if options.wants_memory("tables") {
        outcomes.push(tables(source)?);
    }
    println!("{:<64} {:>9} {:>9}  outcome", "work", "seconds", "peak MiB");
    for Outcome { name, what, seconds, peak } in outcomes {
        println!("{name:<64} {seconds:>9.1} {peak:>9.0}  {what}");
    }
    Ok(())
}

impl Options {
    fn wants_memory(&self, name: &str) -> bool {
        let wanted = self.only.trim_start_matches("memory").trim();
        wanted.is_empty() || name.contains(wanted)
    }
}

fn publish(database: &Database<'_>) -> Result<()> {
    database.sql("CREATE PUBLICATION pub FOR ALL TABLES")?;
    Ok(())
}

fn end(mut host: Host, database: Database<'_>) -> Result<()> {
    host.stop()?;
    database.drop_slot(&host.slot())?;
    database.remove()
}

/// `MIB` of rows of 1 kB in one transaction.
fn transaction(source: &Source) -> Result<Outcome> {
    let mib = number("MIB", 3072)?;
    let database = source.empty("memory_transaction")?;
    database.sql("CREATE TABLE t (id bigint PRIMARY KEY, v text)")?;
    publish(&database)?;
    let mut host = Host::new(&database, "memory_transaction")?;
    host.start()?;
    host.wait_ready(1)?;
    eprintln!("memory transaction: writing {mib} MiB");
    let begun = Instant::now();
    let rows = mib << 10;
    database.sql(&format!(
        "ALTER TABLE t ALTER v SET STORAGE PLAIN; INSERT INTO t SELECT n, repeat(md5(n::text), 31) FROM generate_series(1, {rows}::bigint) n"
    ))?;
    let written = begun.elapsed().as_secs_f64();
    let at = database.end()?;
    host.wait_checkpoint(at)?;
    let outcome = Outcome {
        name: format!("one transaction of {rows} rows, {mib} MiB"),
        what: format!("durable {:.1} s after its commit", begun.elapsed().as_secs_f64() - written),
        seconds: begun.elapsed().as_secs_f64(),
        peak: host.peak()?,
    };
    end(host, database)?;
    Ok(outcome)
}

/// A row of `ROW_MIB` in a copy, and one in the stream.
fn row(source: &Source, budget: &str) -> Result<Outcome> {
    let mib = number("ROW_MIB", 200)?;
    let value = format!("repeat(md5('x'), {mib} << 15)");
    let database = source.empty("memory_row")?;
    database.sql(&format!(
        "CREATE TABLE copied (id int PRIMARY KEY, v text); CREATE TABLE streamed (id int PRIMARY KEY, v text);
         INSERT INTO copied VALUES (1, {value})"
    ))?;
    publish(&database)?;
    let setup = Setup { pipeline: budget.to_owned(), ..Setup::default() };
    let mut host = Host::with(&database, "memory_row", &setup)?;
    let begun = Instant::now();
    host.start()?;
    let copied = host.wait_outcome("public.copied")?;
    host.wait_outcome("public.streamed")?;
    let after_copy = host.peak()?;
    database.sql(&format!("INSERT INTO streamed VALUES (1, {value})"))?;
    let at = database.end()?;
    let streamed = host.wait_row("public.streamed", at)?;
    let outcome = Outcome {
        name: format!("a row of {mib} MiB, {}", if budget.is_empty() { "default budget" } else { budget }),
        what: format!("copied: {copied} (peak {after_copy:.0} MiB), streamed: {streamed}"),
        seconds: begun.elapsed().as_secs_f64(),
        peak: host.peak()?,
    };
    end(host, database)?;
    Ok(outcome)
}

/// A table of 1,600 columns: copied, and each row updated.
fn columns(source: &Source) -> Result<Outcome> {
    const COLUMNS: usize = 1600;
    let rows = number("WIDE_ROWS", 10_000)?;
    let database = source.empty("memory_columns")?;
    let names: Vec<String> = (2..=COLUMNS).map(|n| format!("c{n} int")).collect();
    let values = vec!["n"; COLUMNS].join(", ");
    database.sql(&format!(
        "CREATE TABLE wide (id int PRIMARY KEY, {}); INSERT INTO wide SELECT {values} FROM generate_series(1, {rows}) n",
        names.join(", ")
    ))?;
    publish(&database)?;
    let mut host = Host::new(&database, "memory_columns")?;
    let begun = Instant::now();
    host.start()?;
    host.wait_ready(1)?;
    let (copied, after_copy) = (begun.elapsed().as_secs_f64(), host.peak()?);
    database.sql("UPDATE wide SET c1600 = -c1600")?;
    let at = database.end()?;
    host.wait_checkpoint(at)?;
    let outcome = Outcome {
        name: format!("{rows} rows of {COLUMNS} columns, copied and updated"),
        what: format!("copied in {copied:.1} s (peak {after_copy:.0} MiB)"),
        seconds: begun.elapsed().as_secs_f64(),
        peak: host.peak()?,
    };
    end(host, database)?;
    Ok(outcome)
}

/// `TABLES` of one row each: until all are live, then another row in each, then a restart.
fn tables(source: &Source) -> Result<Outcome> {
    let tables = usize::try_from(number("TABLES", 10_000)?)?;
    let database = source.empty("memory_tables")?;
    eprintln!("memory tables: making {tables} tables");
    database.sql(&format!(
        "DO $$ BEGIN FOR n IN 1..{tables} LOOP
             EXECUTE format('CREATE TABLE many%s (id int PRIMARY KEY, v text)', n);
             EXECUTE format('INSERT INTO many%s VALUES (1, %L)', n, n);
             IF n % 500 = 0 THEN COMMIT; END IF;
         END LOOP; END $$"
    ))?;
    publish(&database)?;
    let mut host = Host::new(&database, "memory_tables")?;
    let begun = Instant::now();
    host.start()?;
    host.wait_ready(tables)?;
    let (ready, after_copy, cpu) = (begun.elapsed().as_secs_f64(), host.peak()?, host.cpu()?);
    eprintln!("memory tables: ready after {ready:.1} s, CPU {cpu:.1} s, peak {after_copy:.0} MiB");
    let changed = Instant::now();
    database.sql(&format!(
        "DO $$ BEGIN FOR n IN 1..{tables} LOOP
             EXECUTE format('INSERT INTO many%s VALUES (2, %L)', n, n);
             IF n % 500 = 0 THEN COMMIT; END IF;
         END LOOP; END $$"
    ))?;
    let at = database.end()?;
    host.wait_checkpoint(at)?;
    let (changes, peak) = (changed.elapsed().as_secs_f64(), host.peak()?);
    host.stop()?;
    let restarted = Instant::now();
    host.start()?;
    host.wait_ready(tables)?;
    let outcome = Outcome {
        name: format!("{tables} tables of one row"),
        what: format!(
            "ready after {ready:.1} s with {cpu:.1} s of CPU (peak {after_copy:.0} MiB), a row more in each {changes:.1} s, restart {:.1} s (peak {:.0} MiB)",
            restarted.elapsed().as_secs_f64(),
            host.peak()?
        ),
        seconds: begun.elapsed().as_secs_f64(),
        peak,
    };
    end(host, database)?;
    Ok(outcome)
}
