//! `millpond stress`: workers that hand each other patterns, and die; whatever is wrong afterwards is counted.
//!
//! The counts come from outside: content is compared byte by byte, the ledger is an observer's, descriptors are those that
//! `/proc` shows of the owner, and on the host device its memory is that of the files behind them.

mod count;
mod pace;
mod report;
mod rig;
mod supervisor;
mod worker;

pub use report::{Report, Spread};
pub use supervisor::run;
pub use worker::run as worker;

/// What to do.
#[derive(Debug, Clone)]
pub struct Options {
    /// `host` or `cuda`.
    pub cuda: bool,
    /// Workers at a time.
    pub workers: u32,
    /// How long they work at most, in seconds.
    pub seconds: u64,
    /// A worker dies after so many of its operations on average; 0: none does. `None`: as often as `kills` needs, by how fast the
    /// workers turn out to be.
    pub kill_every_ops: Option<u64>,
    /// One worker dies in so many milliseconds on average, at an operation that the seed draws.
    pub kill_every_ms: Option<u64>,
    /// The run ends after so many deaths.
    pub kills: Option<u64>,
    /// Processes kept ready to replace the dead, their contexts made: on a GPU coming up takes longer than living.
    pub spares: u32,
    /// Where all numbers are drawn from.
    pub seed: u64,
    /// What is broken on purpose (test builds with the feature `faults`).
    pub fault: Option<String>,
}

/// Numbers from a seed (SplitMix64): the same in every run.
#[derive(Debug, Clone)]
struct Dice(u64);

impl Dice {
    const fn new(seed: u64) -> Self {
        Self(seed)
    }

    const fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    const fn below(&mut self, bound: u64) -> u64 {
        if bound == 0 {
            return 0;
        }
        self.next() % bound
    }

    const fn percent(&mut self, share: u64) -> bool {
        self.below(100) < share
    }
}
