//! The driver of one host device.
#![allow(unsafe_code)]

use std::fmt;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;

use super::capture::Captures;
use super::chunk::{Chunk, Gauge};
use super::engine::Engine;
use super::event::Recorded;
use super::fail::HostCall;
use super::queue::{Op, Queue};
use super::streams::Defaults;
use super::Shared;
use crate::driver::{Access, Addr, Capture, CuResult, DeviceInfo, Driver, Event, MemInfo, Memory, PointerInfo, Result, Stream, StreamId};

/// A host device, as one process sees it. See the [module](super) for its rules.
pub struct HostDriver {
    pub(super) info: DeviceInfo,
    pub(super) shared: Arc<Shared>,
    pub(super) engine: Arc<Engine>,
    pub(super) captures: Captures,
    defaults: Defaults,
    gauge: Gauge,
    attached: AtomicBool,
}

impl fmt::Debug for HostDriver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostDriver").field("device", &self.info.id).field("fault", &self.engine.fault()).finish_non_exhaustive()
    }
}

impl HostDriver {
    pub(super) fn new(info: DeviceInfo, shared: Arc<Shared>, lanes: usize) -> Self {
        let engine = Engine::new(Arc::clone(&shared.memory), lanes);
        let defaults = Defaults::new(&engine);
        let gauge = Gauge::new(info.total_bytes);
        Self { info, shared, engine, captures: Captures::default(), defaults, gauge, attached: AtomicBool::new(false) }
    }

    /// What a call that needs no context does first.
    fn enter(&self, call: HostCall) -> Result<()> {
        self.shared.enter(call).inspect_err(|error| {
            // A staged failure that kills a context does so.
            let sticky = error.result().filter(|result| result.is_sticky());
            if let Some(result) = sticky.filter(|_| !self.shared.memory.space.is_forked()) {
                self.engine.die(result);
            }
        })
    }

    /// What a call on addresses does first.
    fn enter_attached(&self, call: HostCall) -> Result<()> {
        self.enter(call)?;
        let attached = self.attached.load(Ordering::Acquire);
        attached.then_some(()).ok_or(CuResult::INVALID_CONTEXT).map_err(|result| call.refuse(result))
    }

    /// What a call on streams or events does first.
    pub(super) fn enter_alive(&self, call: HostCall) -> Result<()> {
        self.enter_attached(call)?;
        self.engine.fault().map_or(Ok(()), Err).map_err(|result| call.refuse(result))
    }

    pub(super) fn queue(&self, call: HostCall, stream: Stream) -> Result<Arc<Queue>> {
        self.enter_alive(call)?;
        self.defaults
            .get(stream)
            .map_or_else(|| self.shared.streams.get(stream, self.info.ordinal), Ok)
            .map_err(|result| call.refuse(result))
    }

    /// Queues work, or records it where the stream is being captured.
    pub(super) fn submit(&self, call: HostCall, queue: &Arc<Queue>, op: Op) -> Result<()> {
        let recorded = self.captures.record(queue.id(), std::slice::from_ref(&op));
        recorded.unwrap_or_else(|| queue.push(op)).map_err(|result| call.refuse(result))
    }

    fn submit_on_word(&self, call: HostCall, stream: Stream, word: Addr, op: Op) -> Result<()> {
        let queue = self.queue(call, stream)?;
        if !self.shared.memory.words.is_word(word) {
            return Err(call.refuse(CuResult::INVALID_VALUE));
        }
        self.submit(call, &queue, op)
    }

    fn whole(&self, call: HostCall, bytes: u64) -> Result<()> {
        self.shared.memory.space.whole(bytes).map_err(|result| call.refuse(result))
    }
}

impl Drop for HostDriver {
    fn drop(&mut self) {
        if !self.shared.memory.space.is_forked() {
            self.engine.stop();
        }
    }
}

impl Driver for HostDriver {
    fn device(&self) -> &DeviceInfo {
        &self.info
    }

    fn is_host(&self) -> bool {
        true
    }

    fn host(&self) -> Option<&HostDriver> {
        Some(self)
    }

    fn attach_context(&self) -> Result<()> {
        self.enter(HostCall::AttachContext)?;
        self.attached.store(true, Ordering::Release);
        self.engine.fault().map_or(Ok(()), Err).map_err(|result| HostCall::AttachContext.refuse(result))
    }

    fn mem_info(&self) -> Result<MemInfo> {
        self.enter_alive(HostCall::MemInfo)?;
        Ok(MemInfo { free: self.gauge.free(), total: self.gauge.total() })
    }

    fn create(&self, bytes: u64) -> Result<Memory> {
        self.enter(HostCall::Create)?;
        self.whole(HostCall::Create, bytes)?;
        let chunk = Chunk::create(bytes, &self.gauge);
        chunk.and_then(|chunk| self.shared.handles.insert(chunk)).map_err(|result| HostCall::Create.refuse(result))
    }

    fn export(&self, memory: Memory) -> Result<OwnedFd> {
        self.enter(HostCall::Export)?;
        self.shared.handles.get(memory).and_then(|chunk| chunk.export()).map_err(|result| HostCall::Export.refuse(result))
    }

    fn import(&self, fd: BorrowedFd<'_>, bytes: u64) -> Result<Memory> {
        self.enter(HostCall::Import)?;
        self.whole(HostCall::Import, bytes)?;
        let chunk = Chunk::import(fd, bytes);
        chunk.and_then(|chunk| self.shared.handles.insert(chunk)).map_err(|result| HostCall::Import.refuse(result))
    }

    fn release(&self, memory: Memory) -> Result<()> {
        self.enter(HostCall::Release)?;
        self.shared.handles.remove(memory).map_err(|result| HostCall::Release.refuse(result))
    }

    fn reserve(&self, bytes: u64, hint: Addr) -> Result<Addr> {
        self.enter_attached(HostCall::Reserve)?;
        self.shared.memory.space.reserve(bytes, hint).map_err(|result| HostCall::Reserve.refuse(result))
    }

    fn unreserve(&self, addr: Addr, bytes: u64) -> Result<()> {
        self.enter_attached(HostCall::Unreserve)?;
        self.shared.memory.space.unreserve(addr, bytes).map_err(|result| HostCall::Unreserve.refuse(result))
    }

    fn map(&self, addr: Addr, bytes: u64, memory: Memory) -> Result<()> {
        self.enter_attached(HostCall::Map)?;
        let chunk = self.shared.handles.get(memory).map_err(|result| HostCall::Map.refuse(result))?;
        self.shared.memory.space.map(addr, bytes, &chunk).map_err(|result| HostCall::Map.refuse(result))
    }

    fn unmap(&self, addr: Addr, bytes: u64) -> Result<()> {
        self.enter_attached(HostCall::Unmap)?;
        self.shared.memory.space.unmap(addr, bytes).map_err(|result| HostCall::Unmap.refuse(result))
    }

    fn set_access(&self, addr: Addr, bytes: u64, access: Access) -> Result<()> {
        self.enter_attached(HostCall::SetAccess)?;
        self.shared.memory.space.set_access(addr, bytes, access).map_err(|result| HostCall::SetAccess.refuse(result))
    }

    fn pointer_info(&self, addr: Addr) -> Result<Option<PointerInfo>> {
        self.enter_attached(HostCall::PointerInfo)?;
        let registered = || self.shared.memory.words.find(addr).map(|(base, bytes)| PointerInfo { base, bytes });
        Ok(self.shared.memory.space.find(addr).or_else(registered))
    }

    fn stream_create(&self) -> Result<Stream> {
        self.enter_alive(HostCall::StreamCreate)?;
        Ok(self.shared.streams.create(self.info.ordinal, &self.engine))
    }

    fn stream_destroy(&self, stream: Stream) -> Result<()> {
        let call = HostCall::StreamDestroy;
        let queue = self.queue(call, stream)?;
        self.captures.forbid(queue.id()).map_err(|result| call.refuse(result))?;
        if self.defaults.get(stream).is_some() {
            return Err(call.refuse(CuResult::INVALID_HANDLE));
        }
        self.shared.streams.destroy(stream, self.info.ordinal).map_err(|result| call.refuse(result))
    }

    fn stream_id(&self, stream: Stream) -> Result<StreamId> {
        let call = HostCall::StreamId;
        if matches!(stream.0, 0 | 1) && self.attached.load(Ordering::Acquire) {
            return Ok(StreamId(0)); // no call of the driver's, so nothing to fail
        }
        let queue = self.queue(call, stream)?;
        // Measured: cuStreamGetId of a capturing stream is refused, and the capture is lost.
        self.captures.forbid(queue.id()).map_err(|result| call.refuse(result))?;
        Ok(queue.id())
    }

    fn owns(&self, stream: Stream) -> Result<bool> {
        let call = HostCall::StreamId;
        self.enter_alive(call)?;
        if stream.is_named() {
            return Ok(true);
        }
        self.shared.streams.device_of(stream).map(|device| device == self.info.ordinal).map_err(|result| call.refuse(result))
    }

    fn stream_synchronize(&self, stream: Stream) -> Result<()> {
        let call = HostCall::StreamSynchronize;
        let queue = self.queue(call, stream)?;
        self.captures.forbid(queue.id()).map_err(|result| call.refuse(result))?;
        queue.await_position(queue.tail().position, || self.engine.halted());
        self.engine.fault().map_or(Ok(()), Err).map_err(|result| call.refuse(result))
    }

    fn stream_query(&self, stream: Stream) -> Result<bool> {
        let call = HostCall::StreamQuery;
        let queue = self.queue(call, stream)?;
        self.captures.forbid(queue.id()).map_err(|result| call.refuse(result))?;
        let idle = queue.is_idle();
        // A queue is also idle where its work was dropped: the fault is seen before that is.
        self.engine.fault().map_or(Ok(idle), Err).map_err(|result| call.refuse(result))
    }

    fn stream_capture(&self, stream: Stream) -> Result<Capture> {
        Ok(self.captures.state(self.queue(HostCall::StreamCapture, stream)?.id()))
    }

    fn copy(&self, dst: Addr, src: Addr, bytes: u64, stream: Stream) -> Result<()> {
        let call = HostCall::Copy;
        let queue = self.queue(call, stream)?;
        if bytes > 0 && !self.shared.memory.admits_copy(dst, src, bytes) {
            return Err(call.refuse(CuResult::INVALID_VALUE));
        }
        self.submit(call, &queue, Op::Copy { dst, src, bytes })
    }

    fn fill(&self, dst: Addr, byte: u8, bytes: u64, stream: Stream) -> Result<()> {
        let call = HostCall::Fill;
        let queue = self.queue(call, stream)?;
        if bytes > 0 && !self.shared.memory.admits_fill(dst, bytes) {
            return Err(call.refuse(CuResult::INVALID_VALUE));
        }
        self.submit(call, &queue, Op::Fill { dst, byte, bytes })
    }

    fn event_create(&self) -> Result<Event> {
        self.enter_alive(HostCall::EventCreate)?;
        Ok(self.shared.events.create(self.info.ordinal))
    }

    fn event_destroy(&self, event: Event) -> Result<()> {
        self.enter_alive(HostCall::EventDestroy)?;
        self.shared.events.destroy(event).map_err(|result| HostCall::EventDestroy.refuse(result))
    }

    fn event_record(&self, event: Event, stream: Stream) -> Result<()> {
        let call = HostCall::EventRecord;
        let queue = self.queue(call, stream)?;
        let recorded = match self.captures.mark(queue.id()) {
            Some(captured) => Recorded::Capture(captured.map_err(|result| call.refuse(result))?),
            None => Recorded::Work(vec![queue.tail()]),
        };
        self.shared.events.record(event, self.info.ordinal, recorded).map_err(|result| call.refuse(result))
    }

    fn event_record_context(&self, event: Event) -> Result<()> {
        let call = HostCall::EventRecordContext;
        self.enter_alive(call)?;
        self.captures.forbid_everywhere().map_err(|result| call.refuse(result))?;
        let marks = self.engine.unfinished();
        self.shared.events.record(event, self.info.ordinal, Recorded::Work(marks)).map_err(|result| call.refuse(result))
    }

    fn event_query(&self, event: Event) -> Result<bool> {
        let call = HostCall::EventQuery;
        self.enter_alive(call)?;
        let reached = self.shared.events.is_reached(event).map_err(|result| call.refuse(result))?;
        let reached = reached.map_err(|captured| call.refuse(self.captures.forbid_query(&captured)))?;
        self.engine.fault().map_or(Ok(reached), Err).map_err(|result| call.refuse(result))
    }

    fn stream_wait_event(&self, stream: Stream, event: Event) -> Result<()> {
        let call = HostCall::StreamWaitEvent;
        let queue = self.queue(call, stream)?;
        let marks = match self.shared.events.get(event).map_err(|result| call.refuse(result))? {
            Recorded::Capture(captured) => return self.captures.join(queue.id(), &captured).map_err(|result| call.refuse(result)),
            Recorded::Work(marks) => marks,
        };
        if marks.is_empty() {
            return Ok(());
        }
        self.captures.isolate(queue.id()).map_err(|result| call.refuse(result))?;
        queue.push(Op::Join(marks)).map_err(|result| call.refuse(result))
    }

    unsafe fn host_register(&self, ptr: *mut u8, bytes: usize) -> Result<Addr> {
        self.enter_alive(HostCall::HostRegister)?;
        self.shared.memory.words.add(ptr, bytes).map_err(|result| HostCall::HostRegister.refuse(result))
    }

    fn host_address(&self, ptr: *mut u8) -> Result<Addr> {
        self.enter_alive(HostCall::HostAddress)?;
        let found = self.shared.memory.words.find(ptr as Addr).is_some();
        found.then_some(ptr as Addr).ok_or_else(|| HostCall::HostAddress.refuse(CuResult::INVALID_VALUE))
    }

    fn host_unregister(&self, ptr: *mut u8) -> Result<()> {
        self.enter_alive(HostCall::HostUnregister)?;
        self.shared.memory.words.remove(ptr).map_err(|result| HostCall::HostUnregister.refuse(result))
    }

    fn write_value(&self, stream: Stream, word: Addr, value: u64) -> Result<()> {
        self.submit_on_word(HostCall::WriteValue, stream, word, Op::Write { word, value })
    }

    fn wait_value(&self, stream: Stream, word: Addr, value: u64) -> Result<()> {
        self.submit_on_word(HostCall::WaitValue, stream, word, Op::Wait { word, value })
    }
}
