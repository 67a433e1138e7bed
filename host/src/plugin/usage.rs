//! What the plugin of a destination used since the process started: for `status`, and for
//! whoever measures.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::sync::Semaphore;

/// Counts for all instances of one destination's plugin, one after the other and side by
/// side.
#[derive(Debug, Default)]
pub struct Usage {
    functions: Mutex<BTreeMap<&'static str, FunctionUsage>>,
    lanes: Mutex<BTreeSet<u32>>,
    instances: AtomicU64,
    rows: AtomicU64,
    bytes: AtomicU64,
    traps: AtomicU64,
    timeouts: AtomicU64,
    broken: AtomicU64,
    failures: AtomicU64,
    refused: AtomicU64,
    lines_left_out: AtomicU64,
    compiled: AtomicU64,
    cached: AtomicU64,
    memory_peak: AtomicUsize,
    /// Shared by an instance and its successors: a look-up outlives who asked for it.
    lookups: OnceLock<Arc<Semaphore>>,
}

/// [`Usage`] at one moment.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PluginUsage {
    /// Calls of all functions.
    pub calls: u64,
    /// Time in them.
    pub seconds: f64,
    /// Rows in the groups it was given, those included that were given again.
    pub rows: u64,
    /// Bytes of these groups.
    pub bytes: u64,
    /// The most linear memory that an instance had.
    pub memory_peak_bytes: u64,
    /// Calls that trapped.
    pub traps: u64,
    /// Calls that took too long.
    pub timeouts: u64,
    /// Answers that the contract rules out.
    pub broken_answers: u64,
    /// Calls that it answered with a failure.
    pub failures: u64,
    /// Instances that took the place of an earlier one.
    pub restarts: u64,
    /// What it tried and was not permitted.
    pub refused_permissions: u64,
    /// Lines of its log that were above the rate.
    pub log_lines_left_out: u64,
    /// How often its component was compiled.
    pub compiled: u64,
    /// How often its code came from the cache.
    pub cache_hits: u64,
    /// Calls and time by function, as the contract spells it.
    pub functions: BTreeMap<String, FunctionUsage>,
}

/// Calls of one function.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct FunctionUsage {
    /// How many.
    pub calls: u64,
    /// Time in them.
    pub seconds: f64,
}

/// How a call ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    Answered,
    Failed,
    Trapped,
    TimedOut,
    Broke,
}

impl Usage {
    /// All counts as they are now.
    pub fn snapshot(&self) -> PluginUsage {
        let functions = self.functions.lock().unwrap_or_else(PoisonError::into_inner);
        let lanes = self.lanes.lock().unwrap_or_else(PoisonError::into_inner).len() as u64;
        let of = |count: &AtomicU64| count.load(Ordering::Relaxed);
        PluginUsage {
            calls: functions.values().map(|function| function.calls).sum(),
            seconds: functions.values().map(|function| function.seconds).sum(),
            rows: of(&self.rows),
            bytes: of(&self.bytes),
            memory_peak_bytes: self.memory_peak.load(Ordering::Relaxed) as u64,
            traps: of(&self.traps),
            timeouts: of(&self.timeouts),
            broken_answers: of(&self.broken),
            failures: of(&self.failures),
            restarts: of(&self.instances).saturating_sub(lanes),
            refused_permissions: of(&self.refused),
            log_lines_left_out: of(&self.lines_left_out),
            compiled: of(&self.compiled),
            cache_hits: of(&self.cached),
            functions: functions.iter().map(|(name, function)| ((*name).to_owned(), *function)).collect(),
        }
    }

    /// The plugin was loaded: compiled, or taken from the cache.
    pub fn loaded(&self, compiled: bool) {
        let count = if compiled { &self.compiled } else { &self.cached };
        count.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn lookups(&self, most: usize) -> Arc<Semaphore> {
        Arc::clone(self.lookups.get_or_init(|| Arc::new(Semaphore::new(most.clamp(1, Semaphore::MAX_PERMITS)))))
    }

    pub(super) fn started(&self, lane: u32) {
        self.lanes.lock().unwrap_or_else(PoisonError::into_inner).insert(lane);
        self.instances.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn called(&self, function: &'static str, took: Duration) {
        let mut functions = self.functions.lock().unwrap_or_else(PoisonError::into_inner);
        let entry = functions.entry(function).or_default();
        entry.calls += 1;
        entry.seconds += took.as_secs_f64();
    }

    pub(super) fn ended(&self, ending: Ending) {
        let count = match ending {
            Ending::Answered => return,
            Ending::Failed => &self.failures,
            Ending::Trapped => &self.traps,
            Ending::TimedOut => &self.timeouts,
            Ending::Broke => &self.broken,
        };
        count.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn given(&self, rows: u64, bytes: u64) {
        self.rows.fetch_add(rows, Ordering::Relaxed);
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(super) fn memory(&self, peak: usize) {
        self.memory_peak.fetch_max(peak, Ordering::Relaxed);
    }

    pub(super) fn refused(&self) {
        self.refused.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn line_left_out(&self) {
        self.lines_left_out.fetch_add(1, Ordering::Relaxed);
    }
}

/// The usage of each destination's plugin, by the destination's name.
#[derive(Clone, Debug, Default)]
pub struct UsageBoard(Arc<Mutex<BTreeMap<String, Arc<Usage>>>>);

impl UsageBoard {
    /// The counts of a destination, from nothing if there are none yet.
    pub fn of(&self, destination: &str) -> Arc<Usage> {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(known.entry(destination.to_owned()).or_default())
    }

    /// What is known of a destination's plugin.
    pub fn get(&self, destination: &str) -> Option<PluginUsage> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).get(destination).map(|usage| usage.snapshot())
    }
}
