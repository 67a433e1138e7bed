//! What the plugin needs from outside: a byte stream and the password. In a component
//! both come from the host; in tests from the operating system.

use std::io::{self, Read, Write};
use std::time::Duration;

/// A connection to the server. A dropped one is closed.
pub trait Stream: Read + Write {
    /// Speaks TLS from here on.
    fn start_tls(&mut self) -> io::Result<()>;

    /// The server's certificate (DER), once TLS is spoken.
    fn peer_certificate(&self) -> Option<Vec<u8>>;
}

/// Where connections and secrets come from.
pub trait Connector {
    /// What `dial` gives.
    type Stream: Stream;

    /// Connects. `response` bounds how long one read may wait.
    fn dial(&self, host: &str, port: u16, timeout: Duration, response: Duration) -> io::Result<Self::Stream>;

    /// The secret of this name; asked anew for each connection, since secrets rotate.
    fn secret(&self, name: &str) -> Result<String, String>;
}
