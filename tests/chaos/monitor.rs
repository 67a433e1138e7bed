//! The slot against the stored checkpoints, all the time: what is confirmed is read first,
//! and a checkpoint only grows, so whatever moment it is, the slot must not be ahead.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use tidegate::position::Lsn;
use tidegate::store::Store;

use crate::Result;
use crate::sql::Sql;

const LOOK: Duration = Duration::from_millis(25);

/// Looks until it is dropped.
pub struct Monitor {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    url: String,
    slot: String,
    state: PathBuf,
    destinations: usize,
    ended: AtomicBool,
    looks: AtomicU64,
    wrong: Mutex<Option<String>>,
}

impl Monitor {
    /// Of a slot, and a state with so many destinations.
    pub fn start(url: &str, slot: String, state: PathBuf, destinations: usize) -> Monitor {
        let shared = Arc::new(Shared {
            url: url.to_owned(),
            slot,
            state,
            destinations,
            ended: AtomicBool::new(false),
            looks: AtomicU64::new(0),
            wrong: Mutex::new(None),
        });
        let thread = std::thread::spawn({
            let shared = shared.clone();
            move || shared.watch()
        });
        Monitor { shared, thread: Some(thread) }
    }

    /// How often both could be read.
    pub fn looks(&self) -> u64 {
        self.shared.looks.load(Ordering::Relaxed)
    }

    /// What was seen that must not be.
    pub fn check(&self) -> Result<()> {
        match self.shared.wrong.lock().unwrap_or_else(PoisonError::into_inner).clone() {
            Some(wrong) => Err(wrong.into()),
            None => Ok(()),
        }
    }
}

impl Drop for Monitor {
    fn drop(&mut self) {
        self.shared.ended.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // If it panicked, it has said so.
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn watch(&self) {
        let mut session = None;
        while !self.ended.load(Ordering::Relaxed) {
            std::thread::sleep(LOOK);
            session = session.or_else(|| Sql::connect(&self.url).ok());
            if let Some(open) = &session
                && self.look(open).is_err()
            {
                session = None;
            }
        }
    }

    fn look(&self, session: &Sql) -> Result<()> {
        let sql = format!("SELECT confirmed_flush_lsn FROM pg_replication_slots WHERE slot_name = '{}'", self.slot);
        let rows = session.rows(&sql)?;
        let Some(confirmed) = rows.into_iter().flatten().flatten().next() else { return Ok(()) };
        let confirmed: Lsn = confirmed.parse().map_err(|error| format!("{error}"))?;
        // Not there yet, or on a disk that is full.
        let Ok(loaded) = Store::open_read_only(&self.state).and_then(|store| store.load()) else { return Ok(()) };
        if loaded.destinations.len() < self.destinations {
            return Ok(());
        }
        self.looks.fetch_add(1, Ordering::Relaxed);
        for destination in loaded.destinations {
            if destination.checkpoint < confirmed {
                let wrong = format!(
                    "the slot is confirmed up to {confirmed}, but the stored checkpoint of {} is {}",
                    destination.name, destination.checkpoint
                );
                self.wrong.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(wrong);
            }
        }
        Ok(())
    }
}
