//! What the DDL trigger's messages tell beside versions: that it is time to look at the
//! publication, that a table has left it, that a table is in doubt.

use crate::error::{Error, Result};
use crate::position::Lsn;
use crate::store::{TableError, TableRecord};

use super::away::is_made_up;
use super::destination::Live;
use super::router::Router;
use super::routes::Place;

/// What a message told.
#[derive(Debug, Default)]
pub(super) struct Told {
    /// The table of which a version begins here.
    pub version: Option<u32>,
    /// Who is in the publication may have changed.
    pub look: bool,
    /// The table is in the publication no more.
    pub left: Option<u32>,
    /// What our publication publishes from here on.
    pub publish: Option<String>,
    /// What is known of tables does not hold any more, and nobody knows what does.
    pub doubt: Option<Doubt>,
}

/// Tables that cannot go on.
#[derive(Debug)]
pub(super) struct Doubt {
    /// None: any table may be it.
    pub oid: Option<u32>,
    /// Why.
    pub error: Error,
}

impl Router {
    /// Acts on what a message told, but for versions.
    pub(super) async fn heed(&mut self, told: &Told, commit: Lsn) -> Result<()> {
        let left = told.left.filter(|oid| self.tables.contains_key(oid));
        if let Some(oid) = left {
            self.parts.away.left(oid, commit, &self.parts.store).await;
        }
        if let Some(publish) = &told.publish {
            self.parts.away.published(publish, &self.parts.store).await;
        }
        if told.look || left.is_some() {
            self.parts.strangers.notify_one();
        }
        if let Some(Doubt { oid, error }) = &told.doubt {
            let tables: Vec<u32> = match oid {
                Some(oid) => vec![*oid],
                None => self.tables.keys().copied().collect(),
            };
            for oid in tables {
                self.stop_table(oid, commit, &error.into()).await?;
            }
        }
        Ok(())
    }

    /// Tables of one destination that stop once the stream is where that was seen.
    pub(super) async fn serve_stops(&mut self) -> Result<()> {
        if !self.stops.iter().any(|(at, ..)| *at <= self.at) {
            return Ok(());
        }
        self.send_open().await?;
        let at = self.at;
        let (due, early) = std::mem::take(&mut self.stops).into_iter().partition(|(stops, ..)| *stops <= at);
        self.stops = early;
        for (_, Place { destination, oid }, error) in due {
            let Some(routed) = self.tables.get_mut(&oid) else { continue };
            routed.forget(destination);
            let stopped = Live::Stopped { oid, name: routed.name.clone(), error };
            // A destination that has ended stops the pipeline at the next send.
            let _ = self.parts.outlets[destination].live.send_now(stopped);
        }
        Ok(())
    }

    /// A table ends here at every destination whose copy is not later; what came before it is
    /// sent.
    async fn stop_table(&mut self, oid: u32, commit: Lsn, error: &TableError) -> Result<()> {
        if !self.tables.contains_key(&oid) {
            return Ok(());
        }
        self.send_open().await?;
        // Read again after a resync it is no reason any more. A store that cannot say so is one.
        let records = self.parts.store.tables().await.unwrap_or_default();
        let Some(routed) = self.tables.get_mut(&oid) else { return Ok(()) };
        let spooled = routed.spooled.iter().map(|spooled| spooled.destination);
        let takers: Vec<usize> = routed.live.iter().copied().chain(spooled).collect();
        for destination in takers {
            let outlet = &self.parts.outlets[destination];
            let own = records.iter().filter(|record| record.destination == outlet.name);
            let own: Vec<TableRecord> = own.filter(|record| record.oid == oid).cloned().collect();
            if !own.is_empty() && is_made_up(&own, oid, commit) {
                continue;
            }
            routed.forget(destination);
            let stopped = Live::Stopped { oid, name: routed.name.clone(), error: error.clone() };
            // A destination that has ended stops the pipeline at the next send.
            let _ = outlet.live.send_now(stopped);
        }
        Ok(())
    }
}
