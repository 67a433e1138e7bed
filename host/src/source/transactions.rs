//! Transactions that the server sends before they end (protocol 2) are put together
//! here: whoever reads the stream sees each as one ordinary transaction, at its commit,
//! and nothing of those that are taken back (P4).
//!
//! Twice the server does not say enough. Messages (`pg_logical_emit_message`) carry the
//! transaction's own id, not the subtransaction's that wrote them, so that a schema
//! change may have been taken back. And it says nothing
//! when a subtransaction of more than 4096 changes is taken back that it had to spill,
//! before the stream's start or in the middle of a TOASTed row: so those that were not
//! taken back are looked up before their transaction is told. Where it is not clear
//! what committed, the server is left to tell the transaction whole.

mod outcome;
mod stored;
#[cfg(test)]
mod tests;

use std::collections::{BTreeSet, HashMap};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use bytes::{Buf, Bytes};
use tokio::time::Instant;

pub(super) use self::outcome::all_committed;
use self::stored::{Record, Replay, Stored};
use super::errors;
use super::pgoutput::{self, StreamCommit, StreamMessage, StreamedChange};
use super::trigger::DDL_PREFIX;
use super::wal::XLogData;
use crate::error::{Error, Result};
use crate::position::Lsn;

/// Bytes of messages in memory, of all open transactions together.
const BUFFERED: usize = 16 << 20;
/// While the disk is full, the write is tried again so often.
const TRY_EVERY: Duration = Duration::from_millis(500);
/// Bytes that stand behind the body of a stored RELATION: its number.
const NUMBER: usize = 8;

/// Bounds of [`Transactions`].
#[derive(Clone, Copy, Debug)]
pub struct TransactionOptions {
    /// Bytes of all files.
    pub limit_bytes: u64,
    /// Subtransactions that have not been taken back, of all open transactions together.
    pub subtransactions: usize,
    /// How long a full disk is waited for. Then the files give way, and the server
    /// keeps what is open.
    pub patience: Duration,
}

impl Default for TransactionOptions {
    fn default() -> Self {
        TransactionOptions { limit_bytes: 64 << 30, subtransactions: 1 << 20, patience: Duration::from_secs(60) }
    }
}

/// Where open transactions are kept. Cheap to clone; outlives connections, what is in
/// it does not.
#[derive(Clone)]
pub struct Transactions(Arc<Shared>);

struct Shared {
    directory: PathBuf,
    options: TransactionOptions,
    /// Bytes of all files.
    bytes: AtomicU64,
    /// Bytes of messages in memory.
    buffered: AtomicUsize,
    /// Subtransactions that are remembered.
    subtransactions: AtomicUsize,
    /// The next connection leaves open transactions to the server.
    give_way: AtomicBool,
}

impl Shared {
    fn has_room(&self, more: u64) -> Result<()> {
        let bytes = self.bytes.load(Ordering::Acquire);
        if bytes + more <= self.options.limit_bytes {
            return Ok(());
        }
        let limit = self.options.limit_bytes;
        Err(Error::transient("transactions.limit", format!("open transactions have {bytes} bytes in files, the limit is {limit} bytes"))
            .next("None needed: the server keeps them until they end. Set `streaming = false` in [source] if it is always so."))
    }

    /// Whether one more subtransaction can be remembered.
    fn has_memory(&self, xid: u32) -> Result<()> {
        let limit = self.options.subtransactions;
        if self.subtransactions.load(Ordering::Relaxed) < limit {
            return Ok(());
        }
        Err(Error::transient(
            "transactions.limit",
            format!("open transactions have {limit} subtransactions, the last one is in transaction {xid}, and there is no memory for more"),
        )
        .next("None needed: the server keeps them until they end."))
    }
}

impl Transactions {
    /// Takes a directory of its own, and deletes what an earlier process left there:
    /// the server sends it again.
    ///
    /// # Errors
    /// `transactions.io`: the directory cannot be made, or not be emptied.
    pub fn open(directory: &Path, options: TransactionOptions) -> Result<Transactions> {
        let empty = || -> io::Result<()> {
            std::fs::create_dir_all(directory)?;
            for entry in std::fs::read_dir(directory)? {
                std::fs::remove_file(entry?.path())?;
            }
            Ok(())
        };
        empty().map_err(|error| io_error("empty", directory, &error))?;
        Ok(Transactions(Arc::new(Shared {
            directory: directory.to_owned(),
            options,
            bytes: AtomicU64::new(0),
            buffered: AtomicUsize::new(0),
            subtransactions: AtomicUsize::new(0),
            give_way: AtomicBool::new(false),
        })))
    }

    /// Bytes of all files.
    pub fn bytes(&self) -> u64 {
        self.0.bytes.load(Ordering::Acquire)
    }

    /// Bytes of messages in memory.
    pub fn buffered(&self) -> usize {
        self.0.buffered.load(Ordering::Relaxed)
    }

    /// Whether the next connection is to leave open transactions to the server.
    pub(super) fn gives_way(&self) -> bool {
        self.0.give_way.load(Ordering::Acquire)
    }

    /// For a connection that has begun; `streams`: with protocol 2.
    pub(super) fn assembler(&self, streams: bool) -> Option<Assembler> {
        self.0.give_way.store(false, Ordering::Release);
        streams.then(|| Assembler {
            shared: self.0.clone(),
            open: HashMap::new(),
            inside: None,
            replay: None,
            relations: HashMap::new(),
            relations_seen: 0,
            full_since: None,
        })
    }
}

/// What became of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Taken {
    /// It is for whoever reads the stream.
    Passed,
    /// It was kept, or said what to do with what was kept.
    Kept,
}

/// A transaction that is told.
struct Replaying {
    replay: Replay,
    commit: StreamCommit,
    /// XLogData of STREAM COMMIT: where the server was.
    end: Lsn,
    next: Telling,
    /// Tables whose RELATION here is older than what others were told meanwhile.
    outdated: BTreeSet<u32>,
}

/// What is told next.
enum Telling {
    /// Nothing before it is known that these subtransactions committed.
    Asking(Vec<u32>),
    Begin,
    Changes,
    Relations,
    Commit,
}

/// Puts the transactions of one connection together. Dropping it drops them.
pub(super) struct Assembler {
    shared: Arc<Shared>,
    /// By the id of the top transaction.
    open: HashMap<u32, Stored>,
    /// The one whose block is being sent.
    inside: Option<Stored>,
    replay: Option<Replaying>,
    /// While transactions are open: the RELATION of each table that was sent last, of
    /// those that count, and its number. The server will not say it again.
    relations: HashMap<u32, (u64, Bytes)>,
    relations_seen: u64,
    full_since: Option<Instant>,
}

impl Assembler {
    /// Whether a block of an open transaction is being sent.
    pub(super) fn is_inside(&self) -> bool {
        self.inside.is_some()
    }

    /// Takes what the server sent. After an error of class transient it can be given
    /// again.
    pub(super) fn take(&mut self, data: &XLogData) -> Result<Taken> {
        if self.inside.is_none() && !self.concerns(&data.body) {
            return Ok(Taken::Passed);
        }
        match pgoutput::stream_message(&data.body)? {
            None if self.inside.is_some() => self.keep(data)?,
            None => {
                self.note_relation(&data.body);
                return Ok(Taken::Passed);
            }
            Some(StreamMessage::Start { xid, first }) => self.start(xid, first)?,
            Some(StreamMessage::Stop) => self.stop()?,
            Some(StreamMessage::Abort { xid, subxid }) => self.abort(xid, subxid),
            Some(StreamMessage::Commit(commit)) => self.commit(commit, data)?,
        }
        Ok(Taken::Kept)
    }

    /// Outside of a block: whether there is anything to do about a message.
    fn concerns(&self, body: &[u8]) -> bool {
        match body.first() {
            Some(b'R') => !self.open.is_empty(),
            tag => tag.is_some_and(|tag| pgoutput::STREAM_TAGS.contains(tag)),
        }
    }

    fn start(&mut self, xid: u32, first: bool) -> Result<()> {
        if self.inside.is_some() {
            return Err(errors::protocol("a stream block inside another one"));
        }
        let known = self.open.remove(&xid);
        let stored = match known {
            Some(stored) if !first => stored,
            // The server crashed before it could take the old one back.
            Some(old) => {
                drop(old);
                Stored::new(self.shared.clone(), xid)
            }
            None if first => Stored::new(self.shared.clone(), xid),
            None => return Err(errors::protocol(format_args!("transaction {xid} goes on without a beginning"))),
        };
        self.inside = Some(stored);
        Ok(())
    }

    fn stop(&mut self) -> Result<()> {
        let Some(mut stored) = self.inside.take() else {
            return Err(errors::protocol("the end of a stream block outside of one"));
        };
        stored.rest();
        self.open.insert(stored.xid, stored);
        Ok(())
    }

    fn keep(&mut self, data: &XLogData) -> Result<()> {
        let change = pgoutput::streamed_change(&data.body)?;
        if is_ddl(&change) {
            return Err(unclear(change.xid.unwrap_or_default(), "it changes a schema"));
        }
        self.make_room(data.body.len() + stored::HEAD + NUMBER)?;
        let Some(stored) = &mut self.inside else { return Ok(()) };
        let number = (self.relations_seen + 1).to_le_bytes();
        let is_relation = change.tag == b'R';
        stored.append(&Record {
            xid: change.xid.unwrap_or(stored.xid),
            start: data.start,
            tag: change.tag,
            rest: change.rest,
            extra: if is_relation { &number } else { &[] },
        })?;
        self.relations_seen += u64::from(is_relation);
        if self.full_since.take().is_some() {
            tracing::info!("there is room for open transactions again: the stream goes on");
        }
        Ok(())
    }

    /// Moves the largest buffers to the disk until a message of `size` bytes fits.
    fn make_room(&mut self, size: usize) -> Result<()> {
        while self.shared.buffered.load(Ordering::Relaxed) + size > BUFFERED {
            let all = self.open.values_mut().chain(&mut self.inside);
            let Some(largest) = all.max_by_key(|stored| stored.buffered()).filter(|stored| stored.buffered() > 0)
            else {
                return Ok(());
            };
            largest.spill()?;
        }
        Ok(())
    }

    fn abort(&mut self, xid: u32, subxid: u32) {
        if xid == subxid {
            self.open.remove(&xid);
            self.forget_relations();
        } else if let Some(stored) = self.open.get_mut(&xid) {
            stored.cut(subxid);
        }
    }

    fn commit(&mut self, commit: StreamCommit, data: &XLogData) -> Result<()> {
        let Some(stored) = self.open.remove(&commit.xid) else {
            return Err(errors::protocol(format_args!("transaction {} ends without a beginning", commit.xid)));
        };
        let asked = stored.subtransactions();
        self.replay = Some(Replaying {
            replay: stored.replay(),
            commit,
            end: data.end,
            next: if asked.is_empty() { Telling::Begin } else { Telling::Asking(asked) },
            outdated: BTreeSet::new(),
        });
        Ok(())
    }

    /// Before anything more is told or taken: of which subtransactions
    /// [`Assembler::answer`] has to be told the outcome.
    pub(super) fn asks(&self) -> Option<&[u32]> {
        match &self.replay {
            Some(Replaying { next: Telling::Asking(xids), .. }) => Some(xids),
            _ => None,
        }
    }

    /// All of them committed, or not.
    pub(super) fn answer(&mut self, committed: bool) -> Result<()> {
        let Some(telling) = &mut self.replay else { return Ok(()) };
        if !committed {
            return Err(unclear(telling.commit.xid, "the server did not say that a part of it was taken back"));
        }
        telling.next = Telling::Begin;
        Ok(())
    }

    /// The next message of a transaction that has committed, as if it had been sent
    /// at its commit.
    pub(super) fn told(&mut self) -> Result<Option<XLogData>> {
        let told = self.tell();
        if let Err(error) = &told {
            self.give_way(error);
        }
        told
    }

    fn tell(&mut self) -> Result<Option<XLogData>> {
        let Some(telling) = &mut self.replay else { return Ok(None) };
        let (commit, end) = (telling.commit, telling.end);
        loop {
            match telling.next {
                Telling::Asking(_) => return Ok(None),
                Telling::Begin => {
                    telling.next = Telling::Changes;
                    return Ok(Some(XLogData { start: commit.commit, end, body: commit.begin_body() }));
                }
                Telling::Changes => match telling.replay.next()? {
                    Some((start, mut body)) => {
                        if body.first() == Some(&b'R') {
                            let number = body.split_off(body.len().saturating_sub(NUMBER)).get_u64_le();
                            tell_relation(&mut self.relations, &mut telling.outdated, number, &body);
                        }
                        return Ok(Some(XLogData { start, end, body }));
                    }
                    None => telling.next = Telling::Relations,
                },
                // The server does not repeat what it said to others while this was open.
                Telling::Relations => match telling.outdated.pop_first() {
                    Some(oid) => {
                        if let Some((_, body)) = self.relations.get(&oid) {
                            return Ok(Some(XLogData { start: commit.commit, end, body: body.clone() }));
                        }
                    }
                    None => telling.next = Telling::Commit,
                },
                Telling::Commit => {
                    self.replay = None;
                    self.forget_relations();
                    return Ok(Some(XLogData { start: commit.end, end, body: commit.commit_body() }));
                }
            }
        }
    }

    /// A RELATION that was sent for a transaction that is not streamed.
    fn note_relation(&mut self, body: &Bytes) {
        self.relations_seen += 1;
        if let Some(oid) = relation_oid(body) {
            self.relations.insert(oid, (self.relations_seen, Bytes::copy_from_slice(body)));
        }
    }

    fn forget_relations(&mut self) {
        if self.open.is_empty() {
            self.relations.clear();
        }
    }

    /// What to do about an error: until when to wait before the message is given
    /// again, or nothing, for it ends the connection.
    pub(super) fn wait_after(&mut self, error: &Error) -> Option<Instant> {
        if !error.code().starts_with("transactions.") {
            return None;
        }
        let now = Instant::now();
        if error.code() == "transactions.full-disk" {
            let since = *self.full_since.get_or_insert_with(|| {
                tracing::error!(code = error.code(), next = error.next_step(), "the stream waits: {error}");
                now
            });
            if now - since < self.shared.options.patience {
                return Some(now + TRY_EVERY);
            }
        }
        self.give_way(error);
        None
    }

    /// The next connection leaves open transactions to the server, so that it does not
    /// meet what this one met.
    fn give_way(&self, error: &Error) {
        tracing::warn!(
            code = error.code(),
            "over the next connection the server keeps transactions until they end: {error}"
        );
        self.shared.give_way.store(true, Ordering::Release);
    }
}

/// A RELATION is told: was another one sent after it, to somebody who came first?
fn tell_relation(relations: &mut HashMap<u32, (u64, Bytes)>, outdated: &mut BTreeSet<u32>, number: u64, body: &Bytes) {
    let Some(oid) = relation_oid(body) else { return };
    if relations.get(&oid).is_some_and(|(newest, _)| *newest > number) {
        outdated.insert(oid);
    } else {
        outdated.remove(&oid);
        // A copy: a slice would keep the block that it was read in.
        relations.insert(oid, (number, Bytes::copy_from_slice(body)));
    }
}

fn relation_oid(body: &[u8]) -> Option<u32> {
    body.get(1..)?.first_chunk().map(|oid| u32::from_be_bytes(*oid))
}

/// A message of our trigger: flags, LSN, prefix with a zero behind it.
fn is_ddl(change: &StreamedChange<'_>) -> bool {
    let prefix = change.rest.get(9..).unwrap_or_default();
    change.tag == b'M' && prefix.strip_prefix(DDL_PREFIX.as_bytes()).is_some_and(|rest| rest.first() == Some(&0))
}

fn unclear(xid: u32, why: &str) -> Error {
    Error::transient("transactions.unclear", format!("transaction {xid}: {why}"))
        .next("None needed: the server tells the transaction again, whole.")
}

fn io_error(what: &str, path: &Path, error: &io::Error) -> Error {
    let message = format!("cannot {what} {}: {error}", path.display());
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            Error::transient("transactions.full-disk", message)
                .next("Make room on the file system of the state directory; the host goes on by itself.")
        }
        _ => Error::transient("transactions.io", message).next(
            "Check the state directory and its file system. Nothing is lost: the server sends the transaction again.",
        ),
    }
}
