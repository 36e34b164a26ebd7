//! Killing by policy: a client that stays stopped, a call that does not obey its cancel. Only by the parent's word, only a client of
//! this owner, only by the pidfd that the owner took when that client attached: never by a number, which may be another's.

use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::process::{pidfd_send_signal, Signal};

use super::{process, Owner};
use crate::control::Cause;
use crate::wire::{Answer, Reason, Role};

/// The shortest time that a policy can name: a shorter one could not be told from a slow machine.
const SHORTEST: Duration = Duration::from_millis(100);

/// A client whose beat is no older is not stopped.
const BEATING: Duration = Duration::from_millis(500);

/// What a parent wants done with a client.
#[derive(Debug, Clone, Copy)]
pub(super) struct Policy {
    /// Whose policy it is: a parent's serial.
    by: u64,
    /// How long the client may be stopped.
    after: Duration,
    /// Since when it is seen stopped without a break, while its parent is not.
    since: Option<Instant>,
}

impl Owner {
    /// The parent says what is done with a client that stops: `None`, it is only reported.
    pub(super) fn set_policy(&mut self, slot: u32, call_id: u64, (client, serial): (u32, u64), after_ms: Option<u64>) {
        let after = after_ms.map(Duration::from_millis);
        if let Some(after) = after.filter(|after| *after < SHORTEST) {
            let message = format!("a client would be killed after {after:?}: the least is {SHORTEST:?}");
            return self.refuse(slot, call_id, Reason::InvalidArgument, message);
        }
        let by = match self.may_end(slot, client, serial) {
            Ok(by) => by,
            Err((reason, message)) => return self.refuse(slot, call_id, reason, message),
        };
        if let Some(client) = self.client_mut(client) {
            client.policy = after.map(|after| Policy { by, after, since: None });
        }
        self.next_beats = Instant::now();
        self.answer(slot, call_id, Answer::Done, Vec::new());
    }

    /// The parent wants a client killed, whose call did not obey its cancel.
    pub(super) fn kill_for_call(&mut self, slot: u32, call_id: u64, (client, serial): (u32, u64), waited_ms: u64) {
        match self.may_end(slot, client, serial) {
            Err((reason, message)) => self.refuse(slot, call_id, reason, message),
            Ok(_) => match self.kill(client, Cause::Call { ms: waited_ms }) {
                Ok(()) => self.answer(slot, call_id, Answer::Done, Vec::new()),
                Err(error) => self.refuse(slot, call_id, Reason::Internal, format!("it could not be killed: {error}")),
            },
        }
    }

    /// Whether a client is the parent, and the other a client of this owner that it may end: the parent's serial.
    fn may_end(&self, slot: u32, client: u32, serial: u64) -> Result<u64, (Reason, String)> {
        let parent = self.client(slot).filter(|client| client.role == Role::Parent);
        let Some(parent) = parent else {
            return Err((Reason::Refused, "only a parent says who is killed, and only of its workers".to_owned()));
        };
        match self.client(client) {
            Some(found) if found.serial == serial && !found.buried => {}
            _ => return Err((Reason::PeerDied, format!("client {client} (serial {serial}) is gone"))),
        }
        if client == slot {
            return Err((Reason::InvalidArgument, "a parent is not killed by its own policy".to_owned()));
        }
        Ok(parent.serial)
    }

    /// Kills a client. Its row says why before the signal is sent.
    fn kill(&mut self, slot: u32, cause: Cause) -> Result<(), Errno> {
        let Some(client) = self.client_mut(slot).filter(|client| !client.process_ended && client.cause.is_none()) else { return Ok(()) };
        client.cause = Some(cause);
        tracing::warn!(client = slot, name = client.name, pid = client.pid, "{cause}");
        self.state_changed(slot);
        let Some(client) = self.client_mut(slot) else { return Ok(()) };
        match pidfd_send_signal(&client.pidfd, Signal::KILL) {
            // It had ended by itself just before.
            Ok(()) | Err(Errno::SRCH) => Ok(()),
            Err(error) => {
                tracing::error!(client = slot, name = client.name, pid = client.pid, %error, "not killed");
                client.cause = None;
                client.policy = None;
                self.state_changed(slot);
                Err(error)
            }
        }
    }

    /// How often clients must be looked at for the policies that there are.
    pub(super) fn policies_every(&self) -> Option<Duration> {
        let policies = self.clients.iter().flatten().filter(|client| !client.process_ended).filter_map(|client| client.policy);
        policies.map(|policy| (policy.after / 4).max(SHORTEST / 10)).min()
    }

    /// Kills who has been stopped for too long.
    pub(super) fn look_at_stopped(&mut self, now: Instant, now_ms: u64) {
        for slot in super::rows::slots() {
            let Some(client) = self.client(slot).filter(|client| !client.process_ended && client.cause.is_none()) else { continue };
            let Some(policy) = client.policy else { continue };
            let beat = self.control.beat(slot).map_or(0, |beat| beat.load(std::sync::atomic::Ordering::Relaxed));
            let quiet = Duration::from_millis(now_ms.saturating_sub(beat));
            // One that beats is not asked after.
            let beats = quiet < BEATING.min(policy.after / 4);
            let stopped = if beats { Some(false) } else { client.is_stopped_by_signal() };
            let since = match stopped {
                // The system's word. A starved machine makes nobody stopped, nor does a scribbled beat.
                Some(true) => policy.since.or(Some(now)),
                Some(false) => None,
                // Another container's: there is only its beat.
                None => (quiet >= policy.after.max(Duration::from_millis(self.config.stopped_after_ms)))
                    .then(|| policy.since.or(now.checked_sub(policy.after)))
                    .flatten(),
            };
            // Ctrl-Z stops a parent and its workers together: the worker's time begins when the parent goes on.
            let since = since.map(|since| if self.is_awake(policy.by) { since } else { now });
            if let Some(client) = self.client_mut(slot) {
                client.policy = Some(Policy { since, ..policy });
            }
            if since.is_some_and(|since| now.saturating_duration_since(since).min(quiet) >= policy.after) {
                let ms = u64::try_from(quiet.as_millis()).unwrap_or(u64::MAX);
                // Told of where it fails; there is nobody to be answered.
                let _ = self.kill(slot, Cause::Stopped { ms });
            }
        }
    }

    /// Whether the parent of this serial is there and is not stopped.
    fn is_awake(&self, serial: u64) -> bool {
        let parent = self.clients.iter().flatten().find(|client| client.serial == serial && client.is_present());
        parent.is_some_and(|parent| !parent.stopped && parent.is_stopped_by_signal() != Some(true))
    }
}

impl super::Client {
    /// Whether the system says that it is stopped; `None` where its process cannot be seen from here.
    pub(super) fn is_stopped_by_signal(&self) -> Option<bool> {
        let stat = process::stat(self.pid).filter(|stat| stat.start_time == self.start_time)?;
        Some(stat.is_stopped())
    }
}
