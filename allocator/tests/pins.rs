//! Host memory registered in slabs: reused, bounded, forgotten before it is unmapped; and the bytes are right.
#![allow(unsafe_code, clippy::unwrap_used)]

use std::sync::Arc;

use millpond_allocator::driver::host::{HostCall, HostConfig, HostPlatform};
use millpond_allocator::driver::{Access, Addr, CuResult, DeviceId, Driver, DriverError, Platform, Stream};
use millpond_allocator::pins::{Pins, Step, LEAST, PIECE, SLAB};
use millpond_allocator::window::{Chunk, Unmapping, Window};

/// A device with memory, and host memory that stands for a chunk of the host arena.
struct Rig {
    platform: HostPlatform,
    driver: Arc<dyn Driver>,
    stream: Stream,
    device: Addr,
    host: memmap::Pages,
    bytes: u64,
}

mod memmap {
    use std::ptr::NonNull;

    /// Anonymous pages.
    pub(super) struct Pages(NonNull<u8>, usize);

    impl Pages {
        pub(super) fn new(bytes: usize) -> Self {
            use rustix::mm::{mmap_anonymous, MapFlags, ProtFlags};
            // SAFETY: a new mapping, anywhere.
            let at = unsafe { mmap_anonymous(std::ptr::null_mut(), bytes, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE) };
            Self(NonNull::new(at.unwrap().cast()).unwrap(), bytes)
        }
        pub(super) fn addr(&self) -> u64 {
            self.0.as_ptr() as u64
        }
        pub(super) fn bytes(&mut self) -> &mut [u8] {
            // SAFETY: mapped for as long as this lives; no copy is under way when tests look.
            unsafe { std::slice::from_raw_parts_mut(self.0.as_ptr(), self.1) }
        }
    }

    impl Drop for Pages {
        fn drop(&mut self) {
            // SAFETY: mapped by `new`.
            let _ = unsafe { rustix::mm::munmap(self.0.as_ptr().cast(), self.1) };
        }
    }
}

fn rig(bytes: u64) -> Rig {
    let platform = HostPlatform::new(HostConfig { devices: 1, total_bytes: Some(1 << 30), ..HostConfig::default() });
    let driver = platform.open(DeviceId::host(0)).unwrap();
    driver.attach_context().unwrap();
    let memory = driver.create(bytes).unwrap();
    let device = driver.reserve(bytes, 0).unwrap();
    driver.map(device, bytes, memory).unwrap();
    driver.set_access(device, bytes, Access::ReadWrite).unwrap();
    let stream = driver.stream_create().unwrap();
    Rig { platform, driver, stream, device, host: memmap::Pages::new(bytes as usize), bytes }
}

impl Rig {
    fn chunk(&self) -> (Addr, u64) {
        (self.host.addr(), self.bytes)
    }
    fn registered(&self, offset: u64) -> bool {
        self.driver.pointer_info(self.host.addr() + offset).unwrap().is_some()
    }
    fn out(&self, pins: &Pins, offset: u64, bytes: u64) -> millpond_allocator::pins::Copied {
        let host = self.host.addr() + offset;
        pins.copy(&self.driver, (host, self.device + offset, bytes), host, &[self.chunk()], self.stream).unwrap()
    }
    fn back(&self, pins: &Pins, offset: u64, bytes: u64) -> millpond_allocator::pins::Copied {
        let host = self.host.addr() + offset;
        pins.copy(&self.driver, (self.device + offset, host, bytes), host, &[self.chunk()], self.stream).unwrap()
    }
}

#[test]
fn bytes_cross_both_ways_behind_the_streams_work_and_slabs_are_reused() {
    let mut rig = rig(2 * SLAB + (4 << 20));
    let pins = Pins::new(1 << 30);
    let bytes = rig.bytes;
    rig.driver.fill(rig.device, 7, bytes, rig.stream).unwrap();
    let out = rig.out(&pins, 4096, bytes - 4096);
    assert_eq!((out.pinned, out.pageable), (bytes - 4096, 0));
    assert!(rig.host.bytes()[..4096].iter().all(|b| *b == 0) && rig.host.bytes()[4096..].iter().all(|b| *b == 7));
    assert_eq!(pins.bytes(), bytes, "three slabs, the last one short");
    rig.host.bytes().iter_mut().enumerate().for_each(|(i, b)| *b = (i % 251) as u8);
    assert_eq!(rig.back(&pins, 0, bytes).pinned, bytes);
    rig.host.bytes().fill(0);
    rig.out(&pins, 0, bytes);
    assert!(rig.host.bytes().iter().enumerate().all(|(i, b)| *b == (i % 251) as u8));
    assert_eq!(pins.bytes(), bytes, "nothing was registered again");
    assert_eq!(rig.platform.misuse(), 0);
}

#[test]
fn what_is_unmapped_is_forgotten_first() {
    let rig = rig(2 * SLAB);
    let pins = Pins::new(1 << 30);
    rig.out(&pins, 0, 2 * SLAB);
    assert!(rig.registered(0) && rig.registered(SLAB));
    pins.before_unmap(rig.host.addr(), SLAB);
    assert!(!rig.registered(0) && rig.registered(SLAB));
    assert_eq!(pins.bytes(), SLAB);
    pins.before_unmap(rig.host.addr(), 2 * SLAB);
    assert_eq!(pins.bytes(), 0);
}

/// A driver never learns that registered memory was unmapped. What is mapped there next would be taken for it.
#[test]
fn host_memory_with_something_registered_in_it_is_never_unmapped() {
    let host_driver = || -> Arc<dyn Driver> { HostPlatform::new(HostConfig::default()).open(DeviceId::host(0)).unwrap() };
    for registered in [true, false] {
        let rig = rig(SLAB);
        let (pins, host) = (Pins::new(1 << 30), host_driver());
        let left = Arc::downgrade(&host);
        pins.lies_in(host);
        rig.out(&pins, 0, SLAB);
        if !registered {
            pins.before_unmap(rig.host.addr(), SLAB);
        }
        drop(pins);
        assert_eq!(left.upgrade().is_some(), registered);
    }
}

#[test]
fn a_window_tells_before_it_unmaps() {
    let rig = rig(SLAB);
    let pins = Arc::new(Pins::new(1 << 30));
    let window = Window::reserve(rig.driver.clone(), 4 * SLAB, Access::ReadWrite).unwrap().telling(Some(pins.clone()));
    let memory = rig.driver.create(SLAB).unwrap();
    let fd = rig.driver.export(memory).unwrap();
    window.map(&[(Chunk { epoch: 5, offset: SLAB, bytes: SLAB }, fd)]).unwrap();
    let host = window.base() + SLAB;
    let copied = pins.copy(&rig.driver, (host, rig.device, SLAB), host, &[(host, SLAB)], rig.stream).unwrap();
    assert_eq!((copied.pinned, pins.bytes()), (SLAB, SLAB));
    window.unmap(5).unwrap();
    assert_eq!(pins.bytes(), 0);
    assert_eq!(rig.driver.host_unregister(host as *mut u8).unwrap_err().result(), Some(CuResult::HOST_MEMORY_NOT_REGISTERED));
}

#[test]
fn the_bound_holds_and_the_longest_unused_goes() {
    let rig = rig(3 * SLAB);
    let pins = Pins::new(2 * SLAB);
    rig.out(&pins, 0, SLAB);
    rig.out(&pins, SLAB, SLAB);
    rig.out(&pins, 0, SLAB);
    rig.out(&pins, 2 * SLAB, SLAB);
    assert_eq!(pins.bytes(), 2 * SLAB);
    assert!(rig.registered(0) && !rig.registered(SLAB) && rig.registered(2 * SLAB));
    let whole = rig.out(&pins, 0, 3 * SLAB);
    assert_eq!((whole.pinned, whole.pageable, pins.bytes()), (3 * SLAB, 0, 2 * SLAB), "a value above the bound reuses its own");
    assert!(!rig.registered(0) && rig.registered(2 * SLAB));
    pins.set_limit(0);
    assert_eq!(rig.out(&pins, 2 * SLAB, SLAB).pinned, SLAB, "what is registered is used");
    assert_eq!(rig.out(&pins, 0, SLAB).pinned, 0);
    assert_eq!(pins.bytes(), 0);
}

#[test]
fn two_copies_of_one_value_go_at_the_same_time_piece_by_piece() {
    let rig = rig(2 * SLAB);
    let pins = Pins::new(1 << 30);
    let (out, into) = (rig.stream, rig.driver.stream_create().unwrap());
    rig.driver.fill(rig.device, 7, rig.bytes, out).unwrap();
    let (host, chunk) = (rig.host.addr(), [rig.chunk()]);
    // What leaves: each piece says when it is there, in order and behind its own copy alone.
    let mut left = Vec::new();
    let range = (host, rig.device, rig.bytes);
    let (leaving, queued) = pins
        .start::<DriverError>(&rig.driver, range, host, &chunk, out, |step| {
            if let Step::After(end, stream) = step {
                let event = rig.driver.event_create()?;
                rig.driver.event_record(event, stream)?;
                left.push((end, event));
            }
            Ok(())
        })
        .unwrap();
    queued.unwrap();
    let ends: Vec<u64> = left.iter().map(|(end, _)| *end).collect();
    assert_eq!(ends, (1..=16).map(|n| n * (4 << 20)).collect::<Vec<_>>());
    // What comes waits for nothing but its own piece: by the second one the first is on its way.
    let back = rig.driver.reserve(rig.bytes, 0).unwrap();
    let memory = rig.driver.create(rig.bytes).unwrap();
    rig.driver.map(back, rig.bytes, memory).unwrap();
    rig.driver.set_access(back, rig.bytes, Access::ReadWrite).unwrap();
    let mut steps = Vec::new();
    let (coming, queued) = pins
        .start::<DriverError>(&rig.driver, (back, host, rig.bytes), host, &chunk, into, |step| {
            if let Step::Before(end) = step {
                let piece = left.iter().find(|(at, _)| *at >= end).unwrap();
                while !rig.driver.event_query(piece.1)? {
                    std::thread::yield_now();
                }
            }
            steps.push(step);
            Ok(())
        })
        .unwrap();
    queued.unwrap();
    assert_eq!(pins.finish(coming).unwrap().pinned, rig.bytes);
    assert_eq!(pins.finish(leaving).unwrap().pinned, rig.bytes);
    assert!(matches!(steps[..3], [Step::Before(_), Step::After(..), Step::Before(_)]), "{:?}", &steps[..3]);
    // SAFETY: mapped above, and its copy is over.
    let bytes = unsafe { std::slice::from_raw_parts(back as *const u8, rig.bytes as usize) };
    assert!(bytes.iter().all(|b| *b == 7));
    assert_eq!(rig.platform.misuse(), 0);
}

#[test]
fn a_copy_that_its_caller_ends_is_over_as_far_as_it_came() {
    let mut rig = rig(2 * SLAB);
    let pins = Pins::new(1 << 30);
    rig.driver.fill(rig.device, 5, rig.bytes, rig.stream).unwrap();
    let host = rig.host.addr();
    let ended = DriverError::Call { call: "the caller's", result: CuResult::INVALID_VALUE };
    let (way, queued) = pins
        .start(&rig.driver, (host, rig.device, rig.bytes), host, &[rig.chunk()], rig.stream, |step| match step {
            Step::Before(end) if end > 3 * PIECE => Err(ended.clone()),
            _ => Ok(()),
        })
        .unwrap();
    assert_eq!(queued.unwrap_err(), ended);
    assert_eq!(pins.finish(way).unwrap().pinned, 3 * PIECE);
    let (there, not) = rig.host.bytes().split_at((3 * PIECE) as usize);
    assert!(there.iter().all(|b| *b == 5) && not.iter().all(|b| *b == 0));
}

#[test]
fn small_and_foreign_memory_is_copied_without_registering() {
    let mut rig = rig(SLAB);
    let pins = Pins::new(1 << 30);
    rig.driver.fill(rig.device, 3, SLAB, rig.stream).unwrap();
    assert_eq!(rig.out(&pins, 0, LEAST - 1).pinned, 0);
    let host = rig.host.addr();
    let copied = pins.copy(&rig.driver, (host, rig.device, SLAB), host, &[], rig.stream).unwrap();
    assert_eq!((copied.pinned, copied.pageable), (0, SLAB));
    assert!(rig.host.bytes().iter().all(|b| *b == 3));
    assert_eq!(pins.bytes(), 0);
}

#[test]
fn a_refused_registration_costs_speed_only_and_a_failed_copy_says_so() {
    let mut rig = rig(SLAB);
    let pins = Pins::new(1 << 30);
    rig.driver.fill(rig.device, 9, SLAB, rig.stream).unwrap();
    rig.platform.fail_nth(HostCall::HostRegister, 1, CuResult::OUT_OF_MEMORY);
    assert_eq!(rig.out(&pins, 0, SLAB).pageable, PIECE, "until it is not refused any more");
    assert!(rig.host.bytes().iter().all(|b| *b == 9));
    assert_eq!(pins.refused().and_then(|error| error.result()), Some(CuResult::OUT_OF_MEMORY));
    rig.platform.fail_nth(HostCall::Copy, 1, CuResult::INVALID_VALUE);
    let host = rig.host.addr();
    let failed = pins.copy(&rig.driver, (host, rig.device, SLAB), host, &[rig.chunk()], rig.stream);
    assert_eq!(failed.unwrap_err().result(), Some(CuResult::INVALID_VALUE));
    assert_eq!(rig.out(&pins, 0, SLAB).pinned, SLAB, "the next one works");
}
