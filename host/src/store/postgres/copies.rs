//! Copies that can be resumed: what is known of each stretch of pages.

use tokio_postgres::Row;
use tokio_postgres::types::PgLsn;

use super::super::copies::{CopyRecord, StretchRecord};
use super::link::{Failure, Link};
use super::rows::{count, lsn, number, parsed, pg_lsn, unreadable};
use crate::copy::{Base, Stretch};
use crate::position::Lsn;

const PUT_STRETCH: &str = "
    INSERT INTO copy_stretches
        (destination, oid, number, leaf, page_from, page_to, base_floor, base_xmin, rows_copied, bytes_copied)
    VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)
    ON CONFLICT (destination, oid, number) DO UPDATE SET leaf = excluded.leaf, page_from = excluded.page_from,
        page_to = excluded.page_to, base_floor = excluded.base_floor, base_xmin = excluded.base_xmin,
        rows_copied = excluded.rows_copied, bytes_copied = excluded.bytes_copied";

/// Puts or replaces a copy with all its stretches.
pub(super) async fn put(link: &Link, copy: &CopyRecord) -> Result<(), Failure> {
    delete(link, &copy.destination, copy.oid).await?;
    link.execute(
        "INSERT INTO copies (destination, oid, run, snapshot, origin, cleaned) VALUES ($1, $2, $3, $4, $5, $6)",
        &[&copy.destination, &copy.oid, &copy.run, &copy.snapshot.to_string(), &copy.origin, &pg_lsn(copy.cleaned)],
    )
    .await?;
    let stretches: Vec<(usize, StretchRecord)> = copy.stretches.iter().copied().enumerate().collect();
    put_stretches(link, &copy.destination, copy.oid, &stretches).await
}

/// Puts or replaces stretches.
pub(super) async fn put_stretches(
    link: &Link,
    destination: &str,
    oid: u32,
    stretches: &[(usize, StretchRecord)],
) -> Result<(), Failure> {
    link.each(PUT_STRETCH, stretches, async |link, (place, record)| {
        let place = i64::try_from(*place).map_err(unreadable)?;
        let Stretch { leaf, from, to } = record.stretch;
        let (from, to) = (count(from), to.map(count));
        let floor: Option<PgLsn> = record.base.map(|base| pg_lsn(base.floor));
        let xmin = record.base.map(|base| count(base.xmin));
        let (rows, bytes) = (count(record.rows), count(record.bytes));
        let values: &[&(dyn tokio_postgres::types::ToSql + Sync)] =
            &[&destination, &oid, &place, &leaf, &from, &to, &floor, &xmin, &rows, &bytes];
        link.execute(PUT_STRETCH, values).await.map(drop)
    })
    .await
}

/// Says that what went before an LSN is not at the destination.
pub(super) async fn put_cleaned(link: &Link, destination: &str, oid: u32, cleaned: Lsn) -> Result<(), Failure> {
    let sql = "UPDATE copies SET cleaned = $3 WHERE destination = $1 AND oid = $2";
    link.execute(sql, &[&destination, &oid, &pg_lsn(cleaned)]).await.map(drop)
}

/// Forgets a copy.
pub(super) async fn delete(link: &Link, destination: &str, oid: u32) -> Result<(), Failure> {
    link.execute("DELETE FROM copies WHERE destination = $1 AND oid = $2", &[&destination, &oid]).await?;
    link.execute("DELETE FROM copy_stretches WHERE destination = $1 AND oid = $2", &[&destination, &oid])
        .await
        .map(drop)
}

/// All copies, by destination and oid.
pub(super) async fn load(link: &Link) -> Result<Vec<CopyRecord>, Failure> {
    let rows = link.query("SELECT * FROM copies ORDER BY destination, oid", &[]).await?;
    let mut copies = rows.iter().map(copy_record).collect::<Result<Vec<CopyRecord>, Failure>>()?;
    for row in link.query("SELECT * FROM copy_stretches ORDER BY destination, oid, number", &[]).await? {
        let (destination, oid): (&str, u32) = (row.try_get("destination")?, row.try_get("oid")?);
        let place = number::<usize>(&row, "number")?;
        let copy = copies.iter_mut().find(|copy| copy.destination == destination && copy.oid == oid);
        let copy = copy.filter(|copy| copy.stretches.len() == place);
        let copy = copy.ok_or_else(|| unreadable("stretches of a copy that do not follow each other"))?;
        copy.stretches.push(stretch_record(&row)?);
    }
    Ok(copies)
}

fn copy_record(row: &Row) -> Result<CopyRecord, Failure> {
    Ok(CopyRecord {
        destination: row.try_get("destination")?,
        oid: row.try_get("oid")?,
        run: row.try_get("run")?,
        snapshot: parsed(row, "snapshot")?.unwrap_or_default(),
        origin: row.try_get("origin")?,
        cleaned: lsn(row, "cleaned")?.unwrap_or_default(),
        stretches: Vec::new(),
    })
}

fn stretch_record(row: &Row) -> Result<StretchRecord, Failure> {
    let maybe = |column| -> Result<Option<u64>, Failure> {
        row.try_get::<_, Option<i64>>(column)?.map(|number| number.try_into().map_err(unreadable)).transpose()
    };
    let xmin = maybe("base_xmin")?.unwrap_or_default();
    Ok(StretchRecord {
        stretch: Stretch { leaf: row.try_get("leaf")?, from: number(row, "page_from")?, to: maybe("page_to")? },
        base: lsn(row, "base_floor")?.map(|floor| Base { floor, xmin }),
        rows: number(row, "rows_copied")?,
        bytes: number(row, "bytes_copied")?,
    })
}
