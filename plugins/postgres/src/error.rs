//! What can go wrong, and one table that says what the host is to do about it.

use std::fmt;
use std::io;

use tidegate_sdk::model::{Failure, FailureClass, FailureScope, Refusal};

/// An ErrorResponse of the server, as far as we use it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ServerError {
    /// SQLSTATE.
    pub code: String,
    /// Primary message.
    pub message: String,
    /// DETAIL, empty if none.
    pub detail: String,
    /// CONTEXT, empty if none: names the line of a COPY.
    pub context: String,
}

impl ServerError {
    /// The line of COPY input it speaks of, counted from 1.
    pub fn copy_line(&self) -> Option<u32> {
        let rest = self.context.split_once(", line ")?.1;
        let digits = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
        rest[..digits].parse().ok()
    }
}

impl fmt::Display for ServerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (SQLSTATE {}", self.message, self.code)?;
        if !self.detail.is_empty() {
            write!(f, ", {}", self.detail)?;
        }
        f.write_str(")")
    }
}

/// Why a conversation with the server did not succeed.
#[derive(Debug)]
pub enum Error {
    /// The connection cannot be made or is gone.
    Io(io::Error),
    /// The server's own answer.
    Server(Box<ServerError>),
    /// The server said something that is not the protocol, or more than we take.
    Protocol(String),
    /// Logging in needs something that is not there.
    Login(String),
    /// The server does not speak TLS, and has to.
    NoTls(String),
}

impl Error {
    /// Whether the connection cannot be used any more.
    pub fn is_lost(&self) -> bool {
        match self {
            Error::Io(_) | Error::Protocol(_) | Error::Login(_) | Error::NoTls(_) => true,
            Error::Server(error) => error.code.starts_with("57P") || error.code.starts_with("08"),
        }
    }

    /// The failure the host is told. `what` was tried; `table` is whose fault it is, if
    /// it is a table's; `rows` are the culprits if they are known.
    pub fn failure(&self, what: &str, table: Option<u32>, rows: Vec<Refusal>) -> Failure {
        let verdict = match self {
            Error::Io(error) => judge_io(error),
            Error::Server(error) => judge_sqlstate(&error.code),
            Error::Protocol(_) => Verdict { code: "postgres.protocol", ..CONNECTION },
            Error::Login(_) => LOGIN,
            // What to do about it is in the message.
            Error::NoTls(_) => Verdict { next: "", ..TLS },
        };
        let mut failure = make(verdict.class, verdict.scope, verdict.code, format!("{what}: {self}"));
        if !verdict.next.is_empty() {
            failure.message = format!("{}. {}", failure.message, verdict.next);
        }
        match verdict.scope {
            FailureScope::Table if table.is_none() => failure.scope = FailureScope::Destination,
            FailureScope::Table => failure.table_id = table,
            FailureScope::Row => failure.rows = rows,
            FailureScope::Destination => {}
        }
        failure
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Io(error) => write!(f, "{error}"),
            Error::Server(error) => write!(f, "{error}"),
            Error::Protocol(message) | Error::Login(message) | Error::NoTls(message) => f.write_str(message),
        }
    }
}

impl From<io::Error> for Error {
    fn from(error: io::Error) -> Error {
        Error::Io(error)
    }
}

/// A failure without rows.
pub fn make(class: FailureClass, scope: FailureScope, code: &str, message: String) -> Failure {
    Failure { class, scope, table_id: None, code: code.to_owned(), message, retry_after_ms: None, rows: Vec::new() }
}

/// A failure that only a change of the destination or its configuration ends.
pub fn of_destination(code: &str, message: String) -> Failure {
    make(FailureClass::Permanent, FailureScope::Destination, code, message)
}

/// A failure that keeps one table out.
pub fn of_table(table: u32, code: &str, message: String) -> Failure {
    Failure { table_id: Some(table), ..make(FailureClass::Permanent, FailureScope::Table, code, message) }
}

/// A failure of rows that will never be taken.
pub fn of_rows(code: &str, message: String, rows: Vec<Refusal>) -> Failure {
    Failure { rows, ..make(FailureClass::Permanent, FailureScope::Row, code, message) }
}

struct Verdict {
    class: FailureClass,
    scope: FailureScope,
    code: &'static str,
    next: &'static str,
}

const CONNECTION: Verdict =
    Verdict { class: FailureClass::Transient, scope: FailureScope::Destination, code: "postgres.connection", next: "" };

const LOGIN: Verdict = Verdict {
    class: FailureClass::Permanent,
    scope: FailureScope::Destination,
    code: "postgres.authentication",
    next: "Check `user`, the secret `password`, `sslmode` and the server's pg_hba.conf",
};

const TLS: Verdict = Verdict {
    class: FailureClass::Permanent,
    scope: FailureScope::Destination,
    code: "postgres.tls",
    next: "Check the server's certificate, the CA of the grant, and `sslmode`",
};

fn judge_io(error: &io::Error) -> Verdict {
    match error.kind() {
        io::ErrorKind::PermissionDenied => Verdict {
            class: FailureClass::Permanent,
            code: "postgres.forbidden",
            next: "Grant `host:port` of the settings under [destination.grant] network",
            ..CONNECTION
        },
        io::ErrorKind::InvalidData => TLS,
        _ => CONNECTION,
    }
}

/// First match wins: the longest prefixes come first.
const SQLSTATES: &[(&str, FailureClass, FailureScope, &str, &str)] = {
    use FailureClass::{Permanent, Transient};
    use FailureScope::{Destination, Row, Table};
    &[
        ("08", Transient, Destination, "postgres.connection", ""),
        ("0A", Permanent, Table, "unsupported", ""),
        ("0LP", Permanent, Destination, "postgres.privilege", ""),
        ("21", Permanent, Row, "postgres.constraint", ""),
        ("22", Permanent, Row, "postgres.value", ""),
        ("23", Permanent, Row, "postgres.constraint", ""),
        ("25006", Transient, Destination, "postgres.read-only", "Point `host` at the primary"),
        ("25", Transient, Destination, "postgres.transaction", ""),
        ("27", Permanent, Row, "postgres.constraint", ""),
        ("28", Permanent, Destination, LOGIN.code, LOGIN.next),
        ("2BP01", Permanent, Table, "postgres.dependents", "Drop what depends on it, or alter it by hand"),
        ("3D", Permanent, Destination, "postgres.no-database", "Create the database, or correct `database`"),
        ("40", Transient, Destination, "postgres.conflict", ""),
        ("42501", Permanent, Table, "postgres.privilege", "Grant the role what plugins/postgres/README.md lists"),
        ("42", Permanent, Table, "postgres.schema", ""),
        ("3F", Permanent, Table, "postgres.schema", ""),
        ("44", Permanent, Row, "postgres.constraint", ""),
        ("53", Transient, Destination, "postgres.resources", ""),
        ("54", Permanent, Row, "postgres.value", ""),
        ("55P03", Transient, Destination, "postgres.lock-timeout", ""),
        ("55006", Transient, Destination, "postgres.lock-timeout", ""),
        ("55", Permanent, Table, "postgres.state", ""),
        ("57", Transient, Destination, "postgres.shutdown", ""),
        ("58", Transient, Destination, "postgres.server", ""),
        // What a trigger raises is about the row that it was fired for.
        ("P0", Permanent, Row, "postgres.raised", ""),
        ("XX", Transient, Destination, "postgres.server", ""),
    ]
};

fn judge_sqlstate(sqlstate: &str) -> Verdict {
    SQLSTATES.iter().find(|(prefix, ..)| sqlstate.starts_with(prefix)).map_or(
        Verdict { class: FailureClass::Permanent, scope: FailureScope::Table, code: "postgres.refused", next: "" },
        |&(_, class, scope, code, next)| Verdict { class, scope, code, next },
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(code: &str, table: Option<u32>) -> Failure {
        let error = ServerError { code: code.to_owned(), message: "no".to_owned(), ..ServerError::default() };
        Error::Server(Box::new(error)).failure("write", table, Vec::new())
    }

    #[test]
    fn each_class_of_sqlstate_has_its_class_and_scope() {
        use FailureClass::{Permanent, Transient};
        use FailureScope::{Destination, Row, Table};
        for (code, class, scope) in [
            ("40001", Transient, Destination),
            ("40P01", Transient, Destination),
            ("53300", Transient, Destination),
            ("57P01", Transient, Destination),
            ("55P03", Transient, Destination),
            ("22001", Permanent, Row),
            ("23505", Permanent, Row),
            ("42703", Permanent, Table),
            ("28P01", Permanent, Destination),
            ("P0001", Permanent, Row),
            ("44000", Permanent, Row),
            ("42P01", Permanent, Table),
            ("HV000", Permanent, Table),
        ] {
            let failure = of(code, Some(7));
            assert_eq!((failure.class, failure.scope), (class, scope), "{code}");
            assert_eq!(failure.table_id.is_some(), scope == Table, "{code}");
        }
    }

    #[test]
    fn a_table_failure_without_a_table_is_the_destinations() {
        assert_eq!(of("42501", None).scope, FailureScope::Destination);
    }

    #[test]
    fn the_context_of_a_copy_error_names_the_line() {
        let context = "COPY orders, line 12, column total: \"x\"".to_owned();
        assert_eq!(ServerError { context, ..ServerError::default() }.copy_line(), Some(12));
        assert_eq!(ServerError::default().copy_line(), None);
    }
}
