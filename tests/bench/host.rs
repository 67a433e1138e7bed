//! The process that is measured.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use tempfile::TempDir;
use tidegate::control;
use tidegate::position::Lsn;
use tidegate::status::{StatusReport, TableStatus};
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

struct Running {
    child: Child,
    since: Instant,
    log: mpsc::Receiver<(Instant, String)>,
    said: Vec<String>,
}

impl Host {
    pub fn new(database: &Database<'_>, name: &str) -> Result<Host> {
        let directory = tempfile::tempdir()?;
        let config = format!(
            "[pipeline]\nname = \"{name}\"\nstate = \"state\"\nplugins = \"{plugins}\"\n\n\
             [source]\nurl = \"{url}\"\npublication = \"pub\"\n\n\
             [[destination]]\nname = \"count\"\nplugin = \"count\"\nmode = \"changes\"\ntables = [\"*.*\"]\n",
            plugins = fixtures()?.display(),
            url = database.url(),
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

    /// Waits until so many tables are there, all of them live.
    pub fn wait_ready(&mut self, tables: usize) -> Result<()> {
        self.wait("all tables are ready", |status| {
            let known = status.destinations.first()?.tables.len();
            (known == tables && status.all_ready()).then_some(())
        })
        .map(|_| ())
    }

    /// From the table's data-sync until all its rows are durable.
    pub fn measure_copy(&mut self, table: &str, rows: u64) -> Result<Measured> {
        let of = |status: &StatusReport| -> Option<TableStatus> {
            status.destinations.first()?.tables.iter().find(|known| known.table == table).cloned()
        };
        let start = self.wait("the copy begins", |status| of(status).filter(|now| now.state != TableState::Init))?.0;
        let cpu = self.cpu()?;
        let (end, copied) = self.wait("the table is copied", |status| {
            of(status).filter(|now| !matches!(now.state, TableState::Init | TableState::DataSync))
        })?;
        if copied.rows_copied != rows {
            return Err(format!("{} rows were copied of {rows}: {:?}", copied.rows_copied, copied.error).into());
        }
        self.measured(start, end, cpu)
    }

    /// From the start of the stream until the checkpoint is past `end`.
    pub fn measure_stream(&mut self, end: Lsn, changes: u64) -> Result<Measured> {
        let start = self.wait_log("\"streaming\"")?;
        let cpu = self.cpu()?;
        let at = self.wait("the log is taken", |status| {
            status.destinations.first()?.checkpoint.filter(|checkpoint| *checkpoint >= end)
        })?;
        let measured = self.measured(start, at.0, cpu)?;
        // Counts are told a little later.
        self.wait("all changes are counted", |status| (status.destinations.first()?.changes == changes).then_some(()))?;
        Ok(measured)
    }

    fn measured(&mut self, start: Instant, end: Instant, cpu: f64) -> Result<Measured> {
        let cpu = self.cpu()? - cpu;
        let running = self.running()?;
        let status = std::fs::read_to_string(format!("/proc/{}/status", running.child.id()))?;
        let peak: f64 = status
            .lines()
            .find_map(|line| line.strip_prefix("VmHWM:")?.trim().strip_suffix("kB")?.trim().parse().ok())
            .ok_or("no VmHWM in /proc/<pid>/status")?;
        Ok(Measured {
            before: (start - running.since).as_secs_f64(),
            seconds: (end - start).as_secs_f64(),
            cpu,
            peak: peak / 1024.0,
        })
    }

    /// CPU seconds of the process so far.
    fn cpu(&mut self) -> Result<f64> {
        let pid = self.running()?.child.id();
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
        // The name, in parentheses, may contain anything; utime and stime are fields 14
        // and 15, and what follows the name begins with field 3.
        let (_, rest) = stat.rsplit_once(')').ok_or("no name in /proc/<pid>/stat")?;
        let ticks: f64 = rest.split_whitespace().skip(11).take(2).filter_map(|field| field.parse::<f64>().ok()).sum();
        Ok(ticks / TICKS)
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
            std::thread::sleep(LOOK);
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

/// Where `make fixtures` leaves the counting plugin.
fn fixtures() -> Result<PathBuf> {
    let directory = std::env::var_os("TIDEGATE_FIXTURES").ok_or("TIDEGATE_FIXTURES is not set: run `make bench`")?;
    Ok(directory.into())
}
