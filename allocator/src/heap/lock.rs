//! The heap's lock. It is held for tens of nanoseconds, so it is one exchange to take and one plain store to give back, and a
//! waiter looks again and again before it sleeps: to be put to sleep and woken costs a hundred times what it waits for. One
//! that waits longer (its holder has lost its processor, or trims) lets others run, then sleeps between its looks.
#![allow(unsafe_code)] // a lock's cell

use std::cell::UnsafeCell;
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::time::Duration;

use super::sync::{sleep, spin_loop, yield_now, AtomicBool, Ordering};

/// Looks of a waiter that does not let go of its processor: some ten microseconds in all.
const LOOKS: u32 = 24;
/// Up to this look it lets others run in between.
const YIELDS: u32 = LOOKS + 16;
/// What it sleeps between the later ones.
const NAP: Duration = Duration::from_micros(50);

pub(super) struct Lock<T> {
    held: AtomicBool,
    value: UnsafeCell<T>,
}

// SAFETY: the value is reached only through a guard, and `held` lets only one exist.
unsafe impl<T: Send> Sync for Lock<T> {}

impl<T> Lock<T> {
    pub(super) fn new(value: T) -> Self {
        Self { held: AtomicBool::new(false), value: UnsafeCell::new(value) }
    }

    #[inline]
    pub(super) fn lock(&self) -> Guard<'_, T> {
        if self.held.swap(true, Ordering::Acquire) {
            self.wait();
        }
        Guard { lock: self }
    }

    #[cold]
    fn wait(&self) {
        for look in 0_u32.. {
            match look {
                0..LOOKS => (0..1 << look.min(4)).for_each(|_| spin_loop()),
                LOOKS..YIELDS => yield_now(),
                _ => sleep(NAP),
            }
            // Waiters only read, so that the holder keeps its cache line.
            if !self.held.load(Ordering::Relaxed) && !self.held.swap(true, Ordering::Acquire) {
                return;
            }
        }
    }
}

impl<T> fmt::Debug for Lock<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lock").field("held", &self.held).finish_non_exhaustive()
    }
}

/// While it lives, the lock is held.
#[derive(Debug)]
#[must_use]
pub(super) struct Guard<'a, T> {
    lock: &'a Lock<T>,
}

impl<T> Deref for Guard<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: this guard is the only one, so nobody else reaches the value.
        unsafe { &*self.lock.value.get() }
    }
}

impl<T> DerefMut for Guard<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as above, and the guard is borrowed alone.
        unsafe { &mut *self.lock.value.get() }
    }
}

impl<T> Drop for Guard<'_, T> {
    #[inline]
    fn drop(&mut self) {
        self.lock.held.store(false, Ordering::Release);
    }
}
