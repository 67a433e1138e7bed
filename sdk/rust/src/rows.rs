//! Columns, rows and cells of a batch, as views over what the host sent.
//!
//! ```
//! use tidegate_sdk::model::{Rows, Table};
//! use tidegate_sdk::rows::Cell;
//!
//! fn total(table: &Table, rows: &Rows) -> i64 {
//!     let mut total = 0;
//!     // Column by column is the fast way.
//!     for column in rows.columns() {
//!         for cell in column.cells() {
//!             if let Cell::Int64(value) = cell { total += value }
//!         }
//!     }
//!     // Row by row: one view for each column of the table, made once.
//!     let columns = rows.columns_of(table);
//!     for row in 0..rows.len() {
//!         for column in &columns {
//!             if let Cell::Text(text) = column.cell(row) { total += text.len() as i64 }
//!         }
//!     }
//!     total
//! }
//! ```

use crate::model::{self, BytesArray, Cells, ColumnData, ColumnValues, ListArray, OddCell, Rows, Table};

/// Whether bit `index` is set; least significant first.
pub fn bit(bitmap: &[u8], index: usize) -> bool {
    bitmap.get(index / 8).is_some_and(|byte| byte & (1 << (index % 8)) != 0)
}

/// How many of the first `count` bits are set.
pub fn count_bits(bitmap: &[u8], count: usize) -> usize {
    let whole: usize = bitmap.iter().take(count / 8).map(|byte| byte.count_ones() as usize).sum();
    whole + (count / 8 * 8..count).filter(|&index| bit(bitmap, index)).count()
}

/// What a cell means; follows from the base type (of an array: of its elements).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// [`Cell::Bool`].
    Bool,
    /// [`Cell::Int16`].
    Int2,
    /// [`Cell::Int32`].
    Int4,
    /// [`Cell::Int64`].
    Int8,
    /// [`Cell::Int64`], never negative.
    Oid,
    /// [`Cell::Float32`].
    Float4,
    /// [`Cell::Float64`].
    Float8,
    /// [`Cell::Int32`], days since 1970-01-01.
    Date,
    /// [`Cell::Int64`], microseconds since midnight.
    Time,
    /// [`Cell::Int64`], microseconds since 1970-01-01.
    Timestamp,
    /// [`Cell::Int64`], microseconds since 1970-01-01 UTC.
    TimestampTz,
    /// [`Cell::Fixed`], 16 bytes.
    Uuid,
    /// [`Cell::Bytes`].
    Bytea,
    /// [`Cell::Text`], as PostgreSQL prints it: everything else.
    Text,
}

impl Kind {
    /// Of a base type's name.
    pub fn of(base: &str) -> Kind {
        match base {
            "bool" => Kind::Bool,
            "int2" => Kind::Int2,
            "int4" => Kind::Int4,
            "int8" => Kind::Int8,
            "oid" => Kind::Oid,
            "float4" => Kind::Float4,
            "float8" => Kind::Float8,
            "date" => Kind::Date,
            "time" => Kind::Time,
            "timestamp" => Kind::Timestamp,
            "timestamptz" => Kind::TimestampTz,
            "uuid" => Kind::Uuid,
            "bytea" => Kind::Bytea,
            _ => Kind::Text,
        }
    }
}

impl model::Column {
    /// What its cells mean; for an array, its elements.
    pub fn kind(&self) -> Kind {
        Kind::of(self.element.as_deref().unwrap_or(&self.base))
    }

    /// Whether its cells are [`Cell::List`].
    pub fn is_array(&self) -> bool {
        self.base == "array"
    }

    /// What stands between elements in an array's text: the detail `delimiter`, or a
    /// comma. Of the built-in types only `box` has another.
    pub fn delimiter(&self) -> char {
        self.detail("delimiter").and_then(|delimiter| delimiter.chars().next()).unwrap_or(',')
    }

    /// The value of a detail.
    pub fn detail(&self, name: &str) -> Option<&str> {
        self.details.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
    }
}

impl Table {
    /// The column with an ordinal.
    pub fn column(&self, ordinal: u16) -> Option<&model::Column> {
        self.columns.iter().find(|column| column.ordinal == ordinal)
    }

    /// The columns that name a row, in the key's order.
    pub fn key_columns(&self) -> impl Iterator<Item = &model::Column> {
        self.key.iter().filter_map(|&ordinal| self.column(ordinal))
    }
}

/// One cell, borrowed from its batch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Cell<'a> {
    /// NULL.
    Null,
    /// Not sent by the source, which is not NULL.
    Missing,
    /// A value its layout cannot hold, such as an infinite date. `kind` is `text`, as
    /// PostgreSQL prints it, or `hex`, bytes that are not UTF-8. Open set.
    Odd {
        /// How to read `text`.
        kind: &'a str,
        /// The value.
        text: &'a str,
    },
    /// bool.
    Bool(bool),
    /// int2.
    Int16(i16),
    /// int4, date.
    Int32(i32),
    /// int8, oid, time, timestamp, timestamptz.
    Int64(i64),
    /// float4.
    Float32(f32),
    /// float8.
    Float64(f64),
    /// uuid.
    Fixed(&'a [u8]),
    /// bytea.
    Bytes(&'a [u8]),
    /// Everything else.
    Text(&'a str),
    /// An array of one dimension with lower bound 1.
    List(List<'a>),
}

impl Rows {
    /// How many rows there are.
    pub fn len(&self) -> usize {
        self.count as usize
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// The columns of which at least one cell was sent, in ordinal order.
    pub fn columns(&self) -> impl Iterator<Item = ColumnView<'_>> {
        self.columns.iter().map(|values| ColumnView::new(self.count, Some(values)))
    }

    /// The column with an ordinal. One that no row was sent is all missing.
    pub fn column(&self, ordinal: u16) -> ColumnView<'_> {
        let found = self.columns.binary_search_by_key(&ordinal, |values| values.ordinal);
        ColumnView::new(self.count, found.ok().map(|index| &self.columns[index]))
    }

    /// Bytes of memory the cells take, up to small constants. Costs nothing per cell.
    pub fn bytes(&self) -> usize {
        self.columns.iter().map(ColumnValues::bytes).sum()
    }

    /// One view for each column of the table, in the table's order.
    pub fn columns_of(&self, table: &Table) -> Vec<ColumnView<'_>> {
        table.columns.iter().map(|column| self.column(column.ordinal)).collect()
    }
}

impl ColumnValues {
    fn bytes(&self) -> usize {
        let bitmaps = [&self.validity, &self.missing].into_iter().flatten().map(Vec::len).sum::<usize>();
        let odd: usize = self.odd.iter().map(|odd| size_of::<OddCell>() + odd.text.len()).sum();
        let data = match &self.data {
            ColumnData::Plain(cells) => cells.bytes(),
            ColumnData::Lists(lists) => {
                lists.offsets.len() * 4 + lists.item_validity.as_ref().map_or(0, Vec::len) + lists.items.bytes()
            }
        };
        bitmaps + odd + data
    }
}

impl Cells {
    fn bytes(&self) -> usize {
        match self {
            Cells::Booleans(bits) => bits.len(),
            Cells::Int16(values) => values.len() * 2,
            Cells::Int32(values) => values.len() * 4,
            Cells::Int64(values) => values.len() * 8,
            Cells::Float32(values) => values.len() * 4,
            Cells::Float64(values) => values.len() * 8,
            Cells::Fixed(fixed) => fixed.data.len(),
            Cells::Utf8(array) | Cells::Binary(array) => array.offsets.len() * 4 + array.data.len(),
        }
    }
}

/// The cells of one column. Cheap to copy.
#[derive(Clone, Copy, Debug)]
pub struct ColumnView<'a> {
    count: u32,
    /// `None`: no cell was sent.
    values: Option<&'a ColumnValues>,
    /// Odd cells come in the order of their rows, so that one can be searched for.
    odd_in_order: bool,
}

impl<'a> ColumnView<'a> {
    fn new(count: u32, values: Option<&'a ColumnValues>) -> ColumnView<'a> {
        let odd_in_order = values.is_none_or(|values| values.odd.is_sorted_by_key(|odd| odd.row));
        ColumnView { count, values, odd_in_order }
    }

    /// What the host sent; `None` when no cell of the column was.
    pub fn values(&self) -> Option<&'a ColumnValues> {
        self.values
    }

    /// How many rows there are.
    pub fn len(&self) -> usize {
        self.count as usize
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Whether a cell is NULL.
    pub fn is_null(&self, row: usize) -> bool {
        let validity = self.values.and_then(|values| values.validity.as_deref());
        validity.is_some_and(|bitmap| !bit(bitmap, row)) && !self.is_missing(row)
    }

    /// Whether the source did not send a cell.
    pub fn is_missing(&self, row: usize) -> bool {
        match self.values {
            Some(values) => values.missing.as_deref().is_some_and(|bitmap| bit(bitmap, row)),
            None => true,
        }
    }

    /// How many cells are missing.
    pub fn missing(&self) -> usize {
        match self.values {
            Some(values) => values.missing.as_deref().map_or(0, |bitmap| count_bits(bitmap, self.len())),
            None => self.len(),
        }
    }

    /// The odd cell in a row, if it has one.
    pub fn odd(&self, row: usize) -> Option<&'a OddCell> {
        let odd = &self.values?.odd;
        if odd.is_empty() {
            return None;
        }
        if self.odd_in_order {
            let found = odd.binary_search_by_key(&row, |odd| odd.row as usize);
            return found.ok().map(|index| &odd[index]);
        }
        odd.iter().find(|odd| odd.row as usize == row)
    }

    /// The cell in a row.
    ///
    /// # Panics
    /// If the row is out of bounds.
    pub fn cell(&self, row: usize) -> Cell<'a> {
        assert!(row < self.len(), "row {row} of {}", self.count);
        let Some(values) = self.values else { return Cell::Missing };
        if self.is_missing(row) {
            return Cell::Missing;
        }
        if values.validity.as_deref().is_some_and(|bitmap| !bit(bitmap, row)) {
            return Cell::Null;
        }
        if let Some(odd) = self.odd(row) {
            return Cell::Odd { kind: &odd.kind, text: &odd.text };
        }
        match &values.data {
            ColumnData::Plain(cells) => cell_at(cells, row),
            ColumnData::Lists(lists) => Cell::List(List::at(lists, row)),
        }
    }

    /// The cells from first to last.
    pub fn cells(self) -> impl Iterator<Item = Cell<'a>> {
        (0..self.len()).map(move |row| self.cell(row))
    }
}

/// The elements of one array.
#[derive(Clone, Copy, Debug)]
pub struct List<'a> {
    array: &'a ListArray,
    start: usize,
    end: usize,
}

impl<'a> List<'a> {
    fn at(array: &'a ListArray, row: usize) -> List<'a> {
        List { array, start: array.offsets[row] as usize, end: array.offsets[row + 1] as usize }
    }

    /// How many elements there are.
    pub fn len(&self) -> usize {
        self.end - self.start
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.start == self.end
    }

    /// The elements: NULL or of the element type.
    pub fn cells(self) -> impl Iterator<Item = Cell<'a>> {
        let validity = self.array.item_validity.as_deref();
        (self.start..self.end).map(move |index| match validity {
            Some(bitmap) if !bit(bitmap, index) => Cell::Null,
            _ => cell_at(&self.array.items, index),
        })
    }
}

/// Lists are equal when their elements are, wherever they are kept.
impl PartialEq for List<'_> {
    fn eq(&self, other: &List<'_>) -> bool {
        self.len() == other.len() && self.cells().zip(other.cells()).all(|(mine, theirs)| mine == theirs)
    }
}

impl BytesArray {
    /// The bytes of a cell.
    ///
    /// # Panics
    /// If there is no such cell.
    pub fn get(&self, index: usize) -> &[u8] {
        &self.data[self.offsets[index] as usize..self.offsets[index + 1] as usize]
    }
}

fn cell_at(cells: &Cells, index: usize) -> Cell<'_> {
    match cells {
        Cells::Booleans(bits) => Cell::Bool(bit(bits, index)),
        Cells::Int16(values) => Cell::Int16(values[index]),
        Cells::Int32(values) => Cell::Int32(values[index]),
        Cells::Int64(values) => Cell::Int64(values[index]),
        Cells::Float32(values) => Cell::Float32(values[index]),
        Cells::Float64(values) => Cell::Float64(values[index]),
        Cells::Fixed(fixed) => {
            let width = fixed.width as usize;
            Cell::Fixed(&fixed.data[index * width..(index + 1) * width])
        }
        Cells::Binary(array) => Cell::Bytes(array.get(index)),
        Cells::Utf8(array) => match std::str::from_utf8(array.get(index)) {
            Ok(text) => Cell::Text(text),
            // The contract says it is; going on would store something else.
            Err(error) => panic!("the host sent a text that is not UTF-8: {error}"),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(texts: &[&str]) -> Cells {
        let mut array = BytesArray { offsets: vec![0], data: Vec::new() };
        for text in texts {
            array.data.extend_from_slice(text.as_bytes());
            array.offsets.push(array.data.len() as u32);
        }
        Cells::Utf8(array)
    }

    fn sample() -> Rows {
        let numbers = ColumnValues {
            ordinal: 1,
            validity: Some(vec![0b1101]),
            missing: Some(vec![0b0100]),
            odd: vec![OddCell { row: 3, kind: "text".to_owned(), text: "infinity".to_owned() }],
            data: ColumnData::Plain(Cells::Int32(vec![7, 0, 0, 0])),
        };
        let lists = ColumnValues {
            ordinal: 5,
            validity: None,
            missing: None,
            odd: vec![],
            data: ColumnData::Lists(ListArray {
                offsets: vec![0, 2, 2, 3, 3],
                item_validity: Some(vec![0b101]),
                items: texts(&["a", "", "c"]),
            }),
        };
        Rows { count: 4, columns: vec![numbers, lists] }
    }

    #[test]
    fn null_missing_and_odd_are_told_apart() {
        let rows = sample();
        let column = rows.column(1);
        let cells: Vec<_> = column.cells().collect();
        let odd = Cell::Odd { kind: "text", text: "infinity" };
        assert_eq!(cells, [Cell::Int32(7), Cell::Null, Cell::Missing, odd]);
        assert!(column.is_null(1) && !column.is_null(2) && column.is_missing(2) && !column.is_missing(1));
        assert_eq!(column.missing(), 1);
    }

    #[test]
    fn a_column_that_was_not_sent_is_all_missing() {
        let rows = sample();
        assert!(rows.column(3).cells().all(|cell| cell == Cell::Missing));
        assert_eq!(rows.column(3).missing(), 4);
    }

    #[test]
    fn lists_have_null_elements_and_may_be_empty() {
        let rows = sample();
        let Cell::List(list) = rows.column(5).cell(0) else { panic!("not a list") };
        assert_eq!(list.cells().collect::<Vec<_>>(), [Cell::Text("a"), Cell::Null]);
        let Cell::List(list) = rows.column(5).cell(1) else { panic!("not a list") };
        assert!(list.is_empty());
    }

    #[test]
    fn bits_count_from_the_least_significant() {
        assert!(bit(&[0b10, 0b1], 1) && bit(&[0b10, 0b1], 8) && !bit(&[0b10, 0b1], 0) && !bit(&[0b10], 9));
        assert_eq!(count_bits(&[0xff, 0xff], 11), 11);
        assert_eq!(count_bits(&[0b1010], 3), 1);
    }
}
