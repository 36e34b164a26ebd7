//! The stub of the driver library, compiled from `stub.c` with the settings that a test names.
#![allow(unsafe_code)]

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::Arc;

use libloading::os::unix::Library;

use super::{CudaDriver, CudaPlatform};
use crate::driver::{DeviceId, Driver, DriverError};

/// As in stub.c.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(super) struct Counts {
    pub(super) calls: u64,
    pub(super) pushes: u64,
    pub(super) pops: u64,
    pub(super) retains: u64,
    pub(super) ids: u64,
    pub(super) waits: u64,
    pub(super) last_value: u64,
    pub(super) writes_v2: i32,
    pub(super) grants: i32,
    pub(super) last_id: i32,
    pub(super) import_fd: i32,
}

pub(super) struct Stub {
    pub(super) folder: PathBuf,
    pub(super) library: Library,
}

impl Stub {
    /// Compiles a stub with these settings; `None`, and a word about it, where there is no C compiler.
    pub(super) fn build(settings: &[&str]) -> Option<Self> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let folder = std::env::temp_dir().join(format!("millpond-stub-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let path = folder.join("libcuda.so.1");
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/driver/cuda/stub.c");
        let compiled = Command::new("cc").args(["-shared", "-fPIC", "-O1", "-w", "-o"]).arg(&path).arg(source).args(settings).output();
        match compiled {
            Err(error) => {
                eprintln!("skipped, not run: no C compiler for the stub driver (cc: {error})");
                None
            }
            Ok(output) => {
                assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
                // SAFETY: the stub has no initialisers.
                let library = unsafe { Library::open(Some(&path), libc::RTLD_NOW) }.unwrap();
                Some(Self { folder, library })
            }
        }
    }

    pub(super) fn path(&self) -> PathBuf {
        self.folder.join("libcuda.so.1")
    }

    pub(super) fn load(&self) -> Result<CudaPlatform, DriverError> {
        CudaPlatform::load_from(&[self.path()])
    }

    /// A driver of the first device, attached.
    pub(super) fn attached(&self) -> Arc<CudaDriver> {
        let driver = self.load().unwrap().open_cuda(DeviceId::from_uuid([0xb0; 16])).unwrap();
        driver.attach_context().unwrap();
        driver
    }

    pub(super) fn counts(&self) -> Counts {
        // SAFETY: the stub's prototype; it returns a static.
        unsafe { *self.library.get::<extern "C" fn() -> *const Counts>("stub_counts").unwrap()() }
    }

    pub(super) fn number(&self, name: &str) -> i32 {
        // SAFETY: the prototype of stub_depth and stub_mode.
        unsafe { self.library.get::<extern "C" fn() -> i32>(name).unwrap()() }
    }

    pub(super) fn push(&self, context: u64) {
        // SAFETY: the stub's prototype.
        unsafe { self.library.get::<extern "C" fn(u64)>("stub_push").unwrap()(context) }
    }

    pub(super) fn pop(&self) {
        // SAFETY: the stub's prototype.
        unsafe { self.library.get::<extern "C" fn()>("stub_pop").unwrap()() }
    }
}

impl Drop for Stub {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

macro_rules! stub {
    ($($setting:literal),*) => {
        match Stub::build(&[$($setting),*]) {
            Some(stub) => stub,
            None => return,
        }
    };
}

pub(super) use stub;
