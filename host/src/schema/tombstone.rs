//! What is left of a table that is gone.

use serde::{Deserialize, Serialize};

use super::moment::Moment;
use super::table::TableName;
use crate::position::SnapshotId;

/// How a table ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Ended {
    /// `DROP TABLE`, or what drops tables with it.
    Dropped,
    /// It is there, and left the publication.
    Unpublished,
}

impl Ended {
    /// As it is shown and stored.
    pub fn as_str(self) -> &'static str {
        match self {
            Ended::Dropped => "dropped",
            Ended::Unpublished => "unpublished",
        }
    }

    /// The one with this name.
    pub fn parse(text: &str) -> Option<Ended> {
        [Ended::Dropped, Ended::Unpublished].into_iter().find(|ended| ended.as_str() == text)
    }
}

/// The end of a table's history.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tombstone {
    /// `pg_class.oid`.
    pub oid: u32,
    /// What it was called last.
    pub name: TableName,
    /// Where it ended: the id of its message, or `(L, 0)` if the catalog showed it to be
    /// gone when the log was at L.
    pub snapshot: SnapshotId,
    /// How.
    pub why: Ended,
    /// When it was committed, or seen to be gone.
    pub at: Option<Moment>,
}
