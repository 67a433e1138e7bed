//! What is kept beside the versions of tables' schemas: which destination got which,
//! where tables ended, and what was removed.

use std::collections::BTreeMap;

use rusqlite::{Connection, Row, Transaction, params};
use serde::{Deserialize, Serialize};

use super::records::TableRecord;
use super::rows::{count, hex, lsn, parsed, unreadable};
use crate::position::SnapshotId;
use crate::schema::moment::Moment;
use crate::schema::table::TableName;
use crate::schema::tombstone::{Ended, Tombstone};

/// How a destination came to a version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum How {
    /// The table was copied as it was then.
    Copied,
    /// The change was made by itself.
    Applied,
    /// The change was made after an operator had approved it.
    Approved,
}

impl How {
    /// As it is shown and stored.
    pub fn as_str(self) -> &'static str {
        match self {
            How::Copied => "copied",
            How::Applied => "applied",
            How::Approved => "approved",
        }
    }

    pub(super) fn parse(text: &str) -> Option<How> {
        [How::Copied, How::Applied, How::Approved].into_iter().find(|how| how.as_str() == text)
    }
}

/// Who brought a destination to a version, and when.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Application {
    /// How.
    pub how: How,
    /// The plugin's instance that did it: see `session.generation` in the contract.
    pub generation: u64,
    /// When that was recorded, by the host's clock.
    pub at: Moment,
}

/// A version that a destination got.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AppliedVersion {
    /// The destination's name.
    pub destination: String,
    /// `pg_class.oid`.
    pub oid: u32,
    /// The version.
    pub snapshot: SnapshotId,
    /// Who, how and when. The last time counts.
    pub application: Application,
}

/// Whatever names a version of a table, beside the history itself: such a version stays.
pub(super) const NAMED: &str = "
    SELECT applied FROM tables WHERE oid = $1 AND applied IS NOT NULL
    UNION SELECT applying_from FROM tables WHERE oid = $1 AND applying_from IS NOT NULL
    UNION SELECT applying_to FROM tables WHERE oid = $1 AND applying_to IS NOT NULL
    UNION SELECT from_version FROM barriers WHERE oid = $1
    UNION SELECT to_version FROM barriers WHERE oid = $1
    UNION SELECT snapshot FROM quarantine WHERE oid = $1
    UNION SELECT snapshot FROM copies WHERE oid = $1";

/// Whatever is stored of a table, beside its history.
pub(super) const KNOWN: &str = "
    SELECT 1 FROM tables WHERE oid = $1
    UNION ALL SELECT 1 FROM quarantine WHERE oid = $1
    UNION ALL SELECT 1 FROM copies WHERE oid = $1";

/// Everything a table's history consists of.
pub(super) const HISTORY_OF: [&str; 4] = [
    "DELETE FROM history WHERE oid = $1",
    "DELETE FROM tombstones WHERE oid = $1",
    "DELETE FROM history_removed WHERE oid = $1",
    "DELETE FROM applied_versions WHERE oid = $1",
];

/// A table that has come to a version.
pub(super) fn put_applied(tx: &Transaction<'_>, table: &TableRecord) -> rusqlite::Result<()> {
    let (Some(snapshot), Some(Application { how, generation, at })) = (table.applied, table.application) else {
        return Ok(());
    };
    tx.prepare_cached(
        "INSERT INTO applied_versions (destination, oid, snapshot, how, generation, applied_at)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6)
         ON CONFLICT (destination, oid, snapshot) DO UPDATE SET how = excluded.how,
             generation = excluded.generation, applied_at = excluded.applied_at",
    )?
    .execute(params![
        table.destination,
        table.oid,
        snapshot.to_string(),
        how.as_str(),
        count(generation),
        at.0
    ])?;
    Ok(())
}

/// Adds the end of a table; one that is there stays as it is.
pub(super) fn put_end(tx: &Transaction<'_>, tombstone: &Tombstone) -> rusqlite::Result<()> {
    let Tombstone { oid, name, snapshot, why, at } = tombstone;
    tx.prepare_cached(
        "INSERT INTO tombstones (oid, commit_lsn, message_lsn, schema_name, table_name, why, ended_at)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7) ON CONFLICT DO NOTHING",
    )?
    .execute(params![
        oid,
        hex(snapshot.commit.0),
        hex(snapshot.message.0),
        name.schema,
        name.name,
        why.as_str(),
        at.map(|at| at.0)
    ])?;
    Ok(())
}

/// Removes versions that nothing names, with what is known of who got them, and the ends
/// before the first that is left; which are gone.
pub(super) fn remove(tx: &Transaction<'_>, oid: u32, versions: &[SnapshotId]) -> rusqlite::Result<Vec<SnapshotId>> {
    let named: Vec<String> = tx.prepare_cached(NAMED)?.query_map([oid], |row| row.get(0))?.collect::<Result<_, _>>()?;
    let mut gone = versions.to_vec();
    gone.retain(|snapshot| !named.contains(&snapshot.to_string()));
    let mut removed = 0;
    for snapshot in &gone {
        removed += tx
            .prepare_cached("DELETE FROM history WHERE oid = ?1 AND commit_lsn = ?2 AND message_lsn = ?3")?
            .execute(params![oid, hex(snapshot.commit.0), hex(snapshot.message.0)])?;
        tx.prepare_cached("DELETE FROM applied_versions WHERE oid = ?1 AND snapshot = ?2")?
            .execute(params![oid, snapshot.to_string()])?;
    }
    tx.execute(
        "DELETE FROM tombstones WHERE oid = ?1 AND (commit_lsn, message_lsn) <
             (SELECT commit_lsn, message_lsn FROM history WHERE oid = ?1 ORDER BY 1, 2 LIMIT 1)",
        [oid],
    )?;
    tx.execute(
        "INSERT INTO history_removed (oid, versions) VALUES (?1, ?2)
         ON CONFLICT (oid) DO UPDATE SET versions = versions + excluded.versions",
        params![oid, count(removed as u64)],
    )?;
    Ok(gone)
}

/// Removes all that is known of a table, unless something is stored of it beside that;
/// whether it was removed.
pub(super) fn forget(tx: &Transaction<'_>, oid: u32) -> rusqlite::Result<bool> {
    if tx.prepare_cached(KNOWN)?.exists([oid])? {
        return Ok(false);
    }
    for sql in HISTORY_OF {
        tx.execute(sql, [oid])?;
    }
    Ok(true)
}

/// By destination, oid and version.
pub(super) fn applied(connection: &Connection) -> rusqlite::Result<Vec<AppliedVersion>> {
    let mut query = connection.prepare("SELECT * FROM applied_versions")?;
    let mut all = query.query_map([], applied_version)?.collect::<rusqlite::Result<Vec<_>>>()?;
    in_order(&mut all);
    Ok(all)
}

/// Texts of versions are not ordered as versions are.
pub(super) fn in_order(all: &mut [AppliedVersion]) {
    all.sort_by(|a, b| (&a.destination, a.oid, a.snapshot).cmp(&(&b.destination, b.oid, b.snapshot)));
}

fn applied_version(row: &Row<'_>) -> rusqlite::Result<AppliedVersion> {
    let how: String = row.get("how")?;
    Ok(AppliedVersion {
        destination: row.get("destination")?,
        oid: row.get("oid")?,
        snapshot: parsed(row, "snapshot")?.unwrap_or_default(),
        application: Application {
            how: How::parse(&how).ok_or_else(|| unreadable(unknown(&how)))?,
            generation: row.get::<_, i64>("generation")?.cast_unsigned(),
            at: Moment(row.get("applied_at")?),
        },
    })
}

/// By oid and place.
pub(super) fn ends(connection: &Connection) -> rusqlite::Result<Vec<Tombstone>> {
    let mut query = connection.prepare("SELECT * FROM tombstones ORDER BY oid, commit_lsn, message_lsn")?;
    query.query_map([], tombstone)?.collect()
}

fn tombstone(row: &Row<'_>) -> rusqlite::Result<Tombstone> {
    let why: String = row.get("why")?;
    Ok(Tombstone {
        oid: row.get("oid")?,
        name: TableName { schema: row.get("schema_name")?, name: row.get("table_name")? },
        snapshot: SnapshotId {
            commit: lsn(row, "commit_lsn")?.unwrap_or_default(),
            message: lsn(row, "message_lsn")?.unwrap_or_default(),
        },
        why: Ended::parse(&why).ok_or_else(|| unreadable(unknown(&why)))?,
        at: row.get::<_, Option<i64>>("ended_at")?.map(Moment),
    })
}

pub(super) fn unknown(what: &str) -> std::io::Error {
    std::io::Error::other(format!("`{what}` is nothing that can be said of a version"))
}

/// By oid.
pub(super) fn removed(connection: &Connection) -> rusqlite::Result<BTreeMap<u32, u64>> {
    let mut query = connection.prepare("SELECT oid, versions FROM history_removed")?;
    let counted = |row: &Row<'_>| Ok((row.get(0)?, row.get::<_, i64>(1)?.cast_unsigned()));
    query.query_map([], counted)?.collect()
}
