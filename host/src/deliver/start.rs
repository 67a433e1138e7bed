//! Everything that has to be true before anything starts.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use super::identity::{Identity, Known, changed};
use super::plugins::check_successor;
use super::proven::Proven;
use super::publication::Publication;
use crate::config::{Config, DestinationConfig, Mode};
use crate::error::{Error, Exit, Result};
use crate::plugin::{Directory, EngineOptions, Plugin, PluginEngine, SettingsSchema};
use crate::position::{Lsn, SnapshotId};
use crate::schema::table::{Origin, ReplicaIdentity, TableSchema};
use crate::source::catalog::{PublishedTable, SourceFacts, check_source, published_tables, table_schemas};
use crate::source::config::SourceConfig;
use crate::source::members::{Members, members};
use crate::source::replication::{CreatedSlot, ReplicationConnection, SlotKind};
use crate::source::session::connect;
use crate::store::{Loaded, SlotRecord, SourceRecord, Store};

/// How long the slot may wait for transactions that are open at the source.
const SLOT_TIMEOUT: Duration = Duration::from_secs(60);

/// Loads every destination's plugin, and checks its settings, mode and grants.
///
/// Errors: `plugin.*`, each naming the destination (exit code 2).
pub(super) async fn load_plugins(config: &Config, proven: &Proven) -> Result<(PluginEngine, Vec<Chosen>)> {
    let engine = PluginEngine::new(EngineOptions::from(config.pipeline.engine.clone()))?;
    let mut plugins = Vec::new();
    for destination in &config.destinations {
        plugins.push(load_plugin(&config.pipeline.plugins, destination, &engine, proven).await?);
    }
    Ok((engine, plugins))
}

/// The version of a plugin that a destination begins with.
#[derive(Clone)]
pub(super) struct Chosen {
    pub plugin: Arc<Plugin>,
    /// The last one that did well, if this one is another.
    pub fallback: Option<Arc<Plugin>>,
}

/// One of [`load_plugins`]: what is in the directory, unless it was taken back before.
pub(super) async fn load_plugin(
    directory: &Path,
    destination: &DestinationConfig,
    engine: &PluginEngine,
    proven: &Proven,
) -> Result<Chosen> {
    let load = async {
        let file = Directory::find(directory, &destination.plugin)?;
        let plugin = engine.load_pinned(&file, &destination.pin).await?;
        check_plugin(destination, &plugin)?;
        let fallback = proven_plugin(destination, &file, &plugin, engine, proven).await;
        match (fallback, proven.refused(destination, &plugin.sha256)) {
            (Some(good), Some(why)) => {
                tracing::warn!(
                    destination = %destination.name, code = %why.code, version = %good.manifest.version,
                    "the plugin in the directory was taken back before, and the one before it is used: {}", why.message
                );
                Ok(Chosen { plugin: good, fallback: None })
            }
            (fallback, _) => Ok(Chosen { plugin, fallback }),
        }
    };
    let loaded: Result<Chosen> = load.await;
    loaded.map_err(|error| error.context(format_args!("destination `{}`", destination.name)).exit(Exit::Usage))
}

/// The version that did well last, if it is another one, is kept, and could take over.
async fn proven_plugin(
    destination: &DestinationConfig,
    file: &Path,
    plugin: &Plugin,
    engine: &PluginEngine,
    proven: &Proven,
) -> Option<Arc<Plugin>> {
    let sha256 = proven.good(destination).filter(|good| *good != plugin.sha256)?;
    let load = async {
        let Some(good) = engine.load_kept(file, sha256).await? else { return Ok(None) };
        check_plugin(destination, &good)?;
        check_successor(plugin, &good)?;
        check_successor(&good, plugin)?;
        Ok(Some(good))
    };
    let loaded: Result<Option<Arc<Plugin>>> = load.await;
    loaded.unwrap_or_else(|error| {
        tracing::debug!(destination = %destination.name, code = error.code(), "the version before cannot come back: {error}");
        None
    })
}

/// Whether the configuration fits the plugin: settings, mode, grants.
pub fn check_plugin(destination: &DestinationConfig, plugin: &Plugin) -> Result<()> {
    let manifest = &plugin.manifest;
    SettingsSchema::new(&plugin.name, &manifest.settings_schema)?.check("its settings", &destination.settings)?;
    let mode = destination.mode.as_str();
    if !plugin.can(mode) {
        return Err(Error::usage(
            "plugin.mode",
            format!("plugin `{}` does not support `mode = \"{mode}\"`", plugin.name),
        )
        .next("Choose the other mode, or another plugin."));
    }
    if let Some(missing) = destination.grants.files.iter().find(|grant| !grant.path.is_dir()) {
        return Err(Error::usage(
            "plugin.directory",
            format!("the granted directory {} does not exist", missing.path.display()),
        )
        .next("Create it, writable for the user that runs tidegate, or grant another."));
    }
    for missing in destination.grants.missing(&manifest.permissions, &destination.settings) {
        // Whether a secret is needed only the other end can tell: the plugin is told that
        // it has none, and says so when it is asked for one.
        if missing.permission.starts_with("secret:") {
            tracing::warn!(destination = %destination.name, permission = %missing.permission, "not granted: {}", missing.reason);
            continue;
        }
        return Err(Error::usage(
            "plugin.grant",
            format!("plugin `{}` asks for `{}`: {}", plugin.name, missing.permission, missing.reason),
        )
        .next("Grant it in [destination.grant], or choose another plugin."));
    }
    check_secrets(destination)
}

/// What is granted has to be there: later it would look like a wrong password.
fn check_secrets(destination: &DestinationConfig) -> Result<()> {
    for (name, secret) in &destination.grants.secrets {
        secret.source.read().map_err(|why| {
            Error::usage(
                "config.secret",
                format!("there is nothing behind the secret `{name}` of [destination.grant]: {why}"),
            )
            .next("Put the secret there, or name where it is: env:NAME or file:PATH.")
        })?;
    }
    Ok(())
}

/// An error before anything was started: the answer to `run` is no, even where asking
/// again may help.
pub(super) fn refusal(error: Error) -> Error {
    match error.exit_code() {
        Exit::Failed => error.exit(Exit::No),
        Exit::Usage | Exit::No => error,
    }
}

/// A published table, as it is now.
pub struct SourceTable {
    /// Who it is.
    pub table: PublishedTable,
    /// What it looks like.
    pub schema: TableSchema,
}

/// What the source was found to be.
pub struct Source {
    /// Its settings and objects.
    pub facts: SourceFacts,
    /// The published tables.
    pub tables: Vec<SourceTable>,
    /// What makes them members of the publication.
    pub members: Members,
    /// Proves DDL messages; none without the trigger.
    pub key: Option<Vec<u8>>,
}

/// Checks the source and reads its tables.
pub async fn look_at_source(source: &SourceConfig) -> Result<Source> {
    let session = connect(source).await?;
    let facts = check_source(&session, source).await?;
    let key = crate::source::trigger::secret_key(&session).await?;
    // Before their schemas: what changes meanwhile is seen at the next look.
    let members = members(&session, &source.publication).await?;
    let published = published_tables(&session, &source.publication).await?;
    let mut schemas = table_schemas(
        &*session as &tokio_postgres::Client,
        &published,
        &source.publication,
        SnapshotId::default(),
        Origin::Catalog,
    )
    .await?;
    let with_schema = |table: PublishedTable| Some(SourceTable { schema: schemas.remove(&table.oid)?, table });
    let tables = published.into_iter().filter_map(with_schema).collect();
    Ok(Source { facts, tables, members, key })
}

/// Whether a destination can take its tables at all.
///
/// Errors: `table.none`, `table.same-target`, `table.no-key`, `table.partial-rows` (exit code 3).
pub fn check_tables(destination: &DestinationConfig, plugin: &Plugin, source: &Source) -> Result<()> {
    let taken: Vec<&TableSchema> = source
        .tables
        .iter()
        .map(|table| &table.schema)
        .filter(|schema| destination.tables.matches(&schema.name))
        .collect();
    if taken.is_empty() {
        return Err(Error::no(
            "table.none",
            format!("destination `{}` takes none of the published tables", destination.name),
        )
        .next("Add tables to the publication, or mend `tables` of the destination."));
    }
    check_some(destination, plugin, &taken)
}

/// Whether a destination can take these tables beside each other.
///
/// Errors: `table.same-target`, `table.no-key`, `table.partial-rows` (exit code 3).
pub(super) fn check_some(destination: &DestinationConfig, plugin: &Plugin, taken: &[&TableSchema]) -> Result<()> {
    check_targets(destination, taken)?;
    if destination.mode != Mode::Merge {
        return Ok(());
    }
    let keyless = names(taken.iter().filter(|schema| schema.merge_key().is_empty()));
    if !keyless.is_empty() {
        return Err(Error::no(
            "table.no-key",
            format!("destination `{}`: {keyless} cannot be merged, for want of a published key", destination.name),
        )
        .next("Give each a primary key or REPLICA IDENTITY USING INDEX, leave it out with `\"!schema.table\"` in `tables`, or use `mode = \"changes\"`."));
    }
    if !plugin.can("partial-rows") {
        let partial = names(taken.iter().filter(|schema| schema.replica_identity != ReplicaIdentity::Full));
        if !partial.is_empty() {
            return Err(Error::no(
                "table.partial-rows",
                format!(
                    "destination `{}`: plugin `{}` needs whole rows, which {partial} does not send",
                    destination.name, plugin.name
                ),
            )
            .next("Run ALTER TABLE … REPLICA IDENTITY FULL for each, or use `mode = \"changes\"`."));
        }
    }
    Ok(())
}

/// Two tables that go to one place would overwrite each other.
fn check_targets(destination: &DestinationConfig, taken: &[&TableSchema]) -> Result<()> {
    let mut targets: BTreeMap<String, &TableSchema> = BTreeMap::new();
    for schema in taken {
        let target = destination.target(&schema.name).to_string();
        if let Some(other) = targets.insert(target.clone(), schema) {
            return Err(Error::usage(
                "table.same-target",
                format!("destination `{}`: {} and {} both go to {target}", destination.name, other.name, schema.name),
            )
            .next("Give one of them another target in [[destination.table]]."));
        }
    }
    Ok(())
}

fn names<'a>(schemas: impl Iterator<Item = &'a &'a TableSchema>) -> String {
    let mut names: Vec<String> = schemas.map(|schema| schema.name.to_string()).collect();
    let more = names.len().saturating_sub(10);
    names.truncate(10);
    let list = names.join(", ");
    if more > 0 { format!("{list} and {more} more") } else { list }
}

/// Makes sure that the slot is there and is the one the state knows (P8). Returns what is
/// to be recorded of the source from here on, which is stored only if the slot was made,
/// and what became of the publication.
pub(super) async fn ensure_slot(
    config: &Config,
    store: &Store,
    loaded: &Loaded,
    facts: &SourceFacts,
) -> Result<(SourceRecord, Publication)> {
    let mut connection = ReplicationConnection::connect(&config.source).await?;
    let system = connection.identify_system().await?;
    let mut record = SourceRecord {
        system: system.system,
        timeline: system.timeline,
        slot: config.source.slot.clone(),
        publication: config.source.publication.clone(),
        publication_oid: facts.publication_oid,
        plugin: "pgoutput".to_owned(),
        epoch: 0,
        slot_state: SlotRecord::Intended,
    };
    let intended = match &loaded.source {
        Some(known) => {
            let publication = check_identity(known, &record)?;
            record.epoch = known.epoch;
            // Copies and checkpoints say what was taken from the server before it.
            let identity = Identity { known: Known::new(known.clone()), store: store.clone() };
            let promoted = identity.check(&mut connection, Lsn::ZERO).await?;
            if let SlotRecord::Created { .. } = known.slot_state {
                check_slot(config, loaded, facts)?;
                let mut record = SourceRecord { timeline: promoted.unwrap_or(known.timeline), ..known.clone() };
                record.publication_oid = facts.publication_oid;
                return Ok((record, publication));
            }
            true
        }
        None => false,
    };
    if facts.slot.is_some() {
        if !intended {
            return Err(foreign_slot(config));
        }
        // Ours, from a start that ended before it could write so: nothing was read from it.
        connection.drop_slot(&config.source.slot).await?;
    }
    store.save_source(record.clone()).await?;
    crate::failpoint::reached("slot.intended");
    let CreatedSlot { consistent_point, .. } =
        connection.create_slot(&config.source.slot, SlotKind::Permanent, SLOT_TIMEOUT).await?;
    crate::failpoint::reached("slot.created");
    record.slot_state = SlotRecord::Created { at: consistent_point };
    store.save_source(record.clone()).await?;
    crate::failpoint::reached("slot.recorded");
    tracing::info!(slot = %record.slot, at = %consistent_point, "created the replication slot");
    Ok((record, Publication::Same))
}

/// LSNs of another system mean another history; for its timeline see [`Identity`].
fn check_identity(known: &SourceRecord, found: &SourceRecord) -> Result<Publication> {
    for (what, stored, now) in [("system identifier", &known.system, &found.system), ("slot", &known.slot, &found.slot)]
    {
        if stored != now {
            return Err(changed(what, stored, now));
        }
    }
    let shown = |record: &SourceRecord| format!("{} (oid {})", record.publication, record.publication_oid);
    Publication::of(known, found).ok_or_else(|| changed("publication", &shown(known), &shown(found)))
}

/// Whether the slot is the one the state knows (P8). `facts` have to be older than the
/// call: of a pipeline at work the checkpoint is stored first.
///
/// Errors: `slot.exists`, `slot.missing`, `slot.ahead` (exit code 3); `state.*`.
pub fn check_state(config: &Config, facts: &SourceFacts) -> Result<()> {
    let loaded = match config.pipeline.read_store() {
        Ok(store) => store.load()?,
        Err(error) if error.code() == "state.missing" => Loaded::default(),
        Err(error) => return Err(error),
    };
    match loaded.source.as_ref().map(|known| known.slot_state) {
        None if facts.slot.is_some() => Err(foreign_slot(config)),
        Some(SlotRecord::Created { .. }) => check_slot(config, &loaded, facts),
        None | Some(SlotRecord::Intended) => Ok(()),
    }
}

fn check_slot(config: &Config, loaded: &Loaded, facts: &SourceFacts) -> Result<()> {
    let slot = &config.source.slot;
    let again = "Changes may be lost. Begin with a new state directory, and without the schema that `store` may have, which copies everything again.";
    let Some(found) = &facts.slot else {
        return Err(Error::no(
            "slot.missing",
            format!("the replication slot `{slot}` is gone, and with it the log behind the checkpoints"),
        )
        .next(again));
    };
    let known: Vec<Lsn> = config
        .destinations
        .iter()
        .filter_map(|destination| loaded.destinations.iter().find(|record| record.name == destination.name))
        .map(|record| record.checkpoint)
        .collect();
    match known.iter().min() {
        Some(smallest) if found.confirmed > *smallest => Err(Error::no(
            "slot.ahead",
            format!(
                "the replication slot `{slot}` was confirmed up to {}, beyond the checkpoint {smallest}",
                found.confirmed
            ),
        )
        .next(again)),
        _ => Ok(()),
    }
}

fn foreign_slot(config: &Config) -> Error {
    let slot = &config.source.slot;
    Error::no("slot.exists", format!("a replication slot `{slot}` exists, and {} does not know it", config.pipeline.state_place()))
        .next(format!("If no other Tidegate uses it, run SELECT pg_drop_replication_slot('{slot}'); else choose another `pipeline.name`, or the state that belongs to it."))
}
