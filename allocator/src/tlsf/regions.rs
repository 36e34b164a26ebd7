//! Regions: the ranges of addresses that blocks are cut from, and that no block reaches over.

use std::collections::BTreeMap;

use super::nodes::NIL;
use super::{Allocation, Block, Domain, Handle, Tlsf, TlsfError};

/// What [`Tlsf::region`] says of a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RegionState {
    /// Size in granules.
    pub granules: u32,
    /// Domain and mark, if the region is one free block.
    pub free: Option<(Domain, u64)>,
}

/// One region.
#[derive(Debug, Clone, Copy)]
pub(super) struct Region {
    pub(super) granules: u32,
    /// The node of its lowest block, which stays the same while the region lasts.
    pub(super) first: u32,
}

/// Regions by their first granule. Looked at only when regions come, go or are listed.
pub(super) type Regions = BTreeMap<u32, Region>;

impl Tlsf {
    /// Adds the free memory of one chunk to `domain`, as a block with `mark`.
    ///
    /// # Errors
    /// [`TlsfError::UnknownDomain`], [`TlsfError::OutOfRange`], [`TlsfError::RegionOverlap`].
    pub fn add_region(&mut self, offset: u32, granules: u32, domain: Domain, mark: u64) -> Result<(), TlsfError> {
        self.known(domain)?;
        self.vacant(offset, granules)?;
        let first = self.nodes.add(offset, granules, domain, mark);
        self.domains[domain].insert(&mut self.nodes, first);
        self.free += u64::from(granules);
        self.pieces += 1;
        self.regions.insert(offset, Region { granules, first });
        Ok(())
    }

    /// Adds a region that is one used block: a block larger than a chunk. Freed, it is a free region like any other.
    ///
    /// # Errors
    /// [`TlsfError::OutOfRange`], [`TlsfError::RegionOverlap`].
    pub fn add_used_region(&mut self, offset: u32, granules: u32) -> Result<Allocation, TlsfError> {
        self.vacant(offset, granules)?;
        let first = self.nodes.add(offset, granules, Domain::NONE, 0);
        let handle = self.nodes.mark_used(first);
        self.used += u64::from(granules);
        self.regions.insert(offset, Region { granules, first });
        Ok(Allocation { handle, offset, granules, mark: 0 })
    }

    /// Takes away the region that starts at `offset`, which must be one free block. Gives its size in granules.
    ///
    /// # Errors
    /// [`TlsfError::RegionNotFound`], [`TlsfError::RegionInUse`].
    pub fn remove_region(&mut self, offset: u32) -> Result<u32, TlsfError> {
        let region = self.regions.get(&offset).copied().ok_or(TlsfError::RegionNotFound(offset))?;
        let Some((domain, _)) = self.wholly_free(region) else {
            return Err(self.in_use(offset, region));
        };
        self.domains[domain].remove(&mut self.nodes, region.first);
        self.nodes.release(region.first);
        self.free -= u64::from(region.granules);
        self.pieces -= 1;
        self.regions.remove(&offset);
        Ok(region.granules)
    }

    /// Takes away the region that the used block `handle` fills. Gives its offset and size in granules.
    ///
    /// # Errors
    /// [`TlsfError::StaleHandle`]; [`TlsfError::RegionInUse`] if there are other blocks in the region.
    pub fn remove_used_region(&mut self, handle: Handle) -> Result<(u32, u32), TlsfError> {
        let node = self.used_node(handle)?;
        let (offset, granules) = (node.offset, node.granules);
        if node.before != NIL || node.after != NIL {
            let around = self.regions.range(..=offset).next_back();
            return Err(around.map_or(TlsfError::RegionNotFound(offset), |(&start, &region)| self.in_use(start, region)));
        }
        self.nodes.mark_free(handle.index);
        self.nodes.release(handle.index);
        self.used -= u64::from(granules);
        self.regions.remove(&offset);
        Ok((offset, granules))
    }

    /// The region that starts at `offset`.
    pub fn region(&self, offset: u32) -> Option<RegionState> {
        let region = *self.regions.get(&offset)?;
        Some(RegionState { granules: region.granules, free: self.wholly_free(region) })
    }

    /// Every region by offset: first granule, size in granules, and domain and mark if it is one free block.
    pub fn regions(&self) -> impl Iterator<Item = (u32, u32, Option<(Domain, u64)>)> + '_ {
        self.regions.iter().map(|(&offset, &region)| (offset, region.granules, self.wholly_free(region)))
    }

    /// The blocks of the region that starts at `region_offset`, by address; none if there is no such region.
    pub fn blocks(&self, region_offset: u32) -> impl Iterator<Item = Block> + '_ {
        self.indexed_blocks(region_offset).map(|(_, block)| block)
    }

    /// [`Tlsf::blocks`], each with the index of its handle.
    pub fn indexed_blocks(&self, region_offset: u32) -> impl Iterator<Item = (u32, Block)> + '_ {
        let first = self.regions.get(&region_offset).map_or(NIL, |region| region.first);
        self.chain(first).map(|index| (index, self.nodes[index].block()))
    }

    /// The nodes of a region by address, from `first`.
    pub(super) fn chain(&self, first: u32) -> impl Iterator<Item = u32> + '_ {
        let known = |index: u32| (index != NIL).then_some(index);
        std::iter::successors(known(first), move |&index| known(self.nodes[index].after))
    }

    fn wholly_free(&self, region: Region) -> Option<(Domain, u64)> {
        let node = &self.nodes[region.first];
        (node.after == NIL && !node.is_used()).then_some((node.domain, node.mark))
    }

    /// Whether a region of `granules` can be added at `offset`.
    fn vacant(&self, offset: u32, granules: u32) -> Result<(), TlsfError> {
        let end = u64::from(offset) + u64::from(granules);
        if granules == 0 || end > 1 << 32 {
            return Err(TlsfError::OutOfRange { offset, granules });
        }
        // Regions do not overlap, so the last one that starts below the end reaches highest.
        let below = self.regions.range(..=(end - 1) as u32).next_back();
        match below {
            Some((&other, region)) if u64::from(other) + u64::from(region.granules) > u64::from(offset) => {
                Err(TlsfError::RegionOverlap { offset, granules, other, other_granules: region.granules })
            }
            _ => Ok(()),
        }
    }

    fn in_use(&self, offset: u32, region: Region) -> TlsfError {
        let (mut used, mut blocks) = (0, 0);
        for index in self.chain(region.first) {
            blocks += 1;
            used += if self.nodes[index].is_used() { self.nodes[index].granules } else { 0 };
        }
        TlsfError::RegionInUse { offset, granules: region.granules, used, blocks }
    }
}
