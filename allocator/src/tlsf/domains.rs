//! The table of domains: a set of bins for each, behind numbers that are never given out twice.

use std::ops::{Index, IndexMut};

use super::bins::Bins;
use super::Domain;

/// Low bits of a [`Domain`]: its slot. The rest counts how often the slot was given out.
const SLOT_BITS: u32 = 20;
const SLOT_MASK: u32 = (1 << SLOT_BITS) - 1;

/// One slot.
#[derive(Debug, Clone)]
struct Slot {
    /// The domain that lives here, or [`Domain::NONE`].
    domain: Domain,
    /// The domain that will live here next, or [`Domain::NONE`] when the slot's numbers are used up.
    next: Domain,
    bins: Bins,
}

/// The domains of one allocator.
#[derive(Debug, Clone)]
pub(super) struct Domains {
    slots: Vec<Slot>,
    vacant: Vec<u32>,
}

impl Domains {
    pub(super) const fn new() -> Self {
        Self { slots: Vec::new(), vacant: Vec::new() }
    }

    /// Makes memory ready for `domains` domains that are not there yet.
    pub(super) fn prepare(&mut self, domains: usize) {
        let (now, ready) = (self.slots.len(), self.slots.len() + domains);
        if self.slots.capacity() < ready {
            // Written once, so that the memory is there.
            self.slots.resize(ready, Slot { domain: Domain::NONE, next: Domain::NONE, bins: Bins::new() });
            self.slots.truncate(now);
        }
    }

    /// A new domain. [`Domain::NONE`] after 2^32 of them, more than a process can make streams.
    pub(super) fn add(&mut self) -> Domain {
        if let Some(slot) = self.vacant.pop().and_then(|slot| self.slots.get_mut(slot as usize)) {
            slot.domain = slot.next;
            return slot.domain;
        }
        match u32::try_from(self.slots.len()) {
            Ok(slot) if slot < SLOT_MASK => {
                let domain = Domain(slot);
                self.slots.push(Slot { domain, next: domain, bins: Bins::new() });
                domain
            }
            _ => Domain::NONE,
        }
    }

    /// Forgets a domain whose bins are empty.
    pub(super) fn remove(&mut self, domain: Domain) {
        let index = domain.0 & SLOT_MASK;
        if let Some(slot) = self.slots.get_mut(index as usize).filter(|slot| slot.domain == domain) {
            slot.domain = Domain::NONE;
            slot.next = domain.0.checked_add(1 << SLOT_BITS).map_or(Domain::NONE, Domain);
            // A slot whose numbers are used up stays empty: a few KiB for every 4,096 domains.
            if slot.next != Domain::NONE {
                self.vacant.push(index);
            }
        }
    }

    /// The bins of `domain`, if it lives.
    pub(super) fn get(&self, domain: Domain) -> Option<&Bins> {
        self.slots.get((domain.0 & SLOT_MASK) as usize).filter(|slot| slot.domain == domain).map(|slot| &slot.bins)
    }

    /// Whether `domain` lives.
    pub(super) fn contains(&self, domain: Domain) -> bool {
        self.get(domain).is_some()
    }

    /// Every living domain with its bins, by slot.
    pub(super) fn iter(&self) -> impl Iterator<Item = (Domain, &Bins)> {
        self.slots.iter().filter(|slot| slot.domain != Domain::NONE).map(|slot| (slot.domain, &slot.bins))
    }
}

/// By domains that are known to live: those of free blocks, and those that [`Domains::contains`] has seen.
impl Index<Domain> for Domains {
    type Output = Bins;

    fn index(&self, domain: Domain) -> &Bins {
        &self.slots[(domain.0 & SLOT_MASK) as usize].bins
    }
}

impl IndexMut<Domain> for Domains {
    fn index_mut(&mut self, domain: Domain) -> &mut Bins {
        &mut self.slots[(domain.0 & SLOT_MASK) as usize].bins
    }
}
