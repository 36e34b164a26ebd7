//! Chunks that came back a moment ago, kept for the client that gave them back.
//!
//! To give memory up and to make it anew takes the driver 0.3 to 2 ms for a GiB, in which the owner answers nobody; a client that
//! empties its cache usually asks for as much right after. In the books a spare is free, and whoever needs its bytes gets them: it
//! is given up before others' memory is made that has no room beside it. It goes to its own client alone, so that one which still
//! mapped it could spoil nothing but its own values.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

/// What spares may take: this part of a device's limit.
const SHARE: u64 = 8;

#[derive(Debug)]
struct Spare {
    device: u32,
    slot: u32,
    bytes: u64,
    /// All that keeps the bytes alive.
    fd: OwnedFd,
    until: Instant,
}

/// The oldest first.
#[derive(Debug, Default)]
pub(super) struct Spares {
    held: VecDeque<Spare>,
    keep: Duration,
}

impl Spares {
    pub(super) fn new(keep: Duration) -> Self {
        Self { held: VecDeque::new(), keep }
    }

    /// Bytes of a device that are not in the books and not the driver's either.
    pub(super) fn bytes_on(&self, device: u32) -> u64 {
        self.held.iter().filter(|spare| spare.device == device).map(|spare| spare.bytes).sum()
    }

    /// Of these, a client's.
    pub(super) fn bytes_of(&self, device: u32, slot: u32) -> u64 {
        self.held.iter().filter(|spare| (spare.device, spare.slot) == (device, slot)).map(|spare| spare.bytes).sum()
    }

    /// Keeps a chunk, if there is room for it beside the others.
    pub(super) fn keep(&mut self, device: u32, limit: u64, slot: u32, bytes: u64, fd: OwnedFd) {
        let room = limit / SHARE;
        if self.keep.is_zero() || bytes > room {
            return;
        }
        self.give_up(device, (self.bytes_on(device) + bytes).saturating_sub(room));
        self.held.push_back(Spare { device, slot, bytes, fd, until: Instant::now() + self.keep });
    }

    /// A client's own spare of this very size, the one given back last.
    pub(super) fn take(&mut self, device: u32, slot: u32, bytes: u64) -> Option<OwnedFd> {
        let at = self.held.iter().rposition(|spare| (spare.device, spare.slot, spare.bytes) == (device, slot, bytes))?;
        self.held.remove(at).map(|spare| spare.fd)
    }

    /// Gives the oldest of a device up, so many bytes at least where there are as many. Says whether there were any.
    pub(super) fn give_up(&mut self, device: u32, bytes: u64) -> bool {
        let mut given = 0_u64;
        self.held.retain(|spare| {
            let goes = spare.device == device && given < bytes;
            given += if goes { spare.bytes } else { 0 };
            !goes
        });
        given > 0
    }

    /// Gives up what a client gave back that is gone.
    pub(super) fn forget(&mut self, slot: u32) {
        self.held.retain(|spare| spare.slot != slot);
    }

    /// Gives up one whose time is over: one at a time, so that nobody's request waits for more than one. Says of which device it was.
    pub(super) fn expire(&mut self, now: Instant) -> Option<u32> {
        self.due().filter(|due| *due <= now)?;
        self.held.pop_front().map(|spare| spare.device)
    }

    /// When the next one's time is over.
    pub(super) fn due(&self) -> Option<Instant> {
        self.held.front().map(|spare| spare.until)
    }
}
