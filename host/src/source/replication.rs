//! The replication connection: commands, then the stream.

use std::io;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use fallible_iterator::FallibleIterator;
use postgres_protocol::message::backend::{DataRowBody, Message};
use postgres_protocol::message::frontend;
use tokio::time::timeout;

use super::config::SourceConfig;
use super::errors::{self, ServerError};
use super::login::{self, CancelKey, Purpose, Wire};
use super::session;
use super::transactions::Transactions;
use super::wal::{self, Feedback, WalReader};
use crate::error::{Error, Result};
use crate::position::Lsn;
use crate::schema::table::quote_identifier;

/// How long after the server's own `lock_timeout` a slot's creation is cancelled
/// from outside: the server waits for several transactions, each with that limit.
const CANCEL_AFTER: Duration = Duration::from_secs(1);
/// How long the server may take to let go of a command that was cancelled.
const CANCELLED_WITHIN: Duration = Duration::from_secs(5);
/// `server_version_num` of the first server with failover slots.
const FAILOVER_SINCE: u32 = 170_000;
/// The first version whose pgoutput sends transactions before they end.
const STREAMING_SINCE: u32 = 140_000;
/// Blockers named in an error.
const BLOCKERS: i64 = 10;

/// A connection in replication mode, before it streams.
pub struct ReplicationConnection {
    wire: Wire,
    key: Option<CancelKey>,
    config: SourceConfig,
    transactions: Option<Transactions>,
}

/// IDENTIFY_SYSTEM: which history this is (P8).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SystemIdentity {
    /// The cluster's system identifier.
    pub system: String,
    /// Its timeline.
    pub timeline: u32,
    /// How far its log is flushed.
    pub flushed: Lsn,
    /// The database we are connected to.
    pub database: String,
}

/// What a slot is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SlotKind {
    /// The pipeline's own.
    Permanent,
    /// For a copy: gone with the connection. Its snapshot can be imported until the
    /// connection's next command (P13).
    TemporaryExported,
}

/// CREATE_REPLICATION_SLOT's answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CreatedSlot {
    /// Commits below are visible in the snapshot, others are not (P14).
    pub consistent_point: Lsn,
    /// For SET TRANSACTION SNAPSHOT.
    pub snapshot: Option<String>,
}

impl ReplicationConnection {
    /// Connects, settings pinned as in a session.
    ///
    /// Errors: those of [`session::connect`], and `source.role-replication`,
    /// `source.wal-senders`.
    pub async fn connect(config: &SourceConfig) -> Result<Self> {
        let (wire, key) = login::log_in(config, Purpose::Replication).await?;
        let mut connection = ReplicationConnection { wire, key, config: config.clone(), transactions: None };
        // A slot is made in a transaction, which waits for others as long as they last.
        connection.command(session::UNLIMITED, "").await?;
        Ok(connection)
    }

    /// Lets the server send large transactions before they end, if it can (14 and
    /// newer): they are kept in `transactions` until they do.
    pub fn keeping(mut self, transactions: &Transactions) -> Self {
        self.transactions = Some(transactions.clone());
        self
    }

    /// The identity of the cluster. Errors: `source.connection-lost`.
    pub async fn identify_system(&mut self) -> Result<SystemIdentity> {
        let row = self.one_row("IDENTIFY_SYSTEM", "").await?;
        let [Some(system), Some(timeline), Some(flushed), Some(database)] = &row[..] else {
            return Err(errors::protocol("an answer to IDENTIFY_SYSTEM without a database"));
        };
        Ok(SystemIdentity {
            system: system.clone(),
            timeline: timeline.parse().map_err(errors::protocol)?,
            flushed: flushed.parse().map_err(errors::protocol)?,
            database: database.clone(),
        })
    }

    /// The timelines that `timeline` comes from, each with the LSN at which it was left.
    /// Errors: `source.connection-lost`.
    pub async fn timeline_history(&mut self, timeline: u32) -> Result<Vec<(u32, Lsn)>> {
        let row = self.one_row(&format!("TIMELINE_HISTORY {timeline}"), "").await?;
        let [_, Some(file)] = &row[..] else {
            return Err(errors::protocol("an answer to TIMELINE_HISTORY without a file"));
        };
        let entries = file.lines().filter(|line| !line.trim().is_empty() && !line.starts_with('#'));
        let entry = |line: &str| {
            let mut fields = line.split_whitespace();
            Some((fields.next()?.parse().ok()?, fields.next()?.parse().ok()?))
        };
        entries.map(|line| entry(line).ok_or_else(|| errors::protocol(format!("timeline history `{line}`")))).collect()
    }

    /// Creates a slot for pgoutput, within `timeout`.
    ///
    /// The server waits until all transactions that are open in the whole cluster
    /// have ended (P16). Errors: `slot.blocked` (transient) names those that it
    /// waited for; `slot.none-free`, `slot.exists`, `source.wal-level`,
    /// `source.role-replication`.
    pub async fn create_slot(&mut self, name: &str, kind: SlotKind, timeout: Duration) -> Result<CreatedSlot> {
        let (temporary, options) = match kind {
            // A standby takes the slot over, if it synchronises slots.
            SlotKind::Permanent if self.may_fail_over().await? => ("", "(SNAPSHOT 'nothing', FAILOVER)"),
            SlotKind::Permanent => ("", "NOEXPORT_SNAPSHOT"),
            SlotKind::TemporaryExported => (" TEMPORARY", "EXPORT_SNAPSHOT"),
        };
        let limit = timeout.as_millis().clamp(1, i32::MAX as u128);
        self.command(&format!("SET lock_timeout = {limit}"), name).await?;
        let create =
            format!("CREATE_REPLICATION_SLOT {}{temporary} LOGICAL pgoutput {options}", quote_identifier(name));
        let started = tokio::time::timeout(timeout + CANCEL_AFTER, self.one_row(&create, name)).await;
        let row = match started {
            Ok(Err(error)) if error.code() == "slot.wait" => return Err(self.blocked(name, timeout).await),
            Ok(answer) => answer?,
            Err(_) => {
                // Whoever is in the way is seen best while we still wait.
                let error = self.blocked(name, timeout).await;
                self.cancel_running(name).await?;
                return Err(error);
            }
        };
        let [_, Some(point), snapshot, ..] = &row[..] else {
            return Err(errors::protocol("an answer to CREATE_REPLICATION_SLOT without a consistent point"));
        };
        Ok(CreatedSlot { consistent_point: point.parse().map_err(errors::protocol)?, snapshot: snapshot.clone() })
    }

    /// Drops a slot. Errors: `slot.in-use` (transient), `slot.missing`.
    pub async fn drop_slot(&mut self, name: &str) -> Result<()> {
        self.command(&format!("DROP_REPLICATION_SLOT {}", quote_identifier(name)), name).await.map(drop)
    }

    /// Starts the stream at `from` and splits it. A slot that was confirmed beyond
    /// `from` starts there instead: the caller compares (P8).
    ///
    /// Errors: `slot.in-use` (transient, names the pid), `slot.missing`,
    /// `slot.lost`; `publication.missing` comes from the first [`WalReader::next`].
    pub async fn start(mut self, slot: &str, from: Lsn, publication: &str) -> Result<(WalReader, Feedback)> {
        let sender_timeout = self.sender_timeout().await?;
        let transactions = self.transactions.take();
        let streams = match &transactions {
            Some(transactions) if !transactions.gives_way() => self.server_version().await? >= STREAMING_SINCE,
            _ => false,
        };
        let protocol = if streams { "proto_version '2', streaming 'on'" } else { "proto_version '1'" };
        let publications = quote_literal(&quote_identifier(publication));
        let start = format!(
            "START_REPLICATION SLOT {} LOGICAL {from} ({protocol}, publication_names {publications}, messages 'true')",
            quote_identifier(slot)
        );
        self.send(&start).await?;
        match self.receive(slot).await? {
            Message::CopyOutResponse(_) => {}
            _ => return Err(errors::protocol("no stream after START_REPLICATION")),
        }
        let assembler = transactions.and_then(|transactions| transactions.assembler(streams));
        Ok(wal::split(self.wire, self.config, slot, from, sender_timeout, assembler))
    }

    /// `server_version_num`.
    async fn server_version(&mut self) -> Result<u32> {
        let row = self.one_row("SHOW server_version_num", "").await?;
        row.first().and_then(Option::as_deref).unwrap_or_default().parse().map_err(errors::protocol)
    }

    /// Whether slots made here can be failover slots: a primary of PostgreSQL 17 or later.
    async fn may_fail_over(&mut self) -> Result<bool> {
        let query = format!(
            "SELECT current_setting('server_version_num')::int4 >= {FAILOVER_SINCE} AND NOT pg_is_in_recovery()"
        );
        let row = self.one_row(&query, "").await?;
        Ok(row.first().and_then(Option::as_deref) == Some("t"))
    }

    /// `wal_sender_timeout` as it holds for this connection; zero: none.
    async fn sender_timeout(&mut self) -> Result<Duration> {
        let row = self.one_row("SELECT setting FROM pg_settings WHERE name = 'wal_sender_timeout'", "").await?;
        let milliseconds = row.first().and_then(Option::as_deref).unwrap_or_default();
        Ok(Duration::from_millis(milliseconds.parse().map_err(errors::protocol)?))
    }

    /// Ends a command from outside and takes what the server then says.
    async fn cancel_running(&mut self, slot: &str) -> Result<()> {
        if let Some(key) = self.key {
            login::cancel(&self.config, key).await;
        }
        let ended = timeout(CANCELLED_WITHIN, self.rows(slot)).await;
        // Cancelled, or done at the last moment: the caller's error stands either way.
        ended.map(drop).map_err(|_| errors::connection_lost(&self.config, "a cancelled command does not end"))
    }

    async fn blocked(&self, slot: &str, waited: Duration) -> Error {
        let found = match session::connect(&self.config).await {
            Ok(session) if in_recovery(&session).await => return self.not_logged(slot, waited),
            Ok(session) => blockers(&session).await,
            Err(error) => Err(error),
        };
        let what = match found {
            Ok(blockers) if blockers.is_empty() => "transactions that have ended by now".to_owned(),
            Ok(blockers) => blockers.join(", "),
            Err(error) => format!("transactions that could not be listed ({error})"),
        };
        Error::transient(
            "slot.blocked",
            format!(
                "slot `{slot}` at {}: not created within {} s, it waits for {what}",
                self.config.endpoint(),
                waited.as_secs()
            ),
        )
        .next("End them: COMMIT, ROLLBACK, pg_terminate_backend(pid), or ROLLBACK PREPARED 'gid'.")
    }

    /// A standby knows which transactions are open only when its primary logs them.
    fn not_logged(&self, slot: &str, waited: Duration) -> Error {
        Error::transient(
            "slot.blocked",
            format!(
                "slot `{slot}` at {}: not created within {} s; on a standby it waits until the primary logs its open \
                 transactions, and then for those to end",
                self.config.endpoint(),
                waited.as_secs()
            ),
        )
        .next("Run SELECT pg_log_standby_snapshot() at the primary, and end old transactions there.")
    }

    async fn send(&mut self, command: &str) -> Result<()> {
        let mut query = BytesMut::new();
        frontend::query(command, &mut query).map_err(errors::protocol)?;
        self.wire.send(&query).await.map_err(|error| errors::connection_lost(&self.config, &error.to_string()))
    }

    async fn receive(&mut self, slot: &str) -> Result<Message> {
        match self.wire.receive().await {
            Ok(Message::ErrorResponse(body)) => {
                Err(errors::replicating(&self.config, slot, &ServerError::of_fields(body.fields())))
            }
            Ok(message) => Ok(message),
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => Err(errors::protocol(error)),
            Err(error) => Err(errors::connection_lost(&self.config, &error.to_string())),
        }
    }

    async fn command(&mut self, command: &str, slot: &str) -> Result<Vec<Row>> {
        self.send(command).await?;
        self.rows(slot).await
    }

    /// The answer to a simple query, to its ReadyForQuery.
    async fn rows(&mut self, slot: &str) -> Result<Vec<Row>> {
        let mut rows = Vec::new();
        let mut failed = None;
        loop {
            match self.receive(slot).await {
                Ok(Message::DataRow(row)) => rows.push(read_row(&row)?),
                Ok(Message::ReadyForQuery(_)) => return failed.map_or(Ok(rows), Err),
                Ok(_) => {}
                Err(error) if matches!(error.code(), "source.connection-lost" | "source.protocol") => {
                    return Err(error);
                }
                Err(error) => failed = Some(error),
            }
        }
    }

    async fn one_row(&mut self, command: &str, slot: &str) -> Result<Row> {
        let rows = self.command(command, slot).await?;
        rows.into_iter().next().ok_or_else(|| errors::protocol("an answer without a row"))
    }
}

/// A row of a simple query, as text.
type Row = Vec<Option<String>>;

fn read_row(row: &DataRowBody) -> Result<Row> {
    let buffer: &Bytes = row.buffer_bytes();
    let mut cells = Vec::new();
    let mut ranges = row.ranges();
    while let Some(range) = ranges.next().map_err(errors::protocol)? {
        cells.push(range.map(|range| String::from_utf8_lossy(&buffer[range]).into_owned()));
    }
    Ok(cells)
}

async fn in_recovery(session: &session::Session) -> bool {
    // A session that cannot be asked is told of by the next query.
    session.query_one("SELECT pg_is_in_recovery()", &[]).await.is_ok_and(|row| row.get(0))
}

/// Transactions that a new slot waits for: those with a transaction id, in any
/// database, prepared ones included.
async fn blockers(session: &session::Session) -> Result<Vec<String>> {
    const QUERY: &str = "
        SELECT concat('pid ', pid, coalesce(' of ' || usename, ''), coalesce(' in ' || datname, ''),
               coalesce(' (' || state || coalesce(' since ' || xact_start::timestamptz(0), '') || ')', ''))
        FROM pg_stat_activity
        WHERE backend_xid IS NOT NULL AND pid <> pg_backend_pid()
        UNION ALL
        SELECT concat('prepared transaction ''', gid, ''' of ', owner, ' in ', database, ' since ', prepared::timestamptz(0))
        FROM pg_prepared_xacts
        LIMIT $1";
    let rows = session.query(QUERY, &[&BLOCKERS]).await;
    let rows = rows.map_err(|error| errors::sql_error(&error, "listing open transactions"))?;
    Ok(rows.iter().map(|row| row.get(0)).collect())
}

/// A string constant. Replication commands know no escapes but the doubled quote.
fn quote_literal(text: &str) -> String {
    format!("'{}'", text.replace('\'', "''"))
}
