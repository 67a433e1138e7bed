//! Copies of tables: the spool, where changes wait meanwhile, and the waves of
//! snapshots (design, section 3).

pub mod snapshot;
pub mod spool;

pub use snapshot::{CopyDone, CopyProgress, Wave, WaveOptions, WaveTable};
pub use spool::{Frame, FrameHead, FrameKind, Spool, SpoolOptions, SpoolReader};
