//! Startup and authentication of the connections that are our own, and their messages
//! until rows come.

use std::io;

use bytes::BytesMut;
use fallible_iterator::FallibleIterator;
use postgres_protocol::authentication::md5_hash;
use postgres_protocol::authentication::sasl::{self, ChannelBinding, ScramSha256};
use postgres_protocol::message::backend::{AuthenticationSaslBody, COPY_OUT_RESPONSE_TAG, Message};
use postgres_protocol::message::frontend;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::config::SourceConfig;
use super::dial::{self, Dialled, Stream};
use super::errors::{self, ServerError};
use super::session::PINNED;
use crate::error::{Error, Result};

const COPY_BOTH_RESPONSE_TAG: u8 = b'W';
/// Bytes asked from the socket at once before streaming.
const READ_BYTES: usize = 8 * 1024;

/// What cancels the running command of a connection, from another one.
#[derive(Clone, Copy, Debug)]
pub(super) struct CancelKey {
    process_id: i32,
    secret_key: i32,
}

/// A stream with the messages on it.
pub(super) struct Wire {
    pub(super) stream: Stream,
    /// Read and not yet taken.
    pub(super) read: BytesMut,
}

impl Wire {
    pub(super) async fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.stream.write_all(bytes).await?;
        self.stream.flush().await
    }

    /// The next message that is no notice and no parameter status. The start of a
    /// stream comes as `CopyOutResponse`.
    pub(super) async fn receive(&mut self) -> io::Result<Message> {
        loop {
            // postgres-protocol does not know CopyBothResponse, which is laid out
            // as CopyOutResponse is. Messages are taken whole: first is a tag.
            if self.read.first() == Some(&COPY_BOTH_RESPONSE_TAG) {
                self.read[0] = COPY_OUT_RESPONSE_TAG;
            }
            match Message::parse(&mut self.read)? {
                Some(Message::NoticeResponse(notice)) => {
                    let notice = ServerError::of_fields(notice.fields());
                    tracing::debug!(state = notice.state, "{}", notice.message);
                }
                Some(Message::ParameterStatus(_) | Message::NotificationResponse(_)) => {}
                Some(message) => return Ok(message),
                None => {
                    self.read.reserve(READ_BYTES);
                    if self.stream.read_buf(&mut self.read).await? == 0 {
                        return Err(io::ErrorKind::UnexpectedEof.into());
                    }
                }
            }
        }
    }
}

/// What a connection is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    /// Replication commands, and the stream.
    Replication,
    /// SQL.
    Sql,
}

impl CancelKey {
    /// Of the server's process.
    pub(super) fn process_id(self) -> i32 {
        self.process_id
    }
}

/// Dials, starts a session and authenticates.
pub(super) async fn log_in(config: &SourceConfig, purpose: Purpose) -> Result<(Wire, Option<CancelKey>)> {
    tokio::time::timeout(config.connect_timeout, open(config, purpose)).await.map_err(|_| dial::timed_out(config))?
}

async fn open(config: &SourceConfig, purpose: Purpose) -> Result<(Wire, Option<CancelKey>)> {
    let Dialled { stream, binding } = dial::dial(config).await?;
    let mut wire = Wire { stream, read: BytesMut::with_capacity(READ_BYTES) };
    let mut startup = BytesMut::new();
    let fixed = [
        ("user", config.user.as_str()),
        ("database", config.database.as_str()),
        ("application_name", config.application_name.as_str()),
    ];
    let replication = (purpose == Purpose::Replication).then_some(("replication", "database"));
    let parameters = fixed.into_iter().chain(replication).chain(PINNED);
    frontend::startup_message(parameters, &mut startup).map_err(errors::protocol)?;
    wire.send(&startup).await.map_err(|error| dial::unreachable(config, &error))?;
    authenticate(&mut wire, config, binding, purpose).await?;
    let mut key = None;
    loop {
        match receive(&mut wire, config, purpose).await? {
            Message::BackendKeyData(body) => {
                key = Some(CancelKey { process_id: body.process_id(), secret_key: body.secret_key() });
            }
            Message::ReadyForQuery(_) => return Ok((wire, key)),
            _ => return Err(errors::protocol("an unexpected message after authentication")),
        }
    }
}

async fn receive(wire: &mut Wire, config: &SourceConfig, purpose: Purpose) -> Result<Message> {
    match wire.receive().await {
        Ok(Message::ErrorResponse(body)) => {
            let error = ServerError::of_fields(body.fields());
            Err(errors::connecting(config, &error, purpose == Purpose::Replication))
        }
        Ok(message) => Ok(message),
        Err(error) if error.kind() == io::ErrorKind::InvalidInput => Err(errors::protocol(error)),
        Err(error) => Err(dial::unreachable(config, &error)),
    }
}

async fn authenticate(
    wire: &mut Wire,
    config: &SourceConfig,
    binding: Option<Vec<u8>>,
    purpose: Purpose,
) -> Result<()> {
    let request = receive(wire, config, purpose).await?;
    let mut answer = BytesMut::new();
    match request {
        Message::AuthenticationOk => return Ok(()),
        Message::AuthenticationCleartextPassword => {
            frontend::password_message(password(config)?, &mut answer).map_err(errors::protocol)?;
        }
        Message::AuthenticationMd5Password(body) => {
            let hash = md5_hash(config.user.as_bytes(), password(config)?, body.salt());
            frontend::password_message(hash.as_bytes(), &mut answer).map_err(errors::protocol)?;
        }
        Message::AuthenticationSasl(body) => scram(wire, config, &body, binding, purpose).await?,
        _ => {
            return Err(Error::no(
                "source.password",
                format!("{}: the server asks for a way to log in that we do not speak", config.endpoint()),
            )
            .next("Use scram-sha-256, md5 or password for this role in the server's pg_hba.conf."));
        }
    }
    if !answer.is_empty() {
        wire.send(&answer).await.map_err(|error| dial::unreachable(config, &error))?;
    }
    match receive(wire, config, purpose).await? {
        Message::AuthenticationOk => Ok(()),
        _ => Err(errors::protocol("no end of the authentication")),
    }
}

/// SCRAM-SHA-256, bound to the TLS channel where both sides can. The server is
/// authenticated too: it has to know the password's verifier.
async fn scram(
    wire: &mut Wire,
    config: &SourceConfig,
    offered: &AuthenticationSaslBody,
    binding: Option<Vec<u8>>,
    purpose: Purpose,
) -> Result<()> {
    let (mut plain, mut plus) = (false, false);
    let mut mechanisms = offered.mechanisms();
    while let Some(mechanism) = mechanisms.next().map_err(errors::protocol)? {
        plain |= mechanism == sasl::SCRAM_SHA_256;
        plus |= mechanism == sasl::SCRAM_SHA_256_PLUS;
    }
    let (mechanism, binding) = match binding {
        Some(hash) if plus => (sasl::SCRAM_SHA_256_PLUS, ChannelBinding::tls_server_end_point(hash)),
        // Says that we could have: the server notices if its offer was taken away.
        Some(_) if plain => (sasl::SCRAM_SHA_256, ChannelBinding::unrequested()),
        None if plain => (sasl::SCRAM_SHA_256, ChannelBinding::unsupported()),
        _ => return Err(errors::protocol("no SASL mechanism that we know")),
    };
    let unreachable = |error: io::Error| dial::unreachable(config, &error);
    let mut scram = ScramSha256::new(password(config)?, binding);
    let mut answer = BytesMut::new();
    frontend::sasl_initial_response(mechanism, scram.message(), &mut answer).map_err(errors::protocol)?;
    wire.send(&answer).await.map_err(unreachable)?;
    let Message::AuthenticationSaslContinue(body) = receive(wire, config, purpose).await? else {
        return Err(errors::protocol("no SASL continuation"));
    };
    scram.update(body.data()).map_err(errors::protocol)?;
    answer.clear();
    frontend::sasl_response(scram.message(), &mut answer).map_err(errors::protocol)?;
    wire.send(&answer).await.map_err(unreachable)?;
    let Message::AuthenticationSaslFinal(body) = receive(wire, config, purpose).await? else {
        return Err(errors::protocol("no SASL end"));
    };
    scram.finish(body.data()).map_err(|_| {
        Error::no("source.password", format!("{}: the server does not know our password", config.endpoint()))
            .next("Check that host and port lead to the right server.")
    })
}

fn password(config: &SourceConfig) -> Result<&[u8]> {
    config.password().map(str::as_bytes).ok_or_else(|| {
        Error::no("source.password", format!("{}: the server asks for a password", config.endpoint()))
            .next("Put it into the source url, best as ${NAME} from the environment.")
    })
}

/// Asks the server to cancel what the connection of this key runs. Best effort.
pub(super) async fn cancel(config: &SourceConfig, key: CancelKey) {
    let ask = async {
        let mut dialled = dial::dial(config).await.ok()?;
        let mut request = BytesMut::new();
        frontend::cancel_request(key.process_id, key.secret_key, &mut request);
        dialled.stream.write_all(&request).await.ok()?;
        // The server closes when it has passed the request on.
        dialled.stream.read(&mut [0]).await.ok()
    };
    // A server that does not answer: the lock_timeout ends the command instead.
    let _asked = tokio::time::timeout(config.connect_timeout, ask).await;
}
