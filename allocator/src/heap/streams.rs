//! Which streams there are, what each has freed, and how far each has come.
//!
//! A *mark* is a reading of one counter that moves on with every recorded event. What a stream frees gets the mark of that
//! moment; an event recorded later covers every smaller mark. So one event covers many frees, and a block is anybody's once
//! the stream that freed it has come past the block's mark. A stream is touched only inside a call that was handed it.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use crate::driver::{Driver, DriverError, Event, Stream, StreamId};

/// Frees after which an event is worth its 0.25 µs even if nobody has asked.
const FREES_PER_EVENT: u32 = 64;
/// The same in bytes.
const BYTES_PER_EVENT: u64 = 32 << 20;
/// Events of one stream in flight; frees behind the last wait for the next.
const EVENTS_IN_FLIGHT: usize = 16;

#[derive(Debug)]
struct State {
    done: u64,
    events: VecDeque<(u64, Event)>,
    frees: u32,
    bytes: u64,
    /// Somebody waits for what this stream has freed or used.
    wanted: bool,
}

#[derive(Debug)]
pub(super) struct Streams {
    driver: Arc<dyn Driver>,
    states: Vec<State>,
    by_id: HashMap<StreamId, usize>,
    last: Option<(StreamId, usize)>,
    clock: u64,
    context_done: u64,
    context_events: VecDeque<(u64, Event)>,
    spare: Vec<Event>,
}

impl Streams {
    pub(super) fn new(driver: Arc<dyn Driver>) -> Self {
        Self {
            driver,
            states: Vec::new(),
            by_id: HashMap::new(),
            last: None,
            clock: 1,
            context_done: 0,
            context_events: VecDeque::new(),
            spare: Vec::new(),
        }
    }

    /// The stream's number here, if it was seen before.
    pub(super) fn find(&mut self, id: StreamId) -> Option<usize> {
        if let Some((last, index)) = self.last {
            if last == id {
                return Some(index);
            }
        }
        let index = *self.by_id.get(&id)?;
        self.last = Some((id, index));
        Some(index)
    }

    pub(super) fn add(&mut self, id: StreamId) -> usize {
        let index = self.states.len();
        self.states.push(State { done: 0, events: VecDeque::new(), frees: 0, bytes: 0, wanted: false });
        self.by_id.insert(id, index);
        index
    }

    pub(super) fn len(&self) -> usize {
        self.states.len()
    }

    /// The mark of what is freed now.
    pub(super) fn mark(&self) -> u64 {
        self.clock
    }

    /// Notes a free on a stream.
    pub(super) fn freed(&mut self, stream: usize, bytes: u64) {
        if let Some(state) = self.states.get_mut(stream) {
            state.frees += 1;
            state.bytes += bytes;
        }
    }

    /// Asks that the stream be recorded at the next chance.
    pub(super) fn want(&mut self, stream: usize) {
        if let Some(state) = self.states.get_mut(stream) {
            state.wanted = true;
        }
    }

    /// Asks that every stream but one that has freed something be recorded at its next chance.
    pub(super) fn want_others(&mut self, but: usize) {
        for (_, state) in self.states.iter_mut().enumerate().filter(|(i, state)| *i != but && state.frees > 0) {
            state.wanted = true;
        }
    }

    /// Whether an event on this stream, which the caller was handed, is worth recording now.
    #[inline]
    pub(super) fn due(&self, stream: usize) -> bool {
        self.states.len() > 1
            && self.states.get(stream).is_some_and(|s| {
                (s.wanted || s.frees >= FREES_PER_EVENT || s.bytes >= BYTES_PER_EVENT) && s.events.len() < EVENTS_IN_FLIGHT
            })
    }

    /// Records the stream. Only inside a call that was handed `raw`, and never while it captures.
    pub(super) fn record(&mut self, stream: usize, raw: Stream) -> Result<(), DriverError> {
        let event = self.event()?;
        if let Err(error) = self.driver.event_record(event, raw) {
            self.spare.push(event);
            return Err(error);
        }
        if let Some(state) = self.states.get_mut(stream) {
            state.events.push_back((self.clock, event));
            (state.frees, state.bytes, state.wanted) = (0, 0, false);
        }
        self.clock += 1;
        Ok(())
    }

    /// Records every stream at once, where the driver can and no capture forbids it. Returns the event, which stays ours.
    pub(super) fn record_context(&mut self) -> Result<Event, DriverError> {
        let event = self.event()?;
        if let Err(error) = self.driver.event_record_context(event) {
            self.spare.push(event);
            return Err(error);
        }
        self.context_events.push_back((self.clock, event));
        self.clock += 1;
        for state in &mut self.states {
            (state.frees, state.bytes, state.wanted) = (0, 0, false);
        }
        Ok(event)
    }

    /// Whether a context-wide event is in flight.
    pub(super) fn context_pending(&self) -> bool {
        !self.context_events.is_empty()
    }

    /// Whether anybody waits for a stream.
    pub(super) fn any_wanted(&self) -> bool {
        self.states.iter().any(|state| state.wanted)
    }

    fn event(&mut self) -> Result<Event, DriverError> {
        match self.spare.pop() {
            Some(event) => Ok(event),
            None => self.driver.event_create(),
        }
    }

    /// Looks how far the streams have come. True if any came further. An event whose work has died never completes.
    pub(super) fn poll(&mut self) -> bool {
        let mut moved = false;
        let Self { driver, states, context_done, context_events, spare, .. } = self;
        let queues = std::iter::once((context_done, context_events)).chain(states.iter_mut().map(|s| (&mut s.done, &mut s.events)));
        for (done, events) in queues {
            while let Some((mark, event)) = events.front().copied() {
                if !driver.event_query(event).unwrap_or(false) {
                    break;
                }
                events.pop_front();
                spare.push(event);
                *done = (*done).max(mark);
                moved = true;
            }
        }
        moved
    }

    /// The largest mark that the stream has come past.
    pub(super) fn done(&self, stream: usize) -> u64 {
        self.states.get(stream).map_or(0, |state| state.done).max(self.context_done)
    }
}
