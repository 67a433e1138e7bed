//! Settings: JSON in, a type of the plugin's out, and the JSON Schema between them.

use schemars::JsonSchema;
use serde::Deserialize;
use serde::de::DeserializeOwned;

use crate::model::{Failure, Table};

/// Settings of a table, or of a destination, that has none.
#[derive(Clone, Copy, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct NoSettings {}

/// The JSON Schema of a type. Unknown keys on the top level are refused even where
/// the type does not say `deny_unknown_fields`.
pub(crate) fn schema<T: JsonSchema>() -> String {
    let mut schema = schemars::schema_for!(T);
    // Next to these keywords, the properties of one part are not all there are.
    let composed = ["allOf", "anyOf", "oneOf", "$ref"].into_iter().any(|keyword| schema.get(keyword).is_some());
    if !composed && schema.get("additionalProperties").is_none() {
        schema.insert("additionalProperties".to_owned(), false.into());
    }
    schema.as_value().to_string()
}

/// Parses settings; an error names the path it is at.
pub fn parse<T: DeserializeOwned>(json: &str) -> Result<T, String> {
    let deserializer = &mut serde_json::Deserializer::from_str(json);
    let parsed = serde_path_to_error::deserialize(&mut *deserializer).map_err(|error| {
        match error.path().to_string().as_str() {
            "." => error.inner().to_string(),
            path => format!("`{path}`: {}", error.inner()),
        }
    })?;
    deserializer.end().map_err(|error| error.to_string())?;
    Ok(parsed)
}

impl Table {
    /// The table's settings.
    pub fn settings_as<T: DeserializeOwned>(&self) -> Result<T, Failure> {
        let json = if self.settings.is_empty() { "{}" } else { &self.settings };
        parse(json).map_err(|error| {
            let message = format!("the settings of table {}: {error}", self.source);
            Failure::permanent("sdk.table-settings", message).of_table(self.id)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, Deserialize, JsonSchema)]
    struct Outer {
        inner: Inner,
    }

    #[derive(Debug, Deserialize, JsonSchema)]
    #[serde(deny_unknown_fields)]
    struct Inner {
        size: u32,
    }

    #[test]
    fn an_error_names_its_path() {
        let error = parse::<Outer>(r#"{"inner": {"size": "big"}}"#).unwrap_err();
        assert!(error.starts_with("`inner.size`: invalid type"), "{error}");
        let error = parse::<Outer>(r#"{"inner": {"size": 1, "sise": 2}}"#).unwrap_err();
        assert!(error.contains("`inner.sise`") && error.contains("unknown field"), "{error}");
        assert_eq!(parse::<Outer>(r#"{"inner": {"size": 1}}"#).unwrap().inner.size, 1);
    }

    #[test]
    fn the_schema_refuses_unknown_keys() {
        let schema: serde_json::Value = serde_json::from_str(&schema::<Outer>()).unwrap();
        assert_eq!(schema["additionalProperties"], false);
        assert_eq!(schema["required"][0], "inner");
    }
}
