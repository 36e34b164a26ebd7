//! Why the heap did not do what it was asked.

use crate::driver::{Addr, DriverError};

/// The figures behind an out-of-memory error, in bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OutOfMemory {
    /// Asked for.
    pub asked: u64,
    /// The device's name.
    pub device: String,
    /// The device's memory.
    pub total: u64,
    /// The limit that was hit, if one was.
    pub limit: Option<u64>,
    /// Live in this process.
    pub allocated: u64,
    /// Reserved by this process, live or not.
    pub reserved: u64,
    /// The largest free block in this process.
    pub largest_free: u64,
    /// What the owner says: who holds what.
    pub detail: String,
}

/// Bytes as torch prints them.
#[must_use]
pub fn human(bytes: u64) -> String {
    const UNITS: [(u64, &str); 3] = [(1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")];
    UNITS
        .iter()
        .find(|(unit, _)| bytes >= *unit)
        .map_or_else(|| format!("{bytes} bytes"), |(unit, name)| format!("{:.2} {name}", bytes as f64 / *unit as f64))
}

impl std::fmt::Display for OutOfMemory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "CUDA out of memory. Tried to allocate {}. {} has a total capacity of {}; this process has {} allocated and {} reserved from \
             millpond's arena, of which the largest free block is {}.",
            human(self.asked),
            self.device,
            human(self.total),
            human(self.allocated),
            human(self.reserved),
            human(self.largest_free)
        )?;
        if let Some(limit) = self.limit {
            write!(f, " Limit: {}.", human(limit))?;
        }
        if !self.detail.is_empty() {
            write!(f, " {}", self.detail)?;
        }
        Ok(())
    }
}

/// Why the heap did not do what it was asked.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HeapError {
    /// No memory, after everything was tried.
    #[error("{0}")]
    OutOfMemory(Box<OutOfMemory>),
    /// The address is no live block here: foreign, or freed already.
    #[error("{addr:#x} is no live block of this arena: it is foreign, or was freed before")]
    Foreign {
        /// The address.
        addr: Addr,
    },
    /// This process has left the arena.
    #[error("this process has left the arena: it has what was free in it then, and can have no more")]
    Left,
    /// The owner cannot be reached, so the arena cannot grow.
    #[error("the arena cannot grow: {0}")]
    Unreachable(String),
    /// No memory, for another reason than that there is none: a driver's call failed, here or in the owner. With the sizes, and who
    /// holds what; the heap works on.
    #[error("{0}")]
    Failed(String),
    /// The driver's answer.
    #[error(transparent)]
    Driver(#[from] DriverError),
}
