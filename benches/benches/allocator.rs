//! The block allocator: TLSF alone, and the heap around it.
#![allow(missing_docs, clippy::unwrap_used)]

use std::hint::black_box;

use criterion::{criterion_group, criterion_main, Criterion};
use millpond_allocator::driver::Stream;
use millpond_allocator::record;
use millpond_allocator::tlsf::Tlsf;
use millpond_benches::{heap, Numbers};

fn tlsf(c: &mut Criterion) {
    let mut tlsf = Tlsf::new();
    let domain = tlsf.add_domain();
    tlsf.add_region(0, 1 << 24, domain, 0).unwrap();
    let mut numbers = Numbers::default();
    let mut live: Vec<_> = (0..1000).map(|_| tlsf.allocate(domain, 1 + numbers.below(8192) as u32).unwrap().handle).collect();
    c.bench_function("tlsf free+allocate, 1000 live", |b| {
        b.iter(|| {
            let slot = numbers.below(1000) as usize;
            tlsf.free(live[slot], domain, 0).unwrap();
            live[slot] = tlsf.allocate(domain, 1 + numbers.below(8192) as u32).unwrap().handle;
        });
    });
}

fn pairs(c: &mut Criterion) {
    let (heap, driver) = heap().unwrap();
    let stream = driver.stream_create().unwrap();
    let mut group = c.benchmark_group("heap malloc+free");
    for bytes in [512, 1 << 20, 64 << 20] {
        group.bench_function(format!("{bytes} B"), |b| {
            b.iter(|| heap.free(heap.allocate(black_box(bytes), stream).unwrap()).unwrap());
        });
    }
    group.finish();
}

fn live_set(c: &mut Criterion) {
    let (heap, driver) = heap().unwrap();
    let stream = driver.stream_create().unwrap();
    let mut numbers = Numbers::default();
    let mut live: Vec<u64> = (0..1000).map(|_| heap.allocate(512 + numbers.below(4 << 20), stream).unwrap()).collect();
    c.bench_function("heap free+malloc, 1000 live, 512 B to 4 MiB", |b| {
        b.iter(|| {
            let slot = numbers.below(1000) as usize;
            heap.free(live[slot]).unwrap();
            live[slot] = heap.allocate(512 + numbers.below(4 << 20), stream).unwrap();
        });
    });
    live.into_iter().for_each(|addr| heap.free(addr).unwrap());
}

fn two_streams(c: &mut Criterion) {
    let (heap, driver) = heap().unwrap();
    let streams = [driver.stream_create().unwrap(), driver.stream_create().unwrap()];
    let mut turn = 0;
    c.bench_function("heap malloc+free, streams in turn", |b| {
        b.iter(|| {
            turn ^= 1;
            heap.free(heap.allocate(1 << 20, streams[turn]).unwrap()).unwrap();
        });
    });
    c.bench_function("heap malloc+free, legacy stream", |b| {
        b.iter(|| heap.free(heap.allocate(1 << 20, Stream::LEGACY).unwrap()).unwrap());
    });
}

fn recorded(c: &mut Criterion) {
    let (heap, driver) = heap().unwrap();
    let stream = driver.stream_create().unwrap();
    let mut group = c.benchmark_group("heap malloc+free, 1 MiB");
    for on in [false, true] {
        if on {
            record::start(record::EVENTS, None).unwrap();
        }
        group.bench_function(if on { "recorded" } else { "not recorded" }, |b| {
            b.iter(|| heap.free(heap.allocate(1 << 20, stream).unwrap()).unwrap());
        });
    }
    record::stop();
    group.finish();
}

criterion_group!(benches, tlsf, pairs, live_set, two_streams, recorded);
criterion_main!(benches);
