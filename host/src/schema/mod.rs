//! Table schemas: versions, history, differences and what they mean.

pub mod barrier;
mod calendar;
pub mod change;
pub mod classify;
pub mod decide;
pub mod defaults;
pub mod history;
pub mod moment;
pub mod plan;
mod shape;
pub mod table;
pub mod tombstone;
pub mod wire;

#[cfg(test)]
pub(crate) mod samples;
