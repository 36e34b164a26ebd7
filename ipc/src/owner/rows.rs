//! What the owner writes into the control memory, for readers that need no help of it.

use super::client::Client;
use super::estate::Estate;
use crate::control::{Cause, ClientRow, ClientState, Control, HoldState, LiveRow, MAX_CLIENTS, NAME_BYTES};
use std::sync::atomic::Ordering;

/// A name as a row keeps it: whole characters, no control characters.
pub(super) fn name(text: &str) -> [u8; NAME_BYTES] {
    let mut bytes = [0; NAME_BYTES];
    let mut used = 0;
    for c in text.chars().filter(|c| !c.is_control()) {
        let Some(place) = bytes.get_mut(used..used + c.len_utf8()) else { break };
        used += c.encode_utf8(place).len();
    }
    bytes
}

/// Writes what changed since the last call.
pub(super) fn write_changes(control: &Control, estate: &mut Estate) {
    let dirty = estate.take_dirty();
    let mut devices = 0_u32;
    for (slot, device) in dirty {
        devices |= 1 << device;
        if let Some(cell) = control.grant(slot, device) {
            cell.write(&estate.share(slot, device));
        }
    }
    write_devices(control, estate, devices);
}

/// Writes the rows of these devices.
pub(super) fn write_devices(control: &Control, estate: &Estate, devices: u32) {
    for (index, books) in (0..).zip(&estate.devices).filter(|(index, _)| devices & 1 << *index != 0) {
        if let Some(cell) = control.device(index) {
            cell.write(&books.row);
        }
    }
}

/// Writes a client's row.
pub(super) fn write_client(control: &Control, client: &Client, state: ClientState) {
    let role = u64::from(client.role != crate::wire::Role::Parent);
    let row = ClientRow {
        serial: client.serial,
        state: state as u64,
        pid: u64::from(client.pid),
        start_time: client.start_time,
        role,
        cause: client.cause.map_or(0, Cause::to_word),
        name: name(&client.name),
    };
    if let Some(cell) = control.client(client.slot) {
        cell.write(&row);
    }
}

/// Says that a slot is another client's than it was, which is not there yet.
pub(super) fn write_coming(control: &Control, slot: u32, serial: u64) {
    if let Some(cell) = control.client(slot) {
        cell.write(&ClientRow { serial, ..ClientRow::default() });
    }
}

/// Makes a slot fit for a new client: no row, hold, timeline or beat of the last one is left to be taken for its own.
pub(super) fn prepare_slot(control: &Control, slot: u32, devices: usize, now_ms: u64) {
    for device in 0..devices as u32 {
        if let Some(cell) = control.live(slot, device) {
            cell.write(&LiveRow::default());
        }
        if let Some(tally) = control.tally(slot, device) {
            tally.reset();
        }
    }
    if let Some(beat) = control.beat(slot) {
        beat.store(now_ms, Ordering::Relaxed);
    }
    // Somebody may have made a hold in this table after its client was gone.
    for (_, hold) in control.used_holds(slot) {
        let word = hold.word();
        if word.state() != HoldState::Free {
            hold.bury(word);
            hold.recycle(hold.word());
        }
    }
    if let Some(marks) = control.marks(slot) {
        marks.reset();
    }
    for word in control.timelines(slot).unwrap_or_default() {
        word.revive();
    }
}

/// Every slot.
pub(super) fn slots() -> std::ops::Range<u32> {
    0..MAX_CLIENTS as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_cut_between_characters() {
        let cut = name(&"ü".repeat(40));
        assert_eq!(String::from_utf8(cut.to_vec()).unwrap(), "ü".repeat(16));
        assert_eq!(&name("a\n\x1b[b")[..4], b"a[b\0");
    }
}
