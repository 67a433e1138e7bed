//! The component: the mirror over the host's connections and secrets.

use std::io::{self, Read, Write};
use std::time::{Duration, Instant};

use tidegate_sdk::net::TcpStream;
use tidegate_sdk::prelude::*;

use crate::connect::{Connector, Stream};
use crate::ddl;
use crate::mirror::{Identity, Mirror};
use crate::settings::Settings;

/// What suits the destination: enough rows for one COPY to pay, few enough to be quick.
const GROUP_BYTES: u64 = 4 << 20;
/// Sessions at the server, at most.
const LANES: u64 = 8;
/// How often the host is told that we are still waiting for the server.
const SIGN_OF_LIFE: Duration = Duration::from_secs(5);

struct Postgres(Mirror<Host>);

impl Destination for Postgres {
    type Settings = Settings;
    type TableSettings = NoSettings;
    const NAME: &'static str = "postgres";
    const VERSION: &'static str = env!("CARGO_PKG_VERSION");
    const DESCRIPTION: &'static str = "Mirrors tables into another PostgreSQL";
    const PERMISSIONS: &'static [&'static str] = &["network:host", "secret:password"];

    fn capabilities() -> Vec<&'static str> {
        use capability::{ADD_DEFAULT_METADATA, ATOMIC_DDL, MERGE, PARTIAL_ROWS, RESUMABLE_COPY, TRANSACTIONAL};
        let others = [MERGE, PARTIAL_ROWS, TRANSACTIONAL, ATOMIC_DDL, ADD_DEFAULT_METADATA, RESUMABLE_COPY];
        capability::with_steps(&ddl::STEPS, &others)
    }

    fn open(session: Session<Settings>) -> Result<(Self, Ready), Failure> {
        let identity = Identity {
            pipeline: session.pipeline,
            destination: session.destination,
            lane: session.lane,
            generation: session.generation,
        };
        let mirror = Mirror::open(Host, session.settings, &identity)?;
        let ready = Ready::default()
            .limit("group-bytes", GROUP_BYTES)
            .limit("lanes", LANES)
            .detail("server-version", mirror.server_version());
        Ok((Postgres(mirror), ready))
    }

    fn preflight(&mut self, tables: &[Table]) -> Result<Vec<Notice>, Failure> {
        self.0.preflight(tables)
    }

    fn render_table(&mut self, table: &Table) -> Result<PhysicalTable, Failure> {
        self.0.render_table(table)
    }

    fn inspect_table(&mut self, table: &Table) -> Result<Option<PhysicalTable>, Failure> {
        self.0.inspect_table(table)
    }

    fn attach_table(&mut self, table: &Table) -> Result<Option<Position>, Failure> {
        self.0.attach_table(table)
    }

    fn begin_copy(&mut self, table: &Table, run: &str) -> Result<(), Failure> {
        self.0.begin_copy(table, run)
    }

    fn finish_copy(&mut self, table: &Table, run: &str, as_of: Position) -> Result<(), Failure> {
        self.0.finish_copy(table, run, as_of)
    }

    fn check_schema(&mut self, change: &SchemaChange) -> Result<Vec<Notice>, Failure> {
        self.0.check_schema(change)
    }

    fn apply_schema(&mut self, change: &SchemaChange) -> Result<Vec<Notice>, Failure> {
        self.0.apply_schema(change)
    }

    fn write_group(&mut self, group: Group) -> Result<Ack, Failure> {
        self.0.write_group(&group)
    }

    fn drop_table(&mut self, table: &Table) -> Result<(), Failure> {
        self.0.drop_table(table)
    }

    fn close(self) {
        self.0.close();
    }
}

tidegate_sdk::export!(Postgres);

/// The host's side of `connect`.
struct Host;

impl Connector for Host {
    type Stream = HostStream;

    fn dial(&self, host: &str, port: u16, timeout: Duration, response: Duration) -> io::Result<HostStream> {
        Ok(HostStream { stream: TcpStream::connect(host, port, timeout)?, connect: timeout, response })
    }

    fn secret(&self, name: &str) -> Result<String, String> {
        host::secret(name).map_err(|failure| failure.message)
    }
}

/// A connection through the host. While it waits it says so, for the host ends a call
/// that stays silent.
struct HostStream {
    stream: TcpStream,
    connect: Duration,
    response: Duration,
}

impl Stream for HostStream {
    fn start_tls(&mut self) -> io::Result<()> {
        self.stream.set_timeout(self.connect);
        self.stream.start_tls(&[])
    }

    fn peer_certificate(&self) -> Option<Vec<u8>> {
        self.stream.peer_certificate()
    }
}

impl Read for HostStream {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let end = Instant::now() + self.response;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            self.stream.set_timeout(SIGN_OF_LIFE.min(left));
            match self.stream.read(into) {
                Err(error) if error.kind() == io::ErrorKind::TimedOut && left > SIGN_OF_LIFE => {
                    host::working("waiting for PostgreSQL")
                }
                read => return read,
            }
        }
    }
}

impl Write for HostStream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        // A server that takes nothing for so long is waiting for a lock, or gone.
        host::working("sending to PostgreSQL");
        self.stream.set_timeout(self.response);
        self.stream.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}
