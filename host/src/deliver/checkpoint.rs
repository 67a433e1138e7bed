//! Durable, then checkpoint on disk, then confirmed to the source: in this order (P6).

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::{Notify, watch};

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
}

impl Confirmed {
    /// Starts from the stored checkpoints, one a destination.
    pub fn new(checkpoints: Vec<Lsn>) -> Confirmed {
        let smallest = checkpoints.iter().min().copied().unwrap_or_default();
        Confirmed(Arc::new(ConfirmedInner {
            checkpoints: Mutex::new(checkpoints),
            smallest: watch::Sender::new(smallest),
        }))
    }

    /// The smallest checkpoint, now and as it moves.
    pub fn watch(&self) -> watch::Receiver<Lsn> {
        self.0.smallest.subscribe()
    }

    /// The smallest checkpoint.
    pub fn smallest(&self) -> Lsn {
        *self.0.smallest.borrow()
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

impl Pending {
    fn is_empty(&self) -> bool {
        self.checkpoint.is_none() && self.positions.is_empty()
    }
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

impl CheckpointTask {
    /// Runs until the checkpointer is closed. `stored` tells, after each checkpoint,
    /// how far each table got.
    pub async fn run(mut self, stored: impl Fn(&Progress)) {
        loop {
            let closing = {
                let pending = self.checkpointer.lock();
                if !self.is_due(&pending) && !pending.closing { None } else { Some(pending.closing) }
            };
            let Some(closing) = closing else {
                let idle = tokio::time::sleep(IDLE_EVERY);
                tokio::select! { () = self.checkpointer.wake.notified() => {} () = idle => {} }
                continue;
            };
            let progress = self.take();
            if progress.checkpoint.is_some() || !progress.positions.is_empty() {
                self.store_with_retry(&progress).await;
                stored(&progress);
            } else if closing {
                return;
            }
        }
    }

    fn is_due(&self, pending: &Pending) -> bool {
        let Some(checkpoint) = pending.checkpoint else { return pending.rows };
        pending.rows
            || checkpoint.0.saturating_sub(self.stored.0) >= IDLE_BYTES
            || (!pending.is_empty() && self.stored_at.elapsed() >= IDLE_EVERY)
    }

    fn take(&mut self) -> Progress {
        let mut pending = self.checkpointer.lock();
        pending.rows = false;
        Progress {
            destination: self.destination.clone(),
            checkpoint: pending.checkpoint.take(),
            positions: pending.positions.drain().collect(),
        }
    }

    /// A store that cannot write holds the checkpoint, never the process: the source
    /// keeps its log meanwhile.
    async fn store_with_retry(&mut self, progress: &Progress) {
        let mut backoff = Backoff::transient();
        while let Err(error) = self.store(progress).await {
            tracing::error!(destination = %self.destination, code = error.code(), %error, "the checkpoint could not be stored; trying again");
            tokio::time::sleep(backoff.pause(None)).await;
        }
        self.stored_at = Instant::now();
        if let Some(checkpoint) = progress.checkpoint {
            self.stored = checkpoint;
            self.parts.confirmed.moved(self.index, checkpoint);
        }
    }

    async fn store(&self, progress: &Progress) -> Result<()> {
        if progress.checkpoint.is_some() {
            let spool = self.parts.spool.clone();
            tokio::task::spawn_blocking(move || spool.sync()).await.map_err(|error| {
                crate::error::Error::transient("spool.sync", format!("the spool's sync was cut short: {error}"))
            })??;
        }
        self.parts.store.save_progress(progress.clone()).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
