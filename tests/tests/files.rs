//! Source to files: the plugin `files` under the whole host, read by pyarrow and DuckDB.
//!
//! `tests/readers/fold.py` folds the log as `plugins/files/README.md` says; what comes of
//! it has to be, byte for byte, what PostgreSQL prints.

use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use serde_json::Value;
use tidegate_tests::{Database, Pipeline, database, files_destination, mirror, postgres_destination, source, wait_for};

/// As the host pins its own sessions: how `printed` has psql print.
const PINNED: &str = "-c client_encoding=UTF8 -c DateStyle=ISO -c IntervalStyle=postgres -c TimeZone=UTC \
                      -c extra_float_digits=3 -c bytea_output=hex";

/// A script of `tests/readers`, under the Python that `scripts/setup --tests` makes.
fn reader(script: &str) -> Command {
    let venv = std::env::var_os("TIDEGATE_VENV").map_or_else(
        || PathBuf::from(std::env::var_os("HOME").expect("HOME is set")).join(".cache/tidegate/venv"),
        PathBuf::from,
    );
    let python = venv.join("bin/python");
    assert!(python.exists(), "{} is missing: run `scripts/setup --tests` first", python.display());
    let mut command = Command::new(python);
    command.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("readers").join(script));
    command.env("PYTHONDONTWRITEBYTECODE", "1");
    command
}

/// What a table prints, a line a row, in an order of their own.
fn printed(database: &Database, table: &str) -> Vec<String> {
    let output = Command::new("psql")
        .args(["-X", "-q", "-v", "ON_ERROR_STOP=1", "-d", &database.url, "-c"])
        .arg(format!("COPY (SELECT * FROM {table}) TO STDOUT"))
        .env("PGOPTIONS", PINNED)
        .output()
        .expect("psql runs");
    assert!(output.status.success(), "psql: {}", String::from_utf8_lossy(&output.stderr));
    sorted_lines(output.stdout)
}

fn sorted_lines(bytes: Vec<u8>) -> Vec<String> {
    let text = String::from_utf8(bytes).expect("UTF-8");
    let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
    lines.sort();
    lines
}

/// A log as a destination of a pipeline left it.
struct Log<'a> {
    pipeline: &'a Pipeline,
    directory: PathBuf,
}

impl Log<'_> {
    fn of<'a>(pipeline: &'a Pipeline, destination: &str) -> Log<'a> {
        Log { pipeline, directory: pipeline.directory().join(destination) }
    }

    fn ask(&self, command: &str, more: &[&str]) -> Vec<u8> {
        let output = reader("fold.py").arg(command).arg(&self.directory).args(more).output().expect("python runs");
        let why = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "fold.py {command} {more:?}: {why}\n{}", self.pipeline.log());
        output.stdout
    }

    fn ask_json(&self, command: &str, more: &[&str]) -> Vec<Value> {
        let lines = self.ask(command, more);
        lines
            .split(|&byte| byte == b'\n')
            .filter(|line| !line.is_empty())
            .map(|line| serde_json::from_slice(line).expect("JSON"))
            .collect()
    }

    /// That manifest and files agree; how many rows were written twice.
    fn check(&self) -> u64 {
        self.ask_json("check", &[])[0]["duplicates"].as_u64().expect("a count")
    }

    fn assert_folds_to(&self, source: &Database, table: &str, engine: &str) {
        let wanted = printed(source, table);
        let folded = sorted_lines(self.ask("fold", &[&format!("public.{table}"), "--engine", engine]));
        let differs = wanted.iter().zip(&folded).find(|(wanted, folded)| wanted != folded);
        assert_eq!(differs, None, "{table} as {engine} reads it\n{}", self.pipeline.log());
        assert!(!wanted.is_empty(), "an empty table proves nothing");
        assert_eq!(wanted.len(), folded.len(), "{table} as {engine} reads it\n{}", self.pipeline.log());
    }
}

/// A `[[destination]]` with many small files.
fn small_files(name: &str, format: &str) -> String {
    files_destination(name, format).replace("[destination.grant]", "roll_bytes = 65536\n[destination.grant]")
}

fn bench(test: &str, schema: &str, destinations: &str) -> (Database, Pipeline) {
    let source = database(source(), test);
    source.sql(schema);
    source.sql("CREATE PUBLICATION pub FOR ALL TABLES");
    let pipeline = Pipeline::new(&source, destinations);
    // What is granted has to exist.
    for name in ["lake", "parquet", "ndjson"] {
        std::fs::create_dir(pipeline.directory().join(name)).unwrap();
    }
    (source, pipeline)
}

/// Every type with a layout of its own, and some that are text.
const KINDS: &str = r#"
    CREATE TYPE mood AS ENUM ('sad', 'so so', 'say "yes"');
    CREATE DOMAIN cents AS numeric(12, 2);
    CREATE TABLE kinds (
        id bigint PRIMARY KEY, b bool, i2 int2, i4 int4, i8 int8, o oid, f4 float4, f8 float8,
        n numeric, n12 numeric(12, 2), n38 numeric(38, 10), n_round numeric(4, -2), n_small numeric(3, 5), cents cents,
        t text, vc varchar(20), c char(5), by bytea, d date, ti time, titz timetz, ts timestamp, tz timestamptz, iv interval,
        u uuid, j json, jb jsonb, m mood, ip inet, r int4range, p point,
        bs bool[], i4s int[], i8s int8[], f8s float8[], ns numeric[], ts_ text[], ds date[], tzs timestamptz[],
        us uuid[], bys bytea[], ms mood[])"#;

/// Rows of `kinds`; `{}` stands for what is added to their ids.
const KINDS_ROWS: &str = r#"
    INSERT INTO kinds VALUES
    (1 + {}, true, -32768, -2147483648, -9223372036854775808, 4294967295, 'NaN', 'NaN',
     'NaN', 'NaN', 'NaN', 12345, 0.00123, 'NaN',
     '', '', '', '', '-infinity', '00:00', '00:00+14', '-infinity', '-infinity', '0',
     '00000000-0000-0000-0000-000000000000', '{"b" : 1,  "a":[ 1.50 ,null]}', '{"b" : 1,  "a":[ 1.50 ,null]}', 'sad', '10.0.0.0/8', 'empty', '(-0,1e300)',
     '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}'),
    (2 + {}, false, 32767, 2147483647, 9223372036854775807, 0, 'Infinity', '-Infinity',
     'Infinity', -9999999999.99, 1234567890123456789012345678.0123456789, -9900, -0.00999, 0,
     E'tab\t, newline\n, return\r, quote " '' back\\slash \v\f\b €𝄞', 'twenty characters xx', 'ab   ', '\x00ff5c0a',
     'infinity', '24:00', '23:59:59.999999-15:59', 'infinity', 'infinity', '-1 year -2 mons +3 days -04:05:06.789',
     'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11', '"\u00e9\n"', '"\u00e9\n"', 'say "yes"', '::ffff:1.2.3.4/128', '[1,)', '(1,2)',
     '{t,f,NULL}', '{1,NULL,-3}', '{9223372036854775807,NULL}', '{NaN,Infinity,-0,1e-7,NULL,0.1}', '{1.50,NaN,NULL,1e40}',
     '{plain,"two words",NULL,"NULL","","a\"b","c\\d","{e}","f,g"}', '{2024-02-29,infinity,NULL,"0001-01-01 BC"}',
     '{"2024-01-01 12:34:56.7+02",NULL,-infinity}', '{a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11,NULL}', '{"\\x00ff",NULL}', '{"so so","say \"yes\"",NULL}'),
    (3 + {}, NULL, -1, 0, 1, 1, '-0', '-0',
     1.5000, 0.10, -0.0000000001, 0, 0, 1.5,
     'x', 'y', 'z', '\xdeadbeef', '4713-01-01 BC', '12:34:56.000001', '12:00+05:30', '0001-12-31 23:59:59.5 BC', '4713-01-02 00:00+00 BC', 'P1Y2M3DT4H5M6S',
     'ffffffff-ffff-ffff-ffff-ffffffffffff', 'null', 'null', 'so so', '::1', '[-5,5)', '(0.1,0.2)',
     '[2:3]={t,f}', '{{1,2},{3,NULL}}', '[0:1]={1,2}', '{{NaN}}', '{{1.0}}', '{{a,"b c"},{NULL,""}}', '{{2024-01-01}}', '{{2024-01-01}}',
     '{{00000000-0000-0000-0000-000000000000}}', '{{"\\x"}}', '{{sad}}'),
    (4 + {}, true, 4, 4, 4, 4, 3.4028235e38, 1.7976931348623157e308,
     123456789012345678901234567890123456789012345678901234567890.000000000001, 12.34, 0, 100, 0.001, 12,
     'long', 'v', 'c', 'b', '5874897-12-31', '23:59:59.999999', '00:00', '294276-12-31 23:59:59.999999', '294246-12-31 23:59:59.999999+00', '178000000 years',
     'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11', '[]', '{}', 'sad', '1.2.3.4', '(,5)', '(1e-300,-1)',
     '{NULL}', '{NULL}', '{NULL}', '{NULL}', '{NULL}', '{NULL}', '{NULL}', '{NULL}', '{NULL}', '{NULL}', '{NULL}'),
    (5 + {}, true, 5, 5, 5, 5, 1e-45, 5e-324,
     1e-20, -0.01, 9999999999999999999999999999.9999999999, -100, -0.00001, -0.01,
     'h', 'v', 'c', 'b', '1969-12-31', '00:00:00.1', '00:00', '1969-12-31 23:59:59.999999', '1969-12-31 23:59:59.999999+00', '1 day -00:00:01',
     'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11', '{}', '[1e2]', 'sad', 'fe80::1/64', '[1,2]', '(0,0)',
     NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL),
    (6 + {}, true, 6, 6, 6, 6, 123456, 100000000000000,
     0.0, 1, 1, 1000, 0.1e-3, 1,
     'h', 'v', 'c', 'b', '2000-02-29', '01:02:03.4', '00:00', '2000-02-29 01:02:03', '2024-06-30 12:00+02', '-00:00:00.000001',
     'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11', '1', '1.0', 'sad', '1.2.3.4', NULL, '(0,0)',
     '{t}', '{0}', '{0}', '{1e100,0.30000000000000004}', '{-0.0,100}', '{" lead","trail ","null"}', '{1970-01-01}', '{1970-01-01}', NULL, NULL, NULL),
    (7 + {}, true, 7, 7, 7, 7, 1e6, 1e15,
     100, 1, 1, 0, 0, 1, 'h', 'v', 'c', 'b', '0001-01-01', '00:00', '00:00', '0001-01-01', '0001-01-01 00:00+00', '1 mon', NULL, NULL, NULL, NULL, NULL, NULL, NULL,
     NULL, NULL, NULL, '{0.0001,0.00001,123456789012345,1234567890123456}', NULL, NULL, NULL, NULL, NULL, NULL, NULL),
    (8 + {}, true, 8, 8, 8, 8, 0.1, 0.1, 1, 1, 1, 0, 0, 1, 'h', 'v', 'c', 'b', '0001-12-31 BC', '00:00', '00:00', NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
     NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL);
    INSERT INTO kinds(id) VALUES (9 + {})"#;

/// Copies and streams every type; the database prints them as no session of ours does.
fn all_kinds(test: &str, format: &str) -> (Database, Pipeline) {
    let (source, mut pipeline) = bench(test, KINDS, &files_destination("lake", format));
    for setting in [
        "TimeZone = 'Asia/Kathmandu'",
        "DateStyle = 'German'",
        "IntervalStyle = 'iso_8601'",
        "bytea_output = 'escape'",
        "extra_float_digits = 0",
    ] {
        source.sql(&format!("ALTER DATABASE {} SET {setting}", source.name));
    }
    let rows = |offset: u32| KINDS_ROWS.replace("+ {}", &format!("+ {offset}"));
    source.sql(&format!("SET DateStyle = ISO; {}", rows(0)));
    pipeline.start();
    pipeline.wait_ready();
    source.sql(&format!("SET DateStyle = ISO; {}", rows(100)));
    // By an update, from a row of NULLs, and with another key than it came with.
    let columns = source.sql(
        "SELECT string_agg(quote_ident(attname), ', ' ORDER BY attnum) FROM pg_attribute
         WHERE attrelid = 'kinds'::regclass AND attnum > 1",
    );
    source.sql("INSERT INTO kinds(id) SELECT id + 200 FROM kinds WHERE id < 100");
    source.sql(&format!(
        "UPDATE kinds SET ({columns}) = (SELECT {columns} FROM kinds k WHERE k.id = kinds.id - 200) WHERE id > 200"
    ));
    source.sql("UPDATE kinds SET id = id + 1000 WHERE id > 200 AND id % 2 = 0");
    pipeline.wait_caught_up(&source);
    (source, pipeline)
}

#[test]
fn every_type_is_in_parquet_what_postgresql_prints_to_pyarrow_and_to_duckdb() {
    let (source, mut pipeline) = all_kinds("kinds_parquet", "parquet");
    let log = Log::of(&pipeline, "lake");
    assert_eq!(log.check(), 0);
    log.assert_folds_to(&source, "kinds", "pyarrow");
    log.assert_folds_to(&source, "kinds", "duckdb");
    assert_eq!(pipeline.stop(), 0);
}

#[test]
fn every_type_is_in_ndjson_what_postgresql_prints() {
    let (source, mut pipeline) = all_kinds("kinds_ndjson", "ndjson");
    let log = Log::of(&pipeline, "lake");
    assert_eq!(log.check(), 0);
    log.assert_folds_to(&source, "kinds", "pyarrow");
    assert_eq!(pipeline.stop(), 0);
}

#[test]
fn what_the_source_did_not_send_is_missing_and_not_null() {
    let destinations = files_destination("parquet", "parquet") + &files_destination("ndjson", "ndjson");
    let (source, mut pipeline) = bench(
        "missing",
        "CREATE TABLE t (id int PRIMARY KEY, big text, n int, other text);
         ALTER TABLE t ALTER COLUMN big SET STORAGE EXTERNAL;
         INSERT INTO t SELECT n, repeat(md5(n::text), 200), 0, NULL FROM generate_series(1, 20) n",
        &destinations,
    );
    pipeline.start();
    pipeline.wait_ready();
    source.sql("UPDATE t SET n = 1 WHERE id = 1");
    source.sql("UPDATE t SET big = NULL WHERE id = 2");
    source.sql("UPDATE t SET id = 103 WHERE id = 3");
    source.sql("DELETE FROM t WHERE id = 4");
    source.sql("BEGIN; UPDATE t SET id = 105, n = 5 WHERE id = 5; UPDATE t SET n = 6 WHERE id = 105; UPDATE t SET id = 5 WHERE id = 105; COMMIT");
    pipeline.wait_caught_up(&source);
    for destination in ["parquet", "ndjson"] {
        let log = Log::of(&pipeline, destination);
        let rows = log.ask_json("rows", &["public.t"]);
        let changes: Vec<_> = rows.iter().filter(|row| row["op"] != "copy").collect();
        let seen: Vec<Value> = changes
            .iter()
            .map(|row| serde_json::json!([row["op"], row["cells"], row["missing"], row["old_key"]]))
            .collect();
        let wanted = serde_json::json!([
            ["update", {"id": "1", "n": "1", "other": null}, ["big"], null],
            ["update", {"id": "2", "big": null, "n": "0", "other": null}, null, null],
            ["update", {"id": "103", "n": "0", "other": null}, ["big"], {"id": "3"}],
            ["delete", {"id": "4"}, ["big", "n", "other"], null],
            ["update", {"id": "105", "n": "5", "other": null}, ["big"], {"id": "5"}],
            ["update", {"id": "105", "n": "6", "other": null}, ["big"], null],
            ["update", {"id": "5", "n": "6", "other": null}, ["big"], {"id": "105"}],
        ]);
        assert_eq!(Value::Array(seen), wanted, "{destination}");
        assert_eq!(log.check(), 0);
        log.assert_folds_to(&source, "t", "pyarrow");
    }
}

#[test]
fn truncations_and_rows_without_a_key_fold_to_the_source() {
    let (source, mut pipeline) = bench(
        "keyless",
        "CREATE TABLE keyless (a int, b text); ALTER TABLE keyless REPLICA IDENTITY FULL;
         INSERT INTO keyless SELECT n % 3, CASE n % 5 WHEN 0 THEN NULL ELSE 'b' END FROM generate_series(1, 30) n;
         CREATE TABLE emptied (id int PRIMARY KEY, parent int REFERENCES emptied); INSERT INTO emptied VALUES (1), (2)",
        &files_destination("lake", "parquet"),
    );
    pipeline.start();
    pipeline.wait_ready();
    source.sql("UPDATE keyless SET b = 'c' WHERE ctid IN (SELECT min(ctid) FROM keyless GROUP BY a, b)");
    source.sql("DELETE FROM keyless WHERE ctid IN (SELECT max(ctid) FROM keyless WHERE b IS NULL)");
    source.sql("BEGIN; INSERT INTO emptied VALUES (3, 1); TRUNCATE emptied; INSERT INTO emptied VALUES (1, NULL), (4, 1); COMMIT");
    pipeline.wait_caught_up(&source);
    let log = Log::of(&pipeline, "lake");
    assert_eq!(log.check(), 0);
    log.assert_folds_to(&source, "keyless", "pyarrow");
    log.assert_folds_to(&source, "emptied", "duckdb");
}

#[test]
fn the_log_of_a_table_that_is_renamed_and_gets_another_key_folds_to_the_source() {
    let (source, mut pipeline) = bench(
        "renamed",
        "CREATE TABLE t (id int PRIMARY KEY, other int NOT NULL UNIQUE, v text);
         INSERT INTO t SELECT n, -n, 'copied' FROM generate_series(1, 20) n",
        &files_destination("lake", "ndjson"),
    );
    pipeline.install_trigger();
    pipeline.start();
    pipeline.wait_ready();
    source.sql("UPDATE t SET v = 'before' WHERE id < 5; DELETE FROM t WHERE id = 6");
    // A table of the old name comes behind it.
    source.sql(
        "ALTER TABLE t DROP CONSTRAINT t_pkey, ADD PRIMARY KEY (other); UPDATE t SET id = id + 100 WHERE id < 3;
         UPDATE t SET other = other - 1000 WHERE id = 4; DELETE FROM t WHERE other = -7; ALTER TABLE t RENAME TO renamed;
         INSERT INTO renamed VALUES (500, 500, 'after'); DELETE FROM renamed WHERE other = -8",
    );
    for step in ["change-key", "rename-table"] {
        wait_for(&format!("{step} waits"), || {
            let output = pipeline.command(&["schema", "barriers", "--json"]).output().unwrap();
            let barriers: Value = serde_json::from_slice(&output.stdout).unwrap();
            (barriers[0]["steps"][0]["step"] == step).then_some(())
        });
        let approved = pipeline.command(&["schema", "approve", "lake", "public.t"]).output().unwrap();
        assert!(approved.status.success(), "{approved:?}");
    }
    pipeline.wait_ready();
    source.sql("CREATE TABLE t (id int PRIMARY KEY, v text); INSERT INTO t VALUES (1, 'another')");
    pipeline.wait_status("the new table is there", |status| {
        status.all_ready() && status.destinations[0].tables.iter().any(|table| table.table == "public.t")
    });
    source.sql("UPDATE renamed SET v = 'last' WHERE other = 500; INSERT INTO t VALUES (2, 'another')");
    pipeline.wait_caught_up(&source);
    assert_eq!(pipeline.stop(), 0);
    let log = Log::of(&pipeline, "lake");
    assert_eq!(log.check(), 0);
    log.assert_folds_to(&source, "renamed", "pyarrow");
    log.assert_folds_to(&source, "t", "pyarrow");
}

#[test]
fn a_file_is_whole_from_the_moment_it_has_its_name() {
    let (source, mut pipeline) = bench(
        "whole",
        "CREATE TABLE t (id bigserial PRIMARY KEY, v text); INSERT INTO t(v) SELECT repeat('copied', 30) FROM generate_series(1, 20000)",
        &small_files("lake", "parquet"),
    );
    let directory = pipeline.directory().join("lake");
    let mut watch = reader("watch.py")
        .arg(&directory)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("python runs");
    let mut said = BufReader::new(watch.stdout.take().unwrap());
    let mut line = String::new();
    said.read_line(&mut line).unwrap();
    assert_eq!(line, "watching\n");
    pipeline.start();
    pipeline.wait_ready();
    for _ in 0..20 {
        source.sql("INSERT INTO t(v) SELECT md5(n::text) FROM generate_series(1, 2000) n; UPDATE t SET v = v || '.' WHERE id % 20 = 0");
    }
    pipeline.wait_caught_up(&source);
    // It may have found a fault and gone.
    let _ = watch.stdin.take().unwrap().write_all(b"\n");
    let mut count = String::new();
    said.read_to_string(&mut count).unwrap();
    let ended = watch.wait_with_output().unwrap();
    assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
    let count: usize = count.trim().parse().expect("a count");
    let log = Log::of(&pipeline, "lake");
    assert_eq!(count, log.ask_json("files", &["public.t"]).len());
    assert!(count > 20, "{count} files are no load");
    assert_eq!(log.check(), 0);
}

#[test]
fn a_kill_amid_load_loses_nothing() {
    let (source, mut pipeline) = bench(
        "files_killed",
        "CREATE TABLE t (id bigserial PRIMARY KEY, v text, n int DEFAULT 0, big text);
         ALTER TABLE t ALTER COLUMN big SET STORAGE EXTERNAL;
         INSERT INTO t(v, big) SELECT 'row ' || n, CASE WHEN n % 1000 = 0 THEN repeat('big', 2000) END FROM generate_series(1, 20000) n;
         CREATE TABLE emptied (id serial PRIMARY KEY, v text)",
        &small_files("lake", "parquet"),
    );
    pipeline.install_trigger();
    let work = "INSERT INTO t(v) SELECT 'more' FROM generate_series(1, 300);
                UPDATE t SET n = n + 1 WHERE id % 17 = 0;
                DELETE FROM t WHERE id % 101 = 0;
                UPDATE t SET id = -id WHERE id % 997 = 0;
                INSERT INTO emptied(v) SELECT 'gone' FROM generate_series(1, 50);
                TRUNCATE emptied;
                INSERT INTO emptied(v) VALUES ('stays')";
    let mut since = 0;
    for round in 0..8_u64 {
        pipeline.start();
        source.sql(work);
        if round == 5 {
            source.sql("ALTER TABLE t ADD COLUMN added text DEFAULT 'later'");
        }
        source.sql(work);
        // The first ones amid the copy, the later ones amid files of changes.
        std::thread::sleep(Duration::from_millis(100 * round));
        if round >= 3 {
            let manifest = pipeline.directory().join("lake/manifest.ndjson");
            let lines = || std::fs::read_to_string(&manifest).unwrap_or_default().lines().count();
            wait_for("the manifest grows", || (lines() > since).then_some(()));
            since = lines();
        }
        pipeline.kill();
    }
    pipeline.start();
    pipeline.wait_ready();
    pipeline.wait_caught_up(&source);
    let log = Log::of(&pipeline, "lake");
    log.check();
    log.assert_folds_to(&source, "t", "pyarrow");
    log.assert_folds_to(&source, "t", "duckdb");
    log.assert_folds_to(&source, "emptied", "pyarrow");
    assert_eq!(pipeline.stop(), 0);
}

#[test]
fn a_schema_change_begins_a_file_with_the_new_columns() {
    let (source, mut pipeline) = bench(
        "files_schema",
        "CREATE TABLE t (id int PRIMARY KEY, a text, b int); INSERT INTO t SELECT n, 'a', n FROM generate_series(1, 10) n",
        &files_destination("lake", "parquet"),
    );
    pipeline.install_trigger();
    pipeline.start();
    pipeline.wait_ready();
    for (text, change, rows) in [
        ("a", "ADD COLUMN c int DEFAULT 5", "INSERT INTO t VALUES (11, 'c', 1, 7)"),
        ("a", "DROP COLUMN b", "UPDATE t SET c = 8 WHERE id = 1"),
        ("a", "RENAME COLUMN a TO renamed", "UPDATE t SET renamed = 'r' WHERE id = 2"),
        ("renamed", "ADD COLUMN b text", "UPDATE t SET b = 'b' WHERE id = 3"),
    ] {
        let before = format!("UPDATE t SET {text} = {text} || '.' WHERE id > 8");
        source.sql(&format!("BEGIN; {before}; ALTER TABLE t {change}; {rows}; COMMIT"));
    }
    source.sql("ALTER TABLE t ALTER COLUMN c SET DEFAULT 6");
    source.sql("INSERT INTO t(id) VALUES (12)");
    pipeline.wait_caught_up(&source);
    let log = Log::of(&pipeline, "lake");
    let mut seen: Vec<Vec<Value>> = Vec::new();
    for file in log.ask_json("files", &["public.t"]) {
        let columns = file["columns"].as_array().unwrap().clone();
        if seen.last() != Some(&columns) {
            seen.push(columns);
        }
    }
    let wanted = [
        vec!["id", "a", "b"],
        vec!["id", "a", "b", "c"],
        vec!["id", "a", "c"],
        vec!["id", "renamed", "c"],
        vec!["id", "renamed", "c", "b"],
    ];
    assert_eq!(seen, wanted, "{}", pipeline.log());
    assert_eq!(log.check(), 0);
    log.assert_folds_to(&source, "t", "pyarrow");
    log.assert_folds_to(&source, "t", "duckdb");
}

#[test]
fn a_mirror_and_a_log_are_fed_by_one_slot() {
    let copy = database(mirror(), "both");
    let destinations = postgres_destination("mirror", &copy) + &files_destination("lake", "parquet");
    let (source, mut pipeline) = bench(
        "both",
        "CREATE TABLE t (id int PRIMARY KEY, v text, n int DEFAULT 0); INSERT INTO t SELECT n, 'v' || n FROM generate_series(1, 3000) n",
        &destinations,
    );
    pipeline.install_trigger();
    pipeline.start();
    pipeline.wait_ready();
    source.sql("UPDATE t SET n = n + 1 WHERE id % 2 = 0; DELETE FROM t WHERE id % 5 = 0; UPDATE t SET id = -id WHERE id % 7 = 0");
    source.sql("BEGIN; ALTER TABLE t ADD COLUMN added int DEFAULT 3; INSERT INTO t VALUES (5000, 'new', 1, 4); COMMIT");
    pipeline.wait_caught_up(&source);
    // The copies' own slots are temporary, and gone by now.
    let slots = "SELECT string_agg(slot_name, ' ') FROM pg_replication_slots WHERE database = current_database()";
    assert_eq!(source.sql(slots), format!("tidegate_{}", source.name));
    assert_eq!(source.rows("t"), copy.rows("t"), "{}", pipeline.log());
    let log = Log::of(&pipeline, "lake");
    assert_eq!(log.check(), 0);
    log.assert_folds_to(&source, "t", "pyarrow");
    assert_eq!(pipeline.stop(), 0);
}
