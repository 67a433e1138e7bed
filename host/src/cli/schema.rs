//! `tidegate schema`: the history of a table's schema, and what a change of it means.

use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

use serde::Serialize;

use super::{barriers, paint, print_json, print_text, schema_history};
use crate::config::{Config, DestinationConfig};
use crate::error::{Error, Result};
use crate::position::SnapshotId;
use crate::schema::barrier::needs_copy;
use crate::schema::change::{SchemaChange, Step, StepKind};
use crate::schema::classify::{Change, Class};
use crate::schema::decide::{Decision, decide};
use crate::schema::history::History as SchemaHistory;
use crate::schema::plan::plan;
use crate::schema::table::TableSchema;
use crate::store::Loaded;

#[derive(Debug, clap::Subcommand)]
pub(super) enum Command {
    /// List the versions of a table's schema, and which destination has which
    History(schema_history::Args),
    /// Show what a change of a table means at a destination, step by step, and why
    Plan(Plan),
    /// List the changes that wait at a destination, and for whom
    Barriers(barriers::List),
    /// Apply a change that waits
    Approve(barriers::Approve),
    /// Stop the table of a change that waits
    Refuse(barriers::Refuse),
    /// Say which version a destination has behind a change that was cut off
    Accept(barriers::Accept),
}

#[derive(Debug, clap::Args)]
#[command(after_help = "From the version that the destination has to the newest; if it has that, the last change.\n\n\
    Example:\n  tidegate schema plan warehouse public.orders")]
pub(super) struct Plan {
    /// Name of the destination
    #[arg(value_name = "DEST")]
    destination: String,
    /// schema.table at the source
    #[arg(value_name = "TABLE")]
    table: String,
    /// From this version, as `history` shows it, instead of the destination's
    #[arg(long, value_name = "VERSION")]
    from: Option<SnapshotId>,
    /// To this version instead of the newest
    #[arg(long, value_name = "VERSION")]
    to: Option<SnapshotId>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub(super) async fn schema(command: Command, path: &Path) -> Result<ExitCode> {
    match command {
        Command::History(args) => schema_history::history(&args, path),
        Command::Plan(args) => show_plan(&args, path),
        Command::Barriers(args) => barriers::list(&args, path),
        Command::Approve(args) => barriers::approve(&args, path).await,
        Command::Refuse(args) => barriers::refuse(&args, path).await,
        Command::Accept(args) => barriers::accept(&args, path).await,
    }
}

/// One step.
#[derive(Serialize)]
pub(super) struct Shown {
    pub step: &'static str,
    pub what: String,
    pub class: Class,
    pub reason: &'static str,
}

impl Shown {
    fn of(step: &Step, change: &SchemaChange) -> Shown {
        let (class, reason) = Change::of(step, change).class();
        Shown { step: step.kind.as_str(), what: what(step, change), class, reason }
    }

    pub fn all(change: &SchemaChange) -> Vec<Shown> {
        change.steps.iter().map(|step| Shown::of(step, change)).collect()
    }
}

/// What a step does, in the words of the table.
fn what(step: &Step, change: &SchemaChange) -> String {
    let default = |column: &crate::schema::table::Column| {
        column.default_expression.as_ref().map(|default| format!(" default {default}")).unwrap_or_default()
    };
    match (step.kind, &step.before, &step.after) {
        (StepKind::RenameTable, ..) => format!("{} -> {}", change.before.name, change.after.name),
        (StepKind::ChangeKey, ..) => format!("({}) -> ({})", key(&change.before), key(&change.after)),
        (StepKind::AddColumn, _, Some(new)) => {
            format!("{} {}{}{}", new.name, new.declared, default(new), if new.nullable { "" } else { " not null" })
        }
        (StepKind::RenameColumn, Some(old), Some(new)) => format!("{} -> {}", old.name, new.name),
        (StepKind::AlterType, Some(old), Some(new)) => format!("{}: {} -> {}", new.name, old.declared, new.declared),
        (StepKind::SetDefault, _, Some(new)) => format!("{}{}", new.name, default(new)),
        (_, Some(column), _) | (_, None, Some(column)) => column.name.clone(),
        (_, None, None) => String::new(),
    }
}

fn key(schema: &TableSchema) -> String {
    let name = |ordinal: u16| schema.column(ordinal).map_or_else(String::new, |(_, column)| column.name.clone());
    schema.merge_key().into_iter().map(name).collect::<Vec<_>>().join(", ")
}

/// The table with this name: now, else at some time.
pub(super) fn find(loaded: &Loaded, history: &SchemaHistory, name: &str) -> Result<u32> {
    let recorded = loaded.tables.iter().find(|record| record.name.to_string() == name).map(|record| record.oid);
    let mut called = loaded.history.iter().filter(|version| version.name.to_string() == name);
    let is_newest =
        |version: &&TableSchema| history.newest(version.oid).is_some_and(|newest| newest.snapshot == version.snapshot);
    let now = called.clone().find(is_newest).map(|version| version.oid);
    recorded.or(now).or_else(|| called.next().map(|version| version.oid)).ok_or_else(|| {
        let mut known: Vec<String> = loaded.history.iter().map(|version| version.name.to_string()).collect();
        known.sort_unstable();
        known.dedup();
        Error::no("schema.unknown-table", format!("the state knows no version of a table `{name}`"))
            .next(format!("Name one of: {}.", known.join(", ")))
    })
}

/// A change at one destination, as `--json` prints it.
#[derive(Serialize)]
struct Planned {
    destination: String,
    table: String,
    from: SnapshotId,
    to: SnapshotId,
    /// Whether the destination has it.
    applied: bool,
    apply: &'static str,
    decision: Decision,
    /// No approval can bring the destination there.
    needs_copy: bool,
    steps: Vec<Shown>,
}

fn show_plan(args: &Plan, path: &Path) -> Result<ExitCode> {
    let config = Config::load(path)?;
    let destination = find_destination(&config, &args.destination)?;
    let loaded = config.pipeline.read_store()?.load()?;
    let history = SchemaHistory::from_stored(loaded.history.iter().cloned());
    let oid = find(&loaded, &history, &args.table)?;
    let record =
        loaded.tables.iter().find(|record| record.oid == oid && record.destination == destination.name).ok_or_else(
            || {
                Error::no("schema.not-there", format!("{} does not take the table {}", destination.name, args.table))
                    .next("Look at `tidegate tables`.")
            },
        )?;
    let (before, after) = ends(args, history.versions(oid), record.applied)?;
    let applied = record.applied.is_some_and(|applied| applied >= after.snapshot);
    let change = plan(before, after);
    let steps = Shown::all(&change);
    let gravest = steps.iter().map(|step| step.class).max().unwrap_or(Class::Compatible);
    let planned = Planned {
        destination: destination.name.clone(),
        table: args.table.clone(),
        from: change.before.snapshot,
        to: change.after.snapshot,
        applied,
        apply: destination.apply.as_str(),
        decision: decide(gravest, destination.apply),
        needs_copy: needs_copy(&change).is_some(),
        steps,
    };
    if args.json {
        print_json(&planned)?
    } else {
        print_text(&plan_table(&planned))?
    }
    Ok(ExitCode::SUCCESS)
}

fn find_destination<'a>(config: &'a Config, name: &str) -> Result<&'a DestinationConfig> {
    config.destinations.iter().find(|destination| destination.name == name).ok_or_else(|| {
        let known: Vec<&str> = config.destinations.iter().map(|destination| destination.name.as_str()).collect();
        Error::usage("schema.unknown-destination", format!("the configuration has no destination `{name}`"))
            .next(format!("Name one of: {}.", known.join(", ")))
    })
}

/// The versions that were asked for: else what the destination has and the newest, else
/// the last change.
fn ends(
    args: &Plan,
    all: &[Arc<TableSchema>],
    applied: Option<SnapshotId>,
) -> Result<(Arc<TableSchema>, Arc<TableSchema>)> {
    let find = |id: SnapshotId| {
        all.iter().find(|version| version.snapshot == id).cloned().ok_or_else(|| {
            Error::no("schema.unknown-version", format!("the history of {} has no version {id}", args.table))
                .next("Look at `tidegate schema history`.")
        })
    };
    let nothing = || {
        Error::no("schema.no-version", format!("the history of {} is empty", args.table))
            .next("Start `tidegate run`: the first copy brings the first version.")
    };
    let after = match args.to {
        Some(id) => find(id)?,
        None => all.last().cloned().ok_or_else(nothing)?,
    };
    let before = match (args.from, applied) {
        (Some(id), _) => find(id)?,
        (None, Some(id)) if id < after.snapshot => find(id)?,
        _ => {
            let index = all.iter().position(|version| version.snapshot == after.snapshot).unwrap_or_default();
            all[index.saturating_sub(1)].clone()
        }
    };
    Ok((before, after))
}

fn plan_table(planned: &Planned) -> String {
    let Planned { destination, table, from, to, .. } = planned;
    if planned.steps.is_empty() {
        return format!("{table} at {destination}: nothing changes between {from} and {to}");
    }
    let mut rows = paint::table(&["step", "what", "class", "why"]);
    for step in &planned.steps {
        rows.add_row([step.step, step.what.as_str(), step.class.as_str(), step.reason]);
    }
    let decision = match planned.decision {
        Decision::AutoApply => "is applied by itself",
        Decision::StageThenApply => "waits until its quorum is there, or `tidegate schema approve` releases it",
        Decision::ManualReview if planned.needs_copy => "stops the table: only `tidegate resync` brings it there",
        Decision::ManualReview => "waits for `tidegate schema approve`, and the rows behind it with it",
        Decision::Block => "waits for another `apply`, or `tidegate resync`",
    };
    let done = if planned.applied { "; the destination has it" } else { "" };
    format!("{table} at {destination}, {from} to {to}\n{rows}\nunder apply = \"{}\" it {decision}{done}", planned.apply)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schema::samples::{at, column, table};
    use crate::schema::table::Column;

    fn shown(before: Vec<Column>, after: Vec<Column>) -> Vec<String> {
        let change = plan(Arc::new(table(before)), Arc::new(table(after)));
        Shown::all(&change).into_iter().map(|step| format!("{} {}", step.step, step.what)).collect()
    }

    #[test]
    fn a_step_is_shown_in_the_words_of_the_table() {
        let (a, b) = (column(1, "a", "int4"), column(2, "b", "text"));
        let added = Column { nullable: false, default_expression: Some("5".to_owned()), ..column(3, "c", "int4") };
        assert_eq!(shown(vec![a.clone()], vec![a.clone(), added]), ["add-column c int4 default 5 not null"]);
        assert_eq!(shown(vec![a.clone(), b.clone()], vec![a.clone()]), ["drop-column b"]);
        assert_eq!(
            shown(vec![a.clone()], vec![Column { name: "z".to_owned(), ..a.clone() }]),
            ["rename-column a -> z"]
        );
        assert_eq!(shown(vec![a], vec![column(1, "a", "int8")]), ["alter-type a: int4 -> int8"]);
    }

    #[test]
    fn a_plan_goes_from_what_the_destination_has_to_the_newest_or_shows_the_last_change() {
        let one = Arc::new(at(&table(vec![column(1, "a", "int4")]), 10, 5));
        let two = Arc::new(at(&table(vec![column(1, "b", "int4")]), 20, 15));
        let three = Arc::new(at(&table(vec![column(1, "c", "int4")]), 30, 25));
        let all = [one.clone(), two.clone(), three.clone()];
        let args = |from: Option<&str>, to: Option<&str>| Plan {
            destination: "d".to_owned(),
            table: "t".to_owned(),
            from: from.map(|id| id.parse().unwrap()),
            to: to.map(|id| id.parse().unwrap()),
            json: false,
        };
        let found = |args: &Plan, applied: Option<SnapshotId>| {
            ends(args, &all, applied).map(|(before, after)| (before.snapshot, after.snapshot))
        };
        let default = args(None, None);
        assert_eq!(found(&default, Some(one.snapshot)).unwrap(), (one.snapshot, three.snapshot));
        assert_eq!(found(&default, Some(three.snapshot)).unwrap(), (two.snapshot, three.snapshot));
        assert_eq!(found(&default, None).unwrap(), (two.snapshot, three.snapshot));
        let asked = args(Some("10:5"), Some("20:15"));
        assert_eq!(found(&asked, Some(three.snapshot)).unwrap(), (one.snapshot, two.snapshot));
        let error = found(&args(Some("11:5"), None), None).unwrap_err();
        assert_eq!(error.code(), "schema.unknown-version");
        assert_eq!(ends(&default, &[], None).unwrap_err().code(), "schema.no-version");
    }
}
