//! Copies that can be resumed: what is known of each range of the key.

use rusqlite::{Connection, Row, Transaction, params};

use super::rows::{count, hex, lsn, parsed, unreadable};
use crate::copy::{KeyRanges, KeyType};
use crate::position::{Lsn, SnapshotId};

/// A copy by ranges of the key, of one table to one destination.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CopyRecord {
    /// The destination's name.
    pub destination: String,
    /// `pg_class.oid`.
    pub oid: u32,
    /// The copy run, as the plugin knows it.
    pub run: String,
    /// The version of the schema that its rows have.
    pub snapshot: SnapshotId,
    /// See [`crate::copy::Wave::origin`].
    pub origin: String,
    /// The key's first column.
    pub column: String,
    /// Its ranges.
    pub keys: KeyRanges,
    /// What is known of each of them, in their order.
    pub ranges: Vec<RangeRecord>,
}

/// A range: untouched, begun (some of its rows may be at the destination), or done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RangeRecord {
    /// Floor of the wave that was the first to send rows of it.
    pub since: Option<Lsn>,
    /// Floor of the wave whose rows of it are all durable.
    pub floor: Option<Lsn>,
    /// Rows of it that are durable.
    pub rows: u64,
    /// Bytes of the table at the source that are behind them.
    pub bytes: u64,
}

impl CopyRecord {
    /// The smallest floor, and the largest; none unless all ranges are done.
    pub fn floors(&self) -> Option<(Lsn, Lsn)> {
        let floors: Option<Vec<Lsn>> = self.ranges.iter().map(|range| range.floor).collect();
        let floors = floors?;
        Some((*floors.iter().min()?, *floors.iter().max()?))
    }

    /// Rows and bytes of the ranges that are done.
    pub fn done(&self) -> (u64, u64) {
        let done = self.ranges.iter().filter(|range| range.floor.is_some());
        done.fold((0, 0), |(rows, bytes), range| (rows + range.rows, bytes + range.bytes))
    }
}

/// Puts or replaces a copy with all its ranges.
pub(super) fn put(tx: &Transaction<'_>, copy: &CopyRecord) -> rusqlite::Result<()> {
    delete(tx, &copy.destination, copy.oid)?;
    let bounds = serde_json::to_string(&copy.keys.bounds()).map_err(unreadable)?;
    tx.prepare_cached(
        "INSERT INTO copies (destination, oid, run, snapshot, origin, column_name, key_type, bounds)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)",
    )?
    .execute(params![
        copy.destination,
        copy.oid,
        copy.run,
        copy.snapshot.to_string(),
        copy.origin,
        copy.column,
        copy.keys.kind().as_str(),
        bounds
    ])?;
    let ranges: Vec<(usize, RangeRecord)> = copy.ranges.iter().copied().enumerate().collect();
    put_ranges(tx, &copy.destination, copy.oid, &ranges)
}

/// Puts or replaces ranges; those that were never begun are not kept.
pub(super) fn put_ranges(
    tx: &Transaction<'_>,
    destination: &str,
    oid: u32,
    ranges: &[(usize, RangeRecord)],
) -> rusqlite::Result<()> {
    let mut put = tx.prepare_cached(
        "INSERT OR REPLACE INTO copy_ranges (destination, oid, number, since, floor, rows_copied, bytes_copied)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)",
    )?;
    for (number, range) in ranges {
        let Some(since) = range.since else { continue };
        let floor = range.floor.map(|floor| hex(floor.0));
        put.execute(params![
            destination,
            oid,
            *number as i64,
            hex(since.0),
            floor,
            count(range.rows),
            count(range.bytes)
        ])?;
    }
    Ok(())
}

/// Forgets a copy.
pub(super) fn delete(tx: &Transaction<'_>, destination: &str, oid: u32) -> rusqlite::Result<()> {
    for table in ["copies", "copy_ranges"] {
        let sql = format!("DELETE FROM {table} WHERE destination = ?1 AND oid = ?2");
        tx.prepare_cached(&sql)?.execute(params![destination, oid])?;
    }
    Ok(())
}

/// All copies, by destination and oid.
pub(super) fn load(connection: &Connection) -> rusqlite::Result<Vec<CopyRecord>> {
    let mut copies = connection.prepare("SELECT * FROM copies ORDER BY destination, oid")?;
    let mut ranges = connection.prepare("SELECT * FROM copy_ranges WHERE destination = ?1 AND oid = ?2")?;
    let mut loaded: Vec<CopyRecord> = copies.query_map([], copy_record)?.collect::<rusqlite::Result<_>>()?;
    for copy in &mut loaded {
        let mut rows = ranges.query(params![copy.destination, copy.oid])?;
        while let Some(row) = rows.next()? {
            let number = usize::try_from(row.get::<_, i64>("number")?).unwrap_or(usize::MAX);
            let known = copy.ranges.get_mut(number).ok_or_else(|| odd("a range that the copy does not have"))?;
            *known = range_record(row)?;
        }
    }
    Ok(loaded)
}

fn copy_record(row: &Row<'_>) -> rusqlite::Result<CopyRecord> {
    let bounds: Vec<String> = serde_json::from_str(row.get_ref("bounds")?.as_str()?).map_err(unreadable)?;
    let kind: String = row.get("key_type")?;
    let keys = KeyType::parse(&kind).and_then(|kind| KeyRanges::stored(kind, &bounds));
    let keys = keys.ok_or_else(|| odd("ranges of a copy that are none"))?;
    Ok(CopyRecord {
        destination: row.get("destination")?,
        oid: row.get("oid")?,
        run: row.get("run")?,
        snapshot: parsed(row, "snapshot")?.unwrap_or_default(),
        origin: row.get("origin")?,
        column: row.get("column_name")?,
        ranges: vec![RangeRecord::default(); keys.count()],
        keys,
    })
}

fn range_record(row: &Row<'_>) -> rusqlite::Result<RangeRecord> {
    let number = |column| row.get::<_, i64>(column).map(|number| number.max(0).cast_unsigned());
    Ok(RangeRecord {
        since: lsn(row, "since")?,
        floor: lsn(row, "floor")?,
        rows: number("rows_copied")?,
        bytes: number("bytes_copied")?,
    })
}

fn odd(what: &str) -> rusqlite::Error {
    unreadable(std::io::Error::other(what.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::tests::copy;

    #[test]
    fn floors_are_known_once_all_ranges_are_done() {
        let mut copy = copy(&["0"]);
        copy.ranges[0] = RangeRecord { since: Some(Lsn(1)), floor: Some(Lsn(9)), rows: 10, bytes: 100 };
        copy.ranges[1] = RangeRecord { since: Some(Lsn(4)), ..RangeRecord::default() };
        assert_eq!((copy.floors(), copy.done()), (None, (10, 100)));
        copy.ranges[1].floor = Some(Lsn(4));
        copy.ranges[1].rows = 1;
        assert_eq!((copy.floors(), copy.done()), (Some((Lsn(4), Lsn(9))), (11, 100)));
    }
}
