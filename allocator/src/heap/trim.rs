//! Giving whole free chunks back to the owner.

use crate::record::{origin, Kind};
use crate::tlsf::GRANULE;
use crate::window::Chunk;

use super::{Heap, Inner};

/// Looks at a context-wide event, before the device counts as busy: some 100 µs, where a growth takes hundreds. An idle device
/// takes 10 to say so, and longer where it comes from another process's work.
const GLANCES: usize = 48;

impl Heap {
    /// Gives back free chunks that no queued work can reach, up to about `bytes`; returns how many bytes went back. What
    /// streams may still use goes later, from [`Heap::tick`].
    pub fn trim(&self, bytes: u64) -> u64 {
        // Who finds nothing to give back knows that nothing is on its way by another thread: its process may leave.
        let _trimming = self.trimming.lock();
        let taken = {
            let mut inner = self.whole();
            inner.streams.poll();
            inner.settle_waiting();
            inner.merge_ready();
            let taken = inner.take_free_chunks(bytes);
            inner.meter.trims += u64::from(!taken.is_empty());
            inner.live.largest_free = u64::from(inner.tlsf.largest_free()) * GRANULE;
            if inner.trim_wanted > 0 {
                inner.streams.record_unhanded();
            }
            self.publish(&inner);
            taken
        };
        self.hand_back(taken)
    }

    /// [`Heap::trim`] for another process that has no room: what was queued so far counts as over if it is. Returns how many bytes
    /// went back or will, from [`Heap::tick`], when the work that can still reach them is over.
    pub fn give_way(&self, bytes: u64) -> u64 {
        self.glance(false);
        let gone = self.trim(bytes);
        gone.saturating_add(self.owed())
    }

    /// Bytes that are to go back as soon as no queued work can reach them.
    #[must_use]
    pub fn owed(&self) -> u64 {
        self.inner.lock().trim_wanted
    }

    /// Unmaps chunks that the heap does not know any more and gives them to the owner. Returns how many bytes that was: a
    /// chunk that cannot be unmapped is the heap's again.
    pub(super) fn hand_back(&self, taken: Vec<Chunk>) -> u64 {
        let mut gone = Vec::with_capacity(taken.len());
        for chunk in taken {
            match self.window.unmap(chunk.epoch) {
                Ok(_) => gone.push(chunk),
                Err(error) => {
                    tracing::error!(epoch = chunk.epoch, %error, "a chunk could not be unmapped");
                    let mut inner = self.whole();
                    let limbo = inner.domain_of(0);
                    inner.add_chunk(chunk, limbo);
                    inner.record_chunk(Kind::Grow, chunk, None, origin());
                }
            }
        }
        if !gone.is_empty() {
            self.source.give_back(&gone);
        }
        gone.iter().map(|chunk| chunk.bytes).sum()
    }

    /// [`Heap::trim`] of everything, once what was queued so far is over if that is now: for `torch.cuda.empty_cache()`,
    /// which users call after a synchronisation. Never waits.
    pub fn empty_cache(&self) -> u64 {
        self.glance(false);
        self.trim(u64::MAX)
    }

    /// Looks whether everything queued so far is over already, and says whether anything new was found to be; `None`: it did not look.
    /// An event in flight says that the device is busy, and a newer one would say no more: it is looked at where `again`.
    pub(super) fn glance(&self, again: bool) -> Option<bool> {
        {
            let mut inner = self.whole();
            inner.streams.poll();
            match inner.streams.context_pending() {
                true if !again => return None,
                true => {}
                false => drop(inner.streams.record_context()?),
            }
        }
        for _ in 0..GLANCES {
            let mut inner = self.inner.lock();
            if inner.streams.poll_context() {
                return Some(true);
            }
            if !inner.streams.context_pending() {
                break;
            }
            drop(inner);
            (0..32).for_each(|_| std::hint::spin_loop());
        }
        Some(false)
    }
}

impl Inner {
    /// Where several streams share chunks: what they have finished with becomes everybody's, and merges.
    fn merge_ready(&mut self) {
        let (others, limbo) = (self.others(0), self.domain_of(0));
        if others.len() > 1 || !self.tlsf.is_empty(limbo) {
            for (_, stream, domain) in others {
                self.tlsf.move_ready(domain, limbo, self.streams.done(stream));
            }
        }
    }

    /// Takes whole free chunks that no queued work can reach, the highest first, since low addresses pack. Notes how much
    /// more there would be to take later.
    fn take_free_chunks(&mut self, bytes: u64) -> Vec<Chunk> {
        let (mut taken, mut sum, mut later) = (Vec::new(), 0_u64, 0_u64);
        for (offset, chunk) in self.chunks.iter().rev() {
            if sum >= bytes {
                break;
            }
            let Some(region) = self.tlsf.region(*offset) else { continue };
            let over = region.free.is_some_and(|(domain, mark)| self.is_over(domain, mark));
            if over && self.tlsf.remove_region(*offset).is_ok() {
                sum += chunk.bytes;
                taken.push(*chunk);
            } else if let Some(stream) = self.left_to(*offset) {
                later = later.saturating_add(u64::from(region.granules) * GRANULE);
                self.streams.want(stream);
            }
        }
        self.forget_chunks(&taken);
        self.trim_wanted = bytes.saturating_sub(sum).min(later);
        taken
    }

    /// Where nobody has a block of a region, nor a receiver one, and no private pool: a stream whose work it waits for.
    fn left_to(&self, region: u32) -> Option<u32> {
        let mut stream = None;
        for (index, block) in self.tlsf.indexed_blocks(region) {
            let place = if block.used {
                let freed = self.infos.get(index as usize).filter(|info| info.freed && info.pins == 0)?;
                self.places.get(freed.place as usize).filter(|place| place.is_shared())
            } else {
                self.shared_place(block.domain)
            };
            stream = Some(place?.stream);
        }
        stream
    }

    /// The books without chunks whose regions are gone.
    pub(super) fn forget_chunks(&mut self, gone: &[Chunk]) {
        for chunk in gone {
            self.chunks.remove(&((chunk.offset / GRANULE) as u32));
            self.meter.unreserve(chunk.bytes);
            self.record_chunk(Kind::Trim, *chunk, None, origin());
        }
    }
}
