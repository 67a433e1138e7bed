//! What the memory budget and the instance's own limit leave room for, at one destination.

use crate::error::Result;
use crate::memory;
use crate::schema::table::TableSchema;
use crate::wire;

use super::destination::Destination;
use super::lane::Pace;

impl Destination {
    /// Whether an instance can take a large row, which comes by itself. Beyond it would end
    /// the instance, and be sent again and again until that is laid to it.
    pub(super) fn fits(&self, schema: &TableSchema, rows: &wire::Rows, bytes: usize) -> Result<()> {
        let limit = self.parts.lane.memory_bytes() / memory::COPIES;
        if rows.count != 1 || bytes <= limit {
            return Ok(());
        }
        let key = schema.merge_key();
        let key = (!key.is_empty()).then(|| crate::batch::key_text(rows, 0, &key, schema));
        Err(memory::too_large_for_plugin(&schema.name, key.as_deref(), bytes, limit))
    }

    /// The lane's pace, as far as the shares of the memory allow it.
    pub(super) fn pace(&self) -> Pace {
        let (live, copying) = (self.parts.live.share_bytes(), self.parts.copying.share_bytes());
        let pace = self.parts.lane.pace();
        Pace {
            group_bytes: pace.group_bytes.min(live / 2),
            // Whoever waits for room must not wait for the settling by time.
            settle_bytes: pace.settle_bytes.min(live.min(copying) / 2),
            ..pace
        }
    }
}
