//! Which live block an address belongs to.
//!
//! Granules are grouped in pages of 64 (32 KiB) and leaves of 64 pages (2 MiB). A page knows where blocks start in it, one
//! bit each, and which they are; a leaf knows its pages with a start. So a block is found by its first byte with one look,
//! and by any other byte by going back to the nearest start, over 64 pages or 64 leaves at a time. Nothing is ever rehashed.

/// Granules of a page, and pages of a leaf.
const FAN: u32 = 64;
/// A slot that names a table of blocks, not a block.
const TABLE: u32 = 1 << 31;

/// The starts in 64 granules.
#[derive(Debug, Clone, Copy)]
struct Page {
    starts: u64,
    /// The one block that starts here; or [`TABLE`] and the number of the table with a place for each granule.
    slot: u32,
}

#[derive(Debug)]
struct Leaf {
    occupied: u64,
    pages: [Page; FAN as usize],
}

impl Leaf {
    fn new() -> Box<Self> {
        Box::new(Self { occupied: 0, pages: [Page { starts: 0, slot: 0 }; FAN as usize] })
    }
}

/// The live blocks by their first granule.
#[derive(Debug, Default)]
pub(super) struct Index {
    leaves: Vec<Option<Box<Leaf>>>,
    /// One bit for each leaf that has a start.
    occupied: Vec<u64>,
    tables: Vec<[u32; FAN as usize]>,
    vacant: Vec<u32>,
}

/// Leaf, page in it, bit in that.
const fn split(offset: u32) -> (usize, usize, u32) {
    ((offset / FAN / FAN) as usize, (offset / FAN % FAN) as usize, offset % FAN)
}

impl Index {
    /// Makes room for the starts below `end`, so that [`Index::insert`] never has to grow the directory.
    pub(super) fn reach(&mut self, end: u32) {
        let (leaf, ..) = split(end);
        if self.leaves.len() <= leaf {
            self.leaves.resize_with(leaf + 1, || None);
            self.occupied.resize(leaf / FAN as usize + 1, 0);
        }
    }

    /// Notes that block number `block` starts at `offset`, where none does.
    #[inline]
    pub(super) fn insert(&mut self, offset: u32, block: u32) {
        self.reach(offset);
        let (at, page, bit) = split(offset);
        let Some(slot) = self.leaves.get_mut(at) else { return };
        let leaf = slot.get_or_insert_with(Leaf::new);
        if leaf.occupied == 0 {
            if let Some(word) = self.occupied.get_mut(at / FAN as usize) {
                *word |= 1 << (at as u32 % FAN);
            }
        }
        leaf.occupied |= 1 << page;
        let page = &mut leaf.pages[page % FAN as usize];
        if page.starts == 0 {
            page.slot = block;
        } else {
            if page.slot & TABLE == 0 {
                let number = self.vacant.pop().unwrap_or_else(|| {
                    self.tables.push([0; FAN as usize]);
                    (self.tables.len() - 1) as u32
                });
                if let Some(table) = self.tables.get_mut(number as usize) {
                    table[page.starts.trailing_zeros() as usize % FAN as usize] = page.slot;
                }
                page.slot = TABLE | number;
            }
            if let Some(table) = self.tables.get_mut((page.slot & !TABLE) as usize) {
                table[bit as usize % FAN as usize] = block;
            }
        }
        page.starts |= 1 << bit;
    }

    /// Forgets the block that starts at `offset`; its number, if one does.
    #[inline]
    pub(super) fn remove(&mut self, offset: u32) -> Option<u32> {
        let (at, number, bit) = split(offset);
        let leaf = self.leaves.get_mut(at)?.as_deref_mut()?;
        let page = &mut leaf.pages[number % FAN as usize];
        if page.starts & (1 << bit) == 0 {
            return None;
        }
        page.starts &= !(1 << bit);
        let slot = page.slot;
        if page.starts == 0 {
            leaf.occupied &= !(1 << number);
            if leaf.occupied == 0 {
                if let Some(word) = self.occupied.get_mut(at / FAN as usize) {
                    *word &= !(1 << (at as u32 % FAN));
                }
            }
            if slot & TABLE != 0 {
                self.vacant.push(slot & !TABLE);
            }
        }
        self.block(slot, bit)
    }

    /// The block that starts at `offset`.
    #[inline]
    pub(super) fn get(&self, offset: u32) -> Option<u32> {
        let (at, page, bit) = split(offset);
        let page = self.leaves.get(at)?.as_deref()?.pages[page % FAN as usize];
        (page.starts & (1 << bit) != 0).then(|| self.block(page.slot, bit))?
    }

    /// The block with the highest start that is not above `offset`.
    pub(super) fn below(&self, offset: u32) -> Option<u32> {
        let (at, page, bit) = split(offset);
        let low = |bits: u64, below: u32| bits & (1_u64 << below).wrapping_sub(1);
        if let Some(leaf) = self.leaves.get(at).and_then(Option::as_deref) {
            let here = leaf.pages[page % FAN as usize];
            let starts = here.starts & (u64::MAX >> (FAN - 1 - bit));
            if starts != 0 {
                return self.block(here.slot, starts.ilog2());
            }
            if let Some(page) = low(leaf.occupied, page as u32).checked_ilog2() {
                return self.highest(leaf, page);
            }
        }
        let word = (at / FAN as usize).min(self.occupied.len().checked_sub(1)?);
        let first = self.occupied.get(word).copied().unwrap_or_default();
        let first = if word == at / FAN as usize { low(first, at as u32 % FAN) } else { first };
        let earlier = self.occupied.get(..word)?.iter().rev();
        let (back, bits) = std::iter::once(&first).chain(earlier).enumerate().find(|(_, bits)| **bits != 0)?;
        let leaf = (word - back) * FAN as usize + bits.ilog2() as usize;
        let leaf = self.leaves.get(leaf)?.as_deref()?;
        self.highest(leaf, leaf.occupied.checked_ilog2()?)
    }

    fn highest(&self, leaf: &Leaf, page: u32) -> Option<u32> {
        let page = leaf.pages[page as usize % FAN as usize];
        self.block(page.slot, page.starts.checked_ilog2()?)
    }

    fn block(&self, slot: u32, bit: u32) -> Option<u32> {
        if slot & TABLE == 0 {
            return Some(slot);
        }
        Some(self.tables.get((slot & !TABLE) as usize)?[bit as usize % FAN as usize])
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
