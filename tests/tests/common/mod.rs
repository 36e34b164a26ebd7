//! An owner and workers as real processes: this test's program again, told by its environment what to be.
//!
//! A worker takes one command a line and answers each with one line, so a test is a script over several processes. Every
//! answer is waited for with a bound: a worker that hangs fails its test.
#![allow(dead_code, unreachable_pub)] // each test program uses its own part

mod signals;
mod worker;

use std::io::{BufRead, BufReader, Write};
use std::os::fd::BorrowedFd;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{channel, Receiver};
use std::sync::Arc;
use std::time::{Duration, Instant};

use millpond_allocator::driver::DeviceInfo;
use millpond_ipc::client::{Channel, Client, Options, Outgoing, Place, ReceiveOptions, Way};
use millpond_ipc::ledger::{ClientLedger, Ledger};
use millpond_ipc::observer::Observer;
use millpond_ipc::owner::{Config, DriverChoice, Limit, Owner};
use millpond_ipc::wire::Role;

/// No answer may take longer, on however slow a machine.
pub const BOUND: Duration = Duration::from_secs(20);
pub const MIB: u64 = 1 << 20;

/// Whether owners and workers are of the CUDA driver: `MILLPOND_TEST_DRIVER=cuda`, by tests/gpu/run.sh. Not every test can be so.
pub fn on_gpu() -> bool {
    std::env::var("MILLPOND_TEST_DRIVER").is_ok_and(|driver| driver == "cuda")
}

/// The first device of a client's arena that its process sees.
pub fn place(client: &Client) -> Place {
    let places = client.grants().filter_map(|grant| grant.device.parse().ok()).map(Place::Device);
    let seen = |place: &Place| client.driver(*place).is_ok();
    if on_gpu() { places.into_iter().next() } else { places.into_iter().find(seen) }.unwrap_or(Place::Host)
}

/// The two ends of a channel between two clients of this process: both must ask for it.
pub fn channels(a: &Client, b: &Client) -> (Channel, Channel) {
    std::thread::scope(|scope| {
        let to_b = scope.spawn(|| a.connect(b.name(), BOUND).unwrap());
        let to_a = scope.spawn(|| b.connect(a.name(), BOUND).unwrap());
        (to_b.join().unwrap(), to_a.join().unwrap())
    })
}

/// Bytes of the host device that the CPU wrote.
pub fn outgoing(addr: u64, bytes: u64) -> Outgoing {
    Outgoing { addr, bytes, place: Place::Host, stream: None, import: None, read_only: false, way: Way::Found }
}

pub fn fd(channel: &Channel) -> BorrowedFd<'_> {
    // SAFETY: the channel outlives the borrow, and keeps its socket open.
    unsafe { BorrowedFd::borrow_raw(channel.raw_fd()) }
}

/// The bytes of the next frame, taken off the wire.
pub fn sniff(channel: &Channel) -> Vec<u8> {
    let mut bytes = vec![0; 1 << 16];
    let n = rustix::io::read(fd(channel), &mut bytes).unwrap();
    bytes.truncate(n);
    let length = u32::from_be_bytes(bytes[..4].try_into().unwrap()) as usize;
    assert_eq!(length + 4, n, "one whole frame");
    bytes.split_off(4)
}

/// What the test's program does when it is not the test: see [`Arena`] and [`Worker`].
pub fn role() {
    match std::env::var("MILLPOND_TEST_ROLE").as_deref() {
        Ok("owner") => owner(),
        Ok("worker") => worker::run(),
        _ => {}
    }
}

fn owner() {
    let bytes = |name: &str| std::env::var(name).unwrap().parse().unwrap();
    let config = Config {
        driver: if on_gpu() { DriverChoice::Cuda } else { DriverChoice::Host },
        limit: Limit::Bytes(bytes("MILLPOND_TEST_LIMIT")),
        host_bytes: Some(64 << 30),
        chunk_bytes: Some(bytes("MILLPOND_TEST_CHUNK")),
        heartbeat_ms: 10,
        stopped_after_ms: 1_000,
        ..Config::default()
    };
    let mut owner = Owner::bind(config).unwrap();
    println!("@{} {}", owner.socket().display(), owner.key());
    owner.run().unwrap();
    std::process::exit(0);
}

/// Starts what follows in user and PID namespaces of its own.
const BOX: [&str; 6] = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child"];

/// Whether [`Arena::boxed`] works here; says so where it does not.
pub fn boxes_work() -> bool {
    let work = Command::new(BOX[0]).args(&BOX[1..]).arg("true").stderr(Stdio::null()).status().is_ok_and(|status| status.success());
    if !work {
        eprintln!("skipped: unshare --user --pid is refused here");
    }
    work
}

/// The same with IPC and mount namespaces too, and a `/dev/shm` that is empty, and nobody else's.
const APART: [&str; 12] = [
    "unshare",
    "--user",
    "--map-root-user",
    "--pid",
    "--ipc",
    "--mount",
    "--fork",
    "--kill-child",
    "sh",
    "-c",
    "mount -t tmpfs none /dev/shm && exec \"$@\"",
    "box",
];

/// Whether [`Arena::apart`] works here; says so where it does not.
pub fn apart_works() -> bool {
    let work = Command::new(APART[0]).args(&APART[1..]).arg("true").stderr(Stdio::null()).status().is_ok_and(|status| status.success());
    if !work {
        eprintln!("skipped: unshare --user --pid --ipc --mount, or a mount there, is refused here");
    }
    work
}

/// This program in a role, without what surrounds the tests of the parent.
fn again(role: &str) -> Command {
    again_by(Command::new(std::env::current_exe().unwrap()), role)
}

fn again_by(mut command: Command, role: &str) -> Command {
    command.args(["--exact", "role", "--nocapture", "--test-threads=1"]).env("MILLPOND_TEST_ROLE", role);
    command.env_remove("MILLPOND_SOCKET").env_remove("MILLPOND_KEY");
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    command
}

/// A process that says lines.
pub struct Said {
    pub child: Child,
    stdin: ChildStdin,
    lines: Receiver<String>,
}

impl Said {
    fn start(mut command: Command) -> Self {
        let mut child = command.spawn().unwrap();
        let (stdin, stdout) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                // The test harness writes on the same stream.
                if let Some((_, line)) = line.split_once('@') {
                    let _ = sender.send(line.to_owned());
                }
            }
        });
        Self { child, stdin, lines }
    }

    fn line(&self) -> Option<String> {
        self.lines.recv_timeout(BOUND).ok()
    }

    pub fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    pub fn signal(&self, signal: i32) {
        // SAFETY: a signal to a child that has not been waited for.
        assert_eq!(unsafe { libc::kill(self.pid(), signal) }, 0);
        if signal == libc::SIGSTOP {
            // One thread takes the signal, and only then the others stop: on a busy machine they go on for a while.
            eventually("all of its threads stop", || self.is_stopped());
        }
    }

    fn is_stopped(&self) -> bool {
        let Ok(threads) = std::fs::read_dir(format!("/proc/{}/task", self.pid())) else { return true };
        let stat = |thread: std::fs::DirEntry| std::fs::read_to_string(thread.path().join("stat")).unwrap_or_default();
        threads.flatten().map(stat).all(|stat| stat.rsplit(')').next().unwrap_or_default().trim_start().starts_with('T'))
    }

    pub fn wait(&mut self) {
        eventually("a process ends", || self.child.try_wait().unwrap().is_some());
    }
}

impl Drop for Said {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// An owner in a process of its own.
pub struct Arena {
    pub owner: Said,
    pub socket: PathBuf,
    pub key: String,
    /// A client whose memory the books leave out: what it does is not what the test is about.
    pub beside: &'static str,
}

impl Arena {
    pub fn new() -> Self {
        Self::with(4 << 30, 32 * MIB)
    }

    pub fn with(limit: u64, chunk: u64) -> Self {
        Self::with_vars(limit, chunk, &[])
    }

    /// With more in the owner's environment.
    pub fn with_vars(limit: u64, chunk: u64, vars: &[(&str, &str)]) -> Self {
        let mut command = again("owner");
        command.envs(vars.iter().copied());
        command.env("MILLPOND_TEST_LIMIT", limit.to_string()).env("MILLPOND_TEST_CHUNK", chunk.to_string());
        let owner = Said::start(command);
        let line = owner.line().expect("no owner");
        let (socket, key) = line.split_once(' ').unwrap();
        Self { socket: socket.into(), key: key.to_owned(), owner, beside: "" }
    }

    pub fn worker(&self, name: &str) -> Worker {
        self.worker_with(name, &[])
    }

    pub fn worker_with(&self, name: &str, vars: &[(&str, &str)]) -> Worker {
        self.worker_by(again("worker"), name, vars)
    }

    /// A worker in user and PID namespaces of its own; killing it kills what surrounds it too.
    pub fn boxed(&self, name: &str) -> Worker {
        self.within(&BOX, name)
    }

    /// A worker in PID, IPC and mount namespaces of its own, with its own `/dev/shm`.
    pub fn apart(&self, name: &str) -> Worker {
        self.within(&APART, name)
    }

    fn within(&self, walls: &[&str], name: &str) -> Worker {
        let mut command = Command::new(walls[0]);
        command.args(&walls[1..]).arg(std::env::current_exe().unwrap());
        self.worker_by(again_by(command, "worker"), name, &[])
    }

    fn worker_by(&self, mut command: Command, name: &str, vars: &[(&str, &str)]) -> Worker {
        command.env("MILLPOND_TEST_NAME", name).env("MILLPOND_SOCKET", &self.socket).env("MILLPOND_KEY", &self.key);
        command.envs(vars.iter().copied());
        let worker = Worker { said: Said::start(command), name: name.to_owned(), child: None };
        worker.attached()
    }

    /// Two that start at once.
    pub fn pair(&self, a: &str, b: &str) -> (Worker, Worker) {
        let start = |name: &str| {
            let mut command = again("worker");
            command.env("MILLPOND_TEST_NAME", name).env("MILLPOND_SOCKET", &self.socket).env("MILLPOND_KEY", &self.key);
            Worker { said: Said::start(command), name: name.to_owned(), child: None }
        };
        let (a, b) = (start(a), start(b));
        (a.attached(), b.attached())
    }

    pub fn options(&self, name: &str) -> Options {
        Options { role: Role::Worker, ..Options::new(self.socket.clone(), self.key.clone(), name.to_owned()) }
    }

    /// A client in this process.
    pub fn client(&self, name: &str) -> Arc<Client> {
        Client::attach(&self.options(name)).unwrap()
    }

    pub fn ledger(&self) -> Ledger {
        Observer::connect(&self.socket, &self.key, BOUND).unwrap().ledger()
    }

    /// The host device's (reserved, retired, orphaned).
    pub fn books(&self) -> (u64, u64, u64) {
        let ledger = self.ledger();
        let device = &ledger.devices[0];
        let sum: u64 = device.clients.iter().map(|client| client.reserved).sum();
        let beside: u64 = device.clients.iter().filter(|client| client.name == self.beside).map(|client| client.reserved).sum();
        let books = (device.reserved.saturating_sub(beside), device.retired, device.orphaned);
        // Rows are read one by one: looked at again where they do not fit.
        if sum + device.retired + device.orphaned != device.reserved {
            return (u64::MAX, device.retired, device.orphaned);
        }
        books
    }

    pub fn row(&self, name: &str) -> Option<ClientLedger> {
        self.ledger().devices[0].clients.iter().find(|client| client.name == name).cloned()
    }

    /// Everything is back that nobody alive holds, and the books fit.
    pub fn settles_at(&self, reserved: u64) {
        let mut last = (0, 0, 0);
        let settled = wait_for(|| {
            last = self.books();
            last == (reserved, 0, 0)
        });
        assert!(settled, "books {last:?}, expected {reserved} reserved; {}", self.ledger());
    }
}

/// A client in a process of its own.
pub struct Worker {
    pub said: Said,
    pub name: String,
    /// A child that it forked.
    child: Option<i32>,
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.end_child();
    }
}

impl Worker {
    fn attached(self) -> Self {
        assert_eq!(self.said.line().as_deref(), Some("attached"), "{}", self.name);
        self
    }

    /// Starts a command; its answer is taken by [`Worker::answer`].
    pub fn ask(&mut self, command: &str) {
        writeln!(self.said.stdin, "{command}").unwrap();
    }

    pub fn answer(&mut self) -> String {
        self.said.line().unwrap_or_else(|| panic!("{} hangs, or has ended", self.name))
    }

    /// Whether an answer comes within a moment.
    pub fn answers_within(&mut self, time: Duration) -> Option<String> {
        self.said.lines.recv_timeout(time).ok()
    }

    /// A command and its answer, whatever it is.
    pub fn tell(&mut self, command: &str) -> String {
        self.ask(command);
        self.answer()
    }

    /// A command that must succeed; what it gives.
    pub fn ok(&mut self, command: &str) -> String {
        let answer = self.tell(command);
        answer.strip_prefix("ok").unwrap_or_else(|| panic!("{}: {command}: {answer}", self.name)).trim().to_owned()
    }

    pub fn number(&mut self, command: &str) -> u64 {
        self.ok(command).parse().unwrap()
    }

    /// A command that must fail with this code.
    pub fn fails(&mut self, code: &str, command: &str) -> String {
        let answer = self.tell(command);
        assert!(answer.starts_with(&format!("err {code} ")), "{}: {command}: {answer}", self.name);
        answer
    }

    /// Forks a child that does nothing, if there is none yet. It outlives its parent.
    pub fn fork(&mut self) {
        if self.child.is_none() {
            self.child = Some(self.ok("fork").parse().unwrap());
        }
    }

    /// Ends the child that it forked, if there is one.
    pub fn end_child(&mut self) {
        if let Some(child) = self.child.take() {
            // SAFETY: a child of our child, alive until here: it only pauses.
            unsafe { libc::kill(child, libc::SIGKILL) };
            // Whoever inherited it may reap it late; what it had open is closed by then.
            let stat = || std::fs::read_to_string(format!("/proc/{child}/stat")).unwrap_or_default();
            wait_for(|| stat().rsplit(')').next().unwrap_or_default().trim_start().chars().next().is_none_or(|state| "ZX".contains(state)));
        }
    }

    /// Ends in a manner, whatever it is at; returns when the process is gone.
    pub fn die(&mut self, how: &str) {
        match how {
            "stop" => self.said.signal(libc::SIGSTOP),
            "exit" => self.said.signal(libc::SIGUSR1),
            "segv" => self.said.signal(libc::SIGUSR2),
            _ => {}
        }
        if matches!(how, "kill" | "stop") {
            self.said.signal(libc::SIGKILL);
        }
        self.said.wait();
        let status = self.said.child.wait().unwrap();
        let as_told = match how {
            "exit" => status.code() == Some(3),
            "segv" => status.signal() == Some(libc::SIGSEGV),
            _ => status.signal() == Some(libc::SIGKILL),
        };
        assert!(as_told, "{} was to end by {how}: {status}", self.name);
    }
}

/// A channel between two workers: each one's number of it.
pub fn link(a: &mut Worker, b: &mut Worker) -> (u64, u64) {
    a.ask(&format!("connect {}", b.name));
    b.ask(&format!("connect {}", a.name));
    let number = |answer: String| answer.strip_prefix("ok ").unwrap_or_else(|| panic!("{answer}")).parse().unwrap();
    (number(a.answer()), number(b.answer()))
}

/// A channel between two workers, as [`link`], over which `b` has received a value that `a`'s stalled stream 1 has yet to write: `b`'s
/// stream 1 waits for it.
pub fn send_late(a: &mut Worker, b: &mut Worker) -> (u64, u64) {
    let (ab, ba) = link(a, b);
    a.ok(&format!("alloc {MIB} 1"));
    a.ok("stall 1");
    a.ok("fill 0 1 1");
    a.ok(&format!("send {ab} 0 1"));
    b.ok(&format!("recv {ba} 1"));
    (ab, ba)
}

/// How many descriptors a process has open.
pub fn fds_of(pid: i32) -> usize {
    std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count()
}

pub fn wait_for(mut condition: impl FnMut() -> bool) -> bool {
    let deadline = Instant::now() + BOUND;
    loop {
        if condition() {
            return true;
        }
        if Instant::now() > deadline {
            return false;
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

pub fn eventually(what: &str, condition: impl FnMut() -> bool) {
    assert!(wait_for(condition), "not within {BOUND:?}: {what}");
}

/// A JSON tree without tensors.
pub fn tree() -> Box<serde_json::value::RawValue> {
    serde_json::value::RawValue::from_string("null".to_owned()).unwrap()
}

fn no_stream(_: &DeviceInfo) -> Option<millpond_allocator::driver::Stream> {
    None
}

/// How a process without streams receives.
pub fn plainly(lazy: bool) -> ReceiveOptions<'static> {
    ReceiveOptions { timeout: Some(BOUND), lazy, wait: false, stream: &no_stream }
}

/// A block of the host device, filled.
pub fn block(client: &Client, bytes: u64, byte: u8) -> u64 {
    let addr = client.heap(Place::Host).unwrap().allocate(bytes, millpond_allocator::driver::Stream::LEGACY).unwrap();
    // SAFETY: a live block of so many bytes, which nobody else uses yet.
    unsafe { std::ptr::write_bytes(addr as *mut u8, byte, bytes as usize) };
    addr
}

/// Whether memory holds one byte all over.
pub fn is_all(addr: u64, bytes: u64, byte: u8) -> bool {
    // SAFETY: mapped bytes of a block or an import of this process; other processes write them only if the test tells them to.
    unsafe { std::slice::from_raw_parts(addr as *const u8, bytes as usize) }.iter().all(|found| *found == byte)
}
