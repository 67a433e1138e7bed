//! How far the source is ahead, in bytes and in seconds.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use crate::memory::Budget;
use crate::position::Lsn;
use crate::schema::table::TableName;
use crate::status::{MemoryStatus, SpoolStatus, StatusBoard};
use crate::store::TableState;

use super::checkpoint::Confirmed;

/// Commits remembered: more are thinned out, so that the memory stays the same however
/// long a destination is away.
const COMMITS: usize = 4096;

/// Watches the stream and keeps `status` up to date.
#[derive(Clone)]
pub(super) struct LagMeter {
    /// Asked for every message, so without a lock.
    source: Arc<AtomicU64>,
    /// End and time (microseconds since 1970) of commits that are not confirmed.
    commits: Arc<Mutex<VecDeque<(Lsn, i64)>>>,
    board: StatusBoard,
    confirmed: Confirmed,
}

impl LagMeter {
    pub fn new(board: StatusBoard, confirmed: Confirmed) -> LagMeter {
        LagMeter { source: Arc::default(), commits: Arc::default(), board, confirmed }
    }

    /// The source's log reaches to here at least.
    pub fn source_is_at(&self, lsn: Lsn) {
        self.source.fetch_max(lsn.0, Ordering::Relaxed);
    }

    /// A transaction was taken whole.
    pub fn committed(&self, end: Lsn, committed_at: i64) {
        let mut commits = self.commits.lock().unwrap_or_else(PoisonError::into_inner);
        if commits.len() == COMMITS {
            let mut keep = false;
            commits.retain(|_| {
                keep = !keep;
                keep
            });
        }
        commits.push_back((end, committed_at));
    }

    /// Tells `status` that a table is served from the spool, before the destination, which
    /// may be away, says so itself.
    pub fn catching_up(&self, destination: &str, table: &TableName) {
        self.board.update_table(destination, table, |status| status.state = TableState::CatchUp);
    }

    /// Tells `status` of the spool.
    pub fn spool(&self, spool: SpoolStatus) {
        self.board.update(|report| report.spool = Some(spool));
    }

    /// Tells `status` of the memory.
    pub fn memory(&self, memory: &Budget) {
        let memory = MemoryStatus { used_bytes: memory.used() as u64, limit_bytes: memory.total() as u64 };
        self.board.update(|report| report.memory = Some(memory));
    }

    /// Tells `status`.
    pub fn report(&self) {
        let confirmed = self.confirmed.smallest();
        let source = self.source.load(Ordering::Relaxed);
        let mut commits = self.commits.lock().unwrap_or_else(PoisonError::into_inner);
        while commits.front().is_some_and(|(end, _)| *end <= confirmed) {
            commits.pop_front();
        }
        self.board.update(|report| {
            report.slot.confirmed = Some(confirmed);
            report.slot.lag_bytes = Some(source.saturating_sub(confirmed.0));
            report.slot.lag_seconds = Some(seconds_behind(&commits, confirmed));
            for destination in &mut report.destinations {
                let checkpoint = destination.checkpoint.unwrap_or(confirmed);
                destination.lag_bytes = Some(source.saturating_sub(checkpoint.0));
                destination.lag_seconds = Some(seconds_behind(&commits, checkpoint));
            }
        });
    }
}

fn seconds_behind(commits: &VecDeque<(Lsn, i64)>, checkpoint: Lsn) -> f64 {
    let oldest = commits.iter().find(|(end, _)| *end > checkpoint);
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_micros() as i64);
    oldest.map_or(0.0, |(_, committed_at)| ((now - committed_at).max(0) as f64) / 1e6)
}
