//! What is thrown: bytes near to good frames and far from them, and descriptors of every kind.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{ftruncate, memfd_create, MemfdFlags};
use serde_json::{json, Value};

/// Numbers from a seed (SplitMix64).
pub(crate) struct Dice(pub(crate) u64);

impl Dice {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(crate) fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound.max(1) as u64) as usize
    }

    pub(crate) fn percent(&mut self, share: usize) -> bool {
        self.below(100) < share
    }

    pub(crate) fn of<'a, T>(&mut self, from: &'a [T]) -> &'a T {
        &from[self.below(from.len())]
    }

    /// Numbers at which something may turn over.
    pub(crate) fn number(&mut self) -> Value {
        const EDGES: [u64; 14] = [0, 1, 2, 3, 63, 64, 127, 4096, 16_383, 2 << 20, u32::MAX as u64, 1 << 53, i64::MAX as u64, u64::MAX];
        match self.below(10) {
            0 => json!(-1),
            1 => json!(0.5),
            2 => json!(1e308),
            3 => json!(self.next()),
            4 => json!(self.of(&EDGES).wrapping_sub(1)),
            _ => json!(*self.of(&EDGES)),
        }
    }

    /// Any JSON.
    pub(crate) fn json(&mut self, depth: usize) -> Value {
        const WORDS: [&str; 10] = ["kind", "call_id", "call", "ask_id", "bytes", "epochs", "window", "grow", "parent", "\u{0}ü\u{202e}"];
        match self.below(if depth == 0 { 5 } else { 8 }) {
            0 => Value::Null,
            1 => Value::Bool(self.percent(50)),
            2 | 3 => self.number(),
            4 => json!(self.of(&WORDS)),
            5 => Value::Array((0..self.below(5)).map(|_| self.json(depth - 1)).collect()),
            _ => Value::Object((0..self.below(5)).map(|_| ((*self.of(&WORDS)).to_owned(), self.json(depth - 1))).collect()),
        }
    }

    /// Changes one value somewhere in a tree.
    fn change(&mut self, value: &mut Value) {
        match value {
            Value::Object(map) if !map.is_empty() && self.percent(90) => {
                let key = map.keys().nth(self.below(map.len())).cloned().unwrap_or_default();
                match self.below(12) {
                    0 => drop(map.remove(&key)),
                    1 => drop(map.insert("more".to_owned(), Value::Null)),
                    _ => map.get_mut(&key).into_iter().for_each(|value| self.change(value)),
                }
            }
            Value::Array(list) if !list.is_empty() && self.percent(80) => match self.below(10) {
                0 => *list = vec![list[0].clone(); 300],
                1 => list.clear(),
                _ => {
                    let at = self.below(list.len());
                    self.change(&mut list[at]);
                }
            },
            Value::Number(_) if self.percent(80) => *value = self.number(),
            _ => *value = self.json(2),
        }
    }

    /// One message: good, nearly good, or not at all.
    pub(crate) fn body(&mut self, corpus: &[Value]) -> Vec<u8> {
        let mut value = self.of(corpus).clone();
        match self.below(10) {
            0 => value = self.json(4),
            1..=5 => (0..=self.below(3)).for_each(|_| self.change(&mut value)),
            6 => return (0..self.below(200)).map(|_| self.next() as u8).collect(),
            7 => return format!("{}{}", "[".repeat(5_000), "]".repeat(self.below(5_000))).into_bytes(),
            _ => {}
        }
        let mut bytes = serde_json::to_vec(&value).unwrap();
        if self.percent(15) && !bytes.is_empty() {
            let at = self.below(bytes.len());
            match self.below(3) {
                0 => bytes[at] ^= 1 << self.below(8),
                1 => bytes.truncate(at),
                _ => bytes.insert(at, self.next() as u8),
            }
        }
        bytes
    }

    /// A message with its length before it, mostly the right one.
    pub(crate) fn frame(&mut self, corpus: &[Value]) -> Vec<u8> {
        let body = self.body(corpus);
        let length = match self.below(24) {
            0 => 0,
            1 => u32::MAX,
            2 => body.len() as u32 + 1,
            3 => (body.len() as u32).saturating_sub(1),
            4 => (64 << 20) + 1,
            _ => body.len() as u32,
        };
        [&length.to_be_bytes()[..], &body].concat()
    }

    /// Descriptors: mostly none, seldom many, of any kind.
    pub(crate) fn fds(&mut self) -> Vec<OwnedFd> {
        let count = match self.below(10) {
            0 => 1,
            1 => 2,
            2 => self.below(40),
            _ => 0,
        };
        (0..count).filter_map(|_| self.fd()).collect()
    }

    fn fd(&mut self) -> Option<OwnedFd> {
        match self.below(7) {
            0 => std::fs::File::open("/").ok().map(Into::into),
            1 => std::fs::File::open("/dev/null").ok().map(Into::into),
            2 => rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).ok().map(|(read, _)| read),
            3 => rustix::process::pidfd_open(rustix::process::getpid(), rustix::process::PidfdFlags::empty()).ok(),
            4 => {
                let file = memfd_create("small", MemfdFlags::CLOEXEC).ok()?;
                ftruncate(&file, self.below(9000) as u64).ok().map(|()| file)
            }
            5 => memfd_create("empty", MemfdFlags::CLOEXEC).ok(),
            _ => std::os::unix::net::UnixStream::pair().ok().map(|(one, _)| one.into()),
        }
    }

    /// Writes bytes in pieces, with descriptors beside some of them. False where the other side does not take them.
    pub(crate) fn write(&mut self, socket: BorrowedFd<'_>, bytes: &[u8]) -> bool {
        use rustix::event::{poll, PollFd, PollFlags, Timespec};
        use rustix::net::{sendmsg, SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
        let mut rest = bytes;
        while !rest.is_empty() {
            let piece = if self.percent(60) { rest.len() } else { 1 + self.below(rest.len()) };
            let fds = self.fds();
            let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
            let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(64))];
            let mut ancillary = SendAncillaryBuffer::new(&mut space);
            if !fds.is_empty() {
                ancillary.push(SendAncillaryMessage::ScmRights(&fds));
            }
            let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
            match sendmsg(socket, &[std::io::IoSlice::new(&rest[..piece])], &mut ancillary, flags) {
                Ok(n) => rest = &rest[n..],
                Err(rustix::io::Errno::AGAIN) => {
                    let moment = Timespec { tv_sec: 0, tv_nsec: 20_000_000 };
                    let room = poll(&mut [PollFd::from_borrowed_fd(socket, PollFlags::OUT)], Some(&moment));
                    if room != Ok(1) {
                        return false;
                    }
                }
                Err(_) => return false,
            }
        }
        true
    }
}
