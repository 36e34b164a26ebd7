//! Reading the ledger from outside: a connection that takes no slot and no memory.

use std::path::{Path, PathBuf};
use std::time::Duration;

use std::os::fd::{AsFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{connect, socket_with, AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use crate::control::{Control, ControlError, LAYOUT};
use crate::ledger::Ledger;
use crate::wire::{
    send_frame, Answer, FrameError, FrameReader, FromClient, FromOwner, Hello, Refusal, Request, Role, Welcome, WindowMap, PROTOCOL,
};

/// Why there is no ledger to read.
#[derive(Debug, thiserror::Error)]
pub enum ObserveError {
    /// Nobody listens there.
    #[error("no owner at {}: {error}", path.display())]
    NoOwner {
        /// The socket's path.
        path: PathBuf,
        /// The system's answer.
        error: Errno,
    },
    /// The owner said no.
    #[error("the owner refused: {} is {}, expected {}", .0.field, .0.found, .0.expected)]
    Refused(Refusal),
    /// The owner did not answer, or not as an owner does.
    #[error("no answer of an owner: {0}")]
    Frame(#[from] FrameError),
    /// It answered something else.
    #[error("the owner does not say what is in its windows: {0}")]
    Unexpected(String),
    /// The control memory is not what it should be.
    #[error(transparent)]
    Control(#[from] ControlError),
}

/// A connection to an owner that only reads.
#[derive(Debug)]
pub struct Observer {
    /// What the owner says of itself.
    pub welcome: Welcome,
    control: Control,
    socket: OwnedFd,
    reader: FrameReader,
    timeout: Duration,
    calls: u64,
}

impl Observer {
    /// Connects to an owner.
    ///
    /// # Errors
    /// [`ObserveError`].
    pub fn connect(path: &Path, key: &str, timeout: Duration) -> Result<Self, ObserveError> {
        let no_owner = |error| ObserveError::NoOwner { path: path.to_owned(), error };
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).map_err(FrameError::from)?;
        connect(&socket, &SocketAddrUnix::new(path).map_err(no_owner)?).map_err(no_owner)?;
        let hello = Hello {
            protocol: PROTOCOL,
            layout: LAYOUT,
            key: key.to_owned(),
            name: "observer".to_owned(),
            role: Role::Observer,
            pid: std::process::id(),
            limit: None,
            library: env!("CARGO_PKG_VERSION").to_owned(),
            python: None,
            torch: None,
            capabilities: Vec::new(),
            fds: 0,
        };
        let hello = serde_json::to_vec(&hello).map_err(FrameError::from)?;
        send_frame(socket.as_fd(), &hello, &[], Some(timeout))?;
        let mut reader = FrameReader::default();
        let frame = reader.read_frame(socket.as_fd(), Some(timeout), false)?;
        let welcome = match serde_json::from_slice(&frame).map_err(FrameError::from)? {
            FromOwner::Welcome { welcome } => welcome,
            FromOwner::Refused { refused } => return Err(ObserveError::Refused(refused)),
            _ => return Err(ControlError::Foreign("an answer before a welcome").into()),
        };
        let Some(fd) = reader.take_fds(1)?.pop() else { return Err(FrameError::Descriptors { expected: 1, found: 0 }.into()) };
        Ok(Self { welcome, control: Control::open(fd)?, socket, reader, timeout, calls: 0 })
    }

    /// The ledger as it is now, read from the control memory.
    #[must_use]
    pub fn ledger(&self) -> Ledger {
        Ledger::read_with_lends(&self.control, crate::control::now_ms())
    }

    /// Every window with its chunks, asked of the owner.
    ///
    /// # Errors
    /// [`ObserveError::Frame`], [`ObserveError::Unexpected`].
    pub fn windows(&mut self) -> Result<Vec<WindowMap>, ObserveError> {
        self.calls += 1;
        let call = FromClient::Call { call_id: self.calls, call: Request::Windows };
        let call = serde_json::to_vec(&call).map_err(FrameError::from)?;
        send_frame(self.socket.as_fd(), &call, &[], Some(self.timeout))?;
        loop {
            let frame = self.reader.read_frame(self.socket.as_fd(), Some(self.timeout), false)?;
            match serde_json::from_slice(&frame).map_err(FrameError::from)? {
                FromOwner::Answer { call_id, answer: Answer::Windows { windows }, .. } if call_id == self.calls => return Ok(windows),
                FromOwner::Answer { answer: Answer::Refused { message, .. }, .. } => return Err(ObserveError::Unexpected(message)),
                // An answer that a call before this one did not wait for.
                _ => {}
            }
        }
    }

    /// The control memory.
    pub(crate) const fn control(&self) -> &Control {
        &self.control
    }

    /// Whether the owner still runs.
    #[must_use]
    pub fn is_alive(&self) -> bool {
        use rustix::event::{poll, PollFd, PollFlags, Timespec};
        let mut fd = [PollFd::new(&self.socket, PollFlags::empty())];
        let polled = poll(&mut fd, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }));
        polled.is_ok() && !fd.iter().any(|fd| fd.revents().contains(PollFlags::HUP))
    }
}
