//! How a process attaches.

use std::path::PathBuf;
use std::time::Duration;

use crate::control::LAYOUT;
use crate::wire::{Hello, Role, PROTOCOL};

/// What a client does when its owner ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OnOwnerDeath {
    /// It goes on with the memory that it has.
    #[default]
    Continue,
    /// It ends (SIGTERM to itself).
    Exit,
}

/// How to attach.
#[derive(Debug, Clone)]
pub struct Options {
    /// The owner's socket.
    pub socket: PathBuf,
    /// The owner's key.
    pub key: String,
    /// A name for people.
    pub name: String,
    /// What this process is.
    pub role: Role,
    /// A limit of its own in bytes, per device.
    pub limit: Option<u64>,
    /// What happens when the owner ends.
    pub on_owner_death: OnOwnerDeath,
    /// Wait for READY on the CPU, never on a stream: for a program with few hardware queues.
    pub host_waits: bool,
    /// Python's version, for the owner's log.
    pub python: Option<String>,
    /// torch's version, for the owner's log.
    pub torch: Option<String>,
    /// How long attaching may take.
    pub timeout: Duration,
}

impl Options {
    /// The usual, for a worker.
    #[must_use]
    pub fn new(socket: PathBuf, key: String, name: String) -> Self {
        Self {
            socket,
            key,
            name,
            role: Role::Worker,
            limit: None,
            on_owner_death: OnOwnerDeath::default(),
            host_waits: false,
            python: None,
            torch: None,
            timeout: Duration::from_secs(10),
        }
    }

    pub(super) fn hello(&self) -> Hello {
        Hello {
            protocol: PROTOCOL,
            layout: LAYOUT,
            key: self.key.clone(),
            name: self.name.clone(),
            role: self.role,
            pid: std::process::id(),
            limit: self.limit,
            library: env!("CARGO_PKG_VERSION").to_owned(),
            python: self.python.clone(),
            torch: self.torch.clone(),
            capabilities: Vec::new(),
            fds: 0,
        }
    }
}
