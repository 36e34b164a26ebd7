//! Traces out of recordings: what a process's allocator did, as one of RMM's logs.

use std::collections::{BTreeMap, HashSet};
use std::io::{Result, Write};

use super::{Action, Event, Recorder};
use crate::record::{self, Kind, Recording};

/// What one process did on one device.
#[derive(Debug, Clone, PartialEq)]
pub struct Recorded {
    /// The GPU as that process counts; -1: the host device.
    pub device: i16,
    /// Its allocations and frees. A free of a block that was there before the recording is left out. One of a block that another stream
    /// uses (`record_stream`) is on that stream.
    pub events: Vec<Event>,
    /// Of each event: the seconds since 1970.
    pub when: Vec<f64>,
}

/// The traces in a recording, one for each device.
#[must_use]
pub fn recorded(recording: &Recording) -> Vec<Recorded> {
    let mut live = HashSet::new();
    let mut devices: BTreeMap<i16, Recorded> = BTreeMap::new();
    for event in &recording.events {
        let action = match event.kind {
            Kind::Allocate if live.insert((event.device, event.addr)) => Action::Allocate,
            Kind::Free if live.remove(&(event.device, event.addr)) => Action::Free,
            Kind::OutOfMemory => Action::AllocateFailure,
            _ => continue,
        };
        let made = || Recorded { device: event.device, events: Vec::new(), when: Vec::new() };
        let of = devices.entry(event.device).or_insert_with(made);
        let nanoseconds = recording.began_wall.wrapping_add(event.time.wrapping_sub(recording.began));
        of.when.push(nanoseconds as f64 / 1e9);
        let line = of.events.len() as u64 + 2;
        let (thread, elsewhere) = (u64::from(event.thread), event.kind == Kind::Free && event.flags & record::Event::ELSEWHERE != 0);
        // The format's way to say that another stream uses the block till then.
        let stream = if elsewhere { u64::from(event.peer) } else { event.stream };
        of.events.push(Event { line, thread, action, pointer: event.addr, bytes: event.bytes, stream });
    }
    devices.into_values().collect()
}

impl Recorded {
    /// Writes it as a log of RMM, with its header.
    ///
    /// # Errors
    /// What the writer says.
    pub fn write<W: Write + Send>(&self, out: W) -> Result<W> {
        let recorder = Recorder::new(out)?;
        for (event, seconds) in self.events.iter().zip(&self.when) {
            recorder.write(*seconds, event)?;
        }
        recorder.finish()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::super::parse;
    use super::*;

    #[test]
    fn a_recording_becomes_a_trace_for_each_device() {
        let event = |kind, device, addr| record::Event {
            time: 5_000_000_000,
            thread: 9,
            addr,
            bytes: 100,
            stream: 0x30,
            ..record::Event::new(kind, device)
        };
        let recording = Recording {
            began: 3_000_000_000,
            began_wall: 3_600_000_000_000,
            events: vec![
                event(Kind::Free, 0, 7),
                event(Kind::Grow, 0, 512),
                event(Kind::Allocate, 0, 512),
                event(Kind::Allocate, -1, 512),
                record::Event { flags: record::Event::PENDING | record::Event::ELSEWHERE, peer: 0x40, ..event(Kind::Free, 0, 512) },
                event(Kind::OutOfMemory, 0, 0),
            ],
            ..Recording::default()
        };
        let traces = recorded(&recording);
        assert_eq!(traces.iter().map(|trace| (trace.device, trace.events.len())).collect::<Vec<_>>(), [(-1, 1), (0, 3)]);
        let text = String::from_utf8(traces[1].write(Vec::new()).unwrap()).unwrap();
        assert!(text.contains("\n9,01:00:02.000000,allocate,0x200,100,0x30\n"), "{text}");
        assert!(text.contains("\n9,01:00:02.000000,free,0x200,100,0x40\n"), "on the stream that uses it too: {text}");
        assert_eq!(parse(&text).unwrap(), traces[1].events, "what is replayed is what is written");
    }
}
