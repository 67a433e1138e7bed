//! Which directory it is that the checkpoints of a state on a server rely on: they pass
//! what is in its spool, which no other directory has.

use std::fs;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use super::limits::other_pipeline;
use crate::error::{Error, Result};

/// `<pipeline> <id>`, in one line.
const FILE: &str = "directory-id";
/// A pipeline's name and an id are well below.
const MOST_BYTES: u64 = 4096;

/// A state directory beside a state that is elsewhere.
#[derive(Clone, Debug)]
pub(super) struct Directory {
    pub id: String,
    /// Where it is, for messages.
    pub path: String,
}

impl Directory {
    /// Reads who it is, or makes it somebody. The caller holds its lock.
    ///
    /// # Errors
    /// `state.other-pipeline`, `state.directory`.
    pub(super) fn identify(directory: &Path, pipeline: &str) -> Result<Directory> {
        let path = fs::canonicalize(directory).unwrap_or_else(|_| directory.to_owned()).display().to_string();
        let file = directory.join(FILE);
        let unusable = |why: String| {
            Error::usage("state.directory", format!("the state directory {path} cannot be used: {why}"))
                .next("Give the process a directory of its own that it may write, in `pipeline.state`.")
        };
        let text = match read(&file) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                let text = format!("{pipeline} {:032x}\n", rand::random::<u128>());
                write(directory, &file, &text).map_err(|error| unusable(error.to_string()))?;
                text
            }
            Err(error) => return Err(unusable(error.to_string())),
        };
        match text.trim_end().split_once(' ') {
            Some((owner, id)) if owner == pipeline && !id.is_empty() => Ok(Directory { id: id.to_owned(), path }),
            Some((owner, _)) if !owner.is_empty() && owner != pipeline => Err(other_pipeline(&path, owner, pipeline)),
            _ => Err(unusable(format!("its file {FILE} does not say whose it is"))),
        }
    }
}

fn read(file: &Path) -> std::io::Result<String> {
    use std::io::Read;
    let mut text = String::new();
    fs::File::open(file)?.take(MOST_BYTES).read_to_string(&mut text)?;
    Ok(text)
}

/// There whole or not at all, also after a crash.
fn write(directory: &Path, file: &Path, text: &str) -> std::io::Result<()> {
    let draft = file.with_extension("new");
    let mut options = fs::OpenOptions::new();
    let mut open = options.write(true).create(true).truncate(true).mode(0o600).open(&draft)?;
    open.write_all(text.as_bytes())?;
    open.sync_all()?;
    fs::rename(&draft, file)?;
    fs::File::open(directory)?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_keeps_its_id_and_its_pipeline() {
        let (one, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let first = Directory::identify(one.path(), "shop").unwrap();
        assert_eq!(Directory::identify(one.path(), "shop").unwrap().id, first.id);
        assert_ne!(Directory::identify(other.path(), "shop").unwrap().id, first.id);
        assert_eq!(Directory::identify(one.path(), "shop2").unwrap_err().code(), "state.other-pipeline");
        fs::write(one.path().join(FILE), "").unwrap();
        assert_eq!(Directory::identify(one.path(), "shop").unwrap_err().code(), "state.directory");
    }
}
