//! When a stream is recorded.

use super::*;
use crate::driver::host::{HostConfig, HostDriver, HostPlatform, Stall};

struct Lab {
    streams: Streams,
    driver: Arc<HostDriver>,
    raw: [Stream; 2],
    _platform: HostPlatform,
}

const ONE: u32 = 1;
const TWO: u32 = 2;

impl Lab {
    fn new() -> Self {
        let platform = HostPlatform::new(HostConfig { total_bytes: Some(1 << 30), ..HostConfig::default() });
        let driver = platform.driver(0).unwrap();
        driver.attach_context().unwrap();
        let mut streams = Streams::new(driver.clone());
        // No row but those of these two and of the one that never runs.
        streams.states.truncate(1);
        let raw = [driver.stream_create().unwrap(), driver.stream_create().unwrap()];
        for (stream, number) in raw.iter().zip([ONE, TWO]) {
            assert_eq!(streams.add(driver.stream_id(*stream).unwrap(), 0), number);
        }
        Self { streams, driver, raw, _platform: platform }
    }

    /// Frees small blocks on the first stream until an event is due, and records it. How many it took.
    fn until_due(&mut self) -> u32 {
        let mut frees = 0;
        while !self.streams.due(ONE) {
            self.streams.freed(ONE, 512);
            frees += 1;
        }
        self.streams.record(ONE, self.raw[0]).unwrap();
        assert!(!self.streams.due(ONE));
        frees
    }

    /// The other stream misses a block, after the first has freed one.
    fn miss(&mut self) {
        self.streams.freed(ONE, 512);
        self.streams.want_others(TWO);
    }

    fn stall(&self) -> Stall {
        self.driver.stall(self.raw[0])
    }
}

#[test]
fn a_stream_that_nobody_asks_of_is_recorded_seldom() {
    let mut lab = Lab::new();
    assert_eq!([lab.until_due(), lab.until_due()], [SELDOM.blocks; 2]);
    lab.streams.freed(ONE, SELDOM.bytes);
    assert!(lab.streams.due(ONE), "of many bytes at once");
}

#[test]
fn one_that_somebody_asks_of_is_recorded_once_and_at_once() {
    let mut lab = Lab::new();
    for _ in 0..3 {
        lab.miss();
        assert_eq!([lab.until_due(), lab.until_due()], [0, SELDOM.blocks]);
    }
}

#[test]
fn every_miss_is_answered_by_an_event_however_busy_the_device_is() {
    let mut lab = Lab::new();
    let stall = lab.stall();
    for _ in 0..4 * EVENTS_IN_FLIGHT {
        let mark = lab.streams.mark();
        lab.miss();
        assert_eq!(lab.until_due(), 0);
        assert!(lab.streams.covered(ONE) >= mark, "what was freed before the miss is covered");
        lab.streams.poll();
        assert!(lab.streams.done(ONE) < mark);
    }
    stall.release();
    lab.driver.stream_synchronize(lab.raw[0]).unwrap();
    lab.streams.poll();
    assert_eq!(lab.streams.done(ONE), lab.streams.mark() - 1);
    assert!(!lab.streams.any_wanted());
}

#[test]
fn a_stream_that_has_freed_nothing_since_is_not_asked() {
    let mut lab = Lab::new();
    lab.miss();
    assert_eq!(lab.until_due(), 0);
    lab.streams.want_others(TWO);
    assert!(!lab.streams.due(ONE), "its event covers everything");
    lab.miss();
    assert!(lab.streams.due(ONE));
    assert!(!lab.streams.due(TWO), "who misses is not asked");
}

#[test]
fn without_events_of_the_context_each_stream_is_recorded_often() {
    let mut lab = Lab::new();
    lab.streams.set_context_events(false);
    assert_eq!([lab.until_due(), lab.until_due()], [OFTEN.blocks; 2]);
    lab.streams.freed(ONE, OFTEN.bytes);
    assert_eq!(lab.until_due(), 0);
    lab.streams.set_context_events(true);
    assert_eq!(lab.until_due(), SELDOM.blocks);
}

#[test]
fn behind_an_event_of_the_context_that_does_not_come_each_stream_is_recorded_often() {
    let mut lab = Lab::new();
    let stall = lab.stall();
    lab.streams.record_context().unwrap();
    lab.streams.poll();
    assert_eq!([lab.until_due(), lab.until_due()], [OFTEN.blocks; 2]);
    stall.release();
    lab.driver.stream_synchronize(lab.raw[0]).unwrap();
    lab.streams.poll();
    assert_eq!(lab.until_due(), SELDOM.blocks);
}

#[test]
fn nothing_is_due_in_a_capture_and_what_was_asked_for_is_after_it() {
    let mut lab = Lab::new();
    lab.streams.set_captures(1);
    lab.miss();
    assert!(!lab.streams.due(ONE));
    lab.streams.set_captures(0);
    assert_eq!([lab.until_due(), lab.until_due()], [0, SELDOM.blocks]);
}
