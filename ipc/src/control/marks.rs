//! How much of a producer's table of holds was ever used, so that who looks at all of it looks at no more.

use super::atomic::{AtomicU64, Ordering};
use super::layout::{FORWARDED, HOLDS_PER_CLIENT};

/// One word: of the producer's own holds in the low 32 bits, of forwarders' in the high ones, each one more than the highest place in
/// its half. It only rises while the slot is one client's.
#[repr(transparent)]
#[derive(Debug, Default)]
pub struct Marks(AtomicU64);

impl Marks {
    /// A place is about to be used. Before a hold can be seen there: a look that has seen what came after the hold must reach it.
    pub fn reach(&self, place: u32) {
        let (shift, at) = if (place as usize) < FORWARDED { (0, place) } else { (32, place - FORWARDED as u32) };
        let to = u64::from(at) + 1;
        let _ = self.0.fetch_update(Ordering::AcqRel, Ordering::Acquire, |now| {
            let half = now >> shift & 0xffff_ffff;
            (half < to).then(|| now & !(0xffff_ffff << shift) | to << shift)
        });
    }

    /// The places that were used: the producer's own, then forwarders'. A word that says more than a table has counts as all of it.
    pub fn places(&self) -> impl Iterator<Item = u32> {
        let marks = self.0.load(Ordering::Acquire);
        let (own, forwarded) = (marks as u32 as usize, (marks >> 32) as usize);
        let places = (0..own.min(FORWARDED)).chain(FORWARDED..(FORWARDED + forwarded).min(HOLDS_PER_CLIENT));
        places.map(|place| place as u32)
    }

    /// None was used, for the slot's next client.
    pub fn reset(&self) {
        self.0.store(0, Ordering::Relaxed);
    }
}
