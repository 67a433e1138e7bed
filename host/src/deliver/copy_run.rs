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
use crate::copy::{RowSink, Turn, Wave, WaveTable};
use crate::error::{Error, Result};
use crate::memory::Taken;
use crate::position::{Lsn, Position};
use crate::schema::table::TableSchema;
use crate::store::CopyRecord;
use crate::wire;

use super::clean::Cleaner;
use super::copier::Copier;
use super::destination::{CopiedRows, CopyBegin, Copying};
use super::resume::{Have, NOT_RESUMABLE, not_resumable};
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
    /// The ranges of the key that it goes by, of a run that goes on perhaps.
    ranges: Option<CopyRecord>,
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
    /// How it has the ranges of the key, if the copy goes by those.
    have: Vec<Have>,
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
    all: Vec<Taker>,
    /// Bytes at the source that were read with no row to send them with.
    unsent: AtomicU64,
    leaving: Mutex<()>,
    wave: Weak<Wave>,
}

impl<'a> CopyRun<'a> {
    /// `ranges`: those of the key that it goes by; with a run, if that goes on.
    pub(super) fn new(
        copier: &'a Copier,
        schema: Arc<TableSchema>,
        ranges: Option<CopyRecord>,
        unread: Unread,
        turn: Turn,
    ) -> CopyRun<'a> {
        let id: Arc<str> = format!("{:016x}", rand::random::<u64>()).into();
        let ranges = ranges.map(|mut copy| {
            if copy.run.is_empty() {
                copy.run = id.to_string();
                copy.snapshot = schema.snapshot;
            }
            copy
        });
        CopyRun {
            copier,
            schema,
            id,
            ranges,
            wanted: unread.wanted.clone(),
            stalled: unread.stalled.clone(),
            unread: Some(unread),
            turn: Some(turn),
            again: BTreeSet::new(),
        }
    }

    /// Returns the destinations that have to get the table again.
    pub(super) async fn copy(mut self, wave: Arc<Wave>, table: &WaveTable) -> BTreeSet<usize> {
        let floor = wave.floor;
        if let Some(copy) = self.ranges.as_ref().filter(|copy| copy.snapshot != self.schema.snapshot) {
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
            all: takers,
            unsent: AtomicU64::new(0),
            leaving: Mutex::default(),
            wave: Arc::downgrade(&wave),
        });
        let sink = || Sink::new(takers.clone());
        let copied = match &self.ranges {
            None => wave.copy_table(table, sink).await.map(drop),
            Some(copy) => match self.clean(copy, &takers, floor).await {
                Ok(()) => wave.copy_table(&takers.left(table, copy), sink).await.map(drop),
                Err(error) => Err(error),
            },
        };
        // All that is needed of the source.
        drop(wave);
        self.unread = None;
        match copied {
            // If all have lost the run, each says why when it is asked to finish.
            Err(error) if error.code() != STOPPED => {
                if let Some(copy) = self.ranges.as_ref().filter(|_| error.code() == NOT_RESUMABLE) {
                    self.cannot_resume(takers.all.iter().map(|taker| taker.destination), &copy.run, &error);
                }
                self.failed(&takers, &error);
            }
            _ => self.finish(&takers, floor).await,
        }
        self.again
    }

    /// What has gone since from ranges that are copied again is deleted first.
    async fn clean(&self, copy: &CopyRecord, takers: &Takers, floor: Lsn) -> Result<()> {
        let have = takers.all.iter().map(|taker| taker.have.as_slice());
        let cleaner = Cleaner::new(self.copier, self.schema.clone(), copy, floor, have);
        let Some(mut cleaner) = cleaner else { return Ok(()) };
        while let Some(deletes) = cleaner.next().await? {
            for (index, deletes) in deletes {
                takers.send_deletes(index, deletes).await?;
            }
        }
        Ok(())
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
                ranges: self.ranges.clone(),
                floor: wave.floor,
                rows_total: table.estimated_rows,
                source_bytes: table.source_bytes,
                alive,
            };
            waiting.insert(destination);
            let copier = self.copier;
            asked.push(async move {
                let answer = ask(copier, destination, |done| Copying::Begin { begin, done }).await;
                (Taker { destination, have: Vec::new(), run, left_out: AtomicBool::new(false) }, answer)
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
                taker.have = self.have(taker.destination);
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

    /// How a destination that has begun has the ranges.
    fn have(&self, destination: usize) -> Vec<Have> {
        let place = Place { destination, oid: self.schema.oid };
        self.ranges.as_ref().map(|copy| self.copier.resumes.have(place, &copy.run)).unwrap_or_default()
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

    async fn finish(&mut self, takers: &Takers, floor: Lsn) {
        let (copier, oid) = (self.copier, self.schema.oid);
        let mut asked = FuturesUnordered::new();
        for taker in &takers.all {
            let destination = taker.destination;
            if taker.left_out.load(Ordering::Relaxed) {
                self.again.insert(destination);
                continue;
            }
            let run = self.id.clone();
            asked.push(async move {
                (destination, ask(copier, destination, |done| Copying::Finish { oid, run, done }).await)
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
            let Some((destination, answer)) = answered else { break };
            if self.said_yes(destination, answer) {
                // Of ranges that were copied in several snapshots the first one's counts.
                let bounds = copier.resumes.bounds(Place { destination, oid });
                let floor = bounds.map_or(floor, |(least, _)| least);
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
    /// The range of the key that it reads, if the copy goes by those.
    range: Option<usize>,
}

/// Room that is taken at destinations.
type Rooms = BTreeMap<usize, Taken>;

impl Sink {
    fn new(takers: Arc<Takers>) -> Sink {
        let builder = CopyBuilder::new(takers.schema.clone());
        Sink { builder, takers, rooms: Rooms::new(), making: None, range: None }
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
        self.takers.send(rows, self.range, std::mem::take(&mut self.rooms)).await
    }

    async fn range_begins(&mut self, number: usize) -> Result<()> {
        self.range = Some(number);
        self.takers.mark(number, false).await
    }

    async fn range_ends(&mut self, number: usize) -> Result<()> {
        self.range = None;
        self.takers.mark(number, true).await
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

    async fn send(&self, rows: wire::Rows, range: Option<usize>, mut rooms: Rooms) -> Result<()> {
        let bytes = rows_weight(&rows);
        let source_bytes = self.unsent.swap(0, Ordering::Relaxed);
        let takers = self.lacking(range)?;
        let Some((last, others)) = takers.split_last() else { return Ok(()) };
        let item = |taker: &Taker, rows| {
            let rows = CopiedRows { rows, source_bytes, range, again: taker.has_some(range) };
            Copying::Rows { oid: self.schema.oid, run: self.id.clone(), rows }
        };
        for taker in others {
            if let Some(taken) = self.room(taker, bytes, &mut rooms).await? {
                self.send_to(taker, item(taker, rows.clone()), taken)?;
            }
        }
        match self.room(last, bytes, &mut rooms).await? {
            Some(taken) => self.send_to(last, item(last, rows), taken),
            None => Ok(()),
        }
    }

    /// Says that the rows of a range begin or end, to those who get them.
    async fn mark(&self, number: usize, ended: bool) -> Result<()> {
        for taker in self.lacking(Some(number))? {
            let mark = Copying::Range { oid: self.schema.oid, run: self.id.clone(), number, ended };
            if let Some(taken) = self.room_at(taker, 1).await? {
                self.send_to(taker, mark, taken)?;
            }
        }
        Ok(())
    }

    async fn send_deletes(&self, taker: usize, deletes: wire::MergeRows) -> Result<()> {
        let Some(taker) = self.all.get(taker).filter(|taker| taker.takes()) else { return Ok(()) };
        let Some(taken) = self.room_at(taker, rows_weight(&deletes.deletes)).await? else { return Ok(()) };
        self.send_to(taker, Copying::Deletes { oid: self.schema.oid, run: self.id.clone(), deletes }, taken)
    }

    /// Those who still take rows, and lack this range.
    fn lacking(&self, range: Option<usize>) -> Result<Vec<&Taker>> {
        let takers: Vec<&Taker> = self.all.iter().filter(|taker| taker.takes()).collect();
        if takers.is_empty() {
            return Err(stopped(&self.schema));
        }
        Ok(takers.into_iter().filter(|taker| range.is_none_or(|number| taker.lacks(number))).collect())
    }

    /// The ranges that somebody lacks.
    fn left(&self, table: &WaveTable, copy: &CopyRecord) -> WaveTable {
        let lacks = |number: &usize| self.all.iter().any(|taker| taker.lacks(*number));
        let numbers: Vec<usize> = (0..copy.keys.count()).filter(lacks).collect();
        table.by_keys(&copy.column, &copy.keys, &numbers)
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

    fn lacks(&self, number: usize) -> bool {
        self.have.get(number) != Some(&Have::All)
    }

    /// Whether rows of the range may be there already.
    fn has_some(&self, range: Option<usize>) -> bool {
        range.and_then(|number| self.have.get(number)).is_some_and(|have| have.since().is_some())
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
