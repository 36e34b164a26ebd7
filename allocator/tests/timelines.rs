//! Timelines of one process on several devices.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod heap_lab;

use std::collections::BTreeSet;
use std::sync::Arc;

use heap_lab::Words;
use millpond_allocator::driver::host::{HostConfig, HostDriver, HostPlatform};
use millpond_allocator::driver::Driver;
use millpond_allocator::timeline::{Reached, Signal, Slots, TimelineError, TimelineMemory, Timelines};

/// A device, and its timelines.
fn one_device(slots: u32) -> (Arc<HostDriver>, Timelines) {
    let driver = HostPlatform::new(HostConfig::default()).driver(0).unwrap();
    driver.attach_context().unwrap();
    let timelines = Timelines::new(driver.clone(), Arc::new(Words::default()), Arc::new(Slots::new(0, slots))).unwrap();
    (driver, timelines)
}

#[test]
fn devices_of_one_process_share_the_words() {
    let platform = HostPlatform::new(HostConfig { devices: 2, ..HostConfig::default() });
    let words = Arc::new(Words::default());
    let slots = Arc::new(Slots::new(0, 8));
    let drivers = [platform.driver(0).unwrap(), platform.driver(1).unwrap()];
    drivers.iter().for_each(|driver| driver.attach_context().unwrap());
    let timelines: Vec<Timelines> =
        drivers.iter().map(|driver| Timelines::new(driver.clone(), words.clone(), slots.clone()).unwrap()).collect();
    let streams = drivers.each_ref().map(|driver| driver.stream_create().unwrap());

    let stall = drivers[0].stall(streams[0]);
    let signals = [timelines[0].signal(streams[0]).unwrap(), timelines[1].signal(streams[1]).unwrap()];
    assert_ne!(signals[0].timeline, signals[1].timeline, "each stream has a timeline of its own");
    drivers[1].stream_synchronize(streams[1]).unwrap();
    assert_eq!(timelines[0].reached(signals[1]).unwrap(), Reached::Yes, "what one device wrote, the other reads");

    timelines[1].wait(streams[1], signals[0]).unwrap();
    assert!(!drivers[1].stream_query(streams[1]).unwrap(), "one device's stream stands behind the other's");
    drop(stall);
    drivers[1].stream_synchronize(streams[1]).unwrap();
    assert_eq!(timelines[1].reached(signals[0]).unwrap(), Reached::Yes);
}

/// Who waits for a stream waits for all that this waits for.
#[test]
fn a_stream_stands_behind_every_timeline_that_it_waits_for() {
    let (driver, timelines) = one_device(8);
    let [one, two, stream] = [(); 3].map(|()| driver.stream_create().unwrap());
    let stalls = [driver.stall(one), driver.stall(two)];
    let signals = [timelines.signal(one).unwrap(), timelines.signal(two).unwrap()];
    assert_eq!(timelines.unless_unmet(|| 1), Some(1));
    assert_eq!(signals.map(|signal| timelines.wait(stream, signal).unwrap()), [true; 2]);
    assert_eq!(timelines.wait(stream, signals[0]), Ok(false), "it stands behind that already");
    let [first, second] = stalls;
    drop(second);
    driver.stream_synchronize(two).unwrap();
    assert_eq!(timelines.unless_unmet(|| 1), None, "the one that it waited for before is not reached");
    let later = timelines.signal(one).unwrap();
    assert_eq!(timelines.wait(stream, later), Ok(true));
    drop(first);
    driver.stream_synchronize(stream).unwrap();
    assert_eq!(timelines.unless_unmet(|| 1), Some(1));
    assert_eq!(timelines.written().into_iter().collect::<BTreeSet<_>>(), signals.map(|signal| signal.timeline).into());
}

/// A replay would signal old values, and wait for what has long been.
#[test]
fn a_capture_takes_no_signal_and_no_wait_and_is_none_the_worse() {
    let (driver, timelines) = one_device(8);
    let (captured, other) = (driver.stream_create().unwrap(), driver.stream_create().unwrap());
    let before = timelines.signal(captured).unwrap();
    driver.stream_synchronize(captured).unwrap();
    let stall = driver.stall(other);
    let late = timelines.signal(other).unwrap();
    driver.begin_capture(captured).unwrap();
    assert_eq!(timelines.signal(captured), Err(TimelineError::Capturing));
    assert_eq!(timelines.wait(captured, late), Err(TimelineError::Capturing));
    assert_eq!(timelines.wait(captured, before), Ok(false), "what is reached needs no wait");
    assert_eq!(driver.end_capture(captured).unwrap().len(), 0, "nothing of ours is in it");
    // No value was taken, none is left out.
    let after = timelines.signal(captured).unwrap();
    assert_eq!(after, Signal { timeline: before.timeline, value: before.value + 1 });
    assert_eq!(timelines.wait(captured, late), Ok(true));
    drop(stall);
    driver.stream_synchronize(captured).unwrap();
    assert_eq!(timelines.reached(late), Ok(Reached::Yes));
}

/// A driver never learns that registered memory was unmapped. What is mapped there next would be taken for it.
#[test]
fn registered_memory_is_to_outlive_its_timelines() {
    let platform = HostPlatform::new(HostConfig::default());
    let driver = platform.driver(0).unwrap();
    driver.attach_context().unwrap();
    let words = Arc::new(Words::default());
    drop(Timelines::new(driver, words.clone(), Arc::new(Slots::new(0, 8))).unwrap());
    assert!(words.1.load(std::sync::atomic::Ordering::Relaxed), "it is to stay mapped, since it is still registered");
}

/// A stream that stood behind a dead client's value, which its poison released, is not taken to stand behind the next client's.
#[test]
fn what_a_dead_client_named_is_never_named_again() {
    let platform = HostPlatform::new(HostConfig::default());
    let driver = platform.driver(0).unwrap();
    driver.attach_context().unwrap();
    let words = Arc::new(Words::default());
    let waiting = Timelines::new(driver.clone(), words.clone(), Arc::new(Slots::new(0, 8))).unwrap();
    let life = || Timelines::new(driver.clone(), words.clone(), Arc::new(Slots::new(8, 1))).unwrap();
    let [maker, stream] = [(); 2].map(|()| driver.stream_create().unwrap());
    let stall = driver.stall(maker);
    let dead = life();
    let named: Vec<Signal> = (0..3).map(|_| dead.signal(maker).unwrap()).collect();
    assert_eq!(waiting.wait(stream, named[2]), Ok(true));
    let word = words.word(8).unwrap();
    word.poison();
    word.wake();
    driver.stream_synchronize(stream).unwrap();
    // Another stream comes to its wait only when the slot is another's: see below.
    word.revive();
    let next_maker = driver.stream_create().unwrap();
    let next_stall = driver.stall(next_maker);
    let next = life().signal(next_maker).unwrap();
    assert!(next.timeline == named[2].timeline && named.iter().all(|signal| signal.value < next.value), "{named:?}, {next:?}");
    assert_eq!(waiting.wait(stream, next), Ok(true), "it is taken to stand behind that already");
    assert!(!driver.stream_query(stream).unwrap());
    let late = driver.stream_create().unwrap();
    driver.wait_value(late, words.range().0 as u64 + 64 * 8, named[2].value).unwrap();
    driver.stream_synchronize(late).unwrap();
    drop(next_stall);
    driver.stream_synchronize(stream).unwrap();
    drop(stall);
}

/// What one of them has signalled is reached only when it is, whoever signals on the same word before or behind it.
#[test]
fn streams_that_share_a_timeline_come_behind_each_other_both_ways() {
    let (driver, timelines) = one_device(2);
    let [first, late] = [(); 2].map(|()| driver.stream_create().unwrap());
    let before = timelines.signal(first).unwrap();
    driver.stream_synchronize(first).unwrap();

    let stall = driver.stall(late);
    let of_late = timelines.signal(late).unwrap();
    assert_eq!(of_late.timeline, before.timeline, "there is no other");
    let behind = timelines.signal(first).unwrap();
    assert_eq!((behind.timeline, behind.value), (of_late.timeline, of_late.value + 1));
    assert!(!driver.stream_query(first).unwrap(), "it is put behind the other's signal");
    assert_eq!([of_late, behind].map(|signal| timelines.reached(signal).unwrap()), [Reached::No; 2]);
    assert_eq!(timelines.unless_unmet(|| ()), None, "a stream stands behind another's");
    let again = timelines.signal(late).unwrap();
    drop(stall);
    [first, late].into_iter().for_each(|stream| driver.stream_synchronize(stream).unwrap());
    assert_eq!([of_late, behind, again].map(|signal| timelines.reached(signal).unwrap()), [Reached::Yes; 3]);
    assert!(timelines.unless_unmet(|| ()).is_some() && timelines.is_settled());
}

/// A stream for each request: each gets what one before it has done with, and none waits for one that stands still.
#[test]
fn a_timeline_that_is_reached_goes_to_the_next_stream() {
    let (driver, timelines) = one_device(6);
    let still = driver.stream_create().unwrap();
    let stall = driver.stall(still);
    let unmet = timelines.signal(still).unwrap();
    let mut used = BTreeSet::new();
    for _ in 0..50 {
        let stream = driver.stream_create().unwrap();
        let signal = timelines.signal(stream).unwrap();
        driver.stream_synchronize(stream).unwrap();
        assert_eq!(timelines.reached(signal).unwrap(), Reached::Yes);
        used.insert(signal.timeline);
        // Its handle may be the next one's: ids tell them apart.
        driver.stream_destroy(stream).unwrap();
    }
    assert!(used.len() < 6 && !used.contains(&unmet.timeline), "{used:?}");
    drop(stall);
}

#[test]
fn a_device_that_is_opened_late_finds_a_timeline() {
    let platform = HostPlatform::new(HostConfig { devices: 2, ..HostConfig::default() });
    let (words, slots) = (Arc::new(Words::default()), Arc::new(Slots::new(0, 6)));
    let open = |number| {
        let driver = platform.driver(number).unwrap();
        driver.attach_context().unwrap();
        let timelines = Timelines::new(driver.clone(), words.clone(), slots.clone()).unwrap();
        (driver, timelines)
    };
    let (driver, timelines) = open(0);
    let streams: Vec<_> = (0..10).map(|_| driver.stream_create().unwrap()).collect();
    let stalls: Vec<_> = streams.iter().map(|stream| driver.stall(*stream)).collect();
    for stream in &streams {
        timelines.signal(*stream).unwrap();
    }

    let (other, its) = open(1);
    for stream in [(); 10].map(|()| other.stream_create().unwrap()) {
        let signal = its.signal(stream).unwrap();
        other.stream_synchronize(stream).unwrap();
        assert_eq!(its.reached(signal).unwrap(), Reached::Yes);
    }
    drop(stalls);
}
