//! The DDL trigger: installing it, and reading the messages it writes.

use hmac::{Hmac, Mac};
use serde::Deserialize;
use serde_json::Value;
use sha2::{Digest, Sha256};
use tokio_postgres::Client;
use tokio_postgres::error::SqlState;

use super::errors::sql_error;
use super::picture::PICTURE;
use super::session::{PRINTING, Session};
use crate::error::{Error, Exit, Result};
use crate::schema::table::quote_identifier;

/// Prefix of the trigger's logical messages.
pub const DDL_PREFIX: &str = "tidegate_ddl";
/// The payload version that our trigger writes.
const VERSION: u64 = 3;
/// The oldest that we read. A version 2 tells ALTER TABLE and rewrites alone: what it misses
/// is found as without a trigger. What came before does not tell rewrites, and is none that
/// a change of type could be trusted to.
const OLDEST: u64 = 2;
/// Hexadecimal digits of an HMAC-SHA256.
const MAC_DIGITS: usize = 64;

/// What a message of the trigger says.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum DdlMessage {
    /// What a command made of a table.
    Table {
        /// Command tag.
        command: String,
        /// For [`super::catalog::schema_from_picture`].
        picture: Value,
        /// Whether rows may have got other values without a change of them (P28).
        rewritten: bool,
    },
    /// A command changed something, and what that made could not be computed.
    CaptureFailed {
        /// `pg_class.oid`; none if not even that is known.
        oid: Option<u32>,
        /// Command tag.
        #[serde(default)]
        command: String,
        /// The server's message.
        reason: String,
        /// As in [`DdlMessage::Table`].
        #[serde(default)]
        rewritten: bool,
    },
    /// A command took a table out of every publication, as far as the table can tell.
    Left {
        /// `pg_class.oid`.
        oid: u32,
    },
    /// Tables are gone.
    Dropped {
        /// `pg_class.oid` of each.
        oids: Vec<u32>,
    },
    /// A publication was made, changed or dropped.
    Publication {
        /// `pg_publication.oid`.
        oid: u32,
        /// See [`super::members::Publication::publish`]; empty once it is gone.
        publish: String,
    },
    /// Ours for certain, and not to be understood: what it was about has to be taken for
    /// changed.
    #[serde(skip)]
    Unreadable {
        /// The table that it names, if that much could be read.
        oid: Option<u32>,
        /// `trigger.version` or `trigger.payload`.
        #[serde(skip)]
        code: &'static str,
        /// What is wrong with it.
        why: String,
    },
    /// The empty second message, which takes the tie with the next row (P3).
    #[serde(skip)]
    Closing,
}

/// Reads a message with the prefix [`DDL_PREFIX`]: checks its HMAC (P25), then its
/// version.
///
/// Errors: `trigger.forged`, to be counted and ignored: anyone may write such messages.
pub fn open_message(key: &[u8], content: &[u8]) -> Result<DdlMessage> {
    let payload = authentic(key, content).ok_or_else(|| {
        Error::permanent("trigger.forged", "a logical message with our prefix was not written by our trigger")
            .next("Find who calls pg_logical_emit_message; after a new key, start again: it is read at the start.")
    })?;
    if payload.is_empty() {
        return Ok(DdlMessage::Closing);
    }
    let json: Value = match serde_json::from_slice(payload) {
        Ok(json) => json,
        Err(error) => return Ok(unreadable(None, &error)),
    };
    let of = json.get("oid").or_else(|| json.get("picture").and_then(|picture| picture.get("oid")));
    let oid = of.and_then(Value::as_u64).and_then(|oid| u32::try_from(oid).ok());
    let version = json.get("version").and_then(Value::as_u64);
    if version.is_none_or(|version| !(OLDEST..=VERSION).contains(&version)) {
        let version = version.map_or("none".to_owned(), |version| version.to_string());
        let why = format!("it has payload version {version}, we read {OLDEST} to {VERSION}");
        return Ok(DdlMessage::Unreadable { oid, code: "trigger.version", why });
    }
    Ok(serde_json::from_value(json).unwrap_or_else(|error| unreadable(oid, &error)))
}

fn unreadable(oid: Option<u32>, error: &serde_json::Error) -> DdlMessage {
    DdlMessage::Unreadable { oid, code: "trigger.payload", why: error.to_string() }
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
    /// Installed, but switched off, alone or with all others, or not ENABLE ALWAYS.
    Disabled,
    /// Installed by another version of the host.
    Outdated,
    /// Installed, but our role may not read its key.
    KeyDenied,
    /// At work.
    Ready,
}

/// What is wrong with the trigger, if anything.
pub fn complaint(state: TriggerState) -> Option<Error> {
    let told = |code: &'static str, message: &str, next: &str| Some(Error::no(code, message).next(next));
    match state {
        TriggerState::Ready => None,
        TriggerState::Missing => told(
            "trigger.missing",
            "the DDL trigger is not installed: schema changes are seen when rows come, and some are not certain",
            "Run `tidegate trigger install` as a superuser, or go without.",
        ),
        TriggerState::Disabled => told(
            "trigger.disabled",
            "the DDL trigger is installed, but not ENABLE ALWAYS, or event_triggers is off: it would miss schema changes",
            "Run `tidegate trigger install` again and set event_triggers = on, or `tidegate trigger uninstall` to go without.",
        ),
        TriggerState::Outdated => told(
            "trigger.outdated",
            "the DDL trigger was installed by another version: what it does not tell is seen when rows come",
            "Run `tidegate trigger install` with the version that replicates.",
        ),
        TriggerState::KeyDenied => told(
            "trigger.key-denied",
            "the DDL trigger's key cannot be read by the role that replicates",
            "Run `tidegate trigger install` again: it gives the role of [source] the right.",
        ),
    }
}

/// For the function that makes the picture.
fn settings() -> String {
    PRINTING.map(|(name, value)| format!("SET {name} = '{value}'")).join(" ")
}

/// What the SQL text hashes to: tells whether the installed one is ours.
fn version() -> String {
    let digest = Sha256::digest([include_str!("sql/trigger_install.sql"), PICTURE, &settings()].concat());
    digest[..8].iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The SQL that installs the trigger and lets `role` read its key, for an
/// administrator to run.
pub fn print(role: &str) -> String {
    include_str!("sql/trigger_install.sql")
        .replace("__VERSION__", &version())
        .replace("__SETTINGS__", &settings())
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
    if error.code() == Some(&SqlState::READ_ONLY_SQL_TRANSACTION) {
        return Err(Error::permanent(code, told.message()).exit(Exit::No).next(
            "Run `tidegate trigger print` at the primary: its standbys have the trigger then, and its messages.",
        ));
    }
    Err(Error::permanent(code, told.message())
        .exit(Exit::No)
        .next("Connect as a superuser who owns schema tidegate (`--url`), or give `tidegate trigger print` to an administrator."))
}

/// Whether the trigger is installed and works for our role. Errors: `source.sql`.
pub async fn state(client: &Client) -> Result<TriggerState> {
    const QUERY: &str = "
        -- PostgreSQL 17 can switch all of them off.
        SELECT bool_and(t.evtenabled = 'A') AND coalesce(current_setting('event_triggers', true), 'on') = 'on',
               coalesce(obj_description(n.oid, 'pg_namespace') LIKE '% ' || $1, false) AND count(*) = 3 AND k.oid IS NOT NULL,
               coalesce(has_schema_privilege(n.oid, 'USAGE')
                        AND has_column_privilege(k.oid, 'key', 'SELECT'), false)
        FROM pg_event_trigger t
        LEFT JOIN pg_namespace n ON n.nspname = 'tidegate'
        LEFT JOIN pg_class k ON k.relnamespace = n.oid AND k.relname = 'ddl_key'
        WHERE t.evtname IN ('tidegate_ddl', 'tidegate_drop', 'tidegate_rewrite')
        GROUP BY n.oid, k.oid";
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

/// A message as the trigger writes it.
#[cfg(test)]
pub(crate) fn sealed(key: &[u8], payload: &str) -> Vec<u8> {
    let Ok(mut mac) = Hmac::<Sha256>::new_from_slice(key) else { return Vec::new() };
    mac.update(payload.as_bytes());
    let digits: String = mac.finalize().into_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
    [digits.as_bytes(), payload.as_bytes()].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_message_with_the_right_hmac_and_version_opens() {
        let key = [7; 32];
        assert_eq!(open_message(&key, &sealed(&key, "")).unwrap(), DdlMessage::Closing);
        let failed = sealed(
            &key,
            r#"{"version":3,"kind":"capture-failed","oid":5,"command":"c","reason":"no","rewritten":true}"#,
        );
        let expected = DdlMessage::CaptureFailed {
            oid: Some(5),
            command: "c".to_owned(),
            reason: "no".to_owned(),
            rewritten: true,
        };
        assert_eq!(open_message(&key, &failed).unwrap(), expected);
        let code = |content: &[u8]| open_message(&key, content).unwrap_err().code().to_owned();
        assert_eq!(code(&sealed(&[8; 32], "")), "trigger.forged");
        assert_eq!(code(b"short"), "trigger.forged");
        assert_eq!(code(&[0xff; 80]), "trigger.forged");
        let mut changed = failed.clone();
        *changed.last_mut().unwrap() = b' ';
        assert_eq!(code(&changed), "trigger.forged");
    }

    #[test]
    fn what_the_trigger_of_before_wrote_is_read_and_what_cannot_be_read_says_of_which_table_it_is() {
        let key = [7; 32];
        let open = |payload: &str| open_message(&key, &sealed(&key, payload)).unwrap();
        let older =
            open(r#"{"version":2,"kind":"table","command":"ALTER TABLE","picture":{"oid":5},"rewritten":false}"#);
        assert!(matches!(older, DdlMessage::Table { rewritten: false, .. }), "{older:?}");
        let older = open(r#"{"version":2,"kind":"capture-failed","oid":5,"reason":"no"}"#);
        assert!(matches!(older, DdlMessage::CaptureFailed { oid: Some(5), rewritten: false, .. }), "{older:?}");
        let unreadable = |payload: &str| match open(payload) {
            DdlMessage::Unreadable { oid, code, .. } => (oid, code),
            other => panic!("{other:?}"),
        };
        assert_eq!(unreadable(r#"{"version":1,"kind":"table","oid":4}"#), (Some(4), "trigger.version"));
        assert_eq!(unreadable(r#"{"version":4,"picture":{"oid":6}}"#), (Some(6), "trigger.version"));
        assert_eq!(unreadable("{"), (None, "trigger.payload"));
        assert_eq!(unreadable(r#"{"version":3,"kind":"other","oid":9}"#), (Some(9), "trigger.payload"));
    }

    #[test]
    fn the_printed_sql_names_the_role_and_leaves_no_placeholder() {
        let sql = print("we\"ird");
        assert!(sql.contains("TO \"we\"\"ird\";") && !sql.contains("__"));
    }
}
