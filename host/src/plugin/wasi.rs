//! WASI 0.2 as a plugin sees it: clocks, random numbers, granted directories, and
//! output that becomes log lines. No sockets, environment, arguments or input.

use std::collections::VecDeque;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};

use bytes::Bytes;
use tokio::io::AsyncWrite;
use wasmtime::component::Linker;
use wasmtime_wasi::cli::{IsTerminal, StdoutStream, WasiCli, WasiCliView as _};
use wasmtime_wasi::filesystem::{FsPerms, WasiFilesystem, WasiFilesystemView as _};
use wasmtime_wasi::p2::bindings::{cli, filesystem, random};
use wasmtime_wasi::p2::{OutputStream, Pollable, StreamResult};
use wasmtime_wasi::random::{WasiRandom, WasiRandomView as _};
use wasmtime_wasi::{WasiCtx, WasiCtxView, WasiView};

use super::instance::State;
use super::limits::Limits;
use super::log::{Level, Log};
use super::permissions::Grants;
use crate::error::{Error, Result};

/// What of WASI is linked; a component that imports another interface is refused.
pub(crate) const INTERFACES: [&str; 19] = [
    "wasi:cli/environment",
    "wasi:cli/exit",
    "wasi:cli/stderr",
    "wasi:cli/stdin",
    "wasi:cli/stdout",
    "wasi:cli/terminal-input",
    "wasi:cli/terminal-output",
    "wasi:cli/terminal-stderr",
    "wasi:cli/terminal-stdin",
    "wasi:cli/terminal-stdout",
    "wasi:clocks/monotonic-clock",
    "wasi:clocks/wall-clock",
    "wasi:filesystem/preopens",
    "wasi:filesystem/types",
    "wasi:io/error",
    "wasi:io/poll",
    "wasi:io/streams",
    "wasi:random/random",
    "wasi:random/insecure-seed",
];

impl WasiView for State {
    fn ctx(&mut self) -> WasiCtxView<'_> {
        WasiCtxView { ctx: &mut self.wasi, table: &mut self.table }
    }
}

/// Links [`INTERFACES`]: not by the one function that links all, which brings sockets.
pub(crate) fn link(linker: &mut Linker<State>) -> wasmtime::Result<()> {
    // io, clocks, random, stdin, stdout, stderr.
    wasmtime_wasi::p2::add_to_linker_proxy_interfaces_async(linker)?;
    random::insecure_seed::add_to_linker::<State, WasiRandom>(linker, State::random)?;
    cli::environment::add_to_linker::<State, WasiCli>(linker, State::cli)?;
    cli::exit::add_to_linker::<State, WasiCli>(linker, State::cli)?;
    cli::terminal_input::add_to_linker::<State, WasiCli>(linker, State::cli)?;
    cli::terminal_output::add_to_linker::<State, WasiCli>(linker, State::cli)?;
    cli::terminal_stdin::add_to_linker::<State, WasiCli>(linker, State::cli)?;
    cli::terminal_stdout::add_to_linker::<State, WasiCli>(linker, State::cli)?;
    cli::terminal_stderr::add_to_linker::<State, WasiCli>(linker, State::cli)?;
    filesystem::preopens::add_to_linker::<State, WasiFilesystem>(linker, State::filesystem)?;
    filesystem::types::add_to_linker::<State, WasiFilesystem>(linker, State::filesystem)
}

/// A context with the granted directories and the output captured.
///
/// # Errors
/// `plugin.directory` where a granted directory cannot be opened.
pub(crate) fn context(grants: &Grants, limits: &Limits, log: &Log) -> Result<(WasiCtx, Tail)> {
    let tail = Tail(Arc::new(Mutex::new(VecDeque::new())));
    let mut builder = WasiCtx::builder();
    let capture = |stream, tail: Option<&Tail>| Capture {
        stream,
        log: log.clone(),
        line_bytes: limits.log_line_bytes,
        tail_bytes: limits.stderr_tail_bytes,
        tail: tail.cloned(),
        partial: Arc::default(),
    };
    builder.stdout(capture("stdout", None)).stderr(capture("stderr", Some(&tail))).max_random_size(limits.random_bytes);
    for grant in &grants.files {
        let perms = if grant.write { FsPerms::ReadWrite } else { FsPerms::ReadOnly };
        builder.preopened_dir(&grant.path, &grant.guest, perms).map_err(|e| {
            Error::usage(
                "plugin.directory",
                format!("the granted directory {} cannot be opened: {}", grant.path.display(), e.root_cause()),
            )
            .next("Create it, or correct `files` in the destination's grant.")
        })?;
    }
    Ok((builder.build(), tail))
}

/// The last bytes of standard error: where a panic says why.
#[derive(Clone)]
pub(crate) struct Tail(Arc<Mutex<VecDeque<u8>>>);

impl Tail {
    /// Forgets what an earlier call wrote.
    pub(crate) fn clear(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    pub(crate) fn text(&self) -> String {
        let bytes: Vec<u8> = self.0.lock().unwrap_or_else(PoisonError::into_inner).iter().copied().collect();
        String::from_utf8_lossy(&bytes).trim().to_owned()
    }
}

/// Standard output or error: each line goes to the log at once, so that nothing is
/// under way when the guest traps.
#[derive(Clone)]
struct Capture {
    stream: &'static str,
    log: Log,
    line_bytes: usize,
    tail_bytes: usize,
    tail: Option<Tail>,
    /// The line that has no end yet, shared by all handles of the stream.
    partial: Arc<Mutex<Vec<u8>>>,
}

impl Capture {
    fn take(&self, bytes: &[u8]) {
        if let Some(Tail(tail)) = &self.tail {
            let mut tail = tail.lock().unwrap_or_else(PoisonError::into_inner);
            let new = &bytes[bytes.len().saturating_sub(self.tail_bytes)..];
            let excess = (tail.len() + new.len()).saturating_sub(self.tail_bytes).min(tail.len());
            tail.drain(..excess);
            tail.extend(new);
        }
        let mut partial = self.partial.lock().unwrap_or_else(PoisonError::into_inner);
        for piece in bytes.split_inclusive(|byte| *byte == b'\n') {
            let room = self.line_bytes.saturating_sub(partial.len());
            partial.extend_from_slice(&piece[..piece.len().min(room)]);
            if piece.ends_with(b"\n") {
                let line = String::from_utf8_lossy(&partial);
                let is_cut = partial.len() == self.line_bytes;
                let line = if is_cut { self.log.redact_cut(&line).into() } else { line };
                let line = line.trim_end();
                if !line.is_empty() {
                    self.log.line(Level::Info, self.stream, line, "");
                }
                partial.clear();
            }
        }
    }
}

impl IsTerminal for Capture {
    fn is_terminal(&self) -> bool {
        false
    }
}

impl StdoutStream for Capture {
    fn async_stream(&self) -> Box<dyn AsyncWrite + Send + Sync> {
        Box::new(self.clone())
    }

    fn p2_stream(&self) -> Box<dyn OutputStream> {
        Box::new(self.clone())
    }
}

#[wasmtime_wasi::async_trait]
impl OutputStream for Capture {
    fn write(&mut self, bytes: Bytes) -> StreamResult<()> {
        self.take(&bytes);
        Ok(())
    }

    fn flush(&mut self) -> StreamResult<()> {
        Ok(())
    }

    fn check_write(&mut self) -> StreamResult<usize> {
        Ok(64 * 1024)
    }
}

#[wasmtime_wasi::async_trait]
impl Pollable for Capture {
    async fn ready(&mut self) {}
}

impl AsyncWrite for Capture {
    fn poll_write(self: Pin<&mut Self>, _: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.take(bytes);
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}
