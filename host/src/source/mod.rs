//! The source: connections, the slot and its stream, the catalog, the DDL trigger.
//!
//! Two kinds of connection over one way to dial and one TLS configuration:
//! [`session`] for SQL and COPY, [`replication`] for the write-ahead log.

pub mod catalog;
pub mod config;
mod dial;
mod errors;
mod login;
pub mod pgoutput;
mod picture;
pub mod replication;
pub mod session;
mod tables;
mod tls;
pub mod trigger;
pub mod wal;

#[cfg(test)]
mod test_server;
#[cfg(test)]
mod tests;

pub use config::{SourceConfig, SslMode};
pub use replication::ReplicationConnection;
pub use session::Session;
pub use wal::{Feedback, WalMessage, WalReader, XLogData};
