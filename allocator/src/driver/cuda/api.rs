//! The driver's functions, as a table that is filled at run time.
//!
//! Symbols are plain `dlsym` names: those with a per-thread default stream (`_ptsz`) have names of their own and are never
//! meant. A function returns a [`CuResult`], an integer: cudarc's `CUresult` is an enum, for which a code that it does not know
//! is undefined behaviour.
#![allow(unsafe_code, non_snake_case)]

use std::ffi::{c_char, c_int, c_uint, c_ulonglong, c_void, CStr};
use std::fmt;
use std::mem::ManuallyDrop;
use std::path::PathBuf;

use cudarc::driver::sys::{
    CUcontext, CUdevice, CUdeviceptr, CUevent, CUipcMemHandle, CUmemAccessDesc, CUmemAllocationProp, CUmemPoolProps, CUmemoryPool,
    CUstream, CUuuid,
};
use libloading::os::unix::Library;

use super::library;
use crate::driver::{CuResult, DriverError, Result};
use crate::origin::Origin;

/// Declares the table, how it is filled, and one method for each function, which refuses in a forked child and turns the
/// answer into a [`Result`]. Where a function has several symbols the first that exists is taken. An optional one that is
/// missing answers [`CuResult::NOT_SUPPORTED`].
macro_rules! table {
    (
        required { $(fn $name:ident($($arg:ident: $type:ty),*) = $($symbol:literal)|+;)* }
        optional { $(fn $opt_name:ident($($opt_arg:ident: $opt_type:ty),*) = $($opt_symbol:literal)|+;)* }
    ) => {
        /// The table.
        pub(super) struct Api {
            origin: Origin,
            file: Option<PathBuf>,
            /// Outside the table, whose methods ask it for names.
            error_name: Option<unsafe extern "C" fn(CuResult, *mut *const c_char) -> CuResult>,
            $(pub(super) $name: unsafe extern "C" fn($($type),*) -> CuResult,)*
            $(pub(super) $opt_name: Option<unsafe extern "C" fn($($opt_type),*) -> CuResult>,)*
        }

        impl Api {
            fn fill(library: &Library) -> Result<Self> {
                $(
                    // SAFETY: the signatures below are those of cuda.h for these symbols.
                    let $name: unsafe extern "C" fn($($type),*) -> CuResult = unsafe { required(library, &[$($symbol),+]) }?;
                )*
                $(
                    // SAFETY: as above.
                    let $opt_name: Option<unsafe extern "C" fn($($opt_type),*) -> CuResult> = unsafe { lookup(library, &[$($opt_symbol),+]) };
                )*
                Ok(Self { origin: Origin::here(), file: None, error_name: None, $($name,)* $($opt_name,)* })
            }

            $(
                /// # Safety
                /// Pointers are valid for what the driver reads and writes; handles are live.
                pub(super) unsafe fn $name(&self, $($arg: $type),*) -> Result<()> {
                    self.alive(stringify!($name))?;
                    // SAFETY: the caller keeps the function's contract.
                    self.check(stringify!($name), unsafe { (self.$name)($($arg),*) })
                }
            )*

            $(
                /// # Safety
                /// Pointers are valid for what the driver reads and writes; handles are live.
                pub(super) unsafe fn $opt_name(&self, $($opt_arg: $opt_type),*) -> Result<()> {
                    self.alive(stringify!($opt_name))?;
                    let Some(function) = self.$opt_name else {
                        return Err(DriverError::Call { call: stringify!($opt_name), result: CuResult::NOT_SUPPORTED });
                    };
                    // SAFETY: the caller keeps the function's contract.
                    self.check(stringify!($opt_name), unsafe { function($($opt_arg),*) })
                }
            )*
        }
    };
}

table! {
    required {
        fn cuInit(flags: c_uint) = "cuInit";
        fn cuDriverGetVersion(version: *mut c_int) = "cuDriverGetVersion";
        fn cuDeviceGetCount(count: *mut c_int) = "cuDeviceGetCount";
        fn cuDeviceGet(device: *mut CUdevice, ordinal: c_int) = "cuDeviceGet";
        fn cuDeviceGetName(name: *mut c_char, len: c_int, device: CUdevice) = "cuDeviceGetName";
        // With MIG, the second version answers with the instance's identity, the first with the whole GPU's.
        fn cuDeviceGetUuid(uuid: *mut CUuuid, device: CUdevice) = "cuDeviceGetUuid_v2" | "cuDeviceGetUuid";
        fn cuDeviceTotalMem(bytes: *mut usize, device: CUdevice) = "cuDeviceTotalMem_v2";
        fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_uint, device: CUdevice) = "cuDeviceGetAttribute";
        fn cuDeviceCanAccessPeer(can: *mut c_int, device: CUdevice, peer: CUdevice) = "cuDeviceCanAccessPeer";

        fn cuDevicePrimaryCtxRetain(context: *mut CUcontext, device: CUdevice) = "cuDevicePrimaryCtxRetain";
        fn cuCtxGetCurrent(context: *mut CUcontext) = "cuCtxGetCurrent";
        fn cuCtxPushCurrent(context: CUcontext) = "cuCtxPushCurrent_v2";
        fn cuCtxPopCurrent(context: *mut CUcontext) = "cuCtxPopCurrent_v2";
        fn cuThreadExchangeStreamCaptureMode(mode: *mut c_uint) = "cuThreadExchangeStreamCaptureMode";
        fn cuMemGetInfo(free: *mut usize, total: *mut usize) = "cuMemGetInfo_v2";

        fn cuMemGetAllocationGranularity(granularity: *mut usize, prop: *const CUmemAllocationProp, option: c_uint) = "cuMemGetAllocationGranularity";
        fn cuMemCreate(handle: *mut c_ulonglong, bytes: usize, prop: *const CUmemAllocationProp, flags: c_ulonglong) = "cuMemCreate";
        fn cuMemExportToShareableHandle(shareable: *mut c_void, handle: c_ulonglong, kind: c_uint, flags: c_ulonglong) = "cuMemExportToShareableHandle";
        fn cuMemImportFromShareableHandle(handle: *mut c_ulonglong, shareable: *mut c_void, kind: c_uint) = "cuMemImportFromShareableHandle";
        fn cuMemRelease(handle: c_ulonglong) = "cuMemRelease";
        fn cuMemAddressReserve(addr: *mut CUdeviceptr, bytes: usize, alignment: usize, hint: CUdeviceptr, flags: c_ulonglong) = "cuMemAddressReserve";
        fn cuMemAddressFree(addr: CUdeviceptr, bytes: usize) = "cuMemAddressFree";
        fn cuMemMap(addr: CUdeviceptr, bytes: usize, offset: usize, handle: c_ulonglong, flags: c_ulonglong) = "cuMemMap";
        fn cuMemUnmap(addr: CUdeviceptr, bytes: usize) = "cuMemUnmap";
        fn cuMemSetAccess(addr: CUdeviceptr, bytes: usize, access: *const CUmemAccessDesc, count: usize) = "cuMemSetAccess";
        fn cuMemGetAddressRange(base: *mut CUdeviceptr, bytes: *mut usize, addr: CUdeviceptr) = "cuMemGetAddressRange_v2";

        fn cuStreamCreate(stream: *mut CUstream, flags: c_uint) = "cuStreamCreate";
        fn cuStreamDestroy(stream: CUstream) = "cuStreamDestroy_v2";
        fn cuStreamGetId(stream: CUstream, id: *mut c_ulonglong) = "cuStreamGetId";
        fn cuStreamGetCtx(stream: CUstream, context: *mut CUcontext) = "cuStreamGetCtx";
        fn cuStreamSynchronize(stream: CUstream) = "cuStreamSynchronize";
        fn cuStreamQuery(stream: CUstream) = "cuStreamQuery";
        fn cuStreamIsCapturing(stream: CUstream, status: *mut c_uint) = "cuStreamIsCapturing";
        fn cuStreamWaitEvent(stream: CUstream, event: CUevent, flags: c_uint) = "cuStreamWaitEvent";
        fn cuMemcpyAsync(dst: CUdeviceptr, src: CUdeviceptr, bytes: usize, stream: CUstream) = "cuMemcpyAsync";
        fn cuMemsetD8Async(dst: CUdeviceptr, byte: u8, bytes: usize, stream: CUstream) = "cuMemsetD8Async";

        fn cuEventCreate(event: *mut CUevent, flags: c_uint) = "cuEventCreate";
        fn cuEventDestroy(event: CUevent) = "cuEventDestroy_v2";
        fn cuEventRecord(event: CUevent, stream: CUstream) = "cuEventRecord";
        fn cuEventQuery(event: CUevent) = "cuEventQuery";

        fn cuMemHostRegister(ptr: *mut c_void, bytes: usize, flags: c_uint) = "cuMemHostRegister_v2";
        fn cuMemHostUnregister(ptr: *mut c_void) = "cuMemHostUnregister";
        fn cuMemHostGetDevicePointer(addr: *mut CUdeviceptr, ptr: *mut c_void, flags: c_uint) = "cuMemHostGetDevicePointer_v2";
    }
    optional {
        // CUDA 12.5.
        fn cuCtxRecordEvent(context: CUcontext, event: CUevent) = "cuCtxRecordEvent";
        // The first version of these needs a setting of the kernel module on most machines; each has an attribute of its own.
        fn cuStreamWriteValue64_v2(stream: CUstream, addr: CUdeviceptr, value: u64, flags: c_uint) = "cuStreamWriteValue64_v2";
        fn cuStreamWaitValue64_v2(stream: CUstream, addr: CUdeviceptr, value: u64, flags: c_uint) = "cuStreamWaitValue64_v2";
        fn cuStreamWriteValue64(stream: CUstream, addr: CUdeviceptr, value: u64, flags: c_uint) = "cuStreamWriteValue64";
        fn cuStreamWaitValue64(stream: CUstream, addr: CUdeviceptr, value: u64, flags: c_uint) = "cuStreamWaitValue64";

        // Memory of others' making: see `sharing`.
        fn cuPointerGetAttribute(value: *mut c_void, attribute: c_uint, addr: CUdeviceptr) = "cuPointerGetAttribute";
        fn cuIpcGetMemHandle(handle: *mut CUipcMemHandle, addr: CUdeviceptr) = "cuIpcGetMemHandle";
        fn cuIpcOpenMemHandle(addr: *mut CUdeviceptr, handle: CUipcMemHandle, flags: c_uint) = "cuIpcOpenMemHandle_v2" | "cuIpcOpenMemHandle";
        fn cuIpcCloseMemHandle(addr: CUdeviceptr) = "cuIpcCloseMemHandle";
        fn cuMemPoolCreate(pool: *mut CUmemoryPool, props: *const CUmemPoolProps) = "cuMemPoolCreate";
        fn cuDeviceSetMemPool(device: CUdevice, pool: CUmemoryPool) = "cuDeviceSetMemPool";
        fn cuMemPoolSetAttribute(pool: CUmemoryPool, attribute: c_uint, value: *mut c_void) = "cuMemPoolSetAttribute";
        fn cuMemPoolGetAttribute(pool: CUmemoryPool, attribute: c_uint, value: *mut c_void) = "cuMemPoolGetAttribute";
        fn cuMemPoolSetAccess(pool: CUmemoryPool, access: *const CUmemAccessDesc, count: usize) = "cuMemPoolSetAccess";
        fn cuMemPoolExportToShareableHandle(shareable: *mut c_void, pool: CUmemoryPool, kind: c_uint, flags: c_ulonglong) = "cuMemPoolExportToShareableHandle";
        fn cuMemPoolImportFromShareableHandle(pool: *mut CUmemoryPool, shareable: *mut c_void, kind: c_uint, flags: c_ulonglong) = "cuMemPoolImportFromShareableHandle";
        fn cuMemPoolExportPointer(data: *mut c_void, addr: CUdeviceptr) = "cuMemPoolExportPointer";
        fn cuMemPoolImportPointer(addr: *mut CUdeviceptr, pool: CUmemoryPool, data: *mut c_void) = "cuMemPoolImportPointer";
        fn cuMemFreeAsync(addr: CUdeviceptr, stream: CUstream) = "cuMemFreeAsync";
        fn cuMemGetHandleForAddressRange(handle: *mut c_void, addr: CUdeviceptr, bytes: usize, kind: c_uint, flags: c_ulonglong) = "cuMemGetHandleForAddressRange";
    }
}

impl Api {
    /// Looks every function up. Calls none, unless one is missing that must be there: then it asks for the driver's version.
    pub(super) fn resolve(library: Library) -> Result<Self> {
        // Never closed: streams, threads and exit handlers of the driver outlive whoever loaded it.
        let library = ManuallyDrop::new(library);
        let mut api = Self::fill(&library)?;
        // SAFETY: the signature is cuda.h's.
        api.error_name = unsafe { lookup(&library, &["cuGetErrorName"]) };
        api.file = library::file_of(api.cuInit as *const c_void);
        Ok(api)
    }

    /// Refuses in a forked child, without touching the driver.
    pub(super) fn alive(&self, call: &'static str) -> Result<()> {
        if self.origin.is_here() {
            return Ok(());
        }
        Err(DriverError::Call { call, result: CuResult::CONTEXT_IS_DESTROYED })
    }

    /// The library's file, as the loader names it.
    pub(super) fn file(&self) -> String {
        self.file.as_ref().map_or_else(|| "libcuda".to_owned(), |file| file.display().to_string())
    }

    fn check(&self, call: &'static str, result: CuResult) -> Result<()> {
        if result == CuResult::SUCCESS {
            return Ok(());
        }
        if result.name().is_none() {
            tracing::debug!(
                call,
                code = result.0,
                name = self.error_name(result),
                "the driver answered with a code that millpond has no name for"
            );
        }
        Err(DriverError::Call { call, result })
    }

    fn error_name(&self, result: CuResult) -> &'static str {
        let mut name = std::ptr::null();
        let Some(function) = self.error_name else { return "" };
        // SAFETY: the driver takes any code, and writes a pointer or null.
        if unsafe { function(result, &mut name) } != CuResult::SUCCESS || name.is_null() {
            return "";
        }
        // SAFETY: the driver's names are C strings in its own constants, and the library is never closed.
        unsafe { CStr::from_ptr(name) }.to_str().unwrap_or_default()
    }
}

impl fmt::Debug for Api {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Api").field("file", &self.file).field("origin", &self.origin).finish_non_exhaustive()
    }
}

/// # Safety
/// `T` is the function pointer type of every one of the symbols.
unsafe fn required<T: Copy>(library: &Library, symbols: &[&'static str]) -> Result<T> {
    // SAFETY: the caller vouches for the type.
    unsafe { lookup(library, symbols) }
        .ok_or_else(|| DriverError::TooOld { symbol: symbols.first().copied().unwrap_or_default(), version: version(library) })
}

/// # Safety
/// `T` is the function pointer type of every one of the symbols.
unsafe fn lookup<T: Copy>(library: &Library, symbols: &[&'static str]) -> Option<T> {
    // SAFETY: the caller vouches for the type; the copy outlives the symbol since the library is never closed.
    symbols.iter().find_map(|symbol| unsafe { library.get::<T>(symbol.as_bytes()) }.ok().map(|found| *found))
}

/// The driver's version; it can be asked before `cuInit` and settles nothing.
fn version(library: &Library) -> Option<i32> {
    // SAFETY: the signature is cuda.h's.
    let ask: unsafe extern "C" fn(*mut c_int) -> CuResult = unsafe { lookup(library, &["cuDriverGetVersion"]) }?;
    let mut version = 0;
    // SAFETY: the driver writes one int.
    (unsafe { ask(&mut version) } == CuResult::SUCCESS).then_some(version)
}
