//! One stream: work in order, run by a thread of its own that starts with the first piece and sleeps when there is none.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::{Condvar, Mutex, MutexGuard};

use super::engine::Engine;
use super::event::Mark;
use super::lane::Lane;
use super::words;
use crate::driver::{Addr, CuResult, StreamId};

/// Looks at a word this often before going to sleep on it.
const SPINS: u32 = 64;
/// How long a stream that waits for another device's stream goes without looking whether its own context died.
const LOOK_AROUND: Duration = Duration::from_millis(50);

/// A piece of work.
#[derive(Debug, Clone)]
pub(super) enum Op {
    Copy {
        dst: Addr,
        src: Addr,
        bytes: u64,
    },
    Fill {
        dst: Addr,
        byte: u8,
        bytes: u64,
    },
    Write {
        word: Addr,
        value: u64,
    },
    Wait {
        word: Addr,
        value: u64,
    },
    /// Until these have been reached.
    Join(Vec<Mark>),
    /// Until this is set.
    Gate(Arc<AtomicBool>),
}

/// A stream's queue.
#[derive(Debug)]
pub(super) struct Queue {
    id: StreamId,
    lane: Arc<Lane>,
    engine: Arc<Engine>,
    state: Mutex<State>,
    work: Condvar,
    done: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// What is not finished: each with its place in the hardware queue, the one that runs now in front.
    ops: VecDeque<(u64, Op)>,
    submitted: u64,
    completed: u64,
    /// Whether the stream was destroyed: the thread ends when it has drained.
    closed: bool,
    thread: Option<JoinHandle<()>>,
}

impl Queue {
    pub(super) fn new(id: StreamId, lane: Arc<Lane>, engine: Arc<Engine>) -> Arc<Self> {
        Arc::new(Self { id, lane, engine, state: Mutex::default(), work: Condvar::new(), done: Condvar::new() })
    }

    pub(super) const fn id(&self) -> StreamId {
        self.id
    }

    pub(super) fn is_forked(&self) -> bool {
        self.engine.memory.space.is_forked()
    }

    /// Queues work. Refused where another thread has just destroyed the stream.
    pub(super) fn push(self: &Arc<Self>, op: Op) -> Result<(), CuResult> {
        let mut state = self.state.lock();
        if state.closed {
            return Err(CuResult::INVALID_HANDLE);
        }
        if state.thread.is_none() {
            let queue = Arc::clone(self);
            let name = format!("millpond-{}", self.id.0);
            let thread = std::thread::Builder::new().name(name).spawn(move || queue.run());
            state.thread = Some(thread.map_err(|_| CuResult::OPERATING_SYSTEM)?);
        }
        state.ops.push_back((self.lane.ticket(), op));
        state.submitted += 1;
        if state.ops.len() == 1 {
            self.arrive(&state);
            self.work.notify_one();
        }
        Ok(())
    }

    /// All work queued so far.
    pub(super) fn tail(self: &Arc<Self>) -> Mark {
        Mark { queue: Arc::clone(self), position: self.state.lock().submitted }
    }

    /// All work queued so far, if some of it has not run.
    pub(super) fn unfinished(self: &Arc<Self>) -> Option<Mark> {
        let position = {
            let state = self.state.lock();
            (state.completed < state.submitted).then_some(state.submitted)?
        };
        Some(Mark { queue: Arc::clone(self), position })
    }

    /// Whether the first `position` pieces of work have run.
    pub(super) fn has_reached(&self, position: u64) -> bool {
        self.state.lock().completed >= position
    }

    pub(super) fn is_idle(&self) -> bool {
        let state = self.state.lock();
        state.completed >= state.submitted
    }

    /// Blocks until the first `position` pieces of work have run, or `halted`.
    pub(super) fn await_position(&self, position: u64, halted: impl Fn() -> bool) {
        let mut state = self.state.lock();
        while state.completed < position && !halted() {
            self.done.wait_for(&mut state, LOOK_AROUND);
        }
    }

    /// No more work will come; what is queued still runs.
    pub(super) fn close(&self) {
        self.state.lock().closed = true;
        self.work.notify_all();
    }

    /// Makes everyone who is blocked here look again.
    pub(super) fn wake(&self) {
        let _state = self.state.lock();
        self.work.notify_all();
        self.done.notify_all();
    }

    pub(super) fn join(&self) {
        let thread = self.state.lock().thread.take();
        if thread.is_some_and(|thread| thread.join().is_err()) {
            tracing::error!(stream = self.id.0, "a stream's thread panicked");
        }
    }

    /// Says at once, not when the thread gets to it, that the stream stands at an unmet wait.
    fn arrive(&self, state: &MutexGuard<'_, State>) {
        if let Some((ticket, Op::Wait { word, value })) = state.ops.front() {
            if self.engine.memory.words.load(*word).is_some_and(|now| !words::reached(now, *value)) {
                self.lane.hold(*ticket);
            }
        }
    }

    fn run(self: Arc<Self>) {
        while let Some((ticket, op)) = self.next() {
            self.lane.admit(ticket, || self.engine.halted());
            let result = if self.engine.halted() { Ok(()) } else { self.perform(ticket, op) };
            self.lane.pass(ticket);
            if let Err(result) = result {
                self.engine.die(result);
            }
            let mut state = self.state.lock();
            state.ops.pop_front();
            self.arrive(&state);
            state.completed += 1;
            self.done.notify_all();
        }
    }

    /// The work in front; `None` when there will be none.
    fn next(&self) -> Option<(u64, Op)> {
        let mut state = self.state.lock();
        loop {
            if let Some(front) = state.ops.front() {
                return Some(front.clone());
            }
            if state.closed || self.engine.is_stopped() {
                return None;
            }
            self.work.wait(&mut state);
        }
    }

    fn perform(&self, ticket: u64, op: Op) -> Result<(), CuResult> {
        let memory = &self.engine.memory;
        let halted = || self.engine.halted();
        let fine = match op {
            Op::Copy { dst, src, bytes } => memory.copy(dst, src, bytes, halted),
            Op::Fill { dst, byte, bytes } => memory.fill(dst, byte, bytes, halted),
            Op::Write { word, value } => memory.words.store(word, value),
            Op::Wait { word, value } => self.await_word(ticket, word, value),
            Op::Join(marks) => {
                marks.iter().for_each(|mark| mark.queue.await_position(mark.position, halted));
                true
            }
            Op::Gate(open) => {
                let mut state = self.state.lock();
                while !open.load(Ordering::Acquire) && !halted() {
                    self.work.wait(&mut state);
                }
                true
            }
        };
        fine.then_some(()).ok_or(CuResult::ILLEGAL_ADDRESS)
    }

    /// Blocks until the word has reached the value; `false` where it is no longer registered.
    fn await_word(&self, ticket: u64, word: Addr, value: u64) -> bool {
        let mut looks = 0;
        while !self.engine.halted() {
            let Some(now) = self.engine.memory.words.load(word) else { return false };
            if words::reached(now, value) {
                return true;
            }
            if looks == 0 {
                self.lane.hold(ticket);
            }
            if looks < SPINS {
                looks += 1;
                std::hint::spin_loop();
            } else {
                words::nap(word, now);
            }
        }
        true
    }
}
