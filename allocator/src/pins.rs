//! Host memory that a device copies at the bus's own rate: registered with its driver once, in slabs, and reused.
//!
//! The memory is that of host windows, shared already; only its registration is this process's. A copy goes in pieces of at most one
//! slab, alternately on two streams, and while one piece is under way the next slab is registered. Its caller may wait before each
//! piece and signal after it, so that two processes work on one value at the same time. A slab is forgotten before its chunk is
//! unmapped ([`Unmapping`]), since the driver would go on reaching the old pages.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::Arc;

use parking_lot::Mutex;
use rustix::mm::{madvise, Advice};

use crate::driver::{Addr, Capture, CuResult, Driver, DriverError, Event, Result, Stream};
use crate::window::Unmapping;

/// Bytes of a slab, from the start of its chunk; also the most of a piece. Pinning costs some 20 GB/s, a copy of a slab half a
/// millisecond.
pub const SLAB: u64 = 32 << 20;
/// The least of a piece: queueing one costs some microseconds, copying it seventy.
pub const PIECE: u64 = 4 << 20;
/// How many threads find pages for memory that was never touched, at most.
const POPULATORS: usize = 8;
/// A value is cut into so many pieces where that is between [`PIECE`] and [`SLAB`].
const PIECES: u64 = 16;
/// Copies of less are not worth a slab's registration.
pub const LEAST: u64 = 256 << 10;

/// What a copy did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Copied {
    /// Bytes that went from or to registered memory.
    pub pinned: u64,
    /// Bytes that went from or to memory that is not: slower.
    pub pageable: u64,
}

/// Threads that find pages for memory that was never touched.
#[derive(Debug)]
struct Populating(Vec<std::thread::JoinHandle<()>>);

impl Populating {
    fn start(slabs: Vec<(Addr, u64)>, threads: usize) -> Self {
        let next = Arc::new((AtomicUsize::new(0), slabs));
        let one = |next: Arc<(AtomicUsize, Vec<(Addr, u64)>)>| {
            move || {
                while let Some((start, bytes)) = next.1.get(next.0.fetch_add(1, Ordering::Relaxed)) {
                    // SAFETY: the range is a part of a mapped chunk, which the copy keeps mapped until this has been joined; no
                    // byte of it changes.
                    let done = unsafe { madvise((*start as *mut u8).cast(), *bytes as usize, Advice::LinuxPopulateWrite) };
                    if done.is_err() {
                        return; // an old kernel, memory mapped for reading: whoever touches it finds the pages
                    }
                }
            }
        };
        let spawn = |_| std::thread::Builder::new().name("millpond-pages".to_owned()).stack_size(64 << 10).spawn(one(next.clone())).ok();
        Self((0..threads).filter_map(spawn).collect())
    }
}

impl Drop for Populating {
    fn drop(&mut self) {
        self.0.drain(..).for_each(|thread| drop(thread.join()));
    }
}

/// Where a copy is, for the one who asked for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// The bytes up to this one are about to be queued.
    Before(u64),
    /// They are queued, on this stream.
    After(u64, Stream),
}

/// A copy that is queued, or was as far as it came. Ended by [`Pins::finish`], which must be called.
#[derive(Debug)]
#[must_use]
pub struct UnderWay {
    driver: Arc<dyn Driver>,
    lanes: Lanes,
    used: Vec<Addr>,
    copied: Copied,
}

impl UnderWay {
    /// What is queued.
    #[must_use]
    pub const fn copied(&self) -> Copied {
        self.copied
    }
}

/// One registered slab.
#[derive(Debug)]
struct Slab {
    bytes: u64,
    /// Who registered it, and so must end that.
    driver: Arc<dyn Driver>,
    used: u64,
    users: u32,
}

/// What became of a slab that a copy needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Entry {
    /// It is registered, and has one user more.
    Registered,
    /// The bound is reached by slabs in use.
    Full,
    /// The driver would not.
    Refused,
}

#[derive(Debug, Default)]
struct Slabs {
    by_addr: BTreeMap<Addr, Slab>,
    bytes: u64,
    clock: u64,
    /// Why the last registration failed.
    refused: Option<DriverError>,
}

/// Two streams of one device, and the events that order them behind another's.
#[derive(Debug, Clone, Copy)]
struct Lanes {
    device: crate::driver::DeviceId,
    streams: [Stream; 2],
    event: Event,
}

impl Lanes {
    fn synchronize(&self, driver: &Arc<dyn Driver>) -> Result<()> {
        self.streams.iter().try_for_each(|stream| driver.stream_synchronize(*stream))
    }
}

/// The registered host memory of this process.
#[derive(Debug)]
pub struct Pins {
    slabs: Mutex<Slabs>,
    hosts: Mutex<Vec<Arc<dyn Driver>>>,
    lanes: Mutex<Vec<Lanes>>,
    limit: AtomicU64,
}

impl Pins {
    /// Nothing is registered yet. `limit`: bytes that may be at one time.
    #[must_use]
    pub fn new(limit: u64) -> Self {
        Self { slabs: Mutex::default(), hosts: Mutex::default(), lanes: Mutex::default(), limit: AtomicU64::new(limit) }
    }

    /// Host memory comes from this driver, which unmaps it when it is dropped: not before this, and not at all where something is
    /// registered then.
    pub fn lies_in(&self, host: Arc<dyn Driver>) {
        self.hosts.lock().push(host);
    }

    /// Sets the bound; what is above it goes as others are needed.
    pub fn set_limit(&self, bytes: u64) {
        self.limit.store(bytes, Ordering::Relaxed);
    }

    /// Bytes that are registered.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.slabs.lock().bytes
    }

    /// Why the last slab could not be registered, if that ever happened.
    #[must_use]
    pub fn refused(&self) -> Option<DriverError> {
        self.slabs.lock().refused.clone()
    }

    /// Copies between a device and host memory, behind all earlier work of `after`, and returns when the bytes are there.
    /// `host`: the host side's first address, `chunks`: the mapped chunks that it lies in, as (first byte, bytes), by address.
    ///
    /// # Errors
    /// What the driver says; [`CuResult::STREAM_CAPTURE_UNSUPPORTED`] where `after` is being captured.
    pub fn copy(
        &self,
        driver: &Arc<dyn Driver>,
        range: (Addr, Addr, u64),
        host: Addr,
        chunks: &[(Addr, u64)],
        after: Stream,
    ) -> Result<Copied> {
        let (under_way, queued) = self.start(driver, range, host, chunks, after, |_| Ok::<(), DriverError>(()))?;
        let over = self.finish(under_way);
        queued.and(over)
    }

    /// Queues a copy, piece by piece; `each` is called before and after each piece and ends it by an error. What was queued by then
    /// is under way all the same. For the arguments see [`Pins::copy`].
    ///
    /// # Errors
    /// Where nothing was queued; then there is nothing to finish.
    #[allow(clippy::type_complexity)]
    pub fn start<E: From<DriverError>>(
        &self,
        driver: &Arc<dyn Driver>,
        (dst, src, bytes): (Addr, Addr, u64),
        host: Addr,
        chunks: &[(Addr, u64)],
        after: Stream,
        mut each: impl FnMut(Step) -> std::result::Result<(), E>,
    ) -> std::result::Result<(UnderWay, std::result::Result<(), E>), E> {
        if driver.stream_capture(after)? != Capture::None {
            return Err(DriverError::Call { call: "copy through host memory", result: CuResult::STREAM_CAPTURE_UNSUPPORTED }.into());
        }
        let lanes = self.take_lanes(driver)?;
        let mut way = UnderWay { driver: driver.clone(), lanes, used: Vec::new(), copied: Copied::default() };
        let queued = self.queue(&mut way, (dst, src, bytes), host, chunks, after, &mut each);
        Ok((way, queued))
    }

    /// Waits until what was queued is over.
    ///
    /// # Errors
    /// What the driver says.
    pub fn finish(&self, way: UnderWay) -> Result<Copied> {
        // Whatever was queued reaches both sides: nothing is given back before it has run.
        let over = way.lanes.synchronize(&way.driver);
        self.leave(&way.used);
        self.lanes.lock().push(way.lanes);
        over.map(|()| way.copied)
    }

    fn queue<E: From<DriverError>>(
        &self,
        way: &mut UnderWay,
        (dst, src, bytes): (Addr, Addr, u64),
        host: Addr,
        chunks: &[(Addr, u64)],
        after: Stream,
        each: &mut impl FnMut(Step) -> std::result::Result<(), E>,
    ) -> std::result::Result<(), E> {
        let (driver, Lanes { streams, event, .. }) = (way.driver.clone(), way.lanes);
        let _populating = if bytes >= LEAST { self.populate(host, bytes, chunks) } else { None };
        driver.event_record(event, after)?;
        streams.iter().try_for_each(|stream| driver.stream_wait_event(*stream, event))?;
        let most = (bytes / PIECES).next_multiple_of(2 << 20).clamp(PIECE, SLAB);
        let mut at = 0;
        for stream in streams.into_iter().cycle() {
            if at >= bytes {
                break;
            }
            let slab = slab_of(host + at, chunks);
            let piece = slab.map_or(SLAB, |(start, size)| start + size - (host + at)).min(most).min(bytes - at);
            each(Step::Before(at + piece))?;
            let pinned = match slab.filter(|_| bytes >= LEAST) {
                Some((start, size)) => self.enter_or_make_room(way, start, size)?,
                None => false,
            };
            if pinned {
                way.copied.pinned += piece;
                way.used.extend(slab.map(|(start, _)| start));
            } else {
                way.copied.pageable += piece;
            }
            driver.copy(dst + at, src + at, piece, stream)?;
            at += piece;
            each(Step::After(at, stream))?;
        }
        Ok(())
    }

    /// [`Pins::enter`]; where the bound is reached by this copy itself, what it has done with is let go of first.
    fn enter_or_make_room(&self, way: &mut UnderWay, start: Addr, bytes: u64) -> Result<bool> {
        match self.enter(&way.driver, start, bytes) {
            Entry::Full if !way.used.is_empty() && bytes <= self.limit.load(Ordering::Relaxed) => {
                way.lanes.synchronize(&way.driver)?;
                self.leave(&std::mem::take(&mut way.used));
                Ok(self.enter(&way.driver, start, bytes) == Entry::Registered)
            }
            entry => Ok(entry == Entry::Registered),
        }
    }

    /// Has the system find pages for what is not registered yet, on several threads ahead of the one that registers: memory that
    /// nobody touched before costs far more than its registration.
    fn populate(&self, host: Addr, bytes: u64, chunks: &[(Addr, u64)]) -> Option<Populating> {
        let limit = self.limit.load(Ordering::Relaxed);
        let slabs = self.slabs.lock();
        let mut fresh = Vec::new();
        let mut at = host;
        while at < host + bytes {
            let (start, size) = slab_of(at, chunks)?;
            if !slabs.by_addr.contains_key(&start) {
                fresh.push((start, size));
            }
            at = start + size;
        }
        drop(slabs);
        if fresh.len() < 2 || limit < SLAB {
            return None;
        }
        let threads = std::thread::available_parallelism().map_or(1, |n| n.get() / 2).clamp(1, POPULATORS);
        Some(Populating::start(fresh, threads))
    }

    /// Registers a slab if it is not, and counts a user of it.
    fn enter(&self, driver: &Arc<dyn Driver>, start: Addr, bytes: u64) -> Entry {
        let mut slabs = self.slabs.lock();
        slabs.clock += 1;
        let clock = slabs.clock;
        if let Some(slab) = slabs.by_addr.get_mut(&start) {
            slab.used = clock;
            slab.users += 1;
            return Entry::Registered;
        }
        let limit = self.limit.load(Ordering::Relaxed);
        while slabs.bytes + bytes > limit {
            let oldest = slabs.by_addr.iter().filter(|(_, slab)| slab.users == 0).min_by_key(|(_, slab)| slab.used).map(|(at, _)| *at);
            let Some(oldest) = oldest else { return Entry::Full };
            slabs.drop_one(oldest);
        }
        // SAFETY: the range is a part of a mapped chunk that a block or an import in use keeps mapped during this copy, and it is
        // unregistered in `before_unmap`.
        match unsafe { driver.host_register(start as *mut u8, bytes as usize) } {
            Ok(_) => {
                slabs.bytes += bytes;
                slabs.by_addr.insert(start, Slab { bytes, driver: driver.clone(), used: clock, users: 1 });
                Entry::Registered
            }
            Err(error) => {
                if slabs.refused.is_none() {
                    tracing::warn!(%error, bytes, "host memory could not be pinned: copies through it are slower");
                }
                slabs.refused = Some(error);
                Entry::Refused
            }
        }
    }

    fn leave(&self, used: &[Addr]) {
        let mut slabs = self.slabs.lock();
        for start in used {
            if let Some(slab) = slabs.by_addr.get_mut(start) {
                slab.users = slab.users.saturating_sub(1);
            }
        }
    }

    fn take_lanes(&self, driver: &Arc<dyn Driver>) -> Result<Lanes> {
        let device = driver.device().id;
        let mut idle = self.lanes.lock();
        if let Some(at) = idle.iter().position(|lanes| lanes.device == device) {
            return Ok(idle.swap_remove(at));
        }
        drop(idle);
        Ok(Lanes { device, streams: [driver.stream_create()?, driver.stream_create()?], event: driver.event_create()? })
    }
}

impl Drop for Pins {
    fn drop(&mut self) {
        // The driver is not called here, and would go on reaching the old pages at addresses that something else is mapped at later.
        if !self.slabs.get_mut().by_addr.is_empty() {
            std::mem::take(self.hosts.get_mut()).into_iter().for_each(std::mem::forget);
        }
    }
}

impl Slabs {
    fn drop_one(&mut self, start: Addr) {
        let Some(slab) = self.by_addr.remove(&start) else { return };
        self.bytes -= slab.bytes;
        if let Err(error) = slab.driver.host_unregister(start as *mut u8) {
            tracing::debug!(%error, start, "host memory could not be unregistered");
        }
    }
}

impl Unmapping for Pins {
    fn before_unmap(&self, addr: Addr, bytes: u64) {
        let mut slabs = self.slabs.lock();
        let starts: Vec<Addr> = slabs.by_addr.range(addr..addr + bytes).map(|(start, _)| *start).collect();
        starts.into_iter().for_each(|start| slabs.drop_one(start));
    }
}

/// The slab that an address lies in: from its chunk's start in steps of [`SLAB`].
fn slab_of(addr: Addr, chunks: &[(Addr, u64)]) -> Option<(Addr, u64)> {
    let (start, bytes) = chunks.iter().find(|(start, bytes)| addr >= *start && addr - start < *bytes)?;
    let offset = (addr - start) / SLAB * SLAB;
    Some((start + offset, SLAB.min(bytes - offset)))
}
