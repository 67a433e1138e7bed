//! Settings of the destination.

use schemars::JsonSchema;
use serde::Deserialize;

/// What the files are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Format {
    /// Apache Parquet.
    #[default]
    Parquet,
    /// One JSON object a line.
    Ndjson,
}

impl Format {
    pub(crate) fn extension(self) -> &'static str {
        match self {
            Format::Parquet => "parquet",
            Format::Ndjson => "ndjson",
        }
    }
}

/// How pages of a Parquet file are compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Compression {
    /// Not at all.
    None,
    /// With Snappy.
    Snappy,
}

/// A file is closed at this many bytes of rows. As much may wait in memory before
/// it is written, hence far below the memory a plugin is given.
fn default_roll_bytes() -> u64 {
    32 * 1024 * 1024
}

/// What a change waits at most before it is durable and to be seen.
fn default_roll_seconds() -> u64 {
    1
}

/// `[destination.settings]` of the plugin `files`.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct Settings {
    /// The directory everything is written into, as it is granted.
    pub path: String,
    /// `parquet` or `ndjson`.
    #[serde(default)]
    pub format: Format,
    /// Close a file when it has this many bytes, as rows take in memory.
    #[serde(default = "default_roll_bytes")]
    #[schemars(range(min = 65536, max = 268435456))]
    pub roll_bytes: u64,
    /// Close a file when its first row waits this long.
    #[serde(default = "default_roll_seconds")]
    #[schemars(range(min = 1, max = 3600))]
    pub roll_seconds: u64,
    /// Of Parquet files; by default `snappy`.
    #[serde(default)]
    pub compression: Option<Compression>,
}
