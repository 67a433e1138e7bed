//! Waves of copies: one snapshot with an exact LSN for many tables (P13 to P18).
//!
//! A temporary slot exports the snapshot, a keeper session imports it and exports it
//! again, and the slot goes before any lock is taken: a slot's creation must never
//! wait for a transaction that waits for us. Then each table is locked, and compared
//! with the snapshot in a second, fresh transaction: once when the wave is taken and
//! again before its own COPY, where the lock is held until its last row. A table that
//! waits for its turn is not locked, so DDL on it goes through; its copy then begins
//! again with the next wave.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use tokio::sync::{Semaphore, mpsc};
use tokio_postgres::Client;

use crate::error::{Error, Result};
use crate::position::{Lsn, SnapshotId};
use crate::schema::table::{Origin, TableSchema};
use crate::source::SourceConfig;
use crate::source::catalog::{PublishedTable, published_tables, table_schema};
use crate::source::replication::{ReplicationConnection, SlotKind};
use crate::source::session::{self, Session, sql_error};
use table::Part;

mod table;
#[cfg(test)]
mod tests;

/// A slot's name has at most 63 bytes, 14 of which are ours.
const SLOT_PREFIX_BYTES: usize = 63 - 14;

/// Bounds of a wave.
#[derive(Clone, Copy, Debug)]
pub struct WaveOptions {
    /// How long one attempt waits for the locks of all its tables together, and each
    /// copy for its own.
    pub lock_timeout: Duration,
    /// How long the slot may wait for open transactions.
    pub slot_timeout: Duration,
    /// Tables that are copied at a time, each by a session of its own.
    pub connections: usize,
    /// How often a wave begins again because a table changed under it.
    pub attempts: u32,
    /// A copy ends when another backend has waited so long for its lock (P17).
    pub give_way_after: Duration,
}

impl Default for WaveOptions {
    fn default() -> WaveOptions {
        WaveOptions {
            lock_timeout: Duration::from_secs(5),
            slot_timeout: Duration::from_secs(60),
            connections: 4,
            attempts: 3,
            give_way_after: Duration::from_secs(5),
        }
    }
}

/// Tables that can be copied as of one LSN. Holds a snapshot at the source, which
/// holds back vacuum, until it is dropped; no lock.
pub struct Wave {
    /// S: a commit is in the snapshot if its LSN is below (P14).
    pub floor: Lsn,
    /// What can be copied.
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
    keeper: Session,
    /// Fresh transactions: catalog as of now, locks, waiters.
    observer: tokio::sync::Mutex<Arc<Session>>,
    permits: Semaphore,
    idle: Mutex<Vec<Worker>>,
}

/// A table of a wave.
#[derive(Clone)]
pub struct WaveTable {
    /// What the publication says of it in the snapshot.
    pub table: PublishedTable,
    /// The schema in the snapshot, version `(S, 0)`.
    pub schema: TableSchema,
    /// Rows to expect, by the last ANALYZE; none where there was none.
    pub estimated_rows: Option<u64>,
    /// Counts while the table is copied.
    pub progress: Arc<CopyProgress>,
    parts: Vec<Part>,
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

/// A session that copies one table after the other.
struct Worker {
    session: Session,
    pid: i32,
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
        let version_num = version_num(&observer).await?;
        let mut replication = ReplicationConnection::connect(config).await?;
        let slot = slot_name(config);
        let created = replication.create_slot(&slot, SlotKind::TemporaryExported, options.slot_timeout).await?;
        let taken_at = Instant::now();
        let exported = created.snapshot.ok_or_else(|| {
            Error::permanent("source.protocol", "the server made a slot without the snapshot that was asked for")
                .next("Check that the source is PostgreSQL itself, without a proxy between.")
        })?;
        enter(&keeper, &exported).await?;
        let row = keeper.query_one("SELECT pg_export_snapshot()", &[]).await;
        let snapshot = row.map_err(|error| sql_error(&error, "exporting the snapshot again"))?.get(0);
        // Before any lock (P13). With the connection it would go as well, but later.
        replication.drop_slot(&slot).await?;
        Ok(Wave {
            floor: created.consistent_point,
            tables: Vec::new(),
            skipped: Vec::new(),
            taken_at,
            config: config.clone(),
            options: *options,
            digest_sql: table::digest_sql(version_num),
            snapshot,
            keeper,
            observer: tokio::sync::Mutex::new(Arc::new(observer)),
            permits: Semaphore::new(options.connections.max(1)),
            idle: Mutex::new(Vec::new()),
        })
    }

    /// Sorts the tables into those that can be copied, the skipped ones, and those that
    /// changed since the snapshot, which it returns.
    async fn examine(&mut self, tables: &[PublishedTable]) -> Result<Vec<(u32, Error)>> {
        let published = published_tables(&self.keeper, &self.config.publication).await?;
        let worker = self.worker().await?;
        enter(&worker.session, &self.snapshot).await?;
        let deadline = Instant::now() + self.options.lock_timeout;
        let mut changed = Vec::new();
        for asked in tables {
            let Some(table) = published.iter().find(|table| table.oid == asked.oid) else {
                self.skipped.push((asked.oid, not_published(asked, &self.config.publication)));
                continue;
            };
            let left = deadline.saturating_duration_since(Instant::now());
            statement(&worker.session, "SAVEPOINT tidegate").await?;
            let found = self.examine_table(&worker.session, table, left).await;
            match found {
                Ok(found) => self.tables.push(found),
                Err(error) if error.code() == "copy.changed" => changed.push((asked.oid, error)),
                Err(error) if error.code() == "source.connection-lost" => return Err(error),
                Err(error) => self.skipped.push((asked.oid, error)),
            }
            // Gives the lock back: the table is locked again for its own copy.
            statement(&worker.session, "ROLLBACK TO SAVEPOINT tidegate").await?;
        }
        statement(&worker.session, "COMMIT").await?;
        self.put_back(worker);
        Ok(changed)
    }

    async fn examine_table(&self, client: &Client, table: &PublishedTable, timeout: Duration) -> Result<WaveTable> {
        let publication = &self.config.publication;
        let observer = self.observer().await?;
        table::lock(client, &observer, table, timeout).await?;
        let digest = table::digest(client, &self.digest_sql, table, publication).await?;
        if table::digest(&observer, &self.digest_sql, table, publication).await? != digest {
            return Err(table::changed(table));
        }
        let version = SnapshotId { commit: self.floor, message: Lsn::ZERO };
        let schema = table_schema(client, table.oid, publication, version, Origin::Copy).await?;
        let schema = schema.ok_or_else(|| not_published(table, publication))?;
        let parts = table::parts(client, table, &schema).await?;
        let estimated_rows = (table.reltuples > 0.0).then_some(table.reltuples as u64);
        let progress = Arc::default();
        Ok(WaveTable { table: table.clone(), schema, estimated_rows, progress, parts, digest })
    }

    /// Copies a table into `sink`: buffers of whole lines of COPY text, columns in the
    /// order of its schema. Several tables may be copied at a time; more than
    /// `connections` wait for their turn. The end of the rows is the return of this
    /// function, not the end of the channel. Dropped, it ends the copy at the source.
    ///
    /// # Errors
    /// All end this table's copy, and rows may have been handed over before:
    /// `copy.gave-way`, `copy.changed`, `copy.lock`, `copy.snapshot-lost`,
    /// `copy.stopped` (the receiver is gone) and lost connections are transient: begin
    /// again with a new wave. Permanent ones are the server's.
    pub async fn copy_table(&self, oid: u32, sink: &mpsc::Sender<Bytes>) -> Result<CopyDone> {
        let Some(table) = self.tables.iter().find(|table| table.table.oid == oid) else {
            let message = format!("table {oid} is not in this wave");
            return Err(Error::permanent("copy.no-table", message).next("Report this: it is a fault of the host."));
        };
        let _permit = self.permits.acquire().await;
        table.progress.reset();
        let worker = self.worker().await?;
        enter(&worker.session, &self.snapshot).await?;
        let observer = self.observer().await?;
        table::lock(&worker.session, &observer, &table.table, self.options.lock_timeout).await?;
        let publication = &self.config.publication;
        if table::digest(&observer, &self.digest_sql, &table.table, publication).await? != table.digest {
            return Err(table::changed(&table.table));
        }
        tokio::select! {
            copied = copy_parts(&worker.session, table, sink) => copied?,
            error = self.give_way(&worker, table) => return Err(error),
        }
        statement(&worker.session, "COMMIT").await?;
        self.put_back(worker);
        let (rows, bytes) = table.progress.get();
        Ok(CopyDone { rows, bytes })
    }

    /// Returns when somebody has waited too long for a lock of `worker`, whose COPY is
    /// cancelled then.
    async fn give_way(&self, worker: &Worker, table: &WaveTable) -> Error {
        let seconds = self.options.give_way_after.as_secs_f64();
        loop {
            tokio::time::sleep(self.options.give_way_after / 4).await;
            let waiter = match self.waiter(worker.pid, seconds).await {
                Ok(None) => continue,
                Ok(Some(waiter)) => waiter,
                Err(error) => return error,
            };
            let name = &table.table.name;
            let message = format!("the copy of table {name} gave way to {waiter}, which waited for its lock");
            return Error::transient("copy.gave-way", message).next("Nothing: the copy begins again by itself.");
        }
    }

    /// Somebody who waits for `pid`; `pid` is told to stop.
    async fn waiter(&self, pid: i32, seconds: f64) -> Result<Option<String>> {
        let observer = self.observer().await?;
        let failed = |error: tokio_postgres::Error| sql_error(&error, "looking for who waits for a copy");
        let row = observer.query_opt(include_str!("sql/waiters.sql"), &[&pid, &seconds]).await.map_err(failed)?;
        if row.is_some() {
            // A closed connection is noticed only when the next row is sent.
            observer.query_one("SELECT pg_cancel_backend($1)", &[&pid]).await.map_err(failed)?;
        }
        Ok(row.map(|row| row.get(0)))
    }

    /// A session for fresh transactions, made again when the last one broke.
    async fn observer(&self) -> Result<Arc<Session>> {
        let mut observer = self.observer.lock().await;
        if observer.is_closed() {
            *observer = Arc::new(session::connect(&self.config).await?);
        }
        Ok(observer.clone())
    }

    async fn worker(&self) -> Result<Worker> {
        let idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
        if let Some(worker) = idle.filter(|worker| !worker.session.is_closed()) {
            return Ok(worker);
        }
        let session = session::connect(&self.config).await?;
        let row = session.query_one("SELECT pg_backend_pid()", &[]).await;
        let pid = row.map_err(|error| sql_error(&error, "preparing a copy"))?.get(0);
        Ok(Worker { session, pid })
    }

    /// Only after its transaction has ended well: else its connection ends with it.
    fn put_back(&self, worker: Worker) {
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

async fn copy_parts(client: &Client, table: &WaveTable, sink: &mpsc::Sender<Bytes>) -> Result<()> {
    for part in &table.parts {
        let statement = table::statement(part, &table.schema, table.table.row_filter.as_deref());
        table::stream(client, &statement, sink, &table.progress).await?;
    }
    Ok(())
}

/// Begins a transaction in a snapshot.
async fn enter(client: &Client, snapshot: &str) -> Result<()> {
    // The name is the server's own: hexadecimal digits and hyphens.
    let quoted = snapshot.replace('\'', "''");
    let begin = format!("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY; SET TRANSACTION SNAPSHOT '{quoted}'");
    let Err(error) = client.batch_execute(&begin).await else { return Ok(()) };
    match error.as_db_error() {
        Some(refused) if !refused.code().code().starts_with("57") => {
            let message = format!("the snapshot of this copy is gone: {}", refused.message());
            Err(Error::transient("copy.snapshot-lost", message).next("Nothing: the copy begins again with a new one."))
        }
        _ => Err(sql_error(&error, "beginning a copy")),
    }
}

async fn statement(client: &Client, sql: &str) -> Result<()> {
    client.batch_execute(sql).await.map_err(|error| sql_error(&error, "copying tables"))
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

fn not_published(table: &PublishedTable, publication: &str) -> Error {
    let message = format!("table {} is not in publication `{publication}` any more", table.name);
    Error::permanent("copy.not-published", message).next("Nothing, if it was taken out on purpose; else add it again.")
}
