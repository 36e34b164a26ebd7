//! After the owner's death: those that are left look after each other.
//!
//! Nobody poisons a dead client's timelines any more, and nobody ends its holds. So every client watches the processes of the
//! others, and when one ends, poisons what it left: a waiter on its timelines is released, a block that it held comes back. A
//! process that has forked may end while its GPU work goes on for its child (facts/driver.md, "Death"): its late signals would
//! lift a poison, so that is stored again and again.

use std::os::fd::OwnedFd;
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use rustix::event::{poll, PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::pipe::{pipe_with, PipeFlags};
use rustix::process::{pidfd_open, Pid, PidfdFlags};

use super::link::{Link, Notice};
use super::record;
use super::Client;
use crate::control::{ClientRow, MAX_CLIENTS};
use crate::wire::Peer;

/// The owner is gone, or this client was cut off.
#[derive(Debug)]
pub(super) enum Wake {
    /// Not known yet which: looked at again at a time, and after a while.
    Doubt(Instant, Duration),
    /// Gone.
    Alone {
        /// (slot, pidfd; `None` once it has ended).
        others: Vec<(u32, Option<OwnedFd>)>,
        /// Who tells of their ends.
        _watcher: Option<Watcher>,
    },
}

/// The longest between two looks whether there is an owner.
const LONGEST_DOUBT: Duration = Duration::from_secs(5);

impl Client {
    /// The connection to the owner has ended.
    pub(super) fn owner_died(&self) {
        tracing::warn!("the owner has ended: this process goes on with the memory that it has");
        *self.wake.lock() = Some(Wake::Doubt(Instant::now(), Duration::from_millis(10)));
        self.attend_wake();
    }

    /// What is to be done without an owner. True where there is none.
    pub(super) fn attend_wake(&self) -> bool {
        let mut wake = self.wake.lock();
        match &mut *wake {
            None => return false,
            Some(Wake::Doubt(at, pause)) if *at <= Instant::now() => {
                if Link::nobody_at(&self.socket) {
                    let others = self.others();
                    let watcher = self.shared.link.notices().and_then(|notices| Watcher::start(&others, notices.clone()));
                    *wake = Some(Wake::Alone { others, _watcher: watcher });
                } else {
                    (*at, *pause) = (Instant::now() + *pause, (*pause * 2).min(LONGEST_DOUBT));
                }
            }
            Some(_) => {}
        }
        if let Some(Wake::Alone { others, .. }) = &mut *wake {
            for (slot, pidfd) in others {
                if pidfd.as_ref().is_some_and(has_ended) {
                    tracing::info!(client = *slot, "a peer has ended, and there is no owner: it is buried here");
                    *pidfd = None;
                    self.mourn(*slot, true);
                } else if pidfd.is_none() {
                    self.mourn(*slot, false);
                }
            }
        }
        true
    }

    /// Releases those who wait for a dead client.
    fn mourn(&self, slot: u32, first: bool) {
        self.shared.control.poison(slot);
        self.shared.leases.end_holds_of(slot);
        if first {
            if let Some(row) = self.shared.control.client(slot).and_then(|cell| cell.read()) {
                let peer = Peer { client: slot, serial: row.serial, name: String::new(), pid: 0 };
                record::died(&peer);
                self.imports.died(&peer, None);
                self.office.died(&peer);
            }
        }
    }

    /// The other clients that live, as the control memory has them.
    fn others(&self) -> Vec<(u32, Option<OwnedFd>)> {
        let mut pidfds = self.pidfds.lock();
        let mut others = Vec::new();
        for slot in (0..MAX_CLIENTS as u32).filter(|slot| *slot != self.shared.me) {
            let Some(row) = self.shared.control.client(slot).and_then(|cell| cell.read()) else { continue };
            if row.is_dead() {
                continue;
            }
            let pidfd = pidfds.remove(&row.serial).or_else(|| pidfd_of(&row));
            if pidfd.is_none() {
                self.mourn(slot, true);
            }
            others.push((slot, pidfd));
        }
        others
    }
}

/// A thread that says at once when one of the others has ended; a tick says it too, later. It ends with the last of them, or
/// when this is dropped.
#[derive(Debug)]
pub(super) struct Watcher {
    /// The other end of what the thread looks at.
    _until: OwnedFd,
}

impl Watcher {
    /// `None` where the system has no descriptor or thread to spare: then the ticks are all there is.
    fn start(others: &[(u32, Option<OwnedFd>)], notices: Sender<Notice>) -> Option<Self> {
        let (end, mine) = pipe_with(PipeFlags::CLOEXEC).ok()?;
        let living = others.iter().filter_map(|(_, pidfd)| pidfd.as_ref()?.try_clone().ok()).collect();
        let watch = move || watch(living, &end, &notices);
        std::thread::Builder::new().name("millpond-wake".to_owned()).stack_size(256 << 10).spawn(watch).ok()?;
        Some(Self { _until: mine })
    }
}

fn watch(mut living: Vec<OwnedFd>, end: &OwnedFd, notices: &Sender<Notice>) {
    while !living.is_empty() {
        let mut fds: Vec<PollFd<'_>> = living.iter().map(|pidfd| PollFd::new(pidfd, PollFlags::IN)).collect();
        fds.push(PollFd::new(end, PollFlags::IN));
        match poll(&mut fds, None) {
            Ok(_) => {}
            Err(Errno::INTR) => continue,
            Err(_) => return,
        }
        let ended: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        if ended.last() == Some(&true) || notices.send(Notice::PeerEnded).is_err() {
            return;
        }
        let mut ended = ended.into_iter();
        living.retain(|_| ended.next() == Some(false));
    }
}

/// A pidfd of the process that a row names; `None` where it is gone. One that cannot be seen from here counts as gone too: there
/// is nobody who could say that it is not.
fn pidfd_of(row: &ClientRow) -> Option<OwnedFd> {
    let pid = i32::try_from(row.pid).ok().and_then(Pid::from_raw)?;
    let pidfd = match pidfd_open(pid, PidfdFlags::empty()) {
        Ok(pidfd) => pidfd,
        Err(error) => {
            if error != Errno::SRCH {
                tracing::warn!(pid = row.pid, %error, "a peer cannot be watched");
            }
            return None;
        }
    };
    // Its id may be another's by now.
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", row.pid)).ok()?;
    let (_, fields) = stat.rsplit_once(')')?;
    let started: u64 = fields.split_ascii_whitespace().nth(19)?.parse().ok()?;
    // Zero: the number is that of a process in another namespace, and here some other's.
    (started == row.start_time).then_some(pidfd)
}

fn has_ended(pidfd: &OwnedFd) -> bool {
    let mut fds = [PollFd::new(pidfd, PollFlags::IN)];
    poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).is_ok_and(|ready| ready > 0)
}
