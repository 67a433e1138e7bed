//! The process that is killed.

use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process, set_parent_process_death_signal};
use tidegate::status::StatusReport;

use crate::Result;

/// A pipeline's process, while there is one.
pub struct Host {
    directory: PathBuf,
    child: Option<Child>,
    runtime: tokio::runtime::Runtime,
}

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// By SIGKILL: ours, or its own.
    Killed,
    /// With an exit code.
    Exited(i32),
}

impl Ended {
    fn of(status: ExitStatus) -> Ended {
        match status.signal() {
            Some(9) => Ended::Killed,
            _ => Ended::Exited(status.code().unwrap_or(-1)),
        }
    }
}

impl Host {
    /// Of a directory with a `tidegate.toml` and a state directory `state`.
    pub fn new(directory: &Path) -> Result<Host> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        Ok(Host { directory: directory.to_owned(), child: None, runtime })
    }

    fn command(&self, arguments: &[&str]) -> Result<Command> {
        let mut command = Command::new(binary()?);
        command.args(arguments).arg("--config").arg(self.directory.join("tidegate.toml"));
        command.env("TIDEGATE_TEST_PASSWORD", "unused").env_remove("TIDEGATE_FAILPOINT").stdin(Stdio::null());
        Ok(command)
    }

    /// Starts it, to die at a place if one is named.
    pub fn start(&mut self, failpoint: Option<&str>) -> Result<()> {
        let log = std::fs::File::options().create(true).append(true).open(self.log_path())?;
        let mut command = self.command(&["run", "--log", "human", "--log-level", "info"])?;
        if let Some(failpoint) = failpoint {
            command.env("TIDEGATE_FAILPOINT", failpoint);
        }
        command.stdout(Stdio::null()).stderr(log);
        // SAFETY: the closure makes one system call and touches no memory of the parent.
        unsafe {
            command.pre_exec(|| Ok(set_parent_process_death_signal(Some(Signal::KILL))?));
        }
        self.child = Some(command.spawn()?);
        Ok(())
    }

    pub fn pid(&self) -> Option<u32> {
        self.child.as_ref().map(Child::id)
    }

    /// How it ended, if it has.
    pub fn ended(&mut self) -> Result<Option<Ended>> {
        let Some(child) = &mut self.child else { return Err("the process was not started".into()) };
        let ended = child.try_wait()?;
        if ended.is_some() {
            self.child = None;
        }
        Ok(ended.map(Ended::of))
    }

    /// Kills it, if it runs.
    pub fn kill(&mut self) -> Result<()> {
        if let Some(mut child) = self.child.take() {
            child.kill()?;
            child.wait()?;
        }
        Ok(())
    }

    /// Asks it to end.
    pub fn terminate(&self) -> Result<()> {
        if let Some(pid) = self.pid().and_then(|pid| Pid::from_raw(pid as i32)) {
            kill_process(pid, Signal::TERM)?;
        }
        Ok(())
    }

    /// Waits until it has ended.
    pub fn wait(&mut self, patience: Duration) -> Result<Option<Ended>> {
        let start = Instant::now();
        loop {
            if let Some(ended) = self.ended()? {
                return Ok(Some(ended));
            }
            if start.elapsed() > patience {
                return Ok(None);
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Another command on the same pipeline.
    pub fn run(&self, arguments: &[&str]) -> Result<()> {
        let output = self.command(arguments)?.output()?;
        match output.status.success() {
            true => Ok(()),
            false => Err(format!("tidegate {arguments:?}: {}", String::from_utf8_lossy(&output.stderr)).into()),
        }
    }

    /// What it says of itself, if it runs and listens.
    pub fn status(&self) -> Option<StatusReport> {
        self.runtime.block_on(tidegate::control::status(&self.directory.join("state"))).ok().flatten()
    }

    pub fn log_path(&self) -> PathBuf {
        self.directory.join("tidegate.log")
    }

    pub fn log(&self) -> String {
        std::fs::read_to_string(self.log_path()).unwrap_or_default()
    }

    /// The last lines of its log.
    pub fn last_words(&self, lines: usize) -> String {
        let log = self.log();
        let all: Vec<&str> = log.lines().collect();
        all[all.len().saturating_sub(lines)..].join("\n")
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        // Whoever drops it wants it gone, and has said why.
        let _ = self.kill();
    }
}

fn binary() -> Result<PathBuf> {
    if let Some(binary) = std::env::var_os("TIDEGATE_BIN") {
        return Ok(binary.into());
    }
    let binary = std::env::current_exe()?.with_file_name("tidegate");
    match binary.exists() {
        true => Ok(binary),
        false => Err(format!("{} is missing: run `cargo build -p tidegate` first", binary.display()).into()),
    }
}
