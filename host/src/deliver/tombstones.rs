//! Tables that are gone leave a tombstone in the history: by the trigger's message, in its
//! place, or where the catalog was seen not to have them any more.

use tokio_postgres::Client;

use crate::error::Result;
use crate::position::{Lsn, SnapshotId};
use crate::schema::history::Appended;
use crate::schema::moment::Moment;
use crate::schema::tombstone::{Ended, Tombstone};
use crate::source::members::Members;
use crate::source::session::sql_error;
use crate::store::Store;

use super::feed::SharedHistory;
use super::retry::Backoff;

/// Ends the history of a table, on disk before this returns. One that has none, or has
/// ended there, is left alone.
pub(super) async fn end(
    store: &Store,
    history: &SharedHistory,
    oid: u32,
    (snapshot, at): (SnapshotId, Option<Moment>),
    why: Ended,
) {
    let tombstone = {
        let mut history = history.write();
        let Some(name) = history.newest(oid).map(|newest| newest.name.clone()) else { return };
        let tombstone = Tombstone { oid, name, snapshot, why, at };
        match history.append_end(tombstone.clone()) {
            Appended::New => tombstone,
            Appended::Known => return,
        }
    };
    tracing::info!(table = %tombstone.name, oid, at = %snapshot, "the table is {}", why.as_str());
    let mut backoff = Backoff::transient();
    while let Err(error) = store.append_end(tombstone.clone()).await {
        tracing::error!(table = %tombstone.name, code = error.code(), "the end of a table could not be stored; trying again: {error}");
        tokio::time::sleep(backoff.pause(None)).await;
    }
}

/// Ends the tables of before the look that it did not find: dropped, or only not published
/// any more.
///
/// `living`: tables whose history had not ended before the look. One that joins meanwhile
/// must not be taken for one that left.
pub(super) async fn of_left(
    client: &Client,
    store: &Store,
    history: &SharedHistory,
    living: Vec<u32>,
    found: &Members,
) -> Result<()> {
    let left: Vec<u32> = living.into_iter().filter(|oid| !found.tables.contains_key(oid)).collect();
    if left.is_empty() {
        return Ok(());
    }
    let rows = client.query("SELECT oid FROM pg_class WHERE oid = ANY ($1)", &[&left]).await;
    let rows = rows.map_err(|error| sql_error(&error, "looking for tables that have left the publication"))?;
    let there: Vec<u32> = rows.iter().map(|row| row.get(0)).collect();
    for oid in left {
        let why = if there.contains(&oid) { Ended::Unpublished } else { Ended::Dropped };
        let snapshot = SnapshotId { commit: found.at, message: Lsn::ZERO };
        end(store, history, oid, (snapshot, Some(Moment::now())), why).await;
    }
    Ok(())
}
