//! Table schemas: versions, history, differences and what they mean.

pub mod table;
