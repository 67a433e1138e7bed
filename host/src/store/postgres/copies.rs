//! Copies that can be resumed: what is known of each range of the key.

use tokio_postgres::Row;
use tokio_postgres::types::PgLsn;

use super::super::copies::{CopyRecord, RangeRecord};
use super::link::{Failure, Link};
use super::rows::{count, lsn, number, parsed, pg_lsn, unreadable};
use crate::copy::{KeyRanges, KeyType};

const PUT_RANGE: &str = "
    INSERT INTO copy_ranges (destination, oid, number, since, floor, rows_copied, bytes_copied)
    VALUES ($1, $2, $3, $4, $5, $6, $7)
    ON CONFLICT (destination, oid, number) DO UPDATE SET since = excluded.since, floor = excluded.floor,
        rows_copied = excluded.rows_copied, bytes_copied = excluded.bytes_copied";

/// Puts or replaces a copy with all its ranges.
pub(super) async fn put(link: &Link, copy: &CopyRecord) -> Result<(), Failure> {
    delete(link, &copy.destination, copy.oid).await?;
    let bounds = serde_json::to_string(&copy.keys.bounds()).map_err(unreadable)?;
    link.execute(
        "INSERT INTO copies (destination, oid, run, snapshot, origin, column_name, key_type, bounds)
         VALUES ($1, $2, $3, $4, $5, $6, $7, $8)",
        &[
            &copy.destination,
            &copy.oid,
            &copy.run,
            &copy.snapshot.to_string(),
            &copy.origin,
            &copy.column,
            &copy.keys.kind().as_str(),
            &bounds,
        ],
    )
    .await?;
    let ranges: Vec<(usize, RangeRecord)> = copy.ranges.iter().copied().enumerate().collect();
    put_ranges(link, &copy.destination, copy.oid, &ranges).await
}

/// Puts or replaces ranges; those that were never begun are not kept.
pub(super) async fn put_ranges(
    link: &Link,
    destination: &str,
    oid: u32,
    ranges: &[(usize, RangeRecord)],
) -> Result<(), Failure> {
    link.each(PUT_RANGE, ranges, async |link, (place, range)| {
        let Some(since) = range.since else { return Ok(()) };
        let place = i64::try_from(*place).map_err(unreadable)?;
        let floor: Option<PgLsn> = range.floor.map(pg_lsn);
        let (rows, bytes) = (count(range.rows), count(range.bytes));
        link.execute(PUT_RANGE, &[&destination, &oid, &place, &pg_lsn(since), &floor, &rows, &bytes]).await.map(drop)
    })
    .await
}

/// Forgets a copy.
pub(super) async fn delete(link: &Link, destination: &str, oid: u32) -> Result<(), Failure> {
    link.execute("DELETE FROM copies WHERE destination = $1 AND oid = $2", &[&destination, &oid]).await?;
    link.execute("DELETE FROM copy_ranges WHERE destination = $1 AND oid = $2", &[&destination, &oid]).await.map(drop)
}

/// All copies, by destination and oid.
pub(super) async fn load(link: &Link) -> Result<Vec<CopyRecord>, Failure> {
    let rows = link.query("SELECT * FROM copies ORDER BY destination, oid", &[]).await?;
    let mut copies = rows.iter().map(copy_record).collect::<Result<Vec<CopyRecord>, Failure>>()?;
    for row in link.query("SELECT * FROM copy_ranges", &[]).await? {
        let (destination, oid): (&str, u32) = (row.try_get("destination")?, row.try_get("oid")?);
        let copy = copies.iter_mut().find(|copy| copy.destination == destination && copy.oid == oid);
        let known = copy.and_then(|copy| copy.ranges.get_mut(number::<usize>(&row, "number").ok()?));
        *known.ok_or_else(|| unreadable("a range that no copy has"))? = range_record(&row)?;
    }
    Ok(copies)
}

fn copy_record(row: &Row) -> Result<CopyRecord, Failure> {
    let bounds: Vec<String> = serde_json::from_str(row.try_get("bounds")?).map_err(unreadable)?;
    let keys = KeyType::parse(row.try_get("key_type")?).and_then(|kind| KeyRanges::stored(kind, &bounds));
    let keys = keys.ok_or_else(|| unreadable("ranges of a copy that are none"))?;
    Ok(CopyRecord {
        destination: row.try_get("destination")?,
        oid: row.try_get("oid")?,
        run: row.try_get("run")?,
        snapshot: parsed(row, "snapshot")?.unwrap_or_default(),
        origin: row.try_get("origin")?,
        column: row.try_get("column_name")?,
        ranges: vec![RangeRecord::default(); keys.count()],
        keys,
    })
}

fn range_record(row: &Row) -> Result<RangeRecord, Failure> {
    Ok(RangeRecord {
        since: lsn(row, "since")?,
        floor: lsn(row, "floor")?,
        rows: number(row, "rows_copied")?,
        bytes: number(row, "bytes_copied")?,
    })
}
