//! What happens after a failure: one table, and the pause between tries.

use std::time::Duration;

use rand::Rng;

use crate::wire;

/// What the host does about a plugin's failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Action {
    /// The same call again, after a pause.
    Retry,
    /// The table stops at this destination and needs a resync; the rest goes on.
    FailTable,
    /// All of the destination waits and tries again slowly: only an operator can help.
    Suspend,
}

/// The whole policy: class and scope of a failure to what is done about it.
///
/// A permanent row failure stops its table: rows are not quarantined yet.
pub(super) fn action(failure: &wire::Failure) -> Action {
    use wire::{FailureClass as Class, FailureScope as Scope};
    match (failure.class, failure.scope) {
        (Class::Transient, _) => Action::Retry,
        (Class::Permanent, Scope::Row | Scope::Table) => Action::FailTable,
        (Class::Permanent, Scope::Destination) => Action::Suspend,
    }
}

/// Exponential pauses with jitter. Never gives up; progress resets it.
#[derive(Debug)]
pub(super) struct Backoff {
    tries: u32,
    first: Duration,
    most: Duration,
}

impl Backoff {
    /// For what usually passes by itself: 100 ms doubling to 30 s.
    pub fn transient() -> Backoff {
        Backoff { tries: 0, first: Duration::from_millis(100), most: Duration::from_secs(30) }
    }

    /// The next pause, at least `asked`: between half and all of the doubled one, so
    /// that many who failed together do not come back together.
    pub fn pause(&mut self, asked: Option<Duration>) -> Duration {
        let doubled = self.first.saturating_mul(1 << self.tries.min(16)).min(self.most);
        self.tries = self.tries.saturating_add(1);
        let jittered = doubled.mul_f64(rand::rng().random_range(0.5..=1.0));
        jittered.max(asked.unwrap_or_default().min(Duration::from_secs(600)))
    }

    /// The longest pause at once, for what only an operator can mend.
    pub fn slow(&mut self) -> Duration {
        self.tries = 16;
        self.most
    }

    /// Something went well: the next failure is a new one.
    pub fn reset(&mut self) {
        self.tries = 0;
    }

    /// Failures since the last progress.
    pub fn tries(&self) -> u32 {
        self.tries
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_to_their_bound_and_progress_resets_them() {
        let mut backoff = Backoff::transient();
        assert!(backoff.pause(None) <= Duration::from_millis(100));
        for _ in 0..1000 {
            assert!(backoff.pause(None) <= Duration::from_secs(30));
        }
        assert!(backoff.pause(None) >= Duration::from_secs(15));
        backoff.reset();
        assert!(backoff.pause(None) <= Duration::from_millis(100));
    }

    #[test]
    fn a_destination_that_asks_for_a_pause_gets_it() {
        let mut backoff = Backoff::transient();
        assert!(backoff.pause(Some(Duration::from_secs(5))) >= Duration::from_secs(5));
    }
}
