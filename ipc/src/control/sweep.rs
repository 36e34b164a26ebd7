//! Which leases are over: two looks at a table of holds that others change meanwhile.
//!
//! Why one look is not enough: a holder that forwards makes the new hold *before* it ends its own. A look that reads the new
//! hold's place too early and the old hold too late sees one that is free and one that is done, though somebody holds the
//! bytes at every moment. Why two are: only the producer, who looks, makes a done hold free. Between two looks that saw the
//! same words there is a moment; a hold alive at that moment is in the second look, alive or done, and if it is done there
//! and was in the first, it was alive there, so the words differ. So at that moment nobody held the lease; and a lease that
//! nobody holds nobody can forward.

use super::atomic::Ordering;
use super::hold::{Hold, HoldState, HoldWord};

/// A hold as it was seen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Seen {
    /// The lease that it says it is of.
    lease: u64,
    /// Its place in the table.
    pub(crate) index: u32,
    pub(crate) word: HoldWord,
}

/// Every hold that is not free, by its lease, then by its place.
#[derive(Debug, Default, Clone)]
pub(crate) struct Look(Vec<Seen>);

impl Look {
    /// Looks once, at holds that come by their places.
    pub(crate) fn at<'a>(holds: impl Iterator<Item = (u32, &'a Hold)>) -> Self {
        let used = holds.map(|(index, hold)| (index, hold, hold.word())).filter(|(_, _, word)| word.state() != HoldState::Free);
        // Of a hold that is being made the lease may be its last life's. It does not matter: its maker holds the right one.
        let seen = used.map(|(index, hold, word)| Seen { lease: hold.lease.load(Ordering::Relaxed), index, word });
        let mut found: Vec<Seen> = seen.collect();
        found.sort_by_key(|seen| seen.lease);
        Self(found)
    }

    /// The holds of a lease.
    pub(crate) fn of(&self, lease: u64) -> &[Seen] {
        let behind = self.0.get(self.0.partition_point(|seen| seen.lease < lease)..).unwrap_or_default();
        behind.get(..behind.partition_point(|seen| seen.lease == lease)).unwrap_or_default()
    }

    /// Every hold.
    pub(crate) fn all(&self) -> &[Seen] {
        &self.0
    }

    /// A lease's holds, if an earlier look saw the same.
    pub(crate) fn steady(&self, before: &Self, lease: u64) -> Option<&[Seen]> {
        let holds = self.of(lease);
        (before.of(lease) == holds).then_some(holds)
    }
}
