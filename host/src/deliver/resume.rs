//! Copies that can be resumed, shared by those who know of them: destinations write down
//! how far each range is, the copier reads what is left of them, and drains go by their
//! floors (P19).

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::error::Error;
use crate::position::{Lsn, Position};
use crate::schema::table::TableName;
use crate::store::{CopyRecord, RangeRecord, TableRecord, TableState};

use super::floors::Floors;
use super::routes::Place;

/// See the module. What is in here is on disk already, or will be before it counts.
#[derive(Clone, Default)]
pub(super) struct Resumes(Arc<Mutex<HashMap<Place, CopyRecord>>>);

/// How a destination has a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Have {
    /// No row of it.
    Nothing,
    /// Some of its rows, as they were at this floor or later.
    Some(Lsn),
    /// All of it.
    All,
}

impl Have {
    /// Since which floor there may be rows of it that are no more.
    pub fn since(self) -> Option<Lsn> {
        match self {
            Have::Some(since) => Some(since),
            Have::Nothing | Have::All => None,
        }
    }
}

impl Resumes {
    /// What is stored, as far as it fits what is recorded of the tables; and what does not.
    pub fn load(epoch: u32, tables: &[Vec<TableRecord>], copies: Vec<CopyRecord>) -> (Resumes, Vec<CopyRecord>) {
        let records: HashMap<(&str, u32), (usize, &TableRecord)> = tables
            .iter()
            .enumerate()
            .flat_map(|(index, records)| records.iter().map(move |record| (index, record)))
            .map(|(index, record)| ((record.destination.as_str(), record.oid), (index, record)))
            .collect();
        let (mut known, mut useless) = (HashMap::new(), Vec::new());
        for copy in copies {
            match records.get(&(copy.destination.as_str(), copy.oid)) {
                Some((destination, record)) if is_of_use(epoch, &copy, record) => {
                    known.insert(Place { destination: *destination, oid: copy.oid }, copy);
                }
                _ => useless.push(copy),
            }
        }
        (Resumes(Arc::new(Mutex::new(known))), useless)
    }

    /// What is known of a table's copy.
    pub fn get(&self, place: Place) -> Option<CopyRecord> {
        self.lock().get(&place).cloned()
    }

    /// A copy begins.
    pub fn put(&self, place: Place, copy: CopyRecord) {
        self.lock().insert(place, copy);
    }

    /// There is nothing to resume any more. Whether there was.
    pub fn remove(&self, place: Place) -> bool {
        self.lock().remove(&place).is_some()
    }

    /// Says something else of a range of a run; what it is now. None if that run is over.
    pub fn update(
        &self,
        place: Place,
        run: &str,
        number: usize,
        change: impl FnOnce(&mut RangeRecord),
    ) -> Option<RangeRecord> {
        let mut copies = self.lock();
        let range = copies.get_mut(&place).filter(|copy| copy.run == run)?.ranges.get_mut(number)?;
        change(range);
        Some(*range)
    }

    /// How a destination has the ranges of a run.
    pub fn have(&self, place: Place, run: &str) -> Vec<Have> {
        let copies = self.lock();
        let ranges = copies.get(&place).filter(|copy| copy.run == run).map(|copy| copy.ranges.iter());
        let have = |range: &RangeRecord| match (range.since, range.floor) {
            (_, Some(_)) => Have::All,
            (Some(since), None) => Have::Some(since),
            (None, None) => Have::Nothing,
        };
        ranges.into_iter().flatten().map(have).collect()
    }

    /// The smallest floor of a table's ranges, and the largest, once all are done.
    pub fn bounds(&self, place: Place) -> Option<(Lsn, Lsn)> {
        self.lock().get(&place)?.floors()
    }

    /// What keeps changes from the ranges that have them already; none where one floor is
    /// that of all.
    pub fn floors(&self, place: Place) -> Option<Arc<Floors>> {
        let copies = self.lock();
        let copy = copies.get(&place)?;
        let (least, most) = copy.floors()?;
        (least < most).then(|| Arc::new(Floors::new(copy, most)))
    }

    /// Whether a table with this position still needs [`Resumes::floors`].
    pub fn is_below(&self, place: Place, position: Option<Position>) -> bool {
        self.bounds(place).is_some_and(|(least, most)| least < most && is_below(position, most))
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Place, CopyRecord>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn is_below(position: Option<Position>, most: Lsn) -> bool {
    position.is_none_or(|position| position < Position::of_copy(position.epoch, most))
}

/// Whether a copy is the one under way, or its floors are still needed.
fn is_of_use(epoch: u32, copy: &CopyRecord, record: &TableRecord) -> bool {
    match record.state {
        TableState::DataSync => record.run.as_deref() == Some(copy.run.as_str()),
        TableState::CatchUp | TableState::Ready => {
            let same_history = record.position.is_none_or(|position| position.epoch == epoch);
            same_history && copy.floors().is_some_and(|(least, most)| least < most && is_below(record.position, most))
        }
        TableState::Init | TableState::FinishedCopy | TableState::Errored => false,
    }
}

/// Code of [`not_resumable`].
pub(super) const NOT_RESUMABLE: &str = "copy.not-resumable";

/// A copy that was begun is of no use any more: it begins again.
pub(super) fn not_resumable(table: &TableName, why: impl std::fmt::Display) -> Error {
    Error::transient(NOT_RESUMABLE, format!("the copy of table {table} cannot be resumed: {why}"))
        .next("Nothing: the copy begins again by itself.")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::copy::{KeyRanges, KeyType};
    use crate::position::SnapshotId;

    const PLACE: Place = Place { destination: 0, oid: 7 };

    fn copy(floors: &[Option<u64>]) -> CopyRecord {
        let bounds: Vec<String> = (1..floors.len()).map(|bound| bound.to_string()).collect();
        CopyRecord {
            destination: "d".to_owned(),
            oid: 7,
            run: "run".to_owned(),
            snapshot: SnapshotId::default(),
            origin: String::new(),
            column: "id".to_owned(),
            keys: KeyRanges::stored(KeyType::Integer, &bounds).unwrap(),
            ranges: floors
                .iter()
                .map(|floor| RangeRecord { since: floor.map(Lsn), floor: floor.map(Lsn), rows: 0, bytes: 0 })
                .collect(),
        }
    }

    fn record(state: TableState, run: Option<&str>, position: Option<u64>) -> TableRecord {
        TableRecord {
            destination: "d".to_owned(),
            oid: 7,
            state,
            run: run.map(str::to_owned),
            position: position.map(|at| Position::of_copy(0, Lsn(at))),
            ..TableRecord::default()
        }
    }

    fn is_kept(record: TableRecord, copy: CopyRecord) -> bool {
        let (resumes, useless) = Resumes::load(0, &[vec![record]], vec![copy]);
        assert_eq!(resumes.get(PLACE).is_some(), useless.is_empty());
        useless.is_empty()
    }

    #[test]
    fn only_the_run_under_way_and_floors_that_are_still_ahead_are_kept_over_a_restart() {
        use TableState::{CatchUp, DataSync, Errored, Init, Ready};
        let begun = || copy(&[Some(10), None]);
        assert!(is_kept(record(DataSync, Some("run"), None), begun()));
        assert!(!is_kept(record(DataSync, Some("another"), None), begun()));
        assert!(!is_kept(record(DataSync, None, None), begun()));
        assert!(!is_kept(record(Init, Some("run"), None), begun()));
        assert!(!is_kept(record(Errored, Some("run"), None), begun()));
        let done = || copy(&[Some(10), Some(20)]);
        for state in [CatchUp, Ready] {
            assert!(is_kept(record(state, None, Some(10)), done()));
            assert!(is_kept(record(state, None, Some(19)), done()));
            assert!(!is_kept(record(state, None, Some(20)), done()), "the table is beyond them");
            assert!(!is_kept(record(state, None, Some(10)), copy(&[Some(10), Some(10)])), "one floor");
        }
        assert!(!is_kept(TableRecord { oid: 8, ..record(DataSync, Some("run"), None) }, begun()));
    }

    #[test]
    fn ranges_are_said_of_the_run_under_way_alone() {
        let resumes = Resumes::default();
        resumes.put(PLACE, copy(&[Some(10), None, None]));
        let begun = |range: &mut RangeRecord| range.since = Some(Lsn(20));
        assert_eq!(resumes.update(PLACE, "another", 1, begun), None);
        assert_eq!(resumes.update(PLACE, "run", 3, begun), None);
        assert_eq!(resumes.update(PLACE, "run", 1, begun).unwrap().since, Some(Lsn(20)));
        assert_eq!(resumes.have(PLACE, "run"), [Have::All, Have::Some(Lsn(20)), Have::Nothing]);
        assert_eq!(resumes.have(PLACE, "another"), []);
        assert_eq!(resumes.bounds(PLACE), None);
        assert!(resumes.floors(PLACE).is_none());
        for number in [1, 2] {
            resumes.update(PLACE, "run", number, |range| range.floor = Some(Lsn(20)));
        }
        assert_eq!(resumes.bounds(PLACE), Some((Lsn(10), Lsn(20))));
        assert!(resumes.floors(PLACE).is_some());
        assert!(resumes.is_below(PLACE, None) && resumes.is_below(PLACE, Some(Position::of_copy(0, Lsn(19)))));
        assert!(!resumes.is_below(PLACE, Some(Position::of_copy(0, Lsn(20)))));
    }
}
