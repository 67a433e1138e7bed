//! From nothing to a plugin that runs: `plugin new`, `plugin build`, `plugin test`, and the
//! plugins that come with the host before the same suite.

use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;
use tidegate_tests::{Pipeline, database, fixtures, mirror, plugins, source, tidegate, wait_for};

fn run(directory: &Path, arguments: &[&str]) -> Output {
    Command::new(tidegate())
        .args(arguments)
        .current_dir(directory)
        .env("TIDEGATE_TEST_PASSWORD", "unused")
        .output()
        .unwrap()
}

/// Runs the suite, which has to go well, and gives its report.
fn passes(directory: &Path, arguments: &[&str]) -> Value {
    let output = run(directory, &[&["plugin", "test", "--json"], arguments].concat());
    let report: Value = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|_| panic!("{}", String::from_utf8_lossy(&output.stderr)));
    assert!(output.status.success() && report["ok"] == true, "{report:#}");
    assert!(report["usage"]["memory_peak_bytes"].as_u64() > Some(0) && report["bytes_per_call"].as_u64() > Some(0));
    report
}

/// The checks that were left out, by mode and beginning.
fn skipped(report: &Value) -> Vec<String> {
    let checks = report["checks"].as_array().unwrap().iter().filter(|check| check["outcome"] == "skipped");
    let name = |check: &Value| check["check"].as_str().unwrap().split([',', ';']).next().unwrap().to_owned();
    checks.map(|check| format!("{} {}", check["mode"].as_str().unwrap(), name(check))).collect()
}

#[test]
fn a_new_project_builds_offline_unmodified_passes_the_suite_and_runs_in_the_host() {
    let elsewhere = tempfile::tempdir().unwrap();
    let here = elsewhere.path();
    let made = run(here, &["plugin", "new", "to_log", "--lang", "rust"]);
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let built = Command::new(tidegate())
        .args(["plugin", "build", "to_log", "--out", "plugins", "--quiet"])
        .current_dir(here)
        .env("CARGO_NET_OFFLINE", "true")
        .output()
        .unwrap();
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    let report = passes(here, &["plugins/to_log.wasm", "--settings", "to_log/settings.toml"]);
    assert_eq!(skipped(&report), ["changes position: what is stored with the data comes back"]);
    let text = run(here, &["plugin", "test", "plugins/to_log.wasm", "--settings", "to_log/settings.toml"]);
    let text = String::from_utf8(text.stdout).unwrap();
    assert!(text.contains("ok   changes: open") && text.contains(" 0 failed"), "{text}");

    let source = database(source(), "plugin_new");
    source.sql("CREATE TABLE t (id int PRIMARY KEY); CREATE PUBLICATION pub FOR ALL TABLES");
    let destination = "[[destination]]\nname = \"log\"\nplugin = \"to_log\"\nmode = \"changes\"\n\
                       [destination.settings]\nprefix = \"seen\"\n";
    let mut pipeline = Pipeline::new(&source, destination);
    let config = pipeline.directory().join("tidegate.toml");
    let ours = std::fs::read_to_string(&config).unwrap();
    let theirs = ours.replace(&plugins().display().to_string(), &here.join("plugins").display().to_string());
    assert_ne!(ours, theirs);
    std::fs::write(&config, theirs).unwrap();
    pipeline.start();
    pipeline.wait_ready();
    source.sql("INSERT INTO t SELECT generate_series(1, 3)");
    let line = format!("seen: table {}, 3 rows", source.sql("SELECT 't'::regclass::oid"));
    wait_for("the batch is in the log", || pipeline.log().contains(&line).then_some(()));
    assert_eq!(pipeline.stop(), 0);
}

#[test]
fn a_language_without_an_sdk_is_refused_by_name() {
    let elsewhere = tempfile::tempdir().unwrap();
    for (language, name) in [("python", "Python"), ("javascript", "JavaScript")] {
        let refused = run(elsewhere.path(), &["plugin", "new", "x", "--lang", language]);
        let said = String::from_utf8(refused.stderr).unwrap();
        assert_eq!(refused.status.code(), Some(3), "{said}");
        assert!(said.contains("plugin.language") && said.contains(name), "{said}");
        assert!(!elsewhere.path().join("x").exists());
    }
}

#[test]
fn the_postgres_plugin_passes_the_suite() {
    let mirror = database(mirror(), "conformance");
    let directory = tempfile::tempdir().unwrap();
    let settings = format!(
        "host = \"127.0.0.1\"\nport = {}\ndatabase = \"{}\"\nuser = \"postgres\"\nsslmode = \"disable\"\n",
        mirror.port, mirror.name
    );
    std::fs::write(directory.path().join("settings.toml"), settings).unwrap();
    let (file, address) = (plugins().join("postgres.wasm"), format!("127.0.0.1:{}", mirror.port));
    let arguments = [
        file.to_str().unwrap(),
        "--settings",
        "settings.toml",
        "--network",
        &address,
        "--secret",
        "password=env:TIDEGATE_TEST_PASSWORD",
    ];
    for _ in 0..2 {
        // The second finds what the first has left.
        let report = passes(directory.path(), &arguments);
        assert_eq!(skipped(&report), [""; 0]);
    }
}

#[test]
fn the_files_plugin_passes_the_suite_in_each_format() {
    let directory = tempfile::tempdir().unwrap();
    let file = plugins().join("files.wasm");
    for format in ["parquet", "ndjson"] {
        let out = directory.path().join(format);
        std::fs::create_dir(&out).unwrap();
        let settings = serde_json::json!({"path": out, "format": format}).to_string();
        std::fs::write(directory.path().join("settings.json"), settings).unwrap();
        let arguments = [file.to_str().unwrap(), "--settings", "settings.json", "--files", out.to_str().unwrap()];
        let report = passes(directory.path(), &arguments);
        assert_eq!(skipped(&report), ["changes position: what is stored with the data comes back"]);
    }
}

#[test]
fn a_plugin_that_breaks_the_contract_fails_by_name_and_the_exit_code_says_so() {
    let directory = tempfile::tempdir().unwrap();
    let file = fixtures().join("hostile.wasm");
    let test = |settings: &str| {
        std::fs::write(directory.path().join("settings.toml"), settings).unwrap();
        run(directory.path(), &["plugin", "test", "--json", file.to_str().unwrap(), "--settings", "settings.toml"])
    };
    for (settings, check, why) in [
        ("on = \"write-group\"\ndo = \"ack-ahead\"", "copy: begins anew", "plugin.broken-answer"),
        ("on = \"write-group\"\ndo = \"refuse-row\"", "copy: begins anew", "plugin.broken-answer"),
        ("late = true\non = \"flush\"\ndo = \"forget\"", "copy: begins anew", "`flush` returned with 0 durable"),
        ("on = \"open\"\ndo = \"panic\"\nwords = \"here\"", "open", "plugin.trap"),
        ("on = \"positions\"\ndo = \"behind\"", "attach-tables", "it returns"),
        ("physical = \"render-table\"\nas = \"escape-codes\"", "inspect-table", "the table is to be"),
    ] {
        let output = test(settings);
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(output.status.code(), Some(3), "{settings}: {report:#}");
        let is_named = |failed: &Value| {
            failed["outcome"] == "failed"
                && failed["check"].as_str().unwrap().starts_with(check)
                && failed["detail"].as_str().unwrap().contains(why)
        };
        assert!(report["checks"].as_array().unwrap().iter().any(is_named), "{settings}: {report:#}");
    }
    let nothing = test("unknown = ");
    assert_eq!(nothing.status.code(), Some(2), "it is no TOML");
}
