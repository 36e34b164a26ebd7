//! What a worker works with: a device's streams, gates that hold a stream up, and patterns to fill and to compare.
#![allow(unsafe_code)] // registered memory for the gates

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;

use millpond_allocator::driver::{Addr, Driver, DriverError, Stream};

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
    patterns: Vec<Vec<u8>>,
    gates: &'static [AtomicU64],
    base: Addr,
    next: usize,
    scratch: Vec<u8>,
}

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

#[repr(align(4096))]
struct Page([AtomicU64; GATES]);

impl Rig {
    pub(super) fn new(driver: Arc<dyn Driver>) -> Result<Self, DriverError> {
        let page: &'static Page = Box::leak(Box::new(Page(std::array::from_fn(|_| AtomicU64::new(1)))));
        // SAFETY: the page is never freed, so it stays mapped until the process ends.
        let base = unsafe { driver.host_register(page.0.as_ptr().cast_mut().cast(), size_of::<Page>())? };
        let streams = (0..3).map(|_| driver.stream_create()).collect::<Result<_, _>>()?;
        // The same in every process.
        let pattern = |n: u64| {
            let mut dice = Dice::new(n + 1);
            (0..LARGEST / 8).flat_map(|_| dice.next().to_le_bytes()).collect()
        };
        Ok(Self {
            driver,
            streams,
            patterns: (0..PATTERNS).map(pattern).collect(),
            gates: &page.0,
            base,
            next: 0,
            scratch: vec![0; LARGEST as usize],
        })
    }

    pub(super) fn stream(&self, dice: &mut Dice) -> Stream {
        self.streams.get(dice.below(self.streams.len() as u64) as usize).copied().unwrap_or(Stream::LEGACY)
    }

    /// Holds a stream up: what is queued on it from here on waits.
    pub(super) fn gate(&mut self, stream: Stream) -> Result<Gate, DriverError> {
        self.next = (self.next + 1) % GATES;
        let Some(word) = self.gates.get(self.next) else {
            return Err(DriverError::Call { call: "gate", result: millpond_allocator::driver::CuResult::INVALID_VALUE });
        };
        word.store(0, Ordering::Release);
        let gate = Gate(word);
        self.driver.wait_value(stream, self.base + 8 * self.next as u64, 1)?;
        Ok(gate)
    }

    fn pattern(&self, (pattern, at, bytes): (u64, u64, u64)) -> &[u8] {
        let all = self.patterns.get(pattern as usize).map_or(&[][..], Vec::as_slice);
        all.get(at as usize..(at + bytes) as usize).unwrap_or_default()
    }

    /// Queues a pattern's copy to an address.
    pub(super) fn fill(&self, addr: Addr, content: (u64, u64, u64), stream: Stream) -> Result<(), DriverError> {
        let from = self.pattern(content);
        self.driver.copy(addr, from.as_ptr() as Addr, from.len() as u64, stream)
    }

    /// Queues a copy of what is at an address, to be compared after the stream has been waited for.
    pub(super) fn look(&mut self, addr: Addr, bytes: u64, stream: Stream) -> Result<(), DriverError> {
        self.driver.copy(self.scratch.as_mut_ptr() as Addr, addr, bytes, stream)
    }

    /// Waits for the stream, and compares: the first place that differs.
    pub(super) fn compare(&self, content: (u64, u64, u64), stream: Stream) -> Result<Option<String>, DriverError> {
        self.driver.stream_synchronize(stream)?;
        let (expected, found) = (self.pattern(content), self.scratch.get(..content.2 as usize).unwrap_or_default());
        let differs = expected.iter().zip(found).position(|(a, b)| a != b);
        Ok(differs.map(|at| {
            let word = |bytes: &[u8]| bytes.get(at..(at + 8).min(bytes.len())).unwrap_or_default().to_vec();
            format!("byte {at} of {}: expected {:02x?}, found {:02x?}", content.2, word(expected), word(found))
        }))
    }
}
