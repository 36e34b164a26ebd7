//! The dead: their timelines are poisoned, their holds done, their memory taken back; what others still read is kept for
//! them, chunk by chunk, until the last hold is done.

use std::collections::BTreeSet;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use millpond_allocator::timeline::Reached;

use super::adopt::Heirs;
use super::estate::Fate;
use super::{rows, Ended, Owner};
use crate::control::{Cause, ClientRow, Hold, HoldState, HoldWord, TIMELINES_PER_CLIENT};
use crate::wire::{Ask, Role};

/// How soon after something moved the dead are looked at again, and how late at most: what others do with their holds is
/// seen in shared memory only.
const SOON: Duration = Duration::from_millis(2);
const LATE: Duration = Duration::from_millis(250);

/// When the dead with something left are looked at next.
#[derive(Debug)]
pub(super) struct Watch {
    next: Instant,
    step: Duration,
    changes: u64,
}

impl Watch {
    pub(super) fn new(now: Instant) -> Self {
        Self { next: now, step: SOON, changes: 0 }
    }
}

impl Owner {
    /// Nothing of a client runs any more: whoever waits for it goes on, before anything else is done for any of the dead. It is
    /// buried at the end of this turn's reading.
    pub(super) fn release_waiters(&mut self, slot: u32) {
        self.control.poison(slot);
        if !self.dead.contains(&slot) {
            self.dead.push(slot);
        }
    }

    /// Buries those who died in this turn. Giving memory back may take the driver milliseconds: the others are told before.
    pub(super) fn bury_the_dead(&mut self) {
        if self.dead.is_empty() {
            return;
        }
        for slot in std::mem::take(&mut self.dead) {
            self.bury(slot);
        }
        self.flush_links();
        // Others' chunks may be free by this too, and so may those of the dead that these read.
        for dead in rows::slots() {
            self.settle(dead);
        }
        self.wake_orphans();
        self.memory_came_back();
    }

    /// Buries a client of which nothing runs any more. Exact, and harmless if it is done twice.
    fn bury(&mut self, slot: u32) {
        let Some(client) = self.client_mut(slot).filter(|client| !client.buried) else { return };
        client.buried = true;
        let (peer, cause) = (client.peer(), client.cause);
        // A parent that only detached may come back.
        let parent_ended = client.role == Role::Parent && client.process_ended;
        let _span = tracing::info_span!("burial", client = slot, serial = peer.serial).entered();
        tracing::info!(client = slot, name = peer.name, pid = peer.pid, "client gone");
        self.end_holds(slot);
        self.disinherit(slot);
        self.estate.count_death(slot, cause);
        self.estate.drop_importer_everywhere(slot);
        for epoch in self.estate.chunks_of(slot) {
            if self.estate.holding(epoch).is_some_and(|holding| holding.fate == Fate::Held) {
                self.estate.orphan(epoch);
            }
        }
        self.tell_all(Some(slot), &Ask::Died { peer, cause });
        if parent_ended && self.config.parent_pid.is_some() {
            self.ended = Some(Ended::ParentEnded);
        }
    }

    /// Ends every hold that a dead client would have had to end, in everybody's table.
    pub(super) fn end_holds(&mut self, slot: u32) {
        let own = slot as usize * TIMELINES_PER_CLIENT..(slot as usize + 1) * TIMELINES_PER_CLIENT;
        for producer in rows::slots() {
            for (_, hold) in self.control.used_holds(producer) {
                loop {
                    let word = hold.word();
                    let making = word.state() == HoldState::Making && u32::from(word.sender()) == slot;
                    let taken = matches!(word.state(), HoldState::InFlight | HoldState::Held) && u32::from(word.receiver()) == slot;
                    // It died before it saw that there is no receiver any more.
                    let sent = word.state() == HoldState::InFlight && u32::from(word.sender()) == slot;
                    let stranded = sent && self.client(u32::from(word.receiver())).is_none_or(|receiver| receiver.buried);
                    // Its owner may have changed it in between: then it is looked at again.
                    if !(making || taken || stranded || word.is_ticket_of(slot)) || hold.bury(word) {
                        break;
                    }
                }
                let named = hold.done().filter(|(timeline, _)| own.contains(&(*timeline as usize)));
                if let (HoldState::Done, Some((timeline, value))) = (hold.word().state(), named) {
                    let highest = self.named_values.entry(timeline).or_default();
                    *highest = value.max(*highest);
                }
            }
        }
    }

    /// Every hold of a producer that is not free, as it is now.
    fn live_holds(&self, producer: u32) -> Vec<(u32, HoldWord)> {
        let words = self.control.used_holds(producer).map(|(place, hold)| (place, hold.word()));
        words.filter(|(_, word)| word.state() != HoldState::Free).collect()
    }

    /// Whether a hold that a client made is still to be taken up, in whoever's table. Until then its slot is no other's: a hold names its
    /// sender by that alone, and its receiver must not take one for the other.
    fn is_sender(&self, slot: u32) -> bool {
        let mut words = rows::slots().flat_map(|producer| self.control.used_holds(producer)).map(|(_, hold)| hold.word());
        words.any(|word| word.state() == HoldState::InFlight && u32::from(word.sender()) == slot)
    }

    /// Whether a hold is done, on the GPU too.
    fn is_over(&self, hold: &Hold, word: HoldWord) -> bool {
        // A timeline that is none cannot be waited for.
        let reached = |(timeline, value)| self.control.timeline(timeline).is_none_or(|word| word.reached(value) != Reached::No);
        word.state() == HoldState::Done && hold.done().is_none_or(reached)
    }

    /// Takes back what nobody reads any more of a dead client's chunks, and its slot when nothing is left.
    fn settle(&mut self, slot: u32) {
        if !self.client(slot).is_some_and(|client| client.buried) {
            return;
        }
        let holds = self.live_holds(slot);
        // A holder that forwards makes the new hold before it ends its own: two looks that see the same are one moment.
        if holds != self.live_holds(slot) {
            return self.wake_orphans();
        }
        let (mut read, mut heirs) = (BTreeSet::new(), Heirs::new());
        let mut all_over = true;
        for (place, word) in holds {
            let Some(hold) = self.control.hold(slot, place) else { continue };
            // What is over is made free, in the producer's place.
            if self.is_over(hold, word) && hold.recycle(word) {
                continue;
            }
            all_over = false;
            let window = u32::try_from(hold.window.load(Ordering::Relaxed)).unwrap_or(u32::MAX);
            if self.estate.window(window).is_some_and(|window| window.slot == slot) {
                read.extend(self.estate.overlapping(window, hold.offset.load(Ordering::Relaxed), hold.bytes.load(Ordering::Relaxed)));
            }
            if let Some(adoption) = self.adoption(slot, place, word) {
                read.extend(&adoption.epochs);
                for epoch in &adoption.epochs {
                    heirs.entry(*epoch).or_default().insert(adoption.heir);
                }
            }
        }
        self.pass_to_heirs(slot, &heirs);
        let left = |epoch: &u64| self.estate.holding(*epoch).is_some_and(|holding| matches!(holding.fate, Fate::Orphaned | Fate::Adopted));
        let over: BTreeSet<u64> = self.estate.chunks_of(slot).into_iter().filter(|epoch| left(epoch) && !read.contains(epoch)).collect();
        if !over.is_empty() {
            self.give_back(&over);
            self.note_change();
        }
        if all_over && !self.is_sender(slot) && self.estate.close_windows(slot) {
            self.vacate(slot);
        } else {
            self.state_changed(slot);
        }
    }

    fn vacate(&mut self, slot: u32) {
        let (serial, cause) = self.client(slot).map_or((0, None), |client| (client.serial, client.cause));
        self.adoptions.retain(|(producer, _), _| *producer != slot);
        if let Some(place) = self.clients.get_mut(slot as usize) {
            *place = None;
        }
        if let Some(cell) = self.control.client(slot) {
            cell.write(&ClientRow { serial, cause: cause.map_or(0, Cause::to_word), ..ClientRow::default() });
        }
        tracing::debug!(client = slot, "slot free");
    }

    /// Makes the dead looked at soon.
    pub(super) fn wake_orphans(&mut self) {
        self.orphans.step = SOON;
        self.orphans.next = Instant::now();
    }

    /// When the dead must be looked at; `None` where there are none.
    pub(super) fn orphans_due(&self) -> Option<Instant> {
        self.clients.iter().flatten().any(|client| client.buried).then_some(self.orphans.next)
    }

    pub(super) fn look_at_orphans(&mut self, now: Instant) {
        if self.orphans_due().is_none_or(|due| due > now) {
            return;
        }
        let changes = self.control.changes().seen();
        if changes != self.orphans.changes {
            self.orphans.step = SOON;
        }
        let before = self.estate.devices.iter().map(|books| books.row.reserved).sum::<u64>();
        for slot in rows::slots() {
            self.settle(slot);
        }
        if self.estate.devices.iter().map(|books| books.row.reserved).sum::<u64>() != before {
            self.memory_came_back();
        }
        self.orphans.changes = self.control.changes().seen();
        self.orphans.next = now + self.orphans.step;
        self.orphans.step = (self.orphans.step * 2).min(LATE);
    }
}
