//! A link that can be bad: every connection to it goes on to a port, as well or as badly
//! as it is told to.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

use crate::Result;

/// How a link is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Link {
    /// Everything passes.
    Open,
    /// Everything passes, each piece so much later.
    Slow(Duration),
    /// Nothing passes and nothing is lost.
    Stalled,
    /// The server hears, and what it answers is lost: the other end is still there for
    /// whoever asks TCP.
    HalfOpen,
    /// Nobody gets in. Who is in stays.
    Refusing,
    /// So many bytes pass, then all connections are cut.
    Limited(i64),
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Direction {
    ToServer,
    FromServer,
}

/// See the module.
pub struct Proxy {
    port: u16,
    link: watch::Sender<Link>,
    /// Grows when all connections have to end.
    cuts: watch::Sender<u64>,
    budget: Arc<AtomicI64>,
    _runtime: tokio::runtime::Runtime,
}

impl Proxy {
    pub fn start(target: u16) -> Result<Proxy> {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
        let listener = runtime.block_on(TcpListener::bind(("127.0.0.1", 0)))?;
        let port = listener.local_addr()?.port();
        let (link, cuts) = (watch::Sender::new(Link::Open), watch::Sender::new(0));
        let budget = Arc::new(AtomicI64::new(0));
        let ways = Ways { link: link.subscribe(), cuts: cuts.subscribe(), cut: cuts.clone(), budget: budget.clone() };
        runtime.spawn(accept(listener, target, ways));
        Ok(Proxy { port, link, cuts, budget, _runtime: runtime })
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    pub fn set(&self, link: Link) {
        if let Link::Limited(bytes) = link {
            self.budget.store(bytes, Ordering::SeqCst);
        }
        self.link.send_replace(link);
    }

    /// Ends all connections.
    pub fn cut(&self) {
        self.cuts.send_modify(|cuts| *cuts += 1);
    }
}

#[derive(Clone)]
struct Ways {
    link: watch::Receiver<Link>,
    cuts: watch::Receiver<u64>,
    cut: watch::Sender<u64>,
    budget: Arc<AtomicI64>,
}

async fn accept(listener: TcpListener, target: u16, ways: Ways) {
    loop {
        let Ok((client, _)) = listener.accept().await else { continue };
        if *ways.link.borrow() == Link::Refusing {
            continue;
        }
        let ways = ways.clone();
        tokio::spawn(async move {
            // A server that is away is as good as a link that is cut.
            let Ok(server) = TcpStream::connect(("127.0.0.1", target)).await else { return };
            if client.set_nodelay(true).and_then(|()| server.set_nodelay(true)).is_err() {
                return;
            }
            let (from_client, to_client) = client.into_split();
            let (from_server, to_server) = server.into_split();
            // With one direction the other one ends, and both sockets with them.
            tokio::select! {
                () = pump(from_client, to_server, Direction::ToServer, ways.clone()) => {}
                () = pump(from_server, to_client, Direction::FromServer, ways) => {}
            }
        });
    }
}

/// Carries bytes one way until either end or the link is cut.
async fn pump(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, direction: Direction, mut ways: Ways) {
    let mut buffer = vec![0; 64 * 1024];
    let mut lost = false;
    ways.cuts.mark_unchanged();
    loop {
        let read = tokio::select! {
            read = from.read(&mut buffer) => read,
            _ = ways.cuts.changed() => return,
            _ = ways.link.changed() => {
                // A stream with a hole in it is no stream.
                if lost && *ways.link.borrow() != Link::HalfOpen {
                    return;
                }
                continue;
            }
        };
        let Ok(length @ 1..) = read else { return };
        let link = *ways.link.borrow();
        let mut passing = length;
        match link {
            Link::Open | Link::Refusing => {}
            Link::Slow(by) => tokio::select! {
                () = tokio::time::sleep(by) => {}
                _ = ways.cuts.changed() => return,
            },
            Link::Stalled => {
                let mut link = ways.link.clone();
                tokio::select! {
                    _ = link.wait_for(|link| *link != Link::Stalled) => {}
                    _ = ways.cuts.changed() => return,
                }
            }
            Link::HalfOpen if direction == Direction::FromServer => {
                lost = true;
                continue;
            }
            Link::HalfOpen => {}
            Link::Limited(_) => {
                let left = ways.budget.fetch_sub(length as i64, Ordering::SeqCst);
                passing = usize::try_from(left).unwrap_or(0).min(length);
            }
        }
        let written = tokio::select! {
            written = to.write_all(&buffer[..passing]) => written,
            _ = ways.cuts.changed() => return,
        };
        if written.is_err() {
            return;
        }
        if passing < length {
            ways.cut.send_modify(|cuts| *cuts += 1);
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};

    use super::*;

    /// A server that answers every byte with itself, and a proxy before it.
    fn echo() -> Proxy {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let mut stream = stream.unwrap();
                std::thread::spawn(move || {
                    let mut byte = [0];
                    while stream.read_exact(&mut byte).is_ok() && stream.write_all(&byte).is_ok() {}
                });
            }
        });
        Proxy::start(port).unwrap()
    }

    fn dial(proxy: &Proxy) -> TcpStream {
        let stream = TcpStream::connect(("127.0.0.1", proxy.port())).unwrap();
        stream.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
        stream
    }

    fn answers(stream: &mut TcpStream) -> bool {
        let mut byte = [0];
        stream.write_all(b"x").is_ok() && stream.read_exact(&mut byte).is_ok()
    }

    #[test]
    fn a_stalled_link_loses_nothing_and_a_half_open_one_is_cut_when_it_heals() {
        let proxy = echo();
        let mut stream = dial(&proxy);
        assert!(answers(&mut stream));
        proxy.set(Link::Stalled);
        assert!(!answers(&mut stream));
        proxy.set(Link::Open);
        let mut byte = [0];
        stream.read_exact(&mut byte).unwrap();
        assert!(answers(&mut stream));
        proxy.set(Link::HalfOpen);
        assert!(!answers(&mut stream));
        proxy.set(Link::Open);
        assert!(!answers(&mut stream));
        assert!(answers(&mut dial(&proxy)));
    }

    #[test]
    fn a_limited_link_passes_so_many_bytes_and_a_refusing_one_lets_nobody_in() {
        let proxy = echo();
        let mut stream = dial(&proxy);
        proxy.set(Link::Limited(7));
        assert_eq!((0..20).take_while(|_| answers(&mut stream)).count(), 3);
        proxy.set(Link::Refusing);
        assert!(!answers(&mut dial(&proxy)));
        proxy.set(Link::Open);
        let mut stream = dial(&proxy);
        assert!(answers(&mut stream));
        proxy.cut();
        assert!(!answers(&mut stream));
    }
}
