//! Channels between clients: the owner makes a pair of sockets when two clients ask for each other, and keeps neither end.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{socketpair, AddressFamily, SocketFlags, SocketType};

use super::calls::KEPT_CALLS;
use super::Owner;
use crate::wire::{Answer, Peer, Reason};

/// The longest that a request is kept: more is taken as this.
const LONGEST: Duration = Duration::from_secs(366 * 24 * 3600);

/// A request for a channel that waits for its other side.
#[derive(Debug)]
pub(super) struct Pending {
    slot: u32,
    call_id: u64,
    /// Whom it wants; `None`: whoever wants it.
    peer: Option<String>,
    /// The serial of the client that this name meant when it was last looked at.
    bound: Option<u64>,
    pub(super) deadline: Instant,
}

/// A client, and what it is given of a channel.
type End = (Peer, Vec<OwnedFd>);

impl Owner {
    pub(super) fn accept(&mut self, slot: u32, call_id: u64, timeout_ms: u64) {
        self.keep_channel(slot, call_id, None, timeout_ms);
    }

    pub(super) fn connect(&mut self, slot: u32, call_id: u64, peer: String, timeout_ms: u64) {
        if self.client(slot).is_some_and(|client| client.is_called(&peer) && self.meant(slot, &peer).is_none()) {
            return self.refuse(slot, call_id, Reason::InvalidArgument, "a channel to itself");
        }
        self.keep_channel(slot, call_id, Some(peer), timeout_ms);
    }

    fn keep_channel(&mut self, slot: u32, call_id: u64, peer: Option<String>, timeout_ms: u64) {
        let Some(client) = self.client_mut(slot) else { return };
        if client.calls_kept >= KEPT_CALLS {
            return self.refuse(slot, call_id, Reason::Refused, format!("{KEPT_CALLS} requests of this client are waiting"));
        }
        client.calls_kept += 1;
        let deadline = Instant::now() + Duration::from_millis(timeout_ms).min(LONGEST);
        self.channels.push(Pending { slot, call_id, peer, bound: None, deadline });
        self.match_channels();
    }

    /// The client that a name means to another one.
    fn meant(&self, asker: u32, peer: &str) -> Option<u64> {
        let mut others = self.clients.iter().flatten().filter(|client| client.slot != asker && client.is_present());
        others.find(|client| client.is_called(peer)).map(|client| client.serial)
    }

    /// Joins every two requests that ask for each other, oldest first.
    pub(super) fn match_channels(&mut self) {
        for at in 0..self.channels.len() {
            if let Some(Pending { slot, peer: Some(peer), bound: None, .. }) = self.channels.get(at) {
                let bound = self.meant(*slot, peer);
                if let Some(pending) = self.channels.get_mut(at) {
                    pending.bound = bound;
                }
            }
        }
        while let Some((first, second)) = self.next_match() {
            // The later one goes first, so that the earlier one's place stays the same.
            let later = self.channels.remove(first.max(second));
            let earlier = self.channels.remove(first.min(second));
            self.join(&earlier, &later);
        }
    }

    fn next_match(&self) -> Option<(usize, usize)> {
        let wants = |a: &Pending, b: &Pending| match (&a.peer, self.client(b.slot)) {
            (Some(peer), Some(other)) => a.slot != b.slot && other.is_called(peer),
            _ => false,
        };
        let joined = |a: &Pending, b: &Pending| wants(a, b) && (b.peer.is_none() || wants(b, a));
        self.channels.iter().enumerate().find_map(|(at, pending)| {
            let other = self.channels.iter().position(|other| joined(pending, other))?;
            Some((at, other))
        })
    }

    fn join(&mut self, a: &Pending, b: &Pending) {
        self.call_over(a.slot);
        self.call_over(b.slot);
        match self.ends(a.slot, b.slot) {
            Ok(((peer_a, fds_a), (peer_b, fds_b))) => {
                self.answer(a.slot, a.call_id, Answer::Channel { peer: peer_b }, fds_a);
                self.answer(b.slot, b.call_id, Answer::Channel { peer: peer_a }, fds_b);
            }
            Err(error) => {
                let message = format!("no channel: {error}");
                self.refuse(a.slot, a.call_id, Reason::Internal, message.clone());
                self.refuse(b.slot, b.call_id, Reason::Internal, message);
            }
        }
    }

    /// Two clients, and for each its end of a new channel and a pidfd of the other.
    fn ends(&self, a: u32, b: u32) -> Result<(End, End), Errno> {
        let (a, b) = self.client(a).zip(self.client(b)).ok_or(Errno::SRCH)?;
        let (end_a, end_b) = socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
        let (mut fds_a, mut fds_b) = (vec![end_a], vec![end_b]);
        fds_a.extend(Self::duplicates([&b.pidfd])?);
        fds_b.extend(Self::duplicates([&a.pidfd])?);
        Ok(((a.peer(), fds_a), (b.peer(), fds_b)))
    }

    /// Answers requests whose time is up.
    pub(super) fn look_at_channels(&mut self, now: Instant) {
        if self.channels.iter().all(|pending| pending.deadline > now) {
            return;
        }
        let (over, kept) = std::mem::take(&mut self.channels).into_iter().partition(|pending| pending.deadline <= now);
        self.channels = kept;
        let over: Vec<Pending> = over;
        for pending in over {
            let message = match &pending.peer {
                None => "no client asked for a channel in time".to_owned(),
                Some(peer) if pending.bound.is_none() => format!("no client called {peer:?} attached in time"),
                Some(peer) => format!("{peer:?} is attached, but did not take the channel in time"),
            };
            self.call_over(pending.slot);
            self.refuse(pending.slot, pending.call_id, Reason::Timeout, message);
        }
    }

    /// Drops a client's own requests.
    pub(super) fn forget_channels(&mut self, slot: u32) {
        self.channels.retain(|pending| pending.slot != slot);
    }

    /// Answers those who wait for a client that is gone.
    pub(super) fn end_channels_to(&mut self, serial: u64) {
        let (over, kept) = std::mem::take(&mut self.channels).into_iter().partition(|pending| pending.bound == Some(serial));
        self.channels = kept;
        let over: Vec<Pending> = over;
        for pending in over {
            self.call_over(pending.slot);
            let peer = pending.peer.unwrap_or_default();
            self.refuse(pending.slot, pending.call_id, Reason::PeerDied, format!("{peer:?} ended before it took the channel"));
        }
    }
}
