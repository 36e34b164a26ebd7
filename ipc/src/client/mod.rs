//! The client: one process attached to an owner. Its memory, what it lends, what it holds, its channels.

mod adopt;
mod channel;
mod device;
mod due;
mod error;
mod events;
mod fault;
mod import;
mod lease;
mod link;
mod nudge;
mod options;
mod pause;
mod pinned;
mod place;
mod policy;
mod receive;
mod record;
mod send;
mod tend;
mod ticket;
mod wake;

/// Where [`nudge`] takes its atomics from: a test that includes that file gives it a model checker's.
mod atomic {
    pub(super) use std::sync::atomic::{AtomicBool, Ordering};
}

pub use channel::Channel;
pub use error::Error;
pub use events::Event;
pub use lease::HoldRef;
pub use options::{OnOwnerDeath, Options};
pub use pinned::Piece;
pub use place::{default_stream, Located, Place};
pub use receive::{Incoming, Message, ReceiveOptions};
pub use record::recording_file;
pub use send::{Outgoing, Way};

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use millpond_allocator::driver::Driver;
use millpond_allocator::origin::Origin;
use millpond_allocator::pins::Pins;
use millpond_allocator::scatter::ScatterMap;
use millpond_allocator::timeline::Slots;
use parking_lot::Mutex;

use crate::control::{Control, Count, MAX_CLIENTS, TIMELINES_PER_CLIENT};
use crate::ledger::Ledger;
use crate::wire::{Answer, Peer, Request, Welcome};
use channel::Office;
use device::{Device, Platforms, Shared, CALL_TIMEOUT};
use import::Imports;
use lease::Leases;
use link::{Link, Notice};
use nudge::Nudge;
use pinned::Departures;
use wake::Wake;

/// How long leaving waits for streams that still use what was let go of.
const PARTING: Duration = Duration::from_millis(200);
/// And how long for another thread that is opening a device: a CUDA context takes some tenths of a second.
const OPENING: Duration = Duration::from_secs(2);

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
    windows: Mutex<ScatterMap<u32, (u32, Peer)>>,
    /// How many deaths the owner has told of.
    deaths: AtomicU64,
    /// Set when the owner is gone.
    wake: Mutex<Option<Wake>>,
    /// GPUs that the arena does not serve, by ordinal, as far as they were asked for.
    gpus: Mutex<HashMap<u32, Arc<dyn Driver>>>,
    /// Values that are on their way to host memory.
    departures: Departures,
    host_waits: bool,
    /// What has been done so far.
    pub counters: Counters,
    nudged: Nudge,
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
        let office = Arc::new(Office::new(control.clone(), me));
        let leases = Arc::new(Leases::new(control.clone(), office.clone(), me));
        let slots = Arc::new(Slots::new(me * TIMELINES_PER_CLIENT as u32, TIMELINES_PER_CLIENT as u32));
        let shared = Shared {
            link: Arc::new(link),
            control: control.clone(),
            leases,
            slots,
            neighbours: Arc::default(),
            platforms: Arc::new(Platforms::default()),
            pins: Arc::new(Pins::new(pinned::default_limit())),
            me,
            role: options.role,
            own: Peer { client: me, serial: welcome.serial, name: options.name.clone(), pid: std::process::id() },
            events: Arc::default(),
            left: Arc::default(),
        };
        let devices = welcome.devices.iter().map(|grant| Device::new(grant.clone(), shared.clone())).collect::<Result<_, _>>()?;
        shared.link.register(office.clone());
        let client = Arc::new(Self {
            office,
            imports: Imports::new(control, me),
            shared,
            welcome,
            socket: options.socket.clone(),
            name: options.name.clone(),
            devices,
            by_ordinal: OnceLock::new(),
            windows: Mutex::default(),
            deaths: AtomicU64::new(0),
            wake: Mutex::default(),
            gpus: Mutex::default(),
            departures: Departures::default(),
            host_waits: options.host_waits,
            counters: Counters::default(),
            nudged: Nudge(AtomicBool::new(false)),
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
        self.shared.leases.reap();
        // What stays is the owner's only when this process ends.
        self.devices.iter().filter_map(Device::if_open).for_each(|opened| _ = opened.heap.empty_cache());
        // What was let go of is done soon, where its streams are.
        let until = Instant::now() + PARTING;
        let settled = || self.devices.iter().filter_map(Device::if_open).all(|opened| opened.timelines.is_settled());
        while (self.imports.any_parting() || self.owes() || !settled()) && Instant::now() < until {
            self.tick_devices();
            std::thread::sleep(Duration::from_millis(1));
        }
        self.shared.leases.reap();
        for opened in self.devices.iter().filter_map(Device::if_open) {
            opened.heap.trim(u64::MAX);
            // What was let go of may be used by work that stands behind a signal. What stays mapped is given back with the process.
            if opened.timelines.is_settled() {
                opened.drop_unused(|window, chunk| self.imports.uses(window, chunk, None));
            }
        }
        // Before the owner hears of it: whoever is refused by it from here on is refused since this client leaves.
        self.shared.left.store(true, Ordering::Release);
        self.devices.iter().for_each(|device| device.await_opening(OPENING));
        let _ = self.shared.link.call(Request::Detach, Duration::from_secs(2));
        // Until the connection ends the slot is ours. A malloc that was writing our row there is over when its heap's lock has been had.
        self.devices.iter().filter_map(Device::if_open).for_each(|opened| opened.heap.set_leased_in(0));
        *self.wake.lock() = None;
        self.shared.events.close();
        self.shared.link.notice(Notice::Stop);
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
            return Err(Error::left());
        }
        Ok(())
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
        let deaths = self.deaths.load(Ordering::Acquire);
        // The owner's own time-out comes first and says more.
        let (answer, fds) = self.shared.link.call(request, timeout.saturating_add(Duration::from_secs(2)))?;
        let mut fds = fds.into_iter();
        match (answer, fds.next()) {
            (Answer::Channel { peer }, Some(socket)) if (peer.client as usize) < MAX_CLIENTS => {
                if self.shared.control.row_of(peer.client, peer.serial).is_some_and(|row| !row.is_dead()) {
                    self.keep_pidfd(peer.serial, fds.next(), deaths);
                }
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
        // After leaving, the slot may be another's: one count that is being added just then is one too many there, and no more.
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

    /// A window's device, and the client whose it is.
    fn window(&self, window: u32) -> Result<(u32, u32), Error> {
        if let Some((device, peer)) = self.windows.lock().get(&window) {
            return Ok((*device, peer.client));
        }
        if let Some(own) = self.devices.iter().find(|device| device.grant.window == window) {
            return Ok((own.grant.index, self.shared.me));
        }
        let deaths = self.deaths.load(Ordering::Acquire);
        let (device, peer, pidfd) = device::window_owner(&self.shared.link, window)?;
        if peer.client as usize >= MAX_CLIENTS {
            return Err(Error::Protocol(format!("the owner says that window {window} is client {}'s", peer.client)));
        }
        let Peer { client, serial, .. } = peer;
        // Of one that is dead the notice has come, which would take this out again; of one that dies just now it may have.
        if self.shared.control.row_of(client, serial).is_some_and(|row| !row.is_dead()) {
            self.keep_pidfd(serial, pidfd, deaths);
            self.windows.lock().insert(window, (device, peer));
            if self.deaths.load(Ordering::Acquire) != deaths {
                self.forget_windows(serial);
            }
        }
        Ok((device, client))
    }

    /// Keeps a client's pidfd. The notice of its death, which takes it out again, may have come since `deaths` was looked at.
    fn keep_pidfd(&self, serial: u64, pidfd: Option<OwnedFd>, deaths: u64) {
        let Some(pidfd) = pidfd.map(Arc::new) else { return };
        self.office.know(serial, pidfd.clone());
        if self.deaths.load(Ordering::Acquire) != deaths && wake::has_ended(&pidfd) {
            self.office.forget(serial);
        }
    }

    /// Drops what is known of a client's windows; of one that lives it is asked again.
    fn forget_windows(&self, serial: u64) {
        self.windows.lock().retain(|_, (_, owner)| owner.serial != serial);
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        if !self.is_forked() {
            // The threads' own ends: the reader's socket, the tender's queue.
            self.shared.link.notice(Notice::Stop);
            self.shared.link.close();
        }
    }
}

fn millis(timeout: Duration) -> u64 {
    u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX)
}
