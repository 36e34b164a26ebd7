//! Growth over free chunks: chunks that are wholly free, but each too small for the block that is missing, go back in
//! exchange for one that is large enough.
//!
//! A program whose sizes rise leaves chunks behind that nothing fits any more. A block never lies across two chunks, so they
//! cannot be joined as they are; but the owner takes them back and grants their bytes as one. Such a growth makes the chunks
//! fewer and leaves what is reserved as it is, or raises it: it never shrinks. So a program that repeats itself comes to an end
//! of growing.
//!
//! Only chunks that no queued work can reach are given up, and nobody waits for that: the others stay, for the next time.

use std::cmp::Reverse;

use crate::tlsf::GRANULE;
use crate::window::Chunk;

use super::{Heap, Inner, Request};

/// The most chunks that one growth gives up: each takes some 50 µs to unmap.
const MOST: usize = 16;
/// Free chunks are worth the exchange if they make up at least this part of the block (4: a quarter).
const WORTH: u64 = 4;

impl Heap {
    /// Gives up free chunks that a growth for a block of `exact` bytes of chunks is to replace. Returns how many bytes those were:
    /// all that there are, or at least `exact`. Called with `growing` held and no other lock.
    pub(super) fn give_up_for(&self, exact: u64, request: Request) -> u64 {
        if request.capturing || exact > self.config.chunk_bytes {
            return 0;
        }
        let (over, busy) = {
            let inner = self.whole();
            // Most heaps that grow have no chunk that is wholly free, and hundreds that are not.
            if (inner.tlsf.free_granules() - inner.tlsf.split().1) * GRANULE < exact.div_ceil(WORTH) {
                return 0;
            }
            inner.idle_bytes(exact)
        };
        if over + busy < exact.div_ceil(WORTH) {
            return 0;
        }
        if over < exact && busy > 0 && !request.looked {
            // What is not known to be over may be so by now, or soon. If not, the next growth will know.
            self.glance(true);
        }
        let taken = self.whole().take_for(exact, self.config.chunk_bytes);
        self.hand_back(taken)
    }
}

impl Inner {
    /// Bytes of the chunks of [`Inner::idle`]: those that no queued work can reach, and the others.
    fn idle_bytes(&self, exact: u64) -> (u64, u64) {
        self.idle(exact).fold((0, 0), |(over, busy), (chunk, is_over)| match is_over {
            true => (over + chunk.bytes, busy),
            false => (over, busy + chunk.bytes),
        })
    }

    /// Chunks below `exact` bytes that are wholly free and nobody's private ones, with whether no queued work can reach them.
    fn idle(&self, exact: u64) -> impl Iterator<Item = (Chunk, bool)> + '_ {
        self.chunks.iter().filter(move |(_, chunk)| chunk.bytes < exact).filter_map(|(offset, chunk)| {
            let (domain, mark) = self.tlsf.region(*offset)?.free?;
            self.shared_place(domain).map(|_| (*chunk, self.is_over(domain, mark)))
        })
    }

    /// Takes chunks out of the heap that together make one of `exact` bytes, or little more and at most `cap`; all that there
    /// are, if those are fewer bytes.
    fn take_for(&mut self, exact: u64, cap: u64) -> Vec<Chunk> {
        let mut idle: Vec<Chunk> = self.idle(exact).filter(|(_, over)| *over).map(|(chunk, _)| chunk).collect();
        if idle.iter().map(|chunk| chunk.bytes).sum::<u64>() < exact.div_ceil(WORTH) {
            return Vec::new();
        }
        idle.sort_by_key(|chunk| (Reverse(chunk.bytes), chunk.offset));
        let (mut taken, mut sum) = (Vec::new(), 0);
        while sum < exact && taken.len() < MOST && !idle.is_empty() {
            // The smallest that completes it, else the largest.
            let at = idle.iter().rposition(|chunk| sum + chunk.bytes >= exact).unwrap_or(0);
            let chunk = idle.remove(at);
            if sum + chunk.bytes <= cap && self.tlsf.remove_region((chunk.offset / GRANULE) as u32).is_ok() {
                sum += chunk.bytes;
                taken.push(chunk);
            }
        }
        self.forget_chunks(&taken);
        self.meter.trims += u64::from(!taken.is_empty());
        taken
    }
}
