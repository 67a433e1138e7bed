//! Copies that can be resumed go by ranges of the key instead of pages: a row that moves
//! to another page would be in neither copy (P19).

use super::ranges::{KeySpan, Piece};
use super::{Wave, WaveTable};
use crate::copy::keys::{KeyRanges, KeyType};
use crate::error::Result;
use crate::source::session::sql_error;

impl Wave {
    /// The column that a resumable copy of a table goes by, and its ranges; none if there
    /// are none that the host could tell apart as the server does, or that an index finds.
    ///
    /// # Errors
    /// `source.sql`, `source.connection-lost`.
    pub async fn key_ranges(&self, table: &WaveTable) -> Result<Option<(String, KeyRanges)>> {
        let [part] = &*table.parts else { return Ok(None) };
        let column = table.schema.merge_key().first().and_then(|ordinal| table.schema.column(*ordinal));
        let Some((_, column)) = column else { return Ok(None) };
        let Some(kind) = KeyType::of(&column.base) else { return Ok(None) };
        // Not the keeper: an error there would end the snapshot.
        let observer = self.observer().await?;
        let sql = include_str!("../sql/keys.sql");
        let row = observer.session.query_opt(sql, &[&table.table.oid, &column.name]).await;
        let row = row.map_err(|error| sql_error(&error, &format!("looking at the keys of table {}", part.name)))?;
        let ranges = row.and_then(|row| KeyRanges::cut(kind, &row.get::<_, Vec<String>>(0), table.source_bytes));
        Ok(ranges.map(|ranges| (column.name.clone(), ranges)))
    }

    /// What a table is, and which history it belongs to: another text means that no part of
    /// an earlier copy of it is of use.
    pub fn origin(&self, table: &WaveTable) -> String {
        format!("{} of {}", table.digest, self.history)
    }
}

impl WaveTable {
    /// The same to be copied by some ranges of a column.
    pub fn by_keys(&self, column: &str, ranges: &KeyRanges, numbers: &[usize]) -> WaveTable {
        let bytes = self.source_bytes / ranges.count().max(1) as u64;
        let piece = |number: &usize| {
            let (beyond, to) = ranges.span(*number);
            vec![Piece {
                part: 0,
                pages: None,
                keys: Some(KeySpan { number: *number, column: column.to_owned(), beyond, to }),
                bytes,
            }]
        };
        WaveTable { ranges: numbers.iter().map(piece).collect(), ..self.clone() }
    }
}
