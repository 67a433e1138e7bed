//! Another version of a destination's plugin takes over between two groups, and goes again
//! if it does not do well.
//!
//! All that was accepted is durable before the old instance closes, so that the new one
//! begins with nothing to make up for. Until rows of it are durable it is on trial: a trap,
//! a time-out, a lie, or that it does not open at all, and the version before it comes back
//! and gets the same groups. Nothing counts against a row meanwhile.

use std::collections::HashMap;
use std::sync::Arc;

use tokio::sync::{mpsc, watch};

use crate::error::{Error, Result};
use crate::plugin::{CallError, Called, Plugin, same_columns, same_table};
use crate::status::StatusError;
use crate::wire;

use super::destination::{Destination, Stop, Table};
use super::plugins::News;
use super::retry::{Action, action};

/// Where versions come from, and what is told of them.
pub(super) struct Exchange {
    offers: watch::Receiver<Option<Arc<Plugin>>>,
    news: mpsc::UnboundedSender<News>,
    /// Offered, and neither taken nor withdrawn.
    pending: Option<Arc<Plugin>>,
    /// It waits for a copy, and `status` says so.
    told: bool,
    /// What each table was to be in the words of the version before: the one on trial has
    /// to agree.
    before: Tables,
}

type Tables = HashMap<u32, wire::PhysicalTable>;

impl Exchange {
    pub fn new(offers: watch::Receiver<Option<Arc<Plugin>>>, news: mpsc::UnboundedSender<News>) -> Exchange {
        Exchange { offers, news, pending: None, told: false, before: Tables::new() }
    }

    /// Waits until something is offered or withdrawn. An error: nothing ever will be.
    pub async fn changed(&mut self) -> std::result::Result<(), watch::error::RecvError> {
        self.offers.changed().await?;
        self.take_note();
        Ok(())
    }

    fn take_note(&mut self) {
        self.pending = self.offers.borrow_and_update().clone();
        self.told = false;
    }

    fn pending(&mut self) -> Option<Arc<Plugin>> {
        if self.offers.has_changed().unwrap_or(false) {
            self.take_note();
        }
        self.pending.clone()
    }
}

impl Destination {
    /// What is to take the place of the version at work.
    fn offered(&mut self) -> Option<Arc<Plugin>> {
        let offered = self.parts.exchange.pending()?;
        (offered.sha256 != self.parts.lane.plugin().sha256).then_some(offered)
    }

    /// A table whose copy would begin again with a new instance.
    fn copying(&self) -> Option<&Table> {
        self.parts.tables.values().find(|table| table.run.is_some())
    }

    /// Changes to the version that is offered, if one is. No group may be under construction.
    pub(super) async fn take_offer(&mut self) -> Result<(), Stop> {
        if self.offered().is_none() {
            return Ok(());
        }
        if let Some(table) = self.copying().map(|table| table.record.name.to_string()) {
            self.tell_waiting(&table);
            return Ok(());
        }
        self.flush().await?;
        self.parts.exchange.before = self.rendered().await?;
        // Meanwhile it may have been taken, or withdrawn.
        if self.offered().is_none() || !self.parts.lane.is_open() {
            return self.ensure_open().await;
        }
        self.parts.lane.close().await;
        self.ensure_open().await
    }

    /// While there is no instance: the next one is of the version that is offered.
    pub(super) fn take_offer_shut(&mut self) {
        let Some(offered) = self.offered() else { return };
        let name = &self.parts.config.name;
        let before = self.parts.lane.plugin().clone();
        tracing::info!(
            destination = %name, from = %before.manifest.version, to = %offered.manifest.version,
            sha256 = %offered.sha256, "another version of the plugin takes over"
        );
        self.parts.board.update_destination(name, |status| status.plugin_differs(None));
        self.parts.exchange.pending = None;
        self.parts.lane.change_to(offered);
        self.backoff.ease();
    }

    /// The instance that does not get on makes way for a version that may be what helps.
    /// A copy that only waits for its destination is worth more.
    pub(super) fn make_way(&mut self, slow: bool) {
        if self.offered().is_some() && (slow || self.copying().is_none()) {
            self.parts.lane.discard();
        }
    }

    /// Before an instance on trial is told of any table: what they are to be there is the
    /// same as before, or else what they are.
    pub(super) async fn compare_tables(&mut self) -> Called<()> {
        if !self.parts.lane.on_trial() {
            return Ok(());
        }
        for (oid, before) in self.parts.exchange.before.clone() {
            let Some(schema) = self.parts.tables.get(&oid).and_then(|table| table.schema.clone()) else { continue };
            let wire = self.wire_table(&schema);
            let Some(instance) = self.parts.lane.instance() else { return Ok(()) };
            let now = instance.render_table(&wire).await?;
            if same_table(&now, &before) {
                continue;
            }
            let there = instance.inspect_table(&wire).await?;
            if !there.is_some_and(|there| same_columns(&there, &now)) {
                return Err(self.other_table(&schema.name.to_string()).into());
            }
        }
        Ok(())
    }

    /// What each table is to be in the words of the version at work, as far as it has any.
    async fn rendered(&mut self) -> Result<Tables, Stop> {
        let mut rendered = Tables::new();
        let known: Vec<(u32, wire::Table)> = self
            .parts
            .tables
            .iter()
            .filter(|(_, table)| table.takes_changes() && table.record.applying.is_none())
            .filter_map(|(oid, table)| Some((*oid, self.wire_table(table.schema.as_ref()?))))
            .collect();
        for (oid, wire) in known {
            let Some(instance) = self.parts.lane.instance() else { break };
            match instance.render_table(&wire).await {
                Ok(table) => drop(rendered.insert(oid, table)),
                Err(error) if error.is_fatal() => self.replace(error).await?,
                Err(_) => {}
            }
        }
        Ok(rendered)
    }

    /// Whether the version on trial has failed by this.
    pub(super) fn ends_trial(&self, error: &CallError, opening: bool) -> bool {
        let is_its_own = match error {
            CallError::Trap { .. } | CallError::Broken { .. } | CallError::Timeout { .. } => true,
            CallError::Failure(failure) => opening && !matches!(action(failure), Action::Retry | Action::Reopen),
            CallError::Host(error) => error.code() == OTHER_TABLE,
        };
        is_its_own && self.parts.lane.on_trial()
    }

    /// The version before the one on trial comes back.
    pub(super) fn take_back(&mut self, error: &CallError) {
        let Some(bad) = self.parts.lane.take_back() else { return };
        let (name, good) = (self.parts.config.name.clone(), self.parts.lane.plugin().clone());
        let why = match error {
            CallError::Host(error) => StatusError::from(&**error),
            _ => StatusError::from(&taken_back(&bad, &good, error)),
        };
        tracing::error!(
            destination = %name, code = %why.code, cause = error.code(), sha256 = %bad.sha256,
            next = why.next.as_deref(), "{}", why.message
        );
        self.parts.exchange.before.clear();
        self.parts.board.update_destination(&name, |status| {
            status.plugin_is(&good.manifest.version, &good.sha256);
            status.plugin_differs(Some(why.clone()));
        });
        // A watch that has ended offers nothing any more.
        let _ = self.parts.exchange.news.send(News::TakenBack { destination: name, sha256: bad.sha256.clone(), why });
    }

    /// Rows are durable: whatever version is at work does well.
    pub(super) fn did_well(&mut self) {
        if self.parts.lane.did_well() {
            self.parts.exchange.before.clear();
            let (destination, sha256) = (self.parts.config.name.clone(), self.parts.lane.plugin().sha256.clone());
            // As above.
            let _ = self.parts.exchange.news.send(News::DidWell { destination, sha256 });
        }
    }

    /// Which version is at work.
    pub(super) fn show_version(&self) {
        let (plugin, generation) = (self.parts.lane.plugin(), self.parts.lane.generation());
        self.parts.board.update_destination(&self.parts.config.name, |status| {
            status.plugin_is(&plugin.manifest.version, &plugin.sha256).generation = generation;
        });
    }

    fn tell_waiting(&mut self, table: &str) {
        let Some(offered) = self.offered().filter(|_| !self.parts.exchange.told) else { return };
        self.parts.exchange.told = true;
        let error = Error::transient(
            "plugin.waits",
            format!("version {} waits for the copy of {table}, which would begin again", offered.manifest.version),
        )
        .next("None: it takes over once no copy is under way. A restart takes it at once.");
        let why = StatusError::from(&error);
        self.parts.board.update_destination(&self.parts.config.name, |status| status.plugin_differs(Some(why)));
    }

    fn other_table(&self, table: &str) -> Error {
        let version = &self.parts.lane.plugin().manifest.version;
        Error::no(
            OTHER_TABLE,
            format!("version {version} of the plugin would have {table} otherwise than it is at the destination"),
        )
        .next("Put a version there that has it as it is, or start again with this one and resync the table.")
    }
}

const OTHER_TABLE: &str = "plugin.other-table";

fn taken_back(bad: &Plugin, good: &Plugin, error: &CallError) -> Error {
    let digest: String = bad.sha256.chars().take(12).collect();
    Error::no(
        "plugin.taken-back",
        format!(
            "version {} ({digest}) failed before it had made a row durable, and version {} is back: {}",
            bad.manifest.version,
            good.manifest.version,
            error.with_code()
        ),
    )
    .next("Put another file there: this one is not tried again.")
}
