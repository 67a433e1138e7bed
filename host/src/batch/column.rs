//! One column under construction: cells go straight into the buffers that cross to the
//! plugin.

use super::array;
use super::layout::{ColumnLayout, Layout, layout};
use super::values::{Values, fixed_bytes, truncate_bits};
use crate::schema::table::Column;
use crate::wire;

/// Builds the cells of one column, row by row.
///
/// Nothing is allocated per cell: buffers grow, and start at the size that the last
/// batch needed. The exception is an odd cell, which keeps its text.
pub struct ColumnBuilder {
    ordinal: u16,
    rows: usize,
    values: Values,
    lists: Option<Lists>,
    /// Made at the first null; reaches as far as the last null, what follows is not null.
    validity: Option<Vec<u8>>,
    /// Made at the first missing cell; reaches as far as the last one.
    missing: Option<Vec<u8>>,
    missing_rows: usize,
    odd: Vec<wire::OddCell>,
    /// Beside texts and binaries, what a value takes.
    width: usize,
    /// Whether a cell takes its text's length too.
    varying: bool,
    scratch: Vec<u8>,
    last: Size,
}

/// What lists need beside their items.
struct Lists {
    delimiter: u8,
    /// Where each list ends among the items.
    ends: Vec<u32>,
    /// As `validity`, for items.
    item_validity: Option<Vec<u8>>,
}

/// How much a finished column held.
#[derive(Clone, Copy, Default)]
struct Size {
    rows: usize,
    values: usize,
    data: usize,
}

impl ColumnBuilder {
    /// An empty builder for a column.
    pub fn new(column: &Column) -> ColumnBuilder {
        let ColumnLayout { layout, delimiter } = layout(column);
        ColumnBuilder {
            ordinal: column.ordinal,
            rows: 0,
            values: Values::new(layout),
            lists: delimiter.map(|delimiter| Lists { delimiter, ends: Vec::new(), item_validity: None }),
            validity: None,
            missing: None,
            missing_rows: 0,
            odd: Vec::new(),
            width: fixed_bytes(layout),
            varying: matches!(layout, Layout::Text | Layout::Bytea),
            scratch: Vec::new(),
            last: Size::default(),
        }
    }

    /// `pg_attribute.attnum` of the column.
    pub fn ordinal(&self) -> u16 {
        self.ordinal
    }

    /// Bytes that are reserved.
    pub(super) fn reserved(&self) -> usize {
        self.values.capacity() + self.lists.as_ref().map_or(0, |lists| lists.ends.capacity() * size_of::<u32>())
    }

    /// Cells so far.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Cells so far that their layout could not hold.
    pub(super) fn odd_cells(&self) -> usize {
        self.odd.len()
    }

    /// Appends the cell that PostgreSQL printed as `cell`, and says how many bytes it
    /// takes, about.
    ///
    /// What the layout cannot hold exactly becomes an odd cell; there is no text that is
    /// an error.
    #[inline]
    pub fn append(&mut self, cell: &[u8]) -> usize {
        let bytes = match &mut self.lists {
            None if self.values.append(cell) => {
                if self.varying {
                    self.width + cell.len()
                } else {
                    self.width
                }
            }
            None => {
                self.values.append_zero();
                self.append_odd(cell)
            }
            Some(_) => self.append_list(cell),
        };
        self.rows += 1;
        bytes
    }

    fn append_list(&mut self, cell: &[u8]) -> usize {
        let ColumnBuilder { values, lists: Some(lists), scratch, .. } = self else { return 0 };
        let (items, data) = (values.len(), values.data_len());
        let fits = array::items(cell, lists.delimiter, scratch, |item| match item {
            Some(text) => values.append(text),
            None => {
                clear_bit(&mut lists.item_validity, values.len());
                values.append_zero();
                true
            }
        });
        if !fits {
            values.truncate(items);
            truncate_validity(&mut lists.item_validity, items);
        }
        lists.ends.push(values.len() as u32);
        if fits {
            size_of::<u32>() + (values.len() - items) * self.width + values.data_len() - data
        } else {
            self.append_odd(cell)
        }
    }

    #[cold]
    fn append_odd(&mut self, cell: &[u8]) -> usize {
        let (kind, text) = match std::str::from_utf8(cell) {
            Ok(text) => ("text", text.to_owned()),
            Err(_) => ("hex", hex(cell)),
        };
        let bytes = self.width + size_of::<wire::OddCell>() + text.len();
        self.odd.push(wire::OddCell { row: self.rows as u32, kind: kind.to_owned(), text });
        bytes
    }

    /// Appends a null, and says how many bytes it takes.
    #[inline]
    pub fn append_null(&mut self) -> usize {
        clear_bit(&mut self.validity, self.rows);
        self.append_nothing()
    }

    /// Appends a cell that the source did not send (which is not a null), and says how
    /// many bytes it takes.
    #[inline]
    pub fn append_missing(&mut self) -> usize {
        let missing = self.missing.get_or_insert_default();
        if missing.len() <= self.rows / 8 {
            missing.resize(self.rows / 8 + 1, 0);
        }
        missing[self.rows / 8] |= 1 << (self.rows % 8);
        self.missing_rows += 1;
        self.append_nothing()
    }

    #[inline]
    fn append_nothing(&mut self) -> usize {
        self.rows += 1;
        match &mut self.lists {
            Some(lists) => {
                lists.ends.push(self.values.len() as u32);
                size_of::<u32>()
            }
            None => {
                self.values.append_zero();
                self.width
            }
        }
    }

    /// Takes back cells beyond the first `rows`: of a row that turned out to be malformed.
    pub(super) fn truncate(&mut self, rows: usize) {
        if rows >= self.rows {
            return;
        }
        self.rows = rows;
        match &mut self.lists {
            Some(lists) => {
                lists.ends.truncate(rows);
                let items = lists.ends.last().map_or(0, |end| *end as usize);
                self.values.truncate(items);
                truncate_validity(&mut lists.item_validity, items);
            }
            None => self.values.truncate(rows),
        }
        truncate_validity(&mut self.validity, rows);
        if let Some(missing) = &mut self.missing {
            truncate_bits(missing, rows, false);
            self.missing_rows = missing.iter().map(|byte| byte.count_ones() as usize).sum();
        }
        if self.missing_rows == 0 {
            self.missing = None;
        }
        self.odd.retain(|odd| (odd.row as usize) < rows);
    }

    /// Makes room for as much as the last batch held. For the first row of a batch, so
    /// that a table that is quiet holds no memory.
    pub(super) fn reserve_as_last_time(&mut self) {
        self.values.reserve(self.last.values, self.last.data);
        if let Some(lists) = &mut self.lists {
            lists.ends.reserve(self.last.rows + 1);
        }
    }

    /// The column as it crosses to the plugin, and an empty builder again. `None` if no
    /// row was sent this column: it is left out.
    pub fn finish(&mut self) -> Option<wire::ColumnValues> {
        let rows = std::mem::take(&mut self.rows);
        self.last = Size { rows, values: self.values.len(), data: self.values.data_len() };
        let items = self.values.len();
        let cells = self.values.take();
        let data = match &mut self.lists {
            None => wire::ColumnData::Plain(cells),
            Some(lists) => {
                let mut offsets = std::mem::take(&mut lists.ends);
                offsets.insert(0, 0);
                let item_validity = lists.item_validity.take().map(|bits| whole(bits, items, 0xff));
                wire::ColumnData::Lists(wire::ListArray { offsets, item_validity, items: cells })
            }
        };
        let validity = self.validity.take().map(|bits| whole(bits, rows, 0xff));
        let missing = self.missing.take().map(|bits| whole(bits, rows, 0));
        let odd = std::mem::take(&mut self.odd);
        if std::mem::take(&mut self.missing_rows) == rows {
            return None;
        }
        Some(wire::ColumnValues { ordinal: self.ordinal, validity, missing, odd, data })
    }
}

/// Clears a bit of a bitmap that reaches as far as its last cleared bit.
#[inline]
fn clear_bit(bitmap: &mut Option<Vec<u8>>, at: usize) {
    let bits = bitmap.get_or_insert_default();
    if bits.len() <= at / 8 {
        bits.resize(at / 8 + 1, 0xff);
    }
    bits[at / 8] &= !(1 << (at % 8));
}

/// Cuts such a bitmap; without a cleared bit it is none.
fn truncate_validity(bitmap: &mut Option<Vec<u8>>, len: usize) {
    if let Some(bits) = bitmap {
        truncate_bits(bits, len, true);
        if bits.iter().all(|byte| *byte == 0xff) {
            *bitmap = None;
        }
    }
}

/// Extends a bitmap to its whole length, and zeroes what is beyond it in the last byte.
fn whole(mut bits: Vec<u8>, len: usize, fill: u8) -> Vec<u8> {
    bits.resize(len.div_ceil(8), fill);
    truncate_bits(&mut bits, len, false);
    bits
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut out, byte| {
        for digit in [byte >> 4, byte & 15] {
            out.push(char::from(b"0123456789abcdef"[usize::from(digit)]));
        }
        out
    })
}

#[cfg(test)]
#[path = "column_tests.rs"]
mod tests;
