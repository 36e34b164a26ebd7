//! Free blocks of one domain, sorted by size into bins: 32 for each power of two.
//!
//! A size of `s` granules with top bit `e` goes to the bin of its top six bits, so that the sizes of one bin differ by less
//! than 1/32; sizes below 64 have bins of their own. Two levels of bitmaps say which bins hold something, so the next bin
//! that does is found with two bit scans.

use super::nodes::{Nodes, NIL};

/// Bins in a table. 896 are reachable; a power of two makes the mask in [`Bins::head`] a proof that the index is good.
const BINS: usize = 1024;
/// Words of the second-level bitmap, one for each power of two (the first word holds the exact bins 1 to 31).
const LEVELS: usize = 32;
/// The lowest size whose bin holds other sizes too.
const FIRST_MIXED: u32 = 64;

/// The bin that a free block of `granules` lies in. Never falls as `granules` grows.
pub(super) const fn bin_of(granules: u32) -> u32 {
    let shift = 26 - (granules | 32).leading_zeros();
    (shift << 5) + (granules >> shift)
}

/// Whether every block in the bin of `granules` is large enough for `granules`.
pub(super) const fn is_exact(granules: u32) -> bool {
    granules < FIRST_MIXED
}

/// Heads of the lists of free blocks, with the bitmaps over them.
#[derive(Debug, Clone)]
pub(super) struct Bins {
    /// Bit `l`: some bin of level `l` holds a block.
    first: u32,
    /// Bit `b` of word `l`: bin `32 * l + b` holds a block.
    second: [u32; LEVELS],
    heads: [u32; BINS],
}

impl Bins {
    pub(super) const fn new() -> Self {
        Self { first: 0, second: [0; LEVELS], heads: [NIL; BINS] }
    }

    /// The newest block in `bin`, or [`NIL`].
    pub(super) fn head(&self, bin: u32) -> u32 {
        self.heads[bin as usize % BINS]
    }

    /// The lowest bin above `bin` that holds a block.
    pub(super) fn next_above(&self, bin: u32) -> Option<u32> {
        let (level, bit) = (bin >> 5, bin & 31);
        // Shifted twice, because a shift by 32 is an overflow.
        let here = self.second[level as usize % LEVELS] & (u32::MAX << bit << 1);
        if here != 0 {
            return Some((level << 5) + here.trailing_zeros());
        }
        let levels = self.first & (u32::MAX << (level % 32) << 1);
        (levels != 0).then(|| self.lowest_in(levels.trailing_zeros()))
    }

    /// The highest bin that holds a block.
    pub(super) fn highest(&self) -> Option<u32> {
        let level = self.first.checked_ilog2()?;
        let bit = self.second[level as usize % LEVELS].checked_ilog2()?;
        Some((level << 5) + bit)
    }

    fn lowest_in(&self, level: u32) -> u32 {
        (level << 5) + self.second[level as usize % LEVELS].trailing_zeros()
    }

    /// Puts free block `index` at the head of its bin.
    pub(super) fn insert(&mut self, nodes: &mut Nodes, index: u32) {
        let bin = bin_of(nodes[index].granules);
        let head = self.head(bin);
        if let Some(granules) = nodes.all_of_region(index) {
            nodes.whole.0 += 1;
            nodes.whole.1 += granules;
        }
        let node = &mut nodes[index];
        node.prev = NIL;
        node.next = head;
        if head == NIL {
            let level = bin >> 5;
            self.second[level as usize % LEVELS] |= 1 << (bin & 31);
            self.first |= 1 << (level & 31);
        } else {
            nodes[head].prev = index;
        }
        self.heads[bin as usize % BINS] = index;
    }

    /// Takes free block `index` out of its bin. Its size, and whether it has neighbours, must be what it was at [`Bins::insert`].
    pub(super) fn remove(&mut self, nodes: &mut Nodes, index: u32) {
        if let Some(granules) = nodes.all_of_region(index) {
            nodes.whole.0 -= 1;
            nodes.whole.1 -= granules;
        }
        let node = &nodes[index];
        let (prev, next, bin) = (node.prev, node.next, bin_of(node.granules));
        if next != NIL {
            nodes[next].prev = prev;
        }
        if prev != NIL {
            nodes[prev].next = next;
            return;
        }
        self.heads[bin as usize % BINS] = next;
        if next == NIL {
            let word = &mut self.second[(bin >> 5) as usize % LEVELS];
            *word &= !(1 << (bin & 31));
            if *word == 0 {
                self.first &= !(1 << ((bin >> 5) & 31));
            }
        }
    }

    /// Every bin that holds a block, from the smallest sizes.
    #[cfg(any(test, feature = "conformance"))]
    pub(super) fn occupied(&self) -> impl Iterator<Item = u32> + '_ {
        // No block has size 0, so bin 0 is always empty.
        std::iter::successors(self.next_above(0), |&bin| self.next_above(bin))
    }

    /// Whether the bitmaps say of every bin what its head says.
    #[cfg(any(test, feature = "conformance"))]
    pub(super) fn bitmaps_agree(&self) -> bool {
        let heads_agree = (0u32..).zip(self.heads).all(|(bin, head)| {
            let marked = self.second[(bin >> 5) as usize % LEVELS] & (1 << (bin & 31)) != 0;
            marked == (head != NIL)
        });
        heads_agree && (0u32..).zip(self.second).all(|(level, word)| (word != 0) == (self.first & (1 << level) != 0))
    }
}
