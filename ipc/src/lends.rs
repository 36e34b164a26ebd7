//! Who lends what to whom: the holds of the control memory, added up. Each byte counts at its producer.

use std::collections::{BTreeMap, HashSet};

use serde::Serialize;

use crate::control::{Claim, Control, HoldState, HoldWord, MAX_CLIENTS};

/// What one client lends to one other, in one window.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Lend {
    /// The slot of the client whose memory it is.
    pub from: u32,
    /// The slot of the client that holds it. `None`: it waits for a receiver that is not known yet.
    pub to: Option<u32>,
    /// The window that it is in.
    pub window: u32,
    /// Bytes: each range once, however often it was sent.
    pub bytes: u64,
    /// Holds.
    pub holds: u64,
}

/// Reads the holds that are in flight or held. Claims of the clients, as all in the control memory; the time it takes grows
/// with the most holds that were ever in use at once.
#[must_use]
pub fn read(control: &Control) -> Vec<Lend> {
    let mut lends = BTreeMap::new();
    for from in 0..MAX_CLIENTS as u32 {
        let mut seen = HashSet::new();
        for (_, hold) in control.used_holds(from) {
            // What ended while we looked lends nothing.
            let Some((word, Claim { window, offset, bytes, .. })) = hold.glance() else { continue };
            if !matches!(word.state(), HoldState::InFlight | HoldState::Held) {
                continue;
            }
            let to = (word.receiver() != HoldWord::ANYBODY).then_some(u32::from(word.receiver()));
            let lend = lends.entry((from, to, window)).or_insert(Lend { from, to, window, bytes: 0, holds: 0 });
            lend.holds += 1;
            if seen.insert((to, window, offset)) {
                lend.bytes = lend.bytes.saturating_add(bytes);
            }
        }
    }
    lends.into_values().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_range_counts_once_for_each_receiver() {
        let control = Control::create([1, 2], 3).unwrap();
        let claim = |offset| Claim { lease: 1, window: 7, offset, bytes: 100 };
        for (place, to, offset) in [(0, 4, 0), (1, 4, 0), (2, 5, 0), (3, 4, 512), (4, HoldWord::ANYBODY, 0)] {
            assert!(control.hold(2, place).unwrap().make(2, to, claim(offset)).is_some());
        }
        control.marks(2).unwrap().reach(4);
        let hold = control.hold(2, 2).unwrap();
        assert!(hold.finish(hold.word().generation(), 5, None));
        let lend = |to, bytes, holds| Lend { from: 2, to, window: 7, bytes, holds };
        assert_eq!(read(&control), [lend(None, 100, 1), lend(Some(4), 200, 3)]);
    }
}
