//! The heap: torch's blocks in this process's own window of one device, reused in stream order.
//!
//! Malloc and free are local: one lock, no message, no wait. On a miss the heap looks, in this order, at: what others have
//! finished with (leases), what other streams have finished with, growth, what other streams will have finished with (the
//! new stream waits on the GPU), and giving back what is free before it asks the owner once more. See [`Heap::allocate`].

mod block;
mod capture;
mod error;
mod miss;
mod source;
mod stats;
mod streams;
mod trim;
mod view;

pub use error::{human, HeapError, OutOfMemory};
pub use source::{ChunkSource, GrowError, Live, LiveSink};
pub use stats::{PoolStats, Stat, Stats};
pub use view::{BlockView, RegionView};

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::Arc;

use parking_lot::Mutex;

use crate::driver::{Addr, Capture, Driver, Stream, StreamId};
use crate::timeline::Timelines;
use crate::tlsf::{Domain, Handle, Tlsf, GRANULE};
use crate::window::{Chunk, Window};
use block::Info;
use capture::Pools;
use streams::Streams;

pub use capture::PoolId;

/// Settings of a heap, in bytes.
#[derive(Debug, Clone, Copy)]
pub struct HeapConfig {
    /// The largest chunk.
    pub chunk_bytes: u64,
    /// The smallest growth.
    pub min_growth: u64,
    /// A growth takes at least this part of what is reserved already (16: a sixteenth), so that chunks get larger as the heap does.
    pub growth_divisor: u64,
}

impl Default for HeapConfig {
    fn default() -> Self {
        Self { chunk_bytes: 2 << 30, min_growth: 32 << 20, growth_divisor: 16 }
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
    config: HeapConfig,
    /// The process's own limit on what it reserves.
    limit: AtomicU64,
    /// Captures under way: only then does malloc ask whether its stream captures.
    captures: AtomicU32,
    /// One growth at a time; nothing that gives memory back takes it.
    growing: Mutex<()>,
    inner: Mutex<Inner>,
}

/// Where blocks come from and go back to: a stream's, or a graph's private pool's on one stream.
#[derive(Debug)]
struct Place {
    stream: usize,
    domain: Domain,
    pool: Option<PoolId>,
}

#[derive(Debug)]
struct Inner {
    tlsf: Tlsf,
    streams: Streams,
    places: Vec<Place>,
    /// The place of each stream, by the stream's number.
    of_stream: Vec<usize>,
    pools: Pools,
    blocks: HashMap<u32, Handle, BuildHasherDefault<Scatter>>,
    infos: Vec<Info>,
    /// Freed blocks that other streams were recorded on: (block, [(stream, mark)]).
    waiting: Vec<(Handle, Vec<(usize, u64)>)>,
    chunks: Vec<Chunk>,
    stats: Stats,
    live: Live,
    trim_pending: bool,
}

/// Spreads block offsets, which are multiples of large powers of two.
#[derive(Debug, Default)]
struct Scatter(u64);

impl Hasher for Scatter {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u32(u32::from(*byte)));
    }
    fn write_u32(&mut self, n: u32) {
        let product = (self.0 ^ u64::from(n)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0 = product ^ (product >> 32);
    }
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
        let inner = Inner {
            tlsf: Tlsf::new(),
            streams: Streams::new(driver.clone()),
            places: Vec::new(),
            of_stream: Vec::new(),
            pools: Pools::default(),
            blocks: HashMap::with_capacity_and_hasher(1 << 14, BuildHasherDefault::default()),
            infos: Vec::with_capacity(1 << 14),
            waiting: Vec::new(),
            chunks: Vec::new(),
            stats: Stats::default(),
            live: Live::default(),
            trim_pending: false,
        };
        Self {
            driver,
            window,
            source,
            sink,
            timelines,
            config,
            limit: AtomicU64::new(u64::MAX),
            captures: AtomicU32::new(0),
            growing: Mutex::new(()),
            inner: Mutex::new(inner),
        }
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

    /// A block of at least `bytes`, aligned to 512, that `stream` may use at once. Zero bytes: address 0.
    ///
    /// # Errors
    /// [`HeapError::OutOfMemory`] after everything was tried; the heap works on.
    pub fn allocate(&self, bytes: u64, stream: Stream) -> Result<Addr, HeapError> {
        if bytes == 0 {
            return Ok(0);
        }
        let Some(granules) = granules_of(bytes) else {
            return Err(self.out_of_memory(bytes, None, "It is larger than any window.".to_owned()));
        };
        let id = self.driver.stream_id(stream)?;
        let capturing = self.captures.load(Ordering::Relaxed) > 0 && self.driver.stream_capture(stream)? != Capture::None;
        let request = Request { bytes, granules, stream, capturing };
        let mut inner = self.inner.lock();
        let place = inner.place(id, capturing);
        if !capturing && inner.streams.due(inner.stream_of(place)) {
            let number = inner.stream_of(place);
            let _ = inner.streams.record(number, stream);
        }
        if bytes <= self.config.chunk_bytes {
            if let Some(allocation) = inner.domain_of(place).and_then(|domain| inner.tlsf.allocate(domain, granules)) {
                let addr = self.window.base() + u64::from(allocation.offset) * GRANULE;
                inner.settle(allocation, place, bytes);
                self.publish(&inner);
                return Ok(addr);
            }
        }
        drop(inner);
        self.miss(request, place)
    }

    /// Frees a block. Its bytes are its stream's again at once, and others' when that stream has come past this moment.
    ///
    /// # Errors
    /// [`HeapError::Foreign`] for an address that is no live block; nothing happens then.
    pub fn free(&self, addr: Addr) -> Result<(), HeapError> {
        if addr == 0 {
            return Ok(());
        }
        let key = self.key(addr).ok_or(HeapError::Foreign { addr })?;
        let mut inner = self.inner.lock();
        let handle = inner.blocks.remove(&key).ok_or(HeapError::Foreign { addr })?;
        inner.free(handle);
        self.publish(&inner);
        Ok(())
    }

    /// Notes that a stream uses a block, so that the block, once freed, waits for it too. False for an address that is not
    /// in a live block of ours.
    ///
    /// # Errors
    /// What the driver says of the stream.
    pub fn record_stream(&self, addr: Addr, stream: Stream) -> Result<bool, HeapError> {
        let Some(key) = self.key(addr) else { return Ok(false) };
        let id = self.driver.stream_id(stream)?;
        let mut inner = self.inner.lock();
        let Some(handle) = inner.blocks.get(&key).copied() else { return Ok(false) };
        let place = inner.place(id, false);
        let number = inner.stream_of(place);
        Ok(inner.record_use(handle, number))
    }

    /// Keeps the live block at an address from reuse until [`Heap::unpin`], even when it is freed. `None`: no live block starts there.
    #[must_use]
    pub fn pin(&self, addr: Addr) -> Option<Pin> {
        let key = self.key(addr)?;
        let mut inner = self.inner.lock();
        let handle = inner.blocks.get(&key).copied()?;
        let pin = inner.pin(handle)?;
        self.publish(&inner);
        Some(pin)
    }

    /// Ends one pin.
    pub fn unpin(&self, pin: Pin) {
        let mut inner = self.inner.lock();
        inner.unpin(pin.handle);
        self.publish(&inner);
    }

    /// Bytes of others' blocks that this process holds, for the ledger.
    pub fn set_leased_in(&self, bytes: u64) {
        let mut inner = self.inner.lock();
        inner.live.leased_in = bytes;
        self.publish(&inner);
    }

    /// Background work, from a thread that torch does not wait for: sees how far streams have come, frees what waited for
    /// them, records what no stream's own call recorded, finishes trims.
    pub fn tick(&self) {
        let finish_trim = {
            let mut inner = self.inner.lock();
            inner.streams.poll();
            inner.settle_waiting();
            if (!inner.waiting.is_empty() || inner.streams.any_wanted() || inner.trim_pending) && !inner.streams.context_pending() {
                let _ = inner.streams.record_context();
            }
            self.publish(&inner);
            std::mem::take(&mut inner.trim_pending)
        };
        if finish_trim {
            self.trim(u64::MAX);
        }
    }

    fn key(&self, addr: Addr) -> Option<u32> {
        let offset = self.window.offset_of(addr)?;
        (offset % GRANULE == 0).then_some(u32::try_from(offset / GRANULE).ok()?)
    }

    #[inline]
    fn publish(&self, inner: &Inner) {
        if let Some(sink) = &self.sink {
            let all = &inner.stats.all;
            sink.publish(&Live {
                allocated: all.allocated_bytes.current,
                peak: all.allocated_bytes.peak,
                blocks: all.allocation.current,
                requested: all.requested_bytes.current,
                out_of_memory: inner.stats.out_of_memory,
                ..inner.live
            });
        }
    }
}

/// One call of malloc.
#[derive(Debug, Clone, Copy)]
struct Request {
    bytes: u64,
    granules: u32,
    stream: Stream,
    capturing: bool,
}

fn granules_of(bytes: u64) -> Option<u32> {
    u32::try_from(bytes.div_ceil(GRANULE)).ok()
}

impl Inner {
    /// The place that a stream allocates from: its own, or that of the private pool under whose capture it is.
    fn place(&mut self, id: StreamId, capturing: bool) -> usize {
        let stream = self.streams.find(id).unwrap_or_else(|| {
            let stream = self.streams.add(id);
            let domain = self.tlsf.add_domain();
            self.places.push(Place { stream, domain, pool: None });
            self.of_stream.push(self.places.len() - 1);
            stream
        });
        match self.pools.current().filter(|_| capturing) {
            Some(pool) => self.pool_place(pool, stream),
            None => self.of_stream.get(stream).copied().unwrap_or_default(),
        }
    }

    fn stream_of(&self, place: usize) -> usize {
        self.places.get(place).map_or(0, |place| place.stream)
    }

    fn domain_of(&self, place: usize) -> Option<Domain> {
        self.places.get(place).map(|place| place.domain)
    }
}
