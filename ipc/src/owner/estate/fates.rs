//! How a chunk changes hands, from its first importer to when its memory is free.

use std::collections::BTreeMap;
use std::time::Instant;

use super::{Estate, Fate, Holding};

impl Estate {
    /// Notes that a client has a chunk's descriptor, unless the chunk is its own.
    pub(in crate::owner) fn note_importer(&mut self, epoch: u64, slot: u32) {
        if let Some(holding) = self.chunks.get_mut(&epoch).filter(|holding| holding.slot != slot) {
            holding.importers |= 1 << slot;
            holding.shared = true;
        }
    }

    /// Takes a chunk from its client: free at once, or retired while others map it. Says which.
    pub(in crate::owner) fn give_back(&mut self, epoch: u64) -> Option<Fate> {
        let importers = self.chunks.get(&epoch)?.importers;
        if importers == 0 {
            let holding = self.free(epoch)?;
            if let Some(books) = self.devices.get(holding.device as usize).filter(|_| holding.fate == Fate::Held && !holding.shared) {
                self.spares.keep(holding.device, books.row.limit, holding.slot, holding.chunk.bytes, holding.fd);
                self.note_spares(holding.device);
            }
            return None;
        }
        self.turn(epoch, Fate::Retired, None);
        Some(Fate::Retired)
    }

    /// Leaves a dead client's chunk to its readers.
    pub(in crate::owner) fn orphan(&mut self, epoch: u64) {
        self.turn(epoch, Fate::Orphaned, None);
    }

    /// Puts a dead client's chunk under the account of one that adopted it.
    pub(in crate::owner) fn inherit(&mut self, epoch: u64, heir: u32) {
        self.turn(epoch, Fate::Adopted, Some(heir));
    }

    /// Chunks of others that are under a client's account.
    pub(in crate::owner) fn inherited(&self, heir: u32) -> Vec<u64> {
        let its = |holding: &&Holding| holding.fate == Fate::Adopted && holding.account == heir;
        self.chunks.values().filter(its).map(|holding| holding.chunk.epoch).collect()
    }

    /// What a client's account would hold more if it had these chunks, by device.
    pub(in crate::owner) fn would_inherit(&self, heir: u32, epochs: &[u64]) -> BTreeMap<u32, u64> {
        let mut more = BTreeMap::new();
        for holding in epochs.iter().filter_map(|epoch| self.chunks.get(epoch)).filter(|holding| holding.account != heir) {
            *more.entry(holding.device).or_default() += holding.chunk.bytes;
        }
        more
    }

    /// Notes that a client no longer maps a chunk. True where the chunk is free by that.
    pub(in crate::owner) fn drop_importer(&mut self, epoch: u64, slot: u32) -> bool {
        let Some(holding) = self.chunks.get_mut(&epoch) else { return false };
        holding.importers &= !(1 << slot);
        let free = holding.importers == 0 && holding.fate == Fate::Retired;
        if free {
            self.free(epoch);
        }
        free
    }

    /// The same for every chunk that a client maps. True where any is free by that.
    pub(in crate::owner) fn drop_importer_everywhere(&mut self, slot: u32) -> bool {
        let mapped: Vec<u64> = self.chunks.values().filter(|holding| holding.importers & 1 << slot != 0).map(|h| h.chunk.epoch).collect();
        let freed = mapped.into_iter().filter(|epoch| self.drop_importer(*epoch, slot)).count();
        freed > 0
    }

    /// Changes a chunk's fate, and its account: its own client's, or another's.
    fn turn(&mut self, epoch: u64, fate: Fate, account: Option<u32>) {
        let Some(holding) = self.chunks.get_mut(&epoch) else { return };
        let (device, bytes, before, from) = (holding.device, holding.chunk.bytes, holding.fate, holding.account);
        let to = account.unwrap_or(holding.slot);
        (holding.fate, holding.account) = (fate, to);
        self.book(device, from, bytes, before, false);
        self.book(device, to, bytes, fate, true);
    }

    /// Takes a chunk out of the books: with what is returned goes the memory.
    fn free(&mut self, epoch: u64) -> Option<Holding> {
        let holding = self.chunks.remove(&epoch)?;
        if let Some(window) = self.windows.get_mut(&holding.window) {
            window.taken.remove(&holding.chunk.offset);
        }
        let (device, account, bytes) = (holding.device, holding.account, holding.chunk.bytes);
        self.book(device, account, bytes, holding.fate, false);
        if let Some(books) = self.devices.get_mut(device as usize) {
            books.row.reserved = books.row.reserved.saturating_sub(bytes);
        }
        Some(holding)
    }

    /// What was given back and nobody asked for goes to the driver.
    pub(in crate::owner) fn expire_spares(&mut self, now: Instant) {
        if let Some(device) = self.spares.expire(now) {
            self.note_spares(device);
        }
    }

    /// Says in each client's row what is at hand for it.
    pub(super) fn note_spares(&mut self, device: u32) {
        let Some(books) = self.devices.get_mut(device as usize) else { return };
        for (slot, share) in (0..).zip(&mut books.shares) {
            let spare = self.spares.bytes_of(device, slot);
            if std::mem::replace(&mut share.spare, spare) != spare {
                self.dirty.insert((slot, device));
            }
        }
    }

    /// When that is due next.
    pub(in crate::owner) fn spares_due(&self) -> Option<Instant> {
        self.spares.due()
    }
}
