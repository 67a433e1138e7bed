//! A destination: takes what the router, the drains and the copies bring, in order,
//! and owns what is recorded of its tables.
//!
//! It runs on a thread of its own, so that a plugin that burns its time slice delays
//! nobody else.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tokio::sync::{oneshot, watch};

use crate::batch::ChangeBatch;
use crate::config::{DestinationConfig, Mode};
use crate::copy::{Base, Look, Reading};
use crate::error::Result;
use crate::memory::LARGE_ROW_BYTES;
use crate::position::{Lsn, Position};
use crate::schema::table::{TableName, TableSchema};
use crate::schema::wire::snapshot_to_wire;
use crate::source::config::SourceConfig;
use crate::status::{DelayHistogram, DestinationState, SchemaState, StatusBoard, StatusError};
use crate::store::{BarrierRecord, CopyRecord, Store, TableError, TableRecord, TableState};
use crate::wire;

use super::barriers::Hold;
use super::checkpoint::Checkpointer;
use super::cursors::Cursors;
use super::feed::{SharedHistory, Truncation};
use super::inbox::{Held, Receiver};
use super::lane::Lane;
use super::ledger::{Entry, Ledger, Settled};
use super::quarantine::Quarantine;
use super::resume::Resumes;
use super::retry::Backoff;
use super::rollout::Rollout;
use super::routes::{Beginning, Command, Place};
use super::swap::Exchange;

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
    /// The source's side of a table that takes changes cannot go on.
    Failed { oid: u32, error: TableError },
    /// All changes of the table are in the spool, and nothing of it comes any more until
    /// it is released.
    Held { oid: u32 },
    /// The table begins anew: nothing that is known of it holds, and a copy will come.
    Begin { oid: u32, name: TableName, done: oneshot::Sender<Beginning> },
    /// The table stops, or does not even begin.
    Stopped { oid: u32, name: TableName, error: TableError },
    /// What waited for the destination was dropped: all its tables stop.
    Detached(TableError),
    /// The table is nobody's any more: what is kept of it goes. Answered with whether
    /// it had stopped, without which nothing is done.
    Forget { oid: u32, done: oneshot::Sender<bool> },
}

/// The rows of a copy. `done` is answered when the plugin has done it.
pub(super) enum Copying {
    /// A run begins: the table is empty then.
    Begin { begin: CopyBegin, done: oneshot::Sender<Result<()>> },
    /// Rows of the run.
    Rows { oid: u32, run: Arc<str>, rows: CopiedRows },
    /// Rows that went from the table since an earlier snapshot of the run.
    Deletes { oid: u32, run: Arc<str>, deletes: wire::MergeRows },
    /// Those were all that went before an LSN.
    Cleaned { oid: u32, run: Arc<str>, through: Lsn },
    /// What is read of a stretch begins here, or ends.
    Stretch { oid: u32, run: Arc<str>, reading: Reading, ended: bool },
    /// All rows of the run were sent.
    Finish { oid: u32, run: Arc<str>, done: oneshot::Sender<Result<()>> },
    /// The source's side of the copy cannot go on.
    Failed { oid: u32, error: TableError },
}

/// Rows of a copy, as they were read.
#[derive(Clone)]
pub(super) struct CopiedRows {
    pub rows: wire::Rows,
    /// How many bytes of the table at the source are behind them.
    pub source_bytes: u64,
    /// What they were read of, if the copy goes by stretches.
    pub reading: Option<Reading>,
    /// The same rows may be there already, as an earlier snapshot had them.
    pub again: bool,
}

/// How a run begins.
pub(super) struct CopyBegin {
    pub schema: Arc<TableSchema>,
    /// What it was asked for by.
    pub beginning: Beginning,
    /// This attempt, which is the run unless that goes on.
    pub run: Arc<str>,
    /// The stretches that it goes by: of this run, or of the one that goes on.
    pub copy: Option<CopyRecord>,
    /// The snapshot.
    pub base: Base,
    /// Rows to expect.
    pub rows_total: u64,
    /// What the table takes at the source.
    pub source_bytes: u64,
    /// Kept for as long as the run can go on: the copier looks at whether it is.
    pub alive: Arc<()>,
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
    /// The last one: no copy from before it begins any more.
    pub beginning: Beginning,
    /// The change that waits, and was not applied yet.
    pub barrier: Option<BarrierRecord>,
    /// Whether the table waits with it.
    pub hold: Hold,
}

/// A copy under way.
pub(super) struct Run {
    /// The attempt.
    pub id: Arc<str>,
    /// As the plugin knows it.
    pub name: Arc<str>,
    /// Rows and bytes of each stretch that is under way, if it goes by those.
    pub stretches: Option<HashMap<usize, (u64, u64)>>,
    /// The snapshot.
    pub base: Base,
    pub batches: u64,
    pub began: Instant,
    /// Of the table at the source, and what of it is durable here.
    pub source_bytes: u64,
    pub copied_bytes: u64,
    /// See [`CopyBegin::alive`].
    pub _alive: Arc<()>,
}

impl Table {
    /// A table as it is recorded, unknown to any instance.
    pub fn new(record: TableRecord, schema: Option<Arc<TableSchema>>) -> Table {
        let sent = record.position;
        Table {
            record,
            schema,
            wire: None,
            attached: false,
            sent,
            run: None,
            beginning: Beginning::default(),
            barrier: None,
            hold: Hold::No,
        }
    }

    /// Whether changes may be sent.
    pub fn takes_changes(&self) -> bool {
        matches!(self.record.state, TableState::CatchUp | TableState::Ready)
            && self.schema.is_some()
            && self.hold == Hold::No
    }
}

/// What a destination is made of.
pub(super) struct Parts {
    pub index: usize,
    /// See `Position::epoch`.
    pub epoch: u32,
    pub config: Arc<DestinationConfig>,
    pub source: Arc<SourceConfig>,
    pub lane: Lane,
    pub exchange: Exchange,
    pub tables: HashMap<u32, Table>,
    pub live: Receiver<Live>,
    pub copying: Receiver<Copying>,
    pub checkpointer: Checkpointer,
    pub store: Store,
    pub history: SharedHistory,
    pub board: StatusBoard,
    pub cursors: Cursors,
    pub resumes: Resumes,
    pub rollout: Rollout,
    /// To the router.
    pub commands: tokio::sync::mpsc::UnboundedSender<Command>,
    /// Set by the router until [`Live::Detached`] is taken.
    pub detached: Arc<AtomicBool>,
    /// True when retries have to end.
    pub stopping: watch::Receiver<bool>,
}

/// A destination at work.
pub(super) struct Destination {
    pub(super) parts: Parts,
    pub(super) ledger: Ledger,
    pub(super) backoff: Backoff,
    /// Rows that the destination refused.
    pub(super) quarantine: Quarantine,
    /// Tables whose copies end the plugin.
    pub(super) doubts: super::doubt::Doubts,
    /// Stretches of copies that are durable, and not stored as that yet.
    pub(super) ended: Vec<super::stretches::EndedStretch>,
    /// The last one of any table.
    pub(super) beginning: Beginning,
    /// Changes when an operator has marked some of them, or decided about a barrier.
    marks: watch::Receiver<u64>,
    /// Tables that wait, and of which changes may still be in the queue: progress behind
    /// those does not count.
    pub(super) asking: BTreeSet<u32>,
    /// Changes when any destination has another version of a table.
    rolled: watch::Receiver<u64>,
    /// Whether the destination has ever taken a row.
    pub(super) proven: bool,
    /// Rows that were blamed for a trap or time-out since it took one.
    pub(super) verdicts: u32,
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
    /// There is nothing to do, and somebody waits for the memory of what is accepted.
    Wanted,
    Marked,
    Rolled,
    /// There is another version of the plugin, or none any more.
    Offered,
    Closed,
}

impl Destination {
    pub fn new(parts: Parts) -> Destination {
        let (marks, rolled) = (parts.store.marks(), parts.rollout.watch());
        let proven = parts.tables.values().any(|table| table.record.rows_copied > 0);
        Destination {
            parts,
            ledger: Ledger::default(),
            backoff: Backoff::transient(),
            quarantine: Quarantine::default(),
            doubts: super::doubt::Doubts::default(),
            ended: Vec::new(),
            beginning: Beginning::default(),
            marks,
            asking: BTreeSet::new(),
            rolled,
            proven,
            verdicts: 0,
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
        self.load_quarantine().await?;
        self.meet_barriers().await?;
        self.ensure_open().await?;
        self.recover_schemas().await?;
        self.take_marks().await?;
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
                Next::Due | Next::Offered => {}
                Next::Wanted => self.flush().await?,
                Next::Marked => {
                    self.take_marks().await?;
                    self.take_verdicts().await?;
                }
                Next::Rolled => self.review_all().await?,
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
        let (live, copying, exchange) = (&mut self.parts.live, &mut self.parts.copying, &mut self.parts.exchange);
        let shares = (live.share(), copying.share());
        let wanted = async {
            tokio::select! { () = shares.0.wanted() => {} () = shares.1.wanted() => {} }
        };
        let has_accepted = self.ledger.has_accepted();
        // Nobody else's versions open anything here.
        let is_staged = self.parts.config.quorum.is_some();
        tokio::select! {
            biased;
            held = live.recv() => match held {
                Some(held) => Next::Live(held),
                None => Next::Closed,
            },
            Some(held) = copying.recv() => Next::Copying(held),
            Ok(()) = self.marks.changed() => Next::Marked,
            Ok(()) = self.rolled.changed(), if is_staged => Next::Rolled,
            Ok(()) = exchange.changed() => Next::Offered,
            () = sleep => Next::Due,
            () = wanted, if has_accepted => Next::Wanted,
        }
    }

    /// The next moment at which something has to be done although nothing came.
    fn due(&self) -> Option<Instant> {
        let settle = self.ledger.oldest_accepted().map(|oldest| oldest + self.parts.lane.pace().settle);
        let publish = self.unpublished.then(|| self.published + PUBLISH_EVERY);
        [settle, self.wake, publish].into_iter().flatten().min()
    }

    /// What is due: settle, tick, tell, change to another version of the plugin, and send
    /// rows again, for which no group may be under construction.
    async fn upkeep(&mut self) -> Result<(), Stop> {
        self.take_offer().await?;
        self.send_marked().await?;
        self.store_stretches().await?;
        let pace = self.pace();
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
        let pace = self.pace();
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
                // A large row crosses by itself.
                let is_apart = batch.bytes > LARGE_ROW_BYTES && entry.bytes + batch.bytes > self.pace().group_bytes;
                if (is_apart && entry.bytes > 0) || !self.ready_for(entry, &batch.schema).await? {
                    return Ok(Some(held));
                }
                let Held { item: Live::Batch(batch), taken } = held else { return Ok(None) };
                entry.taken.extend(taken);
                self.add_batch(entry, batch).await?;
            }
            Live::Truncate { schema, truncation } => {
                if !self.ready_for(entry, schema).await? {
                    return Ok(Some(held));
                }
                self.truncated(schema.oid, truncation.at.position).await?;
                self.add_truncation(entry, schema.oid, *truncation);
            }
            Live::Schema(schema) => {
                if !self.ready_for(entry, schema).await? {
                    return Ok(Some(held));
                }
            }
            // It comes again behind what the spool has.
            Live::Progress(_) if !self.asking.is_empty() => {}
            Live::Progress(lsn) => {
                entry.progress = Some(*lsn);
                entry.group.whole = true;
            }
            Live::State { oid, state } => self.enter_state(*oid, *state).await?,
            Live::Failed { oid, error } => {
                // One that begins anew has nothing to do with what came before.
                if self.parts.tables.get(oid).is_some_and(Table::takes_changes) {
                    self.fail_table(*oid, error.clone()).await?;
                }
            }
            Live::Held { oid } => {
                if !entry.group.batches.is_empty() || entry.progress.is_some() {
                    return Ok(Some(held));
                }
                self.held(*oid).await?;
            }
            Live::Begin { .. } | Live::Stopped { .. } | Live::Detached(_) | Live::Forget { .. } => {
                if !entry.group.batches.is_empty() || entry.progress.is_some() {
                    return Ok(Some(held));
                }
                self.change_membership(held.item).await?;
            }
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
    async fn add_batch(&mut self, entry: &mut Entry, batch: Arc<ChangeBatch>) -> Result<(), Stop> {
        let (oid, last, bytes, changes) = (batch.schema.oid, batch.last(), batch.bytes, batch.rows.rows.count);
        let committed_at = batch.rows.sequence.committed_at.first().copied();
        match self.convert(oid, batch) {
            Ok(Some((content, applied))) => {
                entry.committed_at = min_of(entry.committed_at, committed_at);
                entry.changes += u64::from(changes);
                let content = self.reselected(oid, content).await?;
                match self.divert(oid, content).await? {
                    Some(content) => self.add_content(entry, oid, applied, last, content, bytes),
                    None => self.passed(entry, oid, last),
                }
            }
            Ok(None) => {}
            Err(error) => self.fail_table(oid, TableError::from(&error)).await?,
        }
        Ok(())
    }

    /// What crosses for a batch, and the version it has then; none if it was sent before.
    /// The batch goes with it where nobody else has it: two copies of it are one too many.
    fn convert(&self, oid: u32, batch: Arc<ChangeBatch>) -> Result<Option<(wire::Content, wire::SnapshotId)>> {
        let Some(table) = self.parts.tables.get(&oid).filter(|table| table.takes_changes()) else { return Ok(None) };
        let Some(applied) = &table.schema else { return Ok(None) };
        let from = table.sent.map_or(0, |sent| batch.row_after(sent));
        if from >= batch.rows.rows.count as usize {
            return Ok(None);
        }
        let batch = match batch.schema.snapshot == applied.snapshot {
            true => batch,
            false => {
                if self.parts.config.mode == Mode::Merge {
                    batch.is_named_as(applied)?;
                }
                Arc::new(batch.project(applied)?)
            }
        };
        self.fits(&batch.schema, &batch.rows.rows, batch.bytes)?;
        let content = match self.parts.config.mode {
            Mode::Merge => wire::Content::Merge(crate::batch::fold(&batch, from)?),
            Mode::Changes => wire::Content::Changes(batch.changes_from(from)),
        };
        Ok(Some((content, snapshot_to_wire(applied.snapshot))))
    }

    fn add_truncation(&mut self, entry: &mut Entry, oid: u32, truncation: Truncation) {
        let position = truncation.at.position;
        let Some(table) = self.parts.tables.get(&oid).filter(|table| table.takes_changes()) else { return };
        if table.sent.is_some_and(|sent| position <= sent) {
            return;
        }
        let Some(applied) = table.schema.as_ref().map(|schema| snapshot_to_wire(schema.snapshot)) else { return };
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

    pub(super) fn add_content(
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
        self.passed(entry, oid, through);
    }

    /// With this group the table is at a position.
    pub(super) fn passed(&mut self, entry: &mut Entry, oid: u32, through: Position) {
        if !self.parts.tables.get(&oid).is_some_and(Table::takes_changes) {
            return;
        }
        entry.positions.retain(|(known, _)| *known != oid);
        entry.positions.push((oid, through));
        if let Some(table) = self.parts.tables.get_mut(&oid) {
            table.sent = Some(through);
            let columns = table.schema.as_ref().map_or(0, |schema| schema.columns.len());
            entry.columns.retain(|(known, _)| *known != oid);
            entry.columns.push((oid, columns));
        }
    }

    /// Gives the group to the plugin, or, if it is empty, its progress to the ledger.
    pub(super) async fn submit(&mut self, entry: Entry) -> Result<(), Stop> {
        if !entry.group.batches.is_empty() || !entry.positions.is_empty() {
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
        if settled.rows > 0 {
            (self.proven, self.verdicts) = (true, 0);
            self.did_well();
        }
        let now = now_us();
        for (committed_at, changes) in &settled.changes {
            self.delays.record(now - committed_at, *changes);
            self.changes += changes;
        }
        for copied in &settled.copied {
            if let Some(table) = self.parts.tables.get_mut(&copied.oid)
                && let Some(run) = table.run.as_mut().filter(|run| run.id == copied.run)
            {
                // A second look is at rows that were counted, but for a few.
                if copied.reading.is_some_and(|reading| reading.look != Look::All) {
                    continue;
                }
                table.record.rows_copied += copied.rows;
                run.copied_bytes += copied.source_bytes;
                if let (Some(stretches), Some(reading)) = (&mut run.stretches, copied.reading) {
                    let (rows, bytes) = stretches.entry(reading.number).or_default();
                    *rows += copied.rows;
                    *bytes += copied.source_bytes;
                }
            }
        }
        settled.ended.iter().for_each(|end| self.stretch_durable(end));
        for (oid, position) in &settled.positions {
            if let Some(table) = self.parts.tables.get_mut(oid) {
                table.record.position = table.record.position.max(Some(*position));
            }
        }
        let (checkpoint, copied) = (settled.checkpoint, settled.copied);
        self.parts.checkpointer.durable(&settled.positions, checkpoint);
        crate::failpoint::reached("group.settled");
        let tables = &self.parts.tables;
        self.parts.board.update_destination(&self.parts.config.name, |status| {
            status.checkpoint = status.checkpoint.max(checkpoint);
            for table in copied.iter().filter_map(|copied| tables.get(&copied.oid)) {
                let status = status.table_mut(&table.record.name);
                status.rows_copied = table.record.rows_copied;
                if let Some(run) = &table.run {
                    status.show_copy(run.copied_bytes, run.source_bytes, run.began.elapsed());
                }
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
        self.let_go(oid);
        self.parts.resumes.remove(self.place(oid));
        self.ledger.remove_table(oid);
        let settled = self.ledger.drop_empty();
        self.save_table(oid).await?;
        self.drop_barrier(oid).await?;
        self.settle(settled);
        self.parts.checkpointer.forget(oid);
        self.parts.cursors.remove(&self.parts.config.name, oid);
        let place = Place { destination: self.parts.index, oid };
        // The router may have ended already; then nothing is spooled any more either.
        let _ = self.parts.commands.send(Command::TableFailed { place });
        Ok(())
    }

    /// Stores what is recorded of a table.
    pub(super) async fn save_table(&mut self, oid: u32) -> Result<(), Stop> {
        if self.parts.detached.load(Ordering::SeqCst) {
            // Stored as stopped already, and not to be made anything else.
            return Ok(());
        }
        let Some(table) = self.parts.tables.get(&oid) else { return Ok(()) };
        let record = table.record.clone();
        self.until_stored(async |store| store.save_table(record.clone()).await).await?;
        crate::failpoint::reached("table.recorded");
        self.parts.rollout.note(&record);
        self.publish_table(oid);
        Ok(())
    }

    /// A copy begins at nothing: what is stored of the table never goes back otherwise.
    pub(super) async fn forget_position(&mut self, oid: u32) -> Result<(), Stop> {
        self.parts.checkpointer.forget(oid);
        let name = self.parts.config.name.clone();
        self.until_stored(async |store| store.delete_table(&name, oid).await).await?;
        self.quarantine.clear(oid);
        self.show_quarantined(oid);
        Ok(())
    }

    /// Stores something, however long the store takes to recover.
    pub(super) async fn until_stored<T>(&mut self, save: impl AsyncFn(&Store) -> Result<T>) -> Result<T, Stop> {
        let mut backoff = Backoff::transient();
        loop {
            match save(&self.parts.store).await {
                Ok(saved) => {
                    if backoff.tries() > 0 {
                        self.set_state(DestinationState::Running, None);
                    }
                    return Ok(saved);
                }
                Err(error) => {
                    self.set_state(DestinationState::Retrying, Some(StatusError::from(&error)));
                    self.sleep(backoff.pause(None)).await?;
                }
            }
        }
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

    /// Shows a table under the name that it has from this version on.
    pub(super) fn show_renamed(&self, oid: u32, to: &TableSchema) {
        let Some(table) = self.parts.tables.get(&oid) else { return };
        let from = &table.record.name;
        self.parts.board.update_destination(&self.parts.config.name, |status| status.rename_table(from, &to.name));
    }

    /// Shows what is recorded of a table.
    pub(super) fn publish_table(&self, oid: u32) {
        let Some(Table { record, barrier, .. }) = self.parts.tables.get(&oid) else { return };
        self.parts.board.update_table(&self.parts.config.name, &record.name, |status| {
            show_table(status, record, barrier.as_ref());
        });
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

/// What `status` shows of a recorded table, and of the change that it waits with.
pub(crate) fn show_table(
    status: &mut crate::status::TableStatus,
    record: &TableRecord,
    barrier: Option<&BarrierRecord>,
) {
    let barrier = barrier.filter(|_| record.state != TableState::Errored);
    status.state = record.state;
    status.snapshot = record.applied;
    status.schema = match (barrier, record.applying) {
        (Some(_), _) => SchemaState::Held,
        (None, Some(_)) => SchemaState::Applying,
        (None, None) => SchemaState::Applied,
    };
    status.rows_copied = record.rows_copied;
    status.rows_total = record.rows_total;
    if record.state != TableState::DataSync {
        status.seconds_left = None;
    }
    let error = barrier.map(|barrier| &barrier.why).or(record.error.as_ref());
    status.error = error.map(|error| StatusError {
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

fn min_of(a: Option<i64>, b: Option<i64>) -> Option<i64> {
    [a, b].into_iter().flatten().min()
}

/// Microseconds since 1970-01-01 UTC.
pub(super) fn now_us() -> i64 {
    std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |since| i64::try_from(since.as_micros()).unwrap_or(i64::MAX))
}
