//! One timeline's words.

use std::time::Duration;

use super::atomic::{AtomicU64, Ordering};
use crate::futex;

/// What a dead client's word holds. Values stay below it for ever (2⁶² signals), and waits compare cyclically, so it
/// releases them all.
pub const POISON: u64 = 1 << 62;

/// More than a client can have named beyond what its streams had reached: each is a write that a driver has queued.
pub(super) const LIFE: u64 = 1 << 28;

/// One timeline in shared memory, on a cache line of its own.
#[repr(C, align(64))]
#[derive(Debug, Default)]
pub struct Word {
    pub(super) value: AtomicU64,
    /// Published by the poison in `value`, and says nothing before.
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

    /// Releases every waiter of a dead client's timeline. Only when no work of it can run any more; where there is nobody who knows that,
    /// several may do it at once and again, and what was reached stays so.
    pub fn poison(&self) {
        let mut now = self.value();
        while now < POISON {
            // It never goes back: another may have seen a later value.
            self.last_true.fetch_max(now, Ordering::Release);
            match self.value.compare_exchange(now, POISON, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return,
                Err(later) => now = later,
            }
        }
    }

    /// Wakes who sleeps on it ([`Word::nap`], or a stream of the host's), in any process: a plain store does not.
    pub fn wake(&self) {
        futex::wake(std::ptr::from_ref(&self.value) as u64);
    }

    /// Sleeps for a moment, no longer than this, while the value is the one that was seen. A GPU's write does not end it; a host
    /// stream's does, and so does [`Word::wake`].
    pub fn nap(&self, seen: u64, at_most: Duration) {
        futex::nap(std::ptr::from_ref(&self.value) as u64, seen, at_most);
    }

    /// Takes the poison away when the slot gets a new client. Values go on above every one that the dead client ever named: a stream
    /// that has yet to come to its wait for one of those is not held up by it, and no value is named a second time. Only the owner does,
    /// while nobody else writes here. What the dead has scribbled over the value ends with it; a word that is used up stays poisoned.
    pub fn revive(&self) -> u64 {
        let now = self.value();
        let next = self.last_true.load(Ordering::Relaxed).saturating_add(LIFE);
        if now < POISON || next >= POISON {
            return now;
        }
        self.value.store(next, Ordering::Release);
        next
    }
}
