//! Chunks straight from the driver, for one process alone: for tests, benches, replays, and programs without an owner.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::driver::{Driver, DriverError};
use crate::window::Chunk;

use super::source::{ChunkSource, GrowError};

/// What a [`LocalSource`] did so far, and what it has out.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LocalCounts {
    /// Bytes that are out.
    pub reserved: u64,
    /// The most that ever were.
    pub peak: u64,
    /// Chunks that are out.
    pub chunks: u64,
    /// Calls that were granted.
    pub granted: u64,
    /// Calls that were refused.
    pub refused: u64,
    /// Calls that were to press others. Here there are none.
    pub pressed: u64,
    /// Chunks that came back.
    pub returned: u64,
    /// Chunks that came back but were not out: a fault of the caller.
    pub strange: u64,
}

#[derive(Debug, Default)]
struct State {
    out: BTreeMap<u64, Chunk>,
    epoch: u64,
    limit: u64,
    refuse: u64,
    counts: LocalCounts,
}

/// A [`ChunkSource`] that creates chunks itself. Places are taken from the lowest gap that fits.
#[derive(Debug)]
pub struct LocalSource {
    driver: Arc<dyn Driver>,
    window_bytes: u64,
    chunk_bytes: u64,
    state: Mutex<State>,
}

impl LocalSource {
    /// A source for a window of `window_bytes` that gives chunks of `chunk_bytes` at most.
    #[must_use]
    pub fn new(driver: Arc<dyn Driver>, window_bytes: u64, chunk_bytes: u64) -> Self {
        let state = State { limit: u64::MAX, ..State::default() };
        Self { driver, window_bytes, chunk_bytes, state: Mutex::new(state) }
    }

    /// The most that may be out, in bytes.
    pub fn set_limit(&self, bytes: u64) {
        self.state.lock().limit = bytes;
    }

    /// Refuses the next `calls` calls as if memory were exhausted.
    pub fn refuse(&self, calls: u64) {
        self.state.lock().refuse = calls;
    }

    /// What it did so far.
    #[must_use]
    pub fn counts(&self) -> LocalCounts {
        self.state.lock().counts
    }

    fn create(&self, bytes: u64) -> Result<OwnedFd, DriverError> {
        let memory = self.driver.create(bytes)?;
        let fd = self.driver.export(memory);
        self.driver.release(memory)?;
        fd
    }
}

impl State {
    fn gap(&self, bytes: u64, window: u64) -> Option<u64> {
        let mut at = 0;
        for chunk in self.out.values() {
            if chunk.offset - at >= bytes {
                break;
            }
            at = chunk.end();
        }
        (at.checked_add(bytes)? <= window).then_some(at)
    }

    fn full(&mut self, why: &str) -> GrowError {
        self.counts.refused += 1;
        GrowError::OutOfMemory { limit: self.limit, reserved: self.counts.reserved, detail: why.to_owned() }
    }
}

impl ChunkSource for LocalSource {
    fn grow(&self, bytes: u64, press: bool) -> Result<Vec<(Chunk, OwnedFd)>, GrowError> {
        let unit = self.driver.device().granularity.max(1);
        let bytes = bytes.div_ceil(unit).saturating_mul(unit);
        let mut state = self.state.lock();
        state.counts.pressed += u64::from(press);
        if state.refuse > 0 {
            state.refuse -= 1;
            return Err(state.full("Refused on purpose."));
        }
        if state.counts.reserved.checked_add(bytes).is_none_or(|sum| sum > state.limit) {
            return Err(state.full("The limit is reached."));
        }
        let Some(offset) = state.gap(bytes, self.window_bytes) else { return Err(state.full("The window is full.")) };
        let mut made: Vec<(Chunk, OwnedFd)> = Vec::new();
        let mut at = 0;
        while at < bytes {
            let size = self.chunk_bytes.min(bytes - at);
            let fd = self.create(size).map_err(|error| state.full(&error.to_string()))?;
            state.epoch += 1;
            made.push((Chunk { epoch: state.epoch, offset: offset + at, bytes: size }, fd));
            at += size;
        }
        state.out.extend(made.iter().map(|(chunk, _)| (chunk.offset, *chunk)));
        state.counts.granted += 1;
        state.counts.chunks += made.len() as u64;
        state.counts.reserved += bytes;
        state.counts.peak = state.counts.peak.max(state.counts.reserved);
        Ok(made)
    }

    fn give_back(&self, chunks: &[Chunk]) {
        let mut state = self.state.lock();
        for chunk in chunks {
            if state.out.get(&chunk.offset) == Some(chunk) {
                state.out.remove(&chunk.offset);
                state.counts.reserved -= chunk.bytes;
                state.counts.chunks -= 1;
                state.counts.returned += 1;
            } else {
                state.counts.strange += 1;
            }
        }
    }
}
