//! One line for each case, and the counts.

use std::sync::{Mutex, PoisonError};

use crate::Options;

/// Where the parts tell what became of their cases; shared by their threads.
pub struct Report {
    options: Options,
    counts: Mutex<Counts>,
}

#[derive(Default)]
struct Counts {
    as_expected: usize,
    otherwise: usize,
    skipped: usize,
}

/// What became of a case.
pub enum Outcome {
    /// As it has to be: how, in a word or a code.
    Expected(String),
    /// Anything else: what was wanted, and what was there.
    Unexpected(String),
    /// There is no such thing on this version.
    Skipped(String),
}

impl Report {
    pub fn new(options: Options) -> Report {
        Report { options, counts: Mutex::default() }
    }

    /// What was asked for.
    pub fn options(&self) -> &Options {
        &self.options
    }

    /// Prints `case, version, class, outcome`. `version`: of PostgreSQL, or `-`; `class`: of
    /// the change, or `-`.
    pub fn case(&self, case: &str, version: &str, class: &str, outcome: Outcome) {
        let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        let outcome = match outcome {
            Outcome::Expected(how) => {
                counts.as_expected += 1;
                how
            }
            Outcome::Unexpected(what) => {
                counts.otherwise += 1;
                format!("UNEXPECTED: {what}")
            }
            Outcome::Skipped(why) => {
                counts.skipped += 1;
                format!("skipped: {why}")
            }
        };
        println!("{case}, {version}, {class}, {outcome}");
    }

    /// The last line. Whether every outcome was the expected one, and there was one.
    pub fn end(&self) -> bool {
        let counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        let Counts { as_expected, otherwise, skipped } = *counts;
        println!(
            "{} cases: {as_expected} as expected, {otherwise} otherwise, {skipped} skipped",
            as_expected + otherwise + skipped
        );
        otherwise == 0 && as_expected > 0
    }
}
