//! How long versions of a table's schema are kept (P5): the newest so many, and beyond
//! them all that a row that may still come, or a destination, needs.
//!
//! A version is needed by rows written before its successor was committed. Once the slot
//! could begin again behind that (`restart_lsn`), such rows are of transactions that had
//! committed where the slot was then: when every destination has those, nobody will
//! decode one any more.

use std::time::{Duration, Instant};

use tokio_postgres::Client;

use crate::error::Result;
use crate::position::{Lsn, SnapshotId};
use crate::source::session::sql_error;
use crate::store::{Loaded, TableRecord, TableState};

use super::launch::Launcher;

/// How often somebody who is behind is looked at again: that reads the whole state.
const AGAIN_AFTER: Duration = Duration::from_secs(60);

/// Where the slot was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Slot {
    /// Commits behind it are still to come, or may come again.
    confirmed: Lsn,
    /// No row of theirs was written before it.
    restart: Lsn,
}

/// See the module.
pub(super) struct Retention {
    keep: usize,
    slot: Option<Slot>,
    not_before: Option<Instant>,
}

impl Retention {
    /// Keeps the newest `keep` versions of a table, and as many tables that have ended.
    pub fn new(keep: usize) -> Retention {
        Retention { keep, slot: None, not_before: None }
    }

    /// Removes what is too much, as far as nobody needs it.
    pub async fn look(
        &mut self,
        client: &Client,
        slot: &str,
        launcher: &Launcher,
        destinations: &[&str],
    ) -> Result<()> {
        let (long, ended) = {
            let history = launcher.history.read();
            let mut ended = history.ended();
            ended.truncate(ended.len().saturating_sub(self.keep));
            (history.longer_than(self.keep), ended)
        };
        if long.is_empty() && ended.is_empty() || self.not_before.is_some_and(|at| at > Instant::now()) {
            return Ok(());
        }
        let Some(before) = self.slot else {
            self.slot = where_it_is(client, slot).await?;
            return Ok(());
        };
        let loaded = launcher.store.loaded().await?;
        let mut removed = 0;
        for oid in long {
            let end = launcher.checkpoints.spool.end(oid);
            let Some(applied) = needed(&loaded, destinations, oid, end, before.confirmed) else { continue };
            let versions = launcher.history.read().removable(oid, self.keep, before.restart, applied);
            if !versions.is_empty() {
                let gone = launcher.store.remove_versions(oid, versions).await?;
                launcher.history.write().remove(oid, &gone);
                removed += gone.len();
            }
        }
        let all_passed = checkpoints(&loaded, destinations).all(|checkpoint| checkpoint >= before.confirmed);
        for (at, oid) in ended {
            if all_passed && at.commit < before.restart && launcher.store.forget_history(oid).await? {
                launcher.history.write().forget(oid);
                removed += 1;
            }
        }
        if removed > 0 {
            tracing::info!("{removed} old versions of tables' schemas were removed from the history");
        }
        // Versions that came since need a later look at the slot.
        self.slot = None;
        self.not_before = (removed == 0).then(|| Instant::now() + AGAIN_AFTER);
        Ok(())
    }
}

async fn where_it_is(client: &Client, slot: &str) -> Result<Option<Slot>> {
    let sql = "SELECT confirmed_flush_lsn::text, restart_lsn::text FROM pg_replication_slots WHERE slot_name = $1";
    let row = client.query_opt(sql, &[&slot]).await.map_err(|error| sql_error(&error, "looking at the slot"))?;
    let lsn = |index: usize| row.as_ref()?.get::<_, Option<&str>>(index)?.parse().ok();
    Ok(lsn(0).zip(lsn(1)).map(|(confirmed, restart)| Slot { confirmed, restart }))
}

fn checkpoints<'a>(loaded: &'a Loaded, destinations: &'a [&str]) -> impl Iterator<Item = Lsn> + 'a {
    let known = |name: &&str| loaded.destinations.iter().find(|record| record.name == **name);
    destinations.iter().map(move |name| known(name).map_or(Lsn::ZERO, |record| record.checkpoint))
}

/// None if a destination may still have to be sent a change of the table that was committed
/// before `at`. Else the oldest version that one of them is at and goes on from, if any is.
///
/// `spooled`: the last change of the table in the spool.
fn needed(
    loaded: &Loaded,
    destinations: &[&str],
    oid: u32,
    spooled: Option<(Lsn, u64)>,
    at: Lsn,
) -> Option<Option<SnapshotId>> {
    let mut oldest: Option<SnapshotId> = None;
    for (name, checkpoint) in destinations.iter().zip(checkpoints(loaded, destinations)) {
        let is_it = |record: &&TableRecord| record.oid == oid && record.destination == **name;
        let Some(record) = loaded.tables.iter().find(is_it) else { continue };
        if record.state == TableState::Errored {
            // A new copy begins behind all there is.
            continue;
        }
        let resumes = loaded.copies.iter().any(|copy| copy.oid == oid && copy.destination == **name);
        if resumes || reached(record, checkpoint, spooled).is_some_and(|reached| reached < at) {
            return None;
        }
        let applying = record.applying.map(|applying| applying.from);
        oldest = [oldest, record.applied, applying].into_iter().flatten().min();
    }
    Some(oldest)
}

/// Up to where nothing of a table is to be sent to a destination; none: its copy is still
/// to come, behind all there is.
fn reached(record: &TableRecord, checkpoint: Lsn, spooled: Option<(Lsn, u64)>) -> Option<Lsn> {
    let position = record.position.map(|position| (position.commit, position.ordinal));
    match record.state {
        TableState::Init => None,
        TableState::Ready if spooled <= position => Some(checkpoint),
        // A checkpoint passes what is in the spool.
        _ => Some(position.map_or(record.floor.unwrap_or_default(), |(commit, _)| commit)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::position::Position;
    use crate::store::{Applying, DestinationRecord};

    fn id(commit: u64) -> SnapshotId {
        SnapshotId { commit: Lsn(commit), message: Lsn(commit - 1) }
    }

    fn record(destination: &str, state: TableState, position: Option<u64>) -> TableRecord {
        TableRecord {
            destination: destination.to_owned(),
            oid: 7,
            state,
            position: position.map(|commit| Position { epoch: 0, commit: Lsn(commit), ordinal: 1 }),
            applied: Some(id(50)),
            ..TableRecord::default()
        }
    }

    /// Destinations `a` with the checkpoint 100 and `b` with 200.
    fn loaded(tables: Vec<TableRecord>) -> Loaded {
        let destination = |name: &str, checkpoint| DestinationRecord {
            name: name.to_owned(),
            plugin: String::new(),
            checkpoint: Lsn(checkpoint),
        };
        let destinations = vec![destination("a", 100), destination("b", 200), destination("gone", 1)];
        Loaded { destinations, tables, ..Loaded::default() }
    }

    fn of(tables: Vec<TableRecord>, spooled: Option<u64>, at: u64) -> Option<Option<SnapshotId>> {
        needed(&loaded(tables), &["a", "b"], 7, spooled.map(|commit| (Lsn(commit), 0)), Lsn(at))
    }

    #[test]
    fn a_table_that_is_live_has_all_below_its_destinations_checkpoint() {
        let tables = || vec![record("a", TableState::Ready, Some(10)), record("b", TableState::Ready, Some(20))];
        assert_eq!(of(tables(), None, 100), Some(Some(id(50))));
        assert_eq!(of(tables(), None, 101), None, "a is not there");
        let only_b = vec![record("b", TableState::Ready, None), record("gone", TableState::Ready, None)];
        assert_eq!(of(only_b, None, 200), Some(Some(id(50))), "who is not in the configuration does not count");
    }

    #[test]
    fn what_is_in_the_spool_is_below_no_checkpoint() {
        let behind = || vec![record("b", TableState::CatchUp, Some(60))];
        assert_eq!((of(behind(), None, 60), of(behind(), None, 61)), (Some(Some(id(50))), None));
        // As it is stored while a destination that hangs was not told yet.
        let stale = || vec![record("b", TableState::Ready, Some(60))];
        assert_eq!((of(stale(), Some(60), 61), of(stale(), Some(61), 61)), (Some(Some(id(50))), None));
    }

    #[test]
    fn a_copy_needs_what_is_behind_its_floor_and_one_to_come_nothing() {
        let copying = |floor: u64| {
            let record = record("a", TableState::DataSync, None);
            vec![TableRecord { floor: Some(Lsn(floor)), applied: None, ..record }]
        };
        assert_eq!((of(copying(80), None, 80), of(copying(80), None, 81)), (Some(None), None));
        let to_come = vec![TableRecord { applied: None, ..record("a", TableState::Init, None) }];
        assert_eq!(of(to_come, None, 1000), Some(None));
        assert_eq!(of(vec![record("a", TableState::Errored, Some(1))], None, 1000), Some(None));
    }

    #[test]
    fn the_oldest_version_that_a_destination_goes_on_from_counts() {
        let mut tables = vec![record("a", TableState::Ready, Some(10)), record("b", TableState::Ready, Some(20))];
        tables[1].applied = Some(id(30));
        assert_eq!(of(tables.clone(), None, 100), Some(Some(id(30))));
        tables[0].applying = Some(Applying { from: id(20), to: id(60), step: 0 });
        assert_eq!(of(tables, None, 100), Some(Some(id(20))));
    }
}
