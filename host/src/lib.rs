//! Tidegate replicates a PostgreSQL database to WebAssembly destinations.
#![warn(missing_docs)]

pub mod error;
pub mod plugin;
pub mod position;
pub mod schema;
pub mod store;

pub use plugin::bindings::wire;
