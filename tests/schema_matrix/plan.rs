//! Plans of random pairs of schemas: run step by step by the plugin `postgres` on a real
//! server, and by a table that knows names alone and folds them. Every state in between has
//! to be legal, and the end the one that was to be.
//!
//! From the environment: `SEED` repeats a run, `CASES` says how many.

use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;

use rand::SeedableRng;
use rand::rngs::StdRng;
use tidegate::plugin::{EngineOptions, Grants, Instance, InstanceOptions, MemoryState, PluginEngine};
use tidegate::position::{Lsn, SnapshotId};
use tidegate::schema::change::{SchemaChange, Step, StepKind, state_after};
use tidegate::schema::classify::gravest;
use tidegate::schema::plan::{folding_collisions, plan};
use tidegate::schema::table::TableSchema;
use tidegate::wire;
use tidegate_tests::majors::{Servers, servers, wait};
use tidegate_tests::plugins;
use tokio_postgres::{Client, NoTls};

use crate::pairs::Pair;
use crate::report::{Outcome, Report};
use crate::{Error, Result};

const CASES: u64 = 1500;
/// Tries to make a failed case smaller.
const SHRINKS: usize = 300;

pub fn run(report: &Report) -> Result<()> {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let seed = number("SEED").unwrap_or_else(|| u64::from(rand::random::<u32>()));
    let cases = number("CASES").unwrap_or(CASES);
    println!("plan: SEED={seed} CASES={cases}");
    let majors = &report.options().majors;
    for (index, major) in (0..).zip(majors) {
        let Some(servers) = servers(*major) else { return Err(format!("there is no PostgreSQL {major} here").into()) };
        let numbers: Vec<u64> = (0..cases).filter(|case| case % majors.len() as u64 == index).collect();
        let mut failed = None;
        wait(async { failed = on(report, servers, seed, &numbers).await.err() });
        if let Some(error) = failed {
            return Err(error);
        }
    }
    Ok(())
}

async fn on(report: &Report, servers: &Servers, seed: u64, numbers: &[u64]) -> Result<()> {
    let mut bench = Bench::open(servers).await?;
    for number in numbers {
        let name = format!("plan {number}");
        if !report.options().wants(&name) {
            continue;
        }
        let pair = Pair::random(&mut StdRng::seed_from_u64(seed.wrapping_add(*number)));
        let (before, after) = pair.versions(1);
        let change = plan(before, after);
        let class = gravest(&change).map_or("-", |(class, _)| class.as_str());
        let outcome = match bench.check(&pair).await {
            Ok(()) => Outcome::Expected(format!("{}: the end is there, and all between was legal", outline(&change))),
            Err(error) => {
                let (pair, error) = bench.shrink(pair, error).await;
                Outcome::Unexpected(format!("SEED={seed}: {error}; {}", pair.shown()))
            }
        };
        report.case(&name, &servers.major.to_string(), class, outcome);
    }
    bench.instance.close().await.map_err(|error| error.to_string())?;
    Ok(())
}

/// How many steps of each kind.
fn outline(change: &SchemaChange) -> String {
    let mut kinds: Vec<StepKind> = change.steps.iter().map(|step| step.kind).collect();
    kinds.sort_unstable();
    let counted = kinds.chunk_by(|a, b| a == b).map(|same| format!("{} {}", same.len(), same[0]));
    let counted: Vec<String> = counted.collect();
    if counted.is_empty() { "no step".to_owned() } else { counted.join(" + ") }
}

/// The plugin `postgres`, and a look at what it does.
struct Bench {
    instance: Instance,
    client: Client,
    next: u32,
}

/// What a table is: name, type, whether it forbids nulls, default; of each column.
type Catalog = Vec<(String, String, bool, Option<String>)>;

impl Bench {
    async fn open(servers: &Servers) -> Result<Bench> {
        let cluster = &servers.mirror;
        let database = "schema_matrix_plan";
        cluster.psql("postgres", &format!("CREATE DATABASE {database}"))?;
        let engine = PluginEngine::new(EngineOptions::default())?;
        let plugin = engine.load(&plugins().join("postgres.wasm")).await?;
        let grants = serde_json::json!({
            "network": [{"address": format!("127.0.0.1:{}", cluster.port()), "private": true}],
            "secrets": {"password": {"from": "env:TIDEGATE_TEST_PASSWORD", "readable": true}},
        });
        let grants = Grants::new(serde_json::from_value(grants)?, Path::new("/"))?;
        let options = InstanceOptions::new("matrix", Arc::new(grants), Arc::new(MemoryState::default()));
        let mut instance = plugin.instantiate(&options).await.map_err(|error| error.to_string())?;
        let settings = serde_json::json!({
            "host": "127.0.0.1", "port": cluster.port(), "database": database, "user": "postgres", "sslmode": "disable",
        });
        let session = wire::Session {
            pipeline: "matrix".to_owned(),
            destination: "matrix".to_owned(),
            settings: settings.to_string(),
            lane: 0,
            lanes: 1,
            generation: 1,
            details: Vec::new(),
        };
        instance.open(&session).await.map_err(|error| error.to_string())?;
        let (client, connection) = tokio_postgres::connect(&cluster.url(database), NoTls).await?;
        tokio::spawn(connection);
        Ok(Bench { instance, client, next: 0 })
    }

    /// Runs the plan of a pair, each step by itself.
    async fn check(&mut self, pair: &Pair) -> Result<()> {
        self.next += 2;
        let (before, after) = pair.versions(self.next);
        let change = plan(before.clone(), after.clone());
        let folds = folding_collisions(&before).is_empty() && folding_collisions(&after).is_empty();
        let mut model = Model::new(&before);
        self.make(&before).await?;
        for (index, step) in change.steps.iter().enumerate() {
            let place = |what: String| -> Error { format!("step {index} ({}): {what}", step.kind).into() };
            model.run(step).map_err(place)?;
            model.check(folds).map_err(place)?;
            let wire = single(&change, index);
            self.instance.apply_schema(&wire).await.map_err(|error| place(error.to_string()))?;
            let there = self.catalog(&before).await?;
            model.compare(&there).map_err(place)?;
            let rendered = self.instance.render_table(&wire.after).await.map_err(|error| place(error.to_string()))?;
            let inspected = self.instance.inspect_table(&wire.after).await.map_err(|error| place(error.to_string()))?;
            let inspected = inspected.ok_or_else(|| place("the table is gone".to_owned()))?;
            if columns(&inspected) != columns(&rendered) {
                return Err(place(format!("there is {:?}, not {:?}", columns(&inspected), columns(&rendered))));
            }
        }
        self.check_end(&change, pair).await
    }

    /// The table is what a new one of the version after would be.
    async fn check_end(&mut self, change: &SchemaChange, pair: &Pair) -> Result<()> {
        let (_, fresh) = pair.versions(self.next + 1);
        self.make(&fresh).await?;
        let (there, wanted) = (self.catalog(&change.after).await?, self.catalog(&fresh).await?);
        for schema in [&*change.after, &*fresh] {
            let sql = format!("DROP TABLE {}", schema.name.quoted());
            self.client.batch_execute(&sql).await?;
        }
        let sorted = |catalog: &Catalog| {
            let mut sorted = catalog.clone();
            sorted.sort();
            sorted
        };
        match sorted(&there) == sorted(&wanted) {
            true => Ok(()),
            false => Err(format!("the end is {there:?}, and not {wanted:?}").into()),
        }
    }

    async fn make(&mut self, schema: &TableSchema) -> Result<()> {
        let table = to_wire(schema);
        let as_of = wire::Position { epoch: 0, commit: 1, ordinal: 0 };
        self.instance.begin_copy(&table, "run").await.map_err(|error| error.to_string())?;
        Ok(self.instance.finish_copy(&table, "run", as_of).await.map_err(|error| error.to_string())?)
    }

    async fn catalog(&self, schema: &TableSchema) -> Result<Catalog> {
        const QUERY: &str = "
            SELECT a.attname::text, format_type(a.atttypid, a.atttypmod), a.attnotnull, pg_get_expr(d.adbin, d.adrelid)
            FROM pg_attribute a LEFT JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
            WHERE a.attrelid = to_regclass($1) AND a.attnum > 0 AND NOT a.attisdropped ORDER BY a.attnum";
        let rows = self.client.query(QUERY, &[&schema.name.quoted()]).await?;
        Ok(rows.iter().map(|row| (row.get(0), row.get(1), row.get(2), row.get(3))).collect())
    }

    /// A smaller pair that fails too, and how.
    async fn shrink(&mut self, mut pair: Pair, mut error: Error) -> (Pair, Error) {
        let mut tries = 0;
        'smaller: while tries < SHRINKS {
            for smaller in pair.smaller() {
                tries += 1;
                if let Err(other) = self.check(&smaller).await {
                    (pair, error) = (smaller, other);
                    continue 'smaller;
                }
            }
            break;
        }
        (pair, error)
    }
}

fn to_wire(schema: &TableSchema) -> wire::Table {
    schema.to_wire(&schema.name, "merge", "{}")
}

/// One step as a change of its own, each of whose ends is a version of its own: the plugin
/// would take a change to the version it has for done.
fn single(change: &SchemaChange, index: usize) -> wire::SchemaChange {
    let version = |steps: usize| {
        let at = change.before.snapshot.commit.0 + steps as u64 * 10;
        let snapshot = SnapshotId { commit: Lsn(at), message: Lsn(at - 1) };
        to_wire(&TableSchema { snapshot, ..state_after(change, steps) })
    };
    let steps = change.steps_to_wire(index..index + 1, to_wire).steps;
    wire::SchemaChange { before: version(index), after: version(index + 1), steps }
}

fn columns(table: &wire::PhysicalTable) -> Vec<(String, String, bool)> {
    let column = |column: &wire::PhysicalColumn| (column.name.clone(), column.type_name.clone(), column.nullable);
    let mut columns: Vec<_> = table.columns.iter().map(column).collect();
    columns.sort();
    columns
}

/// A table that knows its columns by name alone, as any destination does.
struct Model {
    columns: Vec<ModelColumn>,
    key: String,
}

struct ModelColumn {
    name: String,
    declared: String,
    required: bool,
    default: bool,
}

impl Model {
    fn new(schema: &TableSchema) -> Model {
        let column = |column: &tidegate::schema::table::Column| ModelColumn {
            name: column.name.clone(),
            declared: column.declared.clone(),
            required: !column.nullable,
            default: column.default_literal.is_some(),
        };
        let key = schema.columns.iter().find(|column| column.key_position.is_some());
        Model {
            columns: schema.columns.iter().map(column).collect(),
            key: key.map(|column| column.name.clone()).unwrap_or_default(),
        }
    }

    fn find(&mut self, name: &str) -> Result<&mut ModelColumn, String> {
        self.columns.iter_mut().find(|column| column.name == name).ok_or_else(|| format!("there is no {name}"))
    }

    fn run(&mut self, step: &Step) -> Result<(), String> {
        match (step.kind, &step.before, &step.after) {
            (StepKind::AddColumn, None, Some(new)) => self.columns.push(ModelColumn {
                name: new.name.clone(),
                declared: new.declared.clone(),
                required: !new.nullable,
                default: new.default_literal.is_some(),
            }),
            (StepKind::DropColumn, Some(old), None) => {
                self.find(&old.name)?;
                self.columns.retain(|column| column.name != old.name);
            }
            (StepKind::RenameColumn, Some(old), Some(new)) => {
                self.find(&old.name)?.name.clone_from(&new.name);
                if self.key == old.name {
                    self.key.clone_from(&new.name);
                }
            }
            (StepKind::AlterType, Some(old), Some(new)) => self.find(&old.name)?.declared.clone_from(&new.declared),
            (StepKind::SetDefault, Some(old), Some(_)) => self.find(&old.name)?.default = true,
            (StepKind::DropDefault, Some(old), Some(_)) => self.find(&old.name)?.default = false,
            (StepKind::SetNotNull, Some(old), Some(_)) => self.find(&old.name)?.required = true,
            (StepKind::DropNotNull, Some(old), Some(_)) => self.find(&old.name)?.required = false,
            (kind, ..) => return Err(format!("{kind} was not to be planned")),
        }
        Ok(())
    }

    /// No two columns have one name, nor, if both ends can be had so, one that folds to it.
    fn check(&self, folds: bool) -> Result<(), String> {
        let form = |name: &str| if folds { name.to_lowercase() } else { name.to_owned() };
        let names: HashSet<String> = self.columns.iter().map(|column| form(&column.name)).collect();
        if names.len() == self.columns.len() {
            return Ok(());
        }
        let names: Vec<&str> = self.columns.iter().map(|column| column.name.as_str()).collect();
        Err(format!("two columns have one name: {names:?}"))
    }

    fn compare(&self, there: &Catalog) -> Result<(), String> {
        let mut wanted: Vec<(&str, &str, bool, bool)> = Vec::new();
        for column in &self.columns {
            let required = column.required || column.name == self.key;
            wanted.push((&column.name, &column.declared, required, column.default));
        }
        let mut found: Vec<(&str, &str, bool, bool)> = Vec::new();
        for (name, declared, required, default) in there {
            found.push((name, declared, *required, default.is_some()));
        }
        wanted.sort_unstable();
        found.sort_unstable();
        if wanted == found { Ok(()) } else { Err(format!("there is {found:?}, and not {wanted:?}")) }
    }
}
