//! Who takes which table while the pipeline runs: tables that join the publication and
//! leave it, copies that are asked for again, destinations that are added.
//!
//! A table begins at a destination in this order: the destination forgets what it knew
//! of the table and stores that it is not copied; the router spools its changes from the
//! next commit on, and ends a drain that was under way; the copier takes a snapshot, which is
//! later than all of that (P15). Whatever was under way before is below the snapshot.

use std::collections::HashSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::future::join_all;
use tokio::sync::{Notify, mpsc, oneshot, watch};
use tokio::task::JoinSet;

use crate::config::{Config, DestinationConfig};
use crate::error::{Error, Result};
use crate::plugin::{Plugin, PluginEngine};
use crate::position::SnapshotId;
use crate::schema::table::{Origin, TableName};
use crate::source::catalog::table_schema;
use crate::source::config::SourceConfig;
use crate::source::members::{Member, Publication, members, reached};
use crate::source::session::{Session, connect};
use crate::store::TableState;

use super::away::Away;
use super::checkpoint::Confirmed;
use super::copier::Ask;
use super::destination::Live;
use super::identity::Known;
use super::inbox::Sender;
use super::launch::{Ending, Launcher};
use super::partitions::Roots;
use super::publication::GAP;
use super::retention::Retention;
use super::retry::Backoff;
use super::routes::{Command, Place};
use super::slot::SlotWatch;
use super::start::check_some;
use super::tombstones;
use super::trigger_watch::TriggerWatch;
use super::unseen::Unseen;
use super::waiting::Waiting;

/// How often the publication is looked at. A table that nobody knows is looked up at
/// once when its first row comes.
const LOOK_EVERY: Duration = Duration::from_secs(5);
/// One look, however slow the source is.
const LOOK_WITHIN: Duration = Duration::from_secs(30);
/// Looks without a publication until the pipeline ends.
const GAPS: u32 = 2;
/// Requests that may wait.
const REQUESTS: usize = 16;

/// What can be asked of a pipeline that runs.
#[derive(Debug)]
pub enum Request {
    /// Copy a table of a destination again.
    Resync {
        /// The destination's name.
        destination: String,
        /// `schema.table` at the source.
        table: String,
    },
    /// Forget a table that has stopped, and is not published any more.
    Forget {
        /// The destination's name.
        destination: String,
        /// `schema.table` at the source, as `status` shows it.
        table: String,
    },
    /// Take up what was added to the configuration.
    Reload(Box<Config>),
}

/// To ask things of a pipeline.
#[derive(Clone)]
pub struct Handle(mpsc::Sender<Asked>);

/// Where the pipeline takes them.
pub(crate) type Requests = mpsc::Receiver<Asked>;

/// A request, and where its answer goes.
pub(crate) struct Asked {
    request: Request,
    answer: oneshot::Sender<Result<String>>,
}

impl Handle {
    /// A handle, and where its requests come out.
    pub(crate) fn new() -> (Handle, Requests) {
        let (sender, receiver) = mpsc::channel(REQUESTS);
        (Handle(sender), receiver)
    }

    /// Asks, and waits for the answer: a sentence that says what is done.
    ///
    /// # Errors
    /// `pipeline.ending` if nobody answers any more; otherwise the request's own.
    pub async fn ask(&self, request: Request) -> Result<String> {
        let ending = || Error::transient("pipeline.ending", "the pipeline is ending");
        let (answer, answered) = oneshot::channel();
        self.0.send(Asked { request, answer }).await.map_err(|_| ending())?;
        answered.await.map_err(|_| ending())?
    }
}

/// A destination, as its tables come and go.
pub(super) struct Taker {
    pub config: Arc<DestinationConfig>,
    /// The version of it that is at work.
    pub plugin: watch::Receiver<Arc<Plugin>>,
    pub live: Sender<Live>,
}

/// What membership is made of.
pub(super) struct MembersParts {
    pub config: Config,
    pub source: Arc<SourceConfig>,
    pub engine: PluginEngine,
    pub launcher: Launcher,
    pub takers: Vec<Taker>,
    pub confirmed: Confirmed,
    /// To the router.
    pub commands: mpsc::UnboundedSender<Command>,
    /// To the copier.
    pub asks: mpsc::UnboundedSender<Ask>,
    /// Notified when the stream has a table that nobody knows.
    pub strangers: Arc<Notify>,
    /// What the stream says of tables that have left.
    pub away: Away,
    pub requests: Requests,
    pub source_record: Known,
    /// `server_version_num` of the source.
    pub version_num: u32,
    pub destinations: Arc<Mutex<Vec<Ending>>>,
}

/// See the module.
pub(super) struct Members {
    pub(super) parts: MembersParts,
    pub(super) known: crate::source::members::Members,
    pub(super) session: Option<Session>,
    pub(super) roots: Roots,
    /// Looks, one behind the other, that found no publication.
    gaps: u32,
    slot: SlotWatch,
    pub(super) trigger: TriggerWatch,
    pub(super) unseen: Unseen,
    retention: Retention,
    /// Destinations that wait for their plugin.
    pub(super) waiting: Waiting,
    /// Tables that are or were members, in this process or before it.
    once: HashSet<u32>,
    /// Tables on their way to the copier.
    beginning: JoinSet<Vec<Place>>,
    under_way: HashSet<Place>,
}

impl Members {
    pub fn new(
        parts: MembersParts,
        known: crate::source::members::Members,
        trigger: TriggerWatch,
        once: HashSet<u32>,
    ) -> Members {
        let retention = Retention::new(parts.config.pipeline.schema_versions);
        Members {
            retention,
            waiting: Waiting::default(),
            once,
            parts,
            known,
            session: None,
            roots: Roots::default(),
            gaps: 0,
            slot: SlotWatch::default(),
            trigger,
            unseen: Unseen::default(),
            beginning: JoinSet::new(),
            under_way: HashSet::new(),
        }
    }

    /// Runs until it is aborted.
    pub async fn run(mut self) {
        let mut looks = tokio::time::interval(LOOK_EVERY);
        let mut backoff = Backoff::transient();
        looks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            let strangers = self.parts.strangers.clone();
            tokio::select! {
                Some(Asked { request, answer }) = self.parts.requests.recv() => {
                    let answered = self.serve(request).await;
                    // Whoever asked may have gone.
                    let _ = answer.send(answered);
                }
                Some(begun) = self.beginning.join_next() => {
                    for place in begun.unwrap_or_default() {
                        self.under_way.remove(&place);
                    }
                }
                () = self.waiting.looked() => self.take_up_waiting().await,
                Some(judged) = self.roots.judging.join_next() => self.take_judged(judged).await,
                () = strangers.notified() => looks.reset_after(self.look_or_warn(&mut backoff).await),
                _ = looks.tick() => looks.reset_after(self.look_or_warn(&mut backoff).await),
            }
        }
    }

    /// Looks, and returns how long until the next look.
    async fn look_or_warn(&mut self, backoff: &mut Backoff) -> Duration {
        let Err(error) = self.look().await else {
            backoff.reset();
            self.gaps = 0;
            return LOOK_EVERY;
        };
        // A session that failed once is not asked again.
        self.session = None;
        if error.code() == GAP {
            self.gaps += 1;
            // Once it may be about to be made again.
            if self.gaps == GAPS {
                self.end(error).await;
                return LOOK_EVERY;
            }
        }
        tracing::warn!(code = error.code(), "the publication could not be looked at; trying again: {error}");
        LOOK_EVERY.max(backoff.pause(None))
    }

    /// Without a publication nothing goes on beyond here, whether a change comes or not.
    async fn end(&mut self, error: Error) {
        let at = async {
            let session = self.session().await?;
            let at = reached(&session).await?;
            self.session = Some(session);
            Ok::<_, Error>(at)
        };
        match at.await {
            // A router that has ended has said why.
            Ok(at) => drop(self.parts.commands.send(Command::End { at, error })),
            Err(failed) => {
                self.gaps = 0;
                tracing::warn!(
                    code = error.code(),
                    next = error.next_step(),
                    "{error}; and the source cannot be asked: {failed}"
                );
            }
        }
    }

    /// Another publication of the name: all its tables have begun anew.
    async fn remember_publication(&mut self, oid: u32) -> Result<()> {
        if self.parts.source_record.get().publication_oid == oid {
            return Ok(());
        }
        tracing::warn!(code = GAP, "the publication was dropped and made again: all its tables are copied again");
        let store = self.parts.launcher.store.clone();
        self.parts.source_record.change(&store, |record| record.publication_oid = oid).await
    }

    /// Compares the publication with what is known of it, and acts on the difference.
    async fn look(&mut self) -> Result<()> {
        let source = self.parts.source.clone();
        let mut living = self.parts.launcher.history.read().living();
        living.retain(|oid| self.once.contains(oid));
        let session = self.session().await?;
        let looking = async {
            self.slot.look(&session, &source.slot, &self.parts.launcher.board).await?;
            self.trigger.look(&session, &self.parts.launcher.board).await?;
            members(&session, &source.publication).await
        };
        let found = tokio::time::timeout(LOOK_WITHIN, looking).await.map_err(|_| slow())??;
        self.once.extend(found.tables.keys());
        let launcher = &self.parts.launcher;
        tombstones::of_left(&session, &launcher.store, &launcher.history, living, &found).await?;
        let destinations: Vec<&str> = self.parts.takers.iter().map(|taker| taker.config.name.as_str()).collect();
        if let Err(error) = self.retention.look(&session, &source.slot, launcher, &destinations).await {
            tracing::warn!(code = error.code(), "old versions of schemas could not be removed; trying again: {error}");
        }
        self.session = Some(session);
        let publication = self.parts.away.publication();
        self.take_away(&publication, &found).await?;
        let gone: Vec<u32> = self.known.tables.keys().filter(|oid| !found.tables.contains_key(oid)).copied().collect();
        for oid in gone {
            if let Some(member) = self.known.tables.remove(&oid) {
                tracing::warn!(table = %member.name, "the table has left the publication");
            }
            // A router that has ended takes nothing up any more.
            let _ = self.parts.commands.send(Command::Leave { oid, at: found.at });
        }
        for (oid, mut member) in found.tables {
            match self.known.tables.get(&oid) {
                Some(known) if known.key == member.key => {
                    if known.name != member.name {
                        let before = known.name.clone();
                        self.renamed(oid, &before, &member, found.at).await?;
                    }
                    member.partitions = self.look_below(oid, &member, found.at).await?;
                }
                Some(_) => {
                    tracing::warn!(table = %member.name, "the table was taken out of the publication and added again, and is copied again");
                    self.join(oid, &member).await?;
                }
                None => {
                    tracing::info!(table = %member.name, "the table has joined the publication");
                    self.join(oid, &member).await?;
                }
            }
            // Known only now: a look that fails before finds it again.
            self.known.tables.insert(oid, member);
        }
        self.remember_publication(found.publication.oid).await?;
        if publication != found.publication {
            let row = (Publication::STORED_AS, found.publication.stored());
            self.parts.launcher.store.save_members(vec![row]).await?;
        }
        self.parts.away.found(&publication, &found.publication);
        tokio::time::timeout(LOOK_WITHIN, self.unseen_changes()).await.map_err(|_| slow())?
    }

    pub(super) async fn session(&mut self) -> Result<Session> {
        match self.session.take().filter(|session| !session.is_closed()) {
            Some(session) => Ok(session),
            None => connect(&self.parts.source).await,
        }
    }

    /// A table begins at every destination that takes it.
    async fn join(&mut self, oid: u32, member: &Member) -> Result<()> {
        let takers = self.takers_of(&member.name);
        self.join_at(oid, member, &takers).await
    }

    pub(super) async fn join_at(&mut self, oid: u32, member: &Member, takers: &[usize]) -> Result<()> {
        let mut begins = Vec::new();
        for index in takers {
            if let Some(place) = self.admit(oid, &member.name, *index).await? {
                begins.push(place);
            }
        }
        self.begin(begins, &member.name, Some((oid, member.stored())));
        Ok(())
    }

    pub(super) fn takers_of(&self, table: &TableName) -> Vec<usize> {
        let takers = self.parts.takers.iter().enumerate();
        takers.filter(|(_, taker)| taker.config.tables.matches(table)).map(|(index, _)| index).collect()
    }

    /// Whether a destination can take the table. One that cannot is told so.
    async fn admit(&mut self, oid: u32, name: &TableName, destination: usize) -> Result<Option<Place>> {
        let publication = self.parts.source.publication.clone();
        let session = self.session().await?;
        let schema = table_schema(&*session, oid, &publication, SnapshotId::default(), Origin::Catalog).await;
        self.session = Some(session);
        let Some(schema) = schema? else { return Ok(None) };
        let taker = &self.parts.takers[destination];
        let admitted = check_some(&taker.config, &taker.plugin.borrow().clone(), &[&schema])
            .and_then(|()| self.check_target(oid, name, destination));
        let Err(error) = admitted else { return Ok(Some(Place { destination, oid })) };
        tracing::error!(destination = %taker.config.name, table = %name, code = error.code(), "the table is not taken: {error}");
        let stopped = Live::Stopped { oid, name: name.clone(), error: (&error).into() };
        // A destination that has ended ends the pipeline.
        let _ = taker.live.send_now(stopped);
        Ok(None)
    }

    /// Two tables that go to one place would overwrite each other.
    fn check_target(&self, oid: u32, name: &TableName, destination: usize) -> Result<()> {
        let config = &self.parts.takers[destination].config;
        let target = config.target(name).to_string();
        let taken =
            self.known.tables.iter().filter(|(known, other)| **known != oid && config.tables.matches(&other.name));
        let other = taken.map(|(_, other)| other).find(|other| config.target(&other.name).to_string() == target);
        match other {
            Some(other) => Err(Error::permanent(
                "table.same-target",
                format!("destination `{}`: {} and {name} both go to {target}", config.name, other.name),
            )
            .next("Give one of them another target in [[destination.table]].")),
            None => Ok(()),
        }
    }

    /// Brings a table of some destinations to the copier. Each waits for its own
    /// destination alone, however long that is away. `member` is stored behind them: a
    /// restart before that finds the difference again.
    pub(super) fn begin(&mut self, places: Vec<Place>, name: &TableName, member: Option<(u32, String)>) {
        self.under_way.extend(places.iter().copied());
        let begins = places.iter().map(|place| Begin {
            place: *place,
            name: name.clone(),
            live: self.parts.takers[place.destination].live.clone(),
            commands: self.parts.commands.clone(),
            asks: self.parts.asks.clone(),
        });
        let begins: Vec<Begin> = begins.collect();
        let store = self.parts.launcher.store.clone();
        self.beginning.spawn(async move {
            let begun = join_all(begins.into_iter().map(Begin::run)).await;
            if let Some(member) = member.filter(|_| begun.iter().all(Option::is_some))
                && let Err(error) = store.save_members(vec![member]).await
            {
                tracing::warn!(code = error.code(), "{error}; the table is copied once more after a restart");
            }
            places
        });
    }

    async fn serve(&mut self, request: Request) -> Result<String> {
        match request {
            Request::Resync { destination, table } => self.resync(&destination, &table).await,
            Request::Forget { destination, table } => self.forget(&destination, &table).await,
            Request::Reload(config) => self.reload(*config).await,
        }
    }

    async fn resync(&mut self, destination: &str, table: &str) -> Result<String> {
        self.look().await?;
        let index = self.taker(destination)?;
        let config = self.parts.takers[index].config.clone();
        let found = self.known.tables.iter().find(|(_, member)| member.name.to_string() == table);
        let Some((oid, name)) = found.map(|(oid, member)| (*oid, member.name.clone())) else {
            return Err(Error::no("resync.unknown-table", format!("the publication has no table `{table}`"))
                .next("Name it as `tidegate status` does; add it to the publication if it is not there."));
        };
        if !config.tables.matches(&name) {
            return Err(Error::no("resync.not-taken", format!("destination `{destination}` does not take {name}"))
                .next("Mend `tables` of the destination and start `tidegate run` again."));
        }
        let place = Place { destination: index, oid };
        if self.under_way.contains(&place) || self.copies(destination, table) {
            return Err(Error::no("resync.under-way", format!("{name} of {destination} is being copied already"))
                .next("Wait for it: `tidegate status` shows how far it is."));
        }
        let Some(place) = self.admit(oid, &name, index).await? else {
            return Err(Error::no("resync.refused", format!("{name} cannot be taken by {destination}"))
                .next("See `tidegate status` for why."));
        };
        self.begin(vec![place], &name, None);
        Ok(format!("{name} of {destination} is copied again"))
    }

    /// Whether a copy is under way or waits for its turn.
    fn copies(&self, destination: &str, table: &str) -> bool {
        let report = self.parts.launcher.board.report();
        let tables =
            report.destinations.iter().filter(|known| known.name == destination).flat_map(|known| &known.tables);
        tables
            .filter(|known| known.table == table)
            .any(|known| matches!(known.state, TableState::Init | TableState::DataSync | TableState::FinishedCopy))
    }

    async fn forget(&mut self, destination: &str, table: &str) -> Result<String> {
        let index = self.taker(destination)?;
        let loaded = self.parts.launcher.store.tables().await?;
        let record =
            loaded.into_iter().find(|record| record.destination == destination && record.name.to_string() == table);
        let Some(record) = record else {
            return Err(Error::no("tables.unknown", format!("{destination} has no table `{table}`"))
                .next("Name it as `tidegate status` does."));
        };
        if self.known.tables.contains_key(&record.oid) && self.parts.takers[index].config.tables.matches(&record.name) {
            return Err(Error::no("tables.published", format!("{table} is published, and {destination} takes it"))
                .next("Take it out of the publication first, or copy it again with `tidegate resync DEST TABLE`."));
        }
        let (done, forgotten) = oneshot::channel();
        let ending = |_| Error::transient("pipeline.ending", "the pipeline is ending");
        self.parts.takers[index].live.send_now(Live::Forget { oid: record.oid, done }).map_err(|_| ending(()))?;
        match forgotten.await.map_err(|_| ending(()))? {
            true => Ok(format!("{table} of {destination} is forgotten; what is at the destination stays")),
            false => Err(Error::no("tables.at-work", format!("{table} of {destination} has not stopped yet"))
                .next("Wait until `tidegate status` shows it as errored.")),
        }
    }

    fn taker(&self, destination: &str) -> Result<usize> {
        let names = || self.parts.takers.iter().map(|taker| taker.config.name.as_str()).collect::<Vec<_>>().join(", ");
        self.parts.takers.iter().position(|taker| taker.config.name == destination).ok_or_else(|| {
            Error::no("destination.unknown", format!("there is no destination `{destination}`"))
                .next(format!("Name one of: {}.", names()))
        })
    }
}

fn slow() -> Error {
    Error::transient("source.slow", format!("the source did not answer within {} s", LOOK_WITHIN.as_secs()))
}

/// A table on its way to the copier.
pub(super) struct Begin {
    pub place: Place,
    pub name: TableName,
    pub live: Sender<Live>,
    /// To the router.
    pub commands: mpsc::UnboundedSender<Command>,
    /// To the copier.
    pub asks: mpsc::UnboundedSender<Ask>,
}

impl Begin {
    /// None: the pipeline is ending.
    pub async fn run(self) -> Option<()> {
        let Place { destination, oid } = self.place;
        let (done, begun) = oneshot::channel();
        self.live.send_now(Live::Begin { oid, name: self.name.clone(), done }).ok()?;
        let beginning = begun.await.ok()?;
        let (answer, joined) = oneshot::channel();
        self.commands.send(Command::Join { oid, name: self.name, destination, beginning, answer }).ok()?;
        joined.await.ok()?;
        self.asks.send(Ask::Copy { oid, destination, beginning }).ok()
    }
}
