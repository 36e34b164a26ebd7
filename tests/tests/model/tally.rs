//! A client's counters: one word each, `Tally.0`, to which any thread of the client adds and which the owner zeroes for the slot's next
//! client. Relied on: no addition is lost, and a counter is never seen to fall while it is one client's. No other word is read by them.

mod atomic {
    pub(super) use loom::sync::atomic::{AtomicU64, Ordering};
}

#[path = "../../../ipc/src/control/tally.rs"]
mod real;

use loom::sync::Arc;
use loom::thread;
use real::{Count, Tally, Tier};

use crate::check;

const SENT: Count = Count::Sent(Tier::Arena);

#[test]
fn no_addition_is_lost_and_no_counter_falls() {
    check(2, || {
        let tally = Arc::new(Tally(Default::default()));
        let adders = [1, 10].map(|n| {
            let tally = tally.clone();
            thread::spawn(move || {
                tally.add(SENT, n);
                tally.add(Count::CopiedBytes, n);
                tally.add(SENT, n);
            })
        });
        let reader = {
            let tally = tally.clone();
            thread::spawn(move || {
                let seen = tally.get(SENT);
                assert!(tally.get(SENT) >= seen, "it fell");
            })
        };
        adders.into_iter().chain([reader]).for_each(|thread| thread.join().unwrap());
        assert_eq!((tally.get(SENT), tally.get(Count::CopiedBytes)), (22, 11));
        tally.reset();
        assert_eq!(tally.get(SENT), 0);
    });
}
