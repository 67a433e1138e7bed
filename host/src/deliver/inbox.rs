//! A queue bounded by a share of the memory budget: what lets a slow destination push
//! back on who feeds it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::sync::{Notify, mpsc};

use crate::memory::{Share, Taken};

/// An item and its memory's part of the share, given back when dropped.
pub(super) struct Held<T> {
    /// What was sent.
    pub item: T,
    /// Kept with the item's memory for as long as that lives.
    pub taken: Option<Taken>,
}

struct Shared {
    share: Share,
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
    /// Waits for room and sends. An item larger than the whole share has it alone.
    pub async fn send(&self, item: T, bytes: usize) -> Result<(), Closed> {
        let taken = self.room(bytes).await?;
        self.put(item, Some(taken))
    }

    /// Waits for room for something that is still to be made, and then sent with
    /// [`Sender::send_taken`].
    pub async fn room(&self, bytes: usize) -> Result<Taken, Closed> {
        self.shared.share.take(bytes).await.ok_or(Closed)
    }

    /// Sends what has its room already.
    pub fn send_taken(&self, item: T, taken: Taken) -> Result<(), Closed> {
        self.put(item, Some(taken))
    }

    /// Sends what weighs nothing.
    pub fn send_now(&self, item: T) -> Result<(), Closed> {
        self.put(item, None)
    }

    /// Sends what must not wait, over the bound.
    pub fn send_over(&self, item: T, bytes: usize) -> Result<(), Closed> {
        self.put(item, Some(self.shared.share.take_now(bytes)))
    }

    /// Room that is there without waiting.
    pub fn try_room(&self, bytes: usize) -> Option<Taken> {
        self.shared.share.try_take(bytes)
    }

    /// Whether the receiver waits for something to do.
    pub fn is_hungry(&self) -> bool {
        self.shared.hungry.load(Ordering::Acquire)
    }

    fn put(&self, item: T, taken: Option<Taken>) -> Result<(), Closed> {
        self.shared.hungry.store(false, Ordering::Release);
        self.queue.send(Held { item, taken }).map_err(|_| Closed)
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

    /// The share that it is bounded by.
    pub fn share(&self) -> Share {
        self.shared.share.clone()
    }

    /// Takes of the share for what is here already.
    pub fn take_now(&self, bytes: usize) -> Taken {
        self.shared.share.take_now(bytes)
    }

    /// Bytes of the share, now.
    pub fn share_bytes(&self) -> usize {
        self.shared.share.bytes()
    }
}

impl<T> Drop for Receiver<T> {
    fn drop(&mut self) {
        self.shared.share.close();
    }
}

/// A queue within `share`; `wake` is notified whenever its receiver runs out of items.
pub(super) fn inbox<T>(share: Share, wake: Arc<Notify>) -> (Sender<T>, Receiver<T>) {
    let shared = Arc::new(Shared { share, hungry: AtomicBool::new(false), wake });
    let (sender, receiver) = mpsc::unbounded_channel();
    (Sender { queue: sender, shared: shared.clone() }, Receiver { queue: receiver, shared })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn queue(bytes: usize) -> (Sender<u8>, Receiver<u8>) {
        inbox(Share::fixed(bytes), Arc::new(Notify::new()))
    }

    #[tokio::test]
    async fn a_full_inbox_waits_until_an_item_is_dropped() {
        let (sender, mut receiver) = queue(2048);
        sender.send(1, 2048).await.unwrap();
        assert!(sender.try_room(1).is_none());
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
        let (sender, mut receiver) = queue(1024);
        sender.send(1, 1 << 30).await.unwrap();
        assert_eq!(receiver.recv().await.unwrap().item, 1);
        sender.send(2, 10).await.unwrap();
        assert_eq!(receiver.recv().await.unwrap().item, 2);
    }

    #[tokio::test]
    async fn what_goes_over_the_bound_counts_all_the_same() {
        let (sender, mut receiver) = queue(4096);
        sender.send_over(1, 10_000).unwrap();
        sender.send_now(2).unwrap();
        assert!(sender.try_room(1).is_none());
        drop(receiver.recv().await);
        assert!(sender.try_room(4096).is_some());
    }

    #[tokio::test]
    async fn senders_fail_when_the_receiver_is_gone() {
        let (sender, receiver) = queue(1024);
        drop(receiver);
        assert!(sender.send(1, 1).await.is_err());
        assert!(sender.send_now(1).is_err());
    }
}
