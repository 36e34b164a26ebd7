//! The heap on the host driver: reuse in stream order, growth, limits, statistics.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod heap_lab;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use heap_lab::{check_views, oom, Dice, Lab, CHUNK, KIB, MIB, WINDOW};
use millpond_allocator::driver::host::HostCall;
use millpond_allocator::driver::{CuResult, Driver, Stream};
use millpond_allocator::heap::{HeapConfig, HeapError, Stats};

#[test]
fn a_stream_gets_its_own_bytes_back_at_once() {
    let lab = Lab::new();
    for stream in [Stream::LEGACY, lab.stream()] {
        let _stall = lab.driver.stall(stream);
        let first = lab.touch(3 * MIB, stream);
        assert_eq!(lab.touch(3 * MIB, stream), first);
    }
    assert_eq!(lab.heap.stats().all.allocation.current, 0);
}

#[test]
fn another_stream_gets_bytes_only_when_they_are_done_with() {
    let lab = Lab::new();
    let (one, two) = (lab.stream(), lab.stream());
    let stall = lab.driver.stall(one);
    let block = lab.touch(CHUNK, one);
    let other = lab.alloc(CHUNK, two);
    assert_ne!(other, block, "these bytes may still be in use");
    assert_eq!(lab.reserved(), 2 * CHUNK);
    stall.release();
    lab.driver.stream_synchronize(one).unwrap();
    assert_eq!(lab.alloc(CHUNK, two), block);
    assert_eq!(lab.reserved(), 2 * CHUNK);
}

#[test]
fn what_a_stream_has_left_is_others_though_a_third_is_stuck() {
    let lab = Lab::new();
    let (one, two, stuck) = (lab.stream(), lab.stream(), lab.stream());
    let _stall = lab.driver.stall(stuck);
    lab.touch(512, stuck);
    let use_much = |stream| {
        let blocks: Vec<_> = (0..200).map(|_| lab.alloc(CHUNK, stream)).collect();
        blocks.iter().for_each(|block| lab.free(*block));
        lab.touch(CHUNK, stream);
    };
    use_much(one);
    let before = lab.reserved();
    use_much(two);
    assert!(lab.reserved() <= before + CHUNK, "{} after {before}", lab.reserved());
}

#[test]
fn an_idle_device_never_grows() {
    let lab = Lab::new();
    let streams: Vec<_> = (0..8).map(|_| lab.stream()).collect();
    for round in 0..100 {
        for stream in &streams {
            lab.touch(CHUNK - round * 512, *stream);
        }
    }
    assert_eq!(lab.reserved(), CHUNK);
}

#[test]
fn bytes_of_others_merge_when_they_are_done_with() {
    let lab = Lab::new();
    let (one, two) = (lab.stream(), lab.stream());
    let halves = [lab.alloc(CHUNK / 2, one), lab.alloc(CHUNK / 2, two)];
    halves.iter().for_each(|half| lab.free(*half));
    lab.alloc(CHUNK, lab.stream());
    assert_eq!(lab.reserved(), CHUNK);
}

#[test]
fn when_growth_fails_the_stream_waits_for_others() {
    let lab = Lab::new();
    let (one, two) = (lab.stream(), lab.stream());
    let block = lab.alloc(CHUNK, one);
    lab.freeze();
    let stall = lab.driver.stall(one);
    lab.driver.fill(block, 1, CHUNK, one).unwrap();
    lab.free(block);
    assert_eq!(lab.alloc(CHUNK, two), block);
    lab.driver.fill(block, 2, CHUNK, two).unwrap();
    assert!(!lab.driver.stream_query(two).unwrap(), "the second stream has to stand behind the first");
    stall.release();
    lab.driver.stream_synchronize(two).unwrap();
    assert_eq!(byte(block), 2);
    assert_eq!(byte(block + CHUNK - 1), 2);
    assert_eq!(lab.heap.stats().retries, 1);
}

#[allow(unsafe_code)]
fn byte(addr: u64) -> u8 {
    // SAFETY: the host device's memory is this process's own, mapped, and no stream is at work on it.
    unsafe { std::ptr::read_volatile(addr as *const u8) }
}

#[test]
fn a_stream_waits_for_no_more_than_one_event_where_that_is_enough() {
    let lab = Lab::new();
    let (one, two, three) = (lab.stream(), lab.stream(), lab.stream());
    let bytes = CHUNK - 4 * KIB;
    let (hole, _kept) = (lab.alloc(512, one), lab.alloc(512, one));
    let (a, b) = (lab.alloc(bytes, one), lab.alloc(CHUNK, two));
    let slow = [lab.driver.stall(one), lab.driver.stall(two)];
    [hole, a, b].into_iter().for_each(|block| lab.free(block));
    lab.alloc(CHUNK, three);
    // That miss asked for an event, which is recorded at the stream's next call.
    assert_eq!(lab.touch(512, one), hole);
    lab.freeze();
    assert_eq!(lab.alloc(bytes, three), a);
    let [first, second] = slow;
    first.release();
    lab.driver.stream_synchronize(three).unwrap();
    drop(second);
}

/// What a stream that stays away has freed is found by events that it recorded before: where the context cannot be recorded there
/// are no others.
#[test]
fn what_a_stream_left_long_ago_is_found_without_events_of_the_context() {
    let lab = Lab::new();
    lab.heap.set_context_events(false);
    let (one, two) = (lab.stream(), lab.stream());
    let (left, hole) = (lab.alloc(CHUNK, one), lab.alloc(MIB, one));
    let (_kept, _other) = (lab.alloc(MIB, one), lab.alloc(MIB, two));
    lab.free(left);
    lab.free(hole);
    // Sizes that differ from one to the next: a block that is malloced again as it was counts as no free.
    (0..100).for_each(|n| assert_eq!(lab.touch(512 << (n % 2), one), hole));
    lab.driver.stream_synchronize(one).unwrap();
    lab.freeze();
    assert_eq!(lab.alloc(CHUNK, two), left, "the first never comes again");
}

/// As in pool mode, on torch's default stream: nobody calls again, and another process has no room.
#[test]
fn what_the_legacy_stream_left_goes_back_without_events_of_the_context() {
    let lab = Lab::new();
    lab.heap.set_context_events(false);
    let blocks = [(); 3].map(|()| lab.alloc(CHUNK, Stream::LEGACY));
    let stall = lab.driver.stall(Stream::LEGACY);
    blocks.iter().for_each(|block| lab.free(*block));
    assert_eq!(lab.heap.give_way(2 * CHUNK), 2 * CHUNK, "owed");
    (0..20).for_each(|_| lab.heap.tick());
    assert_eq!((lab.reserved(), lab.heap.owed()), (3 * CHUNK, 2 * CHUNK), "work that was queued before may be at them");
    stall.release();
    lab.tick_until("two chunks", || lab.reserved() == CHUNK);
    // And another stream of this process, when it has missed them.
    let one = lab.stream();
    lab.freeze();
    lab.tick_until("the third", || lab.heap.allocate(CHUNK, one).is_ok());
}

/// A stream that may be gone is never recorded but by its own calls.
#[test]
fn what_another_stream_left_waits_for_it_or_for_an_event_of_the_context() {
    let lab = Lab::new();
    lab.heap.set_context_events(false);
    let one = lab.stream();
    let blocks = [lab.alloc(CHUNK, one), lab.alloc(CHUNK - MIB, one)];
    lab.free(blocks[0]);
    lab.driver.stream_synchronize(one).unwrap();
    assert_eq!(lab.heap.give_way(CHUNK), CHUNK, "owed");
    lab.heap.tick();
    assert_eq!(lab.reserved(), 2 * CHUNK);
    // It is alone, and its next call records it all the same.
    let small = lab.alloc(512, one);
    lab.driver.stream_synchronize(one).unwrap();
    lab.tick_until("the first chunk", || lab.reserved() == CHUNK);
    [small, blocks[1]].iter().for_each(|block| lab.free(*block));
    lab.driver.stream_destroy(one).unwrap();
    assert_eq!(lab.heap.give_way(u64::MAX), CHUNK, "owed");
    (0..20).for_each(|_| lab.heap.tick());
    assert_eq!(lab.reserved(), CHUNK);
    lab.heap.set_context_events(true);
    lab.tick_until("the second, by an event of the context", || lab.reserved() == 0);
}

/// However rarely a stream is recorded: where somebody misses its bytes, the next call that is handed it records it.
#[test]
fn what_a_stream_freed_is_others_after_its_next_call() {
    let lab = Lab::new();
    let (one, two, busy) = (lab.stream(), lab.stream(), lab.stream());
    let (left, hole) = (lab.alloc(CHUNK, one), lab.alloc(MIB, one));
    let (_kept, _other) = (lab.alloc(MIB, one), lab.alloc(MIB, two));
    lab.free(left);
    lab.free(hole);
    let stall = lab.driver.stall(busy);
    assert_ne!(lab.alloc(CHUNK, two), left, "nobody can tell what of the device is busy");
    assert_ne!(lab.alloc(CHUNK, two), left, "nor later");
    lab.alloc(512, one);
    lab.driver.stream_synchronize(one).unwrap();
    lab.freeze();
    assert_eq!(lab.alloc(CHUNK, two), left);
    drop(stall);
}

#[test]
fn two_streams_that_alternate_do_not_fragment() {
    let lab = Lab::new();
    let (streams, mut dice, mut live) = ([lab.stream(), lab.stream()], Dice(7), std::collections::VecDeque::new());
    for turn in 0..10_000 {
        let stream = streams[turn % 2];
        live.push_back(lab.alloc(MIB / 2 + dice.roll(4 * MIB), stream));
        if live.len() > 4 {
            lab.free(live.pop_front().unwrap());
        }
        if turn % 100 == 0 {
            streams.iter().for_each(|stream| lab.driver.stream_synchronize(*stream).unwrap());
        }
    }
    // Five blocks of at most 4.5 MiB: two to a chunk at worst.
    assert!(lab.source.counts().peak <= 5 * CHUNK, "{} MiB", lab.source.counts().peak / MIB);
}

#[test]
fn two_busy_streams_that_alternate_stay_bounded() {
    let lab = Lab::new();
    let streams = [lab.stream(), lab.stream()];
    for turn in 0..2_000 {
        let _stall = lab.driver.stall(streams[1 - turn % 2]);
        lab.touch(1 + (turn as u64 * 977 * KIB) % (7 * MIB), streams[turn % 2]);
    }
    assert!(lab.source.counts().peak <= 4 * CHUNK, "{} MiB", lab.source.counts().peak / MIB);
}

#[test]
fn recorded_streams_are_waited_for() {
    let lab = Lab::new();
    let (one, two) = (lab.stream(), lab.stream());
    for interior in [0, 512, 1, CHUNK - 1] {
        let block = lab.alloc(CHUNK, one);
        assert_eq!(lab.heap.record_stream(block + interior, two), Ok(true));
        assert_eq!(lab.heap.record_stream(block, one), Ok(true));
        let stall = lab.driver.stall(two);
        lab.free(block);
        let stats = lab.heap.stats().all;
        assert_eq!((stats.allocation.current, stats.active.current), (0, 1));
        let other = lab.touch(CHUNK, one);
        assert_ne!(other, block);
        lab.heap.trim(u64::MAX);
        assert_eq!(lab.heap.window().chunks_in(block - lab.heap.window().base(), CHUNK).len(), 1, "its chunk has to stay");
        stall.release();
        lab.tick_until("the block", || lab.heap.stats().all.active.current == 0);
        lab.free(lab.alloc(CHUNK, one));
    }
}

#[test]
fn a_block_that_waited_for_a_recorded_stream_is_its_own_stream_s_again() {
    let lab = Lab::new();
    let (one, two) = (lab.stream(), lab.stream());
    let block = lab.alloc(CHUNK, one);
    lab.heap.record_stream(block, two).unwrap();
    lab.freeze();
    lab.free(block);
    let _stall = lab.driver.stall(one);
    assert_eq!(lab.alloc(CHUNK, one), block);
}

#[test]
fn streams_recorded_on_what_is_not_ours_are_ignored() {
    let lab = Lab::new();
    let (stream, base) = (lab.stream(), lab.heap.window().base());
    let block = lab.touch(MIB, stream);
    for addr in [0, 1, base - 1, base + WINDOW, u64::MAX, block, block + 4 * MIB, base + CHUNK] {
        assert_eq!(lab.heap.record_stream(addr, stream), Ok(false), "{addr:#x}");
    }
}

#[test]
fn a_destroyed_stream_is_never_touched() {
    let lab = Lab::new();
    let (keep, gone) = (lab.stream(), lab.stream());
    let used = lab.alloc(2 * MIB, keep);
    lab.heap.record_stream(used, gone).unwrap();
    let (freed, live) = (lab.touch(2 * MIB, gone), lab.alloc(2 * MIB, gone));
    lab.driver.stream_destroy(gone).unwrap();
    let again = lab.stream();
    assert_eq!(again, gone, "the handle is used again");
    lab.free(live);
    lab.free(used);
    lab.tick_until("what the destroyed stream used", || lab.heap.stats().all.active.current == 0);
    lab.freeze();
    assert_eq!(lab.touch(CHUNK, again), freed.min(live).min(used));
}

#[test]
fn streams_that_come_and_go_leave_nothing_behind() {
    let lab = Lab::new();
    for turn in 0..600 {
        let stream = lab.stream();
        let block = lab.alloc(MIB, Stream::LEGACY);
        lab.heap.record_stream(block, stream).unwrap();
        lab.free(block);
        lab.touch(MIB + turn * 512, stream);
        lab.driver.stream_destroy(stream).unwrap();
        if turn % 8 == 0 {
            lab.heap.tick();
        }
    }
    lab.tick_until("all blocks", || lab.heap.stats().all.active.current == 0);
    assert_eq!(lab.reserved(), CHUNK);
    assert_eq!(lab.heap.empty_cache(), CHUNK);
}

#[test]
fn the_block_that_was_freed_last_is_found_by_whoever_looks() {
    let lab = Lab::new();
    let (one, two) = (lab.stream(), lab.stream());
    let block = lab.alloc(MIB, one);
    let pin = lab.heap.pin(block).unwrap();
    lab.heap.unpin(pin);
    lab.free(block);
    assert_eq!(lab.heap.free(block), Err(HeapError::Foreign { addr: block }), "a second free");
    assert_eq!(lab.alloc(MIB, one), block, "as it was");
    // A handle of its former life says nothing of this one.
    let live = lab.heap.pin(block).unwrap();
    lab.heap.unpin(pin);
    lab.free(block);
    assert_ne!(lab.touch(MIB, one), block, "the live pin still holds it");
    lab.heap.unpin(live);

    // Another size, another stream, a look from outside, a trim.
    let block = lab.alloc(MIB, one);
    lab.free(block);
    assert_eq!(lab.touch(2 * MIB, one), lab.heap.window().base(), "merged with what lies beside it");
    lab.free(lab.alloc(MIB, one));
    lab.heap.regions().iter().flat_map(|region| &region.blocks).for_each(|block| assert!(!block.used && !block.pending, "{block:?}"));
    lab.free(lab.alloc(MIB, one));
    let (pieces, bytes) = lab.heap.inactive_split();
    assert_eq!((pieces.current, bytes.current), (0, 0));
    lab.free(lab.alloc(CHUNK, one));
    lab.driver.stream_synchronize(one).unwrap();
    assert_eq!(lab.alloc(CHUNK, two), lab.heap.window().base(), "the other stream has it when the first is through");
    lab.free(lab.heap.window().base());
    lab.driver.stream_synchronize(two).unwrap();
    assert_eq!(lab.heap.empty_cache(), CHUNK);
    assert_eq!(lab.heap.stats().all.active.current, 0);
}

#[test]
fn a_pinned_block_is_kept_when_it_is_freed() {
    let lab = Lab::new();
    let stream = lab.stream();
    let block = lab.alloc(MIB, stream);
    let (pin, again) = (lab.heap.pin(block).unwrap(), lab.heap.pin(block).unwrap());
    assert_eq!((pin.offset + lab.heap.window().base(), pin.bytes), (block, MIB));
    lab.free(block);
    assert!(lab.heap.pin(block).is_none());
    assert!(lab.heap.block_at(block).is_none());
    assert_ne!(lab.touch(MIB, stream), block);
    lab.heap.unpin(pin);
    assert_ne!(lab.touch(MIB, stream), block, "there is another pin");
    lab.heap.unpin(again);
    let other = lab.alloc(MIB, stream);
    assert_eq!(lab.alloc(MIB, stream), block, "the last one freed comes first, then this");
    lab.free(other);
    lab.heap.unpin(again);
    lab.heap.unpin(pin);
    assert_ne!(lab.touch(MIB, stream), block, "a pin that has ended says nothing of a new block");
    let live = lab.heap.pin(block).unwrap();
    lab.heap.unpin(live);
    assert_eq!(lab.heap.block_at(block), Some((block, MIB)));
}

#[test]
fn a_pinned_block_waits_for_recorded_streams_too() {
    let lab = Lab::new();
    let (one, two) = (lab.stream(), lab.stream());
    let block = lab.alloc(CHUNK, one);
    let pin = lab.heap.pin(block).unwrap();
    lab.heap.record_stream(block, two).unwrap();
    lab.free(block);
    let stall = lab.driver.stall(two);
    lab.heap.unpin(pin);
    assert_ne!(lab.touch(CHUNK, one), block);
    stall.release();
    lab.tick_until("the block", || lab.heap.stats().all.active.current == 0);
}

#[test]
fn a_block_larger_than_a_chunk_spans_several() {
    let lab = Lab::new();
    let stream = lab.stream();
    let bytes = 2 * CHUNK + 4 * MIB;
    let block = lab.alloc(bytes, stream);
    assert_eq!(lab.heap.chunks().iter().map(|chunk| chunk.bytes).collect::<Vec<_>>(), [CHUNK, CHUNK, 4 * MIB]);
    lab.driver.fill(block, 7, bytes, stream).unwrap();
    lab.driver.stream_synchronize(stream).unwrap();
    assert_eq!((byte(block), byte(block + bytes - 1)), (7, 7));
    for inside in [0, 1, CHUNK, bytes - 1] {
        assert_eq!(lab.heap.block_at(block + inside), Some((block, bytes)));
    }
    check_views(&lab.heap, &lab.source);
    lab.free(block);
    assert_eq!(lab.touch(bytes, stream), block, "the same run again");
    assert_eq!(lab.touch(CHUNK + 3 * MIB, stream), block + CHUNK, "the run that wastes least");
    assert_eq!(lab.alloc(CHUNK - 512, stream) % CHUNK, lab.heap.window().base() % CHUNK, "a chunk of it alone");
    assert_eq!(lab.source.counts().granted, 1);
    lab.driver.stream_synchronize(stream).unwrap();
    assert_eq!(lab.heap.empty_cache(), bytes - CHUNK);
}

#[test]
fn a_span_is_not_taken_while_another_stream_uses_part_of_it() {
    let lab = Lab::new();
    let (one, two) = (lab.stream(), lab.stream());
    let block = lab.touch(2 * CHUNK, one);
    let stall = lab.driver.stall(one);
    lab.touch(MIB, one);
    lab.touch(CHUNK, one);
    let other = lab.alloc(2 * CHUNK, two);
    assert_ne!(other, block);
    lab.free(other);
    lab.freeze();
    stall.release();
    lab.driver.stream_synchronize(one).unwrap();
    lab.alloc(4 * CHUNK, two);
    assert_eq!(lab.reserved(), 4 * CHUNK);
}

#[test]
fn a_block_that_fits_lies_in_one_chunk() {
    let (lab, mut dice, mut live) = (Lab::new(), Dice(3), Vec::new());
    let stream = lab.stream();
    for _ in 0..500 {
        let bytes = 1 + dice.roll(CHUNK);
        let block = lab.alloc(bytes, stream);
        let chunks = lab.heap.window().chunks_in(block - lab.heap.window().base(), bytes);
        assert_eq!(chunks.len(), 1, "{bytes} bytes at {block:#x}");
        live.push(block);
        if live.len() > 10 {
            lab.free(live.swap_remove(dice.roll(10) as usize));
        }
    }
}

#[test]
fn trim_leaves_what_queued_work_can_reach() {
    let lab = Lab::new();
    let (one, two) = (lab.stream(), lab.stream());
    let (block, _kept) = (lab.alloc(CHUNK, one), lab.alloc(512, two));
    let stall = lab.driver.stall(one);
    lab.driver.fill(block, 1, CHUNK, one).unwrap();
    lab.free(block);
    assert_eq!(lab.heap.trim(u64::MAX), 0);
    assert_eq!(lab.heap.empty_cache(), 0);
    lab.heap.tick();
    assert_eq!(lab.reserved(), 2 * CHUNK);
    stall.release();
    lab.tick_until("the rest of the trim", || lab.reserved() == CHUNK);
    lab.driver.stream_synchronize(one).unwrap();
    assert_eq!(lab.heap.trim(u64::MAX), 0, "a chunk that is partly used stays");
}

/// Free bytes of several streams, and bytes that another stream was recorded on, are one chunk's all the same.
#[test]
fn a_chunk_is_owed_whoever_its_free_bytes_wait_for() {
    let lab = Lab::new();
    let (one, two) = (lab.stream(), lab.stream());
    let blocks = [lab.alloc(MIB, one), lab.alloc(MIB, one), lab.touch(CHUNK, two)];
    lab.freeze();
    // The second stream gets the rest of the first one's chunk.
    lab.driver.stream_synchronize(two).unwrap();
    let other = lab.alloc(2 * MIB, two);
    let stalls = [lab.driver.stall(one), lab.driver.stall(two)];
    lab.heap.record_stream(blocks[0], two).unwrap();
    let pin = lab.heap.pin(blocks[1]).unwrap();
    [blocks[0], blocks[1], other].into_iter().for_each(|block| lab.free(block));
    let held = lab.heap.give_way(u64::MAX);
    lab.heap.unpin(pin);
    assert_eq!((held, lab.heap.give_way(u64::MAX)), (lab.reserved() - CHUNK, lab.reserved()), "a receiver's block is not on its way");
    drop(stalls);
    lab.tick_until("all to go back", || lab.reserved() == 0);
}

#[test]
fn trim_gives_back_no_more_than_it_was_asked_for() {
    let lab = Lab::new();
    let blocks: Vec<_> = (0..4).map(|_| lab.alloc(CHUNK, Stream::LEGACY)).collect();
    let stall = lab.driver.stall(Stream::LEGACY);
    blocks.iter().for_each(|block| lab.free(*block));
    assert_eq!(lab.heap.trim(CHUNK), 0);
    stall.release();
    lab.tick_until("one chunk", || lab.reserved() < 4 * CHUNK);
    (0..10).for_each(|_| lab.heap.tick());
    assert_eq!(lab.reserved(), 3 * CHUNK);
    assert_eq!(lab.heap.trim(CHUNK + 1), 2 * CHUNK);
}

#[test]
fn an_unmap_that_fails_keeps_its_chunk() {
    let lab = Lab::new();
    let block = lab.touch(CHUNK, Stream::LEGACY);
    lab.driver.fail_nth(HostCall::Unmap, 1, CuResult::UNKNOWN);
    assert_eq!(lab.heap.empty_cache(), 0);
    assert_eq!(lab.reserved(), CHUNK);
    assert_eq!(lab.touch(CHUNK, Stream::LEGACY), block);
    assert_eq!(lab.heap.empty_cache(), CHUNK);
}

#[test]
fn out_of_memory_says_what_is_held_and_everything_works_on() {
    let lab = Lab::new();
    let stream = lab.stream();
    lab.source.set_limit(3 * CHUNK);
    let blocks = [lab.alloc(4 * MIB, stream), lab.alloc(CHUNK, stream)];
    for turn in 1..4 {
        let figures = oom(lab.heap.allocate(2 * CHUNK, stream));
        assert_eq!((figures.asked, figures.allocated, figures.reserved), (2 * CHUNK, 4 * MIB + CHUNK, 2 * CHUNK));
        assert_eq!((figures.limit, figures.largest_free), (Some(3 * CHUNK), 4 * MIB));
        assert_eq!(lab.heap.stats().out_of_memory, turn);
        let text = HeapError::OutOfMemory(Box::new(figures)).to_string();
        assert!(text.starts_with("CUDA out of memory. Tried to allocate 16.00 MiB."), "{text}");
        assert!(text.contains("The limit is reached."), "{text}");
        assert_eq!(lab.touch(3 * MIB, stream), blocks[0] + 4 * MIB);
    }
    blocks.iter().for_each(|block| lab.free(*block));
    lab.alloc(3 * CHUNK, stream);
}

#[test]
fn the_process_s_own_limit_trims_first_and_is_named() {
    let lab = Lab::new();
    lab.heap.set_limit(2 * CHUNK);
    let keep = lab.alloc(CHUNK, Stream::LEGACY);
    lab.touch(CHUNK, Stream::LEGACY);
    lab.free(keep);
    let hole = lab.alloc(512, Stream::LEGACY);
    // One chunk is free and one is not: a span needs two.
    let figures = oom(lab.heap.allocate(CHUNK + 1, Stream::LEGACY));
    assert_eq!((figures.limit, figures.reserved), (Some(2 * CHUNK), CHUNK));
    assert!(figures.detail.contains("own limit"), "{figures:?}");
    lab.free(hole);
    lab.alloc(2 * CHUNK, Stream::LEGACY);
    assert_eq!(lab.reserved(), 2 * CHUNK);
}

#[test]
fn before_it_fails_a_stream_runs_dry() {
    let lab = Lab::with(HeapConfig { drain: std::time::Duration::from_secs(5), ..heap_lab::CONFIG }, |_| None);
    let stream = lab.stream();
    let [a, hole, b] = [(); 3].map(|()| lab.alloc(CHUNK, stream));
    lab.freeze();
    let stall = lab.driver.stall(stream);
    lab.free(a);
    lab.free(b);
    let release = std::thread::spawn(move || stall.release());
    let block = lab.alloc(2 * CHUNK, stream);
    release.join().unwrap();
    assert!(block > hole);
    assert_eq!(lab.reserved(), 3 * CHUNK);
}

#[test]
fn a_growth_holds_a_whole_number_of_the_blocks_that_asked_for_it() {
    let config =
        HeapConfig { chunk_bytes: 64 * MIB, min_growth: 32 * MIB, growth_divisor: 32, own_chunk: 16 * MIB, ..HeapConfig::default() };
    for (bytes, chunk) in [(512, 32), (10 * MIB, 30), (9 * MIB, 28), (5 * MIB / 2, 30), (16 * MIB, 16), (17 * MIB, 18), (64 * MIB, 64)] {
        let lab = Lab::with(config, |_| None);
        lab.alloc(bytes, Stream::LEGACY);
        assert_eq!(lab.reserved(), chunk * MIB, "{bytes}");
    }
}

#[test]
fn a_refused_growth_is_tried_again_without_generosity() {
    let lab = Lab::new();
    lab.source.set_limit(2 * MIB);
    lab.alloc(MIB, Stream::LEGACY);
    assert_eq!(lab.reserved(), 2 * MIB);
    lab.source.refuse(1);
    lab.source.set_limit(4 * MIB);
    lab.alloc(2 * MIB, Stream::LEGACY);
}

#[test]
fn sizes_at_the_edges() {
    let lab = Lab::new();
    let stream = lab.stream();
    assert_eq!(lab.heap.allocate(0, stream), Ok(0));
    assert_eq!(lab.heap.free(0), Ok(()));
    let mut live = Vec::new();
    for bytes in [1, 511, 512, 513, 2 * MIB - 1, 2 * MIB, 2 * MIB + 1, CHUNK - 1, CHUNK, CHUNK + 1] {
        let block = lab.alloc(bytes, stream);
        let (start, size) = lab.heap.block_at(block).unwrap();
        assert!(block.is_multiple_of(512) && start == block && size >= bytes);
        let rounded = if bytes > CHUNK { CHUNK + 2 * MIB } else { bytes.div_ceil(512) * 512 };
        assert_eq!(size, rounded, "{bytes}");
        live.push(block);
    }
    for bytes in [WINDOW + 1, 1 << 41, 1 << 63, u64::MAX] {
        let figures = oom(lab.heap.allocate(bytes, stream));
        assert_eq!(figures.asked, bytes);
    }
    assert_eq!(lab.heap.stats().out_of_memory, 4);
    live.iter().for_each(|block| lab.free(*block));
}

#[test]
fn a_free_of_what_is_not_live_is_refused() {
    let lab = Lab::new();
    let block = lab.alloc(MIB, Stream::LEGACY);
    let base = lab.heap.window().base();
    for addr in [1, 512, base - 512, base + WINDOW, block + 1, block + 512, block + MIB, u64::MAX] {
        assert_eq!(lab.heap.free(addr), Err(HeapError::Foreign { addr }));
    }
    lab.free(block);
    assert_eq!(lab.heap.free(block), Err(HeapError::Foreign { addr: block }));
    assert_eq!(lab.heap.stats().all.allocated_bytes.freed, MIB);
}

#[test]
fn a_growth_that_cannot_be_mapped_leaves_nothing_behind() {
    for call in [HostCall::Import, HostCall::Map, HostCall::SetAccess] {
        for nth in 1..=3 {
            for result in [CuResult::INVALID_VALUE, CuResult::OUT_OF_MEMORY] {
                let lab = Lab::new();
                // Each try is of three chunks with one grant of access; there are three tries at most.
                let step = if call == HostCall::SetAccess { 1 } else { nth };
                (0..3).for_each(|turn| lab.driver.fail_nth(call, step * (turn + 1), result));
                let _ = lab.heap.allocate(3 * CHUNK, Stream::LEGACY);
                let failed = lab.heap.allocate(3 * CHUNK, Stream::LEGACY);
                check_views(&lab.heap, &lab.source);
                let mapped: u64 = lab.heap.window().chunks().iter().map(|chunk| chunk.bytes).sum();
                assert_eq!(mapped, lab.reserved(), "{call:?} {nth} {failed:?}");
                lab.alloc(3 * CHUNK, Stream::LEGACY);
            }
        }
    }
}

#[test]
fn a_mapping_failure_is_reported() {
    let lab = Lab::new();
    (1..4).for_each(|nth| lab.driver.fail_nth(HostCall::Map, nth, CuResult::INVALID_VALUE));
    let Err(HeapError::Failed(said)) = lab.heap.allocate(MIB, Stream::LEGACY) else { panic!("it was mapped") };
    assert!(said.starts_with("1.00 MiB could not be allocated on host memory (HOST-0). ") && said.contains("(1)"), "{said}");
    assert_eq!(lab.reserved(), 0);
    lab.driver.fail_nth(HostCall::Map, 1, CuResult::OUT_OF_MEMORY);
    lab.alloc(MIB, Stream::LEGACY);
}

#[test]
fn statistics_are_those_of_a_mirror() {
    let (lab, mut dice, mut live, mut mirror) = (Lab::new(), Dice(11), Vec::new(), Stats::default());
    // Chunks that came, and that went, so far.
    let moved = || (lab.source.counts().chunks + lab.source.counts().returned, lab.source.counts().returned);
    let mut at_reset = (0, 0);
    for turn in 0..4_000 {
        if live.is_empty() || dice.roll(5) < 3 && live.len() < 60 {
            let most = if dice.roll(2) == 0 { 3 * MIB } else { 200 * KIB };
            let bytes = 1 + dice.roll(most);
            let (block, rounded) = (lab.alloc(bytes, Stream::LEGACY), bytes.div_ceil(512) * 512);
            let pool = if rounded <= MIB { &mut mirror.small } else { &mut mirror.large };
            for pool in [pool, &mut mirror.all] {
                for (stat, n) in [(&mut pool.allocation, 1), (&mut pool.allocated_bytes, rounded), (&mut pool.requested_bytes, bytes)] {
                    stat.current += n;
                    stat.allocated += n;
                    stat.peak = stat.peak.max(stat.current);
                }
                (pool.active, pool.active_bytes) = (pool.allocation, pool.allocated_bytes);
            }
            live.push((block, bytes, rounded));
        } else {
            let (block, bytes, rounded) = live.swap_remove(dice.roll(live.len() as u64) as usize);
            lab.free(block);
            let pool = if rounded <= MIB { &mut mirror.small } else { &mut mirror.large };
            for pool in [pool, &mut mirror.all] {
                for (stat, n) in [(&mut pool.allocation, 1), (&mut pool.allocated_bytes, rounded), (&mut pool.requested_bytes, bytes)] {
                    stat.current -= n;
                    stat.freed += n;
                }
                (pool.active, pool.active_bytes) = (pool.allocation, pool.allocated_bytes);
            }
        }
        if turn == 2_000 {
            lab.heap.reset_peaks();
            lab.heap.reset_accumulated();
            at_reset = moved();
            for pool in [&mut mirror.all, &mut mirror.small, &mut mirror.large] {
                let fields = [&mut pool.allocation, &mut pool.allocated_bytes, &mut pool.requested_bytes];
                for stat in fields.into_iter().chain([&mut pool.active, &mut pool.active_bytes]) {
                    (stat.peak, stat.allocated, stat.freed) = (stat.current, 0, 0);
                }
            }
        }
        if turn % 50 == 0 {
            let mut stats = lab.heap.stats();
            assert_eq!(stats.all.reserved_bytes.current, lab.reserved());
            assert_eq!(stats.all.segment.current, lab.source.counts().chunks);
            let (came, went) = moved();
            assert_eq!((stats.all.segment.allocated, stats.all.segment.freed), (came - at_reset.0, went - at_reset.1));
            assert_eq!(stats.growths, lab.source.counts().granted, "those of all its life");
            for pool in [&mut stats.all, &mut stats.small, &mut stats.large] {
                (pool.segment, pool.reserved_bytes) = Default::default();
            }
            (stats.growths, stats.trims) = (0, 0);
            assert_eq!(stats, mirror);
            check_views(&lab.heap, &lab.source);
        }
    }
    let (pieces, free) = lab.heap.inactive_split();
    let (pieces, free) = (pieces.current, free.current);
    let regions = lab.heap.regions();
    let split = regions.iter().filter(|region| region.blocks.len() > 1 || region.blocks[0].used);
    let gaps: Vec<u64> = split.flat_map(|region| &region.blocks).filter(|block| !block.used).map(|block| block.bytes).collect();
    assert_eq!((free, pieces), (gaps.iter().sum(), gaps.len() as u64));
}

#[test]
fn each_chunk_counts_once_when_it_comes_and_once_when_it_goes() {
    let lab = Lab::new();
    let count = || {
        let stats = lab.heap.stats();
        (stats.all.segment.allocated, stats.all.segment.freed, stats.growths, stats.trims)
    };
    let blocks: Vec<_> = (0..20).map(|_| lab.alloc(CHUNK, Stream::LEGACY)).collect();
    let large = lab.alloc(4 * CHUNK, Stream::LEGACY);
    assert_eq!(count(), (24, 0, 21, 0), "a growth of four chunks is one growth");
    blocks.into_iter().chain([large]).for_each(|block| lab.free(block));
    assert_eq!(lab.heap.empty_cache(), 24 * CHUNK);
    assert_eq!(count(), (24, 24, 21, 1));
    let _kept = lab.alloc(CHUNK, Stream::LEGACY);
    lab.heap.reset_accumulated();
    assert_eq!(count(), (0, 0, 22, 1), "the ledger's and a replay's counts go on");
    lab.touch(2 * CHUNK, Stream::LEGACY);
    assert_eq!(lab.heap.empty_cache(), 2 * CHUNK);
    assert_eq!(count(), (2, 2, 23, 2));
}

#[test]
fn the_peak_of_split_pieces_outlives_them_until_it_is_reset() {
    let lab = Lab::new();
    let stream = lab.stream();
    let blocks: Vec<_> = (0..4).map(|_| lab.alloc(MIB, stream)).collect();
    lab.free(blocks[0]);
    lab.free(blocks[2]);
    let (pieces, bytes) = lab.heap.inactive_split();
    assert_eq!((pieces.current, bytes.current), (3, CHUNK - 2 * MIB), "two holes and the rest");
    lab.free(blocks[1]);
    lab.free(blocks[3]);
    let (pieces, bytes) = lab.heap.inactive_split();
    assert_eq!((pieces.current, pieces.peak, bytes.peak), (0, 3, CHUNK - MIB));
    lab.heap.reset_peaks();
    assert_eq!(lab.heap.inactive_split().1.peak, 0);
}

/// 10^5 blocks, and as many frees, over eight threads: no two that live share a byte.
#[test]
fn many_threads_on_many_streams_share_no_byte() {
    const TURNS: u64 = 12_500;
    let lab = Lab::new();
    let taken: Mutex<BTreeMap<u64, u64>> = Mutex::default();
    let handed: Mutex<Vec<u64>> = Mutex::default();
    let streams: Vec<Stream> = (0..8).map(|_| lab.stream()).collect();
    std::thread::scope(|scope| {
        for (seed, stream) in (1..).zip(&streams) {
            let (lab, taken, handed) = (&lab, &taken, &handed);
            scope.spawn(move || {
                let (mut dice, mut live) = (Dice(seed), Vec::new());
                for turn in 0..TURNS {
                    let bytes = 1 + dice.roll(if turn % 50 == 0 { 2 * CHUNK } else { 300 * KIB });
                    let block = lab.alloc(bytes, *stream);
                    {
                        let mut taken = taken.lock().unwrap();
                        let before = taken.range(..block + bytes).next_back().map(|(at, size)| at + size);
                        assert!(before.is_none_or(|end| end <= block), "two blocks share bytes");
                        taken.insert(block, bytes);
                    }
                    live.push(block);
                    if dice.roll(8) == 0 {
                        lab.heap.record_stream(block, Stream::LEGACY).unwrap();
                    }
                    // A third of the blocks is freed by whichever thread comes next.
                    if live.len() > 20 {
                        let block = live.swap_remove(dice.roll(20) as usize);
                        if dice.roll(3) == 0 {
                            handed.lock().unwrap().push(block);
                        } else {
                            taken.lock().unwrap().remove(&block);
                            lab.free(block);
                        }
                    }
                    let block = handed.lock().unwrap().pop();
                    if let Some(block) = block {
                        taken.lock().unwrap().remove(&block);
                        lab.free(block);
                    }
                    match dice.roll(200) {
                        0 => lab.heap.tick(),
                        1 => _ = lab.heap.trim(CHUNK),
                        2 => _ = lab.heap.block_at(block.unwrap_or_default() + 99),
                        _ => {}
                    }
                }
                for block in live {
                    taken.lock().unwrap().remove(&block);
                    lab.free(block);
                }
            });
        }
    });
    handed.into_inner().unwrap().into_iter().for_each(|block| lab.free(block));
    lab.tick_until("all blocks", || lab.heap.stats().all.active.current == 0);
    assert_eq!(lab.heap.stats().all.allocation.allocated, 8 * TURNS);
    lab.heap.empty_cache();
    assert_eq!(lab.reserved(), 0);
}

#[test]
fn a_block_is_freed_on_another_thread() {
    let lab = Lab::new();
    let stream = lab.stream();
    let block = lab.alloc(MIB, stream);
    let heap = Arc::clone(&lab.heap);
    std::thread::spawn(move || heap.free(block)).join().unwrap().unwrap();
    assert_eq!(lab.alloc(MIB, stream), block);
}

#[test]
fn interior_addresses_are_found_quickly_among_many() {
    let (lab, mut dice) = (Lab::new(), Dice(5));
    let live: Vec<(u64, u64)> = (0..10_000)
        .map(|_| {
            let bytes = 512 * (1 + dice.roll(60));
            (lab.alloc(bytes, Stream::LEGACY), bytes)
        })
        .collect();
    for (block, bytes) in &live {
        for inside in [0, 1, bytes / 2, bytes - 1] {
            assert_eq!(lab.heap.block_at(block + inside), Some((*block, *bytes)));
        }
    }
    for (block, bytes) in live.iter().step_by(2) {
        lab.free(*block);
        assert_eq!(lab.heap.block_at(block + bytes / 2), None);
    }
}
