//! Which destination has which version of which table: what a quorum goes by.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;

use crate::config::DestinationConfig;
use crate::position::SnapshotId;
use crate::schema::barrier::{Missing, Peer, Quorum, Standing, missing};
use crate::schema::table::TableName;
use crate::store::TableRecord;

/// All destinations, in the order they were started in.
#[derive(Clone)]
pub(super) struct Rollout(Arc<Inner>);

struct Inner {
    members: Mutex<Vec<Member>>,
    changed: watch::Sender<u64>,
}

struct Member {
    config: Arc<DestinationConfig>,
    tables: HashMap<u32, Standing>,
}

impl Rollout {
    /// Nobody yet.
    pub fn new() -> Rollout {
        Rollout(Arc::new(Inner { members: Mutex::default(), changed: watch::Sender::new(0) }))
    }

    /// A destination, with its tables as they are recorded.
    pub fn join(&self, config: &Arc<DestinationConfig>, tables: &[TableRecord]) {
        let tables = tables.iter().map(|record| (record.oid, record.into())).collect();
        self.lock().push(Member { config: config.clone(), tables });
        self.tell();
    }

    /// A table of a destination as it is recorded now.
    pub fn note(&self, record: &TableRecord) {
        let standing = Standing::from(record);
        let mut members = self.lock();
        let Some(member) = members.iter_mut().find(|member| member.config.name == record.destination) else { return };
        let before = member.tables.insert(record.oid, standing.clone());
        drop(members);
        if before.as_ref() != Some(&standing) {
            self.tell();
        }
    }

    /// A destination has forgotten a table.
    pub fn forget(&self, destination: &str, oid: u32) {
        if let Some(member) = self.lock().iter_mut().find(|member| member.config.name == destination) {
            member.tables.remove(&oid);
        }
        self.tell();
    }

    /// Who holds up a change of a table at a destination; none if its quorum is there.
    pub fn missing(
        &self,
        destination: &str,
        quorum: &Quorum,
        oid: u32,
        table: &TableName,
        to: SnapshotId,
    ) -> Vec<Missing> {
        let members = self.lock();
        let others = members.iter().filter(|member| member.config.name != destination);
        let peers: Vec<Peer> = others
            .map(|member| Peer {
                name: member.config.name.clone(),
                takes: member.config.tables.matches(table),
                standing: member.tables.get(&oid).cloned(),
            })
            .collect();
        missing(quorum, to, &peers)
    }

    /// Changes when a destination has another version of a table, or any table's state.
    pub fn watch(&self) -> watch::Receiver<u64> {
        self.0.changed.subscribe()
    }

    fn tell(&self) {
        self.0.changed.send_modify(|count| *count += 1);
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Member>> {
        self.0.members.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
