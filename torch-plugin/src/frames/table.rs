//! Stacks and frames by number. Numbers stay for the life of the process; each recording is told of those that it uses.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hash, Hasher};

use millpond_allocator::record;
use parking_lot::Mutex;
use serde_json::json;

use super::python::Python;

/// The deepest stack.
pub(super) const MOST_FRAMES: usize = 128;
/// The most stacks, and the most frames, that are told apart; further ones are not recorded.
const MOST: usize = 1 << 18;

/// Where a frame is: its code object, and its last instruction, or its line before Python 3.11.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Key {
    pub(super) code: usize,
    pub(super) at: i32,
}

impl Hash for Key {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64((self.code as u64).rotate_left(24) ^ self.at as u64);
    }
}

/// What a code object says of itself.
#[derive(Debug, Clone)]
pub(super) struct Code {
    pub(super) file: String,
    pub(super) name: String,
}

/// Good enough for addresses, and fast.
#[derive(Debug, Default)]
struct Mix(u64);

impl Hasher for Mix {
    fn finish(&self) -> u64 {
        self.0 ^ self.0 >> 32
    }
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u64(u64::from(*byte)));
    }
    fn write_u64(&mut self, n: u64) {
        self.0 = (self.0.rotate_left(5) ^ n).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
    fn write_usize(&mut self, n: usize) {
        self.write_u64(n as u64);
    }
}

type Map<K, V> = HashMap<K, V, BuildHasherDefault<Mix>>;

#[derive(Debug)]
struct Frame {
    file: String,
    name: String,
    line: i32,
    /// The recording that was told of it last.
    told: u32,
}

#[derive(Debug)]
struct Stack {
    frames: Vec<u32>,
    told: u32,
}

#[derive(Debug, Default)]
struct Table {
    codes: Map<usize, Code>,
    frame_of: Map<Key, u32>,
    frames: Vec<Frame>,
    stack_of: Map<Box<[Key]>, u32>,
    stacks: Vec<Stack>,
}

/// Held for a moment, never over a call of Python's.
static TABLE: Mutex<Option<Table>> = Mutex::new(None);

/// The number of this thread's stack, from 1, of which the recording knows. With the GIL.
pub(super) fn stack(python: &Python, depth: usize) -> Option<u32> {
    let mut room = [Key { code: 0, at: 0 }; MOST_FRAMES];
    let depth = python.walk(room.get_mut(..depth)?);
    let keys = room.get(..depth).filter(|keys| !keys.is_empty())?;
    let unknown = {
        let mut table = TABLE.lock();
        let table = table.get_or_insert_default();
        if let Some(number) = table.stack_of.get(keys).copied() {
            table.tell(number);
            return Some(number);
        }
        table.unknown(keys)
    };
    let found: Vec<(Key, Option<Code>, i32)> = unknown
        .into_iter()
        .map(|(key, code)| {
            let code = (!code).then(|| python.keep(key));
            (key, code, python.line(key))
        })
        .collect();
    let mut table = TABLE.lock();
    let table = table.get_or_insert_default();
    let number = table.add(keys, found)?;
    table.tell(number);
    Some(number)
}

impl Table {
    /// The frames of a stack that are new, and whether their code is known.
    fn unknown(&self, keys: &[Key]) -> Vec<(Key, bool)> {
        let mut unknown: Vec<(Key, bool)> = Vec::new();
        for key in keys.iter().filter(|key| !self.frame_of.contains_key(key)) {
            if !unknown.iter().any(|(known, _)| known == key) {
                let code = self.codes.contains_key(&key.code) || unknown.iter().any(|(other, _)| other.code == key.code);
                unknown.push((*key, code));
            }
        }
        unknown
    }

    fn add(&mut self, keys: &[Key], found: Vec<(Key, Option<Code>, i32)>) -> Option<u32> {
        for (key, code, line) in found {
            if let Some(code) = code {
                self.codes.insert(key.code, code);
            }
            if self.frames.len() < MOST && !self.frame_of.contains_key(&key) {
                let Code { file, name } = self.codes.get(&key.code)?.clone();
                self.frames.push(Frame { file, name, line, told: 0 });
                self.frame_of.insert(key, self.frames.len() as u32);
            }
        }
        if let Some(number) = self.stack_of.get(keys) {
            return Some(*number);
        }
        if self.stacks.len() >= MOST {
            return None;
        }
        let frames = keys.iter().filter_map(|key| self.frame_of.get(key).copied()).collect();
        self.stacks.push(Stack { frames, told: 0 });
        let number = self.stacks.len() as u32;
        self.stack_of.insert(keys.into(), number);
        Some(number)
    }

    /// Writes a stack, and those of its frames that are new there, into the recording's text.
    fn tell(&mut self, number: u32) {
        let recording = record::number();
        let Some(stack) = self.stacks.get_mut(number as usize - 1).filter(|stack| stack.told != recording) else { return };
        stack.told = recording;
        for frame in &stack.frames {
            let Some(told) = self.frames.get_mut(*frame as usize - 1).filter(|frame| frame.told != recording) else { continue };
            told.told = recording;
            record::note(&json!({ "f": [frame, told.file, told.line, told.name] }).to_string());
        }
        record::note(&json!({ "s": [number, stack.frames] }).to_string());
    }
}
