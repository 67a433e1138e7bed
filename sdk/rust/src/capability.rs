//! Names of what a plugin can do. The host's set is open: any string may be listed.

/// Takes rows as the log of their changes.
pub const CHANGES: &str = "changes";
/// Takes rows folded by key: what each table must become.
pub const MERGE: &str = "merge";
/// Patches rows of which some cells were not sent.
pub const PARTIAL_ROWS: &str = "partial-rows";
/// Stores a group and the position of each of its tables in one transaction, and
/// nothing of a group that fails.
pub const TRANSACTIONAL: &str = "transactional";
/// Runs all steps of a schema change in one transaction, with the snapshot id.
pub const ATOMIC_DDL: &str = "atomic-ddl";
/// A column that is added with a literal default: rows that are there show the default, as
/// the table's own metadata say. Without this they show null.
pub const ADD_DEFAULT_METADATA: &str = "add-default-metadata";
/// The rows of one copy may come by every lane.
pub const PARALLEL_COPY: &str = "parallel-copy";
/// A copy may go on in the run it began in.
pub const RESUMABLE_COPY: &str = "resumable-copy";
/// Takes what `pg_logical_emit_message` wrote.
pub const MESSAGES: &str = "messages";

/// All kinds of steps a schema change may have in this version of the contract.
pub const STEPS: &[&str] = &[
    "add-column",
    "drop-column",
    "rename-column",
    "alter-type",
    "set-default",
    "drop-default",
    "set-not-null",
    "drop-not-null",
    "rename-table",
    "change-key",
];

/// One list of step kinds and other capabilities.
pub fn with_steps(steps: &[&'static str], others: &[&'static str]) -> Vec<&'static str> {
    [steps, others].concat()
}
