//! Waiting on the CPU for what a GPU or another process will change, with a bound.

use std::time::{Duration, Instant};

use super::link::LONGEST;

/// When a time-out is over; `None`: never.
pub(super) fn deadline(timeout: Option<Duration>) -> Option<Instant> {
    timeout.map(|timeout| Instant::now() + timeout.min(LONGEST))
}

/// Waits a little, and a little longer each time: a word in shared memory that a GPU or another process will change.
#[derive(Debug, Default)]
pub(super) struct Pause(u32);

impl Pause {
    /// False when the deadline has passed.
    pub(super) fn wait(&mut self, deadline: Option<Instant>) -> bool {
        self.wait_by(deadline, std::thread::sleep)
    }

    /// The same, where something may end a longer wait before its time.
    pub(super) fn wait_by(&mut self, deadline: Option<Instant>, sleep: impl FnOnce(Duration)) -> bool {
        self.0 = self.0.saturating_add(1);
        match self.0 {
            0..=500 => std::hint::spin_loop(),
            501..=600 => std::thread::yield_now(),
            n => sleep(Duration::from_micros(u64::from(n - 600).min(500))),
        }
        deadline.is_none_or(|at| Instant::now() < at)
    }
}
