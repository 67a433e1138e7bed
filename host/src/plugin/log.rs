//! What a plugin says, into the host's log: bounded in length and rate.

use std::borrow::Cow;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use super::limits::Limits;
use super::text::clean;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Level {
    Trace,
    Debug,
    Info,
    Warn,
    Error,
}

/// The log of one instance, shared by its streams.
#[derive(Clone)]
pub(crate) struct Log(Arc<Inner>);

struct Inner {
    destination: Arc<str>,
    plugin: Arc<str>,
    lane: u32,
    line_bytes: usize,
    rate: Mutex<Rate>,
    /// Secrets that the plugin was shown: it may repeat them, we may not.
    secrets: Mutex<Vec<String>>,
}

/// A bucket that holds what one second fills.
struct Rate {
    per_second: f64,
    tokens: f64,
    filled: Instant,
    left_out: u64,
}

impl Rate {
    /// Whether one more line fits, and how many did not since the last that did.
    fn take(&mut self, now: Instant) -> Option<u64> {
        let elapsed = now.saturating_duration_since(self.filled).as_secs_f64();
        self.tokens = (self.tokens + elapsed * self.per_second).min(self.per_second);
        self.filled = now;
        if self.tokens < 1.0 {
            self.left_out += 1;
            return None;
        }
        self.tokens -= 1.0;
        Some(std::mem::take(&mut self.left_out))
    }
}

/// One event at a level known only now: the macros of `tracing` want it earlier.
macro_rules! event {
    ($level:expr, $($rest:tt)*) => {
        match $level {
            Level::Trace => tracing::trace!($($rest)*),
            Level::Debug => tracing::debug!($($rest)*),
            Level::Info => tracing::info!($($rest)*),
            Level::Warn => tracing::warn!($($rest)*),
            Level::Error => tracing::error!($($rest)*),
        }
    };
}

impl Log {
    pub(crate) fn new(destination: Arc<str>, plugin: Arc<str>, lane: u32, limits: &Limits) -> Log {
        let per_second = f64::from(limits.log_lines.max(1));
        let rate = Rate { per_second, tokens: per_second, filled: Instant::now(), left_out: 0 };
        Log(Arc::new(Inner {
            destination,
            plugin,
            lane,
            line_bytes: limits.log_line_bytes,
            rate: Mutex::new(rate),
            secrets: Mutex::default(),
        }))
    }

    /// From now on `secret` is taken out of what the plugin says. One that is too short
    /// to be recognised stays.
    pub(crate) fn conceal(&self, secret: &str) {
        let mut secrets = self.0.secrets.lock().unwrap_or_else(PoisonError::into_inner);
        if secret.len() >= 4 && !secrets.iter().any(|known| known == secret) {
            // Secrets rotate; the oldest are worthless by now.
            if secrets.len() >= 32 {
                secrets.remove(0);
            }
            secrets.push(secret.to_owned());
        }
    }

    /// `text` without the secrets.
    pub(crate) fn redact<'a>(&self, text: &'a str) -> Cow<'a, str> {
        let mut text = Cow::Borrowed(text);
        for secret in self.0.secrets.lock().unwrap_or_else(PoisonError::into_inner).iter() {
            if text.contains(secret.as_str()) {
                text = Cow::Owned(text.replace(secret.as_str(), "***"));
            }
        }
        text
    }

    /// One line of the plugin's; `stream` says by which way it came.
    pub(crate) fn line(&self, level: Level, stream: &'static str, message: &str, fields: &str) {
        let Inner { destination, plugin, lane, line_bytes, rate, .. } = &*self.0;
        let Some(left_out) = rate.lock().unwrap_or_else(PoisonError::into_inner).take(Instant::now()) else {
            return;
        };
        if left_out > 0 {
            tracing::warn!(target: "tidegate::plugin", %destination, %plugin, lane, left_out, "the plugin logs too much: lines were left out");
        }
        let message = clean(&self.redact(message), *line_bytes);
        let fields = &*self.redact(fields);
        if fields.is_empty() {
            event!(level, target: "tidegate::plugin", %destination, %plugin, lane, stream, "{message}");
        } else {
            event!(level, target: "tidegate::plugin", %destination, %plugin, lane, stream, fields, "{message}");
        }
    }

    /// The audit line of something that was not permitted. Bounded by the same rate.
    pub(crate) fn refusal(&self, what: &'static str, name: &str, reason: &str) {
        let Inner { destination, plugin, lane, rate, .. } = &*self.0;
        if rate.lock().unwrap_or_else(PoisonError::into_inner).take(Instant::now()).is_some() {
            tracing::warn!(target: "tidegate::audit", %destination, %plugin, lane, what, name, reason, "refused");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn a_secret_that_was_shown_is_not_repeated() {
        let log = Log::new("d".into(), "p".into(), 0, &Limits::default());
        assert_eq!(log.redact("password hunter2"), "password hunter2");
        log.conceal("hunter2");
        assert_eq!(log.redact("password hunter2, hunter2"), "password ***, ***");
    }

    #[test]
    fn a_loop_that_logs_is_cut_to_its_rate_and_the_rest_is_counted() {
        let start = Instant::now();
        let mut rate = Rate { per_second: 10.0, tokens: 10.0, filled: start, left_out: 0 };
        let passed = (0..1000).filter(|_| rate.take(start).is_some()).count();
        assert_eq!(passed, 10);
        assert_eq!(rate.take(start + Duration::from_millis(150)), Some(990));
        assert_eq!(rate.take(start + Duration::from_millis(150)), None);
    }
}
