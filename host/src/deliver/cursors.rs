//! How far each destination has each table durably, and so what the spool may drop.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, PoisonError};

use crate::copy::spool::Spool;
use crate::position::Position;
use crate::store::Progress;

/// The cursors of all destinations and tables.
#[derive(Clone)]
pub(super) struct Cursors {
    spool: Spool,
    tables: Arc<Mutex<HashMap<u32, HashMap<String, Option<Position>>>>>,
}

impl Cursors {
    /// No cursor yet.
    pub fn new(spool: Spool) -> Cursors {
        Cursors { spool, tables: Arc::default() }
    }

    /// A destination needs a table's changes from `position` on; none: from its copy
    /// on, which is still to come.
    pub fn add(&self, destination: &str, oid: u32, position: Option<Position>) {
        self.lock().entry(oid).or_default().insert(destination.to_owned(), position);
    }

    /// How far a destination has a table durably.
    pub fn position(&self, destination: &str, oid: u32) -> Option<Position> {
        self.lock().get(&oid)?.get(destination).copied().flatten()
    }

    /// It needs them no more.
    pub fn remove(&self, destination: &str, oid: u32) {
        let empty = {
            let mut tables = self.lock();
            let Some(cursors) = tables.get_mut(&oid) else { return };
            cursors.remove(destination);
            cursors.is_empty()
        };
        if empty {
            self.report(oid, self.spool.forget(oid));
        } else {
            self.release(oid);
        }
    }

    /// What was stored of a destination's progress.
    pub fn stored(&self, progress: &Progress) {
        let mut moved: HashSet<u32> = HashSet::new();
        {
            let mut tables = self.lock();
            for (oid, position) in &progress.positions {
                let cursor = tables.get_mut(oid).and_then(|cursors| cursors.get_mut(&progress.destination));
                if let Some(cursor) = cursor {
                    *cursor = (*cursor).max(Some(*position));
                    moved.insert(*oid);
                }
            }
        }
        for oid in moved {
            self.release(oid);
        }
    }

    /// Lets go of what every destination has; all that want the table have to be known.
    pub fn release(&self, oid: u32) {
        if self.spool.end(oid).is_none() {
            return;
        }
        let slowest = self.lock().get(&oid).and_then(|cursors| cursors.values().copied().min()).flatten();
        if let Some(slowest) = slowest {
            self.report(oid, self.spool.release(oid, (slowest.commit, slowest.ordinal)));
        }
    }

    /// What cannot be deleted now is deleted at the next release; it costs disk only.
    fn report(&self, oid: u32, released: crate::error::Result<()>) {
        if let Err(error) = released {
            tracing::warn!(oid, code = error.code(), "spool files could not be deleted yet: {error}");
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<u32, HashMap<String, Option<Position>>>> {
        self.tables.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::copy::spool::{FrameHead, FrameKind, SpoolOptions};
    use crate::position::Lsn;

    const TABLE: u32 = 7;

    /// A spool of several files, all but the last of them full of one table's changes.
    fn filled(directory: &std::path::Path) -> Spool {
        let options = SpoolOptions { segment_bytes: 2_000, ..SpoolOptions::default() };
        let spool = Spool::open(directory, options).unwrap();
        for commit in (100..200).map(Lsn) {
            let head = FrameHead { table: TABLE, commit, committed_at: 0, xid: 0, row: commit, ordinal: commit.0 };
            spool.append(head, FrameKind::Relation, b"relation").unwrap();
            spool.append(head, FrameKind::Change, &[0; 100]).unwrap();
            spool.commit(commit, commit).unwrap();
        }
        assert!(spool.bytes() > 10_000);
        spool
    }

    #[test]
    fn what_a_copy_has_is_given_back_without_another_change_once_all_destinations_have_it() {
        let directory = tempfile::tempdir().unwrap();
        let spool = filled(directory.path());
        let cursors = Cursors::new(spool.clone());
        cursors.add("near", TABLE, None);
        cursors.add("far", TABLE, None);
        cursors.add("near", TABLE, Some(Position::of_copy(0, Lsn(300))));
        cursors.release(TABLE);
        assert!(spool.bytes() > 10_000, "the far one has nothing yet");
        cursors.add("far", TABLE, Some(Position::of_copy(0, Lsn(300))));
        cursors.release(TABLE);
        assert!(spool.bytes() < 3_000, "{}", spool.bytes());
    }
}
