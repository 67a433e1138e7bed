//! The stream of the write-ahead log: one half reads, a task of its own answers,
//! so that nothing a destination does can stop a keepalive.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::{Buf, Bytes, BytesMut};
use postgres_protocol::message::backend::{Header, Message};
use postgres_protocol::message::frontend;
use tokio::io::{AsyncReadExt, AsyncWriteExt, ReadHalf, WriteHalf};
use tokio::sync::{Notify, oneshot};
use tokio::task::{AbortHandle, JoinHandle};
use tokio::time::{Instant, sleep, sleep_until, timeout};

use super::buffer::{Growth, READ_BYTES};
use super::config::SourceConfig;
use super::dial::Stream;
use super::errors::{self, ServerError};
use super::login::Wire;
use super::pgoutput::{self, TooLarge};
use super::transactions::{Assembler, Taken, all_committed};
use super::trigger::DDL_PREFIX;
use crate::error::{Error, Result};
use crate::position::Lsn;

/// Largest message taken unless set otherwise: the server's own limit of a
/// CopyData, 1 GiB.
pub const DEFAULT_MESSAGE_BYTES: usize = 1 << 30;
/// A status is sent at least this often.
const STATUS_EVERY: Duration = Duration::from_secs(10);
/// Confirmations closer together than this travel as one.
const CONFIRM_EVERY: Duration = Duration::from_millis(10);
/// A server that says nothing for so long, although each status asks for an
/// answer, is gone (as `wal_receiver_timeout`).
const SILENCE: Duration = Duration::from_secs(60);
/// The socket is left alone so long while a block is being sent: nobody waits for what
/// is in it, and to wake up for each message costs more than to take it.
const REST: Duration = Duration::from_millis(1);
/// How long a clean end may take.
const CLOSE_WITHIN: Duration = Duration::from_secs(5);
/// 2000-01-01 in seconds since 1970.
const EPOCH: u64 = 946_684_800;

/// So much is read of a message that is too large to be read: it says whose row it is,
/// and mostly which.
const BEGINNING_BYTES: usize = 64 * 1024;

const COPY_DATA: u8 = b'd';
/// CopyData header: tag and length.
const HEADER: usize = 5;
/// 'w', start, end, send time.
const XLOG_HEADER: usize = 25;

/// What the server sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WalMessage {
    /// A message of the output plugin.
    Data(XLogData),
    /// Nothing below `end` is still to come outside of what was sent.
    Keepalive {
        /// Where the server is.
        end: Lsn,
    },
}

/// XLogData.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct XLogData {
    /// Position of the record.
    pub start: Lsn,
    /// Where the server is.
    pub end: Lsn,
    /// See [`super::pgoutput::decode`].
    pub body: Bytes,
}

/// The reading half. Dropping it and every [`Feedback`] closes the connection.
///
/// Transactions that are sent before they end do not show: each is told whole, at its
/// commit.
pub struct WalReader {
    socket: ReadHalf<Stream>,
    buffer: BytesMut,
    feedback: Feedback,
    config: SourceConfig,
    slot: String,
    message_bytes: usize,
    /// Bytes still to come of a message that is not read.
    passing: usize,
    growth: Growth,
    /// With protocol 2.
    transactions: Option<Assembler>,
    /// Read, and waiting for room on the disk until then.
    waiting: Option<(XLogData, Instant)>,
    /// Looks up what became of subtransactions.
    asking: Option<JoinHandle<Result<bool>>>,
    /// Found by a look ahead.
    ready: Option<Result<WalMessage>>,
    ended: bool,
}

impl WalReader {
    /// The next message. Cancel safe. Requests for a status are passed to the
    /// feedback task as they are read.
    ///
    /// Errors: `source.connection-lost`, `slot.in-use` (transient); `slot.missing`,
    /// `slot.lost`, `publication.missing`, `source.stream`, `source.protocol`
    /// (permanent). After an error the reader is at its end.
    pub async fn next(&mut self) -> Result<WalMessage> {
        loop {
            if self.ended {
                return Err(errors::connection_lost(&self.config, "the stream has ended"));
            }
            match self.at_hand() {
                Ok(Some(message)) => return Ok(message),
                Ok(None) => {}
                Err(error) => {
                    self.ended = true;
                    return Err(error);
                }
            }
            if let Err(error) = self.more().await {
                self.ended = true;
                return Err(error);
            }
        }
    }

    /// Whether [`WalReader::next`] returns without reading the socket.
    pub fn has_buffered(&mut self) -> bool {
        if self.ready.is_none() && !self.ended {
            self.ready = self.at_hand().transpose();
        }
        self.ready.is_some()
    }

    /// Does not read messages above `bytes` from now on: a row's shows as
    /// [`super::pgoutput::Message::Oversized`], a logical message of somebody else is left
    /// out, and any other is an error (`source.message-too-large`).
    pub fn set_message_bytes(&mut self, bytes: usize) {
        self.message_bytes = bytes;
    }

    /// Sends a last status, ends the stream and waits, within 5 s, until the
    /// server has let go of the slot.
    pub async fn close(mut self) {
        let end = async {
            self.feedback.shutdown().await;
            loop {
                self.buffer.clear();
                self.buffer.reserve(READ_BYTES);
                match self.socket.read_buf(&mut self.buffer).await {
                    Ok(0) | Err(_) => return,
                    Ok(_) => {}
                }
            }
        };
        // Too late: the drop closes the socket.
        let _closed = timeout(CLOSE_WITHIN, end).await;
    }

    /// The next message that needs no reading.
    fn at_hand(&mut self) -> Result<Option<WalMessage>> {
        if let Some(ready) = self.ready.take() {
            return ready.map(Some);
        }
        loop {
            let Some(transactions) = &mut self.transactions else { return self.take() };
            if let Some(data) = transactions.told()? {
                return Ok(Some(WalMessage::Data(data)));
            }
            if transactions.asks().is_some() {
                return Ok(None);
            }
            let data = match self.waiting.take() {
                Some((data, until)) if until > Instant::now() => {
                    self.waiting = Some((data, until));
                    return Ok(None);
                }
                Some((data, _)) => data,
                None => match self.take()? {
                    Some(WalMessage::Data(data)) => data,
                    // Between the blocks it is as good as ever: what is open commits beyond it.
                    Some(_) if self.is_inside() => continue,
                    other => return Ok(other),
                },
            };
            if let Some(data) = self.assemble(data)? {
                return Ok(Some(WalMessage::Data(data)));
            }
            if self.waiting.is_some() {
                return Ok(None);
            }
        }
    }

    /// Gives a message to the transaction it belongs to; returns one that belongs to none.
    fn assemble(&mut self, data: XLogData) -> Result<Option<XLogData>> {
        let Some(transactions) = &mut self.transactions else { return Ok(Some(data)) };
        match transactions.take(&data) {
            Ok(Taken::Passed) => Ok(Some(data)),
            Ok(Taken::Kept) => Ok(None),
            Err(error) => match transactions.wait_after(&error) {
                Some(until) => {
                    self.waiting = Some((data, until));
                    Ok(None)
                }
                None => Err(error),
            },
        }
    }

    /// Whether a block of an open transaction is being sent.
    fn is_inside(&self) -> bool {
        self.transactions.as_ref().is_some_and(Assembler::is_inside)
    }

    /// Waits until there may be more at hand.
    async fn more(&mut self) -> Result<()> {
        if let Some(transactions) = &mut self.transactions
            && let Some(xids) = transactions.asks()
        {
            let ask = || tokio::spawn(all_committed(self.config.clone(), xids.to_vec()));
            let answer = self.asking.get_or_insert_with(ask).await;
            self.asking = None;
            let answer = answer.map_err(|error| errors::connection_lost(&self.config, &error.to_string()))?;
            let answered = answer.and_then(|committed| transactions.answer(committed));
            return answered.inspect_err(|error| {
                // Nothing to wait for.
                let _now = transactions.wait_after(error);
            });
        }
        match &self.waiting {
            Some((_, until)) => {
                sleep_until(*until).await;
                Ok(())
            }
            None => {
                if self.is_inside() {
                    sleep(REST).await;
                }
                self.fill().await
            }
        }
    }

    async fn fill(&mut self) -> Result<()> {
        let missing = self.missing();
        self.growth.reserve(&mut self.buffer, missing);
        let read = timeout(self.feedback.handle.silence, self.socket.read_buf(&mut self.buffer)).await;
        match read {
            Ok(Ok(0)) => Err(errors::connection_lost(&self.config, "the server closed it")),
            Ok(Ok(_)) => {
                self.feedback.handle.state.heard.store(true, Ordering::Relaxed);
                Ok(())
            }
            Ok(Err(error)) => Err(errors::connection_lost(&self.config, &error.to_string())),
            Err(_) => Err(errors::connection_lost(&self.config, "the server has been silent for too long")),
        }
    }

    /// Bytes that the message at the front still needs.
    fn missing(&self) -> usize {
        let header = Header::parse(&self.buffer).ok().flatten().filter(|_| self.passing == 0);
        header.map_or(0, |header| self.wanted(&header).saturating_sub(self.buffer.len()))
    }

    /// Bytes that have to be there of a message before anything can be said of it.
    fn wanted(&self, header: &Header) -> usize {
        let whole = header.len() as usize + 1;
        if whole > self.message_bytes { whole.min(BEGINNING_BYTES) } else { whole }
    }

    /// Lets go what is there of a message that is not read. Whether that was all of it.
    fn pass(&mut self) -> bool {
        let passed = self.passing.min(self.buffer.len());
        self.buffer.advance(passed);
        self.passing -= passed;
        self.passing == 0
    }

    /// The message at the front of the buffer, if it is whole.
    fn take(&mut self) -> Result<Option<WalMessage>> {
        loop {
            if !self.pass() {
                return Ok(None);
            }
            let Some(header) = Header::parse(&self.buffer).map_err(errors::protocol)? else { return Ok(None) };
            let whole = header.len() as usize + 1;
            if self.buffer.len() < self.wanted(&header) {
                return Ok(None);
            }
            if whole > self.message_bytes {
                match self.too_large(whole)? {
                    Some(data) => return Ok(Some(WalMessage::Data(data))),
                    None => continue,
                }
            }
            if header.tag() != COPY_DATA {
                self.take_other()?;
                continue;
            }
            let mut frame = self.buffer.split_to(whole);
            frame.advance(HEADER);
            return self.copy_data(frame.freeze()).map(Some);
        }
    }

    /// A message above the limit: its beginning is at hand, the rest is not read.
    fn too_large(&mut self, whole: usize) -> Result<Option<XLogData>> {
        let beginning = self.buffer.split_to(whole.min(BEGINNING_BYTES)).freeze();
        self.passing = whole - beginning.len();
        let mut frame = beginning.slice(HEADER..);
        if beginning[0] == COPY_DATA && frame.first() == Some(&b'w') {
            frame.advance(1);
            let (start, end) = (Lsn(frame.get_u64()), Lsn(frame.get_u64()));
            let _sent_at = frame.get_i64();
            let bytes = whole - HEADER - XLOG_HEADER;
            match pgoutput::too_large(&frame, bytes, self.message_bytes, self.is_inside(), DDL_PREFIX) {
                TooLarge::Change(body) => return Ok(Some(XLogData { start, end, body })),
                TooLarge::Unwanted => {
                    tracing::warn!(%start, bytes, code = "source.message-left-out", "a logical message that nobody here wants is too large to be read");
                    return Ok(None);
                }
                TooLarge::Needed => {}
            }
        }
        Err(Error::permanent(
            "source.message-too-large",
            format!("slot `{}`: a message of {whole} bytes is above the limit of {}", self.slot, self.message_bytes),
        )
        .next("Raise `memory_bytes` of [pipeline]."))
    }

    fn copy_data(&self, mut frame: Bytes) -> Result<WalMessage> {
        match frame.first() {
            Some(b'w') if frame.len() >= XLOG_HEADER => {
                frame.advance(1);
                let (start, end) = (Lsn(frame.get_u64()), Lsn(frame.get_u64()));
                let _sent_at = frame.get_i64();
                Ok(WalMessage::Data(XLogData { start, end, body: frame }))
            }
            Some(b'k') if frame.len() >= 18 => {
                frame.advance(1);
                let end = Lsn(frame.get_u64());
                let _sent_at = frame.get_i64();
                if frame.get_u8() != 0 {
                    self.feedback.handle.state.answer();
                }
                Ok(WalMessage::Keepalive { end })
            }
            _ => Err(errors::protocol("a CopyData that is neither XLogData nor keepalive")),
        }
    }

    fn take_other(&mut self) -> Result<()> {
        match Message::parse(&mut self.buffer).map_err(errors::protocol)? {
            Some(Message::ErrorResponse(body)) => {
                Err(errors::replicating(&self.config, &self.slot, &ServerError::of_fields(body.fields())))
            }
            Some(Message::NoticeResponse(body)) => {
                let notice = ServerError::of_fields(body.fields());
                tracing::debug!(slot = self.slot, state = notice.state, "{}", notice.message);
                errors::left_out(&self.config, &notice).map_or(Ok(()), Err)
            }
            Some(Message::ParameterStatus(_) | Message::NotificationResponse(_)) | None => Ok(()),
            Some(Message::CopyDone | Message::CommandComplete(_) | Message::ReadyForQuery(_)) => {
                Err(errors::connection_lost(&self.config, "the server ended the stream"))
            }
            Some(_) => Err(errors::protocol("an unexpected message in the stream")),
        }
    }
}

/// What we tell the server. Cheap to clone; none of it ever goes back.
#[derive(Clone)]
pub struct Feedback {
    handle: Arc<Handle>,
}

impl Feedback {
    /// The source may forget everything before `lsn`: reported as flushed and
    /// applied (P6, P9). Sent within some 10 ms.
    pub fn confirm(&self, lsn: Lsn) {
        let state = &self.handle.state;
        state.received.fetch_max(lsn.0, Ordering::AcqRel);
        if state.confirmed.fetch_max(lsn.0, Ordering::AcqRel) < lsn.0 {
            state.wake.notify_one();
        }
    }

    /// Everything before `lsn` has been read: reported as written, with the next
    /// status.
    pub fn received(&self, lsn: Lsn) {
        self.handle.state.received.fetch_max(lsn.0, Ordering::AcqRel);
    }

    /// Sends a last status and ends the stream; returns when that is written, or
    /// after 5 s. Nothing is sent afterwards.
    pub async fn shutdown(&self) {
        if self.handle.task.is_finished() {
            return;
        }
        let (done, written) = oneshot::channel();
        *self.handle.state.shutdown.lock().unwrap_or_else(PoisonError::into_inner) = Some(done);
        self.handle.state.wake.notify_one();
        // An error: the task has ended, and so has the connection.
        let _written = timeout(CLOSE_WITHIN, written).await;
    }
}

struct Handle {
    state: Arc<State>,
    silence: Duration,
    task: AbortHandle,
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.task.abort();
    }
}

#[derive(Default)]
struct State {
    received: AtomicU64,
    confirmed: AtomicU64,
    /// The server asked for a status.
    asked: AtomicBool,
    /// Something was read since the last status.
    heard: AtomicBool,
    shutdown: Mutex<Option<oneshot::Sender<()>>>,
    wake: Notify,
}

impl State {
    fn answer(&self) {
        self.asked.store(true, Ordering::Release);
        self.wake.notify_one();
    }
}

/// Splits a connection that streams into reader and feedback task.
/// `sender_timeout` is the server's `wal_sender_timeout`, zero: none.
pub(super) fn split(
    wire: Wire,
    config: SourceConfig,
    slot: &str,
    from: Lsn,
    sender_timeout: Duration,
    transactions: Option<Assembler>,
) -> (WalReader, Feedback) {
    let (socket, write) = tokio::io::split(wire.stream);
    let state = Arc::new(State::default());
    state.received.store(from.0, Ordering::Release);
    state.confirmed.store(from.0, Ordering::Release);
    let every = if sender_timeout.is_zero() { STATUS_EVERY } else { STATUS_EVERY.min(sender_timeout / 3) };
    let task = tokio::spawn(report(write, state.clone(), every)).abort_handle();
    let silence = SILENCE.max(sender_timeout * 2);
    let feedback = Feedback { handle: Arc::new(Handle { state, silence, task }) };
    let reader = WalReader {
        socket,
        buffer: wire.read,
        feedback: feedback.clone(),
        config,
        slot: slot.to_owned(),
        message_bytes: DEFAULT_MESSAGE_BYTES,
        passing: 0,
        growth: Growth::default(),
        transactions,
        waiting: None,
        asking: None,
        ready: None,
        ended: false,
    };
    (reader, feedback)
}

/// Owns the write half. A write that fails ends it: the reader meets the same end.
async fn report(mut socket: WriteHalf<Stream>, state: Arc<State>, every: Duration) {
    let mut buffer = BytesMut::with_capacity(64);
    loop {
        let sent_at = Instant::now();
        let confirmed = state.confirmed.load(Ordering::Acquire);
        if send_status(&mut socket, &mut buffer, &state, confirmed).await.is_err() {
            return;
        }
        let shutdown = next_reason(&state, sent_at, confirmed, every).await;
        if let Some(done) = shutdown {
            let confirmed = state.confirmed.load(Ordering::Acquire);
            if send_status(&mut socket, &mut buffer, &state, confirmed).await.is_ok() {
                buffer.clear();
                frontend::copy_done(&mut buffer);
                frontend::terminate(&mut buffer);
                // Nobody is left to tell: the socket closes next.
                let _written = write_all(&mut socket, &buffer).await;
            }
            drop(done);
            return;
        }
    }
}

/// Waits until a status is due; with a sender if it is the last.
async fn next_reason(state: &State, sent_at: Instant, confirmed: u64, every: Duration) -> Option<oneshot::Sender<()>> {
    let mut due = sent_at + every;
    loop {
        if let Some(done) = state.shutdown.lock().unwrap_or_else(PoisonError::into_inner).take() {
            return Some(done);
        }
        if state.asked.swap(false, Ordering::AcqRel) {
            return None;
        }
        if state.confirmed.load(Ordering::Acquire) > confirmed {
            due = due.min(sent_at + CONFIRM_EVERY);
        }
        tokio::select! {
            () = state.wake.notified() => {}
            () = sleep_until(due) => return None,
        }
    }
}

async fn send_status(
    socket: &mut WriteHalf<Stream>,
    buffer: &mut BytesMut,
    state: &State,
    confirmed: u64,
) -> io::Result<()> {
    let received = state.received.load(Ordering::Acquire);
    let heard = state.heard.swap(false, Ordering::Relaxed);
    buffer.clear();
    let status = status_update(received, confirmed, !heard);
    frontend::CopyData::new(&status[..])?.write(buffer);
    write_all(socket, buffer).await
}

async fn write_all(socket: &mut WriteHalf<Stream>, bytes: &[u8]) -> io::Result<()> {
    socket.write_all(bytes).await?;
    socket.flush().await
}

/// "Standby status update". `ask`: the server is to answer.
fn status_update(received: u64, confirmed: u64, ask: bool) -> [u8; 34] {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let now = now.saturating_sub(Duration::from_secs(EPOCH)).as_micros() as u64;
    let mut status = [0; 34];
    status[0] = b'r';
    status[1..9].copy_from_slice(&received.to_be_bytes());
    status[9..17].copy_from_slice(&confirmed.to_be_bytes());
    status[17..25].copy_from_slice(&confirmed.to_be_bytes());
    status[25..33].copy_from_slice(&now.to_be_bytes());
    status[33] = ask.into();
    status
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_reports_written_as_received_and_flushed_and_applied_as_confirmed() {
        let status = status_update(9, 7, true);
        assert_eq!(status[0], b'r');
        assert_eq!(status[1..9], 9_u64.to_be_bytes());
        assert_eq!(status[9..17], 7_u64.to_be_bytes());
        assert_eq!(status[17..25], 7_u64.to_be_bytes());
        assert_eq!(status[33], 1);
    }
}
