//! Growths that exchange free chunks for larger ones.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod heap_lab;

use heap_lab::{oom, Dice, Lab, KIB, MIB};
use millpond_allocator::driver::host::HostCall;
use millpond_allocator::driver::{CuResult, Driver, Stream};
use millpond_allocator::heap::{HeapConfig, PoolId};

/// Every block from 2 MiB on gets a chunk of its own, of 64 MiB at most.
const OWN: HeapConfig = HeapConfig {
    chunk_bytes: 64 * MIB,
    min_growth: 2 * MIB,
    growth_divisor: 1 << 20,
    own_chunk: 2 * MIB,
    drain: std::time::Duration::ZERO,
};

/// A lab with free chunks of these sizes in MiB, whose last use was on a stream.
fn lab(stream: impl FnOnce(&Lab) -> Stream, sizes: &[u64]) -> (Lab, Stream) {
    let lab = Lab::with(OWN, |_| None);
    let stream = stream(&lab);
    let blocks: Vec<u64> = sizes.iter().map(|size| lab.alloc(size * MIB, stream)).collect();
    blocks.into_iter().for_each(|block| lab.free(block));
    (lab, stream)
}

fn chunks(lab: &Lab) -> Vec<u64> {
    let mut sizes: Vec<u64> = lab.heap.chunks().iter().map(|chunk| chunk.bytes / MIB).collect();
    sizes.sort_unstable();
    sizes
}

#[test]
fn chunks_that_are_each_too_small_make_one_that_is_not() {
    let (lab, stream) = lab(Lab::stream, &[4, 6, 10, 2]);
    lab.alloc(14 * MIB, stream);
    assert_eq!(chunks(&lab), [2, 6, 14], "the largest, and the smallest that completes it");
    assert_eq!(lab.source.counts().peak, 22 * MIB, "what is reserved never rose");
    let stats = lab.heap.stats();
    assert_eq!((stats.growths, stats.trims, stats.retries), (5, 1, 0));
}

#[test]
fn what_is_not_enough_goes_too() {
    let (lab, stream) = lab(|_| Stream::LEGACY, &[4, 2]);
    lab.alloc(14 * MIB, stream);
    assert_eq!((chunks(&lab), lab.source.counts().peak), (vec![14], 14 * MIB));
}

#[test]
fn little_is_not_worth_it() {
    let (lab, stream) = lab(Lab::stream, &[4, 2]);
    lab.alloc(26 * MIB, stream);
    assert_eq!(chunks(&lab), [2, 4, 26]);
}

#[test]
fn no_chunk_becomes_larger_than_one_may_be() {
    let (lab, stream) = lab(Lab::stream, &[40, 40, 20]);
    lab.alloc(64 * MIB, stream);
    assert_eq!(chunks(&lab), [40, 64], "of 40 and 40 there would be 80");
}

#[test]
fn a_chunk_in_use_stays() {
    let (lab, stream) = lab(Lab::stream, &[4, 6]);
    let used = lab.alloc(KIB, stream);
    let lent = lab.alloc(6 * MIB, stream);
    let pin = lab.heap.pin(lent).unwrap();
    lab.free(lent);
    lab.alloc(8 * MIB, stream);
    assert_eq!(chunks(&lab), [4, 6, 8]);
    lab.heap.unpin(pin);
    lab.free(used);
    lab.alloc(10 * MIB, stream);
    assert_eq!(chunks(&lab), [8, 10]);
}

#[test]
fn what_queued_work_can_reach_stays_until_the_next_time() {
    let (lab, stream) = lab(Lab::stream, &[]);
    let blocks = [4, 6].map(|size| lab.alloc(size * MIB, stream));
    let stall = lab.driver.stall(stream);
    for block in blocks {
        lab.driver.fill(block, 7, 4 * MIB, stream).unwrap();
        lab.free(block);
    }
    lab.alloc(10 * MIB, stream);
    assert_eq!(chunks(&lab), [4, 6, 10], "nobody waits for the stream");
    stall.release();
    lab.driver.stream_synchronize(stream).unwrap();
    lab.alloc(8 * MIB, stream);
    assert_eq!(chunks(&lab), [10, 10]);
}

#[test]
fn what_other_streams_have_finished_with_goes_too() {
    let (lab, stream) = lab(Lab::stream, &[4, 6]);
    let other = lab.stream();
    let hole = lab.touch(2 * MIB, other);
    assert_ne!(hole, 0);
    lab.alloc(10 * MIB, other);
    assert_eq!(chunks(&lab), [10]);
    lab.alloc(2 * MIB, stream);
}

#[test]
fn a_graph_s_chunks_stay_its_own() {
    let pool = PoolId { graph: 1, user: 0 };
    let (lab, stream) = lab(Lab::stream, &[]);
    lab.heap.begin_pool(pool);
    lab.driver.begin_capture(stream).unwrap();
    let blocks = [4, 6].map(|size| lab.alloc(size * MIB, stream));
    blocks.into_iter().for_each(|block| lab.free(block));
    // A capture exchanges nothing, and nobody else exchanges what is the capture's.
    lab.alloc(8 * MIB, stream);
    lab.alloc(10 * MIB, Stream::LEGACY);
    assert_eq!(chunks(&lab), [4, 6, 8, 10]);
    lab.driver.end_capture(stream).unwrap();
    lab.heap.end_pool(pool);
    lab.alloc(10 * MIB, stream);
    assert_eq!(chunks(&lab), [4, 6, 8, 10, 10]);
    lab.heap.release_pool(pool);
}

#[test]
fn a_refusal_in_the_middle_leaves_everything_whole() {
    let (lab, stream) = lab(Lab::stream, &[4, 6]);
    lab.source.set_limit(12 * MIB);
    let figures = oom(lab.heap.allocate(14 * MIB, stream));
    assert_eq!((figures.asked, figures.allocated), (14 * MIB, 0));
    lab.alloc(12 * MIB, stream);
    assert_eq!((chunks(&lab), lab.source.counts().strange), (vec![12], 0));
}

#[test]
fn a_chunk_that_cannot_be_unmapped_is_the_heap_s_again() {
    let (lab, stream) = lab(Lab::stream, &[4, 6]);
    lab.driver.fail_nth(HostCall::Unmap, 1, CuResult::OPERATING_SYSTEM);
    lab.alloc(10 * MIB, stream);
    assert_eq!(chunks(&lab), [6, 10]);
    lab.alloc(6 * MIB, stream);
    assert_eq!(lab.reserved(), 16 * MIB);
}

/// One iteration of some program: blocks of changing sizes come and go, most before its end, a few stay into the next.
fn iterate(lab: &Lab, seed: u64, stay: &mut Vec<u64>) {
    let (mut dice, mut live) = (Dice(seed), Vec::new());
    for _ in 0..200 {
        if dice.roll(5) < 3 || live.is_empty() {
            let bytes = match dice.roll(8) {
                0 => (8 + dice.roll(56)) * MIB,
                1..=3 => (1 + dice.roll(8 * 1024)) * KIB,
                _ => 512 + dice.roll(64 * KIB),
            };
            live.push(lab.alloc(bytes, Stream::LEGACY));
        } else {
            let at = dice.roll(live.len() as u64) as usize;
            lab.free(live.swap_remove(at));
        }
    }
    let kept = live.split_off(live.len().saturating_sub(3));
    live.into_iter().for_each(|block| lab.free(block));
    std::mem::replace(stay, kept).into_iter().for_each(|block| lab.free(block));
}

#[test]
fn a_program_that_repeats_itself_stops_growing() {
    let config = HeapConfig { chunk_bytes: 128 * MIB, min_growth: 8 * MIB, own_chunk: 16 * MIB, ..OWN };
    for seed in 0..20 {
        let lab = Lab::with(config, |_| None);
        let mut stay = Vec::new();
        let mut growths = Vec::new();
        for _ in 0..24 {
            let before = (lab.heap.stats().growths, lab.source.counts());
            // Three phases, each with sizes of its own.
            (0..3).for_each(|phase| iterate(&lab, seed * 1_000 + phase, &mut stay));
            let (grown, counts) = (lab.heap.stats().growths - before.0, lab.source.counts());
            // What is reserved never falls by itself, and a growth that does not raise it makes the chunks fewer.
            assert!(counts.reserved >= before.1.reserved, "seed {seed}: {before:?}, then {counts:?}");
            if grown > 0 {
                assert!(counts.reserved > before.1.reserved || counts.chunks < before.1.chunks, "seed {seed}: {before:?}, then {counts:?}");
            }
            growths.push(grown);
        }
        assert!(lab.source.counts().returned > 0, "seed {seed}: nothing was ever exchanged");
        // The few blocks that stay lie elsewhere each time, so now and then something does not fit.
        assert!(growths[4..].iter().sum::<u64>() <= 5, "seed {seed}: it grows for ever: {growths:?}");
        stay.into_iter().for_each(|block| lab.free(block));
    }
}
