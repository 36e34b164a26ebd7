//! What the heap writes to a recording: under its lock, so that the order is that in which things happened.

use crate::driver::Driver;
use crate::record::{now, write, Event, Kind, Origin};
use crate::tlsf::GRANULE;
use crate::window::Chunk;

use super::{Inner, Request};

/// A device's number in recordings.
pub(super) fn device_number(driver: &dyn Driver) -> i16 {
    if driver.is_host() {
        -1
    } else {
        i16::try_from(driver.device().ordinal).unwrap_or(i16::MAX)
    }
}

impl Inner {
    /// A block's event, by the block's number.
    #[inline]
    pub(super) fn record_block(&self, kind: Kind, index: u32, flags: u8, origin: Origin) {
        if let Some(stack) = origin {
            self.write_block(kind, index, flags, stack);
        }
    }

    #[cold]
    fn write_block(&self, kind: Kind, index: u32, flags: u8, stack: u32) {
        let Some(info) = self.infos.get(index as usize) else { return };
        let named = info.more.as_ref().and_then(|more| more.streams.last()).filter(|_| kind == Kind::Free);
        // That of a stream that was seen capturing is no number that others know, and larger.
        let elsewhere = named.and_then(|stream| u32::try_from(self.streams.id(*stream).0).ok());
        write(Event {
            flags: if elsewhere.is_some() { flags | Event::ELSEWHERE } else { flags },
            peer: elsewhere.unwrap_or_default(),
            addr: self.base + u64::from(info.offset) * GRANULE,
            bytes: info.requested,
            stream: self.streams.id(self.stream_of(info.place)).0,
            value: self.meter.allocated_bytes(),
            stack,
            ..Event::new(kind, self.device)
        });
    }

    /// A chunk came or went; `began`: when it was asked for.
    pub(super) fn record_chunk(&self, kind: Kind, chunk: Chunk, began: Option<u64>, origin: Origin) {
        let Some(stack) = origin else { return };
        let took = began.map_or(0, |began| now().saturating_sub(began) / 1000);
        write(Event {
            addr: self.base + chunk.offset,
            bytes: chunk.bytes,
            value: self.meter.reserved_bytes(),
            peer: u32::try_from(took).unwrap_or(u32::MAX),
            stack,
            ..Event::new(kind, self.device)
        });
    }

    pub(super) fn record_out_of_memory(&self, bytes: u64, stream: u64, origin: Origin) {
        let Some(stack) = origin else { return };
        let value = self.meter.allocated_bytes();
        write(Event { bytes, stream, value, stack, ..Event::new(Kind::OutOfMemory, self.device) });
    }

    /// A stream is made to wait for others.
    pub(super) fn record_wait(&self, request: Request) {
        let Some(stack) = request.origin else { return };
        write(Event { bytes: request.bytes, stream: request.id.0, stack, ..Event::new(Kind::WaitForStreams, self.device) });
    }
}
