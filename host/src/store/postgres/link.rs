//! One connection to the server that has the state, and what its errors mean.

use std::cell::RefCell;
use std::collections::HashMap;

use futures_util::future::try_join_all;
use tokio_postgres::error::Severity;
use tokio_postgres::types::ToSql;
use tokio_postgres::{Row, Statement};

use super::super::server::{StoreServer, unreachable};
use crate::error::{Error, Result};
use crate::source::Session;

/// Rows that are on their way at once: round trips, not the server, are what many rows
/// cost. So many are sent in their order.
const AT_ONCE: usize = 30;
/// Oldest server that is known to do.
const VERSION: i32 = 140_000;

/// What a session has, whatever role, database or server say. A statement that takes
/// longer is stuck; a transaction that idles is ours no more; a machine that is gone must
/// not hold the lock until TCP gives up by itself.
const SETTINGS: &str = "SELECT set_config(name, value, false) FROM (VALUES
    ('statement_timeout', '60s'), ('lock_timeout', '10s'), ('idle_in_transaction_session_timeout', '60s'),
    ('tcp_keepalives_idle', '15'), ('tcp_keepalives_interval', '5'), ('tcp_keepalives_count', '3')
    ) AS settings (name, value)";

/// `remote_apply` waits for more than `on`, all others for less.
const SYNCHRONOUS: &str = "SELECT set_config('synchronous_commit', 'on', false)
    WHERE current_setting('synchronous_commit') <> 'remote_apply'";

/// Parameters of a statement.
pub(super) type Parameters<'a> = &'a [&'a (dyn ToSql + Sync)];

/// A connection, its settings made, and the statements that were prepared in it.
pub(super) struct Link {
    session: Session,
    prepared: RefCell<HashMap<&'static str, Statement>>,
    /// Server process, and when it began: pids are used again.
    pub backend: (i32, String),
    /// Whether a commit survives the server's machine.
    pub fsync: bool,
}

impl Link {
    pub(super) async fn open(server: &StoreServer, read_only: bool) -> Result<Link, Failure> {
        let session = server.connect().await.map_err(Failure::of_connecting)?;
        let mut link = Link { session, prepared: RefCell::default(), backend: (0, String::new()), fsync: true };
        link.query(SETTINGS, &[]).await?;
        link.query(SYNCHRONOUS, &[]).await?;
        let read_only = if read_only { "on" } else { "off" };
        let rows = link
            .query(
                "SELECT set_config('search_path', quote_ident($1), false),
                     set_config('default_transaction_read_only', $2, false),
                     current_setting('server_version_num')::integer AS version, getdatabaseencoding()::text AS encoding,
                     current_setting('fsync') AS fsync, pid, backend_start::text AS begun
                 FROM pg_stat_activity WHERE pid = pg_backend_pid()",
                &[&server.schema(), &read_only],
            )
            .await?;
        let row = one(&rows)?;
        let (version, encoding): (i32, String) = (row.try_get("version")?, row.try_get("encoding")?);
        if version < VERSION {
            return Err(
                unfit(server, &format!("its PostgreSQL is {}, and 14 or later is needed", version / 10_000)).into()
            );
        }
        if encoding != "UTF8" {
            return Err(unfit(server, &format!("its encoding is {encoding}, and UTF8 is needed")).into());
        }
        link.fsync = row.try_get::<_, String>("fsync")? != "off";
        link.backend = (row.try_get("pid")?, row.try_get("begun")?);
        Ok(link)
    }

    async fn prepare(&self, sql: &'static str) -> Result<Statement, Failure> {
        if let Some(known) = self.prepared.borrow().get(sql) {
            return Ok(known.clone());
        }
        let statement = self.session.prepare(sql).await?;
        self.prepared.borrow_mut().insert(sql, statement.clone());
        Ok(statement)
    }

    /// Statements without parameters, one by one.
    pub(super) async fn batch(&self, sql: &str) -> Result<(), Failure> {
        Ok(self.session.batch_execute(sql).await?)
    }

    pub(super) async fn query(&self, sql: &'static str, parameters: Parameters<'_>) -> Result<Vec<Row>, Failure> {
        let statement = self.prepare(sql).await?;
        Ok(self.session.query(&statement, parameters).await?)
    }

    pub(super) async fn execute(&self, sql: &'static str, parameters: Parameters<'_>) -> Result<u64, Failure> {
        let statement = self.prepare(sql).await?;
        Ok(self.session.execute(&statement, parameters).await?)
    }

    /// One statement for each item, in their order, many on their way at once.
    pub(super) async fn each<T>(
        &self,
        sql: &'static str,
        items: &[T],
        run: impl AsyncFn(&Link, &T) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        self.prepare(sql).await?;
        for some in items.chunks(AT_ONCE) {
            try_join_all(some.iter().map(|item| run(self, item))).await?;
        }
        Ok(())
    }
}

/// The row of a query that has one.
pub(super) fn one(rows: &[Row]) -> Result<&Row, Failure> {
    rows.first().ok_or_else(|| Failure::Unreadable("a row that is always there is missing".to_owned()))
}

/// A server that cannot keep a state.
pub(super) fn unfit(server: &StoreServer, why: &str) -> Error {
    Error::no("state.server", format!("the state cannot be in {}: {why}", server.place()))
        .next("Name a database of another server in `store` of [pipeline], or leave `store` out.")
}

/// Why an operation did not come to its end.
#[derive(Debug)]
pub(super) enum Failure {
    /// The connection is gone: whether it was done is not known.
    Gone(String),
    /// The server refused it.
    Refused(tokio_postgres::Error),
    /// What is stored makes no sense.
    Unreadable(String),
    /// Another process has taken the state over.
    Lost(String),
    /// Ours.
    Ours(Error),
}

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        Failure::Ours(error)
    }
}

impl From<tokio_postgres::Error> for Failure {
    fn from(error: tokio_postgres::Error) -> Failure {
        let cause = std::error::Error::source(&error);
        match error.as_db_error() {
            Some(db) => {
                let ended = matches!(db.parsed_severity(), Some(Severity::Fatal | Severity::Panic));
                match ended || db.code().code().starts_with("08") {
                    true => Failure::Gone(said(db)),
                    false => Failure::Refused(error),
                }
            }
            None if error.is_closed() => Failure::Gone("the connection was closed".to_owned()),
            None => match cause {
                Some(cause) if cause.is::<std::io::Error>() => Failure::Gone(format!("{error}: {cause}")),
                Some(cause) => Failure::Unreadable(format!("{error}: {cause}")),
                None => Failure::Unreadable(error.to_string()),
            },
        }
    }
}

fn said(db: &tokio_postgres::error::DbError) -> String {
    format!("{} (SQLSTATE {})", db.message(), db.code().code())
}

impl Failure {
    fn of_connecting(error: Error) -> Failure {
        match error.is_transient() {
            true => Failure::Gone(error.message().to_owned()),
            false => Failure::Ours(error),
        }
    }

    /// What it means to whoever runs the pipeline.
    pub(super) fn into_error(self, server: &StoreServer) -> Error {
        let place = server.place();
        match self {
            Failure::Gone(why) => unreachable(&place, &why),
            Failure::Lost(message) => lost(&message),
            Failure::Ours(error) => error,
            Failure::Unreadable(what) => corrupt(&place, &what),
            Failure::Refused(error) => match error.as_db_error() {
                Some(db) => refused(server, db.code().code(), &said(db)),
                None => corrupt(&place, &error.to_string()),
            },
        }
    }
}

/// The one table from SQLSTATE to code, class and way out.
fn refused(server: &StoreServer, state: &str, said: &str) -> Error {
    let place = server.place();
    match state {
        "25006" => Error::permanent("state.read-only", format!("the state in {place} may not be written: {said}"))
            .next("Name the primary in `store` of [pipeline]: a standby cannot keep a state."),
        "42501" => Error::no("state.privilege", format!("the state in {place}: {said}")).next(format!(
            "Run as the database's owner: CREATE SCHEMA {} AUTHORIZATION {};",
            server.schema(),
            crate::schema::table::quote_identifier(server.user())
        )),
        "55P03" | "57014" | "40001" | "40P01" => {
            Error::transient("state.busy", format!("the state in {place} is locked by another session: {said}"))
                .next("End the session that holds its tables.")
        }
        "XX001" | "XX002" | "42P01" | "3F000" => corrupt(&place, said),
        _ if ["53", "58", "57"].iter().any(|class| state.starts_with(class)) => {
            Error::transient("state.write", format!("the state in {place} cannot be written: {said}"))
                .next("Free space on the server's disk, or see its log for what ails it; nothing is lost meanwhile.")
        }
        _ => Error::permanent("state.failed", format!("the state in {place} refused an operation: {said}"))
            .next("This is a fault in tidegate: report it with this message."),
    }
}

fn corrupt(place: &str, what: &str) -> Error {
    Error::permanent("state.corrupt", format!("the state in {place} cannot be read: {what}"))
        .next("Restore the schema from a backup, or drop it and the slot and copy everything anew.")
}

/// Another process has the state: this one must not go on.
pub(in crate::store) fn lost(message: &str) -> Error {
    Error::permanent("state.lost", message.to_owned())
        .next("Nothing, if the other process is to run the pipeline; else stop that one and start this again.")
}
