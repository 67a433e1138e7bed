//! Copies of tables: the spool, where changes wait meanwhile, and the waves of
//! snapshots (design, section 3).

pub mod snapshot;
pub mod spool;
pub mod stretches;

pub use snapshot::{CopyDone, CopyProgress, RowSink, Turn, Wave, WaveOptions, WaveTable};
pub use spool::{Frame, FrameHead, FrameKind, Spool, SpoolOptions, SpoolReader};
pub use stretches::{Base, Look, Reading, Stretch};
