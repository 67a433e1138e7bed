//! Points in time, as a history of schemas shows and is asked for them.

use std::fmt;
use std::str::FromStr;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Deserializer, Serialize, Serializer};

const SECOND: i64 = 1_000_000;
const DAY: i64 = 86_400;
/// From there to 9999-12-31, the last day that has four digits.
const DAYS: i64 = 2_932_896;

/// Microseconds since 1970-01-01 UTC, as the stream carries commit times. Shown as
/// RFC 3339 in UTC.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Moment(pub i64);

impl Moment {
    /// By this machine's clock.
    pub fn now() -> Moment {
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        Moment(since.map_or(0, |since| i64::try_from(since.as_micros()).unwrap_or(i64::MAX)))
    }
}

impl fmt::Display for Moment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (seconds, micros) = (self.0.div_euclid(SECOND), self.0.rem_euclid(SECOND));
        let (days, second) = (seconds.div_euclid(DAY), seconds.rem_euclid(DAY));
        let (year, month, day) = date(days);
        let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
        write!(f, "{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{micros:06}Z")
    }
}

/// A text that is no moment.
#[derive(Debug, thiserror::Error)]
#[error("`{0}` is not a time: expected e.g. 2026-12-01T08:30:00Z, 2026-12-01 09:30+01:00 or 2026-12-01")]
pub struct ParseMomentError(String);

impl FromStr for Moment {
    type Err = ParseMomentError;

    /// RFC 3339; a space for the `T` will do, and seconds, time and offset (UTC then) may
    /// be left out.
    fn from_str(text: &str) -> Result<Moment, ParseMomentError> {
        parse(text.trim()).ok_or_else(|| ParseMomentError(text.to_owned()))
    }
}

impl Serialize for Moment {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Moment {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Moment, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

fn parse(text: &str) -> Option<Moment> {
    let (day, rest) = text.split_at_checked(10)?;
    let mut parts = day.split('-');
    let (year, month, day) = (digits(parts.next()?, 4)?, digits(parts.next()?, 2)?, digits(parts.next()?, 2)?);
    let days = days(year, month, day).filter(|found| parts.next().is_none() && date(*found) == (year, month, day))?;
    let (time, offset) = match rest.chars().next() {
        None => ("", 0),
        Some('T' | 't' | ' ') => offset(rest.get(1..)?)?,
        Some(_) => return None,
    };
    let micros = if time.is_empty() && rest.is_empty() { 0 } else { time_of_day(time)? };
    Some(Moment((days * DAY - offset * 60) * SECOND + micros))
}

/// What stands before the offset, and the offset in minutes.
fn offset(text: &str) -> Option<(&str, i64)> {
    if let Some(time) = text.strip_suffix(['Z', 'z']) {
        return Some((time, 0));
    }
    let Some(at) = text.rfind(['+', '-']) else { return Some((text, 0)) };
    let (time, offset) = text.split_at(at);
    let (hours, minutes) = offset[1..].split_once(':').unwrap_or((&offset[1..], "00"));
    let (hours, minutes) = (digits(hours, 2)?, digits(minutes, 2)?);
    let minutes = (hours < 24 && minutes < 60).then_some(hours * 60 + minutes)?;
    Some((time, if offset.starts_with('-') { -minutes } else { minutes }))
}

fn time_of_day(text: &str) -> Option<i64> {
    let mut parts = text.split(':');
    let (hour, minute) = (digits(parts.next()?, 2)?, digits(parts.next()?, 2)?);
    let (second, fraction) = match parts.next() {
        None => ("00", ""),
        Some(second) => second.split_once('.').unwrap_or((second, "0")),
    };
    let second = digits(second, 2)?;
    let fraction = if fraction.is_empty() { 0 } else { micros(fraction)? };
    let legal = hour < 24 && minute < 60 && second < 60 && parts.next().is_none();
    legal.then_some(((hour * 60 + minute) * 60 + second) * SECOND + fraction)
}

/// What is beyond microseconds is cut off.
fn micros(fraction: &str) -> Option<i64> {
    let kept: String = fraction.chars().chain("000000".chars()).take(6).collect();
    fraction.bytes().all(|byte| byte.is_ascii_digit()).then(|| kept.parse().ok()).flatten()
}

fn digits(text: &str, count: usize) -> Option<i64> {
    (text.len() == count && text.bytes().all(|byte| byte.is_ascii_digit())).then(|| text.parse().ok()).flatten()
}

/// Days since 1970-01-01 of a date of the Gregorian calendar: years begin in March here,
/// so that the leap day is the last of one, and 400 of them are 146,097 days.
fn days(year: i64, month: i64, day: i64) -> Option<i64> {
    if !(1..=12).contains(&month) || !(1..=31).contains(&day) || !(1..=9999).contains(&year) {
        return None;
    }
    let year = if month > 2 { year } else { year - 1 };
    let (era, of_era) = (year.div_euclid(400), year.rem_euclid(400));
    let of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    Some(era * 146_097 + of_era * 365 + of_era / 4 - of_era / 100 + of_year - 719_468)
}

/// The date so many days after 1970-01-01.
fn date(days: i64) -> (i64, i64, i64) {
    let days = days.min(DAYS) + 719_468;
    let (era, of_era) = (days.div_euclid(146_097), days.rem_euclid(146_097));
    let year = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year + year / 4 - year / 100);
    let month = (5 * of_year + 2) / 153;
    let day = of_year - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    (era * 400 + year + i64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn read(text: &str) -> i64 {
        text.parse::<Moment>().unwrap().0
    }

    /// The numbers are `extract(epoch from …)` of PostgreSQL.
    #[test]
    fn moments_are_read_in_every_usual_way() {
        assert_eq!(read("1970-01-01T00:00:00Z"), 0);
        assert_eq!(read("2026-12-01T08:30:15.25Z"), 1_796_113_815_250_000);
        assert_eq!(read("2026-12-01 09:30:15.25+01:00"), 1_796_113_815_250_000);
        assert_eq!(read("2026-12-01 05:00:15.250000999-03:30"), 1_796_113_815_250_000);
        assert_eq!(read("2026-12-01 08:30"), 1_796_113_800_000_000);
        assert_eq!(read("2026-12-01"), 1_796_083_200_000_000);
        assert_eq!(read("2024-02-29t00:00:00z"), 1_709_164_800_000_000);
        assert_eq!(read("1969-12-31T23:59:59.999999Z"), -1);
    }

    #[test]
    fn what_is_no_moment_is_refused() {
        for text in [
            "",
            "16/B374D848",
            "2026-02-29",
            "2026-13-01",
            "2026-12-00",
            "0000-01-01",
            "2026-12-01T",
            "2026-12-01T08",
            "2026-12-01T24:00:00Z",
            "2026-12-01T08:60Z",
            "2026-12-01T08:30:00.x",
            "2026-12-01T08:30:00+25:00",
            "2026-12-01X08:30:00",
            "1.12.2026",
            "yesterday",
        ] {
            assert!(text.parse::<Moment>().is_err(), "{text}");
        }
    }

    #[test]
    fn what_is_shown_is_read_back() {
        for micros in
            [0, -1, 1_796_113_815_250_001, 951_782_400_000_000, -62_135_596_800_000_000, 253_402_300_799_999_999]
        {
            let shown = Moment(micros).to_string();
            assert_eq!(read(&shown), micros, "{shown}");
        }
        assert_eq!(Moment(1_796_113_815_250_000).to_string(), "2026-12-01T08:30:15.250000Z");
        // Every day of 800 years.
        for day in (-146_097..146_097).step_by(1) {
            let (year, month, of_month) = date(day);
            assert_eq!(days(year, month, of_month), Some(day));
        }
    }
}
