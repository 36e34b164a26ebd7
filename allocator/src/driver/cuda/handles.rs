//! The physical memory that a driver holds.
//!
//! A handle is the driver's own pointer or number: what it does with one that is not live is its secret. So a handle reaches
//! it only while it is known here to be live, and none is released while another thread uses it.

use std::collections::HashMap;
use std::os::fd::BorrowedFd;

use parking_lot::RwLock;
use rustix::fs::{fstat, FileType};

use crate::driver::{CuResult, DriverError, Memory, Result};

/// One live handle.
#[derive(Debug)]
struct Held {
    /// Its size as it was created, or as the exporter stated it.
    bytes: u64,
    /// How often it was given out: importing the same memory twice may give the same handle.
    count: usize,
}

/// The live handles of one driver.
#[derive(Debug, Default)]
pub(super) struct Handles(RwLock<HashMap<u64, Held>>);

impl Handles {
    /// Notes a handle that the driver gave out.
    pub(super) fn add(&self, memory: Memory, bytes: u64) {
        self.0.write().entry(memory.0).or_insert(Held { bytes, count: 0 }).count += 1;
    }

    /// Runs `call` with the handle's size, while the handle cannot be released.
    pub(super) fn with<T>(&self, name: &'static str, memory: Memory, call: impl FnOnce(u64) -> Result<T>) -> Result<T> {
        let held = self.0.read();
        match held.get(&memory.0) {
            Some(held) => call(held.bytes),
            None => Err(DriverError::Call { call: name, result: CuResult::INVALID_VALUE }),
        }
    }

    /// Forgets a handle that is about to be released. When it returns, nobody uses it, unless it was given out again.
    pub(super) fn remove(&self, name: &'static str, memory: Memory) -> Result<()> {
        let mut handles = self.0.write();
        let Some(held) = handles.get_mut(&memory.0) else {
            return Err(DriverError::Call { call: name, result: CuResult::INVALID_VALUE });
        };
        held.count -= 1;
        if held.count == 0 {
            handles.remove(&memory.0);
        }
        Ok(())
    }
}

/// Whether a descriptor could be exported memory. The driver's are character devices; what surely is something else (a folder,
/// a pipe, a socket, a block device, a host driver's memfd) is not shown to the driver. Others are its to judge.
pub(super) fn may_be_memory(fd: BorrowedFd<'_>) -> bool {
    use FileType::{BlockDevice, Directory, Fifo, RegularFile, Socket, Symlink};
    let kind = fstat(fd).map(|stat| FileType::from_raw_mode(stat.st_mode));
    // What the driver exports is a character device; of a regular file it says CUDA_ERROR_UNKNOWN (580.159.04).
    kind.is_ok_and(|kind| !matches!(kind, Directory | Fifo | Socket | Symlink | BlockDevice | RegularFile))
}
