//! Servers go away, plugins trap, people kill, forge and alter: the ends are equal
//! afterwards, and what cannot be followed says so by name and stops alone.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tidegate::position::Lsn;
use tidegate::scratch::{Cluster, ClusterOptions, Shutdown};
use tidegate::status::{DestinationState, DestinationStatus, SchemaState, StatusReport, TableStatus};
use tidegate::store::TableState;
use tidegate_tests::{Database, Pipeline, database, mirror, plugins, postgres_destination, source, wait_for};

fn own_cluster() -> Cluster {
    Cluster::start(&ClusterOptions::default()).unwrap()
}

fn with_publication(source: Database, schema: &str) -> Database {
    source.sql(schema);
    source.sql("CREATE PUBLICATION pub FOR ALL TABLES");
    source
}

fn assert_equal(pipeline: &mut Pipeline, source: &Database, mirror: &Database, tables: &[&str]) {
    pipeline.wait_caught_up(source);
    for table in tables {
        assert_eq!(source.rows(table), mirror.rows(table), "{table}\n{}", pipeline.log());
    }
}

fn columns(database: &Database, table: &str) -> String {
    database.sql(&format!(
        "SELECT string_agg(attname || ' ' || format_type(atttypid, atttypmod), ', ' ORDER BY attname)
         FROM pg_attribute WHERE attrelid = '{table}'::regclass AND attnum > 0 AND NOT attisdropped"
    ))
}

fn primary_key(database: &Database, table: &str) -> String {
    database.sql(&format!(
        "SELECT pg_get_constraintdef(oid) FROM pg_constraint WHERE conrelid = '{table}'::regclass AND contype = 'p'"
    ))
}

fn confirmed(source: &Database) -> Lsn {
    let slot =
        format!("SELECT confirmed_flush_lsn FROM pg_replication_slots WHERE slot_name = 'tidegate_{}'", source.name);
    source.sql(&slot).parse().unwrap()
}

fn inserted_up_to(source: &Database) -> Lsn {
    source.sql("SELECT pg_current_wal_insert_lsn()").parse().unwrap()
}

fn of<'a>(status: &'a StatusReport, destination: &str) -> &'a DestinationStatus {
    status.destinations.iter().find(|known| known.name == destination).unwrap()
}

fn table<'a>(status: &'a StatusReport, destination: &str, table: &str) -> &'a TableStatus {
    of(status, destination).tables.iter().find(|known| known.table == table).unwrap()
}

fn edit(pipeline: &Pipeline, from: &str, to: &str) {
    let file = pipeline.directory().join("tidegate.toml");
    let text = std::fs::read_to_string(&file).unwrap();
    assert!(text.contains(from), "{from} is not in {text}");
    std::fs::write(&file, text.replace(from, to)).unwrap();
}

/// Waits until a table at another end has the source's rows, without the pipeline's help.
fn wait_equal(source: &Database, mirror: &Database, table: &str) {
    let rows = source.rows(table);
    wait_for("the mirror has the source's rows", || (mirror.rows(table) == rows).then_some(()));
}

#[test]
fn a_source_that_crashes_under_load_and_comes_back_is_read_on_by_the_same_process() {
    let mut server = own_cluster();
    let from = with_publication(
        database(&server, "crash"),
        "CREATE TABLE t (id bigserial PRIMARY KEY, v text, n int DEFAULT 0)",
    );
    let to = database(mirror(), "crash");
    let mut pipeline = Pipeline::new(&from, &postgres_destination("mirror", &to));
    pipeline.start();
    let pid = pipeline.wait_ready().pid;
    let over = Arc::new(AtomicBool::new(false));
    let load = {
        let (over, url) = (over.clone(), from.url.clone());
        std::thread::spawn(move || {
            let work = "INSERT INTO t(v) SELECT 'row' FROM generate_series(1, 50);
                        UPDATE t SET n = n + 1 WHERE id % 13 = 0;
                        DELETE FROM t WHERE id % 29 = 0";
            while !over.load(Ordering::Relaxed) {
                // Fails while the server is away.
                let _ = std::process::Command::new("psql").args(["-X", "-q", "-d", &url, "-c", work]).output();
            }
        })
    };
    for _ in 0..2 {
        let before = from.sql("SELECT count(*) FROM t");
        wait_for("the load goes on", || (from.sql("SELECT count(*) FROM t") != before).then_some(()));
        server.halt(Shutdown::Immediate).unwrap();
        let lost = pipeline.log().matches("connecting again").count();
        wait_for("the host has seen it", || (pipeline.log().matches("connecting again").count() > lost).then_some(()));
        server.resume().unwrap();
    }
    over.store(true, Ordering::Relaxed);
    load.join().unwrap();
    assert_equal(&mut pipeline, &from, &to, &["t"]);
    assert_eq!(pipeline.status().unwrap().pid, pid);
    assert!(pipeline.log().contains("source."), "{}", pipeline.log());
    assert_eq!(pipeline.stop(), 0);
}

#[test]
fn an_idle_pipeline_confirms_what_others_write() {
    let from = database(source(), "idle");
    from.sql("CREATE TABLE published (id int PRIMARY KEY); CREATE TABLE other (v text); CREATE PUBLICATION pub FOR TABLE published");
    let to = database(mirror(), "idle");
    let mut pipeline = Pipeline::new(&from, &postgres_destination("mirror", &to));
    pipeline.start();
    pipeline.wait_ready();
    from.sql("INSERT INTO other SELECT repeat('x', 1000) FROM generate_series(1, 2000)");
    let written = inserted_up_to(&from);
    let start = Instant::now();
    while confirmed(&from) < written {
        assert!(start.elapsed() < Duration::from_secs(60), "{} is not confirmed\n{}", written, pipeline.log());
        from.sql("INSERT INTO other VALUES ('still only this')");
        std::thread::sleep(Duration::from_millis(250));
    }
    assert_eq!(pipeline.stop(), 0);
}

#[test]
fn the_slot_never_passes_a_destination_that_is_away_while_another_goes_on() {
    let mut away = own_cluster();
    let from = with_publication(database(source(), "away"), "CREATE TABLE t (id int PRIMARY KEY, v text)");
    let (near, far) = (database(mirror(), "near"), database(&away, "far"));
    let destinations = postgres_destination("near", &near) + &postgres_destination("far", &far);
    let mut pipeline = Pipeline::new(&from, &destinations);
    pipeline.start();
    pipeline.wait_ready();
    assert_equal(&mut pipeline, &from, &far, &["t"]);
    away.halt(Shutdown::Fast).unwrap();
    from.sql("INSERT INTO t VALUES (0, 'the first that is not durable everywhere')");
    let first = inserted_up_to(&from);
    for round in 1..=5 {
        from.sql(&format!("INSERT INTO t SELECT n, 'more' FROM generate_series({round} * 100, {round} * 100 + 99) n"));
        wait_equal(&from, &near, "t");
        let slot = confirmed(&from);
        // Read after the slot: a checkpoint only grows.
        let status = pipeline.status().unwrap();
        let checkpoints: Vec<Lsn> =
            status.destinations.iter().filter_map(|destination| destination.checkpoint).collect();
        assert!(checkpoints.iter().all(|checkpoint| slot <= *checkpoint), "{slot} {status:#?}");
        assert!(slot < first, "{slot} is confirmed, and {first} is not durable\n{}", pipeline.log());
    }
    let status = pipeline.wait_status("the far end is said to be away", |status| {
        of(status, "far").state == DestinationState::Retrying && of(status, "far").error.is_some()
    });
    assert_eq!(of(&status, "near").state, DestinationState::Running, "{status:#?}");
    assert!(of(&status, "near").checkpoint > of(&status, "far").checkpoint, "{status:#?}");
    away.resume().unwrap();
    assert_equal(&mut pipeline, &from, &far, &["t"]);
    assert_equal(&mut pipeline, &from, &near, &["t"]);
    wait_for("the slot passes", || (confirmed(&from) > first).then_some(()));
    assert_eq!(pipeline.stop(), 0);
}

#[test]
fn sigterm_stops_with_everything_durable_and_says_so() {
    let from = with_publication(database(source(), "sigterm"), "CREATE TABLE t (id bigserial PRIMARY KEY, v text)");
    let to = database(mirror(), "sigterm");
    let mut pipeline = Pipeline::new(&from, &postgres_destination("mirror", &to));
    pipeline.start();
    pipeline.wait_ready();
    for _ in 0..10 {
        from.sql("INSERT INTO t(v) SELECT 'row' FROM generate_series(1, 500)");
    }
    let start = Instant::now();
    assert_eq!(pipeline.stop(), 0, "{}", pipeline.log());
    assert!(start.elapsed() < Duration::from_secs(20), "{:?}\n{}", start.elapsed(), pipeline.log());
    let log = pipeline.log();
    assert!(log.contains("SIGTERM") && log.contains("stopped: everything that was read is durable"), "{log}");
    // What was durable is also confirmed: the slot stands where the state does.
    let status = pipeline.status().unwrap();
    assert_eq!(Some(confirmed(&from)), status.slot.confirmed, "{status:#?}");
    pipeline.start();
    assert_equal(&mut pipeline, &from, &to, &["t"]);
}

#[test]
fn sigterm_waits_no_longer_than_the_drain_for_a_destination_that_is_away() {
    let mut away = own_cluster();
    let from = with_publication(database(source(), "drain"), "CREATE TABLE t (id bigserial PRIMARY KEY, v text)");
    let to = database(&away, "drain");
    let mut pipeline = Pipeline::new(&from, &postgres_destination("mirror", &to));
    edit(&pipeline, "state = ", "drain = \"1s\"\nstate = ");
    pipeline.start();
    pipeline.wait_ready();
    away.halt(Shutdown::Fast).unwrap();
    from.sql("INSERT INTO t(v) SELECT 'row' FROM generate_series(1, 500)");
    pipeline.wait_status("the destination is away", |status| of(status, "mirror").state == DestinationState::Retrying);
    let start = Instant::now();
    assert_eq!(pipeline.stop(), 0, "{}", pipeline.log());
    assert!(start.elapsed() < Duration::from_secs(8), "{:?}\n{}", start.elapsed(), pipeline.log());
    assert!(pipeline.log().contains("stopped: the drain's time ran out"), "{}", pipeline.log());
    away.resume().unwrap();
    pipeline.start();
    assert_equal(&mut pipeline, &from, &to, &["t"]);
}

/// The directory of fixtures: `TIDEGATE_FIXTURES`, or what `make fixtures` fills.
fn fixtures() -> PathBuf {
    let directory = std::env::var_os("TIDEGATE_FIXTURES")
        .map_or_else(|| std::env::current_exe().unwrap().ancestors().nth(3).unwrap().join("fixtures"), PathBuf::from);
    assert!(
        directory.join("hostile.wasm").exists(),
        "{} lacks hostile.wasm: run `make fixtures` first",
        directory.display()
    );
    directory
}

#[test]
fn a_plugin_that_traps_is_started_again_and_again_and_disturbs_nobody_else() {
    let from = with_publication(database(source(), "trap"), "CREATE TABLE t (id int PRIMARY KEY, v text)");
    let to = database(mirror(), "trap");
    let hostile = "[[destination]]\nname = \"hostile\"\nplugin = \"hostile\"\nmode = \"changes\"\ntables = [\"*.*\"]\n\
                   [destination.settings]\non = \"write-group\"\ndo = \"trap\"\n";
    let mut pipeline = Pipeline::new(&from, &(postgres_destination("mirror", &to) + hostile));
    let own = pipeline.directory().join("plugins");
    std::fs::create_dir(&own).unwrap();
    std::fs::copy(plugins().join("postgres.wasm"), own.join("postgres.wasm")).unwrap();
    std::fs::copy(fixtures().join("hostile.wasm"), own.join("hostile.wasm")).unwrap();
    edit(&pipeline, &plugins().display().to_string(), &own.display().to_string());
    pipeline.start();
    pipeline.wait_status("the mirror's table is ready", |status| {
        // At first the process has nothing to tell yet.
        status.destinations.len() == 2 && table(status, "mirror", "public.t").state == TableState::Ready
    });
    from.sql("INSERT INTO t VALUES (0, 'the first')");
    let first = inserted_up_to(&from);
    for round in 1..=5 {
        from.sql(&format!("INSERT INTO t SELECT n, 'row' FROM generate_series({round} * 100, {round} * 100 + 50) n"));
        wait_equal(&from, &to, "t");
        assert!(confirmed(&from) < first, "{}", pipeline.log());
    }
    let status = pipeline.wait_status("the trap is shown", |status| {
        of(status, "hostile").error.as_ref().is_some_and(|error| error.code == "plugin.trap")
    });
    assert_eq!(of(&status, "hostile").state, DestinationState::Retrying, "{status:#?}");
    assert_eq!(of(&status, "mirror").state, DestinationState::Running, "{status:#?}");
    assert_eq!(of(&status, "mirror").error, None);
    wait_for("it traps again", || (pipeline.log().matches("code=plugin.trap").count() >= 3).then_some(()));
    pipeline.kill();
    // Mended, it is sent everything that it has not made durable.
    edit(&pipeline, "do = \"trap\"", "do = \"print\"");
    pipeline.start();
    pipeline.wait_ready();
    assert_equal(&mut pipeline, &from, &to, &["t"]);
    wait_for("the slot passes", || (confirmed(&from) > first).then_some(()));
    assert_eq!(pipeline.stop(), 0);
}

#[test]
fn forged_ddl_messages_of_an_ordinary_role_are_ignored_and_rows_flow_on() {
    let from = with_publication(
        database(source(), "forged"),
        "CREATE TABLE t (id int PRIMARY KEY, v text); CREATE ROLE forger; GRANT INSERT ON t TO forger",
    );
    let to = database(mirror(), "forged");
    let mut pipeline = Pipeline::new(&from, &postgres_destination("mirror", &to));
    let mut id = 0;
    // First without the trigger, then with it.
    for (round, warning) in [(0, "without an installed trigger is ignored"), (1, "trigger.forged")] {
        pipeline.start();
        pipeline.wait_ready();
        let picture = match round {
            0 => "{}".to_owned(),
            _ => from.sql("SELECT tidegate.picture('t'::regclass)").replace("\"v\"", "\"stolen\""),
        };
        let payload = format!(r#"{{"version":1,"kind":"table","command":"ALTER TABLE","picture":{picture}}}"#);
        for content in [format!("{}{payload}", "0".repeat(64)), payload, String::new(), "\u{1}".repeat(100)] {
            id += 1;
            from.sql(&format!(
                "BEGIN; SET ROLE forger; INSERT INTO t VALUES ({id}, 'before');
                 SELECT pg_logical_emit_message(true, 'tidegate_ddl', $forged${content}$forged$);
                 SELECT pg_logical_emit_message(false, 'tidegate_ddl', $forged${content}$forged$);
                 INSERT INTO t VALUES (-{id}, 'behind'); COMMIT"
            ));
        }
        assert_equal(&mut pipeline, &from, &to, &["t"]);
        assert_eq!(columns(&to, "t"), "id integer, v text");
        assert!(pipeline.log().contains(warning), "{}", pipeline.log());
        assert_eq!(pipeline.stop(), 0);
        if round == 0 {
            pipeline.install_trigger();
        }
    }
    from.sql("REVOKE ALL ON t FROM forger; DROP ROLE forger");
}

#[test]
fn without_the_trigger_an_added_column_arrives_with_its_first_row() {
    let from = with_publication(
        database(source(), "untriggered"),
        "CREATE TABLE t (id int PRIMARY KEY, v text); INSERT INTO t VALUES (1, 'copied')",
    );
    let to = database(mirror(), "untriggered");
    let mut pipeline = Pipeline::new(&from, &postgres_destination("mirror", &to));
    pipeline.start();
    pipeline.wait_ready();
    from.sql("INSERT INTO t VALUES (2, 'streamed')");
    from.sql("ALTER TABLE t ADD COLUMN added int");
    from.sql("INSERT INTO t VALUES (3, 'with it', 7)");
    from.sql("UPDATE t SET added = 5 WHERE id = 1");
    assert_equal(&mut pipeline, &from, &to, &["t"]);
    assert_eq!(columns(&from, "t"), columns(&to, "t"));
    assert_eq!(pipeline.stop(), 0);
}

/// A change that is not followed: refused by name, the others go on, and a resync after a
/// stop brings the table in its new shape.
fn refused_and_copied_again(test: &str, change: &str, named: &str) {
    copied_again(test, change, named, |table| table.state == TableState::Errored);
}

/// The same where the table stops, or waits.
fn copied_again(test: &str, change: &str, named: &str, is_refused: impl Fn(&TableStatus) -> bool) {
    let from = with_publication(
        database(source(), test),
        "CREATE TABLE t (id int PRIMARY KEY, other int NOT NULL UNIQUE, v int);
         CREATE TABLE untouched (id int PRIMARY KEY);
         INSERT INTO t SELECT n, -n, n FROM generate_series(1, 100) n",
    );
    let to = database(mirror(), test);
    let mut pipeline = Pipeline::new(&from, &postgres_destination("mirror", &to));
    pipeline.install_trigger();
    pipeline.start();
    pipeline.wait_ready();
    let before = from.rows("t");
    from.sql(&format!("BEGIN; INSERT INTO untouched VALUES (1); {change}; INSERT INTO untouched VALUES (2); COMMIT"));
    from.sql("INSERT INTO t(id, other) VALUES (1000, 1000)");
    let status = pipeline.wait_status("the table stops", |status| is_refused(table(status, "mirror", "public.t")));
    let error = table(&status, "mirror", "public.t").error.clone().unwrap();
    assert!(error.code.starts_with("schema."), "{error:?}");
    assert!(error.message.contains(named), "{error:?}");
    assert!(error.next.as_ref().is_some_and(|next| next.contains("tidegate resync")), "{error:?}");
    from.sql("INSERT INTO untouched VALUES (3)");
    assert_equal(&mut pipeline, &from, &to, &["untouched"]);
    assert_eq!(to.rows("t"), before, "rows that do not fit were not forced in");
    let status = pipeline.status().unwrap();
    assert_eq!(of(&status, "mirror").state, DestinationState::Running, "{status:#?}");
    assert_eq!(pipeline.stop(), 0);

    // A restart alone changes nothing, and the stopped pipeline still says why.
    let at_rest = pipeline.status().unwrap();
    assert_eq!(table(&at_rest, "mirror", "public.t").error, Some(error));
    pipeline.start();
    from.sql("INSERT INTO untouched VALUES (4)");
    assert_equal(&mut pipeline, &from, &to, &["untouched"]);
    assert!(is_refused(table(&pipeline.status().unwrap(), "mirror", "public.t")));
    assert_eq!(pipeline.stop(), 0);

    let output = pipeline.command(&["resync", "mirror", "public.t"]).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    from.sql("INSERT INTO t(id, other) VALUES (1001, 1001)");
    pipeline.start();
    pipeline.wait_ready();
    from.sql("UPDATE t SET v = 7 WHERE id % 3 = 0");
    from.sql("DELETE FROM t WHERE id % 5 = 0");
    assert_equal(&mut pipeline, &from, &to, &["t", "untouched"]);
    assert_eq!(columns(&from, "t"), columns(&to, "t"));
    assert_eq!(primary_key(&from, "t"), primary_key(&to, "t"));
    assert_eq!(pipeline.stop(), 0);
}

#[test]
fn a_change_of_type_is_refused_by_name_and_a_resync_brings_the_new_type() {
    refused_and_copied_again("type_change", "ALTER TABLE t ALTER COLUMN v TYPE bigint USING v * 10", "rewritten");
    refused_and_copied_again("type_narrowed", "ALTER TABLE t ALTER COLUMN v TYPE varchar(9)", "rewritten");
}

#[test]
fn a_wider_type_follows_by_itself_with_rows_before_and_behind_it() {
    let from = with_publication(
        database(source(), "wider"),
        "CREATE TABLE t (id int PRIMARY KEY, small smallint, short varchar(5), price numeric(6,2), ratio real);
         INSERT INTO t SELECT n, n, 'v' || n, n / 4.0, n / 7.0 FROM generate_series(1, 100) n",
    );
    let to = database(mirror(), "wider");
    let mut pipeline = Pipeline::new(&from, &postgres_destination("mirror", &to));
    pipeline.install_trigger();
    pipeline.start();
    pipeline.wait_ready();
    for change in [
        "ALTER TABLE t ALTER id TYPE bigint",
        "ALTER TABLE t ALTER small TYPE bigint, ALTER short TYPE varchar(50)",
        "ALTER TABLE t ALTER COLUMN price TYPE numeric(12,2);",
        "ALTER TABLE t ALTER ratio TYPE double precision",
        "ALTER TABLE t ALTER short TYPE text",
    ] {
        from.sql("UPDATE t SET small = small + 1 WHERE id % 10 = 1");
        from.sql(change);
        from.sql("UPDATE t SET small = small + 1, price = price + 1 WHERE id % 10 = 2");
    }
    from.sql("INSERT INTO t VALUES (5000000000, 5000000000, 'longer than five', 12345678.25, 0.1)");
    assert_equal(&mut pipeline, &from, &to, &["t"]);
    let types = "SELECT string_agg(format_type(atttypid, atttypmod), ', ' ORDER BY attnum) FROM pg_attribute
                 WHERE attrelid = 't'::regclass AND attnum > 0";
    assert_eq!(to.sql(types), "bigint, bigint, text, numeric(12,2), double precision");
    assert_eq!(pipeline.stop(), 0);
}

#[test]
fn rows_that_are_rewritten_without_a_change_of_them_stop_their_table_until_it_is_copied_again() {
    refused_and_copied_again("rewritten", "ALTER TABLE t ALTER COLUMN v TYPE int USING v * 10", "rewritten");
}

#[test]
fn a_change_of_key_is_refused_by_name_and_a_resync_brings_the_new_key() {
    copied_again(
        "key_change",
        "ALTER TABLE t DROP CONSTRAINT t_pkey, ADD PRIMARY KEY (other)",
        "change-key",
        |table| table.schema == SchemaState::Held,
    );
}

#[test]
fn a_truncate_of_several_tables_and_those_it_cascades_to_empties_them_all_in_its_place() {
    let from = with_publication(
        database(source(), "truncate"),
        "CREATE TABLE parent (id serial PRIMARY KEY, v text);
         CREATE TABLE child (id serial PRIMARY KEY, parent int NOT NULL REFERENCES parent);
         CREATE TABLE grandchild (id serial PRIMARY KEY, child int NOT NULL REFERENCES child);
         CREATE TABLE alone (id serial PRIMARY KEY);
         CREATE TABLE untouched (id serial PRIMARY KEY)",
    );
    let tables = ["parent", "child", "grandchild", "alone", "untouched"];
    let fill = "INSERT INTO parent(v) SELECT 'p' FROM generate_series(1, 20);
                INSERT INTO child(parent) SELECT id FROM parent;
                INSERT INTO grandchild(child) SELECT id FROM child;
                INSERT INTO alone SELECT FROM generate_series(1, 20);
                INSERT INTO untouched SELECT FROM generate_series(1, 20)";
    from.sql(fill);
    let to = database(mirror(), "truncate");
    let mut pipeline = Pipeline::new(&from, &postgres_destination("mirror", &to));
    pipeline.start();
    pipeline.wait_ready();
    from.sql("TRUNCATE alone, parent CASCADE");
    assert_equal(&mut pipeline, &from, &to, &tables);
    assert_eq!([to.rows("grandchild").len(), to.rows("untouched").len()], [0, 20]);
    // Between rows of the same transaction, and with the identities begun again.
    from.sql(&format!("BEGIN; {fill}; TRUNCATE parent, alone RESTART IDENTITY CASCADE; {fill}; COMMIT"));
    from.sql("DELETE FROM grandchild WHERE id = 1; UPDATE parent SET v = 'after' WHERE id = 1");
    assert_equal(&mut pipeline, &from, &to, &tables);
    assert_eq!(to.rows("parent").len(), 20);
    assert_eq!(pipeline.stop(), 0);
}

#[test]
fn a_stream_that_is_replayed_over_a_schema_change_after_a_kill_ends_equal() {
    let mut away = own_cluster();
    let from = with_publication(
        database(source(), "replay"),
        "CREATE TABLE t (id serial PRIMARY KEY, a text, b int); INSERT INTO t(a, b) SELECT 'copied', n FROM generate_series(1, 100) n",
    );
    let (near, far) = (database(mirror(), "replay_near"), database(&away, "replay_far"));
    let mut pipeline =
        Pipeline::new(&from, &(postgres_destination("near", &near) + &postgres_destination("far", &far)));
    pipeline.install_trigger();
    pipeline.start();
    pipeline.wait_ready();
    assert_equal(&mut pipeline, &from, &far, &["t"]);
    // The far end keeps the slot where it is, so that a start replays all of this to both.
    away.halt(Shutdown::Fast).unwrap();
    from.sql(
        "INSERT INTO t(a, b) SELECT 'before', n FROM generate_series(1, 50) n; UPDATE t SET b = b + 1 WHERE id % 3 = 0",
    );
    from.sql("BEGIN; UPDATE t SET a = 'same transaction' WHERE id < 10; ALTER TABLE t ADD COLUMN c int DEFAULT 3; UPDATE t SET c = 4 WHERE id < 5; COMMIT");
    wait_equal(&from, &near, "t");
    pipeline.kill();
    from.sql("ALTER TABLE t RENAME COLUMN a TO renamed; INSERT INTO t(renamed, b) SELECT 'while it was dead', n FROM generate_series(1, 50) n");
    pipeline.start();
    wait_equal(&from, &near, "t");
    from.sql("ALTER TABLE t DROP COLUMN b; DELETE FROM t WHERE id % 7 = 0");
    wait_equal(&from, &near, "t");
    pipeline.kill();
    away.resume().unwrap();
    pipeline.start();
    assert_equal(&mut pipeline, &from, &far, &["t"]);
    assert_equal(&mut pipeline, &from, &near, &["t"]);
    assert_eq!((columns(&near, "t"), columns(&far, "t")), (columns(&from, "t"), columns(&from, "t")));
    assert_eq!(pipeline.stop(), 0);
}
