//! What became of subtransactions.

use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::unclear;
use crate::error::Result;
use crate::source::config::SourceConfig;
use crate::source::{errors, session};

/// A commit is in the log a moment before it is one for other sessions.
const LOOK_EVERY: Duration = Duration::from_millis(5);
const LOOK_FOR: Duration = Duration::from_secs(30);

/// Ids in the log have no epoch: the newest that is not in the future is meant.
const QUERY: &str = "
    SELECT coalesce(pg_xact_status((CASE WHEN epoch + xid < next THEN epoch + xid ELSE epoch + xid - (1::bigint << 32)
                                    END)::text::xid8), 'forgotten') AS status, count(*)
    FROM unnest($1::bigint[]) AS xid,
         (SELECT next, next >> 32 << 32 AS epoch
          FROM (SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint AS next) n) e
    GROUP BY 1";

/// Whether all of a committed transaction's subtransactions committed.
pub(in crate::source) async fn all_committed(config: SourceConfig, xids: Vec<u32>) -> Result<bool> {
    let session = session::connect(&config).await?;
    let asked: Vec<i64> = xids.iter().copied().map(i64::from).collect();
    let started = Instant::now();
    loop {
        let rows = session.query(QUERY, &[&asked]).await;
        let rows = rows.map_err(|error| errors::sql_error(&error, "looking up subtransactions"))?;
        let statuses: Vec<&str> = rows.iter().map(|row| row.get(0)).collect();
        if statuses.contains(&"aborted") {
            return Ok(false);
        }
        if statuses.contains(&"forgotten") {
            return Err(unclear(xids[0], "the server has forgotten what became of this subtransaction"));
        }
        if !statuses.contains(&"in progress") {
            return Ok(true);
        }
        if started.elapsed() > LOOK_FOR {
            return Err(unclear(xids[0], "the subtransaction is still in progress for other sessions"));
        }
        sleep(LOOK_EVERY).await;
    }
}
