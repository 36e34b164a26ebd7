//! Telling a parent that listens when memory is short and when a growth is refused.

use super::Owner;
use crate::wire::{Answer, Ask, Reason, Role};

/// A listener that has so many bytes unread is told no more until it reads: it misses events, and is not cut off for it.
const UNREAD: usize = 64 << 10;

impl Owner {
    /// The parent wants to be told.
    pub(super) fn listen(&mut self, slot: u32, call_id: u64) {
        match self.client_mut(slot).filter(|client| client.role == Role::Parent) {
            Some(client) => {
                client.listens = true;
                self.answer(slot, call_id, Answer::Done, Vec::new());
            }
            None => self.refuse(slot, call_id, Reason::Refused, "only a parent is told of what befalls others"),
        }
    }

    /// Tells it that a growth of this client does not fit: limit and reserved are those in the way.
    pub(super) fn tell_listener(&mut self, slot: u32, device: u32, asked: u64, (limit, reserved): (u64, u64), refused: bool) {
        let listens = |client: &&super::Client| client.listens && client.is_present() && client.link.unsent_bytes() < UNREAD;
        let Some(listener) = self.clients.iter().flatten().find(listens).map(|client| client.slot) else { return };
        let Some(by) = self.client(slot).map(super::Client::peer) else { return };
        self.tell(listener, Ask::Pressure { device, by, asked, limit, reserved, refused });
    }
}
