//! The control memory: one memfd that the owner makes and every client maps. Ledger rows, timelines and holds.
//!
//! All of it is atomic words, so no process can make another's read undefined; every index that comes from outside is
//! checked here, and every value read is treated as a claim. It never moves or shrinks (the memfd is sealed).
#![allow(unsafe_code)] // one mapping, seen through references to atomics

mod cause;
mod cell;
#[cfg(test)]
mod cell_tests;
mod changes;
mod hold;
mod layout;
mod marks;
mod sweep;
mod tally;
#[cfg(test)]
mod tally_tests;

/// Where these files take their atomics from: a test that includes them gives them a model checker's (`tests/tests/contract_model.rs`).
mod atomic {
    pub(super) use std::sync::atomic::{fence, AtomicU64, Ordering};
}

pub(crate) use sweep::{Look, Seen};

pub use cause::Cause;
pub use cell::Cell;
pub use changes::Changes;
pub use hold::{Claim, Hold, HoldState, HoldWord};
pub use layout::{
    ClientRow, ClientState, DeviceRow, GrantRow, LiveRow, FORWARDED, HOLDS_PER_CLIENT, LAYOUT, MAX_CLIENTS, MAX_DEVICES, NAME_BYTES,
    TIMELINES_PER_CLIENT,
};
pub use marks::Marks;
pub use tally::{Count, Fall, Tally, Tier};

use std::ffi::c_void;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use millpond_allocator::timeline::Word;
use rustix::fs::{fcntl_add_seals, fcntl_get_seals, fstat, ftruncate, memfd_create, MemfdFlags, SealFlags};
use rustix::mm::{mmap, munmap, MapFlags, ProtFlags};

use layout::Layout;

/// Why a control memory could not be made or taken.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    /// The system's answer.
    #[error("control memory: {0}")]
    System(#[from] rustix::io::Errno),
    /// Not the file that an owner of this version makes.
    #[error("control memory: {0}")]
    Foreign(&'static str),
}

/// A mapping of the control memory.
#[derive(Debug)]
pub struct Control {
    base: *const Layout,
    fd: OwnedFd,
    /// It stays mapped when this is dropped.
    kept: AtomicBool,
}

// SAFETY: the mapping is shared memory of atomics, valid from any thread until it is dropped.
unsafe impl Send for Control {}
// SAFETY: as above.
unsafe impl Sync for Control {}

const BYTES: usize = size_of::<Layout>();

impl Control {
    /// Makes a new one, as an owner.
    ///
    /// # Errors
    /// [`ControlError::System`].
    pub fn create(token: [u64; 2], owner_pid: u32) -> Result<Self, ControlError> {
        let fd = memfd_create("millpond-control", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&fd, BYTES as u64)?;
        fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        let control = Self::map(fd)?;
        let head = &control.layout().head;
        head.token[0].store(token[0], Ordering::Relaxed);
        head.token[1].store(token[1], Ordering::Relaxed);
        head.owner_pid.store(u64::from(owner_pid), Ordering::Relaxed);
        head.layout.store(LAYOUT, Ordering::Release);
        Ok(control)
    }

    /// Takes one that an owner sent, after checking that it is whole, sealed and of this layout.
    ///
    /// # Errors
    /// [`ControlError::Foreign`] where it is not.
    pub fn open(fd: OwnedFd) -> Result<Self, ControlError> {
        if fstat(&fd)?.st_size != BYTES as i64 {
            return Err(ControlError::Foreign("wrong size: truncated, or of another version"));
        }
        if !fcntl_get_seals(&fd).unwrap_or(SealFlags::empty()).contains(SealFlags::SHRINK) {
            return Err(ControlError::Foreign("not sealed: it could shrink under us"));
        }
        let control = Self::map(fd)?;
        if control.layout().head.layout.load(Ordering::Acquire) != LAYOUT {
            return Err(ControlError::Foreign("another layout: the owner is of another version"));
        }
        Ok(control)
    }

    fn map(fd: OwnedFd) -> Result<Self, ControlError> {
        // SAFETY: a fresh shared mapping at an address of the kernel's choice; the file has BYTES bytes and cannot shrink.
        let base = unsafe { mmap(std::ptr::null_mut(), BYTES, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, &fd, 0)? };
        Ok(Self { base: base.cast(), fd, kept: AtomicBool::new(false) })
    }

    fn layout(&self) -> &Layout {
        // SAFETY: the mapping is BYTES long, page-aligned, lives as long as self, and Layout is made of atomics alone, for
        // which any bytes are valid.
        unsafe { &*self.base }
    }

    /// It stays mapped as long as the process lives, since a driver knows its addresses. The descriptor does not stay.
    pub fn keep_mapped(&self) {
        self.kept.store(true, Ordering::Relaxed);
    }

    /// The file, to be sent to clients.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// The boot token.
    #[must_use]
    pub fn token(&self) -> [u64; 2] {
        let head = &self.layout().head;
        [head.token[0].load(Ordering::Relaxed), head.token[1].load(Ordering::Relaxed)]
    }

    /// Whether anything was given back or a hold is done.
    #[must_use]
    pub fn changes(&self) -> &Changes {
        &self.layout().head.changes
    }

    /// What the owner says of a device.
    #[must_use]
    pub fn device(&self, device: u32) -> Option<&Cell<DeviceRow, { DeviceRow::WORDS }>> {
        self.layout().devices.get(device as usize)
    }

    /// What the owner says of a client.
    #[must_use]
    pub fn client(&self, client: u32) -> Option<&Cell<ClientRow, { ClientRow::WORDS }>> {
        self.layout().clients.get(client as usize)
    }

    /// The same of one client, unless its slot is another's by now.
    #[must_use]
    pub fn row_of(&self, client: u32, serial: u64) -> Option<ClientRow> {
        self.client(client)?.read().filter(|row| row.serial == serial)
    }

    /// Releases whoever waits for a client of which nothing runs any more.
    pub fn poison(&self, client: u32) {
        release(self.timelines(client).unwrap_or_default());
    }

    /// The same for some of a client's timelines, by their numbers in the arena.
    ///
    /// # Errors
    /// One that is not the client's; the others are released.
    pub fn poison_some(&self, client: u32, timelines: &[u32]) -> Result<(), u32> {
        let of = |timeline: &u32| *timeline as usize / TIMELINES_PER_CLIENT == client as usize;
        release(timelines.iter().filter(|timeline| of(timeline)).filter_map(|timeline| self.timeline(*timeline)));
        timelines.iter().find(|timeline| !of(timeline)).map_or(Ok(()), |timeline| Err(*timeline))
    }

    /// Why the owner killed the client that a slot is or last was, if it did: (serial, cause).
    #[must_use]
    pub fn cause_of(&self, client: u32) -> Option<(u64, Cause)> {
        let row = self.client(client)?.read()?;
        Some((row.serial, Cause::from_word(row.cause)?))
    }

    /// When a client's own thread was last seen alive, in milliseconds of `CLOCK_MONOTONIC`.
    #[must_use]
    pub fn beat(&self, client: u32) -> Option<&AtomicU64> {
        self.layout().beats.get(client as usize)
    }

    /// What the owner granted a client of a device.
    #[must_use]
    pub fn grant(&self, client: u32, device: u32) -> Option<&Cell<GrantRow, { GrantRow::WORDS }>> {
        self.layout().grants.get(client as usize)?.get(device as usize)
    }

    /// What a client says of its own use of a device.
    #[must_use]
    pub fn live(&self, client: u32, device: u32) -> Option<&Cell<LiveRow, { LiveRow::WORDS }>> {
        self.layout().live.get(client as usize)?.get(device as usize)
    }

    /// What a client has done so far on a device.
    #[must_use]
    pub fn tally(&self, client: u32, device: u32) -> Option<&Tally> {
        self.layout().tallies.get(client as usize)?.get(device as usize)
    }

    /// One timeline, by its number in the whole arena.
    #[must_use]
    pub fn timeline(&self, timeline: u32) -> Option<&Word> {
        let n = timeline as usize;
        self.layout().timelines.get(n / TIMELINES_PER_CLIENT)?.get(n % TIMELINES_PER_CLIENT)
    }

    /// A client's timelines.
    #[must_use]
    pub fn timelines(&self, client: u32) -> Option<&[Word]> {
        self.layout().timelines.get(client as usize).map(|all| all.as_slice())
    }

    /// All timelines as one page-aligned range, to be registered with a driver.
    #[must_use]
    pub fn timeline_range(&self) -> (*mut u8, usize) {
        let all = &self.layout().timelines;
        (std::ptr::from_ref(all).cast_mut().cast(), size_of_val(all))
    }

    /// One hold of a producer's table.
    #[must_use]
    pub fn hold(&self, producer: u32, index: u32) -> Option<&Hold> {
        self.layout().holds.get(producer as usize)?.get(index as usize)
    }

    /// A producer's holds.
    #[must_use]
    pub fn holds(&self, producer: u32) -> Option<&[Hold]> {
        self.layout().holds.get(producer as usize).map(|all| all.as_slice())
    }

    /// The places of a producer's table that were ever used, with their holds: its own, then those of forwarders.
    pub fn used_holds(&self, producer: u32) -> impl Iterator<Item = (u32, &Hold)> {
        let places = self.marks(producer).map(Marks::places).into_iter().flatten();
        places.filter_map(move |place| Some((place, self.hold(producer, place)?)))
    }

    /// How much of each half of a producer's table was ever used.
    #[must_use]
    pub fn marks(&self, producer: u32) -> Option<&Marks> {
        self.layout().marks.get(producer as usize)
    }
}

/// Milliseconds of `CLOCK_MONOTONIC`: the clock of the beats, the same in every process.
pub(crate) fn now_ms() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec.unsigned_abs() * 1_000 + now.tv_nsec.unsigned_abs() / 1_000_000
}

/// Releases whoever waits for these: all words first, since streams look at them by themselves; then the sleepers are woken.
fn release<'a>(words: impl IntoIterator<Item = &'a Word, IntoIter: Clone>) {
    let words = words.into_iter();
    words.clone().for_each(Word::poison);
    words.for_each(Word::wake);
}

impl Drop for Control {
    fn drop(&mut self) {
        if *self.kept.get_mut() {
            return;
        }
        // SAFETY: the range that map() made; no reference outlives self.
        let _ = unsafe { munmap(self.base.cast_mut().cast::<c_void>(), BYTES) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_driver_knows_stays_mapped() {
        let owner = Control::create([1, 2], 77).unwrap();
        let client = Control::open(owner.fd().try_clone_to_owned().unwrap()).unwrap();
        let at = format!("{:x}-", client.base as usize);
        client.keep_mapped();
        drop(client);
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        assert!(maps.lines().any(|line| line.starts_with(&at)), "unmapped");
    }

    #[test]
    fn a_second_mapping_sees_the_first_ones_words() {
        let owner = Control::create([1, 2], 77).unwrap();
        let client = Control::open(owner.fd().try_clone_to_owned().unwrap()).unwrap();
        assert_eq!(client.token(), [1, 2]);
        owner.beat(3).unwrap().store(9, Ordering::Relaxed);
        assert_eq!(client.beat(3).unwrap().load(Ordering::Relaxed), 9);
    }

    #[test]
    fn every_index_is_checked() {
        let control = Control::create([0, 0], 0).unwrap();
        let last = (MAX_CLIENTS * TIMELINES_PER_CLIENT) as u32;
        assert!(control.timeline(last - 1).is_some() && control.timeline(last).is_none() && control.timeline(u32::MAX).is_none());
        assert!(control.hold(0, HOLDS_PER_CLIENT as u32).is_none() && control.hold(MAX_CLIENTS as u32, 0).is_none());
        assert!(control.live(0, MAX_DEVICES as u32).is_none() && control.client(MAX_CLIENTS as u32).is_none());
    }

    #[test]
    fn timelines_fill_whole_pages() {
        let control = Control::create([0, 0], 0).unwrap();
        let (start, bytes) = control.timeline_range();
        assert_eq!((start as usize % 4096, bytes % 4096), (0, 0));
    }

    #[test]
    fn other_files_are_refused() {
        let plain = memfd_create("x", MemfdFlags::CLOEXEC).unwrap();
        assert!(matches!(Control::open(plain), Err(ControlError::Foreign(_))));
        let unsealed = memfd_create("x", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&unsealed, BYTES as u64).unwrap();
        assert!(matches!(Control::open(unsealed), Err(ControlError::Foreign(_))));
        let empty = memfd_create("x", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&empty, BYTES as u64).unwrap();
        fcntl_add_seals(&empty, SealFlags::SHRINK).unwrap();
        assert!(matches!(Control::open(empty), Err(ControlError::Foreign(_))));
    }
}
