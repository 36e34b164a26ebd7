//! Why a client did not do what it was asked. The names are those of the C API's error codes.

use millpond_allocator::driver::DriverError;
use millpond_allocator::heap::HeapError;
use millpond_allocator::timeline::TimelineError;
use millpond_allocator::window::WindowError;

use crate::control::ControlError;
use crate::wire::{Answer, FrameError, Reason};

/// What can go wrong, one variant a cause.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The caller's mistake.
    #[error("{0}")]
    InvalidArgument(String),
    /// No CUDA driver, or one that cannot do it.
    #[error("{0}")]
    Driver(#[from] DriverError),
    /// No owner at the socket.
    #[error("no owner at {socket}: {why}; is the parent (or `millpond serve`) running, and MILLPOND_SOCKET its address?")]
    OwnerUnavailable {
        /// The socket's path.
        socket: String,
        /// What the system says.
        why: String,
    },
    /// The owner, or this process, refuses the other.
    #[error("{0}")]
    Refused(String),
    /// No memory.
    #[error("{0}")]
    OutOfMemory(String),
    /// The peer died before the value was ready, or while it was awaited.
    #[error("{0}")]
    PeerDied(String),
    /// The owner has ended.
    #[error("the owner of the arena has ended: memory that is held stays usable, but nothing new can be had")]
    OwnerDied,
    /// A reference to bytes that are not what they were.
    #[error("{0}")]
    Stale(String),
    /// The time was up.
    #[error("{0}")]
    Timeout(String),
    /// The channel is closed.
    #[error("{0}")]
    Closed(String),
    /// The other side does not keep to the wire.
    #[error("{0}")]
    Protocol(String),
    /// This process may have no more file descriptors.
    #[error("{0}")]
    Descriptors(String),
    /// Called in a forked child.
    #[error("millpond does not work in a forked child: the arena belongs to the parent process; start workers with spawn or subprocess")]
    Forked,
    /// Not here, not now.
    #[error("{0}")]
    Unsupported(String),
    /// Not supposed to happen.
    #[error("{0}")]
    Internal(String),
}

impl Error {
    /// This process has left.
    pub(super) fn left() -> Self {
        Self::Closed("this process has detached from its owner".to_owned())
    }

    /// The name of its code.
    #[must_use]
    pub const fn code(&self) -> &'static str {
        match self {
            Self::InvalidArgument(_) => "InvalidArgument",
            Self::Driver(_) => "DriverUnavailable",
            Self::OwnerUnavailable { .. } => "OwnerUnavailable",
            Self::Refused(_) => "Refused",
            Self::OutOfMemory(_) => "OutOfMemory",
            Self::PeerDied(_) => "PeerDied",
            Self::OwnerDied => "OwnerDied",
            Self::Stale(_) => "Stale",
            Self::Timeout(_) => "Timeout",
            Self::Closed(_) => "Closed",
            Self::Protocol(_) => "Protocol",
            Self::Forked => "Forked",
            Self::Unsupported(_) => "Unsupported",
            Self::Internal(_) | Self::Descriptors(_) => "Internal",
        }
    }

    /// An answer that is none that the request can have.
    pub(super) fn unexpected(answer: &Answer) -> Self {
        Self::Protocol(format!("the owner answered with something else: {answer:?}"))
    }

    /// A refusal of the owner.
    pub(super) fn from_refusal(reason: Reason, message: String) -> Self {
        match reason {
            Reason::OutOfMemory => Self::OutOfMemory(message),
            Reason::Stale => Self::Stale(message),
            Reason::Refused => Self::Refused(message),
            Reason::Timeout => Self::Timeout(message),
            Reason::PeerDied => Self::PeerDied(message),
            Reason::InvalidArgument => Self::InvalidArgument(message),
            Reason::Unsupported => Self::Unsupported(message),
            Reason::Internal => Self::Internal(message),
        }
    }
}

impl From<FrameError> for Error {
    fn from(error: FrameError) -> Self {
        match error {
            FrameError::Closed(_) => Self::Closed(error.to_string()),
            FrameError::Timeout => Self::Timeout(error.to_string()),
            FrameError::Lost { .. } => Self::Descriptors(error.to_string()),
            FrameError::Torn(error) => (*error).into(),
            error => Self::Protocol(error.to_string()),
        }
    }
}

impl From<HeapError> for Error {
    fn from(error: HeapError) -> Self {
        match error {
            HeapError::OutOfMemory(_) => Self::OutOfMemory(error.to_string()),
            HeapError::Foreign { .. } => Self::InvalidArgument(error.to_string()),
            HeapError::Failed(why) => Self::Internal(why),
            HeapError::Left => Self::Closed(error.to_string()),
            HeapError::Unreachable(_) => Self::OwnerDied,
            HeapError::Driver(error) => Self::Driver(error),
        }
    }
}

impl From<TimelineError> for Error {
    fn from(error: TimelineError) -> Self {
        match error {
            TimelineError::Capturing => Self::Unsupported(error.to_string()),
            TimelineError::Unknown(_) => Self::Protocol(error.to_string()),
            TimelineError::Dead(_) => Self::PeerDied(error.to_string()),
            TimelineError::Driver(error) => Self::Driver(error),
        }
    }
}

impl From<WindowError> for Error {
    fn from(error: WindowError) -> Self {
        match error {
            WindowError::Driver(error) => Self::Driver(error),
            error => Self::Protocol(error.to_string()),
        }
    }
}

impl From<ControlError> for Error {
    fn from(error: ControlError) -> Self {
        Self::Refused(error.to_string())
    }
}
