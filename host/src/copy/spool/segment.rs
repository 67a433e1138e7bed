//! Files of the spool: names, header, and the frames in them.
//!
//! A segment is a header and frames, back to back. All numbers are little-endian.
//!
//! | header | | frame | |
//! |---|---|---|---|
//! | magic | 8 | length of the body | 4 |
//! | sequence number | 8 | CRC-32 of all but itself | 4 |
//! | commit of the transaction it begins inside, or 0 | 8 | kind | 1 |
//! | CRC-32 | 4 | table, xid | 4 + 4 |
//! | | | commit, committed at, row, ordinal | 4 × 8 |
//! | | | body | |

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;

use super::{FrameHead, FrameKind};
use crate::error::{Error, Result};
use crate::position::Lsn;

/// Bytes of a segment before its first frame.
pub(super) const HEADER: u64 = 28;
/// Bytes of a frame before its body.
pub(super) const HEAD: usize = 49;
const MAGIC: &[u8; 8] = b"TGSPOOL1";
const CHUNK: usize = 256 * 1024;

/// Kinds of frames on disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// What a caller appended.
    Data(FrameKind),
    /// A source transaction is complete: `commit`, and its end in `row`.
    Commit,
    /// Everything before segment `commit`, offset `row` was durable when this was written.
    Synced,
    /// Frames before this one with a commit at or beyond `commit` do not count.
    Rewind,
}

impl Kind {
    fn byte(self) -> u8 {
        match self {
            Kind::Data(FrameKind::Relation) => 1,
            Kind::Data(FrameKind::Change) => 2,
            Kind::Data(FrameKind::Schema) => 3,
            Kind::Commit => 4,
            Kind::Synced => 5,
            Kind::Rewind => 6,
        }
    }

    fn from_byte(byte: u8) -> Option<Kind> {
        Some(match byte {
            1 => Kind::Data(FrameKind::Relation),
            2 => Kind::Data(FrameKind::Change),
            3 => Kind::Data(FrameKind::Schema),
            4 => Kind::Commit,
            5 => Kind::Synced,
            6 => Kind::Rewind,
            _ => return None,
        })
    }
}

/// A place in the log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Point {
    pub segment: u64,
    pub offset: u64,
}

/// The first bytes of a frame.
pub(super) struct Head {
    pub head: FrameHead,
    pub kind: Kind,
    pub length: usize,
    crc: u32,
}

/// A frame's bytes before its body.
pub(super) fn encode(head: &FrameHead, kind: Kind, body: &[u8]) -> [u8; HEAD] {
    let mut bytes = [0; HEAD];
    // A message of the replication protocol has a length of 31 bits.
    bytes[0..4].copy_from_slice(&(body.len() as u32).to_le_bytes());
    bytes[8] = kind.byte();
    bytes[9..13].copy_from_slice(&head.table.to_le_bytes());
    bytes[13..17].copy_from_slice(&head.xid.to_le_bytes());
    bytes[17..25].copy_from_slice(&head.commit.0.to_le_bytes());
    bytes[25..33].copy_from_slice(&head.committed_at.to_le_bytes());
    bytes[33..41].copy_from_slice(&head.row.0.to_le_bytes());
    bytes[41..49].copy_from_slice(&head.ordinal.to_le_bytes());
    let mut hasher = head_hasher(&bytes);
    hasher.update(body);
    bytes[4..8].copy_from_slice(&hasher.finalize().to_le_bytes());
    bytes
}

fn head_hasher(bytes: &[u8; HEAD]) -> crc32fast::Hasher {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(&bytes[0..4]);
    hasher.update(&bytes[8..]);
    hasher
}

fn number<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut out = [0; N];
    out.copy_from_slice(&bytes[at..at + N]);
    out
}

/// Reads a frame's head; nothing is checked but that its kind exists.
pub(super) fn decode(bytes: &[u8; HEAD]) -> Option<Head> {
    let kind = Kind::from_byte(bytes[8])?;
    let head = FrameHead {
        table: u32::from_le_bytes(number(bytes, 9)),
        xid: u32::from_le_bytes(number(bytes, 13)),
        commit: Lsn(u64::from_le_bytes(number(bytes, 17))),
        committed_at: i64::from_le_bytes(number(bytes, 25)),
        row: Lsn(u64::from_le_bytes(number(bytes, 33))),
        ordinal: u64::from_le_bytes(number(bytes, 41)),
    };
    let length = u32::from_le_bytes(number(bytes, 0)) as usize;
    Some(Head { head, kind, length, crc: u32::from_le_bytes(number(bytes, 4)) })
}

/// The frame at the beginning of `bytes`.
pub(super) enum Parsed {
    /// A whole frame whose checksum is right.
    Frame(Head),
    /// More bytes are needed: this many in all.
    Short(usize),
    /// Not a frame.
    Bad,
}

/// Reads and checks the frame at the beginning of `bytes`.
pub(super) fn parse(bytes: &[u8]) -> Parsed {
    let Some((first, rest)) = bytes.split_first_chunk::<HEAD>() else {
        return Parsed::Short(HEAD);
    };
    let Some(head) = decode(first) else { return Parsed::Bad };
    if rest.len() < head.length {
        return Parsed::Short(HEAD + head.length);
    }
    let mut hasher = head_hasher(first);
    hasher.update(&rest[..head.length]);
    if hasher.finalize() == head.crc { Parsed::Frame(head) } else { Parsed::Bad }
}

/// The file of a segment.
pub(super) fn path(directory: &Path, sequence: u64) -> PathBuf {
    directory.join(format!("{sequence:020}.spool"))
}

/// Sequence numbers of the segments in a directory, in order.
pub(super) fn list(directory: &Path) -> Result<Vec<u64>> {
    let mut sequences = Vec::new();
    for entry in std::fs::read_dir(directory).map_err(|error| failed("list", directory, &error))? {
        let name = entry.map_err(|error| failed("list", directory, &error))?.file_name();
        let number = name.to_str().and_then(|name| name.strip_suffix(".spool"));
        sequences.extend(number.and_then(|number| number.parse::<u64>().ok()));
    }
    sequences.sort_unstable();
    Ok(sequences)
}

/// Makes a segment that begins inside the transaction that commits at `inside`
/// (0: between two), durable with its name.
pub(super) fn create(directory: &Path, sequence: u64, inside: Lsn) -> Result<Arc<File>> {
    let path = path(directory, sequence);
    let make = || {
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(true).open(&path)?;
        file.write_all_at(&header(sequence, inside), 0)?;
        file.sync_data()?;
        sync_directory(directory)?;
        Ok(file)
    };
    make().map(Arc::new).map_err(|error: io::Error| failed("create", &path, &error))
}

fn header(sequence: u64, inside: Lsn) -> [u8; HEADER as usize] {
    let mut bytes = [0; HEADER as usize];
    bytes[0..8].copy_from_slice(MAGIC);
    bytes[8..16].copy_from_slice(&sequence.to_le_bytes());
    bytes[16..24].copy_from_slice(&inside.0.to_le_bytes());
    let crc = crc32fast::hash(&bytes[..24]);
    bytes[24..].copy_from_slice(&crc.to_le_bytes());
    bytes
}

/// Makes creations and deletions in a directory durable.
pub(super) fn sync_directory(directory: &Path) -> io::Result<()> {
    File::open(directory)?.sync_all()
}

/// An error of the file system as the spool reports it.
pub(super) fn failed(what: &str, path: &Path, error: &io::Error) -> Error {
    let message = format!("spool: cannot {what} {}: {error}", path.display());
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Error::transient("spool.full-disk", message)
            .next("Make room on the file system of the state directory; the host goes on by itself."),
        _ => Error::permanent("spool.io", message)
            .next("Check the state directory and its file system, then start the host again."),
    }
}

/// Damage that is not the torn end of the log.
pub(super) fn corrupt(path: &Path, offset: u64) -> Error {
    let message = format!("spool: {} is damaged at offset {offset}", path.display());
    Error::permanent("spool.corrupt", message).next(
        "Restore the file from the storage below it, or move the spool directory away and resync the tables \
         that wait in it.",
    )
}

/// Reads a segment's frames from its beginning, one after the other, and checks them.
pub(super) struct Scanner {
    file: Arc<File>,
    length: u64,
    offset: u64,
    buffer: Vec<u8>,
    /// Where `buffer` begins in the file.
    start: u64,
}

/// What a scanner found.
pub(super) enum Scanned {
    /// A frame, where it begins and ends, and a relation's body.
    Frame { head: Head, start: u64, end: u64, relation: Option<Bytes> },
    /// The end of the file, behind a whole frame.
    End,
    /// Something that is not a whole frame, at [`Scanner::offset`].
    Bad,
}

impl Scanner {
    /// Begins behind the header of a file of `length` bytes.
    pub(super) fn new(file: Arc<File>, length: u64) -> Scanner {
        Scanner { file, length, offset: HEADER, buffer: Vec::new(), start: HEADER }
    }

    /// Where the next frame begins.
    pub(super) fn offset(&self) -> u64 {
        self.offset
    }

    /// The next frame.
    pub(super) fn next(&mut self) -> io::Result<Scanned> {
        let start = self.offset;
        if start >= self.length {
            return Ok(Scanned::End);
        }
        let mut need = HEAD;
        loop {
            if self.length - start < need as u64 {
                return Ok(Scanned::Bad);
            }
            let bytes = self.bytes(need)?;
            match parse(bytes) {
                Parsed::Frame(head) => {
                    let body = &bytes[HEAD..HEAD + head.length];
                    let relation = (head.kind == Kind::Data(FrameKind::Relation)).then(|| Bytes::copy_from_slice(body));
                    let end = start + (HEAD + head.length) as u64;
                    self.offset = end;
                    return Ok(Scanned::Frame { head, start, end, relation });
                }
                Parsed::Short(more) => need = more,
                Parsed::Bad => return Ok(Scanned::Bad),
            }
        }
    }

    /// At least `need` bytes (which the file has) from the offset on.
    fn bytes(&mut self, need: usize) -> io::Result<&[u8]> {
        let skip = (self.offset - self.start) as usize;
        if self.buffer.len() < skip + need {
            let left = self.length - self.offset;
            self.buffer.resize(need.max(CHUNK).min(left as usize), 0);
            self.file.read_exact_at(&mut self.buffer, self.offset)?;
            self.start = self.offset;
            return Ok(&self.buffer);
        }
        Ok(&self.buffer[skip..])
    }
}

/// Opens a segment and reads its header: its length, and the commit it begins
/// inside; `None` where the header is not whole.
pub(super) fn open(directory: &Path, sequence: u64) -> Result<(Arc<File>, u64, Option<Lsn>)> {
    let path = path(directory, sequence);
    let read = || {
        let file = OpenOptions::new().read(true).write(true).open(&path)?;
        let length = file.metadata()?.len();
        let mut bytes = [0; HEADER as usize];
        if length < HEADER {
            return Ok((file, length, None));
        }
        file.read_exact_at(&mut bytes, 0)?;
        let inside = Lsn(u64::from_le_bytes(number(&bytes, 16)));
        let whole = bytes == header(sequence, inside);
        Ok((file, length, whole.then_some(inside)))
    };
    let (file, length, inside) = read().map_err(|error: io::Error| failed("open", &path, &error))?;
    Ok((Arc::new(file), length, inside))
}

/// Whether a mark behind `bad` says that what stands at `bad` was durable once: then
/// it is damage, else the torn end of a log that was not synced.
pub(super) fn was_durable(file: &File, length: u64, bad: Point) -> io::Result<bool> {
    let mut buffer = vec![0; CHUNK];
    let mut offset = bad.offset;
    while length.saturating_sub(offset) >= HEAD as u64 {
        let size = (length - offset).min(CHUNK as u64) as usize;
        file.read_exact_at(&mut buffer[..size], offset)?;
        let found = buffer[..size].windows(HEAD).any(|window| is_mark_beyond(window, bad));
        if found {
            return Ok(true);
        }
        offset += (size - HEAD + 1) as u64;
    }
    Ok(false)
}

fn is_mark_beyond(window: &[u8], bad: Point) -> bool {
    if window[8] != Kind::Synced.byte() || window[0..4] != [0; 4] {
        return false;
    }
    match parse(window) {
        Parsed::Frame(mark) => Point { segment: mark.head.commit.0, offset: mark.head.row.0 } > bad,
        _ => false,
    }
}
