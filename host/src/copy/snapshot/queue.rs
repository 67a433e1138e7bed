//! Who is next: connections go to the biggest table that asks.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::oneshot;

/// A number of places, given out by rank: the lowest that waits goes first.
#[derive(Debug)]
pub(super) struct Queue {
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    free: usize,
    /// By rank, then in order of asking.
    waiting: BTreeMap<(u64, u64), oneshot::Sender<Turn>>,
    asked: u64,
}

/// A place, given back when dropped.
#[derive(Debug)]
pub struct Turn {
    queue: Option<Arc<Queue>>,
}

impl Queue {
    /// A queue with so many places.
    pub(super) fn new(places: usize) -> Arc<Queue> {
        let state = State { free: places.max(1), waiting: BTreeMap::new(), asked: 0 };
        Arc::new(Queue { state: Mutex::new(state) })
    }

    /// Waits for a place. Cancel safe.
    pub(super) async fn turn(self: &Arc<Self>, rank: u64) -> Turn {
        loop {
            let receiver = {
                let mut state = self.lock();
                if state.free > 0 {
                    state.free -= 1;
                    return Turn { queue: Some(self.clone()) };
                }
                let (sender, receiver) = oneshot::channel();
                state.asked += 1;
                let place = (rank, state.asked);
                state.waiting.insert(place, sender);
                receiver
            };
            // The sender stays in the queue until it has sent.
            if let Ok(turn) = receiver.await {
                return turn;
            }
        }
    }

    /// Whether somebody waits.
    pub(super) fn is_waited_for(&self) -> bool {
        self.lock().waiting.values().any(|waiting| !waiting.is_closed())
    }

    fn give_back(self: &Arc<Self>) {
        let mut state = self.lock();
        while let Some((_, next)) = state.waiting.pop_first() {
            match next.send(Turn { queue: Some(self.clone()) }) {
                Ok(()) => return,
                // It does not wait any more.
                Err(mut turn) => turn.queue = None,
            }
        }
        state.free += 1;
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        if let Some(queue) = self.queue.take() {
            queue.give_back();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_lowest_rank_that_waits_is_next_and_one_that_gave_up_is_passed_over() {
        let queue = Queue::new(1);
        let first = queue.turn(9).await;
        let order: Arc<Mutex<Vec<u64>>> = Arc::default();
        let mut waiting = Vec::new();
        for rank in [3, 1, 2] {
            let (asked, order) = (queue.clone(), order.clone());
            waiting.push(tokio::spawn(async move {
                let _turn = asked.turn(rank).await;
                order.lock().unwrap().push(rank);
            }));
            while queue.lock().waiting.len() < waiting.len() {
                tokio::task::yield_now().await;
            }
        }
        waiting[1].abort();
        assert!(waiting.remove(1).await.unwrap_err().is_cancelled());
        drop(first);
        for waiting in waiting {
            waiting.await.unwrap();
        }
        assert_eq!(*order.lock().unwrap(), [2, 3]);
        let state = queue.lock();
        assert_eq!((state.free, state.waiting.len()), (1, 0));
    }
}
