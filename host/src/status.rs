//! What `tidegate status` shows (design, section 7), and the board the running parts
//! keep it on.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::plugin::{PluginUsage, UsageBoard};
use crate::position::{Lsn, SnapshotId};
use crate::schema::table::TableName;
use crate::store::TableState;

/// The whole answer, as `status --json` prints it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StatusReport {
    /// Name of the pipeline.
    pub pipeline: String,
    /// Id of the process that runs it; none when it does not run and the report is
    /// read from the state directory.
    pub pid: Option<u32>,
    /// The replication slot.
    pub slot: SlotStatus,
    /// What is wrong with the DDL trigger at the source; none if nothing is, or nothing runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trigger: Option<StatusError>,
    /// What the publication leaves out; none if nothing, or if nothing runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub publication: Option<StatusError>,
    /// What waits on disk for destinations that do not keep up; none if nothing runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub spool: Option<SpoolStatus>,
    /// How much of the memory budget is used; none if nothing runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<MemoryStatus>,
    /// Seconds since the snapshot of the copy under way was taken, which vacuum at the
    /// source waits for; none while no rows are read.
    #[serde(default)]
    pub copy_snapshot_seconds: Option<f64>,
    /// In the order of the configuration.
    pub destinations: Vec<DestinationStatus>,
}

/// Where the slot stands.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SlotStatus {
    /// Up to where the source may forget: the smallest checkpoint.
    pub confirmed: Option<Lsn>,
    /// Bytes of log between `confirmed` and the source's newest known position.
    pub lag_bytes: Option<u64>,
    /// Seconds since the oldest change that is not confirmed was committed; 0 when
    /// all is.
    pub lag_seconds: Option<f64>,
    /// `pg_replication_slots.wal_status` as last seen.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wal_status: Option<String>,
    /// Percent of `max_slot_wal_keep_size` that the slot holds back; none without that
    /// limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wal_used_percent: Option<u8>,
}

/// What waits on disk.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SpoolStatus {
    /// Bytes of its files.
    pub bytes: u64,
    /// Above it nothing more is taken.
    pub limit_bytes: u64,
    /// The stream waits, and everybody with it, because the spool takes nothing more:
    /// why, and for whom.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waiting: Option<String>,
}

/// The memory budget.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryStatus {
    /// Rows on their way, and the linear memory of the plugins' instances.
    pub used_bytes: u64,
    /// What the process may use.
    pub limit_bytes: u64,
}

/// What a destination as a whole does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DestinationState {
    /// The pipeline does not run.
    #[default]
    Stopped,
    /// Its plugin is being loaded and opened.
    Starting,
    /// It takes what comes.
    Running,
    /// A call failed and is tried again; `error` says what.
    Retrying,
    /// It waits for somebody; `error` says for what.
    Errored,
}

impl DestinationState {
    /// As `status` prints it.
    pub fn as_str(self) -> &'static str {
        match self {
            DestinationState::Stopped => "stopped",
            DestinationState::Starting => "starting",
            DestinationState::Running => "running",
            DestinationState::Retrying => "retrying",
            DestinationState::Errored => "errored",
        }
    }
}

/// One destination.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct DestinationStatus {
    /// As configured.
    pub name: String,
    /// Name of the plugin's file, without `.wasm`.
    pub plugin: String,
    /// The version of it that is at work; none if nothing runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub plugin_version: Option<PluginVersion>,
    /// What it does.
    pub state: DestinationState,
    /// Everything before it is durable there, or safely spooled (P6).
    pub checkpoint: Option<Lsn>,
    /// Bytes of log between `checkpoint` and the source's newest known position.
    pub lag_bytes: Option<u64>,
    /// Seconds since the oldest change beyond `checkpoint` was committed; 0 when there
    /// is none.
    pub lag_seconds: Option<f64>,
    /// Changes made durable since the process started; copied rows are not counted.
    #[serde(default)]
    pub changes: u64,
    /// From commit to durable, of the changes since the process started.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub delay_ms: Option<DelaySummary>,
    /// Why it is `retrying` or `errored`.
    #[serde(default)]
    pub error: Option<StatusError>,
    /// What its plugin used since the process started; none if nothing runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub usage: Option<PluginUsage>,
    /// Its tables, by name.
    pub tables: Vec<TableStatus>,
}

/// Which version of its plugin a destination has.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PluginVersion {
    /// As the plugin says.
    pub version: String,
    /// Of its file, in hex.
    pub sha256: String,
    /// Number of the instance: each has a greater one than those before it.
    pub generation: u64,
    /// Why the file in the plugins directory is not what is at work.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub differs: Option<StatusError>,
}

/// What becomes of a table's schema change.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SchemaState {
    /// The destination has the version that `snapshot` names.
    #[default]
    Applied,
    /// A change is under way.
    Applying,
    /// A change waits, and the rows behind it with it.
    Held,
}

impl SchemaState {
    /// As `status` prints it.
    pub fn as_str(self) -> &'static str {
        match self {
            SchemaState::Applied => "applied",
            SchemaState::Applying => "applying",
            SchemaState::Held => "held",
        }
    }
}

/// One table of a destination.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TableStatus {
    /// `schema.table` at the source.
    pub table: String,
    /// Where it stands on its way to being live.
    pub state: TableState,
    /// The version the destination has.
    pub snapshot: Option<SnapshotId>,
    /// What becomes of the newest version.
    pub schema: SchemaState,
    /// Rows copied so far.
    pub rows_copied: u64,
    /// Rows to copy, as the source's statistics and the table's size estimate them.
    pub rows_total: Option<u64>,
    /// How much of the table at the source was copied so far, in bytes there. 0 if the
    /// copy was finished before this process started.
    #[serde(default)]
    pub bytes_copied: u64,
    /// What the table takes at the source, TOAST included.
    #[serde(default)]
    pub bytes_total: Option<u64>,
    /// How much of these bytes was copied.
    #[serde(default)]
    pub percent: Option<f64>,
    /// How long the rest of the copy takes if it goes on as so far.
    #[serde(default)]
    pub seconds_left: Option<f64>,
    /// Rows the destination refused.
    #[serde(default)]
    pub quarantined: u64,
    /// Why it is `errored` or `held`.
    pub error: Option<StatusError>,
    /// What the source's catalog shows of the table, and neither a message nor a row has told
    /// yet. Never applied: it has no place between the rows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pending: Option<PendingChange>,
}

/// See [`TableStatus::pending`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PendingChange {
    /// What it waits for: `no row yet`, or `no row tells it`.
    pub reason: String,
    /// Each step, as `add-column note`.
    pub changes: Vec<String>,
}

/// What is wrong, and the way out.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StatusError {
    /// Stable and machine-readable.
    pub code: String,
    /// One sentence.
    pub message: String,
    /// What to do.
    pub next: Option<String>,
}

impl From<&Error> for StatusError {
    fn from(error: &Error) -> StatusError {
        StatusError {
            code: error.code().to_owned(),
            message: error.message().to_owned(),
            next: error.next_step().map(str::to_owned),
        }
    }
}

impl TableStatus {
    /// How far a copy is.
    pub(crate) fn show_copy(&mut self, copied: u64, total: u64, elapsed: Duration) {
        let copied = copied.min(total);
        let share = if total == 0 { 0.0 } else { copied as f64 / total as f64 };
        self.bytes_copied = copied;
        self.bytes_total = Some(total);
        self.percent = Some((share * 1000.0).round() / 10.0);
        self.seconds_left = (share > 0.0).then(|| (elapsed.as_secs_f64() * (1.0 - share) / share).round());
    }

    /// A copy is finished.
    pub(crate) fn show_copied(&mut self) {
        self.bytes_copied = self.bytes_total.unwrap_or_default();
        self.percent = Some(100.0);
        self.seconds_left = None;
    }
}

impl DestinationStatus {
    /// Says which version of the plugin is at work.
    pub(crate) fn plugin_is(&mut self, version: &str, sha256: &str) -> &mut PluginVersion {
        let shown = self.plugin_version.get_or_insert_default();
        version.clone_into(&mut shown.version);
        sha256.clone_into(&mut shown.sha256);
        shown
    }

    /// Says why the plugin's file is not what is at work; none if it is.
    pub(crate) fn plugin_differs(&mut self, why: Option<StatusError>) {
        self.plugin_version.get_or_insert_default().differs = why;
    }

    /// The entry of a table, made if there is none yet.
    pub fn table_mut(&mut self, table: &TableName) -> &mut TableStatus {
        let name = table.to_string();
        let index = match self.tables.binary_search_by(|known| known.table.as_str().cmp(&name)) {
            Ok(index) => index,
            Err(index) => {
                self.tables.insert(index, TableStatus { table: name, ..TableStatus::default() });
                index
            }
        };
        &mut self.tables[index]
    }

    /// A table has another name from here on.
    pub fn rename_table(&mut self, from: &TableName, to: &TableName) {
        let name = from.to_string();
        if from != to
            && let Ok(index) = self.tables.binary_search_by(|known| known.table.as_str().cmp(&name))
        {
            let known = self.tables.remove(index);
            *self.table_mut(to) = TableStatus { table: to.to_string(), ..known };
        }
    }
}

impl StatusReport {
    /// The entry of a destination, made if there is none yet.
    pub fn destination_mut(&mut self, name: &str) -> &mut DestinationStatus {
        let index = match self.destinations.iter().position(|known| known.name == name) {
            Some(index) => index,
            None => {
                self.destinations.push(DestinationStatus { name: name.to_owned(), ..DestinationStatus::default() });
                self.destinations.len() - 1
            }
        };
        &mut self.destinations[index]
    }

    /// Whether every table of every destination is live, and there is a destination.
    pub fn all_ready(&self) -> bool {
        let ready =
            |destination: &DestinationStatus| destination.tables.iter().all(|table| table.state == TableState::Ready);
        !self.destinations.is_empty() && self.destinations.iter().all(ready)
    }
}

/// The report of a running process, shared by the parts that know its pieces.
#[derive(Clone, Debug, Default)]
pub struct StatusBoard(Arc<Mutex<StatusReport>>, UsageBoard);

impl StatusBoard {
    /// A board for a pipeline that this process runs.
    pub fn new(pipeline: &str) -> StatusBoard {
        let report =
            StatusReport { pipeline: pipeline.to_owned(), pid: Some(std::process::id()), ..StatusReport::default() };
        StatusBoard(Arc::new(Mutex::new(report)), UsageBoard::default())
    }

    /// What stands on it now.
    pub fn report(&self) -> StatusReport {
        let mut report = self.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
        for destination in &mut report.destinations {
            destination.usage = self.1.get(&destination.name);
        }
        report
    }

    /// Where the plugins' usage counts.
    pub fn plugins(&self) -> &UsageBoard {
        &self.1
    }

    /// Changes it. Short: everybody else waits meanwhile.
    pub fn update(&self, change: impl FnOnce(&mut StatusReport)) {
        // A part that panicked while it wrote may have left a half-written number, which
        // the next update replaces: better than a status that fails for good.
        change(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// Changes one destination's entry.
    pub fn update_destination(&self, name: &str, change: impl FnOnce(&mut DestinationStatus)) {
        self.update(|report| change(report.destination_mut(name)));
    }

    /// Changes one table's entry.
    pub fn update_table(&self, destination: &str, table: &TableName, change: impl FnOnce(&mut TableStatus)) {
        self.update(|report| change(report.destination_mut(destination).table_mut(table)));
    }
}

/// Milliseconds from commit to durable.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct DelaySummary {
    /// Half took no longer.
    pub median: f64,
    /// 99 of 100 took no longer.
    pub p99: f64,
}

/// Buckets for each doubling of the delay: a bucket is 1/32 wide, so a percentile is
/// right to about 3 %.
const BUCKETS_PER_DOUBLING: usize = 32;
/// Doublings of a microsecond that are told apart: up to 2^40 us, twelve days.
const DOUBLINGS: usize = 40;

/// A histogram of delays: fixed size, whatever is recorded.
#[derive(Clone, Debug)]
pub struct DelayHistogram {
    counts: Vec<u64>,
    total: u64,
}

impl Default for DelayHistogram {
    fn default() -> DelayHistogram {
        DelayHistogram { counts: vec![0; BUCKETS_PER_DOUBLING * DOUBLINGS], total: 0 }
    }
}

impl DelayHistogram {
    /// Adds `count` changes with the same delay. A negative one, from clocks that differ,
    /// counts as none.
    pub fn record(&mut self, delay_us: i64, count: u64) {
        let exponent = (delay_us.max(1) as f64).log2();
        let bucket = (exponent * BUCKETS_PER_DOUBLING as f64) as usize;
        let last = self.counts.len() - 1;
        self.counts[bucket.min(last)] += count;
        self.total += count;
    }

    /// Median and 99th percentile; none if nothing was recorded.
    pub fn summary(&self) -> Option<DelaySummary> {
        (self.total > 0).then(|| DelaySummary { median: self.percentile(0.5), p99: self.percentile(0.99) })
    }

    /// Milliseconds that this share of the changes did not exceed.
    fn percentile(&self, share: f64) -> f64 {
        let wanted = (self.total as f64 * share).ceil() as u64;
        let mut seen = 0;
        let bucket = self.counts.iter().position(|count| {
            seen += count;
            seen >= wanted
        });
        let upper = (bucket.unwrap_or(self.counts.len()) + 1) as f64 / BUCKETS_PER_DOUBLING as f64;
        (upper.exp2() / 10.0).round() / 100.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_renamed_table_has_one_entry_under_its_new_name() {
        let mut destination = DestinationStatus::default();
        for name in ["a", "b", "c"] {
            destination.table_mut(&TableName::new("public", name)).rows_copied = 7;
        }
        destination.rename_table(&TableName::new("public", "a"), &TableName::new("public", "z"));
        destination.rename_table(&TableName::new("public", "b"), &TableName::new("public", "b"));
        destination.rename_table(&TableName::new("public", "gone"), &TableName::new("public", "x"));
        let tables: Vec<(&str, u64)> =
            destination.tables.iter().map(|table| (table.table.as_str(), table.rows_copied)).collect();
        assert_eq!(tables, [("public.b", 7), ("public.c", 7), ("public.z", 7)]);
    }

    #[test]
    fn the_report_has_the_shape_that_the_design_promises() {
        let board = StatusBoard::new("shop");
        board.update(|report| {
            report.pid = None;
            report.slot = SlotStatus {
                confirmed: Some(Lsn(0x16_B374_D848)),
                lag_bytes: Some(10),
                lag_seconds: Some(0.5),
                ..SlotStatus::default()
            };
        });
        board.update_destination("warehouse", |destination| destination.plugin = "postgres".to_owned());
        board.update_table("warehouse", &TableName::new("public", "orders"), |table| {
            table.state = TableState::Ready;
            table.rows_copied = 3;
        });
        let expected = serde_json::json!({
            "pipeline": "shop",
            "pid": null,
            "slot": {"confirmed": "16/B374D848", "lag_bytes": 10, "lag_seconds": 0.5},
            "copy_snapshot_seconds": null,
            "destinations": [{
                "name": "warehouse", "plugin": "postgres", "state": "stopped", "checkpoint": null,
                "lag_bytes": null, "lag_seconds": null, "changes": 0, "error": null,
                "tables": [{
                    "table": "public.orders", "state": "ready", "snapshot": null, "schema": "applied",
                    "rows_copied": 3, "rows_total": null, "bytes_copied": 0, "bytes_total": null,
                    "percent": null, "seconds_left": null, "quarantined": 0, "error": null
                }]
            }]
        });
        let report = board.report();
        assert_eq!(serde_json::to_value(&report).unwrap(), expected);
        assert_eq!(serde_json::from_value::<StatusReport>(expected).unwrap(), report);
    }

    #[test]
    fn the_time_that_a_copy_still_takes_follows_from_what_it_took_so_far() {
        let mut table = TableStatus::default();
        table.show_copy(0, 1000, Duration::ZERO);
        assert_eq!((table.percent, table.seconds_left), (Some(0.0), None));
        table.show_copy(250, 1000, Duration::from_secs(10));
        assert_eq!((table.bytes_copied, table.percent, table.seconds_left), (250, Some(25.0), Some(30.0)));
        table.show_copied();
        assert_eq!((table.bytes_copied, table.percent, table.seconds_left), (1000, Some(100.0), None));
        table.show_copy(0, 0, Duration::ZERO);
        assert_eq!((table.bytes_total, table.percent), (Some(0), Some(0.0)), "an empty one");
    }

    #[test]
    fn tables_stay_in_order_and_are_not_doubled() {
        let mut destination = DestinationStatus::default();
        for name in ["b", "a", "c", "a"] {
            destination.table_mut(&TableName::new("public", name)).rows_copied += 1;
        }
        let seen: Vec<_> = destination.tables.iter().map(|table| (table.table.as_str(), table.rows_copied)).collect();
        assert_eq!(seen, [("public.a", 2), ("public.b", 1), ("public.c", 1)]);
    }

    #[test]
    fn percentiles_are_right_to_three_percent() {
        let mut delays = DelayHistogram::default();
        assert_eq!(delays.summary(), None);
        for ms in 1..=1000 {
            delays.record(ms * 1000, 1);
        }
        let summary = delays.summary().unwrap();
        assert!((summary.median / 500.0 - 1.0).abs() < 0.03, "{summary:?}");
        assert!((summary.p99 / 990.0 - 1.0).abs() < 0.03, "{summary:?}");
    }

    #[test]
    fn a_delay_below_zero_or_beyond_all_buckets_is_counted() {
        let mut delays = DelayHistogram::default();
        delays.record(-5, 1);
        delays.record(i64::MAX, 1);
        let summary = delays.summary().unwrap();
        assert!(summary.median < 0.01 && summary.p99 > 1e9, "{summary:?}");
    }
}
