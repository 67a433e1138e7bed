//! What one connection copies at a time: pages of a table, or several small partitions.

use std::ops::Range as Span;

use crate::copy::stretches::Reading;
use crate::schema::table::TableName;

/// A range is not smaller: its own transaction, lock and comparison cost some round
/// trips, which are a hundredth of the time that so many bytes take.
const LEAST_BYTES: u64 = 32 << 20;
/// Nor larger: a copy that gives way, and a connection that breaks, lose no more.
const MOST_BYTES: u64 = 1 << 30;
/// What is copied again after a restart, for each connection, where not all is.
const MOST_BYTES_AGAIN: u64 = 256 << 20;
/// Stretches of one table, unless it has more partitions: each is a row of the state.
const MOST_STRETCHES: u64 = 10_000;
/// Ranges for each connection, so that all of them end at about the same time.
const RANGES_PER_CONNECTION: u64 = 8;
/// Partitions in one range: each is a lock of the same transaction.
const MOST_PIECES: usize = 32;

/// What the planner takes for a page's and for a row's own bytes where a table was never
/// analysed.
const PAGE_HEADER: u64 = 24;
const ROW_HEADER: u64 = 28;

/// A table or leaf, as the snapshot shows it.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Part {
    /// `pg_class.oid`.
    pub(super) oid: u32,
    pub(super) name: TableName,
    /// A published column is generated: COPY of the table itself refuses it.
    pub(super) generated: bool,
    /// Its pages can be read apart.
    pub(super) by_page: bool,
    /// Of the heap.
    pub(super) pages: u64,
    /// Heap, TOAST and what belongs to them.
    pub(super) bytes: u64,
    /// Estimated, dead or filtered ones included.
    pub(super) rows: f64,
}

/// Pages of a part, or all of it.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Piece {
    /// Index of the part.
    pub(super) part: usize,
    /// These pages alone.
    pub(super) pages: Option<Pages>,
    /// As which stretch it is read, and what of it, if the copy goes by those.
    pub(super) reading: Option<Reading>,
    /// Share of the part's bytes.
    pub(super) bytes: u64,
}

/// From the first page, to before the other; the last piece of a part has no end.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Pages {
    pub(super) from: u64,
    pub(super) to: Option<u64>,
}

/// What is copied in one turn of a connection.
pub(super) type Range = Vec<Piece>;

/// Estimates as the planner does: by the density that the last ANALYZE found, else by the
/// width of the columns.
pub(super) fn estimate_rows(pages: u64, analysed_pages: i32, analysed_rows: f64, width: i64, block: u64) -> f64 {
    let density = if analysed_pages > 0 && analysed_rows >= 0.0 {
        analysed_rows / f64::from(analysed_pages)
    } else {
        let row = ROW_HEADER + u64::try_from(width).unwrap_or_default();
        (block.saturating_sub(PAGE_HEADER) / row).max(1) as f64
    };
    (density * pages as f64).round()
}

/// Cuts a table into ranges, biggest first.
pub(super) fn cut(parts: &[Part], connections: usize) -> Vec<Range> {
    let total: u64 = parts.iter().map(|part| part.bytes).sum();
    let wanted = total / (connections.max(1) as u64 * RANGES_PER_CONNECTION);
    cut_to(parts, wanted.clamp(LEAST_BYTES, MOST_BYTES))
}

/// The same so that a restart goes on; `least`: ranges need not be larger.
pub(super) fn cut_to_resume(parts: &[Part], connections: usize, least: u64) -> Vec<Range> {
    let total: u64 = parts.iter().map(|part| part.bytes).sum();
    let wanted = total / (connections.max(1) as u64 * RANGES_PER_CONNECTION);
    cut_to(parts, wanted.clamp(LEAST_BYTES.min(least), MOST_BYTES_AGAIN).max(total / MOST_STRETCHES))
}

/// The same with ranges of about so many bytes.
pub(super) fn cut_to(parts: &[Part], wanted: u64) -> Vec<Range> {
    let mut order: Vec<usize> = (0..parts.len()).collect();
    order.sort_by_key(|part| std::cmp::Reverse(parts[*part].bytes));
    let mut ranges: Vec<Range> = Vec::new();
    let mut small: Range = Vec::new();
    for index in order {
        let part = &parts[index];
        let pieces = if part.by_page { (part.bytes / wanted.max(1)).clamp(1, part.pages.max(1)) } else { 1 };
        if pieces > 1 {
            ranges.extend((0..pieces).map(|piece| vec![piece_of(index, part, piece, pieces)]));
            continue;
        }
        let piece = Piece { part: index, pages: None, reading: None, bytes: part.bytes };
        add_small(&mut ranges, &mut small, piece, wanted);
    }
    if !small.is_empty() {
        ranges.push(small);
    }
    ranges
}

/// Adds a piece to those that are read together.
fn add_small(ranges: &mut Vec<Range>, small: &mut Range, piece: Piece, wanted: u64) {
    let bytes: u64 = small.iter().map(|piece| piece.bytes).sum();
    if !small.is_empty() && (bytes + piece.bytes > wanted || small.len() >= MOST_PIECES) {
        ranges.push(std::mem::take(small));
    }
    small.push(piece);
}

/// Pieces of stretches, which are read one by one, but for whole parts that are small.
pub(super) fn together(pieces: Vec<Piece>) -> Vec<Range> {
    let (mut ranges, mut small) = (Vec::new(), Range::new());
    for piece in pieces {
        match piece.pages {
            Some(_) => ranges.push(vec![piece]),
            None => add_small(&mut ranges, &mut small, piece, LEAST_BYTES),
        }
    }
    if !small.is_empty() {
        ranges.push(small);
    }
    ranges
}

fn piece_of(index: usize, part: &Part, piece: u64, pieces: u64) -> Piece {
    let share = |whole: u64| -> Span<u64> {
        let at = |piece: u64| (u128::from(whole) * u128::from(piece) / u128::from(pieces)) as u64;
        at(piece)..at(piece + 1)
    };
    let (pages, bytes) = (share(part.pages), share(part.bytes));
    let last = piece + 1 == pieces;
    Piece {
        part: index,
        pages: Some(Pages { from: pages.start, to: (!last).then_some(pages.end) }),
        reading: None,
        bytes: bytes.end - bytes.start,
    }
}

/// Follows how much of a piece is behind the rows that were read of it.
pub(super) struct Meter {
    per_row: f64,
    rows: u64,
    told: u64,
    bytes: u64,
}

impl Meter {
    pub(super) fn new(part: &Part, piece: &Piece) -> Meter {
        Meter { per_row: part.bytes as f64 / part.rows.max(1.0), rows: 0, told: 0, bytes: piece.bytes }
    }

    /// Bytes of the source behind so many more rows; never more than the piece has.
    pub(super) fn rows(&mut self, rows: u64) -> u64 {
        self.rows += rows;
        let reached = ((self.rows as f64 * self.per_row) as u64).min(self.bytes);
        reached - std::mem::replace(&mut self.told, reached)
    }

    /// What is left of it when its last row was read.
    pub(super) fn rest(self) -> u64 {
        self.bytes - self.told
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(name: &str, pages: u64) -> Part {
        let name = TableName::new("public", name);
        Part { oid: 1, name, generated: false, by_page: true, pages, bytes: pages * 8192, rows: pages as f64 * 10.0 }
    }

    fn spans(ranges: &[Range]) -> Vec<(usize, u64, Option<u64>)> {
        let span = |piece: &Piece| piece.pages.map(|pages| (piece.part, pages.from, pages.to));
        ranges.iter().flatten().filter_map(span).collect()
    }

    #[test]
    fn the_ranges_of_a_table_meet_and_the_last_has_no_end() {
        let ranges = cut_to(&[part("t", 1000)], 333 * 8192);
        assert_eq!(spans(&ranges), [(0, 0, Some(333)), (0, 333, Some(666)), (0, 666, None)]);
        let bytes: u64 = ranges.iter().flatten().map(|piece| piece.bytes).sum();
        assert_eq!(bytes, 1000 * 8192);
    }

    #[test]
    fn a_small_table_is_one_range_and_so_is_one_whose_pages_cannot_be_read_apart() {
        assert_eq!(cut(&[part("t", 2)], 4), [[Piece { part: 0, pages: None, reading: None, bytes: 2 * 8192 }]]);
        assert_eq!(cut(&[part("t", 0)], 4).len(), 1);
        let other = Part { by_page: false, ..part("t", 1 << 20) };
        assert_eq!(spans(&cut(&[other], 4)), []);
    }

    #[test]
    fn ranges_are_neither_too_small_nor_too_large_whatever_the_table_is() {
        let of = |gigabytes: u64| cut(&[part("t", gigabytes << 17)], 4).len() as u64;
        assert_eq!(of(1), 32, "eight for each connection");
        assert_eq!(of(100), 100, "of a gigabyte each");
        assert_eq!(cut(&[part("t", (100 << 20) / 8192)], 4).len(), 3, "of 32 megabytes at least");
    }

    #[test]
    fn a_table_with_much_toast_is_cut_by_its_bytes() {
        let toasted = Part { bytes: 10 << 30, ..part("t", 1000) };
        let ranges = cut(&[toasted], 4);
        assert_eq!(ranges.len(), 32);
        assert_eq!(spans(&ranges)[1], (0, 31, Some(62)));
        let lonely = Part { bytes: 10 << 30, ..part("t", 1) };
        assert_eq!(cut(&[lonely], 4).len(), 1, "a page is not cut");
    }

    #[test]
    fn partitions_come_biggest_first_and_small_ones_together() {
        let parts = [part("small", 10), part("big", 5000), part("smaller", 5), part("empty", 0)];
        let ranges = cut(&parts, 1);
        let order: Vec<Vec<usize>> =
            ranges.iter().map(|range| range.iter().map(|piece| piece.part).collect()).collect();
        assert_eq!(order, [vec![1], vec![0, 2, 3]]);
        let many: Vec<Part> = (0..100).map(|n| part(&n.to_string(), 1)).collect();
        assert_eq!(cut(&many, 1).len(), 4, "a transaction locks no more than 32 of them");
    }

    #[test]
    fn rows_are_estimated_as_the_planner_does() {
        assert_eq!(estimate_rows(200, 100, 5000.0, 8, 8192), 10_000.0, "the table has doubled since");
        assert_eq!(estimate_rows(10, 0, -1.0, 8, 8192), 2260.0, "never analysed");
        assert_eq!(estimate_rows(10, 0, 0.0, 8, 8192), 2260.0, "analysed when it was empty");
        assert_eq!(estimate_rows(10, 5, 0.0, 8, 8192), 0.0, "nothing but dead rows");
    }

    #[test]
    fn a_meter_ends_at_the_bytes_of_its_piece_whatever_the_estimate_was() {
        let whole = part("t", 10);
        let piece = piece_of(0, &whole, 0, 2);
        let mut meter = Meter::new(&whole, &piece);
        assert_eq!(meter.rows(25), 20_480);
        assert_eq!(meter.rows(1000), 20_480, "more rows than were expected");
        assert_eq!(meter.rest(), 0);
        assert_eq!(Meter::new(&whole, &piece).rest(), 40_960, "no row at all");
    }
}
