//! Reading one table's frames.

use std::os::unix::fs::FileExt;

use bytes::{Buf, Bytes};

use super::index::Place;
use super::log::{Range, Rewind};
use super::segment::{self, HEAD, Kind, Parsed, Point};
use super::{Frame, FrameKind, Spool};
use crate::error::Result;
use crate::memory::LARGE_ROW_BYTES;

/// Bytes read at once, at least (a row is small) and at most (memory).
const CHUNK: std::ops::RangeInclusive<usize> = 64 * 1024..=1024 * 1024;

/// A cursor over the frames of one table; see [`Spool::reader`].
///
/// Several may read at a time. It holds no lock and no file between two calls.
pub struct SpoolReader {
    spool: Spool,
    table: u32,
    after: Option<Place>,
    position: Option<Place>,
    next: Point,
    /// The relation in force at `next`.
    relation: Option<Frame>,
    /// The body of the last relation that was returned.
    returned: Option<Bytes>,
    /// Bytes of the next frame, which is large and was not read.
    large: Option<usize>,
    /// It may be.
    has_room: bool,
}

impl SpoolReader {
    pub(super) fn new(spool: Spool, table: u32, after: Option<Place>) -> SpoolReader {
        let next = Point::default();
        SpoolReader {
            spool,
            table,
            after,
            position: after,
            next,
            relation: None,
            returned: None,
            large: None,
            has_room: false,
        }
    }

    /// The next frames, whole, of committed transactions: bodies of about `max_bytes`,
    /// at least one frame. Empty: at the end for now, or before a frame that is
    /// [`SpoolReader::large`].
    ///
    /// A relation comes once before the frames that it decodes. After an error the
    /// reader stands where it stood.
    ///
    /// # Errors
    /// `spool.corrupt`: the file is damaged; `spool.io`.
    pub fn read(&mut self, max_bytes: usize) -> Result<Vec<Frame>> {
        let has_room = std::mem::take(&mut self.has_room);
        self.large = None;
        loop {
            let (range, rewinds) = {
                let mut log = self.spool.lock();
                let range = log.range(self.table, self.next, self.after)?;
                if range.is_none() {
                    // Everything visible was returned, or does not count.
                    self.position = self.position.max(log.end(self.table));
                }
                (range, log.rewinds().to_vec())
            };
            let Some(range) = range else { return Ok(Vec::new()) };
            let mut need = max_bytes.clamp(*CHUNK.start(), *CHUNK.end());
            let chunk = loop {
                let chunk = self.chunk(&range, need)?;
                match segment::parse(&chunk) {
                    Parsed::Frame(_) => break chunk,
                    Parsed::Short(whole) if whole as u64 <= range.end - range.start => {
                        if whole > LARGE_ROW_BYTES && !has_room {
                            self.large = Some(whole);
                            return Ok(Vec::new());
                        }
                        need = whole;
                    }
                    _ => return Err(self.corrupt(range.segment, range.start)),
                }
            };
            let frames = self.take(&range, chunk, max_bytes, &rewinds)?;
            if !frames.is_empty() {
                return Ok(frames);
            }
        }
    }

    /// The next frame has so many bytes, and is not read before there is room for it.
    pub fn large(&self) -> Option<usize> {
        self.large
    }

    /// There is room for it.
    pub fn make_room(&mut self) {
        self.has_room = true;
    }

    /// Commit and ordinal of the last change or schema frame that was returned; before
    /// the first one where the reader began. At the end, the table's end.
    pub fn position(&self) -> Option<(crate::position::Lsn, u64)> {
        self.position
    }

    fn chunk(&self, range: &Range, size: usize) -> Result<Bytes> {
        let mut buffer = vec![0; size.min((range.end - range.start) as usize)];
        range.file.read_exact_at(&mut buffer, range.start).map_err(|error| {
            let path = self.spool.lock().path(range.segment);
            segment::failed("read", &path, &error)
        })?;
        Ok(buffer.into())
    }

    /// Takes whole frames off the beginning of a range.
    fn take(&mut self, range: &Range, mut chunk: Bytes, max_bytes: usize, rewinds: &[Rewind]) -> Result<Vec<Frame>> {
        let mut frames = Vec::new();
        let mut bytes = 0;
        let mut offset = range.start;
        while bytes < max_bytes.max(1) {
            let head = match segment::parse(&chunk) {
                Parsed::Frame(head) => head,
                Parsed::Short(_) => break,
                // The frames before it are whole: it is met again, and reported, then.
                Parsed::Bad if !frames.is_empty() => break,
                Parsed::Bad => return Err(self.corrupt(range.segment, offset)),
            };
            let point = Point { segment: range.segment, offset };
            let undone = rewinds.iter().any(|rewind| rewind.undoes(point, head.head.commit));
            chunk.advance(HEAD);
            let body = chunk.split_to(head.length);
            offset += (HEAD + head.length) as u64;
            if let Kind::Data(kind) = head.kind
                && head.head.table == self.table
                && (!undone || kind == FrameKind::Relation)
            {
                bytes += body.len().max(1);
                self.push(Frame { head: head.head, kind, body }, &mut frames);
            }
        }
        self.next = Point { segment: range.segment, offset };
        Ok(frames)
    }

    fn push(&mut self, frame: Frame, frames: &mut Vec<Frame>) {
        if frame.kind == FrameKind::Relation {
            self.relation = Some(frame);
            return;
        }
        let place = (frame.head.commit, frame.head.ordinal);
        if self.after.is_some_and(|after| place <= after) {
            return;
        }
        if let Some(relation) = &self.relation
            && self.returned.as_ref() != Some(&relation.body)
        {
            self.returned = Some(relation.body.clone());
            frames.push(relation.clone());
        }
        self.position = Some(place);
        frames.push(frame);
    }

    fn corrupt(&self, sequence: u64, offset: u64) -> crate::error::Error {
        segment::corrupt(&self.spool.lock().path(sequence), offset)
    }
}
