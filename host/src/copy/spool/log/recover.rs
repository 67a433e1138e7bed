//! Opening a log: reads what the last process left, and cuts its torn end.

use std::path::{Path, PathBuf};

use super::{FrameHead, FrameKind, Log, Transaction};
use crate::copy::spool::SpoolOptions;
use crate::copy::spool::index::Run;
use crate::copy::spool::log::{End, Rewind};
use crate::copy::spool::segment::{self, HEADER, Kind, Point, Scanned, Scanner};
use crate::error::Result;
use crate::position::Lsn;

impl Log {
    /// Opens the log in a directory, and makes it if there is none. Everything that is
    /// visible afterwards is durable.
    pub(in crate::copy::spool) fn open(directory: &Path, options: SpoolOptions) -> Result<Log> {
        let make = std::fs::create_dir_all(directory);
        make.map_err(|error| segment::failed("create", directory, &error))?;
        let mut log = Log::new(PathBuf::from(directory), options);
        let sequences = segment::list(directory)?;
        let last = sequences.last().copied();
        for sequence in sequences {
            log.read_segment(sequence, Some(sequence) == last)?;
        }
        if log.segments.is_empty() {
            // Numbers may begin again: nothing outside the directory names them.
            let file = segment::create(directory, 1, Lsn::ZERO)?;
            log.insert(1, file, HEADER);
            log.committed = Point { segment: 1, offset: HEADER };
            log.synced = log.committed;
            return Ok(log);
        }
        log.cut_torn_end()?;
        Ok(log)
    }

    /// Reads a segment into the index. Only the last one may end in the middle.
    fn read_segment(&mut self, sequence: u64, is_last: bool) -> Result<()> {
        let path = segment::path(&self.directory, sequence);
        let failed = |error: std::io::Error| segment::failed("read", &path, &error);
        let (file, length, inside) = segment::open(&self.directory, sequence)?;
        let torn = |offset: u64| -> Result<bool> {
            let bad = Point { segment: sequence, offset };
            Ok(is_last && !segment::was_durable(&file, length, bad).map_err(failed)?)
        };
        let Some(inside) = inside else {
            if !torn(0)? {
                return Err(segment::corrupt(&path, 0));
            }
            // The process died while it made this one; nothing was in it.
            return std::fs::remove_file(&path).map_err(|error| segment::failed("delete", &path, &error));
        };
        self.enter(sequence, inside);
        let mut scanner = Scanner::new(file.clone(), length);
        self.insert(sequence, file.clone(), length);
        loop {
            match scanner.next().map_err(failed)? {
                Scanned::Frame { head, start, end, relation } => {
                    if let (Kind::Data(FrameKind::Relation), Some(body)) = (head.kind, &relation) {
                        self.note_relation(head.head, body);
                    }
                    self.replay(sequence, head.head, head.kind, Run { start, end });
                }
                Scanned::End => return Ok(()),
                Scanned::Bad if torn(scanner.offset())? => return Ok(()),
                Scanned::Bad => return Err(segment::corrupt(&path, scanner.offset())),
            }
        }
    }

    /// Where a segment between two was deleted, the commit frame of the transaction
    /// that is open may have been in it.
    fn enter(&mut self, sequence: u64, inside: Lsn) {
        let inside = (inside != Lsn::ZERO).then_some(inside);
        if self.open.commit != inside {
            if self.open.commit.is_some() {
                self.committed = self.end_point();
            }
            self.publish();
            self.open = Transaction { commit: inside, ..Transaction::default() };
        }
        if inside.is_none() {
            self.committed = Point { segment: sequence, offset: HEADER };
        }
    }

    fn replay(&mut self, sequence: u64, head: FrameHead, kind: Kind, run: Run) {
        match kind {
            Kind::Data(kind) => {
                let table = self.open.tables.entry(head.table).or_default();
                table.note(sequence, run, &head, kind);
                if kind != FrameKind::Relation {
                    table.end = Some(End::of(&head, kind));
                    self.open.commit = Some(head.commit);
                }
            }
            Kind::Commit => {
                self.publish();
                self.committed = Point { segment: sequence, offset: run.end };
            }
            Kind::Synced => {}
            Kind::Rewind => {
                self.open = Transaction::default();
                self.note_rewind(Rewind { at: Point { segment: sequence, offset: run.start }, to: head.commit });
                self.committed = Point { segment: sequence, offset: run.end };
            }
        }
    }

    /// Cuts what is behind the last commit, makes the rest durable, and says so.
    fn cut_torn_end(&mut self) -> Result<()> {
        self.open = Transaction::default();
        if !self.segments.contains_key(&self.committed.segment) {
            // Only a transaction without its commit, its beginning released.
            return self.begin_again();
        }
        self.cut()?;
        let point = self.committed;
        let result = self.last_segment().file.sync_data();
        self.note_synced(result, point)
    }

    /// Deletes all segments and begins behind them.
    fn begin_again(&mut self) -> Result<()> {
        let last = self.last_sequence();
        // The last one first: what is left, if we die here, is cut the next time.
        for sequence in self.segments.keys().rev().copied().collect::<Vec<_>>() {
            std::fs::remove_file(self.path(sequence)).map_err(|error| self.failed_io("delete", sequence, &error))?;
        }
        self.segments.clear();
        self.rewinds.clear();
        let file = segment::create(&self.directory, last + 1, Lsn::ZERO)?;
        self.insert(last + 1, file, HEADER);
        self.committed = Point { segment: last + 1, offset: HEADER };
        self.synced = self.committed;
        Ok(())
    }
}
