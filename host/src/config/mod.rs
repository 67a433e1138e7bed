//! `tidegate.toml`: what the user writes (design, section 7).
//!
//! Unknown keys are refused, with the known one that was probably meant. `${NAME}` in
//! a string takes from the environment. A password is never written down: it comes from
//! the environment or from a file.

mod environment;
mod grants;
mod section;
mod tables;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use toml::Table;

use self::section::Section;
pub use self::tables::{TableFilter, TablePattern, TableRule};
use crate::error::{Error, Result};
use crate::plugin::Grants;
use crate::schema::decide::ApplyMode;
use crate::schema::table::TableName;
use crate::source::config::SourceConfig;

/// How long `run` may take to flush what it has accepted once it is told to stop.
const DEFAULT_DRAIN: Duration = Duration::from_secs(20);
/// Longer is not a drain any more.
const LONGEST_DRAIN: Duration = Duration::from_secs(3600);
/// `tidegate_` and the name have to fit into a slot's 63 bytes.
const PIPELINE_NAME_BYTES: usize = 54;
/// Long enough for a word or four; it is part of metrics, logs and tables.
const NAME_BYTES: usize = 63;
/// What `[destination.limits]` may set: the names of the contract's `ready.limits`, and
/// the bounds of a plugin's instance.
const LIMITS: [&str; 7] =
    ["group_bytes", "linger_ms", "settle_ms", "settle_bytes", "memory_bytes", "call_idle_ms", "call_hard_ms"];

/// A whole configuration file, checked as far as that goes without source and plugins.
#[derive(Clone, Debug)]
pub struct Config {
    /// `[pipeline]`.
    pub pipeline: PipelineConfig,
    /// `[source]`.
    pub source: SourceConfig,
    /// Every `[[destination]]`, in the file's order; one at least.
    pub destinations: Vec<DestinationConfig>,
}

/// `[pipeline]`.
#[derive(Clone, Debug)]
pub struct PipelineConfig {
    /// Names slot, connections and metrics.
    pub name: String,
    /// Directory of what has to survive a restart.
    pub state: PathBuf,
    /// Directory of the plugins' `.wasm` files.
    pub plugins: PathBuf,
    /// How long a clean stop may take.
    pub drain: Duration,
}

/// Which rows a destination is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// What each key's row must become.
    Merge,
    /// Every change.
    Changes,
}

impl Mode {
    /// As the configuration and the contract spell it.
    pub fn as_str(self) -> &'static str {
        match self {
            Mode::Merge => "merge",
            Mode::Changes => "changes",
        }
    }
}

/// One `[[destination]]`.
#[derive(Clone, Debug)]
pub struct DestinationConfig {
    /// Unique among the destinations.
    pub name: String,
    /// `<plugins>/<plugin>.wasm`.
    pub plugin: String,
    /// Which rows it is sent.
    pub mode: Mode,
    /// Which tables it takes.
    pub tables: TableFilter,
    /// Settings in the plugin's own schema: an object.
    pub settings: serde_json::Value,
    /// What the plugin may reach.
    pub grants: Arc<Grants>,
    /// Which schema changes are applied without being asked about.
    pub apply: ApplyMode,
    /// Every `[[destination.table]]`, in the file's order.
    pub rules: Vec<TableRule>,
    /// `[destination.limits]`: overrides of what the plugin's `open` answers
    /// (`group_bytes`, `linger_ms`, `settle_ms`, `settle_bytes`) and of an instance's
    /// bounds (`memory_bytes`, `call_idle_ms`, `call_hard_ms`).
    pub limits: BTreeMap<String, u64>,
}

impl DestinationConfig {
    /// Where a table of the source goes.
    pub fn target(&self, source: &TableName) -> TableName {
        tables::target(&self.rules, source)
    }

    /// The settings of a table of the source, in the plugin's own schema: a JSON object.
    pub fn table_settings(&self, source: &TableName) -> String {
        tables::settings(&self.rules, source)
    }
}

impl Config {
    /// Reads a file. Paths in it are relative to its directory.
    ///
    /// # Errors
    /// Exit code 2, and a code of `config.*` or of [`SourceConfig::parse`].
    pub fn load(path: &Path) -> Result<Config> {
        Document::read(path)?.config()
    }

    /// Reads `[pipeline]` alone: enough for commands that look at the state, which must
    /// not need the environment that `run` has.
    ///
    /// # Errors
    /// As [`Config::load`].
    pub fn load_pipeline(path: &Path) -> Result<PipelineConfig> {
        let document = Document::read(path)?;
        document.pipeline(&document.top()?)
    }
}

/// A file, before its meaning is known.
struct Document {
    file: PathBuf,
    /// What paths in the file are relative to; absolute.
    directory: PathBuf,
    root: Table,
}

impl Document {
    fn read(path: &Path) -> Result<Document> {
        let text = std::fs::read_to_string(path).map_err(|error| {
            Error::usage("config.read", format!("cannot read the configuration {}: {error}", path.display()))
                .next("Name the file with --config, or run in its directory.")
        })?;
        // `canonicalize` would follow a link to the file, but its neighbours are meant.
        let absolute = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        let directory = absolute.parent().map(Path::to_owned).unwrap_or_default();
        Document::parse(&text, path, &directory)
    }

    fn parse(text: &str, file: &Path, directory: &Path) -> Result<Document> {
        let root = text.parse().map_err(|error: toml::de::Error| {
            let line = error.span().map(|span| text[..span.start.min(text.len())].matches('\n').count() + 1);
            let place = line.map(|line| format!(", line {line}")).unwrap_or_default();
            // Without the line itself, which `Display` would quote: it may hold a secret.
            Error::usage("config.syntax", format!("{}{place}: {}", file.display(), error.message()))
                .next("Correct it: the file is TOML.")
        })?;
        Ok(Document { file: file.to_owned(), directory: directory.to_owned(), root })
    }

    fn top(&self) -> Result<Section<'_>> {
        Section::new(&self.file, "the top level", &self.root, &["pipeline", "source", "destination"])
    }

    fn config(&self) -> Result<Config> {
        let top = self.top()?;
        let pipeline = self.pipeline(&top)?;
        let source = self.source(&top, &pipeline.name)?;
        let mut destinations: Vec<DestinationConfig> = Vec::new();
        for (index, table) in top.tables("destination")?.into_iter().enumerate() {
            let destination = self.destination(index, table)?;
            if destinations.iter().any(|other| other.name == destination.name) {
                return Err(Error::usage(
                    "config.duplicate-name",
                    format!("{}: two destinations are named `{}`", self.file.display(), destination.name),
                )
                .next("Give each a name of its own: what was delivered is remembered under it."));
            }
            destinations.push(destination);
        }
        if destinations.is_empty() {
            return Err(Error::usage(
                "config.no-destination",
                format!("{}: there is no [[destination]]", self.file.display()),
            )
            .next("Add one: [[destination]] with name, plugin and mode."));
        }
        Ok(Config { pipeline, source, destinations })
    }

    fn required<'a>(&self, top: &Section<'a>, key: &str) -> Result<&'a Table> {
        top.table(key)?.ok_or_else(|| {
            Error::usage("config.missing-key", format!("{}: there is no [{key}]", self.file.display()))
                .next(format!("Add the table [{key}]."))
        })
    }

    fn pipeline(&self, top: &Section<'_>) -> Result<PipelineConfig> {
        let table = self.required(top, "pipeline")?;
        let section = Section::new(&self.file, "[pipeline]", table, &["name", "state", "plugins", "drain"])?;
        let name = section.required_text("name", "\"shop\"")?;
        let legal = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_';
        if name.len() > PIPELINE_NAME_BYTES || !name.bytes().all(legal) {
            return Err(invalid_name(&section, &name).next(format!(
                "Use 1 to {PIPELINE_NAME_BYTES} lower-case letters, digits and `_`: it names the slot tidegate_<name>."
            )));
        }
        let state = section.text("state")?.unwrap_or_else(|| "state".to_owned());
        if state.contains("://") {
            return Err(section
                .invalid("state", "is a URL, but only a directory can hold the state so far")
                .next("Name a directory of a local disk, e.g. state = \"state\"."));
        }
        let drain = match section.text("drain")? {
            None => DEFAULT_DRAIN,
            Some(text) => parse_duration(&text).filter(|drain| *drain <= LONGEST_DRAIN).ok_or_else(|| {
                section
                    .invalid("drain", format_args!("is `{text}`, which is not a time of an hour or less"))
                    .next("Write a number and a unit: 500ms, 20s or 5m.")
            })?,
        };
        let plugins = section.text("plugins")?.unwrap_or_else(|| "plugins".to_owned());
        Ok(PipelineConfig { name, state: self.directory.join(state), plugins: self.directory.join(plugins), drain })
    }

    fn source(&self, top: &Section<'_>, pipeline: &str) -> Result<SourceConfig> {
        let table = self.required(top, "source")?;
        let section = Section::new(&self.file, "[source]", table, &["url", "publication", "password"])?;
        if section.raw_text("url")?.is_some_and(holds_a_password) {
            return Err(Error::usage(
                "config.literal-secret",
                format!("{}: `url` holds a password", section.place()),
            )
            .next("Take the URL from the environment, url = \"${NAME}\", or add password = \"env:NAME\" or \"file:/path\"."));
        }
        let mut url = section.required_text("url", "\"${SOURCE_URL}\"")?;
        if let Some(reference) = section.raw_text("password")? {
            let password = grants::read_secret(reference, &self.directory)
                .map_err(|error| error.context(format_args!("{}: `password`", section.place())))?;
            let password = percent_encoding::utf8_percent_encode(&password, percent_encoding::NON_ALPHANUMERIC);
            let separator = if url.contains('?') { '&' } else { '?' };
            url = format!("{url}{separator}password={password}");
        }
        let publication = section.required_text("publication", &format!("\"{pipeline}\""))?;
        SourceConfig::parse(&url, &publication, pipeline)
            .map_err(|error| error.context(format_args!("{}", section.place())))
    }

    fn destination(&self, index: usize, table: &Table) -> Result<DestinationConfig> {
        const KEYS: [&str; 9] = ["name", "plugin", "mode", "tables", "settings", "grant", "schema", "table", "limits"];
        let nth = format!("[[destination]] number {}", index + 1);
        let name = match table.get("name").and_then(toml::Value::as_str) {
            Some(name) => format!("[[destination]] \"{name}\""),
            None => nth,
        };
        let section = Section::new(&self.file, name.clone(), table, &KEYS)?;
        let tables = TableFilter::parse(&section.texts("tables")?.unwrap_or_default())
            .map_err(|why| pattern_error(&section, "tables", &why))?;
        let mode = section.required_text("mode", "\"merge\"")?;
        let destination = DestinationConfig {
            name: checked_name(&section, "name", "\"warehouse\"")?,
            plugin: checked_name(&section, "plugin", "\"postgres\"")?,
            mode: match mode.as_str() {
                "merge" => Mode::Merge,
                "changes" => Mode::Changes,
                _ => {
                    return Err(section
                        .invalid("mode", format_args!("is `{mode}`"))
                        .next("Write \"merge\" (each key's newest row) or \"changes\" (every change)."));
                }
            },
            tables,
            settings: section.json("settings")?,
            grants: Arc::new(self.grants(&section, &name)?),
            apply: self.apply(&section, &name)?,
            rules: self.rules(&section, &name)?,
            limits: self.limits(&section, &name)?,
        };
        Ok(destination)
    }

    fn grants(&self, destination: &Section<'_>, name: &str) -> Result<Grants> {
        match destination.table("grant")? {
            None => Ok(Grants::default()),
            Some(table) => grants::read(&self.file, &self.directory, &format!("[destination.grant] of {name}"), table),
        }
    }

    fn apply(&self, destination: &Section<'_>, name: &str) -> Result<ApplyMode> {
        let Some(table) = destination.table("schema")? else { return Ok(ApplyMode::default()) };
        let section = Section::new(&self.file, format!("[destination.schema] of {name}"), table, &["apply"])?;
        let Some(text) = section.text("apply")? else { return Ok(ApplyMode::default()) };
        APPLY_MODES.iter().find(|(known, _)| *known == text).map(|(_, mode)| *mode).ok_or_else(|| {
            let known: Vec<&str> = APPLY_MODES.iter().map(|(known, _)| *known).collect();
            section.invalid("apply", format_args!("is `{text}`")).next(format!("Write one of: {}.", known.join(", ")))
        })
    }

    fn rules(&self, destination: &Section<'_>, name: &str) -> Result<Vec<TableRule>> {
        const KEYS: [&str; 4] = ["match", "settings", "target_schema", "target_table"];
        let mut rules = Vec::new();
        for (index, table) in destination.tables("table")?.into_iter().enumerate() {
            let place = format!("[[destination.table]] number {} of {name}", index + 1);
            let section = Section::new(&self.file, place, table, &KEYS)?;
            let text = section.required_text("match", "\"public.orders\"")?;
            let pattern = TablePattern::parse(&text).map_err(|why| pattern_error(&section, "match", &why))?;
            let target_table = section.text("target_table")?;
            if target_table.is_some() && !pattern.is_exact() {
                return Err(section
                    .invalid("target_table", format_args!("would give all tables that fit `{text}` one name"))
                    .next("Give each table a [[destination.table]] of its own."));
            }
            let settings = match section.json("settings")? {
                serde_json::Value::Object(settings) => settings,
                _ => serde_json::Map::new(),
            };
            rules.push(TableRule { pattern, settings, target_schema: section.text("target_schema")?, target_table });
        }
        Ok(rules)
    }

    fn limits(&self, destination: &Section<'_>, name: &str) -> Result<BTreeMap<String, u64>> {
        let Some(table) = destination.table("limits")? else { return Ok(BTreeMap::new()) };
        let section = Section::new(&self.file, format!("[destination.limits] of {name}"), table, &LIMITS)?;
        let mut limits = BTreeMap::new();
        for key in LIMITS {
            match section.number(key)? {
                // Nothing could ever be sent, or kept in memory, or answered.
                Some(0) if !key.starts_with("linger") && !key.starts_with("settle") => {
                    return Err(section.invalid(key, "is 0").next("Write a number above 0, or leave it out."));
                }
                Some(number) => {
                    limits.insert(key.to_owned(), number);
                }
                None => {}
            }
        }
        Ok(limits)
    }
}

/// How the configuration spells the modes of design section 4.
const APPLY_MODES: [(&str, ApplyMode); 4] = [
    ("auto-safe", ApplyMode::AutoSafe),
    ("staged-rollout", ApplyMode::StagedRollout),
    ("manual-review", ApplyMode::ManualReview),
    ("block-destructive", ApplyMode::BlockDestructive),
];

/// A name of letters, digits, `_` and `-`, as it becomes part of file names and metrics.
fn checked_name(section: &Section<'_>, key: &str, example: &str) -> Result<String> {
    let name = section.required_text(key, example)?;
    let legal = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_' || byte == b'-';
    if name.len() <= NAME_BYTES && name.bytes().all(legal) && !name.starts_with('-') {
        return Ok(name);
    }
    Err(invalid_name(section, &name)
        .next(format!("Use 1 to {NAME_BYTES} lower-case letters, digits, `_` and `-`, and no `-` at the beginning.")))
}

fn invalid_name(section: &Section<'_>, name: &str) -> Error {
    Error::usage("config.invalid-name", format!("{}: `{}` cannot be a name", section.place(), name.escape_debug()))
}

fn pattern_error(section: &Section<'_>, key: &str, why: &str) -> Error {
    Error::usage("config.pattern", format!("{}: `{key}`: {why}", section.place()))
        .next("Write schema.table; `*` stands for any characters, and in `tables` a `!` before it excludes.")
}

/// Whether a URL, as it stands in the file, has a password that is not taken from the
/// environment.
fn holds_a_password(url: &str) -> bool {
    let literal = |password: &str| !password.is_empty() && !password.starts_with("${");
    let after_scheme = url.split_once("://").map_or("", |(_, rest)| rest);
    let (before_query, query) = after_scheme.split_once('?').unwrap_or((after_scheme, ""));
    let login = before_query.rsplit_once('@').map_or("", |(login, _)| login);
    // `${USER}:…`: the braces hold no colon unless it is no variable.
    let in_login = login.split_once(':').is_some_and(|(_, password)| literal(password));
    in_login || query.split('&').any(|pair| pair.strip_prefix("password=").is_some_and(literal))
}

/// A whole number with `ms`, `s` or `m` behind it.
fn parse_duration(text: &str) -> Option<Duration> {
    let digits = text.trim_end_matches(|letter: char| letter.is_ascii_alphabetic());
    let number: u64 = digits.parse().ok()?;
    match &text[digits.len()..] {
        "ms" => Some(Duration::from_millis(number)),
        "s" => Some(Duration::from_secs(number)),
        "m" => Some(Duration::from_secs(number.checked_mul(60)?)),
        _ => None,
    }
}

#[cfg(test)]
mod tests;
