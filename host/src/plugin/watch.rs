//! Looks at a plugin's file from time to time, and says when there is something to take.
//!
//! Who copies onto a file in place writes it bit by bit, and nobody says when he is done. So
//! a file counts once nothing about it has changed for a while; one that was read in the
//! middle of a pause all the same is no whole component, and counts again when it goes on.

use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// How often the files are looked at: a second or two from dropping a file to its being
/// taken is soon enough, and a look is one system call.
pub(crate) const LOOK_EVERY: Duration = Duration::from_millis(500);
/// How long nothing about a file may have changed. Copies write without such pauses.
const SETTLE: Duration = Duration::from_secs(1);

/// What tells one content of a file from another without reading it. The time of the last
/// change of the inode cannot be set back by who writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stamp {
    device: u64,
    inode: u64,
    size: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

/// Of a file; of what a link leads to. None if there is no file.
fn stamp(path: &Path) -> Option<Stamp> {
    let metadata = std::fs::metadata(path).ok().filter(std::fs::Metadata::is_file)?;
    Some(Stamp {
        device: metadata.dev(),
        inode: metadata.ino(),
        size: metadata.size(),
        modified: (metadata.mtime(), metadata.mtime_nsec()),
        changed: (metadata.ctime(), metadata.ctime_nsec()),
    })
}

/// What a look came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Seen {
    /// There is a file, and it is another one than before.
    File,
    /// There is none any more, or none yet.
    Gone,
}

type Stamps = Vec<Option<Stamp>>;

/// A file, and what belongs to it.
#[derive(Debug)]
pub(crate) struct Watch {
    /// The file itself is the first.
    files: Vec<PathBuf>,
    /// What was there at the last look, and since when.
    last: Option<(Stamps, Instant)>,
    /// What was told.
    told: Option<Stamps>,
}

impl Watch {
    /// A file, and perhaps its signature's: a change of either is one.
    pub(crate) fn new(file: PathBuf, signature: Option<PathBuf>) -> Watch {
        Watch { files: std::iter::once(file).chain(signature).collect(), last: None, told: None }
    }

    /// Whether there is something new; each state is told once.
    pub(crate) fn look(&mut self) -> Option<Seen> {
        let stamps = self.stamps();
        self.settle(stamps, Instant::now())
    }

    /// Whether what was told is still so: what was read in between is whole.
    pub(crate) fn is_still(&self) -> bool {
        self.told.as_ref() == Some(&self.stamps())
    }

    /// Tells the same again once it has settled.
    pub(crate) fn again(&mut self) {
        (self.last, self.told) = (None, None);
    }

    fn stamps(&self) -> Stamps {
        self.files.iter().map(|file| stamp(file)).collect()
    }

    fn settle(&mut self, stamps: Stamps, now: Instant) -> Option<Seen> {
        match &self.last {
            Some((last, since)) if *last == stamps => {
                if now.duration_since(*since) < SETTLE || self.told.as_ref() == Some(&stamps) {
                    return None;
                }
            }
            _ => {
                self.last = Some((stamps, now));
                return None;
            }
        }
        let seen = if stamps.first().is_some_and(Option::is_some) { Seen::File } else { Seen::Gone };
        self.told = Some(stamps);
        Some(seen)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(size: u64) -> Stamps {
        vec![Some(Stamp { device: 1, inode: 1, size, modified: (0, 0), changed: (0, 0) })]
    }

    #[test]
    fn a_file_counts_once_when_nothing_about_it_has_changed_for_a_while() {
        let mut watch = Watch::new(PathBuf::new(), None);
        let start = Instant::now();
        let mut look = |stamps: Stamps, after: u64| watch.settle(stamps, start + Duration::from_millis(after));
        assert_eq!(look(of(1), 0), None);
        assert_eq!(look(of(2), 500), None);
        assert_eq!(look(of(2), 1000), None);
        assert_eq!(look(of(3), 1400), None);
        assert_eq!(look(of(3), 2400), Some(Seen::File));
        assert_eq!(look(of(3), 9000), None, "it was told");
        assert_eq!(look(vec![None], 9500), None);
        assert_eq!(look(of(3), 9600), None, "one that comes right back is the same");
        assert_eq!(look(of(3), 20_000), None);
        assert_eq!(look(vec![None], 21_000), None);
        assert_eq!(look(vec![None], 22_000), Some(Seen::Gone));
        assert_eq!(look(vec![None], 30_000), None);
    }

    #[test]
    fn a_file_of_the_same_size_and_time_in_anothers_place_is_another() {
        let directory = tempfile::tempdir().unwrap();
        let (file, other) = (directory.path().join("a.wasm"), directory.path().join("b"));
        std::fs::write(&file, "one").unwrap();
        std::fs::write(&other, "two").unwrap();
        let at = std::fs::metadata(&file).unwrap().modified().unwrap();
        std::fs::File::options().write(true).open(&other).unwrap().set_modified(at).unwrap();
        let before = stamp(&file);
        std::fs::rename(&other, &file).unwrap();
        assert!(before.is_some() && stamp(&file) != before);
        // Written in place, and the time set back.
        let before = stamp(&file);
        std::fs::write(&file, "eno").unwrap();
        std::fs::File::options().write(true).open(&file).unwrap().set_modified(at).unwrap();
        assert_ne!(stamp(&file), before);
        assert_eq!(stamp(directory.path()), None);
    }
}
