//! Logs go to standard error: human, or JSON for a collector.

use std::io::{self, Write};

use clap::ValueEnum;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::MakeWriter;

use super::{paint, progress};
use crate::error::{Error, Result};

/// Others' crates say little that a user of ours can act on.
const QUIET: &str = "wasmtime=warn,cranelift=warn,tokio_postgres=warn,rustls=warn";

/// How logs look.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(super) enum LogFormat {
    /// A line a person reads
    #[default]
    Human,
    /// An object per line
    Json,
}

impl LogFormat {
    pub(super) fn as_str(self) -> &'static str {
        match self {
            LogFormat::Human => "human",
            LogFormat::Json => "json",
        }
    }
}

/// The options about logs that every command has.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct LogOptions {
    /// How logs look
    #[arg(long, global = true, value_enum, value_name = "FORMAT", default_value_t)]
    pub(super) log: LogFormat,
    /// error, warn, info, debug or trace; also for parts, e.g. info,tidegate::source=debug
    #[arg(long, global = true, value_name = "LEVEL", env = "TIDEGATE_LOG")]
    log_level: Option<String>,
}

/// Starts logging for the process.
///
/// # Errors
/// `cli.log-level` if the level cannot be read.
pub(super) fn init(options: &LogOptions, default_level: &str) -> Result<()> {
    let level = options.log_level.as_deref().unwrap_or(default_level);
    let filter = EnvFilter::try_new(format!("{QUIET},{level}")).map_err(|error| {
        Error::usage("cli.log-level", format!("`{level}` is not a log level: {error}"))
            .next("Write error, warn, info, debug or trace, or `part=level` with commas between.")
    })?;
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(Stderr);
    let started = match options.log {
        LogFormat::Human => builder.with_ansi(paint::coloured(&io::stderr())).with_target(false).try_init(),
        LogFormat::Json => builder.json().flatten_event(true).with_ansi(false).try_init(),
    };
    started.map_err(|error| Error::permanent("cli.log-level", format!("cannot start logging: {error}")))
}

/// Standard error, shared with the progress bars: they step aside for a line.
struct Stderr;

impl<'a> MakeWriter<'a> for Stderr {
    type Writer = Line;

    fn make_writer(&'a self) -> Line {
        Line(Vec::new())
    }
}

/// One event, written whole when it is complete.
struct Line(Vec<u8>);

impl Write for Line {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        // Where standard error is gone there is nobody to tell.
        progress::aside(|| drop(io::stderr().write_all(&self.0)));
    }
}
