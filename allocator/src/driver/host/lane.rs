//! Hardware queues. A device has few of them and many streams; a stream that waits on an unmet word holds up what later
//! came into its hardware queue from other streams (facts/driver.md: every 8th stream by default).

use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::{Condvar, Mutex};

/// One hardware queue.
#[derive(Debug, Default)]
pub(super) struct Lane {
    next: AtomicU64,
    /// The tickets of the unmet waits that streams stand at now.
    unmet: Mutex<Vec<u64>>,
    passed: Condvar,
}

impl Lane {
    /// The place of a piece of work in the hardware queue.
    pub(super) fn ticket(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    /// A stream stands at an unmet wait.
    pub(super) fn hold(&self, ticket: u64) {
        let mut unmet = self.unmet.lock();
        if !unmet.contains(&ticket) {
            unmet.push(ticket);
        }
    }

    /// The wait was met, or given up.
    pub(super) fn pass(&self, ticket: u64) {
        let mut unmet = self.unmet.lock();
        let before = unmet.len();
        unmet.retain(|other| *other != ticket);
        if unmet.len() != before {
            self.passed.notify_all();
        }
    }

    /// Blocks until no stream stands at an unmet wait that came earlier, or `halted`.
    pub(super) fn admit(&self, ticket: u64, halted: impl Fn() -> bool) {
        let mut unmet = self.unmet.lock();
        while unmet.iter().any(|other| *other < ticket) && !halted() {
            self.passed.wait(&mut unmet);
        }
    }

    /// Makes everyone who is blocked look at `halted` again.
    pub(super) fn wake(&self) {
        let _unmet = self.unmet.lock();
        self.passed.notify_all();
    }
}
