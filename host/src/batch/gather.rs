//! Reading columns in the wire's layout, and taking rows of them into new ones.

use super::values::Bits;
use crate::wire;

/// In a list of rows to take: none; the cell is missing.
pub(super) const NO_ROW: u32 = u32::MAX;

/// Rows to take, in order, of one set of rows.
#[derive(Clone, Copy)]
pub(super) struct Part<'a> {
    pub(super) values: Option<&'a wire::ColumnValues>,
    pub(super) rows: &'a [u32],
}

/// Whether a bit is set; a bitmap that is absent says `absent`.
#[inline]
pub(super) fn bit(bitmap: &Option<wire::Bitmap>, row: u32, absent: bool) -> bool {
    match bitmap {
        Some(bits) => bits.get(row as usize / 8).is_some_and(|byte| byte >> (row % 8) & 1 == 1),
        None => absent,
    }
}

/// Whether the source did not send this cell.
#[inline]
pub(super) fn is_missing(values: &wire::ColumnValues, row: u32) -> bool {
    bit(&values.missing, row, false)
}

/// Whether this cell is null.
#[inline]
pub(super) fn is_null(values: &wire::ColumnValues, row: u32) -> bool {
    !bit(&values.validity, row, true)
}

/// The cell's text, if its layout could not hold it.
#[inline]
pub(super) fn odd_cell(values: &wire::ColumnValues, row: u32) -> Option<&wire::OddCell> {
    if values.odd.is_empty() {
        return None;
    }
    let at = values.odd.binary_search_by_key(&row, |odd| odd.row).ok()?;
    Some(&values.odd[at])
}

/// The column with this ordinal, unless no row was sent it.
pub(super) fn find(rows: &wire::Rows, ordinal: u16) -> Option<&wire::ColumnValues> {
    let at = rows.columns.binary_search_by_key(&ordinal, |column| column.ordinal).ok()?;
    Some(&rows.columns[at])
}

/// The bytes of one text or binary; nothing for a row that does not exist.
#[inline]
pub(super) fn bytes_of(array: &wire::BytesArray, row: u32) -> &[u8] {
    let ends = (array.offsets.get(row as usize), array.offsets.get(row as usize + 1));
    match ends {
        (Some(start), Some(end)) => array.data.get(*start as usize..*end as usize).unwrap_or_default(),
        _ => &[],
    }
}

/// Where the items of one list are.
#[inline]
pub(super) fn items_of(lists: &wire::ListArray, row: u32) -> std::ops::Range<u32> {
    match (lists.offsets.get(row as usize), lists.offsets.get(row as usize + 1)) {
        (Some(start), Some(end)) => *start..*end,
        _ => 0..0,
    }
}

/// The rows of a set, one column each time.
pub(super) fn take_rows(rows: &wire::Rows, taken: &[u32]) -> wire::Rows {
    let column = |values| gather(&[Part { values: Some(values), rows: taken }]);
    wire::Rows { count: taken.len() as u32, columns: rows.columns.iter().filter_map(column).collect() }
}

/// A column made of rows of the same column of several sets. `None` if not one of the
/// cells was sent.
pub(super) fn gather(parts: &[Part<'_>]) -> Option<wire::ColumnValues> {
    let first = parts.iter().find_map(|part| part.values)?;
    let count: usize = parts.iter().map(|part| part.rows.len()).sum();
    if count == 0 {
        return None;
    }
    let missing = missing_bits(parts);
    if missing.as_ref().is_some_and(|(_, cells)| *cells == count) {
        return None;
    }
    Some(wire::ColumnValues {
        ordinal: first.ordinal,
        validity: validity_bits(parts),
        missing: missing.map(|(bits, _)| bits),
        odd: odd_cells(parts),
        data: match &first.data {
            wire::ColumnData::Plain(like) => wire::ColumnData::Plain(plain(like, count, parts)),
            wire::ColumnData::Lists(like) => wire::ColumnData::Lists(lists(like, count, parts)),
        },
    })
}

/// Which of the taken cells are missing, and how many; `None` if not one is.
fn missing_bits(parts: &[Part<'_>]) -> Option<(wire::Bitmap, usize)> {
    // Most columns have no bitmap, and the search for a number is cheap.
    let may_be =
        |part: &Part<'_>| part.values.is_none_or(|values| values.missing.is_some()) || part.rows.contains(&NO_ROW);
    if !parts.iter().any(may_be) {
        return None;
    }
    let mut bits = Bits::default();
    let mut cells = 0;
    for part in parts {
        for &row in part.rows {
            let missing = part.values.is_none_or(|values| row == NO_ROW || is_missing(values, row));
            bits.push(missing);
            cells += usize::from(missing);
        }
    }
    (cells > 0).then(|| (bits.into_bitmap(), cells))
}

/// Which of the taken cells are not null; `None` if all are.
fn validity_bits(parts: &[Part<'_>]) -> Option<wire::Bitmap> {
    if !parts.iter().any(|part| part.values.is_some_and(|values| values.validity.is_some())) {
        return None;
    }
    let mut bits = Bits::default();
    let mut any_null = false;
    for part in parts {
        for &row in part.rows {
            let null = row != NO_ROW && part.values.is_some_and(|values| is_null(values, row));
            bits.push(!null);
            any_null |= null;
        }
    }
    any_null.then(|| bits.into_bitmap())
}

fn odd_cells(parts: &[Part<'_>]) -> Vec<wire::OddCell> {
    let mut odd = Vec::new();
    let mut start = 0;
    for part in parts {
        if let Some(values) = part.values.filter(|values| !values.odd.is_empty()) {
            for (at, &row) in part.rows.iter().enumerate() {
                if let Some(cell) = odd_cell(values, row) {
                    odd.push(wire::OddCell { row: start + at as u32, ..cell.clone() });
                }
            }
        }
        start += part.rows.len() as u32;
    }
    odd
}

fn plain(like: &wire::Cells, count: usize, parts: &[Part<'_>]) -> wire::Cells {
    let mut out = Taken::like(like, count);
    for part in parts {
        let rows = part.rows.iter().copied();
        match part.values.map(|values| &values.data) {
            Some(wire::ColumnData::Plain(cells)) => out.extend(cells, rows),
            // Left out there, so missing here: zeroes.
            _ => out.extend(&empty_like(like), rows),
        }
    }
    out.into_cells()
}

fn lists(like: &wire::ListArray, count: usize, parts: &[Part<'_>]) -> wire::ListArray {
    let mut out = Taken::like(&like.items, count);
    let mut offsets = Vec::with_capacity(count + 1);
    offsets.push(0u32);
    let mut end = 0;
    let mut validity = Bits::default();
    let mut any_null = false;
    for part in parts {
        let from = match part.values.map(|values| &values.data) {
            Some(wire::ColumnData::Lists(from)) => from,
            _ => {
                offsets.resize(offsets.len() + part.rows.len(), end);
                continue;
            }
        };
        for &row in part.rows {
            end += items_of(from, row).len() as u32;
            offsets.push(end);
        }
        let items = part.rows.iter().flat_map(|row| items_of(from, *row));
        for item in items.clone() {
            let valid = bit(&from.item_validity, item, true);
            any_null |= !valid;
            validity.push(valid);
        }
        out.extend(&from.items, items);
    }
    wire::ListArray { offsets, item_validity: any_null.then(|| validity.into_bitmap()), items: out.into_cells() }
}

/// Cells of the same layout without a row.
fn empty_like(cells: &wire::Cells) -> wire::Cells {
    match cells {
        wire::Cells::Booleans(_) => wire::Cells::Booleans(Vec::new()),
        wire::Cells::Int16(_) => wire::Cells::Int16(Vec::new()),
        wire::Cells::Int32(_) => wire::Cells::Int32(Vec::new()),
        wire::Cells::Int64(_) => wire::Cells::Int64(Vec::new()),
        wire::Cells::Float32(_) => wire::Cells::Float32(Vec::new()),
        wire::Cells::Float64(_) => wire::Cells::Float64(Vec::new()),
        wire::Cells::Fixed(array) => wire::Cells::Fixed(wire::FixedArray { width: array.width, data: Vec::new() }),
        wire::Cells::Utf8(_) => wire::Cells::Utf8(wire::BytesArray { offsets: vec![0], data: Vec::new() }),
        wire::Cells::Binary(_) => wire::Cells::Binary(wire::BytesArray { offsets: vec![0], data: Vec::new() }),
    }
}

/// Cells that were taken so far.
enum Taken {
    Bits(Bits),
    Cells(wire::Cells),
}

impl Taken {
    fn like(cells: &wire::Cells, count: usize) -> Taken {
        let mut cells = match cells {
            wire::Cells::Booleans(_) => return Taken::Bits(Bits::default()),
            other => empty_like(other),
        };
        match &mut cells {
            wire::Cells::Int16(out) => out.reserve(count),
            wire::Cells::Int32(out) => out.reserve(count),
            wire::Cells::Int64(out) => out.reserve(count),
            wire::Cells::Float32(out) => out.reserve(count),
            wire::Cells::Float64(out) => out.reserve(count),
            wire::Cells::Fixed(out) => out.data.reserve(count * out.width as usize),
            wire::Cells::Utf8(out) | wire::Cells::Binary(out) => out.offsets.reserve(count),
            wire::Cells::Booleans(_) => {}
        }
        Taken::Cells(cells)
    }

    /// Appends rows of `from`, which has the same layout; a row that does not exist is zero.
    fn extend(&mut self, from: &wire::Cells, rows: impl Iterator<Item = u32>) {
        fn extend<T: Copy + Default>(out: &mut Vec<T>, from: &[T], rows: impl Iterator<Item = u32>) {
            out.extend(rows.map(|row| from.get(row as usize).copied().unwrap_or_default()));
        }
        let out = match (self, from) {
            (Taken::Bits(out), wire::Cells::Booleans(from)) => {
                for row in rows {
                    out.push(from.get(row as usize / 8).is_some_and(|byte| byte >> (row % 8) & 1 == 1));
                }
                return;
            }
            (Taken::Bits(_), _) => return,
            (Taken::Cells(out), _) => out,
        };
        match (out, from) {
            (wire::Cells::Int16(out), wire::Cells::Int16(from)) => extend(out, from, rows),
            (wire::Cells::Int32(out), wire::Cells::Int32(from)) => extend(out, from, rows),
            (wire::Cells::Int64(out), wire::Cells::Int64(from)) => extend(out, from, rows),
            (wire::Cells::Float32(out), wire::Cells::Float32(from)) => extend(out, from, rows),
            (wire::Cells::Float64(out), wire::Cells::Float64(from)) => extend(out, from, rows),
            (wire::Cells::Fixed(out), wire::Cells::Fixed(from)) => {
                let width = out.width as usize;
                for row in rows {
                    let start = row as usize * width;
                    match from.data.get(start..start + width) {
                        Some(value) => out.data.extend_from_slice(value),
                        None => out.data.resize(out.data.len() + width, 0),
                    }
                }
            }
            (wire::Cells::Utf8(out), wire::Cells::Utf8(from))
            | (wire::Cells::Binary(out), wire::Cells::Binary(from)) => {
                for row in rows {
                    out.data.extend_from_slice(bytes_of(from, row));
                    out.offsets.push(out.data.len() as u32);
                }
            }
            // The base type alone decides the layout: the same column has no other.
            _ => debug_assert!(false, "two layouts in one column"),
        }
    }

    fn into_cells(self) -> wire::Cells {
        match self {
            Taken::Bits(bits) => wire::Cells::Booleans(bits.into_bitmap()),
            Taken::Cells(cells) => cells,
        }
    }
}

/// Bytes that rows take in memory, about.
pub fn rows_bytes(rows: &wire::Rows) -> usize {
    rows.columns.iter().map(column_bytes).sum()
}

/// The same with what the columns themselves take, however few rows there are.
pub fn rows_weight(rows: &wire::Rows) -> usize {
    rows_bytes(rows) + rows.columns.len() * COLUMN_BYTES
}

/// Bytes that the rows of a content take, about.
pub fn content_bytes(content: &wire::Content) -> usize {
    match content {
        wire::Content::Copy(copy) => rows_weight(&copy.rows),
        wire::Content::Changes(changes) => rows_weight(&changes.rows) + rows_weight(&changes.old_rows),
        wire::Content::Merge(merge) => {
            rows_weight(&merge.upserts) + rows_weight(&merge.moved_from) + rows_weight(&merge.deletes)
        }
        wire::Content::Truncate(_) | wire::Content::Messages(_) => 0,
    }
}

/// A column's record, its vectors' allocations, and the rounding of these.
pub(super) const COLUMN_BYTES: usize = size_of::<wire::ColumnValues>() + 64;

fn column_bytes(values: &wire::ColumnValues) -> usize {
    let bitmap = |bits: &Option<wire::Bitmap>| bits.as_ref().map_or(0, Vec::len);
    let odd = |cell: &wire::OddCell| size_of::<wire::OddCell>() + cell.kind.len() + cell.text.len();
    let data = match &values.data {
        wire::ColumnData::Plain(cells) => cells_bytes(cells),
        wire::ColumnData::Lists(lists) => {
            lists.offsets.len() * size_of::<u32>() + bitmap(&lists.item_validity) + cells_bytes(&lists.items)
        }
    };
    data + bitmap(&values.validity) + bitmap(&values.missing) + values.odd.iter().map(odd).sum::<usize>()
}

fn cells_bytes(cells: &wire::Cells) -> usize {
    match cells {
        wire::Cells::Booleans(bits) => bits.len(),
        wire::Cells::Int16(values) => size_of_val(values.as_slice()),
        wire::Cells::Int32(values) => size_of_val(values.as_slice()),
        wire::Cells::Int64(values) => size_of_val(values.as_slice()),
        wire::Cells::Float32(values) => size_of_val(values.as_slice()),
        wire::Cells::Float64(values) => size_of_val(values.as_slice()),
        wire::Cells::Fixed(array) => array.data.len(),
        wire::Cells::Utf8(array) | wire::Cells::Binary(array) => {
            size_of_val(array.offsets.as_slice()) + array.data.len()
        }
    }
}
