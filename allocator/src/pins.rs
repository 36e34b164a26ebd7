//! Host memory that a device copies at the bus's own rate: registered with its driver once, in slabs, and reused.
//!
//! The memory is that of host windows, shared already; only its registration is this process's. A copy goes in pieces of one slab
//! each, alternately on two streams, and while one piece is under way the next slab is registered. A slab is forgotten before
//! its chunk is unmapped ([`Unmapping`]), since the driver would go on reaching the old pages.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;

use parking_lot::Mutex;

use crate::driver::{Addr, Capture, CuResult, Driver, DriverError, Event, Result, Stream};
use crate::window::Unmapping;

/// Bytes of a slab, from the start of its chunk; also of a piece. Pinning costs some 20 GB/s, a copy of a slab half a millisecond.
pub const SLAB: u64 = 32 << 20;
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

/// One registered slab.
#[derive(Debug)]
struct Slab {
    bytes: u64,
    /// Who registered it, and so must end that.
    driver: Arc<dyn Driver>,
    used: u64,
    users: u32,
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
#[derive(Debug)]
struct Lanes {
    device: crate::driver::DeviceId,
    streams: [Stream; 2],
    event: Event,
}

/// The registered host memory of this process.
#[derive(Debug)]
pub struct Pins {
    slabs: Mutex<Slabs>,
    lanes: Mutex<Vec<Lanes>>,
    limit: AtomicU64,
}

impl Pins {
    /// Nothing is registered yet. `limit`: bytes that may be at one time.
    #[must_use]
    pub fn new(limit: u64) -> Self {
        Self { slabs: Mutex::default(), lanes: Mutex::default(), limit: AtomicU64::new(limit) }
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
        (dst, src, bytes): (Addr, Addr, u64),
        host: Addr,
        chunks: &[(Addr, u64)],
        after: Stream,
    ) -> Result<Copied> {
        if driver.stream_capture(after)? != Capture::None {
            return Err(DriverError::Call { call: "copy through host memory", result: CuResult::STREAM_CAPTURE_UNSUPPORTED });
        }
        let lanes = self.take_lanes(driver)?;
        let queued = self.queue(driver, &lanes, (dst, src, bytes), host, chunks, after);
        // Whatever was queued reaches both sides: nothing is given back before it has run.
        let over = lanes.streams.iter().try_for_each(|stream| driver.stream_synchronize(*stream));
        let (copied, used) = match queued {
            Ok((copied, used)) => (Ok(copied), used),
            Err((error, used)) => (Err(error), used),
        };
        self.leave(&used);
        self.lanes.lock().push(lanes);
        over.and(copied)
    }

    #[allow(clippy::type_complexity)]
    fn queue(
        &self,
        driver: &Arc<dyn Driver>,
        lanes: &Lanes,
        (dst, src, bytes): (Addr, Addr, u64),
        host: Addr,
        chunks: &[(Addr, u64)],
        after: Stream,
    ) -> std::result::Result<(Copied, Vec<Addr>), (DriverError, Vec<Addr>)> {
        let (mut copied, mut used) = (Copied::default(), Vec::new());
        let ordered = driver
            .event_record(lanes.event, after)
            .and_then(|()| lanes.streams.iter().try_for_each(|stream| driver.stream_wait_event(*stream, lanes.event)));
        if let Err(error) = ordered {
            return Err((error, used));
        }
        let (mut at, mut turn) = (0, 0_usize);
        while at < bytes {
            let slab = slab_of(host + at, chunks);
            let piece = slab.map_or(SLAB, |(start, size)| start + size - (host + at)).min(bytes - at);
            let pinned = slab.is_some_and(|(start, size)| bytes >= LEAST && self.enter(driver, start, size));
            if pinned {
                copied.pinned += piece;
                used.extend(slab.map(|(start, _)| start));
            } else {
                copied.pageable += piece;
            }
            let stream = lanes.streams.get(turn % 2).copied().unwrap_or_default();
            if let Err(error) = driver.copy(dst + at, src + at, piece, stream) {
                return Err((error, used));
            }
            at += piece;
            turn += 1;
        }
        Ok((copied, used))
    }

    /// Registers a slab if it is not, and counts a user of it; false where it cannot be.
    fn enter(&self, driver: &Arc<dyn Driver>, start: Addr, bytes: u64) -> bool {
        let mut slabs = self.slabs.lock();
        slabs.clock += 1;
        let clock = slabs.clock;
        if let Some(slab) = slabs.by_addr.get_mut(&start) {
            slab.used = clock;
            slab.users += 1;
            return true;
        }
        let limit = self.limit.load(Ordering::Relaxed);
        while slabs.bytes + bytes > limit {
            let oldest = slabs.by_addr.iter().filter(|(_, slab)| slab.users == 0).min_by_key(|(_, slab)| slab.used).map(|(at, _)| *at);
            let Some(oldest) = oldest else { return false };
            slabs.drop_one(oldest);
        }
        // SAFETY: the range is a part of a mapped chunk that a block or an import in use keeps mapped during this copy, and it is
        // unregistered in `before_unmap`.
        match unsafe { driver.host_register(start as *mut u8, bytes as usize) } {
            Ok(_) => {
                slabs.bytes += bytes;
                slabs.by_addr.insert(start, Slab { bytes, driver: driver.clone(), used: clock, users: 1 });
                true
            }
            Err(error) => {
                if slabs.refused.is_none() {
                    tracing::warn!(%error, bytes, "host memory could not be pinned: copies through it are slower");
                }
                slabs.refused = Some(error);
                false
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
