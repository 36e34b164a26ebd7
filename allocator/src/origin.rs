//! Whether this is still the process that made something.
//!
//! A forked child inherits a driver's or a client's state and must not use it. The kernel marks the child: one page is wiped on fork
//! (`MADV_WIPEONFORK`), so that the question costs one load, however the child was made.
#![allow(unsafe_code)]

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::mm::{madvise, mmap_anonymous, munmap, Advice, MapFlags, ProtFlags};
use rustix::process::{getpid, Pid};

const PAGE: usize = 4096;
const HERE: u32 = 1;

/// The process in which it was made.
#[derive(Debug)]
pub struct Origin {
    /// Holds [`HERE`], and zero in a child. `None` where the kernel cannot wipe pages.
    mark: Option<NonNull<AtomicU32>>,
    pid: Pid,
}

// SAFETY: the page is this value's own until it is dropped, and is only touched through an atomic.
unsafe impl Send for Origin {}
// SAFETY: as for Send.
unsafe impl Sync for Origin {}

impl Origin {
    /// This process.
    #[must_use]
    pub fn here() -> Self {
        Self { mark: mark(), pid: getpid() }
    }

    /// Whether this is the same process still.
    #[must_use]
    pub fn is_here(&self) -> bool {
        match self.mark {
            // SAFETY: the page lives until `self` is dropped, is aligned, and was mapped readable.
            Some(mark) => unsafe { mark.as_ref() }.load(Ordering::Relaxed) == HERE,
            None => getpid() == self.pid,
        }
    }
}

impl Drop for Origin {
    fn drop(&mut self) {
        if let Some(mark) = self.mark {
            // SAFETY: the page came from `mark()`, and `self` was the only one to know of it.
            let _ = unsafe { munmap(mark.as_ptr().cast(), PAGE) };
        }
    }
}

fn mark() -> Option<NonNull<AtomicU32>> {
    // SAFETY: a new anonymous mapping, at an address of the kernel's choice.
    let page = unsafe { mmap_anonymous(std::ptr::null_mut(), PAGE, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE) }.ok()?;
    // SAFETY: the page was mapped just now and nothing else knows of it.
    if unsafe { madvise(page, PAGE, Advice::LinuxWipeOnFork) }.is_err() {
        // SAFETY: as above.
        let _ = unsafe { munmap(page, PAGE) };
        return None;
    }
    let mark = NonNull::new(page.cast::<AtomicU32>())?;
    // SAFETY: the page is mapped, zero (a valid AtomicU32) and aligned.
    unsafe { mark.as_ref() }.store(HERE, Ordering::Relaxed);
    Some(mark)
}
