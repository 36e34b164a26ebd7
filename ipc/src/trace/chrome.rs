//! Chrome's trace event format, which Perfetto and chrome://tracing open: processes beside each other on one clock.

use std::collections::{HashMap, HashSet};
use std::io::{Result, Write};

use millpond_allocator::record::{Event, Kind};
use serde_json::{json, Map, Value};

use super::{Process, Text};

/// Nothing is drawn shorter, in microseconds: it could not be seen or clicked on.
const SHORTEST: f64 = 1.0;

/// What is written.
#[derive(Debug, Clone, Copy, Default)]
pub struct Chrome {
    /// Each block's allocation and free as an event of its own, with its stack, not only in the counters.
    pub blocks: bool,
}

/// How much was written.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Written {
    /// Events of recordings.
    pub events: usize,
    /// Arrows from a send to its receipt.
    pub arrows: usize,
    /// Processes that others saw die.
    pub deaths: usize,
}

/// A hand-off: the arena and the hold.
type Hold<'a> = (&'a str, u64);

/// Writes recordings as one JSON object.
///
/// # Errors
/// The writer's.
pub fn write_chrome(processes: &[Process], options: Chrome, out: &mut dyn Write) -> Result<Written> {
    let all = || processes.iter().flat_map(|process| process.recording.events.iter().map(move |event| (process, event)));
    let origin =
        processes.iter().map(|process| process.recording.began).chain(all().map(|(_, event)| start(event))).min().unwrap_or_default();
    let holds = |kind: Kind| -> HashSet<Hold<'_>> {
        all().filter(|(_, event)| event.kind == kind).filter_map(|(process, event)| hold(process, event)).collect()
    };
    let (sent, received) = (holds(Kind::Send), holds(Kind::Receive));
    let arrows: HashMap<Hold<'_>, usize> = sent.intersection(&received).zip(1..).map(|(hold, number)| (*hold, number)).collect();

    let mut page = Page { out, origin, first: true };
    page.out.write_all(b"{\"displayTimeUnit\":\"ns\",\"traceEvents\":[\n")?;
    let mut written = Written { arrows: arrows.len(), ..Written::default() };
    for process in processes {
        page.names(process)?;
    }
    let mut ordered: Vec<(&Process, &Event)> = all().collect();
    ordered.sort_by_key(|(_, event)| start(event));
    let mut dead = HashSet::new();
    for (process, event) in ordered {
        written.events += 1;
        page.event(process, event, options)?;
        if let Some(number) = hold(process, event).and_then(|hold| arrows.get(&hold)) {
            page.arrow(process, event, *number)?;
        }
        if let Some(victim) = victim(processes, process, event).filter(|victim| dead.insert(victim.recording.pid)) {
            page.put(
                "i",
                "died",
                victim.recording.pid,
                victim.recording.pid,
                event.time,
                json!({"s": "p", "args": {"seen_by": process.label()}}),
            )?;
            written.deaths += 1;
        }
    }
    page.out.write_all(b"\n]}\n")?;
    Ok(written)
}

/// When an event began: growth and waits are written when they are over.
fn start(event: &Event) -> u64 {
    event.time.saturating_sub(took(event).unwrap_or_default())
}

/// How long an event took, in nanoseconds, where that is known.
fn took(event: &Event) -> Option<u64> {
    match event.kind {
        Kind::Grow => Some(u64::from(event.peer) * 1000),
        Kind::Wait if event.flags & Event::ON_CPU != 0 => Some(event.bytes),
        _ => None,
    }
}

fn hold<'a>(process: &'a Process, event: &Event) -> Option<Hold<'a>> {
    let identity = process.text.identity.as_ref().filter(|_| matches!(event.kind, Kind::Send | Kind::Receive))?;
    Some((identity.token.as_str(), event.value))
}

/// The process that an event says is dead, if it has left a recording.
fn victim<'a>(processes: &'a [Process], observer: &Process, event: &Event) -> Option<&'a Process> {
    let arena = &observer.text.identity.as_ref().filter(|_| event.kind == Kind::Died)?.token;
    let is = |process: &&Process| process.text.identity.as_ref().is_some_and(|who| who.serial == event.value && who.token == *arena);
    processes.iter().find(is)
}

struct Page<'a> {
    out: &'a mut dyn Write,
    origin: u64,
    first: bool,
}

impl Page<'_> {
    /// One event; `more` are its fields beside those that each has.
    fn put(&mut self, phase: &str, name: &str, pid: u32, thread: u32, time: u64, more: Value) -> Result<()> {
        let at = time.saturating_sub(self.origin) as f64 / 1000.0;
        let mut event = Map::from_iter([
            ("ph".to_owned(), phase.into()),
            ("name".to_owned(), name.into()),
            ("cat".to_owned(), "millpond".into()),
            ("pid".to_owned(), pid.into()),
            ("tid".to_owned(), thread.into()),
            ("ts".to_owned(), at.into()),
        ]);
        if let Value::Object(more) = more {
            event.extend(more);
        }
        if !std::mem::take(&mut self.first) {
            self.out.write_all(b",\n")?;
        }
        serde_json::to_writer(&mut *self.out, &event)?;
        Ok(())
    }

    fn names(&mut self, process: &Process) -> Result<()> {
        let pid = process.recording.pid;
        self.put("M", "process_name", pid, pid, self.origin, json!({"args": {"name": process.label()}}))?;
        let threads: HashSet<u32> = process.recording.events.iter().map(|event| event.thread).collect();
        for thread in threads {
            let name = if thread == pid { "main".to_owned() } else { format!("thread {thread}") };
            self.put("M", "thread_name", pid, thread, self.origin, json!({"args": {"name": name}}))?;
        }
        Ok(())
    }

    fn event(&mut self, process: &Process, event: &Event, options: Chrome) -> Result<()> {
        let pid = process.recording.pid;
        let counter = match event.kind {
            Kind::Allocate | Kind::Free => Some("allocated"),
            Kind::Grow | Kind::Trim => Some("reserved"),
            _ => None,
        };
        if let Some(counter) = counter {
            let name = format!("{counter}, {}", device(event.device));
            self.put("C", &name, pid, event.thread, event.time, json!({"args": {"bytes": event.value}}))?;
        }
        let name = match event.kind {
            Kind::Allocate | Kind::Free | Kind::Reusable if !options.blocks => return Ok(()),
            Kind::Allocate => "allocate",
            Kind::Free => "free",
            Kind::Reusable => "reusable",
            Kind::Grow => "growth",
            Kind::Trim => "trim",
            Kind::OutOfMemory => "out of memory",
            Kind::Send => "send",
            Kind::Receive => "receive",
            Kind::Release => "release",
            Kind::Returned => "returned",
            Kind::Wait if event.flags & Event::ON_CPU != 0 => "wait (thread)",
            Kind::Wait | Kind::WaitForStreams => "wait (stream)",
            Kind::Died => "death of a peer",
        };
        let args = args(&process.text, event);
        let slice = took(event).or_else(|| matches!(event.kind, Kind::Send | Kind::Receive).then_some(0));
        match slice {
            Some(took) => {
                let length = (took as f64 / 1000.0).max(SHORTEST);
                self.put("X", name, pid, event.thread, start(event), json!({"dur": length, "args": args}))
            }
            None => {
                let scope = if matches!(event.kind, Kind::OutOfMemory | Kind::Died) { "p" } else { "t" };
                self.put("i", name, pid, event.thread, event.time, json!({"s": scope, "args": args}))
            }
        }
    }

    fn arrow(&mut self, process: &Process, event: &Event, number: usize) -> Result<()> {
        let (phase, more) = match event.kind {
            Kind::Send => ("s", json!({"id": number})),
            _ => ("f", json!({"id": number, "bp": "e"})),
        };
        self.put(phase, "hand-off", process.recording.pid, event.thread, event.time, more)
    }
}

fn device(number: i16) -> String {
    u16::try_from(number).map_or_else(|_| "host".to_owned(), |gpu| format!("GPU {gpu}"))
}

fn args(text: &Text, event: &Event) -> Map<String, Value> {
    let mut args = Map::new();
    let mut put = |name: &str, value: Value| args.insert(name.to_owned(), value);
    match event.kind {
        Kind::Died => {
            put("serial", event.value.into());
            put("slot", event.peer.into());
        }
        Kind::Wait => {
            put("timeline", event.peer.into());
            put("value", event.value.into());
        }
        _ => {
            put("bytes", event.bytes.into());
        }
    }
    match event.kind {
        Kind::Allocate | Kind::Free | Kind::Reusable | Kind::Grow | Kind::Trim => {
            put("address", format!("{:#x}", event.addr).into());
            put("device", device(event.device).into());
        }
        Kind::Send | Kind::Receive | Kind::Release => {
            put("offset", event.addr.into());
            put("hold", format!("{:x}", event.value).into());
        }
        _ => {}
    }
    if matches!(event.kind, Kind::Allocate | Kind::Free | Kind::OutOfMemory | Kind::WaitForStreams | Kind::Wait) {
        put("stream", event.stream.into());
    }
    let frames: Vec<Value> = text.stack(event.stack).map(|frame| format!("{}:{} {}", frame.file, frame.line, frame.name).into()).collect();
    if !frames.is_empty() {
        put("frames", frames.into());
    }
    args
}
