//! A real server as the oracle: what COPY and pgoutput bring, decoded and rendered again,
//! is what the server prints.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::TryStreamExt;
use tokio_postgres::{Client, NoTls, SimpleQueryMessage};

use super::gather::{find, is_missing, is_null};
use super::render::render;
use super::testing::{array_column, at, column, key_column, schema, whole_map};
use super::{ChangeBuilder, CopyBuilder, column_list, layout};
use crate::schema::table::{Column, ReplicaIdentity, TableSchema};
use crate::source::pgoutput::Tuple;
use crate::wire;

/// A server of its own, on a socket in a temporary directory; stopped when dropped.
struct Server {
    process: Child,
    directory: tempfile::TempDir,
}

fn binary(name: &str) -> PathBuf {
    let versions = std::fs::read_dir("/usr/lib/postgresql").into_iter().flatten().flatten();
    let mut found: Vec<PathBuf> = versions.map(|version| version.path().join("bin").join(name)).collect();
    found.retain(|path| path.exists());
    found.sort();
    found.pop().unwrap_or_else(|| PathBuf::from(name))
}

/// PostgreSQL refuses to run as root: then as its own user, to whom `directory` is given.
fn command(program: &Path, directory: &Path) -> Command {
    if !rustix::process::geteuid().is_root() {
        return Command::new(program);
    }
    let given = Command::new("chown").arg("postgres:").arg(directory).status().unwrap();
    assert!(given.success(), "no user postgres to run a server as");
    let mut command = Command::new("setpriv");
    command.args(["--reuid=postgres", "--regid=postgres", "--init-groups"]).arg(program);
    command
}

impl Server {
    fn start() -> Server {
        let directory = tempfile::tempdir().unwrap();
        let data = directory.path().join("data");
        let made = command(&binary("initdb"), directory.path())
            .args(["--no-sync", "--auth=trust", "--username=postgres", "--encoding=UTF8", "--locale=C.UTF-8", "-D"])
            .arg(&data)
            .output()
            .unwrap();
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        let process = command(&binary("postgres"), directory.path())
            .arg("-D")
            .arg(&data)
            .args(["-c", "listen_addresses=", "-c", "wal_level=logical", "-c", "fsync=off", "-c"])
            .arg(format!("unix_socket_directories={}", directory.path().display()))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        Server { process, directory }
    }

    async fn connect(&self) -> Client {
        let mut config = tokio_postgres::Config::new();
        config.host_path(self.directory.path()).user("postgres").dbname("postgres");
        config.options(
            "-c DateStyle=ISO -c IntervalStyle=postgres -c TimeZone=UTC -c extra_float_digits=3 -c bytea_output=hex",
        );
        let begun = Instant::now();
        loop {
            match config.connect(NoTls).await {
                Ok((client, connection)) => {
                    tokio::spawn(connection);
                    return client;
                }
                Err(error) if begun.elapsed() > Duration::from_secs(60) => panic!("the server is not there: {error}"),
                Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
            }
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Some(pid) = rustix::process::Pid::from_raw(self.process.id() as i32) {
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::INT);
        }
        let _ = self.process.wait();
    }
}

/// A type with values to try, and how many of them are odd cells.
struct Case {
    declared: &'static str,
    base: &'static str,
    element: Option<&'static str>,
    odd: usize,
    values: &'static [&'static str],
}

const fn case(declared: &'static str, base: &'static str, odd: usize, values: &'static [&'static str]) -> Case {
    Case { declared, base, element: None, odd, values }
}

const fn array(declared: &'static str, element: &'static str, odd: usize, values: &'static [&'static str]) -> Case {
    Case { declared, base: "array", element: Some(element), odd, values }
}

const TEXTS: &[&str] = &[
    "",
    "\\N",
    "\\\\N",
    "N",
    "\\.",
    "a\tb\nc\rd\x08e\x0cf\x0bg\\h",
    "NULL",
    "é€𝄞",
    "\"quoted\"",
    "\\",
    "tail\\",
    "\\x41",
    "\\101",
    " x ",
];
const TIMES: &[&str] = &[
    "infinity",
    "-infinity",
    "4714-11-24 00:00:00 BC",
    "0001-12-31 23:59:59.999999 BC",
    "0001-01-01 00:00:00",
    "1969-12-31 23:59:59.999999",
    "1970-01-01 00:00:00",
    "2000-02-29 12:34:56.7",
    "2024-02-29 23:59:59.000001",
    "294247-01-10 04:00:54.775807",
    "294247-01-10 04:00:54.775808",
    "294276-12-31 23:59:59.999999",
    "10000-01-01 00:00:00",
];

const CASES: &[Case] = &[
    case("bool", "bool", 0, &["t", "f"]),
    case("int2", "int2", 0, &["-32768", "32767", "0"]),
    case("int4", "int4", 0, &["-2147483648", "2147483647", "0", "-1"]),
    case("int8", "int8", 0, &["-9223372036854775808", "9223372036854775807", "0"]),
    case("oid", "oid", 0, &["0", "4294967295"]),
    case(
        "float4",
        "float4",
        0,
        &[
            "NaN",
            "Infinity",
            "-Infinity",
            "-0",
            "0.1",
            "3.4028235e+38",
            "1e-45",
            "123456",
            "1234567",
            "1e-5",
            "0.0001",
            "16777216",
        ],
    ),
    case(
        "float8",
        "float8",
        0,
        &[
            "NaN",
            "Infinity",
            "-Infinity",
            "-0",
            "0.1",
            "1.7976931348623157e+308",
            "5e-324",
            "123456789012345",
            "1234567890123456",
            "0.30000000000000004",
            "2.2250738585072014e-308",
            "9007199254740993",
        ],
    ),
    case(
        "numeric",
        "numeric",
        0,
        &[
            "NaN",
            "Infinity",
            "-Infinity",
            "0.00",
            "1.0",
            "1.00",
            "-123456789012345678901234567890.123456789",
            "1e-300",
            "1e131071",
        ],
    ),
    case("numeric(5,-2)", "numeric", 0, &["1234567", "-50"]),
    case(
        "date",
        "date",
        2,
        &[
            "infinity",
            "-infinity",
            "4714-11-24 BC",
            "0001-02-29 BC",
            "0001-01-01",
            "1970-01-01",
            "2024-02-29",
            "5874897-12-31",
            "10000-01-01",
        ],
    ),
    case("time", "time", 1, &["00:00:00", "23:59:59.999999", "12:00:00.1", "24:00:00"]),
    case("time(0)", "time", 1, &["23:59:59.9", "12:00:00.4"]),
    case("timetz", "timetz", 0, &["24:00:00+15:59", "12:00:00.5-04:56:02"]),
    case("timestamp", "timestamp", 4, TIMES),
    case("timestamptz", "timestamptz", 4, TIMES),
    case("interval", "interval", 0, &["1 year 2 mons -3 days 04:05:06.789", "-1 day", "0", "178000000 years"]),
    case("uuid", "uuid", 0, &["00000000-0000-0000-0000-000000000000", "{FFEEDDCC-BBAA-9988-7766-554433221100}"]),
    case("bytea", "bytea", 0, &["\\x", "\\x00ff0a0d09", "\\x5c4e", "a\\\\b"]),
    case("text", "text", 0, TEXTS),
    case("varchar(30)", "varchar", 0, TEXTS),
    case("char(5)", "bpchar", 0, &["", "a", "é"]),
    case("name", "name", 0, &["", "a b"]),
    case("\"char\"", "char", 0, &["", "a"]),
    case("json", "json", 0, &["{\"b\" : 1,  \"a\":\"\\u00e9\\\\\", \"b\":2}", "null", "[ ]", "\"\\t\""]),
    case("jsonb", "jsonb", 0, &["{\"b\":1, \"a\":[1.50, null]}", "1e100"]),
    case("xid", "xid", 0, &["4294967295"]),
    case("money", "money", 0, &["1.5", "-92233720368547758.08"]),
    case("inet", "inet", 0, &["::1/64", "10.0.0.1"]),
    case("macaddr", "macaddr", 0, &["08:00:2b:01:02:03"]),
    case("bit varying", "varbit", 0, &["", "0101"]),
    case("point", "point", 0, &["(1.5,-0)"]),
    case("box", "box", 0, &["(1,1),(0,0)"]),
    case("int4range", "int4range", 0, &["empty", "[1,5)", "(,)"]),
    case("int4multirange", "int4multirange", 0, &["{}", "{[1,5),[7,8)}"]),
    case("tsvector", "tsvector", 0, &["'a\\b':1A 'c''d'"]),
    case("pg_lsn", "pg_lsn", 0, &["16/B374D848"]),
    case("int2vector", "int2vector", 0, &["1 2 3", ""]),
    case("mood", "enum", 0, &["o'k", "a\"b", "x,y"]),
    case("pair", "composite", 0, &["(1,\"a\\\\\"\"b\")", "(,)"]),
    case("inner_domain", "int4", 0, &["5", "-5"]),
    case("outer_domain", "int4", 0, &["7"]),
    array("bool[]", "bool", 0, &["{}", "{t,NULL,f,t,t,f,t,f,t}"]),
    array("int2[]", "int2", 0, &["{}", "{-32768,NULL,32767}"]),
    array("int4[]", "int4", 3, &["{1,NULL,3}", "{{1,2},{3,4}}", "[2:3]={1,2}", "[0:0]={NULL}", "{}"]),
    array("int8[]", "int8", 0, &["{9223372036854775807}", "{NULL}"]),
    array("float8[]", "float8", 0, &["{NaN,-0,NULL,1e300}"]),
    array("numeric[]", "numeric", 0, &["{NaN,0.00,NULL}"]),
    array(
        "text[]",
        "text",
        1,
        &["{NULL,\"NULL\",null,\"null\",\"\",\"a,b\",\"{x}\",\"q\\\"\\\\\",\" s \",é}", "{}", "{{a},{b}}"],
    ),
    array("date[]", "date", 1, &["{1970-01-01,NULL}", "{infinity}"]),
    array(
        "timestamptz[]",
        "timestamptz",
        1,
        &["{1970-01-01 00:00:00+00,0001-12-31 23:59:59 BC}", "{infinity,2000-01-01}"],
    ),
    array("time[]", "time", 1, &["{12:00:00,NULL}", "{24:00:00}"]),
    array("uuid[]", "uuid", 0, &["{00112233-4455-6677-8899-aabbccddeeff,NULL}"]),
    array("bytea[]", "bytea", 0, &["{\"\\\\x00ff\",NULL,\"\\\\x\"}"]),
    array("box[]", "box", 0, &["{(1,1),(0,0);(3,3),(2,2)}", "{}"]),
    array("jsonb[]", "jsonb", 0, &["{\"{\\\"a\\\": [1, 2]}\",NULL}"]),
    array("interval[]", "interval", 0, &["{1 day,\"1 year 02:00:00\"}"]),
    array("mood[]", "enum", 0, &["{o'k,\"a\\\"b\",\"x,y\"}"]),
    array("pair[]", "composite", 0, &["{\"(1,a)\",NULL}"]),
    array("outer_domain[]", "int4", 0, &["{1,NULL}"]),
];

const TYPES: &str = "CREATE TYPE mood AS ENUM ('o''k', 'a\"b', 'x,y');
    CREATE TYPE pair AS (a int, b text);
    CREATE DOMAIN inner_domain AS int4;
    CREATE DOMAIN outer_domain AS inner_domain CHECK (VALUE > 0);";

impl Case {
    fn schema(&self) -> Arc<TableSchema> {
        let values = match self.element {
            Some(element) => array_column(2, element),
            None => column(2, self.base),
        };
        let columns = vec![key_column(1, "int4", 1), Column { name: "Odd \"name\"".into(), ..values }];
        let columns = columns.into_iter().map(|column| match column.ordinal {
            1 => Column { name: "id".into(), ..column },
            _ => column,
        });
        schema(ReplicaIdentity::Default, columns.collect())
    }

    /// Every value, and a null at the end.
    fn create_and_fill(&self, table: &str, schema: &TableSchema) -> (String, String) {
        let create = format!("CREATE TABLE {table} (id int PRIMARY KEY, \"Odd \"\"name\"\"\" {})", self.declared);
        let literal = |value: &&str| format!("'{}'", value.replace('\'', "''"));
        let values = self.values.iter().map(literal).chain(["NULL".to_owned()]).enumerate();
        let rows: Vec<String> = values.map(|(id, value)| format!("({id}, {value})")).collect();
        let fill = format!("INSERT INTO {table} ({}) VALUES {}", column_list(schema), rows.join(", "));
        (create, fill)
    }
}

async fn printed(client: &Client, table: &str, schema: &TableSchema) -> Vec<Option<String>> {
    let answer =
        client.simple_query(&format!("SELECT {} FROM {table} ORDER BY id", column_list(schema))).await.unwrap();
    let row = |message: SimpleQueryMessage| match message {
        SimpleQueryMessage::Row(row) => Some(row.get(1).map(str::to_owned)),
        _ => None,
    };
    answer.into_iter().filter_map(row).collect()
}

async fn copied(client: &Client, table: &str, schema: &Arc<TableSchema>) -> wire::Rows {
    let query = format!("COPY (SELECT {} FROM {table} ORDER BY id) TO STDOUT", column_list(schema));
    let stream = client.copy_out(&query).await.unwrap();
    let lines: Vec<_> = stream.try_collect().await.unwrap();
    let mut builder = CopyBuilder::new(Arc::clone(schema));
    lines.iter().for_each(|line| builder.push(line).unwrap());
    builder.finish()
}

/// The inserted rows of every relation, as pgoutput sends them.
async fn streamed(client: &Client) -> Vec<(u32, Tuple)> {
    let changes = "SELECT data FROM pg_logical_slot_get_binary_changes('s', NULL, NULL, 'proto_version', '1', 'publication_names', 'p')";
    let messages = client.query(changes, &[]).await.unwrap();
    let insert = |message: Vec<u8>| match message.as_slice() {
        [b'I', a, b, c, d, b'N', tuple @ ..] => {
            Some((u32::from_be_bytes([*a, *b, *c, *d]), Tuple::new(tuple.to_vec().into())))
        }
        _ => None,
    };
    messages.iter().filter_map(|row| insert(row.get(0))).collect()
}

fn rendered(rows: &wire::Rows, schema: &TableSchema) -> Vec<Option<String>> {
    let (_, column) = schema.column(2).unwrap();
    let values = find(rows, 2).unwrap();
    let cell = |row| {
        assert!(!is_missing(values, row));
        if is_null(values, row) {
            return None;
        }
        let mut out = Vec::new();
        assert!(render(values, row, layout(column), &mut out));
        Some(String::from_utf8(out).unwrap())
    };
    (0..rows.count).map(cell).collect()
}

#[tokio::test]
async fn what_is_copied_is_what_is_streamed_is_what_the_server_prints() {
    let server = Server::start();
    let client = server.connect().await;
    client.batch_execute(TYPES).await.unwrap();
    client.batch_execute("CREATE PUBLICATION p FOR ALL TABLES").await.unwrap();
    let tables: Vec<_> = CASES.iter().enumerate().map(|(n, case)| (case, format!("t{n}"), case.schema())).collect();
    for (case, table, schema) in &tables {
        client.batch_execute(&case.create_and_fill(table, schema).0).await.unwrap();
    }
    client.batch_execute("SELECT pg_create_logical_replication_slot('s', 'pgoutput')").await.unwrap();
    for (case, table, schema) in &tables {
        let fill = case.create_and_fill(table, schema).1;
        client.batch_execute(&fill).await.unwrap_or_else(|error| panic!("{fill}: {error:?}"));
    }
    let stream = streamed(&client).await;
    for (case, table, schema) in &tables {
        let oid: u32 = client.query_one(&format!("SELECT '{table}'::regclass::oid"), &[]).await.unwrap().get(0);
        let printed = printed(&client, table, schema).await;
        assert_eq!(printed.len(), case.values.len() + 1);
        let copy = copied(&client, table, schema).await;
        assert_eq!(rendered(&copy, schema), printed, "{} copied", case.declared);
        assert_eq!(find(&copy, 2).unwrap().odd.len(), case.odd, "odd cells of {}", case.declared);

        let map = whole_map(schema);
        let mut builder = ChangeBuilder::new(Arc::clone(schema));
        let rows = stream.iter().filter(|(relation, _)| *relation == oid);
        rows.enumerate().for_each(|(n, (_, tuple))| builder.insert(&map, tuple, at(n as u64)).unwrap());
        let changes = builder.finish().rows.rows;
        assert_eq!(rendered(&changes, schema), printed, "{} streamed", case.declared);
        assert_eq!(format!("{changes:?}"), format!("{copy:?}"), "{} copied and streamed", case.declared);
    }
}
