//! The copy of one table: begun at every destination that wants it, read once, finished
//! (P20). A destination that keeps the others waiting is left out and gets its own later.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use tokio::sync::{OwnedMutexGuard, oneshot};
use tokio::time::Instant;

use crate::batch::{CopyBuilder, rows_weight};
use crate::copy::{Base, Look, Reading, RowSink, Stretch, Turn, Wave, WaveTable};
use crate::error::{Error, Result};
use crate::memory::Taken;
use crate::position::{Lsn, Position};
use crate::schema::table::TableSchema;
use crate::store::CopyRecord;
use crate::wire;

use super::clean::Cleaner;
use super::copier::Copier;
use super::destination::{CopiedRows, CopyBegin, Copying};
use super::resume::{NOT_RESUMABLE, not_resumable};
use super::routes::{Beginning, Command, Place};

/// Bytes of rows handed over at once.
const BATCH_BYTES: usize = 1 << 20;

/// What the copies of a wave know of each other.
#[derive(Clone, Default)]
pub(super) struct Stalled(Arc<Mutex<StalledState>>);

#[derive(Default)]
struct StalledState {
    /// Destinations that kept a copy waiting too long: the next one does not wait as long.
    stalled: BTreeSet<usize>,
    /// Tables that each destination has still to get the rows of.
    unread: BTreeMap<usize, usize>,
}

/// A table whose rows are still to be read.
pub(super) struct Unread {
    stalled: Stalled,
    wanted: BTreeSet<usize>,
}

impl Stalled {
    /// Counts a table until its rows are read.
    pub(super) fn unread(&self, wanted: &BTreeSet<usize>) -> Unread {
        let mut state = self.lock();
        for destination in wanted {
            *state.unread.entry(*destination).or_default() += 1;
        }
        Unread { stalled: self.clone(), wanted: wanted.clone() }
    }

    fn add(&self, destination: usize) {
        self.lock().stalled.insert(destination);
    }

    fn all(&self, mut destinations: impl Iterator<Item = usize>) -> bool {
        let state = self.lock();
        destinations.all(|destination| state.stalled.contains(&destination))
    }

    /// Whether another destination, one that goes on, has tables to get.
    fn others_go_on(&self, destination: usize) -> bool {
        let state = self.lock();
        let goes_on = |other: &usize| *other != destination && !state.stalled.contains(other);
        state.unread.iter().any(|(other, tables)| *tables > 0 && goes_on(other))
    }

    fn lock(&self) -> MutexGuard<'_, StalledState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Unread {
    fn drop(&mut self) {
        let mut state = self.stalled.lock();
        for destination in &self.wanted {
            if let Some(tables) = state.unread.get_mut(destination) {
                *tables -= 1;
            }
        }
    }
}

/// A table's copy under way.
pub(super) struct CopyRun<'a> {
    copier: &'a Copier,
    schema: Arc<TableSchema>,
    /// This attempt.
    id: Arc<str>,
    /// The stretches that it goes by, of a run that goes on perhaps.
    by: Option<CopyRecord>,
    /// The run was begun in an earlier snapshot.
    goes_on: bool,
    wanted: BTreeSet<usize>,
    stalled: Stalled,
    unread: Option<Unread>,
    /// Given up when a destination is waited for: other tables go on meanwhile.
    turn: Option<Turn>,
    /// Destinations that have to get the table again.
    again: BTreeSet<usize>,
}

/// A destination that takes the rows of a run.
struct Taker {
    destination: usize,
    /// What has to be read for it, if the copy goes by stretches.
    lacks: Vec<Reading>,
    /// It has rows of earlier snapshots, and what went before this LSN is not among them.
    cleaned: Option<Lsn>,
    /// As of which it has the table in the end.
    floor: Lsn,
    /// Dropped when the destination has lost the run.
    run: Weak<()>,
    left_out: AtomicBool,
}

/// Everybody who takes the rows of a run, and what they were not told yet.
struct Takers {
    copier: Copier,
    schema: Arc<TableSchema>,
    id: Arc<str>,
    stalled: Stalled,
    /// Rows may be there already.
    again: bool,
    all: Vec<Taker>,
    /// Bytes at the source that were read with no row to send them with.
    unsent: AtomicU64,
    leaving: Mutex<()>,
    wave: Weak<Wave>,
}

impl<'a> CopyRun<'a> {
    /// `by`: the stretches that it goes by; with a run, if that goes on.
    pub(super) fn new(
        copier: &'a Copier,
        schema: Arc<TableSchema>,
        by: Option<CopyRecord>,
        unread: Unread,
        turn: Turn,
    ) -> CopyRun<'a> {
        let id: Arc<str> = format!("{:016x}", rand::random::<u64>()).into();
        let goes_on = by.as_ref().is_some_and(|copy| !copy.run.is_empty());
        let by = by.map(|mut copy| {
            if !goes_on {
                copy.run = id.to_string();
                copy.snapshot = schema.snapshot;
            }
            copy
        });
        CopyRun {
            copier,
            schema,
            id,
            by,
            goes_on,
            wanted: unread.wanted.clone(),
            stalled: unread.stalled.clone(),
            unread: Some(unread),
            turn: Some(turn),
            again: BTreeSet::new(),
        }
    }

    /// Returns the destinations that have to get the table again.
    pub(super) async fn copy(mut self, wave: Arc<Wave>, table: &WaveTable) -> BTreeSet<usize> {
        let base = wave.base();
        if let Some(copy) = self.by.as_ref().filter(|copy| copy.snapshot != self.schema.snapshot) {
            let why = not_resumable(&self.schema.name, "its schema is another one now");
            self.cannot_resume(self.wanted.iter().copied(), &copy.run, &why);
            return self.wanted;
        }
        let takers = self.begin(&wave, table).await;
        if takers.is_empty() {
            return self.again;
        }
        let takers = Arc::new(Takers {
            copier: self.copier.clone(),
            schema: self.schema.clone(),
            id: self.id.clone(),
            stalled: self.stalled.clone(),
            again: self.goes_on,
            all: takers,
            unsent: AtomicU64::new(0),
            leaving: Mutex::default(),
            wave: Arc::downgrade(&wave),
        });
        let sink = || Sink::new(takers.clone());
        let copied = match self.left(&takers, table, base).await {
            Ok(left) => wave.copy_table(&left, sink).await.map(drop),
            Err(error) => Err(error),
        };
        // All that is needed of the source.
        drop(wave);
        self.unread = None;
        match copied {
            // If all have lost the run, each says why when it is asked to finish.
            Err(error) if error.code() != STOPPED => {
                if let Some(copy) = self.by.as_ref().filter(|_| error.code() == NOT_RESUMABLE) {
                    self.cannot_resume(takers.all.iter().map(|taker| taker.destination), &copy.run, &error);
                }
                self.failed(&takers, &error);
            }
            _ => self.finish(&takers).await,
        }
        self.again
    }

    /// What has to be read; what has gone since the last snapshot is deleted before.
    async fn left(&self, takers: &Takers, table: &WaveTable, base: Base) -> Result<WaveTable> {
        let Some(copy) = &self.by else { return Ok(table.clone()) };
        self.clean(takers, base.floor).await?;
        let stretches: Vec<Stretch> = copy.stretches.iter().map(|record| record.stretch).collect();
        let left = table.by_stretches(&stretches, &takers.lack());
        left.ok_or_else(|| not_resumable(&self.schema.name, "a partition of it is gone"))
    }

    async fn clean(&self, takers: &Takers, floor: Lsn) -> Result<()> {
        let cleaned = takers.all.iter().map(|taker| taker.cleaned);
        if let Some(mut cleaner) = Cleaner::new(self.copier, self.schema.clone(), floor, cleaned) {
            while let Some(deletes) = cleaner.next().await? {
                for (index, deletes) in deletes {
                    takers.send_deletes(index, deletes).await?;
                }
            }
        }
        takers.say_cleaned(floor).await
    }

    /// The next attempt begins from nothing.
    fn cannot_resume(&self, destinations: impl Iterator<Item = usize>, run: &str, why: &Error) {
        tracing::warn!(table = %self.schema.name, code = why.code(), "{why}");
        for destination in destinations {
            let place = Place { destination, oid: self.schema.oid };
            if self.copier.resumes.get(place).is_some_and(|copy| copy.run == run) {
                self.copier.resumes.remove(place);
            }
        }
    }

    /// Begins the run everywhere, and returns who has.
    async fn begin(&mut self, wave: &Wave, table: &WaveTable) -> Vec<Taker> {
        let mut waiting: BTreeSet<usize> = BTreeSet::new();
        let mut asked = FuturesUnordered::new();
        for destination in std::mem::take(&mut self.wanted) {
            if self.copier.outlets[destination].needs_key && self.schema.merge_key().is_empty() {
                self.copier.fail_at(destination, self.schema.oid, &no_key(&self.schema));
                continue;
            }
            let alive = Arc::new(());
            let run = Arc::downgrade(&alive);
            let begin = CopyBegin {
                schema: self.schema.clone(),
                beginning: self.beginning(destination),
                run: self.id.clone(),
                copy: self.by.clone(),
                base: wave.base(),
                rows_total: table.estimated_rows,
                source_bytes: table.source_bytes,
                alive,
            };
            waiting.insert(destination);
            let (copier, floor) = (self.copier, wave.floor);
            asked.push(async move {
                let answer = ask(copier, destination, |done| Copying::Begin { begin, done }).await;
                let left_out = AtomicBool::new(false);
                (Taker { destination, lacks: Vec::new(), cleaned: None, floor, run, left_out }, answer)
            });
        }
        let mut takers: Vec<Taker> = Vec::new();
        let patient = Instant::now() + self.copier.options.leave_out_after;
        while !waiting.is_empty() {
            let until = match self.stalled.all(waiting.iter().copied()) {
                true => Instant::now(),
                false => patient,
            };
            let answered = match tokio::time::timeout_at(until, asked.next()).await {
                Ok(answered) => answered,
                Err(_) if takers.is_empty() => {
                    // Somebody has to take it.
                    self.turn = None;
                    asked.next().await
                }
                Err(_) => break,
            };
            let Some((mut taker, answer)) = answered else { break };
            waiting.remove(&taker.destination);
            if self.said_yes(taker.destination, answer) {
                self.look_up(&mut taker, wave.base());
                takers.push(taker);
            }
        }
        for destination in waiting {
            self.stalled.add(destination);
            left_out(self.copier, destination, &self.schema);
            self.again.insert(destination);
        }
        takers
    }

    fn beginning(&self, destination: usize) -> Beginning {
        let place = Place { destination, oid: self.schema.oid };
        self.copier.beginnings.get(&place).copied().unwrap_or_default()
    }

    /// What a destination that has begun lacks.
    fn look_up(&self, taker: &mut Taker, base: Base) {
        let place = Place { destination: taker.destination, oid: self.schema.oid };
        let Some(by) = &self.by else { return };
        let Some(copy) = self.copier.resumes.get(place).filter(|copy| copy.run == by.run) else { return };
        taker.lacks = copy.lacks(base);
        match copy.complete() {
            // It stays as it is: nothing but its end was not told.
            Some(floor) => taker.floor = floor,
            None => taker.cleaned = self.goes_on.then_some(copy.cleaned),
        }
    }

    /// False if the destination said no: for now, which is noted, or for good, which it
    /// has recorded itself.
    fn said_yes(&mut self, destination: usize, answer: Result<()>) -> bool {
        let Err(error) = answer else { return true };
        tracing::warn!(destination = %self.copier.outlets[destination].name, code = error.code(), "{error}");
        if error.is_transient() {
            self.again.insert(destination);
        }
        false
    }

    fn failed(&mut self, takers: &Takers, error: &Error) {
        tracing::warn!(table = %self.schema.name, code = error.code(), next = error.next_step(), "the copy of the table failed: {error}");
        for taker in &takers.all {
            if error.is_transient() || taker.left_out.load(Ordering::Relaxed) {
                self.again.insert(taker.destination);
            } else {
                self.copier.fail_at(taker.destination, self.schema.oid, error);
            }
        }
    }

    async fn finish(&mut self, takers: &Takers) {
        let (copier, oid) = (self.copier, self.schema.oid);
        let mut asked = FuturesUnordered::new();
        for taker in &takers.all {
            let destination = taker.destination;
            if taker.left_out.load(Ordering::Relaxed) {
                self.again.insert(destination);
                continue;
            }
            let (run, floor) = (self.id.clone(), taker.floor);
            asked.push(async move {
                (destination, floor, ask(copier, destination, |done| Copying::Finish { oid, run, done }).await)
            });
        }
        let patient = Instant::now() + copier.options.leave_out_after;
        loop {
            let answered = match tokio::time::timeout_at(patient, asked.next()).await {
                Ok(answered) => answered,
                Err(_) => {
                    self.turn = None;
                    asked.next().await
                }
            };
            let Some((destination, floor, answer)) = answered else { break };
            if self.said_yes(destination, answer) {
                let cursor = Some(Position::of_copy(copier.epoch, floor));
                let beginning = self.beginning(destination);
                let drain = Command::Drain { oid, destination, beginning, floor, cursor };
                // A router that has ended ends us as well.
                let _ = copier.commands.send(drain);
            }
        }
    }
}

/// Asks a destination something and waits for its answer.
async fn ask(
    copier: &Copier,
    destination: usize,
    item: impl FnOnce(oneshot::Sender<Result<()>>) -> Copying,
) -> Result<()> {
    let outlet = &copier.outlets[destination];
    let (done, answered) = oneshot::channel();
    outlet.copying.send(item(done), 1).await.map_err(|_| ended(&outlet.name))?;
    answered.await.map_err(|_| ended(&outlet.name))?
}

/// What one connection reads, on its way to everybody who takes it.
struct Sink {
    takers: Arc<Takers>,
    builder: CopyBuilder,
    /// Room for the large row that comes next, at whoever takes it.
    rooms: Rooms,
    /// Held while that row is read: of all copies and drains one at a time.
    making: Option<OwnedMutexGuard<()>>,
    /// What it reads, if the copy goes by stretches.
    reading: Option<Reading>,
}

/// Room that is taken at destinations.
type Rooms = BTreeMap<usize, Taken>;

impl Sink {
    fn new(takers: Arc<Takers>) -> Sink {
        let builder = CopyBuilder::new(takers.schema.clone());
        Sink { builder, takers, rooms: Rooms::new(), making: None, reading: None }
    }
}

impl RowSink for Sink {
    fn push(&mut self, line: &[u8]) -> Result<bool> {
        self.builder.push(line)?;
        Ok(self.builder.bytes() >= BATCH_BYTES)
    }

    fn most_bytes(&self) -> usize {
        self.takers.copier.memory.row_bytes()
    }

    async fn make_room(&mut self, bytes: usize) -> Result<()> {
        self.rooms = self.takers.rooms(bytes).await?;
        self.making = Some(self.takers.copier.memory.making().await);
        Ok(())
    }

    async fn hand_over(&mut self, source_bytes: u64) -> Result<()> {
        self.takers.unsent.fetch_add(source_bytes, Ordering::Relaxed);
        if self.builder.rows() == 0 {
            return Ok(());
        }
        let rows = self.builder.finish();
        self.making = None;
        self.takers.send(rows, self.reading, std::mem::take(&mut self.rooms)).await
    }

    async fn stretch_begins(&mut self, reading: Reading) -> Result<()> {
        self.reading = Some(reading);
        self.takers.mark(reading, false).await
    }

    async fn stretch_ends(&mut self, reading: Reading) -> Result<()> {
        self.reading = None;
        self.takers.mark(reading, true).await
    }
}

const STOPPED: &str = "copy.stopped";

impl Takers {
    /// Room for a row at everybody who takes it, one after the other: by number, so that no
    /// two wait for each other.
    async fn rooms(&self, bytes: usize) -> Result<Rooms> {
        let mut rooms = Rooms::new();
        for taker in self.all.iter().filter(|taker| taker.takes()) {
            if let Some(taken) = self.room_at(taker, bytes).await? {
                rooms.insert(taker.destination, taken);
            }
        }
        Ok(rooms)
    }

    async fn send(&self, rows: wire::Rows, reading: Option<Reading>, mut rooms: Rooms) -> Result<()> {
        let bytes = rows_weight(&rows);
        let source_bytes = self.unsent.swap(0, Ordering::Relaxed);
        let takers = self.lacking(reading)?;
        let Some((last, others)) = takers.split_last() else { return Ok(()) };
        let item = |rows| {
            let rows = CopiedRows { rows, source_bytes, reading, again: self.again };
            Copying::Rows { oid: self.schema.oid, run: self.id.clone(), rows }
        };
        for taker in others {
            if let Some(taken) = self.room(taker, bytes, &mut rooms).await? {
                self.send_to(taker, item(rows.clone()), taken)?;
            }
        }
        match self.room(last, bytes, &mut rooms).await? {
            Some(taken) => self.send_to(last, item(rows), taken),
            None => Ok(()),
        }
    }

    /// Says that the rows of a stretch begin or end, to those who get them.
    async fn mark(&self, reading: Reading, ended: bool) -> Result<()> {
        for taker in self.lacking(Some(reading))? {
            let mark = Copying::Stretch { oid: self.schema.oid, run: self.id.clone(), reading, ended };
            if let Some(taken) = self.room_at(taker, 1).await? {
                self.send_to(taker, mark, taken)?;
            }
        }
        Ok(())
    }

    /// Says that all deletes up to an LSN were sent, to those who lacked some.
    async fn say_cleaned(&self, through: Lsn) -> Result<()> {
        let lacked = |taker: &&Taker| taker.takes() && taker.cleaned.is_some_and(|cleaned| cleaned < through);
        for taker in self.all.iter().filter(lacked) {
            let cleaned = Copying::Cleaned { oid: self.schema.oid, run: self.id.clone(), through };
            if let Some(taken) = self.room_at(taker, 1).await? {
                self.send_to(taker, cleaned, taken)?;
            }
        }
        Ok(())
    }

    async fn send_deletes(&self, taker: usize, deletes: wire::MergeRows) -> Result<()> {
        let Some(taker) = self.all.get(taker).filter(|taker| taker.takes()) else { return Ok(()) };
        let Some(taken) = self.room_at(taker, rows_weight(&deletes.deletes)).await? else { return Ok(()) };
        self.send_to(taker, Copying::Deletes { oid: self.schema.oid, run: self.id.clone(), deletes }, taken)
    }

    /// Those who still take rows, and lack these.
    fn lacking(&self, reading: Option<Reading>) -> Result<Vec<&Taker>> {
        let takers: Vec<&Taker> = self.all.iter().filter(|taker| taker.takes()).collect();
        if takers.is_empty() {
            return Err(stopped(&self.schema));
        }
        Ok(takers.into_iter().filter(|taker| reading.is_none_or(|reading| taker.lacks(reading))).collect())
    }

    /// What somebody lacks.
    fn lack(&self) -> Vec<Reading> {
        let mut lack: Vec<Reading> = self.all.iter().flat_map(|taker| taker.lacks.iter().copied()).collect();
        // What was never read is first: a restart before the end of all second looks, which
        // are the same again, has got further all the same.
        lack.sort_unstable_by_key(|reading| (reading.look != Look::All, *reading));
        lack.dedup();
        lack
    }

    fn send_to(&self, taker: &Taker, item: Copying, taken: Taken) -> Result<()> {
        let outlet = &self.copier.outlets[taker.destination];
        outlet.copying.send_taken(item, taken).map_err(|_| ended(&outlet.name))
    }

    async fn room(&self, taker: &Taker, bytes: usize, rooms: &mut Rooms) -> Result<Option<Taken>> {
        match rooms.remove(&taker.destination) {
            Some(taken) => Ok(Some(taken)),
            None => self.room_at(taker, bytes).await,
        }
    }

    /// Waits for room; not for ever if somebody else takes the rows too. None: the taker
    /// was left out.
    async fn room_at(&self, taker: &Taker, bytes: usize) -> Result<Option<Taken>> {
        let outlet = &self.copier.outlets[taker.destination];
        let mut waiting = std::pin::pin!(outlet.copying.room(bytes));
        loop {
            match tokio::time::timeout(self.copier.options.leave_out_after, &mut waiting).await {
                Ok(taken) => return taken.map(Some).map_err(|_| ended(&outlet.name)),
                Err(_) if self.leave_out(taker) => return Ok(None),
                Err(_) if self.keeps_others_waiting(taker) => return Err(kept_waiting(&self.schema, &outlet.name)),
                Err(_) => {}
            }
        }
    }

    /// Whether the only one who takes the rows holds connections that others wait for.
    fn keeps_others_waiting(&self, taker: &Taker) -> bool {
        self.stalled.add(taker.destination);
        let waited_for = self.wave.upgrade().is_some_and(|wave| wave.is_waited_for());
        waited_for && self.stalled.others_go_on(taker.destination)
    }

    /// Whether the taker could be left out: somebody has to stay.
    fn leave_out(&self, taker: &Taker) -> bool {
        let _one_at_a_time = self.leaving.lock().unwrap_or_else(PoisonError::into_inner);
        let alone = self.all.iter().filter(|other| other.takes()).all(|other| other.destination == taker.destination);
        if alone {
            return false;
        }
        if !taker.left_out.swap(true, Ordering::Relaxed) {
            self.stalled.add(taker.destination);
            left_out(&self.copier, taker.destination, &self.schema);
        }
        true
    }
}

impl Taker {
    fn takes(&self) -> bool {
        self.run.strong_count() > 0 && !self.left_out.load(Ordering::Relaxed)
    }

    fn lacks(&self, reading: Reading) -> bool {
        self.lacks.binary_search(&reading).is_ok()
    }
}

fn left_out(copier: &Copier, destination: usize, schema: &TableSchema) {
    tracing::warn!(
        destination = %copier.outlets[destination].name, table = %schema.name, code = "copy.left-out",
        "the destination has kept the copy of the table waiting for {} s: it is left out, and gets its own later",
        copier.options.leave_out_after.as_secs_f32()
    );
}

fn kept_waiting(schema: &TableSchema, destination: &str) -> Error {
    let message = format!(
        "destination `{destination}` takes no rows of table {}, and others wait for its connection",
        schema.name
    );
    Error::transient("copy.left-out", message).next("Nothing: the copy begins again when the others are done.")
}

fn no_key(schema: &TableSchema) -> Error {
    Error::permanent("table.no-key", format!("table {} has no key that `merge` could go by", schema.name))
        .next("Give it a primary key, set REPLICA IDENTITY USING INDEX, or use `mode = \"changes\"`.")
}

fn stopped(schema: &TableSchema) -> Error {
    Error::transient(STOPPED, format!("nobody takes the rows of table {} any more", schema.name))
        .next("Look for the error of the destination; the copy begins again.")
}

fn ended(destination: &str) -> Error {
    Error::transient("destination.ended", format!("destination `{destination}` ends"))
}

#[cfg(test)]
#[path = "copy_run_tests.rs"]
mod tests;
