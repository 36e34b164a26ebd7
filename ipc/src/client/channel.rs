//! A channel between two clients: messages of a tree (JSON) and tensors (offsets).

use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use rustix::net::{shutdown, Shutdown};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::error::Error;
use crate::wire::{send_frame, FrameError, FrameReader, Peer};

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
    #[serde(rename = "e", default, skip_serializing_if = "Vec::is_empty")]
    pub(super) epochs: Vec<u64>,
    /// The hold: producer's slot, place in its table, generation.
    #[serde(rename = "h")]
    pub(super) hold: (u32, u32, u32),
    /// Which of the message's signals must be reached before the bytes are what was sent.
    #[serde(rename = "r", default, skip_serializing_if = "Vec::is_empty")]
    pub(super) ready: Vec<u32>,
    /// The receiver is to map it read-only.
    #[serde(rename = "ro", default, skip_serializing_if = "std::ops::Not::not")]
    pub(super) read_only: bool,
}

/// The window of a tensor that has no bytes.
pub(super) const NOWHERE: u32 = u32::MAX;

/// A message on the wire.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "kind", rename = "message")]
pub(super) struct Frame {
    /// The sender's own: the shape of the value, carried as it is.
    pub(super) tree: Box<RawValue>,
    /// Signals: (timeline, value).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) ready: Vec<(u32, u64)>,
    /// The tensors that the tree numbers.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) tensors: Vec<Descriptor>,
}

/// One end of a channel.
#[derive(Debug)]
pub struct Channel {
    socket: OwnedFd,
    peer: Peer,
    reader: Mutex<FrameReader>,
    sending: Mutex<()>,
    broken: AtomicBool,
    sent: AtomicU64,
    received: AtomicU64,
}

impl Channel {
    pub(super) fn new(socket: OwnedFd, peer: Peer) -> Self {
        Self {
            socket,
            peer,
            reader: Mutex::default(),
            sending: Mutex::new(()),
            broken: AtomicBool::new(false),
            sent: AtomicU64::new(0),
            received: AtomicU64::new(0),
        }
    }

    /// Who is at the other end.
    #[must_use]
    pub const fn peer(&self) -> &Peer {
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

    /// Ends both directions. Readers and writers on other threads come back with [`Error::Closed`].
    pub fn close(&self) {
        self.broken.store(true, Ordering::Release);
        let _ = shutdown(&self.socket, Shutdown::Both);
    }

    fn closed(&self) -> Error {
        Error::Closed(format!("the channel to {} (pid {}) is closed", self.peer.name, self.peer.pid))
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
                // Part of a frame may be out: nothing sensible can follow it.
                self.close();
                Err(error.into())
            }
        }
    }

    pub(super) fn receive(&self, timeout: Option<Duration>) -> Result<Frame, Error> {
        let mut reader = match timeout {
            None => self.reader.lock(),
            Some(timeout) => {
                self.reader.try_lock_for(timeout).ok_or_else(|| Error::Timeout("another thread is receiving on this channel".to_owned()))?
            }
        };
        let before = reader.received();
        let frame = reader.read_frame(self.socket.as_fd(), timeout, true);
        self.received.fetch_add(reader.received() - before, Ordering::Relaxed);
        let frame = frame.map_err(|error| match error {
            FrameError::Closed(false) => self.closed(),
            FrameError::Timeout => Error::Timeout(format!(
                "nothing came from {} (pid {}) within {} ms",
                self.peer.name,
                self.peer.pid,
                timeout.unwrap_or_default().as_millis()
            )),
            error => {
                self.close();
                error.into()
            }
        })?;
        serde_json::from_slice(&frame).map_err(|error| {
            self.close();
            Error::Protocol(format!("{} sent no message: {error}", self.peer.name))
        })
    }
}
