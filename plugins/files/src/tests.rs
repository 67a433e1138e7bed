//! The plugin as the host calls it, on a temporary directory.

mod build;
mod formats;
mod lifecycle;
