//! One answer that torch's pluggable allocator refuses to give: `cacheInfo`, which `cudnn.benchmark` asks for.
//!
//! There is no hook for it (`facts/torch.md`, 1.4). But the refusal is a virtual function whose name and class's vtable torch
//! exports, so the one slot of that vtable that holds the refusal is made to hold our answer. Where a name or the slot is
//! not found, nothing is changed, and torch raises its own error as before.
#![allow(unsafe_code)] // another library's vtable

use std::ffi::{c_void, CStr};
use std::panic::catch_unwind;

use crate::state;
use crate::tensor::place;

/// Slots that are looked at. The class has some fifty.
const SLOTS: usize = 96;

fn symbol(name: &CStr) -> *mut c_void {
    // SAFETY: dlopen of a library that is loaded already, if it is, and dlsym, with terminated names.
    unsafe {
        let library = libc::dlopen(c"libtorch_cuda.so".as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD);
        if library.is_null() {
            library
        } else {
            libc::dlsym(library, name.as_ptr())
        }
    }
}

/// The largest block that malloc would find on a device now: a free one, or what could be reserved, as far as the driver has it free or
/// it is at hand, and the limits go. `None` where there is no heap.
#[must_use]
pub fn largest_block(device: i32) -> Option<u64> {
    let (heap, client) = (state::heap(device).ok()?, state::client().ok()?);
    let free = heap.driver().mem_info().map_or(0, |info| info.free).saturating_add(client.at_hand(place(device)));
    let reservable = client.room(place(device)).map_or(free, |room| free.min(room));
    Some(heap.largest_free().max(reservable))
}

/// `CUDAPluggableAllocator::cacheInfo(device, &largest)`.
unsafe extern "C" fn cache_info(_this: *mut c_void, device: i8, largest: *mut usize) {
    let found = catch_unwind(|| largest_block(i32::from(device)));
    if !largest.is_null() {
        // SAFETY: torch passes the address of a size_t.
        unsafe { *largest = found.ok().flatten().unwrap_or(0) as usize };
    }
}

/// Makes torch's pluggable allocator answer `cacheInfo`. 1: it does now; 0: this torch has no such slot, nothing was changed.
#[no_mangle]
pub extern "C" fn millpond_torch_answer_cache_info() -> i32 {
    i32::from(catch_unwind(answer).unwrap_or(false))
}

fn answer() -> bool {
    let vtable = symbol(c"_ZTVN5torch4cuda22CUDAPluggableAllocator22CUDAPluggableAllocatorE");
    // int until torch 2.2, int8_t since.
    let refusals = [
        symbol(c"_ZN5torch4cuda22CUDAPluggableAllocator22CUDAPluggableAllocator9cacheInfoEaPm"),
        symbol(c"_ZN5torch4cuda22CUDAPluggableAllocator22CUDAPluggableAllocator9cacheInfoEiPm"),
    ];
    if vtable.is_null() || refusals.iter().all(|refusal| refusal.is_null()) {
        return false;
    }
    let slots = vtable.cast::<*mut c_void>();
    let ours = cache_info as *mut c_void;
    // SAFETY: the vtable's own size bounds the search: dladdr1 tells it.
    let Some(count) = (unsafe { size_of_object(vtable) }).map(|bytes| (bytes / size_of::<*mut c_void>()).min(SLOTS)) else { return false };
    for n in 0..count {
        // SAFETY: n is within the vtable.
        let slot = unsafe { slots.add(n) };
        // SAFETY: as above.
        let held = unsafe { slot.read() };
        if held == ours {
            return true;
        }
        if !held.is_null() && refusals.contains(&held) {
            // SAFETY: the slot lies in a page of torch's data that was made read-only after relocation; it is made writable
            // for one aligned store, before torch has an allocator of this class in use.
            return unsafe { store(slot, ours) };
        }
    }
    false
}

/// The size of the exported object at an address.
unsafe fn size_of_object(address: *mut c_void) -> Option<usize> {
    const RTLD_DL_SYMENT: i32 = 1;
    let mut info = std::mem::MaybeUninit::<libc::Dl_info>::zeroed();
    let mut entry: *const libc::Elf64_Sym = std::ptr::null();
    extern "C" {
        fn dladdr1(addr: *const c_void, info: *mut libc::Dl_info, extra: *mut *const libc::Elf64_Sym, flags: i32) -> i32;
    }
    // SAFETY: glibc fills both; the entry points into the library's symbol table, which stays mapped.
    unsafe {
        (dladdr1(address, info.as_mut_ptr(), &mut entry, RTLD_DL_SYMENT) != 0).then_some(())?;
        Some(entry.as_ref()?.st_size as usize)
    }
}

unsafe fn store(slot: *mut *mut c_void, value: *mut c_void) -> bool {
    // SAFETY: sysconf has no preconditions.
    let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as usize;
    let start = (slot as usize & !(page - 1)) as *mut c_void;
    // SAFETY: the slot's own page, mapped by the loader; by the caller's word it may be changed.
    unsafe {
        if libc::mprotect(start, page, libc::PROT_READ | libc::PROT_WRITE) != 0 {
            return false;
        }
        slot.write(value);
        libc::mprotect(start, page, libc::PROT_READ);
    }
    true
}
