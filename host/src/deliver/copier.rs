//! Copies tables: in waves of one snapshot, once for all destinations that want a
//! table at that moment (P16, P20).

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;

use crate::copy::{Spool, Wave, WaveOptions, WaveTable, snapshot};
use crate::error::{Error, Result};
use crate::memory::Budget;
use crate::source::catalog::{PublishedTable, published_tables};
use crate::source::config::SourceConfig;
use crate::source::session::connect;
use crate::status::StatusBoard;
use crate::store::{CopyRecord, StretchRecord};

use super::copy_run::{CopyRun, Stalled};
use super::destination::Copying;
use super::inbox::Sender;
use super::resume::Resumes;
use super::retry::Backoff;
use super::routes::{Beginning, Command, Place};
use super::versions::Versions;

/// How often the age of a copy's snapshot is shown.
const SHOW_AGE: Duration = Duration::from_secs(1);

/// Where a destination takes copies.
#[derive(Clone)]
pub(super) struct CopyOutlet {
    pub name: String,
    pub copying: Sender<Copying>,
    /// Rows without a key cannot be merged.
    pub needs_key: bool,
    /// A run may go on after a restart: rows are merged, and the plugin can.
    pub resumes: bool,
}

/// What a copier works with.
#[derive(Clone)]
pub(super) struct Copier {
    pub source: Arc<SourceConfig>,
    pub outlets: Arc<[CopyOutlet]>,
    pub versions: Versions,
    /// To the router.
    pub commands: mpsc::UnboundedSender<Command>,
    pub options: WaveOptions,
    pub epoch: u32,
    pub memory: Budget,
    pub ages: Ages,
    pub resumes: Resumes,
    /// By which the tables of a wave were asked for.
    pub beginnings: Arc<Beginnings>,
    /// A table of so many bytes is worth to be resumed.
    pub resume_bytes: u64,
    pub spool: Spool,
}

/// What a copier is asked for.
pub(super) enum Ask {
    /// A destination wants a table, whose changes are spooled already (P15).
    Copy { oid: u32, destination: usize, beginning: Beginning },
    /// Another destination; its number is the next one.
    Destination(CopyOutlet),
}

/// Tables to copy, and the destinations that want each.
type Wanted = BTreeMap<u32, BTreeSet<usize>>;
/// The last one of each place; of those that are not here, the one of the start.
pub(super) type Beginnings = HashMap<Place, Beginning>;

/// Waves at a time: one that takes hours must not keep a table waiting that joins
/// meanwhile.
const WAVES: usize = 2;
/// How long tables that are wanted one behind the other have to become one wave.
const GATHER: Duration = Duration::from_millis(50);

/// How the copy of one table went: for whom it was, and who of them has to get it again.
struct Copied {
    oid: u32,
    wanted: BTreeSet<usize>,
    again: BTreeSet<usize>,
}

/// Destinations that get a table by one read, and the stretches that it goes by; with a
/// run, if that goes on.
struct Group {
    wanted: BTreeSet<usize>,
    copy: Option<CopyRecord>,
}

impl Copier {
    /// Copies what is asked for, until it is told to stop.
    pub async fn run(mut self, mut asks: mpsc::UnboundedReceiver<Ask>, mut stopping: watch::Receiver<bool>) {
        let mut wanted = Wanted::new();
        let mut waves: JoinSet<(Wanted, bool)> = JoinSet::new();
        let mut under_way: HashMap<tokio::task::Id, (Wanted, Arc<Beginnings>)> = HashMap::new();
        let mut backoff = Backoff::transient();
        let mut begin = Instant::now();
        loop {
            let free = !wanted.is_empty() && waves.len() < WAVES;
            tokio::select! {
                _ = stopping.wait_for(|stopping| *stopping) => return,
                ask = asks.recv() => match ask {
                    Some(Ask::Copy { oid, destination, beginning }) => {
                        let known = self.beginnings.get(&Place { destination, oid });
                        if known.is_some_and(|known| beginning < *known) {
                            continue;
                        }
                        Arc::make_mut(&mut self.beginnings).insert(Place { destination, oid }, beginning);
                        if wanted.is_empty() {
                            begin = begin.max(Instant::now() + GATHER);
                        }
                        wanted.entry(oid).or_default().insert(destination);
                    }
                    Some(Ask::Destination(outlet)) => self.outlets = self.outlets.iter().cloned().chain([outlet]).collect(),
                    None => return,
                },
                Some(ended) = waves.join_next_with_id() => {
                    let (id, ended) = match ended {
                        Ok((id, ended)) => (id, Some(ended)),
                        Err(error) => (error.id(), None),
                    };
                    let (asked, beginnings) = under_way.remove(&id).unwrap_or_default();
                    // One that panicked copied nothing to rely on.
                    let (mut again, progress) = ended.unwrap_or((asked, false));
                    drop_superseded(&mut again, &beginnings, &self.beginnings);
                    if progress {
                        backoff.reset();
                    }
                    if !again.is_empty() {
                        begin = Instant::now() + backoff.pause(None);
                        for (oid, destinations) in again {
                            wanted.entry(oid).or_default().extend(destinations);
                        }
                    }
                }
                () = tokio::time::sleep_until(begin.into()), if free => {
                    let wanted = std::mem::take(&mut wanted);
                    let wave = waves.spawn(self.clone().try_wave(wanted.clone()));
                    under_way.insert(wave.id(), (wanted, self.beginnings.clone()));
                }
            }
        }
    }

    /// One wave. What has to be copied again, and whether anything was copied.
    async fn try_wave(self, mut wanted: Wanted) -> (Wanted, bool) {
        let count = |wanted: &Wanted| wanted.values().map(BTreeSet::len).sum::<usize>();
        let before = count(&wanted);
        if let Err(error) = self.wave(&mut wanted).await {
            tracing::warn!(
                code = error.code(),
                next = error.next_step(),
                tables = wanted.len(),
                "a copy did not begin; trying again: {error}"
            );
        }
        let progress = count(&wanted) < before;
        (wanted, progress)
    }

    /// One snapshot, and all wanted tables in it, side by side.
    async fn wave(&self, wanted: &mut Wanted) -> Result<()> {
        let session = connect(&self.source).await?;
        let published = published_tables(&session, &self.source.publication).await?;
        drop(session);
        let tables: Vec<PublishedTable> =
            published.into_iter().filter(|table| wanted.contains_key(&table.oid)).collect();
        self.give_up_unpublished(wanted, &tables);
        if tables.is_empty() {
            return Ok(());
        }
        let wave = Arc::new(snapshot::take(&self.source, &tables, &self.options).await?);
        crate::failpoint::reached("copy.snapshot");
        for (oid, error) in &wave.skipped {
            tracing::warn!(
                oid,
                code = error.code(),
                next = error.next_step(),
                "the table is left out of this copy: {error}"
            );
            if !error.is_transient() {
                self.fail(wanted, *oid, error);
            }
        }
        self.ages.watch(&wave, self.options.warn_age);
        let stalled = Stalled::default();
        let mut copies = JoinSet::new();
        for table in &wave.tables {
            let Some(destinations) = wanted.get(&table.table.oid).cloned() else { continue };
            for group in self.groups(&wave, table, destinations) {
                let (copier, wave, table, stalled) = (self.clone(), wave.clone(), table.clone(), stalled.clone());
                copies.spawn(async move { copier.copy(wave, table, group, stalled).await });
            }
        }
        // The snapshot goes with the last table that is read.
        drop(wave);
        while let Some(copied) = copies.join_next().await {
            let copied = copied.map_err(|error| {
                Error::transient("copy.panicked", format!("the copy of a table was cut short: {error}"))
            })?;
            if let Some(left) = wanted.get_mut(&copied.oid) {
                left.retain(|destination| !copied.wanted.contains(destination) || copied.again.contains(destination));
                if left.is_empty() {
                    wanted.remove(&copied.oid);
                }
            }
        }
        Ok(())
    }

    /// Destinations whose run goes on share a read with those of the same run; all others
    /// begin together (P19, P20).
    fn groups(&self, wave: &Wave, table: &WaveTable, wanted: BTreeSet<usize>) -> Vec<Group> {
        let origin = format!("{}, epoch {}", wave.origin(table), self.epoch);
        let mut runs: BTreeMap<String, Group> = BTreeMap::new();
        let mut fresh = BTreeSet::new();
        for destination in wanted {
            let place = Place { destination, oid: table.table.oid };
            let name = &self.outlets[destination].name;
            match self.resumes.get(place) {
                Some(copy)
                    if copy.origin == origin && copy.goes_on_in(wave.base()) && self.outlets[destination].resumes =>
                {
                    let group = runs
                        .entry(copy.run.clone())
                        .or_insert_with(|| Group { wanted: BTreeSet::new(), copy: Some(copy) });
                    group.wanted.insert(destination);
                }
                Some(_) => {
                    tracing::warn!(
                        destination = %name, table = %table.table.name,
                        "the copy of the table begins again: the table was altered, rewritten or truncated since, or too long ago, or the destination cannot go on"
                    );
                    self.resumes.remove(place);
                    fresh.insert(destination);
                }
                None => {
                    fresh.insert(destination);
                }
            }
        }
        let mut groups: Vec<Group> = runs.into_values().collect();
        if !fresh.is_empty() {
            let copy = self.stretches(wave, table, &fresh, origin);
            groups.push(Group { wanted: fresh, copy });
        }
        groups
    }

    /// The stretches of a copy that begins, if it is worth to be resumed and can be.
    fn stretches(
        &self,
        wave: &Wave,
        table: &WaveTable,
        wanted: &BTreeSet<usize>,
        origin: String,
    ) -> Option<CopyRecord> {
        let can = wanted.iter().all(|destination| self.outlets[*destination].resumes);
        // What went is told by its key.
        if !can || table.source_bytes < self.resume_bytes || table.schema.merge_key().is_empty() {
            return None;
        }
        let stretches = wave.stretches(table, self.resume_bytes)?;
        tracing::info!(table = %table.table.name, "the table is copied by {} stretches", stretches.len());
        Some(CopyRecord {
            destination: String::new(),
            oid: table.table.oid,
            run: String::new(),
            snapshot: table.schema.snapshot,
            origin,
            cleaned: wave.floor,
            stretches: stretches.into_iter().map(StretchRecord::new).collect(),
        })
    }

    fn give_up_unpublished(&self, wanted: &mut Wanted, tables: &[PublishedTable]) {
        let found: HashSet<u32> = tables.iter().map(|table| table.oid).collect();
        let gone: Vec<u32> = wanted.keys().filter(|oid| !found.contains(oid)).copied().collect();
        for oid in gone {
            let error = Error::permanent("table.unpublished", format!("table {oid} has left the publication"))
                .next("Add it again, then run `tidegate resync DEST TABLE`.");
            self.fail(wanted, oid, &error);
        }
    }

    fn fail(&self, wanted: &mut Wanted, oid: u32, error: &Error) {
        for destination in wanted.remove(&oid).unwrap_or_default() {
            self.fail_at(destination, oid, error);
        }
    }

    pub(super) fn fail_at(&self, destination: usize, oid: u32, error: &Error) {
        // If the destination has ended there is nobody to tell.
        let _ = self.outlets[destination].copying.send_now(Copying::Failed { oid, error: error.into() });
    }

    /// One table, to destinations that want it.
    async fn copy(self, wave: Arc<Wave>, table: WaveTable, group: Group, stalled: Stalled) -> Copied {
        let oid = table.table.oid;
        let Group { wanted, copy } = group;
        let unread = stalled.unread(&wanted);
        let turn = wave.turn(&table).await;
        let versioned = self.versions.copied(table.schema.clone()).await;
        crate::failpoint::reached("copy.versioned");
        let again = match versioned {
            Ok(schema) => CopyRun::new(&self, schema, copy, unread, turn).copy(wave, &table).await,
            Err(error) => {
                tracing::warn!(table = %table.table.name, code = error.code(), next = error.next_step(), "the copy of the table did not begin: {error}");
                if !error.is_transient() {
                    wanted.iter().for_each(|destination| self.fail_at(*destination, oid, &error));
                }
                if error.is_transient() { wanted.clone() } else { BTreeSet::new() }
            }
        };
        Copied { oid, wanted, again }
    }
}

/// What was asked for anew since is copied for that, and not for this again.
fn drop_superseded(again: &mut Wanted, asked_by: &Beginnings, last: &Beginnings) {
    for (oid, destinations) in again.iter_mut() {
        destinations.retain(|destination| {
            let place = Place { destination: *destination, oid: *oid };
            asked_by.get(&place) == last.get(&place)
        });
    }
    again.retain(|_, destinations| !destinations.is_empty());
}

/// The snapshots that copies hold, as `status` shows them: vacuum waits for the oldest
/// (P17).
#[derive(Clone)]
pub(super) struct Ages {
    board: StatusBoard,
    held: Arc<Mutex<Vec<Instant>>>,
}

impl Ages {
    pub fn new(board: StatusBoard) -> Ages {
        Ages { board, held: Arc::default() }
    }

    /// Shows the age of a wave's snapshot for as long as it is held.
    fn watch(&self, wave: &Arc<Wave>, warn_age: Duration) {
        let (ages, taken_at, wave) = (self.clone(), wave.taken_at, Arc::downgrade(wave));
        tokio::spawn(async move {
            ages.change(|held| held.push(taken_at));
            let mut warned = false;
            while wave.strong_count() > 0 {
                ages.change(|_| {});
                if taken_at.elapsed() > warn_age && !std::mem::replace(&mut warned, true) {
                    tracing::warn!(
                        code = "copy.old-snapshot",
                        next = "See in `tidegate status` what the copy waits for; stop it if the source suffers.",
                        "the snapshot of a copy is older than {} s: vacuum keeps the dead rows of its database",
                        warn_age.as_secs()
                    );
                }
                tokio::time::sleep(SHOW_AGE).await;
            }
            ages.change(|held| {
                if let Some(index) = held.iter().position(|known| *known == taken_at) {
                    held.swap_remove(index);
                }
            });
        });
    }

    fn change(&self, change: impl FnOnce(&mut Vec<Instant>)) {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        change(&mut held);
        let oldest = held.iter().min().map(|taken_at| taken_at.elapsed().as_secs_f64());
        self.board.update(|report| report.copy_snapshot_seconds = oldest);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_that_failed_is_not_made_again_for_who_has_asked_anew_since() {
        let place = |destination, oid| Place { destination, oid };
        let (first, second) = (Beginning::default().next(), Beginning::default().next().next());
        let asked_by = Beginnings::from([(place(0, 7), first), (place(0, 8), first)]);
        let last = Beginnings::from([(place(0, 7), second), (place(0, 8), first), (place(1, 9), first)]);
        let both = BTreeSet::from([0, 1]);
        let mut again = Wanted::from([(7, both.clone()), (8, BTreeSet::from([0])), (9, both)]);
        drop_superseded(&mut again, &asked_by, &last);
        // The one of 7 for 1, and of 9 for 0, are those of the start.
        let left = [(7, BTreeSet::from([1])), (8, BTreeSet::from([0])), (9, BTreeSet::from([0]))];
        assert_eq!(again, Wanted::from(left));
    }
}
