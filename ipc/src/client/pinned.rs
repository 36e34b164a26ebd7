//! The pinned-host tier: copies between a GPU and the host arena at the bus's own rate.
//!
//! One value's two copies overlap: [`Client::copy_out`] queues the sender's in pieces, each with a signal behind it, so that the
//! message may leave at once; [`Client::copy_in`] waits for each piece at the receiver and queues it there. READY of the block is
//! the last signal of each stream that copies, so whoever takes it as host memory waits for all of it.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;
use std::time::Duration;

use millpond_allocator::driver::{Addr, Driver, Platform, Stream};
use millpond_allocator::pins::{Copied, Pins, Step, UnderWay, LEAST};
use millpond_allocator::timeline::Signal;
use millpond_allocator::window::Window;
use parking_lot::Mutex;

use super::device::{Device, Opened};
use super::due::Due;
use super::error::Error;
use super::pause::deadline;
use super::{Client, Place};

/// A part of a value that leaves by host memory: one past its last byte, and the signal that the bytes up to there since the part
/// before are in place.
pub type Piece = (u64, Signal);

/// A value that is on its way to host memory.
#[derive(Debug)]
struct Leaving {
    host: Addr,
    bytes: u64,
    ready: Vec<Signal>,
    way: UnderWay,
}

/// The values that are on their way to host memory, until [`Client::copied_out`].
#[derive(Debug, Default)]
pub(super) struct Departures {
    next: AtomicU64,
    by_number: Mutex<HashMap<u64, Leaving>>,
}

impl Departures {
    fn add(&self, leaving: Leaving) -> u64 {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        self.by_number.lock().insert(number, leaving);
        number
    }

    /// What must be reached before a range of host memory is what was copied there; nothing where no copy is under way.
    pub(super) fn ready(&self, addr: Addr, bytes: u64) -> Vec<Signal> {
        let leaving = self.by_number.lock();
        let touched = leaving.values().filter(|one| one.host < addr.saturating_add(bytes) && addr < one.host + one.bytes);
        touched.flat_map(|one| one.ready.iter().copied()).collect()
    }

    /// Waits for all: before the process leaves.
    pub(super) fn finish(&self, pins: &Pins) {
        let all: Vec<Leaving> = self.by_number.lock().drain().map(|(_, one)| one).collect();
        all.into_iter().for_each(|one| drop(pins.finish(one.way)));
    }
}

/// How much host memory is registered with the driver at one time, unless `MILLPOND_PINNED_BYTES` says otherwise: a quarter of the
/// machine's, and no more than this.
const PINNED_CEILING: u64 = 8 << 30;

/// The bound at the start.
pub(super) fn default_limit() -> u64 {
    let asked = std::env::var("MILLPOND_PINNED_BYTES").ok().and_then(|text| text.trim().parse().ok());
    asked.unwrap_or_else(|| {
        let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
        let total = text.lines().find_map(|line| line.strip_prefix("MemTotal:")?.split_whitespace().next()?.parse::<u64>().ok());
        total.map_or(PINNED_CEILING, |kib| (kib * 1024 / 4).min(PINNED_CEILING))
    })
}

impl Client {
    /// A GPU by ordinal, with a context, whether the arena serves it or not.
    ///
    /// # Errors
    /// [`Error::Unsupported`] where there is none such, and what the driver says.
    pub fn gpu(&self, ordinal: u32) -> Result<Arc<dyn Driver>, Error> {
        self.check_alive()?;
        if let Ok(device) = self.device(Place::Ordinal(ordinal)) {
            return Ok(device.open()?.driver.clone());
        }
        if let Some(known) = self.gpus.lock().get(&ordinal) {
            return Ok(known.clone());
        }
        let platform = self.shared.platforms.cuda()?;
        let info = platform.devices()?.into_iter().find(|info| info.ordinal == ordinal);
        let info = info.ok_or_else(|| Error::Unsupported(format!("this process sees no GPU {ordinal}")))?;
        let driver = platform.open(info.id)?;
        driver.attach_context()?;
        Ok(self.gpus.lock().entry(ordinal).or_insert(driver).clone())
    }

    /// Copies between a GPU's memory and host memory, one of `to` and `from` each, behind all earlier work of a stream. Returns
    /// when the bytes are there. The host arena's memory is registered with the driver on the way, and stays so, within a bound.
    ///
    /// # Errors
    /// As [`Client::gpu`], and for a stream that is being captured.
    pub fn copy_by_host(&self, place: Place, to: Addr, from: Addr, bytes: u64, stream: Stream) -> Result<Copied, Error> {
        let driver = self.any_driver(place)?;
        let side = |addr| Some((addr, self.host_chunks(addr, bytes)?));
        let (host, chunks) = side(to).or_else(|| side(from)).unwrap_or_default();
        Ok(self.shared.pins.copy(&driver, (to, from, bytes), host, &chunks, stream)?)
    }

    /// The driver of a device, of a GPU by its ordinal that the arena does not serve too.
    fn any_driver(&self, place: Place) -> Result<Arc<dyn Driver>, Error> {
        match place {
            Place::Ordinal(ordinal) => self.gpu(ordinal),
            place => self.driver(place),
        }
    }

    /// The mapped chunks of the host arena that a range lies in.
    fn host_chunks(&self, addr: Addr, bytes: u64) -> Option<Vec<(Addr, u64)>> {
        let hosts = self.devices.iter().filter(|device| device.is_host());
        hosts.filter_map(Device::if_open).find_map(|opened| opened.mapped_at(addr, bytes))
    }

    /// Queues the copy of device memory to a block of the host arena, behind all earlier work of a stream, and returns: a number
    /// for [`Client::copied_out`], which must follow before either side is used again or freed; the pieces, each with its signal
    /// queued already, for [`Client::copy_in`]; and what was queued. A message with the block may leave at once: its READY is the
    /// copy's end.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a device that the arena does not serve, what the driver says, and for a stream that is being
    /// captured.
    pub fn copy_out(&self, place: Place, to: Addr, from: Addr, bytes: u64, stream: Stream) -> Result<(u64, Vec<Piece>, Copied), Error> {
        self.check_alive()?;
        let opened = self.device(place)?.open()?;
        let chunks = self.host_chunks(to, bytes);
        let chunks = chunks.ok_or_else(|| Error::InvalidArgument(format!("{to:#x} is not in the host arena")))?;
        let pins = &self.shared.pins;
        let mut pieces: Vec<Piece> = Vec::new();
        let (way, queued) = pins.start(&opened.driver, (to, from, bytes), to, &chunks, stream, |step| {
            if let Step::After(end, lane) = step {
                pieces.push((end, opened.timelines.signal(lane)?));
            }
            Ok::<(), Error>(())
        })?;
        if let Err(error) = queued {
            let _ = pins.finish(way);
            return Err(error);
        }
        // The last of each lane covers those before it.
        let mut ready: Vec<Signal> = Vec::new();
        for (_, signal) in pieces.iter().rev() {
            if !ready.iter().any(|other| other.timeline == signal.timeline) {
                ready.push(*signal);
            }
        }
        let copied = way.copied();
        Ok((self.departures.add(Leaving { host: to, bytes, ready, way }), pieces, copied))
    }

    /// Waits for the end of a copy of [`Client::copy_out`].
    ///
    /// # Errors
    /// For a number that is none's, and what the driver says.
    pub fn copied_out(&self, number: u64) -> Result<(), Error> {
        let leaving = self.departures.by_number.lock().remove(&number);
        let leaving = leaving.ok_or_else(|| Error::InvalidArgument(format!("no copy {number} is under way")))?;
        Ok(self.shared.pins.finish(leaving.way).map(drop)?)
    }

    /// Copies a received value from host memory to a device, each piece as soon as its signal is reached, behind all earlier work
    /// of a stream. `range`: the value's first byte in the import, its length, and how many of its bytes are copied already.
    /// Returns how far it came, and what was copied: less than all where the time was up before a piece was there.
    ///
    /// # Errors
    /// [`Error::PeerDied`] if a piece never comes, [`Error::Protocol`] for pieces that are not those of the value, and as
    /// [`Client::gpu`].
    #[allow(clippy::too_many_arguments)]
    pub fn copy_in(
        &self,
        place: Place,
        import: u64,
        (offset, bytes, done): (u64, u64, u64),
        to: Addr,
        stream: Stream,
        pieces: &[Piece],
        timeout: Option<Duration>,
    ) -> Result<(u64, Copied), Error> {
        let driver = self.any_driver(place)?;
        let held = self.imports.with(import, |import| import.clone())?;
        if held.lost {
            return Err(self.died(&held));
        }
        check_pieces(pieces, bytes)?;
        if done > bytes || offset.checked_add(bytes).is_none_or(|end| end > held.bytes) {
            return Err(Error::Protocol(format!("bytes {offset}+{done} to {offset}+{bytes} of a value of {}", held.bytes)));
        }
        let device = self.device_at(held.device)?;
        if !device.is_host() {
            return Err(Error::InvalidArgument("the value is in a GPU's memory".to_owned()));
        }
        let from = self.mapped(import, &held, device.open()?)? + offset + done;
        let chunks = self.host_chunks(from, bytes - done).unwrap_or_default();
        let until = deadline(timeout);
        let mut next = 0;
        let range = (to + done, from, bytes - done);
        let (way, queued) = self.shared.pins.start(&driver, range, from, &chunks, stream, |step| {
            let Step::Before(end) = step else { return Ok(()) };
            while let Some((_, signal)) = pieces.get(next).filter(|_| next == 0 || pieces.get(next - 1).is_some_and(|p| p.0 < done + end)) {
                // The value's READY is the last signals of the same timelines. One that is not there was reached when it came.
                match held.ready.iter().find(|due| due.signal.timeline == signal.timeline) {
                    Some(last) => self.await_due(&held, Due { signal: *signal, ..*last }, until)?,
                    None => self.await_until(*signal, until)?,
                }
                next += 1;
            }
            Ok(())
        })?;
        let copied = self.shared.pins.finish(way)?;
        match queued {
            // Its maker's death is told to the import while the last true values stand.
            _ if self.imports.with(import, |import| import.lost)? => return Err(self.died(&held)),
            Err(Error::PeerDied(_)) => return Err(self.died(&held)),
            Err(Error::Timeout(_)) | Ok(()) => {}
            Err(error) => return Err(error),
        }
        Ok((done + copied.pinned + copied.pageable, copied))
    }

    /// Bytes of host memory that are registered with the driver now.
    #[must_use]
    pub fn pinned_bytes(&self) -> u64 {
        self.shared.pins.bytes()
    }

    /// Whether nothing of an import is left here: it was let go of, and no stream can reach it any more.
    #[must_use]
    pub fn is_parted(&self, import: u64) -> bool {
        self.imports.is_parted(import)
    }
}

/// Pieces come from another process: they must rise and end where the value does.
fn check_pieces(pieces: &[Piece], bytes: u64) -> Result<(), Error> {
    let mut before = 0;
    let rising = pieces.iter().all(|(end, _)| std::mem::replace(&mut before, *end) < *end);
    if rising && before == bytes && pieces.len() as u64 <= bytes / LEAST + 1 {
        return Ok(());
    }
    Err(Error::Protocol(format!("{} pieces that end at byte {before} of {bytes}", pieces.len())))
}

impl Opened {
    /// The mapped chunks of any window that a range touches, as (first byte, bytes); `None` where it is not a window's.
    fn mapped_at(&self, addr: Addr, bytes: u64) -> Option<Vec<(Addr, u64)>> {
        let spans = |window: &Window| {
            let chunks = window.chunks_in(addr - window.base(), bytes);
            chunks.iter().map(|chunk| (window.base() + chunk.offset, chunk.bytes)).collect()
        };
        let own = self.heap.window();
        if own.offset_of(addr).is_some() {
            return Some(spans(own));
        }
        self.peer_window_at(addr).map(|window| spans(&window))
    }
}
