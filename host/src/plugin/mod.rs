//! Hosting plugins: engine, limits, permissions, directory.
//!
//! A plugin is a WebAssembly component that exports the world in `wit/`. [`PluginEngine`]
//! loads one from a file, [`Plugin::instantiate`] makes an [`Instance`] for a lane of a
//! destination, and each function of the contract is a method of that. Whatever a guest
//! does, its caller gets a [`CallError`] in bounded time.

mod address;
mod answer;
pub mod bindings;
pub mod build;
mod cache;
mod component;
pub mod conformance;
mod directory;
mod engine;
mod given;
mod host_calls;
mod instance;
mod limits;
mod log;
pub mod net;
pub mod permissions;
mod physical;
pub mod pin;
mod schema_check;
mod settings;
pub mod template;
#[cfg(test)]
mod tests;
mod text;
mod usage;
mod wasi;
pub(crate) mod watch;

pub use directory::Directory;
pub use engine::{EngineOptions, EngineStats, Plugin, PluginEngine};
pub use host_calls::{Counters, MemoryState, PluginState, StateFuture};
pub use instance::{CallError, Called, Instance, InstanceOptions};
pub use limits::{EngineLimits, Limit, Limits};
pub use permissions::{FileGrant, Grants, GrantsConfig, Missing, NetworkGrant, SecretGrant, SecretSource};
pub(crate) use physical::{same_columns, same_table, sorted_columns};
pub use pin::Pin;
pub use settings::SettingsSchema;
pub(crate) use text::clean;
pub use usage::{FunctionUsage, PluginUsage, Usage, UsageBoard};
