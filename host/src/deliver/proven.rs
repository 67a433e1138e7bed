//! Which version of its plugin each destination last did well with, and which one it is
//! not to try again: what the process has to know of that after a restart.
//!
//! In a file of the state directory, written anew at each change. Losing it costs no row:
//! the file in the plugins directory is taken then, as it is.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::config::DestinationConfig;
use crate::status::StatusError;

const FILE: &str = "plugins.json";

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Proven {
    file: PathBuf,
    destinations: BTreeMap<String, Known>,
}

#[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
struct Known {
    #[serde(default)]
    good: Option<Good>,
    #[serde(default)]
    refused: Option<Refused>,
}

/// A version that has made rows durable.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Good {
    plugin: String,
    sha256: String,
    /// Whose signature it had.
    public_key: Option<String>,
}

/// The version that was taken back last.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Refused {
    plugin: String,
    sha256: String,
    why: StatusError,
}

impl Proven {
    /// What the last process knew. A file that cannot be read is as none.
    pub fn load(state: &Path) -> Proven {
        let file = state.join(FILE);
        let destinations = match std::fs::read(&file) {
            Ok(bytes) => serde_json::from_slice(&bytes).unwrap_or_else(|error| {
                tracing::warn!(file = %file.display(), %error, "what is known of plugins cannot be read");
                BTreeMap::new()
            }),
            Err(_) => BTreeMap::new(),
        };
        Proven { file, destinations }
    }

    /// The digest that this destination did well with, if what it asks of its plugin is
    /// the same as then.
    pub fn good(&self, config: &DestinationConfig) -> Option<&str> {
        let good = self.destinations.get(&config.name)?.good.as_ref()?;
        let wanted = config.pin.sha256.as_deref().is_none_or(|wanted| wanted == good.sha256);
        let same = good.plugin == config.plugin && good.public_key.as_deref() == config.pin.public_key();
        // It becomes part of a file's name.
        let is_digest = good.sha256.len() == 64 && good.sha256.bytes().all(|byte| byte.is_ascii_hexdigit());
        (wanted && same && is_digest).then_some(good.sha256.as_str())
    }

    /// Why this version is not to be tried again, if that is so.
    pub fn refused(&self, config: &DestinationConfig, sha256: &str) -> Option<&StatusError> {
        let refused = self.destinations.get(&config.name)?.refused.as_ref()?;
        (refused.plugin == config.plugin && refused.sha256 == sha256).then_some(&refused.why)
    }

    /// A version made rows durable.
    pub fn did_well(&mut self, config: &DestinationConfig, sha256: &str) {
        let good = Good {
            plugin: config.plugin.clone(),
            sha256: sha256.to_owned(),
            public_key: config.pin.public_key().map(str::to_owned),
        };
        self.change(&config.name, |known| known.good = Some(good));
    }

    /// A version was taken back.
    pub fn refuse(&mut self, config: &DestinationConfig, sha256: &str, why: StatusError) {
        let refused = Refused { plugin: config.plugin.clone(), sha256: sha256.to_owned(), why };
        self.change(&config.name, |known| known.refused = Some(refused));
    }

    /// The file is not the refused one any more.
    pub fn forgive(&mut self, destination: &str) {
        self.change(destination, |known| known.refused = None);
    }

    fn change(&mut self, destination: &str, change: impl FnOnce(&mut Known)) {
        let known = self.destinations.entry(destination.to_owned()).or_default();
        let before = serde_json::to_value(&*known).ok();
        change(known);
        if before == serde_json::to_value(&*known).ok() {
            return;
        }
        if let Err(error) = self.save() {
            tracing::warn!(file = %self.file.display(), %error, "what is known of plugins cannot be kept");
        }
    }

    fn save(&self) -> std::io::Result<()> {
        let directory = self.file.parent().unwrap_or(Path::new("."));
        let mut file = tempfile::NamedTempFile::new_in(directory)?;
        file.write_all(&serde_json::to_vec_pretty(&self.destinations)?)?;
        file.as_file().sync_all()?;
        file.persist(&self.file)?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    fn config(directory: &Path, keys: &str) -> DestinationConfig {
        let file = directory.join("tidegate.toml");
        let text = format!(
            "[pipeline]\nname = \"shop\"\n[source]\nurl = \"postgres://me@db/shop\"\npublication = \"shop\"\n\
             [[destination]]\nname = \"lake\"\nplugin = \"files\"\nmode = \"changes\"\n{keys}\n"
        );
        std::fs::write(&file, text).unwrap();
        Config::load(&file).unwrap().destinations.remove(0)
    }

    #[test]
    fn what_is_known_of_versions_outlives_the_process_and_holds_for_what_was_asked_of_them_then() {
        let directory = tempfile::tempdir().unwrap();
        let lake = config(directory.path(), "");
        let (good, bad) = ("ab".repeat(32), "cd".repeat(32));
        let why = StatusError { code: "plugin.taken-back".to_owned(), message: "no".to_owned(), next: None };
        let mut proven = Proven::load(directory.path());
        assert_eq!(proven.good(&lake), None);
        proven.did_well(&lake, &good);
        proven.refuse(&lake, &bad, why.clone());

        let mut proven = Proven::load(directory.path());
        assert_eq!(proven.good(&lake), Some(good.as_str()));
        assert_eq!((proven.refused(&lake, &bad), proven.refused(&lake, &good)), (Some(&why), None));
        let pinned = |keys: &str| config(directory.path(), keys);
        assert_eq!(proven.good(&pinned(&format!("sha256 = \"{good}\""))), Some(good.as_str()));
        assert_eq!(proven.good(&pinned(&format!("sha256 = \"{bad}\""))), None);
        let key = minisign::KeyPair::generate_unencrypted_keypair().unwrap().pk.to_base64();
        assert_eq!(proven.good(&pinned(&format!("public_key = \"{key}\""))), None, "nobody has looked at it");
        proven.forgive("lake");
        assert_eq!(Proven::load(directory.path()).refused(&lake, &bad), None);

        std::fs::write(directory.path().join(FILE), "{\"lake\": {\"good\": 7}}").unwrap();
        assert_eq!(Proven::load(directory.path()).good(&lake), None);
        let odd =
            format!("{{\"lake\": {{\"good\": {{\"plugin\": \"files\", \"sha256\": \"{}\"}}}}}}", "../x".repeat(16));
        std::fs::write(directory.path().join(FILE), odd).unwrap();
        assert_eq!(Proven::load(directory.path()).good(&lake), None, "it is no digest");
    }
}
