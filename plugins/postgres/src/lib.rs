//! Destination plugin `postgres`.
