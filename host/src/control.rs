//! The control socket of a running pipeline: `<state>/control.sock`.
//!
//! One request, one answer, each a line of JSON: `{"command":"status"}` or
//! `{"command":"resync","destination":…,"table":…}` is answered with `{"ok": …}` or
//! `{"error": {"code", "message", "next"}}`. Whoever can open the
//! socket may ask: its mode is 0600, so that is the user who runs the host.

use std::convert::Infallible;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::Semaphore;

use crate::deliver::decisions::{self, Word};
use crate::deliver::members::{self, Handle};
use crate::error::{Error, Result};
use crate::position::SnapshotId;
use crate::status::{StatusBoard, StatusError, StatusReport};
use crate::store::{Loaded, Mark, QuarantineSelection, Store};

const SOCKET: &str = "control.sock";

/// A request is a command, a few names and numbers: longer is somebody else's protocol.
const REQUEST_BYTES: u64 = 64 * 1024;
/// A client that neither asks nor takes its answer within this is dropped.
const CLIENT_TIMEOUT: Duration = Duration::from_secs(5);
/// The source may have to be asked before there is an answer.
const ANSWER_WITHIN: Duration = Duration::from_secs(60);
/// Clients served at a time; others wait in the listener's backlog.
const CLIENTS: usize = 8;
/// An answer longer than this is not a status report: 100,000 tables fit.
const ANSWER_BYTES: u64 = 64 * 1024 * 1024;
/// How long to wait before accepting again when the process is out of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// What is asked.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "command", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Request {
    /// Answered with a [`StatusReport`].
    Status,
    /// Copy a table again; answered with a sentence, as the next.
    Resync {
        /// The destination's name.
        destination: String,
        /// `schema.table` at the source.
        table: String,
    },
    /// Forget a table that is not published any more.
    Forget {
        /// The destination's name.
        destination: String,
        /// `schema.table` at the source.
        table: String,
    },
    /// Send quarantined rows again; answered with how many there are, as the next.
    QuarantineRetry {
        /// Which.
        rows: QuarantineSelection,
    },
    /// Forget quarantined rows.
    QuarantineDrop {
        /// Which.
        rows: QuarantineSelection,
    },
    /// Apply a schema change that waits; answered with a sentence, as the next.
    SchemaApprove {
        /// The destination's name.
        destination: String,
        /// `schema.table` at the source.
        table: String,
        /// The version that it has to lead to.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        to: Option<SnapshotId>,
    },
    /// Stop the table of a schema change that waits.
    SchemaRefuse {
        /// The destination's name.
        destination: String,
        /// `schema.table` at the source.
        table: String,
    },
    /// Say which version a destination has behind a change that was cut off.
    SchemaAccept {
        /// The destination's name.
        destination: String,
        /// `schema.table` at the source.
        table: String,
        /// The one behind it, and not the one before.
        forward: bool,
    },
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Answer {
    Ok(Value),
    Error(StatusError),
}

/// A listening control socket; removed when dropped.
pub struct ControlServer {
    listener: UnixListener,
    path: PathBuf,
    client_timeout: Duration,
}

impl ControlServer {
    /// Listens in the state directory. The caller holds that directory's lock, so a
    /// socket that is already there was left by a process that is gone.
    ///
    /// # Errors
    /// `control.listen` if the socket cannot be made.
    pub fn bind(state: &Path) -> Result<ControlServer> {
        let path = state.join(SOCKET);
        let listen = || {
            match std::fs::remove_file(&path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
            let directory = File::open(state)?;
            let listener = UnixListener::bind(short_path(&directory))?;
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600))?;
            Ok(listener)
        };
        match listen() {
            Ok(listener) => Ok(ControlServer { listener, path, client_timeout: CLIENT_TIMEOUT }),
            Err(error) => {
                Err(Error::permanent("control.listen", format!("cannot listen on {}: {error}", path.display()))
                    .next("Make the state directory writable for this user, on a file system that holds sockets."))
            }
        }
    }

    /// Answers until it is dropped.
    pub async fn serve(self, board: StatusBoard, pipeline: Handle, store: Store) -> Infallible {
        let clients = Arc::new(Semaphore::new(CLIENTS));
        loop {
            // Only a closed semaphore gives none, and nobody closes it.
            let Ok(permit) = Arc::clone(&clients).acquire_owned().await else {
                return std::future::pending().await;
            };
            match self.listener.accept().await {
                Ok((stream, _)) => {
                    let (board, pipeline, store) = (board.clone(), pipeline.clone(), store.clone());
                    let timeout = self.client_timeout;
                    tokio::spawn(async move {
                        let _permit = permit;
                        if let Err(error) = serve_client(stream, timeout, &board, &pipeline, &store).await {
                            tracing::debug!(%error, "a client of the control socket was too slow");
                        }
                    });
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot accept on the control socket");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    }
}

impl Drop for ControlServer {
    fn drop(&mut self) {
        // The next process removes it as well: what fails here does no harm.
        let _ = std::fs::remove_file(&self.path);
    }
}

/// The socket's path through an open descriptor of its directory: an address of a unix
/// socket has room for 107 bytes, and a state directory may lie deeper than that.
fn short_path(directory: &File) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}/{SOCKET}", directory.as_raw_fd()))
}

async fn serve_client(
    stream: UnixStream,
    timeout: Duration,
    board: &StatusBoard,
    pipeline: &Handle,
    store: &Store,
) -> Result<(), tokio::time::error::Elapsed> {
    let (read, mut write) = stream.into_split();
    let mut line = Vec::new();
    let mut request = BufReader::new(read.take(REQUEST_BYTES));
    if tokio::time::timeout(timeout, request.read_until(b'\n', &mut line)).await?.is_err() {
        return Ok(());
    }
    let answer = match tokio::time::timeout(ANSWER_WITHIN, answer(&line, board, pipeline, store)).await? {
        Ok(value) => Answer::Ok(value),
        Err(error) => Answer::Error((&error).into()),
    };
    let Ok(mut line) = serde_json::to_vec(&answer) else { return Ok(()) };
    line.push(b'\n');
    // A client that went away has no use for the answer, and nobody else has either.
    let _ = tokio::time::timeout(timeout, write.write_all(&line)).await?;
    Ok(())
}

async fn answer(line: &[u8], board: &StatusBoard, pipeline: &Handle, store: &Store) -> Result<Value> {
    let request = serde_json::from_slice::<Request>(line).map_err(|error| not_understood(line, &error))?;
    match request {
        Request::Status => serde_json::to_value(board.report()).map_err(|error| not_understood(line, &error)),
        Request::Resync { destination, table } => say(pipeline, members::Request::Resync { destination, table }).await,
        Request::Forget { destination, table } => say(pipeline, members::Request::Forget { destination, table }).await,
        Request::QuarantineRetry { rows } => store.mark_quarantined(rows, Mark::Retry).await.map(Value::from),
        Request::SchemaApprove { destination, table, to } => {
            decided(store, &destination, &table, Word::Approve(to)).await
        }
        Request::SchemaRefuse { destination, table } => decided(store, &destination, &table, Word::Refuse).await,
        Request::SchemaAccept { destination, table, forward } => {
            let word = if forward { Word::AcceptTo } else { Word::AcceptFrom };
            decided(store, &destination, &table, word).await
        }
        Request::QuarantineDrop { rows } => store.mark_quarantined(rows, Mark::Drop).await.map(Value::from),
    }
}

async fn say(pipeline: &Handle, request: members::Request) -> Result<Value> {
    pipeline.ask(request).await.map(Value::String)
}

/// A schema change that waits is decided about: the destination sees to it.
async fn decided(store: &Store, destination: &str, table: &str, word: Word) -> Result<Value> {
    let loaded = Loaded { tables: store.tables().await?, barriers: store.barriers().await?, ..Loaded::default() };
    decisions::decide(store, &loaded, destination, table, word, true).await.map(Value::String)
}

fn not_understood(line: &[u8], error: &serde_json::Error) -> Error {
    let command =
        serde_json::from_slice::<Value>(line).ok().and_then(|json| json["command"].as_str().map(str::to_owned));
    match command {
        Some(command) => Error::permanent(
            "control.unknown-command",
            format!("this process knows no such command `{}`: {error}", command.escape_debug()),
        )
        .next("Use a `tidegate` of the same version as the one that runs."),
        None => Error::permanent(
            "control.malformed",
            format!("the request is not a line such as {{\"command\":\"status\"}}: {error}"),
        ),
    }
}

/// The report of the process that runs on this state directory; none if none does.
///
/// # Errors
/// As [`ask`].
pub async fn status(state: &Path) -> Result<Option<StatusReport>> {
    let Some(answer) = ask(state, &Request::Status).await? else { return Ok(None) };
    let report = serde_json::from_value(answer).map_err(|error| {
        Error::permanent("control.ask", format!("the process that runs sent a report we cannot read: {error}"))
            .next("Use a `tidegate` of the same version as the one that runs.")
    })?;
    Ok(Some(report))
}

/// Asks the process that runs on this state directory; none if none does.
///
/// # Errors
/// `control.ask` if a process listens but does not answer; its own error otherwise.
pub async fn ask(state: &Path, request: &Request) -> Result<Option<Value>> {
    let path = state.join(SOCKET);
    let failed = |why: &dyn std::fmt::Display| {
        Error::permanent("control.ask", format!("no answer on {}: {why}", path.display()))
            .next("See whether the process that runs the pipeline is stopped or overloaded, then try again.")
    };
    let connect = async {
        let directory = File::open(state)?;
        UnixStream::connect(short_path(&directory)).await
    };
    let stream = match connect.await {
        Ok(stream) => stream,
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused) => {
            return Ok(None);
        }
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            return Err(Error::permanent("control.ask", format!("may not open {}: {error}", path.display()))
                .next("Ask as the user who runs the pipeline."));
        }
        Err(error) => return Err(failed(&error)),
    };
    match tokio::time::timeout(ANSWER_WITHIN, exchange(stream, request)).await {
        Ok(Ok(Answer::Ok(answer))) => Ok(Some(answer)),
        Ok(Ok(Answer::Error(error))) => {
            let told = Error::permanent(error.code, error.message);
            Err(match error.next {
                Some(next) => told.next(next),
                None => told,
            })
        }
        Ok(Err(error)) => Err(failed(&error)),
        Err(_) => Err(failed(&format_args!("nothing within {} s", ANSWER_WITHIN.as_secs()))),
    }
}

async fn exchange(stream: UnixStream, request: &Request) -> io::Result<Answer> {
    let (read, mut write) = stream.into_split();
    let mut request = serde_json::to_vec(request)?;
    request.push(b'\n');
    write.write_all(&request).await?;
    let mut line = Vec::new();
    BufReader::new(read.take(ANSWER_BYTES)).read_until(b'\n', &mut line).await?;
    Ok(serde_json::from_slice(&line)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn raw(state: &Path, request: &[u8]) -> String {
        let mut stream = UnixStream::connect(state.join(SOCKET)).await.unwrap();
        stream.write_all(request).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        answer
    }

    fn serve(state: &Path) -> tokio::task::JoinHandle<Infallible> {
        let server = ControlServer::bind(state).unwrap();
        tokio::spawn(server.serve(StatusBoard::new("shop"), Handle::new().0, store(state)))
    }

    fn store(state: &Path) -> Store {
        Store::open(&state.join("store"), "shop").unwrap()
    }

    #[tokio::test]
    async fn several_clients_are_answered_with_the_report() {
        let state = tempfile::tempdir().unwrap();
        let server = serve(state.path());
        let (one, two) = tokio::join!(status(state.path()), status(state.path()));
        assert_eq!(one.unwrap().unwrap().pipeline, "shop");
        assert_eq!(two.unwrap().unwrap().pid, Some(std::process::id()));
        server.abort();
    }

    #[tokio::test]
    async fn without_a_process_there_is_no_report_and_no_error() {
        let state = tempfile::tempdir().unwrap();
        assert!(status(state.path()).await.unwrap().is_none());
        assert!(status(&state.path().join("missing")).await.unwrap().is_none());
        // A socket that a killed process left.
        drop(std::os::unix::net::UnixListener::bind(state.path().join(SOCKET)).unwrap());
        assert!(status(state.path()).await.unwrap().is_none());
        let server = serve(state.path());
        assert!(status(state.path()).await.unwrap().is_some());
        server.abort();
    }

    #[tokio::test]
    async fn garbage_and_unknown_commands_are_answered_with_an_error() {
        let state = tempfile::tempdir().unwrap();
        let server = serve(state.path());
        assert!(raw(state.path(), b"GET / HTTP/1.1\r\n\r\n").await.contains("control.malformed"));
        assert!(raw(state.path(), b"{\"command\":\"explode\"}\n").await.contains("control.unknown-command"));
        let endless = vec![b'x'; REQUEST_BYTES as usize];
        assert!(raw(state.path(), &endless).await.contains("control.malformed"));
        assert!(status(state.path()).await.unwrap().is_some());
        server.abort();
    }

    #[tokio::test]
    async fn clients_that_say_nothing_do_not_keep_others_out() {
        let state = tempfile::tempdir().unwrap();
        let mut server = ControlServer::bind(state.path()).unwrap();
        server.client_timeout = Duration::from_millis(100);
        let server = tokio::spawn(server.serve(StatusBoard::new("shop"), Handle::new().0, store(state.path())));
        let mut silent = Vec::new();
        for _ in 0..2 * CLIENTS {
            silent.push(UnixStream::connect(state.path().join(SOCKET)).await.unwrap());
        }
        assert!(status(state.path()).await.unwrap().is_some());
        server.abort();
    }

    #[tokio::test]
    async fn a_state_directory_deeper_than_a_socket_address_works() {
        let root = tempfile::tempdir().unwrap();
        let state = root.path().join("d".repeat(100)).join("e".repeat(100));
        std::fs::create_dir_all(&state).unwrap();
        let server = serve(&state);
        assert!(status(&state).await.unwrap().is_some());
        server.abort();
        assert!(server.await.unwrap_err().is_cancelled());
        assert!(!state.join(SOCKET).exists());
    }
}
