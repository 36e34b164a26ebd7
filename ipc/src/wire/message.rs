//! The messages between an owner and its clients. Unknown fields are ignored, unknown kinds refused.
//!
//! A client's requests carry a `call_id` of its choice, which the answer repeats; answers come in any order. The owner's
//! requests to a client ([`Ask`]) carry the owner's own. `fds` says how many descriptors travel with the frame.

use millpond_allocator::driver::cuda::HandleKind;
use serde::{Deserialize, Serialize};

use crate::control::Cause;

/// The protocol's version. It changes when a message changes its meaning.
pub const PROTOCOL: u32 = 3;

/// What a process is to its owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// The process that accepts the workers' channels.
    Parent,
    /// A process that takes memory and has a channel to the parent.
    Worker,
    /// A process that only reads the ledger. It takes no slot.
    Observer,
}

/// The first frame of a client.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// [`PROTOCOL`].
    pub protocol: u32,
    /// [`crate::control::LAYOUT`]: the shape of the control memory, as a number that changes with it.
    pub layout: u64,
    /// The key that the owner was started with, in hexadecimal.
    pub key: String,
    /// The client's name, for people.
    pub name: String,
    /// What it is.
    pub role: Role,
    /// Its process id, as it sees itself.
    pub pid: u32,
    /// A limit of its own in bytes, per device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<u64>,
    /// millpond's version, for the log.
    pub library: String,
    /// Python's version, for the log.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub python: Option<String>,
    /// torch's version, for the log.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub torch: Option<String>,
    /// What the client can do beyond this version.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub capabilities: Vec<String>,
    /// Descriptors with this frame: 1 where the client sends a pidfd of itself, else 0.
    #[serde(default)]
    pub fds: usize,
}

/// A device of the owner, as a client is told of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceGrant {
    /// Its identity ([`millpond_allocator::driver::DeviceId`] as text).
    pub device: String,
    /// Its place in the control memory.
    pub index: u32,
    /// Its name.
    pub name: String,
    /// Its memory in bytes.
    pub total: u64,
    /// What the arena may take of it, in bytes.
    pub limit: u64,
    /// The unit of chunks, in bytes.
    pub granularity: u64,
    /// The largest chunk, in bytes.
    pub chunk_bytes: u64,
    /// The client's own window.
    pub window: u32,
    /// Bytes of address space of every window of this device.
    pub window_bytes: u64,
    /// In what form its chunks come ([`millpond_allocator::driver::cuda::HandleKind`] as text). Left out: `posix_fd`, a descriptor with
    /// the frame.
    #[serde(default = "posix_fd", skip_serializing_if = "is_posix_fd")]
    pub handle_kind: String,
}

fn posix_fd() -> String {
    HandleKind::PosixFd.name().to_owned()
}

fn is_posix_fd(kind: &String) -> bool {
    kind == HandleKind::PosixFd.name()
}

/// The owner's answer to a good [`Hello`]. One descriptor comes with it: the control memory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Welcome {
    /// The client's slot in the control memory, below [`crate::control::MAX_CLIENTS`].
    pub client: u32,
    /// Which client of that slot this is; slots are used again, serials are not.
    pub serial: u64,
    /// The arena's boot token, in hexadecimal: a restarted owner has another.
    pub token: String,
    /// The owner's process id.
    pub owner_pid: u32,
    /// The inode of the owner's PID namespace, where it can see it: in that one the numbers of processes in the control memory are good.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid_namespace: Option<u64>,
    /// The owner's devices.
    pub devices: Vec<DeviceGrant>,
    /// Descriptors with this frame.
    pub fds: usize,
}

/// One chunk of a window.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Chunk {
    /// Its epoch: a number that no other chunk of this arena ever had.
    pub epoch: u64,
    /// Where it starts in its window, in bytes.
    pub offset: u64,
    /// Its length in bytes.
    pub bytes: u64,
}

/// What became of a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Fate {
    /// Its client's.
    Held,
    /// Given back, but still mapped by others.
    Retired,
    /// Left by a dead client, and still read by others.
    Orphaned,
    /// Left by a dead client to one that had adopted it, under whose account it is.
    Adopted,
}

/// One chunk as the owner keeps it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChunkMap {
    /// The chunk.
    #[serde(flatten)]
    pub chunk: Chunk,
    /// Whose it is.
    pub fate: Fate,
    /// Other clients that may map it, by slot.
    pub mapped_by: Vec<u32>,
    /// The slot of the client under whose account it is, where that is not its window's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub adopted_by: Option<u32>,
}

/// One window: a client's range of a device's address space, and what lies in it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WindowMap {
    /// Its number.
    pub window: u32,
    /// Its device, by index in the control memory.
    pub device: u32,
    /// Its client's slot.
    pub client: u32,
    /// Bytes of address space.
    pub bytes: u64,
    /// Its chunks, by offset.
    pub chunks: Vec<ChunkMap>,
}

/// Who holds how much of a device: the reason that goes with a refusal.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Holder {
    /// The client's name.
    pub name: String,
    /// Its process id.
    pub pid: u32,
    /// Bytes that the owner granted it.
    pub reserved: u64,
}

/// Who is at the other end of a channel.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Peer {
    /// Its slot.
    pub client: u32,
    /// Its serial.
    pub serial: u64,
    /// Its name.
    pub name: String,
    /// Its process id.
    pub pid: u32,
}

/// Why a request was not granted. The names are those of the C API's error codes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub enum Reason {
    OutOfMemory,
    Stale,
    Refused,
    Timeout,
    PeerDied,
    InvalidArgument,
    Unsupported,
    Internal,
}

/// A growth that does not say otherwise.
const fn pressing() -> bool {
    true
}

/// What a client asks of the owner.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Request {
    /// More memory for the client's own window of a device. Answer: [`Answer::Granted`], with one descriptor for each of the
    /// first [`MAX_FDS`](super::MAX_FDS) chunks; the rest by [`Request::Import`].
    Grow {
        /// The device, by its index in the control memory.
        device: u32,
        /// Bytes that are needed; a multiple of the granularity. More than `chunk_bytes`: consecutive chunks, contiguous in address.
        bytes: u64,
        /// Where there is no room: whether others are asked for what they do not use, and the answer may wait for that. Else the
        /// answer is due at once, and nothing is counted: the client has another way first.
        #[serde(default = "pressing")]
        press: bool,
    },
    /// Chunks of the client's own that it has unmapped and gives back. Answer: [`Answer::Released`].
    Release {
        /// Their epochs.
        epochs: Vec<u64>,
    },
    /// Whose a window is. Answer: [`Answer::Window`], with a pidfd of its client where there is one.
    Window {
        /// The window.
        window: u32,
    },
    /// Descriptors of another client's chunks, or of the client's own. Answer: [`Answer::Granted`].
    Import {
        /// The window.
        window: u32,
        /// The chunks' epochs, at most [`MAX_FDS`](super::MAX_FDS).
        epochs: Vec<u64>,
    },
    /// A hold of the client's on another's bytes shall outlive that one: when it dies, the chunks that the hold touches are
    /// this client's, under its account, until the hold is done. Answer: [`Answer::Done`].
    Adopt {
        /// Whose table the hold is in: a slot.
        producer: u32,
        /// Its place there.
        index: u32,
        /// Its life.
        generation: u32,
    },
    /// Chunks of others that the client no longer maps. No answer.
    Unmapped {
        /// Their epochs.
        epochs: Vec<u64>,
    },
    /// The parent waits for the next worker's channel. Answer: [`Answer::Channel`], with its socket and a pidfd of its peer.
    Accept {
        /// How long the owner may keep the request, in milliseconds.
        timeout_ms: u64,
    },
    /// A channel to another client. Answer: [`Answer::Channel`], with its socket and a pidfd of its peer. The other end is given to
    /// the peer: to a parent at its next [`Request::Accept`], to any other by the same, matched by who asks.
    Connect {
        /// `"parent"`, a client's name, or its slot as a number in text.
        peer: String,
        /// How long the owner may keep the request, in milliseconds.
        timeout_ms: u64,
    },
    /// The ledger. Answer: [`Answer::Ledger`].
    Ledger,
    /// Every window with its chunks. Answer: [`Answer::Windows`].
    Windows,
    /// Tell of every growth that does not fit: [`Ask::Pressure`]. For a parent. Answer: [`Answer::Done`].
    Listen,
    /// What is done with a client that stops (SIGSTOP, a debugger). For a parent; replaces what was said before. Answer:
    /// [`Answer::Done`].
    Policy {
        /// Its slot.
        client: u32,
        /// Its serial: a later client of that slot is not meant.
        serial: u64,
        /// It is killed when it has been stopped for so long, in milliseconds; absent: it is only reported.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        kill_stopped_after_ms: Option<u64>,
    },
    /// Kill a client whose call was cancelled and did not end. For a parent. Answer: [`Answer::Done`], when the signal is sent.
    Kill {
        /// Its slot.
        client: u32,
        /// Its serial.
        serial: u64,
        /// How long after the cancel, in milliseconds.
        waited_ms: u64,
    },
    /// The client's context on a device is dead, though the process lives. No answer.
    Faulted {
        /// The device, by its index.
        device: u32,
        /// The client's timelines that streams of this device write, by their numbers in the arena.
        timelines: Vec<u32>,
    },
    /// The client leaves in good order: nothing is mapped any more. Answer: [`Answer::Done`].
    Detach,
}

/// The owner's answers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
#[allow(missing_docs)]
pub enum Answer {
    /// Chunks, with their descriptors beside them in the same order.
    Granted { chunks: Vec<Chunk> },
    /// Chunks that came back; `retired` bytes of them are still mapped by others.
    Released { bytes: u64, retired: u64 },
    /// A window's client, device index and size.
    Window { window: u32, device: u32, bytes: u64, peer: Peer },
    /// A channel; its socket is beside it, and behind that a pidfd of the peer.
    Channel { peer: Peer },
    /// The ledger, as JSON.
    Ledger { ledger: serde_json::Value },
    /// Every window with its chunks.
    Windows { windows: Vec<WindowMap> },
    /// Done, nothing to say.
    Done,
    /// Not granted.
    Refused { reason: Reason, message: String, asked: u64, limit: u64, reserved: u64, holders: Vec<Holder> },
}

/// What the owner asks or tells a client.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Ask {
    /// Give free chunks back, about so many bytes. Answered by [`FromClient::Answered`].
    Trim {
        /// The device, by its index.
        device: u32,
        /// Bytes wanted.
        bytes: u64,
    },
    /// Drop the mappings of these chunks of another client. Answered by [`FromClient::Answered`] with the bytes still mapped.
    Revoke {
        /// The window that they are in.
        window: u32,
        /// Their epochs.
        epochs: Vec<u64>,
    },
    /// A client is gone (its process and its socket have ended, its timelines are poisoned). No answer.
    Died {
        /// Who.
        peer: Peer,
        /// Why the owner killed it, if it did.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        cause: Option<Cause>,
    },
    /// A growth does not fit. For a parent that said [`Request::Listen`]. No answer.
    Pressure {
        /// The device, by its index.
        device: u32,
        /// Who asked.
        by: Peer,
        /// Bytes asked for.
        asked: u64,
        /// The limit that is in the way: the arena's, or the client's own.
        limit: u64,
        /// Bytes reserved under it.
        reserved: u64,
        /// It was refused; else it waits, while others are asked to give back what they do not use.
        refused: bool,
    },
    /// The owner ends. No answer.
    Goodbye,
}

/// Every frame from a client after the first.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
#[allow(missing_docs)]
pub enum FromClient {
    /// A request.
    Call { call_id: u64, call: Request },
    /// The answer to an [`Ask`]: how many bytes were given back (trim) or are still mapped (revoke).
    Answered { ask_id: u64, bytes: u64 },
}

/// Every frame from the owner.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
#[allow(missing_docs)]
pub enum FromOwner {
    /// An answer to a request.
    Answer {
        call_id: u64,
        answer: Answer,
        #[serde(default)]
        fds: usize,
    },
    /// A request or a notice of the owner.
    Ask {
        ask_id: u64,
        ask: Ask,
        #[serde(default)]
        fds: usize,
    },
    /// The hello was good.
    Welcome { welcome: Welcome },
    /// The hello was refused; `field` names what differs.
    Refused { refused: Refusal },
}

/// Why a hello was refused.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refusal {
    /// The field that differs: `protocol`, `layout`, `key`, `user`, `role`, `clients`.
    pub field: String,
    /// What the owner expects (never the key).
    pub expected: String,
    /// What it found (never the key).
    pub found: String,
}
