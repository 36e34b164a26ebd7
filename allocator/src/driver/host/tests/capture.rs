//! Stream capture.

use std::sync::atomic::Ordering;

use super::*;
use crate::driver::{Capture, Stream};

#[test]
fn captured_work_runs_when_it_is_replayed() {
    let driver = device(config());
    let page = words(&driver);
    let (from, to) = (chunk(&driver, 2 * MIB), chunk(&driver, 2 * MIB));
    let stream = driver.stream_create().unwrap();
    driver.begin_capture(stream).unwrap();
    assert_eq!(driver.stream_capture(stream).unwrap(), Capture::Active);
    driver.fill(from, 5, 2 * MIB, stream).unwrap();
    driver.copy(to, from, 2 * MIB, stream).unwrap();
    driver.write_value(stream, at(&page[0]), 9).unwrap();
    let graph = driver.end_capture(stream).unwrap();
    assert_eq!(driver.stream_capture(stream).unwrap(), Capture::None);
    assert_eq!((graph.len(), graph.is_empty()), (3, false));
    driver.stream_synchronize(stream).unwrap();
    assert_eq!((byte(to), page[0].load(Ordering::Acquire)), (0, 0));
    for _ in 0..2 {
        page[0].store(100, Ordering::Release);
        driver.replay(&graph, stream).unwrap();
        driver.stream_synchronize(stream).unwrap();
        assert_eq!((byte(to), page[0].load(Ordering::Acquire)), (5, 9), "a replay writes old values");
    }
}

#[test]
fn questions_about_a_capturing_stream_spoil_its_capture() {
    let driver = device(config());
    let stream = driver.stream_create().unwrap();
    let event = driver.event_create().unwrap();
    let spoil: [&dyn Fn() -> Result<()>; 5] = [
        &|| driver.stream_query(stream).map(drop),
        &|| driver.stream_synchronize(stream),
        &|| driver.event_record_context(event),
        &|| driver.event_record(event, stream).and_then(|()| driver.event_query(event).map(drop)),
        &|| driver.stream_destroy(stream),
    ];
    for call in spoil {
        driver.begin_capture(stream).unwrap();
        refused(call(), CuResult::STREAM_CAPTURE_UNSUPPORTED);
        assert_eq!(driver.stream_capture(stream).unwrap(), Capture::Invalidated);
        refused(driver.fill(chunk(&driver, 2 * MIB), 1, 1, stream), CuResult::STREAM_CAPTURE_INVALIDATED);
        refused(driver.end_capture(stream), CuResult::STREAM_CAPTURE_INVALIDATED);
        assert_eq!(driver.stream_capture(stream).unwrap(), Capture::None);
    }
    driver.begin_capture(stream).unwrap();
    driver.end_capture(stream).unwrap();
}

#[test]
fn other_streams_and_events_do_not_disturb_a_capture() {
    let driver = device(config());
    let (stream, other) = (driver.stream_create().unwrap(), driver.stream_create().unwrap());
    let event = driver.event_create().unwrap();
    driver.event_record(event, other).unwrap();
    driver.begin_capture(stream).unwrap();
    assert!(driver.event_query(event).unwrap() && driver.stream_query(other).unwrap());
    driver.stream_synchronize(other).unwrap();
    driver.stream_synchronize(Stream::LEGACY).unwrap();
    driver.stream_id(other).unwrap();
    driver.create(2 * MIB).unwrap();
    assert!(driver.end_capture(stream).unwrap().is_empty());
}

#[test]
fn a_stream_joins_a_capture_by_an_event_and_must_come_back() {
    let driver = device(config());
    let addr = chunk(&driver, 2 * MIB);
    let (stream, side) = (driver.stream_create().unwrap(), driver.stream_create().unwrap());
    let (fork, join) = (driver.event_create().unwrap(), driver.event_create().unwrap());
    for comes_back in [true, false] {
        driver.begin_capture(stream).unwrap();
        driver.fill(addr, 1, 1, stream).unwrap();
        driver.event_record(fork, stream).unwrap();
        driver.stream_wait_event(side, fork).unwrap();
        assert_eq!(driver.stream_capture(side).unwrap(), Capture::Active);
        driver.fill(addr, 2, 1, side).unwrap();
        driver.event_record(join, side).unwrap();
        if comes_back {
            driver.stream_wait_event(stream, join).unwrap();
            assert_eq!(driver.end_capture(stream).unwrap().len(), 2);
        } else {
            refused(driver.end_capture(stream), CuResult(904));
        }
        assert_eq!(driver.stream_capture(side).unwrap(), Capture::None);
    }
    assert!(driver.stream_query(side).unwrap());
}

#[test]
fn captured_work_waits_for_no_other_work() {
    let driver = device(config());
    let (stream, other) = (driver.stream_create().unwrap(), driver.stream_create().unwrap());
    let event = driver.event_create().unwrap();
    driver.begin_capture(stream).unwrap();
    driver.stream_wait_event(stream, event).unwrap();
    driver.event_record(event, other).unwrap();
    refused(driver.stream_wait_event(stream, event), CuResult(905));
    refused(driver.end_capture(stream), CuResult::STREAM_CAPTURE_INVALIDATED);
}

#[test]
fn two_captures_do_not_merge() {
    let driver = device(config());
    let (one, two) = (driver.stream_create().unwrap(), driver.stream_create().unwrap());
    let event = driver.event_create().unwrap();
    driver.begin_capture(one).unwrap();
    driver.begin_capture(two).unwrap();
    driver.event_record(event, one).unwrap();
    refused(driver.stream_wait_event(two, event), CuResult(902));
    refused(driver.end_capture(two), CuResult::STREAM_CAPTURE_INVALIDATED);
    driver.end_capture(one).unwrap();
}

#[test]
fn a_capture_begins_and_ends_where_it_may() {
    let driver = device(config());
    let stream = driver.stream_create().unwrap();
    refused(driver.begin_capture(Stream::LEGACY), CuResult::STREAM_CAPTURE_UNSUPPORTED);
    refused(driver.end_capture(stream), CuResult::ILLEGAL_STATE);
    driver.begin_capture(stream).unwrap();
    refused(driver.begin_capture(stream), CuResult::ILLEGAL_STATE);
    driver.end_capture(stream).unwrap();
}
