//! What happens in the shop while it is replicated.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use tokio_postgres::error::SqlState;
use tokio_postgres::{Client, SimpleQueryMessage};

use super::shop::{Sizes, connect, sql_error};
use crate::error::Result;

/// Writers side by side. Each has rows of its own (`id % WRITERS`), so they never wait
/// for one another.
const WRITERS: u64 = 2;
/// From the beginning of one transaction of a writer to the next: a busy shop, far from
/// what the machine can do, so that a delay is a delay and not a queue.
const PACE: Duration = Duration::from_millis(40);
/// Rows of each transaction of the burst.
const BURST_ROWS: u64 = 5_000;
/// Where keys go that change: beyond all others, one range per writer and change.
const MOVED: u64 = 1_000_000_000;

/// The schema changes, each at its share of the workload's time. Between, before and
/// after them rows flow.
const CHANGES: [(f64, &str); 9] = [
    (0.10, "ALTER TABLE customers ADD COLUMN loyalty integer NOT NULL DEFAULT 7"),
    (0.20, "ALTER TABLE orders RENAME COLUMN note TO remark"),
    (0.30, "ALTER TABLE order_lines DROP COLUMN discount"),
    (0.40, "TRUNCATE carts"),
    (0.50, "ALTER TABLE events ADD COLUMN campaign text"),
    (0.60, "ALTER TABLE orders ALTER COLUMN status SET DEFAULT 'open'"),
    (0.70, "ALTER TABLE customers ALTER COLUMN name DROP NOT NULL"),
    (0.80, "ALTER TABLE customers RENAME COLUMN born TO birthday"),
    (
        0.90,
        "BEGIN; UPDATE orders SET total = total + 1 WHERE id <= 50; \
         ALTER TABLE orders ADD COLUMN channel text DEFAULT 'web'; \
         UPDATE orders SET channel = 'shop' WHERE id <= 20; COMMIT",
    ),
];

/// What was done.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Done {
    /// Rows inserted, updated and deleted, and truncations.
    pub(super) changes: u64,
    /// Statements that changed a table's schema.
    pub(super) schema_changes: u64,
}

/// A paced mix for this long, with schema changes in between.
pub(super) async fn mixed(url: &str, sizes: Sizes, time: Duration) -> Result<Done> {
    let changes = Arc::new(AtomicU64::new(0));
    let ends = Instant::now() + time;
    let mut writers = tokio::task::JoinSet::new();
    for number in 0..WRITERS {
        let writer = Writer {
            client: connect(url).await?,
            random: StdRng::seed_from_u64(number),
            number,
            sizes,
            rounds: 0,
            changes: Arc::clone(&changes),
        };
        writers.spawn(writer.write(ends));
    }
    let schema_changes = evolve(&connect(url).await?, time, &changes).await?;
    while let Some(writer) = writers.join_next().await {
        writer
            .map_err(|error| crate::error::Error::permanent("demo.workload", format!("a writer failed: {error}")))??;
    }
    Ok(Done { changes: changes.load(Ordering::Relaxed), schema_changes })
}

/// As many changes as fast as they can be made.
pub(super) async fn burst(client: &Client, sizes: Sizes) -> Result<Done> {
    let mut changes = 0;
    let wanted = sizes.orders / 2;
    let mut from = 1;
    while from <= wanted {
        let to = (from + BURST_ROWS - 1).min(wanted);
        let sql = format!(
            "BEGIN;
             UPDATE orders SET total = total + 0.01, status = 'paid' WHERE id BETWEEN {from} AND {to};
             INSERT INTO order_lines (order_id, line, product, quantity, price)
                 SELECT id, 900, 'gift', 1, 0 FROM orders WHERE id BETWEEN {from} AND {to} ON CONFLICT DO NOTHING;
             DELETE FROM order_lines WHERE order_id BETWEEN {from} AND {to} AND line = 2;
             COMMIT"
        );
        changes += rows_of(client, &sql).await?;
        from = to + 1;
    }
    Ok(Done { changes, schema_changes: 0 })
}

async fn evolve(client: &Client, time: Duration, changes: &AtomicU64) -> Result<u64> {
    let began = Instant::now();
    let mut schema_changes = 0;
    for (share, sql) in CHANGES {
        tokio::time::sleep((time.mul_f64(share)).saturating_sub(began.elapsed())).await;
        let rows = rows_of(client, sql).await?;
        if sql.contains("ALTER") {
            schema_changes += 1;
        }
        // Truncating reports no row, and is one change.
        changes.fetch_add(rows + u64::from(sql.starts_with("TRUNCATE")), Ordering::Relaxed);
    }
    Ok(schema_changes)
}

/// Runs statements and returns how many rows they changed.
async fn rows_of(client: &Client, sql: &str) -> Result<u64> {
    let messages = client.simple_query(sql).await.map_err(|error| sql_error("change rows", &error))?;
    Ok(changed(&messages))
}

fn changed(messages: &[SimpleQueryMessage]) -> u64 {
    messages.iter().map(|message| if let SimpleQueryMessage::CommandComplete(rows) = message { *rows } else { 0 }).sum()
}

struct Writer {
    client: Client,
    random: StdRng,
    number: u64,
    sizes: Sizes,
    rounds: u64,
    changes: Arc<AtomicU64>,
}

impl Writer {
    async fn write(mut self, ends: Instant) -> Result<()> {
        while Instant::now() < ends {
            let next = Instant::now() + PACE;
            let sql = self.transaction();
            match self.client.simple_query(&sql).await {
                Ok(messages) => {
                    self.changes.fetch_add(changed(&messages), Ordering::Relaxed);
                }
                // A row was written by the statement that changes schema and rows at once.
                Err(error) if error.code() == Some(&SqlState::T_R_DEADLOCK_DETECTED) => {
                    self.client.batch_execute("ROLLBACK").await.map_err(|error| sql_error("roll back", &error))?;
                }
                Err(error) => return Err(sql_error("write", &error)),
            }
            tokio::time::sleep_until(next.into()).await;
        }
        Ok(())
    }

    /// One of the writer's own ids among the first `rows`.
    fn id(&mut self, rows: u64) -> u64 {
        let rows = rows.max(2 * WRITERS);
        self.random.random_range(1..rows / WRITERS) * WRITERS + self.number
    }

    fn ids(&mut self, rows: u64, count: usize) -> String {
        let ids: Vec<String> = (0..count).map(|_| self.id(rows).to_string()).collect();
        ids.join(", ")
    }

    /// Names no column that a schema change renames or drops: a shop's own deployments
    /// are not what is shown here.
    fn transaction(&mut self) -> String {
        self.rounds += 1;
        let sizes = self.sizes;
        // Keys of this round alone.
        let fresh = MOVED + (self.rounds * WRITERS + self.number) * 10;
        let customer = self.id(sizes.customers);
        let moved = self.id(sizes.customers);
        let order = self.id(sizes.orders);
        let paid = self.ids(sizes.orders, 8);
        let event = self.id(sizes.events);
        let moved_event = self.id(sizes.events);
        let seen: Vec<String> = (0..4).map(|_| format!("event_id({})", self.id(sizes.events))).collect();
        let seen = seen.join(", ");
        let cart = self.id(sizes.carts);
        format!(
            "BEGIN;
             INSERT INTO orders (id, customer_id, total) VALUES ({fresh}, {customer}, 12.50);
             INSERT INTO order_lines (order_id, line, product, quantity, price)
                 SELECT {fresh}, n, 'product ' || n, n, n * 1.25 FROM generate_series(1, 3) AS n;
             UPDATE orders SET status = 'shipped', total = total + 0.25 WHERE id IN ({paid});
             UPDATE customers SET balance = balance - 1, tags = tags || 'seen'::text WHERE id = {customer};
             UPDATE events SET seen = NOT seen WHERE id IN ({seen});
             UPDATE events SET document = event_document({fresh}) WHERE id = event_id({event});
             UPDATE events SET id = event_id({fresh}) WHERE id = event_id({moved_event});
             INSERT INTO events (id, happened_at, kind, document)
                 VALUES (event_id({fresh} + 1), now(), 'click', event_document({fresh}));
             UPDATE customers SET id = {fresh} WHERE id = {moved};
             DELETE FROM order_lines WHERE order_id = {order};
             DELETE FROM orders WHERE id = {order};
             INSERT INTO carts (id, customer_id, products) VALUES ({cart}, {customer}, '{{1,2}}')
                 ON CONFLICT (id) DO UPDATE SET products = carts.products || 3, updated_at = now();
             COMMIT"
        )
    }
}
