//! The state in a PostgreSQL server: a schema for each pipeline, one writer.
//!
//! Every operation is one transaction. A connection can go away between a commit and its
//! answer, and then it is not known whether the commit happened. So every operation of
//! [`Backend`] says the same when it is done twice with nothing of ours in between: what
//! it writes replaces, or only grows, or is added only if it is not there. Generations
//! skip a number then, which they may. That is why an operation whose connection is gone
//! is simply done again, a few times, over a new connection; first it is proved there that
//! nobody else has written (see [`writer`]).

mod barriers;
mod copies;
mod history;
mod link;
mod migrate;
mod quarantine;
mod rows;
mod tables;
#[cfg(test)]
mod tests;
mod writer;

use std::time::{Duration, Instant};

use tokio::runtime::Runtime;

pub(super) use self::link::lost;
use self::link::{Failure, Link};
use self::migrate::MIGRATIONS;
use self::rows::pg_lsn;
use self::writer::Claim;
use super::backend::Backend;
use super::barriers::{BarrierRecord, Verdict};
use super::copies::{CopyRecord, StretchRecord};
use super::directory::Directory;
use super::limits::check_value;
use super::records::{
    DestinationRecord, Loaded, Mark, Progress, QuarantineKey, QuarantineSelection, QuarantinedRow, RefusedWhy,
    SourceRecord, TableError, TableRecord,
};
use super::server::{StoreServer, unreachable};
use crate::error::{Error, Result};
use crate::position::{Lsn, Position, SnapshotId};
use crate::schema::table::TableSchema;
use crate::schema::tombstone::Tombstone;

/// One attempt at an operation, a new connection included. The server's own limits are
/// below; this is for a server that says nothing.
const ATTEMPT: Duration = Duration::from_secs(90);
/// Pauses between attempts: what a restart of the server's process takes is bridged, the
/// rest is for the caller, who can say that he waits.
const PAUSES: [Duration; 2] = [Duration::from_millis(100), Duration::from_millis(400)];
/// For so long after a server could not be reached all operations fail at once: those that
/// are queued must not each wait as long as the first.
const AWAY: Duration = Duration::from_secs(1);

pub(super) struct Postgres {
    runtime: Runtime,
    seat: Seat,
}

/// The one who reads or writes, over as many connections as it takes.
struct Seat {
    server: StoreServer,
    link: Option<Link>,
    /// None: only reads.
    claim: Option<Claim>,
    /// Until when the server counts as away, and why.
    away: Option<(Instant, String)>,
    /// Who has taken the state over.
    lost: Option<String>,
}

/// What an operation does.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Access {
    Read,
    Write,
}

impl Postgres {
    /// Opens for writing, makes or migrates the schema, and claims it for `pipeline`. Not
    /// to be called on a thread of another runtime.
    pub(super) fn open(server: StoreServer, pipeline: &str, directory: &Directory) -> Result<Postgres> {
        Self::open_with(server, pipeline, directory, MIGRATIONS)
    }

    fn open_with(server: StoreServer, pipeline: &str, directory: &Directory, migrations: &[&str]) -> Result<Postgres> {
        let runtime = runtime()?;
        let opened = runtime.block_on(bounded(async {
            let link = Link::open(&server, false).await?;
            let claim = Claim::take(&link, &server, pipeline, directory, migrations).await?;
            Ok((link, claim))
        }));
        let (link, claim) = opened.map_err(|failure| failure.into_error(&server))?;
        if !link.fsync {
            let warning = unsafe_server(&server);
            tracing::warn!(code = warning.code(), next = warning.next_step(), "{warning}");
        }
        let seat = Seat { server, link: Some(link), claim: Some(claim), away: None, lost: None };
        Ok(Postgres { runtime, seat })
    }

    /// Opens without the right to write, beside a process that does.
    pub(super) fn open_read_only(server: StoreServer) -> Result<Postgres> {
        let runtime = runtime()?;
        let link = runtime.block_on(bounded(reader(&server))).map_err(|failure| failure.into_error(&server))?;
        let seat = Seat { server, link: Some(link), claim: None, away: None, lost: None };
        Ok(Postgres { runtime, seat })
    }

    fn read<T>(&mut self, work: impl AsyncFn(&Link) -> Result<T, Failure>) -> Result<T> {
        self.runtime.block_on(self.seat.operate(Access::Read, work))
    }

    fn write<T>(&mut self, work: impl AsyncFn(&Link) -> Result<T, Failure>) -> Result<T> {
        self.runtime.block_on(self.seat.operate(Access::Write, work))
    }
}

/// What `check` wants to know of a server: whether it can be reached, and a warning.
///
/// # Errors
/// As [`Postgres::open_read_only`].
pub(super) async fn look(server: &StoreServer) -> Result<Option<Error>> {
    let link = bounded(Link::open(server, true)).await.map_err(|failure| failure.into_error(server))?;
    Ok((!link.fsync).then(|| unsafe_server(server)))
}

fn unsafe_server(server: &StoreServer) -> Error {
    Error::no("state.fsync-off", format!("the server of the state in {} has fsync = off", server.place())).next(
        "Set fsync = on there: after a crash of its machine the state would be lost, and with it the slot's place.",
    )
}

fn runtime() -> Result<Runtime> {
    tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(|error| {
        Error::transient("state.thread", format!("no runtime for the state: {error}"))
            .next("Raise the limits on threads and open files of this process.")
    })
}

async fn bounded<T>(work: impl Future<Output = Result<T, Failure>>) -> Result<T, Failure> {
    tokio::time::timeout(ATTEMPT, work)
        .await
        .unwrap_or_else(|_| Err(Failure::Gone(format!("no answer within {} s", ATTEMPT.as_secs()))))
}

/// A connection to a state of our own version.
async fn reader(server: &StoreServer) -> Result<Link, Failure> {
    let link = Link::open(server, true).await?;
    match migrate::check(&link, server, MIGRATIONS.len()).await? {
        0 => Err(Error::usage("state.missing", format!("there is no state in {}", server.place()))
            .next("Check `pipeline.store` in the configuration; `tidegate run` makes the state at its first start.")
            .into()),
        version if version < MIGRATIONS.len() => Err(Error::usage(
            "state.older",
            format!(
                "the state in {} is of an older version of tidegate, and only `tidegate run` brings it up to date",
                server.place()
            ),
        )
        .next("Start `tidegate run` once with this version.")
        .into()),
        _ => Ok(link),
    }
}

impl Seat {
    /// One operation, over a new connection where the old one is gone.
    async fn operate<T>(&mut self, access: Access, work: impl AsyncFn(&Link) -> Result<T, Failure>) -> Result<T> {
        if access == Access::Write && self.claim.is_none() {
            let message = format!("the state in {} was opened to be read", self.server.place());
            return Err(Error::permanent("state.read-only", message).next("This is a fault in tidegate: report it."));
        }
        if let Some(message) = &self.lost {
            return Err(lost(message));
        }
        if let Some((until, why)) = &self.away
            && Instant::now() < *until
        {
            return Err(unreachable(&self.server.place(), why));
        }
        let begun = Instant::now();
        let mut pauses = PAUSES.iter();
        loop {
            let why = match bounded(self.attempt(access, &work)).await {
                Ok(value) => {
                    self.away = None;
                    return Ok(value);
                }
                Err(Failure::Gone(why)) => why,
                Err(Failure::Lost(message)) => {
                    self.link = None;
                    return Err(lost(self.lost.insert(message)));
                }
                Err(failure) => return Err(failure.into_error(&self.server)),
            };
            self.link = None;
            match pauses.next() {
                Some(pause) if begun.elapsed() < ATTEMPT => tokio::time::sleep(*pause).await,
                _ => {
                    let error = unreachable(&self.server.place(), &why);
                    self.away = Some((Instant::now() + AWAY, why));
                    return Err(error);
                }
            }
            tracing::debug!(place = self.server.place(), "the connection to the state is gone: {why}");
        }
    }

    async fn attempt<T>(
        &mut self,
        access: Access,
        work: &impl AsyncFn(&Link) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        let link = match self.link.take() {
            Some(link) => link,
            None => self.connect().await?,
        };
        let done = transact(&link, access, self.claim.as_ref(), work).await;
        // Not where the attempt was cut short: what the connection is at is not known then.
        self.link = Some(link);
        done
    }

    async fn connect(&mut self) -> Result<Link, Failure> {
        let Some(claim) = &mut self.claim else { return reader(&self.server).await };
        let link = Link::open(&self.server, false).await?;
        claim.regain(&link, &self.server).await?;
        tracing::info!(place = self.server.place(), "connected to the state again; nobody else wrote meanwhile");
        Ok(link)
    }
}

/// Does the work in a transaction, as the one writer if it writes.
async fn transact<T>(
    link: &Link,
    access: Access,
    claim: Option<&Claim>,
    work: &impl AsyncFn(&Link) -> Result<T, Failure>,
) -> Result<T, Failure> {
    let worked = async {
        match (access, claim) {
            (Access::Write, Some(claim)) => {
                link.batch("BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE").await?;
                claim.check(link).await?;
            }
            // One moment, also beside a process that writes.
            _ => link.batch("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY").await?,
        }
        work(link).await
    }
    .await;
    match worked {
        Ok(value) => {
            // Without a limit: a commit that is cut short while it waits for a standby is
            // done all the same, and said to be done.
            link.batch("SET LOCAL statement_timeout = 0; COMMIT").await?;
            Ok(value)
        }
        Err(Failure::Gone(why)) => Err(Failure::Gone(why)),
        Err(failure) => {
            link.batch("ROLLBACK").await?;
            Err(failure)
        }
    }
}

impl Backend for Postgres {
    fn lost(&self) -> Option<&str> {
        self.seat.lost.as_deref()
    }

    fn load(&mut self) -> Result<Loaded> {
        self.read(tables::load)
    }

    fn save_source(&mut self, source: &SourceRecord) -> Result<()> {
        self.write(async |link| tables::save_source(link, source).await)
    }

    fn save_destination(&mut self, destination: &DestinationRecord) -> Result<()> {
        let DestinationRecord { name, plugin, checkpoint } = destination;
        self.write(async |link| {
            link.execute(
                "INSERT INTO destinations AS known (name, plugin, checkpoint) VALUES ($1, $2, $3)
                 ON CONFLICT (name) DO UPDATE SET plugin = excluded.plugin,
                     checkpoint = greatest(known.checkpoint, excluded.checkpoint)",
                &[name, plugin, &pg_lsn(*checkpoint)],
            )
            .await
            .map(drop)
        })
    }

    fn save_destination_error(&mut self, destination: &str, error: Option<&TableError>) -> Result<()> {
        self.write(async |link| tables::save_error(link, destination, error).await)
    }

    fn append_history(&mut self, schema: &TableSchema) -> Result<()> {
        self.write(async |link| tables::append_history(link, schema).await)
    }

    fn append_end(&mut self, tombstone: &Tombstone) -> Result<()> {
        self.write(async |link| history::put_end(link, tombstone).await)
    }

    fn remove_versions(&mut self, oid: u32, versions: &[SnapshotId]) -> Result<Vec<SnapshotId>> {
        self.write(async |link| history::remove(link, oid, versions).await)
    }

    fn forget_history(&mut self, oid: u32) -> Result<bool> {
        self.write(async |link| history::forget(link, oid).await)
    }

    fn save_tables(&mut self, tables: &[TableRecord]) -> Result<()> {
        self.write(async |link| tables::save_tables(link, tables).await)
    }

    fn stop_tables(&mut self, destination: &str, error: &TableError) -> Result<()> {
        self.write(async |link| tables::stop_tables(link, destination, error).await)
    }

    fn delete_table(&mut self, destination: &str, oid: u32) -> Result<()> {
        self.write(async |link| tables::delete_table(link, destination, oid).await)
    }

    fn reset_table(&mut self, destination: &str, oid: u32) -> Result<()> {
        self.write(async |link| tables::reset_table(link, destination, oid).await)
    }

    fn save_copy(&mut self, copy: &CopyRecord) -> Result<()> {
        self.write(async |link| copies::put(link, copy).await)
    }

    fn save_stretch(&mut self, destination: &str, oid: u32, number: usize, stretch: StretchRecord) -> Result<()> {
        self.write(async |link| copies::put_stretches(link, destination, oid, &[(number, stretch)]).await)
    }

    fn save_cleaned(&mut self, destination: &str, oid: u32, cleaned: Lsn) -> Result<()> {
        self.write(async |link| copies::put_cleaned(link, destination, oid, cleaned).await)
    }

    fn delete_copy(&mut self, destination: &str, oid: u32) -> Result<()> {
        self.write(async |link| copies::delete(link, destination, oid).await)
    }

    fn save_barrier(&mut self, barrier: &BarrierRecord) -> Result<()> {
        self.write(async |link| barriers::put(link, barrier).await)
    }

    fn decide_barrier(&mut self, destination: &str, oid: u32, to: SnapshotId, verdict: Verdict) -> Result<bool> {
        self.write(async |link| barriers::decide(link, destination, oid, to, verdict).await)
    }

    fn delete_barrier(&mut self, destination: &str, oid: u32) -> Result<()> {
        self.write(async |link| barriers::delete(link, destination, oid).await)
    }

    fn barriers(&mut self) -> Result<Vec<BarrierRecord>> {
        self.read(barriers::load)
    }

    fn save_members(&mut self, members: &[(u32, String)]) -> Result<()> {
        self.write(async |link| tables::save_members(link, members).await)
    }

    fn save_progress(&mut self, progress: &[Progress]) -> Result<()> {
        self.write(async |link| {
            for one in progress {
                tables::save_progress(link, one).await?;
            }
            Ok(())
        })
    }

    fn next_generation(&mut self, destination: &str, lane: u32) -> Result<u64> {
        self.write(async |link| tables::next_generation(link, destination, lane).await)
    }

    fn get_state(&mut self, destination: &str, key: &str) -> Result<Option<Vec<u8>>> {
        self.read(async |link| tables::get_state(link, destination, key).await)
    }

    fn set_state(&mut self, destination: &str, key: &str, value: Option<&[u8]>) -> Result<()> {
        if let Some(value) = value {
            check_value(destination, key, value)?;
        }
        self.write(async |link| tables::set_state(link, destination, key, value).await)
    }

    fn put_quarantined(&mut self, rows: &[QuarantinedRow]) -> Result<()> {
        self.write(async |link| quarantine::put(link, rows).await)
    }

    fn explain_quarantined(
        &mut self,
        destination: &str,
        oid: u32,
        rows: &[(String, Position, RefusedWhy)],
    ) -> Result<()> {
        self.write(async |link| quarantine::explain(link, destination, oid, rows).await)
    }

    fn quarantine_index(&mut self, destination: &str) -> Result<Vec<QuarantineKey>> {
        self.read(async |link| quarantine::index(link, destination).await)
    }

    fn get_quarantined(&mut self, destination: &str, oid: u32, idents: &[String]) -> Result<Vec<QuarantinedRow>> {
        self.read(async |link| quarantine::get(link, destination, oid, idents).await)
    }

    fn list_quarantined(&mut self, selection: &QuarantineSelection, most: u32) -> Result<Vec<QuarantinedRow>> {
        self.read(async |link| quarantine::list(link, selection, most).await)
    }

    fn remove_quarantined(&mut self, destination: &str, oid: u32, rows: &[(String, Position)]) -> Result<()> {
        self.write(async |link| quarantine::remove(link, destination, oid, rows).await)
    }

    fn mark_quarantined(&mut self, selection: &QuarantineSelection, mark: Mark) -> Result<u64> {
        self.write(async |link| quarantine::mark(link, selection, mark).await)
    }

    fn drop_marked(&mut self, destination: &str) -> Result<()> {
        self.write(async |link| quarantine::drop_marked(link, destination).await)
    }
}
