//! Hand-off of one tensor, and first use of a peer's memory.

use std::time::{Duration, Instant};

use millpond_ipc::wire::Role;
use millpond_tests::sample::Sample;
use serde_json::{json, Map, Value};

use super::bench::{at, size, text, Bench, GIB, MIB, PATIENCE};
use super::Figures;

/// Send, import, release, answer: from one process to another and back, by size. All blocks are there from the start and the sizes take
/// turns, so that what differs between them is the size.
pub(crate) fn round_trips(bench: &Bench) -> Figures {
    let sizes: &[u64] = match (bench.gpu(), bench.quick) {
        (_, true) => &[MIB, GIB, 6 * GIB],
        // On the host nothing of it is touched.
        (_, false) => &[MIB, 64 * MIB, GIB, 6 * GIB, 16 * GIB, 64 * GIB],
    };
    let owner = bench.owner(&[])?;
    let parent = owner.attach("parent", Role::Parent)?;
    let worker = owner.worker(&parent, "bouncer")?;
    let mut figures = Map::new();
    let (mut tensors, mut failed) = (Vec::new(), Vec::new());
    for bytes in sizes {
        match parent.heap.allocate(*bytes, parent.stream) {
            Ok(addr) => tensors.push((parent.outgoing(addr, *bytes), Sample::default())),
            Err(error) => failed.push(format!("{}: {error}", size(*bytes))),
        }
    }
    for round in 0..=bench.pick(5, 20) {
        for (tensor, sample) in &mut tensors {
            at(format_args!("round trips of {}", size(tensor.bytes)));
            for _ in 0..100 {
                let start = Instant::now();
                parent.send(&worker.channel, "0", &[*tensor])?;
                parent.receive(&worker.channel, PATIENCE)?;
                // The first of each maps it.
                if round > 0 {
                    sample.add(start.elapsed());
                }
            }
        }
    }
    let mut medians = Vec::new();
    for (tensor, sample) in &mut tensors {
        medians.push(sample.quantile(0.5));
        figures.insert(format!("{}_us", size(tensor.bytes)), sample.json(1e3));
    }
    let (least, most) = (medians.iter().min().copied().unwrap_or_default(), medians.iter().max().copied().unwrap_or_default());
    let ends = medians.last().zip(medians.first()).map(|(last, first)| round(*last as f64 / *first as f64));
    figures.insert("p50_largest_size_over_smallest".to_owned(), json!(ends));
    figures.insert("p50_max_over_min".to_owned(), json!(round(most as f64 / least.max(1) as f64)));
    figures.insert("empty_message_us".to_owned(), empty(&parent, &worker)?);
    if failed.is_empty() {
        Ok(figures.into())
    } else {
        Err(format!("{}; the others: {}", failed.join("; "), serde_json::Value::from(figures)))
    }
}

/// The same without a tensor: what the sockets cost.
fn empty(parent: &super::bench::Party, worker: &super::bench::Worker) -> Figures {
    let mut sample = Sample::default();
    for turn in 0..600 {
        let start = Instant::now();
        parent.send(&worker.channel, "0", &[])?;
        parent.receive(&worker.channel, PATIENCE)?;
        if turn >= 100 {
            sample.add(start.elapsed());
        }
    }
    Ok(sample.json(1e3))
}

/// Import of memory that the receiver has not seen, per GiB, by the size of chunks.
pub(crate) fn first_use(bench: &Bench) -> Figures {
    let mut figures = Map::new();
    for chunk in [512 * MIB, GIB, 2 * GIB] {
        at(format_args!("chunks of {}", size(chunk)));
        let owner = bench.owner(&["--chunk-bytes", &chunk.to_string()])?;
        let parent = owner.attach("parent", Role::Parent)?;
        let worker = owner.worker(&parent, "reader")?;
        let small = parent.heap.allocate(MIB, parent.stream).map_err(text)?;
        // The worker's driver, its window and its first import are not what is measured.
        parent.ask(&worker.channel, r#"{"op":"open"}"#, &[parent.outgoing(small, MIB)])?;
        let count = bench.pick(4 * GIB, 12 * GIB) / chunk;
        let mut blocks = Vec::new();
        for _ in 0..count {
            blocks.push(parent.heap.allocate(chunk, parent.stream).map_err(text)?);
        }
        let mut sample = Sample::default();
        for block in &blocks {
            let answer = parent.ask(&worker.channel, r#"{"op":"open"}"#, &[parent.outgoing(*block, chunk)])?;
            per_gib(&answer, chunk, &mut sample)?;
        }
        figures.insert(format!("chunk_{}_ms_per_GiB", size(chunk)), sample.json(1e6));
        for block in blocks {
            parent.heap.free(block).map_err(text)?;
        }
        // The driver's part alone, in the same process.
        let ask = json!({ "op": "map", "bytes": chunk, "count": count });
        let answer = parent.ask(&worker.channel, &ask.to_string(), &[])?;
        let mut driver = Sample::default();
        per_gib(&answer, chunk, &mut driver)?;
        figures.insert(format!("chunk_{}_driver_alone_ms_per_GiB", size(chunk)), driver.json(1e6));
    }
    Ok(figures.into())
}

/// Takes the nanoseconds of an answer, each for a chunk of so many bytes, as those of a GiB.
fn per_gib(answer: &Value, chunk: u64, sample: &mut Sample) -> Result<(), String> {
    let took: Vec<u64> = answer["ns"].as_array().into_iter().flatten().filter_map(Value::as_u64).collect();
    took.iter().for_each(|ns| sample.add(Duration::from_nanos(ns * GIB / chunk)));
    if took.is_empty() {
        return Err(format!("the worker answered {answer}"));
    }
    Ok(())
}

fn round(x: f64) -> f64 {
    (x * 1000.0).round() / 1000.0
}
