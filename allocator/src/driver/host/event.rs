//! Events: places in streams that something can wait for.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;

use super::capture::Captured;
use super::queue::Queue;
use crate::driver::{CuResult, Event};

/// A place in a stream: its first `position` pieces of work.
#[derive(Debug, Clone)]
pub(super) struct Mark {
    pub(super) queue: Arc<Queue>,
    pub(super) position: u64,
}

impl Mark {
    pub(super) fn is_reached(&self) -> bool {
        self.queue.has_reached(self.position)
    }
}

/// What an event stands for.
#[derive(Debug, Clone)]
pub(super) enum Recorded {
    /// Work that runs; nothing, where it was never recorded.
    Work(Vec<Mark>),
    /// A place in a stream that was being captured.
    Capture(Captured),
}

/// The live events. Their values are never used again.
#[derive(Debug, Default)]
pub(super) struct Events(Mutex<Table>);

#[derive(Debug, Default)]
struct Table {
    made: u64,
    live: HashMap<u64, (u32, Recorded)>,
}

impl Events {
    /// A new event of a device.
    pub(super) fn create(&self, device: u32) -> Event {
        let mut table = self.0.lock();
        table.made += 1;
        let event = table.made << 4;
        table.live.insert(event, (device, Recorded::Work(Vec::new())));
        Event(event)
    }

    pub(super) fn destroy(&self, event: Event) -> Result<(), CuResult> {
        self.0.lock().live.remove(&event.0).map(drop).ok_or(CuResult::INVALID_HANDLE)
    }

    /// Makes an event of this device stand for something else.
    pub(super) fn record(&self, event: Event, device: u32, recorded: Recorded) -> Result<(), CuResult> {
        let mut table = self.0.lock();
        let (_, slot) = table.live.get_mut(&event.0).filter(|(owner, _)| *owner == device).ok_or(CuResult::INVALID_HANDLE)?;
        *slot = recorded;
        Ok(())
    }

    pub(super) fn get(&self, event: Event) -> Result<Recorded, CuResult> {
        self.0.lock().live.get(&event.0).map(|(_, recorded)| recorded.clone()).ok_or(CuResult::INVALID_HANDLE)
    }

    /// Whether everything recorded has run; `None` for a captured event.
    pub(super) fn is_reached(&self, event: Event) -> Result<Result<bool, Captured>, CuResult> {
        match self.get(event)? {
            Recorded::Work(marks) => Ok(Ok(marks.iter().all(Mark::is_reached))),
            Recorded::Capture(captured) => Ok(Err(captured)),
        }
    }
}
