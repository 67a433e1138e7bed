//! `tidegate plugin`.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use comfy_table::Cell;
use serde_json::{Value, json};

use super::{paint, plugin_test, print_json, print_text};
use crate::config::Config;
use crate::error::{Error, Result};
use crate::plugin::build::{self, BuildOptions};
use crate::plugin::clean;
use crate::plugin::{Directory, EngineOptions, Limit, Limits, Plugin, PluginEngine};

/// Bytes of what a plugin says about one setting.
const CELL_BYTES: usize = 1000;
/// References and alternatives that are followed to a setting's type.
const TYPE_DEPTH: usize = 3;
/// Where plugins are looked for without a configuration.
const DEFAULT_DIRECTORY: &str = "plugins";

#[derive(Debug, clap::Subcommand)]
pub(super) enum Command {
    /// Compile plugins from source
    #[command(after_help = "Finds the guest toolchain, or says what to install.\n\n\
        Example:\n  tidegate plugin build plugins/postgres plugins/files --out plugins")]
    Build(BuildArgs),
    /// Write the project of a new plugin
    #[command(after_help = "It builds and runs as it is written.\n\n\
        Example:\n  tidegate plugin new to_search && tidegate plugin build to_search --out plugins")]
    New(plugin_test::NewArgs),
    /// Run the conformance suite against a plugin
    #[command(
        after_help = "Works with tables public.tidegate_test_… of the destination; exits with 3 if a check failed.\n\n\
        Example:\n  tidegate plugin test plugins/files.wasm --settings files.toml --files out"
    )]
    Test(plugin_test::TestArgs),
    /// List the plugins of a directory
    #[command(after_help = "Example:\n  tidegate plugin list --dir plugins --json")]
    List(ListArgs),
    /// Show what a plugin is, takes and asks for
    #[command(after_help = "Example:\n  tidegate plugin inspect postgres")]
    Inspect(InspectArgs),
}

#[derive(Debug, clap::Args)]
pub(super) struct BuildArgs {
    /// Directories of the plugins' crates
    #[arg(value_name = "CRATE", default_value = ".")]
    crates: Vec<PathBuf>,
    /// Where the .wasm files go
    #[arg(long, short, value_name = "DIR", default_value = DEFAULT_DIRECTORY)]
    out: PathBuf,
    /// Fail instead of changing Cargo.lock
    #[arg(long)]
    locked: bool,
    /// Print warnings and errors only
    #[arg(long, short)]
    quiet: bool,
}

#[derive(Debug, clap::Args)]
pub(super) struct ListArgs {
    /// The plugins directory; by default the configuration's, else `plugins`
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, clap::Args)]
pub(super) struct InspectArgs {
    /// Name of a plugin in the directory, or a .wasm file
    #[arg(value_name = "PLUGIN")]
    plugin: String,
    /// The plugins directory; by default the configuration's, else `plugins`
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub(super) async fn plugin(command: Command, config: &Path) -> Result<ExitCode> {
    match command {
        Command::Build(args) => build(&args),
        Command::New(args) => plugin_test::new(&args),
        Command::Test(args) => plugin_test::test(&args).await,
        Command::List(args) => list(&args, config).await,
        Command::Inspect(args) => inspect(&args, config).await,
    }
}

fn build(args: &BuildArgs) -> Result<ExitCode> {
    let options = BuildOptions { target_dir: None, locked: args.locked, quiet: args.quiet };
    for file in build::build_all(&args.crates, &args.out, &options)? {
        print_text(&file.display().to_string())?;
    }
    Ok(ExitCode::SUCCESS)
}

/// The directory that was named, or the configuration's, or the default.
fn directory(named: Option<&Path>, config: &Path) -> Result<PathBuf> {
    match named {
        Some(directory) => Ok(directory.to_owned()),
        None if config.exists() => Ok(Config::load_pipeline(config)?.plugins),
        None => Ok(PathBuf::from(DEFAULT_DIRECTORY)),
    }
}

async fn list(args: &ListArgs, config: &Path) -> Result<ExitCode> {
    let directory = directory(args.dir.as_deref(), config)?;
    let engine = PluginEngine::new(EngineOptions::default())?;
    let mut loaded = Vec::new();
    for (name, file) in Directory::list(&directory)? {
        loaded.push((name, file.clone(), engine.load(&file).await));
    }
    if args.json {
        let plugins: Vec<Value> = loaded
            .iter()
            .map(|(name, file, plugin)| match plugin {
                Ok(plugin) => json!({
                    "name": name, "file": file, "version": plugin.manifest.version, "sha256": plugin.sha256,
                    "description": plugin.manifest.description, "error": null,
                }),
                Err(error) => json!({"name": name, "file": file, "error": crate::status::StatusError::from(error)}),
            })
            .collect();
        print_json(&plugins)?;
        return Ok(ExitCode::SUCCESS);
    }
    if loaded.is_empty() {
        print_text(&format!("no plugins in {}", directory.display()))?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut table = paint::table(&["plugin", "version", "modes", "description"]);
    for (name, _, plugin) in &loaded {
        table.add_row(match plugin {
            Ok(plugin) => vec![
                Cell::new(name),
                Cell::new(&plugin.manifest.version),
                Cell::new(modes(plugin)),
                Cell::new(&plugin.manifest.description),
            ],
            Err(error) => vec![Cell::new(name), Cell::new("-"), paint::bad(error.code()), paint::bad(error.message())],
        });
    }
    print_text(&table.to_string())?;
    Ok(ExitCode::SUCCESS)
}

fn modes(plugin: &Plugin) -> String {
    let capabilities = plugin.manifest.capabilities.iter().map(String::as_str);
    capabilities.filter(|name| matches!(*name, "merge" | "changes")).collect::<Vec<_>>().join(", ")
}

async fn inspect(args: &InspectArgs, config: &Path) -> Result<ExitCode> {
    let as_file = Path::new(&args.plugin);
    let file = if as_file.extension().is_some_and(|extension| extension == "wasm") {
        as_file.to_owned()
    } else {
        Directory::find(&directory(args.dir.as_deref(), config)?, &args.plugin)?
    };
    let plugin = PluginEngine::new(EngineOptions::default())?.load(&file).await?;
    let manifest = &plugin.manifest;
    let settings = schema(&plugin, &manifest.settings_schema)?;
    let table_settings = schema(&plugin, &manifest.table_settings_schema)?;
    if args.json {
        print_json(&json!({
            "name": manifest.name, "version": manifest.version, "description": manifest.description,
            "file": plugin.file, "sha256": plugin.sha256,
            "capabilities": manifest.capabilities, "permissions": manifest.permissions,
            "settings_schema": settings, "table_settings_schema": table_settings,
            "details": manifest.details.iter().cloned().collect::<std::collections::BTreeMap<_, _>>(),
        }))?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut text = format!(
        "{} {}: {}\nfile          {}\nsha256        {}\ncapabilities  {}\nasks for      {}\n",
        manifest.name,
        manifest.version,
        manifest.description,
        plugin.file.display(),
        plugin.sha256,
        manifest.capabilities.join(", "),
        if manifest.permissions.is_empty() { "nothing".to_owned() } else { manifest.permissions.join(", ") },
    );
    text.push_str(&settings_table("[destination.settings]", &settings));
    text.push_str(&settings_table("settings of a [[destination.table]]", &table_settings));
    let mut limits = paint::table(&["[destination.limits]", "default", "what", "why"]);
    for Limit { setting, value, what, reason } in Limits::default().table() {
        limits.add_row([setting, &value.to_string(), what, reason]);
    }
    text.push_str(&format!("\nLimits of an instance:\n{limits}"));
    print_text(&text)?;
    Ok(ExitCode::SUCCESS)
}

fn schema(plugin: &Plugin, text: &str) -> Result<Value> {
    if text.trim().is_empty() {
        return Ok(json!({"type": "object", "properties": {}}));
    }
    serde_json::from_str(text).map_err(|error| {
        Error::no("plugin.manifest", format!("plugin {}: its settings schema is no JSON: {error}", plugin.name))
            .next("Report it to the plugin's author.")
    })
}

/// The properties of a schema, a row each; what a row cannot show is in `--json`.
fn settings_table(title: &str, schema: &Value) -> String {
    let Some(properties) = schema["properties"].as_object().filter(|properties| !properties.is_empty()) else {
        return format!("\n{title}: none\n");
    };
    let required: Vec<&str> = schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    let mut table = paint::table(&["setting", "type", "default", "meaning"]);
    for (name, property) in properties {
        let default = match property.get("default") {
            Some(default) => default.to_string(),
            None if required.contains(&name.as_str()) => "required".to_owned(),
            None => "-".to_owned(),
        };
        let meaning = property["description"].as_str().unwrap_or_default();
        // The plugin's own words, on their way to a terminal.
        table.add_row([name, &type_of(schema, property, 0), &default, meaning].map(|cell| clean(cell, CELL_BYTES)));
    }
    format!("\n{title}:\n{table}\n")
}

/// A property's type in a word or a few, as far as it is simple.
fn type_of(schema: &Value, property: &Value, depth: usize) -> String {
    if depth > TYPE_DEPTH {
        return "any".to_owned();
    }
    if let Some(target) = property["$ref"].as_str().and_then(|path| schema.pointer(path.strip_prefix('#')?)) {
        return type_of(schema, target, depth + 1);
    }
    if let Some(options) = property["enum"].as_array() {
        return options
            .iter()
            .map(|option| option.as_str().map_or_else(|| option.to_string(), str::to_owned))
            .collect::<Vec<_>>()
            .join(", ");
    }
    if let Some(options) = property["oneOf"].as_array().or_else(|| property["anyOf"].as_array()) {
        return options.iter().take(20).map(|option| type_of(schema, option, depth + 1)).collect::<Vec<_>>().join(", ");
    }
    match &property["const"] {
        Value::String(only) => return only.clone(),
        Value::Null => {}
        only => return only.to_string(),
    }
    match &property["type"] {
        Value::String(name) => name.clone(),
        Value::Array(names) => names.iter().filter_map(Value::as_str).collect::<Vec<_>>().join(" or "),
        _ => "any".to_owned(),
    }
}
