//! Calls to a destination's plugin, and what is done when they fail.

use std::time::{Duration, Instant};

use crate::plugin::{CallError, Called, Instance};
use crate::position::Position;
use crate::status::{DestinationState, StatusError};
use crate::store::{RefusedWhy, TableError};
use crate::wire;

use super::destination::{Destination, Stop, from_wire_position};
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

/// The shape id of each batch's table, by which a plugin knows what its rows look like without
/// having kept the table (`docs/shape.md`).
fn shapes(batches: &[wire::Batch], shape: impl Fn(u32) -> Option<String>) -> Vec<(String, String)> {
    let mut oids: Vec<u32> = batches.iter().map(|batch| batch.table_id).collect();
    oids.sort_unstable();
    oids.dedup();
    oids.into_iter().filter_map(|oid| Some((format!("shape.{oid}"), shape(oid)?))).collect()
}

impl Destination {
    /// Sends what has to be sent, in order, until the plugin has taken all of it.
    pub(super) async fn pump(&mut self) -> Result<(), Stop> {
        loop {
            self.ensure_open().await?;
            let settled = self.ledger.drop_empty();
            self.settle(settled);
            if self.ledger.is_alone() {
                self.settle_accepted().await?;
                continue;
            }
            let Some(entry) = self.ledger.unsent() else { return Ok(()) };
            let Some(instance) = self.parts.lane.instance() else { continue };
            if entry.group.details.is_empty() {
                let tables = &self.parts.tables;
                let shape = |oid| Some(tables.get(&oid)?.wire.as_ref()?.shape.clone());
                entry.group.details = shapes(&entry.group.batches, shape);
            }
            crate::failpoint::reached("group.sending");
            match instance.write_group(&entry.group).await {
                Ok(ack) => {
                    crate::failpoint::reached("group.written");
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
            self.settle_accepted().await?;
        }
    }

    /// One `flush` of what is accepted, or what its failure asks for.
    async fn settle_accepted(&mut self) -> Result<(), Stop> {
        self.ensure_open().await?;
        // A new instance has accepted nothing.
        if !self.ledger.has_accepted() {
            return Ok(());
        }
        let Some(instance) = self.parts.lane.instance() else { return Ok(()) };
        match instance.flush().await {
            Ok(ack) => {
                crate::failpoint::reached("group.flushed");
                self.succeeded();
                self.acknowledged(ack).await?;
                if self.ledger.has_accepted() {
                    let lie = "`flush` returned, but not everything it had accepted is durable".to_owned();
                    return self.replace(CallError::Broken { message: lie }).await;
                }
                Ok(())
            }
            Err(error) => self.mend_accepted(error).await,
        }
    }

    /// The plugin asked for time.
    pub(super) async fn tick(&mut self) -> Result<(), Stop> {
        self.ensure_open().await?;
        let Some(instance) = self.parts.lane.instance() else { return Ok(()) };
        match instance.tick().await {
            Ok(ack) => {
                self.succeeded();
                self.acknowledged(ack).await
            }
            Err(error) => self.mend_accepted(error).await,
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
                    Action::Retry => {
                        self.pause_for(&failure, false).await?;
                        if !self.parts.lane.is_open() {
                            return Err(Ended::Restarted);
                        }
                    }
                    Action::Reopen => {
                        self.replace(CallError::Failure(failure)).await?;
                        return Err(Ended::Restarted);
                    }
                    Action::Isolate | Action::FailTable | Action::Suspend => return Err(Ended::Refused(failure)),
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
            self.take_offer_shut();
            match self.open().await {
                Ok(()) => self.show_version(),
                Err(error) if self.ends_trial(&error, true) => self.take_back(&error),
                Err(error) => {
                    self.parts.lane.discard();
                    self.show_trouble(&error);
                    let pause = match &error {
                        CallError::Failure(failure) if waits(failure) => self.backoff.slow(),
                        CallError::Failure(failure) => self.backoff.pause(asked(failure)),
                        _ => self.backoff.pause(None),
                    };
                    self.pause(pause).await?;
                }
            }
        }
        Ok(())
    }

    async fn open(&mut self) -> Called<()> {
        self.parts.lane.open().await?;
        crate::failpoint::reached("lane.opened");
        self.compare_tables().await?;
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
        crate::failpoint::reached("lane.attached");
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
        if let Some(at) = returned.filter(|at| at.epoch > self.parts.epoch) {
            let error = ahead(&table.record.name.to_string(), at);
            return self.fail_table(oid, error).await.map_err(|Stop| stopping());
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
        self.attach_as(oid, wire).await
    }

    /// Tells the instance of one table as it is at the destination.
    pub(super) async fn attach_as(&mut self, oid: u32, wire: wire::Table) -> Result<(), Ended> {
        let tables = [wire.clone()];
        let positions = self.call(async |instance| instance.attach_tables(&tables).await).await?;
        let returned = positions.into_iter().next().flatten().map(from_wire_position);
        self.attached(oid, wire, returned).await.map_err(|_| Ended::Stop)
    }

    /// Refused rows are in quarantine before what is durable counts (P6, P32).
    async fn acknowledged(&mut self, ack: wire::Ack) -> Result<(), Stop> {
        if !ack.refused.is_empty() {
            self.refused(&ack.refused).await?;
        }
        self.wake = ack.wake_after_ms.map(|ms| Instant::now() + Duration::from_millis(u64::from(ms)));
        let mut settled = self.ledger.durable(ack.durable);
        let clearing = std::mem::take(&mut settled.clearing);
        self.settle(settled);
        self.clear_quarantined(clearing).await
    }

    async fn mend_group(&mut self, error: CallError) -> Result<(), Stop> {
        match error {
            CallError::Failure(failure) => match action(&failure) {
                Action::Retry => self.pause_for(&failure, false).await,
                Action::Reopen => self.replace(CallError::Failure(failure)).await,
                Action::Isolate => self.isolate(&why(&failure), &failure.rows).await,
                Action::FailTable => self.refuse_group(&failure).await,
                Action::Suspend => self.pause_for(&failure, true).await,
            },
            error if self.ends_trial(&error, false) => self.replace(error).await,
            error => {
                let blamed = blames(&error).filter(|_| self.ledger.fault_unsent());
                let Some(why) = blamed else { return self.replace(error).await };
                let index = self.ledger.next_unsent().unwrap_or_default();
                let doubted = self.doubt(index, &why).await?;
                self.replace(error).await?;
                if doubted { Ok(()) } else { self.isolate_fault(&why).await }
            }
        }
    }

    /// A call about everything that was accepted failed. Where the plugin says that this
    /// does not pass, what it has accepted is sent again to a new instance, without what
    /// is at fault.
    async fn mend_accepted(&mut self, error: CallError) -> Result<(), Stop> {
        let failure = match error {
            CallError::Failure(failure) => failure,
            error if self.ends_trial(&error, false) => return self.replace(error).await,
            error => {
                let Some(why) = blames(&error) else { return self.replace(error).await };
                if !self.ledger.fault_accepted() {
                    self.doubt_crowd();
                    return self.replace(error).await;
                }
                let doubted = self.doubt(0, &why).await?;
                self.replace(error).await?;
                self.ledger.unsend();
                return if doubted { Ok(()) } else { self.isolate_fault(&why).await };
            }
        };
        match action(&failure) {
            Action::Retry => self.pause_for(&failure, false).await,
            Action::Suspend => self.pause_for(&failure, true).await,
            Action::Reopen => self.replace(CallError::Failure(failure)).await,
            Action::Isolate => {
                let only = self.ledger.fault_accepted();
                if !only {
                    self.doubt_crowd();
                }
                let doubted = only && self.doubt(0, &why(&failure)).await?;
                self.replace(CallError::Failure(failure.clone())).await?;
                self.ledger.unsend();
                if doubted { Ok(()) } else { self.refuse_accepted(&failure, only).await }
            }
            Action::FailTable => match self.culprit(&failure) {
                Some(oid) => {
                    self.replace(CallError::Failure(failure.clone())).await?;
                    self.ledger.unsend();
                    self.fail_table(oid, failure_to_table_error(&failure)).await
                }
                None => self.pause_for(&failure, true).await,
            },
        }
    }

    /// Rows of groups that were accepted are refused: those that are named, else the
    /// groups are sent and settled one by one, until it is known which.
    async fn refuse_accepted(&mut self, failure: &wire::Failure, only: bool) -> Result<(), Stop> {
        if failure.rows.is_empty() {
            return if only { self.isolate(&why(failure), &[]).await } else { Ok(()) };
        }
        self.refused(&failure.rows).await
    }

    /// The table that a failure names.
    fn culprit(&self, failure: &wire::Failure) -> Option<u32> {
        failure.table_id.filter(|oid| self.parts.tables.contains_key(oid))
    }

    /// A table of the group cannot go on: the one the failure names, else the only one,
    /// else each is tried alone.
    async fn refuse_group(&mut self, failure: &wire::Failure) -> Result<(), Stop> {
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
        self.pause(pause).await?;
        self.make_way(slow);
        Ok(())
    }

    /// The instance trapped, hung or lied: a new one takes its place after a pause, or one
    /// of the version before if this one is on trial.
    pub(super) async fn replace(&mut self, error: CallError) -> Result<(), Stop> {
        if self.ends_trial(&error, false) {
            self.take_back(&error);
            return Ok(());
        }
        self.show_trouble(&error);
        self.parts.lane.discard();
        let pause = self.backoff.pause(None);
        self.pause(pause).await
    }

    /// Sleeps before the next try, unless it is time to stop, or another version of the
    /// plugin is there, which may be what helps.
    async fn pause(&mut self, pause: Duration) -> Result<(), Stop> {
        let (stopping, exchange) = (&mut self.parts.stopping, &mut self.parts.exchange);
        tokio::select! {
            () = tokio::time::sleep(pause) => Ok(()),
            _ = stopping.wait_for(|stopping| *stopping) => Err(Stop),
            Ok(()) = exchange.changed() => Ok(()),
        }
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
        let shown = StatusError::from(&error.to_error(&format!("destination `{name}`")));
        let waits = matches!(error, CallError::Failure(failure) if waits(failure));
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

fn ahead(table: &str, at: Position) -> TableError {
    TableError {
        code: "table.position-ahead".to_owned(),
        message: format!(
            "table {table}: the destination has {} of epoch {} stored, a history of the source that has not begun",
            at.commit, at.epoch
        ),
        next: Some(RESYNC.to_owned()),
    }
}

/// Whether only somebody else can help.
fn waits(failure: &wire::Failure) -> bool {
    matches!(action(failure), Action::Isolate | Action::FailTable | Action::Suspend)
}

fn why(failure: &wire::Failure) -> RefusedWhy {
    RefusedWhy { code: failure.code.clone(), message: failure.message.clone(), column: None }
}

/// What is said of a row that is at fault for a trap or a time-out; none of the host's own
/// failures, which no row is at fault for.
fn blames(error: &CallError) -> Option<RefusedWhy> {
    let is_rows = matches!(error, CallError::Trap { .. } | CallError::Timeout { .. });
    is_rows.then(|| RefusedWhy { code: error.code().to_owned(), message: error.to_string(), column: None })
}

pub(super) fn failure_to_table_error(failure: &wire::Failure) -> TableError {
    TableError { code: failure.code.clone(), message: failure.message.clone(), next: Some(RESYNC.to_owned()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_table_of_a_group_is_told_with_its_shape_once() {
        let batch = |table_id| wire::Batch {
            table_id,
            snapshot: wire::SnapshotId { commit: 1, message: 0 },
            through: None,
            content: wire::Content::Truncate(wire::Truncation {
                sequence: wire::Sequence {
                    epoch: 0,
                    commit: vec![1],
                    ordinal: vec![1],
                    committed_at: vec![1],
                    xid: vec![1],
                },
                cascade: false,
                restart_identity: false,
            }),
        };
        let told = shapes(&[batch(9), batch(7), batch(9), batch(0)], |oid| (oid > 0).then(|| format!("id {oid}")));
        let pair = |oid: u32| (format!("shape.{oid}"), format!("id {oid}"));
        assert_eq!(told, [pair(7), pair(9)]);
    }
}
