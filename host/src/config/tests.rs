use super::*;

const HEAD: &str = r#"
[pipeline]
name = "shop"
[source]
url = "postgres://tidegate@db.internal/shop"
publication = "shop"
"#;

const DESTINATION: &str = r#"
[[destination]]
name = "warehouse"
plugin = "postgres"
mode = "merge"
"#;

fn parse(text: &str) -> Result<Config> {
    Document::parse(text, Path::new("tidegate.toml"), Path::new("/etc/tidegate"))?.config()
}

/// The error of a file that is whole but for this.
fn refused(addition: &str) -> Error {
    parse(&format!("{HEAD}{DESTINATION}{addition}")).unwrap_err()
}

#[track_caller]
fn assert_refused(error: &Error, code: &str, names: &[&str]) {
    assert_eq!(error.code(), code, "{}", error.report());
    assert_eq!(error.exit_code(), crate::error::Exit::Usage);
    for name in names {
        assert!(error.report().contains(name), "`{name}` is not in: {}", error.report());
    }
    assert!(error.next_step().is_some(), "no next step: {}", error.report());
}

#[test]
fn a_small_file_gets_the_defaults() {
    let config = parse(&format!("{HEAD}{DESTINATION}")).unwrap();
    assert_eq!(config.pipeline.state, Path::new("/etc/tidegate/state"));
    assert_eq!(config.pipeline.plugins, Path::new("/etc/tidegate/plugins"));
    assert_eq!(config.pipeline.drain, Duration::from_secs(20));
    assert_eq!(config.source.publication, "shop");
    assert_eq!(config.source.slot, "tidegate_shop");
    assert_eq!(config.copy, CopyConfig { connections: 4, connections_per_table: 4, resume_bytes: 1 << 30 });
    let destination = &config.destinations[0];
    assert_eq!(destination.settings, serde_json::json!({}));
    assert_eq!(destination.apply, ApplyMode::AutoSafe);
    let orders = TableName::new("public", "orders");
    assert!(destination.tables.matches(&orders));
    assert_eq!(destination.target(&orders), orders);
    assert_eq!(destination.table_settings(&orders), "{}");
}

#[test]
fn a_memory_budget_has_to_be_enough_for_all_destinations() {
    let with = |bytes: &str, more: &str| {
        let head = HEAD.replace("name = \"shop\"", &format!("name = \"shop\"\nmemory_bytes = {bytes}"));
        parse(&format!("{head}{DESTINATION}{more}"))
    };
    assert_eq!(with("67108864", "").unwrap().pipeline.memory_bytes, Some(64 << 20));
    assert_eq!(parse(&format!("{HEAD}{DESTINATION}")).unwrap().pipeline.memory_bytes, None);
    let second = DESTINATION.replace("warehouse", "second");
    for (bytes, more) in [("67108863", ""), ("67108864", second.as_str())] {
        assert_refused(&with(bytes, more).unwrap_err(), "config.memory", &["memory_bytes", bytes]);
    }
    assert!(with("83886080", &second).is_ok());
}

#[test]
fn a_history_of_schemas_has_a_bound_that_leaves_one() {
    let with = |line: &str| {
        let head = HEAD.replace("name = \"shop\"", &format!("name = \"shop\"\n{line}"));
        parse(&format!("{head}{DESTINATION}"))
    };
    assert_eq!(with("").unwrap().pipeline.schema_versions, 1000);
    assert_eq!(with("schema_versions = 10").unwrap().pipeline.schema_versions, 10);
    assert_refused(&with("schema_versions = 9").unwrap_err(), "config.invalid-value", &["schema_versions", "9"]);
}

#[test]
fn a_full_file_says_all_of_it() {
    let config = parse(&format!(
        r#"{HEAD}
        [[destination]]
        name = "warehouse"
        plugin = "clickhouse"
        mode = "changes"
        tables = ["public.*", "!public.audit"]
        [destination.settings]
        url = "http://ch.internal:8123"
        deep = {{ list = [1, 2.5, true, "x"] }}
        [destination.schema]
        apply = "block-destructive"
        [destination.limits]
        linger_ms = 0
        group_bytes = 1048576
        [[destination.table]]
        match = "public.*"
        target_schema = "mirror"
        [[destination.table]]
        match = "public.orders"
        target_table = "sales"
        settings = {{ order_by = ["id"] }}
        "#
    ))
    .unwrap();
    let destination = &config.destinations[0];
    assert_eq!(destination.mode.as_str(), "changes");
    assert_eq!(
        destination.settings,
        serde_json::json!({"url": "http://ch.internal:8123", "deep": {"list": [1, 2.5, true, "x"]}})
    );
    assert_eq!(destination.apply, ApplyMode::BlockDestructive);
    assert_eq!(destination.limits, BTreeMap::from([("group_bytes".into(), 1_048_576), ("linger_ms".into(), 0)]));
    let orders = TableName::new("public", "orders");
    assert_eq!(destination.target(&orders), TableName::new("mirror", "sales"));
    assert_eq!(destination.table_settings(&orders), r#"{"order_by":["id"]}"#);
    assert!(!destination.tables.matches(&TableName::new("public", "audit")));
}

#[test]
fn an_unknown_key_is_named_with_its_table_and_the_one_that_was_meant() {
    let error = refused("[destination.limits]\nlinger_sm = 5");
    assert_refused(
        &error,
        "config.unknown-key",
        &["linger_sm", "[destination.limits]", "warehouse", "Write `linger_ms`"],
    );
    let error = refused("[destination.grnat]\nnetwork = []");
    assert_refused(&error, "config.unknown-key", &["grnat", "\"warehouse\"", "Write `grant`"]);
    let error = refused("[[destinations]]\nname = 'b'");
    assert_refused(&error, "config.unknown-key", &["the top level", "Write `destination`"]);
    let error = refused("[[destination.table]]\nmach = 'a.b'");
    assert_refused(&error, "config.unknown-key", &["[[destination.table]] number 1", "Write `match`"]);
    let error = parse(&HEAD.replace("publication", "publicaton")).unwrap_err();
    assert_refused(&error, "config.unknown-key", &["[source]", "publicaton", "Write `publication`"]);
    let error = parse(&HEAD.replace("name =", "zzz = 1\nname =")).unwrap_err();
    assert_refused(&error, "config.unknown-key", &["[pipeline]", "zzz", "Known keys: name, state, plugins, drain"]);
}

#[test]
fn what_is_missing_is_named() {
    assert_refused(&parse("").unwrap_err(), "config.missing-key", &["[pipeline]"]);
    assert_refused(&parse("[pipeline]\nname = 'a'").unwrap_err(), "config.missing-key", &["[source]"]);
    assert_refused(&parse(HEAD).unwrap_err(), "config.no-destination", &["[[destination]]"]);
    assert_refused(
        &parse(&HEAD.replace("name", "state")).unwrap_err(),
        "config.missing-key",
        &["[pipeline]", "`name`"],
    );
    let error = parse(&format!("{HEAD}[[destination]]\nname = 'a'\nplugin = 'p'")).unwrap_err();
    assert_refused(&error, "config.missing-key", &["\"a\"", "`mode`"]);
}

#[test]
fn a_value_of_the_wrong_kind_is_named_with_the_right_one() {
    let error = parse(&HEAD.replace("\"shop\"\n[source]", "5\n[source]")).unwrap_err();
    assert_refused(&error, "config.wrong-type", &["[pipeline]", "`name`", "a whole number", "a string"]);
    let error = refused("tables = 'public.*'");
    assert_refused(&error, "config.wrong-type", &["`tables`", "a list of strings"]);
    let error = refused("[destination.limits]\nlinger_ms = -1");
    assert_refused(&error, "config.invalid-value", &["linger_ms", "-1"]);
}

#[test]
fn names_and_modes_are_checked() {
    for name in ["Shop", "shop-eu", "sh op", &"x".repeat(55)] {
        let error = parse(&HEAD.replace("name = \"shop\"", &format!("name = \"{name}\""))).unwrap_err();
        assert_refused(&error, "config.invalid-name", &[name, "tidegate_<name>"]);
    }
    let error = parse(&format!("{HEAD}{DESTINATION}{DESTINATION}")).unwrap_err();
    assert_refused(&error, "config.duplicate-name", &["`warehouse`"]);
    let error = parse(&format!("{HEAD}{}", DESTINATION.replace("\"merge\"", "\"upsert\""))).unwrap_err();
    assert_refused(&error, "config.invalid-value", &["`mode`", "`upsert`", "\"merge\""]);
    let error = parse(&format!("{HEAD}{}", DESTINATION.replace("\"postgres\"", "\"../evil\""))).unwrap_err();
    assert_refused(&error, "config.invalid-name", &["../evil"]);
    let error = refused("[destination.schema]\napply = 'always'");
    assert_refused(&error, "config.invalid-value", &["`always`", "auto-safe", "block-destructive"]);
    let error = parse(&HEAD.replace("[source]", "state = 'postgres://x/y'\n[source]")).unwrap_err();
    assert_refused(&error, "config.invalid-value", &["`state`", "directory"]);
    let error = parse(&HEAD.replace("[source]", "drain = '5 years'\n[source]")).unwrap_err();
    assert_refused(&error, "config.invalid-value", &["`drain`", "5 years", "20s"]);
}

#[test]
fn a_quorum_names_other_destinations_and_only_such_as_can_come_first() {
    let named = |name: &str, schema: &str| {
        format!("{}[destination.schema]\n{schema}\n", DESTINATION.replace("warehouse", name))
    };
    let staged = |quorum: &str| format!("apply = 'staged-rollout'\nquorum = {quorum}");
    let with = |quorum: &str, other: &str| {
        parse(&format!("{HEAD}{}{}{}", named("a", &staged(quorum)), named("b", other), named("c", "")))
    };
    let quorum = |text: &str| with(text, "").unwrap().destinations[0].quorum.clone();
    assert_eq!(quorum("'all'"), Some(Quorum::All));
    assert_eq!(quorum("2"), Some(Quorum::AtLeast(2)));
    assert_eq!(quorum("['b']"), Some(Quorum::Named(vec!["b".to_owned()])));
    assert_eq!(with("'all'", "").unwrap().destinations[1].quorum, None);
    for (text, named) in [("'most'", "`most`"), ("0", "is 0"), ("-1", "is -1"), ("[]", "nobody")] {
        assert_refused(&with(text, "").unwrap_err(), "config.invalid-value", &["`quorum`", named]);
    }
    for (text, named) in [("3", "2 other"), ("['a']", "`a`"), ("['d']", "`d`")] {
        assert_refused(&with(text, "").unwrap_err(), "config.quorum", &["`quorum`", named]);
    }
    let cycle = with("['b']", &staged("'all'")).unwrap_err();
    assert_refused(&cycle, "config.quorum-cycle", &["`a`", "`b`"]);
    let idle = refused("[destination.schema]\nquorum = 'all'");
    assert_refused(&idle, "config.invalid-value", &["`quorum`", "staged-rollout", "auto-safe"]);
}

#[test]
fn patterns_are_checked() {
    let error = refused("tables = ['orders']");
    assert_refused(&error, "config.pattern", &["`tables`", "`orders`", "public.orders"]);
    let error = refused("[[destination.table]]\nmatch = 'public.*'\ntarget_table = 'all'");
    assert_refused(&error, "config.invalid-value", &["`target_table`", "`public.*`"]);
}

#[test]
fn a_password_in_the_url_is_refused_and_not_repeated() {
    for url in ["postgres://me:hunter2@db/shop", "postgres://me@db/shop?sslmode=require&password=hunter2"] {
        let error = parse(&HEAD.replace("postgres://tidegate@db.internal/shop", url)).unwrap_err();
        assert_refused(&error, "config.literal-secret", &["[source]", "env:NAME"]);
        assert!(!error.report().contains("hunter2"), "{}", error.report());
    }
}

#[test]
fn a_password_comes_from_a_file_and_is_not_in_debug_output() {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("password"), "hunter2\n").unwrap();
    let text = format!("{}{DESTINATION}", HEAD.replace("publication", "password = 'file:password'\npublication"));
    let config = Document::parse(&text, Path::new("t.toml"), directory.path()).unwrap().config().unwrap();
    assert!(!format!("{config:?}").contains("hunter2"));
    let error = parse(&text.replace("file:password", "hunter2")).unwrap_err();
    assert_refused(&error, "config.grant", &["`password`", "file:PATH"]);
    assert!(!error.report().contains("hunter2"));
    let error = parse(&text.replace("file:password", "env:TIDEGATE_TEST_SURELY_NOT_SET")).unwrap_err();
    assert_refused(&error, "config.secret", &["`password`", "TIDEGATE_TEST_SURELY_NOT_SET"]);
    let error = parse(&text.replace("file:password", "file:/surely/not/there")).unwrap_err();
    assert_refused(&error, "config.secret", &["/surely/not/there"]);
}

#[test]
fn the_state_may_be_on_a_server_whose_password_is_a_reference() {
    let with = |keys: &str| parse(&format!("{}{DESTINATION}", HEAD.replace("[source]", &format!("{keys}\n[source]"))));
    assert_eq!(with("").unwrap().pipeline.store, None);
    let url = "store = 'postgres://me@states.internal:6543/db?sslmode=require'";
    // Asking a running process needs no password: it is not read here.
    let config = with(&format!("{url}\nstore_password = 'env:TIDEGATE_TEST_SURELY_NOT_SET'")).unwrap();
    assert_eq!(config.pipeline.store.unwrap().place(), "schema tidegate_shop at me@states.internal:6543/db");
    assert_eq!(config.pipeline.state, Path::new("/etc/tidegate/state"));
    let error = with("store = 'postgres://me:hunter2@db/states'").unwrap_err();
    assert_refused(&error, "config.literal-secret", &["`store`", "store_password"]);
    assert!(!error.report().contains("hunter2"));
    let error = with(&format!("{url}\nstore_password = 'hunter2'")).unwrap_err();
    assert_refused(&error, "config.grant", &["`store_password`", "file:PATH"]);
    assert!(!error.report().contains("hunter2"));
    assert_refused(&with("store = 'states'").unwrap_err(), "config.invalid-value", &["`store`", "postgres://"]);
    assert_refused(&with("store = 'postgres://me@db/x?sslmod=a'").unwrap_err(), "config.invalid-value", &["sslmode"]);
    let error = with("store_password = 'env:NAME'").unwrap_err();
    assert_refused(&error, "config.invalid-value", &["`store_password`", "store = "]);
}

#[test]
fn grants_are_read_and_a_literal_secret_among_them_is_refused() {
    let error = refused("[destination.grant]\nsecrets = { password = 'hunter2' }");
    assert_refused(&error, "config.grant", &["`password`", "env:NAME", "\"warehouse\""]);
    assert!(!error.report().contains("hunter2"));
    let error = refused("[destination.grant]\nnetwork = ['ch.internal']");
    assert_refused(&error, "config.grant", &["grant.network", "ch.internal", "host:port"]);
    let error = refused("[destination.grant]\nfiles = [{ path = 'out', mode = 'rw' }]");
    assert_refused(&error, "config.invalid-value", &["[destination.grant]", "read-write"]);
    let error = refused("[destination.grant]\nfiles = [{ paths = 'out', mode = 'read' }]");
    assert_refused(&error, "config.unknown-key", &["`paths`", "Write `path`"]);
}

#[test]
fn a_syntax_error_names_the_line_but_does_not_quote_it() {
    let error = parse("[pipeline]\nname = \"shop\"\npassword = hunter2\n").unwrap_err();
    assert_refused(&error, "config.syntax", &["tidegate.toml, line 3"]);
    assert!(!error.report().contains("hunter2"), "{}", error.report());
}

#[test]
fn the_pipeline_alone_can_be_read_without_the_environment_of_the_rest() {
    let text = HEAD.replace("postgres://tidegate@db.internal/shop", "${TIDEGATE_TEST_SURELY_NOT_SET}");
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("tidegate.toml");
    std::fs::write(&file, format!("{text}{DESTINATION}")).unwrap();
    let pipeline = Config::load_pipeline(&file).unwrap();
    assert_eq!(pipeline.state, directory.path().join("state"));
    assert_refused(
        &Config::load(&file).unwrap_err(),
        "config.environment",
        &["TIDEGATE_TEST_SURELY_NOT_SET", "[source]"],
    );
    let missing = Config::load(Path::new("surely-not-there.toml")).unwrap_err();
    assert_refused(&missing, "config.read", &["surely-not-there.toml", "--config"]);
}

#[test]
fn the_quarantine_is_bounded_by_default_and_as_it_says() {
    let limits = |text: &str| parse(&format!("{HEAD}{DESTINATION}{text}")).unwrap().destinations[0].quarantine;
    assert_eq!(limits(""), QuarantineLimits { max_rows: 10_000, max_bytes: 64 << 20 });
    assert_eq!(limits("[destination.quarantine]\nmax_rows = 0"), QuarantineLimits { max_rows: 0, max_bytes: 64 << 20 });
    let error = refused("[destination.quarantine]\nmax_row = 5");
    assert_refused(&error, "config.unknown-key", &["[destination.quarantine]", "max_rows"]);
}

#[test]
fn the_connections_of_copies_are_limited_overall_and_for_a_table() {
    let with = |keys: &str| parse(&format!("{HEAD}{keys}\n{DESTINATION}"));
    let limits = |keys: &str| with(keys).map(|config| (config.copy.connections, config.copy.connections_per_table));
    assert_eq!(limits("copy_connections = 12").unwrap(), (12, 12));
    assert_eq!(limits("copy_connections_per_table = 1").unwrap(), (4, 1));
    assert_eq!(limits("copy_connections = 8\ncopy_connections_per_table = 6").unwrap(), (8, 6));
    for wrong in [
        "copy_connections = 0",
        "copy_connections = 65",
        "copy_connections_per_table = 5",
        "copy_connections = 2\ncopy_connections_per_table = 3",
        "copy_connections_per_table = 0",
    ] {
        let key = if wrong.contains("per_table") { "copy_connections_per_table" } else { "copy_connections" };
        assert_refused(&with(wrong).unwrap_err(), "config.invalid-value", &["[source]", key, "from 1 to"]);
    }
    assert_eq!(with("copy_resume_bytes = 5").unwrap().copy.resume_bytes, 5);
    assert_refused(&with("copy_connection = 2").unwrap_err(), "config.unknown-key", &["`copy_connections`"]);
}

#[test]
fn every_limit_of_a_plugin_can_be_set_and_none_to_nothing() {
    for key in crate::plugin::Limits::SETTINGS {
        let limits = |number: u64| parse(&format!("{HEAD}{DESTINATION}[destination.limits]\n{key} = {number}"));
        assert_eq!(limits(7).unwrap().destinations[0].limits, BTreeMap::from([((*key).to_owned(), 7)]));
        assert_refused(&limits(0).unwrap_err(), "config.invalid-value", &[key, "above 0"]);
    }
    let engine = |text: &str| {
        let head = HEAD.replace("[source]", &format!("[pipeline.engine]\n{text}\n[source]"));
        parse(&format!("{head}{DESTINATION}")).map(|config| config.pipeline.engine)
    };
    assert_eq!(engine("").unwrap(), EngineLimits::default());
    let limits = engine("component_bytes = 5000\ncompile_ms = 250\nstack_bytes = 100000").unwrap();
    assert_eq!(
        (limits.component_bytes, limits.compile, limits.stack_bytes),
        (5000, Duration::from_millis(250), 100_000)
    );
    assert_refused(&engine("stack_bytes = 1000").unwrap_err(), "config.invalid-value", &["stack_bytes", "65536"]);
    assert_refused(&engine("compile_ms = 0").unwrap_err(), "config.invalid-value", &["compile_ms"]);
    assert_refused(&engine("stack = 1").unwrap_err(), "config.unknown-key", &["[pipeline.engine]", "`stack_bytes`"]);
}

#[test]
fn a_grant_that_holds_the_hosts_own_files_is_refused_however_it_is_spelled() {
    let directory = tempfile::tempdir().unwrap();
    std::fs::create_dir(directory.path().join("plugins")).unwrap();
    std::os::unix::fs::symlink("plugins", directory.path().join("link")).unwrap();
    let code = crate::plugin::EngineOptions::default().cache.display().to_string();
    for path in [".", "state", "state/spool", "./plugins", "link", "link/../plugins/x", "/", &code] {
        let text = format!("{HEAD}{DESTINATION}[destination.grant]\nfiles = ['{path}']");
        let document = Document::parse(&text, &directory.path().join("tidegate.toml"), directory.path()).unwrap();
        let error = document.config().unwrap_err();
        assert_refused(&error, "config.grant", &["`warehouse`", "grant.files", path]);
    }
    let text = format!("{HEAD}{DESTINATION}[destination.grant]\nfiles = ['out', 'states', 'plugins-out']");
    Document::parse(&text, &directory.path().join("tidegate.toml"), directory.path()).unwrap().config().unwrap();
}

#[test]
fn a_plugin_can_be_pinned_to_a_digest_and_a_signer() {
    use crate::plugin::pin::{SignaturePlace, Signer};
    let key = minisign::KeyPair::generate_unencrypted_keypair().unwrap().pk.to_base64();
    let pin = |keys: &str| {
        let destination = DESTINATION.replace("mode =", &format!("{keys}\nmode ="));
        parse(&format!("{HEAD}{destination}")).map(|config| config.destinations[0].pin.clone())
    };
    assert_eq!(pin("").unwrap(), Pin::default());
    let digest = "AB".repeat(32);
    assert_eq!(pin(&format!("sha256 = \"{digest}\"")).unwrap().sha256, Some("ab".repeat(32)));
    for (signature, place) in [
        ("", SignaturePlace::Beside),
        ("signature = \"keys/a.minisig\"", SignaturePlace::File("/etc/tidegate/keys/a.minisig".into())),
        ("signature = \"untrusted comment: x\\nabc\"", SignaturePlace::Text("untrusted comment: x\nabc".to_owned())),
    ] {
        let pinned = pin(&format!("public_key = \"{key}\"\n{signature}")).unwrap();
        assert_eq!(pinned.signer, Some(Signer { public_key: key.clone(), signature: place }));
    }
    for (keys, name) in [
        ("sha256 = \"abc\"", "sha256"),
        ("public_key = \"abc\"", "public_key"),
        ("signature = \"a.minisig\"", "signature"),
    ] {
        assert_refused(&pin(keys).unwrap_err(), "config.invalid-value", &[name]);
    }
}
