//! Catching up: a table's changes from the spool, until its cursor meets the stream.

use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;

use crate::copy::spool::{Frame, FrameKind, Spool, SpoolReader};
use crate::error::{Error, Result};
use crate::position::{Lsn, Position};
use crate::source::pgoutput::{self, Message, Relation};

use super::destination::Live;
use super::feed::{Fed, Feed, Transaction, Undecoded};
use super::inbox::Sender;
use super::retry::Backoff;
use super::router::{Command, DrainAnswer};
use super::versions::Versions;

/// Bytes of frames read at once.
const READ_BYTES: usize = 1 << 20;

/// Starts drains, and ends them.
#[derive(Clone)]
pub(super) struct Drainer {
    epoch: u32,
    spool: Spool,
    versions: Versions,
    commands: mpsc::UnboundedSender<Command>,
    running: Arc<Mutex<JoinSet<()>>>,
}

impl Drainer {
    pub fn new(epoch: u32, spool: Spool, versions: Versions, commands: mpsc::UnboundedSender<Command>) -> Drainer {
        Drainer { epoch, spool, versions, commands, running: Arc::default() }
    }

    /// Serves a destination's table from the spool: frames with a commit below `floor`
    /// are in its copy, those at or below `cursor` were sent.
    pub fn start(&self, destination: usize, live: Sender<Live>, oid: u32, floor: Lsn, cursor: Option<Position>) {
        let drain = Drain {
            parts: self.clone(),
            destination,
            live,
            oid,
            floor,
            cursor,
            feed: Feed::new(oid, self.epoch, self.versions.history()),
            relation: None,
        };
        let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        // Those that have ended are let go, so that the set holds only what runs.
        while running.try_join_next().is_some() {}
        running.spawn(drain.run());
    }

    /// Ends all drains, so that the destinations' queues can end.
    pub fn stop(&self) {
        self.running.lock().unwrap_or_else(PoisonError::into_inner).abort_all();
    }
}

struct Drain {
    parts: Drainer,
    destination: usize,
    live: Sender<Live>,
    oid: u32,
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
                    tracing::warn!(oid = self.oid, code = error.code(), %error, "draining the spool failed; trying again");
                    tokio::time::sleep(backoff.pause(None)).await;
                    self.feed = Feed::new(self.oid, self.parts.epoch, self.parts.versions.history());
                }
                Err(error) => {
                    // If the destination has ended there is nobody left to tell.
                    let _ = self.live.send_now(Live::Failed { oid: self.oid, error: (&error).into() });
                    return;
                }
            }
        }
    }

    /// Until the table follows the stream, or nobody wants it any more.
    async fn drain(&mut self) -> Result<()> {
        let mut reader = Some(self.parts.spool.reader(self.oid, self.after()));
        loop {
            let (frames, reached) = read(&mut reader).await?;
            if frames.is_empty() {
                match self.ask(reached).await {
                    DrainAnswer::More => continue,
                    DrainAnswer::Live | DrainAnswer::Gone => return Ok(()),
                }
            }
            for frame in &frames {
                self.take(frame).await?;
            }
            if self.send().await.is_err() {
                return Ok(());
            }
        }
    }

    /// Frames at or below this are not wanted.
    fn after(&self) -> Option<(Lsn, u64)> {
        let below_floor = (self.floor > Lsn::ZERO).then(|| (Lsn(self.floor.0 - 1), u64::MAX));
        let cursor = self.cursor.map(|cursor| (cursor.commit, cursor.ordinal));
        below_floor.max(cursor)
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
            FrameKind::Change => self.change(transaction, frame).await,
        }
    }

    /// Decodes a change. A relation that nobody knows is looked up in the catalog, once:
    /// the whole transaction is at hand here.
    async fn change(&mut self, transaction: Transaction, frame: &Frame) -> Result<()> {
        let head = frame.head;
        for asked in [false, true] {
            match self.feed.raw_change(transaction, head.row, head.ordinal, &frame.body) {
                Ok(()) => return Ok(()),
                Err(Undecoded::Failed(error)) => return Err(error),
                Err(Undecoded::UnknownRelation) if !asked => {
                    let relation = self.relation.clone().ok_or_else(|| self.no_relation(head.commit))?;
                    self.parts.versions.resolve(&relation, head.commit, head.row).await?;
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
            format!("table {}: no version of its schema fits the rows of the transaction at {commit}", self.oid),
        )
    }

    async fn send(&mut self) -> Result<(), Gone> {
        let fed: Vec<Fed> = self.feed.take().collect();
        for fed in fed {
            match fed {
                Fed::Batch(batch) => {
                    let last = batch.last();
                    let bytes = batch.bytes;
                    self.live.send(Live::Batch(batch), bytes).await.map_err(|_| Gone)?;
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
        let command =
            Command::DrainEnd { destination: self.destination, oid: self.oid, floor: self.floor, reached, answer };
        match self.parts.commands.send(command) {
            Ok(()) => answered.await.unwrap_or(DrainAnswer::Gone),
            Err(_) => DrainAnswer::Gone,
        }
    }
}

/// Reads off the runtime's threads: the spool is files. Returns also how far it got.
async fn read(reader: &mut Option<SpoolReader>) -> Result<(Vec<Frame>, Option<(Lsn, u64)>)> {
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
