//! The plugins directory while the host runs: what is dropped there takes over between two
//! groups, what is no good changes nothing, and what does not do well goes again.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};
use tidegate::status::{DestinationState, DestinationStatus, PluginVersion, StatusReport};
use tidegate_tests::{
    Database, Pipeline, Traffic, database, fixtures, mirror, plugins, postgres_destination, source, wait_for,
};

/// A source with one table of this many rows.
fn rows_at_source(test: &str, rows: u32) -> Database {
    let source = database(source(), test);
    source.sql(&format!(
        "CREATE TABLE t (id int PRIMARY KEY, note text); INSERT INTO t SELECT g, 'row' FROM generate_series(1, {rows}) g;
         CREATE PUBLICATION pub FOR ALL TABLES"
    ));
    source
}

/// A pipeline with a plugins directory of its own.
fn pipeline(source: &Database, destinations: &str) -> Pipeline {
    let pipeline = Pipeline::new(source, destinations);
    let file = pipeline.directory().join("tidegate.toml");
    let text = std::fs::read_to_string(&file).unwrap();
    let shared = format!("plugins = \"{}\"", plugins().display());
    assert!(text.contains(&shared), "{text}");
    std::fs::write(&file, text.replace(&shared, "plugins = \"plugins\"")).unwrap();
    std::fs::create_dir(pipeline.directory().join("plugins")).unwrap();
    std::fs::create_dir(pipeline.directory().join("kept")).unwrap();
    pipeline
}

/// A `[[destination]]` of the hostile fixture, which keeps the keys that it has made durable
/// in `kept/<name>`.
fn keeping(name: &str, settings: &str) -> String {
    format!(
        "[[destination]]\nname = \"{name}\"\nplugin = \"hostile\"\nmode = \"changes\"\ntables = [\"public.t\"]\n\
         [destination.settings]\nkeep = \"{{dir}}/kept/{name}\"\n{settings}\n[destination.grant]\nfiles = [\"{{dir}}/kept\"]\n"
    )
}

fn file(pipeline: &Pipeline, plugin: &str) -> PathBuf {
    pipeline.directory().join("plugins").join(plugin).with_extension("wasm")
}

/// Puts a file in another's place at once, as who cares does.
fn put(path: &Path, bytes: &[u8]) {
    let temporary = path.with_extension("wasm.tmp");
    std::fs::write(&temporary, bytes).unwrap();
    std::fs::rename(&temporary, path).unwrap();
}

/// The same code as another version: with a section that means nothing.
fn version(component: &[u8], number: u8) -> Vec<u8> {
    let mut bytes = component.to_vec();
    bytes.extend([0, 9]);
    bytes.extend(b"\x07version");
    bytes.push(number);
    bytes
}

/// The hostile fixture with something else in its mark: what it is, and what it does
/// whatever the settings say.
fn hostile(mark: &Value) -> Vec<u8> {
    let bytes = std::fs::read(fixtures().join("hostile.wasm")).unwrap();
    overwritten(bytes, "hostile-mark:{}", &format!("hostile-mark:{mark}"))
}

fn overwritten(mut bytes: Vec<u8>, from: &str, to: &str) -> Vec<u8> {
    let is_there = |at: &usize| bytes[*at..].starts_with(from.as_bytes());
    let places: Vec<usize> = (0..bytes.len() - to.len()).filter(is_there).collect();
    assert!(!places.is_empty(), "{from} is not in the fixture");
    for at in places {
        bytes[at..at + to.len()].copy_from_slice(to.as_bytes());
    }
    bytes
}

/// A hostile fixture that does this in that function.
fn doing(version: &str, on: &str, what: &str) -> Vec<u8> {
    hostile(&json!({"version": version, "settings": {"on": on, "do": what}}))
}

fn sha256(bytes: &[u8]) -> String {
    let mut sum = Command::new("sha256sum")
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    sum.stdin.take().unwrap().write_all(bytes).unwrap();
    let output = sum.wait_with_output().unwrap();
    String::from_utf8(output.stdout).unwrap().split_whitespace().next().unwrap().to_owned()
}

fn of<'a>(status: &'a StatusReport, destination: &str) -> Option<&'a DestinationStatus> {
    status.destinations.iter().find(|known| known.name == destination)
}

fn plugin_of(status: &StatusReport, destination: &str) -> PluginVersion {
    of(status, destination).and_then(|known| known.plugin_version.clone()).unwrap_or_default()
}

/// Waits until a destination has this version and nothing else is in the directory.
fn wait_version(pipeline: &mut Pipeline, destination: &str, bytes: &[u8]) -> PluginVersion {
    let digest = sha256(bytes);
    let status = pipeline.wait_status(&format!("{destination} has the version {digest}"), |status| {
        let plugin = plugin_of(status, destination);
        plugin.sha256 == digest && plugin.differs.is_none()
    });
    plugin_of(&status, destination)
}

/// Waits until `status` says why the file is not what is at work.
fn wait_differs(pipeline: &mut Pipeline, destination: &str, code: &str) -> PluginVersion {
    let status = pipeline.wait_status(&format!("{destination} says {code}"), |status| {
        plugin_of(status, destination).differs.is_some_and(|why| why.code == code)
    });
    plugin_of(&status, destination)
}

/// The keys that a destination has made durable, in order.
fn kept(pipeline: &Pipeline, destination: &str) -> Vec<u32> {
    let text = std::fs::read_to_string(pipeline.directory().join("kept").join(destination)).unwrap_or_default();
    let mut keys: Vec<u32> = text.lines().map(|line| line.parse().unwrap()).collect();
    keys.sort_unstable();
    keys
}

fn keys(source: &Database) -> Vec<u32> {
    source.sql("SELECT id FROM t ORDER BY 1").lines().map(|line| line.parse().unwrap()).collect()
}

/// Waits until a destination has every row of the source, each of them once.
fn assert_kept_once(pipeline: &mut Pipeline, source: &Database, destination: &str) {
    pipeline.wait_caught_up(source);
    assert_eq!(kept(pipeline, destination), keys(source), "{}", pipeline.log());
}

/// Waits until a destination has every row of the source.
fn wait_kept(pipeline: &Pipeline, source: &Database, destination: &str) {
    let keys = keys(source);
    wait_for(&format!("{destination} has every row"), || {
        let mut there = kept(pipeline, destination);
        there.dedup();
        (there == keys).then_some(())
    });
}

fn insert(source: &Database) {
    source.sql("INSERT INTO t SELECT max(id) + 1, 'row' FROM t");
}

#[test]
fn versions_that_are_renamed_or_slowly_copied_into_the_directory_take_over_under_load_and_no_row_is_lost_or_doubled() {
    let source = rows_at_source("swap_load", 1000);
    source.sql("CREATE TABLE u (id int PRIMARY KEY, n int); INSERT INTO u SELECT g, 0 FROM generate_series(1, 50) g");
    let mirrors = [database(mirror(), "swap_one"), database(mirror(), "swap_two")];
    // Two of one plugin, and one that would show a row that comes twice: it accepts first.
    let destinations = format!(
        "{}\n{}\n{}",
        postgres_destination("one", &mirrors[0]),
        postgres_destination("two", &mirrors[1]),
        keeping("log", "late = true")
    );
    let mut pipeline = pipeline(&source, &destinations);
    let postgres = std::fs::read(plugins().join("postgres.wasm")).unwrap();
    let (mirror_file, log_file) = (file(&pipeline, "postgres"), file(&pipeline, "hostile"));
    put(&mirror_file, &postgres);
    put(&log_file, &hostile(&json!({})));
    pipeline.start();
    pipeline.wait_ready();
    let first = plugin_of(&pipeline.wait_ready(), "one");
    assert_eq!((first.sha256, first.differs), (sha256(&postgres), None));

    let traffic = Traffic::start(&source, |number| {
        let from = 10_000 + number * 20;
        format!(
            "INSERT INTO t SELECT g, 'new' FROM generate_series({from}, {from} + 19) g; UPDATE u SET n = n + 1 WHERE id % 7 = {} % 7",
            number
        )
    });
    traffic.wait_for(10);
    let second = version(&postgres, 2);
    put(&mirror_file, &second);
    put(&log_file, &hostile(&json!({"version": "2"})));
    let before = [wait_version(&mut pipeline, "one", &second), wait_version(&mut pipeline, "two", &second)];
    assert_eq!(wait_version(&mut pipeline, "log", &hostile(&json!({"version": "2"}))).version, "2");
    traffic.wait_for(10);

    // In place, with a pause in the middle until the host has looked at what is there.
    let third = version(&postgres, 3);
    let mut slow = std::fs::File::create(&mirror_file).unwrap();
    let half = third.len() / 2;
    slow.write_all(&third[..half]).unwrap();
    for name in ["one", "two"] {
        wait_differs(&mut pipeline, name, "plugin.damaged");
    }
    traffic.wait_for(10);
    for chunk in third[half..].chunks(third.len() / 20) {
        slow.write_all(chunk).unwrap();
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    drop(slow);
    for (name, before) in ["one", "two"].into_iter().zip(before) {
        let after = wait_version(&mut pipeline, name, &third);
        assert_eq!(after.generation, before.generation + 1, "the half-written file disturbed {name}");
    }
    traffic.wait_for(10);
    traffic.stop();

    assert_kept_once(&mut pipeline, &source, "log");
    for mirror in &mirrors {
        for table in ["t", "u"] {
            assert_eq!(source.rows(table), mirror.rows(table), "{table}");
        }
    }
    let usage = pipeline.status().unwrap().destinations.into_iter().map(|known| known.usage.unwrap());
    for usage in usage {
        assert_eq!((usage.traps, usage.timeouts, usage.failures), (0, 0, 0));
    }
}

#[test]
fn a_version_that_does_not_fit_is_refused_by_name_and_the_one_at_work_goes_on() {
    let source = rows_at_source("swap_refused", 10);
    let mut pipeline = pipeline(&source, &keeping("log", ""));
    let path = file(&pipeline, "hostile");
    let (can, whole) = (["changes", "partial-rows"], hostile(&json!({})));
    let first = hostile(&json!({"capabilities": can}));
    put(&path, &first);
    pipeline.start();
    pipeline.wait_ready();
    let at_work = wait_version(&mut pipeline, "log", &first);

    let world = overwritten(whole.clone(), "tidegate:destination/plugin@0.1.0", "tidegate:destination/plugik@0.1.0");
    let contract = overwritten(whole.clone(), "tidegate:destination/plugin@0.1.0", "tidegate:destination/plugin@0.9.0");
    let schema = json!({"type": "object", "additionalProperties": false}).to_string();
    let other_table = json!({"physical": "render-table", "as": "escape-codes"});
    let cases = [
        ("plugin.damaged", whole[..whole.len() / 2].to_vec(), 0),
        ("plugin.not-a-component", b"not yet".to_vec(), 0),
        ("plugin.missing-export", world, 0),
        ("plugin.version", contract, 0),
        ("plugin.describe", hostile(&json!({"capabilities": can, "describe": "trap"})), 0),
        ("plugin.settings", hostile(&json!({"capabilities": can, "schema": schema})), 0),
        ("plugin.mode", hostile(&json!({"capabilities": ["merge", "partial-rows"]})), 0),
        ("plugin.grant", hostile(&json!({"capabilities": can, "permissions": ["network:keep"]})), 0),
        ("plugin.capability-lost", hostile(&json!({"capabilities": ["changes"]})), 0),
        ("plugin.capability-new", hostile(&json!({"capabilities": ["changes", "partial-rows", "transactional"]})), 0),
        // It takes an instance to know these: one of it, and one of the version before.
        ("plugin.other-table", hostile(&json!({"capabilities": can, "settings": other_table})), 2),
        (
            "plugin.taken-back",
            hostile(&json!({"capabilities": can, "settings": {"on": "open", "do": "long-message"}})),
            2,
        ),
    ];
    let mut generation = at_work.generation;
    for (code, bytes, instances) in cases {
        put(&path, &bytes);
        let said = wait_differs(&mut pipeline, "log", code);
        let why = said.differs.unwrap();
        assert!(why.next.is_some(), "{why:?}");
        insert(&source);
        wait_kept(&pipeline, &source, "log");
        let now = plugin_of(&pipeline.status().unwrap(), "log");
        generation += instances;
        assert_eq!((now.sha256.as_str(), now.generation), (at_work.sha256.as_str(), generation), "{code}");
    }
    let good = hostile(&json!({"capabilities": can, "version": "2"}));
    put(&path, &good);
    wait_version(&mut pipeline, "log", &good);
    insert(&source);
    assert_kept_once(&mut pipeline, &source, "log");
}

#[test]
fn a_version_that_fails_in_its_first_batch_is_taken_back_under_load_and_not_tried_again_until_the_file_changes() {
    let source = rows_at_source("swap_back", 100);
    // The second has nothing to do: its version is on trial for as long as that is so.
    let limits = "[destination.limits]\ncall_idle_ms = 3000\n";
    let destinations = format!("{}{limits}\n{}", keeping("log", "late = true"), keeping("other", ""));
    let mut pipeline = pipeline(&source, &destinations.replacen("plugin = \"hostile\"", "plugin = \"first\"", 1));
    let (path, other) = (file(&pipeline, "first"), file(&pipeline, "hostile"));
    let mut good = hostile(&json!({"version": "1"}));
    put(&path, &good);
    put(&other, &good);
    pipeline.start();
    pipeline.wait_ready();
    let traffic = Traffic::start(&source, |number| {
        let from = 1000 + number * 10;
        format!("INSERT INTO t SELECT g, 'new' FROM generate_series({from}, {from} + 9) g")
    });
    traffic.wait_for(5);
    for (number, on, what) in [
        (1, "open", "trap"),
        (2, "attach-tables", "panic"),
        (3, "write-group", "panic"),
        (4, "write-group", "ack-ahead"),
        (5, "write-group", "loop"),
        (6, "flush", "trap"),
    ] {
        let bad = doing(&format!("bad {number}"), on, what);
        put(&path, &bad);
        let said = wait_differs(&mut pipeline, "log", "plugin.taken-back");
        wait_for("the log says what failed", || {
            let log = pipeline.log();
            (log.contains(&format!("version bad {number} ")) && log.contains("plugin.taken-back")).then_some(())
        });
        assert_eq!(said.sha256, sha256(&good), "{on} {what}");
        traffic.wait_for(5);
        // Another digest each time, or it would be no change of the file.
        good = hostile(&json!({"version": format!("good {number}")}));
        put(&path, &good);
        wait_version(&mut pipeline, "log", &good);
        traffic.wait_for(5);
    }
    traffic.stop();
    pipeline.wait_caught_up(&source);
    wait_kept(&pipeline, &source, "log");

    let bad = doing("bad", "write-group", "trap");
    put(&path, &bad);
    // On trial until a row comes.
    wait_version(&mut pipeline, "log", &bad);
    insert(&source);
    wait_differs(&mut pipeline, "log", "plugin.taken-back");
    wait_kept(&pipeline, &source, "log");
    let said = plugin_of(&pipeline.status().unwrap(), "log");
    // Touched it is the same; what was put beside it later is taken meanwhile.
    std::fs::File::options().write(true).open(&path).unwrap().set_modified(std::time::SystemTime::now()).unwrap();
    let later = hostile(&json!({"version": "later"}));
    put(&other, &later);
    wait_version(&mut pipeline, "other", &later);
    let now = plugin_of(&pipeline.status().unwrap(), "log");
    assert_eq!((now.generation, now.sha256), (said.generation, sha256(&good)));

    // Nor after a restart: the last good one is kept.
    assert_eq!(pipeline.stop(), 0);
    pipeline.start();
    let said = wait_differs(&mut pipeline, "log", "plugin.taken-back");
    assert_eq!(said.sha256, sha256(&good));
    insert(&source);
    wait_kept(&pipeline, &source, "log");
    let fixed = hostile(&json!({"version": "fixed"}));
    put(&path, &fixed);
    wait_version(&mut pipeline, "log", &fixed);
    insert(&source);
    wait_kept(&pipeline, &source, "log");
    assert_eq!(kept(&pipeline, "other"), keys(&source), "the other destination was never disturbed");
}

#[test]
fn a_host_that_is_killed_while_a_version_is_on_trial_takes_it_back_all_the_same() {
    let source = rows_at_source("swap_killed", 10);
    let mut pipeline = pipeline(&source, &keeping("log", ""));
    let path = file(&pipeline, "hostile");
    let (good, bad) = (hostile(&json!({"version": "good"})), doing("bad", "write-group", "trap"));
    put(&path, &good);
    pipeline.start();
    pipeline.wait_ready();
    insert(&source);
    wait_kept(&pipeline, &source, "log");
    wait_for("it is known that it did well", || {
        let known = std::fs::read_to_string(pipeline.directory().join("state/plugins.json")).ok()?;
        known.contains(&sha256(&good)).then_some(())
    });
    put(&path, &bad);
    wait_version(&mut pipeline, "log", &bad);
    pipeline.kill();
    insert(&source);
    pipeline.start();
    assert_eq!(wait_differs(&mut pipeline, "log", "plugin.taken-back").version, "good");
    wait_kept(&pipeline, &source, "log");
}

#[test]
fn a_plugin_whose_file_goes_stays_at_work_and_the_next_start_is_refused_by_name() {
    let source = rows_at_source("swap_gone", 10);
    let mut pipeline = pipeline(&source, &keeping("log", ""));
    let (path, first) = (file(&pipeline, "hostile"), hostile(&json!({"version": "1"})));
    put(&path, &first);
    pipeline.start();
    pipeline.wait_ready();
    std::fs::remove_file(&path).unwrap();
    let gone = wait_differs(&mut pipeline, "log", "plugin.file-gone");
    insert(&source);
    assert_kept_once(&mut pipeline, &source, "log");
    put(&path, &first);
    assert_eq!(wait_version(&mut pipeline, "log", &first).generation, gone.generation);
    let second = hostile(&json!({"version": "2"}));
    std::fs::remove_file(&path).unwrap();
    wait_differs(&mut pipeline, "log", "plugin.file-gone");
    put(&path, &second);
    wait_version(&mut pipeline, "log", &second);
    std::fs::remove_file(&path).unwrap();
    wait_differs(&mut pipeline, "log", "plugin.file-gone");
    assert_eq!(pipeline.stop(), 0);
    pipeline.start();
    assert_eq!(pipeline.wait_end(), 2);
    let log = pipeline.log();
    assert!(log.contains("plugin.missing") && log.contains("there is no plugin `hostile`"), "{log}");
}

#[test]
fn a_destination_that_is_added_before_its_plugin_begins_once_a_good_file_is_there() {
    let source = rows_at_source("swap_waits", 10);
    let mut pipeline = pipeline(&source, &keeping("log", ""));
    put(&file(&pipeline, "hostile"), &hostile(&json!({})));
    pipeline.start();
    pipeline.wait_ready();
    let config = pipeline.directory().join("tidegate.toml");
    let added = keeping("late", "")
        .replace("\"hostile\"", "\"late\"")
        .replace("{dir}", &pipeline.directory().display().to_string());
    let text = std::fs::read_to_string(&config).unwrap();
    std::fs::write(&config, format!("{text}\n{added}")).unwrap();
    pipeline.hang_up();
    let says = |code: &'static str| {
        move |status: &StatusReport| {
            of(status, "late").is_some_and(|late| {
                late.state == DestinationState::Errored && late.error.as_ref().is_some_and(|error| error.code == code)
            })
        }
    };
    pipeline.wait_status("its plugin is missing", says("plugin.missing"));
    let whole = hostile(&json!({"version": "late"}));
    std::fs::write(file(&pipeline, "late"), &whole[..whole.len() / 3]).unwrap();
    pipeline.wait_status("its plugin is damaged", says("plugin.damaged"));
    std::fs::write(file(&pipeline, "late"), &whole).unwrap();
    wait_version(&mut pipeline, "late", &whole);
    insert(&source);
    pipeline.wait_ready();
    assert_kept_once(&mut pipeline, &source, "late");
    assert_kept_once(&mut pipeline, &source, "log");
    assert_eq!(pipeline.stop(), 0);
}

#[test]
fn a_destination_that_waits_for_somebody_takes_a_version_that_helps_at_once() {
    let source = rows_at_source("swap_helps", 10);
    let mut pipeline = pipeline(&source, &keeping("log", ""));
    let path = file(&pipeline, "hostile");
    put(&path, &doing("1", "open", "long-message"));
    pipeline.start();
    pipeline.wait_status("it waits for somebody", |status| {
        of(status, "log").is_some_and(|log| log.state == DestinationState::Errored)
    });
    let second = doing("2", "write-group", "long-message");
    put(&path, &second);
    wait_version(&mut pipeline, "log", &second);
    pipeline.wait_status("the next one waits with its first group", |status| {
        of(status, "log").is_some_and(|log| log.state == DestinationState::Errored)
    });
    let third = hostile(&json!({"version": "3"}));
    put(&path, &third);
    wait_version(&mut pipeline, "log", &third);
    pipeline.wait_ready();
    insert(&source);
    assert_kept_once(&mut pipeline, &source, "log");
}

#[test]
fn a_copy_that_is_under_way_goes_on_and_the_version_waits_for_its_end() {
    let source = rows_at_source("swap_copy", 3000);
    source.sql("UPDATE t SET note = repeat('x', 10000)");
    let slow = "on = \"write-group\"\ndo = \"sleep\"\nms = 500\n[destination.limits]\ngroup_bytes = 1024\n";
    let mut pipeline = pipeline(&source, &keeping("log", slow));
    let path = file(&pipeline, "hostile");
    put(&path, &hostile(&json!({"version": "1"})));
    pipeline.start();
    pipeline.wait_status("rows are copied", |status| {
        of(status, "log").is_some_and(|log| log.tables.iter().any(|table| table.rows_copied > 0))
    });
    let second = hostile(&json!({"version": "2", "settings": {"do": "nothing", "on": ""}}));
    put(&path, &second);
    assert_eq!(wait_differs(&mut pipeline, "log", "plugin.waits").version, "1");
    wait_version(&mut pipeline, "log", &second);
    pipeline.wait_ready();
    insert(&source);
    assert_kept_once(&mut pipeline, &source, "log");
}

#[test]
fn a_file_of_another_digest_or_signer_is_refused_at_a_start_and_while_it_runs() {
    let source = rows_at_source("swap_signed", 10);
    let ours = minisign::KeyPair::generate_unencrypted_keypair().unwrap();
    let other = minisign::KeyPair::generate_unencrypted_keypair().unwrap();
    let sign = |key: &minisign::KeyPair, bytes: &[u8]| {
        minisign::sign(None, &key.sk, std::io::Cursor::new(bytes), None, None).unwrap().into_string()
    };
    let (first, second) = (hostile(&json!({"version": "1"})), hostile(&json!({"version": "2"})));
    let pinned = keeping("log", "").replacen("mode =", &format!("sha256 = \"{}\"\nmode =", sha256(&first)), 1);
    let signed = keeping("signed", "").replace("\"hostile\"", "\"signed\"").replacen(
        "mode =",
        &format!("public_key = \"{}\"\nmode =", ours.pk.to_base64()),
        1,
    );
    let mut pipeline = pipeline(&source, &format!("{pinned}\n{signed}"));
    let (pinned, signed) = (file(&pipeline, "hostile"), file(&pipeline, "signed"));
    let signature = signed.with_extension("wasm.minisig");

    let mut refused = |code: &str| {
        pipeline.start();
        assert_eq!(pipeline.wait_end(), 2);
        let log = pipeline.log();
        assert!(log.lines().last().is_some() && log.contains(code), "{code}: {log}");
        let check = pipeline.command(&["check", "--json"]).output().unwrap();
        assert!(String::from_utf8_lossy(&check.stdout).contains(code), "{code}: {check:?}");
    };
    put(&signed, &first);
    put(&pinned, &second);
    refused("plugin.sha256");
    put(&pinned, &first);
    refused("plugin.signature");
    std::fs::write(&signature, sign(&other, &first)).unwrap();
    refused("plugin.signature");
    std::fs::write(&signature, sign(&ours, &first)).unwrap();
    pipeline.start();
    pipeline.wait_ready();

    put(&pinned, &second);
    put(&signed, &second);
    assert_eq!(wait_differs(&mut pipeline, "log", "plugin.sha256").version, "1");
    assert_eq!(wait_differs(&mut pipeline, "signed", "plugin.signature").version, "1");
    // The signature comes behind the file.
    std::fs::write(&signature, sign(&ours, &second)).unwrap();
    wait_version(&mut pipeline, "signed", &second);
    put(&pinned, &first);
    wait_version(&mut pipeline, "log", &first);
    insert(&source);
    for name in ["log", "signed"] {
        assert_kept_once(&mut pipeline, &source, name);
    }
}
