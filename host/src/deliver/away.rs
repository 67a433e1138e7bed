//! Tables that a message says have left the publication, until a look has taken that up.
//!
//! Membership is compared by catalog rows, which cannot tell that a table was out for a moment
//! in between where none of them makes it a member: a table of FOR ALL TABLES that was
//! UNLOGGED, say. The stream can, and says where (P21). It is stored before a checkpoint
//! passes it (P5), as a row of membership that no look will find.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::error::Result;
use crate::position::Lsn;
use crate::schema::table::TableName;
use crate::source::members::{Member, Members as Found, Publication};
use crate::status::StatusError;
use crate::store::{Store, TableError, TableRecord, TableState};

use super::members::Members;
use super::membership::renamed_away;
use super::publication::GAP;
use super::retry::Backoff;
use super::routes::{Command, Place};

/// See the module.
#[derive(Clone, Default)]
pub(super) struct Away(Arc<Mutex<Noted>>);

#[derive(Default)]
struct Noted {
    /// Tables, and the last commit that took them out.
    tables: HashMap<u32, Lsn>,
    /// The publication as it was last looked at, with what it was since seen to leave out.
    publication: Publication,
}

impl Away {
    /// With the publication as it is known.
    pub fn new(publication: Publication) -> Away {
        Away(Arc::new(Mutex::new(Noted { tables: HashMap::new(), publication })))
    }

    /// A table is out as of a commit.
    pub async fn left(&self, oid: u32, commit: Lsn, store: &Store) {
        save(store, vec![(oid, out())]).await;
        self.noted().tables.insert(oid, commit);
    }

    /// The tables that left, and that no look has taken up.
    fn tables(&self) -> HashMap<u32, Lsn> {
        self.noted().tables.clone()
    }

    /// A look has taken these up.
    fn forget(&self, taken: &HashMap<u32, Lsn>) {
        self.noted().tables.retain(|oid, left| taken.get(oid).is_none_or(|taken| *left > *taken));
    }

    /// From some place of the stream on our publication publishes this.
    pub async fn published(&self, publish: &str, store: &Store) {
        let mut narrowed = self.publication();
        narrowed.narrow(publish);
        if narrowed == self.publication() {
            return;
        }
        save(store, vec![(Publication::STORED_AS, narrowed.stored())]).await;
        self.noted().publication = narrowed;
    }

    /// The publication as it is known.
    pub fn publication(&self) -> Publication {
        self.noted().publication.clone()
    }

    /// A look has found the publication so, and has acted on how it differs from `known`.
    /// What the stream has told meanwhile counts for the next one.
    pub fn found(&self, known: &Publication, found: &Publication) {
        let noted = &mut self.noted().publication;
        let told = (noted != known).then(|| noted.publish.clone());
        noted.clone_from(found);
        if let Some(told) = told {
            noted.narrow(&told);
        }
    }

    fn noted(&self) -> MutexGuard<'_, Noted> {
        // Whole values only are put there.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A store that cannot write stops the stream until it can.
async fn save(store: &Store, members: Vec<(u32, String)>) {
    let mut backoff = Backoff::transient();
    while let Err(error) = store.save_members(members.clone()).await {
        tracing::error!(code = error.code(), "that a table has left could not be stored; trying again: {error}");
        tokio::time::sleep(backoff.pause(None)).await;
    }
}

impl Members {
    /// Takes up what the stream has told before a look, and what the publication's own row
    /// says: tables that were out have other rows of membership from here on, so that the look
    /// finds them changed.
    pub(super) async fn take_away(&mut self, known: &Publication, found: &Found) -> Result<()> {
        let store = self.parts.launcher.store.clone();
        let complaint = found.publication.complaint();
        self.parts.launcher.board.update(|report| report.publication = complaint.as_ref().map(StatusError::from));
        if known.publish != found.publication.publish
            && let Some(error) = &complaint
        {
            tracing::warn!(code = error.code(), next = error.next_step(), "{error}");
        }
        let left = self.parts.away.tables();
        let mut outside: Vec<u32> = Vec::new();
        if let Some(why) = known.missed(&found.publication, self.trigger.tells()) {
            tracing::warn!(code = GAP, "{why}: all tables are copied again");
            outside.extend(self.known.tables.keys());
        } else if !left.is_empty() {
            let records = store.tables().await?;
            for (oid, commit) in &left {
                match found.tables.get(oid) {
                    // What is stored is that it was out.
                    Some(member) if is_made_up(&records, *oid, *commit) => {
                        store.save_members(vec![(*oid, member.stored())]).await?;
                    }
                    _ => outside.push(*oid),
                }
            }
        }
        if !outside.is_empty() {
            // A process that dies before they have begun anew finds them so.
            store.save_members(outside.iter().map(|oid| (*oid, out())).collect()).await?;
        }
        for oid in outside {
            if let Some(member) = self.known.tables.get_mut(&oid) {
                member.key = out();
            }
        }
        self.parts.away.forget(&left);
        Ok(())
    }

    /// The table is the same and has another name, by which other destinations may take it.
    /// Those that take it by both hold its change (see `schema::classify`).
    pub(super) async fn renamed(&mut self, oid: u32, before: &TableName, member: &Member, at: Lsn) -> Result<()> {
        tracing::info!(table = %before, now = %member.name, "the table was renamed");
        let (took, takes) = (self.takers_of(before), self.takers_of(&member.name));
        for destination in took.iter().copied().filter(|index| !takes.contains(index)) {
            let config = &self.parts.takers[destination].config;
            let error = TableError::from(&renamed_away(before, &member.name, &config.name));
            // A router that has ended takes nothing up any more.
            let _ = self.parts.commands.send(Command::Stop { place: Place { destination, oid }, at, error });
        }
        let new: Vec<usize> = takes.into_iter().filter(|index| !took.contains(index)).collect();
        self.join_at(oid, member, &new).await
    }
}

/// Whether a copy of the table, done or to come, is later than its time outside everywhere.
pub(super) fn is_made_up(records: &[TableRecord], oid: u32, left: Lsn) -> bool {
    let mut records = records.iter().filter(|record| record.oid == oid && record.state != TableState::Errored);
    records.all(|record| record.state == TableState::Init || record.floor.is_some_and(|floor| floor > left))
}

/// What is stored for a table that was out: no look finds it.
fn out() -> String {
    "out".to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_from_behind_the_time_outside_makes_up_for_it_and_one_from_before_does_not() {
        let record = |oid, state, floor: Option<u64>| TableRecord {
            oid,
            state,
            floor: floor.map(Lsn),
            ..TableRecord::default()
        };
        let ready = |floor| record(7, TableState::Ready, floor);
        assert!(is_made_up(&[ready(Some(11)), record(7, TableState::Init, None)], 7, Lsn(10)));
        assert!(!is_made_up(&[ready(Some(11)), ready(Some(9))], 7, Lsn(10)));
        assert!(!is_made_up(&[ready(None)], 7, Lsn(10)));
        assert!(is_made_up(&[record(7, TableState::Errored, Some(9)), record(8, TableState::Ready, None)], 7, Lsn(10)));
    }
}
