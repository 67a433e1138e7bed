use tokio::sync::mpsc;

use super::super::away::Away;
use super::super::copier::Ages;
use super::super::feed::SharedHistory;
use super::super::resume::{NOT_RESUMABLE, Resumes};
use super::super::versions::Versions;
use super::*;
use crate::copy::spool::{FrameHead, SpoolOptions};
use crate::copy::{Spool, WaveOptions};
use crate::position::SnapshotId;
use crate::schema::history::History;
use crate::schema::samples;
use crate::source::SourceConfig;
use crate::status::StatusBoard;
use crate::store::Store;

const OID: u32 = 7;

/// A table with key `id`, and a spool.
struct Bench {
    copier: Copier,
    commands: mpsc::UnboundedReceiver<Command>,
    schema: Arc<TableSchema>,
    _directory: tempfile::TempDir,
}

fn bench() -> Bench {
    let mut id = samples::column(1, "id", "int4");
    (id.key_position, id.identity, id.nullable, id.type_oid) = (Some(1), true, false, 23);
    let mut note = samples::column(2, "note", "text");
    note.type_oid = 25;
    let mut schema = samples::table(vec![id, note]);
    (schema.oid, schema.snapshot) = (OID, SnapshotId { commit: Lsn(5), message: Lsn::ZERO });
    let directory = tempfile::tempdir().unwrap();
    let spool = Spool::open(&directory.path().join("spool"), SpoolOptions::default()).unwrap();
    let source = Arc::new(SourceConfig::parse("postgres://u@localhost/d", "p", "clean").unwrap());
    let history = SharedHistory::new(History::from_stored(vec![schema.clone()]));
    let versions =
        Versions::new(history, Store::open(directory.path(), "clean").unwrap(), source.clone(), Away::default(), None);
    let (sender, commands) = mpsc::unbounded_channel();
    let copier = Copier {
        memory: crate::memory::Budget::new(Some(512 << 20), 1).unwrap_or_else(|error| panic!("{error}")),
        source,
        outlets: Vec::new().into(),
        versions,
        commands: sender,
        options: WaveOptions::default(),
        epoch: 0,
        ages: Ages::new(StatusBoard::new("clean")),
        resumes: Resumes::default(),
        beginnings: Arc::default(),
        resume_bytes: 1,
        spool,
    };
    Bench { copier, commands, schema: Arc::new(schema), _directory: directory }
}

/// `-` is null, `~` was not sent.
fn tuple(cells: &[&str]) -> Vec<u8> {
    let mut data = (cells.len() as u16).to_be_bytes().to_vec();
    for cell in cells {
        match *cell {
            "-" => data.push(b'n'),
            "~" => data.push(b'u'),
            text => {
                data.push(b't');
                data.extend((text.len() as u32).to_be_bytes());
                data.extend(text.as_bytes());
            }
        }
    }
    data
}

fn delete(id: &str) -> Vec<u8> {
    [&b"D"[..], &OID.to_be_bytes()[..], b"K", &tuple(&[id, "-"])].concat()
}

fn insert(id: &str) -> Vec<u8> {
    [&b"I"[..], &OID.to_be_bytes()[..], b"N", &tuple(&[id, "note"])].concat()
}

/// With all of the old row, as under FULL.
fn update(from: &str, to: &str) -> Vec<u8> {
    [&b"U"[..], &OID.to_be_bytes()[..], b"O", &tuple(&[from, "note"]), b"N", &tuple(&[to, "~"])].concat()
}

fn truncate() -> Vec<u8> {
    [&b"T"[..], &1_u32.to_be_bytes()[..], &[0], &OID.to_be_bytes()[..]].concat()
}

fn relation() -> Vec<u8> {
    let column = |key: u8, name: &[u8], kind: u32| {
        [&[key][..], name, &[0], &kind.to_be_bytes()[..], &(-1_i32).to_be_bytes()[..]].concat()
    };
    let head = [&b"R"[..], &OID.to_be_bytes()[..], b"public\0t\0", b"d", &2_u16.to_be_bytes()[..]].concat();
    [head, column(1, b"id", 23), column(0, b"note", 25)].concat()
}

impl Bench {
    /// One transaction for each change, which commits at 10, 20, and so on.
    fn spool(&self, changes: &[Vec<u8>]) {
        for (commit, change) in (1..).map(|number| Lsn(number * 10)).zip(changes) {
            let head = FrameHead { table: OID, commit, committed_at: 0, xid: 1, row: commit, ordinal: commit.0 };
            self.copier.spool.append(head, FrameKind::Relation, &relation()).unwrap();
            self.copier.spool.append(head, FrameKind::Change, change).unwrap();
            self.copier.spool.commit(commit, Lsn(commit.0 + 1)).unwrap();
        }
    }

    /// What is deleted at each of the destinations before they get the snapshot at 60;
    /// `begun`: how often the stream was begun each time that it is asked.
    async fn clean(&mut self, since: &[Option<Lsn>], begun: &[Option<u64>]) -> Result<Vec<Vec<i32>>> {
        let (copier, schema) = (&self.copier, self.schema.clone());
        let mut gone = vec![Vec::new(); since.len()];
        let cleaner = Cleaner::new(copier, schema, Lsn(60), since.iter().copied());
        let Some(mut cleaner) = cleaner else { return Ok(gone) };
        let commands = &mut self.commands;
        let router = async {
            for begun in begun {
                let Some(Command::Reached { at, answer }) = commands.recv().await else { panic!("asks the router") };
                assert_eq!(at, Lsn(60));
                answer.send(*begun).unwrap();
            }
        };
        let scan = async {
            while let Some(deletes) = cleaner.next().await? {
                for (index, deletes) in deletes {
                    assert_eq!(deletes.upserts.count, 0);
                    let wire::ColumnData::Plain(wire::Cells::Int32(ids)) = &deletes.deletes.columns[0].data else {
                        panic!("the key alone")
                    };
                    gone[index].extend(ids);
                }
            }
            Ok::<(), Error>(())
        };
        let (scanned, ()) = tokio::join!(scan, router);
        scanned.map(|()| gone)
    }
}

#[tokio::test]
async fn what_went_since_the_last_snapshot_is_deleted_at_those_who_have_rows_of_it() {
    let mut bench = bench();
    bench.spool(&[
        delete("1"),
        update("2", "2"),
        update("3", "300"),
        insert("4"),
        delete("200"),
        delete("5"), // At 60: in the stream, not before the snapshot.
    ]);
    let since = [Some(Lsn(10)), None, Some(Lsn(20)), Some(Lsn(51)), Some(Lsn(60))];
    let gone = bench.clean(&since, &[Some(3), Some(3)]).await.unwrap();
    assert_eq!(gone, [vec![1, 3, 200], vec![], vec![3, 200], vec![], vec![]]);
    let nothing = bench.clean(&[None, Some(Lsn(60))], &[]).await.unwrap();
    assert_eq!(nothing, [Vec::<i32>::new(), Vec::new()], "nobody is asked");
}

#[tokio::test]
async fn a_spool_that_was_set_back_meanwhile_is_read_once_more() {
    let mut bench = bench();
    bench.spool(&[delete("1")]);
    let gone = bench.clean(&[Some(Lsn(10))], &[Some(3), Some(4), Some(4)]).await.unwrap();
    assert_eq!(gone, [vec![1, 1]]);
}

#[tokio::test]
async fn a_truncation_or_a_full_spool_makes_the_copy_begin_again() {
    let mut bench = bench();
    bench.spool(&[delete("1"), truncate()]);
    let since = [Some(Lsn(10))];
    let error = bench.clean(&since, &[Some(3)]).await.unwrap_err();
    assert_eq!((error.code(), error.is_transient()), (NOT_RESUMABLE, true));
    let error = bench.clean(&since, &[None]).await.unwrap_err();
    assert_eq!(error.code(), NOT_RESUMABLE);
    assert!(error.message().contains("waits for room"), "{error}");
}
