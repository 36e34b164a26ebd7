//! A block of one GPU that a stream of another uses: it is reused when that GPU has come past the free, and not before.

#![allow(clippy::unwrap_used, clippy::panic)]

mod heap_lab;

use std::sync::Arc;

use heap_lab::{until, CONFIG, MIB, WINDOW};
use millpond_allocator::driver::host::{HostConfig, HostDriver, HostPlatform};
use millpond_allocator::driver::{Access, Addr, Driver, Stream};
use millpond_allocator::heap::{Heap, LocalSource, Neighbours};
use millpond_allocator::window::Window;

/// Two GPUs of one process, a stream of each.
struct Two {
    _platform: HostPlatform,
    drivers: [Arc<HostDriver>; 2],
    heaps: [Heap; 2],
    streams: [Stream; 2],
}

impl Two {
    fn new() -> Self {
        let platform = HostPlatform::new(HostConfig { devices: 2, ..HostConfig::default() });
        let drivers = [0, 1].map(|number| platform.driver(number).unwrap());
        let neighbours = Arc::new(Neighbours::default());
        let heaps = drivers.each_ref().map(|driver| {
            driver.attach_context().unwrap();
            let window = Window::reserve(driver.clone(), WINDOW, Access::ReadWrite).unwrap();
            let source = Arc::new(LocalSource::new(driver.clone(), WINDOW, CONFIG.chunk_bytes));
            Heap::new(driver.clone(), window, source, None, None, CONFIG).beside(&neighbours)
        });
        let streams = drivers.each_ref().map(|driver| driver.stream_create().unwrap());
        Self { _platform: platform, drivers, heaps, streams }
    }

    fn tick(&self) {
        self.heaps.iter().for_each(Heap::tick);
    }

    /// Frees a block of the first GPU that was recorded on `on`.
    fn use_and_free(&self, on: Stream) -> Addr {
        let addr = self.heaps[0].allocate(MIB, self.streams[0]).unwrap();
        assert!(self.heaps[0].record_stream(addr, on).unwrap());
        self.heaps[0].free(addr).unwrap();
        addr
    }

    /// Both have looked often enough, and yet it is not its stream's again.
    fn stays(&self, addr: Addr) {
        let held = self.held();
        (0..4).for_each(|_| self.tick());
        let next = self.heaps[0].allocate(MIB, self.streams[0]).unwrap();
        assert!(held > 0 && self.held() == held && next != addr, "it is reused under the other's work");
        self.heaps[0].free(next).unwrap();
    }

    fn comes_back(&self) {
        until("the block comes back", || {
            self.tick();
            self.held() == 0
        });
    }

    /// Freed blocks of the first GPU that somebody still uses.
    fn held(&self) -> u64 {
        let all = self.heaps[0].stats().all;
        all.active.current - all.allocation.current
    }
}

#[test]
fn a_block_waits_for_the_other_gpus_stream_that_it_was_recorded_on() {
    let two = Two::new();
    for on in [two.streams[1], Stream::LEGACY] {
        let stall = two.drivers[1].stall(two.streams[1]);
        let addr = two.use_and_free(on);
        two.stays(addr);
        drop(stall);
        two.comes_back();
    }
    assert_eq!(two.drivers.each_ref().map(|driver| driver.misuse()), [0, 0]);
}

#[test]
fn one_of_its_own_gpu_waits_for_no_other() {
    let two = Two::new();
    let other = two.drivers[0].stream_create().unwrap();
    let _stall = two.drivers[1].stall(two.streams[1]);
    two.use_and_free(other);
    two.comes_back();
}

/// What is queued there behind the last event of its context is not covered by that.
#[test]
fn an_event_from_before_the_free_is_not_enough() {
    let two = Two::new();
    two.use_and_free(two.streams[1]);
    two.comes_back();
    let stall = two.drivers[1].stall(two.streams[1]);
    two.use_and_free(two.streams[1]);
    two.tick();
    // Of that one an event is in flight by now.
    let late = two.drivers[1].stream_create().unwrap();
    let second = two.drivers[1].stall(late);
    let addr = two.use_and_free(late);
    drop(stall);
    until("the earlier one comes back", || {
        two.tick();
        two.held() == 1
    });
    two.stays(addr);
    drop(second);
    two.comes_back();
}
