//! Copies that a restart does not begin again go by the same pages in every snapshot (P19).

use super::ranges::{self, Pages, Part, Piece};
use super::{Wave, WaveTable};
use crate::copy::stretches::{Base, Look, Reading, Stretch};

impl Wave {
    /// The snapshot.
    pub fn base(&self) -> Base {
        Base { floor: self.floor, xmin: self.xmin }
    }

    /// What a copy of a table is cut into that can be gone on with in a later snapshot;
    /// none where a row's place and `xmin` may mean something else than in a heap.
    /// `least`: a stretch need not have more bytes.
    pub fn stretches(&self, table: &WaveTable, least: u64) -> Option<Vec<Stretch>> {
        if table.parts.is_empty() || !table.parts.iter().all(|part| part.by_page) {
            return None;
        }
        let ranges = ranges::cut_to_resume(&table.parts, self.options.connections.count, least);
        let stretch = |piece: &Piece| {
            let (from, to) = piece.pages.map_or((0, None), |pages| (pages.from, pages.to));
            table.parts.get(piece.part).map(|part| Stretch { leaf: part.oid, from, to })
        };
        ranges.iter().flatten().map(stretch).collect()
    }

    /// What a table is, and which history it belongs to: another text means that no part of
    /// an earlier copy of it is of use.
    pub fn origin(&self, table: &WaveTable) -> String {
        format!("{} of {}", table.digest, self.history)
    }
}

impl WaveTable {
    /// The same to be copied by some stretches of it; none if it has not the leaf of one.
    pub fn by_stretches(&self, stretches: &[Stretch], readings: &[Reading]) -> Option<WaveTable> {
        let piece = |reading: &Reading| {
            let stretch = stretches.get(reading.number)?;
            let part = self.parts.iter().position(|part| part.oid == stretch.leaf)?;
            Some(piece_of(&self.parts[part], part, stretch, *reading))
        };
        let pieces: Option<Vec<Piece>> = readings.iter().map(piece).collect();
        Some(WaveTable { ranges: ranges::together(pieces?).into(), ..self.clone() })
    }
}

fn piece_of(part: &Part, index: usize, stretch: &Stretch, reading: Reading) -> Piece {
    let whole = stretch.from == 0 && stretch.to.is_none();
    let pages = (!whole).then_some(Pages { from: stretch.from, to: stretch.to });
    let share = || {
        let until = stretch.to.unwrap_or(part.pages).min(part.pages);
        let share = u128::from(until.saturating_sub(stretch.from));
        (u128::from(part.bytes) * share / u128::from(part.pages.max(1))) as u64
    };
    let bytes = match reading.look {
        // A leaf without pages has bytes all the same.
        Look::All if whole => part.bytes,
        Look::All => share(),
        // They were counted when the stretch was copied.
        Look::Newer(_) => 0,
    };
    Piece { part: index, pages, reading: Some(reading), bytes }
}
