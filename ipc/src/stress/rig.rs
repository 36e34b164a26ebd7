//! What a worker works with: a device's streams, gates that hold a stream up, and patterns to fill and to compare.
//!
//! All of the host's side is registered: a copy from other memory waits for its stream on the calling thread, and that thread is
//! the one that opens the gates.
#![allow(unsafe_code)] // one mapping of our own

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;

use millpond_allocator::driver::{Addr, CuResult, Driver, DriverError, Stream};
use rustix::mm::{mmap_anonymous, MapFlags, ProtFlags};

use super::Dice;

/// Bytes of each pattern; no value is larger.
pub(super) const LARGEST: u64 = 4 << 20;
/// How many patterns there are.
pub(super) const PATTERNS: u64 = 8;
const GATES: usize = 512;

/// Streams and patterns.
#[derive(Debug)]
pub(super) struct Rig {
    pub(super) driver: Arc<dyn Driver>,
    pub(super) streams: Vec<Stream>,
    /// One page of gates, the patterns, and room for what is looked at.
    memory: *mut u8,
    base: Addr,
    next: usize,
}

// SAFETY: the mapping is never unmapped, and one thread at a time uses the rig.
unsafe impl Send for Rig {}

/// A stream that is held up until this is opened.
#[derive(Debug)]
pub(super) struct Gate(&'static AtomicU64);

impl Gate {
    pub(super) fn open(self) {}
}

impl Drop for Gate {
    fn drop(&mut self) {
        self.0.store(1, Ordering::Release);
    }
}

const PAGE: usize = 4096;
const BYTES: usize = PAGE + (PATTERNS as usize + 1) * LARGEST as usize;

impl Rig {
    pub(super) fn new(driver: Arc<dyn Driver>) -> Result<Self, DriverError> {
        let failed = |_| DriverError::Call { call: "mmap", result: CuResult::OUT_OF_MEMORY };
        // SAFETY: a new mapping at an address of the kernel's choice.
        let memory = unsafe { mmap_anonymous(std::ptr::null_mut(), BYTES, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE) };
        let memory: *mut u8 = memory.map_err(failed)?.cast();
        // SAFETY: the mapping just made, to which there is no other reference yet.
        let patterns = unsafe { std::slice::from_raw_parts_mut(memory.add(PAGE), (PATTERNS * LARGEST) as usize) };
        // The same in every process.
        for (n, pattern) in (1..).zip(patterns.chunks_exact_mut(LARGEST as usize)) {
            let mut dice = Dice::new(n);
            pattern.chunks_exact_mut(8).for_each(|word| word.copy_from_slice(&dice.next().to_le_bytes()));
        }
        // SAFETY: the mapping stays until the process ends.
        let base = unsafe { driver.host_register(memory, BYTES)? };
        let streams = (0..3).map(|_| driver.stream_create()).collect::<Result<_, _>>()?;
        Ok(Self { driver, streams, memory, base, next: 0 })
    }

    pub(super) fn stream(&self, dice: &mut Dice) -> Stream {
        self.streams.get(dice.below(self.streams.len() as u64) as usize).copied().unwrap_or(Stream::LEGACY)
    }

    /// Holds a stream up: what is queued on it from here on waits.
    pub(super) fn gate(&mut self, stream: Stream) -> Result<Gate, DriverError> {
        self.next = (self.next + 1) % GATES;
        // SAFETY: a word of the first page, which is used for nothing else and never unmapped.
        let word: &'static AtomicU64 = unsafe { &*self.memory.cast::<AtomicU64>().add(self.next) };
        word.store(0, Ordering::Release);
        let gate = Gate(word);
        self.driver.wait_value(stream, self.base + 8 * self.next as u64, 1)?;
        Ok(gate)
    }

    /// Where a content lies in this process: the same bytes in every process.
    fn pattern(&self, (pattern, at, bytes): (u64, u64, u64)) -> Option<*const u8> {
        let inside = pattern < PATTERNS && at.checked_add(bytes).is_some_and(|end| end <= LARGEST);
        inside.then(|| self.memory.wrapping_add(PAGE + (pattern * LARGEST + at) as usize).cast_const())
    }

    fn scratch(&self) -> *mut u8 {
        self.memory.wrapping_add(PAGE + (PATTERNS * LARGEST) as usize)
    }

    /// Queues a pattern's copy to an address.
    pub(super) fn fill(&self, addr: Addr, content: (u64, u64, u64), stream: Stream) -> Result<(), DriverError> {
        self.pattern(content).map_or(Ok(()), |from| self.driver.copy(addr, from as Addr, content.2, stream))
    }

    /// Queues a copy of what is at an address, to be compared after the stream has been waited for.
    pub(super) fn look(&self, addr: Addr, bytes: u64, stream: Stream) -> Result<(), DriverError> {
        self.driver.copy(self.scratch() as Addr, addr, bytes.min(LARGEST), stream)
    }

    /// Waits for the stream, and compares: the first place that differs.
    pub(super) fn compare(&self, content: (u64, u64, u64), stream: Stream) -> Result<Option<String>, DriverError> {
        self.driver.stream_synchronize(stream)?;
        let Some(expected) = self.pattern(content) else { return Ok(Some(format!("no such content: {content:?}"))) };
        let bytes = content.2 as usize;
        // SAFETY: both are in the mapping, checked above and by its size; patterns are never written, and the only copy into
        // the scratch has run, since its stream was waited for.
        let (expected, found) = unsafe { (std::slice::from_raw_parts(expected, bytes), std::slice::from_raw_parts(self.scratch(), bytes)) };
        let differs = expected.iter().zip(found).position(|(a, b)| a != b);
        Ok(differs.map(|at| {
            let word = |bytes: &[u8]| bytes.get(at..(at + 8).min(bytes.len())).unwrap_or_default().to_vec();
            format!("byte {at} of {bytes}: expected {:02x?}, found {:02x?}", word(expected), word(found))
        }))
    }
}
