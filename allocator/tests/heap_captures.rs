//! The heap under stream capture, and beside streams that stand behind timelines.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod heap_lab;

use std::sync::{Arc, Barrier};

use heap_lab::{oom, until, Lab, Words, CHUNK, CONFIG, MIB};
use millpond_allocator::driver::host::HostCall;
use millpond_allocator::driver::{Capture, CuResult, Driver, Stream};
use millpond_allocator::heap::PoolId;
use millpond_allocator::timeline::{Signal, Slots, Timelines};

const POOL: PoolId = PoolId { graph: 1, user: 0 };

#[test]
fn a_capture_s_blocks_stay_in_its_pool() {
    let lab = Lab::new();
    let (stream, other) = (lab.stream(), lab.stream());
    lab.heap.begin_pool(POOL);
    lab.driver.begin_capture(stream).unwrap();
    let block = lab.alloc(3 * MIB, stream);
    lab.driver.fill(block, 9, 3 * MIB, stream).unwrap();
    lab.free(block);
    assert_eq!(lab.touch(3 * MIB, stream), block, "in stream order inside the capture");
    // The rest of the chunk is not the pool's.
    assert_eq!(lab.alloc(3 * MIB, other), block + 3 * MIB);
    let graph = lab.driver.end_capture(stream).unwrap();
    lab.heap.end_pool(POOL);
    for stream in [stream, other, Stream::LEGACY] {
        assert_ne!(lab.touch(3 * MIB, stream), block);
    }
    lab.heap.empty_cache();
    lab.driver.replay(&graph, stream).unwrap();
    lab.driver.stream_synchronize(stream).unwrap();
    let regions = lab.heap.regions();
    let view = regions.iter().flat_map(|region| &region.blocks).find(|view| view.addr == block).unwrap();
    assert_eq!((view.used, view.pool), (false, Some(POOL)));
}

/// A capture can ask nobody to record anything, so its beginning does, be an older event still in flight.
#[test]
fn what_was_freed_just_before_a_capture_is_found_in_it() {
    let lab = Lab::new();
    let (one, two) = (lab.stream(), lab.stream());
    let left = lab.alloc(CHUNK, one);
    let stall = lab.driver.stall(one);
    // The device is busy, and an event in flight says so.
    lab.alloc(CHUNK, two);
    lab.free(left);
    lab.freeze();
    lab.heap.begin_pool(POOL);
    lab.driver.begin_capture(two).unwrap();
    oom(lab.heap.allocate(CHUNK, two));
    stall.release();
    until("its bytes", || lab.heap.allocate(CHUNK, two) == Ok(left));
    lab.driver.end_capture(two).unwrap();
    lab.heap.end_pool(POOL);
}

#[test]
fn a_whole_free_chunk_of_a_graph_is_never_trimmed() {
    let lab = Lab::new();
    let stream = lab.stream();
    lab.heap.begin_pool(POOL);
    lab.driver.begin_capture(stream).unwrap();
    let (block, span) = (lab.alloc(CHUNK, stream), lab.alloc(2 * CHUNK, stream));
    lab.free(block);
    lab.free(span);
    lab.driver.fill(block, 9, CHUNK, stream).unwrap();
    lab.driver.fill(span, 9, 2 * CHUNK, stream).unwrap();
    let graph = lab.driver.end_capture(stream).unwrap();
    lab.heap.end_pool(POOL);
    lab.driver.stream_synchronize(stream).unwrap();
    lab.tick_until("ticks", || lab.heap.empty_cache() == 0);
    assert_eq!(lab.reserved(), 3 * CHUNK);
    lab.driver.replay(&graph, stream).unwrap();
    lab.driver.stream_synchronize(stream).unwrap();
    lab.heap.release_pool(POOL);
    lab.tick_until("the pool's chunks", || {
        lab.heap.empty_cache();
        lab.reserved() == 0
    });
}

#[test]
fn a_released_pool_is_usable_only_after_everything_that_ran() {
    let lab = Lab::new();
    let (stream, replayer) = (lab.stream(), lab.stream());
    lab.heap.begin_pool(POOL);
    lab.driver.begin_capture(stream).unwrap();
    let (block, kept) = (lab.alloc(4 * MIB, stream), lab.alloc(4 * MIB, stream));
    lab.free(block);
    let graph = lab.driver.end_capture(stream).unwrap();
    lab.heap.end_pool(POOL);
    let stall = lab.driver.stall(replayer);
    lab.driver.replay(&graph, replayer).unwrap();
    lab.heap.release_pool(POOL);
    lab.free(kept);
    lab.heap.tick();
    for stream in [stream, Stream::LEGACY] {
        let other = lab.touch(4 * MIB, stream);
        assert!(other != block && other != kept, "a replay on a stream that never allocated may be at it");
    }
    stall.release();
    lab.driver.stream_synchronize(replayer).unwrap();
    lab.tick_until("all chunks", || {
        lab.heap.empty_cache();
        lab.reserved() == 0
    });
}

#[test]
fn a_pool_lives_as_long_as_its_last_graph() {
    let lab = Lab::new();
    let stream = lab.stream();
    let mut blocks = Vec::new();
    for _ in 0..2 {
        lab.heap.begin_pool(POOL);
        lab.driver.begin_capture(stream).unwrap();
        blocks.push(lab.touch(CHUNK, stream));
        lab.driver.end_capture(stream).unwrap();
        lab.heap.end_pool(POOL);
    }
    assert_eq!(blocks[0], blocks[1], "graphs of one pool share its bytes");
    lab.heap.release_pool(POOL);
    lab.freeze();
    oom(lab.heap.allocate(CHUNK, stream));
    lab.heap.release_pool(POOL);
    assert_eq!(lab.alloc(CHUNK, stream), blocks[0]);
    lab.heap.release_pool(POOL);
}

#[test]
fn two_captures_at_once_have_pools_of_their_own() {
    let lab = Lab::new();
    let meet = Barrier::new(2);
    let run = |graph| {
        let pool = PoolId { graph, user: 0 };
        let stream = lab.stream();
        lab.heap.begin_pool(pool);
        lab.driver.begin_capture(stream).unwrap();
        meet.wait();
        let block = lab.alloc(CHUNK, stream);
        meet.wait();
        // Autograd's threads allocate on the stream that this one captures.
        let backward = std::thread::scope(|scope| scope.spawn(|| lab.alloc(CHUNK / 2, stream)).join().unwrap());
        meet.wait();
        lab.driver.end_capture(stream).unwrap();
        lab.heap.end_pool(pool);
        meet.wait();
        (pool, [block, backward])
    };
    let (one, two) = std::thread::scope(|scope| {
        let (one, two) = (scope.spawn(|| run(1)), scope.spawn(|| run(2)));
        (one.join().unwrap(), two.join().unwrap())
    });
    let regions = lab.heap.regions();
    for (pool, blocks) in [one, two] {
        for block in blocks {
            let view = regions.iter().flat_map(|region| &region.blocks).find(|view| view.addr == block).unwrap();
            assert_eq!(view.pool, Some(pool));
        }
    }
}

#[test]
fn what_is_recorded_in_a_capture_waits_for_its_end() {
    let lab = Lab::new();
    let (stream, other) = (lab.stream(), lab.stream());
    lab.heap.begin_pool(POOL);
    lab.driver.begin_capture(stream).unwrap();
    let block = lab.alloc(CHUNK, stream);
    lab.heap.record_stream(block, other).unwrap();
    lab.free(block);
    assert_ne!(lab.alloc(CHUNK, stream), block);
    lab.heap.tick();
    lab.driver.end_capture(stream).unwrap();
    lab.heap.end_pool(POOL);
    lab.tick_until("the block", || lab.heap.stats().all.active.current == 1);
}

#[test]
fn a_capture_that_fails_stops_nothing() {
    let lab = Lab::new();
    let (stream, other) = (lab.stream(), lab.stream());
    for tells in [true, false, false] {
        lab.heap.begin_pool(POOL);
        lab.driver.begin_capture(stream).unwrap();
        lab.alloc(MIB, stream);
        let event = lab.driver.event_create().unwrap();
        assert!(lab.driver.event_record_context(event).is_err(), "it spoils the capture");
        lab.alloc(MIB, stream);
        assert!(lab.driver.end_capture(stream).is_err());
        if tells {
            lab.heap.end_pool(POOL);
        }
        // torch does not end the pool of a capture whose end threw: the stream is seen running again.
        lab.touch(MIB, stream);
        let block = lab.alloc(CHUNK, other);
        lab.heap.record_stream(block, stream).unwrap();
        let pending = lab.heap.stats().all.active.current;
        lab.free(block);
        lab.tick_until("a block that needs a context-wide event", || lab.heap.stats().all.active.current < pending);
    }
}

/// Begins a capture and spoils it; torch is told by its end, and we by nobody.
fn fails(lab: &Lab, stream: Stream, inside: impl FnOnce()) {
    lab.heap.begin_pool(POOL);
    lab.driver.begin_capture(stream).unwrap();
    inside();
    let event = lab.driver.event_create().unwrap();
    assert!(lab.driver.event_record_context(event).is_err(), "it spoils the capture");
    assert!(lab.driver.end_capture(stream).is_err());
    assert_eq!(lab.heap.unless_capturing(|| ()), None);
}

/// One that fails before its first malloc: no stream was seen in it that could be seen running again.
#[test]
fn a_capture_that_failed_is_over_when_its_thread_says_so() {
    let lab = Lab::new();
    let (side, one, two) = (lab.stream(), lab.stream(), lab.stream());
    let left = lab.alloc(CHUNK, one);
    for _ in 0..2 {
        fails(&lab, side, || ());
        std::thread::scope(|scope| scope.spawn(|| lab.heap.fail_capture()).join().unwrap());
        assert_eq!(lab.heap.unless_capturing(|| ()), None, "another thread's word");
        lab.heap.fail_capture();
        assert_eq!(lab.heap.unless_capturing(|| ()), Some(()));
    }
    lab.free(left);
    lab.freeze();
    assert_eq!(lab.alloc(CHUNK, two), left, "what one stream leaves another gets");
    lab.heap.record_stream(left, one).unwrap();
    lab.free(left);
    lab.tick_until("the chunk", || {
        lab.heap.empty_cache();
        lab.reserved() == 0
    });
}

#[test]
fn the_pool_of_a_failed_capture_lives_only_as_long_as_other_graphs_of_it() {
    let lab = Lab::new();
    let side = lab.stream();
    let pools = || lab.heap.regions().iter().flat_map(|region| &region.blocks).filter(|block| block.pool == Some(POOL)).count();
    lab.heap.begin_pool(POOL);
    lab.driver.begin_capture(side).unwrap();
    lab.touch(CHUNK, side);
    lab.driver.end_capture(side).unwrap();
    lab.heap.end_pool(POOL);
    // That one has ended: nothing of it fails any more.
    lab.heap.fail_capture();
    fails(&lab, side, || {
        lab.touch(CHUNK, side);
    });
    lab.heap.fail_capture();
    assert_eq!(pools(), 1, "the first graph's");
    lab.heap.release_pool(POOL);
    assert_eq!(pools(), 0);
    // Alone, and with a block that outlives it.
    let mut kept = 0;
    fails(&lab, side, || kept = lab.alloc(CHUNK, side));
    lab.heap.fail_capture();
    lab.free(kept);
    assert_eq!(pools(), 0);
    lab.tick_until("all chunks", || {
        lab.heap.empty_cache();
        lab.reserved() == 0
    });
}

/// Whatever the heap does for other threads, a capture in global mode goes on.
#[test]
fn nothing_breaks_another_thread_s_capture() {
    let lab = Lab::new();
    let (captured, one, two) = (lab.stream(), lab.stream(), lab.stream());
    let before = lab.alloc(CHUNK, one);
    lab.heap.record_stream(before, captured).unwrap();
    lab.heap.begin_pool(POOL);
    lab.driver.begin_capture(captured).unwrap();
    let inside = lab.alloc(MIB, captured);
    lab.driver.fill(inside, 1, MIB, captured).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            lab.free(before);
            let stall = lab.driver.stall(one);
            for turn in 0..200 {
                let blocks = [lab.alloc(CHUNK, one), lab.alloc(MIB + turn * 512, two)];
                lab.heap.record_stream(blocks[1], one).unwrap();
                blocks.iter().for_each(|block| lab.free(*block));
                lab.heap.tick();
                lab.heap.trim(CHUNK);
                lab.heap.empty_cache();
            }
            lab.freeze();
            oom(lab.heap.allocate(64 * CHUNK, Stream::LEGACY));
            let _ = lab.heap.allocate(CHUNK, two);
            stall.release();
        });
    });
    assert_eq!(lab.driver.stream_capture(captured), Ok(Capture::Active));
    assert_eq!(lab.driver.end_capture(captured).unwrap().len(), 1);
    lab.heap.end_pool(POOL);
    lab.tick_until("what waited for the capture", || {
        lab.heap.regions().iter().flat_map(|region| &region.blocks).all(|block| !block.pending)
    });
}

#[test]
fn a_capture_that_the_heap_was_not_told_of_is_left_alone() {
    let lab = Lab::new();
    let (one, two) = (lab.stream(), lab.stream());
    lab.touch(MIB, two);
    let left = lab.alloc(CHUNK, Stream::LEGACY);
    lab.driver.begin_capture(one).unwrap();
    let blocks = [lab.alloc(MIB, one), lab.alloc(CHUNK, one), lab.alloc(2 * CHUNK, one)];
    blocks.iter().for_each(|block| lab.free(*block));
    // Sizes that differ, and so many that any other stream would have been recorded for them alone.
    for n in 0..2_500 {
        lab.touch(512 << (n % 2), one);
    }
    lab.alloc(CHUNK, one);
    // What the heap does without that stream is blind, where it looks at the whole context.
    lab.heap.set_context_events(false);
    lab.free(left);
    for _ in 0..200 {
        lab.touch(MIB, two);
        lab.touch(2 * CHUNK, two);
        lab.heap.tick();
        lab.heap.empty_cache();
        lab.heap.give_way(u64::MAX);
    }
    assert_eq!(lab.driver.end_capture(one).unwrap().len(), 0);
    lab.heap.set_context_events(true);
}

#[test]
fn a_driver_without_context_events_is_asked_once() {
    let lab = Lab::new();
    let (one, two) = (lab.stream(), lab.stream());
    lab.driver.fail_nth(HostCall::EventRecordContext, 1, CuResult::NOT_SUPPORTED);
    let block = lab.touch(CHUNK, one);
    assert_ne!(lab.alloc(CHUNK, two), block);
    lab.driver.fail_nth(HostCall::EventRecordContext, 1, CuResult::UNKNOWN);
    lab.heap.tick();
    let event = lab.driver.event_create().unwrap();
    assert!(lab.driver.event_record_context(event).is_err(), "the heap asked again");
    // Its own calls say how far a stream has come.
    assert_eq!(lab.touch(MIB, one), block);
    lab.driver.stream_synchronize(one).unwrap();
    lab.heap.tick();
    lab.freeze();
    lab.alloc(4 * MIB, one);
}

#[test]
fn nobody_is_made_to_wait_for_a_stream_behind_an_unmet_timeline() {
    let words = Arc::new(Words::default());
    let mut timelines = None;
    let lab = Lab::with(CONFIG, |driver| {
        timelines = Some(Arc::new(Timelines::new(driver.clone(), words.clone(), Arc::new(Slots::new(0, 4))).unwrap()));
        timelines.clone()
    });
    let timelines = timelines.unwrap();
    let (one, two) = (lab.stream(), lab.stream());
    let block = lab.alloc(CHUNK, one);
    lab.freeze();
    timelines.wait(one, Signal { timeline: 9, value: 3 }).unwrap();
    lab.free(block);
    oom(lab.heap.allocate(CHUNK, two));
    assert_eq!(lab.driver.stream_query(two), Ok(true), "nothing may have been queued");
    assert_eq!(lab.touch(CHUNK, one), block, "its own stream has it at once");
    words.0[9].store(3);
    lab.driver.stream_synchronize(one).unwrap();
    assert_eq!(lab.alloc(CHUNK, two), block);
}

#[test]
fn what_a_capture_forbids_waits_for_its_end() {
    let lab = Lab::new();
    let pool = PoolId { graph: 1, user: 0 };
    assert_eq!(lab.heap.unless_capturing(|| 1), Some(1));
    lab.heap.begin_pool(pool);
    assert_eq!(lab.heap.unless_capturing(|| 1), None);
    lab.heap.end_pool(pool);
    assert_eq!(lab.heap.unless_capturing(|| 1), Some(1));
    lab.heap.set_context_events(false);
    assert_eq!(lab.heap.unless_capturing(|| 1), None);
}
