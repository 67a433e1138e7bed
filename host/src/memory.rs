//! One memory budget for the process: what pauses reading, and nothing else does.
//!
//! Whoever makes rows for a destination takes their bytes from that destination's share
//! and gives them back when the rows are durable there. A share is the destination's
//! own: one that does not keep up fills its share and no other. What a destination
//! needs to get on with what it holds is never taken from a share, so whoever waits for
//! one waits for something that ends by itself.
//!
//! What the plugins' instances have in linear memory counts too, but is never refused
//! here (an instance has its own limit): the shares become smaller by it.
//!
//! An item that is larger than a share passes alone. How large that can be is bounded by
//! [`Budget::row_bytes`]: a larger row is refused by name before it is read.

use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use tokio::sync::{Mutex as TurnMutex, Notify, OwnedMutexGuard};

use crate::error::{Error, Result};

const MIB: usize = 1 << 20;

/// The budget where the configuration says nothing and no cgroup less.
const DEFAULT_BYTES: u64 = 512 << 20;
/// What the process needs before it has read a row: code, catalogs, connections, state.
const BASE_BYTES: usize = 64 * MIB;
/// The least budget with one destination, and what each further one needs.
const LEAST_BYTES: u64 = 64 << 20;
const LEAST_MORE_BYTES: u64 = 16 << 20;
/// More in a destination's queue does not make it faster.
const MOST_LIVE_BYTES: usize = 64 * MIB;
const MOST_COPY_BYTES: usize = 64 * MIB;
/// No item is lighter: a queue's entry and the allocations behind it cost something too.
const ITEM_BYTES: usize = 1024;
/// A row of more bytes is made and sent by itself.
pub const LARGE_ROW_BYTES: usize = MIB;
/// How often a row is in memory at a time for a destination: what is handed to the
/// instance, and what that makes of it. One that makes SQL was seen to have seven, with
/// what its allocator cannot use again.
pub const COPIES: usize = 8;
/// No message of the server is longer (`MaxAllocSize`), and offsets have 32 bits.
const MOST_ROW_BYTES: usize = 1 << 30;

/// The budget of the process. Clones share it.
#[derive(Clone)]
pub struct Budget(Arc<Inner>);

struct Inner {
    total: usize,
    destinations: AtomicUsize,
    /// Linear memory of all instances.
    guests: AtomicUsize,
    /// What was taken from all shares.
    taken: AtomicUsize,
    shares: Mutex<Vec<Weak<ShareInner>>>,
    making: Arc<TurnMutex<()>>,
}

impl Budget {
    /// A budget for so many destinations: as configured, else the smaller of 512 MiB and
    /// half of what the cgroup allows.
    ///
    /// # Errors
    /// `config.memory` (usage) if a cgroup allows less than the pipeline needs; what is
    /// configured was looked at with the configuration.
    pub fn new(configured: Option<u64>, destinations: usize) -> Result<Budget> {
        let limit = cgroup_limit();
        if let (Some(configured), Some(limit)) = (configured, limit)
            && configured > limit
        {
            tracing::warn!(
                code = "memory.above-cgroup",
                configured,
                limit,
                next = "Set `memory_bytes` of [pipeline] to about half of the limit, or raise the limit.",
                "the memory budget is above what the cgroup allows: the kernel would end the process before it is used up"
            );
        }
        let total = configured.unwrap_or_else(|| default_bytes(limit));
        if configured.is_none() {
            let half = format!("half of the cgroup's limit of {} bytes", limit.unwrap_or_default());
            check(&half, total, destinations)?;
        }
        Ok(Budget::of(usize::try_from(total).unwrap_or(usize::MAX), destinations))
    }

    fn of(total: usize, destinations: usize) -> Budget {
        Budget(Arc::new(Inner {
            total,
            destinations: AtomicUsize::new(destinations.max(1)),
            guests: AtomicUsize::new(0),
            taken: AtomicUsize::new(0),
            shares: Mutex::default(),
            making: Arc::default(),
        }))
    }

    /// Another destination: from here on the shares of all are smaller.
    ///
    /// # Errors
    /// `config.memory` if they would be too small; nothing has changed then.
    pub fn add_destination(&self) -> Result<()> {
        let destinations = self.0.destinations.load(Ordering::Relaxed) + 1;
        check("the memory budget", self.0.total as u64, destinations)?;
        self.0.destinations.store(destinations, Ordering::Relaxed);
        Ok(())
    }

    /// The share that changes of the stream and from the spool wait in for one
    /// destination.
    pub fn live(&self) -> Share {
        self.share(Part::Live)
    }

    /// The share that the rows of copies wait in for one destination.
    pub fn copy(&self) -> Share {
        self.share(Part::Copy)
    }

    fn share(&self, part: Part) -> Share {
        let share = Arc::new(ShareInner {
            budget: self.clone(),
            part,
            taken: AtomicUsize::new(0),
            turn: TurnMutex::default(),
            room: Notify::new(),
            wanted: Notify::new(),
            closed: AtomicBool::new(false),
        });
        let mut shares = self.shares();
        shares.retain(|share| share.strong_count() > 0);
        shares.push(Arc::downgrade(&share));
        Share(share)
    }

    /// A row of more bytes is refused: each destination may have [`COPIES`] of it.
    pub fn row_bytes(&self) -> usize {
        let rows = self.0.total.saturating_sub(BASE_BYTES).max(self.0.total / 4);
        (rows / (COPIES * self.destinations())).min(MOST_ROW_BYTES)
    }

    /// Large rows that are read from a table or from the spool are read one at a time, by
    /// whoever holds this. It must not be held while a destination is waited for.
    pub async fn making(&self) -> OwnedMutexGuard<()> {
        self.0.making.clone().lock_owned().await
    }

    /// Counts the linear memory of an instance.
    pub fn guest(&self) -> GuestMemory {
        GuestMemory { budget: self.clone(), bytes: 0 }
    }

    /// Bytes that are used of it: rows on their way, and the memory of the plugins.
    pub fn used(&self) -> usize {
        self.0.taken.load(Ordering::Relaxed) + self.0.guests.load(Ordering::Relaxed)
    }

    /// Bytes of the budget.
    pub fn total(&self) -> usize {
        self.0.total
    }

    fn destinations(&self) -> usize {
        self.0.destinations.load(Ordering::Relaxed)
    }

    /// What rows on their way may have. However much the instances have, a quarter stays.
    fn in_flight(&self) -> usize {
        let others = BASE_BYTES + self.0.guests.load(Ordering::Relaxed);
        self.0.total.saturating_sub(others).max(self.0.total / 4)
    }

    fn shares(&self) -> std::sync::MutexGuard<'_, Vec<Weak<ShareInner>>> {
        self.0.shares.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn least_bytes(destinations: usize) -> u64 {
    LEAST_BYTES + LEAST_MORE_BYTES * (destinations.max(1) as u64 - 1)
}

/// Whether a budget is enough for so many destinations. `whence`: what it is taken from.
///
/// # Errors
/// `config.memory` (usage).
pub fn check(whence: &str, bytes: u64, destinations: usize) -> Result<()> {
    let least = least_bytes(destinations);
    if bytes >= least {
        return Ok(());
    }
    let message = format!("{whence} is {bytes} bytes, less than the {least} that this many destinations need");
    Err(Error::usage("config.memory", message).next(format!(
        "Set `memory_bytes` of [pipeline] to {least} or more; the default is {DEFAULT_BYTES} (512 MiB), or half of the cgroup's limit."
    )))
}

/// Which rows a share is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    Live,
    Copy,
    #[cfg(test)]
    Fixed(usize),
}

/// A destination's share of the budget. Clones share it.
#[derive(Clone)]
pub struct Share(Arc<ShareInner>);

struct ShareInner {
    budget: Budget,
    part: Part,
    taken: AtomicUsize,
    /// Held by whoever waits for room: first come, first served.
    turn: TurnMutex<()>,
    room: Notify,
    /// Notified when somebody begins to wait.
    wanted: Notify,
    closed: AtomicBool,
}

impl Share {
    /// Bytes of it, now.
    pub fn bytes(&self) -> usize {
        let each = self.0.budget.in_flight() / self.0.budget.destinations();
        match self.0.part {
            Part::Live => (each / 2).min(MOST_LIVE_BYTES),
            Part::Copy => (each / 4).min(MOST_COPY_BYTES),
            #[cfg(test)]
            Part::Fixed(bytes) => bytes,
        }
    }

    /// A share of a budget of its own.
    #[cfg(test)]
    pub(crate) fn fixed(bytes: usize) -> Share {
        Budget::of(bytes, 1).share(Part::Fixed(bytes))
    }

    /// Waits for room, behind those who wait already; none once it is closed. What is
    /// larger than the share has it alone. Cancel safe.
    pub async fn take(&self, bytes: usize) -> Option<Taken> {
        let _turn = self.0.turn.lock().await;
        loop {
            let mut room = std::pin::pin!(self.0.room.notified());
            room.as_mut().enable();
            if self.0.closed.load(Ordering::Acquire) {
                return None;
            }
            if self.fits(bytes) {
                return Some(self.take_now(bytes));
            }
            self.0.wanted.notify_one();
            room.await;
        }
    }

    /// Takes whether there is room or not: of what must not wait.
    pub fn take_now(&self, bytes: usize) -> Taken {
        let bytes = bytes.max(ITEM_BYTES);
        self.0.taken.fetch_add(bytes, Ordering::AcqRel);
        self.0.budget.0.taken.fetch_add(bytes, Ordering::Relaxed);
        Taken { share: self.clone(), bytes }
    }

    /// The same if nobody has to be waited for: neither for room, nor for who waits for it.
    pub fn try_take(&self, bytes: usize) -> Option<Taken> {
        let _turn = self.0.turn.try_lock().ok()?;
        (!self.0.closed.load(Ordering::Acquire) && self.fits(bytes)).then(|| self.take_now(bytes))
    }

    fn fits(&self, bytes: usize) -> bool {
        let taken = self.0.taken.load(Ordering::Acquire);
        taken == 0 || taken + bytes.max(ITEM_BYTES) <= self.bytes()
    }

    /// Returns when somebody waits for room. Cancel safe.
    pub async fn wanted(&self) {
        while self.0.turn.try_lock().is_ok() {
            // It may be from somebody who has got it since.
            self.0.wanted.notified().await;
        }
    }

    /// Nobody gets anything of it any more.
    pub fn close(&self) {
        self.0.closed.store(true, Ordering::Release);
        self.0.room.notify_waiters();
    }
}

/// Bytes that were taken from a share, given back when dropped.
#[must_use]
pub struct Taken {
    share: Share,
    bytes: usize,
}

impl std::fmt::Debug for Taken {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} bytes", self.bytes)
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        let ShareInner { budget, taken, room, .. } = &*self.share.0;
        taken.fetch_sub(self.bytes, Ordering::AcqRel);
        budget.0.taken.fetch_sub(self.bytes, Ordering::Relaxed);
        room.notify_waiters();
    }
}

/// The linear memory of one instance, as far as it has grown; given back when dropped.
pub struct GuestMemory {
    budget: Budget,
    bytes: usize,
}

impl GuestMemory {
    /// It has so much now; it never gets less.
    pub fn grown_to(&mut self, bytes: usize) {
        self.budget.0.guests.fetch_add(bytes.saturating_sub(self.bytes), Ordering::Relaxed);
        self.bytes = self.bytes.max(bytes);
    }
}

impl Drop for GuestMemory {
    fn drop(&mut self) {
        self.budget.0.guests.fetch_sub(self.bytes, Ordering::Relaxed);
        for share in self.budget.shares().iter().filter_map(Weak::upgrade) {
            share.room.notify_waiters();
        }
    }
}

/// A row that is too large for the budget; `key` names it, if that is known.
pub fn too_large(table: &impl Display, key: Option<&str>, bytes: usize, limit: usize) -> Error {
    refused(table, key, bytes, &format!("the {limit} that the memory budget allows"))
        .next("Make the row smaller, or raise `memory_bytes` of [pipeline]; then run `tidegate resync DEST TABLE`.")
}

/// A row that is too large for an instance of the plugin that would take it.
pub fn too_large_for_plugin(table: &impl Display, key: Option<&str>, bytes: usize, limit: usize) -> Error {
    refused(table, key, bytes, &format!("the {limit} that an instance of the plugin has room for")).next(
        "Make the row smaller, or raise `memory_bytes` of [destination.limits]; then run `tidegate resync DEST TABLE`.",
    )
}

fn refused(table: &impl Display, key: Option<&str>, bytes: usize, limit: &str) -> Error {
    let key = key.map_or_else(String::new, |key| format!(" with the key {key}"));
    Error::permanent("row.too-large", format!("a row of table {table}{key} has {bytes} bytes, more than {limit}"))
}

fn default_bytes(limit: Option<u64>) -> u64 {
    limit.map_or(DEFAULT_BYTES, |limit| DEFAULT_BYTES.min(limit / 2))
}

/// The least limit on this process's memory that a cgroup of it has.
fn cgroup_limit() -> Option<u64> {
    let membership = std::fs::read_to_string("/proc/self/cgroup").ok()?;
    limit_of(&membership, Path::new("/sys/fs/cgroup"))
}

/// The same, from the text of `/proc/self/cgroup` and where the hierarchies are mounted.
///
/// A container may see the path of its cgroup from outside while it has only its own
/// mounted: then the directory is not there, but one above it has the container's limit.
fn limit_of(membership: &str, mounted: &Path) -> Option<u64> {
    let of_line = |line: &str| {
        let mut parts = line.splitn(3, ':').skip(1);
        let (controllers, path) = (parts.next()?, parts.next()?);
        let (root, file) = match controllers {
            "" => (mounted.to_owned(), "memory.max"),
            _ if controllers.split(',').any(|name| name == "memory") => {
                (mounted.join("memory"), "memory.limit_in_bytes")
            }
            _ => return None,
        };
        let inside = root.join(path.trim_start_matches('/'));
        let read = |directory: &Path| -> Option<u64> {
            std::fs::read_to_string(directory.join(file)).ok()?.trim().parse().ok()
        };
        // "max", and a directory that is not there, say nothing.
        let above: Vec<PathBuf> =
            inside.ancestors().take_while(|above| above.starts_with(&root)).map(Path::to_owned).collect();
        above.iter().filter_map(|directory| read(directory)).min()
    };
    membership.lines().filter_map(of_line).min()
}

#[cfg(test)]
#[path = "memory_tests.rs"]
mod tests;
