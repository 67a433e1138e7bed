//! What the server's errors mean: one table from SQLSTATE to code, class and way out.
//!
//! Messages are localised, SQLSTATE and routine are not: only these decide.

use fallible_iterator::FallibleIterator;
use postgres_protocol::message::backend::ErrorFields;

use super::config::SourceConfig;
use crate::error::{Error, Exit};

/// An ErrorResponse, as far as it is looked at.
#[derive(Debug, Default)]
pub(super) struct ServerError {
    /// SQLSTATE.
    pub(super) state: String,
    /// In the server's language.
    pub(super) message: String,
    /// Function of the server's source that raised it.
    pub(super) routine: String,
}

impl ServerError {
    pub(super) fn of_fields(mut fields: ErrorFields<'_>) -> ServerError {
        let mut error = ServerError::default();
        while let Ok(Some(field)) = fields.next() {
            let text = String::from_utf8_lossy(field.value_bytes()).into_owned();
            match field.type_() {
                b'C' => error.state = text,
                b'M' => error.message = text,
                b'R' => error.routine = text,
                _ => {}
            }
        }
        error
    }

    pub(super) fn of_db(error: &tokio_postgres::error::DbError) -> ServerError {
        ServerError {
            state: error.code().code().to_owned(),
            message: error.message().to_owned(),
            routine: error.routine().unwrap_or_default().to_owned(),
        }
    }

    fn said(&self) -> String {
        format!("{} (SQLSTATE {})", self.message, self.state)
    }

    /// The last number in the message: the pid in "… is active for PID n".
    fn last_number(&self) -> Option<&str> {
        self.message.split(|letter: char| !letter.is_ascii_digit()).rfind(|digits| !digits.is_empty())
    }

    /// States that pass by themselves: connections, resources, the operator's
    /// intervention, rollbacks, locks, objects in use, input and output.
    fn passes(&self) -> bool {
        ["08", "53", "57", "40"].iter().any(|class| self.state.starts_with(class))
            || ["55P03", "55006", "58030"].contains(&self.state.as_str())
    }
}

/// An error of the server while a connection is made.
pub(super) fn connecting(config: &SourceConfig, error: &ServerError, replication: bool) -> Error {
    let at = config.endpoint();
    let said = error.said();
    match error.state.as_str() {
        "28P01" => Error::no("source.password", format!("{at}: the server does not accept the password: {said}"))
            .next("Put the right user and password into the source url; percent-encode special characters."),
        "28000" => Error::no("source.password", format!("{at}: the server does not let us in: {said}"))
            .next("Check the role's LOGIN attribute and the server's pg_hba.conf for this user, address and sslmode."),
        "3D000" => Error::no("source.database-missing", format!("{at}: there is no such database: {said}"))
            .next("Name an existing database in the source url."),
        "42501" if replication => role_replication(config),
        "53300" if replication && error.routine == "InitProcess" => {
            Error::transient("source.wal-senders", format!("{at}: no WAL sender is free: {said}"))
                .next("Raise max_wal_senders at the server, or stop another replication client.")
        }
        "53300" => Error::transient("source.too-many-connections", format!("{at}: no connection is free: {said}"))
            .next("Raise max_connections or the role's CONNECTION LIMIT, or close other sessions."),
        _ if error.passes() => Error::transient("source.unreachable", format!("{at}: the server is not ready: {said}"))
            .next("Wait until it accepts connections; its log says more."),
        _ => Error::no("source.refused", format!("{at}: the server refused the connection: {said}"))
            .next("Look into the server's log."),
    }
}

/// The role lacks the REPLICATION attribute.
pub(super) fn role_replication(config: &SourceConfig) -> Error {
    Error::no("source.role-replication", format!("{}: role `{}` may not replicate", config.endpoint(), config.user))
        .next(format!(
            "Run as a superuser: ALTER ROLE {} REPLICATION;",
            crate::schema::table::quote_identifier(&config.user)
        ))
}

/// `wal_level` is too low.
pub(super) fn wal_level(config: &SourceConfig, found: &str) -> Error {
    Error::no(
        "source.wal-level",
        format!("{}: wal_level is {found}, logical replication needs logical", config.endpoint()),
    )
    .next("Run ALTER SYSTEM SET wal_level = 'logical'; and restart the server.")
}

/// No replication slot is free.
pub(super) fn no_slot_free(config: &SourceConfig) -> Error {
    Error::no("slot.none-free", format!("{}: all replication slots are in use", config.endpoint())).next(
        "Raise max_replication_slots and restart the server, or drop a slot that nobody needs (pg_replication_slots).",
    )
}

/// The slot is there, but what it needs of the log is not.
pub(super) fn slot_lost(config: &SourceConfig, slot: &str, why: &str) -> Error {
    Error::permanent(
        "slot.lost",
        format!("slot `{slot}` at {}: the server has removed log it needs: {why}", config.endpoint()),
    )
    .next("Resync all tables with a new slot, and raise max_slot_wal_keep_size.")
}

/// The publication is not there.
pub(super) fn publication_missing(config: &SourceConfig, there_are: Option<&[String]>) -> Error {
    let there = match there_are {
        Some([]) => "; the database has none".to_owned(),
        Some(names) => format!("; there are {}", names.join(", ")),
        None => String::new(),
    };
    Error::permanent(
        "publication.missing",
        format!("{}: there is no publication `{}`{there}", config.endpoint(), config.publication),
    )
    .exit(Exit::No)
    .next(format!(
        "Create it before the slot (CREATE PUBLICATION {} FOR TABLE …;), or correct `publication` in [source], also after a rename.",
        crate::schema::table::quote_identifier(&config.publication)
    ))
}

/// The publication does not send all that happens.
pub(super) fn publication_publish(publication: &str, left_out: &str) -> Error {
    Error::permanent(
        "publication.publish",
        format!("publication `{publication}` leaves out {left_out}: destinations will differ"),
    )
    .next("Run ALTER PUBLICATION … SET (publish = 'insert, update, delete, truncate'), after which all tables are copied again; unless it is meant.")
}

/// The publication that the stream comes from is gone (P23).
pub fn publication_gap(publication: &str) -> Error {
    Error::permanent(
        "publication.gap",
        format!(
            "publication `{publication}` is not there any more: it was renamed or dropped, and what came before that was read"
        ),
    )
    .next("If it was renamed, put the new name into `publication` of [source] and start `tidegate run` again: it goes on where it was. If it was dropped, create it again and start `tidegate run` again: all tables are copied anew. If this comes again, a transaction lies across the change: begin with a new state directory and a new slot.")
}

/// A warning in the stream that is as bad as an error: PostgreSQL 18 leaves out the
/// changes of a publication that was not there yet, or not any more, and goes on; older
/// servers end the stream.
pub(super) fn left_out(config: &SourceConfig, warning: &ServerError) -> Option<Error> {
    is_left_out(warning).then(|| publication_missing(config, None))
}

/// See [`left_out`].
pub(super) fn is_left_out(warning: &ServerError) -> bool {
    warning.state == "55000" && warning.routine == "LoadPublications"
}

/// An error of the server on a replication command or in the stream of `slot`.
pub(super) fn replicating(config: &SourceConfig, slot: &str, error: &ServerError) -> Error {
    let at = config.endpoint();
    let said = error.said();
    match error.state.as_str() {
        "55006" => {
            let holder = error.last_number().map_or(String::new(), |pid| format!(" by pid {pid}"));
            Error::transient("slot.in-use", format!("slot `{slot}` at {at} is in use{holder}: {said}"))
                .next("Stop the other reader; after a crash the server lets go within wal_sender_timeout.")
        }
        "42704" if error.routine.to_ascii_lowercase().contains("publication") => publication_missing(config, None),
        "42704" => Error::permanent("slot.missing", format!("slot `{slot}` at {at} does not exist: {said}"))
            .next("Changes since it was dropped are gone: resync all tables with a new slot."),
        "42710" => Error::permanent("slot.exists", format!("slot `{slot}` at {at} exists already: {said}"))
            .next("Use another pipeline name, or drop the slot if nobody reads it."),
        "53400" => no_slot_free(config),
        "42501" => role_replication(config),
        "58P01" => slot_lost(config, slot, &said),
        "55000" if error.routine == "CheckLogicalDecodingRequirements" => wal_level(config, "below logical"),
        // PostgreSQL 14 and 15, 16, and 17 on.
        "55000"
            if ["StartLogicalReplication", "CreateDecodingContext", "ReplicationSlotAcquire"]
                .contains(&error.routine.as_str()) =>
        {
            slot_lost(config, slot, &said)
        }
        "55P03" | "57014" => {
            Error::transient("slot.wait", format!("slot `{slot}` at {at}: the server gave up waiting: {said}"))
                .next("End the transactions that are open at the server.")
        }
        _ if error.passes() => connection_lost(config, &said),
        _ => Error::permanent("source.stream", format!("slot `{slot}` at {at}: the server ended the stream: {said}"))
            .next("Look into the server's log."),
    }
}

/// The connection broke, or was ended from the other side.
pub(super) fn connection_lost(config: &SourceConfig, why: &str) -> Error {
    Error::transient("source.connection-lost", format!("{}: the connection is gone: {why}", config.endpoint()))
        .next("Nothing is lost; the stream is resumed when the server is back.")
}

/// The server sent what the protocol does not have.
pub(super) fn protocol(what: impl std::fmt::Display) -> Error {
    Error::permanent("source.protocol", format!("the server sent what we do not understand: {what}"))
        .next("Check that the source is PostgreSQL 14 or later, without a proxy between.")
}

/// An error of an SQL statement; `doing` says what for.
pub fn sql_error(error: &tokio_postgres::Error, doing: &str) -> Error {
    let Some(db) = error.as_db_error() else {
        let source = std::error::Error::source(error).map_or(String::new(), |cause| format!(": {cause}"));
        return if error.is_closed() || source_is_io(error) {
            Error::transient("source.connection-lost", format!("{doing}: the connection is gone: {error}{source}"))
                .next("Try again when the server is back.")
        } else {
            Error::permanent("source.sql", format!("{doing}: {error}{source}"))
        };
    };
    refused(&ServerError::of_db(db), doing)
}

/// What the server answered to an SQL statement.
pub(super) fn refused(server: &ServerError, doing: &str) -> Error {
    let said = server.said();
    match server.state.as_str() {
        "42501" => {
            Error::no("source.privilege", format!("{doing}: {said}")).next("Grant the role what the message names.")
        }
        "57P01" | "57P02" | "57P03" => Error::transient("source.connection-lost", format!("{doing}: {said}"))
            .next("Try again when the server is back."),
        "55P03" => Error::transient("source.lock-timeout", format!("{doing}: {said}"))
            .next("Try again when the transaction that holds the lock has ended."),
        _ if server.passes() => Error::transient("source.sql", format!("{doing}: {said}")),
        _ => Error::permanent("source.sql", format!("{doing}: {said}")),
    }
}

fn source_is_io(error: &tokio_postgres::Error) -> bool {
    std::error::Error::source(error).is_some_and(|cause| cause.is::<std::io::Error>())
}
