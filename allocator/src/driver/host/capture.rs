//! Stream capture: work that is recorded into a graph and not run.
//!
//! Only what millpond must survive: a capture is one ordered list of work, whatever streams it came from, and the calls that a
//! capture forbids fail as they do on a GPU and spoil it.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;

use super::queue::Op;
use crate::driver::{Capture, CuResult, StreamId};

/// `CUDA_ERROR_STREAM_CAPTURE_MERGE`: two captures would become one.
const MERGE: CuResult = CuResult(902);
/// `CUDA_ERROR_STREAM_CAPTURE_UNMATCHED`: the capture did not begin on this stream.
const UNMATCHED: CuResult = CuResult(903);
/// `CUDA_ERROR_STREAM_CAPTURE_UNJOINED`: a stream that forked off was not joined.
const UNJOINED: CuResult = CuResult(904);
/// `CUDA_ERROR_STREAM_CAPTURE_ISOLATION`: captured work would wait for work that is not captured.
const ISOLATION: CuResult = CuResult(905);
/// `CUDA_ERROR_CAPTURED_EVENT`: the event's capture is over.
const CAPTURED_EVENT: CuResult = CuResult(907);

/// How much of each stream's captured work something comes after.
type Clock = HashMap<StreamId, u64>;

/// Work that was captured, ready to run any number of times.
#[derive(Debug, Clone)]
pub struct HostGraph {
    pub(super) ops: Vec<Op>,
}

impl HostGraph {
    /// How many pieces of work it holds.
    #[must_use]
    pub fn len(&self) -> usize {
        self.ops.len()
    }

    /// Whether it holds none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ops.is_empty()
    }
}

/// A place in a capture, which an event recorded there stands for.
#[derive(Debug, Clone)]
pub(super) struct Captured {
    session: u64,
    clock: Clock,
}

/// The captures of one device.
#[derive(Debug, Default)]
pub(super) struct Captures {
    // Read on every submission, so that one with no capture anywhere takes no lock.
    active: AtomicUsize,
    sessions: Mutex<Sessions>,
}

#[derive(Debug, Default)]
struct Sessions {
    begun: u64,
    open: Vec<Session>,
}

#[derive(Debug)]
struct Session {
    id: u64,
    origin: StreamId,
    members: HashMap<StreamId, Clock>,
    ops: Vec<Op>,
    invalid: bool,
}

impl Sessions {
    fn of(&mut self, stream: StreamId) -> Option<&mut Session> {
        self.open.iter_mut().find(|session| session.members.contains_key(&stream))
    }

    fn by_id(&mut self, id: u64) -> Option<&mut Session> {
        self.open.iter_mut().find(|session| session.id == id)
    }
}

impl Session {
    fn spoil(&mut self, result: CuResult) -> CuResult {
        self.invalid = true;
        result
    }

    fn usable(&mut self) -> Result<&mut Self, CuResult> {
        if self.invalid {
            Err(CuResult::STREAM_CAPTURE_INVALIDATED)
        } else {
            Ok(self)
        }
    }
}

impl Captures {
    /// Runs `f` with the capture that a stream is in, if it is in one.
    fn in_session<T>(&self, stream: StreamId, f: impl FnOnce(&mut Session) -> T) -> Option<T> {
        if self.active.load(Ordering::Acquire) == 0 {
            return None;
        }
        self.sessions.lock().of(stream).map(f)
    }

    pub(super) fn begin(&self, stream: StreamId) -> Result<(), CuResult> {
        if stream == StreamId(0) {
            return Err(CuResult::STREAM_CAPTURE_UNSUPPORTED);
        }
        let mut sessions = self.sessions.lock();
        if sessions.of(stream).is_some() {
            return Err(CuResult::ILLEGAL_STATE);
        }
        sessions.begun += 1;
        let session = Session {
            id: sessions.begun,
            origin: stream,
            members: HashMap::from([(stream, Clock::new())]),
            ops: Vec::new(),
            invalid: false,
        };
        sessions.open.push(session);
        self.active.store(sessions.open.len(), Ordering::Release);
        Ok(())
    }

    pub(super) fn end(&self, stream: StreamId) -> Result<HostGraph, CuResult> {
        let mut sessions = self.sessions.lock();
        let session = sessions.of(stream).ok_or(CuResult::ILLEGAL_STATE)?;
        if session.origin != stream {
            return Err(session.spoil(UNMATCHED));
        }
        let id = session.id;
        let index = sessions.open.iter().position(|session| session.id == id).ok_or(CuResult::UNKNOWN)?;
        let session = sessions.open.swap_remove(index);
        self.active.store(sessions.open.len(), Ordering::Release);
        if session.invalid {
            return Err(CuResult::STREAM_CAPTURE_INVALIDATED);
        }
        let joined = session.members.get(&stream).cloned().unwrap_or_default();
        let covers = |member: &StreamId, clock: &Clock| joined.get(member) >= clock.get(member);
        if !session.members.iter().all(|(member, clock)| covers(member, clock)) {
            return Err(UNJOINED);
        }
        Ok(HostGraph { ops: session.ops })
    }

    pub(super) fn state(&self, stream: StreamId) -> Capture {
        let state = |session: &mut Session| if session.invalid { Capture::Invalidated } else { Capture::Active };
        self.in_session(stream, state).unwrap_or(Capture::None)
    }

    /// Takes work of a stream that is being captured; `None` where it is not.
    pub(super) fn record(&self, stream: StreamId, ops: &[Op]) -> Option<Result<(), CuResult>> {
        self.in_session(stream, |session| {
            let session = session.usable()?;
            session.ops.extend_from_slice(ops);
            *session.members.entry(stream).or_default().entry(stream).or_default() += 1;
            Ok(())
        })
    }

    /// The place that a stream's capture is at; `None` where it is not being captured.
    pub(super) fn mark(&self, stream: StreamId) -> Option<Result<Captured, CuResult>> {
        self.in_session(stream, |session| {
            let session = session.usable()?;
            Ok(Captured { session: session.id, clock: session.members.get(&stream).cloned().unwrap_or_default() })
        })
    }

    /// Makes a stream wait for a captured event: one that was not being captured joins the capture.
    pub(super) fn join(&self, stream: StreamId, event: &Captured) -> Result<(), CuResult> {
        let mut sessions = self.sessions.lock();
        if let Some(other) = sessions.of(stream).filter(|session| session.id != event.session) {
            return Err(other.spoil(MERGE));
        }
        let session = sessions.by_id(event.session).ok_or(CAPTURED_EVENT)?.usable()?;
        let clock = session.members.entry(stream).or_default();
        for (member, count) in &event.clock {
            let known = clock.entry(*member).or_default();
            *known = (*known).max(*count);
        }
        Ok(())
    }

    /// Refuses a call on a stream that is being captured, and spoils the capture.
    pub(super) fn forbid(&self, stream: StreamId) -> Result<(), CuResult> {
        let refused = self.in_session(stream, |session| session.spoil(CuResult::STREAM_CAPTURE_UNSUPPORTED));
        refused.map_or(Ok(()), Err)
    }

    /// Refuses a wait for work that is not captured by a stream that is.
    pub(super) fn isolate(&self, stream: StreamId) -> Result<(), CuResult> {
        self.in_session(stream, |session| session.spoil(ISOLATION)).map_or(Ok(()), Err)
    }

    /// Refuses a query of an event that was recorded in a capture, and spoils that.
    pub(super) fn forbid_query(&self, event: &Captured) -> CuResult {
        match self.sessions.lock().by_id(event.session) {
            Some(session) => session.spoil(CuResult::STREAM_CAPTURE_UNSUPPORTED),
            None => CAPTURED_EVENT,
        }
    }

    /// Refuses a call that covers every stream while any is being captured, and spoils those captures.
    pub(super) fn forbid_everywhere(&self) -> Result<(), CuResult> {
        let mut sessions = self.sessions.lock();
        sessions.open.iter_mut().for_each(|session| session.invalid = true);
        if sessions.open.is_empty() {
            Ok(())
        } else {
            Err(CuResult::STREAM_CAPTURE_UNSUPPORTED)
        }
    }
}
