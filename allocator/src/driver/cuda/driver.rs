//! One GPU as a [`Driver`].
#![allow(unsafe_code)]

use std::ffi::c_int;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use cudarc::driver::sys::{
    self, CUdevice_attribute, CUevent, CUevent_flags, CUmemAccessDesc, CUmemAccess_flags, CUmemAllocationHandleType, CUstream,
    CUstreamCaptureStatus, CUstreamWaitValue_flags, CUstreamWriteValue_flags, CUstream_flags,
};
use rustix::io::{fcntl_getfd, fcntl_setfd, FdFlags};

use super::api::Api;
use super::context::{Context, Entered, Relaxed};
use super::handles::{may_be_memory, Handles};
use super::survey::{allocation, attribute_of, location, Survey, Words};
use crate::driver::{Access, Addr, Capture, CuResult, DeviceInfo, Driver, DriverError, Event, MemInfo, Memory, PointerInfo, Result};
use crate::driver::{Sharing, Stream, StreamId};

const POSIX_FD: u32 = CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR.0;

/// One GPU. Dropping it calls nothing: the context and the memory stay until the process ends.
#[derive(Debug)]
pub struct CudaDriver {
    pub(super) api: Arc<Api>,
    pub(super) survey: Survey,
    pub(super) context: Context,
    handles: Handles,
    peer_access: AtomicBool,
    /// Ordinals of the visible devices that can reach this one's memory, once they were asked for.
    peers: OnceLock<Vec<u32>>,
}

impl CudaDriver {
    pub(super) fn new(api: Arc<Api>, survey: Survey) -> Self {
        let context = Context::new(Arc::clone(&api), survey.device);
        let (handles, peers) = (Handles::default(), OnceLock::new());
        Self { api, survey, context, handles, peer_access: AtomicBool::new(false), peers }
    }

    /// Whether [`Driver::set_access`] grants to the visible peers of this device too, from now on (default: no). Each costs time.
    pub fn set_peer_access(&self, grant: bool) {
        self.peer_access.store(grant, Ordering::Relaxed);
    }

    pub(super) fn peers(&self) -> Result<&[u32]> {
        if let Some(peers) = self.peers.get() {
            return Ok(peers);
        }
        let mut count = 0;
        // SAFETY: the driver writes one int.
        unsafe { self.api.cuDeviceGetCount(&mut count) }?;
        let others = (0..u32::try_from(count).unwrap_or(0)).filter(|ordinal| *ordinal != self.survey.info.ordinal);
        let peers = others.filter(|ordinal| self.is_peer(*ordinal)).collect();
        Ok(self.peers.get_or_init(|| peers))
    }

    fn is_peer(&self, ordinal: u32) -> bool {
        let (mut peer, mut can) = (0, 0);
        // SAFETY: the driver writes one int, and checks the ordinal.
        let known = unsafe { self.api.cuDeviceGet(&mut peer, ordinal as c_int) };
        // SAFETY: the driver writes one int. "Peer can reach this device", in the order of its arguments.
        let asked = known.and_then(|()| unsafe { self.api.cuDeviceCanAccessPeer(&mut can, peer, self.survey.device) });
        let maps = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED;
        asked.is_ok() && can == 1 && attribute_of(&self.api, maps, peer) == 1
    }

    /// What asking about a stream needs: for one of the driver's own names the context that it means. A stream that was created
    /// knows its own, and each malloc on one asks.
    fn enter_for(&self, stream: Stream, call: &'static str) -> Result<Option<Entered<'_>>> {
        if stream.is_named() {
            return self.context.enter(call).map(Some);
        }
        self.context.handle(call).map(|_| None)
    }

    fn is_chunk(&self, bytes: u64) -> bool {
        bytes != 0 && bytes.is_multiple_of(self.survey.info.granularity)
    }
}

impl Driver for CudaDriver {
    fn device(&self) -> &DeviceInfo {
        &self.survey.info
    }

    fn is_host(&self) -> bool {
        false
    }

    fn sharing(&self) -> Option<&dyn Sharing> {
        Some(self)
    }

    fn attach_context(&self) -> Result<()> {
        self.context.attach()
    }

    fn mem_info(&self) -> Result<MemInfo> {
        let _current = self.context.enter("cuMemGetInfo")?;
        let _mode = Relaxed::enter(&self.api);
        let (mut free, mut total) = (0, 0);
        // SAFETY: the driver writes two size_t.
        unsafe { self.api.cuMemGetInfo(&mut free, &mut total) }?;
        Ok(MemInfo { free: free as u64, total: total as u64 })
    }

    fn create(&self, bytes: u64) -> Result<Memory> {
        const CALL: &str = "cuMemCreate";
        self.api.alive(CALL)?;
        if !self.is_chunk(bytes) {
            return Err(invalid(CALL));
        }
        let _mode = Relaxed::enter(&self.api);
        let prop = allocation(self.survey.info.ordinal, self.survey.rdma, self.survey.kind);
        let mut handle = 0;
        // SAFETY: the driver reads one CUmemAllocationProp and writes one handle.
        unsafe { self.api.cuMemCreate(&mut handle, bytes as usize, &prop, 0) }?;
        self.handles.add(Memory(handle), bytes);
        Ok(Memory(handle))
    }

    fn export(&self, memory: Memory) -> Result<OwnedFd> {
        const CALL: &str = "cuMemExportToShareableHandle";
        self.api.alive(CALL)?;
        let _mode = Relaxed::enter(&self.api);
        let mut fd: c_int = -1;
        self.handles.with(CALL, memory, |_| {
            // SAFETY: for this kind of handle the driver writes one int; `memory` is live and stays so meanwhile.
            unsafe { self.api.cuMemExportToShareableHandle((&raw mut fd).cast(), memory.0, POSIX_FD, 0) }
        })?;
        if fd < 0 {
            return Err(DriverError::Call { call: CALL, result: CuResult::UNKNOWN });
        }
        // SAFETY: the driver opened the descriptor for its caller, who closes it (probes/vmm_probe.cu).
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        let flags = fcntl_getfd(&fd).and_then(|flags| fcntl_setfd(&fd, flags | FdFlags::CLOEXEC));
        flags.map_err(|_| DriverError::Call { call: CALL, result: CuResult::OPERATING_SYSTEM })?;
        Ok(fd)
    }

    fn import(&self, fd: BorrowedFd<'_>, bytes: u64) -> Result<Memory> {
        const CALL: &str = "cuMemImportFromShareableHandle";
        self.api.alive(CALL)?;
        if !self.is_chunk(bytes) || !may_be_memory(fd) {
            return Err(invalid(CALL));
        }
        let _mode = Relaxed::enter(&self.api);
        // The descriptor travels as a pointer's value.
        let shareable = fd.as_raw_fd() as usize as *mut std::ffi::c_void;
        let mut handle = 0;
        // SAFETY: the driver writes one handle, and takes the descriptor by number, without keeping it.
        unsafe { self.api.cuMemImportFromShareableHandle(&mut handle, shareable, POSIX_FD) }?;
        self.handles.add(Memory(handle), bytes);
        Ok(Memory(handle))
    }

    fn release(&self, memory: Memory) -> Result<()> {
        const CALL: &str = "cuMemRelease";
        self.api.alive(CALL)?;
        self.handles.remove(CALL, memory)?;
        let _mode = Relaxed::enter(&self.api);
        // SAFETY: `remove` found the handle live and hands each one out once.
        unsafe { self.api.cuMemRelease(memory.0) }
    }

    fn reserve(&self, bytes: u64, hint: Addr) -> Result<Addr> {
        let _mode = Relaxed::enter(&self.api);
        let mut addr = 0;
        let alignment = self.survey.info.granularity as usize;
        // SAFETY: the driver writes one address; it checks the sizes, and treats the hint as no more than that.
        unsafe { self.api.cuMemAddressReserve(&mut addr, bytes as usize, alignment, hint, 0) }?;
        Ok(addr)
    }

    fn unreserve(&self, addr: Addr, bytes: u64) -> Result<()> {
        let _mode = Relaxed::enter(&self.api);
        // SAFETY: the driver checks the range against its reservations.
        unsafe { self.api.cuMemAddressFree(addr, bytes as usize) }
    }

    fn map(&self, addr: Addr, bytes: u64, memory: Memory) -> Result<()> {
        const CALL: &str = "cuMemMap";
        self.api.alive(CALL)?;
        let _mode = Relaxed::enter(&self.api);
        self.handles.with(CALL, memory, |whole| {
            if bytes != whole {
                return Err(invalid(CALL));
            }
            // SAFETY: `memory` is live and stays so meanwhile; the driver checks the range against its reservations.
            unsafe { self.api.cuMemMap(addr, bytes as usize, 0, memory.0, 0) }
        })
    }

    fn unmap(&self, addr: Addr, bytes: u64) -> Result<()> {
        let _mode = Relaxed::enter(&self.api);
        // SAFETY: the driver checks the range against its mappings; that no work is in flight on it is the trait's rule.
        unsafe { self.api.cuMemUnmap(addr, bytes as usize) }
    }

    fn set_access(&self, addr: Addr, bytes: u64, access: Access) -> Result<()> {
        let _current = self.context.enter("cuMemSetAccess")?;
        let _mode = Relaxed::enter(&self.api);
        let flags = match access {
            Access::ReadOnly => CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READ,
            Access::ReadWrite => CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        let grant = |ordinal| CUmemAccessDesc { location: location(ordinal), flags };
        let peers = if self.peer_access.load(Ordering::Relaxed) { self.peers()? } else { &[] };
        let grants: Vec<_> = std::iter::once(self.survey.info.ordinal).chain(peers.iter().copied()).map(grant).collect();
        // SAFETY: the driver reads `grants.len()` descriptions, and checks the range against its mappings.
        unsafe { self.api.cuMemSetAccess(addr, bytes as usize, grants.as_ptr(), grants.len()) }
    }

    fn pointer_info(&self, addr: Addr) -> Result<Option<PointerInfo>> {
        let _current = self.context.enter("cuMemGetAddressRange")?;
        let (mut base, mut bytes) = (0, 0);
        // SAFETY: the driver writes an address and a size_t, and looks `addr` up without touching it.
        match unsafe { self.api.cuMemGetAddressRange(&mut base, &mut bytes, addr) } {
            Ok(()) => Ok(Some(PointerInfo { base, bytes: bytes as u64 })),
            Err(DriverError::Call { result: CuResult::INVALID_VALUE | CuResult::NOT_FOUND, .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn stream_create(&self) -> Result<Stream> {
        let _current = self.context.enter("cuStreamCreate")?;
        let _mode = Relaxed::enter(&self.api);
        let mut stream: CUstream = null_mut();
        // SAFETY: the driver writes one handle.
        unsafe { self.api.cuStreamCreate(&mut stream, CUstream_flags::CU_STREAM_NON_BLOCKING as u32) }?;
        Ok(Stream(stream as u64))
    }

    fn stream_destroy(&self, stream: Stream) -> Result<()> {
        let _current = self.context.enter("cuStreamDestroy")?;
        let _mode = Relaxed::enter(&self.api);
        // SAFETY: the trait's rule: streams are passed alive.
        unsafe { self.api.cuStreamDestroy(raw(stream)) }
    }

    fn stream_id(&self, stream: Stream) -> Result<StreamId> {
        const CALL: &str = "cuStreamGetId";
        if matches!(stream.0, 0 | 1) {
            self.api.alive(CALL)?;
            return Ok(StreamId(0));
        }
        let _current = self.enter_for(stream, CALL)?;
        // Without this it ends another stream's global-mode capture that this thread began.
        let _mode = Relaxed::enter(&self.api);
        let mut id = 0;
        // SAFETY: the driver writes one u64; the trait's rule: streams are passed alive.
        unsafe { self.api.cuStreamGetId(raw(stream), &mut id) }?;
        Ok(StreamId(id))
    }

    fn owns(&self, stream: Stream) -> Result<bool> {
        let ours = self.context.handle("cuStreamGetCtx")?;
        if stream.is_named() {
            return Ok(true);
        }
        let _mode = Relaxed::enter(&self.api);
        let mut context = std::ptr::null_mut();
        // SAFETY: the driver writes one handle; the trait's rule: streams are passed alive.
        unsafe { self.api.cuStreamGetCtx(raw(stream), &mut context) }?;
        Ok(context == ours)
    }

    fn stream_synchronize(&self, stream: Stream) -> Result<()> {
        let _current = self.context.enter("cuStreamSynchronize")?;
        let _mode = Relaxed::enter(&self.api);
        // SAFETY: the trait's rule: streams are passed alive.
        unsafe { self.api.cuStreamSynchronize(raw(stream)) }
    }

    fn stream_query(&self, stream: Stream) -> Result<bool> {
        let _current = self.context.enter("cuStreamQuery")?;
        let _mode = Relaxed::enter(&self.api);
        // SAFETY: the trait's rule: streams are passed alive.
        has_run(unsafe { self.api.cuStreamQuery(raw(stream)) })
    }

    fn stream_capture(&self, stream: Stream) -> Result<Capture> {
        let _current = self.enter_for(stream, "cuStreamIsCapturing")?;
        let mut status = 0;
        // SAFETY: the driver writes one int; the trait's rule: streams are passed alive.
        unsafe { self.api.cuStreamIsCapturing(raw(stream), &mut status) }?;
        Ok(match status {
            none if none == CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE as u32 => Capture::None,
            active if active == CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE as u32 => Capture::Active,
            _ => Capture::Invalidated,
        })
    }

    fn copy(&self, dst: Addr, src: Addr, bytes: u64, stream: Stream) -> Result<()> {
        let _current = self.context.enter("cuMemcpyAsync")?;
        // SAFETY: the driver checks the ranges that it knows; host ranges are the caller's. Streams are passed alive.
        unsafe { self.api.cuMemcpyAsync(dst, src, bytes as usize, raw(stream)) }
    }

    fn fill(&self, dst: Addr, byte: u8, bytes: u64, stream: Stream) -> Result<()> {
        let _current = self.context.enter("cuMemsetD8Async")?;
        // SAFETY: the driver checks the range. Streams are passed alive.
        unsafe { self.api.cuMemsetD8Async(dst, byte, bytes as usize, raw(stream)) }
    }

    fn event_create(&self) -> Result<Event> {
        let _current = self.context.enter("cuEventCreate")?;
        let _mode = Relaxed::enter(&self.api);
        let mut event: CUevent = null_mut();
        // SAFETY: the driver writes one handle.
        unsafe { self.api.cuEventCreate(&mut event, CUevent_flags::CU_EVENT_DISABLE_TIMING as u32) }?;
        Ok(Event(event as u64))
    }

    fn event_destroy(&self, event: Event) -> Result<()> {
        let _current = self.context.enter("cuEventDestroy")?;
        let _mode = Relaxed::enter(&self.api);
        // SAFETY: the event came from `event_create` and is passed alive.
        unsafe { self.api.cuEventDestroy(event.0 as CUevent) }
    }

    fn event_record(&self, event: Event, stream: Stream) -> Result<()> {
        let _current = self.context.enter("cuEventRecord")?;
        // SAFETY: events and streams are passed alive.
        unsafe { self.api.cuEventRecord(event.0 as CUevent, raw(stream)) }
    }

    fn event_record_context(&self, event: Event) -> Result<()> {
        const CALL: &str = "cuCtxRecordEvent";
        let context = self.context.handle(CALL)?;
        if !self.survey.info.context_events {
            return Err(DriverError::Call { call: CALL, result: CuResult::NOT_SUPPORTED });
        }
        let _current = self.context.enter(CALL)?;
        let _mode = Relaxed::enter(&self.api);
        // SAFETY: the context is never released; events are passed alive.
        unsafe { self.api.cuCtxRecordEvent(context, event.0 as CUevent) }
    }

    fn event_query(&self, event: Event) -> Result<bool> {
        let _current = self.context.enter("cuEventQuery")?;
        let _mode = Relaxed::enter(&self.api);
        // SAFETY: events are passed alive.
        has_run(unsafe { self.api.cuEventQuery(event.0 as CUevent) })
    }

    fn stream_wait_event(&self, stream: Stream, event: Event) -> Result<()> {
        let _current = self.context.enter("cuStreamWaitEvent")?;
        // SAFETY: events and streams are passed alive.
        unsafe { self.api.cuStreamWaitEvent(raw(stream), event.0 as CUevent, 0) }
    }

    unsafe fn host_register(&self, ptr: *mut u8, bytes: usize) -> Result<Addr> {
        let _current = self.context.enter("cuMemHostRegister")?;
        let _mode = Relaxed::enter(&self.api);
        let flags = sys::CU_MEMHOSTREGISTER_PORTABLE | sys::CU_MEMHOSTREGISTER_DEVICEMAP;
        // SAFETY: the caller keeps the range mapped until it is unregistered.
        unsafe { self.api.cuMemHostRegister(ptr.cast(), bytes, flags) }?;
        self.host_address(ptr).inspect_err(|_| {
            // SAFETY: the range was registered just now.
            let _ = unsafe { self.api.cuMemHostUnregister(ptr.cast()) };
        })
    }

    fn host_address(&self, ptr: *mut u8) -> Result<Addr> {
        let _current = self.context.enter("cuMemHostGetDevicePointer")?;
        let mut addr = 0;
        // SAFETY: the driver writes one address; it looks the pointer up among those registered.
        unsafe { self.api.cuMemHostGetDevicePointer(&mut addr, ptr.cast(), 0) }?;
        Ok(addr)
    }

    fn host_unregister(&self, ptr: *mut u8) -> Result<()> {
        let _current = self.context.enter("cuMemHostUnregister")?;
        let _mode = Relaxed::enter(&self.api);
        // SAFETY: the driver looks the pointer up among those registered, and does not read through it.
        unsafe { self.api.cuMemHostUnregister(ptr.cast()) }
    }

    fn write_value(&self, stream: Stream, word: Addr, value: u64) -> Result<()> {
        const CALL: &str = "cuStreamWriteValue64";
        let flags = CUstreamWriteValue_flags::CU_STREAM_WRITE_VALUE_DEFAULT as u32;
        let _current = self.context.enter(CALL)?;
        if !word.is_multiple_of(8) {
            return Err(invalid(CALL));
        }
        match self.survey.words {
            // SAFETY: the driver checks that it can reach the word. Streams are passed alive.
            Some(Words::Second) => unsafe { self.api.cuStreamWriteValue64_v2(raw(stream), word, value, flags) },
            // SAFETY: as above.
            Some(Words::First) => unsafe { self.api.cuStreamWriteValue64(raw(stream), word, value, flags) },
            None => Err(DriverError::Call { call: CALL, result: CuResult::NOT_SUPPORTED }),
        }
    }

    fn wait_value(&self, stream: Stream, word: Addr, value: u64) -> Result<()> {
        const CALL: &str = "cuStreamWaitValue64";
        let flags = CUstreamWaitValue_flags::CU_STREAM_WAIT_VALUE_GEQ as u32;
        let _current = self.context.enter(CALL)?;
        if !word.is_multiple_of(8) {
            return Err(invalid(CALL));
        }
        match self.survey.words {
            // SAFETY: the driver checks that it can reach the word. Streams are passed alive.
            Some(Words::Second) => unsafe { self.api.cuStreamWaitValue64_v2(raw(stream), word, value, flags) },
            // SAFETY: as above.
            Some(Words::First) => unsafe { self.api.cuStreamWaitValue64(raw(stream), word, value, flags) },
            None => Err(DriverError::Call { call: CALL, result: CuResult::NOT_SUPPORTED }),
        }
    }
}

pub(super) fn raw(stream: Stream) -> CUstream {
    stream.0 as CUstream
}

pub(super) fn invalid(call: &'static str) -> DriverError {
    DriverError::Call { call, result: CuResult::INVALID_VALUE }
}

fn has_run(queried: Result<()>) -> Result<bool> {
    match queried {
        Ok(()) => Ok(true),
        Err(DriverError::Call { result: CuResult::NOT_READY, .. }) => Ok(false),
        Err(error) => Err(error),
    }
}
