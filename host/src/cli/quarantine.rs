//! `tidegate quarantine`: rows that a destination refused.

use std::collections::HashMap;
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use comfy_table::Cell;
use serde::Serialize;

use super::{paint, print_json, print_text};
use crate::batch::{TextCell, TextRow};
use crate::config::{Config, PipelineConfig};
use crate::control::{self, Request};
use crate::error::{Error, Result};
use crate::position::{Position, SnapshotId};
use crate::schema::table::TableSchema;
use crate::store::{Mark, QuarantineSelection, QuarantinedRow, RowOp, Store};

/// How long `retry` and `drop` wait for a running pipeline to have seen to it.
const PATIENCE: Duration = Duration::from_secs(5);
const LOOK_EVERY: Duration = Duration::from_millis(100);

#[derive(Debug, clap::Subcommand)]
pub(super) enum Command {
    /// List the rows, with the reason that each was refused for
    List(List),
    /// Show one row: its cells, its place in the source's history, its reason
    Show(Show),
    /// Send rows again
    Retry(Act),
    /// Forget rows: what they were to become never arrives
    Drop(Act),
}

#[derive(Debug, clap::Args)]
#[command(after_help = "Reads the state, whether the pipeline runs or not.\n\n\
    Example:\n  tidegate quarantine list warehouse --table public.orders --json | jq '.[].code'")]
pub(super) struct List {
    /// Only rows of this destination
    #[arg(value_name = "DEST")]
    destination: Option<String>,
    /// Only rows of this table of the source, as schema.table
    #[arg(long, value_name = "TABLE")]
    table: Option<String>,
    /// List so many at most
    #[arg(long, value_name = "ROWS", default_value_t = 1000)]
    limit: u32,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, clap::Args)]
#[command(after_help = "Reads the state, whether the pipeline runs or not.\n\n\
    Example:\n  tidegate quarantine show 12")]
pub(super) struct Show {
    /// The row's id, as `list` shows it
    #[arg(value_name = "ID")]
    id: u64,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, clap::Args)]
#[command(after_help = "A running pipeline sees to it at once, a stopped one at its next start.\n\n\
    Example:\n  tidegate quarantine retry 12 15\n  tidegate quarantine drop --destination warehouse --table public.orders")]
#[command(group = clap::ArgGroup::new("which").required(true).multiple(true).args(["ids", "destination", "all"]))]
pub(super) struct Act {
    /// Ids of rows, as `list` shows them
    #[arg(value_name = "ID")]
    ids: Vec<u64>,
    /// All rows of a destination
    #[arg(long, value_name = "DEST")]
    destination: Option<String>,
    /// All rows of a table of that destination, as schema.table
    #[arg(long, value_name = "TABLE", requires = "destination")]
    table: Option<String>,
    /// All rows
    #[arg(long, conflicts_with_all = ["ids", "destination"])]
    all: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub(super) async fn quarantine(command: Command, path: &Path) -> Result<ExitCode> {
    let pipeline = Config::load_pipeline(path)?;
    match command {
        Command::List(args) => list(&args, &pipeline),
        Command::Show(args) => show(&args, &pipeline),
        Command::Retry(args) => act(&args, &pipeline, Mark::Retry).await,
        Command::Drop(args) => act(&args, &pipeline, Mark::Drop).await,
    }
}

/// A row, as `--json` prints it.
#[derive(Serialize)]
struct Shown {
    id: u64,
    destination: String,
    table: String,
    /// By the names of the columns; none in a log without a key.
    key: serde_json::Map<String, serde_json::Value>,
    op: RowOp,
    code: String,
    message: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    column: Option<String>,
    position: Position,
    snapshot: SnapshotId,
    /// How many changes are folded into it.
    changes: u32,
    /// Microseconds since 1970-01-01 UTC.
    quarantined_at: i64,
    /// What is to be done with it.
    #[serde(skip_serializing_if = "Option::is_none")]
    mark: Option<Mark>,
    /// Cells that the source did not send are left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    row: Option<serde_json::Map<String, serde_json::Value>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    old: Option<serde_json::Map<String, serde_json::Value>>,
}

/// The names of the columns of every version that is known.
struct Names(HashMap<(u32, SnapshotId), TableSchema>);

impl Names {
    fn read(store: &Store) -> Result<Names> {
        Ok(Names(store.load()?.history.into_iter().map(|schema| ((schema.oid, schema.snapshot), schema)).collect()))
    }

    fn shown(&self, row: QuarantinedRow, cells: bool) -> Shown {
        let schema = self.0.get(&(row.oid, row.snapshot));
        let key = schema.map(TableSchema::merge_key).unwrap_or_default();
        let column = row.reason.column.map(|ordinal| name(schema, ordinal));
        Shown {
            id: row.id,
            destination: row.destination,
            table: row.table.to_string(),
            key: named(schema, &row.row.only(&key)),
            op: row.op,
            code: row.reason.code,
            message: row.reason.message,
            column,
            position: row.position,
            snapshot: row.snapshot,
            changes: row.changes,
            quarantined_at: row.quarantined_at,
            mark: row.mark,
            row: cells.then(|| named(schema, &row.row)),
            old: row.old.filter(|_| cells).map(|old| named(schema, &old)),
        }
    }
}

fn name(schema: Option<&TableSchema>, ordinal: u16) -> String {
    let column = schema.and_then(|schema| schema.column(ordinal));
    column.map_or_else(|| format!("#{ordinal}"), |(_, column)| column.name.clone())
}

fn named(schema: Option<&TableSchema>, row: &TextRow) -> serde_json::Map<String, serde_json::Value> {
    row.cells().map(|(ordinal, cell)| (name(schema, ordinal), value(cell))).collect()
}

fn value(cell: &TextCell) -> serde_json::Value {
    match cell {
        TextCell::Null => serde_json::Value::Null,
        TextCell::Text(text) => text.clone().into(),
        TextCell::Hex { hex } => serde_json::json!({ "hex": hex }),
    }
}

fn list(args: &List, pipeline: &PipelineConfig) -> Result<ExitCode> {
    let store = pipeline.read_store()?;
    let selection =
        QuarantineSelection { destination: args.destination.clone(), table: args.table.clone(), ids: Vec::new() };
    let names = Names::read(&store)?;
    let rows = store.list_quarantined(selection, args.limit)?;
    let rows: Vec<Shown> = rows.into_iter().map(|row| names.shown(row, false)).collect();
    if args.json {
        print_json(&rows)?;
    } else if rows.is_empty() {
        print_text("no rows are in quarantine")?;
    } else {
        print_text(&render_list(&rows))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn render_list(rows: &[Shown]) -> String {
    let mut table = paint::table(&["id", "destination", "table", "key", "op", "changes", "reason"]);
    for row in rows {
        let mark = row.mark.map_or(String::new(), |mark| format!(" ({} is due)", mark.as_str()));
        table.add_row(vec![
            Cell::new(row.id),
            Cell::new(&row.destination),
            Cell::new(&row.table),
            Cell::new(pairs(&row.key, " ")),
            Cell::new(row.op.as_str()),
            Cell::new(row.changes),
            Cell::new(format!("{}: {}{mark}", row.code, row.message)),
        ]);
    }
    table.to_string()
}

/// `name=value`, as a person reads it.
fn pairs(cells: &serde_json::Map<String, serde_json::Value>, between: &str) -> String {
    let pair = |(name, value): (&String, &serde_json::Value)| match value {
        serde_json::Value::String(text) => format!("{name}={}", text.escape_debug()),
        serde_json::Value::Null => format!("{name} is NULL"),
        other => format!("{name}={other}"),
    };
    cells.iter().map(pair).collect::<Vec<_>>().join(between)
}

fn show(args: &Show, pipeline: &PipelineConfig) -> Result<ExitCode> {
    let store = pipeline.read_store()?;
    let found = store.list_quarantined(QuarantineSelection { ids: vec![args.id], ..Default::default() }, 1)?;
    let Some(row) = found.into_iter().next() else { return Err(unknown()) };
    let shown = Names::read(&store)?.shown(row, true);
    if args.json {
        print_json(&shown)?;
    } else {
        print_text(&render(&shown))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn render(row: &Shown) -> String {
    let mut text = format!(
        "row {} of {} at {}: {}\nrefused: [{}] {}\n",
        row.id,
        row.table,
        row.destination,
        row.op.as_str(),
        row.code,
        row.message
    );
    if let Some(column) = &row.column {
        text.push_str(&format!("column: {column}\n"));
    }
    text.push_str(&format!(
        "last change: transaction committed at {}, {} in all\nschema: {}\n",
        row.position.commit, row.changes, row.snapshot
    ));
    if let Some(mark) = row.mark {
        text.push_str(&format!("due: {}\n", mark.as_str()));
    }
    for (title, cells) in [("row", &row.row), ("old row", &row.old)] {
        if let Some(cells) = cells.as_ref().filter(|cells| !cells.is_empty()) {
            text.push_str(&format!("{title}:\n  {}\n", pairs(cells, "\n  ")));
        }
    }
    text.trim_end().to_owned()
}

/// What `retry` and `drop` came to.
#[derive(Serialize)]
struct Acted {
    marked: u64,
    /// Rows that are still there: refused again, or not seen to yet.
    left: Vec<Shown>,
    /// Whether a running pipeline has seen to all of them.
    done: bool,
}

async fn act(args: &Act, pipeline: &PipelineConfig, mark: Mark) -> Result<ExitCode> {
    let selection =
        QuarantineSelection { destination: args.destination.clone(), table: args.table.clone(), ids: args.ids.clone() };
    let rows = selection.clone();
    let request = match mark {
        Mark::Retry => Request::QuarantineRetry { rows },
        Mark::Drop => Request::QuarantineDrop { rows },
    };
    let acted = match control::ask(&pipeline.state, &request).await? {
        Some(marked) => Acted { marked: marked.as_u64().unwrap_or_default(), ..wait(pipeline, &selection).await? },
        None => Acted { marked: at_rest(pipeline, selection, mark).await?, left: Vec::new(), done: false },
    };
    if acted.marked == 0 {
        return Err(unknown());
    }
    if args.json {
        print_json(&acted)?;
        return Ok(ExitCode::SUCCESS);
    }
    print_text(&report(&acted, mark))?;
    Ok(ExitCode::SUCCESS)
}

fn report(acted: &Acted, mark: Mark) -> String {
    let (rows, left) = (paint::number(acted.marked), acted.left.len());
    match (mark, acted.done) {
        (Mark::Drop, _) if acted.left.is_empty() => format!("{rows} rows are dropped"),
        (Mark::Retry, true) if left == 0 => format!("{rows} rows were sent again and taken"),
        (_, true) => format!("{rows} rows were sent again, {left} are still refused\n{}", render_list(&acted.left)),
        (_, false) if left == 0 => format!("{rows} rows are sent again at the next start of `tidegate run`"),
        (_, false) => format!("{rows} rows are marked; the pipeline has not seen to {left} of them yet"),
    }
}

/// Nobody runs the pipeline: what can be done without it is done now.
async fn at_rest(pipeline: &PipelineConfig, selection: QuarantineSelection, mark: Mark) -> Result<u64> {
    // Of no use for making a state.
    drop(pipeline.read_store()?);
    let store = pipeline.open_store()?;
    let marked = store.mark_quarantined(selection, mark).await?;
    if mark == Mark::Drop {
        for destination in store.load()?.destinations {
            store.drop_marked(&destination.name).await?;
        }
    }
    Ok(marked)
}

/// Waits a little until the running pipeline has seen to rows.
async fn wait(pipeline: &PipelineConfig, selection: &QuarantineSelection) -> Result<Acted> {
    let store = pipeline.read_store()?;
    let begun = Instant::now();
    loop {
        let rows = store.list_quarantined(selection.clone(), u32::MAX)?;
        let done = rows.iter().all(|row| row.mark.is_none());
        if done || begun.elapsed() > PATIENCE {
            let names = Names::read(&store)?;
            let left = rows.into_iter().map(|row| names.shown(row, false)).collect();
            return Ok(Acted { marked: 0, left, done });
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

fn unknown() -> Error {
    Error::usage("quarantine.unknown-row", "no such row is in quarantine")
        .next("Run `tidegate quarantine list` to see those that are.")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schema::samples;
    use crate::schema::table::TableName;
    use crate::store::RefusedWhy;

    fn row(cells: &str) -> QuarantinedRow {
        QuarantinedRow {
            id: 12,
            destination: "warehouse".to_owned(),
            oid: 7,
            table: TableName::new("public", "t"),
            ident: "[\"5\"]".to_owned(),
            op: RowOp::Upsert,
            snapshot: SnapshotId::default(),
            position: Position::default(),
            committed_at: 0,
            xid: 0,
            row: serde_json::from_str(cells).unwrap(),
            old: None,
            needs: None,
            reason: RefusedWhy { code: "postgres.23514".to_owned(), message: "no".to_owned(), column: Some(2) },
            changes: 3,
            quarantined_at: 0,
            mark: Some(Mark::Retry),
        }
    }

    #[test]
    fn a_person_sees_the_cells_by_name_and_the_reason() {
        let mut id = samples::column(1, "id", "int4");
        id.key_position = Some(1);
        let schema = samples::table(vec![id, samples::column(2, "note", "text")]);
        let names = Names([((7, SnapshotId::default()), schema)].into());
        let shown = names.shown(row(r#"{"1":"5","2":null,"9":"of a column that is gone"}"#), true);
        let text = render(&shown);
        for part in
            ["row 12 of public.t at warehouse", "[postgres.23514] no", "column: note", "id=5", "note is NULL", "#9="]
        {
            assert!(text.contains(part), "`{part}` is not in:\n{text}");
        }
        let list = render_list(&[names.shown(row(r#"{"1":"5"}"#), false)]);
        for part in ["12", "id=5", "retry is due"] {
            assert!(list.contains(part), "`{part}` is not in:\n{list}");
        }
    }

    #[test]
    fn a_row_of_a_version_that_is_not_known_is_shown_by_ordinals() {
        let shown = Names(HashMap::new()).shown(row(r#"{"1":"5"}"#), true);
        assert_eq!(serde_json::to_value(&shown).unwrap()["row"], serde_json::json!({"#1": "5"}));
    }
}
