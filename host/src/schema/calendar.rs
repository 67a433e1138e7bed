//! Dates and times that mean one moment under every setting.

use super::defaults::is_digits;

/// The number that exactly `width` digits are.
fn number(text: &str, width: usize) -> Option<u32> {
    (is_digits(text) && text.len() == width).then(|| text.parse().ok()).flatten()
}

/// `YYYY-MM-DD`, which every `DateStyle` reads the same way.
pub(super) fn is_date(text: &str) -> bool {
    let parsed = || {
        let (year, rest) = text.split_once('-')?;
        let (month, day) = rest.split_once('-')?;
        let year = number(year, 4)?;
        let month = number(month, 2)?;
        let leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
        let days = match month {
            4 | 6 | 9 | 11 => 30,
            2 if leap => 29,
            2 => 28,
            1..=12 => 31,
            _ => return None,
        };
        Some(year > 0 && (1..=days).contains(&number(day, 2)?))
    };
    parsed().unwrap_or(false)
}

/// Digits of a second that a type keeps.
pub(super) fn precision(modifier: Option<i64>) -> usize {
    modifier.map_or(6, |modifier| usize::try_from(modifier).unwrap_or(0).min(6))
}

/// `HH:MM:SS`, with a fraction of up to `precision` digits.
pub(super) fn is_time(text: &str, precision: usize) -> bool {
    let parsed = || {
        let mut parts = text.split(':');
        let (hour, minute) = (number(parts.next()?, 2)?, number(parts.next()?, 2)?);
        let seconds = parts.next()?;
        let (second, fraction) = seconds.split_once('.').map_or((seconds, None), |(s, f)| (s, Some(f)));
        let fraction = fraction.is_none_or(|fraction| is_digits(fraction) && fraction.len() <= precision);
        Some(hour < 24 && minute < 60 && number(second, 2)? < 60 && fraction && parts.next().is_none())
    };
    parsed().unwrap_or(false)
}

/// A date, a space and a time.
pub(super) fn is_timestamp(text: &str, precision: usize) -> bool {
    text.split_once(' ').is_some_and(|(date, time)| is_date(date) && is_time(time, precision))
}

/// A timestamp with its offset: without one it depends on a setting.
pub(super) fn is_timestamptz(text: &str, precision: usize) -> bool {
    let Some(sign) = text.rfind(['+', '-']).filter(|index| *index > "YYYY-MM-DD".len()) else { return false };
    let mut parts = text[sign + 1..].split(':');
    let hours = parts.next().and_then(|hours| number(hours, 2)).is_some_and(|hours| hours < 16);
    let mut count = 0;
    let rest = parts.all(|part| {
        count += 1;
        number(part, 2).is_some_and(|number| number < 60)
    });
    hours && rest && count <= 2 && is_timestamp(&text[..sign], precision)
}
