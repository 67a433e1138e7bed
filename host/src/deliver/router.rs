//! The one reader of the stream: decodes it once, sends each change to the
//! destinations that follow the stream, and spools it for those that do not yet.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use tokio::sync::{Notify, mpsc, oneshot, watch};

use crate::copy::spool::{FrameHead, FrameKind, Spool};
use crate::error::{Error, Result};
use crate::position::{Lsn, Position, row_ordinal};
use crate::schema::table::TableName;
use crate::source::pgoutput::{self, Message, Relation};
use crate::source::{Feedback, WalMessage, WalReader, XLogData};
use crate::store::TableState;

use super::destination::{Event, Live};
use super::drain::Drainer;
use super::feed::{Fed, Feed, Transaction, Undecoded};
use super::inbox::Sender;
use super::lag::LagMeter;
use super::retry::Backoff;
use super::versions::Versions;

/// Open batches are closed at a commit once they hold this much together.
const CUT_BYTES: usize = 1 << 20;
/// And inside a transaction once they hold this much.
const CUT_INSIDE_BYTES: usize = 4 << 20;
/// How long the others wait for a destination whose queue is full, before what is for
/// it goes to the spool.
const PATIENCE: Duration = Duration::from_secs(1);
/// How often `status` is told how far the stream is.
const REPORT_EVERY: Duration = Duration::from_millis(200);

/// While messages come closer together than `BUSY`, the socket is left alone for `REST`
/// between two reads: the server sends every change by itself, and to wake up for each
/// costs more than to decode it. Whoever commits now and then waits for nothing.
const BUSY: Duration = Duration::from_millis(4);
const REST: Duration = Duration::from_millis(1);

/// What a drain asks of the router.
pub(super) enum Command {
    /// The drain has sent everything of the spool up to `reached`: may the table
    /// follow the stream?
    DrainEnd {
        destination: usize,
        oid: u32,
        floor: Lsn,
        reached: Option<(Lsn, u64)>,
        answer: oneshot::Sender<DrainAnswer>,
    },
}

/// What the router says to a drain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DrainAnswer {
    /// The table follows the stream from here on.
    Live,
    /// There is more in the spool.
    More,
    /// The destination gave the table up.
    Gone,
}

/// A destination, as the router sees it.
pub(super) struct Outlet {
    pub name: String,
    pub live: Sender<Live>,
}

/// A table that at least one destination takes.
struct Routed {
    name: TableName,
    /// Destinations that follow the stream.
    live: Vec<usize>,
    /// Destinations that are served from the spool.
    spooled: Vec<usize>,
    feed: Feed,
    /// The last change that was fed; a reconnect sends it again.
    fed: Option<Position>,
    /// The WAL position of the last row, and how many rows of the table it had (P1).
    counter: (Lsn, u64),
    dirty: bool,
}

struct Waiting {
    destination: usize,
    oid: u32,
    floor: Lsn,
    reached: Option<(Lsn, u64)>,
    answer: oneshot::Sender<DrainAnswer>,
}

/// What a router is made of.
pub(super) struct RouterParts {
    pub epoch: u32,
    pub outlets: Vec<Outlet>,
    pub spool: Spool,
    pub versions: Versions,
    pub drainer: Drainer,
    pub commands: mpsc::UnboundedReceiver<Command>,
    pub events: mpsc::UnboundedReceiver<Event>,
    pub lag: LagMeter,
    /// Notified when a destination has nothing to do.
    pub hungry: Arc<Notify>,
    /// The tables that were published when the pipeline started.
    pub known: HashSet<u32>,
    pub stopping: watch::Receiver<bool>,
}

/// See the module.
pub(super) struct Router {
    parts: RouterParts,
    tables: HashMap<u32, Routed>,
    relations: HashMap<u32, Bytes>,
    open: Option<Transaction>,
    /// Everything before it was taken.
    at: Lsn,
    /// Up to where destinations were told of progress.
    told: Lsn,
    /// Bytes fed or spooled since the last cut.
    pending: usize,
    dirty: Vec<u32>,
    waiting: Vec<Waiting>,
    reported: Instant,
}

/// How a run of the router ended without an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Routing {
    /// It was told to stop.
    Stopped,
}

impl Router {
    /// A router for a stream that begins at `at`: everything before it was taken.
    pub fn new(parts: RouterParts, at: Lsn) -> Router {
        Router {
            parts,
            tables: HashMap::new(),
            relations: HashMap::new(),
            open: None,
            at,
            told: at,
            pending: 0,
            dirty: Vec::new(),
            waiting: Vec::new(),
            reported: Instant::now(),
        }
    }

    /// Everything before it was taken.
    pub fn at(&self) -> Lsn {
        self.at
    }

    /// A table of a destination: live, or served from the spool.
    pub fn add_table(&mut self, oid: u32, name: &TableName, destination: usize, live: bool) {
        let (epoch, history) = (self.parts.epoch, self.parts.versions.history());
        let routed = self.tables.entry(oid).or_insert_with(|| Routed {
            name: name.clone(),
            live: Vec::new(),
            spooled: Vec::new(),
            feed: Feed::new(oid, epoch, history),
            fed: None,
            counter: (Lsn::ZERO, 0),
            dirty: false,
        });
        if live { routed.live.push(destination) } else { routed.spooled.push(destination) }
    }

    /// A new connection sends everything from the checkpoint again: what an open
    /// transaction left is cut, what was fed is dropped by position.
    pub fn reconnected(&mut self) {
        if self.open.take().is_some() {
            self.parts.spool.rollback();
        }
        self.relations.clear();
        for routed in self.tables.values_mut() {
            routed.counter = (Lsn::ZERO, 0);
        }
    }

    /// Takes the stream until it fails or it is time to stop. On a stop what is open is
    /// sent.
    pub async fn run(&mut self, reader: &mut WalReader, feedback: &Feedback) -> Result<Routing> {
        let mut report = tokio::time::interval(REPORT_EVERY);
        let hungry = self.parts.hungry.clone();
        let mut stopping = self.parts.stopping.clone();
        let mut woken = Instant::now();
        let mut busy = false;
        loop {
            if *stopping.borrow() {
                // A transaction that is cut off here comes again, whole.
                if self.open.is_none() {
                    self.cut().await?;
                }
                return Ok(Routing::Stopped);
            }
            if std::mem::take(&mut busy) && !reader.has_buffered() {
                tokio::time::sleep(REST).await;
            }
            if !reader.has_buffered() && self.open.is_none() && self.wants_cut() {
                self.cut().await?;
            }
            tokio::select! {
                biased;
                _ = stopping.changed() => {}
                Some(command) = self.parts.commands.recv() => self.command(command),
                Some(event) = self.parts.events.recv() => self.event(event),
                message = reader.next() => {
                    busy = woken.elapsed() < BUSY;
                    woken = Instant::now();
                    self.take_buffered(message?, reader).await?;
                    feedback.received(self.at);
                }
                () = hungry.notified() => {}
                _ = report.tick() => self.report(),
            }
        }
    }

    /// Takes a message and what is at hand behind it, without waiting in between.
    async fn take_buffered(&mut self, first: WalMessage, reader: &mut WalReader) -> Result<()> {
        self.take(first).await?;
        // Drains and failures are looked at in between, however fast the stream is.
        for _ in 0..4096 {
            if !reader.has_buffered() {
                break;
            }
            let message = reader.next().await?;
            self.take(message).await?;
        }
        if self.reported.elapsed() >= REPORT_EVERY {
            self.report();
        }
        Ok(())
    }

    async fn take(&mut self, message: WalMessage) -> Result<()> {
        match message {
            WalMessage::Keepalive { end } => {
                self.parts.lag.source_is_at(end);
                // Inside a transaction a keepalive says nothing about what was taken (P6).
                if self.open.is_none() {
                    self.at = self.at.max(end);
                    self.serve_waiting();
                }
                Ok(())
            }
            WalMessage::Data(data) => {
                self.parts.lag.source_is_at(data.end);
                self.take_data(data).await
            }
        }
    }

    async fn take_data(&mut self, data: XLogData) -> Result<()> {
        let message = pgoutput::decode(&data.body)?;
        match &message {
            Message::Insert { oid, .. } => self.change(*oid, &data, &message).await,
            Message::Update { oid, .. } => self.change(*oid, &data, &message).await,
            Message::Delete { oid, .. } => self.change(*oid, &data, &message).await,
            Message::Truncate { oids, .. } => {
                for oid in oids {
                    self.change(*oid, &data, &message).await?;
                }
                Ok(())
            }
            Message::Begin(begin) => {
                self.open =
                    Some(Transaction { commit: begin.final_lsn, committed_at: begin.committed_at, xid: begin.xid });
                Ok(())
            }
            Message::Commit(commit) => self.commit(commit.commit, commit.end).await,
            Message::Relation(relation) => self.relation(relation.clone(), &data).await,
            Message::Logical { transactional: true, lsn, prefix, content } => self.logical(prefix, content, *lsn).await,
            Message::Logical { .. } | Message::Origin | Message::Type => Ok(()),
        }
    }

    async fn commit(&mut self, commit: Lsn, end: Lsn) -> Result<()> {
        self.parts.spool.commit(commit, end)?;
        if let Some(transaction) = self.open.take() {
            self.parts.lag.committed(end, transaction.committed_at);
        }
        self.at = end;
        if self.pending >= CUT_BYTES {
            self.cut().await?;
        }
        self.serve_waiting();
        Ok(())
    }

    /// Rows behind it are encoded so; nothing more (P2).
    async fn relation(&mut self, relation: Relation, data: &XLogData) -> Result<()> {
        let oid = relation.oid;
        let Some(routed) = self.tables.get_mut(&oid) else {
            if self.parts.known.insert(oid) {
                // Its rows are in the copy that the next start makes of it.
                tracing::warn!(
                    table = %relation.name, code = "table.joined",
                    next = "Start tidegate again: the table is copied then.",
                    "the table joined the publication while the pipeline runs, which does not take it up yet"
                );
            }
            return Ok(());
        };
        routed.feed.relation(Arc::new(relation));
        // A copy of its own: a slice would keep the reader's whole buffer.
        self.relations.insert(oid, Bytes::copy_from_slice(&data.body));
        if !routed.spooled.is_empty() {
            let head = self.frame_head(oid, data.start, 0)?;
            self.spool(head, FrameKind::Relation, &data.body).await?;
        }
        Ok(())
    }

    async fn change(&mut self, oid: u32, data: &XLogData, message: &Message) -> Result<()> {
        let Some(transaction) = self.open else { return Err(outside_transaction(data.start)) };
        let Some(routed) = self.tables.get_mut(&oid) else { return Ok(()) };
        let index = if routed.counter.0 == data.start { routed.counter.1 + 1 } else { 0 };
        routed.counter = (data.start, index);
        let ordinal = row_ordinal(data.start, index);
        if !routed.live.is_empty() {
            let position = Position { epoch: self.parts.epoch, commit: transaction.commit, ordinal };
            if routed.fed.is_none_or(|fed| position > fed) {
                match routed.feed.change(transaction, data.start, ordinal, message) {
                    Ok(()) => {
                        routed.fed = Some(position);
                        if !routed.dirty {
                            routed.dirty = true;
                            self.dirty.push(oid);
                        }
                    }
                    Err(Undecoded::UnknownRelation) => self.divert_all(oid).await?,
                    Err(Undecoded::Failed(error)) => self.fail(oid, &error),
                }
            }
        }
        self.pending += data.body.len();
        if self.tables.get(&oid).is_some_and(|routed| !routed.spooled.is_empty()) {
            let head = self.frame_head(oid, data.start, ordinal)?;
            self.spool(head, FrameKind::Change, &data.body).await?;
        }
        if self.pending >= CUT_INSIDE_BYTES {
            self.send_open().await?;
        }
        Ok(())
    }

    /// A message of the DDL trigger becomes a version of its table's schema, on disk
    /// before anything behind it can be confirmed (P5).
    async fn logical(&mut self, prefix: &Bytes, content: &Bytes, lsn: Lsn) -> Result<()> {
        let Some(transaction) = self.open else { return Err(outside_transaction(lsn)) };
        let Some(oid) = self.parts.versions.message(prefix, content, transaction.commit, lsn).await? else {
            return Ok(());
        };
        let Some(routed) = self.tables.get_mut(&oid) else { return Ok(()) };
        if !routed.live.is_empty() {
            routed.feed.schema(transaction, lsn);
            if !routed.dirty {
                routed.dirty = true;
                self.dirty.push(oid);
            }
        }
        if !routed.spooled.is_empty() {
            let head = self.frame_head(oid, lsn, row_ordinal(lsn, 0))?;
            self.spool(head, FrameKind::Schema, &[]).await?;
        }
        self.pending += content.len();
        Ok(())
    }

    fn frame_head(&self, table: u32, row: Lsn, ordinal: u64) -> Result<FrameHead> {
        let transaction = self.open.ok_or_else(|| outside_transaction(row))?;
        Ok(FrameHead {
            table,
            commit: transaction.commit,
            committed_at: transaction.committed_at,
            xid: transaction.xid,
            row,
            ordinal,
        })
    }

    /// A spool that is full or on a full disk makes the reader wait, and everybody with
    /// it: nothing is dropped.
    async fn spool(&mut self, head: FrameHead, kind: FrameKind, body: &[u8]) -> Result<()> {
        let mut backoff = Backoff::transient();
        loop {
            match self.parts.spool.append(head, kind, body) {
                Ok(()) => return Ok(()),
                Err(error) if error.is_transient() => {
                    tracing::error!(code = error.code(), %error, "the spool takes nothing more: the stream waits");
                    self.report();
                    let pause = backoff.pause(None);
                    let mut stopping = self.parts.stopping.clone();
                    tokio::select! {
                        () = tokio::time::sleep(pause) => {}
                        _ = stopping.wait_for(|stopping| *stopping) => return Err(error),
                    }
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Whether there is something to send, and somebody who waits for it.
    fn wants_cut(&self) -> bool {
        let something = !self.dirty.is_empty() || self.at > self.told;
        something && self.parts.outlets.iter().any(|outlet| outlet.live.is_hungry())
    }

    /// At a commit: closes and sends what is open, and tells how far the stream is.
    async fn cut(&mut self) -> Result<()> {
        self.send_open().await?;
        if self.open.is_none() && self.at > self.told {
            self.told = self.at;
            for outlet in &self.parts.outlets {
                outlet.live.send_now(Live::Progress(self.at)).map_err(|_| ended(&outlet.name))?;
            }
        }
        Ok(())
    }

    /// Closes all open batches and sends them.
    async fn send_open(&mut self) -> Result<()> {
        self.pending = 0;
        let mut slow: Vec<usize> = Vec::new();
        for oid in std::mem::take(&mut self.dirty) {
            let Some(routed) = self.tables.get_mut(&oid) else { continue };
            routed.dirty = false;
            let fed: Vec<Fed> = routed.feed.take().collect();
            let live = routed.live.clone();
            for fed in fed {
                for destination in &live {
                    self.send(*destination, &fed, &mut slow).await?;
                }
            }
        }
        for destination in slow {
            self.divert_destination(destination).await?;
        }
        Ok(())
    }

    /// Sends to one destination. One that stays full while others wait is noted, and
    /// gets this over its bound.
    async fn send(&self, destination: usize, fed: &Fed, slow: &mut Vec<usize>) -> Result<()> {
        let outlet = &self.parts.outlets[destination];
        let (item, bytes) = to_live(fed);
        let sent = if slow.contains(&destination) {
            outlet.live.send_now(item)
        } else if self.parts.outlets.len() == 1 || outlet.live.has_room(bytes) {
            let mut stopping = self.parts.stopping.clone();
            tokio::select! {
                biased;
                sent = outlet.live.send(item, bytes) => sent,
                _ = stopping.wait_for(|stopping| *stopping) => outlet.live.send_now(to_live(fed).0),
            }
        } else {
            match tokio::time::timeout(PATIENCE, outlet.live.send(item, bytes)).await {
                Ok(sent) => sent,
                Err(_) => {
                    slow.push(destination);
                    outlet.live.send_now(to_live(fed).0)
                }
            }
        };
        sent.map_err(|_| ended(&outlet.name))
    }

    /// A destination that does not keep up: from here on its changes go to the spool,
    /// and the others do not wait (P9).
    async fn divert_destination(&mut self, destination: usize) -> Result<()> {
        let oids: Vec<u32> =
            self.tables.iter().filter(|(_, routed)| routed.live.contains(&destination)).map(|(oid, _)| *oid).collect();
        tracing::warn!(destination = %self.parts.outlets[destination].name, tables = oids.len(), "the destination does not keep up; its changes are spooled");
        for oid in oids {
            self.divert(oid, destination).await?;
        }
        Ok(())
    }

    /// Rows of the table cannot be decoded until their transaction is at hand whole.
    async fn divert_all(&mut self, oid: u32) -> Result<()> {
        let Some(routed) = self.tables.get_mut(&oid) else { return Ok(()) };
        let fed: Vec<Fed> = routed.feed.take().collect();
        let live = routed.live.clone();
        for destination in live {
            for fed in &fed {
                let outlet = &self.parts.outlets[destination];
                outlet.live.send_now(to_live(fed).0).map_err(|_| ended(&outlet.name))?;
            }
            self.divert(oid, destination).await?;
        }
        Ok(())
    }

    /// Serves one table of one destination from the spool, from the last change that was
    /// fed on.
    async fn divert(&mut self, oid: u32, destination: usize) -> Result<()> {
        let Some(routed) = self.tables.get_mut(&oid) else { return Ok(()) };
        let first = routed.spooled.is_empty();
        routed.live.retain(|known| *known != destination);
        routed.spooled.push(destination);
        let cursor = routed.fed;
        let outlet = &self.parts.outlets[destination];
        outlet.live.send_now(Live::State { oid, state: TableState::CatchUp }).map_err(|_| ended(&outlet.name))?;
        // The server does not say again how the rows behind are encoded.
        if first && let Some(relation) = self.relations.get(&oid).cloned() {
            let head = self.relation_head(oid);
            self.spool(head, FrameKind::Relation, &relation).await?;
        }
        let outlet = &self.parts.outlets[destination];
        self.parts.drainer.start(destination, outlet.live.clone(), oid, Lsn::ZERO, cursor);
        Ok(())
    }

    fn relation_head(&self, table: u32) -> FrameHead {
        let transaction = self.open.unwrap_or(Transaction { commit: self.at, committed_at: 0, xid: 0 });
        FrameHead {
            table,
            commit: transaction.commit,
            committed_at: transaction.committed_at,
            xid: transaction.xid,
            row: Lsn::ZERO,
            ordinal: 0,
        }
    }

    /// The table's changes are not what they should be, for nobody.
    fn fail(&mut self, oid: u32, error: &Error) {
        let Some(routed) = self.tables.get(&oid) else { return };
        for destination in &routed.live {
            // A destination that has ended stops the pipeline at the next send.
            let _ = self.parts.outlets[*destination].live.send_now(Live::Failed { oid, error: error.into() });
        }
        if let Some(routed) = self.tables.get_mut(&oid) {
            tracing::error!(table = %routed.name, code = error.code(), %error, "the table's changes cannot be decoded");
            routed.live.clear();
        }
    }

    fn command(&mut self, command: Command) {
        let Command::DrainEnd { destination, oid, floor, reached, answer } = command;
        self.waiting.push(Waiting { destination, oid, floor, reached, answer });
        if self.open.is_none() {
            self.serve_waiting();
        }
    }

    fn event(&mut self, event: Event) {
        let Event::TableFailed { destination, oid } = event;
        if let Some(routed) = self.tables.get_mut(&oid) {
            routed.live.retain(|known| *known != destination);
            routed.spooled.retain(|known| *known != destination);
        }
        self.serve_waiting();
    }

    /// Lets tables follow the stream whose drain has met it: at a commit, and not before
    /// the stream has reached their copy's floor (P12).
    fn serve_waiting(&mut self) {
        if self.waiting.is_empty() {
            return;
        }
        let inside = self.open.is_some();
        for waiting in std::mem::take(&mut self.waiting) {
            match self.drain_answer(&waiting, inside) {
                // A drain that has ended meanwhile needs no answer.
                Some(answer) => drop(waiting.answer.send(answer)),
                None => self.waiting.push(waiting),
            }
        }
    }

    fn drain_answer(&mut self, waiting: &Waiting, inside: bool) -> Option<DrainAnswer> {
        let Some(routed) = self.tables.get_mut(&waiting.oid) else { return Some(DrainAnswer::Gone) };
        if !routed.spooled.contains(&waiting.destination) {
            return Some(DrainAnswer::Gone);
        }
        let end = self.parts.spool.end(waiting.oid);
        if end > waiting.reached {
            return Some(DrainAnswer::More);
        }
        if inside || self.at < waiting.floor {
            return None;
        }
        routed.spooled.retain(|known| *known != waiting.destination);
        routed.live.push(waiting.destination);
        // The feed drops what others were fed before; what this one had is the same.
        let ready = Live::State { oid: waiting.oid, state: TableState::Ready };
        let sent = self.parts.outlets[waiting.destination].live.send_now(ready);
        Some(if sent.is_ok() { DrainAnswer::Live } else { DrainAnswer::Gone })
    }

    fn report(&mut self) {
        self.reported = Instant::now();
        self.parts.lag.report();
    }
}

fn to_live(fed: &Fed) -> (Live, usize) {
    match fed {
        Fed::Batch(batch) => (Live::Batch(batch.clone()), batch.bytes),
        Fed::Truncate { schema, truncation } => (Live::Truncate { schema: schema.clone(), truncation: *truncation }, 0),
        Fed::Schema(schema) => (Live::Schema(schema.clone()), 0),
    }
}

fn outside_transaction(at: Lsn) -> Error {
    Error::permanent("source.protocol", format!("a change at {at} stands outside any transaction"))
}

/// A destination's thread is gone, which only a fault of the host explains.
fn ended(destination: &str) -> Error {
    Error::permanent("destination.ended", format!("destination `{destination}` has ended unexpectedly"))
        .next("Look for its last messages above, and start again.")
}
