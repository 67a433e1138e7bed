//! The pipeline of the demo: this binary again, as a process of its own.

use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::control;
use crate::error::{Error, Result};
use crate::position::Lsn;
use crate::scratch::{send, spawn_bound, wait};
use crate::status::{StatusError, StatusReport};
use crate::store::TableState;

/// How often the pipeline is asked how far it is: also how exact the times are.
const ASK: Duration = Duration::from_millis(20);
/// Compiling the plugins and connecting, on a slow machine.
const START_TIMEOUT: Duration = Duration::from_secs(120);
/// Longer without any progress is a pipeline that hangs.
const STALL: Duration = Duration::from_secs(120);
/// A clean stop has its own bound of 20 s in the pipeline.
const STOP_TIMEOUT: Duration = Duration::from_secs(30);
/// The end of the log that an error shows.
const TAIL_BYTES: u64 = 4 * 1024;

/// A running pipeline; stopped when dropped.
pub(super) struct Pipeline {
    child: Child,
    state: PathBuf,
    log: PathBuf,
}

impl Pipeline {
    /// Starts `tidegate run` with this configuration; its log goes to a file beside it.
    pub(super) fn start(config: &Path, state: &Path, format: &str) -> Result<Pipeline> {
        let failed =
            |error: std::io::Error| Error::permanent("demo.pipeline", format!("cannot start tidegate: {error}"));
        let log = config.with_file_name("tidegate.log");
        let mut command = Command::new(std::env::current_exe().map_err(failed)?);
        command.arg("--config").arg(config).args(["--log", format, "run"]);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(File::create(&log).map_err(failed)?);
        let child = spawn_bound(command, Signal::TERM).map_err(failed)?;
        Ok(Pipeline { child, state: state.to_owned(), log })
    }

    pub(super) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(super) fn log(&self) -> &Path {
        &self.log
    }

    /// Its report; none before it listens.
    ///
    /// # Errors
    /// `demo.pipeline` if it has ended or a part of it has failed.
    pub(super) async fn report(&mut self) -> Result<Option<StatusReport>> {
        match self.child.try_wait() {
            Ok(None) => {}
            Ok(Some(status)) => return Err(self.failed(&format!("it ended with {status}"))),
            Err(error) => return Err(self.failed(&error.to_string())),
        }
        let Some(report) = control::status(&self.state).await? else { return Ok(None) };
        match first_error(&report) {
            Some((who, error)) => Err(self.failed(&format!("{who}: {} ({})", error.message, error.code))),
            None => Ok(Some(report)),
        }
    }

    fn failed(&self, why: &str) -> Error {
        let tail = self.tail().unwrap_or_default();
        Error::permanent("demo.pipeline", format!("the pipeline failed: {why}\n{}", tail.trim_end()))
            .next("See what its log says above; --dir keeps all of it.")
    }

    fn tail(&self) -> std::io::Result<String> {
        let mut file = File::open(&self.log)?;
        let length = file.metadata()?.len();
        file.seek(SeekFrom::Start(length.saturating_sub(TAIL_BYTES)))?;
        let mut bytes = Vec::new();
        file.take(TAIL_BYTES).read_to_end(&mut bytes)?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// Waits until `done` says so of a report, and tells `seen` of each.
    pub(super) async fn until(
        &mut self,
        what: &str,
        mut done: impl FnMut(&StatusReport) -> bool,
    ) -> Result<StatusReport> {
        let mut last = (progress(&StatusReport::default()), Instant::now());
        loop {
            let report = self.report().await?;
            if let Some(report) = &report {
                if done(report) {
                    return Ok(report.clone());
                }
                let now = progress(report);
                if now != last.0 {
                    last = (now, Instant::now());
                }
            }
            let bound = if report.is_some() { STALL } else { START_TIMEOUT };
            if last.1.elapsed() > bound {
                return Err(self.failed(&format!("no progress for {} s while waiting {what}", bound.as_secs())));
            }
            tokio::time::sleep(ASK).await;
        }
    }

    /// Stops it cleanly.
    pub(super) fn stop(&mut self) -> Result<()> {
        send(&self.child, Signal::TERM);
        match wait(&mut self.child, STOP_TIMEOUT) {
            Ok(Some(status)) if status.success() => Ok(()),
            Ok(Some(status)) => Err(self.failed(&format!("it ended with {status} when it was told to stop"))),
            Ok(None) => Err(self.failed(&format!("it did not stop within {} s", STOP_TIMEOUT.as_secs()))),
            Err(error) => Err(self.failed(&error.to_string())),
        }
    }
}

impl Drop for Pipeline {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(Some(_))) {
            return;
        }
        send(&self.child, Signal::TERM);
        if !matches!(wait(&mut self.child, STOP_TIMEOUT), Ok(Some(_))) {
            // What it did not drain does not matter: its databases go with it.
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

/// What waits for somebody: nobody comes in a demo.
fn first_error(report: &StatusReport) -> Option<(String, &StatusError)> {
    report.destinations.iter().find_map(|destination| {
        let own = destination.error.as_ref().filter(|_| destination.state == crate::status::DestinationState::Errored);
        if let Some(error) = own {
            return Some((destination.name.clone(), error));
        }
        destination
            .tables
            .iter()
            .filter(|table| table.state == TableState::Errored)
            .find_map(|table| Some((format!("{} {}", destination.name, table.table), table.error.as_ref()?)))
    })
}

/// What grows as long as the pipeline gets on.
fn progress(report: &StatusReport) -> (Vec<Option<Lsn>>, u64, usize) {
    let checkpoints = report.destinations.iter().map(|destination| destination.checkpoint).collect();
    let tables = || report.destinations.iter().flat_map(|destination| &destination.tables);
    let copied = tables().map(|table| table.rows_copied).sum();
    let ready = tables().filter(|table| table.state == TableState::Ready).count();
    (checkpoints, copied, ready)
}

/// Makes the directory that the demo's files go to.
pub(super) fn make(directory: &Path) -> Result<()> {
    fs::create_dir_all(directory).map_err(|error| {
        Error::permanent("demo.directory", format!("cannot make {}: {error}", directory.display()))
            .next("Name another directory with --dir.")
    })
}
