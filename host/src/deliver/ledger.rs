//! What was handed to a plugin and is not durable yet, in order of tickets.

use std::collections::VecDeque;
use std::time::Instant;

use tokio::sync::OwnedSemaphorePermit;

use crate::position::{Lsn, Position};
use crate::wire;

/// A group under construction, or in the ledger.
pub(super) struct Entry {
    /// What crosses, and crosses again after a restart of the plugin.
    pub group: wire::Group,
    /// Up to where each table is with this group.
    pub positions: Vec<(u32, Position)>,
    /// With everything before it, this group completes the source's log up to here.
    pub progress: Option<Lsn>,
    /// The table and rows of a copy; such a group is not sent again.
    pub copied: Option<(u32, u64)>,
    /// Commit time of the oldest change, microseconds since 1970-01-01 UTC.
    pub committed_at: Option<i64>,
    /// Changes in it.
    pub changes: u64,
    /// Size, for limits.
    pub bytes: usize,
    /// When the plugin took it; none while it has to be sent.
    pub accepted: Option<Instant>,
    /// The memory's share of the inbox, given back when the entry goes.
    pub permits: Vec<OwnedSemaphorePermit>,
}

impl Entry {
    /// An empty group.
    pub fn new() -> Entry {
        Entry {
            group: wire::Group { ticket: 0, whole: false, batches: Vec::new(), details: Vec::new() },
            positions: Vec::new(),
            progress: None,
            copied: None,
            committed_at: None,
            changes: 0,
            bytes: 0,
            accepted: None,
            permits: Vec::new(),
        }
    }
}

/// What became durable at once.
#[derive(Debug, Default)]
pub(super) struct Settled {
    /// Latest position of each table.
    pub positions: Vec<(u32, Position)>,
    /// The source's log is complete at the destination up to here.
    pub checkpoint: Option<Lsn>,
    /// Commit time of the oldest change of each group, and how many changes it had.
    pub changes: Vec<(i64, u64)>,
    /// Rows of copies, by table.
    pub copied: Vec<(u32, u64)>,
}

impl Settled {
    /// Whether nothing became durable.
    pub fn is_empty(&self) -> bool {
        self.positions.is_empty() && self.checkpoint.is_none() && self.copied.is_empty()
    }

    fn add(&mut self, entry: Entry) {
        for (oid, position) in entry.positions {
            match self.positions.iter_mut().find(|(known, _)| *known == oid) {
                Some((_, known)) => *known = (*known).max(position),
                None => self.positions.push((oid, position)),
            }
        }
        self.checkpoint = self.checkpoint.max(entry.progress);
        self.changes.extend(entry.committed_at.map(|at| (at, entry.changes)));
        self.copied.extend(entry.copied);
    }
}

/// Groups in order of their tickets: first those the plugin accepted, then those it
/// has yet to be sent.
#[derive(Default)]
pub(super) struct Ledger {
    entries: VecDeque<Entry>,
    last_ticket: u64,
}

impl Ledger {
    /// Adds a group and gives it its ticket.
    pub fn push(&mut self, mut entry: Entry) {
        self.last_ticket += 1;
        entry.group.ticket = self.last_ticket;
        self.entries.push_back(entry);
    }

    /// Progress of the source's log with nothing to send for it: it counts once what
    /// is under way is durable, which may be now.
    pub fn progress(&mut self, lsn: Lsn) -> Settled {
        match self.entries.back_mut() {
            Some(last) => {
                last.progress = last.progress.max(Some(lsn));
                Settled::default()
            }
            None => Settled { checkpoint: Some(lsn), ..Settled::default() },
        }
    }

    /// The next group the plugin has to be sent.
    pub fn unsent(&mut self) -> Option<&mut Entry> {
        self.entries.iter_mut().find(|entry| entry.accepted.is_none())
    }

    /// The plugin says that everything up to `ticket` is durable. A ticket that it was
    /// never sent is not believed.
    pub fn durable(&mut self, ticket: u64) -> Settled {
        let mut settled = Settled::default();
        while self.entries.front().is_some_and(|entry| entry.group.ticket <= ticket && entry.accepted.is_some()) {
            if let Some(entry) = self.entries.pop_front() {
                settled.add(entry);
            }
        }
        settled
    }

    /// The plugin is a new instance that knows of no group: all have to be sent, but
    /// those of copies, whose run is lost.
    pub fn unsend(&mut self) {
        for entry in &mut self.entries {
            entry.accepted = None;
            if entry.copied.take().is_some() {
                entry.group.batches.clear();
            }
        }
    }

    /// Drops groups that have nothing left to send. Their progress counts once what is
    /// before them is durable, which may be now.
    pub fn drop_empty(&mut self) -> Settled {
        let mut settled = Settled::default();
        let mut kept: VecDeque<Entry> = VecDeque::with_capacity(self.entries.len());
        for entry in self.entries.drain(..) {
            if entry.accepted.is_some() || !entry.group.batches.is_empty() {
                kept.push_back(entry);
            } else if let Some(before) = kept.back_mut() {
                before.progress = before.progress.max(entry.progress);
            } else {
                settled.checkpoint = settled.checkpoint.max(entry.progress);
            }
        }
        self.entries = kept;
        settled
    }

    /// A new instance already has a table's changes up to `position`: what was not
    /// acknowledged before the old one ended was committed all the same.
    pub fn drop_through(&mut self, oid: u32, position: Option<Position>) {
        let Some(position) = position else { return };
        for entry in self.entries.iter_mut().filter(|entry| entry.accepted.is_none()) {
            entry.group.batches.retain(|batch| {
                let through = batch.through.as_ref();
                batch.table_id != oid
                    || through.is_none_or(|through| {
                        (through.epoch, through.commit, through.ordinal)
                            > (position.epoch, position.commit.0, position.ordinal)
                    })
            });
        }
    }

    /// Takes a failed table's rows out of what has to be sent.
    pub fn remove_table(&mut self, oid: u32) {
        for entry in self.entries.iter_mut().filter(|entry| entry.accepted.is_none()) {
            entry.group.batches.retain(|batch| batch.table_id != oid);
            if entry.copied.is_some_and(|(copied, _)| copied == oid) {
                entry.copied = None;
            }
        }
        for entry in &mut self.entries {
            entry.positions.retain(|(table, _)| *table != oid);
        }
    }

    /// Cuts the next unsent group into one group per table, so that a failure that
    /// names none hits only its own. False if it has one table only.
    pub fn split_unsent(&mut self) -> bool {
        let Some(index) = self.entries.iter().position(|entry| entry.accepted.is_none()) else { return false };
        let Some(entry) = self.entries.remove(index) else { return false };
        let mut parts = split(entry);
        let several = parts.len() > 1;
        for part in parts.drain(..).rev() {
            self.entries.insert(index, part);
        }
        if several {
            self.renumber(index);
        }
        several
    }

    /// The table of a batch in a group that is not durable yet.
    pub fn table_of(&self, ticket: u64, batch: u32) -> Option<u32> {
        let entry = self.entries.iter().find(|entry| entry.group.ticket == ticket)?;
        Some(entry.group.batches.get(usize::try_from(batch).ok()?)?.table_id)
    }

    /// Bytes that the plugin accepted and that are not durable.
    pub fn accepted_bytes(&self) -> usize {
        self.entries.iter().filter(|entry| entry.accepted.is_some()).map(|entry| entry.bytes).sum()
    }

    /// When the oldest of them was accepted.
    pub fn oldest_accepted(&self) -> Option<Instant> {
        self.entries.front().and_then(|entry| entry.accepted)
    }

    /// Whether everything is durable.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Tickets have to grow in order; only groups that were never accepted change theirs.
    fn renumber(&mut self, from: usize) {
        for entry in self.entries.iter_mut().skip(from) {
            self.last_ticket += 1;
            entry.group.ticket = self.last_ticket;
        }
    }
}

fn split(entry: Entry) -> Vec<Entry> {
    let tables = entry.positions.len().max(1) as u64;
    let mut parts: Vec<Entry> = Vec::new();
    for batch in entry.group.batches {
        match parts.iter_mut().find(|part| part.group.batches[0].table_id == batch.table_id) {
            Some(part) => part.group.batches.push(batch),
            None => {
                let mut part = Entry::new();
                part.committed_at = entry.committed_at;
                part.changes = entry.changes / tables;
                part.positions = entry.positions.iter().filter(|(oid, _)| *oid == batch.table_id).copied().collect();
                part.group.batches.push(batch);
                parts.push(part);
            }
        }
    }
    if parts.is_empty() {
        parts.push(Entry::new());
    }
    if let [only] = parts.as_mut_slice() {
        only.group.whole = entry.group.whole;
    }
    let count = parts.len();
    for part in &mut parts {
        part.bytes = entry.bytes / count;
    }
    // Progress counts when the last part is durable, and the memory is one.
    if let Some(last) = parts.last_mut() {
        last.progress = entry.progress;
        last.copied = entry.copied;
        last.permits = entry.permits;
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(tables: &[u32], progress: Option<u64>) -> Entry {
        let mut entry = Entry::new();
        for table in tables {
            entry.group.batches.push(wire::Batch {
                table_id: *table,
                snapshot: wire::SnapshotId { commit: 0, message: 0 },
                through: None,
                content: wire::Content::Truncate(wire::Truncation {
                    sequence: wire::Sequence {
                        epoch: 0,
                        commit: vec![],
                        ordinal: vec![],
                        committed_at: vec![],
                        xid: vec![],
                    },
                    cascade: false,
                    restart_identity: false,
                }),
            });
            entry.positions.push((*table, Position { epoch: 0, commit: Lsn(progress.unwrap_or(1)), ordinal: 1 }));
        }
        entry.progress = progress.map(Lsn);
        entry
    }

    fn accept_all(ledger: &mut Ledger) {
        while let Some(entry) = ledger.unsent() {
            entry.accepted = Some(Instant::now());
        }
    }

    #[test]
    fn a_checkpoint_waits_until_every_group_before_it_is_durable() {
        let mut ledger = Ledger::default();
        ledger.push(entry(&[1], None));
        ledger.push(entry(&[1], Some(20)));
        assert!(ledger.progress(Lsn(30)).is_empty());
        accept_all(&mut ledger);
        assert_eq!(ledger.durable(1).checkpoint, None);
        assert_eq!(ledger.durable(2).checkpoint, Some(Lsn(30)));
        assert_eq!(ledger.progress(Lsn(40)).checkpoint, Some(Lsn(40)));
    }

    #[test]
    fn a_durable_ticket_that_was_never_sent_is_not_believed() {
        let mut ledger = Ledger::default();
        ledger.push(entry(&[1], Some(20)));
        assert!(ledger.durable(u64::MAX).is_empty());
        accept_all(&mut ledger);
        assert_eq!(ledger.durable(u64::MAX).checkpoint, Some(Lsn(20)));
    }

    #[test]
    fn accepted_groups_are_sent_again_to_a_new_instance() {
        let mut ledger = Ledger::default();
        ledger.push(entry(&[1], Some(20)));
        accept_all(&mut ledger);
        assert!(ledger.unsent().is_none());
        ledger.unsend();
        assert_eq!(ledger.unsent().unwrap().group.ticket, 1);
        assert!(ledger.durable(1).is_empty());
    }

    #[test]
    fn a_split_group_keeps_its_progress_for_its_last_part() {
        let mut ledger = Ledger::default();
        ledger.push(entry(&[1, 2, 1], Some(20)));
        ledger.push(entry(&[3], Some(30)));
        assert!(ledger.split_unsent());
        accept_all(&mut ledger);
        let first = ledger.entries[0].group.ticket;
        assert_eq!(ledger.entries[0].group.batches.len(), 2);
        assert_eq!(ledger.durable(first).checkpoint, None);
        assert_eq!(ledger.durable(first + 1).checkpoint, Some(Lsn(20)));
        assert_eq!(ledger.durable(first + 2).checkpoint, Some(Lsn(30)));
    }

    #[test]
    fn progress_of_a_group_with_nothing_left_waits_for_those_before_it() {
        let mut ledger = Ledger::default();
        ledger.push(entry(&[1], Some(20)));
        ledger.push(entry(&[2], Some(30)));
        ledger.remove_table(2);
        assert!(ledger.drop_empty().is_empty());
        accept_all(&mut ledger);
        assert_eq!(ledger.durable(1).checkpoint, Some(Lsn(30)));
        ledger.push(entry(&[2], Some(40)));
        ledger.remove_table(2);
        assert_eq!(ledger.drop_empty().checkpoint, Some(Lsn(40)));
    }

    #[test]
    fn a_removed_table_leaves_the_progress_of_its_groups() {
        let mut ledger = Ledger::default();
        ledger.push(entry(&[1, 2], Some(20)));
        ledger.remove_table(1);
        assert_eq!(ledger.unsent().unwrap().group.batches.len(), 1);
        accept_all(&mut ledger);
        let settled = ledger.durable(1);
        assert_eq!(settled.checkpoint, Some(Lsn(20)));
        assert_eq!(settled.positions.len(), 1);
    }
}
