//! One device as a client has it: its driver, its own heap, the windows of others.
//!
//! Opened at first use, so that a process that only passes values on has no context and maps nothing, and so that a device
//! mask set after `attach` still counts.

use std::collections::{HashMap, HashSet};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::time::Duration;

use millpond_allocator::driver::host::{HostConfig, HostPlatform};
use millpond_allocator::driver::{
    cuda::CudaPlatform, cuda::HandleKind, Access, Addr, DeviceId, Driver, DriverError, Event, Platform, Stream, StreamId,
};
use millpond_allocator::heap::{ChunkSource, GrowError, Heap, HeapConfig, Live, LiveSink};
use millpond_allocator::pins::Pins;
use millpond_allocator::timeline::{Slots, TimelineError, Timelines, Word};
use millpond_allocator::window::{Chunk, Epochs, Unmapping, Window};
use parking_lot::Mutex;

use super::error::Error;
use super::events::Events;
use super::fault::{self, Fault};
use super::lease::Leases;
use super::link::Link;
use super::record;
use crate::control::{Control, LiveRow, MAX_DEVICES};
use crate::wire::{self, Answer, DeviceGrant, Peer, Reason, Request, Role, MAX_FDS};

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
        // torch copies between GPUs by a plain copy, which reaches only what its device may reach.
        loaded.grant_peers(true);
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
    pub(super) pins: Arc<Pins>,
    pub(super) me: u32,
    pub(super) role: Role,
    /// This client, as others know it.
    pub(super) own: Peer,
    pub(super) events: Arc<Events>,
    /// The client has left: its slot may be another's, so it writes nothing there any more.
    pub(super) left: Arc<AtomicBool>,
}

impl Shared {
    /// Who must know of what a device unmaps: host memory may be registered with a GPU's driver.
    fn unmapping(&self, driver: &Arc<dyn Driver>) -> Option<Arc<dyn Unmapping>> {
        driver.is_host().then(|| self.pins.clone() as Arc<dyn Unmapping>)
    }
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
    fn keep_mapped(&self) {
        self.0.keep_mapped();
    }
}

/// The heap's figures go to the client's row.
#[derive(Debug)]
struct Sink {
    control: Arc<Control>,
    me: u32,
    device: u32,
    left: Arc<AtomicBool>,
}

impl LiveSink for Sink {
    #[inline]
    fn publish(&self, live: &Live) {
        if let Some(row) = self.control.live(self.me, self.device).filter(|_| !self.left.load(Ordering::Relaxed)) {
            row.write(&LiveRow {
                allocated: live.allocated + if fault::is(Fault::LedgerSkew) { 512 } else { 0 },
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
    /// Its identity, for people.
    id: String,
    window: u32,
}

impl ChunkSource for Source {
    fn grow(&self, bytes: u64) -> Result<Vec<(Chunk, OwnedFd)>, GrowError> {
        let call = Request::Grow { device: self.device, bytes };
        let unreachable = |error: Error| GrowError::Unreachable(error.to_string());
        let (answer, mut fds) = self.shared.link.ask(call, GROW_TIMEOUT).map_err(unreachable)?;
        let chunks = match answer {
            Answer::Granted { chunks } => chunks,
            Answer::Refused { reason: Reason::OutOfMemory, message, limit, reserved, .. } => {
                // A parent that listens is told by the owner, of everybody's.
                if self.shared.role != Role::Parent {
                    self.shared.events.push("refusal", &self.id, self.shared.own.clone(), (bytes, limit, reserved));
                }
                return Err(GrowError::OutOfMemory { limit, reserved, detail: message });
            }
            Answer::Refused { message, .. } => return Err(GrowError::Unreachable(message)),
            answer => return Err(unreachable(Error::unexpected(&answer))),
        };
        while fds.len() < chunks.len() {
            let epochs = chunks.iter().skip(fds.len()).take(MAX_FDS).map(|chunk| chunk.epoch).collect();
            match import(&self.shared.link, self.window, epochs) {
                Ok(more) => fds.extend(more.into_iter().map(|(_, fd)| fd)),
                Err(error) => {
                    let chunks: Vec<Chunk> = chunks.into_iter().map(from_wire).collect();
                    self.give_back(&chunks);
                    return Err(unreachable(error));
                }
            }
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
    granularity: u64,
    /// Held while chunks are looked up, mapped and unmapped, so that what was found mapped stays so until its import counts.
    peers: Mutex<Peers>,
    /// Chunks that their client gave back while something here still used them: (window, chunk).
    revoked: Mutex<Vec<(u32, Chunk)>>,
    /// Windows of clients that are gone.
    dead: Mutex<Vec<u32>>,
    /// An event that is never recorded.
    probe: Mutex<Option<Event>>,
    /// The owner was told that the context is dead.
    pub(super) faulted: AtomicBool,
}

/// Windows of others, by number and by whether they are mapped for reading only.
type Peers = HashMap<(u32, bool), Arc<Window>>;

impl Device {
    pub(super) fn new(grant: DeviceGrant, shared: Shared) -> Result<Self, Error> {
        let id = grant.device.parse().map_err(|error| Error::Protocol(format!("the owner's device: {error}")))?;
        if grant.index as usize >= MAX_DEVICES || grant.granularity == 0 || grant.window_bytes == 0 {
            return Err(Error::Protocol(format!("the owner's figures for {id} cannot be: {grant:?}")));
        }
        let kind: HandleKind = grant.handle_kind.parse().map_err(|error| Error::Protocol(format!("the owner's device {id}: {error}")))?;
        if let Some(lacks) = kind.lacks() {
            return Err(Error::Unsupported(format!("the owner shares the memory of {id} as {kind}: millpond lacks {lacks}")));
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
        if driver.is_host() {
            self.shared.pins.lies_in(driver.clone());
        }
        let memory = Arc::new(Words(self.shared.control.clone()));
        let timelines = Arc::new(Timelines::new(driver.clone(), memory, self.shared.slots.clone())?);
        let window = Window::reserve(driver.clone(), self.grant.window_bytes, Access::ReadWrite)?.telling(self.shared.unmapping(&driver));
        let source = Arc::new(Source {
            shared: self.shared.clone(),
            device: self.grant.index,
            id: self.grant.device.clone(),
            window: self.grant.window,
        });
        let sink = Arc::new(Sink {
            control: self.shared.control.clone(),
            me: self.shared.me,
            device: self.grant.index,
            left: self.shared.left.clone(),
        });
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
            granularity: self.grant.granularity,
            peers: Mutex::default(),
            revoked: Mutex::default(),
            dead: Mutex::default(),
            probe: Mutex::default(),
            faulted: AtomicBool::new(false),
        });
        record::introduce_device(&made);
        *opened = Some(made.clone());
        Ok(made)
    }
}

/// A range of a window, as a message names it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Range<'a> {
    pub(super) window: u32,
    pub(super) offset: u64,
    pub(super) bytes: u64,
    /// Of the chunks that it touches, by address.
    pub(super) epochs: &'a [Epochs],
    pub(super) read_only: bool,
}

impl Opened {
    /// Who a stream is. Refused while it is captured: a replay would neither wait nor signal again.
    pub(super) fn identify(&self, stream: Stream) -> Result<StreamId, Error> {
        Ok(self.driver.stream_identity(stream)?.ok_or(TimelineError::Capturing)?)
    }

    /// Where a range of a window is mapped here, after what is missing of it has been mapped. `in_use`: whether anything else
    /// that is held here lies in a chunk.
    pub(super) fn resolve(&self, range: Range<'_>, in_use: impl Fn(&Chunk) -> bool) -> Result<Addr, Error> {
        let Range { window, offset, bytes, epochs, read_only } = range;
        if offset.checked_add(bytes).is_none_or(|end| end > self.window_bytes) {
            return Err(Error::Protocol(format!("bytes {offset} to {offset}+{bytes} do not lie in a window of {}", self.window_bytes)));
        }
        if window == self.window {
            check(self.heap.window(), offset, bytes, epochs)?;
            return Ok(self.heap.window().base() + offset);
        }
        let named = epochs.iter().try_fold(0_u64, |sum, run| sum.checked_add(run.count())).unwrap_or(u64::MAX);
        if named > bytes / self.granularity + 2 {
            return Err(Error::Protocol(format!("{named} epochs for {bytes} bytes")));
        }
        let mut peers = self.peers.lock();
        let peer = match peers.get(&(window, read_only)) {
            Some(peer) => peer.clone(),
            None => {
                let access = if read_only { Access::ReadOnly } else { Access::ReadWrite };
                let peer = Window::reserve(self.driver.clone(), self.window_bytes, access)?;
                let peer = Arc::new(peer.telling(self.shared.unmapping(&self.driver)));
                peers.insert((window, read_only), peer.clone());
                peer
            }
        };
        if bytes == 0 {
            return Ok(peer.base() + offset);
        }
        // Nearly always: at one price, however large the range.
        if peer.holds(offset, bytes, epochs) {
            return Ok(peer.base() + offset);
        }
        let there = peer.chunks_in(offset, bytes);
        if fault::is(Fault::StaleMap) && !there.is_empty() {
            return Ok(peer.base() + offset);
        }
        // No more than the range has room for, as was seen above.
        let wanted: Vec<u64> = epochs.iter().flat_map(|run| run.each()).collect();
        let once: HashSet<u64> = wanted.iter().copied().collect();
        if once.len() != wanted.len() {
            return Err(Error::Protocol("a chunk is named twice".to_owned()));
        }
        // What is mapped under another epoch is gone at its producer, and nothing of it is held here: it would not be gone. If
        // something is, then the message is wrong.
        let stale: Vec<Chunk> = there.iter().filter(|chunk| !once.contains(&chunk.epoch)).copied().collect();
        if stale.iter().any(in_use) {
            return Err(gone(offset, bytes, epochs));
        }
        self.unmap(&peers, window, &stale);
        let _span = tracing::debug_span!("import", window, bytes).entered();
        let mapped: HashSet<u64> = there.iter().map(|chunk| chunk.epoch).collect();
        let missing: Vec<u64> = wanted.into_iter().filter(|epoch| !mapped.contains(epoch)).collect();
        for part in missing.chunks(MAX_FDS) {
            let chunks = import(&self.shared.link, window, part.to_vec())?;
            if let Err(error) = peer.map(&chunks) {
                // The owner counts them as mapped here since it sent them.
                let chunks: Vec<Chunk> = chunks.iter().map(|(chunk, _)| *chunk).collect();
                self.say_unmapped(&peers, window, &chunks);
                return Err(error.into());
            }
        }
        check(&peer, offset, bytes, epochs)?;
        Ok(peer.base() + offset)
    }

    /// Drops mappings of a peer's chunks, and tells the owner, which waits for that.
    fn unmap(&self, peers: &Peers, window: u32, chunks: &[Chunk]) {
        for peer in both(peers, window) {
            for chunk in chunks {
                if let Err(error) = peer.unmap(chunk.epoch) {
                    tracing::error!(epoch = chunk.epoch, %error, "a peer's chunk could not be unmapped");
                }
            }
        }
        self.say_unmapped(peers, window, chunks);
    }

    /// Tells the owner of those chunks that are mapped nowhere here.
    fn say_unmapped(&self, peers: &Peers, window: u32, chunks: &[Chunk]) {
        let mapped: Vec<u64> = both(peers, window).flat_map(|peer| peer.chunks()).map(|chunk| chunk.epoch).collect();
        let epochs: Vec<u64> = chunks.iter().map(|chunk| chunk.epoch).filter(|epoch| !mapped.contains(epoch)).collect();
        if !epochs.is_empty() {
            // Without an owner nobody waits for it.
            let _ = self.shared.link.tell(Request::Unmapped { epochs });
        }
    }

    /// The owner's revoke: drops what is mapped of these chunks. Returns the bytes that are still mapped, since something of
    /// them is in use; those go at a later [`Opened::tick`].
    pub(super) fn revoke(&self, window: u32, epochs: &[u64], in_use: impl Fn(&Chunk) -> bool) -> u64 {
        let _span = tracing::debug_span!("revoke", window, chunks = epochs.len()).entered();
        if fault::is(Fault::StaleMap) {
            return 0;
        }
        let peers = self.peers.lock();
        let mut left = 0;
        let mut later = self.revoked.lock();
        for peer in both(&peers, window) {
            for chunk in peer.chunks().into_iter().filter(|chunk| epochs.contains(&chunk.epoch)) {
                if in_use(&chunk) {
                    left += chunk.bytes;
                    if !later.contains(&(window, chunk)) {
                        later.push((window, chunk));
                    }
                } else if let Err(error) = peer.unmap(chunk.epoch) {
                    tracing::error!(epoch = chunk.epoch, %error, "a peer's chunk could not be unmapped");
                    left += chunk.bytes;
                }
            }
        }
        left
    }

    /// A client is gone: its windows' addresses go back when nothing is mapped in them any more.
    pub(super) fn died(&self, windows: &[u32]) {
        self.dead.lock().extend(windows);
    }

    /// Unmaps what was revoked and is no longer in use, and gives the dead's windows back.
    pub(super) fn tick(&self, in_use: impl Fn(u32, &Chunk) -> bool) {
        if !self.revoked.lock().is_empty() {
            let peers = self.peers.lock();
            let mut later = self.revoked.lock();
            let (kept, free): (Vec<_>, Vec<_>) = later.drain(..).partition(|(window, chunk)| in_use(*window, chunk));
            *later = kept;
            for (window, chunk) in free {
                self.unmap(&peers, window, &[chunk]);
            }
        }
        let mut dead = self.dead.lock();
        if dead.is_empty() {
            return;
        }
        let mut peers = self.peers.lock();
        dead.retain(|window| {
            let keys = [(*window, false), (*window, true)];
            if both(&peers, *window).any(|peer| !peer.chunks().is_empty()) {
                return true;
            }
            for key in keys {
                if let Some(peer) = peers.remove(&key) {
                    if let Err(error) = self.driver.unreserve(peer.base(), peer.bytes()) {
                        tracing::debug!(%error, "a dead client's window was not given back");
                    }
                }
            }
            false
        });
    }

    /// Unmaps whatever of others is not in use: before leaving.
    pub(super) fn drop_unused(&self, in_use: impl Fn(u32, &Chunk) -> bool) {
        let peers = self.peers.lock();
        let windows: Vec<u32> = peers.keys().map(|(window, _)| *window).collect();
        for window in windows {
            let chunks: Vec<Chunk> = both(&peers, window).flat_map(|peer| peer.chunks()).filter(|chunk| !in_use(window, chunk)).collect();
            self.unmap(&peers, window, &chunks);
        }
    }

    /// Whether the device still works. A context that is dead says so at every call.
    pub(super) fn probe(&self) -> Result<(), DriverError> {
        let mut probe = self.probe.lock();
        let event = match *probe {
            Some(event) => event,
            None => *probe.insert(self.driver.event_create()?),
        };
        self.driver.event_query(event).map(drop)
    }

    /// The epochs of the chunks that a mapped range of any window touches.
    pub(super) fn epochs_in(&self, window: u32, offset: u64, bytes: u64, read_only: bool) -> Vec<Epochs> {
        if window == self.window {
            return self.heap.window().epochs_in(offset, bytes);
        }
        let peer = self.peers.lock().get(&(window, read_only)).cloned();
        peer.map(|peer| peer.epochs_in(offset, bytes)).unwrap_or_default()
    }

    /// The peer's window that an address lies in.
    pub(super) fn peer_window_at(&self, addr: Addr) -> Option<Arc<Window>> {
        self.peers.lock().values().find(|peer| peer.offset_of(addr).is_some()).cloned()
    }

    /// Which window of this device an address lies in, and where.
    pub(super) fn locate(&self, addr: Addr) -> Option<(u32, u64)> {
        if let Some(offset) = self.heap.window().offset_of(addr) {
            return Some((self.window, offset));
        }
        self.peers.lock().iter().find_map(|((window, _), peer)| Some((*window, peer.offset_of(addr)?)))
    }
}

/// A peer's window, as it is mapped for writing and for reading only.
fn both(peers: &Peers, window: u32) -> impl Iterator<Item = &Arc<Window>> {
    [false, true].into_iter().filter_map(move |read_only| peers.get(&(window, read_only)))
}

/// Whether what is mapped of a range are the chunks of these epochs, without a hole.
fn check(window: &Window, offset: u64, bytes: u64, epochs: &[Epochs]) -> Result<(), Error> {
    if bytes == 0 || window.holds(offset, bytes, epochs) {
        return Ok(());
    }
    Err(gone(offset, bytes, epochs))
}

fn gone(offset: u64, bytes: u64, epochs: &[Epochs]) -> Error {
    let first = epochs.iter().take(8).map(|run| format!("{} to {}", run.first(), run.last())).collect::<Vec<_>>().join(", ");
    Error::Stale(format!(
        "bytes {offset} to {offset}+{bytes} are no longer what they were when they were sent (epochs {first}): the sender gave that memory back"
    ))
}

/// Whose a window is: (device index, peer).
pub(super) fn window_owner(link: &Link, window: u32) -> Result<(u32, Peer, Option<OwnedFd>), Error> {
    let (answer, fds) = link.call(Request::Window { window }, CALL_TIMEOUT)?;
    match answer {
        Answer::Window { device, peer, .. } => Ok((device, peer, fds.into_iter().next())),
        answer => Err(Error::unexpected(&answer)),
    }
}
