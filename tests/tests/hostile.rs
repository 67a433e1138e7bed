//! The short run of `make hostile`: a few ways to misbehave, each beside a destination that
//! counts.

use std::process::{Command, Stdio};

#[test]
fn a_plugin_that_does_its_worst_costs_nobody_else_anything_and_loses_nothing() {
    let cases = ["trap-once", "loop", "ack-ahead", "describe-trap"];
    let mut hostile = Command::new(env!("CARGO_BIN_EXE_hostile"));
    // Other tests use the machine: what the others keep of their throughput says nothing.
    hostile.env("ONLY", cases.join(",")).env("KEPT", "0");
    let output = hostile.stdin(Stdio::null()).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{said}\n{}", String::from_utf8_lossy(&output.stderr));
    for case in cases {
        let is_ok = |line: &&str| line.starts_with(&format!("ok      {case} ")) && line.ends_with("lost: nothing");
        assert_eq!(said.lines().filter(is_ok).count(), 1, "{case}: {said}");
    }
}
