//! Reading a recording: this process's, or the file of one that may still write it, or was killed while it did.

use std::io::{Error, ErrorKind, Result};
use std::path::Path;

use super::atomic::{fence, Ordering};
use super::event::{Event, WORDS};
use super::ring::{word, HEAD, MAGIC};
use super::MOST_EVENTS;

/// A recording as it was read. Nothing in it is to be believed: another process wrote it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Recording {
    /// The process.
    pub pid: u32,
    /// When it began: nanoseconds of the monotonic clock.
    pub began: u64,
    /// The same moment in nanoseconds since 1970.
    pub began_wall: u64,
    /// When it ended by itself; `None`: it goes on, or the process was killed.
    pub ended: Option<u64>,
    /// Its events, the oldest first.
    pub events: Vec<Event>,
    /// Earlier events that newer ones were written over.
    pub dropped: u64,
    /// Its text: lines of JSON.
    pub text: String,
    /// Bytes of text for which there was no room.
    pub text_lost: u64,
}

impl Recording {
    /// Reads a file. What is written while it is read is left out.
    ///
    /// # Errors
    /// The system's, and [`ErrorKind::InvalidData`] for a file that is no recording.
    pub fn read(path: &Path) -> Result<Self> {
        Self::by_two_looks(|| std::fs::read(path))
    }

    /// From two copies of what may be written meanwhile. A place that is the same in both was not being written when it was read first,
    /// and what the first copy's head counts is in the second.
    pub(super) fn by_two_looks(mut look: impl FnMut() -> Result<Vec<u8>>) -> Result<Self> {
        let first = look()?;
        fence(Ordering::Acquire);
        Self::parse(&first, &look()?)
    }

    /// From a copy of a ring that nobody wrote meanwhile.
    pub(super) fn of(image: &[u8]) -> Result<Self> {
        Self::parse(image, image)
    }

    fn parse(image: &[u8], again: &[u8]) -> Result<Self> {
        let bad = |why: &str| Error::new(ErrorKind::InvalidData, format!("not a recording of this version of millpond: {why}"));
        if get(image, word::MAGIC) != Some(MAGIC) {
            return Err(bad("it begins with something else"));
        }
        let head = |at| get(image, at).unwrap_or_default();
        let (places, text, written) = (head(word::EVENTS), head(word::TEXT), head(word::WRITTEN));
        let text_end = usize::try_from(text).ok().and_then(|text| HEAD.checked_add(text)).filter(|end| *end <= image.len() && end % 8 == 0);
        let text_end = text_end.ok_or_else(|| bad("it is cut off in its text"))?;
        if places == 0 || places > MOST_EVENTS {
            return Err(bad("its number of events cannot be"));
        }
        let said = usize::try_from(head(word::TEXT_WRITTEN)).unwrap_or(usize::MAX).min(text_end - HEAD);
        let lines = again.get(HEAD..HEAD + said).unwrap_or_default();
        let mut events = Vec::new();
        for number in written.saturating_sub(places) + 1..=written {
            let at = (number - 1) % places;
            let Some(at) = usize::try_from(at).ok().and_then(|at| at.checked_mul(WORDS)?.checked_add(text_end / 8)) else { break };
            let words: Option<Vec<u64>> =
                (at..at.saturating_add(WORDS)).map(|at| get(image, at).filter(|word| get(again, at) == Some(*word))).collect();
            let event = words.and_then(|words| Some((*words.first()?, <[u64; WORDS - 1]>::try_from(words.get(1..)?).ok()?)));
            events.extend(event.filter(|(stamp, _)| *stamp == number).and_then(|(_, words)| Event::of(words)));
        }
        Ok(Self {
            pid: head(word::PID) as u32,
            began: head(word::BEGAN),
            began_wall: head(word::BEGAN_WALL),
            ended: Some(head(word::ENDED)).filter(|ended| *ended > 0),
            dropped: written.saturating_sub(events.len() as u64),
            events,
            text: String::from_utf8_lossy(lines).into_owned(),
            text_lost: head(word::TEXT_LOST),
        })
    }
}

fn get(image: &[u8], at: usize) -> Option<u64> {
    let start = at.checked_mul(8)?;
    Some(u64::from_ne_bytes(image.get(start..start.checked_add(8)?)?.try_into().ok()?))
}
