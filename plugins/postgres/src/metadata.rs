//! What the plugin stores beside the tables: who may write, and how far each table is.
//!
//! `lane` fences: a transaction begins by locking the row of its lane, and does nothing
//! if a later generation has put its number there. `position` belongs to a table: its row
//! names the lane and generation that attached it last, for a table may change its
//! lane between two runs of the host. `copied` names the batches of a copy under way.

use tidegate_sdk::model::{Position, SnapshotId};

use crate::mirror::Identity;
use crate::protocol::Answer;
use crate::settings::Settings;
use crate::sql::{ident, literal, lsn, parse_lsn};
use crate::target::Target;

/// Names of the tables, and who we are.
#[derive(Debug)]
pub struct Metadata {
    schema: String,
    position: String,
    lane_table: String,
    copied: String,
    /// `pipeline = '…' AND destination = '…'`.
    ours: String,
    /// `'…', '…'`: the same as values.
    values: String,
    lane: u32,
    generation: u64,
}

/// A row of `position`.
#[derive(Clone, Debug, PartialEq)]
pub struct Stored {
    pub table: u32,
    pub schema: String,
    pub name: String,
    pub run: Option<String>,
    pub position: Option<Position>,
    pub snapshot: SnapshotId,
    pub lane: u32,
    pub generation: u64,
}

const STORED: &str = "table_id, target_schema, target_name, run, epoch, commit_lsn, ordinal, snapshot_commit, snapshot_message, lane, generation";

impl Metadata {
    /// For one lane of one destination.
    pub fn new(settings: &Settings, identity: &Identity) -> Metadata {
        let (pipeline, destination) = (literal(&identity.pipeline), literal(&identity.destination));
        let named = |name: &str| {
            format!("{}.{}", ident(&settings.metadata_schema), ident(&format!("{}{name}", settings.metadata_prefix)))
        };
        Metadata {
            schema: settings.metadata_schema.clone(),
            position: named("position"),
            lane_table: named("lane"),
            copied: named("copied"),
            ours: format!("pipeline = {pipeline} AND destination = {destination}"),
            values: format!("{pipeline}, {destination}"),
            lane: identity.lane,
            generation: identity.generation,
        }
    }

    /// One row, one column: whether all three tables are there.
    pub fn exists(&self) -> String {
        let there = [&self.position, &self.lane_table, &self.copied]
            .map(|table| format!("to_regclass({}) IS NOT NULL", literal(table)));
        format!("SELECT {}", there.join(" AND "))
    }

    /// Makes what is missing. Two lanes or two pipelines at once wait for each other.
    /// The schema is looked for first: CREATE SCHEMA IF NOT EXISTS wants the
    /// privilege even if there is nothing to do.
    pub fn create(&self, schema_exists: bool) -> String {
        let schema = if schema_exists {
            String::new()
        } else {
            format!("CREATE SCHEMA IF NOT EXISTS {}; ", ident(&self.schema))
        };
        format!(
            "{schema}\
             CREATE TABLE IF NOT EXISTS {position} (pipeline text, destination text, table_id bigint, \
             target_schema text NOT NULL, target_name text NOT NULL, run text, \
             epoch bigint, commit_lsn pg_lsn, ordinal numeric(20), \
             snapshot_commit pg_lsn NOT NULL, snapshot_message pg_lsn NOT NULL, \
             lane bigint NOT NULL, generation numeric(20) NOT NULL, \
             PRIMARY KEY (pipeline, destination, table_id)); \
             CREATE TABLE IF NOT EXISTS {lane} (pipeline text, destination text, lane bigint, generation numeric(20) NOT NULL, \
             pid integer NOT NULL, backend_start timestamptz NOT NULL, PRIMARY KEY (pipeline, destination, lane)); \
             CREATE TABLE IF NOT EXISTS {copied} (pipeline text, destination text, table_id bigint, run text, batch_id text, \
             PRIMARY KEY (pipeline, destination, table_id, run, batch_id))",
            position = self.position,
            lane = self.lane_table,
            copied = self.copied,
        )
    }

    /// Serialises what two transactions must not create at the same time.
    pub fn creation_lock(&self, what: &str) -> String {
        format!("SELECT pg_advisory_xact_lock(hashtextextended({}, 0))", literal(&format!("tidegate {what}")))
    }

    /// One row, one column: whether the schema is there.
    pub fn schema_exists(&self) -> String {
        format!("SELECT EXISTS (SELECT FROM pg_namespace WHERE nspname = {})", literal(&self.schema))
    }

    /// Ends the backend an earlier instance of this lane left, so that its open
    /// transaction does not hold the row we need. One row if it may; none if there is
    /// nothing to end.
    pub fn end_predecessor(&self) -> String {
        format!(
            "SELECT pg_terminate_backend(a.pid) FROM (SELECT pid, backend_start FROM {} WHERE {} AND lane = {} AND generation < {}) l \
             JOIN pg_stat_activity a USING (pid, backend_start) WHERE a.pid <> pg_backend_pid() AND a.usename = current_user",
            self.lane_table, self.ours, self.lane, self.generation
        )
    }

    /// Takes the lane. One row if it is ours now, none if a later generation has it.
    pub fn take_lane(&self) -> String {
        format!(
            "INSERT INTO {lane} AS l SELECT {values}, {number}, {generation}, pid, backend_start FROM pg_stat_get_activity(pg_backend_pid()) \
             ON CONFLICT (pipeline, destination, lane) DO UPDATE SET generation = excluded.generation, pid = excluded.pid, \
             backend_start = excluded.backend_start WHERE l.generation <= excluded.generation RETURNING generation",
            lane = self.lane_table,
            values = self.values,
            number = self.lane,
            generation = self.generation,
        )
    }

    /// One row while the lane is ours; it stays so until the transaction ends.
    pub fn fence(&self) -> String {
        format!(
            "SELECT FROM {} WHERE {} AND lane = {} AND generation = {} FOR SHARE",
            self.lane_table, self.ours, self.lane, self.generation
        )
    }

    /// Rows of these tables, locked.
    pub fn stored(&self, tables: &[u32]) -> String {
        format!(
            "SELECT {STORED} FROM {} WHERE {} AND {} ORDER BY table_id FOR UPDATE",
            self.position,
            self.ours,
            ids(tables)
        )
    }

    /// Rows of this table, or of another one at the same place, locked.
    pub fn stored_at(&self, target: &Target) -> String {
        format!(
            "SELECT {STORED} FROM {} WHERE {} AND (table_id = {} OR (target_schema = {} AND target_name = {})) ORDER BY table_id FOR UPDATE",
            self.position,
            self.ours,
            target.id,
            literal(&target.schema),
            literal(&target.name)
        )
    }

    /// The row of one table, to look at.
    pub fn look_up(&self, table: u32) -> String {
        format!("SELECT {STORED} FROM {} WHERE {} AND table_id = {table}", self.position, self.ours)
    }

    /// Rows at a target's place, to look at.
    pub fn look_up_at(&self, target: &Target) -> String {
        format!(
            "SELECT {STORED} FROM {} WHERE {} AND target_schema = {} AND target_name = {}",
            self.position,
            self.ours,
            literal(&target.schema),
            literal(&target.name)
        )
    }

    /// Makes these tables this lane's, and returns their rows.
    pub fn claim(&self, tables: &[u32]) -> String {
        format!(
            "UPDATE {} SET lane = {}, generation = {} WHERE {} AND {} RETURNING {STORED}, \
             to_regclass(quote_ident(target_schema) || '.' || quote_ident(target_name)) IS NOT NULL",
            self.position,
            self.lane,
            self.generation,
            self.ours,
            ids(tables)
        )
    }

    /// Whether the row is this lane's.
    pub fn is_mine(&self, stored: &Stored) -> bool {
        (stored.lane, stored.generation) == (self.lane, self.generation)
    }

    /// A run begins: no position, and nothing else at that place.
    pub fn begin_run(&self, target: &Target, run: &str) -> String {
        format!(
            "DELETE FROM {copied} WHERE {ours} AND table_id = {id}; \
             DELETE FROM {position} WHERE {ours} AND table_id <> {id} AND target_schema = {schema} AND target_name = {name}; \
             INSERT INTO {position} (pipeline, destination, table_id, target_schema, target_name, run, snapshot_commit, snapshot_message, lane, generation) \
             VALUES ({values}, {id}, {schema}, {name}, {run}, {commit}, {message}, {lane}, {generation}) \
             ON CONFLICT (pipeline, destination, table_id) DO UPDATE SET target_schema = excluded.target_schema, target_name = excluded.target_name, \
             run = excluded.run, epoch = NULL, commit_lsn = NULL, ordinal = NULL, snapshot_commit = excluded.snapshot_commit, \
             snapshot_message = excluded.snapshot_message, lane = excluded.lane, generation = excluded.generation",
            copied = self.copied,
            position = self.position,
            ours = self.ours,
            values = self.values,
            id = target.id,
            schema = literal(&target.schema),
            name = literal(&target.name),
            run = literal(run),
            commit = literal(&lsn(target.snapshot.commit)),
            message = literal(&lsn(target.snapshot.message)),
            lane = self.lane,
            generation = self.generation,
        )
    }

    /// Notes a batch of a copy; no row is inserted if it is there already.
    pub fn note_copied(&self, table: u32, run: &str, batch: &str) -> String {
        format!(
            "INSERT INTO {} VALUES ({}, {table}, {}, {}) ON CONFLICT DO NOTHING",
            self.copied,
            self.values,
            literal(run),
            literal(batch)
        )
    }

    /// Forgets the batches of a copy.
    pub fn forget_copied(&self, table: u32) -> String {
        format!("DELETE FROM {} WHERE {} AND table_id = {table}", self.copied, self.ours)
    }

    /// Stores a position.
    pub fn set_position(&self, table: u32, position: Position) -> String {
        format!(
            "UPDATE {} SET epoch = {}, commit_lsn = {}, ordinal = {} WHERE {} AND table_id = {table}",
            self.position,
            position.epoch,
            literal(&lsn(position.commit)),
            position.ordinal,
            self.ours
        )
    }

    /// Stores the version that the table now has.
    pub fn set_snapshot(&self, table: u32, snapshot: SnapshotId) -> String {
        format!(
            "UPDATE {} SET snapshot_commit = {}, snapshot_message = {} WHERE {} AND table_id = {table}",
            self.position,
            literal(&lsn(snapshot.commit)),
            literal(&lsn(snapshot.message)),
            self.ours
        )
    }

    /// Stores where the table is now. Nothing else is there any more.
    pub fn set_place(&self, target: &Target) -> String {
        let (schema, name) = (literal(&target.schema), literal(&target.name));
        format!(
            "DELETE FROM {position} WHERE {ours} AND table_id <> {id} AND target_schema = {schema} AND target_name = {name}; \
             UPDATE {position} SET target_schema = {schema}, target_name = {name} WHERE {ours} AND table_id = {id}",
            position = self.position,
            ours = self.ours,
            id = target.id
        )
    }

    /// Forgets a table.
    pub fn forget(&self, table: u32) -> String {
        format!(
            "{}; DELETE FROM {} WHERE {} AND table_id = {table}",
            self.forget_copied(table),
            self.position,
            self.ours
        )
    }
}

/// `table_id IN (…)`, also for none.
fn ids(tables: &[u32]) -> String {
    let list = tables.iter().map(u32::to_string).collect::<Vec<_>>().join(", ");
    if list.is_empty() { "false".to_owned() } else { format!("table_id IN ({list})") }
}

/// Reads rows that were selected as `STORED`; none if one is not what we wrote.
pub fn read_stored(answer: &Answer) -> Option<Vec<Stored>> {
    answer.rows.iter().map(|row| read_row(row)).collect()
}

fn read_row(row: &[Option<String>]) -> Option<Stored> {
    let text = |index: usize| row.get(index)?.as_deref();
    let position = match text(5) {
        None => None,
        Some(commit) => Some(Position {
            epoch: text(4)?.parse().ok()?,
            commit: parse_lsn(commit)?,
            ordinal: text(6)?.parse().ok()?,
        }),
    };
    Some(Stored {
        table: text(0)?.parse().ok()?,
        schema: text(1)?.to_owned(),
        name: text(2)?.to_owned(),
        run: text(3).map(str::to_owned),
        position,
        snapshot: SnapshotId { commit: parse_lsn(text(7)?)?, message: parse_lsn(text(8)?)? },
        lane: text(9)?.parse().ok()?,
        generation: text(10)?.parse().ok()?,
    })
}
