//! Starting a destination: its queues, its lane, its thread, its checkpoints.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use tokio::sync::{Notify, mpsc, oneshot, watch};

use crate::config::{DestinationConfig, Mode};
use crate::error::{Error, Result};
use crate::memory::Budget;
use crate::plugin::{InstanceOptions, Limits, Plugin, PluginState, StateFuture};
use crate::position::Lsn;
use crate::source::config::SourceConfig;
use crate::status::{DestinationState, StatusBoard};
use crate::store::{BarrierRecord, Store, TableRecord};
use crate::wire;

use super::checkpoint::{CheckpointParts, Checkpointer};
use super::copier::CopyOutlet;
use super::cursors::Cursors;
use super::destination::{Destination, Parts, Table, show_table};
use super::feed::SharedHistory;
use super::inbox;
use super::lane::Lane;
use super::plugins::{Began, News};
use super::resume::Resumes;
use super::rollout::Rollout;
use super::router::Outlet;
use super::routes::Command;
use super::start::Chosen;
use super::swap::Exchange;

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
pub(super) struct Launcher {
    pub epoch: u32,
    /// The pipeline's name.
    pub pipeline: String,
    pub source: Arc<SourceConfig>,
    pub store: Store,
    pub memory: Budget,
    pub history: SharedHistory,
    pub board: StatusBoard,
    pub cursors: Cursors,
    pub resumes: Resumes,
    pub rollout: Rollout,
    pub checkpoints: CheckpointParts,
    /// To the watch over the plugins directory.
    pub news: mpsc::UnboundedSender<News>,
    /// To the router.
    pub commands: mpsc::UnboundedSender<Command>,
    /// Notified when a destination has nothing to do.
    pub hungry: Arc<Notify>,
    /// True when retries have to end.
    pub hurry: watch::Receiver<bool>,
}

/// What is stored of a destination's tables; of barriers also those of others.
#[derive(Default)]
pub(super) struct StoredTables {
    pub tables: Vec<TableRecord>,
    pub barriers: Vec<BarrierRecord>,
}

/// A destination at work, as others reach it.
pub(super) struct Launched {
    /// The version of the plugin that is at work.
    pub plugin: watch::Receiver<Arc<Plugin>>,
    pub outlet: Outlet,
    pub copies: CopyOutlet,
    pub ending: Ending,
}

/// A destination's end: its thread's, and then its last checkpoint's.
pub(super) struct Ending {
    pub name: String,
    pub ended: tokio::task::JoinHandle<()>,
}

impl Launcher {
    /// Starts a destination on a thread of its own. `index`: its number; `checkpoint`:
    /// what is stored of it.
    pub fn launch(
        &self,
        index: usize,
        config: &Arc<DestinationConfig>,
        chosen: Chosen,
        checkpoint: Lsn,
        mut stored: StoredTables,
    ) -> Result<Launched> {
        let name = config.name.clone();
        let resumes = config.mode == Mode::Merge && chosen.plugin.can("resumable-copy");
        stored.barriers.retain(|barrier| barrier.destination == name);
        let tables = self.tables(stored);
        self.show(config, checkpoint, &tables);
        let (live, live_in) = inbox::inbox(self.memory.live(), self.hungry.clone());
        let (copying, copying_in) = inbox::inbox(self.memory.copy(), Arc::new(Notify::new()));
        let (checkpointer, checkpoints) = Checkpointer::new(name.clone(), index, self.checkpoints.clone());
        let (cursors, at_router) = (self.cursors.clone(), checkpointer.clone());
        let checkpoints = tokio::spawn(checkpoints.run(move |progress| cursors.stored(progress)));
        let detached = Arc::new(AtomicBool::new(false));
        let lane = self.lane(config, chosen);
        let plugin = lane.current();
        let (offers, offered) = watch::channel(None);
        // A watch that has ended offers nothing.
        let _ = self.news.send(News::Began(Began { config: config.clone(), current: plugin.clone(), offers }));
        let parts = Parts {
            index,
            epoch: self.epoch,
            config: config.clone(),
            source: self.source.clone(),
            lane,
            exchange: Exchange::new(offered, self.news.clone()),
            tables,
            live: live_in,
            copying: copying_in,
            checkpointer,
            store: self.store.clone(),
            history: self.history.clone(),
            board: self.board.clone(),
            cursors: self.cursors.clone(),
            resumes: self.resumes.clone(),
            rollout: self.rollout.clone(),
            commands: self.commands.clone(),
            stopping: self.hurry.clone(),
            detached: detached.clone(),
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
        let needs_key = config.mode == Mode::Merge;
        Ok(Launched {
            plugin,
            outlet: Outlet {
                name: name.clone(),
                live,
                checkpointer: at_router,
                spool_full: config.spool_full,
                detached,
                behind: false,
            },
            copies: CopyOutlet { name: name.clone(), copying, needs_key, resumes },
            ending: Ending { name, ended },
        })
    }

    fn show(&self, config: &DestinationConfig, checkpoint: Lsn, tables: &HashMap<u32, Table>) {
        self.board.update_destination(&config.name, |status| {
            status.plugin = config.plugin.clone();
            status.state = DestinationState::Starting;
            status.checkpoint = Some(checkpoint);
            // In the order that they are kept in: each goes to the end.
            let mut tables: Vec<&Table> = tables.values().collect();
            tables.sort_by_cached_key(|table| table.record.name.to_string());
            for Table { record, barrier, .. } in tables {
                show_table(status.table_mut(&record.name), record, barrier.as_ref());
            }
        });
    }

    fn lane(&self, config: &DestinationConfig, Chosen { plugin, fallback }: Chosen) -> Lane {
        let state: Arc<dyn PluginState> = Arc::new(StoreState(self.store.clone()));
        let mut options = InstanceOptions::new(config.name.clone(), config.grants.clone(), state);
        options.limits = limits(config);
        options.memory = Some(self.memory.clone());
        options.usage = self.board.plugins().of(&config.name);
        let session = wire::Session {
            pipeline: self.pipeline.clone(),
            destination: config.name.clone(),
            settings: config.settings.to_string(),
            lane: 0,
            lanes: 1,
            generation: 0,
            details: vec![("host-version".to_owned(), env!("CARGO_PKG_VERSION").to_owned())],
        };
        Lane::new((plugin, fallback), options, session, config.limits.clone(), self.store.clone())
    }

    /// The recorded tables with the version that each has at the destination.
    fn tables(&self, stored: StoredTables) -> HashMap<u32, Table> {
        let history = self.history.read();
        let mut barriers: HashMap<u32, BarrierRecord> =
            stored.barriers.into_iter().map(|barrier| (barrier.oid, barrier)).collect();
        let known = stored.tables.into_iter().map(|record| {
            let applied = record.applied.and_then(|applied| history.get(record.oid, applied));
            let barrier = barriers.remove(&record.oid);
            (record.oid, Table { barrier, ..Table::new(record, applied) })
        });
        known.collect()
    }
}

/// An instance's limits: the defaults, with the configuration's overrides.
fn limits(config: &DestinationConfig) -> Limits {
    let mut limits = Limits::default();
    for (name, value) in &config.limits {
        // The others are about groups: see `Pace`.
        limits.set(name, *value);
    }
    limits
}
