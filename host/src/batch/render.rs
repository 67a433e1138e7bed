//! Values back to PostgreSQL's text: for casts through text, and to compare with what
//! the server prints.

use std::io::Write;

use super::gather::{bit, bytes_of, items_of, odd_cell};
use super::layout::{ColumnLayout, Layout};
use crate::wire;

/// Appends the text of a cell that is neither null nor missing. False if there is none,
/// because the cell is bytes that are no text.
pub(super) fn render(values: &wire::ColumnValues, row: u32, layout: ColumnLayout, out: &mut Vec<u8>) -> bool {
    if let Some(odd) = odd_cell(values, row) {
        out.extend_from_slice(odd.text.as_bytes());
        return odd.kind == "text";
    }
    match &values.data {
        wire::ColumnData::Plain(cells) => render_value(cells, row, layout.layout, out),
        wire::ColumnData::Lists(lists) => {
            out.push(b'{');
            let delimiter = layout.delimiter.unwrap_or(b',');
            for (at, item) in items_of(lists, row).enumerate() {
                if at > 0 {
                    out.push(delimiter);
                }
                if !bit(&lists.item_validity, item, true) {
                    out.extend_from_slice(b"NULL");
                    continue;
                }
                let start = out.len();
                render_value(&lists.items, item, layout.layout, out);
                quote_item(out, start, delimiter);
            }
            out.push(b'}');
        }
    }
    true
}

fn render_value(cells: &wire::Cells, row: u32, layout: Layout, out: &mut Vec<u8>) {
    let at = row as usize;
    match cells {
        wire::Cells::Booleans(bits) => {
            let bit = bits.get(at / 8).is_some_and(|byte| byte >> (at % 8) & 1 == 1);
            out.push(if bit { b't' } else { b'f' });
        }
        wire::Cells::Int16(values) => integer(values.get(at).copied().unwrap_or_default().into(), out),
        wire::Cells::Int32(values) => match (values.get(at).copied().unwrap_or_default(), layout) {
            (days, Layout::Date) => date(days.into(), out),
            (value, _) => integer(value.into(), out),
        },
        wire::Cells::Int64(values) => match (values.get(at).copied().unwrap_or_default(), layout) {
            (micros, Layout::Time) => clock(micros, out),
            (micros, Layout::Timestamp) => timestamp(micros, "", out),
            (micros, Layout::TimestampTz) => timestamp(micros, "+00", out),
            (value, _) => integer(value, out),
        },
        wire::Cells::Float32(values) => {
            let value = values.get(at).copied().unwrap_or_default();
            let shortest = || shortest(value, |text| text.parse().is_ok_and(|read: f32| read == value), 9);
            float(value.into(), shortest, FLOAT4_DIGITS, out);
        }
        wire::Cells::Float64(values) => {
            let value = values.get(at).copied().unwrap_or_default();
            float8(value, out);
        }
        wire::Cells::Fixed(array) => {
            let width = array.width as usize;
            uuid(array.data.get(at * width..(at + 1) * width).unwrap_or_default(), out);
        }
        wire::Cells::Utf8(array) => out.extend_from_slice(bytes_of(array, row)),
        wire::Cells::Binary(array) => {
            out.extend_from_slice(b"\\x");
            hex(bytes_of(array, row), out);
        }
    }
}

/// Writing to a vector does not fail.
fn print(out: &mut Vec<u8>, text: std::fmt::Arguments<'_>) {
    let _ = out.write_fmt(text);
}

fn integer(value: i64, out: &mut Vec<u8>) {
    print(out, format_args!("{value}"));
}

fn hex(bytes: &[u8], out: &mut Vec<u8>) {
    for byte in bytes {
        out.extend([byte >> 4, byte & 15].map(|digit| b"0123456789abcdef"[usize::from(digit)]));
    }
}

fn uuid(bytes: &[u8], out: &mut Vec<u8>) {
    for (at, byte) in bytes.iter().enumerate() {
        if matches!(at, 4 | 6 | 8 | 10) {
            out.push(b'-');
        }
        hex(&[*byte], out);
    }
}

/// From this exponent on PostgreSQL prints a float4 with an exponent (FLT_DIG).
const FLOAT4_DIGITS: i32 = 6;
/// The same for float8 (DBL_DIG).
const FLOAT8_DIGITS: i32 = 15;

fn float8(value: f64, out: &mut Vec<u8>) {
    let shortest = || shortest(value, |text| text.parse().is_ok_and(|read: f64| read == value), 17);
    float(value, shortest, FLOAT8_DIGITS, out);
}

/// A finite number as `d.ddde±x` with the fewest digits that are read as it, whether
/// the reader rounds to even or not: that is how PostgreSQL counts them. `most`
/// digits always do.
fn shortest<T: std::fmt::LowerExp + Copy>(value: T, same: impl Fn(&str) -> bool, most: usize) -> String {
    let mut text = format!("{value:e}");
    loop {
        let digits = text.bytes().take_while(|byte| *byte != b'e').filter(u8::is_ascii_digit).count();
        if digits >= most || !is_halfway(&text, &same) {
            return nearest(value, text, digits, same);
        }
        text = format!("{value:.digits$e}");
    }
}

/// The number with as many digits, where it lies halfway between two of those the even one,
/// as PostgreSQL prints it; Rust takes the larger one.
fn nearest<T: std::fmt::LowerExp>(value: T, text: String, digits: usize, same: impl Fn(&str) -> bool) -> String {
    let fraction = digits.saturating_sub(1);
    let even = format!("{value:.fraction$e}");
    if same(&even) { even } else { text }
}

/// Whether the decimal lies exactly between two numbers: then one a little above or
/// below it is read as another number.
fn is_halfway(text: &str, same: impl Fn(&str) -> bool) -> bool {
    const FINE: usize = 40;
    let (mantissa, exponent) = text.split_once('e').unwrap_or((text, "0"));
    let (sign, mantissa) = mantissa.strip_prefix('-').map_or(("", mantissa), |rest| ("-", rest));
    let fraction = mantissa.len().saturating_sub(2);
    let power = exponent.parse::<i32>().unwrap_or(0) - fraction as i32 - FINE as i32;
    match mantissa.replace('.', "").parse::<u64>() {
        Ok(digits @ 1..) => {
            let above = format!("{sign}{digits}{:0>FINE$}e{power}", 1);
            let below = format!("{sign}{}{:9>FINE$}e{power}", digits - 1, 9);
            !(same(&above) && same(&below))
        }
        // Zero.
        _ => false,
    }
}

/// `shortest` is asked for a finite number only.
fn float(value: f64, shortest: impl FnOnce() -> String, most_digits: i32, out: &mut Vec<u8>) {
    if value.is_nan() {
        return out.extend_from_slice(b"NaN");
    }
    if value.is_infinite() {
        return out.extend_from_slice(if value > 0.0 { b"Infinity" } else { b"-Infinity" });
    }
    let shortest = shortest();
    let (mantissa, exponent) = shortest.split_once('e').unwrap_or((&shortest, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if !(-4..most_digits).contains(&exponent) {
        let sign = if exponent < 0 { '-' } else { '+' };
        return print(out, format_args!("{mantissa}e{sign}{:02}", exponent.abs()));
    }
    let (sign, mantissa) = mantissa.strip_prefix('-').map_or(("", mantissa), |rest| ("-", rest));
    let digits: String = mantissa.chars().filter(|digit| *digit != '.').collect();
    match usize::try_from(exponent) {
        Err(_) => {
            let zeroes = "0".repeat(exponent.unsigned_abs() as usize - 1);
            print(out, format_args!("{sign}0.{zeroes}{digits}"));
        }
        Ok(exponent) if digits.len() <= exponent + 1 => {
            print(out, format_args!("{sign}{digits}{}", "0".repeat(exponent + 1 - digits.len())));
        }
        Ok(exponent) => {
            let (whole, fraction) = digits.split_at(exponent + 1);
            print(out, format_args!("{sign}{whole}.{fraction}"));
        }
    }
}

fn date(days: i64, out: &mut Vec<u8>) {
    let before_christ = calendar(days, out);
    if before_christ {
        out.extend_from_slice(b" BC");
    }
}

fn timestamp(micros: i64, offset: &str, out: &mut Vec<u8>) {
    let before_christ = calendar(micros.div_euclid(86_400_000_000), out);
    out.push(b' ');
    clock(micros.rem_euclid(86_400_000_000), out);
    out.extend_from_slice(offset.as_bytes());
    if before_christ {
        out.extend_from_slice(b" BC");
    }
}

/// Prints year, month and day; whether they are before Christ. Howard Hinnant's
/// `civil_from_days`, the way back of the one in `datetime`.
fn calendar(days: i64, out: &mut Vec<u8>) -> bool {
    let days = days + 719_468;
    let era = days.div_euclid(146_097);
    let day_of_era = days - era * 146_097;
    let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = (month_from_march + 2) % 12 + 1;
    let year = year_of_era + era * 400 + i64::from(month <= 2);
    let before_christ = year <= 0;
    let printed = if before_christ { 1 - year } else { year };
    print(out, format_args!("{printed:04}-{month:02}-{day:02}"));
    before_christ
}

fn clock(micros: i64, out: &mut Vec<u8>) {
    let (seconds, micros) = (micros / 1_000_000, micros % 1_000_000);
    print(out, format_args!("{:02}:{:02}:{:02}", seconds / 3600, seconds / 60 % 60, seconds % 60));
    if micros > 0 {
        print(out, format_args!(".{micros:06}"));
        while out.last() == Some(&b'0') {
            out.pop();
        }
    }
}

/// Puts quotes around the item that begins at `start`, where `array_out` does.
fn quote_item(out: &mut Vec<u8>, start: usize, delimiter: u8) {
    let item = &out[start..];
    let special = |byte: &u8| {
        *byte == delimiter || matches!(byte, b'"' | b'\\' | b'{' | b'}' | b' ' | b'\t' | b'\n' | b'\r' | 0x0b | 0x0c)
    };
    if !item.is_empty() && !item.eq_ignore_ascii_case(b"NULL") && !item.iter().any(special) {
        return;
    }
    let item = out.split_off(start);
    out.push(b'"');
    for byte in item {
        if matches!(byte, b'"' | b'\\') {
            out.push(b'\\');
        }
        out.push(byte);
    }
    out.push(b'"');
}

#[cfg(test)]
mod tests {
    use super::*;

    fn printed(value: f64) -> String {
        let mut out = Vec::new();
        float8(value, &mut out);
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn floats_print_as_postgresql_prints_them() {
        for text in [
            "0",
            "-0",
            "1",
            "-1.5",
            "100",
            "0.0001",
            "1e-05",
            "123456789012345",
            "1e+15",
            "1.25e+300",
            "5e-324",
            "NaN",
            "-Infinity",
            "0.1",
            "1234.5678",
            // With a digit less, they are halfway between two numbers.
            "4.2394635092252164e+19",
            "-1.9387399668879359e+21",
            // Halfway between two of as many digits: the value of a float4.
            "862.4199829101562",
            "-1013.8549194335938",
        ] {
            assert_eq!(printed(text.parse().unwrap()), text);
        }
    }
}
