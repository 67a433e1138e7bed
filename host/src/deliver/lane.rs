//! One instance of a plugin inside a destination: opened, lost, opened again.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;

use crate::plugin::{CallError, Called, Instance, InstanceOptions, Plugin};
use crate::store::Store;
use crate::wire;

/// How a destination's groups are cut and settled: what the plugin asked for, with the
/// configuration's overrides.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pace {
    /// Bytes of a group.
    pub group_bytes: usize,
    /// How long a group may wait to fill.
    pub linger: Duration,
    /// How long groups may stay accepted before `flush`.
    pub settle: Duration,
    /// How many bytes may.
    pub settle_bytes: usize,
}

/// Groups are sent as they come, and settled once a second.
const DEFAULT_PACE: Pace =
    Pace { group_bytes: 4 << 20, linger: Duration::ZERO, settle: Duration::from_secs(1), settle_bytes: 32 << 20 };

impl Pace {
    fn of(limits: &[(String, u64)], overrides: &std::collections::BTreeMap<String, u64>) -> Pace {
        let mut pace = DEFAULT_PACE;
        let overridden = overrides.iter().map(|(name, value)| (name.replace('_', "-"), *value));
        for (name, value) in limits.iter().cloned().chain(overridden) {
            let bytes = usize::try_from(value).unwrap_or(usize::MAX);
            match name.as_str() {
                "group-bytes" => pace.group_bytes = bytes.clamp(1 << 10, 64 << 20),
                "linger-ms" => pace.linger = Duration::from_millis(value.min(60_000)),
                "settle-ms" => pace.settle = Duration::from_millis(value.clamp(10, 3_600_000)),
                "settle-bytes" => pace.settle_bytes = bytes.clamp(1 << 10, 32 << 20),
                _ => {}
            }
        }
        pace
    }
}

/// A lane. It has an instance or is about to get one.
pub(super) struct Lane {
    plugin: Arc<Plugin>,
    /// The version that comes back if this one does not do well: it is on trial.
    fallback: Option<Arc<Plugin>>,
    /// The plugin has made rows durable.
    did_well: bool,
    /// For who wants to know which version is at work.
    current: watch::Sender<Arc<Plugin>>,
    options: InstanceOptions,
    session: wire::Session,
    overrides: std::collections::BTreeMap<String, u64>,
    store: Store,
    instance: Option<Instance>,
    pace: Pace,
}

impl Lane {
    /// A lane without an instance; `session.generation` is filled in at each opening.
    pub fn new(
        (plugin, fallback): (Arc<Plugin>, Option<Arc<Plugin>>),
        options: InstanceOptions,
        session: wire::Session,
        overrides: std::collections::BTreeMap<String, u64>,
        store: Store,
    ) -> Lane {
        options.usage.loaded(plugin.compiled);
        let current = watch::Sender::new(plugin.clone());
        Lane {
            plugin,
            fallback,
            did_well: false,
            current,
            options,
            session,
            overrides,
            store,
            instance: None,
            pace: DEFAULT_PACE,
        }
    }

    /// The version of the plugin that is at work.
    pub fn plugin(&self) -> &Arc<Plugin> {
        &self.plugin
    }

    /// Tells which version is at work.
    pub fn current(&self) -> watch::Receiver<Arc<Plugin>> {
        self.current.subscribe()
    }

    /// The next instance is of another version, on trial against the last one that did
    /// well, as far as that is known.
    pub fn change_to(&mut self, plugin: Arc<Plugin>) {
        self.options.usage.loaded(plugin.compiled);
        let before = std::mem::replace(&mut self.plugin, plugin);
        let fallback = self.fallback.take().unwrap_or(before);
        // Who comes back is on no trial.
        self.fallback = (fallback.sha256 != self.plugin.sha256).then_some(fallback);
        self.did_well = false;
        self.current.send_replace(self.plugin.clone());
    }

    /// Whether another version would come back.
    pub fn on_trial(&self) -> bool {
        self.fallback.is_some()
    }

    /// Rows are durable. Whether that was not known of this version.
    pub fn did_well(&mut self) -> bool {
        self.fallback = None;
        !std::mem::replace(&mut self.did_well, true)
    }

    /// The version before comes back; returns the one that was on trial.
    pub fn take_back(&mut self) -> Option<Arc<Plugin>> {
        let good = self.fallback.take()?;
        self.discard();
        self.did_well = false;
        let bad = std::mem::replace(&mut self.plugin, good);
        self.current.send_replace(self.plugin.clone());
        Some(bad)
    }

    /// Whether the plugin says it can do this.
    pub fn can(&self, capability: &str) -> bool {
        self.plugin.can(capability)
    }

    /// The instance's number, or the last one's.
    pub fn generation(&self) -> u64 {
        self.session.generation
    }

    /// What an instance may have in linear memory.
    pub fn memory_bytes(&self) -> usize {
        self.options.limits.memory_bytes
    }

    /// See [`Pace`].
    pub fn pace(&self) -> Pace {
        self.pace
    }

    /// The instance, if the lane is open.
    pub fn instance(&mut self) -> Option<&mut Instance> {
        self.instance.as_mut()
    }

    /// Whether there is an instance.
    pub fn is_open(&self) -> bool {
        self.instance.is_some()
    }

    /// Starts a new instance, of a generation greater than any before it.
    pub async fn open(&mut self) -> Called<()> {
        self.session.generation = self
            .store
            .next_generation(&self.session.destination, self.session.lane)
            .await
            .map_err(|error| CallError::Host(Arc::new(error)))?;
        let mut instance = self.plugin.instantiate(&self.options).await?;
        let ready = instance.open(&self.session).await?;
        self.pace = Pace::of(&ready.limits, &self.overrides);
        self.instance = Some(instance);
        Ok(())
    }

    /// Drops the instance: it trapped, ran out of time, or lied.
    pub fn discard(&mut self) {
        self.instance = None;
    }

    /// Lets the instance go in good order.
    pub async fn close(&mut self) {
        if let Some(mut instance) = self.instance.take()
            && let Err(error) = instance.close().await
        {
            tracing::warn!(destination = %self.session.destination, %error, "the plugin did not close in good order");
        }
    }
}
