//! PostgreSQL's text of date, time, timestamp and timestamptz to numbers.
//!
//! Sessions pin `DateStyle = ISO` and `TimeZone = UTC`; other offsets are read all the
//! same, seconds in them included. `None` makes the cell an odd one: infinities,
//! 24:00:00, and the timestamps after 294247-01-10, which PostgreSQL has and an int64 of
//! microseconds since 1970 has not.

const MICROS_PER_SECOND: i64 = 1_000_000;
const MICROS_PER_DAY: i64 = 86_400 * MICROS_PER_SECOND;

/// Days since 1970-01-01.
pub(super) fn date(text: &[u8]) -> Option<i32> {
    let (date, rest) = calendar(text)?;
    i32::try_from(date.days(era(rest)?)?).ok()
}

/// Microseconds since midnight, less than a day.
pub(super) fn time(text: &[u8]) -> Option<i64> {
    let (micros, rest) = clock(text)?;
    if rest.is_empty() { Some(micros) } else { None }
}

/// Microseconds since 1970-01-01 00:00:00.
pub(super) fn timestamp(text: &[u8]) -> Option<i64> {
    let (date, rest) = calendar(text)?;
    let (micros, rest) = clock(rest.strip_prefix(b" ")?)?;
    date.days(era(rest)?)?.checked_mul(MICROS_PER_DAY)?.checked_add(micros)
}

/// Microseconds since 1970-01-01 00:00:00 UTC.
pub(super) fn timestamptz(text: &[u8]) -> Option<i64> {
    let (date, rest) = calendar(text)?;
    let (micros, rest) = clock(rest.strip_prefix(b" ")?)?;
    let (offset, rest) = offset(rest)?;
    let micros = micros - offset * MICROS_PER_SECOND;
    date.days(era(rest)?)?.checked_mul(MICROS_PER_DAY)?.checked_add(micros)
}

/// Year as printed, month and day; the era comes at the end of the text.
struct Calendar {
    year: i64,
    month: i64,
    day: i64,
}

impl Calendar {
    /// Days since 1970-01-01 in the proleptic Gregorian calendar, after Howard Hinnant's
    /// `days_from_civil`: years begin in March, so that the leap day comes last.
    fn days(&self, before_christ: bool) -> Option<i64> {
        let year = if before_christ { 1 - self.year } else { self.year };
        if self.day > days_in_month(year, self.month) {
            return None;
        }
        let year = year - i64::from(self.month <= 2);
        let era = year.div_euclid(400);
        let year_of_era = year - era * 400;
        let day_of_year = (153 * ((self.month + 9) % 12) + 2) / 5 + self.day - 1;
        let day_of_era = year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year;
        Some(era * 146_097 + day_of_era - 719_468)
    }
}

fn days_in_month(year: i64, month: i64) -> i64 {
    match month {
        4 | 6 | 9 | 11 => 30,
        2 if year % 4 == 0 && (year % 100 != 0 || year % 400 == 0) => 29,
        2 => 28,
        _ => 31,
    }
}

/// `YYYY-MM-DD` with a year of four to seven digits.
#[inline]
fn calendar(text: &[u8]) -> Option<(Calendar, &[u8])> {
    let mut year = 0i64;
    let mut digits = 0;
    while let Some(digit) = text.get(digits).and_then(|byte| digit(*byte)) {
        year = year * 10 + digit;
        digits += 1;
        if digits > 7 {
            return None;
        }
    }
    let [b'-', m1, m2, b'-', d1, d2, rest @ ..] = &text[digits..] else { return None };
    let (month, day) = (pair(*m1, *m2)?, pair(*d1, *d2)?);
    if digits < 4 || year == 0 || !(1..=12).contains(&month) || day == 0 {
        return None;
    }
    Some((Calendar { year, month, day }, rest))
}

/// `HH:MM:SS[.ffffff]`.
#[inline]
fn clock(text: &[u8]) -> Option<(i64, &[u8])> {
    let [h1, h2, b':', m1, m2, b':', s1, s2, rest @ ..] = text else { return None };
    let (hours, minutes, seconds) = (pair(*h1, *h2)?, pair(*m1, *m2)?, pair(*s1, *s2)?);
    if hours > 23 || minutes > 59 || seconds > 59 {
        return None;
    }
    let micros = ((hours * 60 + minutes) * 60 + seconds) * MICROS_PER_SECOND;
    match rest {
        [b'.', fraction @ ..] => {
            let (fraction, rest) = fraction_micros(fraction)?;
            Some((micros + fraction, rest))
        }
        _ => Some((micros, rest)),
    }
}

fn fraction_micros(text: &[u8]) -> Option<(i64, &[u8])> {
    let mut value = 0;
    let mut digits = 0;
    while let Some(digit) = text.get(digits).and_then(|byte| digit(*byte)) {
        value = value * 10 + digit;
        digits += 1;
        if digits > 6 {
            return None;
        }
    }
    if digits == 0 { None } else { Some((value * 10i64.pow(6 - digits as u32), &text[digits..])) }
}

/// `+HH[:MM[:SS]]` in seconds east of Greenwich.
#[inline]
fn offset(text: &[u8]) -> Option<(i64, &[u8])> {
    let [sign, h1, h2, rest @ ..] = text else { return None };
    let (mut seconds, mut rest) = (pair(*h1, *h2)? * 3600, rest);
    if let [b':', m1, m2, after @ ..] = rest {
        seconds += pair(*m1, *m2)? * 60;
        rest = after;
        if let [b':', s1, s2, after @ ..] = rest {
            seconds += pair(*s1, *s2)?;
            rest = after;
        }
    }
    match sign {
        b'+' => Some((seconds, rest)),
        b'-' => Some((-seconds, rest)),
        _ => None,
    }
}

/// Whether the rest of the text says BC.
fn era(rest: &[u8]) -> Option<bool> {
    match rest {
        b"" => Some(false),
        b" BC" => Some(true),
        _ => None,
    }
}

#[inline]
fn digit(byte: u8) -> Option<i64> {
    let digit = byte.wrapping_sub(b'0');
    if digit < 10 { Some(i64::from(digit)) } else { None }
}

#[inline]
fn pair(tens: u8, ones: u8) -> Option<i64> {
    Some(digit(tens)? * 10 + digit(ones)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_count_days_from_1970_through_both_eras_to_the_last_year() {
        assert_eq!(date(b"1970-01-01"), Some(0));
        assert_eq!(date(b"2000-02-29"), Some(11_016));
        assert_eq!(date(b"1969-12-31"), Some(-1));
        assert_eq!(date(b"0001-01-01"), Some(-719_162));
        assert_eq!(date(b"0001-12-31 BC"), Some(-719_163));
        // Julian day 0, PostgreSQL's first.
        assert_eq!(date(b"4714-11-24 BC"), Some(-2_440_588));
        // Julian day 2147483493, its last.
        assert_eq!(date(b"5874897-12-31"), Some(2_147_483_493 - 2_440_588));
    }

    #[test]
    fn a_leap_day_before_christ_is_one_of_the_astronomical_year() {
        // 1 BC is year 0, a leap year.
        assert_eq!(date(b"0001-02-29 BC"), Some(date(b"0001-03-01 BC").unwrap() - 1));
        assert_eq!(date(b"0002-02-29 BC"), None);
    }

    #[test]
    fn what_is_no_date_of_the_calendar_is_not_read_as_another() {
        for wrong in [
            "infinity",
            "-infinity",
            "2023-02-29",
            "2023-04-31",
            "2023-00-01",
            "2023-13-01",
            "2023-01-00",
            "0000-01-01",
            "123-01-01",
            "2023-1-01",
            "2023-01-01 AD",
            "2023-01-01x",
            "20230-01-0",
            "12345678-01-01",
            "",
        ] {
            assert_eq!(date(wrong.as_bytes()), None, "{wrong}");
        }
    }

    #[test]
    fn times_count_microseconds_and_24_00_is_not_one() {
        assert_eq!(time(b"00:00:00"), Some(0));
        assert_eq!(time(b"23:59:59.999999"), Some(86_399_999_999));
        assert_eq!(time(b"12:00:00.5"), Some(43_200_500_000));
        assert_eq!(time(b"12:00:00.000005"), Some(43_200_000_005));
        for wrong in ["24:00:00", "12:60:00", "12:00:60", "12:00", "12:00:00.", "12:00:00.1234567", "12:00:00+00"] {
            assert_eq!(time(wrong.as_bytes()), None, "{wrong}");
        }
    }

    #[test]
    fn timestamps_reach_as_far_as_an_int64_of_microseconds_since_1970() {
        assert_eq!(timestamp(b"1970-01-01 00:00:01"), Some(1_000_000));
        assert_eq!(timestamp(b"1969-12-31 23:59:59.999999"), Some(-1));
        assert_eq!(timestamp(b"294247-01-10 04:00:54.775807"), Some(i64::MAX));
        assert_eq!(timestamp(b"294247-01-10 04:00:54.775808"), None);
        assert_eq!(timestamp(b"294276-12-31 23:59:59.999999"), None);
        assert_eq!(timestamp(b"4714-11-24 00:00:00 BC"), Some(-2_440_588 * MICROS_PER_DAY));
        for wrong in ["infinity", "-infinity", "1970-01-01", "1970-01-01 24:00:00", "1970-01-01T00:00:00"] {
            assert_eq!(timestamp(wrong.as_bytes()), None, "{wrong}");
        }
    }

    #[test]
    fn offsets_of_timestamptz_may_have_minutes_and_seconds() {
        let noon = timestamp(b"1900-01-01 12:00:00");
        assert!(noon.is_some());
        assert_eq!(timestamptz(b"1900-01-01 12:00:00+00"), noon);
        assert_eq!(timestamptz(b"1900-01-01 17:30:00+05:30"), noon);
        assert_eq!(timestamptz(b"1900-01-01 12:19:32+00:19:32"), noon);
        assert_eq!(timestamptz(b"1900-01-01 07:03:58-04:56:02"), noon);
        assert_eq!(timestamptz(b"0044-03-15 12:00:00+00 BC"), timestamp(b"0044-03-15 12:00:00 BC"));
        for wrong in [
            "infinity",
            "1900-01-01 12:00:00",
            "1900-01-01 12:00:00Z",
            "1900-01-01 12:00:00+0",
            "1900-01-01 12:00:00+05:3",
        ] {
            assert_eq!(timestamptz(wrong.as_bytes()), None, "{wrong}");
        }
    }
}
