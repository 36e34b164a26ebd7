//! Counters in torch's shape: current, peak, total allocated, total freed; for all, small (≤ 1 MiB) and large blocks.

/// One counter.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Stat {
    /// Now.
    pub current: u64,
    /// The most since the last reset of peaks.
    pub peak: u64,
    /// All that was ever added since the last reset.
    pub allocated: u64,
    /// All that was ever taken away since the last reset.
    pub freed: u64,
}

impl Stat {
    pub(super) fn add(&mut self, n: u64) {
        self.current += n;
        self.allocated += n;
        self.peak = self.peak.max(self.current);
    }

    pub(super) fn sub(&mut self, n: u64) {
        self.current = self.current.saturating_sub(n);
        self.freed += n;
    }
}

/// Counters of one pool.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PoolStats {
    /// Live blocks.
    pub allocation: Stat,
    /// Bytes of live blocks, rounded to 512.
    pub allocated_bytes: Stat,
    /// Bytes asked for.
    pub requested_bytes: Stat,
    /// Live blocks, and freed ones that still wait for a stream or a receiver.
    pub active: Stat,
    /// Their bytes.
    pub active_bytes: Stat,
    /// Chunks. Small and large blocks share chunks: only the sum is kept, under "all" and "large".
    pub segment: Stat,
    /// Bytes of chunks, likewise.
    pub reserved_bytes: Stat,
}

impl PoolStats {
    /// The counters with torch's names for them.
    #[must_use]
    pub fn named(&self) -> [(&'static str, Stat); 7] {
        [
            ("allocation", self.allocation),
            ("allocated_bytes", self.allocated_bytes),
            ("requested_bytes", self.requested_bytes),
            ("active", self.active),
            ("active_bytes", self.active_bytes),
            ("segment", self.segment),
            ("reserved_bytes", self.reserved_bytes),
        ]
    }

    fn each(&mut self) -> [&mut Stat; 7] {
        [
            &mut self.allocation,
            &mut self.allocated_bytes,
            &mut self.requested_bytes,
            &mut self.active,
            &mut self.active_bytes,
            &mut self.segment,
            &mut self.reserved_bytes,
        ]
    }
}

/// A heap's counters.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Stats {
    /// Everything.
    pub all: PoolStats,
    /// Blocks up to 1 MiB.
    pub small: PoolStats,
    /// Larger ones.
    pub large: PoolStats,
    /// Allocations that succeeded only after giving back or waiting.
    pub retries: u64,
    /// Out-of-memory errors.
    pub out_of_memory: u64,
    /// Growths.
    pub growths: u64,
    /// Trims that gave a chunk back.
    pub trims: u64,
}

impl Stats {
    /// The counters since `begin` alone: peaks as they are (they were reset then), totals as differences.
    pub(super) fn since(mut self, begin: &Self) -> Self {
        self.subtract(begin);
        self
    }

    /// Takes the totals of an earlier moment away.
    pub(super) fn subtract(&mut self, earlier: &Self) {
        let mut then = *earlier;
        for (mine, theirs) in [(&mut self.all, &mut then.all), (&mut self.small, &mut then.small), (&mut self.large, &mut then.large)] {
            for (now, then) in mine.each().into_iter().zip(theirs.each()) {
                now.allocated = now.allocated.saturating_sub(then.allocated);
                now.freed = now.freed.saturating_sub(then.freed);
            }
        }
        self.retries = self.retries.saturating_sub(earlier.retries);
        self.out_of_memory = self.out_of_memory.saturating_sub(earlier.out_of_memory);
        self.growths = self.growths.saturating_sub(earlier.growths);
        self.trims = self.trims.saturating_sub(earlier.trims);
    }
}
