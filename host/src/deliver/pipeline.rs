//! A pipeline at work: one slot, any number of destinations.

use std::collections::HashMap;
use std::sync::{Arc, RwLock};
use std::time::Duration;

use tokio::sync::{Notify, mpsc, oneshot, watch};

use crate::config::{Config, DestinationConfig, Mode};
use crate::copy::snapshot::WaveOptions;
use crate::copy::spool::{Spool, SpoolOptions};
use crate::error::{Error, Result};
use crate::plugin::{InstanceOptions, Limits, Plugin, PluginState, StateFuture};
use crate::position::{Lsn, Position};
use crate::schema::history::History;
use crate::source::{Feedback, ReplicationConnection, WalReader};
use crate::status::{DestinationState, StatusBoard};
use crate::store::{DestinationRecord, Loaded, SlotRecord, SourceRecord, Store, TableRecord, TableState};
use crate::wire;

use super::checkpoint::{CheckpointParts, Checkpointer, Confirmed};
use super::copier::{Copier, CopyOutlet, Wanted};
use super::cursors::Cursors;
use super::destination::{Copying, Destination, Event, Live, Parts, Table, show_table};
use super::drain::Drainer;
use super::feed::SharedHistory;
use super::inbox::{self, Receiver, Sender};
use super::lag::LagMeter;
use super::lane::Lane;
use super::retry::Backoff;
use super::router::{Command, Outlet, Router, RouterParts, Routing};
use super::start::{Source, check_tables, ensure_slot, load_plugins, look_at_source, refusal};
use super::versions::Versions;

/// Bytes of changes that may wait for a destination, or be under way to it.
const LIVE_BYTES: usize = 64 << 20;
/// The same for the rows of copies.
const COPYING_BYTES: usize = 16 << 20;
/// Bytes of the spool on disk.
const SPOOL_BYTES: u64 = 64 << 30;
/// Connections that copy tables, beside the stream's.
const COPY_CONNECTIONS: usize = 4;
/// How long a destination that did not end within the drain may take to let go.
const LET_GO: Duration = Duration::from_secs(2);

/// Why a pipeline stopped, when nothing went wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopReason {
    /// It was told to, and everything read was made durable first.
    Drained,
    /// It was told to, and the drain's time ran out: the rest is read again at the next
    /// start.
    DrainTimedOut,
}

/// A pipeline with all its checks behind it.
pub struct Pipeline {
    config: Config,
    board: StatusBoard,
    plugins: Vec<Arc<Plugin>>,
    store: Store,
    loaded: Loaded,
    source: Source,
    record: SourceRecord,
    spool: Spool,
}

impl Pipeline {
    /// Checks everything that can be checked and makes the slot. On an error nothing
    /// was started.
    pub async fn start(config: Config, board: StatusBoard) -> Result<Pipeline> {
        let plugins = load_plugins(&config).await?;
        let store = Store::open(&config.pipeline.state, &config.pipeline.name)?;
        let loaded = store.load()?;
        let source = look_at_source(&config.source).await.map_err(refusal)?;
        for warning in &source.facts.warnings {
            tracing::warn!(code = warning.code(), next = warning.next_step(), "{warning}");
        }
        for (destination, plugin) in config.destinations.iter().zip(&plugins) {
            check_tables(destination, plugin, &source)?;
        }
        let options = SpoolOptions { limit_bytes: SPOOL_BYTES, ..SpoolOptions::default() };
        let spool = Spool::open(&config.pipeline.state.join("spool"), options)?;
        let record = ensure_slot(&config, &store, &loaded, &source.facts).await.map_err(refusal)?;
        Ok(Pipeline { config, board, plugins, store, loaded, source, record, spool })
    }

    /// Replicates until `shutdown` becomes true, or until something goes wrong that does
    /// not pass by itself.
    pub async fn run(self, shutdown: watch::Receiver<bool>) -> Result<StopReason> {
        let drain = self.config.pipeline.drain;
        let mut running = Running::begin(self, shutdown).await?;
        let ended = running.stream().await;
        let drained = running.end(drain).await;
        ended?;
        Ok(if drained { StopReason::Drained } else { StopReason::DrainTimedOut })
    }
}

/// The store, as plugins see it.
struct StoreState(Store);

impl PluginState for StoreState {
    fn get<'a>(&'a self, destination: &'a str, key: &'a str) -> StateFuture<'a, Option<Vec<u8>>> {
        Box::pin(self.0.get_state(destination, key))
    }

    fn set<'a>(&'a self, destination: &'a str, key: &'a str, value: Option<Vec<u8>>) -> StateFuture<'a, ()> {
        Box::pin(self.0.set_state(destination, key, value))
    }
}

/// What all destinations share.
struct Shared {
    epoch: u32,
    pipeline: String,
    store: Store,
    history: SharedHistory,
    board: StatusBoard,
    cursors: Cursors,
    checkpoints: CheckpointParts,
    events: mpsc::UnboundedSender<Event>,
    hurry: watch::Receiver<bool>,
}

/// Threads and tasks of a running pipeline.
struct Running {
    router: Option<Router>,
    source: Arc<crate::source::config::SourceConfig>,
    slot: String,
    publication: String,
    confirmed: Confirmed,
    copier: tokio::task::JoinHandle<()>,
    drainer: Drainer,
    destinations: Vec<Ending>,
    shutdown: watch::Receiver<bool>,
    hurry: watch::Sender<bool>,
    connection: Option<(WalReader, Feedback)>,
}

/// A destination's end: its thread's, and then its last checkpoint's.
struct Ending {
    name: String,
    ended: tokio::task::JoinHandle<()>,
}

impl Running {
    async fn begin(pipeline: Pipeline, shutdown: watch::Receiver<bool>) -> Result<Running> {
        let Pipeline { config, board, plugins, store, loaded, source, record, spool } = pipeline;
        let source_config = Arc::new(config.source.clone());
        let records = destination_records(&config, &loaded, &record);
        for record in &records {
            store.save_destination(record.clone()).await?;
        }
        let confirmed = Confirmed::new(records.iter().map(|record| record.checkpoint).collect());
        spool.rewind(confirmed.smallest())?;
        let history: SharedHistory = Arc::new(RwLock::new(History::from_stored(loaded.history)));
        let versions = Versions::new(history.clone(), store.clone(), source_config.clone(), source.key.clone());
        let (events, events_in) = mpsc::unbounded_channel::<Event>();
        let (commands, commands_in) = mpsc::unbounded_channel::<Command>();
        let (hurry, hurry_in) = watch::channel(false);
        let hungry = Arc::new(Notify::new());
        let drainer = Drainer::new(record.epoch, spool.clone(), versions.clone(), commands);
        let shared = Shared {
            epoch: record.epoch,
            pipeline: config.pipeline.name.clone(),
            store: store.clone(),
            history,
            board: board.clone(),
            cursors: Cursors::new(spool.clone()),
            checkpoints: CheckpointParts { store, spool: spool.clone(), confirmed: confirmed.clone() },
            events,
            hurry: hurry_in,
        };

        let mut outlets = Vec::new();
        let mut copy_outlets = Vec::new();
        let mut destinations = Vec::new();
        let mut routes = Vec::new();
        for (index, (destination, plugin)) in config.destinations.iter().zip(plugins).enumerate() {
            let tables = table_records(destination, &source, &loaded.tables);
            let checkpoint = records[index].checkpoint;
            show_destination(&board, destination, checkpoint, &tables);
            routes.extend(tables.iter().map(|table| (index, table.clone())));
            let (live, live_in) = inbox::inbox(LIVE_BYTES, hungry.clone());
            let (copying, copying_in) = inbox::inbox(COPYING_BYTES, Arc::new(Notify::new()));
            let needs_key = destination.mode == Mode::Merge;
            let name = destination.name.clone();
            outlets.push(Outlet { name: name.clone(), live: live.clone() });
            copy_outlets.push(CopyOutlet { name, copying, live, needs_key });
            destinations.push(shared.launch(index, destination, plugin, tables, live_in, copying_in)?);
        }

        let mut router = Router::new(
            RouterParts {
                epoch: record.epoch,
                outlets,
                spool: spool.clone(),
                versions: versions.clone(),
                drainer: drainer.clone(),
                commands: commands_in,
                events: events_in,
                lag: LagMeter::new(board, confirmed.clone()),
                hungry,
                known: source.tables.iter().map(|table| table.schema.oid).collect(),
                stopping: shutdown.clone(),
            },
            confirmed.smallest(),
        );
        let wanted = route(&mut router, &routes, &copy_outlets, &spool, &drainer, &shared.cursors);
        let copier = Copier {
            source: source_config.clone(),
            outlets: copy_outlets.into(),
            versions,
            drainer: drainer.clone(),
            options: WaveOptions { connections: COPY_CONNECTIONS, ..WaveOptions::default() },
            epoch: record.epoch,
        };
        let copier = tokio::spawn(copier.run(wanted, shutdown.clone()));
        Ok(Running {
            router: Some(router),
            source: source_config,
            slot: record.slot,
            publication: record.publication,
            confirmed,
            copier,
            drainer,
            destinations,
            shutdown,
            hurry,
            connection: None,
        })
    }

    /// Reads the stream, over as many connections as it takes.
    async fn stream(&mut self) -> Result<()> {
        let mut backoff = Backoff::transient();
        while !*self.shutdown.borrow() {
            let error = match self.connect().await {
                Ok(()) => match self.route().await {
                    Ok(Routing::Stopped) => return Ok(()),
                    Err((error, progress)) => {
                        if progress {
                            backoff.reset();
                        }
                        error
                    }
                },
                Err(error) => error,
            };
            self.connection = None;
            if !error.is_transient() {
                return Err(error);
            }
            let pause = backoff.pause(None);
            tracing::warn!(
                code = error.code(),
                next = error.next_step(),
                "the stream ended; connecting again in {pause:.1?}: {error}"
            );
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                _ = self.shutdown.wait_for(|stop| *stop) => {}
            }
        }
        Ok(())
    }

    /// Starts the stream at our own checkpoint (P8).
    async fn connect(&mut self) -> Result<()> {
        let shutdown = &mut self.shutdown;
        let (source, slot, publication) = (&self.source, &self.slot, &self.publication);
        let from = self.confirmed.smallest();
        let connecting = async {
            let connection = ReplicationConnection::connect(source).await?;
            connection.start(slot, from, publication).await
        };
        let connection = tokio::select! {
            connection = connecting => connection?,
            _ = shutdown.wait_for(|stop| *stop) => return Ok(()),
        };
        tracing::info!(slot = %self.slot, %from, "streaming");
        self.connection = Some(connection);
        Ok(())
    }

    /// Runs the router on the connection; with an error comes whether it got anywhere.
    async fn route(&mut self) -> Result<Routing, (Error, bool)> {
        let (Some(router), Some((reader, feedback))) = (&mut self.router, &mut self.connection) else {
            return Ok(Routing::Stopped);
        };
        let before = router.at();
        let mut confirmed = self.confirmed.watch();
        let confirm = async {
            loop {
                feedback.confirm(*confirmed.borrow_and_update());
                if confirmed.changed().await.is_err() {
                    std::future::pending::<()>().await;
                }
            }
        };
        let routed = tokio::select! {
            routed = router.run(reader, feedback) => routed,
            never = confirm => never,
        };
        router.reconnected();
        routed.map_err(|error| (error, router.at() > before))
    }

    /// Makes durable what was read, within `drain`, and confirms it. Whether all of it
    /// was.
    async fn end(mut self, drain: Duration) -> bool {
        // Whoever feeds the destinations has to be gone before their queues can end.
        self.copier.abort();
        self.drainer.stop();
        self.router = None;
        let drained = self.wait(tokio::time::Instant::now() + drain).await;
        if !drained {
            // Ends the retries of those that are late.
            self.hurry.send_replace(true);
            self.wait(tokio::time::Instant::now() + LET_GO).await;
        }
        if let Some((reader, feedback)) = self.connection.take() {
            feedback.confirm(self.confirmed.smallest());
            reader.close().await;
        }
        drained
    }

    /// Waits for all destinations to end. Whether they did.
    async fn wait(&mut self, by: tokio::time::Instant) -> bool {
        let mut all = true;
        for ending in self.destinations.iter_mut().filter(|ending| !ending.ended.is_finished()) {
            if tokio::time::timeout_at(by, &mut ending.ended).await.is_err() {
                tracing::warn!(destination = %ending.name, "the destination did not finish in time; what is left is read again at the next start");
                all = false;
            }
        }
        all
    }
}

impl Shared {
    /// Starts a destination on a thread of its own.
    fn launch(
        &self,
        index: usize,
        config: &DestinationConfig,
        plugin: Arc<Plugin>,
        tables: Vec<TableRecord>,
        live: Receiver<Live>,
        copying: Receiver<Copying>,
    ) -> Result<Ending> {
        let name = config.name.clone();
        let (checkpointer, checkpoints) = Checkpointer::new(name.clone(), index, self.checkpoints.clone());
        let cursors = self.cursors.clone();
        let checkpoints = tokio::spawn(checkpoints.run(move |progress| cursors.stored(progress)));
        let parts = Parts {
            index,
            epoch: self.epoch,
            config: Arc::new(config.clone()),
            lane: self.lane(config, plugin),
            tables: self.tables(tables),
            live,
            copying,
            checkpointer,
            store: self.store.clone(),
            history: self.history.clone(),
            board: self.board.clone(),
            cursors: self.cursors.clone(),
            events: self.events.clone(),
            stopping: self.hurry.clone(),
        };
        let runtime = tokio::runtime::Handle::current();
        let (done, thread) = oneshot::channel();
        std::thread::Builder::new()
            .name(format!("destination {name}"))
            .spawn(move || {
                runtime.block_on(Destination::new(parts).run());
                // Nobody waits any more if the drain's time ran out.
                let _ = done.send(());
            })
            .map_err(|error| {
                Error::transient(
                    "destination.thread",
                    format!("destination `{name}`: no thread could be started: {error}"),
                )
            })?;
        let ended = tokio::spawn(async move {
            if thread.await.is_ok() {
                // A panic there is in the log; what it had stored is stored.
                let _ = checkpoints.await;
            }
        });
        Ok(Ending { name, ended })
    }

    fn lane(&self, config: &DestinationConfig, plugin: Arc<Plugin>) -> Lane {
        let state: Arc<dyn PluginState> = Arc::new(StoreState(self.store.clone()));
        let mut options = InstanceOptions::new(config.name.clone(), config.grants.clone(), state);
        options.limits = limits(config);
        let session = wire::Session {
            pipeline: self.pipeline.clone(),
            destination: config.name.clone(),
            settings: config.settings.to_string(),
            lane: 0,
            lanes: 1,
            generation: 0,
            details: vec![("host-version".to_owned(), env!("CARGO_PKG_VERSION").to_owned())],
        };
        Lane::new(plugin, options, session, config.limits.clone(), self.store.clone())
    }

    /// The recorded tables with the version that each has at the destination.
    fn tables(&self, records: Vec<TableRecord>) -> HashMap<u32, Table> {
        let history = self.history.read().unwrap_or_else(|poisoned| poisoned.into_inner());
        records
            .into_iter()
            .map(|record| {
                let applied = record.applied.and_then(|applied| history.get(record.oid, applied));
                (record.oid, Table::new(record, applied))
            })
            .collect()
    }
}

/// An instance's limits: the defaults, with the configuration's overrides.
fn limits(config: &DestinationConfig) -> Limits {
    let mut limits = Limits::default();
    for (name, value) in &config.limits {
        match name.as_str() {
            "memory_bytes" => limits.memory_bytes = usize::try_from(*value).unwrap_or(usize::MAX),
            "call_idle_ms" => limits.call_idle = Duration::from_millis(*value),
            "call_hard_ms" => limits.call_hard = Duration::from_millis(*value),
            _ => {}
        }
    }
    limits
}

/// Every destination's checkpoint: its own, or for a new one where the stream begins.
fn destination_records(config: &Config, loaded: &Loaded, source: &SourceRecord) -> Vec<DestinationRecord> {
    let created = match source.slot_state {
        SlotRecord::Created { at } => at,
        SlotRecord::Intended => Lsn::ZERO,
    };
    let known = |name: &str| loaded.destinations.iter().find(|record| record.name == name);
    let smallest = config
        .destinations
        .iter()
        .filter_map(|destination| known(&destination.name))
        .map(|record| record.checkpoint)
        .min()
        .unwrap_or(created);
    config
        .destinations
        .iter()
        .map(|destination| DestinationRecord {
            name: destination.name.clone(),
            plugin: destination.plugin.clone(),
            checkpoint: known(&destination.name).map_or(smallest, |record| record.checkpoint.max(smallest)),
        })
        .collect()
}

/// The records of the published tables that a destination takes.
fn table_records(destination: &DestinationConfig, source: &Source, known: &[TableRecord]) -> Vec<TableRecord> {
    source
        .tables
        .iter()
        .filter(|table| destination.tables.matches(&table.schema.name))
        .map(|table| {
            let oid = table.schema.oid;
            let record = known.iter().find(|record| record.destination == destination.name && record.oid == oid);
            record.cloned().unwrap_or_else(|| TableRecord {
                destination: destination.name.clone(),
                oid,
                name: table.schema.name.clone(),
                ..TableRecord::default()
            })
        })
        .collect()
}

fn show_destination(board: &StatusBoard, config: &DestinationConfig, checkpoint: Lsn, tables: &[TableRecord]) {
    board.update_destination(&config.name, |status| {
        status.plugin = config.plugin.clone();
        status.state = DestinationState::Starting;
        status.checkpoint = Some(checkpoint);
        for record in tables {
            show_table(status.table_mut(&record.name), record);
        }
    });
}

/// Sends every table its way: live, from the spool, or into a copy. Returns what has to
/// be copied.
fn route(
    router: &mut Router,
    routes: &[(usize, TableRecord)],
    outlets: &[CopyOutlet],
    spool: &Spool,
    drainer: &Drainer,
    cursors: &Cursors,
) -> Wanted {
    let mut wanted = Wanted::new();
    for (destination, record) in routes {
        let (destination, oid) = (*destination, record.oid);
        let outlet = &outlets[destination];
        let spooled = spool.end(oid) > record.position.map(|position| (position.commit, position.ordinal));
        match record.state {
            TableState::Errored => continue,
            TableState::Ready if !spooled => router.add_table(oid, &record.name, destination, true),
            TableState::Ready | TableState::CatchUp => {
                router.add_table(oid, &record.name, destination, false);
                let floor = record.floor.unwrap_or_default();
                start_drain(drainer, outlet, destination, oid, floor, record.position);
            }
            TableState::Init | TableState::DataSync | TableState::FinishedCopy => {
                router.add_table(oid, &record.name, destination, false);
                wanted.entry(oid).or_default().insert(destination);
            }
        }
        let copied = matches!(record.state, TableState::Ready | TableState::CatchUp);
        cursors.add(&outlet.name, oid, record.position.filter(|_| copied));
    }
    forget_unused(routes, spool);
    wanted
}

fn start_drain(
    drainer: &Drainer,
    outlet: &CopyOutlet,
    destination: usize,
    oid: u32,
    floor: Lsn,
    position: Option<Position>,
) {
    let live: Sender<Live> = outlet.live.clone();
    drainer.start(destination, live, oid, floor, position);
}

/// What is spooled of tables that nobody takes any more costs disk only.
fn forget_unused(routes: &[(usize, TableRecord)], spool: &Spool) {
    for oid in spool.tables() {
        let used = routes.iter().any(|(_, record)| record.oid == oid && record.state != TableState::Errored);
        if !used && let Err(error) = spool.forget(oid) {
            tracing::warn!(oid, code = error.code(), "spool files could not be deleted yet: {error}");
        }
    }
}
