//! Connections for `COPY … TO STDOUT`: lines are passed on where they lie in the buffer
//! that the socket is read into, many thousand for each read.

use std::io;

use bytes::{Buf, BytesMut};
use postgres_protocol::message::backend::Message;
use postgres_protocol::message::frontend;
use tokio::io::AsyncReadExt;

use super::buffer::Growth;
use super::config::SourceConfig;
use super::errors::{self, ServerError};
use super::login::{self, Purpose, Wire};
use super::session;
use crate::error::{Error, Result};

/// So much is read of a line that is too long.
const BEGINNING_BYTES: usize = 64 * 1024;
const COPY_DATA: u8 = b'd';
/// Tag and length.
const HEADER: usize = 5;

/// A session that runs SQL without rows, and COPY. Settings pinned as in every session of
/// ours. Dropped, it closes its connection.
pub struct CopyConnection {
    wire: Wire,
    pid: i32,
    endpoint: String,
    /// There is room for the next line, however long.
    has_room: bool,
    growth: Growth,
}

/// What lines there were to pass on.
#[derive(Debug, PartialEq, Eq)]
pub enum Lines {
    /// Enough for now.
    Enough,
    /// All, to the end of the statements.
    End,
    /// The next one has so many bytes, which are not read before
    /// [`CopyConnection::make_room`].
    Long(usize),
    /// The next one has more bytes than may be read, and begins like this. The connection
    /// is of no use any more.
    TooLong(usize, Vec<u8>),
}

/// How long lines may be.
#[derive(Clone, Copy, Debug)]
pub struct LineBytes {
    /// A longer one is told of before it is read.
    pub long: usize,
    /// And a longer one is not read at all.
    pub most: usize,
}

/// For statements whose rows nobody wants.
const ANY: LineBytes = LineBytes { long: usize::MAX, most: usize::MAX };

/// A statement that failed.
#[derive(Debug)]
pub struct Failed {
    /// The server's SQLSTATE; empty if it did not answer.
    pub state: String,
    /// What it means.
    pub error: Error,
}

impl Failed {
    /// The same of a statement in another kind of session.
    pub fn of_sql(error: &tokio_postgres::Error, doing: &str) -> Failed {
        let state = error.code().map(|state| state.code().to_owned()).unwrap_or_default();
        Failed { state, error: errors::sql_error(error, doing) }
    }
}

impl From<Failed> for Error {
    fn from(failed: Failed) -> Error {
        failed.error
    }
}

impl CopyConnection {
    /// Connects. Errors: those of [`super::session::connect`].
    pub async fn connect(config: &SourceConfig) -> Result<CopyConnection> {
        let (wire, key) = login::log_in(config, Purpose::Sql).await?;
        let pid = key.map_or(0, login::CancelKey::process_id);
        let mut connection =
            CopyConnection { wire, pid, endpoint: config.endpoint(), has_room: false, growth: Growth::default() };
        connection.execute(session::UNLIMITED, "preparing a copy").await?;
        Ok(connection)
    }

    /// The server's process; 0 if it did not say.
    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// Runs statements whose rows nobody wants; `doing` says what for.
    ///
    /// # Errors
    /// The first statement's that fails; those behind it do not run.
    pub async fn execute(&mut self, statements: &str, doing: &str) -> Result<(), Failed> {
        self.start(statements, doing).await?;
        let mut none = |_: &[u8]| Ok(false);
        self.lines(ANY, &mut none, doing).await.map(drop)
    }

    /// Sends statements, among them a COPY, whose lines [`CopyConnection::lines`] reads.
    ///
    /// # Errors
    /// `source.connection-lost`.
    pub async fn start(&mut self, statements: &str, doing: &str) -> Result<(), Failed> {
        let mut query = BytesMut::new();
        frontend::query(statements, &mut query).map_err(|error| unanswered(errors::protocol(error)))?;
        self.wire.send(&query).await.map_err(|error| self.lost(doing, &error))
    }

    /// There is room for the next line, which is long.
    pub fn make_room(&mut self) {
        self.has_room = true;
    }

    /// Passes lines to `take` until it says true, or there is one that is long.
    ///
    /// # Errors
    /// The server's, those of the connection, and what `take` says; the connection is of no
    /// use after the last two.
    pub async fn lines(
        &mut self,
        bytes: LineBytes,
        take: &mut impl FnMut(&[u8]) -> Result<bool>,
        doing: &str,
    ) -> Result<Lines, Failed> {
        let mut failed = None;
        loop {
            if self.buffered(bytes.long, take).map_err(unanswered)? {
                return Ok(Lines::Enough);
            }
            if let Some(length) = self.next_line().filter(|length| *length > bytes.long) {
                if length > bytes.most {
                    let beginning = self.beginning(doing).await?;
                    return Ok(Lines::TooLong(length, beginning));
                }
                if !self.has_room {
                    return Ok(Lines::Long(length));
                }
            }
            match Message::parse(&mut self.wire.read) {
                Ok(Some(Message::ReadyForQuery(_))) => return failed.map_or(Ok(Lines::End), Err),
                Ok(Some(Message::ErrorResponse(body))) => {
                    let error = ServerError::of_fields(body.fields());
                    failed = Some(Failed { error: errors::refused(&error, doing), state: error.state });
                }
                Ok(Some(_)) => {}
                Ok(None) => self.fill(doing).await?,
                Err(error) => return Err(unanswered(errors::protocol(error))),
            }
        }
    }

    /// Passes on the lines that are at hand, up to one that is long.
    fn buffered(&mut self, long: usize, take: &mut impl FnMut(&[u8]) -> Result<bool>) -> Result<bool> {
        let buffer = &self.wire.read[..];
        let (mut at, mut full) = (0, false);
        while let Some(length) = line_length(&buffer[at..]) {
            let is_long = length > long;
            if is_long && !self.has_room {
                break;
            }
            let Some(line) = buffer.get(at + HEADER..at + HEADER + length) else { break };
            at += HEADER + length;
            full = take(line)? || is_long;
            if is_long {
                self.has_room = false;
            }
            if full {
                break;
            }
        }
        self.wire.read.advance(at);
        Ok(full)
    }

    /// Bytes of the line that comes next, if it is known by now.
    fn next_line(&self) -> Option<usize> {
        line_length(&self.wire.read)
    }

    /// How a line begins that is not read.
    async fn beginning(&mut self, doing: &str) -> Result<Vec<u8>, Failed> {
        while self.wire.read.len() < BEGINNING_BYTES {
            self.read_more(0, doing).await?;
        }
        Ok(self.wire.read[HEADER..BEGINNING_BYTES].to_vec())
    }

    async fn fill(&mut self, doing: &str) -> Result<(), Failed> {
        // Room for the whole of a long line at once.
        let missing = self.next_line().map_or(0, |length| (HEADER + length).saturating_sub(self.wire.read.len()));
        self.read_more(missing, doing).await
    }

    async fn read_more(&mut self, missing: usize, doing: &str) -> Result<(), Failed> {
        self.growth.reserve(&mut self.wire.read, missing);
        match self.wire.stream.read_buf(&mut self.wire.read).await {
            Ok(0) => Err(self.lost(doing, &io::ErrorKind::UnexpectedEof.into())),
            Ok(_) => Ok(()),
            Err(error) => Err(self.lost(doing, &error)),
        }
    }

    fn lost(&self, doing: &str, error: &io::Error) -> Failed {
        let message = format!("{doing}: the connection to {} is gone: {error}", self.endpoint);
        unanswered(Error::transient("source.connection-lost", message).next("Try again when the server is back."))
    }
}

/// Bytes of the line at the beginning, if there is one.
fn line_length(buffer: &[u8]) -> Option<usize> {
    match buffer {
        // The length counts itself.
        [COPY_DATA, a, b, c, d, ..] => Some((u32::from_be_bytes([*a, *b, *c, *d]) as usize).saturating_sub(4)),
        _ => None,
    }
}

fn unanswered(error: Error) -> Failed {
    Failed { state: String::new(), error }
}
