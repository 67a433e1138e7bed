//! The short run of `make schema-matrix`: one version.

use std::process::{Command, Stdio};

#[test]
fn every_kind_of_schema_change_comes_to_what_is_expected_of_it() {
    let output = Command::new(env!("CARGO_BIN_EXE_schema-matrix"))
        .envs([("MAJORS", "15"), ("ONLY", "capture"), ("CASE", "")])
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{said}\n{}", String::from_utf8_lossy(&output.stderr));
    println!("{said}");
}
