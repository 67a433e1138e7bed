//! The command line: one file per command.

mod barriers;
mod check;
mod demo;
mod log;
mod paint;
mod plugin;
mod plugin_test;
mod progress;
mod quarantine;
mod resync;
mod run;
mod schema;
mod schema_history;
mod status;
mod tables;
mod trigger;

use std::future::Future;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Parser, Subcommand};

use self::log::LogOptions;
use crate::error::{Error, Result};

/// How long blocking work may go on after a command is done: what it holds is closed by
/// the end of the process anyway.
const LINGER: Duration = Duration::from_secs(2);

/// Replicates a PostgreSQL database to destinations that are WebAssembly components.
#[derive(Debug, Parser)]
#[command(name = "tidegate", version, propagate_version = true, max_term_width = 100)]
#[command(after_help = "Exit codes: 0 ok, 1 failed, 2 bad usage or configuration, 3 the answer is no.\n\n\
    Example:\n  tidegate --config shop.toml check && tidegate --config shop.toml run")]
struct Cli {
    /// The configuration file
    #[arg(long, short, global = true, value_name = "FILE", default_value = "tidegate.toml", env = "TIDEGATE_CONFIG")]
    config: PathBuf,
    #[command(flatten)]
    log: LogOptions,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Replicate until told to stop (SIGINT or SIGTERM)
    Run(run::Args),
    /// Look whether everything `run` needs is there, and change nothing
    Check(check::Args),
    /// Show where slot, destinations and tables stand
    Status(status::Args),
    /// Copy a table of a destination again
    Resync(resync::Args),
    /// List the tables of the destinations, or forget one that is gone
    Tables(tables::Args),
    /// Rows that a destination refused: show, retry or drop them
    #[command(subcommand)]
    Quarantine(quarantine::Command),
    /// The history of a table's schema, and what a change of it means
    #[command(subcommand)]
    Schema(schema::Command),
    /// Build, list and inspect plugins
    #[command(subcommand)]
    Plugin(plugin::Command),
    /// The event triggers that report schema changes
    #[command(subcommand)]
    Trigger(trigger::Command),
    /// See it work: a scratch PostgreSQL, a small shop, two destinations
    Demo(demo::Args),
}

/// Runs what the command line says.
pub fn main() -> ExitCode {
    let cli = Cli::parse();
    let default_level = if matches!(cli.command, Command::Run(_)) { "info" } else { "warn" };
    let outcome = log::init(&cli.log, default_level).and_then(|()| dispatch(cli));
    match outcome {
        Ok(code) => code,
        Err(error) => {
            progress::clear();
            eprintln!("{}", paint::error(&error));
            ExitCode::from(error.exit_code() as u8)
        }
    }
}

fn dispatch(cli: Cli) -> Result<ExitCode> {
    let config = cli.config;
    match cli.command {
        Command::Run(args) => block_on(run::run(args, &config)),
        Command::Check(args) => block_on(check::check(&args, &config)),
        Command::Status(args) => block_on(status::status(&args, &config)),
        Command::Resync(args) => block_on(resync::resync(&args, &config)),
        Command::Tables(args) => block_on(tables::tables(&args, &config)),
        Command::Quarantine(command) => block_on(quarantine::quarantine(command, &config)),
        Command::Schema(command) => block_on(schema::schema(command, &config)),
        Command::Plugin(command) => block_on(plugin::plugin(command, &config)),
        Command::Trigger(command) => block_on(trigger::trigger(command, &config)),
        Command::Demo(args) => block_on(demo::demo(args, &cli.log)),
    }
}

fn block_on(command: impl Future<Output = Result<ExitCode>>) -> Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().map_err(|error| {
        Error::permanent("cli.runtime", format!("cannot start the asynchronous runtime: {error}"))
            .next("Raise the limits on threads and open files of this process.")
    })?;
    let outcome = runtime.block_on(command);
    runtime.shutdown_timeout(LINGER);
    outcome
}

/// Prints a value as indented JSON.
fn print_json(value: &impl serde::Serialize) -> Result<()> {
    let text = serde_json::to_string_pretty(value)
        .map_err(|error| Error::permanent("cli.json", format!("cannot write the answer as JSON: {error}")))?;
    print_text(&text)
}

/// Prints to standard output; a reader that has gone away is no failure.
fn print_text(text: &str) -> Result<()> {
    use std::io::Write;
    match writeln!(std::io::stdout().lock(), "{text}") {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
            Err(Error::permanent("cli.output", format!("cannot write to standard output: {error}")))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_command_shows_an_example() {
        fn visit(command: &clap::Command, path: &str) {
            if command.has_subcommands() {
                for inner in command.get_subcommands() {
                    visit(inner, &format!("{path} {}", inner.get_name()));
                }
            } else if command.get_name() != "help" {
                let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
                assert!(help.contains("Example:") && help.contains("tidegate "), "{path} has no example");
            }
        }
        visit(&Cli::command(), "tidegate");
    }
}
