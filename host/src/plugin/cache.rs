//! Compiled plugins, kept between runs.
//!
//! Compiled code is machine code that runs outside the sandbox, so it is taken only from
//! a directory that nobody else can write to, never from the plugins directory. The
//! checksum finds damage (a full disk, a crash); against malice stands the directory.

use std::fs::{self, File};
use std::io::{Read as _, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use super::bindings::wire::Manifest;
use crate::error::{Error, Result};

const MAGIC: &[u8; 16] = b"tidegate-code-2\n";
/// A Python guest's code has 60 MB.
const MOST_BYTES: u64 = 1 << 30;
/// Files kept; the one not used for the longest time goes first.
const MOST_FILES: usize = 64;

/// A directory of compiled components.
#[derive(Debug)]
pub(crate) struct Cache(PathBuf);

/// What a file of it holds.
pub(crate) struct Compiled {
    pub(crate) manifest: Manifest,
    pub(crate) code: Vec<u8>,
}

impl Cache {
    /// Makes the directory if need be.
    ///
    /// # Errors
    /// `plugin.cache` where it cannot be made, or others could write to it.
    pub(crate) fn open(directory: &Path) -> Result<Cache> {
        let bad = |why: String| {
            Error::usage(
                "plugin.cache",
                format!("the cache of compiled plugins {} cannot be used: {why}", directory.display()),
            )
            .next("Make it a directory that belongs to the user who runs tidegate, with mode 0700, or remove it.")
        };
        if let Some(parent) = directory.parent() {
            fs::create_dir_all(parent).map_err(|e| bad(e.to_string()))?;
        }
        match fs::DirBuilder::new().mode(0o700).create(directory) {
            Err(e) if e.kind() != std::io::ErrorKind::AlreadyExists => return Err(bad(e.to_string())),
            _ => {}
        }
        let metadata = fs::symlink_metadata(directory).map_err(|e| bad(e.to_string()))?;
        if !metadata.is_dir() {
            return Err(bad("it is not a directory".into()));
        }
        if metadata.uid() != rustix::process::geteuid().as_raw() {
            return Err(bad("it belongs to another user".into()));
        }
        if metadata.mode() & 0o022 != 0 {
            return Err(bad(format!("others may write to it (mode {:04o})", metadata.mode() & 0o7777)));
        }
        Ok(Cache(directory.to_owned()))
    }

    /// What is kept for `key`. A file that is damaged is removed.
    pub(crate) fn load(&self, key: &str) -> Option<Compiled> {
        let path = self.path(key);
        let file = File::open(&path).ok()?;
        // For the order of removal; a cache on a read-only file system works all the same.
        let _ = file.set_modified(SystemTime::now());
        let mut bytes = Vec::new();
        let compiled = match file.take(MOST_BYTES + 1).read_to_end(&mut bytes) {
            Ok(_) => parse(bytes),
            Err(_) => None,
        };
        if compiled.is_none() {
            tracing::warn!(file = %path.display(), "a compiled plugin in the cache is damaged and will be made again");
            let _ = fs::remove_file(&path);
        }
        compiled
    }

    /// Keeps code by temporary file and rename. Not being able to is no reason to stop.
    pub(crate) fn store(&self, key: &str, manifest: &Manifest, code: &[u8]) {
        if let Err(error) = self.try_store(key, manifest, code) {
            tracing::warn!(directory = %self.0.display(), %error, "a compiled plugin cannot be kept");
        }
        self.prune();
    }

    fn try_store(&self, key: &str, manifest: &Manifest, code: &[u8]) -> std::io::Result<()> {
        let manifest = serde_json::to_vec(&Stored::from(manifest))?;
        let length = u32::try_from(manifest.len()).map_err(std::io::Error::other)?.to_le_bytes();
        let sum = Sha256::new().chain_update(length).chain_update(&manifest).chain_update(code).finalize();
        let mut file = tempfile::NamedTempFile::new_in(&self.0)?;
        for part in [&MAGIC[..], &sum, &length, &manifest, code] {
            file.write_all(part)?;
        }
        file.persist(self.path(key))?;
        Ok(())
    }

    fn prune(&self) {
        let Ok(entries) = fs::read_dir(&self.0) else { return };
        let mut files: Vec<_> =
            entries.flatten().filter_map(|e| Some((e.metadata().ok()?.modified().ok()?, e.path()))).collect();
        files.sort();
        let excess = files.len().saturating_sub(MOST_FILES);
        for (_, path) in files.drain(..excess) {
            let _ = fs::remove_file(path);
        }
    }

    fn path(&self, key: &str) -> PathBuf {
        self.0.join(format!("{key}.code"))
    }
}

fn parse(mut bytes: Vec<u8>) -> Option<Compiled> {
    let (head, rest) = bytes.split_at_checked(MAGIC.len() + 32)?;
    let (magic, sum) = head.split_at(MAGIC.len());
    if magic != MAGIC || Sha256::digest(rest).as_slice() != sum {
        return None;
    }
    let (length, rest) = rest.split_first_chunk::<4>()?;
    let manifest = rest.get(..usize::try_from(u32::from_le_bytes(*length)).ok()?)?;
    let at = head.len() + length.len() + manifest.len();
    let manifest = serde_json::from_slice::<Stored>(manifest).ok()?.into();
    bytes.drain(..at);
    Some(Compiled { manifest, code: bytes })
}

/// [`Manifest`], which is generated, as JSON.
#[derive(Serialize, Deserialize)]
struct Stored {
    name: String,
    version: String,
    description: String,
    settings_schema: String,
    table_settings_schema: String,
    capabilities: Vec<String>,
    permissions: Vec<String>,
    details: Vec<(String, String)>,
}

impl From<&Manifest> for Stored {
    fn from(manifest: &Manifest) -> Stored {
        let Manifest {
            name,
            version,
            description,
            settings_schema,
            table_settings_schema,
            capabilities,
            permissions,
            details,
        } = manifest.clone();
        Stored {
            name,
            version,
            description,
            settings_schema,
            table_settings_schema,
            capabilities,
            permissions,
            details,
        }
    }
}

impl From<Stored> for Manifest {
    fn from(stored: Stored) -> Manifest {
        let Stored {
            name,
            version,
            description,
            settings_schema,
            table_settings_schema,
            capabilities,
            permissions,
            details,
        } = stored;
        Manifest {
            name,
            version,
            description,
            settings_schema,
            table_settings_schema,
            capabilities,
            permissions,
            details,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt as _;

    fn manifest() -> Manifest {
        Stored {
            name: "n".into(),
            version: "1".into(),
            description: String::new(),
            settings_schema: "{}".into(),
            table_settings_schema: String::new(),
            capabilities: vec!["merge".into()],
            permissions: vec![],
            details: vec![("a".into(), "b".into())],
        }
        .into()
    }

    #[test]
    fn what_was_kept_comes_back_and_a_damaged_file_does_not() {
        let root = tempfile::tempdir().unwrap();
        let cache = Cache::open(&root.path().join("a/b")).unwrap();
        assert!(cache.load("k").is_none());
        cache.store("k", &manifest(), b"machine code");
        let compiled = cache.load("k").unwrap();
        assert_eq!(compiled.code, b"machine code");
        assert_eq!(compiled.manifest.details, manifest().details);
        let file = root.path().join("a/b/k.code");
        let whole = fs::read(&file).unwrap();
        for at in 0..whole.len() {
            let mut damaged = whole.clone();
            damaged[at] ^= 1;
            fs::write(&file, &damaged).unwrap();
            assert!(cache.load("k").is_none(), "byte {at}");
            fs::write(&file, &whole[..at]).unwrap();
            assert!(cache.load("k").is_none(), "cut at {at}");
        }
        assert!(!file.exists());
    }

    #[test]
    fn a_directory_that_others_can_write_to_is_not_trusted() {
        let root = tempfile::tempdir().unwrap();
        fs::set_permissions(root.path(), fs::Permissions::from_mode(0o777)).unwrap();
        assert_eq!(Cache::open(root.path()).unwrap_err().code(), "plugin.cache");
    }

    #[test]
    fn the_oldest_goes_when_there_are_too_many() {
        let root = tempfile::tempdir().unwrap();
        let cache = Cache::open(&root.path().join("c")).unwrap();
        for i in 0..MOST_FILES + 3 {
            cache.store(&format!("k{i}"), &manifest(), b"x");
        }
        assert_eq!(fs::read_dir(root.path().join("c")).unwrap().count(), MOST_FILES);
    }
}
