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

    /// For what is a level only: nothing is added or taken away.
    fn set(&mut self, now: u64, peak: u64) {
        self.current = now;
        self.peak = self.peak.max(peak);
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

/// Blocks up to this size count as small, as in torch.
pub(super) const SMALL: u64 = 1 << 20;

/// A heap's counters.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Stats {
    /// Everything.
    pub all: PoolStats,
    /// Blocks up to 1 MiB.
    pub small: PoolStats,
    /// Larger ones.
    pub large: PoolStats,
    /// Free pieces of chunks that are partly used: a level, with its peak. Small and large blocks share chunks: only the sum is kept.
    pub inactive_split: Stat,
    /// Their bytes.
    pub inactive_split_bytes: Stat,
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
    fn of(&mut self, bytes: u64) -> [&mut PoolStats; 2] {
        [&mut self.all, if bytes <= SMALL { &mut self.small } else { &mut self.large }]
    }

    pub(super) fn allocated(&mut self, bytes: u64, requested: u64) {
        for pool in self.of(bytes) {
            pool.allocation.add(1);
            pool.allocated_bytes.add(bytes);
            pool.requested_bytes.add(requested);
            pool.active.add(1);
            pool.active_bytes.add(bytes);
        }
    }

    pub(super) fn freed(&mut self, bytes: u64, requested: u64) {
        for pool in self.of(bytes) {
            pool.allocation.sub(1);
            pool.allocated_bytes.sub(bytes);
            pool.requested_bytes.sub(requested);
        }
    }

    pub(super) fn inactive(&mut self, bytes: u64) {
        for pool in self.of(bytes) {
            pool.active.sub(1);
            pool.active_bytes.sub(bytes);
        }
    }

    /// Free pieces of chunks that are partly used, and their bytes: now, and at most.
    pub(super) fn split(&mut self, now: (u64, u64), peak: (u64, u64)) {
        self.inactive_split.set(now.0, peak.0);
        self.inactive_split_bytes.set(now.1, peak.1);
    }

    pub(super) fn reserved(&mut self, bytes: u64) {
        for pool in [&mut self.all, &mut self.large] {
            pool.segment.add(1);
            pool.reserved_bytes.add(bytes);
        }
    }

    pub(super) fn unreserved(&mut self, bytes: u64) {
        for pool in [&mut self.all, &mut self.large] {
            pool.segment.sub(1);
            pool.reserved_bytes.sub(bytes);
        }
    }

    pub(super) fn reset_peaks(&mut self) {
        for pool in [&mut self.all, &mut self.small, &mut self.large] {
            pool.each().into_iter().for_each(|stat| stat.peak = stat.current);
        }
        [&mut self.inactive_split, &mut self.inactive_split_bytes].into_iter().for_each(|stat| stat.peak = stat.current);
    }

    /// The counters since `begin` alone: peaks as they are (they were reset then), totals as differences.
    pub(super) fn since(mut self, begin: &Self) -> Self {
        self.pairs(begin, |now, then| {
            now.allocated = now.allocated.saturating_sub(then.allocated);
            now.freed = now.freed.saturating_sub(then.freed);
        });
        self.retries = self.retries.saturating_sub(begin.retries);
        self.out_of_memory = self.out_of_memory.saturating_sub(begin.out_of_memory);
        self.growths = self.growths.saturating_sub(begin.growths);
        self.trims = self.trims.saturating_sub(begin.trims);
        self
    }

    /// Peaks that were reset are no lower than they were before.
    pub(super) fn raise_peaks(&mut self, before: &Self) {
        self.pairs(before, |now, then| now.peak = now.peak.max(then.peak));
    }

    fn pairs(&mut self, other: &Self, f: impl Fn(&mut Stat, &Stat)) {
        let mut other = *other;
        for (mine, theirs) in [(&mut self.all, &mut other.all), (&mut self.small, &mut other.small), (&mut self.large, &mut other.large)] {
            mine.each().into_iter().zip(theirs.each()).for_each(|(mine, theirs)| f(mine, theirs));
        }
        f(&mut self.inactive_split, &other.inactive_split);
        f(&mut self.inactive_split_bytes, &other.inactive_split_bytes);
    }

    pub(super) fn reset_accumulated(&mut self) {
        for pool in [&mut self.all, &mut self.small, &mut self.large] {
            pool.each().into_iter().for_each(|stat| (stat.allocated, stat.freed) = (0, 0));
        }
        (self.retries, self.out_of_memory) = (0, 0);
    }
}
