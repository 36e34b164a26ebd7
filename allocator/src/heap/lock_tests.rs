//! The lock with real threads; `tests/tests/model/lock.rs` has it under every order of steps.

use super::lock::Lock;

#[test]
fn one_at_a_time() {
    let lock = Lock::new((0_u64, 0_u64));
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                for turn in 0..5_000 {
                    let mut pair = lock.lock();
                    assert_eq!(pair.0, pair.1);
                    pair.0 += 1;
                    if turn % 1_000 == 0 {
                        // The holder loses its processor: the others come to yield and to sleep.
                        std::thread::yield_now();
                    }
                    pair.1 += 1;
                }
            });
        }
    });
    assert_eq!(*lock.lock(), (40_000, 40_000));
}

#[test]
fn a_panic_lets_go() {
    let lock = Lock::new(1);
    let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let _held = lock.lock();
        panic!("on purpose");
    }));
    assert!(caught.is_err());
    assert_eq!(*lock.lock(), 1);
}
