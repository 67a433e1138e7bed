//! Calls to a destination's plugin, and what is done when they fail.

use std::time::{Duration, Instant};

use crate::plugin::{CallError, Called, Instance};
use crate::position::Position;
use crate::status::{DestinationState, StatusError};
use crate::store::TableError;
use crate::wire;

use super::destination::{Destination, Stop, failure_error, from_wire_position};
use super::ledger::Entry;
use super::retry::{Action, action};

/// Why a call other than `write-group` did not succeed.
pub(super) enum Ended {
    /// It is time to stop.
    Stop,
    /// The plugin says no, for good.
    Refused(wire::Failure),
    /// The instance was replaced while the call was under way.
    Restarted,
}

impl From<Stop> for Ended {
    fn from(_: Stop) -> Self {
        Ended::Stop
    }
}

impl Destination {
    /// Sends what has to be sent, in order, until the plugin has taken all of it.
    pub(super) async fn pump(&mut self) -> Result<(), Stop> {
        loop {
            self.ensure_open().await?;
            let settled = self.ledger.drop_empty();
            self.settle(settled);
            let Some(entry) = self.ledger.unsent() else { return Ok(()) };
            let Some(instance) = self.parts.lane.instance() else { continue };
            match instance.write_group(&entry.group).await {
                Ok(ack) => {
                    entry.accepted = Some(Instant::now());
                    self.succeeded();
                    self.acknowledged(ack).await?;
                }
                Err(error) => self.mend_group(error).await?,
            }
        }
    }

    /// Everything accepted is durable on return.
    pub(super) async fn flush(&mut self) -> Result<(), Stop> {
        loop {
            self.pump().await?;
            if self.ledger.is_empty() {
                return Ok(());
            }
            match self.call(async |instance| instance.flush().await).await {
                Ok(ack) => {
                    self.acknowledged(ack).await?;
                    if self.ledger.is_empty() {
                        return Ok(());
                    }
                    let lie = "`flush` returned, but not everything it had accepted is durable".to_owned();
                    self.replace(CallError::Trap { message: lie }).await?;
                }
                Err(Ended::Stop) => return Err(Stop),
                Err(Ended::Restarted) => {}
                Err(Ended::Refused(failure)) => self.refuse_group(&failure).await?,
            }
        }
    }

    /// The plugin asked for time.
    pub(super) async fn tick(&mut self) -> Result<(), Stop> {
        match self.call(async |instance| instance.tick().await).await {
            Ok(ack) => self.acknowledged(ack).await,
            Err(Ended::Stop) => Err(Stop),
            Err(Ended::Restarted) => Ok(()),
            Err(Ended::Refused(failure)) => self.pause_for(&failure, true).await,
        }
    }

    /// Calls the plugin until it answers something other than "later".
    pub(super) async fn call<T>(&mut self, call: impl AsyncFn(&mut Instance) -> Called<T>) -> Result<T, Ended> {
        loop {
            self.ensure_open().await?;
            let Some(instance) = self.parts.lane.instance() else { continue };
            match call(instance).await {
                Ok(answer) => {
                    self.succeeded();
                    return Ok(answer);
                }
                Err(CallError::Failure(failure)) => match action(&failure) {
                    Action::Retry => self.pause_for(&failure, false).await?,
                    Action::FailTable | Action::Suspend => return Err(Ended::Refused(failure)),
                },
                Err(error) => {
                    self.replace(error).await?;
                    return Err(Ended::Restarted);
                }
            }
        }
    }

    /// Makes sure that there is an open instance that knows the tables.
    pub(super) async fn ensure_open(&mut self) -> Result<(), Stop> {
        while !self.parts.lane.is_open() {
            match self.open().await {
                Ok(()) => {}
                Err(error) => {
                    self.parts.lane.discard();
                    self.show_trouble(&error);
                    let pause = match &error {
                        CallError::Failure(failure) if action(failure) != Action::Retry => self.backoff.slow(),
                        CallError::Failure(failure) => self.backoff.pause(asked(failure)),
                        _ => self.backoff.pause(None),
                    };
                    self.sleep(pause).await?;
                }
            }
        }
        Ok(())
    }

    async fn open(&mut self) -> Called<()> {
        self.parts.lane.open().await?;
        self.wake = None;
        self.ledger.unsend();
        for table in self.parts.tables.values_mut() {
            table.attached = false;
            table.run = None;
        }
        self.attach_all().await
    }

    /// Tells a new instance of every table that takes changes, and takes over the
    /// positions it returns.
    async fn attach_all(&mut self) -> Called<()> {
        let mut oids: Vec<u32> = Vec::new();
        let mut tables: Vec<wire::Table> = Vec::new();
        for (oid, table) in &self.parts.tables {
            // A table in the middle of a change is attached once that is recovered.
            if table.takes_changes() && table.record.applying.is_none() && !table.attached {
                oids.push(*oid);
                tables.extend(table.schema.as_ref().map(|schema| self.wire_table(schema)));
            }
        }
        if tables.is_empty() {
            return Ok(());
        }
        let Some(instance) = self.parts.lane.instance() else { return Ok(()) };
        let positions = instance.attach_tables(&tables).await?;
        for (index, (oid, table)) in oids.into_iter().zip(tables).enumerate() {
            let returned = positions.get(index).cloned().flatten().map(from_wire_position);
            self.attached(oid, table, returned).await?;
        }
        Ok(())
    }

    /// A position that the destination stored with the data is the truth (P7); one that
    /// is behind ours means that data was lost there.
    async fn attached(&mut self, oid: u32, wire: wire::Table, returned: Option<Position>) -> Called<()> {
        let Some(table) = self.parts.tables.get_mut(&oid) else { return Ok(()) };
        table.attached = true;
        table.wire = Some(wire);
        if !self.parts.lane.can("transactional") {
            return Ok(());
        }
        if returned < table.record.position {
            let error = gap(&table.record.name.to_string(), returned, table.record.position);
            return self.fail_table(oid, error).await.map_err(|Stop| stopping());
        }
        // What was sent and not committed has to be sent again, and what was committed
        // and not acknowledged has not.
        table.sent = returned;
        self.ledger.drop_through(oid, returned);
        Ok(())
    }

    /// Tells the instance of one table, if it does not know it.
    pub(super) async fn attach_one(&mut self, oid: u32) -> Result<(), Ended> {
        let Some(table) = self.parts.tables.get(&oid).filter(|table| !table.attached) else { return Ok(()) };
        let Some(wire) = table.schema.as_ref().map(|schema| self.wire_table(schema)) else { return Ok(()) };
        let tables = [wire.clone()];
        let positions = self.call(async |instance| instance.attach_tables(&tables).await).await?;
        let returned = positions.into_iter().next().flatten().map(from_wire_position);
        self.attached(oid, wire, returned).await.map_err(|_| Ended::Stop)
    }

    async fn acknowledged(&mut self, ack: wire::Ack) -> Result<(), Stop> {
        let refused: Vec<(u32, TableError)> = ack
            .refused
            .iter()
            .filter_map(|refusal| Some((self.ledger.table_of(refusal.ticket, refusal.batch)?, refused_error(refusal))))
            .collect();
        for (oid, error) in refused {
            self.fail_table(oid, error).await?;
        }
        self.wake = ack.wake_after_ms.map(|ms| Instant::now() + Duration::from_millis(u64::from(ms)));
        let settled = self.ledger.durable(ack.durable);
        self.settle(settled);
        Ok(())
    }

    async fn mend_group(&mut self, error: CallError) -> Result<(), Stop> {
        match error {
            CallError::Failure(failure) => match action(&failure) {
                Action::Retry => self.pause_for(&failure, false).await,
                Action::FailTable => self.refuse_group(&failure).await,
                Action::Suspend => self.pause_for(&failure, true).await,
            },
            error => self.replace(error).await,
        }
    }

    /// A table of the group cannot go on: the one the failure names, else the only one,
    /// else each is tried alone.
    async fn refuse_group(&mut self, failure: &wire::Failure) -> Result<(), Stop> {
        if action(failure) == Action::Suspend {
            return self.pause_for(failure, true).await;
        }
        let Some(entry) = self.ledger.unsent() else { return self.pause_for(failure, true).await };
        let culprit = failure.table_id.or_else(|| only_table(entry)).or_else(|| {
            let batch = failure.rows.first()?.batch;
            Some(entry.group.batches.get(batch as usize)?.table_id)
        });
        match culprit.filter(|oid| self.parts.tables.contains_key(oid)) {
            Some(oid) => self.fail_table(oid, failure_to_table_error(failure)).await,
            None if self.ledger.split_unsent() => Ok(()),
            None => self.pause_for(failure, true).await,
        }
    }

    /// Waits before the next try. `slow`: only somebody else can help.
    async fn pause_for(&mut self, failure: &wire::Failure, slow: bool) -> Result<(), Stop> {
        self.show_trouble(&CallError::Failure(failure.clone()));
        let pause = if slow { self.backoff.slow() } else { self.backoff.pause(asked(failure)) };
        self.sleep(pause).await
    }

    /// The instance trapped, hung or lied: a new one takes its place after a pause.
    async fn replace(&mut self, error: CallError) -> Result<(), Stop> {
        self.show_trouble(&error);
        self.parts.lane.discard();
        let pause = self.backoff.pause(None);
        self.sleep(pause).await
    }

    fn succeeded(&mut self) {
        if self.backoff.tries() > 0 {
            self.backoff.reset();
            tracing::info!(destination = %self.parts.config.name, "the destination takes calls again");
            self.set_state(DestinationState::Running, None);
        }
    }

    fn show_trouble(&mut self, error: &CallError) {
        let name = self.parts.config.name.clone();
        let shown = match error {
            CallError::Failure(failure) => StatusError::from(&failure_error(&name, "a call", failure)),
            other => StatusError {
                code: other.code().to_owned(),
                message: format!("destination `{name}`: {other}"),
                next: None,
            },
        };
        let waits = matches!(error, CallError::Failure(failure) if action(failure) != Action::Retry);
        let state = if waits { DestinationState::Errored } else { DestinationState::Retrying };
        tracing::warn!(destination = %name, code = %shown.code, tries = self.backoff.tries(), "{}", shown.message);
        self.set_state(state, Some(shown));
    }
}

fn asked(failure: &wire::Failure) -> Option<Duration> {
    failure.retry_after_ms.map(|ms| Duration::from_millis(u64::from(ms)))
}

fn only_table(entry: &Entry) -> Option<u32> {
    let first = entry.group.batches.first()?.table_id;
    entry.group.batches.iter().all(|batch| batch.table_id == first).then_some(first)
}

fn stopping() -> CallError {
    CallError::Host(std::sync::Arc::new(crate::error::Error::transient("host.stopping", "the host is stopping")))
}

/// The way out for a table that was given up on.
pub(super) const RESYNC: &str = "Mend the cause, then run `tidegate resync DEST TABLE` to copy the table again.";

fn gap(table: &str, returned: Option<Position>, stored: Option<Position>) -> TableError {
    let place = |position: Option<Position>| position.map_or("nothing".to_owned(), |at| at.commit.to_string());
    TableError {
        code: "table.gap".to_owned(),
        message: format!(
            "table {table}: the destination has {} stored, but {} was durable there: it lost data or was restored",
            place(returned),
            place(stored)
        ),
        next: Some(RESYNC.to_owned()),
    }
}

fn refused_error(refusal: &wire::Refusal) -> TableError {
    TableError {
        code: refusal.code.clone(),
        message: format!("row {} was refused: {}", refusal.row, refusal.message),
        next: Some(RESYNC.to_owned()),
    }
}

pub(super) fn failure_to_table_error(failure: &wire::Failure) -> TableError {
    TableError { code: failure.code.clone(), message: failure.message.clone(), next: Some(RESYNC.to_owned()) }
}
