//! Where a heap's chunks come from, and where it says what it holds.

use std::fmt::Debug;
use std::os::fd::OwnedFd;

use crate::window::Chunk;

/// Why no more memory could be had.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum GrowError {
    /// The limit, or the device, is exhausted. `detail` says by whom.
    #[error("{detail}")]
    OutOfMemory {
        /// Limit in bytes: the arena's or the client's, whichever was hit.
        limit: u64,
        /// Bytes that the arena holds.
        reserved: u64,
        /// Who holds them, for people.
        detail: String,
    },
    /// The owner could not make it, and says why: not that there is none.
    #[error("{0}")]
    Failed(String),
    /// This process has left the arena.
    #[error("this process has left the arena")]
    Left,
    /// The owner is gone or does not answer.
    #[error("{0}")]
    Unreachable(String),
}

/// Gives chunks and takes them back. Called with no lock of the heap held.
pub trait ChunkSource: Send + Sync + Debug {
    /// Chunks for at least `bytes`, contiguous in address. Where there is no room it may `press`: ask others for what they do not
    /// use, and wait for that, with a bound. Else it says so at once, and nobody hears of it: the heap may have another way.
    ///
    /// # Errors
    /// [`GrowError`].
    fn grow(&self, bytes: u64, press: bool) -> Result<Vec<(Chunk, OwnedFd)>, GrowError>;

    /// Takes chunks back that are unmapped here.
    fn give_back(&self, chunks: &[Chunk]);

    /// Who holds what of the device, for an error that the source has not made itself. Empty: nobody else is known.
    fn holders(&self) -> String {
        String::new()
    }

    /// Looks whether others are done with blocks that were lent, and unpins those. Called before a miss is taken for real.
    fn reap(&self) {}
}

/// Takes the heap's figures after each change, under its lock.
pub trait LiveSink: Send + Sync + Debug {
    /// Publishes them. A few stores; no call that can block.
    fn publish(&self, live: &Live);
}

/// What a client says of its own use of a device, in bytes and counts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Live {
    /// Bytes of live blocks.
    pub allocated: u64,
    /// The most that they ever were.
    pub peak: u64,
    /// How many they are.
    pub blocks: u64,
    /// Bytes asked for, without rounding.
    pub requested: u64,
    /// The largest free block, as of the last growth or trim.
    pub largest_free: u64,
    /// Bytes of blocks that are pinned for others.
    pub leased_out: u64,
    /// Bytes of others' blocks that this client holds.
    pub leased_in: u64,
    /// Out-of-memory errors so far.
    pub out_of_memory: u64,
}
