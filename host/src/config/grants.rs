//! `[destination.grant]`: keys and `${NAME}` are this module's; what an entry means is
//! decided where it is enforced, in [`Grants::new`].

use std::path::{Path, PathBuf};

use toml::{Table, Value};

use super::section::Section;
use super::{DestinationConfig, PipelineConfig};
use crate::error::{Error, Result};
use crate::plugin::permissions::{SecretConfig, SecretSource};
use crate::plugin::{EngineOptions, Grants, GrantsConfig};

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

/// A plugin that can write where the host keeps its state, its plugins or their compiled
/// code is no longer in a sandbox, and one that can read it sees every destination's rows.
pub(super) fn check_own_files(file: &Path, destination: &DestinationConfig, pipeline: &PipelineConfig) -> Result<()> {
    let code = EngineOptions::default().cache;
    let own = [
        ("the state directory", pipeline.state.as_path()),
        ("the plugins directory", &pipeline.plugins),
        ("the cache of compiled plugins", &code),
        ("the configuration", file),
    ];
    let own = own.map(|(what, path)| (what, resolved(path)));
    for grant in &destination.grants.files {
        let granted = resolved(&grant.path);
        let inside = |path: &Path| path.starts_with(&granted) || granted.starts_with(path);
        if let Some((what, path)) = own.iter().find(|(_, path)| inside(path)) {
            return Err(Error::usage(
                "config.grant",
                format!(
                    "destination `{}`: grant.files: {:?} and {what} ({}) are one within the other",
                    destination.name,
                    grant.guest,
                    path.display()
                ),
            )
            .next("Grant a directory that holds nothing of tidegate's own."));
        }
    }
    Ok(())
}

/// A path without links, as far as it exists.
fn resolved(path: &Path) -> PathBuf {
    let absolute = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    for above in absolute.ancestors() {
        if let (Ok(there), Ok(rest)) = (above.canonicalize(), absolute.strip_prefix(above)) {
            return there.join(rest);
        }
    }
    absolute
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

/// Where a secret for the host's own use is: `reference` is `env:NAME` or `file:PATH`.
///
/// # Errors
/// `config.grant` if it is no reference, which is not repeated.
pub(super) fn secret_source(reference: &str, directory: &Path) -> Result<SecretSource> {
    const NAME: &str = "password";
    let mut config = GrantsConfig::default();
    config.secrets.insert(NAME.to_owned(), SecretConfig::Reference(reference.to_owned()));
    let grants = Grants::new(config, directory)?;
    let secret = grants.secrets.get(NAME).map(|secret| secret.source.clone());
    secret.ok_or_else(|| Error::usage("config.secret", "no secret was named").next("Write env:NAME or file:PATH."))
}

/// The secret that a reference leads to.
///
/// # Errors
/// As [`secret_source`]; `config.secret` if there is nothing behind it.
pub(super) fn read_secret(reference: &str, directory: &Path) -> Result<String> {
    secret_source(reference, directory)?.read().map_err(|why| {
        Error::usage("config.secret", why).next("Put the password there, or name where it is: env:NAME or file:PATH.")
    })
}
