//! Reading a table: several connections at a time, each range by range.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::task::JoinSet;

use super::ranges::{Meter, Range};
use super::{CopyDone, Wave, WaveTable, begin_sql, table};
use crate::copy::stretches::Reading;
use crate::error::{Error, Result};
use crate::memory::{self, LARGE_ROW_BYTES};
use crate::source::copy_out::{CopyConnection, LineBytes, Lines};
use crate::source::session::sql_error;

/// Takes what one connection copies of a table.
pub trait RowSink: Send + 'static {
    /// Takes a line of COPY text, with its newline. True: [`RowSink::hand_over`] has to be
    /// called before the next one.
    ///
    /// # Errors
    /// End the copy of the table.
    fn push(&mut self, line: &[u8]) -> Result<bool>;

    /// Hands over the lines it has, none perhaps. `source_bytes`: how much of the table at
    /// the source is behind them.
    ///
    /// # Errors
    /// End the copy of the table.
    fn hand_over(&mut self, source_bytes: u64) -> impl Future<Output = Result<()>> + Send;

    /// Waits for room for a line of so many bytes, which is pushed and handed over next. It
    /// has no other lines then.
    ///
    /// # Errors
    /// End the copy of the table.
    fn make_room(&mut self, bytes: usize) -> impl Future<Output = Result<()>> + Send {
        let _ = bytes;
        async { Ok(()) }
    }

    /// Bytes of the longest line that it takes; a longer one ends the copy of the table
    /// (`row.too-large`).
    fn most_bytes(&self) -> usize {
        usize::MAX
    }

    /// What comes next is this of a stretch of the table.
    ///
    /// # Errors
    /// End the copy of the table.
    fn stretch_begins(&mut self, _reading: Reading) -> impl Future<Output = Result<()>> + Send {
        std::future::ready(Ok(()))
    }

    /// The last row of the stretch was handed over.
    ///
    /// # Errors
    /// End the copy of the table.
    fn stretch_ends(&mut self, _reading: Reading) -> impl Future<Output = Result<()>> + Send {
        std::future::ready(Ok(()))
    }
}

impl Wave {
    /// Copies a table: each connection that takes part hands lines of COPY text to a sink
    /// of its own, columns in the order of the table's schema, rows in no order. The end of
    /// the rows is the return of this function. Dropped, it ends the copy at the source.
    ///
    /// # Errors
    /// All end this table's copy, and rows may have been handed over before:
    /// `copy.gave-way`, `copy.changed`, `copy.lock`, `copy.snapshot-lost` and lost
    /// connections are transient: begin again with a new wave. Permanent ones are the
    /// server's; and those of the sinks.
    pub async fn copy_table<S: RowSink>(self: &Arc<Self>, table: &WaveTable, sink: impl Fn() -> S) -> Result<CopyDone> {
        table.progress.reset();
        let next = Arc::new(AtomicUsize::new(0));
        let readers = self.options.connections_per_table.min(self.options.connections.count).min(table.ranges.len());
        if readers <= 1 {
            self.read_ranges(table, &next, &mut sink()).await?;
        } else {
            let mut running = JoinSet::new();
            for _ in 0..readers {
                let (wave, table, next, mut sink) = (self.clone(), table.clone(), next.clone(), sink());
                running.spawn(async move { wave.read_ranges(&table, &next, &mut sink).await });
            }
            // The first error ends the others: they are aborted with the set.
            while let Some(read) = running.join_next().await {
                read.map_err(|error| cut_short(table, &error))??;
            }
        }
        let (rows, bytes) = table.progress.get();
        Ok(CopyDone { rows, bytes })
    }

    async fn read_ranges<S: RowSink>(&self, table: &WaveTable, next: &AtomicUsize, sink: &mut S) -> Result<()> {
        while next.load(Ordering::Relaxed) < table.ranges.len() {
            let _turn = self.options.connections.queue.turn(table.rank).await;
            let Some(range) = table.ranges.get(next.fetch_add(1, Ordering::Relaxed)) else { break };
            self.read_range(table, range, sink).await?;
        }
        Ok(())
    }

    /// Locks, compares, and copies.
    async fn read_range<S: RowSink>(&self, table: &WaveTable, range: &Range, sink: &mut S) -> Result<()> {
        let mut worker = self.worker().await?;
        let observer = self.observer().await?;
        let timeout = self.options.lock_timeout;
        let names = range.iter().map(|piece| &table.parts[piece.part].name);
        let begin = format!("{}; {}", begin_sql(&self.snapshot), table::lock_sql(names, timeout));
        let doing = format!("locking table {} for its copy", table.table.name);
        if let Err(failed) = worker.execute(&begin, &doing).await {
            return Err(match table::snapshot_lost(&failed) {
                Some(lost) => lost,
                None => table::lock_error(failed, &observer.session, &table.table, timeout).await,
            });
        }
        let publication = &self.config.publication;
        let digests = table::digests(&observer.session, &observer.digest, &[table.table.oid], publication).await?;
        if digests.get(&table.table.oid) != Some(&table.digest) {
            return Err(table::changed(&table.table));
        }
        let pid = worker.pid();
        tokio::select! {
            copied = copy_pieces(&mut worker, table, range, sink) => copied?,
            error = self.give_way(pid, table) => return Err(error),
        }
        self.put_back(worker);
        Ok(())
    }

    /// Returns when somebody has waited too long for a lock of the server's process `pid`,
    /// whose COPY is cancelled then.
    async fn give_way(&self, pid: i32, table: &WaveTable) -> Error {
        let seconds = self.options.give_way_after.as_secs_f64();
        loop {
            tokio::time::sleep(self.options.give_way_after / 4).await;
            let waiter = match self.waiter(pid, seconds).await {
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
        let waiters = include_str!("../sql/waiters.sql");
        let row = observer.session.query_opt(waiters, &[&pid, &seconds]).await.map_err(failed)?;
        if row.is_some() {
            // A closed connection may be noticed only when the next row is sent.
            observer.session.query_one("SELECT pg_cancel_backend($1)", &[&pid]).await.map_err(failed)?;
        }
        Ok(row.map(|row| row.get(0)))
    }
}

/// Copies what belongs to a range, and ends the transaction.
async fn copy_pieces<S: RowSink>(
    worker: &mut CopyConnection,
    table: &WaveTable,
    range: &Range,
    sink: &mut S,
) -> Result<()> {
    let filter = table.row_filter.as_deref();
    for (index, piece) in range.iter().enumerate() {
        let part = &table.parts[piece.part];
        if let Some(reading) = piece.reading {
            sink.stretch_begins(reading).await?;
        }
        let mut statement = table::copy_sql(part, piece, &table.schema, filter);
        let doing = format!("`{statement}`");
        if index + 1 == range.len() {
            statement.push_str("; COMMIT");
        }
        let mut meter = Meter::new(part, piece);
        worker.start(&statement, &doing).await?;
        loop {
            let (mut count, mut bytes, most) = (0, 0, sink.most_bytes());
            let mut take = |line: &[u8]| {
                (count, bytes) = (count + 1, bytes + line.len() as u64);
                sink.push(line)
            };
            let line_bytes = LineBytes { long: LARGE_ROW_BYTES, most };
            let lines = worker.lines(line_bytes, &mut take, &doing).await.map_err(table::copy_error)?;
            table.progress.add(count, bytes);
            match lines {
                Lines::Enough => sink.hand_over(meter.rows(count)).await?,
                Lines::End => break,
                // What it has must be nobody's waiting for room.
                Lines::Long(bytes) => {
                    sink.hand_over(meter.rows(count)).await?;
                    sink.make_room(bytes).await?;
                    worker.make_room();
                }
                Lines::TooLong(bytes, beginning) => {
                    let key = crate::batch::key_of_line(&table.schema, &beginning);
                    return Err(memory::too_large(&table.table.name, key.as_deref(), bytes, most));
                }
            }
        }
        sink.hand_over(meter.rest()).await?;
        if let Some(reading) = piece.reading {
            sink.stretch_ends(reading).await?;
        }
    }
    Ok(())
}

fn cut_short(table: &WaveTable, error: &tokio::task::JoinError) -> Error {
    Error::transient("copy.panicked", format!("the copy of table {} was cut short: {error}", table.table.name))
        .next("Report this: it is a fault of the host.")
}
