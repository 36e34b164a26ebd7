//! One worker: allocates, fills, hands on, looks, writes in place, lets go; and dies when its number is up: by itself between two
//! calls, or by a timer, as a rule within one.
#![allow(unsafe_code)] // ending in ways that no library offers

mod start;

pub use start::run;

use std::ffi::CStr;
use std::io::Write;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use millpond_allocator::driver::Stream;
use parking_lot::Mutex;
use rustix::event::{poll, PollFd, PollFlags, Timespec};
use serde::{Deserialize, Serialize};

use super::rig::{Rig, LARGEST, PATTERNS};
use super::Dice;
use crate::client::{Channel, Client, Error, Incoming, Outgoing, Place, ReceiveOptions, Way};

/// Nothing takes longer, unless it hangs.
const BOUND: Duration = Duration::from_secs(15);
/// How an ended worker says that it meant to.
pub(super) const MEANT: i32 = 86;
/// The name of a thread that is in no call of the library.
pub(super) const BETWEEN: &CStr = c"between";
/// Of those who die, so many are killed by a timer, in percent.
const BY_TIMER: u64 = 33;
/// In one of so many calls that come next.
const NEXT: u64 = 12;
/// At most so many nanoseconds after it has begun, if it takes as long.
const MOMENT: u64 = 30_000;
/// The most blocks that others may hold before a worker waits with more.
const LENT: usize = 48;

/// What goes with a value.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
struct Label {
    /// Pattern, place in it, bytes.
    content: (u64, u64, u64),
    /// Nobody else reads it: it may be written in place.
    alone: bool,
    /// How often it was passed on.
    hops: u32,
}

type Peers = Arc<Vec<Mutex<Option<Arc<Channel>>>>>;

struct Worker {
    client: Arc<Client>,
    rig: Rig,
    peers: Peers,
    me: usize,
    dice: Dice,
    ops: u64,
    transfers: u64,
    die_at: u64,
    /// To be killed by a timer, after so many more calls.
    due: Option<u64>,
    said: Instant,
    place: Place,
    /// Nothing new is made or passed on any more: what is on its way comes to its end.
    draining: bool,
    /// When something was last received, and whether it was said that all is over.
    quiet: Instant,
    idle: bool,
}

fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    // Nobody to say it to: the supervisor is gone, and so should this be.
    if writeln!(out, "{line}").and_then(|()| out.flush()).is_err() {
        std::process::exit(1);
    }
}

/// SIGKILL from the kernel, in so many nanoseconds, wherever this process is then.
fn kill_in(nanoseconds: u64) {
    // SAFETY: plain data, for which zeroes are a value.
    let (mut event, mut when): (libc::sigevent, libc::itimerspec) = unsafe { (std::mem::zeroed(), std::mem::zeroed()) };
    (event.sigev_notify, event.sigev_signo) = (libc::SIGEV_SIGNAL, libc::SIGKILL);
    when.it_value.tv_nsec = nanoseconds as libc::c_long;
    let mut timer = std::ptr::null_mut();
    // SAFETY: the kernel writes the timer and reads the others; they live until it has.
    let set = unsafe {
        libc::timer_create(libc::CLOCK_MONOTONIC, &raw mut event, &raw mut timer) == 0
            && libc::timer_settime(timer, 0, &raw const when, std::ptr::null_mut()) == 0
    };
    if !set {
        say(&format!("odd no timer: {}", std::io::Error::last_os_error()));
    }
}

impl Worker {
    /// One operation; the one at which this worker dies is any of them.
    fn op(&mut self) {
        self.ops += 1;
        if self.ops >= self.die_at {
            self.die();
        }
        if self.said.elapsed() > Duration::from_millis(100) {
            self.said = Instant::now();
            say(&format!("p {} {}", self.ops, self.transfers));
        }
    }

    /// A call of the library: the thread has its name meanwhile, by which the supervisor sees where it was killed.
    fn call<T>(&mut self, name: &CStr, call: impl FnOnce(&mut Self) -> T) -> T {
        let _ = rustix::thread::set_name(name);
        self.due = match self.due {
            Some(0) => {
                say("due");
                kill_in(1 + self.dice.below(MOMENT));
                None
            }
            due => due.map(|calls| calls - 1),
        };
        let result = call(self);
        let _ = rustix::thread::set_name(BETWEEN);
        result
    }

    fn die(&mut self) {
        say(&format!("p {} {}", self.ops, self.transfers));
        if self.dice.percent(BY_TIMER) {
            (self.due, self.die_at) = (Some(self.dice.below(NEXT)), u64::MAX);
            return;
        }
        match self.dice.below(4) {
            0 => {
                say("stop");
                // SAFETY: no pointers.
                unsafe { libc::raise(libc::SIGSTOP) };
            }
            // SAFETY: no pointers.
            1 => unsafe { libc::_exit(MEANT) },
            // SAFETY: the default action ends the process.
            2 => unsafe {
                libc::signal(libc::SIGSEGV, libc::SIG_DFL);
                libc::raise(libc::SIGSEGV);
            },
            _ => {}
        }
        // SAFETY: no pointers.
        unsafe { libc::raise(libc::SIGKILL) };
        std::process::abort();
    }

    fn turn(&mut self) -> Result<(), Error> {
        let received = self.receive_all()?;
        if self.dice.below(200) == 0 {
            self.give_back()?;
        }
        if self.client.leases() < LENT && (received == 0 || self.dice.percent(60)) {
            self.make()?;
        } else if received == 0 {
            std::thread::sleep(Duration::from_micros(200));
        }
        Ok(())
    }

    /// Gives memory back, if others let go of it soon: what is had next lies at the same addresses, under new epochs.
    fn give_back(&mut self) -> Result<(), Error> {
        let until = Instant::now() + Duration::from_millis(50);
        while self.client.leases() > 0 && Instant::now() < until {
            self.receive_all()?;
            std::thread::sleep(Duration::from_micros(200));
        }
        // What streams are not done with goes once they are.
        let heap = self.client.heap(self.place)?;
        heap.empty_cache();
        while !heap.chunks().is_empty() && Instant::now() < until {
            std::thread::sleep(Duration::from_micros(200));
            heap.empty_cache();
        }
        self.op();
        Ok(())
    }

    fn channel(&self, peer: usize) -> Option<Arc<Channel>> {
        self.peers.get(peer)?.lock().clone()
    }

    /// A peer other than this worker and `but`.
    fn somebody(&mut self, but: usize) -> Option<(usize, Arc<Channel>)> {
        let count = self.peers.len();
        let first = self.dice.below(count as u64) as usize;
        let others = (first..first + count).map(|n| n % count).filter(|n| *n != self.me && *n != but);
        others.into_iter().find_map(|peer| Some((peer, self.channel(peer)?)))
    }

    fn forget(&self, peer: usize) {
        if let Some(place) = self.peers.get(peer) {
            *place.lock() = None;
        }
    }

    fn size(&mut self) -> u64 {
        match self.dice.below(10) {
            0 => 1 + self.dice.below(LARGEST),
            1..=4 => 1 + self.dice.below(256 << 10),
            _ => 1 + self.dice.below(16 << 10),
        }
    }

    fn content(&mut self, bytes: u64) -> (u64, u64, u64) {
        (self.dice.below(PATTERNS), self.dice.below(LARGEST - bytes + 1), bytes)
    }

    fn label(&self, label: Label) -> Result<Box<serde_json::value::RawValue>, Error> {
        serde_json::value::to_raw_value(&label).map_err(|error| Error::Internal(error.to_string()))
    }

    /// Makes a value and sends it to one, or to two; frees it at once.
    fn make(&mut self) -> Result<(), Error> {
        let Some((peer, channel)) = self.somebody(self.me) else { return Ok(()) };
        let second = if self.dice.percent(15) { self.somebody(peer) } else { None };
        let bytes = self.size();
        let stream = self.rig.stream(&mut self.dice);
        let heap = self.client.heap(self.place)?;
        let addr = match self.call(c"allocate", |_| heap.allocate(bytes, stream)).map_err(Error::from) {
            Ok(addr) => addr,
            // The dead's memory is on its way back.
            Err(Error::OutOfMemory(_)) => return Ok(()),
            Err(error) => return Err(error),
        };
        self.op();
        // A slow producer: what was there before is seen by whoever does not wait.
        let gate = if self.dice.percent(25) { Some(self.rig.gate(stream)?) } else { None };
        let label = Label { content: self.content(bytes), alone: second.is_none(), hops: 0 };
        self.rig.fill(addr, label.content, stream)?;
        self.op();
        let tensor = Outgoing { addr, bytes, place: self.place, stream: Some(stream), import: None, read_only: false, way: Way::Found };
        for (peer, channel) in [Some((peer, channel)), second].into_iter().flatten() {
            self.send(peer, &channel, label, tensor)?;
        }
        self.call(c"free", |_| heap.free(addr))?;
        self.op();
        if let Some(gate) = gate {
            std::thread::sleep(Duration::from_micros(300));
            gate.open();
        }
        Ok(())
    }

    fn send(&mut self, peer: usize, channel: &Channel, label: Label, tensor: Outgoing) -> Result<(), Error> {
        let tree = self.label(label)?;
        match self.call(c"send", |worker| worker.client.send(channel, tree, &[tensor], Some(BOUND))) {
            Ok(_) => {}
            // The channel's other end.
            Err(Error::Closed(_)) => self.forget(peer),
            // The value's producer: it is not passed on.
            Err(Error::PeerDied(_)) => {}
            Err(error) => return Err(error),
        }
        self.op();
        Ok(())
    }

    /// Receives one message of each peer that has sent one.
    fn receive_all(&mut self) -> Result<u32, Error> {
        let mut received = 0;
        let me = self.me;
        for peer in (0..self.peers.len()).filter(|peer| *peer != me) {
            let Some(channel) = self.channel(peer) else { continue };
            // SAFETY: the channel outlives the borrow, and its socket is open as long as it lives.
            let fd = unsafe { BorrowedFd::borrow_raw(channel.raw_fd()) };
            let ready = poll(&mut [PollFd::from_borrowed_fd(fd, PollFlags::IN)], Some(&Timespec { tv_sec: 0, tv_nsec: 0 }));
            if !ready.is_ok_and(|ready| ready > 0) {
                continue;
            }
            match self.receive(&channel, peer) {
                Ok(()) => received += 1,
                // The value's producer; its sender may be well.
                Err(Error::PeerDied(_)) => {}
                Err(Error::Closed(_)) => self.forget(peer),
                Err(error) => return Err(error),
            }
        }
        Ok(received)
    }

    fn receive(&mut self, channel: &Channel, peer: usize) -> Result<(), Error> {
        let stream = self.rig.stream(&mut self.dice);
        // On the stream, on the CPU, or only passed on before it is looked at.
        let way = self.dice.below(3);
        let options = ReceiveOptions { timeout: Some(BOUND), lazy: way == 2, wait: way == 1, stream: &|_| Some(stream) };
        let message = self.call(c"receive", |worker| worker.client.receive(channel, &options))?;
        self.transfers += 1;
        let label: Label = serde_json::from_str(message.tree.get()).map_err(|error| Error::Internal(error.to_string()))?;
        let Some(mut tensor) = message.tensors.first().copied() else { return Err(Error::Internal("a value is missing".to_owned())) };
        self.op();
        let used = self.use_value(&mut tensor, label, stream, way, peer);
        // Those that return early have not let go.
        if used.is_err() {
            let _ = self.release(&mut tensor);
        }
        used
    }

    fn use_value(&mut self, tensor: &mut Incoming, label: Label, stream: Stream, way: u64, peer: usize) -> Result<(), Error> {
        let mut alone = label.alone;
        if !self.draining && label.hops < 3 && (way == 2 || self.dice.percent(10)) {
            if let Some((third, channel)) = self.somebody(peer) {
                let whole = Outgoing {
                    addr: tensor.addr,
                    bytes: tensor.bytes,
                    place: self.place,
                    stream: None,
                    import: Some(tensor.import),
                    read_only: false,
                    way: Way::Found,
                };
                self.send(third, &channel, Label { alone: false, hops: label.hops + 1, ..label }, whole)?;
                alone = false;
            }
        }
        if way == 2 {
            let import = tensor.import;
            tensor.addr = self.call(c"open", |worker| worker.client.open_import(import, Some(stream), true, Some(BOUND)))?;
            self.op();
        }
        if !self.draining && alone && way == 1 && label.hops < 3 && self.dice.percent(40) {
            return self.rewrite(tensor, label, stream, peer);
        }
        if way == 0 {
            // The stream waits for READY; whether it came is asked afterwards, and only then is it let go of.
            self.rig.look(tensor.addr, tensor.bytes, stream)?;
            self.op();
            let differs = self.rig.compare(label.content, stream)?;
            let import = tensor.import;
            self.call(c"ready", |worker| worker.client.import_ready(import, Some(BOUND)))?;
            self.judge(differs, label);
            return self.release(tensor);
        }
        // Let go of before the stream has read it: only the DONE keeps the bytes.
        let gate = if self.dice.percent(40) { Some(self.rig.gate(stream)?) } else { None };
        self.rig.look(tensor.addr, tensor.bytes, stream)?;
        self.release(tensor)?;
        if let Some(gate) = gate {
            std::thread::sleep(Duration::from_micros(500 + self.dice.below(2_000)));
            gate.open();
        }
        let differs = self.rig.compare(label.content, stream)?;
        self.judge(differs, label);
        self.op();
        Ok(())
    }

    /// Writes another pattern in place and hands it on; this process's DONE is its READY.
    fn rewrite(&mut self, tensor: &mut Incoming, label: Label, stream: Stream, peer: usize) -> Result<(), Error> {
        let label = Label { content: self.content(tensor.bytes), hops: label.hops + 1, ..label };
        self.rig.fill(tensor.addr, label.content, stream)?;
        self.op();
        if let Some((third, channel)) = self.somebody(peer) {
            let whole = Outgoing {
                addr: tensor.addr,
                bytes: tensor.bytes,
                place: self.place,
                stream: Some(stream),
                import: Some(tensor.import),
                read_only: false,
                way: Way::Found,
            };
            self.send(third, &channel, label, whole)?;
        }
        self.release(tensor)
    }

    fn release(&mut self, tensor: &mut Incoming) -> Result<(), Error> {
        let import = std::mem::take(&mut tensor.import);
        self.call(c"release", |worker| worker.client.release(import))?;
        self.op();
        Ok(())
    }

    fn judge(&self, differs: Option<String>, label: Label) {
        if let Some(how) = differs {
            say(&format!("bad pattern {} after {} hops: {how}", label.content.0, label.hops));
        }
    }

    /// Receives what is still on its way. Says so when nothing of anybody is held here and nothing of this worker by others.
    fn drain(&mut self) -> Result<(), Error> {
        if self.receive_all()? > 0 {
            self.quiet = Instant::now();
        }
        std::thread::sleep(Duration::from_millis(1));
        if self.idle || self.quiet.elapsed() < Duration::from_millis(300) {
            return Ok(());
        }
        let (leases, imported) = (self.client.leases(), self.client.imported_bytes());
        if (leases, imported) != (0, 0) {
            if self.quiet.elapsed() < BOUND {
                return Ok(());
            }
            let me = self.me;
            say(&format!("stuck {leases} leases of w{me} are held by nobody who would let go, {imported} bytes of others are held by it"));
        }
        self.idle = true;
        say(&format!("p {} {}", self.ops, self.transfers));
        say("idle");
        Ok(())
    }
}
