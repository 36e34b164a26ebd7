//! Giving whole free chunks back to the owner.

use crate::tlsf::GRANULE;
use crate::window::Chunk;

use super::Heap;

impl Heap {
    /// Gives back free chunks that no queued work can reach, up to about `bytes`; returns how many bytes went back. What
    /// streams may still use goes later, from [`Heap::tick`].
    pub fn trim(&self, bytes: u64) -> u64 {
        let taken = {
            let mut inner = self.inner.lock();
            inner.streams.poll();
            inner.settle_waiting();
            let mut taken: Vec<Chunk> = Vec::new();
            let mut sum = 0;
            // The highest first: low addresses pack.
            let mut chunks = inner.chunks.clone();
            chunks.sort_unstable_by_key(|chunk| std::cmp::Reverse(chunk.offset));
            for chunk in chunks {
                if sum >= bytes {
                    break;
                }
                let Ok(offset) = u32::try_from(chunk.offset / GRANULE) else { continue };
                let Some((domain, mark)) = inner.tlsf.region(offset).and_then(|region| region.free) else { continue };
                let over = mark == 0 || inner.places.iter().any(|p| p.domain == domain && inner.streams.done(p.stream) >= mark);
                if !over {
                    inner.trim_pending = true;
                } else if inner.tlsf.remove_region(offset).is_ok() {
                    sum += chunk.bytes;
                    taken.push(chunk);
                }
            }
            inner.chunks.retain(|chunk| !taken.contains(chunk));
            for chunk in &taken {
                inner.stats.unreserved(chunk.bytes);
            }
            inner.stats.trims += u64::from(!taken.is_empty());
            inner.live.largest_free = u64::from(inner.tlsf.largest_free()) * GRANULE;
            if inner.trim_pending && !inner.streams.context_pending() {
                let _ = inner.streams.record_context();
            }
            self.publish(&inner);
            taken
        };
        let mut gone = Vec::with_capacity(taken.len());
        for chunk in taken {
            if let Err(error) = self.window.unmap(chunk.epoch) {
                tracing::error!(epoch = chunk.epoch, %error, "a chunk could not be unmapped");
            }
            gone.push(chunk);
        }
        if !gone.is_empty() {
            self.source.give_back(&gone);
        }
        gone.iter().map(|chunk| chunk.bytes).sum()
    }

    /// [`Heap::trim`], once everything queued so far is over if that is soon: for `torch.cuda.empty_cache()`, which users
    /// call after a synchronisation. Never waits.
    pub fn empty_cache(&self) -> u64 {
        {
            let mut inner = self.inner.lock();
            if !inner.streams.context_pending() {
                let _ = inner.streams.record_context();
            }
        }
        self.trim(u64::MAX)
    }
}
