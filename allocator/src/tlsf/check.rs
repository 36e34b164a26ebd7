//! Every invariant of the allocator, for tests.

use super::bins::bin_of;
use super::nodes::NIL;
use super::{list, Tlsf};

/// `Err` with a message unless the condition holds.
macro_rules! ensure {
    ($condition:expr, $($message:tt)+) => {
        if !$condition {
            return Err(format!($($message)+));
        }
    };
}

/// What a node was found to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Seen {
    Nowhere,
    Vacant,
    Used,
    /// In a region, not in a bin yet.
    Free,
    Binned,
}

impl Tlsf {
    /// Checks every invariant; the message names the first one that is broken. Takes time linear in the number of blocks.
    ///
    /// # Errors
    /// What is wrong, in words.
    pub fn check(&self) -> Result<(), String> {
        let mut seen = vec![Seen::Nowhere; self.nodes.places()];
        self.check_regions(&mut seen)?;
        self.check_bins(&mut seen)?;
        for index in self.nodes.vacant_places() {
            let place = &mut seen[index as usize];
            ensure!(*place == Seen::Nowhere, "vacant node {index} was seen as {place:?}");
            ensure!(!self.nodes[index].is_used(), "vacant node {index} has a used generation");
            *place = Seen::Vacant;
        }
        let lost = seen.iter().position(|place| matches!(place, Seen::Nowhere | Seen::Free));
        ensure!(lost.is_none(), "node {lost:?} is lost");
        Ok(())
    }

    /// Regions do not overlap; the blocks of each cover it without a gap; no two free neighbours share a domain.
    fn check_regions(&self, seen: &mut [Seen]) -> Result<(), String> {
        let (mut free, mut used, mut floor) = (0, 0, 0);
        let mut split = (0, 0);
        for (&offset, region) in &self.regions {
            let end = u64::from(offset) + u64::from(region.granules);
            ensure!(u64::from(offset) >= floor && end <= 1 << 32, "region at {offset} overlaps or is out of range");
            floor = end;
            let (mut at, mut below) = (u64::from(offset), NIL);
            for index in self.chain(region.first) {
                let node = &self.nodes[index];
                let place = &mut seen[index as usize];
                ensure!(*place == Seen::Nowhere, "node {index} is twice in the regions");
                *place = if node.is_used() { Seen::Used } else { Seen::Free };
                ensure!(u64::from(node.offset) == at && node.granules != 0, "node {index} is not at {at}, or is empty");
                ensure!(node.before == below, "node {index} has {} before it, not {below}", node.before);
                let merged = below == NIL || node.is_used() || !self.is_free_in(below, node.domain);
                ensure!(merged, "free nodes {below} and {index} are not merged");
                *(if node.is_used() { &mut used } else { &mut free }) += u64::from(node.granules);
                if !node.is_used() && node.granules != region.granules {
                    split = (split.0 + 1, split.1 + u64::from(node.granules));
                }
                at += u64::from(node.granules);
                below = index;
            }
            ensure!(at == end, "blocks of region {offset} end at {at}, not {end}");
        }
        ensure!(split == self.split(), "{split:?} split; counted {:?}", self.split());
        ensure!((free, used) == (self.free, self.used), "{free} free, {used} used; counted {} and {}", self.free, self.used);
        Ok(())
    }

    /// Every free block is in the bin of its size in its domain, once; the bitmaps say so.
    fn check_bins(&self, seen: &mut [Seen]) -> Result<(), String> {
        for (domain, bins) in self.domains.iter() {
            ensure!(bins.bitmaps_agree(), "bitmaps of {domain:?} disagree with its heads");
            for bin in bins.occupied() {
                let mut prev = NIL;
                for index in list(&self.nodes, bins.head(bin)) {
                    let node = &self.nodes[index];
                    let place = &mut seen[index as usize];
                    ensure!(*place == Seen::Free, "node {index} in bin {bin} of {domain:?} was seen as {place:?}");
                    *place = Seen::Binned;
                    ensure!(node.domain == domain, "node {index} of {:?} is in a bin of {domain:?}", node.domain);
                    ensure!(bin_of(node.granules) == bin, "node {index} of {} granules is in bin {bin}", node.granules);
                    ensure!(node.prev == prev, "node {index} has {} before it in bin {bin}, not {prev}", node.prev);
                    prev = index;
                }
            }
        }
        Ok(())
    }
}
