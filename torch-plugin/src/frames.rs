//! Python's call stacks for recorded allocations, interned: a stack that was seen before costs its walk and one look-up.
//!
//! This is the one place of torch's path that may take the GIL: while a recording with frames is on, before any lock of ours, in
//! threads that Python knows. torch lets the GIL go before it allocates, so it has to be taken again, as torch's own recorder
//! does in the same place. A free takes frames only where its thread holds the GIL already; letting go of an import takes none.
//!
//! Nothing of Python is linked: its functions are looked up by name when frames are first asked for. No lock of ours is held while one of them is
//! called. [`stop`] returns when no thread is in here any more, so that Python's end, which would stop a thread that waits
//! for the GIL for ever, finds none (the package says so from `atexit`).
#![allow(unsafe_code)] // in `python`: CPython's C API by name

mod gate;
mod python;
mod table;

/// Where [`gate`] takes its atomics from: a test that includes that file gives it a model checker's.
mod atomic {
    pub(super) use std::sync::atomic::{fence, AtomicU32, Ordering};
}

use std::cell::Cell;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use millpond_allocator::record::{self, Origin};

use gate::Gate;
use python::Python;
use table::MOST_FRAMES;

/// Its number: frames of one stack that are kept, the innermost first. Inside: threads that take some.
static GATE: Gate = Gate { number: AtomicU32::new(0), inside: AtomicU32::new(0) };
/// Whether frees have frames too.
static OF_FREES: AtomicU32 = AtomicU32::new(0);
/// How long the end of frames waits for threads that take some.
const LONGEST: Duration = Duration::from_secs(2);

thread_local! {
    /// Python may run a destructor that frees a block while a stack is taken.
    static BUSY: Cell<bool> = const { Cell::new(false) };
}

/// From here on allocations, and frees if asked, are recorded with up to `depth` frames. False: this process has no Python.
pub(crate) fn start(depth: u32, of_frees: bool) -> bool {
    let found = Python::get().is_some();
    if found {
        OF_FREES.store(u32::from(of_frees), Ordering::Relaxed);
        GATE.open(depth.min(MOST_FRAMES as u32));
    }
    found
}

/// No frames are taken any more, and no thread is about to. To be called without the GIL.
pub(crate) fn stop() {
    GATE.shut();
    let since = Instant::now();
    while !GATE.is_empty() && since.elapsed() < LONGEST {
        std::thread::sleep(Duration::from_micros(100));
    }
}

/// In a forked child, where no other thread is in here.
pub(crate) fn forked() {
    GATE.reset();
}

/// What an allocation is recorded with. May take the GIL; no lock of ours is held.
#[inline]
pub(crate) fn of_allocation() -> Origin {
    record::origin().map(|none| take(true).unwrap_or(none))
}

/// What a free is recorded with. Never takes the GIL.
#[inline]
pub(crate) fn of_free() -> Origin {
    record::origin().map(|none| if OF_FREES.load(Ordering::Relaxed) == 0 { none } else { take(false).unwrap_or(none) })
}

/// This thread's stack by its number in the recording; `None` where there is none to be had.
#[cold]
fn take(may_take_gil: bool) -> Option<u32> {
    if !GATE.is_open() || BUSY.replace(true) {
        return None;
    }
    let taken = GATE.enter().and_then(|inside| {
        let python = Python::get()?;
        python.with_gil(may_take_gil, || table::stack(python, inside.number as usize))
    });
    BUSY.set(false);
    taken.flatten()
}
