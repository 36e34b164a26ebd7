//! The heap's lock. It is held for some hundred nanoseconds, so a waiter looks again for a while before it sleeps: to be put
//! to sleep and woken costs a hundred times what it waits for.

use parking_lot::{Mutex, MutexGuard};

/// Looks before a waiter sleeps, each a little further from the last: some ten microseconds in all.
const LOOKS: u32 = 64;

#[derive(Debug)]
pub(super) struct Lock<T>(Mutex<T>);

impl<T> Lock<T> {
    pub(super) const fn new(value: T) -> Self {
        Self(Mutex::new(value))
    }

    #[inline]
    pub(super) fn lock(&self) -> MutexGuard<'_, T> {
        match self.0.try_lock() {
            Some(guard) => guard,
            None => self.wait(),
        }
    }

    #[cold]
    fn wait(&self) -> MutexGuard<'_, T> {
        for look in 0..LOOKS {
            (0..look.min(8)).for_each(|_| std::hint::spin_loop());
            if !self.0.is_locked() {
                if let Some(guard) = self.0.try_lock() {
                    return guard;
                }
            }
        }
        self.0.lock()
    }
}
