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
mod lock;
mod records;
mod sqlite;
mod thread;

#[cfg(test)]
mod tests;

use std::path::Path;
use std::sync::Arc;

use backend::Backend;
use lock::Lock;
use sqlite::Sqlite;
use thread::Worker;

use crate::error::Result;
use crate::schema::table::TableSchema;

pub use records::{
    Applying, DestinationRecord, Loaded, Progress, SlotRecord, SourceRecord, TableError, TableRecord, TableState,
};

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

    async fn call<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut dyn Backend) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        self.0.call(work).await
    }
}
