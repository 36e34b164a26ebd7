//! torch's allocator: `malloc`, `free` and the optional hooks, each handed to torch as an integer.
//!
//! Nothing here takes the GIL but a recording with frames (`frames.rs`), synchronises a device, or touches a stream that it was not handed. Sizes at free may be
//! stale (torch 2.5 to 2.8), so blocks are found by their address.
#![allow(unsafe_code)] // extern "C"

use std::ffi::{c_int, c_void};
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::ptr::null_mut;
use std::sync::atomic::Ordering;

use millpond_allocator::driver::Stream;
use millpond_allocator::heap::{Heap, HeapError, PoolId};
use parking_lot::Mutex;

use crate::error::{panic_text, ApiError};
use crate::frames;
use crate::segments;
use crate::state;
use crate::throw::{throw, Kind};

/// torch's `MempoolId_t`, a pair of numbers that goes by value.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct millpond_pool_id {
    /// The first number: a graph's.
    pub graph: u64,
    /// The second: a user's pool.
    pub user: u64,
}

impl From<millpond_pool_id> for PoolId {
    fn from(id: millpond_pool_id) -> Self {
        Self { graph: id.graph, user: id.user }
    }
}

/// The pools of captures under way, by device and stream, where torch says at the end only which stream it was.
static CAPTURES: Mutex<Vec<((c_int, u64), PoolId)>> = Mutex::new(Vec::new());

fn stream_of(stream: *mut c_void) -> Stream {
    Stream(stream as u64)
}

fn allocate(size: usize, device: c_int, stream: *mut c_void) -> Result<*mut c_void, (Kind, String)> {
    let body = || -> Result<*mut c_void, (Kind, String)> {
        let heap = state::heap(device).map_err(|error| (Kind::Runtime, error.to_string()))?;
        // The GIL may be taken there: no lock of ours is held.
        match heap.allocate_from(size as u64, stream_of(stream), frames::of_allocation()) {
            Ok(addr) => Ok(addr as *mut c_void),
            Err(error @ HeapError::OutOfMemory(_)) => Err((Kind::OutOfMemory, error.to_string())),
            Err(error) => Err((Kind::Runtime, error.to_string())),
        }
    };
    catch_unwind(AssertUnwindSafe(body))
        .unwrap_or_else(|panic| Err((Kind::Runtime, format!("a bug in millpond: {}", panic_text(panic.as_ref())))))
}

/// torch's malloc under full replacement. Throws `torch.OutOfMemoryError` (C++), since torch takes a null pointer for a good
/// one; `RuntimeError` for anything else. Zero bytes: null.
#[no_mangle]
pub extern "C-unwind" fn millpond_malloc(size: usize, device: c_int, stream: *mut c_void) -> *mut c_void {
    match allocate(size, device, stream) {
        Ok(pointer) => pointer,
        // catch_unwind has returned: nothing of ours stands between here and torch's frame.
        Err((kind, message)) => throw(kind, message),
    }
}

/// torch's malloc under a `MemPool`: null where there is no memory, so that torch frees its cache and tries again.
#[no_mangle]
pub extern "C" fn millpond_pool_malloc(size: usize, device: c_int, stream: *mut c_void) -> *mut c_void {
    let made = allocate(size, device, stream).unwrap_or(null_mut());
    if !made.is_null() {
        segments::add(made as u64, size as u64);
    }
    made
}

/// torch's free. Never unwinds, never fails: an address that is no live block is counted and left alone. In a forked child,
/// and after detach, nothing happens.
#[no_mangle]
pub extern "C" fn millpond_free(pointer: *mut c_void, _size: usize, device: c_int, _stream: *mut c_void) {
    let _ = catch_unwind(|| {
        if pointer.is_null() || state::is_forked() {
            return;
        }
        let addr = pointer as u64;
        segments::remove(addr);
        if state::heap_of(addr, device).is_none_or(|heap| heap.free_from(addr, frames::of_free()).is_err()) {
            state::FOREIGN_FREES.fetch_add(1, Ordering::Relaxed);
        }
    });
}

fn quietly(body: impl FnOnce() -> Result<(), ApiError>) {
    let result = catch_unwind(AssertUnwindSafe(body));
    if let Ok(Err(error)) = result {
        tracing::warn!(%error, "a hook of torch's could not do its work");
    }
}

/// torch's lazy initialisation of CUDA. Nothing to do: heaps open at first use.
#[no_mangle]
pub extern "C" fn millpond_torch_init(_device_count: c_int) {}

/// `torch.cuda.empty_cache()`: gives whole free chunks of every device back.
#[no_mangle]
pub extern "C" fn millpond_torch_reset() {
    quietly(|| {
        for ordinal in 0..16 {
            if let Some(heap) = state::heap_if_open(ordinal) {
                heap.empty_cache();
            }
        }
        Ok(())
    });
}

/// `torch.cuda.set_per_process_memory_fraction(fraction, device)`.
#[no_mangle]
pub extern "C" fn millpond_torch_memory_fraction(fraction: f64, device: c_int) {
    quietly(|| {
        let heap = state::heap(device)?;
        heap.set_limit(limit_of(fraction, heap.driver().device().total_bytes));
        Ok(())
    });
}

/// A fraction of a device in bytes; 1 or more is no limit.
#[must_use]
pub fn limit_of(fraction: f64, total: u64) -> u64 {
    if fraction >= 1.0 {
        u64::MAX
    } else {
        (fraction.max(0.0) * total as f64) as u64
    }
}

/// The block that holds an address, and its size.
///
/// # Safety
/// `size` is null or may be written.
#[no_mangle]
pub unsafe extern "C" fn millpond_torch_base_alloc(pointer: *mut c_void, size: *mut usize) -> *mut c_void {
    let found = catch_unwind(|| state::heap_of(pointer as u64, 0).and_then(|heap| heap.block_at(pointer as u64))).ok().flatten();
    let (base, bytes) = found.unwrap_or((pointer as u64, 0));
    if !size.is_null() {
        // SAFETY: by this function's contract.
        unsafe { *size = bytes as usize };
    }
    base as *mut c_void
}

/// `tensor.record_stream(stream)`, autograd, DDP. The address may be null or foreign.
#[no_mangle]
pub extern "C" fn millpond_torch_record_stream(pointer: *mut c_void, stream: *mut c_void) {
    quietly(|| {
        if pointer.is_null() || state::is_forked() {
            return Ok(());
        }
        let addr = pointer as u64;
        match state::heap_of(addr, 0) {
            Some(heap) => {
                let _ = heap.record_stream(addr, stream_of(stream));
            }
            None => {
                if let Some(client) = state::if_attached() {
                    client.record_anywhere(addr, stream_of(stream))?;
                }
            }
        }
        Ok(())
    });
}

/// A graph's capture begins. The third argument is a `std::function` that tells the capture's streams; it dies with the
/// call and is not needed: malloc asks the driver whether its stream captures.
#[no_mangle]
pub extern "C" fn millpond_torch_begin_allocate_to_pool(device: c_int, pool: millpond_pool_id, _filter: *const c_void) {
    quietly(|| {
        state::heap(device)?.begin_pool(pool.into());
        Ok(())
    });
}

/// [`millpond_torch_begin_allocate_to_pool`] as torch 2.1 and 2.2 have it: they name the stream, and the pool at the beginning only.
#[no_mangle]
pub extern "C" fn millpond_torch_begin_allocate_stream_to_pool(device: c_int, stream: *mut c_void, pool: millpond_pool_id) {
    quietly(|| {
        let heap = state::heap(device)?;
        let key = (device, stream as u64);
        let mut captures = CAPTURES.lock();
        // One that failed: torch does not say that it has ended, and a stream is in one at a time.
        captures.retain(|(other, _)| *other != key);
        captures.push((key, pool.into()));
        drop(captures);
        heap.begin_pool(pool.into());
        Ok(())
    });
}

/// [`millpond_torch_end_allocate_to_pool`] as torch 2.1 and 2.2 have it.
#[no_mangle]
pub extern "C" fn millpond_torch_end_allocate_stream_to_pool(device: c_int, stream: *mut c_void) {
    quietly(|| {
        let key = (device, stream as u64);
        let mut captures = CAPTURES.lock();
        let ended = captures.iter().position(|(other, _)| *other == key).map(|at| captures.swap_remove(at));
        drop(captures);
        if let Some((_, pool)) = ended {
            state::heap(device)?.end_pool(pool);
        }
        Ok(())
    });
}

/// The capture has ended.
#[no_mangle]
pub extern "C" fn millpond_torch_end_allocate_to_pool(device: c_int, pool: millpond_pool_id) {
    quietly(|| {
        state::heap(device)?.end_pool(pool.into());
        Ok(())
    });
}

/// The graph is gone.
#[no_mangle]
pub extern "C" fn millpond_torch_release_pool(device: c_int, pool: millpond_pool_id) {
    quietly(|| {
        state::heap(device)?.release_pool(pool.into());
        Ok(())
    });
}

/// The capture that the calling thread began has failed. Not a hook of torch's, which (2.3 to 2.12) says nothing then: whoever sees
/// `CUDAGraph.capture_end` raise calls this, on that thread. Nothing happens where torch has said that the capture has ended.
#[no_mangle]
pub extern "C" fn millpond_torch_capture_failed() {
    quietly(|| {
        state::open_heaps().for_each(Heap::fail_capture);
        Ok(())
    });
}
