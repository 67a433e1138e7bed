//! What the store holds, as its callers see it.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::position::{Lsn, Position, SnapshotId};
use crate::schema::table::{TableName, TableSchema};

/// All of a state, read at a start.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Loaded {
    /// The source this state belongs to; none before the first start got that far.
    pub source: Option<SourceRecord>,
    /// By name.
    pub destinations: Vec<DestinationRecord>,
    /// The last error of a destination as a whole, where one is stored.
    pub destination_errors: BTreeMap<String, TableError>,
    /// By destination and oid.
    pub tables: Vec<TableRecord>,
    /// By oid and snapshot id.
    pub history: Vec<TableSchema>,
}

/// What the source was when we met it; compared at every start (P8).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceRecord {
    /// `IDENTIFY_SYSTEM.systemid`.
    pub system: String,
    /// `IDENTIFY_SYSTEM.timeline`.
    pub timeline: u32,
    /// Name of the replication slot.
    pub slot: String,
    /// Name of the publication.
    pub publication: String,
    /// `pg_publication.oid`.
    pub publication_oid: u32,
    /// The slot's output plugin.
    pub plugin: String,
    /// Grows when LSNs begin to mean another history (P1).
    pub epoch: u32,
    /// Whether the slot is known to exist.
    pub slot_state: SlotRecord,
}

/// Slot creation is first written as an intent (P8).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SlotRecord {
    /// About to be created: it may or may not exist.
    Intended,
    /// Created.
    Created {
        /// Its consistent point.
        at: Lsn,
    },
}

/// A destination, and how far the source may forget for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DestinationRecord {
    /// The name in the configuration.
    pub name: String,
    /// The plugin's name.
    pub plugin: String,
    /// See P6.
    pub checkpoint: Lsn,
}

/// Where a table stands on its way to being live (design, section 3).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TableState {
    /// Known, nothing done yet.
    #[default]
    Init,
    /// Its rows are being copied.
    DataSync,
    /// All rows of the copy are durable.
    FinishedCopy,
    /// The spool is being drained.
    CatchUp,
    /// Live.
    Ready,
    /// Stopped by an error.
    Errored,
}

impl TableState {
    const ALL: [TableState; 6] = [
        TableState::Init,
        TableState::DataSync,
        TableState::FinishedCopy,
        TableState::CatchUp,
        TableState::Ready,
        TableState::Errored,
    ];

    /// As `status` shows it and the store keeps it.
    pub fn as_str(self) -> &'static str {
        match self {
            TableState::Init => "init",
            TableState::DataSync => "data-sync",
            TableState::FinishedCopy => "finished-copy",
            TableState::CatchUp => "catch-up",
            TableState::Ready => "ready",
            TableState::Errored => "errored",
        }
    }

    pub(super) fn parse(text: &str) -> Option<TableState> {
        TableState::ALL.into_iter().find(|state| state.as_str() == text)
    }
}

/// One table at one destination.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TableRecord {
    /// The destination's name.
    pub destination: String,
    /// `pg_class.oid`.
    pub oid: u32,
    /// The name at the source, as last seen.
    pub name: TableName,
    /// Where it stands.
    pub state: TableState,
    /// The LSN S of the snapshot it was copied in (P14).
    pub floor: Option<Lsn>,
    /// The copy run, as the plugin knows it.
    pub run: Option<String>,
    /// Everything up to here, itself included, is durable (P7).
    pub position: Option<Position>,
    /// The schema version the destination has.
    pub applied: Option<SnapshotId>,
    /// The schema change under way, if one is (P27).
    pub applying: Option<Applying>,
    /// Changes were given up on: only a new copy makes it right.
    pub needs_resync: bool,
    /// Rows copied so far.
    pub rows_copied: u64,
    /// Rows expected, an estimate.
    pub rows_total: Option<u64>,
    /// Why it does not go on.
    pub error: Option<TableError>,
}

/// A schema change that was begun and is not known to have ended (P27).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Applying {
    /// The version before.
    pub from: SnapshotId,
    /// The version to be reached.
    pub to: SnapshotId,
    /// Index of the step that was begun.
    pub step: u32,
}

/// An error as it is stored and shown. Never holds a secret.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TableError {
    /// Stable, e.g. `schema.unsupported`.
    pub code: String,
    /// What happened.
    pub message: String,
    /// What to do about it.
    pub next: Option<String>,
}

impl From<&Error> for TableError {
    fn from(error: &Error) -> TableError {
        TableError {
            code: error.code().to_owned(),
            message: error.message().to_owned(),
            next: error.next_step().map(str::to_owned),
        }
    }
}

/// How far a destination and tables of it have come. Written in one transaction;
/// what lies behind what is stored changes nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// The destination's name.
    pub destination: String,
    /// Its checkpoint, if it moved (P6).
    pub checkpoint: Option<Lsn>,
    /// Tables by oid, and their positions (P7).
    pub positions: Vec<(u32, Position)>,
}
