//! Checks a destination's settings against the JSON Schema in its plugin's manifest.

use jsonschema::error::{TypeKind, ValidationErrorKind};
use jsonschema::{PatternOptions, ValidationError, Validator};
use serde_json::Value;

use super::schema_check;
use crate::error::{Error, Result};

/// Memory of one compiled pattern.
const PATTERN_BYTES: usize = 1 << 20;
/// Bytes of all that is wrong with some settings: parts of it are the schema's own words.
const PROBLEM_BYTES: usize = 4000;
/// Problems listed in one error; more would not be read.
const MOST_PROBLEMS: usize = 10;

/// A plugin's schema, ready to check settings.
pub struct SettingsSchema {
    validator: Validator,
    schema: Value,
}

impl SettingsSchema {
    /// `text` is a manifest's `settings-schema` or `table-settings-schema`; empty text
    /// allows no settings at all.
    ///
    /// # Errors
    /// `plugin.manifest` where it is not a JSON Schema, or points outside itself.
    pub fn new(plugin: &str, text: &str) -> Result<SettingsSchema> {
        let bad = |why: String| {
            Error::no(
                "plugin.manifest",
                format!("plugin {plugin}: the schema of its settings is not usable: {}", super::text::clean(&why, 500)),
            )
            .next("Report it to the plugin's author.")
        };
        let schema = if text.trim().is_empty() {
            serde_json::json!({ "type": "object", "additionalProperties": false })
        } else {
            serde_json::from_str(text).map_err(|e| bad(e.to_string()))?
        };
        schema_check::check(&schema).map_err(bad)?;
        // Without the crate's `resolve-*` features nothing is fetched or read for `$ref`.
        // Patterns that backtrack could take for ever; these never do.
        let validator = jsonschema::options()
            .should_validate_formats(true)
            .with_pattern_options(PatternOptions::regex().size_limit(PATTERN_BYTES))
            .build(&schema)
            .map_err(|e| bad(e.to_string()))?;
        Ok(SettingsSchema { validator, schema })
    }

    /// # Errors
    /// `plugin.settings`: who, which setting, what is expected. Values are not repeated:
    /// somebody may have put a secret where it does not belong.
    pub fn check(&self, who: &str, settings: &Value) -> Result<()> {
        let mut problems = Vec::new();
        for problem in self.validator.iter_errors(settings) {
            self.explain(&problem, &mut problems);
            if problems.len() >= MOST_PROBLEMS {
                break;
            }
        }
        if problems.is_empty() {
            return Ok(());
        }
        let problems = super::text::clean(&problems.join("; "), PROBLEM_BYTES);
        Err(Error::usage("plugin.settings", format!("{who}: {problems}"))
            .next("Correct the settings in the configuration; `tidegate plugin inspect` prints what the plugin takes."))
    }

    fn explain(&self, problem: &ValidationError<'_>, out: &mut Vec<String>) {
        let place = problem.instance_path().to_string();
        match problem.kind() {
            ValidationErrorKind::AdditionalProperties { unexpected }
            | ValidationErrorKind::UnevaluatedProperties { unexpected } => {
                let known = self.known_keys(&place);
                for key in unexpected {
                    let key = super::text::clean(key, 100);
                    let hint = match nearest(&key, &known) {
                        Some(near) => format!("; did you mean `{near}`?"),
                        None if known.is_empty() => "; there are no settings here".to_owned(),
                        None => format!("; there are {}", known.join(", ")),
                    };
                    out.push(format!("unknown setting `{}`{hint}", join(&place, &key)));
                }
            }
            ValidationErrorKind::Required { property } => {
                let key = property.as_str().unwrap_or_default();
                out.push(format!("the setting `{}` is missing", join(&place, key)));
            }
            ValidationErrorKind::Type { kind } => {
                let expected = match kind {
                    TypeKind::Single(one) => one.to_string(),
                    TypeKind::Multiple(many) => many.iter().map(|t| t.to_string()).collect::<Vec<_>>().join(" or "),
                };
                out.push(format!("`{}` must be {expected}, not {}", dotted(&place), type_of(problem.instance())));
            }
            ValidationErrorKind::Enum { options } => out.push(format!("`{}` must be one of {options}", dotted(&place))),
            ValidationErrorKind::Constant { expected_value } => {
                out.push(format!("`{}` must be {expected_value}", dotted(&place)))
            }
            _ => out.push(format!("`{}`: {}", dotted(&place), super::text::clean(&problem.masked().to_string(), 500))),
        }
    }

    /// Names of the properties that the schema knows at a place (a JSON pointer into the
    /// settings), as far as they can be told without evaluating it.
    fn known_keys(&self, place: &str) -> Vec<&str> {
        let mut at = &self.schema;
        for step in place.split('/').skip(1) {
            let below = self.resolve(at);
            let Some(next) = below
                .get("properties")
                .and_then(|p| p.get(step))
                .or_else(|| below.get("items"))
                .or_else(|| below.get("additionalProperties"))
            else {
                return Vec::new();
            };
            at = next;
        }
        let properties = self.resolve(at).get("properties").and_then(Value::as_object);
        properties.into_iter().flat_map(|p| p.keys()).map(String::as_str).collect()
    }

    /// Follows `$ref` within the document, and the one alternative that is an object.
    fn resolve<'a>(&'a self, mut at: &'a Value) -> &'a Value {
        for _ in 0..8 {
            let target = at.get("$ref").and_then(Value::as_str).and_then(|r| self.schema.pointer(r.strip_prefix('#')?));
            let alternative = || {
                ["anyOf", "oneOf", "allOf"].iter().find_map(|k| {
                    at.get(k)?.as_array()?.iter().find(|s| s.get("$ref").is_some() || s.get("properties").is_some())
                })
            };
            match target.or_else(alternative) {
                Some(next) if at.get("properties").is_none() => at = next,
                _ => break,
            }
        }
        at
    }
}

/// The known key that a wrong one was probably meant to be.
fn nearest<'a>(key: &str, known: &[&'a str]) -> Option<&'a str> {
    let near = known.iter().map(|k| (strsim::jaro_winkler(key, k), *k)).max_by(|a, b| a.0.total_cmp(&b.0))?;
    (near.0 > 0.8).then_some(near.1)
}

fn join(place: &str, key: &str) -> String {
    if place.is_empty() { key.to_owned() } else { format!("{}.{key}", dotted(place)) }
}

/// A JSON pointer the way the configuration is written.
fn dotted(place: &str) -> String {
    if place.is_empty() { "settings".to_owned() } else { place[1..].replace('/', ".") }
}

fn type_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn schema() -> SettingsSchema {
        let schema = json!({
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "type": "object",
            "properties": {
                "directory": {"type": "string"},
                "format": {"enum": ["parquet", "ndjson"]},
                "roll": {"$ref": "#/$defs/Roll"},
                "port": {"type": "integer", "minimum": 1, "maximum": 65535},
            },
            "required": ["directory"],
            "additionalProperties": false,
            "$defs": {"Roll": {"type": "object", "properties": {"bytes": {"type": "integer"}}, "additionalProperties": false}},
        });
        SettingsSchema::new("files", &schema.to_string()).unwrap()
    }

    #[test]
    fn a_wrong_setting_is_named_with_what_is_expected_and_the_nearest_known_key() {
        for (settings, expected) in [
            (json!({"directory": "x"}), None),
            (json!({}), Some("the setting `directory` is missing")),
            (json!({"directory": 3}), Some("`directory` must be string, not number")),
            (json!({"directory": "x", "fromat": "parquet"}), Some("unknown setting `fromat`; did you mean `format`?")),
            (
                json!({"directory": "x", "zzz": 1}),
                Some("unknown setting `zzz`; there are directory, format, port, roll"),
            ),
            (
                json!({"directory": "x", "roll": {"byte": 1}}),
                Some("unknown setting `roll.byte`; did you mean `bytes`?"),
            ),
            (json!({"directory": "x", "format": "csv"}), Some("`format` must be one of [\"parquet\",\"ndjson\"]")),
            (json!({"directory": "x", "port": 70_000}), Some("`port`: value is greater than the maximum of 65535")),
        ] {
            let answer = schema().check("destination lake", &settings);
            match expected {
                None => answer.unwrap(),
                Some(expected) => {
                    let error = answer.unwrap_err();
                    assert_eq!(error.code(), "plugin.settings");
                    assert_eq!(error.message(), format!("destination lake: {expected}"));
                }
            }
        }
    }

    #[test]
    fn a_value_that_may_be_a_secret_is_not_repeated() {
        let error = schema()
            .check("destination lake", &json!({"directory": "x", "port": "hunter2", "format": "hunter2"}))
            .unwrap_err();
        assert!(!error.report().contains("hunter2"), "{}", error.report());
    }

    #[test]
    fn a_schema_that_is_none_is_the_plugins_fault() {
        for text in [
            "{",
            "{\"type\": 7}",
            "{\"$ref\": \"https://example.com/other.json\"}",
            "{\"$ref\": \"#\"}",
            // Which the linear matcher does not have.
            r#"{"properties": {"a": {"pattern": "(a+)+\\1"}}}"#,
        ] {
            assert_eq!(SettingsSchema::new("files", text).err().unwrap().code(), "plugin.manifest", "{text}");
        }
        SettingsSchema::new("files", "").unwrap().check("destination lake", &json!({"a": 1})).unwrap_err();
    }
}
