//! One table of the configuration file, read key by key with its place at hand.

use std::path::Path;

use toml::{Table, Value};

use super::environment;
use crate::error::{Error, Result};

/// How alike an unknown key must be to a known one to be named as what was meant
/// (Jaro-Winkler similarity, 0 to 1). Below it a guess confuses more than it helps.
const ALIKE: f64 = 0.75;

/// A table of the file: what it is called there, and what may stand in it.
pub(super) struct Section<'a> {
    file: &'a Path,
    /// As the reader would find it: `[source]`, `[[destination]] "warehouse"`.
    place: String,
    table: &'a Table,
    known: &'a [&'a str],
}

impl<'a> Section<'a> {
    /// Refuses a table with a key that is not among `known`.
    pub(super) fn new(
        file: &'a Path,
        place: impl Into<String>,
        table: &'a Table,
        known: &'a [&'a str],
    ) -> Result<Section<'a>> {
        let section = Section { file, place: place.into(), table, known };
        match table.keys().find(|key| !known.contains(&key.as_str())) {
            Some(key) => Err(section.unknown_key(key)),
            None => Ok(section),
        }
    }

    fn unknown_key(&self, key: &str) -> Error {
        let message = format!("{}: {} has no key `{key}`", self.file.display(), self.place);
        let nearest = self
            .known
            .iter()
            .map(|known| (strsim::jaro_winkler(key, known), known))
            .max_by(|a, b| a.0.total_cmp(&b.0))
            .filter(|(alike, _)| *alike >= ALIKE);
        Error::usage("config.unknown-key", message).next(match nearest {
            Some((_, known)) => format!("Write `{known}`, or remove it. Known keys: {}.", self.known.join(", ")),
            None => format!("Remove it. Known keys: {}.", self.known.join(", ")),
        })
    }

    /// The file and the place in it, for messages.
    pub(super) fn place(&self) -> String {
        format!("{}: {}", self.file.display(), self.place)
    }

    /// An error about a value of this table.
    pub(super) fn invalid(&self, key: &str, why: impl std::fmt::Display) -> Error {
        Error::usage("config.invalid-value", format!("{}: `{key}` {why}", self.place()))
    }

    fn wrong_type(&self, key: &str, wanted: &str, value: &Value) -> Error {
        Error::usage(
            "config.wrong-type",
            format!("{}: `{key}` is {}, where {wanted} belongs", self.place(), article(value)),
        )
        .next(format!("Write {wanted}."))
    }

    /// The value as it stands, nothing filled in.
    pub(super) fn raw(&self, key: &str) -> Option<&'a Value> {
        self.table.get(key)
    }

    /// A string as it stands in the file, without filling in from the environment.
    pub(super) fn raw_text(&self, key: &str) -> Result<Option<&'a str>> {
        match self.table.get(key) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(self.wrong_type(key, "a string", other)),
        }
    }

    /// A string, `${NAME}` filled in.
    pub(super) fn text(&self, key: &str) -> Result<Option<String>> {
        self.raw_text(key)?.map(|text| self.fill(key, text)).transpose()
    }

    /// A string that has to be there.
    pub(super) fn required_text(&self, key: &str, example: &str) -> Result<String> {
        match self.text(key)? {
            Some(text) if !text.is_empty() => Ok(text),
            Some(_) => Err(self.invalid(key, "is empty").next(format!("Write one, e.g. {key} = {example}."))),
            None => Err(Error::usage("config.missing-key", format!("{} lacks `{key}`", self.place()))
                .next(format!("Add it, e.g. {key} = {example}."))),
        }
    }

    /// A whole number that is not negative.
    pub(super) fn number(&self, key: &str) -> Result<Option<u64>> {
        match self.table.get(key) {
            None => Ok(None),
            Some(Value::Integer(number)) => match u64::try_from(*number) {
                Ok(number) => Ok(Some(number)),
                Err(_) => Err(self
                    .invalid(key, format_args!("is {number}, but cannot be negative"))
                    .next("Write a whole number, 0 or more.")),
            },
            Some(other) => Err(self.wrong_type(key, "a whole number", other)),
        }
    }

    /// True or false.
    pub(super) fn flag(&self, key: &str) -> Result<Option<bool>> {
        match self.table.get(key) {
            None => Ok(None),
            Some(Value::Boolean(flag)) => Ok(Some(*flag)),
            Some(other) => Err(self.wrong_type(key, "true or false", other)),
        }
    }

    /// A list of strings, `${NAME}` filled in.
    pub(super) fn texts(&self, key: &str) -> Result<Option<Vec<String>>> {
        let Some(items) = self.list(key, "a list of strings")? else { return Ok(None) };
        items
            .iter()
            .map(|item| match item {
                Value::String(text) => self.fill(key, text),
                other => Err(self.wrong_type(key, "a list of strings", other)),
            })
            .collect::<Result<_>>()
            .map(Some)
    }

    /// A list of anything.
    pub(super) fn list(&self, key: &str, wanted: &str) -> Result<Option<&'a [Value]>> {
        match self.table.get(key) {
            None => Ok(None),
            Some(Value::Array(items)) => Ok(Some(items)),
            Some(other) => Err(self.wrong_type(key, wanted, other)),
        }
    }

    /// A list of tables: `[[…]]`.
    pub(super) fn tables(&self, key: &str) -> Result<Vec<&'a Table>> {
        let wanted = "a list of tables";
        self.list(key, wanted)?
            .unwrap_or_default()
            .iter()
            .map(|item| match item {
                Value::Table(table) => Ok(table),
                other => Err(self.wrong_type(key, wanted, other)),
            })
            .collect()
    }

    /// A table within this one; empty if it is left out.
    pub(super) fn table(&self, key: &str) -> Result<Option<&'a Table>> {
        match self.table.get(key) {
            None => Ok(None),
            Some(Value::Table(table)) => Ok(Some(table)),
            Some(other) => Err(self.wrong_type(key, "a table", other)),
        }
    }

    /// A table as JSON, `${NAME}` filled in wherever a string is.
    pub(super) fn json(&self, key: &str) -> Result<serde_json::Value> {
        match self.table(key)? {
            Some(table) => self.object_of(key, table),
            None => Ok(serde_json::Value::Object(serde_json::Map::new())),
        }
    }

    /// A value as JSON, `${NAME}` filled in wherever a string is.
    pub(super) fn json_of(&self, key: &str, value: &Value) -> Result<serde_json::Value> {
        Ok(match value {
            Value::String(text) => self.fill(key, text)?.into(),
            Value::Integer(number) => (*number).into(),
            Value::Boolean(value) => (*value).into(),
            Value::Datetime(moment) => moment.to_string().into(),
            Value::Float(number) => serde_json::Number::from_f64(*number)
                .ok_or_else(|| {
                    self.invalid(key, format_args!("holds {number}, which JSON cannot say"))
                        .next("Write a finite number, or a string.")
                })?
                .into(),
            Value::Array(items) => {
                let items: Result<Vec<_>> = items.iter().map(|item| self.json_of(key, item)).collect();
                items?.into()
            }
            Value::Table(table) => self.object_of(key, table)?,
        })
    }

    fn object_of(&self, key: &str, table: &Table) -> Result<serde_json::Value> {
        let mut object = serde_json::Map::with_capacity(table.len());
        for (name, value) in table {
            object.insert(name.clone(), self.json_of(&format!("{key}.{name}"), value)?);
        }
        Ok(object.into())
    }

    fn fill(&self, key: &str, text: &str) -> Result<String> {
        environment::fill(text, &environment::variable)
            .map_err(|error| error.context(format_args!("{}: `{key}`", self.place())))
    }
}

/// A value's kind, as a sentence names it.
fn article(value: &Value) -> &'static str {
    match value {
        Value::String(_) => "a string",
        Value::Integer(_) => "a whole number",
        Value::Float(_) => "a number",
        Value::Boolean(_) => "true or false",
        Value::Datetime(_) => "a date",
        Value::Array(_) => "a list",
        Value::Table(_) => "a table",
    }
}
