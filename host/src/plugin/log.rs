//! What a plugin says, into the host's log: bounded in length and rate.

use std::borrow::Cow;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::limits::Limits;
use super::text::clean;
use super::usage::Usage;

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
    lines: Mutex<Rate>,
    /// Refusals have their own, or a plugin that logs a lot could hide them.
    audit: Mutex<Rate>,
    usage: Arc<Usage>,
    /// Secrets that the plugin was shown: it may repeat them, we may not.
    secrets: Mutex<Vec<String>>,
}

/// Holds what one second fills.
struct Bucket {
    per_second: f64,
    tokens: f64,
}

impl Bucket {
    fn new(per_second: u32) -> Bucket {
        let per_second = f64::from(per_second.max(1));
        Bucket { per_second, tokens: per_second }
    }

    fn fill(&mut self, seconds: f64) {
        self.tokens = (self.tokens + seconds * self.per_second).min(self.per_second);
    }
}

/// How much may be written: so many lines, and so many bytes of them.
struct Rate {
    lines: Bucket,
    bytes: Bucket,
    filled: Instant,
    left_out: u64,
    /// When it was last told how many were left out.
    told: Instant,
}

/// How often it is told that lines were left out.
const TELL_EVERY: Duration = Duration::from_secs(1);

impl Rate {
    fn new(lines: u32, bytes: u32, now: Instant) -> Rate {
        Rate { lines: Bucket::new(lines), bytes: Bucket::new(bytes), filled: now, left_out: 0, told: now }
    }

    /// Whether a line of so many bytes fits, and how many did not, if it is time to tell.
    /// One that is longer than a second's bytes fits into an untouched second.
    fn take(&mut self, bytes: usize, now: Instant) -> Option<u64> {
        let elapsed = now.saturating_duration_since(self.filled).as_secs_f64();
        self.lines.fill(elapsed);
        self.bytes.fill(elapsed);
        self.filled = now;
        let bytes = (bytes as f64).min(self.bytes.per_second);
        if self.lines.tokens < 1.0 || self.bytes.tokens < bytes {
            self.left_out += 1;
            return None;
        }
        self.lines.tokens -= 1.0;
        self.bytes.tokens -= bytes;
        if self.left_out == 0 || now.saturating_duration_since(self.told) < TELL_EVERY {
            return Some(0);
        }
        self.told = now;
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

/// Whether lines of this level are looked at.
fn enabled(level: Level) -> bool {
    match level {
        Level::Trace => tracing::enabled!(target: "tidegate::plugin", tracing::Level::TRACE),
        Level::Debug => tracing::enabled!(target: "tidegate::plugin", tracing::Level::DEBUG),
        Level::Info => tracing::enabled!(target: "tidegate::plugin", tracing::Level::INFO),
        Level::Warn => tracing::enabled!(target: "tidegate::plugin", tracing::Level::WARN),
        Level::Error => tracing::enabled!(target: "tidegate::plugin", tracing::Level::ERROR),
    }
}

/// A part of a secret that is too short to be told from other text.
const SECRET_PART: usize = 4;
/// The same for one line of a secret that has several, such as a key in PEM.
const SECRET_LINE: usize = 8;
/// Secrets, and lines of them, that are looked for. They rotate; the oldest are worthless
/// by then.
const SECRETS: usize = 256;

impl Log {
    pub(crate) fn new(destination: Arc<str>, plugin: Arc<str>, lane: u32, limits: &Limits, usage: Arc<Usage>) -> Log {
        let now = Instant::now();
        Log(Arc::new(Inner {
            destination,
            plugin,
            lane,
            line_bytes: limits.log_line_bytes,
            lines: Mutex::new(Rate::new(limits.log_lines, limits.log_bytes, now)),
            audit: Mutex::new(Rate::new(limits.audit_lines, u32::MAX, now)),
            usage,
            secrets: Mutex::default(),
        }))
    }

    /// From now on `secret` is taken out of what the plugin says, and each of its lines.
    /// One that is too short to be recognised stays.
    pub(crate) fn conceal(&self, secret: &str) {
        let mut secrets = self.0.secrets.lock().unwrap_or_else(PoisonError::into_inner);
        let lines = secret.lines().map(str::trim).filter(|line| line.len() >= SECRET_LINE);
        let whole = Some(secret).filter(|secret| secret.len() >= SECRET_PART);
        for part in whole.into_iter().chain(lines) {
            if !secrets.iter().any(|known| known == part) {
                if secrets.len() >= SECRETS {
                    secrets.remove(0);
                }
                secrets.push(part.to_owned());
            }
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

    /// [`Log::redact`] for text that was cut off at its beginning or end, where a part of a
    /// secret may stand.
    pub(crate) fn redact_cut(&self, text: &str) -> String {
        let mut text = self.redact(text).into_owned();
        for secret in self.0.secrets.lock().unwrap_or_else(PoisonError::into_inner).iter() {
            let inside: Vec<usize> = secret.char_indices().map(|(at, _)| at).skip(1).collect();
            let long = |at: &&usize| **at >= SECRET_PART;
            if let Some(at) = inside.iter().rev().filter(long).find(|at| text.ends_with(&secret[..**at])) {
                text.truncate(text.len() - at);
                text.push_str("***");
            }
            let long = |at: &&usize| secret.len() - **at >= SECRET_PART;
            if let Some(at) = inside.iter().filter(long).find(|at| text.starts_with(&secret[**at..])) {
                text.replace_range(..secret.len() - at, "***");
            }
        }
        text
    }

    /// One line of the plugin's; `stream` says by which way it came. A level that nobody
    /// looks at costs nothing, and leaves the rate to the others.
    pub(crate) fn line(&self, level: Level, stream: &'static str, message: &str, fields: &str) {
        if !enabled(level) {
            return;
        }
        let Inner { destination, plugin, lane, line_bytes, lines, .. } = &*self.0;
        let bytes = message.len().min(*line_bytes) + fields.len();
        let Some(left_out) = lines.lock().unwrap_or_else(PoisonError::into_inner).take(bytes, Instant::now()) else {
            self.0.usage.line_left_out();
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

    /// The audit line of something that was not permitted. All are counted; of the lines,
    /// more than a few each second are left out, and the next says how many.
    pub(crate) fn refusal(&self, what: &'static str, name: &str, reason: &str) {
        let Inner { destination, plugin, lane, audit, usage, .. } = &*self.0;
        usage.refused();
        match audit.lock().unwrap_or_else(PoisonError::into_inner).take(0, Instant::now()) {
            None => {}
            Some(0) => tracing::warn!(target: AUDIT, %destination, %plugin, lane, what, name, reason, "refused"),
            Some(left_out) => {
                tracing::warn!(target: AUDIT, %destination, %plugin, lane, what, name, reason, left_out, "refused");
            }
        }
    }
}

/// The target of audit lines.
const AUDIT: &str = "tidegate::audit";

#[cfg(test)]
mod tests {
    use super::*;

    fn log(limits: &Limits) -> Log {
        Log::new("d".into(), "p".into(), 0, limits, Arc::default())
    }

    #[test]
    fn a_secret_that_was_shown_is_not_repeated() {
        let log = log(&Limits::default());
        assert_eq!(log.redact("password hunter2"), "password hunter2");
        log.conceal("hunter2");
        assert_eq!(log.redact("password hunter2, hunter2"), "password ***, ***");
    }

    #[test]
    fn a_secret_of_several_lines_is_not_repeated_line_by_line_either() {
        let log = log(&Limits::default());
        log.conceal("-----BEGIN KEY-----\nMIIEvQIBADANBg\nkqhkiG9w0B\n-----END KEY-----\n");
        assert_eq!(log.redact("MIIEvQIBADANBg and kqhkiG9w0B"), "*** and ***");
    }

    #[test]
    fn a_secret_that_was_cut_off_is_not_repeated_in_part() {
        let log = log(&Limits::default());
        log.conceal("hunter2hunter3");
        assert_eq!(log.redact_cut("it is hunter2hunt"), "it is ***");
        assert_eq!(log.redact_cut("er2hunter3 it was"), "*** it was");
        assert_eq!(log.redact_cut("a hunt"), "a ***");
        assert_eq!(log.redact_cut("nothing of it"), "nothing of it");
    }

    #[test]
    fn a_loop_that_logs_is_cut_to_its_rate_and_the_rest_is_counted() {
        let start = Instant::now();
        let mut rate = Rate::new(10, u32::MAX, start);
        let passed = (0..1000).filter(|_| rate.take(1, start).is_some()).count();
        assert_eq!(passed, 10);
        assert_eq!(rate.take(1, start + Duration::from_millis(150)), Some(0), "it is too early to tell");
        assert_eq!(rate.take(1, start + Duration::from_millis(150)), None);
        let later = start + Duration::from_millis(1050);
        assert_eq!(rate.take(1, later), Some(991));
        assert_eq!((0..1000).filter_map(|_| rate.take(1, later)).sum::<u64>(), 0, "once a second is enough");
    }

    #[test]
    fn long_lines_are_cut_to_a_rate_of_bytes() {
        let start = Instant::now();
        let mut rate = Rate::new(1000, 10_000, start);
        assert_eq!((0..100).filter(|_| rate.take(3000, start).is_some()).count(), 3);
        assert!(rate.take(900, start).is_some(), "a short one still fits");
        assert!(rate.take(1 << 20, start + Duration::from_secs(1)).is_some(), "a second's worth at most counts");
    }

    #[test]
    fn lines_that_nobody_looks_at_do_not_use_up_the_rate() {
        // No subscriber: no level is on.
        let log = log(&Limits { log_lines: 1, ..Limits::default() });
        for _ in 0..100 {
            log.line(Level::Debug, "log", "a detail", "");
        }
        assert_eq!(log.0.lines.lock().unwrap().take(1, Instant::now()), Some(0));
    }

    #[test]
    fn a_plugin_that_logs_a_lot_cannot_hide_what_it_was_refused() {
        let log = log(&Limits { log_lines: 1, audit_lines: 2, ..Limits::default() });
        log.0.lines.lock().unwrap().take(1, Instant::now());
        assert_eq!(log.0.lines.lock().unwrap().take(1, Instant::now()), None);
        for _ in 0..5 {
            log.refusal("network", "db:1", "it is not granted");
        }
        assert_eq!(log.0.audit.lock().unwrap().left_out, 3, "two were written");
        assert_eq!(log.0.usage.snapshot().refused_permissions, 5);
    }
}
