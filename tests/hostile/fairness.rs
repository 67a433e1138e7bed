//! Two plugins burn all the time they get, on two processors: what the source, the feedback
//! and a third destination notice.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use serde_json::json;

use crate::load::File;
use crate::world::World;
use crate::{Outcome, Result};

/// How long it is looked at.
const TIME: Duration = Duration::from_secs(8);
/// Between two rows.
const EVERY: Duration = Duration::from_millis(20);
/// By how much the 99th percentile may grow.
const MOST: f64 = 50.0;

/// Milliseconds.
struct Delays {
    /// From commit to durable at `count`.
    row: f64,
    /// From the log to the server's knowledge that we have it.
    feedback: f64,
}

pub fn run() -> Result<Outcome> {
    let quiet = look(false)?;
    let burning = look(true)?;
    let said = |what: &str, before: f64, with: f64| format!("{what} p99 {before:.1} ms, {with:.1} ms beside them");
    let (rows, feedback) = (said("rows", quiet.row, burning.row), said("feedback", quiet.feedback, burning.feedback));
    if burning.row - quiet.row > MOST || burning.feedback - quiet.feedback > MOST {
        return Err(format!("more than {MOST} ms: {rows}; {feedback}").into());
    }
    Ok(Outcome {
        host: "let each run on its own thread".to_owned(),
        cost: format!("{rows}; {feedback}"),
        lost: "nothing".to_owned(),
    })
}

fn look(burn: bool) -> Result<Delays> {
    let mut world = World::new(if burn { "fair-burning" } else { "fair-quiet" }, &File::Whole)?;
    let settings = if burn { json!({"on": "write-group", "do": "loop"}) } else { json!({}) };
    let hostile: String =
        ["one", "two"].map(|name| world.hostile(name, &settings, "call_idle_ms = 60000", "")).concat();
    world.configure(&hostile)?;
    world.start()?;
    let (start, mut feedback, mut open) = (Instant::now(), Vec::new(), VecDeque::new());
    let mut client = postgres(&world)?;
    let mut id = world.rows;
    while start.elapsed() < TIME {
        id += 1;
        client.execute(&format!("INSERT INTO t VALUES ({id}, 'row')"))?;
        open.push_back((client.number("SELECT pg_current_wal_insert_lsn() - '0/0'::pg_lsn")?, Instant::now()));
        std::thread::sleep(EVERY);
        let written = client.number(WRITTEN)?;
        while let Some((_, at)) = open.pop_front_if(|(lsn, _)| *lsn <= written) {
            feedback.push(at.elapsed().as_secs_f64() * 1000.0);
        }
    }
    let sent = id - world.rows;
    world.wait("count has all rows", Duration::from_secs(30), |world| {
        world
            .status()
            .is_some_and(|status| status.destinations.iter().any(|it| it.name == "count" && it.changes >= sent))
    })?;
    let status = world.status().ok_or("there is no status")?;
    let count = status.destinations.iter().find(|it| it.name == "count").ok_or("count is gone")?;
    let row = count.delay_ms.ok_or("no delay was measured")?.p99;
    feedback.sort_by(f64::total_cmp);
    let p99 = feedback.get(feedback.len().saturating_sub(1).min(feedback.len() * 99 / 100)).copied();
    Ok(Delays { row, feedback: p99.ok_or("no feedback came")? })
}

/// A session at the source.
struct Client {
    runtime: tokio::runtime::Runtime,
    client: tokio_postgres::Client,
}

fn postgres(world: &World) -> Result<Client> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let (client, connection) = runtime.block_on(tokio_postgres::connect(&world.source.url, tokio_postgres::NoTls))?;
    runtime.spawn(connection);
    Ok(Client { runtime, client })
}

impl Client {
    fn execute(&mut self, sql: &str) -> Result<()> {
        Ok(self.runtime.block_on(self.client.batch_execute(sql))?)
    }

    /// The one number that a query answers with.
    fn number(&mut self, sql: &str) -> Result<f64> {
        let sql = format!("SELECT coalesce(({sql})::float8, 0)");
        Ok(self.runtime.block_on(self.client.query_one(&sql, &[]))?.get(0))
    }
}

/// How far the server knows that we have its log.
const WRITTEN: &str = "SELECT r.write_lsn - '0/0'::pg_lsn FROM pg_stat_replication r
    JOIN pg_replication_slots s ON s.active_pid = r.pid AND s.database = current_database() LIMIT 1";
