//! What a place to keep the state in must do.

use super::barriers::{BarrierRecord, Verdict};
use super::copies::{CopyRecord, StretchRecord};
use super::records::{
    DestinationRecord, Loaded, Mark, Progress, QuarantineKey, QuarantineSelection, QuarantinedRow, RefusedWhy,
    SourceRecord, TableError, TableRecord,
};
use crate::error::Result;
use crate::position::{Lsn, Position, SnapshotId};
use crate::schema::table::TableSchema;
use crate::schema::tombstone::Tombstone;

/// Synchronous operations, called one at a time by the thread that owns it. Each is
/// one transaction, durable on return.
pub(super) trait Backend: Send {
    /// Who has taken the state over, if anybody has: no operation succeeds any more.
    fn lost(&self) -> Option<&str> {
        None
    }
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
    /// Adds the end of a table; one that is there stays as it is.
    fn append_end(&mut self, tombstone: &Tombstone) -> Result<()>;
    /// Removes versions of a table that nothing else names; which are gone.
    fn remove_versions(&mut self, oid: u32, versions: &[SnapshotId]) -> Result<Vec<SnapshotId>>;
    /// Removes a table's history if nothing else is stored of it; whether it was.
    fn forget_history(&mut self, oid: u32) -> Result<bool>;
    /// Puts or replaces tables; their positions never go back.
    fn save_tables(&mut self, tables: &[TableRecord]) -> Result<()>;
    /// Puts or replaces a copy that can be resumed.
    fn save_copy(&mut self, copy: &CopyRecord) -> Result<()>;
    /// Puts or replaces a stretch of a copy.
    fn save_stretch(&mut self, destination: &str, oid: u32, number: usize, stretch: StretchRecord) -> Result<()>;
    /// Replaces how far a copy's deletes are there.
    fn save_cleaned(&mut self, destination: &str, oid: u32, cleaned: Lsn) -> Result<()>;
    /// Forgets a copy.
    fn delete_copy(&mut self, destination: &str, oid: u32) -> Result<()>;
    /// Puts or replaces a table's barrier. One of the same change keeps its time and its
    /// verdict.
    fn save_barrier(&mut self, barrier: &BarrierRecord) -> Result<()>;
    /// Stores a verdict, if the change that waits is the one to this version. Whether it is.
    fn decide_barrier(&mut self, destination: &str, oid: u32, to: SnapshotId, verdict: Verdict) -> Result<bool>;
    /// Forgets a table's barrier.
    fn delete_barrier(&mut self, destination: &str, oid: u32) -> Result<()>;
    /// All barriers, by destination and oid.
    fn barriers(&mut self) -> Result<Vec<BarrierRecord>>;
    /// Stops all tables of a destination that have not stopped, for one reason.
    fn stop_tables(&mut self, destination: &str, error: &TableError) -> Result<()>;
    /// Forgets a table of a destination.
    fn delete_table(&mut self, destination: &str, oid: u32) -> Result<()>;
    /// Back to the beginning: the one way a position goes back.
    fn reset_table(&mut self, destination: &str, oid: u32) -> Result<()>;
    /// Puts or replaces what makes tables members of the publication, by oid.
    fn save_members(&mut self, members: &[(u32, String)]) -> Result<()>;
    /// Several progresses, in order, in one transaction.
    fn save_progress(&mut self, progress: &[Progress]) -> Result<()>;
    /// One more than ever returned for this lane.
    fn next_generation(&mut self, destination: &str, lane: u32) -> Result<u64>;
    /// A plugin's value.
    fn get_state(&mut self, destination: &str, key: &str) -> Result<Option<Vec<u8>>>;
    /// Puts, replaces or removes a plugin's value.
    fn set_state(&mut self, destination: &str, key: &str, value: Option<&[u8]>) -> Result<()>;
    /// Adds rows to the quarantine, or replaces those of the same ident. A row that is
    /// behind the one that is there changes nothing.
    fn put_quarantined(&mut self, rows: &[QuarantinedRow]) -> Result<()>;
    /// Says why rows were refused again. They are not to be sent any more, unless they
    /// have changes beyond the position.
    fn explain_quarantined(
        &mut self,
        destination: &str,
        oid: u32,
        rows: &[(String, Position, RefusedWhy)],
    ) -> Result<()>;
    /// All rows of a destination, without their cells.
    fn quarantine_index(&mut self, destination: &str) -> Result<Vec<QuarantineKey>>;
    /// Rows of a table by their idents.
    fn get_quarantined(&mut self, destination: &str, oid: u32, idents: &[String]) -> Result<Vec<QuarantinedRow>>;
    /// The first rows that are selected, by id.
    fn list_quarantined(&mut self, selection: &QuarantineSelection, most: u32) -> Result<Vec<QuarantinedRow>>;
    /// Removes rows of a table that are not beyond a position.
    fn remove_quarantined(&mut self, destination: &str, oid: u32, rows: &[(String, Position)]) -> Result<()>;
    /// Marks the rows that are selected; how many.
    fn mark_quarantined(&mut self, selection: &QuarantineSelection, mark: Mark) -> Result<u64>;
    /// Removes the rows that are marked so, and those that need them. The rows that
    /// they needed can be sent alone, and are marked for that.
    fn drop_marked(&mut self, destination: &str) -> Result<()>;
}
