//! Destination plugin `postgres`: mirrors tables into another PostgreSQL.
//!
//! Which file does what: `mirror` is the contract, call by call; `transaction` and
//! `session` stand between it and `protocol`, the client; `merge` and `cells` write rows,
//! `ddl` and `moves` change tables, `metadata` what is stored beside them. All of it is generic over
//! `connect`, where connections and secrets come from, so that native tests run the
//! same code against a real server.

mod auth;
mod cells;
pub mod connect;
mod ddl;
mod error;
mod merge;
mod metadata;
pub mod mirror;
mod moves;
mod preflight;
mod protocol;
mod session;
pub mod settings;
mod sql;
mod target;
mod transaction;
mod types;

mod component;
