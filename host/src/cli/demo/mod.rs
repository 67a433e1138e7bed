//! `tidegate demo`: a scratch shop, two destinations, and proof that the ends are equal.

mod child;
mod compare;
mod fold;
mod report;
mod shop;
mod workload;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use tokio_postgres::Client;

use self::child::Pipeline;
use self::compare::Side;
use self::report::{DestinationResult, Report, TableResult};
use self::shop::{DATABASE, HEARTBEAT, READER, Sizes, TABLES, connect, run};
use super::log::LogOptions;
use super::progress::Steps;
use super::{paint, print_json, print_text};
use crate::error::{Error, Exit, Result};
use crate::plugin::Directory;
use crate::position::Lsn;
use crate::schema::table::TableName;
use crate::scratch::{Cluster, ClusterOptions};
use crate::source::config::SourceConfig;
use crate::source::{session, trigger};
use crate::status::StatusReport;

/// The destinations: a name, which is also its plugin's job.
const MIRROR: &str = "mirror";
const FILES: &str = "files";
/// The database beside the mirror that the folded log is loaded into.
const FOLDED: &str = "folded";
/// Fewer rows leave tables empty.
const FEWEST_ROWS: u64 = 1_000;

#[derive(Debug, clap::Args)]
#[command(
    after_help = "Needs PostgreSQL's server binaries and the plugins postgres and files (tidegate plugin build).\n\n\
    Example:\n  tidegate demo --rows 1000000 --keep"
)]
pub(super) struct Args {
    /// Rows in the shop before anything is replicated
    #[arg(long, value_name = "N", default_value_t = 200_000, value_parser = clap::value_parser!(u64).range(FEWEST_ROWS..))]
    rows: u64,
    /// How long the shop is in business, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=3600))]
    seconds: u64,
    /// Leave everything running until Ctrl-C, and print where to look
    #[arg(long)]
    keep: bool,
    /// The plugins directory
    #[arg(long, value_name = "DIR", default_value = "plugins")]
    plugins: PathBuf,
    /// Where configuration, state and files go, to stay there; by default a temporary directory
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

pub(super) async fn demo(args: Args, log: &LogOptions) -> Result<ExitCode> {
    // Dropping the rest stops what it started, the pipeline before its databases.
    tokio::select! {
        outcome = show(&args, log.log.as_str()) => outcome,
        name = stop_signal() => {
            let name = name?;
            Err(Error::permanent("demo.interrupted", format!("{name}: everything that was started is stopped")))
        }
    }
}

async fn stop_signal() -> Result<&'static str> {
    use tokio::signal::unix::{SignalKind, signal};
    let listen = |kind| {
        signal(kind).map_err(|error| Error::permanent("demo.signals", format!("cannot listen for signals: {error}")))
    };
    let (mut interrupt, mut terminate) = (listen(SignalKind::interrupt())?, listen(SignalKind::terminate())?);
    Ok(tokio::select! {
        _ = interrupt.recv() => "SIGINT",
        _ = terminate.recv() => "SIGTERM",
    })
}

async fn show(args: &Args, log_format: &str) -> Result<ExitCode> {
    let plugins = find_plugins(&args.plugins)?;
    let sizes = Sizes::of(args.rows);
    let mut steps = Steps::new();
    steps.begin("start two scratch PostgreSQL clusters");
    let (source, mirror) = tokio::join!(start_cluster(), start_cluster());
    let stage = Stage { source: source?, mirror: mirror?, directory: Directories::make(args.dir.as_deref())? };
    steps.begin(format!("fill a shop with {} rows", paint::number(args.rows)));
    stage.fill(sizes).await?;
    steps.begin("start tidegate: one slot, two destinations");
    let config = stage.write_config(&plugins)?;
    let started = Instant::now();
    let mut pipeline = Pipeline::start(&config, &stage.directory.state(), log_format)?;
    pipeline.until("for it to listen", |_| true).await?;
    steps.begin("copy the tables");
    let copied = copy(&mut pipeline, &mut steps, started).await?;
    let work = stage.work(args, sizes, &mut pipeline, &mut steps).await?;
    steps.begin("compare source and destinations by query");
    let tables = stage.compare().await?;
    let equal = tables.iter().all(TableResult::equal);
    steps.done(if equal { "equal" } else { "they differ" });

    let destinations = [MIRROR, FILES].map(|name| DestinationResult {
        name: name.to_owned(),
        copy_seconds: copied.get(name).copied().unwrap_or_default().as_secs_f64(),
        delay_ms: work.delays.get(name).copied(),
        changes_per_second: rate(work.burst.changes, work.caught_up.get(name).copied()),
    });
    let report = Report {
        equal,
        tables,
        destinations: destinations.to_vec(),
        rows_copied: args.rows,
        changes: work.mixed.changes + work.burst.changes,
        schema_changes: work.mixed.schema_changes,
    };
    if args.json {
        print_json(&report)?;
    } else {
        print_text(&report.render())?;
    }
    if args.keep {
        eprintln!("{}", stage.where_to_look(&config, &pipeline));
        stop_signal().await?;
    }
    pipeline.stop()?;
    Ok(if report.equal { ExitCode::SUCCESS } else { ExitCode::from(Exit::No as u8) })
}

fn find_plugins(directory: &Path) -> Result<PathBuf> {
    for name in ["postgres", "files"] {
        Directory::find(directory, name).map_err(|error| {
            error.next(format!(
                "Run `make plugins`, or `tidegate plugin build plugins/postgres plugins/files --out {}`.",
                directory.display()
            ))
        })?;
    }
    std::path::absolute(directory)
        .map_err(|error| Error::usage("demo.directory", format!("{}: {error}", directory.display())))
}

async fn start_cluster() -> Result<Cluster> {
    tokio::task::spawn_blocking(|| Cluster::start(&ClusterOptions::default()))
        .await
        .map_err(|error| Error::permanent("scratch.start", format!("cannot start a scratch cluster: {error}")))?
}

/// Waits until all tables are live, and returns when each destination's were.
async fn copy(pipeline: &mut Pipeline, steps: &mut Steps, started: Instant) -> Result<BTreeMap<String, Duration>> {
    let tables = TABLES.len() + 1;
    let mut ready: BTreeMap<String, Duration> = BTreeMap::new();
    pipeline
        .until("for the copy to end", |report| {
            for destination in &report.destinations {
                if destination.tables.len() >= tables && report_ready(report, &destination.name) {
                    ready.entry(destination.name.clone()).or_insert_with(|| started.elapsed());
                }
            }
            let copied: u64 = report.destinations.iter().flat_map(|d| &d.tables).map(|table| table.rows_copied).sum();
            steps.note(&format!("{} rows", paint::number(copied)));
            ready.len() == 2
        })
        .await?;
    Ok(ready)
}

fn report_ready(report: &StatusReport, destination: &str) -> bool {
    report
        .destinations
        .iter()
        .filter(|known| known.name == destination)
        .all(|destination| destination.tables.iter().all(|table| table.state == crate::store::TableState::Ready))
}

fn rate(changes: u64, time: Option<Duration>) -> Option<f64> {
    time.map(|time| changes as f64 / time.as_secs_f64().max(0.001))
}

/// What the workload came to.
struct Work {
    mixed: workload::Done,
    burst: workload::Done,
    /// From commit to durable, while the shop was in business.
    delays: BTreeMap<String, crate::status::DelaySummary>,
    /// From the beginning of the burst until all of it was durable.
    caught_up: BTreeMap<String, Duration>,
}

/// The clusters and directories of a demo. Dropped, they are gone.
struct Stage {
    source: Cluster,
    mirror: Cluster,
    directory: Directories,
}

impl Stage {
    async fn fill(&self, sizes: Sizes) -> Result<()> {
        let postgres = connect(&self.source.url("postgres")).await?;
        run(&postgres, "create the database", &format!("CREATE DATABASE {DATABASE}")).await?;
        let shop = connect(&self.source.url(DATABASE)).await?;
        shop::fill(&shop, sizes).await?;
        shop::publish(&shop).await?;
        let admin = SourceConfig::parse(&self.source.url(DATABASE), DATABASE, DATABASE)?;
        trigger::install(&session::connect(&admin).await?, READER).await?;
        let postgres = connect(&self.mirror.url("postgres")).await?;
        for database in [MIRROR, FOLDED] {
            run(&postgres, "create the database", &format!("CREATE DATABASE {database}")).await?;
        }
        Ok(())
    }

    fn write_config(&self, plugins: &Path) -> Result<PathBuf> {
        let text = format!(
            r#"# Written by `tidegate demo`.
[pipeline]
name    = "{DATABASE}"
state   = "state"
plugins = {plugins:?}

[source]
url         = "{source}"
publication = "{DATABASE}"

[[destination]]
name   = "{MIRROR}"
plugin = "postgres"
mode   = "merge"
[destination.settings]
host     = "127.0.0.1"
port     = {port}
database = "{MIRROR}"
user     = "postgres"
sslmode  = "disable"
[destination.grant]
network = ["127.0.0.1:{port}"]

[[destination]]
name   = "{FILES}"
plugin = "files"
mode   = "changes"
[destination.settings]
path   = "{FILES}"
format = "ndjson"
[destination.grant]
files = [{{ path = "{FILES}", mode = "read-write" }}]
"#,
            source = self.source.url_as(READER, None, DATABASE),
            port = self.mirror.port(),
        );
        let path = self.directory.root.join("tidegate.toml");
        child::make(&self.directory.files())?;
        std::fs::write(&path, text).map_err(|error| {
            Error::permanent("demo.directory", format!("cannot write {}: {error}", path.display()))
                .next("Name another directory with --dir.")
        })?;
        Ok(path)
    }

    /// The shop is in business, then more is changed than could be kept up with.
    async fn work(&self, args: &Args, sizes: Sizes, pipeline: &mut Pipeline, steps: &mut Steps) -> Result<Work> {
        let url = self.source.url(DATABASE);
        let shop = connect(&url).await?;
        let time = Duration::from_secs(args.seconds);
        steps.begin("inserts, updates, deletes, key changes, a TRUNCATE and ALTER TABLE in between");
        let mixed = workload::mixed(&url, sizes, time).await?;
        let (report, _) = self.caught_up(&shop, pipeline, Instant::now()).await?;
        let delays =
            report.destinations.iter().filter_map(|known| Some((known.name.clone(), known.delay_ms?))).collect();
        steps.begin("a burst of changes");
        let began = Instant::now();
        let burst = workload::burst(&shop, sizes).await?;
        steps.note("waiting until all of it is durable");
        let (_, caught_up) = self.caught_up(&shop, pipeline, began).await?;
        Ok(Work { mixed, burst, delays, caught_up })
    }

    /// Waits until everything committed so far is durable at both destinations, and
    /// returns when each had it.
    async fn caught_up(
        &self,
        shop: &Client,
        pipeline: &mut Pipeline,
        since: Instant,
    ) -> Result<(StatusReport, BTreeMap<String, Duration>)> {
        let row = shop.query_one("SELECT pg_current_wal_lsn()::text", &[]).await;
        let row = row.map_err(|error| shop::sql_error("ask for the log's end", &error))?;
        let end: Lsn = row
            .get::<_, &str>(0)
            .parse()
            .map_err(|error| Error::permanent("demo.sql", format!("pg_current_wal_lsn() is odd: {error}")))?;
        // A change behind it, so that checkpoints pass it at once and not when idle.
        run(shop, "beat", &format!("UPDATE {HEARTBEAT} SET at = clock_timestamp()")).await?;
        let mut reached: BTreeMap<String, Duration> = BTreeMap::new();
        let report = pipeline
            .until("until all is durable", |report| {
                for destination in &report.destinations {
                    if destination.checkpoint.is_some_and(|checkpoint| checkpoint >= end) {
                        reached.entry(destination.name.clone()).or_insert_with(|| since.elapsed());
                    }
                }
                reached.len() == 2
            })
            .await?;
        Ok((report, reached))
    }

    async fn compare(&self) -> Result<Vec<TableResult>> {
        let shop = connect(&self.source.url(DATABASE)).await?;
        let mirror = connect(&self.mirror.url(MIRROR)).await?;
        let folded = connect(&self.mirror.url(FOLDED)).await?;
        let mut columns = BTreeMap::new();
        for name in TABLES {
            let side = Side { client: &shop, table: public(name) };
            columns.insert(public(name), side.columns().await?);
        }
        fold::load(&self.directory.files(), &folded, &columns).await?;
        let mut results = Vec::new();
        for (table, columns) in &columns {
            let side = |client| Side { client, table: table.clone() };
            let source = side(&shop);
            let fingerprint = source.fingerprint(columns).await?;
            results.push(TableResult {
                table: table.name.clone(),
                source: fingerprint.rows,
                mirror: compare::compare(&source, columns, &fingerprint, &side(&mirror)).await?,
                files: compare::compare(&source, columns, &fingerprint, &side(&folded)).await?,
            });
        }
        Ok(results)
    }

    fn where_to_look(&self, config: &Path, pipeline: &Pipeline) -> String {
        let tidegate = std::env::current_exe().map_or_else(|_| "tidegate".into(), |path| path.display().to_string());
        format!(
            "\nStill running, as process {pid}, until Ctrl-C. In another terminal:\n  \
             {tidegate} --config {config} status\n  \
             {tidegate} --config {config} check\n  \
             psql '{source}'     # the shop: change something …\n  \
             psql '{mirror}'   # … and see it here\n  \
             ls {files}   # and here, as files\n  \
             tail -f {log}",
            pid = pipeline.pid(),
            config = config.display(),
            source = self.source.url(DATABASE),
            mirror = self.mirror.url(MIRROR),
            files = self.directory.files().display(),
            log = pipeline.log().display(),
        )
    }
}

fn public(name: &str) -> TableName {
    TableName::new("public", name)
}

/// Where configuration, state and files are.
struct Directories {
    root: PathBuf,
    /// Removed with everything in it when the demo ends.
    _temporary: Option<tempfile::TempDir>,
}

impl Directories {
    fn make(named: Option<&Path>) -> Result<Directories> {
        let failed = |error: std::io::Error| {
            Error::permanent("demo.directory", format!("cannot make a directory: {error}"))
                .next("Name one with --dir, or point TMPDIR at one that this user may write.")
        };
        match named {
            None => {
                let temporary = tempfile::Builder::new().prefix("tidegate-demo-").tempdir().map_err(failed)?;
                Ok(Directories { root: temporary.path().to_owned(), _temporary: Some(temporary) })
            }
            Some(named) => {
                let root = std::path::absolute(named).map_err(failed)?;
                child::make(&root)?;
                if root.join("state").exists() {
                    return Err(Error::usage("demo.directory", format!("{} holds a state already", root.display()))
                        .next("Name an empty directory: the demo's source is new each time."));
                }
                Ok(Directories { root, _temporary: None })
            }
        }
    }

    fn state(&self) -> PathBuf {
        self.root.join("state")
    }

    fn files(&self) -> PathBuf {
        self.root.join(FILES)
    }
}
