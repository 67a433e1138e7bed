//! A state of a test's own, in either of the places that a state can be in.

use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use super::{Store, StoreServer};
use crate::error::Result;
use crate::scratch::{Cluster, ClusterOptions};

/// The cluster that the tests of this process share, gone with the last of them.
pub(super) fn cluster() -> Arc<Cluster> {
    static SHARED: Mutex<Weak<Cluster>> = Mutex::new(Weak::new());
    let mut shared = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
    shared.upgrade().unwrap_or_else(|| {
        let cluster = Arc::new(Cluster::start(&ClusterOptions::default()).unwrap());
        *shared = Arc::downgrade(&cluster);
        cluster
    })
}

/// A name that no other database of the cluster has.
pub(super) fn new_database(cluster: &Cluster) -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let name = format!("state{}", NEXT.fetch_add(1, Ordering::Relaxed));
    cluster.psql("postgres", &format!("CREATE DATABASE {name}")).unwrap();
    name
}

/// A directory, and a database if the state is there.
pub(super) struct Place {
    directory: tempfile::TempDir,
    pub server: Option<Server>,
}

pub(super) struct Server {
    pub cluster: Arc<Cluster>,
    pub database: String,
}

impl Server {
    pub(super) fn new() -> Server {
        let cluster = cluster();
        Server { database: new_database(&cluster), cluster }
    }

    pub(super) fn url(&self) -> String {
        self.cluster.url(&self.database)
    }

    pub(super) fn of(&self, pipeline: &str) -> StoreServer {
        StoreServer::parse(&self.url(), None, pipeline).unwrap()
    }

    pub(super) fn sql(&self, sql: &str) -> String {
        self.cluster.psql(&self.database, sql).unwrap()
    }
}

impl Place {
    pub(super) fn sqlite() -> Place {
        Place { directory: tempfile::tempdir().unwrap(), server: None }
    }

    pub(super) fn postgres() -> Place {
        Place { directory: tempfile::tempdir().unwrap(), server: Some(Server::new()) }
    }

    pub(super) fn path(&self) -> &Path {
        self.directory.path()
    }

    pub(super) fn open(&self) -> Result<Store> {
        self.open_as("shop")
    }

    pub(super) fn open_as(&self, pipeline: &str) -> Result<Store> {
        open(self.path(), self.server.as_ref().map(Server::url).as_deref(), pipeline)
    }

    /// Closes the state, and opens it again.
    pub(super) fn open_again(&self, store: Store) -> Store {
        drop(store);
        self.open().unwrap()
    }

    pub(super) fn read(&self) -> Result<Store> {
        match &self.server {
            Some(server) => Store::open_read_only_on_server(&server.of("shop")),
            None => Store::open_read_only(self.path()),
        }
    }
}

/// Opens a state by what another process can be told of it.
pub(super) fn open(directory: &Path, url: Option<&str>, pipeline: &str) -> Result<Store> {
    match url {
        Some(url) => Store::open_on_server(&StoreServer::parse(url, None, pipeline)?, directory, pipeline),
        None => Store::open(directory, pipeline),
    }
}
