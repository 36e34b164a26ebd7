//! One connection: frames in, frames out, never waiting for the other end.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{poll, PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::{shutdown, Shutdown};
use serde::Serialize;

use crate::wire::{FrameError, FrameReader, Outbox, MAX_FDS};

/// Descriptors that may wait for a client that does not read.
const OUTBOX_FDS: usize = 16 * MAX_FDS;

/// A connection's two directions.
#[derive(Debug)]
pub(super) struct Link {
    socket: OwnedFd,
    reader: FrameReader,
    taken: u64,
    frame_limit: u64,
    outbox: Outbox,
    outbox_fds: usize,
    outbox_limit: usize,
    stalled: bool,
    backlog: bool,
    muted: bool,
    cut: bool,
}

/// Why a connection is cut.
#[derive(Debug, thiserror::Error)]
pub(super) enum Fault {
    #[error(transparent)]
    Frame(#[from] FrameError),
    #[error("a frame of more than {0} bytes")]
    TooLong(u64),
    #[error("it does not read: {bytes} bytes and {fds} descriptors wait for it")]
    NeverReads { bytes: usize, fds: usize },
}

impl Link {
    /// Takes a connected socket. No frame from it may be longer than `frame_limit`.
    pub(super) fn new(socket: OwnedFd, frame_limit: u64, outbox_limit: usize) -> Self {
        Self {
            socket,
            reader: FrameReader::default(),
            taken: 0,
            frame_limit,
            outbox: Outbox::default(),
            outbox_fds: 0,
            outbox_limit,
            stalled: false,
            backlog: false,
            muted: false,
            cut: false,
        }
    }

    pub(super) fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    pub(super) fn set_frame_limit(&mut self, limit: u64) {
        self.frame_limit = limit;
    }

    /// The next whole frame; `None` where there is none now.
    pub(super) fn next(&mut self) -> Result<Option<Vec<u8>>, Fault> {
        loop {
            if let Some(frame) = self.reader.next_frame()? {
                self.taken += frame.len() as u64 + 4;
                return Ok(Some(frame));
            }
            if self.reader.received() - self.taken > self.frame_limit {
                return Err(Fault::TooLong(self.frame_limit));
            }
            if !self.reader.fill(self.socket.as_fd())? {
                return Ok(None);
            }
        }
    }

    /// The descriptors of the frame just taken.
    pub(super) fn take_fds(&mut self, count: usize) -> Result<Vec<OwnedFd>, FrameError> {
        self.reader.take_fds(count)
    }

    /// Whether frames may wait in the reader's buffer, where no poll sees them.
    pub(super) fn backlog(&self) -> bool {
        self.backlog
    }

    pub(super) fn set_backlog(&mut self, backlog: bool) {
        self.backlog = backlog;
    }

    /// Queues a message. It is sent by [`Link::flush`], at the latest at the end of the owner's turn.
    pub(super) fn send(&mut self, message: &impl Serialize, fds: Vec<OwnedFd>) -> Result<(), Fault> {
        if self.muted {
            return Ok(());
        }
        self.outbox_fds += fds.len();
        self.outbox.push(&serde_json::to_vec(message).map_err(FrameError::from)?, fds);
        if self.is_full() {
            self.flush();
        }
        if self.is_full() {
            return Err(Fault::NeverReads { bytes: self.outbox.bytes(), fds: self.outbox_fds });
        }
        Ok(())
    }

    fn is_full(&self) -> bool {
        self.outbox.bytes() > self.outbox_limit || self.outbox_fds > OUTBOX_FDS
    }

    /// Sends what the socket takes. Where nobody reads any more, nothing is kept for them; what they said is still read.
    pub(super) fn flush(&mut self) {
        self.stalled = false;
        match self.outbox.flush(self.socket.as_fd()) {
            Ok(()) => {}
            // Too many descriptors on their way for this user: the frame stays, and is tried again later.
            Err(FrameError::System(Errno::TOOMANYREFS | Errno::NOBUFS | Errno::NOMEM)) => self.stalled = true,
            Err(error) => {
                tracing::debug!(%error, "not sent");
                self.mute();
            }
        }
        if self.outbox.is_empty() {
            self.outbox_fds = 0;
        }
    }

    fn mute(&mut self) {
        self.muted = true;
        self.stalled = false;
        self.outbox = Outbox::default();
        self.outbox_fds = 0;
    }

    /// Whether something waits that a readable or writable socket can move.
    pub(super) fn wants_out(&self) -> bool {
        !self.outbox.is_empty() && !self.stalled
    }

    /// Whether something waits that only time can move.
    pub(super) fn is_stalled(&self) -> bool {
        self.stalled
    }

    pub(super) fn unsent_bytes(&self) -> usize {
        self.outbox.bytes()
    }

    pub(super) fn has_unsent(&self) -> bool {
        !self.outbox.is_empty()
    }

    /// Says no more and reads no more. The socket stays, since only its end proves that nobody holds the other one.
    pub(super) fn cut(&mut self) {
        self.cut = true;
        self.backlog = false;
        self.mute();
        self.reader = FrameReader::default();
        self.taken = 0;
        let _ = shutdown(&self.socket, Shutdown::Write);
    }

    pub(super) fn is_cut(&self) -> bool {
        self.cut
    }

    /// Whether nobody holds the other end any more, whatever is still to be read.
    pub(super) fn has_ended(&self) -> bool {
        let mut fd = [PollFd::new(&self.socket, PollFlags::empty())];
        let polled = poll(&mut fd, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }));
        polled.is_ok() && fd.iter().any(|fd| fd.revents().contains(PollFlags::HUP))
    }
}
