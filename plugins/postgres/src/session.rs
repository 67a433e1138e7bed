//! A session with the destination: settings pinned, metadata in place, lane taken.

use std::collections::VecDeque;

use tidegate_sdk::model::{Failure, Refusal};

use crate::connect::Connector;
use crate::connect::Stream;
use crate::error::{Error, make, of_destination};
use crate::metadata::Metadata;
use crate::protocol::Client;
use crate::settings::{ReplicaRole, Settings};

/// Oldest server that has the types in `types`.
const OLDEST_SERVER: u32 = 140_000;

/// What holds for a session whatever role or database say: how values are read, that
/// nobody's open transaction stays for ever, that a commit is on disk.
const PINNED: &str = "SET client_encoding = 'UTF8'; SET datestyle = 'ISO, MDY'; SET intervalstyle = 'postgres'; SET timezone = 'UTC'; \
    SET standard_conforming_strings = on; SET lc_monetary = 'C'; SET search_path = pg_catalog, pg_temp; SET row_security = off; \
    SET default_transaction_isolation = 'read committed'; SET default_transaction_read_only = off; SET transform_null_equals = off; SET array_nulls = on; \
    SET statement_timeout = 0; SET idle_in_transaction_session_timeout = '5min'; SET idle_session_timeout = 0; SET quote_all_identifiers = off; SET synchronous_commit = on; SET client_min_messages = warning";

/// What PostgreSQL 17 adds to them, and older servers do not know.
const UNLIMITED: &str = "SELECT set_config(name, '0', false) FROM pg_settings WHERE name = 'transaction_timeout'";

/// An open connection and what was made in it.
pub struct Session<S> {
    /// The connection.
    pub client: Client<S>,
    /// `server_version`.
    pub version: String,
    /// Tables that have a staging table, the oldest first.
    pub stages: VecDeque<u32>,
    /// The server has answered since the call began.
    pub answered: bool,
    /// Nothing can be sent any more.
    pub lost: bool,
}

impl<S: Stream> Session<S> {
    /// Connects, pins settings, makes the metadata if it is missing, takes the lane.
    pub fn open<C: Connector<Stream = S>>(
        connector: &C,
        settings: &Settings,
        application: &str,
        metadata: &Metadata,
    ) -> Result<Session<S>, Failure> {
        let place = format!("{}:{}", settings.host, settings.port);
        let response = std::time::Duration::from_millis(settings.response_timeout_ms.into());
        let stream = connector
            .dial(&settings.host, settings.port, settings.connect_timeout(), response)
            .map_err(|error| Error::Io(error).failure(&format!("connect to {place}"), None, Vec::new()))?;
        let client =
            Client::start(stream, settings, application, &|| connector.secret("password")).map_err(|error| {
                error.failure(
                    &format!("log in to database {} at {place} as {}", settings.database, settings.user),
                    None,
                    Vec::new(),
                )
            })?;
        let mut session =
            Session { client, version: String::new(), stages: VecDeque::new(), answered: false, lost: false };
        session.pin(settings)?;
        session.make_metadata(metadata)?;
        session.take_lane(metadata)?;
        session.answered = false;
        Ok(session)
    }

    /// Runs statements; `what` says what for, in an error.
    pub fn query(
        &mut self,
        sql: &str,
        what: &str,
        table: Option<u32>,
    ) -> Result<Vec<crate::protocol::Answer>, Failure> {
        match self.client.query(sql) {
            Ok(answers) => {
                self.answered = true;
                Ok(answers)
            }
            Err(error) => Err(self.failure(&error, what, table, Vec::new())),
        }
    }

    /// The first column of the first row of one statement.
    pub fn value(&mut self, sql: &str, what: &str, table: Option<u32>) -> Result<Option<String>, Failure> {
        let mut answers = self.query(sql, what, table)?;
        let rows = answers.pop().unwrap_or_default().rows;
        Ok(rows.into_iter().next().and_then(|row| row.into_iter().next()).flatten())
    }

    /// The failure for an error, which may be the end of the session.
    pub fn failure(&mut self, error: &Error, what: &str, table: Option<u32>, rows: Vec<Refusal>) -> Failure {
        self.lost |= error.is_lost();
        self.answered |= matches!(error, Error::Server(_)) && !error.is_lost();
        error.failure(what, table, rows)
    }

    /// Ends a call: whether the session may serve another one. A transaction that was
    /// left open is rolled back.
    pub fn settle(&mut self) -> bool {
        if !self.lost && self.client.in_transaction() {
            self.lost = self.client.query("ROLLBACK").is_err();
        }
        self.answered = false;
        !self.lost
    }

    fn pin(&mut self, settings: &Settings) -> Result<(), Failure> {
        let sql = format!("{PINNED}; SET lock_timeout = {}; {UNLIMITED}", settings.lock_timeout_ms);
        self.query(&sql, "set up the session", None)?;
        let number = self.value("SHOW server_version_num", "ask for the version", None)?;
        self.version = self.value("SHOW server_version", "ask for the version", None)?.unwrap_or_default();
        if number.and_then(|number| number.parse().ok()).is_none_or(|number: u32| number < OLDEST_SERVER) {
            let message =
                format!("the server is PostgreSQL {}; this plugin needs 14 or later. Upgrade it", self.version);
            return Err(of_destination("postgres.version", message));
        }
        if settings.replica_role == ReplicaRole::Off {
            return Ok(());
        }
        match self.client.query("SET session_replication_role = replica") {
            Ok(_) => Ok(()),
            Err(Error::Server(error)) if error.code == "42501" && settings.replica_role == ReplicaRole::Try => Ok(()),
            Err(error) => {
                let mut failure = self.failure(&error, "set session_replication_role", None, Vec::new());
                failure.message.push_str(". Or set `replica_role` to \"try\"");
                Err(failure)
            }
        }
    }

    fn make_metadata(&mut self, metadata: &Metadata) -> Result<(), Failure> {
        const WHAT: &str = "make this plugin's own tables";
        // A schema we may not look into says so by an error, which is told as it is.
        if self.value(&metadata.exists(), WHAT, None)?.as_deref() == Some("t") {
            return Ok(());
        }
        self.query("BEGIN", WHAT, None)?;
        self.query(&metadata.creation_lock("metadata"), WHAT, None)?;
        let exists = self.value(&metadata.schema_exists(), WHAT, None)?.as_deref() == Some("t");
        self.query(&metadata.create(exists), WHAT, None)?;
        self.query("COMMIT", WHAT, None)?;
        Ok(())
    }

    fn take_lane(&mut self, metadata: &Metadata) -> Result<(), Failure> {
        const WHAT: &str = "take the lane";
        self.query(&metadata.end_predecessor(), WHAT, None)?;
        match self.value(&metadata.take_lane(), WHAT, None)? {
            Some(_) => Ok(()),
            None => Err(fenced()),
        }
    }
}

/// A later instance has taken over.
pub fn fenced() -> Failure {
    let message = "a later instance of this lane has taken over; this one writes nothing any more".to_owned();
    make(
        tidegate_sdk::model::FailureClass::Permanent,
        tidegate_sdk::model::FailureScope::Destination,
        "fenced",
        message,
    )
}
