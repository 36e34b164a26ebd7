//! One device as a client has it: its driver, its own heap, the windows of others.
//!
//! Opened at first use, so that a process that only passes values on has no context and maps nothing, and so that a device
//! mask set after `attach` still counts.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use millpond_allocator::driver::host::{HostConfig, HostPlatform};
use millpond_allocator::driver::{cuda::CudaPlatform, Access, Addr, DeviceId, Driver, DriverError, Platform};
use millpond_allocator::heap::{ChunkSource, GrowError, Heap, HeapConfig, Live, LiveSink};
use millpond_allocator::timeline::{Slots, Timelines, Word};
use millpond_allocator::window::{Chunk, Window};
use parking_lot::Mutex;

use super::error::Error;
use super::lease::Leases;
use super::link::Link;
use crate::control::{Control, LiveRow, MAX_DEVICES};
use crate::wire::{self, Answer, DeviceGrant, Peer, Request, MAX_FDS};

/// How long growth may wait for the owner, which itself waits for others to trim, with a shorter bound.
const GROW_TIMEOUT: Duration = Duration::from_secs(10);
/// How long any other call may take.
pub(super) const CALL_TIMEOUT: Duration = Duration::from_secs(10);

/// The platforms, loaded when first asked for.
#[derive(Debug, Default)]
pub(super) struct Platforms {
    host: Mutex<Option<Arc<HostPlatform>>>,
    cuda: Mutex<Option<Arc<CudaPlatform>>>,
}

impl Platforms {
    pub(super) fn cuda(&self) -> Result<Arc<CudaPlatform>, DriverError> {
        let mut cuda = self.cuda.lock();
        if let Some(cuda) = &*cuda {
            return Ok(cuda.clone());
        }
        let loaded = Arc::new(CudaPlatform::load()?);
        *cuda = Some(loaded.clone());
        Ok(loaded)
    }

    pub(super) fn open(&self, id: DeviceId) -> Result<Arc<dyn Driver>, Error> {
        if id.host_number().is_none() {
            return Ok(self.cuda()?.open(id)?);
        }
        let mut host = self.host.lock();
        let platform = match &*host {
            Some(platform) => platform.clone(),
            None => {
                let config = HostConfig::from_env().map_err(|error| Error::InvalidArgument(error.to_string()))?;
                host.insert(Arc::new(HostPlatform::new(config))).clone()
            }
        };
        Ok(platform.open(id)?)
    }
}

/// What a device needs of its client.
#[derive(Debug, Clone)]
pub(super) struct Shared {
    pub(super) link: Arc<Link>,
    pub(super) control: Arc<Control>,
    pub(super) leases: Arc<Leases>,
    pub(super) slots: Arc<Slots>,
    pub(super) platforms: Arc<Platforms>,
    pub(super) me: u32,
}

/// The words of the control memory, for [`Timelines`].
#[derive(Debug)]
struct Words(Arc<Control>);

impl millpond_allocator::timeline::TimelineMemory for Words {
    fn word(&self, timeline: u32) -> Option<&Word> {
        self.0.timeline(timeline)
    }
    fn range(&self) -> (*mut u8, usize) {
        self.0.timeline_range()
    }
}

/// The heap's figures go to the client's row.
#[derive(Debug)]
struct Sink {
    control: Arc<Control>,
    me: u32,
    device: u32,
}

impl LiveSink for Sink {
    #[inline]
    fn publish(&self, live: &Live) {
        if let Some(row) = self.control.live(self.me, self.device) {
            row.write(&LiveRow {
                allocated: live.allocated,
                peak: live.peak,
                blocks: live.blocks,
                requested: live.requested,
                largest_free: live.largest_free,
                leased_out: live.leased_out,
                leased_in: live.leased_in,
                out_of_memory: live.out_of_memory,
            });
        }
    }
}

/// Chunks come from the owner.
#[derive(Debug)]
struct Source {
    shared: Shared,
    device: u32,
    window: u32,
}

impl ChunkSource for Source {
    fn grow(&self, bytes: u64) -> Result<Vec<(Chunk, OwnedFd)>, GrowError> {
        let call = Request::Grow { device: self.device, bytes };
        let unreachable = |error: Error| GrowError::Unreachable(error.to_string());
        let (answer, mut fds) = self.shared.link.call(call, GROW_TIMEOUT).map_err(|error| match error {
            Error::OutOfMemory(detail) => GrowError::OutOfMemory { limit: u64::MAX, reserved: 0, detail },
            error => unreachable(error),
        })?;
        let Answer::Granted { chunks } = answer else { return Err(unreachable(Error::unexpected(&answer))) };
        while fds.len() < chunks.len() {
            let epochs = chunks.iter().skip(fds.len()).take(MAX_FDS).map(|chunk| chunk.epoch).collect();
            let more = import(&self.shared.link, self.window, epochs).map_err(unreachable)?;
            if more.is_empty() {
                return Err(GrowError::Unreachable("the owner sent fewer descriptors than chunks".to_owned()));
            }
            fds.extend(more.into_iter().map(|(_, fd)| fd));
        }
        Ok(chunks.into_iter().map(from_wire).zip(fds).collect())
    }

    fn give_back(&self, chunks: &[Chunk]) {
        let _ = self.shared.link.tell(Request::Release { epochs: chunks.iter().map(|chunk| chunk.epoch).collect() });
    }

    fn reap(&self) {
        self.shared.leases.reap();
    }
}

fn from_wire(chunk: wire::Chunk) -> Chunk {
    Chunk { epoch: chunk.epoch, offset: chunk.offset, bytes: chunk.bytes }
}

/// Descriptors of chunks of any window.
fn import(link: &Link, window: u32, epochs: Vec<u64>) -> Result<Vec<(Chunk, OwnedFd)>, Error> {
    let asked = epochs.len();
    let (answer, fds) = link.call(Request::Import { window, epochs }, CALL_TIMEOUT)?;
    match answer {
        Answer::Granted { chunks } if chunks.len() == fds.len() && chunks.len() == asked => {
            Ok(chunks.into_iter().map(from_wire).zip(fds).collect())
        }
        answer => Err(Error::unexpected(&answer)),
    }
}

/// One device as this client has it.
#[derive(Debug)]
pub(super) struct Device {
    pub(super) grant: DeviceGrant,
    pub(super) id: DeviceId,
    shared: Shared,
    opened: Mutex<Option<Arc<Opened>>>,
}

/// A device in use: a context, a heap.
#[derive(Debug)]
pub(super) struct Opened {
    pub(super) driver: Arc<dyn Driver>,
    pub(super) heap: Arc<Heap>,
    pub(super) timelines: Arc<Timelines>,
    pub(super) index: u32,
    pub(super) window: u32,
    shared: Shared,
    window_bytes: u64,
    peers: Mutex<HashMap<u32, Arc<Window>>>,
}

impl Device {
    pub(super) fn new(grant: DeviceGrant, shared: Shared) -> Result<Self, Error> {
        let id = grant.device.parse().map_err(|error| Error::Protocol(format!("the owner's device: {error}")))?;
        if grant.index as usize >= MAX_DEVICES || grant.granularity == 0 || grant.window_bytes == 0 {
            return Err(Error::Protocol(format!("the owner's figures for {id} cannot be: {grant:?}")));
        }
        Ok(Self { grant, id, shared, opened: Mutex::default() })
    }

    pub(super) fn is_host(&self) -> bool {
        self.id.host_number().is_some()
    }

    /// Only if it is open.
    pub(super) fn if_open(&self) -> Option<Arc<Opened>> {
        self.opened.lock().clone()
    }

    /// Opens it at first use.
    pub(super) fn open(&self) -> Result<Arc<Opened>, Error> {
        let mut opened = self.opened.lock();
        if let Some(opened) = &*opened {
            return Ok(opened.clone());
        }
        let driver = self.shared.platforms.open(self.id)?;
        driver.attach_context()?;
        let memory = Arc::new(Words(self.shared.control.clone()));
        let timelines = Arc::new(Timelines::new(driver.clone(), memory, self.shared.slots.clone())?);
        let window = Window::reserve(driver.clone(), self.grant.window_bytes, Access::ReadWrite)?;
        let source = Arc::new(Source { shared: self.shared.clone(), device: self.grant.index, window: self.grant.window });
        let sink = Arc::new(Sink { control: self.shared.control.clone(), me: self.shared.me, device: self.grant.index });
        let config = HeapConfig { chunk_bytes: self.grant.chunk_bytes, ..HeapConfig::default() };
        let heap = Arc::new(Heap::new(driver.clone(), window, source, Some(sink), Some(timelines.clone()), config));
        let made = Arc::new(Opened {
            driver,
            heap,
            timelines,
            index: self.grant.index,
            window: self.grant.window,
            shared: self.shared.clone(),
            window_bytes: self.grant.window_bytes,
            peers: Mutex::default(),
        });
        *opened = Some(made.clone());
        Ok(made)
    }
}

impl Opened {
    /// Where a range of a window is mapped here, after what is missing of it has been mapped. `epochs`: of the chunks that
    /// the range touches, as the sender names them.
    pub(super) fn resolve(&self, window: u32, offset: u64, bytes: u64, epochs: &[u64]) -> Result<Addr, Error> {
        if offset.checked_add(bytes).is_none_or(|end| end > self.window_bytes) {
            return Err(Error::Protocol(format!("bytes {offset} to {offset}+{bytes} do not lie in a window of {}", self.window_bytes)));
        }
        if window == self.window {
            check(&self.heap.window().chunks_in(offset, bytes), offset, bytes, epochs)?;
            return Ok(self.heap.window().base() + offset);
        }
        let peer = self.peer(window)?;
        if bytes == 0 {
            return Ok(peer.base() + offset);
        }
        let there = peer.chunks_in(offset, bytes);
        if check(&there, offset, bytes, epochs).is_ok() {
            return Ok(peer.base() + offset);
        }
        // What is mapped under another epoch is gone at its producer, and nothing of it is held here: it would not be gone.
        let stale: Vec<u64> = there.iter().map(|chunk| chunk.epoch).filter(|epoch| !epochs.contains(epoch)).collect();
        self.unmap(&peer, &stale)?;
        let missing: Vec<u64> = epochs.iter().copied().filter(|epoch| !there.iter().any(|chunk| chunk.epoch == *epoch)).collect();
        for part in missing.chunks(MAX_FDS) {
            peer.map(&import(&self.shared.link, window, part.to_vec())?)?;
        }
        check(&peer.chunks_in(offset, bytes), offset, bytes, epochs)?;
        Ok(peer.base() + offset)
    }

    fn peer(&self, window: u32) -> Result<Arc<Window>, Error> {
        let mut peers = self.peers.lock();
        if let Some(peer) = peers.get(&window) {
            return Ok(peer.clone());
        }
        let peer = Arc::new(Window::reserve(self.driver.clone(), self.window_bytes, Access::ReadWrite)?);
        peers.insert(window, peer.clone());
        Ok(peer)
    }

    /// Drops mappings of a peer's chunks; tells the owner, which waits for that.
    fn unmap(&self, peer: &Window, epochs: &[u64]) -> Result<(), Error> {
        if epochs.is_empty() {
            return Ok(());
        }
        for epoch in epochs {
            peer.unmap(*epoch)?;
        }
        self.shared.link.tell(Request::Unmapped { epochs: epochs.to_vec() })
    }

    /// The owner's revoke: drops what is mapped of these chunks. Returns the bytes that are still mapped.
    pub(super) fn revoke(&self, window: u32, epochs: &[u64], in_use: impl Fn(&Chunk) -> bool) -> u64 {
        let Some(peer) = self.peers.lock().get(&window).cloned() else { return 0 };
        let mut left = 0;
        for chunk in peer.chunks().into_iter().filter(|chunk| epochs.contains(&chunk.epoch)) {
            if in_use(&chunk) || peer.unmap(chunk.epoch).is_err() {
                left += chunk.bytes;
            }
        }
        left
    }

    /// The chunks that a range of our own window touches.
    pub(super) fn own_epochs(&self, offset: u64, bytes: u64) -> Vec<u64> {
        self.heap.window().chunks_in(offset, bytes).iter().map(|chunk| chunk.epoch).collect()
    }

    /// The epochs of the chunks that a mapped range of any window touches.
    pub(super) fn epochs_in(&self, window: u32, offset: u64, bytes: u64) -> Vec<u64> {
        if window == self.window {
            return self.own_epochs(offset, bytes);
        }
        let peer = self.peers.lock().get(&window).cloned();
        peer.map(|peer| peer.chunks_in(offset, bytes).iter().map(|chunk| chunk.epoch).collect()).unwrap_or_default()
    }

    /// Which window of this device an address lies in, and where.
    pub(super) fn locate(&self, addr: Addr) -> Option<(u32, u64)> {
        if let Some(offset) = self.heap.window().offset_of(addr) {
            return Some((self.window, offset));
        }
        self.peers.lock().iter().find_map(|(window, peer)| Some((*window, peer.offset_of(addr)?)))
    }
}

/// Whether these chunks are those of the epochs and cover the range without a hole.
fn check(chunks: &[Chunk], offset: u64, bytes: u64, epochs: &[u64]) -> Result<(), Error> {
    let same = chunks.len() == epochs.len() && chunks.iter().zip(epochs).all(|(chunk, epoch)| chunk.epoch == *epoch);
    let mut at = offset;
    let whole = chunks.iter().all(|chunk| {
        let reached = chunk.offset <= at;
        at = chunk.end();
        reached
    }) && at >= offset + bytes;
    if (same && whole) || bytes == 0 {
        return Ok(());
    }
    Err(Error::Stale(format!("bytes {offset} to {offset}+{bytes} are no longer what they were when they were sent (epochs {epochs:?}): the sender gave that memory back")))
}

/// Whose a window is: (device index, peer).
pub(super) fn window_owner(link: &Link, window: u32) -> Result<(u32, Peer, Option<OwnedFd>), Error> {
    let (answer, fds) = link.call(Request::Window { window }, CALL_TIMEOUT)?;
    match answer {
        Answer::Window { device, peer, .. } => Ok((device, peer, fds.into_iter().next())),
        answer => Err(Error::unexpected(&answer)),
    }
}
