//! What an instance was given and has not made durable: what its answers may speak of.

use std::collections::{BTreeSet, VecDeque};

use super::bindings::wire::{Ack, Group};
use crate::batch::{content_bytes, refusable};

/// Groups by ticket, each with the rows of its batches.
#[derive(Debug, Default)]
pub(crate) struct Given {
    groups: VecDeque<(u64, Vec<u32>)>,
    last: u64,
}

impl Given {
    /// A group is about to be given; again, if its ticket is known.
    pub(crate) fn add(&mut self, group: &Group) {
        self.take_back(group.ticket);
        let rows = group.batches.iter().map(|batch| refusable(&batch.content)).collect();
        self.groups.push_back((group.ticket, rows));
        self.last = self.last.max(group.ticket);
    }

    /// A group was not taken.
    pub(crate) fn take_back(&mut self, ticket: u64) {
        self.groups.retain(|(known, _)| *known != ticket);
    }

    /// Rows and bytes of a group.
    pub(crate) fn size_of(group: &Group) -> (u64, u64) {
        let rows = group.batches.iter().map(|batch| u64::from(refusable(&batch.content))).sum();
        let bytes = group.batches.iter().map(|batch| content_bytes(&batch.content) as u64).sum();
        (rows, bytes)
    }

    /// Whether an answer speaks of nothing else; then what it made durable is forgotten.
    ///
    /// # Errors
    /// What it says that cannot be.
    pub(crate) fn check(&mut self, ack: &Ack) -> Result<(), String> {
        if ack.durable > self.last {
            return Err(format!(
                "it says that ticket {} is durable; the last it was given is {}",
                ack.durable, self.last
            ));
        }
        let mut seen = BTreeSet::new();
        for refusal in &ack.refused {
            let (ticket, batch, row) = (refusal.ticket, refusal.batch, refusal.row);
            let Some((_, rows)) = self.groups.iter().find(|(known, _)| *known == ticket) else {
                return Err(format!("it refuses a row of ticket {ticket}, which is not under way"));
            };
            match rows.get(batch as usize) {
                None => {
                    return Err(format!(
                        "it refuses a row of batch {batch} of ticket {ticket}, which has {}",
                        rows.len()
                    ));
                }
                Some(rows) if row >= *rows => {
                    return Err(format!(
                        "it refuses row {row} of batch {batch} of ticket {ticket}, which has {rows} rows"
                    ));
                }
                Some(_) => {}
            }
            if !seen.insert((ticket, batch, row)) {
                return Err(format!("it refuses row {row} of batch {batch} of ticket {ticket} twice"));
            }
        }
        while self.groups.front().is_some_and(|(ticket, _)| *ticket <= ack.durable) {
            self.groups.pop_front();
        }
        Ok(())
    }
}
