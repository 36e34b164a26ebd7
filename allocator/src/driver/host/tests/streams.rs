//! Hardware queues, handles, stalls, and ends.

use std::sync::atomic::Ordering;

use super::*;
use crate::driver::Stream;

#[test]
fn a_waiting_stream_holds_up_those_of_its_hardware_queue_only() {
    let driver = device(config());
    let page = words(&driver);
    let streams: Vec<Stream> = (0..12).map(|_| driver.stream_create().unwrap()).collect();
    driver.wait_value(streams[1], at(&page[0]), 1).unwrap();
    for (n, stream) in streams.iter().enumerate() {
        driver.write_value(*stream, at(&page[100 + n]), 1).unwrap();
    }
    let written = |n: usize| page[100 + n].load(Ordering::Acquire) == 1;
    let shares = |n: usize| n % 4 == 1;
    until(|| (0..12).all(|n| written(n) || shares(n)));
    assert!((0..12).all(|n| written(n) != shares(n)));
    assert!(!driver.stream_query(streams[5]).unwrap());
    page[0].store(1, Ordering::Release);
    until(|| (0..12).all(written));
}

#[test]
fn what_came_before_a_wait_is_not_held_up_by_it() {
    let driver = device(HostConfig { connections: Some(1), ..config() });
    let page = words(&driver);
    let (one, two) = (driver.stream_create().unwrap(), driver.stream_create().unwrap());
    let stall = driver.stall(two);
    driver.write_value(two, at(&page[0]), 1).unwrap();
    driver.wait_value(one, at(&page[0]), 1).unwrap();
    stall.release();
    until(|| driver.stream_query(one).unwrap());
}

#[test]
fn a_wait_held_up_by_a_wait_is_how_processes_deadlock() {
    let driver = device(HostConfig { connections: Some(1), ..config() });
    let page = words(&driver);
    let (one, two) = (driver.stream_create().unwrap(), driver.stream_create().unwrap());
    driver.wait_value(one, at(&page[0]), 1).unwrap();
    driver.write_value(two, at(&page[0]), 1).unwrap();
    // Work on another device, so that the streams above have had time to go wrong.
    let other = device(config());
    other.fill(chunk(&other, 64 * MIB), 1, 64 * MIB, Stream::LEGACY).unwrap();
    other.stream_synchronize(Stream::LEGACY).unwrap();
    assert!(!driver.stream_query(two).unwrap());
    // Nothing in this process releases it.
    page[0].store(1, Ordering::Release);
    until(|| driver.stream_query(two).unwrap());
}

#[test]
fn a_handle_is_used_again_with_another_identity() {
    let driver = device(config());
    let first = driver.stream_create().unwrap();
    let other = driver.stream_create().unwrap();
    let id = driver.stream_id(first).unwrap();
    driver.stream_destroy(first).unwrap();
    let again = driver.stream_create().unwrap();
    assert_eq!(first, again);
    assert_ne!(driver.stream_id(again).unwrap(), id);
    assert_ne!(other, again);
    assert_eq!(driver.misuse(), 0);
}

#[test]
fn each_use_of_a_dead_handle_is_counted() {
    let driver = device(config());
    let stream = driver.stream_create().unwrap();
    let event = driver.event_create().unwrap();
    driver.stream_destroy(stream).unwrap();
    refused(driver.stream_id(stream), CuResult::INVALID_HANDLE);
    refused(driver.stream_query(stream), CuResult::INVALID_HANDLE);
    refused(driver.event_record(event, stream), CuResult::INVALID_HANDLE);
    refused(driver.stream_capture(stream), CuResult::INVALID_HANDLE);
    refused(driver.stream_destroy(stream), CuResult::INVALID_HANDLE);
    refused(driver.stream_query(Stream(0xdead_beef)), CuResult::INVALID_HANDLE);
    assert_eq!(driver.misuse(), 6);
}

#[test]
fn a_stream_belongs_to_its_device() {
    let platform = HostPlatform::new(HostConfig { devices: 2, ..config() });
    let (one, two) = (platform.driver(0).unwrap(), platform.driver(1).unwrap());
    one.attach_context().unwrap();
    two.attach_context().unwrap();
    let stream = one.stream_create().unwrap();
    refused(two.stream_query(stream), CuResult::INVALID_HANDLE);
    refused(two.stream_destroy(stream), CuResult::INVALID_HANDLE);
    assert_eq!(platform.misuse(), 0, "a refusal on a GPU too, no crash");
    // A stream may wait for an event of another device.
    let (event, other) = (one.event_create().unwrap(), two.stream_create().unwrap());
    let stall = one.stall(stream);
    one.event_record(event, stream).unwrap();
    two.stream_wait_event(other, event).unwrap();
    assert!(!two.stream_query(other).unwrap());
    stall.release();
    two.stream_synchronize(other).unwrap();
    refused(two.event_record(event, other), CuResult::INVALID_HANDLE);
}

#[test]
fn a_stall_is_slow_work() {
    let driver = device(config());
    let addr = chunk(&driver, 2 * MIB);
    let (slow, other) = (driver.stream_create().unwrap(), driver.stream_create().unwrap());
    let (before, after) = (driver.event_create().unwrap(), driver.event_create().unwrap());
    driver.fill(addr, 1, 2 * MIB, slow).unwrap();
    driver.event_record(before, slow).unwrap();
    let stall = driver.stall(slow);
    driver.event_record(after, slow).unwrap();
    driver.fill(addr, 2, 2 * MIB, slow).unwrap();
    until(|| driver.event_query(before).unwrap());
    driver.fill(addr + MIB, 3, MIB, other).unwrap();
    driver.stream_synchronize(other).unwrap();
    assert!(!driver.event_query(after).unwrap() && !driver.stream_query(slow).unwrap());
    assert_eq!((byte(addr), byte(addr + MIB)), (1, 3));
    stall.release();
    driver.stream_synchronize(slow).unwrap();
    assert!(driver.event_query(after).unwrap());
    assert_eq!((byte(addr), byte(addr + MIB)), (2, 2));
}

#[test]
fn threads_have_default_streams_of_their_own() {
    let driver = device(config());
    let mine = Stream(2);
    let id = driver.stream_id(mine).unwrap();
    assert_eq!(driver.stream_id(mine).unwrap(), id);
    let theirs = std::thread::scope(|scope| scope.spawn(|| driver.stream_id(mine).unwrap()).join().unwrap());
    assert_ne!(id, theirs);
    refused(driver.stream_destroy(mine), CuResult::INVALID_HANDLE);
    refused(driver.stream_destroy(Stream::LEGACY), CuResult::INVALID_HANDLE);
}

#[test]
fn dropping_the_driver_ends_work_that_waits() {
    let driver = device(config());
    let page = words(&driver);
    let (one, two, three) = (driver.stream_create().unwrap(), driver.stream_create().unwrap(), driver.stream_create().unwrap());
    let event = driver.event_create().unwrap();
    driver.wait_value(one, at(&page[0]), 1).unwrap();
    driver.event_record(event, one).unwrap();
    driver.stream_wait_event(two, event).unwrap();
    driver.write_value(two, at(&page[1]), 1).unwrap();
    let stall = driver.stall(three);
    driver.stream_destroy(one).unwrap();
    drop(driver);
    assert_eq!(page[1].load(Ordering::Acquire), 0);
    stall.release();
}

#[test]
fn a_fault_ends_everything_that_waits() {
    let driver = device(config());
    let page = words(&driver);
    let addr = chunk(&driver, 2 * MIB);
    let streams: Vec<Stream> = (0..5).map(|_| driver.stream_create().unwrap()).collect();
    let event = driver.event_create().unwrap();
    driver.wait_value(streams[0], at(&page[0]), 1).unwrap();
    driver.event_record(event, streams[0]).unwrap();
    driver.stream_wait_event(streams[1], event).unwrap();
    let _stall = driver.stall(streams[2]);
    driver.write_value(streams[4], at(&page[1]), 1).unwrap();
    let stall = driver.stall(streams[3]);
    driver.fill(addr, 1, 2 * MIB, streams[3]).unwrap();
    driver.unmap(addr, 2 * MIB).unwrap();
    std::thread::scope(|scope| {
        let waiters: Vec<_> = streams.iter().map(|stream| scope.spawn(|| driver.stream_synchronize(*stream))).collect();
        stall.release();
        for waiter in waiters {
            refused(waiter.join().unwrap(), CuResult::ILLEGAL_ADDRESS);
        }
    });
    assert_eq!(page[1].load(Ordering::Acquire), 0);
    refused(driver.stream_create(), CuResult::ILLEGAL_ADDRESS);
}
