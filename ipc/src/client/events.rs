//! What befalls, for whoever wants to be told: memory is short, a growth was refused, a client is dead.
//!
//! The owner tells a parent that listens of everybody's; any other client learns of its own refusals, since it was refused. Both
//! put a line into a short queue; a thread of the listener's takes it out. Nothing on malloc's path waits for the listener.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use serde::Serialize;

use super::error::Error;
use super::link::LONGEST;
use super::{Client, CALL_TIMEOUT};
use crate::control::Cause;
use crate::wire::{Peer, Request, Role};

/// The most that wait for a listener that does not come; the oldest goes first.
const KEPT: usize = 64;

/// A growth that did not fit, as of that moment, or a client's death. Sizes are in bytes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Event {
    /// `pressure`: others are asked to give back what they do not use. `refusal`: out of memory. `death`: a client is gone, and
    /// the figures of memory are zero.
    pub kind: &'static str,
    /// The device's identity.
    pub device: String,
    /// Who asked, or died.
    pub by: Peer,
    /// Of a death: why the owner killed it, if it did.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cause: Option<String>,
    /// For how much.
    pub asked: u64,
    /// The limit that was in the way: the arena's, or the client's own.
    pub limit: u64,
    /// What was reserved under it.
    pub reserved: u64,
    /// What was free under it.
    pub free: u64,
    /// Events before this one that nobody took in time.
    pub missed: u64,
}

/// The queue of one client.
#[derive(Debug, Default)]
pub(super) struct Events {
    state: Mutex<State>,
    came: Condvar,
}

#[derive(Debug, Default)]
struct State {
    listening: bool,
    closed: bool,
    missed: u64,
    queue: VecDeque<Event>,
}

impl Events {
    fn listen(&self) {
        self.state.lock().listening = true;
    }

    /// Puts an event where the listener finds it, if there is one.
    pub(super) fn push(&self, kind: &'static str, device: &str, by: Peer, (asked, limit, reserved): (u64, u64, u64)) {
        let free = limit.saturating_sub(reserved);
        self.put(Event { kind, device: device.to_owned(), by, cause: None, asked, limit, reserved, free, missed: 0 });
    }

    /// A client is gone.
    pub(super) fn push_death(&self, by: Peer, cause: Option<Cause>) {
        let cause = cause.map(|cause| cause.to_string());
        self.put(Event { kind: "death", device: String::new(), by, cause, asked: 0, limit: 0, reserved: 0, free: 0, missed: 0 });
    }

    fn put(&self, event: Event) {
        let mut state = self.state.lock();
        if !state.listening {
            return;
        }
        if state.queue.len() >= KEPT {
            state.queue.pop_front();
            state.missed += 1;
        }
        state.queue.push_back(event);
        self.came.notify_one();
    }

    /// Ends every wait.
    pub(super) fn close(&self) {
        self.state.lock().closed = true;
        self.came.notify_all();
    }

    fn next(&self, timeout: Duration) -> Result<Option<Event>, Error> {
        let until = Instant::now() + timeout.min(LONGEST);
        let mut state = self.state.lock();
        loop {
            if let Some(mut event) = state.queue.pop_front() {
                event.missed = std::mem::take(&mut state.missed);
                return Ok(Some(event));
            }
            if state.closed {
                return Err(Error::left());
            }
            if self.came.wait_until(&mut state, until).timed_out() {
                return Ok(None);
            }
        }
    }
}

impl Client {
    /// From here on events are kept for [`next_event`](Self::next_event): everybody's in a parent, its own refusals elsewhere.
    ///
    /// # Errors
    /// What the owner says.
    pub fn listen(&self) -> Result<(), Error> {
        self.check_alive()?;
        self.shared.events.listen();
        if self.shared.role == Role::Parent {
            self.shared.link.call(Request::Listen, CALL_TIMEOUT)?;
        }
        Ok(())
    }

    /// The next event; `None` where none comes in time.
    ///
    /// # Errors
    /// [`Error::Closed`] once this client has left.
    pub fn next_event(&self, timeout: Duration) -> Result<Option<Event>, Error> {
        self.check_alive()?;
        self.shared.events.next(timeout)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn push(events: &Events, asked: u64) {
        let by = Peer { client: 1, serial: 1, name: "vae".to_owned(), pid: 7 };
        events.push("refusal", "HOST-0", by, (asked, 100, 90));
    }

    #[test]
    fn nothing_is_kept_for_nobody() {
        let events = Events::default();
        push(&events, 1);
        events.listen();
        assert_eq!(events.next(Duration::ZERO).unwrap(), None);
        push(&events, 20);
        let event = events.next(Duration::ZERO).unwrap().unwrap();
        assert_eq!((event.asked, event.free, event.missed), (20, 10, 0));
    }

    #[test]
    fn the_oldest_go_where_the_listener_is_slow() {
        let events = Events::default();
        events.listen();
        (0..KEPT as u64 + 3).for_each(|n| push(&events, n));
        let event = events.next(Duration::ZERO).unwrap().unwrap();
        assert_eq!((event.asked, event.missed), (3, 3));
        assert_eq!(events.next(Duration::ZERO).unwrap().unwrap().missed, 0);
    }

    #[test]
    fn a_waiter_is_woken_by_an_event_and_by_the_end() {
        let events = Events::default();
        events.listen();
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| (events.next(LONGEST).unwrap(), events.next(LONGEST)));
            push(&events, 5);
            events.close();
            let (first, second) = waiter.join().unwrap();
            assert_eq!(first.unwrap().asked, 5);
            assert!(matches!(second, Err(Error::Closed(_))));
        });
    }
}
