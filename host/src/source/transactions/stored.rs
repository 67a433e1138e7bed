//! What was sent so far of one transaction that has not ended: in memory while it is
//! small, then in a file that goes with it.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytes::{Buf, Bytes, BytesMut};

use super::{Shared, io_error};
use crate::error::{Error, Result};
use crate::position::Lsn;

/// Bytes that wait in memory for one write; what stays below never touches the disk.
const BUFFER: usize = 1 << 20;
/// Bytes read back at once.
const BLOCK: usize = 256 << 10;
/// The memory that a longer message was read into goes with it.
const LONG: usize = 4 << 20;
/// Before each message: its length, its checksum, its position, its tag.
pub(super) const HEAD: usize = 17;
/// What the checksum does not cover: length and checksum.
const UNCHECKED: usize = 8;
/// The server sends no message above 1 GiB.
const LARGEST: usize = 1 << 30;

/// One message, without the transaction id that protocol 2 puts behind the tag.
pub(super) struct Record<'a> {
    /// The (sub)transaction that it belongs to.
    pub xid: u32,
    /// Position of its WAL record.
    pub start: Lsn,
    pub tag: u8,
    pub rest: &'a [u8],
    /// Ours, behind `rest`.
    pub extra: &'a [u8],
}

/// See the module. Dropping it deletes the file.
pub(super) struct Stored {
    shared: Arc<Shared>,
    pub xid: u32,
    /// Bytes that are in the file.
    written: u64,
    has_file: bool,
    /// The messages behind them.
    buffer: Vec<u8>,
    /// The first message of each subtransaction, in order.
    firsts: Vec<(u64, u32)>,
    /// Where it stands, by id.
    known: HashMap<u32, u64>,
    /// Whose message came last.
    last: u32,
}

impl Stored {
    pub(super) fn new(shared: Arc<Shared>, xid: u32) -> Stored {
        Stored {
            shared,
            xid,
            written: 0,
            has_file: false,
            buffer: Vec::new(),
            firsts: Vec::new(),
            known: HashMap::new(),
            last: xid,
        }
    }

    /// Bytes of messages in memory.
    pub(super) fn buffered(&self) -> usize {
        self.buffer.len()
    }

    /// Adds a message. After an error nothing was added, and it can be tried again.
    pub(super) fn append(&mut self, record: &Record<'_>) -> Result<()> {
        let size = HEAD + record.rest.len() + record.extra.len();
        let is_new = record.xid != self.last && record.xid != self.xid && !self.known.contains_key(&record.xid);
        if is_new {
            self.shared.has_memory(self.xid)?;
        }
        if self.buffer.len() + size > BUFFER {
            self.flush()?;
        }
        let at = self.end();
        let head = head(record);
        if size > BUFFER {
            self.write(&[&head, record.rest, record.extra])?;
        } else {
            self.buffer.extend_from_slice(&head);
            self.buffer.extend_from_slice(record.rest);
            self.buffer.extend_from_slice(record.extra);
            self.shared.buffered.fetch_add(size, Ordering::Relaxed);
        }
        if is_new {
            self.shared.subtransactions.fetch_add(1, Ordering::Relaxed);
            self.firsts.push((at, record.xid));
            self.known.insert(record.xid, at);
        }
        self.last = record.xid;
        Ok(())
    }

    /// Subtransactions that were not taken back.
    pub(super) fn subtransactions(&self) -> Vec<u32> {
        self.known.keys().copied().collect()
    }

    /// Takes a subtransaction back: its messages and all behind them. Subtransactions
    /// are a stack, so that what came after its first message is its own, or of one
    /// that goes with it.
    pub(super) fn cut(&mut self, subxid: u32) {
        let Some(at) = self.known.get(&subxid).copied() else { return };
        while let Some((_, xid)) = self.firsts.pop_if(|(first, _)| *first >= at) {
            self.known.remove(&xid);
            self.shared.subtransactions.fetch_sub(1, Ordering::Relaxed);
        }
        // The next message's subtransaction is looked up.
        self.last = self.xid;
        if at >= self.written {
            let keep = (at - self.written) as usize;
            self.shared.buffered.fetch_sub(self.buffer.len() - keep, Ordering::Relaxed);
            self.buffer.truncate(keep);
            return;
        }
        self.clear();
        // A file that stays longer costs room until it is written over, nothing else.
        let cut = OpenOptions::new().write(true).open(self.path()).and_then(|file| file.set_len(at));
        if let Err(error) = cut {
            tracing::debug!(xid = self.xid, "the file of a transaction was not cut: {error}");
        }
        self.shared.bytes.fetch_sub(self.written - at, Ordering::AcqRel);
        self.written = at;
    }

    /// Moves the buffer into the file, and gives its memory back.
    pub(super) fn spill(&mut self) -> Result<()> {
        self.flush()?;
        self.buffer = Vec::new();
        Ok(())
    }

    /// No more comes for now.
    pub(super) fn rest(&mut self) {
        self.buffer.shrink_to_fit();
    }

    /// Reads it back.
    pub(super) fn replay(self) -> Replay {
        Replay { stored: self, file: None, at: 0, block: BytesMut::new() }
    }

    fn end(&self) -> u64 {
        self.written + self.buffer.len() as u64
    }

    fn path(&self) -> PathBuf {
        self.shared.directory.join(self.xid.to_string())
    }

    fn flush(&mut self) -> Result<()> {
        if self.buffer.is_empty() {
            return Ok(());
        }
        let buffer = std::mem::take(&mut self.buffer);
        let written = self.write(&[&buffer]);
        self.buffer = buffer;
        written?;
        self.clear();
        Ok(())
    }

    fn clear(&mut self) {
        self.shared.buffered.fetch_sub(self.buffer.len(), Ordering::Relaxed);
        self.buffer.clear();
    }

    /// Writes at the file's end. It is opened each time: there may be more transactions
    /// than files that a process may hold open.
    fn write(&mut self, parts: &[&[u8]]) -> Result<()> {
        let size = parts.iter().map(|part| part.len() as u64).sum();
        self.shared.has_room(size)?;
        let path = self.path();
        self.has_file = true;
        let written = self.written;
        let write = || -> io::Result<()> {
            let file = OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(&path)?;
            let mut at = written;
            for part in parts {
                file.write_all_at(part, at)?;
                at += part.len() as u64;
            }
            Ok(())
        };
        write().map_err(|error| io_error("write", &path, &error))?;
        self.shared.bytes.fetch_add(size, Ordering::AcqRel);
        self.written += size;
        Ok(())
    }
}

impl Drop for Stored {
    fn drop(&mut self) {
        self.clear();
        self.shared.subtransactions.fetch_sub(self.known.len(), Ordering::Relaxed);
        self.shared.bytes.fetch_sub(self.written, Ordering::AcqRel);
        if !self.has_file {
            return;
        }
        if let Err(error) = std::fs::remove_file(self.path())
            && error.kind() != io::ErrorKind::NotFound
        {
            // The next start deletes it.
            tracing::warn!(xid = self.xid, "the file of a transaction that has ended is not deleted: {error}");
        }
    }
}

fn head(record: &Record<'_>) -> [u8; HEAD] {
    let mut head = [0; HEAD];
    // Below the server's limit of a message, which has 32 bits itself.
    let length = (1 + record.rest.len() + record.extra.len()) as u32;
    head[..4].copy_from_slice(&length.to_le_bytes());
    head[UNCHECKED..16].copy_from_slice(&record.start.0.to_le_bytes());
    head[16] = record.tag;
    let mut checksum = crc32fast::Hasher::new();
    checksum.update(&head[UNCHECKED..]);
    checksum.update(record.rest);
    checksum.update(record.extra);
    head[4..UNCHECKED].copy_from_slice(&checksum.finalize().to_le_bytes());
    head
}

/// A transaction that is read back, a block at a time.
pub(super) struct Replay {
    stored: Stored,
    file: Option<File>,
    /// Bytes of the file that were read.
    at: u64,
    /// Read and not yet taken.
    block: BytesMut,
}

impl Replay {
    /// The next message: its position, and its body with the extra bytes at its end.
    pub(super) fn next(&mut self) -> Result<Option<(Lsn, Bytes)>> {
        if !self.has(HEAD)? {
            return if self.block.is_empty() { Ok(None) } else { Err(self.damaged()) };
        }
        let mut front = &self.block[..];
        let size = HEAD - 1 + front.get_u32_le() as usize;
        let checksum = front.get_u32_le();
        if size > LARGEST || !self.has(size)? {
            return Err(self.damaged());
        }
        let mut record = self.block.split_to(size).freeze();
        if size > LONG {
            // What is left would keep the memory of this one, which would be used again.
            self.block = BytesMut::from(&self.block[..]);
        }
        record.advance(UNCHECKED);
        if crc32fast::hash(&record) != checksum {
            return Err(self.damaged());
        }
        let start = Lsn(record.get_u64_le());
        Ok(Some((start, record)))
    }

    /// Reads until the block has `wanted` bytes; false: there are not so many.
    fn has(&mut self, wanted: usize) -> Result<bool> {
        while self.block.len() < wanted {
            let left = self.stored.written - self.at;
            if left > 0 {
                let size = (wanted - self.block.len()).max(BLOCK).min(usize::try_from(left).unwrap_or(usize::MAX));
                self.read(size).map_err(|error| io_error("read", &self.stored.path(), &error))?;
            } else if self.stored.buffer.is_empty() {
                return Ok(false);
            } else {
                self.block.extend_from_slice(&self.stored.buffer);
                self.stored.clear();
            }
        }
        Ok(true)
    }

    fn read(&mut self, size: usize) -> io::Result<()> {
        let file = match &mut self.file {
            Some(file) => file,
            none => none.insert(File::open(self.stored.path())?),
        };
        let have = self.block.len();
        self.block.resize(have + size, 0);
        file.read_exact_at(&mut self.block[have..], self.at)?;
        self.at += size as u64;
        Ok(())
    }

    fn damaged(&self) -> Error {
        Error::transient("transactions.corrupt", format!("{} is damaged", self.stored.path().display())).next(
            "Check the file system of the state directory. Nothing is lost: the server sends the transaction again.",
        )
    }
}
