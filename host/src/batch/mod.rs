//! Rows decoded into columns, and folded.
//!
//! The memory path of a cell, from the socket to the plugin:
//!
//! 1. The replication connection reads a message into a buffer; a [`Tuple`] is a
//!    reference-counted slice of it, and its cells are slices of that. `COPY` lines are
//!    the same without the tuple.
//! 2. [`ColumnBuilder::append`] reads the cell's text and pushes the value into the
//!    column's vector, whose layout is already the wire's. This is the only copy that
//!    the host makes of a cell on its way, and it allocates nothing but the vector's
//!    growth: vectors start at the size the last batch needed. Exceptions: an odd cell
//!    keeps its text; an escaped field or array item is unescaped into a scratch buffer.
//! 3. `finish` moves the vectors into `wire` types. A batch is not changed after that:
//!    for `changes` it crosses as it is; [`fold`] takes the rows that `merge` needs into
//!    new vectors, column by column.
//! 4. The component model lowers each vector into the guest's memory in one copy.
//!
//! No text is an error. What a layout cannot hold exactly is an odd cell; what the
//! source did not send is missing; an unknown type is text.
//!
//! [`Tuple`]: crate::source::pgoutput::Tuple

mod array;
mod change;
mod column;
mod copy;
mod datetime;
mod fold;
mod gather;
mod layout;
#[cfg(test)]
mod oracle_tests;
mod pick;
mod project;
mod render;
#[cfg(test)]
mod testing;
mod text;
mod text_row;
mod values;

pub use change::{ChangeBatch, ChangeBuilder, RelationMap, RowPosition};
pub use column::ColumnBuilder;
pub use copy::{CopyBuilder, column_list, key_of_line};
pub use fold::fold;
pub use gather::{content_bytes, rows_bytes, rows_weight};
pub use layout::{ColumnLayout, Layout, layout};
pub use pick::{is_whole, pick, refusable, units};
pub use text_row::{TextCell, TextRow, complete, key_text, rows_of_text};
