//! The DDL trigger: installing it, and reading the messages it writes.

use hmac::{Hmac, Mac};
use serde::Deserialize;
use serde_json::Value;
use sha2::{Digest, Sha256};
use tokio_postgres::Client;

use super::errors::sql_error;
use super::picture::{PICTURE, VERSION};
use super::session::Session;
use crate::error::{Error, Exit, Result};
use crate::schema::table::quote_identifier;

/// Prefix of the trigger's logical messages.
pub const DDL_PREFIX: &str = "tidegate_ddl";
/// Hexadecimal digits of an HMAC-SHA256.
const MAC_DIGITS: usize = 64;

/// What a message of the trigger says.
#[derive(Clone, Debug, PartialEq)]
pub enum DdlMessage {
    /// What a command made of a table.
    Table {
        /// Command tag.
        command: String,
        /// For [`super::catalog::schema_from_picture`].
        picture: Value,
    },
    /// A command changed a table, and its picture could not be computed.
    CaptureFailed {
        /// `pg_class.oid`.
        oid: u32,
        /// The server's message.
        reason: String,
    },
    /// A table is gone. Written by no trigger yet.
    Dropped {
        /// `pg_class.oid`.
        oid: u32,
    },
    /// The empty second message, which takes the tie with the next row (P3).
    Closing,
}

#[derive(Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
enum Payload {
    Table { command: String, picture: Value },
    CaptureFailed { oid: u32, reason: String },
    Dropped { oid: u32 },
}

/// Reads a message with the prefix [`DDL_PREFIX`]: checks its HMAC (P25), then its
/// version.
///
/// Errors: `trigger.forged` (to be counted and ignored: anyone may write such
/// messages), `trigger.version`, `trigger.payload`.
pub fn open_message(key: &[u8], content: &[u8]) -> Result<DdlMessage> {
    let payload = authentic(key, content).ok_or_else(|| {
        Error::permanent("trigger.forged", "a logical message with our prefix was not written by our trigger")
            .next("Find who calls pg_logical_emit_message; after a new key, start again: it is read at the start.")
    })?;
    if payload.is_empty() {
        return Ok(DdlMessage::Closing);
    }
    let broken = |error: serde_json::Error| {
        Error::permanent("trigger.payload", format!("a message of the DDL trigger cannot be read: {error}"))
            .next("Install the DDL trigger of this version: tidegate trigger install.")
    };
    let json: Value = serde_json::from_slice(payload).map_err(broken)?;
    let version = json.get("version").and_then(Value::as_u64);
    if version != Some(VERSION) {
        let version = version.map_or("none".to_owned(), |version| version.to_string());
        return Err(Error::permanent(
            "trigger.version",
            format!("a message of the DDL trigger has payload version {version}, we read {VERSION}"),
        )
        .next("Use the host that the trigger was installed with, or newer."));
    }
    Ok(match serde_json::from_value(json).map_err(broken)? {
        Payload::Table { command, picture } => DdlMessage::Table { command, picture },
        Payload::CaptureFailed { oid, reason } => DdlMessage::CaptureFailed { oid, reason },
        Payload::Dropped { oid } => DdlMessage::Dropped { oid },
    })
}

/// The payload, if its HMAC is right.
fn authentic<'a>(key: &[u8], content: &'a [u8]) -> Option<&'a [u8]> {
    let (digits, payload) = content.split_at_checked(MAC_DIGITS)?;
    let mut mac = [0_u8; MAC_DIGITS / 2];
    for (byte, pair) in mac.iter_mut().zip(digits.chunks_exact(2)) {
        *byte = u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()?;
    }
    let mut expected = Hmac::<Sha256>::new_from_slice(key).ok()?;
    expected.update(payload);
    expected.verify_slice(&mac).ok()?;
    Some(payload)
}

/// Whether the trigger is there and does its work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TriggerState {
    /// Not installed: schema changes are seen when rows come.
    Missing,
    /// Installed, but switched off, or not ENABLE ALWAYS.
    Disabled,
    /// Installed by another version of the host.
    Outdated,
    /// Installed, but our role may not read its key.
    KeyDenied,
    /// At work.
    Ready,
}

/// What the SQL text hashes to: tells whether the installed one is ours.
fn version() -> String {
    let digest = Sha256::digest([include_str!("sql/trigger_install.sql"), PICTURE].concat());
    digest[..8].iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The SQL that installs the trigger and lets `role` read its key, for an
/// administrator to run.
pub fn print(role: &str) -> String {
    include_str!("sql/trigger_install.sql")
        .replace("__VERSION__", &version())
        .replace("__PICTURE__", PICTURE.trim_end())
        .replace("__ROLE__", &quote_identifier(role))
}

/// Installs the trigger, or replaces an older one; the key stays. `role` is who
/// replicates. Needs a superuser. Errors: `trigger.install`.
pub async fn install(session: &Session, role: &str) -> Result<()> {
    run(session, &print(role), "installing the DDL trigger", "trigger.install").await
}

/// Removes all of it (P35). Errors: `trigger.uninstall`.
pub async fn uninstall(session: &Session) -> Result<()> {
    let sql = include_str!("sql/trigger_uninstall.sql");
    run(session, sql, "removing the DDL trigger", "trigger.uninstall").await
}

async fn run(session: &Session, sql: &str, doing: &str, code: &'static str) -> Result<()> {
    let Err(error) = session.batch_execute(sql).await else { return Ok(()) };
    // The transaction that failed is left open otherwise; if this fails too, the
    // session is gone and the transaction with it.
    let _ended = session.batch_execute("ROLLBACK").await;
    let told = sql_error(&error, doing);
    if told.is_transient() {
        return Err(told);
    }
    Err(Error::permanent(code, told.message())
        .exit(Exit::No)
        .next("Connect as a superuser who owns schema tidegate, or give `tidegate trigger print` to an administrator."))
}

/// Whether the trigger is installed and works for our role. Errors: `source.sql`.
pub async fn state(client: &Client) -> Result<TriggerState> {
    const QUERY: &str = "
        SELECT t.evtenabled = 'A',
               coalesce(obj_description(n.oid, 'pg_namespace') LIKE '% ' || $1, false),
               coalesce(has_schema_privilege(n.oid, 'USAGE')
                        AND has_column_privilege(k.oid, 'key', 'SELECT'), false)
        FROM pg_event_trigger t
        LEFT JOIN pg_namespace n ON n.nspname = 'tidegate'
        LEFT JOIN pg_class k ON k.relnamespace = n.oid AND k.relname = 'ddl_key'
        WHERE t.evtname = 'tidegate_ddl'";
    let row = client.query_opt(QUERY, &[&version()]).await;
    let row = row.map_err(|error| sql_error(&error, "looking for the DDL trigger"))?;
    Ok(match row.map(|row| (row.get(0), row.get(1), row.get(2))) {
        None => TriggerState::Missing,
        Some((false, _, _)) => TriggerState::Disabled,
        Some((_, false, _)) => TriggerState::Outdated,
        Some((_, _, false)) => TriggerState::KeyDenied,
        Some((true, true, true)) => TriggerState::Ready,
    })
}

/// The key that authenticates the trigger's messages; None if it is not installed.
/// Errors: `trigger.key-denied`.
pub async fn secret_key(session: &Session) -> Result<Option<Vec<u8>>> {
    let there =
        session.query_opt("SELECT FROM pg_matviews WHERE schemaname = 'tidegate' AND matviewname = 'ddl_key'", &[]);
    let there = there.await.map_err(|error| sql_error(&error, "looking for the DDL trigger's key"))?;
    if there.is_none() {
        return Ok(None);
    }
    match session.query_one("SELECT key FROM tidegate.ddl_key", &[]).await {
        Ok(row) => Ok(Some(row.get(0))),
        Err(error) => {
            let told = sql_error(&error, "reading the DDL trigger's key");
            if told.code() != "source.privilege" {
                return Err(told);
            }
            Err(Error::no("trigger.key-denied", told.message())
                .next("Install the trigger again for this role: tidegate trigger install."))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sealed(key: &[u8], payload: &str) -> Vec<u8> {
        let mut mac = Hmac::<Sha256>::new_from_slice(key).unwrap();
        mac.update(payload.as_bytes());
        let digits: String = mac.finalize().into_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
        [digits.as_bytes(), payload.as_bytes()].concat()
    }

    #[test]
    fn only_a_message_with_the_right_hmac_and_version_opens() {
        let key = [7; 32];
        assert_eq!(open_message(&key, &sealed(&key, "")).unwrap(), DdlMessage::Closing);
        let failed = sealed(&key, r#"{"version":1,"kind":"capture-failed","oid":5,"reason":"no"}"#);
        let expected = DdlMessage::CaptureFailed { oid: 5, reason: "no".to_owned() };
        assert_eq!(open_message(&key, &failed).unwrap(), expected);
        let code = |content: &[u8]| open_message(&key, content).unwrap_err().code().to_owned();
        assert_eq!(code(&sealed(&[8; 32], "")), "trigger.forged");
        assert_eq!(code(b"short"), "trigger.forged");
        assert_eq!(code(&[0xff; 80]), "trigger.forged");
        let mut changed = failed.clone();
        *changed.last_mut().unwrap() = b' ';
        assert_eq!(code(&changed), "trigger.forged");
        assert_eq!(code(&sealed(&key, r#"{"version":2,"kind":"table"}"#)), "trigger.version");
        assert_eq!(code(&sealed(&key, "{")), "trigger.payload");
        assert_eq!(code(&sealed(&key, r#"{"version":1,"kind":"other"}"#)), "trigger.payload");
    }

    #[test]
    fn the_printed_sql_names_the_role_and_leaves_no_placeholder() {
        let sql = print("we\"ird");
        assert!(sql.contains("TO \"we\"\"ird\";") && !sql.contains("__"));
    }
}
