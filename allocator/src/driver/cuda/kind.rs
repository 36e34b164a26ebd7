//! In what form memory is shared: a parameter of the platform, since systems differ. One form works; the others say what they lack.

use std::fmt;
use std::str::FromStr;

use cudarc::driver::sys::{CUdevice_attribute as Attribute, CUmemAllocationHandleType};

/// The form of a handle that another process opens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum HandleKind {
    /// A file descriptor, by `SCM_RIGHTS`: Linux.
    #[default]
    PosixFd,
    /// An NT handle: Windows.
    Win32,
    /// Sixty-four bytes that go anywhere, between machines too: NVLink fabrics.
    Fabric,
}

impl HandleKind {
    /// Every form.
    pub const ALL: [Self; 3] = [Self::PosixFd, Self::Win32, Self::Fabric];

    /// Its name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::PosixFd => "posix_fd",
            Self::Win32 => "win32",
            Self::Fabric => "fabric",
        }
    }

    /// What millpond lacks to share memory in this form; `None` where it lacks nothing.
    #[must_use]
    pub const fn lacks(self) -> Option<&'static str> {
        match self {
            Self::PosixFd => None,
            Self::Win32 => Some(
                "win32 handles: it would need them duplicated into the peer (DuplicateHandle) where descriptors go by SCM_RIGHTS, named \
                 pipes for its sockets, section objects for its control memory, process handles for pidfds, and security attributes at \
                 cuMemCreate",
            ),
            Self::Fabric => Some(
                "fabric handles: they are bytes, and its wire carries descriptors; the process also needs an IMEX channel \
                 (/dev/nvidia-caps-imex-channels)",
            ),
        }
    }

    /// What the driver calls it.
    pub(super) const fn code(self) -> CUmemAllocationHandleType {
        match self {
            Self::PosixFd => CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
            Self::Win32 => CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_WIN32,
            Self::Fabric => CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_FABRIC,
        }
    }

    /// What a device says of it.
    pub(super) const fn attribute(self) -> Attribute {
        match self {
            Self::PosixFd => Attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
            Self::Win32 => Attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_WIN32_HANDLE_SUPPORTED,
            Self::Fabric => Attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED,
        }
    }
}

impl fmt::Display for HandleKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for HandleKind {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|kind| kind.name() == text);
        found.ok_or_else(|| format!("{text:?} is no kind of handle: expected posix_fd, win32 or fabric"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_and_codes_are_the_drivers() {
        for (kind, code, attribute) in [(HandleKind::PosixFd, 1, 103), (HandleKind::Win32, 2, 104), (HandleKind::Fabric, 8, 128)] {
            assert_eq!(kind.to_string().parse(), Ok(kind));
            assert_eq!((kind.code().0, kind.attribute() as u32), (code, attribute));
        }
        assert_eq!("wind32".parse::<HandleKind>().unwrap_err(), "\"wind32\" is no kind of handle: expected posix_fd, win32 or fabric");
        assert!(HandleKind::default().lacks().is_none() && HandleKind::Win32.lacks().is_some() && HandleKind::Fabric.lacks().is_some());
    }
}
