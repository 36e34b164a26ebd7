//! Random calls on several streams, some of them stalled, against a model of what each stream may still touch.
//!
//! The driver is watched, as in replays: the model hears of every event, every wait and every answer, so it knows what each stream's
//! next work comes behind. A block over bytes that somebody's work may still reach is a fault, and so is an unmapped one.
//!
//! Streams are captured too, two at once at most. What a capture was given is in reach of its graphs' replays, on whatever stream
//! and whenever, until its pool is released: only captures of that pool may be given it again. No call of the heap may end a capture.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod heap_lab;

use std::collections::HashMap;
use std::sync::Arc;

use heap_lab::{check_views, heap_over, CHUNK, CONFIG, MIB};
use millpond_allocator::driver::host::{HostConfig, HostDriver, HostGraph, HostPlatform, Stall};
use millpond_allocator::driver::{Addr, Driver, Stream};
use millpond_allocator::heap::{Heap, HeapConfig, HeapError, Pin, PoolId};
use millpond_allocator::replay::{Moment, Watched};
use proptest::prelude::*;

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
    /// A capture begins; `torch` knows it as one of a pool.
    Capture {
        stream: usize,
        pool: u64,
    },
    /// It ends, well or not.
    EndCapture {
        capture: usize,
        spoilt: bool,
    },
    Replay {
        graph: usize,
        stream: usize,
    },
    /// A graph is gone: with the last, its pool.
    Drop {
        graph: usize,
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

fn graph_step() -> impl Strategy<Value = Step> {
    let (stream, pick) = (0usize..4, 0usize..64);
    prop_oneof![
        32 => step(),
        4 => (stream.clone(), 0u64..3).prop_map(|(stream, pool)| Step::Capture { stream, pool }),
        4 => (pick.clone(), prop::bool::weighted(0.1)).prop_map(|(capture, spoilt)| Step::EndCapture { capture, spoilt }),
        4 => (pick.clone(), stream).prop_map(|(graph, stream)| Step::Replay { graph, stream }),
        2 => pick.prop_map(|graph| Step::Drop { graph }),
    ]
}

#[derive(Debug)]
struct Block {
    addr: Addr,
    bytes: u64,
    /// The streams that use it: its own first.
    users: Vec<Stream>,
    pins: u32,
    freed: bool,
    /// The replays of the graphs that it was captured for.
    replays: Option<Moment>,
}

/// What torch knows of captures.
struct Graphs {
    driver: Arc<HostDriver>,
    watched: Arc<Watched>,
    captures: Vec<(Stream, PoolId)>,
    graphs: Vec<(HostGraph, PoolId)>,
    pools: HashMap<PoolId, Pool>,
}

/// What a pool's graphs may use until it is released.
struct Pool {
    /// Replays, for the model: they have no end.
    replays: Moment,
    private: Vec<(Addr, u64)>,
    /// Replays that were.
    replayed: Vec<Moment>,
}

impl Graphs {
    fn pool_of(&self, stream: Stream) -> Option<PoolId> {
        self.captures.iter().find(|(at, _)| *at == stream).map(|(_, pool)| *pool)
    }

    /// A block is given to a capture for a pool. Its graphs may be replayed on any stream, so nobody else may touch it any more.
    fn take(&mut self, pool: PoolId, addr: Addr, bytes: u64) -> Moment {
        let pool = self.pools.get_mut(&pool).unwrap();
        self.watched.order().take(addr, bytes, Some(pool.replays.who)).unwrap();
        pool.private.push((addr, bytes));
        pool.replays
    }

    /// Another thread begins each, as torch's would: one that begins a second capture has lost the first. It allocates before others
    /// do, which tells the heap whose capture its stream is in.
    fn begin(&mut self, heap: &Heap, stream: Stream, graph: u64) {
        let pool = PoolId { graph, user: 0 };
        if self.captures.len() == 2 || self.captures.iter().any(|(at, other)| *at == stream || *other == pool) {
            return;
        }
        let watched = self.watched.clone();
        let new = || Pool { replays: watched.order().graph(), private: Vec::new(), replayed: Vec::new() };
        self.pools.entry(pool).or_insert_with(new);
        let begin = || {
            heap.begin_pool(pool);
            self.driver.begin_capture(stream).unwrap();
            if let Ok(addr) = heap.allocate(512, stream) {
                heap.free(addr).unwrap();
                let replays = self.take(pool, addr, 512);
                retire(&watched, Block { addr, bytes: 512, users: vec![stream], pins: 0, freed: true, replays: Some(replays) });
            }
        };
        std::thread::scope(|scope| scope.spawn(begin).join().unwrap());
        self.captures.push((stream, pool));
    }

    fn end(&mut self, heap: &Heap, capture: usize, spoilt: bool) {
        if self.captures.is_empty() {
            return;
        }
        let (stream, pool) = self.captures.remove(capture % self.captures.len());
        if spoilt {
            self.driver.stream_synchronize(stream).unwrap_err();
        }
        let graph = self.driver.end_capture(stream);
        heap.end_pool(pool);
        match graph {
            Ok(graph) => self.graphs.push((graph, pool)),
            Err(_) => {
                assert!(spoilt, "the heap ended a capture");
                self.release(heap, pool);
            }
        }
    }

    fn replay(&mut self, graph: usize, stream: Stream) {
        if self.graphs.is_empty() || self.pool_of(stream).is_some() {
            return;
        }
        let (graph, pool) = &self.graphs[graph % self.graphs.len()];
        self.driver.replay(graph, stream).unwrap();
        self.pools.get_mut(pool).unwrap().replayed.push(self.watched.order().work(stream));
    }

    fn drop_one(&mut self, heap: &Heap, graph: usize) {
        if !self.graphs.is_empty() {
            let (_, pool) = self.graphs.swap_remove(graph % self.graphs.len());
            self.release(heap, pool);
        }
    }

    /// With its last graph a pool's bytes are in reach of the replays that were, and of nothing else.
    fn release(&mut self, heap: &Heap, pool: PoolId) {
        heap.release_pool(pool);
        let uses = self.graphs.iter().map(|(_, pool)| pool).chain(self.captures.iter().map(|(_, pool)| pool));
        if uses.filter(|other| **other == pool).count() > 0 {
            return;
        }
        let gone = self.pools.remove(&pool).unwrap();
        let mut order = self.watched.order();
        order.is_over(gone.replays.who);
        gone.private.iter().for_each(|(addr, bytes)| order.used(*addr, *bytes, &gone.replayed));
    }
}

fn run(steps: &[Step], config: HeapConfig, context_events: bool) {
    let platform = HostPlatform::new(HostConfig { total_bytes: Some(64 << 30), ..HostConfig::default() });
    let driver = platform.driver(0).unwrap();
    driver.attach_context().unwrap();
    let watched = Arc::new(Watched::new(driver.clone(), None));
    let (heap, source) = heap_over(watched.clone(), config, None);
    heap.set_context_events(context_events);
    let mut limit = 8 * CHUNK;
    source.set_limit(limit);
    let mut streams: Vec<Stream> = (0..4).map(|_| watched.stream_create().unwrap()).collect();
    let mut blocks: Vec<Block> = Vec::new();
    let mut pins: Vec<(Pin, Addr)> = Vec::new();
    let mut stalls: Vec<(Stall, Stream)> = Vec::new();
    let mut graphs =
        Graphs { driver: driver.clone(), watched: watched.clone(), captures: Vec::new(), graphs: Vec::new(), pools: HashMap::new() };
    for step in steps {
        match *step {
            Step::Allocate { stream, bytes } => {
                let stream = streams[stream];
                match heap.allocate(bytes, stream) {
                    Ok(addr) => {
                        let pool = graphs.pool_of(stream);
                        let replays = pool.map(|pool| graphs.take(pool, addr, bytes));
                        match pool {
                            Some(_) => driver.fill(addr, 7, bytes.min(64), stream).unwrap(),
                            None => take(&watched, addr, bytes, stream),
                        }
                        let size = heap.block_at(addr + bytes - 1).unwrap().1;
                        assert!(size >= bytes);
                        blocks.push(Block { addr, bytes, users: vec![stream], pins: 0, freed: false, replays });
                    }
                    Err(HeapError::OutOfMemory(figures)) => {
                        // Of a stream that does not come back some is lost where the context is not recorded. A capture keeps it
                        // from being recorded, and graphs keep bytes.
                        if context_events && graphs.captures.is_empty() && graphs.graphs.is_empty() {
                            let (run, room) = (longest_run(&heap, &blocks, bytes > CHUNK), limit.saturating_sub(source.counts().reserved));
                            let growth = bytes.div_ceil(2 * MIB) * 2 * MIB;
                            assert!(run < bytes && room < growth, "{bytes} where {run} are free and {room} could be grown: {figures}");
                        }
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
                        retire(&watched, blocks.swap_remove(at));
                    }
                }
            }
            Step::Churn { stream, .. } | Step::Record { stream, .. } | Step::Stall { stream } | Step::Renew { stream }
                if graphs.pool_of(streams[stream]).is_some() => {}
            Step::Churn { stream, frees } => {
                let stream = streams[stream];
                for n in 0..frees {
                    // The same size twice would be the same block, which counts as no free.
                    let bytes = 512 << (n % 2);
                    let Ok(addr) = heap.allocate(bytes, stream) else { break };
                    heap.free(addr).unwrap();
                    take(&watched, addr, bytes, stream);
                    watched.order().give(addr, &[stream]);
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
                        retire(&watched, blocks.swap_remove(at));
                    }
                }
            }
            Step::Stall { stream } => {
                let stream = streams[stream];
                watched.order().work(stream);
                stalls.push((driver.stall(stream), stream));
            }
            Step::Resume { stall } => {
                if !stalls.is_empty() {
                    let (stall, _) = stalls.remove(stall % stalls.len());
                    stall.release();
                }
            }
            Step::Renew { stream } => {
                let old = streams[stream];
                let stands = blocks.iter().any(|block| block.users.contains(&old));
                if !stands && !stalls.iter().any(|(_, other)| *other == old) {
                    driver.stream_destroy(old).unwrap();
                    streams[stream] = watched.stream_create().unwrap();
                }
            }
            Step::Trim { bytes } => _ = heap.trim(bytes),
            Step::EmptyCache => _ = heap.empty_cache(),
            Step::Tick => heap.tick(),
            Step::Limit { chunks } => {
                limit = chunks * CHUNK;
                source.set_limit(limit);
            }
            Step::Capture { stream, pool } => graphs.begin(&heap, streams[stream], pool),
            Step::EndCapture { capture, spoilt } => graphs.end(&heap, capture, spoilt),
            Step::Replay { graph, stream } => graphs.replay(graph, streams[stream]),
            Step::Drop { graph } => graphs.drop_one(&heap, graph),
        }
        assert_eq!(watched.order().take_faults(), []);
        let allocated: u64 = blocks.iter().filter(|block| !block.freed).map(|block| block.bytes).sum();
        assert_eq!(heap.stats().all.requested_bytes.current, allocated);
        check_views(&heap, &source);
        assert_eq!(driver.misuse(), 0);
    }
    while !graphs.captures.is_empty() {
        graphs.end(&heap, 0, false);
    }
    drop(stalls);
    for stream in &streams {
        driver.stream_synchronize(*stream).unwrap();
    }
    heap.set_context_events(true);
    while !graphs.graphs.is_empty() {
        graphs.drop_one(&heap, 0);
    }
    pins.into_iter().for_each(|(pin, _)| heap.unpin(pin));
    blocks.iter().filter(|block| !block.freed).for_each(|block| heap.free(block.addr).unwrap());
    heap_lab::until("everything to come back", || {
        heap.tick();
        heap.empty_cache();
        source.counts().reserved == 0
    });
    assert_eq!((heap.stats().all.active.current, source.counts().strange, driver.misuse()), (0, 0, 0));
}

/// The most bytes in a row that no block and no pin is on, within a chunk or, for what is larger than one, of whole chunks in a row.
/// A stream that waits for the others can have them all.
fn longest_run(heap: &Heap, blocks: &[Block], over_chunks: bool) -> u64 {
    let (mut longest, mut whole, mut end) = (0, 0, 0);
    for region in heap.regions() {
        let mut run = 0;
        for block in &region.blocks {
            let held = |other: &Block| other.addr < block.addr + block.bytes && block.addr < other.addr + other.bytes;
            run = if block.used || blocks.iter().any(held) { 0 } else { run + block.bytes };
            longest = longest.max(run);
        }
        whole = match (run == region.bytes, region.addr == end) {
            (true, true) => whole + run,
            (true, false) => run,
            (false, _) => 0,
        };
        longest = longest.max(if over_chunks { whole } else { 0 });
        end = region.addr + region.bytes;
    }
    longest
}

/// A stream has a block from here on, and has work for it.
fn take(watched: &Watched, addr: Addr, bytes: u64, stream: Stream) {
    let mut order = watched.order();
    let who = order.who(stream);
    order.take(addr, bytes, Some(who)).unwrap();
    order.work(stream);
}

/// Nobody holds the block any more. While its pool is private no replay is known to be the last: that is noted when it is released.
fn retire(watched: &Watched, block: Block) {
    let mut order = watched.order();
    order.give(block.addr, &block.users[usize::from(block.replays.is_some())..]);
    order.used(block.addr, block.bytes, block.replays.as_slice());
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

    #[test]
    fn nor_gets_anybody_what_a_replay_may_touch(steps in prop::collection::vec(graph_step(), 1..120)) {
        run(&steps, CONFIG, true);
    }

    #[test]
    fn nor_where_chunks_are_exchanged_beside_graphs(steps in prop::collection::vec(graph_step(), 1..120)) {
        run(&steps, HeapConfig { min_growth: 2 * MIB, own_chunk: 2 * MIB, ..CONFIG }, true);
    }

    #[test]
    fn nor_where_no_event_covers_the_context_beside_graphs(steps in prop::collection::vec(graph_step(), 1..120)) {
        run(&steps, CONFIG, false);
    }
}
