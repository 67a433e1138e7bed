//! Ordinary SQL at the source, over the same streams as replication.

use std::future::poll_fn;
use std::ops::{Deref, DerefMut};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::{future, io};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::task::AbortHandle;
use tokio_postgres::config::{SslMode, SslNegotiation};
use tokio_postgres::tls::{ChannelBinding, TlsConnect, TlsStream};
use tokio_postgres::{AsyncMessage, Client, Connection};

use super::config::SourceConfig;
use super::dial::{self, Dialled, Stream};
use super::errors::{self, ServerError};
pub use super::errors::{publication_gap, sql_error};
use crate::error::Result;

/// What decides how a value, a default or a type's name prints. The trigger's picture
/// of a table, which other sessions make, wants it as well.
pub(super) const PRINTING: [(&str, &str); 8] = [
    ("DateStyle", "ISO"),
    ("IntervalStyle", "postgres"),
    ("TimeZone", "UTC"),
    ("extra_float_digits", "3"),
    ("bytea_output", "hex"),
    ("lc_monetary", "C"),
    ("quote_all_identifiers", "off"),
    // Defaults and row filters print their backslashes so that this reads them.
    ("standard_conforming_strings", "on"),
];

/// The other settings of every session of ours.
const SESSION: [(&str, &str); 12] = [
    ("client_encoding", "UTF8"),
    ("search_path", "pg_catalog"),
    // An error instead of silently fewer rows (P18).
    ("row_security", "off"),
    ("statement_timeout", "0"),
    ("idle_in_transaction_session_timeout", "0"),
    ("idle_session_timeout", "0"),
    // Look-ups open tables too, for defaults and row filters (P35). Copies and slots set
    // their own.
    ("lock_timeout", "30s"),
    // For a look at a hundred tables the server compiled for a second and ran for ten
    // milliseconds.
    ("jit", "off"),
    // Some warnings in the stream and about it matter.
    ("client_min_messages", "notice"),
    // Serializable and deferrable, a query would wait for other transactions.
    ("default_transaction_isolation", "read committed"),
    ("default_transaction_deferrable", "off"),
    ("default_transaction_read_only", "off"),
];

/// Settings of every session of ours, so that neither role nor database nor
/// server changes how a value prints or which rows a copy sees. As startup options
/// they win over ALTER ROLE and ALTER DATABASE.
pub(super) const PINNED: [(&str, &str); PRINTING.len() + SESSION.len()] = {
    let (printing, session) = (PRINTING, SESSION);
    let mut pinned = [("", ""); PRINTING.len() + SESSION.len()];
    let mut at = 0;
    while at < pinned.len() {
        pinned[at] = if at < printing.len() { printing[at] } else { session[at - printing.len()] };
        at += 1;
    }
    pinned
};

/// What PostgreSQL 17 adds to them. Older servers refuse a connection whose startup names
/// a setting that they do not have, so this is run in it. A simple query, as the
/// replication connection knows no others.
pub(super) const UNLIMITED: &str =
    "SELECT set_config(name, '0', false) FROM pg_settings WHERE name = 'transaction_timeout'";

/// A connection for SQL and COPY; aborts its task, and with it the connection,
/// when dropped.
pub struct Session {
    client: Client,
    task: AbortHandle,
    left_out: Arc<AtomicBool>,
}

impl Session {
    /// Whether the server has warned, since this was last asked, that it left changes out
    /// for want of their publication.
    pub(super) fn take_left_out(&self) -> bool {
        self.left_out.swap(false, Ordering::SeqCst)
    }
}

impl Deref for Session {
    type Target = Client;

    fn deref(&self) -> &Client {
        &self.client
    }
}

impl DerefMut for Session {
    fn deref_mut(&mut self) -> &mut Client {
        &mut self.client
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Connects for SQL, settings pinned.
///
/// Errors: `source.unreachable`, `source.too-many-connections` (transient);
/// `source.password`, `source.database-missing`, `source.tls*` (permanent).
pub async fn connect(config: &SourceConfig) -> Result<Session> {
    tokio::time::timeout(config.connect_timeout, open(config)).await.map_err(|_| dial::timed_out(config))?
}

async fn open(config: &SourceConfig) -> Result<Session> {
    let Dialled { stream, binding } = dial::dial(config).await?;
    let mut postgres = tokio_postgres::Config::new();
    postgres.user(&config.user).dbname(&config.database).application_name(&config.application_name);
    let options: Vec<String> =
        PINNED.iter().map(|(name, value)| format!("-c {name}={}", value.replace(' ', "\\ "))).collect();
    postgres.options(options.join(" "));
    if let Some(password) = config.password() {
        postgres.password(password);
    }
    // The stream speaks TLS already: `Direct` hands it through as the TLS stream,
    // which is how its channel binding gets into the authentication.
    match &stream {
        Stream::Tls(_) => postgres.ssl_mode(SslMode::Require).ssl_negotiation(SslNegotiation::Direct),
        Stream::Tcp(_) | Stream::Unix(_) => postgres.ssl_mode(SslMode::Disable),
    };
    let connected = postgres.connect_raw(stream, HandThrough(binding)).await;
    let (client, connection) = connected.map_err(|error| connect_error(config, &error))?;
    let left_out = Arc::new(AtomicBool::new(false));
    let task = tokio::spawn(drive(connection, config.endpoint(), left_out.clone())).abort_handle();
    let session = Session { client, task, left_out };
    session.batch_execute(UNLIMITED).await.map_err(|error| connect_error(config, &error))?;
    Ok(session)
}

fn connect_error(config: &SourceConfig, error: &tokio_postgres::Error) -> crate::error::Error {
    if let Some(db) = error.as_db_error() {
        return errors::connecting(config, &ServerError::of_db(db), false);
    }
    let cause = std::error::Error::source(error).and_then(|cause| cause.downcast_ref::<io::Error>());
    match cause {
        Some(cause) => dial::unreachable(config, cause),
        None if error.is_closed() => dial::unreachable(config, &io::ErrorKind::UnexpectedEof.into()),
        None => no_password(config, error),
    }
}

/// What is left without an answer of the server: the server asked for a password
/// we do not have, or for a way to log in that we do not speak.
fn no_password(config: &SourceConfig, error: &dyn std::error::Error) -> crate::error::Error {
    let cause = error.source().map_or(String::new(), |cause| format!(": {cause}"));
    crate::error::Error::no("source.password", format!("{}: cannot log in: {error}{cause}", config.endpoint()))
        .next("Put user and password into the source url; scram-sha-256, md5 and password are understood.")
}

/// Runs the connection and traces what the server remarks.
async fn drive(mut connection: Connection<Stream, BoundStream>, at: String, left_out: Arc<AtomicBool>) {
    while let Some(message) = poll_fn(|cx| connection.poll_message(cx)).await {
        match message {
            Ok(AsyncMessage::Notice(notice)) => {
                tracing::debug!(source = %at, severity = notice.severity(), "{}", notice.message());
                if errors::is_left_out(&ServerError::of_db(&notice)) {
                    left_out.store(true, Ordering::SeqCst);
                }
            }
            Ok(_) => {}
            // Whoever waits for an answer is told as well.
            Err(error) => {
                tracing::debug!(source = %at, "session ended: {error}");
                return;
            }
        }
    }
}

/// Hands a stream that speaks TLS already through, with its channel binding.
struct HandThrough(Option<Vec<u8>>);

/// See [`HandThrough`].
struct BoundStream {
    stream: Stream,
    binding: Option<Vec<u8>>,
}

impl TlsConnect<Stream> for HandThrough {
    type Stream = BoundStream;
    type Error = io::Error;
    type Future = future::Ready<io::Result<BoundStream>>;

    fn connect(self, stream: Stream) -> Self::Future {
        future::ready(Ok(BoundStream { stream, binding: self.0 }))
    }
}

impl TlsStream for BoundStream {
    fn channel_binding(&self) -> ChannelBinding {
        self.binding.clone().map_or_else(ChannelBinding::none, ChannelBinding::tls_server_end_point)
    }
}

impl AsyncRead for BoundStream {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for BoundStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
