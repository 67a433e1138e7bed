//! `tidegate run`.

use std::convert::Infallible;
use std::future::Future;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;

use super::progress::CopyBars;
use crate::config::Config;
use crate::control::ControlServer;
use crate::deliver::members::{Handle, Request};
use crate::deliver::pipeline::{Pipeline, StopReason};
use crate::error::{Error, Exit, Result};
use crate::status::StatusBoard;

/// Beyond the drain that the pipeline keeps to itself: closing connections and plugins.
const AFTER_DRAIN: Duration = Duration::from_secs(10);

#[derive(Debug, clap::Args)]
#[command(after_help = "The first signal stops cleanly, within `drain` of [pipeline]; the second at once.\n\
    SIGHUP takes up destinations that were added to the configuration.\n\n\
    Example:\n  tidegate --config shop.toml run --log json --log-level info")]
pub(super) struct Args {}

pub(super) async fn run(_args: Args, path: &Path) -> Result<ExitCode> {
    let config = Config::load(path)?;
    let drain = config.pipeline.drain;
    let mut signals = Signals::listen()?;
    let (stop, stopped) = watch::channel(false);
    let pipeline = drive(config, path, stopped);
    tokio::pin!(pipeline);
    let name = tokio::select! {
        outcome = &mut pipeline => return outcome,
        name = signals.next() => name,
    };
    tracing::info!(signal = name, drain_s = drain.as_secs(), "stopping: what is accepted is made durable first");
    // The receiver is gone only if the pipeline has just ended, and that is what we wait for.
    let _ = stop.send(true);
    tokio::select! {
        outcome = &mut pipeline => outcome,
        name = signals.next() => {
            tracing::warn!(signal = name, "stopped at once: what was not durable is sent again at the next start");
            std::process::exit(Exit::Failed as i32);
        }
        () = tokio::time::sleep(drain + AFTER_DRAIN) => {
            Err(Error::permanent("run.drain", format!("the pipeline did not stop within {} s", (drain + AFTER_DRAIN).as_secs()))
                .next("Nothing is lost: what was not durable is sent again. See above which destination did not answer."))
        }
    }
}

/// As many open files as the process may have at all: 1,024, where it starts, are soon
/// shared out among the files and connections of several plugins.
fn raise_open_files() {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    if let Err(error) = setrlimit(Resource::Nofile, limit) {
        tracing::debug!(%error, "the limit of open files stays as it is");
    }
}

/// Starts the pipeline with all that belongs to a process of it, and ends with it.
async fn drive(config: Config, path: &Path, stopped: watch::Receiver<bool>) -> Result<ExitCode> {
    raise_open_files();
    let board = StatusBoard::new(&config.pipeline.name);
    let state = config.pipeline.state.clone();
    // Takes the state directory's lock: the socket below is ours from here on.
    let pipeline = Pipeline::start(config, board.clone()).await?;
    let control = ControlServer::bind(&state)?;
    let (handle, store) = (pipeline.handle(), pipeline.store());
    let reloads = reload_on_hangup(path, handle.clone())?;
    let reason = tokio::select! {
        reason = pipeline.run(stopped) => reason?,
        never = control.serve(board.clone(), handle, store) => match never {},
        never = reloads => match never {},
        never = CopyBars::follow(board) => match never {},
    };
    match reason {
        StopReason::Drained => tracing::info!("stopped: everything that was read is durable"),
        StopReason::DrainTimedOut => {
            tracing::warn!("stopped: the drain's time ran out, and the rest is read again at the next start");
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// SIGHUP: destinations that were added to the configuration begin.
fn reload_on_hangup(path: &Path, pipeline: Handle) -> Result<impl Future<Output = Infallible>> {
    let mut hangup = listen(SignalKind::hangup())?;
    Ok(async move {
        loop {
            if hangup.recv().await.is_none() {
                return std::future::pending().await;
            }
            let reloaded = match Config::load(path) {
                Ok(config) => pipeline.ask(Request::Reload(Box::new(config))).await,
                Err(error) => Err(error),
            };
            match reloaded {
                Ok(done) => tracing::info!("reloaded: {done}"),
                Err(error) => tracing::error!(
                    code = error.code(),
                    next = error.next_step().unwrap_or_default(),
                    "the configuration was not taken up, and all goes on as it was: {error}"
                ),
            }
        }
    })
}

fn listen(kind: SignalKind) -> Result<Signal> {
    signal(kind).map_err(|error| Error::permanent("run.signals", format!("cannot listen for signals: {error}")))
}

/// What asks a process to stop.
struct Signals {
    interrupt: Signal,
    terminate: Signal,
}

impl Signals {
    fn listen() -> Result<Signals> {
        Ok(Signals { interrupt: listen(SignalKind::interrupt())?, terminate: listen(SignalKind::terminate())? })
    }

    async fn next(&mut self) -> &'static str {
        tokio::select! {
            _ = self.interrupt.recv() => "SIGINT",
            _ = self.terminate.recv() => "SIGTERM",
        }
    }
}
