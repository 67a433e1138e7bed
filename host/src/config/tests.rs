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
    let destination = &config.destinations[0];
    assert_eq!(destination.settings, serde_json::json!({}));
    assert_eq!(destination.apply, ApplyMode::AutoSafe);
    let orders = TableName::new("public", "orders");
    assert!(destination.tables.matches(&orders));
    assert_eq!(destination.target(&orders), orders);
    assert_eq!(destination.table_settings(&orders), "{}");
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
