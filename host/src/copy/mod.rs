//! Copies of tables: the spool, where changes wait meanwhile, and the waves of
//! snapshots (design, section 3).

pub mod spool;
