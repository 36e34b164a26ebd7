//! Limits, staged failures, descriptors, and unmaps under work.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering;

use rustix::fs::{Mode, OFlags};

use super::*;
use crate::driver::host::HostCall;
use crate::driver::{DeviceId, DriverError, Event, Memory, Platform, Stream};

#[test]
fn a_device_is_full_until_the_last_handle_and_mapping_are_gone() {
    let driver = device(config());
    let addr = chunk(&driver, 200 * MIB);
    refused(driver.create(58 * MIB), CuResult::OUT_OF_MEMORY);
    let rest = driver.create(56 * MIB).unwrap();
    assert_eq!(driver.mem_info().unwrap().free, 0);
    driver.unmap(addr, 200 * MIB).unwrap();
    assert_eq!(driver.mem_info().unwrap().free, 200 * MIB);
    driver.release(rest).unwrap();
    assert_eq!(driver.mem_info().unwrap().free, 256 * MIB);
}

#[test]
fn each_device_has_its_own_memory() {
    let platform = HostPlatform::new(HostConfig { devices: 2, ..config() });
    assert_eq!(platform.devices().unwrap().len(), 2);
    platform.driver(0).unwrap().create(256 * MIB).unwrap();
    platform.driver(1).unwrap().create(256 * MIB).unwrap();
    assert!(matches!(platform.open(DeviceId::host(2)), Err(DriverError::NoSuchDevice { .. })));
    assert!(matches!(platform.open(DeviceId::from_uuid([7; 16])), Err(DriverError::NoSuchDevice { .. })));
}

#[test]
fn address_space_is_limited() {
    let driver = device(HostConfig { address_space: 64 * MIB, ..config() });
    let addr = driver.reserve(64 * MIB, 0).unwrap();
    refused(driver.reserve(2 * MIB, 0), CuResult::OUT_OF_MEMORY);
    driver.unreserve(addr, 64 * MIB).unwrap();
    driver.reserve(2 * MIB, 0).unwrap();
    refused(driver.reserve(1 << 60, 0), CuResult::OUT_OF_MEMORY);
}

#[test]
fn a_dropped_platform_gives_its_addresses_back() {
    for _ in 0..20 {
        let driver = device(config());
        driver.reserve(16 << 40, 0).unwrap();
        driver.fill(chunk(&driver, 2 * MIB), 1, 2 * MIB, Stream::LEGACY).unwrap();
    }
}

#[test]
fn nothing_but_physical_memory_works_without_a_context() {
    let driver = HostPlatform::new(config()).driver(0).unwrap();
    let memory = driver.create(2 * MIB).unwrap();
    let fd = driver.export(memory).unwrap();
    driver.release(driver.import(fd.as_fd(), 2 * MIB).unwrap()).unwrap();
    let lost = CuResult::INVALID_CONTEXT;
    refused(driver.mem_info(), lost);
    refused(driver.reserve(2 * MIB, 0), lost);
    refused(driver.map(0x1000_0000, 2 * MIB, memory), lost);
    refused(driver.pointer_info(0x1000_0000), lost);
    refused(driver.stream_create(), lost);
    refused(driver.stream_id(Stream::LEGACY), lost);
    refused(driver.event_create(), lost);
    refused(driver.fill(0x1000_0000, 0, 1, Stream::LEGACY), lost);
    refused(driver.host_unregister(std::ptr::null_mut()), lost);
    assert_eq!(driver.misuse(), 0);
}

#[test]
fn a_plan_stages_failures() {
    let driver = device(HostConfig { fail: Some("create:2:2,map:1:1,export:1:999".parse().unwrap()), ..config() });
    let memory = driver.create(2 * MIB).unwrap();
    assert!(driver.create(2 * MIB).unwrap_err().is_out_of_memory());
    driver.create(2 * MIB).unwrap();
    refused(driver.export(memory), CuResult::UNKNOWN);
    driver.export(memory).unwrap();
    let addr = driver.reserve(2 * MIB, 0).unwrap();
    refused(driver.map(addr, 2 * MIB, memory), CuResult::INVALID_VALUE);
    driver.map(addr, 2 * MIB, memory).unwrap();
}

#[test]
fn a_staged_sticky_failure_kills_the_context() {
    let driver = device(config());
    let event = driver.event_create().unwrap();
    driver.fail_nth(HostCall::EventQuery, 2, CuResult::ILLEGAL_ADDRESS);
    assert!(driver.event_query(event).unwrap());
    refused(driver.event_query(event), CuResult::ILLEGAL_ADDRESS);
    refused(driver.event_query(event), CuResult::ILLEGAL_ADDRESS);
    refused(driver.stream_query(Stream::LEGACY), CuResult::ILLEGAL_ADDRESS);
    driver.create(2 * MIB).unwrap();
}

#[test]
fn the_size_of_an_import_is_the_exports() {
    let driver = device(config());
    let fd = driver.export(driver.create(4 * MIB).unwrap()).unwrap();
    refused(driver.import(fd.as_fd(), 2 * MIB), CuResult::INVALID_VALUE);
    refused(driver.import(fd.as_fd(), 8 * MIB), CuResult::INVALID_VALUE);
    driver.import(fd.as_fd(), 4 * MIB).unwrap();
    assert!(rustix::fs::ftruncate(&fd, 0).is_err(), "a chunk cannot shrink");
}

#[test]
fn a_descriptor_for_reading_only_is_not_imported() {
    let driver = device(config());
    let fd = driver.export(driver.create(2 * MIB).unwrap()).unwrap();
    let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&fd));
    let reading: OwnedFd = rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).unwrap();
    refused(driver.import(reading.as_fd(), 2 * MIB), CuResult::INVALID_VALUE);
}

#[test]
fn a_reused_slot_does_not_revive_a_handle() {
    let driver = device(config());
    let stale = driver.create(2 * MIB).unwrap();
    driver.release(stale).unwrap();
    let fresh = driver.create(2 * MIB).unwrap();
    assert_ne!(stale, fresh);
    refused(driver.release(stale), CuResult::INVALID_VALUE);
    refused(driver.release(Memory(0)), CuResult::INVALID_VALUE);
    refused(driver.release(Memory(u64::MAX)), CuResult::INVALID_VALUE);
    driver.release(fresh).unwrap();
}

#[test]
fn two_platforms_share_by_descriptor() {
    let (one, two) = (device(config()), device(config()));
    let memory = one.create(2 * MIB).unwrap();
    let here = one.reserve(2 * MIB, 0).unwrap();
    one.map(here, 2 * MIB, memory).unwrap();
    one.set_access(here, 2 * MIB, Access::ReadWrite).unwrap();
    let there = two.reserve(2 * MIB, 0).unwrap();
    refused(two.map(there, 2 * MIB, memory), CuResult::INVALID_VALUE);
    let imported = two.import(one.export(memory).unwrap().as_fd(), 2 * MIB).unwrap();
    two.map(there, 2 * MIB, imported).unwrap();
    two.set_access(there, 2 * MIB, Access::ReadOnly).unwrap();
    one.fill(here, 0x77, 2 * MIB, Stream::LEGACY).unwrap();
    one.stream_synchronize(Stream::LEGACY).unwrap();
    assert_eq!((byte(there), byte(there + 2 * MIB - 1)), (0x77, 0x77));
    assert_eq!(two.mem_info().unwrap().free, 256 * MIB, "an import costs its exporter");
}

#[test]
fn work_is_refused_where_nothing_can_be_touched() {
    let driver = device(config());
    let addr = chunk(&driver, 2 * MIB);
    let empty = driver.reserve(4 * MIB, 0).unwrap();
    let local = [0_u8; 64];
    let host = local.as_ptr() as Addr;
    for (dst, src) in [(empty, addr), (addr, empty), (0, addr), (addr, 0), (u64::MAX - 4, addr)] {
        refused(driver.copy(dst, src, 64, Stream::LEGACY), CuResult::INVALID_VALUE);
    }
    refused(driver.copy(addr + 2 * MIB - 32, host, 1 << 40, Stream::LEGACY), CuResult::INVALID_VALUE);
    refused(driver.fill(host, 1, 64, Stream::LEGACY), CuResult::INVALID_VALUE);
    let page = words(&driver);
    driver.fill(at(&page[0]), 0xff, 8, Stream::LEGACY).unwrap();
    driver.copy(addr, host, 64, Stream::LEGACY).unwrap();
    driver.stream_synchronize(Stream::LEGACY).unwrap();
    assert_eq!(page[0].load(Ordering::Acquire), u64::MAX);
    refused(driver.event_query(Event(12345)), CuResult::INVALID_HANDLE);
}

#[test]
fn an_unmap_in_the_middle_of_copies_is_a_fault_and_no_crash() {
    for _ in 0..10 {
        let driver = device(config());
        let (from, to) = (chunk(&driver, 32 * MIB), chunk(&driver, 32 * MIB));
        driver.fill(from, 1, 32 * MIB, Stream::LEGACY).unwrap();
        driver.stream_synchronize(Stream::LEGACY).unwrap();
        let streams: Vec<Stream> = (0..3).map(|_| driver.stream_create().unwrap()).collect();
        for stream in &streams {
            for _ in 0..50 {
                driver.copy(to, from, 32 * MIB, *stream).unwrap();
            }
        }
        until(|| byte(to + 31 * MIB) == 1);
        driver.unmap(to, 32 * MIB).unwrap();
        for stream in streams {
            refused(driver.stream_synchronize(stream), CuResult::ILLEGAL_ADDRESS);
        }
        driver.unmap(from, 32 * MIB).unwrap();
    }
}

#[test]
fn unregistered_memory_is_not_touched_by_queued_work() {
    let driver = device(config());
    let page = words(&driver);
    let stream = driver.stream_create().unwrap();
    let stall = driver.stall(stream);
    driver.write_value(stream, at(&page[0]), 1).unwrap();
    driver.host_unregister(page.as_ptr().cast_mut().cast()).unwrap();
    stall.release();
    refused(driver.stream_synchronize(stream), CuResult::ILLEGAL_ADDRESS);
    assert_eq!(page[0].load(Ordering::Acquire), 0);
}

#[test]
fn a_forked_child_is_refused() {
    let driver = device(config());
    let stream = driver.stream_create().unwrap();
    driver.fill(chunk(&driver, 2 * MIB), 1, 2 * MIB, stream).unwrap();
    let stall = driver.stall(stream);
    // SAFETY: the child makes only calls that take no lock and allocate nothing, and then _exit.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        let gone = |error: Option<DriverError>| error.and_then(|error| error.result()) == Some(CuResult::CONTEXT_IS_DESTROYED);
        let refused = gone(driver.create(2 * MIB).err())
            && gone(driver.stream_query(stream).err())
            && gone(driver.attach_context().err())
            && gone(driver.event_create().err());
        drop(stall);
        drop(driver);
        // SAFETY: ends this process.
        unsafe { libc::_exit(if refused { 7 } else { 1 }) };
    }
    let mut status = 0;
    // SAFETY: a child of this test's own.
    assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
    assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 7, "{status:#x}");
    stall.release();
    driver.stream_synchronize(stream).unwrap();
}
