//! The manifest: one JSON line for each event, in order, synced before the event
//! counts.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use tidegate_sdk::model::Position;

/// Name of the manifest below the destination's path.
pub(crate) const NAME: &str = "manifest.ndjson";

/// Version of its lines.
pub(crate) const VERSION: u32 = 1;

/// A position. LSN and ordinal are decimal texts: JSON numbers are not exact above 2^53.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PositionLine {
    pub epoch: u32,
    pub commit: String,
    pub ordinal: String,
}

impl From<Position> for PositionLine {
    fn from(position: Position) -> PositionLine {
        let Position { epoch, commit, ordinal } = position;
        PositionLine { epoch, commit: commit.to_string(), ordinal: ordinal.to_string() }
    }
}

/// A column of a table's files.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ColumnLine {
    pub name: String,
    #[serde(rename = "type")]
    pub type_name: String,
    pub nullable: bool,
    /// The source's ordinal; none for our own columns.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ordinal: Option<u16>,
    /// The type as the source declares it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub declared: Option<String>,
    /// The default, where it is a literal.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub default: Option<String>,
}

/// What happened. `table` is always the table's directory, which is its encoded name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub(crate) enum Event {
    /// The first line: whose files these are.
    Head { version: u32, pipeline: String, destination: String },
    /// From here on, files of the table have these columns.
    Schema {
        table: String,
        /// Name at the source, then at the destination: schema and name each.
        source: (String, String),
        target: (String, String),
        snapshot: String,
        /// Names of the columns that name a row.
        key: Vec<String>,
        columns: Vec<ColumnLine>,
    },
    /// The table is called so from here on: everything that was said of `from`, which stays
    /// where it is, was said of it.
    Rename { table: String, from: String },
    /// A copy begins: once it is finished, nothing before this line counts.
    BeginCopy { table: String, run: String, snapshot: String },
    /// The copy is whole, and stands at this position.
    FinishCopy { table: String, run: String, as_of: PositionLine },
    /// Rows.
    File {
        table: String,
        /// Below the manifest's directory.
        file: String,
        format: String,
        rows: u64,
        snapshot: String,
        /// Of its first and last row.
        first: PositionLine,
        last: PositionLine,
        /// For rows of a copy: its run, and the ids of their batches.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        run: Option<String>,
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        batches: Vec<String>,
    },
    /// The table was dropped here, with all its files.
    Drop { table: String },
}

#[derive(Serialize, Deserialize)]
struct Line {
    seq: u64,
    #[serde(flatten)]
    event: Event,
}

/// A copy of a table.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Run {
    pub id: String,
    pub finished: bool,
    pub files: Vec<String>,
    pub batches: Vec<String>,
}

/// What the manifest says of a table.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Known {
    /// Its last schema.
    pub schema: Option<SchemaLine>,
    /// Its last copy.
    pub run: Option<Run>,
    /// Where files of it may be: under its name, and those that it had.
    pub directories: BTreeSet<String>,
}

/// A version of a table.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct SchemaLine {
    pub snapshot: String,
    /// Names of the columns that name a row.
    pub key: Vec<String>,
    pub columns: Vec<ColumnLine>,
}

/// The open manifest and what it says.
#[derive(Debug)]
pub(crate) struct Manifest {
    file: File,
    path: PathBuf,
    /// Where the next line goes.
    end: u64,
    next: u64,
    tables: BTreeMap<String, Known>,
    /// Files of copies that were begun again.
    superseded: Vec<String>,
}

impl Manifest {
    /// Opens or creates it, and cuts off a last line that was not written whole.
    /// The inner error is a manifest that belongs to someone else or is not one.
    pub(crate) fn open(root: &Path, pipeline: &str, destination: &str) -> io::Result<Result<Manifest, String>> {
        let path = root.join(NAME);
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path)?;
        let mut manifest = Manifest { file, path, end: 0, next: 0, tables: BTreeMap::new(), superseded: Vec::new() };
        if let Err(wrong) = manifest.read(pipeline, destination)? {
            return Ok(Err(wrong));
        }
        if manifest.next == 0 {
            let (pipeline, destination) = (pipeline.to_owned(), destination.to_owned());
            manifest.append(Event::Head { version: VERSION, pipeline, destination })?;
            sync_directory(root);
        }
        Ok(Ok(manifest))
    }

    fn read(&mut self, pipeline: &str, destination: &str) -> io::Result<Result<(), String>> {
        let mut reader = BufReader::new(&self.file);
        let mut read = Vec::new();
        loop {
            read.clear();
            let length = reader.read_until(b'\n', &mut read)?;
            if length == 0 || read.last() != Some(&b'\n') {
                break;
            }
            let line: Line = match serde_json::from_slice(&read) {
                Ok(line) => line,
                Err(error) => return Ok(Err(format!("{}, byte {}: {error}", self.path.display(), self.end))),
            };
            if let Event::Head { version, pipeline: theirs, destination: other } = &line.event {
                if *version != VERSION {
                    return Ok(Err(format!("{} has version {version}, not {VERSION}", self.path.display())));
                }
                if (theirs.as_str(), other.as_str()) != (pipeline, destination) {
                    let whose = format!("destination `{other}` of pipeline `{theirs}`");
                    return Ok(Err(format!("{} belongs to {whose}", self.path.display())));
                }
            }
            self.end += length as u64;
            self.next = line.seq + 1;
            fold(&mut self.tables, &mut self.superseded, line.event);
        }
        if self.file.metadata()?.len() != self.end {
            self.file.set_len(self.end)?;
            self.file.sync_all()?;
        }
        Ok(Ok(()))
    }

    /// The number of the next line.
    pub(crate) fn next(&self) -> u64 {
        self.next
    }

    /// What is known of a table.
    pub(crate) fn table(&self, directory: &str) -> Option<&Known> {
        self.tables.get(directory)
    }

    /// The directories that files of a table may be in, and whether others have files there.
    pub(crate) fn directories(&self, directory: &str) -> Vec<(String, bool)> {
        let own = self.tables.get(directory).map(|known| known.directories.clone()).unwrap_or_default();
        let others = || self.tables.iter().filter(|(name, _)| *name != directory).map(|(_, known)| known);
        let is_shared = |place: &String| others().any(|known| known.directories.contains(place));
        own.into_iter().chain([directory.to_owned()]).map(|place| (place.clone(), is_shared(&place))).collect()
    }

    /// All files of a table, wherever they are, as the lines name them.
    pub(crate) fn files(&self, directory: &str) -> io::Result<Vec<String>> {
        let mut files: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for line in BufReader::new(File::open(&self.path)?).take(self.end).lines() {
            match serde_json::from_str::<Line>(&line?)?.event {
                Event::File { table, file, .. } => files.entry(table).or_default().push(file),
                Event::Rename { table, from } => {
                    let moved = files.remove(&from).unwrap_or_default();
                    files.insert(table, moved);
                }
                Event::Drop { table } => drop(files.remove(&table)),
                _ => {}
            }
        }
        Ok(files.remove(directory).unwrap_or_default())
    }

    /// Files of copies that were begun again, to be removed; forgets them.
    pub(crate) fn take_superseded(&mut self) -> Vec<String> {
        std::mem::take(&mut self.superseded)
    }

    /// Writes a line and syncs it. On an error nothing was written, as far as any
    /// later line is concerned.
    pub(crate) fn append(&mut self, event: Event) -> io::Result<()> {
        let line = Line { seq: self.next, event };
        let mut text = serde_json::to_vec(&line)?;
        text.push(b'\n');
        // What an append that failed has left goes first.
        if self.file.metadata()?.len() != self.end {
            self.file.set_len(self.end)?;
        }
        self.file.seek(SeekFrom::Start(self.end))?;
        self.file.write_all(&text)?;
        self.file.sync_all()?;
        self.end += text.len() as u64;
        self.next += 1;
        fold(&mut self.tables, &mut self.superseded, line.event);
        Ok(())
    }
}

fn fold(tables: &mut BTreeMap<String, Known>, superseded: &mut Vec<String>, event: Event) {
    match event {
        Event::Head { .. } => {}
        Event::Schema { table, snapshot, key, columns, .. } => {
            tables.entry(table).or_default().schema = Some(SchemaLine { snapshot, key, columns });
        }
        Event::Rename { table, from } => {
            if let Some(known) = tables.remove(&from) {
                tables.insert(table, known);
            }
        }
        Event::BeginCopy { table, run, .. } => {
            let known = tables.entry(table).or_default();
            if let Some(before) = known.run.take_if(|before| !before.finished) {
                superseded.extend(before.files);
            }
            known.run = Some(Run { id: run, ..Run::default() });
        }
        Event::FinishCopy { table, run: id, .. } => {
            let known = tables.entry(table).or_default();
            // Of a finished copy nobody asks for its files again.
            known.run = Some(Run { id, finished: true, ..Run::default() });
        }
        Event::File { table, file, run, batches, .. } => {
            let known = tables.entry(table.clone()).or_default();
            known.directories.insert(table);
            if let Some(current) = known.run.as_mut().filter(|current| Some(&current.id) == run.as_ref()) {
                current.files.push(file);
                current.batches.extend(batches);
            }
        }
        Event::Drop { table } => {
            tables.remove(&table);
        }
    }
}

/// Makes names in a directory durable, where the system lets directories be synced.
pub(crate) fn sync_directory(path: &Path) {
    if let Ok(directory) = File::open(path) {
        let _ = directory.sync_all();
    }
}
