//! What happens after a failure: one table, and the pause between tries.

use std::time::Duration;

use rand::Rng;

use crate::wire;
use wire::FailureClass::{self, Permanent, Transient};
use wire::FailureScope::{self, Row, Table};

/// What the host does about a plugin's failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Action {
    /// The same call again, after a pause; never given up.
    Retry,
    /// A new instance, after a pause: this one has lost what it wrote to.
    Reopen,
    /// The rows at fault are found and kept in quarantine; the rest goes on.
    Isolate,
    /// The table stops at this destination and needs a resync; the rest goes on.
    FailTable,
    /// All of the destination waits and tries again slowly: only an operator can help.
    Suspend,
}

/// One line of the policy; what is none fits any.
struct Rule {
    class: Option<FailureClass>,
    scope: Option<FailureScope>,
    code: Option<&'static str>,
    action: Action,
}

/// The whole policy: class, scope and code of a failure to what is done about it. The
/// first line that fits holds, and the last fits all.
const POLICY: &[Rule] = &[
    Rule { class: None, scope: None, code: Some("fenced"), action: Action::Reopen },
    Rule { class: None, scope: None, code: Some("throttled"), action: Action::Retry },
    Rule { class: Some(Transient), scope: None, code: None, action: Action::Retry },
    Rule { class: None, scope: None, code: Some("resync-needed"), action: Action::FailTable },
    Rule { class: None, scope: None, code: Some("name-collision"), action: Action::FailTable },
    // Fewer rows may not be.
    Rule { class: None, scope: None, code: Some("too-large"), action: Action::Isolate },
    Rule { class: None, scope: None, code: Some("row-missing"), action: Action::Isolate },
    Rule { class: Some(Permanent), scope: Some(Row), code: None, action: Action::Isolate },
    Rule { class: Some(Permanent), scope: Some(Table), code: None, action: Action::FailTable },
    Rule { class: None, scope: None, code: None, action: Action::Suspend },
];

/// Looks a failure up in the policy.
pub(super) fn action(failure: &wire::Failure) -> Action {
    let fits = |rule: &&Rule| {
        rule.class.is_none_or(|class| class == failure.class)
            && rule.scope.is_none_or(|scope| scope == failure.scope)
            && rule.code.is_none_or(|code| code == failure.code)
    };
    POLICY.iter().find(fits).map_or(Action::Suspend, |rule| rule.action)
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

    /// The next pause is short again, although nothing has gone well yet.
    pub fn ease(&mut self) {
        self.tries = self.tries.min(1);
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
    fn each_class_scope_and_code_has_its_action() {
        use FailureScope::Destination;
        for (class, scope, code, expected) in [
            (Transient, Row, "a.b", Action::Retry),
            (Transient, Table, "a.b", Action::Retry),
            (Transient, Destination, "a.b", Action::Retry),
            (Permanent, Row, "a.b", Action::Isolate),
            (Permanent, Table, "a.b", Action::FailTable),
            (Permanent, Destination, "a.b", Action::Suspend),
            (Permanent, Destination, "throttled", Action::Retry),
            (Permanent, Destination, "fenced", Action::Reopen),
            (Permanent, Table, "fenced", Action::Reopen),
            (Permanent, Destination, "too-large", Action::Isolate),
            (Transient, Destination, "too-large", Action::Retry),
            (Permanent, Row, "row-missing", Action::Isolate),
            (Permanent, Destination, "resync-needed", Action::FailTable),
            (Permanent, Table, "unsupported", Action::FailTable),
            (Permanent, Row, "unsupported", Action::Isolate),
        ] {
            let failure = wire::Failure {
                class,
                scope,
                table_id: None,
                code: code.to_owned(),
                message: String::new(),
                retry_after_ms: None,
                rows: Vec::new(),
            };
            assert_eq!(action(&failure), expected, "{class:?} {scope:?} {code}");
        }
    }

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
