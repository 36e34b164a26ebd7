//! A client made of frames, and an owner in a thread.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use millpond_ipc::control::{Control, LiveRow, LAYOUT};
use millpond_ipc::ledger::{ClientLedger, DeviceLedger, Ledger};
use millpond_ipc::owner::{Config, DriverChoice, Ended, Owner, OwnerError, Stopper};
use millpond_ipc::wire::{
    send_frame, Answer, Ask, Chunk, FrameError, FrameReader, FromClient, FromOwner, Hello, Refusal, Request, Role, Welcome, PROTOCOL,
};
use rustix::net::{connect, socket_with, AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

pub(crate) const MIB: u64 = 1 << 20;
/// The host device's granularity.
pub(crate) const UNIT: u64 = 2 * MIB;
/// As long as anything may take on a busy machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

/// Waits for a condition.
pub(crate) fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < PATIENCE, "not seen in {PATIENCE:?}: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A process that only waits; it is killed when dropped.
pub(crate) struct Sleeper(pub(crate) std::process::Child);

impl Sleeper {
    pub(crate) fn start() -> Self {
        let null = std::process::Stdio::null;
        Self(std::process::Command::new("sleep").arg("600").stdout(null()).stderr(null()).spawn().unwrap())
    }

    pub(crate) fn kill(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

impl Drop for Sleeper {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The program: where cargo built it, or `MILLPOND_PROGRAM` (a machine without cargo).
#[cfg(feature = "cli")]
pub(crate) fn program() -> String {
    std::env::var("MILLPOND_PROGRAM").unwrap_or_else(|_| env!("CARGO_BIN_EXE_millpond").to_owned())
}

/// An owner in a thread of this process.
pub(crate) struct Served {
    pub(crate) socket: PathBuf,
    pub(crate) key: String,
    stopper: Stopper,
    thread: Option<JoinHandle<Result<Ended, OwnerError>>>,
}

/// A small host device, and quick looks.
pub(crate) fn config() -> Config {
    Config { driver: DriverChoice::Host, host_bytes: Some(256 * MIB), heartbeat_ms: 20, trim_timeout_ms: 300, ..Config::default() }
}

impl Served {
    pub(crate) fn start(config: Config) -> Self {
        let mut owner = Owner::bind(config).unwrap();
        let (socket, key, stopper) = (owner.socket().to_owned(), owner.key().to_owned(), owner.stopper());
        let thread = Some(std::thread::spawn(move || owner.run()));
        Self { socket, key, stopper, thread }
    }

    pub(crate) fn attach(&self, name: &str) -> Raw {
        self.attach_as(name, Role::Worker)
    }

    pub(crate) fn attach_as(&self, name: &str, role: Role) -> Raw {
        Raw::attach(&self.socket, &hello(&self.key, name, role)).unwrap()
    }

    pub(crate) fn end(mut self) -> Ended {
        self.stopper.stop();
        self.thread.take().unwrap().join().unwrap().unwrap()
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.stopper.stop();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// A good hello.
pub(crate) fn hello(key: &str, name: &str, role: Role) -> Hello {
    Hello {
        protocol: PROTOCOL,
        layout: LAYOUT,
        key: key.to_owned(),
        name: name.to_owned(),
        role,
        pid: std::process::id(),
        limit: None,
        library: "test".to_owned(),
        python: None,
        torch: None,
        capabilities: Vec::new(),
        fds: 0,
    }
}

/// A bare connection.
pub(crate) struct Wire {
    pub(crate) socket: OwnedFd,
    pub(crate) reader: FrameReader,
}

impl Wire {
    pub(crate) fn connect(path: &Path) -> Self {
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
        connect(&socket, &SocketAddrUnix::new(path).unwrap()).unwrap();
        Self { socket, reader: FrameReader::default() }
    }

    pub(crate) fn send(&self, body: &[u8], fds: &[BorrowedFd<'_>]) -> Result<usize, FrameError> {
        send_frame(self.socket.as_fd(), body, fds, Some(PATIENCE))
    }

    pub(crate) fn read(&mut self) -> Result<FromOwner, FrameError> {
        let frame = self.reader.read_frame(self.socket.as_fd(), Some(PATIENCE), false)?;
        Ok(serde_json::from_slice(&frame).unwrap())
    }

    /// Whether the owner ends the connection, reading what it still says.
    pub(crate) fn is_cut(&mut self) -> bool {
        loop {
            match self.reader.read_frame(self.socket.as_fd(), Some(PATIENCE), false) {
                Ok(_) => {}
                Err(FrameError::Closed(_)) => return true,
                Err(_) => return false,
            }
        }
    }
}

/// An attached client.
pub(crate) struct Raw {
    pub(crate) wire: Wire,
    pub(crate) welcome: Welcome,
    pub(crate) control: Arc<Control>,
    calls: u64,
    asks: Vec<(u64, Ask)>,
}

impl Raw {
    pub(crate) fn attach(path: &Path, hello: &Hello) -> Result<Self, Refusal> {
        Self::attach_with(path, hello, &[])
    }

    pub(crate) fn attach_with(path: &Path, hello: &Hello, fds: &[BorrowedFd<'_>]) -> Result<Self, Refusal> {
        let mut wire = Wire::connect(path);
        wire.send(&serde_json::to_vec(hello).unwrap(), fds).unwrap();
        match wire.read().unwrap() {
            FromOwner::Welcome { welcome } => {
                let control = Control::open(wire.reader.take_fds(welcome.fds).unwrap().pop().unwrap()).unwrap();
                Ok(Self { wire, welcome, control: Arc::new(control), calls: 0, asks: Vec::new() })
            }
            FromOwner::Refused { refused } => {
                assert!(wire.reader.take_fds(1).is_err(), "no descriptor before the hello is good");
                Err(refused)
            }
            other => panic!("{other:?}"),
        }
    }

    pub(crate) fn slot(&self) -> u32 {
        self.welcome.client
    }

    /// The window of the first device.
    pub(crate) fn window(&self) -> u32 {
        self.welcome.devices[0].window
    }

    pub(crate) fn post(&mut self, call: Request) -> u64 {
        self.calls += 1;
        let frame = serde_json::to_vec(&FromClient::Call { call_id: self.calls, call }).unwrap();
        self.wire.send(&frame, &[]).unwrap();
        self.calls
    }

    /// The answer to a call; asks that come before are kept.
    pub(crate) fn answer(&mut self, call: u64) -> (Answer, Vec<OwnedFd>) {
        loop {
            match self.wire.read().unwrap() {
                FromOwner::Answer { call_id, answer, fds } if call_id == call => return (answer, self.wire.reader.take_fds(fds).unwrap()),
                FromOwner::Ask { ask_id, ask, .. } => self.asks.push((ask_id, ask)),
                other => panic!("{other:?}"),
            }
        }
    }

    pub(crate) fn call(&mut self, call: Request) -> (Answer, Vec<OwnedFd>) {
        let call = self.post(call);
        self.answer(call)
    }

    /// The next thing that the owner asks or tells.
    pub(crate) fn next_ask(&mut self) -> (u64, Ask) {
        if !self.asks.is_empty() {
            return self.asks.remove(0);
        }
        match self.wire.read().unwrap() {
            FromOwner::Ask { ask_id, ask, .. } => (ask_id, ask),
            other => panic!("{other:?}"),
        }
    }

    /// Whether no ask came before the last answer.
    pub(crate) fn heard_nothing(&self) -> bool {
        self.asks.is_empty()
    }

    pub(crate) fn answered(&mut self, ask_id: u64, bytes: u64) {
        let frame = serde_json::to_vec(&FromClient::Answered { ask_id, bytes }).unwrap();
        self.wire.send(&frame, &[]).unwrap();
    }

    pub(crate) fn grow(&mut self, bytes: u64) -> Vec<Chunk> {
        match self.call(Request::Grow { device: 0, bytes, press: true }) {
            (Answer::Granted { chunks }, fds) => {
                assert_eq!(fds.len(), chunks.len());
                chunks
            }
            (other, _) => panic!("{other:?}"),
        }
    }

    pub(crate) fn release(&mut self, chunks: &[Chunk]) -> (u64, u64) {
        match self.call(Request::Release { epochs: epochs(chunks) }) {
            (Answer::Released { bytes, retired }, _) => (bytes, retired),
            (other, _) => panic!("{other:?}"),
        }
    }

    pub(crate) fn import(&mut self, window: u32, chunks: &[Chunk]) -> (Answer, Vec<OwnedFd>) {
        self.call(Request::Import { window, epochs: epochs(chunks) })
    }

    /// Says how much of the first device is in live blocks.
    pub(crate) fn say_used(&self, allocated: u64) {
        self.control.live(self.slot(), 0).unwrap().write(&LiveRow { allocated, ..LiveRow::default() });
    }

    /// The first device's ledger, from shared memory.
    pub(crate) fn ledger(&self) -> DeviceLedger {
        Ledger::read(&self.control, 0).devices.remove(0)
    }

    pub(crate) fn ledger_of(&self, slot: u32) -> Option<ClientLedger> {
        self.ledger().clients.into_iter().find(|client| client.client == slot)
    }

    pub(crate) fn state_of(&self, slot: u32) -> &'static str {
        self.ledger_of(slot).map_or("gone", |client| client.state)
    }

    /// Leaves in good order.
    pub(crate) fn detach(mut self) {
        assert_eq!(self.call(Request::Detach).0, Answer::Done);
    }
}

/// Checks the books of a device.
pub(crate) fn assert_sums(ledger: &DeviceLedger) {
    let clients: u64 = ledger.clients.iter().map(|client| client.reserved).sum();
    assert_eq!(clients + ledger.retired + ledger.orphaned, ledger.reserved, "{ledger:#?}");
    assert!(ledger.reserved <= ledger.limit && ledger.peak >= ledger.reserved, "{ledger:#?}");
}

pub(crate) fn epochs(chunks: &[Chunk]) -> Vec<u64> {
    chunks.iter().map(|chunk| chunk.epoch).collect()
}
