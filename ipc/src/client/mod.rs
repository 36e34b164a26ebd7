//! The client: one process attached to an owner. Its memory, what it lends, what it holds, its channels.

mod adopt;
mod channel;
mod device;
mod error;
mod events;
mod fault;
mod import;
mod lease;
mod link;
mod pinned;
mod policy;
mod receive;
mod record;
mod send;
mod tend;
mod ticket;
mod wake;

pub use channel::Channel;
pub use error::Error;
pub use events::Event;
pub use lease::HoldRef;
pub use pinned::Piece;
pub use receive::{Incoming, Message, ReceiveOptions};
pub use record::recording_file;
pub use send::{Outgoing, Way};

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use millpond_allocator::driver::{Addr, DeviceId, DeviceInfo, Driver, Platform, Stream};
use millpond_allocator::heap::Heap;
use millpond_allocator::origin::Origin;
use millpond_allocator::pins::Pins;
use millpond_allocator::timeline::Slots;
use parking_lot::Mutex;

use crate::control::{Control, Count, LAYOUT, MAX_CLIENTS, TIMELINES_PER_CLIENT};
use crate::ledger::Ledger;
use crate::wire::{Answer, DeviceGrant, Hello, Peer, Request, Role, Welcome, PROTOCOL};
use channel::Office;
use device::{Device, Platforms, Shared, CALL_TIMEOUT};
use import::Imports;
use lease::Leases;
use link::{Link, Notice};
use pinned::Departures;
use wake::Wake;

/// How long leaving waits for streams that still use what was let go of.
const PARTING: Duration = Duration::from_millis(200);

/// Where bytes are, as the caller names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Place {
    /// The host device: CPU memory.
    Host,
    /// A GPU by its index among those that this process sees, as torch counts.
    Ordinal(u32),
    /// A device by its identity.
    Device(DeviceId),
}

/// What a client does when its owner ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OnOwnerDeath {
    /// It goes on with the memory that it has.
    #[default]
    Continue,
    /// It ends (SIGTERM to itself).
    Exit,
}

/// How to attach.
#[derive(Debug, Clone)]
pub struct Options {
    /// The owner's socket.
    pub socket: PathBuf,
    /// The owner's key.
    pub key: String,
    /// A name for people.
    pub name: String,
    /// What this process is.
    pub role: Role,
    /// A limit of its own in bytes, per device.
    pub limit: Option<u64>,
    /// What happens when the owner ends.
    pub on_owner_death: OnOwnerDeath,
    /// Wait for READY on the CPU, never on a stream: for a program with few hardware queues.
    pub host_waits: bool,
    /// Python's version, for the owner's log.
    pub python: Option<String>,
    /// torch's version, for the owner's log.
    pub torch: Option<String>,
    /// How long attaching may take.
    pub timeout: Duration,
}

impl Options {
    /// The usual, for a worker.
    #[must_use]
    pub fn new(socket: PathBuf, key: String, name: String) -> Self {
        Self {
            socket,
            key,
            name,
            role: Role::Worker,
            limit: None,
            on_owner_death: OnOwnerDeath::default(),
            host_waits: false,
            python: None,
            torch: None,
            timeout: Duration::from_secs(10),
        }
    }

    fn hello(&self) -> Hello {
        Hello {
            protocol: PROTOCOL,
            layout: LAYOUT,
            key: self.key.clone(),
            name: self.name.clone(),
            role: self.role,
            pid: std::process::id(),
            limit: self.limit,
            library: env!("CARGO_PKG_VERSION").to_owned(),
            python: self.python.clone(),
            torch: self.torch.clone(),
            capabilities: Vec::new(),
            fds: 0,
        }
    }
}

/// Counts of what was done so far.
#[derive(Debug, Default)]
#[allow(missing_docs)]
pub struct Counters {
    pub sent_messages: AtomicU64,
    pub sent_tensors: AtomicU64,
    pub received_messages: AtomicU64,
    pub received_tensors: AtomicU64,
    pub copied_tensors: AtomicU64,
    pub copied_bytes: AtomicU64,
}

/// A process attached to an owner.
#[derive(Debug)]
pub struct Client {
    shared: Shared,
    welcome: Welcome,
    socket: PathBuf,
    name: String,
    devices: Vec<Device>,
    /// Device by GPU ordinal, asked of the driver at first use.
    by_ordinal: OnceLock<Vec<Option<usize>>>,
    imports: Imports,
    office: Arc<Office>,
    /// Whose the windows of others are: (device, client).
    windows: Mutex<HashMap<u32, (u32, Peer)>>,
    /// Pidfds of those that this client imports from, by serial: for when there is no owner any more.
    pidfds: Mutex<HashMap<u64, OwnedFd>>,
    /// Set when the owner is gone.
    wake: Mutex<Option<Wake>>,
    /// GPUs that the arena does not serve, by ordinal, as far as they were asked for.
    gpus: Mutex<HashMap<u32, Arc<dyn Driver>>>,
    /// Values that are on their way to host memory.
    departures: Departures,
    host_waits: bool,
    /// What has been done so far.
    pub counters: Counters,
    notices: Mutex<Option<Sender<Notice>>>,
    nudged: AtomicBool,
    threads: Mutex<Vec<JoinHandle<()>>>,
    /// The process that attached; in a forked child nothing works.
    pid: u32,
    origin: Origin,
}

impl Client {
    /// Attaches to an owner. Touches no GPU driver: devices are opened at first use.
    ///
    /// # Errors
    /// [`Error::OwnerUnavailable`], [`Error::Refused`] with the field that differs.
    pub fn attach(options: &Options) -> Result<Arc<Self>, Error> {
        let (link, welcome, fds) = Link::connect(&options.socket, &options.hello(), options.timeout)?;
        let control = fds.into_iter().next().ok_or_else(|| Error::Protocol("the owner sent no control memory".to_owned()))?;
        let control = Arc::new(Control::open(control)?);
        if welcome.client as usize >= MAX_CLIENTS {
            return Err(Error::Protocol(format!("the owner gave slot {}", welcome.client)));
        }
        let me = welcome.client;
        let leases = Arc::new(Leases::new(control.clone(), me));
        let slots = Arc::new(Slots::new(me * TIMELINES_PER_CLIENT as u32, TIMELINES_PER_CLIENT as u32));
        let shared = Shared {
            link: Arc::new(link),
            control: control.clone(),
            leases,
            slots,
            platforms: Arc::new(Platforms::default()),
            pins: Arc::new(Pins::new(pinned::default_limit())),
            me,
            role: options.role,
            own: Peer { client: me, serial: welcome.serial, name: options.name.clone(), pid: std::process::id() },
            events: Arc::default(),
            left: Arc::default(),
        };
        let devices = welcome.devices.iter().map(|grant| Device::new(grant.clone(), shared.clone())).collect::<Result<_, _>>()?;
        let client = Arc::new(Self {
            office: Arc::new(Office::new(control.clone(), me)),
            imports: Imports::new(control, me),
            shared,
            welcome,
            socket: options.socket.clone(),
            name: options.name.clone(),
            devices,
            by_ordinal: OnceLock::new(),
            windows: Mutex::default(),
            pidfds: Mutex::default(),
            wake: Mutex::default(),
            gpus: Mutex::default(),
            departures: Departures::default(),
            host_waits: options.host_waits,
            counters: Counters::default(),
            notices: Mutex::default(),
            nudged: AtomicBool::new(false),
            threads: Mutex::default(),
            pid: std::process::id(),
            origin: Origin::here(),
        });
        tend::start(&client, options.on_owner_death)?;
        record::from_environment(&options.name);
        client.introduce();
        Ok(client)
    }

    /// Leaves. What was lent and is still held stays so: its chunks go to the owner, whole.
    pub fn detach(&self) {
        if self.is_forked() || self.shared.left.load(Ordering::Acquire) {
            return;
        }
        self.departures.finish(&self.shared.pins);
        // What was let go of is done soon, where its streams are.
        let until = Instant::now() + PARTING;
        while self.imports.any_parting() && Instant::now() < until {
            self.tick_devices();
            std::thread::sleep(Duration::from_millis(1));
        }
        self.shared.leases.reap();
        for opened in self.devices.iter().filter_map(Device::if_open) {
            opened.heap.trim(u64::MAX);
            opened.drop_unused(|window, chunk| self.imports.uses(window, chunk, None));
        }
        let _ = self.shared.link.call(Request::Detach, Duration::from_secs(2));
        self.shared.left.store(true, Ordering::Release);
        *self.wake.lock() = None;
        self.shared.events.close();
        if let Some(notices) = self.notices.lock().take() {
            let _ = notices.send(Notice::Stop);
        }
        self.shared.link.close();
        let here = std::thread::current().id();
        for thread in self.threads.lock().drain(..).filter(|thread| thread.thread().id() != here) {
            let _ = thread.join();
        }
    }

    /// What the owner said at attaching.
    #[must_use]
    pub fn welcome(&self) -> &Welcome {
        &self.welcome
    }

    /// The owner's socket.
    #[must_use]
    pub fn socket(&self) -> &PathBuf {
        &self.socket
    }

    /// This client's name for people.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Whether the owner is there.
    #[must_use]
    pub fn owner_alive(&self) -> bool {
        !self.shared.link.is_dead()
    }

    /// Whether this is a forked child of the process that attached.
    #[must_use]
    pub fn is_forked(&self) -> bool {
        !self.origin.is_here()
    }

    fn check_alive(&self) -> Result<(), Error> {
        if self.is_forked() {
            return Err(Error::Forked);
        }
        if self.shared.left.load(Ordering::Acquire) {
            return Err(Error::Closed("this process has detached from its owner".to_owned()));
        }
        Ok(())
    }

    /// The grants of the owner's devices.
    pub fn grants(&self) -> impl Iterator<Item = &DeviceGrant> {
        self.devices.iter().map(|device| &device.grant)
    }

    fn device_at(&self, index: u32) -> Result<&Device, Error> {
        self.devices
            .iter()
            .find(|device| device.grant.index == index)
            .ok_or_else(|| Error::Protocol(format!("the owner has no device {index} for this process")))
    }

    /// A device by the name that the caller has for it.
    fn device(&self, place: Place) -> Result<&Device, Error> {
        let found = match place {
            Place::Host => self.devices.iter().find(|device| device.is_host()),
            Place::Device(id) => self.devices.iter().find(|device| device.id == id),
            Place::Ordinal(ordinal) => {
                let by_ordinal = match self.by_ordinal.get() {
                    Some(known) => known,
                    None => {
                        let seen = self.shared.platforms.cuda()?.devices()?;
                        let places = seen.iter().map(|info| self.devices.iter().position(|device| device.id == info.id)).collect();
                        self.by_ordinal.get_or_init(|| places)
                    }
                };
                by_ordinal.get(ordinal as usize).copied().flatten().and_then(|at| self.devices.get(at))
            }
        };
        found.ok_or_else(|| {
            let served: Vec<&str> = self.devices.iter().map(|device| device.grant.device.as_str()).collect();
            Error::Unsupported(format!("the arena does not serve {place:?}: its owner serves {}", served.join(", ")))
        })
    }

    /// The heap of a device; opens the device at first use.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a device that the owner does not serve, and what the driver says.
    pub fn heap(&self, place: Place) -> Result<Arc<Heap>, Error> {
        self.check_alive()?;
        Ok(self.device(place)?.open()?.heap.clone())
    }

    /// The heap of a device if it is in use.
    #[must_use]
    pub fn heap_if_open(&self, place: Place) -> Option<Arc<Heap>> {
        self.device(place).ok()?.if_open().map(|opened| opened.heap.clone())
    }

    /// Bytes of a device that are this process's for the asking and that the driver does not call free: given back a moment ago, or on
    /// their way to the owner. 0 where the device is not in use.
    #[must_use]
    pub fn at_hand(&self, place: Place) -> u64 {
        let Some(opened) = self.device(place).ok().and_then(Device::if_open) else { return 0 };
        let row = self.shared.control.grant(self.shared.me, opened.index).and_then(|cell| cell.read()).unwrap_or_default();
        let on_the_way = row.reserved.saturating_sub(row.adopted).saturating_sub(opened.heap.reserved_bytes());
        row.spare.saturating_add(on_the_way)
    }

    /// The driver of a device; opens the device at first use.
    ///
    /// # Errors
    /// As [`Client::heap`].
    pub fn driver(&self, place: Place) -> Result<Arc<dyn Driver>, Error> {
        self.check_alive()?;
        Ok(self.device(place)?.open()?.driver.clone())
    }

    /// The ordinal of a device in this process: `None` for the host, and for a GPU before its driver is in use.
    #[must_use]
    pub fn ordinal(&self, place: Place) -> Option<u32> {
        let device = self.device(place).ok()?;
        device.if_open().filter(|opened| !opened.driver.is_host()).map(|opened| opened.driver.device().ordinal)
    }

    /// Which live heap block, import or neither an address belongs to.
    #[must_use]
    pub fn locate(&self, addr: Addr) -> Located {
        for opened in self.devices.iter().filter_map(Device::if_open) {
            if let Some((window, offset)) = opened.locate(addr) {
                return Located::Window { window, own: window == opened.window, offset, device: opened.driver.device().clone() };
            }
        }
        Located::Foreign
    }

    /// The next worker's channel.
    ///
    /// # Errors
    /// [`Error::Timeout`] where none connects in time.
    pub fn accept(&self, timeout: Duration) -> Result<Channel, Error> {
        self.channel(Request::Accept { timeout_ms: millis(timeout) }, timeout)
    }

    /// A channel to another client: `"parent"`, a name, or a slot.
    ///
    /// # Errors
    /// [`Error::Timeout`] where there is none in time.
    pub fn connect(&self, peer: &str, timeout: Duration) -> Result<Channel, Error> {
        self.channel(Request::Connect { peer: peer.to_owned(), timeout_ms: millis(timeout) }, timeout)
    }

    fn channel(&self, request: Request, timeout: Duration) -> Result<Channel, Error> {
        self.check_alive()?;
        // The owner's own time-out comes first and says more.
        let (answer, fds) = self.shared.link.call(request, timeout.saturating_add(Duration::from_secs(2)))?;
        match (answer, fds.into_iter().next()) {
            (Answer::Channel { peer }, Some(socket)) if (peer.client as usize) < MAX_CLIENTS => {
                Ok(Channel::new(socket, peer, self.office.clone()))
            }
            (answer, _) => Err(Error::unexpected(&answer)),
        }
    }

    /// The ledger, from shared memory, without the owner's help.
    #[must_use]
    pub fn ledger(&self) -> Ledger {
        Ledger::read_with_lends(&self.shared.control, crate::control::now_ms())
    }

    /// Adds to one of this client's counters in the ledger; what has no device counts on the host's.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a device that the owner does not serve.
    pub fn count(&self, place: Place, count: Count, n: u64) -> Result<(), Error> {
        let index = match (self.device(place), place) {
            (Ok(device), _) => device.grant.index,
            (Err(_), Place::Host) => self.devices.first().map_or(0, |device| device.grant.index),
            (Err(error), _) => return Err(error),
        };
        self.count_on(index, count, n);
        Ok(())
    }

    fn count_on(&self, device: u32, count: Count, n: u64) {
        // After leaving, the slot may be another's.
        if let Some(tally) = self.shared.control.tally(self.shared.me, device).filter(|_| !self.shared.left.load(Ordering::Relaxed)) {
            tally.add(count, n);
        }
    }

    /// How many blocks of this client others hold, after a look whether they still do.
    #[must_use]
    pub fn leases(&self) -> usize {
        self.shared.leases.reap();
        self.shared.leases.len()
    }

    /// Bytes of others that this client holds.
    #[must_use]
    pub fn imported_bytes(&self) -> u64 {
        self.imports.bytes()
    }

    fn window(&self, window: u32) -> Result<(u32, Peer), Error> {
        if let Some(known) = self.windows.lock().get(&window) {
            return Ok(known.clone());
        }
        if let Some(own) = self.devices.iter().find(|device| device.grant.window == window) {
            let peer = Peer { client: self.shared.me, serial: self.welcome.serial, name: "self".to_owned(), pid: self.pid };
            return Ok((own.grant.index, peer));
        }
        let (device, peer, pidfd) = device::window_owner(&self.shared.link, window)?;
        if peer.client as usize >= MAX_CLIENTS {
            return Err(Error::Protocol(format!("the owner says that window {window} is client {}'s", peer.client)));
        }
        if let Some(pidfd) = pidfd {
            self.pidfds.lock().insert(peer.serial, pidfd);
        }
        self.windows.lock().insert(window, (device, peer.clone()));
        Ok((device, peer))
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        if !self.is_forked() {
            // The threads' own ends: the reader's socket, the tender's queue.
            self.shared.link.close();
            drop(self.notices.get_mut().take());
        }
    }
}

/// What an address belongs to.
#[derive(Debug, Clone)]
pub enum Located {
    /// A window of the arena.
    Window {
        /// The window.
        window: u32,
        /// This process's own.
        own: bool,
        /// Where in it.
        offset: u64,
        /// Its device.
        device: DeviceInfo,
    },
    /// None of the arena's.
    Foreign,
}

fn millis(timeout: Duration) -> u64 {
    u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX)
}

/// For tests and tools: the default stream where a device is a GPU, none on the host.
#[must_use]
pub fn default_stream(info: &DeviceInfo) -> Option<Stream> {
    info.id.host_number().is_none().then_some(Stream::LEGACY)
}
