//! The short run of `make schema-matrix`: one version of PostgreSQL, some of the random
//! pairs, some of the changes that are interrupted.

use std::process::{Command, Stdio};

fn run(part: &str, settings: &[(&str, &str)]) {
    let mut matrix = Command::new(env!("CARGO_BIN_EXE_schema-matrix"));
    matrix.envs([("MAJORS", "15"), ("ONLY", part), ("CASE", "")]).envs(settings.iter().copied());
    let output = matrix.stdin(Stdio::null()).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{said}\n{}", String::from_utf8_lossy(&output.stderr));
    println!("{said}");
}

#[test]
fn every_kind_of_schema_change_comes_to_what_is_expected_of_it() {
    run("capture", &[]);
}

#[test]
fn the_steps_between_any_two_schemas_lead_from_one_to_the_other_and_every_state_between_is_legal() {
    run("plan", &[("CASES", "100"), ("SEED", "1")]);
}

#[test]
fn a_change_that_is_interrupted_at_any_step_recovers_by_itself() {
    run("apply", &[("SHORT", "1")]);
}
