//! Signals as a descriptor.
#![allow(unsafe_code)] // signal masks and signalfd have no safe wrapper here

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{FromRawFd, OwnedFd};

/// Blocks these signals in this thread, and in threads that it makes later; the descriptor is readable when one has come.
pub(crate) fn as_descriptor(signals: &[libc::c_int]) -> io::Result<OwnedFd> {
    let set = block(signals)?;
    // SAFETY: an initialised set; a new descriptor is asked for.
    let fd = unsafe { libc::signalfd(-1, &set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: signalfd has just made it, and nobody else has it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Blocks these signals in this thread, and in threads that it makes later.
pub(crate) fn block(signals: &[libc::c_int]) -> io::Result<libc::sigset_t> {
    let mut set = MaybeUninit::uninit();
    // SAFETY: sigemptyset initialises the set that it is given.
    let mut set = unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        set.assume_init()
    };
    for signal in signals {
        // SAFETY: an initialised set.
        unsafe { libc::sigaddset(&mut set, *signal) };
    }
    // SAFETY: an initialised set; the old mask is not asked for.
    match unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &set, std::ptr::null_mut()) } {
        0 => Ok(set),
        error => Err(io::Error::from_raw_os_error(error)),
    }
}
