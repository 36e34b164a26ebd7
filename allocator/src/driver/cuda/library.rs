//! Which file is the driver library.
#![allow(unsafe_code)]

use std::error::Error as _;
use std::ffi::{c_void, CStr, OsStr};
use std::path::{Path, PathBuf};

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

use crate::driver::{DriverError, Result};

/// The name that a driver installs under; a toolkit's stub for linking is called `libcuda.so` alone.
const SONAME: &str = "libcuda.so.1";

/// Where to look, in order. The loader's own search comes first; the rest are places that images forget to tell it of.
const CANDIDATES: [&str; 8] = [
    SONAME,
    "libcuda.so",
    "/usr/lib/wsl/lib/libcuda.so.1",
    "/usr/local/nvidia/lib64/libcuda.so.1",
    "/usr/lib/x86_64-linux-gnu/libcuda.so.1",
    "/usr/lib/aarch64-linux-gnu/libcuda.so.1",
    "/usr/lib64/libcuda.so.1",
    "/run/opengl-driver/lib/libcuda.so.1",
];

/// The driver library of this machine: the copy that the process holds already, else the first candidate that loads.
pub(super) fn find() -> Result<Library> {
    match open(OsStr::new(SONAME), libc::RTLD_NOLOAD) {
        Ok(library) => Ok(library),
        Err(_) => first(&CANDIDATES),
    }
}

/// The first of these that loads.
pub(super) fn first<P: AsRef<OsStr>>(candidates: &[P]) -> Result<Library> {
    let mut tried = Vec::new();
    for candidate in candidates {
        let name = candidate.as_ref();
        match open(name, 0) {
            Ok(library) => return Ok(library),
            Err(error) => tried.push(format!("{} ({error})", Path::new(name).display())),
        }
    }
    Err(DriverError::Unavailable { tried: tried.join("; ") })
}

fn open(name: &OsStr, flags: i32) -> std::result::Result<Library, String> {
    // SAFETY: loading runs the library's initialisers, and libcuda's neither call back into us nor expect a thread of their own.
    unsafe { Library::open(Some(name), RTLD_NOW | RTLD_LOCAL | flags) }
        .map_err(|error| error.source().map_or_else(|| error.to_string(), ToString::to_string))
}

/// The file that a symbol was found in.
pub(super) fn file_of(symbol: *const c_void) -> Option<PathBuf> {
    use std::os::unix::ffi::OsStrExt;

    let mut info = std::mem::MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: dladdr only compares the address with the ranges of loaded objects, and writes to `info`.
    let found = unsafe { libc::dladdr(symbol, info.as_mut_ptr()) };
    // SAFETY: all-zero bytes are a valid Dl_info (four pointers), whether dladdr wrote to it or not.
    let info = unsafe { info.assume_init() };
    if found == 0 || info.dli_fname.is_null() {
        return None;
    }
    // SAFETY: dladdr's file name is a C string that lives as long as the object is loaded; it is copied here.
    let name = unsafe { CStr::from_ptr(info.dli_fname) };
    Some(PathBuf::from(OsStr::from_bytes(name.to_bytes())))
}
