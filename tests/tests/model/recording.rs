//! The ring of a recording, whose one writer stands under a lock and whose readers, in other processes, copy its file while it is written.
//!
//! | word | who writes it | what is relied on |
//! | --- | --- | --- |
//! | an event's number | the writer: 0 before its words, itself behind them | two copies that agree on a number and its words have an event that was written whole |
//! | an event's words | the writer, between the two | |
//! | `WRITTEN`, `TEXT_WRITTEN` | the writer, behind what they count | what the first copy's count covers is in the second |
//!
//! `ON`, which says whether anything is recorded, publishes nothing: whoever has seen it takes the lock.

/// Words that the model checker looks at, among those of a page that it need not.
mod atomic {
    pub(super) use loom::sync::atomic::{fence, Ordering};

    macro_rules! either {
        ($name:ident, $value:ty) => {
            #[derive(Debug)]
            pub(super) enum $name {
                Checked(loom::sync::atomic::$name),
                Plain(std::sync::atomic::$name),
            }

            impl $name {
                pub(super) fn load(&self, order: Ordering) -> $value {
                    match self {
                        Self::Checked(word) => word.load(order),
                        Self::Plain(word) => word.load(Ordering::Relaxed),
                    }
                }

                pub(super) fn store(&self, value: $value, order: Ordering) {
                    match self {
                        Self::Checked(word) => word.store(value, order),
                        Self::Plain(word) => word.store(value, Ordering::Relaxed),
                    }
                }

                pub(super) fn fetch_add(&self, n: $value, order: Ordering) -> $value {
                    match self {
                        Self::Checked(word) => word.fetch_add(n, order),
                        Self::Plain(word) => word.fetch_add(n, Ordering::Relaxed),
                    }
                }
            }
        };
    }

    either!(AtomicU64, u64);
    either!(AtomicU8, u8);
}

#[path = "../../../allocator/src/record/event.rs"]
mod event;
#[path = "../../../allocator/src/record/read.rs"]
mod read;
#[path = "../../../allocator/src/record/ring.rs"]
mod ring;

/// Memory that a reader can copy while it is written.
mod map {
    use std::cell::RefCell;
    use std::io::Result;
    use std::path::Path;
    use std::sync::Arc;

    use super::atomic::{AtomicU64, AtomicU8, Ordering};
    use super::event::WORDS;
    use super::ring::{word, HEAD};
    use super::TEXT_BYTES;

    thread_local! {
        /// The last that was made: all threads of a model are one of the system's.
        static LAST: RefCell<Option<Map>> = const { RefCell::new(None) };
    }

    #[derive(Debug, Clone)]
    pub(super) struct Map {
        words: Arc<Vec<AtomicU64>>,
        octets: Arc<Vec<AtomicU8>>,
    }

    impl Map {
        /// What the model checker looks at: of an event the number and the value; of the text, where there is one, the first
        /// bytes; and the counts of both.
        pub(super) fn anonymous(bytes: usize) -> Result<Self> {
            let checked = |at: usize| match at.checked_sub(HEAD / 8) {
                None => at == word::WRITTEN || at == word::TEXT_WRITTEN,
                Some(at) => bytes < 2 * HEAD && [0, 6].contains(&(at % WORDS)),
            };
            let word = |at| if checked(at) { AtomicU64::Checked(Default::default()) } else { AtomicU64::Plain(Default::default()) };
            let octet = |at| if at >= HEAD { AtomicU8::Checked(Default::default()) } else { AtomicU8::Plain(Default::default()) };
            let octets = if bytes < 2 * HEAD { 0 } else { HEAD + TEXT_BYTES };
            let map = Self { words: Arc::new((0..bytes / 8).map(word).collect()), octets: Arc::new((0..octets).map(octet).collect()) };
            LAST.with_borrow_mut(|last| *last = Some(map.clone()));
            Ok(map)
        }

        pub(super) fn file(_path: &Path, bytes: usize) -> Result<Self> {
            Self::anonymous(bytes)
        }

        pub(super) fn words(&self) -> &[AtomicU64] {
            &self.words
        }

        pub(super) fn octets(&self) -> &[AtomicU8] {
            &self.octets
        }

        pub(super) fn last() -> Self {
            LAST.take().unwrap()
        }

        /// A copy as a reader of the file gets it: in pieces, in one order or the other.
        pub(super) fn copy(&self, backwards: bool) -> Vec<u8> {
            let mut image = vec![0; self.words.len() * 8];
            let mut take = |at: usize| image[at * 8..][..8].copy_from_slice(&self.words[at].load(Ordering::Relaxed).to_ne_bytes());
            if backwards {
                (0..self.words.len()).rev().for_each(&mut take);
            } else {
                (0..self.words.len()).for_each(&mut take);
            }
            for (at, octet) in self.octets.iter().enumerate().skip(HEAD) {
                image[at] = octet.load(Ordering::Relaxed);
            }
            image
        }
    }
}

const MOST_EVENTS: u64 = 1 << 26;
/// Bytes of text that a model has.
const TEXT_BYTES: usize = 4;

use atomic::Ordering;
use event::{Event, Kind};
use loom::sync::atomic::AtomicBool;
use loom::sync::Arc;
use loom::thread;
use map::Map;
use read::Recording;
use ring::Ring;

use crate::check;

fn event(number: u64) -> Event {
    Event { value: number, ..Event::new(Kind::Allocate, -1) }
}

/// A ring, and the memory that it lies in.
fn made(events: u64, text: usize) -> (Ring, Map) {
    let ring = Ring::new(events, text, None, 1).unwrap();
    (ring, Map::last())
}

fn read(map: &Map, backwards: bool) -> Recording {
    Recording::by_two_looks(|| Ok(map.copy(backwards))).unwrap()
}

/// One place, written over while it is read.
fn never_torn(backwards: bool) {
    check(2, move || {
        let (mut ring, map) = made(1, 0);
        let writer = thread::spawn(move || (1..=2).for_each(|number| ring.push(&event(number))));
        let reader = thread::spawn(move || {
            let seen = read(&map, backwards);
            for (number, event) in (seen.dropped + 1..).zip(seen.events) {
                assert_eq!(event.value, number, "torn");
            }
        });
        writer.join().unwrap();
        reader.join().unwrap();
    });
}

#[test]
fn an_event_is_never_torn() {
    never_torn(false);
}

#[test]
fn an_event_is_never_torn_in_whatever_order_it_is_copied() {
    never_torn(true);
}

/// What was recorded before the reader came is read, whatever is recorded meanwhile in other places.
#[test]
fn an_event_that_was_told_of_is_read() {
    check(2, || {
        let (mut ring, map) = made(2, 0);
        let told = Arc::new(AtomicBool::new(false));
        let writer = {
            let told = told.clone();
            thread::spawn(move || {
                ring.push(&event(1));
                told.store(true, Ordering::Release);
                ring.push(&event(2));
            })
        };
        let reader = thread::spawn(move || {
            if told.load(Ordering::Acquire) {
                assert_eq!(read(&map, false).events.first(), Some(&event(1)));
            }
        });
        writer.join().unwrap();
        reader.join().unwrap();
    });
}

/// Text only grows: what its count covers is there, and ends with a line.
#[test]
fn text_is_read_as_far_as_it_is_whole() {
    check(2, || {
        let (mut ring, map) = made(1, TEXT_BYTES);
        let writer = thread::spawn(move || {
            ring.note("a");
            ring.note("b");
        });
        let reader = thread::spawn(move || {
            let text = read(&map, false).text;
            assert!(["", "a\n", "a\nb\n"].contains(&text.as_str()), "half a line: {text:?}");
        });
        writer.join().unwrap();
        reader.join().unwrap();
    });
}
