//! Colours and tables, where a person reads them.

use std::io::IsTerminal;

use comfy_table::presets::UTF8_BORDERS_ONLY;
use comfy_table::{Attribute, Cell, Color, ContentArrangement, Table};

use crate::error::Error;

/// Whether a stream gets colours: a terminal, and NO_COLOR (<https://no-color.org>) unset.
pub(super) fn coloured(stream: &impl IsTerminal) -> bool {
    std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
        && std::env::var_os("TERM").is_none_or(|term| term != "dumb")
        && stream.is_terminal()
}

/// An error's report for standard error.
pub(super) fn error(error: &Error) -> String {
    let report = error.report();
    match report.split_once(": ") {
        Some((head, rest)) if coloured(&std::io::stderr()) => format!("\x1b[1;31m{head}\x1b[0m: {rest}"),
        _ => report,
    }
}

/// An empty table for standard output.
pub(super) fn table(header: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_preset(UTF8_BORDERS_ONLY).set_content_arrangement(ContentArrangement::Dynamic);
    if coloured(&std::io::stdout()) {
        table.enforce_styling();
    } else {
        table.force_no_tty();
    }
    table.set_header(header.iter().map(|title| Cell::new(title).add_attribute(Attribute::Bold)));
    table
}

/// A cell that says all is well.
pub(super) fn good(text: impl ToString) -> Cell {
    Cell::new(text).fg(Color::Green)
}

/// A cell that says something is under way or worth a look.
pub(super) fn pending(text: impl ToString) -> Cell {
    Cell::new(text).fg(Color::Yellow)
}

/// A cell that says something is wrong.
pub(super) fn bad(text: impl ToString) -> Cell {
    Cell::new(text).fg(Color::Red)
}

/// A number with the digits in groups of three: 1,234,567.
pub(super) fn number(number: u64) -> String {
    let digits = number.to_string();
    let mut grouped = String::with_capacity(digits.len() + digits.len() / 3);
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    grouped
}

/// Bytes in the unit that leaves one to four digits.
pub(super) fn bytes(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["B", "kB", "MB", "GB", "TB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 1000.0 && unit + 1 < UNITS.len() {
        value /= 1000.0;
        unit += 1;
    }
    if unit == 0 { format!("{bytes} B") } else { format!("{value:.1} {}", UNITS[unit]) }
}

/// A time in its two largest units.
pub(super) fn duration(seconds: f64) -> String {
    const UNITS: [(u64, &str); 4] = [(86_400, "d"), (3600, "h"), (60, "min"), (1, "s")];
    let mut left = seconds.max(0.0) as u64;
    let largest = UNITS.iter().position(|(length, _)| left >= *length).unwrap_or(UNITS.len() - 1);
    let mut parts = Vec::new();
    for (length, unit) in UNITS.iter().skip(largest).take(2) {
        if left >= *length || parts.is_empty() {
            parts.push(format!("{} {unit}", left / length));
        }
        left %= length;
    }
    parts.join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_grouped_by_three() {
        assert_eq!(
            ["0", "999", "1,000", "1234,567"].map(|text| text.replace(',', "").parse().map(number).unwrap()),
            ["0", "999", "1,000", "1,234,567"]
        );
        assert_eq!(bytes(999), "999 B");
        assert_eq!(bytes(1_500_000), "1.5 MB");
    }

    #[test]
    fn a_time_is_its_two_largest_units() {
        let times = [0.4, 59.9, 60.0, 3601.0, 3660.0, 90_000.0].map(duration);
        assert_eq!(times, ["0 s", "59 s", "1 min", "1 h", "1 h 1 min", "1 d 1 h"]);
    }
}
