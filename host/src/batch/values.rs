//! The buffers that values are read into: one vector per column, in the wire's layout.

use super::layout::Layout;
use super::{datetime, text};
use crate::wire;

/// Values of one layout. The case is the layout, so that reading a cell is one match.
pub(super) enum Values {
    Bool(Bits),
    Int2(Vec<i16>),
    Int4(Vec<i32>),
    Int8(Vec<i64>),
    Oid(Vec<i64>),
    Float4(Vec<f32>),
    Float8(Vec<f64>),
    Date(Vec<i32>),
    Time(Vec<i64>),
    Timestamp(Vec<i64>),
    TimestampTz(Vec<i64>),
    Uuid(Vec<u8>),
    Bytea(Texts),
    Text(Texts),
}

/// Width of a uuid.
pub(super) const UUID_BYTES: usize = 16;

/// What one value takes beside its text or bytes: the width of a fixed one, or an offset.
pub(super) fn fixed_bytes(layout: Layout) -> usize {
    match layout {
        Layout::Bool => 1,
        Layout::Int2 => 2,
        Layout::Int4 | Layout::Float4 | Layout::Date | Layout::Bytea | Layout::Text => 4,
        Layout::Int8 | Layout::Oid | Layout::Float8 => 8,
        Layout::Time | Layout::Timestamp | Layout::TimestampTz => 8,
        Layout::Uuid => UUID_BYTES,
    }
}

/// Pushes what was read, or says that nothing was.
#[inline(always)]
fn push<T>(out: &mut Vec<T>, value: Option<T>) -> bool {
    match value {
        Some(value) => {
            out.push(value);
            true
        }
        None => false,
    }
}

impl Values {
    /// Empty buffers for a layout.
    pub(super) fn new(layout: Layout) -> Values {
        match layout {
            Layout::Bool => Values::Bool(Bits::default()),
            Layout::Int2 => Values::Int2(Vec::new()),
            Layout::Int4 => Values::Int4(Vec::new()),
            Layout::Int8 => Values::Int8(Vec::new()),
            Layout::Oid => Values::Oid(Vec::new()),
            Layout::Float4 => Values::Float4(Vec::new()),
            Layout::Float8 => Values::Float8(Vec::new()),
            Layout::Date => Values::Date(Vec::new()),
            Layout::Time => Values::Time(Vec::new()),
            Layout::Timestamp => Values::Timestamp(Vec::new()),
            Layout::TimestampTz => Values::TimestampTz(Vec::new()),
            Layout::Uuid => Values::Uuid(Vec::new()),
            Layout::Bytea => Values::Bytea(Texts::default()),
            Layout::Text => Values::Text(Texts::default()),
        }
    }

    /// Reads PostgreSQL's text and appends its value. False, and nothing appended, when
    /// the layout cannot hold exactly this.
    #[inline]
    pub(super) fn append(&mut self, cell: &[u8]) -> bool {
        match self {
            Values::Text(out) => {
                let valid = std::str::from_utf8(cell).is_ok();
                if valid {
                    out.push(cell);
                }
                valid
            }
            Values::Int2(out) => push(out, text::integer(cell).and_then(|value| i16::try_from(value).ok())),
            Values::Int4(out) => push(out, text::integer(cell).and_then(|value| i32::try_from(value).ok())),
            Values::Int8(out) => push(out, text::integer(cell)),
            Values::Oid(out) => push(out, text::oid(cell)),
            Values::Bool(out) => match text::boolean(cell) {
                Some(value) => {
                    out.push(value);
                    true
                }
                None => false,
            },
            Values::Float4(out) => push(out, text::float4(cell)),
            Values::Float8(out) => push(out, text::float8(cell)),
            Values::Date(out) => push(out, datetime::date(cell)),
            Values::Time(out) => push(out, datetime::time(cell)),
            Values::Timestamp(out) => push(out, datetime::timestamp(cell)),
            Values::TimestampTz(out) => push(out, datetime::timestamptz(cell)),
            Values::Uuid(out) => match text::uuid(cell) {
                Some(value) => {
                    out.extend_from_slice(&value);
                    true
                }
                None => false,
            },
            Values::Bytea(out) => {
                let read = text::bytea(cell, &mut out.data).is_some();
                if read {
                    out.close();
                }
                read
            }
        }
    }

    /// Appends zero, or nothing of a length: where the cell is null, missing or odd.
    pub(super) fn append_zero(&mut self) {
        match self {
            Values::Bool(out) => out.push(false),
            Values::Int2(out) => out.push(0),
            Values::Int4(out) | Values::Date(out) => out.push(0),
            Values::Int8(out) | Values::Oid(out) => out.push(0),
            Values::Time(out) | Values::Timestamp(out) | Values::TimestampTz(out) => out.push(0),
            Values::Float4(out) => out.push(0.0),
            Values::Float8(out) => out.push(0.0),
            Values::Uuid(out) => out.extend_from_slice(&[0; UUID_BYTES]),
            Values::Bytea(out) | Values::Text(out) => out.close(),
        }
    }

    /// How many values there are.
    pub(super) fn len(&self) -> usize {
        match self {
            Values::Bool(out) => out.len,
            Values::Int2(out) => out.len(),
            Values::Int4(out) | Values::Date(out) => out.len(),
            Values::Int8(out) | Values::Oid(out) => out.len(),
            Values::Time(out) | Values::Timestamp(out) | Values::TimestampTz(out) => out.len(),
            Values::Float4(out) => out.len(),
            Values::Float8(out) => out.len(),
            Values::Uuid(out) => out.len() / UUID_BYTES,
            Values::Bytea(out) | Values::Text(out) => out.len(),
        }
    }

    /// Bytes of texts and binaries; the rest follows from the length.
    pub(super) fn data_len(&self) -> usize {
        match self {
            Values::Bytea(out) | Values::Text(out) => out.data.len(),
            _ => 0,
        }
    }

    /// Bytes of the buffers.
    pub(super) fn capacity(&self) -> usize {
        match self {
            Values::Bool(out) => out.bits.capacity(),
            Values::Int2(out) => out.capacity() * size_of::<i16>(),
            Values::Int4(out) | Values::Date(out) => out.capacity() * size_of::<i32>(),
            Values::Int8(out) | Values::Oid(out) => out.capacity() * size_of::<i64>(),
            Values::Time(out) | Values::Timestamp(out) | Values::TimestampTz(out) => out.capacity() * size_of::<i64>(),
            Values::Float4(out) => out.capacity() * size_of::<f32>(),
            Values::Float8(out) => out.capacity() * size_of::<f64>(),
            Values::Uuid(out) => out.capacity(),
            Values::Bytea(out) | Values::Text(out) => out.offsets.capacity() * size_of::<u32>() + out.data.capacity(),
        }
    }

    /// Keeps the first values.
    pub(super) fn truncate(&mut self, len: usize) {
        match self {
            Values::Bool(out) => out.truncate(len),
            Values::Int2(out) => out.truncate(len),
            Values::Int4(out) | Values::Date(out) => out.truncate(len),
            Values::Int8(out) | Values::Oid(out) => out.truncate(len),
            Values::Time(out) | Values::Timestamp(out) | Values::TimestampTz(out) => out.truncate(len),
            Values::Float4(out) => out.truncate(len),
            Values::Float8(out) => out.truncate(len),
            Values::Uuid(out) => out.truncate(len * UUID_BYTES),
            Values::Bytea(out) | Values::Text(out) => out.truncate(len),
        }
    }

    /// Makes room for so many more values with so many bytes of text or binary.
    pub(super) fn reserve(&mut self, len: usize, data: usize) {
        match self {
            Values::Bool(out) => out.bits.reserve(len.div_ceil(8)),
            Values::Int2(out) => out.reserve(len),
            Values::Int4(out) | Values::Date(out) => out.reserve(len),
            Values::Int8(out) | Values::Oid(out) => out.reserve(len),
            Values::Time(out) | Values::Timestamp(out) | Values::TimestampTz(out) => out.reserve(len),
            Values::Float4(out) => out.reserve(len),
            Values::Float8(out) => out.reserve(len),
            Values::Uuid(out) => out.reserve(len * UUID_BYTES),
            Values::Bytea(out) | Values::Text(out) => {
                // One more for the leading 0.
                out.offsets.reserve(len + 1);
                out.data.reserve(data);
            }
        }
    }

    /// The buffers as they cross to the plugin; empty ones stay.
    pub(super) fn take(&mut self) -> wire::Cells {
        use std::mem::take;
        match self {
            Values::Bool(out) => wire::Cells::Booleans(take(out).bits),
            Values::Int2(out) => wire::Cells::Int16(take(out)),
            Values::Int4(out) | Values::Date(out) => wire::Cells::Int32(take(out)),
            Values::Int8(out) | Values::Oid(out) => wire::Cells::Int64(take(out)),
            Values::Time(out) | Values::Timestamp(out) | Values::TimestampTz(out) => wire::Cells::Int64(take(out)),
            Values::Float4(out) => wire::Cells::Float32(take(out)),
            Values::Float8(out) => wire::Cells::Float64(take(out)),
            Values::Uuid(out) => wire::Cells::Fixed(wire::FixedArray { width: UUID_BYTES as u32, data: take(out) }),
            Values::Bytea(out) => wire::Cells::Binary(take(out).into_wire()),
            Values::Text(out) => wire::Cells::Utf8(take(out).into_wire()),
        }
    }
}

/// A growing bitmap, least significant bit first. Bits beyond the length are 0.
#[derive(Default)]
pub(super) struct Bits {
    bits: Vec<u8>,
    len: usize,
}

impl Bits {
    #[inline]
    pub(super) fn push(&mut self, bit: bool) {
        if self.len.is_multiple_of(8) {
            self.bits.push(u8::from(bit));
        } else if let Some(last) = self.bits.last_mut() {
            *last |= u8::from(bit) << (self.len % 8);
        }
        self.len += 1;
    }

    pub(super) fn into_bitmap(self) -> wire::Bitmap {
        self.bits
    }

    fn truncate(&mut self, len: usize) {
        self.len = len.min(self.len);
        truncate_bits(&mut self.bits, self.len, false);
    }
}

/// Cuts a bitmap to a length; bits beyond it in the last byte get the value `fill`.
pub(super) fn truncate_bits(bits: &mut Vec<u8>, len: usize, fill: bool) {
    bits.truncate(len.div_ceil(8));
    if !len.is_multiple_of(8)
        && let Some(last) = bits.get_mut(len / 8)
    {
        let beyond = 0xffu8 << (len % 8);
        *last = if fill { *last | beyond } else { *last & !beyond };
    }
}

/// Texts or binaries one behind the other.
#[derive(Default)]
pub(super) struct Texts {
    offsets: Vec<u32>,
    data: Vec<u8>,
}

impl Texts {
    #[inline]
    fn push(&mut self, value: &[u8]) {
        self.data.extend_from_slice(value);
        self.close();
    }

    /// Ends the value whose bytes were appended to `data`. Batches are closed long before
    /// an offset would not fit (`change::FULL_BYTES`).
    #[inline]
    fn close(&mut self) {
        self.offsets.push(self.data.len() as u32);
    }

    fn len(&self) -> usize {
        self.offsets.len()
    }

    fn truncate(&mut self, len: usize) {
        self.offsets.truncate(len);
        self.data.truncate(self.offsets.last().map_or(0, |end| *end as usize));
    }

    /// Only the ends were kept: the leading 0 would cost an allocation per empty column.
    fn into_wire(self) -> wire::BytesArray {
        let mut offsets = self.offsets;
        offsets.insert(0, 0);
        wire::BytesArray { offsets, data: self.data }
    }
}
