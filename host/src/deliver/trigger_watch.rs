//! The DDL trigger, watched while we run: without it some schema changes are not certain,
//! and nobody sees that it is gone before one is missed.

use tokio_postgres::Client;

use crate::error::{Error, Result};
use crate::source::trigger::{TriggerState, complaint, state};
use crate::status::{StatusBoard, StatusError};

/// See the module.
pub(super) struct TriggerWatch {
    /// Whether its key was there at the start, without which its messages prove nothing.
    used: bool,
    known: Option<TriggerState>,
}

impl TriggerWatch {
    /// `used`: its key was read at the start.
    pub fn new(used: bool) -> TriggerWatch {
        TriggerWatch { used, known: None }
    }

    /// Whether it tells all that happens, as far as is known.
    pub fn tells(&self) -> bool {
        self.used && self.known == Some(TriggerState::Ready)
    }

    /// Looks, tells `status`, and warns when it is not as before.
    ///
    /// Errors: `source.sql`, `source.connection-lost`.
    pub async fn look(&mut self, client: &Client, board: &StatusBoard) -> Result<()> {
        let found = state(client).await?;
        self.found(found, board);
        Ok(())
    }

    /// The same with what was found elsewhere.
    pub fn found(&mut self, found: TriggerState, board: &StatusBoard) {
        let before = self.known.replace(found);
        if before == Some(found) {
            return;
        }
        let error = complaint(found).or_else(|| (!self.used).then(unused));
        board.update(|report| report.trigger = error.as_ref().map(StatusError::from));
        match (error, before) {
            (Some(error), _) => tracing::warn!(code = error.code(), next = error.next_step(), "{error}"),
            (None, Some(_)) => tracing::info!("the DDL trigger is at work again"),
            (None, None) => {}
        }
    }
}

fn unused() -> Error {
    Error::no("trigger.unused", "the DDL trigger was installed after this process had started, which does not use it")
        .next("Stop `tidegate run` and start it again.")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_wrong_with_the_trigger_stands_in_the_status_until_it_is_mended() {
        let board = StatusBoard::new("shop");
        let code = || board.report().trigger.map(|error| error.code);
        let mut watch = TriggerWatch::new(true);
        watch.found(TriggerState::Ready, &board);
        assert_eq!(code(), None);
        watch.found(TriggerState::Disabled, &board);
        assert_eq!(code().as_deref(), Some("trigger.disabled"));
        watch.found(TriggerState::Ready, &board);
        assert_eq!(code(), None);
        let mut late = TriggerWatch::new(false);
        late.found(TriggerState::Missing, &board);
        assert_eq!(code().as_deref(), Some("trigger.missing"));
        late.found(TriggerState::Ready, &board);
        assert_eq!(code().as_deref(), Some("trigger.unused"));
    }
}
