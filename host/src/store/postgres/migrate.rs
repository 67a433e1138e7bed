//! The schema of the state, and its version.

use super::super::server::StoreServer;
use super::link::{Failure, Link, one};
use crate::error::Error;

/// Applied in order; `meta.version` counts how many were. Never edited once released: the
/// next change of the schema is the next file.
pub(super) const MIGRATIONS: &[&str] = &[
    include_str!("../migrations/postgres/0001_first.sql"),
    include_str!("../migrations/postgres/0002_barriers.sql"),
    include_str!("../migrations/postgres/0003_history.sql"),
    include_str!("../migrations/postgres/0004_stretches.sql"),
];

/// The number of migrations that were applied; 0 if there is no state.
pub(super) async fn version(link: &Link, server: &StoreServer) -> Result<usize, Failure> {
    let rows = link
        .query(
            "SELECT to_regclass(quote_ident($1) || '.meta') IS NOT NULL AND
                       to_regclass(quote_ident($1) || '.writer') IS NOT NULL",
            &[&server.schema()],
        )
        .await?;
    if !one(&rows)?.try_get::<_, bool>(0)? {
        return Ok(0);
    }
    let rows = link.query("SELECT value FROM meta WHERE key = 'version'", &[]).await?;
    let text: String = one(&rows)?.try_get(0)?;
    text.parse().map_err(|_| Failure::Unreadable(format!("its version is `{text}`")))
}

/// Refuses a state of a later version; returns its own.
pub(super) async fn check(link: &Link, server: &StoreServer, known: usize) -> Result<usize, Failure> {
    let version = version(link, server).await?;
    if version > known {
        let message = format!(
            "the state in {} has version {version}, this tidegate knows versions up to {known}",
            server.place()
        );
        let newer = Error::usage("state.newer", message);
        return Err(newer.next("Use the version of tidegate that wrote it, or a later one.").into());
    }
    Ok(version)
}

/// Makes or migrates the tables, all or nothing. The caller holds the lock.
pub(super) async fn up_to_date(link: &Link, server: &StoreServer, migrations: &[&str]) -> Result<(), Failure> {
    let applied = check(link, server, migrations.len()).await?;
    if applied == migrations.len() {
        return Ok(());
    }
    link.batch("BEGIN").await?;
    let migrated = migrate(link, server, migrations, applied).await;
    link.batch(if migrated.is_ok() { "COMMIT" } else { "ROLLBACK" }).await?;
    migrated
}

async fn migrate(link: &Link, server: &StoreServer, migrations: &[&str], applied: usize) -> Result<(), Failure> {
    let rows = link.query("SELECT to_regnamespace(quote_ident($1)) IS NULL", &[&server.schema()]).await?;
    if one(&rows)?.try_get(0)? {
        // The name has no letter that wants quotes: see `pipeline.name`.
        link.batch(&format!("CREATE SCHEMA \"{}\"", server.schema())).await?;
    }
    for sql in &migrations[applied..] {
        link.batch(sql).await?;
    }
    let version = migrations.len().to_string();
    // Not prepared: the table may be as old as this transaction.
    let put = format!(
        "INSERT INTO meta (key, value) VALUES ('version', '{version}')
         ON CONFLICT (key) DO UPDATE SET value = excluded.value"
    );
    link.batch(&put).await
}
