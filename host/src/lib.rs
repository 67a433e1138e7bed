//! Tidegate replicates a PostgreSQL database to WebAssembly destinations.
#![warn(missing_docs)]

pub mod copy;
pub mod error;
pub mod plugin;
pub mod position;
pub mod schema;

pub use plugin::bindings::wire;
