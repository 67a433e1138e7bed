//! Lets what the server sends gather before it is read.
//!
//! The server writes each message to the socket by itself. To wait for every one of them
//! costs a system call here and a wake-up there, and each commit would become a group of
//! its own; a short sleep makes one read and one group of many.

use std::time::Duration;

/// Far below what a commit takes to become durable, and long enough for the rest of a
/// small transaction to arrive.
const LEAST: Duration = Duration::from_micros(100);
/// Under load: at 100,000 rows a second some 30 KB gather, a fraction of a socket's buffer.
const MOST: Duration = Duration::from_micros(1600);
/// More messages than this in one read: the stream is under load. A small transaction
/// has three.
const FEW: usize = 8;

/// How long to wait before the next read.
#[derive(Debug, Default)]
pub(super) struct Gather {
    next: Duration,
    due: bool,
}

impl Gather {
    /// A read had so many messages.
    pub fn took(&mut self, messages: usize) {
        self.next = if messages > FEW { (self.next * 2).clamp(LEAST, MOST) } else { LEAST };
        self.due = true;
    }

    /// Sleeps once after each read. It blocks the thread, which is the stream's own: an
    /// asynchronous sleep would be woken by every message, and lasts a millisecond or
    /// none.
    pub fn pause(&mut self) {
        if std::mem::take(&mut self.due) {
            std::thread::sleep(self.next);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pause_grows_under_load_up_to_its_bound_and_ends_with_it() {
        let mut gather = Gather::default();
        gather.took(3);
        assert_eq!(gather.next, LEAST);
        for _ in 0..10 {
            gather.took(FEW + 1);
        }
        assert_eq!(gather.next, MOST);
        gather.took(1);
        assert_eq!(gather.next, LEAST);
    }

    #[test]
    fn there_is_one_pause_for_each_read() {
        let mut gather = Gather::default();
        gather.pause();
        assert!(!gather.due);
        gather.took(1);
        assert!(gather.due);
        gather.pause();
        assert!(!gather.due);
    }
}
