//! Imports: what this client holds of others, and how it lets go: never blocking, on the GPU's time.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Arc;

use millpond_allocator::driver::{Addr, Event, StreamId};
use millpond_allocator::timeline::{Reached, Signal};
use millpond_allocator::window::Chunk;
use parking_lot::Mutex;

use super::device::Opened;
use super::error::Error;
use super::lease::HoldRef;
use crate::control::Control;

/// One value that was received.
#[derive(Debug, Clone)]
pub(super) struct Import {
    pub(super) hold: HoldRef,
    pub(super) window: u32,
    /// Its device's index.
    pub(super) device: u32,
    pub(super) offset: u64,
    pub(super) bytes: u64,
    pub(super) epochs: Vec<u64>,
    /// READY: what must be reached before the bytes are what was sent.
    pub(super) ready: Vec<Signal>,
    /// Where it is mapped here, once it is.
    pub(super) addr: Option<Addr>,
    /// The streams that may use it, as far as we were told.
    pub(super) streams: Vec<StreamId>,
    /// Set when its producer died: whether the bytes were ready by then.
    pub(super) died_ready: Option<bool>,
    pub(super) sender: String,
}

#[derive(Debug, Default)]
struct Slab {
    entries: Vec<(u32, Option<Import>)>,
    free: Vec<u32>,
    bytes: u64,
}

/// An import that nobody uses any more on the host; streams may.
#[derive(Debug)]
struct Parting {
    hold: HoldRef,
    device: u32,
    streams: Vec<StreamId>,
    bytes: u64,
    window: u32,
    offset: u64,
}

/// Partings that one context-wide event covers.
#[derive(Debug)]
struct Batch {
    device: u32,
    event: Event,
    partings: Vec<Parting>,
}

/// This client's imports.
#[derive(Debug)]
pub(super) struct Imports {
    control: Arc<Control>,
    me: u32,
    slab: Mutex<Slab>,
    parting: Mutex<Vec<Parting>>,
    batches: Mutex<Vec<Batch>>,
    waiting: AtomicUsize,
}

impl Imports {
    pub(super) fn new(control: Arc<Control>, me: u32) -> Self {
        Self { control, me, slab: Mutex::default(), parting: Mutex::default(), batches: Mutex::default(), waiting: AtomicUsize::new(0) }
    }

    /// Takes up a hold that came with a frame.
    pub(super) fn add(&self, import: Import) -> Result<u64, Error> {
        let hold = import.hold;
        let taken = self.control.hold(hold.producer, hold.index).is_some_and(|record| record.take(hold.generation, self.me as u8));
        if !taken {
            return Err(Error::Stale("the hold that came with the value is not for this process, or was taken up before".to_owned()));
        }
        let mut slab = self.slab.lock();
        slab.bytes += import.bytes;
        let index = match slab.free.pop() {
            Some(index) => index,
            None => {
                slab.entries.push((0, None));
                slab.entries.len() as u32 - 1
            }
        };
        let entry = slab.entries.get_mut(index as usize).ok_or_else(|| Error::Internal("import table".to_owned()))?;
        entry.0 += 1;
        entry.1 = Some(import);
        Ok(u64::from(entry.0) << 32 | u64::from(index) + 1)
    }

    /// Looks at, or changes, an import.
    pub(super) fn with<T>(&self, handle: u64, f: impl FnOnce(&mut Import) -> T) -> Result<T, Error> {
        let mut slab = self.slab.lock();
        let (index, generation) = (handle as u32, (handle >> 32) as u32);
        let entry = index.checked_sub(1).and_then(|index| slab.entries.get_mut(index as usize)).filter(|entry| entry.0 == generation);
        let import = entry.and_then(|entry| entry.1.as_mut());
        import.map(f).ok_or_else(|| Error::InvalidArgument("no such import: it was released before".to_owned()))
    }

    /// Lets go. Never blocks, never calls the driver.
    pub(super) fn release(&self, handle: u64, on_streams: impl FnOnce(&Import) -> bool) -> Result<bool, Error> {
        self.with(handle, |_| ())?;
        let mut slab = self.slab.lock();
        let index = handle as u32 - 1;
        let Some(import) = slab.entries.get_mut(index as usize).and_then(|entry| entry.1.take()) else {
            return Err(Error::InvalidArgument("no such import: it was released before".to_owned()));
        };
        slab.free.push(index);
        slab.bytes -= import.bytes;
        drop(slab);
        if import.addr.is_none() || !on_streams(&import) {
            self.finish(import.hold, None);
            return Ok(false);
        }
        self.waiting.fetch_add(1, Ordering::Relaxed);
        self.parting.lock().push(Parting {
            hold: import.hold,
            device: import.device,
            streams: import.streams,
            bytes: import.bytes,
            window: import.window,
            offset: import.offset,
        });
        Ok(true)
    }

    pub(super) fn finish(&self, hold: HoldRef, done: Option<Signal>) {
        if let Some(record) = self.control.hold(hold.producer, hold.index) {
            record.finish(hold.generation, self.me as u8, done.map(|signal| (signal.timeline, signal.value)));
            self.control.changes().fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Whether anything waits to be let go.
    pub(super) fn any_parting(&self) -> bool {
        self.waiting.load(Ordering::Relaxed) > 0
    }

    /// Lets go of what only this stream uses, by a signal that the caller has just queued on it.
    pub(super) fn part_with(&self, device: u32, stream: StreamId, signal: impl FnOnce() -> Option<Signal>) {
        if !self.any_parting() {
            return;
        }
        let mut parting = self.parting.lock();
        let matches = |p: &Parting| p.device == device && p.streams.iter().all(|s| *s == stream);
        if !parting.iter().any(matches) {
            return;
        }
        let Some(signal) = signal() else { return };
        parting.retain(|p| {
            let over = matches(p);
            if over {
                self.finish(p.hold, Some(signal));
                self.waiting.fetch_sub(1, Ordering::Relaxed);
            }
            !over
        });
    }

    /// Whether part_with would signal.
    pub(super) fn wants_signal(&self, device: u32, stream: StreamId) -> bool {
        self.any_parting() && self.parting.lock().iter().any(|p| p.device == device && p.streams.iter().all(|s| *s == stream))
    }

    /// For streams that never come back to us: one event over the whole context, and when that is over, so are they.
    pub(super) fn tick(&self, opened: &Opened) {
        let mut batches = self.batches.lock();
        batches.retain_mut(|batch| {
            let over = batch.device == opened.index && opened.driver.event_query(batch.event).unwrap_or(false);
            if over {
                for parting in batch.partings.drain(..) {
                    self.finish(parting.hold, None);
                    self.waiting.fetch_sub(1, Ordering::Relaxed);
                }
                let _ = opened.driver.event_destroy(batch.event);
            }
            !over
        });
        let mut parting = self.parting.lock();
        if !parting.iter().any(|p| p.device == opened.index) {
            return;
        }
        let Ok(event) = opened.driver.event_create() else { return };
        if opened.driver.event_record_context(event).is_err() {
            let _ = opened.driver.event_destroy(event); // A capture is on, or the driver is too old: later.
            return;
        }
        let (mine, others) = std::mem::take(&mut *parting).into_iter().partition(|p| p.device == opened.index);
        *parting = others;
        batches.push(Batch { device: opened.index, event, partings: mine });
    }

    /// Whether anything of a chunk is still held or parting here.
    pub(super) fn uses(&self, window: u32, chunk: &Chunk) -> bool {
        let touches = |w: u32, offset: u64, bytes: u64| w == window && offset < chunk.end() && chunk.offset < offset + bytes;
        self.slab.lock().entries.iter().filter_map(|entry| entry.1.as_ref()).any(|i| touches(i.window, i.offset, i.bytes))
            || self.parting.lock().iter().any(|p| touches(p.window, p.offset, p.bytes))
            || self.batches.lock().iter().flat_map(|batch| &batch.partings).any(|p| touches(p.window, p.offset, p.bytes))
    }

    /// Whether an address is held as an import although it lies in our own window: it came back to us.
    pub(super) fn holds_own(&self, addr: Addr) -> bool {
        self.find(addr).is_some()
    }

    /// A live import whose mapped bytes hold an address: (handle, hold, offset in its window).
    pub(super) fn find(&self, addr: Addr) -> Option<(u64, Import)> {
        let slab = self.slab.lock();
        slab.entries.iter().enumerate().find_map(|(index, (generation, import))| {
            let import = import.as_ref()?;
            let start = import.addr?;
            (start <= addr && (addr < start + import.bytes || addr == start))
                .then(|| (u64::from(*generation) << 32 | index as u64 + 1, import.clone()))
        })
    }

    /// A producer died: what of its values was ready is told now, while its timelines' last true values stand.
    pub(super) fn died(&self, producer: u32) {
        let mut slab = self.slab.lock();
        for import in slab.entries.iter_mut().filter_map(|entry| entry.1.as_mut()).filter(|import| import.hold.producer == producer) {
            let reached = |s: &Signal| self.control.timeline(s.timeline).is_some_and(|word| word.reached(s.value) == Reached::Yes);
            import.died_ready = Some(import.ready.iter().all(reached));
        }
    }

    /// Bytes held of others.
    pub(super) fn bytes(&self) -> u64 {
        self.slab.lock().bytes
    }

    /// Bytes held of others on one device.
    pub(super) fn bytes_on(&self, device: u32) -> u64 {
        self.slab.lock().entries.iter().filter_map(|entry| entry.1.as_ref()).filter(|import| import.device == device).map(|i| i.bytes).sum()
    }

    /// Notes another stream that uses an import.
    pub(super) fn record_stream(&self, addr: Addr, stream: StreamId) -> bool {
        let mut slab = self.slab.lock();
        let found = slab
            .entries
            .iter_mut()
            .filter_map(|entry| entry.1.as_mut())
            .filter(|import| import.addr.is_some_and(|start| start <= addr && addr < start + import.bytes.max(1)));
        let mut any = false;
        for import in found {
            any = true;
            if !import.streams.contains(&stream) {
                import.streams.push(stream);
            }
        }
        any
    }
}
