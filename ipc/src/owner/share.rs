//! Sharing chunks: release and revoke, whose a window is, import and unmap.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use super::client::Asked;
use super::estate::{members, Fate};
use super::Owner;
use crate::wire::{Answer, Ask, Reason, MAX_FDS};

impl Owner {
    /// Chunks come back from their client: all of them, or none where one is not its own.
    pub(super) fn release(&mut self, slot: u32, call_id: u64, epochs: &[u64]) {
        let own = |epoch: &u64| self.estate.holding(*epoch).is_some_and(|holding| holding.slot == slot && holding.fate == Fate::Held);
        if let Some(epoch) = epochs.iter().find(|epoch| !own(epoch)) {
            return self.refuse(slot, call_id, Reason::Stale, format!("chunk {epoch} is not this client's: nothing released"));
        }
        let epochs: BTreeSet<u64> = epochs.iter().copied().collect();
        let mut by_device: BTreeMap<u32, u64> = BTreeMap::new();
        for holding in epochs.iter().filter_map(|epoch| self.estate.holding(*epoch)) {
            *by_device.entry(holding.device).or_default() += holding.chunk.bytes;
        }
        let bytes = by_device.values().sum();
        by_device.into_iter().for_each(|(device, bytes)| self.estate.count_trim(slot, device, bytes));
        let retired = self.give_back(&epochs);
        self.answer(slot, call_id, Answer::Released { bytes, retired }, Vec::new());
        self.memory_came_back();
    }

    /// Takes chunks from their client and asks those who map them to drop them. Returns the bytes that are still mapped.
    pub(super) fn give_back(&mut self, epochs: &BTreeSet<u64>) -> u64 {
        let mut revoked: BTreeMap<(u32, u32), Vec<u64>> = BTreeMap::new();
        let mut retired = 0;
        for epoch in epochs {
            if self.estate.give_back(*epoch).is_none() {
                continue;
            }
            let Some(holding) = self.estate.holding(*epoch) else { continue };
            retired += holding.chunk.bytes;
            for importer in members(holding.importers) {
                revoked.entry((importer, holding.window)).or_default().push(*epoch);
            }
        }
        let _span = tracing::debug_span!("revoke", bytes = retired).entered();
        for ((importer, window), epochs) in revoked {
            self.ask(importer, Ask::Revoke { window, epochs: epochs.clone() }, Asked::Revoke(epochs));
        }
        retired
    }

    /// Memory may be free that growths wait for.
    pub(super) fn memory_came_back(&mut self) {
        self.note_change();
        self.serve_all_grows(Instant::now());
    }

    /// Chunks that a client no longer maps.
    pub(super) fn unmapped(&mut self, slot: u32, epochs: &[u64]) {
        let mut freed = false;
        for epoch in epochs {
            freed |= self.estate.drop_importer(*epoch, slot);
        }
        if freed {
            self.memory_came_back();
            self.wake_orphans();
        }
    }

    pub(super) fn tell_window(&mut self, slot: u32, call_id: u64, window: u32) {
        let found = self.estate.window(window).and_then(|found| Some((found.device, self.client(found.slot)?)));
        let Some((device, client)) = found else {
            return self.refuse(slot, call_id, Reason::Stale, format!("window {window} is nobody's"));
        };
        let bytes = self.estate.device(device).map_or(0, |books| books.served.window_bytes);
        let answer = Answer::Window { window, device, bytes, peer: client.peer() };
        match Self::duplicates([&client.pidfd]) {
            Ok(fds) => self.answer(slot, call_id, answer, fds),
            Err(error) => self.refuse(slot, call_id, Reason::Internal, format!("the owner has no descriptors left: {error}")),
        }
    }

    /// Hands out descriptors and notes who has them from here on.
    pub(super) fn import(&mut self, slot: u32, call_id: u64, window: u32, epochs: &[u64]) {
        if epochs.is_empty() || epochs.len() > MAX_FDS {
            let message = format!("{} chunks asked: expected 1 to {MAX_FDS}", epochs.len());
            return self.refuse(slot, call_id, Reason::InvalidArgument, message);
        }
        let lives = |epoch: &u64| {
            let holding = self.estate.holding(*epoch);
            holding.is_some_and(|holding| holding.window == window && holding.fate != Fate::Retired)
        };
        if let Some(epoch) = epochs.iter().find(|epoch| !lives(epoch)) {
            let message = format!("chunk {epoch} is not in window {window} any more: it was given back, or never was there");
            return self.refuse(slot, call_id, Reason::Stale, message);
        }
        self.send_chunks(slot, call_id, epochs);
    }
}
