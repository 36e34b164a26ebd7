//! The heap: torch's blocks in this process's own window of one device, reused in stream order.
//!
//! Malloc and free are local: one lock, no message, no wait. On a miss the heap looks, in this order, at: what others have
//! finished with (leases), what other streams have finished with, growth (in exchange for free chunks that are too small), what
//! other streams will have finished with (the new stream waits on the GPU), and giving back what is free before it asks the owner
//! once more. See [`Heap::allocate`].

mod abroad;
mod block;
mod capture;
mod error;
mod exchange;
mod grow;
mod index;
mod local;
mod lock;
#[cfg(test)]
mod lock_tests;
mod meter;
mod miss;
mod places;
mod record;
mod source;
mod spans;
mod stats;
mod streams;
mod trim;
mod view;

pub use abroad::{Neighbour, Neighbours};
pub use capture::PoolId;
pub use error::{human, HeapError, OutOfMemory};
pub use local::{LocalCounts, LocalSource};
pub use source::{ChunkSource, GrowError, Live, LiveSink};
pub use stats::{PoolStats, Stat, Stats};
pub use view::{BlockView, RegionView};

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use crate::driver::{Addr, Driver, Stream, StreamId};
use crate::record::{origin, Origin};
use crate::timeline::Timelines;
use crate::tlsf::{Handle, Tlsf, GRANULE};
use crate::window::{Chunk, Window};
use block::{Info, Parked};
use capture::Pools;
use index::Index;
use lock::{Guard, Lock};
use meter::Meter;
use places::Place;
use streams::Streams;

/// Where [`lock`] takes these from: a test that includes that file gives it a model checker's (`tests/tests/contract_model.rs`).
mod sync {
    pub(super) use std::hint::spin_loop;
    pub(super) use std::sync::atomic::{AtomicBool, Ordering};
    pub(super) use std::thread::{sleep, yield_now};
}

/// Streams, and streams under graphs, whose tables are ready from the beginning: some 4 KiB each.
const DOMAINS: usize = 16;

/// Settings of a heap, in bytes.
#[derive(Debug, Clone, Copy)]
pub struct HeapConfig {
    /// The largest chunk.
    pub chunk_bytes: u64,
    /// The smallest growth.
    pub min_growth: u64,
    /// A growth takes at least this part of what is reserved already (40: a 40th), so that chunks get larger as the heap does.
    pub growth_divisor: u64,
    /// A block of at least this size that does not fit gets a chunk of its own, exactly its size.
    pub own_chunk: u64,
    /// How long a malloc that would fail waits for its own stream to come past this moment.
    pub drain: Duration,
}

impl Default for HeapConfig {
    fn default() -> Self {
        Self { chunk_bytes: 2 << 30, min_growth: 24 << 20, growth_divisor: 40, own_chunk: 64 << 20, drain: Duration::from_millis(500) }
    }
}

/// A block that is kept from reuse for somebody else, whatever its owner does with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Pin {
    handle: Handle,
    /// Where the block starts in the window, in bytes.
    pub offset: u64,
    /// Its length in bytes.
    pub bytes: u64,
}

/// A process's blocks on one device.
#[derive(Debug)]
pub struct Heap {
    driver: Arc<dyn Driver>,
    window: Window,
    source: Arc<dyn ChunkSource>,
    sink: Option<Arc<dyn LiveSink>>,
    timelines: Option<Arc<Timelines>>,
    /// The process's other GPUs.
    neighbours: Option<Arc<Neighbours>>,
    config: HeapConfig,
    /// The process's own limit on what it reserves.
    limit: AtomicU64,
    /// Captures under way that torch has told us of: only then does malloc look for one that has ended without a word. A hint: the
    /// number itself is under the lock.
    captures: AtomicUsize,
    /// One growth at a time; nothing that gives memory back takes it.
    growing: Mutex<()>,
    /// Chunks that a trim took are handed back before the next trim looks.
    trimming: Mutex<()>,
    /// The one that grows waits for other processes to give way. A hint, looked at again and again.
    pressing: AtomicBool,
    inner: Lock<Inner>,
}

#[derive(Debug)]
struct Inner {
    /// Where the window starts, for recordings.
    base: Addr,
    /// The device's number in recordings.
    device: i16,
    tlsf: Tlsf,
    streams: Streams,
    /// The first is that of the stream that never runs.
    places: Vec<Place>,
    vacant: Vec<u32>,
    pools: Pools,
    index: Index,
    /// By the numbers of blocks.
    infos: Vec<Info>,
    /// By first granule.
    chunks: BTreeMap<u32, Chunk>,
    meter: Meter,
    /// The block that was freed last, if nobody uses it: to its table it is still used. See [`Inner::free`].
    parked: Option<Parked>,
    /// Freed blocks that wait for another GPU to come past a mark.
    away: Vec<(Arc<Neighbour>, u64, Handle)>,
    live: Live,
    /// Bytes that are to be given back when no queued work can reach them any more.
    trim_wanted: u64,
}

impl Heap {
    /// A heap without memory in a window of its own.
    #[must_use]
    pub fn new(
        driver: Arc<dyn Driver>,
        window: Window,
        source: Arc<dyn ChunkSource>,
        sink: Option<Arc<dyn LiveSink>>,
        timelines: Option<Arc<Timelines>>,
        config: HeapConfig,
    ) -> Self {
        let mut inner = Inner {
            base: window.base(),
            device: record::device_number(&*driver),
            tlsf: Tlsf::new(),
            streams: Streams::new(driver.clone()),
            places: Vec::with_capacity(64),
            vacant: Vec::new(),
            pools: Pools::default(),
            index: Index::default(),
            infos: Vec::new(),
            chunks: BTreeMap::new(),
            meter: Meter::default(),
            parked: None,
            away: Vec::new(),
            live: Live::default(),
            trim_wanted: 0,
        };
        inner.tlsf.prepare_domains(DOMAINS);
        inner.add_place(streams::LIMBO, None);
        // Block sizes up to a chunk are served from one, so a chunk is a whole number of the device's units.
        let unit = driver.device().granularity.max(1);
        let config = HeapConfig { chunk_bytes: (config.chunk_bytes / unit * unit).max(unit), ..config };
        Self {
            driver,
            window,
            source,
            sink,
            timelines,
            neighbours: None,
            config,
            limit: AtomicU64::new(u64::MAX),
            captures: AtomicUsize::new(0),
            growing: Mutex::new(()),
            trimming: Mutex::new(()),
            pressing: AtomicBool::new(false),
            inner: Lock::new(inner),
        }
    }

    /// The heap of one of the process's GPUs, which know of each other: a block that was recorded on another's stream waits for that.
    #[must_use]
    pub fn beside(mut self, neighbours: &Arc<Neighbours>) -> Self {
        let own = neighbours.add(self.driver.clone());
        self.inner.lock().streams.set_neighbour(own);
        self.neighbours = Some(neighbours.clone());
        self
    }

    /// The driver of the heap's device.
    #[must_use]
    pub fn driver(&self) -> &Arc<dyn Driver> {
        &self.driver
    }

    /// The heap's window.
    #[must_use]
    pub fn window(&self) -> &Window {
        &self.window
    }

    /// The most that this process may reserve, in bytes. Lowering it takes nothing away.
    pub fn set_limit(&self, bytes: u64) {
        self.limit.store(bytes, Ordering::Relaxed);
    }

    /// What [`Heap::set_limit`] set; `u64::MAX`: none.
    #[must_use]
    pub fn limit(&self) -> u64 {
        self.limit.load(Ordering::Relaxed)
    }

    /// Whether the heap may record events of the whole context, as it does by itself where the driver can. Not where graphs
    /// are captured without [`Heap::begin_pool`]: such an event breaks every capture under way. Without them, what a stream
    /// leaves behind is others' only when it comes back, but for the legacy stream, and a released pool's bytes stay where they are.
    pub fn set_context_events(&self, allowed: bool) {
        let can = self.driver.device().context_events;
        self.inner.lock().streams.set_context_events(allowed && can);
    }

    /// Bytes of its chunks.
    #[must_use]
    pub fn reserved_bytes(&self) -> u64 {
        self.inner.lock().meter.reserved_bytes()
    }

    /// Does something that a capture forbids, such as recording the whole context, unless one is on that the heap knows of or
    /// such things are not allowed at all ([`Heap::set_context_events`]). No capture of torch's begins meanwhile.
    pub fn unless_capturing<T>(&self, act: impl FnOnce() -> T) -> Option<T> {
        let inner = self.inner.lock();
        (inner.pools.captures() == 0 && inner.streams.has_context_events()).then(act)
    }

    /// A block of at least `bytes`, aligned to 512, that `stream` may use at once. Zero bytes: address 0.
    ///
    /// # Errors
    /// [`HeapError::OutOfMemory`] after everything was tried; the heap works on.
    #[inline]
    pub fn allocate(&self, bytes: u64, stream: Stream) -> Result<Addr, HeapError> {
        self.allocate_from(bytes, stream, origin())
    }

    /// [`Heap::allocate`] for a caller that knows whether it is recorded, and with what.
    ///
    /// # Errors
    /// As [`Heap::allocate`].
    #[inline]
    pub fn allocate_from(&self, bytes: u64, stream: Stream, origin: Origin) -> Result<Addr, HeapError> {
        if bytes == 0 {
            return Ok(0);
        }
        let Some(granules) = u32::try_from(bytes.div_ceil(GRANULE)).ok().filter(|_| bytes <= self.window.bytes()) else {
            return Err(self.larger_than_window(bytes, origin));
        };
        let captures = self.captures.load(Ordering::Relaxed) > 0;
        let (id, capturing) = self.identify(stream)?;
        let mut guard = self.inner.lock();
        let inner = &mut *guard;
        if captures && !capturing {
            inner.pools.seen_running(captured(stream));
            self.count_captures(inner);
        }
        let place = inner.place(id, capturing);
        let number = inner.stream_of(place);
        if inner.streams.due(number) && !capturing {
            let _ = inner.streams.record(number, stream);
        }
        if bytes <= self.config.chunk_bytes {
            if let Some(offset) = inner.take(place, granules, bytes, origin) {
                self.publish(inner);
                return Ok(self.window.base() + u64::from(offset) * GRANULE);
            }
        }
        drop(guard);
        self.miss(Request { bytes, granules, stream, id, capturing, looked: false, origin })
    }

    #[cold]
    fn larger_than_window(&self, bytes: u64, origin: Origin) -> HeapError {
        let error = self.out_of_memory(bytes, None, self.with_holders("It is larger than any window."));
        let mut inner = self.inner.lock();
        inner.meter.out_of_memory += 1;
        inner.record_out_of_memory(bytes, 0, origin);
        self.publish(&inner);
        error
    }

    /// Who a stream is, and whether it captures. A capturing stream may not be asked who it is (900, and its capture is lost),
    /// whether torch has told us of the capture or not: it lives, so its handle will do. The legacy stream never captures.
    #[inline]
    fn identify(&self, stream: Stream) -> Result<(StreamId, bool), HeapError> {
        if is_legacy(stream) {
            return Ok((self.driver.stream_id(stream)?, false));
        }
        let id = self.driver.stream_identity(stream)?;
        Ok((id.unwrap_or_else(|| captured(stream)), id.is_none()))
    }

    /// Frees a block. Its bytes are its stream's again at once, and others' when that stream has come past this moment.
    ///
    /// # Errors
    /// [`HeapError::Foreign`] for an address that is no live block; nothing happens then.
    #[inline]
    pub fn free(&self, addr: Addr) -> Result<(), HeapError> {
        self.free_from(addr, origin())
    }

    /// [`Heap::free`] for a caller that knows whether it is recorded, and with what.
    ///
    /// # Errors
    /// As [`Heap::free`].
    #[inline]
    pub fn free_from(&self, addr: Addr, origin: Origin) -> Result<(), HeapError> {
        if addr == 0 {
            return Ok(());
        }
        let offset = self.granule(addr).filter(|_| addr.is_multiple_of(GRANULE)).ok_or(HeapError::Foreign { addr })?;
        let mut inner = self.inner.lock();
        if !inner.free(offset, origin) {
            return Err(HeapError::Foreign { addr });
        }
        self.publish(&inner);
        Ok(())
    }

    /// Notes that a stream uses the block that holds an address, so that the block, once freed, waits for it too. False for
    /// an address that is not in a live block of ours.
    ///
    /// # Errors
    /// What the driver says of the stream.
    pub fn record_stream(&self, addr: Addr, stream: Stream) -> Result<bool, HeapError> {
        let Some(offset) = self.granule(addr) else { return Ok(false) };
        let abroad = self.neighbours.as_ref().map(|neighbours| neighbours.of(&*self.driver, stream)).unwrap_or_default();
        let id = if abroad.is_empty() || stream.is_named() { Some(self.identify(stream)?.0) } else { None };
        let mut inner = self.inner.lock();
        let Some(index) = inner.live_around(offset).map(|info| info.handle.index()) else { return Ok(false) };
        inner.record_abroad(index, &abroad);
        let Some(id) = id else { return Ok(true) };
        let stream = match inner.streams.find(id) {
            Some(stream) => stream,
            None => inner.add_stream(id),
        };
        inner.record_use(index, stream);
        Ok(true)
    }

    /// Keeps the live block at an address from reuse until [`Heap::unpin`], even when it is freed. `None`: no live block starts there.
    #[must_use]
    pub fn pin(&self, addr: Addr) -> Option<Pin> {
        let offset = self.granule(addr).filter(|_| addr.is_multiple_of(GRANULE))?;
        let mut inner = self.inner.lock();
        let index = inner.index.get(offset)?;
        let pin = inner.pin(index)?;
        self.publish(&inner);
        Some(pin)
    }

    /// Ends one pin.
    pub fn unpin(&self, pin: Pin) {
        let mut inner = self.inner.lock();
        inner.unpin(pin);
        self.publish(&inner);
    }

    /// Bytes of others' blocks that this process holds, for the ledger.
    pub fn set_leased_in(&self, bytes: u64) {
        let mut inner = self.inner.lock();
        inner.live.leased_in = bytes;
        self.publish(&inner);
    }

    /// Background work, from a thread that torch does not wait for: sees how far streams have come, frees what waited for
    /// them, records what no stream's own call recorded, goes on with trims, forgets streams that do not come back.
    pub fn tick(&self) {
        let trim = {
            let mut inner = self.whole();
            inner.streams.poll();
            inner.settle_waiting();
            inner.retire();
            if inner.streams.any_wanted() {
                inner.streams.record_unhanded();
            }
            inner.live.largest_free = u64::from(inner.tlsf.largest_free()) * GRANULE;
            self.publish(&inner);
            inner.trim_wanted
        };
        if trim > 0 {
            self.trim(trim);
        }
    }

    /// The heap with every free block where others find it: what everything but malloc and free themselves starts from.
    fn whole(&self) -> Guard<'_, Inner> {
        let mut inner = self.inner.lock();
        inner.unpark();
        inner
    }

    /// The granule of the window that an address lies in.
    #[inline]
    fn granule(&self, addr: Addr) -> Option<u32> {
        u32::try_from(self.window.offset_of(addr)? / GRANULE).ok()
    }

    #[inline]
    fn publish(&self, inner: &Inner) {
        if let Some(sink) = &self.sink {
            let meter = &inner.meter;
            sink.publish(&Live {
                allocated: meter.allocated_bytes(),
                peak: meter.peak_bytes(),
                blocks: meter.blocks(),
                requested: meter.requested_bytes(),
                out_of_memory: meter.out_of_memory,
                ..inner.live
            });
        }
    }
}

/// The legacy stream, which never captures, but which no call may be made of while a stream that it blocks does.
const fn is_legacy(stream: Stream) -> bool {
    matches!(stream.0, 0 | 1)
}

/// The identity of a stream while it captures: its handle, told from ids by a bit that those do not reach.
fn captured(stream: Stream) -> StreamId {
    StreamId(stream.0 | StreamId::BY_HANDLE)
}

/// One call of malloc.
#[derive(Debug, Clone, Copy)]
struct Request {
    bytes: u64,
    granules: u32,
    stream: Stream,
    id: StreamId,
    capturing: bool,
    /// It was looked already whether the device is idle: looking again costs as much, and would say the same.
    looked: bool,
    origin: Origin,
}
