//! What is kept beside the versions of tables' schemas: see `store::history`.

use std::collections::BTreeMap;

use tokio_postgres::Row;

use super::super::history::{Application, AppliedVersion, HISTORY_OF, How, KNOWN, NAMED, in_order, unknown};
use super::super::records::TableRecord;
use super::link::{Failure, Link};
use super::rows::{count, lsn, number, parsed, pg_lsn, unreadable};
use crate::position::SnapshotId;
use crate::schema::moment::Moment;
use crate::schema::table::TableName;
use crate::schema::tombstone::{Ended, Tombstone};

/// A table that has come to a version.
pub(super) async fn put_applied(link: &Link, table: &TableRecord) -> Result<(), Failure> {
    let (Some(snapshot), Some(Application { how, generation, at })) = (table.applied, table.application) else {
        return Ok(());
    };
    link.execute(
        "INSERT INTO applied_versions (destination, oid, snapshot, how, generation, applied_at)
         VALUES ($1, $2, $3, $4, $5, $6)
         ON CONFLICT (destination, oid, snapshot) DO UPDATE SET how = excluded.how,
             generation = excluded.generation, applied_at = excluded.applied_at",
        &[&table.destination, &table.oid, &snapshot.to_string(), &how.as_str(), &count(generation), &at.0],
    )
    .await
    .map(drop)
}

/// Adds the end of a table; one that is there stays as it is.
pub(super) async fn put_end(link: &Link, tombstone: &Tombstone) -> Result<(), Failure> {
    let Tombstone { oid, name, snapshot, why, at } = tombstone;
    let (commit, message) = (pg_lsn(snapshot.commit), pg_lsn(snapshot.message));
    link.execute(
        "INSERT INTO tombstones (oid, commit_lsn, message_lsn, schema_name, table_name, why, ended_at)
         VALUES ($1, $2, $3, $4, $5, $6, $7) ON CONFLICT DO NOTHING",
        &[oid, &commit, &message, &name.schema, &name.name, &why.as_str(), &at.map(|at| at.0)],
    )
    .await
    .map(drop)
}

/// Removes versions that nothing names, with what is known of who got them, and the ends
/// before the first that is left; which are gone.
pub(super) async fn remove(link: &Link, oid: u32, versions: &[SnapshotId]) -> Result<Vec<SnapshotId>, Failure> {
    let named = link.query(NAMED, &[&oid]).await?;
    let named: Vec<String> = named.iter().map(|row| row.try_get(0)).collect::<Result<_, _>>()?;
    let mut gone = versions.to_vec();
    gone.retain(|snapshot| !named.contains(&snapshot.to_string()));
    let mut removed = 0;
    for snapshot in &gone {
        let (commit, message) = (pg_lsn(snapshot.commit), pg_lsn(snapshot.message));
        let sql = "DELETE FROM history WHERE oid = $1 AND commit_lsn = $2 AND message_lsn = $3";
        removed += link.execute(sql, &[&oid, &commit, &message]).await?;
        let sql = "DELETE FROM applied_versions WHERE oid = $1 AND snapshot = $2";
        link.execute(sql, &[&oid, &snapshot.to_string()]).await?;
    }
    link.execute(
        "DELETE FROM tombstones WHERE oid = $1 AND (commit_lsn, message_lsn) <
             (SELECT commit_lsn, message_lsn FROM history WHERE oid = $1 ORDER BY 1, 2 LIMIT 1)",
        &[&oid],
    )
    .await?;
    link.execute(
        "INSERT INTO history_removed AS known (oid, versions) VALUES ($1, $2)
         ON CONFLICT (oid) DO UPDATE SET versions = known.versions + excluded.versions",
        &[&oid, &count(removed)],
    )
    .await?;
    Ok(gone)
}

/// Removes all that is known of a table, unless something is stored of it beside that;
/// whether it was removed.
pub(super) async fn forget(link: &Link, oid: u32) -> Result<bool, Failure> {
    if !link.query(KNOWN, &[&oid]).await?.is_empty() {
        return Ok(false);
    }
    for sql in HISTORY_OF {
        link.execute(sql, &[&oid]).await?;
    }
    Ok(true)
}

/// By destination, oid and version.
pub(super) async fn applied(link: &Link) -> Result<Vec<AppliedVersion>, Failure> {
    let rows = link.query("SELECT * FROM applied_versions", &[]).await?;
    let mut all = rows.iter().map(applied_version).collect::<Result<Vec<_>, _>>()?;
    in_order(&mut all);
    Ok(all)
}

fn applied_version(row: &Row) -> Result<AppliedVersion, Failure> {
    let how: &str = row.try_get("how")?;
    Ok(AppliedVersion {
        destination: row.try_get("destination")?,
        oid: row.try_get("oid")?,
        snapshot: parsed(row, "snapshot")?.unwrap_or_default(),
        application: Application {
            how: How::parse(how).ok_or_else(|| unreadable(unknown(how)))?,
            generation: number(row, "generation")?,
            at: Moment(row.try_get("applied_at")?),
        },
    })
}

/// By oid and place.
pub(super) async fn ends(link: &Link) -> Result<Vec<Tombstone>, Failure> {
    let rows = link.query("SELECT * FROM tombstones ORDER BY oid, commit_lsn, message_lsn", &[]).await?;
    rows.iter().map(tombstone).collect()
}

fn tombstone(row: &Row) -> Result<Tombstone, Failure> {
    let why: &str = row.try_get("why")?;
    Ok(Tombstone {
        oid: row.try_get("oid")?,
        name: TableName { schema: row.try_get("schema_name")?, name: row.try_get("table_name")? },
        snapshot: SnapshotId {
            commit: lsn(row, "commit_lsn")?.unwrap_or_default(),
            message: lsn(row, "message_lsn")?.unwrap_or_default(),
        },
        why: Ended::parse(why).ok_or_else(|| unreadable(unknown(why)))?,
        at: row.try_get::<_, Option<i64>>("ended_at")?.map(Moment),
    })
}

/// By oid.
pub(super) async fn removed(link: &Link) -> Result<BTreeMap<u32, u64>, Failure> {
    let rows = link.query("SELECT oid, versions FROM history_removed", &[]).await?;
    rows.iter().map(|row| Ok((row.try_get(0)?, number(row, "versions")?))).collect()
}
