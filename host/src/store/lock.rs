//! One process per state: a lock that dies with the process that holds it.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{Read, Seek, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use crate::error::{Error, Result};

const LOCK_FILE: &str = "tidegate.lock";

/// Held while this lives. The file stays: removing it would let two processes lock
/// two files of one name.
#[derive(Debug)]
pub(super) struct Lock(#[expect(dead_code, reason = "open while the lock is held")] File);

impl Lock {
    /// Makes the directory (0700) if it is not there, and locks it.
    ///
    /// # Errors
    /// `state.in-use` (exit code 2) names the process that holds it;
    /// `state.directory` if the directory cannot be made or written.
    pub(super) fn take(directory: &Path) -> Result<Lock> {
        let unusable = |error: std::io::Error| {
            Error::usage(
                "state.directory",
                format!("the state directory {} cannot be used: {error}", directory.display()),
            )
            .next("Give the process a directory of its own that it may write, in `pipeline.state`.")
        };
        DirBuilder::new().recursive(true).mode(0o700).create(directory).map_err(unusable)?;
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(directory.join(LOCK_FILE))
            .map_err(unusable)?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(Errno::WOULDBLOCK) => return Err(in_use(directory, &mut file)),
            Err(error) => return Err(unusable(error.into())),
        }
        // Only for people and for the message above; the lock itself is the kernel's.
        file.set_len(0).and_then(|()| writeln!(file, "{}", std::process::id())).map_err(unusable)?;
        Ok(Lock(file))
    }
}

fn in_use(directory: &Path, file: &mut File) -> Error {
    let mut text = String::new();
    let read = file.rewind().and_then(|()| file.take(32).read_to_string(&mut text));
    let holder = match text.trim() {
        pid if read.is_ok() && !pid.is_empty() => format!("process {pid}"),
        _ => "another process".to_owned(),
    };
    Error::usage("state.in-use", format!("the state directory {} is in use by {holder}", directory.display()))
        .next(format!("Stop {holder}, or give this pipeline a state directory of its own in `pipeline.state`."))
}
