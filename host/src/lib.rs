//! Tidegate replicates a PostgreSQL database to WebAssembly destinations.
#![warn(missing_docs)]

pub mod control;
pub mod error;
pub mod plugin;
pub mod position;
pub mod schema;
pub mod scratch;
pub mod status;
pub mod source;
pub mod store;

pub use plugin::bindings::wire;
