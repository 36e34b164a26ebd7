//! The heap's lock: `Lock::held`, one exchange to take it, one store to give it back.
//!
//! Relied on: one holder at a time, each sees all that those before it wrote, and whoever waits gets it when it is given back.

mod sync {
    pub(super) use loom::sync::atomic::Ordering;

    /// How a waiter passes its time is nothing to the model: others run before it looks again.
    pub(super) fn spin_loop() {}
    pub(super) fn yield_now() {}
    pub(super) fn sleep(_time: std::time::Duration) {}

    /// An exchange that finds what it would store leaves it: the checker takes such a store for one that may come after the holder's next,
    /// which no machine does, and then waits for ever.
    #[derive(Debug)]
    pub(super) struct AtomicBool(loom::sync::atomic::AtomicBool);

    impl AtomicBool {
        pub(super) fn new(value: bool) -> Self {
            Self(loom::sync::atomic::AtomicBool::new(value))
        }

        pub(super) fn load(&self, order: Ordering) -> bool {
            loom::thread::yield_now();
            self.0.load(order)
        }

        pub(super) fn store(&self, value: bool, order: Ordering) {
            self.0.store(value, order);
        }

        pub(super) fn swap(&self, value: bool, order: Ordering) -> bool {
            match self.0.compare_exchange(!value, value, order, Ordering::Relaxed) {
                Ok(found) | Err(found) => found,
            }
        }
    }
}

#[path = "../../../allocator/src/heap/lock.rs"]
mod real;

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;
use real::Lock;

use crate::check;

/// A value whose accesses the model checker looks at: one that is not ordered behind the last is an error.
type Watched = Lock<UnsafeCell<u64>>;

fn add(lock: &Watched) {
    let held = lock.lock();
    held.with_mut(|value| {
        // SAFETY: the lock is held, which is what is checked here.
        unsafe { *value += 1 }
    });
}

fn value(lock: &Watched) -> u64 {
    // SAFETY: as above.
    lock.lock().with(|value| unsafe { *value })
}

/// Two threads: of two that wait for a third the checker would try without end how they take turns at looking.
#[test]
fn one_at_a_time_and_each_sees_the_last_and_who_waits_gets_it() {
    check(3, || {
        let lock = Arc::new(Lock::new(UnsafeCell::new(0)));
        let threads = [(); 2].map(|()| {
            let lock = lock.clone();
            thread::spawn(move || (0..2).for_each(|_| add(&lock)))
        });
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!(value(&lock), 4);
    });
}
