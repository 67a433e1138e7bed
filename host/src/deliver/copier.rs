//! Copies tables: in waves of one snapshot, once for all destinations that want a
//! table at that moment (P16, P20).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use bytes::Bytes;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinSet;

use crate::batch::CopyBuilder;
use crate::copy::{Wave, WaveOptions, WaveTable, snapshot};
use crate::error::{Error, Result};
use crate::position::Position;
use crate::schema::table::TableSchema;
use crate::source::catalog::{PublishedTable, published_tables};
use crate::source::config::SourceConfig;
use crate::source::session::connect;

use super::destination::{Copying, Live};
use super::drain::Drainer;
use super::inbox::Sender;
use super::retry::Backoff;
use super::versions::Versions;

/// Bytes of rows handed over at once.
const BATCH_BYTES: usize = 1 << 20;
/// Buffers of COPY data between the connection and the decoder.
const BUFFERS: usize = 4;

/// Where a destination takes copies.
#[derive(Clone)]
pub(super) struct CopyOutlet {
    pub name: String,
    pub copying: Sender<Copying>,
    pub live: Sender<Live>,
    /// Rows without a key cannot be merged.
    pub needs_key: bool,
}

/// What a copier works with.
#[derive(Clone)]
pub(super) struct Copier {
    pub source: Arc<SourceConfig>,
    pub outlets: Arc<[CopyOutlet]>,
    pub versions: Versions,
    pub drainer: Drainer,
    pub options: WaveOptions,
    pub epoch: u32,
}

/// Tables to copy, and the destinations that want each.
pub(super) type Wanted = BTreeMap<u32, BTreeSet<usize>>;

/// How the copy of one table went: the destinations that have to get it again.
struct Copied {
    oid: u32,
    again: BTreeSet<usize>,
}

impl Copier {
    /// Copies what is wanted, until all of it is copied or given up on.
    pub async fn run(self, mut wanted: Wanted, mut stopping: watch::Receiver<bool>) {
        let mut backoff = Backoff::transient();
        while !wanted.is_empty() {
            let before = wanted.values().map(BTreeSet::len).sum::<usize>();
            let wave = tokio::select! {
                wave = self.wave(&mut wanted) => wave,
                _ = stopping.wait_for(|stopping| *stopping) => return,
            };
            if let Err(error) = wave {
                tracing::warn!(
                    code = error.code(),
                    next = error.next_step(),
                    tables = wanted.len(),
                    "a copy did not begin; trying again: {error}"
                );
            }
            if wanted.values().map(BTreeSet::len).sum::<usize>() < before {
                backoff.reset();
            }
            if !wanted.is_empty() {
                let pause = backoff.pause(None);
                tokio::select! {
                    () = tokio::time::sleep(pause) => {}
                    _ = stopping.wait_for(|stopping| *stopping) => return,
                }
            }
        }
    }

    /// One snapshot, and all wanted tables in it, side by side.
    async fn wave(&self, wanted: &mut Wanted) -> Result<()> {
        let session = connect(&self.source).await?;
        let published = published_tables(&session, &self.source.publication).await?;
        drop(session);
        let tables: Vec<PublishedTable> =
            published.into_iter().filter(|table| wanted.contains_key(&table.oid)).collect();
        self.give_up_unpublished(wanted, &tables);
        if tables.is_empty() {
            return Ok(());
        }
        let wave = Arc::new(snapshot::take(&self.source, &tables, &self.options).await?);
        for (oid, error) in &wave.skipped {
            tracing::warn!(
                oid,
                code = error.code(),
                next = error.next_step(),
                "the table is left out of this copy: {error}"
            );
            if !error.is_transient() {
                self.fail(wanted, *oid, error);
            }
        }
        let mut copies = JoinSet::new();
        for table in &wave.tables {
            let Some(destinations) = wanted.get(&table.table.oid).cloned() else { continue };
            let (copier, wave, table) = (self.clone(), wave.clone(), table.clone());
            copies.spawn(async move { copier.copy(&wave, &table, destinations).await });
        }
        while let Some(copied) = copies.join_next().await {
            let copied = copied.map_err(|error| {
                Error::transient("copy.panicked", format!("the copy of a table was cut short: {error}"))
            })?;
            if copied.again.is_empty() {
                wanted.remove(&copied.oid);
            } else {
                wanted.insert(copied.oid, copied.again);
            }
        }
        Ok(())
    }

    fn give_up_unpublished(&self, wanted: &mut Wanted, tables: &[PublishedTable]) {
        let gone: Vec<u32> =
            wanted.keys().filter(|oid| !tables.iter().any(|table| table.oid == **oid)).copied().collect();
        for oid in gone {
            let error = Error::permanent("table.unpublished", format!("table {oid} has left the publication"))
                .next("Add it again, then run `tidegate resync DEST TABLE`.");
            self.fail(wanted, oid, &error);
        }
    }

    fn fail(&self, wanted: &mut Wanted, oid: u32, error: &Error) {
        for destination in wanted.remove(&oid).unwrap_or_default() {
            self.fail_at(destination, oid, error);
        }
    }

    fn fail_at(&self, destination: usize, oid: u32, error: &Error) {
        // If the destination has ended there is nobody to tell.
        let _ = self.outlets[destination].live.send_now(Live::Failed { oid, error: error.into() });
    }

    /// One table, to all destinations that want it.
    async fn copy(&self, wave: &Wave, table: &WaveTable, destinations: BTreeSet<usize>) -> Copied {
        let oid = table.table.oid;
        let run: Arc<str> = format!("{:016x}", rand::random::<u64>()).into();
        match self.copy_run(wave, table, &run, destinations.clone()).await {
            Ok(again) => Copied { oid, again },
            Err(error) => {
                tracing::warn!(table = %table.table.name, code = error.code(), next = error.next_step(), "the copy of the table failed: {error}");
                if error.is_transient() {
                    return Copied { oid, again: destinations };
                }
                for destination in destinations {
                    self.fail_at(destination, oid, &error);
                }
                Copied { oid, again: BTreeSet::new() }
            }
        }
    }

    /// Returns the destinations whose run was cut off.
    async fn copy_run(
        &self,
        wave: &Wave,
        table: &WaveTable,
        run: &Arc<str>,
        destinations: BTreeSet<usize>,
    ) -> Result<BTreeSet<usize>> {
        let schema = self.versions.copied(table.schema.clone()).await?;
        let rows_total = table.estimated_rows;
        let mut again = BTreeSet::new();
        let mut begun = Vec::new();
        for destination in destinations {
            if self.outlets[destination].needs_key && schema.merge_key().is_empty() {
                self.fail_at(destination, schema.oid, &no_key(&schema));
                continue;
            }
            let begin =
                |done| Copying::Begin { schema: schema.clone(), run: run.clone(), floor: wave.floor, rows_total, done };
            if self.ask(destination, begin, &mut again).await? {
                begun.push(destination);
            }
        }
        if begun.is_empty() {
            return Ok(again);
        }
        self.copy_rows(wave, &schema, run, &begun).await?;
        for destination in begun {
            let finish = |done| Copying::Finish { oid: schema.oid, run: run.clone(), done };
            if self.ask(destination, finish, &mut again).await? {
                let outlet = &self.outlets[destination];
                let cursor = Position::of_copy(self.epoch, wave.floor);
                self.drainer.start(destination, outlet.live.clone(), schema.oid, wave.floor, Some(cursor));
            }
        }
        Ok(again)
    }

    /// Asks a destination something and waits for its answer. False if it said no: for
    /// now, which is noted in `again`, or for good, which it has recorded itself.
    async fn ask(
        &self,
        destination: usize,
        item: impl FnOnce(oneshot::Sender<Result<()>>) -> Copying,
        again: &mut BTreeSet<usize>,
    ) -> Result<bool> {
        let outlet = &self.outlets[destination];
        let (done, answered) = oneshot::channel();
        outlet.copying.send(item(done), 1).await.map_err(|_| ended(&outlet.name))?;
        match answered.await.map_err(|_| ended(&outlet.name))? {
            Ok(()) => Ok(true),
            Err(error) => {
                tracing::warn!(destination = %outlet.name, code = error.code(), "{error}");
                if error.is_transient() {
                    again.insert(destination);
                }
                Ok(false)
            }
        }
    }

    async fn copy_rows(&self, wave: &Wave, schema: &Arc<TableSchema>, run: &Arc<str>, to: &[usize]) -> Result<()> {
        let (buffers, mut filled) = mpsc::channel::<Bytes>(BUFFERS);
        let decode = async move {
            let mut builder = CopyBuilder::new(schema.clone());
            while let Some(buffer) = filled.recv().await {
                builder.push(&buffer)?;
                if builder.bytes() >= BATCH_BYTES {
                    self.send_rows(schema.oid, run, &mut builder, to).await?;
                }
            }
            if builder.rows() > 0 {
                self.send_rows(schema.oid, run, &mut builder, to).await?;
            }
            Ok::<(), Error>(())
        };
        // The channel ends with the copy, which ends the decoding.
        let copy = async move { wave.copy_table(schema.oid, &buffers).await };
        let (copied, decoded) = tokio::join!(copy, decode);
        decoded?;
        copied.map(|_| ())
    }

    async fn send_rows(&self, oid: u32, run: &Arc<str>, builder: &mut CopyBuilder, to: &[usize]) -> Result<()> {
        let bytes = builder.bytes();
        let rows = builder.finish();
        let Some((last, others)) = to.split_last() else { return Ok(()) };
        for destination in others {
            self.send_to(*destination, Copying::Rows { oid, run: run.clone(), rows: rows.clone() }, bytes).await?;
        }
        self.send_to(*last, Copying::Rows { oid, run: run.clone(), rows }, bytes).await
    }

    async fn send_to(&self, destination: usize, item: Copying, bytes: usize) -> Result<()> {
        let outlet = &self.outlets[destination];
        outlet.copying.send(item, bytes).await.map_err(|_| ended(&outlet.name))
    }
}

fn no_key(schema: &TableSchema) -> Error {
    Error::permanent("table.no-key", format!("table {} has no key that `merge` could go by", schema.name))
        .next("Give it a primary key, set REPLICA IDENTITY USING INDEX, or use `mode = \"changes\"`.")
}

fn ended(destination: &str) -> Error {
    Error::transient("destination.ended", format!("destination `{destination}` ends"))
}
