//! Ranges of a table's key: what a copy is cut into that can be resumed (P19).
//!
//! Only types that the host compares exactly as PostgreSQL does: a row that falls into one
//! range there and into another here would be copied twice or never.

use std::sync::Arc;

/// Ranges of one table.
const MOST_RANGES: usize = 10_000;
/// A range is not larger: what is copied again after a restart, for each connection.
const MOST_BYTES: u64 = 256 << 20;

/// How a key's values are ordered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyType {
    /// `int2`, `int4`, `int8`.
    Integer,
    /// `uuid`: by its bytes.
    Uuid,
}

impl KeyType {
    /// Of a base type; none if its order is not known here.
    pub fn of(base: &str) -> Option<KeyType> {
        match base {
            "int2" | "int4" | "int8" => Some(KeyType::Integer),
            "uuid" => Some(KeyType::Uuid),
            _ => None,
        }
    }

    /// As it is stored.
    pub fn as_str(self) -> &'static str {
        match self {
            KeyType::Integer => "integer",
            KeyType::Uuid => "uuid",
        }
    }

    pub(crate) fn parse(text: &str) -> Option<KeyType> {
        [KeyType::Integer, KeyType::Uuid].into_iter().find(|kind| kind.as_str() == text)
    }

    /// A number for a value as PostgreSQL prints it, in the order of the values.
    pub fn read(self, text: &[u8]) -> Option<u128> {
        let text = std::str::from_utf8(text).ok()?;
        match self {
            KeyType::Integer => {
                let value: i64 = text.parse().ok()?;
                Some((i128::from(value) - i128::from(i64::MIN)).unsigned_abs())
            }
            KeyType::Uuid => {
                let digits: Vec<&str> = text.split('-').collect();
                let lengths: Vec<usize> = digits.iter().map(|part| part.len()).collect();
                let plain = digits.concat();
                let legal = lengths == [8, 4, 4, 4, 12] && plain.bytes().all(|byte| byte.is_ascii_hexdigit());
                u128::from_str_radix(&plain, 16).ok().filter(|_| legal)
            }
        }
    }

    /// The value that a number stands for, as PostgreSQL reads it.
    pub fn show(self, number: u128) -> String {
        match self {
            KeyType::Integer => {
                (i128::try_from(number).unwrap_or(i128::MAX).saturating_add(i128::from(i64::MIN))).to_string()
            }
            KeyType::Uuid => {
                let hex = format!("{number:032x}");
                [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]].join("-")
            }
        }
    }
}

/// The ranges: each ends with its bound, itself included; the first has no beginning and
/// the last no end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyRanges {
    kind: KeyType,
    bounds: Arc<[u128]>,
}

impl KeyRanges {
    /// Cuts by a histogram of equally full buckets, as `pg_stats` has it, and these further
    /// until a range has no more than so many bytes. None if that gives no ranges.
    pub fn cut(kind: KeyType, histogram: &[String], bytes: u64) -> Option<KeyRanges> {
        let values: Option<Vec<u128>> = histogram.iter().map(|text| kind.read(text.as_bytes())).collect();
        let values = values.filter(|values| values.len() > 2 && values.is_sorted())?;
        let buckets = values.len() - 1;
        let parts = (bytes / buckets as u64).div_ceil(MOST_BYTES).clamp(1, (MOST_RANGES / buckets).max(1) as u64);
        let parts = u128::from(parts);
        let mut bounds = Vec::new();
        for pair in values.windows(2) {
            let width = pair[1] - pair[0];
            let at = |part: u128| pair[0] + width / parts * part + width % parts * part / parts;
            bounds.extend((1..=parts).map(at));
        }
        // Above the last bound of the histogram there is next to nothing.
        bounds.pop();
        bounds.dedup();
        bounds.truncate(MOST_RANGES - 1);
        Some(KeyRanges { kind, bounds: bounds.into() })
    }

    /// From what is stored; none if that is no list of growing bounds.
    pub fn stored(kind: KeyType, bounds: &[String]) -> Option<KeyRanges> {
        let bounds: Option<Vec<u128>> = bounds.iter().map(|text| kind.read(text.as_bytes())).collect();
        let bounds = bounds.filter(|bounds| bounds.is_sorted_by(|a, b| a < b))?;
        Some(KeyRanges { kind, bounds: bounds.into() })
    }

    /// The order of the keys.
    pub fn kind(&self) -> KeyType {
        self.kind
    }

    /// The bounds, as PostgreSQL reads them.
    pub fn bounds(&self) -> Vec<String> {
        self.bounds.iter().map(|bound| self.kind.show(*bound)).collect()
    }

    /// How many there are; one at least.
    pub fn count(&self) -> usize {
        self.bounds.len() + 1
    }

    /// The range of a value as PostgreSQL prints it; none if it is no such value.
    pub fn of(&self, text: &[u8]) -> Option<usize> {
        let key = self.kind.read(text)?;
        Some(self.bounds.partition_point(|bound| *bound < key))
    }

    /// Beyond what a range begins, and with what it ends.
    pub fn span(&self, number: usize) -> (Option<String>, Option<String>) {
        let show = |bound: &u128| self.kind.show(*bound);
        let before = number.checked_sub(1).and_then(|before| self.bounds.get(before));
        (before.map(show), self.bounds.get(number).map(show))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cut(values: &[i64], bytes: u64) -> Vec<i64> {
        let texts: Vec<String> = values.iter().map(i64::to_string).collect();
        let ranges = KeyRanges::cut(KeyType::Integer, &texts, bytes).unwrap();
        ranges.bounds().iter().map(|bound| bound.parse().unwrap()).collect()
    }

    #[test]
    fn buckets_are_ranges_whose_ends_are_open() {
        assert_eq!(cut(&[1, 100, 200, 300], 1 << 20), [100, 200]);
        let texts: Vec<String> = [1, 100, 200, 300].iter().map(i32::to_string).collect();
        let ranges = KeyRanges::cut(KeyType::Integer, &texts, 1 << 20).unwrap();
        assert_eq!(ranges.count(), 3);
        assert_eq!(ranges.span(0), (None, Some("100".to_owned())));
        assert_eq!(ranges.span(1), (Some("100".to_owned()), Some("200".to_owned())));
        assert_eq!(ranges.span(2), (Some("200".to_owned()), None));
    }

    #[test]
    fn buckets_that_are_large_are_cut_further_and_never_into_too_many() {
        assert_eq!(cut(&[0, 100, 200], 1 << 30), [50, 100, 150]);
        assert_eq!(cut(&[0, 100, 200], 2 << 30), [25, 50, 75, 100, 125, 150, 175]);
        assert_eq!(cut(&[0, 1, 2], 2 << 30), [0, 1], "there is nothing between");
        let hundred: Vec<i64> = (0..=100).map(|value| value << 40).collect();
        assert_eq!(cut(&hundred, 1 << 60).len(), 9_999);
        assert_eq!(cut(&[i64::MIN, -5, i64::MAX], 1 << 20), [-5]);
        let wide = cut(&[i64::MIN, 0, i64::MAX], 4 << 30);
        assert_eq!((wide.len(), wide[7]), (15, 0));
    }

    #[test]
    fn a_histogram_that_is_none_gives_no_ranges() {
        let of = |values: &[&str]| {
            let texts: Vec<String> = values.iter().map(|value| (*value).to_owned()).collect();
            KeyRanges::cut(KeyType::Integer, &texts, 1)
        };
        assert_eq!(of(&[]), None);
        assert_eq!(of(&["1", "2"]), None);
        assert_eq!(of(&["1", "x", "2"]), None);
        assert_eq!(of(&["1", "3", "2"]), None);
    }

    #[test]
    fn every_key_is_in_the_range_whose_condition_it_satisfies() {
        let ranges = KeyRanges::stored(KeyType::Integer, &["-3".to_owned(), "7".to_owned()]).unwrap();
        let of = |key: &str| ranges.of(key.as_bytes());
        assert_eq!(of("-9223372036854775808"), Some(0));
        assert_eq!((of("-3"), of("-2"), of("7"), of("8")), (Some(0), Some(1), Some(1), Some(2)));
        assert_eq!(of("9223372036854775807"), Some(2));
        assert_eq!((of("1.5"), of("")), (None, None));
        assert_eq!(KeyRanges::stored(KeyType::Integer, &["2".to_owned(), "2".to_owned()]), None);
    }

    #[test]
    fn uuids_are_ordered_by_their_bytes() {
        let uuid = |first: &str| format!("{first}-0000-7000-8000-00000000000a");
        let ranges = KeyRanges::stored(KeyType::Uuid, &[uuid("0fffffff"), uuid("f0000000")]).unwrap();
        assert_eq!(ranges.bounds(), [uuid("0fffffff"), uuid("f0000000")]);
        assert_eq!(ranges.of(uuid("0fffffff").as_bytes()), Some(0));
        assert_eq!(ranges.of(uuid("10000000").as_bytes()), Some(1));
        assert_eq!(ranges.of(uuid("ffffffff").as_bytes()), Some(2));
        assert_eq!(ranges.of(b"+fffffff-0000-7000-8000-00000000000a"), None);
    }
}
