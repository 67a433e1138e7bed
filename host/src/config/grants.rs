//! `[destination.grant]`: keys and `${NAME}` are this module's; what an entry means is
//! decided where it is enforced, in [`Grants::new`].

use std::path::Path;

use toml::{Table, Value};

use super::section::Section;
use crate::error::{Error, Result};
use crate::plugin::permissions::SecretConfig;
use crate::plugin::{Grants, GrantsConfig};

/// Reads the table; relative paths are relative to `directory`.
pub(super) fn read(file: &Path, directory: &Path, place: &str, table: &Table) -> Result<Grants> {
    let section = Section::new(file, place, table, &["network", "files", "secrets"])?;
    check_entries(file, place, &section, "network", &["address", "private", "ca"])?;
    check_entries(file, place, &section, "files", &["path", "mode"])?;
    let mut json = serde_json::Map::new();
    for key in ["network", "files"] {
        if let Some(value) = section.raw(key) {
            json.insert(key.to_owned(), section.json_of(key, value)?);
        }
    }
    if let Some(secrets) = section.table("secrets")? {
        // As they stand: `${NAME}` would put the secret itself where its name belongs.
        let value = serde_json::to_value(secrets).map_err(|error| section.invalid("secrets", error))?;
        for (name, entry) in secrets {
            if let Value::Table(entry) = entry {
                let place = format!("secret `{name}` of {place}");
                Section::new(file, place, entry, &["from", "readable"])?;
            }
        }
        json.insert("secrets".to_owned(), value);
    }
    let config: GrantsConfig = serde_json::from_value(serde_json::Value::Object(json)).map_err(|_| {
        // Without serde's text, which may quote a secret that was written down.
        Error::usage("config.invalid-value", format!("{}: an entry has the wrong form", section.place())).next(
            "Write network = [\"host:port\"], files = [{ path = \"out\", mode = \"read-write\" }], \
             secrets = { name = \"env:NAME\" } or { name = { from = \"file:/path\", readable = true } }.",
        )
    })?;
    Grants::new(config, directory).map_err(|error| error.context(section.place()))
}

/// The keys of those entries of a list that are tables.
fn check_entries(file: &Path, place: &str, section: &Section<'_>, key: &str, known: &[&str]) -> Result<()> {
    for entry in section.list(key, "a list")?.unwrap_or_default() {
        if let Value::Table(entry) = entry {
            Section::new(file, format!("`{key}` in {place}"), entry, known)?;
        }
    }
    Ok(())
}

/// The secret that `reference` (`env:NAME`, `file:PATH`) leads to, for the host's own use.
///
/// # Errors
/// `config.grant` if it is no reference, which is not repeated; `config.secret` if there
/// is nothing behind it.
pub(super) fn read_secret(reference: &str, directory: &Path) -> Result<String> {
    const NAME: &str = "password";
    let mut config = GrantsConfig::default();
    config.secrets.insert(NAME.to_owned(), SecretConfig::Reference(reference.to_owned()));
    let grants = Grants::new(config, directory)?;
    let Some(secret) = grants.secrets.get(NAME) else { return Ok(String::new()) };
    secret.source.read().map_err(|why| {
        Error::usage("config.secret", why).next("Put the password there, or name where it is: env:NAME or file:PATH.")
    })
}
