//! One pipeline for a case, with a destination that counts.

use std::collections::BTreeSet;
use std::io::{BufRead as _, BufReader};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tidegate::status::{DestinationStatus, StatusReport};
use tidegate::store::TableState;
use tidegate_tests::{Database, Pipeline, database, source};

use crate::cases::{Case, Expect};
use crate::load::{File, fixture};
use crate::{Outcome, Result};

/// Rows of one measurement, and how many of them a transaction has.
const ROWS: u64 = 40_000;
const TRANSACTION: u64 = 400;
/// The least share of its throughput that the counting destination has to keep, unless
/// `KEPT` says another. Two destinations share the machine, so that even a well-behaved one
/// costs something.
const KEPT: f64 = 0.4;
/// How often it may be measured until it has.
const TRIES: u32 = 3;
const PATIENCE: Duration = Duration::from_secs(60);
/// How long it may take until what a plugin did is seen.
const SEEN: Duration = Duration::from_secs(40);

pub struct World {
    pub source: Database,
    pub pipeline: Pipeline,
    runtime: tokio::runtime::Runtime,
    /// Rows inserted so far.
    pub rows: u64,
    /// Of these, rows that the process has seen as changes.
    pub changes: u64,
}

impl World {
    /// With `count` alone, and a table of 100 rows.
    pub fn new(name: &str, file: &File) -> Result<World> {
        let source = database(source(), &format!("hostile_{}", name.replace('-', "_")));
        source.sql("CREATE TABLE t (id int PRIMARY KEY, note text); INSERT INTO t SELECT g, 'row' FROM generate_series(1, 100) g; CREATE PUBLICATION pub FOR ALL TABLES");
        let pipeline = Pipeline::new(&source, "");
        let plugins = pipeline.directory().join("plugins");
        std::fs::create_dir(&plugins)?;
        std::fs::create_dir(pipeline.directory().join("files"))?;
        std::fs::copy(fixture("count")?, plugins.join("count.wasm"))?;
        std::fs::write(plugins.join("hostile.wasm"), file.bytes()?)?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let world = World { source, pipeline, runtime, rows: 100, changes: 0 };
        world.configure("")?;
        Ok(world)
    }

    /// Writes the configuration: `count`, and what is given.
    pub fn configure(&self, others: &str) -> Result<()> {
        let config = format!(
            "[pipeline]\nname = \"{name}\"\nstate = \"state\"\nplugins = \"plugins\"\n\n\
             [source]\nurl = \"{url}\"\npublication = \"pub\"\n\n\
             [[destination]]\nname = \"count\"\nplugin = \"count\"\nmode = \"changes\"\ntables = [\"*.*\"]\n\n{others}",
            name = self.source.name,
            url = self.source.url,
        );
        Ok(std::fs::write(self.pipeline.directory().join("tidegate.toml"), config)?)
    }

    fn files(&self) -> PathBuf {
        self.pipeline.directory().join("files")
    }

    /// The hostile destination.
    pub fn hostile(&self, name: &str, settings: &Value, limits: &str, grant: &str) -> String {
        let files = self.files();
        let mut settings = settings.clone();
        settings["keep"] = json!(files.join(name));
        let settings: String = settings
            .as_object()
            .into_iter()
            .flatten()
            .map(|(key, value)| {
                format!("{key} = {}\n", value.to_string().replace("{files}", &files.display().to_string()))
            })
            .collect();
        format!(
            "[[destination]]\nname = \"{name}\"\nplugin = \"hostile\"\nmode = \"changes\"\ntables = [\"*.*\"]\n\
             [destination.settings]\n{settings}[destination.limits]\nsettle_ms = 100\n{limits}\n\
             [destination.grant]\nfiles = [\"{}\"]\n{grant}\n\n",
            files.display()
        )
    }

    pub fn status(&self) -> Option<StatusReport> {
        self.runtime.block_on(tidegate::control::status(&self.pipeline.directory().join("state"))).ok().flatten()
    }

    fn destination(&self, name: &str) -> Option<DestinationStatus> {
        self.status()?.destinations.into_iter().find(|destination| destination.name == name)
    }

    /// Waits until something is so; an error after `patience`.
    pub fn wait(&mut self, what: &str, patience: Duration, mut look: impl FnMut(&World) -> bool) -> Result<()> {
        let start = Instant::now();
        while !look(self) {
            if let Some(code) = self.pipeline.ended() {
                return Err(format!("waiting until {what}: tidegate ended with {code}\n{}", self.tail()).into());
            }
            if start.elapsed() > patience {
                return Err(format!("not so after {patience:?}: {what}\n{:#?}\n{}", self.status(), self.tail()).into());
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }

    /// The end of the log.
    pub fn tail(&self) -> String {
        let log = self.pipeline.log();
        let lines: Vec<&str> = log.lines().collect();
        lines[lines.len().saturating_sub(15)..].join("\n")
    }

    /// A command on the pipeline, which has to go well.
    fn command(&self, arguments: &[&str]) -> Result<()> {
        let output = self.pipeline.command(arguments).env("HOSTILE_SECRET", SECRET).output()?;
        match output.status.success() {
            true => Ok(()),
            false => Err(format!("tidegate {arguments:?}: {}", String::from_utf8_lossy(&output.stderr)).into()),
        }
    }

    /// Starts it and waits until `count` is live.
    pub fn start(&mut self) -> Result<()> {
        self.changes = 0;
        self.pipeline.start_with(&[("HOSTILE_SECRET", SECRET)]);
        self.wait("count is ready", PATIENCE, |world| world.destination("count").is_some_and(|count| is_ready(&count)))
    }

    /// Inserts rows, and says how many of them `count` has each second.
    pub fn measure(&mut self, rows: u64) -> Result<f64> {
        let start = Instant::now();
        let (from, transactions) = (self.rows, rows / TRANSACTION);
        self.source.sql(&format!(
            "DO $$ BEGIN FOR i IN 0..{last} LOOP
               INSERT INTO t SELECT {from} + i * {TRANSACTION} + g, 'row' FROM generate_series(1, {TRANSACTION}) g; COMMIT;
             END LOOP; END $$",
            last = transactions - 1
        ));
        self.rows += rows;
        self.changes += rows;
        let wanted = self.changes;
        self.wait("count has all rows", PATIENCE, |world| {
            world.destination("count").is_some_and(|count| count.changes >= wanted)
        })?;
        Ok(rows as f64 / start.elapsed().as_secs_f64())
    }

    /// One row.
    pub fn insert(&mut self, note: &str) -> u64 {
        self.rows += 1;
        self.changes += 1;
        self.source.sql(&format!("INSERT INTO t VALUES ({}, '{note}')", self.rows));
        self.rows
    }

    /// Keys that a hostile destination has not written, of all that there are.
    fn missing(&self, name: &str, except: &BTreeSet<u64>) -> u64 {
        let text = std::fs::read_to_string(self.files().join(name)).unwrap_or_default();
        let there: BTreeSet<u64> = text.lines().filter_map(|line| line.parse().ok()).collect();
        (1..=self.rows).filter(|id| !there.contains(id) && !except.contains(id)).count() as u64
    }

    /// Waits until a destination has every row.
    pub fn wait_complete(&mut self, name: &str, except: &BTreeSet<u64>) -> Result<()> {
        self.wait(&format!("{name} has every row"), PATIENCE, |world| world.missing(name, except) == 0)
    }
}

fn is_ready(destination: &DestinationStatus) -> bool {
    let tables = &destination.tables;
    !tables.is_empty() && tables.iter().all(|table| table.state == TableState::Ready)
}

/// What a plugin is shown and nobody else is.
pub const SECRET: &str = "hunter2-of-the-hostile-run";

/// Runs a case.
pub fn run(case: &Case) -> Result<Outcome> {
    let mut world = World::new(case.name, &case.file)?;
    world.start()?;
    world.measure(ROWS / 4)?;
    let alone = world.measure(ROWS)?;
    world.configure(&world.hostile("hostile", &case.settings, case.limits, case.grant))?;
    world.pipeline.hang_up();
    let mut except = BTreeSet::new();
    let host = match case.expect {
        Expect::Refused(code) => {
            world.wait(&format!("the log has {code}"), SEEN, |world| world.pipeline.log().contains(code))?;
            format!("refused it with {code}")
        }
        _ => {
            world.wait("the destination is there", SEEN, |world| world.destination("hostile").is_some())?;
            String::new()
        }
    };
    if case.settings["changes"] == true {
        world
            .wait("the table is copied", SEEN, |world| world.destination("hostile").is_some_and(|it| is_ready(&it)))?;
    }
    if let Expect::Quarantined(_) = case.expect {
        world.wait_complete("hostile", &except)?;
        except.insert(world.insert("poison"));
    }
    let mut beside = world.measure(ROWS)?;
    // Others use the machine too: what matters is what can be had.
    let kept = kept()?;
    for _ in 1..TRIES {
        if beside < alone * kept {
            beside = beside.max(world.measure(ROWS)?);
        }
    }
    let host = if host.is_empty() { seen(&mut world, case)? } else { host };
    let ratio = beside / alone;
    if ratio < kept {
        return Err(format!("count had {alone:.0} rows/s alone and {beside:.0} beside it").into());
    }
    if case.audited && world.destination("hostile").and_then(|it| it.usage).is_none_or(|it| it.refused_permissions == 0)
    {
        return Err("no refusal was counted".into());
    }
    let lost = complete(&mut world, case, &except)?;
    Ok(Outcome { host, cost: format!("{:.0} % of {alone:.0} rows/s", ratio * 100.0), lost })
}

/// What `KEPT` says: a test among others, that has the machine to itself at no time, says 0.
fn kept() -> Result<f64> {
    std::env::var("KEPT").map_or(Ok(KEPT), |kept| Ok(kept.parse()?))
}

/// Waits until what has to come is seen, and says what it was.
fn seen(world: &mut World, case: &Case) -> Result<String> {
    let mut said = String::new();
    let mut look = |world: &World| {
        let Some(it) = world.destination("hostile") else { return false };
        let of_tables = it.tables.iter().filter_map(|table| table.error.as_ref());
        match case.expect {
            Expect::Works => it.error.is_none() && it.checkpoint.is_some(),
            Expect::Code(code) => {
                let seen = it.error.iter().chain(of_tables).find(|error| error.code == code);
                // One that goes right by itself may do so before anybody looks.
                let logged = || case.recovers && world.pipeline.log().contains(code);
                if let Some(error) = seen {
                    assert!(error.message.len() < 20_000 && !error.message.chars().any(char::is_control), "{error:?}");
                }
                said = code.to_owned();
                seen.is_some() || logged()
            }
            Expect::TableCode(code) => {
                said = code.to_owned();
                of_tables.into_iter().any(|error| error.code == code)
            }
            Expect::Quarantined(rows) => {
                said = format!("{rows} rows in quarantine");
                it.tables.iter().map(|table| table.quarantined).sum::<u64>() == rows
            }
            Expect::Refused(_) => true,
        }
    };
    world.wait(&format!("status says what {} did", case.name), SEEN, &mut look)?;
    let usage = world.destination("hostile").and_then(|it| it.usage).unwrap_or_default();
    let mut did = if said.is_empty() { "nothing to say".to_owned() } else { format!("said {said}") };
    for (count, what) in [
        (usage.traps, "traps"),
        (usage.timeouts, "time-outs"),
        (usage.broken_answers, "broken answers"),
        (usage.restarts, "restarts"),
    ] {
        if count > 0 {
            did.push_str(&format!(", {count} {what}"));
        }
    }
    Ok(did)
}

/// Every row is there in the end: by itself, or once the plugin is cured.
fn complete(world: &mut World, case: &Case, except: &BTreeSet<u64>) -> Result<String> {
    if case.recovers {
        world.wait_complete("hostile", except)?;
    } else {
        let tables = world.destination("hostile").map(|it| it.tables).unwrap_or_default();
        let stopped = tables.iter().any(|table| table.state == TableState::Errored);
        let quarantined = tables.iter().any(|table| table.quarantined > 0);
        if world.pipeline.stop() != 0 {
            return Err(format!("it did not stop in good order\n{}", world.tail()).into());
        }
        std::fs::write(world.pipeline.directory().join("plugins/hostile.wasm"), File::Whole.bytes()?)?;
        world.configure(&world.hostile("hostile", &json!({}), "", ""))?;
        if stopped {
            world.command(&["resync", "hostile", "public.t"])?;
        }
        world.start()?;
        // Up to three rows may have been blamed for what the plugin did.
        if quarantined {
            world.command(&["quarantine", "retry", "--destination", "hostile"])?;
        }
        world.wait_complete("hostile", except)?;
    }
    let log = world.pipeline.log();
    let status = world.status().map(|status| format!("{status:?}")).unwrap_or_default();
    if log.contains('\u{1b}') || log.contains(SECRET) || status.contains(SECRET) {
        return Err("the log has an escape code or a secret".into());
    }
    if world.pipeline.stop() != 0 {
        return Err(format!("it did not stop in good order\n{}", world.tail()).into());
    }
    Ok("nothing".to_owned())
}

/// A write that an instance left under way when it was ended arrives when its successor is
/// there, and is told from that one's by its generation.
pub fn late_write() -> Result<Outcome> {
    let listener = std::net::TcpListener::bind("127.0.0.1:0")?;
    let port = listener.local_addr()?.port();
    let (lines, said) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        for stream in listener.incoming().map_while(|stream| stream.ok()) {
            let lines = lines.clone();
            std::thread::spawn(move || {
                for line in BufReader::new(stream).lines().map_while(|line| line.ok()) {
                    // A write takes longer than the instance has.
                    let wait = if line.starts_with("write") { 2500 } else { 0 };
                    std::thread::sleep(Duration::from_millis(wait));
                    let _ = lines.send(line);
                }
            });
        }
    });
    let mut world = World::new("late-write", &File::Whole)?;
    world.start()?;
    let alone = world.measure(ROWS)?;
    let settings = json!({"on": "write-group", "do": "late-write", "host": "127.0.0.1", "port": port});
    let grant = format!("network = [\"127.0.0.1:{port}\"]");
    world.configure(&world.hostile("hostile", &settings, "call_idle_ms = 500", &grant))?;
    world.pipeline.hang_up();
    let beside = world.measure(ROWS)?;
    // Instances by the order in which they came, and writes that came behind a successor.
    let (mut newest, mut hellos, mut fenced) = (0_u64, 0, 0);
    let start = Instant::now();
    while (hellos < 3 || fenced < 1) && start.elapsed() < SEEN {
        let Ok(line) = said.recv_timeout(SEEN) else { break };
        let (what, generation) = line.split_once(' ').ok_or("a line without a generation")?;
        let generation: u64 = generation.parse()?;
        match what {
            "hello" if generation <= newest => {
                return Err(format!("generation {generation} came after {newest}").into());
            }
            "hello" => (newest, hellos) = (generation, hellos + 1),
            _ if generation < newest => fenced += 1,
            _ => {}
        }
    }
    if hellos < 3 || fenced < 1 {
        return Err(format!("{hellos} instances came, and {fenced} writes late\n{}", world.tail()).into());
    }
    let case = Case {
        name: "late-write",
        did: "",
        settings,
        limits: "",
        grant: "",
        file: File::Whole,
        expect: Expect::Code("plugin.timeout"),
        recovers: false,
        audited: false,
    };
    let lost = complete(&mut world, &case, &BTreeSet::new())?;
    let host = format!("{hellos} instances, each of a greater generation; {fenced} late writes told by it");
    Ok(Outcome { host, cost: format!("{:.0} % of {alone:.0} rows/s", beside / alone * 100.0), lost })
}
