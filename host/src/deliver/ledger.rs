//! What was handed to a plugin and is not durable yet, in order of tickets.

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Instant;

use crate::copy::Reading;
use crate::memory::Taken;
use crate::position::{Lsn, Position};
use crate::wire;

use super::isolate::{self, Isolated, RowAt};

/// Traps and time-outs on one group after which it is treated as refused.
const FAULTS: u32 = 3;
/// Refusals with named culprits after which a group is halved all the same: each costs
/// the whole group once more, and there may be thousands.
const NAMED: u32 = 3;

/// What a group does to the quarantine once it is durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Clears {
    /// Nothing.
    Nothing,
    /// Its whole rows and deletes are newer than what is in quarantine under their keys.
    Whole,
    /// Its rows are out of quarantine.
    All,
}

/// A group under construction, or in the ledger.
pub(super) struct Entry {
    /// What crosses, and crosses again after a restart of the plugin.
    pub group: wire::Group,
    /// Up to where each table is with this group.
    pub positions: Vec<(u32, Position)>,
    /// With everything before it, this group completes the source's log up to here.
    pub progress: Option<Lsn>,
    /// What it has of a copy; such a group is not sent again.
    pub copied: Option<Copied>,
    /// Commit time of the oldest change, microseconds since 1970-01-01 UTC.
    pub committed_at: Option<i64>,
    /// Changes in it.
    pub changes: u64,
    /// Size, for limits.
    pub bytes: usize,
    /// When the plugin took it; none while it has to be sent.
    pub accepted: Option<Instant>,
    /// What its memory has of the destination's share, given back when the entry goes.
    pub taken: Vec<Taken>,
    /// How many columns each table of it has.
    pub columns: Vec<(u32, usize)>,
    /// Traps and time-outs of calls that were about it.
    pub faults: u32,
    /// A trap is expected of it: nothing else is under way beside it.
    pub suspect: bool,
    /// How often it was refused with culprits named.
    pub named: u32,
    /// What it does to the quarantine.
    pub clears: Clears,
    /// Rows that the plugin refused after it had accepted the group.
    pub refused: Vec<RowAt>,
    /// Stretches of copies of which nothing is behind it.
    pub ended: Vec<StretchEnd>,
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
            taken: Vec::new(),
            columns: Vec::new(),
            faults: 0,
            suspect: false,
            named: 0,
            clears: Clears::Nothing,
            refused: Vec::new(),
            ended: Vec::new(),
        }
    }
}

/// All that was read of a stretch of a copy was sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct StretchEnd {
    pub oid: u32,
    /// The attempt.
    pub run: Arc<str>,
    pub reading: Reading,
}

/// Rows of a copy.
#[derive(Clone, Debug)]
pub(super) struct Copied {
    pub oid: u32,
    /// The attempt.
    pub run: Arc<str>,
    /// What they were read of, if the copy goes by stretches.
    pub reading: Option<Reading>,
    pub rows: u64,
    /// Of the table at the source.
    pub source_bytes: u64,
}

impl Copied {
    /// So many of these rows, and their share of the bytes.
    pub fn some(&self, rows: u64) -> Copied {
        let share = u128::from(self.source_bytes) * u128::from(rows) / u128::from(self.rows.max(1));
        Copied { rows, source_bytes: u64::try_from(share).unwrap_or(u64::MAX), ..self.clone() }
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
    /// Rows of copies.
    pub copied: Vec<Copied>,
    /// Stretches of copies all of whose rows are durable.
    pub ended: Vec<StretchEnd>,
    /// How many rows in all.
    pub rows: u64,
    /// Groups that do something to the quarantine.
    pub clearing: Vec<Clearing>,
}

/// A group that is durable and does something to the quarantine.
#[derive(Debug)]
pub(super) struct Clearing {
    pub batches: Vec<wire::Batch>,
    /// Whether rows clear that are not whole.
    pub all: bool,
    /// Rows that do not.
    pub refused: Vec<RowAt>,
}

impl Settled {
    /// Whether nothing became durable.
    pub fn is_empty(&self) -> bool {
        self.positions.is_empty()
            && self.checkpoint.is_none()
            && self.copied.is_empty()
            && self.ended.is_empty()
            && self.clearing.is_empty()
            && self.rows == 0
    }

    fn add(&mut self, entry: Entry) {
        advance(&mut self.positions, entry.positions);
        self.checkpoint = self.checkpoint.max(entry.progress);
        self.changes.extend(entry.committed_at.map(|at| (at, entry.changes)));
        self.copied.extend(entry.copied);
        self.ended.extend(entry.ended);
        self.rows += isolate::rows(&entry.group);
        if entry.clears != Clears::Nothing {
            let all = entry.clears == Clears::All;
            self.clearing.push(Clearing { batches: entry.group.batches, all, refused: entry.refused });
        }
    }
}

/// The latest position of each table.
fn advance(positions: &mut Vec<(u32, Position)>, by: Vec<(u32, Position)>) {
    for (oid, position) in by {
        match positions.iter_mut().find(|(known, _)| *known == oid) {
            Some((_, known)) => *known = (*known).max(position),
            None => positions.push((oid, position)),
        }
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

    /// All that was read of a stretch of a copy was sent: it is done once what is under way is
    /// durable, which may be now.
    pub fn stretch_ended(&mut self, end: StretchEnd) -> Settled {
        match self.entries.back_mut() {
            Some(last) => {
                last.ended.push(end);
                Settled::default()
            }
            None => Settled { ended: vec![end], ..Settled::default() },
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
            entry.ended.clear();
            if entry.copied.take().is_some() {
                entry.group.batches.clear();
            }
        }
    }

    /// Drops groups that have nothing left to send. Their progress, and how far they
    /// brought their tables, counts once what is before them is durable, which may be now.
    pub fn drop_empty(&mut self) -> Settled {
        let mut settled = Settled::default();
        let mut kept: VecDeque<Entry> = VecDeque::with_capacity(self.entries.len());
        for entry in self.entries.drain(..) {
            if entry.accepted.is_some() || !entry.group.batches.is_empty() {
                kept.push_back(entry);
            } else if let Some(before) = kept.back_mut() {
                before.progress = before.progress.max(entry.progress);
                before.ended.extend(entry.ended);
                advance(&mut before.positions, entry.positions);
            } else {
                settled.checkpoint = settled.checkpoint.max(entry.progress);
                settled.ended.extend(entry.ended);
                advance(&mut settled.positions, entry.positions);
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
            if entry.copied.as_ref().is_some_and(|copied| copied.oid == oid) {
                entry.copied = None;
            }
        }
        for entry in &mut self.entries {
            entry.positions.retain(|(table, _)| *table != oid);
            entry.ended.retain(|end| end.oid != oid);
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

    /// Looks for the fault of the next unsent group: among the rows that are named, or by
    /// halving it.
    pub fn isolate(&mut self, named: &[RowAt]) -> Isolated {
        let Some(index) = self.entries.iter().position(|entry| entry.accepted.is_none()) else {
            return Isolated::Nothing;
        };
        let entry = &mut self.entries[index];
        let culprits = isolate::with_their_like(entry, named);
        if !culprits.is_empty() && (entry.named < NAMED || !isolate::divisible(entry)) {
            entry.named += 1;
            return Isolated::Rows(culprits);
        }
        let Some(entry) = self.entries.remove(index) else { return Isolated::Nothing };
        match isolate::halve(entry) {
            Ok(halves) => {
                for half in halves.into_iter().rev() {
                    self.entries.insert(index, half);
                }
                self.renumber(index);
                self.rename_copies(index..index + 2);
                Isolated::Split
            }
            Err(entry) => {
                let only = isolate::only_piece(&entry);
                self.entries.insert(index, *entry);
                only
            }
        }
    }

    /// Takes rows out of a group that was not accepted. See [`isolate::remove_rows`].
    pub fn remove_rows(&mut self, index: usize, rows: &[RowAt], keep_empty: bool) {
        let Some(entry) = self.entries.get_mut(index).filter(|entry| entry.accepted.is_none()) else { return };
        isolate::remove_rows(entry, rows, keep_empty);
        self.renumber(index);
        self.rename_copies(index..index + 1);
    }

    /// The rows of a copy's batch id are the same each time (the contract): other rows,
    /// another id.
    fn rename_copies(&mut self, entries: std::ops::Range<usize>) {
        for entry in self.entries.range_mut(entries) {
            let ticket = entry.group.ticket;
            for batch in &mut entry.group.batches {
                if let wire::Content::Copy(copy) = &mut batch.content {
                    copy.batch_id = format!("{}.{ticket}", copy.batch_id);
                }
            }
        }
    }

    /// The instance trapped, or took too long, over the next unsent group. Whether the
    /// group is to be isolated now.
    pub fn fault_unsent(&mut self) -> bool {
        self.unsent().is_some_and(fault)
    }

    /// The same over what was accepted: one of these groups. Whether it is known which,
    /// and it is to be isolated; it is the next unsent one then.
    pub fn fault_accepted(&mut self) -> bool {
        let mut accepted = self.entries.iter_mut().filter(|entry| entry.accepted.is_some());
        match (accepted.next(), accepted.next()) {
            (Some(only), None) => fault(only),
            (Some(first), Some(second)) => {
                for entry in [first, second].into_iter().chain(accepted) {
                    entry.faults += 1;
                    entry.suspect |= entry.faults >= FAULTS;
                }
                false
            }
            _ => false,
        }
    }

    /// The tables whose copies have groups that were accepted.
    pub fn accepted_copies(&self) -> BTreeSet<u32> {
        let accepted = self.entries.iter().filter(|entry| entry.accepted.is_some());
        accepted.filter_map(|entry| entry.copied.as_ref()).map(|copied| copied.oid).collect()
    }

    /// Whether a group has to wait until what is under way is durable.
    pub fn is_alone(&self) -> bool {
        let is_accepted = |entry: &&Entry| entry.accepted.is_some();
        let next = self.entries.iter().find(|entry| entry.accepted.is_none());
        let mut accepted = self.entries.iter().filter(is_accepted).peekable();
        accepted.peek().is_some() && (next.is_some_and(|next| next.suspect) || accepted.any(|entry| entry.suspect))
    }

    /// The group with this ticket, if it is not durable yet.
    pub fn find(&self, ticket: u64) -> Option<usize> {
        self.entries.iter().position(|entry| entry.group.ticket == ticket)
    }

    /// Where the next unsent group is.
    pub fn next_unsent(&self) -> Option<usize> {
        self.entries.iter().position(|entry| entry.accepted.is_none())
    }

    /// A group by its place.
    pub fn get_mut(&mut self, index: usize) -> Option<&mut Entry> {
        self.entries.get_mut(index)
    }

    /// The batches of a table behind a batch of a group, each with its group's place and
    /// its own.
    pub fn behind(&self, index: usize, batch: u32, oid: u32) -> impl Iterator<Item = (usize, u32, &wire::Batch)> {
        let groups = self.entries.iter().enumerate().skip(index);
        let batches = groups.flat_map(|(group, entry)| {
            (0..).zip(&entry.group.batches).map(move |(index, batch)| (group, index, batch))
        });
        batches.filter(move |(group, at, _)| *group > index || *at > batch).filter(move |(.., b)| b.table_id == oid)
    }

    /// Whether anything is accepted and not durable.
    pub fn has_accepted(&self) -> bool {
        self.entries.front().is_some_and(|entry| entry.accepted.is_some())
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

/// Counts a trap or time-out. Whether the group is to be isolated: after the third, and
/// each time once it is a part of such a group that can still be halved.
fn fault(entry: &mut Entry) -> bool {
    entry.faults += 1;
    if entry.copied.is_some() {
        // Its run is lost, and with it this group: who counts is `doubt`.
        return true;
    }
    if entry.faults >= FAULTS {
        entry.suspect = true;
        return true;
    }
    entry.suspect && isolate::divisible(entry)
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
                part.clears = entry.clears;
                part.columns = entry.columns.clone();
                part.suspect = entry.suspect;
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
        last.ended = entry.ended;
        last.copied = entry.copied;
        last.taken = entry.taken;
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::copy::Look;

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

    #[test]
    fn a_group_is_isolated_after_its_third_fault_and_its_halves_at_once_down_to_one() {
        let mut ledger = Ledger::default();
        ledger.push(entry(&[1, 2, 3, 4], Some(20)));
        assert_eq!([ledger.fault_unsent(), ledger.fault_unsent(), ledger.fault_unsent()], [false, false, true]);
        assert_eq!(ledger.isolate(&[]), Isolated::Split);
        assert!(ledger.fault_unsent(), "a half that can be halved");
        assert_eq!(ledger.isolate(&[]), Isolated::Split);
        // One by itself is tried three times again.
        assert_eq!([ledger.fault_unsent(), ledger.fault_unsent(), ledger.fault_unsent()], [false, false, true]);
        assert_eq!(ledger.isolate(&[]), Isolated::Table(1));
        assert_eq!(ledger.entries.iter().map(|entry| entry.group.batches.len()).collect::<Vec<_>>(), [1, 1, 2]);
        assert!(ledger.entries.iter().all(|entry| entry.suspect));
        let tickets: Vec<u64> = ledger.entries.iter().map(|entry| entry.group.ticket).collect();
        assert!(tickets.is_sorted() && tickets[0] > 1, "{tickets:?}");
        accept_all(&mut ledger);
        assert_eq!(ledger.durable(tickets[1]).checkpoint, None);
        assert_eq!(ledger.durable(tickets[2]).checkpoint, Some(Lsn(20)));
    }

    #[test]
    fn a_fault_over_several_accepted_groups_makes_them_suspects_that_go_alone() {
        let mut ledger = Ledger::default();
        ledger.push(entry(&[1], None));
        ledger.push(entry(&[2], Some(20)));
        for _ in 0..FAULTS {
            accept_all(&mut ledger);
            assert!(!ledger.is_alone());
            assert!(!ledger.fault_accepted());
            ledger.unsend();
        }
        assert!(!ledger.is_alone(), "nothing is under way");
        ledger.unsent().unwrap().accepted = Some(Instant::now());
        assert!(ledger.is_alone());
        assert!(ledger.fault_accepted(), "it has had its three faults");
        ledger.unsend();
        assert_eq!(ledger.isolate(&[]), Isolated::Table(1));
    }

    #[test]
    fn every_fault_over_a_copy_counts_for_its_run_is_lost() {
        let mut ledger = Ledger::default();
        let copied = Copied { oid: 1, run: "r".into(), reading: None, rows: 1, source_bytes: 8 };
        ledger.push(Entry { copied: Some(copied), ..entry(&[1], None) });
        assert!(ledger.fault_unsent());
    }

    fn end(number: usize) -> StretchEnd {
        StretchEnd { oid: 1, run: "run".into(), reading: Reading { number, look: Look::All } }
    }

    #[test]
    fn a_stretch_is_done_once_all_that_was_sent_before_its_end_is_durable() {
        let mut ledger = Ledger::default();
        assert_eq!(ledger.stretch_ended(end(0)).ended, [end(0)], "nothing is under way");
        ledger.push(entry(&[1, 2], None));
        assert!(ledger.stretch_ended(end(1)).is_empty());
        assert!(ledger.split_unsent());
        accept_all(&mut ledger);
        let first = ledger.entries[0].group.ticket;
        assert_eq!(ledger.durable(first).ended, []);
        assert_eq!(ledger.durable(first + 1).ended, [end(1)]);
        ledger.push(entry(&[1], None));
        ledger.push(entry(&[2], None));
        assert!(ledger.stretch_ended(end(2)).is_empty());
        ledger.remove_table(2);
        assert!(ledger.drop_empty().is_empty());
        accept_all(&mut ledger);
        assert_eq!(ledger.durable(99).ended, [end(2)], "the group that it stood behind went");
    }

    #[test]
    fn a_stretch_is_not_done_when_the_instance_that_took_its_rows_has_ended() {
        let mut ledger = Ledger::default();
        ledger.push(entry(&[2], None));
        assert!(ledger.stretch_ended(end(0)).is_empty());
        accept_all(&mut ledger);
        ledger.unsend();
        accept_all(&mut ledger);
        let settled = ledger.durable(1);
        assert_eq!((settled.rows, settled.ended), (0, vec![]));
        assert!(ledger.is_empty());
    }

    #[test]
    fn how_far_a_group_with_nothing_left_brought_its_table_is_not_forgotten() {
        let mut ledger = Ledger::default();
        ledger.push(entry(&[1], Some(20)));
        ledger.push(entry(&[2], Some(30)));
        for entry in &mut ledger.entries {
            entry.group.batches.clear();
        }
        ledger.push(entry(&[3], Some(40)));
        let settled = ledger.drop_empty();
        assert_eq!(settled.checkpoint, Some(Lsn(30)));
        assert_eq!(settled.positions.iter().map(|(oid, _)| *oid).collect::<Vec<_>>(), [1, 2]);
    }

    #[test]
    fn a_group_out_of_quarantine_says_so_when_it_is_durable() {
        let mut ledger = Ledger::default();
        ledger.push(entry(&[1], Some(20)));
        ledger.push(Entry { clears: Clears::All, refused: vec![RowAt { batch: 0, row: 3 }], ..entry(&[2], None) });
        accept_all(&mut ledger);
        let settled = ledger.durable(2);
        assert_eq!(settled.clearing.len(), 1);
        assert!(settled.clearing[0].all);
        assert_eq!(settled.clearing[0].refused, [RowAt { batch: 0, row: 3 }]);
    }
}
