//! One device as a client has it: its driver, its own heap, the windows of others.
//!
//! Opened at first use, so that a process that only passes values on has no context and maps nothing, and so that a device
//! mask set after `attach` still counts.

mod peers;
mod source;

pub(super) use peers::Range;

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use millpond_allocator::driver::host::{HostConfig, HostPlatform};
use millpond_allocator::driver::{
    cuda::CudaPlatform, cuda::HandleKind, Access, Addr, DeviceId, Driver, DriverError, Event, Platform, Stream, StreamId,
};
use millpond_allocator::heap::{Heap, HeapConfig, Neighbour, Neighbours};
use millpond_allocator::pins::Pins;
use millpond_allocator::timeline::{Slots, TimelineError, Timelines};
use millpond_allocator::window::{Chunk, Unmapping, Window};
use parking_lot::Mutex;

use super::error::Error;
use super::events::Events;
use super::lease::Leases;
use super::link::Link;
use super::record;
use crate::control::{Control, MAX_DEVICES};
use crate::wire::{Answer, DeviceGrant, Peer, Request, Role};
use peers::Peers;
use source::{Sink, Source, Words};

/// How long any call but growth may take.
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
    /// The GPUs that are in use.
    pub(super) neighbours: Arc<Neighbours>,
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

/// One device as this client has it.
#[derive(Debug)]
pub(super) struct Device {
    pub(super) grant: DeviceGrant,
    pub(super) id: DeviceId,
    shared: Shared,
    opened: OnceLock<Arc<Opened>>,
    /// Whether its heap may record events of the whole context. Held while it is opened.
    context_events: Mutex<bool>,
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
    /// An event that is never recorded.
    probe: Mutex<Option<Event>>,
    /// The owner was told that the context is dead.
    pub(super) faulted: AtomicBool,
}

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
        Ok(Self { grant, id, shared, opened: OnceLock::new(), context_events: Mutex::new(true) })
    }

    pub(super) fn is_host(&self) -> bool {
        self.id.host_number().is_some()
    }

    /// Only if it is open.
    pub(super) fn if_open(&self) -> Option<&Arc<Opened>> {
        self.opened.get()
    }

    /// [`Heap::set_context_events`] of its heap, now or when it is opened.
    pub(super) fn set_context_events(&self, allowed: bool) {
        let mut context_events = self.context_events.lock();
        *context_events = allowed;
        if let Some(opened) = self.if_open() {
            opened.heap.set_context_events(allowed);
        }
    }

    /// Waits, with a bound, while it is being opened.
    pub(super) fn await_opening(&self, bound: Duration) {
        drop(self.context_events.try_lock_for(bound));
    }

    /// Opens it at first use.
    pub(super) fn open(&self) -> Result<&Arc<Opened>, Error> {
        if let Some(opened) = self.if_open() {
            return Ok(opened);
        }
        let context_events = self.context_events.lock();
        if let Some(opened) = self.if_open() {
            return Ok(opened);
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
        let heap = Heap::new(driver.clone(), window, source, Some(sink), Some(timelines.clone()), config);
        let heap = Arc::new(if driver.is_host() { heap } else { heap.beside(&self.shared.neighbours) });
        if !*context_events {
            heap.set_context_events(false);
        }
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
            probe: Mutex::default(),
            faulted: AtomicBool::new(false),
        });
        // Who leaves says so first, and then waits until nobody opens.
        if self.shared.left.load(Ordering::Acquire) {
            return Err(Error::left());
        }
        let opened = self.opened.get_or_init(|| made);
        record::introduce_device(opened);
        Ok(opened)
    }
}

impl Opened {
    /// Who a stream is. Refused while it is captured: a replay would neither wait nor signal again.
    pub(super) fn identify(&self, stream: Stream) -> Result<StreamId, Error> {
        Ok(self.driver.stream_identity(stream)?.ok_or(TimelineError::Capturing)?)
    }

    /// Who a stream is that uses what is on this device: itself, if it may be one of this device's; and the other GPUs whose it may be.
    pub(super) fn users(&self, stream: Stream) -> Result<(Option<StreamId>, Vec<Arc<Neighbour>>), Error> {
        let abroad = if self.driver.is_host() { Vec::new() } else { self.shared.neighbours.of(&*self.driver, stream) };
        let here = abroad.is_empty() || stream.is_named();
        Ok((here.then(|| self.identify(stream)).transpose()?, abroad))
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

    /// Which window of this device an address lies in, and where.
    pub(super) fn locate(&self, addr: Addr) -> Option<(u32, u64)> {
        if let Some(offset) = self.heap.window().offset_of(addr) {
            return Some((self.window, offset));
        }
        self.peers.lock().iter().find_map(|((window, _), peer)| Some((*window, peer.offset_of(addr)?)))
    }
}

/// Whose a window is: (device index, peer).
pub(super) fn window_owner(link: &Link, window: u32) -> Result<(u32, Peer, Option<OwnedFd>), Error> {
    let (answer, fds) = link.call(Request::Window { window }, CALL_TIMEOUT)?;
    match answer {
        Answer::Window { device, peer, .. } => Ok((device, peer, fds.into_iter().next())),
        answer => Err(Error::unexpected(&answer)),
    }
}
