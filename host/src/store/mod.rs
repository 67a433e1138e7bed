//! What must survive the process: the source, checkpoints, positions, schema
//! history, and what plugins keep.
//!
//! A [`Store`] is a handle to a thread that owns the database. Operations wait in a
//! bounded queue and are done in the order they were called in; each is durable when
//! it returns. One whose caller stopped waiting is done all the same.
//!
//! Durability costs an fsync per operation. Progress comes often, so progresses that
//! wait one behind another share a transaction.

mod backend;
mod barriers;
mod copies;
mod directory;
mod history;
mod limits;
mod lock;
mod postgres;
mod quarantine;
mod records;
mod rows;
mod server;
mod sqlite;
mod thread;

#[cfg(test)]
mod test_places;
#[cfg(test)]
mod tests;

use std::path::Path;
use std::sync::Arc;

use backend::Backend;
use directory::Directory;
use lock::Lock;
use postgres::Postgres;
use sqlite::Sqlite;
use thread::Worker;

use crate::error::{Error, Result};
use crate::position::{Lsn, Position, SnapshotId};
use crate::schema::table::TableSchema;
use crate::schema::tombstone::Tombstone;

pub use barriers::{BarrierRecord, Verdict};
pub use copies::{CopyRecord, StretchRecord};
pub use history::{Application, AppliedVersion, How};
pub use records::{
    Applying, DestinationRecord, Loaded, Mark, Progress, QuarantineKey, QuarantineSelection, QuarantinedRow,
    RefusedWhy, RowOp, SlotRecord, SourceRecord, TableError, TableRecord, TableState,
};
pub use server::StoreServer;

/// The state of one pipeline. Clones share it; when the last one is dropped, what is
/// queued is finished, and the state is closed and unlocked.
#[derive(Clone)]
pub struct Store(Arc<Worker>);

impl Store {
    /// Opens the state of `pipeline` in `directory`, both made if they are not there,
    /// and keeps every other process out.
    ///
    /// Blocks for as long as the disk takes.
    ///
    /// # Errors
    /// All with exit code 2: `state.in-use` names the process that has it;
    /// `state.other-pipeline`; `state.newer` if a later version wrote it;
    /// `state.directory`. `state.write`, `state.busy` (both transient) and
    /// `state.corrupt` as from every operation.
    pub fn open(directory: &Path, pipeline: &str) -> Result<Store> {
        let lock = Lock::take(directory)?;
        let sqlite = Sqlite::open(directory, pipeline)?;
        Ok(Store(Arc::new(Worker::start(Box::new(sqlite), Some(lock))?)))
    }

    /// Opens a state to look at it, beside the process that runs the pipeline if one
    /// does. Every operation that writes fails.
    ///
    /// # Errors
    /// `state.missing` if there is none; `state.newer`, `state.older` if another
    /// version wrote it (all with exit code 2).
    pub fn open_read_only(directory: &Path) -> Result<Store> {
        let sqlite = Sqlite::open_read_only(directory)?;
        Ok(Store(Arc::new(Worker::start(Box::new(sqlite), None)?)))
    }

    /// The same with the state in a schema on a server; `directory` still holds what is
    /// this machine's, the spool above all, and is locked as well. Every other process is
    /// kept out, on other machines too.
    ///
    /// Blocks for as long as the network takes, within bounds.
    ///
    /// # Errors
    /// With exit code 2: `state.in-use`, which takes 5 s, as a process that has just died
    /// may still hold the lock; `state.other-pipeline`; `state.newer`; `state.directory`;
    /// `state.other-directory` if the checkpoints rely on another directory's spool.
    /// `state.login`, `state.server`, `state.privilege`, and `state.unreachable` (transient).
    pub fn open_on_server(server: &StoreServer, directory: &Path, pipeline: &str) -> Result<Store> {
        let lock = Lock::take(directory)?;
        let directory = Directory::identify(directory, pipeline)?;
        let (server, pipeline) = (server.clone(), pipeline.to_owned());
        let open = move || Ok(Box::new(Postgres::open(server, &pipeline, &directory)?) as Box<dyn Backend>);
        Ok(Store(Arc::new(Worker::open(open, Some(lock))?)))
    }

    /// Opens a state on a server to look at it, beside the process that runs the pipeline
    /// if one does. Every operation that writes fails.
    ///
    /// # Errors
    /// As [`Store::open_read_only`], and those of reaching the server.
    pub fn open_read_only_on_server(server: &StoreServer) -> Result<Store> {
        let server = server.clone();
        let open = move || Ok(Box::new(Postgres::open_read_only(server)?) as Box<dyn Backend>);
        Ok(Store(Arc::new(Worker::open(open, None)?)))
    }

    /// Whether a server can keep a state, as far as that can be told without writing; a
    /// warning if it can, but should not.
    ///
    /// # Errors
    /// `state.login`, `state.server`, `state.unreachable` (transient).
    pub async fn look_at_server(server: &StoreServer) -> Result<Option<Error>> {
        postgres::look(server).await
    }

    /// Returns when another process has taken the state over, which only one on a server
    /// allows: this process must end.
    pub async fn lost(&self) -> Error {
        let mut lost = self.0.lost.subscribe();
        match lost.wait_for(Option::is_some).await {
            Ok(message) => postgres::lost(message.as_deref().unwrap_or_default()),
            // It is this store that would tell.
            Err(_) => std::future::pending().await,
        }
    }

    /// Reads everything, as of one moment. Blocks; meant for starts and for `status`.
    ///
    /// # Errors
    /// `state.corrupt` if something stored cannot be understood.
    pub fn load(&self) -> Result<Loaded> {
        self.0.call_blocking(|backend| backend.load())
    }

    /// Stores what the source is.
    pub async fn save_source(&self, source: SourceRecord) -> Result<()> {
        self.call(move |backend| backend.save_source(&source)).await
    }

    /// Adds or changes a destination. A checkpoint behind the stored one leaves that
    /// as it is.
    pub async fn save_destination(&self, destination: DestinationRecord) -> Result<()> {
        self.call(move |backend| backend.save_destination(&destination)).await
    }

    /// Stores why a destination as a whole does not go on; none when it does.
    ///
    /// # Errors
    /// `state.unknown-destination` before [`Store::save_destination`].
    pub async fn save_destination_error(&self, destination: &str, error: Option<TableError>) -> Result<()> {
        let destination = destination.to_owned();
        self.call(move |backend| backend.save_destination_error(&destination, error.as_ref())).await
    }

    /// Adds a version to the history of its table. The same snapshot id again changes
    /// nothing.
    pub async fn append_history(&self, schema: TableSchema) -> Result<()> {
        self.call(move |backend| backend.append_history(&schema)).await
    }

    /// Adds the end of a table's history. The same snapshot id again changes nothing.
    pub async fn append_end(&self, tombstone: Tombstone) -> Result<()> {
        self.call(move |backend| backend.append_end(&tombstone)).await
    }

    /// Removes versions from a table's history, but those that a table of a destination, a
    /// quarantined row or a copy names. Returns which are gone.
    pub async fn remove_versions(&self, oid: u32, versions: Vec<SnapshotId>) -> Result<Vec<SnapshotId>> {
        self.call(move |backend| backend.remove_versions(oid, &versions)).await
    }

    /// Removes a table's history, unless something else is stored of the table. Returns
    /// whether it is gone.
    pub async fn forget_history(&self, oid: u32) -> Result<bool> {
        self.call(move |backend| backend.forget_history(oid)).await
    }

    /// [`Store::save_tables`] with one table.
    pub async fn save_table(&self, table: TableRecord) -> Result<()> {
        self.save_tables(vec![table]).await
    }

    /// Adds or changes tables of destinations, all or none. A position behind the
    /// stored one, or none, leaves that as it is; only [`Store::reset_table`] and
    /// [`Store::delete_table`] take it away.
    ///
    /// # Errors
    /// `state.unknown-destination` before [`Store::save_destination`].
    pub async fn save_tables(&self, tables: Vec<TableRecord>) -> Result<()> {
        self.call(move |backend| backend.save_tables(&tables)).await
    }

    /// Stops all tables of a destination: stored as errored and needing a resync, but
    /// those that are already.
    pub async fn stop_tables(&self, destination: &str, error: TableError) -> Result<()> {
        let destination = destination.to_owned();
        self.call(move |backend| backend.stop_tables(&destination, &error)).await
    }

    /// Forgets a table of a destination.
    pub async fn delete_table(&self, destination: &str, oid: u32) -> Result<()> {
        let destination = destination.to_owned();
        self.call(move |backend| backend.delete_table(&destination, oid)).await
    }

    /// Sets a table of a destination back to [`TableState::Init`], without floor,
    /// run, position, applied schema and error: it will be copied anew.
    pub async fn reset_table(&self, destination: &str, oid: u32) -> Result<()> {
        let destination = destination.to_owned();
        self.call(move |backend| backend.reset_table(&destination, oid)).await
    }

    /// Stores a copy that can be resumed, in place of what was known of one of the table.
    pub async fn save_copy(&self, copy: CopyRecord) -> Result<()> {
        self.call(move |backend| backend.save_copy(&copy)).await
    }

    /// Stores what is known of a stretch of a copy, by number.
    pub async fn save_stretch(&self, destination: &str, oid: u32, number: usize, stretch: StretchRecord) -> Result<()> {
        let destination = destination.to_owned();
        self.call(move |backend| backend.save_stretch(&destination, oid, number, stretch)).await
    }

    /// Stores that what went from a copy's table before an LSN is not at the destination.
    pub async fn save_cleaned(&self, destination: &str, oid: u32, cleaned: Lsn) -> Result<()> {
        let destination = destination.to_owned();
        self.call(move |backend| backend.save_cleaned(&destination, oid, cleaned)).await
    }

    /// Forgets a copy: there is nothing to resume any more. [`Store::delete_table`] and
    /// [`Store::reset_table`] do so too.
    pub async fn delete_copy(&self, destination: &str, oid: u32) -> Result<()> {
        let destination = destination.to_owned();
        self.call(move |backend| backend.delete_copy(&destination, oid)).await
    }

    /// Everything, as [`Store::load`] reads it.
    pub async fn loaded(&self) -> Result<Loaded> {
        self.call(|backend| backend.load()).await
    }

    /// Stores a change that waits, in place of what waited of its table before. One of the
    /// same change keeps its time, and what was said of it.
    pub async fn save_barrier(&self, barrier: BarrierRecord) -> Result<()> {
        self.call(move |backend| backend.save_barrier(&barrier)).await
    }

    /// Stores what an operator says of a change that waits, and tells whoever watches
    /// [`Store::marks`]. False if no change to this version waits there.
    pub async fn decide_barrier(&self, destination: &str, oid: u32, to: SnapshotId, verdict: Verdict) -> Result<bool> {
        let destination = destination.to_owned();
        let decided = self.call(move |backend| backend.decide_barrier(&destination, oid, to, verdict)).await?;
        self.0.marks.send_modify(|count| *count += 1);
        Ok(decided)
    }

    /// Forgets a change that waited. [`Store::delete_table`] and [`Store::reset_table`] do
    /// so too, and [`Store::stop_tables`] for all of a destination.
    pub async fn delete_barrier(&self, destination: &str, oid: u32) -> Result<()> {
        let destination = destination.to_owned();
        self.call(move |backend| backend.delete_barrier(&destination, oid)).await
    }

    /// All changes that wait, by destination and oid.
    pub async fn barriers(&self) -> Result<Vec<BarrierRecord>> {
        self.call(|backend| backend.barriers()).await
    }

    /// All tables, by destination and oid.
    pub async fn tables(&self) -> Result<Vec<TableRecord>> {
        self.call(|backend| Ok(backend.load()?.tables)).await
    }

    /// Stores what makes tables members of the publication, by oid (P21).
    pub async fn save_members(&self, members: Vec<(u32, String)>) -> Result<()> {
        self.call(move |backend| backend.save_members(&members)).await
    }

    /// Moves a checkpoint and positions forward, in one transaction. What is behind
    /// the stored value changes nothing, nor does the position of a table that is not
    /// stored or is in [`TableState::Init`].
    ///
    /// # Errors
    /// `state.unknown-destination` before [`Store::save_destination`].
    pub async fn save_progress(&self, progress: Progress) -> Result<()> {
        self.0.progress(progress).await
    }

    /// A number greater than any that was returned for this lane of this destination,
    /// across restarts; the first is 1.
    pub async fn next_generation(&self, destination: &str, lane: u32) -> Result<u64> {
        let destination = destination.to_owned();
        self.call(move |backend| backend.next_generation(&destination, lane)).await
    }

    /// What a destination's plugin stored under a key.
    pub async fn get_state(&self, destination: &str, key: &str) -> Result<Option<Vec<u8>>> {
        let (destination, key) = (destination.to_owned(), key.to_owned());
        self.call(move |backend| backend.get_state(&destination, &key)).await
    }

    /// Stores a value for a destination's plugin, durable on return; none removes it.
    ///
    /// # Errors
    /// `state.too-large`: a key over 1 KiB, a value over 1 MiB, or more than 4,096
    /// values or 64 MiB for one destination.
    pub async fn set_state(&self, destination: &str, key: &str, value: Option<Vec<u8>>) -> Result<()> {
        let (destination, key) = (destination.to_owned(), key.to_owned());
        self.call(move |backend| backend.set_state(&destination, &key, value.as_deref())).await
    }

    /// Adds rows to the quarantine. The row that is there under the same ident is
    /// replaced, unless it has later changes.
    pub async fn put_quarantined(&self, rows: Vec<QuarantinedRow>) -> Result<()> {
        self.call(move |backend| backend.put_quarantined(&rows)).await
    }

    /// Says why quarantined rows were refused again. They are not to be sent any more,
    /// unless they have changes beyond the position.
    pub async fn explain_quarantined(
        &self,
        destination: &str,
        oid: u32,
        rows: Vec<(String, Position, RefusedWhy)>,
    ) -> Result<()> {
        let destination = destination.to_owned();
        self.call(move |backend| backend.explain_quarantined(&destination, oid, &rows)).await
    }

    /// All quarantined rows of a destination, without their cells.
    pub async fn quarantine_index(&self, destination: &str) -> Result<Vec<QuarantineKey>> {
        let destination = destination.to_owned();
        self.call(move |backend| backend.quarantine_index(&destination)).await
    }

    /// Quarantined rows of a table by their idents; those that are not there are left out.
    pub async fn get_quarantined(
        &self,
        destination: &str,
        oid: u32,
        idents: Vec<String>,
    ) -> Result<Vec<QuarantinedRow>> {
        let destination = destination.to_owned();
        self.call(move |backend| backend.get_quarantined(&destination, oid, &idents)).await
    }

    /// The first `most` quarantined rows that are selected, by id. Blocks.
    pub fn list_quarantined(&self, selection: QuarantineSelection, most: u32) -> Result<Vec<QuarantinedRow>> {
        self.0.call_blocking(move |backend| backend.list_quarantined(&selection, most))
    }

    /// Removes quarantined rows of a table, each unless it has changes beyond the position.
    pub async fn remove_quarantined(&self, destination: &str, oid: u32, rows: Vec<(String, Position)>) -> Result<()> {
        let destination = destination.to_owned();
        self.call(move |backend| backend.remove_quarantined(&destination, oid, &rows)).await
    }

    /// Marks quarantined rows, tells whoever watches [`Store::marks`], and returns how
    /// many there were.
    pub async fn mark_quarantined(&self, selection: QuarantineSelection, mark: Mark) -> Result<u64> {
        let marked = self.call(move |backend| backend.mark_quarantined(&selection, mark)).await?;
        self.0.marks.send_modify(|count| *count += 1);
        Ok(marked)
    }

    /// Removes the rows of a destination that are marked to be dropped, and those that
    /// need them.
    pub async fn drop_marked(&self, destination: &str) -> Result<()> {
        let destination = destination.to_owned();
        self.call(move |backend| backend.drop_marked(&destination)).await
    }

    /// Changes whenever an operator has decided about something through this store: rows in
    /// quarantine, or a schema change that waits.
    pub fn marks(&self) -> tokio::sync::watch::Receiver<u64> {
        self.0.marks.subscribe()
    }

    async fn call<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut dyn Backend) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        self.0.call(work).await
    }
}
