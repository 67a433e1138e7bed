//! A scratch PostgreSQL cluster: made in a temporary directory, on a free port, gone
//! when its owner is gone. What `tidegate demo` and the tests replicate from and to.

use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::net::TcpListener;
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::{LazyLock, Mutex, PoisonError, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process, set_parent_process_death_signal};
use tempfile::TempDir;

use crate::error::{Error, Result};

mod standby;

/// Where distributions put the binaries, a directory per version.
const INSTALLED: [&str; 2] = ["/usr/lib/postgresql", "/usr"];
/// How long a fresh or crashed cluster may take to accept connections.
const START_TIMEOUT: Duration = Duration::from_secs(60);
/// How long a shutdown may take before the next, harder one.
const STOP_TIMEOUT: Duration = Duration::from_secs(10);
/// How often a state that only a file or a process shows is looked at.
const LOOK: Duration = Duration::from_millis(5);
/// Another process can take the port between our look and the server's.
const PORT_ATTEMPTS: u32 = 5;
/// Longest path of a socket, with room for `.s.PGSQL.65535.lock`.
const SOCKET_DIRECTORY_BYTES: usize = 85;
/// The superuser of every scratch cluster.
const SUPERUSER: &str = "postgres";

/// The settings every scratch cluster has; [`ClusterOptions::settings`] come after them
/// and win. Nothing in it is worth a disk flush; all else is as a source needs it.
const SETTINGS: [(&str, &str); 12] = [
    ("listen_addresses", "127.0.0.1"),
    ("wal_level", "logical"),
    ("max_replication_slots", "100"),
    ("max_wal_senders", "100"),
    ("max_connections", "200"),
    ("fsync", "off"),
    ("full_page_writes", "off"),
    ("shared_buffers", "64MB"),
    ("max_wal_size", "4GB"),
    ("jit", "off"),
    ("log_line_prefix", "%m [%p] %a "),
    ("timezone", "UTC"),
];

/// How clients of the cluster prove who they are.
#[derive(Clone, Debug, Default)]
pub enum Auth {
    /// They don't.
    #[default]
    Trust,
    /// SCRAM-SHA-256; this is the superuser's password.
    Scram(String),
}

/// A server certificate.
#[derive(Clone, Debug)]
pub struct Tls {
    /// PEM file of the certificate.
    pub certificate: PathBuf,
    /// PEM file of its key.
    pub key: PathBuf,
}

/// What a scratch cluster is to be like.
#[derive(Clone, Debug, Default)]
pub struct ClusterOptions {
    /// How clients prove who they are.
    pub auth: Auth,
    /// Offers TLS with this certificate.
    pub tls: Option<Tls>,
    /// Settings of the server, e.g. `("wal_level", "replica")`.
    pub settings: Vec<(String, String)>,
    /// Where the cluster's own directory is made; the system's temporary directory if
    /// it is left out.
    pub parent: Option<PathBuf>,
    /// Directory of `initdb` and `postgres`; found if it is left out.
    pub binaries: Option<PathBuf>,
}

impl ClusterOptions {
    /// Adds a setting of the server.
    pub fn setting(mut self, name: &str, value: &str) -> ClusterOptions {
        self.settings.push((name.to_owned(), value.to_owned()));
        self
    }
}

/// How a server is stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shutdown {
    /// Sessions are ended, all is written (SIGINT).
    Fast,
    /// As a crash of the machine would, but for what the kernel has (SIGQUIT).
    Immediate,
}

/// A running scratch cluster: stopped and removed when dropped, and when this process dies
/// without that.
pub struct Cluster {
    binaries: PathBuf,
    directory: TempDir,
    /// Removes the directory when this process is gone.
    sweeper: Child,
    account: Option<Account>,
    settings: Vec<(String, String)>,
    auth: Auth,
    port: u16,
    server: Option<Child>,
}

impl Cluster {
    /// Makes a cluster and waits until it accepts connections: about a second.
    ///
    /// # Errors
    /// `scratch.no-postgresql` if there are no binaries; `scratch.initdb` and
    /// `scratch.start` with the end of the log.
    pub fn start(options: &ClusterOptions) -> Result<Cluster> {
        let binaries = match &options.binaries {
            Some(binaries) => binaries.clone(),
            None => find_binaries()?,
        };
        let account = Account::for_server()?;
        let directory = make_directory(options.parent.as_deref(), account.as_ref());
        let (directory, sweeper) = directory.map_err(|error| {
            Error::permanent("scratch.directory", format!("cannot make a directory for a scratch cluster: {error}"))
                .next("Point TMPDIR at a directory that this user may write.")
        })?;
        let mut cluster = Cluster {
            binaries,
            settings: Vec::new(),
            auth: options.auth.clone(),
            port: 0,
            server: None,
            directory,
            sweeper,
            account,
        };
        cluster.initdb()?;
        cluster.collect_settings(options)?;
        cluster.launch_somewhere()?;
        Ok(cluster)
    }

    /// Starts the server on a port that is free.
    fn launch_somewhere(&mut self) -> Result<()> {
        for attempt in 1.. {
            self.port = free_port()?;
            match self.launch() {
                Err(error) if attempt < PORT_ATTEMPTS && error.message().contains("Address already in use") => {}
                Err(error) => return Err(error),
                Ok(()) => break,
            }
        }
        Ok(())
    }

    /// A URL for the superuser; with the password, if there is one.
    pub fn url(&self, database: &str) -> String {
        match &self.auth {
            Auth::Trust => self.url_as(SUPERUSER, None, database),
            Auth::Scram(password) => self.url_as(SUPERUSER, Some(password), database),
        }
    }

    /// A URL for another role. `sslmode` is `disable` unless the cluster has TLS: then
    /// it is left to the caller.
    pub fn url_as(&self, user: &str, password: Option<&str>, database: &str) -> String {
        let encode =
            |text: &str| percent_encoding::utf8_percent_encode(text, percent_encoding::NON_ALPHANUMERIC).to_string();
        let password = password.map(|password| format!(":{}", encode(password))).unwrap_or_default();
        let mode = if self.has_tls() { "" } else { "?sslmode=disable" };
        format!("postgres://{}{password}@127.0.0.1:{}/{}{mode}", encode(user), self.port, encode(database))
    }

    /// The port on 127.0.0.1; the same after [`Cluster::resume`].
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The cluster's own directory: `data`, `log`, and the socket.
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// The server's log so far.
    pub fn log(&self) -> String {
        fs::read_to_string(self.log_path()).unwrap_or_default()
    }

    /// Runs SQL with `psql`, as the superuser, and returns what it prints: rows without
    /// header, columns separated by `|`.
    ///
    /// # Errors
    /// `scratch.psql` with what `psql` says.
    pub fn psql(&self, database: &str, sql: &str) -> Result<String> {
        let output = Command::new(self.client("psql"))
            .args(["-X", "-q", "-A", "-t", "-v", "ON_ERROR_STOP=1", "-d", &self.url(database), "-c", sql])
            .stdin(Stdio::null())
            .output();
        match output {
            Ok(output) if output.status.success() => {
                Ok(String::from_utf8_lossy(&output.stdout).trim_end_matches('\n').to_owned())
            }
            Ok(output) => Err(Error::permanent("scratch.psql", stderr_of(&output))),
            Err(error) => Err(Error::permanent("scratch.psql", format!("cannot run psql: {error}"))
                .next("Install a PostgreSQL client (apt-get install postgresql-client).")),
        }
    }

    /// Stops the server and keeps its data; [`Cluster::resume`] starts it again.
    ///
    /// # Errors
    /// `scratch.stop` if the process can be neither stopped nor killed.
    pub fn halt(&mut self, how: Shutdown) -> Result<()> {
        let Some(mut server) = self.server.take() else { return Ok(()) };
        let signals = match how {
            Shutdown::Fast => &[Signal::INT, Signal::QUIT, Signal::KILL][..],
            Shutdown::Immediate => &[Signal::QUIT, Signal::KILL][..],
        };
        for signal in signals {
            send(&server, *signal);
            match wait(&mut server, STOP_TIMEOUT) {
                Ok(Some(_)) => return Ok(()),
                Ok(None) => {}
                Err(error) => {
                    return Err(Error::permanent("scratch.stop", format!("cannot stop the scratch cluster: {error}")));
                }
            }
        }
        Err(Error::permanent("scratch.stop", format!("the scratch cluster's process {} does not end", server.id()))
            .next("See whether its disk hangs."))
    }

    /// Starts a halted server again, on the same port, with the same data.
    ///
    /// # Errors
    /// `scratch.start` with the end of the log.
    pub fn resume(&mut self) -> Result<()> {
        match self.server {
            Some(_) => Ok(()),
            None => self.launch(),
        }
    }

    /// Stops the server and removes everything.
    ///
    /// # Errors
    /// `scratch.stop` if the process can be neither stopped nor killed.
    pub fn stop(mut self) -> Result<()> {
        self.halt(Shutdown::Fast)
    }

    /// A client program: packages of servers alone have none, and any version's will do.
    fn client(&self, name: &str) -> PathBuf {
        let beside = self.binaries.join(name);
        if beside.is_file() { beside } else { PathBuf::from(name) }
    }

    fn data(&self) -> PathBuf {
        self.directory.path().join("data")
    }

    fn log_path(&self) -> PathBuf {
        self.directory.path().join("log")
    }

    fn has_tls(&self) -> bool {
        self.settings.iter().any(|(name, value)| name == "ssl" && value == "on")
    }

    /// A command of the server's binaries, run by the account that may.
    fn command(&self, name: &str) -> Command {
        let mut command = Command::new(self.binaries.join(name));
        command
            .current_dir(self.directory.path())
            .env("HOME", self.directory.path())
            .env("LC_ALL", "C")
            .stdin(Stdio::null());
        for (name, _) in std::env::vars_os() {
            // PGDATA, PGPORT, PGOPTIONS, ...: the caller's, not this cluster's.
            if name.to_string_lossy().starts_with("PG") {
                command.env_remove(name);
            }
        }
        if let Some(account) = &self.account {
            command.uid(account.uid).gid(account.gid);
        }
        command
    }

    fn initdb(&self) -> Result<()> {
        let mut command = self.command("initdb");
        command.args(["--username", SUPERUSER, "--encoding", "UTF8", "--no-locale", "--no-sync", "--pgdata"]);
        command.arg(self.data());
        match &self.auth {
            Auth::Trust => {
                command.args(["--auth", "trust"]);
            }
            Auth::Scram(password) => {
                let file = self.directory.path().join("password");
                self.write_private(&file, password.as_bytes()).map_err(|error| {
                    Error::permanent("scratch.initdb", format!("cannot write {}: {error}", file.display()))
                })?;
                command.args(["--auth", "scram-sha-256", "--pwfile"]).arg(file);
            }
        }
        match command.output() {
            Ok(output) if output.status.success() => Ok(()),
            Ok(output) => Err(Error::permanent("scratch.initdb", format!("initdb failed: {}", stderr_of(&output)))
                .next(
                    "Make the directory and all above it readable for the server's user; TMPDIR chooses where it is.",
                )),
            Err(error) => Err(Error::permanent(
                "scratch.initdb",
                format!("cannot run {}: {error}", self.binaries.join("initdb").display()),
            )
            .next("Install the PostgreSQL server, or point TIDEGATE_PG_BIN at the directory of its binaries.")),
        }
    }

    fn collect_settings(&mut self, options: &ClusterOptions) -> Result<()> {
        let owned = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
        self.settings = SETTINGS.iter().map(owned).collect();
        let directory = self.directory.path().to_string_lossy().into_owned();
        let sockets = if directory.len() <= SOCKET_DIRECTORY_BYTES { directory } else { String::new() };
        self.settings.push(("unix_socket_directories".to_owned(), sockets));
        if let Some(tls) = &options.tls {
            self.settings.push(("ssl".to_owned(), "on".to_owned()));
            for (name, from, to) in
                [("ssl_cert_file", &tls.certificate, "server.crt"), ("ssl_key_file", &tls.key, "server.key")]
            {
                // The server refuses a key that others could read or that is not its own.
                let copy = self.directory.path().join(to);
                fs::read(from).and_then(|pem| self.write_private(&copy, &pem)).map_err(|error| {
                    Error::permanent("scratch.start", format!("cannot copy {}: {error}", from.display()))
                })?;
                self.settings.push((name.to_owned(), copy.to_string_lossy().into_owned()));
            }
        }
        self.settings.extend(options.settings.iter().cloned());
        Ok(())
    }

    fn write_private(&self, path: &Path, content: &[u8]) -> io::Result<()> {
        let mut file = File::create(path)?;
        file.set_permissions(Permissions::from_mode(0o600))?;
        file.write_all(content)?;
        match &self.account {
            Some(account) => chown(path, Some(account.uid), Some(account.gid)),
            None => Ok(()),
        }
    }

    /// Starts the server and waits until it accepts connections.
    fn launch(&mut self) -> Result<()> {
        let cannot = |error: &dyn std::fmt::Display| {
            Error::permanent("scratch.start", format!("cannot start the scratch cluster: {error}"))
        };
        let log = OpenOptions::new().create(true).append(true).open(self.log_path()).map_err(|error| cannot(&error))?;
        let before = log.metadata().map(|log| log.len()).unwrap_or_default();
        // A pid file that a crash left would be taken for the new server's.
        let _ = fs::remove_file(self.data().join("postmaster.pid"));
        let mut command = self.command("postgres");
        command.arg("-D").arg(self.data()).args(["-p", &self.port.to_string()]);
        for (name, value) in &self.settings {
            command.arg("-c").arg(format!("{name}={value}"));
        }
        command.stdout(Stdio::null()).stderr(log);
        let mut server = spawn_bound(command, Signal::QUIT).map_err(|error| cannot(&error))?;
        let deadline = Instant::now() + START_TIMEOUT;
        loop {
            match server.try_wait() {
                Ok(Some(status)) => return Err(cannot(&self.ended(status, before))),
                Ok(None) if self.accepts(server.id()) => break,
                Ok(None) if Instant::now() < deadline => thread::sleep(LOOK),
                Ok(None) => {
                    send(&server, Signal::KILL);
                    let _ = server.wait();
                    return Err(cannot(&format_args!("no connection accepted within {} s", START_TIMEOUT.as_secs())));
                }
                Err(error) => return Err(cannot(&error)),
            }
        }
        self.server = Some(server);
        Ok(())
    }

    /// What `pg_ctl` looks at: the eighth line of the pid file says `ready`.
    fn accepts(&self, pid: u32) -> bool {
        let Ok(text) = fs::read_to_string(self.data().join("postmaster.pid")) else { return false };
        let mut lines = text.lines();
        lines.next().is_some_and(|line| line.trim() == pid.to_string())
            && lines.nth(6).is_some_and(|line| line.trim() == "ready")
    }

    /// The status a server ended with, and the last lines it logged.
    fn ended(&self, status: ExitStatus, from: u64) -> String {
        let mut log = String::new();
        if let Ok(mut file) = File::open(self.log_path()) {
            let _ = file.seek(SeekFrom::Start(from));
            // A server that does not come up says little; this is only a bound.
            let _ = file.take(64 * 1024).read_to_string(&mut log);
        }
        let lines: Vec<&str> = log.lines().collect();
        let tail = lines[lines.len().saturating_sub(8)..].join("\n  ");
        format!("it ended with {status}:\n  {tail}")
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if let Err(error) = self.halt(Shutdown::Immediate) {
            tracing::warn!(code = error.code(), "{error}");
        }
        // It has nothing to wait for any more, and ends with the directory.
        drop(self.sweeper.stdin.take());
        let _ = self.sweeper.wait();
    }
}

/// A process that removes a directory once its input ends, which it does when this process
/// is gone, however that happens: what lives in a `static` is never dropped.
fn sweeper(directory: &Path) -> io::Result<Child> {
    // The server may still be at it.
    const SWEEP: &str = r#"read -r _; for _ in 1 2 3 4 5 6 7 8 9 10; do rm -rf "$1" && exit; sleep 1; done"#;
    Command::new("sh")
        .args(["-c", SWEEP, "sweeper"])
        .arg(directory)
        .process_group(0)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
}

/// Sends a signal to a child that has not been waited for.
pub(crate) fn send(server: &Child, signal: Signal) {
    if let Some(pid) = i32::try_from(server.id()).ok().and_then(Pid::from_raw) {
        // It is our child and not yet waited for, so the pid is its own; if it has ended,
        // the wait that follows sees that.
        let _ = kill_process(pid, signal);
    }
}

/// Waits for a child's end, for a bounded time; none if it still runs then.
pub(crate) fn wait(server: &mut Child, timeout: Duration) -> io::Result<Option<ExitStatus>> {
    let deadline = Instant::now() + timeout;
    loop {
        if let Some(status) = server.try_wait()? {
            return Ok(Some(status));
        }
        if Instant::now() >= deadline {
            return Ok(None);
        }
        thread::sleep(LOOK);
    }
}

type Spawned = (Command, mpsc::Sender<io::Result<Child>>);

/// Starts a process that gets `signal` when this one dies, however that happens.
///
/// It gets a process group of its own: Ctrl-C at the terminal is for this process, which
/// stops things in order.
pub(crate) fn spawn_bound(mut command: Command, signal: Signal) -> io::Result<Child> {
    // The kernel sends the signal when the *thread* that forked ends, and a test's or a
    // runtime's thread ends long before the process: so one that lives as long forks.
    static SPAWNER: LazyLock<Mutex<mpsc::Sender<Spawned>>> = LazyLock::new(|| {
        let (sender, receiver) = mpsc::channel::<Spawned>();
        thread::spawn(move || {
            for (mut command, answer) in receiver {
                // The asker waits for the answer below.
                let _ = answer.send(command.spawn());
            }
        });
        Mutex::new(sender)
    });
    command.process_group(0);
    // SAFETY: the closure makes one system call and touches no memory of the parent.
    unsafe {
        command.pre_exec(move || Ok(set_parent_process_death_signal(Some(signal))?));
    }
    let (answer, spawned) = mpsc::channel();
    let gone = || io::Error::other("the thread that starts processes is gone");
    SPAWNER.lock().unwrap_or_else(PoisonError::into_inner).send((command, answer)).map_err(|_| gone())?;
    spawned.recv().map_err(|_| gone())?
}

/// Who runs the server: PostgreSQL refuses to run as root.
#[derive(Clone, Debug)]
struct Account {
    uid: u32,
    gid: u32,
}

impl Account {
    /// None: this process's own user will do.
    fn for_server() -> Result<Option<Account>> {
        if !rustix::process::geteuid().is_root() {
            return Ok(None);
        }
        let passwd = fs::read_to_string("/etc/passwd").unwrap_or_default();
        let found = ["postgres", "nobody"].iter().find_map(|name| Account::find(&passwd, name));
        match found {
            Some(account) => Ok(Some(account)),
            None => Err(Error::permanent(
                "scratch.no-account",
                "PostgreSQL refuses to run as root, and there is neither a user postgres nor nobody",
            )
            .next("Run this as another user than root, or add a user postgres.")),
        }
    }

    fn find(passwd: &str, name: &str) -> Option<Account> {
        let line = passwd.lines().find(|line| line.split(':').next() == Some(name))?;
        let mut fields = line.split(':').skip(2);
        Some(Account { uid: fields.next()?.parse().ok()?, gid: fields.next()?.parse().ok()? })
    }
}

/// A directory for a cluster, and what removes it if nobody else does.
fn make_directory(parent: Option<&Path>, account: Option<&Account>) -> io::Result<(TempDir, Child)> {
    let mut builder = tempfile::Builder::new();
    builder.prefix("tidegate-pg-");
    let directory = match parent {
        Some(parent) => builder.tempdir_in(parent)?,
        None => builder.tempdir()?,
    };
    if let Some(account) = account {
        chown(directory.path(), Some(account.uid), Some(account.gid))?;
    }
    let sweeper = sweeper(directory.path())?;
    Ok((directory, sweeper))
}

fn free_port() -> Result<u16> {
    TcpListener::bind(("127.0.0.1", 0))
        .and_then(|listener| listener.local_addr())
        .map(|address| address.port())
        .map_err(|error| Error::permanent("scratch.start", format!("cannot find a free port on 127.0.0.1: {error}")))
}

/// The directory of `initdb` and `postgres`: TIDEGATE_PG_BIN, then PATH, then where
/// distributions install them, newest version first.
///
/// # Errors
/// `scratch.no-postgresql`.
pub fn find_binaries() -> Result<PathBuf> {
    let complete = |directory: &Path| directory.join("initdb").is_file() && directory.join("postgres").is_file();
    let missing = |message: String| {
        Error::no("scratch.no-postgresql", message)
            .next("Install the PostgreSQL server (apt-get install postgresql), or point TIDEGATE_PG_BIN at the directory of its binaries.")
    };
    if let Some(directory) = std::env::var_os("TIDEGATE_PG_BIN") {
        let directory = PathBuf::from(directory);
        return match complete(&directory) {
            true => Ok(directory),
            false => Err(missing(format!(
                "TIDEGATE_PG_BIN is {}, but initdb and postgres are not there",
                directory.display()
            ))),
        };
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    if let Some(directory) = std::env::split_paths(&path).find(|directory| complete(directory)) {
        // Links in /usr/local/bin lead to a directory that has the other binaries too.
        let initdb = fs::canonicalize(directory.join("initdb")).ok();
        return Ok(match initdb.as_deref().and_then(Path::parent) {
            Some(real) if complete(real) => real.to_owned(),
            _ => directory,
        });
    }
    let versions: BTreeSet<(u32, PathBuf)> = INSTALLED.iter().flat_map(|parent| installed(Path::new(parent))).collect();
    versions
        .into_iter()
        .rev()
        .map(|(_, directory)| directory)
        .find(|directory| complete(directory))
        .ok_or_else(|| missing("no PostgreSQL server binaries (initdb, postgres) are on this machine".to_owned()))
}

/// `<parent>/15/bin` and `<parent>/pgsql-15/bin` with their versions.
fn installed(parent: &Path) -> Vec<(u32, PathBuf)> {
    let Ok(entries) = fs::read_dir(parent) else { return Vec::new() };
    entries
        .filter_map(|entry| {
            let path = entry.ok()?.path();
            let name = path.file_name()?.to_str()?;
            let version = name.strip_prefix("pgsql-").unwrap_or(name).parse().ok()?;
            Some((version, path.join("bin")))
        })
        .collect()
}

fn stderr_of(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cluster_starts_answers_keeps_its_data_over_a_crash_and_leaves_nothing() {
        let mut cluster = Cluster::start(&ClusterOptions::default()).unwrap();
        assert_eq!(cluster.psql("postgres", "SHOW wal_level").unwrap(), "logical");
        cluster.psql("postgres", "CREATE TABLE kept AS SELECT 42 AS n").unwrap();
        let port = cluster.port();
        cluster.halt(Shutdown::Immediate).unwrap();
        assert!(cluster.psql("postgres", "SELECT 1").is_err());
        cluster.resume().unwrap();
        assert_eq!(cluster.port(), port);
        assert_eq!(cluster.psql("postgres", "SELECT n FROM kept").unwrap(), "42");
        let directory = cluster.directory().to_owned();
        cluster.stop().unwrap();
        assert!(!directory.exists());
        assert!(TcpListener::bind(("127.0.0.1", port)).is_ok());
    }

    #[test]
    fn the_directory_of_a_cluster_goes_when_its_process_does() {
        let directory = tempfile::tempdir().unwrap();
        let cluster = directory.path().join("cluster");
        fs::create_dir_all(cluster.join("data")).unwrap();
        let mut sweeper = sweeper(&cluster).unwrap();
        assert!(sweeper.try_wait().unwrap().is_none());
        // What the kernel does with the pipe of a process that is gone.
        drop(sweeper.stdin.take());
        assert!(sweeper.wait().unwrap().success());
        assert!(!cluster.exists());
    }

    #[test]
    fn a_cluster_with_scram_asks_for_the_password() {
        let options = ClusterOptions { auth: Auth::Scram("s3cret/?".to_owned()), ..ClusterOptions::default() };
        let cluster = Cluster::start(&options).unwrap();
        assert_eq!(cluster.psql("postgres", "SELECT 1").unwrap(), "1");
        cluster.psql("postgres", "CREATE ROLE reader LOGIN PASSWORD 'other'").unwrap();
        let wrong = cluster.url_as("reader", Some("wrong"), "postgres");
        let output = Command::new(cluster.client("psql")).args(["-d", &wrong, "-c", "SELECT 1"]).output().unwrap();
        assert!(stderr_of(&output).contains("password authentication failed"), "{output:?}");
    }

    #[test]
    fn a_server_that_does_not_come_up_is_an_error_with_its_log() {
        let options = ClusterOptions::default().setting("wal_level", "nonsense");
        let error = Cluster::start(&options).err().unwrap();
        assert_eq!(error.code(), "scratch.start");
        assert!(error.message().contains("invalid value for parameter \"wal_level\""), "{error}");
    }

    #[test]
    fn the_server_outlives_the_thread_that_started_it() {
        let cluster = thread::spawn(|| Cluster::start(&ClusterOptions::default()).unwrap()).join().unwrap();
        assert_eq!(cluster.psql("postgres", "SELECT 1").unwrap(), "1");
    }

    #[test]
    fn accounts_are_found_by_their_whole_name() {
        let passwd = "postgresql:x:1:1::/:/bin/sh\npostgres:x:101:104:a:/var/lib/postgresql:/bin/bash\n";
        let account = Account::find(passwd, "postgres").unwrap();
        assert_eq!((account.uid, account.gid), (101, 104));
        assert!(Account::find(passwd, "nobody").is_none());
    }
}
