//! One turn of the loop: wait, serve what is ready, look at what time has done, write rows, send.

use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{poll, PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::{accept_with, SocketFlags};

use super::link::Link;
use super::{process, rows, Ended, Greeting, Owner, OwnerError};

/// Frames that one connection may have served in one turn.
pub(super) const FRAMES_A_TURN: usize = 64;
/// The most connections that have not said hello; the oldest goes first.
const GREETINGS: usize = 256;
/// The longest hello, in bytes.
const HELLO_LIMIT: u64 = 64 << 10;
/// How soon a stalled send or a full file table is tried again.
const RETRY: Duration = Duration::from_millis(10);

/// What can become ready.
#[derive(Debug, Clone, Copy)]
enum Source {
    Stop,
    Listener,
    Greeting(u64),
    Observer(u64),
    Client(u32),
    Process(u32),
    Parent,
}

pub(super) fn timespec(left: Duration) -> Timespec {
    // Rounded up: waking early would only mean another turn.
    Timespec { tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX), tv_nsec: i64::from(left.subsec_nanos()) }
}

impl Owner {
    pub(super) fn turn(&mut self) -> Result<(), OwnerError> {
        for source in self.wait()? {
            match source {
                Source::Stop => self.ended = Some(Ended::Stopped),
                Source::Parent => self.ended = Some(Ended::ParentEnded),
                Source::Listener => self.accept_connections(),
                Source::Greeting(id) => self.read_greeting(id),
                Source::Observer(id) => self.read_observer(id),
                Source::Client(slot) => self.read_client(slot),
                Source::Process(slot) => self.process_ended(slot),
            }
        }
        self.bury_the_dead();
        let now = Instant::now();
        self.expire_greetings(now);
        self.look_at_beats(now);
        self.look_at_orphans(now);
        self.look_at_grows(now);
        self.estate.expire_spares(now);
        self.look_at_channels(now);
        self.flush_rows();
        self.flush_links();
        Ok(())
    }

    /// Waits until something is ready or due. Processes come after sockets: what the dead said last is heard first.
    fn wait(&self) -> Result<Vec<Source>, OwnerError> {
        let mut sources = Vec::new();
        let mut fds = Vec::new();
        let mut backlog = false;
        let mut add = |source, fd, flags| {
            sources.push((source, flags));
            fds.push(PollFd::from_borrowed_fd(fd, flags));
        };
        let both = |out: bool| if out { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN };
        add(Source::Stop, self.stop.as_fd(), PollFlags::IN);
        for stop in &self.stops {
            add(Source::Stop, stop.as_fd(), PollFlags::IN);
        }
        if self.listen_after.is_none() {
            add(Source::Listener, self.listener.as_fd(), PollFlags::IN);
        }
        for (id, greeting) in &self.greetings {
            add(Source::Greeting(*id), greeting.link.socket(), PollFlags::IN);
        }
        for (id, link) in &self.observers {
            backlog |= link.backlog();
            add(Source::Observer(*id), link.socket(), both(link.wants_out()));
        }
        let clients = || self.clients.iter().flatten().filter(|client| !client.buried);
        for client in clients().filter(|client| !client.socket_ended) {
            backlog |= client.link.backlog();
            // Of a connection that was cut only the end is of interest, and that is always reported.
            let flags = if client.link.is_cut() { PollFlags::empty() } else { both(client.link.wants_out()) };
            add(Source::Client(client.slot), client.link.socket(), flags);
        }
        for client in clients().filter(|client| !client.process_ended) {
            add(Source::Process(client.slot), client.pidfd.as_fd(), PollFlags::IN);
        }
        if let Some(parent) = &self.parent {
            add(Source::Parent, parent.as_fd(), PollFlags::IN);
        }
        let timeout = if backlog { Some(Duration::ZERO) } else { self.due().map(|at| at.saturating_duration_since(Instant::now())) };
        match poll(&mut fds, timeout.map(timespec).as_ref()) {
            Ok(_) => {}
            Err(Errno::INTR) => return Ok(Vec::new()),
            Err(error) => return Err(OwnerError::System { call: "poll", error }),
        }
        let has_backlog = |source| match source {
            Source::Client(slot) => self.client(slot).is_some_and(|client| client.link.backlog()),
            Source::Observer(id) => self.observers.get(&id).is_some_and(Link::backlog),
            _ => false,
        };
        let ready = fds.iter().zip(sources).filter(|(fd, (source, _))| !fd.revents().is_empty() || has_backlog(*source));
        Ok(ready.map(|(_, (source, _))| source).collect())
    }

    /// When time alone makes a turn necessary.
    fn due(&self) -> Option<Instant> {
        let mut due: Option<Instant> = self.listen_after;
        let mut at = |time: Option<Instant>| {
            if let Some(time) = time {
                due = Some(due.map_or(time, |due| due.min(time)));
            }
        };
        self.greetings.values().for_each(|greeting| at(Some(greeting.deadline)));
        if self.clients.iter().flatten().any(|client| client.is_present()) {
            at(Some(self.next_beats));
        }
        at(self.orphans_due());
        at(self.grows_due());
        at(self.estate.spares_due());
        at(self.channels.iter().map(|pending| pending.deadline).min());
        let stalled = self.clients.iter().flatten().any(|client| client.link.is_stalled()) || self.observers.values().any(Link::is_stalled);
        at(stalled.then(|| Instant::now() + RETRY));
        due
    }

    fn accept_connections(&mut self) {
        loop {
            match accept_with(&self.listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
                Ok(socket) => self.greet(socket),
                Err(Errno::AGAIN) => return,
                Err(Errno::INTR | Errno::CONNABORTED) => {}
                Err(error) => {
                    // The file table is full: the listener would stay ready, and the loop would spin.
                    tracing::warn!(%error, "no connection accepted for a moment");
                    self.greetings.pop_first();
                    self.listen_after = Some(Instant::now() + RETRY);
                    return;
                }
            }
        }
    }

    fn greet(&mut self, socket: OwnedFd) {
        let credentials = match process::credentials(socket.as_fd()) {
            Ok(credentials) => credentials,
            Err(error) => return tracing::warn!(%error, "a connection without credentials"),
        };
        if self.greetings.len() >= GREETINGS {
            self.greetings.pop_first();
        }
        self.connections += 1;
        let link = Link::new(socket, HELLO_LIMIT, self.config.outbox_bytes);
        let deadline = Instant::now() + Duration::from_millis(self.config.hello_timeout_ms);
        self.greetings.insert(self.connections, Greeting { link, credentials, deadline });
        self.read_greeting(self.connections);
    }

    fn expire_greetings(&mut self, now: Instant) {
        if self.listen_after.is_some_and(|at| at <= now) {
            self.listen_after = None;
        }
        self.greetings.retain(|_, greeting| {
            let in_time = greeting.deadline > now;
            if !in_time {
                tracing::warn!(pid = greeting.credentials.pid, "connection closed: it said no hello in time");
            }
            in_time
        });
    }

    pub(super) fn flush_rows(&mut self) {
        rows::write_changes(&self.control, &mut self.estate);
    }

    /// Sends what sockets take.
    pub(super) fn flush_links(&mut self) {
        let clients = self.clients.iter_mut().flatten().map(|client| &mut client.link);
        clients.chain(self.observers.values_mut()).filter(|link| link.has_unsent()).for_each(Link::flush);
    }
}
