//! Tidegate replicates a PostgreSQL database to WebAssembly destinations.
#![warn(missing_docs)]

pub mod batch;
pub mod cli;
pub mod config;
pub mod control;
pub mod copy;
pub mod deliver;
pub mod error;
pub mod failpoint;
pub mod memory;
pub mod plugin;
pub mod position;
pub mod schema;
pub mod scratch;
pub mod source;
pub mod status;
pub mod store;

pub use plugin::bindings::wire;
