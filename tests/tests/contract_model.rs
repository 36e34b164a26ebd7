//! What several threads or processes change without a lock, under every order of steps and with every old value that a weakly ordered
//! machine may still read, by a model checker (loom).
//!
//! The sources are the library's own, taken in by their paths; only where they take their atomics from (`super::atomic`, `super::sync`)
//! differs. Each file of `model/` names the words, and what is relied on. A schedule is left after a bounded number of preemptions; both
//! sides run in threads of their own, since loom hardly interleaves its first one with others.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, dead_code, unreachable_pub, missing_docs)]

#[path = "model/gate.rs"]
mod gate;
#[path = "model/holds.rs"]
mod holds;
#[path = "model/lock.rs"]
mod lock;
#[path = "model/nudge.rs"]
mod nudge;
#[path = "model/recording.rs"]
mod recording;
#[path = "model/rows.rs"]
mod rows;
#[path = "model/tally.rs"]
mod tally;
#[path = "model/timeline.rs"]
mod timeline;

/// As much of the control memory as `due.rs` looks at.
mod control {
    pub(crate) use super::timeline::Memory as Control;

    pub(crate) const TIMELINES_PER_CLIENT: usize = 1;

    #[derive(Debug)]
    pub(crate) struct Cause;
}

mod wire {
    pub(crate) struct Peer {
        pub(crate) client: u32,
        pub(crate) serial: u64,
    }
}

/// For the sources that sleep on a word: in a model nobody sleeps.
mod futex {
    use std::time::Duration;

    pub(crate) fn wake(_word: u64) {}

    pub(crate) fn nap(_word: u64, _seen: u64, _at_most: Duration) {
        loom::thread::yield_now();
    }
}

/// Every execution with so many preemptions at most.
fn check(preemptions: usize, model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(model);
}
