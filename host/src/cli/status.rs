//! `tidegate status`.

use std::path::Path;
use std::process::ExitCode;

use comfy_table::Cell;

use super::{paint, print_json, print_text};
use crate::config::{Config, PipelineConfig};
use crate::control;
use crate::deliver::show_table;
use crate::error::Result;
use crate::status::{
    DestinationState, DestinationStatus, MemoryStatus, PendingChange, PluginVersion, SchemaState, StatusError,
    StatusReport, TableStatus,
};
use crate::store::{Loaded, TableState};

/// Of a digest, enough to tell two versions apart.
const DIGEST_CHARS: usize = 12;

#[derive(Debug, clap::Args)]
#[command(after_help = "Asks the running process, or reads the state if none runs.\n\n\
    Example:\n  tidegate status --json | jq '.destinations[] | {name, lag_seconds}'")]
pub(super) struct Args {
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub(super) async fn status(args: &Args, path: &Path) -> Result<ExitCode> {
    let pipeline = Config::load_pipeline(path)?;
    let report = report(&pipeline).await?;
    if args.json {
        print_json(&report)?;
    } else {
        print_text(&render(&report))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// What the running process says, or else the state.
pub(super) async fn report(pipeline: &PipelineConfig) -> Result<StatusReport> {
    Ok(match control::status(&pipeline.state).await? {
        Some(report) => report,
        None => at_rest(&pipeline.name, pipeline.read_store()?.load()?),
    })
}

/// What the state says of a pipeline that does not run: where it left off. Lags are
/// unknown, for nobody looks at the source.
fn at_rest(pipeline: &str, loaded: Loaded) -> StatusReport {
    let confirmed = loaded.destinations.iter().map(|record| record.checkpoint).min();
    let mut report = StatusReport { pipeline: pipeline.to_owned(), ..StatusReport::default() };
    report.slot.confirmed = confirmed;
    for record in loaded.destinations {
        let destination = report.destination_mut(&record.name);
        destination.plugin = record.plugin;
        destination.checkpoint = Some(record.checkpoint);
    }
    for (name, error) in loaded.destination_errors {
        let error = StatusError { code: error.code, message: error.message, next: error.next };
        report.destination_mut(&name).error = Some(error);
    }
    for record in &loaded.tables {
        let table = report.destination_mut(&record.destination).table_mut(&record.name);
        let barrier = loaded
            .barriers
            .iter()
            .find(|barrier| (barrier.oid, &barrier.destination) == (record.oid, &record.destination));
        show_table(table, record, barrier);
        table.quarantined =
            loaded.quarantined.get(&(record.destination.clone(), record.oid)).copied().unwrap_or_default();
    }
    report
}

fn render(report: &StatusReport) -> String {
    let mut text = format!("pipeline {}: ", report.pipeline);
    match report.pid {
        Some(pid) => text.push_str(&format!("runs as process {pid}")),
        None => text.push_str("does not run; this is what its state says"),
    }
    text.push_str(&format!(
        "\nslot: {}\n",
        place(report.slot.confirmed.map(|lsn| lsn.to_string()), report.slot.lag_bytes, report.slot.lag_seconds)
    ));
    if let Some(seconds) = report.copy_snapshot_seconds {
        let age = paint::duration(seconds);
        text.push_str(&format!("copy: its snapshot is {age} old; vacuum at the source waits for it\n"));
    }
    if let Some(MemoryStatus { used_bytes, limit_bytes }) = report.memory {
        text.push_str(&format!("memory: {} of {} used\n", paint::bytes(used_bytes), paint::bytes(limit_bytes)));
    }
    let mut destinations = paint::table(&["destination", "plugin", "state", "durable up to", "changes", "delay"]);
    for destination in &report.destinations {
        destinations.add_row(destination_row(destination));
    }
    text.push_str(&destinations.to_string());
    let mut tables = paint::table(&["destination", "table", "state", "copied", "quarantined", "schema"]);
    for destination in &report.destinations {
        for table in &destination.tables {
            tables.add_row(table_row(destination, table));
        }
    }
    if !tables.is_empty() {
        text.push('\n');
        text.push_str(&tables.to_string());
    }
    for destination in &report.destinations {
        for table in &destination.tables {
            if let Some(PendingChange { reason, changes }) = &table.pending {
                let (name, table) = (&destination.name, &table.table);
                text.push_str(&format!("\n{name} {table}: pending: {reason}: {}", changes.join(", ")));
            }
        }
    }
    for (what, error) in errors(report) {
        text.push_str(&format!("\n{what}: error[{}]: {}", error.code, error.message));
        if let Some(next) = &error.next {
            text.push_str(&format!("\n  next: {next}"));
        }
    }
    text
}

/// A position, and how far it is behind.
fn place(lsn: Option<String>, lag_bytes: Option<u64>, lag_seconds: Option<f64>) -> String {
    let mut text = lsn.unwrap_or_else(|| "-".to_owned());
    if let Some(bytes) = lag_bytes {
        text.push_str(&format!(", {} behind", paint::bytes(bytes)));
    }
    if let Some(seconds) = lag_seconds {
        text.push_str(&format!(", {seconds:.1} s"));
    }
    text
}

fn destination_row(destination: &DestinationStatus) -> Vec<Cell> {
    let state = destination.state.as_str();
    let checkpoint = destination.checkpoint.map(|lsn| lsn.to_string());
    let delay = match destination.delay_ms {
        Some(delay) => format!("{:.0} ms (p99 {:.0})", delay.median, delay.p99),
        None => "-".to_owned(),
    };
    vec![
        Cell::new(&destination.name),
        Cell::new(plugin(destination)),
        match destination.state {
            DestinationState::Running => paint::good(state),
            DestinationState::Errored => paint::bad(state),
            DestinationState::Stopped | DestinationState::Starting | DestinationState::Retrying => {
                paint::pending(state)
            }
        },
        Cell::new(place(checkpoint, destination.lag_bytes, destination.lag_seconds)),
        Cell::new(paint::number(destination.changes)),
        Cell::new(delay),
    ]
}

/// The plugin, and which version of it: as it says, and as its file is.
fn plugin(destination: &DestinationStatus) -> String {
    match &destination.plugin_version {
        Some(PluginVersion { version, sha256, .. }) => {
            let digest: String = sha256.chars().take(DIGEST_CHARS).collect();
            format!("{} {version} {digest}", destination.plugin)
        }
        None => destination.plugin.clone(),
    }
}

pub(super) fn table_row(destination: &DestinationStatus, table: &TableStatus) -> Vec<Cell> {
    let copied = match table.rows_total {
        Some(total) if table.state == TableState::DataSync => {
            let rows = format!("{} of about {}", paint::number(table.rows_copied), paint::number(total));
            let percent = table.percent.map(|percent| format!(", {percent:.0} %")).unwrap_or_default();
            let left = table.seconds_left.map(|left| format!(", {} left", paint::duration(left))).unwrap_or_default();
            format!("{rows}{percent}{left}")
        }
        _ => paint::number(table.rows_copied),
    };
    let schema = match table.snapshot {
        Some(snapshot) => format!("{} {snapshot}", table.schema.as_str()),
        None => "-".to_owned(),
    };
    vec![
        Cell::new(&destination.name),
        Cell::new(&table.table),
        match table.state {
            TableState::Ready => paint::good("ready"),
            TableState::Errored => paint::bad("errored"),
            other => paint::pending(other.as_str()),
        },
        Cell::new(copied),
        if table.quarantined == 0 { Cell::new("-") } else { paint::bad(paint::number(table.quarantined)) },
        if table.schema == SchemaState::Applied { Cell::new(schema) } else { paint::pending(schema) },
    ]
}

fn errors(report: &StatusReport) -> impl Iterator<Item = (String, &StatusError)> {
    let source = report.trigger.iter().chain(&report.publication).map(|error| ("source".to_owned(), error));
    source.chain(report.destinations.iter().flat_map(|destination| {
        let own = destination.error.iter().map(|error| (destination.name.clone(), error));
        let version = destination.plugin_version.as_ref().and_then(|version| version.differs.as_ref());
        let of_plugin = version.map(|error| (format!("{} plugin", destination.name), error));
        let of_tables = destination
            .tables
            .iter()
            .filter_map(|table| Some((format!("{} {}", destination.name, table.table), table.error.as_ref()?)));
        own.chain(of_plugin).chain(of_tables)
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::position::Lsn;
    use crate::schema::table::TableName;
    use crate::status::StatusBoard;

    #[test]
    fn a_person_sees_what_is_wrong_and_what_to_do() {
        let board = StatusBoard::new("shop");
        board.update_destination("warehouse", |destination| {
            destination.state = DestinationState::Running;
            destination.plugin = "postgres".to_owned();
            destination.plugin_version = Some(PluginVersion {
                version: "0.3.1".to_owned(),
                sha256: "0123456789abcdef".to_owned(),
                generation: 7,
                differs: Some(StatusError {
                    code: "plugin.file-gone".to_owned(),
                    message: "postgres.wasm is gone".to_owned(),
                    next: None,
                }),
            });
            destination.checkpoint = Some(Lsn(0x1234));
            destination.lag_bytes = Some(1_500_000);
        });
        board.update_table("warehouse", &TableName::new("public", "orders"), |table| {
            table.state = TableState::Errored;
            table.error = Some(StatusError {
                code: "destination.column".to_owned(),
                message: "no column b".to_owned(),
                next: Some("Add it.".to_owned()),
            });
        });
        let text = render(&board.report());
        for part in [
            "pipeline shop",
            "0/1234, 1.5 MB behind",
            "postgres 0.3.1 0123456789ab ",
            "warehouse plugin: error[plugin.file-gone]: postgres.wasm is gone",
            "public.orders",
            "errored",
            "error[destination.column]: no column b",
            "next: Add it.",
        ] {
            assert!(text.contains(part), "`{part}` is not in:\n{text}");
        }
        assert!(!text.contains('\x1b'), "colours without a terminal");
    }

    #[test]
    fn a_copy_shows_how_far_it_is_and_what_vacuum_waits_for() {
        let board = StatusBoard::new("shop");
        board.update(|report| report.copy_snapshot_seconds = Some(75.3));
        board.update_table("warehouse", &TableName::new("public", "orders"), |table| {
            table.state = TableState::DataSync;
            table.rows_copied = 12_345;
            table.rows_total = Some(50_000);
            table.show_copy(300, 1000, std::time::Duration::from_secs(90));
        });
        board.update_table("warehouse", &TableName::new("public", "other"), |table| {
            let changes = vec!["add-column note".to_owned(), "drop-column old".to_owned()];
            table.pending = Some(PendingChange { reason: "no row yet".to_owned(), changes });
        });
        let text = render(&board.report());
        assert!(
            text.contains("warehouse public.other: pending: no row yet: add-column note, drop-column old"),
            "{text}"
        );
        for part in ["12,345 of about 50,000, 30 %, 3 min 30 s left", "its snapshot is 1 min 15 s old"] {
            assert!(text.contains(part), "`{part}` is not in:\n{text}");
        }
    }

    #[test]
    fn a_pipeline_that_does_not_run_shows_where_it_left_off() {
        use crate::store::{DestinationRecord, TableError, TableRecord};
        let destination = |name: &str, checkpoint| DestinationRecord {
            name: name.to_owned(),
            plugin: "postgres".to_owned(),
            checkpoint: Lsn(checkpoint),
        };
        let error = TableError { code: "a.b".to_owned(), message: "no".to_owned(), next: None };
        let loaded = Loaded {
            destinations: vec![destination("a", 20), destination("b", 10)],
            tables: vec![TableRecord {
                destination: "b".to_owned(),
                name: TableName::new("public", "orders"),
                state: TableState::Errored,
                error: Some(error),
                ..TableRecord::default()
            }],
            ..Loaded::default()
        };
        let report = at_rest("shop", loaded);
        assert_eq!((report.pid, report.slot.confirmed), (None, Some(Lsn(10))));
        assert_eq!(report.destinations[0].state, DestinationState::Stopped);
        let table = &report.destinations[1].tables[0];
        assert_eq!(table.error.as_ref().unwrap().code, "a.b");
        assert!(!report.all_ready());
    }
}
