//! Delivery: from the stream, the spool and the copies to the destinations, and back
//! from what is durable there to the slot.
//!
//! [`router`] reads the stream once. [`destination`] is one destination's own thread;
//! [`sending`], [`apply`] and [`copies`] are what it does with its plugin, [`looked`] what it
//! finds after a change that was cut off, [`ledger`] what it has under way. Rows that it refuses are found by [`isolate`], in a copy that
//! the plugin does not survive by [`doubt`], and kept by [`refused`], with what
//! [`quarantine`] makes of later changes. [`drain`] brings a table from the spool to the
//! stream, [`copier`] and [`copy_run`] from nothing to the spool. [`checkpoint`] stores
//! what is durable, and only then lets the slot go on. [`members`] says who takes which
//! table, [`barriers`] which tables wait with a change of schema, [`rollout`] who has which
//! version, [`partitions`] when one that is made of others has changed without a change of
//! rows, [`identity`] whether the source is still who it was, [`publication`] how to go on
//! when the publication is not, [`away`] and [`told`] what messages say of all that,
//! [`unseen`] what no message and no row has said, [`plugins`] when there is another version
//! of a plugin, [`swap`] how it takes over, [`proven`] which did well, [`waiting`] who waits for one, [`retention`] which versions of a schema
//! nobody needs any more, [`tombstones`] what is left of a table, [`room`] what there is memory for. [`pipeline`] puts them
//! together.

mod apply;
mod away;
mod barriers;
mod checkpoint;
mod clean;
mod copier;
mod copies;
mod copy_run;
mod cursors;
pub(crate) mod decisions;
mod destination;
mod doubt;
mod drain;
mod feed;
mod gather;
mod identity;
mod inbox;
mod isolate;
mod lag;
mod lane;
mod launch;
mod ledger;
mod looked;
mod marks;
pub mod members;
mod membership;
mod partitions;
pub mod pipeline;
mod plugins;
mod proven;
mod publication;
mod quarantine;
mod refused;
mod reselect;
mod resume;
mod retention;
mod retry;
mod rollout;
mod room;
mod router;
mod routes;
mod sending;
mod slot;
pub mod start;
mod stretches;
mod swap;
mod told;
mod tombstones;
mod trigger_watch;
mod unseen;
mod versions;
mod waiting;

pub(crate) use destination::show_table;
