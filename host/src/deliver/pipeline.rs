//! A pipeline at work: one slot, any number of destinations.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, mpsc, oneshot, watch};

use crate::config::{Config, DestinationConfig};
use crate::copy::snapshot::{Connections, WaveOptions};
use crate::copy::spool::{Spool, SpoolOptions};
use crate::error::{Error, Result};
use crate::memory::Budget;
use crate::plugin::PluginEngine;
use crate::position::Lsn;
use crate::schema::history::History;
use crate::schema::table::TableSchema;
use crate::source::catalog::TriggerState;
use crate::source::members::Publication as PublicationRow;
use crate::source::session::publication_gap;
use crate::source::transactions::{TransactionOptions, Transactions};
use crate::source::{Feedback, ReplicationConnection, WalReader};
use crate::status::StatusBoard;
use crate::store::{DestinationRecord, Loaded, SlotRecord, SourceRecord, Store, TableRecord, TableState};

use super::away::Away;
use super::checkpoint::{CheckpointParts, Confirmed};
use super::copier::{Ages, Ask, Copier};
use super::cursors::Cursors;
use super::drain::Drainer;
use super::feed::SharedHistory;
use super::identity::{Identity, Known};
use super::lag::LagMeter;
use super::launch::{Ending, Launcher, StoredTables};
use super::members::{Handle, Members, MembersParts, Requests, Taker};
use super::membership::{RENAMED_AWAY, UNPUBLISHED, renamed_away, unpublished};
use super::plugins::Plugins;
use super::proven::Proven;
use super::publication::{GAP, MISSING, Publication, renamed, switch};
use super::resume::Resumes;
use super::retry::Backoff;
use super::rollout::Rollout;
use super::router::{Router, RouterParts, Routing};
use super::routes::{Beginning, Command, Place};
use super::start::{Chosen, Source, check_tables, ensure_slot, load_plugins, look_at_source, refusal};
use super::trigger_watch::TriggerWatch;
use super::versions::Versions;

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
    memory: Budget,
    board: StatusBoard,
    engine: PluginEngine,
    plugins: Vec<Chosen>,
    proven: Proven,
    store: Store,
    loaded: Loaded,
    source: Source,
    record: SourceRecord,
    publication: Publication,
    spool: Spool,
    handle: Handle,
    requests: Requests,
    transactions: Transactions,
}

impl Pipeline {
    /// Checks everything that can be checked and makes the slot. On an error nothing
    /// was started.
    pub async fn start(config: Config, board: StatusBoard) -> Result<Pipeline> {
        let memory = Budget::new(config.pipeline.memory_bytes, config.destinations.len())?;
        let proven = Proven::load(&config.pipeline.state);
        let (engine, plugins) = load_plugins(&config, &proven).await?;
        let store = config.pipeline.open_store()?;
        let loaded = store.load()?;
        let source = look_at_source(&config.source).await.map_err(refusal)?;
        for warning in &source.facts.warnings {
            tracing::warn!(code = warning.code(), next = warning.next_step(), "{warning}");
        }
        for (destination, plugin) in config.destinations.iter().zip(&plugins) {
            check_tables(destination, &plugin.plugin, &source)?;
        }
        let limit_bytes = config.pipeline.spool_bytes;
        // What is given back is whole files.
        let segment_bytes = SpoolOptions::default().segment_bytes.min(limit_bytes / 16);
        let options = SpoolOptions { segment_bytes, limit_bytes };
        let spool = Spool::open(&config.pipeline.state.join("spool"), options)?;
        let transactions =
            Transactions::open(&config.pipeline.state.join("transactions"), TransactionOptions::default())?;
        let (record, publication) = ensure_slot(&config, &store, &loaded, &source.facts).await.map_err(refusal)?;
        let (handle, requests) = Handle::new();
        Ok(Pipeline {
            config,
            memory,
            board,
            engine,
            plugins,
            proven,
            store,
            loaded,
            source,
            record,
            publication,
            spool,
            transactions,
            handle,
            requests,
        })
    }

    /// To ask things of it while it runs.
    pub fn handle(&self) -> Handle {
        self.handle.clone()
    }

    /// What it keeps.
    pub fn store(&self) -> Store {
        self.store.clone()
    }

    /// Replicates until `shutdown` becomes true, or until something goes wrong that does
    /// not pass by itself.
    pub async fn run(self, shutdown: watch::Receiver<bool>) -> Result<StopReason> {
        let drain = self.config.pipeline.drain;
        let store = self.store.clone();
        let running = Running::begin(self, shutdown).await?;
        let (ended, drained) = tokio::select! {
            ended = on_a_thread(running, drain) => ended?,
            // Nothing is drained: whoever has the state delivers as well.
            lost = store.lost() => return Err(lost),
        };
        ended?;
        Ok(if drained { StopReason::Drained } else { StopReason::DrainTimedOut })
    }
}

/// Streams until the end, on a thread of its own: the router lets messages gather by
/// sleeping, and files of the spool block, which would hold up a worker of the runtime.
async fn on_a_thread(mut running: Running, drain: Duration) -> Result<(Result<()>, bool)> {
    let failed = |why: String| Error::transient("pipeline.thread", format!("the thread of the stream {why}"));
    let runtime = tokio::runtime::Handle::current();
    let (done, thread) = oneshot::channel();
    std::thread::Builder::new()
        .name("stream".to_owned())
        .spawn(move || {
            let outcome = runtime.block_on(async {
                let ended = running.stream().await;
                (ended, running.end(drain).await)
            });
            // Nobody waits any more if the process is told to end at once.
            let _ = done.send(outcome);
        })
        .map_err(|error| failed(format!("could not be started: {error}")))?;
    thread.await.map_err(|_| failed("panicked".to_owned()))
}

/// Threads and tasks of a running pipeline.
struct Running {
    router: Option<Router>,
    source: Arc<crate::source::config::SourceConfig>,
    identity: Identity,
    /// The publication has another name than the one it is read under.
    renamed: bool,
    transactions: Transactions,
    confirmed: Confirmed,
    spool: Spool,
    members: Option<tokio::task::JoinHandle<()>>,
    /// Over the plugins directory.
    watch: tokio::task::JoinHandle<()>,
    copier: tokio::task::JoinHandle<()>,
    drainer: Drainer,
    destinations: Arc<Mutex<Vec<Ending>>>,
    shutdown: watch::Receiver<bool>,
    hurry: watch::Sender<bool>,
    connection: Option<(WalReader, Feedback)>,
}

impl Running {
    async fn begin(pipeline: Pipeline, shutdown: watch::Receiver<bool>) -> Result<Running> {
        let Pipeline {
            config,
            memory,
            board,
            engine,
            plugins,
            proven,
            store,
            loaded,
            source,
            record,
            publication,
            spool,
            transactions,
            requests,
            ..
        } = pipeline;
        let source_config = Arc::new(config.source.clone());
        let mut trigger = TriggerWatch::new(source.key.is_some());
        trigger.found(source.facts.trigger, &board);
        let mut records = destination_records(&config, &loaded, &record);
        publication.take_up(&mut records, &record, &source.members);
        for record in &records {
            store.save_destination(record.clone()).await?;
        }
        let mut tables = table_records(&config, &source, &loaded, &store, publication).await?;
        // Behind them: a table that was out in between has to be stored as such first.
        let known = source.members.clone().with_stored(&loaded.members);
        store.save_members(known.tables.iter().map(|(oid, member)| (*oid, member.stored())).collect()).await?;
        store.save_members(vec![(PublicationRow::STORED_AS, known.publication.stored())]).await?;
        // And behind that: until it is stored the publication is known as the one before.
        if loaded.source.as_ref() != Some(&record) {
            store.save_source(record.clone()).await?;
        }
        let identity = Identity { known: Known::new(record.clone()), store: store.clone() };
        let confirmed = Confirmed::new(records.iter().map(|record| record.checkpoint).collect());
        spool.rewind(confirmed.smallest())?;
        let (resumes, useless) = Resumes::load(&tables, loaded.copies);
        for copy in useless {
            store.delete_copy(&copy.destination, copy.oid).await?;
        }
        for record in tables.iter_mut().flatten().filter(|record| record.state == TableState::Ready) {
            // A checkpoint passes what is in the spool, so only the state tells that it lacks it.
            if lacks_spooled(&spool, record) {
                record.state = TableState::CatchUp;
            }
        }
        let history = SharedHistory::new(History::from_stored(loaded.history).with_ended(loaded.ended));
        let away = Away::new(source.members.publication.clone());
        let versions =
            Versions::new(history.clone(), store.clone(), source_config.clone(), away.clone(), source.key.clone());
        let (commands, commands_in) = mpsc::unbounded_channel::<Command>();
        let (asks, asks_in) = mpsc::unbounded_channel::<Ask>();
        let (hurry, hurry_in) = watch::channel(false);
        let (news, news_in) = mpsc::unbounded_channel();
        let (hungry, strangers) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
        let drainer = Drainer::new(record.epoch, spool.clone(), versions.clone(), commands.clone(), memory.clone());
        let store_of_router = store.clone();
        let rollout = Rollout::new();
        let launcher = Launcher {
            epoch: record.epoch,
            pipeline: config.pipeline.name.clone(),
            source: source_config.clone(),
            store: store.clone(),
            memory: memory.clone(),
            history,
            board: board.clone(),
            cursors: Cursors::new(spool.clone()),
            resumes: resumes.clone(),
            rollout: rollout.clone(),
            checkpoints: CheckpointParts { store, spool: spool.clone(), confirmed: confirmed.clone() },
            news,
            commands: commands.clone(),
            hungry: hungry.clone(),
            hurry: hurry_in,
        };

        // All of them before the first goes to work: who is not there yet would have no say.
        let configs: Vec<Arc<DestinationConfig>> = config.destinations.iter().cloned().map(Arc::new).collect();
        configs.iter().zip(&tables).for_each(|(destination, tables)| rollout.join(destination, tables));
        let mut outlets = Vec::new();
        let mut copies = Vec::new();
        let mut destinations = Vec::new();
        let mut takers = Vec::new();
        for (index, (destination, chosen)) in configs.into_iter().zip(plugins).enumerate() {
            let checkpoint = records[index].checkpoint;
            let stored = StoredTables { tables: tables[index].clone(), barriers: loaded.barriers.clone() };
            let launched = launcher.launch(index, &destination, chosen, checkpoint, stored)?;
            takers.push(Taker { config: destination, plugin: launched.plugin, live: launched.outlet.live.clone() });
            outlets.push(launched.outlet);
            copies.push(launched.copies);
            destinations.push(launched.ending);
        }
        let destinations = Arc::new(Mutex::new(destinations));

        let mut router = Router::new(
            RouterParts {
                epoch: record.epoch,
                outlets,
                spool: spool.clone(),
                spool_bytes: config.pipeline.spool_bytes,
                store: store_of_router,
                versions: versions.clone(),
                away: away.clone(),
                drainer: drainer.clone(),
                commands: commands_in,
                memory: memory.clone(),
                lag: LagMeter::new(board, confirmed.clone()),
                cursors: launcher.cursors.clone(),
                confirmed: confirmed.clone(),
                hungry,
                strangers: strangers.clone(),
                stopping: shutdown.clone(),
            },
            confirmed.smallest(),
        );
        route(&mut router, &tables, &spool, &asks, &launcher.cursors);
        let copier = Copier {
            source: source_config.clone(),
            outlets: copies.into(),
            versions,
            commands: commands.clone(),
            options: WaveOptions {
                connections: Connections::new(config.copy.connections),
                connections_per_table: config.copy.connections_per_table,
                ..WaveOptions::default()
            },
            epoch: record.epoch,
            memory,
            ages: Ages::new(launcher.board.clone()),
            resumes,
            beginnings: Arc::default(),
            resume_bytes: config.copy.resume_bytes,
            spool: spool.clone(),
        };
        let copier = tokio::spawn(copier.run(asks_in, shutdown.clone()));
        let watch = Plugins {
            engine: engine.clone(),
            directory: config.pipeline.plugins.clone(),
            board: launcher.board.clone(),
            proven,
            news: news_in,
        };
        let members = Members::new(
            MembersParts {
                config,
                source: source_config.clone(),
                engine,
                launcher,
                takers,
                confirmed: confirmed.clone(),
                commands,
                asks,
                strangers,
                away,
                requests,
                source_record: identity.known.clone(),
                version_num: source.facts.version_num,
                destinations: destinations.clone(),
            },
            known,
            trigger,
            loaded.members.keys().copied().collect(),
        );
        Ok(Running {
            router: Some(router),
            source: source_config,
            identity,
            renamed: publication == Publication::Renamed,
            transactions,
            confirmed,
            spool,
            members: Some(tokio::spawn(members.run())),
            watch: tokio::spawn(watch.run()),
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
                    Ok(Routing::Rewind) => {
                        self.rewind().await?;
                        continue;
                    }
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
            let error = match error.code() {
                MISSING => match self.publication_missing().await {
                    Ok(()) => continue,
                    Err(error) => error,
                },
                _ => error,
            };
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

    /// The stream has come to where the publication has not the name it is read under.
    /// What came before goes on its way; then, if that is known, the new name is used (P23).
    async fn publication_missing(&mut self) -> Result<()> {
        let known = self.identity.known.get();
        if !self.renamed {
            return Err(publication_gap(&known.publication));
        }
        let names: Vec<String> = {
            let destinations = self.destinations.lock().unwrap_or_else(PoisonError::into_inner);
            destinations.iter().map(|ending| ending.name.clone()).collect()
        };
        let switched = switch(&self.source, &self.identity, &self.confirmed, &names).await?;
        let at = switched.ok_or_else(|| renamed(&known))?;
        self.renamed = false;
        if let Some(router) = &mut self.router {
            router.reconnected(at);
        }
        Ok(())
    }

    /// Starts the stream at our own checkpoint (P8).
    async fn connect(&mut self) -> Result<()> {
        let shutdown = &mut self.shutdown;
        let (source, identity, transactions) = (&self.source, &self.identity, &self.transactions);
        let known = identity.known.get();
        let from = self.confirmed.smallest();
        let seen = self.router.as_ref().map_or(from, Router::seen);
        let connecting = async {
            let mut connection = ReplicationConnection::connect(source).await?;
            if source.streaming {
                connection = connection.keeping(transactions);
            }
            let promoted = identity.check(&mut connection, seen).await?;
            let started = connection.start(&known.slot, from, &known.publication).await?;
            if let Some(timeline) = promoted {
                identity.known.change(&identity.store, |record| record.timeline = timeline).await?;
            }
            Ok::<_, Error>(started)
        };
        let connection = tokio::select! {
            connection = connecting => connection?,
            _ = shutdown.wait_for(|stop| *stop) => return Ok(()),
        };
        tracing::info!(slot = %known.slot, %from, "streaming");
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
        let routed = match routed {
            // What has to be read again is; the error comes again if it stays.
            Err(error) if router.wants_rewind() && (error.is_transient() || error.code() == MISSING) => {
                tracing::debug!(code = error.code(), "the stream ended where it has to be read again: {error}");
                Ok(Routing::Rewind)
            }
            routed => routed,
        };
        let (at, from) = (router.at(), self.confirmed.smallest());
        if routed.as_ref().is_err_and(|error| error.code() == MISSING) {
            // It is the end of what comes under this name, if no transaction lies across it.
            let whole = router.finish().await.map_err(|error| (error, at > before))?;
            // A destination may have fallen behind by what was sent: that is read again first.
            if router.wants_rewind() {
                return Ok(Routing::Rewind);
            }
            if !whole {
                return Err((publication_gap(&self.identity.known.get().publication), at > before));
            }
        }
        router.reconnected(from);
        routed.map_err(|error| (error, at > before))
    }

    /// The stream will be read again for a destination that fell behind: the spool is set
    /// back to where it begins, because nothing can be added in its middle.
    async fn rewind(&mut self) -> Result<()> {
        if let Some((reader, _)) = self.connection.take() {
            reader.close().await;
        }
        self.drainer.stop_all().await;
        let from = self.confirmed.freeze().await;
        self.spool.rewind(from)?;
        if let Some(router) = &mut self.router {
            router.reconnected(from);
            router.reroute();
        }
        crate::failpoint::reached("router.rewound");
        Ok(())
    }

    /// Makes durable what was read, within `drain`, and confirms it. Whether all of it
    /// was.
    async fn end(mut self, drain: Duration) -> bool {
        // Whoever feeds the destinations has to be gone before their queues can end.
        self.copier.abort();
        self.watch.abort();
        if let Some(members) = self.members.take() {
            members.abort();
            // It was aborted, or had ended: both are what is wanted.
            let _ = members.await;
        }
        self.drainer.stop_all().await;
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
        let mut endings = std::mem::take(&mut *self.destinations.lock().unwrap_or_else(PoisonError::into_inner));
        for ending in endings.iter_mut().filter(|ending| !ending.ended.is_finished()) {
            if tokio::time::timeout_at(by, &mut ending.ended).await.is_err() {
                tracing::warn!(destination = %ending.name, "the destination did not finish in time; what is left is read again at the next start");
                all = false;
            }
        }
        *self.destinations.lock().unwrap_or_else(PoisonError::into_inner) = endings;
        all
    }
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

/// What is stored of tables, by destination and oid.
type Stored<'a> = HashMap<(&'a str, u32), &'a TableRecord>;

/// What is recorded of every destination's tables, as far as it still holds.
async fn table_records(
    config: &Config,
    source: &Source,
    loaded: &Loaded,
    store: &Store,
    publication: Publication,
) -> Result<Vec<Vec<TableRecord>>> {
    let stored: Stored =
        loaded.tables.iter().map(|record| ((record.destination.as_str(), record.oid), record)).collect();
    let stored_row = loaded.members.get(&PublicationRow::STORED_AS).and_then(|stored| PublicationRow::parse(stored));
    let seen = source.key.is_some() && source.facts.trigger == TriggerState::Ready;
    let missed = stored_row.and_then(|stored| stored.missed(&source.members.publication, seen));
    if let Some(why) = &missed {
        tracing::warn!(code = GAP, "{why}: all tables are copied again");
    }
    let again = publication == Publication::MadeAgain || missed.is_some();
    let mut all = Vec::new();
    for destination in &config.destinations {
        let mut records = Vec::new();
        for table in source.tables.iter().filter(|table| destination.tables.matches(&table.schema.name)) {
            let known = stored.get(&(destination.name.as_str(), table.schema.oid)).copied();
            let record = taken(destination, &table.schema, known, source, loaded, again);
            if known.is_some_and(|known| *known != record) {
                store.reset_table(&destination.name, record.oid).await?;
            }
            records.push(record);
        }
        let published = &source.members.tables;
        let gone = loaded.tables.iter().filter(|record| record.destination == destination.name);
        for record in gone {
            let record = match published.get(&record.oid) {
                None => left(record, unpublished(&record.name)),
                // It is taken, or the configuration is another one.
                Some(member) if destination.tables.matches(&member.name) || member.name == record.name => continue,
                Some(member) => left(record, renamed_away(&record.name, &member.name, &destination.name)),
            };
            store.save_table(record.clone()).await?;
            records.push(record);
        }
        all.push(records);
    }
    Ok(all)
}

/// A table that a destination takes: as it is stored, or from the beginning if it was
/// out of the publication in between (P21).
fn taken(
    destination: &DestinationConfig,
    schema: &TableSchema,
    known: Option<&TableRecord>,
    source: &Source,
    loaded: &Loaded,
    again: bool,
) -> TableRecord {
    let oid = schema.oid;
    let was_out = known
        .and_then(|known| known.error.as_ref())
        .is_some_and(|error| error.code == UNPUBLISHED || error.code == RENAMED_AWAY);
    let member = source.members.tables.get(&oid);
    let other =
        again || loaded.members.get(&oid).is_some_and(|stored| !member.is_some_and(|member| member.is_same(stored)));
    match known {
        Some(known) if !was_out && !other => known.clone(),
        _ => {
            if known.is_some() {
                tracing::warn!(destination = %destination.name, table = %schema.name, "the table was out of the publication, and is copied again");
            }
            TableRecord {
                destination: destination.name.clone(),
                oid,
                name: schema.name.clone(),
                ..TableRecord::default()
            }
        }
    }
}

/// A table that is not published any more, or not taken.
fn left(record: &TableRecord, why: Error) -> TableRecord {
    let mut record = record.clone();
    if record.state != TableState::Errored {
        record.state = TableState::Errored;
        record.needs_resync = true;
        record.error = Some((&why).into());
    }
    record
}

/// Whether a table needs what is in the spool.
fn lacks_spooled(spool: &Spool, record: &TableRecord) -> bool {
    spool.end(record.oid) > record.position.map(|position| (position.commit, position.ordinal))
}

/// Sends every table its way: live, from the spool, or into a copy.
fn route(
    router: &mut Router,
    tables: &[Vec<TableRecord>],
    spool: &Spool,
    asks: &mpsc::UnboundedSender<Ask>,
    cursors: &Cursors,
) {
    for (destination, record) in
        tables.iter().enumerate().flat_map(|(index, records)| records.iter().map(move |record| (index, record)))
    {
        let oid = record.oid;
        let spooled = lacks_spooled(spool, record);
        match record.state {
            TableState::Errored => continue,
            TableState::Ready if !spooled => router.follow(oid, &record.name, destination),
            TableState::Ready | TableState::CatchUp => {
                router.spool_for(oid, &record.name, destination);
                router.drain(Place { destination, oid }, record.floor.unwrap_or_default(), record.position);
            }
            TableState::Init | TableState::DataSync | TableState::FinishedCopy => {
                router.spool_for(oid, &record.name, destination);
                // The copier is started behind this.
                let _ = asks.send(Ask::Copy { oid, destination, beginning: Beginning::default() });
            }
        }
        let copied = matches!(record.state, TableState::Ready | TableState::CatchUp);
        cursors.add(&record.destination, oid, record.position.filter(|_| copied));
    }
    // What the last process had let go of is back.
    tables.iter().flatten().for_each(|record| cursors.release(record.oid));
    forget_unused(tables, spool);
}

/// What is spooled of tables that nobody takes any more costs disk only.
fn forget_unused(tables: &[Vec<TableRecord>], spool: &Spool) {
    let used: BTreeSet<u32> =
        tables.iter().flatten().filter(|record| record.state != TableState::Errored).map(|record| record.oid).collect();
    for oid in spool.tables().into_iter().filter(|oid| !used.contains(oid)) {
        if let Err(error) = spool.forget(oid) {
            tracing::warn!(oid, code = error.code(), "spool files could not be deleted yet: {error}");
        }
    }
}
