//! Two servers, bad links to them, a host between, writers, and what has to be true of them.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use rand::SeedableRng;
use rand::rngs::StdRng;
use tempfile::TempDir;
use tidegate::position::Lsn;
use tidegate::scratch::{Cluster, ClusterOptions, Shutdown};
use tidegate::status::StatusReport;
use tidegate::store::TableState;

use crate::fold::Log;
use crate::host::{Ended, Host};
use crate::monitor::Monitor;
use crate::proxy::{Link, Proxy};
use crate::sql::Sql;
use crate::tables::{self, MIRROR_AUDIT};
use crate::traffic::{Alterations, Traffic};
use crate::{Result, check};

/// Destinations of every pipeline here.
const DESTINATIONS: usize = 2;
/// How long the ends may take to be equal once nothing is in the way.
const PATIENCE: Duration = Duration::from_secs(120);
/// How long a process may take from its start until it answers.
const UP: Duration = Duration::from_secs(60);
/// Of the file system that the state is on, where it is one of its own.
const STATE_MEGABYTES: u64 = 400;

/// What a run came to.
#[derive(Clone, Debug, Default)]
pub struct Tally {
    pub kills: u64,
    /// Names of places at which a process died.
    pub points: Vec<String>,
    /// Other faults, by how often.
    pub faults: std::collections::BTreeMap<&'static str, u64>,
    pub verified: u64,
    /// Rows written at the mirror and read from the log, all of them looked at.
    pub applied: u64,
    pub logged: u64,
    pub transactions: u64,
    pub alterations: u64,
    pub looks: u64,
}

impl Tally {
    pub fn add(&mut self, other: &Tally) {
        self.kills += other.kills;
        for point in &other.points {
            if !self.points.contains(point) {
                self.points.push(point.clone());
            }
        }
        for (name, count) in &other.faults {
            *self.faults.entry(name).or_default() += count;
        }
        self.verified += other.verified;
        self.applied += other.applied;
        self.logged += other.logged;
        self.transactions += other.transactions;
        self.alterations += other.alterations;
        self.looks += other.looks;
    }
}

/// See the module. Fields are dropped in this order: the host before its servers.
pub struct World {
    pub rng: StdRng,
    pub tally: Tally,
    pub host: Host,
    pub traffic: Traffic,
    pub monitor: Monitor,
    pub alterations: Alterations,
    pub log: Log,
    pub to_source: Proxy,
    pub to_mirror: Proxy,
    /// A file that fills the state's file system while it is there.
    state: State,
    pub source: Cluster,
    pub mirror: Cluster,
    directory: TempDir,
    /// Changes up to this were at both ends at the last look.
    pub watermark: i64,
    /// Last key of `bulk`.
    bulk: u64,
}

/// The state directory, on a file system of its own where that can be had.
struct State {
    path: PathBuf,
    mounted: bool,
}

impl State {
    fn make(path: PathBuf) -> Result<State> {
        std::fs::create_dir(&path)?;
        let size = format!("size={STATE_MEGABYTES}m");
        let mount = Command::new("mount").args(["-t", "tmpfs", "-o", &size, "tidegate-chaos"]).arg(&path).output();
        let mounted = mount.is_ok_and(|output| output.status.success());
        Ok(State { path, mounted })
    }
}

impl Drop for State {
    fn drop(&mut self) {
        if self.mounted {
            // Lazily: whoever still has a file there keeps it until then.
            let _ = Command::new("umount").arg("-l").arg(&self.path).output();
        }
    }
}

impl World {
    pub fn make(seed: u64) -> Result<World> {
        let source = Cluster::start(
            &ClusterOptions::default()
                .setting("wal_sender_timeout", "5s")
                .setting("deadlock_timeout", "100ms")
                // Large transactions are spilled or streamed early.
                .setting("logical_decoding_work_mem", "1MB"),
        )?;
        let mirror = Cluster::start(&ClusterOptions::default())?;
        source.psql("postgres", "CREATE DATABASE chaos")?;
        mirror.psql("postgres", "CREATE DATABASE chaos")?;
        source.psql("chaos", &tables::source_schema())?;
        mirror.psql("chaos", MIRROR_AUDIT)?;
        let (to_source, to_mirror) = (Proxy::start(source.port())?, Proxy::start(mirror.port())?);
        let directory = tempfile::Builder::new().prefix("tidegate-chaos-").tempdir()?;
        let lake = directory.path().join("lake");
        std::fs::create_dir(&lake)?;
        let state = State::make(directory.path().join("state"))?;
        std::fs::write(directory.path().join("tidegate.toml"), configuration(to_source.port(), to_mirror.port())?)?;
        let host = Host::new(directory.path())?;
        host.run(&["trigger", "install"])?;
        let url = source.url("chaos");
        Ok(World {
            rng: StdRng::seed_from_u64(seed),
            tally: Tally::default(),
            host,
            traffic: Traffic::start(&url, seed),
            monitor: Monitor::start(&url, "tidegate_chaos".to_owned(), state.path.clone(), DESTINATIONS),
            alterations: Alterations::new(seed),
            log: Log::new(lake),
            to_source,
            to_mirror,
            state,
            source,
            mirror,
            directory,
            watermark: 0,
            bulk: 0,
        })
    }

    /// A session with the source that no proxy disturbs.
    pub fn at_source(&self) -> Result<Sql> {
        Sql::connect(&self.source.url("chaos"))
    }

    pub fn at_mirror(&self) -> Result<Sql> {
        Sql::connect(&self.mirror.url("chaos"))
    }

    /// Leaves the directory where it is, and says where.
    pub fn keep(&mut self) -> PathBuf {
        if self.state.mounted {
            // Its file system goes with us. What cannot be copied is missing for the
            // reader's eyes only.
            let _ = Command::new("cp")
                .arg("-a")
                .arg(&self.state.path)
                .arg(self.directory.path().join("state-kept"))
                .output();
        }
        self.directory.disable_cleanup(true);
        self.directory.path().to_owned()
    }

    // ---- the process -----------------------------------------------------------------

    /// Starts the host as a supervisor would: until it stays.
    pub fn up(&mut self) -> Result<()> {
        let start = Instant::now();
        loop {
            if self.host.pid().is_none() {
                self.host.start(None)?;
            }
            if self.host.status().is_some() {
                return Ok(());
            }
            // What is not there at its start it refuses, with this code; with any other it
            // must not end.
            if let Some(ended) = self.host.ended()?
                && (ended != Ended::Exited(3) || start.elapsed() > UP)
            {
                return Err(format!("the host ended by itself: {ended:?}").into());
            }
            if start.elapsed() > UP * 2 {
                return Err("the host does not answer".into());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// The host has no reason to end by itself.
    pub fn stays(&mut self) -> Result<()> {
        if self.host.pid().is_some()
            && let Some(ended) = self.host.ended()?
        {
            return Err(format!("the host ended by itself: {ended:?}").into());
        }
        self.monitor.check()?;
        self.traffic.check()
    }

    pub fn kill(&mut self) -> Result<()> {
        self.stays()?;
        self.host.kill()?;
        self.tally.kills += 1;
        Ok(())
    }

    /// Ends it in good order.
    pub fn stop(&mut self) -> Result<()> {
        self.host.terminate()?;
        match self.host.wait(Duration::from_secs(60))? {
            Some(Ended::Exited(0)) => Ok(()),
            Some(ended) => Err(format!("the host was asked to stop and ended with {ended:?}").into()),
            None => Err("the host was asked to stop and did not".into()),
        }
    }

    /// Has tables copied again at the next start. The host must not run.
    pub fn resync(&mut self, tables: &[&str]) -> Result<()> {
        for table in tables::TABLES.iter().filter(|table| tables.contains(&table.name)) {
            for (destination, takes) in [("mirror", table.mirrored), ("lake", table.logged)] {
                if takes {
                    self.host.run(&["resync", destination, &format!("public.{}", table.name)])?;
                }
            }
        }
        Ok(())
    }

    // ---- what is done to it ----------------------------------------------------------

    /// So many MB in one transaction, or more.
    pub fn flood(&mut self, megabytes: u64, transactions: u64) -> Result<()> {
        let session = self.at_source()?;
        for _ in 0..transactions {
            let first = self.bulk + 1;
            self.bulk += megabytes / transactions;
            session.run(&format!(
                "BEGIN; DELETE FROM bulk WHERE id < {}; INSERT INTO bulk (id, body) SELECT g, repeat(md5(g::text), 32768) FROM generate_series({first}, {}) g; COMMIT",
                first.saturating_sub(40),
                self.bulk
            ))?;
        }
        Ok(())
    }

    /// So many rows in one transaction, with savepoints that are kept and others that are
    /// not.
    pub fn large_transaction(&mut self, rows: u64) -> Result<()> {
        let first = self.bulk + 1;
        self.bulk += rows;
        let last = self.bulk;
        self.at_source()?.run(&format!(
            "BEGIN; DELETE FROM bulk WHERE id < {first};
             INSERT INTO bulk (id, body) SELECT g, repeat('x', 500) FROM generate_series({first}, {last}) g;
             SAVEPOINT one; UPDATE bulk SET body = 'undone'; DELETE FROM bulk WHERE id % 3 = 0; ROLLBACK TO one;
             SAVEPOINT two; UPDATE bulk SET body = id::text WHERE id % 5 = 0; RELEASE two;
             SAVEPOINT three; DELETE FROM bulk WHERE id % 2 = 0; SAVEPOINT four; TRUNCATE bulk; ROLLBACK TO four; RELEASE three;
             COMMIT"
        ))
    }

    pub fn alter(&mut self) -> Result<()> {
        let Ok(session) = self.at_source() else { return Ok(()) };
        if self.alterations.alter(&session)? {
            self.tally.alterations += 1;
        }
        Ok(())
    }

    /// Whether the disk can be filled without harm to anybody else.
    pub fn has_own_disk(&self) -> bool {
        self.state.mounted
    }

    pub fn fill_disk(&self) -> Result<()> {
        use std::io::Write;
        let mut file = std::fs::File::create(self.filler())?;
        let zeros = vec![0; 64 * 1024];
        while file.write_all(&zeros).is_ok() {}
        // And the last bytes.
        while file.write_all(&zeros[..512]).is_ok() {}
        Ok(())
    }

    pub fn free_disk(&self) -> Result<()> {
        match std::fs::remove_file(self.filler()) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error.into()),
            _ => Ok(()),
        }
    }

    fn filler(&self) -> PathBuf {
        self.state.path.join("filler")
    }

    /// Everything is as it should be, but for the process, which may be dead.
    pub fn heal(&mut self) -> Result<()> {
        self.to_source.set(Link::Open);
        self.to_mirror.set(Link::Open);
        self.free_disk()?;
        self.source.resume()?;
        self.mirror.resume()?;
        Ok(())
    }

    pub fn crash_source(&mut self) -> Result<()> {
        Ok(self.source.halt(Shutdown::Immediate)?)
    }

    pub fn stop_mirror(&mut self, how: Shutdown) -> Result<()> {
        Ok(self.mirror.halt(how)?)
    }

    // ---- what has to be true ---------------------------------------------------------

    /// Waits until both ends have everything, and proves it.
    pub fn verify(&mut self) -> Result<()> {
        self.heal()?;
        self.up()?;
        self.traffic.pause();
        let verified = self.wait_equal().and_then(|()| check::all(self));
        self.traffic.resume();
        verified?;
        self.tally.verified += 1;
        self.tally.looks = self.monitor.looks();
        self.tally.transactions = self.traffic.committed();
        self.stays()
    }

    /// Waits until the host says that everything is durable at both ends.
    ///
    /// What waited in the spool counts for the checkpoint, and its table is ready once all
    /// of it was sent: a checkpoint behind that moment tells that it is durable as well.
    fn wait_equal(&mut self) -> Result<()> {
        self.wait_ready()?;
        self.wait_ready()
    }

    /// Waits until every table is ready, and every checkpoint beyond what is committed now.
    fn wait_ready(&mut self) -> Result<()> {
        let session = self.at_source()?;
        // Whatever a checkpoint is at, it is not beyond this.
        session.run("SELECT pg_logical_emit_message(true, 'chaos', 'mark')")?;
        let target: Lsn =
            session.one("SELECT pg_current_wal_insert_lsn()")?.parse().map_err(|error| format!("an LSN: {error}"))?;
        // A commit behind it, so that nothing depends on keepalives.
        session.run("SELECT pg_logical_emit_message(true, 'chaos', 'mark')")?;
        let start = Instant::now();
        loop {
            self.stays()?;
            let status = self.host.status();
            if let Some(status) = &status {
                check::nothing_errored(status)?;
                if status.destinations.len() == DESTINATIONS && is_there(status, target) {
                    return Ok(());
                }
            }
            if start.elapsed() > PATIENCE {
                return Err(format!(
                    "the ends are not equal {PATIENCE:?} after everything was in order, at {target}: {status:#?}"
                )
                .into());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

fn is_there(status: &StatusReport, target: Lsn) -> bool {
    status.destinations.iter().all(|destination| {
        let wanted = tables::names(|table| if destination.name == "mirror" { table.mirrored } else { table.logged });
        destination.checkpoint.is_some_and(|checkpoint| checkpoint >= target)
            && destination.tables.len() == wanted.len()
            && destination.tables.iter().all(|table| table.state == TableState::Ready)
    })
}

fn configuration(source: u16, mirror: u16) -> Result<String> {
    let plugins = match std::env::var_os("TIDEGATE_PLUGINS") {
        Some(directory) => PathBuf::from(directory),
        None => Path::new(env!("CARGO_MANIFEST_DIR")).join("../plugins"),
    };
    if !plugins.join("postgres.wasm").exists() {
        return Err(format!("{} has no postgres.wasm: run `make plugins` first", plugins.display()).into());
    }
    let without = |wanted: fn(&tables::Table) -> bool| {
        let left_out = tables::names(|table| !wanted(table)).into_iter().map(|name| format!(", \"!public.{name}\""));
        left_out.collect::<String>()
    };
    Ok(format!(
        r#"[pipeline]
name = "chaos"
state = "state"
plugins = {plugins:?}

[source]
url = "postgres://postgres@127.0.0.1:{source}/chaos?sslmode=disable"
publication = "pub"
copy_resume_bytes = 1

[[destination]]
name = "mirror"
plugin = "postgres"
mode = "merge"
tables = ["*.*"{for_mirror}]
[destination.settings]
host = "127.0.0.1"
port = {mirror}
database = "chaos"
user = "postgres"
sslmode = "disable"
[destination.grant]
network = ["127.0.0.1:{mirror}"]
secrets = {{ password = {{ from = "env:TIDEGATE_TEST_PASSWORD", readable = true }} }}

[[destination]]
name = "lake"
plugin = "files"
mode = "changes"
tables = ["*.*"{for_lake}]
[destination.settings]
path = "lake"
format = "ndjson"
[destination.grant]
files = [{{ path = "lake", mode = "read-write" }}]
# Every change waits there until the mirror, which takes longer for it, has it.
[destination.schema]
apply = "staged-rollout"
quorum = ["mirror"]
"#,
        for_mirror = without(|table| table.mirrored),
        for_lake = without(|table| table.logged),
    ))
}
