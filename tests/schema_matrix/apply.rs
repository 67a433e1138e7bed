//! The host and the plugin are killed at every step of every plan of a corpus, against a
//! plugin whose changes are one transaction (`postgres`) and one whose steps are on disk one
//! by one (`steps`). Every run has to recover by itself, and the ends to be equal.
//!
//! `SHORT=1` takes some of the changes and of the ways to die.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use tidegate::position::SnapshotId;
use tidegate::schema::classify::gravest;
use tidegate::schema::history::History;
use tidegate::schema::plan::plan;
use tidegate::scratch::Cluster;
use tidegate::store::{Loaded, Store};
use tidegate_tests::majors::servers;
use tidegate_tests::{Database, Pipeline, database, postgres_destination};

use crate::Result;
use crate::corpus::{CORPUS, Change, TABLE, rows, script, table, work};
use crate::report::{Outcome, Report};

/// Changes of a short run.
const SHORT: [&str; 6] =
    ["add_two", "drop_two", "rename_cycle", "default_and_not_null", "there_and_back", "all_at_once"];

/// Who is changed.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Plugin {
    Postgres,
    Steps,
}

/// How a run dies, again and again until it is through.
#[derive(Clone, Copy)]
enum Way {
    /// The host at these places, in turn: each start gets at least one step further.
    Host(&'static [&'static str]),
    /// The plugin, once at each step.
    Plugin(&'static str),
}

const WAYS: [(&str, Way); 7] = [
    // The first time is the change that the start before died in.
    ("host before a step", Way::Host(&["schema.applying:2"])),
    ("host after a step", Way::Host(&["schema.applied"])),
    ("host with a change flushed", Way::Host(&["schema.flushed:2"])),
    ("host with a change recorded", Way::Host(&["schema.recorded"])),
    ("host recovering", Way::Host(&["schema.applying:2", "schema.inspected", "schema.applied", "schema.inspected:2"])),
    ("plugin before a step", Way::Plugin("before")),
    ("plugin after a step", Way::Plugin("after")),
];
const SHORT_WAYS: [&str; 3] = ["host before a step", "host after a step", "plugin after a step"];

/// How long nothing may go on, and how often that is looked at.
const PATIENCE: Duration = Duration::from_secs(90);
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// More starts than any run needs that gets anywhere.
const STARTS: usize = 1000;
/// What a call of the plugin may take, and how long its server keeps it waiting to kill it.
const CALL_MS: u64 = 2000;
const STALL_SECONDS: f64 = 2.4;

pub fn run(report: &Report) -> Result<()> {
    let short = std::env::var_os("SHORT").is_some_and(|short| !short.is_empty());
    // What is tested is ours, and does not depend on the server.
    let major = if report.options().majors.contains(&15) { 15 } else { report.options().majors[0] };
    let servers = servers(major).ok_or_else(|| format!("there is no PostgreSQL {major} here"))?;
    let changes: Vec<&Change> = CORPUS
        .iter()
        .filter(|change| report.options().wants(change.name))
        .filter(|change| !short || SHORT.contains(&change.name))
        .collect();
    if changes.is_empty() {
        return Ok(());
    }
    let runs: Vec<(Plugin, &str, Way)> = [Plugin::Steps, Plugin::Postgres]
        .into_iter()
        .flat_map(|plugin| WAYS.map(|(name, way)| (plugin, name, way)))
        .filter(|(_, name, _)| !short || SHORT_WAYS.contains(name))
        // Its server has to stall for that, which takes seconds each time.
        .filter(|(plugin, _, way)| !(short && *plugin == Plugin::Postgres && matches!(way, Way::Plugin(_))))
        .collect();
    let next = std::sync::Mutex::new(runs.into_iter());
    let worker = || -> Result<()> {
        while let Some((plugin, name, way)) = { next.lock().map_err(|_| "a run panicked")?.next() } {
            let mut bench = Bench::new(&servers.source, &servers.mirror, plugin, way, &changes);
            bench.die_until_through(way)?;
            bench.tell(report, major, name);
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let workers = [(); 3].map(|()| scope.spawn(&worker));
        workers.into_iter().try_for_each(|worker| worker.join().unwrap_or_else(|_| Err("a run panicked".into())))
    })
}

/// A table, the version that it is changed to, and which step of that.
type Step = (String, SnapshotId, u32);

/// A pipeline with a table for each change.
struct Bench<'a> {
    plugin: Plugin,
    source: Database,
    mirror: Database,
    pipeline: Pipeline,
    changes: &'a [&'a Change],
    /// Deaths of the host or the plugin, by table and step.
    deaths: BTreeMap<Step, u32>,
    /// Starts that ended in a death, of which some are in no step.
    starts: u32,
    applied: BTreeMap<u32, SnapshotId>,
}

impl<'a> Bench<'a> {
    /// Everything is copied, and all that changes then waits for the next start.
    fn new(source: &Cluster, mirror: &Cluster, plugin: Plugin, way: Way, changes: &'a [&'a Change]) -> Bench<'a> {
        let (source, mirror) = (database(source, "apply"), database(mirror, "apply"));
        for change in changes {
            source.script(&format!("CREATE TABLE {} ({TABLE});\n{}", table(change), rows(change)));
        }
        source.sql("CREATE PUBLICATION pub FOR ALL TABLES");
        let destination = match plugin {
            Plugin::Postgres => postgres(&mirror, way),
            Plugin::Steps => steps(way),
        };
        let pipeline = Pipeline::new(&source, &destination);
        match plugin {
            Plugin::Postgres => {}
            Plugin::Steps => install_fixture(&pipeline),
        }
        let (deaths, applied) = (BTreeMap::new(), BTreeMap::new());
        let mut bench = Bench { plugin, source, mirror, pipeline, changes, deaths, starts: 0, applied };
        bench.pipeline.install_trigger();
        bench.pipeline.start();
        bench.pipeline.wait_ready();
        assert_eq!(bench.pipeline.stop(), 0, "{}", bench.pipeline.log());
        let mut all = String::new();
        for change in changes {
            all.push_str(&work(change, 0));
            all.push_str(&script(change));
            all.push_str(&work(change, 1));
        }
        bench.source.script(&all);
        if let (Plugin::Postgres, Way::Plugin(when)) = (plugin, way) {
            bench.mirror.script(&stall(when, bench.pipeline.directory()));
        }
        bench
    }

    fn die_until_through(&mut self, way: Way) -> Result<()> {
        let places = match way {
            Way::Host(places) => places,
            Way::Plugin(_) => &[""],
        };
        let (mut last, mut again) = (None, false);
        for place in places.iter().cycle().take(STARTS) {
            // A step whose effect cannot be seen is done again: the second time it may pass.
            let later = format!("{place}:2");
            self.pipeline.start_with(&[("TIDEGATE_FAILPOINT", if again { &later } else { place })]);
            if self.dies()? {
                self.starts += 1;
                let died = self.note_death(place);
                again = died.is_some() && died == last && places == ["schema.applied"];
                last = died;
                continue;
            }
            self.pipeline.wait_caught_up(&self.source);
            let code = self.pipeline.stop();
            return if code == 0 { Ok(()) } else { Err(self.failed(code)) };
        }
        Err(format!("it is not through after {STARTS} starts\n{}", self.pipeline.log()).into())
    }

    /// Waits until the host has died, which is true, or is through with all changes.
    fn dies(&mut self) -> Result<bool> {
        let mut done = self.progress();
        let mut since = Instant::now();
        loop {
            match self.pipeline.ended() {
                Some(-1) => return Ok(true),
                Some(code) => return Err(self.failed(code)),
                None => {}
            }
            let now = self.progress();
            if now.as_ref().is_some_and(|(left, _)| *left == 0) {
                return Ok(false);
            }
            if now != done {
                (done, since) = (now, Instant::now());
            }
            if since.elapsed() > PATIENCE {
                return Err(format!("nothing goes on at {done:?}\n{}", self.pipeline.log()).into());
            }
            std::thread::sleep(LOOK_EVERY);
        }
    }

    fn failed(&self, code: i32) -> crate::Error {
        format!("the host ended with {code}\n{}", self.pipeline.log()).into()
    }

    fn load(&self) -> Option<Loaded> {
        Store::open_read_only(&self.pipeline.directory().join("state")).ok()?.load().ok()
    }

    /// Versions that are not known yet and tables that do not have the last one, nor have
    /// stopped; and steps that were begun.
    fn progress(&self) -> Option<(usize, Vec<Option<u32>>)> {
        let loaded = self.load()?;
        let history = History::from_stored(loaded.history);
        let wanted: usize = self.changes.iter().map(|change| versions(change)).sum();
        let known: usize = loaded.tables.iter().map(|record| history.versions(record.oid).len()).sum();
        let is_done = |record: &&tidegate::store::TableRecord| {
            let newest = history.newest(record.oid).map(|newest| newest.snapshot);
            record.error.is_some() || record.applying.is_none() && record.applied == newest
        };
        let done = loaded.tables.iter().filter(is_done).count();
        let steps = loaded.tables.iter().map(|record| record.applying.map(|applying| applying.step)).collect();
        Some(((wanted - known.min(wanted)) + (self.changes.len() - done.min(self.changes.len())), steps))
    }

    /// Where the host was: in a change that it says it has begun, or behind one.
    fn note_death(&mut self, place: &str) -> Option<Step> {
        let loaded = self.load()?;
        let mut noted = None;
        let recorded = place.starts_with("schema.recorded");
        for record in &loaded.tables {
            let key = match (record.applying, record.applied) {
                (Some(applying), _) => Some((applying.to, applying.step)),
                (None, Some(applied)) if recorded && self.applied.get(&record.oid) != Some(&applied) => {
                    Some((applied, 0))
                }
                _ => None,
            };
            if let Some((version, step)) = key {
                let step = (record.name.name.clone(), version, step);
                *self.deaths.entry(step.clone()).or_default() += 1;
                noted = Some(step);
            }
        }
        self.applied = loaded.tables.iter().filter_map(|record| Some((record.oid, record.applied?))).collect();
        noted
    }

    /// Where the plugin was killed, as whoever did it has noted.
    fn kills(&self) -> usize {
        match self.plugin {
            Plugin::Postgres => std::fs::read_dir(self.pipeline.directory().join("stalls")).map_or(0, Iterator::count),
            Plugin::Steps => {
                let text =
                    std::fs::read_to_string(self.pipeline.directory().join("steps/ended.json")).unwrap_or_default();
                serde_json::from_str::<Vec<String>>(&text).map_or(0, |ended| ended.len())
            }
        }
    }

    /// One line for each change.
    fn tell(&self, report: &Report, major: u32, way: &str) {
        let plugin = if self.plugin == Plugin::Postgres { "postgres" } else { "steps" };
        let loaded = self.load().unwrap_or_default();
        let history = History::from_stored(loaded.history.iter().cloned());
        let (mut steps, mut changed) = (0, 0);
        for change in self.changes {
            let name = table(change);
            let record = loaded.tables.iter().find(|record| record.name.name == name);
            let versions = record.map(|record| history.versions(record.oid).to_vec()).unwrap_or_default();
            let plans: Vec<_> = versions.windows(2).map(|pair| plan(pair[0].clone(), pair[1].clone())).collect();
            steps += plans.iter().map(|plan| plan.steps.len()).sum::<usize>();
            changed += plans.iter().filter(|plan| !plan.steps.is_empty()).count();
            let class = plans.iter().filter_map(gravest).map(|(class, _)| class).max();
            let died: u32 = self.deaths.iter().filter(|((table, ..), _)| *table == name).map(|(_, count)| count).sum();
            let missed: Vec<String> = self.missed(&name, way, &plans);
            let outcome = match (record.and_then(|record| record.error.as_ref()), self.differs(&name)) {
                (Some(error), _) => {
                    Outcome::Unexpected(format!("the table stopped: [{}] {}", error.code, error.message))
                }
                (None, Some(difference)) => Outcome::Unexpected(difference),
                (None, None) if !missed.is_empty() => {
                    Outcome::Unexpected(format!("never killed at {}", missed.join(", ")))
                }
                (None, None) => Outcome::Expected(format!("killed {died} times, equal")),
            };
            let case = format!("apply {plugin}, {way}, {}", change.name);
            report.case(&case, &major.to_string(), class.map_or("-", |class| class.as_str()), outcome);
        }
        let (kills, wanted) = (self.kills(), if self.plugin == Plugin::Postgres { changed } else { steps });
        if way.starts_with("plugin") {
            let outcome = match kills == wanted {
                true => Outcome::Expected(format!("killed {kills} times")),
                false => Outcome::Unexpected(format!("killed {kills} times, not {wanted}")),
            };
            report.case(&format!("apply {plugin}, {way}, every step"), &major.to_string(), "-", outcome);
        }
        println!(
            "apply {plugin}, {way}: {} tables, {changed} changes, {steps} steps; the host died {} times, the plugin {kills}",
            self.changes.len(),
            self.starts
        );
    }

    /// Steps of a table at which nobody died, where that is to be seen.
    fn missed(&self, name: &str, way: &str, plans: &[tidegate::schema::change::SchemaChange]) -> Vec<String> {
        if !["host before a step", "host after a step"].contains(&way) {
            return Vec::new();
        }
        let mut missed = Vec::new();
        for plan in plans.iter().filter(|plan| !plan.steps.is_empty()) {
            // All steps are one there.
            let steps = if self.plugin == Plugin::Postgres { 1 } else { plan.steps.len() };
            for step in 0..steps {
                let key = (name.to_owned(), plan.after.snapshot, u32::try_from(step).unwrap_or(u32::MAX));
                // The very first step is where a start may pass once.
                if !self.deaths.contains_key(&key) && !(way == "host before a step" && self.is_first(plan, step)) {
                    missed.push(format!("step {step} of {}", plan.after.snapshot));
                }
            }
        }
        missed
    }

    /// The first step of the first change of all, at which no start can die that may pass
    /// one place.
    fn is_first(&self, plan: &tidegate::schema::change::SchemaChange, step: usize) -> bool {
        let first = self.changes.first().map(|change| table(change));
        step == 0 && first.as_deref() == Some(plan.after.name.name.as_str())
    }

    /// How the ends differ, if they do.
    fn differs(&self, table: &str) -> Option<String> {
        let columns = self.source.sql(&format!(
            "SELECT attname FROM pg_attribute WHERE attrelid = '{table}'::regclass AND attnum > 0 AND NOT attisdropped
             ORDER BY attnum"
        ));
        let columns: Vec<&str> = columns.lines().collect();
        let cells = columns.iter().map(|column| {
            let quoted = format!("\"{}\"", column.replace('"', "\"\""));
            format!("'{}', CASE WHEN {quoted} IS NOT NULL THEN format('%s', {quoted}) END", column.replace('\'', "''"))
        });
        let query = format!(
            "SELECT jsonb_strip_nulls(jsonb_build_object({}))::text FROM {table} ORDER BY 1",
            cells.collect::<Vec<_>>().join(", ")
        );
        let wanted: Vec<String> = self.source.sql(&query).lines().map(str::to_owned).collect();
        let (found, there): (Vec<String>, Vec<String>) = match self.plugin {
            Plugin::Postgres => {
                if !is_there(&self.mirror, table, &columns) {
                    return Some("the mirror has other columns".to_owned());
                }
                (self.mirror.sql(&query).lines().map(str::to_owned).collect(), shape(&self.mirror, table))
            }
            Plugin::Steps => self.in_files(table),
        };
        let wanted_shape = shape(&self.source, table);
        match (found == wanted, there == wanted_shape) {
            (true, true) => None,
            (false, _) => Some(format!("the rows are {found:?}, and not {wanted:?}")),
            (_, false) => Some(format!("the columns are {there:?}, and not {wanted_shape:?}")),
        }
    }

    /// Rows and columns as the fixture has them, as `differs` asks for them.
    fn in_files(&self, table: &str) -> (Vec<String>, Vec<String>) {
        let file = self.pipeline.directory().join("steps").join(format!("{table}.json"));
        let text = std::fs::read_to_string(&file).unwrap_or_default();
        let kept: serde_json::Value = serde_json::from_str(&text).unwrap_or_default();
        let rows =
            kept["rows"].as_object().map(|rows| rows.values().map(ToString::to_string).collect()).unwrap_or_default();
        let text = |column: &serde_json::Value| {
            let required = if column["nullable"] == false { " not null" } else { "" };
            let default = if column["default"].is_string() { " default" } else { "" };
            format!("{} {}{required}{default}", column["name"].as_str()?, column["declared"].as_str()?).into()
        };
        let columns: Vec<Option<String>> =
            kept["columns"].as_array().map(|all| all.iter().map(text).collect()).unwrap_or_default();
        let mut columns: Vec<String> = columns.into_iter().flatten().collect();
        columns.sort();
        // As the server prints JSON, through itself.
        let rows: Vec<String> = rows;
        let quoted: Vec<String> = rows.iter().map(|row| format!("'{}'", row.replace('\'', "''"))).collect();
        let printed = self.source.sql(&format!(
            "SELECT jsonb_strip_nulls(row::jsonb)::text FROM unnest(ARRAY[{}]::text[]) row ORDER BY 1",
            quoted.join(", ")
        ));
        (printed.lines().map(str::to_owned).collect(), columns)
    }
}

fn versions(change: &Change) -> usize {
    if change.compound { 2 } else { 1 + change.statements.len() }
}

fn is_there(database: &Database, table: &str, columns: &[&str]) -> bool {
    let there = database.sql(&format!(
        "SELECT attname FROM pg_attribute WHERE attrelid = to_regclass('{table}') AND attnum > 0 AND NOT attisdropped"
    ));
    let mut there: Vec<&str> = there.lines().collect();
    let mut wanted = columns.to_vec();
    there.sort_unstable();
    wanted.sort_unstable();
    there == wanted
}

/// Name, type, nullability and whether there is a literal default, of each column.
fn shape(database: &Database, table: &str) -> Vec<String> {
    let shape = database.sql(&format!(
        "SELECT a.attname || ' ' || format_type(a.atttypid, a.atttypmod) || CASE WHEN a.attnotnull THEN ' not null' ELSE '' END
             || CASE WHEN pg_get_expr(d.adbin, d.adrelid) !~ 'random' THEN ' default' ELSE '' END
         FROM pg_attribute a LEFT JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
         WHERE a.attrelid = to_regclass('{table}') AND a.attnum > 0 AND NOT a.attisdropped"
    ));
    let mut shape: Vec<String> = shape.lines().map(str::to_owned).collect();
    shape.sort();
    shape
}

fn postgres(mirror: &Database, way: Way) -> String {
    let limits = match way {
        Way::Plugin(_) => format!("[destination.limits]\nsettle_ms = 10\ncall_hard_ms = {CALL_MS}\n"),
        Way::Host(_) => "[destination.limits]\nsettle_ms = 10\n".to_owned(),
    };
    format!("{}{limits}", postgres_destination("mirror", mirror))
}

fn steps(way: Way) -> String {
    let end = match way {
        Way::Plugin(when) => format!("end = \"{when}\"\n"),
        Way::Host(_) => String::new(),
    };
    format!(
        "[[destination]]\nname = \"files\"\nplugin = \"steps\"\nmode = \"merge\"\n\
         [destination.settings]\npath = \"{{dir}}/steps\"\n{end}\
         [destination.grant]\nfiles = [{{ path = \"{{dir}}/steps\", mode = \"read-write\" }}]\n\
         [destination.limits]\nsettle_ms = 10\n"
    )
}

/// The pipeline takes its plugins from where the fixtures are.
fn install_fixture(pipeline: &Pipeline) {
    std::fs::create_dir(pipeline.directory().join("steps")).expect("a directory can be made");
    let file = pipeline.directory().join("tidegate.toml");
    let text = std::fs::read_to_string(&file).expect("the configuration is there");
    let plugins = tidegate_tests::plugins().display().to_string();
    let text = text.replace(&plugins, &tidegate_tests::fixtures().display().to_string());
    std::fs::write(&file, text).expect("the configuration is written");
}

/// Lets the mirror's server keep a change waiting until the plugin is killed for it, once for
/// each: before the first statement, or in the commit. That it has is kept in files, which no
/// rollback takes away.
fn stall(when: &str, directory: &std::path::Path) -> String {
    let stalls = directory.join("stalls");
    std::fs::create_dir(&stalls).expect("a directory can be made");
    let permissions = std::os::unix::fs::PermissionsExt::from_mode(0o777);
    std::fs::set_permissions(&stalls, permissions).expect("anybody may write it");
    let reachable = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(directory, reachable).expect("anybody may go there");
    let once = |key: &str| {
        format!(
            "IF pg_stat_file('{0}/' || md5({key}), true) IS NULL THEN
                 EXECUTE format('COPY (SELECT 1) TO %L', '{0}/' || md5({key}));
                 PERFORM pg_sleep({STALL_SECONDS});
             END IF;",
            stalls.display()
        )
    };
    match when {
        "before" => format!(
            "CREATE FUNCTION public.stall() RETURNS event_trigger LANGUAGE plpgsql AS $$ BEGIN {} END $$;
             CREATE EVENT TRIGGER stall ON ddl_command_start WHEN TAG IN ('ALTER TABLE') EXECUTE FUNCTION public.stall();
             ALTER EVENT TRIGGER stall ENABLE ALWAYS;",
            once(
                "(SELECT concat(table_id, ' ', snapshot_commit, ' ', snapshot_message) FROM tidegate.position
                  WHERE target_name = (regexp_match(current_query(), 'ALTER TABLE \"public\"\\.\"([^\"]+)\"'))[1])"
            )
        ),
        _ => format!(
            "CREATE FUNCTION public.stall() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN {} RETURN NULL; END $$;
             CREATE CONSTRAINT TRIGGER stall AFTER UPDATE ON tidegate.position DEFERRABLE INITIALLY DEFERRED FOR EACH ROW
                 WHEN ((OLD.snapshot_commit, OLD.snapshot_message) IS DISTINCT FROM (NEW.snapshot_commit, NEW.snapshot_message))
                 EXECUTE FUNCTION public.stall();
             ALTER TABLE tidegate.position ENABLE ALWAYS TRIGGER stall;",
            once("concat(NEW.table_id, ' ', NEW.snapshot_commit, ' ', NEW.snapshot_message)")
        ),
    }
}
