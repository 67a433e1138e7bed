//! Interface `net`: TCP and TLS to what is granted.
//!
//! A name list alone is not safe: a granted name may lead to the machine itself or to
//! the metadata service of a cloud, now or after the next look-up. So the host resolves,
//! checks every address, and connects to an address that it checked, never to a name.

use std::io;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs as _};
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use rustls::{ClientConfig, RootCertStore};
use rustls_pki_types::pem::PemObject as _;
use rustls_pki_types::{CertificateDer, ServerName};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout_at};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use wasmtime::component::Resource;

use super::address::Range;
use super::bindings::v0_1::tidegate::destination::net::{self, NetError};
use super::instance::State;
use super::log::Log;
use super::permissions::{Address, NetworkGrant, normal_host};
use super::text::clean;

/// An open connection of a guest.
pub struct Connection {
    host: String,
    grant: NetworkGrant,
    stream: Stream,
}

enum Stream {
    Plain(TcpStream),
    Tls(Box<TlsStream<TcpStream>>),
    /// A hand-over to TLS, or a transmission, that failed half-way: nobody knows where
    /// in the stream the other side stands.
    Broken,
}

type Answer<T> = Result<T, NetError>;

/// Addresses of one name that are tried.
const MOST_ADDRESSES: usize = 64;
/// Protocols that are offered in a TLS handshake.
const MOST_PROTOCOLS: usize = 32;

impl net::Host for State {}

impl net::HostConnection for State {
    async fn dial(
        &mut self,
        host: String,
        port: u16,
        timeout_ms: u32,
    ) -> wasmtime::Result<Answer<Resource<Connection>>> {
        let deadline = self.deadline(timeout_ms);
        let dialled = match self.permitted(&host, port) {
            Ok((host, grant)) => {
                dial_granted(self.log.clone(), Arc::clone(&self.lookups), host, port, grant, deadline).await
            }
            Err(refused) => Err(refused),
        };
        Ok(match dialled {
            Ok(connection) => {
                self.connections += 1;
                Ok(self.table.push(connection)?)
            }
            Err(error) => Err(error),
        })
    }

    async fn start_tls(
        &mut self,
        this: Resource<Connection>,
        alpn: Vec<String>,
        timeout_ms: u32,
    ) -> wasmtime::Result<Answer<()>> {
        let deadline = self.deadline(timeout_ms);
        let alpn = match protocols(alpn) {
            Ok(alpn) => alpn,
            Err(why) => return Ok(Err(error("invalid", why))),
        };
        Ok(self.table.get_mut(&this)?.start_tls(alpn, deadline).await)
    }

    async fn peer_certificate(&mut self, this: Resource<Connection>) -> wasmtime::Result<Option<Vec<u8>>> {
        let Stream::Tls(stream) = &self.table.get(&this)?.stream else { return Ok(None) };
        let chain = stream.get_ref().1.peer_certificates();
        Ok(chain.and_then(|chain| chain.first()).map(|certificate| certificate.to_vec()))
    }

    async fn receive(
        &mut self,
        this: Resource<Connection>,
        max: u32,
        timeout_ms: u32,
    ) -> wasmtime::Result<Answer<Vec<u8>>> {
        let deadline = self.deadline(timeout_ms);
        let max = usize::try_from(max).unwrap_or(usize::MAX).min(self.limits.receive_bytes);
        Ok(self.table.get_mut(&this)?.receive(max, deadline).await)
    }

    async fn transmit(
        &mut self,
        this: Resource<Connection>,
        data: Vec<u8>,
        timeout_ms: u32,
    ) -> wasmtime::Result<Answer<()>> {
        let deadline = self.deadline(timeout_ms);
        Ok(self.table.get_mut(&this)?.transmit(&data, deadline).await)
    }

    async fn drop(&mut self, this: Resource<Connection>) -> wasmtime::Result<()> {
        self.table.delete(this)?;
        self.connections = self.connections.saturating_sub(1);
        Ok(())
    }
}

impl State {
    fn deadline(&self, timeout_ms: u32) -> Instant {
        Instant::now() + Duration::from_millis(timeout_ms.into()).min(self.limits.network_wait)
    }

    /// The grant for a name, before it is resolved: names that are not granted never
    /// reach a resolver.
    fn permitted(&self, host: &str, port: u16) -> Answer<(String, NetworkGrant)> {
        let host = clean(&normal_host(host), 255);
        let Some(grant) = self.grants.network(&host, port) else {
            return Err(refuse(&self.log, &host, port, "it is not granted"));
        };
        if self.connections >= self.limits.connections {
            return Err(refuse(&self.log, &host, port, "too many connections are open"));
        }
        Ok((host, grant.clone()))
    }
}

/// The answer to a dial that is not permitted, and its audit line.
fn refuse(log: &Log, host: &str, port: u16, reason: &str) -> NetError {
    let address = Address(host, port).to_string();
    log.refusal("network", &address, reason);
    error("forbidden", format!("{address} is refused: {reason}"))
}

async fn dial_granted(
    log: Log,
    lookups: Arc<Semaphore>,
    host: String,
    port: u16,
    grant: NetworkGrant,
    deadline: Instant,
) -> Answer<Connection> {
    let mut checked = Vec::new();
    let mut refused = None;
    for ip in resolve(&host, lookups, deadline).await? {
        if grant.permits(ip) {
            checked.push(SocketAddr::new(ip, port));
        } else {
            let reason =
                format!("it leads to {ip}, a {} address, which the grant does not name", Range::of(ip).as_str());
            refused = Some(refuse(&log, &host, port, &reason));
        }
    }
    let stream = connect(&checked, deadline).await.map_err(|failed| match (failed, refused) {
        (None, Some(refused)) => refused,
        (None, None) => error("dns", format!("{host} has no address")),
        (Some(failed), _) => failed,
    })?;
    Ok(Connection { host, grant, stream: Stream::Plain(stream) })
}

/// The addresses of a host; for one that is an address, itself.
///
/// The operating system's look-up cannot be given up: its thread stays until the name
/// server answers. So the permit stays with it, and a guest that gives up waiting and asks
/// again and again holds a few threads of the process, not all of them.
async fn resolve(host: &str, lookups: Arc<Semaphore>, deadline: Instant) -> Answer<Vec<IpAddr>> {
    if let Ok(address) = host.parse() {
        return Ok(vec![address]);
    }
    let name = host.to_owned();
    let found = async {
        let permit = lookups.acquire_owned().await.map_err(io::Error::other)?;
        let looked_up = tokio::task::spawn_blocking(move || {
            let _permit = permit;
            let found = (name.as_str(), 0).to_socket_addrs()?;
            io::Result::Ok(found.map(|found| found.ip()).take(MOST_ADDRESSES).collect::<Vec<IpAddr>>())
        });
        looked_up.await.map_err(io::Error::other)?
    };
    match timeout_at(deadline, found).await {
        Ok(Ok(mut addresses)) => {
            addresses.dedup();
            Ok(addresses)
        }
        Ok(Err(e)) => Err(error("dns", format!("{host} cannot be resolved: {e}"))),
        Err(_) => Err(error("timeout", format!("{host} was not resolved in time"))),
    }
}

/// Names of protocols as TLS can carry them (RFC 7301).
fn protocols(names: Vec<String>) -> Result<Vec<Vec<u8>>, String> {
    if names.len() > MOST_PROTOCOLS {
        return Err(format!("at most {MOST_PROTOCOLS} protocols can be offered"));
    }
    match names.iter().find(|name| name.is_empty() || name.len() > 255) {
        Some(name) => Err(format!("the name of a protocol has 1 to 255 bytes, not {}", name.len())),
        None => Ok(names.into_iter().map(String::into_bytes).collect()),
    }
}

/// The first of `addresses` that answers; each gets its share of the time. `None`: there
/// was none to try.
async fn connect(addresses: &[SocketAddr], deadline: Instant) -> Result<TcpStream, Option<NetError>> {
    let mut last = None;
    for (tried, address) in addresses.iter().enumerate() {
        let left = deadline.saturating_duration_since(Instant::now());
        let share = left / u32::try_from(addresses.len() - tried).unwrap_or(1).max(1);
        match timeout_at(Instant::now() + share, TcpStream::connect(address)).await {
            Ok(Ok(stream)) => {
                // A protocol of requests and answers: the last part of one must not wait.
                let _ = stream.set_nodelay(true);
                return Ok(stream);
            }
            Ok(Err(e)) => last = Some(error(code_of(&e), format!("{address}: {e}"))),
            Err(_) => last = Some(error("timeout", format!("{address} did not answer in time"))),
        }
    }
    Err(last)
}

impl Connection {
    async fn start_tls(&mut self, alpn: Vec<Vec<u8>>, deadline: Instant) -> Answer<()> {
        let config = tls_config(self.grant.ca.as_deref(), alpn).await?;
        let name = ServerName::try_from(self.host.clone()).map_err(|e| error("tls", format!("{}: {e}", self.host)))?;
        let plain = match std::mem::replace(&mut self.stream, Stream::Broken) {
            Stream::Plain(plain) => plain,
            other => {
                self.stream = other;
                return Err(error("tls", "the connection does not speak plain text".into()));
            }
        };
        match timeout_at(deadline, TlsConnector::from(Arc::new(config)).connect(name, plain)).await {
            Ok(Ok(stream)) => {
                self.stream = Stream::Tls(Box::new(stream));
                Ok(())
            }
            Ok(Err(e)) => Err(error("tls", format!("{}: {e}", self.host))),
            Err(_) => Err(error("timeout", format!("{}: no TLS handshake in time", self.host))),
        }
    }

    async fn receive(&mut self, max: usize, deadline: Instant) -> Answer<Vec<u8>> {
        if max == 0 {
            return Err(error("invalid", "receive needs room for a byte or more".into()));
        }
        // Grown by what comes, not reserved: a guest may ask for the most every time.
        let mut data = Vec::with_capacity(max.min(64 * 1024));
        let read = async {
            match &mut self.stream {
                Stream::Plain(stream) => stream.read_buf(&mut data).await,
                Stream::Tls(stream) => stream.read_buf(&mut data).await,
                Stream::Broken => Err(io::ErrorKind::NotConnected.into()),
            }
        };
        // A read that is given up has taken nothing (`AsyncReadExt::read_buf`).
        match timeout_at(deadline, read).await {
            Ok(Ok(_)) => Ok(data),
            Ok(Err(e)) => Err(error(code_of(&e), format!("{}: {e}", self.host))),
            Err(_) => Err(error("timeout", format!("{}: nothing came in time", self.host))),
        }
    }

    async fn transmit(&mut self, data: &[u8], deadline: Instant) -> Answer<()> {
        // Taken out for the time of the write: given up half-way, it stays broken.
        let mut stream = std::mem::replace(&mut self.stream, Stream::Broken);
        let write = async {
            match &mut stream {
                Stream::Plain(stream) => stream.write_all(data).await,
                Stream::Tls(stream) => {
                    stream.write_all(data).await?;
                    stream.flush().await
                }
                Stream::Broken => Err(io::ErrorKind::NotConnected.into()),
            }
        };
        match timeout_at(deadline, write).await {
            Ok(Ok(())) => {
                self.stream = stream;
                Ok(())
            }
            Ok(Err(e)) => Err(error(code_of(&e), format!("{}: {e}", self.host))),
            Err(_) => Err(error("timeout", format!("{}: {} bytes were not taken in time", self.host, data.len()))),
        }
    }
}

fn error(code: &str, message: String) -> NetError {
    NetError { code: code.into(), message }
}

/// The contract's word for an error of the operating system.
fn code_of(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::ConnectionRefused => "refused",
        io::ErrorKind::TimedOut => "timeout",
        io::ErrorKind::HostUnreachable | io::ErrorKind::NetworkUnreachable => "unreachable",
        io::ErrorKind::InvalidData => "tls",
        io::ErrorKind::ConnectionReset
        | io::ErrorKind::ConnectionAborted
        | io::ErrorKind::BrokenPipe
        | io::ErrorKind::NotConnected
        | io::ErrorKind::UnexpectedEof => "closed",
        _ => "io",
    }
}

/// Certificate and name are always checked, against the grant's authorities or the
/// system's.
async fn tls_config(ca: Option<&Path>, alpn: Vec<Vec<u8>>) -> Answer<ClientConfig> {
    let ca = ca.map(Path::to_owned);
    let roots = tokio::task::spawn_blocking(move || match ca {
        Some(file) => file_roots(&file),
        None => system_roots(),
    });
    let roots = roots.await.map_err(|e| error("tls", e.to_string()))??;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|e| error("tls", e.to_string()))?
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = alpn;
    Ok(config)
}

/// Read anew for each connection: the file may be replaced while we run.
fn file_roots(file: &Path) -> Answer<Arc<RootCertStore>> {
    let bad = |why: String| error("tls", format!("the authorities in {}: {why}", file.display()));
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_file_iter(file).map_err(|e| bad(e.to_string()))? {
        roots.add(certificate.map_err(|e| bad(e.to_string()))?).map_err(|e| bad(e.to_string()))?;
    }
    if roots.is_empty() { Err(bad("none found".into())) } else { Ok(Arc::new(roots)) }
}

/// Some stores hold a certificate that cannot be parsed: the others count.
fn system_roots() -> Answer<Arc<RootCertStore>> {
    static ROOTS: OnceLock<Arc<RootCertStore>> = OnceLock::new();
    if let Some(roots) = ROOTS.get() {
        return Ok(Arc::clone(roots));
    }
    let found = rustls_native_certs::load_native_certs();
    let mut roots = RootCertStore::empty();
    let (added, _) = roots.add_parsable_certificates(found.certs);
    if added == 0 {
        let why = found.errors.first().map_or_else(String::new, |e| format!(": {e}"));
        return Err(error(
            "tls",
            format!("the system has no certificate authorities{why}; name a file with `ca` in the grant"),
        ));
    }
    Ok(Arc::clone(ROOTS.get_or_init(|| Arc::new(roots))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_guest_that_gives_up_waiting_for_a_name_does_not_get_another_thread() {
        let lookups = Arc::new(Semaphore::new(1));
        // As if a name server did not answer the first one.
        let held = Arc::clone(&lookups).acquire_owned().await.unwrap();
        let soon = || Instant::now() + Duration::from_millis(20);
        for _ in 0..3 {
            let refused = resolve("localhost", Arc::clone(&lookups), soon()).await.unwrap_err();
            assert_eq!(refused.code, "timeout");
        }
        // An address needs no look-up.
        assert_eq!(resolve("127.0.0.1", Arc::clone(&lookups), soon()).await.unwrap().len(), 1);
        drop(held);
        let later = Instant::now() + Duration::from_secs(10);
        assert!(!resolve("localhost", Arc::clone(&lookups), later).await.unwrap().is_empty());
        assert_eq!(lookups.available_permits(), 1);
    }

    #[test]
    fn names_of_protocols_that_tls_cannot_carry_are_refused() {
        let names = |names: &[&str]| protocols(names.iter().map(|name| (*name).to_owned()).collect());
        assert_eq!(names(&["h2", "http/1.1"]).unwrap(), [b"h2".to_vec(), b"http/1.1".to_vec()]);
        for bad in [vec![""], vec!["h2", &"x".repeat(256)], vec!["h2"; 33]] {
            names(&bad).unwrap_err();
        }
    }
}
