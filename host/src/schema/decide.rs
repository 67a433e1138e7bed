//! From what a change means to what is done about it.

use serde::{Deserialize, Serialize};

use super::classify::Class;

/// How far a destination's operator trusts schema changes (`apply` in the
/// configuration).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ApplyMode {
    /// Follow the source wherever that is certain.
    #[default]
    AutoSafe,
    /// Follow, but let the operator release each change once it is staged.
    StagedRollout,
    /// Nothing without approval.
    ManualReview,
    /// Follow, but never take anything away.
    BlockDestructive,
}

impl ApplyMode {
    /// As the configuration spells it.
    pub fn as_str(self) -> &'static str {
        match self {
            ApplyMode::AutoSafe => "auto-safe",
            ApplyMode::StagedRollout => "staged-rollout",
            ApplyMode::ManualReview => "manual-review",
            ApplyMode::BlockDestructive => "block-destructive",
        }
    }
}

/// What happens to a change at one destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Decision {
    /// It runs now.
    AutoApply,
    /// It is prepared, and runs when it is released.
    StageThenApply,
    /// It waits for an operator, and the table's rows behind it wait too.
    ManualReview,
    /// It is refused: only another configuration or a resync leads on.
    Block,
}

/// What to do about a change of a class under a mode; nothing else counts.
pub fn decide(class: Class, mode: ApplyMode) -> Decision {
    use {ApplyMode as Mode, Class as Is, Decision as Do};
    match (class, mode) {
        // No mode allows what has no safe way at all.
        (Is::BlockedByPolicy, _) => Do::Block,
        (_, Mode::ManualReview) => Do::ManualReview,
        // Somebody has to say what becomes of the rows that are there.
        (Is::RequiresMapping, _) => Do::ManualReview,
        (Is::Compatible, Mode::AutoSafe | Mode::BlockDestructive) => Do::AutoApply,
        // A mirror follows its source: ordinals prove that it was a drop.
        (Is::DestructiveOrAmbiguous, Mode::AutoSafe) => Do::AutoApply,
        (Is::DestructiveOrAmbiguous, Mode::BlockDestructive) => Do::Block,
        (Is::Compatible | Is::DestructiveOrAmbiguous, Mode::StagedRollout) => Do::StageThenApply,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_decision_follows_from_class_and_mode() {
        use Decision::*;
        let modes =
            [ApplyMode::AutoSafe, ApplyMode::StagedRollout, ApplyMode::ManualReview, ApplyMode::BlockDestructive];
        let table = [
            (Class::Compatible, [AutoApply, StageThenApply, ManualReview, AutoApply]),
            (Class::DestructiveOrAmbiguous, [AutoApply, StageThenApply, ManualReview, Block]),
            (Class::RequiresMapping, [ManualReview; 4]),
            (Class::BlockedByPolicy, [Block; 4]),
        ];
        for (class, decisions) in table {
            assert_eq!(modes.map(|mode| decide(class, mode)), decisions, "{class:?}");
        }
    }

    #[test]
    fn modes_are_spelled_as_in_the_configuration() {
        for name in ["auto-safe", "staged-rollout", "manual-review", "block-destructive"] {
            let mode: ApplyMode = serde_json::from_value(name.into()).unwrap();
            assert_eq!(serde_json::to_value(mode).unwrap(), name);
        }
        assert_eq!(ApplyMode::default(), ApplyMode::AutoSafe);
    }
}
