//! The handshake: who may become a client, and what a client is told first.

use std::collections::HashMap;
use std::os::fd::OwnedFd;

use super::client::Client;
use super::link::{Fault, Link};
use super::process::Credentials;
use super::{process, rows, Owner};
use crate::control::{ClientState, LAYOUT, MAX_CLIENTS};
use crate::wire::{DeviceGrant, FrameError, FromOwner, Hello, Refusal, Role, Welcome, PROTOCOL};

/// The longest frame of a client, in bytes: a release of every chunk of a large device fits well.
const FRAME_LIMIT: u64 = 4 << 20;
/// The most observers at a time.
const MAX_OBSERVERS: usize = 64;
/// The most bytes of a name that are kept.
const NAME_LIMIT: usize = 128;

/// A hello that is good.
enum Admitted {
    Observer,
    Client { slot: u32, hello: Box<Hello>, pidfd: OwnedFd },
}

impl Owner {
    /// Reads a connection's first frame, if it is there.
    pub(super) fn read_greeting(&mut self, id: u64) {
        let Some(mut greeting) = self.greetings.remove(&id) else { return };
        match greeting.link.next() {
            Ok(None) => drop(self.greetings.insert(id, greeting)),
            Ok(Some(frame)) => self.hello(greeting.link, greeting.credentials, &frame),
            Err(Fault::Frame(FrameError::Closed(_))) => {}
            Err(error) => tracing::warn!(pid = greeting.credentials.pid, %error, "connection closed: no hello"),
        }
    }

    fn hello(&mut self, mut link: Link, who: Credentials, frame: &[u8]) {
        match self.check_hello(&mut link, who, frame) {
            Ok(Admitted::Observer) => self.welcome_observer(link, who),
            Ok(Admitted::Client { slot, hello, pidfd }) => self.welcome_client(link, who, slot, *hello, pidfd),
            Err(refused) => {
                tracing::warn!(pid = who.pid, field = refused.field, "hello refused");
                let _ = link.send(&FromOwner::Refused { refused }, Vec::new());
                link.flush();
            }
        }
    }

    /// Checks a hello field by field. No descriptor has been sent until it is good.
    fn check_hello(&self, link: &mut Link, who: Credentials, frame: &[u8]) -> Result<Admitted, Refusal> {
        let own = rustix::process::geteuid().as_raw();
        if who.uid != own {
            return Err(refusal("user", own, who.uid));
        }
        let shape = || refusal("hello", format!("a hello of protocol {PROTOCOL}"), "another shape");
        // The protocol comes first: a hello of another one may have another shape.
        let value: serde_json::Value = serde_json::from_slice(frame).map_err(|_| shape())?;
        match value.get("protocol").and_then(serde_json::Value::as_u64) {
            Some(found) if found == u64::from(PROTOCOL) => {}
            Some(found) => return Err(refusal("protocol", PROTOCOL, found)),
            None => return Err(shape()),
        }
        let hello: Hello = serde_json::from_value(value).map_err(|_| shape())?;
        if hello.layout != LAYOUT {
            return Err(refusal("layout", format!("{LAYOUT:#x}"), format!("{:#x}", hello.layout)));
        }
        if !same_key(hello.key.as_bytes(), self.key.as_bytes()) {
            return Err(refusal("key", "the key of this owner (MILLPOND_KEY)", "another"));
        }
        let sent = self.sent_pidfd(link, &hello, who)?;
        if hello.role == Role::Observer {
            if self.observers.len() >= MAX_OBSERVERS {
                return Err(refusal("clients", format!("at most {MAX_OBSERVERS} observers"), format!("{MAX_OBSERVERS} are attached")));
            }
            return Ok(Admitted::Observer);
        }
        let parent = self.clients.iter().flatten().find(|client| client.role == Role::Parent && client.is_present());
        if let (Role::Parent, Some(parent)) = (hello.role, parent) {
            return Err(refusal("role", format!("worker or observer: process {} is the parent", parent.pid), "parent"));
        }
        let Some(slot) = self.free_slot() else {
            let orphaned = self.clients.iter().flatten().filter(|client| client.buried).count();
            let found = format!("{} are attached, {orphaned} are dead but what they made is still read", MAX_CLIENTS - orphaned);
            return Err(refusal("clients", format!("at most {MAX_CLIENTS} clients"), found));
        };
        let pidfd = match process::peer_pidfd(link.socket()).or(sent) {
            Some(pidfd) => pidfd,
            None => process::pidfd_of(who.pid)
                .map_err(|error| refusal("pidfd", "a process that lives and is visible here", format!("process {}: {error}", who.pid)))?,
        };
        Ok(Admitted::Client { slot, hello: Box::new(hello), pidfd })
    }

    /// The descriptor that came with a hello, if it is what it should be.
    fn sent_pidfd(&self, link: &mut Link, hello: &Hello, who: Credentials) -> Result<Option<OwnedFd>, Refusal> {
        let wrong = |found: String| refusal("pidfd", format!("at most one descriptor, a pidfd of process {}", who.pid), found);
        if hello.fds > 1 {
            return Err(wrong(format!("{} descriptors", hello.fds)));
        }
        let sent = match link.take_fds(hello.fds) {
            Ok(sent) => sent,
            // There are other ways to have one, and the last of them says why there is none.
            Err(error @ FrameError::Lost { .. }) => {
                tracing::warn!(pid = who.pid, %error, "the pidfd of a hello");
                return Ok(None);
            }
            Err(error) => return Err(wrong(error.to_string())),
        };
        let Some(fd) = sent.into_iter().next() else { return Ok(None) };
        match process::process_of(&fd) {
            None => Err(wrong("another kind of file".to_owned())),
            Some(pid) if pid != 0 && who.pid != 0 && pid != who.pid => Err(wrong(format!("a pidfd of process {pid}"))),
            Some(_) => Ok(Some(fd)),
        }
    }

    fn welcome_observer(&mut self, mut link: Link, who: Credentials) {
        let welcome = self.welcome_of(u32::MAX, 0, &[]);
        if let Err(error) = self.send_welcome(&mut link, welcome) {
            return tracing::warn!(pid = who.pid, %error, "no welcome sent");
        }
        self.connections += 1;
        tracing::debug!(pid = who.pid, "observer attached");
        link.set_backlog(true);
        self.observers.insert(self.connections, link);
    }

    fn welcome_client(&mut self, mut link: Link, who: Credentials, slot: u32, hello: Hello, pidfd: OwnedFd) {
        // Whatever still names this slot means a client that is gone.
        self.end_holds(slot);
        self.serials += 1;
        // Before its timelines go on: who still looks at the last client's sees by the serial that they are another's.
        rows::write_coming(&self.control, slot, self.serials);
        rows::prepare_slot(&self.control, slot, self.estate.devices.len(), crate::control::now_ms());
        self.raise_timelines(slot);
        let windows = self.estate.open_windows(slot, hello.limit);
        let welcome = self.welcome_of(slot, self.serials, &windows);
        if let Err(error) = self.send_welcome(&mut link, welcome) {
            self.estate.close_windows(slot);
            return tracing::warn!(pid = who.pid, %error, "no welcome sent");
        }
        self.last_slot = slot;
        link.set_frame_limit(FRAME_LIMIT);
        // Frames may have come right behind the hello.
        link.set_backlog(true);
        let pid = if who.pid == 0 { hello.pid } else { who.pid };
        let client = Client {
            slot,
            serial: self.serials,
            name: hello.name.chars().filter(|c| !c.is_control()).take(NAME_LIMIT).collect(),
            role: hello.role,
            pid,
            // A number that is another namespace's, or not that of the `/proc` here, means another process there, or none.
            start_time: process::stat(who.pid).filter(|_| process::process_of(&pidfd) == Some(who.pid)).map_or(0, |stat| stat.start_time),
            windows,
            link,
            pidfd,
            asked: HashMap::new(),
            calls_kept: 0,
            socket_ended: false,
            process_ended: false,
            detached: false,
            stopped: false,
            faulted: false,
            policy: None,
            cause: None,
            listens: false,
            buried: false,
        };
        let (python, torch) = (hello.python.as_deref().unwrap_or("-"), hello.torch.as_deref().unwrap_or("-"));
        tracing::info!(client = slot, name = client.name, pid, library = hello.library, python, torch, "client attached");
        rows::write_client(&self.control, &client, ClientState::Alive);
        if let Some(place) = self.clients.get_mut(slot as usize) {
            *place = Some(client);
        }
        self.match_channels();
    }

    fn send_welcome(&self, link: &mut Link, welcome: Welcome) -> Result<(), Fault> {
        let control = Self::duplicates([self.control.fd()]).map_err(FrameError::from)?;
        link.send(&FromOwner::Welcome { welcome }, control)
    }

    fn welcome_of(&self, client: u32, serial: u64, windows: &[u32]) -> Welcome {
        let grant = |(index, books): (u32, &super::estate::Device)| DeviceGrant {
            device: books.served.info.id.to_string(),
            index,
            name: books.served.info.name.clone(),
            total: books.served.info.total_bytes,
            limit: books.served.limit,
            granularity: books.served.info.granularity,
            chunk_bytes: books.served.chunk_bytes,
            window: windows.get(index as usize).copied().unwrap_or(u32::MAX),
            window_bytes: books.served.window_bytes,
            handle_kind: self.config.handle_kind.name().to_owned(),
        };
        let devices = (0..).zip(&self.estate.devices).map(grant).collect();
        let (owner_pid, pid_namespace) = (std::process::id(), process::pid_namespace());
        Welcome { client, serial, token: self.token_text(), owner_pid, pid_namespace, devices, fds: 1 }
    }

    /// A free slot, the one that was used longest ago: late readers of a dead client's timelines still find it poisoned.
    fn free_slot(&self) -> Option<u32> {
        let slots = (1..=MAX_CLIENTS as u32).map(|step| (self.last_slot + step) % MAX_CLIENTS as u32);
        slots.into_iter().find(|slot| self.client(*slot).is_none())
    }

    /// Lifts a slot's timelines over every DONE of its last client that holds still name, so that none of them is waited for.
    fn raise_timelines(&mut self, slot: u32) {
        let timelines = crate::control::TIMELINES_PER_CLIENT as u32;
        for timeline in slot * timelines..(slot + 1) * timelines {
            let Some(value) = self.named_values.remove(&timeline) else { continue };
            let Some(word) = self.control.timeline(timeline) else { continue };
            // A value far off is nobody's: it would bring the new client's timeline near the poison.
            if value.saturating_sub(word.value()) < 1 << 32 {
                word.store(value);
            }
        }
    }
}

fn refusal(field: &str, expected: impl ToString, found: impl ToString) -> Refusal {
    Refusal { field: field.to_owned(), expected: expected.to_string(), found: found.to_string() }
}

/// Whether two keys are the same, in a time that does not tell how much of them is.
fn same_key(found: &[u8], expected: &[u8]) -> bool {
    found.len() == expected.len() && found.iter().zip(expected).fold(0, |all, (a, b)| all | (a ^ b)) == 0
}
