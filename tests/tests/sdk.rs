//! The SDK as an author of plugins meets it: by its documentation, elsewhere.

use std::path::Path;
use std::process::Command;

use tidegate_tests::{Pipeline, database, source, tidegate, wait_for};

/// The plugin of the SDK's documentation, which includes the same file.
const PRINT: &str = include_str!("../../sdk/rust/examples/print.rs");

#[test]
fn the_plugin_of_the_documentation_builds_outside_of_the_workspace_and_runs() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let elsewhere = tempfile::tempdir().unwrap();
    let (author, plugins) = (elsewhere.path().join("print"), elsewhere.path().join("plugins"));
    std::fs::create_dir_all(author.join("src")).unwrap();
    std::fs::write(author.join("src/lib.rs"), PRINT).unwrap();
    let manifest = format!(
        "[package]\nname = \"print\"\nversion = \"1.2.3\"\nedition = \"2024\"\n\n[lib]\ncrate-type = [\"cdylib\"]\n\n\
         [dependencies]\nschemars = \"1\"\nserde = {{ version = \"1\", features = [\"derive\"] }}\ntidegate-sdk = {{ path = \"{}\" }}\n",
        root.join("sdk/rust").display()
    );
    // Our profile and versions, so that nothing is downloaded or compiled for this test alone.
    let workspace = std::fs::read_to_string(root.join("Cargo.toml")).unwrap();
    let profile = &workspace[workspace.find("[profile.release]").unwrap()..];
    std::fs::write(author.join("Cargo.toml"), format!("{manifest}\n{profile}")).unwrap();
    std::fs::copy(root.join("Cargo.lock"), author.join("Cargo.lock")).unwrap();
    let built = Command::new(tidegate())
        .args(["plugin", "build", "--quiet"])
        .arg(&author)
        .arg("--out")
        .arg(&plugins)
        .output()
        .unwrap();
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));

    let source = database(source(), "sdk");
    source.sql("CREATE TABLE t (id int PRIMARY KEY); CREATE PUBLICATION pub FOR ALL TABLES");
    let destination = "[[destination]]\nname = \"log\"\nplugin = \"print\"\nmode = \"changes\"\ntables = [\"*.*\"]\n\
                       [destination.settings]\nprefix = \"seen here\"\n";
    let mut pipeline = Pipeline::new(&source, destination);
    let config = pipeline.directory().join("tidegate.toml");
    let ours = std::fs::read_to_string(&config).unwrap();
    let theirs = ours.lines().map(|line| match line.starts_with("plugins = ") {
        true => format!("plugins = \"{}\"\n", plugins.display()),
        false => format!("{line}\n"),
    });
    std::fs::write(&config, theirs.collect::<String>()).unwrap();
    pipeline.start();
    pipeline.wait_ready();
    source.sql("INSERT INTO t SELECT generate_series(1, 3)");
    let oid = source.sql("SELECT 't'::regclass::oid");
    let line = format!("seen here: table {oid}, 3 rows");
    wait_for("the batch is in the log", || pipeline.log().contains(&line).then_some(()));
    assert_eq!(pipeline.stop(), 0);
}
