//! Segments: memory that torch's caching allocator asked for and cuts into tensors itself (pool mode).
//!
//! A lease pins a block of ours, which there is a whole segment: torch may give a part of it to the next tensor while a receiver reads
//! it. So whoever sends out of a segment keeps the tensor itself, and is told here that it must. A process without segments pays one
//! load of a word that nobody writes.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::RwLock;

/// First byte to bytes.
static SEGMENTS: RwLock<BTreeMap<u64, u64>> = RwLock::new(BTreeMap::new());
/// How many there are, to be looked at without the lock.
static LIVE: AtomicUsize = AtomicUsize::new(0);

/// A segment was made.
pub fn add(addr: u64, bytes: u64) {
    let mut segments = SEGMENTS.write();
    segments.insert(addr, bytes);
    LIVE.store(segments.len(), Ordering::Release);
}

/// What starts at this address is about to be freed. Before it is: another may be made there at once.
#[inline]
pub fn remove(addr: u64) {
    if LIVE.load(Ordering::Acquire) != 0 {
        let mut segments = SEGMENTS.write();
        segments.remove(&addr);
        LIVE.store(segments.len(), Ordering::Release);
    }
}

/// Whether there are any.
#[inline]
#[must_use]
pub fn any() -> bool {
    LIVE.load(Ordering::Acquire) != 0
}

/// Whether an address lies in one.
#[must_use]
pub fn holds(addr: u64) -> bool {
    any() && SEGMENTS.read().range(..=addr).next_back().is_some_and(|(start, bytes)| addr - start < *bytes)
}

#[cfg(test)]
mod tests {
    use super::{add, any, holds, remove};

    #[test]
    fn addresses_are_in_a_segment_from_its_first_byte_to_its_last() {
        remove(0x10_0000);
        add(0x20_0000, 0x1000);
        add(0x10_0000, 0x2000);
        assert!(any());
        let found: Vec<bool> = [0xf_ffff, 0x10_0000, 0x10_1fff, 0x10_2000, 0x1f_ffff, 0x20_0fff, 0x20_1000].map(holds).to_vec();
        assert_eq!(found, [false, true, true, false, false, true, false]);
        remove(0x10_0001);
        assert!(holds(0x10_0001), "no segment starts there");
        remove(0x10_0000);
        assert!(!holds(0x10_0001) && holds(0x20_0000));
        remove(0x20_0000);
        assert!(!any() && !holds(0x20_0000));
    }
}
