//! One block's life: settled, used, pinned, freed, waiting, free.

use std::sync::Arc;

use crate::record::{origin, Event, Kind, Origin};
use crate::tlsf::{Allocation, Handle, GRANULE};
use crate::window::Chunk;

use super::{Inner, Neighbour, Pin};

/// Places for blocks that are ready from the first growth on.
const READY: usize = 2048;

/// What the heap knows of a block beside its place.
#[derive(Debug)]
pub(super) struct Info {
    pub(super) handle: Handle,
    pub(super) requested: u64,
    pub(super) offset: u32,
    pub(super) granules: u32,
    pub(super) place: u32,
    pub(super) pins: u32,
    pub(super) freed: bool,
    pub(super) more: Option<Box<More>>,
}

/// A block that its owner has freed and that its stream may have again as it is.
#[derive(Debug, Clone, Copy)]
pub(super) struct Parked {
    handle: Handle,
    place: u32,
    granules: u32,
}

/// What only few blocks have.
#[derive(Debug, Default)]
pub(super) struct More {
    /// Other streams that use it.
    pub(super) streams: Vec<u32>,
    /// Other GPUs whose streams do.
    abroad: Vec<Arc<Neighbour>>,
    /// The chunks of a block that is larger than one.
    pub(super) span: Vec<Chunk>,
}

/// A table with `keep` rows whose memory is there for `rows`: the first rows are added in calls of malloc.
pub(super) fn touched<T>(rows: usize, row: impl FnMut() -> T, keep: usize) -> Vec<T> {
    let mut table: Vec<T> = std::iter::repeat_with(row).take(rows).collect();
    table.truncate(keep);
    table
}

impl Info {
    pub(super) fn bytes(&self) -> u64 {
        u64::from(self.granules) * GRANULE
    }
}

impl Inner {
    /// Makes tables ready for twice the blocks that there are, so that malloc seldom meets memory that was never touched.
    /// Called where time does not matter so much: when the heap grows.
    pub(super) fn prepare(&mut self) {
        let blocks = usize::try_from(2 * self.meter.active_blocks()).unwrap_or(0).saturating_add(READY);
        let vacant = || Info { handle: Handle::NONE, requested: 0, offset: 0, granules: 0, place: 0, pins: 0, freed: true, more: None };
        self.infos.resize_with(self.infos.len().max(blocks), vacant);
        self.tlsf.prepare(u32::try_from(blocks).unwrap_or(u32::MAX));
        self.streams.prepare();
    }

    /// Makes an allocation a live block.
    #[inline]
    pub(super) fn settle(&mut self, allocation: Allocation, place: u32, requested: u64, origin: Origin) {
        let index = allocation.handle.index();
        let info = || Info {
            handle: allocation.handle,
            requested,
            offset: allocation.offset,
            granules: allocation.granules,
            place,
            pins: 0,
            freed: false,
            more: None,
        };
        match self.infos.get_mut(index as usize) {
            Some(slot) => *slot = info(),
            // Numbers in between are of free blocks; whoever gets them writes its own.
            None => self.infos.resize_with(index as usize + 1, info),
        }
        if let Some(place) = self.places.get_mut(place as usize) {
            place.live += 1;
        }
        self.index.insert(allocation.offset, index);
        self.meter.allocated(u64::from(allocation.granules) * GRANULE, requested);
        self.record_block(Kind::Allocate, index, 0, origin);
    }

    /// The live block that starts at a granule.
    #[inline]
    pub(super) fn live(&self, offset: u32) -> Option<&Info> {
        self.infos.get(self.index.get(offset)? as usize)
    }

    /// The live block that holds a granule.
    pub(super) fn live_around(&self, offset: u32) -> Option<&Info> {
        let info = self.infos.get(self.index.below(offset)? as usize)?;
        (offset - info.offset < info.granules).then_some(info)
    }

    /// A block of exactly so many granules for a place: the one that was freed last if it will do, else from the table. Its
    /// first granule.
    #[inline]
    pub(super) fn take(&mut self, place: u32, granules: u32, requested: u64, origin: Origin) -> Option<u32> {
        match self.parked.take() {
            Some(parked) if parked.place == place && parked.granules == granules => {
                if let Some(offset) = self.resettle(parked, requested, origin) {
                    return Some(offset);
                }
            }
            Some(parked) => self.release(parked.handle),
            None => {}
        }
        let allocation = self.tlsf.allocate(self.domain_of(place), granules)?;
        self.settle(allocation, place, requested, origin);
        Some(allocation.offset)
    }

    /// Makes the parked block a live one again, with a handle of its own.
    #[inline]
    fn resettle(&mut self, parked: Parked, requested: u64, origin: Origin) -> Option<u32> {
        let handle = self.tlsf.renew(parked.handle)?;
        let info = self.infos.get_mut(handle.index() as usize)?;
        (info.handle, info.requested, info.freed) = (handle, requested, false);
        let (offset, bytes) = (info.offset, info.bytes());
        self.index.insert(offset, handle.index());
        self.meter.allocated(bytes, requested);
        self.record_block(Kind::Allocate, handle.index(), 0, origin);
        Some(offset)
    }

    /// Puts the parked block where others find it.
    #[inline]
    pub(super) fn unpark(&mut self) {
        if let Some(parked) = self.parked.take() {
            self.release(parked.handle);
        }
    }

    /// The owner of the block that starts at a granule is done with it on the host. False if none does.
    ///
    /// If nobody else uses it, it is parked: the next malloc has often the same size and stream, and gets it as it is. Whoever
    /// looks for free blocks ends that first.
    #[inline]
    pub(super) fn free(&mut self, offset: u32, origin: Origin) -> bool {
        let Some(info) = self.index.remove(offset).and_then(|index| self.infos.get_mut(index as usize)) else { return false };
        info.freed = true;
        let (handle, bytes, requested) = (info.handle, info.bytes(), info.requested);
        let (pinned, plain, parked) = (info.pins > 0, info.more.is_none(), Parked { handle, place: info.place, granules: info.granules });
        self.meter.freed(bytes, requested);
        self.record_block(Kind::Free, handle.index(), if plain && !pinned { 0 } else { Event::PENDING }, origin);
        if plain && !pinned {
            if let Some(before) = self.parked.replace(parked) {
                self.release(before.handle);
            }
            return true;
        }
        self.meter.held(bytes);
        if !pinned {
            self.unused(handle, self.streams.mark());
        }
        true
    }

    /// Nobody uses a freed block any more that was held.
    fn let_go(&mut self, handle: Handle) {
        if let Some(bytes) = self.infos.get(handle.index() as usize).map(Info::bytes) {
            self.meter.let_go(bytes);
        }
        self.record_block(Kind::Reusable, handle.index(), 0, origin());
        self.release(handle);
    }

    /// Nobody holds the block any more; streams may still use it.
    fn unused(&mut self, handle: Handle, mark: u64) {
        let index = handle.index() as usize;
        while let Some(stream) = self.infos.get_mut(index).and_then(|info| info.more.as_mut()?.streams.pop()) {
            if self.streams.done(stream) < mark {
                return self.streams.wait(stream, mark, handle);
            }
            self.streams.unused(stream);
        }
        self.unused_here(handle);
    }

    /// No stream of this GPU uses the block any more; others' may.
    fn unused_here(&mut self, handle: Handle) {
        let abroad = self.infos.get_mut(handle.index() as usize).and_then(|info| info.more.as_mut()?.abroad.pop());
        match abroad {
            Some(abroad) => {
                let mark = abroad.ask();
                self.away.push((abroad, mark, handle));
            }
            None => self.let_go(handle),
        }
    }

    /// Whether any freed block waits for a stream that it was recorded on.
    pub(super) fn any_waiting(&self) -> bool {
        self.streams.any_waiting() || !self.away.is_empty()
    }

    /// Frees what has waited long enough for other streams.
    pub(super) fn settle_waiting(&mut self) {
        if !self.any_waiting() {
            return;
        }
        let (over, away): (Vec<_>, _) = std::mem::take(&mut self.away).into_iter().partition(|(abroad, mark, _)| abroad.is_past(*mark));
        self.away = away;
        over.into_iter().for_each(|(.., handle)| self.unused_here(handle));
        for stream in self.streams.numbers() {
            while let Some((mark, handle)) = self.streams.take_over(stream) {
                self.streams.unused(stream);
                self.unused(handle, mark);
            }
        }
    }

    /// Frees what waits for other streams for a place whose stream has been made to wait for them all. A private pool's
    /// blocks stay.
    pub(super) fn settle_waiting_into(&mut self, place: u32) {
        for stream in self.streams.numbers() {
            for (mark, handle) in self.streams.take_waiting(stream) {
                let Some(info) = self.infos.get_mut(handle.index() as usize) else { continue };
                let (from, to) = (info.place as usize, place as usize);
                if self.places.get(from).is_some_and(|place| place.pool.is_some()) {
                    self.streams.wait(stream, mark, handle);
                    continue;
                }
                info.place = place;
                let others = info.more.as_mut().map(|more| std::mem::take(&mut more.streams)).unwrap_or_default();
                others.into_iter().for_each(|other| self.streams.unused(other));
                self.streams.unused(stream);
                if let (Some(from), true) = (self.places.get_mut(from), from != to) {
                    from.live -= u32::from(from.live > 0);
                }
                if let (Some(to), true) = (self.places.get_mut(to), from != to) {
                    to.live += 1;
                }
                self.unused_here(handle);
            }
        }
    }

    /// The block is its stream's again.
    #[inline]
    fn release(&mut self, handle: Handle) {
        let Some(info) = self.infos.get_mut(handle.index() as usize) else { return };
        let (bytes, more) = (info.bytes(), info.more.take());
        let Some(place) = self.places.get_mut(info.place as usize) else { return };
        place.live -= u32::from(place.live > 0);
        let (domain, stream, mark) = (place.domain, place.stream, self.streams.mark());
        match more.map(|more| more.span).filter(|span| !span.is_empty()) {
            None => {
                if let Err(error) = self.tlsf.free(handle, domain, mark) {
                    tracing::error!(%error, "a block could not be freed");
                }
            }
            Some(span) => {
                if self.tlsf.remove_used_region(handle).is_ok() {
                    for chunk in span {
                        self.add_free(chunk, domain, mark);
                    }
                }
            }
        }
        self.streams.freed(stream, bytes);
    }

    /// Notes that a stream uses a block, other than the one that it comes back to.
    pub(super) fn record_use(&mut self, index: u32, stream: u32) {
        let Some(info) = self.infos.get_mut(index as usize) else { return };
        if self.places.get(info.place as usize).is_some_and(|place| place.stream == stream) {
            return;
        }
        let streams = &mut info.more.get_or_insert_default().streams;
        if !streams.contains(&stream) {
            streams.push(stream);
            self.streams.used(stream);
        }
    }

    /// Notes that streams of other GPUs use a block.
    pub(super) fn record_abroad(&mut self, index: u32, abroad: &[Arc<Neighbour>]) {
        if let Some(info) = self.infos.get_mut(index as usize).filter(|_| !abroad.is_empty()) {
            Neighbour::note(&mut info.more.get_or_insert_default().abroad, abroad);
        }
    }

    pub(super) fn pin(&mut self, index: u32) -> Option<Pin> {
        let info = self.infos.get_mut(index as usize)?;
        if info.pins == 0 {
            self.live.leased_out += info.bytes();
        }
        info.pins += 1;
        Some(Pin { handle: info.handle, offset: u64::from(info.offset) * GRANULE, bytes: info.bytes() })
    }

    /// Ends a pin. One that has ended before does nothing, unless the same block has another.
    pub(super) fn unpin(&mut self, pin: Pin) {
        let Some(info) = self.infos.get_mut(pin.handle.index() as usize).filter(|info| info.handle == pin.handle) else { return };
        let Some(pins) = info.pins.checked_sub(1) else { return };
        info.pins = pins;
        if pins == 0 {
            self.live.leased_out = self.live.leased_out.saturating_sub(info.bytes());
            if info.freed {
                self.unused(pin.handle, self.streams.mark());
            }
        }
    }
}
