//! Random calls on several streams, some of them stalled, against a model of what each stream may still touch.
//!
//! A spy stands between the heap and the driver. It sees every event and every wait, so it knows what each stream's next work
//! comes after; the test knows which streams are stalled. From both follows, for bytes that were freed, whose work on them may
//! still be to come. A block over such bytes is a fault, and so is an unmapped one.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod heap_lab;

use std::collections::HashMap;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex};

use heap_lab::{check_views, heap_over, CHUNK, CONFIG, MIB};
use millpond_allocator::driver::host::{HostConfig, HostDriver, HostPlatform, Stall};
use millpond_allocator::driver::{
    Access, Addr, Capture, DeviceInfo, Driver, Event, MemInfo, Memory, PointerInfo, Result, Stream, StreamId,
};
use millpond_allocator::heap::{HeapConfig, HeapError, Pin};
use proptest::prelude::*;

/// For each stream, how much of its work something comes after.
type Clock = HashMap<Stream, u64>;

fn join(into: &mut Clock, other: &Clock) {
    for (stream, position) in other {
        let known = into.entry(*stream).or_default();
        *known = (*known).max(*position);
    }
}

/// Bytes that were in use, and by whom up to where.
#[derive(Debug, Clone)]
struct Past {
    addr: Addr,
    bytes: u64,
    users: Vec<(Stream, u64)>,
}

#[derive(Debug, Default)]
struct Model {
    /// How much work was queued on each stream.
    position: Clock,
    /// What the next work of each stream comes after.
    after: HashMap<Stream, Clock>,
    /// What each event stands for.
    events: HashMap<Event, Clock>,
    /// Where each stream waits for others, and for what.
    waits: Vec<(Stream, u64, Clock)>,
    /// Where each stream is stalled.
    stalled: Vec<(Stream, u64)>,
    past: Vec<Past>,
    faults: Vec<String>,
}

impl Model {
    fn push(&mut self, stream: Stream) -> u64 {
        let position = self.position.entry(stream).or_default();
        *position += 1;
        let position = *position;
        self.after.entry(stream).or_default().insert(stream, position);
        position
    }

    /// Whether a stream's first `position` pieces of work may have run.
    fn may_be_done(&self, stream: Stream, position: u64) -> bool {
        let stalled = self.stalled.iter().any(|(at, from)| *at == stream && *from <= position);
        let waits = self.waits.iter().filter(|(at, from, _)| *at == stream && *from <= position);
        // A wait is for earlier work, so this ends.
        !stalled && waits.flat_map(|(_, _, clock)| clock).all(|(other, at)| *other == stream || self.may_be_done(*other, *at))
    }

    fn in_reach(&self, addr: Addr, bytes: u64, of: Option<Stream>) -> Option<(&Past, Stream)> {
        let over = self.past.iter().filter(|past| past.addr < addr + bytes && addr < past.addr + past.bytes);
        let knows = |user: Stream, position: u64| of.is_some_and(|of| self.after.get(&of).and_then(|c| c.get(&user)) >= Some(&position));
        let mut users = over.flat_map(|past| past.users.iter().map(move |user| (past, *user)));
        users
            .find(|(_, (user, position))| !knows(*user, *position) && !self.may_be_done(*user, *position))
            .map(|(past, (user, _))| (past, user))
    }
}

#[derive(Debug)]
struct Spy {
    driver: Arc<HostDriver>,
    model: Mutex<Model>,
}

impl Driver for Spy {
    fn event_record(&self, event: Event, stream: Stream) -> Result<()> {
        let mut model = self.model.lock().unwrap();
        model.push(stream);
        let clock = model.after[&stream].clone();
        model.events.insert(event, clock);
        self.driver.event_record(event, stream)
    }
    fn event_record_context(&self, event: Event) -> Result<()> {
        let mut model = self.model.lock().unwrap();
        let everything = model.position.clone();
        model.events.insert(event, everything);
        self.driver.event_record_context(event)
    }
    fn stream_wait_event(&self, stream: Stream, event: Event) -> Result<()> {
        let mut model = self.model.lock().unwrap();
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

#[derive(Debug, Clone, Copy)]
enum Step {
    Allocate {
        stream: usize,
        bytes: u64,
    },
    Free {
        block: usize,
    },
    /// So many small blocks come and go that the stream is recorded for that alone.
    Churn {
        stream: usize,
        frees: usize,
    },
    Record {
        block: usize,
        stream: usize,
        interior: u64,
    },
    Pin {
        block: usize,
    },
    Unpin {
        pin: usize,
    },
    Stall {
        stream: usize,
    },
    Resume {
        stall: usize,
    },
    /// The stream is destroyed and another one made, under the same handle.
    Renew {
        stream: usize,
    },
    Trim {
        bytes: u64,
    },
    EmptyCache,
    Tick,
    Limit {
        chunks: u64,
    },
}

fn step() -> impl Strategy<Value = Step> {
    let (stream, pick) = (0usize..4, 0usize..64);
    let bytes = prop_oneof![1u64..4096, MIB / 2..3 * MIB, CHUNK / 2..CHUNK + 1, CHUNK + 1..4 * CHUNK];
    prop_oneof![
        8 => (stream.clone(), bytes).prop_map(|(stream, bytes)| Step::Allocate { stream, bytes }),
        6 => pick.clone().prop_map(|block| Step::Free { block }),
        2 => (stream.clone(), prop_oneof![4 => 60usize..140, 1 => 2000usize..2200]).prop_map(|(stream, frees)| Step::Churn { stream, frees }),
        3 => (pick.clone(), stream.clone(), 0u64..512).prop_map(|(block, stream, interior)| Step::Record { block, stream, interior }),
        1 => pick.clone().prop_map(|block| Step::Pin { block }),
        1 => pick.clone().prop_map(|pin| Step::Unpin { pin }),
        2 => stream.clone().prop_map(|stream| Step::Stall { stream }),
        3 => pick.prop_map(|stall| Step::Resume { stall }),
        1 => stream.prop_map(|stream| Step::Renew { stream }),
        1 => (1u64..6 * CHUNK).prop_map(|bytes| Step::Trim { bytes }),
        1 => Just(Step::EmptyCache),
        2 => Just(Step::Tick),
        1 => (4u64..10).prop_map(|chunks| Step::Limit { chunks }),
    ]
}

#[derive(Debug)]
struct Block {
    addr: Addr,
    bytes: u64,
    /// The names that the model has for the streams that use it: its own first.
    users: Vec<Stream>,
    pins: u32,
    freed: bool,
}

fn run(steps: &[Step], config: HeapConfig, context_events: bool) {
    let platform = HostPlatform::new(HostConfig { total_bytes: Some(64 << 30), ..HostConfig::default() });
    let driver = platform.driver(0).unwrap();
    driver.attach_context().unwrap();
    let spy = Arc::new(Spy { driver: driver.clone(), model: Mutex::default() });
    let (heap, source) = heap_over(spy.clone(), config, None);
    heap.set_context_events(context_events);
    source.set_limit(8 * CHUNK);
    let mut streams: Vec<Stream> = (0..4).map(|_| driver.stream_create().unwrap()).collect();
    let mut blocks: Vec<Block> = Vec::new();
    let mut pins: Vec<(Pin, Addr)> = Vec::new();
    let mut stalls: Vec<(Stall, Stream)> = Vec::new();
    for step in steps {
        match *step {
            Step::Allocate { stream, bytes } => {
                let stream = streams[stream];
                match heap.allocate(bytes, stream) {
                    Ok(addr) => {
                        for other in &blocks {
                            assert!(other.addr + other.bytes <= addr || addr + bytes <= other.addr, "{other:?} and {bytes} at {addr:#x}");
                        }
                        let mut model = spy.model.lock().unwrap();
                        if let Some((past, user)) = model.in_reach(addr, bytes, Some(stream)) {
                            panic!("{stream:?} got {bytes} at {addr:#x}, which {user:?} may still touch: {past:?}");
                        }
                        model.push(stream);
                        drop(model);
                        let size = heap.block_at(addr + bytes - 1).unwrap().1;
                        assert!(size >= bytes);
                        blocks.push(Block { addr, bytes, users: vec![stream], pins: 0, freed: false });
                    }
                    Err(HeapError::OutOfMemory(figures)) => {
                        let live: u64 = blocks.iter().map(|block| block.bytes).sum();
                        // Of a stream that does not come back some is lost where the context is not recorded.
                        assert!(!context_events || live + bytes > CHUNK, "{bytes} of {live} live: {figures}");
                    }
                    Err(error) => panic!("{error}"),
                }
            }
            Step::Free { block } => {
                let live: Vec<usize> = (0..blocks.len()).filter(|i| !blocks[*i].freed).collect();
                if let Some(at) = live.get(block % live.len().max(1)).copied() {
                    heap.free(blocks[at].addr).unwrap();
                    blocks[at].freed = true;
                    if blocks[at].pins == 0 {
                        retire(&spy, blocks.swap_remove(at));
                    }
                }
            }
            Step::Churn { stream, frees } => {
                let stream = streams[stream];
                let mut held: HashMap<Addr, u64> = HashMap::new();
                for n in 0..frees {
                    // The same size twice would be the same block, which counts as no free.
                    let bytes = 512 << (n % 2);
                    let Ok(addr) = heap.allocate(bytes, stream) else { break };
                    heap.free(addr).unwrap();
                    let mut model = spy.model.lock().unwrap();
                    if let Some((past, user)) = model.in_reach(addr, bytes, Some(stream)) {
                        panic!("{stream:?} got {bytes} at {addr:#x}, which {user:?} may still touch: {past:?}");
                    }
                    model.push(stream);
                    let most = held.entry(addr).or_default();
                    *most = (*most).max(bytes);
                }
                for (addr, bytes) in held {
                    retire(&spy, Block { addr, bytes, users: vec![stream], pins: 0, freed: true });
                }
            }
            Step::Record { block, stream, interior } => {
                let count = blocks.len().max(1);
                if let Some(block) = blocks.get_mut(block % count) {
                    let known = heap.record_stream(block.addr + interior, streams[stream]).unwrap();
                    assert_eq!(known, !block.freed);
                    if known && !block.users.contains(&streams[stream]) {
                        block.users.push(streams[stream]);
                    }
                }
            }
            Step::Pin { block } => {
                let count = blocks.len().max(1);
                if let Some(block) = blocks.get_mut(block % count) {
                    if let Some(pin) = heap.pin(block.addr) {
                        assert!(!block.freed);
                        block.pins += 1;
                        pins.push((pin, block.addr));
                    }
                }
            }
            Step::Unpin { pin } => {
                if !pins.is_empty() {
                    let (pin, addr) = pins.swap_remove(pin % pins.len());
                    heap.unpin(pin);
                    let at = blocks.iter().position(|block| block.addr == addr && block.pins > 0).unwrap();
                    blocks[at].pins -= 1;
                    if blocks[at].pins == 0 && blocks[at].freed {
                        retire(&spy, blocks.swap_remove(at));
                    }
                }
            }
            Step::Stall { stream } => {
                let stream = streams[stream];
                let mut model = spy.model.lock().unwrap();
                let position = model.push(stream);
                model.stalled.push((stream, position));
                stalls.push((driver.stall(stream), stream));
            }
            Step::Resume { stall } => {
                if !stalls.is_empty() {
                    let at = stall % stalls.len();
                    let (stall, _) = stalls.remove(at);
                    // The model's stalls are in the same order.
                    spy.model.lock().unwrap().stalled.remove(at);
                    stall.release();
                }
            }
            Step::Renew { stream } => {
                let old = streams[stream];
                let stands = blocks.iter().any(|block| block.users.contains(&old));
                if !stands && !stalls.iter().any(|(_, other)| *other == old) {
                    let mut model = spy.model.lock().unwrap();
                    let position = model.position.get(&old).copied().unwrap_or_default();
                    // Only a stream that has run dry: the model knows streams by their handles.
                    if model.may_be_done(old, position) {
                        drop(model);
                        driver.stream_synchronize(old).unwrap();
                        driver.stream_destroy(old).unwrap();
                        model = spy.model.lock().unwrap();
                        model.after.remove(&old);
                        drop(model);
                        streams[stream] = driver.stream_create().unwrap();
                    }
                }
            }
            Step::Trim { bytes } => _ = heap.trim(bytes),
            Step::EmptyCache => _ = heap.empty_cache(),
            Step::Tick => heap.tick(),
            Step::Limit { chunks } => source.set_limit(chunks * CHUNK),
        }
        assert_eq!(spy.model.lock().unwrap().faults, Vec::<String>::new());
        let allocated: u64 = blocks.iter().filter(|block| !block.freed).map(|block| block.bytes).sum();
        assert_eq!(heap.stats().all.requested_bytes.current, allocated);
        check_views(&heap, &source);
        assert_eq!(driver.misuse(), 0);
    }
    drop(stalls);
    for stream in &streams {
        driver.stream_synchronize(*stream).unwrap();
    }
    spy.model.lock().unwrap().stalled.clear();
    heap.set_context_events(true);
    pins.into_iter().for_each(|(pin, _)| heap.unpin(pin));
    blocks.iter().filter(|block| !block.freed).for_each(|block| heap.free(block.addr).unwrap());
    heap_lab::until("everything to come back", || {
        heap.tick();
        heap.empty_cache();
        source.counts().reserved == 0
    });
    assert_eq!((heap.stats().all.active.current, source.counts().strange, driver.misuse()), (0, 0, 0));
}

/// Nobody holds the block any more.
fn retire(spy: &Spy, block: Block) {
    let mut model = spy.model.lock().unwrap();
    let users = block.users.iter().map(|user| (*user, model.position.get(user).copied().unwrap_or_default())).collect();
    model.past.push(Past { addr: block.addr, bytes: block.bytes, users });
}

proptest! {
    #[test]
    fn no_stream_gets_bytes_that_another_may_touch(steps in prop::collection::vec(step(), 1..120)) {
        run(&steps, CONFIG, true);
    }

    #[test]
    fn nor_where_each_stream_is_recorded_by_itself(steps in prop::collection::vec(step(), 1..120)) {
        run(&steps, CONFIG, false);
    }

    /// Chunks of many sizes, which growths exchange for others.
    #[test]
    fn nor_does_it_where_chunks_are_exchanged(steps in prop::collection::vec(step(), 1..120)) {
        run(&steps, HeapConfig { min_growth: 2 * MIB, own_chunk: 2 * MIB, ..CONFIG }, true);
    }
}
