//! The process that is measured.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use tempfile::TempDir;
use tidegate::control;
use tidegate::position::Lsn;
use tidegate::status::{DelaySummary, DestinationStatus, StatusReport, TableStatus};
use tidegate::store::TableState;

use crate::Result;
use crate::source::Database;

/// How often `status` is asked: what the end of a work is exact to.
const LOOK: Duration = Duration::from_millis(5);
/// Longer than anything here may take.
const PATIENCE: Duration = Duration::from_secs(600);
/// Clock ticks of `/proc/<pid>/stat`, which Linux fixes (proc(5): `USER_HZ`).
const TICKS: f64 = 100.0;

/// What a work cost the host.
#[derive(Clone, Copy)]
pub struct Measured {
    /// From the start of the process to the start of the work, in seconds.
    pub before: f64,
    /// The work, in seconds.
    pub seconds: f64,
    /// CPU of all its threads meanwhile, in seconds.
    pub cpu: f64,
    /// The most memory the process had resident, in MiB.
    pub peak: f64,
}

/// A pipeline into the counting plugin.
pub struct Host {
    directory: TempDir,
    name: String,
    runtime: tokio::runtime::Runtime,
    running: Option<Running>,
}

/// What a pipeline is like.
pub struct Setup {
    /// More lines for `[pipeline]`.
    pub pipeline: String,
    /// More lines for `[source]`.
    pub source: String,
    pub destinations: String,
}

impl Default for Setup {
    /// Into the counting plugin.
    fn default() -> Setup {
        Setup { pipeline: String::new(), source: String::new(), destinations: Setup::count("count") }
    }
}

impl Setup {
    /// A destination that counts.
    pub fn count(name: &str) -> String {
        format!("[[destination]]\nname = \"{name}\"\nplugin = \"count\"\nmode = \"changes\"\ntables = [\"*.*\"]\n\n")
    }

    /// A destination that mirrors.
    pub fn postgres(name: &str, mirror: &Database<'_>) -> String {
        format!(
            "[[destination]]\nname = \"{name}\"\nplugin = \"postgres\"\nmode = \"merge\"\ntables = [\"*.*\"]\n\
             [destination.settings]\nhost = \"127.0.0.1\"\nport = {port}\ndatabase = \"{database}\"\nuser = \"postgres\"\nsslmode = \"disable\"\n\
             [destination.grant]\nnetwork = [\"127.0.0.1:{port}\"]\nsecrets = {{ password = {{ from = \"env:TIDEGATE_BENCH_PASSWORD\", readable = true }} }}\n",
            port = mirror.port(),
            database = mirror.name(),
        )
    }
}

struct Running {
    child: Child,
    since: Instant,
    log: mpsc::Receiver<(Instant, String)>,
    said: Vec<String>,
}

impl Host {
    pub fn new(database: &Database<'_>, name: &str) -> Result<Host> {
        Host::with(database, name, &Setup::default())
    }

    pub fn with(database: &Database<'_>, name: &str, setup: &Setup) -> Result<Host> {
        let directory = tempfile::tempdir()?;
        let config = format!(
            "[pipeline]\nname = \"{name}\"\nstate = \"state\"\nplugins = \"{plugins}\"\n{pipeline}\n\
             [source]\nurl = \"{url}\"\npublication = \"pub\"\n{source}\n\n{destinations}",
            plugins = plugins(directory.path())?.display(),
            pipeline = setup.pipeline,
            source = setup.source,
            url = database.url(),
            destinations = setup.destinations,
        );
        std::fs::write(directory.path().join("tidegate.toml"), config)?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        Ok(Host { directory, name: name.to_owned(), runtime, running: None })
    }

    pub fn slot(&self) -> String {
        format!("tidegate_{}", self.name)
    }

    pub fn start(&mut self) -> Result<()> {
        let since = Instant::now();
        let mut child = Command::new(binary()?)
            .args(["run", "--log", "json", "--log-level", "info", "--config"])
            .arg(self.directory.path().join("tidegate.toml"))
            .env("TIDEGATE_BENCH_PASSWORD", "unused")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()?;
        let (lines, log) = mpsc::channel();
        let stderr = child.stderr.take().ok_or("the process has no standard error")?;
        std::thread::spawn(move || {
            for line in BufReader::new(stderr).lines().map_while(|line| line.ok()) {
                if lines.send((Instant::now(), line)).is_err() {
                    break;
                }
            }
        });
        self.running = Some(Running { child, since, log, said: Vec::new() });
        Ok(())
    }

    pub fn stop(&mut self) -> Result<()> {
        let Some(mut running) = self.running.take() else { return Ok(()) };
        let pid = running.child.id().to_string();
        Command::new("kill").args(["-TERM", &pid]).status()?;
        let status = running.child.wait()?;
        if status.success() { Ok(()) } else { Err(format!("tidegate ended with {status}\n{}", running.log()).into()) }
    }

    /// Waits until so many tables are at every destination, all of them live.
    pub fn wait_ready(&mut self, tables: usize) -> Result<()> {
        self.wait("all tables are ready", |status| {
            let known = |destination: &DestinationStatus| destination.tables.len() == tables;
            let all = !status.destinations.is_empty() && status.destinations.iter().all(known);
            (all && status.all_ready()).then_some(())
        })
        .map(|_| ())
    }

    /// From the first data-sync until all rows of all tables are durable.
    pub fn measure_copy(&mut self, tables: usize, rows: u64) -> Result<Measured> {
        let start = self.wait("the copy begins", |status| {
            let known = &status.destinations.first()?.tables;
            known.iter().any(|table| table.state != TableState::Init).then_some(())
        })?;
        let cpu = self.cpu()?;
        let (end, copied) = self.wait("the tables are copied", |status| {
            let known = &status.destinations.first()?.tables;
            let is_copied = |table: &TableStatus| !matches!(table.state, TableState::Init | TableState::DataSync);
            (known.len() == tables && known.iter().all(is_copied)).then(|| known.clone())
        })?;
        let sum: u64 = copied.iter().map(|table| table.rows_copied).sum();
        if sum != rows {
            let errors: Vec<_> = copied.iter().filter_map(|table| table.error.as_ref()).collect();
            return Err(format!("{sum} rows were copied of {rows}: {errors:?}").into());
        }
        self.measured(start.0, end, cpu)
    }

    /// From the start of the stream until every checkpoint is past `end`.
    pub fn measure_stream(&mut self, end: Lsn, changes: u64) -> Result<Measured> {
        let start = self.wait_log("\"streaming\"")?;
        let cpu = self.cpu()?;
        let at = self.wait("the log is taken", |status| past(status, end))?;
        let measured = self.measured(start, at.0, cpu)?;
        // Counts are told a little later.
        self.wait("all changes are counted", |status| {
            status.destinations.iter().all(|destination| destination.changes == changes).then_some(())
        })?;
        Ok(measured)
    }

    /// Waits until a row is durable, and says when it was seen.
    pub fn wait_first_row(&mut self) -> Result<Instant> {
        let has_row = |destination: &DestinationStatus| destination.tables.iter().any(|table| table.rows_copied > 0);
        self.wait("a row is durable", |status| status.destinations.iter().any(has_row).then_some(())).map(|(at, ())| at)
    }

    /// From commit to durable, once so many changes are durable.
    pub fn delay(&mut self, changes: u64) -> Result<DelaySummary> {
        self.wait("all changes are durable", |status| {
            let destination = status.destinations.first()?;
            destination.delay_ms.filter(|_| destination.changes >= changes)
        })
        .map(|(_, delay)| delay)
    }

    /// Waits until every checkpoint is past `end`.
    pub fn wait_checkpoint(&mut self, end: Lsn) -> Result<()> {
        self.wait("the log is taken", |status| past(status, end)).map(|_| ())
    }

    /// Waits until a table is live or has stopped, and says which.
    pub fn wait_outcome(&mut self, table: &str) -> Result<String> {
        let outcome = |known: &TableStatus| match known.state {
            TableState::Ready => Some("arrived".to_owned()),
            TableState::Errored => Some(known.error.as_ref().map_or_else(String::new, |error| error.code.clone())),
            _ => None,
        };
        self.wait("the table is live or has stopped", |status| {
            status.destinations.first()?.tables.iter().find(|known| known.table == table).and_then(outcome)
        })
        .map(|(_, outcome)| outcome)
    }

    /// Waits until a row has arrived, or its table has stopped.
    pub fn wait_row(&mut self, table: &str, end: Lsn) -> Result<String> {
        self.wait_checkpoint(end)?;
        self.wait_outcome(table)
    }

    fn measured(&mut self, start: Instant, end: Instant, cpu: f64) -> Result<Measured> {
        let cpu = self.cpu()? - cpu;
        let peak = self.peak()?;
        let running = self.running()?;
        Ok(Measured { before: (start - running.since).as_secs_f64(), seconds: (end - start).as_secs_f64(), cpu, peak })
    }

    /// The most memory that the process has had resident so far, in MiB.
    pub fn peak(&mut self) -> Result<f64> {
        self.memory("VmHWM:")
    }

    /// What the process has resident now, in MiB.
    pub fn resident(&mut self) -> Result<f64> {
        self.memory("VmRSS:")
    }

    fn memory(&mut self, key: &str) -> Result<f64> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.running()?.child.id()))?;
        let kilobytes: f64 = status
            .lines()
            .find_map(|line| line.strip_prefix(key)?.trim().strip_suffix("kB")?.trim().parse().ok())
            .ok_or_else(|| format!("no {key} in /proc/<pid>/status"))?;
        Ok(kilobytes / 1024.0)
    }

    /// CPU seconds of the process so far.
    pub fn cpu(&mut self) -> Result<f64> {
        cpu_of(self.running()?.child.id())
    }

    fn wait_log(&mut self, what: &str) -> Result<Instant> {
        let running = self.running()?;
        loop {
            match running.log.recv_timeout(PATIENCE) {
                Ok((at, line)) => {
                    let found = line.contains(what);
                    running.said.push(line);
                    if found {
                        return Ok(at);
                    }
                }
                Err(_) => return Err(format!("{what} was never logged\n{}", running.log()).into()),
            }
        }
    }

    /// Waits until `status` shows something, and says when it was seen.
    fn wait<T>(&mut self, what: &str, look: impl Fn(&StatusReport) -> Option<T>) -> Result<(Instant, T)> {
        let state = self.directory.path().join("state");
        let begun = Instant::now();
        loop {
            let asked = Instant::now();
            // Before the socket is there, there is nothing to see.
            let status = if state.exists() { self.runtime.block_on(control::status(&state))? } else { None };
            let now = Instant::now();
            if let Some(found) = status.as_ref().and_then(&look) {
                return Ok((now, found));
            }
            let running = self.running()?;
            if let Some(ended) = running.child.try_wait()? {
                return Err(format!("waiting until {what}: tidegate ended with {ended}\n{}", running.log()).into());
            }
            if begun.elapsed() > PATIENCE {
                return Err(format!("waiting until {what}: {status:#?}\n{}", running.log()).into());
            }
            // With ten thousand tables the answer costs more than what is measured.
            std::thread::sleep(LOOK.max((now - asked) * 20));
        }
    }

    fn running(&mut self) -> Result<&mut Running> {
        self.running.as_mut().ok_or_else(|| "the process does not run".into())
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        if let Some(running) = &mut self.running {
            // It may have ended by itself, which is as good.
            let _ = running.child.kill();
            let _ = running.child.wait();
        }
    }
}

impl Running {
    /// What the process has said.
    fn log(&mut self) -> String {
        self.said.extend(self.log.try_iter().map(|(_, line)| line));
        self.said.join("\n")
    }
}

/// The binary that is measured: beside this one, or `TIDEGATE_BIN`.
fn binary() -> Result<PathBuf> {
    match std::env::var_os("TIDEGATE_BIN") {
        Some(binary) => Ok(binary.into()),
        None => Ok(std::env::current_exe()?.with_file_name("tidegate")),
    }
}

/// CPU seconds of a process so far.
pub fn cpu_of(pid: u32) -> Result<f64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    // The name, in parentheses, may contain anything; utime and stime are fields 14
    // and 15, and what follows the name begins with field 3.
    let (_, rest) = stat.rsplit_once(')').ok_or("no name in /proc/<pid>/stat")?;
    let ticks: f64 = rest.split_whitespace().skip(11).take(2).filter_map(|field| field.parse::<f64>().ok()).sum();
    Ok(ticks / TICKS)
}

/// Whether every checkpoint is past `end`.
fn past(status: &StatusReport, end: Lsn) -> Option<()> {
    let is_past = |destination: &DestinationStatus| destination.checkpoint.is_some_and(|at| at >= end);
    (!status.destinations.is_empty() && status.destinations.iter().all(is_past)).then_some(())
}

/// A directory of links to the plugins that are measured: what `make fixtures` and
/// `make plugins` leave.
fn plugins(directory: &Path) -> Result<PathBuf> {
    let plugins = directory.join("plugins");
    std::fs::create_dir(&plugins)?;
    for (variable, name) in [("TIDEGATE_FIXTURES", "count.wasm"), ("TIDEGATE_PLUGINS", "postgres.wasm")] {
        let built =
            PathBuf::from(std::env::var_os(variable).ok_or(format!("{variable} is not set: run `make bench`"))?);
        std::os::unix::fs::symlink(std::path::absolute(built.join(name))?, plugins.join(name))?;
    }
    Ok(plugins)
}
