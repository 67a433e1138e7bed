//! Waves of copies: one snapshot with an exact LSN for many tables (P13 to P18).
//!
//! A temporary slot exports the snapshot, a keeper session imports it and exports it
//! again, and the slot goes before any lock is taken: a slot's creation must never
//! wait for a transaction that waits for us. Then each table is locked, and compared
//! with the snapshot in a second, fresh transaction: once when the wave is taken and
//! again before each range of its rows, where the lock is held until the last of them.
//! A table that waits for its turn is not locked, so DDL on it goes through; its copy
//! then begins again with the next wave.
//!
//! [`examine`] finds out what can be copied, [`ranges`] cuts it, [`queue`] says whose
//! turn it is, [`read`] copies; [`table`] is the SQL about a table.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio_postgres::{Client, Statement};

use crate::error::{Error, Result};
use crate::position::Lsn;
use crate::schema::table::TableSchema;
use crate::source::SourceConfig;
use crate::source::catalog::PublishedTable;
use crate::source::copy_out::CopyConnection;
use crate::source::replication::{ReplicationConnection, SlotKind};
use crate::source::session::{self, Session, sql_error};
use queue::Queue;
pub use queue::Turn;
use ranges::{Part, Range};
pub use read::RowSink;

mod examine;
mod queue;
mod ranges;
mod read;
mod stretches;
mod table;
#[cfg(test)]
mod tests;

/// A slot's name has at most 63 bytes, 14 of which are ours.
const SLOT_PREFIX_BYTES: usize = 63 - 14;

/// Tables whose rows may be on their way at a time, for each connection: enough that no
/// connection waits for a destination to begin or to finish a table.
const RUNS_PER_CONNECTION: usize = 4;

/// Sessions that copy at a time: waves whose options are clones share them.
#[derive(Clone, Debug)]
pub struct Connections {
    queue: Arc<Queue>,
    count: usize,
}

impl Connections {
    /// So many, one at least.
    pub fn new(count: usize) -> Connections {
        let count = count.max(1);
        Connections { queue: Queue::new(count), count }
    }
}

/// Bounds of a wave.
#[derive(Clone, Debug)]
pub struct WaveOptions {
    /// How long one attempt waits for the locks of all its tables together, and each
    /// range of a copy for its own.
    pub lock_timeout: Duration,
    /// How long the slot may wait for open transactions.
    pub slot_timeout: Duration,
    /// Sessions that copy at a time.
    pub connections: Connections,
    /// How many of them may copy the same table.
    pub connections_per_table: usize,
    /// How often a wave begins again because a table changed under it.
    pub attempts: u32,
    /// A copy ends when another backend has waited so long for its lock (P17).
    pub give_way_after: Duration,
    /// A destination that keeps a copy waiting so long is left out of it, if others want
    /// the table (P20).
    pub leave_out_after: Duration,
    /// A snapshot this old is worth a warning: vacuum waits for it (P17).
    pub warn_age: Duration,
}

impl Default for WaveOptions {
    fn default() -> WaveOptions {
        WaveOptions {
            lock_timeout: Duration::from_secs(5),
            slot_timeout: Duration::from_secs(60),
            connections: Connections::new(4),
            connections_per_table: 4,
            attempts: 3,
            give_way_after: Duration::from_secs(5),
            leave_out_after: Duration::from_secs(60),
            warn_age: Duration::from_secs(3600),
        }
    }
}

/// Tables that can be copied as of one LSN. Holds a snapshot at the source, which
/// holds back vacuum, until it is dropped; no lock.
pub struct Wave {
    /// S: a commit is in the snapshot if its LSN is below (P14).
    pub floor: Lsn,
    /// Each transaction below it had ended when the snapshot was taken.
    xmin: u64,
    /// What can be copied, biggest first.
    pub tables: Vec<WaveTable>,
    /// Tables that were asked for and cannot be copied now, and why.
    pub skipped: Vec<(u32, Error)>,
    /// When the snapshot was taken.
    pub taken_at: Instant,
    config: SourceConfig,
    options: WaveOptions,
    digest_sql: String,
    /// The keeper's export of the snapshot.
    snapshot: String,
    /// The source's system and timeline: what LSNs mean.
    history: String,
    keeper: Session,
    /// Fresh transactions: catalog as of now, locks, waiters.
    observer: tokio::sync::Mutex<Arc<Observer>>,
    runs: Arc<Queue>,
    idle: Mutex<Vec<CopyConnection>>,
}

/// A table of a wave.
#[derive(Clone)]
pub struct WaveTable {
    /// What the publication says of it in the snapshot.
    pub table: PublishedTable,
    /// The publication's WHERE, as an expression.
    pub row_filter: Option<String>,
    /// The schema in the snapshot, version `(S, 0)`.
    pub schema: TableSchema,
    /// Rows to expect, by the source's statistics and the table's size; a row filter may
    /// leave out some.
    pub estimated_rows: u64,
    /// What it takes at the source, TOAST included.
    pub source_bytes: u64,
    /// Counts while the table is copied.
    pub progress: Arc<CopyProgress>,
    /// Its place in the queues: biggest first.
    rank: u64,
    parts: Arc<[Part]>,
    ranges: Arc<[Range]>,
    digest: String,
}

/// What was handed over of a table so far.
#[derive(Debug, Default)]
pub struct CopyProgress {
    rows: AtomicU64,
    bytes: AtomicU64,
}

impl CopyProgress {
    /// Rows, and bytes of COPY text.
    pub fn get(&self) -> (u64, u64) {
        (self.rows.load(Ordering::Relaxed), self.bytes.load(Ordering::Relaxed))
    }

    fn add(&self, rows: u64, bytes: u64) {
        self.rows.fetch_add(rows, Ordering::Relaxed);
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    fn reset(&self) {
        self.rows.store(0, Ordering::Relaxed);
        self.bytes.store(0, Ordering::Relaxed);
    }
}

/// A table that was copied whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyDone {
    /// Rows.
    pub rows: u64,
    /// Bytes of COPY text.
    pub bytes: u64,
}

/// Sessions that copy read pages by a TID range scan, whatever the statistics say; nothing
/// is compiled for it, and no workers are taken from others.
const PREPARE: &str = "SET enable_seqscan = off; SET enable_indexscan = off; SET enable_bitmapscan = off; \
    SET max_parallel_workers_per_gather = 0; SET jit = off";
/// A server that can notices a closed connection at once, not with the next row it sends.
const WATCH: &str = "SET client_connection_check_interval = '1s'";

/// A session for fresh transactions.
struct Observer {
    session: Session,
    digest: Statement,
}

/// Takes a snapshot for these tables and finds out which can be copied.
///
/// A table that changed between the snapshot and its lock makes the wave begin again,
/// at most `attempts` times. What then cannot be copied is in [`Wave::skipped`]:
/// `copy.lock` (transient, names who holds the lock), `copy.changed` (transient),
/// `copy.not-published`, `copy.row-security`, `source.privilege`. Dropped meanwhile,
/// nothing is left at the source.
///
/// # Errors
/// Those of a connection; `slot.blocked` (transient) names what the slot waited for;
/// `slot.none-free`.
pub async fn take(config: &SourceConfig, tables: &[PublishedTable], options: &WaveOptions) -> Result<Wave> {
    let mut attempt = 1;
    loop {
        let mut wave = Wave::begin(config, options).await?;
        let changed = wave.examine(tables).await?;
        if changed.is_empty() || attempt >= options.attempts {
            wave.skipped.extend(changed);
            return Ok(wave);
        }
        let names: Vec<&str> = changed.iter().map(|(_, error)| error.message()).collect();
        tracing::info!(attempt, "the copy begins again: {}", names.join("; "));
        attempt += 1;
    }
}

impl Wave {
    /// The snapshot, and the sessions that keep it.
    async fn begin(config: &SourceConfig, options: &WaveOptions) -> Result<Wave> {
        let keeper = session::connect(config).await?;
        let observer = session::connect(config).await?;
        let digest_sql = table::digest_sql(version_num(&observer).await?);
        let observer = Observer::new(observer, &digest_sql).await?;
        let mut replication = ReplicationConnection::connect(config).await?;
        let system = replication.identify_system().await?;
        let slot = slot_name(config);
        let created = replication.create_slot(&slot, SlotKind::TemporaryExported, options.slot_timeout).await?;
        let taken_at = Instant::now();
        let exported = created.snapshot.ok_or_else(|| {
            Error::permanent("source.protocol", "the server made a slot without the snapshot that was asked for")
                .next("Check that the source is PostgreSQL itself, without a proxy between.")
        })?;
        statement(&keeper, &begin_sql(&exported)).await?;
        let (snapshot, xmin) = export(&keeper).await?;
        // Before any lock (P13). With the connection it would go as well, but later.
        replication.drop_slot(&slot).await?;
        Ok(Wave {
            floor: created.consistent_point,
            xmin,
            tables: Vec::new(),
            skipped: Vec::new(),
            taken_at,
            config: config.clone(),
            options: options.clone(),
            digest_sql,
            snapshot,
            history: format!("{}/{}", system.system, system.timeline),
            keeper,
            observer: tokio::sync::Mutex::new(Arc::new(observer)),
            runs: Queue::new(options.connections.count * RUNS_PER_CONNECTION),
            idle: Mutex::new(Vec::new()),
        })
    }

    /// Waits until the rows of a table may be on their way: biggest tables first, and not
    /// so many at a time that a destination has thousands open.
    pub async fn turn(&self, table: &WaveTable) -> Turn {
        self.runs.turn(table.rank).await
    }

    /// Whether a table waits for its turn, or for a connection.
    pub fn is_waited_for(&self) -> bool {
        self.options.connections.queue.is_waited_for() || self.runs.is_waited_for()
    }

    /// A session for fresh transactions, made again when the last one broke.
    async fn observer(&self) -> Result<Arc<Observer>> {
        let mut observer = self.observer.lock().await;
        if observer.session.is_closed() {
            let session = session::connect(&self.config).await?;
            *observer = Arc::new(Observer::new(session, &self.digest_sql).await?);
        }
        Ok(observer.clone())
    }

    /// A session to copy with.
    async fn worker(&self) -> Result<CopyConnection> {
        if let Some(worker) = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop() {
            return Ok(worker);
        }
        let mut worker = CopyConnection::connect(&self.config).await?;
        worker.execute(PREPARE, "preparing a copy").await?;
        if let Err(failed) = worker.execute(WATCH, "preparing a copy").await {
            tracing::debug!("a copy that is cut off ends late: {}", failed.error);
        }
        Ok(worker)
    }

    /// Only after its transaction has ended well: else its connection ends with it.
    fn put_back(&self, worker: CopyConnection) {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).push(worker);
    }
}

impl fmt::Debug for Wave {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<String> = self.tables.iter().map(|table| table.table.name.to_string()).collect();
        f.debug_struct("Wave")
            .field("floor", &self.floor)
            .field("tables", &names)
            .field("skipped", &self.skipped)
            .finish()
    }
}

impl Observer {
    async fn new(session: Session, digest_sql: &str) -> Result<Observer> {
        let digest = session.prepare(digest_sql).await;
        let digest = digest.map_err(|error| sql_error(&error, "preparing the comparison of tables"))?;
        Ok(Observer { session, digest })
    }
}

/// Begins a transaction in a snapshot.
fn begin_sql(snapshot: &str) -> String {
    // The name is the server's own: hexadecimal digits and hyphens.
    let quoted = snapshot.replace('\'', "''");
    format!("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY; SET TRANSACTION SNAPSHOT '{quoted}'")
}

async fn statement(client: &Client, sql: &str) -> Result<()> {
    client.batch_execute(sql).await.map_err(|error| sql_error(&error, "taking the snapshot of a copy"))
}

/// A name for the snapshot that others can import too, and its `xmin`.
async fn export(keeper: &Client) -> Result<(String, u64)> {
    let sql = "SELECT pg_export_snapshot(), pg_snapshot_xmin(pg_current_snapshot())::text::int8";
    let row = keeper.query_one(sql, &[]).await;
    let row = row.map_err(|error| sql_error(&error, "exporting the snapshot again"))?;
    Ok((row.get(0), row.get::<_, i64>(1).unsigned_abs()))
}

async fn version_num(client: &Client) -> Result<u32> {
    let row = client.query_one("SELECT current_setting('server_version_num')::int4", &[]).await;
    let number: i32 = row.map_err(|error| sql_error(&error, "asking for the server's version"))?.get(0);
    Ok(number.unsigned_abs())
}

/// `tidegate_<pipeline>_copy_<random>`; never searched for by its beginning.
fn slot_name(config: &SourceConfig) -> String {
    // Legal names are ASCII.
    let prefix: String = config.slot.chars().take(SLOT_PREFIX_BYTES).collect();
    format!("{prefix}_copy_{:08x}", rand::random::<u32>())
}
