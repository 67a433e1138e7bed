//! `tidegate.toml`: what the user writes (design, section 7).
//!
//! Unknown keys are refused, with the known one that was probably meant. `${NAME}` in
//! a string takes from the environment. A password is never written down: it comes from
//! the environment or from a file.

mod environment;
mod grants;
mod limits;
mod pin;
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
use crate::plugin::{EngineLimits, Grants, Pin};
use crate::schema::barrier::{Quorum, never_released};
use crate::schema::decide::ApplyMode;
use crate::schema::table::TableName;
use crate::source::config::SourceConfig;
use crate::store::{Store, StoreServer};

/// How long `run` may take to flush what it has accepted once it is told to stop.
const DEFAULT_DRAIN: Duration = Duration::from_secs(20);
/// What may wait on disk for destinations that do not keep up.
const DEFAULT_SPOOL_BYTES: u64 = 64 << 30;
/// A few of its files.
const LEAST_SPOOL_BYTES: u64 = 64 << 20;
/// Versions of a table's schema: what a few years of changes come to.
const SCHEMA_VERSIONS: u64 = 1000;
/// A history of fewer is none.
const LEAST_SCHEMA_VERSIONS: u64 = 10;
/// Longer is not a drain any more.
const LONGEST_DRAIN: Duration = Duration::from_secs(3600);
/// Enough to keep a destination busy, and few enough for a source that others work with.
const COPY_CONNECTIONS: usize = 4;
/// A smaller table is quickly copied again.
const COPY_RESUME_BYTES: u64 = 1 << 30;
/// More would be a mistake: the disks of no source gain by it.
const MOST_COPY_CONNECTIONS: usize = 64;
/// `tidegate_` and the name have to fit into a slot's 63 bytes.
const PIPELINE_NAME_BYTES: usize = 54;
/// Long enough for a word or four; it is part of metrics, logs and tables.
const NAME_BYTES: usize = 63;

/// A whole configuration file, checked as far as that goes without source and plugins.
#[derive(Clone, Debug)]
pub struct Config {
    /// `[pipeline]`.
    pub pipeline: PipelineConfig,
    /// `[source]`: where it is.
    pub source: SourceConfig,
    /// `[source]`: how its tables are copied.
    pub copy: CopyConfig,
    /// Every `[[destination]]`, in the file's order; one at least.
    pub destinations: Vec<DestinationConfig>,
}

/// `[pipeline]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PipelineConfig {
    /// Names slot, connections and metrics.
    pub name: String,
    /// Directory of what has to survive a restart.
    pub state: PathBuf,
    /// A server that keeps the state, but for the spool; none: it is in [`PipelineConfig::state`].
    pub store: Option<StoreServer>,
    /// Directory of the plugins' `.wasm` files.
    pub plugins: PathBuf,
    /// How long a clean stop may take.
    pub drain: Duration,
    /// Bytes of the spool's files above which the stream waits, or a destination is detached.
    pub spool_bytes: u64,
    /// The memory budget of the process; none: see [`crate::memory::Budget::new`].
    pub memory_bytes: Option<u64>,
    /// Versions of a table's schema that are kept although nobody needs them, and tables
    /// that are gone.
    pub schema_versions: usize,
    /// `[pipeline.engine]`.
    pub engine: EngineLimits,
}

/// How tables are copied: keys of `[source]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyConfig {
    /// Connections that copy at a time, beside those of the stream and the snapshot.
    pub connections: usize,
    /// How many of them may copy the same table.
    pub connections_per_table: usize,
    /// A table of so many bytes is copied so that a restart goes on with it, where it can
    /// be: not as fast, but not again from its beginning.
    pub resume_bytes: u64,
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
#[derive(Clone, Debug, PartialEq)]
pub struct DestinationConfig {
    /// Unique among the destinations.
    pub name: String,
    /// `<plugins>/<plugin>.wasm`.
    pub plugin: String,
    /// What that file has to be.
    pub pin: Pin,
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
    /// Which of the other destinations release a change by having it; none: the operator
    /// alone does.
    pub quorum: Option<Quorum>,
    /// Every `[[destination.table]]`, in the file's order.
    pub rules: Vec<TableRule>,
    /// `[destination.limits]`: overrides of what the plugin's `open` answers
    /// (`group_bytes`, `linger_ms`, `settle_ms`, `settle_bytes`) and of an instance's
    /// limits ([`crate::plugin::Limits::SETTINGS`]).
    pub limits: BTreeMap<String, u64>,
    /// `[destination.quarantine]`.
    pub quarantine: QuarantineLimits,
    /// What happens when the spool is full because of it.
    pub spool_full: SpoolFull,
}

/// What happens at the spool's limit (P9).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SpoolFull {
    /// The stream waits, and all destinations with it, until there is room.
    #[default]
    Hold,
    /// The destination's tables stop, what waits for it is dropped, and the others go on.
    Detach,
}

/// How much of one table may be in quarantine; beyond it the table stops.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QuarantineLimits {
    /// Rows.
    pub max_rows: u64,
    /// Bytes of these rows.
    pub max_bytes: u64,
}

impl Default for QuarantineLimits {
    fn default() -> QuarantineLimits {
        QuarantineLimits { max_rows: 10_000, max_bytes: 64 << 20 }
    }
}

impl PipelineConfig {
    /// Opens the state, wherever it is, to write it.
    ///
    /// # Errors
    /// As [`Store::open`] or [`Store::open_on_server`].
    pub fn open_store(&self) -> Result<Store> {
        match &self.store {
            Some(server) => Store::open_on_server(server, &self.state, &self.name),
            None => Store::open(&self.state, &self.name),
        }
    }

    /// Opens the state, wherever it is, to look at it.
    ///
    /// # Errors
    /// As [`Store::open_read_only`] or [`Store::open_read_only_on_server`].
    pub fn read_store(&self) -> Result<Store> {
        match &self.store {
            Some(server) => Store::open_read_only_on_server(server),
            None => Store::open_read_only(&self.state),
        }
    }

    /// Names the state in messages.
    pub fn state_place(&self) -> String {
        match &self.store {
            Some(server) => server.place(),
            None => format!("the state directory {}", self.state.display()),
        }
    }
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
        let (source, copy) = self.source(&top, &pipeline.name)?;
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
        self.check_quorums(&destinations)?;
        for destination in &destinations {
            grants::check_own_files(&self.file, destination, &pipeline)?;
        }
        if let Some(bytes) = pipeline.memory_bytes {
            let whence = format!("{}: [pipeline]: `memory_bytes`", self.file.display());
            crate::memory::check(&whence, bytes, destinations.len())?;
        }
        Ok(Config { pipeline, source, copy, destinations })
    }

    /// Quorums have to be such that they can come about.
    fn check_quorums(&self, destinations: &[DestinationConfig]) -> Result<()> {
        let place = |name: &str| format!("{}: [destination.schema] of [[destination]] \"{name}\"", self.file.display());
        let others = destinations.len() - 1;
        for destination in destinations {
            let name = &destination.name;
            let wrong = |why: String| Error::usage("config.quorum", format!("{}: `quorum` {why}", place(name)));
            match &destination.quorum {
                Some(Quorum::AtLeast(least)) if *least > others => {
                    return Err(wrong(format!("is {least}, and there are {others} other destinations"))
                        .next("Write a number of other destinations that can be reached."));
                }
                Some(Quorum::Named(names)) => {
                    let is_other =
                        |other: &String| other != name && destinations.iter().any(|known| known.name == *other);
                    if let Some(other) = names.iter().find(|other| !is_other(other)) {
                        return Err(wrong(format!("names `{other}`, which is no other destination"))
                            .next("Name other destinations of this file."));
                    }
                }
                Some(Quorum::All | Quorum::AtLeast(_)) | None => {}
            }
        }
        let all: Vec<(&str, Option<&Quorum>)> =
            destinations.iter().map(|destination| (destination.name.as_str(), destination.quorum.as_ref())).collect();
        let never = never_released(&all);
        if never.is_empty() {
            return Ok(());
        }
        let names: Vec<String> = never.iter().map(|name| format!("`{name}`")).collect();
        Err(Error::usage(
            "config.quorum-cycle",
            format!(
                "{}: the quorums of {} wait for one another: none of them would ever have a change",
                self.file.display(),
                names.join(", ")
            ),
        )
        .next("Let one of them go first: another `apply`, or no `quorum`, so that the operator releases its changes."))
    }

    fn required<'a>(&self, top: &Section<'a>, key: &str) -> Result<&'a Table> {
        top.table(key)?.ok_or_else(|| {
            Error::usage("config.missing-key", format!("{}: there is no [{key}]", self.file.display()))
                .next(format!("Add the table [{key}]."))
        })
    }

    fn pipeline(&self, top: &Section<'_>) -> Result<PipelineConfig> {
        const KEYS: [&str; 10] = [
            "name",
            "state",
            "plugins",
            "drain",
            "spool_bytes",
            "memory_bytes",
            "schema_versions",
            "store",
            "store_password",
            "engine",
        ];
        let table = self.required(top, "pipeline")?;
        let section = Section::new(&self.file, "[pipeline]", table, &KEYS)?;
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
                .invalid("state", "is a URL, where a directory belongs")
                .next("Name a directory of a local disk, e.g. state = \"state\", and the server in `store`."));
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
        let spool_bytes = section.number("spool_bytes")?.unwrap_or(DEFAULT_SPOOL_BYTES);
        if spool_bytes < LEAST_SPOOL_BYTES {
            return Err(section
                .invalid("spool_bytes", format_args!("is {spool_bytes}, less than the files of a spool need"))
                .next(format!(
                    "Write {LEAST_SPOOL_BYTES} (64 MiB) or more; the default is {DEFAULT_SPOOL_BYTES} (64 GiB)."
                )));
        }
        let (state, plugins) = (self.directory.join(state), self.directory.join(plugins));
        let store = self.store(&section, &name)?;
        let memory_bytes = section.number("memory_bytes")?;
        let schema_versions = section.number("schema_versions")?.unwrap_or(SCHEMA_VERSIONS);
        if schema_versions < LEAST_SCHEMA_VERSIONS {
            return Err(section
                .invalid("schema_versions", format_args!("is {schema_versions}, too few to be a history"))
                .next(format!("Write {LEAST_SCHEMA_VERSIONS} or more; the default is {SCHEMA_VERSIONS}.")));
        }
        let schema_versions = usize::try_from(schema_versions).unwrap_or(usize::MAX);
        let engine = limits::engine(&self.file, &section)?;
        Ok(PipelineConfig { name, state, store, plugins, drain, spool_bytes, memory_bytes, schema_versions, engine })
    }

    fn store(&self, section: &Section<'_>, pipeline: &str) -> Result<Option<StoreServer>> {
        let password = section.raw_text("store_password")?;
        let Some(url) = section.text("store")? else {
            return match password {
                None => Ok(None),
                Some(_) => Err(section
                    .invalid("store_password", "is there without `store`")
                    .next("Add store = \"postgres://user@host:port/database\", or remove it.")),
            };
        };
        if section.raw_text("store")?.is_some_and(holds_a_password) {
            return Err(literal_secret(section, "store", "store_password"));
        }
        let password = password.map(|reference| grants::secret_source(reference, &self.directory)).transpose();
        let password =
            password.map_err(|error| error.context(format_args!("{}: `store_password`", section.place())))?;
        // Not read here: who asks a running process needs no password.
        StoreServer::parse(&url, password, pipeline).map(Some).map_err(|error| {
            let why = error.message().trim_start_matches("source url: ");
            section
                .invalid("store", format_args!("cannot be used: {why}"))
                .next(error.next_step().unwrap_or("Write postgres://user@host:port/database.").to_owned())
        })
    }

    fn source(&self, top: &Section<'_>, pipeline: &str) -> Result<(SourceConfig, CopyConfig)> {
        const KEYS: [&str; 7] = [
            "url",
            "publication",
            "password",
            "streaming",
            "copy_connections",
            "copy_connections_per_table",
            "copy_resume_bytes",
        ];
        let table = self.required(top, "source")?;
        let section = Section::new(&self.file, "[source]", table, &KEYS)?;
        if section.raw_text("url")?.is_some_and(holds_a_password) {
            return Err(literal_secret(&section, "url", "password"));
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
        let mut source = SourceConfig::parse(&url, &publication, pipeline)
            .map_err(|error| error.context(format_args!("{}", section.place())))?;
        source.streaming = section.flag("streaming")?.unwrap_or(true);
        Ok((source, copy(&section)?))
    }

    fn destination(&self, index: usize, table: &Table) -> Result<DestinationConfig> {
        const KEYS: [&str; 14] = [
            "name",
            "plugin",
            "sha256",
            "public_key",
            "signature",
            "mode",
            "tables",
            "settings",
            "grant",
            "schema",
            "table",
            "limits",
            "quarantine",
            "spool_full",
        ];
        let nth = format!("[[destination]] number {}", index + 1);
        let name = match table.get("name").and_then(toml::Value::as_str) {
            Some(name) => format!("[[destination]] \"{name}\""),
            None => nth,
        };
        let section = Section::new(&self.file, name.clone(), table, &KEYS)?;
        let tables = TableFilter::parse(&section.texts("tables")?.unwrap_or_default())
            .map_err(|why| pattern_error(&section, "tables", &why))?;
        let mode = section.required_text("mode", "\"merge\"")?;
        let (apply, quorum) = self.schema(&section, &name)?;
        let destination = DestinationConfig {
            name: checked_name(&section, "name", "\"warehouse\"")?,
            plugin: checked_name(&section, "plugin", "\"postgres\"")?,
            pin: pin::read(&section, &self.directory)?,
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
            apply,
            quorum,
            rules: self.rules(&section, &name)?,
            limits: limits::destination(&self.file, &section, &name)?,
            quarantine: self.quarantine(&section, &name)?,
            spool_full: spool_full(&section)?,
        };
        Ok(destination)
    }

    fn grants(&self, destination: &Section<'_>, name: &str) -> Result<Grants> {
        match destination.table("grant")? {
            None => Ok(Grants::default()),
            Some(table) => grants::read(&self.file, &self.directory, &format!("[destination.grant] of {name}"), table),
        }
    }

    fn schema(&self, destination: &Section<'_>, name: &str) -> Result<(ApplyMode, Option<Quorum>)> {
        let Some(table) = destination.table("schema")? else { return Ok((ApplyMode::default(), None)) };
        let section = Section::new(&self.file, format!("[destination.schema] of {name}"), table, &["apply", "quorum"])?;
        let apply = self.apply(&section)?;
        let quorum = quorum(&section)?;
        if quorum.is_some() && apply != ApplyMode::StagedRollout {
            return Err(section
                .invalid("quorum", format_args!("belongs to `apply = \"staged-rollout\"`, not to `{}`", apply.as_str()))
                .next("Write apply = \"staged-rollout\", or leave `quorum` out."));
        }
        Ok((apply, quorum))
    }

    fn apply(&self, section: &Section<'_>) -> Result<ApplyMode> {
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

    fn quarantine(&self, destination: &Section<'_>, name: &str) -> Result<QuarantineLimits> {
        let mut limits = QuarantineLimits::default();
        let Some(table) = destination.table("quarantine")? else { return Ok(limits) };
        let place = format!("[destination.quarantine] of {name}");
        let section = Section::new(&self.file, place, table, &["max_rows", "max_bytes"])?;
        limits.max_rows = section.number("max_rows")?.unwrap_or(limits.max_rows);
        limits.max_bytes = section.number("max_bytes")?.unwrap_or(limits.max_bytes);
        Ok(limits)
    }
}

/// The limits of copies: by default one table may have all connections.
fn copy(section: &Section<'_>) -> Result<CopyConfig> {
    let number = |key, most: usize, default| match section.number(key)? {
        None => Ok(default),
        Some(number) => match usize::try_from(number) {
            Ok(number) if (1..=most).contains(&number) => Ok(number),
            _ => Err(section
                .invalid(key, format_args!("is {number}"))
                .next(format!("Write a whole number from 1 to {most}, or leave it out."))),
        },
    };
    let connections = number("copy_connections", MOST_COPY_CONNECTIONS, COPY_CONNECTIONS)?;
    Ok(CopyConfig {
        connections,
        connections_per_table: number("copy_connections_per_table", connections, connections)?,
        resume_bytes: section.number("copy_resume_bytes")?.unwrap_or(COPY_RESUME_BYTES),
    })
}

/// `"all"`, a number or names: of other destinations, who release a change by having it.
fn quorum(section: &Section<'_>) -> Result<Option<Quorum>> {
    let ways = "Write \"all\", a number of other destinations above 0, or their names: [\"log\", \"search\"].";
    match section.raw("quorum") {
        None => Ok(None),
        Some(toml::Value::Integer(number)) => match usize::try_from(*number) {
            Ok(least) if least > 0 => Ok(Some(Quorum::AtLeast(least))),
            _ => Err(section.invalid("quorum", format_args!("is {number}")).next(ways)),
        },
        Some(toml::Value::Array(_)) => match section.texts("quorum")?.unwrap_or_default() {
            names if names.is_empty() => Err(section.invalid("quorum", "names nobody").next(ways)),
            names => Ok(Some(Quorum::Named(names))),
        },
        Some(_) => match section.text("quorum")?.as_deref() {
            Some("all") => Ok(Some(Quorum::All)),
            Some(other) => Err(section.invalid("quorum", format_args!("is `{other}`")).next(ways)),
            None => Ok(None),
        },
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

fn spool_full(section: &Section<'_>) -> Result<SpoolFull> {
    match section.text("spool_full")?.as_deref() {
        None | Some("hold") => Ok(SpoolFull::Hold),
        Some("detach") => Ok(SpoolFull::Detach),
        Some(other) => Err(section.invalid("spool_full", format_args!("is `{other}`")).next(
            "Write \"hold\" (all wait until there is room) or \"detach\" (this destination's tables stop, the others go on).",
        )),
    }
}

fn pattern_error(section: &Section<'_>, key: &str, why: &str) -> Error {
    Error::usage("config.pattern", format!("{}: `{key}`: {why}", section.place()))
        .next("Write schema.table; `*` stands for any characters, and in `tables` a `!` before it excludes.")
}

fn literal_secret(section: &Section<'_>, url: &str, password: &str) -> Error {
    Error::usage("config.literal-secret", format!("{}: `{url}` holds a password", section.place())).next(format!(
        "Take the URL from the environment, {url} = \"${{NAME}}\", or add {password} = \"env:NAME\" or \"file:/path\"."
    ))
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
