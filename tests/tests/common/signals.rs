//! What signals do to a worker: it ends from within whatever call it is in, or one of its threads stands still.

use std::io::Error;
use std::sync::atomic::{AtomicBool, Ordering};

static DEAF: AtomicBool = AtomicBool::new(false);
static STANDS: AtomicBool = AtomicBool::new(false);

extern "C" fn end(_: i32) {
    // SAFETY: no arguments but a number.
    unsafe { libc::_exit(3) }
}

extern "C" fn crash(_: i32) {
    // SAFETY: a new page, without access: the store is this process's end, and touches nothing.
    unsafe {
        let page = libc::mmap(std::ptr::null_mut(), 4096, libc::PROT_NONE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0);
        page.cast::<u8>().write_volatile(1);
    }
}

extern "C" fn stand(_: i32) {
    STANDS.store(true, Ordering::Release);
    while DEAF.load(Ordering::Acquire) {
        // SAFETY: no arguments but a number.
        unsafe { libc::usleep(500) };
    }
    STANDS.store(false, Ordering::Release);
}

/// `SIGUSR1`: `_exit`. `SIGUSR2`: a crash by `SIGSEGV`. A real-time signal: [`deafen`].
pub(super) fn install() {
    let handlers: [(i32, extern "C" fn(i32)); 3] = [(libc::SIGUSR1, end), (libc::SIGUSR2, crash), (libc::SIGRTMIN(), stand)];
    for (signal, handler) in handlers {
        // SAFETY: a handler of this program, which only makes system calls and touches atomics.
        unsafe { libc::signal(signal, handler as libc::sighandler_t) };
    }
}

/// Makes the thread of a name stand still; returns when it does.
pub(super) fn deafen(name: &str) -> Result<(), Error> {
    let named = |thread: &std::fs::DirEntry| std::fs::read_to_string(thread.path().join("comm")).is_ok_and(|comm| comm.trim() == name);
    let thread = std::fs::read_dir("/proc/self/task")?.flatten().find(named).ok_or(Error::other("no such thread"))?;
    let thread: i32 = thread.file_name().to_string_lossy().parse().map_err(Error::other)?;
    DEAF.store(true, Ordering::Release);
    // SAFETY: a thread of this process, and a signal that it handles.
    if unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), thread, libc::SIGRTMIN()) } != 0 {
        return Err(Error::last_os_error());
    }
    super::wait_for(|| STANDS.load(Ordering::Acquire)).then_some(()).ok_or(Error::other("it goes on"))
}

/// Lets it go on.
pub(super) fn hear() {
    DEAF.store(false, Ordering::Release);
}
