//! What the end-to-end tests share: servers, pipelines as child processes, waiting.
//!
//! Each test has its own databases, slot and directory; the servers are shared by the
//! tests of one process.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tidegate::scratch::{Cluster, ClusterOptions};
use tidegate::status::StatusReport;

pub mod majors;

/// How long a condition may take to come true before its test fails.
const PATIENCE: Duration = Duration::from_secs(90);

/// The server that is replicated from.
pub fn source() -> &'static Cluster {
    static SOURCE: OnceLock<Cluster> = OnceLock::new();
    SOURCE.get_or_init(cluster)
}

/// A server of its own for destinations: one in the source's cluster would delay the
/// snapshots of copies.
pub fn mirror() -> &'static Cluster {
    static MIRROR: OnceLock<Cluster> = OnceLock::new();
    MIRROR.get_or_init(cluster)
}

fn cluster() -> Cluster {
    // A slot and a walsender for each pipeline of each test, and one more for its copies.
    Cluster::start(&ClusterOptions::default()).expect("a scratch PostgreSQL cluster starts")
}

/// Makes a database whose name no other test has.
pub fn database(cluster: &Cluster, test: &str) -> Database {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let name = format!("{test}_{}", COUNT.fetch_add(1, Ordering::Relaxed));
    cluster.psql("postgres", &format!("CREATE DATABASE {name}")).expect("the database is created");
    Database { url: cluster.url(&name), port: cluster.port(), name }
}

/// A test's database.
#[derive(Clone)]
pub struct Database {
    /// For clients.
    pub url: String,
    /// The server's port on 127.0.0.1.
    pub port: u16,
    /// The database's name.
    pub name: String,
}

impl Database {
    /// Runs SQL with `psql`, all of it or an error, and returns what it prints.
    pub fn sql(&self, sql: &str) -> String {
        let output = Command::new("psql")
            .args(["-X", "-q", "-A", "-t", "-v", "ON_ERROR_STOP=1", "-d", &self.url, "-c", sql])
            .output()
            .expect("psql runs");
        assert!(output.status.success(), "psql: {}\n{sql}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).expect("UTF-8").trim_end().to_owned()
    }

    /// Runs a script with `psql`, each statement by itself, up to the first error, which
    /// there must not be.
    pub fn script(&self, script: &str) {
        let mut psql = Command::new("psql")
            .args(["-X", "-q", "-v", "ON_ERROR_STOP=1", "-d", &self.url, "-f", "-"])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .expect("psql runs");
        psql.stdin.take().expect("it was asked for").write_all(script.as_bytes()).expect("psql reads");
        let output = psql.wait_with_output().expect("psql ends");
        assert!(output.status.success(), "psql: {}\n{script}", String::from_utf8_lossy(&output.stderr));
    }

    /// Rows of a table, as text, in an order of their own.
    pub fn rows(&self, table: &str) -> Vec<String> {
        self.sql(&format!("SELECT t::text FROM {table} t ORDER BY 1")).lines().map(str::to_owned).collect()
    }
}

/// The binary under test: beside the caller's own, a test's or a tool's, or `TIDEGATE_BIN`.
pub fn tidegate() -> PathBuf {
    if let Some(binary) = std::env::var_os("TIDEGATE_BIN") {
        return binary.into();
    }
    let test = std::env::current_exe().expect("the test knows its own path");
    // A test is in <profile>/deps, another binary in <profile>.
    let mut profiles = test.ancestors().skip(1).take(2).map(|directory| directory.join("tidegate"));
    let binary = profiles.find(|binary| binary.is_file());
    binary
        .unwrap_or_else(|| panic!("{} has no tidegate beside it: run `cargo build -p tidegate` first", test.display()))
}

/// The directory of fixtures: `TIDEGATE_FIXTURES`, or what `make fixtures` fills.
pub fn fixtures() -> PathBuf {
    let default = || {
        let test = std::env::current_exe().expect("the test knows its own path");
        let mut places = test.ancestors().skip(2).take(2).map(|directory| directory.join("fixtures"));
        places.find(|directory| directory.exists()).unwrap_or_default()
    };
    let directory = std::env::var_os("TIDEGATE_FIXTURES").map_or_else(default, PathBuf::from);
    assert!(directory.exists(), "`{}` is missing: run `make fixtures` first", directory.display());
    directory
}

/// The directory of built plugins: `TIDEGATE_PLUGINS`, or what `make plugins` fills.
pub fn plugins() -> PathBuf {
    let directory = std::env::var_os("TIDEGATE_PLUGINS")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../plugins"), PathBuf::from);
    assert!(directory.exists(), "{} is missing: run `make plugins` first", directory.display());
    directory
}

/// A pipeline, as configured, with a child process while it runs.
pub struct Pipeline {
    directory: tempfile::TempDir,
    child: Option<Child>,
}

impl Pipeline {
    /// Writes `tidegate.toml` in a directory of its own. `{dir}` in `destinations` stands
    /// for that directory.
    pub fn new(source: &Database, destinations: &str) -> Pipeline {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let config = format!(
            "[pipeline]\nname = \"{name}\"\nstate = \"state\"\nplugins = \"{plugins}\"\n\n\
             [source]\nurl = \"{url}\"\npublication = \"pub\"\n\n{destinations}\n",
            name = source.name,
            plugins = plugins().display(),
            url = source.url,
            destinations = destinations.replace("{dir}", &directory.path().display().to_string()),
        );
        std::fs::write(directory.path().join("tidegate.toml"), config).expect("the configuration is written");
        Pipeline { directory, child: None }
    }

    /// The pipeline's own directory.
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// A command of the binary on this pipeline.
    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(tidegate());
        command.args(arguments).arg("--config").arg(self.directory.path().join("tidegate.toml"));
        command
    }

    /// Starts `tidegate run`; its log goes to a file.
    pub fn start(&mut self) {
        self.start_with(&[]);
    }

    /// The same with environment variables.
    pub fn start_with(&mut self, environment: &[(&str, &str)]) {
        assert!(self.child.is_none(), "it runs already");
        let log = std::fs::File::options().create(true).append(true).open(self.log_path()).expect("the log file opens");
        let child = self
            .command(&["run", "--log", "human"])
            .env("TIDEGATE_TEST_PASSWORD", "unused")
            .envs(environment.iter().copied())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .expect("tidegate starts");
        self.child = Some(child);
    }

    /// Ends it as a crash would.
    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.kill().expect("SIGKILL is sent");
            child.wait().expect("the process is gone");
        }
    }

    /// Ends it in good order and returns the exit code.
    pub fn stop(&mut self) -> i32 {
        let Some(mut child) = self.child.take() else { panic!("it does not run") };
        let pid = child.id().to_string();
        let sent = Command::new("kill").args(["-TERM", &pid]).status().expect("kill runs");
        assert!(sent.success());
        child.wait().expect("the process is gone").code().unwrap_or(-1)
    }

    /// Asks it to take up its configuration again.
    pub fn hang_up(&self) {
        let Some(child) = &self.child else { panic!("it does not run") };
        let sent = Command::new("kill").args(["-HUP", &child.id().to_string()]).status().expect("kill runs");
        assert!(sent.success());
    }

    /// Whether the process has ended, and its exit code.
    pub fn ended(&mut self) -> Option<i32> {
        let ended = self.child.as_mut()?.try_wait().expect("the process can be asked")?;
        self.child = None;
        Some(ended.code().unwrap_or(-1))
    }

    /// Waits for the process to end by itself.
    pub fn wait_end(&mut self) -> i32 {
        wait_for("the process ends", || self.ended())
    }

    /// What `status --json` says.
    pub fn status(&self) -> Option<StatusReport> {
        let output = self.command(&["status", "--json"]).output().expect("tidegate status runs");
        output.status.success().then(|| serde_json::from_slice(&output.stdout).expect("status is JSON"))
    }

    /// Waits until `status` satisfies a condition.
    pub fn wait_status(&mut self, what: &str, condition: impl Fn(&StatusReport) -> bool) -> StatusReport {
        let start = Instant::now();
        loop {
            let status = self.status();
            // A process tells of itself before it tells of its destinations.
            if let Some(status) = &status
                && status.pid.is_some()
                && !status.destinations.is_empty()
                && condition(status)
            {
                return status.clone();
            }
            if let Some(code) = self.ended() {
                panic!("waiting until {what}: tidegate ended with {code}\n{}", self.log());
            }
            assert!(start.elapsed() < PATIENCE, "waiting until {what}: {status:#?}\n{}", self.log());
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Waits until every table of every destination is live.
    pub fn wait_ready(&mut self) -> StatusReport {
        self.wait_status("all tables are ready", StatusReport::all_ready)
    }

    /// Waits until every destination has everything committed at the source so far.
    pub fn wait_caught_up(&mut self, source: &Database) -> StatusReport {
        // Whatever a checkpoint is at, it is not beyond this.
        source.sql("SELECT pg_logical_emit_message(true, 'tidegate-test', 'mark')");
        let target: tidegate::position::Lsn = source.sql("SELECT pg_current_wal_insert_lsn()").parse().expect("an LSN");
        // A commit of a published table behind `target`, so that waiting does not depend
        // on keepalives.
        source.sql("SELECT pg_logical_emit_message(true, 'tidegate-test', 'mark')");
        self.wait_status("all destinations have caught up", |status| {
            status.destinations.iter().all(|destination| destination.checkpoint.is_some_and(|at| at >= target))
        })
    }

    /// Installs the DDL trigger at the source.
    pub fn install_trigger(&self) {
        let output = self.command(&["trigger", "install"]).output().expect("the command runs");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }

    /// The log so far.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.log_path()).unwrap_or_default()
    }

    fn log_path(&self) -> PathBuf {
        self.directory.path().join("tidegate.log")
    }
}

impl Drop for Pipeline {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Transactions at a source, one behind the other, until it is dropped.
pub struct Traffic {
    stop: Arc<AtomicBool>,
    done: Arc<AtomicU32>,
    thread: Option<JoinHandle<()>>,
}

impl Traffic {
    /// `work`: the SQL of the transaction of this number.
    pub fn start(source: &Database, work: impl Fn(u32) -> String + Send + 'static) -> Traffic {
        let (stop, done) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU32::new(0)));
        let (stopped, counter, source) = (stop.clone(), done.clone(), source.clone());
        let thread = std::thread::spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                source.sql(&work(counter.load(Ordering::Relaxed)));
                counter.fetch_add(1, Ordering::Relaxed);
            }
        });
        Traffic { stop, done, thread: Some(thread) }
    }

    /// Waits until as many transactions more were committed.
    pub fn wait_for(&self, more: u32) {
        let from = self.done.load(Ordering::Relaxed);
        wait_for("traffic goes on", || (self.done.load(Ordering::Relaxed) >= from + more).then_some(()));
    }

    /// Ends behind the transaction under way.
    pub fn stop(mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.take().expect("it runs").join().expect("every transaction was committed");
    }
}

impl Drop for Traffic {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

/// Waits until something is there.
pub fn wait_for<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(start.elapsed() < PATIENCE, "waiting until {what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// A `[[destination]]` that mirrors into another database.
pub fn postgres_destination(name: &str, mirror: &Database) -> String {
    format!(
        "[[destination]]\nname = \"{name}\"\nplugin = \"postgres\"\nmode = \"merge\"\ntables = [\"*.*\"]\n\
         [destination.settings]\nhost = \"127.0.0.1\"\nport = {port}\ndatabase = \"{database}\"\nuser = \"postgres\"\nsslmode = \"disable\"\n\
         [destination.grant]\nnetwork = [\"127.0.0.1:{port}\"]\nsecrets = {{ password = {{ from = \"env:TIDEGATE_TEST_PASSWORD\", readable = true }} }}\n",
        port = mirror.port,
        database = mirror.name,
    )
}

/// A `[[destination]]` that writes files under `{dir}/<name>`.
pub fn files_destination(name: &str, format: &str) -> String {
    format!(
        "[[destination]]\nname = \"{name}\"\nplugin = \"files\"\nmode = \"changes\"\ntables = [\"*.*\"]\n\
         [destination.settings]\npath = \"{{dir}}/{name}\"\nformat = \"{format}\"\n\
         [destination.grant]\nfiles = [{{ path = \"{{dir}}/{name}\", mode = \"read-write\" }}]\n"
    )
}
