//! What runs a device's streams, and how it dies.

use std::sync::atomic::{AtomicBool, AtomicI32, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use super::event::Mark;
use super::lane::Lane;
use super::memory::Memory;
use super::queue::Queue;
use crate::driver::{CuResult, StreamId};

/// One device's context: its streams and hardware queues, and the result that it died of, if it did.
#[derive(Debug)]
pub(super) struct Engine {
    pub(super) memory: Arc<Memory>,
    fault: AtomicI32,
    stopped: AtomicBool,
    lanes: Vec<Arc<Lane>>,
    created: AtomicUsize,
    // Weak: a stream's thread keeps its queue alive until it has drained, and a queue keeps this.
    queues: Mutex<Vec<Weak<Queue>>>,
}

impl Engine {
    pub(super) fn new(memory: Arc<Memory>, lanes: usize) -> Arc<Self> {
        Arc::new(Self {
            memory,
            fault: AtomicI32::new(0),
            stopped: AtomicBool::new(false),
            lanes: (0..lanes.max(1)).map(|_| Arc::default()).collect(),
            created: AtomicUsize::new(0),
            queues: Mutex::default(),
        })
    }

    /// A queue in the next hardware queue, in turn.
    pub(super) fn queue(self: &Arc<Self>, id: StreamId) -> Arc<Queue> {
        let turn = self.created.fetch_add(1, Ordering::Relaxed) % self.lanes.len();
        self.queue_in(id, turn)
    }

    /// The legacy stream's queue, in the first hardware queue.
    pub(super) fn legacy_queue(self: &Arc<Self>) -> Arc<Queue> {
        self.queue_in(StreamId(0), 0)
    }

    fn queue_in(self: &Arc<Self>, id: StreamId, lane: usize) -> Arc<Queue> {
        let lane = self.lanes.get(lane).map(Arc::clone).unwrap_or_default();
        let queue = Queue::new(id, lane, Arc::clone(self));
        let mut queues = self.queues.lock();
        queues.retain(|queue| queue.strong_count() > 0);
        queues.push(Arc::downgrade(&queue));
        queue
    }

    /// What was queued so far and has not run, on every stream, destroyed ones too.
    pub(super) fn unfinished(&self) -> Vec<Mark> {
        self.queues.lock().iter().filter_map(|queue| queue.upgrade()?.unfinished()).collect()
    }

    fn live(&self) -> Vec<Arc<Queue>> {
        self.queues.lock().iter().filter_map(Weak::upgrade).collect()
    }

    /// Kills the context: nothing runs any more, and every later call says why.
    pub(super) fn die(&self, result: CuResult) {
        if self.fault.compare_exchange(0, result.0, Ordering::AcqRel, Ordering::Acquire).is_ok() {
            tracing::debug!(%result, "host context died");
        }
        self.wake();
    }

    /// What the context died of.
    pub(super) fn fault(&self) -> Option<CuResult> {
        let code = self.fault.load(Ordering::Acquire);
        (code != 0).then_some(CuResult(code))
    }

    /// Whether queued work is dropped instead of run.
    pub(super) fn halted(&self) -> bool {
        self.stopped.load(Ordering::Acquire) || self.fault().is_some()
    }

    pub(super) fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Acquire)
    }

    /// Drops queued work and waits for the streams' threads. Not for a forked child, which has none.
    pub(super) fn stop(&self) {
        self.stopped.store(true, Ordering::Release);
        self.wake();
        for queue in self.live() {
            queue.join();
        }
    }

    fn wake(&self) {
        for lane in &self.lanes {
            lane.wake();
        }
        for queue in self.live() {
            queue.wake();
        }
    }
}
