//! `tidegate schema history`: what became of a table's schema, when, and who has it.

use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

use comfy_table::Cell;
use serde::Serialize;

use super::schema::{Shown, find};
use super::{paint, print_json, print_text};
use crate::config::Config;
use crate::error::{Error, Result};
use crate::position::{Lsn, SnapshotId};
use crate::schema::classify::Change;
use crate::schema::history::{Entry, History};
use crate::schema::moment::Moment;
use crate::schema::plan::plan;
use crate::schema::table::{Origin, TableSchema};
use crate::schema::tombstone::{Ended, Tombstone};
use crate::store::{Application, AppliedVersion, How, Loaded, TableRecord};

/// Digits of a shape that a person compares.
const SHAPE_DIGITS: usize = 12;

#[derive(Debug, clap::Args)]
#[command(after_help = "Reads the state, whether the pipeline runs or not.\n\n\
    Example:\n  tidegate schema history public.orders --at 2026-12-01T08:00:00Z\n  \
    tidegate schema history public.orders --json | jq '.versions[-1].changes'")]
pub(super) struct Args {
    /// schema.table at the source, as it is named now or was before
    #[arg(value_name = "TABLE")]
    table: String,
    /// Only the version that rows committed at this LSN have, or rows at this time (UTC, or
    /// with its offset)
    #[arg(long, value_name = "LSN|TIME", value_parser = parse_at)]
    at: Option<At>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// A place in the history.
#[derive(Clone, Copy, Debug)]
enum At {
    Lsn(Lsn),
    Time(Moment),
}

fn parse_at(text: &str) -> Result<At, String> {
    let at = text.parse().map(At::Lsn).or_else(|_| text.parse().map(At::Time));
    at.map_err(|error: crate::schema::moment::ParseMomentError| {
        format!("{error}; or an LSN as PostgreSQL prints it, e.g. 16/B374D848")
    })
}

/// One version, or the table's end, as `--json` prints it.
#[derive(Serialize)]
struct Version {
    /// Counted from the table's first version on; none of an end.
    number: Option<u64>,
    /// Its snapshot id.
    version: SnapshotId,
    /// Rows committed from here on have it.
    commit: Lsn,
    /// When that was committed at the source, or its copy's snapshot taken; none of what
    /// was stored before times were kept.
    time: Option<Moment>,
    /// Where it was learnt; none of an end.
    origin: Option<Origin>,
    /// How the table ended here.
    #[serde(skip_serializing_if = "Option::is_none")]
    ended: Option<Ended>,
    /// See `TableSchema::shape`.
    shape: Option<String>,
    table: String,
    columns: usize,
    /// What it changed, in the order in which a destination is told.
    changes: Vec<Shown>,
    destinations: Vec<Destination>,
}

/// A destination that has the version, had it, or is on the way to it.
#[derive(Serialize)]
struct Destination {
    destination: String,
    /// `applied`: it has it; `passed`: it had it; `applying`.
    state: &'static str,
    /// How it came to it; none if it was before that was kept.
    how: Option<How>,
    /// The plugin's instance that did it.
    instance: Option<u64>,
    /// When, by the host's clock.
    at: Option<Moment>,
}

pub(super) fn history(args: &Args, path: &Path) -> Result<ExitCode> {
    let loaded = Config::load_pipeline(path)?.read_store()?.load()?;
    let history = History::from_stored(loaded.history.iter().cloned()).with_ended(loaded.ended.iter().cloned());
    let oid = find(&loaded, &history, &args.table)?;
    let mut versions = versions(&loaded, &history, oid);
    if let Some(at) = args.at {
        let entry = match at {
            At::Lsn(lsn) => history.at_lsn(oid, lsn),
            At::Time(moment) => history.at_time(oid, moment),
        };
        let entry = entry.ok_or_else(|| before_all(&args.table, &versions))?;
        versions.retain(|version| version.version == entry.snapshot());
    }
    if args.json {
        let removed = loaded.removed.get(&oid).copied().unwrap_or_default();
        print_json(&serde_json::json!({
            "table": args.table, "oid": oid, "removed": removed, "versions": versions,
        }))?;
    } else {
        print_text(&render(&versions))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn before_all(table: &str, versions: &[Version]) -> Error {
    let first = versions.first().map(|first| match first.time {
        Some(time) => format!(": it begins at {} ({time})", first.commit),
        None => format!(": it begins at {}", first.commit),
    });
    let message = format!("the history of {table} has nothing so early{}", first.unwrap_or_default());
    Error::no("schema.before-history", message).next("Look at all of it: leave out --at.")
}

/// The whole history of a table, oldest first.
fn versions(loaded: &Loaded, history: &History, oid: u32) -> Vec<Version> {
    let mut number = loaded.removed.get(&oid).copied().unwrap_or_default();
    let mut before: Option<Arc<TableSchema>> = None;
    let mut shown = Vec::new();
    for entry in history.entries(oid) {
        match entry {
            Entry::Version(schema) => {
                number += 1;
                let changes = match before.replace(schema.clone()) {
                    Some(before) => Shown::all(&plan(before, schema.clone())),
                    // Of one whose first versions were removed nobody knows what it changed.
                    None if number > 1 => Vec::new(),
                    None => vec![of_table(Change::AddTable, &schema.name.to_string())],
                };
                shown.push(version(loaded, &schema, number, changes));
            }
            Entry::Ended(tombstone) => shown.push(end(&tombstone)),
        }
    }
    shown
}

fn version(loaded: &Loaded, schema: &TableSchema, number: u64, changes: Vec<Shown>) -> Version {
    Version {
        number: Some(number),
        version: schema.snapshot,
        commit: schema.snapshot.commit,
        time: schema.committed_at,
        origin: Some(schema.origin),
        ended: None,
        shape: Some(schema.shape()),
        table: schema.name.to_string(),
        columns: schema.columns.len(),
        changes,
        destinations: destinations(loaded, schema.oid, schema.snapshot),
    }
}

fn end(tombstone: &Tombstone) -> Version {
    let change = match tombstone.why {
        Ended::Dropped => Change::DropTable,
        Ended::Unpublished => Change::UnpublishTable,
    };
    let name = tombstone.name.to_string();
    Version {
        number: None,
        version: tombstone.snapshot,
        commit: tombstone.snapshot.commit,
        time: tombstone.at,
        origin: None,
        ended: Some(tombstone.why),
        shape: None,
        columns: 0,
        changes: vec![of_table(change, &name)],
        destinations: Vec::new(),
        table: name,
    }
}

fn of_table(change: Change, table: &str) -> Shown {
    let (class, reason) = change.class();
    Shown { step: change.as_str(), what: table.to_owned(), class, reason }
}

/// Who has a version, had it, or is on the way to it, by name.
fn destinations(loaded: &Loaded, oid: u32, version: SnapshotId) -> Vec<Destination> {
    let mut found: Vec<Destination> = Vec::new();
    let known = |one: &&AppliedVersion| one.oid == oid && one.snapshot == version;
    for AppliedVersion { destination, application, .. } in loaded.applied.iter().filter(known) {
        let Application { how, generation, at } = *application;
        found.push(Destination {
            destination: destination.clone(),
            state: "passed",
            how: Some(how),
            instance: Some(generation),
            at: Some(at),
        });
    }
    let state = |record: &TableRecord| match record.applying {
        Some(applying) if applying.to == version => Some("applying"),
        _ if record.applied == Some(version) => Some("applied"),
        _ => None,
    };
    for record in loaded.tables.iter().filter(|record| record.oid == oid) {
        let Some(state) = state(record) else { continue };
        match found.iter_mut().find(|known| known.destination == record.destination) {
            Some(known) => known.state = state,
            None => found.push(Destination {
                destination: record.destination.clone(),
                state,
                how: None,
                instance: None,
                at: None,
            }),
        }
    }
    found.sort_by(|a, b| a.destination.cmp(&b.destination));
    found
}

fn render(versions: &[Version]) -> String {
    let mut table = paint::table(&["version", "time", "learnt by", "changes", "destinations", "shape"]);
    for version in versions {
        let changes: Vec<String> =
            version.changes.iter().map(|change| format!("{} {}", change.step, change.what)).collect();
        let changes = match changes.is_empty() {
            true => format!("{} columns", version.columns),
            false => changes.join("\n"),
        };
        let number = version.number.map(|number| format!("{number}: ")).unwrap_or_default();
        let destinations: Vec<String> = version.destinations.iter().map(of_destination).collect();
        let shape = version.shape.as_deref().unwrap_or_default();
        table.add_row([
            Cell::new(format!("{number}{}\n{}", version.version, version.commit)),
            Cell::new(version.time.map_or_else(|| "unknown".to_owned(), |time| time.to_string())),
            Cell::new(origin(version)),
            Cell::new(changes),
            Cell::new(destinations.join("\n")),
            Cell::new(shape.get(..SHAPE_DIGITS).unwrap_or(shape)),
        ]);
    }
    table.to_string()
}

fn of_destination(one: &Destination) -> String {
    let how = match (one.state, one.how) {
        ("applying", _) => "applying",
        (_, Some(How::Copied)) => "copied",
        (_, Some(How::Applied)) => "applied",
        (_, Some(How::Approved)) => "applied (approved by an operator)",
        (state, None) => state,
    };
    let now = if one.state == "passed" { "" } else { "*" };
    let at = one.at.map(|at| format!(" {at}")).unwrap_or_default();
    let by = one.instance.map(|instance| format!(" by instance {instance}")).unwrap_or_default();
    format!("{}{now} {how}{at}{by}", one.destination)
}

fn origin(version: &Version) -> &'static str {
    match version.origin {
        Some(Origin::Copy) => "copy",
        Some(Origin::Message) => "trigger",
        Some(Origin::Catalog) => "relation",
        // In the stream, or in the catalog.
        None if version.version.message == Lsn::ZERO => "catalog",
        None => "trigger",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schema::samples;
    use crate::schema::table::TableName;
    use crate::store::Applying;

    fn id(commit: u64) -> SnapshotId {
        SnapshotId { commit: Lsn(commit), message: Lsn(commit - 1) }
    }

    /// Three versions, the table's end, and two destinations: `a` has the second version
    /// and is on the way to the third; of `b`, which has the third, nothing was kept.
    fn loaded() -> Loaded {
        let version = |commit: u64, columns: &[&str]| {
            let columns = (1..).zip(columns).map(|(ordinal, name)| samples::column(ordinal, name, "int4"));
            let committed_at = Some(Moment(commit as i64 * 1_000_000));
            TableSchema { committed_at, ..samples::at(&samples::table(columns.collect()), commit, commit - 1) }
        };
        let application = |how, at| Application { how, generation: 4, at: Moment(at) };
        let applied = |commit, how, at| AppliedVersion {
            destination: "a".to_owned(),
            oid: 7,
            snapshot: id(commit),
            application: application(how, at),
        };
        let record = |destination: &str, commit| TableRecord {
            destination: destination.to_owned(),
            oid: 7,
            applied: Some(id(commit)),
            ..TableRecord::default()
        };
        let applying = Some(Applying { from: id(20), to: id(30), step: 0 });
        let name = TableName::new("public", "t");
        Loaded {
            history: vec![version(10, &["a"]), version(20, &["a", "b"]), version(30, &["a", "c"])],
            ended: vec![Tombstone { oid: 7, name, snapshot: id(40), why: Ended::Dropped, at: None }],
            tables: vec![TableRecord { applying, ..record("a", 20) }, record("b", 30)],
            applied: vec![applied(10, How::Copied, 11_000_000), applied(20, How::Approved, 21_000_000)],
            removed: [(7, 0)].into(),
            ..Loaded::default()
        }
    }

    fn all(loaded: &Loaded) -> Vec<Version> {
        let history = History::from_stored(loaded.history.iter().cloned()).with_ended(loaded.ended.iter().cloned());
        versions(loaded, &history, 7)
    }

    #[test]
    fn each_version_says_what_changed_when_and_who_has_it_since_when_and_how() {
        let shown = serde_json::to_value(all(&loaded())).unwrap();
        let destination = |state: &str, how: Option<&str>, at: Option<&str>| {
            let instance = how.map(|_| 4);
            serde_json::json!({"destination": if how.is_some() { "a" } else { "b" },
                "state": state, "how": how, "instance": instance, "at": at})
        };
        assert_eq!(shown[0]["number"], 1);
        assert_eq!(shown[0]["version"], "10:9");
        assert_eq!(shown[0]["time"], "1970-01-01T00:00:10.000000Z");
        assert_eq!(shown[0]["changes"][0]["step"], "add-table");
        let copied = destination("passed", Some("copied"), Some("1970-01-01T00:00:11.000000Z"));
        assert_eq!(shown[0]["destinations"], serde_json::json!([copied]));
        assert_eq!(shown[1]["changes"][0]["step"], "add-column");
        let approved = destination("applied", Some("approved"), Some("1970-01-01T00:00:21.000000Z"));
        assert_eq!(shown[1]["destinations"], serde_json::json!([approved]));
        assert_eq!(shown[2]["changes"][0]["what"], "b -> c");
        assert_eq!(shown[2]["destinations"][0]["state"], "applying");
        assert_eq!(shown[2]["destinations"][1], destination("applied", None, None));
        assert_eq!((&shown[3]["ended"], &shown[3]["changes"][0]["step"]), (&"dropped".into(), &"drop-table".into()));
        assert_eq!(shown[2]["shape"], loaded().history[2].shape());
    }

    #[test]
    fn a_person_sees_the_same() {
        let text = render(&all(&loaded()));
        for part in [
            "1: 10:9",
            "0/A",
            "1970-01-01T00:00:20.000000Z",
            "rename-column b -> c",
            "a copied 1970-01-01T00:00:11.000000Z by instance 4",
            "a* applied (approved by an operator)",
            "a* applying",
            "b* applied",
            "drop-table public.t",
            "unknown",
        ] {
            let words: Vec<&str> = part.split(' ').collect();
            assert!(words.iter().all(|word| text.contains(word)), "`{part}` is not in:\n{text}");
        }
    }

    #[test]
    fn what_is_left_of_a_long_history_keeps_its_numbers_and_claims_no_beginning() {
        let shown = all(&Loaded { removed: [(7, 5)].into(), ..loaded() });
        assert_eq!(shown[0].number, Some(6));
        assert!(shown[0].changes.is_empty());
    }

    #[test]
    fn a_place_is_an_lsn_or_a_time() {
        assert!(matches!(parse_at("16/B374D848"), Ok(At::Lsn(lsn)) if lsn == Lsn(0x16_B374_D848)));
        assert!(matches!(parse_at("1970-01-01T00:00:01Z"), Ok(At::Time(Moment(1_000_000)))));
        assert!(parse_at("yesterday").unwrap_err().contains("16/B374D848"));
    }
}
