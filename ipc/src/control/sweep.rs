//! Which leases are over: two looks at a table of holds that others change meanwhile.
//!
//! Why one look is not enough: a holder that forwards makes the new hold *before* it ends its own. A look that reads the new
//! hold's place too early and the old hold too late sees one that is free and one that is done, though somebody holds the
//! bytes at every moment. Why two are: only the producer, who looks, makes a done hold free. Between two looks that saw the
//! same words there is a moment; a hold alive at that moment is in the second look, alive or done, and if it is done there
//! and was in the first, it was alive there, so the words differ. So at that moment nobody held the lease; and a lease that
//! nobody holds nobody can forward.

use std::collections::HashMap;

use super::atomic::Ordering;
use super::hold::{Hold, HoldState, HoldWord};

/// Every hold that is not free, by its lease: (place, word).
#[derive(Debug, Default, Clone)]
pub(crate) struct Look(HashMap<u64, Vec<(u32, HoldWord)>>);

impl Look {
    /// Looks once.
    pub(crate) fn at<'a>(holds: impl Iterator<Item = (u32, &'a Hold)>) -> Self {
        let mut found: HashMap<u64, Vec<(u32, HoldWord)>> = HashMap::new();
        for (index, hold) in holds {
            let word = hold.word();
            if word.state() != HoldState::Free {
                // Of a hold that is being made this may be its last life's. It does not matter: its maker holds the right one.
                found.entry(hold.lease.load(Ordering::Relaxed)).or_default().push((index, word));
            }
        }
        Self(found)
    }

    /// The holds of a lease.
    pub(crate) fn of(&self, lease: u64) -> &[(u32, HoldWord)] {
        self.0.get(&lease).map_or(&[], Vec::as_slice)
    }

    /// Every hold.
    pub(crate) fn all(&self) -> impl Iterator<Item = (u32, HoldWord)> + '_ {
        self.0.values().flatten().copied()
    }

    /// A lease's holds, if an earlier look saw the same.
    pub(crate) fn steady(&self, before: &Self, lease: u64) -> Option<&[(u32, HoldWord)]> {
        (before.of(lease) == self.of(lease)).then(|| self.of(lease))
    }
}
