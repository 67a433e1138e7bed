//! From a configuration to a byte stream: resolve, connect, TLS.

use std::io;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::BytesMut;
use postgres_protocol::message::frontend;
use rustls_pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::net::{TcpStream, UnixStream};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use super::config::{SourceConfig, SslMode};
use super::tls;
use crate::error::{Error, Result};

/// The bytes between the server and us.
pub(super) enum Stream {
    Tcp(TcpStream),
    Unix(UnixStream),
    Tls(Box<TlsStream<TcpStream>>),
}

/// A stream, before the startup message.
pub(super) struct Dialled {
    pub(super) stream: Stream,
    /// Hash of the server's certificate, to bind the authentication to this channel.
    pub(super) binding: Option<Vec<u8>>,
}

/// Connects and speaks TLS as `sslmode` asks. The caller bounds the time.
pub(super) async fn dial(config: &SourceConfig) -> Result<Dialled> {
    if config.is_socket() {
        let path = Path::new(&config.host).join(format!(".s.PGSQL.{}", config.port));
        let stream = UnixStream::connect(&path).await.map_err(|error| unreachable(config, &error))?;
        return Ok(Dialled { stream: Stream::Unix(stream), binding: None });
    }
    let mut tcp =
        TcpStream::connect((config.host.as_str(), config.port)).await.map_err(|error| unreachable(config, &error))?;
    tcp.set_nodelay(true).map_err(|error| unreachable(config, &error))?;
    if config.sslmode == SslMode::Disable || !offers_tls(&mut tcp, config).await? {
        return Ok(Dialled { stream: Stream::Tcp(tcp), binding: None });
    }
    let name = ServerName::try_from(config.host.clone()).map_err(|_| {
        Error::usage("source.url", format!("source url: host `{}` is neither a name nor an address", config.host))
            .next("Write the host as in the server's certificate.")
    })?;
    let connector = TlsConnector::from(Arc::new(tls::client_config(config)?));
    let stream = connector.connect(name, tcp).await.map_err(|error| tls::handshake_error(config, &error))?;
    let certificate = stream.get_ref().1.peer_certificates().and_then(|chain| chain.first());
    let binding = certificate.and_then(tls::end_point_hash);
    Ok(Dialled { stream: Stream::Tls(Box::new(stream)), binding })
}

/// Asks for TLS. False only where `sslmode` goes on without.
async fn offers_tls(tcp: &mut TcpStream, config: &SourceConfig) -> Result<bool> {
    let mut request = BytesMut::new();
    frontend::ssl_request(&mut request);
    let mut answer = [0];
    let asked: io::Result<_> = async {
        tcp.write_all(&request).await?;
        // One byte: what a plain-text attacker puts behind it is read as TLS.
        tcp.read_exact(&mut answer).await
    }
    .await;
    asked.map_err(|error| unreachable(config, &error))?;
    match answer[0] {
        b'S' => Ok(true),
        b'N' if config.sslmode == SslMode::Prefer => Ok(false),
        b'N' => Err(Error::no("source.tls-missing", format!("{}: the server does not offer TLS", config.endpoint()))
            .next("Set `ssl = on` at the server, or add sslmode=disable to the source url if the network is trusted.")),
        b'E' => Err(Error::transient(
            "source.unreachable",
            format!("{}: the server refused before it could say why", config.endpoint()),
        )
        .next("Look into the server's log.")),
        _ => Err(Error::no("source.not-postgresql", format!("{}: what answers is not PostgreSQL", config.endpoint()))
            .next("Check host and port in the source url.")),
    }
}

/// A connection that could not be made or broke before its first message.
pub(super) fn unreachable(config: &SourceConfig, error: &io::Error) -> Error {
    Error::transient("source.unreachable", format!("{}: cannot be reached: {error}", config.endpoint()))
        .next("Check that the server runs, and host and port in the source url.")
}

/// An attempt to connect that took too long.
pub(super) fn timed_out(config: &SourceConfig) -> Error {
    let seconds = config.connect_timeout.as_secs();
    Error::transient("source.unreachable", format!("{}: no connection within {seconds} s", config.endpoint()))
        .next("Check host, port and firewalls, or raise connect_timeout in the source url.")
}

impl AsyncRead for Stream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Stream::Tcp(stream) => Pin::new(stream).poll_read(cx, buf),
            Stream::Unix(stream) => Pin::new(stream).poll_read(cx, buf),
            Stream::Tls(stream) => Pin::new(stream.as_mut()).poll_read(cx, buf),
        }
    }
}

impl AsyncWrite for Stream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Stream::Tcp(stream) => Pin::new(stream).poll_write(cx, buf),
            Stream::Unix(stream) => Pin::new(stream).poll_write(cx, buf),
            Stream::Tls(stream) => Pin::new(stream.as_mut()).poll_write(cx, buf),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Stream::Tcp(stream) => Pin::new(stream).poll_flush(cx),
            Stream::Unix(stream) => Pin::new(stream).poll_flush(cx),
            Stream::Tls(stream) => Pin::new(stream.as_mut()).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Stream::Tcp(stream) => Pin::new(stream).poll_shutdown(cx),
            Stream::Unix(stream) => Pin::new(stream).poll_shutdown(cx),
            Stream::Tls(stream) => Pin::new(stream.as_mut()).poll_shutdown(cx),
        }
    }
}
