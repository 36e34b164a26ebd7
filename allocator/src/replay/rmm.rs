//! Traces as text: RMM's logs, read and written.

use std::io::{Read, Write};
use std::path::Path;

use parking_lot::Mutex;

use super::ReplayError;

/// The first line of a trace.
pub const HEADER: &str = "Thread,Time,Action,Pointer,Size,Stream";

/// What happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// A block was handed out.
    Allocate,
    /// None was to be had.
    AllocateFailure,
    /// A block was given back.
    Free,
}

/// One line of a trace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Event {
    /// Its line in the file, the header being 1.
    pub line: u64,
    /// The thread, as a number of the program that was traced; 0 where the file has no such column.
    pub thread: u64,
    /// What happened.
    pub action: Action,
    /// The block's address in the program that was traced.
    pub pointer: u64,
    /// Bytes asked for.
    pub bytes: u64,
    /// The stream, as a handle of that program.
    pub stream: u64,
}

/// Reads a trace, gzipped if its name ends in `.gz`.
///
/// # Errors
/// [`ReplayError::Io`], [`ReplayError::Parse`].
pub fn read(path: &Path) -> Result<Vec<Event>, ReplayError> {
    let io = |error| ReplayError::Io { path: path.display().to_string(), error };
    let mut file = std::fs::File::open(path).map_err(io)?;
    let mut text = String::new();
    if path.extension().is_some_and(|end| end == "gz") {
        flate2::read::MultiGzDecoder::new(file).read_to_string(&mut text).map_err(io)?;
    } else {
        file.read_to_string(&mut text).map_err(io)?;
    }
    parse(&text)
}

/// Reads the text of a trace. Columns are found by their names in the first line; `Thread` may be missing.
///
/// # Errors
/// [`ReplayError::Parse`].
pub fn parse(text: &str) -> Result<Vec<Event>, ReplayError> {
    let mut lines = (1..).zip(text.lines());
    let header: Vec<&str> = lines.next().map(|(_, line)| line.trim().split(',').map(str::trim).collect()).unwrap_or_default();
    let find = |name: &str| header.iter().position(|column| column.eq_ignore_ascii_case(name));
    let column =
        |name: &str| find(name).ok_or_else(|| ReplayError::Parse { line: 1, reason: format!("no column {name}: expected {HEADER}") });
    let thread = find("Thread");
    let (action, pointer, bytes, stream) = (column("Action")?, column("Pointer")?, column("Size")?, column("Stream")?);
    let mut events = Vec::new();
    for (line, text) in lines.filter(|(_, text)| !text.trim().is_empty()) {
        let fields: Vec<&str> = text.split(',').map(str::trim).collect();
        let field = |at: usize| fields.get(at).copied().unwrap_or_default();
        let bad = |what: &str, text: &str| ReplayError::Parse { line, reason: format!("{text:?} is no {what}") };
        let action = match field(action) {
            "allocate" => Action::Allocate,
            "allocate failure" => Action::AllocateFailure,
            "free" | "deallocate" => Action::Free,
            other => return Err(bad("action", other)),
        };
        let thread = thread.map_or("", field);
        events.push(Event {
            line,
            thread: number(thread, 10).ok_or_else(|| bad("thread", thread))?,
            action,
            pointer: number(field(pointer), 16).ok_or_else(|| bad("pointer", field(pointer)))?,
            bytes: number(field(bytes), 10).ok_or_else(|| bad("size", field(bytes)))?,
            stream: number(field(stream), 16).ok_or_else(|| bad("stream", field(stream)))?,
        });
    }
    Ok(events)
}

fn number(text: &str, radix: u32) -> Option<u64> {
    match text {
        "" | "(nil)" | "nullptr" => Some(0),
        _ => match text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")) {
            Some(hex) => u64::from_str_radix(hex, 16).ok(),
            None => u64::from_str_radix(text, radix).ok(),
        },
    }
}

/// Writes a trace that [`read`] and RMM's own tools read.
#[derive(Debug)]
pub struct Recorder<W: Write + Send>(Mutex<W>);

impl<W: Write + Send> Recorder<W> {
    /// Writes the header.
    ///
    /// # Errors
    /// What the writer says.
    pub fn new(mut out: W) -> std::io::Result<Self> {
        writeln!(out, "{HEADER}")?;
        Ok(Self(Mutex::new(out)))
    }

    /// Writes one event: seconds of the day, and what happened.
    ///
    /// # Errors
    /// What the writer says.
    pub fn write(&self, seconds: f64, event: &Event) -> std::io::Result<()> {
        let action = match event.action {
            Action::Allocate => "allocate",
            Action::AllocateFailure => "allocate failure",
            Action::Free => "free",
        };
        let (whole, pointer) = (seconds as u64, if event.pointer == 0 { "(nil)".to_owned() } else { format!("{:#x}", event.pointer) });
        let (hours, minutes, rest) = (whole / 3600 % 24, whole / 60 % 60, seconds - (whole / 60 * 60) as f64);
        let mut out = self.0.lock();
        writeln!(out, "{},{hours:02}:{minutes:02}:{rest:09.6},{action},{pointer},{},{:#x}", event.thread, event.bytes, event.stream)
    }

    /// Ends the recording.
    ///
    /// # Errors
    /// What the writer says.
    pub fn finish(self) -> std::io::Result<W> {
        let mut out = self.0.into_inner();
        out.flush()?;
        Ok(out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_text_is_refused_with_its_line() {
        for (text, line) in [
            ("", 1),
            ("a,b\n", 1),
            (&format!("{HEADER}\n0,0,grow,0x1,1,0\n"), 2),
            (&format!("{HEADER}\n\n0,0,free,zz,1,0\n"), 3),
            (&format!("{HEADER}\nmain,0,free,0x1,1,0\n"), 2),
        ] {
            match parse(text) {
                Err(ReplayError::Parse { line: at, .. }) => assert_eq!(at, line, "{text}"),
                other => panic!("{text}: {other:?}"),
            }
        }
    }

    #[test]
    fn what_is_recorded_is_read() {
        let recorder = Recorder::new(Vec::new()).unwrap();
        let event = |line, action, pointer, bytes| Event { line, thread: 7, action, pointer, bytes, stream: 0xabc0 };
        let events = [event(2, Action::Allocate, 0x500, 7), event(3, Action::AllocateFailure, 0, 9), event(4, Action::Free, 0x500, 7)];
        for event in &events {
            recorder.write(3723.25, event).unwrap();
        }
        let text = String::from_utf8(recorder.finish().unwrap()).unwrap();
        assert!(text.contains("\n7,01:02:03.250000,allocate,0x500,7,0xabc0\n"), "{text}");
        assert_eq!(parse(&text).unwrap(), events);
        let without: Vec<&str> = text.lines().map(|line| line.split_once(',').unwrap().1).collect();
        let threads = |text: &str| parse(text).unwrap().iter().map(|event| event.thread).collect::<Vec<_>>();
        assert_eq!((threads(&text), threads(&without.join("\n"))), (vec![7; 3], vec![0; 3]), "the column may be missing");
    }
}
