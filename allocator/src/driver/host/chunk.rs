//! Physical memory: sealed memfds behind handles, and what they cost the device.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;

use parking_lot::Mutex;
use rustix::fs::{FileType, MemfdFlags, OFlags, SealFlags};
use rustix::io::Errno;

use crate::driver::{CuResult, Memory};

/// One physical allocation. Clones are the same allocation.
#[derive(Debug, Clone)]
pub(super) struct Chunk {
    file: Arc<OwnedFd>,
    bytes: u64,
    // Only the creator's device is charged, until the last handle and mapping of this process are gone.
    charge: Option<Arc<Charge>>,
}

impl Chunk {
    /// New memory, charged to a device.
    pub(super) fn create(bytes: u64, gauge: &Gauge) -> Result<Self, CuResult> {
        let charge = gauge.charge(bytes).ok_or(CuResult::OUT_OF_MEMORY)?;
        let file = rustix::fs::memfd_create("millpond-chunk", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).map_err(from_errno)?;
        rustix::fs::ftruncate(&file, bytes).map_err(from_errno)?;
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL).map_err(from_errno)?;
        Ok(Self { file: Arc::new(file), bytes, charge: Some(Arc::new(charge)) })
    }

    /// Memory that another process made. A file that could shrink is refused: a load past its end would be a SIGBUS.
    pub(super) fn import(fd: BorrowedFd<'_>, bytes: u64) -> Result<Self, CuResult> {
        let invalid = |_| CuResult::INVALID_VALUE;
        let stat = rustix::fs::fstat(fd).map_err(invalid)?;
        let regular = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
        if !regular || u64::try_from(stat.st_size) != Ok(bytes) {
            return Err(CuResult::INVALID_VALUE);
        }
        let seals = rustix::fs::fcntl_get_seals(fd).map_err(invalid)?;
        if !seals.contains(SealFlags::SHRINK) || seals.intersects(SealFlags::WRITE | SealFlags::FUTURE_WRITE) {
            return Err(CuResult::INVALID_VALUE);
        }
        let flags = rustix::fs::fcntl_getfl(fd).map_err(invalid)?;
        if flags & OFlags::RWMODE != OFlags::RDWR {
            return Err(CuResult::INVALID_VALUE);
        }
        Ok(Self { file: Arc::new(duplicate(fd)?), bytes, charge: None })
    }

    pub(super) fn export(&self) -> Result<OwnedFd, CuResult> {
        duplicate(self.file.as_fd())
    }

    pub(super) fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    pub(super) const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// What keeps the device charged while the chunk is mapped.
    pub(super) fn charge(&self) -> Option<Arc<Charge>> {
        self.charge.clone()
    }
}

fn duplicate(fd: BorrowedFd<'_>) -> Result<OwnedFd, CuResult> {
    rustix::io::fcntl_dupfd_cloexec(fd, 3).map_err(from_errno)
}

/// The result code for a system call's failure.
pub(super) fn from_errno(errno: Errno) -> CuResult {
    match errno {
        Errno::NOMEM | Errno::NOSPC => CuResult::OUT_OF_MEMORY,
        _ => CuResult::OPERATING_SYSTEM,
    }
}

/// How full a device is, as far as this platform filled it.
#[derive(Debug, Clone)]
pub(super) struct Gauge {
    used: Arc<AtomicU64>,
    total: u64,
}

impl Gauge {
    pub(super) fn new(total: u64) -> Self {
        Self { used: Arc::default(), total }
    }

    pub(super) fn free(&self) -> u64 {
        self.total.saturating_sub(self.used.load(Ordering::Relaxed))
    }

    pub(super) const fn total(&self) -> u64 {
        self.total
    }

    fn charge(&self, bytes: u64) -> Option<Charge> {
        let within = |used: u64| used.checked_add(bytes).filter(|sum| *sum <= self.total);
        self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, within).ok()?;
        Some(Charge { used: Arc::clone(&self.used), bytes })
    }
}

/// Bytes taken from a [`Gauge`], given back when dropped.
#[derive(Debug)]
pub(super) struct Charge {
    used: Arc<AtomicU64>,
    bytes: u64,
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.used.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// Live handles. A handle is a slot and its generation, so one that was released is never taken for a later one.
#[derive(Debug, Default)]
pub(super) struct Handles(Mutex<Vec<Slot>>);

#[derive(Debug, Default)]
struct Slot {
    generation: u32,
    chunk: Option<Chunk>,
}

impl Handles {
    pub(super) fn insert(&self, chunk: Chunk) -> Result<Memory, CuResult> {
        let mut slots = self.0.lock();
        let vacant = |slot: &Slot| slot.chunk.is_none() && slot.generation < u32::MAX;
        let index = slots.iter().position(vacant).unwrap_or(slots.len());
        if index == slots.len() {
            slots.push(Slot::default());
        }
        let number = u32::try_from(index).map_err(|_| CuResult::OUT_OF_MEMORY)?;
        let slot = slots.get_mut(index).ok_or(CuResult::UNKNOWN)?;
        slot.generation += 1;
        slot.chunk = Some(chunk);
        Ok(Memory(u64::from(slot.generation) << 32 | u64::from(number)))
    }

    pub(super) fn get(&self, memory: Memory) -> Result<Chunk, CuResult> {
        let mut slots = self.0.lock();
        Self::live(&mut slots, memory)?.chunk.clone().ok_or(CuResult::INVALID_VALUE)
    }

    pub(super) fn remove(&self, memory: Memory) -> Result<(), CuResult> {
        let chunk = Self::live(&mut self.0.lock(), memory)?.chunk.take();
        chunk.map(drop).ok_or(CuResult::INVALID_VALUE)
    }

    fn live(slots: &mut [Slot], memory: Memory) -> Result<&mut Slot, CuResult> {
        let index = (memory.0 & u64::from(u32::MAX)) as usize;
        let slot = slots.get_mut(index).ok_or(CuResult::INVALID_VALUE)?;
        (u64::from(slot.generation) == memory.0 >> 32).then_some(slot).ok_or(CuResult::INVALID_VALUE)
    }
}
