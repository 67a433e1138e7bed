//! `tidegate check`.

use std::path::Path;
use std::process::ExitCode;

use serde::Serialize;

use super::{paint, print_json, print_text};
use crate::config::{Config, DestinationConfig};
use crate::control;
use crate::deliver::start::{self, Source};
use crate::error::{Error, Exit, Result};
use crate::plugin::{Directory, EngineOptions, Plugin, PluginEngine};
use crate::source::catalog::SourceFacts;
use crate::source::session;
use crate::source::trigger::{self, TriggerState};
use crate::status::StatusError;
use crate::store::Store;

#[derive(Debug, clap::Args)]
#[command(after_help = "Exits with 3 if anything that `run` needs is missing. Writes nothing anywhere.\n\n\
    Example:\n  tidegate check --json | jq '.checks[] | select(.ok | not)'")]
pub(super) struct Args {
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// One precondition.
#[derive(Debug, Serialize)]
struct Line {
    check: String,
    ok: bool,
    /// Met, but worth a look.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    warning: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    detail: Option<String>,
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    error: Option<StatusError>,
}

/// What was looked at so far.
#[derive(Default)]
struct Findings(Vec<Line>);

impl Findings {
    fn good(&mut self, check: impl Into<String>, detail: impl Into<String>) {
        let detail = Some(detail.into()).filter(|detail| !detail.is_empty());
        self.0.push(Line { check: check.into(), ok: true, warning: false, detail, error: None });
    }

    fn warn(&mut self, check: impl Into<String>, error: &Error) {
        let error = Some(StatusError::from(error));
        self.0.push(Line { check: check.into(), ok: true, warning: true, detail: None, error });
    }

    fn bad(&mut self, check: impl Into<String>, error: &Error) {
        let error = Some(StatusError::from(error));
        self.0.push(Line { check: check.into(), ok: false, warning: false, detail: None, error });
    }

    /// Adds what came of a check, and returns the answer if it was good.
    fn add<T>(&mut self, check: impl Into<String>, outcome: Result<T>, detail: impl FnOnce(&T) -> String) -> Option<T> {
        match outcome {
            Ok(value) => {
                self.good(check, detail(&value));
                Some(value)
            }
            Err(error) => {
                self.bad(check, &error);
                None
            }
        }
    }

    fn all_ok(&self) -> bool {
        self.0.iter().all(|line| line.ok)
    }
}

pub(super) async fn check(args: &Args, path: &Path) -> Result<ExitCode> {
    let config = Config::load(path)?;
    let mut findings = Findings::default();
    findings.good("configuration", path.display().to_string());
    match control::status(&config.pipeline.state).await {
        Ok(None) => findings.good("state", config.pipeline.state.display().to_string()),
        Ok(Some(report)) => {
            let pid = report.pid.map_or_else(|| "a process".to_owned(), |pid| format!("process {pid}"));
            findings.good("state", format!("{} is in use by {pid}", config.pipeline.state.display()));
        }
        Err(error) => findings.warn("state", &error),
    }
    check_store(&config, &mut findings).await;
    let source = check_source(&config, &mut findings).await;
    check_destinations(&config, source.as_ref(), &mut findings).await?;
    let ok = findings.all_ok();
    if args.json {
        print_json(&serde_json::json!({"ok": ok, "checks": findings.0}))?;
    } else {
        print_text(&render(&findings.0))?;
    }
    Ok(if ok { ExitCode::SUCCESS } else { ExitCode::from(Exit::No as u8) })
}

/// The server that keeps the state, if one does.
async fn check_store(config: &Config, findings: &mut Findings) {
    let Some(server) = &config.pipeline.store else { return };
    let Some(warning) = findings.add("state: server", Store::look_at_server(server).await, |_| server.place()) else {
        return;
    };
    if let Some(warning) = warning {
        findings.warn("state: server", &warning);
    }
}

/// The source and its tables, if it got that far.
async fn check_source(config: &Config, findings: &mut Findings) -> Option<Source> {
    let place = &config.source;
    // Beforehand, so that it is told from what the server says once we are in.
    findings.add("source: connection", session::connect(place).await, |_| place.endpoint())?;
    let source = findings.add("source: server, role and slots", start::look_at_source(place).await, |source| {
        let facts = &source.facts;
        format!(
            "PostgreSQL {}.{}, {} slots free",
            facts.version_num / 10_000,
            facts.version_num % 10_000,
            facts.free_slots
        )
    })?;
    for warning in &source.facts.warnings {
        findings.warn("source", warning);
    }
    check_trigger(&source.facts, findings);
    let known = start::check_state(config, &source.facts);
    findings.add(format!("source: slot {}", place.slot), known, |()| match &source.facts.slot {
        Some(slot) => {
            format!("confirmed {}, {}", slot.confirmed, slot.wal_status.as_deref().unwrap_or("state unknown"))
        }
        None => "is made at the first start".to_owned(),
    });
    let check = format!("source: publication {}", place.publication);
    match source.tables.len() {
        0 => findings.bad(
            check,
            &Error::no("publication.empty", format!("publication `{}` has no tables", place.publication))
                .next(format!("Run ALTER PUBLICATION {} ADD TABLE …;", place.publication)),
        ),
        tables => findings.good(check, format!("{tables} tables")),
    }
    Some(source)
}

fn check_trigger(facts: &SourceFacts, findings: &mut Findings) {
    let check = "source: DDL trigger";
    match (trigger::complaint(facts.trigger), facts.trigger) {
        (None, _) => findings.good(check, "at work"),
        // One can go without.
        (Some(error), TriggerState::Missing | TriggerState::Outdated) => findings.warn(check, &error),
        (Some(error), _) => findings.bad(check, &error),
    }
}

async fn check_destinations(config: &Config, source: Option<&Source>, findings: &mut Findings) -> Result<()> {
    let engine = PluginEngine::new(EngineOptions::from(config.pipeline.engine.clone()))?;
    for destination in &config.destinations {
        let place = format!("destination {}", destination.name);
        let loaded = match Directory::find(&config.pipeline.plugins, &destination.plugin) {
            Ok(file) => engine.load_pinned(&file, &destination.pin).await,
            Err(error) => Err(error),
        };
        let plugin = findings.add(format!("{place}: plugin"), loaded, |plugin| {
            format!("{} {}", plugin.manifest.name, plugin.manifest.version)
        });
        let Some(plugin) = plugin else { continue };
        findings.add(format!("{place}: settings, mode and grants"), start::check_plugin(destination, &plugin), |()| {
            format!("mode {}; {}", destination.mode.as_str(), grants(destination, &plugin))
        });
        if let Some(source) = source {
            let taken = source.tables.iter().filter(|table| destination.tables.matches(&table.schema.name)).count();
            findings.add(format!("{place}: tables"), start::check_tables(destination, &plugin, source), |()| {
                format!("{taken} of {}", source.tables.len())
            });
        }
    }
    Ok(())
}

/// What the plugin asks for, and what of it the configuration grants.
fn grants(destination: &DestinationConfig, plugin: &Plugin) -> String {
    destination.grants.explain(&plugin.manifest.permissions, &destination.settings).join("; ")
}

fn render(lines: &[Line]) -> String {
    let coloured = paint::coloured(&std::io::stdout());
    let mut text = String::new();
    for line in lines {
        let (colour, mark) = match (line.ok, line.warning) {
            (true, false) => ("32", "ok  "),
            (true, true) => ("33", "warn"),
            (false, _) => ("31", "no  "),
        };
        let mark = if coloured { format!("\x1b[{colour}m{mark}\x1b[0m") } else { mark.to_owned() };
        text.push_str(&format!("{mark} {}", line.check));
        if let Some(detail) = &line.detail {
            text.push_str(&format!(": {detail}"));
        }
        if let Some(error) = &line.error {
            text.push_str(&format!(": [{}] {}", error.code, error.message));
            if let Some(next) = &error.next {
                text.push_str(&format!("\n       next: {next}"));
            }
        }
        text.push('\n');
    }
    text.push_str(match lines.iter().filter(|line| !line.ok).count() {
        0 => "all is there",
        1 => "one thing is missing",
        _ => "several things are missing",
    });
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_line_says_ok_or_what_is_wrong_with_code_and_next_step() {
        let mut findings = Findings::default();
        findings.good("source: connection", "me@db:5432/shop");
        findings.warn("source", &Error::no("a.warning", "odd").next("Look."));
        findings.bad("source: slot", &Error::no("slot.lost", "it is lost").next("Resync."));
        assert!(!findings.all_ok());
        let text = render(&findings.0);
        assert!(text.contains("ok   source: connection: me@db:5432/shop\n"), "{text}");
        assert!(text.contains("no   source: slot: [slot.lost] it is lost\n       next: Resync.\n"), "{text}");
        assert!(text.ends_with("one thing is missing"), "{text}");
        let json = serde_json::to_value(&findings.0).unwrap();
        assert_eq!(
            json[0],
            serde_json::json!({"check": "source: connection", "ok": true, "detail": "me@db:5432/shop"})
        );
        assert_eq!(json[2]["code"], "slot.lost");
        assert_eq!(json[1]["warning"], true);
    }
}
