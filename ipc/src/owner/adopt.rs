//! Adoption: a hold that shall outlive its producer. While that lives, nothing changes: the hold pins the block. When it is
//! dead, the chunks that the hold touches are under the account of the one that adopted them, until the hold is done.

use std::collections::{BTreeMap, BTreeSet};

use super::calls::refused;
use super::estate::Fate;
use super::Owner;
use crate::control::{HoldState, HoldWord};
use crate::wire::{Answer, Reason};

/// One hold that was adopted. Kept here, not in shared memory: an account is charged only by its own client's word.
#[derive(Debug)]
pub(super) struct Adoption {
    generation: u32,
    pub(super) heir: u32,
    pub(super) epochs: Vec<u64>,
}

/// Who adopted a dead client's chunks.
pub(super) type Heirs = BTreeMap<u64, BTreeSet<u32>>;

impl Owner {
    pub(super) fn adopt(&mut self, slot: u32, call_id: u64, producer: u32, index: u32, generation: u32) {
        match self.note_adoption(slot, producer, index, generation) {
            Ok(()) => self.answer(slot, call_id, Answer::Done, Vec::new()),
            Err(answer) => self.answer(slot, call_id, answer, Vec::new()),
        }
    }

    fn note_adoption(&mut self, slot: u32, producer: u32, index: u32, generation: u32) -> Result<(), Answer> {
        let stale = || refused(Reason::Stale, "the value is no longer held by this client, so it cannot be adopted");
        if producer == slot {
            return Err(refused(Reason::InvalidArgument, "the value is in this client's own memory"));
        }
        let hold = self.control.hold(producer, index).ok_or_else(stale)?;
        let word = hold.word();
        if !is_held(word, generation, slot) {
            return Err(stale());
        }
        let claim = hold.claim().ok_or_else(stale)?;
        if self.estate.window(claim.window).is_none_or(|window| window.slot != producer) {
            return Err(stale());
        }
        let epochs = self.estate.overlapping(claim.window, claim.offset, claim.bytes);
        let gone = |epoch: &u64| self.estate.holding(*epoch).is_none_or(|holding| holding.fate == Fate::Retired);
        if epochs.is_empty() || epochs.iter().any(gone) {
            return Err(stale());
        }
        for (device, bytes) in self.estate.would_inherit(slot, &epochs) {
            let share = self.estate.share(slot, device);
            let reserved = share.reserved.saturating_add(share.retired);
            if share.limit > 0 && reserved.saturating_add(bytes) > share.limit {
                let message = format!(
                    "over this client's own limit: the chunks of the value that it would adopt are {bytes} bytes, and {reserved} of {} \
                     bytes are reserved",
                    share.limit
                );
                let (asked, limit, holders) = (bytes, share.limit, Vec::new());
                return Err(Answer::Refused { reason: Reason::OutOfMemory, message, asked, limit, reserved, holders });
            }
        }
        let control = &self.control;
        self.adoptions.retain(|(producer, index), adoption| {
            control.hold(*producer, *index).is_some_and(|hold| is_held(hold.word(), adoption.generation, adoption.heir))
        });
        self.adoptions.insert((producer, index), Adoption { generation, heir: slot, epochs });
        // Its producer may be dead already.
        self.wake_orphans();
        self.look_at_orphans(std::time::Instant::now());
        Ok(())
    }

    /// Whether a hold was adopted, and still stands.
    pub(super) fn adoption(&self, producer: u32, index: u32, word: HoldWord) -> Option<&Adoption> {
        self.adoptions.get(&(producer, index)).filter(|adoption| is_held(word, adoption.generation, adoption.heir))
    }

    /// Puts a dead client's chunks under the accounts of those that adopted them. Where several did, it stays with the one that
    /// has it.
    pub(super) fn pass_to_heirs(&mut self, dead: u32, heirs: &Heirs) {
        for epoch in self.estate.chunks_of(dead) {
            let Some(holding) = self.estate.holding(epoch) else { continue };
            let heirs = heirs.get(&epoch);
            match holding.fate {
                Fate::Adopted if heirs.is_some_and(|heirs| heirs.contains(&holding.account)) => {}
                Fate::Orphaned | Fate::Adopted => match heirs.and_then(BTreeSet::first) {
                    Some(heir) => self.estate.inherit(epoch, *heir),
                    None if holding.fate == Fate::Adopted => self.estate.orphan(epoch),
                    None => {}
                },
                Fate::Held | Fate::Retired => {}
            }
        }
    }

    /// A client that adopted is dead itself: nothing stays under its account.
    pub(super) fn disinherit(&mut self, slot: u32) {
        self.adoptions.retain(|_, adoption| adoption.heir != slot);
        for epoch in self.estate.inherited(slot) {
            self.estate.orphan(epoch);
        }
    }
}

fn is_held(word: HoldWord, generation: u32, by: u32) -> bool {
    word.generation() == generation && word.state() == HoldState::Held && u32::from(word.receiver()) == by
}
