//! The source: connections, the slot and its stream, the catalog, the DDL trigger.
//!
//! Three kinds of connection over one way to dial and one TLS configuration: [`session`]
//! for SQL, [`copy_out`] for the rows of COPY, [`replication`] for the write-ahead log.

mod buffer;
pub mod catalog;
pub mod config;
pub mod copy_out;
mod dial;
mod errors;
mod login;
pub mod members;
pub mod pgoutput;
mod picture;
pub mod publication;
pub mod replication;
pub mod session;
mod tables;
mod tls;
pub mod transactions;
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
