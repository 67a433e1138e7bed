//! What a plugin answers: failures, acknowledgements, notices.

use std::cmp::Ordering;
use std::fmt::Display;
use std::time::Duration;

use crate::model::{
    Ack, Batch, Content, Failure, FailureClass, FailureScope, Notice, PhysicalColumn, PhysicalTable, Position, Ready,
    Refusal, SnapshotId, Table, TableName,
};

fn milliseconds(duration: Duration) -> u32 {
    u32::try_from(duration.as_millis()).unwrap_or(u32::MAX)
}

impl Failure {
    /// Trying again may help. Concerns the destination, until [`of_table`](Self::of_table)
    /// or [`of_rows`](Self::of_rows) says otherwise.
    pub fn transient(code: &str, message: impl Into<String>) -> Failure {
        Failure::new(FailureClass::Transient, code, message.into())
    }

    /// Trying again does not help. Concerns the destination, until
    /// [`of_table`](Self::of_table) or [`of_rows`](Self::of_rows) says otherwise.
    pub fn permanent(code: &str, message: impl Into<String>) -> Failure {
        Failure::new(FailureClass::Permanent, code, message.into())
    }

    fn new(class: FailureClass, code: &str, message: String) -> Failure {
        Failure {
            class,
            scope: FailureScope::Destination,
            table_id: None,
            code: code.to_owned(),
            message,
            retry_after_ms: None,
            rows: Vec::new(),
        }
    }

    /// Concerns one table: the others go on.
    pub fn of_table(self, table_id: u32) -> Failure {
        Failure { scope: FailureScope::Table, table_id: Some(table_id), ..self }
    }

    /// Concerns rows. Without culprits the host halves the group until it has them.
    pub fn of_rows(self, culprits: Vec<Refusal>) -> Failure {
        Failure { scope: FailureScope::Row, rows: culprits, ..self }
    }

    /// The destination asks for a pause.
    pub fn retry_after(self, pause: Duration) -> Failure {
        Failure { retry_after_ms: Some(milliseconds(pause)), ..self }
    }
}

/// Turns the error of a `Result` into a [`Failure`] of the destination, so that `?`
/// works: `file.sync_all().or_transient("files.sync", "cannot sync orders.parquet")?`.
pub trait OrFailure<T> {
    /// Trying again may help.
    fn or_transient(self, code: &str, what: impl Display) -> Result<T, Failure>;
    /// Trying again does not help.
    fn or_permanent(self, code: &str, what: impl Display) -> Result<T, Failure>;
}

impl<T, E: Display> OrFailure<T> for Result<T, E> {
    fn or_transient(self, code: &str, what: impl Display) -> Result<T, Failure> {
        self.map_err(|error| Failure::transient(code, format!("{what}: {error}")))
    }

    fn or_permanent(self, code: &str, what: impl Display) -> Result<T, Failure> {
        self.map_err(|error| Failure::permanent(code, format!("{what}: {error}")))
    }
}

impl Ack {
    /// Everything up to and with this ticket survives a crash, the destination's included.
    pub fn durable(ticket: u64) -> Ack {
        Ack { durable: ticket, refused: Vec::new(), wake_after_ms: None }
    }

    /// The group is taken, but only what came before it is durable: the highest
    /// durable ticket so far, 0 when there is none.
    pub fn accepted(durable_so_far: u64) -> Ack {
        Ack::durable(durable_so_far)
    }

    /// Rows that will never be taken. A transactional plugin fails instead.
    pub fn refusing(self, refused: Vec<Refusal>) -> Ack {
        Ack { refused, ..self }
    }

    /// If nothing else is called until then, `tick` is.
    pub fn wake_after(self, pause: Duration) -> Ack {
        Ack { wake_after_ms: Some(milliseconds(pause)), ..self }
    }
}

impl Default for Ready {
    fn default() -> Ready {
        Ready { limits: Vec::new(), details: Vec::new() }
    }
}

impl Ready {
    /// Sets a limit that suits the destination: lanes, group-bytes, row-bytes,
    /// linger-ms, settle-ms, settle-bytes.
    pub fn limit(mut self, name: &str, value: u64) -> Ready {
        self.limits.push((name.to_owned(), value));
        self
    }

    /// Adds what `status` shows of the destination, e.g. `server-version`.
    pub fn detail(mut self, name: &str, value: impl Display) -> Ready {
        self.details.push((name.to_owned(), value.to_string()));
        self
    }
}

impl Notice {
    /// What an operator should know. `level`: error, warning, info.
    pub fn new(level: &str, table_id: Option<u32>, code: &str, message: impl Into<String>) -> Notice {
        Notice { level: level.to_owned(), table_id, code: code.to_owned(), message: message.into() }
    }
}

impl PhysicalTable {
    /// The table as the source has it, for destinations that keep no tables.
    pub fn like(table: &Table) -> PhysicalTable {
        let column = |column: &crate::model::Column| {
            let ordinal = ("ordinal".to_owned(), column.ordinal.to_string());
            let default = column.default_literal.as_ref().map(|literal| ("default".to_owned(), literal.text.clone()));
            PhysicalColumn {
                name: column.name.clone(),
                type_name: column.declared.clone(),
                nullable: column.nullable,
                details: [ordinal].into_iter().chain(default).collect(),
            }
        };
        PhysicalTable {
            path: vec![table.target.schema.clone(), table.target.name.clone()],
            columns: table.columns.iter().map(column).collect(),
            snapshot: Some(table.snapshot),
        }
    }
}

impl Batch {
    /// How many rows of the source it stands for; 1 for a truncation.
    pub fn rows(&self) -> usize {
        match &self.content {
            Content::Copy(copy) => copy.rows.count as usize,
            Content::Changes(changes) => changes.ops.len(),
            Content::Merge(merge) => merge.upserts.count as usize + merge.deletes.count as usize,
            Content::Truncate(_) => 1,
            Content::Messages(messages) => messages.sequence.commit.len(),
        }
    }
}

impl Content {
    /// Bytes of memory the cells take, positions left out.
    pub fn bytes(&self) -> usize {
        match self {
            Content::Copy(copy) => copy.rows.bytes(),
            Content::Changes(changes) => changes.rows.bytes() + changes.old_rows.bytes(),
            Content::Merge(merge) => merge.upserts.bytes() + merge.moved_from.bytes() + merge.deletes.bytes(),
            Content::Truncate(_) => 0,
            Content::Messages(messages) => messages.prefixes.data.len() + messages.contents.data.len(),
        }
    }
}

impl Display for TableName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}", self.schema, self.name)
    }
}

impl Eq for Position {}

impl Ord for Position {
    fn cmp(&self, other: &Position) -> Ordering {
        (self.epoch, self.commit, self.ordinal).cmp(&(other.epoch, other.commit, other.ordinal))
    }
}

impl PartialOrd for Position {
    fn partial_cmp(&self, other: &Position) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Eq for SnapshotId {}

impl Ord for SnapshotId {
    fn cmp(&self, other: &SnapshotId) -> Ordering {
        (self.commit, self.message).cmp(&(other.commit, other.message))
    }
}

impl PartialOrd for SnapshotId {
    fn partial_cmp(&self, other: &SnapshotId) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// As the host shows it: `commit:message` in decimal.
impl Display for SnapshotId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}:{}", self.commit, self.message)
    }
}

/// Reads what [`SnapshotId`] prints.
impl std::str::FromStr for SnapshotId {
    type Err = String;

    fn from_str(text: &str) -> Result<SnapshotId, String> {
        let parsed = text.split_once(':').and_then(|(commit, message)| {
            Some(SnapshotId { commit: commit.parse().ok()?, message: message.parse().ok()? })
        });
        parsed.ok_or_else(|| format!("`{text}` is not a snapshot id: expected commit:message in decimal"))
    }
}
