//! Memory that is not the arena's: CUDA IPC, pools, dma-buf. Each call is optional in the driver's table.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_void};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::null_mut;

use cudarc::driver::sys::{
    CUdevice_attribute as Attribute, CUipcMemHandle, CUmemAccessDesc, CUmemAccess_flags, CUmemAllocationHandleType, CUmemAllocationType,
    CUmemPoolProps, CUmemPool_attribute as PoolAttribute, CUmemRangeHandleType, CUmemoryPool, CUpointer_attribute as PointerAttribute,
};
use rustix::io::{fcntl_getfd, fcntl_setfd, FdFlags};

use super::context::Relaxed;
use super::driver::{invalid, raw, CudaDriver};
use super::survey::{attribute_of, location};
use crate::driver::{Addr, CuResult, Driver, DriverError, PointerInfo, Pool, PoolUse, Result, Sharing, Token};

const POSIX_FD: u32 = CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR.0;
/// `CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`, the only flag that there is.
const LAZY_PEERS: u32 = 1;

impl Sharing for CudaDriver {
    fn ipc_export(&self, addr: Addr) -> Result<Token> {
        let _current = self.context.enter("cuIpcGetMemHandle")?;
        let _mode = Relaxed::enter(&self.api);
        let mut handle = CUipcMemHandle { reserved: [0; 64] };
        // SAFETY: the driver writes one handle, and looks the address up without touching it.
        unsafe { self.api.cuIpcGetMemHandle(&mut handle, addr) }?;
        Ok(handle.reserved.map(|byte| byte as u8))
    }

    fn ipc_open(&self, token: &Token) -> Result<Addr> {
        let _current = self.context.enter("cuIpcOpenMemHandle")?;
        let _mode = Relaxed::enter(&self.api);
        let handle = CUipcMemHandle { reserved: token.map(|byte| byte as _) };
        let mut addr = 0;
        // SAFETY: the driver writes one address, and checks the handle, which it is passed by value.
        unsafe { self.api.cuIpcOpenMemHandle(&mut addr, handle, LAZY_PEERS) }?;
        Ok(addr)
    }

    fn ipc_close(&self, addr: Addr) -> Result<()> {
        let _current = self.context.enter("cuIpcCloseMemHandle")?;
        let _mode = Relaxed::enter(&self.api);
        // SAFETY: the driver looks the address up among those opened; that nothing reaches it is the trait's rule.
        unsafe { self.api.cuIpcCloseMemHandle(addr) }
    }

    fn pool_create(&self, release_threshold: u64) -> Result<Pool> {
        const CALL: &str = "cuMemPoolCreate";
        self.api.alive(CALL)?;
        let kinds = attribute_of(&self.api, Attribute::CU_DEVICE_ATTRIBUTE_MEMPOOL_SUPPORTED_HANDLE_TYPES, self.survey.device);
        if kinds as u32 & POSIX_FD == 0 {
            return Err(DriverError::Call { call: CALL, result: CuResult::NOT_SUPPORTED });
        }
        let _mode = Relaxed::enter(&self.api);
        // SAFETY: all zeroes are a valid CUmemPoolProps: integers, and a pointer that may be null.
        let mut props: CUmemPoolProps = unsafe { std::mem::zeroed() };
        props.allocType = CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
        props.handleTypes = CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
        props.location = location(self.survey.info.ordinal);
        let mut pool: CUmemoryPool = null_mut();
        // SAFETY: the driver reads one CUmemPoolProps, 88 bytes in every version, and writes one handle.
        unsafe { self.api.cuMemPoolCreate(&mut pool, &props) }?;
        for reuse in [
            PoolAttribute::CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES,
            PoolAttribute::CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC,
            PoolAttribute::CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES,
        ] {
            let mut on: c_int = 1;
            // SAFETY: these attributes are ints; the pool was made just now.
            unsafe { self.api.cuMemPoolSetAttribute(pool, reuse as u32, (&raw mut on).cast()) }?;
        }
        let mut threshold = release_threshold;
        let attribute = PoolAttribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD as u32;
        // SAFETY: this attribute is a 64-bit integer; the pool was made just now.
        unsafe { self.api.cuMemPoolSetAttribute(pool, attribute, (&raw mut threshold).cast()) }?;
        let flags = CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        let grants: Vec<_> = self.peers()?.iter().map(|ordinal| CUmemAccessDesc { location: location(*ordinal), flags }).collect();
        if !grants.is_empty() {
            // SAFETY: the driver reads `grants.len()` descriptions; the pool was made just now.
            unsafe { self.api.cuMemPoolSetAccess(pool, grants.as_ptr(), grants.len()) }?;
        }
        Ok(Pool(pool as u64))
    }

    fn pool_make_current(&self, pool: Pool) -> Result<()> {
        let _mode = Relaxed::enter(&self.api);
        // SAFETY: pools are passed alive: none is ever destroyed.
        unsafe { self.api.cuDeviceSetMemPool(self.survey.device, pool.0 as CUmemoryPool) }
    }

    fn pool_export(&self, pool: Pool) -> Result<OwnedFd> {
        const CALL: &str = "cuMemPoolExportToShareableHandle";
        let _mode = Relaxed::enter(&self.api);
        let mut fd: c_int = -1;
        // SAFETY: for this kind of handle the driver writes one int; pools are passed alive.
        unsafe { self.api.cuMemPoolExportToShareableHandle((&raw mut fd).cast(), pool.0 as CUmemoryPool, POSIX_FD, 0) }?;
        owned(CALL, fd)
    }

    fn pool_import(&self, fd: BorrowedFd<'_>) -> Result<Pool> {
        let _current = self.context.enter("cuMemPoolImportFromShareableHandle")?;
        let _mode = Relaxed::enter(&self.api);
        // The descriptor travels as a pointer's value.
        let shareable = fd.as_raw_fd() as usize as *mut c_void;
        let mut pool: CUmemoryPool = null_mut();
        // SAFETY: the driver writes one handle, and takes the descriptor by number, without keeping it.
        unsafe { self.api.cuMemPoolImportFromShareableHandle(&mut pool, shareable, POSIX_FD, 0) }?;
        Ok(Pool(pool as u64))
    }

    fn pool_of(&self, addr: Addr) -> Result<Option<Pool>> {
        let _current = self.context.enter("cuPointerGetAttribute")?;
        let mut pool: CUmemoryPool = null_mut();
        let attribute = PointerAttribute::CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE as u32;
        // SAFETY: this attribute is one handle; the driver looks the address up without touching it.
        match unsafe { self.api.cuPointerGetAttribute((&raw mut pool).cast(), attribute, addr) } {
            Ok(()) => Ok((!pool.is_null()).then_some(Pool(pool as u64))),
            Err(DriverError::Call { result: CuResult::INVALID_VALUE, .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn pool_export_pointer(&self, addr: Addr) -> Result<Token> {
        let _current = self.context.enter("cuMemPoolExportPointer")?;
        let _mode = Relaxed::enter(&self.api);
        let mut token: Token = [0; 64];
        // SAFETY: the driver writes 64 bytes, and looks the address up without touching it.
        unsafe { self.api.cuMemPoolExportPointer(token.as_mut_ptr().cast(), addr) }?;
        Ok(token)
    }

    fn pool_import_pointer(&self, pool: Pool, token: &Token) -> Result<Addr> {
        let _current = self.context.enter("cuMemPoolImportPointer")?;
        let _mode = Relaxed::enter(&self.api);
        let (mut token, mut addr) = (*token, 0);
        // SAFETY: the driver reads 64 bytes and writes one address; pools are passed alive.
        unsafe { self.api.cuMemPoolImportPointer(&mut addr, pool.0 as CUmemoryPool, token.as_mut_ptr().cast()) }?;
        Ok(addr)
    }

    fn pool_close_pointer(&self, addr: Addr) -> Result<()> {
        let _current = self.context.enter("cuMemFreeAsync")?;
        let _mode = Relaxed::enter(&self.api);
        // A stream of its own: the legacy stream would wait for every other one.
        let stream = self.stream_create()?;
        // SAFETY: the address came from `pool_import_pointer`; nothing reaches it, by the trait's rule.
        let freed = unsafe { self.api.cuMemFreeAsync(addr, raw(stream)) };
        let over = freed.and_then(|()| self.stream_synchronize(stream));
        self.stream_destroy(stream)?;
        over
    }

    fn range_of(&self, addr: Addr) -> Result<Option<PointerInfo>> {
        let _current = self.context.enter("cuPointerGetAttribute")?;
        let read = |attribute: PointerAttribute| {
            let mut value = 0_u64;
            // SAFETY: these attributes are 64 bits; the driver looks the address up without touching it.
            unsafe { self.api.cuPointerGetAttribute((&raw mut value).cast(), attribute as u32, addr) }.map(|()| value)
        };
        let found = read(PointerAttribute::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR)
            .and_then(|base| Ok((base, read(PointerAttribute::CU_POINTER_ATTRIBUTE_RANGE_SIZE)?)));
        match found {
            Ok((base, bytes)) => Ok((base != 0 && bytes != 0).then_some(PointerInfo { base, bytes })),
            Err(DriverError::Call { result: CuResult::INVALID_VALUE | CuResult::NOT_FOUND, .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn pool_use(&self, pool: Pool) -> Result<PoolUse> {
        let read = |attribute: PoolAttribute| {
            let mut value = 0_u64;
            // SAFETY: these attributes are 64-bit integers; pools are passed alive.
            unsafe { self.api.cuMemPoolGetAttribute(pool.0 as CUmemoryPool, attribute as u32, (&raw mut value).cast()) }.map(|()| value)
        };
        Ok(PoolUse {
            reserved: read(PoolAttribute::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)?,
            reserved_peak: read(PoolAttribute::CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH)?,
            used: read(PoolAttribute::CU_MEMPOOL_ATTR_USED_MEM_CURRENT)?,
            used_peak: read(PoolAttribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH)?,
        })
    }

    fn dma_buf(&self, addr: Addr, bytes: u64) -> Result<OwnedFd> {
        const CALL: &str = "cuMemGetHandleForAddressRange";
        let _current = self.context.enter(CALL)?;
        if attribute_of(&self.api, Attribute::CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED, self.survey.device) == 0 {
            return Err(DriverError::Call { call: CALL, result: CuResult::NOT_SUPPORTED });
        }
        let page = rustix::param::page_size() as u64;
        if bytes == 0 || !addr.is_multiple_of(page) || !bytes.is_multiple_of(page) {
            return Err(invalid(CALL));
        }
        let _mode = Relaxed::enter(&self.api);
        let mut fd: c_int = -1;
        let kind = CUmemRangeHandleType::CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD as u32;
        // SAFETY: for this kind of handle the driver writes one int, and checks the range.
        unsafe { self.api.cuMemGetHandleForAddressRange((&raw mut fd).cast(), addr, bytes as usize, kind, 0) }?;
        owned(CALL, fd)
    }
}

/// A descriptor that the driver opened for its caller, made close-on-exec.
fn owned(call: &'static str, fd: c_int) -> Result<OwnedFd> {
    if fd < 0 {
        return Err(DriverError::Call { call, result: CuResult::UNKNOWN });
    }
    // SAFETY: the driver opened it for its caller, who closes it.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    let flags = fcntl_getfd(&fd).and_then(|flags| fcntl_setfd(&fd, flags | FdFlags::CLOEXEC));
    flags.map_err(|_| DriverError::Call { call, result: CuResult::OPERATING_SYSTEM })?;
    Ok(fd)
}
