//! Copies that can be resumed, shared by those who know of them: destinations write down
//! how far each stretch is, and the copier reads what is left of them (P19).

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::error::Error;
use crate::schema::table::TableName;
use crate::store::{CopyRecord, StretchRecord, TableRecord, TableState};

use super::routes::Place;

/// See the module. What is in here is on disk already, or will be before it counts.
#[derive(Clone, Default)]
pub(super) struct Resumes(Arc<Mutex<HashMap<Place, CopyRecord>>>);

impl Resumes {
    /// What is stored, as far as it fits what is recorded of the tables; and what does not.
    pub fn load(tables: &[Vec<TableRecord>], copies: Vec<CopyRecord>) -> (Resumes, Vec<CopyRecord>) {
        let records: HashMap<(&str, u32), (usize, &TableRecord)> = tables
            .iter()
            .enumerate()
            .flat_map(|(index, records)| records.iter().map(move |record| (index, record)))
            .map(|(index, record)| ((record.destination.as_str(), record.oid), (index, record)))
            .collect();
        let (mut known, mut useless) = (HashMap::new(), Vec::new());
        for copy in copies {
            match records.get(&(copy.destination.as_str(), copy.oid)) {
                Some((destination, record)) if is_of_use(&copy, record) => {
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

    /// Says something else of a run; what it is now. None if that run is over.
    pub fn update(&self, place: Place, run: &str, change: impl FnOnce(&mut CopyRecord)) -> Option<CopyRecord> {
        let mut copies = self.lock();
        let copy = copies.get_mut(&place).filter(|copy| copy.run == run)?;
        change(copy);
        Some(copy.clone())
    }

    /// The same of a stretch of it.
    pub fn update_stretch(
        &self,
        place: Place,
        run: &str,
        number: usize,
        change: impl FnOnce(&mut StretchRecord),
    ) -> Option<StretchRecord> {
        let mut copies = self.lock();
        let stretch = copies.get_mut(&place).filter(|copy| copy.run == run)?.stretches.get_mut(number)?;
        change(stretch);
        Some(*stretch)
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Place, CopyRecord>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether a copy is the one under way.
fn is_of_use(copy: &CopyRecord, record: &TableRecord) -> bool {
    record.state == TableState::DataSync && record.run.as_deref() == Some(copy.run.as_str())
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
    use crate::copy::{Base, Stretch};
    use crate::position::{Lsn, SnapshotId};

    const PLACE: Place = Place { destination: 0, oid: 7 };

    fn copy() -> CopyRecord {
        let stretch = |number: u64| Stretch { leaf: 7, from: number, to: (number < 2).then_some(number + 1) };
        CopyRecord {
            destination: "d".to_owned(),
            oid: 7,
            run: "run".to_owned(),
            snapshot: SnapshotId::default(),
            origin: String::new(),
            cleaned: Lsn(10),
            stretches: (0..3).map(stretch).map(StretchRecord::new).collect(),
        }
    }

    fn record(state: TableState, run: Option<&str>) -> TableRecord {
        TableRecord {
            destination: "d".to_owned(),
            oid: 7,
            state,
            run: run.map(str::to_owned),
            ..TableRecord::default()
        }
    }

    fn is_kept(record: TableRecord) -> bool {
        let (resumes, useless) = Resumes::load(&[vec![record]], vec![copy()]);
        assert_eq!(resumes.get(PLACE).is_some(), useless.is_empty());
        useless.is_empty()
    }

    #[test]
    fn only_the_run_under_way_is_kept_over_a_restart() {
        use TableState::{CatchUp, DataSync, Errored, Init, Ready};
        assert!(is_kept(record(DataSync, Some("run"))));
        assert!(!is_kept(record(DataSync, Some("another"))));
        assert!(!is_kept(record(DataSync, None)));
        for state in [Init, CatchUp, Ready, Errored] {
            assert!(!is_kept(record(state, Some("run"))), "{state:?}");
        }
        assert!(!is_kept(TableRecord { oid: 8, ..record(DataSync, Some("run")) }));
    }

    #[test]
    fn stretches_are_said_of_the_run_under_way_alone() {
        let resumes = Resumes::default();
        resumes.put(PLACE, copy());
        let base = Some(Base { floor: Lsn(20), xmin: 5 });
        let done = |stretch: &mut StretchRecord| stretch.base = base;
        assert_eq!(resumes.update_stretch(PLACE, "another", 1, done), None);
        assert_eq!(resumes.update_stretch(PLACE, "run", 3, done), None);
        assert_eq!(resumes.update_stretch(PLACE, "run", 1, done).unwrap().base, base);
        assert_eq!(resumes.update(PLACE, "another", |copy| copy.cleaned = Lsn(20)), None);
        assert_eq!(resumes.update(PLACE, "run", |copy| copy.cleaned = Lsn(30)).unwrap().cleaned, Lsn(30));
        let known: Vec<Option<Base>> =
            resumes.get(PLACE).unwrap().stretches.iter().map(|stretch| stretch.base).collect();
        assert_eq!(known, [None, base, None]);
        assert!(resumes.remove(PLACE) && !resumes.remove(PLACE));
    }
}
