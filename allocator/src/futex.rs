//! Sleeping on a word of shared memory until another process changes it. A GPU that writes it wakes nobody, so no sleep is long.
#![allow(unsafe_code)]

use std::time::Duration;

/// Sleeps while the low half of the word at an address is as it was seen, and no longer than this.
pub(crate) fn nap(word: u64, seen: u64, at_most: Duration) {
    let limit = libc::timespec {
        tv_sec: libc::time_t::try_from(at_most.as_secs()).unwrap_or(libc::time_t::MAX),
        tv_nsec: at_most.subsec_nanos().into(),
    };
    call(word, libc::FUTEX_WAIT, seen as u32, Some(&limit));
}

/// Wakes whoever sleeps on the word, in any process.
pub(crate) fn wake(word: u64) {
    call(word, libc::FUTEX_WAKE, i32::MAX as u32, None);
}

fn call(word: u64, operation: libc::c_int, value: u32, limit: Option<&libc::timespec>) {
    let low = if cfg!(target_endian = "big") { word + 4 } else { word };
    let limit = limit.map_or(std::ptr::null(), std::ptr::from_ref);
    // SAFETY: a futex call takes any address: one that is not mapped is answered with EFAULT. The time limit outlives the call.
    unsafe { libc::syscall(libc::SYS_futex, low, operation, value, limit, 0_usize, 0_u32) };
}
