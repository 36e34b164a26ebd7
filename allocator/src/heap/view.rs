//! What the heap holds, for snapshots, maps and statistics.

use crate::driver::{Addr, StreamId};
use crate::tlsf::GRANULE;
use crate::window::Chunk;

use super::{Heap, PoolId, Stat, Stats};

/// One block of a region, by address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockView {
    /// Its address.
    pub addr: Addr,
    /// Its length in bytes.
    pub bytes: u64,
    /// Bytes asked for; zero where it is free.
    pub requested: u64,
    /// Live.
    pub used: bool,
    /// Freed by its owner, but others or streams still use it.
    pub pending: bool,
    /// How many pins it has.
    pub pins: u32,
    /// The stream that it comes back to, or may use it at once where it is free. `None`: everybody's, in time.
    pub stream: Option<StreamId>,
    /// The graph's private pool that it belongs to.
    pub pool: Option<PoolId>,
}

/// One region: a chunk, or consecutive chunks under one block.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RegionView {
    /// Its address.
    pub addr: Addr,
    /// Its length in bytes.
    pub bytes: u64,
    /// Its blocks, by address, without a gap.
    pub blocks: Vec<BlockView>,
}

impl Heap {
    /// The counters.
    #[must_use]
    pub fn stats(&self) -> Stats {
        self.inner.lock().meter.stats()
    }

    /// Free pieces of chunks that are partly used, and their bytes: now, and at most since the last [`Heap::reset_peaks`]. A
    /// block that is handed out again as it is was no free piece. Nothing is added up, which would cost every call: totals are 0.
    #[must_use]
    pub fn inactive_split(&self) -> (Stat, Stat) {
        let inner = self.whole();
        let ((pieces, granules), (most, most_granules)) = (inner.tlsf.split(), inner.tlsf.split_peak());
        let level = |current, peak| Stat { current, peak, ..Stat::default() };
        (level(pieces, most), level(granules * GRANULE, most_granules * GRANULE))
    }

    /// The largest free block, in bytes: of any stream's.
    #[must_use]
    pub fn largest_free(&self) -> u64 {
        u64::from(self.whole().tlsf.largest_free()) * GRANULE
    }

    /// Begins a part of the program whose peaks and counts are wanted by themselves: peaks start again from what is. Parts nest.
    /// Gives what [`Heap::end_scope`] needs.
    #[must_use]
    pub fn begin_scope(&self) -> Stats {
        let mut inner = self.inner.lock();
        let begin = inner.meter.stats();
        inner.meter.reset_peaks();
        begin
    }

    /// Ends it: peaks and totals of that part alone. The heap's own peaks are what they would be without it.
    #[must_use]
    pub fn end_scope(&self, begin: &Stats) -> Stats {
        let mut inner = self.inner.lock();
        let scope = inner.meter.stats().since(begin);
        inner.meter.raise_peaks(begin);
        scope
    }

    /// Sets peaks to what is.
    pub fn reset_peaks(&self) {
        let mut inner = self.whole();
        inner.tlsf.reset_split_peak();
        inner.meter.reset_peaks();
    }

    /// Sets totals to nothing.
    pub fn reset_accumulated(&self) {
        self.inner.lock().meter.reset_accumulated();
    }

    /// The chunks, by address.
    #[must_use]
    pub fn chunks(&self) -> Vec<Chunk> {
        self.inner.lock().chunks.values().copied().collect()
    }

    /// The live block that holds an address, at its start or inside: (first address, bytes).
    #[must_use]
    pub fn block_at(&self, addr: Addr) -> Option<(Addr, u64)> {
        let offset = self.granule(addr)?;
        let inner = self.inner.lock();
        let info = inner.live_around(offset)?;
        Some((self.window.base() + u64::from(info.offset) * GRANULE, info.bytes()))
    }

    /// Every region and its blocks, by address.
    #[must_use]
    pub fn regions(&self) -> Vec<RegionView> {
        let inner = self.whole();
        let base = self.window.base();
        let view = |block: crate::tlsf::Block| {
            let live = inner.live(block.offset).filter(|_| block.used);
            let place = match live {
                Some(info) => inner.places.get(info.place as usize),
                None => inner.places.iter().find(|place| place.domain == block.domain && !block.used),
            };
            BlockView {
                addr: base + u64::from(block.offset) * GRANULE,
                bytes: u64::from(block.granules) * GRANULE,
                requested: live.map_or(0, |info| info.requested),
                used: live.is_some(),
                pending: block.used && live.is_none(),
                pins: live.map_or(0, |info| info.pins),
                stream: place.map(|place| inner.streams.id(place.stream)).filter(|id| *id != StreamId(u64::MAX)),
                pool: place.and_then(|place| place.pool),
            }
        };
        let region = |(offset, granules, _)| RegionView {
            addr: base + u64::from(offset) * GRANULE,
            bytes: u64::from(granules) * GRANULE,
            blocks: inner.tlsf.blocks(offset).map(view).collect(),
        };
        inner.tlsf.regions().map(region).collect()
    }
}
