//! Counting what waits, from the files alone: whether a process writes them or not.

use std::path::Path;

use super::index::Place;
use super::segment::{self, Kind, Scanned, Scanner};
use super::{FrameHead, FrameKind};
use crate::error::Result;
use crate::position::Lsn;

/// Changes that wait, and the bytes of their messages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Waiting {
    /// How many, a TRUNCATE counted as one.
    pub rows: u64,
    /// As the source sent them.
    pub bytes: u64,
}

/// A table, and what is counted of it.
struct Counted {
    table: u32,
    after: Option<Place>,
    /// By commit, in the log's order: where the log goes back, they come again.
    commits: Vec<(Lsn, Waiting)>,
    /// Of the transaction whose commit has not come.
    open: Waiting,
}

/// Counts the committed changes of each table beyond a place (commit, ordinal) in a
/// spool's directory. Reads `budget` bytes at most; whether that was all of it.
///
/// What a running process has not written yet is not counted.
///
/// # Errors
/// `spool.io`: a file cannot be read.
pub fn count(directory: &Path, tables: &[(u32, Option<(Lsn, u64)>)], budget: u64) -> Result<(Vec<Waiting>, bool)> {
    let counted = |(table, after): &(u32, Option<Place>)| Counted {
        table: *table,
        after: *after,
        commits: Vec::new(),
        open: Waiting::default(),
    };
    let mut all: Vec<Counted> = tables.iter().map(counted).collect();
    let mut left = budget;
    let mut whole = true;
    let sequences = if directory.exists() { segment::list(directory)? } else { Vec::new() };
    for sequence in sequences {
        // One that is gone was released meanwhile.
        if !segment::path(directory, sequence).exists() {
            continue;
        }
        let (file, length, inside) = segment::open(directory, sequence)?;
        if inside == Some(Lsn::ZERO) {
            all.iter_mut().for_each(Counted::forget_open);
        }
        whole &= length <= left;
        let mut scanner = Scanner::new(file, length.min(left));
        left -= length.min(left);
        let path = segment::path(directory, sequence);
        // A frame that is not whole is being written, or was when the process died.
        while let Scanned::Frame { head, .. } =
            scanner.next().map_err(|error| segment::failed("read", &path, &error))?
        {
            all.iter_mut().for_each(|one| one.take(&head.head, head.kind, head.length));
        }
    }
    Ok((all.iter().map(Counted::sum).collect(), whole))
}

impl Counted {
    fn take(&mut self, head: &FrameHead, kind: Kind, length: usize) {
        match kind {
            Kind::Data(FrameKind::Change)
                if head.table == self.table && Some((head.commit, head.ordinal)) > self.after =>
            {
                self.open.rows += 1;
                self.open.bytes += length as u64;
            }
            Kind::Commit if self.open.rows > 0 => self.commits.push((head.commit, std::mem::take(&mut self.open))),
            Kind::Rewind => {
                self.forget_open();
                let stay = self.commits.partition_point(|(commit, _)| *commit < head.commit);
                self.commits.truncate(stay);
            }
            _ => {}
        }
    }

    fn forget_open(&mut self) {
        self.open = Waiting::default();
    }

    fn sum(&self) -> Waiting {
        let add = |sum: Waiting, (_, one): &(Lsn, Waiting)| Waiting {
            rows: sum.rows + one.rows,
            bytes: sum.bytes + one.bytes,
        };
        self.commits.iter().fold(Waiting::default(), add)
    }
}
