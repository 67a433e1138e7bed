//! `tidegate tables`.

use std::path::Path;
use std::process::ExitCode;

use super::status::{report, table_row};
use super::{paint, print_json, print_text};
use crate::config::{Config, PipelineConfig};
use crate::control::{self, Request};
use crate::error::{Error, Result};
use crate::store::TableState;

#[derive(Debug, clap::Args)]
#[command(
    after_help = "A table that leaves the publication stops at every destination, and what is known of it is kept: it may\n\
    come back. `--forget` drops that for good; what is at the destination stays.\n\n\
    Example:\n  tidegate tables --forget warehouse public.audit"
)]
pub(super) struct Args {
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Forget a table of a destination that has left the publication
    #[arg(long, num_args = 2, value_names = ["DEST", "TABLE"])]
    forget: Option<Vec<String>>,
}

pub(super) async fn tables(args: &Args, path: &Path) -> Result<ExitCode> {
    let pipeline = Config::load_pipeline(path)?;
    if let Some([destination, table]) = args.forget.as_deref() {
        print_text(&forget(&pipeline, destination, table).await?)?;
        return Ok(ExitCode::SUCCESS);
    }
    let report = report(&pipeline).await?;
    if args.json {
        let tables = report.destinations.iter().flat_map(|destination| {
            destination.tables.iter().map(|table| {
                let mut json = serde_json::to_value(table).unwrap_or_default();
                json["destination"] = destination.name.clone().into();
                json
            })
        });
        print_json(&tables.collect::<Vec<_>>())?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut rows = paint::table(&["destination", "table", "state", "copied", "schema"]);
    for destination in &report.destinations {
        for table in &destination.tables {
            rows.add_row(table_row(destination, table));
        }
    }
    print_text(&rows.to_string())?;
    Ok(ExitCode::SUCCESS)
}

async fn forget(pipeline: &PipelineConfig, destination: &str, table: &str) -> Result<String> {
    let request = Request::Forget { destination: destination.to_owned(), table: table.to_owned() };
    if let Some(answer) = control::ask(&pipeline.state, &request).await? {
        return Ok(answer.as_str().unwrap_or_default().to_owned());
    }
    let store = pipeline.open_store()?;
    let records = store.tables().await?;
    let record = records.iter().find(|record| record.destination == destination && record.name.to_string() == table);
    let Some(record) = record else {
        return Err(Error::no("tables.unknown", format!("{destination} has no table `{table}`"))
            .next("Name it as `tidegate tables` does."));
    };
    if record.state != TableState::Errored {
        return Err(Error::no("tables.at-work", format!("{table} of {destination} has not stopped"))
            .next("Take it out of the publication, then start `tidegate run`: it stops the table."));
    }
    store.delete_table(destination, record.oid).await?;
    Ok(format!("{table} of {destination} is forgotten; what is at the destination stays"))
}
