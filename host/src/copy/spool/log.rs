//! The state behind the spool's lock: the segments, the open transaction, and what
//! each table has.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;

use bytes::Bytes;

use super::index::{Place, Run, TableIndex};
use super::segment::{self, HEAD, HEADER, Kind, Point};
use super::{FrameHead, FrameKind, SpoolOptions};
use crate::error::{Error, Result};
use crate::position::Lsn;

/// Appended bytes that wait in memory for one write.
const BUFFER: usize = 256 * 1024;

/// A file of the log and what is in it.
pub(super) struct Segment {
    pub file: Arc<File>,
    /// Bytes, those in the buffer included.
    pub length: u64,
    /// Tables with committed frames here that are not released.
    pub tables: HashMap<u32, TableIndex>,
}

/// A relation as it was appended.
type Relation = (FrameHead, Bytes);

/// The last frame of a table. At one place a schema frame may stand before a change:
/// the version that begins with the row.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct End {
    place: Place,
    change: bool,
}

impl End {
    fn of(head: &FrameHead, kind: FrameKind) -> End {
        End { place: (head.commit, head.ordinal), change: kind == FrameKind::Change }
    }
}

/// What the log remembers of a table.
#[derive(Default)]
struct Table {
    relation: Option<Relation>,
    /// The segment in which `relation` was written last.
    written_in: Option<u64>,
    end: Option<End>,
    released: Option<Place>,
}

/// What the open transaction adds to a table.
#[derive(Default)]
struct OpenTable {
    /// A relation that differs from the committed one.
    relation: Option<Relation>,
    written_in: Option<u64>,
    end: Option<End>,
    /// Frames by segment, in order.
    frames: Vec<(u64, TableIndex)>,
}

/// The source transaction whose commit has not come yet.
#[derive(Default)]
pub(super) struct Transaction {
    /// Of its frames; none before the first.
    pub commit: Option<Lsn>,
    tables: HashMap<u32, OpenTable>,
}

/// See the module.
pub(super) struct Log {
    directory: PathBuf,
    options: SpoolOptions,
    /// Never empty; the last one is written to.
    segments: BTreeMap<u64, Segment>,
    /// Bytes of all segments but the last.
    closed_bytes: u64,
    /// The end of the last segment that is not in its file yet.
    buffer: Vec<u8>,
    /// Bytes of the last segment that are in its file.
    written: u64,
    /// Behind the last commit frame.
    committed: Point,
    /// Up to here the log is durable; never beyond `committed`.
    synced: Point,
    open: Transaction,
    tables: HashMap<u32, Table>,
    rewinds: Vec<Rewind>,
    /// Why nothing can be trusted any more.
    failed: Option<String>,
}

/// A point of the log where it went back: what stands before it with a commit at or
/// beyond `to` comes again behind it.
#[derive(Clone, Copy)]
pub(super) struct Rewind {
    at: Point,
    to: Lsn,
}

impl Rewind {
    /// Whether a frame at `point` does not count any more.
    pub(super) fn undoes(&self, point: Point, commit: Lsn) -> bool {
        point < self.at && commit >= self.to
    }
}

/// A part of a file to read from.
pub(super) struct Range {
    pub file: Arc<File>,
    pub segment: u64,
    pub start: u64,
    pub end: u64,
}

impl Log {
    /// A log over segments that `recover` fills.
    pub(super) fn new(directory: PathBuf, options: SpoolOptions) -> Log {
        Log {
            directory,
            options,
            segments: BTreeMap::new(),
            closed_bytes: 0,
            buffer: Vec::new(),
            written: HEADER,
            committed: Point::default(),
            synced: Point::default(),
            open: Transaction::default(),
            tables: HashMap::new(),
            rewinds: Vec::new(),
            failed: None,
        }
    }

    // ---- appending -----------------------------------------------------------------

    /// See [`super::Spool::append`].
    pub(super) fn append(&mut self, head: FrameHead, kind: FrameKind, body: &[u8]) -> Result<()> {
        self.usable()?;
        if kind == FrameKind::Relation {
            self.note_relation(head, body);
            return Ok(());
        }
        if self.open.commit.is_some_and(|commit| commit != head.commit) {
            let message =
                format!("spool: a frame of the transaction that commits at {} came inside another one", head.commit);
            return Err(Error::permanent("spool.order", message).next("Report this: it is a fault of the host."));
        }
        let end = End::of(&head, kind);
        if self.last(head.table).is_some_and(|last| end <= last) {
            return Ok(());
        }
        if self.last_segment().length >= self.options.segment_bytes {
            self.rotate()?;
        }
        let repeated = self.relation_to_write(head.table);
        if kind == FrameKind::Change && !self.has_relation(head.table) {
            let message = format!("spool: a change of table {} came before its relation", head.table);
            return Err(Error::permanent("spool.no-relation", message).next("Report this: it is a fault of the host."));
        }
        let relation = repeated.as_ref().map_or(0, |(_, body)| HEAD + body.len());
        self.has_room((relation + HEAD + body.len()) as u64)?;
        if let Some((head, body)) = repeated {
            self.write_data(&head, FrameKind::Relation, &body)?;
        }
        self.write_data(&head, kind, body)?;
        self.open.commit = Some(head.commit);
        crate::failpoint::reached("spool.appended");
        self.open.tables.entry(head.table).or_default().end = Some(end);
        Ok(())
    }

    /// A relation is written only before the next frame of its table.
    fn note_relation(&mut self, head: FrameHead, body: &[u8]) {
        let open = self.open.tables.entry(head.table).or_default();
        let committed = self.tables.get(&head.table).and_then(|table| table.relation.as_ref());
        if open.relation.as_ref().or(committed).is_some_and(|(_, known)| known == body) {
            return;
        }
        open.relation = Some((head, Bytes::copy_from_slice(body)));
        open.written_in = None;
    }

    fn has_relation(&self, table: u32) -> bool {
        let open = self.open.tables.get(&table).is_some_and(|open| open.relation.is_some());
        open || self.tables.get(&table).is_some_and(|table| table.relation.is_some())
    }

    /// The relation in force for a table, where the last segment does not have it yet.
    fn relation_to_write(&self, table: u32) -> Option<Relation> {
        let open = self.open.tables.get(&table);
        let committed = self.tables.get(&table);
        let written = match open {
            Some(open) if open.relation.is_some() || open.written_in.is_some() => open.written_in,
            _ => committed.and_then(|table| table.written_in),
        };
        if written == Some(self.last_sequence()) {
            return None;
        }
        let changed = open.and_then(|open| open.relation.as_ref());
        changed.or_else(|| committed?.relation.as_ref()).cloned()
    }

    /// The last frame of a table, the open transaction's included.
    fn last(&self, table: u32) -> Option<End> {
        let open = self.open.tables.get(&table).and_then(|open| open.end);
        open.or_else(|| self.tables.get(&table)?.end)
    }

    fn has_room(&self, more: u64) -> Result<()> {
        let bytes = self.bytes();
        if bytes + more <= self.options.limit_bytes {
            return Ok(());
        }
        let message = format!("spool: {bytes} bytes are waiting, the limit is {} bytes", self.options.limit_bytes);
        Err(Error::transient("spool.limit", message)
            .next("Wait until the tables that hold it have caught up, or raise the limit."))
    }

    /// Writes a frame of a table and notes where it stands.
    fn write_data(&mut self, head: &FrameHead, kind: FrameKind, body: &[u8]) -> Result<()> {
        let run = self.write(head, Kind::Data(kind), body)?;
        let sequence = self.last_sequence();
        let open = self.open.tables.entry(head.table).or_default();
        open.note(sequence, run, head, kind);
        Ok(())
    }

    /// Writes a frame at the end of the log. After an error nothing was written.
    fn write(&mut self, head: &FrameHead, kind: Kind, body: &[u8]) -> Result<Run> {
        let bytes = segment::encode(head, kind, body);
        let size = HEAD + body.len();
        if self.buffer.len() + size > BUFFER {
            self.flush()?;
        }
        let start = self.last_segment().length;
        if size > BUFFER {
            let file = &self.last_segment().file;
            let result = file.write_all_at(&bytes, start).and_then(|()| file.write_all_at(body, start + HEAD as u64));
            result.map_err(|error| self.failed_io("write", self.last_sequence(), &error))?;
            self.written = start + size as u64;
        } else {
            self.buffer.extend_from_slice(&bytes);
            self.buffer.extend_from_slice(body);
        }
        let end = start + size as u64;
        self.last_segment_mut().length = end;
        Ok(Run { start, end })
    }

    /// Moves the buffer into the file.
    fn flush(&mut self) -> Result<()> {
        if self.buffer.is_empty() {
            return Ok(());
        }
        let result = self.last_segment().file.write_all_at(&self.buffer, self.written);
        result.map_err(|error| self.failed_io("write", self.last_sequence(), &error))?;
        self.written += self.buffer.len() as u64;
        self.buffer.clear();
        Ok(())
    }

    /// Begins a new segment; the one before is durable then, so that only the last
    /// one can be torn.
    fn rotate(&mut self) -> Result<()> {
        self.flush()?;
        let sequence = self.last_sequence();
        if let Err(error) = self.last_segment().file.sync_data() {
            return Err(self.poison("sync", sequence, &error));
        }
        self.synced = self.committed;
        crate::failpoint::reached("spool.rotating");
        let inside = self.open.commit.unwrap_or(Lsn::ZERO);
        let file = segment::create(&self.directory, sequence + 1, inside)?;
        self.insert(sequence + 1, file, HEADER);
        crate::failpoint::reached("spool.rotated");
        if self.open.commit.is_none() {
            self.committed = Point { segment: sequence + 1, offset: HEADER };
            self.synced = self.committed;
            self.drop_released_everywhere()?;
        }
        Ok(())
    }

    // ---- ends of transactions --------------------------------------------------------

    /// See [`super::Spool::commit`].
    pub(super) fn commit(&mut self, commit: Lsn, end: Lsn) -> Result<()> {
        self.usable()?;
        if let Some(open) = self.open.commit {
            if open != commit {
                let message = format!("spool: the commit at {commit} ends the transaction that commits at {open}");
                return Err(Error::permanent("spool.order", message).next("Report this: it is a fault of the host."));
            }
            let head = FrameHead { table: 0, commit, committed_at: 0, xid: 0, row: end, ordinal: 0 };
            self.write(&head, Kind::Commit, &[])?;
            crate::failpoint::reached("spool.committed");
        }
        let rotated = self.committed.segment != self.last_sequence();
        if self.open.commit.is_some() {
            self.committed = self.end_point();
        }
        self.publish();
        if rotated { self.drop_released_everywhere() } else { Ok(()) }
    }

    /// Makes what the open transaction did part of the log.
    fn publish(&mut self) {
        for (oid, open) in std::mem::take(&mut self.open).tables {
            let table = self.tables.entry(oid).or_default();
            if let Some(relation) = open.relation {
                table.relation = Some(relation);
                table.written_in = None;
            }
            table.written_in = open.written_in.or(table.written_in);
            table.end = open.end.or(table.end);
            for (sequence, index) in open.frames {
                if let Some(segment) = self.segments.get_mut(&sequence) {
                    segment.tables.entry(oid).or_default().extend(index);
                }
            }
        }
    }

    /// See [`super::Spool::rollback`].
    pub(super) fn rollback(&mut self) {
        self.open = Transaction::default();
        if let Err(error) = self.cut() {
            self.fail(error.message());
        }
    }

    /// Cuts what stands behind the last commit.
    fn cut(&mut self) -> Result<()> {
        while self.last_sequence() > self.committed.segment {
            let sequence = self.last_sequence();
            self.delete(sequence)?;
            self.buffer.clear();
            self.written = self.last_segment().length;
        }
        let Point { segment, offset } = self.committed;
        if offset >= self.written {
            self.buffer.truncate((offset - self.written) as usize);
        } else {
            self.buffer.clear();
            let result = self.last_segment().file.set_len(offset);
            result.map_err(|error| self.failed_io("cut", segment, &error))?;
            self.written = offset;
        }
        self.last_segment_mut().length = offset;
        Ok(())
    }

    /// See [`super::Spool::rewind`].
    pub(super) fn rewind(&mut self, to: Lsn) -> Result<()> {
        self.usable()?;
        self.rollback();
        self.usable()?;
        if !self.tables.values().any(|table| table.end.is_some_and(|end| end.place.0 >= to)) {
            return Ok(());
        }
        let head = FrameHead { table: 0, commit: to, committed_at: 0, xid: 0, row: Lsn::ZERO, ordinal: 0 };
        let run = self.write(&head, Kind::Rewind, &[])?;
        crate::failpoint::reached("spool.rewound");
        self.note_rewind(Rewind { at: Point { segment: self.last_sequence(), offset: run.start }, to });
        self.committed = self.end_point();
        Ok(())
    }

    fn note_rewind(&mut self, rewind: Rewind) {
        let before = Lsn(rewind.to.0.saturating_sub(1));
        for table in self.tables.values_mut() {
            if let Some(end) = table.end.as_mut().filter(|end| end.place.0 >= rewind.to) {
                *end = End { place: (before, u64::MAX), change: true };
            }
        }
        self.rewinds.push(rewind);
    }

    /// Where the log went back, oldest first.
    pub(super) fn rewinds(&self) -> &[Rewind] {
        &self.rewinds
    }

    // ---- durability ------------------------------------------------------------------

    /// What [`super::Spool::sync`] has to sync and up to where that makes the log
    /// durable; `None`: nothing.
    pub(super) fn prepare_sync(&mut self) -> Result<Option<(Arc<File>, Point)>> {
        self.usable()?;
        if self.synced >= self.committed {
            return Ok(None);
        }
        self.flush()?;
        crate::failpoint::reached("spool.flushed");
        // The commit is in the last segment: a rotation would have synced it.
        Ok(Some((self.last_segment().file.clone(), self.committed)))
    }

    /// Notes the outcome of a sync, and marks it in the log, so that damage before it
    /// is told from a torn end.
    pub(super) fn note_synced(&mut self, result: std::io::Result<()>, point: Point) -> Result<()> {
        if let Err(error) = result {
            return Err(self.poison("sync", point.segment, &error));
        }
        self.synced = self.synced.max(point);
        let (commit, row) = (Lsn(point.segment), Lsn(point.offset));
        let mark = FrameHead { table: 0, commit, committed_at: 0, xid: 0, row, ordinal: 0 };
        // What was asked for is durable; the mark may come later or never.
        if self.write(&mark, Kind::Synced, &[]).and_then(|_| self.flush()).is_err() {
            tracing::debug!("spool: the mark of a sync was not written");
        }
        Ok(())
    }

    // ---- reading ---------------------------------------------------------------------

    /// Committed frames of a table at or behind `from`, in a segment that has some
    /// beyond `after`.
    pub(super) fn range(&mut self, table: u32, from: Point, after: Option<Place>) -> Result<Option<Range>> {
        self.usable()?;
        let last = self.last_sequence();
        for (sequence, segment) in self.segments.range(from.segment..) {
            let Some(index) = segment.tables.get(&table) else { continue };
            if after.is_some_and(|after| index.last() <= after) {
                continue;
            }
            let offset = if *sequence == from.segment { from.offset } else { 0 };
            let Some(run) = index.from(offset) else { continue };
            let range = Range { file: segment.file.clone(), segment: *sequence, start: run.start, end: run.end };
            if *sequence == last && run.end > self.written {
                self.flush()?;
            }
            return Ok(Some(range));
        }
        Ok(None)
    }

    /// See [`super::Spool::end`].
    pub(super) fn end(&self, table: u32) -> Option<Place> {
        self.tables.get(&table)?.end.map(|end| end.place)
    }

    /// See [`super::Spool::tables`].
    pub(super) fn tables(&self) -> Vec<u32> {
        let entries = self.segments.values().flat_map(|segment| &segment.tables);
        let mut tables: Vec<u32> =
            entries.filter(|(oid, index)| self.is_needed(**oid, index)).map(|(oid, _)| *oid).collect();
        tables.sort_unstable();
        tables.dedup();
        tables
    }

    /// See [`super::Spool::bytes`].
    pub(super) fn bytes(&self) -> u64 {
        self.closed_bytes + self.last_segment().length
    }

    /// The file of a segment, for messages.
    pub(super) fn path(&self, sequence: u64) -> PathBuf {
        segment::path(&self.directory, sequence)
    }

    // ---- giving back -----------------------------------------------------------------

    /// See [`super::Spool::release`].
    pub(super) fn release(&mut self, table: u32, through: Place) -> Result<()> {
        self.usable()?;
        let known = self.tables.entry(table).or_default();
        known.released = known.released.max(Some(through));
        self.drop_released(table, through);
        self.delete_empty()?;
        let worth_it = self.last_segment().length >= (self.options.segment_bytes / 4).max(HEADER + 1);
        if worth_it && self.open.commit.is_none() && self.nothing_needed() {
            self.rotate()?;
        }
        Ok(())
    }

    /// See [`super::Spool::forget`].
    pub(super) fn forget(&mut self, table: u32) -> Result<()> {
        self.usable()?;
        self.tables.remove(&table);
        self.open.tables.remove(&table);
        for segment in self.segments.values_mut() {
            segment.tables.remove(&table);
        }
        self.delete_empty()
    }

    fn nothing_needed(&self) -> bool {
        let mut entries = self.segments.values().flat_map(|segment| &segment.tables);
        !entries.any(|(oid, index)| self.is_needed(*oid, index))
    }

    fn is_needed(&self, table: u32, index: &TableIndex) -> bool {
        Some(index.last()) > self.tables.get(&table).and_then(|table| table.released)
    }

    /// Takes a table out of the segments that hold nothing of it beyond `through`. The
    /// last segment keeps it: it is still written to, and its relation counts there.
    fn drop_released(&mut self, table: u32, through: Place) {
        for (_, segment) in self.segments.range_mut(..self.committed.segment) {
            match segment.tables.get(&table) {
                Some(index) if index.last() > through => break,
                Some(_) => drop(segment.tables.remove(&table)),
                None => {}
            }
        }
    }

    /// The same for all tables, when segments were closed.
    fn drop_released_everywhere(&mut self) -> Result<()> {
        let released: Vec<(u32, Place)> =
            self.tables.iter().filter_map(|(oid, table)| Some((*oid, table.released?))).collect();
        for (table, through) in released {
            self.drop_released(table, through);
        }
        self.delete_empty()
    }

    fn delete_empty(&mut self) -> Result<()> {
        let closed = self.segments.range(..self.committed.segment);
        let empty: Vec<u64> =
            closed.filter(|(_, segment)| segment.tables.is_empty()).map(|(sequence, _)| *sequence).collect();
        for sequence in empty {
            // It says of the ones before it what does not count there.
            let first = self.segments.first_key_value().is_none_or(|(first, _)| *first == sequence);
            if first || !self.rewinds.iter().any(|rewind| rewind.at.segment == sequence) {
                self.delete(sequence)?;
            }
        }
        Ok(())
    }

    fn delete(&mut self, sequence: u64) -> Result<()> {
        match std::fs::remove_file(self.path(sequence)) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(self.failed_io("delete", sequence, &error))
            }
            _ => {
                crate::failpoint::reached("spool.deleted");
                self.segments.remove(&sequence);
                let first = self.segments.first_key_value().map_or(u64::MAX, |(first, _)| *first);
                self.rewinds.retain(|rewind| rewind.at.segment >= first);
                self.recount();
                Ok(())
            }
        }
    }

    // ---- small things ----------------------------------------------------------------

    /// Adds a segment behind all others, `length` bytes of it in the file.
    fn insert(&mut self, sequence: u64, file: Arc<File>, length: u64) {
        self.segments.insert(sequence, Segment { file, length, tables: HashMap::new() });
        self.written = length;
        self.recount();
    }

    fn recount(&mut self) {
        self.closed_bytes = self.segments.values().rev().skip(1).map(|segment| segment.length).sum();
    }

    fn last_sequence(&self) -> u64 {
        self.segments.last_key_value().map_or(0, |(sequence, _)| *sequence)
    }

    fn last_segment(&self) -> &Segment {
        self.segments.last_key_value().map(|(_, segment)| segment).unwrap_or_else(|| unreachable!("never empty"))
    }

    fn last_segment_mut(&mut self) -> &mut Segment {
        self.segments.last_entry().map(|entry| entry.into_mut()).unwrap_or_else(|| unreachable!("never empty"))
    }

    fn end_point(&self) -> Point {
        Point { segment: self.last_sequence(), offset: self.last_segment().length }
    }

    fn failed_io(&self, what: &str, sequence: u64, error: &std::io::Error) -> Error {
        segment::failed(what, &self.path(sequence), error)
    }

    /// After a failed sync the kernel may have dropped what it could not write: only a
    /// new start, from the files, tells what is there.
    fn poison(&mut self, what: &str, sequence: u64, error: &std::io::Error) -> Error {
        let error = self.failed_io(what, sequence, error);
        self.fail(error.message());
        error
    }

    /// Ends all use of the log, for a reason that only a new start can mend.
    pub(super) fn fail(&mut self, message: &str) {
        self.failed.get_or_insert_with(|| message.to_owned());
    }

    fn usable(&self) -> Result<()> {
        match &self.failed {
            None => Ok(()),
            Some(message) => Err(Error::permanent("spool.io", message.clone())
                .next("Check the state directory and its file system, then start the host again.")),
        }
    }
}

impl OpenTable {
    fn note(&mut self, sequence: u64, run: Run, head: &FrameHead, kind: FrameKind) {
        if self.frames.last().is_none_or(|(last, _)| *last != sequence) {
            self.frames.push((sequence, TableIndex::default()));
        }
        let place = (kind != FrameKind::Relation).then_some((head.commit, head.ordinal));
        if let Some((_, index)) = self.frames.last_mut() {
            index.push(run, place);
        }
        if kind == FrameKind::Relation {
            self.written_in = Some(sequence);
        }
    }
}

impl Drop for Log {
    fn drop(&mut self) {
        // Nothing promised this; it saves reading it again from the source.
        if self.failed.is_none() && self.flush().is_err() {
            tracing::debug!("spool: the end of the log was not written");
        }
    }
}

mod recover;
