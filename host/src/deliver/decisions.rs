//! What an operator says of a schema change that waits: checked against what is stored,
//! and stored for the destination to see to.

use crate::error::{Error, Result};
use crate::position::SnapshotId;
use crate::schema::barrier::Gate;
use crate::store::{BarrierRecord, Loaded, Store, TableRecord, TableState, Verdict};

/// What is said.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Word {
    /// Apply it, if it is the one to this version.
    Approve(Option<SnapshotId>),
    /// Stop the table.
    Refuse,
    /// The destination has the version before an interrupted change.
    AcceptFrom,
    /// The destination has the version behind it.
    AcceptTo,
}

/// What it would do.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Decided<'a> {
    /// Store it with the barrier.
    Barrier(&'a BarrierRecord, Verdict),
    /// Nothing waits, but a change was cut off when the pipeline ended: its record is
    /// settled itself, while nobody runs.
    Record(&'a TableRecord),
}

/// Whether that can be said of a table of a destination.
///
/// # Errors
/// `schema.not-there`, `schema.nothing-waits`, `schema.other-version`, `schema.blocked`,
/// `schema.nothing-to-settle` (exit code 3).
pub(crate) fn check<'a>(loaded: &'a Loaded, destination: &str, table: &str, word: Word) -> Result<Decided<'a>> {
    let is_meant = |record: &&TableRecord| record.destination == destination && record.name.to_string() == table;
    let record = loaded.tables.iter().find(is_meant).ok_or_else(|| {
        Error::no("schema.not-there", format!("the state knows no table {table} of a destination `{destination}`"))
            .next("Name both as `tidegate schema barriers` does.")
    })?;
    let waits = |barrier: &&BarrierRecord| {
        let is_its = barrier.destination == destination && barrier.oid == record.oid;
        is_its && record.state != TableState::Errored && record.applied == Some(barrier.from)
    };
    let accepts = matches!(word, Word::AcceptFrom | Word::AcceptTo);
    let Some(barrier) = loaded.barriers.iter().find(waits) else {
        return match record.applying {
            Some(_) if accepts && record.state != TableState::Errored => Ok(Decided::Record(record)),
            _ => Err(nothing_waits(record)),
        };
    };
    match word {
        Word::Approve(to) => approvable(barrier, table, to).map(|()| Decided::Barrier(barrier, Verdict::Approved)),
        Word::Refuse => Ok(Decided::Barrier(barrier, Verdict::Refused)),
        Word::AcceptFrom | Word::AcceptTo if !barrier.gates.contains(&Gate::Settle) => {
            Err(nothing_to_settle(destination, table))
        }
        Word::AcceptFrom => Ok(Decided::Barrier(barrier, Verdict::AcceptedFrom)),
        Word::AcceptTo => Ok(Decided::Barrier(barrier, Verdict::AcceptedTo)),
    }
}

fn approvable(barrier: &BarrierRecord, table: &str, to: Option<SnapshotId>) -> Result<()> {
    if to.is_some_and(|to| to != barrier.to) {
        return Err(other_version(table, barrier.to));
    }
    if barrier.gates.contains(&Gate::Policy) {
        return Err(Error::no(
            "schema.blocked",
            format!("the change of {table} to {} is refused by `apply` of the configuration", barrier.to),
        )
        .next("Change `apply` in [destination.schema] and start `tidegate run` again; or run `tidegate resync DEST TABLE`."));
    }
    let asks = |gate: &Gate| matches!(gate, Gate::Approval | Gate::Release | Gate::Settle | Gate::Check);
    if !barrier.gates.iter().any(asks) {
        return Err(Error::no(
            "schema.blocked",
            format!("the change of {table} to {} waits for a plugin, and not for anybody's approval", barrier.to),
        )
        .next("Use a plugin that supports it, or run `tidegate resync DEST TABLE`."));
    }
    Ok(())
}

/// Stores what is said, and answers with a sentence. `runs`: whether a pipeline sees to it.
///
/// # Errors
/// As [`check`]; those of the store.
pub(crate) async fn decide(
    store: &Store,
    loaded: &Loaded,
    destination: &str,
    table: &str,
    word: Word,
    runs: bool,
) -> Result<String> {
    let (barrier, verdict) = match check(loaded, destination, table, word)? {
        Decided::Barrier(barrier, verdict) => (barrier, verdict),
        Decided::Record(_) if runs => {
            return Err(Error::no(
                "schema.nothing-waits",
                format!("{table} of {destination} is being changed just now"),
            )
            .next("Wait for it: `tidegate status` shows what becomes of it."));
        }
        Decided::Record(record) => return settle_at_rest(store, record, word).await,
    };
    if !store.decide_barrier(destination, barrier.oid, barrier.to, verdict).await? {
        return Err(other_version(table, barrier.to));
    }
    let (from, to) = (barrier.from, barrier.to);
    let next = if runs { "" } else { " at the next start of `tidegate run`" };
    Ok(match verdict {
        Verdict::Approved if barrier.gates.contains(&Gate::Check) => {
            format!(
                "the plugin is asked again about the change of {table} to {to}{next}, and it is applied at {destination} if it consents"
            )
        }
        Verdict::Approved => {
            let lacks = barrier.gates.iter().any(|gate| matches!(gate, Gate::Capability { .. }));
            let when = if lacks { " once the plugin supports it" } else { next };
            format!("the change of {table} to {to} is approved, and applied at {destination}{when}")
        }
        Verdict::Refused => format!("the change of {table} to {to} is refused: the table stops at {destination}{next}"),
        Verdict::AcceptedFrom => format!("{destination} has {table} as {from}: the change to {to} is made again{next}"),
        Verdict::AcceptedTo => format!("{destination} has {table} as {to}: its rows follow{next}"),
    })
}

/// A change was cut off by the end of the process: the operator knows what became of it.
async fn settle_at_rest(store: &Store, record: &TableRecord, word: Word) -> Result<String> {
    let (name, destination) = (&record.name, &record.destination);
    let Some(applying) = record.applying else { return Err(nothing_to_settle(destination, &name.to_string())) };
    let mut settled = TableRecord { applying: None, ..record.clone() };
    let said = match word {
        Word::AcceptTo => {
            settled.applied = Some(applying.to);
            format!("{destination} has {name} as {}: its rows follow at the next start of `tidegate run`", applying.to)
        }
        _ => format!(
            "{destination} has {name} as {}: the change to {} is made again at the next start of `tidegate run`",
            applying.from, applying.to
        ),
    };
    store.save_table(settled).await?;
    Ok(said)
}

fn nothing_waits(record: &TableRecord) -> Error {
    let (name, destination) = (&record.name, &record.destination);
    match record.state {
        TableState::Errored => Error::no(
            "schema.nothing-waits",
            format!("{name} of {destination} has stopped: what came behind the change was given up"),
        )
        .next("Run `tidegate resync DEST TABLE`."),
        _ => Error::no("schema.nothing-waits", format!("no schema change of {name} waits at {destination}"))
            .next("Run `tidegate schema barriers` to see those that do."),
    }
}

fn nothing_to_settle(destination: &str, table: &str) -> Error {
    Error::no("schema.nothing-to-settle", format!("no change of {table} at {destination} was interrupted"))
        .next("Approve it or refuse it: `tidegate schema barriers` shows what it waits for.")
}

fn other_version(table: &str, to: SnapshotId) -> Error {
    Error::no("schema.other-version", format!("the change of {table} that waits is not that one, or was not: {to}"))
        .next("Look at `tidegate schema barriers`, and decide about the one that waits now.")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::position::Lsn;
    use crate::schema::table::TableName;
    use crate::store::{Applying, TableError};

    fn version(commit: u64) -> SnapshotId {
        SnapshotId { commit: Lsn(commit), message: Lsn(1) }
    }

    fn loaded(gates: Vec<Gate>) -> Loaded {
        let record = TableRecord {
            destination: "d".to_owned(),
            oid: 7,
            name: TableName::new("public", "t"),
            state: TableState::CatchUp,
            applied: Some(version(10)),
            ..TableRecord::default()
        };
        let barrier = BarrierRecord {
            destination: "d".to_owned(),
            oid: 7,
            from: version(10),
            to: version(20),
            gates,
            why: TableError { code: "schema.held".to_owned(), message: String::new(), next: None },
            since: 0,
            verdict: None,
        };
        Loaded { tables: vec![record], barriers: vec![barrier], ..Loaded::default() }
    }

    fn code(loaded: &Loaded, word: Word) -> Result<Verdict, &'static str> {
        match check(loaded, "d", "public.t", word) {
            Ok(Decided::Barrier(_, verdict)) => Ok(verdict),
            Ok(Decided::Record(_)) => Err("record"),
            Err(error) => {
                assert!(error.next_step().is_some() && error.exit_code() == crate::error::Exit::No, "{error}");
                Err(["not-there", "nothing-waits", "other-version", "blocked", "nothing-to-settle"]
                    .into_iter()
                    .find(|code| error.code() == format!("schema.{code}"))
                    .unwrap())
            }
        }
    }

    #[test]
    fn an_approval_is_for_the_version_that_waits_and_for_a_gate_that_asks_for_it() {
        let held = loaded(vec![Gate::Approval]);
        assert_eq!(code(&held, Word::Approve(None)), Ok(Verdict::Approved));
        assert_eq!(code(&held, Word::Approve(Some(version(20)))), Ok(Verdict::Approved));
        assert_eq!(code(&held, Word::Approve(Some(version(30)))), Err("other-version"));
        assert_eq!(code(&held, Word::Refuse), Ok(Verdict::Refused));
        let lacking = Gate::Capability { step: "rename-table".to_owned() };
        assert_eq!(code(&loaded(vec![Gate::Policy]), Word::Approve(None)), Err("blocked"));
        assert_eq!(code(&loaded(vec![lacking.clone()]), Word::Approve(None)), Err("blocked"));
        assert_eq!(code(&loaded(vec![Gate::Check]), Word::Approve(None)), Ok(Verdict::Approved), "it is asked again");
        assert_eq!(code(&loaded(vec![lacking, Gate::Approval]), Word::Approve(None)), Ok(Verdict::Approved));
        assert_eq!(check(&held, "d", "public.other", Word::Refuse).unwrap_err().code(), "schema.not-there");
    }

    #[test]
    fn only_what_was_interrupted_is_settled_and_not_a_table_that_gave_its_rows_up() {
        let interrupted = loaded(vec![Gate::Settle]);
        assert_eq!(code(&interrupted, Word::AcceptTo), Ok(Verdict::AcceptedTo));
        assert_eq!(code(&interrupted, Word::AcceptFrom), Ok(Verdict::AcceptedFrom));
        assert_eq!(code(&interrupted, Word::Approve(None)), Ok(Verdict::Approved), "it is tried again");
        assert_eq!(code(&loaded(vec![Gate::Approval]), Word::AcceptTo), Err("nothing-to-settle"));
        let mut at_rest = Loaded { barriers: Vec::new(), ..loaded(Vec::new()) };
        assert_eq!(code(&at_rest, Word::AcceptTo), Err("nothing-waits"));
        at_rest.tables[0].applying = Some(Applying { from: version(10), to: version(20), step: 0 });
        assert_eq!(code(&at_rest, Word::AcceptTo), Err("record"));
        assert_eq!(code(&at_rest, Word::Refuse), Err("nothing-waits"));
        at_rest.tables[0].state = TableState::Errored;
        assert_eq!(code(&at_rest, Word::AcceptTo), Err("nothing-waits"));
    }
}
