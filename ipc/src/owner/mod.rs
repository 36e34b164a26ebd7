//! The owner: one thread and one poll loop, with no CUDA context ever. It makes physical memory, hands it out, keeps the
//! ledger and buries the dead.
//!
//! * [`Config`], [`OwnerError`]: what it is told, and why it may refuse.
//! * `place`: its directory and socket. `link`: one connection. `process`: what the system says of a client.
//! * `estate`: the books: devices, windows, chunks, admission. `spares`: what was given back a moment ago. `rows`: the books in the
//!   control memory.
//! * `hello`, `calls`: the conversation. `grow`, `share`, `channel`: the requests.
//! * `liveness`, `policy`, `burial`, `adopt`: how clients stop, are killed, die, and what becomes of what they leave.

mod adopt;
mod burial;
mod calls;
mod channel;
mod client;
mod config;
mod devices;
mod estate;
mod grow;
mod hello;
mod inline;
mod link;
mod listen;
mod liveness;
mod place;
mod policy;
pub(crate) mod process;
mod rows;
mod share;
mod spares;
mod turn;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{eventfd, EventfdFlags};

pub use config::{parse_bytes, Config, DriverChoice, Limit, OwnerError, CHUNK_BYTES, CHUNK_CEILING, PATH_BYTES};
pub use inline::Inline;

/// Whether the kernel names the process at the other end of a socket by pidfd (Linux 6.5).
#[must_use]
pub(crate) fn peer_pidfd_check() -> bool {
    use rustix::net::{socketpair, AddressFamily, SocketFlags, SocketType};
    let pair = socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None);
    pair.is_ok_and(|(end, _other)| process::peer_pidfd(end.as_fd()).is_some())
}

/// A pidfd of this process.
pub(crate) fn own_pidfd() -> Result<OwnedFd, rustix::io::Errno> {
    process::pidfd_of(std::process::id())
}

/// Makes an owner's directory and socket, and takes them away again.
pub(crate) fn try_place() -> Result<std::path::PathBuf, OwnerError> {
    Place::make(None).map(|(place, _)| place.socket().to_owned())
}

use crate::control::{Control, MAX_CLIENTS};
use client::Client;
use estate::Estate;
use link::Link;
use place::Place;

/// Ends an owner that runs in another thread.
#[derive(Debug, Clone)]
pub struct Stopper(Arc<OwnedFd>);

impl Stopper {
    /// Makes [`Owner::run`] return soon, from any thread. Also before it is called.
    pub fn stop(&self) {
        let _ = rustix::io::write(&*self.0, &1_u64.to_ne_bytes());
    }
}

/// Why [`Owner::run`] returned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// It was told to, by a [`Stopper`] or a descriptor of [`Owner::stop_when_readable`].
    Stopped,
    /// The process that it was bound to has ended.
    ParentEnded,
}

/// A connection that has not said hello yet.
#[derive(Debug)]
struct Greeting {
    link: Link,
    credentials: process::Credentials,
    deadline: Instant,
}

/// An owner, bound to its socket.
#[derive(Debug)]
pub struct Owner {
    config: Config,
    key: String,
    token: [u64; 2],
    control: Control,
    estate: Estate,
    listener: OwnedFd,
    listen_after: Option<Instant>,
    stop: Arc<OwnedFd>,
    stops: Vec<OwnedFd>,
    parent: Option<OwnedFd>,
    ended: Option<Ended>,
    clients: Vec<Option<Client>>,
    observers: BTreeMap<u64, Link>,
    greetings: BTreeMap<u64, Greeting>,
    /// Growths that wait for memory, by device, first come first served.
    grows: Vec<VecDeque<grow::Pending>>,
    channels: Vec<channel::Pending>,
    /// Highest DONE that somebody's hold names, of timelines whose client is gone.
    named_values: HashMap<u32, u64>,
    /// Holds that shall outlive their producer: (producer, place).
    adoptions: HashMap<(u32, u32), adopt::Adoption>,
    connections: u64,
    serials: u64,
    asks: u64,
    last_slot: u32,
    next_beats: Instant,
    orphans: burial::Watch,
    /// Whose waiters were released in this turn.
    dead: Vec<u32>,
    place: Place,
}

impl Owner {
    /// Opens the devices, makes the control memory and listens. Clients may connect from here on; they are served by [`Owner::run`].
    ///
    /// # Errors
    /// [`OwnerError`]; nothing is left behind then.
    pub fn bind(config: Config) -> Result<Self, OwnerError> {
        let key = match &config.key {
            Some(key) if (32..=128).contains(&key.len()) && key.bytes().all(|byte| byte.is_ascii_hexdigit()) => key.clone(),
            Some(_) => return Err(OwnerError::Key),
            None => place::random_hex::<32>()?,
        };
        let parent = match config.parent_pid {
            Some(pid) => Some(process::pidfd_of(pid).map_err(|error| OwnerError::Parent { pid, error })?),
            None => None,
        };
        let served = devices::open(&config)?;
        let mut random = [0; 16];
        place::random(&mut random)?;
        let random = u128::from_ne_bytes(random);
        let token = [(random >> 64) as u64, random as u64];
        let control = Control::create(token, std::process::id())?;
        let stop = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(OwnerError::system("eventfd"))?;
        let (place, listener) = Place::make(config.socket_dir.as_deref())?;
        let grows = served.iter().map(|_| VecDeque::new()).collect();
        let estate = Estate::new(served, Duration::from_millis(config.spare_ms));
        rows::write_devices(&control, &estate, u32::MAX);
        let now = Instant::now();
        tracing::info!(socket = %place.socket().display(), devices = estate.devices.len(), "owner bound");
        Ok(Self {
            config,
            key,
            token,
            control,
            estate,
            listener,
            listen_after: None,
            stop: Arc::new(stop),
            stops: Vec::new(),
            parent,
            ended: None,
            clients: (0..MAX_CLIENTS).map(|_| None).collect(),
            observers: BTreeMap::new(),
            greetings: BTreeMap::new(),
            grows,
            channels: Vec::new(),
            named_values: HashMap::new(),
            adoptions: HashMap::new(),
            connections: 0,
            serials: 0,
            asks: 0,
            last_slot: MAX_CLIENTS as u32 - 1,
            next_beats: now,
            orphans: burial::Watch::new(now),
            dead: Vec::new(),
            place,
        })
    }

    /// Where clients connect (`MILLPOND_SOCKET`).
    #[must_use]
    pub fn socket(&self) -> &Path {
        self.place.socket()
    }

    /// What clients must know (`MILLPOND_KEY`).
    #[must_use]
    pub fn key(&self) -> &str {
        &self.key
    }

    /// The control memory.
    #[must_use]
    pub fn control(&self) -> &Control {
        &self.control
    }

    /// A handle that ends [`Owner::run`] from another thread.
    #[must_use]
    pub fn stopper(&self) -> Stopper {
        Stopper(Arc::clone(&self.stop))
    }

    /// Makes [`Owner::run`] return when this descriptor becomes readable (a signalfd, say). What it holds is not read.
    pub fn stop_when_readable(&mut self, fd: OwnedFd) {
        self.stops.push(fd);
    }

    /// Serves until told to end, or until the parent process has ended. Clients are told goodbye.
    ///
    /// # Errors
    /// [`OwnerError::System`] where waiting itself fails.
    pub fn run(&mut self) -> Result<Ended, OwnerError> {
        loop {
            if let Some(ended) = self.ended {
                self.say_goodbye();
                return Ok(ended);
            }
            self.turn()?;
        }
    }

    fn client(&self, slot: u32) -> Option<&Client> {
        self.clients.get(slot as usize)?.as_ref()
    }

    fn client_mut(&mut self, slot: u32) -> Option<&mut Client> {
        self.clients.get_mut(slot as usize)?.as_mut()
    }

    fn token_text(&self) -> String {
        format!("{:016x}{:016x}", self.token[0], self.token[1])
    }

    /// Says that memory came back or holds are done.
    fn note_change(&self) {
        self.control.changes().note();
    }

    /// Tells everybody that the owner ends, and gives them a moment to take it up.
    fn say_goodbye(&mut self) {
        self.tell_all(None, &crate::wire::Ask::Goodbye);
        self.flush_rows();
        let until = Instant::now() + Duration::from_millis(200);
        loop {
            self.flush_links();
            let waiting: Vec<_> = self.clients.iter().flatten().filter(|client| client.is_present() && client.link.has_unsent()).collect();
            let left = until.saturating_duration_since(Instant::now());
            if waiting.is_empty() || left.is_zero() {
                return;
            }
            let mut fds: Vec<_> = waiting
                .iter()
                .map(|client| rustix::event::PollFd::from_borrowed_fd(client.link.socket(), rustix::event::PollFlags::OUT))
                .collect();
            let step = left.min(Duration::from_millis(20));
            let _ = rustix::event::poll(&mut fds, Some(&turn::timespec(step)));
        }
    }

    /// Duplicates of descriptors; every one is close-on-exec.
    fn duplicates(fds: impl IntoIterator<Item = impl AsFd>) -> Result<Vec<OwnedFd>, rustix::io::Errno> {
        fds.into_iter().map(|fd| rustix::io::fcntl_dupfd_cloexec(fd, 3)).collect()
    }
}
