//! Cells of pgoutput's tuples.

use bytes::Bytes;

use crate::error::{Error, Result};

/// The TupleData of a row message.
#[derive(Clone, Debug)]
pub struct Tuple(Bytes);

/// The old row of an update or delete.
#[derive(Clone, Debug)]
pub struct OldTuple {
    /// `O` (identity FULL: all columns) or `K` (those of the identity).
    pub whole: bool,
    /// The cells; under `K` those outside the identity are null.
    pub tuple: Tuple,
}

/// One column of a tuple.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cell<'a> {
    /// `n`.
    Null,
    /// `u`: an unchanged TOASTed value that was not sent.
    Unchanged,
    /// `t`.
    Text(&'a [u8]),
    /// `b`.
    Binary(&'a [u8]),
}

impl Tuple {
    /// Wraps TupleData: Int16 count, then per column a kind and, for values, Int32 length and bytes.
    pub fn new(data: Bytes) -> Tuple {
        Tuple(data)
    }

    /// How many columns it has.
    pub fn len(&self) -> u16 {
        self.0.first_chunk().map_or(0, |count| u16::from_be_bytes(*count))
    }

    /// Whether it has no columns.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The columns in their order.
    pub fn cells(&self) -> Cells<'_> {
        Cells { left: self.len(), rest: self.0.get(2..).unwrap_or_default() }
    }
}

/// Iterator over the cells of a tuple.
pub struct Cells<'a> {
    left: u16,
    rest: &'a [u8],
}

impl<'a> Iterator for Cells<'a> {
    type Item = Result<Cell<'a>>;

    fn next(&mut self) -> Option<Self::Item> {
        self.left = self.left.checked_sub(1)?;
        let Some((kind, rest)) = self.rest.split_first() else { return Some(Err(cut())) };
        self.rest = rest;
        match kind {
            b'n' => return Some(Ok(Cell::Null)),
            b'u' => return Some(Ok(Cell::Unchanged)),
            _ => {}
        }
        let Some((length, rest)) = rest.split_first_chunk::<4>() else { return Some(Err(cut())) };
        let Some((value, rest)) = rest.split_at_checked(u32::from_be_bytes(*length) as usize) else {
            return Some(Err(cut()));
        };
        self.rest = rest;
        Some(Ok(if *kind == b't' { Cell::Text(value) } else { Cell::Binary(value) }))
    }
}

fn cut() -> Error {
    Error::transient("source.protocol", "a pgoutput tuple ends too early")
}
