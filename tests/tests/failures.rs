//! What is wrong before the start is told before the start: one report that names it, with
//! a code and the way out, and nothing begun at either end.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use tidegate::scratch::{Auth, Cluster, ClusterOptions};
use tidegate_tests::{Database, Pipeline, database, files_destination, mirror, plugins, postgres_destination};

/// How long a refusal may take. Compiling the largest plugin is part of it: fifteen seconds
/// of a processor that others may want too.
const PATIENCE: Duration = Duration::from_secs(180);
const SOURCE_PASSWORD: &str = "s0urce-pa55";
const WRONG_PASSWORD: &str = "wr0ng-pa55";
const MIRROR_PASSWORD: &str = "m1rror-pa55";
const TABLES: &str = "CREATE TABLE orders (id int PRIMARY KEY, note text);
                      INSERT INTO orders VALUES (1, 'here already');
                      CREATE PUBLICATION pub FOR ALL TABLES";

/// A server that asks for passwords.
fn source() -> &'static Cluster {
    static SOURCE: OnceLock<Cluster> = OnceLock::new();
    SOURCE.get_or_init(|| {
        let auth = Auth::Scram(SOURCE_PASSWORD.to_owned());
        Cluster::start(&ClusterOptions { auth, ..ClusterOptions::default() }).unwrap()
    })
}

/// A pipeline that has everything, until a test takes something away.
struct Case {
    source: Database,
    mirror: Database,
    /// The URL that `tidegate` is given; with the password, so through the environment.
    url: String,
    pipeline: Pipeline,
    slots_before: String,
}

impl Case {
    fn new(test: &str) -> Case {
        Case::at(source(), test, TABLES)
    }

    fn at(cluster: &Cluster, test: &str, schema: &str) -> Case {
        let source = database(cluster, test);
        source.sql(schema);
        let mirror = database(mirror(), test);
        let from_environment =
            Database { url: "${TIDEGATE_TEST_SOURCE}".to_owned(), port: source.port, name: source.name.clone() };
        let pipeline = Pipeline::new(&from_environment, &postgres_destination("mirror", &mirror));
        let url = source.url.clone();
        Case { source, mirror, url, pipeline, slots_before: String::new() }
    }

    fn config(&self) -> PathBuf {
        self.pipeline.directory().join("tidegate.toml")
    }

    /// Replaces text of the configuration, which has to be there.
    fn edit(&self, from: &str, to: &str) {
        let text = std::fs::read_to_string(self.config()).unwrap();
        assert!(text.contains(from), "{from} is not in {text}");
        std::fs::write(self.config(), text.replace(from, to)).unwrap();
    }

    /// Lets the pipeline take its plugins from a directory of the test's own.
    fn own_plugins(&self) -> PathBuf {
        let directory = self.pipeline.directory().join("plugins");
        std::fs::create_dir(&directory).unwrap();
        self.edit(&plugins().display().to_string(), &directory.display().to_string());
        directory
    }

    /// A role of this test, and a URL for it.
    fn role(&mut self, attributes: &str) -> String {
        let role = format!("role_of_{}", self.source.name);
        self.source.sql(&format!("CREATE ROLE {role} LOGIN PASSWORD '{SOURCE_PASSWORD}' {attributes}"));
        self.url = source().url_as(&role, Some(SOURCE_PASSWORD), &self.source.name);
        role
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = self.pipeline.command(arguments);
        command.env("TIDEGATE_TEST_SOURCE", &self.url).env("TIDEGATE_TEST_PASSWORD", MIRROR_PASSWORD);
        command
    }

    fn start(&mut self) {
        let url = self.url.clone();
        self.pipeline.start_with(&[("TIDEGATE_TEST_SOURCE", &url), ("TIDEGATE_TEST_PASSWORD", MIRROR_PASSWORD)]);
    }

    fn slots(&self) -> String {
        self.source.sql("SELECT string_agg(slot_name, ' ' ORDER BY 1) FROM pg_replication_slots WHERE database = current_database()")
    }

    fn assert_nothing_started(&self) {
        assert_eq!(self.slots(), self.slots_before);
        let made = "SELECT count(*) FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
                    WHERE n.nspname NOT LIKE 'pg\\_%' AND n.nspname <> 'information_schema'";
        assert_eq!(self.mirror.sql(made), "0");
    }

    /// `run` ends with this exit code and one report.
    fn assert_run_refused(&self, exit: i32, code: &str, named: &[&str]) {
        let output = ended(self.command(&["run", "--log", "human"]));
        assert_reported(&output, exit, code, named);
        self.assert_nothing_started();
    }

    /// `check` says the same, as the one thing that is missing.
    fn assert_check_refused(&self, code: &str, named: &[&str]) {
        let output = ended(self.command(&["check", "--json"]));
        let text = all_of(&output);
        assert_eq!(output.status.code(), Some(3), "{text}");
        let answer: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(answer["ok"], false, "{text}");
        let wrong: Vec<_> = answer["checks"].as_array().unwrap().iter().filter(|check| check["ok"] == false).collect();
        assert_eq!(wrong.len(), 1, "{text}");
        assert_eq!(wrong[0]["code"], code, "{text}");
        let [check, message, next] = ["check", "message", "next"].map(|key| wrong[0][key].as_str().unwrap());
        for name in named {
            let said = [check, message, next].iter().any(|part| part.contains(name));
            assert!(said, "{name} is not named: {text}");
        }
        let output = ended(self.command(&["check"]));
        let text = all_of(&output);
        assert_eq!(output.status.code(), Some(3), "{text}");
        let line = format!("no   {check}: [{code}] {message}\n       next: {next}\n");
        assert!(text.contains(&line), "{line:?} is not in\n{text}");
        self.assert_nothing_started();
    }

    /// The world is not as it has to be: `run` and `check` say no.
    fn assert_no(&self, code: &str, named: &[&str]) {
        self.assert_run_refused(3, code, named);
        self.assert_check_refused(code, named);
    }

    /// The configuration does not fit a plugin: `run` calls it bad usage, `check` says no.
    fn assert_misfit(&self, code: &str, named: &[&str]) {
        self.assert_run_refused(2, code, named);
        self.assert_check_refused(code, named);
    }

    /// The configuration itself is bad: no command goes beyond it.
    fn assert_bad_config(&self, code: &str, named: &[&str]) {
        self.assert_run_refused(2, code, named);
        assert_reported(&ended(self.command(&["check"])), 2, code, named);
    }
}

/// What a command printed that has to end by itself: one that should have been refused
/// and was not would run for good.
fn ended(mut command: Command) -> Output {
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let start = Instant::now();
    // What it prints fits into a pipe.
    while child.try_wait().unwrap().is_none() {
        if start.elapsed() > PATIENCE {
            child.kill().unwrap();
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    child.wait_with_output().unwrap()
}

/// Everything that was printed, which must not hold a secret.
fn all_of(output: &Output) -> String {
    let text = format!("{}\n{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    for secret in [SOURCE_PASSWORD, WRONG_PASSWORD, MIRROR_PASSWORD] {
        assert!(!text.contains(secret) && !text.contains(&secret.replace('-', "%2D")), "a secret is in {text}");
    }
    text
}

fn assert_reported(output: &Output, exit: i32, code: &str, named: &[&str]) {
    let text = all_of(output);
    assert_eq!(output.status.code(), Some(exit), "{text}");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(stderr.matches("error[").count(), 1, "{text}");
    let lines: Vec<&str> = stderr.lines().collect();
    let at =
        lines.iter().position(|line| line.starts_with(&format!("error[{code}]: "))).unwrap_or_else(|| panic!("{text}"));
    assert_eq!(at + 2, lines.len(), "the report is the end of {text}");
    let next = lines[at + 1].strip_prefix("  next: ").unwrap_or_else(|| panic!("{text}"));
    assert!(!next.is_empty(), "{text}");
    for name in named {
        assert!(lines[at].contains(name) || next.contains(name), "{name} is not named: {text}");
    }
}

fn copy(from: &Path, to: &Path, bytes: impl Fn(Vec<u8>) -> Vec<u8>) {
    std::fs::write(to, bytes(std::fs::read(from).unwrap())).unwrap();
}

#[test]
fn a_pipeline_that_has_everything_passes_the_check_which_leaves_no_trace() {
    let case = Case::new("all_well");
    let output = ended(case.command(&["check", "--json"]));
    assert_eq!(output.status.code(), Some(0), "{}", all_of(&output));
    let answer: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(answer["ok"], true, "{answer:#}");
    assert!(answer["checks"].as_array().unwrap().iter().all(|check| check["ok"] == true), "{answer:#}");
    let output = ended(case.command(&["check"]));
    assert!(all_of(&output).contains("all is there"), "{}", all_of(&output));
    case.assert_nothing_started();
    assert!(!case.pipeline.directory().join("state").exists());
}

#[test]
fn a_wrong_password_is_refused() {
    let mut case = Case::new("wrong_password");
    case.url = case.url.replace(&SOURCE_PASSWORD.replace('-', "%2D"), WRONG_PASSWORD);
    assert!(case.url.contains(WRONG_PASSWORD), "{}", case.url);
    let place = format!("postgres@127.0.0.1:{}/{}", case.source.port, case.source.name);
    case.assert_no("source.password", &[&place]);
}

#[test]
fn a_server_that_is_not_there_is_named_and_not_waited_for() {
    let mut case = Case::new("unreachable");
    let nobody = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    case.url = case.url.replace(&case.source.port.to_string(), &nobody.to_string());
    case.assert_no("source.unreachable", &[&format!("127.0.0.1:{nobody}")]);
}

#[test]
fn a_database_that_is_not_there_is_named() {
    let mut case = Case::new("no_database");
    case.url = source().url("nowhere");
    case.assert_no("source.database-missing", &["/nowhere"]);
}

#[test]
fn a_publication_that_is_not_there_is_answered_with_those_that_are() {
    let case = Case::new("no_publication");
    case.edit("publication = \"pub\"", "publication = \"shop\"");
    case.assert_no("publication.missing", &["`shop`", "there are pub", "CREATE PUBLICATION \"shop\""]);
}

#[test]
fn a_wal_level_that_is_too_low_is_refused() {
    let cluster = Cluster::start(&ClusterOptions::default().setting("wal_level", "replica")).unwrap();
    let case = Case::at(&cluster, "wal_level", TABLES);
    case.assert_no("source.wal-level", &["wal_level is replica", "ALTER SYSTEM SET wal_level = 'logical'"]);
}

#[test]
fn a_role_that_may_not_replicate_is_named() {
    let mut case = Case::new("no_replication");
    let role = case.role("NOREPLICATION");
    case.source.sql(&format!("GRANT SELECT ON orders TO {role}"));
    case.assert_no("source.role-replication", &[&role, "REPLICATION;"]);
}

#[test]
fn a_table_that_the_role_may_not_read_is_named() {
    let mut case = Case::new("no_select");
    case.source.sql("CREATE TABLE hidden (id int PRIMARY KEY)");
    let role = case.role("REPLICATION");
    case.source.sql(&format!("GRANT SELECT ON orders TO {role}"));
    case.assert_no("source.select", &["public.hidden", &format!("GRANT SELECT ON public.hidden TO \"{role}\"")]);
}

#[test]
fn a_server_without_a_free_slot_is_refused() {
    let cluster = Cluster::start(&ClusterOptions::default().setting("max_replication_slots", "1")).unwrap();
    let mut case = Case::at(&cluster, "no_slot", TABLES);
    case.source.sql("SELECT pg_create_logical_replication_slot('somebodys', 'pgoutput')");
    case.slots_before = "somebodys".to_owned();
    case.assert_no("slot.none-free", &["max_replication_slots"]);
}

#[test]
fn a_slot_that_the_state_does_not_know_is_left_alone() {
    let mut case = Case::new("foreign_slot");
    let slot = format!("tidegate_{}", case.source.name);
    case.source.sql(&format!("SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput')"));
    case.slots_before = slot.clone();
    case.assert_no("slot.exists", &[&slot, "state", &format!("pg_drop_replication_slot('{slot}')")]);
}

#[test]
fn a_table_without_a_key_cannot_be_merged_and_is_named() {
    let case = Case::new("no_key");
    case.source.sql("CREATE TABLE heap (v text); CREATE TABLE other_heap (v text)");
    case.assert_no("table.no-key", &["mirror", "public.heap, public.other_heap", "REPLICA IDENTITY"]);
    case.edit("tables = [\"*.*\"]", "tables = [\"*.*\", \"!*.heap\", \"!public.other_heap\"]");
    let output = ended(case.command(&["check"]));
    assert_eq!(output.status.code(), Some(0), "{}", all_of(&output));
}

#[test]
fn an_unknown_key_is_answered_with_the_nearest() {
    for (from, to, named) in [
        ("plugins = ", "plugin_dir = \"x\"\nplugins = ", ["[pipeline]", "`plugin_dir`", "`plugins`"]),
        ("publication = ", "publicatoin = ", ["[source]", "`publicatoin`", "`publication`"]),
        ("mode = ", "mod = \"merge\"\nmode = ", ["[[destination]] \"mirror\"", "`mod`", "`mode`"]),
        ("network = ", "netwrok = ", ["[destination.grant]", "`netwrok`", "`network`"]),
    ] {
        let case = Case::new("unknown_key");
        case.edit(from, to);
        case.assert_bad_config("config.unknown-key", &named);
    }
}

#[test]
fn a_secret_whose_environment_variable_is_missing_is_named_by_the_variable() {
    // In the place of the source's URL.
    let case = Case::new("no_variable");
    case.edit("${TIDEGATE_TEST_SOURCE}", "${TIDEGATE_TEST_NOT_SET}");
    case.assert_bad_config("config.environment", &["[source]", "`url`", "TIDEGATE_TEST_NOT_SET"]);
    // As the source's password.
    let case = Case::new("no_variable");
    case.edit("publication = ", "password = \"env:TIDEGATE_TEST_NOT_SET\"\npublication = ");
    case.assert_bad_config("config.secret", &["[source]", "`password`", "TIDEGATE_TEST_NOT_SET"]);
    // As a secret that a plugin is granted.
    let case = Case::new("no_variable");
    case.edit("env:TIDEGATE_TEST_PASSWORD", "env:TIDEGATE_TEST_NOT_SET");
    case.assert_misfit("config.secret", &["`password`", "TIDEGATE_TEST_NOT_SET"]);
}

#[test]
fn a_password_that_is_written_down_is_refused_and_not_repeated() {
    let case = Case::new("literal");
    case.edit("${TIDEGATE_TEST_SOURCE}", &case.url);
    case.assert_bad_config("config.literal-secret", &["[source]", "env:"]);
    let case = Case::new("literal");
    case.edit("env:TIDEGATE_TEST_PASSWORD", MIRROR_PASSWORD);
    case.assert_bad_config("config.grant", &["`password`", "env:"]);
}

#[test]
fn a_plugin_that_is_not_there_is_answered_with_those_that_are() {
    let case = Case::new("no_plugin");
    case.edit("plugin = \"postgres\"", "plugin = \"postgers\"");
    case.assert_misfit("plugin.missing", &["`postgers`", "files", "postgres"]);
}

#[test]
fn a_broken_plugin_is_named_by_its_file() {
    let whole = plugins().join("postgres.wasm");
    let case = Case::new("broken_plugin");
    let file = case.own_plugins().join("postgres.wasm");
    let name = file.display().to_string();
    copy(&whole, &file, |bytes| bytes[..bytes.len() / 2].to_vec());
    case.assert_misfit("plugin.damaged", &[&name]);
    copy(&whole, &file, |_| Vec::new());
    case.assert_misfit("plugin.not-a-component", &[&name]);
    copy(&whole, &file, |_| b"a component, honestly".to_vec());
    case.assert_misfit("plugin.not-a-component", &[&name]);
    // A core module: what the other wasm32 targets make.
    copy(&whole, &file, |_| b"\0asm\x01\0\0\0".to_vec());
    case.assert_misfit("plugin.not-a-component", &[&name, "core module"]);
    // A component of no world at all.
    copy(&whole, &file, |_| b"\0asm\x0d\0\x01\0".to_vec());
    case.assert_misfit("plugin.missing-export", &[&name, "tidegate:destination/plugin"]);
}

#[test]
fn settings_that_do_not_match_the_plugins_schema_are_named() {
    let case = Case::new("settings");
    case.edit("user = \"postgres\"", "usr = \"postgres\"\nsslrootcert = 1");
    let port = format!("port = {}\n", case.mirror.port);
    case.edit(&port, "port = \"high\"\n");
    case.assert_misfit("plugin.settings", &["mirror", "`usr`", "did you mean `user`", "`port` must be integer"]);
}

#[test]
fn a_grant_that_a_plugin_needs_and_does_not_have_is_named() {
    let case = Case::new("grant");
    let address = format!("127.0.0.1:{}", case.mirror.port);
    case.edit(&address, "127.0.0.1:1");
    case.assert_misfit("plugin.grant", &["mirror", "network", &address, "[destination.grant]"]);

    let case = Case::new("grant");
    let config = std::fs::read_to_string(case.config()).unwrap();
    let (rest, _) = config.split_once("[[destination]]").unwrap();
    let out = case.pipeline.directory().join("out").display().to_string();
    let files = files_destination("out", "ndjson").replace("{dir}/out", &out);
    let (without_grant, _) = files.split_once("[destination.grant]").unwrap();
    std::fs::write(case.config(), format!("{rest}{without_grant}")).unwrap();
    case.assert_misfit("plugin.grant", &["out", "files", &out]);
    assert!(!Path::new(&out).exists());
}

#[test]
fn a_second_process_on_the_same_state_is_refused_and_told_who_holds_it() {
    let mut case = Case::new("in_use");
    case.start();
    let pid = case.pipeline.wait_ready().pid.unwrap();
    let output = ended(case.command(&["run", "--log", "human"]));
    let state = case.pipeline.directory().join("state").display().to_string();
    assert_reported(&output, 2, "state.in-use", &[&format!("process {pid}"), &state]);
    // Looking is not running: `check` says who holds it, and that all is well.
    let output = ended(case.command(&["check"]));
    let text = all_of(&output);
    assert_eq!(output.status.code(), Some(0), "{text}");
    assert!(text.contains(&format!("in use by process {pid}")), "{text}");
    // The first goes on.
    case.source.sql("INSERT INTO orders VALUES (2, 'while it was looked at')");
    case.pipeline.wait_caught_up(&case.source);
    assert_eq!(case.source.rows("orders"), case.mirror.rows("orders"));
    assert_eq!(case.pipeline.stop(), 0);
    all_of(&Output { status: output.status, stdout: case.pipeline.log().into_bytes(), stderr: Vec::new() });
}

#[test]
fn the_status_of_a_stopped_pipeline_comes_from_the_state_alone() {
    let cluster = Cluster::start(&ClusterOptions::default()).unwrap();
    let mut case = Case::at(&cluster, "at_rest", TABLES);
    let output = ended(case.command(&["status"]));
    assert_reported(&output, 2, "state.missing", &[]);
    case.start();
    case.pipeline.wait_ready();
    case.pipeline.wait_caught_up(&case.source);
    assert_eq!(case.pipeline.stop(), 0);
    // Neither source nor plugins nor the environment are asked.
    drop(cluster);
    case.edit(&plugins().display().to_string(), "/nowhere");
    let output = ended(case.pipeline.command(&["status", "--json"]));
    assert_eq!(output.status.code(), Some(0), "{}", all_of(&output));
    let status: tidegate::status::StatusReport = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(status.pid, None);
    assert!(status.all_ready());
    let destination = &status.destinations[0];
    assert_eq!((destination.name.as_str(), destination.plugin.as_str()), ("mirror", "postgres"));
    assert_eq!(destination.checkpoint, status.slot.confirmed);
    assert!(destination.checkpoint.is_some());
    assert_eq!(destination.tables[0].table, "public.orders");
    assert_eq!(destination.tables[0].rows_copied, 1);
    let output = ended(case.pipeline.command(&["status"]));
    assert!(all_of(&output).contains("does not run"), "{}", all_of(&output));
}
