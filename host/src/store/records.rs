//! What the store holds, as its callers see it.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::barriers::BarrierRecord;
use super::copies::CopyRecord;
use super::history::{Application, AppliedVersion};
use crate::batch::TextRow;
use crate::error::Error;
use crate::position::{Lsn, Position, SnapshotId};
use crate::schema::table::{TableName, TableSchema};
use crate::schema::tombstone::Tombstone;

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
    /// Copies that can be resumed, by destination and oid.
    pub copies: Vec<CopyRecord>,
    /// Schema changes that wait, by destination and oid.
    pub barriers: Vec<BarrierRecord>,
    /// What made tables members of the publication when we last looked, by oid (P21).
    pub members: BTreeMap<u32, String>,
    /// By oid and snapshot id.
    pub history: Vec<TableSchema>,
    /// Where tables ended, by oid and place.
    pub ended: Vec<Tombstone>,
    /// How many versions of a table were removed, by oid.
    pub removed: BTreeMap<u32, u64>,
    /// Which destination got which version, by destination, oid and version.
    pub applied: Vec<AppliedVersion>,
    /// How many rows are in quarantine, by destination and oid, where there are any.
    pub quarantined: BTreeMap<(String, u32), u64>,
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
    /// Who brought it there, and when; stored beside the version, and not loaded with it.
    pub application: Option<Application>,
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

/// What a quarantined row was to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RowOp {
    /// Its key's row was to become this (`merge`).
    Upsert,
    /// A new row (`changes`).
    Insert,
    /// A changed row (`changes`).
    Update,
    /// The row was to go.
    Delete,
}

impl RowOp {
    const ALL: [RowOp; 4] = [RowOp::Upsert, RowOp::Insert, RowOp::Update, RowOp::Delete];

    /// As it is shown and stored.
    pub fn as_str(self) -> &'static str {
        match self {
            RowOp::Upsert => "upsert",
            RowOp::Insert => "insert",
            RowOp::Update => "update",
            RowOp::Delete => "delete",
        }
    }

    pub(super) fn parse(text: &str) -> Option<RowOp> {
        RowOp::ALL.into_iter().find(|op| op.as_str() == text)
    }
}

/// What is to be done with a quarantined row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mark {
    /// It is sent again.
    Retry,
    /// It is forgotten.
    Drop,
}

impl Mark {
    /// As it is shown and stored.
    pub fn as_str(self) -> &'static str {
        match self {
            Mark::Retry => "retry",
            Mark::Drop => "drop",
        }
    }

    pub(super) fn parse(text: &str) -> Option<Mark> {
        [Mark::Retry, Mark::Drop].into_iter().find(|mark| mark.as_str() == text)
    }
}

/// A row that a destination refused for good, with all that its key was to become since.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QuarantinedRow {
    /// Given by the store; 0 before.
    pub id: u64,
    /// The destination's name.
    pub destination: String,
    /// `pg_class.oid` of its table.
    pub oid: u32,
    /// The table's name at the source.
    pub table: TableName,
    /// Under `merge` its key, see [`TextRow::key`]; under `changes` its place in the history.
    pub ident: String,
    /// What it was to do.
    pub op: RowOp,
    /// The version that its cells are of.
    pub snapshot: SnapshotId,
    /// Of the last change that is in it.
    pub position: Position,
    /// Commit time of that change, microseconds since 1970-01-01 UTC.
    pub committed_at: i64,
    /// Transaction id of that change.
    pub xid: u32,
    /// The new row; for a delete what was sent of the old one.
    pub row: TextRow,
    /// Under `changes` the old row; under `merge` the key that [`QuarantinedRow::needs`] names.
    pub old: Option<TextRow>,
    /// The ident of the row that had the missing cells when this one's key was another.
    pub needs: Option<String>,
    /// Why it was refused.
    pub reason: RefusedWhy,
    /// How many changes are folded into it; those that came in one batch count once.
    pub changes: u32,
    /// When the first of them was refused, microseconds since 1970-01-01 UTC.
    pub quarantined_at: i64,
    /// What is to be done with it.
    pub mark: Option<Mark>,
}

/// Why a row was refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RefusedWhy {
    /// Stable, the plugin's own.
    pub code: String,
    /// What it said.
    pub message: String,
    /// The ordinal of the column it named.
    pub column: Option<u16>,
}

/// What a running destination remembers of a quarantined row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QuarantineKey {
    /// `pg_class.oid` of its table.
    pub oid: u32,
    /// See [`QuarantinedRow::ident`].
    pub ident: String,
    /// See [`QuarantinedRow::position`].
    pub position: Position,
    /// What it takes in the store, about.
    pub bytes: u64,
    /// See [`QuarantinedRow::needs`].
    pub needs: Option<String>,
    /// See [`RefusedWhy::code`].
    pub code: String,
    /// What is to be done with it.
    pub mark: Option<Mark>,
}

/// Which quarantined rows are meant: all that fit everything that is given.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct QuarantineSelection {
    /// A destination's name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub destination: Option<String>,
    /// `schema.table` at the source.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub table: Option<String>,
    /// These rows; empty: any.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ids: Vec<u64>,
}
