//! Leases: blocks of this client that others hold, until the last is done with its use of them on the GPU.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Arc;

use millpond_allocator::driver::Addr;
use millpond_allocator::heap::{Heap, Pin};
use millpond_allocator::scatter::ScatterMap;
use millpond_allocator::timeline::{Reached, Signal};
use parking_lot::Mutex;

use super::channel::Office;
use super::due::slot_of;
use super::error::Error;
use super::fault::{self, Fault};
use super::{record, Client};
use crate::control::{Claim, ClientState, Control, Hold, HoldState, Look, Seen, FORWARDED, HOLDS_PER_CLIENT};

/// A hold in somebody's table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct HoldRef {
    /// Whose table.
    pub producer: u32,
    /// Its place there.
    pub index: u32,
    /// Its life.
    pub generation: u32,
}

#[derive(Debug)]
struct Lease {
    heap: Arc<Heap>,
    window: u32,
    pin: Pin,
}

#[derive(Debug, Default)]
struct Table {
    leases: ScatterMap<u64, Lease>,
    by_block: ScatterMap<(u32, u64), u64>,
    next: u64,
    free: Vec<u32>,
    used: u32,
}

/// This client's leases.
#[derive(Debug)]
pub(super) struct Leases {
    control: Arc<Control>,
    office: Arc<Office>,
    me: u32,
    table: Mutex<Table>,
    /// How many there are, to be looked at without the lock.
    live: AtomicUsize,
}

impl Leases {
    pub(super) fn new(control: Arc<Control>, office: Arc<Office>, me: u32) -> Self {
        Self { control, office, me, table: Mutex::default(), live: AtomicUsize::new(0) }
    }

    /// Makes a hold for a receiver on bytes of a live block of ours, before any frame that names it leaves.
    pub(super) fn lend(&self, heap: &Arc<Heap>, window: u32, block: u64, claim: (u64, u64), receiver: u8) -> Result<HoldRef, Error> {
        if let Some(hold) = self.try_lend(heap, window, block, claim, receiver)? {
            return Ok(hold);
        }
        // No place is free: some may be over by now.
        self.reap();
        self.try_lend(heap, window, block, claim, receiver)?.ok_or_else(|| {
            Error::OutOfMemory(format!(
                "{FORWARDED} values sent by this process are still held by their receivers, which is the most: let go of some there"
            ))
        })
    }

    fn try_lend(
        &self,
        heap: &Arc<Heap>,
        window: u32,
        block: u64,
        (offset, bytes): (u64, u64),
        receiver: u8,
    ) -> Result<Option<HoldRef>, Error> {
        let mut table = self.table.lock();
        let table = &mut *table;
        let start = block - heap.window().base();
        let known = table.by_block.get(&(window, start)).copied();
        let lease = match known {
            Some(lease) => lease,
            None => {
                let pin = heap.pin(block).ok_or_else(|| Error::Stale(format!("the block at {block:#x} was freed meanwhile")))?;
                table.next += 1;
                table.leases.insert(table.next, Lease { heap: heap.clone(), window, pin });
                table.by_block.insert((window, start), table.next);
                self.live.store(table.leases.len(), Ordering::Release);
                table.next
            }
        };
        let claim = Claim { lease, window, offset, bytes };
        loop {
            let index = match table.free.pop() {
                Some(index) => index,
                None if (table.used as usize) < FORWARDED => {
                    table.used += 1;
                    table.used - 1
                }
                None => break,
            };
            reach(&self.control, self.me, index);
            // A place that a misbehaving peer scribbled on is passed over.
            if let Some(generation) = self.control.hold(self.me, index).and_then(|hold| hold.make(self.me as u8, receiver, claim)) {
                return Ok(Some(HoldRef { producer: self.me, index, generation }));
            }
        }
        if known.is_none() {
            self.end(table, lease);
        }
        Ok(None)
    }

    fn end(&self, table: &mut Table, lease: u64) {
        if let Some(lease) = table.leases.remove(&lease) {
            table.by_block.remove(&(lease.window, lease.pin.offset));
            record::returned(lease.pin.offset, lease.pin.bytes);
            lease.heap.unpin(lease.pin);
        }
        self.live.store(table.leases.len(), Ordering::Release);
    }

    fn look(&self) -> Look {
        Look::at(self.control.used_holds(self.me))
    }

    fn over(&self, Seen { index, word, .. }: &Seen) -> bool {
        if fault::is(Fault::LostHold) && word.state() == HoldState::InFlight {
            return true;
        }
        word.state() == HoldState::Done && self.control.hold(self.me, *index).is_some_and(|hold| self.done_reached(hold))
    }

    /// Whether a hold's DONE is reached; a dead client's never will be, but nothing of it runs any more.
    fn done_reached(&self, hold: &Hold) -> bool {
        let Some((timeline, value)) = hold.done() else { return true };
        match self.control.timeline(timeline).map(|word| word.reached(value)) {
            None | Some(Reached::Yes) => true,
            Some(Reached::No) => false,
            Some(Reached::Never) => !self.may_run_on(slot_of(Signal { timeline, value })),
        }
    }

    /// Whether work of a poisoned client may run on. An owner poisons only where none does, and says so in the row. Where there is no owner,
    /// one that has no channel to it has only the end of its process to go by.
    fn may_run_on(&self, slot: u32) -> bool {
        let Some(row) = self.control.client(slot).and_then(|cell| cell.read()) else { return false };
        !row.is_dead() && ClientState::from_word(row.state) != ClientState::Faulted && self.office.may_run_on(row.serial)
    }

    /// Ends the leases whose holds are all done, on the GPU too. Cheap where there are none.
    pub(super) fn reap(&self) {
        if self.live.load(Ordering::Acquire) == 0 {
            return;
        }
        let mut table = self.table.lock();
        let table = &mut *table;
        let before = self.look();
        if !before.all().iter().any(|hold| self.over(hold)) && table.leases.keys().all(|lease| !before.of(*lease).is_empty()) {
            return;
        }
        let after = self.look();
        let over = |lease: &u64| after.steady(&before, *lease).is_some_and(|holds| holds.iter().all(|hold| self.over(hold)));
        let ended: Vec<u64> = table.leases.keys().copied().filter(over).collect();
        ended.into_iter().for_each(|lease| self.end(table, lease));
        for Seen { index, word, .. } in after.all().iter().filter(|hold| self.over(hold)) {
            let free = self.control.hold(self.me, *index).is_some_and(|hold| hold.recycle(*word));
            if free && (*index as usize) < FORWARDED {
                table.free.push(*index);
            }
        }
    }

    /// How many leases there are.
    pub(super) fn len(&self) -> usize {
        self.live.load(Ordering::Acquire)
    }

    /// What the receivers of a block have still to do: for each, the DONE that it recorded, `None` where it recorded none yet, or where that
    /// will never be reached but its work may run on. Empty: nobody uses the block any more.
    pub(super) fn pending(&self, window: u32, offset: u64) -> Vec<Option<(u32, u64)>> {
        let table = self.table.lock();
        let Some(lease) = table.by_block.get(&(window, offset)).copied() else { return Vec::new() };
        let before = self.look();
        let after = self.look();
        let Some(holds) = after.steady(&before, lease) else { return vec![None] };
        let pending = holds.iter().filter(|hold| !self.over(hold));
        pending
            .map(|seen| match seen.word.state() {
                HoldState::Done => self.control.hold(self.me, seen.index).and_then(Hold::done).filter(|done| !self.is_poisoned(*done)),
                _ => None,
            })
            .collect()
    }

    fn is_poisoned(&self, (timeline, value): (u32, u64)) -> bool {
        self.control.timeline(timeline).is_some_and(|word| word.reached(value) == Reached::Never)
    }

    /// For each range of a block (window, the block's start, first byte, end; in the window): whether a receiver may still use a byte of
    /// it. The rest of the block may be somebody's all the while.
    fn lent(&self, ranges: &[Option<Range>]) -> Vec<bool> {
        let table = self.table.lock();
        let before = self.look();
        let after = self.look();
        let uses = |range: &Range, seen: &Seen| {
            // What is being made does not say its range yet.
            let claim = self.control.hold(self.me, seen.index).and_then(Hold::claim).filter(|_| seen.word.state() != HoldState::Making);
            let apart = |c: Claim| c.offset >= range.end || c.offset.saturating_add(c.bytes) <= range.start;
            !self.over(seen) && !claim.is_some_and(apart)
        };
        let lent = |range: &Range| {
            let Some(lease) = table.by_block.get(&(range.window, range.block)).copied() else { return false };
            after.steady(&before, lease).is_none_or(|holds| holds.iter().any(|hold| uses(range, hold)))
        };
        ranges.iter().map(|range| range.as_ref().is_some_and(lent)).collect()
    }

    /// Ends what a dead client holds of ours. For when there is no owner any more to do it.
    pub(super) fn end_holds_of(&self, dead: u32) {
        for (_, hold) in self.control.used_holds(self.me) {
            let word = hold.word();
            let making = word.state() == HoldState::Making && u32::from(word.sender()) == dead;
            let held = matches!(word.state(), HoldState::InFlight | HoldState::Held) && u32::from(word.receiver()) == dead;
            if making || held || word.is_ticket_of(dead) {
                hold.bury(word);
            }
        }
    }
}

/// Bytes of a block of ours, by their places in its window.
#[derive(Debug)]
struct Range {
    window: u32,
    block: u64,
    start: u64,
    end: u64,
}

impl Client {
    /// For each range of this client's memory (first byte, bytes): whether a receiver that it was sent to, or one that it was passed on
    /// to, may still use a byte of it. By range and not by block: a block may be a segment that another allocator cuts into tensors.
    #[must_use]
    pub fn lent(&self, ranges: &[(Addr, u64)]) -> Vec<bool> {
        let find = |(addr, bytes): &(Addr, u64)| {
            let mut open = self.devices.iter().filter_map(|device| device.if_open());
            let opened = open.find(|opened| opened.heap.window().offset_of(*addr).is_some())?;
            let (block, _) = opened.heap.block_at(*addr)?;
            let base = opened.heap.window().base();
            let start = addr - base;
            Some(Range { window: opened.window, block: block - base, start, end: start.saturating_add(*bytes) })
        };
        self.shared.leases.lent(&ranges.iter().map(find).collect::<Vec<_>>())
    }
}

/// Makes a producer's look reach a place.
fn reach(control: &Control, producer: u32, place: u32) {
    if let Some(marks) = control.marks(producer) {
        marks.reach(place);
    }
}

/// Makes a hold in another producer's table, for a receiver to whom this client forwards. The client's own hold must live.
pub(super) fn forward(control: &Control, me: u32, mine: HoldRef, claim: (u64, u64), receiver: u8) -> Result<HoldRef, Error> {
    let stale = || Error::Stale("the value is no longer held here, so it cannot be forwarded".to_owned());
    let own = control.hold(mine.producer, mine.index).ok_or_else(stale)?;
    let word = own.word();
    if word.generation() != mine.generation || word.state() != HoldState::Held || u32::from(word.receiver()) != me {
        return Err(stale());
    }
    let claim = Claim { offset: claim.0, bytes: claim.1, ..own.claim().ok_or_else(stale)? };
    let made = place_forwarded(control, me, mine.producer, claim, receiver)?;
    // Another thread may have let go of our own meanwhile, and the producer of the bytes.
    if !own.confirm(mine.generation, me as u8) {
        cancel(control, made);
        return Err(stale());
    }
    Ok(made)
}

/// Makes a hold in the upper half of a producer's table, in a free place.
pub(super) fn place_forwarded(control: &Control, me: u32, producer: u32, claim: Claim, receiver: u8) -> Result<HoldRef, Error> {
    let start = (me as usize).wrapping_mul(127) % 64;
    for step in 0..HOLDS_PER_CLIENT - FORWARDED {
        let place = (start + step) % (HOLDS_PER_CLIENT - FORWARDED);
        let index = (FORWARDED + place) as u32;
        let Some(hold) = control.hold(producer, index) else { break };
        // The mark goes up before the hold can be seen, so that the producer's look reaches it.
        reach(control, producer, index);
        if let Some(generation) = hold.make(me as u8, receiver, claim) {
            return Ok(HoldRef { producer, index, generation });
        }
    }
    Err(Error::OutOfMemory("too many forwarded values are held by their receivers".to_owned()))
}

/// Takes back a hold whose frame did not leave.
pub(super) fn cancel(control: &Control, hold: HoldRef) {
    if let Some(record) = control.hold(hold.producer, hold.index) {
        let word = record.word();
        if word.generation() == hold.generation && word.state() == HoldState::InFlight {
            record.bury(word);
        }
    }
}
