//! Decoding of pgoutput, protocol version 1, and of what version 2 puts around it
//! ("Logical Replication Message Formats" in the PostgreSQL manual). Nothing is copied
//! but names; every length is checked.

use bytes::{BufMut, Bytes, BytesMut};

use super::errors;
use crate::error::Result;
use crate::position::Lsn;
use crate::schema::table::TableName;

/// Microseconds from 1970-01-01 to 2000-01-01, PostgreSQL's epoch.
const EPOCH: i64 = 946_684_800_000_000;

/// One message of the stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message {
    /// A transaction begins: it committed already.
    Begin(Begin),
    /// It ends.
    Commit(Commit),
    /// How the bytes of a table's rows behind it are read (P2).
    Relation(Relation),
    /// A new row.
    Insert {
        /// `pg_class.oid`.
        oid: u32,
        /// The row.
        new: Tuple,
    },
    /// A changed row.
    Update {
        /// `pg_class.oid`.
        oid: u32,
        /// Sent if the identity changed, or under FULL.
        old: Option<OldTuple>,
        /// The row.
        new: Tuple,
    },
    /// A removed row.
    Delete {
        /// `pg_class.oid`.
        oid: u32,
        /// What is sent of it.
        old: OldTuple,
    },
    /// Tables were emptied.
    Truncate {
        /// `pg_class.oid` of each.
        oids: Vec<u32>,
        /// CASCADE was written.
        cascade: bool,
        /// RESTART IDENTITY was written.
        restart_identity: bool,
    },
    /// `pg_logical_emit_message`.
    Logical {
        /// Part of the transaction, or sent at once.
        transactional: bool,
        /// End of its record (P3).
        lsn: Lsn,
        /// Who it is for.
        prefix: Bytes,
        /// Any bytes; anyone may have written them (P25).
        content: Bytes,
    },
    /// A row of an INSERT, UPDATE or DELETE that was not read, for it is too large.
    Oversized {
        /// `pg_class.oid`.
        oid: u32,
        /// Bytes of the message.
        bytes: usize,
        /// How many would have been read.
        limit: usize,
        /// The first cells of what was sent, as far as they were read.
        beginning: Beginning,
    },
    /// The transaction came from another server.
    Origin,
    /// A type's name: we know types from the catalog.
    Type,
}

/// BEGIN.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Begin {
    /// LSN of the commit record.
    pub final_lsn: Lsn,
    /// Commit time, microseconds since 1970-01-01 UTC.
    pub committed_at: i64,
    /// Transaction id.
    pub xid: u32,
}

/// COMMIT.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Commit {
    /// LSN of the commit record.
    pub commit: Lsn,
    /// End of it: what is confirmed (P6).
    pub end: Lsn,
}

/// RELATION.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Relation {
    /// `pg_class.oid`.
    pub oid: u32,
    /// Its name at that moment.
    pub name: TableName,
    /// `pg_class.relreplident`.
    pub identity: u8,
    /// The published columns, in the order of every tuple behind it.
    pub columns: Vec<RelationColumn>,
}

/// A column of [`Relation`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RelationColumn {
    /// Part of the replica identity.
    pub key: bool,
    /// Its name at that moment.
    pub name: String,
    /// `pg_attribute.atttypid`.
    pub type_oid: u32,
    /// `pg_attribute.atttypmod`.
    pub typmod: i32,
}

/// What is sent of a row that was changed or removed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OldTuple {
    /// All of it (`O`, identity FULL), or the identity alone (`K`, other cells null).
    pub whole: bool,
    /// The cells.
    pub tuple: Tuple,
}

/// A row as it was sent: a column count and cells. Its cells are checked as they
/// are read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tuple(Bytes);

/// The beginning of a row that was not read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Beginning(Bytes);

impl Beginning {
    /// The cells that are whole.
    pub fn cells(&self) -> impl Iterator<Item = Cell<'_>> {
        // Which of the rows it is, and how many columns it has.
        let cells = Cells { rest: self.0.get(3..).unwrap_or_default(), left: u16::MAX };
        cells.map_while(Result::ok)
    }
}

/// A cell of a [`Tuple`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cell<'a> {
    /// NULL.
    Null,
    /// A TOASTed value that did not change: not sent, not NULL.
    Unchanged,
    /// As PostgreSQL prints it.
    Text(&'a [u8]),
    /// In the type's binary form.
    Binary(&'a [u8]),
}

impl Tuple {
    /// For tests, which make rows without a server.
    #[cfg(test)]
    pub(crate) fn new(data: Bytes) -> Tuple {
        Tuple(data)
    }

    /// A row of these cells.
    pub(crate) fn of_cells(cells: &[Cell<'_>]) -> Tuple {
        let mut data = BytesMut::new();
        data.put_u16(u16::try_from(cells.len()).unwrap_or(u16::MAX));
        for cell in cells {
            match cell {
                Cell::Null => data.put_u8(b'n'),
                Cell::Unchanged => data.put_u8(b'u'),
                Cell::Text(value) | Cell::Binary(value) => {
                    data.put_u8(if matches!(cell, Cell::Text(_)) { b't' } else { b'b' });
                    data.put_u32(u32::try_from(value.len()).unwrap_or(u32::MAX));
                    data.put_slice(value);
                }
            }
        }
        Tuple(data.freeze())
    }

    /// The same with the cells that were not sent, as far as the old row has them. Errors:
    /// `source.protocol`.
    pub fn filled(&self, old: &OldTuple) -> Result<Tuple> {
        let mut cells = Vec::with_capacity(self.len().into());
        let mut before = old.tuple.cells();
        for cell in self.cells() {
            cells.push(match (cell?, before.next().transpose()?) {
                (Cell::Unchanged, Some(sent @ Cell::Text(_))) => sent,
                // Of a key alone a null says nothing.
                (Cell::Unchanged, Some(Cell::Null)) if old.whole => Cell::Null,
                (cell, _) => cell,
            });
        }
        Ok(Tuple::of_cells(&cells))
    }

    /// Number of columns.
    pub fn len(&self) -> u16 {
        self.0.first_chunk().map_or(0, |count| u16::from_be_bytes(*count))
    }

    /// Whether it has no columns.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The cells in the relation's order. An error ends the iteration:
    /// `source.protocol`.
    pub fn cells(&self) -> impl Iterator<Item = Result<Cell<'_>>> {
        Cells { rest: self.0.get(2..).unwrap_or_default(), left: self.len() }
    }
}

struct Cells<'a> {
    rest: &'a [u8],
    left: u16,
}

impl<'a> Iterator for Cells<'a> {
    type Item = Result<Cell<'a>>;

    #[inline]
    fn next(&mut self) -> Option<Self::Item> {
        self.left = self.left.checked_sub(1)?;
        let cell = take_cell(&mut self.rest);
        if cell.is_none() {
            self.left = 0;
        }
        Some(cell.ok_or_else(|| malformed("a cell")))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (0, Some(self.left.into()))
    }
}

#[inline]
fn take_cell<'a>(rest: &mut &'a [u8]) -> Option<Cell<'a>> {
    let (kind, after) = rest.split_first()?;
    match kind {
        b'n' | b'u' => {
            *rest = after;
            Some(if *kind == b'n' { Cell::Null } else { Cell::Unchanged })
        }
        b't' | b'b' => {
            let (length, after) = after.split_first_chunk()?;
            let (value, after) = after.split_at_checked(u32::from_be_bytes(*length) as usize)?;
            *rest = after;
            Some(if *kind == b't' { Cell::Text(value) } else { Cell::Binary(value) })
        }
        _ => None,
    }
}

fn malformed(what: &str) -> crate::error::Error {
    errors::protocol(format_args!("a pgoutput message that ends early or is malformed: {what}"))
}

/// Decodes the body of one XLogData. Errors: `source.protocol`. No bytes panic.
pub fn decode(body: &Bytes) -> Result<Message> {
    let mut reader = Reader { body, rest: body };
    let kind = reader.u8().ok_or_else(|| malformed("empty"))?;
    let message = match kind {
        b'B' => reader.begin(),
        b'C' => reader.commit(),
        b'R' => reader.relation(),
        b'I' => reader.insert(),
        b'U' => reader.update(),
        b'D' => reader.delete(),
        b'T' => reader.truncate(),
        b'M' => reader.logical(),
        OVERSIZED => reader.oversized(),
        b'O' => Some(Message::Origin),
        b'Y' => Some(Message::Type),
        other => return Err(errors::protocol(format_args!("pgoutput message {:?}", char::from(other)))),
    };
    message.ok_or_else(|| malformed(&format!("message {:?}", char::from(kind))))
}

/// Our own: stands for a message that was not read.
const OVERSIZED: u8 = b'X';

/// What becomes of a message that is too large to be read.
pub(super) enum TooLarge {
    /// A change: this stands for it.
    Change(Bytes),
    /// Nobody here wants it.
    Unwanted,
    /// Nothing goes on without it.
    Needed,
}

/// From the beginning of a message, and its size. `streamed`: inside a stream block.
pub(super) fn too_large(beginning: &[u8], bytes: usize, limit: usize, streamed: bool, wanted_prefix: &str) -> TooLarge {
    let Some((tag, rest)) = beginning.split_first() else { return TooLarge::Needed };
    let (xid, rest) = rest.split_at(if streamed { 4.min(rest.len()) } else { 0 });
    match tag {
        b'I' | b'U' | b'D' => {
            let mut body = BytesMut::with_capacity(9 + beginning.len());
            body.put_u8(OVERSIZED);
            body.put_slice(xid);
            // Both are below the server's own limit, which has 31 bits.
            body.put_u32(bytes as u32);
            body.put_u32(limit as u32);
            body.put_slice(rest);
            TooLarge::Change(body.freeze())
        }
        // Flags and LSN before the prefix.
        b'M' if !rest.get(9..).is_some_and(|rest| rest.starts_with(wanted_prefix.as_bytes())) => TooLarge::Unwanted,
        _ => TooLarge::Needed,
    }
}

/// First bytes of what [`stream_message`] knows.
pub(super) const STREAM_TAGS: [u8; 4] = *b"SEcA";

/// A message about a transaction that is sent before it ends (protocol 2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StreamMessage {
    /// Changes of a transaction follow, its first ones or more.
    Start { xid: u32, first: bool },
    /// They end, for now.
    Stop,
    /// All of it committed.
    Commit(StreamCommit),
    /// A subtransaction is taken back; all of it, if that is the transaction's own id.
    Abort { xid: u32, subxid: u32 },
}

/// STREAM COMMIT.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct StreamCommit {
    /// Transaction id.
    pub xid: u32,
    flags: u8,
    /// LSN of the commit record.
    pub commit: Lsn,
    /// End of it.
    pub end: Lsn,
    /// As the server counts, from 2000.
    at: i64,
}

impl StreamCommit {
    /// The body of the BEGIN that protocol 1 would have sent.
    pub(super) fn begin_body(&self) -> Bytes {
        let mut body = BytesMut::with_capacity(21);
        body.put_u8(b'B');
        body.put_u64(self.commit.0);
        body.put_i64(self.at);
        body.put_u32(self.xid);
        body.freeze()
    }

    /// The body of its COMMIT.
    pub(super) fn commit_body(&self) -> Bytes {
        let mut body = BytesMut::with_capacity(26);
        body.put_u8(b'C');
        body.put_u8(self.flags);
        body.put_u64(self.commit.0);
        body.put_u64(self.end.0);
        body.put_i64(self.at);
        body.freeze()
    }
}

/// Decodes a message about a streamed transaction; `None`: it is another one. Errors:
/// `source.protocol`.
pub(super) fn stream_message(body: &Bytes) -> Result<Option<StreamMessage>> {
    let mut reader = Reader { body, rest: body };
    let message = match reader.u8() {
        Some(b'S') => reader.stream_start(),
        Some(b'E') => Some(StreamMessage::Stop),
        Some(b'c') => reader.stream_commit(),
        Some(b'A') => reader.stream_abort(),
        _ => return Ok(None),
    };
    message.map(Some).ok_or_else(|| malformed("a message about a streamed transaction"))
}

/// A message inside a stream block: as protocol 1 has it, but for the id of the
/// (sub)transaction behind the tag.
pub(super) struct StreamedChange<'a> {
    pub tag: u8,
    /// None for ORIGIN, which has none.
    pub xid: Option<u32>,
    /// What follows in protocol 1.
    pub rest: &'a [u8],
}

/// Takes a message of a stream block apart. Errors: `source.protocol`.
pub(super) fn streamed_change(body: &[u8]) -> Result<StreamedChange<'_>> {
    let parts =
        match body.split_first() {
            Some((b'O', rest)) => Some(StreamedChange { tag: b'O', xid: None, rest }),
            Some((tag, rest)) if b"RYMIUDTX".contains(tag) => rest
                .split_first_chunk()
                .map(|(xid, rest)| StreamedChange { tag: *tag, xid: Some(u32::from_be_bytes(*xid)), rest }),
            _ => None,
        };
    parts.ok_or_else(|| malformed("a message in a stream block"))
}

struct Reader<'a> {
    body: &'a Bytes,
    rest: &'a [u8],
}

impl Reader<'_> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (taken, rest) = self.rest.split_first_chunk()?;
        self.rest = rest;
        Some(*taken)
    }

    fn u8(&mut self) -> Option<u8> {
        self.take().map(u8::from_be_bytes)
    }

    fn u16(&mut self) -> Option<u16> {
        self.take().map(u16::from_be_bytes)
    }

    fn u32(&mut self) -> Option<u32> {
        self.take().map(u32::from_be_bytes)
    }

    fn i32(&mut self) -> Option<i32> {
        self.take().map(i32::from_be_bytes)
    }

    fn lsn(&mut self) -> Option<Lsn> {
        self.take().map(|bytes| Lsn(u64::from_be_bytes(bytes)))
    }

    /// Microseconds since 1970; saturates on what no server sends.
    fn time(&mut self) -> Option<i64> {
        self.take().map(|bytes| i64::from_be_bytes(bytes).saturating_add(EPOCH))
    }

    fn slice(&mut self, length: usize) -> Option<Bytes> {
        let (taken, rest) = self.rest.split_at_checked(length)?;
        self.rest = rest;
        Some(self.body.slice_ref(taken))
    }

    /// Bytes up to a zero, which is taken as well.
    fn cstr(&mut self) -> Option<Bytes> {
        let length = self.rest.iter().position(|byte| *byte == 0)?;
        let taken = self.slice(length)?;
        self.u8()?;
        Some(taken)
    }

    fn name(&mut self) -> Option<String> {
        String::from_utf8(self.cstr()?.to_vec()).ok()
    }

    /// A tuple with others behind it: its end is found by walking the cells.
    fn inner_tuple(&mut self) -> Option<Tuple> {
        let start = self.rest;
        for _ in 0..self.u16()? {
            take_cell(&mut self.rest)?;
        }
        let length = start.len() - self.rest.len();
        Some(Tuple(self.body.slice_ref(&start[..length])))
    }

    /// A tuple that ends the message.
    fn last_tuple(&mut self) -> Option<Tuple> {
        let tuple = Tuple(self.body.slice_ref(self.rest));
        self.u16()?;
        Some(tuple)
    }

    fn oversized(&mut self) -> Option<Message> {
        let (bytes, limit) = (self.u32()? as usize, self.u32()? as usize);
        Some(Message::Oversized { oid: self.u32()?, bytes, limit, beginning: Beginning(self.slice(self.rest.len())?) })
    }

    fn begin(&mut self) -> Option<Message> {
        Some(Message::Begin(Begin { final_lsn: self.lsn()?, committed_at: self.time()?, xid: self.u32()? }))
    }

    fn commit(&mut self) -> Option<Message> {
        let _flags = self.u8()?;
        let message = Message::Commit(Commit { commit: self.lsn()?, end: self.lsn()? });
        self.time()?;
        Some(message)
    }

    fn stream_start(&mut self) -> Option<StreamMessage> {
        Some(StreamMessage::Start { xid: self.u32()?, first: self.u8()? != 0 })
    }

    fn stream_commit(&mut self) -> Option<StreamMessage> {
        let (xid, flags) = (self.u32()?, self.u8()?);
        let (commit, end) = (self.lsn()?, self.lsn()?);
        let at = self.take().map(i64::from_be_bytes)?;
        Some(StreamMessage::Commit(StreamCommit { xid, flags, commit, end, at }))
    }

    fn stream_abort(&mut self) -> Option<StreamMessage> {
        Some(StreamMessage::Abort { xid: self.u32()?, subxid: self.u32()? })
    }

    fn relation(&mut self) -> Option<Message> {
        let oid = self.u32()?;
        let schema = self.name()?;
        // The protocol shortens pg_catalog to nothing.
        let schema = if schema.is_empty() { "pg_catalog".to_owned() } else { schema };
        let name = TableName::new(schema, self.name()?);
        let identity = self.u8()?;
        let count = self.u16()?;
        let mut columns = Vec::new();
        for _ in 0..count {
            let key = self.u8()? & 1 != 0;
            columns.push(RelationColumn { key, name: self.name()?, type_oid: self.u32()?, typmod: self.i32()? });
        }
        Some(Message::Relation(Relation { oid, name, identity, columns }))
    }

    fn insert(&mut self) -> Option<Message> {
        let oid = self.u32()?;
        match self.u8()? {
            b'N' => Some(Message::Insert { oid, new: self.last_tuple()? }),
            _ => None,
        }
    }

    fn update(&mut self) -> Option<Message> {
        let oid = self.u32()?;
        let mut kind = self.u8()?;
        let mut old = None;
        if kind == b'K' || kind == b'O' {
            old = Some(OldTuple { whole: kind == b'O', tuple: self.inner_tuple()? });
            kind = self.u8()?;
        }
        match kind {
            b'N' => Some(Message::Update { oid, old, new: self.last_tuple()? }),
            _ => None,
        }
    }

    fn delete(&mut self) -> Option<Message> {
        let oid = self.u32()?;
        match self.u8()? {
            kind @ (b'K' | b'O') => {
                Some(Message::Delete { oid, old: OldTuple { whole: kind == b'O', tuple: self.last_tuple()? } })
            }
            _ => None,
        }
    }

    fn truncate(&mut self) -> Option<Message> {
        let count = self.u32()? as usize;
        let options = self.u8()?;
        if self.rest.len() < count.checked_mul(4)? {
            return None;
        }
        let oids = (0..count).map(|_| self.u32()).collect::<Option<Vec<u32>>>()?;
        Some(Message::Truncate { oids, cascade: options & 1 != 0, restart_identity: options & 2 != 0 })
    }

    fn logical(&mut self) -> Option<Message> {
        let transactional = self.u8()? & 1 != 0;
        let lsn = self.lsn()?;
        let prefix = self.cstr()?;
        let length = self.u32()? as usize;
        Some(Message::Logical { transactional, lsn, prefix, content: self.slice(length)? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tuple(cells: &[Cell<'_>]) -> Vec<u8> {
        let mut bytes = u16::try_from(cells.len()).unwrap().to_be_bytes().to_vec();
        for cell in cells {
            match cell {
                Cell::Null => bytes.push(b'n'),
                Cell::Unchanged => bytes.push(b'u'),
                Cell::Text(value) | Cell::Binary(value) => {
                    bytes.push(if matches!(cell, Cell::Text(_)) { b't' } else { b'b' });
                    bytes.extend(u32::try_from(value.len()).unwrap().to_be_bytes());
                    bytes.extend(*value);
                }
            }
        }
        bytes
    }

    fn samples() -> Vec<Vec<u8>> {
        let row = tuple(&[Cell::Text(b"1"), Cell::Null, Cell::Unchanged, Cell::Binary(&[0, 1])]);
        let oid = 77_u32.to_be_bytes();
        let relation = [&b"R"[..], &oid, b"public\0t\0d", &[0, 1, 1], b"id\0", &23_u32.to_be_bytes(), &[0xff; 4]];
        let truncate = [&b"T"[..], &2_u32.to_be_bytes(), &[3], &oid, &oid];
        let logical = [&b"M"[..], &[1], &9_u64.to_be_bytes(), b"prefix\0", &3_u32.to_be_bytes(), b"abc"];
        vec![
            [&b"B"[..], &5_u64.to_be_bytes(), &0_i64.to_be_bytes(), &7_u32.to_be_bytes()].concat(),
            [&b"C"[..], &[0], &5_u64.to_be_bytes(), &6_u64.to_be_bytes(), &0_i64.to_be_bytes()].concat(),
            relation.concat(),
            [&b"I"[..], &oid, b"N", &row].concat(),
            [&b"U"[..], &oid, b"O", &row, b"N", &row].concat(),
            [&b"D"[..], &oid, b"K", &row].concat(),
            truncate.concat(),
            logical.concat(),
        ]
    }

    /// Decodes and reads every cell; true if all of it was well formed.
    fn read_whole(bytes: &[u8]) -> bool {
        let all = |tuple: &Tuple| tuple.cells().all(|cell| cell.is_ok());
        match decode(&Bytes::copy_from_slice(bytes)) {
            Ok(Message::Insert { new, .. }) => all(&new),
            Ok(Message::Update { old, new, .. }) => old.is_none_or(|old| all(&old.tuple)) && all(&new),
            Ok(Message::Delete { old, .. }) => all(&old.tuple),
            Ok(_) => true,
            Err(_) => false,
        }
    }

    #[test]
    fn every_message_decodes_to_what_was_encoded() {
        let decoded: Vec<Message> =
            samples().iter().map(|bytes| decode(&Bytes::from(bytes.clone())).unwrap()).collect();
        assert_eq!(decoded[0], Message::Begin(Begin { final_lsn: Lsn(5), committed_at: EPOCH, xid: 7 }));
        assert_eq!(decoded[1], Message::Commit(Commit { commit: Lsn(5), end: Lsn(6) }));
        let Message::Relation(relation) = &decoded[2] else { panic!() };
        assert_eq!(relation.name, TableName::new("public", "t"));
        let column = RelationColumn { key: true, name: "id".into(), type_oid: 23, typmod: -1 };
        assert_eq!(relation.columns, [column]);
        let Message::Update { oid: 77, old: Some(old), new } = &decoded[4] else { panic!() };
        assert!(old.whole && old.tuple == *new && new.len() == 4);
        let cells: Vec<Cell<'_>> = new.cells().map(|cell| cell.unwrap()).collect();
        assert_eq!(cells, [Cell::Text(b"1"), Cell::Null, Cell::Unchanged, Cell::Binary(&[0, 1])]);
        assert_eq!(decoded[6], Message::Truncate { oids: vec![77, 77], cascade: true, restart_identity: true });
        let Message::Logical { transactional: true, lsn: Lsn(9), prefix, content } = &decoded[7] else { panic!() };
        assert_eq!((&prefix[..], &content[..]), (&b"prefix"[..], &b"abc"[..]));
    }

    #[test]
    fn a_message_cut_anywhere_is_an_error_and_never_a_panic() {
        for sample in samples() {
            assert!(read_whole(&sample));
            for cut in 0..sample.len() {
                assert!(!read_whole(&sample[..cut]), "{sample:?} cut at {cut}");
            }
        }
    }

    #[test]
    fn no_bytes_make_the_decoder_panic() {
        // xorshift: the same bytes in every run.
        let mut state = 0x9E37_79B9_7F4A_7C15_u64;
        let mut random = move || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state
        };
        let samples = samples();
        for _ in 0..20_000 {
            let mut bytes = samples[random() as usize % samples.len()].clone();
            for _ in 0..=random() % 4 {
                let at = random() as usize % bytes.len();
                bytes[at] = random() as u8;
            }
            read_whole(&bytes);
            let noise: Vec<u8> = (0..random() % 40).map(|_| random() as u8).collect();
            read_whole(&noise);
        }
    }
}
