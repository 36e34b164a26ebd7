//! The text of a recording: who it is of, its devices, its call stacks.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

/// Who a process was in its arena.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
pub struct Identity {
    /// Its slot.
    pub client: u32,
    /// Its number, which no other client of the arena has.
    pub serial: u64,
    /// The arena.
    pub token: String,
    /// Its process id.
    pub pid: u32,
    /// Its name for people.
    pub name: String,
}

/// One frame of a call stack.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Frame {
    /// The file.
    pub file: String,
    /// The line in it.
    pub line: i64,
    /// The function.
    pub name: String,
}

/// What a recording says beside its events.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Text {
    /// Who it is of; the last, where it was of several.
    pub identity: Option<Identity>,
    /// Devices by number: their names.
    pub devices: HashMap<i16, String>,
    /// Frames by number.
    pub frames: HashMap<u32, Frame>,
    /// Stacks by number: their frames, the innermost first.
    pub stacks: HashMap<u32, Vec<u32>>,
}

#[derive(Deserialize)]
struct FrameLine {
    f: (u32, String, i64, String),
}

#[derive(Deserialize)]
struct StackLine {
    s: (u32, Vec<u32>),
}

#[derive(Deserialize)]
struct DeviceLine {
    device: i16,
    name: String,
}

impl Text {
    /// Reads what it understands, line by line.
    pub(super) fn parse(text: &str) -> Self {
        let mut parsed = Self::default();
        for line in text.lines() {
            if let Ok(FrameLine { f: (number, file, line, name) }) = serde_json::from_str(line) {
                parsed.frames.insert(number, Frame { file, line, name });
            } else if let Ok(StackLine { s: (number, frames) }) = serde_json::from_str(line) {
                parsed.stacks.insert(number, frames);
            } else if let Ok(identity) = serde_json::from_str(line) {
                parsed.identity = Some(identity);
            } else if let Ok(DeviceLine { device, name }) = serde_json::from_str(line) {
                parsed.devices.insert(device, name);
            }
        }
        parsed
    }

    /// The frames of a stack, the innermost first.
    pub fn stack(&self, number: u32) -> impl Iterator<Item = &Frame> {
        self.stacks.get(&number).into_iter().flatten().filter_map(|frame| self.frames.get(frame))
    }
}
