//! The thread that owns the database, and the queue in front of it.

use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;

use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot, watch};

use super::backend::Backend;
use super::lock::Lock;
use super::records::Progress;
use crate::error::{Error, Result};

/// Operations that may wait. More than lanes can have under way at once, so that a
/// full queue means a slow disk, and callers then wait.
const QUEUE: usize = 256;

type Work = Box<dyn FnOnce(&mut dyn Backend) + Send>;

enum Command {
    Work(Work),
    Progress(Progress, oneshot::Sender<Result<()>>),
}

/// A command, and its place in the queue, given up when it is done.
struct Queued {
    command: Command,
    _place: Option<OwnedSemaphorePermit>,
}

pub(super) struct Worker {
    /// None while dropping.
    queue: Option<mpsc::Sender<Queued>>,
    /// Bounds the queue. The channel itself is not bounded, for a full one would block
    /// an asynchronous caller's thread instead of making the caller wait.
    places: Arc<Semaphore>,
    /// Counts how often an operator has decided about something: see `Store::marks`.
    pub(super) marks: watch::Sender<u64>,
    /// Who has taken the state over, once somebody has.
    pub(super) lost: watch::Sender<Option<String>>,
    thread: Option<JoinHandle<()>>,
}

impl Worker {
    /// Moves the database, and the lock on it, to a thread of their own.
    pub(super) fn start(backend: Box<dyn Backend>, lock: Option<Lock>) -> Result<Worker> {
        Self::open(move || Ok(backend), lock)
    }

    /// Opens the database on the thread that will own it, and waits for that.
    pub(super) fn open(
        open: impl FnOnce() -> Result<Box<dyn Backend>> + Send + 'static,
        lock: Option<Lock>,
    ) -> Result<Worker> {
        let (queue, commands) = mpsc::channel();
        let (tell, opened) = mpsc::sync_channel(1);
        let lost = watch::Sender::new(None);
        let losing = lost.clone();
        let thread = std::thread::Builder::new()
            .name("tidegate-store".to_owned())
            .spawn(move || {
                match open() {
                    Ok(backend) => {
                        // Whoever opens waits for it.
                        let _ = tell.send(None);
                        serve(backend, &commands, &losing);
                        // After the database was closed.
                        drop(lock);
                    }
                    Err(error) => {
                        drop(lock);
                        let _ = tell.send(Some(error));
                    }
                }
            })
            .map_err(|error| Error::transient("state.thread", format!("no thread for the state: {error}")))?;
        if let Some(error) = opened.recv().map_err(|_| ended())? {
            return Err(error);
        }
        Ok(Worker {
            queue: Some(queue),
            places: Arc::new(Semaphore::new(QUEUE)),
            marks: watch::Sender::new(0),
            lost,
            thread: Some(thread),
        })
    }

    pub(super) async fn call<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut dyn Backend) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let (reply, answer) = oneshot::channel();
        let work: Work = Box::new(move |backend| {
            // Nobody waits any more: the work is done all the same.
            let _ = reply.send(work(backend));
        });
        self.enqueue(Command::Work(work), Some(self.place().await?))?;
        answer.await.map_err(|_| ended())?
    }

    pub(super) async fn progress(&self, progress: Progress) -> Result<()> {
        let (reply, answer) = oneshot::channel();
        self.enqueue(Command::Progress(progress, reply), Some(self.place().await?))?;
        answer.await.map_err(|_| ended())?
    }

    /// Outside the bound: a blocked caller can have one command waiting, no more.
    pub(super) fn call_blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut dyn Backend) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let (reply, answer) = mpsc::sync_channel(1);
        let work: Work = Box::new(move |backend| {
            let _ = reply.send(work(backend));
        });
        self.enqueue(Command::Work(work), None)?;
        answer.recv().map_err(|_| ended())?
    }

    async fn place(&self) -> Result<OwnedSemaphorePermit> {
        self.places.clone().acquire_owned().await.map_err(|_| ended())
    }

    fn enqueue(&self, command: Command, place: Option<OwnedSemaphorePermit>) -> Result<()> {
        let queue = self.queue.as_ref().ok_or_else(ended)?;
        queue.send(Queued { command, _place: place }).map_err(|_| ended())
    }
}

impl Drop for Worker {
    /// Waits until all that was queued is done and the lock is free, so that the state
    /// can be opened again at once.
    fn drop(&mut self) {
        self.queue = None;
        if let Some(thread) = self.thread.take() {
            // A panic there was reported to whoever waited.
            let _ = thread.join();
        }
    }
}

fn ended() -> Error {
    Error::permanent("state.ended", "the thread that writes the state has ended")
        .next("Start tidegate again; if it comes again, report it with the log.")
}

fn serve(mut backend: Box<dyn Backend>, commands: &mpsc::Receiver<Queued>, lost: &watch::Sender<Option<String>>) {
    let mut next = commands.recv().ok();
    while let Some(Queued { command, _place: place }) = next.take() {
        match command {
            Command::Work(work) => {
                work(backend.as_mut());
                drop(place);
            }
            Command::Progress(progress, reply) => {
                let mut run = vec![progress];
                let mut replies = vec![(reply, place)];
                next = gather(commands, &mut run, &mut replies);
                save(backend.as_mut(), &run, replies);
            }
        }
        if let Some(message) = backend.lost().filter(|_| lost.borrow().is_none()) {
            lost.send_replace(Some(message.to_owned()));
        }
        if next.is_none() {
            next = commands.recv().ok();
        }
    }
}

type Waiting = (oneshot::Sender<Result<()>>, Option<OwnedSemaphorePermit>);

/// Takes the progresses that wait directly behind one, and returns the first command
/// that is something else: the order of commands is kept.
fn gather(commands: &mpsc::Receiver<Queued>, run: &mut Vec<Progress>, replies: &mut Vec<Waiting>) -> Option<Queued> {
    while run.len() < QUEUE {
        let queued = commands.try_recv().ok()?;
        match queued {
            Queued { command: Command::Progress(progress, reply), _place: place } => {
                run.push(progress);
                replies.push((reply, place));
            }
            other => return Some(other),
        }
    }
    None
}

fn save(backend: &mut dyn Backend, run: &[Progress], replies: Vec<Waiting>) {
    let together = match run {
        // Alone, it gets its own answer below.
        [_] => false,
        _ => backend.save_progress(run).is_ok(),
    };
    for (progress, (reply, _place)) in run.iter().zip(replies) {
        // If it failed together, one of them may be at fault: each is tried alone.
        let answer = if together { Ok(()) } else { backend.save_progress(std::slice::from_ref(progress)) };
        let _ = reply.send(answer);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;
    use crate::position::{Lsn, Position, SnapshotId};
    use crate::schema::table::TableSchema;
    use crate::schema::tombstone::Tombstone;
    use crate::store::barriers::{BarrierRecord, Verdict};
    use crate::store::copies::{CopyRecord, StretchRecord};
    use crate::store::records::{
        DestinationRecord, Loaded, Mark, QuarantineKey, QuarantineSelection, QuarantinedRow, RefusedWhy, SourceRecord,
        TableError, TableRecord,
    };

    /// Writes down what it was asked; refuses progress of a destination named `bad`.
    struct Recorder(Arc<Mutex<Vec<String>>>);

    impl Recorder {
        fn note(&self, what: String) {
            self.0.lock().unwrap().push(what);
        }
    }

    impl Backend for Recorder {
        fn load(&mut self) -> Result<Loaded> {
            Ok(Loaded::default())
        }
        fn save_source(&mut self, _: &SourceRecord) -> Result<()> {
            Ok(())
        }
        fn save_destination(&mut self, destination: &DestinationRecord) -> Result<()> {
            self.note(destination.name.clone());
            Ok(())
        }
        fn save_destination_error(&mut self, _: &str, _: Option<&TableError>) -> Result<()> {
            Ok(())
        }
        fn append_history(&mut self, _: &TableSchema) -> Result<()> {
            Ok(())
        }
        fn append_end(&mut self, _: &Tombstone) -> Result<()> {
            Ok(())
        }
        fn remove_versions(&mut self, _: u32, _: &[SnapshotId]) -> Result<Vec<SnapshotId>> {
            Ok(Vec::new())
        }
        fn forget_history(&mut self, _: u32) -> Result<bool> {
            Ok(false)
        }
        fn save_tables(&mut self, _: &[TableRecord]) -> Result<()> {
            Ok(())
        }
        fn save_copy(&mut self, _: &CopyRecord) -> Result<()> {
            Ok(())
        }
        fn save_stretch(&mut self, _: &str, _: u32, _: usize, _: StretchRecord) -> Result<()> {
            Ok(())
        }
        fn save_cleaned(&mut self, _: &str, _: u32, _: Lsn) -> Result<()> {
            Ok(())
        }
        fn delete_copy(&mut self, _: &str, _: u32) -> Result<()> {
            Ok(())
        }
        fn save_barrier(&mut self, _: &BarrierRecord) -> Result<()> {
            Ok(())
        }
        fn decide_barrier(&mut self, _: &str, _: u32, _: SnapshotId, _: Verdict) -> Result<bool> {
            Ok(false)
        }
        fn delete_barrier(&mut self, _: &str, _: u32) -> Result<()> {
            Ok(())
        }
        fn barriers(&mut self) -> Result<Vec<BarrierRecord>> {
            Ok(Vec::new())
        }
        fn delete_table(&mut self, _: &str, _: u32) -> Result<()> {
            Ok(())
        }
        fn reset_table(&mut self, _: &str, _: u32) -> Result<()> {
            Ok(())
        }
        fn stop_tables(&mut self, _: &str, _: &TableError) -> Result<()> {
            Ok(())
        }
        fn save_members(&mut self, _: &[(u32, String)]) -> Result<()> {
            Ok(())
        }
        fn save_progress(&mut self, progress: &[Progress]) -> Result<()> {
            let checkpoint = |one: &Progress| one.checkpoint.unwrap().0.to_string();
            self.note(progress.iter().map(checkpoint).collect::<Vec<_>>().join("+"));
            match progress.iter().any(|one| one.destination == "bad") {
                true => Err(Error::permanent("test.bad", "bad")),
                false => Ok(()),
            }
        }
        fn next_generation(&mut self, _: &str, _: u32) -> Result<u64> {
            Ok(1)
        }
        fn get_state(&mut self, _: &str, _: &str) -> Result<Option<Vec<u8>>> {
            Ok(None)
        }
        fn set_state(&mut self, _: &str, _: &str, _: Option<&[u8]>) -> Result<()> {
            Ok(())
        }
        fn put_quarantined(&mut self, _: &[QuarantinedRow]) -> Result<()> {
            Ok(())
        }
        fn explain_quarantined(&mut self, _: &str, _: u32, _: &[(String, Position, RefusedWhy)]) -> Result<()> {
            Ok(())
        }
        fn quarantine_index(&mut self, _: &str) -> Result<Vec<QuarantineKey>> {
            Ok(Vec::new())
        }
        fn get_quarantined(&mut self, _: &str, _: u32, _: &[String]) -> Result<Vec<QuarantinedRow>> {
            Ok(Vec::new())
        }
        fn list_quarantined(&mut self, _: &QuarantineSelection, _: u32) -> Result<Vec<QuarantinedRow>> {
            Ok(Vec::new())
        }
        fn remove_quarantined(&mut self, _: &str, _: u32, _: &[(String, Position)]) -> Result<()> {
            Ok(())
        }
        fn mark_quarantined(&mut self, _: &QuarantineSelection, _: Mark) -> Result<u64> {
            Ok(0)
        }
        fn drop_marked(&mut self, _: &str) -> Result<()> {
            Ok(())
        }
    }

    fn progress(destination: &str, checkpoint: u64) -> Progress {
        Progress { destination: destination.to_owned(), checkpoint: Some(Lsn(checkpoint)), positions: Vec::new() }
    }

    /// Queues everything while the thread is held, then lets it go.
    async fn run(items: Vec<Result<Progress, &'static str>>) -> (Vec<String>, Vec<Result<()>>) {
        let notes = Arc::new(Mutex::new(Vec::new()));
        let worker = Arc::new(Worker::start(Box::new(Recorder(notes.clone())), None).unwrap());
        let (go, gate) = mpsc::channel::<()>();
        let hold: Work = Box::new(move |_| {
            // Ends when the other side is dropped.
            let _ = gate.recv();
        });
        worker.enqueue(Command::Work(hold), None).unwrap();
        let mut answers = Vec::new();
        for item in items {
            let (reply, answer) = oneshot::channel();
            answers.push(answer);
            let command = match item {
                Ok(progress) => Command::Progress(progress, reply),
                Err(name) => Command::Work(Box::new(move |backend| {
                    let record = DestinationRecord { name: name.to_owned(), plugin: String::new(), checkpoint: Lsn(0) };
                    let _ = reply.send(backend.save_destination(&record));
                })),
            };
            worker.enqueue(command, None).unwrap();
        }
        drop(go);
        let mut results = Vec::new();
        for answer in answers {
            results.push(answer.await.unwrap());
        }
        let notes = notes.lock().unwrap().clone();
        (notes, results)
    }

    #[tokio::test]
    async fn progresses_that_wait_share_a_transaction_and_nothing_overtakes() {
        let items = vec![
            Ok(progress("d", 1)),
            Ok(progress("d", 2)),
            Ok(progress("d", 3)),
            Err("between"),
            Ok(progress("d", 4)),
            Err("then"),
            Ok(progress("d", 5)),
            Ok(progress("d", 6)),
        ];
        let (notes, results) = run(items).await;
        assert_eq!(notes, ["1+2+3", "between", "4", "then", "5+6"]);
        assert!(results.iter().all(Result::is_ok));
    }

    #[tokio::test]
    async fn one_bad_progress_does_not_fail_those_it_was_joined_with() {
        let (notes, results) = run(vec![Ok(progress("d", 1)), Ok(progress("bad", 2)), Ok(progress("d", 3))]).await;
        assert_eq!(notes, ["1+2+3", "1", "2", "3"]);
        assert_eq!(results.iter().map(Result::is_ok).collect::<Vec<_>>(), [true, false, true]);
    }

    #[tokio::test]
    async fn what_is_queued_is_done_before_the_last_handle_is_gone() {
        let notes = Arc::new(Mutex::new(Vec::new()));
        let worker = Worker::start(Box::new(Recorder(notes.clone())), None).unwrap();
        let (reply, _nobody) = oneshot::channel();
        worker.enqueue(Command::Progress(progress("d", 1), reply), None).unwrap();
        drop(worker);
        assert_eq!(*notes.lock().unwrap(), ["1"]);
    }

    #[tokio::test]
    async fn a_caller_waits_when_the_queue_is_full() {
        let notes = Arc::new(Mutex::new(Vec::new()));
        let worker = Arc::new(Worker::start(Box::new(Recorder(notes)), None).unwrap());
        let mut places = Vec::new();
        for _ in 0..QUEUE {
            places.push(worker.place().await.unwrap());
        }
        let waiting = tokio::spawn({
            let worker = worker.clone();
            async move { worker.call(|backend| backend.next_generation("d", 0)).await }
        });
        tokio::task::yield_now().await;
        assert!(!waiting.is_finished());
        drop(places);
        assert_eq!(waiting.await.unwrap().unwrap(), 1);
    }
}
