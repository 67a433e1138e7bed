//! What both places to keep the state in refuse, and in the same words.

use crate::error::{Error, Result};

/// Keys of plugins, in bytes.
pub(super) const MAX_KEY: usize = 1024;
/// One value of a plugin, in bytes.
pub(super) const MAX_VALUE: usize = 1024 * 1024;
/// All values of one destination's plugin, in bytes: a plugin must not fill the disk
/// that every other destination's checkpoint is on.
const MAX_VALUES: u64 = 64 * 1024 * 1024;
/// Values of one destination's plugin.
const MAX_KEYS: u64 = 4096;

/// Whether a plugin's value may be stored, by itself.
pub(super) fn check_value(destination: &str, key: &str, value: &[u8]) -> Result<()> {
    if key.len() > MAX_KEY {
        return Err(too_large(destination, format!("the key has {} bytes, at most {MAX_KEY} may be", key.len())));
    }
    if value.len() > MAX_VALUE {
        return Err(too_large(destination, format!("the value has {} bytes, at most {MAX_VALUE} may be", value.len())));
    }
    Ok(())
}

/// Whether a plugin's value may be stored beside `others` values of `bytes` bytes in all.
pub(super) fn check_total(destination: &str, others: i64, bytes: i64, value: &[u8]) -> Result<()> {
    let (keys, bytes) = (others.max(0).cast_unsigned() + 1, bytes.max(0).cast_unsigned() + value.len() as u64);
    if keys > MAX_KEYS || bytes > MAX_VALUES {
        let what = format!(
            "{keys} values of {bytes} bytes in all would be stored, at most {MAX_KEYS} and {MAX_VALUES} may be"
        );
        return Err(too_large(destination, what));
    }
    Ok(())
}

fn too_large(destination: &str, what: String) -> Error {
    Error::permanent("state.too-large", format!("the plugin of destination `{destination}` stores too much: {what}"))
        .next("Change the plugin to keep less in its state.")
}

/// A write for a destination that is not stored.
pub(super) fn unknown_destination(destination: &str) -> Error {
    Error::permanent("state.unknown-destination", format!("the state knows no destination `{destination}`"))
        .next("This is a fault in tidegate: report it with this message.")
}

/// A state or a directory that another pipeline has.
pub(super) fn other_pipeline(place: &str, owner: &str, pipeline: &str) -> Error {
    Error::usage(
        "state.other-pipeline",
        format!("the state in {place} belongs to the pipeline `{owner}`, not to `{pipeline}`"),
    )
    .next("Give this pipeline a state directory of its own in `pipeline.state`, or its old name back.")
}
