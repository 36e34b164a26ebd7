//! The allocator against a shadow of itself: a sorted map of ranges with the same rules and no cleverness.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::bins::bin_of;
use super::{Block, Domain, Handle, Tlsf};

/// Granules of an address slot: a region lies within one.
const SLOT: u32 = 6000;
/// Highest mark that is used.
const MARKS: u64 = 6;

/// One random call. Numbers that choose are taken modulo what there is.
#[derive(Debug, Clone)]
enum Op {
    Allocate { domain: usize, granules: u32 },
    AllocateReady { domain: usize, granules: u32, max_mark: u64 },
    Free { block: usize, domain: usize, mark: u64 },
    FreeStale { block: usize },
    MoveReady { from: usize, to: usize, max_mark: u64 },
    AddDomain,
    RemoveDomain { domain: usize, into: usize, mark: u64 },
    AddRegion { slot: u32, start: u32, granules: u32, domain: usize, mark: u64 },
    AddUsedRegion { slot: u32, granules: u32 },
    RemoveRegion { region: usize },
    RemoveUsedRegion { block: usize },
}

fn op() -> impl Strategy<Value = Op> {
    let any = || 0..1000usize;
    let size = || prop_oneof![3 => 1..80u32, 2 => 1..1500u32, 1 => Just(64u32), 1 => 1024..1056u32];
    let mark = || 0..=MARKS;
    prop_oneof![
        12 => (any(), size()).prop_map(|(domain, granules)| Op::Allocate { domain, granules }),
        5 => (any(), size(), mark()).prop_map(|(domain, granules, max_mark)| Op::AllocateReady { domain, granules, max_mark }),
        12 => (any(), any(), mark()).prop_map(|(block, domain, mark)| Op::Free { block, domain, mark }),
        1 => any().prop_map(|block| Op::FreeStale { block }),
        3 => (any(), any(), mark()).prop_map(|(from, to, max_mark)| Op::MoveReady { from, to, max_mark }),
        1 => Just(Op::AddDomain),
        1 => (any(), any(), mark()).prop_map(|(domain, into, mark)| Op::RemoveDomain { domain, into, mark }),
        3 => (0..6u32, 0..200u32, 0..=SLOT, any(), mark())
            .prop_map(|(slot, start, granules, domain, mark)| Op::AddRegion { slot, start, granules, domain, mark }),
        1 => (0..6u32, 1..SLOT).prop_map(|(slot, granules)| Op::AddUsedRegion { slot, granules }),
        2 => any().prop_map(|region| Op::RemoveRegion { region }),
        3 => any().prop_map(|block| Op::RemoveUsedRegion { block }),
    ]
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Used,
    Free(Domain, u64),
}

/// The allocator, its shadow, and what was seen of both.
#[derive(Default)]
struct Pair {
    tlsf: Tlsf,
    domains: Vec<Domain>,
    /// Size of each region by offset.
    regions: BTreeMap<u32, u32>,
    /// Size and state of each block by offset.
    blocks: BTreeMap<u32, (u32, State)>,
    live: Vec<(Handle, u32)>,
    stale: Vec<Handle>,
    /// What was handed out, in order.
    offsets: Vec<u32>,
}

impl Pair {
    fn new() -> Self {
        let mut pair = Self::default();
        pair.domains = (0..3).map(|_| pair.tlsf.add_domain()).collect();
        pair.apply(&Op::AddRegion { slot: 0, start: 0, granules: SLOT, domain: 0, mark: 0 });
        pair
    }

    fn domain(&self, choice: usize) -> Domain {
        self.domains[choice % self.domains.len()]
    }

    /// Merges free neighbours of one domain in the shadow.
    fn merge(&mut self) {
        let old = std::mem::take(&mut self.blocks);
        let mut last: Option<(u32, (u32, State))> = None;
        for (offset, (granules, state)) in old {
            last = match (last, state) {
                (Some((start, (size, State::Free(a, m)))), State::Free(b, n)) if a == b && !self.regions.contains_key(&offset) => {
                    Some((start, (size + granules, State::Free(a, m.max(n)))))
                }
                (previous, _) => {
                    self.blocks.extend(previous);
                    Some((offset, (granules, state)))
                }
            };
        }
        self.blocks.extend(last);
    }

    /// Sizes of the free blocks of `domain` with a mark of at most `max_mark`.
    fn free_sizes(&self, domain: Domain, max_mark: u64) -> Vec<u32> {
        let free = |&(size, state): &(u32, State)| matches!(state, State::Free(d, m) if d == domain && m <= max_mark).then_some(size);
        self.blocks.values().filter_map(free).collect()
    }

    /// Takes what was handed out from the shadow, which must have it free, at a low end, and ready.
    fn take(&mut self, allocation: Option<super::Allocation>, domain: Domain, granules: u32, max_mark: u64) {
        let sizes = self.free_sizes(domain, max_mark);
        let above = sizes.iter().map(|&size| bin_of(size)).filter(|&bin| bin > bin_of(granules)).min();
        let Some(taken) = allocation else {
            // Only of all marks: a ready block may lie behind eight others.
            assert!(max_mark != u64::MAX || above.is_none(), "{granules} was not found in {sizes:?}");
            return;
        };
        assert_eq!(taken.granules, granules);
        let (size, state) = self.blocks.remove(&taken.offset).expect("a block starts there");
        assert_eq!(state, State::Free(domain, taken.mark));
        assert!(size >= granules && taken.mark <= max_mark, "{taken:?} from {size}");
        if max_mark == u64::MAX && bin_of(size) != bin_of(granules) {
            assert_eq!(Some(bin_of(size)), above, "a block of {size} for {granules}, of {sizes:?}");
        }
        self.blocks.insert(taken.offset, (granules, State::Used));
        if size > granules {
            self.blocks.insert(taken.offset + granules, (size - granules, state));
        }
        self.live.push((taken.handle, taken.offset));
        self.offsets.push(taken.offset);
    }

    fn add_region(&mut self, offset: u32, granules: u32, added: bool, state: State) {
        let clear = self.regions.iter().all(|(&other, &size)| offset + granules <= other || other + size <= offset);
        assert_eq!(added, clear && granules > 0, "region of {granules} at {offset} among {:?}", self.regions);
        if added {
            self.regions.insert(offset, granules);
            self.blocks.insert(offset, (granules, state));
        }
    }

    fn remove_region(&mut self, offset: u32) {
        self.regions.remove(&offset);
        self.blocks.remove(&offset);
    }

    fn apply(&mut self, op: &Op) {
        match *op {
            Op::Allocate { domain, granules } => {
                let domain = self.domain(domain);
                let allocation = self.tlsf.allocate(domain, granules);
                self.take(allocation, domain, granules, u64::MAX);
            }
            Op::AllocateReady { domain, granules, max_mark } => {
                let domain = self.domain(domain);
                let allocation = self.tlsf.allocate_ready(domain, granules, max_mark);
                self.take(allocation, domain, granules, max_mark);
            }
            Op::Free { block, domain, mark } if !self.live.is_empty() => {
                let domain = self.domain(domain);
                let (handle, offset) = self.live.swap_remove(block % self.live.len());
                self.tlsf.free(handle, domain, mark).unwrap();
                self.blocks.get_mut(&offset).unwrap().1 = State::Free(domain, mark);
                self.stale.push(handle);
            }
            Op::FreeStale { block } if !self.stale.is_empty() => {
                let handle = self.stale[block % self.stale.len()];
                assert!(self.tlsf.free(handle, self.domains[0], 0).is_err());
                assert!(self.tlsf.block(handle).is_err() && self.tlsf.remove_used_region(handle).is_err());
            }
            Op::MoveReady { from, to, max_mark } => {
                let (from, to) = (self.domain(from), self.domain(to));
                let moved = self.tlsf.move_ready(from, to, max_mark);
                assert_eq!(moved as usize, self.free_sizes(from, max_mark).len());
                for (_, state) in self.blocks.values_mut() {
                    if matches!(*state, State::Free(domain, mark) if domain == from && mark <= max_mark) {
                        *state = State::Free(to, 0);
                    }
                }
            }
            Op::AddDomain if self.domains.len() < 5 => {
                let domain = self.tlsf.add_domain();
                assert!(!self.domains.contains(&domain));
                self.domains.push(domain);
            }
            Op::RemoveDomain { domain, into, mark } => {
                let (gone, into) = (self.domain(domain), self.domain(into));
                assert_eq!(self.tlsf.remove_domain(gone, into, mark).is_ok(), gone != into);
                if gone != into {
                    self.domains.retain(|&domain| domain != gone);
                    for (_, state) in self.blocks.values_mut() {
                        if let State::Free(domain, own) = *state {
                            *state = if domain == gone { State::Free(into, own.max(mark)) } else { *state };
                        }
                    }
                }
            }
            Op::AddRegion { slot, start, granules, domain, mark } => {
                // A full slot at start 0 touches the region of the next slot; any other start may overlap it.
                let (offset, domain) = (slot * SLOT + start, self.domain(domain));
                let added = self.tlsf.add_region(offset, granules, domain, mark).is_ok();
                self.add_region(offset, granules, added, State::Free(domain, mark));
            }
            Op::AddUsedRegion { slot, granules } => {
                let added = self.tlsf.add_used_region(slot * SLOT, granules);
                self.add_region(slot * SLOT, granules, added.is_ok(), State::Used);
                self.live.extend(added.map(|allocation| (allocation.handle, allocation.offset)).ok());
            }
            Op::RemoveRegion { region } if !self.regions.is_empty() => {
                let (&offset, &granules) = self.regions.iter().nth(region % self.regions.len()).unwrap();
                let free = matches!(self.blocks[&offset], (size, State::Free(..)) if size == granules);
                assert_eq!(self.tlsf.remove_region(offset).ok(), free.then_some(granules));
                if free {
                    self.remove_region(offset);
                }
            }
            Op::RemoveUsedRegion { block } if !self.live.is_empty() => {
                let chosen = block % self.live.len();
                let (handle, offset) = self.live[chosen];
                let whole = self.regions.get(&offset) == Some(&self.blocks[&offset].0);
                assert_eq!(self.tlsf.remove_used_region(handle).is_ok(), whole);
                if whole {
                    self.live.swap_remove(chosen);
                    self.stale.push(handle);
                    self.remove_region(offset);
                }
            }
            _ => {}
        }
        self.merge();
        self.compare();
    }

    /// The allocator shows what the shadow has: every range, no more and no less.
    fn compare(&self) {
        self.tlsf.check().unwrap();
        let regions: BTreeMap<u32, u32> = self.tlsf.regions().map(|(offset, granules, _)| (offset, granules)).collect();
        assert_eq!(regions, self.regions);
        let state = |block: &Block| if block.used { State::Used } else { State::Free(block.domain, block.mark) };
        let shown = self.regions.keys().flat_map(|&region| self.tlsf.blocks(region));
        let shown: BTreeMap<u32, (u32, State)> = shown.map(|block| (block.offset, (block.granules, state(&block)))).collect();
        assert_eq!(shown, self.blocks);
        let free = self.blocks.values().filter(|(_, state)| *state != State::Used).map(|&(size, _)| size);
        assert_eq!(self.tlsf.largest_free(), free.max().unwrap_or(0));
        for &(handle, offset) in &self.live {
            assert_eq!(self.tlsf.block(handle).map(|block| (block.used, block.offset)), Ok((true, offset)));
        }
        for (&offset, &granules) in &self.regions {
            let free = match self.blocks[&offset] {
                (size, State::Free(domain, mark)) if size == granules => Some((domain, mark)),
                _ => None,
            };
            assert_eq!(self.tlsf.region(offset).map(|region| (region.granules, region.free)), Some((granules, free)));
        }
    }
}

fn play(ops: &[Op]) -> Pair {
    let mut pair = Pair::new();
    for op in ops {
        pair.apply(op);
    }
    pair
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 768, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_allocator_agrees_with_its_shadow(ops in prop::collection::vec(op(), 1..300)) {
        play(&ops);
    }

    #[test]
    fn the_same_calls_give_the_same_offsets(ops in prop::collection::vec(op(), 1..120)) {
        let (one, two) = (play(&ops), play(&ops));
        prop_assert_eq!(one.offsets, two.offsets);
        prop_assert_eq!(one.blocks, two.blocks);
        prop_assert_eq!(one.live, two.live);
    }
}
