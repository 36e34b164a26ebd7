//! Timelines of one process on several devices.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod heap_lab;

use std::sync::Arc;

use heap_lab::Words;
use millpond_allocator::driver::host::{HostConfig, HostPlatform};
use millpond_allocator::driver::Driver;
use millpond_allocator::timeline::{Reached, Slots, Timelines};

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

/// A driver never learns that registered memory was unmapped. What is mapped there next would be taken for it.
#[test]
fn registered_memory_outlives_its_timelines() {
    let platform = HostPlatform::new(HostConfig::default());
    let driver = platform.driver(0).unwrap();
    driver.attach_context().unwrap();
    let words = Arc::new(Words::default());
    let left = Arc::downgrade(&words);
    drop(Timelines::new(driver, words, Arc::new(Slots::new(0, 8))).unwrap());
    assert!(left.upgrade().is_some(), "still mapped, since it is still registered");
}
