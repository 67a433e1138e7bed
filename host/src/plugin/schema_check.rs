//! Whether a JSON Schema that came from a plugin can be used at all.
//!
//! A schema is a program that the host runs: one that refers to itself never ends, one
//! that doubles at each of forty levels takes years, and one that is nested deeply enough
//! ends the process. Where that can be told beforehand, the schema is refused.

use std::collections::HashMap;

use serde_json::Value;

/// Schemas within schemas, references followed.
const MOST_DEPTH: usize = 64;
/// Schemas that are looked at for settings that have each part of the schema once.
const MOST_STEPS: u64 = 100_000;
/// What a schema may say that it is written in.
const DRAFTS: [&str; 3] = ["2020-12", "2019-09", "draft-07"];

/// Keywords whose schemas are about the very value that their own schema is about.
const SAME_VALUE: [&str; 4] = ["not", "if", "then", "else"];
const SAME_VALUE_LISTS: [&str; 3] = ["allOf", "anyOf", "oneOf"];
/// Keywords whose schemas are about parts of that value.
const PARTS: [&str; 7] = [
    "items",
    "additionalItems",
    "contains",
    "additionalProperties",
    "propertyNames",
    "unevaluatedProperties",
    "unevaluatedItems",
];
const PART_MAPS: [&str; 2] = ["properties", "patternProperties"];

/// Looks at a schema.
///
/// # Errors
/// What is wrong with it.
pub(super) fn check(schema: &Value) -> Result<(), String> {
    let draft = schema.get("$schema").and_then(Value::as_str);
    if let Some(draft) = draft.filter(|draft| !DRAFTS.iter().any(|known| draft.contains(known))) {
        return Err(format!("it is written in {draft}, and {} are understood", DRAFTS.join(", ")));
    }
    let mut all = Vec::new();
    collect(schema, String::new(), &mut all)?;
    let mut walk = Walk { schema, ends: HashMap::new(), steps: HashMap::new() };
    for place in &all {
        walk.ends(place, 0)?;
    }
    match walk.steps("", &mut Vec::new())? {
        steps if steps > MOST_STEPS => Err(format!("it is looked at in more than {MOST_STEPS} steps")),
        _ => Ok(()),
    }
}

/// The places of all objects, which may be schemas; and what has no meaning here.
fn collect(value: &Value, place: String, all: &mut Vec<String>) -> Result<(), String> {
    match value {
        Value::Object(object) => {
            for keyword in ["$dynamicRef", "$recursiveRef"] {
                if object.get(keyword).is_some_and(Value::is_string) {
                    return Err(format!("{keyword} is not supported"));
                }
            }
            if !place.is_empty() && object.get("$id").is_some_and(Value::is_string) {
                return Err("a schema within it has an $id of its own, which is not supported".to_owned());
            }
            for (key, value) in object {
                collect(value, below(&place, key), all)?;
            }
            all.push(place);
        }
        Value::Array(items) => {
            for (index, item) in items.iter().enumerate() {
                collect(item, below(&place, &index.to_string()), all)?;
            }
        }
        _ => {}
    }
    Ok(())
}

fn below(place: &str, key: &str) -> String {
    format!("{place}/{}", key.replace('~', "~0").replace('/', "~1"))
}

struct Walk<'a> {
    schema: &'a Value,
    /// Of each place: none while it is being followed, then how deep it goes.
    ends: HashMap<String, Option<usize>>,
    steps: HashMap<String, u64>,
}

impl Walk<'_> {
    /// How deep the schemas about one value go. They have to end.
    fn ends(&mut self, place: &str, depth: usize) -> Result<usize, String> {
        match self.ends.get(place) {
            Some(Some(known)) => return Ok(*known),
            Some(None) => return Err(format!("the schema at #{place} refers to itself without end")),
            None if depth > MOST_DEPTH => return Err(format!("it is more than {MOST_DEPTH} schemas deep")),
            None => {}
        }
        self.ends.insert(place.to_owned(), None);
        let mut deepest = 0;
        for next in self.same_value(place)? {
            deepest = deepest.max(self.ends(&next, depth + 1)? + 1);
        }
        if depth + deepest > MOST_DEPTH {
            return Err(format!("it is more than {MOST_DEPTH} schemas deep"));
        }
        self.ends.insert(place.to_owned(), Some(deepest));
        Ok(deepest)
    }

    /// How many schemas are looked at from here on. One that comes again in a part of
    /// itself counts once: the settings end, and with them its turns.
    fn steps(&mut self, place: &str, above: &mut Vec<String>) -> Result<u64, String> {
        if let Some(known) = self.steps.get(place) {
            return Ok(*known);
        }
        if above.iter().any(|known| known == place) {
            return Ok(1);
        }
        if above.len() > MOST_DEPTH {
            return Err(format!("it is more than {MOST_DEPTH} schemas deep"));
        }
        above.push(place.to_owned());
        let mut steps = 1_u64;
        for next in self.same_value(place)?.into_iter().chain(self.parts(place)) {
            steps = steps.saturating_add(self.steps(&next, above)?);
        }
        above.pop();
        self.steps.insert(place.to_owned(), steps);
        Ok(steps)
    }

    fn same_value(&self, place: &str) -> Result<Vec<String>, String> {
        let Some(object) = self.schema.pointer(place).and_then(Value::as_object) else { return Ok(Vec::new()) };
        let mut places: Vec<String> =
            SAME_VALUE.iter().filter(|key| object.contains_key(**key)).map(|key| below(place, key)).collect();
        for key in SAME_VALUE_LISTS {
            let count = object.get(key).and_then(Value::as_array).map_or(0, Vec::len);
            places.extend((0..count).map(|index| below(&below(place, key), &index.to_string())));
        }
        for key in ["dependentSchemas", "dependencies"] {
            let names = object.get(key).and_then(Value::as_object).into_iter().flat_map(|map| map.keys());
            places.extend(names.map(|name| below(&below(place, key), name)));
        }
        if let Some(reference) = object.get("$ref").and_then(Value::as_str) {
            let target = reference.strip_prefix('#').filter(|to| to.is_empty() || to.starts_with('/'));
            match target.filter(|to| self.schema.pointer(to).is_some()) {
                Some(target) => places.push(target.to_owned()),
                None => return Err(format!("the reference {reference:?} leads to nothing within it")),
            }
        }
        Ok(places)
    }

    fn parts(&self, place: &str) -> Vec<String> {
        let Some(object) = self.schema.pointer(place).and_then(Value::as_object) else { return Vec::new() };
        let mut places: Vec<String> =
            PARTS.iter().filter(|key| object.contains_key(**key)).map(|key| below(place, key)).collect();
        for key in PART_MAPS {
            let names = object.get(key).and_then(Value::as_object).into_iter().flat_map(|map| map.keys());
            places.extend(names.map(|name| below(&below(place, key), name)));
        }
        for key in ["prefixItems", "items"] {
            let count = object.get(key).and_then(Value::as_array).map_or(0, Vec::len);
            places.extend((0..count).map(|index| below(&below(place, key), &index.to_string())));
        }
        places
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_schema_that_never_ends_is_refused() {
        for schema in [
            json!({"$ref": "#"}),
            json!({"allOf": [{"$ref": "#"}]}),
            json!({"properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {
                "a": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/b"}]}, "b": {"not": {"$ref": "#/$defs/a"}}}}),
            // Once through a part, and once without.
            json!({"properties": {"a": {"$ref": "#/$defs/b"}}, "allOf": [{"$ref": "#/$defs/b"}], "$defs": {"b": {"$ref": "#"}}}),
        ] {
            let why = check(&schema).unwrap_err();
            assert!(why.contains("without end"), "{schema}: {why}");
        }
        // A list of lists of lists ends with the settings.
        check(&json!({"type": "array", "items": {"$ref": "#"}})).unwrap();
    }

    #[test]
    fn a_schema_that_grows_without_bound_or_goes_too_deep_is_refused() {
        let mut definitions = serde_json::Map::new();
        for level in 0..40 {
            let next = json!({"$ref": format!("#/$defs/d{}", level + 1)});
            definitions.insert(format!("d{level}"), json!({"allOf": [next, next]}));
        }
        definitions.insert("d40".to_owned(), json!({"type": "object"}));
        let why = check(&json!({"$ref": "#/$defs/d0", "$defs": definitions})).unwrap_err();
        assert!(why.contains("deep") || why.contains("steps"), "{why}");

        let wide: Vec<Value> = (0..100).map(|_| json!({"$ref": "#/$defs/w"})).collect();
        let wider: Vec<Value> = (0..100).map(|_| json!({"$ref": "#/$defs/v"})).collect();
        let schema = json!({"allOf": wide, "$defs": {"w": {"allOf": wider}, "v": {"anyOf": wide_leaf()}}});
        assert!(check(&schema).unwrap_err().contains("steps"));

        let chain: serde_json::Map<String, Value> =
            (0..5000).map(|n| (format!("c{n}"), json!({"$ref": format!("#/$defs/c{}", n + 1)}))).collect();
        let mut schema = json!({"$ref": "#/$defs/c0", "$defs": chain});
        schema["$defs"]["c5000"] = json!({});
        assert!(check(&schema).unwrap_err().contains("deep"));
    }

    fn wide_leaf() -> Vec<Value> {
        (0..100).map(|_| json!({"type": "object"})).collect()
    }

    #[test]
    fn references_out_of_the_schema_and_other_languages_are_refused() {
        for schema in [
            json!({"$ref": "https://example.com/x.json"}),
            json!({"$ref": "#/$defs/none"}),
            json!({"$ref": "#anchor"}),
            json!({"$dynamicRef": "#x"}),
            json!({"properties": {"a": {"$id": "other", "type": "string"}}}),
            json!({"$schema": "http://json-schema.org/draft-04/schema#"}),
        ] {
            check(&schema).unwrap_err();
        }
    }
}
