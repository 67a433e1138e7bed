//! A session with a server, for threads that wait for their answers.

use std::time::Duration;

use tokio::runtime::Runtime;
use tokio_postgres::{Client, NoTls, SimpleQueryMessage};

use crate::Result;

/// Longer than any statement here may take.
const PATIENCE: Duration = Duration::from_secs(60);

/// A row as text.
pub type Row = Vec<Option<String>>;

/// See the module.
pub struct Sql {
    client: Client,
    runtime: Runtime,
}

impl Sql {
    pub fn connect(url: &str) -> Result<Sql> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let client = runtime.block_on(async {
            let connecting = tokio_postgres::connect(url, NoTls);
            let (client, connection) = tokio::time::timeout(Duration::from_secs(10), connecting).await??;
            tokio::spawn(async move {
                // What goes wrong with it is said by the next query.
                let _ = connection.await;
            });
            Ok::<Client, Box<dyn std::error::Error + Send + Sync>>(client)
        })?;
        Ok(Sql { client, runtime })
    }

    /// Runs statements whose answers nobody wants.
    pub fn run(&self, sql: &str) -> Result<()> {
        let ran = self.runtime.block_on(async { tokio::time::timeout(PATIENCE, self.client.batch_execute(sql)).await });
        ran.map_err(|_| format!("no answer within {PATIENCE:?}: {sql}"))?.map_err(|error| said(&error, sql))
    }

    pub fn rows(&self, sql: &str) -> Result<Vec<Row>> {
        let asked =
            self.runtime.block_on(async { tokio::time::timeout(PATIENCE, self.client.simple_query(sql)).await });
        let answer = asked.map_err(|_| format!("no answer within {PATIENCE:?}: {sql}"))?;
        let answer = answer.map_err(|error| said(&error, sql))?;
        let rows = answer.into_iter().filter_map(|message| match message {
            SimpleQueryMessage::Row(row) => {
                Some((0..row.len()).map(|index| row.get(index).map(str::to_owned)).collect())
            }
            _ => None,
        });
        Ok(rows.collect())
    }

    /// The one value of a query, empty for NULL.
    pub fn one(&self, sql: &str) -> Result<String> {
        let rows = self.rows(sql)?;
        let first = rows.into_iter().next().and_then(|row| row.into_iter().next());
        Ok(first.ok_or_else(|| format!("no row: {sql}"))?.unwrap_or_default())
    }

    pub fn is_lost(&self) -> bool {
        self.client.is_closed()
    }
}

fn said(error: &tokio_postgres::Error, sql: &str) -> crate::Error {
    let said =
        error.as_db_error().map_or_else(|| error.to_string(), |db| format!("{}: {}", db.code().code(), db.message()));
    let shown: String = sql.chars().take(300).collect();
    format!("{said}\n  {shown}").into()
}
