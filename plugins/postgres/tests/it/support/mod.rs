//! A scratch PostgreSQL cluster, connections over the operating system, and rows.

pub mod rows;

use std::cell::RefCell;
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::rc::Rc;
use std::sync::{Mutex, OnceLock};
use std::time::{Duration, Instant};

use postgres::connect::{Connector, Stream};
use postgres::mirror::{Identity, Mirror};
use postgres::settings::Settings;
use tidegate_sdk::model::Failure;

/// One server for all tests of a binary; each test has databases of its own.
pub struct Server {
    pub port: u16,
    postmaster: u32,
    _directory: tempfile::TempDir,
}

/// Where the server's programs are: `PG_BIN`, the path, or Debian's place, newest first.
fn programs() -> PathBuf {
    if let Some(bin) = std::env::var_os("PG_BIN") {
        return bin.into();
    }
    let mut places: Vec<PathBuf> = std::env::split_paths(&std::env::var_os("PATH").unwrap_or_default()).collect();
    let mut debian: Vec<PathBuf> = std::fs::read_dir("/usr/lib/postgresql")
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path().join("bin"))
        .collect();
    debian.sort();
    places.extend(debian.into_iter().rev());
    places
        .into_iter()
        .find(|place| ["initdb", "postgres", "psql"].iter().all(|program| place.join(program).exists()))
        .expect("PostgreSQL's server programs")
}

/// A command as a user that PostgreSQL does not refuse: it will not run as root.
fn command(program: &Path) -> Command {
    let is_root = std::fs::metadata("/proc/self").is_ok_and(|me| std::os::unix::fs::MetadataExt::uid(&me) == 0);
    let mut command = if is_root {
        let mut command = Command::new("setpriv");
        command.args(["--reuid=postgres", "--regid=postgres", "--init-groups", "--pdeathsig=INT"]).arg(program);
        command
    } else {
        Command::new(program)
    };
    command.env("LC_ALL", "C.UTF-8").stdin(Stdio::null()).current_dir("/");
    command
}

impl Server {
    fn start() -> Server {
        let bin = programs();
        let directory = tempfile::Builder::new().prefix("tidegate-pg").tempdir().unwrap();
        std::process::Command::new("chmod").arg("777").arg(directory.path()).status().unwrap();
        let data = directory.path().join("data");
        let password = directory.path().join("password");
        std::fs::write(&password, "s3cret\n").unwrap();
        let made = command(&bin.join("initdb"))
            .arg("-D")
            .arg(&data)
            .args(["-U", "admin", "-A", "scram-sha-256", "--no-sync", "-E", "UTF8", "--pwfile"])
            .arg(&password)
            .output()
            .unwrap();
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let log = std::fs::File::create(directory.path().join("log")).unwrap();
        let postmaster: Child = command(&bin.join("postgres"))
            .arg("-D")
            .arg(&data)
            .args([
                "-p",
                &port.to_string(),
                "-c",
                "listen_addresses=127.0.0.1",
                "-c",
                "unix_socket_directories=",
                "-c",
                "fsync=off",
                "-c",
                "max_connections=200",
            ])
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .process_group(0)
            .spawn()
            .unwrap();
        let server = Server { port, postmaster: postmaster.id(), _directory: directory };
        let end = Instant::now() + Duration::from_secs(60);
        while server.try_sql("postgres", "SELECT 1").is_err() {
            assert!(Instant::now() < end, "the server does not come up");
            std::thread::sleep(Duration::from_millis(50));
        }
        server
    }

    /// Runs statements as the superuser and returns the last one's rows, cells with `|` between.
    pub fn sql(&self, database: &str, sql: &str) -> String {
        self.try_sql(database, sql).unwrap_or_else(|error| panic!("{sql}: {error}"))
    }

    pub fn try_sql(&self, database: &str, sql: &str) -> Result<String, String> {
        let psql = programs().join("psql");
        let url = format!("postgres://admin:s3cret@127.0.0.1:{}/{database}", self.port);
        let output = Command::new(psql)
            .args(["-X", "-A", "-t", "-q", "-v", "ON_ERROR_STOP=1", "-d", &url, "-c", sql])
            .env("PGTZ", "UTC")
            .output()
            .map_err(|error| error.to_string())?;
        if output.status.success() {
            Ok(String::from_utf8_lossy(&output.stdout).trim_end_matches('\n').to_owned())
        } else {
            Err(String::from_utf8_lossy(&output.stderr).into_owned())
        }
    }
}

/// The server, shared. Rust ends no statics, so the end of the process stops it.
pub fn server() -> &'static Server {
    static SERVER: OnceLock<Server> = OnceLock::new();
    SERVER.get_or_init(|| {
        // The server dies with the thread that started it (setpriv --pdeathsig): one
        // that never ends before the process does.
        let (ready, started) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let _ = ready.send(Server::start());
            loop {
                std::thread::park();
            }
        });
        let server = started.recv().expect("the server starts");
        POSTMASTER.lock().unwrap().replace((server.postmaster, server._directory.path().to_owned()));
        // SAFETY: a plain C function pointer, registered once.
        unsafe { libc_atexit(stop) };
        server
    })
}

static POSTMASTER: Mutex<Option<(u32, PathBuf)>> = Mutex::new(None);

unsafe extern "C" {
    #[link_name = "atexit"]
    fn libc_atexit(function: extern "C" fn()) -> i32;
}

extern "C" fn stop() {
    if let Ok(Some((postmaster, directory))) = POSTMASTER.lock().map(|mut server| server.take()) {
        // An immediate shutdown: nothing of it is wanted any more.
        let _ = Command::new("kill").args(["-QUIT", &postmaster.to_string()]).status();
        let end = Instant::now() + Duration::from_secs(5);
        while Path::new(&format!("/proc/{postmaster}/fd")).exists()
            && directory.join("data/postmaster.pid").exists()
            && Instant::now() < end
        {
            std::thread::sleep(Duration::from_millis(20));
        }
        let _ = std::fs::remove_dir_all(directory);
    }
}

/// A database of a test's own.
pub fn database(name: &str) -> String {
    server().sql("postgres", &format!("CREATE DATABASE {name}"));
    name.to_owned()
}

/// What a connection is to suffer.
#[derive(Default)]
pub struct Faults {
    /// Cut the connection instead of sending a message that holds these bytes.
    pub cut_before: Option<&'static str>,
    /// Send such a message, then cut: its answer never comes.
    pub cut_after: Option<&'static str>,
    /// How many connections were made.
    pub dialled: u32,
}

/// Connections over the operating system.
#[derive(Clone, Default)]
pub struct Native {
    pub faults: Rc<RefCell<Faults>>,
    pub password: Rc<RefCell<String>>,
}

impl Connector for Native {
    type Stream = NativeStream;

    fn dial(&self, host: &str, port: u16, _: Duration, response: Duration) -> io::Result<NativeStream> {
        let socket = TcpStream::connect((host, port))?;
        socket.set_nodelay(true)?;
        socket.set_read_timeout(Some(response))?;
        self.faults.borrow_mut().dialled += 1;
        Ok(NativeStream { socket, faults: self.faults.clone() })
    }

    fn secret(&self, name: &str) -> Result<String, String> {
        assert_eq!(name, "password");
        Ok(self.password.borrow().clone())
    }
}

pub struct NativeStream {
    socket: TcpStream,
    faults: Rc<RefCell<Faults>>,
}

impl NativeStream {
    fn cut(&self) -> io::Error {
        let _ = self.socket.shutdown(std::net::Shutdown::Both);
        io::Error::new(io::ErrorKind::ConnectionReset, "cut by the test")
    }
}

impl Stream for NativeStream {
    fn start_tls(&mut self) -> io::Result<()> {
        Err(io::Error::new(io::ErrorKind::InvalidData, "the tests speak no TLS"))
    }

    fn peer_certificate(&self) -> Option<Vec<u8>> {
        None
    }
}

impl Read for NativeStream {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.socket.read(into)
    }
}

impl Write for NativeStream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let holds = |pattern: Option<&str>| {
            pattern.is_some_and(|pattern| bytes.windows(pattern.len()).any(|window| window == pattern.as_bytes()))
        };
        let (before, after) = (holds(self.faults.borrow().cut_before), holds(self.faults.borrow().cut_after));
        if before {
            self.faults.borrow_mut().cut_before = None;
            return Err(self.cut());
        }
        self.socket.write_all(bytes)?;
        if after {
            self.faults.borrow_mut().cut_after = None;
            // The server is done when it wants the next message: wait for its answer.
            let _ = self.socket.peek(&mut [0; 1]);
            return Err(self.cut());
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Settings for a database.
pub fn settings(database: &str) -> Settings {
    serde_json::from_value(serde_json::json!({
        "host": "127.0.0.1", "port": server().port, "database": database, "user": "admin", "sslmode": "disable"
    }))
    .unwrap()
}

/// Who a test's mirror is.
pub fn identity(generation: u64) -> Identity {
    Identity { pipeline: "shop".to_owned(), destination: "it's".to_owned(), lane: 0, generation }
}

/// A connector with the right password.
pub fn native() -> Native {
    let native = Native::default();
    *native.password.borrow_mut() = "s3cret".to_owned();
    native
}

/// A mirror into a database, and what its connections suffer.
pub fn open(database: &str, generation: u64) -> (Mirror<Native>, Rc<RefCell<Faults>>) {
    let native = native();
    let faults = native.faults.clone();
    (try_open(native, settings(database), generation).unwrap(), faults)
}

pub fn try_open(native: Native, settings: Settings, generation: u64) -> Result<Mirror<Native>, Failure> {
    Mirror::open(native, settings, &identity(generation))
}
