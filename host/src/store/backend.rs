//! What a place to keep the state in must do.

use super::records::{DestinationRecord, Loaded, Progress, SourceRecord, TableError, TableRecord};
use crate::error::Result;
use crate::schema::table::TableSchema;

/// Synchronous operations, called one at a time by the thread that owns it. Each is
/// one transaction, durable on return.
pub(super) trait Backend: Send {
    /// Everything.
    fn load(&mut self) -> Result<Loaded>;
    /// Puts or replaces the source.
    fn save_source(&mut self, source: &SourceRecord) -> Result<()>;
    /// Puts or replaces a destination; its checkpoint never goes back.
    fn save_destination(&mut self, destination: &DestinationRecord) -> Result<()>;
    /// Puts, replaces or removes a destination's last error.
    fn save_destination_error(&mut self, destination: &str, error: Option<&TableError>) -> Result<()>;
    /// Adds a version; one that is there stays as it is.
    fn append_history(&mut self, schema: &TableSchema) -> Result<()>;
    /// Puts or replaces tables; their positions never go back.
    fn save_tables(&mut self, tables: &[TableRecord]) -> Result<()>;
    /// Forgets a table of a destination.
    fn delete_table(&mut self, destination: &str, oid: u32) -> Result<()>;
    /// Back to the beginning: the one way a position goes back.
    fn reset_table(&mut self, destination: &str, oid: u32) -> Result<()>;
    /// Several progresses, in order, in one transaction.
    fn save_progress(&mut self, progress: &[Progress]) -> Result<()>;
    /// One more than ever returned for this lane.
    fn next_generation(&mut self, destination: &str, lane: u32) -> Result<u64>;
    /// A plugin's value.
    fn get_state(&mut self, destination: &str, key: &str) -> Result<Option<Vec<u8>>>;
    /// Puts, replaces or removes a plugin's value.
    fn set_state(&mut self, destination: &str, key: &str, value: Option<&[u8]>) -> Result<()>;
}
