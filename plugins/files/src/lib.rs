//! Destination plugin `files`.
