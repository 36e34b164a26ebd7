//! Blocks larger than a chunk: consecutive chunks, whole, contiguous in address.

use crate::tlsf::{Allocation, GRANULE};
use crate::window::Chunk;

use super::{Inner, Request};

impl Inner {
    /// The run of consecutive free chunks that wastes least, and no more than `spare` bytes, as one block.
    pub(super) fn free_run(&mut self, place: u32, request: Request, spare: u64) -> Option<(Allocation, Vec<Chunk>)> {
        let run = self.find_run(place, request.bytes)?;
        let bytes: u64 = run.iter().map(|chunk| chunk.bytes).sum();
        if bytes - request.bytes > spare {
            return None;
        }
        let first = u32::try_from(run.first()?.offset / GRANULE).ok()?;
        let granules = u32::try_from(bytes / GRANULE).ok()?;
        for chunk in &run {
            self.tlsf.remove_region(u32::try_from(chunk.offset / GRANULE).ok()?).ok()?;
        }
        let allocation = self.tlsf.add_used_region(first, granules).ok()?;
        Some((allocation, run))
    }

    fn find_run(&self, place: u32, bytes: u64) -> Option<Vec<Chunk>> {
        let mine = self.domain_of(place);
        let usable = |offset: u32| {
            let Some((domain, mark)) = self.tlsf.region(offset).and_then(|region| region.free) else { return false };
            domain == mine || self.is_over(domain, mark)
        };
        let mut run = std::collections::VecDeque::<Chunk>::new();
        let (mut sum, mut best): (u64, Option<(u64, Vec<Chunk>)>) = (0, None);
        for (offset, chunk) in &self.chunks {
            if run.back().is_some_and(|last| last.end() != chunk.offset) || !usable(*offset) {
                run.clear();
                sum = 0;
            }
            if !usable(*offset) {
                continue;
            }
            run.push_back(*chunk);
            sum += chunk.bytes;
            // Chunks in front that are not needed.
            while let Some(front) = run.front().filter(|front| sum - front.bytes >= bytes) {
                sum -= front.bytes;
                run.pop_front();
            }
            if sum >= bytes && best.as_ref().is_none_or(|(least, _)| sum < *least) {
                best = Some((sum, run.iter().copied().collect()));
            }
        }
        best.map(|(_, run)| run)
    }
}
