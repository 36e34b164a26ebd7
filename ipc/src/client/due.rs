//! READY as a receiver keeps it: a signal, and which client is to give it.
//!
//! A timeline belongs to a slot, and a slot is another client's when its own is gone and nothing is left of it. So a look at the word
//! alone does not say whose work it speaks of: the serial of the client does, which no other ever has.

use millpond_allocator::timeline::{Reached, Signal};

use crate::control::{Cause, Control, TIMELINES_PER_CLIENT};
use crate::wire::Peer;

/// A signal that a value waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Due {
    pub(super) signal: Signal,
    /// The serial of the client that is to give it.
    pub(super) maker: u64,
}

impl Due {
    /// The slot that its timeline belongs to.
    pub(super) const fn slot(self) -> u32 {
        slot_of(self.signal)
    }

    /// Whether a client is the one that is to give it.
    pub(super) const fn is_of(self, client: &Peer) -> bool {
        self.slot() == client.client && self.maker == client.serial
    }

    /// Whether it is reached. `Never` also where its slot is another client's by now: what the word says then is that one's, and what
    /// the one before came to is not known any more.
    pub(super) fn look(self, control: &Control) -> Reached {
        let Some(word) = control.timeline(self.signal.timeline) else { return Reached::Never };
        let seen = word.reached(self.signal.value);
        // After the word: the owner writes a client's row before that client can write any.
        match serial_of(control, self.slot()) {
            Some(serial) if serial != self.maker => Reached::Never,
            _ => seen,
        }
    }

    /// Why the one that was to give it was killed, if it was.
    pub(super) fn cause(self, control: &Control) -> Option<Cause> {
        control.cause_of(self.slot()).filter(|(serial, _)| *serial == self.maker).map(|(_, cause)| cause)
    }
}

/// The slot that a signal's timeline belongs to.
pub(super) const fn slot_of(signal: Signal) -> u32 {
    signal.timeline / TIMELINES_PER_CLIENT as u32
}

/// The client that a slot is, or last was; `None` where its row cannot be read.
pub(super) fn serial_of(control: &Control, slot: u32) -> Option<u64> {
    Some(control.client(slot)?.read()?.serial)
}
