//! Address space: reservations, the mappings in them, and what may be read and written where.
//!
//! Streams copy in short pieces, each under the read lock and after a check that the range is still mapped; whatever takes
//! memory away holds the write lock. So an unmap waits for a piece at most, and work that comes after it is refused, not a SIGSEGV.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::Arc;

use parking_lot::{RwLock, RwLockReadGuard};
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags};

use super::chunk::{from_errno, Charge, Chunk};
use crate::driver::{Access, Addr, CuResult, PointerInfo};
use crate::origin::Origin;

/// Addresses below this are nobody's.
const LOWEST: Addr = 1 << 16;
/// Addresses from here on belong to the kernel.
const HIGHEST: Addr = 1 << 47;

/// This process's reservations and mappings.
#[derive(Debug)]
pub(super) struct Space {
    granularity: u64,
    limit: u64,
    tables: RwLock<Tables>,
    origin: Origin,
}

/// What [`Space`] guards.
#[derive(Debug, Default)]
pub(super) struct Tables {
    reservations: BTreeMap<Addr, u64>,
    mappings: BTreeMap<Addr, Mapping>,
    reserved: u64,
}

#[derive(Debug)]
struct Mapping {
    bytes: u64,
    access: Option<Access>,
    // The chunk's bytes live on in the mapping itself; this keeps them on the device's bill.
    _charge: Option<Arc<Charge>>,
}

/// What lies at a range of addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Reach {
    /// Mapped memory with the access that was asked for.
    Mapped,
    /// No reservation of this platform: ordinary memory of the process, which the caller vouches for.
    Host,
    /// Reserved, but not mapped whole with that access; or no address at all.
    Refused,
}

impl Tables {
    /// What a load (or a store, where `write`) of the range would meet.
    pub(super) fn reach(&self, addr: Addr, bytes: u64, write: bool) -> Reach {
        let Some(end) = addr.checked_add(bytes).filter(|end| addr >= LOWEST && *end <= HIGHEST) else {
            return Reach::Refused;
        };
        let mut at = addr;
        while at < end {
            let Some((start, mapping)) = self.mappings.range(..=at).next_back() else { break };
            let granted = match mapping.access {
                Some(Access::ReadWrite) => true,
                Some(Access::ReadOnly) => !write,
                None => false,
            };
            if !granted || start + mapping.bytes <= at {
                break;
            }
            at = start + mapping.bytes;
        }
        if at >= end {
            Reach::Mapped
        } else if self.reservations.range(..end).next_back().is_some_and(|(start, size)| start + size > addr) {
            Reach::Refused
        } else {
            Reach::Host
        }
    }

    fn is_reserved(&self, addr: Addr, end: Addr) -> bool {
        self.reservations.range(..=addr).next_back().is_some_and(|(start, size)| end <= start + size)
    }

    fn holds_mapping(&self, addr: Addr, end: Addr) -> bool {
        self.mappings.range(..end).next_back().is_some_and(|(start, mapping)| start + mapping.bytes > addr)
    }

    /// The mappings that fill a range exactly, first bytes only.
    fn spanned(&self, addr: Addr, end: Addr) -> Option<Vec<Addr>> {
        let mut at = addr;
        let mut starts = Vec::new();
        for (start, mapping) in self.mappings.range(addr..end) {
            if *start != at {
                return None;
            }
            starts.push(*start);
            at = start + mapping.bytes;
        }
        (at == end && at > addr).then_some(starts)
    }
}

impl Space {
    pub(super) fn new(granularity: u64, limit: u64) -> Self {
        Self { granularity, limit, tables: RwLock::default(), origin: Origin::here() }
    }

    /// Whether this is a forked child, which has none of the parent's threads and must not touch its locks.
    pub(super) fn is_forked(&self) -> bool {
        !self.origin.is_here()
    }

    /// The tables, held still for one access.
    pub(super) fn hold(&self) -> RwLockReadGuard<'_, Tables> {
        self.tables.read()
    }

    pub(super) fn reserve(&self, bytes: u64, hint: Addr) -> Result<Addr, CuResult> {
        self.whole(bytes)?;
        let mut tables = self.tables.write();
        let reserved = tables.reserved.checked_add(bytes).filter(|sum| *sum <= self.limit).ok_or(CuResult::OUT_OF_MEMORY)?;
        let addr = self.place_at(hint, bytes).map_or_else(|| self.place_anywhere(bytes), Ok)?;
        tables.reserved = reserved;
        tables.reservations.insert(addr, bytes);
        Ok(addr)
    }

    fn place_at(&self, hint: Addr, bytes: u64) -> Option<Addr> {
        if hint < LOWEST || !hint.is_multiple_of(self.granularity) || hint.checked_add(bytes)? > HIGHEST {
            return None;
        }
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED_NOREPLACE;
        // SAFETY: NOREPLACE: memory that exists is left alone.
        let got = unsafe { rustix::mm::mmap_anonymous(hint as *mut c_void, length(bytes).ok()?, ProtFlags::empty(), flags) }.ok()?;
        if got as Addr == hint {
            return Some(hint);
        }
        // A kernel that does not know NOREPLACE takes the address as a hint.
        clear(got as Addr, bytes);
        None
    }

    fn place_anywhere(&self, bytes: u64) -> Result<Addr, CuResult> {
        let slack = self.granularity;
        let padded = bytes.checked_add(slack).filter(|padded| *padded <= HIGHEST).ok_or(CuResult::OUT_OF_MEMORY)?;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a new mapping, at an address that the kernel chooses.
        let got = unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), length(padded)?, ProtFlags::empty(), flags) };
        let first = got.map_err(|_| CuResult::OUT_OF_MEMORY)? as Addr;
        let addr = first.next_multiple_of(slack);
        clear(first, addr - first);
        clear(addr + bytes, slack - (addr - first));
        Ok(addr)
    }

    pub(super) fn unreserve(&self, addr: Addr, bytes: u64) -> Result<(), CuResult> {
        let mut tables = self.tables.write();
        if tables.reservations.get(&addr) != Some(&bytes) || tables.holds_mapping(addr, addr + bytes) {
            return Err(CuResult::INVALID_VALUE);
        }
        tables.reservations.remove(&addr);
        tables.reserved -= bytes;
        clear(addr, bytes);
        Ok(())
    }

    pub(super) fn map(&self, addr: Addr, bytes: u64, chunk: &Chunk) -> Result<(), CuResult> {
        let end = self.range(addr, bytes)?;
        let mut tables = self.tables.write();
        if bytes != chunk.bytes() || !tables.is_reserved(addr, end) || tables.holds_mapping(addr, end) {
            return Err(CuResult::INVALID_VALUE);
        }
        let flags = MapFlags::SHARED | MapFlags::NORESERVE | MapFlags::FIXED;
        // SAFETY: the range is inside a reservation of ours with nothing mapped there, so only our own placeholder is replaced.
        unsafe { rustix::mm::mmap(addr as *mut c_void, length(bytes)?, ProtFlags::empty(), flags, chunk.file(), 0) }.map_err(from_errno)?;
        tables.mappings.insert(addr, Mapping { bytes, access: None, _charge: chunk.charge() });
        Ok(())
    }

    pub(super) fn unmap(&self, addr: Addr, bytes: u64) -> Result<(), CuResult> {
        let mut tables = self.tables.write();
        if tables.mappings.get(&addr).map(|mapping| mapping.bytes) != Some(bytes) {
            return Err(CuResult::INVALID_VALUE);
        }
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED;
        // SAFETY: the range is exactly one mapping of ours, and no stream is inside it: they look under the read lock.
        unsafe { rustix::mm::mmap_anonymous(addr as *mut c_void, length(bytes)?, ProtFlags::empty(), flags) }.map_err(from_errno)?;
        tables.mappings.remove(&addr);
        Ok(())
    }

    pub(super) fn set_access(&self, addr: Addr, bytes: u64, access: Access) -> Result<(), CuResult> {
        let end = self.range(addr, bytes)?;
        let mut tables = self.tables.write();
        let starts = tables.spanned(addr, end).filter(|_| tables.is_reserved(addr, end)).ok_or(CuResult::INVALID_VALUE)?;
        let flags = match access {
            Access::ReadOnly => MprotectFlags::READ,
            Access::ReadWrite => MprotectFlags::READ | MprotectFlags::WRITE,
        };
        // SAFETY: the range is filled by mappings of ours, and no stream is inside them: they look under the read lock.
        unsafe { rustix::mm::mprotect(addr as *mut c_void, length(bytes)?, flags) }.map_err(from_errno)?;
        for start in starts {
            if let Some(mapping) = tables.mappings.get_mut(&start) {
                mapping.access = Some(access);
            }
        }
        Ok(())
    }

    pub(super) fn find(&self, addr: Addr) -> Option<PointerInfo> {
        let tables = self.tables.read();
        let (base, mapping) = tables.mappings.range(..=addr).next_back()?;
        (addr < base + mapping.bytes).then_some(PointerInfo { base: *base, bytes: mapping.bytes })
    }

    /// Checks a size: some whole units.
    pub(super) fn whole(&self, bytes: u64) -> Result<(), CuResult> {
        (bytes > 0 && bytes.is_multiple_of(self.granularity)).then_some(()).ok_or(CuResult::INVALID_VALUE)
    }

    /// Checks a range of addresses; its end.
    fn range(&self, addr: Addr, bytes: u64) -> Result<Addr, CuResult> {
        self.whole(bytes)?;
        let end = addr.checked_add(bytes).ok_or(CuResult::INVALID_VALUE)?;
        addr.is_multiple_of(self.granularity).then_some(end).ok_or(CuResult::INVALID_VALUE)
    }
}

impl Drop for Space {
    fn drop(&mut self) {
        if self.is_forked() {
            return;
        }
        for (addr, bytes) in &self.tables.get_mut().reservations {
            clear(*addr, *bytes);
        }
    }
}

fn length(bytes: u64) -> Result<usize, CuResult> {
    usize::try_from(bytes).map_err(|_| CuResult::OUT_OF_MEMORY)
}

/// Gives addresses back to the kernel. Only for ranges that `place_at` or `place_anywhere` made.
fn clear(addr: Addr, bytes: u64) {
    if bytes == 0 {
        return;
    }
    // SAFETY: the range was made by this module and is in no table any more, so nothing of ours points into it.
    let result = unsafe { rustix::mm::munmap(addr as *mut c_void, bytes as usize) };
    if let Err(errno) = result {
        tracing::warn!(addr, bytes, %errno, "address space could not be given back");
    }
}
