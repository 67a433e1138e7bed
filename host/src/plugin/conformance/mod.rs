//! `plugin test`: what the contract asks of every plugin, asked of one, in the engine and
//! within the limits that it is run in.
//!
//! What arrives at a destination only its author can look at; what can be told from outside
//! is whether it takes everything that may come, as often as it may come, and says the truth
//! about what is durable and where its tables are.

mod rows;
mod suite;

use std::sync::Arc;

use serde::Serialize;
use serde_json::Value;

use super::{Grants, InstanceOptions, MemoryState, Plugin, PluginUsage, SettingsSchema};
use crate::error::Error;

use self::suite::Suite;

/// What came of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Outcome {
    /// It is as it should be.
    Ok,
    /// It is not.
    Failed,
    /// The plugin does not say that it can do this.
    Skipped,
}

/// One check.
#[derive(Clone, Debug, Serialize)]
pub struct Check {
    /// What is looked at.
    pub check: String,
    /// With rows of which mode; none if with none.
    pub mode: Option<&'static str>,
    /// What came of it.
    pub outcome: Outcome,
    /// What is wrong, or why it was left out.
    pub detail: Option<String>,
}

/// What came of all of them, and what it cost.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Whether none failed.
    pub ok: bool,
    /// In the order that they were made in.
    pub checks: Vec<Check>,
    /// Calls, time, memory and bytes.
    pub usage: PluginUsage,
    /// Bytes of rows in a call of `write-group`.
    pub bytes_per_call: u64,
}

/// Runs the suite, once for each mode that the plugin has. `told` gets each check as it is
/// done.
pub async fn run(plugin: &Arc<Plugin>, settings: &Value, grants: Arc<Grants>, told: &mut dyn FnMut(&Check)) -> Report {
    let mut checks = Vec::new();
    let mut add = |check: Check| {
        told(&check);
        checks.push(check);
    };
    let options = InstanceOptions::new("test", grants.clone(), Arc::new(MemoryState::default()));
    let first = [describes(plugin), fits(plugin, settings), granted(plugin, settings, &grants)];
    let goes_on = first.iter().all(|check| check.outcome != Outcome::Failed);
    first.into_iter().for_each(&mut add);
    let modes: Vec<&'static str> = ["changes", "merge"].into_iter().filter(|mode| plugin.can(mode)).collect();
    if goes_on {
        for mode in modes {
            Suite::new(plugin, &options, settings, mode, &mut add).run().await;
        }
    }
    let usage = options.usage.snapshot();
    let calls = usage.functions.get("write-group").map_or(0, |function| function.calls);
    let ok = checks.iter().all(|check| check.outcome != Outcome::Failed);
    Report { ok, checks, bytes_per_call: usage.bytes / calls.max(1), usage }
}

fn check(name: &str, outcome: std::result::Result<(), String>) -> Check {
    let (outcome, detail) = match outcome {
        Ok(()) => (Outcome::Ok, None),
        Err(why) => (Outcome::Failed, Some(why)),
    };
    Check { check: name.to_owned(), mode: None, outcome, detail }
}

fn describes(plugin: &Plugin) -> Check {
    let manifest = &plugin.manifest;
    check(
        "describe: name, version and modes",
        if manifest.name.is_empty() || manifest.version.is_empty() {
            Err("its manifest has no name or no version".to_owned())
        } else if !plugin.can("merge") && !plugin.can("changes") {
            Err("it can neither `merge` nor `changes`: it is sent no rows".to_owned())
        } else {
            Ok(())
        },
    )
}

fn fits(plugin: &Plugin, settings: &Value) -> Check {
    let text = |error: Error| format!("{} ({})", error.message(), error.code());
    let manifest = &plugin.manifest;
    let checked = SettingsSchema::new(&plugin.name, &manifest.table_settings_schema)
        .and_then(|_| SettingsSchema::new(&plugin.name, &manifest.settings_schema))
        .and_then(|schema| schema.check("its settings", settings));
    check("settings: schemas can be used, and what was given fits", checked.map_err(text))
}

fn granted(plugin: &Plugin, settings: &Value, grants: &Grants) -> Check {
    let missing = grants.missing(&plugin.manifest.permissions, settings);
    // Whether a secret is needed only the other end can tell.
    let missing = missing.into_iter().find(|missing| !missing.permission.starts_with("secret:"));
    let why = missing.map(|missing| format!("it asks for `{}`: {}", missing.permission, missing.reason));
    check("permissions: what it asks for is granted", why.map_or(Ok(()), Err))
}
