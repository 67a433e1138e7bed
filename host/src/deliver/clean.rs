//! Before a copy goes on in another snapshot: what has gone from the table since the last
//! one is deleted at the destination (P19).
//!
//! Such a row was there in an earlier snapshot and is not in this one, so the spool has
//! its delete, or the change that gave it another key. What came back meanwhile is a newer
//! version, which is read in this snapshot and sent behind.

use std::sync::Arc;

use tokio::sync::oneshot;

use crate::batch::fold;
use crate::copy::spool::{Frame, FrameKind, SpoolReader};
use crate::error::{Error, Result};
use crate::position::Lsn;
use crate::schema::table::TableSchema;
use crate::source::pgoutput::{self, Cell, Message, OldTuple, Relation, Tuple};
use crate::wire;

use super::copier::Copier;
use super::drain::{before, read};
use super::feed::{Fed, Feed, Transaction};
use super::resume::not_resumable;
use super::routes::Command;

/// Looks for what has gone.
pub(super) struct Cleaner<'a> {
    copier: &'a Copier,
    schema: Arc<TableSchema>,
    /// The least of all takers'.
    since: Lsn,
    /// The snapshot's own: what is at or beyond it comes later.
    floor: Lsn,
    relation: Option<Arc<Relation>>,
    takers: Vec<Taker>,
    /// None between two scans.
    reader: Option<SpoolReader>,
    /// How often the stream was begun when the last scan was.
    scanned: Option<u64>,
}

/// A destination that has rows of earlier snapshots.
struct Taker {
    /// As whoever asks counts them.
    index: usize,
    /// What went before was deleted there.
    since: Lsn,
    feed: Feed,
}

/// Deletes for one destination, by its index.
pub(super) type Deletes = Vec<(usize, wire::MergeRows)>;

impl<'a> Cleaner<'a> {
    /// For destinations that lack the deletes since an LSN, up to `floor`; none if there is
    /// nothing to do.
    pub fn new(
        copier: &'a Copier,
        schema: Arc<TableSchema>,
        floor: Lsn,
        takers: impl Iterator<Item = Option<Lsn>>,
    ) -> Option<Cleaner<'a>> {
        let feed = || Feed::new(schema.oid, copier.epoch, copier.versions.history());
        let takers: Vec<Taker> = takers
            .enumerate()
            .filter_map(|(index, since)| Some(Taker { index, since: since?, feed: feed() }))
            .filter(|taker| taker.since < floor)
            .collect();
        let since = takers.iter().map(|taker| taker.since).min()?;
        Some(Cleaner { copier, schema, since, floor, relation: None, takers, reader: None, scanned: None })
    }

    /// More that has gone; none: that was all.
    ///
    /// # Errors
    /// `copy.not-resumable`; those of the spool.
    pub async fn next(&mut self) -> Result<Option<Deletes>> {
        loop {
            if self.reader.is_none() {
                let begun = Some(self.stream_passes().await?);
                // A spool that was set back meanwhile may not have had all of it.
                if self.scanned == begun {
                    return Ok(None);
                }
                self.scanned = begun;
                self.reader = Some(self.copier.spool.reader(self.schema.oid, before(self.since)));
            }
            let (frames, _) = read(&mut self.reader).await?;
            if let Some(reader) = self.reader.as_mut().filter(|reader| reader.large().is_some()) {
                // A key is all that is kept of it.
                let _making = self.copier.memory.making().await;
                reader.make_room();
                continue;
            }
            let floor = self.floor;
            let beyond = |frame: &Frame| frame.kind != FrameKind::Relation && frame.head.commit >= floor;
            let below = frames.iter().position(beyond).unwrap_or(frames.len());
            for frame in &frames[..below] {
                self.take(frame)?;
            }
            if below < frames.len() || frames.is_empty() {
                self.reader = None;
            }
            let deletes = self.deletes()?;
            if !deletes.is_empty() {
                return Ok(Some(deletes));
            }
        }
    }

    async fn stream_passes(&self) -> Result<u64> {
        let ending = || Error::transient("pipeline.ending", "the pipeline is ending");
        let (answer, answered) = oneshot::channel();
        self.copier.commands.send(Command::Reached { at: self.floor, answer }).map_err(|_| ending())?;
        // The copy itself is what would make room in the end.
        answered.await.map_err(|_| ending())?.ok_or_else(|| self.cannot("the stream waits for room in the spool"))
    }

    fn take(&mut self, frame: &Frame) -> Result<()> {
        match frame.kind {
            FrameKind::Relation => {
                if let Message::Relation(relation) = pgoutput::decode(&frame.body)? {
                    let relation = Arc::new(relation);
                    self.takers.iter_mut().for_each(|taker| taker.feed.relation(relation.clone()));
                    self.relation = Some(relation);
                }
                Ok(())
            }
            // What it is now is compared with what it was before this.
            FrameKind::Schema => Ok(()),
            FrameKind::Change => match pgoutput::decode(&frame.body)? {
                Message::Delete { old, .. } => self.gone(frame, old),
                Message::Update { old: Some(old), new, .. } if self.has_moved(&old.tuple, &new)? => {
                    self.gone(frame, old)
                }
                Message::Truncate { .. } => Err(self.cannot("it was truncated")),
                _ => Ok(()),
            },
        }
    }

    /// Whether a column of the merge key has another value.
    fn has_moved(&self, old: &Tuple, new: &Tuple) -> Result<bool> {
        let key: Vec<&str> = self.key_columns();
        let Some(relation) = &self.relation else { return Ok(true) };
        for ((column, old), new) in relation.columns.iter().zip(old.cells()).zip(new.cells()) {
            let (old, new) = (old?, new?);
            if key.contains(&column.name.as_str()) && new != Cell::Unchanged && new != old {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn key_columns(&self) -> Vec<&str> {
        let column = |ordinal: u16| self.schema.column(ordinal).map(|(_, column)| column.name.as_str());
        self.schema.merge_key().into_iter().filter_map(column).collect()
    }

    /// A row with this key has gone.
    fn gone(&mut self, frame: &Frame, old: OldTuple) -> Result<()> {
        let head = frame.head;
        let transaction = Transaction { commit: head.commit, committed_at: head.committed_at, xid: head.xid };
        let message = Message::Delete { oid: self.schema.oid, old };
        let (name, mut decoded) = (self.schema.name.clone(), true);
        for taker in &mut self.takers {
            if taker.since <= head.commit {
                decoded &= taker.feed.change(transaction, head.row, head.ordinal, &message).is_ok();
            }
        }
        if decoded { Ok(()) } else { Err(not_resumable(&name, "no version of its schema fits its changes")) }
    }

    fn deletes(&mut self) -> Result<Deletes> {
        let mut deletes = Vec::new();
        for taker in &mut self.takers {
            for fed in taker.feed.take() {
                let Fed::Batch(batch) = fed else { continue };
                if batch.schema.snapshot != self.schema.snapshot {
                    return Err(not_resumable(&self.schema.name, "its schema was another in between"));
                }
                deletes.push((taker.index, fold(&batch, 0)?));
            }
        }
        Ok(deletes)
    }

    fn cannot(&self, why: &str) -> Error {
        not_resumable(&self.schema.name, why)
    }
}

#[cfg(test)]
#[path = "clean_tests.rs"]
mod tests;
