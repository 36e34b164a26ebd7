//! What malloc does when its stream has no free block that fits.

use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;

use crate::driver::Addr;
use crate::tlsf::{Allocation, Domain, GRANULE};
use crate::window::{Chunk, WindowError};

use super::error::{HeapError, OutOfMemory};
use super::source::GrowError;
use super::{Heap, Inner, Request};

impl Heap {
    pub(super) fn miss(&self, request: Request, place: usize) -> Result<Addr, HeapError> {
        self.source.reap();
        if let Some(addr) = self.search(request, place) {
            return Ok(addr);
        }
        let refused = {
            let _growing = self.growing.lock();
            // Another thread may have grown while this one waited.
            if let Some(addr) = self.search(request, place) {
                return Ok(addr);
            }
            match self.grow(request, place) {
                Ok(addr) => return Ok(addr),
                Err(refused) => refused,
            }
        };
        if let Some(addr) = self.wait_on_others(request, place) {
            return Ok(addr);
        }
        // A limit counts what is reserved, so free chunks are in the way of a larger one.
        self.trim(u64::MAX);
        let _growing = self.growing.lock();
        let result = match self.search(request, place) {
            Some(addr) => Ok(addr),
            None => self.grow(request, place),
        };
        match result {
            Ok(addr) => {
                self.inner.lock().stats.retries += 1;
                Ok(addr)
            }
            Err(HeapError::OutOfMemory(_)) => Err(self.count_out_of_memory(refused)),
            Err(error) => Err(error),
        }
    }

    fn count_out_of_memory(&self, refused: HeapError) -> HeapError {
        let mut inner = self.inner.lock();
        inner.stats.out_of_memory += 1;
        self.publish(&inner);
        refused
    }

    /// What is free for this stream now: its own, then what others have finished with.
    fn search(&self, request: Request, place: usize) -> Option<Addr> {
        let mut inner = self.inner.lock();
        inner.streams.poll();
        inner.settle_waiting();
        let found = if request.bytes > self.config.chunk_bytes {
            inner.free_run(place, request)
        } else {
            let domain = inner.domain_of(place)?;
            inner.tlsf.allocate(domain, request.granules).or_else(|| inner.take_ready(request, place)).map(|found| (found, Vec::new()))
        };
        let (allocation, span) = match found {
            Some(found) => found,
            None => {
                let stream = inner.stream_of(place);
                inner.streams.want_others(stream);
                return None;
            }
        };
        Some(self.take(&mut inner, allocation, place, request, span))
    }

    fn take(&self, inner: &mut Inner, allocation: Allocation, place: usize, request: Request, span: Vec<Chunk>) -> Addr {
        inner.settle(allocation, place, request.bytes);
        if let Some(info) = inner.infos.get_mut(allocation.handle.index() as usize) {
            info.span = span;
        }
        self.publish(inner);
        self.window.base() + u64::from(allocation.offset) * GRANULE
    }

    /// Asks the owner for more, maps it, and takes the block from it. Called with `growing` held and no other lock.
    fn grow(&self, request: Request, place: usize) -> Result<Addr, HeapError> {
        let granularity = self.driver.device().granularity.max(1);
        let exact = request.bytes.div_ceil(granularity).saturating_mul(granularity);
        let reserved = self.inner.lock().stats.all.reserved_bytes.current;
        let room = self.limit.load(Ordering::Relaxed).saturating_sub(reserved);
        if exact > room {
            return Err(self.out_of_memory(
                request.bytes,
                Some(self.limit.load(Ordering::Relaxed)),
                "It is this process's own limit.".to_owned(),
            ));
        }
        let generous = (reserved / self.config.growth_divisor).max(self.config.min_growth).min(self.config.chunk_bytes).min(room);
        let generous = exact.max(generous / granularity * granularity);
        let granted = match self.source.grow(generous) {
            Err(GrowError::OutOfMemory { .. }) if generous > exact => self.source.grow(exact),
            granted => granted,
        };
        let chunks = granted.map_err(|error| match error {
            GrowError::OutOfMemory { limit, detail, .. } => self.out_of_memory(request.bytes, Some(limit), detail),
            GrowError::Unreachable(why) => HeapError::Unreachable(why),
        })?;
        self.map(&chunks)?;
        let mut inner = self.inner.lock();
        let domain = inner.domain_of(place).ok_or_else(|| self.out_of_memory(request.bytes, None, String::new()))?;
        for (chunk, _) in &chunks {
            inner.chunks.push(*chunk);
            inner.stats.reserved(chunk.bytes);
            inner.add_chunk(*chunk, domain, 0);
        }
        inner.stats.growths += 1;
        let found = if request.bytes > self.config.chunk_bytes {
            inner.free_run(place, request)
        } else {
            inner.tlsf.allocate(domain, request.granules).map(|found| (found, Vec::new()))
        };
        inner.live.largest_free = u64::from(inner.tlsf.largest_free()) * GRANULE;
        match found {
            Some((allocation, span)) => Ok(self.take(&mut inner, allocation, place, request, span)),
            None => {
                drop(inner);
                Err(self.out_of_memory(request.bytes, None, "The owner granted less than was asked.".to_owned()))
            }
        }
    }

    fn map(&self, chunks: &[(Chunk, OwnedFd)]) -> Result<(), HeapError> {
        self.window.map(chunks).map_err(|error| {
            let given: Vec<Chunk> = chunks.iter().map(|(chunk, _)| *chunk).collect();
            self.source.give_back(&given);
            match error {
                WindowError::Driver(error) => HeapError::Driver(error),
                error => HeapError::Unreachable(error.to_string()),
            }
        })
    }

    /// Takes what other streams have freed but not finished with, and makes this stream wait for them on the GPU. Not under a
    /// capture, and not while any stream stands behind a timeline that may never come.
    fn wait_on_others(&self, request: Request, place: usize) -> Option<Addr> {
        if request.capturing || self.timelines.as_ref().is_some_and(|timelines| timelines.any_unmet()) {
            return None;
        }
        let mut inner = self.inner.lock();
        let event = inner.streams.record_context().ok()?;
        self.driver.stream_wait_event(request.stream, event).ok()?;
        // What was theirs is ours from here on, and others' only when our stream has come past this moment.
        let (mark, into) = (inner.streams.mark(), inner.domain_of(place)?);
        for other in 0..inner.places.len() {
            let Some(domain) = inner.places.get(other).filter(|p| other != place && p.pool.is_none()).map(|p| p.domain) else { continue };
            if inner.tlsf.remove_domain(domain, into, mark).is_ok() {
                let fresh = inner.tlsf.add_domain();
                if let Some(place) = inner.places.get_mut(other) {
                    place.domain = fresh;
                }
            }
        }
        let stream = inner.stream_of(place);
        inner.streams.want(stream);
        let found = if request.bytes > self.config.chunk_bytes {
            inner.free_run(place, request)
        } else {
            inner.tlsf.allocate(into, request.granules).map(|found| (found, Vec::new()))
        };
        let (allocation, span) = found?;
        Some(self.take(&mut inner, allocation, place, request, span))
    }

    pub(super) fn out_of_memory(&self, asked: u64, limit: Option<u64>, detail: String) -> HeapError {
        let inner = self.inner.lock();
        let device = self.driver.device();
        HeapError::OutOfMemory(Box::new(OutOfMemory {
            asked,
            device: if self.driver.is_host() { device.name.clone() } else { format!("GPU {}", device.ordinal) },
            total: device.total_bytes,
            limit: limit.filter(|limit| *limit != u64::MAX),
            allocated: inner.stats.all.allocated_bytes.current,
            reserved: inner.stats.all.reserved_bytes.current,
            largest_free: u64::from(inner.tlsf.largest_free()) * GRANULE,
            detail,
        }))
    }
}

impl Inner {
    /// Makes a chunk's bytes free for a domain.
    pub(super) fn add_chunk(&mut self, chunk: Chunk, domain: Domain, mark: u64) {
        let (offset, granules) = (chunk.offset / GRANULE, chunk.bytes / GRANULE);
        let added = match (u32::try_from(offset), u32::try_from(granules)) {
            (Ok(offset), Ok(granules)) => self.tlsf.add_region(offset, granules, domain, mark).map_err(|error| error.to_string()),
            _ => Err("it lies beyond 2 TiB".to_owned()),
        };
        if let Err(error) = added {
            tracing::error!(epoch = chunk.epoch, %error, "a chunk could not be used");
        }
    }

    /// A block that another stream has finished with; failing that, everything that others have finished with becomes this
    /// stream's, merges, and is searched once more.
    fn take_ready(&mut self, request: Request, place: usize) -> Option<Allocation> {
        let others: Vec<(Domain, u64)> = self
            .places
            .iter()
            .enumerate()
            .filter(|(i, other)| *i != place && other.pool.is_none())
            .map(|(_, other)| (other.domain, self.streams.done(other.stream)))
            .collect();
        let mine = self.domain_of(place)?;
        if let Some(found) = others.iter().find_map(|(domain, done)| self.tlsf.allocate_ready(*domain, request.granules, *done)) {
            return Some(found);
        }
        if request.capturing {
            return None; // A private pool takes what it needs and no more.
        }
        let moved: u32 = others.iter().map(|(domain, done)| self.tlsf.move_ready(*domain, mine, *done)).sum();
        if moved == 0 {
            return None;
        }
        self.tlsf.allocate(mine, request.granules)
    }

    /// Consecutive free chunks for a block that is larger than one.
    fn free_run(&mut self, place: usize, request: Request) -> Option<(Allocation, Vec<Chunk>)> {
        let mine = self.domain_of(place)?;
        self.chunks.sort_unstable_by_key(|chunk| chunk.offset);
        let mut run: Vec<Chunk> = Vec::new();
        for chunk in &self.chunks {
            let state =
                u32::try_from(chunk.offset / GRANULE).ok().and_then(|offset| self.tlsf.region(offset)).and_then(|region| region.free);
            let usable = state.is_some_and(|(domain, mark)| {
                (domain == mine && !request.capturing)
                    || self.places.iter().any(|p| p.domain == domain && p.pool.is_none() && self.streams.done(p.stream) >= mark)
            });
            if !usable {
                run.clear();
                continue;
            }
            if run.last().is_some_and(|last| last.end() != chunk.offset) {
                run.clear();
            }
            run.push(*chunk);
            // Drop chunks from the front that are not needed.
            let bytes: u64 = run.iter().map(|chunk| chunk.bytes).sum();
            if bytes >= request.bytes {
                break;
            }
        }
        let bytes: u64 = run.iter().map(|chunk| chunk.bytes).sum();
        if bytes < request.bytes {
            return None;
        }
        let first = u32::try_from(run.first()?.offset / GRANULE).ok()?;
        for chunk in &run {
            self.tlsf.remove_region(u32::try_from(chunk.offset / GRANULE).ok()?).ok()?;
        }
        let allocation = self.tlsf.add_used_region(first, u32::try_from(bytes / GRANULE).ok()?).ok()?;
        Some((allocation, run))
    }
}
