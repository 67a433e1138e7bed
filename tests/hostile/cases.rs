//! What the plugin does, and what is to come of it.

use serde_json::{Value, json};

use crate::load::File;

/// What the host has to do.
pub enum Expect {
    /// The destination works.
    Works,
    /// It says this code and tries again, or waits.
    Code(&'static str),
    /// One of its tables says this code.
    TableCode(&'static str),
    /// So many rows are in quarantine, and the rest goes on.
    Quarantined(u64),
    /// It is not taken up; the log has this code.
    Refused(&'static str),
}

/// One way to misbehave.
pub struct Case {
    pub name: &'static str,
    pub did: &'static str,
    pub settings: Value,
    /// Lines of `[destination.limits]`.
    pub limits: &'static str,
    /// Lines of `[destination.grant]`.
    pub grant: &'static str,
    pub file: File,
    pub expect: Expect,
    /// It goes right by itself after a while; otherwise it is cured.
    pub recovers: bool,
    /// It was refused something, which has to be counted.
    pub audited: bool,
}

fn case(name: &'static str, did: &'static str, settings: Value, expect: Expect) -> Case {
    Case { name, did, settings, limits: "", grant: "", file: File::Whole, expect, recovers: false, audited: false }
}

/// In `write-group`, once the table is copied.
fn writing(what: &str) -> Value {
    json!({"on": "write-group", "do": what, "changes": true})
}

const SHORT: &str = "call_idle_ms = 700\nopen_ms = 700\nstatic_call_ms = 3000";

pub fn all() -> Vec<Case> {
    use Expect::{Code, Quarantined, Refused, TableCode, Works};
    let mut cases = vec![
        Case { recovers: true, ..case("well-behaved", "nothing", json!({"changes": true}), Works) },
        Case {
            recovers: true,
            ..case(
                "trap-once",
                "traps on its first changes, once",
                json!({"on": "write-group", "do": "trap", "once": true, "changes": true}),
                Code("plugin.trap"),
            )
        },
        case("trap", "traps on every group", writing("trap"), Code("plugin.trap")),
        Case { limits: SHORT, ..case("loop", "loops for ever", writing("loop"), Code("plugin.timeout")) },
        Case {
            limits: SHORT,
            ..case("loop-in-host", "calls the host for ever", writing("loop-in-host"), Code("plugin.timeout"))
        },
        Case { limits: SHORT, ..case("sleep", "waits in the host for ever", writing("sleep"), Code("plugin.timeout")) },
        Case {
            limits: SHORT,
            ..case(
                "slow-open",
                "never comes out of `open`",
                json!({"on": "open", "do": "sleep"}),
                Code("plugin.timeout"),
            )
        },
        case(
            "panic-in-open",
            "panics in `open`",
            json!({"on": "open", "do": "panic", "words": "two\nlines \u{1b}[31m"}),
            Code("plugin.trap"),
        ),
        Case {
            limits: "memory_bytes = 67108864",
            ..case("memory", "allocates without end", writing("memory"), Code("plugin.trap"))
        },
        case("stack", "recurses without end", writing("stack"), Code("plugin.trap")),
        case("exit", "ends its process", writing("exit"), Code("plugin.trap")),
        case(
            "long-message",
            "fails with 4 MB of text and escape codes",
            writing("long-message"),
            Code("odd code\u{fffd}[31m"),
        ),
        Case {
            audited: true,
            ..case(
                "forbidden-host",
                "dials what is not granted",
                json!({"on": "write-group", "do": "dial", "host": "169.254.169.254", "port": 80, "changes": true}),
                Code("forbidden"),
            )
        },
        Case {
            recovers: true,
            ..case(
                "log-flood",
                "logs 100,000 lines of 1 kB, once",
                json!({"on": "write-group", "do": "log-flood", "once": true, "changes": true}),
                Works,
            )
        },
        Case {
            limits: "handles = 50",
            ..case(
                "open-files",
                "opens files without end",
                json!({"on": "write-group", "do": "open-files", "path": "{files}", "changes": true}),
                Code("plugin.trap"),
            )
        },
        case(
            "flush-forgets",
            "accepts, and has nothing durable after `flush`",
            json!({"on": "flush", "do": "forget", "late": true}),
            Code("plugin.broken-answer"),
        ),
        case("accept-only", "accepts, and never says more", writing("accept"), Code("plugin.broken-answer")),
        case("wrong-table", "fails for a table that nobody knows", writing("wrong-table"), Code("hostile.wrong-table")),
        Case {
            recovers: true,
            ..case(
                "wrong-rows",
                "fails for rows that are not there, once",
                json!({"on": "write-group", "do": "wrong-rows", "from": 2, "once": true, "changes": true}),
                Works,
            )
        },
        Case {
            recovers: true,
            ..case("poison", "traps over one row, each time", json!({"poison": "poison"}), Quarantined(1))
        },
        Case {
            recovers: true,
            ..case("wake", "asks for `tick` at once, always", json!({"wake": 0, "changes": true}), Works)
        },
        case(
            "extreme-limits",
            "asks for groups of no end, and pauses of none",
            json!({"on": "ready", "do": "extreme"}),
            Works,
        ),
        case(
            "many-limits",
            "answers `open` with a million limits",
            json!({"on": "ready", "do": "many"}),
            Code("plugin.broken-answer"),
        ),
        case(
            "too-few-positions",
            "answers with too few positions",
            json!({"on": "positions", "do": "too-few"}),
            Code("plugin.broken-answer"),
        ),
    ];
    for (name, did) in [
        ("ack-ahead", "says that a ticket is durable that was never given"),
        ("refuse-ticket", "refuses rows of a group that was never given"),
        ("refuse-batch", "refuses rows of a batch that is not there"),
        ("refuse-row", "refuses rows that are not there"),
        ("refuse-many", "refuses more rows than there are"),
    ] {
        cases.push(case(name, did, writing(name), Code("plugin.broken-answer")));
    }
    for (name, did, lie, code) in [
        ("position-behind", "says that it lost what was durable", "behind", "table.gap"),
        ("another-epoch", "says that it has what is to come", "another-epoch", "table.position-ahead"),
    ] {
        cases.push(Case {
            file: File::Marked(json!({"capabilities": ["changes", "transactional"]})),
            ..case(name, did, json!({"on": "positions", "do": lie}), TableCode(code))
        });
    }
    let version = File::Patched("tidegate:destination/plugin@0.1.0", "tidegate:destination/plugin@0.9.0");
    let world = File::Patched("tidegate:destination/plugin@0.1.0", "tidegate:destination/plugik@0.1.0");
    let import = File::Patched("wasi:cli/environment@", "wasi:sockets/network@");
    for (name, did, file, code) in [
        ("cut-short", "is half of a file", File::Cut, "plugin.damaged"),
        ("core-module", "is a core module", File::Core, "plugin.not-a-component"),
        ("another-version", "is of another version", version, "plugin.version"),
        ("another-world", "is of another world", world, "plugin.missing-export"),
        ("extra-import", "imports sockets", import, "plugin.extra-import"),
        ("describe-trap", "traps in `describe`", File::Marked(json!({"describe": "trap"})), "plugin.describe"),
        ("describe-loop", "loops in `describe`", File::Marked(json!({"describe": "loop"})), "plugin.describe"),
        ("constructor-loop", "loops in its constructors", File::Marked(json!({"start": "loop"})), "plugin.describe"),
        (
            "many-capabilities",
            "has a million capabilities",
            File::Marked(json!({"describe": "many-capabilities"})),
            "plugin.describe",
        ),
        (
            "endless-schema",
            "has a schema of settings that never ends",
            File::Marked(json!({"schema": "{\"$ref\": \"#\"}"})),
            "plugin.manifest",
        ),
    ] {
        cases.push(Case { file, ..case(name, did, json!({}), Refused(code)) });
    }
    let secret = |what: &str| json!({"on": "write-group", "do": what, "name": "password", "changes": true});
    for (name, did, what) in [
        ("secret-in-panic", "panics with a secret", "secret-in-panic"),
        ("secret-in-log", "logs a secret by every way", "secret-in-log"),
    ] {
        let expect = if what == "secret-in-panic" { Code("plugin.trap") } else { Works };
        cases.push(Case { grant: GRANT_SECRET, ..case(name, did, secret(what), expect) });
    }
    cases
}

const GRANT_SECRET: &str = "secrets = { password = { from = \"env:HOSTILE_SECRET\", readable = true } }";
