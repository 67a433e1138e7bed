//! The one error of the host: who, what, where, and the next step.

use std::borrow::Cow;
use std::fmt;

/// Whether trying again can help.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// The same call may succeed later: retried with backoff.
    Transient,
    /// Nothing changes until somebody acts.
    Permanent,
}

/// Exit codes of the `tidegate` binary (design, section 7).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// Something failed while running.
    Failed = 1,
    /// Bad usage or configuration: nothing was started.
    Usage = 2,
    /// The answer is no: a check that does not pass, ends that differ.
    No = 3,
}

/// What went wrong, with a stable code and the step that leads out.
///
/// `Display` prints the message alone; [`Error::report`] prints all of it. No part
/// may hold a secret.
#[derive(Debug)]
pub struct Error(Box<Parts>);

#[derive(Debug)]
struct Parts {
    code: Cow<'static, str>,
    message: String,
    next: Option<String>,
    class: Class,
    exit: Exit,
}

/// The host's result.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    fn new(code: impl Into<Cow<'static, str>>, message: impl Into<String>, class: Class, exit: Exit) -> Error {
        Error(Box::new(Parts { code: code.into(), message: message.into(), next: None, class, exit }))
    }

    /// The configuration or the command line is wrong (exit code 2).
    pub fn usage(code: impl Into<Cow<'static, str>>, message: impl Into<String>) -> Error {
        Error::new(code, message, Class::Permanent, Exit::Usage)
    }

    /// The world does not meet what is needed: a check's "no" (exit code 3).
    pub fn no(code: impl Into<Cow<'static, str>>, message: impl Into<String>) -> Error {
        Error::new(code, message, Class::Permanent, Exit::No)
    }

    /// A failure that stays until somebody acts (exit code 1).
    pub fn permanent(code: impl Into<Cow<'static, str>>, message: impl Into<String>) -> Error {
        Error::new(code, message, Class::Permanent, Exit::Failed)
    }

    /// A failure that may pass by itself (exit code 1 if nobody retries).
    pub fn transient(code: impl Into<Cow<'static, str>>, message: impl Into<String>) -> Error {
        Error::new(code, message, Class::Transient, Exit::Failed)
    }

    /// Adds the next step, a sentence in the imperative.
    pub fn next(mut self, next: impl Into<String>) -> Error {
        self.0.next = Some(next.into());
        self
    }

    /// Puts `what` and a colon before the message: who met it, and where.
    pub fn context(mut self, what: impl fmt::Display) -> Error {
        self.0.message = format!("{what}: {}", self.0.message);
        self
    }

    /// The same error with another exit code.
    pub fn exit(mut self, exit: Exit) -> Error {
        self.0.exit = exit;
        self
    }

    /// Stable and machine-readable, e.g. `source.wal-level`; listed in
    /// `docs/error-codes.md`.
    pub fn code(&self) -> &str {
        &self.0.code
    }

    /// What happened, in one sentence.
    pub fn message(&self) -> &str {
        &self.0.message
    }

    /// What to do about it.
    pub fn next_step(&self) -> Option<&str> {
        self.0.next.as_deref()
    }

    /// Whether trying again can help.
    pub fn class(&self) -> Class {
        self.0.class
    }

    /// Whether the error may pass by itself.
    pub fn is_transient(&self) -> bool {
        self.0.class == Class::Transient
    }

    /// The code the process ends with when this error ends it.
    pub fn exit_code(&self) -> Exit {
        self.0.exit
    }

    /// `error[code]: message`, and `next: …` on a line of its own.
    pub fn report(&self) -> String {
        match &self.0.next {
            Some(next) => format!("error[{}]: {}\n  next: {next}", self.0.code, self.0.message),
            None => format!("error[{}]: {}", self.0.code, self.0.message),
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.message)
    }
}

impl std::error::Error for Error {}
