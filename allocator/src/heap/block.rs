//! One block's life: settled, used, pinned, freed, waiting, free.

use crate::tlsf::{Allocation, Handle, GRANULE};
use crate::window::Chunk;

use super::{Inner, Pin};

/// What the heap knows of a block beside its place.
#[derive(Debug, Clone, Default)]
pub(super) struct Info {
    pub(super) place: usize,
    pub(super) requested: u64,
    pub(super) offset: u32,
    pub(super) granules: u32,
    pub(super) pins: u32,
    pub(super) freed: bool,
    /// Other streams that use it.
    pub(super) streams: Vec<usize>,
    /// The chunks of a block that is larger than one.
    pub(super) span: Vec<Chunk>,
}

impl Info {
    fn bytes(&self) -> u64 {
        u64::from(self.granules) * GRANULE
    }
}

impl Inner {
    /// Makes an allocation a live block.
    pub(super) fn settle(&mut self, allocation: Allocation, place: usize, requested: u64) {
        let index = allocation.handle.index() as usize;
        if self.infos.len() <= index {
            self.infos.resize(index + 1, Info::default());
        }
        if let Some(info) = self.infos.get_mut(index) {
            // Written field by field: the vectors keep their (mostly absent) buffers, and nothing is dropped on the hot path.
            info.place = place;
            info.requested = requested;
            info.offset = allocation.offset;
            info.granules = allocation.granules;
            info.pins = 0;
            info.freed = false;
            info.streams.clear();
            info.span.clear();
        }
        self.blocks.insert(allocation.offset, allocation.handle);
        self.stats.allocated(u64::from(allocation.granules) * GRANULE, requested);
    }

    /// The owner of a block is done with it on the host.
    pub(super) fn free(&mut self, handle: Handle) {
        let Some(info) = self.infos.get_mut(handle.index() as usize) else { return };
        info.freed = true;
        self.stats.freed(info.bytes(), info.requested);
        if info.pins == 0 {
            self.unused(handle);
        }
    }

    /// Nobody holds the block any more; streams may still use it.
    fn unused(&mut self, handle: Handle) {
        let Some(info) = self.infos.get_mut(handle.index() as usize) else { return };
        if info.streams.is_empty() {
            return self.release(handle);
        }
        let mark = self.streams.mark();
        let streams: Vec<_> = std::mem::take(&mut info.streams).into_iter().map(|stream| (stream, mark)).collect();
        streams.iter().for_each(|(stream, _)| self.streams.want(*stream));
        self.waiting.push((handle, streams));
    }

    /// Frees what has waited long enough for other streams.
    pub(super) fn settle_waiting(&mut self) {
        let mut waiting = std::mem::take(&mut self.waiting);
        waiting.retain(|(handle, streams)| {
            let over = streams.iter().all(|(stream, mark)| self.streams.done(*stream) >= *mark);
            if over {
                self.release(*handle);
            }
            !over
        });
        self.waiting = waiting;
    }

    /// The block is its stream's again.
    fn release(&mut self, handle: Handle) {
        let Some(info) = self.infos.get_mut(handle.index() as usize) else { return };
        let (bytes, place, span) = (info.bytes(), info.place, std::mem::take(&mut info.span));
        let Some((domain, stream)) = self.places.get(place).map(|place| (place.domain, place.stream)) else { return };
        let mark = self.streams.mark();
        if span.is_empty() {
            if let Err(error) = self.tlsf.free(handle, domain, mark) {
                tracing::error!(%error, "a block could not be freed");
            }
        } else if self.tlsf.remove_used_region(handle).is_ok() {
            for chunk in span {
                self.add_chunk(chunk, domain, mark);
            }
        }
        self.stats.inactive(bytes);
        self.streams.freed(stream, bytes);
    }

    pub(super) fn record_use(&mut self, handle: Handle, stream: usize) -> bool {
        let home = self.infos.get(handle.index() as usize).map(|info| self.stream_of(info.place));
        let Some(info) = self.infos.get_mut(handle.index() as usize) else { return false };
        if home != Some(stream) && !info.streams.contains(&stream) {
            info.streams.push(stream);
        }
        true
    }

    pub(super) fn pin(&mut self, handle: Handle) -> Option<Pin> {
        let info = self.infos.get_mut(handle.index() as usize)?;
        if info.pins == 0 {
            self.live.leased_out += info.bytes();
        }
        info.pins += 1;
        Some(Pin { handle, offset: u64::from(info.offset) * GRANULE, bytes: info.bytes() })
    }

    pub(super) fn unpin(&mut self, handle: Handle) {
        let Some(info) = self.infos.get_mut(handle.index() as usize) else { return };
        let Some(pins) = info.pins.checked_sub(1) else { return };
        info.pins = pins;
        if pins == 0 {
            self.live.leased_out = self.live.leased_out.saturating_sub(info.bytes());
            if info.freed {
                self.unused(handle);
            }
        }
    }
}
