//! Frames: 4-byte big-endian length, then that many bytes; descriptors travel with a frame's first byte.
#![allow(unsafe_code)] // the buffer of SCM_RIGHTS is uninitialised memory that the kernel fills

use std::collections::VecDeque;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{poll, PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::{
    recvmsg, sendmsg, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags,
};
use rustix::process::{getrlimit, Resource};

/// The longest frame in bytes.
pub const FRAME_LIMIT: usize = 64 << 20;
/// The most descriptors with one frame (the kernel's own limit is 253).
pub const MAX_FDS: usize = 200;

/// The longest that an eager reader looks again and again before it sleeps: to be woken on a processor that has gone idle
/// costs tens of microseconds, and what runs next runs at half its speed.
const EAGER_MOST: Duration = Duration::from_micros(150);
/// What counts as a long wait: a longer one says no more, so that a few fast frames make up for it.
const SLOW: Duration = Duration::from_millis(1);
/// What an eager reader spends where frames have not been coming fast.
const EAGER_LEAST: Duration = Duration::from_micros(20);
/// Pauses between two looks: half a microsecond at most.
const PAUSES: u32 = 10;

/// Why a frame could not be sent or read.
#[derive(Debug, thiserror::Error)]
pub enum FrameError {
    /// The other end is closed.
    #[error("the other end closed the connection{}", if *.0 { " in the middle of a frame" } else { "" })]
    Closed(bool),
    /// A length of zero or over the limit.
    #[error("a frame of {0} bytes: expected 1 to {FRAME_LIMIT}")]
    Length(usize),
    /// Another number of descriptors than the frame says.
    #[error("{found} descriptors where the frame says {expected}")]
    Descriptors {
        /// What the frame says.
        expected: usize,
        /// What came.
        found: usize,
    },
    /// The system could not give this process all descriptors of a frame. They are gone; the frames behind it are what they say.
    #[error(
        "{found} of {expected} descriptors came: this process is out of file descriptors (RLIMIT_NOFILE is {}); close some, or raise the \
         limit (ulimit -n, setrlimit), and try again",
        most_fds()
    )]
    Lost {
        /// What the frame says.
        expected: usize,
        /// What came.
        found: usize,
    },
    /// It failed when part of the frame was out: nothing can follow it on this connection.
    #[error("{0}, in the middle of a frame")]
    Torn(Box<FrameError>),
    /// The time was up.
    #[error("not sent or received in time")]
    Timeout,
    /// What the system says.
    #[error("{0}")]
    System(#[from] Errno),
    /// Not the JSON that was expected.
    #[error("not a known message: {0}")]
    Json(#[from] serde_json::Error),
}

/// How many descriptors this process may have, for people.
fn most_fds() -> String {
    getrlimit(Resource::Nofile).current.map_or_else(|| "unlimited".to_owned(), |most| most.to_string())
}

/// Waits until a descriptor is ready for `flags`, or hung up.
pub(crate) fn wait(fd: BorrowedFd<'_>, flags: PollFlags, deadline: Option<Instant>) -> Result<(), FrameError> {
    loop {
        let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
        let timeout = left.map(|left| Timespec { tv_sec: left.as_secs() as i64, tv_nsec: i64::from(left.subsec_nanos()) });
        match poll(&mut [PollFd::from_borrowed_fd(fd, flags)], timeout.as_ref()) {
            Ok(0) => return Err(FrameError::Timeout),
            Ok(_) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

fn send_some(fd: BorrowedFd<'_>, parts: &[IoSlice<'_>], fds: &[BorrowedFd<'_>]) -> Result<usize, Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(Errno::TOOBIG);
    }
    sendmsg(fd, parts, &mut ancillary, SendFlags::NOSIGNAL | SendFlags::DONTWAIT)
}

/// Sends one frame, waiting for room until the deadline (`None`: for ever).
///
/// # Errors
/// [`FrameError`]. After [`FrameError::Torn`] the connection is useless and must be closed; after any other nothing of the frame is out.
pub fn send_frame(socket: BorrowedFd<'_>, body: &[u8], fds: &[BorrowedFd<'_>], timeout: Option<Duration>) -> Result<usize, FrameError> {
    if body.is_empty() || body.len() > FRAME_LIMIT {
        return Err(FrameError::Length(body.len()));
    }
    let deadline = timeout.map(|t| Instant::now() + t);
    let head = (body.len() as u32).to_be_bytes();
    let total = head.len() + body.len();
    let mut sent = 0;
    while sent < total {
        let fds = if sent == 0 { fds } else { &[] };
        let result = match sent.checked_sub(head.len()) {
            None => send_some(socket, &[IoSlice::new(head.get(sent..).unwrap_or_default()), IoSlice::new(body)], fds),
            Some(at) => send_some(socket, &[IoSlice::new(body.get(at..).unwrap_or_default())], fds),
        };
        match result {
            Ok(n) => sent += n,
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => wait(socket, PollFlags::OUT, deadline).map_err(|error| torn(error, sent))?,
            Err(Errno::PIPE | Errno::CONNRESET | Errno::NOTCONN) => return Err(FrameError::Closed(false)),
            Err(error) => return Err(torn(error.into(), sent)),
        }
    }
    Ok(total)
}

fn torn(error: FrameError, sent: usize) -> FrameError {
    if sent == 0 {
        error
    } else {
        FrameError::Torn(Box::new(error))
    }
}

/// Frames that wait for a slow reader, so that one client that never reads holds up nobody.
#[derive(Debug, Default)]
pub struct Outbox {
    queue: VecDeque<(Vec<u8>, usize, Vec<OwnedFd>)>,
    bytes: usize,
}

impl Outbox {
    /// Adds a frame.
    pub fn push(&mut self, body: &[u8], fds: Vec<OwnedFd>) {
        let mut frame = (body.len() as u32).to_be_bytes().to_vec();
        frame.extend_from_slice(body);
        self.bytes += frame.len();
        self.queue.push_back((frame, 0, fds));
    }

    /// Bytes that wait.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Whether nothing waits.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Sends what the socket takes without waiting.
    ///
    /// # Errors
    /// [`FrameError::Closed`] and the system's errors.
    pub fn flush(&mut self, socket: BorrowedFd<'_>) -> Result<(), FrameError> {
        while let Some((frame, sent, fds)) = self.queue.front_mut() {
            let borrowed: Vec<_> = if *sent == 0 { fds.iter().map(AsFd::as_fd).collect() } else { Vec::new() };
            match send_some(socket, &[IoSlice::new(frame.get(*sent..).unwrap_or_default())], &borrowed) {
                Ok(n) => {
                    *sent += n;
                    self.bytes -= n;
                    if *sent == frame.len() {
                        self.queue.pop_front();
                    }
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(()),
                Err(Errno::PIPE | Errno::CONNRESET | Errno::NOTCONN) => return Err(FrameError::Closed(false)),
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }
}

/// Reads frames from one socket.
#[derive(Debug, Default)]
pub struct FrameReader {
    buffer: Vec<u8>,
    start: usize,
    /// As they came. `None`: here the system dropped the rest of a frame's.
    fds: VecDeque<Option<OwnedFd>>,
    received: u64,
    exact: bool,
    /// How long frames have lately been waited for, the last one counting for a quarter.
    usual: Duration,
}

impl FrameReader {
    /// A reader that takes no byte of the next frame before it is asked for: as long as one waits, the socket is readable, for
    /// whoever polls it.
    #[must_use]
    pub fn exact() -> Self {
        Self { exact: true, ..Self::default() }
    }

    /// Bytes received so far.
    #[must_use]
    pub fn received(&self) -> u64 {
        self.received
    }

    /// Takes what the socket has, without waiting. `Ok(false)`: nothing there now.
    ///
    /// # Errors
    /// [`FrameError::Closed`] at the end, and the system's errors.
    pub fn fill(&mut self, socket: BorrowedFd<'_>) -> Result<bool, FrameError> {
        let used = self.buffer.len();
        let want = match self.missing() {
            Some(missing) if self.exact => missing.clamp(1, 4 << 20),
            Some(missing) => missing.clamp(16 << 10, 4 << 20),
            None if self.exact => 4 - (used - self.start).min(3),
            None => 16 << 10,
        };
        if self.start > 0 && self.start == used {
            self.buffer.clear();
            self.start = 0;
        }
        let used = self.buffer.len();
        self.buffer.resize(used + want, 0);
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let tail = self.buffer.get_mut(used..).unwrap_or_default();
        let result = recvmsg(socket, &mut [IoSliceMut::new(tail)], &mut ancillary, RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC);
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(fds) = message {
                self.fds.extend(fds.map(Some));
            }
        }
        // One call takes the descriptors of one frame at most, and of all the kernel sends there is room for: it ran out of numbers.
        if result.as_ref().is_ok_and(|message| message.flags.contains(ReturnFlags::CTRUNC)) {
            self.fds.push_back(None);
        }
        let result = result.map(|message| message.bytes);
        self.buffer.truncate(used + *result.as_ref().unwrap_or(&0));
        match result {
            Ok(0) => Err(FrameError::Closed(self.buffer.len() > self.start)),
            Ok(n) => {
                self.received += n as u64;
                if self.fds.len() > 2 * MAX_FDS {
                    return Err(FrameError::Descriptors { expected: MAX_FDS, found: self.fds.len() });
                }
                Ok(true)
            }
            Err(Errno::AGAIN | Errno::INTR) => Ok(false),
            Err(Errno::CONNRESET) => Err(FrameError::Closed(self.buffer.len() > self.start)),
            Err(error) => Err(error.into()),
        }
    }

    /// Bytes missing to the frame that has begun.
    fn missing(&self) -> Option<usize> {
        let pending = self.buffer.get(self.start..)?;
        let head: [u8; 4] = pending.get(..4)?.try_into().ok()?;
        Some((u32::from_be_bytes(head) as usize + 4).saturating_sub(pending.len()))
    }

    /// The next whole frame, if there is one.
    ///
    /// # Errors
    /// [`FrameError::Length`]; descriptors without a frame are refused here too.
    pub fn next_frame(&mut self) -> Result<Option<Vec<u8>>, FrameError> {
        let pending = self.buffer.get(self.start..).unwrap_or_default();
        let Some(head) = pending.get(..4).and_then(|head| <[u8; 4]>::try_from(head).ok()) else {
            if pending.is_empty() && !self.fds.is_empty() {
                return Err(FrameError::Descriptors { expected: 0, found: self.fds.len() });
            }
            return Ok(None);
        };
        let length = u32::from_be_bytes(head) as usize;
        if length == 0 || length > FRAME_LIMIT {
            return Err(FrameError::Length(length));
        }
        let Some(body) = pending.get(4..4 + length) else { return Ok(None) };
        let body = body.to_vec();
        self.start += 4 + length;
        if self.start > 1 << 20 || self.start == self.buffer.len() {
            self.buffer.drain(..self.start);
            self.start = 0;
        }
        Ok(Some(body))
    }

    /// The descriptors that came with the frame just taken, as many as it says.
    ///
    /// # Errors
    /// [`FrameError::Descriptors`] where there are fewer, [`FrameError::Lost`] where that is the system's doing: those that came are
    /// closed, and later frames have theirs.
    pub fn take_fds(&mut self, count: usize) -> Result<Vec<OwnedFd>, FrameError> {
        let found = self.fds.iter().take(count).take_while(|fd| fd.is_some()).count();
        if found == count {
            return Ok(self.fds.drain(..count).flatten().collect());
        }
        if found == self.fds.len() {
            return Err(FrameError::Descriptors { expected: count, found });
        }
        self.fds.drain(..=found);
        Err(FrameError::Lost { expected: count, found })
    }

    /// Twice what frames have usually been waited for, if that is worth a core's time.
    fn patience(&self) -> Duration {
        if self.usual > EAGER_MOST {
            EAGER_LEAST
        } else {
            (self.usual * 2).clamp(EAGER_LEAST, EAGER_MOST)
        }
    }

    /// Waits for one whole frame (`None`: for ever). `eager`: the answer is likely on its way, so it is looked for again and
    /// again for a moment, longer where frames have been coming fast; others may run in between.
    ///
    /// # Errors
    /// [`FrameError`].
    pub fn read_frame(&mut self, socket: BorrowedFd<'_>, timeout: Option<Duration>, eager: bool) -> Result<Vec<u8>, FrameError> {
        let start = Instant::now();
        let deadline = timeout.map(|t| start + t);
        let eager = if eager { self.patience().min(timeout.unwrap_or(Duration::MAX)) } else { Duration::ZERO };
        loop {
            if let Some(frame) = self.next_frame()? {
                self.usual = (self.usual * 3 + start.elapsed().min(SLOW)) / 4;
                return Ok(frame);
            }
            if !self.fill(socket)? {
                if start.elapsed() < eager {
                    // Whoever is to answer may run on the other half of this core, or need this very processor.
                    (0..PAUSES).for_each(|_| std::hint::spin_loop());
                    std::thread::yield_now();
                } else {
                    wait(socket, PollFlags::IN, deadline)?;
                }
            }
        }
    }
}
