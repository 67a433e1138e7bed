//! The server that is read from, what it holds, and PostgreSQL's own tools on it.

use std::process::{Command, Stdio};
use std::time::Instant;

use tidegate::position::Lsn;
use tidegate::scratch::{Cluster, ClusterOptions};

use crate::Result;
use crate::host::cpu_of;

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
    /// One transaction that updates so many rows that are there, under REPLICA IDENTITY
    /// FULL, and leaves a TOASTed column as it is.
    FullUpdates(u64),
}

impl Log {
    /// Rows that are inserted, with the one that marks the end.
    pub fn changes(self) -> u64 {
        match self {
            Log::OneTransaction(rows) | Log::SingleRows(rows) | Log::FullUpdates(rows) => rows + 1,
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

    /// A database with nothing in it.
    pub fn empty(&self, name: &str) -> Result<Database<'_>> {
        self.cluster.psql("postgres", &format!("CREATE DATABASE {name}"))?;
        Ok(Database { source: self, name: name.to_owned() })
    }

    pub fn database(&self, name: &str) -> Result<Database<'_>> {
        let database = self.empty(name)?;
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

    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn port(&self) -> u16 {
        self.source.cluster.port()
    }

    pub fn sql(&self, sql: &str) -> Result<String> {
        Ok(self.source.cluster.psql(&self.name, sql)?)
    }

    /// Fills the table, and leaves nothing for the first reader to clean up.
    pub fn fill(&self, rows: u64) -> Result<()> {
        self.sql(&format!("INSERT INTO t SELECT {ROW} FROM generate_series(1, {rows}::bigint) n"))?;
        self.sql("VACUUM (FREEZE, ANALYZE) t")?;
        self.sql("CHECKPOINT")?;
        Ok(())
    }

    /// So many tables of so many rows, published all.
    pub fn fill_many(&self, tables: u64, rows: u64) -> Result<()> {
        let create = TABLE.replacen("TABLE t ", "TABLE %I ", 1);
        self.sql(&format!(
            "DO $do$ BEGIN FOR i IN 1..{tables} LOOP
                 EXECUTE format($${create}$$, 't' || i);
                 EXECUTE format($$INSERT INTO %I SELECT {ROW} FROM generate_series(1, {rows}::bigint) n$$, 't' || i);
             END LOOP; END $do$"
        ))?;
        self.sql("CREATE PUBLICATION pub FOR ALL TABLES")?;
        self.sql("VACUUM (FREEZE, ANALYZE)")?;
        self.sql("CHECKPOINT")?;
        Ok(())
    }

    /// What has to be there before the log is written.
    pub fn prepare(&self, log: Log) -> Result<()> {
        let Log::FullUpdates(rows) = log else { return Ok(()) };
        // Hashes in a row do not compress: 3 kB are out of line.
        let text = "(SELECT string_agg(md5((n * 1000 + i)::text), '') FROM generate_series(1, 96) i)";
        self.sql("ALTER TABLE t REPLICA IDENTITY FULL")?;
        self.sql(&format!(
            "INSERT INTO t (id, number, name, note) SELECT n, 0, 'a name', {text} FROM generate_series(1, {rows}::bigint) n"
        ))?;
        self.sql("VACUUM (FREEZE, ANALYZE) t")?;
        Ok(())
    }

    /// CPU seconds of the server's process that reads a slot.
    pub fn walsender_cpu(&self, slot: &str) -> Result<f64> {
        let pid = self.sql(&format!("SELECT active_pid FROM pg_replication_slots WHERE slot_name = '{slot}'"))?;
        cpu_of(pid.parse()?)
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
            Log::FullUpdates(_) => {
                self.sql("UPDATE t SET number = number + 1")?;
            }
        }
        let end = self.sql("SELECT pg_current_wal_insert_lsn()")?.parse()?;
        self.sql("INSERT INTO mark VALUES (1)")?;
        self.sql("CHECKPOINT")?;
        Ok(end)
    }

    /// Where the log ends, with something behind it.
    pub fn end(&self) -> Result<Lsn> {
        let end = self.sql("SELECT pg_current_wal_insert_lsn()")?.parse()?;
        self.sql("SELECT pg_logical_emit_message(true, 'end', '')")?;
        Ok(end)
    }

    /// Makes room for the next one.
    pub fn remove(self) -> Result<()> {
        self.source.cluster.psql("postgres", &format!("DROP DATABASE {} WITH (FORCE)", self.name))?;
        Ok(())
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

    /// Seconds that so many `psql` at once take for equal shares of the table, their start
    /// included.
    pub fn psql_copy(&self, connections: u64) -> Result<f64> {
        if connections == 1 {
            return timed(&mut [self.psql("COPY t TO STDOUT")]);
        }
        let pages: u64 = self.sql("SELECT pg_relation_size('t') / current_setting('block_size')::int")?.parse()?;
        let share = pages.div_ceil(connections);
        let mut all: Vec<Command> = (0..connections)
            .map(|n| {
                let (from, to) = (n * share, (n + 1) * share);
                self.psql(&format!("COPY (SELECT * FROM t WHERE ctid >= '({from},0)' AND ctid < '({to},0)') TO STDOUT"))
            })
            .collect();
        timed(&mut all)
    }

    /// The same for the tables of [`Database::fill_many`], a share of them in each session.
    pub fn psql_copy_many(&self, tables: u64, connections: u64) -> Result<f64> {
        let mut all: Vec<Command> = (0..connections)
            .map(|share| {
                let of_share = (1..=tables).filter(|n| n % connections == share);
                self.psql(&of_share.map(|n| format!("COPY t{n} TO STDOUT;")).collect::<String>())
            })
            .collect();
        timed(&mut all)
    }

    fn psql(&self, sql: &str) -> Command {
        let mut command = Command::new("psql");
        command.args(["-X", "-q", "-d", &self.url(), "-c", sql]);
        command
    }

    /// Seconds that `pg_recvlogical` takes for the log up to `end`, its start included.
    pub fn recvlogical(&self, slot: &str, end: Lsn) -> Result<f64> {
        let mut command = Command::new("pg_recvlogical");
        command.args(["-d", &self.url(), "-S", slot, "--start", "--no-loop", "--endpos", &end.to_string()]).args([
            "-o",
            "proto_version=1",
            "-o",
            "publication_names=pub",
            "-f",
            "/dev/null",
        ]);
        timed(&mut [command])
    }
}

/// Seconds that commands take which run at once.
fn timed(commands: &mut [Command]) -> Result<f64> {
    let start = Instant::now();
    let spawn =
        |command: &mut Command| command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn();
    let children: Vec<_> = commands.iter_mut().map(spawn).collect::<std::io::Result<_>>()?;
    let ended: Vec<_> = children.into_iter().map(|child| child.wait_with_output()).collect::<std::io::Result<_>>()?;
    let seconds = start.elapsed().as_secs_f64();
    for (command, output) in commands.iter().zip(ended) {
        if !output.status.success() {
            return Err(format!("{command:?}: {}", String::from_utf8_lossy(&output.stderr)).into());
        }
    }
    Ok(seconds)
}
