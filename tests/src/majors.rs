//! A source and a mirror of each major of PostgreSQL.

use std::collections::BTreeMap;
use std::future::Future;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock, PoisonError};

use tidegate::scratch::{Cluster, ClusterOptions};

/// The majors that Tidegate replicates from.
pub const MAJORS: [u32; 5] = [14, 15, 16, 17, 18];

/// The servers of one major.
pub struct Servers {
    /// 14 to 18.
    pub major: u32,
    /// Replicated from.
    pub source: Cluster,
    /// Of its own: one in the source's cluster would delay the snapshots of copies.
    pub mirror: Cluster,
}

/// Runs a story on a major's servers. Where there are none, it fails; or says so, if
/// TIDEGATE_ALLOW_MISSING_PG is set.
pub fn on(major: u32, story: impl FnOnce(&'static Servers)) {
    match servers(major) {
        Some(servers) => story(servers),
        None if std::env::var_os("TIDEGATE_ALLOW_MISSING_PG").is_some() => {
            eprintln!("skipped: there is no PostgreSQL {major} here (scripts/setup-postgres {major})");
        }
        None => panic!("there is no PostgreSQL {major} here: run scripts/setup-postgres {major}"),
    }
}

/// Waits for an asynchronous story.
pub fn wait(story: impl Future<Output = ()>) {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap().block_on(story);
}

/// Started once for the tests of this process; none where there is no such server.
pub fn servers(major: u32) -> Option<&'static Servers> {
    static STARTED: OnceLock<Mutex<BTreeMap<u32, &'static Servers>>> = OnceLock::new();
    let started = STARTED.get_or_init(Mutex::default);
    let binaries = binaries(major)?;
    let mut started = started.lock().unwrap_or_else(PoisonError::into_inner);
    Some(started.entry(major).or_insert_with(|| {
        let start = || {
            let options = ClusterOptions { binaries: Some(binaries.clone()), ..ClusterOptions::default() };
            Cluster::start(&options).unwrap()
        };
        Box::leak(Box::new(Servers { major, source: start(), mirror: start() }))
    }))
}

/// Where `scripts/setup-postgres` puts a major's binaries, or Debian.
pub fn binaries(major: u32) -> Option<PathBuf> {
    let ours = std::env::var_os("TIDEGATE_POSTGRES").map_or_else(default_directory, PathBuf::from);
    [ours.join(format!("{major}/bin")), Path::new("/usr/lib/postgresql").join(format!("{major}/bin"))]
        .into_iter()
        .find(|directory| directory.join("initdb").is_file())
}

/// As in `scripts/setup-postgres`.
fn default_directory() -> PathBuf {
    let home = std::env::var_os("HOME").unwrap_or_default();
    let root = std::os::unix::fs::MetadataExt::uid(&std::fs::metadata("/proc/self").unwrap()) == 0;
    if root { "/var/cache/tidegate/postgres".into() } else { Path::new(&home).join(".cache/tidegate/postgres") }
}
