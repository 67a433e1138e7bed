//! `tidegate schema barriers`, `approve`, `refuse`, `accept`: changes that wait.

use std::path::Path;
use std::process::ExitCode;
use std::time::{SystemTime, UNIX_EPOCH};

use comfy_table::Cell;
use serde::Serialize;

use super::schema::Shown;
use super::{paint, print_json, print_text};
use crate::config::{Config, DestinationConfig};
use crate::control::{self, Request};
use crate::copy::spool;
use crate::deliver::decisions::{self, Word};
use crate::error::Result;
use crate::position::{Lsn, SnapshotId};
use crate::schema::barrier::{Gate, Peer, Standing, gates, missing};
use crate::schema::change::SchemaChange;
use crate::schema::classify::{Class, gravest};
use crate::schema::decide::{ApplyMode, Decision, decide};
use crate::schema::history::History;
use crate::schema::plan::plan;
use crate::store::{BarrierRecord, Loaded, TableState, Verdict};

#[derive(Debug, clap::Args)]
#[command(after_help = "Reads the state, whether the pipeline runs or not.\n\n\
    Example:\n  tidegate schema barriers --json | jq '.[] | {destination, table, gates}'")]
pub(super) struct List {
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, clap::Args)]
#[command(after_help = "Of exactly the change that waits: the next one of the table asks anew.\n\
    A running pipeline applies it at once, a stopped one at its next start. Where a change was cut off, it is tried again.\n\n\
    Example:\n  tidegate schema approve warehouse public.orders --to 23874632:23874520")]
pub(super) struct Approve {
    #[command(flatten)]
    table: Table,
    /// Only if it is the change to this version, as `barriers` shows it
    #[arg(long, value_name = "VERSION")]
    to: Option<SnapshotId>,
}

#[derive(Debug, clap::Args)]
#[command(
    after_help = "The table stops, and the rows that wait are given up: `tidegate resync` copies it as it is then.\n\n\
    Example:\n  tidegate schema refuse warehouse public.orders"
)]
pub(super) struct Refuse {
    #[command(flatten)]
    table: Table,
}

#[derive(Debug, clap::Args)]
#[command(
    after_help = "For a change that was cut off: as `to` the rows that wait follow, as `from` the change is made again.\n\n\
    Example:\n  tidegate schema accept warehouse public.orders --as to"
)]
pub(super) struct Accept {
    #[command(flatten)]
    table: Table,
    /// Which version the destination has: the one before the change, or the one behind it
    #[arg(long = "as", value_name = "SIDE")]
    side: Side,
}

#[derive(Debug, clap::Args)]
struct Table {
    /// Name of the destination
    #[arg(value_name = "DEST")]
    destination: String,
    /// schema.table at the source
    #[arg(value_name = "TABLE")]
    table: String,
}

#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum Side {
    From,
    To,
}

/// A change that waits, as `--json` prints it.
#[derive(Serialize)]
struct Waiting {
    destination: String,
    table: String,
    from: SnapshotId,
    to: SnapshotId,
    /// Microseconds since 1970-01-01 UTC.
    since: i64,
    #[serde(skip_serializing_if = "Option::is_none")]
    class: Option<Class>,
    #[serde(skip_serializing_if = "Option::is_none")]
    decision: Option<Decision>,
    steps: Vec<Shown>,
    gates: Vec<Shut>,
    held: Behind,
    #[serde(skip_serializing_if = "Option::is_none")]
    verdict: Option<Verdict>,
    code: String,
    message: String,
    next: Option<String>,
}

/// What waits behind a change.
#[derive(Clone, Copy, Default, Serialize)]
struct Behind {
    /// Changes of rows.
    rows: u64,
    /// Of their messages.
    bytes: u64,
    /// There is more of it: only so much of the spool is looked at.
    at_least: bool,
}

impl Behind {
    fn shown(self) -> String {
        let least = if self.at_least { "at least " } else { "" };
        let rows = if self.rows == 1 { "row" } else { "rows" };
        format!("{least}{} {rows}, {}", paint::number(self.rows), paint::bytes(self.bytes))
    }
}

/// Bytes of the spool that are read to count what waits: a moment's work.
const LOOKED_AT: u64 = 256 << 20;

/// A gate, and who keeps it shut.
#[derive(Serialize)]
struct Shut {
    gate: &'static str,
    open: bool,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    blocked_by: Vec<String>,
}

pub(super) fn list(args: &List, path: &Path) -> Result<ExitCode> {
    let config = Config::load(path)?;
    let loaded = config.pipeline.read_store()?.load()?;
    let history = History::from_stored(loaded.history.iter().cloned());
    let mut waiting: Vec<(&BarrierRecord, Waiting)> = Vec::new();
    for barrier in &loaded.barriers {
        waiting.extend(shown(barrier, &config, &loaded, &history).map(|shown| (barrier, shown)));
    }
    let behind = behind(waiting.iter().map(|(barrier, _)| *barrier), &config, &loaded)?;
    let waiting: Vec<Waiting> =
        waiting.into_iter().zip(behind).map(|((_, shown), held)| Waiting { held, ..shown }).collect();
    if args.json {
        print_json(&waiting)?;
    } else if waiting.is_empty() {
        print_text("no schema change waits")?;
    } else {
        print_text(&render(&waiting))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// What the spool has behind each of these changes.
fn behind<'a>(
    barriers: impl Iterator<Item = &'a BarrierRecord>,
    config: &Config,
    loaded: &Loaded,
) -> Result<Vec<Behind>> {
    let after = |barrier: &BarrierRecord| {
        let is_its = |record: &&crate::store::TableRecord| {
            (record.oid, &record.destination) == (barrier.oid, &barrier.destination)
        };
        let record = loaded.tables.iter().find(is_its)?;
        let copied = record.floor.and_then(|floor| Some((Lsn(floor.0.checked_sub(1)?), u64::MAX)));
        copied.max(record.position.map(|position| (position.commit, position.ordinal)))
    };
    let tables: Vec<(u32, Option<(Lsn, u64)>)> = barriers.map(|barrier| (barrier.oid, after(barrier))).collect();
    if tables.is_empty() {
        return Ok(Vec::new());
    }
    let (counts, whole) = spool::count(&config.pipeline.state.join("spool"), &tables, LOOKED_AT)?;
    Ok(counts.iter().map(|count| Behind { rows: count.rows, bytes: count.bytes, at_least: !whole }).collect())
}

/// None if it is left of a table that has stopped or has it by now.
fn shown(barrier: &BarrierRecord, config: &Config, loaded: &Loaded, history: &History) -> Option<Waiting> {
    let is_its =
        |record: &&crate::store::TableRecord| (record.oid, &record.destination) == (barrier.oid, &barrier.destination);
    let record = loaded.tables.iter().find(is_its)?;
    if record.state == TableState::Errored || record.applied != Some(barrier.from) {
        return None;
    }
    let destination = config.destinations.iter().find(|destination| destination.name == barrier.destination);
    let versions = history.get(barrier.oid, barrier.from).zip(history.get(barrier.oid, barrier.to));
    let change = versions.map(|(before, after)| plan(before, after));
    let mode = destination.map_or(ApplyMode::default(), |destination| destination.apply);
    let class = change.as_ref().and_then(gravest).map(|(class, _)| class);
    let name = record.name.to_string();
    let shut = |gate: &Gate| {
        let blocked_by =
            blocked_by(gate, barrier, destination, change.as_ref(), || peers(barrier, config, loaded, &name));
        Shut { gate: gate.as_str(), open: blocked_by.is_empty(), blocked_by }
    };
    Some(Waiting {
        destination: barrier.destination.clone(),
        from: barrier.from,
        to: barrier.to,
        since: barrier.since,
        class,
        decision: class.map(|class| decide(class, mode)),
        steps: change.as_ref().map(Shown::all).unwrap_or_default(),
        gates: barrier.gates.iter().map(shut).collect(),
        held: Behind::default(),
        verdict: barrier.verdict,
        code: barrier.why.code.clone(),
        message: barrier.why.message.clone(),
        next: barrier.why.next.clone(),
        table: name,
    })
}

/// Who keeps a gate shut, by name.
fn blocked_by(
    gate: &Gate,
    barrier: &BarrierRecord,
    destination: Option<&DestinationConfig>,
    change: Option<&SchemaChange>,
    peers: impl FnOnce() -> Vec<Peer>,
) -> Vec<String> {
    if !matches!(gate, Gate::Capability { .. } | Gate::Policy) && barrier.verdict == Some(Verdict::Approved) {
        return Vec::new();
    }
    let operator = || vec!["the operator".to_owned()];
    match (gate, destination) {
        (Gate::Capability { step }, destination) => {
            let plugin = destination.map_or("", |destination| destination.plugin.as_str());
            vec![format!("plugin `{plugin}`: does not support `{step}`")]
        }
        (Gate::Policy, Some(destination)) => {
            let still = change.is_none_or(|change| gates(change, destination.apply, |_| true).contains(&Gate::Policy));
            still.then(|| format!("apply = \"{}\"", destination.apply.as_str())).into_iter().collect()
        }
        (Gate::Policy, None) => vec!["the configuration".to_owned()],
        (Gate::Check, destination) => {
            let plugin = destination.map_or("", |destination| destination.plugin.as_str());
            vec![format!("plugin `{plugin}`: refuses it ({})", barrier.why.code)]
        }
        (Gate::Approval | Gate::Settle | Gate::Release, None) | (Gate::Approval | Gate::Settle, Some(_)) => operator(),
        (Gate::Release, Some(destination)) => match &destination.quorum {
            None => operator(),
            Some(quorum) => {
                let missing = missing(quorum, barrier.to, &peers());
                missing.iter().map(|missing| format!("{}: {}", missing.destination, missing.why)).collect()
            }
        },
    }
}

/// The other destinations, as they are stored.
fn peers(barrier: &BarrierRecord, config: &Config, loaded: &Loaded, table: &str) -> Vec<Peer> {
    let others = config.destinations.iter().filter(|destination| destination.name != barrier.destination);
    let name = loaded.tables.iter().map(|record| &record.name).find(|name| name.to_string() == table);
    others
        .map(|destination| {
            let record =
                loaded.tables.iter().find(|record| record.destination == destination.name && record.oid == barrier.oid);
            Peer {
                name: destination.name.clone(),
                takes: name.is_some_and(|name| destination.tables.matches(name)),
                standing: record.map(Standing::from),
            }
        })
        .collect()
}

fn render(waiting: &[Waiting]) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_micros() as i64);
    let mut table = paint::table(&["destination", "table", "change", "held", "gates"]);
    for one in waiting {
        let steps: Vec<String> = one.steps.iter().map(|step| format!("{} {}", step.step, step.what)).collect();
        let gates: Vec<String> = one
            .gates
            .iter()
            .map(|gate| match gate.open {
                true => format!("{}: open", gate.gate),
                false => format!("{}: blocked by {}", gate.gate, gate.blocked_by.join(", ")),
            })
            .collect();
        let seconds = (now - one.since).max(0) as f64 / 1e6;
        table.add_row([
            Cell::new(&one.destination),
            Cell::new(&one.table),
            Cell::new(format!("{} -> {}\n{}", one.from, one.to, steps.join("\n")).trim_end()),
            Cell::new(format!("{}\n{}", paint::duration(seconds), one.held.shown())),
            Cell::new(gates.join("\n")),
        ]);
    }
    table.to_string()
}

pub(super) async fn approve(args: &Approve, path: &Path) -> Result<ExitCode> {
    let Table { destination, table } = args.table.clone_names();
    let request = Request::SchemaApprove { destination, table, to: args.to };
    say(&args.table, Word::Approve(args.to), request, path).await
}

pub(super) async fn refuse(args: &Refuse, path: &Path) -> Result<ExitCode> {
    let Table { destination, table } = args.table.clone_names();
    say(&args.table, Word::Refuse, Request::SchemaRefuse { destination, table }, path).await
}

pub(super) async fn accept(args: &Accept, path: &Path) -> Result<ExitCode> {
    let Table { destination, table } = args.table.clone_names();
    let (word, forward) = match args.side {
        Side::From => (Word::AcceptFrom, false),
        Side::To => (Word::AcceptTo, true),
    };
    say(&args.table, word, Request::SchemaAccept { destination, table, forward }, path).await
}

impl Table {
    fn clone_names(&self) -> Table {
        Table { destination: self.destination.clone(), table: self.table.clone() }
    }
}

/// Tells the running pipeline, or else the state.
async fn say(table: &Table, word: Word, request: Request, path: &Path) -> Result<ExitCode> {
    let pipeline = Config::load_pipeline(path)?;
    // Of no use for making a state; and what is refused is so with the right exit code.
    decisions::check(&pipeline.read_store()?.load()?, &table.destination, &table.table, word)?;
    let said = match control::ask(&pipeline.state, &request).await? {
        Some(answer) => answer.as_str().unwrap_or_default().to_owned(),
        None => {
            let store = pipeline.open_store()?;
            let loaded = store.load()?;
            decisions::decide(&store, &loaded, &table.destination, &table.table, word, false).await?
        }
    };
    print_text(&said)?;
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_person_sees_what_waits_for_whom_and_since_when() {
        let version = |text: &str| text.parse::<SnapshotId>().unwrap();
        let waiting = Waiting {
            destination: "warehouse".to_owned(),
            table: "public.orders".to_owned(),
            from: version("10:5"),
            to: version("20:15"),
            since: 0,
            class: Some(Class::Compatible),
            decision: Some(Decision::StageThenApply),
            steps: vec![Shown { step: "add-column", what: "c int4".to_owned(), class: Class::Compatible, reason: "" }],
            gates: vec![
                Shut { gate: "capability", open: true, blocked_by: Vec::new() },
                Shut { gate: "release", open: false, blocked_by: vec!["log: has not applied it".to_owned()] },
            ],
            held: Behind { rows: 12_345, bytes: 2 << 20, at_least: true },
            verdict: None,
            code: "schema.held".to_owned(),
            message: "waits".to_owned(),
            next: None,
        };
        let text = render(&[waiting]);
        for part in [
            "10:5 -> 20:15",
            "add-column c int4",
            "capability: open",
            "release: blocked by log: has not",
            "at least 12",
        ] {
            assert!(text.contains(part), "`{part}` is not in:\n{text}");
        }
    }
}
