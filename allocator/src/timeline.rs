//! Timelines: a 64-bit counter in shared host memory that one stream of one client writes and others wait on.
//!
//! The GPU writes and waits on the word; the CPU reads it with a plain load. When a client dies, the owner keeps the last
//! true value apart and stores [`POISON`], which releases every waiter at once and tells them from a value reached.

use std::sync::atomic::{AtomicU64, Ordering};

/// What a dead client's word holds. Values stay below it for ever (2⁶² signals), and waits compare cyclically, so it
/// releases them all.
pub const POISON: u64 = 1 << 62;

/// One timeline in shared memory, on a cache line of its own.
#[repr(C, align(64))]
#[derive(Debug, Default)]
pub struct Word {
    value: AtomicU64,
    last_true: AtomicU64,
}

/// What a look at a timeline says of a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reached {
    /// The work is done.
    Yes,
    /// Not yet.
    No,
    /// Never: its client died before.
    Never,
}

impl Word {
    /// The value as it is now; at least [`POISON`] if its client is dead.
    #[must_use]
    pub fn value(&self) -> u64 {
        self.value.load(Ordering::Acquire)
    }

    /// Whether the value has been reached.
    #[must_use]
    pub fn reached(&self, value: u64) -> Reached {
        let now = self.value();
        if now < POISON {
            return if now >= value { Reached::Yes } else { Reached::No };
        }
        if self.last_true.load(Ordering::Acquire) >= value {
            Reached::Yes
        } else {
            Reached::Never
        }
    }

    /// Stores a value from the CPU: for work that has no stream.
    pub fn store(&self, value: u64) {
        self.value.fetch_max(value, Ordering::Release);
    }

    /// Releases every waiter of a dead client's timeline. Only when no work of it can run any more.
    pub fn poison(&self) {
        let now = self.value();
        if now < POISON {
            self.last_true.store(now, Ordering::Release);
            self.value.store(POISON, Ordering::Release);
        }
    }

    /// Takes the poison away when the slot gets a new client; values go on from the last true one.
    pub fn revive(&self) -> u64 {
        let last = self.last_true.load(Ordering::Acquire);
        let _ = self.value.compare_exchange(POISON, last, Ordering::AcqRel, Ordering::Acquire);
        self.value()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn poison_keeps_what_was_reached() {
        let word = Word::default();
        word.store(5);
        assert_eq!((word.reached(5), word.reached(6)), (Reached::Yes, Reached::No));
        word.poison();
        word.poison();
        assert_eq!((word.reached(5), word.reached(6)), (Reached::Yes, Reached::Never));
        assert!(word.value() >= POISON);
        assert_eq!(word.revive(), 5);
        assert_eq!(word.reached(6), Reached::No);
    }
}
