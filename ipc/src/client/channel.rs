//! A channel between two clients: messages of a tree (JSON) and tensors (offsets).

use std::collections::HashMap;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::{fence, AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use millpond_allocator::window::Epochs;
use millpond_allocator::Few;
use parking_lot::Mutex;
use rustix::event::{poll, PollFd, PollFlags, Timespec};
use rustix::net::{shutdown, Shutdown};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::error::Error;
use super::lease::HoldRef;
use super::policy::cause_of;
use super::wake::has_ended;
use crate::control::{Control, HoldState, HoldWord, Tier, MAX_CLIENTS};
use crate::wire::{epochs, send_frame, FrameError, FrameReader, Peer};

/// A tensor on the wire.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Descriptor {
    /// Its window. [`NOWHERE`] for one without bytes.
    #[serde(rename = "w")]
    pub(super) window: u32,
    /// Where it starts there.
    #[serde(rename = "o")]
    pub(super) offset: u64,
    /// Its length in bytes.
    #[serde(rename = "n")]
    pub(super) bytes: u64,
    /// The epochs of the chunks that it touches, by address.
    #[serde(rename = "e", default, skip_serializing_if = "Few::is_empty", with = "epochs")]
    pub(super) epochs: Few<Epochs>,
    /// The hold: producer's slot, place in its table, generation.
    #[serde(rename = "h")]
    pub(super) hold: (u32, u32, u32),
    /// Which of the message's signals must be reached before the bytes are what was sent; `None`: the one that there is, if there is one.
    #[serde(rename = "r", default, skip_serializing_if = "Option::is_none")]
    pub(super) ready: Option<Few<u32>>,
    /// The receiver is to map it read-only.
    #[serde(rename = "ro", default, skip_serializing_if = "std::ops::Not::not")]
    pub(super) read_only: bool,
    /// By which tier it came: [`Tier`] as a number, or [`UNCOUNTED`].
    #[serde(rename = "v", default, skip_serializing_if = "is_arena")]
    pub(super) tier: u8,
}

/// The tier of a tensor that only goes with one that is counted.
pub(super) const UNCOUNTED: u8 = u8::MAX;

fn is_arena(tier: &u8) -> bool {
    *tier == Tier::Arena as u8
}

impl Descriptor {
    pub(super) const fn hold(&self) -> HoldRef {
        let (producer, index, generation) = self.hold;
        HoldRef { producer, index, generation }
    }
}

/// The window of a tensor that has no bytes.
pub(super) const NOWHERE: u32 = u32::MAX;

/// What a frame between clients is. Another kind is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Kind {
    Message,
}

/// A message on the wire.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Frame {
    pub(super) kind: Kind,
    /// The sender's own: the shape of the value, carried as it is.
    pub(super) tree: Box<RawValue>,
    /// Signals: (timeline, value).
    #[serde(default, skip_serializing_if = "Few::is_empty")]
    pub(super) ready: Few<(u32, u64)>,
    /// Of those that another client than the sender is to give: (which of the signals, that client's serial).
    #[serde(rename = "by", default, skip_serializing_if = "Few::is_empty")]
    pub(super) makers: Few<(u32, u64)>,
    /// The tensors that the tree numbers.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) tensors: Vec<Descriptor>,
}

/// A frame as it came. Whether it is UTF-8 is looked at once, which is cheaper than text by text.
fn read(frame: &[u8]) -> Result<Frame, String> {
    let text = std::str::from_utf8(frame).map_err(|error| error.to_string())?;
    serde_json::from_str(text).map_err(|error| error.to_string())
}

/// The open channels to one peer.
#[derive(Debug, Default)]
struct Open {
    count: usize,
    /// Our ends of those that were taken.
    sockets: Vec<Weak<OwnedFd>>,
    /// Its death was told.
    dead: bool,
}

/// Whether nobody has the other end of a socket any more, or it was shut down.
fn has_hung_up(socket: &OwnedFd) -> bool {
    let mut fds = [PollFd::new(socket, PollFlags::empty())];
    let looked = poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }));
    looked.is_ok() && fds.iter().any(|fd| fd.revents().contains(PollFlags::HUP))
}

/// The channels of one client, whom they are to, and what is left over when one ends.
#[derive(Debug)]
pub(super) struct Office {
    control: Arc<Control>,
    me: u32,
    pid: u32,
    /// Open channels by the peer's serial.
    open: Mutex<HashMap<u64, Open>>,
    /// Pidfds of those that this client has or had a channel with or imports from, by serial: for when there is no owner any more.
    pidfds: Mutex<HashMap<u64, Arc<OwnedFd>>>,
}

impl Office {
    pub(super) fn new(control: Arc<Control>, me: u32) -> Self {
        Self { control, me, pid: std::process::id(), open: Mutex::default(), pidfds: Mutex::default() }
    }

    /// The owner has made a channel. Noted where that is read, so before its peer's death, which the owner says later: what the dead one
    /// has sent over it is still to be received.
    pub(super) fn opened(&self, peer: &Peer) {
        self.open.lock().entry(peer.serial).or_default().count += 1;
    }

    /// Its end is in somebody's hands.
    fn taken(&self, peer: &Peer, socket: &Arc<OwnedFd>) {
        let mut open = self.open.lock();
        let sockets = &mut open.entry(peer.serial).or_default().sockets;
        sockets.retain(|socket| socket.strong_count() > 0);
        sockets.push(Arc::downgrade(socket));
    }

    /// Notes a client's process.
    pub(super) fn know(&self, serial: u64, pidfd: Arc<OwnedFd>) {
        self.pidfds.lock().insert(serial, pidfd);
    }

    pub(super) fn forget(&self, serial: u64) {
        self.pidfds.lock().remove(&serial);
    }

    pub(super) fn pidfd(&self, serial: u64) -> Option<Arc<OwnedFd>> {
        self.pidfds.lock().get(&serial).cloned()
    }

    /// Whether somebody has the other end of a channel to a client: itself, or a child that it forked.
    pub(super) fn is_held(&self, serial: u64) -> bool {
        let sockets: Vec<_> = self.open.lock().get(&serial).map(|open| open.sockets.clone()).unwrap_or_default();
        sockets.iter().filter_map(Weak::upgrade).any(|socket| !has_hung_up(&socket))
    }

    /// Whether GPU work of a client that was poisoned may run on, for a child that it forked. Of one whose process lives it does not: it
    /// poisoned itself, for its context is dead.
    pub(super) fn may_run_on(&self, serial: u64) -> bool {
        let lives = self.pidfd(serial).is_some_and(|pidfd| !has_ended(&pidfd));
        !lives && self.is_held(serial)
    }

    /// A channel that [`Office::opened`] was told of never came: this process had no descriptor left for it.
    pub(super) fn refused(&self, peer: &Peer) {
        self.ended(peer, Vec::new(), true);
    }

    /// A channel has ended: what came on it and was not received never will be.
    ///
    /// Its frames that are still whole are read, so that their holds end. What a living sender had not sent whole it takes back
    /// itself. What a dead one had not, and what one sent that does not keep to the wire, is ended here, if there is no other
    /// channel to that peer.
    fn ended(&self, peer: &Peer, unread: Vec<Frame>, broken: bool) {
        for hold in unread.iter().flat_map(|frame| &frame.tensors).map(Descriptor::hold) {
            if let Some(record) = self.control.hold(hold.producer, hold.index) {
                record.decline(hold.generation, self.me as u8);
            }
        }
        let (last, dead) = {
            let mut open = self.open.lock();
            match open.get_mut(&peer.serial) {
                Some(channels) if channels.count > 1 => {
                    channels.count -= 1;
                    (false, channels.dead)
                }
                _ => (true, open.remove(&peer.serial).is_some_and(|channels| channels.dead)),
            }
        };
        // Its slot may be another's by now: then what comes from there has nothing to do with this. Where there is no owner, nobody writes
        // into its row that it is dead.
        let row = self.control.row_of(peer.client, peer.serial);
        if last && row.is_some_and(|row| broken || dead || row.is_dead()) {
            self.drop_unread(peer);
        }
        self.control.changes().note();
    }

    /// A client is dead: what it had begun to send and nobody will finish ends, unless a channel is still to be read.
    pub(super) fn died(&self, peer: &Peer) {
        if let Some(channels) = self.open.lock().get_mut(&peer.serial) {
            channels.dead = true;
            return;
        }
        self.drop_unread(peer);
        self.control.changes().note();
    }

    /// Ends every hold that a sender made for this client and that was not taken up.
    fn drop_unread(&self, sender: &Peer) {
        let of_sender = |word: HoldWord| {
            let (from, to) = (u32::from(word.sender()), u32::from(word.receiver()));
            word.state() == HoldState::InFlight && (from, to) == (sender.client, self.me)
        };
        let words = (0..MAX_CLIENTS as u32).flat_map(|producer| self.control.used_holds(producer)).map(|(_, hold)| (hold, hold.word()));
        let unread: Vec<_> = words.filter(|(_, word)| of_sender(*word)).collect();
        // A slot is not given to another while such a hold is left. Has it been, then none was, and what was found is the other's: asked
        // after the look, since the other may have come during it.
        if self.control.row_of(sender.client, sender.serial).is_some() {
            for (hold, word) in unread {
                hold.decline(word.generation(), self.me as u8);
            }
        }
    }
}

/// One end of a channel. Dropping it closes it.
#[derive(Debug)]
pub struct Channel {
    socket: Arc<OwnedFd>,
    peer: Arc<Peer>,
    office: Arc<Office>,
    reader: Mutex<FrameReader>,
    sending: Mutex<()>,
    broken: AtomicBool,
    ended: AtomicBool,
    /// The peer sent something that does not keep to the wire.
    wrong: AtomicBool,
    sent: AtomicU64,
    received: AtomicU64,
}

impl Channel {
    /// Of a channel that [`Office::opened`] was told of.
    pub(super) fn new(socket: OwnedFd, peer: Peer, office: Arc<Office>) -> Self {
        let socket = Arc::new(socket);
        office.taken(&peer, &socket);
        Self {
            socket,
            peer: Arc::new(peer),
            office,
            reader: Mutex::new(FrameReader::exact()),
            sending: Mutex::new(()),
            broken: AtomicBool::new(false),
            ended: AtomicBool::new(false),
            wrong: AtomicBool::new(false),
            sent: AtomicU64::new(0),
            received: AtomicU64::new(0),
        }
    }

    /// Who is at the other end.
    #[must_use]
    pub fn peer(&self) -> &Peer {
        &self.peer
    }

    /// The same, to be kept.
    pub(super) fn shared_peer(&self) -> &Arc<Peer> {
        &self.peer
    }

    /// The socket's number, to be polled for input. It stays the channel's.
    #[must_use]
    pub fn raw_fd(&self) -> RawFd {
        self.socket.as_raw_fd()
    }

    /// Bytes of frames sent and received so far.
    #[must_use]
    pub fn socket_bytes(&self) -> (u64, u64) {
        (self.sent.load(Ordering::Relaxed), self.received.load(Ordering::Relaxed))
    }

    /// Ends both directions. Readers and writers on other threads come back with [`Error::Closed`]; what came and was not
    /// received is let go of. In a forked child nothing happens: the connection is the parent's.
    pub fn close(&self) {
        if std::process::id() != self.office.pid {
            return;
        }
        self.broken.store(true, Ordering::Release);
        let _ = shutdown(&self.socket, Shutdown::Both);
        self.end_unread();
    }

    /// Once broken: ends what is unread, unless somebody reads, who comes back soon and does the same.
    fn end_unread(&self) {
        // Who closes says so and then tries the lock; who has read lets go of the lock and then looks whether it was said. One of the
        // two finds the other's.
        fence(Ordering::SeqCst);
        if self.broken.load(Ordering::Acquire) {
            if let Some(mut reader) = self.reader.try_lock() {
                self.end(&mut reader);
            }
        }
    }

    /// Ends what is unread, once.
    fn end(&self, reader: &mut FrameReader) {
        if self.ended.swap(true, Ordering::AcqRel) {
            return;
        }
        let mut unread = Vec::new();
        loop {
            match reader.next_frame() {
                Ok(Some(frame)) => unread.extend(read(&frame)),
                Ok(None) if matches!(reader.fill(self.socket.as_fd()), Ok(true)) => {}
                _ => break,
            }
        }
        self.office.ended(&self.peer, unread, self.wrong.load(Ordering::Acquire));
    }

    /// Notes that the peer sent something that does not keep to the wire.
    pub(super) fn distrust(&self) {
        self.wrong.store(true, Ordering::Release);
    }

    /// Why there is nothing more to be had: the owner's row says why it killed the peer before it does.
    fn closed(&self) -> Error {
        let Peer { name, pid, .. } = &*self.peer;
        match cause_of(&self.office.control, &self.peer) {
            Some(cause) => Error::PeerDied(format!("{name} (pid {pid}) was {cause}")),
            None => Error::Closed(format!("the channel to {name} (pid {pid}) is closed")),
        }
    }

    pub(super) fn send(&self, body: &[u8], timeout: Option<Duration>) -> Result<(), Error> {
        let _sending = self.sending.lock();
        if self.broken.load(Ordering::Acquire) {
            return Err(self.closed());
        }
        match send_frame(self.socket.as_fd(), body, &[], timeout) {
            Ok(bytes) => {
                self.sent.fetch_add(bytes as u64, Ordering::Relaxed);
                Ok(())
            }
            Err(error @ FrameError::Length(_)) => Err(Error::InvalidArgument(format!("the message is too large for the wire: {error}"))),
            Err(FrameError::Closed(_)) => Err(self.closed()),
            Err(error) => {
                if matches!(error, FrameError::Torn(_)) {
                    self.close();
                }
                Err(error.into())
            }
        }
    }

    /// The next frame. After [`Error::Closed`], [`Error::PeerDied`] (it was killed by policy) or [`Error::Protocol`] there will be none.
    pub(super) fn receive(&self, timeout: Option<Duration>) -> Result<Frame, Error> {
        let received = self.receive_alone(timeout);
        self.end_unread();
        received
    }

    fn receive_alone(&self, timeout: Option<Duration>) -> Result<Frame, Error> {
        let mut reader = match timeout {
            None => self.reader.lock(),
            Some(timeout) => {
                self.reader.try_lock_for(timeout).ok_or_else(|| Error::Timeout("another thread is receiving on this channel".to_owned()))?
            }
        };
        if self.broken.load(Ordering::Acquire) {
            self.end(&mut reader);
            return Err(self.closed());
        }
        let before = reader.received();
        let frame = reader.read_frame(self.socket.as_fd(), timeout, true);
        self.received.fetch_add(reader.received() - before, Ordering::Relaxed);
        let error = match frame.map(|frame| read(&frame)) {
            Ok(Ok(frame)) => return Ok(frame),
            Err(FrameError::Timeout) => {
                return Err(Error::Timeout(format!(
                    "nothing came from {} (pid {}) within {} ms",
                    self.peer.name,
                    self.peer.pid,
                    timeout.unwrap_or_default().as_millis()
                )))
            }
            Ok(Err(why)) => Error::Protocol(format!("{} sent no message: {why}", self.peer.name)),
            // Every frame that ends before the connection did has been received: what is cut off never was sent.
            Err(FrameError::Closed(_)) => self.closed(),
            Err(error) => error.into(),
        };
        if matches!(error, Error::Protocol(_)) {
            self.distrust();
        }
        self.broken.store(true, Ordering::Release);
        let _ = shutdown(&self.socket, Shutdown::Both);
        self.end(&mut reader);
        Err(error)
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        self.close();
    }
}

#[cfg(test)]
#[path = "channel_tests.rs"]
mod tests;
