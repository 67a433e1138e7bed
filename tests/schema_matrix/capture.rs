//! Capture: what a command at the source makes of a table at the destination.
//!
//! Cases of a group share a source, a mirror and a pipeline: what each of them does is done
//! while that runs, and then each is looked at until it has come to what is expected of it. An
//! outcome is made of what is seen: whether the ends are equal, whether the table was copied
//! again, by which kind of evidence its newest version was learnt, what error it stopped with.

mod cases;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tidegate::config::Config;
use tidegate::position::Lsn;
use tidegate::schema::classify::gravest;
use tidegate::schema::plan::plan;
use tidegate::schema::table::{Origin, TableSchema};
use tidegate::status::{SchemaState, StatusReport, TableStatus};
use tidegate::store::{Loaded, TableState};
use tidegate_tests::majors::{Servers, servers};
use tidegate_tests::{Database, Pipeline, database, postgres_destination};

use crate::report::{Outcome, Report};
use crate::{Error, Result};
use cases::groups;

/// How long a case may take to come to what is expected of it.
const PATIENCE: Duration = Duration::from_secs(40);
/// Groups of a version that run side by side: they wait most of the time.
const SIDE_BY_SIDE: usize = 4;

/// Cases that share a pipeline.
pub struct Group {
    pub name: &'static str,
    pub cases: Vec<Case>,
    /// After the cases' own setup.
    pub publication: &'static str,
    /// With the DDL trigger.
    pub trigger: bool,
    /// `tables` of the destination.
    pub tables: &'static str,
    /// PostgreSQL that it needs.
    pub since: u32,
}

/// One case. In its texts `{t}` stands for the table that is its own.
pub struct Case {
    pub name: &'static str,
    /// PostgreSQL that it needs.
    pub since: u32,
    pub setup: &'static str,
    /// Statements, one by one, in one session; those that begin with `2: ` in another.
    pub ddl: Vec<&'static str>,
    /// What is compared, as it is called in the end.
    pub table: &'static str,
    /// Its published columns, where they are not all but generated ones.
    pub columns: Option<&'static str>,
    /// Its published rows, where they are not all.
    pub filter: &'static str,
    /// Outcomes, with ` or ` between them: what a plugin lacks may stand before what an
    /// operator has to say.
    pub expect: &'static str,
}

/// All cases on all versions.
pub fn run(report: &Report) -> Result<()> {
    for major in report.options().majors.clone() {
        let Some(servers) = servers(major) else {
            report.case(
                "capture",
                &major.to_string(),
                "-",
                Outcome::Skipped("there is no such server here".to_owned()),
            );
            continue;
        };
        servers.source.psql("postgres", "CREATE ROLE matrix_owner").map_err(|error| error.report())?;
        let mut waiting: Vec<Group> = groups();
        for group in &mut waiting {
            group.cases.retain(|case| report.options().wants(case.name));
        }
        waiting.retain(|group| !group.cases.is_empty());
        let waiting = std::sync::Mutex::new(waiting);
        std::thread::scope(|scope| {
            for _ in 0..SIDE_BY_SIDE {
                scope.spawn(|| {
                    while let Some(group) = next(&waiting) {
                        run_group(group, servers, report);
                    }
                });
            }
        });
    }
    Ok(())
}

fn next(waiting: &std::sync::Mutex<Vec<Group>>) -> Option<Group> {
    waiting.lock().unwrap_or_else(std::sync::PoisonError::into_inner).pop()
}

fn run_group(mut group: Group, servers: &'static Servers, report: &Report) {
    let version = servers.major.to_string();
    let (cases, lacking): (Vec<Case>, Vec<Case>) =
        group.cases.into_iter().partition(|case| servers.major >= case.since.max(group.since));
    for case in lacking {
        let since = case.since.max(group.since);
        report.case(case.name, &version, "-", Outcome::Skipped(format!("PostgreSQL {since} and later")));
    }
    group.cases = cases;
    if group.cases.is_empty() {
        return;
    }
    let names: Vec<&str> = group.cases.iter().map(|case| case.name).collect();
    // Waiting for a pipeline panics, with its log.
    let ran = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| Bench::run(&group, servers)));
    let outcomes = match ran {
        Ok(Ok(outcomes)) => outcomes,
        Ok(Err(error)) => names.iter().map(|_| ("-".to_owned(), Outcome::Unexpected(error.to_string()))).collect(),
        Err(_) => names
            .iter()
            .map(|_| ("-".to_owned(), Outcome::Unexpected("the pipeline failed, see above".to_owned())))
            .collect(),
    };
    for (name, (class, outcome)) in names.iter().zip(outcomes) {
        report.case(name, &version, &class, outcome);
    }
}

/// A group at work.
struct Bench<'a> {
    group: &'a Group,
    source: Database,
    mirror: Database,
    pipeline: Pipeline,
    /// By table, the floor of the copy that it had before anything was done to it.
    floors: BTreeMap<u32, Option<Lsn>>,
}

impl Bench<'_> {
    fn run(group: &Group, servers: &'static Servers) -> Result<Vec<(String, Outcome)>> {
        let source = database(&servers.source, &format!("matrix_{}", group.name));
        let mirror = database(&servers.mirror, &format!("matrix_{}", group.name));
        script(&source, &["GRANT CREATE ON SCHEMA public TO matrix_owner".to_owned()])?;
        for case in &group.cases {
            script(&source, &[case.text(case.setup)])?;
        }
        script(&source, &[group.publication.to_owned()])?;
        let destination = postgres_destination("mirror", &mirror)
            .replace("tables = [\"*.*\"]", &format!("tables = [{}]", group.tables));
        let mut pipeline = Pipeline::new(&source, &destination);
        if group.trigger {
            pipeline.install_trigger();
        }
        pipeline.start();
        pipeline.wait_ready();
        let mut bench = Bench { group, source, mirror, pipeline, floors: BTreeMap::new() };
        bench.floors = bench.state()?.tables.into_iter().map(|record| (record.oid, record.floor)).collect();
        bench.all()
    }

    fn all(&mut self) -> Result<Vec<(String, Outcome)>> {
        let mut failed: Vec<Option<String>> = Vec::new();
        for case in &self.group.cases {
            let statements: Vec<String> = case.ddl.iter().map(|statement| case.text(statement)).collect();
            failed.push(script(&self.source, &statements).err().map(|error| error.to_string()));
        }
        self.pipeline.wait_caught_up(&self.source);
        let start = Instant::now();
        let mut seen: Vec<String> = vec![String::new(); self.group.cases.len()];
        let mut resynced: Vec<Option<String>> = vec![None; self.group.cases.len()];
        loop {
            let status = self.pipeline.status().ok_or("there is no status")?;
            for (index, case) in self.group.cases.iter().enumerate() {
                seen[index] = self.look(case, &status, &mut resynced[index]);
            }
            let all = self
                .group
                .cases
                .iter()
                .zip(&seen)
                .all(|(case, seen)| case.expected().any(|expect| is_it(expect, seen)));
            if all || start.elapsed() > PATIENCE {
                break;
            }
            std::thread::sleep(Duration::from_millis(100));
            // So that nothing here depends on keepalives.
            self.source.sql("SELECT pg_logical_emit_message(true, 'tidegate-test', 'mark')");
        }
        // What was equal for a moment only is not when all is at rest.
        self.pipeline.wait_caught_up(&self.source);
        let status = self.pipeline.status().ok_or("there is no status")?;
        for (index, case) in self.group.cases.iter().enumerate() {
            seen[index] = self.look(case, &status, &mut resynced[index]);
        }
        self.pipeline.stop();
        let state = self.state()?;
        let outcomes = self.group.cases.iter().zip(seen).zip(failed).map(|((case, seen), failed)| {
            let versions = self.versions(case, &state);
            let outcome = match failed {
                Some(error) => Outcome::Unexpected(format!("the command failed: {error}")),
                None => self.outcome(case, &seen, &versions, &state),
            };
            (class(&versions), outcome)
        });
        let outcomes: Vec<(String, Outcome)> = outcomes.collect();
        if std::env::var_os("VERBOSE").is_some()
            && outcomes.iter().any(|(_, outcome)| matches!(outcome, Outcome::Unexpected(_)))
        {
            eprintln!("{}", self.pipeline.log());
        }
        Ok(outcomes)
    }

    /// What is seen of a case: `equal`, `CODE, then equal`, `CODE`, `pending: …`, or how the
    /// ends differ.
    fn look(&self, case: &Case, status: &StatusReport, resynced: &mut Option<String>) -> String {
        let table = case.text(case.table);
        let (schema, name) = table.split_once('.').unwrap_or(("public", &table));
        let full = format!("{schema}.{name}");
        let tables = || status.destinations.iter().flat_map(|destination| &destination.tables);
        let own = case.own();
        let called_so = |known: &&TableStatus| known.table.split('.').next_back() == Some(own.as_str());
        // Until its change is applied it has the name of before.
        let known = tables().find(|known| known.table == full).or_else(|| tables().find(called_so));
        let waits = |known: &&TableStatus| known.state == TableState::Errored || known.schema == SchemaState::Held;
        if let Some(error) = known.filter(waits).and_then(|known| known.error.as_ref()) {
            let code = error.code.clone();
            if resynced.is_none() && case.expect.contains(", then equal") {
                let asked = self.pipeline.command(&["resync", "mirror", &full]).output();
                if asked.is_ok_and(|output| output.status.success()) {
                    *resynced = Some(code.clone());
                }
            }
            return code;
        }
        let pending =
            known.and_then(|known| known.pending.as_ref()).map(|pending| format!("pending: {}", pending.reason));
        let published = status
            .publication
            .as_ref()
            .map(|error| error.code.clone())
            .filter(|_| case.expect.starts_with("publication."));
        match (self.differs(case, schema, name), &resynced, pending, published) {
            (_, _, Some(pending), _) => pending,
            (_, _, _, Some(code)) => code,
            (None, None, ..) if known.is_some_and(|known| known.state == TableState::Ready) => "equal".to_owned(),
            (None, Some(code), ..) if known.is_some_and(|known| known.state == TableState::Ready) => {
                format!("{code}, then equal")
            }
            (None, ..) => "not ready yet".to_owned(),
            (Some(how), ..) => how,
        }
    }

    /// How the ends differ, by name and text of each published column.
    fn differs(&self, case: &Case, schema: &str, name: &str) -> Option<String> {
        let columns = |database: &Database| {
            quietly(database, &format!(
                "SELECT string_agg(a.attname, ',' ORDER BY a.attname) FROM pg_attribute a
                 WHERE a.attrelid = to_regclass('{schema}.{name}') AND a.attnum > 0 AND NOT a.attisdropped AND a.attgenerated = ''"
            ))
        };
        let expected = match case.columns {
            Some(columns) => columns.to_owned(),
            None => columns(&self.source),
        };
        let there = columns(&self.mirror);
        if expected != there {
            return Some(format!("the columns are ({there}) instead of ({expected})"));
        }
        let cells: Vec<String> = expected.split(',').map(|column| format!("'{column}', \"{column}\"::text")).collect();
        let rows = |database: &Database, filter: &str| {
            quietly(
                database,
                &format!("SELECT jsonb_build_object({}) FROM {schema}.{name} {filter} ORDER BY 1", cells.join(", ")),
            )
        };
        let (expected, there) = (rows(&self.source, case.filter), rows(&self.mirror, ""));
        (expected != there).then(|| {
            let lines = |text: &str| text.lines().count();
            let other = expected.lines().zip(there.lines()).find(|(a, b)| a != b);
            format!("the rows differ ({} at the source, {} at the mirror; {other:?})", lines(&expected), lines(&there))
        })
    }

    fn outcome(&self, case: &Case, seen: &str, versions: &[Arc<TableSchema>], state: &Loaded) -> Outcome {
        let mut outcome = seen.to_owned();
        if seen == "equal" {
            let oid = versions.last().map(|version| version.oid);
            let floor = state.tables.iter().find(|record| Some(record.oid) == oid).and_then(|record| record.floor);
            let before = oid.and_then(|oid| self.floors.get(&oid)).copied().flatten();
            let how = match versions.last().map(|version| version.origin) {
                _ if floor != before => "copied",
                Some(Origin::Message) => "live, by a message",
                Some(Origin::Catalog) => "live, by a relation",
                Some(Origin::Copy) | None => "live, unchanged",
            };
            outcome = format!("equal, {how}");
        }
        if case.expected().any(|expect| outcome == expect) {
            Outcome::Expected(outcome)
        } else {
            Outcome::Unexpected(format!("{outcome}; expected: {}", case.expect))
        }
    }

    /// The versions of the case's table, oldest first: of the one that is called so now, or
    /// was.
    fn versions(&self, case: &Case, state: &Loaded) -> Vec<Arc<TableSchema>> {
        let table = case.text(case.table);
        let own = case.own();
        let name = table.split('.').next_back().unwrap_or(&table).to_owned();
        let mut of: Vec<&TableSchema> = state.history.iter().filter(|version| version.name.name == name).collect();
        if of.is_empty() {
            of = state.history.iter().filter(|version| version.name.name == own).collect();
        }
        let Some(oid) = of.iter().max_by_key(|version| version.snapshot).map(|version| version.oid) else {
            return Vec::new();
        };
        let mut versions: Vec<Arc<TableSchema>> =
            state.history.iter().filter(|version| version.oid == oid).cloned().map(Arc::new).collect();
        versions.sort_by_key(|version| version.snapshot);
        versions
    }

    fn state(&self) -> Result<Loaded> {
        let path = self.pipeline.directory().join("tidegate.toml");
        let pipeline = Config::load_pipeline(&path).map_err(|error| error.report())?;
        let loaded = pipeline.read_store().and_then(|store| store.load());
        loaded.map_err(|error| Error::from(error.report()))
    }
}

impl Case {
    /// What may come of it.
    fn expected(&self) -> impl Iterator<Item = &str> {
        self.expect.split(" or ")
    }

    /// The table's own name at the beginning.
    fn own(&self) -> String {
        self.name.replace('-', "_")
    }

    fn text(&self, text: &str) -> String {
        text.replace("{t}", &self.own())
    }
}

/// The gravest class of all that was done to a table.
fn class(versions: &[Arc<TableSchema>]) -> String {
    let changes = versions.windows(2).map(|pair| plan(pair[0].clone(), pair[1].clone()));
    let classes = changes.filter_map(|change| gravest(&change).map(|(class, _)| class));
    match classes.max() {
        _ if versions.iter().any(|version| version.rewritten) => "rewritten".to_owned(),
        Some(class) => class.as_str().to_owned(),
        None => "none".to_owned(),
    }
}

/// Whether what is seen is what is expected, but for how it came to be equal. What a table has
/// stopped with is not yet all of `CODE, then equal`.
fn is_it(expected: &str, seen: &str) -> bool {
    seen == expected || seen == "equal" && expected.starts_with("equal, ")
}

/// Like [`Database::sql`], but a table that is not there (yet) is an answer.
fn quietly(database: &Database, sql: &str) -> String {
    match script(database, &[sql.to_owned()]) {
        Ok(text) => text,
        Err(error) => format!("{error}"),
    }
}

/// Runs statements one by one, as a client would; the second session runs what it is told to
/// beside the first.
fn script(database: &Database, statements: &[String]) -> Result<String> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let mut sessions = Vec::new();
        for _ in 0..2 {
            let (client, connection) = tokio_postgres::connect(&database.url, tokio_postgres::NoTls).await?;
            tokio::spawn(connection);
            sessions.push(client);
        }
        let mut lines = Vec::new();
        for statement in statements {
            let (session, sql) = match statement.strip_prefix("2: ") {
                Some(sql) => (&sessions[1], sql),
                None => (&sessions[0], statement.as_str()),
            };
            for message in session.simple_query(sql).await.map_err(|error| said(&error))? {
                if let tokio_postgres::SimpleQueryMessage::Row(row) = message {
                    lines.push(row.get(0).unwrap_or_default().to_owned());
                }
            }
        }
        Ok(lines.join("\n"))
    })
}

fn said(error: &tokio_postgres::Error) -> String {
    error.as_db_error().map_or_else(|| error.to_string(), |error| error.message().to_owned())
}
