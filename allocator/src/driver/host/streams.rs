//! Stream handles. A handle is a place in a table, and is used again after a destroy, as the GPU's are.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;
use std::thread::ThreadId;

use parking_lot::Mutex;

use super::engine::Engine;
use super::queue::Queue;
use crate::driver::{CuResult, Stream, StreamId};

/// The first handle; 0, 1 and 2 have meanings of their own.
const FIRST: u64 = 0x1000;
/// The distance between handles.
const STEP: u64 = 16;
/// The per-thread default stream.
const PER_THREAD: Stream = Stream(2);

/// Identities are for the whole process, and never used again.
static NEXT_ID: AtomicU64 = AtomicU64::new(1);

fn new_id() -> StreamId {
    StreamId(NEXT_ID.fetch_add(1, Ordering::Relaxed))
}

/// The created streams of all devices of a platform.
#[derive(Debug, Default)]
pub(super) struct Streams {
    slots: Mutex<Vec<Option<Entry>>>,
    misuse: AtomicU64,
}

#[derive(Debug)]
struct Entry {
    device: u32,
    queue: Arc<Queue>,
}

fn slot(slots: &mut [Option<Entry>], stream: Stream) -> Option<&mut Option<Entry>> {
    let offset = stream.0.checked_sub(FIRST).filter(|offset| offset.is_multiple_of(STEP))?;
    slots.get_mut(usize::try_from(offset / STEP).ok()?)
}

impl Streams {
    /// A new stream, under the lowest free handle.
    pub(super) fn create(&self, device: u32, engine: &Arc<Engine>) -> Stream {
        let entry = Entry { device, queue: engine.queue(new_id()) };
        let mut slots = self.slots.lock();
        let index = slots.iter().position(Option::is_none).unwrap_or(slots.len());
        match slots.get_mut(index) {
            Some(vacant) => *vacant = Some(entry),
            None => slots.push(Some(entry)),
        }
        Stream(FIRST + STEP * index as u64)
    }

    /// The queue of a live stream of a device. A handle that is not live would be a SIGSEGV on a GPU: it is counted.
    pub(super) fn get(&self, stream: Stream, device: u32) -> Result<Arc<Queue>, CuResult> {
        match slot(&mut self.slots.lock(), stream) {
            Some(Some(entry)) if entry.device == device => Ok(Arc::clone(&entry.queue)),
            Some(Some(_)) => Err(CuResult::INVALID_HANDLE),
            _ => Err(self.misused()),
        }
    }

    /// The device of a live stream.
    pub(super) fn device_of(&self, stream: Stream) -> Result<u32, CuResult> {
        match slot(&mut self.slots.lock(), stream) {
            Some(Some(entry)) => Ok(entry.device),
            _ => Err(self.misused()),
        }
    }

    /// Ends a stream's handle; its queued work still runs.
    pub(super) fn destroy(&self, stream: Stream, device: u32) -> Result<(), CuResult> {
        let mut slots = self.slots.lock();
        let Some(place) = slot(&mut slots, stream) else { return Err(self.misused()) };
        match place.take() {
            Some(entry) if entry.device == device => {
                entry.queue.close();
                Ok(())
            }
            Some(other) => {
                *place = Some(other);
                Err(CuResult::INVALID_HANDLE)
            }
            None => Err(self.misused()),
        }
    }

    /// Counts a use of a handle that is not live.
    fn misused(&self) -> CuResult {
        self.misuse.fetch_add(1, Ordering::Relaxed);
        CuResult::INVALID_HANDLE
    }

    pub(super) fn misuse(&self) -> u64 {
        self.misuse.load(Ordering::Relaxed)
    }
}

/// The streams of one device that are never created: the legacy default stream, and one for each thread that asks.
#[derive(Debug)]
pub(super) struct Defaults {
    engine: Arc<Engine>,
    legacy: Arc<Queue>,
    per_thread: Mutex<HashMap<ThreadId, Arc<Queue>>>,
}

impl Defaults {
    pub(super) fn new(engine: &Arc<Engine>) -> Self {
        Self { engine: Arc::clone(engine), legacy: engine.legacy_queue(), per_thread: Mutex::default() }
    }

    /// The queue, where the handle is one of these.
    pub(super) fn get(&self, stream: Stream) -> Option<Arc<Queue>> {
        match stream {
            Stream(0 | 1) => Some(Arc::clone(&self.legacy)),
            PER_THREAD => {
                let mut queues = self.per_thread.lock();
                let queue = queues.entry(std::thread::current().id()).or_insert_with(|| self.engine.queue(new_id()));
                Some(Arc::clone(queue))
            }
            _ => None,
        }
    }
}
