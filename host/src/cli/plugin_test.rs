//! `tidegate plugin new` and `tidegate plugin test`: from nothing to a plugin that is known
//! to keep the contract.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::ValueEnum;
use serde_json::{Value, json};

use super::{paint, print_json, print_text};
use crate::error::{Error, Exit, Result};
use crate::plugin::conformance::{self, Check, Outcome, Report};
use crate::plugin::{EngineOptions, Grants, GrantsConfig, PluginEngine, template};

#[derive(Debug, clap::Args)]
pub(super) struct NewArgs {
    /// Name of the plugin, and of the directory that is made
    #[arg(value_name = "NAME")]
    name: String,
    /// What it is written in
    #[arg(long, value_enum, default_value_t = Language::Rust)]
    lang: Language,
    /// The SDK's directory; by default that of the sources this binary was made of
    #[arg(long, value_name = "DIR")]
    sdk: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Language {
    Rust,
    Python,
    Javascript,
}

pub(super) fn new(args: &NewArgs) -> Result<ExitCode> {
    let missing = match args.lang {
        Language::Rust => None,
        Language::Python => Some("Python"),
        Language::Javascript => Some("JavaScript"),
    };
    if let Some(language) = missing {
        return Err(Error::no(
            "plugin.language",
            format!("there is no SDK for {language} yet, and `plugin build` compiles Rust alone"),
        )
        .next("Use --lang rust, or build a component of wit/ with the tools of the language yourself."));
    }
    for file in template::write(Path::new(&args.name), &args.name, args.sdk.as_deref())? {
        print_text(&file.display().to_string())?;
    }
    Ok(ExitCode::SUCCESS)
}

#[derive(Debug, clap::Args)]
pub(super) struct TestArgs {
    /// The .wasm file
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// What [destination.settings] would hold: TOML, or JSON if the name ends so
    #[arg(long, value_name = "FILE")]
    settings: Option<PathBuf>,
    /// Let it reach this address, also a private one
    #[arg(long, value_name = "HOST:PORT")]
    network: Vec<String>,
    /// Let it write below this directory
    #[arg(long, value_name = "DIR")]
    files: Vec<String>,
    /// Let it read a secret: NAME=env:VARIABLE or NAME=file:PATH
    #[arg(long, value_name = "NAME=FROM")]
    secret: Vec<String>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub(super) async fn test(args: &TestArgs) -> Result<ExitCode> {
    let settings = args.settings.as_deref().map_or_else(|| Ok(json!({})), settings)?;
    let grants = grants(args)?;
    let plugin = PluginEngine::new(EngineOptions::default())?.load(&args.file).await?;
    let mut told = |check: &Check| {
        if !args.json {
            // A terminal that is gone ends nothing: the exit code still says it.
            let _ = print_text(&line(check));
        }
    };
    let report = conformance::run(&plugin, &settings, grants.into(), &mut told).await;
    if args.json {
        print_json(&json!({
            "plugin": plugin.name, "version": plugin.manifest.version, "sha256": plugin.sha256, "ok": report.ok,
            "checks": report.checks, "usage": report.usage, "bytes_per_call": report.bytes_per_call,
        }))?;
    } else {
        print_text(&summary(&report))?;
    }
    Ok(if report.ok { ExitCode::SUCCESS } else { ExitCode::from(Exit::No as u8) })
}

fn settings(file: &Path) -> Result<Value> {
    let bad = |why: String| {
        Error::usage("plugin.settings", format!("{}: {why}", file.display()))
            .next("Write what [destination.settings] would hold, without the heading.")
    };
    let text = std::fs::read_to_string(file).map_err(|error| bad(format!("it cannot be read: {error}")))?;
    // Without their texts, which quote: a secret may be where it does not belong.
    if file.extension().is_some_and(|extension| extension == "json") {
        return serde_json::from_str(&text).map_err(|error| bad(format!("it is no JSON, line {}", error.line())));
    }
    let table: toml::Table = text.parse().map_err(|error: toml::de::Error| bad(error.message().to_owned()))?;
    serde_json::to_value(table).map_err(|error| bad(error.to_string()))
}

/// The grants of the command line, as those of a configuration.
fn grants(args: &TestArgs) -> Result<Grants> {
    let network: Vec<Value> = args.network.iter().map(|address| json!({"address": address, "private": true})).collect();
    let mut secrets = BTreeMap::new();
    for secret in &args.secret {
        let (name, from) = secret.split_once('=').ok_or_else(|| {
            Error::usage("config.grant", "--secret has no `=`").next("Write NAME=env:VARIABLE or NAME=file:PATH.")
        })?;
        secrets.insert(name, json!({"from": from, "readable": true}));
    }
    let config = json!({"network": network, "files": args.files, "secrets": secrets});
    let config: GrantsConfig = serde_json::from_value(config)
        .map_err(|error| Error::usage("config.grant", format!("the grants cannot be read: {error}")))?;
    Grants::new(config, &std::env::current_dir().unwrap_or_default())
}

fn line(check: &Check) -> String {
    let (colour, mark) = match check.outcome {
        Outcome::Ok => ("32", "ok  "),
        Outcome::Failed => ("31", "no  "),
        Outcome::Skipped => ("33", "skip"),
    };
    let mark =
        if paint::coloured(&std::io::stdout()) { format!("\x1b[{colour}m{mark}\x1b[0m") } else { mark.to_owned() };
    let mode = check.mode.map(|mode| format!("{mode}: ")).unwrap_or_default();
    let detail = check.detail.as_deref().map(|detail| format!(": {detail}")).unwrap_or_default();
    format!("{mark} {mode}{}{detail}", check.check)
}

fn summary(report: &Report) -> String {
    let mut table = paint::table(&["function", "calls", "seconds", "ms each"]);
    for (name, function) in &report.usage.functions {
        let each = function.seconds * 1000.0 / function.calls.max(1) as f64;
        table.add_row([
            name.clone(),
            paint::number(function.calls),
            format!("{:.3}", function.seconds),
            format!("{each:.2}"),
        ]);
    }
    let count = |outcome| report.checks.iter().filter(|check| check.outcome == outcome).count();
    format!(
        "{table}\n{} calls, {:.3} s, at most {} of memory, {} bytes of rows per call of write-group\n{} passed, {} skipped, {} failed",
        paint::number(report.usage.calls),
        report.usage.seconds,
        paint::bytes(report.usage.memory_peak_bytes),
        report.bytes_per_call,
        count(Outcome::Ok),
        count(Outcome::Skipped),
        count(Outcome::Failed),
    )
}
