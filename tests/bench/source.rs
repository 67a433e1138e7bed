//! The server that is read from, what it holds, and PostgreSQL's own tools on it.

use std::process::{Command, Stdio};
use std::time::Instant;

use tidegate::position::Lsn;
use tidegate::scratch::{Cluster, ClusterOptions};

use crate::Result;

/// How many tables are published.
pub const TABLES: usize = 2;

/// The columns that the reference figures were taken with.
const TABLE: &str = "CREATE TABLE t (id bigint PRIMARY KEY, number int, name text, document jsonb, \
     amount numeric(12,2), flag bool, at timestamptz, note text)";

/// Eight cells from one number: about 180 bytes as text.
const ROW: &str = "n, (n * 7919 % 1000000)::int, 'name of row ' || n, \
     jsonb_build_object('id', n, 'kind', 'sample', 'tags', jsonb_build_array('red', n % 10, 'green')), \
     (n % 1000000) / 100.0, n % 3 = 0, timestamptz '2024-01-01 00:00+00' + n * interval '1.234567 s', \
     CASE WHEN n % 10 = 0 THEN NULL ELSE 'a note about row ' || n || ' with some words more' END";

/// A scratch cluster.
pub struct Source {
    cluster: Cluster,
}

/// What is in the log.
#[derive(Clone, Copy)]
pub enum Log {
    /// One transaction that inserts so many rows.
    OneTransaction(u64),
    /// So many transactions that insert a row each.
    SingleRows(u64),
}

impl Log {
    /// Rows that are inserted, with the one that marks the end.
    pub fn changes(self) -> u64 {
        match self {
            Log::OneTransaction(rows) | Log::SingleRows(rows) => rows + 1,
        }
    }
}

/// A database with the table, empty, and a publication of it.
pub struct Database<'a> {
    source: &'a Source,
    name: String,
}

impl Source {
    pub fn start() -> Result<Source> {
        let options = ClusterOptions::default()
            .setting("shared_buffers", "256MB")
            .setting("autovacuum", "off")
            .setting("checkpoint_timeout", "1h")
            .setting("max_wal_size", "16GB");
        Ok(Source { cluster: Cluster::start(&options)? })
    }

    pub fn database(&self, name: &str) -> Result<Database<'_>> {
        self.cluster.psql("postgres", &format!("CREATE DATABASE {name}"))?;
        let database = Database { source: self, name: name.to_owned() };
        database.sql(TABLE)?;
        database.sql("CREATE TABLE mark (id int PRIMARY KEY)")?;
        database.sql("CREATE PUBLICATION pub FOR TABLE t, mark")?;
        Ok(database)
    }
}

impl Database<'_> {
    pub fn url(&self) -> String {
        self.source.cluster.url(&self.name)
    }

    fn sql(&self, sql: &str) -> Result<String> {
        Ok(self.source.cluster.psql(&self.name, sql)?)
    }

    /// Fills the table, and leaves nothing for the first reader to clean up.
    pub fn fill(&self, rows: u64) -> Result<()> {
        self.sql(&format!("INSERT INTO t SELECT {ROW} FROM generate_series(1, {rows}::bigint) n"))?;
        self.sql("VACUUM (FREEZE, ANALYZE) t")?;
        self.sql("CHECKPOINT")?;
        Ok(())
    }

    /// Writes changes, and returns where they end: the last of them is behind it, so that
    /// every reader is told that the end has been passed.
    pub fn write_log(&self, log: Log) -> Result<Lsn> {
        match log {
            Log::OneTransaction(rows) => {
                self.sql(&format!("INSERT INTO t SELECT {ROW} FROM generate_series(1, {rows}::bigint) n"))?;
            }
            Log::SingleRows(rows) => {
                self.sql(&format!(
                    "DO $$ BEGIN FOR n IN 1..{rows}::bigint LOOP INSERT INTO t VALUES ({ROW}); COMMIT; END LOOP; END $$"
                ))?;
            }
        }
        let end = self.sql("SELECT pg_current_wal_insert_lsn()")?.parse()?;
        self.sql("INSERT INTO mark VALUES (1)")?;
        self.sql("CHECKPOINT")?;
        Ok(end)
    }

    pub fn create_slot(&self, name: &str) -> Result<()> {
        self.sql(&format!("SELECT pg_create_logical_replication_slot('{name}', 'pgoutput')"))?;
        Ok(())
    }

    /// A server process may hold the slot for a moment after its client has gone.
    pub fn drop_slot(&self, name: &str) -> Result<()> {
        let mut tries = 0;
        while let Err(error) = self.sql(&format!("SELECT pg_drop_replication_slot('{name}')")) {
            tries += 1;
            if tries == 100 {
                return Err(error);
            }
            std::thread::sleep(std::time::Duration::from_millis(50));
        }
        Ok(())
    }

    /// Seconds that `psql` takes for the table, its start included.
    pub fn psql_copy(&self) -> Result<f64> {
        timed(Command::new("psql").args(["-X", "-q", "-d", &self.url(), "-c", "COPY t TO STDOUT"]))
    }

    /// Seconds that `pg_recvlogical` takes for the log up to `end`, its start included.
    pub fn recvlogical(&self, slot: &str, end: Lsn) -> Result<f64> {
        timed(
            Command::new("pg_recvlogical")
                .args(["-d", &self.url(), "-S", slot, "--start", "--no-loop", "--endpos", &end.to_string()])
                .args(["-o", "proto_version=1", "-o", "publication_names=pub", "-f", "/dev/null"]),
        )
    }
}

fn timed(command: &mut Command) -> Result<f64> {
    let start = Instant::now();
    let output = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).output()?;
    let seconds = start.elapsed().as_secs_f64();
    if !output.status.success() {
        return Err(format!("{command:?}: {}", String::from_utf8_lossy(&output.stderr)).into());
    }
    Ok(seconds)
}
