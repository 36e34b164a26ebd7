//! What malloc does when its stream has no free block that fits.
//!
//! In this order: what receivers have given back, what other streams have finished with, one look whether the device is idle
//! (then everything is finished with), growth where there is room at once, what other streams will have finished with (this
//! stream waits on the GPU), giving back whole free chunks and a growth for which the owner asks idle clients to give way, and,
//! last, the same once this stream has run dry. Every step starts from the lock anew, and none waits for the owner with it held.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::driver::{Addr, Capture};
use crate::tlsf::{Allocation, GRANULE};
use crate::window::Chunk;

use super::error::{HeapError, OutOfMemory};
use super::{is_legacy, Heap, Inner, Request};

/// How often a growth looks whether the one before it waits for others to give way.
const LOOK: Duration = Duration::from_millis(1);

/// A block, with the chunks under it where it is larger than one.
pub(super) type Found = (Allocation, Vec<Chunk>);

impl Heap {
    #[cold]
    pub(super) fn miss(&self, mut request: Request) -> Result<Addr, HeapError> {
        // A capture that nobody announced: its stream must not be recorded, waited for or made to wait. Of others than the legacy
        // stream this is known by now.
        request.capturing =
            request.capturing || (is_legacy(request.stream) && self.driver.stream_capture(request.stream)? != Capture::None);
        self.source.reap();
        if let Some(addr) = self.search(request) {
            return Ok(addr);
        }
        if !request.capturing && self.has_others() {
            let found = self.glance(false);
            request.looked = found.is_some();
            if let Some(addr) = found.filter(|anything| *anything).and_then(|_| self.search(request)) {
                return Ok(addr);
            }
        }
        if let Some(addr) = self.grow_at_once(request) {
            return Ok(addr);
        }
        let retried = self.wait_on_others(request).map_or_else(|| self.give_back_and_grow(request), Ok);
        let mut inner = self.whole();
        match &retried {
            Ok(_) => {
                inner.meter.retries += 1;
                // What was to be given back later was for this block.
                inner.trim_wanted = 0;
            }
            Err(HeapError::OutOfMemory(_)) => {
                inner.meter.out_of_memory += 1;
                inner.record_out_of_memory(request.bytes, request.id.0, request.origin);
            }
            Err(_) => {}
        }
        self.publish(&inner);
        retried
    }

    /// A limit counts what is reserved, so free chunks are in the way of new ones.
    fn give_back_and_grow(&self, request: Request) -> Result<Addr, HeapError> {
        self.trim(u64::MAX);
        match self.press(request) {
            Err(HeapError::OutOfMemory(_)) if self.drain(request) => {
                if let Some(addr) = self.search(request) {
                    return Ok(addr);
                }
                self.trim(u64::MAX);
                self.press(request)
            }
            result => result,
        }
    }

    /// One thread grows at a time: another may have grown while this one waited. Where that one waits for others to give way,
    /// there is no room to be had at once.
    fn grow_at_once(&self, request: Request) -> Option<Addr> {
        let _growing = loop {
            if let Some(growing) = self.growing.try_lock_for(LOOK) {
                break growing;
            }
            if self.pressing.load(Ordering::Relaxed) {
                return None;
            }
        };
        self.search(request).or_else(|| self.grow(request, false).ok())
    }

    /// Growth that others are asked to give way for.
    fn press(&self, request: Request) -> Result<Addr, HeapError> {
        let _growing = self.growing.lock();
        self.search(request).map_or_else(
            || {
                self.pressing.store(true, Ordering::Relaxed);
                let grown = self.grow(request, true);
                self.pressing.store(false, Ordering::Relaxed);
                grown
            },
            Ok,
        )
    }

    /// Whether bytes may lie where this stream does not look first.
    fn has_others(&self) -> bool {
        let inner = self.whole();
        inner.places.len() - inner.vacant.len() > 2 || inner.any_waiting() || !inner.tlsf.is_empty(inner.domain_of(0))
    }

    /// What is free for this stream now: its own, then what others have finished with.
    fn search(&self, request: Request) -> Option<Addr> {
        let mut inner = self.whole();
        inner.streams.poll();
        inner.settle_waiting();
        let place = inner.place(request.id, request.capturing);
        let found = if request.bytes > self.config.chunk_bytes {
            let spare = request.bytes / 8;
            let run = inner.free_run(place, request, spare);
            run.or_else(|| if inner.move_ready(request, place) { inner.free_run(place, request, spare) } else { None })
        } else {
            let domain = inner.domain_of(place);
            let own = inner.tlsf.allocate(domain, request.granules);
            own.or_else(|| inner.take_ready(request, place)).map(|found| (found, Vec::new()))
        };
        if found.is_none() {
            let stream = inner.stream_of(place);
            inner.streams.want_others(stream);
        }
        Some(self.take(&mut inner, found?, place, request))
    }

    pub(super) fn take(&self, inner: &mut Inner, found: Found, place: u32, request: Request) -> Addr {
        let (allocation, span) = found;
        inner.settle(allocation, place, request.bytes, request.origin);
        if !span.is_empty() {
            if let Some(info) = inner.infos.get_mut(allocation.handle.index() as usize) {
                info.more.get_or_insert_default().span = span;
            }
        }
        self.publish(inner);
        self.window.base() + u64::from(allocation.offset) * GRANULE
    }

    /// Takes what other streams have freed but not finished with, and makes this stream wait for them on the GPU. Not in a
    /// capture, and not while any stream stands behind a timeline that may never come.
    fn wait_on_others(&self, request: Request) -> Option<Addr> {
        if request.capturing {
            return None;
        }
        let mut inner = self.whole();
        match &self.timelines {
            Some(timelines) => timelines.unless_unmet(|| self.wait_on(&mut inner, request)).flatten(),
            None => self.wait_on(&mut inner, request),
        }
    }

    fn wait_on(&self, inner: &mut Inner, request: Request) -> Option<Addr> {
        let place = inner.place(request.id, request.capturing);
        if request.bytes <= self.config.chunk_bytes {
            if let Some(allocation) = self.wait_for_one(inner, request, place) {
                return Some(self.take(inner, (allocation, Vec::new()), place, request));
            }
        }
        let (mark, event) = inner.streams.record_context()?;
        self.driver.stream_wait_event(request.stream, event).ok()?;
        inner.record_wait(request);
        let found = inner.take_everything(request, place, mark, request.bytes > self.config.chunk_bytes);
        Some(self.take(inner, found?, place, request))
    }

    /// A block of another stream that an event in flight covers: this stream waits for no more than that.
    fn wait_for_one(&self, inner: &mut Inner, request: Request, place: u32) -> Option<Allocation> {
        for (_, stream, domain) in inner.others(place) {
            let covered = inner.streams.covered(stream);
            let Some(found) = inner.tlsf.allocate_ready(domain, request.granules, covered) else { continue };
            let waits = found.mark <= inner.streams.done(stream)
                || inner.streams.event_for(stream, found.mark).is_some_and(|e| self.driver.stream_wait_event(request.stream, e).is_ok());
            if waits {
                inner.record_wait(request);
                return Some(found);
            }
            let _ = inner.tlsf.free(found.handle, domain, found.mark);
        }
        None
    }

    /// Waits, with a bound, until this stream has come past this moment, so that the chunks behind its work can be given back.
    /// The last resort before an error that would end the program; holds no lock; `false` where it may not wait.
    fn drain(&self, request: Request) -> bool {
        if request.capturing || self.any_unmet() {
            return false;
        }
        let (stream, mark) = {
            let mut inner = self.whole();
            let place = inner.place(request.id, false);
            let stream = inner.stream_of(place);
            let mark = inner.streams.mark();
            if inner.streams.record(stream, request.stream).is_err() {
                return false;
            }
            (stream, mark)
        };
        let start = Instant::now();
        for pause in 0.. {
            let mut inner = self.whole();
            inner.streams.poll();
            if inner.streams.done(stream) >= mark {
                break;
            }
            drop(inner);
            if start.elapsed() >= self.config.drain {
                return false;
            }
            std::thread::sleep(Duration::from_micros(20 * (pause + 1).min(25)));
        }
        self.glance(false);
        true
    }

    fn any_unmet(&self) -> bool {
        self.timelines.as_ref().is_some_and(|timelines| timelines.unless_unmet(|| ()).is_none())
    }

    pub(super) fn out_of_memory(&self, asked: u64, limit: Option<u64>, detail: String) -> HeapError {
        let inner = self.whole();
        let device = self.driver.device();
        HeapError::OutOfMemory(Box::new(OutOfMemory {
            asked,
            device: if self.driver.is_host() { device.name.clone() } else { format!("GPU {}", device.ordinal) },
            total: device.total_bytes,
            limit: limit.filter(|limit| *limit != u64::MAX),
            allocated: inner.meter.allocated_bytes(),
            reserved: inner.meter.reserved_bytes(),
            largest_free: u64::from(inner.tlsf.largest_free()) * GRANULE,
            detail,
        }))
    }
}

impl Inner {
    /// A block that another stream has finished with; failing that, everything that others have finished with becomes this
    /// stream's, merges, and is searched once more.
    fn take_ready(&mut self, request: Request, place: u32) -> Option<Allocation> {
        let mine = self.domain_of(place);
        for other in 0..self.places.len() as u32 {
            let Some((stream, domain)) = self.other(other, place) else { continue };
            if let Some(found) = self.tlsf.allocate_ready(domain, request.granules, self.streams.done(stream)) {
                return Some(found);
            }
        }
        if !self.move_ready(request, place) {
            return None;
        }
        if request.capturing {
            let stream = self.stream_of(place);
            return self.tlsf.allocate_ready(self.domain_of(self.streams.home(stream)), request.granules, self.streams.done(stream));
        }
        self.tlsf.allocate(mine, request.granules)
    }

    /// Everything that others have finished with becomes this stream's, and merges. A private pool takes what it needs and no
    /// more, so in a capture it goes to the stream's home outside. False if there was nothing.
    fn move_ready(&mut self, request: Request, place: u32) -> bool {
        let into = if request.capturing { self.streams.home(self.stream_of(place)) } else { place };
        let domain = self.domain_of(into);
        let mut moved = 0;
        for other in 0..self.places.len() as u32 {
            let Some((stream, from)) = self.other(other, into) else { continue };
            moved += self.tlsf.move_ready(from, domain, self.streams.done(stream));
        }
        moved > 0
    }

    /// The stream waits for everything up to `mark`: one block of another's; failing that, all that is free becomes this
    /// stream's, and merges.
    fn take_everything(&mut self, request: Request, place: u32, mark: u64, larger_than_chunk: bool) -> Option<Found> {
        let others = self.others(place);
        if !larger_than_chunk {
            let one = others.iter().find_map(|(_, _, domain)| self.tlsf.allocate_ready(*domain, request.granules, mark));
            if let Some(found) = one {
                return Some((found, Vec::new()));
            }
        }
        // Others may have it back when that event, or a later one of this stream, is over.
        let mine = self.domain_of(place);
        self.settle_waiting_into(place);
        for (other, _, domain) in others {
            if self.tlsf.remove_domain(domain, mine, mark).is_ok() {
                let fresh = self.tlsf.add_domain();
                if let Some(place) = self.places.get_mut(other as usize) {
                    place.domain = fresh;
                }
            }
        }
        let stream = self.stream_of(place);
        self.streams.want(stream);
        if larger_than_chunk {
            return self.free_run(place, request, u64::MAX);
        }
        self.tlsf.allocate(mine, request.granules).map(|found| (found, Vec::new()))
    }
}
