//! Which column defaults are certainly literals.
//!
//! `pg_get_expr` prints a default as PostgreSQL would read it again. Only what can mean
//! one value, under every setting and at every time, is taken; a text that PostgreSQL
//! would round, cut, or read by the clock is not, although it looks like a literal.

use super::calendar::{is_date, is_time, is_timestamp, is_timestamptz, precision};
use super::table::{Column, Literal};
use super::wire::modifiers;

/// Parentheses and casts around one value; PostgreSQL prints one or two.
const MAX_DEPTH: usize = 32;

/// Decimal digits that a `real` keeps whatever they are.
const FLT_DIG: usize = 6;
/// Decimal digits that a `double precision` keeps whatever they are.
const DBL_DIG: usize = 15;
/// Digits behind the point that a `numeric` may be declared with (NUMERIC_MAX_PRECISION).
const MAX_SCALE: usize = 1000;

/// The literal that a default expression stands for; none if it is not certainly one,
/// and for `NULL`, which is no default.
pub fn literal(expression: &str) -> Option<Literal> {
    whole(expression).map(Value::into_literal)
}

/// The literal that a column's default expression stands for in that column.
///
/// `pg_get_expr` leaves out the cast to the column's type: `42.105` in a `numeric(10,2)`
/// is 42.11, and `42` in a `text` is a string. Here it is made, or the default is
/// refused where it would change more than the kind.
pub fn column_literal(expression: &str, column: &Column) -> Option<Literal> {
    let value = whole(expression)?;
    let of = modifiers(column);
    let numbers = match (of.length, of.precision, of.scale) {
        (Some(length), ..) => format!("({length})"),
        (None, Some(precision), Some(scale)) => format!("({precision},{scale})"),
        (None, Some(precision), None) => format!("({precision})"),
        (None, None, _) => String::new(),
    };
    let base = match column.base.as_str() {
        // The system's one-byte type, not `character`.
        "char" => "\"char\"",
        base => base,
    };
    cast(value, &format!("{base}{numbers}")).map(Value::into_literal)
}

fn whole(expression: &str) -> Option<Value> {
    let mut parser = Parser { rest: expression.trim() };
    let value = parser.value(0)?;
    parser.rest.is_empty().then_some(value)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    String,
    /// A `"char"`: as an integer it is the character's number.
    Char,
    /// A `character` that ends in blanks: under any other type they are gone.
    Padded,
    Numeric,
    /// Floating point: under any other type it may be another number.
    Real,
    Double,
    Boolean,
    Date,
    Time,
    Timestamp,
    Timestamptz,
    Json,
    /// As `json` it is printed anew.
    Jsonb,
    Uuid,
}

impl Kind {
    fn as_str(self) -> &'static str {
        match self {
            Kind::String | Kind::Char | Kind::Padded => "string",
            Kind::Numeric | Kind::Real | Kind::Double => "numeric",
            Kind::Boolean => "boolean",
            Kind::Date => "date",
            Kind::Time => "time",
            Kind::Timestamp => "timestamp",
            Kind::Timestamptz => "timestamptz",
            Kind::Json | Kind::Jsonb => "json",
            Kind::Uuid => "uuid",
        }
    }
}

struct Value {
    kind: Kind,
    text: String,
}

impl Value {
    fn into_literal(self) -> Literal {
        Literal { kind: self.kind.as_str().to_owned(), text: self.text }
    }
}

struct Parser<'a> {
    rest: &'a str,
}

impl Parser<'_> {
    fn eat(&mut self, token: &str) -> bool {
        match self.rest.strip_prefix(token) {
            Some(rest) => {
                self.rest = rest.trim_start();
                true
            }
            None => false,
        }
    }

    /// `( value )`, a string, a number or a keyword, with casts behind it.
    fn value(&mut self, depth: usize) -> Option<Value> {
        if depth > MAX_DEPTH {
            return None;
        }
        let mut value = if self.eat("(") {
            let value = self.value(depth + 1)?;
            if !self.eat(")") {
                return None;
            }
            value
        } else {
            self.atom()?
        };
        while self.eat("::") {
            value = cast(value, &self.type_name()?)?;
        }
        Some(value)
    }

    fn atom(&mut self) -> Option<Value> {
        let first = self.rest.chars().next()?;
        match first {
            '\'' => self.string(false),
            'E' | 'e' if self.rest[1..].starts_with('\'') => {
                self.rest = &self.rest[1..];
                self.string(true)
            }
            '-' | '0'..='9' => self.number(),
            _ => self.keyword(),
        }
    }

    fn keyword(&mut self) -> Option<Value> {
        let end = self.rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(self.rest.len());
        let (word, rest) = self.rest.split_at(end);
        self.rest = rest.trim_start();
        match word.to_ascii_lowercase().as_str() {
            word @ ("true" | "false") => Some(Value { kind: Kind::Boolean, text: word.to_owned() }),
            // NULL is no default; anything else is a name or a call.
            _ => None,
        }
    }

    fn number(&mut self) -> Option<Value> {
        let negative = self.eat("-");
        let end =
            self.rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '.' && c != '_').unwrap_or(self.rest.len());
        let (digits, rest) = self.rest.split_at(end);
        self.rest = rest.trim_start();
        let text = if negative { format!("-{digits}") } else { digits.to_owned() };
        is_decimal(&text).then(|| Value { kind: Kind::Numeric, text: unsigned_zero(text) })
    }

    /// From the opening quote to behind the closing one; `escapes` as in `E'…'`.
    fn string(&mut self, escapes: bool) -> Option<Value> {
        let mut text = Vec::new();
        let mut rest = self.rest.as_bytes().get(1..)?;
        loop {
            match rest {
                [b'\'', b'\'', tail @ ..] => {
                    text.push(b'\'');
                    rest = tail;
                }
                [b'\'', ..] => break,
                [b'\\', tail @ ..] if escapes => rest = escape(tail, &mut text)?,
                [byte, tail @ ..] => {
                    text.push(*byte);
                    rest = tail;
                }
                [] => return None,
            }
        }
        // A quote is ASCII: what is behind it is whole text.
        let behind = self.rest.len() - rest.len() + 1;
        self.rest = self.rest.get(behind..)?.trim_start();
        Some(Value { kind: Kind::String, text: String::from_utf8(text).ok()? })
    }

    /// Up to the next cast, the parenthesis that is not its own, or the end.
    fn type_name(&mut self) -> Option<String> {
        let mut depth = 0;
        let mut end = self.rest.len();
        for (index, c) in self.rest.char_indices() {
            match c {
                '(' => depth += 1,
                ')' if depth == 0 => {
                    end = index;
                    break;
                }
                ')' => depth -= 1,
                ':' => {
                    end = index;
                    break;
                }
                _ => {}
            }
        }
        let (name, rest) = self.rest.split_at(end);
        self.rest = rest;
        if depth != 0 || name.trim().is_empty() {
            return None;
        }
        let words: Vec<&str> = name.split_whitespace().collect();
        let name = words.join(" ");
        // A quoted name is as it is written.
        Some(if name.contains('"') { name } else { name.to_lowercase() })
    }
}

/// One escape of `E'…'` behind its backslash (PostgreSQL manual, 4.1.2.2).
fn escape<'a>(rest: &'a [u8], text: &mut Vec<u8>) -> Option<&'a [u8]> {
    let (first, tail) = rest.split_first()?;
    match first {
        b'b' => text.push(8),
        b'f' => text.push(12),
        b'n' => text.push(b'\n'),
        b'r' => text.push(b'\r'),
        b't' => text.push(b'\t'),
        b'0'..=b'7' => return code(rest, 3, 8, text),
        b'x' if tail.first().is_some_and(u8::is_ascii_hexdigit) => return code(tail, 2, 16, text),
        b'u' => return unicode(tail, 4, text),
        b'U' => return unicode(tail, 8, text),
        other => text.push(*other),
    }
    Some(tail)
}

/// A byte by its number, up to `max` digits.
fn code<'a>(rest: &'a [u8], max: usize, radix: u32, text: &mut Vec<u8>) -> Option<&'a [u8]> {
    let count = rest.iter().take(max).take_while(|byte| char::from(**byte).is_digit(radix)).count();
    let (digits, tail) = rest.split_at(count);
    let byte = u8::from_str_radix(std::str::from_utf8(digits).ok()?, radix).ok()?;
    text.push(byte);
    (byte != 0).then_some(tail)
}

/// A character by its number, of exactly `count` digits; no surrogates.
fn unicode<'a>(rest: &'a [u8], count: usize, text: &mut Vec<u8>) -> Option<&'a [u8]> {
    let (digits, tail) = rest.split_at_checked(count)?;
    let digits =
        std::str::from_utf8(digits).ok().filter(|digits| digits.bytes().all(|byte| byte.is_ascii_hexdigit()))?;
    let character = char::from_u32(u32::from_str_radix(digits, 16).ok()?).filter(|c| *c != '\0')?;
    text.extend_from_slice(character.encode_utf8(&mut [0; 4]).as_bytes());
    Some(tail)
}

/// The value under another type, if that changes nothing but its kind.
fn cast(value: Value, type_name: &str) -> Option<Value> {
    let (name, modifiers) = split_modifiers(type_name)?;
    let name = name.strip_prefix("pg_catalog.").unwrap_or(&name);
    let first = modifiers.first().copied();
    let one = |kind: Kind, fits: bool| (modifiers.len() <= 1 && fits).then_some(kind);
    let text = value.text.as_str();
    let from = value.kind;
    let plain = from == Kind::String;
    let kind = match name {
        "text" | "character varying" | "varchar" => one(Kind::String, is_text(&value) && fits_in(text, first)),
        "character" | "char" | "bpchar" => {
            let limit = first.or((name != "bpchar").then_some(1));
            let kind = if text.ends_with(' ') { Kind::Padded } else { Kind::String };
            one(kind, (is_text(&value) || from == Kind::Padded) && fits_in(text, limit))
        }
        "\"char\"" => one(Kind::Char, (plain || from == Kind::Char) && text.len() == 1),
        "name" => one(Kind::String, plain && text.len() < 64),
        "smallint" | "int2" | "integer" | "int" | "int4" | "bigint" | "int8" => {
            let fits = (plain || from == Kind::Numeric) && is_decimal(text) && !text.contains('.');
            let kind = one(Kind::Numeric, fits)?;
            return Some(Value { kind, text: unsigned_zero(value.text) });
        }
        "numeric" | "decimal" if (plain || from == Kind::Numeric) && is_decimal(text) => {
            let text = scaled(text, &modifiers)?;
            return Some(Value { kind: Kind::Numeric, text: unsigned_zero(text) });
        }
        "real" | "float4" => {
            let from = plain || matches!(from, Kind::Numeric | Kind::Real);
            one(Kind::Real, from && is_decimal(text) && significant(text) <= FLT_DIG)
        }
        "double precision" | "float8" => {
            let from = plain || matches!(from, Kind::Numeric | Kind::Double);
            one(Kind::Double, from && is_decimal(text) && significant(text) <= DBL_DIG)
        }
        "boolean" | "bool" if from == Kind::Boolean => one(Kind::Boolean, true),
        "boolean" | "bool" if plain => {
            let truth = truth(text)?;
            return Some(Value { kind: Kind::Boolean, text: truth.to_string() });
        }
        "date" => one(Kind::Date, (plain || from == Kind::Date) && is_date(text)),
        "time" | "time without time zone" => {
            one(Kind::Time, (plain || from == Kind::Time) && is_time(text, precision(first)))
        }
        "timestamp" | "timestamp without time zone" if matches!(from, Kind::String | Kind::Date | Kind::Timestamp) => {
            let text = match is_date(text) {
                true => format!("{text} 00:00:00"),
                false => value.text,
            };
            return is_timestamp(&text, precision(first)).then_some(Value { kind: Kind::Timestamp, text });
        }
        "timestamptz" | "timestamp with time zone" => {
            one(Kind::Timestamptz, (plain || from == Kind::Timestamptz) && is_timestamptz(text, precision(first)))
        }
        "json" => one(Kind::Json, (plain || from == Kind::Json) && is_json(text)),
        "jsonb" => one(Kind::Jsonb, (plain || matches!(from, Kind::Json | Kind::Jsonb)) && is_json(text)),
        "uuid" => one(Kind::Uuid, (plain || from == Kind::Uuid) && is_uuid(text)),
        // Intervals, arrays, binary, types of others: not certain.
        _ => None,
    }?;
    Some(Value { kind, text: value.text })
}

/// `numeric(10,2)` and `timestamp(3) without time zone` as the name and the numbers.
fn split_modifiers(type_name: &str) -> Option<(String, Vec<i64>)> {
    let Some((name, rest)) = type_name.split_once('(') else { return Some((type_name.to_owned(), Vec::new())) };
    let (modifiers, suffix) = rest.split_once(')')?;
    let modifiers = modifiers.split(',').map(|text| text.trim().parse().ok()).collect::<Option<_>>()?;
    let name = match suffix.trim() {
        "" => name.trim().to_owned(),
        suffix => format!("{} {suffix}", name.trim()),
    };
    Some((name, modifiers))
}

/// Whether a text has no more characters than a type's length, if there is one.
fn fits_in(text: &str, limit: Option<i64>) -> bool {
    limit.is_none_or(|limit| usize::try_from(limit).is_ok_and(|limit| text.chars().count() <= limit))
}

/// Whether a value's text is what PostgreSQL prints for it, so that casting it to text
/// keeps it.
fn is_text(value: &Value) -> bool {
    matches!(value.kind, Kind::String | Kind::Char | Kind::Boolean | Kind::Numeric)
}

/// A number under `numeric` with these modifiers: with the digits behind the point that its
/// scale says. None if it has more of them.
fn scaled(number: &str, modifiers: &[i64]) -> Option<String> {
    let scale = match modifiers {
        [] => return Some(number.to_owned()),
        [_] => 0,
        [_, scale] => usize::try_from(*scale).ok()?,
        _ => return None,
    };
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if fraction.len() > scale || scale > MAX_SCALE {
        return None;
    }
    Some(if scale == 0 { whole.to_owned() } else { format!("{whole}.{fraction:0<scale$}") })
}

/// `-0`, which only floating point has, without its sign.
fn unsigned_zero(number: String) -> String {
    match number.strip_prefix('-') {
        Some(digits) if digits.bytes().all(|byte| matches!(byte, b'0' | b'.')) => digits.to_owned(),
        _ => number,
    }
}

fn is_json(text: &str) -> bool {
    serde_json::from_str::<serde::de::IgnoredAny>(text).is_ok()
}

/// Digits that a number has, zeros at its ends left out.
fn significant(number: &str) -> usize {
    let digits: String = number.chars().filter(char::is_ascii_digit).collect();
    digits.trim_matches('0').len()
}

/// Digits with an optional sign and fraction: as PostgreSQL prints a number, without
/// exponent, leading zeros, separators and other bases.
fn is_decimal(text: &str) -> bool {
    let digits = text.strip_prefix('-').unwrap_or(text);
    let (whole, fraction) = digits.split_once('.').map_or((digits, None), |(whole, fraction)| (whole, Some(fraction)));
    is_digits(whole) && (whole == "0" || !whole.starts_with('0')) && fraction.is_none_or(is_digits)
}

pub(super) fn is_digits(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

fn truth(text: &str) -> Option<bool> {
    match text.trim().to_ascii_lowercase().as_str() {
        "t" | "true" | "y" | "yes" | "on" | "1" => Some(true),
        "f" | "false" | "n" | "no" | "off" | "0" => Some(false),
        _ => None,
    }
}

fn is_uuid(text: &str) -> bool {
    let groups: Vec<&str> = text.split('-').collect();
    groups.iter().map(|group| group.len()).eq([8, 4, 4, 4, 12])
        && groups.iter().all(|group| group.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f')))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schema::samples::column;

    fn read(expression: &str) -> Option<(String, String)> {
        literal(expression).map(|literal| (literal.kind, literal.text))
    }

    #[track_caller]
    fn accepted(expression: &str, kind: &str, text: &str) {
        assert_eq!(read(expression), Some((kind.to_owned(), text.to_owned())), "{expression}");
    }

    #[track_caller]
    fn refused(expression: &str) {
        assert_eq!(read(expression), None, "{expression}");
    }

    #[test]
    fn the_documented_literals_are_accepted() {
        accepted("'pending'::text", "string", "pending");
        accepted("('don''t'::text)", "string", "don't");
        accepted("42", "numeric", "42");
        accepted("-1", "numeric", "-1");
        accepted("'42.10'::numeric(10,2)", "numeric", "42.10");
        accepted("true", "boolean", "true");
        accepted("false", "boolean", "false");
        accepted("'true'::boolean", "boolean", "true");
        accepted("'2026-01-01'::date", "date", "2026-01-01");
        accepted("'12:30:00'::time", "time", "12:30:00");
        accepted("'2026-01-01 12:30:00'::timestamp", "timestamp", "2026-01-01 12:30:00");
        accepted("'2026-01-01 12:30:00+00'::timestamptz", "timestamptz", "2026-01-01 12:30:00+00");
        accepted("'{}'::jsonb", "json", "{}");
        accepted("'6f1e0a7c-6f7b-4a4e-9d5c-0123456789ab'::uuid", "uuid", "6f1e0a7c-6f7b-4a4e-9d5c-0123456789ab");
        refused("NULL");
        refused("NULL::character varying");
    }

    #[test]
    fn the_documented_expressions_are_refused() {
        for expression in [
            "nextval('s')",
            "'a' || 'b'",
            "lower('X')",
            "concat('a','b')",
            "md5('x')",
            "random()",
            "clock_timestamp()",
            "now()",
            "CURRENT_TIMESTAMP",
            "CURRENT_USER",
            "gen_random_uuid()",
            "timezone('UTC', now())",
            "ARRAY['a','b']",
            "(SELECT 'x')",
            "current_setting('a.b')",
            "1e6",
            "'1 day'::interval",
            "'now'::text::date",
            "'today'::date",
        ] {
            refused(expression);
        }
    }

    /// As `pg_get_expr` of PostgreSQL prints them.
    #[test]
    fn what_postgresql_prints_for_literals_is_accepted() {
        accepted("'a'::character varying(10)", "string", "a");
        accepted("'ab'::bpchar", "string", "ab");
        accepted("'x'::\"char\"", "string", "x");
        accepted("''::text", "string", "");
        accepted("'-1'::integer", "numeric", "-1");
        accepted("(-1)", "numeric", "-1");
        accepted("(- 1)::bigint", "numeric", "-1");
        accepted("(('-5'::integer))::numeric", "numeric", "-5");
        accepted("0.5", "numeric", "0.5");
        accepted("'42'::numeric(10,2)", "numeric", "42.00");
        accepted("(-0.5)::numeric(10,2)", "numeric", "-0.50");
        accepted("(- 0)::numeric(10,2)", "numeric", "0.00");
        accepted("('-0'::integer)::double precision", "numeric", "0");
        accepted("'-0'::double precision", "numeric", "-0");
        accepted("'0.1'::double precision", "numeric", "0.1");
        accepted("('100000000000000000000'::numeric)::double precision", "numeric", "100000000000000000000");
        accepted("('42'::text)::integer", "numeric", "42");
        accepted("42::text", "string", "42");
        accepted("'t'::bool", "boolean", "true");
        accepted("'12:30:00.25'::time(2) without time zone", "time", "12:30:00.25");
        accepted("'2026-01-01 00:00:00'::timestamp without time zone", "timestamp", "2026-01-01 00:00:00");
        accepted("('2026-01-01'::date)::timestamp without time zone", "timestamp", "2026-01-01 00:00:00");
        accepted(
            "'2024-02-29 01:02:03.5-03:30'::timestamp with time zone",
            "timestamptz",
            "2024-02-29 01:02:03.5-03:30",
        );
        accepted("'{\"a\": [1, null]}'::json", "json", "{\"a\": [1, null]}");
        accepted("  ( ( 'x' :: text ) :: character   varying )  ", "string", "x");
        accepted("'schön 🙂::text'::text", "string", "schön 🙂::text");
    }

    #[test]
    fn escapes_are_read_as_postgresql_reads_them() {
        accepted(r"E'a\\b\n\'c''d'::text", "string", "a\\b\n'c'd");
        accepted(r"E'\x41\102\u00e9\U0001F642\q'", "string", "AB\u{e9}\u{1f642}q");
        accepted(r"E'\xc3\xa9'::text", "string", "é");
        // Without the E a backslash is one.
        accepted(r"'a\n'::text", "string", "a\\n");
        for expression in [r"E'\xff'", r"E'\000'", r"E'\u12'", r"E'\ud800'", r"E'a\'", "E'a", r"E'\400'"] {
            refused(expression);
        }
    }

    #[test]
    fn what_postgresql_would_round_or_cut_is_refused() {
        for expression in [
            "'42.105'::numeric(10,2)",
            "1.5::integer",
            "'0.1234567'::real",
            "'0.1234567890123456'::double precision",
            "1000000::real::text",
            "'1.5'::numeric(3)",
            "'abc'::character varying(2)",
            "'abc'::character(2)",
            "'ab'::character",
            "'ab'::\"char\"",
            "'12:30:00.125'::time(2)",
            "'2026-01-01 12:30:00.5'::timestamp(0)",
            "'2026-01-01 12:30:00'::timestamp::date",
            "'{\"a\":1}'::jsonb::text",
            "true::integer",
            "'2026-01-01'::date::text",
            // The character's number, 50.
            "('2'::\"char\")::integer",
            "('a '::character(2))::text",
            "('a '::bpchar)::name",
            // 0.100000001490116
            "('0.1'::real)::double precision",
            "(1.50::double precision)::numeric",
            "('{\"b\":1,\"a\":2}'::jsonb)::json",
            "5::numeric(3,-1)",
        ] {
            refused(expression);
        }
    }

    #[test]
    fn what_depends_on_the_clock_or_a_setting_is_refused() {
        for word in ["now", "today", "tomorrow", "yesterday", "epoch", "infinity", "allballs", " Now "] {
            for name in ["date", "time", "timestamp", "timestamptz", "text::timestamp with time zone"] {
                refused(&format!("'{word}'::{name}"));
            }
        }
        refused("'2026-01-01 12:30:00'::timestamptz");
        refused("'01/02/2026'::date");
        refused("'2026-02-29'::date");
        refused("'2026-13-01'::date");
        refused("'24:00:00'::time");
        refused("'2026-01-01 12:30:00+01'::timestamp");
        // A word is a word while it is text.
        accepted("'now'::text", "string", "now");
    }

    #[test]
    fn a_default_is_what_it_becomes_in_its_column() {
        let read = |expression: &str, base: &str, base_typmod: i32| {
            let column = Column { base_typmod, ..column(1, "c", base) };
            column_literal(expression, &column).map(|literal| format!("{} {}", literal.kind, literal.text))
        };
        let money = (10 << 16 | 2) + 4;
        assert_eq!(read("42.10", "numeric", money).as_deref(), Some("numeric 42.10"));
        assert_eq!(read("42.105", "numeric", money), None);
        assert_eq!(read("42", "text", -1).as_deref(), Some("string 42"));
        assert_eq!(read("'abc'::character varying", "varchar", 7).as_deref(), Some("string abc"));
        assert_eq!(read("'ab'::bpchar", "bpchar", 7).as_deref(), Some("string ab"));
        assert_eq!(read("'x'::\"char\"", "char", -1).as_deref(), Some("string x"));
        assert_eq!(read("('2'::\"char\")::text", "int4", -1).as_deref(), Some("numeric 2"));
        assert_eq!(read("'2'::\"char\"", "numeric", -1), None);
        assert_eq!(read("'ab '::bpchar", "bpchar", 7).as_deref(), Some("string ab "));
        assert_eq!(read("'ab '::bpchar", "text", -1), None);
        assert_eq!(read("'2026-01-01'::date", "timestamp", 0).as_deref(), Some("timestamp 2026-01-01 00:00:00"));
        assert_eq!(read("'2026-01-01 12:30:00.5'::timestamp without time zone", "timestamp", 0), None);
        assert_eq!(read("'2026-01-01 12:30:00'::timestamp without time zone", "timestamptz", -1), None);
        assert_eq!(read("'5000000000'::bigint", "int8", -1).as_deref(), Some("numeric 5000000000"));
        assert_eq!(read("'-2'::integer", "float8", -1).as_deref(), Some("numeric -2"));
        assert_eq!(read("'new'::text", "enum", -1), None);
    }

    #[test]
    fn what_is_not_known_for_certain_is_refused() {
        for expression in [
            "",
            "()",
            "'a",
            "'a'::",
            "('a'",
            "'a')",
            "'a' 'b'",
            "'a'::mood",
            "'a'::\"CHAR\"",
            "'a'::public.text",
            "'{a}'::text[]",
            "'\\x00'::bytea",
            "B'101'",
            "U&'a'",
            "'a' COLLATE \"C\"",
            "'a'::text COLLATE \"C\"",
            "1 + 1",
            "1_000",
            "0x1F",
            "'007'::integer",
            "'NaN'::numeric",
            "'1e6'::numeric",
            "'12'::money",
            "-'1'::integer",
            "- - 1",
            "'yesno'::boolean",
            "'{'::jsonb",
            "'6F1E'::uuid",
            "'1'::numeric(1,2,3)",
            "'1'::numeric(a)",
            "trueish",
            "date '2026-01-01'",
        ] {
            refused(expression);
        }
        refused(&"(".repeat(100_000));
        refused(&format!("{}1{}", "(".repeat(100), ")".repeat(100)));
    }
}
