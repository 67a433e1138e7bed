//! What can be copied: tables are looked at many at a time, so that ten thousand small
//! ones cost a few hundred round trips.

use std::collections::HashMap;
use std::slice;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio_postgres::Client;

use super::{Wave, WaveTable, ranges, statement, table};
use crate::error::{Error, Result};
use crate::position::{Lsn, SnapshotId};
use crate::schema::moment::Moment;
use crate::schema::table::Origin;
use crate::source::catalog::{PublishedTable, published_tables, row_filters, table_schemas};
use crate::source::copy_out::Failed;
use crate::source::session::sql_error;

/// Tables looked at in one go: their locks are held meanwhile.
const AT_ONCE: usize = 100;
/// How long they wait for the locks of all of them: one that is held makes each be
/// looked at alone.
const TOGETHER_WITHIN: Duration = Duration::from_millis(200);

impl Wave {
    /// Sorts the tables into those that can be copied, the skipped ones, and those that
    /// changed since the snapshot, which it returns.
    pub(super) async fn examine(&mut self, asked: &[PublishedTable]) -> Result<Vec<(u32, Error)>> {
        let published = published_tables(&self.keeper, &self.config.publication).await?;
        let published: HashMap<u32, PublishedTable> = published.into_iter().map(|table| (table.oid, table)).collect();
        let mut found = Vec::new();
        for asked in asked {
            match published.get(&asked.oid) {
                Some(table) => found.push(table.clone()),
                None => self.skipped.push((asked.oid, self.not_published(asked).await?)),
            }
        }
        let deadline = Instant::now() + self.options.lock_timeout;
        let mut changed = Vec::new();
        for group in found.chunks(AT_ONCE) {
            let left = || deadline.saturating_duration_since(Instant::now());
            match self.look_at(group, left().min(TOGETHER_WITHIN)).await {
                Ok(looked) => looked.into_iter().for_each(|(oid, table)| self.sort_in(oid, table, &mut changed)),
                Err(error) if error.code() == "source.connection-lost" => return Err(error),
                // One of them is in the way, and must not be in that of the others.
                Err(_) => {
                    for table in group {
                        match self.look_at(slice::from_ref(table), left()).await {
                            Ok(looked) => {
                                looked.into_iter().for_each(|(oid, table)| self.sort_in(oid, table, &mut changed));
                            }
                            Err(error) if error.code() == "source.connection-lost" => return Err(error),
                            Err(error) => self.sort_in(table.oid, Err(error), &mut changed),
                        }
                    }
                }
            }
        }
        self.tables.sort_by_key(|table| table.rank);
        Ok(changed)
    }

    fn sort_in(&mut self, oid: u32, looked: Result<WaveTable>, changed: &mut Vec<(u32, Error)>) {
        match looked {
            Ok(table) => self.tables.push(table),
            Err(error) if error.code() == "copy.changed" => changed.push((oid, error)),
            Err(error) => self.skipped.push((oid, error)),
        }
    }

    /// Looks at some tables, which are locked meanwhile. They are locked again for the
    /// copy.
    async fn look_at(&self, tables: &[PublishedTable], timeout: Duration) -> Result<Vec<(u32, Result<WaveTable>)>> {
        statement(&self.keeper, "SAVEPOINT tidegate").await?;
        let looked = self.look_at_locked(tables, timeout).await;
        // Gives the locks back.
        statement(&self.keeper, "ROLLBACK TO SAVEPOINT tidegate; RELEASE SAVEPOINT tidegate").await?;
        looked
    }

    async fn look_at_locked(
        &self,
        tables: &[PublishedTable],
        timeout: Duration,
    ) -> Result<Vec<(u32, Result<WaveTable>)>> {
        let client: &Client = &self.keeper;
        let publication = &self.config.publication;
        let observer = self.observer().await?;
        let locked = client.batch_execute(&table::lock_whole_sql(tables, timeout)).await;
        if let (Err(error), Some(first)) = (locked, tables.first()) {
            let failed = Failed::of_sql(&error, &format!("locking table {} for its copy", first.name));
            return Err(table::lock_error(failed, &observer.session, first, timeout).await);
        }
        let oids: Vec<u32> = tables.iter().map(|table| table.oid).collect();
        let in_snapshot = table::digests(client, &self.digest_sql, &oids, publication).await?;
        let now = table::digests(&observer.session, &observer.digest, &oids, publication).await?;
        let version = SnapshotId { commit: self.floor, message: Lsn::ZERO };
        let mut schemas = table_schemas(client, tables, publication, version, Origin::Copy).await?;
        let taken = Some(taken_at(client).await?);
        schemas.values_mut().for_each(|schema| schema.committed_at = taken);
        let mut parts = table::parts(client, tables, &schemas).await?;
        let mut filters = row_filters(client, publication, &oids).await?;
        let mut look = |table: &PublishedTable| {
            let digest = in_snapshot.get(&table.oid).cloned().unwrap_or_default();
            if now.get(&table.oid) != Some(&digest) {
                return Err(table::changed(table));
            }
            let schema = schemas.remove(&table.oid).ok_or_else(|| left(table, publication))?;
            let parts = parts.remove(&table.oid).unwrap_or_else(|| Ok(Vec::new()))?;
            let source_bytes = parts.iter().map(|part| part.bytes).sum();
            Ok(WaveTable {
                table: table.clone(),
                row_filter: filters.remove(&table.oid),
                schema,
                estimated_rows: parts.iter().map(|part| part.rows).sum::<f64>() as u64,
                source_bytes,
                progress: Arc::default(),
                rank: u64::MAX - source_bytes,
                ranges: ranges::cut(&parts, self.options.connections.count).into(),
                parts: parts.into(),
                digest,
            })
        };
        Ok(tables.iter().map(|table| (table.oid, look(table))).collect())
    }

    /// Why the snapshot does not show that the table is published.
    async fn not_published(&self, asked: &PublishedTable) -> Result<Error> {
        let row = self.keeper.query_opt(include_str!("../sql/kinds.sql"), &[&asked.oid]).await;
        let row = row.map_err(|error| sql_error(&error, &format!("looking at table {}", asked.name)))?;
        let kinds = row.map(|row| (row.get::<_, String>(0), row.get::<_, String>(1)));
        Ok(match kinds.as_ref().map(|(kind, persistence)| (kind.as_str(), persistence.as_str())) {
            Some(("f", _)) => table::foreign(&asked.name, &asked.name),
            Some((_, "u")) => table::unlogged(&asked.name, &asked.name),
            _ => left(asked, &self.config.publication),
        })
    }
}

/// When a session's transaction began, which is when it imported the snapshot, by the
/// source's clock.
async fn taken_at(client: &Client) -> Result<Moment> {
    let sql = "SELECT (extract(epoch FROM transaction_timestamp()) * 1000000)::int8";
    let row =
        client.query_one(sql, &[]).await.map_err(|error| sql_error(&error, "asking when the snapshot was taken"))?;
    Ok(Moment(row.get(0)))
}

fn left(table: &PublishedTable, publication: &str) -> Error {
    let message = format!("table {} is not in publication `{publication}` any more", table.name);
    Error::permanent("copy.not-published", message).next("Nothing, if it was taken out on purpose; else add it again.")
}
