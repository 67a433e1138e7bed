//! A queue bounded in bytes: what lets a slow destination push back on who feeds it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, mpsc};

/// Permits count kibibytes, so that a semaphore's `u32` reaches far enough.
const UNIT: usize = 1024;

/// An item and its share of the queue's bytes, given back when dropped.
pub(super) struct Held<T> {
    /// What was sent.
    pub item: T,
    /// Kept with the item's memory for as long as that lives.
    pub permit: Option<OwnedSemaphorePermit>,
}

struct Shared {
    space: Arc<Semaphore>,
    units: usize,
    hungry: AtomicBool,
    wake: Arc<Notify>,
}

/// The feeding end.
pub(super) struct Sender<T> {
    queue: mpsc::UnboundedSender<Held<T>>,
    shared: Arc<Shared>,
}

impl<T> Clone for Sender<T> {
    fn clone(&self) -> Self {
        Sender { queue: self.queue.clone(), shared: self.shared.clone() }
    }
}

/// The other end is gone: its owner has stopped.
#[derive(Debug)]
pub(super) struct Closed;

impl<T> Sender<T> {
    /// Waits for room and sends. An item larger than the whole queue takes all of it.
    pub async fn send(&self, item: T, bytes: usize) -> Result<(), Closed> {
        let units = (bytes / UNIT).clamp(1, self.shared.units) as u32;
        let permit = self.shared.space.clone().acquire_many_owned(units).await.map_err(|_| Closed)?;
        self.put(item, Some(permit))
    }

    /// Sends what weighs nothing, or what must not wait, over the bound.
    pub fn send_now(&self, item: T) -> Result<(), Closed> {
        self.put(item, None)
    }

    /// Whether there is room for this many bytes now.
    pub fn has_room(&self, bytes: usize) -> bool {
        self.shared.space.available_permits() >= (bytes / UNIT).clamp(1, self.shared.units)
    }

    /// Whether the receiver waits for something to do.
    pub fn is_hungry(&self) -> bool {
        self.shared.hungry.load(Ordering::Acquire)
    }

    fn put(&self, item: T, permit: Option<OwnedSemaphorePermit>) -> Result<(), Closed> {
        self.shared.hungry.store(false, Ordering::Release);
        self.queue.send(Held { item, permit }).map_err(|_| Closed)
    }
}

/// The consuming end. Dropping it fails all senders.
pub(super) struct Receiver<T> {
    queue: mpsc::UnboundedReceiver<Held<T>>,
    shared: Arc<Shared>,
}

impl<T> Receiver<T> {
    /// The next item; none when all senders are gone. Cancel safe.
    pub async fn recv(&mut self) -> Option<Held<T>> {
        if let Ok(held) = self.queue.try_recv() {
            return Some(held);
        }
        self.shared.hungry.store(true, Ordering::Release);
        self.shared.wake.notify_one();
        self.queue.recv().await
    }

    /// The next item if one is there.
    pub fn try_recv(&mut self) -> Option<Held<T>> {
        self.queue.try_recv().ok()
    }
}

impl<T> Drop for Receiver<T> {
    fn drop(&mut self) {
        self.shared.space.close();
    }
}

/// A queue of at most `bytes`; `wake` is notified whenever its receiver runs out of
/// items.
pub(super) fn inbox<T>(bytes: usize, wake: Arc<Notify>) -> (Sender<T>, Receiver<T>) {
    let units = (bytes / UNIT).max(1);
    let shared =
        Arc::new(Shared { space: Arc::new(Semaphore::new(units)), units, hungry: AtomicBool::new(false), wake });
    let (sender, receiver) = mpsc::unbounded_channel();
    (Sender { queue: sender, shared: shared.clone() }, Receiver { queue: receiver, shared })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_full_inbox_waits_until_an_item_is_dropped() {
        let (sender, mut receiver) = inbox::<u8>(2048, Arc::new(Notify::new()));
        sender.send(1, 2048).await.unwrap();
        assert!(!sender.has_room(1));
        let waiting = tokio::spawn({
            let sender = sender.clone();
            async move { sender.send(2, 1024).await }
        });
        let first = receiver.recv().await.unwrap();
        assert_eq!(first.item, 1);
        assert!(receiver.try_recv().is_none(), "the first item still holds its bytes");
        drop(first);
        assert_eq!(receiver.recv().await.unwrap().item, 2);
        waiting.await.unwrap().unwrap();
    }

    #[tokio::test]
    async fn an_item_larger_than_the_inbox_passes_alone() {
        let (sender, mut receiver) = inbox::<u8>(1024, Arc::new(Notify::new()));
        sender.send(1, 1 << 30).await.unwrap();
        assert_eq!(receiver.recv().await.unwrap().item, 1);
        sender.send(2, 10).await.unwrap();
        assert_eq!(receiver.recv().await.unwrap().item, 2);
    }

    #[tokio::test]
    async fn senders_fail_when_the_receiver_is_gone() {
        let (sender, receiver) = inbox::<u8>(1024, Arc::new(Notify::new()));
        drop(receiver);
        assert!(sender.send(1, 1).await.is_err());
        assert!(sender.send_now(1).is_err());
    }
}
