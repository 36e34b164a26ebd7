//! What the heap holds, for snapshots, maps and statistics.

use crate::driver::Addr;
use crate::tlsf::GRANULE;
use crate::window::Chunk;

use super::{Heap, Stats};

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
}

/// One region: a chunk, or consecutive chunks under one block.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RegionView {
    /// Its address.
    pub addr: Addr,
    /// Its length in bytes.
    pub bytes: u64,
    /// The number of the stream that its free blocks belong to, where they all belong to one.
    pub blocks: Vec<BlockView>,
}

impl Heap {
    /// The counters.
    #[must_use]
    pub fn stats(&self) -> Stats {
        self.inner.lock().stats
    }

    /// Bytes of free pieces in chunks that are partly used, and how many pieces they are.
    #[must_use]
    pub fn inactive_split(&self) -> (u64, u64) {
        self.regions()
            .iter()
            .filter(|region| region.blocks.len() > 1)
            .flat_map(|region| &region.blocks)
            .filter(|block| !block.used && !block.pending)
            .fold((0, 0), |(bytes, pieces), block| (bytes + block.bytes, pieces + 1))
    }

    /// Sets peaks to what is.
    pub fn reset_peaks(&self) {
        self.inner.lock().stats.reset_peaks();
    }

    /// Sets totals to nothing.
    pub fn reset_accumulated(&self) {
        self.inner.lock().stats.reset_accumulated();
    }

    /// The chunks, in no order.
    #[must_use]
    pub fn chunks(&self) -> Vec<Chunk> {
        self.inner.lock().chunks.clone()
    }

    /// The live block that holds an address: (first address, bytes).
    #[must_use]
    pub fn block_at(&self, addr: Addr) -> Option<(Addr, u64)> {
        let key = self.key(addr);
        {
            let inner = self.inner.lock();
            if let Some(handle) = key.and_then(|key| inner.blocks.get(&key)) {
                let info = inner.infos.get(handle.index() as usize)?;
                return Some((addr, u64::from(info.granules) * GRANULE));
            }
        }
        // Not its first byte: walk the region. Views into blocks are sent, so this is a path of its own, not an error.
        let offset = u32::try_from(self.window.offset_of(addr)? / GRANULE).ok()?;
        let inner = self.inner.lock();
        let (start, _, _) = inner.tlsf.regions().take_while(|(start, _, _)| *start <= offset).last()?;
        let block =
            inner.tlsf.blocks(start).find(|block| block.used && block.offset <= offset && offset < block.offset + block.granules)?;
        inner
            .blocks
            .contains_key(&block.offset)
            .then(|| (self.window.base() + u64::from(block.offset) * GRANULE, u64::from(block.granules) * GRANULE))
    }

    /// Every region and its blocks, by address.
    #[must_use]
    pub fn regions(&self) -> Vec<RegionView> {
        let inner = self.inner.lock();
        let base = self.window.base();
        inner
            .tlsf
            .regions()
            .map(|(offset, granules, _)| RegionView {
                addr: base + u64::from(offset) * GRANULE,
                bytes: u64::from(granules) * GRANULE,
                blocks: inner
                    .tlsf
                    .blocks(offset)
                    .map(|block| {
                        let info = inner
                            .blocks
                            .get(&block.offset)
                            .and_then(|handle| inner.infos.get(handle.index() as usize))
                            .filter(|_| block.used);
                        BlockView {
                            addr: base + u64::from(block.offset) * GRANULE,
                            bytes: u64::from(block.granules) * GRANULE,
                            requested: info.map_or(0, |info| info.requested),
                            used: info.is_some(),
                            pending: block.used && info.is_none(),
                            pins: info.map_or(0, |info| info.pins),
                        }
                    })
                    .collect(),
            })
            .collect()
    }
}
