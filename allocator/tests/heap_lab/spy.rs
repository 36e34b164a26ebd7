//! A driver that notes what each stream's work comes after, and says which bytes a stream may still touch.

use std::collections::HashMap;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex};

use millpond_allocator::driver::host::HostDriver;
use millpond_allocator::driver::{
    Access, Addr, Capture, DeviceInfo, Driver, Event, MemInfo, Memory, PointerInfo, Result, Stream, StreamId,
};
use millpond_allocator::heap::PoolId;

/// For each stream, how much of its work something comes after.
pub type Clock = HashMap<Stream, u64>;

fn join(into: &mut Clock, other: &Clock) {
    for (stream, position) in other {
        let known = into.entry(*stream).or_default();
        *known = (*known).max(*position);
    }
}

/// Bytes that were in use, and by whom up to where.
#[derive(Debug, Clone)]
pub struct Past {
    pub addr: Addr,
    pub bytes: u64,
    pub users: Vec<(Stream, u64)>,
}

#[derive(Debug, Default)]
pub struct Model {
    /// How much work was queued on each stream.
    pub position: Clock,
    /// What the next work of each stream comes after.
    pub after: HashMap<Stream, Clock>,
    /// What each event stands for.
    pub events: HashMap<Event, Clock>,
    /// Where each stream waits for others, and for what.
    pub waits: Vec<(Stream, u64, Clock)>,
    /// Where each stream is stalled.
    pub stalled: Vec<(Stream, u64)>,
    pub past: Vec<Past>,
    /// Bytes that a graph's replays may use, on whatever stream, until its pool is released.
    pub private: Vec<(PoolId, Addr, u64)>,
    /// Streams that are being captured: no call of the heap may name one, and none may cover every stream.
    pub capturing: Vec<Stream>,
    pub faults: Vec<String>,
}

impl Model {
    pub fn push(&mut self, stream: Stream) -> u64 {
        let position = self.position.entry(stream).or_default();
        *position += 1;
        let position = *position;
        self.after.entry(stream).or_default().insert(stream, position);
        position
    }

    /// Whether a stream's first `position` pieces of work may have run.
    pub fn may_be_done(&self, stream: Stream, position: u64) -> bool {
        let stalled = self.stalled.iter().any(|(at, from)| *at == stream && *from <= position);
        let waits = self.waits.iter().filter(|(at, from, _)| *at == stream && *from <= position);
        // A wait is for earlier work, so this ends.
        !stalled && waits.flat_map(|(_, _, clock)| clock).all(|(other, at)| *other == stream || self.may_be_done(*other, *at))
    }

    /// A pool other than `but` that has some of these bytes.
    pub fn pool_at(&self, addr: Addr, bytes: u64, but: Option<PoolId>) -> Option<PoolId> {
        let mut over = self.private.iter().filter(|(_, at, size)| *at < addr + bytes && addr < at + size);
        over.find(|(pool, ..)| Some(*pool) != but).map(|(pool, ..)| *pool)
    }

    /// Notes a call that a capture does not survive.
    fn forbid(&mut self, call: &str, stream: Option<Stream>) {
        if stream.map_or(!self.capturing.is_empty(), |stream| self.capturing.contains(&stream)) {
            self.faults.push(format!("{call} on {stream:?} while {:?} are being captured", self.capturing));
        }
    }

    pub fn in_reach(&self, addr: Addr, bytes: u64, of: Option<Stream>) -> Option<(&Past, Stream)> {
        let over = self.past.iter().filter(|past| past.addr < addr + bytes && addr < past.addr + past.bytes);
        let knows = |user: Stream, position: u64| of.is_some_and(|of| self.after.get(&of).and_then(|c| c.get(&user)) >= Some(&position));
        let mut users = over.flat_map(|past| past.users.iter().map(move |user| (past, *user)));
        users
            .find(|(_, (user, position))| !knows(*user, *position) && !self.may_be_done(*user, *position))
            .map(|(past, (user, _))| (past, user))
    }
}

#[derive(Debug)]
pub struct Spy {
    pub driver: Arc<HostDriver>,
    pub model: Mutex<Model>,
}

impl Driver for Spy {
    fn event_record(&self, event: Event, stream: Stream) -> Result<()> {
        let mut model = self.model.lock().unwrap();
        model.forbid("event_record", Some(stream));
        model.push(stream);
        let clock = model.after[&stream].clone();
        model.events.insert(event, clock);
        self.driver.event_record(event, stream)
    }
    fn event_record_context(&self, event: Event) -> Result<()> {
        let mut model = self.model.lock().unwrap();
        model.forbid("event_record_context", None);
        let everything = model.position.clone();
        model.events.insert(event, everything);
        self.driver.event_record_context(event)
    }
    fn stream_wait_event(&self, stream: Stream, event: Event) -> Result<()> {
        let mut model = self.model.lock().unwrap();
        model.forbid("stream_wait_event", Some(stream));
        let clock = model.events.get(&event).cloned().unwrap_or_default();
        let position = model.push(stream);
        join(model.after.entry(stream).or_default(), &clock);
        model.waits.push((stream, position, clock));
        self.driver.stream_wait_event(stream, event)
    }
    fn unmap(&self, addr: Addr, bytes: u64) -> Result<()> {
        let mut model = self.model.lock().unwrap();
        if let Some((past, user)) = model.in_reach(addr, bytes, None) {
            let fault = format!("{addr:#x}+{bytes} was unmapped while {user:?} may use {past:?}");
            model.faults.push(fault);
        }
        if let Some(pool) = model.pool_at(addr, bytes, None) {
            model.faults.push(format!("{addr:#x}+{bytes} was unmapped while graphs of {pool:?} may use it"));
        }
        self.driver.unmap(addr, bytes)
    }

    fn device(&self) -> &DeviceInfo {
        self.driver.device()
    }
    fn is_host(&self) -> bool {
        true
    }
    fn attach_context(&self) -> Result<()> {
        self.driver.attach_context()
    }
    fn mem_info(&self) -> Result<MemInfo> {
        self.driver.mem_info()
    }
    fn create(&self, bytes: u64) -> Result<Memory> {
        self.driver.create(bytes)
    }
    fn export(&self, memory: Memory) -> Result<OwnedFd> {
        self.driver.export(memory)
    }
    fn import(&self, fd: BorrowedFd<'_>, bytes: u64) -> Result<Memory> {
        self.driver.import(fd, bytes)
    }
    fn release(&self, memory: Memory) -> Result<()> {
        self.driver.release(memory)
    }
    fn reserve(&self, bytes: u64, hint: Addr) -> Result<Addr> {
        self.driver.reserve(bytes, hint)
    }
    fn unreserve(&self, addr: Addr, bytes: u64) -> Result<()> {
        self.driver.unreserve(addr, bytes)
    }
    fn map(&self, addr: Addr, bytes: u64, memory: Memory) -> Result<()> {
        self.driver.map(addr, bytes, memory)
    }
    fn set_access(&self, addr: Addr, bytes: u64, access: Access) -> Result<()> {
        self.driver.set_access(addr, bytes, access)
    }
    fn pointer_info(&self, addr: Addr) -> Result<Option<PointerInfo>> {
        self.driver.pointer_info(addr)
    }
    fn stream_create(&self) -> Result<Stream> {
        self.driver.stream_create()
    }
    fn stream_destroy(&self, stream: Stream) -> Result<()> {
        self.driver.stream_destroy(stream)
    }
    fn stream_id(&self, stream: Stream) -> Result<StreamId> {
        self.model.lock().unwrap().forbid("stream_id", Some(stream));
        self.driver.stream_id(stream)
    }
    fn stream_synchronize(&self, stream: Stream) -> Result<()> {
        // The heap's last resort: here nothing would ever end a stall.
        let model = self.model.lock().unwrap();
        let position = model.position.get(&stream).copied().unwrap_or_default();
        if !model.may_be_done(stream, position) {
            let result = millpond_allocator::driver::CuResult::NOT_READY;
            return Err(millpond_allocator::driver::DriverError::Call { call: "stream_synchronize", result });
        }
        drop(model);
        self.driver.stream_synchronize(stream)
    }
    fn stream_query(&self, stream: Stream) -> Result<bool> {
        self.driver.stream_query(stream)
    }
    fn stream_capture(&self, stream: Stream) -> Result<Capture> {
        self.driver.stream_capture(stream)
    }
    fn copy(&self, dst: Addr, src: Addr, bytes: u64, stream: Stream) -> Result<()> {
        self.driver.copy(dst, src, bytes, stream)
    }
    fn fill(&self, dst: Addr, byte: u8, bytes: u64, stream: Stream) -> Result<()> {
        self.driver.fill(dst, byte, bytes, stream)
    }
    fn event_create(&self) -> Result<Event> {
        self.driver.event_create()
    }
    fn event_destroy(&self, event: Event) -> Result<()> {
        self.driver.event_destroy(event)
    }
    fn event_query(&self, event: Event) -> Result<bool> {
        self.driver.event_query(event)
    }
    #[allow(unsafe_code)]
    unsafe fn host_register(&self, ptr: *mut u8, bytes: usize) -> Result<Addr> {
        // SAFETY: passed on.
        unsafe { self.driver.host_register(ptr, bytes) }
    }
    fn host_address(&self, ptr: *mut u8) -> Result<Addr> {
        self.driver.host_address(ptr)
    }
    fn host_unregister(&self, ptr: *mut u8) -> Result<()> {
        self.driver.host_unregister(ptr)
    }
    fn write_value(&self, stream: Stream, word: Addr, value: u64) -> Result<()> {
        self.driver.write_value(stream, word, value)
    }
    fn wait_value(&self, stream: Stream, word: Addr, value: u64) -> Result<()> {
        self.driver.wait_value(stream, word, value)
    }
}
