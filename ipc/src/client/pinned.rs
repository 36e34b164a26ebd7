//! The pinned-host tier: copies between a GPU and the host arena at the bus's own rate.

use std::sync::Arc;

use millpond_allocator::driver::{Addr, Driver, Platform, Stream};
use millpond_allocator::pins::Copied;
use millpond_allocator::window::Window;

use super::device::{Device, Opened};
use super::error::Error;
use super::{Client, Place};

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
    pub fn copy_by_host(&self, ordinal: u32, to: Addr, from: Addr, bytes: u64, stream: Stream) -> Result<Copied, Error> {
        let driver = self.gpu(ordinal)?;
        let hosts = || self.devices.iter().filter(|device| device.is_host()).filter_map(Device::if_open);
        let side = |addr| hosts().find_map(|opened| Some((addr, opened.mapped_at(addr, bytes)?)));
        let (host, chunks) = side(to).or_else(|| side(from)).unwrap_or_default();
        Ok(self.shared.pins.copy(&driver, (to, from, bytes), host, &chunks, stream)?)
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
