//! Every type that a table can hold, from source to mirror and to files: what stands at
//! both ends, copied and streamed, is what PostgreSQL prints at the source, although role
//! and database of either end have set what prints and reads values otherwise.
//!
//! The types and their values come from `tests/fixtures/types`.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Map, Value};
use tidegate::position::Lsn;
use tidegate::scratch::Cluster;
use tidegate_tests::{Database, Pipeline, database, files_destination, mirror, postgres_destination, source};

/// Repeats the random values of a run that failed.
const SEED: &str = "TIDEGATE_TYPES_SEED";

/// How values are to print, and what lets a test work in spite of the adversary.
const PINNED: &str = "-c DateStyle=ISO -c IntervalStyle=postgres -c TimeZone=UTC -c extra_float_digits=3 -c bytea_output=hex \
     -c lc_monetary=C -c search_path=pg_catalog -c quote_all_identifiers=off -c client_encoding=UTF8 \
     -c default_transaction_read_only=off -c default_transaction_isolation=read\\ committed -c statement_timeout=0 -c lock_timeout=0 \
     -c idle_session_timeout=0 -c idle_in_transaction_session_timeout=0 -c standard_conforming_strings=on -c array_nulls=on -c xmloption=content";

const TABLES: &str =
    "SELECT relname FROM pg_class WHERE relnamespace = 'zoo'::regnamespace AND relname ~ '^w\\d+$' ORDER BY oid";

fn seed() -> String {
    let given = std::env::var(SEED).ok();
    let seed = given.unwrap_or_else(|| {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.subsec_nanos());
        format!("{:.6}", f64::from(now % 1_000_000) / 1e6)
    });
    eprintln!("{SEED}={seed} repeats this run");
    seed
}

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/types").join(name)
}

/// psql in a pinned session; its output as it is.
fn psql(database: &Database, arguments: &[&str]) -> String {
    let output = Command::new("psql")
        .args(["-X", "-q", "-A", "-t", "-v", "ON_ERROR_STOP=1", "-d", &database.url])
        .args(arguments)
        .env("PGOPTIONS", PINNED)
        .output()
        .expect("psql runs");
    assert!(output.status.success(), "psql: {}\n{arguments:?}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("UTF-8")
}

fn ask(database: &Database, sql: &str) -> Vec<String> {
    psql(database, &["-c", sql]).lines().map(str::to_owned).collect()
}

/// What makes types and values works in the schema that everybody has.
fn make(database: &Database, sql: &str) {
    psql(database, &["-c", "SET search_path = public", "-c", sql]);
}

/// Sets role and database against whoever connects.
fn turn_against_us(database: &Database) {
    let adversary = fixture("adversary.sql").display().to_string();
    psql(database, &["-c", "SET pool.role = postgres", "-f", &adversary]);
}

/// What a table prints, a line a row, in an order of their own.
fn printed(database: &Database, table: &str) -> Vec<String> {
    sorted(&psql(database, &["-c", &format!("COPY (SELECT * FROM {table}) TO STDOUT")]))
}

fn sorted(text: &str) -> Vec<String> {
    let mut lines: Vec<String> = text.split_terminator('\n').map(str::to_owned).collect();
    lines.sort();
    lines
}

/// `tests/readers/fold.py` on the log of a destination.
fn fold(directory: &Path, command: &str, table: &str, delimiters: &str) -> String {
    let venv = std::env::var_os("TIDEGATE_VENV").map_or_else(
        || PathBuf::from(std::env::var_os("HOME").expect("HOME is set")).join(".cache/tidegate/venv"),
        PathBuf::from,
    );
    let python = venv.join("bin/python");
    assert!(python.exists(), "{} is missing: run `scripts/setup --tests` first", python.display());
    let output = Command::new(python)
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("readers/fold.py"))
        .arg(command)
        .arg(directory)
        .args([table, "--delimiters", delimiters])
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .output()
        .expect("python runs");
    assert!(output.status.success(), "fold.py {command} {table}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("UTF-8")
}

fn assert_equal(what: &str, table: &str, columns: &[String], wanted: &[String], found: &[String]) {
    assert_eq!(wanted.len(), found.len(), "rows of {table} {what}");
    for (wanted, found) in wanted.iter().zip(found) {
        if wanted == found {
            continue;
        }
        let cells = wanted.split('\t').zip(found.split('\t')).zip(columns);
        let short = |cell: &str| cell.chars().take(2_000).collect::<String>();
        let differ: Vec<String> = cells
            .filter(|((wanted, found), _)| wanted != found)
            .map(|((wanted, found), column)| format!("{column}: {}\nis\n{}", short(wanted), short(found)))
            .take(5)
            .collect();
        panic!("{table} {what}, row {}:\n{}", short(wanted.split('\t').next().unwrap_or("")), differ.join("\n"));
    }
}

/// A source with a table of each type, and where it goes.
struct Bench {
    source: Database,
    mirror: Database,
    pipeline: Pipeline,
    /// Name and columns.
    tables: Vec<(String, Vec<String>)>,
    /// Of columns whose arrays have another than the comma.
    delimiters: String,
}

const LOGS: [&str; 2] = ["ndjson", "parquet"];

impl Bench {
    fn new(source: Database, mirror: Database, tables: Vec<String>) -> Bench {
        turn_against_us(&source);
        turn_against_us(&mirror);
        let logs: String = LOGS.iter().map(|format| files_destination(format, format)).collect();
        let pipeline = Pipeline::new(&source, &(postgres_destination("mirror", &mirror) + &logs));
        for name in LOGS {
            std::fs::create_dir(pipeline.directory().join(name)).unwrap();
        }
        let columns = |table: &String| {
            let sql = format!(
                "SELECT attname FROM pg_attribute WHERE attrelid = 'zoo.{table}'::regclass AND attnum > 0 AND NOT attisdropped ORDER BY attnum"
            );
            (table.clone(), ask(&source, &sql))
        };
        let delimiters = ask(
            &source,
            "SELECT attname, e.typdelim FROM pg_attribute JOIN pg_class c ON c.oid = attrelid JOIN pg_type t ON t.oid = atttypid
             LEFT JOIN pg_type b ON b.oid = t.typbasetype JOIN pg_type e ON e.oid = coalesce(nullif(t.typelem, 0), b.typelem)
             WHERE relnamespace = 'zoo'::regnamespace AND relname ~ '^w\\d+$' AND e.typdelim <> ','",
        );
        let delimiters: Map<String, Value> = delimiters
            .iter()
            .filter_map(|line| line.rsplit_once('|'))
            .map(|(column, delimiter)| (column.to_owned(), Value::from(delimiter)))
            .collect();
        let tables = tables.iter().map(columns).collect();
        Bench { source, mirror, pipeline, tables, delimiters: Value::Object(delimiters).to_string() }
    }

    fn wait_caught_up(&mut self) {
        let at: Lsn = ask(&self.source, "SELECT pg_current_wal_insert_lsn()")[0].parse().expect("an LSN");
        ask(&self.source, "SELECT pg_logical_emit_message(true, 'tidegate-test', 'mark')");
        self.pipeline.wait_status("all destinations have caught up", |status| {
            status.destinations.iter().all(|destination| destination.checkpoint.is_some_and(|there| there >= at))
        });
    }

    /// That all ends are what the source prints.
    fn assert_same(&mut self, what: &str) {
        self.wait_caught_up();
        for (table, columns) in &self.tables {
            let wanted = printed(&self.source, &format!("zoo.{table}"));
            let there = printed(&self.mirror, &format!("zoo.{table}"));
            assert_equal(&format!("{what}, at the mirror"), table, columns, &wanted, &there);
            for log in LOGS {
                let directory = self.pipeline.directory().join(log);
                let folded = fold(&directory, "fold", &format!("zoo.{table}"), &self.delimiters);
                assert_equal(&format!("{what}, in {log}"), table, columns, &wanted, &sorted(&folded));
            }
        }
    }

    /// That the log's deletes under FULL have every cell of the rows that were there.
    fn assert_deleted(&self, before: &[Vec<String>]) {
        for ((table, columns), before) in self.tables.iter().zip(before) {
            let full =
                ask(&self.source, &format!("SELECT relreplident FROM pg_class WHERE oid = 'zoo.{table}'::regclass"))[0]
                    == "f";
            for log in LOGS {
                let directory = self.pipeline.directory().join(log);
                let rows = fold(&directory, "rows", &format!("zoo.{table}"), &self.delimiters);
                let rows = rows.lines().map(|line| serde_json::from_str::<Value>(line).expect("JSON"));
                let deleted: Vec<Value> = rows.filter(|row| row["op"] == "delete").collect();
                assert_eq!(deleted.len(), before.len(), "{table}");
                if full {
                    let lines =
                        deleted.iter().map(|row| copy_line(&row["cells"], columns)).collect::<Vec<_>>().join("\n");
                    assert_equal(&format!("deleted, in {log}"), table, columns, before, &sorted(&lines));
                }
            }
        }
    }
}

/// A row as COPY prints it.
fn copy_line(cells: &Value, columns: &[String]) -> String {
    let cell = |column: &String| match cells[column].as_str() {
        None => "\\N".to_owned(),
        Some(text) => [
            ('\\', "\\\\"),
            ('\u{8}', "\\b"),
            ('\u{c}', "\\f"),
            ('\n', "\\n"),
            ('\r', "\\r"),
            ('\t', "\\t"),
            ('\u{b}', "\\v"),
        ]
        .iter()
        .fold(text.to_owned(), |text, (sign, escaped)| text.replace(*sign, escaped)),
    };
    columns.iter().map(cell).collect::<Vec<_>>().join("\t")
}

#[test]
fn every_type_is_at_the_mirror_and_in_files_what_psql_prints_at_the_source() {
    let seed = seed();
    let source = database(source(), "types");
    let [zoo, pools] = ["zoo.sql", "pools.sql"].map(|name| fixture(name).display().to_string());
    let seeded = format!("SET search_path = public; SET pool.seed = '{seed}'");
    psql(&source, &["-c", "SET search_path = public", "-f", &zoo, "-c", &seeded, "-f", &pools]);
    make(&source, "SELECT pool.publish('pub'), pool.insert(0)");
    let tables = ask(&source, TABLES);
    let mut bench = Bench::new(source, database(mirror(), "types"), tables);
    bench.pipeline.start();
    bench.pipeline.wait_ready();
    bench.assert_same("copied");
    // Of the rows that stay, some came by an update and some by an insert.
    make(&bench.source, "SELECT pool.update()");
    make(&bench.source, "SELECT pool.insert(1000)");
    let doomed = |(table, _): &(String, Vec<String>)| {
        printed(&bench.source, &format!("(SELECT * FROM zoo.{table} WHERE id % 2 = 0) AS doomed"))
    };
    let doomed: Vec<Vec<String>> = bench.tables.iter().map(doomed).collect();
    for (table, _) in &bench.tables {
        ask(&bench.source, &format!("DELETE FROM zoo.{table} WHERE id % 2 = 0"));
    }
    bench.assert_same("streamed");
    bench.assert_deleted(&doomed);
    assert_eq!(bench.pipeline.stop(), 0);
}

fn in_latin1(cluster: &Cluster, name: &str) -> Database {
    let sql = format!("CREATE DATABASE {name} ENCODING 'LATIN1' LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0");
    cluster.psql("postgres", &sql).expect("the database is created");
    Database { url: cluster.url(name), port: cluster.port(), name: name.to_owned() }
}

/// Copies and streams every character of a LATIN1 source, in values and in names. It
/// has types that count bytes.
fn every_latin1_character_is_at(source: Database, mirror: Database) {
    ask(
        &source,
        "CREATE SCHEMA zoo; CREATE TYPE zoo.\"m\u{f6}od\" AS ENUM ('s\u{fc}\u{df}', '\u{ff}');
         CREATE TABLE zoo.w1 (id int PRIMARY KEY, \"\u{e9}t\u{e9}\" text, m zoo.\"m\u{f6}od\", c \"char\", n name, ns name[], a text[], j json, b char(3));
         ALTER TABLE zoo.w1 REPLICA IDENTITY FULL; CREATE PUBLICATION pub FOR TABLE zoo.w1;
         INSERT INTO zoo.w1 SELECT n, chr(n), CASE n % 2 WHEN 0 THEN 's\u{fc}\u{df}' ELSE '\u{ff}' END::zoo.\"m\u{f6}od\", chr(n)::\"char\", repeat(chr(n), 63),
             ARRAY[repeat(chr(n), 63)]::name[], ARRAY[chr(n), 'a\u{e0}'], to_json(chr(n)), chr(n) FROM generate_series(1, 255) n",
    );
    let mut bench = Bench::new(source, mirror, vec!["w1".to_owned()]);
    bench.pipeline.install_trigger();
    bench.pipeline.start();
    bench.pipeline.wait_ready();
    bench.assert_same("copied");
    ask(
        &bench.source,
        "INSERT INTO zoo.w1 SELECT id + 1000, \"\u{e9}t\u{e9}\" || '\u{e4}', m, c, n, ns, a, j, b FROM zoo.w1",
    );
    // The trigger's message is made in the database's own encoding.
    ask(
        &bench.source,
        "ALTER TABLE zoo.w1 ADD COLUMN \"\u{fc}ber\" text DEFAULT '\u{e5}\\'; UPDATE zoo.w1 SET \"\u{fc}ber\" = '\u{f1}' WHERE id % 2 = 0",
    );
    bench.tables[0].1.push("\u{fc}ber".to_owned());
    bench.assert_same("streamed");
    assert_eq!(bench.pipeline.stop(), 0);
}

#[test]
fn a_source_in_latin1_is_at_a_mirror_in_utf8_as_it_prints() {
    every_latin1_character_is_at(in_latin1(source(), "latin1_to_utf8"), database(mirror(), "utf8"));
}

#[test]
fn a_source_in_latin1_is_at_a_mirror_in_latin1_as_it_prints() {
    every_latin1_character_is_at(in_latin1(source(), "latin1"), in_latin1(mirror(), "latin1"));
}

#[test]
fn a_source_whose_texts_have_no_encoding_is_refused() {
    let sql = "CREATE DATABASE sql_ascii ENCODING 'SQL_ASCII' LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0";
    source().psql("postgres", sql).expect("the database is created");
    let ascii = Database { url: source().url("sql_ascii"), port: source().port(), name: "sql_ascii".to_owned() };
    ask(&ascii, "CREATE TABLE public.t (id int PRIMARY KEY); CREATE PUBLICATION pub FOR TABLE public.t");
    let mut pipeline = Pipeline::new(&ascii, &postgres_destination("mirror", &database(mirror(), "sql_ascii")));
    pipeline.start();
    assert_eq!(pipeline.wait_end(), 3);
    assert!(pipeline.log().contains("source.encoding"), "{}", pipeline.log());
}
