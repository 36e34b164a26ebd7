//! How long malloc and free take on the host driver. Figures, not verdicts:
//! `cargo test --release -p millpond-allocator --test heap_speed -- --ignored --nocapture --test-threads=1`

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod heap_lab;

use std::sync::Barrier;
use std::time::Instant;

use heap_lab::{Dice, Lab, KIB, MIB};
use millpond_allocator::driver::{Driver, Stream};
use millpond_allocator::heap::HeapConfig;

const BATCH: u32 = 1_000;

/// Median and 99th percentile of the nanoseconds of one call, over batches.
fn measure(batches: usize, mut batch: impl FnMut()) -> (f64, f64) {
    let mut times: Vec<f64> = (0..batches)
        .map(|_| {
            let start = Instant::now();
            batch();
            start.elapsed().as_secs_f64() * 1e9 / f64::from(BATCH)
        })
        .collect();
    times.sort_by(f64::total_cmp);
    (times[batches / 2], times[batches * 99 / 100])
}

#[test]
#[ignore = "prints figures"]
fn one_thread() {
    let lab = Lab::with(HeapConfig::default(), |_| None);
    let stream = lab.stream();
    for (name, stream) in [("legacy", Stream::LEGACY), ("created", stream)] {
        let (p50, p99) = measure(500, || (0..BATCH).for_each(|_| _ = std::hint::black_box(lab.driver.stream_id(stream))));
        println!("stream_id of the {name} stream on the host driver: {p50:.0} ns, p99 {p99:.0}");
    }
    for (name, bytes) in [("1 KiB", KIB), ("1 MiB", MIB), ("64 MiB", 64 * MIB)] {
        let (p50, p99) = measure(500, || (0..BATCH).for_each(|_| _ = lab.touch(bytes, Stream::LEGACY)));
        println!("malloc+free of {name}: {p50:.0} ns, p99 {p99:.0}");
    }
    let mut dice = Dice(1);
    let mut live: Vec<u64> = (0..1_000).map(|_| lab.alloc(512 << dice.roll(14), Stream::LEGACY)).collect();
    let (p50, p99) = measure(500, || {
        for _ in 0..BATCH {
            let at = dice.roll(1_000) as usize;
            lab.free(live[at]);
            live[at] = lab.alloc(512 << dice.roll(14), Stream::LEGACY);
        }
    });
    println!("free+malloc among 1,000 live blocks of mixed size: {p50:.0} ns, p99 {p99:.0}");
    let many: Vec<u64> = (0..10_000).map(|_| lab.alloc(512 * (1 + dice.roll(100)), Stream::LEGACY)).collect();
    let (p50, p99) = measure(100, || {
        for _ in 0..BATCH {
            std::hint::black_box(lab.heap.block_at(many[dice.roll(10_000) as usize] + 300));
        }
    });
    println!("block_at inside one of 10,000 blocks: {p50:.0} ns, p99 {p99:.0}");
    let start = Instant::now();
    let pieces: usize = lab.heap.regions().iter().map(|region| region.blocks.len()).sum();
    println!("regions() of {pieces} pieces: {:.0} us", start.elapsed().as_secs_f64() * 1e6);
}

#[test]
#[ignore = "prints figures"]
fn eight_threads() {
    let lab = Lab::with(HeapConfig::default(), |_| None);
    let streams: Vec<Stream> = (0..8).map(|_| lab.stream()).collect();
    let ready = Barrier::new(9);
    let start = std::thread::scope(|scope| {
        for stream in &streams {
            scope.spawn(|| {
                ready.wait();
                (0..100 * BATCH).for_each(|_| _ = lab.touch(MIB, *stream));
            });
        }
        ready.wait();
        Instant::now()
    });
    let pairs = f64::from(8 * 100 * BATCH);
    println!("malloc+free of 1 MiB, 8 threads on 8 streams: {:.0} ns a pair over all", start.elapsed().as_secs_f64() * 1e9 / pairs);
    let stats = lab.heap.stats();
    println!("{} growths, {} MiB reserved", stats.growths, stats.all.reserved_bytes.current / MIB);
}
