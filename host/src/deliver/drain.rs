//! Catching up: a table's changes from the spool, until its cursor meets the stream.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot};
use tokio::task::JoinHandle;

use crate::copy::spool::{Frame, FrameKind, Spool, SpoolReader};
use crate::error::{Error, Result};
use crate::memory::{Budget, Taken};
use crate::position::{Lsn, Position};
use crate::source::pgoutput::{self, Message, Relation};

use super::destination::Live;
use super::feed::{Fed, Feed, Transaction, Undecoded};
use super::inbox::Sender;
use super::retry::Backoff;
use super::routes::{Command, DrainAnswer, Place};
use super::versions::Versions;

/// Bytes of frames read at once.
const READ_BYTES: usize = 1 << 20;
/// Tables of a destination that are read for at a time: there may be ten thousand.
const AT_ONCE: usize = 2;

/// Starts drains, and ends them.
#[derive(Clone)]
pub(super) struct Drainer {
    epoch: u32,
    spool: Spool,
    versions: Versions,
    commands: mpsc::UnboundedSender<Command>,
    running: Arc<Mutex<HashMap<Place, JoinHandle<()>>>>,
    memory: Budget,
    /// Of each destination.
    turns: Arc<Mutex<HashMap<usize, Arc<Semaphore>>>>,
}

impl Drainer {
    pub fn new(
        epoch: u32,
        spool: Spool,
        versions: Versions,
        commands: mpsc::UnboundedSender<Command>,
        memory: Budget,
    ) -> Drainer {
        let (running, turns) = (Arc::default(), Arc::default());
        Drainer { epoch, spool, versions, commands, running, memory, turns }
    }

    /// Serves a destination's table from the spool: frames with a commit below `floor`
    /// are in its copy, those at or below `cursor` were sent. The router knows the drain
    /// by `id`.
    pub fn start(&self, id: u64, place: Place, live: Sender<Live>, floor: Lsn, cursor: Option<Position>) {
        let drain = Drain {
            parts: self.clone(),
            id,
            place,
            live,
            floor,
            cursor,
            feed: Feed::new(place.oid, self.epoch, self.versions.history()),
            relation: None,
        };
        let mut running = self.running();
        // Those that have ended are let go, so that the map holds little but what runs.
        if running.len() == running.capacity() {
            running.retain(|_, drain| !drain.is_finished());
        }
        running.insert(place, tokio::spawn(drain.run()));
    }

    /// Ends a table's drain; on return it sends nothing more.
    pub async fn stop(&self, place: Place) {
        let drain = self.running().remove(&place);
        if let Some(drain) = drain {
            drain.abort();
            // It was aborted, or had ended: both are what is wanted.
            let _ = drain.await;
        }
    }

    /// Ends all drains; on return they send nothing more.
    pub async fn stop_all(&self) {
        let running = std::mem::take(&mut *self.running());
        for drain in running.values() {
            drain.abort();
        }
        for drain in running.into_values() {
            let _ = drain.await;
        }
    }

    /// Waits until the destination's frames may be read. Not to be held while anything but
    /// the destination is waited for.
    async fn turn(&self, destination: usize) -> Option<OwnedSemaphorePermit> {
        let turns = {
            let mut turns = self.turns.lock().unwrap_or_else(PoisonError::into_inner);
            turns.entry(destination).or_insert_with(|| Arc::new(Semaphore::new(AT_ONCE))).clone()
        };
        // It is never closed.
        turns.acquire_owned().await.ok()
    }

    fn running(&self) -> MutexGuard<'_, HashMap<Place, JoinHandle<()>>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct Drain {
    parts: Drainer,
    id: u64,
    place: Place,
    live: Sender<Live>,
    floor: Lsn,
    cursor: Option<Position>,
    feed: Feed,
    relation: Option<Arc<Relation>>,
}

/// The destination has ended.
struct Gone;

impl Drain {
    async fn run(mut self) {
        let mut backoff = Backoff::transient();
        loop {
            match self.drain().await {
                Ok(()) => return,
                Err(error) if error.is_transient() => {
                    tracing::warn!(oid = self.place.oid, code = error.code(), %error, "draining the spool failed; trying again");
                    tokio::time::sleep(backoff.pause(None)).await;
                    self.feed = Feed::new(self.place.oid, self.parts.epoch, self.parts.versions.history());
                }
                Err(error) => {
                    // If the destination has ended there is nobody left to tell.
                    let _ = self.live.send_now(Live::Failed { oid: self.place.oid, error: (&error).into() });
                    return;
                }
            }
        }
    }

    /// Until the table follows the stream, or nobody wants it any more.
    async fn drain(&mut self) -> Result<()> {
        let mut reader = Some(self.parts.spool.reader(self.place.oid, self.after()));
        crate::failpoint::reached("drain.begun");
        loop {
            let turn = self.parts.turn(self.place.destination).await;
            let (frames, reached) = read(&mut reader).await?;
            if let Some(bytes) = reader.as_ref().and_then(SpoolReader::large) {
                match self.take_large(&mut reader, bytes).await? {
                    Ok(()) => continue,
                    Err(Gone) => return Ok(()),
                }
            }
            if frames.is_empty() {
                drop(turn);
                match self.ask(reached).await {
                    DrainAnswer::More => continue,
                    DrainAnswer::Live | DrainAnswer::Gone => return Ok(()),
                }
            }
            crate::failpoint::reached("drain.read");
            for frame in &frames {
                self.take(frame).await?;
            }
            drop(frames);
            if self.send(None).await.is_err() {
                return Ok(());
            }
            crate::failpoint::reached("drain.sent");
        }
    }

    /// A row that is large: room for it first, so that it waits for nobody once it is read.
    async fn take_large(&mut self, reader: &mut Option<SpoolReader>, bytes: usize) -> Result<Result<(), Gone>> {
        let Ok(taken) = self.live.room(bytes).await else { return Ok(Err(Gone)) };
        let making = self.parts.memory.making().await;
        if let Some(reader) = reader {
            reader.make_room();
        }
        let (frames, _) = read(reader).await?;
        for frame in &frames {
            self.take(frame).await?;
        }
        drop((frames, making));
        Ok(self.send(Some(taken)).await)
    }

    /// Frames at or below this are not wanted.
    fn after(&self) -> Option<(Lsn, u64)> {
        let cursor = self.cursor.map(|cursor| (cursor.commit, cursor.ordinal));
        before(self.floor).max(cursor)
    }

    async fn take(&mut self, frame: &Frame) -> Result<()> {
        let head = frame.head;
        let transaction = Transaction { commit: head.commit, committed_at: head.committed_at, xid: head.xid };
        match frame.kind {
            FrameKind::Relation => {
                if let Message::Relation(relation) = pgoutput::decode(&frame.body)? {
                    let relation = Arc::new(relation);
                    self.relation = Some(relation.clone());
                    self.feed.relation(relation);
                }
                Ok(())
            }
            FrameKind::Schema => {
                self.feed.schema(transaction, head.row);
                Ok(())
            }
            FrameKind::Change => self.change(transaction, frame, &pgoutput::decode(&frame.body)?).await,
        }
    }

    /// Decodes a change. A relation that nobody knows is looked up in the catalog, once:
    /// the whole transaction is at hand here.
    async fn change(&mut self, transaction: Transaction, frame: &Frame, message: &Message) -> Result<()> {
        let head = frame.head;
        for asked in [false, true] {
            match self.feed.change(transaction, head.row, head.ordinal, message) {
                Ok(()) => return Ok(()),
                Err(Undecoded::Failed(error)) => return Err(error),
                Err(Undecoded::UnknownRelation) if !asked => {
                    let relation = self.relation.clone().ok_or_else(|| self.no_relation(head.commit))?;
                    self.parts.versions.resolve(&relation, transaction, head.row).await?;
                    self.feed.schema(transaction, head.row);
                }
                Err(Undecoded::UnknownRelation) => break,
            }
        }
        Err(self.no_relation(head.commit))
    }

    fn no_relation(&self, commit: Lsn) -> Error {
        Error::permanent(
            "schema.unknown-relation",
            format!("table {}: no version of its schema fits the rows of the transaction at {commit}", self.place.oid),
        )
    }

    /// `room`: what was taken for the batch.
    async fn send(&mut self, mut room: Option<Taken>) -> Result<(), Gone> {
        let fed: Vec<Fed> = self.feed.take().collect();
        for fed in fed {
            match fed {
                Fed::Batch(batch) => {
                    let last = batch.last();
                    let bytes = batch.bytes;
                    match room.take() {
                        Some(taken) => self.live.send_taken(Live::Batch(batch), taken).map_err(|_| Gone)?,
                        None => self.live.send(Live::Batch(batch), bytes).await.map_err(|_| Gone)?,
                    }
                    self.cursor = self.cursor.max(Some(last));
                }
                Fed::Truncate { schema, truncation } => {
                    self.live.send(Live::Truncate { schema, truncation }, 0).await.map_err(|_| Gone)?;
                    self.cursor = self.cursor.max(Some(truncation.at.position));
                }
                Fed::Schema(schema) => self.live.send(Live::Schema(schema), 0).await.map_err(|_| Gone)?,
            }
        }
        Ok(())
    }

    async fn ask(&self, reached: Option<(Lsn, u64)>) -> DrainAnswer {
        let (answer, answered) = oneshot::channel();
        let command = Command::DrainEnd { drain: self.id, place: self.place, floor: self.floor, reached, answer };
        match self.parts.commands.send(command) {
            Ok(()) => answered.await.unwrap_or(DrainAnswer::Gone),
            Err(_) => DrainAnswer::Gone,
        }
    }
}

/// The place in the spool behind every commit below `at`; none if there cannot be one.
pub(super) fn before(at: Lsn) -> Option<(Lsn, u64)> {
    Some((Lsn(at.0.checked_sub(1)?), u64::MAX))
}

/// Reads off the runtime's threads: the spool is files. Returns also how far it got.
pub(super) async fn read(reader: &mut Option<SpoolReader>) -> Result<(Vec<Frame>, Option<(Lsn, u64)>)> {
    let cut_short = || Error::transient("spool.read", "reading the spool was cut short");
    let mut taken = reader.take().ok_or_else(cut_short)?;
    let (taken, frames) = tokio::task::spawn_blocking(move || {
        let frames = taken.read(READ_BYTES);
        (taken, frames)
    })
    .await
    .map_err(|_| cut_short())?;
    let reached = taken.position();
    *reader = Some(taken);
    Ok((frames?, reached))
}
