//! A number that says whether something may be done, and an end that waits for who does it.

use super::atomic::{fence, AtomicU32, Ordering};

/// Open while its number is not 0.
#[derive(Debug)]
pub(super) struct Gate {
    pub(super) number: AtomicU32,
    /// Threads that are in it, or are about to see that it is shut.
    pub(super) inside: AtomicU32,
}

impl Gate {
    /// Opens it.
    pub(super) fn open(&self, number: u32) {
        self.number.store(number, Ordering::Release);
    }

    /// Whether there is anything to enter: a hint.
    #[inline]
    pub(super) fn is_open(&self) -> bool {
        self.number.load(Ordering::Relaxed) != 0
    }

    /// Whoever enters from here on finds it shut; those who did not are counted by [`Gate::is_empty`].
    pub(super) fn shut(&self) {
        self.number.store(0, Ordering::Relaxed);
        // Each side stores one word and then looks at the other's: of two fences, who passes the second sees the first one's store.
        fence(Ordering::SeqCst);
    }

    /// After [`Gate::shut`]: whether nobody is inside.
    pub(super) fn is_empty(&self) -> bool {
        self.inside.load(Ordering::Acquire) == 0
    }

    /// `None` where it is shut.
    pub(super) fn enter(&self) -> Option<Inside<'_>> {
        self.inside.fetch_add(1, Ordering::Relaxed);
        // As in `shut`.
        fence(Ordering::SeqCst);
        let inside = Inside { gate: self, number: self.number.load(Ordering::Acquire) };
        (inside.number != 0).then_some(inside)
    }

    /// Shut, with nobody inside: for a forked child, which has one thread.
    pub(super) fn reset(&self) {
        self.number.store(0, Ordering::Relaxed);
        self.inside.store(0, Ordering::Relaxed);
    }
}

/// While it lives, its thread is inside.
#[derive(Debug)]
pub(super) struct Inside<'a> {
    gate: &'a Gate,
    /// The gate's, from 1.
    pub(super) number: u32,
}

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        self.gate.inside.fetch_sub(1, Ordering::Release);
    }
}
