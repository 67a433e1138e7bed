//! A PostgreSQL of the tests' own, with TLS and every way to log in.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use super::config::SourceConfig;
use super::session::{self, Session};

/// A cluster; stopped and removed when dropped, or when the test process ends.
pub(super) struct Server {
    directory: tempfile::TempDir,
    port: u16,
    /// Holds the pipe whose end tells the guard to stop the server.
    guard: Child,
}

const HBA: &str = "local all all trust
host all md5er 127.0.0.1/32 md5
host all clear 127.0.0.1/32 password
host all nobody 127.0.0.1/32 reject
host all all 127.0.0.1/32 scram-sha-256
";

/// Stops the server and removes it when its input ends, which it does when we die.
const GUARD: &str =
    r#"directory=$1; shift; "$@" & server=$!; read _; kill -INT $server; wait $server; rm -rf "$directory""#;

impl Server {
    /// The server that most tests share.
    pub(super) fn shared() -> &'static Server {
        static SHARED: OnceLock<Server> = OnceLock::new();
        SHARED.get_or_init(|| {
            Server::start(&["ssl=on", "wal_level=logical", "max_replication_slots=40", "max_wal_senders=40"])
        })
    }

    /// A new server with these settings.
    pub(super) fn start(settings: &[&str]) -> Server {
        let directory = tempfile::Builder::new().prefix("tidegate-source-").tempdir().unwrap();
        let path = directory.path();
        let data = path.join("data");
        if is_root() {
            std::os::unix::fs::chown(path, Some(postgres_id("-u")), Some(postgres_id("-g"))).unwrap();
        }
        let initdb = [data.to_str().unwrap(), "-U", "postgres", "-A", "trust", "-N", "--locale=C.UTF-8"];
        run(as_postgres("initdb").arg("-D").args(initdb));
        certificates(path);
        for name in ["server.pem", "server.key"] {
            run(as_postgres_command("install").args(["-m", "600"]).arg(path.join(name)).arg(data.join(name)));
        }
        std::fs::write(data.join("pg_hba.conf"), HBA).unwrap();
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let fixed = [
            format!("port={port}"),
            format!("unix_socket_directories={}", path.display()),
            "listen_addresses=127.0.0.1".to_owned(),
            "ssl_cert_file=server.pem".to_owned(),
            "ssl_key_file=server.key".to_owned(),
            "fsync=off".to_owned(),
            "max_prepared_transactions=4".to_owned(),
        ];
        let server = as_postgres("postgres");
        let mut guard = Command::new("sh");
        guard
            .args(["-c", GUARD, "guard"])
            .arg(path)
            .arg(server.get_program())
            .args(server.get_args())
            .arg("-D")
            .arg(&data);
        for setting in fixed.iter().map(String::as_str).chain(settings.iter().copied()) {
            guard.args(["-c", setting]);
        }
        let log = std::fs::File::create(path.join("log")).unwrap();
        let guard = guard.stdin(Stdio::piped()).stdout(log.try_clone().unwrap()).stderr(log).spawn().unwrap();
        let server = Server { directory, port, guard };
        server.wait_until_ready();
        server
    }

    /// Until it accepts connections.
    fn wait_until_ready(&self) {
        for _ in 0..300 {
            // Not all servers have clients beside them.
            let ready = Command::new("pg_isready")
                .args(["-q", "-h"])
                .arg(self.directory())
                .args(["-p", &self.port.to_string()])
                .status();
            if ready.unwrap().success() {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(100));
        }
        panic!("no server: {}", std::fs::read_to_string(self.directory().join("log")).unwrap_or_default());
    }

    pub(super) fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// A superuser's configuration over the unix socket; slot and publication are
    /// named after the pipeline.
    pub(super) fn config(&self, user: &str, database: &str, pipeline: &str) -> SourceConfig {
        let url = format!("postgres://{user}@/{database}?host={}&port={}", self.directory().display(), self.port);
        SourceConfig::parse(&url, pipeline, pipeline).unwrap()
    }

    /// Over TCP, with whatever `rest` says behind the database.
    pub(super) fn tcp(&self, login: &str, host: &str, rest: &str) -> SourceConfig {
        let url = format!("postgres://{login}@{host}:{}/postgres{rest}", self.port);
        SourceConfig::parse(&url, "p", "p").unwrap()
    }

    /// A new database, and a superuser's session in it.
    pub(super) async fn database(&self) -> (SourceConfig, Session) {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name = format!("test{}", NEXT.fetch_add(1, Ordering::Relaxed));
        let admin = session::connect(&self.config("postgres", "postgres", "admin")).await.unwrap();
        admin.batch_execute(&format!("CREATE DATABASE {name}")).await.unwrap();
        let config = self.config("postgres", &name, &name);
        let session = session::connect(&config).await.unwrap();
        session.batch_execute("SET search_path = public").await.unwrap();
        (config, session)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Some(mut input) = self.guard.stdin.take() {
            let _told = input.write_all(b"\n");
        }
        let _ended = self.guard.wait();
    }
}

fn is_root() -> bool {
    rustix::process::getuid().is_root()
}

fn postgres_id(which: &str) -> u32 {
    let output = Command::new("id").args([which, "postgres"]).output().unwrap();
    String::from_utf8(output.stdout).unwrap().trim().parse().unwrap()
}

/// As for every other scratch cluster: TIDEGATE_PG_BIN chooses the server.
fn binary(name: &str) -> PathBuf {
    crate::scratch::find_binaries().unwrap().join(name)
}

fn as_postgres(name: &str) -> Command {
    as_postgres_command(binary(name))
}

/// PostgreSQL refuses root.
fn as_postgres_command(program: impl AsRef<std::ffi::OsStr>) -> Command {
    if !is_root() {
        return Command::new(program);
    }
    let mut command = Command::new("setpriv");
    command.args(["--reuid=postgres", "--regid=postgres", "--init-groups", "env", "HOME=/tmp", "LC_ALL=C.UTF-8"]);
    command.arg(program);
    command
}

fn run(command: &mut Command) {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
}

/// An authority, a certificate for `localhost` signed by it, and another authority.
fn certificates(path: &Path) {
    const SCRIPT: &str = r#"
        ec="ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes"
        openssl req -x509 -newkey $ec -keyout ca.key -out ca.pem -subj /CN=ca -days 2
        openssl req -x509 -newkey $ec -keyout other.key -out other.pem -subj /CN=other -days 2
        openssl req -newkey $ec -keyout server.key -out server.csr -subj /CN=localhost
        printf 'subjectAltName=DNS:localhost' > san
        openssl x509 -req -in server.csr -CA ca.pem -CAkey ca.key -CAcreateserial -extfile san -days 2 -out server.pem
        chmod 644 *.key"#;
    run(Command::new("sh").args(["-ec", SCRIPT]).current_dir(path));
}
