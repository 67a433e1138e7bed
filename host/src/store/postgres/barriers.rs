//! Schema changes that wait at a destination, one a table. Each operation says the same
//! when it is done twice.

use tokio_postgres::Row;

use super::super::barriers::{BarrierRecord, Verdict};
use super::super::records::TableError;
use super::link::{Failure, Link};
use super::rows::{parsed, text, unreadable};
use crate::position::SnapshotId;

/// One that is there for the same change keeps its time, and what was said of it meanwhile.
const PUT: &str = "
    INSERT INTO barriers AS known (destination, oid, from_version, to_version, gates, code, message, next, since,
        verdict)
    VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)
    ON CONFLICT (destination, oid) DO UPDATE SET
        from_version = excluded.from_version, to_version = excluded.to_version,
        gates = excluded.gates, code = excluded.code, message = excluded.message, next = excluded.next,
        since = CASE WHEN (known.from_version, known.to_version) = (excluded.from_version, excluded.to_version)
            THEN known.since ELSE excluded.since END,
        verdict = CASE WHEN (known.from_version, known.to_version) = (excluded.from_version, excluded.to_version)
            THEN coalesce(known.verdict, excluded.verdict) ELSE excluded.verdict END";

/// Puts or replaces a table's barrier.
pub(super) async fn put(link: &Link, barrier: &BarrierRecord) -> Result<(), Failure> {
    let gates = serde_json::to_string(&barrier.gates).map_err(unreadable)?;
    link.execute(
        PUT,
        &[
            &barrier.destination,
            &barrier.oid,
            &barrier.from.to_string(),
            &barrier.to.to_string(),
            &gates,
            &barrier.why.code.as_bytes(),
            &barrier.why.message.as_bytes(),
            &barrier.why.next.as_ref().map(|next| next.as_bytes()),
            &barrier.since,
            &barrier.verdict.map(Verdict::as_str),
        ],
    )
    .await
    .map(drop)
}

/// Stores what was said of a change, if that is the one that waits. Whether it was.
pub(super) async fn decide(
    link: &Link,
    destination: &str,
    oid: u32,
    to: SnapshotId,
    verdict: Verdict,
) -> Result<bool, Failure> {
    let decided = link
        .execute(
            "UPDATE barriers SET verdict = $4 WHERE destination = $1 AND oid = $2 AND to_version = $3",
            &[&destination, &oid, &to.to_string(), &verdict.as_str()],
        )
        .await?;
    Ok(decided > 0)
}

/// Forgets a table's barrier.
pub(super) async fn delete(link: &Link, destination: &str, oid: u32) -> Result<(), Failure> {
    link.execute("DELETE FROM barriers WHERE destination = $1 AND oid = $2", &[&destination, &oid]).await.map(drop)
}

/// Forgets all barriers of a destination.
pub(super) async fn delete_all(link: &Link, destination: &str) -> Result<(), Failure> {
    link.execute("DELETE FROM barriers WHERE destination = $1", &[&destination]).await.map(drop)
}

/// All barriers, by destination and oid.
pub(super) async fn load(link: &Link) -> Result<Vec<BarrierRecord>, Failure> {
    let rows = link.query("SELECT * FROM barriers ORDER BY destination, oid", &[]).await?;
    rows.iter().map(record).collect()
}

fn record(row: &Row) -> Result<BarrierRecord, Failure> {
    Ok(BarrierRecord {
        destination: row.try_get("destination")?,
        oid: row.try_get("oid")?,
        from: parsed(row, "from_version")?.unwrap_or_default(),
        to: parsed(row, "to_version")?.unwrap_or_default(),
        gates: serde_json::from_str(row.try_get("gates")?).map_err(unreadable)?,
        why: TableError {
            code: text(row, "code")?.unwrap_or_default(),
            message: text(row, "message")?.unwrap_or_default(),
            next: text(row, "next")?,
        },
        since: row.try_get("since")?,
        verdict: row.try_get::<_, Option<&str>>("verdict")?.and_then(Verdict::parse),
    })
}
