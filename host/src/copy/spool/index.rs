//! Where a table's frames stand in a segment.

/// Frames of other tables that a reader skips sooner than that a run ends: a page,
/// which is read from disk anyway. Bounds the index to one run per page and table.
const GAP: u64 = 4096;

/// A table's place in the stream: commit, ordinal.
pub(super) type Place = (crate::position::Lsn, u64);

/// A range of a segment that begins and ends with frames of one table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Run {
    pub start: u64,
    pub end: u64,
}

/// A table's frames in one segment.
#[derive(Debug, Default)]
pub(super) struct TableIndex {
    runs: Vec<Run>,
    /// Of the last change or schema frame.
    last: Place,
}

impl TableIndex {
    /// Adds a frame behind all others; `place` is that of a change or schema frame.
    pub(super) fn push(&mut self, run: Run, place: Option<Place>) {
        match self.runs.last_mut() {
            Some(last) if run.start - last.end <= GAP => last.end = run.end,
            _ => self.runs.push(run),
        }
        if let Some(place) = place {
            self.last = place;
        }
    }

    /// Adds all frames of `later`, which stand behind ours.
    pub(super) fn extend(&mut self, later: TableIndex) {
        for run in later.runs {
            self.push(run, None);
        }
        self.last = self.last.max(later.last);
    }

    /// What there is at or behind `offset`, up to the end of a run.
    pub(super) fn from(&self, offset: u64) -> Option<Run> {
        let next = self.runs.partition_point(|run| run.end <= offset);
        self.runs.get(next).map(|run| Run { start: run.start.max(offset), end: run.end })
    }

    /// The place of the last change or schema frame.
    pub(super) fn last(&self) -> Place {
        self.last
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::position::Lsn;

    #[test]
    fn near_runs_are_one_and_far_ones_are_found_from_any_offset() {
        let mut index = TableIndex::default();
        index.push(Run { start: 28, end: 100 }, None);
        index.push(Run { start: 100 + GAP, end: 5000 }, Some((Lsn(1), 7)));
        index.push(Run { start: 5001 + GAP, end: 10_000 }, Some((Lsn(1), 8)));
        assert_eq!(index.from(0), Some(Run { start: 28, end: 5000 }));
        assert_eq!(index.from(99), Some(Run { start: 99, end: 5000 }));
        assert_eq!(index.from(5000), Some(Run { start: 5001 + GAP, end: 10_000 }));
        assert_eq!(index.from(10_000), None);
        assert_eq!(index.last(), (Lsn(1), 8));
    }
}
