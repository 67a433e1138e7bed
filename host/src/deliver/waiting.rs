//! Destinations that are added while the pipeline runs; those whose plugin is missing or
//! cannot be used wait for its file, and begin by themselves once it is there.

use std::sync::{Arc, PoisonError};

use tokio::time::{Instant, sleep_until};

use crate::config::{Config, DestinationConfig};
use crate::error::{Error, Result};
use crate::plugin::watch::{LOOK_EVERY, Seen, Watch};
use crate::status::{DestinationState, StatusError};
use crate::store::DestinationRecord;

use super::copier::Ask;
use super::launch::StoredTables;
use super::members::{Members, Taker};
use super::plugins::watch_of;
use super::proven::Proven;
use super::routes::{Command, Place};
use super::start::{check_tables, load_plugin, look_at_source};

/// See the module.
#[derive(Default)]
pub(super) struct Waiting {
    destinations: Vec<(DestinationConfig, Watch)>,
    /// When they are looked at next.
    next: Option<Instant>,
}

impl Waiting {
    /// Returns when it is time to look; never if nobody waits.
    pub async fn looked(&mut self) {
        match self.next {
            Some(next) => sleep_until(next).await,
            None => std::future::pending().await,
        }
        self.next = Some(Instant::now() + LOOK_EVERY);
    }

    fn set(&mut self, destinations: Vec<(DestinationConfig, Watch)>) {
        if destinations.is_empty() {
            self.next = None;
        } else {
            // Who waits on waits for the next look.
            self.next.get_or_insert_with(Instant::now);
        }
        self.destinations = destinations;
    }
}

/// Whether somebody who puts another file there helps.
fn is_of_plugin(error: &Error) -> bool {
    error.code().starts_with("plugin.")
}

impl Members {
    /// Takes up destinations that were added. Anything else that differs needs a
    /// restart, and then nothing is done.
    pub(super) async fn reload(&mut self, config: Config) -> Result<String> {
        let others = restart_needed(&self.parts.config, &config);
        if !others.is_empty() {
            return Err(Error::no(
                "reload.restart",
                format!("{} cannot change while the pipeline runs", others.join(", ")),
            )
            .next("Stop `tidegate run` and start it again: nothing is lost by it."));
        }
        self.forget_waiting();
        let is_added = |destination: &DestinationConfig| of(&self.parts.config, &destination.name).is_none();
        let added: Vec<DestinationConfig> = config.destinations.into_iter().filter(is_added).collect();
        if added.is_empty() {
            return Ok("the configuration is the same".to_owned());
        }
        let (mut done, mut waiting, mut failed) = (Vec::new(), Vec::new(), None);
        for destination in added {
            // Before the attempt: what is put there meanwhile is seen.
            let watch = watch_of(&self.parts.config.pipeline.plugins, &destination);
            match self.add(&destination).await {
                Ok(()) => done.push(format!("added destination `{}`", destination.name)),
                Err(error) if is_of_plugin(&error) => {
                    self.show_waiting(&destination, &error);
                    done.push(format!("destination `{}` waits for its plugin", destination.name));
                    waiting.push((destination, watch));
                }
                Err(error) => {
                    failed = Some(error);
                    break;
                }
            }
        }
        self.waiting.set(waiting);
        match failed {
            Some(error) => Err(error),
            None => Ok(done.join("; ")),
        }
    }

    /// Adds those whose plugin's file has come or changed.
    pub(super) async fn take_up_waiting(&mut self) {
        let mut waiting = Vec::new();
        for (destination, mut watch) in std::mem::take(&mut self.waiting.destinations) {
            if watch.look() != Some(Seen::File) {
                waiting.push((destination, watch));
                continue;
            }
            match self.add(&destination).await {
                Ok(()) => {}
                Err(error) if is_of_plugin(&error) || error.is_transient() => {
                    self.show_waiting(&destination, &error);
                    if !is_of_plugin(&error) || !watch.is_still() {
                        watch.again();
                    }
                    waiting.push((destination, watch));
                }
                Err(error) => self.show_waiting(&destination, &error),
            }
        }
        self.waiting.set(waiting);
    }

    fn show_waiting(&self, destination: &DestinationConfig, error: &Error) {
        tracing::error!(
            destination = %destination.name, code = error.code(), next = error.next_step(),
            "the destination cannot begin yet: {error}"
        );
        self.parts.launcher.board.update_destination(&destination.name, |status| {
            status.plugin.clone_from(&destination.plugin);
            status.state = DestinationState::Errored;
            status.error = Some(StatusError::from(error));
        });
    }

    /// The configuration says anew who waits.
    fn forget_waiting(&mut self) {
        self.waiting.set(Vec::new());
        let running = &self.parts.config;
        self.parts
            .launcher
            .board
            .update(|report| report.destinations.retain(|shown| of(running, &shown.name).is_some()));
    }

    async fn add(&mut self, destination: &DestinationConfig) -> Result<()> {
        let pipeline = &self.parts.config.pipeline;
        let proven = Proven::load(&pipeline.state);
        let chosen = load_plugin(&pipeline.plugins, destination, &self.parts.engine, &proven).await?;
        let source = look_at_source(&self.parts.source).await?;
        check_tables(destination, &chosen.plugin, &source)?;
        self.parts.launcher.memory.add_destination()?;
        // All its tables are still to be copied, so nothing before now is needed.
        let checkpoint = self.parts.confirmed.smallest();
        let record =
            DestinationRecord { name: destination.name.clone(), plugin: destination.plugin.clone(), checkpoint };
        self.parts.launcher.store.save_destination(record).await?;
        let (index, config) = (self.parts.takers.len(), Arc::new(destination.clone()));
        self.parts.confirmed.add(checkpoint);
        self.parts.launcher.rollout.join(&config, &[]);
        self.parts.launcher.board.update_destination(&config.name, |status| status.error = None);
        let launched = self.parts.launcher.launch(index, &config, chosen, checkpoint, StoredTables::default())?;
        self.parts.takers.push(Taker {
            config: config.clone(),
            plugin: launched.plugin,
            live: launched.outlet.live.clone(),
        });
        // Both are there for as long as the pipeline is.
        let _ = self.parts.commands.send(Command::Destination { outlet: launched.outlet });
        let _ = self.parts.asks.send(Ask::Destination(launched.copies));
        self.parts.destinations.lock().unwrap_or_else(PoisonError::into_inner).push(launched.ending);
        self.parts.config.destinations.push(destination.clone());
        for (oid, member) in source.members.tables {
            if config.tables.matches(&member.name) {
                self.begin(vec![Place { destination: index, oid }], &member.name, None);
            }
        }
        tracing::info!(destination = %config.name, "the destination was added");
        Ok(())
    }
}

/// A destination by its name.
fn of<'a>(config: &'a Config, name: &str) -> Option<&'a DestinationConfig> {
    config.destinations.iter().find(|destination| destination.name == name)
}

/// What differs and cannot be taken up, by section. Destinations may be added.
fn restart_needed(running: &Config, new: &Config) -> Vec<String> {
    let mut others = Vec::new();
    if running.pipeline != new.pipeline {
        others.push("[pipeline]".to_owned());
    }
    if running.source != new.source {
        others.push("[source]".to_owned());
    }
    for destination in &running.destinations {
        if of(new, &destination.name) != Some(destination) {
            others.push(format!("destination `{}`", destination.name));
        }
    }
    others
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt as _;

    #[tokio::test]
    async fn who_waits_is_looked_at_from_time_to_time_and_not_all_the_time() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("tidegate.toml");
        std::fs::write(
            &file,
            "[pipeline]\nname = \"shop\"\n[source]\nurl = \"postgres://me@db/shop\"\npublication = \"shop\"\n\
             [[destination]]\nname = \"lake\"\nplugin = \"files\"\nmode = \"changes\"\n",
        )
        .unwrap();
        let lake = Config::load(&file).unwrap().destinations.remove(0);
        let mut waiting = Waiting::default();
        let wait = |waiting: &mut Waiting| {
            let watch = watch_of(directory.path(), &lake);
            waiting.set(vec![(lake.clone(), watch)]);
        };
        assert!(waiting.looked().now_or_never().is_none(), "nobody waits");
        wait(&mut waiting);
        let first = waiting.next.unwrap();
        waiting.looked().await;
        let second = waiting.next.unwrap();
        assert!(second >= first + LOOK_EVERY);
        wait(&mut waiting);
        assert_eq!(waiting.next, Some(second), "not at once again");
        waiting.set(Vec::new());
        assert!(waiting.looked().now_or_never().is_none());
    }
}
