//! The directory that plugins are dropped into.

use std::path::{Path, PathBuf};

use crate::error::{Error, Result};

/// The `.wasm` files of a directory. A plugin's name is its file's, without `.wasm`.
pub struct Directory;

impl Directory {
    /// Names and files, by name. Hidden files and temporary ones of a copy under way
    /// do not count.
    ///
    /// # Errors
    /// `plugin.directory` where it cannot be read.
    pub fn list(directory: &Path) -> Result<Vec<(String, PathBuf)>> {
        let unreadable = |e: std::io::Error| {
            Error::usage(
                "plugin.directory",
                format!("the plugins directory {} cannot be read: {e}", directory.display()),
            )
            .next("Create it and put plugins into it (`tidegate plugin build`), or correct `pipeline.plugins`.")
        };
        let mut found = Vec::new();
        for entry in std::fs::read_dir(directory).map_err(unreadable)? {
            let path = entry.map_err(unreadable)?.path();
            let Some(name) =
                path.file_name().and_then(|name| name.to_str()).and_then(|name| name.strip_suffix(".wasm"))
            else {
                continue;
            };
            if !name.is_empty() && !name.starts_with('.') && path.is_file() {
                found.push((name.to_owned(), path));
            }
        }
        found.sort();
        Ok(found)
    }

    /// The file of one plugin.
    ///
    /// # Errors
    /// `plugin.missing`, which lists what is there; `plugin.directory`.
    pub fn find(directory: &Path, name: &str) -> Result<PathBuf> {
        let found = Directory::list(directory)?;
        if let Some((_, file)) = found.iter().find(|(known, _)| known == name) {
            return Ok(file.clone());
        }
        let names: Vec<_> = found.iter().map(|(name, _)| name.as_str()).collect();
        let there = if names.is_empty() { "no plugin".to_owned() } else { names.join(", ") };
        Err(Error::usage(
            "plugin.missing",
            format!(
                "there is no plugin `{}` in {}: it holds {there}",
                super::text::clean(name, 100),
                directory.display()
            ),
        )
        .next(format!(
            "Put {}.wasm there (`tidegate plugin build DIR --out {}`), or correct `plugin`.",
            super::text::clean(name, 100),
            directory.display()
        )))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plugin_that_is_not_there_is_answered_with_those_that_are() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["files.wasm", "postgres.wasm", "notes.txt", ".hidden.wasm", "half.wasm.12.tmp"] {
            std::fs::write(dir.path().join(name), b"").unwrap();
        }
        assert_eq!(Directory::find(dir.path(), "files").unwrap(), dir.path().join("files.wasm"));
        let error = Directory::find(dir.path(), "click").unwrap_err();
        assert_eq!(error.code(), "plugin.missing");
        assert!(error.message().ends_with("it holds files, postgres"), "{}", error.message());
        assert_eq!(Directory::find(dir.path(), "../files").unwrap_err().code(), "plugin.missing");
        assert_eq!(Directory::list(&dir.path().join("x")).unwrap_err().code(), "plugin.directory");
    }
}
