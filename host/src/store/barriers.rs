//! Schema changes that wait at a destination, one a table.

use rusqlite::{Connection, Row, Transaction, params};
use serde::{Deserialize, Serialize};

use super::records::TableError;
use super::rows::{parsed, unreadable};
use crate::position::SnapshotId;
use crate::schema::barrier::Gate;

/// A change that a destination does not apply by itself. The rows of its table wait
/// behind it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BarrierRecord {
    /// The destination's name.
    pub destination: String,
    /// `pg_class.oid`.
    pub oid: u32,
    /// The version that the destination has.
    pub from: SnapshotId,
    /// The version that the change leads to, and no later one.
    pub to: SnapshotId,
    /// What has to open.
    pub gates: Vec<Gate>,
    /// As `status` shows it.
    pub why: TableError,
    /// Microseconds since 1970-01-01 UTC.
    pub since: i64,
    /// What the operator said of exactly this change.
    pub verdict: Option<Verdict>,
}

/// What an operator says of a change that waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// It is applied, or tried again.
    Approved,
    /// The table stops.
    Refused,
    /// The destination has the version before an interrupted change.
    AcceptedFrom,
    /// The destination has the version behind it.
    AcceptedTo,
}

impl Verdict {
    /// As it is shown and stored.
    pub fn as_str(self) -> &'static str {
        match self {
            Verdict::Approved => "approved",
            Verdict::Refused => "refused",
            Verdict::AcceptedFrom => "accepted-from",
            Verdict::AcceptedTo => "accepted-to",
        }
    }

    pub(super) fn parse(text: &str) -> Option<Verdict> {
        let all = [Verdict::Approved, Verdict::Refused, Verdict::AcceptedFrom, Verdict::AcceptedTo];
        all.into_iter().find(|verdict| verdict.as_str() == text)
    }
}

/// One that is there for the same change keeps its time, and what was said of it meanwhile.
const PUT: &str = "
    INSERT INTO barriers (destination, oid, from_version, to_version, gates, code, message, next, since, verdict)
    VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10)
    ON CONFLICT (destination, oid) DO UPDATE SET
        gates = excluded.gates, code = excluded.code, message = excluded.message, next = excluded.next,
        since = iif(from_version = excluded.from_version AND to_version = excluded.to_version,
            since, excluded.since),
        verdict = iif(from_version = excluded.from_version AND to_version = excluded.to_version,
            coalesce(verdict, excluded.verdict), excluded.verdict),
        from_version = excluded.from_version, to_version = excluded.to_version";

/// Puts or replaces a table's barrier.
pub(super) fn put(tx: &Transaction<'_>, barrier: &BarrierRecord) -> rusqlite::Result<()> {
    let gates = serde_json::to_string(&barrier.gates).map_err(unreadable)?;
    tx.prepare_cached(PUT)?.execute(params![
        barrier.destination,
        barrier.oid,
        barrier.from.to_string(),
        barrier.to.to_string(),
        gates,
        barrier.why.code,
        barrier.why.message,
        barrier.why.next,
        barrier.since,
        barrier.verdict.map(Verdict::as_str),
    ])?;
    Ok(())
}

/// Stores what was said of a change, if that is the one that waits. Whether it was.
pub(super) fn decide(
    tx: &Transaction<'_>,
    destination: &str,
    oid: u32,
    to: SnapshotId,
    verdict: Verdict,
) -> rusqlite::Result<bool> {
    let decided = tx
        .prepare_cached("UPDATE barriers SET verdict = ?4 WHERE destination = ?1 AND oid = ?2 AND to_version = ?3")?
        .execute(params![destination, oid, to.to_string(), verdict.as_str()])?;
    Ok(decided > 0)
}

/// Forgets a table's barrier.
pub(super) fn delete(tx: &Transaction<'_>, destination: &str, oid: u32) -> rusqlite::Result<()> {
    tx.prepare_cached("DELETE FROM barriers WHERE destination = ?1 AND oid = ?2")?
        .execute(params![destination, oid])?;
    Ok(())
}

/// Forgets all barriers of a destination.
pub(super) fn delete_all(tx: &Transaction<'_>, destination: &str) -> rusqlite::Result<()> {
    tx.execute("DELETE FROM barriers WHERE destination = ?1", [destination])?;
    Ok(())
}

/// All barriers, by destination and oid.
pub(super) fn load(connection: &Connection) -> rusqlite::Result<Vec<BarrierRecord>> {
    let mut barriers = connection.prepare("SELECT * FROM barriers ORDER BY destination, oid")?;
    barriers.query_map([], record)?.collect()
}

fn record(row: &Row<'_>) -> rusqlite::Result<BarrierRecord> {
    let gates: String = row.get("gates")?;
    let verdict: Option<String> = row.get("verdict")?;
    Ok(BarrierRecord {
        destination: row.get("destination")?,
        oid: row.get("oid")?,
        from: parsed(row, "from_version")?.unwrap_or_default(),
        to: parsed(row, "to_version")?.unwrap_or_default(),
        gates: serde_json::from_str(&gates).map_err(unreadable)?,
        why: TableError { code: row.get("code")?, message: row.get("message")?, next: row.get("next")? },
        since: row.get("since")?,
        verdict: verdict.as_deref().and_then(Verdict::parse),
    })
}
