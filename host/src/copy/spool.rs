//! The spool: a local, segmented log of changes that may not be delivered yet (P11).
//!
//! One log for all tables, in stream order, with an index per table in memory: about
//! 16 bytes for each place where a table's frames begin again behind more than a page
//! of other tables' frames. A source transaction is visible to readers from its commit
//! on, and is kept whole or not at all. What was synced survives a crash; what was not
//! is cut at the next open, behind the last transaction that is whole.

use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};

use bytes::Bytes;

use crate::error::Result;
use crate::position::Lsn;

mod count;
mod index;
mod log;
mod reader;
mod segment;
#[cfg(test)]
mod tests;

pub use count::{Waiting, count};
pub use reader::SpoolReader;

/// Sizes of a spool.
#[derive(Clone, Copy, Debug)]
pub struct SpoolOptions {
    /// Where a file ends and the next one begins: what is given back to the file
    /// system is whole files. A single frame may make one larger.
    pub segment_bytes: u64,
    /// Bytes of all files above which nothing is appended (`spool.limit`).
    pub limit_bytes: u64,
}

impl Default for SpoolOptions {
    fn default() -> SpoolOptions {
        SpoolOptions { segment_bytes: 64 << 20, limit_bytes: 16 << 30 }
    }
}

/// Where a frame comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameHead {
    /// `pg_class.oid` of the table.
    pub table: u32,
    /// LSN of the commit record (`BEGIN.final_lsn`).
    pub commit: Lsn,
    /// Microseconds since 1970 UTC.
    pub committed_at: i64,
    /// The transaction's id.
    pub xid: u32,
    /// The row's own WAL position (start of the XLogData message).
    pub row: Lsn,
    /// [`crate::position::row_ordinal`]; 0 for relation frames.
    pub ordinal: u64,
}

/// What a frame's body is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FrameKind {
    /// A RELATION message of pgoutput: how the bytes behind it are decoded.
    Relation,
    /// An INSERT, UPDATE, DELETE or TRUNCATE message of pgoutput.
    Change,
    /// Nothing: the version (commit, row) of the schema history begins here.
    Schema,
}

/// One message of the stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frame {
    /// Where it comes from.
    pub head: FrameHead,
    /// What the body is.
    pub kind: FrameKind,
    /// The raw message.
    pub body: Bytes,
}

/// A handle on the spool in a directory; clones share it. All calls block on file I/O.
#[derive(Clone)]
pub struct Spool(Arc<Mutex<log::Log>>);

impl Spool {
    /// Opens the spool in a directory and makes it if there is none.
    ///
    /// Reads every file, cuts a torn end behind the last whole transaction, and makes
    /// the rest durable. Tables that were forgotten may be back until their last file
    /// goes.
    ///
    /// # Errors
    /// `spool.corrupt`: a file is damaged otherwise; `spool.io`, `spool.full-disk`.
    pub fn open(directory: &Path, options: SpoolOptions) -> Result<Spool> {
        Ok(Spool(Arc::new(Mutex::new(log::Log::open(directory, options)?))))
    }

    /// Appends a message to the open source transaction; the first one opens it. The
    /// order of calls is the order of the stream.
    ///
    /// A change or schema frame at or below the table's end (commit, ordinal) is
    /// ignored: the server sends it again after a reconnect. A schema frame and then a
    /// change may share a place. A relation is remembered and written once before the
    /// next frame of its table in each file; whoever begins to spool a table appends
    /// the relation in force first. Nothing is durable before [`Spool::sync`].
    ///
    /// # Errors
    /// `spool.limit` and `spool.full-disk` are transient: the frame was not appended,
    /// and the same call may be made again. `spool.no-relation`, `spool.order`,
    /// `spool.io`.
    pub fn append(&self, head: FrameHead, kind: FrameKind, body: &[u8]) -> Result<()> {
        self.lock().append(head, kind, body)
    }

    /// Ends the source transaction that commits at `commit` (its end LSN is `end`): its
    /// frames become visible to readers. Cheap where nothing was appended.
    ///
    /// # Errors
    /// As [`Spool::append`], without the limit.
    pub fn commit(&self, commit: Lsn, end: Lsn) -> Result<()> {
        self.lock().commit(commit, end)
    }

    /// Cuts the frames of the open transaction: the connection was lost inside it. Does
    /// nothing between two. If the files cannot be cut, every later call fails.
    pub fn rollback(&self) {
        self.lock().rollback();
    }

    /// Goes back: frames with a commit at or beyond `to` do not count any more, for the
    /// stream begins there and sends them again. Every start does so: what was under way
    /// to a destination when the process died is in no frame, but comes with the stream,
    /// and a table whose end lies beyond would not take it.
    ///
    /// # Errors
    /// As [`Spool::append`], without the limit.
    pub fn rewind(&self, to: Lsn) -> Result<()> {
        self.lock().rewind(to)
    }

    /// Makes all committed frames durable; does nothing where they are. Appending and
    /// reading go on meanwhile.
    ///
    /// # Errors
    /// `spool.full-disk` (transient), and `spool.io`, after which every call fails.
    pub fn sync(&self) -> Result<()> {
        let Some((file, point)) = self.lock().prepare_sync()? else { return Ok(()) };
        let result = file.sync_data();
        crate::failpoint::reached("spool.synced");
        self.lock().note_synced(result, point)
    }

    /// Commit and ordinal of the last visible change or schema frame of a table, the
    /// released ones included as long as this process knows of them.
    pub fn end(&self, table: u32) -> Option<(Lsn, u64)> {
        self.lock().end(table)
    }

    /// Reads a table's frames beyond `after`, or all; the first one is the relation in
    /// force there. Frames appended later come as well.
    pub fn reader(&self, table: u32, after: Option<(Lsn, u64)>) -> SpoolReader {
        SpoolReader::new(self.clone(), table, after)
    }

    /// Gives back the frames of a table at or below `through`: files in which nothing
    /// is needed are deleted. Holds until the spool is opened the next time.
    ///
    /// # Errors
    /// `spool.io`, `spool.full-disk`: the file system would not.
    pub fn release(&self, table: u32, through: (Lsn, u64)) -> Result<()> {
        self.lock().release(table, through)
    }

    /// Gives back all frames of a table, and forgets its relation and its end.
    ///
    /// # Errors
    /// `spool.io`: a file cannot be deleted.
    pub fn forget(&self, table: u32) -> Result<()> {
        self.lock().forget(table)
    }

    /// Bytes of all files.
    pub fn bytes(&self) -> u64 {
        self.lock().bytes()
    }

    /// Tables that have visible frames beyond what was released, by oid.
    pub fn tables(&self) -> Vec<u32> {
        self.lock().tables()
    }

    fn lock(&self) -> MutexGuard<'_, log::Log> {
        self.0.lock().unwrap_or_else(|poisoned| {
            let mut log = poisoned.into_inner();
            log.fail("spool: a thread panicked while it changed the spool");
            log
        })
    }
}
