//! Where things stand in the source's write-ahead log (rules P1, P2).

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A log sequence number: a byte position in the write-ahead log.
///
/// Shown and serialised as PostgreSQL prints a `pg_lsn`, e.g. `16/B374D848`.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Lsn(pub u64);

impl Lsn {
    /// The invalid LSN, `0/0`: before everything.
    pub const ZERO: Lsn = Lsn(0);
}

impl fmt::Display for Lsn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:X}/{:X}", self.0 >> 32, self.0 as u32)
    }
}

impl fmt::Debug for Lsn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A text that is not an LSN as PostgreSQL prints it.
#[derive(Debug, thiserror::Error)]
#[error("`{0}` is not an LSN: expected two hexadecimal numbers with `/` between, e.g. 16/B374D848")]
pub struct ParseLsnError(String);

impl FromStr for Lsn {
    type Err = ParseLsnError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let wrong = || ParseLsnError(text.to_owned());
        let (high, low) = text.split_once('/').ok_or_else(wrong)?;
        let high = u32::from_str_radix(high, 16).map_err(|_| wrong())?;
        let low = u32::from_str_radix(low, 16).map_err(|_| wrong())?;
        Ok(Lsn(u64::from(high) << 32 | u64::from(low)))
    }
}

impl Serialize for Lsn {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Lsn {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

/// A row's position in the source's history, the same after every reconnect (P1).
///
/// Ordered by epoch, commit, ordinal.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Position {
    /// Grows when LSNs begin to mean another history.
    pub epoch: u32,
    /// LSN of the commit record (`BEGIN.final_lsn`).
    pub commit: Lsn,
    /// See [`row_ordinal`].
    pub ordinal: u64,
}

impl Position {
    /// The position of a copy taken in a snapshot whose consistent point is
    /// `floor`: changes at or beyond it are newer (P14).
    pub fn of_copy(epoch: u32, floor: Lsn) -> Position {
        Position { epoch, commit: floor, ordinal: 0 }
    }
}

/// Rows that one WAL record can hold of one relation, as far as an ordinal tells
/// them apart.
const ROWS_PER_RECORD: u64 = 2048;

/// The ordinal of a row: its own WAL position from the XLogData header, and its
/// index among the rows of its relation there.
///
/// Records are aligned to eight bytes, so a record's ordinals never reach the next
/// record's. An index beyond the bound saturates, which keeps the order.
pub fn row_ordinal(row: Lsn, index: u64) -> u64 {
    (row.0 / 8) * ROWS_PER_RECORD + index.min(ROWS_PER_RECORD - 1)
}

/// Version of a table's schema: the commit LSN of the transaction that made it and
/// the LSN of its DDL message there; `(S, 0)` for a schema read at a copy (P5).
///
/// Ordered numerically, commit first. Shown as `commit:message` in decimal.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SnapshotId {
    /// LSN of the commit record.
    pub commit: Lsn,
    /// LSN of the logical message, 0 for a schema read at a copy.
    pub message: Lsn,
}

impl fmt::Display for SnapshotId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.commit.0, self.message.0)
    }
}

impl fmt::Debug for SnapshotId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A text that is not a snapshot id.
#[derive(Debug, thiserror::Error)]
#[error("`{0}` is not a snapshot id: expected `commit:message` in decimal")]
pub struct ParseSnapshotIdError(String);

impl FromStr for SnapshotId {
    type Err = ParseSnapshotIdError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let wrong = || ParseSnapshotIdError(text.to_owned());
        let (commit, message) = text.split_once(':').ok_or_else(wrong)?;
        let number = |text: &str| text.parse::<u64>().map(Lsn).map_err(|_| wrong());
        Ok(SnapshotId { commit: number(commit)?, message: number(message)? })
    }
}

impl Serialize for SnapshotId {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for SnapshotId {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_lsn_prints_and_parses_as_postgresql_prints_it() {
        let lsn = Lsn(0x16_B374_D848);
        assert_eq!(lsn.to_string(), "16/B374D848");
        assert_eq!("16/B374D848".parse::<Lsn>().unwrap(), lsn);
        assert!("16-B374D848".parse::<Lsn>().is_err());
        assert!("1/2/3".parse::<Lsn>().is_err());
    }

    #[test]
    fn ordinals_of_one_record_stay_below_those_of_the_next() {
        let last = row_ordinal(Lsn(0x1000), 1_000_000);
        assert!(row_ordinal(Lsn(0x1000), 196) < last);
        assert!(last < row_ordinal(Lsn(0x1008), 0));
    }

    #[test]
    fn snapshot_ids_are_ordered_numerically_not_as_text() {
        let nine: SnapshotId = "9:0".parse().unwrap();
        let ten: SnapshotId = "10:0".parse().unwrap();
        assert!(nine < ten);
        assert_eq!(ten.to_string(), "10:0");
    }
}
