use std::time::Duration;

use tokio::sync::{Notify, mpsc};

use super::super::away::Away;
use super::super::feed::SharedHistory;
use super::super::inbox::{Receiver, inbox};
use super::super::resume::Resumes;
use super::super::versions::Versions;
use super::*;
use crate::copy::snapshot::{self, WaveOptions};
use crate::copy::{Spool, SpoolOptions};
use crate::deliver::copier::{Ages, CopyOutlet};
use crate::memory::{Budget, Share};
use crate::schema::history::History;
use crate::scratch::{Cluster, ClusterOptions};
use crate::source::SourceConfig;
use crate::source::catalog::published_tables;
use crate::source::session;
use crate::status::StatusBoard;
use crate::store::Store;

const ROWS: u32 = 20_000;

/// A table, and a copier whose destinations are the test's own.
struct Bench {
    copier: Copier,
    copying: Vec<Receiver<Copying>>,
    _commands: mpsc::UnboundedReceiver<Command>,
    _cluster: Cluster,
    _directory: tempfile::TempDir,
}

async fn bench(destinations: usize) -> Bench {
    let cluster = Cluster::start(&ClusterOptions::default()).unwrap();
    let setup = format!(
        "CREATE TABLE t (id int PRIMARY KEY, a text);
         INSERT INTO t SELECT i, repeat('x', 500) FROM generate_series(1, {ROWS}) i; CREATE PUBLICATION p FOR TABLE t"
    );
    cluster.psql("postgres", &setup).unwrap();
    let source = Arc::new(SourceConfig::parse(&cluster.url("postgres"), "p", "copy_run").unwrap());
    let directory = tempfile::tempdir().unwrap();
    let store = Store::open(directory.path(), "copy_run").unwrap();
    let history = SharedHistory::new(History::default());
    let spool = Spool::open(&directory.path().join("spool"), SpoolOptions::default()).unwrap();
    let versions = Versions::new(history, store, source.clone(), Away::default(), None);
    let (commands, commands_in) = mpsc::unbounded_channel();
    let (mut outlets, mut copying_in) = (Vec::new(), Vec::new());
    for destination in 0..destinations {
        let (copying, receiver) = inbox(Share::fixed(2 << 20), Arc::new(Notify::new()));
        copying_in.push(receiver);
        outlets.push(CopyOutlet { name: format!("d{destination}"), copying, needs_key: true, resumes: false });
    }
    let copier = Copier {
        source,
        outlets: outlets.into(),
        commands,
        versions,
        options: WaveOptions { leave_out_after: Duration::from_millis(300), ..WaveOptions::default() },
        epoch: 0,
        memory: Budget::new(Some(512 << 20), 1).unwrap_or_else(|error| panic!("{error}")),
        ages: Ages::new(StatusBoard::new("copy_run")),
        resumes: Resumes::default(),
        beginnings: Arc::default(),
        resume_bytes: u64::MAX,
        spool,
    };
    Bench { copier, copying: copying_in, _commands: commands_in, _cluster: cluster, _directory: directory }
}

impl Bench {
    /// Copies the table to all destinations; returns those that have to get it again.
    async fn copy(&self, stalled: Stalled) -> BTreeSet<usize> {
        let session = session::connect(&self.copier.source).await.unwrap();
        let tables = published_tables(&session, "p").await.unwrap();
        let wave = snapshot::take(&self.copier.source, &tables, &self.copier.options).await.unwrap();
        let table = wave.tables[0].clone();
        let wave = Arc::new(wave);
        let turn = wave.turn(&table).await;
        let schema = self.copier.versions.copied(table.schema.clone()).await.unwrap();
        let wanted: BTreeSet<usize> = (0..self.copier.outlets.len()).collect();
        CopyRun::new(&self.copier, schema, None, stalled.unread(&wanted), turn).copy(wave, &table).await
    }
}

/// What a destination has seen.
#[derive(Debug, Default, PartialEq)]
struct Seen {
    rows: u32,
    source_bytes: u64,
    total: u64,
    finished: bool,
}

/// Takes all there is until the run is finished.
async fn takes_all(copying: &mut Receiver<Copying>) -> Seen {
    let mut seen = Seen::default();
    let mut run = None;
    while let Some(held) = copying.recv().await {
        match held.item {
            Copying::Begin { begin, done } => {
                seen.total = begin.source_bytes;
                run = Some(begin.alive);
                done.send(Ok(())).unwrap();
            }
            Copying::Rows { rows, .. } => {
                assert!(rows.reading.is_none() && !rows.again);
                seen.rows += rows.rows.count;
                seen.source_bytes += rows.source_bytes;
            }
            Copying::Deletes { .. } | Copying::Cleaned { .. } | Copying::Stretch { .. } => {
                panic!("the copy goes by no stretches")
            }
            Copying::Finish { done, .. } => {
                seen.finished = run.take().is_some();
                done.send(Ok(())).unwrap();
                return seen;
            }
            Copying::Failed { error, .. } => panic!("{error:?}"),
        }
    }
    seen
}

/// Begins, and then takes nothing.
async fn begins(copying: &mut Receiver<Copying>) -> Arc<()> {
    let Some(Copying::Begin { begin, done }) = copying.recv().await.map(|held| held.item) else { panic!("no begin") };
    done.send(Ok(())).unwrap();
    begin.alive
}

fn assert_whole(seen: &Seen) {
    assert_eq!((seen.rows, seen.finished), (ROWS, true), "{seen:?}");
    // What is behind the last rows may be told with none.
    assert!(seen.source_bytes > 0 && seen.source_bytes <= seen.total, "{seen:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_destination_that_stops_taking_rows_is_left_out_and_gets_its_own_copy_later() {
    let mut bench = bench(2).await;
    let mut copying = std::mem::take(&mut bench.copying);
    let stalls = async {
        let (first, second) = copying.split_at_mut(1);
        let seen = tokio::join!(takes_all(&mut first[0]), begins(&mut second[0]));
        seen.0
    };
    let stalled = Stalled::default();
    let (again, seen) = tokio::join!(bench.copy(stalled.clone()), stalls);
    assert_eq!(again, BTreeSet::from([1]));
    assert_whole(&seen);
    assert!(stalled.all([1].into_iter()) && !stalled.all([0, 1].into_iter()));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_destination_that_does_not_begin_is_left_out_and_the_next_table_does_not_wait_for_it() {
    let mut bench = bench(2).await;
    let mut copying = std::mem::take(&mut bench.copying);
    let stalled = Stalled::default();
    let (again, seen) = tokio::join!(bench.copy(stalled.clone()), takes_all(&mut copying[0]));
    assert_eq!(again, BTreeSet::from([1]));
    assert_whole(&seen);
    // Were it waited for, this would take the hour.
    bench.copier.options.leave_out_after = Duration::from_secs(3600);
    let (again, seen) = tokio::join!(bench.copy(stalled), takes_all(&mut copying[0]));
    assert_eq!(again, BTreeSet::from([1]));
    assert_whole(&seen);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_only_destination_is_waited_for_however_long_it_takes() {
    let mut bench = bench(1).await;
    let mut copying = std::mem::take(&mut bench.copying);
    let slow = async {
        tokio::time::sleep(bench.copier.options.leave_out_after * 2).await;
        takes_all(&mut copying[0]).await
    };
    let (again, seen) = tokio::join!(bench.copy(Stalled::default()), slow);
    assert_eq!(again, BTreeSet::new());
    assert_whole(&seen);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_copy_whose_run_every_destination_has_lost_ends_and_asks_each_why() {
    let mut bench = bench(2).await;
    let mut copying = std::mem::take(&mut bench.copying);
    // One was restarted, the other has refused the table for good.
    let answers = [
        Error::transient("copy.interrupted", "restarted"),
        Error::permanent("destination.refused", "this will never go in"),
    ];
    let loses = async |copying: &mut Receiver<Copying>, why: Error| {
        drop(begins(copying).await);
        let mut rows = 0;
        while let Some(held) = copying.recv().await {
            match held.item {
                Copying::Rows { rows: more, .. } => rows += more.rows.count,
                Copying::Finish { done, .. } => {
                    done.send(Err(why)).unwrap();
                    break;
                }
                _ => panic!("neither rows nor the end"),
            }
        }
        rows
    };
    let [first, second] = answers;
    let (left, right) = copying.split_at_mut(1);
    let lost = async { tokio::join!(loses(&mut left[0], first), loses(&mut right[0], second)) };
    let (again, rows) = tokio::join!(bench.copy(Stalled::default()), lost);
    assert_eq!(again, BTreeSet::from([0]));
    assert!(rows.0 < ROWS && rows.1 < ROWS, "{rows:?}");
}
