//! Whether the server at the other end is the one that the positions come from (P8), and
//! what a standby that was promoted in its place still has of them.

use std::sync::{Arc, Mutex, PoisonError};

use crate::error::{Error, Result};
use crate::position::Lsn;
use crate::source::ReplicationConnection;
use crate::store::{SourceRecord, Store};

/// Where there is no going on.
const AGAIN: &str =
    "Begin with a new state directory, and without the schema that `store` may have, which copies everything again.";

/// What is recorded of the source, by all who change it.
#[derive(Clone)]
pub(super) struct Known(Arc<Mutex<SourceRecord>>);

impl Known {
    pub fn new(record: SourceRecord) -> Known {
        Known(Arc::new(Mutex::new(record)))
    }

    pub fn get(&self) -> SourceRecord {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Changes it, on disk first. Changes are rare, and nobody makes the same ones.
    pub async fn change(&self, store: &Store, change: impl Fn(&mut SourceRecord)) -> Result<()> {
        let mut record = self.get();
        change(&mut record);
        store.save_source(record).await?;
        change(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner));
        Ok(())
    }
}

/// The server that a pipeline streams from.
pub(super) struct Identity {
    pub known: Known,
    pub store: Store,
}

impl Identity {
    /// Compares the server with the known one. A promoted standby is followed if its
    /// history has all that was read, up to `seen`; its timeline is returned, to be kept once
    /// the slot streams there.
    ///
    /// # Errors
    /// `source.changed`, `source.promoted`.
    pub async fn check(&self, connection: &mut ReplicationConnection, seen: Lsn) -> Result<Option<u32>> {
        let known = self.known.get();
        let found = connection.identify_system().await?;
        if found.system != known.system {
            return Err(changed("system identifier", &known.system, &found.system));
        }
        if found.timeline == known.timeline {
            return Ok(None);
        }
        // An older one has nothing of ours, and the first one no history.
        if found.timeline < known.timeline {
            return Err(changed("timeline", &known.timeline.to_string(), &found.timeline.to_string()));
        }
        let history = connection.timeline_history(found.timeline).await?;
        let ours = history.iter().find(|(timeline, _)| *timeline == known.timeline);
        let Some((_, ended)) = ours.copied() else {
            return Err(changed("timeline", &known.timeline.to_string(), &found.timeline.to_string()));
        };
        let seen = seen.max(self.stored()?);
        if seen > ended {
            return Err(Error::no(
                "source.promoted",
                format!(
                    "the source is a promoted standby: its timeline {} left timeline {} at {ended}, and changes up to {seen}, \
                     which it never had, were taken from the server before it",
                    found.timeline, known.timeline
                ),
            )
            .next(format!("{AGAIN} With synchronized_standby_slots at the primary this cannot happen.")));
        }
        tracing::warn!(timeline = found.timeline, "the source is a promoted standby that has all that was read");
        Ok(Some(found.timeline))
    }

    /// Up to where the destinations are known to have something: copies too are of one
    /// history.
    fn stored(&self) -> Result<Lsn> {
        let loaded = self.store.load()?;
        let tables = loaded.tables.iter().flat_map(|table| [table.floor, table.position.map(|at| at.commit)]);
        let checkpoints = loaded.destinations.iter().map(|destination| Some(destination.checkpoint));
        Ok(tables.chain(checkpoints).flatten().max().unwrap_or_default())
    }
}

/// LSNs of another system or timeline mean another history.
pub(super) fn changed(what: &str, stored: &str, now: &str) -> Error {
    Error::no(
        "source.changed",
        format!("the source is not the one this state belongs to: its {what} was {stored} and is {now}"),
    )
    .next("Point `source.url` at the old source, or begin with a new state directory, and without the schema that `store` may have, which copies everything again.")
}
