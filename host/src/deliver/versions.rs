//! Versions of table schemas as the source makes them: from DDL messages, from the
//! catalog where there was none, from copies.

use std::sync::Arc;

use bytes::Bytes;
use serde_json::Value;

use crate::error::{Error, Result};
use crate::position::{Lsn, SnapshotId};
use crate::schema::history::{Appended, History};
use crate::schema::moment::Moment;
use crate::schema::table::{Origin, TableSchema};
use crate::schema::tombstone::Ended;
use crate::source::catalog::{schema_from_picture, table_schema};
use crate::source::config::SourceConfig;
use crate::source::pgoutput::Relation;
use crate::source::session::connect;
use crate::source::trigger::{DDL_PREFIX, DdlMessage, open_message};
use crate::store::Store;

use super::away::Away;
use super::feed::{SharedHistory, Transaction, is_told_by};
use super::retry::Backoff;
use super::told::{Doubt, Told};
use super::tombstones;

/// The history, and who may add to it. An entry is on disk before anyone decodes by it.
#[derive(Clone)]
pub(super) struct Versions {
    history: SharedHistory,
    store: Store,
    source: Arc<SourceConfig>,
    away: Away,
    /// Proves that a message is our trigger's (P25); none without a trigger.
    key: Option<Arc<[u8]>>,
}

impl Versions {
    pub fn new(
        history: SharedHistory,
        store: Store,
        source: Arc<SourceConfig>,
        away: Away,
        key: Option<Vec<u8>>,
    ) -> Versions {
        Versions { history, store, source, away, key: key.map(Arc::from) }
    }

    /// For look-ups.
    pub fn history(&self) -> SharedHistory {
        self.history.clone()
    }

    /// Takes a logical message.
    pub async fn message(&self, prefix: &Bytes, content: &Bytes, transaction: Transaction, lsn: Lsn) -> Told {
        let nothing = Told::default();
        if prefix.as_ref() != DDL_PREFIX.as_bytes() {
            return nothing;
        }
        let Some(key) = &self.key else {
            tracing::warn!(%lsn, "a DDL message without an installed trigger is ignored");
            return nothing;
        };
        let snapshot = SnapshotId { commit: transaction.commit, message: lsn };
        let committed_at = Some(Moment(transaction.committed_at));
        let look = Told { look: true, ..Told::default() };
        match open_message(key, content) {
            Ok(DdlMessage::Table { picture, rewritten, .. }) => {
                self.changed(&picture, rewritten, snapshot, committed_at).await
            }
            Ok(DdlMessage::Closing) => nothing,
            Ok(DdlMessage::Left { oid }) => Told { left: Some(oid), ..look },
            Ok(DdlMessage::Dropped { oids }) => {
                for oid in oids {
                    tombstones::end(&self.store, &self.history, oid, (snapshot, committed_at), Ended::Dropped).await;
                }
                look
            }
            Ok(DdlMessage::Publication { oid, publish }) if oid == self.away.publication().oid => {
                // One that is gone publishes nothing, which the looks find out.
                Told { publish: (!publish.is_empty()).then_some(publish), ..look }
            }
            Ok(DdlMessage::Publication { .. }) => nothing,
            Ok(DdlMessage::CaptureFailed { oid, command, reason, rewritten }) => {
                tracing::warn!(
                    oid, %lsn, code = "trigger.capture-failed", command,
                    "what a command changed could not be captured, and is seen when rows come: {reason}"
                );
                let doubt = oid
                    .filter(|_| rewritten)
                    .map(|oid| Doubt { oid: Some(oid), error: not_captured(&command, &reason) });
                Told { doubt, ..look }
            }
            Ok(DdlMessage::Unreadable { oid, code, why }) => {
                Told { doubt: Some(Doubt { oid, error: unreadable(code, &why) }), ..look }
            }
            Err(error) => {
                tracing::warn!(%lsn, code = error.code(), "a message that is not our trigger's is ignored: {error}");
                nothing
            }
        }
    }

    /// A command has changed a table of some publication.
    async fn changed(
        &self,
        picture: &Value,
        rewritten: bool,
        snapshot: SnapshotId,
        committed_at: Option<Moment>,
    ) -> Told {
        let oid = picture["oid"].as_u64().and_then(|oid| u32::try_from(oid).ok());
        // ATTACH and DETACH are commands on a root, and change no version of it (P22).
        let look = picture["kind"] == "p";
        let doubt = |why: &str| Told {
            look,
            doubt: Some(Doubt { oid, error: unreadable("trigger.payload", why) }),
            ..Told::default()
        };
        let Some(publications) = picture["publications"].as_array() else {
            return doubt("it does not say which publications it is about");
        };
        // By its oid: until a rename was read it has another name.
        let ours = u64::from(self.away.publication().oid);
        let by_oid = publications.iter().find(|publication| publication["oid"].as_u64() == Some(ours));
        let name = by_oid.and_then(|publication| publication["name"].as_str());
        let name = name.unwrap_or(&self.source.publication);
        let schema = match schema_from_picture(picture, name, snapshot, Origin::Message) {
            Ok(Some(schema)) => schema,
            // Of another publication; ours it may have left.
            Ok(None) => return Told { look, left: oid, ..Told::default() },
            Err(error) => return doubt(error.message()),
        };
        let schema = TableSchema { rewritten, committed_at, ..schema };
        let oid = schema.oid;
        self.append(schema).await;
        // One that is known by its id begins here too: a destination may have died before it
        // was told, and no row need ever tell it.
        let version = self.read(|history| history.get(oid, snapshot)).map(|_| oid);
        Told { version, look, ..Told::default() }
    }

    /// A version read in the snapshot of a copy. What is in force there: the same, or an
    /// equal one that was known.
    pub async fn copied(&self, schema: TableSchema) -> Result<Arc<TableSchema>> {
        let (oid, snapshot) = (schema.oid, schema.snapshot);
        self.append(schema).await;
        self.read(|history| history.in_force(oid, snapshot.commit, snapshot.commit)).ok_or_else(|| {
            Error::permanent("schema.history", format!("table {oid}: the version {snapshot} is not in the history"))
        })
    }

    /// A relation that no known version looks like: today's catalog tells, if it looks
    /// exactly like it (P5); else the table has to wait for somebody.
    pub async fn resolve(&self, relation: &Relation, transaction: Transaction, row: Lsn) -> Result<()> {
        let session = connect(&self.source).await?;
        let commit = transaction.commit;
        let snapshot = SnapshotId { commit, message: row };
        let found = table_schema(&*session, relation.oid, &self.source.publication, snapshot, Origin::Catalog).await?;
        let schema = found.filter(|schema| is_told_by(schema, relation)).ok_or_else(|| ambiguous(relation, commit))?;
        let committed_at = Some(Moment(transaction.committed_at));
        self.append(TableSchema { committed_at, ..schema }).await;
        Ok(())
    }

    /// Adds a version, and stores what became an entry before anything goes on.
    async fn append(&self, schema: TableSchema) {
        let schema = self.with_what_is_within(schema);
        let (oid, snapshot) = (schema.oid, schema.snapshot);
        let entries = {
            let mut history = self.history.write();
            let appended = history.append(schema);
            let mut entries = history.take_revived();
            if appended == Appended::New {
                entries.extend(history.get(oid, snapshot));
            }
            entries
        };
        for entry in entries {
            self.store_entry(&entry).await;
        }
    }

    /// What the text of values is made of may have changed, and with it that of rows that
    /// nobody changed (P28). A copy brings them as they are.
    fn with_what_is_within(&self, mut schema: TableSchema) -> TableSchema {
        let before = self.read(|history| {
            history.versions(schema.oid).iter().rev().find(|version| version.snapshot < schema.snapshot).cloned()
        });
        let Some(before) = before else { return schema };
        for column in &mut schema.columns {
            let Some((_, known)) = before.column(column.ordinal) else { continue };
            let Some(within) = &known.within else { continue };
            match &column.within {
                None => column.within = Some(within.clone()),
                Some(now) if schema.origin != Origin::Copy && known.type_oid == column.type_oid => {
                    schema.rewritten |= within.reads_differently(now);
                }
                Some(_) => {}
            }
        }
        schema
    }

    /// A store that cannot write stops the stream until it can (design, section 4).
    async fn store_entry(&self, entry: &TableSchema) {
        let mut backoff = Backoff::transient();
        while let Err(error) = self.store.append_history(entry.clone()).await {
            tracing::error!(table = %entry.name, code = error.code(), "a schema version could not be stored; trying again: {error}");
            tokio::time::sleep(backoff.pause(None)).await;
        }
    }

    fn read<T>(&self, look: impl FnOnce(&History) -> T) -> T {
        look(&self.history.read())
    }
}

/// The rows of a table have other values, and what else happened to it nobody knows.
fn not_captured(command: &str, reason: &str) -> Error {
    Error::permanent(
        "schema.not-captured",
        format!("{command} rewrote rows, and what it made of the table could not be captured: {reason}"),
    )
    .next("Run `tidegate resync DEST TABLE`.")
}

/// It is authentic, so something did change.
fn unreadable(code: &'static str, why: &str) -> Error {
    Error::permanent(code, format!("a message of the DDL trigger cannot be read: {why}"))
        .next("Run `tidegate trigger install` with this version of tidegate, then `tidegate resync DEST TABLE`.")
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

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::source::members::Publication;
    use crate::source::trigger::sealed;

    const KEY: [u8; 32] = [7; 32];

    fn versions(directory: &std::path::Path) -> Versions {
        let source = Arc::new(SourceConfig::parse("postgres://u@localhost/d", "p", "told").unwrap());
        let ours = Publication { oid: 5, name: "p".to_owned(), publish: "iudt".to_owned(), xmin: "1".to_owned() };
        let history = SharedHistory::new(History::default());
        let store = Store::open(directory, "told").unwrap();
        Versions::new(history, store, source, Away::new(ours), Some(KEY.to_vec()))
    }

    fn picture(publications: &Value) -> Value {
        json!({
            "version": 1, "oid": 70, "schema": "public", "name": "t", "kind": "r", "persistence": "p",
            "replica_identity": "d", "publications": publications,
            "columns": [{
                "ordinal": 1, "name": "id", "declared": "integer", "base": "int4", "element": null, "delimiter": null,
                "type_oid": 23, "typmod": -1, "base_typmod": -1, "not_null": true, "key_position": 1,
                "identity_column": true, "default": null, "generated": "", "identity": "", "enum_labels": null, "within": {}
            }],
        })
    }

    async fn told(versions: &Versions, payload: &Value, lsn: u64) -> Told {
        let content = Bytes::from(sealed(&KEY, &payload.to_string()));
        versions
            .message(
                &Bytes::from_static(DDL_PREFIX.as_bytes()),
                &content,
                Transaction { commit: Lsn(lsn + 9), committed_at: 0, xid: 0 },
                Lsn(lsn),
            )
            .await
    }

    fn table(publications: Value) -> Value {
        json!({"version": 3, "kind": "table", "command": "ALTER TABLE", "rewritten": false, "picture": picture(&publications)})
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_message_of_another_publication_makes_no_version_and_one_that_does_not_say_stops_the_table() {
        let directory = tempfile::tempdir().unwrap();
        let versions = versions(directory.path());
        let ours = json!([{"name": "q", "oid": 6, "columns": null}, {"name": "p", "oid": 5, "columns": null}]);
        assert_eq!(told(&versions, &table(ours), 10).await.version, Some(70));
        // Under another name, which a rename gave it.
        let renamed = told(&versions, &table(json!([{"name": "r", "oid": 5, "columns": null}])), 20).await;
        assert_eq!((renamed.version, renamed.left), (None, None), "it is the same version");
        let other = told(&versions, &table(json!([{"name": "q", "oid": 6, "columns": null}])), 30).await;
        assert_eq!((other.version, other.left), (None, Some(70)));
        let unsaid = told(&versions, &table(Value::Null), 40).await;
        let doubt = unsaid.doubt.unwrap();
        assert_eq!((doubt.oid, doubt.error.code()), (Some(70), "trigger.payload"));
        assert_eq!(versions.read(|history| history.versions(70).len()), 1);
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_capture_that_failed_stops_a_table_only_if_its_rows_were_rewritten() {
        let directory = tempfile::tempdir().unwrap();
        let versions = versions(directory.path());
        let failed = |rewritten: bool| json!({"version": 3, "kind": "capture-failed", "oid": 70, "command": "ALTER TABLE", "reason": "no", "rewritten": rewritten});
        assert!(told(&versions, &failed(false), 10).await.doubt.is_none());
        let doubt = told(&versions, &failed(true), 20).await.doubt.unwrap();
        assert_eq!((doubt.oid, doubt.error.code()), (Some(70), "schema.not-captured"));
        let unknown = told(&versions, &json!({"version": 9}), 30).await.doubt.unwrap();
        assert_eq!((unknown.oid, unknown.error.code()), (None, "trigger.version"));
        // Of a publication only ours matters.
        let publication =
            |oid: u32| json!({"version": 3, "kind": "publication", "oid": oid, "name": "x", "publish": "i"});
        assert_eq!(told(&versions, &publication(5), 40).await.publish.as_deref(), Some("i"));
        assert!(!told(&versions, &publication(6), 50).await.look);
    }
}
