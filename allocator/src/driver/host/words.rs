//! Registered host memory, and the 64-bit words in it that streams write and wait on.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::RwLock;

use crate::driver::{Addr, CuResult};
use crate::futex;

/// How long a waiter sleeps before it looks again: another process may store with no wake-up.
const NAP: Duration = Duration::from_millis(1);

/// Whether a word has reached a value, as the GPU compares (cyclic).
pub(super) const fn reached(word: u64, value: u64) -> bool {
    word.wrapping_sub(value) as i64 >= 0
}

/// The ranges of host memory that are registered.
#[derive(Debug, Default)]
pub(super) struct Words {
    // First byte and size. The read lock is held during each access, so `remove` returns only when none is under way.
    ranges: RwLock<BTreeMap<Addr, u64>>,
}

impl Words {
    pub(super) fn add(&self, ptr: *mut u8, bytes: usize) -> Result<Addr, CuResult> {
        let page = rustix::param::page_size() as u64;
        let (addr, bytes) = (ptr as Addr, bytes as u64);
        let end = addr.checked_add(bytes).ok_or(CuResult::INVALID_VALUE)?;
        if addr == 0 || bytes == 0 || !addr.is_multiple_of(page) || !bytes.is_multiple_of(page) {
            return Err(CuResult::INVALID_VALUE);
        }
        let mut ranges = self.ranges.write();
        if ranges.range(..end).next_back().is_some_and(|(start, size)| start + size > addr) {
            return Err(CuResult::HOST_MEMORY_ALREADY_REGISTERED);
        }
        ranges.insert(addr, bytes);
        Ok(addr)
    }

    pub(super) fn remove(&self, ptr: *mut u8) -> Result<(), CuResult> {
        self.ranges.write().remove(&(ptr as Addr)).map(drop).ok_or(CuResult::HOST_MEMORY_NOT_REGISTERED)
    }

    /// The registered range that holds an address.
    pub(super) fn find(&self, addr: Addr) -> Option<(Addr, u64)> {
        find(&self.ranges.read(), addr, 1)
    }

    /// Runs `access` while `bytes` at `addr` are registered and stay so; `None` where they are not.
    pub(super) fn with<T>(&self, addr: Addr, bytes: u64, access: impl FnOnce() -> T) -> Option<T> {
        let ranges = self.ranges.read();
        find(&ranges, addr, bytes).map(|_| access())
    }

    /// Whether an address is that of a word that streams may use.
    pub(super) fn is_word(&self, word: Addr) -> bool {
        word.is_multiple_of(8) && find(&self.ranges.read(), word, 8).is_some()
    }

    pub(super) fn load(&self, word: Addr) -> Option<u64> {
        // SAFETY: the eight bytes are aligned (checked when queued) and registered, so mapped by the contract of
        // `Driver::host_register` until `remove`, which waits for the lock held here; everyone uses atomics.
        self.with(word, 8, || unsafe { AtomicU64::from_ptr(word as *mut u64) }.load(Ordering::Acquire))
    }

    /// Stores and wakes whoever sleeps on the word, in any process. `false` where the word is no longer registered.
    pub(super) fn store(&self, word: Addr, value: u64) -> bool {
        let stored = self.with(word, 8, || {
            // SAFETY: as in `load`.
            unsafe { AtomicU64::from_ptr(word as *mut u64) }.store(value, Ordering::Release);
            futex::wake(word);
        });
        stored.is_some()
    }
}

fn find(ranges: &BTreeMap<Addr, u64>, addr: Addr, bytes: u64) -> Option<(Addr, u64)> {
    let end = addr.checked_add(bytes)?;
    let (start, size) = ranges.range(..=addr).next_back()?;
    (end <= start + size).then_some((*start, *size))
}

/// Sleeps while the word's low half is as it was seen, a millisecond at most.
pub(super) fn nap(word: Addr, seen: u64) {
    futex::nap(word, seen, NAP);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comparison_is_cyclic() {
        assert!(reached(5, 5) && reached(6, 5) && !reached(4, 5));
        assert!(reached(1 << 62, 5));
        assert!(reached(2, u64::MAX), "past the wrap");
        assert!(!reached(u64::MAX, 2));
    }

    #[test]
    fn ranges_do_not_overlap() {
        let page = rustix::param::page_size();
        let at = |n: usize| (n * page) as *mut u8;
        let words = Words::default();
        assert_eq!(words.add(at(10), 2 * page), Ok(10 * page as u64));
        for (first, pages) in [(10, 1), (10, 2), (9, 2), (11, 4), (9, 9)] {
            assert_eq!(words.add(at(first), pages * page), Err(CuResult::HOST_MEMORY_ALREADY_REGISTERED));
        }
        assert_eq!(words.add(at(12).wrapping_add(8), page), Err(CuResult::INVALID_VALUE));
        assert_eq!(words.add(at(12), 8), Err(CuResult::INVALID_VALUE));
        assert!(words.add(at(12), page).is_ok());
        assert!(words.is_word(12 * page as u64) && !words.is_word(12 * page as u64 + 4) && !words.is_word(13 * page as u64));
        assert_eq!(words.remove(at(11)), Err(CuResult::HOST_MEMORY_NOT_REGISTERED));
        assert_eq!(words.remove(at(10)), Ok(()));
        assert_eq!(words.add(at(9), 3 * page), Ok(9 * page as u64));
    }
}
