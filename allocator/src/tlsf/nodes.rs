//! The table of blocks: one node for each, free or used, linked to its neighbours by index.

use std::ops::{Index, IndexMut};

use super::{Block, Domain, Handle};

/// No node.
pub(super) const NIL: u32 = u32::MAX;

/// One block, or a vacant place in the table.
#[derive(Debug, Clone)]
pub(super) struct Node {
    pub(super) offset: u32,
    pub(super) granules: u32,
    /// The block just below in the same region, or [`NIL`].
    pub(super) before: u32,
    /// The block just above in the same region, or [`NIL`].
    pub(super) after: u32,
    /// The block before this one in its bin. Only of free blocks.
    pub(super) prev: u32,
    /// The block after this one in its bin, or the next vacant place. Not of used blocks.
    pub(super) next: u32,
    /// The domain that a free block lies in, or that a used one was taken from.
    pub(super) domain: Domain,
    /// Odd while the block is used. Goes up by one at each change, so a handle fits one use of one block.
    pub(super) generation: u32,
    pub(super) mark: u64,
}

impl Node {
    pub(super) const fn is_used(&self) -> bool {
        self.generation & 1 == 1
    }

    pub(super) const fn block(&self) -> Block {
        Block { offset: self.offset, granules: self.granules, used: self.is_used(), domain: self.domain, mark: self.mark }
    }
}

/// The nodes. Indices come from links and from handles that [`Nodes::used`] has checked, so they always name a node: places
/// are made vacant, never taken out of the table.
#[derive(Debug, Clone)]
pub(super) struct Nodes {
    table: Vec<Node>,
    /// Top of the stack of vacant places, linked through `next`.
    vacant: u32,
    /// Free blocks that are all of their region, and their granules.
    pub(super) whole: (u64, u64),
}

impl Nodes {
    pub(super) const fn new() -> Self {
        Self { table: Vec::new(), vacant: NIL, whole: (0, 0) }
    }

    /// The size in granules of a block that is all of its region.
    #[inline]
    pub(super) fn all_of_region(&self, index: u32) -> Option<u64> {
        let node = &self[index];
        (node.before == NIL && node.after == NIL).then_some(u64::from(node.granules))
    }

    /// A new free node, with no neighbours and in no bin.
    pub(super) fn add(&mut self, offset: u32, granules: u32, domain: Domain, mark: u64) -> u32 {
        let fresh = Node { offset, granules, before: NIL, after: NIL, prev: NIL, next: NIL, domain, generation: 0, mark };
        let index = self.vacant;
        if let Some(node) = self.table.get_mut(index as usize) {
            self.vacant = node.next;
            *node = Node { generation: node.generation, ..fresh };
            index
        } else {
            self.table.push(fresh);
            // Each node covers at least one of fewer than 2^32 granules, so the cast keeps every bit.
            (self.table.len() - 1) as u32
        }
    }

    /// Adds vacant places until there are `places`, the lowest on top.
    pub(super) fn prepare(&mut self, places: u32) {
        let first = self.table.len() as u32;
        for index in first..places {
            let next = if index + 1 < places { index + 1 } else { self.vacant };
            self.table.push(Node {
                offset: 0,
                granules: 0,
                before: NIL,
                after: NIL,
                prev: NIL,
                next,
                domain: Domain::NONE,
                generation: 0,
                mark: 0,
            });
        }
        if first < places {
            self.vacant = first;
        }
    }

    /// Makes the place of a free node vacant.
    pub(super) fn release(&mut self, index: u32) {
        let vacant = self.vacant;
        self[index].next = vacant;
        self.vacant = index;
    }

    /// Marks a free node as used and gives the handle of this use.
    pub(super) fn mark_used(&mut self, index: u32) -> Handle {
        let node = &mut self[index];
        node.generation = node.generation.wrapping_add(1);
        Handle { index, generation: node.generation }
    }

    /// Marks a used node as free: no handle of it is good any more.
    pub(super) fn mark_free(&mut self, index: u32) {
        let node = &mut self[index];
        node.generation = node.generation.wrapping_add(1);
    }

    /// The used node that `handle` names.
    pub(super) fn used(&self, handle: Handle) -> Option<&Node> {
        // The generation of a handle is odd, so equality alone says that the block is used.
        self.table.get(handle.index as usize).filter(|node| node.generation == handle.generation)
    }

    /// Places in the table, vacant ones too.
    #[cfg(any(test, feature = "conformance"))]
    pub(super) fn places(&self) -> usize {
        self.table.len()
    }

    /// Indices of the vacant places, at most as many as there are places.
    #[cfg(any(test, feature = "conformance"))]
    pub(super) fn vacant_places(&self) -> impl Iterator<Item = u32> + '_ {
        let known = |index: u32| (index != NIL).then_some(index);
        std::iter::successors(known(self.vacant), move |&index| known(self[index].next)).take(self.table.len() + 1)
    }
}

impl Index<u32> for Nodes {
    type Output = Node;

    fn index(&self, index: u32) -> &Node {
        &self.table[index as usize]
    }
}

impl IndexMut<u32> for Nodes {
    fn index_mut(&mut self, index: u32) -> &mut Node {
        &mut self.table[index as usize]
    }
}
