//! Which live block an address belongs to.
//!
//! Granules are grouped in pages of 64 (32 KiB) and leaves of 64 pages (2 MiB). A page or a leaf with one start names the block;
//! one with more has a table. Bits say which granules, pages and leaves have starts. So a block is found by its first byte
//! with a look or three, and by any other byte by going back to the nearest start, over 64 pages or 64 leaves at a time.
//! Nothing is ever rehashed, and what a start may need is made ready when the heap grows.

use super::block::touched;

/// Granules of a page, pages of a leaf, leaves of a word.
const FAN: u32 = 64;
const WIDTH: usize = FAN as usize;
/// A slot of a page that names a table of blocks, not a block.
const TABLE: u32 = 1 << 31;
/// Tables of pages that are kept ready.
const SPARE: usize = 16;

/// The starts in 64 granules.
#[derive(Debug, Clone, Copy)]
struct Page {
    starts: u64,
    /// The one block that starts here; or [`TABLE`] and the number of the table with a place for each granule.
    slot: u32,
}

type Pages = Box<[Page; WIDTH]>;

/// The starts in 64 pages.
#[derive(Debug, Default)]
struct Leaf {
    /// The pages with starts.
    occupied: u64,
    /// Where there is no table: the one start, and the block.
    bit: u32,
    block: u32,
    pages: Option<Pages>,
}

/// The live blocks by their first granule.
#[derive(Debug)]
pub(super) struct Index {
    leaves: Vec<Leaf>,
    /// One bit for each leaf that has a start.
    occupied: Vec<u64>,
    spare: Vec<Pages>,
    tables: Vec<[u32; WIDTH]>,
    vacant: Vec<u32>,
}

/// Leaf, page in it, bit in that.
const fn split(offset: u32) -> (usize, u32, u32) {
    ((offset / FAN / FAN) as usize, offset / FAN % FAN, offset % FAN)
}

fn fresh() -> Pages {
    Box::new([Page { starts: 0, slot: 0 }; WIDTH])
}

/// The bits of a word up to one, that one too.
const fn up_to(bit: u32) -> u64 {
    u64::MAX >> (FAN - 1 - bit)
}

/// The bits of a word below one.
const fn before(bit: u32) -> u64 {
    (1 << bit) - 1
}

impl Default for Index {
    fn default() -> Self {
        let tables = touched(256, || [0; WIDTH], 0);
        Self { leaves: Vec::new(), occupied: Vec::new(), spare: Vec::new(), tables, vacant: Vec::with_capacity(256) }
    }
}

impl Index {
    /// Makes room for the starts below `end`, so that [`Index::insert`] seldom has to.
    pub(super) fn reach(&mut self, end: u32) {
        let (leaf, ..) = split(end);
        if self.leaves.len() <= leaf {
            self.leaves.resize_with(leaf + 1, Leaf::default);
            self.occupied.resize(leaf / WIDTH + 1, 0);
        }
        self.spare.resize_with(self.spare.len().max(SPARE), fresh);
    }

    /// Notes that block number `block` starts at `offset`, where none does.
    #[inline]
    pub(super) fn insert(&mut self, offset: u32, block: u32) {
        let (at, page, bit) = split(offset);
        if self.leaves.len() <= at {
            self.reach(offset);
        }
        let Some(leaf) = self.leaves.get_mut(at) else { return };
        if leaf.pages.is_none() {
            if leaf.occupied == 0 {
                (leaf.occupied, leaf.bit, leaf.block) = (1 << page, bit, block);
                self.mark_leaf(at);
                return;
            }
            let mut pages = self.spare.pop().unwrap_or_else(fresh);
            pages[leaf.occupied.trailing_zeros() as usize % WIDTH] = Page { starts: 1 << leaf.bit, slot: leaf.block };
            leaf.pages = Some(pages);
        }
        let empty = leaf.occupied == 0;
        leaf.occupied |= 1 << page;
        if let Some(pages) = &mut leaf.pages {
            let page = &mut pages[page as usize % WIDTH];
            if page.starts == 0 {
                *page = Page { starts: 1 << bit, slot: block };
            } else {
                if page.slot & TABLE == 0 {
                    let number = self.vacant.pop().unwrap_or_else(|| {
                        self.tables.push([0; WIDTH]);
                        (self.tables.len() - 1) as u32
                    });
                    if let Some(table) = self.tables.get_mut(number as usize) {
                        table[page.starts.trailing_zeros() as usize % WIDTH] = page.slot;
                    }
                    page.slot = TABLE | number;
                }
                if let Some(table) = self.tables.get_mut((page.slot & !TABLE) as usize) {
                    table[bit as usize % WIDTH] = block;
                }
                page.starts |= 1 << bit;
            }
        }
        if empty {
            self.mark_leaf(at);
        }
    }

    fn mark_leaf(&mut self, at: usize) {
        if let Some(word) = self.occupied.get_mut(at / WIDTH) {
            *word |= 1 << (at % WIDTH);
        }
    }

    /// Forgets the block that starts at `offset`; its number, if one does.
    #[inline]
    pub(super) fn remove(&mut self, offset: u32) -> Option<u32> {
        let (at, number, bit) = split(offset);
        let leaf = self.leaves.get_mut(at)?;
        let block = match &mut leaf.pages {
            None => {
                if leaf.occupied != 1 << number || leaf.bit != bit {
                    return None;
                }
                leaf.occupied = 0;
                leaf.block
            }
            Some(pages) => {
                let page = &mut pages[number as usize % WIDTH];
                if page.starts & (1 << bit) == 0 {
                    return None;
                }
                page.starts &= !(1 << bit);
                let slot = page.slot;
                if page.starts == 0 {
                    leaf.occupied &= !(1 << number);
                    if slot & TABLE != 0 {
                        self.vacant.push(slot & !TABLE);
                    }
                }
                let block = if slot & TABLE == 0 { slot } else { self.tables.get((slot & !TABLE) as usize)?[bit as usize % WIDTH] };
                if leaf.occupied == 0 && self.spare.len() < SPARE {
                    self.spare.extend(leaf.pages.take());
                }
                block
            }
        };
        if leaf.occupied == 0 {
            if let Some(word) = self.occupied.get_mut(at / WIDTH) {
                *word &= !(1 << (at % WIDTH));
            }
        }
        Some(block)
    }

    /// The block that starts at `offset`.
    #[inline]
    pub(super) fn get(&self, offset: u32) -> Option<u32> {
        let (at, number, bit) = split(offset);
        let leaf = self.leaves.get(at)?;
        match &leaf.pages {
            None => (leaf.occupied == 1 << number && leaf.bit == bit).then_some(leaf.block),
            Some(pages) => {
                let page = pages[number as usize % WIDTH];
                (page.starts & (1 << bit) != 0).then(|| self.block(page, bit))?
            }
        }
    }

    /// The block with the highest start that is not above `offset`.
    pub(super) fn below(&self, offset: u32) -> Option<u32> {
        let (at, page, bit) = split(offset);
        if let Some(block) = self.leaves.get(at).and_then(|leaf| self.below_in(leaf, page, bit)) {
            return Some(block);
        }
        let last = at.min(self.leaves.len()).checked_sub(1)?;
        let words = self.occupied.get(..=last / WIDTH)?.iter().enumerate().rev();
        let masked = words.map(|(i, word)| (i, if i == last / WIDTH { word & up_to((last % WIDTH) as u32) } else { *word }));
        let (word, bits) = masked.into_iter().find(|(_, bits)| *bits != 0)?;
        self.below_in(self.leaves.get(word * WIDTH + bits.ilog2() as usize)?, FAN - 1, FAN - 1)
    }

    /// The block with the highest start in a leaf that is not above a bit of a page of it.
    fn below_in(&self, leaf: &Leaf, page: u32, bit: u32) -> Option<u32> {
        let Some(pages) = &leaf.pages else {
            let start = (leaf.occupied.checked_ilog2()?, leaf.bit);
            return (start <= (page, bit)).then_some(leaf.block);
        };
        let here = pages[page as usize % WIDTH];
        if let Some(start) = (here.starts & up_to(bit)).checked_ilog2() {
            return self.block(here, start);
        }
        let lower = pages[(leaf.occupied & before(page)).checked_ilog2()? as usize % WIDTH];
        self.block(lower, lower.starts.checked_ilog2()?)
    }

    fn block(&self, page: Page, bit: u32) -> Option<u32> {
        if page.slot & TABLE == 0 {
            return Some(page.slot);
        }
        Some(self.tables.get((page.slot & !TABLE) as usize)?[bit as usize % WIDTH])
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn nothing_is_found_where_nothing_starts() {
        let mut index = Index::default();
        assert_eq!((index.get(0), index.below(u32::MAX), index.remove(7)), (None, None, None));
        index.insert(5, 1);
        assert_eq!((index.below(4), index.below(5), index.below(u32::MAX)), (None, Some(1), Some(1)));
        assert_eq!((index.remove(5), index.remove(5), index.below(u32::MAX)), (Some(1), None, None));
    }

    proptest! {
        #[test]
        fn agrees_with_an_ordered_map(steps in prop::collection::vec((0u32..3, 0u32..64, prop_oneof![Just(0u32), Just(4096), Just(300_000), Just(90_000_000)]), 1..300)) {
            let (mut index, mut model) = (Index::default(), BTreeMap::new());
            for (number, (step, low, high)) in (0u32..).zip(steps) {
                let offset = high + low * if low % 3 == 0 { 64 } else { 1 };
                match step {
                    0 if !model.contains_key(&offset) => {
                        index.insert(offset, number);
                        model.insert(offset, number);
                    }
                    1 => assert_eq!(index.remove(offset), model.remove(&offset)),
                    _ => {}
                }
                assert_eq!(index.get(offset), model.get(&offset).copied());
                for at in [offset, offset + 1, offset + 63, offset + 5000, u32::MAX] {
                    assert_eq!(index.below(at), model.range(..=at).next_back().map(|(_, block)| *block), "at {at}");
                }
            }
        }
    }
}
