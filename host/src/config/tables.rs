//! Which tables a destination takes, and where they go there.

use crate::schema::table::TableName;

/// `schema.table`, where `*` stands for any characters. A part in double quotes is
/// taken literally, dots and stars included.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TablePattern {
    schema: Part,
    name: Part,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Part {
    Literal(String),
    /// What stands between the stars.
    Pieces(Vec<String>),
}

impl TablePattern {
    /// Reads `schema.table`.
    ///
    /// # Errors
    /// A sentence that says what is wrong with the text.
    pub fn parse(text: &str) -> Result<TablePattern, String> {
        let (schema, rest) = Part::parse(text)?;
        let Some(rest) = rest.strip_prefix('.') else {
            return Err(format!("`{text}` lacks a schema: write it as schema.table, e.g. public.{text}"));
        };
        let (name, rest) = Part::parse(rest)?;
        if rest.is_empty() {
            Ok(TablePattern { schema, name })
        } else {
            Err(format!("`{text}` has more than two parts: put names that hold a dot in double quotes"))
        }
    }

    /// Whether the table's name fits.
    pub fn matches(&self, table: &TableName) -> bool {
        self.schema.matches(&table.schema) && self.name.matches(&table.name)
    }

    /// Whether one table at most can fit.
    pub fn is_exact(&self) -> bool {
        self.schema.is_exact() && self.name.is_exact()
    }
}

impl Part {
    /// One part and what follows it.
    fn parse(text: &str) -> Result<(Part, &str), String> {
        if let Some(mut rest) = text.strip_prefix('"') {
            let mut literal = String::new();
            loop {
                let (before, after) =
                    rest.split_once('"').ok_or_else(|| format!("a double quote is never closed in `{text}`"))?;
                literal.push_str(before);
                match after.strip_prefix('"') {
                    Some(after) => {
                        literal.push('"');
                        rest = after;
                    }
                    None => return Ok((Part::Literal(literal), after)),
                }
            }
        }
        let end = text.find('.').unwrap_or(text.len());
        let (part, rest) = text.split_at(end);
        if part.is_empty() {
            return Err(format!("`{text}` has an empty part: write schema.table"));
        }
        Ok(match part.contains('*') {
            true => (Part::Pieces(part.split('*').map(str::to_owned).collect()), rest),
            false => (Part::Literal(part.to_owned()), rest),
        })
    }

    fn is_exact(&self) -> bool {
        matches!(self, Part::Literal(_))
    }

    fn matches(&self, name: &str) -> bool {
        let pieces = match self {
            Part::Literal(literal) => return literal == name,
            Part::Pieces(pieces) => pieces,
        };
        let (Some(first), Some(last)) = (pieces.first(), pieces.last()) else { return false };
        let Some(mut rest) = name.strip_prefix(first.as_str()) else { return false };
        // Leftmost matches leave the most for what follows, so no way back is needed.
        for piece in &pieces[1..pieces.len() - 1] {
            match rest.find(piece.as_str()) {
                Some(at) => rest = &rest[at + piece.len()..],
                None => return false,
            }
        }
        rest.ends_with(last.as_str())
    }
}

/// Which published tables a destination takes.
///
/// A table is taken if a pattern fits and none with `!` before it does: exclusions
/// win, whatever their order. Without a pattern that includes, all are included.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TableFilter {
    include: Vec<TablePattern>,
    exclude: Vec<TablePattern>,
}

impl TableFilter {
    /// Reads patterns such as `public.*` and `!public.audit`.
    ///
    /// # Errors
    /// A sentence that names the pattern and what is wrong with it.
    pub fn parse<T: AsRef<str>>(patterns: &[T]) -> Result<TableFilter, String> {
        let mut filter = TableFilter::default();
        for pattern in patterns {
            let pattern = pattern.as_ref();
            match pattern.strip_prefix('!') {
                Some(pattern) => filter.exclude.push(TablePattern::parse(pattern)?),
                None => filter.include.push(TablePattern::parse(pattern)?),
            }
        }
        Ok(filter)
    }

    /// Whether the destination takes this table.
    pub fn matches(&self, table: &TableName) -> bool {
        let included = self.include.is_empty() || self.include.iter().any(|pattern| pattern.matches(table));
        included && !self.exclude.iter().any(|pattern| pattern.matches(table))
    }
}

/// A `[[destination.table]]`: what holds for the tables that fit its pattern.
#[derive(Clone, Debug, PartialEq)]
pub struct TableRule {
    /// Which tables.
    pub pattern: TablePattern,
    /// Settings in the plugin's own schema for tables: an object.
    pub settings: serde_json::Map<String, serde_json::Value>,
    /// The schema at the destination, instead of the source's.
    pub target_schema: Option<String>,
    /// The name at the destination, instead of the source's. Only with a pattern
    /// that fits one table.
    pub target_table: Option<String>,
}

/// The name at the destination: each part as the last rule that fits and says
/// something about it says.
pub(super) fn target(rules: &[TableRule], source: &TableName) -> TableName {
    let mut target = source.clone();
    for rule in rules.iter().filter(|rule| rule.pattern.matches(source)) {
        if let Some(schema) = &rule.target_schema {
            target.schema.clone_from(schema);
        }
        if let Some(name) = &rule.target_table {
            target.name.clone_from(name);
        }
    }
    target
}

/// The settings of a table as JSON: those of all rules that fit, a later rule's keys
/// over an earlier one's.
pub(super) fn settings(rules: &[TableRule], source: &TableName) -> String {
    let mut settings = serde_json::Map::new();
    for rule in rules.iter().filter(|rule| rule.pattern.matches(source)) {
        settings.extend(rule.settings.clone());
    }
    serde_json::Value::Object(settings).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(schema: &str, name: &str) -> TableName {
        TableName::new(schema, name)
    }

    #[test]
    fn exclusions_win_whatever_their_order() {
        for patterns in [["public.*", "!public.audit"], ["!public.audit", "public.*"]] {
            let filter = TableFilter::parse(&patterns).unwrap();
            assert!(filter.matches(&table("public", "orders")));
            assert!(!filter.matches(&table("public", "audit")));
            assert!(!filter.matches(&table("private", "orders")));
        }
    }

    #[test]
    fn without_a_pattern_that_includes_all_tables_are_included() {
        assert!(TableFilter::default().matches(&table("a", "b")));
        let filter = TableFilter::parse(&["!a.*"]).unwrap();
        assert!(!filter.matches(&table("a", "b")));
        assert!(filter.matches(&table("b", "b")));
    }

    #[test]
    fn stars_stand_for_any_characters_within_one_part() {
        let pattern = TablePattern::parse("shop_*.ord*s_*").unwrap();
        assert!(pattern.matches(&table("shop_1", "orders_2026")));
        assert!(pattern.matches(&table("shop_", "ords_")));
        assert!(!pattern.matches(&table("shop", "orders_2026")));
        assert!(!pattern.matches(&table("shop_1", "order_2026")));
        let overlapping = TablePattern::parse("a.aba*ba").unwrap();
        assert!(!overlapping.matches(&table("a", "aba")));
        assert!(overlapping.matches(&table("a", "ababa")));
    }

    #[test]
    fn a_quoted_part_is_literal_dots_stars_and_quotes_included() {
        let pattern = TablePattern::parse(r#""odd.schema"."a*""b""#).unwrap();
        assert!(pattern.matches(&table("odd.schema", "a*\"b")));
        assert!(!pattern.matches(&table("odd.schema", "axx\"b")));
        assert!(pattern.is_exact());
    }

    #[test]
    fn patterns_that_are_not_schema_and_table_are_refused() {
        for wrong in ["orders", "", ".", "a.", "a.b.c", "\"a.b", "!a.b"] {
            let parsed = TablePattern::parse(wrong);
            // `!` belongs to the filter; within a pattern it is a letter of the name.
            assert_eq!(parsed.is_err(), wrong != "!a.b", "{wrong}");
        }
    }

    #[test]
    fn later_rules_override_earlier_ones_key_by_key() {
        let rule = |pattern: &str, settings: serde_json::Value, schema: Option<&str>| TableRule {
            pattern: TablePattern::parse(pattern).unwrap(),
            settings: settings.as_object().unwrap().clone(),
            target_schema: schema.map(str::to_owned),
            target_table: None,
        };
        let rules = [
            rule("public.*", serde_json::json!({"a": 1, "b": 1}), Some("mirror")),
            rule("public.orders", serde_json::json!({"b": 2}), None),
            rule("other.*", serde_json::json!({"c": 3}), Some("other")),
        ];
        let orders = table("public", "orders");
        assert_eq!(target(&rules, &orders), table("mirror", "orders"));
        assert_eq!(settings(&rules, &orders), r#"{"a":1,"b":2}"#);
        assert_eq!(settings(&rules, &table("x", "y")), "{}");
    }
}
