//! Which destinations of a table follow the stream, and which are served from the spool.

use std::sync::atomic::Ordering;

use tokio::sync::oneshot;

use crate::config::SpoolFull;
use crate::copy::spool::{FrameHead, FrameKind};
use crate::error::{Error, Result};
use crate::position::{Lsn, Position};
use crate::schema::table::TableName;
use crate::store::{TableError, TableState};

use super::destination::Live;
use super::feed::{Fed, Feed, Transaction};
use super::membership::{detached, unpublished};
use super::retry::Backoff;
use super::router::{Outlet, Router, ended, to_live};

/// What others ask of the router. One queue for all of it: who asks after an answer
/// from somebody who asked before is served later.
pub(super) enum Command {
    /// Another destination; its number is the next one.
    Destination { outlet: Outlet },
    /// A destination will copy a table: from now on its changes go to the spool, and
    /// nobody reads them there before [`Command::Drain`]. On the answer nothing sends it
    /// changes any more. One behind a later one is answered, and nothing else.
    Join { oid: u32, name: TableName, destination: usize, beginning: Beginning, answer: oneshot::Sender<()> },
    /// The copy is at the destination: what is in the spool beyond it may follow. Unless
    /// the table was joined anew since: then another copy comes, and this one is nothing.
    Drain { oid: u32, destination: usize, beginning: Beginning, floor: Lsn, cursor: Option<Position> },
    /// A drain has sent everything of the spool up to `reached`: may the table follow
    /// the stream?
    DrainEnd { drain: u64, place: Place, floor: Lsn, reached: Option<(Lsn, u64)>, answer: oneshot::Sender<DrainAnswer> },
    /// Answered once the stream has passed an LSN, and the spool has what came before it:
    /// with how often the stream was begun. Unless that is the same later, the spool may
    /// have been set back meanwhile. None: the stream waits for room in the spool.
    Reached { at: Lsn, answer: oneshot::Sender<Option<u64>> },
    /// A table waits with a change of its schema: its changes go to the spool, and stay
    /// there. Answered with [`Live::Held`] in the destination's queue.
    Hold { place: Place },
    /// It may go on from there.
    Release { place: Place },
    /// A destination gave a table up: nothing has to be spooled for it any more.
    TableFailed { place: Place },
    /// The table is not published any more, as of `at`.
    Leave { oid: u32, at: Lsn },
    /// A table of one destination stops once the stream has reached `at`.
    Stop { place: Place, at: Lsn, error: TableError },
    /// The server's process has to be another one before anything behind this is done.
    Reconnect,
    /// The pipeline cannot go on beyond `at`, and ends there.
    End { at: Lsn, error: Error },
    /// Which transactions truncated the table, asked once the stream has reached `at`.
    Truncated { oid: u32, at: Lsn, answer: oneshot::Sender<Vec<u32>> },
}

/// A table of a destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Place {
    pub destination: usize,
    pub oid: u32,
}

/// How often a destination began tables anew, at one of them: orders what is asked for a
/// table, which may be asked for again while a copy of it is under way. The first is a
/// table's at the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Beginning(u64);

impl Beginning {
    pub fn next(self) -> Beginning {
        Beginning(self.0 + 1)
    }
}

/// What the router says to a drain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DrainAnswer {
    /// The table follows the stream from here on.
    Live,
    /// There is more in the spool.
    More,
    /// The destination gave the table up, or begins it anew.
    Gone,
}

/// A table that at least one destination takes.
pub(super) struct Routed {
    pub name: TableName,
    /// Destinations that follow the stream.
    pub live: Vec<usize>,
    /// Destinations that are served from the spool.
    pub spooled: Vec<Spooled>,
    pub feed: Feed,
    /// The last change that was fed; a reconnect sends it again.
    pub fed: Option<Position>,
    /// The WAL position of the last row, and how many rows of the table it had (P1).
    pub counter: (Lsn, u64),
    pub dirty: bool,
}

/// A destination that is served from the spool.
#[derive(Clone, Copy, Debug)]
pub(super) struct Spooled {
    pub destination: usize,
    /// Commits below it are in the copy; none while that is still to come.
    pub floor: Option<Lsn>,
    /// The drain that serves it.
    pub drain: Option<u64>,
    /// It waits, and has no drain until it is released.
    pub held: bool,
}

impl Routed {
    pub(super) fn forget(&mut self, destination: usize) {
        self.live.retain(|known| *known != destination);
        self.spooled.retain(|spooled| spooled.destination != destination);
    }

    /// From the spool alone from here on. Whether it is the first to be.
    fn spool(&mut self, destination: usize, floor: Option<Lsn>) -> bool {
        self.forget(destination);
        self.spooled.push(Spooled { destination, floor, drain: None, held: false });
        self.spooled.len() == 1
    }
}

/// See [`Command::Truncated`].
pub(super) struct Asked {
    oid: u32,
    at: Lsn,
    answer: oneshot::Sender<Vec<u32>>,
}

/// Transactions remembered that truncated a table.
const TRUNCATIONS: usize = 64;

/// Asked at a time at which it cannot be answered.
pub(super) struct Waiting {
    drain: u64,
    place: Place,
    floor: Lsn,
    reached: Option<(Lsn, u64)>,
    answer: oneshot::Sender<DrainAnswer>,
}

impl Router {
    /// A table of a destination that follows the stream.
    pub fn follow(&mut self, oid: u32, name: &TableName, destination: usize) {
        self.routed(oid, name).live.push(destination);
    }

    /// A table of a destination whose copy is still to come.
    pub fn spool_for(&mut self, oid: u32, name: &TableName, destination: usize) {
        self.routed(oid, name).spool(destination, None);
    }

    fn routed(&mut self, oid: u32, name: &TableName) -> &mut Routed {
        let (epoch, history) = (self.parts.epoch, self.parts.versions.history());
        self.tables.entry(oid).or_insert_with(|| Routed {
            name: name.clone(),
            live: Vec::new(),
            spooled: Vec::new(),
            feed: Feed::new(oid, epoch, history),
            fed: None,
            counter: (Lsn::ZERO, 0),
            dirty: false,
        })
    }

    /// Serves a table of a destination from the spool: frames with a commit below
    /// `floor` are in its copy, those at or below `cursor` were sent.
    pub fn drain(&mut self, place: Place, floor: Lsn, cursor: Option<Position>) {
        let Some(routed) = self.tables.get_mut(&place.oid) else { return };
        let spooled = routed.spooled.iter_mut().find(|spooled| spooled.destination == place.destination);
        let Some(spooled) = spooled else { return };
        self.drains += 1;
        spooled.floor = Some(floor);
        spooled.drain = Some(self.drains);
        spooled.held = false;
        let live = self.parts.outlets[place.destination].live.clone();
        self.parts.drainer.start(self.drains, place, live, floor, cursor);
    }

    /// Does what was asked, where the stream stands between two transactions: a table
    /// changes its way with all rows of a transaction or with none.
    pub(super) async fn serve_commands(&mut self) -> Result<()> {
        let nothing =
            self.commands.is_empty() && self.leaving.is_empty() && self.waiting.is_empty() && self.reaching.is_empty();
        if nothing && self.asked.is_empty() && self.ending.is_none() || self.open.is_some() {
            return Ok(());
        }
        if let Some(index) = self.commands.iter().position(|command| matches!(command, Command::Reconnect)) {
            self.commands.remove(index);
            return Err(Error::transient(
                "source.reconnect",
                "the server has to look anew at who is a partition of whom",
            ));
        }
        for command in std::mem::take(&mut self.commands) {
            self.serve(command).await?;
        }
        self.serve_leaving().await?;
        self.serve_stops().await?;
        self.serve_asked();
        self.serve_waiting();
        if let Some((_, error)) = self.ending.take_if(|(at, _)| *at <= self.at) {
            self.finish().await?;
            return Err(error);
        }
        Ok(())
    }

    /// While the spool is full inside a transaction: what makes room is done at once, and
    /// the rest kept for its end.
    pub(super) fn serve_or_keep(&mut self, command: Command) {
        match command {
            // It reads what is committed, and so lets go of it.
            Command::Drain { oid, destination, beginning, floor, cursor } => {
                self.copied(Place { destination, oid }, beginning, floor, cursor);
            }
            Command::TableFailed { place } => self.table_failed(place),
            Command::Release { place } if !self.is_asked_to_hold(place) => self.release(place),
            Command::Reached { answer, .. } => drop(answer.send(None)),
            other => self.commands.push(other),
        }
    }

    /// The stream waits for room, which those may have to make who wait for the stream.
    pub(super) fn reach_nothing(&mut self) {
        for (_, answer) in self.reaching.drain(..) {
            // Whoever asked may have ended.
            let _ = answer.send(None);
        }
    }

    /// A copy is at its destination. One from before the last join has no say: the table
    /// begins anew there, and what was spooled since may lack what follows this copy.
    fn copied(&mut self, place: Place, beginning: Beginning, floor: Lsn, cursor: Option<Position>) {
        if self.beginnings.get(&place).copied().unwrap_or_default() == beginning {
            self.drain(place, floor, cursor);
        } else {
            tracing::debug!(
                oid = place.oid,
                "the table was asked for anew while it was copied: that copy counts for nothing"
            );
        }
    }

    fn table_failed(&mut self, place: Place) {
        if let Some(routed) = self.tables.get_mut(&place.oid) {
            routed.forget(place.destination);
        }
    }

    async fn serve(&mut self, command: Command) -> Result<()> {
        match command {
            Command::Destination { outlet } => self.parts.outlets.push(outlet),
            Command::Join { oid, name, destination, beginning, answer } => {
                self.join(Place { destination, oid }, &name, beginning).await?;
                // Whoever asked may have been stopped since.
                let _ = answer.send(());
            }
            Command::Drain { oid, destination, beginning, floor, cursor } => {
                self.copied(Place { destination, oid }, beginning, floor, cursor);
            }
            Command::DrainEnd { drain, place, floor, reached, answer } => {
                self.waiting.push(Waiting { drain, place, floor, reached, answer });
            }
            Command::Reached { at, answer } => self.reaching.push((at, answer)),
            Command::Hold { place } => self.hold(place).await?,
            Command::Release { place } => self.release(place),
            Command::TableFailed { place } => self.table_failed(place),
            Command::Leave { oid, at } => self.leaving.push((at, oid)),
            Command::Stop { place, at, error } => self.stops.push((at, place, error)),
            // Taken out before.
            Command::Reconnect => {}
            Command::End { at, error } => self.ending = Some((at, error)),
            Command::Truncated { oid, at, answer } => self.asked.push(Asked { oid, at, answer }),
        }
        Ok(())
    }

    async fn join(&mut self, place: Place, name: &TableName, beginning: Beginning) -> Result<()> {
        let Place { destination, oid } = place;
        let last = self.beginnings.entry(place).or_default();
        if beginning < *last {
            return Ok(());
        }
        *last = beginning;
        self.leaving.retain(|(_, leaving)| *leaving != oid);
        if !self.takes_anything(destination) {
            // After a detachment: from here on its checkpoint is its own again.
            self.parts.outlets[destination].behind = false;
        }
        let first = self.routed(oid, name).spool(destination, None);
        // On return it sends nothing more.
        self.parts.drainer.stop(place).await;
        if first { self.spool_relation(oid).await } else { Ok(()) }
    }

    /// Whoever begins to spool a table does so: the server does not say again how the
    /// rows behind are encoded.
    async fn spool_relation(&mut self, oid: u32) -> Result<()> {
        let Some(relation) = self.relations.get(&oid).cloned() else { return Ok(()) };
        let transaction = self.open.unwrap_or(Transaction { commit: self.at, committed_at: 0, xid: 0 });
        let head = FrameHead {
            table: oid,
            commit: transaction.commit,
            committed_at: transaction.committed_at,
            xid: transaction.xid,
            row: Lsn::ZERO,
            ordinal: 0,
        };
        self.spool(head, FrameKind::Relation, &relation).await
    }

    /// A destination that does not keep up: its changes go to the spool whole, and the
    /// others and the slot do not wait (P9). What is on its way to it is in no spool: so
    /// the stream has to be read again, from its checkpoint on.
    pub(super) fn fall_behind(&mut self, destination: usize) -> Result<()> {
        let outlet = &mut self.parts.outlets[destination];
        if outlet.behind {
            return Ok(());
        }
        outlet.behind = true;
        self.rewind = true;
        tracing::warn!(destination = %outlet.name, "the destination does not keep up; its changes are spooled");
        for (oid, routed) in &mut self.tables {
            if routed.live.contains(&destination) {
                routed.spool(destination, Some(Lsn::ZERO));
                self.parts.lag.catching_up(&outlet.name, &routed.name);
                let state = Live::State { oid: *oid, state: TableState::CatchUp };
                outlet.live.send_now(state).map_err(|_| ended(&outlet.name))?;
            }
        }
        crate::failpoint::reached("router.behind");
        Ok(())
    }

    /// A table of a destination waits. What is on its way to it is left out there, and in
    /// no spool if the table followed the stream: then the stream has to be read again.
    async fn hold(&mut self, place: Place) -> Result<()> {
        let Place { destination, oid } = place;
        if let Some(routed) = self.tables.get_mut(&oid) {
            if routed.live.contains(&destination) {
                routed.spool(destination, Some(Lsn::ZERO));
                self.rewind = true;
                self.retell = true;
            }
            if let Some(spooled) = routed.spooled.iter_mut().find(|spooled| spooled.destination == destination) {
                spooled.drain = None;
                spooled.held = true;
            }
        }
        // On return it sends nothing more.
        self.parts.drainer.stop(place).await;
        crate::failpoint::reached("hold.routed");
        let outlet = &self.parts.outlets[destination];
        outlet.live.send_now(Live::Held { oid }).map_err(|_| ended(&outlet.name))
    }

    fn release(&mut self, place: Place) {
        let routed = self.tables.get(&place.oid);
        let held = routed.and_then(|routed| {
            routed.spooled.iter().find(|spooled| spooled.destination == place.destination && spooled.held)
        });
        let Some(floor) = held.map(|spooled| spooled.floor.unwrap_or_default()) else { return };
        let cursor = self.parts.cursors.position(&self.parts.outlets[place.destination].name, place.oid);
        self.drain(place, floor, cursor);
    }

    /// Whether that is still to be done.
    fn is_asked_to_hold(&self, place: Place) -> bool {
        self.commands.iter().any(|command| matches!(command, Command::Hold { place: asked } if *asked == place))
    }

    fn takes_anything(&self, destination: usize) -> bool {
        self.tables.values().any(|routed| {
            routed.live.contains(&destination)
                || routed.spooled.iter().any(|spooled| spooled.destination == destination)
        })
    }

    /// Names of the destinations that something is spooled for.
    pub(super) fn spooled_destinations(&self) -> Vec<&str> {
        let spooled = |index: &usize| {
            self.tables.values().any(|routed| routed.spooled.iter().any(|spooled| spooled.destination == *index))
        };
        let outlets = self.parts.outlets.iter();
        outlets.enumerate().filter(|(index, _)| spooled(index)).map(|(_, outlet)| outlet.name.as_str()).collect()
    }

    /// At the spool's limit: the slowest of the destinations that agreed to it loses what
    /// waits for it, and its tables stop. False if there is none.
    pub(super) async fn detach_slowest(&mut self) -> Result<bool> {
        let mut slowest: Option<(Lsn, usize)> = None;
        for (oid, routed) in &self.tables {
            for spooled in &routed.spooled {
                let outlet = &self.parts.outlets[spooled.destination];
                if outlet.spool_full == SpoolFull::Detach {
                    let position = self.parts.cursors.position(&outlet.name, *oid);
                    let at = position.map_or(Lsn::ZERO, |position| position.commit);
                    slowest =
                        Some(slowest.map_or((at, spooled.destination), |known| known.min((at, spooled.destination))));
                }
            }
        }
        let Some((_, destination)) = slowest else { return Ok(false) };
        self.detach(destination).await?;
        Ok(true)
    }

    async fn detach(&mut self, destination: usize) -> Result<()> {
        let error = detached(&self.parts.outlets[destination].name);
        let outlet = &mut self.parts.outlets[destination];
        tracing::error!(destination = %outlet.name, code = error.code(), next = error.next_step().unwrap_or_default(), "{error}");
        // From here on it stores no table as anything but stopped.
        outlet.detached.store(true, Ordering::SeqCst);
        outlet.behind = true;
        let name = outlet.name.clone();
        outlet.live.send_now(Live::Detached(TableError::from(&error))).map_err(|_| ended(&name))?;
        let mut backoff = Backoff::transient();
        while let Err(stored) = self.parts.store.stop_tables(&name, (&error).into()).await {
            tracing::error!(destination = %name, code = stored.code(), "{stored}; trying again");
            tokio::time::sleep(backoff.pause(None)).await;
        }
        for (oid, routed) in &mut self.tables {
            routed.forget(destination);
            self.parts.cursors.remove(&name, *oid);
        }
        Ok(())
    }

    /// The stream is read again, and the spool was set back to where it begins: drains
    /// begin again as well, from what is durable.
    pub fn reroute(&mut self) {
        let mut drains = Vec::new();
        for (oid, routed) in &self.tables {
            for spooled in &routed.spooled {
                if let Some(floor) = spooled.floor.filter(|_| !spooled.held) {
                    drains.push((Place { destination: spooled.destination, oid: *oid }, floor));
                }
            }
        }
        for (place, floor) in drains {
            let name = &self.parts.outlets[place.destination].name;
            let cursor = self.parts.cursors.position(name, place.oid);
            self.drain(place, floor, cursor);
        }
    }

    /// Rows of the table cannot be decoded until their transaction is at hand whole.
    pub(super) async fn divert_all(&mut self, oid: u32) -> Result<()> {
        let Some(routed) = self.tables.get_mut(&oid) else { return Ok(()) };
        let fed: Vec<Fed> = routed.feed.take().collect();
        let live = routed.live.clone();
        for destination in live {
            for fed in &fed {
                let outlet = &self.parts.outlets[destination];
                let (item, bytes) = to_live(fed.clone());
                outlet.live.send_over(item, bytes).map_err(|_| ended(&outlet.name))?;
            }
            self.divert(oid, destination).await?;
        }
        Ok(())
    }

    /// Serves one table of one destination from the spool, from the last change on that was
    /// fed or that it has.
    async fn divert(&mut self, oid: u32, destination: usize) -> Result<()> {
        let Some(routed) = self.tables.get_mut(&oid) else { return Ok(()) };
        let first = routed.spool(destination, Some(Lsn::ZERO));
        let outlet = &self.parts.outlets[destination];
        // What it has need not be decoded once more: no version may fit it, if the table was
        // copied behind it.
        let cursor = routed.fed.max(self.parts.cursors.position(&outlet.name, oid));
        outlet.live.send_now(Live::State { oid, state: TableState::CatchUp }).map_err(|_| ended(&outlet.name))?;
        if first {
            self.spool_relation(oid).await?;
        }
        self.drain(Place { destination, oid }, Lsn::ZERO, cursor);
        Ok(())
    }

    /// The table's changes are not what they should be, for nobody.
    pub(super) fn fail(&mut self, oid: u32, error: &Error) {
        let Some(routed) = self.tables.get_mut(&oid) else { return };
        tracing::error!(table = %routed.name, code = error.code(), %error, "the table's changes cannot be decoded");
        for destination in routed.live.drain(..) {
            // A destination that has ended stops the pipeline at the next send.
            let _ = self.parts.outlets[destination].live.send_now(Live::Failed { oid, error: error.into() });
        }
    }

    /// Tables that are not published any more stop once the stream is where that was
    /// seen: what came before was sent.
    async fn serve_leaving(&mut self) -> Result<()> {
        let at = self.at;
        let due: Vec<u32> = self.leaving.iter().filter(|(leaves, _)| *leaves <= at).map(|(_, oid)| *oid).collect();
        if due.is_empty() {
            return Ok(());
        }
        self.leaving.retain(|(leaves, _)| *leaves > at);
        self.send_open().await?;
        for oid in due {
            let Some(routed) = self.tables.remove(&oid) else { continue };
            let spooled = routed.spooled.iter().map(|spooled| spooled.destination);
            for destination in routed.live.iter().copied().chain(spooled) {
                let stopped =
                    Live::Stopped { oid, name: routed.name.clone(), error: (&unpublished(&routed.name)).into() };
                // A destination that has ended stops the pipeline at the next send.
                let _ = self.parts.outlets[destination].live.send_now(stopped);
            }
        }
        Ok(())
    }

    /// The stream has a TRUNCATE of the table.
    pub(super) fn truncated(&mut self, oid: u32, xid: u32) {
        if !self.tables.contains_key(&oid) {
            return;
        }
        let known = self.truncations.entry(oid).or_default();
        // Read again, it is the same one.
        if known.contains(&xid) {
            return;
        }
        known.push_back(xid);
        if known.len() > TRUNCATIONS {
            known.pop_front();
        }
    }

    fn serve_asked(&mut self) {
        let (due, early) = std::mem::take(&mut self.asked).into_iter().partition(|asked| asked.at <= self.at);
        self.asked = early;
        for Asked { oid, answer, .. } in due {
            let xids = self.truncations.get(&oid).map(|xids| xids.iter().copied().collect());
            // Whoever asked may have been stopped since.
            let _ = answer.send(xids.unwrap_or_default());
        }
    }

    /// Lets tables follow the stream whose drain has met it: at a commit, and not before
    /// the stream has reached their copy's floor (P12).
    fn serve_waiting(&mut self) {
        for (at, answer) in std::mem::take(&mut self.reaching) {
            if self.at < at.max(self.furthest) {
                self.reaching.push((at, answer));
            } else {
                // Whoever asked may have ended.
                let _ = answer.send(Some(self.begun));
            }
        }
        for waiting in std::mem::take(&mut self.waiting) {
            match self.drain_answer(&waiting) {
                // A drain that has ended meanwhile needs no answer.
                Some(answer) => drop(waiting.answer.send(answer)),
                None => self.waiting.push(waiting),
            }
        }
    }

    fn drain_answer(&mut self, waiting: &Waiting) -> Option<DrainAnswer> {
        let Place { destination, oid } = waiting.place;
        let Some(routed) = self.tables.get_mut(&oid) else { return Some(DrainAnswer::Gone) };
        let drain = Some(waiting.drain);
        if !routed.spooled.iter().any(|spooled| spooled.destination == destination && spooled.drain == drain) {
            return Some(DrainAnswer::Gone);
        }
        if self.parts.spool.end(oid) > waiting.reached {
            return Some(DrainAnswer::More);
        }
        if self.at < waiting.floor.max(self.furthest) {
            return None;
        }
        routed.forget(destination);
        routed.live.push(destination);
        self.parts.outlets[destination].behind = false;
        // The feed drops what others were fed before; what this one had is the same.
        let ready = Live::State { oid, state: TableState::Ready };
        let sent = self.parts.outlets[destination].live.send_now(ready);
        crate::failpoint::reached("drain.live");
        Some(if sent.is_ok() { DrainAnswer::Live } else { DrainAnswer::Gone })
    }
}

#[cfg(test)]
#[path = "routes_tests.rs"]
mod tests;
