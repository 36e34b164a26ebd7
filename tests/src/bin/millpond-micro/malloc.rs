//! malloc and free by themselves: in a warm heap, and when it grows.

use std::sync::Barrier;
use std::time::{Duration, Instant};

use millpond_ipc::wire::Role;
use millpond_tests::sample::Sample;
use serde_json::{json, Map, Value};

use super::bench::{at, size, text, Bench, Party, GIB, KIB, MIB};
use super::Figures;

/// 1 GiB from an empty heap to a pointer.
pub(crate) fn growth(bench: &Bench) -> Figures {
    let owner = bench.owner(&[])?;
    let party = owner.attach("parent", Role::Parent)?;
    let (mut first, mut again, mut back) = (Sample::default(), Sample::default(), Sample::default());
    let count = if bench.gpu() { bench.pick(8, 24) } else { 8 };
    for (turn, sample) in [(0, &mut first), (1, &mut again)] {
        at(format_args!("round {turn}"));
        let mut blocks = Vec::new();
        for _ in 0..count {
            let start = Instant::now();
            blocks.push(party.heap.allocate(GIB, party.stream).map_err(text)?);
            sample.add(start.elapsed());
        }
        for block in blocks {
            party.heap.free(block).map_err(text)?;
        }
        party.synchronize()?;
        let start = Instant::now();
        party.heap.trim(u64::MAX);
        // What a stream may still use goes from a later tick, by this thread or by the client's own.
        while !party.heap.chunks().is_empty() {
            party.heap.tick();
            if start.elapsed() > Duration::from_secs(2) {
                let left: u64 = party.heap.chunks().iter().map(|chunk| chunk.bytes).sum();
                return Err(format!("of {count} GiB that nobody uses, {left} bytes are not given back within 2 s of a trim"));
            }
        }
        back.add(start.elapsed());
    }
    Ok(json!({ "malloc_1GiB_us": first.json(1e3), "malloc_1GiB_after_trim_us": again.json(1e3), "trim_all_us": back.json(1e3) }))
}

/// malloc and free of one size, by one thread and by eight, each on a stream of its own.
pub(crate) fn pairs(bench: &Bench) -> Figures {
    let owner = bench.owner(&[])?;
    let party = owner.attach("parent", Role::Parent)?;
    let mut figures = Map::new();
    let mut clock = Sample::default();
    for _ in 0..20_000 {
        let start = Instant::now();
        clock.add(start.elapsed());
    }
    figures.insert("clock_ns_included_in_each".to_owned(), json!(clock.quantile(0.5)));
    for threads in [1, 8] {
        for bytes in [KIB, MIB, 64 * MIB] {
            at(format_args!("{threads} threads, {}", size(bytes)));
            figures
                .insert(format!("{threads}_threads_{}_ns", size(bytes)), threads_at(&party, threads, bytes, bench.pick(20_000, 100_000))?);
        }
    }
    at("1,000 live blocks");
    figures.insert("mixed_1000_live_ns".to_owned(), mixed(&party, bench.pick(50_000, 300_000))?);
    Ok(figures.into())
}

fn threads_at(party: &Party, threads: usize, bytes: u64, count: u32) -> Figures {
    let barrier = Barrier::new(threads);
    let one = || -> Result<(Sample, f64), String> {
        let stream = party.driver.stream_create().map_err(text)?;
        for _ in 0..100 {
            party.heap.free(party.heap.allocate(bytes, stream).map_err(text)?).map_err(text)?;
        }
        let mut sample = Sample::default();
        barrier.wait();
        for _ in 0..count {
            let start = Instant::now();
            let addr = party.heap.allocate(bytes, stream).map_err(text)?;
            party.heap.free(addr).map_err(text)?;
            sample.add(start.elapsed());
        }
        let start = Instant::now();
        for _ in 0..count {
            party.heap.free(party.heap.allocate(bytes, stream).map_err(text)?).map_err(text)?;
        }
        let mean = start.elapsed().as_nanos() as f64 / f64::from(count);
        party.driver.stream_destroy(stream).map_err(text)?;
        Ok((sample, mean))
    };
    let found: Vec<_> = std::thread::scope(|scope| {
        let running: Vec<_> = (0..threads).map(|_| scope.spawn(one)).collect();
        running.into_iter().map(|thread| thread.join().unwrap_or_else(|_| Err("a thread panicked".to_owned()))).collect()
    });
    let (mut all, mut means) = (Sample::default(), 0.0);
    for one in found {
        let (sample, mean) = one?;
        all.merge(sample);
        means += mean;
    }
    let mut value = all.json(1.0);
    value["mean_untimed"] = json!((means / threads as f64 * 10.0).round() / 10.0);
    Ok(value)
}

/// A thousand live blocks from 512 B to 4 MiB: one is freed, another is made.
fn mixed(party: &Party, count: u32) -> Figures {
    let mut seed = 88_172_645_463_325_252_u64;
    let mut random = || {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        seed
    };
    let mut live = Vec::new();
    for _ in 0..1000 {
        live.push(party.heap.allocate(512 + random() % (4 * MIB), party.stream).map_err(text)?);
    }
    let mut sample = Sample::default();
    for _ in 0..count {
        let (slot, bytes) = ((random() % 1000) as usize, 512 + random() % (4 * MIB));
        let Some(place) = live.get_mut(slot) else { continue };
        let start = Instant::now();
        party.heap.free(*place).map_err(text)?;
        *place = party.heap.allocate(bytes, party.stream).map_err(text)?;
        sample.add(start.elapsed());
    }
    for addr in live {
        party.heap.free(addr).map_err(text)?;
    }
    let value: Value = sample.json(1.0);
    Ok(value)
}
