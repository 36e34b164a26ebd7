//! malloc and free by themselves: in a warm heap, and where it grows.

use std::sync::Barrier;
use std::time::{Duration, Instant};

use millpond_allocator::record;
use millpond_ipc::ledger::size;
use millpond_ipc::wire::Role;

use super::party::{text, Owner, Party, GIB, KIB, MIB};
use super::sample::{clock, Sample};
use super::{Figures, Plan};

/// Blocks of the live set.
const LIVE: usize = 1000;

pub(super) fn measure(plan: &Plan<'_>) -> Figures {
    let owner = Owner::start(plan, &[])?;
    let party = owner.attach("parent", Role::Parent)?;
    let mut figures = Vec::new();
    figures.push(("the clock, in each figure".to_owned(), clock()?));
    for threads in [1, 8] {
        for bytes in [KIB, MIB, 64 * MIB] {
            let name = format!("{} pair, {threads} thread{}", size(bytes), if threads == 1 { "" } else { "s" });
            figures.push((name, pairs(&party, threads, bytes, plan.pick(10_000, 100_000))?.json()));
        }
    }
    let recorded = || {
        record::start(record::EVENTS, None).map_err(text)?;
        let recorded = pairs(&party, 1, KIB, plan.pick(10_000, 100_000));
        record::stop();
        recorded
    };
    figures.push((format!("{} pair, 1 thread, both recorded", size(KIB)), recorded()?.json()));
    let (free, malloc) = mixed(&party, plan.pick(50_000, 500_000))?;
    figures.push((format!("malloc, {LIVE} live, 512 B to 4 MiB"), malloc.json()));
    figures.push((format!("free, {LIVE} live, 512 B to 4 MiB"), free.json()));
    Ok(figures)
}

/// malloc and free of one size, each thread on a stream of its own.
fn pairs(party: &Party, threads: usize, bytes: u64, count: u32) -> Result<Sample, String> {
    let barrier = Barrier::new(threads);
    let one = || -> Result<Sample, String> {
        let prepared = party.driver.stream_create().map_err(text).and_then(|stream| {
            for _ in 0..count / 10 {
                party.heap.free(party.heap.allocate(bytes, stream).map_err(text)?).map_err(text)?;
            }
            Ok(stream)
        });
        let mut sample = Sample::new()?;
        // All come here, whatever went wrong.
        barrier.wait();
        let stream = prepared?;
        for _ in 0..count {
            let start = Instant::now();
            let addr = party.heap.allocate(bytes, stream).map_err(text)?;
            party.heap.free(addr).map_err(text)?;
            sample.add(start.elapsed());
        }
        party.driver.stream_destroy(stream).map_err(text)?;
        Ok(sample)
    };
    let found: Vec<_> = std::thread::scope(|scope| {
        let running: Vec<_> = (0..threads).map(|_| scope.spawn(one)).collect();
        running.into_iter().map(|thread| thread.join().unwrap_or_else(|_| Err("a thread panicked".to_owned()))).collect()
    });
    let mut all = Sample::new()?;
    found.into_iter().try_for_each(|sample| all.merge(&sample?))?;
    Ok(all)
}

/// A live set: one is freed, another is made.
fn mixed(party: &Party, count: u32) -> Result<(Sample, Sample), String> {
    let mut seed = 88_172_645_463_325_252_u64;
    let mut random = || {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        seed
    };
    let mut live = Vec::new();
    for _ in 0..LIVE {
        live.push(party.heap.allocate(512 + random() % (4 * MIB), party.stream).map_err(text)?);
    }
    let (mut frees, mut mallocs) = (Sample::new()?, Sample::new()?);
    for turn in 0..count + count / 10 {
        let (slot, bytes) = (random() as usize % LIVE, 512 + random() % (4 * MIB));
        let Some(place) = live.get_mut(slot) else { continue };
        let start = Instant::now();
        party.heap.free(*place).map_err(text)?;
        let between = Instant::now();
        *place = party.heap.allocate(bytes, party.stream).map_err(text)?;
        if turn >= count / 10 {
            mallocs.add(between.elapsed());
            frees.add(between - start);
        }
    }
    live.into_iter().try_for_each(|addr| party.heap.free(addr).map_err(text))?;
    Ok((frees, mallocs))
}

/// 1 GiB at a time from an empty heap to pointers, and back to the owner.
pub(super) fn growth(plan: &Plan<'_>) -> Figures {
    let owner = Owner::start(plan, &[])?;
    let party = owner.attach("parent", Role::Parent)?;
    let (mut first, mut again, mut back) = (Sample::new()?, Sample::new()?, Sample::new()?);
    for turn in 0..plan.pick(2, 10) {
        let mut blocks = Vec::new();
        for _ in 0..8 {
            let start = Instant::now();
            blocks.push(party.heap.allocate(GIB, party.stream).map_err(text)?);
            if turn == 0 { &mut first } else { &mut again }.add(start.elapsed());
        }
        blocks.into_iter().try_for_each(|block| party.heap.free(block).map_err(text))?;
        party.driver.stream_synchronize(party.stream).map_err(text)?;
        let start = Instant::now();
        party.heap.trim(u64::MAX);
        // What a stream may still use goes with a later tick.
        while !party.heap.chunks().is_empty() {
            if start.elapsed() > Duration::from_secs(5) {
                return Err("what nobody uses is not given back within 5 s of a trim".to_owned());
            }
            std::thread::yield_now();
            party.heap.tick();
        }
        back.add(start.elapsed());
    }
    let named = [("malloc of 1 GiB, first", first), ("malloc of 1 GiB, after trims", again), ("trim of 8 GiB", back)];
    Ok(named.into_iter().map(|(name, sample)| (name.to_owned(), sample.json())).collect())
}
