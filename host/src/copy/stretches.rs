//! Stretches of pages: what a copy is cut into that a restart does not begin again (P19).
//!
//! A row can move to a stretch that was copied before. It is a new version then, made by a
//! transaction that the snapshot of that stretch did not see, so that a look at the
//! versions which are newer than the snapshot finds it.

use crate::position::Lsn;

/// From this distance on `xmin` cannot be compared with a snapshot's any more: half of what
/// PostgreSQL's own comparison reaches.
const MOST_TRANSACTIONS: u64 = 1 << 30;

/// Pages of a table, or of a leaf of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stretch {
    /// `pg_class.oid` of what holds the pages.
    pub leaf: u32,
    /// The first page.
    pub from: u64,
    /// The page behind the last one; the last stretch of a leaf has no end.
    pub to: Option<u64>,
}

/// A snapshot that rows were read in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Base {
    /// Visible are commits below this LSN.
    pub floor: Lsn,
    /// Its `pg_snapshot_xmin`: each transaction below it had ended.
    pub xmin: u64,
}

impl Base {
    /// Whether the rows that came since can be told by their `xmin`, in a later snapshot.
    pub fn is_within_reach(self, later: Base) -> bool {
        self.floor <= later.floor && later.xmin.saturating_sub(self.xmin) < MOST_TRANSACTIONS
    }

    /// SQL that is true of every row version that this snapshot did not see, and of a few
    /// that it saw.
    ///
    /// `xmin` has 32 bits, and keeps them when it is frozen. Of a snapshot that is out of
    /// reach by the time that the statement is run every version is a newer one.
    pub fn newer_sql(self) -> String {
        let xmin = self.xmin & u64::from(u32::MAX);
        format!("(age('{xmin}'::xid) < 0 OR age(xmin) <= age('{xmin}'::xid))")
    }
}

/// Which rows of a stretch are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Look {
    /// All that the snapshot shows.
    All,
    /// Those that an earlier one did not show.
    Newer(Base),
}

/// A stretch that is read, by its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Reading {
    /// Among the table's stretches.
    pub number: usize,
    /// What is read of it.
    pub look: Look,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn base(floor: u64, xmin: u64) -> Base {
        Base { floor: Lsn(floor), xmin }
    }

    #[test]
    fn a_snapshot_is_within_reach_of_a_later_one_for_a_billion_transactions() {
        let first = base(10, (7 << 32) - 5);
        assert!(first.is_within_reach(first));
        assert!(first.is_within_reach(base(20, first.xmin + (1 << 30) - 1)));
        assert!(!first.is_within_reach(base(20, first.xmin + (1 << 30))));
        assert!(!first.is_within_reach(base(20, first.xmin + (1 << 32) + 1)), "the same 32 bits again");
        assert!(!first.is_within_reach(base(9, first.xmin)), "it is not a later one");
    }

    #[test]
    fn a_transaction_is_compared_by_the_bits_that_a_row_has() {
        let sql = base(10, (3 << 32) + 726).newer_sql();
        assert_eq!(sql, "(age('726'::xid) < 0 OR age(xmin) <= age('726'::xid))");
    }
}
