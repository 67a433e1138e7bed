//! A destination: takes what the router, the drains and the copies bring, in order,
//! and owns what is recorded of its tables.
//!
//! It runs on a thread of its own, so that a plugin that burns its time slice delays
//! nobody else.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::{oneshot, watch};

use crate::batch::ChangeBatch;
use crate::config::{DestinationConfig, Mode};
use crate::error::{Error, Result};
use crate::position::{Lsn, Position};
use crate::schema::table::TableSchema;
use crate::status::{DelayHistogram, DestinationState, SchemaState, StatusBoard, StatusError};
use crate::store::{Store, TableError, TableRecord, TableState};
use crate::wire;

use super::checkpoint::Checkpointer;
use super::cursors::Cursors;
use super::feed::{SharedHistory, Truncation};
use super::inbox::{Held, Receiver};
use super::lane::Lane;
use super::ledger::{Entry, Ledger, Settled};
use super::retry::Backoff;

/// Changes and what stands between them, in source order for each table.
pub(super) enum Live {
    /// Changes of one table.
    Batch(Arc<ChangeBatch>),
    /// A table was emptied.
    Truncate { schema: Arc<TableSchema>, truncation: Truncation },
    /// Rows behind this have this schema.
    Schema(Arc<TableSchema>),
    /// Every change before this LSN was sent, or spooled.
    Progress(Lsn),
    /// The table follows the stream from here on, or does not any more.
    State { oid: u32, state: TableState },
    /// The source's side of the table cannot go on.
    Failed { oid: u32, error: TableError },
}

/// The rows of a copy. `done` is answered when the plugin has done it.
pub(super) enum Copying {
    /// A run begins: the table is empty then.
    Begin {
        schema: Arc<TableSchema>,
        run: Arc<str>,
        floor: Lsn,
        rows_total: Option<u64>,
        done: oneshot::Sender<Result<()>>,
    },
    /// Rows of the run.
    Rows { oid: u32, run: Arc<str>, rows: wire::Rows },
    /// All rows of the run were sent.
    Finish { oid: u32, run: Arc<str>, done: oneshot::Sender<Result<()>> },
}

/// What a destination tells the router.
#[derive(Debug)]
pub(super) enum Event {
    /// It gave the table up: nothing has to be spooled for it any more.
    TableFailed { destination: usize, oid: u32 },
}

/// Why the destination's work ends before its queue does.
pub(super) struct Stop;

/// One table, as the destination knows it.
pub(super) struct Table {
    pub record: TableRecord,
    /// The version the destination has.
    pub schema: Option<Arc<TableSchema>>,
    pub wire: Option<wire::Table>,
    /// Whether the instance was told of the table.
    pub attached: bool,
    /// Up to where changes were sent; at or below it they are dropped (P7).
    pub sent: Option<Position>,
    /// The copy under way in this instance.
    pub run: Option<Run>,
}

/// A copy under way.
pub(super) struct Run {
    pub id: Arc<str>,
    pub floor: Lsn,
    pub batches: u64,
}

impl Table {
    /// A table as it is recorded, unknown to any instance.
    pub fn new(record: TableRecord, schema: Option<Arc<TableSchema>>) -> Table {
        let sent = record.position;
        Table { record, schema, wire: None, attached: false, sent, run: None }
    }

    /// Whether changes may be sent.
    pub fn takes_changes(&self) -> bool {
        matches!(self.record.state, TableState::CatchUp | TableState::Ready) && self.schema.is_some()
    }
}

/// What a destination is made of.
pub(super) struct Parts {
    pub index: usize,
    /// See `Position::epoch`.
    pub epoch: u32,
    pub config: Arc<DestinationConfig>,
    pub lane: Lane,
    pub tables: HashMap<u32, Table>,
    pub live: Receiver<Live>,
    pub copying: Receiver<Copying>,
    pub checkpointer: Checkpointer,
    pub store: Store,
    pub history: SharedHistory,
    pub board: StatusBoard,
    pub cursors: Cursors,
    pub events: tokio::sync::mpsc::UnboundedSender<Event>,
    /// True when retries have to end.
    pub stopping: watch::Receiver<bool>,
}

/// A destination at work.
pub(super) struct Destination {
    pub(super) parts: Parts,
    pub(super) ledger: Ledger,
    pub(super) backoff: Backoff,
    /// Read, and not taken into the last group.
    stash: Option<Held<Live>>,
    /// When the plugin wants `tick` if nothing else is called.
    pub(super) wake: Option<Instant>,
    delays: DelayHistogram,
    changes: u64,
    published: Instant,
    unpublished: bool,
}

/// How often a busy destination tells `status` how far it is.
const PUBLISH_EVERY: Duration = Duration::from_millis(100);

enum Next {
    Live(Held<Live>),
    Copying(Held<Copying>),
    Due,
    Closed,
}

impl Destination {
    pub fn new(parts: Parts) -> Destination {
        Destination {
            parts,
            ledger: Ledger::default(),
            backoff: Backoff::transient(),
            stash: None,
            wake: None,
            delays: DelayHistogram::default(),
            changes: 0,
            published: Instant::now(),
            unpublished: false,
        }
    }

    /// Works until all who feed it are gone and what they sent is durable, or until it
    /// is told to stop.
    pub async fn run(mut self) {
        let ended = self.work().await;
        if ended.is_ok() {
            self.parts.lane.close().await;
        }
        self.publish_now();
        self.parts.checkpointer.close();
    }

    async fn work(&mut self) -> Result<(), Stop> {
        self.ensure_open().await?;
        self.recover_schemas().await?;
        self.set_state(DestinationState::Running, None);
        loop {
            match self.next().await {
                Next::Live(held) => {
                    self.take_live(held).await?;
                    // Live changes go first, but never starve a copy.
                    if let Some(held) = self.parts.copying.try_recv() {
                        self.take_copying(held).await?;
                    }
                }
                Next::Copying(held) => self.take_copying(held).await?,
                Next::Due => {}
                Next::Closed => return self.finish().await,
            }
            self.upkeep().await?;
        }
    }

    async fn next(&mut self) -> Next {
        if let Some(held) = self.stash.take() {
            return Next::Live(held);
        }
        let due = self.due();
        let sleep = async {
            match due {
                Some(due) => tokio::time::sleep_until(due.into()).await,
                None => std::future::pending().await,
            }
        };
        let (live, copying) = (&mut self.parts.live, &mut self.parts.copying);
        tokio::select! {
            biased;
            held = live.recv() => match held {
                Some(held) => Next::Live(held),
                None => Next::Closed,
            },
            Some(held) = copying.recv() => Next::Copying(held),
            () = sleep => Next::Due,
        }
    }

    /// The next moment at which something has to be done although nothing came.
    fn due(&self) -> Option<Instant> {
        let settle = self.ledger.oldest_accepted().map(|oldest| oldest + self.parts.lane.pace().settle);
        let publish = self.unpublished.then(|| self.published + PUBLISH_EVERY);
        [settle, self.wake, publish].into_iter().flatten().min()
    }

    /// What is due: settle, tick, tell.
    async fn upkeep(&mut self) -> Result<(), Stop> {
        let pace = self.parts.lane.pace();
        let now = Instant::now();
        let settle = self.ledger.oldest_accepted().is_some_and(|oldest| oldest + pace.settle <= now)
            || self.ledger.accepted_bytes() >= pace.settle_bytes;
        if settle {
            self.flush().await?;
        } else if self.wake.is_some_and(|wake| wake <= now) {
            self.wake = None;
            self.tick().await?;
        }
        if self.unpublished && self.published.elapsed() >= PUBLISH_EVERY {
            self.publish_now();
        }
        Ok(())
    }

    /// The end: everything durable.
    async fn finish(&mut self) -> Result<(), Stop> {
        self.pump().await?;
        if !self.ledger.is_empty() {
            self.flush().await?;
        }
        Ok(())
    }

    /// Takes an item and what waits behind it, as far as it fits in one group.
    async fn take_live(&mut self, first: Held<Live>) -> Result<(), Stop> {
        let pace = self.parts.lane.pace();
        let until = Instant::now() + pace.linger;
        let mut entry = Entry::new();
        let mut next = Some(first);
        while let Some(held) = next.take() {
            if let Some(held) = self.add_live(&mut entry, held).await? {
                self.stash = Some(held);
                break;
            }
            if entry.bytes >= pace.group_bytes {
                break;
            }
            next = match self.parts.live.try_recv() {
                Some(held) => Some(held),
                None if entry.group.batches.is_empty() || pace.linger.is_zero() => None,
                None => tokio::time::timeout_at(until.into(), self.parts.live.recv()).await.ok().flatten(),
            };
        }
        self.submit(entry).await
    }

    /// Adds an item to the group, or gives it back: the group has to go first.
    async fn add_live(&mut self, entry: &mut Entry, held: Held<Live>) -> Result<Option<Held<Live>>, Stop> {
        match &held.item {
            Live::Batch(batch) => {
                if !self.ready_for(entry, &batch.schema).await? {
                    return Ok(Some(held));
                }
                let Held { item: Live::Batch(batch), permit } = held else { return Ok(None) };
                entry.permits.extend(permit);
                self.add_batch(entry, &batch).await?;
            }
            Live::Truncate { schema, truncation } => {
                if !self.ready_for(entry, schema).await? {
                    return Ok(Some(held));
                }
                self.add_truncation(entry, schema.oid, *truncation);
            }
            Live::Schema(schema) => {
                if !self.ready_for(entry, schema).await? {
                    return Ok(Some(held));
                }
            }
            Live::Progress(lsn) => {
                entry.progress = Some(*lsn);
                entry.group.whole = true;
            }
            Live::State { oid, state } => self.enter_state(*oid, *state).await?,
            Live::Failed { oid, error } => self.fail_table(*oid, error.clone()).await?,
        }
        Ok(None)
    }

    /// Makes the destination's table ready for rows of `schema`. False if the group has
    /// to be sent before that can be done.
    async fn ready_for(&mut self, entry: &Entry, schema: &Arc<TableSchema>) -> Result<bool, Stop> {
        let Some(table) = self.parts.tables.get(&schema.oid).filter(|table| table.takes_changes()) else {
            return Ok(true);
        };
        let newer = table.schema.as_ref().is_some_and(|applied| applied.snapshot < schema.snapshot);
        if newer {
            if !entry.group.batches.is_empty() || entry.progress.is_some() {
                return Ok(false);
            }
            self.advance_schema(schema.clone()).await?;
        }
        Ok(true)
    }

    /// Adds the rows of a batch that the destination does not have yet.
    async fn add_batch(&mut self, entry: &mut Entry, batch: &Arc<ChangeBatch>) -> Result<(), Stop> {
        let oid = batch.schema.oid;
        match self.convert(oid, batch) {
            Ok(Some((content, applied))) => {
                let last = batch.last();
                let committed_at = batch.rows.sequence.committed_at.first().copied();
                entry.committed_at = min_of(entry.committed_at, committed_at);
                entry.changes += u64::from(batch.rows.rows.count);
                self.add_content(entry, oid, applied, last, content, batch.bytes);
            }
            Ok(None) => {}
            Err(error) => self.fail_table(oid, TableError::from(&error)).await?,
        }
        Ok(())
    }

    /// What crosses for a batch, and the version it has then; none if it was sent before.
    fn convert(&self, oid: u32, batch: &Arc<ChangeBatch>) -> Result<Option<(wire::Content, wire::SnapshotId)>> {
        let Some(table) = self.parts.tables.get(&oid).filter(|table| table.takes_changes()) else { return Ok(None) };
        let Some(applied) = &table.schema else { return Ok(None) };
        let from = table.sent.map_or(0, |sent| batch.row_after(sent));
        if from >= batch.rows.rows.count as usize {
            return Ok(None);
        }
        let projected;
        let batch = if batch.schema.snapshot == applied.snapshot {
            batch.as_ref()
        } else {
            projected = batch.project(applied)?;
            &projected
        };
        let content = match self.parts.config.mode {
            Mode::Merge => wire::Content::Merge(crate::batch::fold(batch, from)?),
            Mode::Changes => wire::Content::Changes(batch.changes_from(from)),
        };
        Ok(Some((content, to_wire_snapshot(applied))))
    }

    fn add_truncation(&mut self, entry: &mut Entry, oid: u32, truncation: Truncation) {
        let position = truncation.at.position;
        let Some(table) = self.parts.tables.get(&oid).filter(|table| table.takes_changes()) else { return };
        if table.sent.is_some_and(|sent| position <= sent) {
            return;
        }
        let Some(applied) = table.schema.as_ref().map(to_wire_snapshot) else { return };
        entry.committed_at = min_of(entry.committed_at, Some(truncation.at.committed_at));
        entry.changes += 1;
        let content = wire::Content::Truncate(wire::Truncation {
            sequence: wire::Sequence {
                epoch: position.epoch,
                commit: vec![position.commit.0],
                ordinal: vec![position.ordinal],
                committed_at: vec![truncation.at.committed_at],
                xid: vec![truncation.at.xid],
            },
            cascade: truncation.cascade,
            restart_identity: truncation.restart_identity,
        });
        self.add_content(entry, oid, applied, position, content, 64);
    }

    fn add_content(
        &mut self,
        entry: &mut Entry,
        oid: u32,
        snapshot: wire::SnapshotId,
        through: Position,
        content: wire::Content,
        bytes: usize,
    ) {
        entry.group.batches.push(wire::Batch {
            table_id: oid,
            snapshot,
            through: Some(to_wire_position(through)),
            content,
        });
        entry.bytes += bytes;
        entry.group.whole = false;
        entry.positions.retain(|(known, _)| *known != oid);
        entry.positions.push((oid, through));
        if let Some(table) = self.parts.tables.get_mut(&oid) {
            table.sent = Some(through);
        }
    }

    /// Gives the group to the plugin, or, if it is empty, its progress to the ledger.
    pub(super) async fn submit(&mut self, entry: Entry) -> Result<(), Stop> {
        if !entry.group.batches.is_empty() {
            self.ledger.push(entry);
            return self.pump().await;
        }
        if let Some(progress) = entry.progress {
            let settled = self.ledger.progress(progress);
            self.settle(settled);
        }
        Ok(())
    }

    /// What became durable goes to the checkpointer and to `status`.
    pub(super) fn settle(&mut self, settled: Settled) {
        if settled.is_empty() {
            return;
        }
        let now = now_us();
        for (committed_at, changes) in &settled.changes {
            self.delays.record(now - committed_at, *changes);
            self.changes += changes;
        }
        for (oid, rows) in &settled.copied {
            if let Some(table) = self.parts.tables.get_mut(oid) {
                table.record.rows_copied += rows;
            }
        }
        for (oid, position) in &settled.positions {
            if let Some(table) = self.parts.tables.get_mut(oid) {
                table.record.position = table.record.position.max(Some(*position));
            }
        }
        let (checkpoint, copied) = (settled.checkpoint, settled.copied);
        self.parts.checkpointer.durable(&settled.positions, checkpoint);
        let tables = &self.parts.tables;
        self.parts.board.update_destination(&self.parts.config.name, |status| {
            status.checkpoint = status.checkpoint.max(checkpoint);
            for table in copied.iter().filter_map(|(oid, _)| tables.get(oid)) {
                status.table_mut(&table.record.name).rows_copied = table.record.rows_copied;
            }
        });
        self.unpublished = true;
    }

    async fn enter_state(&mut self, oid: u32, state: TableState) -> Result<(), Stop> {
        let Some(table) = self.parts.tables.get_mut(&oid).filter(|table| table.takes_changes()) else {
            return Ok(());
        };
        table.record.state = state;
        self.save_table(oid).await
    }

    /// The table stops here, and only here: stored as needing a resync before any
    /// checkpoint passes what it will not get (P6).
    pub(super) async fn fail_table(&mut self, oid: u32, error: TableError) -> Result<(), Stop> {
        let Some(table) = self.parts.tables.get_mut(&oid) else { return Ok(()) };
        if table.record.state == TableState::Errored {
            return Ok(());
        }
        tracing::error!(
            destination = %self.parts.config.name, table = %table.record.name, code = %error.code,
            next = error.next.as_deref().unwrap_or_default(), "the table stops: {}", error.message
        );
        table.record.state = TableState::Errored;
        table.record.needs_resync = true;
        table.record.error = Some(error);
        table.run = None;
        self.ledger.remove_table(oid);
        let settled = self.ledger.drop_empty();
        self.save_table(oid).await?;
        self.settle(settled);
        self.parts.checkpointer.forget(oid);
        self.parts.cursors.remove(&self.parts.config.name, oid);
        let failed = Event::TableFailed { destination: self.parts.index, oid };
        // The router may have ended already; then nothing is spooled any more either.
        let _ = self.parts.events.send(failed);
        Ok(())
    }

    /// Stores what is recorded of a table, however long the store takes to recover.
    pub(super) async fn save_table(&mut self, oid: u32) -> Result<(), Stop> {
        let Some(table) = self.parts.tables.get(&oid) else { return Ok(()) };
        let record = table.record.clone();
        let mut backoff = Backoff::transient();
        while let Err(error) = self.parts.store.save_table(record.clone()).await {
            self.set_state(DestinationState::Retrying, Some(StatusError::from(&error)));
            self.sleep(backoff.pause(None)).await?;
        }
        self.publish_table(&record);
        Ok(())
    }

    /// A copy begins at nothing: what is stored of the table never goes back otherwise.
    pub(super) async fn forget_position(&mut self, oid: u32) -> Result<(), Stop> {
        self.parts.checkpointer.forget(oid);
        let name = self.parts.config.name.clone();
        let mut backoff = Backoff::transient();
        while let Err(error) = self.parts.store.delete_table(&name, oid).await {
            self.set_state(DestinationState::Retrying, Some(StatusError::from(&error)));
            self.sleep(backoff.pause(None)).await?;
        }
        Ok(())
    }

    /// Sleeps, unless it is time to stop.
    pub(super) async fn sleep(&mut self, pause: Duration) -> Result<(), Stop> {
        let stopping = &mut self.parts.stopping;
        tokio::select! {
            () = tokio::time::sleep(pause) => Ok(()),
            _ = stopping.wait_for(|stopping| *stopping) => Err(Stop),
        }
    }

    /// Shows what the destination as a whole does.
    pub(super) fn set_state(&mut self, state: DestinationState, error: Option<StatusError>) {
        self.parts.board.update_destination(&self.parts.config.name, |status| {
            status.state = state;
            status.error = error;
        });
    }

    fn publish_table(&self, record: &TableRecord) {
        self.parts.board.update_table(&self.parts.config.name, &record.name, |status| show_table(status, record));
    }

    fn publish_now(&mut self) {
        self.published = Instant::now();
        self.unpublished = false;
        let (changes, delay) = (self.changes, self.delays.summary());
        self.parts.board.update_destination(&self.parts.config.name, |status| {
            status.changes = changes;
            status.delay_ms = delay;
        });
    }
}

/// What `status` shows of a recorded table.
pub(crate) fn show_table(status: &mut crate::status::TableStatus, record: &TableRecord) {
    status.state = record.state;
    status.snapshot = record.applied;
    status.schema = if record.applying.is_some() { SchemaState::Applying } else { SchemaState::Applied };
    status.rows_copied = record.rows_copied;
    status.rows_total = record.rows_total;
    status.error = record.error.as_ref().map(|error| StatusError {
        code: error.code.clone(),
        message: error.message.clone(),
        next: error.next.clone(),
    });
}

pub(super) fn to_wire_position(position: Position) -> wire::Position {
    wire::Position { epoch: position.epoch, commit: position.commit.0, ordinal: position.ordinal }
}

pub(super) fn from_wire_position(position: wire::Position) -> Position {
    Position { epoch: position.epoch, commit: Lsn(position.commit), ordinal: position.ordinal }
}

pub(super) fn to_wire_snapshot(schema: &Arc<TableSchema>) -> wire::SnapshotId {
    wire::SnapshotId { commit: schema.snapshot.commit.0, message: schema.snapshot.message.0 }
}

fn min_of(a: Option<i64>, b: Option<i64>) -> Option<i64> {
    [a, b].into_iter().flatten().min()
}

/// Microseconds since 1970-01-01 UTC.
fn now_us() -> i64 {
    std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |since| i64::try_from(since.as_micros()).unwrap_or(i64::MAX))
}

/// A failure of a plugin as an error of the host's, with who and where.
pub(super) fn failure_error(destination: &str, what: &str, failure: &wire::Failure) -> Error {
    let message = format!("destination `{destination}`, {what}: {}", failure.message);
    match failure.class {
        wire::FailureClass::Transient => Error::transient(failure.code.clone(), message),
        wire::FailureClass::Permanent => Error::permanent(failure.code.clone(), message),
    }
}
