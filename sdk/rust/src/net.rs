//! TCP and TLS to a granted `host:port`, through the host: it resolves the name,
//! checks every address, dials, and speaks TLS.

use std::fmt;
use std::io::{self, BufRead, Read, Write};
use std::time::Duration;

use crate::bindings::tidegate::destination::net::{Connection, NetError as WireError};

/// What is asked for in one call at least, so that small reads are not calls of the
/// host each.
const READ_AHEAD: usize = 32 * 1024;

/// At most this much crosses to the host in one call.
const CHUNK: usize = 1024 * 1024;

/// What the host answered; found in [`io::Error::get_ref`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NetError {
    /// Open set: forbidden, dns, refused, timeout, tls, closed.
    pub code: String,
    /// For a person.
    pub message: String,
}

impl fmt::Display for NetError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.message, self.code)
    }
}

impl std::error::Error for NetError {}

fn io_error(error: WireError) -> io::Error {
    let kind = match error.code.as_str() {
        "forbidden" => io::ErrorKind::PermissionDenied,
        "dns" => io::ErrorKind::NotFound,
        "refused" => io::ErrorKind::ConnectionRefused,
        "timeout" => io::ErrorKind::TimedOut,
        "closed" => io::ErrorKind::ConnectionAborted,
        "tls" => io::ErrorKind::InvalidData,
        _ => io::ErrorKind::Other,
    };
    io::Error::new(kind, NetError { code: error.code, message: error.message })
}

fn milliseconds(duration: Duration) -> u32 {
    u32::try_from(duration.as_millis()).unwrap_or(u32::MAX)
}

/// A connection. Reads are buffered, writes are not: wrap it, or write messages whole.
pub struct TcpStream {
    connection: Connection,
    timeout: Duration,
    buffer: Vec<u8>,
    /// Where in `buffer` the unread bytes begin.
    unread: usize,
    ended: bool,
}

impl fmt::Debug for TcpStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TcpStream").field("timeout", &self.timeout).finish_non_exhaustive()
    }
}

impl TcpStream {
    /// Dials. The timeout then holds for every later call, until
    /// [`set_timeout`](Self::set_timeout).
    pub fn connect(host: &str, port: u16, timeout: Duration) -> io::Result<TcpStream> {
        if cfg!(not(target_family = "wasm")) {
            return Err(io::Error::new(io::ErrorKind::Unsupported, "there is no host outside of the sandbox"));
        }
        let connection = Connection::dial(host, port, milliseconds(timeout)).map_err(io_error)?;
        Ok(TcpStream { connection, timeout, buffer: Vec::new(), unread: 0, ended: false })
    }

    /// How long one read, write or handshake may take.
    pub fn set_timeout(&mut self, timeout: Duration) {
        self.timeout = timeout;
    }

    /// Speaks TLS from here on. Which certificates are trusted is the grant's matter.
    /// Refused when bytes came that were not read: whoever is in between could have
    /// put them there.
    pub fn start_tls(&mut self, alpn: &[&str]) -> io::Result<()> {
        if self.unread < self.buffer.len() {
            let message = "the server sent bytes before TLS began";
            return Err(io::Error::new(io::ErrorKind::InvalidData, message));
        }
        let alpn: Vec<String> = alpn.iter().map(|&name| name.to_owned()).collect();
        self.connection.start_tls(&alpn, milliseconds(self.timeout)).map_err(io_error)
    }

    /// The server's certificate as DER, for channel binding.
    pub fn peer_certificate(&self) -> Option<Vec<u8>> {
        self.connection.peer_certificate()
    }

    fn receive(&mut self, max: usize) -> io::Result<Vec<u8>> {
        if self.ended {
            return Ok(Vec::new());
        }
        let max = u32::try_from(max.clamp(READ_AHEAD, CHUNK)).unwrap_or(u32::MAX);
        let bytes = self.connection.receive(max, milliseconds(self.timeout)).map_err(io_error)?;
        self.ended = bytes.is_empty();
        Ok(bytes)
    }
}

impl BufRead for TcpStream {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        if self.unread == self.buffer.len() {
            self.buffer = self.receive(READ_AHEAD)?;
            self.unread = 0;
        }
        Ok(&self.buffer[self.unread..])
    }

    fn consume(&mut self, amount: usize) {
        self.unread = (self.unread + amount).min(self.buffer.len());
    }
}

impl Read for TcpStream {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        if into.is_empty() {
            return Ok(0);
        }
        if self.unread == self.buffer.len() {
            self.buffer = self.receive(into.len())?;
            self.unread = 0;
        }
        let unread = &self.buffer[self.unread..];
        let taken = unread.len().min(into.len());
        into[..taken].copy_from_slice(&unread[..taken]);
        self.unread += taken;
        Ok(taken)
    }
}

impl Write for TcpStream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let bytes = &bytes[..bytes.len().min(CHUNK)];
        if !bytes.is_empty() {
            self.connection.transmit(bytes, milliseconds(self.timeout)).map_err(io_error)?;
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
