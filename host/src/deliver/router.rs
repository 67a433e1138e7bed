//! The one reader of the stream: decodes it once, sends each change to the
//! destinations that follow the stream, and spools it for those that do not yet.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use bytes::Bytes;
use tokio::sync::{Notify, mpsc, oneshot, watch};

use crate::config::SpoolFull;
use crate::copy::spool::{FrameHead, FrameKind, Spool};
use crate::error::{Error, Result};
use crate::memory::{Budget, LARGE_ROW_BYTES, Taken};
use crate::position::{Lsn, Position, row_ordinal};
use crate::source::pgoutput::{self, Message, Relation};
use crate::source::{Feedback, WalMessage, WalReader, XLogData};
use crate::status::SpoolStatus;
use crate::store::{Store, TableError};

use super::away::Away;
use super::checkpoint::{Checkpointer, Confirmed};
use super::copier::Beginnings;
use super::cursors::Cursors;
use super::destination::Live;
use super::drain::Drainer;
use super::feed::{Fed, Transaction, Undecoded};
use super::gather::Gather;
use super::inbox::Sender;
use super::lag::LagMeter;
use super::marks::{Marks, percent};
use super::retry::Backoff;
use super::routes::{Asked, Command, Place, Routed, Waiting};
use super::versions::Versions;

/// Open batches are closed at a commit once they hold this much together.
const CUT_BYTES: usize = 1 << 20;
/// And inside a transaction once they hold this much.
const CUT_INSIDE_BYTES: usize = 4 << 20;
/// Or have taken so much for rows that have not come: many tables that were busy before
/// (P10).
const CUT_RESERVED_BYTES: usize = 16 << 20;
/// How long the others wait for a destination whose queue is full, before what is for
/// it goes to the spool.
const PATIENCE: Duration = Duration::from_secs(1);
/// The same where there are no others: the source alone waits, and keeps its log.
const PATIENCE_ALONE: Duration = Duration::from_secs(10);
/// A destination whose checkpoint has not moved for so long, with so much log behind it,
/// does not keep up either, although its queue has room.
const STALLED_FOR: Duration = Duration::from_secs(300);
const STALLED_BYTES: u64 = 64 << 20;
/// How long the spool is left alone between two tries when it is full.
const LONGEST_WAIT: Duration = Duration::from_secs(1);
/// Bytes spooled before it is told how full the spool is, whatever the time.
const SHOW_SPOOL_BYTES: usize = 1 << 20;
/// How often `status` is told how far the stream is.
const REPORT_EVERY: Duration = Duration::from_millis(200);

/// A destination, as the router sees it.
pub(super) struct Outlet {
    pub name: String,
    pub live: Sender<Live>,
    pub checkpointer: Checkpointer,
    pub spool_full: SpoolFull,
    /// Set until the destination knows that it is detached.
    pub detached: Arc<AtomicBool>,
    /// All its tables are served from the spool: what is there counts for its checkpoint.
    pub behind: bool,
}

/// What a router is made of.
pub(super) struct RouterParts {
    pub epoch: u32,
    pub outlets: Vec<Outlet>,
    pub spool: Spool,
    pub spool_bytes: u64,
    pub store: Store,
    pub versions: Versions,
    pub away: Away,
    pub drainer: Drainer,
    pub commands: mpsc::UnboundedReceiver<Command>,
    pub memory: Budget,
    pub lag: LagMeter,
    pub cursors: Cursors,
    pub confirmed: Confirmed,
    /// Notified when a destination has nothing to do.
    pub hungry: Arc<Notify>,
    /// Notified when there is reason to look at the publication at once.
    pub strangers: Arc<Notify>,
    pub stopping: watch::Receiver<bool>,
}

/// See the module.
pub(super) struct Router {
    pub(super) parts: RouterParts,
    pub(super) tables: HashMap<u32, Routed>,
    /// Of all tables: one that joins later has told its columns before.
    pub(super) relations: HashMap<u32, Bytes>,
    pub(super) open: Option<Transaction>,
    /// Commit of a transaction that a broken connection cut off, of which rows were fed:
    /// until it was read again they are no whole transaction, and nothing is cut.
    torn: Option<Lsn>,
    /// Everything before it was taken.
    pub(super) at: Lsn,
    /// The same before the stream was read again: up to here changes come once more.
    pub(super) furthest: Lsn,
    /// The stream has to be read again.
    pub(super) rewind: bool,
    /// And what destinations were told behind there has to be told again.
    pub(super) retell: bool,
    /// Checkpoints, and when they last moved.
    moved: Vec<(Lsn, Instant)>,
    /// Up to where destinations were told of progress.
    told: Lsn,
    /// Bytes fed or spooled since the last cut.
    pending: usize,
    /// Bytes that the open batches have reserved.
    reserved: usize,
    dirty: Vec<u32>,
    /// What was asked inside a transaction.
    pub(super) commands: Vec<Command>,
    /// Drains that have met the stream too early.
    pub(super) waiting: Vec<Waiting>,
    /// Who waits for the stream to be somewhere.
    pub(super) reaching: Vec<(Lsn, oneshot::Sender<Option<u64>>)>,
    /// How often the stream was begun.
    pub(super) begun: u64,
    /// Tables that are not published any more, and since when.
    pub(super) leaving: Vec<(Lsn, u32)>,
    /// Tables of a destination that stop, and where.
    pub(super) stops: Vec<(Lsn, Place, TableError)>,
    /// The transactions that truncated a table, the last ones.
    pub(super) truncations: HashMap<u32, VecDeque<u32>>,
    /// Who asks for them.
    pub(super) asked: Vec<Asked>,
    /// See [`Command::End`].
    pub(super) ending: Option<(Lsn, Error)>,
    /// By which each place was joined last.
    pub(super) beginnings: Beginnings,
    /// Drains started so far.
    pub(super) drains: u64,
    reported: Instant,
    spool_marks: Marks,
    /// Bytes spooled since it was last told how full the spool is.
    unshown: usize,
    gather: Gather,
}

/// How a run of the router ended without an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Routing {
    /// It was told to stop.
    Stopped,
    /// The stream has to be read again from the smallest checkpoint on, with a spool that
    /// is set back to there: see [`Router::fall_behind`].
    Rewind,
}

impl Router {
    /// A router for a stream that begins at `at`: everything before it was taken.
    pub fn new(parts: RouterParts, at: Lsn) -> Router {
        Router {
            parts,
            tables: HashMap::new(),
            relations: HashMap::new(),
            open: None,
            torn: None,
            at,
            furthest: at,
            rewind: false,
            retell: false,
            moved: Vec::new(),
            told: at,
            pending: 0,
            reserved: 0,
            dirty: Vec::new(),
            commands: Vec::new(),
            waiting: Vec::new(),
            reaching: Vec::new(),
            begun: 0,
            leaving: Vec::new(),
            stops: Vec::new(),
            truncations: HashMap::new(),
            asked: Vec::new(),
            ending: None,
            beginnings: Beginnings::new(),
            drains: 0,
            reported: Instant::now(),
            spool_marks: Marks::default(),
            unshown: 0,
            gather: Gather::default(),
        }
    }

    /// Everything before it was taken.
    pub fn at(&self) -> Lsn {
        self.at
    }

    /// Everything that was fed is before it, what a broken connection left unfinished
    /// included.
    pub fn seen(&self) -> Lsn {
        let fed = self.tables.values().filter_map(|table| table.fed).map(|fed| Lsn(fed.commit.0 + 1)).max();
        fed.unwrap_or_default().max(self.furthest)
    }

    /// A new connection sends everything from the checkpoint again: what an open
    /// transaction left is cut, what was fed is dropped by position.
    ///
    /// `from`: where the stream begins.
    pub fn reconnected(&mut self, from: Lsn) {
        self.rewind = false;
        if std::mem::take(&mut self.retell) {
            self.told = self.told.min(from);
        }
        self.begun += 1;
        self.at = from;
        if let Some(open) = self.open.take() {
            crate::failpoint::reached("router.cut-off");
            self.parts.spool.rollback();
            if self.was_fed(open.commit) {
                self.torn = Some(open.commit);
            }
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
        loop {
            reader.set_message_bytes(self.parts.memory.row_bytes());
            if *stopping.borrow() {
                // A transaction that is cut off here comes again, whole.
                if self.open.is_none() {
                    self.cut().await?;
                }
                return Ok(Routing::Stopped);
            }
            if self.rewind {
                return Ok(Routing::Rewind);
            }
            if !reader.has_buffered() {
                if self.open.is_none() && self.wants_cut() {
                    self.cut().await?;
                }
                self.gather.pause();
            }
            tokio::select! {
                biased;
                _ = stopping.changed() => {}
                Some(command) = self.parts.commands.recv() => {
                    self.commands.push(command);
                    self.serve_commands().await?;
                }
                message = reader.next() => {
                    self.take_buffered(message?, reader).await?;
                    feedback.received(self.at);
                }
                () = hungry.notified() => {}
                _ = report.tick() => {
                    self.report();
                    self.look_for_stalled()?;
                    if self.open.is_none() && self.parts.outlets.iter().any(|outlet| outlet.behind) {
                        self.cut().await?;
                    }
                }
            }
        }
    }

    /// Takes a message and what is at hand behind it, without waiting in between.
    async fn take_buffered(&mut self, first: WalMessage, reader: &mut WalReader) -> Result<()> {
        self.take(first).await?;
        let mut taken = 1;
        // Drains and failures are looked at in between, however fast the stream is.
        while taken < 4096 && reader.has_buffered() {
            let message = reader.next().await?;
            self.take(message).await?;
            taken += 1;
        }
        self.gather.took(taken);
        if self.reported.elapsed() >= REPORT_EVERY {
            self.report();
        }
        Ok(())
    }

    async fn take(&mut self, message: WalMessage) -> Result<()> {
        // All of it comes again.
        if self.rewind {
            return Ok(());
        }
        match message {
            WalMessage::Keepalive { end } => {
                self.parts.lag.source_is_at(end);
                // Inside a transaction a keepalive says nothing about what was taken (P6).
                if self.open.is_none() {
                    self.reached(self.at.max(end));
                    self.serve_commands().await?;
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
            Message::Oversized { oid, .. } => self.change(*oid, &data, &message).await,
            Message::Truncate { oids, .. } => {
                for oid in oids {
                    self.change(*oid, &data, &message).await?;
                    if let Some(transaction) = self.open {
                        self.truncated(*oid, transaction.xid);
                    }
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
        crate::failpoint::reached("router.committed");
        if let Some(transaction) = self.open.take() {
            self.parts.lag.committed(end, transaction.committed_at);
        }
        self.reached(end);
        if self.pending >= CUT_BYTES {
            self.cut().await?;
        }
        self.serve_commands().await
    }

    /// Whether rows of the transaction are on their way.
    fn was_fed(&self, commit: Lsn) -> bool {
        self.tables.values().any(|table| table.fed.is_some_and(|fed| fed.commit == commit))
    }

    fn reached(&mut self, at: Lsn) {
        self.torn = self.torn.filter(|commit| *commit >= at);
        if self.at < self.furthest {
            self.parts.confirmed.thaw((at < self.furthest).then_some(at));
        }
        self.at = at;
        self.furthest = self.furthest.max(at);
    }

    /// Rows behind it are encoded so; nothing more (P2).
    async fn relation(&mut self, relation: Relation, data: &XLogData) -> Result<()> {
        let oid = relation.oid;
        // A copy of its own: a slice would keep the reader's whole buffer.
        self.relations.insert(oid, Bytes::copy_from_slice(&data.body));
        let Some(routed) = self.tables.get_mut(&oid) else {
            self.parts.strangers.notify_one();
            return Ok(());
        };
        routed.feed.relation(Arc::new(relation));
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
        let is_large = data.body.len() > LARGE_ROW_BYTES;
        if is_large {
            // It is a batch of its own, and nothing else is held while it is read.
            self.send_open().await?;
        }
        let Some(routed) = self.tables.get_mut(&oid) else { return Ok(()) };
        if !routed.live.is_empty() {
            let position = Position { epoch: self.parts.epoch, commit: transaction.commit, ordinal };
            if routed.fed.is_none_or(|fed| position > fed) {
                match routed.feed.change(transaction, data.start, ordinal, message) {
                    Ok(()) => {
                        routed.fed = Some(position);
                        if !routed.dirty {
                            routed.dirty = true;
                            self.dirty.push(oid);
                            self.reserved += routed.feed.reserved();
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
        if is_large || self.pending >= CUT_INSIDE_BYTES || self.reserved >= CUT_RESERVED_BYTES {
            self.send_open().await?;
        }
        Ok(())
    }

    /// A message of the DDL trigger becomes a version of its table's schema, on disk
    /// before anything behind it can be confirmed (P5).
    async fn logical(&mut self, prefix: &Bytes, content: &Bytes, lsn: Lsn) -> Result<()> {
        let Some(transaction) = self.open else { return Err(outside_transaction(lsn)) };
        let told = self.parts.versions.message(prefix, content, transaction, lsn).await;
        self.heed(&told, transaction.commit).await?;
        let Some(oid) = told.version else { return Ok(()) };
        crate::failpoint::reached("router.versioned");
        let Some(routed) = self.tables.get_mut(&oid) else {
            self.parts.strangers.notify_one();
            return Ok(());
        };
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
    /// it: nothing is dropped but what a destination agreed to lose.
    pub(super) async fn spool(&mut self, head: FrameHead, kind: FrameKind, body: &[u8]) -> Result<()> {
        let mut backoff = Backoff::transient();
        loop {
            match self.parts.spool.append(head, kind, body) {
                Ok(()) => {
                    if backoff.tries() > 0 {
                        tracing::info!("the spool has room again: the stream goes on");
                        self.show_spool(None);
                    }
                    self.unshown += body.len();
                    if self.unshown >= SHOW_SPOOL_BYTES {
                        self.show_spool(None);
                    }
                    return Ok(());
                }
                Err(error) if error.code() == "spool.limit" && self.detach_slowest().await? => {}
                Err(error) if error.is_transient() => self.wait_for_room(error, &mut backoff).await?,
                Err(error) => return Err(error),
            }
        }
    }

    async fn wait_for_room(&mut self, error: Error, backoff: &mut Backoff) -> Result<()> {
        let waiting = self.spooled_destinations().join(", ");
        if backoff.tries() == 0 {
            tracing::error!(
                code = error.code(),
                next = error.next_step().unwrap_or_default(),
                "the spool takes nothing more: the stream, and every destination, waits for {waiting}: {error}"
            );
        }
        self.reach_nothing();
        self.show_spool(Some(format!("waits for {waiting}: {error}")));
        self.parts.lag.report();
        let pause = tokio::time::sleep(backoff.pause(None).min(LONGEST_WAIT));
        tokio::pin!(pause);
        let mut stopping = self.parts.stopping.clone();
        loop {
            tokio::select! {
                () = &mut pause => return Ok(()),
                _ = stopping.wait_for(|stopping| *stopping) => return Err(error),
                // What makes room must not wait for it.
                Some(command) = self.parts.commands.recv() => self.serve_or_keep(command),
            }
        }
    }

    fn show_spool(&mut self, waiting: Option<String>) {
        self.unshown = 0;
        let (bytes, limit_bytes) = (self.parts.spool.bytes(), self.parts.spool_bytes);
        self.parts.lag.spool(SpoolStatus { bytes, limit_bytes, waiting });
        if let Some(passed) = self.spool_marks.passed(percent(bytes, limit_bytes)) {
            let slow = self.spooled_destinations().join(", ");
            tracing::warn!(
                code = "spool.filling",
                bytes,
                limit_bytes,
                next = "See to the destination that does not keep up, or raise `spool_bytes` of [pipeline].",
                "the spool is filled to more than {passed} %, for {slow}: when it is full all wait"
            );
        }
    }

    /// Whether there is something to send, and somebody who waits for it.
    fn wants_cut(&self) -> bool {
        let something = !self.dirty.is_empty() || self.at > self.told;
        something && self.parts.outlets.iter().any(|outlet| outlet.live.is_hungry())
    }

    /// Whether the stream has to be read again.
    pub fn wants_rewind(&self) -> bool {
        self.rewind
    }

    /// At a commit: closes and sends what is open, and tells how far the stream is.
    async fn cut(&mut self) -> Result<()> {
        if self.torn.is_some() {
            return Ok(());
        }
        self.send_open().await?;
        // Not what was taken so far, of which a part is nowhere until it was read again.
        if self.open.is_none() && self.at > self.told && !self.rewind {
            crate::failpoint::reached("router.sent");
            self.told = self.at;
            for outlet in &self.parts.outlets {
                if outlet.behind {
                    outlet.checkpointer.spooled(self.at);
                } else {
                    outlet.live.send_now(Live::Progress(self.at)).map_err(|_| ended(&outlet.name))?;
                }
            }
            crate::failpoint::reached("router.told");
        }
        Ok(())
    }

    /// Nothing more comes for a while: what was taken goes on its way, up to the last
    /// commit. A transaction of which nothing was fed is none. False if rows of one were
    /// fed whose end did not come.
    pub async fn finish(&mut self) -> Result<bool> {
        if self.open.is_some_and(|open| !self.was_fed(open.commit)) {
            self.open = None;
            self.parts.spool.rollback();
        }
        if self.open.is_some() || self.torn.is_some() {
            return Ok(false);
        }
        self.cut().await?;
        Ok(true)
    }

    /// Closes all open batches and sends them.
    pub(super) async fn send_open(&mut self) -> Result<()> {
        (self.pending, self.reserved) = (0, 0);
        let mut slow: Vec<usize> = Vec::new();
        for oid in std::mem::take(&mut self.dirty) {
            let Some(routed) = self.tables.get_mut(&oid) else { continue };
            routed.dirty = false;
            let fed: Vec<Fed> = routed.feed.take().collect();
            let live = routed.live.clone();
            for fed in fed {
                let Some((last, others)) = live.split_last() else { break };
                for destination in others {
                    self.send(*destination, fed.clone(), &mut slow).await?;
                }
                // It is the last one's own then, who need not copy it.
                self.send(*last, fed, &mut slow).await?;
            }
        }
        for destination in slow {
            self.fall_behind(destination)?;
        }
        Ok(())
    }

    /// A destination can be stuck although its queue has room.
    fn look_for_stalled(&mut self) -> Result<()> {
        for destination in 0..self.parts.outlets.len() {
            let checkpoint = self.parts.confirmed.of(destination);
            if self.moved.len() == destination {
                self.moved.push((checkpoint, Instant::now()));
            }
            let (before, since) = self.moved[destination];
            if checkpoint > before {
                self.moved[destination] = (checkpoint, Instant::now());
            } else if since.elapsed() >= STALLED_FOR && self.at.0.saturating_sub(checkpoint.0) >= STALLED_BYTES {
                self.fall_behind(destination)?;
            }
        }
        Ok(())
    }

    /// Sends to one destination. One that stays full while others wait is noted, and
    /// gets this over its bound.
    async fn send(&self, destination: usize, fed: Fed, slow: &mut Vec<usize>) -> Result<()> {
        let outlet = &self.parts.outlets[destination];
        let (item, bytes) = to_live(fed);
        let taken = match outlet.live.try_room(bytes) {
            Some(taken) => Some(taken),
            None if slow.contains(&destination) => None,
            None => self.wait_for_room_at(outlet, bytes).await?,
        };
        let sent = match taken {
            Some(taken) => outlet.live.send_taken(item, taken),
            None => {
                if !slow.contains(&destination) {
                    slow.push(destination);
                }
                outlet.live.send_over(item, bytes)
            }
        };
        sent.map_err(|_| ended(&outlet.name))
    }

    /// None: it took too long, or it is time to stop.
    async fn wait_for_room_at(&self, outlet: &Outlet, bytes: usize) -> Result<Option<Taken>> {
        let patience = if self.parts.outlets.len() == 1 { PATIENCE_ALONE } else { PATIENCE };
        let mut stopping = self.parts.stopping.clone();
        tokio::select! {
            biased;
            taken = outlet.live.room(bytes) => taken.map(Some).map_err(|_| ended(&outlet.name)),
            () = tokio::time::sleep(patience) => Ok(None),
            _ = stopping.wait_for(|stopping| *stopping) => Ok(None),
        }
    }

    fn report(&mut self) {
        self.reported = Instant::now();
        self.show_spool(None);
        self.parts.lag.memory(&self.parts.memory);
        self.parts.lag.report();
    }
}

pub(super) fn to_live(fed: Fed) -> (Live, usize) {
    match fed {
        Fed::Batch(batch) => {
            let bytes = batch.bytes;
            (Live::Batch(batch), bytes)
        }
        Fed::Truncate { schema, truncation } => (Live::Truncate { schema, truncation }, 0),
        Fed::Schema(schema) => (Live::Schema(schema), 0),
    }
}

fn outside_transaction(at: Lsn) -> Error {
    Error::permanent("source.protocol", format!("a change at {at} stands outside any transaction"))
}

/// A destination's thread is gone, which only a fault of the host explains.
pub(super) fn ended(destination: &str) -> Error {
    Error::permanent("destination.ended", format!("destination `{destination}` has ended unexpectedly"))
        .next("Look for its last messages above, and start again.")
}
