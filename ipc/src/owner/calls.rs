//! Frames of clients and observers: each is one request, one answer to an ask, or the end of the connection.

use std::os::fd::OwnedFd;
use std::time::Instant;

use super::client::Asked;
use super::link::Fault;
use super::turn::FRAMES_A_TURN;
use super::Owner;
use crate::ledger::Ledger;
use crate::wire::{Answer, Ask, FrameError, FromClient, FromOwner, Holder, Reason, Request};

/// Requests of one client that may wait at a time.
pub(super) const KEPT_CALLS: usize = 256;

/// A refusal without figures.
pub(super) fn refused(reason: Reason, message: impl Into<String>) -> Answer {
    Answer::Refused { reason, message: message.into(), asked: 0, limit: 0, reserved: 0, holders: Vec::<Holder>::new() }
}

impl Owner {
    pub(super) fn read_client(&mut self, slot: u32) {
        for _ in 0..FRAMES_A_TURN {
            let Some(client) = self.client_mut(slot).filter(|client| !client.socket_ended && !client.buried) else { return };
            if client.link.is_cut() {
                if client.link.has_ended() {
                    self.socket_ended(slot);
                }
                return;
            }
            match client.link.next() {
                Ok(Some(frame)) => self.client_frame(slot, &frame),
                Ok(None) => return client.link.set_backlog(false),
                Err(Fault::Frame(FrameError::Closed(in_frame))) => {
                    if in_frame {
                        tracing::warn!(client = slot, "connection ended in the middle of a frame");
                    }
                    return self.socket_ended(slot);
                }
                Err(fault) => return self.cut(slot, &fault),
            }
        }
        if let Some(client) = self.client_mut(slot) {
            let backlog = !client.link.is_cut();
            client.link.set_backlog(backlog);
        }
    }

    fn client_frame(&mut self, slot: u32, frame: &[u8]) {
        match serde_json::from_slice(frame) {
            Ok(FromClient::Call { call_id, call }) => self.call(slot, call_id, call),
            Ok(FromClient::Answered { ask_id, bytes }) => self.answered(slot, ask_id, bytes),
            Err(error) => self.cut(slot, &Fault::Frame(error.into())),
        }
    }

    fn call(&mut self, slot: u32, call_id: u64, call: Request) {
        match call {
            Request::Grow { device, bytes, press } => self.grow(slot, call_id, device, bytes, press),
            Request::Release { epochs } => self.release(slot, call_id, &epochs),
            Request::Window { window } => self.tell_window(slot, call_id, window),
            Request::Import { window, epochs } => self.import(slot, call_id, window, &epochs),
            Request::Adopt { producer, index, generation } => self.adopt(slot, call_id, producer, index, generation),
            Request::Unmapped { epochs } => self.unmapped(slot, &epochs),
            Request::Accept { timeout_ms } => self.accept(slot, call_id, timeout_ms),
            Request::Connect { peer, timeout_ms } => self.connect(slot, call_id, peer, timeout_ms),
            Request::Ledger => {
                let answer = self.ledger_answer();
                self.answer(slot, call_id, answer, Vec::new());
            }
            Request::Windows => {
                let windows = self.estate.window_maps();
                self.answer(slot, call_id, Answer::Windows { windows }, Vec::new());
            }
            Request::Listen => self.listen(slot, call_id),
            Request::Policy { client, serial, kill_stopped_after_ms } => {
                self.set_policy(slot, call_id, (client, serial), kill_stopped_after_ms);
            }
            Request::Kill { client, serial, waited_ms } => self.kill_for_call(slot, call_id, (client, serial), waited_ms),
            Request::Faulted { device, timelines } => self.faulted(slot, device, &timelines),
            Request::Detach => {
                if let Some(client) = self.client_mut(slot) {
                    client.detached = true;
                }
                self.answer(slot, call_id, Answer::Done, Vec::new());
            }
        }
    }

    fn answered(&mut self, slot: u32, ask_id: u64, bytes: u64) {
        match self.client_mut(slot).and_then(|client| client.asked.remove(&ask_id)).map(|(asked, _)| asked) {
            Some(Asked::Trim(device)) => self.trimmed(slot, device, bytes),
            Some(Asked::Revoke(epochs)) if bytes == 0 => self.unmapped(slot, &epochs),
            // It will say `unmapped` when it no longer maps them.
            Some(Asked::Revoke(_)) => {}
            None => tracing::debug!(client = slot, ask_id, "an answer to nothing"),
        }
    }

    /// Queues an answer. A client that does not read is cut off.
    pub(super) fn answer(&mut self, slot: u32, call_id: u64, answer: Answer, fds: Vec<OwnedFd>) {
        let count = fds.len();
        self.say(slot, &FromOwner::Answer { call_id, answer, fds: count }, fds);
    }

    /// Queues a refusal without figures.
    pub(super) fn refuse(&mut self, slot: u32, call_id: u64, reason: Reason, message: impl Into<String>) {
        self.answer(slot, call_id, refused(reason, message), Vec::new());
    }

    fn say(&mut self, slot: u32, message: &FromOwner, fds: Vec<OwnedFd>) {
        let Some(client) = self.client_mut(slot).filter(|client| client.is_present()) else { return };
        if let Err(fault) = client.link.send(message, fds) {
            self.cut(slot, &fault);
        }
    }

    /// Asks a client for something and remembers it.
    pub(super) fn ask(&mut self, slot: u32, ask: Ask, asked: Asked) {
        self.asks += 1;
        let ask_id = self.asks;
        if let Some(client) = self.client_mut(slot).filter(|client| client.is_present()) {
            client.asked.insert(ask_id, (asked, Instant::now()));
            self.say(slot, &FromOwner::Ask { ask_id, ask, fds: 0 }, Vec::new());
        }
    }

    /// Tells every client something that needs no answer.
    pub(super) fn tell_all(&mut self, but: Option<u32>, ask: &Ask) {
        for slot in super::rows::slots().filter(|slot| Some(*slot) != but) {
            if !self.client(slot).is_some_and(super::Client::is_present) {
                continue;
            }
            self.tell(slot, ask.clone());
        }
    }

    /// Tells a client something that needs no answer.
    pub(super) fn tell(&mut self, slot: u32, ask: Ask) {
        self.asks += 1;
        let ask_id = self.asks;
        self.say(slot, &FromOwner::Ask { ask_id, ask, fds: 0 }, Vec::new());
    }

    /// Ends the conversation with a client that broke its rules. Its memory stays until its process and its socket have ended.
    pub(super) fn cut(&mut self, slot: u32, fault: &Fault) {
        let Some(client) = self.client_mut(slot).filter(|client| !client.link.is_cut()) else { return };
        client.link.cut();
        tracing::warn!(client = slot, name = client.name, pid = client.pid, %fault, "client cut off");
        self.forget_calls(slot);
        self.state_changed(slot);
    }

    fn ledger_answer(&mut self) -> Answer {
        self.flush_rows();
        let ledger = Ledger::read(&self.control, crate::control::now_ms());
        match serde_json::to_value(ledger) {
            Ok(ledger) => Answer::Ledger { ledger },
            Err(error) => refused(Reason::Internal, error.to_string()),
        }
    }

    pub(super) fn read_observer(&mut self, id: u64) {
        for _ in 0..FRAMES_A_TURN {
            let Some(link) = self.observers.get_mut(&id) else { return };
            let frame = match link.next() {
                Ok(Some(frame)) => frame,
                Ok(None) => return link.set_backlog(false),
                Err(_) => return drop(self.observers.remove(&id)),
            };
            let Ok(FromClient::Call { call_id, call }) = serde_json::from_slice(&frame) else {
                return drop(self.observers.remove(&id));
            };
            let answer = match call {
                Request::Ledger => self.ledger_answer(),
                Request::Windows => Answer::Windows { windows: self.estate.window_maps() },
                Request::Detach => Answer::Done,
                _ => refused(Reason::Refused, "an observer only reads the ledger"),
            };
            let Some(link) = self.observers.get_mut(&id) else { return };
            if let Err(fault) = link.send(&FromOwner::Answer { call_id, answer, fds: 0 }, Vec::new()) {
                tracing::warn!(%fault, "observer cut off");
                return drop(self.observers.remove(&id));
            }
        }
        if let Some(link) = self.observers.get_mut(&id) {
            link.set_backlog(true);
        }
    }
}
