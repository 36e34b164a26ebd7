//! What a client has done so far on one device: how many values crossed, by which tier, and why not by a better one.
//!
//! Plain words that only grow, written by the client's own threads with one addition each, read by anybody. They count for
//! people and alarms: nothing is decided by them, so a client that lies about them harms nobody.

use super::atomic::{AtomicU64, Ordering};

/// By which way a value crossed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Tier {
    /// An offset: it was arena memory already.
    Arena,
    /// Copied into the arena first, then an offset.
    Copy,
    /// A pool's exported pointer.
    Pool,
    /// A CUDA IPC handle.
    CudaIpc,
    /// Pinned host memory.
    Pinned,
    /// A GPU value by host memory.
    Host,
    /// In the message itself.
    Inline,
}

impl Tier {
    /// All of them, by number.
    pub const ALL: [Self; 7] = [Self::Arena, Self::Copy, Self::Pool, Self::CudaIpc, Self::Pinned, Self::Host, Self::Inline];

    /// Their names, in the ledger and as labels.
    pub const NAMES: [&'static str; Self::ALL.len()] = ["arena", "copy", "pool", "cuda_ipc", "pinned", "host", "inline"];

    /// The tier of a number that a message names; anything else is the arena's.
    #[must_use]
    pub fn from_number(number: u8) -> Self {
        Self::ALL.get(usize::from(number)).copied().unwrap_or(Self::Arena)
    }
}

/// Why a value did not go by its best tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Fall {
    /// GPU memory that is not the arena's: copied on its GPU.
    ForeignGpu,
    /// Host memory that is not the arena's: copied into it.
    ForeignHost,
    /// The arena serves no GPU.
    NoGpu,
    /// The peer's GPU tier failed its canary.
    Canary,
    /// The arena had no room.
    ArenaFull,
    /// Anything else.
    Other,
}

impl Fall {
    /// All of them, by number.
    pub const ALL: [Self; 6] = [Self::ForeignGpu, Self::ForeignHost, Self::NoGpu, Self::Canary, Self::ArenaFull, Self::Other];

    /// Their names, in the ledger and as labels.
    pub const NAMES: [&'static str; Self::ALL.len()] = ["foreign_gpu", "foreign_host", "no_gpu", "canary", "arena_full", "other"];
}

/// One of the counters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Count {
    /// Values sent.
    Sent(Tier),
    /// Values received.
    Received(Tier),
    /// Values that went by a lower tier than their best.
    Fell(Fall),
    /// Copies that sending made.
    Copies,
    /// Their bytes.
    CopiedBytes,
}

const TIERS: usize = Tier::ALL.len();
const FALLS: usize = Fall::ALL.len();
pub(super) const COUNTS: usize = 2 * TIERS + FALLS + 2;

impl Count {
    const fn index(self) -> usize {
        match self {
            Self::Sent(tier) => tier as usize,
            Self::Received(tier) => TIERS + tier as usize,
            Self::Fell(fall) => 2 * TIERS + fall as usize,
            Self::Copies => COUNTS - 2,
            Self::CopiedBytes => COUNTS - 1,
        }
    }

    /// The counter of a name: `sent.TIER`, `received.TIER`, `fell.REASON`, `copies`, `copied_bytes`.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        let tier = |name: &str| Tier::NAMES.iter().position(|known| *known == name).and_then(|at| Tier::ALL.get(at).copied());
        let fall = |name: &str| Fall::NAMES.iter().position(|known| *known == name).and_then(|at| Fall::ALL.get(at).copied());
        match name.split_once('.') {
            Some(("sent", name)) => tier(name).map(Self::Sent),
            Some(("received", name)) => tier(name).map(Self::Received),
            Some(("fell", name)) => fall(name).map(Self::Fell),
            None if name == "copies" => Some(Self::Copies),
            None if name == "copied_bytes" => Some(Self::CopiedBytes),
            _ => None,
        }
    }
}

/// A client's counters on one device.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct Tally(pub(super) [AtomicU64; COUNTS]);

impl Tally {
    /// Adds to a counter: one addition, from any thread.
    #[inline]
    pub fn add(&self, count: Count, n: u64) {
        if let Some(word) = self.0.get(count.index()) {
            word.fetch_add(n, Ordering::Relaxed);
        }
    }

    /// What a counter has come to.
    #[must_use]
    pub fn get(&self, count: Count) -> u64 {
        self.0.get(count.index()).map_or(0, |word| word.load(Ordering::Relaxed))
    }

    /// All from zero, for the slot's next client.
    pub fn reset(&self) {
        self.0.iter().for_each(|word| word.store(0, Ordering::Relaxed));
    }
}
