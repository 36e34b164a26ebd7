//! The client's connection to its owner: calls and answers. Who waits for an answer reads the socket itself, if nobody does yet:
//! to be woken by another thread would take as long as the owner needs. What comes while nobody waits, one thread reads.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use millpond_allocator::origin::Origin;
use parking_lot::{Condvar, Mutex};
use rustix::event::PollFlags;
use rustix::net::{connect, shutdown, socket_with, AddressFamily, Shutdown, SocketAddrUnix, SocketFlags, SocketType};
use rustix::process::{getpid, pidfd_open, PidfdFlags};

use super::channel::Office;
use super::error::Error;
use crate::wire::{send_frame, wait, Answer, Ask, FrameError, FrameReader, FromClient, FromOwner, Hello, Request, Welcome};

/// The longest that anything is waited for.
pub(super) const LONGEST: Duration = Duration::from_secs(366 * 24 * 3600);
/// How long a frame to the owner may take. The owner always reads.
const SEND_TIMEOUT: Duration = Duration::from_secs(5);

/// A path that a socket address has no room for.
pub(super) fn address(path: &Path) -> Result<SocketAddrUnix, Error> {
    SocketAddrUnix::new(path).map_err(|_| {
        Error::InvalidArgument(format!("the socket's path has {} bytes and may have 107: {}", path.as_os_str().len(), path.display()))
    })
}

#[derive(Debug)]
pub(super) struct Link {
    socket: OwnedFd,
    /// Serialises frames.
    sending: Mutex<()>,
    pending: Mutex<Pending>,
    answered: Condvar,
    /// Held while somebody reads. Whoever lets go of it has left no whole frame in it: no poll would tell of that.
    reading: Mutex<FrameReader>,
    /// Where the tender hears what the owner asks, and what else there is for it.
    notices: OnceLock<Sender<Notice>>,
    /// Who is told of a channel as soon as it is read that there is one.
    office: OnceLock<Arc<Office>>,
    next: AtomicU64,
    dead: AtomicBool,
    /// In a forked child the locks may be held by threads that are not there, and the answers are the parent's to read.
    origin: Origin,
}

#[derive(Debug, Default)]
struct Pending {
    waiting: HashMap<u64, Awaited>,
    answers: HashMap<u64, (Answer, Result<Vec<OwnedFd>, FrameError>)>,
}

/// What is to happen to an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Awaited {
    /// Somebody waits for it.
    Yes,
    /// Nobody does any more; chunks that it grants are given back.
    Grant,
    /// Nobody does any more; chunks that it names are not mapped.
    Import,
    /// Nobody does any more.
    No,
}

impl Awaited {
    const fn abandoned(call: &Request) -> Self {
        match call {
            Request::Grow { .. } => Self::Grant,
            Request::Import { .. } => Self::Import,
            _ => Self::No,
        }
    }
}

/// What the tender is told.
#[derive(Debug)]
pub(super) enum Notice {
    /// The owner asks.
    Ask(u64, Ask),
    /// The owner is gone.
    OwnerDied,
    /// There is no owner, and another client's process has ended.
    PeerEnded,
    /// Something was put down that a tick would pick up soon.
    Soon,
    /// The client goes.
    Stop,
}

impl Link {
    /// Connects and shakes hands.
    pub(super) fn connect(path: &Path, hello: &Hello, timeout: Duration) -> Result<(Self, Welcome, Vec<OwnedFd>), Error> {
        let address = address(path)?;
        let unavailable = |why: rustix::io::Errno| Error::OwnerUnavailable { socket: path.display().to_string(), why: why.to_string() };
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).map_err(unavailable)?;
        connect(&socket, &address).map_err(unavailable)?;
        let gone = |error: FrameError| match error {
            FrameError::Closed(_) => Error::Refused(
                "the owner closed the connection during the handshake: another user's owner, or no owner of millpond at all".to_owned(),
            ),
            error => error.into(),
        };
        // An owner in another PID namespace sees no number of this process, and before Linux 6.5 the kernel gives it no pidfd.
        let own = pidfd_open(getpid(), PidfdFlags::empty()).ok();
        let own: Vec<_> = own.iter().map(AsFd::as_fd).collect();
        let hello = Hello { fds: own.len(), ..hello.clone() };
        let body = serde_json::to_vec(&hello).map_err(|error| Error::Internal(error.to_string()))?;
        send_frame(socket.as_fd(), &body, &own, Some(timeout)).map_err(gone)?;
        let mut reader = FrameReader::default();
        let frame = reader.read_frame(socket.as_fd(), Some(timeout), false).map_err(gone)?;
        match serde_json::from_slice(&frame).map_err(|error| Error::Protocol(format!("the owner's first frame: {error}")))? {
            FromOwner::Welcome { welcome } => {
                let fds = reader.take_fds(welcome.fds)?;
                let link = Self {
                    socket,
                    sending: Mutex::new(()),
                    pending: Mutex::default(),
                    answered: Condvar::new(),
                    reading: Mutex::new(reader),
                    notices: OnceLock::new(),
                    office: OnceLock::new(),
                    next: AtomicU64::new(1),
                    dead: AtomicBool::new(false),
                    origin: Origin::here(),
                };
                Ok((link, welcome, fds))
            }
            FromOwner::Refused { refused } => Err(Error::Refused(format!(
                "the owner refused the {}: it expects {}, found {}",
                refused.field, refused.expected, refused.found
            ))),
            _ => Err(Error::Protocol("the owner's first frame is no welcome".to_owned())),
        }
    }

    /// Whether nobody listens at an owner's address any more. A connection may also have ended because the owner cut it off.
    pub(super) fn nobody_at(path: &Path) -> bool {
        use rustix::io::Errno;
        let Ok(address) = address(path) else { return false };
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let Ok(socket) = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None) else { return false };
        matches!(connect(&socket, &address), Err(Errno::CONNREFUSED | Errno::NOENT | Errno::NOTDIR))
    }

    pub(super) fn is_dead(&self) -> bool {
        self.dead.load(Ordering::Acquire)
    }

    fn send(&self, frame: &FromClient) -> Result<(), Error> {
        if !self.origin.is_here() {
            return Err(Error::Forked);
        }
        if self.is_dead() {
            return Err(Error::OwnerDied);
        }
        let body = serde_json::to_vec(frame).map_err(|error| Error::Internal(error.to_string()))?;
        let _sending = self.sending.lock();
        send_frame(self.socket.as_fd(), &body, &[], Some(SEND_TIMEOUT)).map(drop).map_err(|_| Error::OwnerDied)
    }

    /// Says something that has no answer, or whose answer nobody waits for.
    pub(super) fn tell(&self, call: Request) -> Result<(), Error> {
        self.send(&FromClient::Call { call_id: self.next.fetch_add(1, Ordering::Relaxed), call })
    }

    /// Answers the owner.
    pub(super) fn answer(&self, ask_id: u64, bytes: u64) -> Result<(), Error> {
        self.send(&FromClient::Answered { ask_id, bytes })
    }

    /// Asks and waits; a refusal is an error.
    pub(super) fn call(&self, call: Request, timeout: Duration) -> Result<(Answer, Vec<OwnedFd>), Error> {
        match self.ask(call, timeout)? {
            (Answer::Refused { reason, message, .. }, _) => Err(Error::from_refusal(reason, message)),
            answered => Ok(answered),
        }
    }

    /// Asks and waits for whatever the answer is. [`Error::Descriptors`]: it came without all of its descriptors. What was granted by it has
    /// gone back, but for an import, of which the caller says what is not mapped.
    pub(super) fn ask(&self, call: Request, timeout: Duration) -> Result<(Answer, Vec<OwnedFd>), Error> {
        if !self.origin.is_here() {
            return Err(Error::Forked);
        }
        let call_id = self.next.fetch_add(1, Ordering::Relaxed);
        let abandoned = Awaited::abandoned(&call);
        self.pending.lock().waiting.insert(call_id, Awaited::Yes);
        if let Err(error) = self.send(&FromClient::Call { call_id, call }) {
            self.pending.lock().waiting.remove(&call_id);
            return Err(error);
        }
        let deadline = Instant::now() + timeout.min(LONGEST);
        loop {
            let mut pending = self.pending.lock();
            if let Some((answer, fds)) = pending.answers.remove(&call_id) {
                drop(pending);
                return match fds {
                    Ok(fds) => Ok((answer, fds)),
                    Err(lost) => {
                        self.undo(abandoned, answer);
                        Err(lost.into())
                    }
                };
            }
            if self.is_dead() {
                pending.waiting.remove(&call_id);
                return Err(Error::OwnerDied);
            }
            if Instant::now() >= deadline {
                pending.waiting.insert(call_id, abandoned);
                return Err(Error::Timeout(format!("the owner did not answer within {} ms", timeout.as_millis())));
            }
            match self.reading.try_lock() {
                Some(mut reader) => {
                    drop(pending);
                    self.lead(&mut reader, call_id, deadline);
                }
                None => drop(self.answered.wait_until(&mut pending, deadline)),
            }
        }
    }

    /// Reads until a call is answered, the time is over, or the owner is gone.
    fn lead(&self, reader: &mut FrameReader, call_id: u64, deadline: Instant) {
        while self.pending.lock().waiting.contains_key(&call_id) {
            let left = deadline.saturating_duration_since(Instant::now());
            let read = reader.read_frame(self.socket.as_fd(), Some(left), true);
            match read.and_then(|frame| self.take(&frame, reader)).and_then(|()| self.take_all(reader)) {
                // An owner that never stops talking puts off nobody's deadline.
                Ok(()) if Instant::now() < deadline => {}
                Ok(()) | Err(FrameError::Timeout) => return,
                Err(error) => return self.ended(&error),
            }
        }
    }

    /// What an answer leaves to be done whose descriptors were lost. Of an import its caller knows more: what it maps already.
    fn undo(&self, awaited: Awaited, answer: Answer) {
        match (&answer, self.office.get()) {
            // This end is closed: what its peer has sent on it until then is never read.
            (Answer::Channel { peer }, Some(office)) => office.refused(peer),
            _ if awaited == Awaited::Import => {}
            _ => self.late(awaited, answer),
        }
    }

    /// What an answer that comes too late leaves to be done.
    fn late(&self, awaited: Awaited, answer: Answer) {
        let Answer::Granted { chunks } = answer else { return };
        let epochs = chunks.iter().map(|chunk| chunk.epoch).collect();
        let _ = match awaited {
            Awaited::Grant => self.tell(Request::Release { epochs }),
            Awaited::Import => self.tell(Request::Unmapped { epochs }),
            Awaited::Yes | Awaited::No => Ok(()),
        };
    }

    /// Who keeps the channels. Once, before anything is asked.
    pub(super) fn register(&self, office: Arc<Office>) {
        let _ = self.office.set(office);
    }

    /// Who is told what the owner asks. Once, before anything is asked.
    pub(super) fn notify(&self, notices: Sender<Notice>) {
        let _ = self.notices.set(notices);
    }

    /// Reads until the owner is gone what nobody else does. The body of the reader's thread.
    pub(super) fn read(&self) {
        let mut ready = Ok(());
        loop {
            let mut reader = self.reading.lock();
            // Behind a frame that means nothing, no other is what it says.
            if self.is_dead() {
                return;
            }
            if let Err(error) = ready.and_then(|()| self.take_what_came(&mut reader)) {
                return self.ended(&error);
            }
            drop(reader);
            ready = wait(self.socket.as_fd(), PollFlags::IN, None);
        }
    }

    /// Takes what was read, be it behind the welcome, and what the socket has.
    fn take_what_came(&self, reader: &mut FrameReader) -> Result<(), FrameError> {
        loop {
            self.take_all(reader)?;
            if !reader.fill(self.socket.as_fd())? {
                return Ok(());
            }
        }
    }

    /// Takes every whole frame that was read.
    fn take_all(&self, reader: &mut FrameReader) -> Result<(), FrameError> {
        while let Some(frame) = reader.next_frame()? {
            self.take(&frame, reader)?;
        }
        Ok(())
    }

    fn take(&self, frame: &[u8], reader: &mut FrameReader) -> Result<(), FrameError> {
        match serde_json::from_slice(frame)? {
            FromOwner::Answer { call_id, answer, fds } => {
                let fds = match reader.take_fds(fds) {
                    // That one call fails; the owner is alive, and says what it means.
                    Err(lost @ FrameError::Lost { .. }) => Err(lost),
                    fds => Ok(fds?),
                };
                let mut pending = self.pending.lock();
                match pending.waiting.remove(&call_id) {
                    Some(Awaited::Yes) => {
                        if let (Answer::Channel { peer }, Some(office)) = (&answer, self.office.get()) {
                            office.opened(peer);
                        }
                        pending.answers.insert(call_id, (answer, fds));
                        self.answered.notify_all();
                    }
                    // Its descriptors close here.
                    Some(awaited) => {
                        drop(pending);
                        self.late(awaited, answer);
                    }
                    None => {}
                }
            }
            FromOwner::Ask { ask_id, ask, fds } => {
                drop(reader.take_fds(fds)?);
                self.notice(Notice::Ask(ask_id, ask));
            }
            FromOwner::Welcome { .. } | FromOwner::Refused { .. } => {}
        }
        Ok(())
    }

    /// Where the tender hears of things; `None` before there is one.
    pub(super) fn notices(&self) -> Option<&Sender<Notice>> {
        self.notices.get()
    }

    /// Tells the tender. Never blocks.
    pub(super) fn notice(&self, notice: Notice) {
        let _ = self.notices().map(|notices| notices.send(notice));
    }

    /// The owner is gone, or says what it cannot mean.
    fn ended(&self, error: &FrameError) {
        if self.dead.swap(true, Ordering::AcqRel) {
            return;
        }
        tracing::info!(%error, "the owner is gone");
        let _pending = self.pending.lock();
        self.answered.notify_all();
        self.notice(Notice::OwnerDied);
    }

    /// Ends the connection; the reader's thread ends with it.
    pub(super) fn close(&self) {
        let _ = shutdown(&self.socket, Shutdown::Both);
    }
}

#[cfg(test)]
#[path = "link_tests.rs"]
mod tests;
