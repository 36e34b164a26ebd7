//! A number that grows whenever anything is given back or a hold is done: who waits for memory looks at it first.

use super::atomic::{AtomicU64, Ordering};

/// The number.
#[repr(transparent)]
#[derive(Debug, Default)]
pub struct Changes(AtomicU64);

impl Changes {
    /// Something has changed. Whoever sees the number sees that too.
    pub fn note(&self) {
        self.0.fetch_add(1, Ordering::Release);
    }

    /// How often something has.
    #[must_use]
    pub fn seen(&self) -> u64 {
        self.0.load(Ordering::Acquire)
    }
}
