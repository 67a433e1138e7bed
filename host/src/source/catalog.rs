//! What the source has to be before anything starts: one check for each
//! precondition, each with its own code and way out.

use super::config::SourceConfig;
use super::errors::{self, sql_error};
pub use super::picture::schema_from_picture;
use super::session::Session;
pub use super::tables::{PublishedTable, published_tables, row_filters, table_schema, table_schemas};
use super::trigger;
pub use super::trigger::TriggerState;
use crate::error::{Error, Result};
use crate::position::Lsn;

/// The oldest server that has what we use (`messages` of pgoutput).
const OLDEST: i32 = 140_000;
/// The first that decodes on a standby.
const STANDBY_DECODES: i32 = 160_000;

/// What a check found.
#[derive(Debug)]
pub struct SourceFacts {
    /// `server_version_num`.
    pub version_num: u32,
    /// `pg_publication.oid` (P8).
    pub publication_oid: u32,
    /// `publish_via_partition_root`: roots are published instead of leaves.
    pub via_root: bool,
    /// What the DDL trigger can do for us.
    pub trigger: TriggerState,
    /// Our slot, if it exists.
    pub slot: Option<SlotFacts>,
    /// Replication slots that are free.
    pub free_slots: i64,
    /// Not in the way, but worth knowing; code, message and next step as in errors.
    pub warnings: Vec<Error>,
}

/// A slot, as `pg_replication_slots` shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlotFacts {
    /// Output plugin.
    pub plugin: String,
    /// Who reads it.
    pub active_pid: Option<i32>,
    /// `confirmed_flush_lsn`.
    pub confirmed: Lsn,
    /// `restart_lsn`; none once the slot is lost.
    pub restart: Option<Lsn>,
    /// `wal_status`: reserved, extended, unreserved, lost.
    pub wal_status: Option<String>,
    /// Its database.
    pub database: String,
}

/// Checks everything that the source has to be, in the order in which an operator
/// would meet it.
///
/// Errors: `source.version`, `source.standby`, `source.wal-level`,
/// `source.encoding`, `source.role-replication`, `publication.missing`, `source.select`,
/// `slot.foreign`, `slot.lost`, `slot.none-free`, `source.synchronous`; and
/// `source.sql`, `source.connection-lost`.
pub async fn check_source(session: &Session, config: &SourceConfig) -> Result<SourceFacts> {
    let server = server(session, config).await?;
    let publication = publication(session, config).await?;
    check_select(session, config).await?;
    let slot = slot(session, config).await?;
    if slot.is_none() && server.free_slots < 1 {
        return Err(errors::no_slot_free(config));
    }
    check_synchronous(&server.synchronous, config)?;
    let mut warnings = publication.warnings;
    if server.standby_without_feedback {
        warnings.push(
            Error::no(
                "source.standby-feedback",
                "the source is a standby with hot_standby_feedback = off: its primary may remove what the slot needs, and then the slot is lost",
            )
            .next("Set hot_standby_feedback = on at the standby, and primary_slot_name to a physical slot of the primary."),
        );
    }
    if server.free_slots < if slot.is_none() { 2 } else { 1 } {
        warnings.push(
            Error::transient("slot.none-free", "no replication slot is left for initial copies")
                .next("Raise max_replication_slots: a copy needs one for a moment."),
        );
    }
    Ok(SourceFacts {
        version_num: server.version_num,
        publication_oid: publication.oid,
        via_root: publication.via_root,
        trigger: trigger::state(session).await?,
        slot,
        free_slots: server.free_slots,
        warnings,
    })
}

struct Server {
    version_num: u32,
    free_slots: i64,
    synchronous: String,
    standby_without_feedback: bool,
}

async fn server(session: &Session, config: &SourceConfig) -> Result<Server> {
    // A cloud's superuser hands REPLICATION out as membership.
    const QUERY: &str = "
        SELECT current_setting('server_version_num')::int4, current_setting('server_version'),
               pg_is_in_recovery(), current_setting('wal_level'),
               (SELECT r.rolsuper OR r.rolreplication FROM pg_roles r WHERE r.rolname = session_user)
                   OR EXISTS (SELECT FROM pg_roles m WHERE m.rolname = 'rds_replication'
                              AND pg_has_role(session_user, m.oid, 'MEMBER')),
               current_setting('max_replication_slots')::int8 - (SELECT count(*) FROM pg_replication_slots),
               current_setting('synchronous_standby_names'),
               pg_is_in_recovery() AND NOT current_setting('hot_standby_feedback')::bool,
               current_setting('server_encoding')";
    let row = session.query_one(QUERY, &[]).await.map_err(|error| sql_error(&error, "checking the server"))?;
    let at = config.endpoint();
    let version: i32 = row.get(0);
    if version < OLDEST {
        return Err(Error::no("source.version", format!("{at}: PostgreSQL {} is too old", row.get::<_, &str>(1)))
            .next("Use PostgreSQL 14 or later."));
    }
    if row.get(2) && version < STANDBY_DECODES {
        return Err(Error::no("source.standby", format!("{at}: a standby decodes only from PostgreSQL 16 on"))
            .next("Name the primary in the source url."));
    }
    if row.get::<_, &str>(3) != "logical" {
        return Err(errors::wal_level(config, row.get(3)));
    }
    if row.get::<_, &str>(8) == "SQL_ASCII" {
        return Err(encoding(config));
    }
    if !row.get::<_, Option<bool>>(4).unwrap_or(false) {
        return Err(errors::role_replication(config));
    }
    Ok(Server {
        version_num: version.unsigned_abs(),
        free_slots: row.get(5),
        synchronous: row.get(6),
        standby_without_feedback: row.get(7),
    })
}

/// Nobody knows what the bytes of such a database mean, and the server ends a stream at
/// the first value that is not UTF-8.
fn encoding(config: &SourceConfig) -> Error {
    Error::no(
        "source.encoding",
        format!(
            "{}: database {} has the encoding SQL_ASCII: its texts are bytes in no certain encoding",
            config.endpoint(),
            config.database
        ),
    )
    .next("Move the data to a database with a real encoding: dump it, and restore with the right client_encoding.")
}

struct Publication {
    oid: u32,
    via_root: bool,
    warnings: Vec<Error>,
}

async fn publication(session: &Session, config: &SourceConfig) -> Result<Publication> {
    const QUERY: &str = "
        SELECT oid, pubviaroot, pubinsert, pubupdate, pubdelete, pubtruncate
        FROM pg_publication WHERE pubname = $1";
    let doing = |error| sql_error(&error, "checking the publication");
    let Some(row) = session.query_opt(QUERY, &[&config.publication]).await.map_err(doing)? else {
        let names = session.query("SELECT pubname::text FROM pg_publication ORDER BY 1", &[]).await.map_err(doing)?;
        let names: Vec<String> = names.iter().map(|row| row.get(0)).collect();
        return Err(errors::publication_missing(config, Some(&names)));
    };
    let kinds = ["insert", "update", "delete", "truncate"];
    let left_out: Vec<&str> =
        kinds.iter().enumerate().filter(|(index, _)| !row.get::<_, bool>(index + 2)).map(|(_, kind)| *kind).collect();
    let mut warnings = Vec::new();
    if !left_out.is_empty() {
        warnings.push(errors::publication_publish(&config.publication, &left_out.join(", ")));
    }
    Ok(Publication { oid: row.get(0), via_root: row.get(1), warnings })
}

/// A copy reads the tables: without SELECT it would fail in the middle.
async fn check_select(session: &Session, config: &SourceConfig) -> Result<()> {
    const QUERY: &str = concat!(
        include_str!("sql/published.sql"),
        "SELECT format('%I.%I', n.nspname, c.relname)
         FROM published g
         JOIN pg_class c ON c.oid = g.oid
         JOIN pg_namespace n ON n.oid = c.relnamespace
         WHERE n.nspname <> 'tidegate'
           AND (NOT has_schema_privilege(n.oid, 'USAGE')
                OR NOT has_table_privilege(c.oid, 'SELECT') AND EXISTS (
                    SELECT FROM pg_attribute a
                    WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
                      AND coalesce(g.columns @> to_jsonb(a.attnum), a.attgenerated = '')
                      AND NOT has_column_privilege(c.oid, a.attnum, 'SELECT')))
         ORDER BY 1"
    );
    let rows = session.query(QUERY, &[&config.publication]).await;
    let rows = rows.map_err(|error| sql_error(&error, "checking privileges"))?;
    if rows.is_empty() {
        return Ok(());
    }
    let tables: Vec<String> = rows.iter().map(|row| row.get(0)).collect();
    let role = crate::schema::table::quote_identifier(&config.user);
    Err(Error::no(
        "source.select",
        format!("{}: role `{}` may not read {}", config.endpoint(), config.user, tables.join(", ")),
    )
    .next(format!("Run GRANT SELECT ON {} TO {role}; and GRANT USAGE ON their schemas.", tables.join(", "))))
}

async fn slot(session: &Session, config: &SourceConfig) -> Result<Option<SlotFacts>> {
    const QUERY: &str = "
        SELECT plugin::text, active_pid, coalesce(confirmed_flush_lsn, '0/0')::text, restart_lsn::text,
               wal_status, database::text, slot_type, current_database()::text,
               to_jsonb(s) ->> 'invalidation_reason'
        FROM pg_replication_slots s WHERE slot_name = $1";
    let row = session.query_opt(QUERY, &[&config.slot]).await;
    let Some(row) = row.map_err(|error| sql_error(&error, "checking the slot"))? else { return Ok(None) };
    let plugin: Option<String> = row.get(0);
    let database: Option<String> = row.get(5);
    let ours = plugin.as_deref() == Some("pgoutput") && database.as_deref() == row.get(7);
    let (true, Some(plugin), Some(database)) = (ours, plugin, database) else {
        return Err(Error::no(
            "slot.foreign",
            format!(
                "slot `{}` at {} exists and is not ours: {} {} in database {}",
                config.slot,
                config.endpoint(),
                row.get::<_, &str>(6),
                row.get::<_, Option<&str>>(0).unwrap_or("without plugin"),
                row.get::<_, Option<&str>>(5).unwrap_or("none"),
            ),
        )
        .next("Use another pipeline name, or drop that slot if nobody needs it."));
    };
    let lsn = |text: &str| text.parse::<Lsn>().map_err(errors::protocol);
    let facts = SlotFacts {
        plugin,
        active_pid: row.get(1),
        confirmed: lsn(row.get(2))?,
        restart: row.get::<_, Option<&str>>(3).map(lsn).transpose()?,
        wal_status: row.get(4),
        database,
    };
    if facts.wal_status.as_deref() == Some("lost") {
        // PostgreSQL 17 and later say why.
        let why = row.get::<_, Option<&str>>(8).map_or(String::new(), |reason| format!(" ({reason})"));
        return Err(errors::slot_lost(config, &config.slot, &format!("wal_status is lost{why}")));
    }
    Ok(Some(facts))
}

/// As a synchronous standby we would hang every commit of the source (P34).
fn check_synchronous(names: &str, config: &SourceConfig) -> Result<()> {
    let matches = standby_names(names).any(|name| name == "*" || name.eq_ignore_ascii_case(&config.application_name));
    if !matches {
        return Ok(());
    }
    Err(Error::no(
        "source.synchronous",
        format!(
            "{}: synchronous_standby_names = '{names}' makes `{}` a synchronous standby: every commit would wait for it",
            config.endpoint(),
            config.application_name
        ),
    )
    .next("Name the real standbys in synchronous_standby_names instead of `*`."))
}

/// The names in `synchronous_standby_names`, whatever the method in front.
fn standby_names(setting: &str) -> impl Iterator<Item = String> {
    let list = match (setting.find('('), setting.rfind(')')) {
        (Some(open), Some(close)) if open < close => &setting[open + 1..close],
        _ => setting,
    };
    list.split(',').map(|name| {
        let name = name.trim();
        match name.strip_prefix('"').and_then(|name| name.strip_suffix('"')) {
            Some(quoted) => quoted.replace("\"\"", "\""),
            None => name.to_owned(),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_setting_that_makes_us_a_synchronous_standby_is_refused() {
        let config = SourceConfig::parse("postgres://me@h/d", "p", "shop").unwrap();
        for names in ["*", "FIRST 1 (a, *)", "ANY 2 (\"tidegate/shop\", b)", "\"Tidegate/Shop\""] {
            assert_eq!(check_synchronous(names, &config).unwrap_err().code(), "source.synchronous", "{names}");
        }
        for names in ["", "a, b", "2 (a, \"tidegate/shop2\")"] {
            assert!(check_synchronous(names, &config).is_ok(), "{names}");
        }
    }
}
