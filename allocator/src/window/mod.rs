//! A window: one client's range of the arena's addresses, as one process sees it, and the chunks mapped in it.

mod runs;

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use parking_lot::Mutex;

pub use runs::Epochs;

use crate::driver::{Access, Addr, Driver, DriverError, Memory};
use crate::Few;
use runs::Runs;

/// One chunk of a window. Always mapped whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Chunk {
    /// A number that no other chunk of the arena ever had: an address is used again only under a new one.
    pub epoch: u64,
    /// Where it starts in the window, in bytes.
    pub offset: u64,
    /// Its length in bytes.
    pub bytes: u64,
}

impl Chunk {
    /// The first byte behind it.
    #[must_use]
    pub const fn end(&self) -> u64 {
        self.offset + self.bytes
    }
}

/// Why a range of a window cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WindowError {
    /// The range does not lie in the window.
    #[error("bytes {offset} to {offset}+{bytes} are not in a window of {window} bytes")]
    OutOfBounds {
        /// Where it would start.
        offset: u64,
        /// Its length.
        bytes: u64,
        /// The window's length.
        window: u64,
    },
    /// The driver's answer.
    #[error(transparent)]
    Driver(#[from] DriverError),
}

/// Who must know before a chunk's mapping goes.
pub trait Unmapping: Send + Sync + std::fmt::Debug {
    /// These bytes are about to be unmapped. Called with the window locked.
    fn before_unmap(&self, addr: Addr, bytes: u64);
}

/// A reserved range and what is mapped in it.
#[derive(Debug)]
pub struct Window {
    driver: Arc<dyn Driver>,
    base: Addr,
    bytes: u64,
    access: Access,
    mapped: Mutex<Mapped>,
    unmapping: Option<Arc<dyn Unmapping>>,
}

/// What is mapped: chunk by chunk, and as runs.
#[derive(Debug, Default)]
struct Mapped {
    chunks: BTreeMap<u64, (Chunk, Memory)>,
    runs: Runs,
}

impl Window {
    /// Reserves the addresses. Nothing is mapped.
    ///
    /// # Errors
    /// What the driver says.
    pub fn reserve(driver: Arc<dyn Driver>, bytes: u64, access: Access) -> Result<Self, DriverError> {
        let base = driver.reserve(bytes, 0)?;
        Ok(Self { driver, base, bytes, access, mapped: Mutex::default(), unmapping: None })
    }

    /// Tells somebody before each unmapping.
    #[must_use]
    pub fn telling(mut self, unmapping: Option<Arc<dyn Unmapping>>) -> Self {
        self.unmapping = unmapping;
        self
    }

    /// Its first address.
    #[must_use]
    pub const fn base(&self) -> Addr {
        self.base
    }

    /// Its length in bytes.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Where an address lies in the window, if it does.
    #[must_use]
    pub const fn offset_of(&self, addr: Addr) -> Option<u64> {
        match addr.checked_sub(self.base) {
            Some(offset) if offset < self.bytes => Some(offset),
            _ => None,
        }
    }

    /// Imports and maps chunks, with one grant of access for each contiguous span. All or nothing.
    ///
    /// # Errors
    /// [`WindowError`].
    pub fn map(&self, chunks: &[(Chunk, OwnedFd)]) -> Result<(), WindowError> {
        let mut mapped = self.mapped.lock();
        let mut done: Vec<(Chunk, Memory)> = Vec::with_capacity(chunks.len());
        let result = chunks.iter().try_for_each(|(chunk, fd)| {
            if chunk.offset.checked_add(chunk.bytes).is_none_or(|end| end > self.bytes) || chunk.bytes == 0 {
                return Err(WindowError::OutOfBounds { offset: chunk.offset, bytes: chunk.bytes, window: self.bytes });
            }
            let memory = self.driver.import(fd.as_fd(), chunk.bytes)?;
            if let Err(error) = self.driver.map(self.base + chunk.offset, chunk.bytes, memory) {
                let _ = self.driver.release(memory);
                return Err(error.into());
            }
            done.push((*chunk, memory));
            Ok(())
        });
        let result = result.and_then(|()| {
            Ok(spans(&done).try_for_each(|(offset, bytes)| self.driver.set_access(self.base + offset, bytes, self.access))?)
        });
        if let Err(error) = result {
            for (chunk, memory) in done {
                let _ = self.driver.unmap(self.base + chunk.offset, chunk.bytes);
                let _ = self.driver.release(memory);
            }
            return Err(error);
        }
        done.iter().for_each(|(chunk, _)| mapped.runs.add(chunk));
        mapped.chunks.extend(done.into_iter().map(|(chunk, memory)| (chunk.offset, (chunk, memory))));
        Ok(())
    }

    /// Unmaps one chunk. Nothing queued may reach it any more: unmapping does not wait, it kills. `None`: it is not mapped.
    ///
    /// # Errors
    /// What the driver says; the chunk is still mapped then.
    pub fn unmap(&self, epoch: u64) -> Result<Option<Chunk>, DriverError> {
        let mut mapped = self.mapped.lock();
        let Some((offset, (chunk, memory))) = mapped.chunks.iter().find(|(_, (chunk, _))| chunk.epoch == epoch).map(|(k, v)| (*k, *v))
        else {
            return Ok(None);
        };
        if let Some(unmapping) = &self.unmapping {
            unmapping.before_unmap(self.base + chunk.offset, chunk.bytes);
        }
        self.driver.unmap(self.base + chunk.offset, chunk.bytes)?;
        mapped.chunks.remove(&offset);
        mapped.runs.remove(&chunk);
        if let Err(error) = self.driver.release(memory) {
            tracing::error!(epoch, %error, "the memory of a chunk could not be released");
        }
        Ok(Some(chunk))
    }

    /// The mapped chunks that a range touches, by address.
    #[must_use]
    pub fn chunks_in(&self, offset: u64, bytes: u64) -> Vec<Chunk> {
        let end = offset.saturating_add(bytes.max(1));
        let mapped = self.mapped.lock();
        let mut found: Vec<Chunk> =
            mapped.chunks.range(..end).rev().map(|(_, (chunk, _))| *chunk).take_while(|chunk| chunk.end() > offset).collect();
        found.reverse();
        found
    }

    /// The epochs of the mapped chunks that a range touches, by address. As cheap for a large range as for a small one, where its
    /// chunks came one behind the other.
    #[must_use]
    pub fn epochs_in(&self, offset: u64, bytes: u64) -> Few<Epochs> {
        self.mapped.lock().runs.epochs_in(offset, bytes)
    }

    /// Whether the mapped chunks that a range touches are these, in this order, and cover it without a hole.
    #[must_use]
    pub fn holds(&self, offset: u64, bytes: u64, epochs: &[Epochs]) -> bool {
        self.mapped.lock().runs.are(offset, bytes, epochs)
    }

    /// Whether nothing is mapped.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.mapped.lock().chunks.is_empty()
    }

    /// Every mapped chunk, by address.
    #[must_use]
    pub fn chunks(&self) -> Vec<Chunk> {
        self.mapped.lock().chunks.values().map(|(chunk, _)| *chunk).collect()
    }
}

/// Contiguous spans of chunks that are sorted by address: (offset, bytes).
fn spans(chunks: &[(Chunk, Memory)]) -> impl Iterator<Item = (u64, u64)> {
    let mut sorted: Vec<Chunk> = chunks.iter().map(|(chunk, _)| *chunk).collect();
    sorted.sort_by_key(|chunk| chunk.offset);
    let mut spans: Vec<(u64, u64)> = Vec::new();
    for chunk in sorted {
        match spans.last_mut() {
            Some((offset, bytes)) if *offset + *bytes == chunk.offset => *bytes += chunk.bytes,
            _ => spans.push((chunk.offset, chunk.bytes)),
        }
    }
    spans.into_iter()
}
