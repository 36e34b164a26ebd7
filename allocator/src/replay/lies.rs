//! The checker is checked: drivers that do not do what they say, under a heap that believes them.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use super::tests::{trace, HANDED_OVER, SMALL};
use super::watched::pass_on;
use super::{Failure, Rule, Trace};
use crate::driver::{Access, Addr, Capture, DeviceInfo, Driver, Event, MemInfo, Memory, PointerInfo, Result, Stream, StreamId};

/// What a driver says that is not so.
#[derive(Debug, Clone, Copy)]
enum Lie {
    /// Everything is over.
    Over,
    /// A stream waits.
    Waits,
    /// What all streams have queued is recorded.
    Recorded,
}

#[derive(Debug)]
struct Liar {
    driver: Arc<dyn Driver>,
    lie: Lie,
}

impl Driver for Liar {
    pass_on!(driver);

    fn stream_create(&self) -> Result<Stream> {
        self.driver.stream_create()
    }
    fn owns(&self, stream: Stream) -> Result<bool> {
        self.driver.owns(stream)
    }

    fn stream_id(&self, stream: Stream) -> Result<StreamId> {
        self.driver.stream_id(stream)
    }
    fn event_record(&self, event: Event, stream: Stream) -> Result<()> {
        self.driver.event_record(event, stream)
    }
    fn event_record_context(&self, event: Event) -> Result<()> {
        if matches!(self.lie, Lie::Recorded) {
            Ok(())
        } else {
            self.driver.event_record_context(event)
        }
    }
    fn event_query(&self, event: Event) -> Result<bool> {
        if matches!(self.lie, Lie::Over) {
            Ok(true)
        } else {
            self.driver.event_query(event)
        }
    }
    fn stream_wait_event(&self, stream: Stream, event: Event) -> Result<()> {
        if matches!(self.lie, Lie::Waits) {
            Ok(())
        } else {
            self.driver.stream_wait_event(stream, event)
        }
    }
    fn unmap(&self, addr: Addr, bytes: u64) -> Result<()> {
        self.driver.unmap(addr, bytes)
    }
}

fn failed(lines: &str, lie: Option<Lie>) -> Vec<Failure> {
    let between = |driver| match lie {
        Some(lie) => Arc::new(Liar { driver, lie }),
        None => driver,
    };
    Trace::of(&trace(lines)).check(SMALL, between).unwrap().0
}

#[test]
fn a_driver_that_lies_to_the_heap_is_found_out() {
    for lie in [Lie::Over, Lie::Waits, Lie::Recorded] {
        let failed = failed(HANDED_OVER, Some(lie));
        assert!(!failed.is_empty() && failed.iter().all(|failure| (failure.line, failure.rule) == (4, Rule::Order)), "{lie:?}: {failed:?}");
    }
    let named = failed(HANDED_OVER, Some(Lie::Over))[0].to_string();
    assert!(named.starts_with("line 4: order: ") && named.contains("+8388608 was handed to stream 0x20, but stream 0x10 had"), "{named}");
}

#[test]
fn a_chunk_that_is_given_back_too_early_is_found_out() {
    // Rising sizes: the free chunk of the other stream is exchanged for a larger one.
    let lines = "0,0,allocate,0x1000,2097152,0x10 0,0,free,0x1000,2097152,0x10 0,0,allocate,0x2000,6291456,0x20";
    assert_eq!(failed(lines, None), []);
    let failed = failed(lines, Some(Lie::Over));
    assert!(failed.iter().any(|failure| failure.line == 4 && failure.reason.contains("was unmapped")), "{failed:?}");
}
