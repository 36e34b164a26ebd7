//! The memory of a recording: pages of this process, or of a file that outlives it.
#![allow(unsafe_code)] // mmap

use std::fs::OpenOptions;
use std::io::{Error, Read, Result};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::ptr::{null_mut, NonNull};
use std::slice;
use std::sync::atomic::{AtomicU64, AtomicU8};

use rustix::fs::{fallocate, FallocateFlags};
use rustix::io::Errno;
use rustix::mm::{mmap, mmap_anonymous, munmap, MapFlags, ProtFlags};

/// Zeroed pages that are read and written as atomics only.
#[derive(Debug)]
pub(super) struct Map {
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the pages belong to this value until it is dropped, and are only reached as atomics.
unsafe impl Send for Map {}
// SAFETY: as above.
unsafe impl Sync for Map {}

impl Map {
    /// Pages of this process alone, taken when they are first written.
    pub(super) fn anonymous(bytes: usize) -> Result<Self> {
        // SAFETY: a new mapping at an address of the kernel's choice.
        let start =
            unsafe { mmap_anonymous(null_mut(), bytes, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::NORESERVE) }?;
        Self::of(start.cast(), bytes)
    }

    /// Pages of a new file, for its owner alone. Its space is taken now: a disk that fills up later would be a SIGBUS.
    pub(super) fn file(path: &Path, bytes: usize) -> Result<Self> {
        let file = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(path)?;
        let taken = match fallocate(&file, FallocateFlags::empty(), 0, bytes as u64) {
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => std::io::copy(&mut std::io::repeat(0).take(bytes as u64), &mut &file).map(drop),
            taken => taken.map_err(Error::from),
        };
        let made = taken.and_then(|()| {
            // SAFETY: a new mapping at an address of the kernel's choice; the file is new and as long as the mapping.
            unsafe { mmap(null_mut(), bytes, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, &file, 0) }.map_err(Error::from)
        });
        match made {
            Ok(start) => Self::of(start.cast(), bytes),
            Err(error) => {
                let _ = std::fs::remove_file(path);
                Err(error)
            }
        }
    }

    fn of(start: *mut u8, bytes: usize) -> Result<Self> {
        let start = NonNull::new(start).ok_or_else(|| Error::other("mapped at address 0"))?;
        Ok(Self { start, bytes })
    }

    /// All of it, in words.
    pub(super) fn words(&self) -> &[AtomicU64] {
        // SAFETY: mapped, page-aligned and zeroed, for as long as self; never reached but as atomics.
        unsafe { slice::from_raw_parts(self.start.as_ptr().cast(), self.bytes / 8) }
    }

    /// All of it, in bytes.
    pub(super) fn octets(&self) -> &[AtomicU8] {
        // SAFETY: as in `words`. Bytes of one place are used by one of the two views only, apart from copies of the whole.
        unsafe { slice::from_raw_parts(self.start.as_ptr().cast(), self.bytes) }
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        // SAFETY: mapped by this value with this length; no reference into it outlives self.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.bytes) };
    }
}
