//! Both ends over TLS, and what goes over the wire when that cannot be.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex, OnceLock};

use tidegate::scratch::{Auth, Cluster, ClusterOptions, Tls};
use tidegate::status::{DestinationState, DestinationStatus};
use tidegate_tests::{Database, Pipeline, database, mirror, source};

const PASSWORD: &str = "pa55-in-clear";
/// What a row holds that must not be seen on the way.
const MARK: &str = "row-in-clear";
/// The request for TLS, the only thing that may go in clear.
const SSL_REQUEST: [u8; 8] = [0, 0, 0, 8, 4, 210, 22, 47];
/// Types of the records of TLS that a client sends before it has keys: alert, handshake.
const RECORDS: [u8; 2] = [21, 22];

/// An authority, a certificate of its for `localhost`, an authority that nobody's
/// certificate comes from; and the password.
fn certificates() -> &'static Path {
    const SCRIPT: &str = r#"
        ec="ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes"
        openssl req -x509 -newkey $ec -keyout ca.key -out ca.pem -subj /CN=ca -days 2
        openssl req -x509 -newkey $ec -keyout other.key -out other.pem -subj /CN=other -days 2
        openssl req -newkey $ec -keyout server.key -out server.csr -subj /CN=localhost
        printf 'subjectAltName=DNS:localhost' > san
        openssl x509 -req -in server.csr -CA ca.pem -CAkey ca.key -CAcreateserial -extfile san -days 2 -out server.pem"#;
    static DIRECTORY: OnceLock<tempfile::TempDir> = OnceLock::new();
    let directory = DIRECTORY.get_or_init(|| {
        let directory = tempfile::tempdir().unwrap();
        let made = Command::new("sh").args(["-ec", SCRIPT]).current_dir(directory.path()).output().unwrap();
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        std::fs::write(directory.path().join("password"), PASSWORD).unwrap();
        directory
    });
    directory.path()
}

/// A server that nobody reaches over TCP without TLS and a password.
fn guarded() -> Cluster {
    let tls = Tls { certificate: certificates().join("server.pem"), key: certificates().join("server.key") };
    let auth = Auth::Scram(PASSWORD.to_owned());
    let cluster = Cluster::start(&ClusterOptions { auth, tls: Some(tls), ..ClusterOptions::default() }).unwrap();
    std::fs::write(cluster.directory().join("data/pg_hba.conf"), "hostssl all all 127.0.0.1/32 scram-sha-256\n")
        .unwrap();
    cluster.psql("postgres", "SELECT pg_reload_conf()").unwrap();
    let plain = cluster.url("postgres") + "?sslmode=disable";
    tidegate_tests::wait_for("the server takes TLS alone", || {
        let refused = Command::new("psql").args(["-X", "-d", &plain, "-c", "SELECT 1"]).output().unwrap();
        String::from_utf8_lossy(&refused.stderr).contains("no encryption").then_some(())
    });
    cluster
}

/// The guarded servers that the tests share; one for each end.
fn guarded_source() -> &'static Cluster {
    static SOURCE: OnceLock<Cluster> = OnceLock::new();
    SOURCE.get_or_init(guarded)
}

fn guarded_mirror() -> &'static Cluster {
    static MIRROR: OnceLock<Cluster> = OnceLock::new();
    MIRROR.get_or_init(guarded)
}

/// Passes connections on to a server of this machine, and keeps what went either way.
struct Wiretap {
    port: u16,
    heard: Arc<Mutex<Vec<Heard>>>,
}

/// One connection.
#[derive(Default)]
struct Heard {
    from_client: Vec<u8>,
    from_server: Vec<u8>,
}

impl Wiretap {
    fn on(port: u16) -> Wiretap {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let tap = Wiretap { port: listener.local_addr().unwrap().port(), heard: Arc::default() };
        let heard = tap.heard.clone();
        // Ends with the process.
        std::thread::spawn(move || {
            for client in listener.incoming() {
                let (client, server) = (client.unwrap(), TcpStream::connect(("127.0.0.1", port)).unwrap());
                let number = {
                    let mut heard = heard.lock().unwrap();
                    heard.push(Heard::default());
                    heard.len() - 1
                };
                let (from_client, from_server) = (heard.clone(), heard.clone());
                pass_on(&client, &server, move |bytes| {
                    from_client.lock().unwrap()[number].from_client.extend_from_slice(bytes);
                });
                pass_on(&server, &client, move |bytes| {
                    from_server.lock().unwrap()[number].from_server.extend_from_slice(bytes);
                });
            }
        });
        tap
    }

    /// Nothing that is worth anything went in clear; `at_most` bounds what the client
    /// sent on each connection.
    fn assert_silent(&self, secrets: &[&str], at_most: usize) {
        let heard = self.heard.lock().unwrap();
        assert!(!heard.is_empty(), "nobody came by");
        for heard in heard.iter() {
            for secret in secrets {
                for bytes in [&heard.from_client, &heard.from_server] {
                    assert!(!contains(bytes, secret.as_bytes()), "{secret} went in clear");
                }
            }
            let Some(rest) = heard.from_client.strip_prefix(&SSL_REQUEST) else {
                // Cut off before a byte was sent.
                assert!(heard.from_client.is_empty(), "{:?}", heard.from_client);
                continue;
            };
            assert!(rest.first().is_none_or(|first| RECORDS.contains(first)), "{rest:?}");
            assert!(heard.from_client.len() <= at_most, "{} bytes", heard.from_client.len());
        }
    }
}

fn pass_on(from: &TcpStream, to: &TcpStream, hear: impl Fn(&[u8]) + Send + 'static) {
    let (mut from, mut to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
    std::thread::spawn(move || {
        let mut buffer = [0; 16 * 1024];
        while let Ok(read) = from.read(&mut buffer)
            && read > 0
        {
            hear(&buffer[..read]);
            if to.write_all(&buffer[..read]).is_err() {
                break;
            }
        }
        // Either end may be gone already.
        let _ = to.shutdown(Shutdown::Both);
        let _ = from.shutdown(Shutdown::Read);
    });
}

fn contains(bytes: &[u8], part: &[u8]) -> bool {
    bytes.windows(part.len()).any(|window| window == part)
}

/// A file with the password, for source and destination.
fn password_file() -> PathBuf {
    certificates().join("password")
}

/// A source's database as the host is to reach it: with a password that is not in the URL.
fn reached_over(at: &str, port: u16, name: &str, parameters: &str) -> Database {
    Database { url: format!("postgres://postgres@{at}:{port}/{name}?{parameters}"), port, name: name.to_owned() }
}

/// A mirror that is reached as `host`, with an authority beside its grant.
fn destination(host: &str, port: u16, database: &str, ca: &str) -> String {
    format!(
        "[[destination]]\nname = \"mirror\"\nplugin = \"postgres\"\nmode = \"merge\"\ntables = [\"*.*\"]\n\
         [destination.settings]\nhost = \"{host}\"\nport = {port}\ndatabase = \"{database}\"\nuser = \"postgres\"\n\
         [destination.grant]\nnetwork = [{{ address = \"{host}:{port}\", private = true, ca = \"{ca}\" }}]\n\
         secrets = {{ password = {{ from = \"file:{password}\", readable = true }} }}\n",
        ca = certificates().join(ca).display(),
        password = password_file().display(),
    )
}

/// Gives the source's password to a pipeline.
fn with_password(pipeline: Pipeline) -> Pipeline {
    let file = pipeline.directory().join("tidegate.toml");
    let text = std::fs::read_to_string(&file).unwrap();
    let key = format!("[source]\npassword = \"file:{}\"\n", password_file().display());
    std::fs::write(&file, text.replace("[source]\n", &key)).unwrap();
    pipeline
}

const TABLES: &str = "CREATE TABLE t (id int PRIMARY KEY, v text);
                      INSERT INTO t SELECT n, 'row-in-clear ' || n FROM generate_series(1, 100) n;
                      CREATE PUBLICATION pub FOR ALL TABLES";

/// `verified | connections` of one program at a server.
const CONNECTIONS: &str = "SELECT bool_and(s.ssl AND s.version LIKE 'TLS%'), count(*) > 0
                           FROM pg_stat_ssl s JOIN pg_stat_activity a USING (pid) WHERE a.application_name LIKE 'tidegate/%'";

#[test]
fn copied_and_streamed_rows_arrive_over_tls_at_both_ends_and_none_is_seen_on_the_way() {
    let from = database(guarded_source(), "tls_both");
    let to = database(guarded_mirror(), "tls_both");
    from.sql(TABLES);
    let (near, far) = (Wiretap::on(from.port), Wiretap::on(to.port));
    let verified = format!("sslmode=verify-full&sslrootcert={}", certificates().join("ca.pem").display());
    let mut pipeline = with_password(Pipeline::new(
        &reached_over("localhost", near.port, &from.name, &verified),
        &destination("localhost", far.port, &to.name, "ca.pem"),
    ));
    pipeline.start();
    pipeline.wait_ready();
    from.sql(
        "INSERT INTO t SELECT n, 'row-in-clear ' || n FROM generate_series(101, 200) n; DELETE FROM t WHERE id = 7",
    );
    pipeline.wait_caught_up(&from);
    assert_eq!(from.rows("t"), to.rows("t"));
    assert_eq!(to.rows("t").len(), 199);
    assert_eq!(from.sql(CONNECTIONS), "t|t");
    assert_eq!(to.sql(CONNECTIONS), "t|t");
    let senders = "SELECT bool_and(s.ssl), count(*) FROM pg_stat_ssl s JOIN pg_stat_replication r USING (pid) WHERE r.state = 'streaming'";
    assert_eq!(from.sql(senders), "t|1", "the stream itself");
    assert_eq!(pipeline.stop(), 0);
    for tap in [near, far] {
        tap.assert_silent(&[MARK, PASSWORD, &from.name, &to.name, "SELECT"], usize::MAX);
    }
}

/// The destination stays out with this error, and says nothing in clear.
fn refused_at_the_destination(test: &str, host: &str, ca: &str, server: &Cluster, code: &str, named: &[&str]) {
    let from = database(source(), test);
    let to = database(server, test);
    from.sql(TABLES);
    let tap = Wiretap::on(to.port);
    let mut pipeline = Pipeline::new(&from, &destination(host, tap.port, &to.name, ca));
    pipeline.start();
    let at_fault = |destination: &DestinationStatus| destination.error.clone().filter(|error| error.code == code);
    let status = pipeline.wait_status(&format!("the destination stops with {code}"), |status| {
        status.destinations.iter().any(|destination| at_fault(destination).is_some())
    });
    let error = at_fault(&status.destinations[0]).unwrap();
    assert_eq!(status.destinations[0].state, DestinationState::Errored, "{status:#?}");
    for name in named {
        assert!(error.message.contains(name), "{name} is not named: {error:?}");
    }
    assert!(!pipeline.log().contains(PASSWORD), "{}", pipeline.log());
    pipeline.kill();
    let made = "SELECT count(*) FROM pg_namespace WHERE nspname = 'tidegate'";
    assert_eq!(to.sql(made), "0");
    // A greeting and an alert, or less.
    tap.assert_silent(&[MARK, PASSWORD, &to.name, "postgres", "SELECT"], 2048);
}

#[test]
fn a_mirror_whose_certificate_comes_from_another_authority_is_told_nothing() {
    let named = ["localhost", "UnknownIssuer", "CA of the grant"];
    refused_at_the_destination("tls_other_ca", "localhost", "other.pem", guarded_mirror(), "postgres.tls", &named);
}

#[test]
fn a_mirror_whose_certificate_has_another_name_is_told_nothing() {
    let named = ["127.0.0.1", "not valid for name"];
    refused_at_the_destination("tls_other_name", "127.0.0.1", "ca.pem", guarded_mirror(), "postgres.tls", &named);
}

#[test]
fn a_mirror_without_tls_is_told_nothing() {
    let named = ["does not speak TLS", "sslmode"];
    refused_at_the_destination("tls_none", "localhost", "ca.pem", mirror(), "postgres.tls", &named);
}

#[test]
fn a_source_that_is_not_who_it_should_be_is_told_nothing() {
    let from = database(guarded_source(), "tls_source");
    let plain = database(source(), "tls_source");
    let to = database(mirror(), "tls_source");
    let root = |ca: &str| format!("sslmode=verify-full&sslrootcert={}", certificates().join(ca).display());
    for (host, database, parameters, code) in [
        ("localhost", &from, root("other.pem"), "source.tls-authority"),
        ("127.0.0.1", &from, root("ca.pem"), "source.tls-name"),
        ("localhost", &plain, root("ca.pem"), "source.tls-missing"),
        ("localhost", &plain, "sslmode=require".to_owned(), "source.tls-missing"),
    ] {
        let tap = Wiretap::on(database.port);
        let pipeline = with_password(Pipeline::new(
            &reached_over(host, tap.port, &database.name, &parameters),
            &destination("localhost", to.port, &to.name, "ca.pem"),
        ));
        for command in ["run", "check"] {
            let output = pipeline.command(&[command]).output().unwrap();
            let said = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
            assert_eq!(output.status.code(), Some(3), "{command}: {said}");
            assert!(said.contains(&format!("[{code}]")) && said.contains(host), "{command}, {code}: {said}");
            assert!(!said.contains(PASSWORD), "{command}: {said}");
        }
        tap.assert_silent(&[PASSWORD, &database.name, "postgres", "SELECT"], 2048);
    }
    // Whom the operator does not check is at least not heard by others.
    let tap = Wiretap::on(from.port);
    let pipeline = with_password(Pipeline::new(
        &reached_over("127.0.0.1", tap.port, &from.name, "sslmode=require"),
        &destination("localhost", to.port, &to.name, "ca.pem"),
    ));
    let output = pipeline.command(&["check"]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(said.contains("publication.missing"), "{said}");
    tap.assert_silent(&[PASSWORD, &from.name, "SELECT"], usize::MAX);
}
