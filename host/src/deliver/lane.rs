//! One instance of a plugin inside a destination: opened, lost, opened again.

use std::sync::Arc;
use std::time::Duration;

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
        plugin: Arc<Plugin>,
        options: InstanceOptions,
        session: wire::Session,
        overrides: std::collections::BTreeMap<String, u64>,
        store: Store,
    ) -> Lane {
        Lane { plugin, options, session, overrides, store, instance: None, pace: DEFAULT_PACE }
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
