//! Which streams there are, what each has freed, and how far each has come.
//!
//! A *mark* is a reading of one counter that moves on with every recorded event. What a stream frees gets the mark of that
//! moment; an event recorded later covers every smaller mark. So one event covers many frees, and a block is anybody's once
//! the stream that freed it has come past the block's mark. A stream is touched only inside a call that was handed it, but for
//! the legacy stream, which cannot be destroyed, and nothing is recorded while a capture is on.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::driver::{Capture, CuResult, Driver, DriverError, Event, Stream, StreamId};
use crate::scatter::ScatterMap;
use crate::tlsf::Handle;

use super::block::touched;
use super::{is_legacy, Neighbour};

/// How much a stream frees before an event of it is worth its microsecond or two, though nobody asks: of ten thousand calls none
/// should pay for it. Whoever misses a block asks, and finds by its next miss what was free at this one.
const SELDOM: Freed = Freed { blocks: 1 << 14, bytes: 256 << 30 };
/// The same where nobody can record the context, or where such an event is in flight, which covers nothing of what is freed behind it:
/// these are then the only events that a stream leaves behind when it stays away.
const OFTEN: Freed = Freed { blocks: 64, bytes: 1 << 30 };
/// Events of one stream in flight; after that the newest is recorded anew, which covers more.
const EVENTS_IN_FLIGHT: usize = 16;

/// Events that are kept ready.
const SPARE_EVENTS: usize = 4;
/// Streams whose rows are ready from the beginning.
const PLENTY: usize = 64;

/// The stream that never runs: what lies there is everybody's after the next context-wide event.
pub(super) const LIMBO: u32 = 0;
const LIMBO_ID: StreamId = StreamId(u64::MAX);

/// What a stream has freed since it was last recorded.
#[derive(Debug, Clone, Copy, Default)]
struct Freed {
    blocks: u32,
    bytes: u64,
}

#[derive(Debug)]
struct State {
    id: StreamId,
    /// Where it allocates outside captures.
    home: u32,
    freed: Freed,
    /// The largest mark that its own events have come past.
    done: u64,
    /// The mark of its newest event.
    recorded: u64,
    /// The largest mark that somebody waits for it to come past.
    wanted: u64,
    /// It was seen since the last look at who may be forgotten.
    recent: bool,
    /// Blocks that it was recorded on and that have not come past it.
    uses: u32,
    events: VecDeque<(u64, Event)>,
    /// Freed blocks that wait for this stream to come past a mark.
    waiting: VecDeque<(u64, Handle)>,
}

impl State {
    fn new(id: StreamId, home: u32) -> Self {
        Self {
            id,
            home,
            freed: Freed::default(),
            done: 0,
            recorded: 0,
            wanted: 0,
            recent: true,
            uses: 0,
            events: VecDeque::new(),
            waiting: VecDeque::new(),
        }
    }
}

#[derive(Debug)]
pub(super) struct Streams {
    driver: Arc<dyn Driver>,
    states: Vec<State>,
    vacant: Vec<u32>,
    by_id: ScatterMap<StreamId, u32>,
    last: (StreamId, u32),
    clock: u64,
    /// Captures under way.
    captures: usize,
    /// Whether the driver has context-wide events.
    context_events: bool,
    context_done: u64,
    /// This device, as the heaps of the process's others know it.
    neighbour: Option<Arc<Neighbour>>,
    in_context: VecDeque<(u64, Event)>,
    waiting: usize,
    spare: Vec<Event>,
}

impl Streams {
    /// No stream but the one that never runs, whose place is 0.
    pub(super) fn new(driver: Arc<dyn Driver>) -> Self {
        let context_events = driver.device().context_events;
        Self {
            driver,
            states: touched(PLENTY, || State::new(LIMBO_ID, 0), 1),
            vacant: Vec::new(),
            by_id: ScatterMap::with_capacity_and_hasher(64, Default::default()),
            last: (LIMBO_ID, LIMBO),
            clock: 1,
            captures: 0,
            context_events,
            context_done: 0,
            neighbour: None,
            in_context: VecDeque::new(),
            waiting: 0,
            spare: Vec::new(),
        }
    }

    /// Makes events, so that malloc seldom has to.
    pub(super) fn prepare(&mut self) {
        while self.spare.len() < SPARE_EVENTS {
            match self.driver.event_create() {
                Ok(event) => self.spare.push(event),
                Err(_) => return,
            }
        }
    }

    /// The stream's number here, if it was seen before.
    #[inline]
    pub(super) fn find(&mut self, id: StreamId) -> Option<u32> {
        if self.last.0 == id {
            return Some(self.last.1);
        }
        let index = *self.by_id.get(&id)?;
        if let Some(state) = self.states.get_mut(index as usize) {
            state.recent = true;
        }
        self.last = (id, index);
        Some(index)
    }

    pub(super) fn add(&mut self, id: StreamId, home: u32) -> u32 {
        let index = match self.vacant.pop() {
            Some(index) => index,
            None => {
                self.states.push(State::new(id, home));
                (self.states.len() - 1) as u32
            }
        };
        if let Some(state) = self.states.get_mut(index as usize) {
            *state = State::new(id, home);
        }
        self.by_id.insert(id, index);
        index
    }

    /// The numbers of all streams but the one that never runs.
    pub(super) fn numbers(&self) -> impl Iterator<Item = u32> + use<> {
        1..self.states.len() as u32
    }

    /// Whether a stream was not seen since the last time this was asked, and nothing waits for it. False of a number that is vacant.
    pub(super) fn is_idle(&mut self, stream: u32) -> bool {
        let (last, number) = (self.last.1, stream);
        let Some(state) = self.states.get_mut(stream as usize).filter(|state| state.id != LIMBO_ID) else { return false };
        let recent = std::mem::replace(&mut state.recent, false);
        !recent && last != number && state.uses == 0 && state.events.is_empty() && state.waiting.is_empty()
    }

    /// Forgets a stream. If it comes again it is a new one.
    pub(super) fn forget(&mut self, stream: u32) {
        if let Some(state) = self.states.get_mut(stream as usize) {
            self.by_id.remove(&state.id);
            *state = State::new(LIMBO_ID, 0);
            self.vacant.push(stream);
        }
    }

    /// Where a stream allocates outside captures.
    #[inline]
    pub(super) fn home(&self, stream: u32) -> u32 {
        self.states.get(stream as usize).map_or(0, |state| state.home)
    }

    pub(super) fn id(&self, stream: u32) -> StreamId {
        self.states.get(stream as usize).map_or(LIMBO_ID, |state| state.id)
    }

    /// How many captures are under way.
    pub(super) fn set_captures(&mut self, captures: usize) {
        self.captures = captures;
    }

    pub(super) fn set_context_events(&mut self, may: bool) {
        self.context_events = may;
    }

    pub(super) fn set_neighbour(&mut self, neighbour: Arc<Neighbour>) {
        self.neighbour = Some(neighbour);
    }

    pub(super) fn has_context_events(&self) -> bool {
        self.context_events
    }

    /// The mark of what is freed now.
    #[inline]
    pub(super) fn mark(&self) -> u64 {
        self.clock
    }

    /// Notes a free on a stream.
    #[inline]
    pub(super) fn freed(&mut self, stream: u32, bytes: u64) {
        if let Some(state) = self.states.get_mut(stream as usize) {
            state.freed.blocks += 1;
            state.freed.bytes += bytes;
            if stream == LIMBO {
                state.wanted = self.clock;
            }
        }
    }

    /// Asks that the stream be recorded at the next chance, behind this moment.
    pub(super) fn want(&mut self, stream: u32) {
        if let Some(state) = self.states.get_mut(stream as usize) {
            state.wanted = self.clock;
        }
    }

    /// Asks that every stream but one that has freed something be recorded at its next chance.
    pub(super) fn want_others(&mut self, but: u32) {
        for (_, state) in (0..).zip(self.states.iter_mut()).filter(|(i, state)| *i != but && state.freed.blocks > 0) {
            state.wanted = self.clock;
        }
    }

    /// Whether an event on this stream, which the caller was handed, is worth recording now.
    #[inline]
    pub(super) fn due(&self, stream: u32) -> bool {
        // Where the context can be recorded, a stream that is alone needs no events of its own.
        (self.states.len() > 2 || !self.context_events)
            && self.captures == 0
            && self.states.get(stream as usize).is_some_and(|s| {
                let unasked = if self.context_events && self.in_context.is_empty() { SELDOM } else { OFTEN };
                s.wanted > s.recorded.max(self.context_done) || s.freed.blocks >= unasked.blocks || s.freed.bytes >= unasked.bytes
            })
    }

    /// Records the stream. Only inside a call that was handed `raw`, or of the legacy stream, and where it is known not to capture itself.
    pub(super) fn record(&mut self, stream: u32, raw: Stream) -> Result<(), DriverError> {
        let Some(state) = self.states.get_mut(stream as usize) else { return Ok(()) };
        // Somebody else's capture, of which torch did not tell: an event in it would be part of the graph.
        if self.captures > 0 || (is_legacy(raw) && self.driver.stream_capture(raw)? != Capture::None) {
            return Ok(());
        }
        let again = if state.events.len() >= EVENTS_IN_FLIGHT { state.events.pop_back().map(|(_, event)| event) } else { None };
        let event = match again.or_else(|| self.spare.pop()) {
            Some(event) => event,
            None => self.driver.event_create()?,
        };
        if let Err(error) = self.driver.event_record(event, raw) {
            self.spare.push(event);
            return Err(error);
        }
        state.events.push_back((self.clock, event));
        (state.freed, state.recorded) = (Freed::default(), self.clock);
        self.clock += 1;
        Ok(())
    }

    /// Records every stream at once; `None` where the driver cannot or a capture forbids it. Returns the event, which stays
    /// ours, and its mark.
    pub(super) fn record_context(&mut self) -> Option<(u64, Event)> {
        if self.captures > 0 || !self.context_events {
            return None;
        }
        let event = match self.spare.pop() {
            Some(event) => event,
            None => self.driver.event_create().ok()?,
        };
        if let Some(neighbour) = &self.neighbour {
            neighbour.records(self.clock);
        }
        if let Err(error) = self.driver.event_record_context(event) {
            self.spare.push(event);
            self.context_events = error.result() != Some(CuResult::NOT_SUPPORTED);
            return None;
        }
        let recorded = (self.clock, event);
        self.in_context.push_back(recorded);
        self.clock += 1;
        Some(recorded)
    }

    /// Records what somebody waits for, without a call that was handed a stream: the whole context; where that may not be, the
    /// legacy stream, whose handle is good as long as the context is.
    pub(super) fn record_unhanded(&mut self) {
        if self.context_events {
            if !self.context_pending() {
                self.record_context();
            }
            return;
        }
        let legacy = self.driver.stream_id(Stream::LEGACY).ok().and_then(|id| self.by_id.get(&id).copied());
        let Some((stream, state)) = legacy.and_then(|stream| Some((stream, self.states.get(stream as usize)?))) else { return };
        if state.events.is_empty() && state.wanted > state.recorded.max(self.context_done) {
            let _ = self.record(stream, Stream::LEGACY);
        }
    }

    /// Whether a context-wide event is in flight.
    pub(super) fn context_pending(&self) -> bool {
        !self.in_context.is_empty()
    }

    /// Whether anybody waits for a stream that has not come past what is waited for.
    pub(super) fn any_wanted(&self) -> bool {
        let abroad = self.neighbour.as_ref().is_some_and(|neighbour| neighbour.is_awaited());
        abroad || self.states.iter().any(|state| state.wanted > state.done.max(self.context_done))
    }

    /// Whether any freed block waits for a stream that it was recorded on.
    #[inline]
    pub(super) fn any_waiting(&self) -> bool {
        self.waiting > 0
    }

    /// Looks how far the context has come. An event whose work has died never completes.
    pub(super) fn poll_context(&mut self) -> bool {
        let before = self.context_done;
        while let Some((mark, event)) = self.in_context.front().copied() {
            if !self.driver.event_query(event).unwrap_or(false) {
                break;
            }
            self.in_context.pop_front();
            self.spare.push(event);
            self.context_done = self.context_done.max(mark);
        }
        if let Some(neighbour) = self.neighbour.as_ref().filter(|_| self.context_done != before) {
            neighbour.has_come(self.context_done);
        }
        self.context_done != before
    }

    /// Looks how far everything has come.
    pub(super) fn poll(&mut self) {
        self.poll_context();
        let Self { driver, states, context_done, spare, .. } = self;
        let is_over = |mark: u64, event: Event| mark <= *context_done || driver.event_query(event).unwrap_or(false);
        for state in states {
            while let Some((mark, event)) = state.events.front().copied() {
                if !is_over(mark, event) {
                    break;
                }
                // Often all are over, and one more look says so of the rest.
                let all = state.events.len() > 2 && state.events.back().is_some_and(|(mark, event)| is_over(*mark, *event));
                let over = if all { state.events.len() } else { 1 };
                for (mark, event) in state.events.drain(..over) {
                    spare.push(event);
                    state.done = state.done.max(mark);
                }
            }
        }
    }

    /// The largest mark that the stream has come past.
    #[inline]
    pub(super) fn done(&self, stream: u32) -> u64 {
        self.states.get(stream as usize).map_or(0, |state| state.done).max(self.context_done)
    }

    /// The largest mark of this stream that an event in flight, or one that is over, covers.
    pub(super) fn covered(&self, stream: u32) -> u64 {
        let own = self.states.get(stream as usize).and_then(|state| state.events.back()).map_or(0, |(mark, _)| *mark);
        let context = self.in_context.back().map_or(0, |(mark, _)| *mark);
        own.max(context).max(self.done(stream))
    }

    /// The first event in flight after which the stream has come past `mark`: one of its own rather than one of all streams.
    pub(super) fn event_for(&self, stream: u32, mark: u64) -> Option<Event> {
        let own = self.states.get(stream as usize).into_iter().flat_map(|state| &state.events);
        own.chain(&self.in_context).find(|(covered, _)| *covered >= mark).map(|(_, event)| *event)
    }

    /// A block was recorded on the stream.
    pub(super) fn used(&mut self, stream: u32) {
        if let Some(state) = self.states.get_mut(stream as usize) {
            state.uses += 1;
        }
    }

    /// The end of [`Streams::used`].
    pub(super) fn unused(&mut self, stream: u32) {
        if let Some(state) = self.states.get_mut(stream as usize) {
            state.uses = state.uses.saturating_sub(1);
        }
    }

    /// A freed block that was recorded on the stream waits until that comes past the mark of the free.
    pub(super) fn wait(&mut self, stream: u32, mark: u64, handle: Handle) {
        if let Some(state) = self.states.get_mut(stream as usize) {
            state.wanted = self.clock;
            state.waiting.push_back((mark, handle));
            self.waiting += 1;
        }
    }

    /// A block that waited for this stream and need not any more, with the mark of its free.
    pub(super) fn take_over(&mut self, stream: u32) -> Option<(u64, Handle)> {
        let done = self.done(stream);
        let waiting = &mut self.states.get_mut(stream as usize)?.waiting;
        let over = waiting.front().is_some_and(|(mark, _)| *mark <= done);
        let taken = if over { waiting.pop_front() } else { None };
        self.waiting -= usize::from(taken.is_some());
        taken
    }

    /// All blocks that wait for this stream, with the marks of their frees.
    pub(super) fn take_waiting(&mut self, stream: u32) -> VecDeque<(u64, Handle)> {
        let taken = self.states.get_mut(stream as usize).map(|state| std::mem::take(&mut state.waiting)).unwrap_or_default();
        self.waiting -= taken.len();
        taken
    }
}

#[cfg(test)]
#[path = "streams_tests.rs"]
mod tests;
