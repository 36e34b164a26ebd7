//! The ring that events are written to, in memory whose layout a reader in another process, or after this one's death, knows.
//!
//! A head of one page (words: magic, events that fit, bytes of text that fit, events so far, bytes of text so far, pid, when it began
//! on the monotonic clock and on the wall's, when it ended, bytes of text that did not fit), the text (lines of JSON: who this
//! is, where its windows lie, call stacks), and the events, eight words each. A place's first word is the event's number from 1, 0 while it is
//! being written.

use std::io::Result;
use std::path::Path;

use super::atomic::{fence, AtomicU64, Ordering};
use super::event::{Event, WORDS};
use super::map::Map;

/// The first word: "MPTRACE" and the version of the layout.
pub(super) const MAGIC: u64 = u64::from_le_bytes(*b"MPTRACE1");
/// Bytes of the head.
pub(super) const HEAD: usize = 4096;

/// Words of the head.
pub(super) mod word {
    pub(in super::super) const MAGIC: usize = 0;
    pub(in super::super) const EVENTS: usize = 1;
    pub(in super::super) const TEXT: usize = 2;
    pub(in super::super) const WRITTEN: usize = 3;
    pub(in super::super) const TEXT_WRITTEN: usize = 4;
    pub(in super::super) const PID: usize = 5;
    pub(in super::super) const BEGAN: usize = 6;
    pub(in super::super) const BEGAN_WALL: usize = 7;
    pub(in super::super) const ENDED: usize = 8;
    pub(in super::super) const TEXT_LOST: usize = 9;
}

/// A ring. One writer at a time: it is kept under a lock.
#[derive(Debug)]
pub(super) struct Ring {
    map: Map,
    events: u64,
    text: usize,
    written: u64,
    text_written: usize,
}

impl Ring {
    /// A ring of so many events and bytes of text: in a new file, or in this process's memory.
    pub(super) fn new(events: u64, text: usize, path: Option<&Path>, began: u64) -> Result<Self> {
        let text = text.next_multiple_of(HEAD);
        let places = usize::try_from(events).ok().and_then(|events| events.checked_mul(8 * WORDS));
        let bytes = places.and_then(|places| places.checked_add(HEAD + text)).ok_or(std::io::ErrorKind::InvalidInput)?;
        let map = match path {
            Some(path) => Map::file(path, bytes)?,
            None => Map::anonymous(bytes)?,
        };
        let ring = Self { map, events, text, written: 0, text_written: 0 };
        let wall = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        for (at, value) in [
            (word::EVENTS, events),
            (word::TEXT, text as u64),
            (word::PID, u64::from(std::process::id())),
            (word::BEGAN, began),
            (word::BEGAN_WALL, wall.as_nanos() as u64),
        ] {
            ring.set(at, value);
        }
        fence(Ordering::Release);
        ring.set(word::MAGIC, MAGIC);
        Ok(ring)
    }

    fn set(&self, at: usize, value: u64) {
        if let Some(word) = self.map.words().get(at) {
            word.store(value, Ordering::Release);
        }
    }

    /// How many events fit.
    pub(super) fn capacity(&self) -> u64 {
        self.events
    }

    /// Writes an event over the oldest.
    #[inline]
    pub(super) fn push(&mut self, event: &Event) {
        let at = (HEAD + self.text) / 8 + (self.written % self.events.max(1)) as usize * WORDS;
        let Some([number, rest @ ..]) = self.map.words().get(at..at + WORDS) else { return };
        number.store(0, Ordering::Relaxed);
        fence(Ordering::Release);
        rest.iter().zip(event.words()).for_each(|(place, word)| place.store(word, Ordering::Relaxed));
        self.written += 1;
        number.store(self.written, Ordering::Release);
        self.set(word::WRITTEN, self.written);
    }

    /// Adds a line of text. One that does not fit is counted and left out.
    pub(super) fn note(&mut self, line: &str) {
        let end = self.text_written + line.len() + 1;
        let place = self.map.octets().get(HEAD + self.text_written..HEAD + end).filter(|_| end <= self.text);
        let Some(place) = place else {
            if let Some(lost) = self.map.words().get(word::TEXT_LOST) {
                lost.fetch_add(line.len() as u64, Ordering::Relaxed);
            }
            return;
        };
        let bytes = line.bytes().map(|byte| if byte == b'\n' { b' ' } else { byte }).chain([b'\n']);
        place.iter().zip(bytes).for_each(|(place, byte)| place.store(byte, Ordering::Relaxed));
        self.text_written = end;
        self.set(word::TEXT_WRITTEN, end as u64);
    }

    /// Says that nothing more will come.
    pub(super) fn end(&self, at: u64) {
        self.set(word::ENDED, at);
    }

    /// A copy, as a file would hold it.
    pub(super) fn image(&self) -> Vec<u8> {
        let used = self.written.min(self.events) as usize * WORDS + (HEAD + self.text) / 8;
        let words = self.map.words().get(..used).unwrap_or_default();
        words.iter().flat_map(|word: &AtomicU64| word.load(Ordering::Relaxed).to_ne_bytes()).collect()
    }
}
