//! A real server as the oracle, over every type that a table can hold
//! (`tests/fixtures/types`): what a copy and the stream bring, decoded and rendered again,
//! is what psql prints, whatever role and database have set.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::{SystemTime, UNIX_EPOCH};

use tokio_postgres::{Client, NoTls, SimpleQueryMessage};

use super::change::{DELETE, INSERT, UPDATE};
use super::gather::{find, is_missing, is_null, odd_cell, take_rows};
use super::project::cast;
use super::render::render;
use super::testing::at;
use super::{ChangeBatch, ChangeBuilder, CopyBuilder, Layout, RelationMap, column_list, fold, layout};
use crate::copy::RowSink;
use crate::copy::snapshot::{Wave, WaveOptions, take};
use crate::error::Result;
use crate::position::SnapshotId;
use crate::schema::table::{Column, Origin, ReplicaIdentity, TableSchema, quote_identifier};
use crate::scratch::{Cluster, ClusterOptions};
use crate::source::SourceConfig;
use crate::source::catalog::{PublishedTable, published_tables, table_schema};
use crate::source::pgoutput::{self, Message, Relation};
use crate::source::replication::{ReplicationConnection, SlotKind};
use crate::source::session::{self, Session};
use crate::source::wal::{Feedback, WalMessage, WalReader};
use crate::wire;

const ZOO: &str = include_str!("../../../tests/fixtures/types/zoo.sql");
const POOLS: &str = include_str!("../../../tests/fixtures/types/pools.sql");
const ADVERSARY: &str = include_str!("../../../tests/fixtures/types/adversary.sql");

/// Repeats the random values of a run that failed.
const SEED: &str = "TIDEGATE_TYPES_SEED";
/// Who replicates.
const ROLE: &str = "reader";
/// Ends what is read of the stream.
const END: &str = "end";

/// How values are to print, said once more than in `source::session`.
const PINNED: &str = "-c DateStyle=ISO -c IntervalStyle=postgres -c TimeZone=UTC -c extra_float_digits=3 -c bytea_output=hex \
     -c lc_monetary=C -c search_path=pg_catalog -c quote_all_identifiers=off -c client_encoding=UTF8 \
     -c default_transaction_read_only=off -c default_transaction_isolation=read\\ committed -c statement_timeout=0 -c lock_timeout=0 \
     -c idle_session_timeout=0 -c idle_in_transaction_session_timeout=0 -c standard_conforming_strings=on -c array_nulls=on -c xmloption=content";

/// From 0 to 1; shown when a test fails.
fn seed() -> String {
    let given = std::env::var(SEED).ok();
    let seed = given.unwrap_or_else(|| {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.subsec_nanos());
        format!("{:.6}", f64::from(now % 1_000_000) / 1e6)
    });
    eprintln!("{SEED}={seed} repeats this run");
    seed
}

/// A source whose role and database are set against us.
struct Source {
    /// Pinned, as `postgres`.
    sql: Client,
    config: SourceConfig,
    _cluster: Cluster,
}

impl Source {
    /// `setup` makes the tables and publication `p`.
    async fn new(setup: &[&str]) -> Source {
        let cluster = Cluster::start(&ClusterOptions::default()).unwrap();
        cluster.psql("postgres", "CREATE DATABASE types").unwrap();
        cluster.psql("types", &format!("CREATE ROLE {ROLE} LOGIN REPLICATION IN ROLE pg_read_all_data")).unwrap();
        for part in setup {
            cluster.psql("types", part).unwrap();
        }
        cluster.psql("types", &format!("SET pool.role = '{ROLE}'; {ADVERSARY}")).unwrap();
        let url = cluster.url_as(ROLE, None, "types");
        let config = SourceConfig::parse(&url, "p", "types").unwrap();
        let mut pinned: tokio_postgres::Config = cluster.url("types").parse().unwrap();
        let (sql, connection) = pinned.options(PINNED).connect(NoTls).await.unwrap();
        tokio::spawn(connection);
        Source { sql, config, _cluster: cluster }
    }

    async fn run(&self, sql: &str) {
        self.sql.batch_execute(sql).await.unwrap_or_else(|error| panic!("{sql}: {error:?}"));
    }

    async fn session(&self) -> Session {
        session::connect(&self.config).await.unwrap()
    }

    async fn slot(&self) -> (WalReader, Feedback) {
        let mut connection = ReplicationConnection::connect(&self.config).await.unwrap();
        let timeout = WaveOptions::default().slot_timeout;
        let slot = connection.create_slot("types", SlotKind::Permanent, timeout).await.unwrap();
        let connection = ReplicationConnection::connect(&self.config).await.unwrap();
        connection.start("types", slot.consistent_point, "p").await.unwrap()
    }

    /// What psql prints, by id.
    async fn printed(&self, schema: &TableSchema) -> Rows {
        self.printed_as(schema, &column_list(schema)).await
    }

    /// What it prints of these expressions.
    async fn printed_as(&self, schema: &TableSchema, expressions: &str) -> Rows {
        let query = format!("SELECT {expressions} FROM {}", schema.name.quoted());
        let answer = self.sql.simple_query(&query).await.unwrap();
        let rows = answer.into_iter().filter_map(|message| match message {
            SimpleQueryMessage::Row(row) => Some(row),
            _ => None,
        });
        rows.map(|row| (0..row.len()).map(|at| Shown::of(row.get(at))).collect())
            .map(|row: Vec<Shown>| (row[0].clone(), row))
            .collect()
    }
}

/// What is known of a cell.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Shown {
    Missing,
    Null,
    Text(String),
}

impl Shown {
    fn of(text: Option<&str>) -> Shown {
        text.map_or(Shown::Null, |text| Shown::Text(text.to_owned()))
    }
}

/// Rows by their first column.
type Rows = BTreeMap<Shown, Vec<Shown>>;

/// What our columns hold, rendered.
fn held(rows: &wire::Rows, schema: &TableSchema) -> Vec<Vec<Shown>> {
    let columns: Vec<_> = schema.columns.iter().map(|column| (column, find(rows, column.ordinal))).collect();
    let cell = |row: u32, column: &Column, values: Option<&wire::ColumnValues>| {
        let Some(values) = values.filter(|values| !is_missing(values, row)) else { return Shown::Missing };
        if is_null(values, row) {
            return Shown::Null;
        }
        let mut out = Vec::new();
        assert!(render(values, row, layout(column), &mut out), "{} is no text", column.declared);
        let text = String::from_utf8(out).unwrap();
        assert_eq!(odd_cell(values, row).is_some(), is_odd(column, &text), "{}: {text}", column.declared);
        Shown::Text(text)
    };
    (0..rows.count).map(|row| columns.iter().map(|(column, values)| cell(row, column, *values)).collect()).collect()
}

/// Whether the contract's layout cannot hold this text of the column's type: there is
/// no other reason for an odd cell.
fn is_odd(column: &Column, text: &str) -> bool {
    let one = |text: &str| match Layout::of(column.element.as_deref().unwrap_or(&column.base)) {
        Layout::Date => text.contains("infinity"),
        Layout::Time => text.contains("24:00:00"),
        Layout::Timestamp | Layout::TimestampTz => text.contains("infinity") || after_the_last_microsecond(text),
        _ => false,
    };
    match column.element {
        None => one(text),
        Some(_) => text.starts_with('[') || text.starts_with("{{") || one(text),
    }
}

/// Whether a timestamp is in it that an int64 of microseconds since 1970 cannot hold.
fn after_the_last_microsecond(text: &str) -> bool {
    let times = text.trim_matches(['{', '}']).split(',').map(|time| time.trim_matches('"').trim_end_matches("+00"));
    times
        .filter(|time| !time.ends_with("BC") && time.find('-') == Some(6))
        .any(|time| time > "294247-01-10 04:00:54.775807")
}

fn by_id(rows: Vec<Vec<Shown>>) -> Rows {
    rows.into_iter().map(|row| (row[0].clone(), row)).collect()
}

fn assert_same(what: &str, schema: &TableSchema, ours: &Rows, printed: &Rows) {
    assert_eq!(ours.len(), printed.len(), "rows {what} of {}", schema.name);
    for (id, row) in printed {
        let our_row = ours.get(id).unwrap_or_else(|| panic!("row {id:?} of {} is not {what}", schema.name));
        for ((column, cell), ours) in schema.columns.iter().zip(row).zip(our_row) {
            let short = |cell: &Shown| format!("{cell:?}").chars().take(2_000).collect::<String>();
            assert!(cell == ours, "{} {what} is\n{}\nand prints\n{}", column.declared, short(ours), short(cell));
        }
    }
}

/// Keeps what one connection copies, as all others do.
struct Builder(Arc<Mutex<CopyBuilder>>);

impl RowSink for Builder {
    fn push(&mut self, line: &[u8]) -> Result<bool> {
        self.0.lock().unwrap().push(line).map(|()| false)
    }

    async fn hand_over(&mut self, _: u64) -> Result<()> {
        Ok(())
    }
}

/// All rows of a wave's table, as a destination is given them.
async fn copied(wave: &Arc<Wave>, schema: &Arc<TableSchema>) -> wire::Rows {
    let table = wave.tables.iter().find(|table| table.table.oid == schema.oid).unwrap();
    let builder = Arc::new(Mutex::new(CopyBuilder::new(Arc::clone(schema))));
    wave.copy_table(table, || Builder(builder.clone())).await.unwrap();
    builder.lock().unwrap().finish()
}

/// A table of the stream. Its relation comes once, before its first row.
struct Streamed {
    builder: ChangeBuilder,
    map: Option<RelationMap>,
}

fn nothing_streamed(schemas: &[Arc<TableSchema>]) -> BTreeMap<u32, Streamed> {
    let table = |schema| Streamed { builder: ChangeBuilder::new(schema), map: None };
    schemas.iter().map(|schema| (schema.oid, table(Arc::clone(schema)))).collect()
}

/// The batches of what the stream brings up to the message [`END`].
async fn streamed(reader: &mut WalReader, tables: &mut BTreeMap<u32, Streamed>) -> BTreeMap<u32, ChangeBatch> {
    for row in 0.. {
        let WalMessage::Data(data) = reader.next().await.unwrap() else { continue };
        match pgoutput::decode(&data.body).unwrap() {
            Message::Relation(relation) => {
                let table = tables.get_mut(&relation.oid).unwrap();
                table.map = Some(map_of(&relation, table.builder.schema()));
            }
            Message::Insert { oid, new } => {
                let Streamed { builder, map } = tables.get_mut(&oid).unwrap();
                builder.insert(map.as_ref().unwrap(), &new, at(row)).unwrap();
            }
            Message::Update { oid, old, new } => {
                let Streamed { builder, map } = tables.get_mut(&oid).unwrap();
                builder.update(map.as_ref().unwrap(), old.as_ref(), &new, at(row)).unwrap();
            }
            Message::Delete { oid, old } => {
                let Streamed { builder, map } = tables.get_mut(&oid).unwrap();
                builder.delete(map.as_ref().unwrap(), &old, at(row)).unwrap();
            }
            Message::Logical { prefix, .. } if prefix == END => break,
            _ => {}
        }
    }
    tables.iter_mut().map(|(oid, table)| (*oid, table.builder.finish())).collect()
}

/// By name; the type has to be the one of the catalog.
fn map_of(relation: &Relation, schema: &TableSchema) -> RelationMap {
    let columns = relation.columns.iter().map(|column| {
        let known = schema.columns.iter().find(|known| known.name == column.name).unwrap();
        assert_eq!((known.type_oid, known.typmod), (column.type_oid, column.typmod), "{}", known.declared);
        Some(known.ordinal)
    });
    RelationMap::new(columns.collect(), schema)
}

async fn published(session: &Session) -> (Vec<PublishedTable>, Vec<Arc<TableSchema>>) {
    let tables = published_tables(session, "p").await.unwrap();
    let mut schemas = Vec::new();
    for table in &tables {
        let schema = table_schema(&**session, table.oid, "p", SnapshotId::default(), Origin::Copy).await.unwrap();
        schemas.push(Arc::new(schema.unwrap()));
    }
    (tables, schemas)
}

/// That the stream's inserts, updates and deletes are these rows, old ones too.
fn assert_changes(batch: &ChangeBatch, schema: &TableSchema, inserted: &Rows, updated: &Rows) {
    let rows = &batch.rows;
    assert_same("inserted", schema, &with_op(rows, INSERT, schema), inserted);
    assert_same("updated", schema, &with_op(rows, UPDATE, schema), updated);
    let whole = schema.replica_identity == ReplicaIdentity::Full;
    let mut deleted = updated.clone();
    if whole {
        assert_same("before its update", schema, &by_id(held(&rows.old_rows, schema)), inserted);
    } else {
        assert_eq!(rows.old_rows.count, 0);
        deleted.values_mut().for_each(|row| row[1..].fill(Shown::Missing));
    }
    assert_same("deleted", schema, &with_op(rows, DELETE, schema), &deleted);
}

/// Inserts and updates folded, with cells gathered from several rows.
fn assert_folds(batch: &ChangeBatch, schema: &Arc<TableSchema>, updated: &Rows) {
    let kept = batch.rows.ops.iter().take_while(|op| **op != DELETE).count();
    let mut rows = batch.rows.clone();
    let deletes: Vec<u32> = (kept as u32..rows.ops.len() as u32).collect();
    assert!(!deletes.is_empty());
    let folded = fold(batch, 0).unwrap();
    assert_eq!((folded.upserts.count, folded.deletes.count as usize), (0, updated.len()));
    rows.ops.truncate(kept);
    rows.rows = take_rows(&rows.rows, &(0..kept as u32).collect::<Vec<_>>());
    let sequence = &mut rows.sequence;
    sequence.commit.truncate(kept);
    sequence.ordinal.truncate(kept);
    sequence.committed_at.truncate(kept);
    sequence.xid.truncate(kept);
    let folded = fold(&ChangeBatch::new(Arc::clone(schema), rows), 0).unwrap();
    assert_same("folded", schema, &by_id(held(&folded.upserts, schema)), updated);
}

/// Types that ALTER TABLE may give a column while rows of before are under way.
const CASTS: [&str; 5] = ["text", "int4", "int8", "numeric", "float8"];

/// The key, and the columns that are cast to this type without a doubt.
fn cast_to(schema: &TableSchema, base: &str) -> Arc<TableSchema> {
    let to = |column: &Column| Column {
        base: base.to_owned(),
        declared: format!("{} as {base}", column.declared),
        element: None,
        delimiter: None,
        ..column.clone()
    };
    let column = |column: &Column| match column.key_position {
        Some(_) => Some(column.clone()),
        None => cast(column, &to(column)).map(|_| to(column)),
    };
    Arc::new(TableSchema { columns: schema.columns.iter().filter_map(column).collect(), ..schema.clone() })
}

/// The cells of `onto` as the server casts them.
async fn printed_casts(source: &Source, schema: &TableSchema, onto: &TableSchema) -> Rows {
    let expression = |column: &Column| match column.key_position {
        Some(_) => quote_identifier(&column.name),
        None => format!("{}::{}", quote_identifier(&column.name), column.base),
    };
    let expressions: Vec<String> = onto.columns.iter().map(expression).collect();
    source.printed_as(schema, &expressions.join(", ")).await
}

/// The rows with this operation.
fn with_op(rows: &wire::ChangeRows, op: u8, schema: &TableSchema) -> Rows {
    let new = held(&rows.rows, schema);
    by_id(new.into_iter().zip(&rows.ops).filter(|(_, one)| **one == op).map(|(row, _)| row).collect())
}

#[tokio::test(flavor = "multi_thread")]
async fn every_type_that_a_table_can_hold_is_copied_and_streamed_as_psql_prints_it() {
    let seed = seed();
    let setup = format!("SET pool.seed = '{seed}'; {POOLS}; SELECT pool.publish('p'), pool.insert(0)");
    let source = Source::new(&[ZOO, &setup]).await;
    // Whatever is not here has values, or no table can hold it.
    for (query, wanted) in [
        (
            "SELECT coalesce(string_agg(declared, ', '), '') FROM pool.kinds WHERE values = 0 AND error IS NULL AND refused IS NOT true",
            "",
        ),
        ("SELECT coalesce(string_agg(error, ', '), '') FROM pool.kinds WHERE error NOT LIKE '%has pseudo-type%'", ""),
        (
            "SELECT coalesce(string_agg(typname, ', '), '') FROM pg_type t WHERE typtype <> 'p' AND typisdefined
             AND typnamespace NOT IN ('pool'::regnamespace, 'pg_toast'::regnamespace) AND NOT EXISTS (SELECT FROM pool.kinds WHERE type = t.oid)
             AND typname !~ '^_?w\\d+$'",
            "",
        ),
    ] {
        assert_eq!(source.sql.query_one(query, &[]).await.unwrap().get::<_, &str>(0), wanted, "{query}");
    }

    let session = source.session().await;
    let (tables, schemas) = published(&session).await;
    let wave = Arc::new(take(&source.config, &tables, &WaveOptions::default()).await.unwrap());
    assert!(wave.skipped.is_empty(), "{:?}", wave.skipped);
    let mut cells = 0;
    for schema in &schemas {
        let rows = copied(&wave, schema).await;
        cells += rows.count as usize * schema.columns.len();
        assert_same("copied", schema, &by_id(held(&rows, schema)), &source.printed(schema).await);
    }
    assert!(cells > 5_000, "{cells} cells are no zoo");
    drop(wave);

    let (mut reader, _feedback) = source.slot().await;
    source.run("SELECT pool.delete()").await;
    source.run(&format!("SELECT pg_logical_emit_message(true, '{END}', '')")).await;
    let mut stream = nothing_streamed(&schemas);
    streamed(&mut reader, &mut stream).await;
    let mut printed = Vec::new();
    for change in ["SELECT pool.insert(1000)", "SELECT pool.update()"] {
        source.run(change).await;
        let mut rows = Vec::new();
        for schema in &schemas {
            rows.push(source.printed(schema).await);
        }
        printed.push(rows);
    }
    let mut casts = Vec::new();
    for (index, schema) in schemas.iter().enumerate() {
        for onto in CASTS.map(|base| cast_to(schema, base)) {
            casts.push((index, printed_casts(&source, schema, &onto).await, onto));
        }
    }
    source.run("SELECT pool.delete()").await;
    source.run(&format!("SELECT pg_logical_emit_message(true, '{END}', '')")).await;
    let batches = streamed(&mut reader, &mut stream).await;
    for (index, schema) in schemas.iter().enumerate() {
        let batch = &batches[&schema.oid];
        assert_changes(batch, schema, &printed[0][index], &printed[1][index]);
        assert_folds(batch, schema, &printed[1][index]);
    }
    let mut cast_columns = 0;
    for (index, printed, onto) in &casts {
        let projected =
            batches[&schemas[*index].oid].project(onto).unwrap_or_else(|error| panic!("{}", error.report()));
        assert_same("cast", onto, &with_op(&projected.rows, UPDATE, onto), printed);
        cast_columns += onto.columns.len() - 1;
    }
    assert!(cast_columns > 300, "{cast_columns} casts are no zoo");
}

#[tokio::test(flavor = "multi_thread")]
async fn half_a_character_is_kept_as_its_bytes() {
    let setup =
        "CREATE TABLE t (id int PRIMARY KEY, half \"char\", halves \"char\"[]); CREATE PUBLICATION p FOR TABLE t";
    let source = Source::new(&[setup]).await;
    let (tables, schemas) = published(&source.session().await).await;
    let (mut reader, _feedback) = source.slot().await;
    source.run("INSERT INTO public.t SELECT n, (n - 256)::\"char\", ARRAY[(n - 256)::\"char\"] FROM generate_series(128, 255) AS n").await;
    source.run(&format!("SELECT pg_logical_emit_message(true, '{END}', '')")).await;
    let stream = streamed(&mut reader, &mut nothing_streamed(&schemas)).await;
    let wave = Arc::new(take(&source.config, &tables, &WaveOptions::default()).await.unwrap());
    let copy = copied(&wave, &schemas[0]).await;
    let printed = "SELECT id, encode(textsend(format('%s', half)), 'hex'), encode(textsend(format('%s', halves)), 'hex') FROM public.t";
    let printed = source.sql.query(printed, &[]).await.unwrap();
    for rows in [&copy, &stream[&schemas[0].oid].rows.rows] {
        assert_eq!(rows.count, 128);
        for row in &printed {
            let at = row.get::<_, i32>(0) as u32 - 128;
            for column in [1, 2] {
                let values = find(rows, column as u16 + 1).unwrap();
                let mut bytes = Vec::new();
                // Later versions print it in octal digits.
                let hex = match odd_cell(values, at) {
                    Some(odd) if odd.kind == "hex" => odd.text.clone(),
                    _ => {
                        assert!(render(values, at, layout(&schemas[0].columns[column]), &mut bytes));
                        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
                    }
                };
                assert_eq!(hex, row.get::<_, &str>(column), "row {at}, column {column}");
            }
        }
    }
}
