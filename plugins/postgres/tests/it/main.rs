//! The plugin's own code against a real PostgreSQL, over the operating system's sockets.

mod merging;
mod recovery;
mod schema;
mod session;
mod support;
mod values;
