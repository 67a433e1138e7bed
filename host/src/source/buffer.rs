//! How the buffer grows that messages of any length are read into.

use bytes::BytesMut;

/// Bytes asked from the socket at once.
pub(super) const READ_BYTES: usize = 256 * 1024;
/// A buffer that one long message has made larger than this is let go behind it.
const KEPT_BYTES: usize = 4 << 20;

/// What is known of a buffer's size.
#[derive(Default)]
pub(super) struct Growth {
    /// It was made for a long message.
    is_long: bool,
}

impl Growth {
    /// Room for what is asked from the socket at once, or for all that is still missing of
    /// a message.
    pub(super) fn reserve(&mut self, buffer: &mut BytesMut, missing: usize) {
        if self.is_long && missing <= READ_BYTES {
            // As long as it is large enough it would be used again, and kept for ever.
            let mut shorter = BytesMut::with_capacity(buffer.len() + READ_BYTES);
            shorter.extend_from_slice(buffer);
            *buffer = shorter;
            self.is_long = false;
        }
        self.is_long |= missing > KEPT_BYTES;
        buffer.reserve(missing.max(READ_BYTES));
    }
}
