//! Warnings as a limit comes near: once each time a mark is passed.

/// Percent of a limit that are warned of.
const MARKS: [u8; 2] = [50, 80];

/// What was warned of.
#[derive(Debug, Default)]
pub(super) struct Marks {
    warned: u8,
}

impl Marks {
    /// The mark whose warning is due: the next one only beyond the next mark, or when
    /// this one was left in between.
    pub fn passed(&mut self, used: Option<u8>) -> Option<u8> {
        let mark = MARKS.iter().rev().copied().find(|mark| used.is_some_and(|used| used >= *mark)).unwrap_or(0);
        let due = mark > self.warned;
        self.warned = mark;
        due.then_some(mark)
    }
}

/// Percent of a limit; none without one.
pub(super) fn percent(used: u64, limit: u64) -> Option<u8> {
    let percent = (u128::from(used) * 100).checked_div(u128::from(limit))?;
    u8::try_from(percent.min(100)).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_mark_is_warned_of_once_until_it_is_left() {
        let mut marks = Marks::default();
        let due: Vec<_> = [10, 50, 55, 81, 90, 60, 85, 20, 51].map(|used| marks.passed(Some(used))).into();
        assert_eq!(due, [None, Some(50), None, Some(80), None, None, Some(80), None, Some(50)]);
    }

    #[test]
    fn a_percentage_is_of_a_limit_and_never_above_it() {
        assert_eq!(percent(25, 100), Some(25));
        assert_eq!(percent(u64::MAX, 100), Some(100));
        assert_eq!(percent(5, 0), None);
    }
}
