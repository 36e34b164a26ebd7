//! After the owner's death: those that are left look after each other.
//!
//! Nobody poisons a dead client's timelines any more, and nobody ends its holds. So every client watches the processes of the
//! others, and when one ends, poisons what it left: a waiter on its timelines is released, a block that it held comes back. Of one that
//! cannot be watched from here nothing is known, so nothing of it is touched.
//!
//! A process that has forked may end while its GPU work goes on for its child (facts/driver.md, "Death"). Such a child has its parent's ends
//! of the channels too: until they have ended, who has the other ones waits. Who has none does not, and late signals would lift its poison,
//! so that is stored again and again.

use std::os::fd::OwnedFd;
use std::sync::mpsc::Sender;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{poll, PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::pipe::{pipe_with, PipeFlags};

use super::link::{Link, Notice};
use super::record;
use super::Client;
use crate::control::{ClientRow, MAX_CLIENTS};
use crate::owner::process;
use crate::wire::Peer;

/// The owner is gone, or this client was cut off.
#[derive(Debug)]
pub(super) enum Wake {
    /// Not known yet which: looked at again at a time, and after a while.
    Doubt(Instant, Duration),
    /// Gone.
    Alone {
        /// Who was attached when it went.
        others: Vec<Other>,
        /// Who tells of their ends.
        _watcher: Option<Watcher>,
    },
}

/// Another client, where there is no owner.
#[derive(Debug)]
pub(super) struct Other {
    slot: u32,
    serial: u64,
    life: Life,
}

/// What is known of a client's process.
#[derive(Debug)]
enum Life {
    /// Nothing: its number is another PID namespace's, or the system does not tell. It may become known.
    Unknown,
    /// It has not ended when this does not say so.
    Watched(Arc<OwnedFd>),
    /// It has ended. A child that it forked may be left.
    Ended,
    /// Nothing of it is left, as far as can be seen.
    Buried,
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
            others.iter_mut().for_each(|other| self.look_at(other));
        }
        true
    }

    fn look_at(&self, other: &mut Other) {
        if matches!(other.life, Life::Unknown) {
            other.life = self.life_of(other.slot, other.serial);
        }
        if matches!(&other.life, Life::Watched(pidfd) if has_ended(pidfd)) {
            other.life = Life::Ended;
        }
        if matches!(other.life, Life::Ended) && !self.office.is_held(other.serial) {
            tracing::info!(client = other.slot, "a peer has ended, and there is no owner: it is buried here");
            other.life = Life::Buried;
            self.mourn(other.slot);
            let peer = Peer { client: other.slot, serial: other.serial, name: String::new(), pid: 0 };
            record::died(&peer);
            self.imports.died(&peer, None);
            self.office.died(&peer);
        } else if matches!(other.life, Life::Buried) {
            self.mourn(other.slot);
        }
    }

    /// Releases those who wait for a dead client.
    fn mourn(&self, slot: u32) {
        self.shared.control.poison(slot);
        self.shared.leases.end_holds_of(slot);
    }

    /// The other clients that live, as the control memory has them.
    fn others(&self) -> Vec<Other> {
        let slots = (0..MAX_CLIENTS as u32).filter(|slot| *slot != self.shared.me);
        let rows = slots.filter_map(|slot| Some((slot, self.shared.control.client(slot)?.read()?)));
        let living = rows.filter(|(_, row)| !row.is_dead());
        let other = |(slot, row): (u32, ClientRow)| {
            let life = self.life_of(slot, row.serial);
            if matches!(life, Life::Unknown) {
                tracing::warn!(client = slot, pid = row.pid, "a peer cannot be watched: what it holds of ours it keeps");
            }
            Other { slot, serial: row.serial, life }
        };
        living.map(other).collect()
    }

    fn life_of(&self, slot: u32, serial: u64) -> Life {
        if let Some(pidfd) = self.office.pidfd(serial) {
            return Life::Watched(pidfd);
        }
        // The owner's numbers are good where it was itself.
        let here = self.welcome.pid_namespace.is_some_and(|owners| process::pid_namespace() == Some(owners));
        let row = self.shared.control.row_of(slot, serial).filter(|_| here);
        row.map_or(Life::Unknown, |row| find(&row))
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
    fn start(others: &[Other], notices: Sender<Notice>) -> Option<Self> {
        let (end, mine) = pipe_with(PipeFlags::CLOEXEC).ok()?;
        let watched = others.iter().filter_map(|other| if let Life::Watched(pidfd) = &other.life { Some(pidfd.clone()) } else { None });
        let living = watched.collect();
        let watch = move || watch(living, &end, &notices);
        std::thread::Builder::new().name("millpond-wake".to_owned()).stack_size(256 << 10).spawn(watch).ok()?;
        Some(Self { _until: mine })
    }
}

fn watch(mut living: Vec<Arc<OwnedFd>>, end: &OwnedFd, notices: &Sender<Notice>) {
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

/// The process that a row names by its number here.
fn find(row: &ClientRow) -> Life {
    // Without the time of its start the number is another namespace's, or cannot be told from a later process's.
    let Some(pid) = u32::try_from(row.pid).ok().filter(|_| row.start_time != 0) else { return Life::Unknown };
    let pidfd = match process::pidfd_of(pid) {
        Ok(pidfd) => pidfd,
        Err(Errno::SRCH) => return Life::Ended,
        Err(_) => return Life::Unknown,
    };
    // The number may be a later process's by now. What is read is of the one that has the number still after that, if `/proc` is ours.
    let stat = process::stat(pid).filter(|_| process::process_of(&pidfd) == Some(pid));
    match stat {
        Some(stat) if stat.start_time == row.start_time => Life::Watched(Arc::new(pidfd)),
        Some(_) => Life::Ended,
        None => Life::Unknown,
    }
}

pub(super) fn has_ended(pidfd: &Arc<OwnedFd>) -> bool {
    let mut fds = [PollFd::new(pidfd, PollFlags::IN)];
    poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).is_ok_and(|ready| ready > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_known_is_not_dead() {
        let me = std::process::id();
        let start_time = process::stat(me).unwrap().start_time;
        let row = |pid: u32, start_time| ClientRow { pid: u64::from(pid), start_time, ..ClientRow::default() };
        assert!(matches!(find(&row(me, start_time)), Life::Watched(pidfd) if !has_ended(&pidfd)));
        assert!(matches!(find(&row(me, start_time + 1)), Life::Ended), "a later process has its number");
        assert!(matches!(find(&row(i32::MAX as u32, 1)), Life::Ended), "nobody has its number");
        assert!(matches!(find(&row(me, 0)), Life::Unknown), "another namespace's number");
    }
}
