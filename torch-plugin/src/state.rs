//! The one client of this process, and its heaps as malloc finds them.
#![allow(unsafe_code)] // leaked pointers, the fork handler, the environment

use std::ffi::{c_char, CStr, CString};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering};
use std::sync::{Arc, Once};

use millpond_allocator::heap::Heap;
use millpond_ipc::client::{Client, Error, Options, Place};
use parking_lot::{Mutex, RwLock};

use crate::error::{ApiError, Result};
use crate::frames;

/// GPUs that malloc finds without a lock. torch has at most 64; more than 16 in one process share the slow way.
const FAST: usize = 16;

static CLIENT: RwLock<Option<Arc<Client>>> = RwLock::new(None);
static ATTACHING: Mutex<()> = Mutex::new(());
/// Heaps by GPU ordinal, behind the host's (-1). What is put here is never freed: frees may come after everything else has ended.
static HEAPS: [AtomicPtr<Heap>; FAST + 1] = [const { AtomicPtr::new(null_mut()) }; FAST + 1];
/// Set in a forked child before it has a second thread.
static FORKED: AtomicBool = AtomicBool::new(false);
/// Frees of addresses that were no live block.
pub static FOREIGN_FREES: AtomicU64 = AtomicU64::new(0);

/// The client.
///
/// # Errors
/// [`ApiError::NotAttached`]; [`Error::Forked`] in a forked child.
pub fn client() -> Result<Arc<Client>> {
    if FORKED.load(Ordering::Relaxed) {
        return Err(Error::Forked.into());
    }
    CLIENT.read().clone().ok_or(ApiError::NotAttached)
}

/// The client if there is one.
#[must_use]
pub fn if_attached() -> Option<Arc<Client>> {
    client().ok()
}

/// Whether this is a forked child of the process that loaded the library.
#[must_use]
pub fn is_forked() -> bool {
    FORKED.load(Ordering::Relaxed)
}

/// Attaches this process.
///
/// # Errors
/// [`ApiError::AlreadyAttached`], and a client's own.
pub fn attach(options: &Options) -> Result<Arc<Client>> {
    if is_forked() {
        return Err(Error::Forked.into());
    }
    let _attaching = ATTACHING.lock();
    if let Some(client) = &*CLIENT.read() {
        return Err(ApiError::AlreadyAttached(client.socket().display().to_string()));
    }
    claim_process()?;
    static FORK_HANDLER: Once = Once::new();
    FORK_HANDLER.call_once(|| {
        // SAFETY: the handler only stores to atomics, which is allowed in a child of a threaded process.
        unsafe { libc::pthread_atfork(None, None, Some(forked)) };
    });
    let client = Client::attach(options)?;
    *CLIENT.write() = Some(client.clone());
    Ok(client)
}

/// Detaches this process. Blocks that are still live stay mapped; freeing them does nothing.
///
/// # Errors
/// [`ApiError::NotAttached`].
pub fn detach() -> Result<()> {
    let _attaching = ATTACHING.lock();
    let mut attached = CLIENT.write();
    let client = attached.take().ok_or(ApiError::NotAttached)?;
    HEAPS.iter().for_each(|heap| heap.store(null_mut(), Ordering::Release));
    drop(attached);
    client.detach();
    Ok(())
}

extern "C" fn forked() {
    FORKED.store(true, Ordering::Relaxed);
    millpond_allocator::record::forked();
    frames::forked();
    HEAPS.iter().for_each(|heap| heap.store(null_mut(), Ordering::Relaxed));
}

/// Two copies of the library in one process would be two clients that know nothing of each other.
fn claim_process() -> Result<()> {
    const NAME: &CStr = c"MILLPOND_LOADED";
    let mine = format!("{}:{:p}", std::process::id(), &raw const CLIENT);
    // SAFETY: getenv and setenv with terminated strings; like every use of them they race with other threads' setenv, which
    // is why this happens once, at attach.
    let before = unsafe {
        let value: *const c_char = libc::getenv(NAME.as_ptr());
        if value.is_null() {
            String::new()
        } else {
            CStr::from_ptr(value).to_string_lossy().into_owned()
        }
    };
    let other_here = before != mine && before.split(':').next() == Some(&std::process::id().to_string());
    if other_here {
        return Err(Error::Refused(
            "another copy of millpond's library is attached in this process: load one copy only (is MILLPOND_LIBRARY another file than the package's?)".to_owned(),
        )
        .into());
    }
    let value = CString::new(mine).unwrap_or_default();
    // SAFETY: as above.
    unsafe { libc::setenv(NAME.as_ptr(), value.as_ptr(), 1) };
    Ok(())
}

/// The heap of a GPU by its ordinal, opened at first use.
///
/// # Errors
/// [`ApiError::NotAttached`] and a client's own.
#[inline]
pub fn heap(ordinal: i32) -> Result<&'static Heap> {
    let slot = slot_of(ordinal);
    slot.and_then(in_slot).map_or_else(|| open(ordinal, slot), Ok)
}

#[cold]
fn open(ordinal: i32, slot: Option<&AtomicPtr<Heap>>) -> Result<&'static Heap> {
    let client = client()?;
    let place = u32::try_from(ordinal).map_or(Place::Host, Place::Ordinal);
    let heap = client.heap(place)?;
    // Leaked on purpose, once a device and process: malloc and free hold no count.
    let heap = Arc::into_raw(heap).cast_mut();
    // Not where the process has detached meanwhile: the next client's heap would never be found behind this one.
    let attached = CLIENT.read();
    if let Some(slot) = slot.filter(|_| attached.as_ref().is_some_and(|attached| Arc::ptr_eq(attached, &client))) {
        slot.store(heap, Ordering::Release);
    }
    // SAFETY: just leaked.
    Ok(unsafe { &*heap })
}

fn slot_of(ordinal: i32) -> Option<&'static AtomicPtr<Heap>> {
    usize::try_from(ordinal.wrapping_add(1)).ok().and_then(|n| HEAPS.get(n))
}

/// The heap in whose window an address lies: that of the given GPU, of another, or the host's.
#[must_use]
pub fn heap_of(addr: u64, ordinal: i32) -> Option<&'static Heap> {
    let here = |heap: &&'static Heap| heap.window().offset_of(addr).is_some();
    let first = slot_of(ordinal).and_then(in_slot).filter(here);
    first.or_else(|| open_heaps().find(here))
}

/// Every heap that malloc has used and finds without a lock, the host's too.
pub fn open_heaps() -> impl Iterator<Item = &'static Heap> {
    HEAPS.iter().filter_map(in_slot)
}

/// The heap of a GPU if malloc has used it.
#[must_use]
pub fn heap_if_open(ordinal: usize) -> Option<&'static Heap> {
    in_slot(HEAPS.get(ordinal.checked_add(1)?)?)
}

#[inline]
fn in_slot(slot: &AtomicPtr<Heap>) -> Option<&'static Heap> {
    // SAFETY: null, or leaked and never freed.
    unsafe { slot.load(Ordering::Acquire).as_ref() }
}
