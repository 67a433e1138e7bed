use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use tokio::sync::{Notify, mpsc, watch};

use super::super::away::Away;
use super::super::checkpoint::{CheckpointParts, Checkpointer, Confirmed};
use super::super::cursors::Cursors;
use super::super::drain::Drainer;
use super::super::feed::SharedHistory;
use super::super::inbox::{Receiver, inbox};
use super::super::lag::LagMeter;
use super::super::router::RouterParts;
use super::super::versions::Versions;
use super::*;
use crate::copy::{Spool, SpoolOptions};
use crate::memory::{Budget, Share};
use crate::schema::history::History;
use crate::source::SourceConfig;
use crate::status::StatusBoard;
use crate::store::Store;

const OID: u32 = 7;
/// Where the stream stands.
const AT: Lsn = Lsn(1000);

/// A router whose stream stands still, and whose destination is the test's own.
struct Bench {
    router: Router,
    commands: mpsc::UnboundedSender<Command>,
    live: Receiver<Live>,
    _stopping: watch::Sender<bool>,
    _directory: tempfile::TempDir,
}

fn name() -> TableName {
    TableName::new("public", "t")
}

fn bench() -> Bench {
    let directory = tempfile::tempdir().unwrap();
    let store = Store::open(directory.path(), "routes").unwrap();
    let spool = Spool::open(&directory.path().join("spool"), SpoolOptions::default()).unwrap();
    let source = Arc::new(SourceConfig::parse("postgres://nobody@127.0.0.1:1/none", "p", "routes").unwrap());
    let versions = Versions::new(SharedHistory::new(History::default()), store.clone(), source, Away::default(), None);
    let (commands, commands_in) = mpsc::unbounded_channel();
    let memory = Budget::new(Some(512 << 20), 1).unwrap_or_else(|error| panic!("{error}"));
    let confirmed = Confirmed::new(vec![AT]);
    let checkpoints = CheckpointParts { store: store.clone(), spool: spool.clone(), confirmed: confirmed.clone() };
    let (live_out, live) = inbox(Share::fixed(1 << 20), Arc::new(Notify::new()));
    let outlet = Outlet {
        name: "d".to_owned(),
        live: live_out,
        checkpointer: Checkpointer::new("d".to_owned(), 0, checkpoints).0,
        spool_full: SpoolFull::default(),
        detached: Arc::new(AtomicBool::new(false)),
        behind: false,
    };
    let (stopping_out, stopping) = watch::channel(false);
    let parts = RouterParts {
        epoch: 0,
        outlets: vec![outlet],
        spool: spool.clone(),
        spool_bytes: 1 << 30,
        store,
        versions: versions.clone(),
        away: Away::default(),
        drainer: Drainer::new(0, spool.clone(), versions, commands.clone(), memory.clone()),
        commands: commands_in,
        memory,
        lag: LagMeter::new(StatusBoard::new("routes"), confirmed.clone()),
        cursors: Cursors::new(spool),
        confirmed,
        hungry: Arc::new(Notify::new()),
        strangers: Arc::new(Notify::new()),
        stopping,
    };
    let router = Router::new(parts, AT);
    Bench { router, commands, live, _stopping: stopping_out, _directory: directory }
}

/// The one that came so many times behind the first.
fn beginning(number: usize) -> Beginning {
    (0..number).fold(Beginning::default(), |beginning, _| beginning.next())
}

impl Bench {
    /// Serves what was asked, until there is nothing.
    async fn serve(&mut self) {
        while let Ok(command) = self.router.parts.commands.try_recv() {
            self.router.commands.push(command);
        }
        self.router.serve_commands().await.unwrap();
    }

    async fn join(&mut self, number: usize) {
        let (answer, joined) = oneshot::channel();
        let join = Command::Join { oid: OID, name: name(), destination: 0, beginning: beginning(number), answer };
        self.commands.send(join).unwrap();
        self.serve().await;
        joined.await.unwrap();
    }

    async fn copied(&mut self, number: usize, floor: Lsn) {
        let drain = Command::Drain { oid: OID, destination: 0, beginning: beginning(number), floor, cursor: None };
        self.commands.send(drain).unwrap();
        self.serve().await;
    }

    /// Serves what drains ask, until one has.
    async fn next_of_a_drain(&mut self) {
        let command = self.router.parts.commands.recv().await.unwrap();
        assert!(matches!(command, Command::DrainEnd { .. }));
        self.router.commands.push(command);
        self.router.serve_commands().await.unwrap();
    }

    fn said_ready(&mut self) -> bool {
        let said = std::iter::from_fn(|| self.live.try_recv()).map(|held| held.item);
        said.into_iter().any(|item| matches!(item, Live::State { oid: OID, state: TableState::Ready }))
    }

    fn has_drain(&self) -> bool {
        self.router.tables[&OID].spooled.iter().any(|spooled| spooled.drain.is_some())
    }
}

#[tokio::test]
async fn a_table_that_is_asked_for_twice_becomes_ready_behind_the_later_copy_and_not_before() {
    let mut bench = bench();
    // At the start, and by a look that did not know it yet.
    bench.router.spool_for(OID, &name(), 0);
    bench.join(1).await;
    bench.copied(0, AT).await;
    assert!(!bench.has_drain() && !bench.said_ready());
    bench.copied(1, AT).await;
    assert!(bench.has_drain());
    bench.next_of_a_drain().await;
    assert!(bench.said_ready());
    assert_eq!(bench.router.tables[&OID].live, [0]);
}

#[tokio::test]
async fn a_join_that_comes_behind_a_later_one_takes_nothing_back() {
    let mut bench = bench();
    bench.join(2).await;
    bench.copied(2, AT).await;
    bench.join(1).await;
    assert!(bench.has_drain());
    bench.next_of_a_drain().await;
    assert!(bench.said_ready());
    bench.join(1).await;
    assert_eq!(bench.router.tables[&OID].live, [0]);
}

#[tokio::test]
async fn once_a_join_is_answered_the_drain_from_before_is_gone() {
    let mut bench = bench();
    bench.router.spool_for(OID, &name(), 0);
    // What is alive of a drain can ask.
    let without = bench.commands.strong_count();
    // It waits for the stream.
    bench.copied(0, Lsn(AT.0 + 1)).await;
    bench.next_of_a_drain().await;
    assert!(bench.has_drain() && bench.commands.strong_count() > without);
    bench.join(1).await;
    assert!(!bench.has_drain());
    assert_eq!(bench.commands.strong_count(), without);
    bench.copied(1, AT).await;
    bench.next_of_a_drain().await;
    assert!(bench.said_ready());
}
