//! When the publication is not what it was (P23).
//!
//! Renamed, it is the same: what came before the rename is read under the old name, which
//! the state keeps until then, and the rest under the new one; nothing is lost between
//! them, for the server says where the old name ends. Made again, it may have left out
//! anything in between: all tables are copied again, and the log before that is skipped.

use std::time::Duration;

use crate::error::{Error, Result};
use crate::position::Lsn;
use crate::source::config::SourceConfig;
use crate::source::members::Members;
use crate::source::publication::{NameEnds, name_ends};
use crate::source::session::connect;
use crate::store::{DestinationRecord, Progress, SourceRecord};

use super::checkpoint::Confirmed;
use super::identity::Identity;

/// Code of a publication that is gone.
pub(super) const GAP: &str = "publication.gap";
/// Code of what the server says in the stream where it misses the publication.
pub(super) const MISSING: &str = "publication.missing";

/// How often the slot is asked for while somebody still reads it, and how long between.
const TRIES: u32 = 20;
const PAUSE: Duration = Duration::from_millis(250);

/// What became of the publication since the last process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Publication {
    /// It is the same.
    Same,
    /// It has another name, and is the same otherwise: the record has the old one.
    Renamed,
    /// There is another one of its name.
    MadeAgain,
}

impl Publication {
    /// Compares the known one with what is configured and there. None: another one
    /// altogether.
    pub fn of(known: &SourceRecord, found: &SourceRecord) -> Option<Publication> {
        match (known.publication == found.publication, known.publication_oid == found.publication_oid) {
            (true, true) => Some(Publication::Same),
            (false, true) => Some(Publication::Renamed),
            (true, false) => Some(Publication::MadeAgain),
            (false, false) => None,
        }
    }

    /// What the pipeline goes on from, said to the operator.
    pub fn take_up(self, records: &mut [DestinationRecord], known: &SourceRecord, members: &Members) {
        match self {
            Publication::Same => {}
            Publication::Renamed => {
                tracing::info!(
                    "the publication was called `{}`: what came under that name is read first",
                    known.publication
                );
            }
            Publication::MadeAgain => {
                tracing::warn!(
                    code = GAP,
                    "the publication was dropped and made again: all tables are copied again, and changes before {} are not read",
                    members.at
                );
                // All their tables begin anew, in snapshots that are later.
                for record in records {
                    record.checkpoint = record.checkpoint.max(members.at);
                }
            }
        }
    }
}

/// What came under the old name was not all durable yet.
pub(super) fn renamed(known: &SourceRecord) -> Error {
    Error::transient(
        "publication.renamed",
        format!("publication `{}` was renamed, and what came before that is still on its way", known.publication),
    )
    .next("See to the destinations that do not keep up: the new name is used once they have all of it.")
}

/// The stream under the old name is at its end: goes on under the name that is configured,
/// if all before that is durable. Returns where.
///
/// # Errors
/// Those of the source and of the store. Nothing was changed then.
pub(super) async fn switch(
    source: &SourceConfig,
    identity: &Identity,
    confirmed: &Confirmed,
    destinations: &[String],
) -> Result<Option<Lsn>> {
    let (from, known) = (confirmed.smallest(), identity.known.get());
    let session = connect(source).await?;
    let mut tries = 0;
    let ends = loop {
        match name_ends(&session, &known.slot, &known.publication, from).await {
            // The server has not noticed yet that the stream's connection is gone.
            Err(error) if error.is_transient() && !session.is_closed() && tries < TRIES => tries += 1,
            ends => break ends?,
        }
        tokio::time::sleep(PAUSE).await;
    };
    let NameEnds::At(at) = ends else { return Ok(None) };
    // Between them is nothing that anybody takes (P6).
    for destination in destinations {
        let progress = Progress { destination: destination.clone(), checkpoint: Some(at), positions: Vec::new() };
        identity.store.save_progress(progress).await?;
    }
    confirmed.raise(at);
    let name = source.publication.clone();
    identity.known.change(&identity.store, |record| record.publication.clone_from(&name)).await?;
    tracing::info!(%at, "the stream goes on under the publication's new name `{}`", source.publication);
    Ok(Some(at))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::SlotRecord;

    #[test]
    fn a_publication_is_told_by_name_and_oid() {
        let record = |name: &str, oid| SourceRecord {
            system: "7".to_owned(),
            timeline: 1,
            slot: "s".to_owned(),
            publication: name.to_owned(),
            publication_oid: oid,
            plugin: "pgoutput".to_owned(),
            epoch: 0,
            slot_state: SlotRecord::Intended,
        };
        let of = |name, oid| Publication::of(&record("p", 5), &record(name, oid));
        assert_eq!(of("p", 5), Some(Publication::Same));
        assert_eq!(of("q", 5), Some(Publication::Renamed));
        assert_eq!(of("p", 6), Some(Publication::MadeAgain));
        assert_eq!(of("q", 6), None);
    }
}
