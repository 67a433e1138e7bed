//! What the source's catalog shows of a table, and neither a message nor a row has told: an
//! ALTER without the trigger and with no rows behind it, one that was left out of capture, one
//! that could not be captured.
//!
//! It is shown in `status` and never applied, because it has no place between the rows. Where
//! rows that come would be read wrongly without anybody noticing, the table stops.
//!
//! Bounded: one query tells which tables have changed, a few of which are read at a look, and
//! looks take a small share of the time.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::oneshot;

use crate::error::{Error, Result};
use crate::position::SnapshotId;
use crate::schema::change::Step;
use crate::schema::plan::plan;
use crate::schema::table::{Origin, TableName, TableSchema};
use crate::source::catalog::table_schema;
use crate::source::members::{digests, reached};
use crate::source::session::sql_error;
use crate::status::PendingChange;
use crate::store::{TableError, TableState};

use super::members::Members;
use super::routes::{Command, Place};

/// Tables whose pictures are read at one look.
const AT_ONCE: usize = 100;
/// Tables that somebody holds, of which that many are waited for at one look.
const HELD_AT_ONCE: usize = 5;
/// The digests of all tables may take one part of so many of the time.
const SHARE: u32 = 50;
const LONGEST_PAUSE: Duration = Duration::from_secs(300);
/// Steps that `status` names.
const NAMED: usize = 20;

/// What is remembered between looks.
#[derive(Default)]
pub(super) struct Unseen {
    /// The digests with which the catalog was what the history has.
    same: HashMap<u32, String>,
    /// Tables that differ, until the stream is where that was seen.
    asked: HashMap<u32, Asked>,
    shown: HashSet<u32>,
    pause_until: Option<Instant>,
}

struct Asked {
    digest: String,
    passed: Passed,
}

enum Passed {
    Waiting(oneshot::Receiver<Option<u64>>),
    Yes,
}

/// How the catalog differs from the newest version.
#[derive(Debug, PartialEq, Eq)]
struct Difference {
    changes: Vec<String>,
    /// The next row's relation will not be as before.
    a_row_tells: bool,
    /// It will be, although columns are others or values read differently.
    misread: bool,
}

impl Members {
    /// Looks for changes that nobody told.
    pub(super) async fn unseen_changes(&mut self) -> Result<()> {
        let begin = Instant::now();
        if self.unseen.pause_until.is_some_and(|until| begin < until) {
            return Ok(());
        }
        let session = self.session().await?;
        let found = digests(&session, &self.parts.source.publication).await?;
        self.unseen.pause_until = Some(begin + (begin.elapsed() * SHARE).min(LONGEST_PAUSE));
        self.unseen.same.retain(|oid, _| self.known.tables.contains_key(oid));
        self.unseen.asked.retain(|oid, _| self.known.tables.contains_key(oid));
        let mut left = AT_ONCE;
        // Printing a default opens its table, whoever holds it (P35).
        let brief = session.batch_execute("SET lock_timeout = '500ms'").await;
        brief.map_err(|error| sql_error(&error, "looking for changes of tables"))?;
        for (oid, digest) in found {
            if self.unseen.same.get(&oid) == Some(&digest) || left == 0 || self.unseen.is_waiting(oid, &digest) {
                continue;
            }
            let Some(newest) = self.parts.launcher.history.read().newest(oid) else { continue };
            left -= 1;
            let publication = &self.parts.source.publication;
            let now = match table_schema(&*session, oid, publication, SnapshotId::default(), Origin::Message).await {
                Ok(now) => now,
                // Somebody holds the table, and may be changing it.
                Err(error) if error.code() == "source.lock-timeout" => {
                    left = left.saturating_sub(AT_ONCE / HELD_AT_ONCE);
                    continue;
                }
                Err(error) => return Err(error),
            };
            let Some(difference) = now.and_then(|now| difference(newest, now)) else {
                self.unseen.asked.remove(&oid);
                self.unseen.same.insert(oid, digest);
                self.show_pending(oid, None);
                continue;
            };
            let asked = self.unseen.asked.get(&oid).filter(|asked| asked.digest == digest);
            if asked.is_some() {
                self.differs(oid, difference);
            } else {
                // A message may be on its way.
                let (answer, passed) = oneshot::channel();
                let at = reached(&session).await?;
                // A router that has ended drops the question.
                let _ = self.parts.commands.send(Command::Reached { at, answer });
                self.unseen.asked.insert(oid, Asked { digest, passed: Passed::Waiting(passed) });
            }
        }
        let reset = session.batch_execute("RESET lock_timeout").await;
        reset.map_err(|error| sql_error(&error, "looking for changes of tables"))?;
        self.session = Some(session);
        Ok(())
    }

    /// The stream has nothing about it.
    fn differs(&mut self, oid: u32, difference: Difference) {
        let Some(name) = self.known.tables.get(&oid).map(|member| member.name.clone()) else { return };
        let ready = self.ready_at(&name);
        if ready.is_empty() {
            // A copy brings it, or it waits for somebody anyway.
            return;
        }
        if difference.misread {
            let error = TableError::from(&misread(&name, &difference.changes));
            for destination in ready {
                let place = Place { destination, oid };
                let stop = Command::Stop { place, at: crate::position::Lsn::ZERO, error: error.clone() };
                // A router that has ended takes nothing up any more.
                let _ = self.parts.commands.send(stop);
            }
            return;
        }
        let reason = if difference.a_row_tells { "no row yet" } else { "no row tells it" };
        if self.unseen.shown.insert(oid) {
            tracing::info!(table = %name, "changed in the catalog, {reason}: {}", difference.changes.join(", "));
        }
        self.show_pending(oid, Some(PendingChange { reason: reason.to_owned(), changes: difference.changes }));
    }

    /// Destinations at which the table follows the stream.
    fn ready_at(&self, name: &TableName) -> Vec<usize> {
        let (report, table) = (self.parts.launcher.board.report(), name.to_string());
        let ready = |index: &usize| {
            let known = report.destinations.iter().find(|known| known.name == self.parts.takers[*index].config.name);
            known.is_some_and(|known| {
                known
                    .tables
                    .iter()
                    .any(|known| known.table == table && matches!(known.state, TableState::Ready | TableState::CatchUp))
            })
        };
        self.takers_of(name).into_iter().filter(ready).collect()
    }

    fn show_pending(&mut self, oid: u32, pending: Option<PendingChange>) {
        if pending.is_none() && !self.unseen.shown.remove(&oid) {
            return;
        }
        let Some(name) = self.known.tables.get(&oid).map(|member| member.name.clone()) else { return };
        for taker in self.takers_of(&name) {
            let destination = &self.parts.takers[taker].config.name;
            self.parts.launcher.board.update_table(destination, &name, |table| table.pending.clone_from(&pending));
        }
    }
}

impl Unseen {
    /// Whether the stream is still on its way to where the table was seen to differ.
    fn is_waiting(&mut self, oid: u32, digest: &str) -> bool {
        let Some(asked) = self.asked.get_mut(&oid).filter(|asked| asked.digest == digest) else { return false };
        let Passed::Waiting(passed) = &mut asked.passed else { return false };
        match passed.try_recv() {
            Ok(Some(_)) => {
                asked.passed = Passed::Yes;
                false
            }
            Err(oneshot::error::TryRecvError::Empty) => true,
            // It could not wait: asked again.
            Ok(None) | Err(oneshot::error::TryRecvError::Closed) => {
                self.asked.remove(&oid);
                false
            }
        }
    }
}

/// None if a destination would see no difference.
fn difference(newest: Arc<TableSchema>, now: TableSchema) -> Option<Difference> {
    let now = Arc::new(now);
    let same_relation = looks_the_same(&newest, &now);
    let pairs = newest.columns.iter().filter_map(|column| Some((column, now.column(column.ordinal)?.1)));
    let reads_differently: Vec<String> = pairs
        .filter(|(old, new)| old.type_oid == new.type_oid)
        .filter(|(old, new)| match (&old.within, &new.within) {
            (Some(old), Some(new)) => old.reads_differently(new),
            _ => false,
        })
        .map(|(_, new)| format!("values of {} read differently", new.name))
        .collect();
    let ordinals = |schema: &TableSchema| schema.columns.iter().map(|column| column.ordinal).collect::<Vec<_>>();
    let misread = same_relation && (ordinals(&newest) != ordinals(&now) || !reads_differently.is_empty());
    let change = plan(newest, now);
    let mut changes: Vec<String> = change.steps.iter().map(named).chain(reads_differently).collect();
    let more = changes.len().saturating_sub(NAMED);
    changes.truncate(NAMED);
    if more > 0 {
        changes.push(format!("{more} more"));
    }
    (!changes.is_empty()).then_some(Difference { changes, a_row_tells: !same_relation, misread })
}

/// Whether a relation message of the one would be one of the other.
fn looks_the_same(one: &TableSchema, other: &TableSchema) -> bool {
    one.name == other.name
        && one.replica_identity == other.replica_identity
        && one.columns.len() == other.columns.len()
        && one.columns.iter().zip(&other.columns).all(|(one, other)| {
            (&one.name, one.type_oid, one.identity) == (&other.name, other.type_oid, other.identity)
        })
}

/// `rename-column a to b`.
fn named(step: &Step) -> String {
    let name = |column: &Option<crate::schema::table::Column>| column.as_ref().map(|column| column.name.clone());
    match (name(&step.before), name(&step.after)) {
        (Some(before), Some(after)) if before != after => format!("{} {before} to {after}", step.kind),
        (_, Some(column)) | (Some(column), None) => format!("{} {column}", step.kind),
        (None, None) => step.kind.to_string(),
    }
}

fn misread(name: &TableName, changes: &[String]) -> Error {
    Error::permanent(
        "schema.unseen",
        format!(
            "table {name} was changed where neither a message nor a row tells it: {}. Rows that came since may be read wrongly",
            changes.join(", ")
        ),
    )
    .next("Run `tidegate resync DEST TABLE`; with the DDL trigger (`tidegate trigger install`) such changes are seen as they happen.")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schema::samples::{column, table};
    use crate::schema::table::{Column, Within};

    fn of(before: Vec<Column>, after: Vec<Column>) -> Option<Difference> {
        difference(Arc::new(table(before)), table(after))
    }

    #[test]
    fn what_a_row_will_tell_is_told_apart_from_what_none_will() {
        let a = || column(1, "a", "int4");
        assert_eq!(of(vec![a()], vec![a()]), None);
        let added = of(vec![a()], vec![a(), column(2, "b", "text")]).unwrap();
        assert_eq!(added, Difference { changes: vec!["add-column b".to_owned()], a_row_tells: true, misread: false });
        let renamed = of(vec![a()], vec![column(1, "z", "int4")]).unwrap();
        assert_eq!(renamed.changes, ["rename-column a to z"]);
        let required = Column { nullable: false, ..a() };
        let required = of(vec![a()], vec![required]).unwrap();
        assert_eq!((required.a_row_tells, required.misread), (false, false));
        // The same names, and another column.
        let again = of(vec![a(), column(2, "b", "text")], vec![a(), column(3, "b", "text")]).unwrap();
        assert_eq!((again.a_row_tells, again.misread), (false, true));
        assert_eq!(again.changes, ["drop-column b", "add-column b"]);
        let mood = |labels: &[&str]| Column {
            within: Some(Within([("e1".to_owned(), labels.iter().map(|label| (*label).to_owned()).collect())].into())),
            ..a()
        };
        assert_eq!(of(vec![mood(&["x"])], vec![mood(&["x", "y"])]), None);
        assert!(of(vec![mood(&["x"])], vec![mood(&["y"])]).unwrap().misread);
    }
}
