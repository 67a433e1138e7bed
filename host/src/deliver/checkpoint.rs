//! Durable, then checkpoint on disk, then confirmed to the source: in this order (P6).

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::{Notify, RwLock, watch};

use crate::copy::spool::Spool;
use crate::error::Result;
use crate::position::{Lsn, Position};
use crate::store::{Progress, Store};

use super::retry::Backoff;

/// The checkpoints of all destinations; the smallest is what the source may forget.
#[derive(Clone)]
pub(super) struct Confirmed(Arc<ConfirmedInner>);

struct ConfirmedInner {
    checkpoints: Mutex<Vec<Lsn>>,
    smallest: watch::Sender<Lsn>,
    /// While the stream is read again for the spool: no checkpoint is stored beyond how
    /// far that got.
    limit: AtomicU64,
    /// Held by everybody who stores a checkpoint.
    storing: RwLock<()>,
}

impl Confirmed {
    /// Starts from the stored checkpoints, one a destination.
    pub fn new(checkpoints: Vec<Lsn>) -> Confirmed {
        let smallest = checkpoints.iter().min().copied().unwrap_or_default();
        Confirmed(Arc::new(ConfirmedInner {
            checkpoints: Mutex::new(checkpoints),
            smallest: watch::Sender::new(smallest),
            limit: AtomicU64::new(u64::MAX),
            storing: RwLock::new(()),
        }))
    }

    /// The stream will be read again from the smallest checkpoint, which is returned, and
    /// what the spool has beyond it will not count meanwhile: no checkpoint may rely on
    /// that before it was read again.
    pub async fn freeze(&self) -> Lsn {
        // One that is being stored is waited for.
        let _storing = self.0.storing.write().await;
        let smallest = self.smallest();
        self.0.limit.store(smallest.0, Ordering::SeqCst);
        smallest
    }

    /// So far was read again; none: all of it.
    pub fn thaw(&self, at: Option<Lsn>) {
        self.0.limit.store(at.map_or(u64::MAX, |at| at.0), Ordering::SeqCst);
    }

    fn limit(&self) -> Lsn {
        Lsn(self.0.limit.load(Ordering::SeqCst))
    }

    /// The smallest checkpoint, now and as it moves.
    pub fn watch(&self) -> watch::Receiver<Lsn> {
        self.0.smallest.subscribe()
    }

    /// The smallest checkpoint.
    pub fn smallest(&self) -> Lsn {
        *self.0.smallest.borrow()
    }

    /// One destination's checkpoint.
    pub fn of(&self, destination: usize) -> Lsn {
        let checkpoints = self.0.checkpoints.lock().unwrap_or_else(PoisonError::into_inner);
        checkpoints.get(destination).copied().unwrap_or_default()
    }

    /// Another destination, whose number is the next one. Nobody may confirm beyond its
    /// checkpoint from here on.
    pub fn add(&self, checkpoint: Lsn) {
        self.0.checkpoints.lock().unwrap_or_else(PoisonError::into_inner).push(checkpoint);
    }

    /// There is nothing before `to` that anybody takes, and that is stored.
    pub fn raise(&self, to: Lsn) {
        let count = self.0.checkpoints.lock().unwrap_or_else(PoisonError::into_inner).len();
        (0..count).for_each(|destination| self.moved(destination, to));
    }

    fn moved(&self, destination: usize, checkpoint: Lsn) {
        let mut checkpoints = self.0.checkpoints.lock().unwrap_or_else(PoisonError::into_inner);
        checkpoints[destination] = checkpoints[destination].max(checkpoint);
        let smallest = checkpoints.iter().min().copied().unwrap_or_default();
        self.0.smallest.send_if_modified(|known| {
            let moved = smallest > *known;
            *known = smallest.max(*known);
            moved
        });
    }
}

#[derive(Default)]
struct Pending {
    checkpoint: Option<Lsn>,
    /// Whether anything but idle progress is in here.
    rows: bool,
    positions: HashMap<u32, Position>,
    closing: bool,
}

/// Where a destination leaves what became durable.
#[derive(Clone)]
pub(super) struct Checkpointer {
    pending: Arc<Mutex<Pending>>,
    wake: Arc<Notify>,
}

impl Checkpointer {
    /// A checkpointer, and the work behind it.
    pub fn new(destination: String, index: usize, shared: CheckpointParts) -> (Checkpointer, CheckpointTask) {
        let checkpointer = Checkpointer { pending: Arc::default(), wake: Arc::default() };
        let task = CheckpointTask {
            destination,
            index,
            parts: shared,
            checkpointer: checkpointer.clone(),
            stored: Lsn::ZERO,
            stored_at: Instant::now(),
        };
        (checkpointer, task)
    }

    /// Positions that are durable at the destination, and how far its log is complete.
    pub fn durable(&self, positions: &[(u32, Position)], checkpoint: Option<Lsn>) {
        let mut pending = self.lock();
        for (oid, position) in positions {
            let known = pending.positions.entry(*oid).or_insert(*position);
            *known = (*known).max(*position);
        }
        pending.rows |= !positions.is_empty();
        pending.checkpoint = pending.checkpoint.max(checkpoint);
        drop(pending);
        self.wake.notify_one();
    }

    /// Everything before `at` that is not durable is in the spool, which is synced before
    /// that is stored (P9).
    pub fn spooled(&self, at: Lsn) {
        let mut pending = self.lock();
        pending.checkpoint = pending.checkpoint.max(Some(at));
        drop(pending);
        self.wake.notify_one();
    }

    /// A table was given up on: nothing of it is stored any more.
    pub fn forget(&self, oid: u32) {
        self.lock().positions.remove(&oid);
    }

    /// Nothing more will come: what is there is stored, then the task ends.
    pub fn close(&self) {
        self.lock().closing = true;
        self.wake.notify_one();
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Pending> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What a checkpoint touches.
#[derive(Clone)]
pub(super) struct CheckpointParts {
    /// Where it is stored.
    pub store: Store,
    /// Synced before it: a checkpoint passes what is spooled.
    pub spool: Spool,
    /// Told after it.
    pub confirmed: Confirmed,
}

/// Stores checkpoints, as many as are waiting at once.
pub(super) struct CheckpointTask {
    destination: String,
    index: usize,
    parts: CheckpointParts,
    checkpointer: Checkpointer,
    stored: Lsn,
    stored_at: Instant,
}

/// Idle moves are stored at most this often, or every so many bytes (P9).
const IDLE_EVERY: Duration = Duration::from_secs(10);
const IDLE_BYTES: u64 = 16 << 20;
/// How often a checkpoint beyond the limit is looked at again.
const LIMITED_EVERY: Duration = Duration::from_secs(1);

/// What a checkpoint task has to do.
enum Taken {
    Progress(Progress),
    Later(Duration),
    Closed,
}

impl CheckpointTask {
    /// Runs until the checkpointer is closed. `stored` tells, after each checkpoint,
    /// how far each table got.
    pub async fn run(mut self, stored: impl Fn(&Progress)) {
        loop {
            let confirmed = self.parts.confirmed.clone();
            let storing = confirmed.0.storing.read().await;
            let taken = self.take();
            match taken {
                Taken::Progress(progress) => {
                    self.store_with_retry(&progress).await;
                    stored(&progress);
                }
                Taken::Later(wait) => {
                    drop(storing);
                    let wait = tokio::time::sleep(wait);
                    tokio::select! { () = self.checkpointer.wake.notified() => {} () = wait => {} }
                }
                Taken::Closed => return,
            }
        }
    }

    /// What is due, or how long to wait for it.
    fn take(&mut self) -> Taken {
        let limit = self.parts.confirmed.limit();
        let mut pending = self.checkpointer.lock();
        let checkpoint = pending.checkpoint.map(|checkpoint| checkpoint.min(limit)).filter(|at| *at > self.stored);
        let due = match checkpoint {
            None => !pending.positions.is_empty(),
            Some(checkpoint) => {
                pending.rows
                    || pending.closing
                    || checkpoint.0.saturating_sub(self.stored.0) >= IDLE_BYTES
                    || self.stored_at.elapsed() >= IDLE_EVERY
            }
        };
        if !due {
            return match (pending.closing, limit == Lsn(u64::MAX)) {
                (true, _) => Taken::Closed,
                (false, true) => Taken::Later(IDLE_EVERY),
                (false, false) => Taken::Later(LIMITED_EVERY),
            };
        }
        pending.rows = false;
        // What lies beyond the limit stays for later.
        pending.checkpoint = pending.checkpoint.filter(|at| *at > limit);
        let positions = pending.positions.drain().collect();
        Taken::Progress(Progress { destination: self.destination.clone(), checkpoint, positions })
    }

    /// A store that cannot write holds the checkpoint, never the process: the source
    /// keeps its log meanwhile.
    async fn store_with_retry(&mut self, progress: &Progress) {
        let mut backoff = Backoff::transient();
        while let Err(error) = self.store(progress).await {
            tracing::error!(destination = %self.destination, code = error.code(), %error, "the checkpoint could not be stored; trying again");
            tokio::time::sleep(backoff.pause(None)).await;
        }
        crate::failpoint::reached("checkpoint.stored");
        self.stored_at = Instant::now();
        if let Some(checkpoint) = progress.checkpoint {
            self.stored = checkpoint;
            self.parts.confirmed.moved(self.index, checkpoint);
            crate::failpoint::reached("checkpoint.confirmed");
        }
    }

    async fn store(&self, progress: &Progress) -> Result<()> {
        if progress.checkpoint.is_some() {
            let spool = self.parts.spool.clone();
            tokio::task::spawn_blocking(move || spool.sync()).await.map_err(|error| {
                crate::error::Error::transient("spool.sync", format!("the spool's sync was cut short: {error}"))
            })??;
        }
        crate::failpoint::reached("checkpoint.spooled");
        self.parts.store.save_progress(progress.clone()).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn while_the_stream_is_read_again_no_checkpoint_passes_what_was_read() {
        let directory = tempfile::tempdir().unwrap();
        let store = Store::open(directory.path(), "shop").unwrap();
        let record = |name: &str, checkpoint| crate::store::DestinationRecord {
            name: name.to_owned(),
            plugin: "count".to_owned(),
            checkpoint: Lsn(checkpoint),
        };
        for record in [record("slow", 100), record("other", 200)] {
            store.save_destination(record).await.unwrap();
        }
        let spool = Spool::open(&directory.path().join("spool"), Default::default()).unwrap();
        let confirmed = Confirmed::new(vec![Lsn(100), Lsn(200)]);
        let parts = CheckpointParts { store: store.clone(), spool, confirmed: confirmed.clone() };
        let (checkpointer, task) = Checkpointer::new("slow".to_owned(), 0, parts);
        let task = tokio::spawn(task.run(|_| {}));
        assert_eq!(confirmed.freeze().await, Lsn(100));
        checkpointer.durable(&[], Some(Lsn(300)));
        let stored = || store.load().unwrap().destinations.iter().find(|d| d.name == "slow").unwrap().checkpoint;
        confirmed.thaw(Some(Lsn(150)));
        checkpointer.durable(&[(7, Position { epoch: 0, commit: Lsn(290), ordinal: 1 })], None);
        let mut moved = confirmed.watch();
        moved.wait_for(|at| *at >= Lsn(150)).await.unwrap();
        assert_eq!((stored(), confirmed.smallest()), (Lsn(150), Lsn(150)));
        confirmed.thaw(None);
        checkpointer.close();
        task.await.unwrap();
        assert_eq!((stored(), confirmed.smallest()), (Lsn(300), Lsn(200)));
    }

    #[test]
    fn the_confirmed_position_is_the_smallest_checkpoint_and_never_goes_back() {
        let confirmed = Confirmed::new(vec![Lsn(10), Lsn(20)]);
        assert_eq!(confirmed.smallest(), Lsn(10));
        confirmed.moved(1, Lsn(50));
        assert_eq!(confirmed.smallest(), Lsn(10));
        confirmed.moved(0, Lsn(40));
        assert_eq!(confirmed.smallest(), Lsn(40));
        confirmed.moved(0, Lsn(5));
        assert_eq!(confirmed.smallest(), Lsn(40));
    }
}
