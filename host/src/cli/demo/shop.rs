//! The source of the demo: its tables, its roles, its publication.

use tokio_postgres::{Client, NoTls};

use crate::error::{Error, Result};

/// Database, publication and pipeline.
pub(super) const DATABASE: &str = "shop";
/// The role the pipeline reads with.
pub(super) const READER: &str = "tidegate";
/// Tables whose rows are compared at the end.
pub(super) const TABLES: [&str; 5] = ["customers", "orders", "order_lines", "events", "carts"];
/// Tells how far the destinations are.
pub(super) const HEARTBEAT: &str = "heartbeat";

/// How many rows each table begins with.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sizes {
    pub(super) customers: u64,
    pub(super) orders: u64,
    pub(super) lines: u64,
    pub(super) events: u64,
    pub(super) carts: u64,
}

impl Sizes {
    /// Rows in all, and the shares that a shop would have.
    pub(super) fn of(rows: u64) -> Sizes {
        let customers = rows / 20;
        let orders = rows / 4;
        let events = rows / 40;
        let carts = rows / 100;
        Sizes { customers, orders, events, carts, lines: rows - customers - orders - events - carts }
    }
}

/// A connection of the demo's own, to one of its scratch clusters.
pub(super) async fn connect(url: &str) -> Result<Client> {
    let (client, connection) =
        tokio_postgres::connect(url, NoTls).await.map_err(|error| sql_error("connect", &error))?;
    tokio::spawn(async move {
        // What ends it shows at the client's next query.
        if let Err(error) = connection.await {
            tracing::debug!(%error, "a connection of the demo ended");
        }
    });
    Ok(client)
}

/// An error of a query, with the server's own words.
pub(super) fn sql_error(what: &str, error: &tokio_postgres::Error) -> Error {
    let message = match error.as_db_error() {
        Some(error) => format!("{} ({})", error.message(), error.code().code()),
        None => error.to_string(),
    };
    Error::permanent("demo.sql", format!("{what}: {message}"))
}

/// Runs statements that return nothing.
pub(super) async fn run(client: &Client, what: &str, sql: &str) -> Result<()> {
    client.batch_execute(sql).await.map_err(|error| sql_error(what, &error))
}

/// Tables and rows.
pub(super) async fn fill(client: &Client, sizes: Sizes) -> Result<()> {
    let settings = format!(
        "SET demo.customers = {}; SET demo.orders = {}; SET demo.lines = {}; SET demo.events = {}; SET demo.carts = {};",
        sizes.customers, sizes.orders, sizes.lines, sizes.events, sizes.carts
    );
    run(client, "set the sizes", &settings).await?;
    run(client, "fill the shop", include_str!("shop.sql")).await
}

/// What the pipeline needs: a role that reads and replicates, and a publication.
pub(super) async fn publish(client: &Client) -> Result<()> {
    let sql = format!(
        "CREATE ROLE {READER} LOGIN REPLICATION;
         GRANT SELECT ON ALL TABLES IN SCHEMA public TO {READER};
         CREATE PUBLICATION {DATABASE} FOR TABLE {}, {HEARTBEAT};",
        TABLES.join(", ")
    );
    run(client, "make role and publication", &sql).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rows_of_all_tables_are_those_asked_for() {
        for rows in [1_000, 200_000, 12_345_678] {
            let sizes = Sizes::of(rows);
            assert_eq!(sizes.customers + sizes.orders + sizes.lines + sizes.events + sizes.carts, rows);
            assert!(sizes.carts > 0);
        }
    }
}
