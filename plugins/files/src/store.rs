//! The directory: tables that are attached, rows that wait, files that are written.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tidegate_sdk::prelude::*;

use crate::changes::Changes;
use crate::config::{Compression, Format};
use crate::manifest::{Event, Manifest, SchemaLine};
use crate::naming;
use crate::pending::{Encoded, Pending, Tag};
use crate::physical::Layout;

/// How files are written.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Options {
    pub format: Format,
    pub compression: Compression,
    pub generation: u64,
    /// All pending rows together take no more than this.
    pub roll_bytes: usize,
}

/// A table of this instance.
struct Attached {
    directory: String,
    layout: Arc<Layout>,
    /// In the order of their files.
    pending: Vec<Pending>,
    /// Ids of batches of the copy under way that were accepted.
    copied: BTreeSet<String>,
}

pub(crate) struct Store {
    root: PathBuf,
    options: Options,
    manifest: Manifest,
    tables: BTreeMap<u32, Attached>,
}

impl Store {
    /// Opens the directory and removes what an earlier instance left unfinished.
    pub(crate) fn open(root: &Path, pipeline: &str, destination: &str, options: Options) -> Result<Store, Failure> {
        let shown = root.display();
        let opened = Manifest::open(root, pipeline, destination).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::PermissionDenied => {
                let message =
                    format!("cannot write into {shown}: {error}. It must exist and be granted under this path");
                Failure::permanent("files.no-directory", message)
            }
            _ => Failure::transient("files.open", format!("cannot open the manifest in {shown}: {error}")),
        })?;
        let manifest = opened.map_err(|wrong| Failure::permanent("files.manifest", wrong))?;
        let mut store = Store { root: root.to_owned(), options, manifest, tables: BTreeMap::new() };
        store.remove_leftovers().or_transient("files.open", format!("cannot clean up in {shown}"))?;
        Ok(store)
    }

    /// Files that are unfinished, or finished and not named in the manifest.
    fn remove_leftovers(&mut self) -> io::Result<()> {
        for directory in fs::read_dir(&self.root)? {
            let directory = directory?;
            if !directory.file_type()?.is_dir() {
                continue;
            }
            for entry in fs::read_dir(directory.path())? {
                let entry = entry?;
                let name = entry.file_name();
                let Some(name) = name.to_str() else { continue };
                let unfinished = name.strip_suffix(".tmp");
                let seq = naming::seq_of(unfinished.unwrap_or(name));
                if seq.is_some_and(|seq| unfinished.is_some() || seq >= self.manifest.next()) {
                    fs::remove_file(entry.path())?;
                }
            }
        }
        self.remove_superseded();
        Ok(())
    }

    /// Files that no reader counts any more. One that stays is only a waste.
    fn remove_superseded(&mut self) {
        for file in self.manifest.take_superseded() {
            let _ = fs::remove_file(self.root.join(file));
        }
    }

    /// The last version of a table, as the manifest has it.
    pub(crate) fn schema(&self, directory: &str) -> Option<&SchemaLine> {
        self.manifest.table(directory)?.schema.as_ref()
    }

    /// Takes a table under its version, without a word in the manifest.
    pub(crate) fn attach(&mut self, table: &Table) -> Result<(), Failure> {
        let directory = naming::directory(&table.target);
        if let Some(attached) = self.tables.get_mut(&table.id)
            && attached.directory == directory
        {
            if attached.layout.table != *table {
                attached.layout = Arc::new(Layout::new(table));
            }
            return Ok(());
        }
        // It may have been here under another name.
        self.roll(table.id)?;
        let run = self.manifest.table(&directory).and_then(|known| known.run.as_ref());
        let copied = run.filter(|run| !run.finished).map(|run| run.batches.iter().cloned().collect());
        let attached = Attached {
            directory,
            layout: Arc::new(Layout::new(table)),
            pending: Vec::new(),
            copied: copied.unwrap_or_default(),
        };
        self.tables.insert(table.id, attached);
        Ok(())
    }

    fn attached(&self, table_id: u32) -> Result<&Attached, Failure> {
        self.tables.get(&table_id).ok_or_else(|| {
            let message = format!("table {table_id} was written to before it was attached");
            Failure::permanent("files.not-attached", message).of_table(table_id)
        })
    }

    fn append(&mut self, event: Event) -> Result<(), Failure> {
        let what = format!("cannot append to the manifest in {}", self.root.display());
        self.manifest.append(event).or_transient("files.manifest-write", what)
    }

    /// Says in the manifest which columns the table's files have, if it does not yet.
    fn announce(&mut self, layout: &Layout) -> Result<(), Failure> {
        let table = &layout.table;
        let directory = naming::directory(&table.target);
        let snapshot = table.snapshot.to_string();
        let key: Vec<String> = table.key_columns().map(|column| column.name.clone()).collect();
        let line = SchemaLine { snapshot, key, columns: layout.lines() };
        if self.schema(&directory) == Some(&line) {
            return Ok(());
        }
        let SchemaLine { snapshot, key, columns } = line;
        let name = |name: &TableName| (name.schema.clone(), name.name.clone());
        self.append(Event::Schema {
            table: directory,
            source: name(&table.source),
            target: name(&table.target),
            snapshot,
            key,
            columns,
        })
    }

    pub(crate) fn begin_copy(&mut self, table: &Table, run: &str) -> Result<(), Failure> {
        self.attach(table)?;
        let directory = naming::directory(&table.target);
        if self.run(&directory).is_some_and(|(known, finished)| known == run && !finished) {
            return Ok(());
        }
        // Rows of an earlier run go, changes before this one stay.
        if let Some(attached) = self.tables.get_mut(&table.id) {
            attached.pending.retain(|pending| pending.run.is_none());
            attached.copied.clear();
        }
        self.roll(table.id)?;
        fs::create_dir_all(self.root.join(&directory))
            .or_transient("files.write", format!("cannot make the directory {directory}"))?;
        self.announce(&Layout::new(table))?;
        let snapshot = table.snapshot.to_string();
        self.append(Event::BeginCopy { table: directory, run: run.to_owned(), snapshot })?;
        self.remove_superseded();
        Ok(())
    }

    fn run(&self, directory: &str) -> Option<(&str, bool)> {
        let run = self.manifest.table(directory)?.run.as_ref()?;
        Some((&run.id, run.finished))
    }

    pub(crate) fn finish_copy(&mut self, table: &Table, run: &str, as_of: Position) -> Result<(), Failure> {
        self.attach(table)?;
        let directory = naming::directory(&table.target);
        match self.run(&directory) {
            Some((known, true)) if known == run => return Ok(()),
            Some((known, false)) if known == run => {}
            other => {
                let known = other.map_or("none", |(known, _)| known);
                let message = format!("copy run {run} of {} cannot be finished: the run here is {known}", table.source);
                return Err(Failure::permanent("fenced", message).of_table(table.id));
            }
        }
        self.roll(table.id)?;
        self.append(Event::FinishCopy { table: directory, run: run.to_owned(), as_of: as_of.into() })?;
        if let Some(attached) = self.tables.get_mut(&table.id) {
            attached.copied.clear();
        }
        Ok(())
    }

    /// Whether the table may go where it goes after a change.
    pub(crate) fn check_place(&self, before: &Table, after: &Table) -> Result<(), Failure> {
        let (from, to) = (naming::directory(&before.target), naming::directory(&after.target));
        if from == to || self.manifest.table(&from).is_none() || self.manifest.table(&to).is_none() {
            return Ok(());
        }
        let message =
            format!("{} is to become {to}, and there is a log of that name. Map it to another name", before.source);
        Err(Failure::permanent("name-collision", message).of_table(after.id))
    }

    /// A new version of the table: a new file begins with its columns, under its name.
    pub(crate) fn change_schema(&mut self, before: &Table, after: &Table) -> Result<(), Failure> {
        self.roll(after.id)?;
        self.check_place(before, after)?;
        let (from, table) = (naming::directory(&before.target), naming::directory(&after.target));
        if from != table && self.manifest.table(&from).is_some() {
            self.append(Event::Rename { table, from })?;
        }
        self.attach(after)?;
        self.announce(&Layout::new(after))
    }

    /// Takes all batches of a group, or none.
    pub(crate) fn accept(&mut self, group: Group) -> Result<(), Failure> {
        let mut taken = Vec::with_capacity(group.batches.len());
        for batch in group.batches {
            let table_id = batch.table_id;
            let attached = self.attached(table_id)?;
            let copy = match &batch.content {
                Content::Copy(copy) => {
                    self.check_run(attached, table_id, &copy.run)?;
                    if attached.copied.contains(&copy.batch_id) {
                        continue;
                    }
                    Some((copy.run.clone(), copy.batch_id.clone()))
                }
                _ => None,
            };
            let layout = attached.layout.clone();
            let changes = Changes::new(batch.content, &layout)?;
            if changes.len() == 0 && copy.is_none() {
                continue;
            }
            let broken = |error: String| {
                let message = format!("a batch of {} breaks the contract: {error}", layout.table.source);
                Failure::permanent("files.bad-batch", message).of_table(table_id)
            };
            changes.check().map_err(broken)?;
            if changes.len() == 0 {
                continue;
            }
            let (first, last) = (changes.position(0), changes.position(changes.len() - 1));
            let tag = Tag { ticket: group.ticket, rows: changes.len(), first, last, copy };
            let encoded = Encoded::new(changes, &layout, self.options.format).map_err(broken)?;
            taken.push((table_id, layout, tag, encoded));
        }
        for (table_id, layout, tag, encoded) in taken {
            if let Some(attached) = self.tables.get_mut(&table_id) {
                attached.push(layout, tag, encoded);
            }
        }
        Ok(())
    }

    fn check_run(&self, attached: &Attached, table_id: u32, run: &str) -> Result<(), Failure> {
        match self.run(&attached.directory) {
            Some((known, false)) if known == run => Ok(()),
            other => {
                let source = &attached.layout.table.source;
                let known = other.map_or("none", |(known, _)| known);
                let message = format!("rows of copy run {run} of {source} came, but the run under way is {known}");
                Err(Failure::permanent("fenced", message).of_table(table_id))
            }
        }
    }

    /// The highest ticket all rows of which are in files: the one before the first
    /// that is still pending.
    pub(crate) fn durable(&self, accepted: u64) -> u64 {
        self.pending().map(|pending| pending.ticket.saturating_sub(1)).min().unwrap_or(accepted)
    }

    /// Age of the oldest pending row.
    pub(crate) fn oldest(&self) -> Option<Duration> {
        self.pending().map(|pending| pending.since.elapsed()).max()
    }

    fn pending(&self) -> impl Iterator<Item = &Pending> {
        self.tables.values().flat_map(|attached| &attached.pending)
    }

    /// Writes the files of the biggest tables until the rest fits.
    pub(crate) fn roll_over_limit(&mut self) -> Result<(), Failure> {
        while self.pending().map(|pending| pending.bytes).sum::<usize>() > self.options.roll_bytes {
            let bytes = |attached: &Attached| attached.pending.iter().map(|pending| pending.bytes).sum::<usize>();
            let biggest = self.tables.iter().max_by_key(|(_, attached)| bytes(attached)).map(|(&id, _)| id);
            let Some(table_id) = biggest else { break };
            self.roll(table_id)?;
        }
        Ok(())
    }

    /// Writes the files of all tables whose first row waits this long.
    pub(crate) fn roll_older_than(&mut self, age: Duration) -> Result<(), Failure> {
        let due = |attached: &Attached| attached.pending.iter().any(|pending| pending.since.elapsed() >= age);
        let tables: Vec<u32> = self.tables.iter().filter(|(_, it)| due(it)).map(|(&id, _)| id).collect();
        tables.into_iter().try_for_each(|table_id| self.roll(table_id))
    }

    /// Writes all pending rows of a table. What fails stays pending.
    fn roll(&mut self, table_id: u32) -> Result<(), Failure> {
        loop {
            let Some(attached) = self.tables.get(&table_id) else { return Ok(()) };
            let Some(pending) = attached.pending.first() else { return Ok(()) };
            let (layout, directory) = (pending.layout.clone(), attached.directory.clone());
            self.announce(&layout)?;
            let event = self.write_file(table_id, &directory)?;
            self.append(event)?;
            if let Some(attached) = self.tables.get_mut(&table_id) {
                attached.pending.remove(0);
            }
        }
    }

    /// Writes the first pending file of a table and returns its line for the manifest.
    fn write_file(&self, table_id: u32, directory: &str) -> Result<Event, Failure> {
        let Options { format, compression, generation, .. } = self.options;
        let pending = self.attached(table_id)?.pending.first();
        let pending = pending.ok_or_else(|| Failure::transient("files.write", "nothing is pending"))?;
        let name = naming::file(self.manifest.next(), generation, format.extension());
        let file = format!("{directory}/{name}");
        host::working(&file);
        pending
            .write(&self.root.join(directory), &name, compression)
            .or_transient("files.write", format!("cannot write {file}"))?;
        host::count("files", 1);
        host::count("rows", pending.rows as u64);
        Ok(Event::File {
            table: directory.to_owned(),
            file,
            format: format.extension().to_owned(),
            rows: pending.rows as u64,
            snapshot: pending.layout.table.snapshot.to_string(),
            first: pending.first.into(),
            last: pending.last.into(),
            run: pending.run.clone(),
            batches: pending.batches.clone(),
        })
    }

    pub(crate) fn drop_table(&mut self, table: &Table) -> Result<(), Failure> {
        self.tables.remove(&table.id);
        let directory = naming::directory(&table.target);
        let failed = |error: io::Error| {
            let message = format!("cannot remove {directory}: {error}");
            Failure::transient("files.drop", message).of_table(table.id)
        };
        let places = self.manifest.directories(&directory);
        // Files that stand among those of others; read before nothing names them any more.
        let shared = match places.iter().any(|(_, shared)| *shared) {
            true => self.manifest.files(&directory).map_err(failed)?,
            false => Vec::new(),
        };
        if self.manifest.table(&directory).is_some() {
            self.append(Event::Drop { table: directory.clone() })?;
        }
        let removed = shared.iter().map(|file| fs::remove_file(self.root.join(file)));
        let whole = places.iter().filter(|(_, shared)| !shared);
        for result in removed.chain(whole.map(|(place, _)| fs::remove_dir_all(self.root.join(place)))) {
            match result {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(error)),
                _ => {}
            }
        }
        Ok(())
    }
}

impl Attached {
    fn push(&mut self, layout: Arc<Layout>, tag: Tag, encoded: Encoded) {
        self.copied.extend(tag.copy.as_ref().map(|(_, batch)| batch.clone()));
        match self.pending.last_mut() {
            Some(last) if last.takes(&layout, &tag) => last.add(tag, encoded),
            _ => self.pending.push(Pending::new(layout, tag, encoded)),
        }
    }
}
