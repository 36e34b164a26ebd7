//! Where blocks lie: a two-level segregated fit (TLSF) allocator with all bookkeeping outside the memory.
//!
//! It hands out ranges of *granules* (512 bytes) of an address space that it never touches. Memory comes in *regions* (a
//! chunk each); a block never reaches over the ends of its region. The blocks of a region form one list by address, free and
//! used together; free neighbours of the same domain are merged at once.
//!
//! A free block lies in one *domain*: the memory that one stream may reuse without waiting. Its *mark* is that
//! stream's sequence number that must have completed before another stream may use it; mark 0 is ready for everyone. The caller
//! knows streams and numbers; this module only compares them.
//!
//! Each domain sorts its free blocks by size into bins, 32 for each power of two. A request looks at the 8 newest blocks of
//! its own bin, then takes the newest block of the next bin up that holds one: those are all large enough. The low end is
//! handed out, the rest stays free. So each call takes constant time, and what it takes is at most about 1/16 larger than
//! needed where such a block exists. The same calls always give the same offsets.
#![forbid(unsafe_code)]

mod bins;
mod domains;
mod nodes;
mod regions;

#[cfg(any(test, feature = "conformance"))]
mod check;
#[cfg(test)]
mod properties;
#[cfg(test)]
mod replay;
#[cfg(test)]
mod tests;

pub use regions::RegionState;

use bins::{bin_of, is_exact, Bins};
use domains::Domains;
use nodes::{Nodes, NIL};
use regions::Regions;

/// Bytes of a granule, the unit of every offset and size here. 2^32 of them reach over 2 TiB.
pub const GRANULE: u64 = 512;

/// Blocks that a request looks at in one bin before it goes to the next.
const PROBES: usize = 8;
/// Bins that [`Tlsf::allocate_ready`] looks into.
const READY_BINS: usize = 8;

/// Names one use of one block: good from the allocation to the free.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Handle {
    index: u32,
    generation: u32,
}

impl Handle {
    /// No block's.
    pub const NONE: Self = Self { index: u32::MAX, generation: 0 };

    /// A small number that no other used block of this allocator has: an index for tables beside it. Reused after the free.
    pub const fn index(self) -> u32 {
        self.index
    }
}

/// A set of free blocks that one stream may reuse at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Domain(u32);

impl Domain {
    /// No domain: what the block of [`Tlsf::add_used_region`] was taken from. Every call refuses it.
    pub const NONE: Self = Self(u32::MAX);
}

/// A block that was handed out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Allocation {
    /// Names the block, for [`Tlsf::free`].
    pub handle: Handle,
    /// First granule.
    pub offset: u32,
    /// Size in granules.
    pub granules: u32,
    /// The mark that the memory had: what another stream must see completed before it may touch it.
    pub mark: u64,
}

/// One block, as it is now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Block {
    /// First granule.
    pub offset: u32,
    /// Size in granules.
    pub granules: u32,
    /// Whether it is handed out.
    pub used: bool,
    /// The domain that a free block lies in, or that a used one was taken from (which may be gone).
    pub domain: Domain,
    /// The mark of a free block, or the mark that a used one had when it was taken.
    pub mark: u64,
}

/// Why a call was refused. Nothing has changed then.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum TlsfError {
    /// The handle names no used block.
    #[error("handle {index} (generation {generation}) names no used block: it was freed, or is of another allocator")]
    StaleHandle {
        /// The handle's index.
        index: u32,
        /// The handle's generation.
        generation: u32,
    },
    /// The domain was removed, or is of another allocator, or stands where another one is needed.
    #[error("domain {0:#x} is unknown or removed")]
    UnknownDomain(u32),
    /// The new region would lie over an old one.
    #[error("region of {granules} granules at {offset} overlaps the region of {other_granules} at {other}")]
    RegionOverlap {
        /// First granule asked for.
        offset: u32,
        /// Granules asked for.
        granules: u32,
        /// First granule of the region in the way.
        other: u32,
        /// Granules of the region in the way.
        other_granules: u32,
    },
    /// No region starts there.
    #[error("no region starts at granule {0}")]
    RegionNotFound(u32),
    /// The region is not one block in the state that the call needs.
    #[error("region at granule {offset} is in use: {used} of {granules} granules are used, in {blocks} blocks, free ones counted")]
    RegionInUse {
        /// First granule of the region.
        offset: u32,
        /// Granules of the region.
        granules: u32,
        /// Granules of it that are used.
        used: u32,
        /// Blocks in it, free and used.
        blocks: u32,
    },
    /// The size is zero, or the end lies beyond 2^32 granules.
    #[error("{granules} granules at {offset} are none, or end beyond granule 2^32")]
    OutOfRange {
        /// First granule asked for.
        offset: u32,
        /// Granules asked for.
        granules: u32,
    },
}

/// The allocator. See the [module](self) for how it works.
#[derive(Debug, Clone)]
pub struct Tlsf {
    nodes: Nodes,
    domains: Domains,
    regions: Regions,
    free: u64,
    used: u64,
    /// Free blocks.
    pieces: u64,
    /// The most of what [`Tlsf::split`] says: pieces, granules.
    split_peak: (u64, u64),
}

impl Default for Tlsf {
    fn default() -> Self {
        Self::new()
    }
}

impl Tlsf {
    /// An allocator with no region and no domain.
    pub const fn new() -> Self {
        Self { nodes: Nodes::new(), domains: Domains::new(), regions: Regions::new(), free: 0, used: 0, pieces: 0, split_peak: (0, 0) }
    }

    /// Makes places ready for `blocks` blocks, free ones counted, so that calls up to there never allocate or touch new memory.
    pub fn prepare(&mut self, blocks: u32) {
        self.nodes.prepare(blocks);
    }

    /// The same for `domains` domains beside those that there are.
    pub fn prepare_domains(&mut self, domains: usize) {
        self.domains.prepare(domains);
    }

    /// Takes a block of `granules` from `domain`, whatever its mark. The rest of what it is cut from keeps domain and mark.
    ///
    /// `None` if nothing was found: the domain is unknown or has no block large enough, or `granules` is 0, or the only blocks
    /// large enough lie in the request's own bin (less than 1/32 larger) behind 8 that are too small.
    pub fn allocate(&mut self, domain: Domain, granules: u32) -> Option<Allocation> {
        let bins = self.domains.get(domain)?;
        let index = find(bins, &self.nodes, granules)?;
        Some(self.take(index, granules))
    }

    /// Takes a block of `granules` from `from` whose mark is at most `max_mark`, for a stream that is not `from`'s own.
    ///
    /// Looks at 8 blocks in each of 8 bins and may miss others: [`Tlsf::move_ready`] finds them all.
    pub fn allocate_ready(&mut self, from: Domain, granules: u32, max_mark: u64) -> Option<Allocation> {
        let bins = self.domains.get(from)?;
        let index = find_ready(bins, &self.nodes, granules, max_mark)?;
        Some(self.take(index, granules))
    }

    /// Gives a block back: it becomes free in `domain` with `mark`, and one with free neighbours of the same domain. The mark of
    /// the merged block is the highest of theirs.
    ///
    /// # Errors
    /// [`TlsfError::StaleHandle`] at a second free, [`TlsfError::UnknownDomain`].
    pub fn free(&mut self, handle: Handle, domain: Domain, mark: u64) -> Result<(), TlsfError> {
        let granules = self.used_node(handle)?.granules;
        self.known(domain)?;
        self.nodes.mark_free(handle.index);
        self.used -= u64::from(granules);
        self.free += u64::from(granules);
        self.pieces += 1;
        self.settle(handle.index, domain, mark);
        self.raise_split_peak();
        Ok(())
    }

    /// Ends one use of a block and begins another, as if it had been given back and handed out again. `None` for a stale handle.
    pub fn renew(&mut self, handle: Handle) -> Option<Handle> {
        self.nodes.used(handle)?;
        self.nodes.mark_free(handle.index);
        Some(self.nodes.mark_used(handle.index))
    }

    /// The block that `handle` names.
    ///
    /// # Errors
    /// [`TlsfError::StaleHandle`].
    pub fn block(&self, handle: Handle) -> Result<Block, TlsfError> {
        self.used_node(handle).map(nodes::Node::block)
    }

    /// Granules of all free blocks, of every domain.
    pub const fn free_granules(&self) -> u64 {
        self.free
    }

    /// Granules of all used blocks.
    pub const fn used_granules(&self) -> u64 {
        self.used
    }

    /// Free blocks that are not all of their region, and their granules.
    #[inline]
    pub const fn split(&self) -> (u64, u64) {
        (self.pieces - self.nodes.whole.0, self.free - self.nodes.whole.1)
    }

    /// The most that [`Tlsf::split`] ever said, each by itself, since the last [`Tlsf::reset_split_peak`].
    pub const fn split_peak(&self) -> (u64, u64) {
        self.split_peak
    }

    /// The peak is what is now.
    pub const fn reset_split_peak(&mut self) {
        self.split_peak = self.split();
    }

    #[inline]
    fn raise_split_peak(&mut self) {
        let (pieces, granules) = self.split();
        self.split_peak = (self.split_peak.0.max(pieces), self.split_peak.1.max(granules));
    }

    /// Granules of the largest free block of any domain, 0 if there is none. Walks the highest bin of each domain.
    pub fn largest_free(&self) -> u32 {
        let highest = self.domains.iter().filter_map(|(_, bins)| bins.highest().map(|bin| bins.head(bin)));
        highest.flat_map(|head| list(&self.nodes, head)).map(|index| self.nodes[index].granules).max().unwrap_or(0)
    }

    /// A new domain, with no blocks.
    pub fn add_domain(&mut self) -> Domain {
        self.domains.add()
    }

    /// Whether `domain` has no free block. True of an unknown one.
    pub fn is_empty(&self, domain: Domain) -> bool {
        self.domains.get(domain).is_none_or(|bins| bins.highest().is_none())
    }

    /// Moves the free blocks of `domain` to `into`, each with the higher of its own mark and `mark`, and forgets `domain`.
    ///
    /// # Errors
    /// [`TlsfError::UnknownDomain`], also if the two are the same.
    pub fn remove_domain(&mut self, domain: Domain, into: Domain, mark: u64) -> Result<(), TlsfError> {
        self.known(domain)?;
        self.known(into)?;
        if domain == into {
            return Err(TlsfError::UnknownDomain(into.0));
        }
        self.move_blocks(domain, into, |own| Some(own.max(mark)));
        self.domains.remove(domain);
        Ok(())
    }

    /// Moves every free block of `from` whose mark is at most `max_mark` to `to`, with mark 0 (or that of a neighbour that it
    /// is merged with there). Gives the number of blocks moved; 0 if a domain is unknown.
    ///
    /// Looks at every free block of `from`.
    pub fn move_ready(&mut self, from: Domain, to: Domain, max_mark: u64) -> u32 {
        if !self.domains.contains(from) || !self.domains.contains(to) {
            return 0;
        }
        self.move_blocks(from, to, |mark| (mark <= max_mark).then_some(0))
    }

    /// Moves each free block of `from` for whose mark `moved` gives a new one. Gives their number.
    fn move_blocks(&mut self, from: Domain, to: Domain, moved: impl Fn(u64) -> Option<u64>) -> u32 {
        let mut count = 0;
        let mut bin = self.domains[from].next_above(0);
        while let Some(here) = bin {
            let mut index = self.domains[from].head(here);
            while index != NIL {
                let node = &mut self.nodes[index];
                let next = node.next;
                if let Some(mark) = moved(node.mark) {
                    count += 1;
                    if from == to {
                        node.mark = mark;
                    } else {
                        // Merging takes only blocks of `to` out of their bins, so `next` stays good.
                        self.domains[from].remove(&mut self.nodes, index);
                        self.settle(index, to, mark);
                    }
                }
                index = next;
            }
            bin = self.domains[from].next_above(here);
        }
        count
    }

    /// Hands out the low `granules` of free block `index`.
    fn take(&mut self, index: u32, granules: u32) -> Allocation {
        let node = &self.nodes[index];
        let (offset, domain, mark, after) = (node.offset, node.domain, node.mark, node.after);
        let rest = node.granules - granules;
        let whole = node.before == NIL && after == NIL;
        self.domains[domain].remove(&mut self.nodes, index);
        if rest != 0 {
            let upper = self.nodes.add(offset + granules, rest, domain, mark);
            self.nodes[upper].before = index;
            self.nodes[upper].after = after;
            if after != NIL {
                self.nodes[after].before = upper;
            }
            let node = &mut self.nodes[index];
            node.granules = granules;
            node.after = upper;
            self.domains[domain].insert(&mut self.nodes, upper);
        } else {
            self.pieces -= 1;
        }
        self.free -= u64::from(granules);
        self.used += u64::from(granules);
        // What is cut from a split piece leaves less than there was.
        if whole {
            self.raise_split_peak();
        }
        Allocation { handle: self.nodes.mark_used(index), offset, granules, mark }
    }

    /// Puts a free block that is in no bin into `domain`, merged with its free neighbours there. The lower node is kept, so
    /// the first node of a region stays the same.
    fn settle(&mut self, index: u32, domain: Domain, mark: u64) {
        let node = &mut self.nodes[index];
        node.domain = domain;
        node.mark = mark;
        let (before, after) = (node.before, node.after);
        if self.is_free_in(after, domain) {
            self.domains[domain].remove(&mut self.nodes, after);
            self.absorb(index, after);
        }
        let mut kept = index;
        if self.is_free_in(before, domain) {
            self.domains[domain].remove(&mut self.nodes, before);
            self.absorb(before, index);
            kept = before;
        }
        self.domains[domain].insert(&mut self.nodes, kept);
    }

    fn is_free_in(&self, index: u32, domain: Domain) -> bool {
        index != NIL && self.nodes[index].domain == domain && !self.nodes[index].is_used()
    }

    /// Makes `lower` and the free block just above it one.
    fn absorb(&mut self, lower: u32, upper: u32) {
        let gone = &self.nodes[upper];
        let (granules, after, mark) = (gone.granules, gone.after, gone.mark);
        let node = &mut self.nodes[lower];
        node.granules += granules;
        node.mark = node.mark.max(mark);
        node.after = after;
        if after != NIL {
            self.nodes[after].before = lower;
        }
        self.pieces -= 1;
        self.nodes.release(upper);
    }

    fn known(&self, domain: Domain) -> Result<(), TlsfError> {
        self.domains.contains(domain).then_some(()).ok_or(TlsfError::UnknownDomain(domain.0))
    }

    fn used_node(&self, handle: Handle) -> Result<&nodes::Node, TlsfError> {
        let stale = TlsfError::StaleHandle { index: handle.index, generation: handle.generation };
        self.nodes.used(handle).ok_or(stale)
    }
}

/// The blocks of one bin, from its head.
fn list(nodes: &Nodes, head: u32) -> impl Iterator<Item = u32> + '_ {
    let known = |index: u32| (index != NIL).then_some(index);
    std::iter::successors(known(head), move |&index| known(nodes[index].next))
}

/// A free block of at least `granules`: from the first few of its own bin, else from the next bin up.
fn find(bins: &Bins, nodes: &Nodes, granules: u32) -> Option<u32> {
    if granules == 0 {
        return None;
    }
    let own = bin_of(granules);
    let probes = if is_exact(granules) { 1 } else { PROBES };
    let near = list(nodes, bins.head(own)).take(probes).find(|&index| nodes[index].granules >= granules);
    near.or_else(|| bins.next_above(own).map(|bin| bins.head(bin)))
}

/// A free block of at least `granules` whose mark is at most `max_mark`, from the first few of the first few bins.
fn find_ready(bins: &Bins, nodes: &Nodes, granules: u32, max_mark: u64) -> Option<u32> {
    if granules == 0 {
        return None;
    }
    let own = bin_of(granules);
    let near = std::iter::successors(Some(own), |&bin| bins.next_above(bin)).take(READY_BINS);
    let mut blocks = near.flat_map(|bin| list(nodes, bins.head(bin)).take(PROBES));
    blocks.find(|&index| nodes[index].granules >= granules && nodes[index].mark <= max_mark)
}
