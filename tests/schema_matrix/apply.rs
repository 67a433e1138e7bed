//! The host and the plugin are killed at every step of every plan of a corpus, against a
//! plugin whose changes are one transaction (`postgres`) and one whose steps are on disk one
//! by one (`steps`). Every run has to recover by itself, and the ends to be equal. A step at
//! which nobody died is an outcome that is not expected.
//!
//! `SHORT=1` takes some of the changes and of the ways to die.

mod ends;
mod stall;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use tidegate::position::SnapshotId;
use tidegate::schema::barrier::Gate;
use tidegate::schema::change::SchemaChange;
use tidegate::schema::classify::gravest;
use tidegate::schema::history::History;
use tidegate::schema::plan::plan;
use tidegate::store::{Loaded, Store};
use tidegate_tests::majors::{Servers, servers};
use tidegate_tests::{Database, Pipeline, database, postgres_destination};

use crate::Result;
use crate::corpus::{CORPUS, Change, TABLE, last_name, rows, script, table, work};
use crate::report::{Outcome, Report};
use stall::{At, Stalls};

/// Changes of a short run.
const SHORT: [&str; 7] =
    ["add_two", "drop_two", "rename_cycle", "default_and_not_null", "there_and_back", "all_at_once", "all_of_a_table"];

/// Who is changed.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Plugin {
    Postgres,
    Steps,
}

/// How a run dies, again and again until it is through.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    /// The host at these places, in turn: each round gets one step further.
    Host(&'static [&'static str]),
    /// The host while the server keeps its change waiting.
    Waiting(At),
    /// The plugin, once at each place.
    Plugin(At),
}

const BOTH: &[Plugin] = &[Plugin::Steps, Plugin::Postgres];
const ATOMIC: &[Plugin] = &[Plugin::Postgres];

const FLUSHED: Way = Way::Host(&["schema.flushed:2"]);

const WAYS: [(&str, &[Plugin], Way); 10] = [
    // The first time is the change that the start before died in.
    ("host before a step", BOTH, Way::Host(&["schema.applying:2"])),
    ("host after a step", BOTH, Way::Host(&["schema.applied"])),
    ("host with a change flushed", BOTH, FLUSHED),
    ("host with a change recorded", BOTH, Way::Host(&["schema.recorded"])),
    ("host recovering before a step", BOTH, Way::Host(&["schema.applying:2", "schema.inspected"])),
    ("host recovering after a step", BOTH, Way::Host(&["schema.applied", "schema.inspected:2"])),
    ("host inside a change", ATOMIC, Way::Waiting(At::Before)),
    ("plugin before a step", BOTH, Way::Plugin(At::Before)),
    ("plugin after a step", BOTH, Way::Plugin(At::After)),
    ("plugin in the commit", ATOMIC, Way::Plugin(At::Commit)),
];
const SHORT_WAYS: [&str; 4] =
    ["host before a step", "host after a step", "host inside a change", "plugin after a step"];

/// How long nothing may go on, and how often that is looked at.
const PATIENCE: Duration = Duration::from_secs(90);
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// More starts than any run needs that gets anywhere.
const STARTS: usize = 1000;
/// What a change may take where the plugin is to be killed.
const CALL_MS: u64 = 1500;

/// What died, and what was recovered.
#[derive(Default)]
struct Figures {
    hosts: AtomicUsize,
    plugins: AtomicUsize,
}

pub fn run(report: &Report) -> Result<()> {
    let short = std::env::var_os("SHORT").is_some_and(|short| !short.is_empty());
    let changes: Vec<&Change> = CORPUS
        .iter()
        .filter(|change| report.options().wants(change.name))
        .filter(|change| !short || SHORT.contains(&change.name))
        .collect();
    if changes.is_empty() {
        return Ok(());
    }
    let runs = WAYS.iter().flat_map(|(name, plugins, way)| plugins.iter().map(move |plugin| (*plugin, *name, *way)));
    let runs: Vec<(Plugin, &str, Way)> = runs
        .filter(|(_, name, _)| !short || SHORT_WAYS.contains(name))
        // Its server has to stall for that, which takes seconds each time.
        .filter(|(plugin, _, way)| !(short && *plugin == Plugin::Postgres && matches!(way, Way::Plugin(_))))
        .collect();
    for major in majors(report) {
        let servers = servers(major).ok_or_else(|| format!("there is no PostgreSQL {major} here"))?;
        run_on(servers, &changes, runs.clone(), report)?;
    }
    Ok(())
}

/// What is tested is ours, and the servers differ little: one version, unless some are named.
fn majors(report: &Report) -> Vec<u32> {
    let majors = &report.options().majors;
    match report.options().named {
        true => majors.clone(),
        false => vec![if majors.contains(&15) { 15 } else { majors[0] }],
    }
}

fn run_on(
    servers: &Servers,
    changes: &[&Change],
    mut runs: Vec<(Plugin, &'static str, Way)>,
    report: &Report,
) -> Result<()> {
    // Those that wait for a call to end take longest.
    runs.sort_by_key(|(plugin, _, way)| !(*plugin == Plugin::Postgres && matches!(way, Way::Plugin(_))));
    let count = runs.len();
    let (next, figures) = (std::sync::Mutex::new(runs.into_iter()), Figures::default());
    let worker = || -> Result<()> {
        while let Some((plugin, name, way)) = { next.lock().map_err(|_| "a run panicked")?.next() } {
            let mut bench = Bench::new(servers, plugin, way, changes);
            bench.die_until_through().map_err(|error| format!("{}, {name}: {error}", plugin.as_str()))?;
            bench.tell(report, servers.major, name, &figures);
        }
        Ok(())
    };
    let done: Result<()> = std::thread::scope(|scope| {
        let workers = [(); 4].map(|()| scope.spawn(&worker));
        workers.into_iter().try_for_each(|worker| worker.join().unwrap_or_else(|_| Err("a run panicked".into())))
    });
    println!(
        "apply, {}: {} changes, each in {count} ways; {} deaths of the host and {} of a plugin, all of them recovered from by itself unless told otherwise",
        servers.major,
        changes.len(),
        figures.hosts.into_inner(),
        figures.plugins.into_inner()
    );
    done
}

impl Plugin {
    fn as_str(self) -> &'static str {
        match self {
            Plugin::Postgres => "postgres",
            Plugin::Steps => "steps",
        }
    }
}

/// A table, the version that it is changed to, and which step of that.
type Step = (u32, SnapshotId, u32);

/// A pipeline with a table for each change.
struct Bench<'a> {
    plugin: Plugin,
    way: Way,
    source: Database,
    mirror: Database,
    pipeline: Pipeline,
    stalls: Stalls,
    changes: &'a [&'a Change],
    /// Of each change's table.
    oids: Vec<u32>,
    /// Deaths of the host in steps, by where in the program.
    deaths: BTreeMap<(&'static str, Step), u32>,
    /// Starts that ended in a death, of which some are in no step.
    starts: usize,
    applied: BTreeMap<u32, SnapshotId>,
}

impl<'a> Bench<'a> {
    /// Everything is copied, and all that changes then waits for the next start.
    fn new(servers: &Servers, plugin: Plugin, way: Way, changes: &'a [&'a Change]) -> Bench<'a> {
        let (source, mirror) = (database(&servers.source, "apply"), database(&servers.mirror, "apply"));
        source.sql("CREATE SCHEMA moved");
        for change in changes {
            source.script(&format!("CREATE TABLE {} ({TABLE});\n{}", table(change), rows(change)));
        }
        source.sql("CREATE PUBLICATION pub FOR ALL TABLES");
        let names: Vec<String> = changes.iter().map(|change| format!("('{}')", table(change))).collect();
        let oids = source.sql(&format!("SELECT name::regclass::oid::int8 FROM (VALUES {}) t(name)", names.join(", ")));
        let oids = oids.lines().map(|oid| oid.parse().expect("an oid")).collect();
        let destination = match plugin {
            Plugin::Postgres => postgres_destination("mirror", &mirror) + LIMITS,
            Plugin::Steps => steps(way),
        };
        let pipeline = Pipeline::new(&source, &destination);
        match plugin {
            Plugin::Postgres => {}
            Plugin::Steps => install_fixture(&pipeline),
        }
        let stalls = Stalls::of(pipeline.directory());
        let (deaths, applied) = (BTreeMap::new(), BTreeMap::new());
        let mut bench =
            Bench { plugin, way, source, mirror, pipeline, stalls, changes, oids, deaths, starts: 0, applied };
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
        if let (Plugin::Postgres, Way::Plugin(at) | Way::Waiting(at)) = (plugin, way) {
            bench.stalls.begin(&bench.mirror, at);
        }
        if matches!(way, Way::Plugin(_)) {
            bench.edit(|text| text.replace(LIMITS, &format!("{LIMITS}schema_hard_ms = {CALL_MS}\n")));
        }
        bench
    }

    fn edit(&self, edit: impl Fn(&str) -> String) {
        let file = self.pipeline.directory().join("tidegate.toml");
        let text = std::fs::read_to_string(&file).expect("the configuration is there");
        std::fs::write(&file, edit(&text)).expect("the configuration is written");
    }

    fn die_until_through(&mut self) -> Result<()> {
        let places = match self.way {
            Way::Host(places) => places,
            Way::Waiting(_) | Way::Plugin(_) => &[""],
        };
        let (mut last, mut again) = (None, false);
        for (start, place) in places.iter().cycle().take(STARTS).enumerate() {
            let name = place.split(':').next().unwrap_or_default();
            let failpoint = match start {
                // No start before it has died in a change.
                0 => name.to_owned(),
                // A step whose effect cannot be seen is done again: the second time it may pass.
                _ if again && *place == "schema.applied" => format!("{place}:2"),
                _ => (*place).to_owned(),
            };
            self.pipeline.start_with(&[("TIDEGATE_FAILPOINT", &failpoint)]);
            if self.dies()? {
                self.starts += 1;
                let died = if matches!(self.way, Way::Host(_)) { self.note_death(name) } else { None };
                if *place == "schema.applied" {
                    again = died.is_some() && died == last;
                    last = died;
                }
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
        let known = self.stalls.begun();
        loop {
            match self.pipeline.ended() {
                Some(-1) => return Ok(true),
                Some(code) => return Err(self.failed(code)),
                None => {}
            }
            if matches!(self.way, Way::Waiting(_)) && self.stalls.begun() > known {
                self.pipeline.kill();
                return Ok(true);
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
            self.approve();
            std::thread::sleep(LOOK_EVERY);
        }
    }

    /// Lets go on what waits for nothing but that.
    fn approve(&self) {
        // One that only starts would find its state in use by whoever approves.
        let socket = self.pipeline.directory().join("state/control.sock");
        if std::os::unix::net::UnixStream::connect(socket).is_err() {
            return;
        }
        let Some(loaded) = self.load() else { return };
        for barrier in &loaded.barriers {
            let record = loaded.tables.iter().find(|record| record.oid == barrier.oid);
            if let Some(record) = record
                && barrier.verdict.is_none()
                && barrier.gates == [Gate::Approval]
            {
                let table = record.name.to_string();
                // Who dies before it has answered is asked again.
                let asked = self.pipeline.command(&["schema", "approve", &barrier.destination, &table]).output();
                asked.expect("the command runs");
            }
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
    fn note_death(&mut self, place: &'static str) -> Option<Step> {
        let loaded = self.load()?;
        let mut noted = None;
        for record in &loaded.tables {
            let key = match (record.applying, record.applied) {
                (Some(applying), _) => Some((applying.to, applying.step)),
                (None, Some(applied))
                    if place == "schema.recorded" && self.applied.get(&record.oid) != Some(&applied) =>
                {
                    Some((applied, 0))
                }
                _ => None,
            };
            if let Some((version, step)) = key {
                let step = (record.oid, version, step);
                *self.deaths.entry((place, step)).or_default() += 1;
                noted = Some(step);
            }
        }
        self.applied = loaded.tables.iter().filter_map(|record| Some((record.oid, record.applied?))).collect();
        noted
    }

    /// How often somebody was killed in changes of a table at the destination, as that has noted.
    fn kills(&self, oid: u32) -> usize {
        match self.plugin {
            Plugin::Postgres => self.stalls.killed(oid),
            Plugin::Steps => {
                let file = self.pipeline.directory().join("steps/ended.json");
                let text = std::fs::read_to_string(file).unwrap_or_default();
                let ended: Vec<String> = serde_json::from_str(&text).unwrap_or_default();
                ended.iter().filter(|ended| ended.split(' ').next() == Some(&oid.to_string())).count()
            }
        }
    }

    /// One line for each change.
    fn tell(&self, report: &Report, major: u32, way: &str, figures: &Figures) {
        let loaded = self.load().unwrap_or_default();
        let history = History::from_stored(loaded.history.iter().cloned());
        let (mut changed, mut killed) = (0, 0);
        for (change, oid) in self.changes.iter().zip(&self.oids) {
            let record = loaded.tables.iter().find(|record| record.oid == *oid);
            let plans: Vec<SchemaChange> =
                history.versions(*oid).windows(2).map(|pair| plan(pair[0].clone(), pair[1].clone())).collect();
            changed += plans.iter().filter(|plan| !plan.steps.is_empty()).count();
            let class = plans.iter().filter_map(gravest).map(|(class, _)| class).max();
            let died: u32 =
                self.deaths.iter().filter(|((_, (table, ..)), _)| table == oid).map(|(_, count)| count).sum();
            let kills = self.kills(*oid);
            killed += kills;
            let outcome = match (record.and_then(|record| record.error.as_ref()), self.differs(&last_name(change))) {
                (Some(error), _) => {
                    Outcome::Unexpected(format!("the table stopped: [{}] {}", error.code, error.message))
                }
                (None, Some(difference)) => Outcome::Unexpected(difference),
                (None, None) => match self.missed(*oid, &plans) {
                    Some(missed) => Outcome::Unexpected(missed),
                    // Nothing says in whose change the host died before it is recorded.
                    None if self.way == FLUSHED => Outcome::Expected("equal".to_owned()),
                    None => Outcome::Expected(format!("killed {} times, equal", died as usize + kills)),
                },
            };
            let case = format!("apply {}, {way}, {}", self.plugin.as_str(), change.name);
            report.case(&case, &major.to_string(), class.map_or("-", |class| class.as_str()), outcome);
        }
        if self.way == FLUSHED {
            let outcome = match self.starts >= changed {
                true => Outcome::Expected(format!("killed {} times", self.starts)),
                false => Outcome::Unexpected(format!("killed {} times in {changed} changes", self.starts)),
            };
            report.case(
                &format!("apply {}, {way}, every change", self.plugin.as_str()),
                &major.to_string(),
                "-",
                outcome,
            );
        }
        figures.hosts.fetch_add(self.starts, Ordering::Relaxed);
        figures.plugins.fetch_add(if matches!(self.way, Way::Plugin(_)) { killed } else { 0 }, Ordering::Relaxed);
    }

    /// Where in the changes of a table nobody was killed who should have been.
    fn missed(&self, oid: u32, plans: &[SchemaChange]) -> Option<String> {
        let plans = || plans.iter().filter(|plan| !plan.steps.is_empty());
        let place = match self.way {
            Way::Host(places) => *places.last()?,
            Way::Plugin(At::Commit) => return short_of(plans().count(), self.kills(oid)),
            Way::Waiting(_) | Way::Plugin(_) => {
                return short_of(plans().map(|plan| plan.steps.len()).sum(), self.kills(oid));
            }
        };
        let place = place.split(':').next().unwrap_or_default();
        let mut missed = Vec::new();
        for plan in plans() {
            let steps = match (place, self.plugin) {
                ("schema.flushed", _) => 0,
                // All steps are one there.
                ("schema.recorded", _) | (_, Plugin::Postgres) => 1,
                (_, Plugin::Steps) => plan.steps.len(),
            };
            for step in 0..u32::try_from(steps).unwrap_or(u32::MAX) {
                let is_there =
                    self.deaths.keys().any(|(at, died)| *at == place && *died == (oid, plan.after.snapshot, step));
                if !is_there {
                    missed.push(format!("step {step} of {}", plan.after.snapshot));
                }
            }
        }
        (!missed.is_empty()).then(|| format!("never killed at {}", missed.join(", ")))
    }
}

fn short_of(wanted: usize, kills: usize) -> Option<String> {
    (wanted != kills).then(|| format!("killed at {kills} steps, not at {wanted}"))
}

fn versions(change: &Change) -> usize {
    if change.compound { 2 } else { 1 + change.statements.len() }
}

const LIMITS: &str = "[destination.limits]\nsettle_ms = 10\n";

fn steps(way: Way) -> String {
    let end = match way {
        Way::Plugin(at) => format!("end = \"{}\"\n", at.as_str()),
        Way::Host(_) | Way::Waiting(_) => String::new(),
    };
    format!(
        "[[destination]]\nname = \"files\"\nplugin = \"steps\"\nmode = \"merge\"\n\
         [destination.settings]\npath = \"{{dir}}/steps\"\n{end}\
         [destination.grant]\nfiles = [{{ path = \"{{dir}}/steps\", mode = \"read-write\" }}]\n{LIMITS}"
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
