//! Memory of others' making, asked for by several threads at once: no two of them are in the driver's sharing calls together. A pool that is
//! exported while it is torn down has crashed the driver (cuda-python#2784), and so has an export beside a free.
//!
//! Here the two meet in `foreign.rs` alone, whose table's lock is held over each call. No pool is ever destroyed, and a chunk's export and
//! release (`owner/estate.rs`, `heap/local.rs`) are one thread's, of memory that nobody else has seen.
#![allow(unsafe_code, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::ffi::CString;
use std::os::fd::{FromRawFd, OwnedFd};
use std::path::Path;
use std::process::Command;
use std::thread;

use millpond_allocator::driver::cuda::CudaPlatform;
use millpond_allocator::driver::{DeviceId, Platform};
use millpond_torch::foreign::{close, export, open, pool_fd, pool_import, swap, Kind};

/// As in stub.c.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct Meetings {
    calls: i32,
    met: i32,
    twice: i32,
}

/// Loads a stub of the driver library, under the name that the library looks for. `None` where there is no C compiler.
fn load_stub() -> Option<*mut libc::c_void> {
    let folder = std::env::temp_dir().join(format!("millpond-foreign-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let path = folder.join("libcuda.so.1");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../allocator/src/driver/cuda/stub.c");
    let flags = ["-shared", "-fPIC", "-O1", "-w", "-Wl,-soname,libcuda.so.1", "-DSHARING=1", "-DMEETS=1", "-o"];
    let Ok(output) = Command::new("cc").args(flags).arg(&path).arg(source).output() else {
        eprintln!("skipped, not run: no C compiler for the stub driver");
        return None;
    };
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let name = CString::new(path.to_str().unwrap()).unwrap();
    // SAFETY: a terminated path; the stub has no initialisers.
    let library = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    assert!(!library.is_null());
    std::fs::remove_dir_all(&folder).unwrap();
    Some(library)
}

fn meetings(library: *mut libc::c_void) -> Meetings {
    // SAFETY: the library is never closed, and this is the function's type; no thread is in the stub when it is asked.
    unsafe {
        let symbol = libc::dlsym(library, c"stub_meetings".as_ptr());
        let meetings = std::mem::transmute::<*mut libc::c_void, extern "C" fn() -> *const Meetings>(symbol);
        *meetings()
    }
}

/// Runs these at once, each so many times.
fn at_once(times: u32, acts: &[&(dyn Fn() + Sync)]) {
    thread::scope(|scope| {
        for act in acts {
            scope.spawn(move || (0..times).for_each(|_| act()));
        }
    });
}

#[test]
fn export_and_close_never_reach_the_driver_together() {
    let Some(library) = load_stub() else { return };
    // The stub's addresses: 0x8000 is plain memory, 0x9000 the pool's; the peer is this process itself.
    let (device, peer) = (0, 7);
    swap(device).unwrap();
    let fd = pool_fd(device).unwrap()["fd"].as_i64().unwrap() as i32;
    // SAFETY: made for its caller.
    let _owned = unsafe { OwnedFd::from_raw_fd(fd) };
    pool_import(device, peer, 0, fd).unwrap();
    let token = |address| export(device, address).unwrap()["token"].as_str().unwrap().to_owned();
    let (plain, pooled) = (token(0x8000), token(0x9000));
    let use_pooled = || {
        assert_eq!(open(device, peer, Kind::Pool, &pooled, 0).unwrap()["address"], 0xc000);
        close(device, peer, Kind::Pool, &pooled).unwrap();
    };
    let use_plain = || {
        assert_eq!(open(device, peer, Kind::Ipc, &plain, 0).unwrap()["address"], 0xa000);
        close(device, peer, Kind::Ipc, &plain).unwrap();
    };
    let give = || {
        assert_eq!((token(0x9000), token(0x8000)), (pooled.clone(), plain.clone()));
    };
    at_once(40, &[&give, &give, &use_pooled, &use_pooled, &use_plain]);
    let seen = meetings(library);
    assert!(seen.calls > 5 * 40, "{seen:?}");
    assert_eq!((seen.met, seen.twice), (0, 0), "two threads met in the driver, or a token was mapped twice");
    assert!(close(device, peer, Kind::Pool, &pooled).is_err(), "every opening was ended");

    // The checker is checked: without that lock they meet.
    let driver = CudaPlatform::load().unwrap().open(DeviceId::from_uuid([0xb0; 16])).unwrap();
    driver.attach_context().unwrap();
    let sharing = driver.sharing().unwrap();
    let bare = || assert_eq!(sharing.ipc_export(0x8000).unwrap(), [0x8f; 64]);
    at_once(100, &[&bare, &bare]);
    assert!(meetings(library).met > 0, "the stub sees no meeting");
}
