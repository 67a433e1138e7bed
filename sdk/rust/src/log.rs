//! Log lines, which the host gives the destination's name.
//!
//! The macros [`debug!`](crate::debug!), [`info!`](crate::info!), [`warn!`](crate::warn!) and [`error!`](crate::error!) format
//! like `println!`; the functions take named fields beside the message.

use std::fmt::Display;

/// How loud a line is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    /// For following single calls.
    Trace,
    /// For finding out why.
    Debug,
    /// What an operator may want to read.
    Info,
    /// Something is wrong and was coped with.
    Warn,
    /// Something is wrong.
    Error,
}

/// Named values beside a message.
pub type Fields<'a> = &'a [(&'a str, &'a dyn Display)];

/// Writes one line.
pub fn emit(level: Level, message: &str, fields: Fields<'_>) {
    let fields: Vec<(String, String)> =
        fields.iter().map(|(name, value)| ((*name).to_owned(), value.to_string())).collect();
    send(level, message, &fields);
}

/// Writes one line at [`Level::Debug`].
pub fn debug(message: &str, fields: Fields<'_>) {
    emit(Level::Debug, message, fields);
}

/// Writes one line at [`Level::Info`].
pub fn info(message: &str, fields: Fields<'_>) {
    emit(Level::Info, message, fields);
}

/// Writes one line at [`Level::Warn`].
pub fn warn(message: &str, fields: Fields<'_>) {
    emit(Level::Warn, message, fields);
}

/// Writes one line at [`Level::Error`].
pub fn error(message: &str, fields: Fields<'_>) {
    emit(Level::Error, message, fields);
}

#[cfg(target_family = "wasm")]
fn send(level: Level, message: &str, fields: &[(String, String)]) {
    use crate::bindings::tidegate::destination::host::{self, Level as Wire};
    let level = match level {
        Level::Trace => Wire::Trace,
        Level::Debug => Wire::Debug,
        Level::Info => Wire::Info,
        Level::Warn => Wire::Warn,
        Level::Error => Wire::Error,
    };
    host::emit(level, message, fields);
}

#[cfg(not(target_family = "wasm"))]
fn send(level: Level, message: &str, fields: &[(String, String)]) {
    eprintln!("{level:?} {message} {fields:?}");
}

/// Formats a line at level debug.
#[macro_export]
macro_rules! debug {
    ($($format:tt)+) => { $crate::log::debug(&::std::format!($($format)+), &[]) };
}

/// Formats a line at level info.
#[macro_export]
macro_rules! info {
    ($($format:tt)+) => { $crate::log::info(&::std::format!($($format)+), &[]) };
}

/// Formats a line at level warn.
#[macro_export]
macro_rules! warn {
    ($($format:tt)+) => { $crate::log::warn(&::std::format!($($format)+), &[]) };
}

/// Formats a line at level error.
#[macro_export]
macro_rules! error {
    ($($format:tt)+) => { $crate::log::error(&::std::format!($($format)+), &[]) };
}
