//! `tidegate trigger`.

use std::path::Path;
use std::process::ExitCode;

use super::print_text;
use crate::config::Config;
use crate::error::{Error, Result};
use crate::source::config::SourceConfig;
use crate::source::{session, trigger};

/// The publication does not matter to an administrator's session.
const NO_PUBLICATION: &str = "none";

#[derive(Debug, clap::Subcommand)]
pub(super) enum Command {
    /// Install the event triggers, or replace those of an older version
    #[command(after_help = "Needs a superuser; without one, see `trigger print`.\n\n\
        Example:\n  TIDEGATE_ADMIN_URL=postgres://postgres@db.internal/shop tidegate trigger install")]
    Install(Admin),
    /// Print the SQL that `install` runs
    #[command(after_help = "Example:\n  tidegate trigger print --role tidegate > trigger.sql")]
    Print(PrintArgs),
    /// Remove everything that `install` made
    #[command(
        after_help = "Example:\n  TIDEGATE_ADMIN_URL=postgres://postgres@db.internal/shop tidegate trigger uninstall"
    )]
    Uninstall(Admin),
}

#[derive(Debug, clap::Args)]
pub(super) struct Admin {
    /// URL of a superuser on the source's database; by default that of [source]
    #[arg(long, value_name = "URL", env = "TIDEGATE_ADMIN_URL", hide_env_values = true)]
    url: Option<String>,
}

#[derive(Debug, clap::Args)]
pub(super) struct PrintArgs {
    /// The role that replicates; by default that of [source]
    #[arg(long, value_name = "ROLE")]
    role: Option<String>,
}

pub(super) async fn trigger(command: Command, path: &Path) -> Result<ExitCode> {
    match command {
        Command::Print(args) => {
            let role = match args.role {
                Some(role) => role,
                None => Config::load(path)?.source.user,
            };
            print_text(trigger::print(&role).trim_end())?;
        }
        Command::Install(admin) => {
            let config = Config::load(path)?;
            let superuser = admin.config(&config)?;
            let session = session::connect(&superuser).await?;
            trigger::install(&session, &config.source.user).await?;
            print_text(&format!("installed at {}, for role {}", superuser.endpoint(), config.source.user))?;
        }
        Command::Uninstall(admin) => {
            let superuser = admin.config(&Config::load(path)?)?;
            let session = session::connect(&superuser).await?;
            trigger::uninstall(&session).await?;
            print_text(&format!("removed from {}", superuser.endpoint()))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

impl Admin {
    /// Who installs: the administrator, on the database that is replicated.
    fn config(&self, config: &Config) -> Result<SourceConfig> {
        let Some(url) = &self.url else { return Ok(config.source.clone()) };
        let admin = SourceConfig::parse(url, NO_PUBLICATION, &config.pipeline.name)?;
        if admin.database != config.source.database {
            return Err(Error::usage(
                "trigger.other-database",
                format!("the URL leads to database `{}`, and [source] to `{}`", admin.database, config.source.database),
            )
            .next("Name the same database in both: event triggers belong to one."));
        }
        Ok(admin)
    }
}
