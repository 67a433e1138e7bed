//! Hosting plugins: engine, limits, permissions, directory.

pub mod bindings;
pub mod build;
