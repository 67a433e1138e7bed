//! One writer: a lock that dies with its connection, and a number that proves, after a
//! new connection, that nobody else wrote meanwhile.
//!
//! The lock alone is not enough. It is lost with its connection, which the process does
//! not notice before it writes again; a transaction of the old writer could then commit
//! behind the new one's. So the new one raises `writer.fence`, and each transaction that
//! writes finds its own number there and keeps the row locked until it ends.

use std::time::{Duration, Instant};

use super::super::directory::Directory;
use super::super::limits::other_pipeline;
use super::super::server::StoreServer;
use super::link::{Failure, Link, one};
use super::migrate;
use crate::error::Error;

/// How long the lock may be held by a process that has just died, whose end the server
/// has to notice.
const PATIENCE: Duration = Duration::from_secs(5);
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// The right to write.
#[derive(Clone, Debug)]
pub(super) struct Claim {
    fence: i64,
    /// Of the connection that it was last held by.
    backend: (i32, String),
}

impl Claim {
    /// Locks the state, brings its tables up to date and makes it ours.
    ///
    /// # Errors
    /// `state.in-use`, `state.newer`, `state.other-pipeline`, `state.other-directory`, all
    /// with exit code 2.
    pub(super) async fn take(
        link: &Link,
        server: &StoreServer,
        pipeline: &str,
        directory: &Directory,
        migrations: &[&str],
    ) -> Result<Claim, Failure> {
        if !lock(link, server, None).await? {
            return Err(in_use(link, server).await?.into());
        }
        migrate::up_to_date(link, server, migrations).await?;
        link.batch("BEGIN").await?;
        let taken = own(link, server, pipeline, directory).await;
        link.batch(if taken.is_ok() { "COMMIT" } else { "ROLLBACK" }).await?;
        Ok(Claim { fence: taken?, backend: link.backend.clone() })
    }

    /// The same right over a new connection.
    ///
    /// # Errors
    /// [`Failure::Lost`] if anybody has written since.
    pub(super) async fn regain(&mut self, link: &Link, server: &StoreServer) -> Result<(), Failure> {
        let locked = lock(link, server, Some(&self.backend)).await?;
        self.check(link).await?;
        if !locked {
            let message = format!("the lock of the state in {} is held by another session", server.place());
            return Err(Error::transient("state.busy", message).next("End the session that holds it.").into());
        }
        self.backend = link.backend.clone();
        Ok(())
    }

    /// In a transaction, and until it ends: nobody else writes.
    pub(super) async fn check(&self, link: &Link) -> Result<(), Failure> {
        let held = link.query("SELECT 1 FROM writer WHERE id = 1 AND fence = $1 FOR SHARE", &[&self.fence]).await?;
        if !held.is_empty() {
            return Ok(());
        }
        let rows = link.query("SELECT host, pid FROM writer", &[]).await?;
        let (host, pid): (String, i64) = match rows.first() {
            Some(row) => (row.try_get("host")?, row.try_get("pid")?),
            None => ("an unknown host".to_owned(), 0),
        };
        Err(Failure::Lost(format!(
            "process {pid} on {host} has taken the state over while this one could not reach it"
        )))
    }
}

/// Tries to get the lock for a while. `before` is a server process that had it for us and
/// may not have noticed yet that we are gone: it is ended.
async fn lock(link: &Link, server: &StoreServer, before: Option<&(i32, String)>) -> Result<bool, Failure> {
    let begun = Instant::now();
    let key = server.lock_key();
    loop {
        let rows = link.query("SELECT pg_try_advisory_lock($1)", &[&key]).await?;
        if one(&rows)?.try_get(0)? {
            return Ok(true);
        }
        if begun.elapsed() > PATIENCE {
            return Ok(false);
        }
        if let Some((pid, since)) = before {
            link.query(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid = $1 AND backend_start::text = $2",
                &[pid, since],
            )
            .await?;
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

/// Who holds the lock, as far as that can be told.
async fn in_use(link: &Link, server: &StoreServer) -> Result<Error, Failure> {
    let key = server.lock_key().cast_unsigned();
    let (high, low) = ((key >> 32) as u32, (key & u64::from(u32::MAX)) as u32);
    let rows = link
        .query(
            "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND granted AND classid = $1 AND objid = $2
                 AND objsubid = 1 AND database = (SELECT oid FROM pg_database WHERE datname = current_database())",
            &[&high, &low],
        )
        .await?;
    let backend: Option<i32> = rows.first().map(|row| row.try_get(0)).transpose()?;
    let mut holder = match backend {
        Some(backend) => format!("another process (server process {backend})"),
        None => "another process".to_owned(),
    };
    if migrate::version(link, server).await? > 0 {
        let rows = link.query("SELECT host, pid, backend FROM writer", &[]).await?;
        if let Some(row) = rows.first()
            && backend == Some(row.try_get("backend")?)
        {
            let (host, pid): (String, i64) = (row.try_get("host")?, row.try_get("pid")?);
            holder = format!("process {pid} on {host} (server process {})", backend.unwrap_or_default());
        }
    }
    Ok(Error::usage("state.in-use", format!("the state in {} is in use by {holder}", server.place()))
        .next("Stop it, or give this pipeline another name: each has a schema of its own."))
}

/// Checks whose the state is, and writes down that it is ours from here on.
async fn own(link: &Link, server: &StoreServer, pipeline: &str, directory: &Directory) -> Result<i64, Failure> {
    link.execute("INSERT INTO meta (key, value) VALUES ('pipeline', $1) ON CONFLICT DO NOTHING", &[&pipeline]).await?;
    let rows = link.query("SELECT value FROM meta WHERE key = 'pipeline'", &[]).await?;
    let owner: String = one(&rows)?.try_get(0)?;
    if owner != pipeline {
        return Err(other_pipeline(&server.place(), &owner, pipeline).into());
    }
    let rows = link.query("SELECT directory_id, directory, host FROM writer WHERE id = 1 FOR UPDATE", &[]).await?;
    let row = one(&rows)?;
    let known: Option<String> = row.try_get("directory_id")?;
    if known.is_some_and(|known| known != directory.id) {
        let path: Option<String> = row.try_get("directory")?;
        let at = format!("{} on {}", path.unwrap_or_default(), row.try_get::<_, String>("host")?);
        return Err(elsewhere(server, directory, &at).into());
    }
    let rows = link
        .query(
            "UPDATE writer SET fence = fence + 1, host = $1, pid = $2, backend = pg_backend_pid(), taken_at = now(),
                 directory_id = $3, directory = $4 WHERE id = 1 RETURNING fence",
            &[&host(), &i64::from(std::process::id()), &directory.id, &directory.path],
        )
        .await?;
    Ok(one(&rows)?.try_get(0)?)
}

fn elsewhere(server: &StoreServer, directory: &Directory, at: &str) -> Error {
    Error::usage(
        "state.other-directory",
        format!(
            "the state in {} goes with the state directory {at}, whose spool holds changes that the source may have forgotten, \
             and not with {}",
            server.place(),
            directory.path
        ),
    )
    .next(format!(
        "Start it there, or bring that directory here, all of it. If it is gone, drop the schema {} and the slot, and everything is copied anew.",
        server.schema()
    ))
}

/// What this machine calls itself.
fn host() -> String {
    let name =
        std::fs::read_to_string("/proc/sys/kernel/hostname").or_else(|_| std::fs::read_to_string("/etc/hostname"));
    match name.as_deref().map(str::trim) {
        Ok(name) if !name.is_empty() => name.to_owned(),
        _ => "an unnamed host".to_owned(),
    }
}
