//! Rows that are accepted and not yet in a file.
//!
//! They stay in memory until their file is whole: when a disk is full, the file is
//! written again from them, and nothing that was accepted is lost.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use arrow_array::RecordBatch;
use parquet::arrow::ArrowWriter;
use parquet::basic::Compression as ParquetCompression;
use parquet::errors::ParquetError;
use parquet::file::properties::WriterProperties;
use tidegate_sdk::model::Position;

use crate::arrow;
use crate::changes::Changes;
use crate::config::{Compression, Format};
use crate::manifest;
use crate::ndjson;
use crate::physical::Layout;

/// Rows in one row group: what a reader decodes at once.
const ROW_GROUP: usize = 128 * 1024;

/// What an array costs beside its cells: buffers, reference counts, its type.
const ARRAY_OVERHEAD: usize = 256;

/// One batch, in the file's own form.
pub(crate) enum Encoded {
    Arrow(RecordBatch),
    Lines(Vec<u8>),
}

impl Encoded {
    pub(crate) fn new(changes: Changes, layout: &Layout, format: Format) -> Result<Encoded, String> {
        match format {
            Format::Parquet => arrow::record_batch(changes, layout).map(Encoded::Arrow),
            Format::Ndjson => ndjson::lines(&changes, layout).map(Encoded::Lines),
        }
    }

    fn bytes(&self) -> usize {
        match self {
            Encoded::Arrow(batch) => batch.get_array_memory_size() + batch.num_columns() * ARRAY_OVERHEAD,
            Encoded::Lines(lines) => lines.len(),
        }
    }
}

/// What is known of a batch beside its rows.
pub(crate) struct Tag {
    pub ticket: u64,
    pub rows: usize,
    pub first: Position,
    pub last: Position,
    /// Of a batch of a copy: its run and its id.
    pub copy: Option<(String, String)>,
}

/// Rows for one file: one table, one schema, one run of a copy or none.
pub(crate) struct Pending {
    pub layout: Arc<Layout>,
    pub run: Option<String>,
    /// Ids of batches of a copy.
    pub batches: Vec<String>,
    pub rows: usize,
    pub bytes: usize,
    pub since: Instant,
    /// Ticket of the first group that has rows here.
    pub ticket: u64,
    pub first: Position,
    pub last: Position,
    encoded: Vec<Encoded>,
}

impl Pending {
    /// Begins with a batch.
    pub(crate) fn new(layout: Arc<Layout>, tag: Tag, encoded: Encoded) -> Pending {
        let mut pending = Pending {
            layout,
            run: tag.copy.as_ref().map(|(run, _)| run.clone()),
            batches: Vec::new(),
            rows: 0,
            bytes: 0,
            since: Instant::now(),
            ticket: tag.ticket,
            first: tag.first,
            last: tag.last,
            encoded: Vec::new(),
        };
        pending.add(tag, encoded);
        pending
    }

    /// Whether a batch belongs into the same file.
    pub(crate) fn takes(&self, layout: &Arc<Layout>, tag: &Tag) -> bool {
        Arc::ptr_eq(&self.layout, layout) && self.run.as_ref() == tag.copy.as_ref().map(|(run, _)| run)
    }

    /// Adds a batch for which [`takes`](Self::takes) holds.
    pub(crate) fn add(&mut self, tag: Tag, encoded: Encoded) {
        self.rows += tag.rows;
        self.bytes += encoded.bytes();
        self.last = tag.last;
        self.batches.extend(tag.copy.map(|(_, batch)| batch));
        self.encoded.push(encoded);
    }

    /// Writes the file under another name, syncs it, and renames it.
    pub(crate) fn write(&self, directory: &Path, name: &str, compression: Compression) -> io::Result<()> {
        fs::create_dir_all(directory)?;
        let unfinished = directory.join(format!("{name}.tmp"));
        let written = self.write_to(File::create(&unfinished)?, compression);
        if let Err(error) = written {
            let _ = fs::remove_file(&unfinished);
            return Err(error);
        }
        fs::rename(&unfinished, directory.join(name))?;
        manifest::sync_directory(directory);
        Ok(())
    }

    fn write_to(&self, file: File, compression: Compression) -> io::Result<()> {
        let out = BufWriter::with_capacity(256 * 1024, file);
        let parquet = self.encoded.iter().any(|encoded| matches!(encoded, Encoded::Arrow(_)));
        let out = if parquet {
            self.write_parquet(out, compression).map_err(io::Error::other)?
        } else {
            self.write_lines(out)?
        };
        let file = out.into_inner().map_err(|error| error.into_error())?;
        file.sync_all()
    }

    fn write_parquet(&self, out: BufWriter<File>, compression: Compression) -> Result<BufWriter<File>, ParquetError> {
        let compression = match compression {
            Compression::None => ParquetCompression::UNCOMPRESSED,
            Compression::Snappy => ParquetCompression::SNAPPY,
        };
        let properties = WriterProperties::builder()
            .set_compression(compression)
            .set_max_row_group_row_count(Some(ROW_GROUP))
            .set_created_by(concat!("tidegate-plugin-files ", env!("CARGO_PKG_VERSION")).to_owned())
            .build();
        let mut writer = ArrowWriter::try_new(out, self.layout.schema.clone(), Some(properties))?;
        for encoded in &self.encoded {
            if let Encoded::Arrow(batch) = encoded {
                writer.write(batch)?;
            }
        }
        writer.into_inner()
    }

    fn write_lines(&self, mut out: BufWriter<File>) -> io::Result<BufWriter<File>> {
        for encoded in &self.encoded {
            if let Encoded::Lines(lines) = encoded {
                out.write_all(lines)?;
            }
        }
        Ok(out)
    }
}
