//! Streams of this process's other GPUs that use a block: a GPU reads another's memory where peers have access.
//!
//! An event of a device's own context says nothing of such a stream, and an event of the device cannot be recorded on it. So the block
//! waits until the other device's heap has seen an event of its whole context that was recorded behind the free. The two heaps share
//! three words and no lock.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;

use parking_lot::Mutex;

use crate::driver::{Capture, Driver, Stream};

/// The GPUs of one process that have a heap.
#[derive(Debug, Default)]
pub struct Neighbours(Mutex<Vec<Arc<Neighbour>>>);

/// How far one of them has come, in the marks of its own heap.
#[derive(Debug)]
pub struct Neighbour {
    driver: Arc<dyn Driver>,
    /// No event of its context that is recorded from here on has a smaller mark.
    next: AtomicU64,
    /// The largest mark that another heap waits for.
    wanted: AtomicU64,
    done: AtomicU64,
}

impl Neighbours {
    pub(super) fn add(&self, driver: Arc<dyn Driver>) -> Arc<Neighbour> {
        let (next, wanted, done) = (AtomicU64::new(1), AtomicU64::new(0), AtomicU64::new(0));
        let neighbour = Arc::new(Neighbour { driver, next, wanted, done });
        self.0.lock().push(neighbour.clone());
        neighbour
    }

    /// Of which others a stream may be. One of the driver's own names is one on each, and nobody says on which it was meant; a
    /// capturing one is not asked, as it may not be.
    #[must_use]
    pub fn of(&self, own: &dyn Driver, stream: Stream) -> Vec<Arc<Neighbour>> {
        let mut others: Vec<_> = self.0.lock().iter().filter(|other| other.driver.device().id != own.device().id).cloned().collect();
        if others.is_empty() || stream.is_named() {
            return others;
        }
        let captures = matches!(own.stream_capture(stream), Ok(Capture::Active | Capture::Invalidated));
        if captures || own.owns(stream).unwrap_or(true) {
            return Vec::new();
        }
        others.retain(|other| other.driver.owns(stream).unwrap_or(false));
        others
    }
}

impl Neighbour {
    /// Notes those of `more` that are not noted yet.
    pub fn note(noted: &mut Vec<Arc<Self>>, more: &[Arc<Self>]) {
        for neighbour in more {
            if !noted.iter().any(|other| Arc::ptr_eq(other, neighbour)) {
                noted.push(neighbour.clone());
            }
        }
    }

    /// The mark that it must have come past for all that was queued there before now to be over. It sees to that.
    #[must_use]
    pub fn ask(&self) -> u64 {
        let mark = self.next.load(Ordering::SeqCst);
        self.wanted.fetch_max(mark, Ordering::SeqCst);
        mark
    }

    /// Whether it has come past a mark.
    #[must_use]
    pub fn is_past(&self, mark: u64) -> bool {
        self.done.load(Ordering::Acquire) >= mark
    }

    /// An event of its context is about to be recorded with a mark. Said before: who asks meanwhile waits for the next.
    pub(super) fn records(&self, mark: u64) {
        self.next.store(mark + 1, Ordering::SeqCst);
    }

    pub(super) fn has_come(&self, mark: u64) {
        self.done.store(mark, Ordering::Release);
    }

    pub(super) fn is_awaited(&self) -> bool {
        self.wanted.load(Ordering::SeqCst) > self.done.load(Ordering::Acquire)
    }
}
