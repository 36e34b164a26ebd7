//! Loads and stores by streams: in short pieces, each checked.
#![allow(unsafe_code)]

use super::space::{Reach, Space};
use super::words::Words;
use crate::driver::Addr;

/// Bytes moved under one hold of the locks: short, so that an unmap does not wait long.
const PIECE: u64 = 1 << 20;

/// All memory that streams can reach.
#[derive(Debug)]
pub(super) struct Memory {
    pub(super) space: Space,
    pub(super) words: Words,
}

impl Memory {
    /// Whether a copy would be allowed now.
    pub(super) fn admits_copy(&self, dst: Addr, src: Addr, bytes: u64) -> bool {
        let tables = self.space.hold();
        tables.reach(dst, bytes, true) != Reach::Refused && tables.reach(src, bytes, false) != Reach::Refused
    }

    /// Whether a fill would be allowed now: in mapped or registered memory, unlike a copy nowhere else.
    pub(super) fn admits_fill(&self, dst: Addr, bytes: u64) -> bool {
        match self.space.hold().reach(dst, bytes, true) {
            Reach::Mapped => true,
            Reach::Host => self.words.with(dst, bytes, || ()).is_some(),
            Reach::Refused => false,
        }
    }

    /// Copies, unless `halted` or until a piece is refused; whether nothing was refused.
    pub(super) fn copy(&self, dst: Addr, src: Addr, bytes: u64, halted: impl Fn() -> bool) -> bool {
        in_pieces(bytes, halted, |offset, length| {
            let (dst, src) = (dst + offset, src + offset);
            let tables = self.space.hold();
            if tables.reach(dst, length, true) == Reach::Refused || tables.reach(src, length, false) == Reach::Refused {
                return false;
            }
            // SAFETY: each side is mapped with the access needed and stays so while `tables` is held, or is ordinary memory that
            // the caller of `Driver::copy` vouches for. Other processes may write it at the same time: nothing here is a reference.
            unsafe { std::ptr::copy(src as *const u8, dst as *mut u8, length as usize) };
            true
        })
    }

    /// Fills, unless `halted` or until a piece is refused; whether nothing was refused.
    pub(super) fn fill(&self, dst: Addr, byte: u8, bytes: u64, halted: impl Fn() -> bool) -> bool {
        in_pieces(bytes, halted, |offset, length| {
            let dst = dst + offset;
            // SAFETY: called below only while the range is mapped for writing, or registered, and the lock that says so is held.
            let store = || unsafe { std::ptr::write_bytes(dst as *mut u8, byte, length as usize) };
            let tables = self.space.hold();
            match tables.reach(dst, length, true) {
                Reach::Mapped => {
                    store();
                    true
                }
                Reach::Host => self.words.with(dst, length, store).is_some(),
                Reach::Refused => false,
            }
        })
    }
}

fn in_pieces(bytes: u64, halted: impl Fn() -> bool, piece: impl Fn(u64, u64) -> bool) -> bool {
    let mut offset = 0;
    while offset < bytes && !halted() {
        let length = PIECE.min(bytes - offset);
        if !piece(offset, length) {
            return false;
        }
        offset += length;
    }
    true
}
