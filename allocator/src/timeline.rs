//! Timelines: a 64-bit counter in shared host memory that one stream of one client writes and others wait on.
//!
//! The GPU writes and waits on the word; the CPU reads it with a plain load. When a client dies, the owner keeps the last
//! true value apart and stores [`POISON`], which releases every waiter at once and tells them from a value reached.

mod word;

/// Where [`word`] takes its atomics from: a test that includes that file gives it a model checker's (`tests/tests/contract_model.rs`).
mod atomic {
    pub(super) use std::sync::atomic::{AtomicU64, Ordering};
}

pub use word::{Reached, Word, POISON};

use std::fmt::Debug;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::Arc;

use parking_lot::Mutex;

use crate::driver::{Addr, CuResult, Driver, DriverError, Stream, StreamId};
use crate::scatter::ScatterMap;

/// The shared memory that timelines lie in.
pub trait TimelineMemory: Send + Sync + Debug {
    /// One timeline by its number in the whole arena, if there is one of that number.
    fn word(&self, timeline: u32) -> Option<&Word>;
    /// The whole range, page-aligned, with timeline n at byte 64 × n.
    fn range(&self) -> (*mut u8, usize);
    /// The range stays mapped from here on, as long as the process lives: a driver knows it.
    fn keep_mapped(&self);
}

/// A signal: reached when the timeline's value is at least this one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Signal {
    /// The timeline's number in the whole arena.
    pub timeline: u32,
    /// The value.
    pub value: u64,
}

/// Why a stream could not signal or wait.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TimelineError {
    /// A replay of the graph would write old values.
    #[error("the stream is being captured into a graph: a replay would repeat old signals; send or receive outside the capture")]
    Capturing,
    /// No such timeline.
    #[error("timeline {0} does not exist")]
    Unknown(u32),
    /// The client whose timeline it is died before it got there.
    #[error("the process that was to signal timeline {} at {} died before", .0.timeline, .0.value)]
    Dead(Signal),
    /// The driver's answer.
    #[error(transparent)]
    Driver(#[from] DriverError),
}

/// This client's timelines on one device, and its waits on others'.
#[derive(Debug)]
pub struct Timelines {
    driver: Arc<dyn Driver>,
    memory: Arc<dyn TimelineMemory>,
    base: Addr,
    slots: Arc<Slots>,
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    /// The place of each stream's timeline in `written`.
    streams: ScatterMap<StreamId, usize>,
    /// This device's timelines.
    written: Vec<Line>,
    /// The place that was shared last.
    shared: usize,
    /// What each stream was made to wait for, the last value of each timeline. It stands behind it until that is reached.
    waits: ScatterMap<StreamId, Vec<Signal>>,
}

/// A timeline as this device writes it.
#[derive(Debug)]
struct Line {
    /// The last value queued on it.
    last: Signal,
    /// The stream that it was queued on. Another's comes behind it.
    writer: Option<StreamId>,
}

impl Line {
    /// One that nobody has written in this life.
    fn new(memory: &dyn TimelineMemory, timeline: u32) -> Option<Self> {
        let value = memory.word(timeline)?.value();
        Some(Self { last: Signal { timeline, value }, writer: None })
    }
}

/// Slots that are kept for devices that are opened late: one each.
const KEPT: u32 = 16;

/// The client's slots, shared by its devices.
#[derive(Debug)]
pub struct Slots {
    first: u32,
    count: u32,
    next: AtomicU32,
}

impl Slots {
    /// The timelines `first .. first + count` are the client's.
    #[must_use]
    pub fn new(first: u32, count: u32) -> Self {
        Self { first, count, next: AtomicU32::new(0) }
    }

    /// A slot that nobody has, for a stream.
    fn take(&self) -> Option<u32> {
        self.take_below(self.count - KEPT.min(self.count / 2))
    }

    /// The same, for a device's first stream.
    fn take_kept(&self) -> Option<u32> {
        self.take_below(self.count)
    }

    fn take_below(&self, end: u32) -> Option<u32> {
        let next = self.next.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| (n < end).then_some(n + 1)).ok()?;
        Some(self.first + next)
    }
}

impl Timelines {
    /// Registers the memory with the driver, unless another device of this process has. It stays registered, and so it stays mapped,
    /// as long as the process lives: were it unmapped, what a later client maps at its addresses would count as registered, and a
    /// GPU's signals would go to the pages of the one before.
    ///
    /// # Errors
    /// What the driver says.
    #[allow(unsafe_code)]
    pub fn new(driver: Arc<dyn Driver>, memory: Arc<dyn TimelineMemory>, slots: Arc<Slots>) -> Result<Self, DriverError> {
        let (start, bytes) = memory.range();
        memory.keep_mapped();
        // SAFETY: the range stays mapped from here on.
        let base = match unsafe { driver.host_register(start, bytes) } {
            Err(error) if error.result() == Some(CuResult::HOST_MEMORY_ALREADY_REGISTERED) => driver.host_address(start)?,
            registered => registered?,
        };
        let written = slots.take_kept().and_then(|timeline| Line::new(&*memory, timeline)).into_iter().collect();
        let inner = Mutex::new(Inner { written, ..Inner::default() });
        Ok(Self { driver, memory, base, slots, inner })
    }

    fn address(&self, timeline: u32) -> Addr {
        self.base + 64 * u64::from(timeline)
    }

    /// Queues a signal behind all work of the stream so far. One value covers everything before it.
    ///
    /// # Errors
    /// [`TimelineError::Capturing`], or what the driver says; then no value was assigned.
    pub fn signal(&self, stream: Stream) -> Result<Signal, TimelineError> {
        self.signal_as(stream, self.identify(stream)?)
    }

    /// Who a stream is.
    fn identify(&self, stream: Stream) -> Result<StreamId, TimelineError> {
        self.driver.stream_identity(stream)?.ok_or(TimelineError::Capturing)
    }

    /// [`Timelines::signal`] for a caller that has just asked who the stream is, by [`Driver::stream_identity`]: one driver call.
    ///
    /// # Errors
    /// What the driver says.
    pub fn signal_as(&self, stream: Stream, id: StreamId) -> Result<Signal, TimelineError> {
        // Assigning the value and queueing its write are one step, so that values never go back.
        let mut guard = self.inner.lock();
        let inner = &mut *guard;
        let place = match inner.streams.get(&id) {
            Some(place) => *place,
            None => self.place(inner, id)?,
        };
        let line = inner.written.get_mut(place).ok_or(TimelineError::Unknown(self.slots.first))?;
        if line.writer != Some(id) && self.is_unmet(line.last) {
            // Only where streams share it: see [`Timelines::place`].
            self.driver.wait_value(stream, self.address(line.last.timeline), line.last.value)?;
            inner.waits.entry(id).or_default().push(line.last);
        }
        // The word may have held anything: others can write it.
        let next = Signal { value: line.last.value.wrapping_add(1), ..line.last };
        self.driver.write_value(stream, self.address(next.timeline), next.value)?;
        *line = Line { last: next, writer: Some(id) };
        Ok(next)
    }

    /// Finds a new stream a timeline: one of its own, while there are any; then that of a stream that has reached all that it has
    /// signalled (and that finds another when it comes back); and where all streams are on their way, it shares one. Ids are never
    /// used twice, so a program that makes a stream for each request comes here each time.
    #[cold]
    fn place(&self, inner: &mut Inner, id: StreamId) -> Result<usize, TimelineError> {
        let unused = inner.written.iter().position(|line| line.writer.is_none());
        let place = if let Some(place) = unused {
            place
        } else if let Some(timeline) = self.slots.take() {
            inner.written.push(Line::new(&*self.memory, timeline).ok_or(TimelineError::Unknown(timeline))?);
            inner.written.len() - 1
        } else if let Some(place) = inner.written.iter().position(|line| matches!(self.reached(line.last), Ok(Reached::Yes))) {
            inner.streams.retain(|_, other| *other != place);
            place
        } else {
            inner.shared = (inner.shared + 1) % inner.written.len().max(1);
            inner.shared
        };
        inner.streams.insert(id, place);
        Ok(place)
    }

    /// Makes the stream's later work wait for a signal; queues nothing, and says false, where the CPU sees that it is reached.
    ///
    /// # Errors
    /// [`TimelineError::Dead`] if it never will be, [`TimelineError::Capturing`], or what the driver says.
    pub fn wait(&self, stream: Stream, signal: Signal) -> Result<bool, TimelineError> {
        if self.is_met(signal)? {
            return Ok(false);
        }
        self.wait_as(stream, self.identify(stream)?, signal)
    }

    /// Whether a signal needs no wait.
    fn is_met(&self, signal: Signal) -> Result<bool, TimelineError> {
        match self.reached(signal)? {
            Reached::Yes => Ok(true),
            Reached::Never => Err(TimelineError::Dead(signal)),
            Reached::No => Ok(false),
        }
    }

    /// [`Timelines::wait`] for a caller that has just asked who the stream is, by [`Driver::stream_identity`]: one driver call, or none.
    ///
    /// # Errors
    /// [`TimelineError::Dead`], or what the driver says.
    pub fn wait_as(&self, stream: Stream, id: StreamId, signal: Signal) -> Result<bool, TimelineError> {
        if self.is_met(signal)? {
            return Ok(false);
        }
        let mut inner = self.inner.lock();
        let waits = inner.waits.entry(id).or_default();
        // The stream stands behind as much already: one wait serves a message of many tensors.
        if waits.iter().any(|before| before.timeline == signal.timeline && before.value >= signal.value) {
            return Ok(false);
        }
        self.driver.wait_value(stream, self.address(signal.timeline), signal.value)?;
        waits.retain(|before| before.timeline != signal.timeline && self.is_unmet(*before));
        waits.push(signal);
        Ok(true)
    }

    fn is_unmet(&self, signal: Signal) -> bool {
        self.memory.word(signal.timeline).is_some_and(|word| word.reached(signal.value) == Reached::No)
    }

    /// Whether a signal is reached, as the CPU sees it.
    ///
    /// # Errors
    /// [`TimelineError::Unknown`].
    pub fn reached(&self, signal: Signal) -> Result<Reached, TimelineError> {
        Ok(self.memory.word(signal.timeline).ok_or(TimelineError::Unknown(signal.timeline))?.reached(signal.value))
    }

    /// Does something unless a stream of this device may stand behind a timeline that is not reached: nothing may be made to wait for
    /// it then. Meanwhile none is made to stand behind one.
    pub fn unless_unmet<T>(&self, act: impl FnOnce() -> T) -> Option<T> {
        let mut inner = self.inner.lock();
        inner.waits.retain(|_, waits| {
            waits.retain(|signal| self.is_unmet(*signal));
            !waits.is_empty()
        });
        inner.waits.is_empty().then(act)
    }

    /// Whether all that was signalled on this device's streams is reached: nothing is queued any more that came before a signal.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        self.inner.lock().written.iter().all(|line| !self.is_unmet(line.last))
    }

    /// The timelines that streams of this device write: what will never be written any more when its context is dead.
    #[must_use]
    pub fn written(&self) -> Vec<u32> {
        self.inner.lock().written.iter().map(|line| line.last.timeline).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::word::LIFE;
    use super::*;

    #[test]
    fn poison_keeps_what_was_reached() {
        let word = Word::default();
        word.store(5);
        assert_eq!((word.reached(5), word.reached(6)), (Reached::Yes, Reached::No));
        word.poison();
        word.poison();
        assert_eq!((word.reached(5), word.reached(6)), (Reached::Yes, Reached::Never));
        assert!(word.value() >= POISON);
        assert_eq!(word.revive(), 5 + LIFE);
        assert_eq!(word.reached(6 + LIFE), Reached::No);
        word.store(POISON - 2);
        word.poison();
        assert_eq!((word.revive(), word.reached(POISON - 2)), (POISON, Reached::Yes), "a word that is used up stays poisoned");
    }

    #[test]
    fn what_a_client_scribbles_over_its_words_ends_with_it() {
        let word = Word::default();
        word.store(5);
        word.poison();
        word.store(u64::MAX);
        assert_eq!(word.revive(), 5 + LIFE);
        word.store(6 + LIFE);
        word.poison();
        assert_eq!((word.reached(6 + LIFE), word.reached(7 + LIFE)), (Reached::Yes, Reached::Never));
    }
}
