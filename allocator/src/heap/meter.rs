//! The heap's counters as malloc and free keep them: as few words as will do. What follows from others is worked out when
//! somebody asks ([`Meter::stats`]).

use super::stats::{PoolStats, Stat, Stats};

/// Blocks up to this size count as small, as in torch.
const SMALL: u64 = 1 << 20;

/// What is there now, the most that was, and what has gone.
#[derive(Debug, Clone, Copy, Default)]
struct Count {
    now: u64,
    peak: u64,
    gone: u64,
}

impl Count {
    #[inline]
    fn add(&mut self, n: u64) {
        self.now += n;
        self.peak = self.peak.max(self.now);
    }

    #[inline]
    fn sub(&mut self, n: u64) {
        self.now = self.now.saturating_sub(n);
        self.gone += n;
    }
}

/// The blocks of one kind.
#[derive(Debug, Clone, Copy, Default)]
struct Pool {
    blocks: Count,
    bytes: Count,
    requested: Count,
    /// Freed blocks that others or streams still use, and their bytes.
    held: u64,
    held_bytes: u64,
    /// Peaks of what is live and what is held together, which only a new block can raise.
    active_peak: u64,
    active_bytes_peak: u64,
}

impl Pool {
    #[inline]
    fn allocated(&mut self, bytes: u64, requested: u64) {
        self.blocks.add(1);
        self.bytes.add(bytes);
        self.requested.add(requested);
        self.active_peak = self.active_peak.max(self.blocks.now + self.held);
        self.active_bytes_peak = self.active_bytes_peak.max(self.bytes.now + self.held_bytes);
    }

    #[inline]
    fn freed(&mut self, bytes: u64, requested: u64) {
        self.blocks.sub(1);
        self.bytes.sub(bytes);
        self.requested.sub(requested);
    }

    fn stats(&self) -> PoolStats {
        let stat = |count: Count| Stat { current: count.now, peak: count.peak, allocated: count.now + count.gone, freed: count.gone };
        // Each block becomes active when it is allocated, and stops to be some time after it is freed.
        let active = |live: Stat, held: u64, peak| Stat {
            current: live.current + held,
            peak,
            allocated: live.allocated,
            freed: live.freed.saturating_sub(held),
        };
        let (allocation, allocated_bytes) = (stat(self.blocks), stat(self.bytes));
        PoolStats {
            allocation,
            allocated_bytes,
            requested_bytes: stat(self.requested),
            active: active(allocation, self.held, self.active_peak),
            active_bytes: active(allocated_bytes, self.held_bytes, self.active_bytes_peak),
            ..PoolStats::default()
        }
    }

    /// Peaks no lower than those.
    fn raise_peaks(&mut self, to: &PoolStats) {
        let pairs = [
            (&mut self.blocks.peak, to.allocation),
            (&mut self.bytes.peak, to.allocated_bytes),
            (&mut self.requested.peak, to.requested_bytes),
            (&mut self.active_peak, to.active),
            (&mut self.active_bytes_peak, to.active_bytes),
        ];
        pairs.into_iter().for_each(|(peak, stat)| *peak = (*peak).max(stat.peak));
    }

    fn reset_peaks(&mut self) {
        for count in [&mut self.blocks, &mut self.bytes, &mut self.requested] {
            count.peak = count.now;
        }
        (self.active_peak, self.active_bytes_peak) = (self.blocks.now + self.held, self.bytes.now + self.held_bytes);
    }
}

/// The counters.
#[derive(Debug, Default)]
pub(super) struct Meter {
    all: Pool,
    small: Pool,
    large: Pool,
    /// Chunks, and their bytes.
    segment: Stat,
    reserved: Stat,
    /// Totals at the last reset.
    base: Stats,
    /// Allocations that succeeded only after giving back or waiting.
    pub(super) retries: u64,
    pub(super) out_of_memory: u64,
    pub(super) growths: u64,
    /// Trims that gave a chunk back.
    pub(super) trims: u64,
}

impl Meter {
    #[inline]
    fn of(&mut self, bytes: u64) -> [&mut Pool; 2] {
        [&mut self.all, if bytes <= SMALL { &mut self.small } else { &mut self.large }]
    }

    #[inline]
    pub(super) fn allocated(&mut self, bytes: u64, requested: u64) {
        self.of(bytes).into_iter().for_each(|pool| pool.allocated(bytes, requested));
    }

    /// A block was freed.
    #[inline]
    pub(super) fn freed(&mut self, bytes: u64, requested: u64) {
        self.of(bytes).into_iter().for_each(|pool| pool.freed(bytes, requested));
    }

    /// A freed block is still used.
    pub(super) fn held(&mut self, bytes: u64) {
        self.of(bytes).into_iter().for_each(|pool| (pool.held, pool.held_bytes) = (pool.held + 1, pool.held_bytes + bytes));
    }

    /// And is no more.
    pub(super) fn let_go(&mut self, bytes: u64) {
        for pool in self.of(bytes) {
            (pool.held, pool.held_bytes) = (pool.held.saturating_sub(1), pool.held_bytes.saturating_sub(bytes));
        }
    }

    pub(super) fn reserve(&mut self, bytes: u64) {
        self.segment.add(1);
        self.reserved.add(bytes);
    }

    pub(super) fn unreserve(&mut self, bytes: u64) {
        self.segment.sub(1);
        self.reserved.sub(bytes);
    }

    /// Bytes of chunks.
    pub(super) const fn reserved_bytes(&self) -> u64 {
        self.reserved.current
    }

    /// Bytes of live blocks.
    pub(super) const fn allocated_bytes(&self) -> u64 {
        self.all.bytes.now
    }

    /// The most that those were.
    pub(super) const fn peak_bytes(&self) -> u64 {
        self.all.bytes.peak
    }

    /// Bytes asked for by live blocks.
    pub(super) const fn requested_bytes(&self) -> u64 {
        self.all.requested.now
    }

    /// Live blocks.
    pub(super) const fn blocks(&self) -> u64 {
        self.all.blocks.now
    }

    /// Live blocks, and freed ones that are still used.
    pub(super) const fn active_blocks(&self) -> u64 {
        self.all.blocks.now + self.all.held
    }

    /// All counters, totals since the last reset.
    pub(super) fn stats(&self) -> Stats {
        let mut stats = self.since_ever();
        stats.subtract(&self.base);
        stats
    }

    fn since_ever(&self) -> Stats {
        let chunks = |pool: &Pool| PoolStats { segment: self.segment, reserved_bytes: self.reserved, ..pool.stats() };
        Stats {
            all: chunks(&self.all),
            small: self.small.stats(),
            large: chunks(&self.large),
            retries: self.retries,
            out_of_memory: self.out_of_memory,
            growths: self.growths,
            trims: self.trims,
        }
    }

    pub(super) fn reset_peaks(&mut self) {
        [&mut self.all, &mut self.small, &mut self.large].into_iter().for_each(Pool::reset_peaks);
        [&mut self.segment, &mut self.reserved].into_iter().for_each(|stat| stat.peak = stat.current);
    }

    /// Peaks that were reset are no lower than they were before.
    pub(super) fn raise_peaks(&mut self, before: &Stats) {
        self.all.raise_peaks(&before.all);
        self.small.raise_peaks(&before.small);
        self.large.raise_peaks(&before.large);
        for (mine, theirs) in [(&mut self.segment, before.all.segment), (&mut self.reserved, before.all.reserved_bytes)] {
            mine.peak = mine.peak.max(theirs.peak);
        }
    }

    /// Totals start from nothing, but for growths and trims.
    pub(super) fn reset_accumulated(&mut self) {
        (self.retries, self.out_of_memory) = (0, 0);
        self.base = Stats { growths: 0, trims: 0, ..self.since_ever() };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_derived_is_what_was_counted() {
        let mut meter = Meter::default();
        meter.reserve(4 << 20);
        meter.allocated(512, 100);
        meter.allocated(2 << 20, 2 << 20);
        meter.freed(512, 100);
        meter.held(512);
        meter.freed(2 << 20, 2 << 20);
        let stats = meter.stats();
        assert_eq!(stats.small.allocation, Stat { current: 0, peak: 1, allocated: 1, freed: 1 });
        assert_eq!(stats.small.active, Stat { current: 1, peak: 1, allocated: 1, freed: 0 });
        assert_eq!(stats.all.active_bytes, Stat { current: 512, peak: (2 << 20) + 512, allocated: (2 << 20) + 512, freed: 2 << 20 });
        assert_eq!(stats.large.reserved_bytes.current, 4 << 20);

        meter.reset_accumulated();
        assert_eq!(meter.stats().small.active, Stat { current: 1, peak: 1, allocated: 0, freed: 0 });
        meter.let_go(512);
        assert_eq!(meter.stats().small.active, Stat { current: 0, peak: 1, allocated: 0, freed: 1 });
        let begin = meter.stats();
        meter.reset_peaks();
        assert_eq!(meter.stats().all.active.peak, 0);
        meter.allocated(512, 1);
        assert_eq!(meter.stats().since(&begin).all.allocation, Stat { current: 1, peak: 1, allocated: 1, freed: 0 });
        meter.raise_peaks(&begin);
        assert_eq!((meter.stats().all.allocation.peak, meter.stats().all.active.peak), (2, 2));
        assert_eq!(meter.stats().all.requested_bytes, Stat { current: 1, peak: (2 << 20) + 100, allocated: 1, freed: 0 });
    }
}
