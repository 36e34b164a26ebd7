//! CUDA IPC, pools and dma-buf against the stub, which checks every argument and structure.

use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;

use rustix::io::{fcntl_getfd, FdFlags};

use super::stub::{stub, Stub};
use super::{CudaDriver, CudaPlatform, HandleKind};
use crate::driver::{CuResult, Driver, DriverError, Platform, PointerInfo, Pool, PoolUse, Sharing};

/// The first device, its context attached.
fn first(stub: &Stub) -> Arc<dyn Driver> {
    let platform: CudaPlatform = stub.load().unwrap();
    let id = platform.devices().unwrap()[0].id;
    let driver = platform.open(id).unwrap();
    driver.attach_context().unwrap();
    driver
}

fn refused<T: std::fmt::Debug>(answer: Result<T, DriverError>) -> CuResult {
    answer.unwrap_err().result().unwrap()
}

#[test]
fn ipc_takes_plain_memory_only() {
    let stub = stub!("-DSHARING=1");
    let driver = first(&stub);
    let sharing = driver.sharing().unwrap();
    let token = sharing.ipc_export(0x8000).unwrap();
    assert_eq!(token, [0x8f; 64]);
    assert_eq!(refused(sharing.ipc_export(0x9000)), CuResult::INVALID_VALUE);
    assert_eq!(sharing.ipc_open(&token).unwrap(), 0xa000);
    assert_eq!(refused(sharing.ipc_open(&[1; 64])), CuResult::INVALID_VALUE);
    sharing.ipc_close(0xa000).unwrap();
}

#[test]
fn a_pool_is_set_up_as_torch_sets_up_the_default_one_and_its_handle_goes_first() {
    let stub = stub!("-DSHARING=9");
    let driver = first(&stub);
    let sharing = driver.sharing().unwrap();
    let pool = sharing.pool_create(u64::MAX).unwrap();
    assert_eq!((stub.counts().grants, stub.counts().last_id), (1, 1), "the peer has access");
    sharing.pool_make_current(pool).unwrap();
    assert_eq!(refused(sharing.pool_export_pointer(0x9000)), CuResult::INVALID_VALUE, "before the handle");
    let fd = sharing.pool_export(pool).unwrap();
    assert!(fcntl_getfd(&fd).unwrap().contains(FdFlags::CLOEXEC));
    let token = sharing.pool_export_pointer(0x9000).unwrap();
    assert_eq!(sharing.pool_of(0x9000).unwrap(), Some(pool));
    assert_eq!((sharing.pool_of(0x8000).unwrap(), sharing.pool_of(0).unwrap()), (None, None));
    assert_eq!(sharing.range_of(0x9010).unwrap(), Some(PointerInfo { base: 0x9000, bytes: 0x3000 }));
    assert_eq!(sharing.range_of(0).unwrap(), None);
    let there = sharing.pool_import(fd.as_fd()).unwrap();
    assert_eq!(stub.counts().import_fd, fd.as_raw_fd());
    assert_eq!(sharing.pool_import_pointer(there, &token).unwrap(), 0xc000);
    sharing.pool_close_pointer(0xc000).unwrap();
    assert_eq!(sharing.pool_use(Pool(0xb001)).unwrap(), PoolUse { reserved: 50, reserved_peak: 60, used: 70, used_peak: 80 });
}

#[test]
fn a_dma_buf_is_of_whole_pages() {
    let stub = stub!("-DSHARING=1");
    let driver = first(&stub);
    let sharing = driver.sharing().unwrap();
    assert!(sharing.dma_buf(0x10000, 0x1000).is_ok());
    assert_eq!(refused(sharing.dma_buf(0x10200, 0x1000)), CuResult::INVALID_VALUE);
    assert_eq!(refused(sharing.dma_buf(0x10000, 0x200)), CuResult::INVALID_VALUE);
}

#[test]
fn what_a_driver_has_not_is_not_supported() {
    let stub = stub!();
    let driver = first(&stub);
    let sharing = driver.sharing().unwrap();
    assert_eq!(refused(sharing.ipc_export(0x8000)), CuResult::NOT_SUPPORTED);
    assert_eq!(refused(sharing.pool_create(0)), CuResult::NOT_SUPPORTED);
    assert_eq!(refused(sharing.dma_buf(0x10000, 0x1000)), CuResult::NOT_SUPPORTED);
    let stub = stub!("-DSHARING=8");
    let driver = first(&stub);
    assert_eq!(refused(driver.sharing().unwrap().pool_create(0)), CuResult::NOT_SUPPORTED, "fabric handles only");
}

#[test]
fn other_forms_of_handles_are_refused_with_what_is_missing() {
    let stub = stub!();
    for (kind, lack) in [(HandleKind::Win32, "DuplicateHandle"), (HandleKind::Fabric, "IMEX")] {
        let platform = stub.load().unwrap().with_handles(kind);
        let error = platform.open(platform.devices().unwrap()[0].id).unwrap_err();
        assert!(matches!(&error, DriverError::Unsupported { missing, .. } if missing.contains(lack)), "{error}");
    }
    let platform = stub.load().unwrap().with_handles(HandleKind::PosixFd);
    assert!(platform.open(platform.devices().unwrap()[0].id).is_ok());
}

/// The seam's default: a device that has none of it says so.
#[test]
fn the_host_has_none_of_it() {
    let platform = crate::driver::host::HostPlatform::new(crate::driver::host::HostConfig::default());
    assert!(platform.driver(0).unwrap().sharing().is_none());
    fn is_sharing<T: Sharing>() {}
    is_sharing::<CudaDriver>();
}
