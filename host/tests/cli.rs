//! The built binary, as a user meets it: what it prints, and with what it exits.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;
use tempfile::TempDir;
use tidegate::scratch::{Auth, Cluster, ClusterOptions};
use tidegate::store::Store;

/// What a command came to.
struct Ran {
    code: i32,
    out: String,
    err: String,
}

impl From<Output> for Ran {
    fn from(output: Output) -> Ran {
        Ran {
            code: output.status.code().expect("ended by a signal"),
            out: String::from_utf8(output.stdout).unwrap(),
            err: String::from_utf8(output.stderr).unwrap(),
        }
    }
}

impl Ran {
    #[track_caller]
    fn failed(&self, code: i32, error: &str) {
        assert_eq!(self.code, code, "stdout: {}\nstderr: {}", self.out, self.err);
        assert_eq!(self.err.matches("error[").count(), 1, "one error, not: {}", self.err);
        assert!(self.err.contains(&format!("error[{error}]: ")), "no `{error}` in: {}", self.err);
        assert!(self.err.contains("\n  next: "), "no next step in: {}", self.err);
    }

    #[track_caller]
    fn passed(&self) -> &str {
        assert_eq!(self.code, 0, "stdout: {}\nstderr: {}", self.out, self.err);
        &self.out
    }

    #[track_caller]
    fn json(&self) -> Value {
        serde_json::from_str(&self.out).unwrap_or_else(|error| panic!("{error}: {}\n{}", self.out, self.err))
    }
}

fn tidegate(arguments: &[&str]) -> Ran {
    command(arguments).output().unwrap().into()
}

fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
    command.args(arguments).env_remove("TIDEGATE_CONFIG").env_remove("TIDEGATE_LOG").env_remove("TIDEGATE_ADMIN_URL");
    command
}

/// A directory with a configuration.
struct Setup {
    directory: TempDir,
}

impl Setup {
    fn new(url: &str) -> Setup {
        let setup = Setup { directory: tempfile::tempdir().unwrap() };
        fs::create_dir(setup.path("plugins")).unwrap();
        setup.write(&format!(
            r#"
            [pipeline]
            name = "shop"
            [source]
            url = "{url}"
            publication = "shop"
            [[destination]]
            name = "warehouse"
            plugin = "postgres"
            mode = "merge"
            "#
        ));
        setup
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn write(&self, config: &str) {
        fs::write(self.path("tidegate.toml"), config).unwrap();
    }

    fn run(&self, arguments: &[&str]) -> Ran {
        let config = self.path("tidegate.toml");
        let mut all = vec!["--config", config.to_str().unwrap()];
        all.extend(arguments);
        tidegate(&all)
    }
}

/// A URL where nothing listens.
const NOWHERE: &str = "postgres://me@127.0.0.1:1/shop?sslmode=disable";

/// The line of `check --json` whose check is this.
#[track_caller]
fn line<'a>(checks: &'a Value, check: &str) -> &'a Value {
    let lines = checks["checks"].as_array().unwrap();
    lines.iter().find(|line| line["check"] == check).unwrap_or_else(|| panic!("no `{check}` in {checks:#}"))
}

#[test]
fn help_of_every_command_has_an_example() {
    for command in [
        &["run"][..],
        &["check"],
        &["status"],
        &["resync"],
        &["quarantine", "list"],
        &["quarantine", "show"],
        &["quarantine", "retry"],
        &["quarantine", "drop"],
        &["plugin", "build"],
        &["plugin", "list"],
        &["plugin", "inspect"],
        &["trigger", "install"],
        &["trigger", "print"],
        &["trigger", "uninstall"],
        &["demo"],
    ] {
        let help = tidegate(&[command, &["--help"]].concat());
        assert!(help.passed().contains("Example:\n  "), "{command:?}: {}", help.out);
    }
    assert!(tidegate(&["--version"]).passed().starts_with("tidegate 0."));
}

#[test]
fn wrong_usage_exits_with_2() {
    for arguments in
        [&["fly"][..], &["run", "--no-such-option"], &[], &["resync", "only-one"], &["demo", "--rows", "7"]]
    {
        assert_eq!(tidegate(arguments).code, 2, "{arguments:?}");
    }
    tidegate(&["--log-level", "=loud=", "status"]).failed(2, "cli.log-level");
}

#[test]
fn a_wrong_configuration_exits_with_2_and_names_what_is_wrong() {
    tidegate(&["--config", "/surely/not/there.toml", "run"]).failed(2, "config.read");
    let setup = Setup::new("${TIDEGATE_TEST_SURELY_NOT_SET}");
    let ran = setup.run(&["run"]);
    ran.failed(2, "config.environment");
    assert!(ran.err.contains("TIDEGATE_TEST_SURELY_NOT_SET"), "{}", ran.err);
    setup.write("[pipeline]\nname = 'shop'\nplugin = 'plugins'\n");
    let ran = setup.run(&["check"]);
    ran.failed(2, "config.unknown-key");
    assert!(ran.err.contains("[pipeline]") && ran.err.contains("Write `plugins`"), "{}", ran.err);
    assert!(!setup.path("state").exists(), "nothing is started");
}

#[test]
fn errors_have_no_colour_without_a_terminal() {
    let ran = tidegate(&["--config", "/surely/not/there.toml", "status"]);
    assert!(!ran.err.contains('\x1b'), "{:?}", ran.err);
}

#[test]
fn check_says_what_is_missing_at_the_source_and_exits_with_3() {
    let cluster = Cluster::start(&ClusterOptions::default()).unwrap();
    cluster.psql("postgres", "CREATE DATABASE shop").unwrap();
    cluster.psql("shop", "CREATE TABLE orders (id int PRIMARY KEY); CREATE ROLE plain LOGIN").unwrap();
    let setup = Setup::new(&cluster.url("shop"));
    let ran = setup.run(&["check", "--json"]);
    assert_eq!(ran.code, 3, "{}", ran.err);
    assert_eq!(line(&ran.json(), "source: server, role and slots")["code"], "publication.missing");
    assert_eq!(line(&ran.json(), "destination warehouse: plugin")["code"], "plugin.missing");

    cluster.psql("shop", "CREATE PUBLICATION shop FOR TABLE orders").unwrap();
    let checks = setup.run(&["check", "--json"]).json();
    assert_eq!(line(&checks, "source: server, role and slots")["ok"], true);
    let trigger = line(&checks, "source: DDL trigger");
    assert_eq!((&trigger["ok"], &trigger["code"]), (&Value::Bool(true), &Value::from("trigger.missing")));

    let config = fs::read_to_string(setup.path("tidegate.toml")).unwrap();
    setup.write(&config.replace("postgres@", "plain@"));
    let checks = setup.run(&["check", "--json"]).json();
    assert_eq!(line(&checks, "source: server, role and slots")["code"], "source.role-replication");
    assert!(!setup.path("state").exists(), "check writes nothing");
}

#[test]
fn check_names_a_server_without_logical_decoding() {
    let cluster = Cluster::start(&ClusterOptions::default().setting("wal_level", "replica")).unwrap();
    let setup = Setup::new(&cluster.url("postgres"));
    let ran = setup.run(&["check", "--json"]);
    assert_eq!(ran.code, 3);
    assert_eq!(line(&ran.json(), "source: server, role and slots")["code"], "source.wal-level");
    let ran = setup.run(&["check"]);
    assert_eq!(ran.code, 3);
    assert!(ran.out.contains("no   source: server") && ran.out.contains("next: "), "{}", ran.out);
    assert!(!ran.out.contains('\x1b'));
}

#[test]
fn a_wrong_password_is_told_and_not_shown() {
    let options = ClusterOptions { auth: Auth::Scram("right".to_owned()), ..ClusterOptions::default() };
    let cluster = Cluster::start(&options).unwrap();
    let setup = Setup::new(&format!("postgres://postgres@127.0.0.1:{}/postgres?sslmode=disable", cluster.port()));
    let config = fs::read_to_string(setup.path("tidegate.toml")).unwrap();
    setup.write(&config.replace("publication", "password = \"file:password\"\npublication"));
    fs::write(setup.path("password"), "hunter2\n").unwrap();
    let ran = setup.run(&["check", "--json"]);
    assert_eq!(ran.code, 3);
    let connection = line(&ran.json(), "source: connection").clone();
    assert_eq!(connection["ok"], false, "{connection}");
    assert!(!ran.out.contains("hunter2") && !ran.err.contains("hunter2"));
    fs::write(setup.path("password"), "right\n").unwrap();
    assert_eq!(line(&setup.run(&["check", "--json"]).json(), "source: connection")["ok"], true);
}

#[test]
fn the_trigger_is_installed_seen_by_check_and_removed() {
    let cluster = Cluster::start(&ClusterOptions::default()).unwrap();
    cluster
        .psql("postgres", "CREATE ROLE reader LOGIN REPLICATION; CREATE TABLE t (id int PRIMARY KEY); GRANT SELECT ON t TO reader; CREATE PUBLICATION shop FOR TABLE t")
        .unwrap();
    let setup = Setup::new(&cluster.url_as("reader", None, "postgres"));
    setup.run(&["trigger", "install"]).failed(3, "trigger.install");
    let admin = cluster.url("postgres");
    assert!(setup.run(&["trigger", "install", "--url", &admin]).passed().contains("for role reader"));
    assert_eq!(line(&setup.run(&["check", "--json"]).json(), "source: DDL trigger")["detail"], "at work");
    setup.run(&["trigger", "uninstall", "--url", &admin]).passed();
    assert_eq!(line(&setup.run(&["check", "--json"]).json(), "source: DDL trigger")["code"], "trigger.missing");
    cluster.psql("postgres", "CREATE DATABASE other").unwrap();
    setup.run(&["trigger", "install", "--url", &cluster.url("other")]).failed(2, "trigger.other-database");
    let printed = tidegate(&["trigger", "print", "--role", "reader"]);
    assert!(printed.passed().contains("CREATE EVENT TRIGGER") && printed.out.contains("\"reader\""));
}

#[test]
fn status_reads_the_state_of_a_pipeline_that_does_not_run() {
    let setup = Setup::new("${TIDEGATE_TEST_SURELY_NOT_SET}");
    setup.run(&["status"]).failed(2, "state.missing");
    drop(Store::open(&setup.path("state"), "shop").unwrap());
    let report = setup.run(&["status", "--json"]);
    report.passed();
    assert_eq!(report.json()["pipeline"], "shop");
    assert_eq!(report.json()["pid"], Value::Null);
    assert!(setup.run(&["status"]).passed().contains("does not run"));
}

#[test]
fn resync_is_refused_while_a_process_has_the_state_and_names_it() {
    let setup = Setup::new(NOWHERE);
    let held = Store::open(&setup.path("state"), "shop").unwrap();
    let ran = setup.run(&["resync", "warehouse", "public.orders"]);
    ran.failed(2, "state.in-use");
    assert!(ran.err.contains(&format!("process {}", std::process::id())), "{}", ran.err);
    drop(held);
    setup.run(&["resync", "warehouse", "public.orders"]).failed(2, "resync.unknown-destination");
}

#[test]
fn plugins_that_are_missing_or_broken_are_named() {
    let setup = Setup::new(NOWHERE);
    setup.run(&["plugin", "inspect", "postgres"]).failed(2, "plugin.missing");
    assert!(setup.run(&["plugin", "list"]).passed().contains("no plugins"));
    fs::write(setup.path("plugins/broken.wasm"), b"not a component").unwrap();
    let listed = setup.run(&["plugin", "list", "--json"]);
    listed.passed();
    assert_eq!(listed.json()[0]["name"], "broken");
    assert!(listed.json()[0]["error"]["code"].as_str().unwrap().starts_with("plugin."));
    let broken = setup.path("plugins/broken.wasm");
    let ran = tidegate(&["plugin", "inspect", broken.to_str().unwrap()]);
    assert!(matches!(ran.code, 2 | 3), "{}", ran.err);
    let ran = tidegate(&["demo", "--plugins", setup.path("plugins").to_str().unwrap()]);
    ran.failed(2, "plugin.missing");
    assert!(ran.err.contains("make plugins"), "{}", ran.err);
}

#[test]
fn an_unreachable_source_is_told_with_where_it_was_looked_for() {
    let ran = Setup::new(NOWHERE).run(&["check", "--json"]);
    assert_eq!(ran.code, 3);
    let connection = line(&ran.json(), "source: connection").clone();
    assert!(connection["message"].as_str().unwrap().contains("127.0.0.1:1"), "{connection}");
}

#[test]
fn a_relative_configuration_finds_its_neighbours() {
    let setup = Setup::new(NOWHERE);
    drop(Store::open(&setup.path("state"), "shop").unwrap());
    let ran: Ran = command(&["status"]).current_dir(setup.directory.path()).output().unwrap().into();
    ran.passed();
    let elsewhere: Ran = command(&["status"]).current_dir(Path::new("/")).output().unwrap().into();
    elsewhere.failed(2, "config.read");
}
