//! Growth: asking the owner for chunks, mapping them, and taking a block from them.

use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;

use crate::driver::Addr;
use crate::record::{self, Kind};
use crate::tlsf::{Domain, GRANULE};
use crate::window::{Chunk, WindowError};

use super::error::{human, HeapError};
use super::source::GrowError;
use super::{Heap, Inner, Request};

impl Heap {
    /// Asks the owner for more, maps it, and takes the block from it; `press`: others are to give way. Called with `growing` held
    /// and no other lock.
    pub(super) fn grow(&self, request: Request, press: bool) -> Result<Addr, HeapError> {
        let _span = tracing::debug_span!("growth", bytes = request.bytes).entered();
        let began = request.origin.map(|_| record::now());
        let chunks = self.ask(request, press)?;
        self.map(&chunks, request)?;
        let mut inner = self.whole();
        let inner = &mut *inner;
        let place = inner.place(request.id, request.capturing);
        let domain = inner.domain_of(place);
        for (chunk, _) in &chunks {
            inner.add_chunk(*chunk, domain);
            inner.record_chunk(Kind::Grow, *chunk, began, request.origin);
        }
        inner.meter.growths += 1;
        inner.prepare();
        let found = if request.bytes > self.config.chunk_bytes {
            inner.free_run(place, request, u64::MAX)
        } else {
            inner.tlsf.allocate(domain, request.granules).map(|found| (found, Vec::new()))
        };
        if request.capturing {
            // A private pool keeps what it needs; the rest of the chunk is for everyone.
            let home = inner.domain_of(inner.streams.home(inner.stream_of(place)));
            inner.tlsf.move_ready(domain, home, 0);
        }
        inner.live.largest_free = u64::from(inner.tlsf.largest_free()) * GRANULE;
        match found {
            Some(found) => Ok(self.take(inner, found, place, request)),
            None => Err(HeapError::Unreachable(format!("the owner granted less than {} bytes", request.bytes))),
        }
    }

    fn ask(&self, request: Request, press: bool) -> Result<Vec<(Chunk, OwnedFd)>, HeapError> {
        let unit = self.driver.device().granularity.max(1);
        let exact = request.bytes.div_ceil(unit).saturating_mul(unit);
        let limit = self.limit.load(Ordering::Relaxed);
        let given_up = self.give_up_for(exact, request);
        let reserved = self.inner.lock().meter.reserved_bytes();
        let room = limit.saturating_sub(reserved);
        if exact > room {
            let detail = self.with_holders("It is this process's own limit.");
            return Err(self.out_of_memory(request.bytes, Some(limit), detail));
        }
        let bytes = u64::from(request.granules) * GRANULE;
        let usual = if given_up >= exact { given_up } else { self.growth(bytes, exact, reserved) };
        let generous = usual.min(room / unit * unit);
        let granted = match self.source.grow(generous, press) {
            Err(GrowError::OutOfMemory { .. }) if generous > exact => self.source.grow(exact, press),
            granted => granted,
        };
        granted.map_err(|error| match error {
            GrowError::OutOfMemory { limit, detail, .. } => self.out_of_memory(request.bytes, Some(limit), detail),
            GrowError::Failed(why) => self.failed(request.bytes, &why),
            GrowError::Left => HeapError::Left,
            GrowError::Unreachable(why) => HeapError::Unreachable(why),
        })
    }

    /// A growth that failed, but not for lack of memory.
    fn failed(&self, asked: u64, why: &str) -> HeapError {
        let inner = self.whole();
        let device = self.driver.device();
        HeapError::Failed(format!(
            "{} could not be allocated on {} ({}). {why} This process has {} allocated and {} reserved from millpond's arena.",
            human(asked),
            device.name,
            device.id,
            human(inner.meter.allocated_bytes()),
            human(inner.meter.reserved_bytes())
        ))
    }

    /// What the heap itself has to say of a lack of memory, with who holds what.
    pub(super) fn with_holders(&self, detail: &str) -> String {
        let holders = self.source.holders();
        if holders.is_empty() {
            return detail.to_owned();
        }
        format!("{detail} {holders}")
    }

    /// How much to ask for, for a block of `bytes`, `exact` in whole units. A large block gets a chunk of its own, exactly its size. Else
    /// the chunk holds a whole number of such blocks, as many as a growth of the usual size does: blocks of one size come in numbers, and
    /// a rest that is too small for one more would lie idle.
    fn growth(&self, bytes: u64, exact: u64, reserved: u64) -> u64 {
        if exact >= self.config.own_chunk {
            return exact;
        }
        let usual = (reserved / self.config.growth_divisor.max(1)).max(self.config.min_growth).min(self.config.chunk_bytes);
        let unit = self.driver.device().granularity.max(1);
        exact.max((usual / bytes * bytes).div_ceil(unit) * unit)
    }

    /// Maps chunks, or gives them back.
    fn map(&self, chunks: &[(Chunk, OwnedFd)], request: Request) -> Result<(), HeapError> {
        let reachable =
            chunks.iter().all(|(chunk, _)| chunk.offset.is_multiple_of(GRANULE) && chunk.end() / GRANULE <= u64::from(u32::MAX));
        let mapped = if reachable { self.window.map(chunks) } else { Ok(()) };
        if reachable && mapped.is_ok() {
            return Ok(());
        }
        let given: Vec<Chunk> = chunks.iter().map(|(chunk, _)| *chunk).collect();
        self.source.give_back(&given);
        Err(match mapped {
            Err(WindowError::Driver(error)) if error.is_out_of_memory() => {
                self.out_of_memory(request.bytes, None, self.with_holders(&format!("{error}.")))
            }
            Err(WindowError::Driver(error)) => {
                let bytes: u64 = given.iter().map(|chunk| chunk.bytes).sum();
                let why = format!("{} that the owner granted could not be mapped, and went back: {error}.", human(bytes));
                self.failed(request.bytes, &self.with_holders(&why))
            }
            Err(error) => HeapError::Unreachable(error.to_string()),
            Ok(()) => HeapError::Unreachable("a chunk lies beyond the 2 TiB of a window that blocks can lie in".to_owned()),
        })
    }
}

impl Inner {
    /// Takes a mapped chunk in, free for a domain.
    pub(super) fn add_chunk(&mut self, chunk: Chunk, domain: Domain) {
        let offset = (chunk.offset / GRANULE) as u32;
        self.index.reach((chunk.end() / GRANULE) as u32);
        self.chunks.insert(offset, chunk);
        self.meter.reserve(chunk.bytes);
        self.add_free(chunk, domain, 0);
    }

    /// Makes a chunk's bytes free for a domain.
    pub(super) fn add_free(&mut self, chunk: Chunk, domain: Domain, mark: u64) {
        let (offset, granules) = ((chunk.offset / GRANULE) as u32, (chunk.bytes / GRANULE) as u32);
        if let Err(error) = self.tlsf.add_region(offset, granules, domain, mark) {
            tracing::error!(epoch = chunk.epoch, %error, "a chunk could not be used");
        }
    }
}
