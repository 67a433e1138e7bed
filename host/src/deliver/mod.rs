//! Delivery: from the stream, the spool and the copies to the destinations, and back
//! from what is durable there to the slot.
//!
//! [`router`] reads the stream once. [`destination`] is one destination's own thread;
//! [`sending`], [`apply`] and [`copies`] are what it does with its plugin, [`ledger`]
//! what it has under way. [`drain`] brings a table from the spool to the stream,
//! [`copier`] from nothing to the spool. [`checkpoint`] stores what is durable, and
//! only then lets the slot go on. [`pipeline`] puts them together.

mod apply;
mod checkpoint;
mod copier;
mod copies;
mod cursors;
mod destination;
mod drain;
mod feed;
mod inbox;
mod lag;
mod lane;
mod ledger;
pub mod pipeline;
mod retry;
mod router;
mod sending;
pub mod start;
mod versions;

pub(crate) use destination::show_table;
