//! Rows for the work `boundary`, made of whatever types the includer has as `model`: those
//! of the host, and those of the SDK.

use super::model::{BytesArray, Cells, ColumnData, ColumnValues, FixedArray, Rows};

/// Rows of a batch, and its columns.
pub const ROWS: u32 = 4096;
pub const COLUMNS: u32 = 8;

/// Of each kind what tables have most.
pub fn rows() -> Rows {
    let every = || 0..ROWS;
    let cells = [
        Cells::Int64(every().map(i64::from).collect()),
        Cells::Int32(every().map(|row| (row * 7) as i32).collect()),
        Cells::Int64(every().map(|row| i64::from(row) * 1_000_003).collect()),
        Cells::Float64(every().map(|row| f64::from(row) / 3.0).collect()),
        Cells::Fixed(FixedArray { width: 16, data: every().flat_map(|row| [row as u8; 16]).collect() }),
        Cells::Utf8(texts(12)),
        Cells::Utf8(texts(30)),
        Cells::Utf8(texts(90)),
    ];
    let column = |(ordinal, cells)| ColumnValues {
        ordinal,
        // A column in two has nulls: one row in eight.
        validity: (ordinal % 2 == 0).then(|| vec![0b1111_0111; ROWS as usize / 8]),
        missing: None,
        odd: Vec::new(),
        data: ColumnData::Plain(cells),
    };
    Rows { count: ROWS, columns: (1..).zip(cells).map(column).collect() }
}

/// Texts of this length and some less.
fn texts(length: u32) -> BytesArray {
    let (mut offsets, mut data) = (vec![0], Vec::new());
    for row in 0..ROWS {
        let length = length - row % 5;
        data.extend((0..length).map(|at| b'a' + ((row + at) % 26) as u8));
        offsets.push(data.len() as u32);
    }
    BytesArray { offsets, data }
}
