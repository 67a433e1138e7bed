//! Any cell as PostgreSQL prints it, with DateStyle ISO, TimeZone UTC, bytea_output
//! hex and extra_float_digits above 0.
//!
//! ```
//! use tidegate_sdk::rows::{Cell, Kind};
//!
//! let mut text = String::new();
//! Cell::Int64(1_767_225_600_120_000).write_text(Kind::TimestampTz, &mut text);
//! assert_eq!(text, "2026-01-01 00:00:00.12+00");
//! ```

use std::fmt::Write as _;
use std::io::Write as _;

use crate::model::Column;
use crate::rows::{Cell, Kind, List};

impl Cell<'_> {
    /// Appends the cell's text. `kind` is [`Column::kind`]. Returns false, and appends
    /// nothing, for NULL and missing cells, which have no text.
    ///
    /// Bytes that are not UTF-8 (an odd cell of kind `hex`) are appended as their hex
    /// digits after `\x`. An array wants [`write_as`](Self::write_as), which knows its
    /// delimiter: of `box` and of some extensions' types it is no comma.
    pub fn write_text(&self, kind: Kind, out: &mut String) -> bool {
        self.write_delimited(kind, ',', out)
    }

    /// [`write_text`](Self::write_text) for a cell of this column.
    pub fn write_as(&self, column: &Column, out: &mut String) -> bool {
        self.write_delimited(column.kind(), column.delimiter(), out)
    }

    fn write_delimited(&self, kind: Kind, delimiter: char, out: &mut String) -> bool {
        match *self {
            Cell::Null | Cell::Missing => return false,
            Cell::Odd { kind: "hex", text } => {
                out.push_str("\\x");
                out.push_str(text);
            }
            Cell::Odd { text, .. } => out.push_str(text),
            Cell::Bool(value) => out.push(if value { 't' } else { 'f' }),
            Cell::Int16(value) => integer(i64::from(value), out),
            Cell::Int32(days) if kind == Kind::Date => date(days, out),
            Cell::Int32(value) => integer(i64::from(value), out),
            Cell::Int64(value) => match kind {
                Kind::Time => time(value, out),
                Kind::Timestamp => timestamp(value, "", out),
                Kind::TimestampTz => timestamp(value, "+00", out),
                _ => integer(value, out),
            },
            Cell::Float32(value) => float4(value, out),
            Cell::Float64(value) => float8(value, out),
            Cell::Fixed(bytes) if kind == Kind::Uuid => uuid(bytes, out),
            Cell::Fixed(bytes) | Cell::Bytes(bytes) => bytea(bytes, out),
            Cell::Text(text) => out.push_str(text),
            Cell::List(list) => array(list, kind, delimiter, out),
        }
        true
    }
}

/// Writing to a `String` cannot fail; what the formatter returns says nothing.
fn append(out: &mut String, text: std::fmt::Arguments<'_>) {
    let _ = out.write_fmt(text);
}

fn integer(value: i64, out: &mut String) {
    append(out, format_args!("{value}"));
}

fn hex(bytes: &[u8], out: &mut String) {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    out.reserve(bytes.len() * 2);
    for byte in bytes {
        out.push(char::from(DIGITS[usize::from(byte >> 4)]));
        out.push(char::from(DIGITS[usize::from(byte & 15)]));
    }
}

/// `bytea` in its hex format.
pub fn bytea(bytes: &[u8], out: &mut String) {
    out.push_str("\\x");
    hex(bytes, out);
}

/// `uuid`; bytes beyond the sixteenth are left out.
pub fn uuid(bytes: &[u8], out: &mut String) {
    let mut rest = bytes;
    for (index, width) in [4, 2, 2, 2, 6].into_iter().enumerate() {
        if index > 0 {
            out.push('-');
        }
        let (group, after) = rest.split_at(width.min(rest.len()));
        hex(group, out);
        rest = after;
    }
}

/// Year, month and day of a day count since 1970-01-01, proleptic Gregorian; year 0
/// is 1 BC. After Howard Hinnant's `civil_from_days`.
fn civil(days: i64) -> (i64, u32, u32) {
    let shifted = days + 719_468;
    let era = shifted.div_euclid(146_097);
    let day_of_era = shifted.rem_euclid(146_097);
    let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted_month = (5 * day_of_year + 2) / 153;
    let day = (day_of_year - (153 * shifted_month + 2) / 5 + 1) as u32;
    let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 } as u32;
    (year_of_era + era * 400 + i64::from(month <= 2), month, day)
}

/// Appends the date without its era and returns what the era adds.
fn date_of(days: i64, out: &mut String) -> &'static str {
    let (year, month, day) = civil(days);
    let (year, era) = if year > 0 { (year, "") } else { (1 - year, " BC") };
    append(out, format_args!("{year:04}-{month:02}-{day:02}"));
    era
}

/// `date`, from days since 1970-01-01.
pub fn date(days: i32, out: &mut String) {
    let era = date_of(i64::from(days), out);
    out.push_str(era);
}

/// `time`, from microseconds since midnight.
pub fn time(microseconds: i64, out: &mut String) {
    let seconds = microseconds / 1_000_000;
    append(out, format_args!("{:02}:{:02}:{:02}", seconds / 3_600, seconds / 60 % 60, seconds % 60));
    let fraction = microseconds % 1_000_000;
    if fraction != 0 {
        append(out, format_args!(".{fraction:06}"));
        out.truncate(out.trim_end_matches('0').len());
    }
}

/// `timestamp`, or with the zone `+00` `timestamptz`, from microseconds since 1970-01-01.
pub fn timestamp(microseconds: i64, zone: &str, out: &mut String) {
    const DAY: i64 = 86_400_000_000;
    let era = date_of(microseconds.div_euclid(DAY), out);
    out.push(' ');
    time(microseconds.rem_euclid(DAY), out);
    out.push_str(zone);
    out.push_str(era);
}

/// `float8` in its shortest form that is read back as the same value.
pub fn float8(value: f64, out: &mut String) {
    if special(value, out) {
        return;
    }
    let mut digits = Digits::of(format_args!("{value:e}"));
    // A decimal that lies exactly between two values is read back by the rule of even
    // mantissas only. PostgreSQL does not rely on that rule; such a decimal is one of
    // at most 17 digits only for values in this range.
    let magnitude = value.abs();
    if (2f64.powi(52)..2f64.powi(134)).contains(&magnitude) {
        while !digits.is_within(|text| text.parse::<f64>().is_ok_and(|read| read == value)) && digits.count < 17 {
            digits = Digits::of(format_args!("{value:.*e}", digits.count));
        }
    }
    digits.write(15, out);
}

/// `float4` in its shortest form that is read back as the same value.
pub fn float4(value: f32, out: &mut String) {
    if special(f64::from(value), out) {
        return;
    }
    let mut digits = Digits::of(format_args!("{value:e}"));
    let magnitude = value.abs();
    if (2f32.powi(21)..2f32.powi(67)).contains(&magnitude) {
        while !digits.is_within(|text| text.parse::<f32>().is_ok_and(|read| read == value)) && digits.count < 9 {
            digits = Digits::of(format_args!("{value:.*e}", digits.count));
        }
    }
    digits.write(6, out);
}

fn special(value: f64, out: &mut String) -> bool {
    let text = if value.is_nan() {
        "NaN"
    } else if value == f64::INFINITY {
        "Infinity"
    } else if value == f64::NEG_INFINITY {
        "-Infinity"
    } else if value == 0.0 {
        if value.is_sign_negative() { "-0" } else { "0" }
    } else {
        return false;
    };
    out.push_str(text);
    true
}

/// A finite number in decimal: `0.d₁d₂… × 10^(exponent + 1)`.
struct Digits {
    negative: bool,
    digits: [u8; 17],
    count: usize,
    exponent: i32,
}

impl Digits {
    /// Of what `{:e}` writes, such as `-1.25e-7`.
    fn of(scientific: std::fmt::Arguments<'_>) -> Digits {
        let mut buffer = [0u8; 40];
        let mut rest = &mut buffer[..];
        // 17 digits, a point, two signs and an exponent fit.
        let _ = rest.write_fmt(scientific);
        let unused = rest.len();
        let text = &buffer[..buffer.len() - unused];
        let mut found = Digits { negative: false, digits: [0; 17], count: 0, exponent: 0 };
        let mut bytes = text.iter();
        for &byte in bytes.by_ref() {
            match byte {
                b'-' => found.negative = true,
                b'e' => break,
                b'0'..=b'9' if found.count < 17 => {
                    found.digits[found.count] = byte;
                    found.count += 1;
                }
                _ => {}
            }
        }
        let mut below_one = false;
        for &byte in bytes {
            match byte {
                b'-' => below_one = true,
                digit => found.exponent = found.exponent * 10 + i32::from(digit - b'0'),
            }
        }
        if below_one {
            found.exponent = -found.exponent;
        }
        found
    }

    fn digits(&self) -> &str {
        std::str::from_utf8(&self.digits[..self.count]).unwrap_or("0")
    }

    /// Whether decimals just below and just above it are read as the same value too:
    /// then it is no boundary between two values.
    fn is_within(&self, same: impl Fn(&str) -> bool) -> bool {
        const FINE: usize = 40;
        let sign = if self.negative { "-" } else { "" };
        let power = self.exponent - (self.count as i32 - 1) - FINE as i32;
        let above = format!("{sign}{}{:0>FINE$}e{power}", self.digits(), 1);
        let below = self.digits().parse::<u64>().map(|digits| format!("{sign}{}{:9>FINE$}e{power}", digits - 1, 9));
        same(&above) && below.is_ok_and(|below| same(&below))
    }

    /// As PostgreSQL does: with an exponent from `10^limit` on, and below 0.0001.
    fn write(&self, limit: i32, out: &mut String) {
        if self.negative {
            out.push('-');
        }
        let digits = self.digits();
        if self.exponent < -4 || self.exponent >= limit {
            let (first, others) = digits.split_at(1);
            out.push_str(first);
            if !others.is_empty() {
                out.push('.');
                out.push_str(others);
            }
            let sign = if self.exponent < 0 { '-' } else { '+' };
            append(out, format_args!("e{sign}{:02}", self.exponent.abs()));
        } else if self.exponent < 0 {
            out.push_str("0.");
            out.extend(std::iter::repeat_n('0', (-self.exponent - 1) as usize));
            out.push_str(digits);
        } else {
            let whole = self.exponent as usize + 1;
            if self.count <= whole {
                out.push_str(digits);
                out.extend(std::iter::repeat_n('0', whole - self.count));
            } else {
                let (whole, fraction) = digits.split_at(whole);
                out.push_str(whole);
                out.push('.');
                out.push_str(fraction);
            }
        }
    }
}

/// An array, elements quoted where `array_out` quotes them.
pub fn array(list: List<'_>, kind: Kind, delimiter: char, out: &mut String) {
    out.push('{');
    for (index, cell) in list.cells().enumerate() {
        if index > 0 {
            out.push(delimiter);
        }
        let start = out.len();
        if !cell.write_text(kind, out) {
            out.push_str("NULL");
        } else if matches!(cell, Cell::Text(_) | Cell::Bytes(_) | Cell::Int64(_) | Cell::Int32(_)) {
            quote_from(start, delimiter, out);
        }
    }
    out.push('}');
}

/// Quotes what `out` has from `start` on, if an array's text needs it.
fn quote_from(start: usize, delimiter: char, out: &mut String) {
    let element = &out[start..];
    let special =
        |c: char| c == delimiter || matches!(c, '"' | '\\' | '{' | '}' | ' ' | '\t' | '\n' | '\r' | '\x0b' | '\x0c');
    if !element.is_empty() && !element.eq_ignore_ascii_case("null") && !element.contains(special) {
        return;
    }
    let element = out.split_off(start);
    out.push('"');
    for c in element.chars() {
        if matches!(c, '"' | '\\') {
            out.push('\\');
        }
        out.push(c);
    }
    out.push('"');
}
