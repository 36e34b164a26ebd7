//! What a client adds to its process's recording: who it is, what it hands to others and takes from them, and who died.
//!
//! `MILLPOND_TRACE=FOLDER` records from the attaching on, into a file of the folder that is there whatever becomes of the process;
//! `MILLPOND_TRACE_EVENTS` says how many events it keeps.

use std::path::{Path, PathBuf};

use millpond_allocator::driver::Stream;
use millpond_allocator::record::{self, Event, Kind};
use millpond_allocator::timeline::Signal;
use serde_json::json;

use super::channel::{Descriptor, NOWHERE};
use super::device::{Device, Opened};
use super::lease::HoldRef;
use super::Client;
use crate::wire::Peer;

/// The device of events that are of none.
const NO_DEVICE: i16 = -2;

/// A file for this process's recording in a folder that is made if there is none: readable by its user alone.
///
/// # Errors
/// What the system says.
pub fn recording_file(folder: &Path, name: &str) -> std::io::Result<PathBuf> {
    use std::os::unix::fs::DirBuilderExt;
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    let plain = |c: char| if c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.') { c } else { '-' };
    let name: String = name.chars().take(40).map(plain).collect();
    Ok(folder.join(format!("{name}-{}-{}.millpond", std::process::id(), record::now())))
}

/// Begins what the environment asks for, if it does and nothing is recorded yet.
pub(super) fn from_environment(name: &str) {
    let Some(folder) = std::env::var_os("MILLPOND_TRACE").filter(|folder| !folder.is_empty()) else { return };
    if record::settings().is_some() {
        return;
    }
    let events = std::env::var("MILLPOND_TRACE_EVENTS").ok().and_then(|text| text.parse().ok()).unwrap_or(record::EVENTS);
    let started = recording_file(Path::new(&folder), name).and_then(|path| record::start(events, Some(&path)));
    if let Err(error) = started {
        tracing::warn!(folder = %folder.display(), %error, "nothing is recorded, although MILLPOND_TRACE asks for it");
    }
}

impl Client {
    /// Writes who this client is, and where its windows lie, into the recording that is on.
    pub fn introduce(&self) {
        if record::is_on() {
            let Self { welcome, name, .. } = self;
            let me = json!({"client": welcome.client, "serial": welcome.serial, "token": welcome.token, "pid": self.pid, "name": name});
            record::note(&me.to_string());
            self.devices.iter().filter_map(Device::if_open).for_each(|opened| introduce_device(opened));
        }
    }
}

/// Writes where a device's window lies.
pub(super) fn introduce_device(opened: &Opened) {
    if record::is_on() {
        let info = opened.driver.device();
        let (number, window) = (number_of(opened), opened.heap.window());
        let line = json!({"device": number, "id": info.id.to_string(), "name": info.name, "window": opened.window, "base": window.base(), "bytes": window.bytes()});
        record::note(&line.to_string());
    }
}

/// A device's number in recordings.
pub(super) fn number_of(opened: &Opened) -> i16 {
    if opened.driver.is_host() {
        -1
    } else {
        i16::try_from(opened.driver.device().ordinal).unwrap_or(i16::MAX)
    }
}

/// Now, where it is of interest.
pub(super) fn now_if_on() -> Option<u64> {
    record::is_on().then(record::now)
}

fn hold_number(hold: HoldRef) -> u64 {
    u64::from(hold.producer) << 48 | u64::from(hold.index & 0xffff) << 32 | u64::from(hold.generation)
}

/// A message left, at a time before it did.
pub(super) fn sent(at: Option<u64>, tensors: &[Descriptor], receiver: u32) {
    let Some(time) = at else { return };
    for descriptor in tensors.iter().filter(|descriptor| descriptor.window != NOWHERE) {
        let (addr, bytes, value) = (descriptor.offset, descriptor.bytes, hold_number(descriptor.hold()));
        record::record(Event { time, addr, bytes, value, peer: receiver, ..Event::new(Kind::Send, NO_DEVICE) });
    }
}

/// A value was taken up, or let go.
pub(super) fn held(kind: Kind, hold: HoldRef, (window, addr, bytes): (u32, u64, u64)) {
    record::record(Event { addr, bytes, value: hold_number(hold), peer: window, ..Event::new(kind, NO_DEVICE) });
}

/// A block that was lent is its stream's again.
pub(super) fn returned(addr: u64, bytes: u64) {
    record::record(Event { addr, bytes, ..Event::new(Kind::Returned, NO_DEVICE) });
}

/// A stream waits for a signal.
pub(super) fn stream_waits(opened: &Opened, stream: Stream, signal: Signal) {
    if record::is_on() {
        // Who it is costs a call of the driver's, which has just been asked the same.
        let stream = opened.driver.stream_id(stream).map_or(u64::MAX, |id| id.0);
        record::record(Event { stream, value: signal.value, peer: signal.timeline, ..Event::new(Kind::Wait, number_of(opened)) });
    }
}

/// This thread waited for a signal.
pub(super) fn cpu_waited(since: Option<u64>, signal: Signal) {
    let Some(since) = since else { return };
    let took = record::now().saturating_sub(since);
    let (flags, value, peer) = (Event::ON_CPU, signal.value, signal.timeline);
    record::record(Event { flags, bytes: took, value, peer, ..Event::new(Kind::Wait, NO_DEVICE) });
}

/// A client of the arena is dead.
pub(super) fn died(peer: &Peer) {
    record::record(Event { value: peer.serial, peer: peer.client, ..Event::new(Kind::Died, NO_DEVICE) });
}
