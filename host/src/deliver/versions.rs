//! Versions of table schemas as the source makes them: from DDL messages, from the
//! catalog where there was none, from copies.

use std::sync::Arc;

use bytes::Bytes;

use crate::error::{Error, Result};
use crate::position::{Lsn, SnapshotId};
use crate::schema::history::Appended;
use crate::schema::table::{Origin, TableSchema};
use crate::source::catalog::{schema_from_picture, table_schema};
use crate::source::config::SourceConfig;
use crate::source::pgoutput::Relation;
use crate::source::session::connect;
use crate::source::trigger::{DDL_PREFIX, DdlMessage, open_message};
use crate::store::Store;

use super::feed::SharedHistory;
use super::retry::Backoff;

/// The history, and who may add to it. An entry is on disk before anyone decodes by it.
#[derive(Clone)]
pub(super) struct Versions {
    history: SharedHistory,
    store: Store,
    source: Arc<SourceConfig>,
    /// Proves that a message is our trigger's (P25); none without a trigger.
    key: Option<Arc<[u8]>>,
}

impl Versions {
    pub fn new(history: SharedHistory, store: Store, source: Arc<SourceConfig>, key: Option<Vec<u8>>) -> Versions {
        Versions { history, store, source, key: key.map(Arc::from) }
    }

    /// For look-ups.
    pub fn history(&self) -> SharedHistory {
        self.history.clone()
    }

    /// Takes a logical message. The table, if a new version of it begins here.
    pub async fn message(&self, prefix: &Bytes, content: &Bytes, commit: Lsn, lsn: Lsn) -> Result<Option<u32>> {
        if prefix.as_ref() != DDL_PREFIX.as_bytes() {
            return Ok(None);
        }
        let Some(key) = &self.key else {
            tracing::warn!(%lsn, "a DDL message without an installed trigger is ignored");
            return Ok(None);
        };
        let picture = match open_message(key, content) {
            Ok(DdlMessage::Table { picture, .. }) => picture,
            Ok(DdlMessage::CaptureFailed { oid, reason }) => {
                tracing::warn!(oid, %lsn, "a schema change could not be captured, its next rows will tell: {reason}");
                return Ok(None);
            }
            Ok(_) => return Ok(None),
            Err(error) => {
                tracing::warn!(%lsn, code = error.code(), "a message that is not our trigger's is ignored: {error}");
                return Ok(None);
            }
        };
        let snapshot = SnapshotId { commit, message: lsn };
        let Some(schema) = schema_from_picture(&picture, &self.source.publication, snapshot, Origin::Message)? else {
            return Ok(None);
        };
        let oid = schema.oid;
        Ok(self.append(schema).await?.then_some(oid))
    }

    /// A version read in the snapshot of a copy. What is in force there: the same, or an
    /// equal one that was known.
    pub async fn copied(&self, schema: TableSchema) -> Result<Arc<TableSchema>> {
        let (oid, snapshot) = (schema.oid, schema.snapshot);
        self.append(schema).await?;
        self.read(|history| history.in_force(oid, snapshot.commit, snapshot.commit)).ok_or_else(|| {
            Error::permanent("schema.history", format!("table {oid}: the version {snapshot} is not in the history"))
        })
    }

    /// A relation that no known version looks like: today's catalog tells, if it looks
    /// exactly like it (P5); else the table has to wait for somebody.
    pub async fn resolve(&self, relation: &Relation, commit: Lsn, row: Lsn) -> Result<()> {
        let session = connect(&self.source).await?;
        let snapshot = SnapshotId { commit, message: row };
        let found = table_schema(&*session, relation.oid, &self.source.publication, snapshot, Origin::Catalog).await?;
        let schema = found.filter(|schema| looks_like(schema, relation)).ok_or_else(|| ambiguous(relation, commit))?;
        self.append(schema).await?;
        Ok(())
    }

    /// Adds a version, and stores what became an entry before anything goes on. Whether
    /// it is one.
    async fn append(&self, schema: TableSchema) -> Result<bool> {
        let (oid, snapshot) = (schema.oid, schema.snapshot);
        let (appended, entries) = {
            let mut history = self.history.write().unwrap_or_else(|poisoned| poisoned.into_inner());
            let appended = history.append(schema);
            let mut entries = history.take_revived();
            if appended == Appended::New {
                entries.extend(history.get(oid, snapshot));
            }
            (appended, entries)
        };
        for entry in entries {
            self.store_entry(&entry).await;
        }
        Ok(appended == Appended::New)
    }

    /// A store that cannot write stops the stream until it can (design, section 4).
    async fn store_entry(&self, entry: &TableSchema) {
        let mut backoff = Backoff::transient();
        while let Err(error) = self.store.append_history(entry.clone()).await {
            tracing::error!(table = %entry.name, code = error.code(), "a schema version could not be stored; trying again: {error}");
            tokio::time::sleep(backoff.pause(None)).await;
        }
    }

    fn read<T>(&self, look: impl FnOnce(&crate::schema::history::History) -> T) -> T {
        look(&self.history.read().unwrap_or_else(|poisoned| poisoned.into_inner()))
    }
}

/// By name and type, position by position.
fn looks_like(schema: &TableSchema, relation: &Relation) -> bool {
    schema.columns.len() == relation.columns.len()
        && schema
            .columns
            .iter()
            .zip(&relation.columns)
            .all(|(known, sent)| known.name == sent.name && known.type_oid == sent.type_oid)
}

fn ambiguous(relation: &Relation, commit: Lsn) -> Error {
    let columns: Vec<&str> = relation.columns.iter().map(|column| column.name.as_str()).collect();
    Error::permanent(
        "schema.ambiguous",
        format!(
            "table {}: rows of the transaction at {commit} have columns ({}), which neither a known version nor today's catalog has",
            relation.name,
            columns.join(", ")
        ),
    )
    .next("Install the DDL trigger (`tidegate trigger install`) so that changes are seen as they happen, then run `tidegate resync DEST TABLE`.")
}
