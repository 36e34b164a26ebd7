//! What the system says of a client's process.
#![allow(unsafe_code)] // SO_PEERPIDFD has no safe wrapper yet, that of SO_PEERCRED knows no pid 0

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;

use rustix::io::Errno;
use rustix::process::{pidfd_open, Pid, PidfdFlags};

/// Linux 6.5; the same on every architecture that CUDA runs on.
const SO_PEERPIDFD: libc::c_int = 77;

/// Who connected, as the kernel recorded it at that time.
#[derive(Debug, Clone, Copy)]
pub(super) struct Credentials {
    pub(super) uid: u32,
    pub(super) pid: u32,
}

/// `pid` is 0 for a process that has no number here: another container's.
pub(super) fn credentials(socket: BorrowedFd<'_>) -> Result<Credentials, Errno> {
    let mut found = libc::ucred { pid: 0, uid: u32::MAX, gid: u32::MAX };
    let mut size = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: the socket is open, and the kernel writes at most `size` bytes to `found`. Not rustix: it has no pid 0.
    let result = unsafe {
        libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, libc::SO_PEERCRED, std::ptr::from_mut(&mut found).cast(), &mut size)
    };
    if result != 0 {
        return Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::INVAL));
    }
    Ok(Credentials { uid: found.uid, pid: found.pid.unsigned_abs() })
}

/// A pidfd of the process that connected, as the kernel holds it: no process can be taken for another.
pub(super) fn peer_pidfd(socket: BorrowedFd<'_>) -> Option<OwnedFd> {
    let mut fd: libc::c_int = -1;
    let mut size = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: the socket is open, and the kernel writes at most `size` bytes to `fd`.
    let result =
        unsafe { libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, SO_PEERPIDFD, std::ptr::from_mut(&mut fd).cast(), &mut size) };
    // SAFETY: on success the kernel has installed a new descriptor (close-on-exec), which is ours alone.
    (result == 0 && fd >= 0).then(|| unsafe { OwnedFd::from_raw_fd(fd) })
}

/// A pidfd of a process by its id.
pub(crate) fn pidfd_of(pid: u32) -> Result<OwnedFd, Errno> {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or(Errno::SRCH)?;
    pidfd_open(pid, PidfdFlags::empty())
}

/// The process that a descriptor is a pidfd of: `None` for another kind of file, `Some(0)` for one that cannot be seen from here.
pub(crate) fn process_of(fd: impl AsFd) -> Option<u32> {
    let text = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", fd.as_fd().as_raw_fd())).ok()?;
    let pid: i64 = text.lines().find_map(|line| line.strip_prefix("Pid:"))?.trim().parse().ok()?;
    Some(u32::try_from(pid).unwrap_or(0))
}

/// The inode of this process's PID namespace: two that live at a time never have the same.
pub(crate) fn pid_namespace() -> Option<u64> {
    Some(std::fs::metadata("/proc/self/ns/pid").ok()?.ino())
}

/// What `/proc/PID/stat` says.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Stat {
    /// `R`, `S`, `T` …
    pub(super) state: u8,
    /// When it began, in clock ticks since boot.
    pub(crate) start_time: u64,
}

pub(crate) fn stat(pid: u32) -> Option<Stat> {
    parse_stat(&std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
}

fn parse_stat(text: &str) -> Option<Stat> {
    // The name may hold anything, brackets and spaces too.
    let (_, rest) = text.rsplit_once(')')?;
    let mut fields = rest.split_ascii_whitespace();
    let state = *fields.next()?.as_bytes().first()?;
    Some(Stat { state, start_time: fields.nth(18)?.parse().ok()? })
}

impl Stat {
    pub(super) const fn is_stopped(self) -> bool {
        matches!(self.state, b'T' | b't')
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_with_brackets_hides_nothing() {
        let text = "7 (a) T (b) S 1 7 7 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 987654 1 2";
        assert_eq!(parse_stat(text), Some(Stat { state: b'S', start_time: 987_654 }));
        assert!(stat(std::process::id()).unwrap().start_time > 0);
    }

    #[test]
    fn a_pidfd_is_told_from_other_files() {
        let own = pidfd_of(std::process::id()).unwrap();
        assert_eq!(process_of(&own), Some(std::process::id()));
        assert_eq!(process_of(std::fs::File::open("/").unwrap()), None);
    }
}
