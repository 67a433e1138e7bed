//! The plugins directory while the pipeline runs: what is dropped there is checked as at a
//! start, and then offered to each destination that has it, which takes it between two
//! groups (`swap`). A file that is refused or goes changes nothing but what `status` says.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokio::sync::{mpsc, watch};
use tokio::time::MissedTickBehavior;

use crate::config::DestinationConfig;
use crate::error::{Error, Result};
use crate::plugin::watch::{LOOK_EVERY, Seen, Watch};
use crate::plugin::{Directory, Plugin, PluginEngine};
use crate::status::{StatusBoard, StatusError};

use super::proven::Proven;
use super::start::check_plugin;

/// What destinations are built on from their beginning: a version without one of these
/// that its forerunner had does not take its place.
const KEPT: [&str; 6] = ["merge", "changes", "transactional", "partial-rows", "atomic-ddl", "resumable-copy"];

/// What destinations tell the watch.
pub(super) enum News {
    /// A destination begins.
    Began(Began),
    /// A version made rows durable.
    DidWell { destination: String, sha256: String },
    /// A version was taken back, and the one before it goes on.
    TakenBack { destination: String, sha256: String, why: StatusError },
}

/// A destination, as the watch knows it.
pub(super) struct Began {
    pub config: Arc<DestinationConfig>,
    /// What is at work.
    pub current: watch::Receiver<Arc<Plugin>>,
    /// What is to take its place.
    pub offers: watch::Sender<Option<Arc<Plugin>>>,
}

/// See the module.
pub(super) struct Plugins {
    pub engine: PluginEngine,
    pub directory: PathBuf,
    pub board: StatusBoard,
    pub proven: Proven,
    pub news: mpsc::UnboundedReceiver<News>,
}

struct Watched {
    began: Began,
    watch: Watch,
}

impl Plugins {
    /// Runs until it is aborted.
    pub async fn run(mut self) {
        let mut watched: Vec<Watched> = Vec::new();
        let mut looks = tokio::time::interval(LOOK_EVERY);
        looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                biased;
                Some(news) = self.news.recv() => self.hear(news, &mut watched),
                _ = looks.tick() => {
                    for one in &mut watched {
                        self.look(one).await;
                    }
                }
            }
        }
    }

    fn hear(&mut self, news: News, watched: &mut Vec<Watched>) {
        let config =
            |name: &str| watched.iter().map(|one| &one.began.config).find(|config| config.name == name).cloned();
        match news {
            News::Began(began) => {
                let watch = watch_of(&self.directory, &began.config);
                watched.push(Watched { began, watch });
            }
            News::DidWell { destination, sha256 } => {
                if let Some(config) = config(&destination) {
                    self.proven.did_well(&config, &sha256);
                }
            }
            News::TakenBack { destination, sha256, why } => {
                if let Some(config) = config(&destination) {
                    self.proven.refuse(&config, &sha256, why);
                }
            }
        }
    }

    async fn look(&mut self, watched: &mut Watched) {
        let Some(seen) = watched.watch.look() else { return };
        let outcome = match seen {
            Seen::Gone => Err(gone(&watched.began.config, &self.directory)),
            Seen::File => self.examine(&watched.began).await,
        };
        if !watched.watch.is_still() {
            // What was read may be half of each.
            return watched.watch.again();
        }
        let Began { config, offers, current } = &watched.began;
        let (offer, why) = match outcome {
            Ok(offer) => (offer, None),
            Err(error) => {
                tracing::warn!(
                    destination = %config.name, code = error.code(), next = error.next_step(),
                    "the version at work ({}) goes on: {error}", current.borrow().manifest.version
                );
                (None, Some(StatusError::from(&error)))
            }
        };
        if seen == Seen::Gone {
            self.proven.forgive(&config.name);
        }
        self.board.update_destination(&config.name, |status| status.plugin_differs(why));
        // Behind that: who takes it, or cannot yet, has the last word. What was offered and
        // is not in the directory any more is withdrawn.
        offers.send_replace(offer);
    }

    /// The version in the directory, if it is another one and can take the place of the one
    /// at work.
    async fn examine(&mut self, began: &Began) -> Result<Option<Arc<Plugin>>> {
        let config = &began.config;
        let file = Directory::find(&self.directory, &config.plugin)?;
        let plugin = self.engine.load_pinned(&file, &config.pin).await?;
        let current = began.current.borrow().clone();
        if let Some(why) = self.proven.refused(config, &plugin.sha256) {
            let error = Error::no(why.code.clone(), why.message.clone());
            return Err(match &why.next {
                Some(next) => error.next(next.clone()),
                None => error,
            });
        }
        self.proven.forgive(&config.name);
        if plugin.sha256 == current.sha256 {
            return Ok(None);
        }
        check_plugin(config, &plugin)?;
        check_successor(&current, &plugin)?;
        let lost = current.manifest.capabilities.iter().filter(|capability| !plugin.can(capability));
        let lost: Vec<&str> = lost.map(String::as_str).collect();
        if !lost.is_empty() {
            tracing::warn!(
                destination = %config.name, version = %plugin.manifest.version,
                "the new version of the plugin cannot do any more: {}", lost.join(", ")
            );
        }
        tracing::info!(
            destination = %config.name, version = %plugin.manifest.version, sha256 = %plugin.sha256,
            "another version of the plugin takes over between two groups"
        );
        Ok(Some(plugin))
    }
}

/// Looks at a destination's plugin, and at its signature.
pub(super) fn watch_of(directory: &Path, config: &DestinationConfig) -> Watch {
    let file = directory.join(format!("{}.wasm", config.plugin));
    let signature = config.pin.signature_file(&file);
    Watch::new(file, signature)
}

/// Whether a version can take the place of another while rows are on their way. One that
/// begins to store positions has none of what came before, which would be a gap.
///
/// Errors: `plugin.capability-lost`, `plugin.capability-new`.
pub(super) fn check_successor(before: &Plugin, after: &Plugin) -> Result<()> {
    let lost: Vec<String> = KEPT
        .iter()
        .filter(|capability| before.can(capability) && !after.can(capability))
        .map(|capability| format!("`{capability}`"))
        .collect();
    if !lost.is_empty() {
        return Err(Error::no(
            "plugin.capability-lost",
            format!(
                "version {} of plugin `{}` cannot do {}, which version {} can and its destination is built on",
                after.manifest.version,
                after.name,
                lost.join(" and "),
                before.manifest.version
            ),
        )
        .next("Put a version there that can, or start `tidegate run` again, which checks all tables anew."));
    }
    if after.can("transactional") && !before.can("transactional") {
        return Err(Error::no(
            "plugin.capability-new",
            format!(
                "version {} of plugin `{}` stores positions with the data (`transactional`), and version {} has not",
                after.manifest.version, after.name, before.manifest.version
            ),
        )
        .next("Add a destination with it, or stop, put it there, start again and resync the tables."));
    }
    Ok(())
}

fn gone(config: &DestinationConfig, directory: &Path) -> Error {
    Error::no("plugin.file-gone", format!("{}.wasm is not in {} any more", config.plugin, directory.display()))
        .next("Put it back: what is at work goes on without it, but the next start needs it.")
}
