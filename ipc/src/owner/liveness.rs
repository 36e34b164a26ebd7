//! How clients are: beating, stopped, faulted, dying. Nobody is killed here: that is `policy`.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::{rows, Owner};

impl Owner {
    /// Looks at every client's beat, at most once in a while.
    pub(super) fn look_at_beats(&mut self, now: Instant) {
        if self.next_beats > now {
            return;
        }
        let (every, late) = (self.config.heartbeat_ms.max(10), self.config.stopped_after_ms);
        let pause = Duration::from_millis(every);
        self.next_beats = now + self.policies_every().map_or(pause, |policies| pause.min(policies));
        let now_ms = crate::control::now_ms();
        for slot in rows::slots() {
            let Some(client) = self.client(slot).filter(|client| client.is_present()) else { continue };
            let beat = self.control.beat(slot).map_or(0, |beat| beat.load(Ordering::Relaxed));
            let age = now_ms.saturating_sub(beat);
            // A late beat alone may be a starved machine; the system knows at once who was stopped.
            let stopped = age > late || age > 2 * every && client.is_stopped_by_signal() == Some(true);
            if stopped != client.stopped {
                let by_signal = stopped && client.is_stopped_by_signal() == Some(true);
                tracing::info!(client = slot, name = client.name, stopped, by_signal, age, "beat");
                if let Some(client) = self.client_mut(slot) {
                    client.stopped = stopped;
                }
                self.state_changed(slot);
            }
        }
        self.look_at_stopped(now, now_ms);
    }

    /// A client says that its context on a device is dead. What it made stays in quarantine until it ends; nobody waits for it. What
    /// it has on other devices may run on, and is over when that says so.
    pub(super) fn faulted(&mut self, slot: u32, device: u32, timelines: &[u32]) {
        let Some(client) = self.client_mut(slot) else { return };
        client.faulted = true;
        tracing::warn!(client = slot, name = client.name, pid = client.pid, device, "the client's context is dead");
        if let Err(not_its_own) = self.control.poison_some(slot, timelines) {
            tracing::warn!(client = slot, timeline = not_its_own, "a timeline that is not the client's own was left as it is");
        }
        self.note_change();
        self.wake_orphans();
        self.state_changed(slot);
    }

    /// Nobody holds the other end of a client's socket any more.
    pub(super) fn socket_ended(&mut self, slot: u32) {
        let Some(client) = self.client_mut(slot) else { return };
        client.socket_ended = true;
        client.link.set_backlog(false);
        tracing::debug!(client = slot, name = client.name, detached = client.detached, "socket ended");
        self.forget_calls(slot);
        self.consider_burial(slot);
    }

    /// A client's process has ended. Its forked children may still hold its memory, and its socket.
    pub(super) fn process_ended(&mut self, slot: u32) {
        // What it said last was read before, as far as one turn goes; the rest no longer matters.
        let Some(client) = self.client_mut(slot) else { return };
        client.process_ended = true;
        if !client.socket_ended {
            client.link.cut();
        }
        tracing::debug!(client = slot, name = client.name, pid = client.pid, "process ended");
        self.forget_calls(slot);
        self.consider_burial(slot);
    }

    /// Sees to a client's burial if both of its ends are seen, or if it left in good order with nothing in its hands.
    fn consider_burial(&mut self, slot: u32) {
        let Some(client) = self.client(slot).filter(|client| !client.buried) else { return };
        let both = client.socket_ended && client.process_ended;
        let left = client.socket_ended && client.detached && !self.estate.has_stake(slot);
        if both || left {
            self.release_waiters(slot);
        } else {
            self.state_changed(slot);
        }
    }

    /// Drops what a client asked and nobody can be answered any more; those who wait for it learn that.
    pub(super) fn forget_calls(&mut self, slot: u32) {
        self.forget_grows(slot);
        self.forget_channels(slot);
        let Some(client) = self.client_mut(slot) else { return };
        client.calls_kept = 0;
        let serial = client.serial;
        self.end_channels_to(serial);
        self.serve_all_grows(Instant::now());
    }

    /// Writes a client's state.
    pub(super) fn state_changed(&self, slot: u32) {
        if let Some(client) = self.client(slot) {
            rows::write_client(&self.control, client, client.state());
        }
    }
}
