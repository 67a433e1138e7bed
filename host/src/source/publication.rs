//! Up to where the log can be read under a publication's name (P23).
//!
//! The server looks a publication up by name, in the catalog as it was where the change
//! stands. So after a rename the changes before it come under the old name alone, and
//! those behind it under the new one. Where that is only the server knows: it is asked how
//! far it gets, without taking anything from the slot.

use tokio_postgres::error::SqlState;

use super::errors::sql_error;
use super::members::log_at;
use super::session::Session;
use crate::error::Result;
use crate::position::Lsn;
use crate::schema::table::quote_identifier;

/// How far is looked at first; then ever farther.
const FIRST_STEP: u64 = 64 << 10;

/// Where a publication's name ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NameEnds {
    /// Every commit below it can be read under the name, and none of them has a change that
    /// is published; the next one cannot.
    At(Lsn),
    /// There are published changes before that.
    BehindChanges,
}

/// What the log has up to a place.
enum Peeked {
    Nothing,
    Changes,
    /// There is no such publication somewhere before it.
    Missing,
}

/// Looks where a publication's name ends in the log of a slot, from `from` on, which is
/// confirmed first. Nobody may read the slot meanwhile.
///
/// Errors: `source.sql` (transient while somebody still reads the slot),
/// `source.connection-lost`.
pub async fn name_ends(session: &Session, slot: &str, publication: &str, from: Lsn) -> Result<NameEnds> {
    confirm(session, slot, from).await?;
    let flushed = log_at(session, "pg_current_wal_flush_lsn()").await?;
    let (mut good, mut step) = (from, FIRST_STEP);
    let mut bad = loop {
        if good >= flushed {
            return Ok(NameEnds::At(good));
        }
        let next = Lsn(good.0.saturating_add(step)).min(flushed);
        match peek(session, slot, publication, next).await? {
            Peeked::Nothing => good = next,
            Peeked::Changes => return Ok(NameEnds::BehindChanges),
            Peeked::Missing => break next,
        }
        step = step.saturating_mul(2);
    };
    while bad.0 - good.0 > 1 {
        let middle = Lsn(good.0 + (bad.0 - good.0) / 2);
        match peek(session, slot, publication, middle).await? {
            Peeked::Nothing => good = middle,
            Peeked::Changes => return Ok(NameEnds::BehindChanges),
            Peeked::Missing => bad = middle,
        }
    }
    Ok(NameEnds::At(good))
}

/// What is below is durable: it must not be looked at again.
async fn confirm(session: &Session, slot: &str, from: Lsn) -> Result<()> {
    const ADVANCE: &str = "
        SELECT pg_replication_slot_advance(slot_name, $2::text::pg_lsn)
        FROM pg_replication_slots WHERE slot_name = $1 AND confirmed_flush_lsn < $2::text::pg_lsn";
    let advanced = session.query(ADVANCE, &[&slot, &from.to_string()]).await;
    advanced.map(drop).map_err(|error| sql_error(&error, "confirming what was read"))
}

async fn peek(session: &Session, slot: &str, publication: &str, upto: Lsn) -> Result<Peeked> {
    // I, U, D and T: the rest stands around changes.
    const PEEK: &str = "
        SELECT EXISTS (
            SELECT FROM pg_logical_slot_peek_binary_changes($1, $2::text::pg_lsn, NULL,
                'proto_version', '1', 'publication_names', $3)
            WHERE get_byte(data, 0) IN (73, 85, 68, 84))";
    session.take_left_out();
    let row = session.query_one(PEEK, &[&slot, &upto.to_string(), &quote_identifier(publication)]).await;
    match row {
        // PostgreSQL 18 leaves such changes out with a warning.
        Ok(_) if session.take_left_out() => Ok(Peeked::Missing),
        Ok(row) if row.get(0) => Ok(Peeked::Changes),
        Ok(_) => Ok(Peeked::Nothing),
        Err(error) if is_missing(&error) => Ok(Peeked::Missing),
        Err(error) => Err(sql_error(&error, &format!("looking where publication `{publication}` ends in the log"))),
    }
}

fn is_missing(error: &tokio_postgres::Error) -> bool {
    let Some(db) = error.as_db_error() else { return false };
    let routine = db.routine().unwrap_or_default().to_ascii_lowercase();
    *db.code() == SqlState::UNDEFINED_OBJECT && routine.contains("publication")
}
