//! A client as the owner knows it.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use super::link::Link;
use super::policy::Policy;
use crate::control::{Cause, ClientState};
use crate::wire::{Peer, Role};

/// What a client was asked.
#[derive(Debug)]
pub(super) enum Asked {
    /// To give memory of a device back.
    Trim(u32),
    /// To drop these chunks of others.
    Revoke(Vec<u64>),
}

/// A client and its connection.
#[derive(Debug)]
pub(super) struct Client {
    pub(super) slot: u32,
    pub(super) serial: u64,
    pub(super) name: String,
    pub(super) role: Role,
    pub(super) pid: u32,
    pub(super) start_time: u64,
    /// Its windows, by device.
    pub(super) windows: Vec<u32>,
    pub(super) link: Link,
    pub(super) pidfd: OwnedFd,
    /// What it was asked and has not answered, and when.
    pub(super) asked: HashMap<u64, (Asked, Instant)>,
    /// Its requests that wait.
    pub(super) calls_kept: usize,
    /// Nobody holds the other end of its socket any more.
    pub(super) socket_ended: bool,
    pub(super) process_ended: bool,
    pub(super) detached: bool,
    pub(super) stopped: bool,
    pub(super) faulted: bool,
    /// What is done with it if it stops; nothing but a report where `None`.
    pub(super) policy: Option<Policy>,
    /// Why it was killed here.
    pub(super) cause: Option<Cause>,
    /// It wants to be told of growths that do not fit.
    pub(super) listens: bool,
    pub(super) buried: bool,
}

impl Client {
    /// Whether it can be asked and answered.
    pub(super) fn is_present(&self) -> bool {
        !self.socket_ended && !self.process_ended && !self.buried && !self.link.is_cut()
    }

    pub(super) fn state(&self) -> ClientState {
        if self.buried {
            ClientState::Orphaned
        } else if !self.is_present() {
            ClientState::Dying
        } else if self.faulted {
            ClientState::Faulted
        } else if self.stopped {
            ClientState::Stopped
        } else {
            ClientState::Alive
        }
    }

    pub(super) fn peer(&self) -> Peer {
        Peer { client: self.slot, serial: self.serial, name: self.name.clone(), pid: self.pid }
    }

    /// Whether it has owed an answer for longer than that.
    pub(super) fn is_stuck(&self, bound: Duration, now: Instant) -> bool {
        self.asked.values().any(|(_, since)| now.saturating_duration_since(*since) >= bound)
    }

    /// Whether a peer's text means this client: its name, `parent`, or its slot.
    pub(super) fn is_called(&self, peer: &str) -> bool {
        self.name == peer || peer == "parent" && self.role == Role::Parent || peer.parse() == Ok(self.slot)
    }
}
