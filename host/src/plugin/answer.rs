//! What a guest returns, made presentable: texts bounded, without control characters
//! and without the secrets it was shown.

use super::bindings::wire::{Ack, Failure, Manifest, Notice, PhysicalTable, Position, Ready, Refusal};
use super::limits::Limits;
use super::log::Log;
use super::text::clean_in_place;

/// Bytes of a code: it is a key in the store and a label of metrics.
const CODE_BYTES: usize = 128;

/// An answer of the guest.
pub(crate) trait Answer {
    fn make_presentable(&mut self, limits: &Limits, log: &Log);
}

fn text(text: &mut String, max: usize, log: &Log) {
    if let std::borrow::Cow::Owned(redacted) = log.redact(text) {
        *text = redacted;
    }
    clean_in_place(text, max);
}

fn details(details: &mut Vec<(String, String)>, limits: &Limits, log: &Log) {
    details.truncate(limits.answer_items);
    for (name, value) in details {
        clean_in_place(name, CODE_BYTES);
        text(value, limits.message_bytes, log);
    }
}

impl<T: Answer> Answer for Result<T, Failure> {
    fn make_presentable(&mut self, limits: &Limits, log: &Log) {
        match self {
            Ok(answer) => answer.make_presentable(limits, log),
            Err(failure) => failure.make_presentable(limits, log),
        }
    }
}

impl<T: Answer> Answer for Option<T> {
    fn make_presentable(&mut self, limits: &Limits, log: &Log) {
        if let Some(answer) = self {
            answer.make_presentable(limits, log);
        }
    }
}

impl Answer for () {
    fn make_presentable(&mut self, _: &Limits, _: &Log) {}
}

impl Answer for Vec<Option<Position>> {
    fn make_presentable(&mut self, _: &Limits, _: &Log) {}
}

impl Answer for Failure {
    fn make_presentable(&mut self, limits: &Limits, log: &Log) {
        clean_in_place(&mut self.code, CODE_BYTES);
        if self.code.is_empty() {
            self.code.push_str("plugin.failure");
        }
        text(&mut self.message, limits.message_bytes, log);
        self.rows.make_presentable(limits, log);
    }
}

/// As many as there are rows: none is left out, for each one decides about a row.
impl Answer for Vec<Refusal> {
    fn make_presentable(&mut self, limits: &Limits, log: &Log) {
        for refusal in self {
            clean_in_place(&mut refusal.code, CODE_BYTES);
            text(&mut refusal.message, limits.message_bytes, log);
        }
    }
}

impl Answer for Ack {
    fn make_presentable(&mut self, limits: &Limits, log: &Log) {
        self.refused.make_presentable(limits, log);
    }
}

impl Answer for Vec<Notice> {
    fn make_presentable(&mut self, limits: &Limits, log: &Log) {
        self.truncate(limits.answer_items);
        for notice in self {
            clean_in_place(&mut notice.level, CODE_BYTES);
            clean_in_place(&mut notice.code, CODE_BYTES);
            text(&mut notice.message, limits.message_bytes, log);
        }
    }
}

impl Answer for Ready {
    fn make_presentable(&mut self, limits: &Limits, log: &Log) {
        self.limits.truncate(limits.answer_items);
        for (name, _) in &mut self.limits {
            clean_in_place(name, CODE_BYTES);
        }
        details(&mut self.details, limits, log);
    }
}

/// Names are compared with names of the same table, so they stay as they are; who prints
/// them quotes them.
impl Answer for PhysicalTable {
    fn make_presentable(&mut self, limits: &Limits, log: &Log) {
        self.columns.truncate(limits.answer_items);
        for column in &mut self.columns {
            details(&mut column.details, limits, log);
        }
    }
}

impl Answer for Manifest {
    fn make_presentable(&mut self, limits: &Limits, log: &Log) {
        clean_in_place(&mut self.name, CODE_BYTES);
        clean_in_place(&mut self.version, CODE_BYTES);
        text(&mut self.description, limits.message_bytes, log);
        self.capabilities.truncate(limits.answer_items);
        self.permissions.truncate(limits.answer_items);
        for word in self.capabilities.iter_mut().chain(&mut self.permissions) {
            clean_in_place(word, CODE_BYTES);
        }
        details(&mut self.details, limits, log);
    }
}
