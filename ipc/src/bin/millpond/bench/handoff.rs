//! Hand-off of one tensor: to another process and back, by size; and the first use of a peer's memory.

use std::time::Instant;

use millpond_ipc::ledger::size;
use millpond_ipc::wire::Role;

use super::party::{text, Owner, Party, Worker, GIB, MIB, PATIENCE};
use super::sample::Sample;
use super::{Figures, Plan};

pub(super) fn measure(plan: &Plan<'_>) -> Figures {
    let owner = Owner::start(plan, &["--chunk-bytes", "1G"])?;
    let parent = owner.attach("parent", Role::Parent)?;
    let worker = owner.worker(&parent)?;
    let mut figures = Vec::new();
    let count = plan.pick(500, 5000);
    figures.push(("message without a tensor".to_owned(), round_trips(&parent, &worker, None, count)?.json()));
    let sizes: &[u64] = if plan.quick { &[MIB, GIB] } else { &[MIB, 64 * MIB, GIB, 6 * GIB] };
    for bytes in sizes {
        let addr = parent.heap.allocate(*bytes, parent.stream).map_err(text)?;
        // The first one maps, which is a figure of its own.
        let start = Instant::now();
        round_trip(&parent, &worker, Some((addr, *bytes)))?;
        let mut first = Sample::new()?;
        first.add(start.elapsed());
        figures.push((format!("{} there and back, first", size(*bytes)), first.json()));
        figures.push((format!("{} there and back", size(*bytes)), round_trips(&parent, &worker, Some((addr, *bytes)), count)?.json()));
        parent.heap.free(addr).map_err(text)?;
    }
    Ok(figures)
}

fn round_trips(parent: &Party, worker: &Worker, tensor: Option<(u64, u64)>, count: u32) -> Result<Sample, String> {
    let mut sample = Sample::new()?;
    let warm = count / 10;
    for turn in 0..warm + count {
        let start = Instant::now();
        round_trip(parent, worker, tensor)?;
        if turn >= warm {
            sample.add(start.elapsed());
        }
    }
    Ok(sample)
}

fn round_trip(parent: &Party, worker: &Worker, tensor: Option<(u64, u64)>) -> Result<(), String> {
    match tensor {
        Some((addr, bytes)) => parent.send(&worker.channel, &[parent.outgoing(addr, bytes)])?,
        None => parent.send(&worker.channel, &[])?,
    }
    parent.receive(&worker.channel, PATIENCE).map(drop)
}
