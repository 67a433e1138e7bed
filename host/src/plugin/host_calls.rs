//! Interface `host`: log, counters, secrets, signatures, and the plugin's own state.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};

use hmac::{Hmac, Mac};
use sha2::Sha256;

use super::bindings::v0_1::tidegate::destination::{host, model};
use super::instance::State;
use super::log::Level;
use super::text::clean;
use crate::error::Result;

/// A future of [`PluginState`].
pub type StateFuture<'a, T> = Pin<Box<dyn Future<Output = Result<T>> + Send + 'a>>;

/// The small store that a plugin has for itself: one per destination, shared by its
/// lanes, durable when `set` returns.
pub trait PluginState: Send + Sync {
    /// The value of `key`, if there is one.
    fn get<'a>(&'a self, destination: &'a str, key: &'a str) -> StateFuture<'a, Option<Vec<u8>>>;
    /// Sets or, with `None`, removes.
    fn set<'a>(&'a self, destination: &'a str, key: &'a str, value: Option<Vec<u8>>) -> StateFuture<'a, ()>;
}

/// A [`PluginState`] that is forgotten with the process: for tests, and for `describe`,
/// which has no state.
#[derive(Debug, Default)]
pub struct MemoryState(Mutex<BTreeMap<(String, String), Vec<u8>>>);

impl PluginState for MemoryState {
    fn get<'a>(&'a self, destination: &'a str, key: &'a str) -> StateFuture<'a, Option<Vec<u8>>> {
        let values = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let value = values.get(&(destination.to_owned(), key.to_owned())).cloned();
        Box::pin(async { Ok(value) })
    }

    fn set<'a>(&'a self, destination: &'a str, key: &'a str, value: Option<Vec<u8>>) -> StateFuture<'a, ()> {
        let mut values = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (destination.to_owned(), key.to_owned());
        match value {
            Some(value) => values.insert(key, value),
            None => values.remove(&key),
        };
        Box::pin(async { Ok(()) })
    }
}

/// The counters of a plugin, by name; they only grow.
#[derive(Debug, Default)]
pub struct Counters(Mutex<BTreeMap<String, u64>>);

impl Counters {
    /// All of them, as they are now.
    pub fn all(&self) -> BTreeMap<String, u64> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Adds; a new name beyond `most` is left out. Whether it counted.
    fn add(&self, name: &str, value: u64, most: usize) -> bool {
        let mut counters = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(counter) = counters.get_mut(name) {
            *counter = counter.saturating_add(value);
            return true;
        }
        if counters.len() >= most || name.is_empty() {
            return false;
        }
        counters.insert(name.to_owned(), value);
        true
    }
}

/// Fields of one `emit`; more are left out.
const EMIT_FIELDS: usize = 16;
/// Bytes of a counter's name.
const COUNTER_NAME_BYTES: usize = 100;

impl model::Host for State {}

impl host::Host for State {
    async fn emit(
        &mut self,
        level: host::Level,
        message: String,
        fields: Vec<(String, String)>,
    ) -> wasmtime::Result<()> {
        let level = match level {
            host::Level::Trace => Level::Trace,
            host::Level::Debug => Level::Debug,
            host::Level::Info => Level::Info,
            host::Level::Warn => Level::Warn,
            host::Level::Error => Level::Error,
        };
        let most = self.limits.log_line_bytes;
        let mut text = String::new();
        for (name, value) in fields.iter().take(EMIT_FIELDS) {
            let gap = if text.is_empty() { "" } else { " " };
            // Before it is cut or changed: a part of a secret would not be recognised.
            let (name, value) = (self.log.redact(name), self.log.redact(value));
            let _ = write!(text, "{gap}{}={}", clean(&name, 100), clean(&value, most));
            if text.len() > most {
                break;
            }
        }
        self.log.line(level, "log", &message, &text);
        Ok(())
    }

    async fn count(&mut self, name: String, value: u64) -> wasmtime::Result<()> {
        let name = clean(&self.log.redact(&name), COUNTER_NAME_BYTES);
        if !self.counters.add(&name, value, self.limits.counters) {
            self.log.line(Level::Debug, "host", "a counter is left out: it has no name, or there are too many", &name);
        }
        Ok(())
    }

    async fn secret(&mut self, name: String) -> wasmtime::Result<Result<String, String>> {
        let Some(grant) = self.grants.secrets.get(&name).filter(|grant| grant.readable) else {
            let name = clean(&name, 100);
            self.log.refusal("secret", &name, "it is not granted as readable");
            return Ok(Err(format!("the secret `{name}` is not granted as readable")));
        };
        let value = grant.source.read();
        if let Ok(value) = &value {
            self.log.conceal(value);
        }
        Ok(value)
    }

    async fn sign(
        &mut self,
        secret: String,
        algorithm: String,
        data: Vec<u8>,
    ) -> wasmtime::Result<Result<Vec<u8>, String>> {
        let Some(grant) = self.grants.secrets.get(&secret) else {
            let secret = clean(&secret, 100);
            self.log.refusal("sign", &secret, "it is not granted");
            return Ok(Err(format!("the secret `{secret}` is not granted")));
        };
        if algorithm != "hmac-sha256" {
            return Ok(Err(format!(
                "the algorithm `{}` is not supported yet; this host signs with hmac-sha256",
                clean(&algorithm, 100)
            )));
        }
        Ok(grant.source.read().and_then(|key| {
            // HMAC takes keys of any length (RFC 2104).
            let mut mac = Hmac::<Sha256>::new_from_slice(key.as_bytes()).map_err(|e| e.to_string())?;
            mac.update(&data);
            Ok(mac.finalize().into_bytes().to_vec())
        }))
    }

    async fn working(&mut self, note: String) -> wasmtime::Result<()> {
        self.activity.working();
        self.log.line(Level::Debug, "working", &note, "");
        Ok(())
    }

    async fn get_state(&mut self, key: String) -> wasmtime::Result<Result<Option<Vec<u8>>, String>> {
        if key.len() > self.limits.state_key_bytes {
            return Ok(Err(format!("a key has at most {} bytes", self.limits.state_key_bytes)));
        }
        let state = Arc::clone(&self.state);
        let answer = state.get(&self.destination, &key).await;
        Ok(answer.map_err(|e| e.message().to_owned()))
    }

    async fn set_state(&mut self, key: String, value: Option<Vec<u8>>) -> wasmtime::Result<Result<(), String>> {
        if key.len() > self.limits.state_key_bytes {
            return Ok(Err(format!("a key has at most {} bytes", self.limits.state_key_bytes)));
        }
        if value.as_ref().is_some_and(|value| value.len() > self.limits.state_value_bytes) {
            return Ok(Err(format!("a value has at most {} bytes", self.limits.state_value_bytes)));
        }
        let state = Arc::clone(&self.state);
        let answer = state.set(&self.destination, &key, value).await;
        Ok(answer.map_err(|e| e.message().to_owned()))
    }
}
