//! What the source keeps for our slot, watched while we run: a slot that falls too far
//! behind is lost, and with it every change in between.

use tokio_postgres::Client;

use crate::error::Result;
use crate::source::session::sql_error;
use crate::status::StatusBoard;

use super::marks::{Marks, percent};

/// See the module.
#[derive(Debug, Default)]
pub(super) struct SlotWatch {
    marks: Marks,
}

impl SlotWatch {
    /// Looks, tells `status`, and warns.
    ///
    /// Errors: `source.sql`, `source.connection-lost`.
    pub async fn look(&mut self, client: &Client, slot: &str, board: &StatusBoard) -> Result<()> {
        // `safe_wal_size`: what may still be written before the slot is in danger; none
        // without a limit (pg_replication_slots in the manual).
        const QUERY: &str = "
            SELECT wal_status, safe_wal_size,
                   (SELECT setting::int8 * 1024 * 1024 FROM pg_settings WHERE name = 'max_slot_wal_keep_size')
            FROM pg_replication_slots WHERE slot_name = $1";
        let row = client.query_opt(QUERY, &[&slot]).await;
        // A slot that is gone ends the stream, which says so.
        let Some(row) = row.map_err(|error| sql_error(&error, "looking at the slot"))? else { return Ok(()) };
        let status: Option<String> = row.get(0);
        let (safe, limit): (Option<i64>, Option<i64>) = (row.get(1), row.get(2));
        let used = used_percent(safe, limit);
        board.update(|report| {
            report.slot.wal_status = status.clone();
            report.slot.wal_used_percent = used;
        });
        if let Some(passed) = self.marks.passed(used) {
            tracing::warn!(
                slot,
                code = "slot.behind",
                wal_status = status.as_deref().unwrap_or_default(),
                next = "See `tidegate status` for the destination that holds it back, or raise max_slot_wal_keep_size.",
                "the slot holds back more than {passed} % of max_slot_wal_keep_size: beyond it the slot is lost"
            );
        }
        Ok(())
    }
}

/// Percent of the limit that is used; none without a limit.
fn used_percent(safe: Option<i64>, limit: Option<i64>) -> Option<u8> {
    let limit = limit.filter(|limit| *limit > 0)?;
    let used = limit.saturating_sub(safe?).clamp(0, limit);
    percent(used.unsigned_abs(), limit.unsigned_abs())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_share_of_the_limit_is_what_is_no_longer_safe() {
        assert_eq!(used_percent(Some(75), Some(100)), Some(25));
        assert_eq!(used_percent(Some(-5), Some(100)), Some(100));
        assert_eq!(used_percent(Some(500), Some(100)), Some(0));
        assert_eq!(used_percent(None, Some(100)), None);
        assert_eq!(used_percent(Some(5), Some(-1_048_576)), None);
    }
}
