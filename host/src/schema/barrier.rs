//! What a change has to wait for at a destination, and who holds it up.
//!
//! Pure: the destination and the command line say the same of the same facts.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use super::change::{SchemaChange, Step};
use super::classify::{Change, classify};
use super::decide::{ApplyMode, Decision, decide};
use crate::position::{Lsn, SnapshotId};
use crate::store::{TableRecord, TableState};

/// What has to open before a change is applied.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "gate", rename_all = "kebab-case")]
pub enum Gate {
    /// A plugin that has this step.
    Capability {
        /// Its name in the contract.
        step: String,
    },
    /// Another `apply` in the configuration.
    Policy,
    /// The operator's approval.
    Approval,
    /// The operator's approval, or that of the other destinations by having the change
    /// themselves (`quorum`).
    Release,
    /// The operator's word on what an interrupted change left behind.
    Settle,
    /// The plugin's consent: it has refused the change, and is asked again when the operator
    /// says so.
    Check,
}

impl Gate {
    /// As it is shown.
    pub fn as_str(&self) -> &'static str {
        match self {
            Gate::Capability { .. } => "capability",
            Gate::Policy => "policy",
            Gate::Approval => "approval",
            Gate::Release => "release",
            Gate::Settle => "settle",
            Gate::Check => "check",
        }
    }
}

/// What a change has to wait for; nothing if it runs by itself. `can`: the plugin's
/// capabilities.
pub fn gates(change: &SchemaChange, mode: ApplyMode, can: impl Fn(&str) -> bool) -> Vec<Gate> {
    let mut gates: Vec<Gate> = Vec::new();
    let lacking: BTreeSet<&str> =
        change.steps.iter().map(|step| step.kind.as_str()).filter(|kind| !can(kind)).collect();
    gates.extend(lacking.into_iter().map(|step| Gate::Capability { step: step.to_owned() }));
    let decisions = change.steps.iter().map(|step| decide(classify(step, change), mode));
    gates.extend(match decisions.max_by_key(|decision| gravity(*decision)) {
        None | Some(Decision::AutoApply) => None,
        Some(Decision::StageThenApply) => Some(Gate::Release),
        Some(Decision::ManualReview) => Some(Gate::Approval),
        Some(Decision::Block) => Some(Gate::Policy),
    });
    gates
}

fn gravity(decision: Decision) -> u8 {
    match decision {
        Decision::AutoApply => 0,
        Decision::StageThenApply => 1,
        Decision::ManualReview => 2,
        Decision::Block => 3,
    }
}

/// Why no approval makes the destination equal to the source: rows that are there have
/// values in a column that never came as changes (P28).
pub fn needs_copy(change: &SchemaChange) -> Option<&'static str> {
    if change.steps.iter().any(regenerates) {
        return Some("existing rows were given the values of another expression, which never came as changes (P28)");
    }
    let unseen = change.steps.iter().map(|step| Change::of(step, change)).find(|change| {
        matches!(change, Change::AddColumnWithExpression | Change::AddRequiredColumn | Change::PublishColumn)
    });
    unseen.map(|change| change.class().1)
}

/// Another expression for the same generated column: no change of type that anybody's
/// trigger sees.
fn regenerates(step: &Step) -> bool {
    let (Some(before), Some(after)) = (&step.before, &step.after) else { return false };
    before.generated && after.generated && before.default_expression != after.default_expression
}

/// Which of the other destinations have to have a change before it is released.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Quorum {
    /// All of them.
    All,
    /// So many.
    AtLeast(usize),
    /// These.
    Named(Vec<String>),
}

/// A table at another destination, as far as a quorum asks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Standing {
    state: TableState,
    applied: Option<SnapshotId>,
    applying: bool,
    floor: Option<Lsn>,
    detached: bool,
}

/// Code of a table whose destination was detached.
pub const DETACHED: &str = "destination.detached";

impl From<&TableRecord> for Standing {
    fn from(record: &TableRecord) -> Standing {
        Standing {
            state: record.state,
            applied: record.applied,
            applying: record.applying.is_some(),
            floor: record.floor,
            detached: record.error.as_ref().is_some_and(|error| error.code == DETACHED),
        }
    }
}

/// Another destination.
#[derive(Clone, Debug)]
pub struct Peer {
    /// Its name.
    pub name: String,
    /// Whether it takes the table at all.
    pub takes: bool,
    /// The table there; none if it does not have it yet.
    pub standing: Option<Standing>,
}

impl Peer {
    /// Why it has not acknowledged the change; none if it has. One that does not take the
    /// table, has it from a copy behind the change, or is detached has (P29).
    fn lacks(&self, to: SnapshotId) -> Option<&'static str> {
        let standing = match (&self.standing, self.takes) {
            (_, false) => return None,
            (None, true) => return Some("does not have the table yet"),
            (Some(standing), true) => standing,
        };
        let has = standing.applied.is_some_and(|applied| applied >= to) && !standing.applying;
        let copied_behind = standing.floor.is_some_and(|floor| floor > to.commit);
        if has || copied_behind || standing.detached {
            return None;
        }
        Some(match standing.state {
            TableState::Errored => "its table has stopped",
            TableState::Init | TableState::DataSync | TableState::FinishedCopy => "its table is being copied",
            TableState::CatchUp | TableState::Ready => "has not applied it",
        })
    }
}

/// A destination that a change waits for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Missing {
    /// Its name.
    pub destination: String,
    /// Why.
    pub why: &'static str,
}

/// Which of the other destinations hold up a change to `to`; none if the quorum is there.
pub fn missing(quorum: &Quorum, to: SnapshotId, peers: &[Peer]) -> Vec<Missing> {
    let lacking = |peer: &Peer| Some(Missing { destination: peer.name.clone(), why: peer.lacks(to)? });
    let all = || peers.iter().filter_map(lacking).collect::<Vec<Missing>>();
    match quorum {
        Quorum::All => all(),
        Quorum::AtLeast(least) => {
            let lacking = all();
            if peers.len() - lacking.len() >= *least { Vec::new() } else { lacking }
        }
        Quorum::Named(names) => {
            let of = |name: &String| match peers.iter().find(|peer| peer.name == *name) {
                Some(peer) => lacking(peer),
                // The configuration was checked: it was there when that was read.
                None => Some(Missing { destination: name.clone(), why: "is not configured" }),
            };
            names.iter().filter_map(of).collect()
        }
    }
}

/// The destinations whose quorums wait for one another, or for nobody: none of them would
/// ever be released. Each with its quorum, if it has one.
pub fn never_released<'a>(destinations: &[(&'a str, Option<&Quorum>)]) -> Vec<&'a str> {
    let mut released: BTreeSet<&str> =
        destinations.iter().filter(|(_, quorum)| quorum.is_none()).map(|(name, _)| *name).collect();
    loop {
        let opens = |name: &str, quorum: &Quorum| match quorum {
            Quorum::All => destinations.iter().all(|(other, _)| *other == name || released.contains(other)),
            Quorum::AtLeast(least) => released.len() >= *least,
            Quorum::Named(names) => names.iter().all(|other| released.contains(other.as_str())),
        };
        let more: Vec<&str> = destinations
            .iter()
            .filter(|(name, _)| !released.contains(name))
            .filter(|(name, quorum)| quorum.is_some_and(|quorum| opens(name, quorum)))
            .map(|(name, _)| *name)
            .collect();
        if more.is_empty() {
            break;
        }
        released.extend(more);
    }
    destinations.iter().map(|(name, _)| *name).filter(|name| !released.contains(name)).collect()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::schema::plan::plan;
    use crate::schema::samples::{column, table};
    use crate::schema::table::{Column, TableName};

    fn to(commit: u64) -> SnapshotId {
        SnapshotId { commit: Lsn(commit), message: Lsn(1) }
    }

    fn record(state: TableState, applied: u64, floor: u64) -> TableRecord {
        TableRecord { state, applied: Some(to(applied)), floor: Some(Lsn(floor)), ..TableRecord::default() }
    }

    fn peer(name: &str, record: &TableRecord) -> Peer {
        Peer { name: name.to_owned(), takes: true, standing: Some(record.into()) }
    }

    fn named(missing: Vec<Missing>) -> Vec<String> {
        missing.into_iter().map(|missing| missing.destination).collect()
    }

    #[test]
    fn a_change_waits_for_its_gravest_step_and_for_every_capability_that_lacks() {
        let key = |name: &str| Column { key_position: Some(1), ..column(1, name, "int4") };
        let before = table(vec![key("a"), column(2, "b", "int4"), column(3, "c", "text")]);
        let mut after = table(vec![key("z"), column(3, "c", "text")]);
        let dropped = plan(Arc::new(before.clone()), Arc::new(after.clone()));
        let all = |_: &str| true;
        assert_eq!(gates(&dropped, ApplyMode::AutoSafe, all), []);
        assert_eq!(gates(&dropped, ApplyMode::StagedRollout, all), [Gate::Release]);
        assert_eq!(gates(&dropped, ApplyMode::ManualReview, all), [Gate::Approval]);
        assert_eq!(gates(&dropped, ApplyMode::BlockDestructive, all), [Gate::Policy]);
        after.name = TableName::new("public", "renamed");
        let renamed = plan(Arc::new(before), Arc::new(after));
        let lacking = Gate::Capability { step: "rename-table".to_owned() };
        assert_eq!(
            gates(&renamed, ApplyMode::StagedRollout, |kind| kind != "rename-table"),
            [lacking, Gate::Approval],
            "a rename needs a mapping under any mode"
        );
    }

    #[test]
    fn what_gave_existing_rows_values_that_never_came_needs_a_copy_and_nothing_else_does() {
        let id = column(1, "id", "int4");
        let added = |change: fn(&mut Column)| {
            let mut new = column(2, "b", "int4");
            change(&mut new);
            plan(Arc::new(table(vec![id.clone()])), Arc::new(table(vec![id.clone(), new])))
        };
        assert_eq!(needs_copy(&added(|_| {})), None);
        assert!(needs_copy(&added(|new| new.default_expression = Some("random()".to_owned()))).is_some());
        assert!(needs_copy(&added(|new| new.nullable = false)).is_some());
        let narrowed =
            plan(Arc::new(table(vec![column(1, "a", "int8")])), Arc::new(table(vec![column(1, "a", "int4")])));
        assert_eq!(needs_copy(&narrowed), None);
        let generated = |expression: &str| {
            let by = Some(expression.to_owned());
            Arc::new(table(vec![Column { generated: true, default_expression: by, ..column(1, "a", "int4") }]))
        };
        assert!(needs_copy(&plan(generated("(n * 2)"), generated("(n * 3)"))).is_some());
    }

    #[test]
    fn a_destination_acknowledges_by_the_version_a_later_copy_a_detachment_or_not_taking_the_table() {
        let detached = TableRecord {
            error: Some(crate::store::TableError { code: DETACHED.to_owned(), message: String::new(), next: None }),
            ..record(TableState::Errored, 10, 5)
        };
        let interrupted = TableRecord {
            applying: Some(crate::store::Applying { from: to(10), to: to(20), step: 0 }),
            ..record(TableState::Ready, 20, 5)
        };
        let peers = [
            peer("applied", &record(TableState::Ready, 20, 5)),
            peer("copied", &record(TableState::DataSync, 10, 21)),
            peer("detached", &detached),
            Peer { name: "other".to_owned(), takes: false, standing: None },
        ];
        assert_eq!(missing(&Quorum::All, to(20), &peers), []);
        let late = [
            peer("behind", &record(TableState::Ready, 10, 5)),
            peer("stopped", &record(TableState::Errored, 10, 5)),
            peer("applying", &interrupted),
            Peer { name: "new".to_owned(), takes: true, standing: None },
        ];
        assert_eq!(named(missing(&Quorum::All, to(20), &late)), ["behind", "stopped", "applying", "new"]);
        let both: Vec<Peer> = peers.iter().chain(&late).cloned().collect();
        assert_eq!(missing(&Quorum::AtLeast(4), to(20), &both), []);
        assert_eq!(missing(&Quorum::AtLeast(5), to(20), &both).len(), 4, "all are named that could make it");
        let some = |names: &[&str]| Quorum::Named(names.iter().map(|name| (*name).to_owned()).collect());
        assert_eq!(missing(&some(&["applied", "copied"]), to(20), &both), []);
        assert_eq!(named(missing(&some(&["applied", "behind"]), to(20), &both)), ["behind"]);
        assert_eq!(named(missing(&some(&["gone"]), to(20), &both)), ["gone"]);
    }

    #[test]
    fn quorums_that_wait_for_one_another_are_found_and_those_with_another_way_are_not() {
        let names = |names: &[&str]| Quorum::Named(names.iter().map(|name| (*name).to_owned()).collect());
        let (of_a, of_b, one, all) = (names(&["a"]), names(&["b"]), Quorum::AtLeast(1), Quorum::All);
        assert_eq!(never_released(&[("a", Some(&of_b)), ("b", Some(&of_a)), ("c", None)]), ["a", "b"]);
        assert_eq!(never_released(&[("a", Some(&all)), ("b", Some(&all))]), ["a", "b"]);
        assert_eq!(never_released(&[("a", Some(&one)), ("b", Some(&one)), ("c", None)]), [""; 0]);
        assert_eq!(never_released(&[("a", Some(&of_b)), ("b", Some(&one)), ("c", None)]), [""; 0]);
        assert_eq!(never_released(&[("a", Some(&of_a)), ("b", None)]), ["a"], "it would wait for itself");
        assert_eq!(never_released(&[("a", Some(&Quorum::AtLeast(2))), ("b", None)]), ["a"]);
    }
}
