//! Copies that can be resumed: what is known of each stretch of pages.

use rusqlite::{Connection, Row, Transaction, params};

use super::rows::{count, hex, lsn, parsed, unreadable};
use crate::copy::{Base, Look, Reading, Stretch};
use crate::position::{Lsn, SnapshotId};

/// A copy by stretches of pages, of one table to one destination.
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
    /// What went from the table before this LSN is not at the destination: the floor of the
    /// first snapshot, or of one before whose rows all deletes until then were durable.
    pub cleaned: Lsn,
    /// Its stretches, and what is known of them.
    pub stretches: Vec<StretchRecord>,
}

/// A stretch, and how far the destination has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StretchRecord {
    /// Which pages.
    pub stretch: Stretch,
    /// The snapshot as of which all its rows are durable.
    pub base: Option<Base>,
    /// Rows of it when it was copied whole.
    pub rows: u64,
    /// Bytes of the table at the source that were behind them.
    pub bytes: u64,
}

impl StretchRecord {
    /// One of which nothing is known to be durable.
    pub fn new(stretch: Stretch) -> StretchRecord {
        StretchRecord { stretch, base: None, rows: 0, bytes: 0 }
    }
}

impl CopyRecord {
    /// The floor that the destination has the whole table as of; none while there is not
    /// one for all stretches.
    pub fn complete(&self) -> Option<Lsn> {
        let floor = self.stretches.first()?.base?.floor;
        self.stretches.iter().all(|stretch| stretch.base.is_some_and(|base| base.floor == floor)).then_some(floor)
    }

    /// Whether what is there can be made what another snapshot shows.
    pub fn goes_on_in(&self, snapshot: Base) -> bool {
        let within_reach = |base: Base| base.is_within_reach(snapshot);
        self.cleaned <= snapshot.floor && self.stretches.iter().filter_map(|stretch| stretch.base).all(within_reach)
    }

    /// What has to be read in a snapshot that it goes on in, in the order of the stretches.
    pub fn lacks(&self, snapshot: Base) -> Vec<Reading> {
        if self.complete().is_some() {
            return Vec::new();
        }
        let lack = |(number, stretch): (usize, &StretchRecord)| match stretch.base {
            None => Some(Reading { number, look: Look::All }),
            Some(base) if base.floor < snapshot.floor => Some(Reading { number, look: Look::Newer(base) }),
            Some(_) => None,
        };
        self.stretches.iter().enumerate().filter_map(lack).collect()
    }

    /// Rows and bytes of the stretches that are done.
    pub fn done(&self) -> (u64, u64) {
        let done = self.stretches.iter().filter(|stretch| stretch.base.is_some());
        done.fold((0, 0), |(rows, bytes), stretch| (rows + stretch.rows, bytes + stretch.bytes))
    }
}

/// Puts or replaces a copy with all its stretches.
pub(super) fn put(tx: &Transaction<'_>, copy: &CopyRecord) -> rusqlite::Result<()> {
    delete(tx, &copy.destination, copy.oid)?;
    tx.prepare_cached(
        "INSERT INTO copies (destination, oid, run, snapshot, origin, cleaned) VALUES (?1, ?2, ?3, ?4, ?5, ?6)",
    )?
    .execute(params![
        copy.destination,
        copy.oid,
        copy.run,
        copy.snapshot.to_string(),
        copy.origin,
        hex(copy.cleaned.0)
    ])?;
    let stretches: Vec<(usize, StretchRecord)> = copy.stretches.iter().copied().enumerate().collect();
    put_stretches(tx, &copy.destination, copy.oid, &stretches)
}

/// Puts or replaces stretches.
pub(super) fn put_stretches(
    tx: &Transaction<'_>,
    destination: &str,
    oid: u32,
    stretches: &[(usize, StretchRecord)],
) -> rusqlite::Result<()> {
    let mut put = tx.prepare_cached(
        "INSERT OR REPLACE INTO copy_stretches
             (destination, oid, number, leaf, page_from, page_to, base_floor, base_xmin, rows_copied, bytes_copied)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10)",
    )?;
    for (number, record) in stretches {
        put.execute(params![
            destination,
            oid,
            count(*number as u64),
            record.stretch.leaf,
            count(record.stretch.from),
            record.stretch.to.map(count),
            record.base.map(|base| hex(base.floor.0)),
            record.base.map(|base| count(base.xmin)),
            count(record.rows),
            count(record.bytes)
        ])?;
    }
    Ok(())
}

/// Says that what went before an LSN is not at the destination.
pub(super) fn put_cleaned(tx: &Transaction<'_>, destination: &str, oid: u32, cleaned: Lsn) -> rusqlite::Result<()> {
    tx.prepare_cached("UPDATE copies SET cleaned = ?3 WHERE destination = ?1 AND oid = ?2")?.execute(params![
        destination,
        oid,
        hex(cleaned.0)
    ])?;
    Ok(())
}

/// Forgets a copy.
pub(super) fn delete(tx: &Transaction<'_>, destination: &str, oid: u32) -> rusqlite::Result<()> {
    for table in ["copies", "copy_stretches"] {
        let sql = format!("DELETE FROM {table} WHERE destination = ?1 AND oid = ?2");
        tx.prepare_cached(&sql)?.execute(params![destination, oid])?;
    }
    Ok(())
}

/// All copies, by destination and oid.
pub(super) fn load(connection: &Connection) -> rusqlite::Result<Vec<CopyRecord>> {
    let mut copies = connection.prepare("SELECT * FROM copies ORDER BY destination, oid")?;
    let mut stretches =
        connection.prepare("SELECT * FROM copy_stretches WHERE destination = ?1 AND oid = ?2 ORDER BY number")?;
    let mut loaded: Vec<CopyRecord> = copies.query_map([], copy_record)?.collect::<rusqlite::Result<_>>()?;
    for copy in &mut loaded {
        let mut rows = stretches.query(params![copy.destination, copy.oid])?;
        while let Some(row) = rows.next()? {
            if row.get::<_, i64>("number")? != copy.stretches.len() as i64 {
                return Err(odd("stretches of a copy that do not follow each other"));
            }
            copy.stretches.push(stretch_record(row)?);
        }
    }
    Ok(loaded)
}

fn copy_record(row: &Row<'_>) -> rusqlite::Result<CopyRecord> {
    Ok(CopyRecord {
        destination: row.get("destination")?,
        oid: row.get("oid")?,
        run: row.get("run")?,
        snapshot: parsed(row, "snapshot")?.unwrap_or_default(),
        origin: row.get("origin")?,
        cleaned: lsn(row, "cleaned")?.unwrap_or_default(),
        stretches: Vec::new(),
    })
}

fn stretch_record(row: &Row<'_>) -> rusqlite::Result<StretchRecord> {
    let number = |column: &str| -> rusqlite::Result<Option<u64>> {
        Ok(row.get::<_, Option<i64>>(column)?.map(|number| number.max(0).cast_unsigned()))
    };
    let known = |column: &str| -> rusqlite::Result<u64> { Ok(number(column)?.unwrap_or_default()) };
    let xmin = known("base_xmin")?;
    Ok(StretchRecord {
        stretch: Stretch { leaf: row.get("leaf")?, from: known("page_from")?, to: number("page_to")? },
        base: lsn(row, "base_floor")?.map(|floor| Base { floor, xmin }),
        rows: known("rows_copied")?,
        bytes: known("bytes_copied")?,
    })
}

fn odd(what: &str) -> rusqlite::Error {
    unreadable(std::io::Error::other(what.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::tests::{base, copy};

    fn done(copy: &mut CopyRecord, number: usize, base: Base) {
        let stretch = &mut copy.stretches[number];
        (stretch.base, stretch.rows, stretch.bytes) = (Some(base), 10, 100);
    }

    #[test]
    fn a_copy_is_complete_once_all_its_stretches_are_as_of_one_snapshot() {
        let mut copy = copy(2);
        assert_eq!((copy.complete(), copy.done()), (None, (0, 0)));
        done(&mut copy, 0, base(5, 7));
        assert_eq!((copy.complete(), copy.done()), (None, (10, 100)));
        done(&mut copy, 1, base(9, 8));
        assert_eq!((copy.complete(), copy.done()), (None, (20, 200)));
        done(&mut copy, 0, base(9, 8));
        assert_eq!((copy.complete(), copy.done()), (Some(Lsn(9)), (20, 200)));
    }

    #[test]
    fn a_stretch_is_read_whole_or_for_what_is_newer_than_its_snapshot_or_not_at_all() {
        let mut copy = copy(3);
        done(&mut copy, 0, base(5, 7));
        done(&mut copy, 2, base(9, 8));
        let (all, newer) = (Look::All, |base| Look::Newer(base));
        let reading = |number, look| Reading { number, look };
        assert_eq!(copy.lacks(base(9, 8)), [reading(0, newer(base(5, 7))), reading(1, all)]);
        let later = [reading(0, newer(base(5, 7))), reading(1, all), reading(2, newer(base(9, 8)))];
        assert_eq!(copy.lacks(base(20, 8)), later);
        (0..3).for_each(|number| done(&mut copy, number, base(9, 8)));
        assert_eq!(copy.lacks(base(20, 30)), [], "nothing but its end has to be told");
    }

    #[test]
    fn a_copy_goes_on_in_a_later_snapshot_that_is_not_too_far_away() {
        let mut copy = copy(2);
        copy.cleaned = Lsn(9);
        assert!(copy.goes_on_in(base(9, 1 << 40)), "nothing is done yet");
        done(&mut copy, 1, base(5, 7));
        assert!(copy.goes_on_in(base(9, 1000)));
        assert!(!copy.goes_on_in(base(8, 1000)));
        assert!(!copy.goes_on_in(base(9, 1 << 40)));
    }
}
