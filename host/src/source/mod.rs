//! The source: what arrives from PostgreSQL.

pub mod pgoutput;
