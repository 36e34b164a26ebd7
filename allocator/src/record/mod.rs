//! Recording: what the allocator and the hand-offs did, event by event, in a ring of bounded size. Off until it is asked for.
//!
//! One recording a process. An event is written under one lock that nothing is called with, so it may be taken under any other;
//! blocks' events are written under their heap's lock, so their order is the order in which things happened. Off, an event costs
//! one relaxed load.

mod event;
mod map;
mod read;
mod ring;
#[cfg(test)]
mod tests;

/// Where the ring and its reader take these from: a test that includes their files gives them a model checker's
/// (`tests/tests/contract_model.rs`).
mod atomic {
    pub(super) use std::sync::atomic::{fence, AtomicU64, Ordering};
}

pub use event::{Event, Kind};
pub use read::Recording;

use std::cell::Cell;
use std::io::Result;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use parking_lot::Mutex;
use rustix::time::{clock_gettime, ClockId};

use crate::origin::Origin as Process;
use ring::Ring;

/// Events that fit where nobody says: 16 MiB.
pub const EVENTS: u64 = 1 << 18;
/// The most events of one ring: 4 GiB.
pub const MOST_EVENTS: u64 = 1 << 26;
/// Bytes of text.
const TEXT: usize = 4 << 20;

/// Which recording is on; 0: none. The only thing that is looked at where recording is off. Nothing is read by it: the ring is under
/// the lock.
static ON: AtomicU32 = AtomicU32::new(0);
static CURRENT: Mutex<Current> = Mutex::new(Current { ring: None, path: None, number: 0, began_in: None });

#[derive(Debug)]
struct Current {
    ring: Option<Ring>,
    path: Option<PathBuf>,
    number: u32,
    began_in: Option<Process>,
}

impl Current {
    /// The ring, for its one writer: in a forked child it is the parent's, and so are a file's pages.
    fn own(&mut self) -> Option<&mut Ring> {
        self.ring.as_mut().filter(|_| self.began_in.as_ref().is_some_and(Process::is_here))
    }
}

thread_local! {
    static THREAD: Cell<u32> = const { Cell::new(0) };
}

/// What a call is recorded with: the call stack that led to it, by its number in the text, 0 where none was taken. `None`: it
/// is not recorded.
pub type Origin = Option<u32>;

/// The origin of a call that nobody has taken a stack for.
#[inline]
#[must_use]
pub fn origin() -> Origin {
    is_on().then_some(0)
}

/// Whether events are recorded.
#[inline]
#[must_use]
pub fn is_on() -> bool {
    ON.load(Ordering::Relaxed) != 0
}

/// The number of the recording that is on, from 1; 0: none.
#[inline]
#[must_use]
pub fn number() -> u32 {
    ON.load(Ordering::Relaxed)
}

/// Nanoseconds of the clock that every process of this machine shares.
#[inline]
#[must_use]
pub fn now() -> u64 {
    let time = clock_gettime(ClockId::Monotonic);
    (time.tv_sec as u64).wrapping_mul(1_000_000_000).wrapping_add(time.tv_nsec as u64)
}

/// Begins a recording of the last `events` events, in place of one that is on: in this process's memory, or in a new file,
/// which holds what it holds whatever becomes of the process.
///
/// # Errors
/// What the system says; then the earlier one goes on.
pub fn start(events: u64, path: Option<&Path>) -> Result<()> {
    let mut current = CURRENT.lock();
    let ring = Ring::new(events.clamp(64, MOST_EVENTS), TEXT, path, now())?;
    if let Some(before) = current.own() {
        before.end(now());
    }
    current.ring = Some(ring);
    current.began_in = Some(Process::here());
    current.path = path.map(Path::to_path_buf);
    current.number = current.number.wrapping_add(1).max(1);
    ON.store(current.number, Ordering::Relaxed);
    Ok(())
}

/// Ends the recording; gives what is in it, unless it is in a file.
pub fn stop() -> Option<Recording> {
    let mut current = CURRENT.lock();
    ON.store(0, Ordering::Relaxed);
    if let Some(ring) = current.own() {
        ring.end(now());
    }
    let ring = current.ring.take()?;
    match current.path.take() {
        Some(_) => None,
        None => Recording::of(&ring.image()).ok(),
    }
}

/// What has been recorded so far; `None` where nothing is.
#[must_use]
pub fn so_far() -> Option<Recording> {
    let image = CURRENT.lock().own().map(|ring| ring.image())?;
    Recording::of(&image).ok()
}

/// How many events fit, and the file; `None` where nothing is recorded.
#[must_use]
pub fn settings() -> Option<(u64, Option<PathBuf>)> {
    let mut current = CURRENT.lock();
    let capacity = current.own().map(|ring| ring.capacity())?;
    Some((capacity, current.path.clone()))
}

/// This is a forked child: the recording is the parent's. Only stores to an atomic.
pub fn forked() {
    ON.store(0, Ordering::Relaxed);
}

/// Records an event if recording is on. Time and thread are filled in where they are 0.
#[inline]
pub fn record(event: Event) {
    if is_on() {
        write(event);
    }
}

/// Records an event of a call whose origin is known, so that recording was on when it began.
#[cold]
pub fn write(mut event: Event) {
    if event.thread == 0 {
        event.thread = thread();
    }
    let mut current = CURRENT.lock();
    let Some(ring) = current.own() else { return };
    if event.time == 0 {
        event.time = now();
    }
    ring.push(&event);
}

/// Adds a line of JSON to the recording's text, if recording is on.
pub fn note(line: &str) {
    if is_on() {
        if let Some(ring) = CURRENT.lock().own() {
            ring.note(line);
        }
    }
}

/// This thread as the system counts, asked once.
fn thread() -> u32 {
    let known = THREAD.get();
    if known != 0 {
        return known;
    }
    let id = rustix::thread::gettid().as_raw_nonzero().get() as u32;
    THREAD.set(id);
    id
}
