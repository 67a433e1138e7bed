//! `tidegate resync`.

use std::path::Path;
use std::process::ExitCode;

use super::print_text;
use crate::config::Config;
use crate::control::{self, Request};
use crate::error::{Error, Result};

#[derive(Debug, clap::Args)]
#[command(
    after_help = "Into an empty table, while the others go on; at the next start if the pipeline does not run.\n\n\
    Example:\n  tidegate resync warehouse public.orders"
)]
pub(super) struct Args {
    /// Name of the destination
    #[arg(value_name = "DEST")]
    destination: String,
    /// schema.table at the source
    #[arg(value_name = "TABLE")]
    table: String,
    /// Only this column's values: there is no such copy yet, and this is refused
    #[arg(long, value_name = "COLUMN")]
    backfill: Option<String>,
}

pub(super) async fn resync(args: &Args, path: &Path) -> Result<ExitCode> {
    if let Some(column) = &args.backfill {
        let message = format!("the values of one column alone (`{column}` of {}) cannot be copied yet", args.table);
        return Err(Error::usage("resync.backfill", message)
            .next("Leave out --backfill: the whole table is copied again, with the column's values."));
    }
    let pipeline = Config::load_pipeline(path)?;
    let request = Request::Resync { destination: args.destination.clone(), table: args.table.clone() };
    if let Some(answer) = control::ask(&pipeline.state, &request).await? {
        print_text(answer.as_str().unwrap_or_default())?;
        return Ok(ExitCode::SUCCESS);
    }
    let store = pipeline.open_store()?;
    let loaded = store.load()?;
    let mut known: Vec<String> = Vec::new();
    let mut found = None;
    for record in loaded.tables.iter().filter(|record| record.destination == args.destination) {
        known.push(record.name.to_string());
        if record.name.to_string() == args.table {
            found = Some(record.oid);
        }
    }
    let Some(oid) = found else {
        return Err(unknown(args, &known, loaded.destinations.iter().map(|record| record.name.as_str())));
    };
    store.reset_table(&args.destination, oid).await?;
    print_text(&format!("{} of {} is copied again at the next start of `tidegate run`", args.table, args.destination))?;
    Ok(ExitCode::SUCCESS)
}

fn unknown<'a>(args: &Args, tables: &[String], destinations: impl Iterator<Item = &'a str>) -> Error {
    if tables.is_empty() {
        let destinations: Vec<&str> = destinations.collect();
        return Error::usage(
            "resync.unknown-destination",
            format!("the state knows no table of a destination `{}`", args.destination),
        )
        .next(format!("Name one of: {}.", destinations.join(", ")));
    }
    Error::usage("resync.unknown-table", format!("the state knows no table `{}` of {}", args.table, args.destination))
        .next(format!("Name one of: {}.", tables.join(", ")))
}
