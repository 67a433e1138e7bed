//! Changes that a destination does not apply by itself: their table waits, with all rows
//! behind them in the spool, until the gates are open (P29). Everything else goes on.
//!
//! A table is held in this order: the barrier is stored; from there on nothing of the
//! table is taken, and no progress of the source's log either, for the rows behind the
//! change are in the destination's queue alone; the router serves the table from the
//! spool, reads the stream again where it followed that, and says so in the queue. What
//! comes behind that word stands behind rows that the spool has (P6).

use crate::position::SnapshotId;
use crate::schema::barrier::{Gate, Missing, gates, needs_copy};
use crate::schema::change::SchemaChange;
use crate::schema::classify::gravest;
use crate::store::{Applying, BarrierRecord, TableError, TableState, Verdict};

use super::apply::lost_versions;
use super::destination::{Destination, Stop, Table, now_us};
use super::routes::Command;
use super::sending::{Ended, RESYNC};

/// Whether a table waits at a barrier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Hold {
    /// It does not.
    #[default]
    No,
    /// The router was asked to keep its changes in the spool.
    Asked,
    /// Nothing of it is in the queue any more.
    Held,
}

/// What to do about a change that waits, as `status` says it.
const DECIDE: &str = "See `tidegate schema barriers`; then `tidegate schema approve DEST TABLE`, \
     `tidegate schema refuse DEST TABLE`, or `tidegate resync DEST TABLE` to copy the table again.";
const WAIT_FOR_PLUGIN: &str =
    "Use a plugin that has it and start again; or run `tidegate resync DEST TABLE` to copy the table again.";
const CONFIGURE: &str = "Change `apply` in [destination.schema] and start again; or run `tidegate resync DEST TABLE`.";
const MEND: &str = "Mend at the destination what the plugin says, then let it be asked again by \
     `tidegate schema approve DEST TABLE`; or run `tidegate resync DEST TABLE` to copy the table again.";
const SETTLE: &str = "Look at the table at the destination. `tidegate schema accept DEST TABLE --as from|to` says which \
     version it has, `tidegate schema approve DEST TABLE` tries again, `tidegate resync DEST TABLE` copies it again.";

impl Destination {
    /// Whether the change may run now. If not its table waits, or stops where no approval
    /// can help.
    pub(super) async fn permit(&mut self, change: &SchemaChange) -> Result<bool, Stop> {
        let oid = change.after.oid;
        if let Some(reason) = needs_copy(change) {
            return self.fail_table(oid, values_missing(change, reason)).await.map(|()| false);
        }
        let mut barrier = self.barrier(change);
        if self.closed(&barrier).is_empty() {
            return Ok(true);
        }
        if barrier.gates == [Gate::Release] && !self.check_change(change).await? {
            return Ok(false);
        }
        barrier.why = self.explain(change, &barrier.gates);
        self.hold(barrier).await.map(|()| false)
    }

    /// What the change waits for, with what was said of it before.
    fn barrier(&self, change: &SchemaChange) -> BarrierRecord {
        let (oid, from, to) = (change.after.oid, change.before.snapshot, change.after.snapshot);
        let lane = &self.parts.lane;
        let gates = gates(change, self.parts.config.apply, |kind| lane.can(kind));
        let known = self.parts.tables.get(&oid).and_then(|table| table.barrier.as_ref());
        match known.filter(|known| (known.from, known.to) == (from, to)) {
            Some(known) => BarrierRecord { gates, ..known.clone() },
            None => BarrierRecord {
                destination: self.parts.config.name.clone(),
                oid,
                from,
                to,
                gates,
                why: TableError { code: String::new(), message: String::new(), next: None },
                since: now_us(),
                verdict: None,
            },
        }
    }

    /// The gates that are not open.
    fn closed<'a>(&self, barrier: &'a BarrierRecord) -> Vec<&'a Gate> {
        let approved = barrier.verdict == Some(Verdict::Approved);
        let is_closed = |gate: &&Gate| match gate {
            Gate::Capability { step } => !self.parts.lane.can(step),
            Gate::Policy => true,
            Gate::Approval | Gate::Settle | Gate::Check => !approved,
            Gate::Release => !approved && !self.quorum_is_there(barrier),
        };
        barrier.gates.iter().filter(is_closed).collect()
    }

    fn quorum_is_there(&self, barrier: &BarrierRecord) -> bool {
        self.missing(barrier).is_some_and(|missing| missing.is_empty())
    }

    /// Who holds the change up; none if no quorum can release it.
    fn missing(&self, barrier: &BarrierRecord) -> Option<Vec<Missing>> {
        let config = &self.parts.config;
        let table = self.parts.tables.get(&barrier.oid)?;
        let quorum = config.quorum.as_ref()?;
        Some(self.parts.rollout.missing(&config.name, quorum, barrier.oid, &table.record.name, barrier.to))
    }

    fn explain(&self, change: &SchemaChange, gates: &[Gate]) -> TableError {
        let (from, to) = (change.before.snapshot, change.after.snapshot);
        let config = &self.parts.config;
        let lacking: Vec<String> = gates
            .iter()
            .filter_map(|gate| match gate {
                Gate::Capability { step } => Some(format!("`{step}`")),
                _ => None,
            })
            .collect();
        if !lacking.is_empty() {
            return TableError {
                code: "schema.unsupported".to_owned(),
                message: format!(
                    "the change from {from} to {to} waits: it needs {}, which the plugin `{}` does not support",
                    lacking.join(", "),
                    config.plugin
                ),
                next: Some(WAIT_FOR_PLUGIN.to_owned()),
            };
        }
        let (class, kind) = gravest(change).map_or(("", ""), |(class, step)| (class.as_str(), step.kind.as_str()));
        TableError {
            code: "schema.held".to_owned(),
            message: format!(
                "the change from {from} to {to} waits: it has a step `{kind}` of class {class}, which `apply = \"{}\"` does not apply by itself",
                config.apply.as_str()
            ),
            next: Some(if gates.contains(&Gate::Policy) { CONFIGURE } else { DECIDE }.to_owned()),
        }
    }

    /// The table waits from here on. Stored before anything of it is left out.
    async fn hold(&mut self, barrier: BarrierRecord) -> Result<(), Stop> {
        let oid = barrier.oid;
        self.until_stored(async |store| store.save_barrier(barrier.clone()).await).await?;
        crate::failpoint::reached("hold.recorded");
        let Some(table) = self.parts.tables.get_mut(&oid) else { return Ok(()) };
        tracing::warn!(
            destination = %self.parts.config.name, table = %table.record.name, code = %barrier.why.code,
            next = barrier.why.next.as_deref().unwrap_or_default(), "the table waits: {}", barrier.why.message
        );
        table.barrier = Some(barrier);
        table.record.state = TableState::CatchUp;
        self.ask_to_hold(oid);
        self.save_table(oid).await
    }

    fn ask_to_hold(&mut self, oid: u32) {
        let place = self.place(oid);
        let Some(table) = self.parts.tables.get_mut(&oid).filter(|table| table.hold == Hold::No) else { return };
        table.hold = Hold::Asked;
        self.asking.insert(oid);
        // A router that has ended sends nothing more either.
        let _ = self.parts.commands.send(Command::Hold { place });
    }

    /// The plugin refuses the change before anything of it has begun: its table waits, and the
    /// change is checked again when the operator says so.
    pub(super) async fn hold_refused(&mut self, change: &SchemaChange, why: TableError) -> Result<(), Stop> {
        let mut barrier = self.barrier(change);
        barrier.gates.push(Gate::Check);
        barrier.verdict = None;
        barrier.why = TableError {
            message: format!(
                "the change from {} to {} waits: the plugin `{}` refuses it: {}",
                change.before.snapshot, change.after.snapshot, self.parts.config.plugin, why.message
            ),
            next: Some(MEND.to_owned()),
            ..why
        };
        // What was said of it before was said without this reason.
        self.drop_barrier(change.after.oid).await?;
        self.hold(barrier).await
    }

    /// A change was cut off, and how it is to go on is not known: its table waits for the
    /// operator's word.
    pub(super) async fn hold_interrupted(&mut self, oid: u32, why: TableError) -> Result<(), Stop> {
        let Some(applying) = self.parts.tables.get(&oid).and_then(|table| table.record.applying) else {
            return self.fail_table(oid, why).await;
        };
        // What was said of the change before was said of its beginning.
        self.drop_barrier(oid).await?;
        let barrier = BarrierRecord {
            destination: self.parts.config.name.clone(),
            oid,
            from: applying.from,
            to: applying.to,
            gates: vec![Gate::Settle],
            why: TableError { next: Some(SETTLE.to_owned()), ..why },
            since: now_us(),
            verdict: None,
        };
        self.hold(barrier).await
    }

    /// The router says that nothing of the table comes any more.
    pub(super) async fn held(&mut self, oid: u32) -> Result<(), Stop> {
        let asked = self.parts.tables.get_mut(&oid).filter(|table| table.hold == Hold::Asked);
        let Some(table) = asked else { return Ok(()) };
        table.hold = Hold::Held;
        self.asking.remove(&oid);
        crate::failpoint::reached("hold.answered");
        self.take_verdicts().await
    }

    /// What operators have said since, and who has which version: some tables may go on.
    pub(super) async fn take_verdicts(&mut self) -> Result<(), Stop> {
        if self.parts.tables.values().all(|table| table.barrier.is_none()) {
            return Ok(());
        }
        let stored = self.until_stored(async |store| store.barriers().await).await?;
        let name = self.parts.config.name.clone();
        for barrier in stored.into_iter().filter(|barrier| barrier.destination == name) {
            let table = self.parts.tables.get_mut(&barrier.oid);
            let known = table.and_then(|table| table.barrier.as_mut());
            if let Some(known) = known.filter(|known| (known.from, known.to) == (barrier.from, barrier.to)) {
                known.verdict = barrier.verdict;
            }
        }
        self.review_all().await
    }

    /// Looks at all tables that wait.
    pub(super) async fn review_all(&mut self) -> Result<(), Stop> {
        let waiting = self.parts.tables.iter().filter(|(_, table)| table.barrier.is_some());
        let mut oids: Vec<u32> = waiting.map(|(oid, _)| *oid).collect();
        oids.sort_unstable();
        for oid in oids {
            self.review(oid).await?;
        }
        Ok(())
    }

    async fn review(&mut self, oid: u32) -> Result<(), Stop> {
        let Some(table) = self.parts.tables.get(&oid) else { return Ok(()) };
        let Some(barrier) = table.barrier.clone() else { return Ok(()) };
        match (barrier.verdict, table.hold) {
            (Some(Verdict::Refused), _) => self.fail_table(oid, refused(&barrier)).await,
            (Some(Verdict::AcceptedFrom | Verdict::AcceptedTo), Hold::No | Hold::Held) => self.settle_as(barrier).await,
            (_, Hold::Held) if self.closed(&barrier).is_empty() => self.release(oid).await,
            _ => Ok(()),
        }
    }

    /// At a start, before the plugin is told of any table: what was decided meanwhile, and
    /// barriers of which nothing is left.
    pub(super) async fn meet_barriers(&mut self) -> Result<(), Stop> {
        let gone = |table: &Table| {
            let Some(barrier) = &table.barrier else { return false };
            table.record.state == TableState::Errored || table.record.applied != Some(barrier.from)
        };
        let stale: Vec<u32> = self.parts.tables.iter().filter(|(_, table)| gone(table)).map(|(oid, _)| *oid).collect();
        for oid in stale {
            self.drop_barrier(oid).await?;
        }
        self.review_all().await?;
        // Looked at again when the operator says so, and not at every start: it takes a while.
        let unsettled = |table: &Table| {
            table.barrier.as_ref().is_some_and(|barrier| barrier.gates == [Gate::Settle] && barrier.verdict.is_none())
        };
        let unsettled: Vec<u32> =
            self.parts.tables.iter().filter(|(_, table)| unsettled(table)).map(|(oid, _)| *oid).collect();
        unsettled.into_iter().for_each(|oid| self.ask_to_hold(oid));
        Ok(())
    }

    /// The operator has said which version the destination has.
    async fn settle_as(&mut self, barrier: BarrierRecord) -> Result<(), Stop> {
        let oid = barrier.oid;
        let to = self.parts.history.read().get(oid, barrier.to);
        let forward = barrier.verdict == Some(Verdict::AcceptedTo);
        if forward && to.is_none() {
            let applying = Applying { from: barrier.from, to: barrier.to, step: 0 };
            return self.fail_table(oid, lost_versions(&applying)).await;
        }
        if forward && let Some(to) = &to {
            self.show_renamed(oid, to);
        }
        let Some(table) = self.parts.tables.get_mut(&oid) else { return Ok(()) };
        table.record.applying = None;
        if forward && let Some(to) = to {
            table.record.applied = Some(to.snapshot);
            table.record.name = to.name.clone();
            table.schema = Some(to);
        }
        (table.attached, table.wire) = (false, None);
        tracing::warn!(
            destination = %self.parts.config.name, table = %table.record.name, from = %barrier.from, to = %barrier.to,
            "the operator says that the destination has the version {}", if forward { "behind the change" } else { "before the change" }
        );
        self.save_table(oid).await?;
        if forward {
            self.drop_barrier(oid).await?;
        } else {
            // That is also to say: make it again.
            let (name, to) = (self.parts.config.name.clone(), barrier.to);
            self.until_stored(async |store| store.decide_barrier(&name, oid, to, Verdict::Approved).await).await?;
            if let Some(barrier) = self.parts.tables.get_mut(&oid).and_then(|table| table.barrier.as_mut()) {
                barrier.verdict = Some(Verdict::Approved);
            }
        }
        match self.parts.tables.get(&oid).is_some_and(|table| table.hold == Hold::Held) {
            true => self.release(oid).await,
            false => Ok(()),
        }
    }

    /// The table goes on: from the spool it meets the change again, and finds it permitted.
    async fn release(&mut self, oid: u32) -> Result<(), Stop> {
        if self.parts.tables.get(&oid).is_some_and(|table| table.record.applying.is_some()) {
            self.drop_barrier(oid).await?;
            self.recover_schema(oid).await?;
        }
        match self.attach_one(oid).await {
            Ok(()) | Err(Ended::Restarted) => {}
            Err(ended) => self.change_failed(oid, ended).await?,
        }
        let place = self.place(oid);
        let goes_on = |table: &&mut Table| {
            table.record.state != TableState::Errored && table.record.applying.is_none() && table.hold == Hold::Held
        };
        let Some(table) = self.parts.tables.get_mut(&oid).filter(goes_on) else { return Ok(()) };
        table.hold = Hold::No;
        tracing::info!(destination = %self.parts.config.name, table = %table.record.name, "the table goes on");
        crate::failpoint::reached("hold.released");
        // A router that has ended sends nothing more either.
        let _ = self.parts.commands.send(Command::Release { place });
        self.publish_table(oid);
        Ok(())
    }

    /// Nothing of the table waits at a barrier any more.
    pub(super) async fn drop_barrier(&mut self, oid: u32) -> Result<(), Stop> {
        let Some(table) = self.parts.tables.get_mut(&oid) else { return Ok(()) };
        if table.barrier.take().is_none() {
            return Ok(());
        }
        let name = self.parts.config.name.clone();
        self.until_stored(async |store| store.delete_barrier(&name, oid).await).await?;
        self.publish_table(oid);
        Ok(())
    }

    /// The table stops or begins anew, and so nobody waits for it.
    pub(super) fn let_go(&mut self, oid: u32) {
        self.asking.remove(&oid);
        if let Some(table) = self.parts.tables.get_mut(&oid) {
            table.hold = Hold::No;
        }
    }
}

fn values_missing(change: &SchemaChange, reason: &str) -> TableError {
    TableError {
        code: "schema.needs-copy".to_owned(),
        message: format!(
            "the change of {} from {} to {} cannot be followed: {reason}",
            change.after.name, change.before.snapshot, change.after.snapshot
        ),
        next: Some(RESYNC.to_owned()),
    }
}

fn refused(barrier: &BarrierRecord) -> TableError {
    let (from, to): (SnapshotId, SnapshotId) = (barrier.from, barrier.to);
    TableError {
        code: "schema.refused".to_owned(),
        message: format!("the change from {from} to {to} was refused by the operator"),
        next: Some("Run `tidegate resync DEST TABLE` to copy the table as it is now.".to_owned()),
    }
}
