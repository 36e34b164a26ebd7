//! What processes say to each other: a 4-byte big-endian length, then JSON; descriptors beside it (`SCM_RIGHTS`); bulk bytes never.

pub(crate) mod epochs;
mod frame;
mod message;

pub(crate) use frame::wait;
pub use frame::{send_frame, FrameError, FrameReader, Outbox, FRAME_LIMIT, MAX_FDS};
pub use message::*;
