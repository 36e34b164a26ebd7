//! The arena's geometry and its books: devices, windows, chunks, and who has how much. Knows no sockets.
//!
//! For every device, at every moment: the clients' reserved + retired + orphaned = what the device has reserved, and that is
//! never above its limit. A range of a window is given again only when its chunk is gone, and an epoch never.

mod fates;

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;
use std::time::Duration;

use millpond_allocator::driver::{Driver, DriverError};

use super::devices::Served;
use super::spares::Spares;
use crate::control::{Cause, DeviceRow, GrantRow, MAX_CLIENTS};
use crate::wire::{Chunk, ChunkMap, WindowMap};

pub(super) use crate::wire::Fate;

/// A chunk as the owner keeps it.
#[derive(Debug)]
pub(super) struct Holding {
    pub(super) device: u32,
    pub(super) window: u32,
    pub(super) slot: u32,
    pub(super) chunk: Chunk,
    /// Keeps the bytes alive; every client gets a duplicate.
    pub(super) fd: OwnedFd,
    /// Under whose account it is: its client's, or that of the one that adopted it.
    pub(super) account: u32,
    /// One bit for each client that was given a descriptor and has not said that it dropped it.
    pub(super) importers: u64,
    /// Some other client had its descriptor once.
    shared: bool,
    pub(super) fate: Fate,
}

/// A client's range of one device's address space.
#[derive(Debug)]
pub(super) struct Window {
    pub(super) device: u32,
    pub(super) slot: u32,
    /// Epochs by offset, whatever their fate.
    taken: BTreeMap<u64, u64>,
}

/// One device's books.
#[derive(Debug)]
pub(super) struct Device {
    pub(super) served: Served,
    pub(super) row: DeviceRow,
    pub(super) shares: [GrantRow; MAX_CLIENTS],
}

/// Why a growth is not granted now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Denial {
    /// The arena's limit: so many bytes short.
    Arena(u64),
    /// The client's own limit: so many bytes short.
    Client(u64),
    /// No range of the window is long enough.
    Window,
    /// The driver's answer.
    Driver(DriverError),
}

/// Everything that there is.
#[derive(Debug, Default)]
pub(super) struct Estate {
    pub(super) devices: Vec<Device>,
    windows: BTreeMap<u32, Window>,
    chunks: BTreeMap<u64, Holding>,
    spares: Spares,
    epochs: u64,
    window_ids: u32,
    /// Rows of (client, device) that are to be written.
    dirty: BTreeSet<(u32, u32)>,
}

/// Every client in a set of bits.
pub(super) fn members(bits: u64) -> impl Iterator<Item = u32> {
    (0..MAX_CLIENTS as u32).filter(move |slot| bits & 1 << slot != 0)
}

impl Estate {
    /// `keep`: for how long what is given back stays at hand of its client.
    pub(super) fn new(served: Vec<Served>, keep: Duration) -> Self {
        let device = |served: Served| {
            let id = u128::from_be_bytes(served.info.id.bytes());
            let mut row = DeviceRow {
                id_high: (id >> 64) as u64,
                id_low: id as u64,
                total: served.info.total_bytes,
                limit: served.limit,
                ..DeviceRow::default()
            };
            row.name = super::rows::name(&served.info.name);
            Device { served, row, shares: [GrantRow::default(); MAX_CLIENTS] }
        };
        Self { devices: served.into_iter().map(device).collect(), spares: Spares::new(keep), ..Self::default() }
    }

    pub(super) fn device(&self, device: u32) -> Option<&Device> {
        self.devices.get(device as usize)
    }

    pub(super) fn share(&self, slot: u32, device: u32) -> GrantRow {
        self.device(device).and_then(|device| device.shares.get(slot as usize)).copied().unwrap_or_default()
    }

    pub(super) fn window(&self, window: u32) -> Option<&Window> {
        self.windows.get(&window)
    }

    pub(super) fn holding(&self, epoch: u64) -> Option<&Holding> {
        self.chunks.get(&epoch)
    }

    /// Rows that changed since the last call.
    pub(super) fn take_dirty(&mut self) -> BTreeSet<(u32, u32)> {
        std::mem::take(&mut self.dirty)
    }

    /// Gives a new client a window of each device.
    pub(super) fn open_windows(&mut self, slot: u32, limit: Option<u64>) -> Vec<u32> {
        let mut ids = Vec::new();
        for (index, device) in (0..).zip(&mut self.devices) {
            self.window_ids += 1;
            self.windows.insert(self.window_ids, Window { device: index, slot, taken: BTreeMap::new() });
            ids.push(self.window_ids);
            if let Some(share) = device.shares.get_mut(slot as usize) {
                *share = GrantRow { limit: limit.unwrap_or(0), ..GrantRow::default() };
            }
            self.dirty.insert((slot, index));
        }
        ids
    }

    /// Takes a client's windows away, if no chunk is left in any of them.
    pub(super) fn close_windows(&mut self, slot: u32) -> bool {
        if self.windows.values().any(|window| window.slot == slot && !window.taken.is_empty()) {
            return false;
        }
        self.windows.retain(|_, window| window.slot != slot);
        self.spares.forget(slot);
        for (index, device) in (0..).zip(&mut self.devices) {
            if let Some(share) = device.shares.get_mut(slot as usize) {
                *share = GrantRow::default();
            }
            self.dirty.insert((slot, index));
        }
        true
    }

    /// Every window with its chunks, for pictures.
    pub(super) fn window_maps(&self) -> Vec<WindowMap> {
        let chunk = |epoch: &u64| {
            let holding = self.chunks.get(epoch)?;
            let adopted_by = (holding.account != holding.slot).then_some(holding.account);
            Some(ChunkMap { chunk: holding.chunk, fate: holding.fate, mapped_by: members(holding.importers).collect(), adopted_by })
        };
        let map = |(id, window): (&u32, &Window)| WindowMap {
            window: *id,
            device: window.device,
            client: window.slot,
            bytes: self.device(window.device).map_or(0, |device| device.served.window_bytes),
            chunks: window.taken.values().filter_map(chunk).collect(),
        };
        self.windows.iter().map(map).collect()
    }

    /// A client's chunks, whatever their fate.
    pub(super) fn chunks_of(&self, slot: u32) -> Vec<u64> {
        let windows = self.windows.values().filter(|window| window.slot == slot);
        windows.flat_map(|window| window.taken.values().copied()).collect()
    }

    /// Whether chunks of a device that were given back are mapped by none of these clients.
    pub(super) fn any_retired(&self, device: u32, but: u64) -> bool {
        let mut retired = self.chunks.values().filter(|holding| holding.device == device && holding.fate == Fate::Retired);
        retired.any(|holding| holding.importers & but == 0)
    }

    /// Whether a client has chunks that it neither gave back nor left behind, or maps chunks of others.
    pub(super) fn has_stake(&self, slot: u32) -> bool {
        self.chunks.values().any(|holding| holding.importers & 1 << slot != 0 || holding.slot == slot && holding.fate == Fate::Held)
    }

    /// The chunks of a window that a range touches.
    pub(super) fn overlapping(&self, window: u32, offset: u64, bytes: u64) -> Vec<u64> {
        let Some(window) = self.windows.get(&window) else { return Vec::new() };
        let end = offset.saturating_add(bytes.max(1));
        let before = window.taken.range(..end).rev().map(|(_, epoch)| *epoch);
        before
            .take_while(|epoch| self.chunks.get(epoch).is_some_and(|holding| holding.chunk.offset + holding.chunk.bytes > offset))
            .collect()
    }

    /// Whether a client may have so many bytes more now.
    pub(super) fn admit(&self, slot: u32, device: u32, bytes: u64) -> Result<(), Denial> {
        let Some(books) = self.device(device) else { return Err(Denial::Window) };
        let share = self.share(slot, device);
        let over = |reserved: u64, limit: u64| reserved.saturating_add(bytes).saturating_sub(limit);
        match over(share.reserved + share.retired, share.limit) {
            short if share.limit > 0 && short > 0 => return Err(Denial::Client(short)),
            _ => {}
        }
        match over(books.row.reserved, books.row.limit) {
            0 => Ok(()),
            short => Err(Denial::Arena(short)),
        }
    }

    /// Grants a growth whole or not at all: admission, a range, the memory, its descriptors.
    pub(super) fn grow(&mut self, slot: u32, window: u32, device: u32, bytes: u64) -> Result<Vec<u64>, Denial> {
        self.admit(slot, device, bytes)?;
        let offset = self.fit(window, bytes).ok_or(Denial::Window)?;
        let Some(books) = self.devices.get_mut(device as usize) else { return Err(Denial::Window) };
        let spares = &mut self.spares;
        let mut made = Vec::new();
        let mut at = 0;
        while at < bytes {
            let part = books.served.chunk_bytes.min(bytes - at);
            let fd = match spares.take(device, slot, part) {
                Some(fd) => fd,
                None => {
                    let all = books.row.reserved.saturating_add(bytes).saturating_add(spares.bytes_on(device));
                    spares.give_up(device, all.saturating_sub(books.row.limit));
                    // What was made so far goes with its descriptors where this fails.
                    match make(books.served.driver.as_ref(), part, || spares.give_up(device, u64::MAX)) {
                        Ok(fd) => fd,
                        Err(error) => {
                            self.note_spares(device);
                            return Err(Denial::Driver(error));
                        }
                    }
                }
            };
            made.push((offset + at, part, fd));
            at += part;
        }
        let row = &mut books.row;
        row.reserved += bytes;
        row.peak = row.peak.max(row.reserved);
        row.growths += 1;
        if let Some(share) = books.shares.get_mut(slot as usize) {
            share.reserved += bytes;
            share.peak = share.peak.max(share.reserved);
            share.chunks += made.len() as u64;
            share.growths += 1;
        }
        self.dirty.insert((slot, device));
        self.note_spares(device);
        let mut epochs = Vec::new();
        for (offset, bytes, fd) in made {
            self.epochs += 1;
            let chunk = Chunk { epoch: self.epochs, offset, bytes };
            if let Some(window) = self.windows.get_mut(&window) {
                window.taken.insert(offset, chunk.epoch);
            }
            self.chunks.insert(
                chunk.epoch,
                Holding { device, window, slot, chunk, fd, account: slot, importers: 0, shared: false, fate: Fate::Held },
            );
            epochs.push(chunk.epoch);
        }
        Ok(epochs)
    }

    /// Counts a growth that was not granted.
    pub(super) fn count_refusal(&mut self, slot: u32, device: u32) {
        if let Some(books) = self.devices.get_mut(device as usize) {
            books.row.refusals += 1;
            if let Some(share) = books.shares.get_mut(slot as usize) {
                share.refusals += 1;
            }
            self.dirty.insert((slot, device));
        }
    }

    /// Counts that a client gave so many bytes back.
    pub(super) fn count_trim(&mut self, slot: u32, device: u32, bytes: u64) {
        if let Some(share) = self.devices.get_mut(device as usize).and_then(|books| books.shares.get_mut(slot as usize)) {
            share.trims += 1;
            share.trimmed_bytes += bytes;
            self.dirty.insert((slot, device));
        }
    }

    /// Counts a death, on every device, and what the client was killed for, if it was.
    pub(super) fn count_death(&mut self, slot: u32, cause: Option<Cause>) {
        for (index, books) in (0..).zip(&mut self.devices) {
            books.row.deaths += 1;
            match cause {
                Some(Cause::Stopped { .. }) => books.row.kills_stopped += 1,
                Some(Cause::Call { .. }) => books.row.kills_call += 1,
                None => {}
            }
            self.dirty.insert((slot, index));
        }
    }

    /// Where so many bytes first fit in a window.
    fn fit(&self, window: u32, bytes: u64) -> Option<u64> {
        let window = self.windows.get(&window)?;
        let size = self.device(window.device)?.served.window_bytes;
        let mut at = 0_u64;
        for (offset, epoch) in &window.taken {
            if offset.checked_sub(at)? >= bytes {
                break;
            }
            at = offset + self.chunks.get(epoch)?.chunk.bytes;
        }
        (at.checked_add(bytes)? <= size).then_some(at)
    }

    /// Enters a chunk under its fate, or takes it out.
    fn book(&mut self, device: u32, slot: u32, bytes: u64, fate: Fate, enter: bool) {
        let change = |figure: &mut u64, by: u64| *figure = if enter { *figure + by } else { figure.saturating_sub(by) };
        self.dirty.insert((slot, device));
        let Some(books) = self.devices.get_mut(device as usize) else { return };
        let Some(share) = books.shares.get_mut(slot as usize) else { return };
        match fate {
            Fate::Held | Fate::Adopted => {
                change(&mut share.reserved, bytes);
                change(&mut share.chunks, 1);
                if fate == Fate::Adopted {
                    change(&mut share.adopted, bytes);
                }
                share.peak = share.peak.max(share.reserved);
            }
            Fate::Retired => {
                change(&mut share.retired, bytes);
                change(&mut books.row.retired, bytes);
            }
            Fate::Orphaned => change(&mut books.row.orphaned, bytes),
        }
    }
}

/// Memory as a descriptor alone: it keeps the bytes alive by itself, with both drivers. Where there is none, once more if `more` could
/// give some up.
fn make(driver: &dyn Driver, bytes: u64, more: impl FnOnce() -> bool) -> Result<OwnedFd, DriverError> {
    let memory = match driver.create(bytes) {
        Err(error) if error.is_out_of_memory() && more() => driver.create(bytes)?,
        created => created?,
    };
    let exported = driver.export(memory);
    let released = driver.release(memory);
    let fd = exported?;
    released.map(|()| fd)
}

#[cfg(test)]
#[path = "estate_tests.rs"]
mod tests;
