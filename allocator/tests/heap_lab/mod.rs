//! A heap over the host driver with small chunks, and what its tests need.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used, clippy::panic)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use millpond_allocator::driver::host::{HostConfig, HostDriver, HostPlatform};
use millpond_allocator::driver::{Access, Addr, Driver, Stream};
use millpond_allocator::heap::{Heap, HeapConfig, HeapError, LocalSource, OutOfMemory};
use millpond_allocator::timeline::{TimelineMemory, Timelines, Word};
use millpond_allocator::window::Window;

pub const KIB: u64 = 1 << 10;
pub const MIB: u64 = 1 << 20;
/// The lab's largest chunk.
pub const CHUNK: u64 = 8 * MIB;
pub const WINDOW: u64 = 4 << 30;
/// Every growth is of one chunk, or exact.
pub const CONFIG: HeapConfig =
    HeapConfig { chunk_bytes: CHUNK, min_growth: CHUNK, growth_divisor: 16, own_chunk: CHUNK, drain: Duration::ZERO };

pub struct Lab {
    pub heap: Arc<Heap>,
    pub source: Arc<LocalSource>,
    pub driver: Arc<HostDriver>,
    _platform: HostPlatform,
}

impl Lab {
    pub fn new() -> Self {
        Self::with(CONFIG, |_| None)
    }

    pub fn with(config: HeapConfig, timelines: impl FnOnce(&Arc<HostDriver>) -> Option<Arc<Timelines>>) -> Self {
        let platform = HostPlatform::new(HostConfig { total_bytes: Some(64 << 30), ..HostConfig::default() });
        let driver = platform.driver(0).unwrap();
        driver.attach_context().unwrap();
        let timelines = timelines(&driver);
        let (heap, source) = heap_over(driver.clone(), config, timelines);
        Self { heap, source, driver, _platform: platform }
    }

    pub fn stream(&self) -> Stream {
        self.driver.stream_create().unwrap()
    }

    pub fn alloc(&self, bytes: u64, stream: Stream) -> Addr {
        self.heap.allocate(bytes, stream).unwrap()
    }

    pub fn free(&self, addr: Addr) {
        self.heap.free(addr).unwrap();
    }

    /// Allocates, frees, and says where it was.
    pub fn touch(&self, bytes: u64, stream: Stream) -> Addr {
        let addr = self.alloc(bytes, stream);
        self.free(addr);
        addr
    }

    pub fn reserved(&self) -> u64 {
        self.source.counts().reserved
    }

    /// No growth from here on.
    pub fn freeze(&self) {
        self.source.set_limit(self.reserved());
    }

    /// Ticks until something is so.
    pub fn tick_until(&self, what: &str, so: impl Fn() -> bool) {
        until(what, || {
            self.heap.tick();
            so()
        });
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            assert_eq!(self.driver.misuse(), 0, "a stream was touched that was not alive");
            assert_eq!(self.source.counts().strange, 0, "chunks were given back that were not out");
            check_views(&self.heap, &self.source);
        }
    }
}

pub fn heap_over(driver: Arc<dyn Driver>, config: HeapConfig, timelines: Option<Arc<Timelines>>) -> (Arc<Heap>, Arc<LocalSource>) {
    let source = Arc::new(LocalSource::new(driver.clone(), WINDOW, config.chunk_bytes));
    let window = Window::reserve(driver.clone(), WINDOW, Access::ReadWrite).unwrap();
    (Arc::new(Heap::new(driver, window, source.clone(), None, timelines, config)), source)
}

/// What the heap shows of itself agrees with itself and with the source.
pub fn check_views(heap: &Heap, source: &LocalSource) {
    let (stats, regions) = (heap.stats(), heap.regions());
    assert_eq!(regions.iter().map(|region| region.bytes).sum::<u64>(), stats.all.reserved_bytes.current);
    assert_eq!(stats.all.reserved_bytes.current, source.counts().reserved);
    assert_eq!(heap.window().chunks(), heap.chunks());
    let blocks = || regions.iter().flat_map(|region| &region.blocks);
    assert_eq!(blocks().filter(|block| block.used).map(|block| block.bytes).sum::<u64>(), stats.all.allocated_bytes.current);
    assert_eq!(blocks().filter(|block| block.used || block.pending).map(|block| block.bytes).sum::<u64>(), stats.all.active_bytes.current);
    for region in &regions {
        let mut at = region.addr;
        for block in &region.blocks {
            assert_eq!(block.addr, at);
            at += block.bytes;
        }
        assert_eq!(at, region.addr + region.bytes);
    }
}

pub fn until(what: &str, so: impl Fn() -> bool) {
    let start = Instant::now();
    while !so() {
        assert!(start.elapsed() < Duration::from_secs(20), "never came: {what}");
        std::thread::sleep(Duration::from_micros(200));
    }
}

pub fn oom(result: Result<Addr, HeapError>) -> OutOfMemory {
    match result {
        Err(HeapError::OutOfMemory(figures)) => *figures,
        other => panic!("expected out of memory, got {other:?}"),
    }
}

/// Numbers from a seed.
pub struct Dice(pub u64);

impl Dice {
    pub fn roll(&mut self, below: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % below
    }
}

/// A client's timelines, in memory of this process.
#[repr(C, align(4096))]
#[derive(Debug)]
pub struct Words(pub [Word; 64], pub std::sync::atomic::AtomicBool);

impl Default for Words {
    fn default() -> Self {
        Self(std::array::from_fn(|_| Word::default()), false.into())
    }
}

impl TimelineMemory for Words {
    fn word(&self, timeline: u32) -> Option<&Word> {
        self.0.get(timeline as usize)
    }
    fn range(&self) -> (*mut u8, usize) {
        (self.0.as_ptr().cast_mut().cast(), size_of_val(&self.0))
    }
    fn keep_mapped(&self) {
        self.1.store(true, std::sync::atomic::Ordering::Relaxed);
    }
}
