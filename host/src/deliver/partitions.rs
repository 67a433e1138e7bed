//! Roots that are published as themselves, and what becomes of their partitions (P22).
//!
//! The stream tells changes of rows of a root. It does not tell that a partition with rows
//! was attached, that one was detached or dropped, or that a partition by itself was
//! truncated. All that shows in the catalog: in who is below the root, by which row of
//! `pg_inherits`, and in which file each has its rows. A root that differs so is copied
//! again by itself, the first time at once, then after ever longer pauses.
//!
//! Another file alone may be a TRUNCATE of the root, which the stream tells: the router is
//! asked whether it was the same transaction, once the stream has got there. It may also be
//! a rewrite (VACUUM FULL, CLUSTER, SET TABLESPACE), which changes no row; the catalog
//! cannot tell it from a TRUNCATE with rows behind it, so it is taken for one.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

use tokio::sync::oneshot;
use tokio::task::{JoinError, JoinSet};

use crate::error::Result;
use crate::position::Lsn;
use crate::source::members::{Difference, Member, Partitions, difference, strange_leaves};
use crate::status::StatusError;
use crate::store::TableState;

use super::members::Members;
use super::routes::Command;

/// Code of a root that has other rows than what was sent of it.
const ROOT_DIFFERS: &str = "table.root-differs";
/// How long a root that was copied again is left alone, at first and at most.
const FIRST_PAUSE: Duration = Duration::from_secs(30);
const LONGEST_PAUSE: Duration = Duration::from_secs(3600);
/// The first server whose walsender forgets at an ATTACH or DETACH what it knew of a
/// partition: an older one goes on to leave out rows of one that it met before that.
const FORGETS_SINCE: u32 = 150_000;
/// Partitions that a message names.
const NAMED: usize = 3;

/// What is remembered of roots.
#[derive(Default)]
pub(super) struct Roots {
    /// Questions to the router.
    pub judging: JoinSet<Judged>,
    asked: HashSet<u32>,
    pauses: HashMap<u32, Pause>,
}

/// A root whose partitions have other files.
pub(super) struct Judged {
    oid: u32,
    /// As the look found it.
    member: Member,
    rewritten: Vec<(u32, u32)>,
    /// The transactions that truncated the root; none if the router has ended.
    truncated: Option<Vec<u32>>,
}

/// When a root may be copied again by itself.
struct Pause {
    until: Instant,
    length: Duration,
    told: bool,
}

impl Pause {
    /// The one behind a copy that begins now. After a quiet time it is short again.
    fn after(before: Option<&Pause>, now: Instant) -> Pause {
        let length = match before {
            Some(pause) if now < pause.until + pause.length => (pause.length * 2).min(LONGEST_PAUSE),
            _ => FIRST_PAUSE,
        };
        Pause { until: now + length, length, told: false }
    }
}

impl Members {
    /// Looks below a table that is a member by the same rows as before. Returns what is
    /// known of its partitions from here on.
    pub(super) async fn look_below(&mut self, oid: u32, found: &Member, at: Lsn) -> Result<Option<Partitions>> {
        let known = self.known.tables.get(&oid).and_then(|member| member.partitions.clone());
        let Some(difference) = difference(known.as_ref(), found.partitions.as_ref()) else {
            return Ok(found.partitions.clone());
        };
        if self.roots.asked.contains(&oid) {
            return Ok(known);
        }
        let strange = match difference.come.is_empty() {
            true => Vec::new(),
            false => {
                let session = self.session().await?;
                let strange = strange_leaves(&session, oid, &difference.come).await?;
                self.session = Some(session);
                strange
            }
        };
        if !difference.gone.is_empty() || !strange.is_empty() {
            let begun = self.root_differs(oid, found, &why(&difference, &strange)).await?;
            return Ok(if begun { found.partitions.clone() } else { known });
        }
        if difference.rewritten.is_empty() {
            self.save_known(oid, found).await?;
            return Ok(found.partitions.clone());
        }
        self.ask_whether_truncated(oid, found.clone(), difference.rewritten, at);
        Ok(known)
    }

    /// The stream has to be where the look was before anybody knows.
    fn ask_whether_truncated(&mut self, oid: u32, member: Member, rewritten: Vec<(u32, u32)>, at: Lsn) {
        let (answer, truncated) = oneshot::channel();
        // A router that has ended drops the question, which is an answer too.
        let _ = self.parts.commands.send(Command::Truncated { oid, at, answer });
        self.roots.asked.insert(oid);
        self.roots.judging.spawn(async move { Judged { oid, member, rewritten, truncated: truncated.await.ok() } });
    }

    /// The router has said which transactions truncated a root.
    pub(super) async fn take_judged(&mut self, judged: Result<Judged, JoinError>) {
        let Ok(Judged { oid, member, rewritten, truncated }) = judged else {
            self.roots.asked.clear();
            return;
        };
        self.roots.asked.remove(&oid);
        let (Some(truncated), Some(known)) = (truncated, self.known.tables.get(&oid)) else { return };
        if known.key != member.key {
            return;
        }
        let settled = if rewritten.iter().all(|(_, xid)| truncated.contains(xid)) {
            self.save_known(oid, &member).await.map(|()| true)
        } else {
            let difference = Difference { rewritten, ..Difference::default() };
            self.root_differs(oid, &member, &why(&difference, &[])).await
        };
        match settled {
            Ok(true) => {
                if let Some(known) = self.known.tables.get_mut(&oid) {
                    known.partitions = member.partitions;
                }
            }
            Ok(false) => {}
            // The next look finds it again.
            Err(error) => tracing::warn!(table = %member.name, code = error.code(), "{error}; trying again"),
        }
    }

    async fn save_known(&self, oid: u32, member: &Member) -> Result<()> {
        self.parts.launcher.store.save_members(vec![(oid, member.stored())]).await
    }

    /// The root is copied again at every destination that has it, unless that was done a
    /// short while ago: then a later look finds it again. Whether it was settled.
    async fn root_differs(&mut self, oid: u32, member: &Member, why: &str) -> Result<bool> {
        // One that has stopped waits for an operator, whose resync brings this too.
        let takers: Vec<usize> =
            self.takers_of(&member.name).into_iter().filter(|index| !self.has_stopped(*index, member)).collect();
        if takers.is_empty() {
            return self.save_known(oid, member).await.map(|()| true);
        }
        let now = Instant::now();
        if let Some(pause) = self.roots.pauses.get_mut(&oid).filter(|pause| now < pause.until) {
            let left = (pause.until - now).as_secs() + 1;
            if !std::mem::replace(&mut pause.told, true) {
                tracing::warn!(code = ROOT_DIFFERS, table = %member.name, "{why}; the table was copied again a short while ago, and is again in {left} s");
                self.show_root_differs(&takers, member, why);
            }
            return Ok(false);
        }
        if self.parts.version_num < FORGETS_SINCE {
            // Before the copy: its snapshot has what the server's process left out.
            let _ = self.parts.commands.send(Command::Reconnect);
        }
        tracing::warn!(code = ROOT_DIFFERS, table = %member.name, "{why}: that is no change of rows, and the table is copied again");
        self.join_at(oid, member, &takers).await?;
        let pause = Pause::after(self.roots.pauses.get(&oid), now);
        self.roots.pauses.insert(oid, pause);
        Ok(true)
    }

    fn has_stopped(&self, taker: usize, member: &Member) -> bool {
        let (report, table) = (self.parts.launcher.board.report(), member.name.to_string());
        let name = &self.parts.takers[taker].config.name;
        let tables = report.destinations.iter().filter(|known| known.name == *name).flat_map(|known| &known.tables);
        tables.filter(|known| known.table == table).any(|known| known.state == TableState::Errored)
    }

    /// In `status`, until the copy begins.
    fn show_root_differs(&self, takers: &[usize], member: &Member, why: &str) {
        let error = StatusError {
            code: ROOT_DIFFERS.to_owned(),
            message: why.to_owned(),
            next: Some(
                "Nothing: the table is copied again by itself, or at once with `tidegate resync DEST TABLE`."
                    .to_owned(),
            ),
        };
        for taker in takers {
            let name = &self.parts.takers[*taker].config.name;
            self.parts.launcher.board.update_table(name, &member.name, |table| table.error = Some(error.clone()));
        }
    }
}

/// What is below the root that was not, or the other way round.
fn why(difference: &Difference, strange: &[(u32, String)]) -> String {
    let mut parts = Vec::new();
    let list = |names: Vec<String>| {
        let more = names.len().saturating_sub(NAMED);
        let names = names.into_iter().take(NAMED).collect::<Vec<_>>().join(", ");
        if more > 0 { format!("{names} and {more} more") } else { names }
    };
    if !strange.is_empty() {
        let names = strange.iter().map(|(_, name)| name.clone()).collect();
        parts.push(format!("partitions came with rows: {}", list(names)));
    }
    if !difference.gone.is_empty() {
        let oids = difference.gone.iter().map(u32::to_string).collect();
        parts.push(format!("partitions were detached or dropped: oid {}", list(oids)));
    }
    if !difference.rewritten.is_empty() {
        let oids = difference.rewritten.iter().map(|(oid, _)| oid.to_string()).collect();
        parts.push(format!("partitions were truncated or rewritten: oid {}", list(oids)));
    }
    parts.join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_root_that_differs_again_and_again_is_copied_after_ever_longer_pauses() {
        let mut now = Instant::now();
        let mut pause = Pause::after(None, now);
        assert_eq!(pause.length, FIRST_PAUSE);
        for _ in 0..20 {
            now = pause.until;
            pause = Pause::after(Some(&pause), now);
        }
        assert_eq!(pause.length, LONGEST_PAUSE);
        let quiet = pause.until + LONGEST_PAUSE;
        assert_eq!(Pause::after(Some(&pause), quiet).length, FIRST_PAUSE);
    }

    #[test]
    fn why_a_root_differs_names_a_few_partitions_and_counts_the_rest() {
        let difference = Difference { come: vec![1], gone: vec![2, 3, 4, 5], rewritten: vec![(6, 700)] };
        let why = why(&difference, &[(1, "leaf".to_owned())]);
        assert!(why.contains("came with rows: leaf;") && why.contains("oid 2, 3, 4 and 1 more;"), "{why}");
        assert!(why.ends_with("truncated or rewritten: oid 6"), "{why}");
    }
}
