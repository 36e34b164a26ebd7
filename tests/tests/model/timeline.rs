//! A timeline's two words.
//!
//! | word | who writes it | what is relied on |
//! | --- | --- | --- |
//! | `Word::value` | one stream, or the CPU for it; the owner, or where there is none every peer, at a death; the owner for the next client | who sees a value sees what was done before it, through a poison too |
//! | `Word::last_true` | who poisons, before the poison | who sees the poison sees a value here that is no earlier than any that was seen before |
//!
//! | `Cell` of the client's row | the owner, before the next client's timelines go on | who saw a value of the next client sees its serial |
//!
//! So what was once seen to be reached stays so, at a death, at several deaths' poison at once, and for the slot's next client; what was
//! not is *never* once it is poisoned; and nobody is left waiting.

mod atomic {
    pub(super) use loom::sync::atomic::{AtomicU64, Ordering};
}

#[path = "../../../ipc/src/client/due.rs"]
mod due;
#[path = "../../../allocator/src/timeline/word.rs"]
mod word;

use atomic::{AtomicU64, Ordering};
use due::Due;
use loom::sync::Arc;
use loom::thread;
use millpond_allocator::timeline::{Reached as Answer, Signal};
use word::{Reached, Word, LIFE};

use crate::check;
use crate::control::Cause;
use crate::rows::cell::{Cell, Words};

/// One timeline of one client, and that client's row.
pub(crate) struct Memory {
    word: Word,
    row: Cell<Row, 1>,
}

pub(crate) struct Row {
    serial: u64,
}

impl Words<1> for Row {
    fn to_words(&self) -> [u64; 1] {
        [self.serial]
    }

    fn from_words([serial]: [u64; 1]) -> Self {
        Self { serial }
    }
}

impl Memory {
    pub(crate) fn timeline(&self, _timeline: u32) -> Option<Seen<'_>> {
        Some(Seen(&self.word))
    }

    pub(crate) fn client(&self, _client: u32) -> Option<&Cell<Row, 1>> {
        Some(&self.row)
    }

    pub(crate) fn cause_of(&self, _client: u32) -> Option<(u64, Cause)> {
        None
    }
}

/// The word, with its answers as the library's users have them.
pub(crate) struct Seen<'a>(&'a Word);

impl Seen<'_> {
    pub(crate) fn reached(&self, value: u64) -> Answer {
        match self.0.reached(value) {
            Reached::Yes => Answer::Yes,
            Reached::No => Answer::No,
            Reached::Never => Answer::Never,
        }
    }
}

/// Looks twice at whether a value is reached.
fn looks(word: &Word, value: u64) {
    let first = word.reached(value);
    let second = word.reached(value);
    assert!(first != Reached::Yes || second == Reached::Yes, "{value} was reached, and then it was not: {second:?}");
}

/// The client signals, dies, and is buried; somebody reads what it signalled for.
#[test]
fn a_death_takes_nothing_back_that_was_reached() {
    check(3, || {
        let (word, bytes) = (Arc::new(Word::default()), Arc::new(AtomicU64::new(0)));
        let dead = {
            let (word, bytes) = (word.clone(), bytes.clone());
            thread::spawn(move || {
                bytes.store(7, Ordering::Relaxed);
                word.store(1);
            })
        };
        let owner = {
            let word = word.clone();
            thread::spawn(move || {
                dead.join().unwrap();
                word.poison();
            })
        };
        let reader = {
            let word = word.clone();
            thread::spawn(move || {
                looks(&word, 1);
                if word.reached(1) == Reached::Yes {
                    assert_eq!(bytes.load(Ordering::Relaxed), 7, "ready, and not what was sent");
                }
                assert_ne!(word.reached(2), Reached::Yes);
            })
        };
        owner.join().unwrap();
        reader.join().unwrap();
        assert_eq!((word.reached(1), word.reached(2)), (Reached::Yes, Reached::Never));
    });
}

/// Without an owner all peers poison a dead client, again and again, while a forked child's GPU work may still store.
#[test]
fn several_poison_at_once_while_late_signals_come() {
    check(2, || {
        let word = Arc::new(Word::default());
        let late = {
            let word = word.clone();
            // As a GPU stores: over whatever is there. By an exchange, since of a plain store the checker does not know that it comes behind
            // the poison that it follows.
            thread::spawn(move || (1..=2).for_each(|value| assert_ne!(word.value.swap(value, Ordering::Release), value)))
        };
        let mourner = {
            let word = word.clone();
            thread::spawn(move || word.poison())
        };
        let reader = {
            let word = word.clone();
            thread::spawn(move || looks(&word, 2))
        };
        word.poison();
        [late, mourner, reader].into_iter().for_each(|thread| thread.join().unwrap());
        word.poison();
        assert_eq!((word.reached(2), word.reached(3)), (Reached::Yes, Reached::Never), "a late signal is true all the same");
    });
}

/// The slot gets a new client while somebody still looks at what the last one reached, and had not reached. The owner says whose the slot
/// is before its timelines go on, above all that was named: else what never was reached would seem to be.
#[test]
fn the_next_clients_values_are_not_taken_for_the_last_ones() {
    check(3, || {
        let memory = Arc::new(Memory { word: Word::default(), row: Cell::zeroed(|| AtomicU64::new(0)) });
        memory.row.write(&Row { serial: 1 });
        memory.word.store(1);
        let owner = {
            let memory = memory.clone();
            thread::spawn(move || {
                memory.word.poison();
                memory.row.write(&Row { serial: 2 });
                assert_eq!(memory.word.revive(), 1 + LIFE);
                memory.word.store(2 + LIFE);
            })
        };
        let reader = {
            let memory = memory.clone();
            thread::spawn(move || {
                let due = |value| Due { signal: Signal { timeline: 0, value }, maker: 1 };
                assert_ne!(due(1).look(&memory), Answer::No, "it was reached");
                assert_ne!(due(2).look(&memory), Answer::Yes, "nobody signalled that");
            })
        };
        owner.join().unwrap();
        reader.join().unwrap();
        memory.word.poison();
        assert_eq!((memory.word.reached(2 + LIFE), memory.word.reached(3 + LIFE)), (Reached::Yes, Reached::Never));
    });
}
