//! Where everything lies in the control memory.

use std::sync::atomic::AtomicU64;

use millpond_allocator::timeline::Word;

use super::cell::{Cell, Words};
use super::changes::Changes;
use super::hold::Hold;
use super::marks::Marks;
use super::tally::Tally;

/// The most clients of one owner. Each may hold a window on every device, and addresses end at 128 TiB.
pub const MAX_CLIENTS: usize = 64;
/// The most devices of one owner, the host device among them.
pub const MAX_DEVICES: usize = 17;
/// Timelines of one client.
pub const TIMELINES_PER_CLIENT: usize = 128;
/// Holds in one producer's table.
pub const HOLDS_PER_CLIENT: usize = 16384;
/// The producer's own holds are in the lower half of its table; those that others make when they forward are in the upper.
pub const FORWARDED: usize = HOLDS_PER_CLIENT / 2;
/// The most bytes of a name that the control memory keeps.
pub const NAME_BYTES: usize = 32;

/// A number that changes with this file's layout.
pub const LAYOUT: u64 = 0x6d70_0003_0000_0000 ^ (size_of::<Layout>() as u64);

#[repr(C, align(4096))]
#[derive(Debug)]
pub(super) struct Head {
    pub(super) layout: AtomicU64,
    pub(super) token: [AtomicU64; 2],
    pub(super) owner_pid: AtomicU64,
    pub(super) changes: Changes,
}

#[repr(C, align(4096))]
#[derive(Debug)]
pub(super) struct Page<T>(pub(super) T);

impl<T> std::ops::Deref for Page<T> {
    type Target = T;
    fn deref(&self) -> &T {
        &self.0
    }
}

#[repr(C)]
#[derive(Debug)]
pub(super) struct Layout {
    pub(super) head: Head,
    pub(super) devices: Page<[Cell<DeviceRow, { DeviceRow::WORDS }>; MAX_DEVICES]>,
    pub(super) clients: Page<[Cell<ClientRow, { ClientRow::WORDS }>; MAX_CLIENTS]>,
    pub(super) beats: Page<[AtomicU64; MAX_CLIENTS]>,
    pub(super) marks: Page<[Marks; MAX_CLIENTS]>,
    pub(super) grants: Page<[[Cell<GrantRow, { GrantRow::WORDS }>; MAX_DEVICES]; MAX_CLIENTS]>,
    pub(super) live: Page<[[Cell<LiveRow, { LiveRow::WORDS }>; MAX_DEVICES]; MAX_CLIENTS]>,
    pub(super) tallies: Page<[[Tally; MAX_DEVICES]; MAX_CLIENTS]>,
    pub(super) timelines: Page<[[Word; TIMELINES_PER_CLIENT]; MAX_CLIENTS]>,
    pub(super) holds: Page<[[Hold; HOLDS_PER_CLIENT]; MAX_CLIENTS]>,
}

/// A record of words.
macro_rules! row {
    ($(#[$doc:meta])* $name:ident { $($(#[$field_doc:meta])* $field:ident,)* }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
        pub struct $name {
            $($(#[$field_doc])* pub $field: u64,)*
        }

        impl $name {
            /// Words of the record.
            pub const WORDS: usize = [$(stringify!($field)),*].len();
        }

        impl Words<{ $name::WORDS }> for $name {
            #[inline]
            fn to_words(&self) -> [u64; $name::WORDS] {
                [$(self.$field),*]
            }

            fn from_words(words: [u64; $name::WORDS]) -> Self {
                let [$($field),*] = words;
                Self { $($field),* }
            }
        }
    };
}

/// A record of words with a name.
macro_rules! named_row {
    ($(#[$doc:meta])* $name:ident { $($(#[$field_doc:meta])* $field:ident,)* }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
        pub struct $name {
            $($(#[$field_doc])* pub $field: u64,)*
            /// The name, as far as it fits, with zeros behind it.
            pub name: [u8; NAME_BYTES],
        }

        impl $name {
            /// Words of the record.
            pub const WORDS: usize = [$(stringify!($field)),*].len() + NAME_BYTES / 8;

            /// The name as text.
            #[must_use]
            pub fn name(&self) -> String {
                String::from_utf8_lossy(&self.name).trim_end_matches(['\0', '\u{fffd}']).to_owned()
            }
        }

        impl Words<{ $name::WORDS }> for $name {
            fn to_words(&self) -> [u64; $name::WORDS] {
                let mut words = [0; $name::WORDS];
                let name = self.name.chunks_exact(8).map(|part| part.iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte)));
                words.iter_mut().zip([$(self.$field),*].into_iter().chain(name)).for_each(|(word, value)| *word = value);
                words
            }

            fn from_words(words: [u64; $name::WORDS]) -> Self {
                let mut words = words.into_iter();
                let mut row = Self { $($field: words.next().unwrap_or_default(),)* name: [0; NAME_BYTES] };
                row.name.chunks_exact_mut(8).zip(words).for_each(|(part, word)| part.copy_from_slice(&word.to_le_bytes()));
                row
            }
        }
    };
}

named_row! {
    /// The owner's word on a device.
    DeviceRow {
        /// The identity's first eight bytes, big-endian. Zero with `id_low`: no such device.
        id_high,
        /// The identity's last eight bytes.
        id_low,
        /// The device's memory in bytes.
        total,
        /// What the arena may take of it.
        limit,
        /// What it has taken: the clients' reserved, the retired and the orphaned together.
        reserved,
        /// The most that it ever took.
        peak,
        /// Bytes of it given back by their client but still mapped by another.
        retired,
        /// Bytes of it that dead clients left and others still read.
        orphaned,
        /// Growths granted so far.
        growths,
        /// Growths refused so far.
        refusals,
        /// Clients buried so far.
        deaths,
        /// Of them: killed by policy, since they were stopped.
        kills_stopped,
        /// Of them: killed by policy, since a call of theirs did not end.
        kills_call,
    }
}

named_row! {
    /// The owner's word on a client.
    ClientRow {
        /// Which client of this slot it is; zero: none ever was.
        serial,
        /// [`ClientState`] as a number.
        state,
        /// Its process id, as the owner sees it.
        pid,
        /// When that process began, in clock ticks since boot (`/proc/PID/stat`, field 22); tells it from a later one of the same id.
        start_time,
        /// 0 parent, 1 worker.
        role,
        /// Why the owner killed it ([`Cause`](super::Cause) as a word); zero: it did not. Stays after its end, until the slot is
        /// another's.
        cause,
    }
}

row! {
    /// What the owner granted one client of one device.
    GrantRow {
        /// Bytes of its chunks.
        reserved,
        /// The most that they ever were.
        peak,
        /// How many they are.
        chunks,
        /// Its own limit in bytes; zero: only the arena's.
        limit,
        /// Bytes that it gave back but others still map.
        retired,
        /// Of `reserved`: what it adopted of clients that are dead.
        adopted,
        /// Its growths that were granted, so far.
        growths,
        /// Its growths that were refused, so far.
        refusals,
        /// How often it gave chunks back, so far.
        trims,
        /// The bytes of all of them.
        trimmed_bytes,
        /// Bytes that it gave back a moment ago and that are at hand for it still.
        spare,
    }
}

row! {
    /// What a client says of its own use of one device.
    LiveRow {
        /// Bytes of live blocks.
        allocated,
        /// The most that they ever were.
        peak,
        /// How many they are.
        blocks,
        /// Bytes asked for, without rounding.
        requested,
        /// The largest free block, as of its last growth, trim or beat.
        largest_free,
        /// Bytes of its blocks that others hold.
        leased_out,
        /// Bytes of others' blocks that it holds.
        leased_in,
        /// Out-of-memory errors so far.
        out_of_memory,
    }
}

/// How a client is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u64)]
pub enum ClientState {
    /// No such client, or one whose traces are all gone.
    Gone = 0,
    /// Attached.
    Alive = 1,
    /// Its beat is late: stopped, or starved.
    Stopped = 2,
    /// Its process or its socket has ended, not both: nothing of it is used again yet.
    Dying = 3,
    /// Its context is dead, its process is not.
    Faulted = 4,
    /// Dead and buried, but others still read what it made.
    Orphaned = 5,
}

impl ClientRow {
    /// Whether nothing of it runs any more: it is buried.
    #[must_use]
    pub const fn is_dead(&self) -> bool {
        matches!(ClientState::from_word(self.state), ClientState::Gone | ClientState::Orphaned)
    }
}

impl ClientState {
    /// From a word that may be anything.
    #[must_use]
    pub const fn from_word(word: u64) -> Self {
        match word {
            1 => Self::Alive,
            2 => Self::Stopped,
            3 => Self::Dying,
            4 => Self::Faulted,
            5 => Self::Orphaned,
            _ => Self::Gone,
        }
    }

    /// Its name in the ledger.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Gone => "gone",
            Self::Alive => "alive",
            Self::Stopped => "stopped",
            Self::Dying => "dying",
            Self::Faulted => "faulted",
            Self::Orphaned => "orphaned",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_survive_words() {
        let mut row = ClientRow { serial: 1, state: 2, pid: 3, start_time: 4, role: 1, cause: 5, name: [0; NAME_BYTES] };
        row.name[..8].copy_from_slice(b"denoiser");
        assert_eq!(ClientRow::from_words(row.to_words()), row);
        assert_eq!(row.name(), "denoiser");
    }
}
