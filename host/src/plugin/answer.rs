//! What a guest returns, made presentable: texts bounded, without control characters
//! and without the secrets it was shown. What is longer than anybody needs is no answer.

use std::time::Duration;

use super::bindings::wire::{Ack, Failure, Manifest, Notice, PhysicalTable, Position, Ready, Refusal};
use super::limits::Limits;
use super::log::Log;
use super::text::{clean_in_place, spell_out};

/// Bytes of a code: it is a key in the store and a label of metrics.
const CODE_BYTES: usize = 128;
/// Bytes of a name of a table, a column or a type at the destination.
const NAME_BYTES: usize = 1024;
/// Parts of a table's path at the destination.
const PATH_PARTS: usize = 16;
/// Bytes of a capability or a permission.
const WORD_BYTES: usize = 256;
/// Capabilities, and permissions, of a plugin: the contract knows some forty.
const WORDS: usize = 1000;
/// The soonest that `tick` is called again: a plugin that asks for it at once has a
/// processor to itself otherwise.
const SOONEST_TICK: Duration = Duration::from_millis(10);

/// What is wrong with an answer, as the end of a sentence about its function.
pub(crate) type Presentable = Result<(), String>;

/// An answer of the guest.
pub(crate) trait Answer {
    /// An error where the answer cannot be used at all.
    fn make_presentable(&mut self, limits: &Limits, log: &Log) -> Presentable;

    /// Whether it says that something went wrong.
    fn is_failure(&self) -> bool {
        false
    }
}

fn text(text: &mut String, max: usize, log: &Log) {
    if let std::borrow::Cow::Owned(redacted) = log.redact(text) {
        *text = redacted;
    }
    clean_in_place(text, max);
}

fn at_most<T>(list: &[T], most: usize, what: &str) -> Presentable {
    if list.len() > most {
        Err(format!("it answers with {} {what}, at most {most} may be", list.len()))
    } else {
        Ok(())
    }
}

fn short(text: &str, most: usize, what: &str) -> Presentable {
    if text.len() > most { Err(format!("{what} has {} bytes, at most {most} may be", text.len())) } else { Ok(()) }
}

fn details(details: &mut [(String, String)], limits: &Limits, log: &Log) -> Presentable {
    at_most(details, limits.answer_items, "details")?;
    for (name, value) in details {
        text(name, CODE_BYTES, log);
        text(value, limits.message_bytes, log);
    }
    Ok(())
}

impl<T: Answer> Answer for Result<T, Failure> {
    fn make_presentable(&mut self, limits: &Limits, log: &Log) -> Presentable {
        match self {
            Ok(answer) => answer.make_presentable(limits, log),
            Err(failure) => failure.make_presentable(limits, log),
        }
    }

    fn is_failure(&self) -> bool {
        self.is_err()
    }
}

impl<T: Answer> Answer for Option<T> {
    fn make_presentable(&mut self, limits: &Limits, log: &Log) -> Presentable {
        self.as_mut().map_or(Ok(()), |answer| answer.make_presentable(limits, log))
    }
}

impl Answer for () {
    fn make_presentable(&mut self, _: &Limits, _: &Log) -> Presentable {
        Ok(())
    }
}

impl Answer for Vec<Option<Position>> {
    fn make_presentable(&mut self, _: &Limits, _: &Log) -> Presentable {
        Ok(())
    }
}

impl Answer for Failure {
    fn make_presentable(&mut self, limits: &Limits, log: &Log) -> Presentable {
        text(&mut self.code, CODE_BYTES, log);
        if self.code.is_empty() {
            self.code.push_str("plugin.failure");
        }
        text(&mut self.message, limits.message_bytes, log);
        self.rows.make_presentable(limits, log)
    }
}

/// As many as there are rows: none is left out, for each one decides about a row.
impl Answer for Vec<Refusal> {
    fn make_presentable(&mut self, limits: &Limits, log: &Log) -> Presentable {
        for refusal in self {
            text(&mut refusal.code, CODE_BYTES, log);
            text(&mut refusal.message, limits.message_bytes, log);
        }
        Ok(())
    }
}

impl Answer for Ack {
    fn make_presentable(&mut self, limits: &Limits, log: &Log) -> Presentable {
        let soonest = u32::try_from(SOONEST_TICK.as_millis()).unwrap_or(u32::MAX);
        self.wake_after_ms = self.wake_after_ms.map(|ms| ms.max(soonest));
        self.refused.make_presentable(limits, log)
    }
}

impl Answer for Vec<Notice> {
    fn make_presentable(&mut self, limits: &Limits, log: &Log) -> Presentable {
        at_most(self, limits.answer_items, "notices")?;
        for notice in self {
            text(&mut notice.level, CODE_BYTES, log);
            text(&mut notice.code, CODE_BYTES, log);
            text(&mut notice.message, limits.message_bytes, log);
        }
        Ok(())
    }
}

impl Answer for Ready {
    fn make_presentable(&mut self, limits: &Limits, log: &Log) -> Presentable {
        at_most(&self.limits, limits.answer_items, "limits")?;
        for (name, _) in &mut self.limits {
            text(name, CODE_BYTES, log);
        }
        details(&mut self.details, limits, log)
    }
}

/// Names are compared with names of the same table, so nothing of them may be lost.
impl Answer for PhysicalTable {
    fn make_presentable(&mut self, limits: &Limits, log: &Log) -> Presentable {
        at_most(&self.path, PATH_PARTS, "parts of a table's path")?;
        at_most(&self.columns, limits.answer_columns, "columns")?;
        for part in &mut self.path {
            short(part, NAME_BYTES, "a part of a table's path")?;
            spell_out(part);
        }
        for column in &mut self.columns {
            short(&column.name, NAME_BYTES, "the name of a column")?;
            short(&column.type_name, NAME_BYTES, "the type of a column")?;
            spell_out(&mut column.name);
            spell_out(&mut column.type_name);
            details(&mut column.details, limits, log)?;
        }
        Ok(())
    }
}

impl Answer for Manifest {
    fn make_presentable(&mut self, limits: &Limits, log: &Log) -> Presentable {
        clean_in_place(&mut self.name, CODE_BYTES);
        clean_in_place(&mut self.version, CODE_BYTES);
        text(&mut self.description, limits.message_bytes, log);
        at_most(&self.capabilities, WORDS, "capabilities")?;
        at_most(&self.permissions, WORDS, "permissions")?;
        for word in self.capabilities.iter_mut().chain(&mut self.permissions) {
            short(word, WORD_BYTES, "a capability or permission")?;
            spell_out(word);
        }
        short(&self.settings_schema, limits.schema_bytes, "the schema of its settings")?;
        short(&self.table_settings_schema, limits.schema_bytes, "the schema of a table's settings")?;
        details(&mut self.details, limits, log)
    }
}
